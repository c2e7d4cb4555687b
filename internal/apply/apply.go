package apply

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// LockWait is how long a run that a path unit started waits for the
// component's lock; then it raises its marker again and leaves.
const LockWait = time.Minute

// An Applier applies, or recovers, one component.
type Applier struct {
	State   record.State
	Manager systemd.Manager
	Box     config.Box
	Log     *slog.Logger
	Status  func(format string, args ...any)
	Now     func() time.Time // what records are stamped with; no deadline reads it
	Again   bool             // by hand: try a promote that has ended here
	Auto    bool             // nobody asked for this run by hand

	conf config.Component
}

// Run is one run of the service: it applies what stage has staged. It waits
// for the component's lock until locks ends.
func (a *Applier) Run(ctx, locks context.Context) error {
	if _, err := marker.Take(a.State.Root, layout.OptOf, layout.Staged, string(a.State.Name)); err != nil {
		return err
	}
	var err error
	if a.Box, err = config.LoadBox(a.State.Root); err != nil {
		return err
	}
	lock, err := durable.Acquire(locks, a.State.Path(layout.Lock))
	if errors.Is(err, durable.ErrBusy) {
		return errors.Join(outcome.Defer(outcome.Interrupted, "%w", err), marker.Raise(a.State.Path(layout.Staged)))
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	if a.State.Open() {
		a.Log.Warn("a roll is open: recovering it first", "component", a.State.Name)
		if err := a.recover(ctx, lock, false); err != nil {
			return err
		}
	}
	if config.Held(a.State.Root) {
		a.Log.Info("held: nothing new until `sluice resume`", "component", a.State.Name)
		return nil
	}
	if a.conf, err = config.LoadComponent(a.State.Root, a.State.Name); err != nil {
		return err
	}
	if err := a.endTrial(ctx); err != nil {
		return err
	}
	staged, ok, err := record.LoadOrQuarantine[contract.Staged](a.State, layout.StagedRecord, a.report)
	if err != nil || !ok {
		return err
	}
	if why, err := a.outdated(staged.Build); why != "" || err != nil {
		a.Log.Info("nothing to apply", "component", a.State.Name, "version", staged.Version, "why", why)
		return err
	}
	return a.roll(ctx, lock, staged.Build)
}

func (a *Applier) report(err error) { a.Log.Error(err.Error(), "component", a.State.Name) }

// outdated says why what is staged is not to be applied, or "".
func (a *Applier) outdated(b contract.Build) (string, error) {
	if b.Channel != a.conf.Channel {
		return fmt.Sprintf("it is of channel %s, the box follows %s now", b.Channel, a.conf.Channel), nil
	}
	seen, ok, err := record.LoadOrQuarantine[contract.Seen](a.State, layout.Seen, a.report)
	if err != nil {
		return "", err
	}
	if ok && b.PromotedAt.Before(decide.Watermark(&seen, b.Channel).Time) {
		return "a newer promote has been seen", nil
	}
	result, ok, err := record.LoadOrQuarantine[contract.Result](a.State, layout.Result, a.report)
	if err != nil {
		return "", err
	}
	if ok && !a.Again && result.Tuple.Equal(b.Tuple) && result.Terminal(a.conf.Digest) {
		return "it has ended here as " + string(result.Outcome), nil
	}
	applied, ok, err := record.LoadOrQuarantine[contract.Applied](a.State, layout.Applied, a.report)
	if ok && applied.Tuple.Equal(b.Tuple) && applied.Same(b) {
		return "it is applied", err
	}
	return "", err
}

// good returns the build to go back to: one that passed a gate on this box, and
// never another (I3); none on a first install. Without an
// applied.json that can be read, the good link decides.
func (a *Applier) good() (*contract.Build, error) {
	applied, ok, err := record.LoadOrQuarantine[contract.Applied](a.State, layout.Applied, a.report)
	if err != nil {
		return nil, err
	}
	if ok {
		return &applied.Build, nil
	}
	target, err := os.Readlink(a.State.Path(layout.Good))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	version := contract.Version(filepath.Base(target))
	_, digest, err := record.Manifest(a.State.Set(version))
	if err != nil {
		return nil, err
	}
	b := contract.Build{Tuple: contract.Tuple{Channel: a.conf.Channel, Version: version}, ManifestSHA256: digest}
	return &b, a.State.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: b, At: contract.At(a.Now())})
}

// load reads the set of a build, every file of it against its manifest.
func (a *Applier) load(b contract.Build) (node.Build, error) {
	set := a.State.Set(b.Version)
	m, err := record.CheckSet(set, b.ManifestSHA256)
	if err != nil {
		return node.Build{}, err
	}
	return node.Build{Manifest: m, Set: set}, nil
}

// finish writes result.json for a tuple, after everything else but the
// journal.
func (a *Applier) finish(t contract.Tuple, o outcome.Outcome, reason string, started time.Time, down time.Duration) error {
	r := contract.Result{Tuple: t, Outcome: o, Reason: reason, Config: a.conf.Digest, At: contract.At(a.Now()), TookMS: time.Since(started).Milliseconds(), DownMS: down.Milliseconds()}
	if down < 0 {
		r.DownMS = -1
	}
	if err := a.State.Conclude(r); err != nil {
		return err
	}
	a.Log.Info("ended", "component", a.State.Name, "version", t.Version, "outcome", o, "reason", reason)
	a.Status("%s %s: %s", a.State.Name, t.Version, o)
	return nil
}

// ends records how a promote ended before anything was changed, and returns
// the error that says so.
func (a *Applier) ends(b contract.Build, err error, started time.Time) error {
	var e *outcome.Error
	if !errors.As(err, &e) {
		return err
	}
	return errors.Join(err, a.finish(b.Tuple, e.Outcome, e.Reason(), started, -1))
}
