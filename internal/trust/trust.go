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
	"fmt"
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

// Sign puts a payload of ladder l into an envelope.
func Sign(l contract.Ladder, payload []byte, keys ...ed25519.PrivateKey) contract.Envelope {
	e := contract.Envelope{PayloadType: contract.PayloadType(l), Payload: payload, Signatures: []contract.Signature{}}
	for _, k := range keys {
		sig := ed25519.Sign(k, PAE(e.PayloadType, payload))
		e.Signatures = append(e.Signatures, contract.Signature{KeyID: KeyID(k.Public().(ed25519.PublicKey)), Sig: base64.StdEncoding.EncodeToString(sig)})
	}
	return e
}

// A Set is the trust that is in force: who may sign what.
type Set struct {
	Number   int
	families map[contract.Ladder]family
}

type family struct {
	keys      map[string]ed25519.PublicKey
	threshold int
}

func newSet(t contract.Trust) (Set, error) {
	s := Set{t.Payload.Number, map[contract.Ladder]family{}}
	for name, f := range t.Payload.Families {
		out := family{map[string]ed25519.PublicKey{}, f.Threshold}
		for _, id := range f.Keys {
			pub := ed25519.PublicKey(t.Payload.Keys[id])
			if len(pub) != ed25519.PublicKeySize || KeyID(pub) != id {
				return s, fmt.Errorf("trust document %d: key %q of family %s is missing or not the key of that id", t.Payload.Number, id, name)
			}
			out.keys[id] = pub
		}
		if len(out.keys) < out.threshold {
			return s, fmt.Errorf("trust document %d: family %s needs %d signatures of %d keys", t.Payload.Number, name, out.threshold, len(out.keys))
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
	message := PAE(e.PayloadType, e.Payload)
	var ids []string
	for i, sig := range e.Signatures {
		if i == contract.MaxSignatures {
			break
		}
		raw, err := base64.StdEncoding.DecodeString(sig.Sig)
		pub, trusted := f.keys[sig.KeyID]
		if err != nil || !trusted || slices.Contains(ids, sig.KeyID) || !ed25519.Verify(pub, message, raw) {
			continue
		}
		ids = append(ids, sig.KeyID)
	}
	if len(ids) < f.threshold {
		return nil, outcome.Refuse(outcome.BadSignature, "%d of the %d signatures that a %s document needs are by keys of trust document %d", len(ids), f.threshold, l, s.Number)
	}
	slices.Sort(ids)
	return ids, nil
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
	e, err := contract.DecodeEnvelope(data)
	if err != nil {
		return Pointer{}, outcome.Refuse(outcome.BadSignature, "%w", err)
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

// documentError gives a signed document that does not decode its word: this
// build may just be too old for it.
func documentError(err error) error {
	if _, upgrade := err.(*contract.UpgradeError); upgrade {
		return outcome.Defer(outcome.UpgradeNeeded, "%w", err)
	}
	return outcome.Refuse(outcome.BadBundle, "%w", err)
}

// First checks a trust document number 1, which only itself vouches for: who
// hands it to a box says by that whom to trust.
func First(data []byte) (Set, error) {
	return accept(data, 1, nil)
}

// Next checks trust document n+1: it counts only when it satisfies the
// thresholds of n and its own.
func (s Set) Next(data []byte) (Set, error) {
	return accept(data, s.Number+1, &s)
}

func accept(data []byte, number int, before *Set) (Set, error) {
	e, t, err := decodeTrust(data)
	if err != nil {
		return Set{}, err
	}
	if t.Payload.Number != number {
		return Set{}, outcome.Refuse(outcome.BadSignature, "trust document %d stands where %d should", t.Payload.Number, number)
	}
	next, err := newSet(t)
	if err != nil {
		return Set{}, outcome.Refuse(outcome.BadSignature, "%w", err)
	}
	if _, err := next.verify(contract.TrustLadder, e); err != nil {
		return Set{}, err
	}
	if before != nil {
		if _, err := before.verify(contract.TrustLadder, e); err != nil {
			return Set{}, err
		}
	}
	return next, nil
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
	e, err := contract.DecodeEnvelope(data)
	if err != nil {
		return e, contract.Trust{}, outcome.Refuse(outcome.BadSignature, "%w", err)
	}
	t, err := contract.Spoken.DecodeTrust(e.Payload)
	if err != nil {
		return e, t, documentError(err)
	}
	return e, t, nil
}

// NewDocument returns the statement of trust document 1: one key for
// everything.
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

// Trusts says why a key does not count for a family of documents; nil if it
// does.
func (s Set) Trusts(l contract.Ladder, pub ed25519.PublicKey) error {
	if _, ok := s.families[l].keys[KeyID(pub)]; !ok {
		return outcome.Refuse(outcome.BadSignature, "trust document %d does not name key %s for %s documents", s.Number, KeyID(pub), l)
	}
	return nil
}
