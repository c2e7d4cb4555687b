package apply

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
	"sluice/test/tree"
)

// onTrial leaves a self-update from 1 to 2 on trial, for so long.
func (b *testbox) onTrial(uptime time.Duration) contract.Tuple {
	b.t.Helper()
	b.stageSelf("1")
	b.must(b.apply())
	two := b.stageSelf("2")
	b.must(b.apply())
	trial := record.Optional[contract.Trial](b.state, layout.Trial)
	if trial == nil {
		b.t.Fatal("nothing is on trial")
	}
	trial.UptimeS = int64(uptime / time.Second)
	b.must(b.state.Save(layout.Trial, *trial))
	b.manager.Forget()
	return two
}

func (b *testbox) link(p layout.Place) string {
	target, _ := os.Readlink(b.state.Path(p))
	return strings.TrimPrefix(target, "sets/")
}

func TestSelfUpdateIsOnTrial(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	b.stageSelf("1")
	b.must(b.apply())
	if exists(b.state.Path(layout.Trial)) || exists(b.state.Path(layout.Prior)) {
		t.Error("a first install is on trial: there is nothing before it")
	}
	two := b.stageSelf("2")
	b.must(b.apply())
	b.ended(two, outcome.Applied, "")
	trial := record.Optional[contract.Trial](b.state, layout.Trial)
	if trial == nil || trial.Version != "2" || trial.Prior != "1" || !trial.PromotedAt.Equal(two.PromotedAt.Time) || b.link(layout.Prior) != "1" {
		t.Errorf("trial %+v, prior %s", trial, b.link(layout.Prior))
	}
	if !slices.Contains(b.manager.Active(), trialTimer) {
		t.Error("nobody watches it")
	}
	// Another update, before the first has proved itself: the last that did stays.
	b.stageSelf("3")
	b.must(b.apply())
	if trial := record.Optional[contract.Trial](b.state, layout.Trial); trial == nil || trial.Version != "3" || trial.Prior != "1" || b.link(layout.Prior) != "1" {
		t.Errorf("trial %+v, prior %s", trial, b.link(layout.Prior))
	}
	if _, _, err := record.Manifest(b.state.Set("1")); err != nil {
		t.Errorf("the set to go back to was pruned: %v", err)
	}
	// A fourth that fails its gate changes nothing of that.
	b.manager.OnStart = b.failsOn("4")
	b.stageSelf("4")
	_ = b.apply()
	b.manager.OnStart = nil
	if trial := record.Optional[contract.Trial](b.state, layout.Trial); trial == nil || trial.Version != "3" {
		t.Errorf("trial %+v", trial)
	}
	// Back to the one that proved itself: nothing is on trial.
	b.stageSelf("1")
	b.must(b.apply())
	if exists(b.state.Path(layout.Trial)) || exists(b.state.Path(layout.Prior)) {
		t.Error("what has proved itself is on trial")
	}
	b.must(b.applier().Heal(context.Background()))
	if slices.Contains(b.manager.Active(), trialTimer) {
		t.Error("the timer of no trial still runs")
	}
}

// A pipeline that is broken does not become good.
func TestSelfTestIsInTheGate(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	b.stageSelf("1")
	b.must(b.apply())
	for name, c := range map[string]struct {
		out  systemd.Output
		says string
	}{
		"says no": {systemd.Output{Status: 1, Text: "a gate that fails: apply says that all is well"}, "exit status 1: a gate that fails"},
		"hangs":   {systemd.Output{Status: -1, Ended: "it did not end in 1m30s"}, "did not end"},
	} {
		two := b.stageSelf("2")
		b.manager.OnRun = func(cmd systemd.Command) systemd.Output {
			if filepath.Base(cmd.Argv[0]) == "recover" {
				if cmd.Argv[0] != filepath.Join(b.state.Path(layout.Current), "bin/recover") || cmd.Argv[1] != "-check" || cmd.Profile != systemd.Scratch {
					t.Errorf("%s: %+v", name, cmd)
				}
				return c.out
			}
			return systemd.Output{Text: strings.Join(cmd.Argv, " ")}
		}
		_ = b.apply()
		if r := b.ended(two, outcome.RolledBack, outcome.Gate); !strings.Contains(r.Reason, c.says) {
			t.Errorf("%s: %s", name, r.Reason)
		}
		b.runs("1")
	}
}

// heal counts only time that has passed with the box up, and never more than a
// step a run; by hand it counts nothing.
func TestTrialIsCounted(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	b.onTrial(0)
	uptime := func() time.Duration {
		t := record.Optional[contract.Trial](b.state, layout.Trial)
		return time.Duration(t.UptimeS) * time.Second
	}
	a := b.applier()
	b.must(a.Heal(context.Background()))
	if uptime() != 0 {
		t.Errorf("by hand it counts %s", uptime())
	}
	a.Auto = true
	b.must(os.WriteFile(b.state.Path(layout.Hold), nil, 0o644))
	b.must(a.Heal(context.Background()))
	if uptime() != 0 {
		t.Errorf("while the box is held it counts %s", uptime())
	}
	b.must(os.Remove(b.state.Path(layout.Hold)))
	b.must(a.Heal(context.Background()))
	if uptime() != time.Second {
		t.Errorf("%s counted of a trial that may just have begun", uptime())
	}
	b.must(a.Heal(context.Background()))
	if up := since(0); uptime()-time.Second != min(trialStep, up).Truncate(time.Second) {
		t.Errorf("%s counted, the machine is up for %s", uptime(), up)
	}
	before := uptime()
	a.Manager = left{b.manager, uint64(since(0) / time.Microsecond)}
	b.must(a.Heal(context.Background()))
	if uptime()-before > time.Second {
		t.Errorf("%s counted right after the last run", uptime()-before)
	}
	b.runs("2")
}

// left is a manager whose heal ended at a moment.
type left struct {
	*systemd.Recorder
	at uint64
}

func (l left) Unit(ctx context.Context, name string) (systemd.Unit, error) {
	u, err := l.Recorder.Unit(ctx, name)
	if name == trialService {
		u.Left = l.at
	}
	return u, err
}

// A self-update that does not prove itself is put back by heal and recovery.
func TestTrialThatTakesTooLong(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	two := b.onTrial(trialLimit)
	b.must(b.applier().Heal(context.Background()))
	b.runs("2") // not over it yet
	trial := record.Optional[contract.Trial](b.state, layout.Trial)
	trial.UptimeS++
	b.must(b.state.Save(layout.Trial, *trial))
	b.must(b.applier().Heal(context.Background()))
	if b.link(layout.Good) != "1" || !slices.Contains(b.manager.Calls(), "run recover") {
		t.Errorf("good is %s; %v", b.link(layout.Good), b.manager.Calls())
	}
	b.must(b.applier().Recover(context.Background(), false))
	if r := b.ended(two, outcome.RolledBack, outcome.Gate); !strings.Contains(r.Reason, "within 1h") {
		t.Error(r.Reason)
	}
	b.runs("1")
	if version, err := b.oneBuild(); version != "1" || err != nil {
		t.Errorf("%q, %v", version, err)
	}
	if exists(b.state.Path(layout.Trial)) || exists(b.state.Path(layout.Prior)) {
		t.Error("it is still on trial")
	}
	// A prior that is damaged is not gone back to.
	b.onTrial(trialLimit + time.Second)
	b.must(os.WriteFile(filepath.Join(b.state.Set("1"), "bin/edge"), []byte("#!other"), 0o755))
	if err := b.applier().Heal(context.Background()); err == nil || !strings.Contains(err.Error(), "can't be gone back to") || b.state.Open() {
		t.Error(err)
	}
	b.runs("2")
}

// A damaged trial.json is moved aside, and the trial begins again: what is on
// trial is not good because its record is broken.
func TestDamagedTrial(t *testing.T) {
	for name, change := range tree.Damages {
		b := newBoxOf(t, layout.Pipeline)
		two := b.onTrial(trialLimit)
		data, err := os.ReadFile(b.state.Path(layout.Trial))
		b.must(err)
		b.must(os.WriteFile(b.state.Path(layout.Trial), change(data), 0o644))
		b.must(b.applier().Heal(context.Background()))
		b.runs("2")
		entries, _ := filepath.Glob(b.state.Path(layout.Trial) + ".damaged-*")
		trial := record.Optional[contract.Trial](b.state, layout.Trial)
		if len(entries) != 1 || trial == nil || trial.Version != "2" || trial.Prior != "1" || trial.UptimeS != 0 || !trial.PromotedAt.Equal(two.PromotedAt.Time) {
			t.Errorf("%s: %v, %+v", name, entries, trial)
		}
	}
}

// A damaged applied.json, made again from the link good, keeps no trial from
// being over.
func TestTrialWithoutApplied(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	two := b.onTrial(trialLimit + time.Second)
	b.must(os.WriteFile(b.state.Path(layout.Applied), []byte("{"), 0o644))
	b.must(b.applier().Heal(context.Background()))
	b.must(b.applier().Recover(context.Background(), false))
	r := record.Optional[contract.Result](b.state, layout.Result)
	if r == nil || r.Outcome != outcome.RolledBack || r.Version != two.Version {
		t.Errorf("%+v", r)
	}
	b.runs("1")
}

// The trial ends in apply: stage raises its marker when a request was brought
// to its end, and apply shows that it can do what a roll does.
func TestTrialEndsInApply(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	two := b.onTrial(0)
	b.must(marker.Raise(b.state.Path(layout.Staged)))
	b.must(b.apply())
	trial := record.Optional[contract.Trial](b.state, layout.Trial)
	if trial == nil {
		t.Fatal("it ended, and stage has proved nothing")
	}
	trial.Proved = true
	b.must(b.state.Save(layout.Trial, *trial))
	b.disk.Fault.Refuse = func(op, object string) error {
		if strings.Contains(object, ".sluice-trial") {
			return &os.PathError{Op: op, Path: object, Err: unix.EROFS}
		}
		return nil
	}
	b.must(marker.Raise(b.state.Path(layout.Staged)))
	if err := b.apply(); err == nil || !strings.Contains(err.Error(), "can't do what a roll does") || !exists(b.state.Path(layout.Trial)) {
		t.Errorf("it can write nowhere: %v", err)
	}
	b.disk.Fault.Refuse = nil
	b.must(marker.Raise(b.state.Path(layout.Staged)))
	b.must(b.apply())
	if exists(b.state.Path(layout.Trial)) || exists(b.state.Path(layout.Prior)) {
		t.Error("it is still on trial")
	}
	b.ended(two, outcome.Applied, "")
	b.runs("2")
	if left, _ := filepath.Glob(b.root.Join("/etc/*/*/.sluice-trial*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Another build runs than the one on trial: there is nothing to put back.
func TestTrialOfSomethingElse(t *testing.T) {
	b := newBoxOf(t, layout.Pipeline)
	b.onTrial(trialLimit + time.Second)
	trial := record.Optional[contract.Trial](b.state, layout.Trial)
	trial.Version = "7"
	b.must(b.state.Save(layout.Trial, *trial))
	b.must(b.applier().Heal(context.Background()))
	b.runs("2")
	if b.state.Open() || exists(b.state.Path(layout.Trial)) || exists(b.state.Path(layout.Prior)) {
		t.Error("it is still on trial")
	}
}
