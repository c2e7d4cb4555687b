package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
)

// stores opens one of each kind. S3 is a real server on loopback; without it
// the layer says that it can't run.
func stores(t *testing.T, run func(t *testing.T, s Store)) {
	t.Run("dir", func(t *testing.T) {
		s, err := Open("file://" + t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		run(t, s)
	})
	t.Run("s3", func(t *testing.T) { run(t, openS3(t, startS3(t), "")) })
	t.Run("s3 with a prefix", func(t *testing.T) { run(t, openS3(t, startS3(t), "/a/b")) })
}

var (
	s3once sync.Once
	s3addr string
	s3err  error
)

// startS3 starts versitygw once for the package.
func startS3(t *testing.T) string {
	t.Helper()
	gw := os.Getenv("VERSITYGW")
	if gw == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	s3once.Do(func() {
		dir, err := os.MkdirTemp("", "sluice-s3-")
		if err != nil {
			s3err = err
			return
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			s3err = err
			return
		}
		s3addr = l.Addr().String()
		l.Close()
		cmd := exec.Command(gw, "--access", "operator", "--secret", "operator-secret", "--port", s3addr, "posix", dir)
		if s3err = cmd.Start(); s3err != nil {
			return
		}
		stop = func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); os.RemoveAll(dir) }
		for range 200 {
			c, err := net.Dial("tcp", s3addr)
			if s3err = err; err == nil {
				c.Close()
				break
			}
			time.Sleep(50 * time.Millisecond) // it is starting
		}
	})
	if s3err != nil {
		t.Fatal(s3err)
	}
	return s3addr
}

var stop = func() {}

func TestMain(m *testing.M) {
	os.Setenv("AWS_ACCESS_KEY_ID", "operator")
	os.Setenv("AWS_SECRET_ACCESS_KEY", "operator-secret")
	code := m.Run()
	stop()
	os.Exit(code)
}

var buckets int

func openS3(t *testing.T, addr, prefix string) Store {
	t.Helper()
	buckets++
	bucket := fmt.Sprintf("bucket-%d", buckets)
	s, err := Open("s3://" + bucket + prefix + "?region=us-east-1&endpoint=" + url.QueryEscape("http://"+addr))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.(*s3).core.Client.MakeBucket(context.Background(), bucket, minio.MakeBucketOptions{Region: "us-east-1"}); err != nil {
		t.Fatal(err)
	}
	return s
}

func TestConformance(t *testing.T) {
	ctx := context.Background()
	stores(t, func(t *testing.T, s Store) {
		put := func(key, body string, c Condition) (string, error) { return PutBytes(ctx, s, key, []byte(body), c) }
		if _, err := s.Get(ctx, "control/serial", 10, ""); !IsNotExist(err) {
			t.Errorf("absent: %v", err)
		}
		if _, err := s.Open(ctx, "control/serial", 0); !IsNotExist(err) {
			t.Errorf("absent, opened: %v", err)
		}
		etag, err := put("control/serial", "0123456789", Condition{})
		if err != nil || etag == "" {
			t.Fatal(etag, err)
		}
		o, err := s.Get(ctx, "control/serial", 10, "")
		if err != nil || string(o.Data) != "0123456789" || o.ETag != etag {
			t.Errorf("exact limit: %q %q, %v", o.Data, o.ETag, err)
		}
		if _, err := s.Get(ctx, "control/serial", 9, ""); !errors.Is(err, ErrTooLarge) {
			t.Errorf("over the limit: %v", err)
		}
		if _, err := s.Get(ctx, "control/serial", 10, etag); !errors.Is(err, ErrNotModified) {
			t.Errorf("not modified: %v", err)
		}
		if _, err := put("control/serial", "new", Condition{}); err != nil {
			t.Error(err)
		}
		if o, err := s.Get(ctx, "control/serial", 10, etag); err != nil || string(o.Data) != "new" {
			t.Errorf("modified: %q, %v", o.Data, err)
		}

		// Conditions.
		if _, err := put("control/x.json", "a", Condition{IfMatch: etag}); !errors.Is(err, ErrConflict) {
			t.Errorf("IfMatch of what is not there: %v", err)
		}
		first, err := put("control/x.json", "a", Condition{IfNone: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := put("control/x.json", "b", Condition{IfNone: true}); !errors.Is(err, ErrConflict) {
			t.Errorf("IfNone of what is there: %v", err)
		}
		if _, err := put("control/x.json", "b", Condition{IfMatch: first}); err != nil {
			t.Errorf("IfMatch: %v", err)
		}
		if _, err := put("control/x.json", "c", Condition{IfMatch: first}); !errors.Is(err, ErrConflict) {
			t.Errorf("IfMatch of an older one: %v", err)
		}
		if o, _ := s.Get(ctx, "control/x.json", 10, ""); string(o.Data) != "b" {
			t.Errorf("after conflicts: %q", o.Data)
		}

		// Streams and ranges.
		big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		if _, err := s.Put(ctx, "bootstrap/edge/1/x", bytes.NewReader(big), int64(len(big)), Condition{IfNone: true}); err != nil {
			t.Fatal(err)
		}
		for _, offset := range []int64{0, 1, 1 << 19, int64(len(big)) - 1} {
			r, err := s.Open(ctx, "bootstrap/edge/1/x", offset)
			if err != nil {
				t.Fatal(offset, err)
			}
			got, err := io.ReadAll(r)
			r.Close()
			if err != nil || !bytes.Equal(got, big[offset:]) || r.Size != int64(len(big)) {
				t.Errorf("from %d: %d bytes of %d, %v", offset, len(got), r.Size, err)
			}
		}

		// A body of another length than promised leaves nothing.
		if _, err := s.Put(ctx, "bootstrap/edge/2/x", strings.NewReader("short"), 10, Condition{}); err == nil {
			t.Error("a short body was taken")
		}
		if _, err := s.Get(ctx, "bootstrap/edge/2/x", 10, ""); !IsNotExist(err) {
			t.Errorf("after a short body: %v", err)
		}

		keys, err := s.List(ctx, "bootstrap/")
		if err != nil || !slices.Equal(keys, []string{"bootstrap/edge/1/x"}) {
			t.Errorf("listing: %v, %v", keys, err)
		}
		if keys, err := s.List(ctx, "status/boxes/"); err != nil || len(keys) != 0 {
			t.Errorf("listing nothing: %v, %v", keys, err)
		}
		for _, key := range []string{"", "/x", "a//b", "a/../b", "..", ".lock", "a/.hidden", "a/", "a%2fb", "a\x00b", strings.Repeat("a/", 300) + "a"} {
			if _, err := put(key, "x", Condition{}); !errors.Is(err, ErrDenied) {
				t.Errorf("writing key %q: %v", key, err)
			}
			if _, err := s.Get(ctx, key, 10, ""); !errors.Is(err, ErrDenied) {
				t.Errorf("reading key %q: %v", key, err)
			}
		}
	})
}

// 32 writers race one key: exactly one wins each round.
func TestRacingWriters(t *testing.T) {
	const writers, rounds = 32, 5
	ctx := context.Background()
	stores(t, func(t *testing.T, s Store) {
		cond := Condition{IfNone: true}
		for round := range rounds {
			won := make(chan string, writers)
			var all sync.WaitGroup
			for w := range writers {
				all.Go(func() {
					etag, err := PutBytes(ctx, s, "control/race", fmt.Appendf(nil, "%d %d", round, w), cond)
					if err == nil {
						won <- etag
					} else if !errors.Is(err, ErrConflict) && !errors.Is(err, ErrTransient) {
						t.Errorf("round %d: %v", round, err)
					}
				})
			}
			all.Wait()
			close(won)
			var winners []string
			for etag := range won {
				winners = append(winners, etag)
			}
			if len(winners) != 1 {
				t.Fatalf("round %d: %d winners", round, len(winners))
			}
			cond = Condition{IfMatch: winners[0]}
		}
	})
}

// Writers without a condition leave one of their bodies, whole, and none fails.
func TestWritersWithoutCondition(t *testing.T) {
	ctx := context.Background()
	stores(t, func(t *testing.T, s Store) {
		var all sync.WaitGroup
		for w := range 8 {
			all.Go(func() {
				for range 10 {
					if _, err := PutBytes(ctx, s, "control/serial", bytes.Repeat([]byte{byte('a' + w)}, 100), Condition{}); err != nil {
						t.Error(err)
					}
					if o, err := s.Get(ctx, "control/serial", 100, ""); err != nil || len(o.Data) != 100 {
						t.Errorf("%d bytes, %v", len(o.Data), err)
					}
				}
			})
		}
		all.Wait()
	})
}

// A server that ignores conditions is found out before the first write that
// counts. versitygw honours them, so this one is made up: it takes every PUT.
func TestServerWithoutConditions(t *testing.T) {
	var written []string
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodPut {
				written = append(written, r.URL.Path)
			}
			w.Header().Set("ETag", `"0"`)
		}))
	}()
	s, err := Open("s3://bucket?region=us-east-1&endpoint=http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := PutBytes(context.Background(), s, "control/x.json", []byte("a"), Condition{IfNone: true}); !errors.Is(err, ErrDenied) || !strings.Contains(err.Error(), "If-None-Match") {
		t.Errorf("got %v", err)
	}
	if slices.ContainsFunc(written, func(p string) bool { return strings.HasSuffix(p, "x.json") }) {
		t.Errorf("it was written all the same: %v", written)
	}
}

// A store that is away is transient, and no error holds a secret.
func TestAway(t *testing.T) {
	s, err := Open("s3://bucket?region=us-east-1&endpoint=http://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_, err = s.Get(ctx, "control/serial", 10, "")
	if !errors.Is(err, ErrTransient) || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v", err)
	}
}

func TestURLs(t *testing.T) {
	for _, u := range []string{"", "x", "file://relative", "file://host/x", "ftp://x/y", "s3://", "s3://b?endpoint=ftp://x", "s3://b?other=1", "s3://key:secret@b", "https://door.example.com"} {
		if _, err := Open(u); err == nil {
			t.Errorf("%q was opened", u)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: a secret is in the error: %v", u, err)
		}
	}
}

// The folder store leaves nothing half-written behind, and follows no link out.
func TestDirIsClean(t *testing.T) {
	dir := t.TempDir()
	s, err := Open("file://" + dir)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = s.Put(context.Background(), "a/b", strings.NewReader("too long"), 3, Condition{})
	if left, _ := os.ReadDir(filepath.Join(dir, "a")); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if err := os.Symlink("/etc", filepath.Join(dir, "out")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(context.Background(), "out/passwd", 1<<20, ""); err == nil {
		t.Error("read through a link")
	}
}
