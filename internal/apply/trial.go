package apply

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// The pipeline updates itself, and who would mend it if it were broken is part
// of it. So a new one proves itself twice. In its gate, before it is good, its
// programs roll a component forward, fail and go back, on a scratch tree. Then it
// is on trial: until it has brought a request through fetch, verify and stage,
// the last pipeline that did so stays as the link prior. heal runs from there,
// and goes back to it.

// How long a trial may take, counted while the box is up, and in which steps
// heal counts. A step is the most that one run of heal adds: whatever happened
// between two runs, no trial is over early.
const (
	trialLimit = time.Hour
	trialStep  = 10 * time.Minute
)

// Units of the pipeline that this package handles by name.
const (
	trialService = "sluice-trial.service" // heal, from prior
	trialTimer   = "sluice-trial.timer"   // starts it every trialStep
	bootService  = "sluice-recover-boot.service"
)

// The self-test's deadline, and how much of what it says is kept.
const (
	selfTestTime   = time.Minute
	selfTestOutput = contract.MaxReason
)

// selfTest lets a new pipeline prove itself before anything depends on it. It
// runs as a throwaway user: what is known of it is that it was signed.
func (r *roll) selfTest(ctx context.Context) error {
	if r.State.Name != layout.Pipeline {
		return nil
	}
	r.Status("%s %s: self-test", r.State.Name, r.journal.Target.Version)
	recover := filepath.Join(r.State.Path(layout.Current), "bin", "recover")
	out, err := r.Manager.Run(ctx, systemd.Command{Argv: []string{recover, "-check", "-root", string(r.State.Root)}, Profile: systemd.Isolated, Timeout: selfTestTime, Output: selfTestOutput})
	if err != nil {
		return outcome.Rollback(wordOf(err, outcome.Gate), "its self-test: %w", err)
	}
	if out.Status != 0 || out.Ended != "" {
		return outcome.Rollback(outcome.Gate, "its self-test: exit status %d%s: %s", out.Status, andEnded(out.Ended), contract.Clip(out.Text))
	}
	return nil
}

// beginTrial puts a self-update on trial. What it is to be put back from is the
// last pipeline that proved itself, also if another one is on trial already.
func (r *roll) beginTrial(ctx context.Context) error {
	if r.State.Name != layout.Pipeline || r.journal.Good == nil || r.journal.Good.Version == contract.BeforeSluice {
		return nil
	}
	prior := r.journal.Good.Version
	if t := record.Optional[contract.Trial](r.State, layout.Trial); t != nil && t.Version != r.journal.Target.Version {
		prior = t.Prior
	} else if t != nil {
		return nil // an earlier life has done it
	}
	if prior == r.journal.Target.Version {
		return r.State.EndTrial()
	}
	if err := r.State.Disk.Symlink(filepath.Join("sets", string(prior)), r.State.Path(layout.Prior)); err != nil {
		return err
	}
	if err := r.State.Save(layout.Trial, contract.Trial{Schema: contract.One, Version: r.journal.Target.Version, Prior: prior, PromotedAt: r.journal.Target.PromotedAt}); err != nil {
		return err
	}
	if r.boot {
		return nil // heal starts it, soon after boot
	}
	if job, err := r.Manager.Start(ctx, trialTimer); err != nil || job != systemd.JobDone {
		r.report(fmt.Errorf("%w, ignoring: heal does it in its own time", systemd.Done("starting", trialTimer, job, err)))
	}
	return nil
}

// tryOn counts on the trial of a self-update, and ends it when it has taken too
// long: it opens the roll back to the pipeline that proved itself. Recovery
// does the rest, from that pipeline. The caller holds the lock.
func (a *Applier) tryOn(ctx context.Context) error {
	trial, ok, err := record.LoadOrQuarantine[contract.Trial](a.State, layout.Trial, a.report)
	if err != nil {
		return err
	}
	timer, err := a.Manager.Unit(ctx, trialTimer)
	if err != nil {
		return err
	}
	if !ok {
		err := a.State.Disk.Remove(a.State.Path(layout.Prior)) // what a kill left of a trial that has ended
		if timer.Active() {
			job, serr := a.Manager.Stop(ctx, trialTimer)
			err = errors.Join(err, systemd.Done("stopping", trialTimer, job, serr))
		}
		return err
	}
	if !timer.Active() && timer.LoadState == "loaded" {
		job, err := a.Manager.Start(ctx, trialTimer)
		if err := systemd.Done("starting", trialTimer, job, err); err != nil {
			a.report(err)
		}
	}
	if a.Auto && !config.Held(a.State.Root) { // held, nothing can be brought to its end
		heal, err := a.Manager.Unit(ctx, trialService)
		if err != nil {
			return err
		}
		trial.UptimeS += int64(min(trialStep, since(heal.Left)) / time.Second)
		if err := a.State.Save(layout.Trial, trial); err != nil {
			return err
		}
	}
	if time.Duration(trial.UptimeS)*time.Second <= trialLimit {
		return nil
	}
	return a.putBack(trial)
}

// putBack opens the roll back to the pipeline before a trial.
func (a *Applier) putBack(trial contract.Trial) error {
	applied, ok, err := record.Load[contract.Applied](a.State, layout.Applied)
	if err != nil || !ok || applied.Version != trial.Version {
		return fmt.Errorf("the trial is of %s, and what is applied is %q: %w", trial.Version, applied.Version, err)
	}
	m, digest, err := record.Manifest(a.State.Set(trial.Prior))
	if err == nil {
		_, err = record.CheckSet(a.State.Set(trial.Prior), digest)
	}
	if err != nil {
		return fmt.Errorf("%s did not prove itself, and %s can't be gone back to: %w", trial.Version, trial.Prior, err)
	}
	good := contract.Build{Tuple: contract.Tuple{Channel: applied.Channel, Version: trial.Prior, PromotedAt: trial.PromotedAt}, ManifestSHA256: digest}
	j := contract.Journal{Schema: contract.One, ID: newID(), Component: a.State.Name, Phase: Reverting, Target: applied.Build, Good: &good, WasActive: []string{},
		Reason: fmt.Sprintf("%s: the new pipeline did not bring a request to its end within %s", outcome.Gate, trialLimit), StartedAt: contract.At(a.Now()), BootID: bootID()}
	for _, r := range m.Units.Restart {
		j.WasActive = append(j.WasActive, r.Unit)
	}
	a.Log.Error("a self-update did not prove itself: going back", "component", a.State.Name, "from", trial.Version, "to", trial.Prior)
	// The link first: from here on root's programs are the ones that work,
	// recovery among them.
	if err := a.State.Disk.Symlink(filepath.Join("sets", string(trial.Prior)), a.State.Path(layout.Good)); err != nil {
		return err
	}
	return a.State.SaveJournal(j)
}
