// Package stage is root's gate to the unprivileged side. It takes one hinted
// input, gets the pointer by its own doing, checks everything again on a copy
// that only root can reach, and runs nothing.
//
// It is triggered by the marker requested; it reads the hint, the pointer and
// the verified tree through intake; it writes sets/<version>, seen.json,
// versions.json, staged.json and result.json, and raises staged. It has
// neither a network nor a way to the service manager.
package stage

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/durable"
	"sluice/internal/intake"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
)

// A Stager stages what a hint asks for.
type Stager struct {
	State  record.State
	Log    *slog.Logger
	Status func(format string, args ...any)
	DryRun bool // everything in a scratch folder; no state moves
	// Plan, for a dry run, is shown the set that would be applied.
	Plan func(set string, m contract.Manifest) error
	// Ask has the answer of the store put into a folder, where no service
	// manager has sluice-pointer@ do it: by hand, on another tree.
	Ask func(ctx context.Context, folder string) error
	// Now and Built say what expires: the box's clock, and the date of this build.
	Now   func() time.Time
	Built time.Time

	started time.Time
	conf    config.Component
}

// Run is one run of the service. It waits for the component's lock until ctx
// ends.
func (s *Stager) Run(ctx context.Context) error {
	if !s.DryRun {
		if _, err := marker.Take(s.State.Root, layout.DataOf, layout.Requested, string(s.State.Name)); err != nil {
			return err
		}
	}
	s.started = time.Now()
	if config.Held(s.State.Root) {
		s.Log.Info("held: nothing new until `sluice resume`", "component", s.State.Name)
		return nil
	}
	lock, err := durable.Acquire(ctx, s.State.Path(layout.Lock))
	if err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	staged, err := s.locked(ctx)
	lock.Release()
	err = blame(err)
	if staged && !s.DryRun {
		return errors.Join(err, marker.Raise(s.State.Path(layout.Staged))) // last, with no lock held
	}
	return err
}

// blame makes an end of what the disk did wrong, wherever that was.
func blame(err error) error {
	var e *outcome.Error
	if err == nil || errors.As(err, &e) || record.DiskWord(err, "") == "" {
		return err
	}
	return onDisk(err)
}

// locked reports whether there is something for apply to do.
func (s *Stager) locked(ctx context.Context) (bool, error) {
	if s.State.Open() {
		return true, outcome.Defer(outcome.Interrupted, "a roll of %s is open: apply recovers it first", s.State.Name)
	}
	var err error
	if s.conf, err = config.LoadComponent(s.State.Root, s.State.Name); err != nil {
		return false, err
	}
	data, err := intake.OpenFolder(s.State.Path(layout.DataOf))
	if err != nil {
		return false, err
	}
	defer data.Close()
	hint, err := s.hint(data)
	if err != nil {
		return false, err
	}
	p, set, err := s.pointer(ctx)
	if err != nil {
		return false, err
	}
	seen, err := s.seen(set)
	if err != nil {
		return false, err
	}
	if hint.Version != p.Payload.Current.Version || !hint.PromotedAt.Equal(p.PromotedAt.Time) {
		if hint.PromotedAt.After(p.PromotedAt.Time) {
			return false, outcome.Defer(outcome.Store, "the store shows root an older promote (%s) than it showed fetch (%s): a replica lags", p.PromotedAt, hint.PromotedAt)
		}
		s.Log.Info("stale-hint: the channel has moved on", "component", s.State.Name, "hint", hint.Version, "pointer", p.Payload.Current.Version)
		return false, nil
	}
	if p.PromotedAt.Before(decide.Watermark(&seen, p.Channel).Time) {
		return false, outcome.Refuse(outcome.Replay, "the promote of %s is older than what root has verified on channel %s", p.PromotedAt, p.Channel)
	}
	// Of what has expired too: nothing older is taken in its place.
	if err := s.see(p, seen); err != nil {
		return false, err
	}
	last, had, err := record.LoadOrQuarantine[contract.Result](s.State, layout.Result, s.report)
	if err != nil {
		return false, err
	}
	done := last.Outcome == outcome.Applied || last.Outcome == outcome.Noted
	if done { // but for a set that is not the one any more
		applied, ok, err := record.Load[contract.Applied](s.State, layout.Applied)
		drift := record.Optional[contract.Drift](s.State, layout.Drift)
		trial := record.Optional[contract.Trial](s.State, layout.Trial)
		done = trial == nil && err == nil && ok && applied.Version == p.Payload.Current.Version && (drift == nil || !drift.SetDamaged)
	}
	if had && last.Tuple.Equal(p.Tuple()) && (done || last.Terminal(s.conf.Digest)) {
		s.Log.Info("has ended here already", "component", s.State.Name, "version", last.Version, "outcome", last.Outcome)
		return false, nil
	}
	// Only now: how a promote has ended is not forgotten because its pointer expires.
	staged, err := false, s.expired(set, p, seen)
	if err == nil {
		staged, err = s.accept(data, p, hint)
	}
	if brought(staged, err) && !s.DryRun {
		proved, perr := s.prove()
		staged, err = staged || proved, errors.Join(err, perr)
	}
	return staged, s.record(p, err)
}

// brought reports whether this promote was brought to its end here: root has
// what it needs to decide, and did. Not: what the unprivileged side handed over
// was wrong.
func brought(staged bool, err error) bool {
	var e *outcome.Error
	if !errors.As(err, &e) {
		return staged
	}
	switch e.Word {
	case outcome.Needs, outcome.UpgradeNeeded, outcome.NoSpace, outcome.Expired:
		return true
	}
	return e.Outcome == outcome.Noted || e.Outcome == outcome.Refused
}

// expired says that nothing is installed from this pointer any more.
func (s *Stager) expired(set trust.Set, p trust.Pointer, seen contract.Seen) error {
	now := decide.Now(s.Now(), s.Built, append(set.Times(seen), p.PromotedAt, p.Payload.RefreshedAt)...)
	if err := set.Expired(now); err != nil {
		return err
	}
	return p.Expired(now)
}

// prove notes, if the pipeline that runs is on trial, that its own fetch, verify
// and stage have brought a request to its end. Apply has its part to show, and
// ends the trial: it is to be told.
func (s *Stager) prove() (tell bool, _ error) {
	trial, applied := record.Optional[contract.Trial](s.State, layout.Trial), record.Optional[contract.Applied](s.State, layout.Applied)
	if s.State.Name != layout.Pipeline || trial == nil || applied == nil || trial.Version != applied.Version {
		return false, nil
	}
	trial.Proved = true
	return true, s.State.Save(layout.Trial, *trial)
}

func (s *Stager) report(err error) { s.Log.Error(err.Error(), "component", s.State.Name) }

// hint reads the one file that root reads from the unprivileged side. A bad
// one is only logged: it could be anybody's.
func (s *Stager) hint(data *intake.Folder) (contract.Hint, error) {
	uid, err := s.State.Root.UID(layout.UserVerify)
	if err != nil {
		return contract.Hint{}, err
	}
	raw, err := data.Read("verified/requested.json", uid, contract.MaxHint)
	if errors.Is(err, intake.ErrBusy) {
		return contract.Hint{}, outcome.Defer(outcome.BadHint, "%w", err)
	}
	if err != nil {
		return contract.Hint{}, outcome.Refuse(outcome.BadHint, "%w", err)
	}
	h, err := contract.Spoken.DecodeHint(raw)
	if err != nil {
		return h, outcome.Refuse(outcome.BadHint, "%w", err)
	}
	return h, nil
}

// pointer gets the pointer by root's own doing: sluice-pointer@ has run just
// before, as a third user. By hand, on another tree, the same program runs as
// a child. It returns what vouched for it too.
func (s *Stager) pointer(ctx context.Context) (p trust.Pointer, set trust.Set, _ error) {
	folder, name := filepath.Dir(s.State.Path(layout.PointerRun)), string(s.State.Name)
	if s.Ask != nil {
		scratch, err := os.MkdirTemp("", "sluice-pointer-")
		if err != nil {
			return p, set, err
		}
		defer os.RemoveAll(scratch)
		if err := s.Ask(ctx, filepath.Join(scratch, name)); err != nil {
			return p, set, err
		}
		folder = scratch
	}
	uid, err := s.State.Root.UID(layout.UserPointer)
	if err != nil {
		return p, set, err
	}
	top, err := intake.OpenFolder(folder)
	if err != nil {
		return p, set, noPointer(s.State.Name, err)
	}
	defer top.Close()
	in, err := top.Sub(name)
	if err != nil {
		return p, set, noPointer(s.State.Name, err)
	}
	defer in.Close()
	// First, and whether or not there is an answer: a long chain that takes several
	// runs gets there too.
	if set, err = s.trust(in, uid); err != nil {
		return p, set, err
	}
	file := filepath.Base(string(layout.PointerAnswer))
	raw, err := in.Read(file, uid, contract.MaxEnvelope)
	if rerr := in.Remove(file); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) { // an answer is never read twice
		return p, set, rerr
	}
	if err != nil {
		return p, set, noPointer(s.State.Name, err)
	}
	p, err = set.Pointer(raw, s.State.Name, s.conf.Channel)
	return p, set, err
}

// seen returns the watermarks that count under a trust document.
func (s *Stager) seen(set trust.Set) (contract.Seen, error) {
	seen, ok, err := record.LoadOrQuarantine[contract.Seen](s.State, layout.Seen, s.report)
	if err != nil {
		return seen, err
	}
	if !ok {
		if seen, err = s.floor(set.Number); err != nil || s.DryRun {
			return seen, err
		}
		return seen, s.State.Save(layout.Seen, seen) // so that it counts until the trust moves, and no longer
	}
	return set.Counting(seen), nil
}

func noPointer(name contract.Component, err error) error {
	return outcome.Defer(outcome.Store, "root has no pointer of %s (does sluice-pointer@%s.service reach the store?): %w", name, name, err)
}

// AskChild runs `fetch pointer`, which stands beside this program.
func (s *Stager) AskChild(ctx context.Context, folder string) error {
	if err := os.Mkdir(folder, 0o700); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(filepath.Dir(self), "fetch"), "pointer", "-root", string(s.State.Root), "-component", string(s.State.Name))
	cmd.Env = append(os.Environ(), "RUNTIME_DIRECTORY="+folder)
	if out, err := cmd.CombinedOutput(); err != nil {
		return outcome.Defer(outcome.Store, "%s: %w", string(out[:min(len(out), contract.MaxReason)]), err)
	}
	return nil
}

// trust walks from the trust that root has, one document at a time.
func (s *Stager) trust(in *intake.Folder, uid int) (trust.Set, error) {
	set, err := s.State.Trust()
	if err != nil {
		return set, err
	}
	return set.Walk(func(n int) ([]byte, error) {
		raw, err := in.Read(layout.StepName(n), uid, contract.MaxEnvelope)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			err = outcome.Defer(outcome.Store, "%w", err)
		}
		return raw, err
	}, func(next trust.Set, raw []byte) error {
		if s.DryRun {
			return nil
		}
		s.Log.Info("trust moves", "component", s.State.Name, "number", next.Number)
		return s.State.Disk.WriteFile(s.State.Root.TrustFile(string(s.State.Name), next.Number), raw, 0o644)
	})
}

// floor stands in for a seen.json that is not there: the newest promote that
// any other record knows of, never "first pointer". Who vouched for it is not
// known, so it counts until the trust moves on from document number.
func (s *Stager) floor(number int) (contract.Seen, error) {
	seen := contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{}}
	lift := func(t contract.Tuple, known bool) {
		if known && t.PromotedAt.After(seen.Channels[t.Channel].PromotedAt.Time) {
			seen.Channels[t.Channel] = contract.Water{PromotedAt: t.PromotedAt, Trust: number, KeyIDs: []string{}}
		}
	}
	applied, a, err1 := record.Load[contract.Applied](s.State, layout.Applied)
	result, r, err2 := record.Load[contract.Result](s.State, layout.Result)
	staged, t, err3 := record.Load[contract.Staged](s.State, layout.StagedRecord)
	for _, err := range []error{err1, err2, err3} {
		if err != nil {
			s.report(err)
		}
	}
	lift(applied.Tuple, a)
	lift(result.Tuple, r)
	lift(staged.Tuple, t)
	return seen, nil
}

// record writes result.json for a tuple that root has verified, if staging it
// ended here. A set that is staged has no result yet: apply writes it.
func (s *Stager) record(p trust.Pointer, err error) error {
	err = blame(err)
	var e *outcome.Error
	if !errors.As(err, &e) || s.DryRun {
		return err
	}
	reason := e.Reason()
	if e.Outcome == outcome.Noted {
		reason, err = "", nil
	}
	last := record.Optional[contract.Result](s.State, layout.Result)
	if trial := record.Optional[contract.Trial](s.State, layout.Trial); trial != nil && e.Outcome == outcome.Noted && last != nil && last.Tuple.Equal(p.Tuple()) && last.Outcome == outcome.Applied {
		return err // fetch asked for the proof, nobody promoted: that it was applied stays what is told
	}
	r := contract.Result{Tuple: p.Tuple(), Outcome: e.Outcome, Reason: reason, Config: s.conf.Digest, At: contract.At(time.Now()), TookMS: time.Since(s.started).Milliseconds(), DownMS: -1}
	s.Log.Info("ended", "component", s.State.Name, "version", r.Version, "outcome", r.Outcome, "reason", r.Reason)
	return errors.Join(err, s.State.Conclude(r))
}
