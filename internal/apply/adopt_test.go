package apply

import (
	"context"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// byHand sets a box up by hand: a service with a program, and a timer, both
// enabled and running, and says that the first roll may take them over.
func (b *testbox) byHand() {
	b.t.Helper()
	ctx := context.Background()
	b.hand = contract.Manifest{Units: contract.Units{Enable: []string{"edge.service", "old.timer"}}}
	files := map[string]string{
		"units/edge.service": "[Service]\nExecStart=/usr/local/bin/edge\n[Install]\nWantedBy=default.target\n",
		"units/old.timer":    "[Timer]\nOnCalendar=daily\n[Install]\nWantedBy=timers.target\n", "units/old.service": "[Service]\nType=oneshot\nExecStart=/x\n",
		contract.AdoptedFolder + "usr/local/bin/edge": "#!edge of old",
	}
	adopt := []string{}
	for _, path := range slices.Sorted(maps.Keys(files)) {
		at, mode := "/etc/systemd/system/"+filepath.Base(path), contract.Mode(0o644)
		if in, ok := strings.CutPrefix(path, contract.AdoptedFolder); ok {
			at, mode = "/"+in, 0o755
		}
		adopt = append(adopt, at)
		b.must(os.MkdirAll(filepath.Dir(b.root.Join(at)), 0o755))
		b.must(os.WriteFile(b.root.Join(at), []byte(files[path]), fs.FileMode(mode)))
		b.hand.Files = append(b.hand.Files, contract.File{Path: path, Mode: mode, Size: int64(len(files[path])), SHA256: record.Sum([]byte(files[path]))})
	}
	_, err := b.manager.Enable(ctx, b.hand.Units.Enable)
	b.must(err)
	for _, u := range b.hand.Units.Enable {
		_, err := b.manager.Start(ctx, u)
		b.must(err)
	}
	b.adopts(adopt...)
}

func (b *testbox) adopts(paths ...string) {
	conf := "SLUICE_CHANNEL=stable\n"
	if len(paths) > 0 {
		conf += "SLUICE_ADOPT=" + strings.Join(paths, " ") + "\n"
	}
	b.must(os.WriteFile(b.state.Path(layout.ComponentConf), []byte(conf), 0o644))
}

// A failed first roll puts exactly back what was there by hand; a good one
// takes it over, and keeps what it was for as long as that is the good before it.
func TestAdopt(t *testing.T) {
	b := newBox(t)
	b.byHand()
	one := b.stageFull("1")
	b.manager.OnStart = b.failsOn("1")
	if err := b.apply(); outcome.Exit(err) != outcome.ExitFailed {
		t.Error(err)
	}
	b.ended(one, outcome.RolledBack, outcome.Gate)
	if version, err := b.oneBuild(); err != nil || version != "" {
		t.Errorf("after a failed first roll: %q, %v", version, err)
	}
	// It is judged by no probe and no window of what is new.
	if m, _, err := record.Manifest(b.state.Set(contract.BeforeSluice)); err != nil || m.Gate.PassWithin != contract.DefaultPassWithin || len(m.Gate.Probes) > 0 {
		t.Errorf("the gate of what was there: %+v, %v", m.Gate, err)
	}
	// Between two tries the box is its owner's.
	changed := "[Service]\nExecStart=/usr/local/bin/edge -v\n[Install]\nWantedBy=default.target\n"
	i := slices.IndexFunc(b.hand.Files, func(f contract.File) bool { return f.Path == "units/edge.service" })
	b.hand.Files[i].Size, b.hand.Files[i].SHA256 = int64(len(changed)), record.Sum([]byte(changed))
	b.must(os.WriteFile(b.root.Join("/etc/systemd/system/edge.service"), []byte(changed), 0o644))
	two := b.stageFull("2")
	b.manager.OnStart = b.failsOn("2")
	_ = b.apply()
	b.ended(two, outcome.RolledBack, outcome.Gate)
	if version, err := b.oneBuild(); err != nil || version != "" {
		t.Errorf("after the second: %q, %v", version, err)
	}
	b.manager.OnStart = nil
	three := b.stageFull("3")
	b.must(b.apply())
	b.ended(three, outcome.Applied, "")
	if version, err := b.oneBuild(); err != nil || version != "3" {
		t.Errorf("taken over: %q, %v", version, err)
	}
	if !exists(b.state.Set(contract.BeforeSluice)) {
		t.Error("what was there before is not kept")
	}
	// From now on it is a build that is gone back to.
	four := b.stageFull("4")
	b.manager.OnStart = b.failsOn("4")
	_ = b.apply()
	b.ended(four, outcome.RolledBack, outcome.Gate)
	if version, err := b.oneBuild(); err != nil || version != "3" {
		t.Errorf("after a failed roll: %q, %v", version, err)
	}
}

// An unreadable journal of a first roll still goes back to what was there.
func TestAdoptWithoutAJournal(t *testing.T) {
	b := newBox(t)
	b.byHand()
	one := b.stageFull("1")
	b.cutAt(Gating)
	b.must(os.WriteFile(b.state.Path(layout.Journal), []byte("{"), 0o644))
	b.must(b.applier().Recover(context.Background(), false))
	b.ended(one, outcome.RolledBack, outcome.Interrupted)
	if version, err := b.oneBuild(); err != nil || version != "" {
		t.Errorf("%q, %v", version, err)
	}
}

// What could not be put back exactly is refused, and nothing is touched.
func TestAdoptRefuses(t *testing.T) {
	unit := "/etc/systemd/system/edge.service"
	for name, c := range map[string]struct {
		spoil func(b *testbox)
		says  string
	}{
		"not listed":   {func(b *testbox) { b.adopts() }, "SLUICE_ADOPT"},
		"not there":    {func(b *testbox) { b.adopts(unit, "/usr/local/bin/none") }, "is not there"},
		"a link":       {func(b *testbox) { b.must(os.Remove(b.root.Join(unit))); b.must(os.Symlink("/x", b.root.Join(unit))) }, "no regular file"},
		"a folder":     {func(b *testbox) { b.adopts(unit, "/usr/local") }, "no regular file"},
		"anybody's":    {func(b *testbox) { b.must(os.Chmod(b.root.Join(unit), 0o666)) }, "only its owner"},
		"somebody's":   {func(b *testbox) { b.must(os.Chown(b.root.Join(unit), 1, 1)) }, "chown root:root"},
		"no [Install]": {func(b *testbox) { b.must(os.WriteFile(b.root.Join(unit), []byte("[Service]\nExecStart=/x\n"), 0o644)) }, "[Install]"},
		"unreadable":   {func(b *testbox) { b.must(os.Chmod(b.root.Join(unit), 0o200)) }, "able to read"},
		"a template":   {func(b *testbox) { b.adopts(unit, "/etc/systemd/system/edge@.service") }, "templates and drop-ins"},
		"a drop-in":    {func(b *testbox) { b.adopts(unit, "/etc/systemd/system/edge.service.d/x.conf") }, "templates and drop-ins"},
		"another's": {func(b *testbox) {
			other := &testbox{t: b.t, root: b.root, state: record.State{Root: b.root, Disk: b.disk, Name: "other"}, manager: b.manager, disk: b.disk}
			for _, p := range []layout.Place{layout.Sets, layout.StagedMark} {
				b.must(os.MkdirAll(other.state.Path(p), 0o755))
			}
			build := other.stage("1", map[string]string{"units/old.timer": "[Timer]\nOnCalendar=daily\n[Install]\nWantedBy=timers.target\n"}, func(m *contract.Manifest) {
				m.Files = slices.DeleteFunc(m.Files, func(f contract.File) bool { return f.Path == "units/edge.service" })
				m.Units.Enable, m.Units.Restart = nil, nil
			})
			_, digest, err := record.Manifest(other.state.Set("1"))
			b.must(err)
			b.must(other.state.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: contract.Build{Tuple: build, ManifestSHA256: digest}}))
			b.adopts(unit, "/etc/systemd/system/old.timer")
		}, "belongs to component other"},
		"a link of its own": {func(b *testbox) {
			at := b.root.Join("/etc/systemd/system/rescue.target.wants/edge.service")
			b.must(os.MkdirAll(filepath.Dir(at), 0o755))
			b.must(os.Symlink("../edge.service", at))
		}, "rescue.target.wants"},
		"odd name": {func(b *testbox) {
			b.must(os.WriteFile(b.root.Join("/etc/a~b"), nil, 0o644))
			b.adopts(unit, "/etc/a~b")
		}, "letters, digits"},
	} {
		if name == "somebody's" && os.Geteuid() != 0 {
			continue // nobody else can give a file away
		}
		b := newBox(t)
		b.byHand()
		c.spoil(b)
		one := b.stageFull("1")
		_ = b.apply()
		if r := b.ended(one, outcome.Refused, outcome.ForeignFile); !strings.Contains(r.Reason, c.says) {
			t.Errorf("%s: %q does not say %q", name, r.Reason, c.says)
		}
		if exists(b.state.Set(contract.BeforeSluice)) || exists(b.root.PartialSet("edge", string(contract.BeforeSluice))) || exists(b.state.Path(layout.Current)) {
			t.Errorf("%s: something is left", name)
		}
		if calls := b.manager.Calls(); len(calls) > 1 { // the version command
			t.Errorf("%s: %v", name, calls)
		}
	}
}

// A service that is on its way up when it is taken over is wanted: it is up
// again after a first roll that failed.
func TestAdoptWhatIsStarting(t *testing.T) {
	b := newBox(t)
	b.byHand()
	one := b.stageFull("1")
	b.manager.OnStart = b.failsOn("1")
	a := b.applier()
	a.Manager = tampering{b.manager, func(u *systemd.Unit) {
		if u.Name == "edge.service" && u.InvocationID == "life-1" {
			u.ActiveState, u.HasJob = "activating", true
		}
	}}
	_ = a.Run(context.Background(), context.Background())
	b.ended(one, outcome.RolledBack, outcome.Gate)
	if version, err := b.oneBuild(); err != nil || version != "" {
		t.Errorf("%q, %v", version, err)
	}
}

// A unit of the distribution's is one unit under both names of its folder.
func TestAdoptFromUsrLib(t *testing.T) {
	const lib, usr, etc = "/lib/systemd/system/edge.service", "/usr/lib/systemd/system/edge.service", "/etc/systemd/system/edge.service"
	for name, adopt := range map[string][]string{"as /lib": {lib}, "as /usr/lib": {usr}, "both": {usr, lib}} {
		b := newBox(t)
		b.must(os.MkdirAll(b.root.Join("/usr/lib/systemd/system"), 0o755))
		b.must(os.Symlink("usr/lib", b.root.Join("/lib")))
		text := "[Service]\nExecStart=/x\n[Install]\nWantedBy=default.target\n"
		b.must(os.WriteFile(b.root.Join(usr), []byte(text), 0o644))
		b.adopts(adopt...)
		one := b.stageFull("1")
		b.manager.OnStart = b.failsOn("1")
		_ = b.apply()
		b.ended(one, outcome.RolledBack, outcome.Gate)
		if exists(b.root.Join(etc)) || string(must(os.ReadFile(b.root.Join(usr)))) != text {
			t.Errorf("%s: it is not as it was", name)
		}
		b.manager.OnStart = nil
		two := b.stageFull("2")
		b.must(b.apply())
		b.ended(two, outcome.Applied, "")
	}
}

// Nobody releases a set of that name.
func TestBeforeSluiceIsReserved(t *testing.T) {
	for _, v := range []contract.Version{"before-sluice", "Before-Sluice"} {
		recipe := []byte(`{"component":"edge","version":"` + string(v) + `"}`)
		if _, err := contract.Spoken.DecodeRecipe(recipe, contract.Here()); err == nil {
			t.Errorf("a bundle of %s", v)
		}
	}
}
