// Package fleet is the operator's side: keys, deployments, promotes,
// rollbacks and status. It speaks to a store, never to a box.
package fleet

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/user"
	"slices"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// maxSkew is how far an operator's clock may be off the store's.
const maxSkew = 5 * time.Minute

// swapTries is how often a promote that lost a race begins again.
const swapTries = 5

// Init makes a deployment: the first trust document, signed by the operator's
// own key, the bucket's layout, and the file that boxes are enrolled with. Run
// again it makes that file again, with the newest trust document.
func Init(ctx context.Context, s store.Store, key ed25519.PrivateKey, fleet string, components map[contract.Component]contract.Channel, now time.Time) (contract.Deployment, error) {
	pub := key.Public().(ed25519.PublicKey)
	envelope := trust.Sign(contract.TrustLadder, trust.NewDocument(contract.At(now), pub).Encode(), key)
	d := contract.Deployment{Schema: contract.One, Store: s.String(), Fleet: fleet, Trust: envelope, Components: components}
	chain, err := Walk(ctx, s)
	if errors.Is(err, ErrNoDeployment) {
		if _, err := store.PutBytes(ctx, s, contract.TrustKey(1), envelope.Encode(), store.Condition{IfNone: true}); err != nil {
			return d, err
		}
		return d, Ring(ctx, s, now)
	}
	if err != nil {
		return d, err
	}
	if err := chain.Set.Names(contract.PointerLadder, pub); err != nil {
		return d, fmt.Errorf("%s is a deployment already, of other keys: %w", s, err)
	}
	d.Trust, err = contract.Spoken.DecodeEnvelope(chain.Data)
	return d, err
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
	Store   store.Store
	Keys    []ed25519.PrivateKey
	Trust   trust.Set // what the store's own documents say
	Actor   string
	Now     func() time.Time
	Tell    func(string) // what somebody should know, though it went well
	Strand  bool         // write also what boxes of the channel can't read
	Replace bool         // a pointer that no trusted key signed gives way to a new one
}

// NewOperator walks the store's trust documents, and checks that the keys are
// enough for a promote that counts.
func NewOperator(ctx context.Context, s store.Store, keys ...ed25519.PrivateKey) (*Operator, error) {
	set, err := Trust(ctx, s)
	if err != nil {
		return nil, err
	}
	if len(keys) > contract.MaxSignatures {
		return nil, outcome.Usage("%d keys: boxes look at %d signatures", len(keys), contract.MaxSignatures)
	}
	if err := set.Suffices(contract.PointerLadder, publics(keys)...); err != nil {
		return nil, outcome.Config("boxes would not accept a promote of yours: %w", err)
	}
	if err := set.Expired(contract.At(time.Now())); err != nil {
		return nil, outcome.Config("boxes would not accept a promote of yours: %w", err)
	}
	if dated, ok := s.(store.Dated); ok {
		if skew, known := dated.Skew(); known && skew.Abs() > maxSkew {
			return nil, outcome.Config("this machine's clock is %s off that of %s: set it, since promotes are ordered by their times", skew.Abs().Round(time.Second), s)
		}
	}
	return &Operator{Store: s, Keys: keys, Trust: set, Actor: Actor(), Now: time.Now, Tell: func(string) {}}, nil
}

func publics(keys []ed25519.PrivateKey) []ed25519.PublicKey {
	var out []ed25519.PublicKey
	for _, k := range keys {
		out = append(out, k.Public().(ed25519.PublicKey))
	}
	return out
}

// Pointer reads the pointer of a channel; without one its ETag is "".
func (o *Operator) Pointer(ctx context.Context, c contract.Component, ch contract.Channel) (trust.Pointer, string, error) {
	obj, err := o.Store.Get(ctx, contract.PointerKey(c, ch, contract.WrittenMajor), contract.MaxEnvelope, "")
	if store.IsNotExist(err) {
		return trust.Pointer{}, "", nil
	}
	if err != nil {
		return trust.Pointer{}, "", err
	}
	p, err := o.Trust.Pointer(obj.Data, c, ch)
	return p, obj.ETag, err
}

// before is Pointer for who writes the next one.
func (o *Operator) before(ctx context.Context, c contract.Component, ch contract.Channel) (contract.Pointer, string, error) {
	p, etag, err := o.Pointer(ctx, c, ch)
	var e *outcome.Error
	if etag != "" && errors.As(err, &e) && e.Outcome == outcome.Refused {
		if !o.Replace {
			return p.Pointer, etag, fmt.Errorf("the pointer that is there does not count: %w: find out who wrote it; -replace begins a new one, without its history", err)
		}
		p, err = trust.Pointer{}, nil
	}
	if err == nil && p.Component == "" {
		p.Pointer = contract.Pointer{Envelope: contract.One, Component: c, Channel: ch, Payload: contract.PointerPayload{History: []contract.Release{}, Audit: []contract.Audit{}}}
	}
	return p.Pointer, etag, err
}

// onlyMajor says that a channel has a pointer of a major that is not written
// here: boxes that read it would not hear of a promote.
func (o *Operator) onlyMajor(ctx context.Context, c contract.Component, ch contract.Channel) error {
	keys, err := o.Store.List(ctx, contract.PointersOf(c))
	if err != nil {
		return err
	}
	for _, key := range keys {
		if _, channel, major, ok := contract.ParsePointerKey(key); ok && channel == ch && major != contract.WrittenMajor {
			return outcome.Refuse(outcome.UpgradeNeeded, "%s on %s also has a pointer of major %d, %q, which this sluice does not write: upgrade sluice, so that all of them say the same", c, ch, major, key)
		}
	}
	return nil
}

// A change is what is done to a pointer at a time. It returns the audit entry's
// action; "": it is no promote, and the promote time stays.
type change func(p *contract.Pointer, now time.Time) (action string, err error)

// swap changes a channel's pointer: read, change, sign, compare and swap. The
// bell is rung last.
func (o *Operator) swap(ctx context.Context, c contract.Component, ch contract.Channel, manifest contract.Step, change change) (contract.Pointer, error) {
	if err := o.onlyMajor(ctx, c, ch); err != nil {
		return contract.Pointer{}, err
	}
	op := newOp()
	for range swapTries {
		old, etag, err := o.before(ctx, c, ch)
		if err != nil {
			return contract.Pointer{}, err
		}
		// Strictly newer than the promote that is there, also when this clock went
		// backwards: the replay guard reads this and nothing else.
		next, now := old, o.Now()
		if earliest := old.PromotedAt.Add(time.Nanosecond); now.Before(earliest) {
			now = earliest
		}
		if now.UTC().Year() > lastYear {
			return contract.Pointer{}, fmt.Errorf("%s on %s was promoted in the year %d: no promote can be newer; whoever signed that, a new trust document takes out (sluice trust), and -replace begins anew", c, ch, old.PromotedAt.Year())
		}
		action, err := change(&next, now)
		if err != nil {
			return contract.Pointer{}, err
		}
		if action != "" {
			next.PromotedAt = contract.At(now)
			entry := contract.Audit{Action: action, From: string(old.Payload.Current.Version), To: string(next.Payload.Current.Version), Actor: o.Actor, At: next.PromotedAt, Op: op}
			next.Payload.Audit = append([]contract.Audit{entry}, next.Payload.Audit...)
		}
		data, err := o.fit(&next)
		if err != nil {
			return contract.Pointer{}, err
		}
		if err := o.trustNow(ctx); err != nil {
			return contract.Pointer{}, err
		}
		if err := o.readable(ctx, old, next, manifest); err != nil {
			return contract.Pointer{}, err
		}
		if _, err = store.PutBytes(ctx, o.Store, contract.PointerKey(c, ch, contract.WrittenMajor), data, store.Condition{IfMatch: etag, IfNone: etag == ""}); err != nil {
			var again bool
			if next, again, err = o.readBack(ctx, old, next, etag, op, err); err != nil {
				return contract.Pointer{}, err
			}
			if again {
				continue
			}
		}
		if err := Ring(ctx, o.Store, now); err != nil {
			return next, fmt.Errorf("%s on %s is %s, as it was to be; only the bell could not be rung, and boxes hear of it within the hour: %w", c, ch, next.Payload.Current.Version, err)
		}
		return next, nil
	}
	return contract.Pointer{}, fmt.Errorf("writing the pointer of %s on %s: somebody else wrote it %d times in a row: try again", c, ch, swapTries)
}

// readBack finds out what became of a write that got no answer, or got that
// somebody else had written: one that was retried below may have been its own
// rival. There are three answers: already yours, lost to whom, try again. With
// again nothing was written, nor decided by anybody else.
func (o *Operator) readBack(ctx context.Context, old, next contract.Pointer, etag, op string, lost error) (p contract.Pointer, again bool, _ error) {
	what := fmt.Sprintf("%s on %s", old.Component, old.Channel)
	found, tag, err := o.Pointer(ctx, old.Component, old.Channel)
	if err != nil {
		return p, false, fmt.Errorf("%w; reading back: %w: whether %s was written can't be told. A promote can be tried again as it is: what is current already is no second entry of the history. Before a rollback look at `sluice status`: a second one goes one further back", lost, err, what)
	}
	mine := slices.IndexFunc(found.Payload.Audit, func(a contract.Audit) bool { return a.Op == op })
	switch {
	case mine == 0 || next.PromotedAt.Equal(old.PromotedAt.Time) && bytes.Equal(found.Encode(), next.Encode()):
		o.Tell(fmt.Sprintf("the answer was lost, and reading back shows: %s is already yours", what))
		return found.Pointer, false, nil
	case mine > 0:
		last := found.Payload.Audit[0]
		o.Tell(fmt.Sprintf("the answer was lost, and reading back shows: %s is already yours; since then %s made it %s (%s)", what, last.Actor, last.To, last.Action))
		return found.Pointer, false, nil
	case tag == etag && errors.Is(lost, store.ErrConflict), tag != etag && found.PromotedAt.Equal(old.PromotedAt.Time): // refreshed meanwhile
		return p, true, nil
	case tag == etag && errors.Is(lost, store.ErrTransient):
		return p, false, fmt.Errorf("%w: nothing of %s was written: try again", lost, what)
	case tag == etag:
		return p, false, lost
	}
	last := contract.Audit{Actor: "somebody"}
	if len(found.Payload.Audit) > 0 {
		last = found.Payload.Audit[0]
	}
	return p, false, fmt.Errorf("lost to %s, who made %s %s (%s) at %s: nothing of yours was written. Look at `sluice status`, and run it again if you still want it", last.Actor, what, found.Payload.Current.Version, last.Action, found.PromotedAt)
}

// fit signs a pointer that keeps to the limits: history and audit are
// trimmed, the audit first.
func (o *Operator) fit(p *contract.Pointer) ([]byte, error) {
	p.Payload.History = p.Payload.History[:min(len(p.Payload.History), contract.MaxHistory)]
	p.Payload.Audit = p.Payload.Audit[:min(len(p.Payload.Audit), contract.MaxAudit)]
	for {
		data := trust.Sign(contract.PointerLadder, p.Encode(), o.Keys...).Encode()
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

// lastYear is the last that a time can be written of.
const lastYear = 9998

// trustNow reads the trust anew, if it has moved since this began.
func (o *Operator) trustNow(ctx context.Context) error {
	if _, err := store.TrustDocument(ctx, o.Store, o.Trust.Number+1); store.IsNotExist(err) {
		return nil
	}
	set, err := Trust(ctx, o.Store)
	if err == nil {
		err = set.Suffices(contract.PointerLadder, publics(o.Keys)...)
	}
	if err != nil {
		return outcome.Config("the trust has moved meanwhile, and boxes would not accept a promote of yours: %w", err)
	}
	o.Trust = set
	return nil
}

// A Promotion is what a promote makes current.
type Promotion struct {
	Release  contract.Release
	Spread   time.Duration
	Life     *time.Duration // how long the pointer counts unless it is refreshed; 0: for ever; nil: as before
	Manifest contract.Step  // the newest version of a manifest among its bundles
	At       time.Time      // the promote time, as it was planned with; zero: when it is done
}

// Promote makes a release current. What is current already pushes nothing
// onto the history.
func (o *Operator) Promote(ctx context.Context, c contract.Component, ch contract.Channel, n Promotion) (contract.Pointer, error) {
	if !n.At.IsZero() {
		clock := o.Now
		o.Now = func() time.Time { return n.At }
		defer func() { o.Now = clock }()
	}
	return o.swap(ctx, c, ch, n.Manifest, func(p *contract.Pointer, now time.Time) (string, error) {
		if !n.At.IsZero() && !n.At.After(p.PromotedAt.Time) {
			return "", outcome.Usage("%s on %s was promoted at %s, which is not before %s: plan anew", c, ch, p.PromotedAt, contract.At(n.At))
		}
		outgoing := p.Payload.Current
		if outgoing.Version != "" && outgoing.Version != n.Release.Version {
			p.Payload.History = append([]contract.Release{outgoing.WithoutDeltas()}, p.Payload.History...)
		}
		p.Payload.Current, p.Payload.Spread = n.Release, contract.Duration(n.Spread)
		renew(&p.Payload, n.Life, now)
		return "promote", nil
	})
}

// Rollback makes the newest release of the history current. The outgoing one
// is not pushed back, so that a second rollback goes one further back.
func (o *Operator) Rollback(ctx context.Context, c contract.Component, ch contract.Channel) (contract.Pointer, error) {
	return o.rollback(ctx, c, ch, func(contract.Pointer) error { return nil })
}

// rollback goes back, if may says nothing against it.
func (o *Operator) rollback(ctx context.Context, c contract.Component, ch contract.Channel, may func(now contract.Pointer) error) (contract.Pointer, error) {
	// Its manifests were read when it was promoted first.
	return o.swap(ctx, c, ch, contract.One, func(p *contract.Pointer, now time.Time) (string, error) {
		if err := may(*p); err != nil {
			return "", err
		}
		if len(p.Payload.History) == 0 {
			return "", outcome.Refuse(outcome.NoArtifact, "the history of %s on %s is empty: there is nothing to go back to", c, ch)
		}
		p.Payload.Current, p.Payload.History = p.Payload.History[0], p.Payload.History[1:]
		p.Payload.Spread = 0 // going back is not put off
		renew(&p.Payload, nil, now)
		return "rollback", nil
	})
}

// Refresh lets a pointer count for another life. It is no promote: no box rolls.
func (o *Operator) Refresh(ctx context.Context, c contract.Component, ch contract.Channel, life *time.Duration) (contract.Pointer, error) {
	return o.swap(ctx, c, ch, contract.One, func(p *contract.Pointer, now time.Time) (string, error) {
		switch {
		case p.PromotedAt.IsZero():
			return "", outcome.Refuse(outcome.NoArtifact, "nothing is promoted of %s on %s", c, ch)
		case life == nil && p.Payload.ExpiresAt.IsZero():
			return "", outcome.Usage("the pointer of %s on %s never expires: give it a life with -expires", c, ch)
		}
		renew(&p.Payload, life, now)
		return "", nil
	})
}

// A Target is one channel of a component.
type Target struct {
	Component contract.Component
	Channel   contract.Channel
}

// Expiring lists the channels whose pointers expire.
func (o *Operator) Expiring(ctx context.Context) ([]Target, error) {
	keys, err := o.Store.List(ctx, contract.PointersPrefix)
	if err != nil {
		return nil, err
	}
	var out []Target
	var errs []error
	for _, key := range keys {
		c, ch, major, ok := contract.ParsePointerKey(key)
		if !ok || major != contract.WrittenMajor {
			continue
		}
		p, _, err := o.Pointer(ctx, c, ch)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s on %s: %w", c, ch, err))
		} else if !p.Payload.ExpiresAt.IsZero() {
			out = append(out, Target{c, ch})
		}
	}
	return out, errors.Join(errs...)
}

// renew begins a new life of a pointer; of the same length, if none is given, and
// then it never ends earlier than it would have. With a length it begins now: that
// puts right what a clock that was ahead has written.
func renew(p *contract.PointerPayload, life *time.Duration, now time.Time) {
	length := p.Life()
	if life != nil {
		length = *life
	}
	if length == 0 {
		p.ExpiresAt, p.RefreshedAt = contract.Time{}, contract.Time{}
		return
	}
	if life == nil && now.Before(p.RefreshedAt.Time) {
		now = p.RefreshedAt.Time
	}
	p.RefreshedAt, p.ExpiresAt = contract.At(now), contract.At(now.Add(length))
}
