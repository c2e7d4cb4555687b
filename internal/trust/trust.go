// Package trust says whose signature counts: key ids, the pre-authentication
// encoding of DSSE, thresholds, and documents that only it can make, because
// only it has checked them. It does no I/O, and links neither x509 nor ssh:
// key files are the operator's affair.
package trust

import (
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"sluice/internal/contract"
	"sluice/internal/outcome"
)

// KeyID is the hex SHA-256 of the 32 raw bytes of a public key.
func KeyID(pub ed25519.PublicKey) string {
	sum := sha256.Sum256(pub)
	return hex.EncodeToString(sum[:])
}

// PAE is the pre-authentication encoding of the DSSE specification, v1: what
// is signed.
func PAE(payloadType string, payload []byte) []byte {
	return fmt.Appendf(nil, "DSSEv1 %d %s %d %s", len(payloadType), payloadType, len(payload), payload)
}

// Sign puts a payload of ladder l into an envelope, with one signature for each key.
func Sign(l contract.Ladder, payload []byte, keys ...ed25519.PrivateKey) contract.Envelope {
	e := contract.Envelope{PayloadType: contract.PayloadType(l), Payload: payload, Signatures: []contract.Signature{}}
	for i, k := range keys {
		if slices.ContainsFunc(keys[:i], func(o ed25519.PrivateKey) bool { return o.Equal(k) }) {
			continue
		}
		sig := ed25519.Sign(k, PAE(e.PayloadType, payload))
		e.Signatures = append(e.Signatures, contract.Signature{KeyID: KeyID(k.Public().(ed25519.PublicKey)), Sig: base64.StdEncoding.EncodeToString(sig)})
	}
	return e
}

// A Set is the trust that is in force: who may sign what.
type Set struct {
	Number   int
	Document contract.Trust // that it is made of
	families map[contract.Ladder]family
}

type family struct {
	keys      map[string]ed25519.PublicKey
	threshold int
}

func newSet(t contract.Trust) (Set, error) {
	s := Set{t.Payload.Number, t, map[contract.Ladder]family{}}
	for name, f := range t.Payload.Families {
		out := family{map[string]ed25519.PublicKey{}, f.Threshold}
		for _, id := range f.Keys {
			pub := ed25519.PublicKey(t.Payload.Keys[id])
			if KeyID(pub) != id {
				return s, fmt.Errorf("trust document %d: key %q of family %s is not the key of that id", t.Payload.Number, id, name)
			}
			out.keys[id] = pub
		}
		s.families[name] = out
	}
	return s, nil
}

// verify returns the ids of the trusted keys that signed e, at least as many
// as the threshold. The same key counts once; a malformed signature spoils
// only itself.
func (s Set) verify(l contract.Ladder, e contract.Envelope) ([]string, error) {
	if want := contract.PayloadType(l); e.PayloadType != want {
		return nil, outcome.Refuse(outcome.BadSignature, "the envelope carries %q, not %q", e.PayloadType, want)
	}
	f, known := s.families[l]
	if !known {
		return nil, outcome.Refuse(outcome.BadSignature, "trust document %d names no keys for %s documents", s.Number, l)
	}
	var ids []string
	for _, sig := range f.counting(e) {
		ids = append(ids, sig.KeyID)
	}
	if len(ids) < f.threshold {
		return nil, outcome.Refuse(outcome.BadSignature, "%d of the %d signatures that a %s document needs are by keys of trust document %d", len(ids), f.threshold, l, s.Number)
	}
	slices.Sort(ids)
	return ids, nil
}

// counting returns the signatures of e that count, one for each key.
func (f family) counting(e contract.Envelope) []contract.Signature {
	message := PAE(e.PayloadType, e.Payload)
	out := []contract.Signature{}
	for i, sig := range e.Signatures {
		if i == contract.MaxSignatures {
			break
		}
		raw, err := base64.StdEncoding.DecodeString(sig.Sig)
		pub, trusted := f.keys[sig.KeyID]
		twice := slices.ContainsFunc(out, func(s contract.Signature) bool { return s.KeyID == sig.KeyID })
		if err != nil || !trusted || twice || !ed25519.Verify(pub, message, raw) {
			continue
		}
		out = append(out, sig)
	}
	return out
}

// Countersign adds signatures to an envelope whose payload stays as it is, and
// drops those that don't count under s.
func (s Set) Countersign(l contract.Ladder, e contract.Envelope, keys ...ed25519.PrivateKey) contract.Envelope {
	out := contract.Envelope{PayloadType: e.PayloadType, Payload: e.Payload, Signatures: s.families[l].counting(e)}
	for _, sig := range Sign(l, e.Payload, keys...).Signatures {
		_, trusted := s.families[l].keys[sig.KeyID]
		if trusted && !slices.ContainsFunc(out.Signatures, func(o contract.Signature) bool { return o.KeyID == sig.KeyID }) {
			out.Signatures = append(out.Signatures, sig)
		}
	}
	return out
}

// Vouches says why an envelope of family l does not count; nil if it does. What
// it carries is not looked at.
func (s Set) Vouches(l contract.Ladder, e contract.Envelope) error {
	_, err := s.verify(l, e)
	return err
}

// A Pointer is a pointer that was checked: its signatures count, and it is
// for the component and channel it was asked for. Only this package makes one.
type Pointer struct {
	contract.Pointer
	keyIDs []string
	trust  int
}

// Water is the watermark that this pointer sets.
func (p Pointer) Water() contract.Water {
	return contract.Water{PromotedAt: p.PromotedAt, Trust: p.trust, KeyIDs: p.keyIDs}
}

// Pointer checks the envelope of a pointer for one component and channel.
// Errors bear their word; of a version that is not read: upgrade-needed, deferred.
func (s Set) Pointer(data []byte, c contract.Component, ch contract.Channel) (Pointer, error) {
	e, err := envelope(data)
	if err != nil {
		return Pointer{}, err
	}
	ids, err := s.verify(contract.PointerLadder, e)
	if err != nil {
		return Pointer{}, err
	}
	p, err := contract.Spoken.DecodePointer(e.Payload)
	if err != nil {
		return Pointer{}, documentError(err)
	}
	if p.Component != c {
		return Pointer{}, outcome.Refuse(outcome.WrongComponent, "the pointer is for %q, not for %q", p.Component, c)
	}
	if p.Channel != ch {
		return Pointer{}, outcome.Refuse(outcome.WrongChannel, "the pointer is for channel %q, this box follows %q", p.Channel, ch)
	}
	return Pointer{p, ids, s.Number}, nil
}

// envelope reads an envelope. One that can't be read has nobody's signature.
func envelope(data []byte) (contract.Envelope, error) {
	e, err := contract.Spoken.DecodeEnvelope(data)
	if contract.IsUpgrade(err) {
		return e, outcome.Defer(outcome.UpgradeNeeded, "%w", err)
	}
	if err != nil {
		return e, outcome.Refuse(outcome.BadSignature, "%w", err)
	}
	return e, nil
}

// documentError gives a signed document that does not decode its word: this
// build may just be too old for it.
func documentError(err error) error {
	if contract.IsUpgrade(err) {
		return outcome.Defer(outcome.UpgradeNeeded, "%w", err)
	}
	return outcome.Refuse(outcome.BadBundle, "%w", err)
}

// First checks a trust document that only itself vouches for: who hands it to a
// box says by that whom to trust.
func First(data []byte) (Set, error) {
	e, t, err := decodeTrust(data)
	if err != nil {
		return Set{}, err
	}
	return accept(e, t)
}

// Next checks trust document n+1: it counts only when it satisfies the
// thresholds of n and its own.
func (s Set) Next(data []byte) (Set, error) {
	e, t, err := decodeTrust(data)
	if err != nil {
		return Set{}, err
	}
	if t.Payload.Number != s.Number+1 {
		return Set{}, outcome.Refuse(outcome.BadSignature, "trust document %d stands where %d should", t.Payload.Number, s.Number+1)
	}
	if _, err := s.verify(contract.TrustLadder, e); err != nil {
		return Set{}, err
	}
	return accept(e, t)
}

func accept(e contract.Envelope, t contract.Trust) (Set, error) {
	set, err := newSet(t)
	if err != nil {
		return Set{}, outcome.Refuse(outcome.BadSignature, "%w", err)
	}
	_, err = set.verify(contract.TrustLadder, e)
	return set, err
}

// MaxSteps is how many trust documents one walk follows.
const MaxSteps = 1024

// Walk follows the chain of documents from s, one step at a time and never
// backwards. read returns document n, or fs.ErrNotExist after the last; step, if
// not nil, is told of each before the walk goes on from it. What is returned is
// as far as it came, also with an error.
func (s Set) Walk(read func(n int) ([]byte, error), step func(next Set, data []byte) error) (Set, error) {
	for range MaxSteps {
		data, err := read(s.Number + 1)
		if errors.Is(err, fs.ErrNotExist) {
			return s, nil
		}
		if err != nil {
			return s, err
		}
		next, err := s.Next(data)
		if err != nil {
			return s, fmt.Errorf("trust document %d: %w", s.Number+1, err)
		}
		if step != nil {
			if err := step(next, data); err != nil {
				return s, err
			}
		}
		s = next
	}
	return s, nil
}

// Counting returns the watermarks that still count: not one whose keys a later
// document took out, so that a stolen key leaves none from the future behind. One
// whose keys nobody knows counts until there is a later document.
func (s Set) Counting(seen contract.Seen) contract.Seen {
	out := contract.Seen{Schema: seen.Schema, Channels: map[contract.Channel]contract.Water{}}
	f := s.families[contract.PointerLadder]
	for ch, w := range seen.Channels {
		left := 0
		for _, id := range w.KeyIDs {
			if _, trusted := f.keys[id]; trusted {
				left++
			}
		}
		newest := max(w.Trust, 1) >= s.Number // no document has come after it
		untouched := len(w.KeyIDs) > 0 && left == len(w.KeyIDs)
		enough := len(w.KeyIDs) > 0 && left >= f.threshold
		if newest || untouched || enough {
			out.Channels[ch] = w
		}
	}
	return out
}

// Times are the signed times that a box can't be before: that of the document in
// force, and of what was vouched for under it. An earlier document's count no more,
// so that a new one puts a floor from the future right.
func (s Set) Times(seen contract.Seen) []contract.Time {
	out := []contract.Time{s.Document.PromotedAt}
	for _, w := range s.Counting(seen).Channels {
		if w.Trust == s.Number {
			out = append(out, w.PromotedAt)
		}
	}
	return out
}

// Accepted reads a trust document that root has accepted before: its chain is
// not walked again.
func Accepted(data []byte) (Set, error) {
	_, t, err := decodeTrust(data)
	if err != nil {
		return Set{}, err
	}
	return newSet(t)
}

func decodeTrust(data []byte) (contract.Envelope, contract.Trust, error) {
	e, err := envelope(data)
	if err != nil {
		return e, contract.Trust{}, err
	}
	t, err := contract.Spoken.DecodeTrust(e.Payload)
	if err != nil {
		return e, t, documentError(err)
	}
	return e, t, nil
}

// NewDocument returns the statement of trust document 1: the same keys for
// everything, one of them is enough.
func NewDocument(at contract.Time, pubs ...ed25519.PublicKey) contract.Trust {
	keys, ids := map[string][]byte{}, []string{}
	for _, p := range pubs {
		keys[KeyID(p)] = p
		ids = append(ids, KeyID(p))
	}
	all := contract.Family{Keys: ids, Threshold: 1}
	return contract.Trust{Envelope: contract.One, PromotedAt: at, Payload: contract.TrustPayload{Schema: contract.One, Number: 1, Keys: keys,
		Families: map[contract.Ladder]contract.Family{contract.PointerLadder: all, contract.TrustLadder: all}}}
}

// Names says why a key does not count for a family of documents; nil if it does.
func (s Set) Names(l contract.Ladder, pub ed25519.PublicKey) error {
	if _, ok := s.families[l].keys[KeyID(pub)]; !ok {
		return outcome.Refuse(outcome.BadSignature, "trust document %d does not name key %s for %s documents", s.Number, KeyID(pub), l)
	}
	return nil
}

// Suffices says why the signatures of these keys are not enough for a family of
// documents; nil if they are.
func (s Set) Suffices(l contract.Ladder, pubs ...ed25519.PublicKey) error {
	f := s.families[l]
	counted := map[string]bool{}
	for _, pub := range pubs {
		if err := s.Names(l, pub); err != nil {
			return err
		}
		counted[KeyID(pub)] = true
	}
	if len(counted) < f.threshold || f.threshold == 0 {
		return outcome.Refuse(outcome.BadSignature, "trust document %d wants %d keys to sign a %s document, these are %d", s.Number, f.threshold, l, len(counted))
	}
	return nil
}

// Expired says that s has expired; nil if it has not.
func (s Set) Expired(now contract.Time) error {
	if at := s.Document.Payload.ExpiresAt; !at.IsZero() && !now.Before(at.Time) {
		return outcome.Defer(outcome.Expired, "trust document %d expired at %s: nothing new until there is another (sluice trust)", s.Number, at)
	}
	return nil
}

// Expired says that p has expired; nil if it has not.
func (p Pointer) Expired(now contract.Time) error {
	if at := p.Payload.ExpiresAt; !at.IsZero() && !now.Before(at.Time) {
		return outcome.Defer(outcome.Expired, "the pointer of %s on %s expired at %s, and nobody has refreshed it (sluice refresh)", p.Component, p.Channel, at)
	}
	return nil
}
