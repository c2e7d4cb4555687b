package hand

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/internal/bundle"
)

// peaks is the most memory, in MiB, that a program may take while an artifact
// of 96 MiB passes through it.
var peaks = []struct {
	program string
	limit   int64
}{{"fetch", 40}, {"verify", 64}, {"stage", 24}, {"apply", 24}}

const artifactSize = 96 << 20

func TestPeakMemory(t *testing.T) {
	if _, err := os.Stat("/usr/bin/time"); err != nil {
		t.Skip("needs the package time: ", err)
	}
	w := newWorld(t)
	file := w.bundle("1", script("1"))
	blob := filepath.Join(w.dir, "edge-1", "share", "blob")
	w.must(os.MkdirAll(filepath.Dir(blob), 0o755))
	noise, err := os.Open("/dev/urandom")
	w.must(err)
	defer noise.Close()
	out, err := os.Create(blob)
	w.must(err)
	_, err = io.CopyN(out, noise, artifactSize)
	w.must(err)
	w.must(out.Close())
	w.ok("sluice", "bundle", filepath.Join(w.dir, "edge-1"), "-o", file)
	w.promote(file)
	store := w.store.String()
	if gw := os.Getenv("VERSITYGW"); gw != "" { // the way of most boxes
		store = s3URL("bucket", serveS3(t, gw, w.dir))
	}
	for _, p := range peaks {
		args := []string{"-root", string(w.root), "-component", "edge"}
		if p.program == "fetch" {
			args = []string{"once", "-root", string(w.root), "-store", store}
		}
		// time(1) forks from a small process: a child of this one would be
		// charged with this one's memory until it has called execve(2).
		figure := filepath.Join(w.dir, "peak")
		c := exec.CommandContext(t.Context(), "/usr/bin/time", append([]string{"-f", "%M", "-o", figure, filepath.Join(bin, p.program)}, args...)...)
		c.Env = append(os.Environ(), "AWS_ACCESS_KEY_ID="+s3User, "AWS_SECRET_ACCESS_KEY="+s3Secret)
		if text, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", p.program, err, text)
		}
		data, err := os.ReadFile(figure)
		w.must(err)
		peak, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		w.must(err)
		peak >>= 10 // KiB
		t.Logf("SHOW peak memory of %s at an artifact of 96 MiB: %d MiB, the limit is %d", p.program, peak, p.limit)
		if peak > p.limit {
			t.Errorf("%s takes %d MiB, more than %d", p.program, peak, p.limit)
		}
	}
	if w.running() != "1" {
		t.Errorf("runs %s", w.running())
	}
	if st, err := os.Stat(file); err != nil || st.Size() < artifactSize || !strings.HasSuffix(file, bundle.Suffix) {
		t.Errorf("the artifact was not of 96 MiB: %v", err)
	}
}

// Who speaks to the S3 server.
const s3User, s3Secret = "operator", "operator-secret"

func s3URL(bucket, address string) string {
	return fmt.Sprintf("s3://%s?region=us-east-1&endpoint=http://%s", bucket, address)
}

// serveS3 serves the buckets of a folder, and returns the address.
func serveS3(t *testing.T, gateway, dir string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	c := exec.Command(gateway, "--access", s3User, "--secret", s3Secret, "--port", address, "--quiet", "posix", dir)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	for range 200 {
		if conn, err := net.Dial("tcp", address); err == nil {
			conn.Close()
			return address
		}
		time.Sleep(50 * time.Millisecond) // it is starting
	}
	t.Fatal("the S3 server does not start")
	return ""
}
