package apply

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/graph"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// maxTries is how often recovery is tried without anybody asking for it.
const maxTries = 2

// Recover finishes or undoes an open roll; without one it does nothing. At
// boot nothing is stopped, judged or waited for. It waits for the component's
// lock until ctx ends.
func (a *Applier) Recover(ctx context.Context, boot bool) error {
	if !a.State.Open() {
		a.Log.Info("nothing to recover", "component", a.State.Name)
		return nil
	}
	lock, err := durable.Acquire(ctx, a.State.Path(layout.Lock))
	if err != nil {
		return err
	}
	defer lock.Release()
	if !a.State.Open() {
		return nil // whoever held the lock has done it
	}
	return a.recover(ctx, lock, boot)
}

// recover is what Recover does with the component's lock held. That a build
// was put back is no error of recovery.
func (a *Applier) recover(ctx context.Context, _ *durable.Lock, boot bool) error {
	r := &roll{Applier: a, started: time.Now(), host: &hostLock{path: a.State.Path(layout.HostLock)}, recovering: true, boot: boot}
	if err := r.host.take(ctx); err != nil {
		return err
	}
	defer r.host.release()
	open, err := r.reopen()
	if err != nil || !open {
		return err
	}
	switch Recovery(r.journal.Phase) {
	case Forward:
		return r.finishForward(ctx)
	case Record:
		err = r.recordRolledBack()
	default:
		if r.journal.Reason == "" {
			r.journal.Reason = fmt.Sprintf("%s: the roll was cut in phase %s", outcome.Interrupted, r.journal.Phase)
		}
		err = r.revert(ctx)
	}
	var ended *outcome.Error
	if errors.As(err, &ended) && ended.Outcome == outcome.RolledBack {
		return nil
	}
	return err
}

// reopen reads the journal and both builds, and counts the try before it acts.
func (r *roll) reopen() (bool, error) {
	if conf, err := config.LoadComponent(r.State.Root, r.State.Name); err == nil {
		r.conf = conf
	}
	if !r.State.Open() {
		return false, nil
	}
	journal, ok, err := record.LoadOrQuarantine[contract.Journal](r.State, layout.Journal, r.report)
	if err != nil {
		return false, err
	}
	if !ok { // it was there, and is quarantined now
		if journal, err = r.unknown(); err != nil {
			return false, err
		}
	}
	if r.Auto && !r.boot && journal.Tries >= maxTries && Recovery(journal.Phase) == Back {
		// Every try restarts services: after two it is for a person to say when.
		return false, fmt.Errorf("recovery of %s has failed %d times: see why in the log, then run `%s`", r.State.Name, journal.Tries, r.State.RecoverCommand())
	}
	r.journal = journal
	r.journal.Tries++
	if err := r.State.SaveJournal(r.journal); err != nil {
		r.report(fmt.Errorf("%w, ignoring: the earlier one says what to do as well", err))
	}
	r.target = r.read(r.journal.Target)
	if r.journal.Good != nil {
		r.good = r.read(*r.journal.Good)
		if r.good.None() {
			return false, fmt.Errorf("the good set %s of %s can't be read: nothing can be put back: see `sluice box`", r.journal.Good.Version, r.State.Name)
		}
	}
	return true, nil
}

// unknown stands in for a journal that could not be read: it is treated as
// converging, to what was staged last.
func (r *roll) unknown() (contract.Journal, error) {
	good, err := r.Applier.good()
	if err != nil {
		return contract.Journal{}, err
	}
	if good == nil { // the first roll: what it took over from, if anything
		if m, digest, err := record.Manifest(r.State.Set(contract.BeforeSluice)); err == nil {
			good = &contract.Build{Tuple: contract.Tuple{Channel: r.conf.Channel, Version: m.Version}, ManifestSHA256: digest}
		}
	}
	staged, _, err := record.Load[contract.Staged](r.State, layout.StagedRecord)
	if err != nil {
		r.report(err)
	}
	return contract.Journal{Schema: contract.One, ID: "unknown", Component: r.State.Name, Phase: Converging, Target: staged.Build, Good: good,
		WasActive: []string{}, Reason: string(outcome.Interrupted) + ": the journal could not be read", StartedAt: contract.At(r.Now()), BootID: bootID()}, nil
}

// read reads a set for what it names. Its files are checked where they are
// used.
func (r *roll) read(b contract.Build) node.Build {
	set := r.State.Set(b.Version)
	m, digest, err := record.Manifest(set)
	if err != nil || digest != b.ManifestSHA256 {
		r.report(fmt.Errorf("set %q is damaged (%v): what only it names stays", set, err))
		return node.Build{}
	}
	return node.Build{Manifest: m, Set: set}
}

// finishForward arms and records a build that had proved itself.
func (r *roll) finishForward(ctx context.Context) error {
	if r.target.None() {
		return fmt.Errorf("the set %s of %s has passed its gate and can't be read now: see `sluice box`", r.journal.Target.Version, r.State.Name)
	}
	k := r.maker()
	k.Passed = true
	err := graph.Err(k.Ledger(r.target, r.good).Fold().Converge(ctx, graph.Walk{Before: r.note}))
	if ctx.Err() != nil || errors.Is(err, fault.ErrDead) {
		return errors.Join(ctx.Err(), err)
	}
	reason, err := armed(err)
	if err != nil {
		return err
	}
	return r.recordApplied(ctx, reason)
}
