// Package door is the fleet's door to a private bucket: a stateless HTTP server
// in front of a store, for boxes that have no credentials for it. It hands out
// what has the exact shape of what a box needs, as opaque bytes, and takes one
// write: a box's own heartbeat.
//
// It does not vouch for what it hands out: boxes check signatures and digests as
// they would without it. Taken over, it can do what a lying store can.
package door

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"sluice/internal/contract"
	"sluice/internal/store"
)

// Times of one request.
const (
	storeTime  = 30 * time.Second // of one small request to the store
	chunkTime  = time.Minute      // in which a caller must take one chunk of a body
	retryAfter = 5 * time.Second  // what a caller is told while the store does not answer
	headTime   = 10 * time.Second // in which a request's head must be there
	idleTime   = 3 * time.Minute  // of a connection; longer than a wait for the bell
	maxHead    = 16 << 10         // bytes of a request's head
	chunk      = 32 << 10         // bytes of a body that are held for one caller
	maxLogged  = 200              // bytes of a request's target in the log
)

// A Door serves a store.
type Door struct {
	Store  store.Store
	Domain string // SPIFFE trust domain of client certificates; "" if none count
	Log    *slog.Logger
	Poll   time.Duration // how often the store's bell is looked at while somebody waits for it

	mu         sync.RWMutex
	tokens     map[contract.Digest]contract.Token // nil: not read yet
	tokensTag  string
	tokensSaid string // the last complaint: each is logged once

	callers, strangers limits
	bells              bells
	metrics            *metrics
	closing            context.Context // ends when the door is to close: nobody waits any longer
}

// Run keeps the door's knowledge fresh until ctx ends. Call it before serving;
// it returns once the tokens have been read for the first time, or could not be.
func (d *Door) Run(ctx context.Context) {
	d.closing = ctx
	d.metrics = newMetrics()
	d.bells.poll, d.bells.each = d.Poll, map[string]*ring{}
	d.loadTokens(ctx)
	go d.refreshTokens(ctx)
}

// Server is an http.Server with the door's limits.
func (d *Door) Server() *http.Server {
	return &http.Server{Handler: d, ReadHeaderTimeout: headTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHead,
		ErrorLog: slog.NewLogLogger(d.Log.Handler(), slog.LevelDebug)}
}

// An answer is what was answered, for the log and the metrics.
type answer struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (a *answer) WriteHeader(status int) {
	if a.status == 0 {
		a.status = status
	}
	a.ResponseWriter.WriteHeader(status)
}

func (a *answer) Write(p []byte) (int, error) {
	if a.status == 0 {
		a.status = http.StatusOK
	}
	n, err := a.ResponseWriter.Write(p)
	a.bytes += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController through.
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (d *Door) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began, out := time.Now(), &answer{ResponseWriter: w}
	a, err := parse(r)
	who := caller{}
	if err == nil {
		who, err = d.admit(a, r)
	} else if !d.strangers.allow(address(r), strangerRate) {
		err = refuse(http.StatusTooManyRequests, "too many requests")
	}
	// Also for what panics: a body that had to be cut off.
	defer func() { d.note(a, who, r, out, time.Since(began), err) }()
	// What is not poured has this long to be taken.
	_ = http.NewResponseController(w).SetWriteDeadline(began.Add(a.wait + storeTime + chunkTime))
	out.Header().Set("Cache-Control", "no-store")
	out.Header().Set("X-Content-Type-Options", "nosniff")
	if err == nil {
		err = d.serve(out, r, a, who)
	} else if r.ContentLength != 0 { // a body that nobody wants is not waited for; net/http would, before it answers
		out.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(began)
	}
	if err != nil && out.status == 0 {
		fail(out, err)
	} else if err != nil { // in the middle of a body: the caller must not take it for whole
		panic(http.ErrAbortHandler)
	}
}

// admit says who may come in.
func (d *Door) admit(a ask, r *http.Request) (caller, error) {
	who, err := d.identify(r)
	if err != nil {
		if !d.strangers.allow(address(r), strangerRate) {
			err = refuse(http.StatusTooManyRequests, "too many requests")
		}
		return who, err
	}
	if !d.callers.allow(who.String(), callerRate) {
		return who, refuse(http.StatusTooManyRequests, "too many requests")
	}
	return who, who.may(a)
}

func fail(w http.ResponseWriter, err error) {
	var r *refusal
	status, text := http.StatusBadGateway, "the store does not answer as it should"
	switch {
	case errors.As(err, &r):
		status, text = r.status, r.text
	case store.IsNotExist(err):
		status, text = http.StatusNotFound, "there is nothing of that name"
	case errors.Is(err, store.ErrRange):
		status, text = http.StatusRequestedRangeNotSatisfiable, "the object is not that long"
	case errors.Is(err, store.ErrTransient), errors.Is(err, context.DeadlineExceeded):
		status, text = http.StatusServiceUnavailable, "the store does not answer now"
	}
	switch status {
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		w.Header().Set("Retry-After", strconv.Itoa(int(retryAfter/time.Second)))
	case http.StatusUnauthorized:
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	http.Error(w, text, status)
}

// tree is the store that a fleet's keys are of.
func (d *Door) tree(fleet string) (store.Store, error) {
	if fleet == "" {
		return d.Store, nil
	}
	return store.Prefix(d.Store, contract.FleetPrefix(fleet))
}

func (d *Door) serve(w http.ResponseWriter, r *http.Request, a ask, who caller) error {
	s, err := d.tree(a.fleet)
	if err != nil {
		return err
	}
	switch a.kind {
	case heartbeat:
		return d.take(w, r, s, a)
	case asset:
		return d.stream(w, r, s, a)
	}
	limit := int64(contract.MaxEnvelope)
	unless := tag(r.Header.Get("If-None-Match"))
	var o store.Object
	if a.wait > 0 && unless != "" {
		ctx, cancel := context.WithTimeout(r.Context(), a.wait)
		defer cancel()
		d.metrics.waiting.Inc()
		o, err = d.bells.wait(ctx, d.closing, a.fleet, s, unless)
		d.metrics.waiting.Dec()
	} else {
		ctx, cancel := context.WithTimeout(r.Context(), storeTime)
		defer cancel()
		o, err = s.Get(ctx, a.key, limit, unless)
	}
	if errors.Is(err, store.ErrNotModified) {
		w.Header().Set("ETag", quote(unless))
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.Itoa(len(o.Data)))
	w.Header().Set("ETag", quote(o.ETag))
	if r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil
	}
	_, _ = w.Write(o.Data) // a caller that has gone is nobody's fault
	return nil
}

// quote and tag turn a store's ETag into one of HTTP, and back (RFC 9110, 8.8.3).
func quote(etag string) string { return `"` + strings.Trim(etag, `"`) + `"` }

func tag(header string) string { return strings.Trim(strings.TrimPrefix(header, "W/"), `"`) }

// stream hands out an object without ever holding more of it than a chunk.
func (d *Door) stream(w http.ResponseWriter, r *http.Request, s store.Store, a ask) error {
	body, err := s.Open(r.Context(), a.key, max(a.offset, 0))
	if err != nil {
		return err
	}
	defer body.Close()
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("ETag", quote(body.ETag))
	h.Set("Accept-Ranges", "bytes")
	if tag(r.Header.Get("If-None-Match")) == strings.Trim(body.ETag, `"`) && body.ETag != "" {
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	left, status := body.Size, http.StatusOK
	if a.offset >= 0 {
		left, status = body.Size-a.offset, http.StatusPartialContent
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", a.offset, body.Size-1, body.Size))
	}
	h.Set("Content-Length", strconv.FormatInt(left, 10))
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	return pour(w, body, left)
}

// pour copies a body, and gives a caller up that does not take it.
func pour(w http.ResponseWriter, body io.Reader, left int64) error {
	control, buf := http.NewResponseController(w), make([]byte, chunk)
	for left > 0 {
		n, err := io.ReadFull(body, buf[:min(left, chunk)])
		if n == 0 && err != nil {
			return fmt.Errorf("reading an object of the store, %d bytes before its end: %w", left, err)
		}
		if err := control.SetWriteDeadline(time.Now().Add(chunkTime)); err != nil {
			return err
		}
		if _, err := w.Write(buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
	}
	return control.SetWriteDeadline(time.Time{})
}

// take takes a box's own heartbeat. What is in it is between the box and its
// operator.
func (d *Door) take(w http.ResponseWriter, r *http.Request, s store.Store, a ask) error {
	control := http.NewResponseController(w)
	if err := control.SetReadDeadline(time.Now().Add(storeTime)); err != nil {
		return err
	}
	data, err := io.ReadAll(io.LimitReader(r.Body, a.size+1))
	if err != nil || int64(len(data)) != a.size {
		return refuse(http.StatusBadRequest, "the heartbeat is not as long as it was said to be")
	}
	if err := control.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(r.Context(), storeTime)
	defer cancel()
	etag, err := store.PutBytes(ctx, s, a.key, data, store.Condition{})
	if err != nil {
		return err
	}
	w.Header().Set("ETag", quote(etag))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// note logs a request, and counts it.
func (d *Door) note(a ask, who caller, r *http.Request, out *answer, took time.Duration, err error) {
	what := string(a.kind)
	if what == "" {
		what = "other"
	}
	d.metrics.requests.WithLabelValues(what, strconv.Itoa(out.status)).Inc()
	d.metrics.bytes.Add(float64(out.bytes))
	d.metrics.seconds.WithLabelValues(what).Observe(took.Seconds())
	target, _, asked := strings.Cut(r.RequestURI, "?") // what is asked may be a secret, put in the wrong place
	if asked {
		target += "?"
	}
	if len(target) > maxLogged {
		target = target[:maxLogged]
	}
	level, why := slog.LevelInfo, ""
	var refused *refusal
	if err != nil && !errors.As(err, &refused) && !store.IsNotExist(err) { // the store's fault, or a body that was cut off
		level, why = slog.LevelWarn, ": "+err.Error()
	}
	d.Log.Log(r.Context(), level, "request"+why, "caller", who.String(), "address", address(r), "method", r.Method, "target", strconv.QuoteToASCII(target), "status", out.status, "bytes", out.bytes, "ms", took.Milliseconds())
}

// healthy says why the door can't serve.
func (d *Door) healthy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, headTime)
	defer cancel()
	if _, err := d.Store.Get(ctx, contract.TrustKey(1), contract.MaxEnvelope, ""); !store.IsNotExist(err) {
		return err
	}
	// No deployment of its own: a bucket that fleets share.
	keys, err := d.Store.List(ctx, contract.FleetsPrefix)
	if err == nil && len(keys) == 0 {
		err = fmt.Errorf("%s has no trust document: it is no deployment, or is not there", d.Store)
	}
	return err
}
