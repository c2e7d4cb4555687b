package apply

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/systemd"
)

// The builds of the order tests: accounts, temporary files, a timer with its
// oneshot that is quiesced and is wanted by another target in later builds, one unit that only the old build has and one that
// only the new one has.
func (b *testbox) stageFull(version string) contract.Tuple {
	timer := "[Timer]\nOnCalendar=daily\n[Install]\nWantedBy=timers.target\n"
	tidy := timer
	if version != "1" { // enabled by another link
		tidy = strings.Replace(timer, "timers", "multi-user", 1)
	}
	files := map[string]string{
		"sysusers.d/edge.conf": "u edge - -\n", "tmpfiles.d/edge.conf": "d /run/edge 0755 edge edge -\n# " + version,
		"units/tidy.timer": tidy, "units/tidy.service": "[Service]\nType=oneshot\nExecStart=/x\n# " + version,
		"units/only" + version + ".timer": timer, "units/only" + version + ".service": "[Service]\nType=oneshot\nExecStart=/x\n",
	}
	return b.stage(version, files, func(m *contract.Manifest) {
		m.Units.Enable = append(m.Units.Enable, "tidy.timer", "only"+version+".timer")
		m.Units.Quiesce = []string{"tidy.timer", "tidy.service"}
	})
}

// trace is what was done, in words: renames of targets, calls of the manager,
// the journal and the records.
func (b *testbox) trace() string {
	var out []string
	for _, op := range b.ops {
		op = strings.ReplaceAll(op, "/opt/sluice/edge/", "")
		switch {
		case strings.HasSuffix(op, "rename journal.json"), strings.Contains(op, ".tmp"), strings.Contains(op, "symlink "), strings.HasSuffix(op, " versions.json"):
			continue // written before every step; crash tests count them
		}
		op = strings.NewReplacer("rename /etc/systemd/system/", "write unit ", "remove /etc/systemd/system/", "remove unit ", "rename /etc/", "write ",
			string(b.root), "", "/etc/sysusers.d/", "", "/etc/tmpfiles.d/", "").Replace(op)
		out = append(out, op)
	}
	return strings.Join(out, "\n")
}

func compare(t *testing.T, what, got, want string) {
	t.Helper()
	if want = strings.TrimSpace(want); got != want {
		g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
		for i := range max(len(g), len(w)) {
			if i >= len(g) || i >= len(w) || g[i] != w[i] {
				t.Errorf("%s: step %d differs; got:\n%s", what, i+1, got)
				return
			}
		}
	}
}

func TestOrderOfFirstInstall(t *testing.T) {
	b := newBox(t)
	b.stageFull("1")
	b.must(b.apply())
	compare(t, "first install", b.trace(), firstInstallOrder)
}

func TestOrderForward(t *testing.T) {
	b := newBox(t)
	b.stageFull("1")
	b.must(b.apply())
	b.stageFull("2")
	b.must(b.apply())
	compare(t, "forward", b.trace(), forwardOrder)
	b.runs("2")
}

func TestOrderBack(t *testing.T) {
	b := newBox(t)
	b.stageFull("1")
	b.must(b.apply())
	two := b.stageFull("2")
	first := true
	b.manager.OnStart = func(name string, u *systemd.Unit) string {
		if name == "edge.service" && first {
			first = false
			return failing(name, u)
		}
		return systemd.JobDone
	}
	_ = b.apply()
	compare(t, "back", b.trace(), backOrder)
	b.ended(two, outcome.RolledBack, outcome.Gate)
	b.runs("1")
	if got := b.manager.Enabled(); !slices.Equal(got, []string{"edge.service", "only1.timer", "tidy.timer"}) {
		t.Errorf("enabled after going back: %v", got)
	}
}

// What must hold in every order, said once more as rules, so that a change of
// the lists above can't give them up unseen.
func TestOrderRules(t *testing.T) {
	for name, order := range map[string]string{"first install": firstInstallOrder, "forward": forwardOrder, "back": backOrder} {
		steps := strings.Split(strings.TrimSpace(order), "\n")
		index := func(prefix string) int {
			return slices.IndexFunc(steps, func(s string) bool { return strings.HasPrefix(s, prefix) })
		}
		last := func(prefix string) int {
			for i := len(steps) - 1; i >= 0; i-- {
				if strings.HasPrefix(steps[i], prefix) {
					return i
				}
			}
			return -1
		}
		if s, d := index("run systemd-sysusers"), index("run systemd-tmpfiles"); s < 0 || d < s {
			t.Errorf("%s: tmpfiles before accounts", name)
		}
		for i, s := range steps {
			if unit, ok := strings.CutPrefix(s, "restart "); ok && steps[i-1] != "reset-failed "+unit {
				t.Errorf("%s: %s without reset-failed before it", name, s)
			}
			if strings.HasPrefix(s, "start ") && strings.HasSuffix(s, ".service") && name != "back" {
				t.Errorf("%s: arming starts a service: %s", name, s)
			}
			if strings.HasPrefix(s, "write unit") && i < last("restart") && !slices.ContainsFunc(steps[i:last("restart")], func(s string) bool { return s == "reload" }) {
				t.Errorf("%s: %s is not followed by a reload before the restart", name, s)
			}
		}
		if steps[len(steps)-1] != "remove journal.json" {
			t.Errorf("%s: the journal is not removed last", name)
		}
		if name != "back" {
			if gate := last("run edge"); index("enable ") < gate || index("start ") < gate {
				t.Errorf("%s: something is armed before the gate", name)
			}
			reloads := 0
			for _, s := range steps[:last("restart")] {
				if s == "reload" {
					reloads++
				}
			}
			if reloads != 1 {
				t.Errorf("%s: %d reloads before the restart", name, reloads)
			}
		}
	}
	if strings.Index(forwardOrder, "disable only1.timer") > strings.Index(forwardOrder, "remove unit only1.timer") {
		t.Error("a unit file is removed before the unit is disabled")
	}
}

// A disk that fills up in the middle of a roll: what is needed to go back is
// there already, and the reserve has room for the rest.
func TestGoingBackOnAFullDisk(t *testing.T) {
	for _, fills := range []string{"tidy.service", "edge.conf", "only2.timer"} {
		b := newBox(t)
		b.stageFull("1")
		b.must(b.apply())
		two := b.stageFull("2")
		full, left := false, reserveSize
		b.disk.Fault.Refuse = func(op, object string) error {
			if op == "create" && filepath.Base(object) == fills {
				full = true
			}
			if !full || op != "write" {
				return nil
			}
			if exists(b.state.Path(layout.Reserve)) {
				return unix.ENOSPC
			}
			if filepath.Base(object) == "journal.json" {
				return nil // it takes the place of the one before
			}
			if left -= 4096; left < 0 {
				return unix.ENOSPC
			}
			return nil
		}
		if err := b.apply(); outcome.Exit(err) != outcome.ExitFailed {
			t.Errorf("%s: %v", fills, err)
		}
		if !full {
			t.Errorf("%s: the disk was never full", fills)
		}
		b.disk.Fault.Refuse = nil
		b.ended(two, outcome.RolledBack, outcome.NoSpace)
		b.runs("1")
	}
}

const firstInstallOrder = `
run edge
rename reserve
rename current
write sysusers.d/edge.conf
write tmpfiles.d/edge.conf
write unit edge.service
write unit only1.service
write unit only1.timer
write unit tidy.service
write unit tidy.timer
run systemd-sysusers
run systemd-tmpfiles
reload
reset-failed edge.service
restart edge.service
run edge
enable edge.service tidy.timer only1.timer
reload
start tidy.timer
start only1.timer
rename applied.json
rename good
rename result.json
remove reserve
remove journal.json`

const forwardOrder = `
run edge
write tmpfiles.d/.edge.conf.sluice-back
write unit .only1.service.sluice-back
write unit .only1.timer.sluice-back
write unit .tidy.service.sluice-back
write unit .tidy.timer.sluice-back
rename reserve
stop only1.timer
disable only1.timer
remove unit only1.timer
remove unit only1.service
stop tidy.timer
rename current
write tmpfiles.d/edge.conf
write unit tidy.service
write unit tidy.timer
write unit only2.service
write unit only2.timer
run systemd-sysusers
run systemd-tmpfiles
reload
reset-failed edge.service
restart edge.service
run edge
disable tidy.timer
enable tidy.timer only2.timer
reload
start tidy.timer
start only2.timer
rename applied.json
rename good
rename result.json
remove .edge.conf.sluice-back
remove unit .only1.service.sluice-back
remove unit .only1.timer.sluice-back
remove unit .tidy.service.sluice-back
remove unit .tidy.timer.sluice-back
remove reserve
remove journal.json`

const backOrder = `
run edge
write tmpfiles.d/.edge.conf.sluice-back
write unit .only1.service.sluice-back
write unit .only1.timer.sluice-back
write unit .tidy.service.sluice-back
write unit .tidy.timer.sluice-back
rename reserve
stop only1.timer
disable only1.timer
remove unit only1.timer
remove unit only1.service
stop tidy.timer
rename current
write tmpfiles.d/edge.conf
write unit tidy.service
write unit tidy.timer
write unit only2.service
write unit only2.timer
run systemd-sysusers
run systemd-tmpfiles
reload
reset-failed edge.service
restart edge.service
remove reserve
disable only2.timer
remove unit only2.timer
remove unit only2.service
rename current
write tmpfiles.d/edge.conf
write unit tidy.service
write unit tidy.timer
write unit only1.service
write unit only1.timer
run systemd-sysusers
run systemd-tmpfiles
reload
reset-failed edge.service
restart edge.service
run edge
disable tidy.timer
enable tidy.timer only1.timer
reload
start tidy.timer
start only1.timer
rename result.json
remove journal.json`
