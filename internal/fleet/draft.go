package fleet

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// A Draft is the next trust document while it is made: a file that travels to
// where the keys are, and back. What it holds is public.
type Draft struct {
	Document contract.Trust
	Envelope contract.Envelope
}

// NewDraft begins the document after set, which says the same.
func NewDraft(set trust.Set) Draft {
	d := Draft{Document: set.Document}
	d.Document.Payload.Number++
	return d
}

// ReadDraft reads a draft, or a published document.
func ReadDraft(path string) (Draft, error) {
	data, err := record.ReadFile(path, contract.MaxEnvelope)
	if err != nil {
		return Draft{}, err
	}
	e, err := contract.Spoken.DecodeEnvelope(data)
	if err != nil {
		return Draft{}, fmt.Errorf("%q: %w", path, err)
	}
	t, err := contract.Spoken.DecodeTrust(e.Payload)
	if err != nil {
		return Draft{}, fmt.Errorf("%q: %w", path, err)
	}
	return Draft{t, e}, nil
}

// Open reads the draft at path, or begins one there with what the store has.
func Open(ctx context.Context, s store.Store, path string) (Draft, error) {
	set, err := Trust(ctx, s)
	if err != nil {
		return Draft{}, err
	}
	d, err := ReadDraft(path)
	if errors.Is(err, fs.ErrNotExist) {
		return NewDraft(set), nil
	}
	if err == nil {
		err = follows(d, set)
	}
	return d, err
}

// follows says that a draft is not of the document after set.
func follows(d Draft, set trust.Set) error {
	if d.Document.Payload.Number != set.Number+1 {
		return outcome.Config("the file is trust document %d, and the store has %d: begin another file", d.Document.Payload.Number, set.Number)
	}
	return nil
}

// Save writes the draft.
func (d Draft) Save(path string) error {
	return (&durable.Disk{}).WriteFile(path, d.Envelope.Encode(), 0o644)
}

// Edit changes what the draft says. Its signatures go: they were for what it
// said before.
func (d *Draft) Edit(now time.Time, change func(*contract.TrustPayload) error) error {
	p := &d.Document.Payload
	families, keys := maps.Clone(p.Families), maps.Clone(p.Keys)
	p.Families, p.Keys = families, keys
	if err := change(p); err != nil {
		return err
	}
	used := map[string][]byte{}
	for name, f := range p.Families {
		if f.Threshold > min(len(f.Keys), contract.MaxSignatures) {
			return outcome.Usage("family %s would need %d signatures of %d keys: lower its threshold first, or add another key", name, f.Threshold, len(f.Keys))
		}
		for _, id := range f.Keys {
			used[id] = p.Keys[id]
		}
	}
	p.Keys = used
	if earliest := d.Document.PromotedAt.Add(time.Nanosecond); now.Before(earliest) {
		now = earliest
	}
	d.Document.PromotedAt = contract.At(now)
	d.Envelope = trust.Sign(contract.TrustLadder, d.Document.Encode())
	return nil
}

// AddKey lets a key sign documents of families.
func AddKey(pub ed25519.PublicKey, families []contract.Ladder) func(*contract.TrustPayload) error {
	return func(p *contract.TrustPayload) error {
		id := trust.KeyID(pub)
		p.Keys[id] = pub
		for _, name := range families {
			f := p.Families[name]
			if slices.Contains(f.Keys, id) {
				return outcome.Usage("key %s counts for %s documents already", id, name)
			}
			f.Keys = append(slices.Clone(f.Keys), id)
			f.Threshold = max(f.Threshold, 1)
			p.Families[name] = f
		}
		return nil
	}
}

// RemoveKey takes a key out of families.
func RemoveKey(id string, families []contract.Ladder) func(*contract.TrustPayload) error {
	return func(p *contract.TrustPayload) error {
		found := false
		for _, name := range families {
			f := p.Families[name]
			left := slices.DeleteFunc(slices.Clone(f.Keys), func(k string) bool { return k == id })
			if len(left) == len(f.Keys) {
				continue
			}
			found, f.Keys = true, left
			p.Families[name] = f
		}
		if !found {
			return outcome.Usage("key %q counts for none of these families: `sluice trust show` lists them", id)
		}
		return nil
	}
}

// Threshold sets how many keys must sign a document of a family.
func Threshold(families []contract.Ladder, n int) func(*contract.TrustPayload) error {
	return func(p *contract.TrustPayload) error {
		for _, name := range families {
			f := p.Families[name]
			if n < 1 {
				return outcome.Usage("a threshold of %d: at least one key must sign", n)
			}
			f.Threshold = n
			p.Families[name] = f
		}
		return nil
	}
}

// SignedBy returns the ids of the keys that have signed the draft; and what
// is to be said of each signature.
func (d Draft) SignedBy() map[string]string {
	out := map[string]string{}
	for _, s := range d.Envelope.Signatures {
		pub := d.Document.Payload.Keys[s.KeyID]
		out[s.KeyID] = "a key that is not in it"
		if pub == nil {
			continue
		}
		raw, err := base64.StdEncoding.DecodeString(s.Sig)
		if out[s.KeyID] = "right"; err != nil || !ed25519.Verify(pub, trust.PAE(d.Envelope.PayloadType, d.Envelope.Payload), raw) {
			out[s.KeyID] = "WRONG"
		}
	}
	return out
}

// Sign adds a signature to the draft.
func (d *Draft) Sign(key ed25519.PrivateKey) error {
	signed := trust.Sign(contract.TrustLadder, d.Envelope.Payload, key).Signatures[0]
	d.Envelope.Signatures = slices.DeleteFunc(slices.Clone(d.Envelope.Signatures), func(s contract.Signature) bool { return s.KeyID == signed.KeyID })
	d.Envelope.Signatures = append(d.Envelope.Signatures, signed)
	if len(d.Envelope.Signatures) > contract.MaxSignatures {
		return outcome.Config("the file has %d signatures already, no more are looked at: begin another file", contract.MaxSignatures)
	}
	return nil
}

// Describe says in words what a trust document says.
func Describe(t contract.Trust) string {
	var b strings.Builder
	fmt.Fprintf(&b, "trust document %d, made at %s", t.Payload.Number, t.PromotedAt.Format(time.RFC3339))
	if at := t.Payload.ExpiresAt; !at.IsZero() {
		fmt.Fprintf(&b, ", expires at %s", at.Format(time.RFC3339))
	}
	b.WriteString("\n")
	for _, name := range slices.Sorted(maps.Keys(t.Payload.Families)) {
		f := t.Payload.Families[name]
		fmt.Fprintf(&b, "  %s: %d of\n", name, f.Threshold)
		for _, id := range f.Keys {
			fmt.Fprintf(&b, "    %s\n", id)
		}
	}
	return b.String()
}
