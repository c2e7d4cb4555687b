package store_test

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/minio/minio-go/v7/pkg/credentials"

	"sluice/internal/store"
	"sluice/test/suite"
)

// One suite for every store that an operator may write to. That of a door is
// beside the door.
func TestSuite(t *testing.T) {
	dir := func(t *testing.T) store.Store {
		s, err := store.Open("file://" + t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	part := func(t *testing.T, s store.Store) store.Store {
		p, err := store.Prefix(s, "fleets/acme/")
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for name, open := range map[string]func(t *testing.T) store.Store{
		"dir":              dir,
		"prefix of dir":    func(t *testing.T) store.Store { return part(t, dir(t)) },
		"s3":               func(t *testing.T) store.Store { return openS3(t, startS3(t), "") },
		"s3 with a prefix": func(t *testing.T) store.Store { return openS3(t, startS3(t), "/a/b") },
		"prefix of s3":     func(t *testing.T) store.Store { return part(t, openS3(t, startS3(t), "")) },
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			suite.Reads(t, s, s)
			suite.Writes(t, s)
		})
	}
}

// What goes wrong on the way to an S3 server.
func TestFaultsOfS3(t *testing.T) {
	address := startS3(t)
	direct := openS3(t, address, "")
	wire := suite.NewWire(t, &url.URL{Scheme: "http", Host: address}, nil, nil)
	through, err := store.Open(strings.Replace(direct.String(), url.QueryEscape("http://"+address), url.QueryEscape(wire.URL), 1))
	if err != nil {
		t.Fatal(err)
	}
	suite.Faults(t, direct, through, wire, "status/boxes/box-1.json")
}

// A prefix is a wall: nothing beside it is seen or written.
func TestPrefixIsAWall(t *testing.T) {
	ctx := context.Background()
	whole, err := store.Open("file://" + t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	acme, err := store.Prefix(whole, "fleets/acme/")
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"control/serial", "fleets/acme/control/serial", "fleets/acmeplus/control/serial"} {
		if _, err := store.PutBytes(ctx, whole, key, []byte(key), store.Condition{}); err != nil {
			t.Fatal(err)
		}
	}
	if o, err := acme.Get(ctx, "control/serial", 100, ""); err != nil || string(o.Data) != "fleets/acme/control/serial" {
		t.Errorf("%q, %v", o.Data, err)
	}
	if keys, err := acme.List(ctx, "control/"); err != nil || !slices.Equal(keys, []string{"control/serial"}) {
		t.Errorf("%v, %v", keys, err)
	}
	for _, key := range []string{"../acmeplus/control/serial", "../../control/serial", "/control/serial", "./control/serial"} {
		if _, err := acme.Get(ctx, key, 100, ""); !errors.Is(err, store.ErrDenied) {
			t.Errorf("%q: %v", key, err)
		}
		if _, err := store.PutBytes(ctx, acme, key, nil, store.Condition{}); !errors.Is(err, store.ErrDenied) {
			t.Errorf("%q: %v", key, err)
		}
	}
	for _, part := range []string{"", "fleets", "../", "/", "fleets//", "fleets/../"} {
		if _, err := store.Prefix(whole, part); err == nil {
			t.Errorf("%q is a prefix", part)
		}
	}
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

func openS3(t *testing.T, addr, prefix string) store.Store {
	t.Helper()
	buckets++
	bucket := fmt.Sprintf("bucket-%d", buckets)
	s, err := store.Open("s3://" + bucket + prefix + "?region=us-east-1&endpoint=" + url.QueryEscape("http://"+addr))
	if err != nil {
		t.Fatal(err)
	}
	client, err := minio.New(addr, &minio.Options{Creds: credentials.NewStaticV4("operator", "operator-secret", "")})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.MakeBucket(context.Background(), bucket, minio.MakeBucketOptions{Region: "us-east-1"}); err != nil {
		t.Fatal(err)
	}
	return s
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
	s, err := store.Open("s3://bucket?region=us-east-1&endpoint=http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.PutBytes(context.Background(), s, "control/x.json", []byte("a"), store.Condition{IfNone: true}); !errors.Is(err, store.ErrDenied) || !strings.Contains(err.Error(), "If-None-Match") {
		t.Errorf("got %v", err)
	}
	if slices.ContainsFunc(written, func(p string) bool { return strings.HasSuffix(p, "x.json") }) {
		t.Errorf("it was written all the same: %v", written)
	}
}

// A store that is away is transient, and no error holds a secret.
func TestAway(t *testing.T) {
	s, err := store.Open("s3://bucket?region=us-east-1&endpoint=http://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	_, err = s.Get(ctx, "control/serial", 10, "")
	if !errors.Is(err, store.ErrTransient) || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v", err)
	}
}

func TestURLs(t *testing.T) {
	for _, u := range []string{"", "x", "file://relative", "file://host/x", "ftp://x/y", "s3://", "s3://b?endpoint=ftp://x", "s3://b?other=1", "s3://key:secret@b", "https://", "https://door.example.com?x=1", "https://door.example.com/a/../b", "http://door.example.com"} {
		if _, err := store.Open(u); err == nil {
			t.Errorf("%q was opened", u)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: a secret is in the error: %v", u, err)
		}
	}
}

// The folder store leaves nothing half-written behind, and follows no link out.
func TestDirIsClean(t *testing.T) {
	dir := t.TempDir()
	s, err := store.Open("file://" + dir)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = s.Put(context.Background(), "a/b", strings.NewReader("too long"), 3, store.Condition{})
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
