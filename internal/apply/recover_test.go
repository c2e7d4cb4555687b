package apply

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
	"sluice/test/tree"
)

// cutAt applies what is staged and dies when the journal has been written in
// a phase for the nth time.
func (b *testbox) cutAt(phase contract.Phase) {
	b.t.Helper()
	dead := false
	refuse := func(string, string) error {
		if dead {
			return fault.ErrDead
		}
		if j, ok, _ := record.Load[contract.Journal](b.state, layout.Journal); ok && j.Phase == phase {
			dead = true
			return fault.ErrDead
		}
		return nil
	}
	b.disk.Fault.Refuse, b.manager.Fault.Refuse = refuse, refuse
	_ = b.apply()
	b.disk.Fault.Refuse, b.manager.Fault.Refuse = nil, nil
	j, ok, err := record.Load[contract.Journal](b.state, layout.Journal)
	if !ok || err != nil || j.Phase != phase {
		b.t.Fatalf("it did not die in phase %s but in %q, %v", phase, j.Phase, err)
	}
}

func TestRecoverFromEachPhase(t *testing.T) {
	for _, row := range Phases {
		for _, boot := range []bool{false, true} {
			b := newBox(t)
			b.stageFull("1")
			b.must(b.apply())
			two := b.stageFull("2")
			if row.Phase == Reverting || row.Phase == Reverted {
				b.manager.OnStart = b.failsOn("2")
			}
			b.cutAt(row.Phase)
			b.manager.OnStart = nil
			b.manager.Forget()
			if err := b.applier().Recover(context.Background(), boot); err != nil {
				t.Errorf("%s: %v", row.Phase, err)
			}
			version := "1"
			if row.Recovery == Forward {
				version = "2"
				b.ended(two, outcome.Applied, "")
			} else {
				word := outcome.Interrupted
				if row.Phase == Reverted || row.Phase == Reverting {
					word = outcome.Gate // the true reason is in the journal
				}
				b.ended(two, outcome.RolledBack, word)
			}
			b.runs(version)
			if got := b.manager.Enabled(); !slices.Equal(got, []string{"edge.service", "only" + version + ".timer", "tidy.timer"}) {
				t.Errorf("%s, boot %v: enabled %v", row.Phase, boot, got)
			}
			for _, call := range b.manager.Calls() {
				if boot && (strings.HasPrefix(call, "stop ") || strings.HasPrefix(call, "start ") || strings.HasPrefix(call, "restart ")) {
					t.Errorf("%s: at boot recovery waits for a job: %s", row.Phase, call)
				}
			}
			// Again: nothing.
			b.manager.Forget()
			if err := b.applier().Recover(context.Background(), boot); err != nil || len(b.manager.Calls()) > 0 {
				t.Errorf("%s: the second recovery did %v, %v", row.Phase, b.manager.Calls(), err)
			}
		}
	}
}

func TestRecoverFirstInstall(t *testing.T) {
	for _, phase := range []contract.Phase{Opening, Converging, Gating} {
		b := newBox(t)
		one := b.stageFull("1")
		b.cutAt(phase)
		b.must(b.applier().Recover(context.Background(), false))
		b.ended(one, outcome.RolledBack, outcome.Interrupted)
		if exists(b.state.Path(layout.Current)) || exists(b.root.Join("/etc/systemd/system/edge.service")) || len(b.manager.Active()) > 0 {
			t.Errorf("%s: something is left; active %v", phase, b.manager.Active())
		}
	}
}

func TestInterruptedIsTriedThreeTimes(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	for attempt := 1; attempt <= outcome.MaxAttempts; attempt++ {
		b.cutAt(Gating)
		b.must(b.applier().Recover(context.Background(), false))
		if r := b.ended(two, outcome.RolledBack, outcome.Interrupted); r.Attempt != attempt || r.Terminal("") != (attempt == outcome.MaxAttempts) {
			t.Errorf("attempt %d: %+v", attempt, r)
		}
	}
}

func TestUnreadableJournalGoesBack(t *testing.T) {
	for name, change := range tree.Damages {
		b := newBox(t)
		b.stageFull("1")
		b.must(b.apply())
		two := b.stageFull("2")
		b.cutAt(Gating)
		data, err := os.ReadFile(b.state.Path(layout.Journal))
		b.must(err)
		b.must(os.WriteFile(b.state.Path(layout.Journal), change(data), 0o644))
		if err := b.applier().Recover(context.Background(), false); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		b.ended(two, outcome.RolledBack, outcome.Interrupted)
		b.runs("1")
		entries, _ := os.ReadDir(b.state.Path(layout.OptOf))
		if !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), "journal.json.damaged-") }) {
			t.Errorf("%s: the damaged journal is not kept", name)
		}
	}
}

func TestApplyRecoversFirst(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	b.stage("2", nil, nil)
	b.cutAt(Gating)
	three := b.stage("3", nil, nil)
	b.must(b.apply())
	b.ended(three, outcome.Applied, "")
	b.runs("3")
}

// A recovery that comes late, after somebody else has finished the roll, does
// nothing: it invents no roll to go back from.
func TestLateRecoveryDoesNothing(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.cutAt(Gating)
	// It has seen the journal, and waits for the lock.
	lock, err := durable.Acquire(context.Background(), b.state.Path(layout.Lock))
	b.must(err)
	late := make(chan error)
	go func() { late <- b.applier().Recover(context.Background(), false) }()
	a := b.applier()
	b.must(a.recover(context.Background(), lock, false))
	before := b.manager.Calls()
	lock.Release()
	b.must(<-late)
	if after := b.manager.Calls(); len(after) != len(before) {
		t.Errorf("it did %v", after[len(before):])
	}
	b.ended(two, outcome.RolledBack, outcome.Interrupted)
}

// Cut before a new unit file was there, going back disables a unit that has no
// file: systemd says so, and that is all right.
func TestGoingBackFromBeforeAUnitFile(t *testing.T) {
	for _, first := range []bool{true, false} {
		b := newBox(t)
		if !first {
			b.stageFull("1")
			b.must(b.apply())
		}
		two := b.stageFull("2")
		b.cutAt(Opening)
		b.must(b.applier().Recover(context.Background(), false))
		b.ended(two, outcome.RolledBack, outcome.Interrupted)
		if !first {
			b.runs("1")
		}
	}
}

// Nobody asks for the third try: every one restarts services.
func TestStuckJournal(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	b.stage("2", nil, nil)
	b.cutAt(Gating)
	b.manager.Fault.Refuse = func(op, _ string) error {
		if op == "manager: restart" {
			return errors.New("the manager is ill")
		}
		return nil
	}
	a := b.applier()
	a.Auto = true
	for try := 1; try <= 4; try++ {
		b.manager.Forget()
		err := a.Recover(context.Background(), false)
		if err == nil || !b.state.Open() {
			t.Fatalf("try %d: %v", try, err)
		}
		if acted := len(b.manager.Calls()) > 0; acted != (try <= maxTries) {
			t.Errorf("try %d: %v", try, b.manager.Calls())
		}
	}
	b.manager.Fault.Refuse = nil
	b.must(b.applier().Recover(context.Background(), false)) // by hand
	b.runs("1")
}

// Forward restarts nothing: it is tried as often as somebody comes by.
func TestForwardIsTriedForEver(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.cutAt(Gated)
	j, _, err := record.Load[contract.Journal](b.state, layout.Journal)
	b.must(err)
	j.Tries = 3 * maxTries
	b.must(b.state.SaveJournal(j))
	a := b.applier()
	a.Auto = true
	b.must(a.Recover(context.Background(), false))
	b.ended(two, outcome.Applied, "")
	b.runs("2")
}

// A manager that is away while the good build should be judged says nothing
// about it: nothing is recorded, the journal stays, and the next try ends it.
func TestGoingBackUnjudged(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.manager.OnStart = b.failsOn("2")
	a := b.applier()
	a.Manager = away{b.manager, func() bool {
		target, _ := os.Readlink(b.state.Path(layout.Current))
		j, _, _ := record.Load[contract.Journal](b.state, layout.Journal)
		return target == "sets/1" && j.Phase == Reverting && j.Node == string(node.Gate)
	}}
	if err := a.Run(context.Background(), context.Background()); !errors.Is(err, systemd.ErrAway) || !b.state.Open() {
		t.Fatal(err)
	}
	b.must(b.applier().Recover(context.Background(), false))
	b.ended(two, outcome.RolledBack, outcome.Gate)
	b.runs("1")
}

type away struct {
	*systemd.Recorder
	is func() bool
}

func (a away) Unit(ctx context.Context, name string) (systemd.Unit, error) {
	if a.is() {
		return systemd.Unit{}, systemd.ErrAway
	}
	return a.Recorder.Unit(ctx, name)
}

// A transaction that wrote its result and died before its journal was gone is
// one attempt.
func TestResultIsCountedOnce(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.cutAt(Gating)
	dead := false
	b.disk.Fault.Refuse = func(op, object string) error {
		if dead || op == "remove" && strings.HasSuffix(object, "journal.json") {
			dead = true
			return fault.ErrDead
		}
		return nil
	}
	_ = b.applier().Recover(context.Background(), false)
	b.disk.Fault.Refuse = nil
	b.must(b.applier().Recover(context.Background(), false))
	if r := b.ended(two, outcome.RolledBack, outcome.Interrupted); r.Attempt != 1 {
		t.Errorf("attempt %d", r.Attempt)
	}
}

// Nor does a deferral in between forget a try: a build that takes the machine
// down with it would be tried for ever.
func TestDeferralsForgetNoTries(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	for attempt := 1; attempt <= outcome.MaxAttempts; attempt++ {
		b.cutAt(Gating)
		b.must(b.applier().Recover(context.Background(), false))
		if r := b.ended(two, outcome.RolledBack, outcome.Interrupted); r.Attempt != attempt {
			t.Errorf("attempt %d: %+v", attempt, r)
		}
		for range 3 {
			b.must(b.state.Conclude(contract.Result{Tuple: two, Outcome: outcome.Deferred, Reason: "no-space: x", Config: record.Sum(nil), DownMS: -1}))
		}
		if r := b.ended(two, outcome.RolledBack, outcome.Interrupted); r.Attempt != attempt || strings.Count(r.Reason, "since then") != 1 || !strings.Contains(r.Reason, "no-space: x") {
			t.Errorf("attempt %d, deferred: %+v", attempt, r)
		}
	}
}

// What was deferred before takes no try from what is interrupted.
func TestDeferralsTakeNoTries(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	for range 4 {
		b.must(b.state.Conclude(contract.Result{Tuple: two, Outcome: outcome.Deferred, Reason: "no-space: x", Config: record.Sum(nil), DownMS: -1}))
	}
	b.cutAt(Gating)
	b.must(b.applier().Recover(context.Background(), false))
	if r := b.ended(two, outcome.RolledBack, outcome.Interrupted); r.Attempt != 1 {
		t.Errorf("attempt %d", r.Attempt)
	}
}
