// Package suite is what every store must do, whatever is behind it.
package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/internal/store"
)

var ctx = context.Background()

// Reads is what can be read through a store, of what stands in another, which may
// be the same.
func Reads(t *testing.T, in, s store.Store) {
	t.Helper()
	put := func(key, body string) {
		t.Helper()
		if _, err := store.PutBytes(ctx, in, key, []byte(body), store.Condition{}); err != nil {
			t.Fatal(err)
		}
	}
	const object = "bootstrap/edge/1/x"
	for what, err := range map[string]error{
		"absent":         func() error { _, err := s.Get(ctx, "control/serial", 10, ""); return err }(),
		"absent, opened": func() error { _, err := s.Open(ctx, object, 0); return err }(),
		"absent, from 1": func() error { _, err := s.Open(ctx, object, 1); return err }(),
	} {
		if !store.IsNotExist(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	put("control/serial", "0123456789")
	o, err := s.Get(ctx, "control/serial", 10, "")
	if err != nil || string(o.Data) != "0123456789" || o.ETag == "" {
		t.Errorf("exact limit: %q %q, %v", o.Data, o.ETag, err)
	}
	if _, err := s.Get(ctx, "control/serial", 9, ""); !errors.Is(err, store.ErrTooLarge) {
		t.Errorf("over the limit: %v", err)
	}
	if again, err := s.Get(ctx, "control/serial", 10, o.ETag); !errors.Is(err, store.ErrNotModified) || again.ETag != o.ETag {
		t.Errorf("not modified: %q, %v", again.ETag, err)
	}
	put("control/serial", "new")
	if next, err := s.Get(ctx, "control/serial", 10, o.ETag); err != nil || string(next.Data) != "new" || next.ETag == o.ETag {
		t.Errorf("modified: %q, %v", next.Data, err)
	}
	// Streams and ranges.
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	if _, err := in.Put(ctx, object, bytes.NewReader(big), int64(len(big)), store.Condition{IfNone: true}); err != nil {
		t.Fatal(err)
	}
	tags := map[string]bool{}
	for _, offset := range []int64{0, 1, 1 << 19, int64(len(big)) - 1} {
		r, err := s.Open(ctx, object, offset)
		if err != nil {
			t.Fatal(offset, err)
		}
		got, err := io.ReadAll(r)
		r.Close()
		if err != nil || !bytes.Equal(got, big[offset:]) || r.Size != int64(len(big)) {
			t.Errorf("from %d: %d bytes of %d, %v", offset, len(got), r.Size, err)
		}
		tags[r.ETag] = true
	}
	for _, offset := range []int64{int64(len(big)), int64(len(big)) + 1} {
		if _, err := s.Open(ctx, object, offset); !errors.Is(err, store.ErrRange) {
			t.Errorf("from %d: %v", offset, err)
		}
	}
	if len(tags) != 1 || tags[""] {
		t.Errorf("ETags of one object: %v", tags)
	}
	for _, key := range []string{"", "/x", "a//b", "a/../b", "..", ".lock", "a/.hidden", "a/", "a%2fb", "a\x00b", "a b", "a?b", "a#b", "a\\b", strings.Repeat("a/", 300) + "a"} {
		if _, err := s.Get(ctx, key, 10, ""); !errors.Is(err, store.ErrDenied) {
			t.Errorf("reading key %q: %v", key, err)
		}
		if _, err := s.Open(ctx, key, 0); !errors.Is(err, store.ErrDenied) {
			t.Errorf("opening key %q: %v", key, err)
		}
		if _, err := store.PutBytes(ctx, s, key, []byte("x"), store.Condition{}); !errors.Is(err, store.ErrDenied) {
			t.Errorf("writing key %q: %v", key, err)
		}
	}
}

// Writes is what a store that an operator writes to must do.
func Writes(t *testing.T, s store.Store) {
	t.Helper()
	put := func(key, body string, c store.Condition) (string, error) {
		return store.PutBytes(ctx, s, key, []byte(body), c)
	}
	if _, err := put("control/x.json", "a", store.Condition{IfMatch: "0123456789abcdef0123456789abcdef"}); !errors.Is(err, store.ErrConflict) {
		t.Errorf("IfMatch of what is not there: %v", err)
	}
	first, err := put("control/x.json", "a", store.Condition{IfNone: true})
	if err != nil {
		t.Fatal(err)
	}
	if o, err := s.Get(ctx, "control/x.json", 10, ""); err != nil || o.ETag != first {
		t.Errorf("written as %q, read as %q, %v", first, o.ETag, err)
	}
	if _, err := put("control/x.json", "b", store.Condition{IfNone: true}); !errors.Is(err, store.ErrConflict) {
		t.Errorf("IfNone of what is there: %v", err)
	}
	if _, err := put("control/x.json", "b", store.Condition{IfMatch: first}); err != nil {
		t.Errorf("IfMatch: %v", err)
	}
	if _, err := put("control/x.json", "c", store.Condition{IfMatch: first}); !errors.Is(err, store.ErrConflict) {
		t.Errorf("IfMatch of an older one: %v", err)
	}
	if o, _ := s.Get(ctx, "control/x.json", 10, ""); string(o.Data) != "b" {
		t.Errorf("after conflicts: %q", o.Data)
	}
	// A body of another length than promised leaves nothing.
	for what, size := range map[string]int64{"shorter": 10, "longer": 3} {
		key := "bootstrap/rim/2/" + what
		if _, err := s.Put(ctx, key, strings.NewReader("five!"), size, store.Condition{}); err == nil {
			if o, err := s.Get(ctx, key, 10, ""); what == "shorter" || err != nil || string(o.Data) != "fiv" {
				t.Errorf("a body that is %s than promised was taken: %q", what, o.Data)
			}
		} else if _, err := s.Get(ctx, key, 10, ""); !store.IsNotExist(err) {
			t.Errorf("after a body that is %s than promised: %v", what, err)
		}
	}
	if _, err := put("bootstrap/hub/1/x", "1", store.Condition{}); err != nil {
		t.Fatal(err)
	}
	if keys, err := s.List(ctx, "bootstrap/hub/"); err != nil || !slices.Equal(keys, []string{"bootstrap/hub/1/x"}) {
		t.Errorf("listing: %v, %v", keys, err)
	}
	if keys, err := s.List(ctx, "status/boxes/"); err != nil || len(keys) != 0 {
		t.Errorf("listing nothing: %v, %v", keys, err)
	}
	race(t, s)
	noCondition(t, s)
}

// 32 writers race one key: exactly one wins each round.
func race(t *testing.T, s store.Store) {
	t.Helper()
	const writers, rounds = 32, 5
	cond := store.Condition{IfNone: true}
	for round := range rounds {
		won := make(chan string, writers)
		var all sync.WaitGroup
		for w := range writers {
			all.Go(func() {
				etag, err := store.PutBytes(ctx, s, "control/race", fmt.Appendf(nil, "%d %d", round, w), cond)
				if err == nil {
					won <- etag
				} else if !errors.Is(err, store.ErrConflict) && !errors.Is(err, store.ErrTransient) {
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
		cond = store.Condition{IfMatch: winners[0]}
	}
}

// Writers without a condition leave one of their bodies, whole, and none fails.
func noCondition(t *testing.T, s store.Store) {
	t.Helper()
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for range 10 {
				if _, err := store.PutBytes(ctx, s, "control/serial", bytes.Repeat([]byte{byte('a' + w)}, 100), store.Condition{}); err != nil {
					t.Error(err)
				}
				if o, err := s.Get(ctx, "control/serial", 100, ""); err != nil || len(o.Data) != 100 {
					t.Errorf("%d bytes, %v", len(o.Data), err)
				}
			}
		})
	}
	all.Wait()
}

// A Wire stands between a client and a server, and spoils what goes over it.
type Wire struct {
	*httptest.Server
	Through http.Handler // to the server, unspoiled

	mu    sync.Mutex
	spoil func(w http.ResponseWriter, r *http.Request) bool // reports whether it has answered
}

// NewWire makes a wire to a server, with TLS if secure.
func NewWire(t *testing.T, to *url.URL, transport http.RoundTripper, secure func(*httptest.Server)) *Wire {
	t.Helper()
	w := &Wire{}
	w.Through = &httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Host = r.In.Host // it is part of what S3 signs
	}}
	w.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		spoil := w.spoil
		w.mu.Unlock()
		if spoil == nil || !spoil(rw, r) {
			w.Through.ServeHTTP(rw, r)
		}
	}))
	if secure != nil {
		secure(w.Server)
	} else {
		w.Start()
	}
	t.Cleanup(w.Close)
	return w
}

// Spoil makes the wire answer by a rule from now on; nil: honestly.
func (w *Wire) Spoil(rule func(w http.ResponseWriter, r *http.Request) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.spoil = rule
}

// CutOff ends a connection without a word.
func CutOff(w http.ResponseWriter) {
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		conn.Close()
	}
}

// Faults is what a store over a wire makes of what goes wrong there. in is the
// same store, without the wire. It writes only below heartbeat, a key that may be
// written.
func Faults(t *testing.T, in, s store.Store, wire *Wire, heartbeat string) {
	t.Helper()
	object, key := bytes.Repeat([]byte("0123456789abcdef"), 1<<14), "bootstrap/faulty/1/x"
	if _, err := in.Put(ctx, key, bytes.NewReader(object), int64(len(object)), store.Condition{IfNone: true}); err != nil {
		t.Fatal(err)
	}
	defer wire.Spoil(nil)
	// Cut at each tenth of the body, and resumed there.
	for tenth := range int64(10) {
		n := int64(len(object)) * tenth / 10
		wire.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("ETag", `"cut"`)
			w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
			w.Header().Set("Content-Length", fmt.Sprint(len(object)))
			_, _ = w.Write(object[:n])
			_ = http.NewResponseController(w).Flush()
			CutOff(w)
			return true
		})
		body, err := s.Open(ctx, key, 0)
		if err != nil {
			t.Fatalf("cut at %d: %v", n, err)
		}
		got, err := io.ReadAll(body)
		body.Close()
		if err == nil || int64(len(got)) > n || !bytes.Equal(got, object[:len(got)]) {
			t.Errorf("cut at %d: %d bytes, %v", n, len(got), err)
		}
		wire.Spoil(nil)
		if body, err = s.Open(ctx, key, int64(len(got))); err != nil {
			t.Fatalf("resumed at %d: %v", len(got), err)
		}
		rest, err := io.ReadAll(body)
		body.Close()
		if err != nil || !bytes.Equal(append(got, rest...), object) {
			t.Errorf("resumed at %d: %d bytes more, %v", len(got), len(rest), err)
		}
	}
	// A body that comes slower than is put up with is given up, by whoever reads it.
	wire.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("ETag", `"slow"`)
		w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		w.Header().Set("Content-Length", fmt.Sprint(len(object)))
		for n := 0; n < len(object) && r.Context().Err() == nil; n += store.Slowest / 8 {
			_, _ = w.Write(object[n : n+store.Slowest/8])
			_ = http.NewResponseController(w).Flush()
			select {
			case <-time.After(time.Second):
			case <-r.Context().Done():
			}
		}
		return true
	})
	slow, giveUp := context.WithCancel(ctx)
	defer giveUp()
	patience := store.NewPatience(giveUp)
	defer patience.Stop()
	body, err := s.Open(slow, key, 0)
	if err != nil {
		t.Fatal(err)
	}
	got, buf := 0, make([]byte, store.Slowest)
	for err == nil {
		var n int
		n, err = body.Read(buf)
		got += n
		patience.Got(n)
	}
	body.Close()
	if errors.Is(err, io.EOF) || slow.Err() == nil || got == 0 {
		t.Errorf("a slow body: %d bytes, %v", got, err)
	}
	// A body that is longer or shorter than the caller puts up with.
	wire.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("ETag", `"long"`)
		w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		_, _ = w.Write(make([]byte, 11))
		return true
	})
	if _, err := s.Get(ctx, "control/serial", 10, ""); !errors.Is(err, store.ErrTooLarge) {
		t.Errorf("a longer body: %v", err)
	}
	wire.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
		w.Header().Set("ETag", `"short"`)
		w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		w.Header().Set("Content-Length", "10")
		_, _ = w.Write(make([]byte, 5))
		_ = http.NewResponseController(w).Flush()
		CutOff(w)
		return true
	})
	if _, err := s.Get(ctx, "control/serial", 10, ""); !errors.Is(err, store.ErrTransient) {
		t.Errorf("a shorter body: %v", err)
	}
	for status, want := range map[int]error{409: store.ErrConflict, 412: store.ErrConflict, 429: store.ErrTransient, 500: store.ErrTransient, 503: store.ErrTransient, 403: store.ErrDenied} {
		wire.Spoil(func(w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(status)
			return true
		})
		if _, err := store.PutBytes(ctx, s, heartbeat, []byte("{}"), store.Condition{}); !errors.Is(err, want) {
			t.Errorf("%d on a write: %v, want %v", status, err, want)
		}
		if _, err := s.Open(ctx, key, 0); err == nil {
			t.Errorf("%d on a read: no error", status)
		}
	}
	// The reply to a write that landed is lost: it has happened, and is told as not
	// known; or a retry below has found it.
	wire.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut {
			return false
		}
		wire.Through.ServeHTTP(httptest.NewRecorder(), r)
		CutOff(w)
		return true
	})
	if _, err := store.PutBytes(ctx, s, heartbeat, []byte(`{"landed":1}`), store.Condition{}); err != nil && !errors.Is(err, store.ErrTransient) {
		t.Errorf("a lost reply: %v", err)
	}
	wire.Spoil(nil)
	if o, err := in.Get(ctx, heartbeat, 100, ""); err != nil || string(o.Data) != `{"landed":1}` {
		t.Errorf("a lost reply: %q is there, %v", o.Data, err)
	}
}
