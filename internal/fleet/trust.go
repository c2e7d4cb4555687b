package fleet

import (
	"bytes"
	"context"
	"crypto/ed25519"
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

// Families are those that a trust document names keys for.
var Families = []contract.Ladder{contract.PointerLadder, contract.TrustLadder}

// A Chain is how far the trust documents of a store lead.
type Chain struct {
	Before trust.Set // the last but one; number 0 if there is none
	Set    trust.Set // the newest
	Data   []byte    // that one, as it is in the store
}

// Walk follows the trust documents of a store from the first. What is returned
// is as far as it came, also with an error.
func Walk(ctx context.Context, s store.Store) (Chain, error) {
	var c Chain
	get := func(n int) ([]byte, error) {
		o, err := s.Get(ctx, contract.TrustKey(n), contract.MaxEnvelope, "")
		return o.Data, err
	}
	data, err := get(1)
	if err != nil {
		return c, err
	}
	first, err := trust.First(data)
	if err != nil {
		return c, err
	}
	if first.Number != 1 {
		return c, outcome.Refuse(outcome.BadSignature, "trust document %d stands where 1 should", first.Number)
	}
	c.Set, c.Data = first, data
	_, err = first.Walk(get, func(next trust.Set, data []byte) error {
		c = Chain{c.Set, next, data}
		return nil
	})
	if err != nil {
		return c, err
	}
	return c, gap(ctx, s, c.Set.Number)
}

// gap says that a chain ends although there are documents after its end.
func gap(ctx context.Context, s store.Store, end int) error {
	keys, err := s.List(ctx, contract.TrustPrefix)
	if err != nil {
		return err
	}
	for _, key := range keys {
		var n int
		if _, err := fmt.Sscanf(key, contract.TrustPrefix+"%d.json", &n); err == nil && n > end && key == contract.TrustKey(n) {
			return outcome.Config("trust document %d is missing in %s, and %d is there, which it leads to: boxes can't follow; put it back from a copy", end+1, s, n)
		}
	}
	return nil
}

// Trust returns the newest trust document of a store, as far as this build can
// read them.
func Trust(ctx context.Context, s store.Store) (trust.Set, error) {
	chain, err := Walk(ctx, s)
	if chain.Set.Number == 0 && store.IsNotExist(err) {
		return chain.Set, outcome.Config("%s is no deployment yet: run `sluice init` first", s)
	}
	return chain.Set, err
}

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
	if err == nil && d.Document.Payload.Number != set.Number+1 {
		err = outcome.Config("%q is trust document %d, and the store has %d: begin another file", path, d.Document.Payload.Number, set.Number)
	}
	return d, err
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

// Sign adds a signature to the draft.
func (d *Draft) Sign(key ed25519.PrivateKey) {
	signed := trust.Sign(contract.TrustLadder, d.Envelope.Payload, key).Signatures[0]
	d.Envelope.Signatures = slices.DeleteFunc(slices.Clone(d.Envelope.Signatures), func(s contract.Signature) bool { return s.KeyID == signed.KeyID })
	d.Envelope.Signatures = append(d.Envelope.Signatures, signed)
}

// A Publication is a trust document that is about to be published, and the
// pointers that it is to vouch for.
type Publication struct {
	store  store.Store
	keys   []ed25519.PrivateKey
	before trust.Set
	Set    trust.Set
	data   []byte
	there  bool

	Resign []Resigned // pointers that are signed anew, with unchanged promote times
	Leave  []string   // those that are not, and why
}

// A Resigned is a pointer whose signatures are those of the keys before.
type Resigned struct {
	Key     string
	Pointer contract.Pointer // zero but for its core, if this build can't read it
}

// signAhead is how far in the future a pointer that is signed anew may be.
const signAhead = 5 * time.Minute

// Prepare checks a draft against what the store has, and looks at all its
// pointers. Nothing is changed. keys sign pointers.
func Prepare(ctx context.Context, s store.Store, d Draft, keys []ed25519.PrivateKey, now time.Time, strand bool) (*Publication, error) {
	chain, err := Walk(ctx, s)
	if err != nil {
		return nil, err
	}
	p := &Publication{store: s, keys: keys, before: chain.Set, data: d.Envelope.Encode()}
	if chain.Set.Number == d.Document.Payload.Number { // again: it was cut after the first step
		p.there, p.before = true, chain.Before
		if !bytes.Equal(chain.Data, p.data) {
			return nil, outcome.Refuse(outcome.Mutated, "trust document %d is in the store, and says something else: begin with a new draft", chain.Set.Number)
		}
	}
	if p.Set, err = p.before.Next(p.data); err != nil {
		return nil, err
	}
	for _, l := range Families {
		if _, there := p.Set.Document.Payload.Families[l]; !there {
			return nil, outcome.Refuse(outcome.BadSignature, "the document names no keys for %s documents: boxes that take it would never take another", l)
		}
	}
	if err := p.Set.Expired(contract.At(now)); err != nil {
		return nil, err
	}
	if !strand {
		if err := stranded(ctx, s, contract.TrustLadder, p.Set.Document.Payload.Schema, "what it says", func(beat) bool { return true }); err != nil {
			return nil, err
		}
	}
	listed, err := s.List(ctx, contract.PointersPrefix)
	if err != nil {
		return nil, err
	}
	for _, key := range listed {
		if _, _, _, ok := contract.ParsePointerKey(key); !ok {
			continue
		}
		if err := p.look(ctx, key, now); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// look decides what becomes of one pointer.
func (p *Publication) look(ctx context.Context, key string, now time.Time) error {
	e, _, err := p.read(ctx, key)
	if err != nil {
		return err
	}
	if p.Set.Vouches(contract.PointerLadder, e) == nil {
		return nil
	}
	core, cerr := contract.DecodeCore(e.Encode())
	if err := errors.Join(p.before.Vouches(contract.PointerLadder, e), cerr); err != nil {
		p.Leave = append(p.Leave, fmt.Sprintf("%s: %s", key, err))
		return nil
	}
	if core.PromotedAt.After(now.Add(signAhead)) {
		p.Leave = append(p.Leave, fmt.Sprintf("%s: it says that it was promoted at %s, which is to come: promote anew, with -replace", key, core.PromotedAt))
		return nil
	}
	signed := p.Set.Countersign(contract.PointerLadder, e, p.keys...)
	if err := p.Set.Vouches(contract.PointerLadder, signed); err != nil {
		return outcome.Config("boxes would not accept %q any more: %w: give the keys that sign it anew with -key", key, err)
	}
	shown := contract.Pointer{Component: core.Component, Channel: core.Channel, PromotedAt: core.PromotedAt}
	if full, err := contract.Spoken.DecodePointer(e.Payload); err == nil {
		shown = full
	}
	p.Resign = append(p.Resign, Resigned{key, shown})
	return nil
}

func (p *Publication) read(ctx context.Context, key string) (contract.Envelope, string, error) {
	o, err := p.store.Get(ctx, key, contract.MaxEnvelope, "")
	if err != nil {
		return contract.Envelope{}, "", err
	}
	e, err := contract.Spoken.DecodeEnvelope(o.Data)
	if err != nil { // nobody's
		return contract.Envelope{}, o.ETag, nil
	}
	return e, o.ETag, nil
}

// Publish writes the document, then the pointers, then rings the bell. It may be
// cut and run again.
func (p *Publication) Publish(ctx context.Context, now time.Time) error {
	if !p.there {
		key := contract.TrustKey(p.Set.Number)
		if _, err := store.PutBytes(ctx, p.store, key, p.data, store.Condition{IfNone: true}); err != nil {
			o, rerr := p.store.Get(ctx, key, contract.MaxEnvelope, "")
			if rerr != nil || !bytes.Equal(o.Data, p.data) { // else it is ours, and only the answer was lost
				return errors.Join(err, rerr)
			}
		}
	}
	for _, r := range p.Resign {
		if err := p.resign(ctx, r.Key); err != nil {
			return fmt.Errorf("trust document %d is published, and not yet all pointers; publish it again: %w", p.Set.Number, err)
		}
	}
	return Ring(ctx, p.store, now)
}

func (p *Publication) resign(ctx context.Context, key string) error {
	var lost error
	for range swapTries {
		e, etag, err := p.read(ctx, key)
		if err != nil {
			return errors.Join(lost, err)
		}
		if p.Set.Vouches(contract.PointerLadder, e) == nil { // already, by whomever
			return nil
		}
		if err := p.before.Vouches(contract.PointerLadder, e); err != nil {
			return err
		}
		signed := p.Set.Countersign(contract.PointerLadder, e, p.keys...)
		if err := p.Set.Vouches(contract.PointerLadder, signed); err != nil {
			return err
		}
		if _, lost = store.PutBytes(ctx, p.store, key, signed.Encode(), store.Condition{IfMatch: etag}); lost == nil {
			return nil
		}
	}
	return lost
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
