package hand

import (
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/test/suite"
)

// Whatever becomes of the answer to the write of a pointer, on the way from a real
// S3 server: the command says which of the three it is, and the history has one entry.
func TestLostAnswersOfAnS3Server(t *testing.T) {
	gateway := os.Getenv("VERSITYGW")
	if gateway == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	buckets := t.TempDir()
	address := serveS3(t, gateway, buckets)
	w, m := intercepted(t, buckets, address, "bucket")
	through := s3URL("bucket", strings.TrimPrefix(m.URL, "http://"))
	w.promote(w.bundle("1", script("1")))
	last := "1"
	for name, c := range map[string]struct {
		loses  func(n int64) bool // the nth try's answer
		lands  bool
		status int
		answer int // instead of a cut connection
		says   string
	}{
		"cut after it was written":          {func(n int64) bool { return n == 1 }, true, 0, 0, "already yours"},
		"cut before it was written":         {func(n int64) bool { return n == 1 }, false, 0, 0, ""},
		"cut before, however often":         {func(int64) bool { return true }, false, 1, 0, "try again"},
		"written, and then it says 500":     {func(n int64) bool { return n == 1 }, true, 0, 500, "already yours"},
		"written, and then 503, every time": {func(int64) bool { return true }, true, 0, 503, "already yours"},
		"not written, and it says 503":      {func(n int64) bool { return n <= 2 }, false, 0, 503, ""},
	} {
		version := "v" + strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), ",", "")
		file := w.bundle(version, script(version))
		var tries atomic.Int64
		m.answers(func(rw http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPut || !strings.HasSuffix(r.URL.Path, "/"+pointerKey) {
				return false
			}
			if n := tries.Add(1); !c.loses(n) {
				return false
			}
			if c.lands {
				m.Through.ServeHTTP(httptest.NewRecorder(), r)
			}
			if c.answer != 0 {
				rw.WriteHeader(c.answer)
			} else {
				suite.CutOff(rw)
			}
			return true
		})
		status, out := run(t, "sluice", "update", "-store", through, "-key", w.own()+".key", "-file", file, "-yes")
		if status != c.status || !strings.Contains(out, c.says) {
			t.Errorf("%s: exit status %d, want %d and %q: %s", name, status, c.status, c.says, out)
		}
		if tries.Load() == 0 {
			t.Errorf("%s: nothing was tried", name)
		}
		m.answers(nil)
		p, err := contract.Spoken.DecodePointer(mustPayload(w, w.raw(pointerKey)))
		w.must(err)
		want := version
		if c.status != 0 {
			want = last
		}
		entries := slices.DeleteFunc(append([]contract.Release{p.Payload.Current}, p.Payload.History...), func(r contract.Release) bool { return string(r.Version) != version })
		if string(p.Payload.Current.Version) != want || len(entries) > 1 || c.status == 0 && string(p.Payload.History[0].Version) != last {
			t.Errorf("%s: current is %s, want %s; %d entries of it", name, p.Payload.Current.Version, want, len(entries))
		}
		last = want
	}
}

// A promote stops when the operator's clock is far off that of the store: promotes
// are ordered by their times.
func TestClockOffTheStores(t *testing.T) {
	gateway := os.Getenv("VERSITYGW")
	if gateway == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	buckets := t.TempDir()
	address := serveS3(t, gateway, buckets)
	w, m := intercepted(t, buckets, address, "bucket")
	file := w.bundle("1", script("1"))
	for off, status := range map[time.Duration]int{-6 * time.Minute: 78, 6 * time.Minute: 78, -4 * time.Minute: 0, 4 * time.Minute: 0} {
		m.answers(func(rw http.ResponseWriter, r *http.Request) bool {
			a := httptest.NewRecorder()
			m.Through.ServeHTTP(a, r)
			for name, values := range a.Header() {
				rw.Header()[name] = values
			}
			rw.Header().Set("Date", time.Now().Add(off).UTC().Format(http.TimeFormat))
			rw.WriteHeader(a.Code)
			_, _ = rw.Write(a.Body.Bytes())
			return true
		})
		got, out := run(t, "sluice", "update", "-store", s3URL("bucket", strings.TrimPrefix(m.URL, "http://")), "-key", w.own()+".key", "-file", file, "-yes")
		if got != status || status != 0 && !strings.Contains(out, "off that of s3:") {
			t.Errorf("%s off: exit status %d, want %d: %s", off, got, status, out)
		}
	}
}
