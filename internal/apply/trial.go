package apply

import (
	"context"
	"errors"
	"fmt"
	"os"
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

// How long a trial may take, counted while the box is up and not held, and in
// which steps heal counts. A step is the most that one run of heal adds, so that
// runs which were missed make no trial shorter.
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
	if r.State.Name != layout.Pipeline || r.journal.Good == nil { // a first one has nothing to lose
		return nil
	}
	r.Status("%s %s: self-test", r.State.Name, r.journal.Target.Version)
	recover := filepath.Join(r.State.Path(layout.Current), "bin", "recover")
	out, err := r.Manager.Run(ctx, systemd.Command{Argv: []string{recover, "-check", "-root", string(r.State.Root)}, Profile: systemd.Scratch, Timeout: selfTestTime, Output: selfTestOutput})
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

// endTrial ends the trial of the pipeline that runs: its fetch, verify and stage
// have brought a request to its end, as stage has noted; and this program, in its
// own unit, can write where a roll writes and speak to the manager.
func (a *Applier) endTrial(ctx context.Context) error {
	trial, applied := record.Optional[contract.Trial](a.State, layout.Trial), record.Optional[contract.Applied](a.State, layout.Applied)
	if a.State.Name != layout.Pipeline || trial == nil || applied == nil || trial.Version != applied.Version || !trial.Proved {
		return nil
	}
	for _, p := range []layout.Place{layout.SystemdUnits, layout.Sysusers, layout.Tmpfiles} {
		probe := filepath.Join(a.State.Path(p), ".sluice-trial")
		if err := errors.Join(a.State.Disk.WriteFile(probe, nil, 0o600), a.State.Disk.Remove(probe)); err != nil {
			return fmt.Errorf("%s is on trial, and can't do what a roll does: %w", trial.Version, err)
		}
	}
	if _, err := a.Manager.Unit(ctx, bootService); err != nil {
		return fmt.Errorf("%s is on trial, and can't do what a roll does: %w", trial.Version, err)
	}
	a.Log.Info("the new pipeline has proved itself", "component", a.State.Name, "version", trial.Version)
	return a.State.EndTrial()
}

// tryOn counts on the trial of a self-update, and ends it when it has taken too
// long: it opens the roll back to the pipeline that proved itself. Recovery
// does the rest, from that pipeline. The caller holds the lock.
func (a *Applier) tryOn(ctx context.Context) (putBack bool, _ error) {
	trial, ok, err := a.trial()
	if err != nil {
		return false, err
	}
	timer, err := a.Manager.Unit(ctx, trialTimer)
	if err != nil {
		return false, err
	}
	if !ok {
		err := a.State.Disk.Remove(a.State.Path(layout.Prior)) // what a kill left of a trial that has ended
		// Its condition was met, and then prior went: it would stay failed.
		if u, uerr := a.Manager.Unit(ctx, trialService); uerr == nil && u.ActiveState == "failed" {
			err = errors.Join(err, a.Manager.ResetFailed(ctx, trialService))
		}
		if timer.Active() {
			job, serr := a.Manager.Stop(ctx, trialTimer)
			err = errors.Join(err, systemd.Done("stopping", trialTimer, job, serr))
		}
		return false, err
	}
	if !timer.Active() && timer.LoadState == "loaded" {
		job, err := a.Manager.Start(ctx, trialTimer)
		if err := systemd.Done("starting", trialTimer, job, err); err != nil {
			a.report(err)
		}
	}
	if config.Held(a.State.Root) { // nothing can be brought to its end
		return false, nil
	}
	if a.Auto {
		heal, err := a.Manager.Unit(ctx, trialService)
		if err != nil {
			return false, err
		}
		if trial.UptimeS == 0 {
			trial.UptimeS = 1 // it began after the last run: from here on it counts
		} else {
			trial.UptimeS += int64(min(trialStep, since(heal.Left)) / time.Second)
		}
		if err := a.State.Save(layout.Trial, trial); err != nil {
			return false, err
		}
	}
	if time.Duration(trial.UptimeS)*time.Second <= trialLimit {
		return false, nil
	}
	return true, a.putBack(trial)
}

// recoverTime is how long the way back to a pipeline may take: more than any
// gate.
const recoverTime = 20 * time.Minute

// recoverFromPrior runs recovery of the pipeline by the one that is good again, and
// not by its units: those that are installed are of the pipeline that failed.
func (a *Applier) recoverFromPrior(ctx context.Context) error {
	recover := filepath.Join(a.State.Path(layout.Good), "bin", "recover")
	out, err := a.Manager.Run(ctx, systemd.Command{Argv: []string{recover, "-component", string(a.State.Name)}, Profile: systemd.Tool, Timeout: recoverTime, Output: contract.MaxReason})
	if err == nil && (out.Status != 0 || out.Ended != "") {
		err = fmt.Errorf("recovering %s: exit status %d%s: %s", a.State.Name, out.Status, andEnded(out.Ended), contract.Clip(out.Text))
	}
	return err
}

// trial reads the record of the trial. A damaged one is made again, from the
// beginning, as long as the link prior is there: a pipeline that broke its own
// record is not thereby good.
func (a *Applier) trial() (contract.Trial, bool, error) {
	_, serr := os.Lstat(a.State.Path(layout.Trial))
	trial, ok, err := record.LoadOrQuarantine[contract.Trial](a.State, layout.Trial, a.report)
	if err != nil || ok || serr != nil {
		return trial, ok, err
	}
	applied, _, err := record.Load[contract.Applied](a.State, layout.Applied)
	prior, lerr := os.Readlink(a.State.Path(layout.Prior))
	if err != nil || lerr != nil || filepath.Base(prior) == string(applied.Version) {
		return trial, false, err
	}
	trial = contract.Trial{Schema: contract.One, Version: applied.Version, Prior: contract.Version(filepath.Base(prior)), PromotedAt: applied.PromotedAt}
	return trial, true, a.State.Save(layout.Trial, trial)
}

// putBack opens the roll back to the pipeline before a trial.
func (a *Applier) putBack(trial contract.Trial) error {
	applied, ok, err := record.Load[contract.Applied](a.State, layout.Applied)
	if err != nil {
		return err
	}
	if !ok || applied.Version != trial.Version { // something else runs: there is nothing to put back
		return a.State.EndTrial()
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
