package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
)

// A beat is a heartbeat as it is in the store, or why it can't be read.
type beat struct {
	label string
	contract.Heartbeat
	err error
}

// heartbeats reads what the boxes have published.
func heartbeats(ctx context.Context, s store.Store) ([]beat, error) {
	keys, err := s.List(ctx, contract.StatusPrefix)
	if err != nil {
		return nil, err
	}
	var out []beat
	for _, key := range keys {
		label, ok := strings.CutSuffix(strings.TrimPrefix(key, contract.StatusPrefix), ".json")
		if !ok {
			continue
		}
		o, err := s.Get(ctx, key, contract.MaxHeartbeat, "")
		if store.IsNotExist(err) {
			continue
		}
		b := beat{label: label, err: err}
		if err == nil {
			if b.Heartbeat, b.err = contract.Spoken.DecodeHeartbeat(o.Data); b.err == nil && string(b.Label) != label {
				b.err = fmt.Errorf("it says that it is of box %q", b.Label) // a box may write this key, and speaks for itself alone
			}
		}
		out = append(out, b)
	}
	return out, nil
}

// readable says which boxes of a channel can't read a pointer, or the manifests
// that it leads to.
// Who can't read the pointer that is there already, is not stranded by this one.
func (o *Operator) readable(ctx context.Context, old, p contract.Pointer, manifest contract.Step) error {
	step, member := p.Needs()
	if o.Strand {
		return nil
	}
	if had, _ := old.Needs(); !old.PromotedAt.IsZero() && had.Max(step) == had {
		step = contract.One
	}
	return stranded(ctx, o.Store, o.Tell, func(b beat) bool { return b.Components[p.Component].Channel == string(p.Channel) },
		needed{contract.PointerLadder, step, member}, needed{contract.ManifestLadder, manifest, "its bundle"})
}

// needed is what a box must read.
type needed struct {
	ladder  contract.Ladder
	step    contract.Step
	because string
}

// stranded says which of the boxes can't read what they need. What every build reads
// needs no question.
func stranded(ctx context.Context, s store.Store, tell func(string), of func(beat) bool, needs ...needed) error {
	needs = slices.DeleteFunc(needs, func(n needed) bool { return n.step.Max(contract.One) == contract.One })
	if len(needs) == 0 {
		return nil
	}
	beats, err := heartbeats(ctx, s)
	if err != nil {
		return err
	}
	for _, n := range needs {
		var labels []string
		for _, b := range beats {
			if b.err == nil && of(b) && b.Speaks.Check(n.ladder, n.step) != nil {
				labels = append(labels, b.label)
			}
		}
		if len(labels) > 0 {
			return outcome.Refuse(outcome.UpgradeNeeded, "this would be %s %s (because of %s), which these boxes can't read: %s. They would get nothing new: update their sluice first, or mean it with -strand",
				n.ladder, n.step, n.because, strings.Join(labels, ", "))
		}
	}
	for _, b := range beats {
		if errors.Is(b.err, store.ErrTransient) {
			return b.err
		}
		if b.err != nil {
			tell(fmt.Sprintf("what box %s can read is not known: %s", b.label, unreadable(b.err)))
		}
	}
	return nil
}
