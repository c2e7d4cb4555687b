package box

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// edge makes a bundle of the service at a version, with a timer that only this
// version has.
func (f *Fleet) edge(t *testing.T, version, fault, gate string) string {
	t.Helper()
	files := Edge(must[string](t)(BuildEdge(t.Context(), version, fault)), version)
	files["units/only"+version+".timer"] = "[Timer]\nOnCalendar=weekly\n[Install]\nWantedBy=timers.target\n"
	files["units/only"+version+".service"] = "[Service]\nType=oneshot\nExecStart=/bin/true\n"
	files["manifest.json"] = strings.NewReplacer(`"edge.socket"]`, `"edge.socket", "only`+version+`.timer"]`, `"pass_within": "5s", "soak": "7s"`, gate).Replace(files["manifest.json"])
	return must[string](t)(f.Bundle(t.Context(), "edge-"+version, files))
}

// oneBuild judges that links, record, files, enablement, what is active and
// what answers are of exactly one build, and returns its version.
func (f *Fleet) oneBuild(t *testing.T) string {
	t.Helper()
	ctx := t.Context()
	state := f.State("edge")
	a, _, err := record.Load[contract.Applied](state, layout.Applied)
	good, _ := os.Readlink(state.Path(layout.Good))
	version := string(a.Version)
	if err != nil || filepath.Base(good) != version || f.running("edge") != version || state.Open() {
		t.Errorf("applied %s, good %s, current %s, a journal: %v, %v", version, good, f.running("edge"), state.Open(), err)
	}
	m, err := record.CheckSet(state.Set(a.Version), a.ManifestSHA256)
	if err != nil {
		t.Fatal(err)
	}
	units := filepath.Join(f.Root, string(layout.SystemdUnits))
	entries := must[[]os.DirEntry](t)(os.ReadDir(units))
	var have []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "edge") || strings.HasPrefix(e.Name(), "only") {
			have = append(have, e.Name())
			file, _ := m.File(contract.UnitsFolder + e.Name())
			if data := must[[]byte](t)(os.ReadFile(filepath.Join(units, e.Name()))); record.Sum(data) != file.SHA256 {
				t.Errorf("%s is not that of %s", e.Name(), version)
			}
		}
	}
	if want := slices.Sorted(slices.Values(m.UnitFiles())); !slices.Equal(have, want) {
		t.Errorf("unit files %v, %s has %v", have, version, want)
	}
	links, _ := filepath.Glob(filepath.Join(units, "*.wants", "*"))
	var enabled []string
	for _, l := range links {
		if name := filepath.Base(l); strings.HasPrefix(name, "edge") || strings.HasPrefix(name, "only") {
			enabled = append(enabled, name)
		}
	}
	slices.Sort(enabled)
	if want := slices.Sorted(slices.Values(m.Units.Enable)); !slices.Equal(enabled, want) {
		t.Errorf("enabled %v, %s enables %v", enabled, version, want)
	}
	for _, u := range m.Units.Enable {
		if out, err := f.Exec(ctx, "systemctl", "is-active", u); err != nil {
			t.Errorf("%s: %s is %s", version, u, strings.TrimSpace(out))
		}
	}
	if answer, err := f.Exec(ctx, "curl", "-sS", "--max-time", "10", "http://127.0.0.1:8080/"); err != nil || strings.TrimSpace(answer) != version {
		t.Errorf("%s answers, %s is good, %v", strings.TrimSpace(answer), version, err)
	}
	return version
}

// held starts a promote of a bundle and has apply pause wherever it writes its
// journal down, for so long that whoever watches sees each phase. It returns
// once the journal is in the phase, with apply in that pause.
func (f *Fleet) held(t *testing.T, bundle string, phase contract.Phase) contract.Pointer {
	t.Helper()
	ctx := t.Context()
	state := f.State("edge")
	// Apply waits for this lock before it opens its journal: time to attach.
	lock := must[*os.File](t)(os.OpenFile(state.Path(layout.HostLock), os.O_RDWR|os.O_CREATE, 0o600))
	defer lock.Close()
	must[struct{}](t)(struct{}{}, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	p := must[contract.Pointer](t)(f.Promote(ctx, bundle))
	var pid string
	must[struct{}](t)(struct{}{}, Until(ctx, "apply to wait for the host's lock", RollTime, func() (bool, error) {
		out, err := f.Exec(ctx, "systemctl", "show", "-P", "MainPID", "sluice-apply@edge.service")
		pid = strings.TrimSpace(out)
		s, _, _ := record.Load[contract.Staged](state, layout.StagedRecord)
		return err == nil && pid != "0" && s.Tuple.Equal(p.Tuple()), err
	}))
	journal := string(layout.Root("/").Path(layout.Journal, "edge"))
	renames := "rename,renameat,renameat2"
	tracer := f.Command(ctx, "strace", "-f", "-q", "-o", "/dev/null", "-p", pid, "-P", journal, "-e", "trace="+renames, "-e", "inject="+renames+":delay_exit=600ms")
	must[struct{}](t)(struct{}{}, tracer.Start())
	go func() { _ = tracer.Wait() }() // it ends with what it traces
	must[struct{}](t)(struct{}{}, Until(ctx, "the tracer", RollTime, func() (bool, error) {
		out, err := f.Exec(ctx, "grep", "-h", "TracerPid", "/proc/"+pid+"/status")
		return err == nil && !strings.HasSuffix(strings.TrimSpace(out), "\t0"), err
	}))
	must[struct{}](t)(struct{}{}, unix.Flock(int(lock.Fd()), unix.LOCK_UN))
	must[struct{}](t)(struct{}{}, Until(ctx, "phase "+string(phase), RollTime, func() (bool, error) {
		j, _, err := record.Load[contract.Journal](state, layout.Journal)
		return j.Phase == phase, err
	}))
	return p
}

// The phases of a roll, whether it takes a build that does not pass its gate to
// come there, and what the box ends on.
var phases = []struct {
	phase contract.Phase
	bad   bool
	ends  string
}{
	{"opening", false, "1"}, {"converging", false, "1"}, {"gating", false, "1"}, {"gated", false, "2"}, {"reverting", true, "1"}, {"reverted", true, "1"},
}

// In each phase apply is killed, the box is rebooted, and the box loses its
// power. Each time it ends on exactly one build, and says how that came.
func TestInterruptedInEachPhase(t *testing.T) {
	for name, interrupt := range map[string]func(f *Fleet) error{
		"killed": func(f *Fleet) error {
			_, err := f.Exec(t.Context(), "systemctl", "kill", "-s", "KILL", "sluice-apply@edge.service")
			return err
		},
		"rebooted": func(f *Fleet) error {
			if err := f.Halt(); err != nil {
				return err
			}
			return f.Boot(t.Context())
		},
		"cut": func(f *Fleet) error {
			if err := f.Cut(); err != nil {
				return err
			}
			return f.Boot(t.Context())
		},
	} {
		t.Run(name, func(t *testing.T) {
			needsStrace(t)
			f := enrolled(t, "edge=stable")
			ctx := t.Context()
			one := f.edge(t, "1", "", `"pass_within": "5s", "soak": "200ms"`)
			two := f.edge(t, "2", "", `"pass_within": "5s", "soak": "1s"`)
			bad := f.edge(t, "3", "deaf", `"pass_within": "1s", "soak": "1s"`)
			must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, one)), outcome.Applied))
			for _, c := range phases {
				bundle := two
				if c.bad {
					bundle = bad
				}
				p := f.held(t, bundle, c.phase)
				must[string](t)(f.Sluice(ctx, "hold")) // not tried again while it is looked at
				must[struct{}](t)(struct{}{}, interrupt(f))
				r := must[contract.Result](t)(f.Ended(ctx, p))
				if version := f.oneBuild(t); version != c.ends {
					t.Errorf("%s: it ends on %s", c.phase, version)
				}
				word, says := outcome.Interrupted, "cut in phase "+string(c.phase)
				switch {
				case c.ends == "2":
					word, says = "", ""
				case c.bad:
					word, says = outcome.Gate, "not within 1s"
				case name == "rebooted": // it is told to stop, and may come to the next phase before it does
					says = "cut in phase"
				}
				if r.Word() != word || !strings.Contains(r.Reason, says) {
					t.Errorf("%s: it says %s %q", c.phase, r.Outcome, r.Reason)
				}
				if out := must[string](t)(f.Sluice(ctx, "box")); !strings.Contains(out, string(r.Outcome)) || !strings.Contains(out, says) {
					t.Errorf("%s: `sluice box` does not tell: %s", c.phase, out)
				}
				if t.Failed() {
					return
				}
				must[string](t)(f.Sluice(ctx, "resume"))
				back := must[contract.Pointer](t)(f.Promote(ctx, one))
				must[contract.Result](t)(f.Ended(ctx, back, outcome.Applied, outcome.Noted))
			}
		})
	}
}

func needsStrace(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skip("there is no strace: apt-get install strace")
	}
}

// The power goes at random instants of a roll, thirty in all.
func TestPowerCutAtRandom(t *testing.T) {
	const boxes, cuts = 3, 10
	for i := range boxes {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			f := enrolled(t, "edge=stable")
			ctx := t.Context()
			seed := uint64(time.Now().UnixNano())
			t.Logf("seed %d", seed)
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			bundles := map[string]string{}
			for _, v := range []string{"1", "2"} {
				bundles[v] = f.edge(t, v, "", `"pass_within": "5s", "soak": "500ms"`)
			}
			must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bundles["1"])), outcome.Applied))
			runs, where := "1", map[contract.Phase]int{}
			for range cuts {
				next := map[string]string{"1": "2", "2": "1"}[runs]
				must[contract.Pointer](t)(f.Promote(ctx, bundles[next]))
				// From the poll that hears of it to the end of its roll.
				after := time.Duration(random.Int64N(int64(5 * time.Second)))
				<-time.After(after)
				j, _, _ := record.Load[contract.Journal](f.State("edge"), layout.Journal)
				where[j.Phase]++
				must[struct{}](t)(struct{}{}, f.Cut())
				must[struct{}](t)(struct{}{}, f.Boot(ctx))
				// Recovery has run before anything else has; a new try may be under way.
				must[struct{}](t)(struct{}{}, Until(ctx, "the box to be at rest", RollTime, func() (bool, error) {
					a, _, err := record.Load[contract.Applied](f.State("edge"), layout.Applied)
					r, _, _ := record.Load[contract.Result](f.State("edge"), layout.Result)
					return err == nil && !f.State("edge").Open() && string(a.Version) == next && r.Outcome == outcome.Applied && string(r.Version) == next, fmt.Errorf("applied %s, the last %s %s", a.Version, r.Version, r.Outcome)
				}))
				if runs = f.oneBuild(t); t.Failed() {
					t.Fatalf("cut %s after the promote, in phase %q", after, j.Phase)
				}
			}
			t.Logf("SHOW cut in phases %v: %d of %d end on exactly one build", where, cuts, cuts)
		})
	}
}

// The manager's own timeout ends apply; recover is killed in turn. Something
// goes on with it each time.
func TestTimeoutAndKilledRecovery(t *testing.T) {
	needsStrace(t)
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	one := f.edge(t, "1", "", `"pass_within": "5s", "soak": "200ms"`)
	two := f.edge(t, "2", "", `"pass_within": "5s", "soak": "30s"`)
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, one)), outcome.Applied))
	dropin := "/etc/systemd/system/sluice-apply@.service.d/timeout.conf"
	must[struct{}](t)(struct{}{}, f.Write(dropin, "[Service]\nTimeoutStartSec=3\n", 0o644))
	must[string](t)(f.Exec(ctx, "systemctl", "daemon-reload"))
	p := must[contract.Pointer](t)(f.Promote(ctx, two))
	must[struct{}](t)(struct{}{}, Until(ctx, "the roll", RollTime, func() (bool, error) { return f.State("edge").Open(), nil }))
	must[string](t)(f.Sluice(ctx, "hold"))
	if r := must[contract.Result](t)(f.Ended(ctx, p, outcome.RolledBack)); r.Word() != outcome.Interrupted {
		t.Errorf("after the timeout: %s", r.Reason)
	}
	if version := f.oneBuild(t); version != "1" {
		t.Errorf("after the timeout it runs %s", version)
	}
	must[struct{}](t)(struct{}{}, os.Remove(filepath.Join(f.Root, dropin)))
	must[string](t)(f.Exec(ctx, "systemctl", "daemon-reload"))
	must[string](t)(f.Sluice(ctx, "resume"))
	// A new promote, since what was interrupted backs off.
	p = f.held(t, two, "gating")
	must[string](t)(f.Sluice(ctx, "hold"))
	lock := must[*os.File](t)(os.OpenFile(f.State("edge").Path(layout.HostLock), os.O_RDWR, 0o600))
	must[struct{}](t)(struct{}{}, unix.Flock(int(lock.Fd()), unix.LOCK_EX)) // recovery waits for it
	must[string](t)(f.Exec(ctx, "systemctl", "kill", "-s", "KILL", "sluice-apply@edge.service"))
	must[struct{}](t)(struct{}{}, Until(ctx, "recovery to be killed", RollTime, func() (bool, error) {
		out, err := f.Exec(ctx, "systemctl", "show", "-P", "ActiveState", "sluice-recover@edge.service")
		if err == nil && strings.TrimSpace(out) == "activating" {
			_, err = f.Exec(ctx, "systemctl", "kill", "-s", "KILL", "sluice-recover@edge.service")
			return err == nil, err
		}
		return false, err
	}))
	must[struct{}](t)(struct{}{}, Until(ctx, "recovery to have failed", RollTime, func() (bool, error) {
		out, err := f.Exec(ctx, "systemctl", "show", "-P", "ActiveState", "sluice-recover@edge.service")
		return strings.TrimSpace(out) == "failed", err
	}))
	if !f.State("edge").Open() {
		t.Error("the journal is gone, and nobody has recovered")
	}
	lock.Close()
	must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-heal.service"))
	if r := must[contract.Result](t)(f.Ended(ctx, p, outcome.RolledBack)); r.Word() != outcome.Interrupted {
		t.Errorf("after the second: %s", r.Reason)
	}
	if version := f.oneBuild(t); version != "1" {
		t.Errorf("it runs %s", version)
	}
}
