package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
)

// How often a heartbeat is published that says nothing new, and how long one
// waits that could not be written.
const (
	heartInterval = 5 * time.Minute
	heartRetry    = 30 * time.Second
)

type heart struct {
	said   string    // what the last one said, but for its time
	next   time.Time // when it is said again
	failed bool      // the last one could not be written
}

func (h heart) due(now time.Time) bool { return !now.Before(h.next) }

// publish writes the heartbeat at once when it says something new, and every
// five minutes.
func (f *Fetcher) publish(ctx context.Context, names []contract.Component) error {
	beat := contract.Heartbeat{Schema: contract.One, Label: contract.Label(f.Box.Label), Fleet: f.Box.Fleet, Platform: contract.Here(),
		Speaks: contract.Spoken, Components: map[contract.Component]contract.ComponentStatus{}}
	for _, name := range names {
		beat.Components[name] = f.status(name)
	}
	now := time.Now()
	said := string(beat.Encode())
	if !f.heart.due(now) && (said == f.heart.said || f.heart.failed) {
		return nil
	}
	f.Beat()
	beat.At = contract.At(now)
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	if _, err := store.PutBytes(ctx, f.Store, contract.StatusKey(beat.Label), beat.Encode(), store.Condition{}); err != nil {
		if !f.heart.failed {
			f.Log.Warn(fmt.Sprintf("the heartbeat can't be published: %s", err))
		}
		f.heart.next, f.heart.failed = now.Add(heartRetry), true
		return fmt.Errorf("publishing the heartbeat: %w", err)
	}
	f.heart = heart{said: said, next: now.Add(heartInterval)}
	return nil
}

// status is what is said of one component.
func (f *Fetcher) status(name contract.Component) contract.ComponentStatus {
	state := record.State{Root: f.Root, Disk: f.Disk, Name: name}
	s := ComponentStatus(state)
	if w := f.follows[name]; w != nil {
		if w.pointer != nil {
			s.Target = string(w.pointer.Payload.Current.Version)
		}
		s.Downloaded = w.pending.Downloaded
		switch {
		case w.pending.Version == "":
		case !w.retry.IsZero():
			s.Pending = "retry"
		case w.pending.Asked:
			s.Pending = "asked"
		default:
			s.Pending = "spread"
		}
		if complaint := cmp.Or(w.bad, w.said); complaint != "" {
			s.Pending = contract.Clip(complaint)
		}
	}
	return s
}

// because is an error as a heartbeat tells it: a stable word, then prose.
func because(err error) string {
	var known *outcome.Error
	var config *outcome.ConfigError
	switch {
	case errors.As(err, &known):
		return err.Error()
	case errors.As(err, &config):
		return string(outcome.Configuration) + ": " + err.Error()
	}
	return string(record.DiskWord(err, outcome.Store)) + ": " + err.Error()
}

// ComponentStatus is what anybody can read of a component on a box.
func ComponentStatus(state record.State) contract.ComponentStatus {
	s := contract.ComponentStatus{Held: config.Held(state.Root)}
	if conf, err := config.LoadComponent(state.Root, state.Name); err == nil {
		s.Channel = string(conf.Channel)
	}
	if a := record.Optional[contract.Applied](state, layout.Applied); a != nil {
		s.Running = string(a.Version)
	}
	s.Result = record.Optional[contract.Result](state, layout.Result)
	if j := record.Optional[contract.Journal](state, layout.Journal); j != nil {
		s.Journal = &contract.JournalBrief{Phase: j.Phase, Node: j.Node, Tries: j.Tries}
	}
	s.Trial = record.Optional[contract.Trial](state, layout.Trial)
	s.Drift = record.Optional[contract.Drift](state, layout.Drift)
	s.Front = record.Optional[contract.Verdict](state, layout.Verdict)
	return s
}
