package door

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/store"
	"sluice/internal/token"
	"sluice/test/suite"
)

// counting counts what a door asks its store, but for the tokens.
type counting struct {
	store.Store
	asked atomic.Int64
}

func (c *counting) Get(ctx context.Context, key string, limit int64, unless string) (store.Object, error) {
	if key != token.Key {
		c.asked.Add(1)
	}
	return c.Store.Get(ctx, key, limit, unless)
}

func (c *counting) Open(ctx context.Context, key string, offset int64) (*store.Stream, error) {
	c.asked.Add(1)
	return c.Store.Open(ctx, key, offset)
}

func (c *counting) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond store.Condition) (string, error) {
	c.asked.Add(1)
	return c.Store.Put(ctx, key, body, size, cond)
}

// A house is a store, its door, and who signs certificates for both.
type house struct {
	t      *testing.T
	store  *counting
	door   *Door
	server *httptest.Server
	ca     *suite.Authority
}

func newHouse(t *testing.T) *house {
	t.Helper()
	s, err := store.Open("file://" + t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t, store: &counting{Store: s}}
	h.ca = suite.NewAuthority(t)
	h.door = &Door{Store: h.store, Domain: "example.com", Log: slog.New(slog.DiscardHandler), Poll: 5 * time.Millisecond}
	h.door.callers.burst, h.door.strangers.burst = 1_000_000, 1_000_000
	ctx, stop := context.WithCancel(context.Background())
	h.door.Run(ctx)
	h.server = httptest.NewUnstartedServer(nil)
	h.server.Config = h.door.Server()
	h.server.TLS = &tls.Config{MinVersion: tls.VersionTLS13, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: h.ca.Pool, Certificates: []tls.Certificate{h.ca.Pair("127.0.0.1")}}
	h.server.StartTLS()
	t.Cleanup(func() { stop(); h.server.Close() })
	return h
}

// identity writes what a box proves itself with to a folder.
func (h *house) identity(token string, cert *tls.Certificate) store.Identity {
	h.t.Helper()
	dir := h.t.TempDir()
	write := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			h.t.Fatal(err)
		}
	}
	write(store.DoorCAFile, h.ca.PEM)
	if token != "" {
		write(store.TokenFile, []byte(token+"\n"))
	}
	if cert != nil { // client.crt and client.key
		h.ca.Write(dir, "client", *cert)
	}
	return func(name string) string { return filepath.Join(dir, name) }
}

func (h *house) token(label contract.Label, fleet string) string {
	h.t.Helper()
	made, err := token.Make(context.Background(), h.store, label, fleet, time.Now())
	if err != nil {
		h.t.Fatal(err)
	}
	h.door.loadTokens(context.Background())
	return made
}

func (h *house) client(at string, id store.Identity) store.Store {
	h.t.Helper()
	s, err := store.OpenAs(at, id)
	if err != nil {
		h.t.Fatal(err)
	}
	return s
}

// The suite of all stores, through a door: for a box of the whole store, known by a
// token or by a certificate, and for one of a fleet.
func TestSuite(t *testing.T) {
	for name, open := range map[string]func(h *house) (in, s store.Store){
		"token": func(h *house) (store.Store, store.Store) {
			return h.store, h.client(h.server.URL, h.identity(h.token("box-1", ""), nil))
		},
		"certificate": func(h *house) (store.Store, store.Store) {
			pair := h.ca.Pair("box-1", "spiffe://example.com/box/box-1")
			return h.store, h.client(h.server.URL, h.identity("", &pair))
		},
		"token of a fleet": func(h *house) (store.Store, store.Store) {
			in, err := store.Prefix(h.store, "fleets/acme/")
			if err != nil {
				h.t.Fatal(err)
			}
			return in, h.client(h.server.URL+"/fleets/acme", h.identity(h.token("box-1", "acme"), nil))
		},
		"certificate of a fleet": func(h *house) (store.Store, store.Store) {
			in, err := store.Prefix(h.store, "fleets/acme/")
			if err != nil {
				h.t.Fatal(err)
			}
			pair := h.ca.Pair("box-1", "spiffe://example.com/fleet/acme/box/box-1")
			return in, h.client(h.server.URL+"/fleets/acme", h.identity("", &pair))
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t)
			h.t = t
			in, s := open(h)
			suite.Reads(t, in, s)
			beat := []byte(`{"schema":"1.0"}`)
			if _, err := store.PutBytes(context.Background(), s, "status/boxes/box-1.json", beat, store.Condition{}); err != nil {
				t.Error(err)
			}
			if o, err := in.Get(context.Background(), "status/boxes/box-1.json", 100, ""); err != nil || !bytes.Equal(o.Data, beat) {
				t.Errorf("%q, %v", o.Data, err)
			}
			for _, key := range []string{"status/boxes/box-2.json", "control/serial", "control/system/edge/stable.json", "bootstrap/edge/1/y"} {
				if _, err := store.PutBytes(context.Background(), s, key, beat, store.Condition{}); !errors.Is(err, store.ErrDenied) {
					t.Errorf("%s: %v", key, err)
				}
			}
			if _, err := s.List(context.Background(), "control/"); !errors.Is(err, store.ErrDenied) {
				t.Errorf("listing: %v", err)
			}
		})
	}
}

func TestFaults(t *testing.T) {
	h := newHouse(t)
	to, err := url.Parse(h.server.URL)
	if err != nil {
		t.Fatal(err)
	}
	id := h.identity(h.token("box-1", ""), nil)
	wire := suite.NewWire(t, to, h.server.Client().Transport, func(s *httptest.Server) {
		s.TLS = &tls.Config{Certificates: []tls.Certificate{h.ca.Pair("127.0.0.1")}}
		s.StartTLS()
	})
	suite.Faults(t, h.store, h.client(wire.URL, id), wire, "status/boxes/box-1.json")
	// A door that asks to be left alone is.
	asked := 0
	wire.Spoil(func(w http.ResponseWriter, _ *http.Request) bool {
		asked++
		w.Header().Set("Retry-After", "3600")
		w.WriteHeader(http.StatusServiceUnavailable)
		return true
	})
	s := h.client(wire.URL, id)
	for range 5 {
		if _, err := s.Get(context.Background(), "control/serial", 10, ""); !errors.Is(err, store.ErrTransient) {
			t.Error(err)
		}
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	// Nobody is sent elsewhere.
	wire.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
		http.Redirect(w, r, "https://127.0.0.1:1/", http.StatusTemporaryRedirect)
		return true
	})
	if _, err := h.client(wire.URL, id).Get(context.Background(), "control/serial", 10, ""); !errors.Is(err, store.ErrTransient) || !strings.Contains(err.Error(), "307") {
		t.Error(err)
	}
	// Nor spoken to by whom nobody vouches for.
	stranger := httptest.NewTLSServer(http.NotFoundHandler())
	defer stranger.Close()
	stranger.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	if _, err := h.client(stranger.URL, id).Get(context.Background(), "control/serial", 10, ""); !errors.Is(err, store.ErrTransient) || !strings.Contains(err.Error(), "certificate") {
		t.Error(err)
	}
}

// raw sends bytes and returns the status of the answer; 0: no answer.
func (h *house) raw(cert *tls.Certificate, text string) int {
	h.t.Helper()
	config := &tls.Config{InsecureSkipVerify: true}
	if cert != nil {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil } // also one that was not asked for
	}
	conn, err := tls.Dial("tcp", h.server.Listener.Addr().String(), config)
	if err != nil {
		return 0
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(3 * time.Second))
	if _, err := io.WriteString(conn, text); err != nil {
		return 0
	}
	a, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0
	}
	a.Body.Close()
	return a.StatusCode
}

// Hostile paths, encodings, methods, headers and callers: each is refused before
// the store is asked.
func TestHostileRequests(t *testing.T) {
	h := newHouse(t)
	for _, key := range []string{"control/serial", "control/system/edge/stable.json", "control/trust/1.json", "bootstrap/edge/1/x", "control/secret", "fleets/acme/control/serial", "status/boxes/box-2.json"} {
		if _, err := store.PutBytes(context.Background(), h.store, key, []byte("secret"), store.Condition{}); err != nil {
			t.Fatal(err)
		}
	}
	own, acme := h.token("box-1", ""), h.token("box-9", "acme")
	auth := "Authorization: Bearer " + own + "\r\n"
	const host = "Host: door.example.com\r\n"
	get := func(target string) string { return "GET " + target + " HTTP/1.1\r\n" + host + auth + "\r\n" }
	type attempt struct {
		text string
		cert *tls.Certificate
	}
	tries := map[string]attempt{}
	add := func(name, text string) { tries[name] = attempt{text, nil} }
	// Paths and encodings.
	for _, p := range []string{"/", "//", "/.", "/..", "/%2e", "/%2e%2e", "/control", "/control/", "/control//serial", "//control/serial", "/control/serial/", "/control/./serial", "/control/../control/serial",
		"/control/%73erial", "/control%2fserial", "/control%2Fserial", "/control\\serial", "/control/serial%00", "/control/serial%0a", "/control/serial%20", "/control/serial;x=1", "/control/serial#x", "/Control/serial", "/CONTROL/SERIAL",
		"/control/serial.json", "/control/secret", "/control/door/tokens.json", "/control/conditional-write-probe", "/control/system", "/control/system/", "/control/system/edge", "/control/system/edge/", "/control/system/edge/stable",
		"/control/system/edge/stable.json/", "/control/system/edge/stable.json.bak", "/control/system/edge/.json", "/control/system/edge/stable.v1.json", "/control/system/edge/stable.v02.json", "/control/system/edge/stable.v-2.json",
		"/control/system/edge/stable.v2.json.json", "/control/system/Edge/stable.json", "/control/system/edge/STABLE.json", "/control/system/edge/a/stable.json", "/control/system/../system/edge/stable.json", "/control/system/edge/..%2fstable.json",
		"/control/system/box/stable.json", "/control/system/e_dge/stable.json", "/control/system/" + strings.Repeat("a", 33) + "/stable.json",
		"/control/trust/", "/control/trust/0.json", "/control/trust/01.json", "/control/trust/-1.json", "/control/trust/1", "/control/trust/1.JSON", "/control/trust/x.json", "/control/trust/1e3.json", "/control/trust/9999999.json", "/control/trust/1.json/2.json",
		"/bootstrap", "/bootstrap/", "/bootstrap/edge", "/bootstrap/edge/", "/bootstrap/edge/1", "/bootstrap/edge/1/", "/bootstrap/edge/1/x/", "/bootstrap/edge/1/x/y", "/bootstrap/edge/1/.x", "/bootstrap/edge/../1/x", "/bootstrap/edge/.1/x", "/bootstrap/edge/1/%78",
		"/bootstrap/edge/1/x?y", "/bootstrap/edge/1/x?wait=1s", "/bootstrap/Edge/1/x", "/bootstrap/edge/1//x", "/bootstrap/edge/1/..", "/bootstrap/edge/" + strings.Repeat("1", 65) + "/x", "/bootstrap/edge/1/" + strings.Repeat("x", 256),
		"/status", "/status/", "/status/boxes", "/status/boxes/", "/status/boxes/box-1", "/status/boxes/box-1.json", "/status/boxes/box-2.json", "/status/boxes/..", "/status/boxes/.json",
		"/fleets", "/fleets/", "/fleets/acme", "/fleets/acme/", "/fleets/acme/control/serial", "/fleets/acme/control/trust/1.json", "/fleets/acme/bootstrap/edge/1/x", "/fleets//control/serial", "/fleets/../control/serial", "/fleets/%61cme/control/serial",
		"/fleets/acme/fleets/acme/control/serial", "/fleets/ACME/control/serial", "/fleets/acme/../../control/serial", "/fleets/acme%2fcontrol/serial",
		"/etc/passwd", "/../../../../etc/passwd", "/.lock", "/.git/config", "/metrics", "/healthz", "/debug/pprof/", "/favicon.ico", "/robots.txt", "/index.html", "/*", "/~root", "/control/serial\x7f", "/control/séríal", "/контроль", "/" + strings.Repeat("a", 2000),
		"/control/serial?", "/control/serial?wait", "/control/serial?wait=", "/control/serial?wait=0s", "/control/serial?wait=61s", "/control/serial?wait=60", "/control/serial?wait=1m", "/control/serial?wait=-1s", "/control/serial?wait=1s&wait=2s",
		"/control/serial?wait=1s&x=y", "/control/serial?Wait=1s", "/control/serial?wait=%31s", "/control/serial?wait=9999999999s", "/control/serial?prefix=/", "/control/serial?list-type=2", "/control/serial?wait=1s#x", "/control/system/edge/stable.json?wait=1s", "/control/trust/1.json?versionId=1",
		"https://door.example.com/control/serial", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "control/serial", "*", "door.example.com:443", "/control/serial HTTP/1.1 x"} {
		add("GET "+p, get(p))
	}
	// Methods.
	for _, m := range []string{"POST", "DELETE", "PATCH", "PUT", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "MKCOL", "COPY", "MOVE", "LOCK", "LIST", "get", "GETX", "G\tET"} {
		for _, p := range []string{"/control/serial", "/bootstrap/edge/1/x", "/control/system/edge/stable.json"} {
			add(m+" "+p, m+" "+p+" HTTP/1.1\r\n"+host+auth+"Content-Length: 0\r\n\r\n")
		}
	}
	for _, m := range []string{"GET", "HEAD", "POST", "DELETE", "PATCH"} {
		add(m+" a heartbeat", m+" /status/boxes/box-1.json HTTP/1.1\r\n"+host+auth+"Content-Length: 2\r\n\r\n{}")
	}
	// Headers.
	for _, r := range []string{"bytes=0-5", "bytes=-5", "bytes=5-1", "bytes=0-,5-", "bytes=a-", "bytes=", "octets=0-", "bytes=00-", "bytes=99999999999999999999-", "bytes= 0-", "bytes=0-\r\nRange: bytes=1-"} {
		add("Range: "+r, "GET /bootstrap/edge/1/x HTTP/1.1\r\n"+host+auth+"Range: "+r+"\r\n\r\n")
	}
	add("Range of a pointer", "GET /control/system/edge/stable.json HTTP/1.1\r\n"+host+auth+"Range: bytes=1-\r\n\r\n")
	put := func(headers, body string) string {
		return "PUT /status/boxes/box-1.json HTTP/1.1\r\n" + host + auth + headers + "\r\n" + body
	}
	for name, text := range map[string]string{
		"a body with a GET": "GET /control/serial HTTP/1.1\r\n" + host + auth + "Content-Length: 2\r\n\r\n{}", "a chunked GET": "GET /control/serial HTTP/1.1\r\n" + host + auth + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"no length": put("", ""), "an empty heartbeat": put("Content-Length: 0\r\n", ""), "a chunked heartbeat": put("Transfer-Encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"),
		"a heartbeat over the limit": put("Content-Length: 65537\r\n", ""), "an enormous heartbeat": put("Content-Length: 99999999999\r\n", ""), "a negative length": put("Content-Length: -1\r\n", ""), "two lengths": put("Content-Length: 2\r\nContent-Length: 3\r\n", "{}"),
		"length and chunks": put("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", "2\r\n{}\r\n0\r\n\r\n"), "a compressed heartbeat": put("Content-Length: 2\r\nContent-Encoding: gzip\r\n", "{}"), "a part of a heartbeat": put("Content-Length: 2\r\nContent-Range: bytes 0-1/9\r\n", "{}"),
		"a heartbeat with a condition": put("Content-Length: 2\r\nIf-None-Match: *\r\n", "{}"), "a heartbeat over another": put("Content-Length: 2\r\nIf-Match: \"x\"\r\n", "{}"), "a heartbeat with a query": strings.Replace(put("Content-Length: 2\r\n", "{}"), ".json", ".json?acl", 1),
		"another box's heartbeat": strings.Replace(put("Content-Length: 2\r\n", "{}"), "box-1.json", "box-2.json", 1), "a heartbeat elsewhere": strings.Replace(put("Content-Length: 2\r\n", "{}"), "/status/boxes/box-1.json", "/control/serial", 1),
		"a heartbeat of a fleet": strings.Replace(put("Content-Length: 2\r\n", "{}"), "/status", "/fleets/acme/status", 1), "no host": "GET /control/serial HTTP/1.1\r\n" + auth + "\r\n", "two hosts": "GET /control/serial HTTP/1.1\r\n" + host + host + auth + "\r\n",
		"HTTP/0.9": "GET /control/serial\r\n", "HTTP/3.0": "GET /control/serial HTTP/3.0\r\n" + host + auth + "\r\n", "no HTTP": "\x16\x03\x01\x02\x00", "a header without a name": "GET /control/serial HTTP/1.1\r\n" + host + ": c\r\n" + auth + "\r\n",
		"a header without an end": "GET /control/serial HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 100<<10) + "\r\n" + auth + "\r\n", "a NUL in a header": "GET /control/serial HTTP/1.1\r\n" + host + "X: a\x00b\r\n" + auth + "\r\n",
		"smuggled": "GET /control/secret HTTP/1.1\r\n" + host + auth + "Content-Length: 4\r\nContent-Length : 5\r\n\r\n",
	} {
		add(name, text)
	}
	// Callers.
	as := func(headers string) string { return "GET /control/serial HTTP/1.1\r\n" + host + headers + "\r\n" }
	wrong := strings.Map(func(r rune) rune {
		if r == rune(own[0]) {
			return 'A' + (r-'A'+1)%26
		}
		return r
	}, own)
	for name, text := range map[string]string{
		"nobody": as(""), "an empty token": as("Authorization: Bearer \r\n"), "a wrong token": as("Authorization: Bearer " + wrong + "\r\n"), "a token cut short": as("Authorization: Bearer " + own[:len(own)-1] + "\r\n"),
		"a token and more": as("Authorization: Bearer " + own + "A\r\n"), "basic": as("Authorization: Basic " + own + "\r\n"), "bearer, small": as("Authorization: bearer " + own + "\r\n"), "the bare token": as("Authorization: " + own + "\r\n"),
		"two tokens": as(auth + auth), "its hash": as("Authorization: Bearer " + string(token.Hash(own)) + "\r\n"), "as a cookie": as("Cookie: token=" + own + "\r\n"), "as a query": "GET /control/serial?token=" + own + " HTTP/1.1\r\n" + host + "\r\n",
		"forwarded": as("X-Forwarded-For: 127.0.0.1\r\nX-Remote-User: box-1\r\nX-SSL-Client-Verify: SUCCESS\r\n"), "another fleet's": as("Authorization: Bearer " + acme + "\r\n"),
	} {
		add(name, text)
	}
	for name, uris := range map[string][]string{
		"a certificate without an id": nil, "of another domain": {"spiffe://example.org/box/box-1"}, "of a longer domain": {"spiffe://example.com.evil.example/box/box-1"}, "two ids": {"spiffe://example.com/box/box-1", "spiffe://example.com/box/box-2"},
		"no box": {"spiffe://example.com/door/box-1"}, "a path too long": {"spiffe://example.com/box/box-1/x"}, "no label": {"spiffe://example.com/box/"}, "a label that is none": {"spiffe://example.com/box/BOX"}, "another scheme": {"https://example.com/box/box-1"},
		"another fleet's certificate": {"spiffe://example.com/fleet/acme/box/box-1"},
	} {
		pair := h.ca.Pair("box-1", uris...)
		tries[name] = attempt{as(auth), &pair}
	}
	self := h.ca.Unsigned("spiffe://example.com/box/box-1")
	tries["signed by itself"] = attempt{as(auth), &self}

	if len(tries) < 200 {
		t.Errorf("only %d tries", len(tries))
	}
	before := h.store.asked.Load()
	var all sync.WaitGroup
	few := make(chan bool, 16)
	for name, try := range tries {
		few <- true
		all.Go(func() { // no answer is one too
			if status := h.raw(try.cert, try.text); status != 0 && (status < 400 || status >= 500 && status != http.StatusHTTPVersionNotSupported) {
				t.Errorf("%s: %d", name, status)
			}
			<-few
		})
	}
	all.Wait()
	if asked := h.store.asked.Load() - before; asked != 0 {
		for name, try := range tries {
			before := h.store.asked.Load()
			if h.raw(try.cert, try.text); h.store.asked.Load() != before {
				t.Errorf("%s: the store was asked", name)
			}
		}
		t.Errorf("the store was asked %d times", asked)
	}
	t.Logf("%d tries", len(tries))
	// The same, without what is wrong, is answered.
	pair := h.ca.Pair("box-1", "spiffe://example.com/box/box-1")
	for name, try := range map[string]attempt{"token": {get("/control/serial"), nil}, "certificate": {as(""), &pair}, "HEAD": {strings.Replace(get("/bootstrap/edge/1/x"), "GET", "HEAD", 1), nil}, "PUT": {put("Content-Length: 2\r\n", "{}"), nil},
		"a wait for what has changed": {"GET /control/serial?wait=60s HTTP/1.1\r\n" + host + auth + "If-None-Match: \"old\"\r\n\r\n", nil}} {
		if status := h.raw(try.cert, try.text); status != 200 && status != 204 {
			t.Errorf("%s: %d", name, status)
		}
	}
	if status := h.raw(nil, "GET /fleets/acme/control/serial HTTP/1.1\r\n"+host+"Authorization: Bearer "+acme+"\r\n\r\n"); status != 200 {
		t.Errorf("a fleet's own: %d", status)
	}
}

// A promote is heard by all who wait, and the store is asked by one.
func TestBell(t *testing.T) {
	h := newHouse(t)
	ctx := context.Background()
	ring := func(text string) {
		t.Helper()
		if _, err := store.PutBytes(ctx, h.store.Store, "control/serial", []byte(text), store.Condition{}); err != nil {
			t.Fatal(err)
		}
	}
	ring("one")
	const boxes = 50
	s := h.client(h.server.URL, h.identity(h.token("box-1", ""), nil))
	o, err := s.Get(ctx, "control/serial", 100, "")
	if err != nil {
		t.Fatal(err)
	}
	heard := make(chan error, boxes)
	for range boxes {
		go func() {
			next, err := s.(store.Waiter).Wait(ctx, 100, o.ETag)
			if err == nil && string(next.Data) != "two" {
				err = fmt.Errorf("heard %q", next.Data)
			}
			heard <- err
		}()
	}
	for waiting := 0; waiting < boxes; time.Sleep(time.Millisecond) {
		h.door.bells.mu.Lock()
		waiting = 0
		if r := h.door.bells.each[""]; r != nil {
			waiting = r.waiting
		}
		h.door.bells.mu.Unlock()
	}
	before := h.store.asked.Load()
	select {
	case err := <-heard:
		t.Fatalf("answered before it rang: %v", err)
	case <-time.After(50 * h.door.Poll): // fifty looks
	}
	if asked := h.store.asked.Load() - before; asked > 60 {
		t.Errorf("%d boxes wait, and the store is asked %d times", boxes, asked)
	}
	ring("two")
	for range boxes {
		if err := <-heard; err != nil {
			t.Error(err)
		}
	}
	// With nobody there nobody looks.
	for still := true; still; time.Sleep(time.Millisecond) {
		h.door.bells.mu.Lock()
		still = len(h.door.bells.each) > 0
		h.door.bells.mu.Unlock()
	}
	// A bell that there is not is not waited for.
	if err := os.Remove(filepath.Join(strings.TrimPrefix(h.store.String(), "file://"), "control/serial")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.(store.Waiter).Wait(ctx, 100, "x"); !store.IsNotExist(err) {
		t.Errorf("%v", err)
	}
}

// One caller that asks too often is told so, and another is not.
func TestRates(t *testing.T) {
	h := newHouse(t)
	h.door.callers.burst = 10
	one, two := h.client(h.server.URL, h.identity(h.token("box-1", ""), nil)), h.client(h.server.URL, h.identity(h.token("box-2", ""), nil))
	ctx := context.Background()
	var told error
	for range 1000 {
		if _, err := one.Get(ctx, "control/serial", 10, ""); errors.Is(err, store.ErrTransient) {
			told = err
			break
		}
	}
	if told == nil || !strings.Contains(told.Error(), "429") {
		t.Errorf("%v", told)
	}
	if _, err := two.Get(ctx, "control/serial", 10, ""); !store.IsNotExist(err) {
		t.Errorf("another caller: %v", err)
	}
	h.door.strangers.burst = 10
	h.door.strangers.each = nil
	statuses := map[int]int{}
	for range 100 {
		statuses[h.raw(nil, "GET /control/serial HTTP/1.1\r\nHost: x\r\n\r\n")]++
	}
	if statuses[http.StatusTooManyRequests] < 50 {
		t.Errorf("strangers: %v", statuses)
	}
}

func TestTokens(t *testing.T) {
	h := newHouse(t)
	ctx := context.Background()
	first := h.token("box-1", "")
	second := h.token("box-1", "")
	if first == second {
		t.Error("the same token twice")
	}
	works := func(t string) bool {
		_, err := h.client(h.server.URL, h.identity(t, nil)).Get(ctx, "control/serial", 10, "")
		return store.IsNotExist(err)
	}
	if works(first) || !works(second) {
		t.Error("an earlier token counts, or the newest does not")
	}
	kept, err := h.store.Store.Get(ctx, token.Key, contract.MaxEnvelope, "")
	if err != nil || bytes.Contains(kept.Data, []byte(second)) {
		t.Errorf("the token itself is kept: %v", err)
	}
	acme := h.token("box-1", "acme") // another box, for all it is called
	h.token("box-1", "")
	second = h.token("box-1", "")
	if !works(second) {
		t.Error("a token of another fleet's box took this one's place")
	}
	if _, err := h.client(h.server.URL+"/fleets/acme", h.identity(acme, nil)).Get(ctx, "control/serial", 10, ""); !store.IsNotExist(err) {
		t.Errorf("the other fleet's: %v", err)
	}
	if found, err := token.Revoke(ctx, h.store, "box-1", ""); err != nil || !found {
		t.Error(found, err)
	}
	h.door.loadTokens(ctx)
	if works(second) {
		t.Error("a token that was revoked counts")
	}
	if found, err := token.Revoke(ctx, h.store, "box-1", ""); err != nil || found {
		t.Error(found, err)
	}
}

// A stranger who promises a body and does not send it is answered, and let go.
func TestBodyThatNobodyWants(t *testing.T) {
	h := newHouse(t)
	for _, head := range []string{"PUT /status/boxes/box-1.json", "GET /nothing", "POST /control/serial"} {
		conn, err := tls.Dial("tcp", h.server.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, head+" HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second)) // and not when the body's deadline is over
		if _, err := io.ReadAll(conn); err != nil {
			t.Errorf("%s: not answered and let go: %v", head, err)
		}
		conn.Close()
	}
}

// A door that has not read its tokens yet knows nobody, and says that it is its own fault.
func TestTokensThatCannotBeRead(t *testing.T) {
	h := newHouse(t)
	own := h.token("box-1", "")
	if _, err := store.PutBytes(context.Background(), h.store, token.Key, []byte("garbage"), store.Condition{}); err != nil {
		t.Fatal(err)
	}
	h.door.loadTokens(context.Background()) // those that were known go on counting
	if _, err := h.client(h.server.URL, h.identity(own, nil)).Get(context.Background(), "control/serial", 10, ""); !store.IsNotExist(err) {
		t.Errorf("%v", err)
	}
	h.door.mu.Lock()
	h.door.tokens = nil // as after a start
	h.door.mu.Unlock()
	if _, err := h.client(h.server.URL, h.identity(own, nil)).Get(context.Background(), "control/serial", 10, ""); !errors.Is(err, store.ErrTransient) {
		t.Errorf("%v", err)
	}
}

// What watches the door sees what it does.
func TestHealth(t *testing.T) {
	h := newHouse(t)
	_, _ = h.client(h.server.URL, h.identity(h.token("box-1", ""), nil)).Get(context.Background(), "control/serial", 10, "")
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		h.door.Health().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	if status, text := get("/metrics"); status != 200 || !strings.Contains(text, `sluice_door_requests_total{kind="serial",status="404"} 1`) {
		t.Errorf("%d, %s", status, text)
	}
	if _, err := store.PutBytes(context.Background(), h.store, contract.TrustKey(1), []byte("{}"), store.Condition{}); err != nil {
		t.Fatal(err)
	}
	if status, text := get("/healthz"); status != 200 || text != "ok\n" {
		t.Errorf("%d, %s", status, text)
	}
	if err := os.RemoveAll(strings.TrimPrefix(h.store.String(), "file://")); err != nil {
		t.Fatal(err)
	}
	if status, text := get("/healthz"); status != http.StatusServiceUnavailable {
		t.Errorf("%d, %s", status, text)
	}
}
