package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
)

// Names of the files that a box proves itself to a door with.
const (
	TokenFile      = "token"      // a bearer token, as `sluice door token` prints it
	ClientCertFile = "client.crt" // or a client certificate, PEM
	ClientKeyFile  = "client.key"
	DoorCAFile     = "ca.crt" // who signs the door's certificate, if the system does not know
)

// Limits of a door's client.
const (
	maxIdentity  = 64 << 10        // bytes of an identity file
	maxAskedWait = 5 * time.Minute // of a Retry-After that is heeded
	MaxWait      = time.Minute     // of a request that waits for the bell
)

// door is a door to somebody's bucket: it reads, and writes one heartbeat.
type door struct {
	base   string // without a / at the end
	client *http.Client
	token  string

	mu    sync.Mutex
	until time.Time // it asked to be left alone
}

func newDoor(u *url.URL, id Identity) (Store, error) {
	path := strings.Trim(u.Path, "/")
	if u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, outcome.Config("SLUICE_STORE: %q must be like https://door.example.com, or https://door.example.com/fleets/NAME", u)
	}
	base := "https://" + u.Host
	if path != "" {
		if err := checkKey(path); err != nil {
			return nil, outcome.Config("SLUICE_STORE: %w", err)
		}
		base += "/" + path
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13}
	d := &door{base: base}
	token, err := readIdentity(id(TokenFile))
	if err != nil {
		return nil, err
	}
	d.token = strings.TrimSpace(string(token))
	cert, err := readIdentity(id(ClientCertFile))
	if err != nil {
		return nil, err
	}
	key, err := readIdentity(id(ClientKeyFile))
	if err != nil {
		return nil, err
	}
	if cert != nil {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, outcome.Config("%q and %q are no certificate and its key", id(ClientCertFile), id(ClientKeyFile))
		}
		config.Certificates = []tls.Certificate{pair}
	}
	ca, err := readIdentity(id(DoorCAFile))
	if err != nil {
		return nil, err
	}
	if ca != nil {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(ca) {
			return nil, outcome.Config("%q holds no certificate", id(DoorCAFile))
		}
	}
	d.client = &http.Client{
		Transport: &http.Transport{DialContext: (&net.Dialer{Timeout: dialTimeout}).DialContext, TLSClientConfig: config, TLSHandshakeTimeout: dialTimeout,
			ResponseHeaderTimeout: MaxWait + headerTimeout, IdleConnTimeout: 2 * MaxWait, DisableCompression: true, MaxResponseHeaderBytes: 32 << 10},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // a door sends nobody elsewhere
	}
	return d, nil
}

// readIdentity reads a file that need not be there. Nothing of it is ever in an
// error.
func readIdentity(path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, outcome.Config("%w", err)
	}
	defer f.Close()
	data, err := readAll(f, maxIdentity)
	if err != nil {
		return nil, outcome.Config("%q: %w", path, err)
	}
	return data, nil
}

func (d *door) String() string { return d.base }

// ask makes a request and returns an answer that is one of those wanted.
func (d *door) ask(ctx context.Context, method, key, query string, header map[string]string, body io.Reader, size int64, want ...int) (*http.Response, error) {
	if err := checkKey(key); err != nil {
		return nil, err
	}
	if err := d.leftAlone(); err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, method, d.base+"/"+key+query, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		r.ContentLength = size
	}
	for name, value := range header {
		r.Header.Set(name, value)
	}
	if d.token != "" {
		r.Header.Set("Authorization", "Bearer "+d.token)
	}
	a, err := d.client.Do(r)
	if err != nil {
		var u *url.Error // names the URL, which the caller does as well
		if errors.As(err, &u) {
			err = u.Err
		}
		return nil, fmt.Errorf("%w: %w", ErrTransient, err)
	}
	for _, status := range want {
		if a.StatusCode == status {
			return a, nil
		}
	}
	defer a.Body.Close()
	return nil, d.refusal(a)
}

// refusal is the error of an answer that is none of those wanted.
func (d *door) refusal(a *http.Response) error {
	text, _ := io.ReadAll(io.LimitReader(a.Body, 200))
	said := fmt.Sprintf("%d %s", a.StatusCode, strings.TrimSpace(strings.ToValidUTF8(string(text), "?")))
	switch a.StatusCode {
	case http.StatusNotFound:
		return fs.ErrNotExist
	case http.StatusNotModified:
		return ErrNotModified
	case http.StatusConflict, http.StatusPreconditionFailed:
		return ErrConflict
	case http.StatusRequestedRangeNotSatisfiable:
		return ErrRange
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		if s, err := strconv.Atoi(a.Header.Get("Retry-After")); err == nil && s > 0 {
			d.mu.Lock()
			d.until = time.Now().Add(min(time.Duration(s)*time.Second, maxAskedWait))
			d.mu.Unlock()
		}
		return fmt.Errorf("%w: %s", ErrTransient, said)
	case http.StatusRequestTimeout:
		return fmt.Errorf("%w: %s", ErrTransient, said)
	}
	if a.StatusCode >= 400 && a.StatusCode < 500 {
		return fmt.Errorf("%w: %s", ErrDenied, said)
	}
	return fmt.Errorf("%w: %s", ErrTransient, said)
}

// leftAlone keeps from asking a door that has asked to be left alone.
func (d *door) leftAlone() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if left := time.Until(d.until); left > 0 {
		return fmt.Errorf("%w: it asked to be left alone for another %s", ErrTransient, left.Round(time.Second))
	}
	return nil
}

func (d *door) Get(ctx context.Context, key string, limit int64, unless string) (Object, error) {
	return d.get(ctx, key, "", limit, unless)
}

// Wait is Get of the bell, answered when it changes: at most MaxWait from now,
// and then with ErrNotModified.
func (d *door) Wait(ctx context.Context, limit int64, unless string) (Object, error) {
	// A door that answers the head and then nothing must not keep the bell silent.
	ctx, cancel := context.WithTimeout(ctx, MaxWait+headerTimeout)
	defer cancel()
	return d.get(ctx, contract.SerialKey, fmt.Sprintf("?wait=%ds", MaxWait/time.Second), limit, unless)
}

func (d *door) get(ctx context.Context, key, query string, limit int64, unless string) (Object, error) {
	header := map[string]string{}
	if unless != "" {
		header["If-None-Match"] = unless
	}
	a, err := d.ask(ctx, http.MethodGet, key, query, header, nil, 0, http.StatusOK)
	if errors.Is(err, ErrNotModified) {
		return Object{ETag: unless}, ErrNotModified
	}
	if err != nil {
		return Object{}, keyError(d, "reading", key, err)
	}
	defer a.Body.Close()
	data, err := readAll(a.Body, limit)
	if err != nil {
		if !errors.Is(err, ErrTooLarge) {
			err = fmt.Errorf("%w: %w", ErrTransient, err)
		}
		return Object{}, keyError(d, "reading", key, err)
	}
	return Object{data, a.Header.Get("ETag")}, nil
}

func (d *door) Open(ctx context.Context, key string, offset int64) (*Stream, error) {
	header, want := map[string]string{}, http.StatusOK
	if offset > 0 {
		header["Range"], want = fmt.Sprintf("bytes=%d-", offset), http.StatusPartialContent
	}
	a, err := d.ask(ctx, http.MethodGet, key, "", header, nil, 0, want)
	if err != nil {
		return nil, keyError(d, "reading", key, err)
	}
	size := a.ContentLength
	if offset > 0 {
		if size, err = wholeSize(a.Header, offset); err != nil {
			a.Body.Close()
			return nil, keyError(d, "reading", key, err)
		}
	}
	if size < 0 {
		a.Body.Close()
		return nil, keyError(d, "reading", key, fmt.Errorf("%w: it does not say how long the object is", ErrTransient))
	}
	return &Stream{a.Body, a.Header.Get("ETag"), size}, nil
}

// wholeSize is that of an object of which bytes from an offset on were asked for, if
// they are what is answered (RFC 9110, 14.4).
func wholeSize(header http.Header, offset int64) (size int64, _ error) {
	var from, to int64
	if n, err := fmt.Sscanf(header.Get("Content-Range"), "bytes %d-%d/%d", &from, &to, &size); err != nil || n != 3 || from != offset || to != size-1 {
		return 0, fmt.Errorf("%w: it was asked for bytes from %d on, and answers %q", ErrTransient, offset, header.Get("Content-Range"))
	}
	return size, nil
}

func (d *door) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond Condition) (string, error) {
	if cond != (Condition{}) || !strings.HasPrefix(key, contract.StatusPrefix) {
		return "", keyError(d, "writing", key, fmt.Errorf("%w: a door takes a box's own heartbeat, and nothing else", ErrDenied))
	}
	a, err := d.ask(ctx, http.MethodPut, key, "", nil, io.NopCloser(body), size, http.StatusOK, http.StatusNoContent)
	if err != nil {
		return "", keyError(d, "writing", key, err)
	}
	defer a.Body.Close()
	return a.Header.Get("ETag"), nil
}

func (d *door) List(_ context.Context, under string) ([]string, error) {
	return nil, keyError(d, "listing", under, fmt.Errorf("%w: a door lists nothing", ErrDenied))
}
