package apply

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
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
				b.manager.OnStart = func(name string, u *systemd.Unit) string {
					if target, _ := os.Readlink(b.state.Path(layout.Current)); target == "sets/2" {
						return failing(name, u)
					}
					return systemd.JobDone
				}
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
	for name, garbage := range map[string]string{"empty": "", "garbage": "\x00\x01", "future": `{"schema":"7.0"}`} {
		b := newBox(t)
		b.stageFull("1")
		b.must(b.apply())
		two := b.stageFull("2")
		b.cutAt(Gating)
		b.must(os.WriteFile(b.state.Path(layout.Journal), []byte(garbage), 0o644))
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
