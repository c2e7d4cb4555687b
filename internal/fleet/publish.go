package fleet

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// A Publication is a trust document that is about to be published, and the
// pointers that it is to vouch for.
type Publication struct {
	store     store.Store
	keys      []ed25519.PrivateKey
	before    trust.Set
	Set       trust.Set
	data      []byte
	published bool // already, by an earlier run

	Anew    []Anew   // pointers that are signed anew, with unchanged promote times
	Skipped []string // those that are not, and why
}

// Anew is a pointer that only the keys before vouch for.
type Anew struct {
	Key     string
	Pointer contract.Pointer // zero but for its core, if this build can't read it
	payload []byte           // what was looked at, and nothing else, is signed
}

// signAhead is how far in the future a pointer that is signed anew may be: clocks of
// operators differ by less.
const signAhead = 5 * time.Minute

// Prepare checks a draft against what the store has, and looks at all its
// pointers. Nothing is changed. keys sign pointers.
func Prepare(ctx context.Context, s store.Store, d Draft, keys []ed25519.PrivateKey, now time.Time, strand bool) (*Publication, error) {
	if n := d.Document.Payload.Number; n < 2 {
		return nil, outcome.Config("trust document %d is made by `sluice init`: publish the next", n)
	}
	chain, err := Walk(ctx, s)
	if err != nil {
		return nil, err
	}
	p := &Publication{store: s, keys: keys, before: chain.Set, data: d.Envelope.Encode()}
	if chain.Set.Number == d.Document.Payload.Number { // again: it was cut after the first step
		p.published, p.before = true, chain.Before
		there, err := contract.Spoken.DecodeEnvelope(chain.Data)
		if err != nil || !bytes.Equal(there.Payload, d.Envelope.Payload) { // who has signed it may differ
			return nil, outcome.Config("trust document %d is in the store, and says something else: begin another file", chain.Set.Number)
		}
		p.data = chain.Data
	} else if err := follows(d, chain.Set); err != nil {
		return nil, err
	}
	if p.Set, err = p.before.Next(p.data); err != nil {
		return nil, err
	}
	for _, l := range Families {
		if _, there := p.Set.Document.Payload.Families[l]; !there {
			return nil, outcome.Config("the document names no keys for %s documents: boxes that take it would never take another", l)
		}
	}
	if err := p.Set.Expired(contract.At(now)); err != nil {
		return nil, err
	}
	if !strand {
		if err := stranded(ctx, s, func(string) {}, func(beat) bool { return true }, needed{contract.TrustLadder, p.Set.Document.Payload.Schema, "what it says"}); err != nil {
			return nil, err
		}
	}
	return p, p.survey(ctx, now)
}

// survey looks at all pointers of the store.
func (p *Publication) survey(ctx context.Context, now time.Time) error {
	listed, err := p.store.List(ctx, contract.PointersPrefix)
	if err != nil {
		return err
	}
	p.Anew, p.Skipped = nil, nil
	for _, key := range listed {
		if _, _, _, ok := contract.ParsePointerKey(key); !ok {
			continue
		}
		if err := p.look(ctx, key, now); err != nil {
			return err
		}
	}
	return nil
}

// look decides what becomes of one pointer.
func (p *Publication) look(ctx context.Context, key string, now time.Time) error {
	e, _, err := p.read(ctx, key)
	if contract.IsUpgrade(err) {
		p.Skipped = append(p.Skipped, fmt.Sprintf("%s: needs a newer sluice: %s", key, err))
		return nil
	}
	if store.IsNotExist(err) { // since it was listed
		return nil
	}
	if errors.Is(err, store.ErrTooLarge) {
		p.Skipped = append(p.Skipped, fmt.Sprintf("%s: %s", key, err))
		return nil
	}
	if err != nil {
		return err
	}
	if p.Set.Vouches(contract.PointerLadder, e) == nil {
		return nil
	}
	core, cerr := contract.DecodeCore(e.Encode())
	if err := errors.Join(p.before.Vouches(contract.PointerLadder, e), cerr); err != nil {
		p.Skipped = append(p.Skipped, fmt.Sprintf("%s: %s", key, err))
		return nil
	}
	if core.PromotedAt.After(now.Add(signAhead)) {
		p.Skipped = append(p.Skipped, fmt.Sprintf("%s: it says that it was promoted at %s, which is to come: promote anew, with -replace", key, core.PromotedAt))
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
	p.Anew = append(p.Anew, Anew{key, shown, e.Payload})
	return nil
}

func (p *Publication) read(ctx context.Context, key string) (contract.Envelope, string, error) {
	o, err := p.store.Get(ctx, key, contract.MaxEnvelope, "")
	if err != nil {
		return contract.Envelope{}, "", err
	}
	e, err := contract.Spoken.DecodeEnvelope(o.Data)
	if err != nil && !contract.IsUpgrade(err) { // nobody's
		return contract.Envelope{}, o.ETag, nil
	}
	return e, o.ETag, err
}

// Publish writes the document, then the pointers, then rings the bell. It may be
// cut and run again.
func (p *Publication) Publish(ctx context.Context, now time.Time) error {
	if !p.published {
		key := contract.TrustKey(p.Set.Number)
		if _, err := store.PutBytes(ctx, p.store, key, p.data, store.Condition{IfNone: true}); err != nil {
			o, rerr := p.store.Get(ctx, key, contract.MaxEnvelope, "")
			if rerr != nil || !bytes.Equal(o.Data, p.data) { // else it is ours, and only the answer was lost
				return errors.Join(err, rerr)
			}
		}
	}
	var errs []error
	for _, r := range p.Anew { // one that can't be keeps no other from it
		errs = append(errs, p.resign(ctx, r))
	}
	// A promote that came between was signed by keys that count no more.
	after := *p
	if err := after.survey(ctx, now); err != nil {
		errs = append(errs, err)
	} else if len(after.Anew) > 0 && errors.Join(errs...) == nil {
		errs = append(errs, fmt.Errorf("%q was promoted meanwhile", after.Anew[0].Key))
	}
	if err := errors.Join(errs...); err != nil {
		return errors.Join(fmt.Errorf("trust document %d is published, and not all pointers are signed anew: publish it again, and look at the list: %w", p.Set.Number, err), Ring(ctx, p.store, now))
	}
	return Ring(ctx, p.store, now)
}

// resign signs one pointer anew: exactly what was looked at.
func (p *Publication) resign(ctx context.Context, r Anew) error {
	var lost error
	for range swapTries {
		e, etag, err := p.read(ctx, r.Key)
		if err != nil {
			return errors.Join(lost, err)
		}
		if p.Set.Vouches(contract.PointerLadder, e) == nil { // already, by whomever
			return nil
		}
		if !bytes.Equal(e.Payload, r.payload) {
			return fmt.Errorf("%q is another pointer by now than the one that was looked at", r.Key)
		}
		if err := p.before.Vouches(contract.PointerLadder, e); err != nil {
			return err
		}
		signed := p.Set.Countersign(contract.PointerLadder, e, p.keys...)
		if err := p.Set.Vouches(contract.PointerLadder, signed); err != nil {
			return err
		}
		if _, lost = store.PutBytes(ctx, p.store, r.Key, signed.Encode(), store.Condition{IfMatch: etag}); lost == nil {
			return nil
		}
	}
	return fmt.Errorf("signing %q anew: %w", r.Key, lost)
}
