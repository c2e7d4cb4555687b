package door

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"sluice/internal/contract"
	"sluice/internal/store"
	"sluice/internal/token"
)

// A caller is a box that has proved who it is.
type caller struct {
	label contract.Label
	fleet string // "" for one of the whole store's own
}

func (c caller) String() string {
	if c.fleet == "" {
		return string(c.label)
	}
	return c.fleet + "/" + string(c.label)
}

// may says why a caller may not ask for something; nil if it may.
func (c caller) may(a ask) error {
	if a.fleet != c.fleet {
		return refuse(http.StatusForbidden, "this is another fleet's")
	}
	if a.kind == heartbeat && a.label != c.label {
		return refuse(http.StatusForbidden, "this is another box's")
	}
	return nil
}

// tokenEvery is how often the door looks for new tokens.
const tokenEvery = 2 * time.Second

// refreshTokens keeps the tokens that are known fresh until ctx ends. While the
// store can't be read, those that were known go on counting.
func (d *Door) refreshTokens(ctx context.Context) {
	tick := time.NewTicker(tokenEvery)
	defer tick.Stop()
	for {
		d.loadTokens(ctx)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (d *Door) loadTokens(ctx context.Context) {
	d.mu.RLock()
	etag := d.tokensTag
	d.mu.RUnlock()
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	t, etag, err := token.Read(ctx, d.Store, etag)
	if errors.Is(err, store.ErrNotModified) {
		return
	}
	if err != nil {
		if said := err.Error(); said != d.tokensSaid { // only this function writes it
			d.tokensSaid = said
			d.Log.Warn("reading the tokens: " + said)
		}
		return
	}
	d.tokensSaid = ""
	d.mu.Lock()
	d.tokens, d.tokensTag = t.Tokens, etag
	d.mu.Unlock()
}

// spiffe reads the box out of a certificate's SPIFFE id:
// spiffe://<domain>/box/<label>, or spiffe://<domain>/fleet/<fleet>/box/<label>.
func (d *Door) spiffe(r *http.Request) (caller, bool) {
	if r.TLS == nil || len(r.TLS.VerifiedChains) == 0 || d.Domain == "" {
		return caller{}, false
	}
	uris := r.TLS.VerifiedChains[0][0].URIs
	if len(uris) != 1 { // a SPIFFE certificate has exactly one (X509-SVID, 2)
		return caller{}, false
	}
	rest, ok := strings.CutPrefix(uris[0].String(), "spiffe://"+d.Domain+"/")
	if !ok {
		return caller{}, false
	}
	var c caller
	words := strings.Split(rest, "/")
	switch {
	case len(words) == 2 && words[0] == "box":
		c.label = contract.Label(words[1])
	case len(words) == 4 && words[0] == "fleet" && words[2] == "box":
		c.fleet, c.label = words[1], contract.Label(words[3])
		if _, err := contract.Parse[contract.Label](c.fleet); err != nil {
			return caller{}, false
		}
	default:
		return caller{}, false
	}
	_, err := contract.Parse[contract.Label](string(c.label))
	return c, err == nil
}

// identify finds out who calls: by certificate, else by token.
func (d *Door) identify(r *http.Request) (caller, error) {
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		if c, ok := d.spiffe(r); ok {
			return c, nil
		}
		return caller{}, refuse(http.StatusUnauthorized, "the certificate is not that of a box")
	}
	headers := r.Header.Values("Authorization")
	if len(headers) != 1 {
		return caller{}, refuse(http.StatusUnauthorized, "say who you are: by a client certificate, or by one token")
	}
	given, ok := strings.CutPrefix(headers[0], "Bearer ")
	if !ok || !token.Form(given) {
		return caller{}, refuse(http.StatusUnauthorized, "this is no token")
	}
	d.mu.RLock()
	t, known := d.tokens[token.Hash(given)] // of its hash, so that the time it takes tells nothing of the token
	never := d.tokens == nil
	d.mu.RUnlock()
	if never {
		return caller{}, refuse(http.StatusServiceUnavailable, "who may come in is not known yet")
	}
	if !known {
		return caller{}, refuse(http.StatusUnauthorized, "this token is not known")
	}
	return caller{t.Label, t.Fleet}, nil
}

// Rates.
const (
	callerRate   = 20     // requests a second of one caller, in the long run
	callerBurst  = 200    // at once
	strangerRate = 2      // of an address that has not said who it is
	maxLimiters  = 20_000 // that are remembered; then all are forgotten
)

// limits is how fast callers may ask.
type limits struct {
	mu    sync.Mutex
	each  map[string]*rate.Limiter
	burst int // 0: callerBurst
}

// allow reports whether a caller may ask now.
func (l *limits) allow(who string, perSecond rate.Limit) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.each == nil || len(l.each) >= maxLimiters {
		l.each = map[string]*rate.Limiter{}
	}
	lim := l.each[who]
	if lim == nil {
		burst := l.burst
		if burst == 0 {
			burst = callerBurst
		}
		lim = rate.NewLimiter(perSecond, burst)
		l.each[who] = lim
	}
	return lim.Allow()
}

// address is whom a stranger is known by.
func address(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}
