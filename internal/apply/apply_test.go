package apply

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// A testbox is a box under a temporary root, with a recorder in place of the
// service manager.
type testbox struct {
	t       *testing.T
	root    layout.Root
	state   record.State
	manager *systemd.Recorder
	disk    *durable.Disk
	promote int
	hand    contract.Manifest // what was on the box by hand, as its set has it
	ops     []string          // durable operations on target paths and calls of the manager, in order
}

func newBox(t *testing.T) *testbox { return newBoxOf(t, "edge") }

func newBoxOf(t *testing.T, component contract.Component) *testbox {
	b := &testbox{t: t, root: layout.Root(t.TempDir())}
	b.disk = &durable.Disk{Fault: &fault.Points{Seen: func(_ int, op, object string) {
		if op == "rename" || op == "remove" || op == "symlink" {
			b.ops = append(b.ops, op+" "+strings.TrimPrefix(object, string(b.root)))
		}
	}}}
	b.manager = &systemd.Recorder{Root: b.root, Fault: &fault.Points{Seen: func(_ int, op, object string) {
		b.ops = append(b.ops, strings.TrimSpace(strings.TrimPrefix(op, "manager: ")+" "+object))
	}}}
	b.state = record.State{Root: b.root, Disk: b.disk, Name: component}
	for _, p := range []layout.Place{layout.Etc, layout.Sets, layout.StagedMark, layout.SystemdUnits, layout.Sysusers, layout.Tmpfiles} {
		b.must(os.MkdirAll(b.state.Path(p), 0o755))
	}
	b.must(os.WriteFile(b.state.Path(layout.ComponentConf), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
	return b
}

func (b *testbox) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

const soak = contract.Duration(time.Millisecond)

// stage lays out a set, and says that it is staged. extra files are units
// that change says what to do with.
func (b *testbox) stage(version string, files map[string]string, change func(*contract.Manifest)) contract.Tuple {
	b.t.Helper()
	m := contract.Manifest{Schema: contract.One, Component: b.state.Name, Version: contract.Version(version), Platform: contract.Here(), VersionCommand: []string{"bin/edge", version},
		Gate: contract.Gate{PassWithin: contract.Duration(100 * time.Millisecond), Soak: soak}}
	all := map[string]string{"bin/edge": "#!edge " + version, "units/edge.service": "[Service]\nExecStart=/x\n[Install]\nWantedBy=multi-user.target\n"}
	maps.Copy(all, files)
	set := b.state.Set(m.Version)
	for _, path := range slices.Sorted(maps.Keys(all)) {
		mode := contract.Mode(0o644)
		if strings.HasPrefix(path, "bin/") {
			mode = 0o755
		}
		at := filepath.Join(set, path)
		b.must(os.MkdirAll(filepath.Dir(at), 0o755))
		b.must(os.WriteFile(at, []byte(all[path]), fs.FileMode(mode)))
		m.Files = append(m.Files, contract.File{Path: path, Mode: mode, Size: int64(len(all[path])), SHA256: record.Sum([]byte(all[path]))})
	}
	m.Units = contract.Units{Enable: []string{"edge.service"}, Restart: []contract.Restart{{Unit: "edge.service"}}}
	if change != nil {
		change(&m)
	}
	b.must(m.Check())
	data := m.Encode()
	b.must(os.WriteFile(filepath.Join(set, contract.ManifestName), data, 0o644))
	b.promote++
	tuple := contract.Tuple{Channel: "stable", Version: m.Version, PromotedAt: contract.At(time.Unix(int64(b.promote), 0))}
	plain := record.State{Root: b.root, Disk: &durable.Disk{}, Name: b.state.Name}
	b.must(plain.Save(layout.StagedRecord, contract.Staged{Schema: contract.One, Build: contract.Build{Tuple: tuple, ManifestSHA256: record.Sum(data)}}))
	b.must(marker.Raise(b.state.Path(layout.Staged)))
	b.ops = nil
	b.manager.Forget()
	return tuple
}

func (b *testbox) applier() *Applier {
	return &Applier{State: b.state, Manager: b.manager, Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Now: time.Now}
}

func (b *testbox) apply() error { return b.applier().Run(context.Background(), context.Background()) }

// ended checks how a promote ended, and that nothing is left open.
func (b *testbox) ended(want contract.Tuple, o outcome.Outcome, word outcome.Word) contract.Result {
	b.t.Helper()
	r, ok, err := record.Load[contract.Result](b.state, layout.Result)
	if err != nil || !ok || !r.Tuple.Equal(want) || r.Outcome != o || r.Word() != word {
		b.t.Errorf("result %+v (%v), want %s %s %s", r, err, want.Version, o, word)
	}
	if b.state.Open() {
		b.t.Error("the journal is still there")
	}
	return r
}

// runs checks that files, links and record are all of one version.
func (b *testbox) runs(version string) {
	b.t.Helper()
	for _, link := range []layout.Place{layout.Current, layout.Good} {
		if target, err := os.Readlink(b.state.Path(link)); err != nil || target != "sets/"+version {
			b.t.Errorf("%s is %q, %v; want %s", link, target, err, version)
		}
	}
	a, ok, err := record.Load[contract.Applied](b.state, layout.Applied)
	if err != nil || !ok || string(a.Version) != version {
		b.t.Errorf("applied.json says %q, %v", a.Version, err)
	}
	m, _, err := record.Manifest(b.state.Set(contract.Version(version)))
	b.must(err)
	for _, u := range m.UnitFiles() {
		f, _ := m.File("units/" + u)
		data, err := os.ReadFile(b.root.Join(filepath.Join(string(layout.SystemdUnits), u)))
		if err != nil || record.Sum(data) != f.SHA256 {
			b.t.Errorf("unit file %s is not that of %s: %v", u, version, err)
		}
	}
}

func TestFirstInstall(t *testing.T) {
	b := newBox(t)
	one := b.stage("1", nil, nil)
	b.must(b.apply())
	b.ended(one, outcome.Applied, "")
	b.runs("1")
	if got := b.manager.Enabled(); !slices.Equal(got, []string{"edge.service"}) {
		t.Errorf("enabled: %v", got)
	}
	if _, err := os.Lstat(b.state.Path(layout.Staged)); err == nil {
		t.Error("the marker is still raised")
	}
}

func TestFirstInstallThatFailsLeavesNothing(t *testing.T) {
	b := newBox(t)
	b.manager.OnStart = failing
	one := b.stage("1", nil, nil)
	if err := b.apply(); outcome.Exit(err) != outcome.ExitFailed {
		t.Errorf("exit %d: %v", outcome.Exit(err), err)
	}
	b.ended(one, outcome.RolledBack, outcome.Gate)
	for _, gone := range []string{b.state.Path(layout.Current), b.state.Path(layout.Good), b.root.Join("/etc/systemd/system/edge.service")} {
		if exists(gone) {
			t.Errorf("%q is left", gone)
		}
	}
	if len(b.manager.Enabled()) > 0 || len(b.manager.Active()) > 0 {
		t.Errorf("enabled %v, active %v", b.manager.Enabled(), b.manager.Active())
	}
}

func failing(_ string, u *systemd.Unit) string {
	u.ActiveState, u.Result, u.ExitCode, u.ExitStatus = "failed", "exit-code", 1, 1
	return "failed"
}

// failsOn lets every start fail while a version is current.
func (b *testbox) failsOn(version string) func(string, *systemd.Unit) string {
	return func(name string, u *systemd.Unit) string {
		if target, _ := os.Readlink(b.state.Path(layout.Current)); target == "sets/"+version {
			return failing(name, u)
		}
		return systemd.JobDone
	}
}

func TestRollForwardAndBack(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.must(b.apply())
	b.ended(two, outcome.Applied, "")
	b.runs("2")

	three := b.stage("3", nil, nil)
	b.manager.OnStart = b.failsOn("3")
	err := b.apply()
	if outcome.Exit(err) != outcome.ExitFailed {
		t.Error(err)
	}
	r := b.ended(three, outcome.RolledBack, outcome.Gate)
	if !strings.Contains(r.Reason, "log of edge.service") {
		t.Errorf("the reason does not carry the log: %s", r.Reason)
	}
	b.runs("2")
	if got := b.manager.Active(); !slices.Equal(got, []string{"edge.service"}) {
		t.Errorf("active: %v", got)
	}
	// The same again does nothing.
	b.must(marker.Raise(b.state.Path(layout.Staged)))
	b.manager.Forget()
	b.must(b.apply())
	if calls := b.manager.Calls(); len(calls) > 0 {
		t.Errorf("a second try: %v", calls)
	}
}

func TestRollbackFailed(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.manager.OnStart = failing
	err := b.apply()
	if outcome.Exit(err) != outcome.ExitFailed {
		t.Error(err)
	}
	b.ended(two, outcome.RollbackFailed, outcome.Gate)
	restarts := 0
	for _, call := range b.manager.Calls() {
		if call == "restart edge.service" {
			restarts++
		}
	}
	if restarts != 3 { // forward, back, and the good build's second try
		t.Errorf("%d restarts", restarts)
	}
	b.runs("1") // the units of the way back are those of the good set, also here
	b.manager.OnStart = nil
	three := b.stage("3", nil, nil)
	b.must(b.apply())
	b.ended(three, outcome.Applied, "")
	b.runs("3")
}

func TestGateReasons(t *testing.T) {
	for name, c := range map[string]struct {
		start func(*systemd.Unit) string
		word  outcome.Word
		says  string
	}{
		"exits 78":     {func(u *systemd.Unit) string { u.ExitCode, u.ExitStatus = 1, 78; return systemd.JobDone }, outcome.Gate, "exited 78"},
		"never active": {func(u *systemd.Unit) string { u.ActiveState = "activating"; return systemd.JobDone }, outcome.Gate, "not within 100ms"},
		"killed": {func(u *systemd.Unit) string {
			u.ActiveState, u.ExitCode, u.ExitStatus = "failed", 2, 9
			return systemd.JobDone
		}, outcome.Gate, "signal 9"},
		"job failed":        {func(u *systemd.Unit) string { return "timeout" }, outcome.Gate, `ended as "timeout"`},
		"changed on disk":   {func(u *systemd.Unit) string { u.NeedReload = true; return systemd.JobDone }, outcome.Gate, "changed after the manager read it"},
		"a drop-in":         {func(u *systemd.Unit) string { u.Exec = "/usr/local/bin/other"; return systemd.JobDone }, outcome.Gate, "a drop-in replaces it"},
		"inactive, exits 0": {func(u *systemd.Unit) string { u.ActiveState, u.ExitCode = "inactive", 1; return systemd.JobDone }, outcome.Gate, "exit status 0"},
	} {
		b := newBox(t)
		b.stage("1", nil, nil)
		b.must(b.apply())
		two := b.stage("2", nil, nil)
		first := true
		b.manager.OnStart = func(_ string, u *systemd.Unit) string {
			if first {
				first = false
				return c.start(u)
			}
			return systemd.JobDone
		}
		_ = b.apply()
		if r := b.ended(two, outcome.RolledBack, c.word); !strings.Contains(r.Reason, c.says) {
			t.Errorf("%s: %q does not say %q", name, r.Reason, c.says)
		}
		b.runs("1")
	}
}

// A name that enabling the good build made an alias may become a unit of its
// own, and an alias again.
func TestAliasBecomesAUnit(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	alias := b.root.Join("/etc/systemd/system/web.service")
	b.must(os.Symlink("/etc/systemd/system/edge.service", alias)) // as Alias= does
	two := b.stage("2", map[string]string{"units/web.service": "[Service]\nType=oneshot\nExecStart=/x\n"}, nil)
	b.must(b.apply())
	b.ended(two, outcome.Applied, "")
	b.runs("2")
	// Of anybody else's it is not taken.
	b = newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	b.must(os.Symlink("/etc/systemd/system/other.service", b.root.Join("/etc/systemd/system/web.service")))
	two = b.stage("2", map[string]string{"units/web.service": "[Service]\nType=oneshot\nExecStart=/x\n"}, nil)
	_ = b.apply()
	b.ended(two, outcome.Refused, outcome.ForeignFile)
}

// A unit that dies in the soak and is started again by the manager looks
// active at both samples.
func TestSoakComparesLives(t *testing.T) {
	for name, change := range map[string]func(*systemd.Unit){
		"another invocation": func(u *systemd.Unit) { u.InvocationID = "other" },
		"restarts":           func(u *systemd.Unit) { u.NRestarts++ },
		"entered again":      func(u *systemd.Unit) { u.ActiveEnter++ },
	} {
		b := newBox(t)
		b.stage("1", nil, nil)
		b.must(b.apply())
		two := b.stage("2", nil, func(m *contract.Manifest) { m.Gate.Soak = contract.Duration(300 * time.Millisecond) })
		a := b.applier()
		looks := 0
		a.Manager = tampering{b.manager, func(u *systemd.Unit) {
			if looks++; looks > 3 && u.Name == "edge.service" && u.InvocationID == "life-2" {
				change(u)
			}
		}}
		_ = a.Run(context.Background(), context.Background())
		b.ended(two, outcome.RolledBack, outcome.Soak)
		if t.Failed() {
			t.Fatal(name)
		}
	}
}

type tampering struct {
	*systemd.Recorder
	change func(*systemd.Unit)
}

func (t tampering) Unit(ctx context.Context, name string) (systemd.Unit, error) {
	u, err := t.Recorder.Unit(ctx, name)
	t.change(&u)
	return u, err
}

func TestVersionCommand(t *testing.T) {
	for name, c := range map[string]struct {
		out  systemd.Output
		want outcome.Outcome
	}{
		"prints it":           {systemd.Output{Text: "edge, version 2 (go)"}, outcome.Applied},
		"prints another":      {systemd.Output{Text: "edge 2.1"}, outcome.Refused},
		"is part of a longer": {systemd.Output{Text: "edge 12"}, outcome.Refused},
		"fails":               {systemd.Output{Text: "2", Status: 1}, outcome.Refused},
		"hangs":               {systemd.Output{Text: "2", Status: -1, Ended: "it did not end in 30s"}, outcome.Refused},
	} {
		b := newBox(t)
		two := b.stage("2", nil, nil)
		b.manager.OnRun = func(systemd.Command) systemd.Output { return c.out }
		_ = b.apply()
		word := outcome.VersionLie
		if c.want == outcome.Applied {
			word = ""
		}
		b.ended(two, c.want, word)
		if c.want == outcome.Refused && (exists(b.state.Path(layout.Current)) || len(b.manager.Active()) > 0) {
			t.Errorf("%s: something was touched", name)
		}
	}
}

func TestForeign(t *testing.T) {
	for name, prepare := range map[string]func(*testbox){
		"a file nobody knows": func(b *testbox) {
			b.must(os.WriteFile(b.root.Join("/etc/systemd/system/edge.service"), []byte("mine"), 0o644))
		},
		"a link nobody knows": func(b *testbox) { b.must(os.Symlink("/dev/null", b.root.Join("/etc/systemd/system/edge.service"))) },
		"a unit of the distribution": func(b *testbox) {
			b.must(os.MkdirAll(b.root.Join("/usr/lib/systemd/system"), 0o755))
			b.must(os.WriteFile(b.root.Join("/usr/lib/systemd/system/edge.service"), nil, 0o644))
		},
	} {
		b := newBox(t)
		prepare(b)
		one := b.stage("1", nil, nil)
		_ = b.apply()
		b.ended(one, outcome.Refused, outcome.ForeignFile)
		if slices.ContainsFunc(b.manager.Calls(), func(c string) bool { return c != "run edge" }) || exists(b.state.Path(layout.Current)) {
			t.Errorf("%s: something was touched: %v", name, b.manager.Calls())
		}
	}
	b := newBox(t)
	one := b.stage("1", nil, func(m *contract.Manifest) { m.Units.Enable = append(m.Units.Enable, "ssh.service") })
	_ = b.apply()
	b.ended(one, outcome.Refused, outcome.ForeignFile)
}

// Two components that ship one file: the second is refused.
func TestForeignOfAnotherComponent(t *testing.T) {
	b := newBox(t)
	b.stage("1", map[string]string{"units/shared.service": "[Service]\nExecStart=/x\n"}, nil)
	b.must(b.apply())
	other := &testbox{t: t, root: b.root, manager: b.manager, disk: b.disk, state: record.State{Root: b.root, Disk: b.disk, Name: "rim"}}
	for _, p := range []layout.Place{layout.Sets, layout.StagedMark} {
		b.must(os.MkdirAll(other.state.Path(p), 0o755))
	}
	b.must(os.WriteFile(other.state.Path(layout.ComponentConf), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
	set := other.state.Set("1")
	text := "[Service]\nExecStart=/y\n"
	b.must(os.MkdirAll(filepath.Join(set, "units"), 0o755))
	b.must(os.WriteFile(filepath.Join(set, "units/shared.service"), []byte(text), 0o644))
	m := contract.Manifest{Schema: contract.One, Component: "rim", Version: "1", Platform: contract.Here(), Files: []contract.File{{Path: "units/shared.service", Mode: 0o644, Size: int64(len(text)), SHA256: record.Sum([]byte(text))}}}
	b.must(os.WriteFile(filepath.Join(set, contract.ManifestName), m.Encode(), 0o644))
	tuple := contract.Tuple{Channel: "stable", Version: "1", PromotedAt: contract.At(time.Unix(9, 0))}
	b.must(other.state.Save(layout.StagedRecord, contract.Staged{Schema: contract.One, Build: contract.Build{Tuple: tuple, ManifestSHA256: record.Sum(m.Encode())}}))
	_ = other.apply()
	r := other.ended(tuple, outcome.Refused, outcome.ForeignFile)
	if !strings.Contains(r.Reason, "component edge") {
		t.Error(r.Reason)
	}
}

func TestDriftIsKeptBesideAndReplaced(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	unit := b.root.Join("/etc/systemd/system/edge.service")
	b.must(os.WriteFile(unit, []byte("changed by hand"), 0o644))
	b.stage("2", nil, nil)
	b.must(b.apply())
	b.runs("2")
	if data, err := os.ReadFile(b.root.Join("/etc/systemd/system/.edge.service.sluice-drift")); err != nil || string(data) != "changed by hand" {
		t.Errorf("%q, %v", data, err)
	}
}

func TestNotApplied(t *testing.T) {
	for name, prepare := range map[string]func(*testbox){
		"held": func(b *testbox) { b.must(os.WriteFile(b.state.Path(layout.Hold), nil, 0o644)) },
		"another channel": func(b *testbox) {
			b.must(os.WriteFile(b.state.Path(layout.ComponentConf), []byte("SLUICE_CHANNEL=canary\n"), 0o644))
		},
		"a newer promote": func(b *testbox) {
			b.must(b.state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{"stable": {PromotedAt: contract.At(time.Unix(99, 0)), KeyIDs: []string{}}}}))
		},
	} {
		b := newBox(t)
		b.stage("1", nil, nil)
		prepare(b)
		if err := b.apply(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if exists(b.state.Path(layout.Result)) || exists(b.state.Path(layout.Current)) || len(b.manager.Calls()) > 0 {
			t.Errorf("%s: something was done", name)
		}
	}
}

func TestDamagedSetsAreNotLeftNorTaken(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.must(os.WriteFile(filepath.Join(b.state.Set("1"), "bin/edge"), []byte("rotten"), 0o755))
	if err := b.apply(); outcome.Exit(err) != outcome.ExitDeferred {
		t.Error(err)
	}
	b.ended(two, outcome.Deferred, outcome.BadGoodSet)
	b = newBox(t)
	one := b.stage("1", nil, nil)
	b.must(os.WriteFile(filepath.Join(b.state.Set("1"), "bin/more"), nil, 0o644))
	_ = b.apply()
	b.ended(one, outcome.Deferred, outcome.DigestMismatch)
}

func TestOnlyChangedUnitsAreRestarted(t *testing.T) {
	b := newBox(t)
	side := "[Service]\nExecStart=/y\n[Install]\nWantedBy=multi-user.target\n"
	units := func(m *contract.Manifest) {
		m.Units.Enable = append(m.Units.Enable, "side.service")
		m.Units.Restart = []contract.Restart{{Unit: "edge.service", Inputs: []string{"bin/edge"}}, {Unit: "side.service", Inputs: []string{"etc/side"}}}
	}
	files := map[string]string{"units/side.service": side, "etc/side": "a"}
	b.stage("1", files, units)
	b.must(b.apply())
	b.stage("2", files, units)
	b.must(b.apply())
	if calls := strings.Join(b.manager.Calls(), "\n"); !strings.Contains(calls, "restart edge.service") || strings.Contains(calls, "restart side.service") {
		t.Errorf("only bin/edge changed:\n%s", calls)
	}
}

func TestBusy(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	lock, err := durable.Acquire(context.Background(), b.state.Path(layout.Lock))
	b.must(err)
	defer lock.Release()
	now, cancel := context.WithCancel(context.Background())
	cancel()
	err = b.applier().Run(context.Background(), now)
	if !errors.Is(err, durable.ErrBusy) || outcome.Exit(err) != outcome.ExitDeferred {
		t.Error(err)
	}
	if !exists(b.state.Path(layout.Staged)) {
		t.Error("the marker was not raised again")
	}
}

// Every phase has its row, and recovery of what is unknown goes back.
func TestPhases(t *testing.T) {
	want := map[contract.Phase]Way{Opening: Back, Converging: Back, Gating: Back, Gated: Forward, Reverting: Back, Reverted: Record, "unheard of": Back}
	for p, way := range want {
		if got := Recovery(p); got != way {
			t.Errorf("recovery of %s is %s", p, got)
		}
	}
	if len(Phases) != len(want)-1 {
		t.Errorf("%d rows", len(Phases))
	}
}

func TestHasWord(t *testing.T) {
	for _, c := range []struct {
		text string
		want bool
	}{{"1.2", true}, {"edge 1.2\n", true}, {"version=1.2,", true}, {"v1.2", false}, {"1.2.3", false}, {"11.2", false}, {"1.2-rc1", false}, {"this is 1.2.", true}, {"1.2.3 but also 1.2", true}, {"", false}} {
		if got := hasWord(c.text, "1.2"); got != c.want {
			t.Errorf("%q: %v", c.text, got)
		}
	}
}

// The two builds list other inputs: both lists count, so that both sides of
// the move agree on what is restarted, and nothing is stopped and left.
func TestChangedInputLists(t *testing.T) {
	some := func(m *contract.Manifest) { m.Units.Restart[0].Inputs = []string{"bin/edge"} }
	for name, change := range map[string][2]func(*contract.Manifest){"narrowed": {nil, some}, "widened": {some, nil}} {
		b := newBox(t)
		files := map[string]string{"bin/edge": "#!same", "etc/x": "1"}
		b.stage("1", files, change[0])
		b.must(b.apply())
		files["etc/x"] = "2"
		b.stage("2", files, change[1])
		b.must(b.apply())
		if got := b.manager.Active(); !slices.Equal(got, []string{"edge.service"}) {
			t.Errorf("%s: active %v", name, got)
		}
	}
}

// A service that is not enabled any more, and still to be restarted, runs.
func TestNoLongerEnabledStillRuns(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	b.stage("2", nil, func(m *contract.Manifest) { m.Units.Enable, m.Units.Inert = nil, []string{"edge.service"} })
	b.must(b.apply())
	if got := b.manager.Active(); !slices.Equal(got, []string{"edge.service"}) || len(b.manager.Enabled()) > 0 {
		t.Errorf("active %v, enabled %v", got, b.manager.Enabled())
	}
}

// What a service logs is anything; a reason is text.
func TestReasonsAreText(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	two := b.stage("2", nil, nil)
	b.manager.OnRun = func(c systemd.Command) systemd.Output {
		return systemd.Output{Text: strings.Repeat("\xff\xe9ü", 2000)}
	}
	_ = b.apply()
	if r := b.ended(two, outcome.Refused, outcome.VersionLie); len(r.Reason) > contract.MaxReason {
		t.Errorf("%d bytes", len(r.Reason))
	}
}

// A socket that is new is started before its service; one whose own file
// changed is restarted, whoever its service is; another is left alone.
func TestSockets(t *testing.T) {
	b := newBox(t)
	socket := "[Socket]\nListenStream=1\n[Install]\nWantedBy=sockets.target\n"
	files := map[string]string{"units/edge.socket": socket, "units/side.socket": socket, "units/side.service": "[Service]\nExecStart=/y\n"}
	enable := func(m *contract.Manifest) { m.Units.Enable = append(m.Units.Enable, "edge.socket", "side.socket") }
	b.stage("1", files, enable)
	b.must(b.apply())
	calls := strings.Join(b.manager.Calls(), "\n")
	if s, r := strings.Index(calls, "restart edge.socket"), strings.Index(calls, "restart edge.service"); s < 0 || s > r {
		t.Errorf("first install:\n%s", calls)
	}
	b.stage("2", files, enable)
	b.must(b.apply())
	if calls := strings.Join(b.manager.Calls(), "\n"); strings.Contains(calls, ".socket") {
		t.Errorf("the sockets are the same:\n%s", calls)
	}
	files["units/side.socket"] = strings.Replace(socket, "=1", "=2", 1)
	b.stage("3", files, enable)
	b.must(b.apply())
	if calls := strings.Join(b.manager.Calls(), "\n"); !strings.Contains(calls, "restart side.socket") || strings.Contains(calls, "restart edge.socket") {
		t.Errorf("only side.socket changed:\n%s", calls)
	}
}

// A configuration that is wrong does not leave the marker: its path unit would
// start apply again and again.
func TestBadConfigurationTakesTheMarker(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(os.WriteFile(b.state.Path(layout.BoxConf), []byte("SLUICE_SORE=x\n"), 0o644))
	if err := b.apply(); outcome.Exit(err) != outcome.ExitConfig {
		t.Error(err)
	}
	if exists(b.state.Path(layout.Staged)) {
		t.Error("the marker is still raised")
	}
}
