package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/outcome"
	"sluice/internal/store"
)

// A Slot is when a box acts on a promote.
type Slot struct {
	Label contract.Label `json:"label"`
	At    contract.Time  `json:"at"`
}

// Schedule says when each box of a channel will act on a promote of a time: boxes
// compute the same by themselves. A box that already runs the version only notes it.
func Schedule(ctx context.Context, s store.Store, t Target, spread time.Duration, at time.Time) ([]Slot, error) {
	beats, err := heartbeats(ctx, s)
	if err != nil {
		return nil, err
	}
	slots := []Slot{}
	for _, b := range beats {
		if c, follows := b.Components[t.Component]; b.err == nil && follows && c.Channel == string(t.Channel) {
			slots = append(slots, Slot{b.Label, contract.At(at.Add(decide.Offset(spread, b.Label, t.Component, contract.At(at))))})
		}
	}
	slices.SortFunc(slots, func(a, b Slot) int {
		return cmp.Or(a.At.Compare(b.At.Time), cmp.Compare(a.Label, b.Label))
	})
	return slots, nil
}

// forgotten is after how long without a heartbeat a box's platform is not released
// for any more.
const forgotten = 30 * 24 * time.Hour

// NeededPlatforms are those of the boxes that follow a component; if none does, of
// all boxes. Empty: no box has reported yet.
func NeededPlatforms(ctx context.Context, s store.Store, c contract.Component, now time.Time) ([]contract.Platform, error) {
	beats, err := heartbeats(ctx, s)
	if err != nil {
		return nil, err
	}
	var followers, all []contract.Platform
	for _, b := range beats {
		if b.err != nil || now.Sub(b.At.Time) > forgotten {
			continue
		}
		all = append(all, b.Platform)
		if _, follows := b.Components[c]; follows {
			followers = append(followers, b.Platform)
		}
	}
	if len(followers) > 0 {
		all = followers
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// CanaryChannel is where a release is expected to have been first.
const CanaryChannel contract.Channel = "canary"

// SkippedCanary reports whether a component has a canary channel that a version was
// never on, as far as its history goes.
func (o *Operator) SkippedCanary(ctx context.Context, c contract.Component, v contract.Version) (bool, error) {
	p, etag, err := o.Pointer(ctx, c, CanaryChannel)
	if etag == "" || err != nil {
		return false, err
	}
	return !slices.ContainsFunc(append(p.Payload.History, p.Payload.Current), func(r contract.Release) bool { return r.Version == v }), nil
}

// A Tally is how far boxes have come with a promote.
type Tally struct {
	Rows   []Row // of the channel
	Done   int   // run it
	Failed int   // refused it, or put what they had back
	Left   int   // have yet to end, and may
	Held   int   // are held by their owners
	Lost   int   // heartbeats that can't be read: of this channel or not
}

// followEvery is how often heartbeats are looked at.
const followEvery = 2 * time.Second

// Tally counts how the boxes of a channel stand to its current promote.
func (o *Operator) Tally(ctx context.Context, t Target) (Tally, error) {
	rows, err := Status(ctx, o.Store, o.Trust, o.Now())
	if err != nil {
		return Tally{}, err
	}
	var n Tally
	for _, r := range rows {
		if r.Component == "" {
			n.Lost++
		}
		if r.Component != string(t.Component) || r.Channel != string(t.Channel) {
			continue
		}
		n.Rows = append(n.Rows, r)
		switch r.State {
		case Current:
			n.Done++
		case RolledBack, RollbackFailed, Refused:
			n.Failed++
		case Held:
			n.Held++
		default:
			n.Left++
		}
	}
	return n, nil
}

// Follow waits until every box of its channel has ended a promote, or ctx ends, or
// haltAfter boxes (0: any number) have failed, or another promote has come. tell is called with each tally. A
// store that is away for a while is waited for; if nothing was ever seen, that is an
// error.
func (o *Operator) Follow(ctx context.Context, p contract.Pointer, haltAfter int, tell func(Tally)) (Tally, error) {
	t := Target{p.Component, p.Channel}
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	var last Tally
	never := errors.New("the boxes could not be looked at in time")
	for {
		current, _, err := o.Pointer(ctx, t.Component, t.Channel)
		if err == nil && !current.PromotedAt.Equal(p.PromotedAt.Time) {
			return last, outcome.Refuse(outcome.StaleHint, "%s on %s is %s by now, by another promote: what became of this one is not known", t.Component, t.Channel, current.Payload.Current.Version)
		}
		var n Tally
		if err == nil {
			n, err = o.Tally(ctx, t)
		}
		if err != nil && ctx.Err() == nil {
			if !errors.Is(err, store.ErrTransient) {
				return last, err
			}
			o.Tell(fmt.Sprintf("%s, trying again", err))
		}
		if err == nil {
			last, never = n, nil
			tell(n)
			if n.Left == 0 || haltAfter > 0 && n.Failed >= haltAfter {
				return n, nil
			}
		}
		select {
		case <-ctx.Done():
			return last, never
		case <-tick.C:
		}
	}
}

// Halt makes the release before current again, if current is still this promote.
func (o *Operator) Halt(ctx context.Context, p contract.Pointer) (contract.Pointer, error) {
	return o.rollback(ctx, p.Component, p.Channel, func(now contract.Pointer) error {
		if !now.PromotedAt.Equal(p.PromotedAt.Time) {
			return outcome.Refuse(outcome.StaleHint, "%s on %s is %s by now, by another promote: it is left as it is", p.Component, p.Channel, now.Payload.Current.Version)
		}
		return nil
	})
}
