package apply

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
	"sluice/internal/unit"
)

// How often the gate looks when nothing wakes it, and how often it asks the
// probes while it soaks.
const (
	lookEvery  = 50 * time.Millisecond
	soakEvery  = 200 * time.Millisecond
	probeEvery = time.Second
	// A probe that does not answer in the soak is asked again at once, so often.
	probeTries = 3
	// exitConfig is what a service exits with whose configuration can't be
	// served: waiting will not help.
	exitConfig = outcome.ExitConfig
	// cldExited is si_code of a process that called exit(2).
	cldExited = 1
)

// A judge looks at what a build made of the box.
type judge struct {
	*roll
	build  node.Build
	units  []string          // that were restarted
	jobs   map[string]string // and how that ended
	proved map[string]uint64 // units whose executable is the signed one, and since which start
	asked  time.Time
}

// fatal is a finding that no waiting will mend.
type fatal struct{ error }

// gate waits until everything that the manifest asks for is true, and then
// whether it stays true. host.lock is let go of while it waits.
func (r *roll) gate(ctx context.Context, b, other node.Build, jobs map[string]string) error {
	if b.None() {
		return nil
	}
	r.host.release()
	err := r.judge(ctx, b, other, jobs)
	if err == nil && r.journal.Phase == Gating {
		err = r.selfTest(ctx)
	}
	return errors.Join(err, r.host.take(context.WithoutCancel(ctx)))
}

func (r *roll) judge(ctx context.Context, b, other node.Build, jobs map[string]string) error {
	j := &judge{roll: r, build: b, units: node.Changed(b, other), jobs: jobs, proved: map[string]uint64{}}
	if !r.Manager.Live() {
		j.units = nil
		r.Log.Info("not judged: units", "component", r.State.Name)
	}
	pass, soak := b.Manifest.Gate.Windows(r.Box.MinSoak)
	wake, stop := r.Manager.Watch(ctx)
	defer stop()
	baseline, err := j.pass(ctx, pass, wake)
	if err != nil {
		return err
	}
	if r.down != nil {
		r.down.stop() // it answers; in the soak nobody hammers it
	}
	if err := r.version(ctx, b.Manifest, r.State.Path(layout.Current)); err != nil {
		return outcome.Rollback(outcome.Gate, "run through current: %w", err)
	}
	return j.soak(ctx, soak, wake, baseline)
}

// pass waits until everything is true at one moment, within a window that
// begins when the newest process started.
func (j *judge) pass(ctx context.Context, window time.Duration, wake <-chan struct{}) (map[string]systemd.Unit, error) {
	deadline := time.Now().Add(window)
	for first := true; ; first = false {
		units, newest, err := j.look(ctx)
		if err == nil {
			err = j.probe(ctx)
		}
		if err == nil {
			return units, inTime(units, window)
		}
		if errors.Is(err, systemd.ErrAway) {
			return nil, outcome.Rollback(outcome.Interrupted, "%w", err)
		}
		var f fatal
		if errors.As(err, &f) {
			return nil, outcome.Rollback(outcome.Gate, "%w", f.error)
		}
		if first && newest > 0 {
			deadline = deadline.Add(-min(since(newest), window))
		}
		left := time.Until(deadline)
		if left <= 0 {
			return nil, outcome.Rollback(outcome.Gate, "not within %s: %w", window, err)
		}
		j.Status("%s %s: gate, %s left: %s", j.State.Name, j.build.Manifest.Version, left.Round(time.Second), err)
		if err := pause(ctx, min(lookEvery, left), wake); err != nil {
			return nil, err
		}
	}
}

// inTime fails a build that came up, and too late: a start job waits for as
// long as the unit says, which is not what the manifest says.
func inTime(units map[string]systemd.Unit, window time.Duration) error {
	for _, u := range units {
		if u.MainStart == 0 || u.ActiveEnter < u.MainStart {
			continue
		}
		if took := time.Duration(u.ActiveEnter-u.MainStart) * time.Microsecond; took > window {
			return outcome.Rollback(outcome.Gate, "not within %s: %s took %s to come up", window, u.Name, took.Round(time.Millisecond))
		}
	}
	return nil
}

// since is the time that has passed, with the box awake, since a moment of
// the manager's.
func since(monotonic uint64) time.Duration {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return 0
	}
	return max(0, time.Duration(now.Nano())-time.Duration(monotonic)*time.Microsecond)
}

func pause(ctx context.Context, d time.Duration, wake <-chan struct{}) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-wake:
	case <-time.After(d):
	}
	return nil
}

// soak watches that everything stays true. One sample lies, so what is
// compared are the marks that a new life of a unit leaves.
func (j *judge) soak(ctx context.Context, window time.Duration, wake <-chan struct{}, baseline map[string]systemd.Unit) error {
	end := time.Now().Add(window)
	for {
		units, _, err := j.look(ctx)
		for name, was := range baseline {
			if is, known := units[name]; known && !sameLife(was, is) {
				return outcome.Rollback(outcome.Soak, "%s did not stay up: %s%s", name, ended(is), j.tail(ctx, was))
			}
		}
		if errors.Is(err, systemd.ErrAway) {
			return outcome.Rollback(outcome.Interrupted, "%w", err)
		}
		if err != nil {
			return outcome.Rollback(outcome.Soak, "%w", err)
		}
		if time.Since(j.asked) >= probeEvery {
			if err := j.stubbornProbe(ctx); err != nil {
				return outcome.Rollback(outcome.Soak, "%w", err)
			}
		}
		left := time.Until(end)
		if left <= 0 {
			return nil
		}
		j.Status("%s %s: soak, %s left", j.State.Name, j.build.Manifest.Version, left.Round(time.Second))
		if err := pause(ctx, min(soakEvery, left), wake); err != nil {
			return err
		}
	}
}

func sameLife(was, is systemd.Unit) bool {
	return is.InvocationID == was.InvocationID && is.NRestarts == was.NRestarts && is.ActiveEnter == was.ActiveEnter && is.MainPID == was.MainPID && is.ActiveState == was.ActiveState
}

func (j *judge) tail(ctx context.Context, u systemd.Unit) string {
	if lines := j.Manager.Tail(ctx, u); lines != "" {
		return "; its last lines: " + lines
	}
	return ""
}

// look judges every restarted unit once. It returns them, and when the newest
// process started.
func (j *judge) look(ctx context.Context) (units map[string]systemd.Unit, newest uint64, err error) {
	units = map[string]systemd.Unit{}
	for _, name := range j.units {
		u, uerr := j.Manager.Unit(ctx, name)
		if uerr == nil {
			newest = max(newest, u.MainStart)
			units[name] = u
			uerr = j.unit(ctx, u)
		}
		var f fatal
		if err == nil || errors.As(uerr, &f) || errors.Is(uerr, systemd.ErrAway) {
			err = uerr
		}
	}
	return units, newest, err
}

func (j *judge) unit(ctx context.Context, u systemd.Unit) error {
	if u.ExitCode == cldExited && u.ExitStatus == exitConfig {
		return fatal{fmt.Errorf("%s exited %d: its configuration is wrong%s", u.Name, exitConfig, j.tail(ctx, u))}
	}
	if u.Type == "oneshot" {
		if j.jobs[u.Name] == systemd.JobDone && u.Result == "success" {
			return nil
		}
		return fatal{fmt.Errorf("%s: %s%s", u.Name, ended(u), j.tail(ctx, u))}
	}
	if u.ActiveState == "failed" || u.ActiveState == "inactive" && !u.HasJob {
		return fatal{fmt.Errorf("%s: %s%s", u.Name, ended(u), j.tail(ctx, u))}
	}
	if job := j.jobs[u.Name]; job != systemd.JobDone {
		return fatal{fmt.Errorf("%s: its start job ended as %q: %s%s", u.Name, job, ended(u), j.tail(ctx, u))}
	}
	if u.ActiveState != "active" {
		return fmt.Errorf("%s is %s (%s)", u.Name, u.ActiveState, u.SubState)
	}
	if u.NeedReload {
		return fatal{fmt.Errorf("%s: its unit file changed after the manager read it", u.Name)}
	}
	if want := path.Join(string(layout.SystemdUnits), contract.UnitFile(u.Name)); u.FragmentPath != want && j.build.Manifest.Ships(u.Name) {
		return fatal{fmt.Errorf("%s runs from %q, not from %q", u.Name, u.FragmentPath, want)}
	}
	if err := j.started(u); err != nil {
		return fatal{err}
	}
	return j.executable(u)
}

// started compares the program that the manager starts with the one that the
// signed unit file names: a drop-in may say otherwise, and then whatever the build
// brings is not what is judged.
func (j *judge) started(u systemd.Unit) error {
	data, err := record.ReadFile(filepath.Join(j.build.Set, contract.UnitsFolder, contract.UnitFile(u.Name)), unit.MaxFile)
	if err != nil || u.Exec == "" {
		return nil // it ships none
	}
	opts, err := unit.Parse(data)
	if err != nil {
		return nil
	}
	starts := unit.Options(opts, "Service", "ExecStart")
	if len(starts) == 0 {
		return nil
	}
	want, _, _ := strings.Cut(strings.TrimLeft(starts[0], "@-:+!| "), " ")
	if path.IsAbs(want) && !strings.ContainsAny(want, "%$\"'\\") && path.Clean(want) != path.Clean(u.Exec) {
		return fmt.Errorf("%s starts %q, its unit file says %q: a drop-in replaces it", u.Name, u.Exec, want)
	}
	return nil
}

func ended(u systemd.Unit) string {
	switch {
	case u.ExitCode == cldExited:
		return fmt.Sprintf("it ended with exit status %d (%s)", u.ExitStatus, u.Result)
	case u.ExitCode != 0:
		return fmt.Sprintf("it was ended by signal %d (%s)", u.ExitStatus, u.Result)
	}
	return fmt.Sprintf("it is %s (%s)", u.ActiveState, u.Result)
}

// executable compares what runs with what was signed, byte for byte, where
// ExecStart= lies in the set. A script is run by its interpreter.
func (j *judge) executable(u systemd.Unit) error {
	rel, inSet := strings.CutPrefix(u.Exec, string(layout.Root("/").Path(layout.Current, string(j.State.Name)))+"/")
	f, listed := j.build.Manifest.File(rel)
	if !inSet || !listed || j.proved[u.Name] == u.MainStart || isScript(filepath.Join(j.build.Set, rel)) {
		return nil
	}
	exe, err := os.Open(fmt.Sprintf("/proc/%d/exe", u.MainPID))
	if err != nil {
		return fmt.Errorf("%s: its executable can't be read: %w", u.Name, err)
	}
	defer exe.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, exe); err != nil {
		return fmt.Errorf("%s: its executable can't be read: %w", u.Name, err)
	}
	if record.Hex(hash) != f.SHA256 {
		return fmt.Errorf("%s: process %d does not run the %q that was signed", u.Name, u.MainPID, rel)
	}
	j.proved[u.Name] = u.MainStart
	return nil
}

func isScript(file string) bool {
	f, err := os.Open(file)
	if err != nil {
		return false
	}
	defer f.Close()
	var head [2]byte
	_, err = io.ReadFull(f, head[:])
	return err == nil && string(head[:]) == "#!"
}

// probe asks every probe once.
func (j *judge) probe(ctx context.Context) error {
	j.asked = time.Now()
	for _, p := range j.build.Manifest.Gate.Probes {
		err := ask(ctx, p)
		if len(p.Exec) > 0 {
			err = j.exec(ctx, p)
		}
		if err != nil {
			return fmt.Errorf("probe %s: %w", p, err)
		}
	}
	return nil
}

func (j *judge) stubbornProbe(ctx context.Context) (err error) {
	for range probeTries {
		if err = j.probe(ctx); err == nil {
			return nil
		}
		if perr := pause(ctx, soakEvery, nil); perr != nil {
			return perr
		}
	}
	return err
}

func (j *judge) exec(ctx context.Context, p contract.Probe) error {
	argv := append([]string{filepath.Join(j.State.Path(layout.Current), filepath.FromSlash(p.Exec[0]))}, p.Exec[1:]...)
	out, err := j.Manager.Run(ctx, systemd.Command{Argv: argv, Profile: systemd.Loopbound, Timeout: execTime, Output: execOutput})
	if err != nil {
		return err
	}
	if out.Status != 0 || out.Ended != "" {
		return fmt.Errorf("exit status %d%s: %s", out.Status, andEnded(out.Ended), contract.Clip(out.Text))
	}
	return nil
}
