// Package fleet is the operator's side: keys, deployments, promotes,
// rollbacks and status. It speaks to a store, never to a box.
package fleet

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/user"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// swapTries is how often a promote that lost a race begins again.
const swapTries = 5

// Init makes a deployment: the first trust document, signed by the operator's
// own key, the bucket's layout, and the file that boxes are enrolled with.
func Init(ctx context.Context, s store.Store, key ed25519.PrivateKey, fleet string, components map[contract.Component]contract.Channel, now time.Time) (contract.Deployment, error) {
	document := trust.NewDocument(contract.At(now), key.Public().(ed25519.PublicKey))
	envelope := trust.Sign(contract.TrustLadder, document.Encode(), key)
	d := contract.Deployment{Schema: contract.One, Store: s.String(), Fleet: fleet, Trust: envelope, Components: components}
	if o, err := s.Get(ctx, contract.TrustKey(1), contract.MaxEnvelope, ""); err == nil {
		// Again: the same document goes out, if it is the same key that would be trusted.
		set, err := trust.First(o.Data)
		if err != nil {
			return d, err
		}
		if err := set.Trusts(contract.PointerLadder, key.Public().(ed25519.PublicKey)); err != nil {
			return d, fmt.Errorf("%s is a deployment already, of another key: %w", s, err)
		}
		d.Trust, err = contract.DecodeEnvelope(o.Data)
		return d, err
	} else if !store.IsNotExist(err) {
		return d, err
	}
	if _, err := store.PutBytes(ctx, s, contract.TrustKey(1), envelope.Encode(), store.Condition{IfNone: true}); err != nil {
		return d, err
	}
	return d, Ring(ctx, s, now)
}

// Ring changes control/serial: a bell, no more.
func Ring(ctx context.Context, s store.Store, now time.Time) error {
	_, err := store.PutBytes(ctx, s, contract.SerialKey, []byte(contract.At(now).String()+" "+newOp()+"\n"), store.Condition{})
	return err
}

// newOp is an id that a lost answer can be looked up by.
func newOp() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// Actor is who is written into the audit.
func Actor() string {
	host, _ := os.Hostname()
	if u, err := user.Current(); err == nil {
		return u.Username + "@" + host
	}
	return host
}

// An Operator changes pointers.
type Operator struct {
	Store store.Store
	Key   ed25519.PrivateKey
	Trust trust.Set // what the store's own documents say
	Actor string
	Now   func() time.Time
}

// NewOperator walks the store's trust documents, and checks that the key is
// one whose promotes count.
func NewOperator(ctx context.Context, s store.Store, key ed25519.PrivateKey) (*Operator, error) {
	set, err := Trust(ctx, s)
	if err != nil {
		return nil, err
	}
	if err := set.Trusts(contract.PointerLadder, key.Public().(ed25519.PublicKey)); err != nil {
		return nil, outcome.Config("boxes would not accept a promote of this key: %w", err)
	}
	return &Operator{s, key, set, Actor(), time.Now}, nil
}

// Trust walks the trust documents of a store from the first.
func Trust(ctx context.Context, s store.Store) (trust.Set, error) {
	o, err := s.Get(ctx, contract.TrustKey(1), contract.MaxEnvelope, "")
	if store.IsNotExist(err) {
		return trust.Set{}, outcome.Config("%s is no deployment yet: run `sluice init` first", s)
	}
	if err != nil {
		return trust.Set{}, err
	}
	set, err := trust.First(o.Data)
	for err == nil {
		o, err = s.Get(ctx, contract.TrustKey(set.Number+1), contract.MaxEnvelope, "")
		if store.IsNotExist(err) {
			return set, nil
		}
		if err == nil {
			set, err = set.Next(o.Data)
		}
	}
	return set, err
}

// Pointer reads the pointer of a channel; without one its ETag is "".
func (o *Operator) Pointer(ctx context.Context, c contract.Component, ch contract.Channel) (trust.Pointer, string, error) {
	obj, err := o.Store.Get(ctx, contract.PointerKey(c, ch), contract.MaxEnvelope, "")
	if store.IsNotExist(err) {
		return trust.Pointer{}, "", nil
	}
	if err != nil {
		return trust.Pointer{}, "", err
	}
	p, err := o.Trust.Pointer(obj.Data, c, ch)
	return p, obj.ETag, err
}

// change is what a promote or a rollback does to a pointer.
type change func(p *contract.Pointer) (action string, err error)

// swap changes a channel's pointer: read, change, sign, compare and swap. A
// lost race begins again from the read. The bell is rung last.
func (o *Operator) swap(ctx context.Context, c contract.Component, ch contract.Channel, change change) (contract.Pointer, error) {
	op := newOp()
	var lost error // a write whose answer did not come
	for range swapTries {
		old, etag, err := o.Pointer(ctx, c, ch)
		if err != nil {
			return contract.Pointer{}, errors.Join(lost, err)
		}
		if len(old.Payload.Audit) > 0 && old.Payload.Audit[0].Op == op {
			return old.Pointer, Ring(ctx, o.Store, o.Now()) // it was ours, only the answer was lost
		}
		if lost != nil && !errors.Is(lost, store.ErrConflict) {
			return contract.Pointer{}, lost
		}
		next := old.Pointer
		if etag == "" {
			next = contract.Pointer{Envelope: contract.One, Component: c, Channel: ch, Payload: contract.PointerPayload{Schema: contract.One, History: []contract.Release{}, Audit: []contract.Audit{}}}
		}
		from := next.Payload.Current.Version
		action, err := change(&next)
		if err != nil {
			return contract.Pointer{}, err
		}
		now := o.Now()
		// Strictly newer, also when this clock went backwards: the replay guard reads this and nothing else.
		if earliest := old.PromotedAt.Add(time.Nanosecond); now.Before(earliest) {
			now = earliest
		}
		next.PromotedAt = contract.At(now)
		entry := contract.Audit{Action: action, From: string(from), To: string(next.Payload.Current.Version), Actor: o.Actor, At: next.PromotedAt, Op: op}
		next.Payload.Audit = append([]contract.Audit{entry}, next.Payload.Audit...)
		data, err := o.fit(&next)
		if err != nil {
			return contract.Pointer{}, err
		}
		cond := store.Condition{IfMatch: etag, IfNone: etag == ""}
		if _, lost = store.PutBytes(ctx, o.Store, contract.PointerKey(c, ch), data, cond); lost != nil {
			continue // read back: it may be ours, somebody else's, or not written
		}
		return next, Ring(ctx, o.Store, now)
	}
	return contract.Pointer{}, fmt.Errorf("promoting %s on %s: somebody else wrote the pointer %d times in a row: look at `sluice status`, then run it again", c, ch, swapTries)
}

// fit signs a pointer that keeps to the limits: history and audit are
// trimmed, the audit first.
func (o *Operator) fit(p *contract.Pointer) ([]byte, error) {
	p.Payload.History = p.Payload.History[:min(len(p.Payload.History), contract.MaxHistory)]
	p.Payload.Audit = p.Payload.Audit[:min(len(p.Payload.Audit), contract.MaxAudit)]
	for {
		data := trust.Sign(contract.PointerLadder, p.Encode(), o.Key).Encode()
		switch {
		case len(data) <= contract.MaxPointer:
			return data, nil
		case len(p.Payload.Audit) > 1:
			p.Payload.Audit = p.Payload.Audit[:len(p.Payload.Audit)-1]
		case len(p.Payload.History) > 1:
			p.Payload.History = p.Payload.History[:len(p.Payload.History)-1]
		default:
			return nil, fmt.Errorf("the pointer of %s would have %d bytes, the most is %d: a release with fewer platforms fits", p.Component, len(data), contract.MaxPointer)
		}
	}
}

// Promote makes a release current. What is current already pushes nothing
// onto the history.
func (o *Operator) Promote(ctx context.Context, c contract.Component, ch contract.Channel, r contract.Release, spread time.Duration) (contract.Pointer, error) {
	return o.swap(ctx, c, ch, func(p *contract.Pointer) (string, error) {
		old := p.Payload.Current
		if old.Version != "" && old.Version != r.Version {
			p.Payload.History = append([]contract.Release{old}, p.Payload.History...)
		}
		p.Payload.Current, p.Payload.Spread = r, contract.Duration(spread)
		return "promote", nil
	})
}

// Rollback makes the newest release of the history current. The outgoing one
// is not pushed back, so that a second rollback goes one further back.
func (o *Operator) Rollback(ctx context.Context, c contract.Component, ch contract.Channel) (contract.Pointer, error) {
	return o.swap(ctx, c, ch, func(p *contract.Pointer) (string, error) {
		if len(p.Payload.History) == 0 {
			return "", outcome.Refuse(outcome.NoArtifact, "the history of %s on %s is empty: there is nothing to go back to", c, ch)
		}
		p.Payload.Current, p.Payload.History = p.Payload.History[0], p.Payload.History[1:]
		p.Payload.Spread = 0 // going back is not put off
		return "rollback", nil
	})
}
