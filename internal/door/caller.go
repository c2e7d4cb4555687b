package door

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"sluice/internal/contract"
	"sluice/internal/store"
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

// TokensKey is where the hashes of the tokens are kept that a store's door knows.
// It has no shape that a door hands out.
const TokensKey = "control/door/tokens.json"

// Limits of tokens.
const (
	maxTokens  = 4 << 20         // bytes of TokensKey
	tokenBytes = 32              // of a token, random
	tokenTries = 5               // of a change that somebody else made as well
	tokenEvery = 2 * time.Second // how often the door looks for new ones
)

// MakeToken makes a token for a box and keeps its hash in the store; an earlier
// token of that box counts no more. The token itself is kept nowhere.
func MakeToken(ctx context.Context, s store.Store, label contract.Label, fleet string, now time.Time) (string, error) {
	raw := make([]byte, tokenBytes)
	_, _ = rand.Read(raw) // never fails (crypto/rand)
	token := base64.RawURLEncoding.EncodeToString(raw)
	return token, changeTokens(ctx, s, func(t map[contract.Digest]contract.Token) {
		maps.DeleteFunc(t, func(_ contract.Digest, old contract.Token) bool { return old.Label == label && old.Fleet == fleet })
		t[hash(token)] = contract.Token{Label: label, Fleet: fleet, At: contract.At(now)}
	})
}

// RevokeToken makes the token of a box count no more. It reports whether there was
// one.
func RevokeToken(ctx context.Context, s store.Store, label contract.Label, fleet string) (bool, error) {
	found := false
	return found, changeTokens(ctx, s, func(t map[contract.Digest]contract.Token) {
		maps.DeleteFunc(t, func(_ contract.Digest, old contract.Token) bool {
			gone := old.Label == label && old.Fleet == fleet
			found = found || gone
			return gone
		})
	})
}

func changeTokens(ctx context.Context, s store.Store, change func(map[contract.Digest]contract.Token)) error {
	var err error
	for range tokenTries {
		tokens, etag, rerr := readTokens(ctx, s, "")
		if rerr != nil {
			return rerr
		}
		change(tokens.Tokens)
		if _, err = store.PutBytes(ctx, s, TokensKey, tokens.Encode(), store.Condition{IfMatch: etag, IfNone: etag == ""}); !errors.Is(err, store.ErrConflict) {
			return err
		}
	}
	return err
}

func readTokens(ctx context.Context, s store.Store, unless string) (contract.Tokens, string, error) {
	none := contract.Tokens{Schema: contract.One, Tokens: map[contract.Digest]contract.Token{}}
	o, err := s.Get(ctx, TokensKey, maxTokens, unless)
	if store.IsNotExist(err) {
		return none, "", nil
	}
	if err != nil {
		return none, unless, err
	}
	t, err := contract.Spoken.DecodeTokens(o.Data, maxTokens)
	if err != nil {
		return none, o.ETag, fmt.Errorf("%q of %s: %w", TokensKey, s, err)
	}
	return t, o.ETag, nil
}

func hash(token string) contract.Digest {
	sum := sha256.Sum256([]byte(token))
	return contract.Digest(hex.EncodeToString(sum[:]))
}

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
	t, etag, err := readTokens(ctx, d.Store, etag)
	if errors.Is(err, store.ErrNotModified) {
		return
	}
	if err != nil {
		d.Log.Warn("reading the tokens: " + err.Error())
		return
	}
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
	token, ok := strings.CutPrefix(headers[0], "Bearer ")
	if raw, err := base64.RawURLEncoding.DecodeString(token); !ok || err != nil || len(raw) != tokenBytes {
		return caller{}, refuse(http.StatusUnauthorized, "this is no token")
	}
	d.mu.RLock()
	t, known := d.tokens[hash(token)] // of its hash, so that the time it takes tells nothing of the token
	d.mu.RUnlock()
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
