package apply

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/unit"
	"sluice/test/tree"
)

// Every durable operation and every call of the manager has a number. A run
// dies at each, and is recovered; then, once for each distinct state that a
// first death leaves, the recovery dies at each of its own, and is recovered
// again. What is judged each time is what must hold at every instant.

// A scenario is a transaction to die in.
type scenario struct {
	name      string
	component contract.Component
	prepare   func(*testbox) // leaves something to do
	bad       bool           // the new build does not pass its gate
	old       string         // what runs if the transaction is not committed; "" is nothing, or what was there by hand
	// heal says that heal begins the transaction, and again after a death.
	heal bool
	// How many points there are, and how many within recoveries; 0: nobody dies
	// there. Fewer means that something is not counted any more: see what, before
	// you change this.
	first, second int
}

var scenarios = []scenario{
	{name: "first install", component: "edge", prepare: func(b *testbox) { b.stageFull("1") }, first: 176, second: 8461},
	{name: "first install, bad", component: "edge", prepare: func(b *testbox) { b.stageFull("1") }, bad: true, first: 259, second: 11347},
	{name: "adopting", component: "edge", prepare: func(b *testbox) { b.byHand(); b.stageFull("1") }, first: 275},
	{name: "adopting, bad", component: "edge", prepare: func(b *testbox) { b.byHand(); b.stageFull("1") }, bad: true, first: 380},
	{name: "forward", component: "edge", prepare: func(b *testbox) { b.stageFull("1"); b.must(b.apply()); b.stageFull("2") }, old: "1", first: 219, second: 10780},
	{name: "back", component: "edge", prepare: func(b *testbox) { b.stageFull("1"); b.must(b.apply()); b.stageFull("2") }, bad: true, old: "1", first: 306, second: 14936},
	{name: "self-update", component: "sluice", prepare: func(b *testbox) { b.stageSelf("1"); b.must(b.apply()); b.stageSelf("2") }, old: "1", first: 121, second: 3263},
	{name: "self-update, put back", component: "sluice", prepare: func(b *testbox) { b.onTrial(trialLimit + time.Second) }, bad: true, old: "1", heal: true, first: 104, second: 2948},
}

// act is the transaction of a scenario.
func (s scenario) act(b *testbox) error {
	if !s.heal {
		return b.apply()
	}
	a := b.applier()
	return errors.Join(a.Heal(context.Background()), a.Recover(context.Background(), false)) // which heal queues
}

// stageSelf stages a pipeline, whose own units change after the gate only.
func (b *testbox) stageSelf(version string) contract.Tuple {
	return b.stage(version, map[string]string{
		"units/sluice-apply@.service": "[Service]\nType=oneshot\nExecStart=/x\n# " + version,
		"units/sluice-fetch.service":  "[Service]\nExecStart=/x\n[Install]\nWantedBy=multi-user.target\n",
	}, func(m *contract.Manifest) {
		m.Units.Enable, m.Units.Restart = append(m.Units.Enable, "sluice-fetch.service"), append(m.Units.Restart, contract.Restart{Unit: "sluice-fetch.service"})
	})
}

// fork is a box in the same state, in another folder.
func (b *testbox) fork(dir string, points *fault.Points, bad bool) *testbox {
	b.t.Helper()
	c := &testbox{t: b.t, root: layout.Root(dir), promote: b.promote, hand: b.hand, disk: &durable.Disk{Fault: points}}
	tree.Copy(b.t, dir, string(b.root))
	c.manager = b.manager.Clone(c.root)
	c.manager.Fault = points
	c.state = record.State{Root: c.root, Disk: c.disk, Name: b.state.Name}
	if bad {
		c.manager.OnStart = c.failsOn(c.candidate())
	}
	return c
}

// reborn is the same box after a death: nothing fails any more.
func (b *testbox) reborn() *testbox {
	c := &testbox{t: b.t, root: b.root, promote: b.promote, hand: b.hand, disk: &durable.Disk{}, manager: b.manager.Clone(b.root)}
	c.state = record.State{Root: c.root, Disk: c.disk, Name: b.state.Name}
	return c
}

// candidate is the version that is staged.
func (b *testbox) candidate() string {
	s, _, _ := record.Load[contract.Staged](b.state, layout.StagedRecord)
	return string(s.Version)
}

// picture is all of a box's state, to tell two apart.
func (b *testbox) picture() [32]byte {
	h := sha256.New()
	b.must(filepath.WalkDir(string(b.root), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || e.Name() == "lock" || e.Name() == "host.lock" {
			return err
		}
		rel, _ := filepath.Rel(string(b.root), path)
		if target, err := os.Readlink(path); err == nil {
			fmt.Fprintf(h, "%s -> %s\n", rel, target)
			return nil
		}
		data, err := os.ReadFile(path)
		switch {
		case e.Name() == "journal.json" || strings.HasSuffix(e.Name(), ".tmp"):
			j, _, _ := record.Load[contract.Journal](b.state, layout.Journal)
			data = []byte(j.Phase) // recovery goes by nothing else of it
		case e.Name() == "result.json": // but for its times
			r, _, err := record.Load[contract.Result](b.state, layout.Result)
			data = fmt.Appendf(nil, "%s %s %d %v", r.Version, r.Outcome, r.Attempt, err)
		case e.Name() == "applied.json":
			a, _, err := record.Load[contract.Applied](b.state, layout.Applied)
			data = fmt.Appendf(nil, "%s %v", a.Version, err)
		}
		fmt.Fprintf(h, "%s %x\n", rel, sha256.Sum256(data))
		return err
	}))
	fmt.Fprintln(h, b.manager.Active(), b.manager.Enabled())
	return [32]byte(h.Sum(nil))
}

// instant judges what must hold at every instant, recovered or not: once a set
// was good, good and current resolve, and good is complete (I1, I4).
func (b *testbox) instant() error {
	good, err := os.Readlink(b.state.Path(layout.Good))
	if err != nil {
		return nil // a first install
	}
	version := filepath.Base(good)
	m, digest, err := record.Manifest(b.state.Set(contract.Version(version)))
	if err != nil {
		return fmt.Errorf("good does not resolve: %w", err)
	}
	if _, err := record.CheckSet(b.state.Set(m.Version), digest); err != nil {
		return fmt.Errorf("good is not complete: %w", err)
	}
	if _, err := os.Stat(b.state.Path(layout.Current)); err != nil {
		return fmt.Errorf("current does not resolve: %w", err)
	}
	return nil
}

// oneBuild judges that files, links, records, enablement and what runs are
// those of exactly one build (I1, I2). It returns its version, "" for none.
func (b *testbox) oneBuild() (string, error) {
	if err := b.instant(); err != nil {
		return "", err
	}
	if b.state.Open() {
		return "", errors.New("the journal is still there")
	}
	current, _ := os.Readlink(b.state.Path(layout.Current))
	good, _ := os.Readlink(b.state.Path(layout.Good))
	if current != good {
		return "", fmt.Errorf("current is %q, good is %q", current, good)
	}
	version := strings.TrimPrefix(current, "sets/")
	applied, _, err := record.Load[contract.Applied](b.state, layout.Applied)
	if err != nil || string(applied.Version) != version {
		return "", fmt.Errorf("applied.json says %q, current %q, %v", applied.Version, version, err)
	}
	m := b.hand
	if version != "" {
		if m, _, err = record.Manifest(b.state.Set(contract.Version(version))); err != nil {
			return "", err
		}
	}
	want := map[string]contract.File{}
	for _, f := range b.hand.Files { // also when a build has taken over: a program stays
		if at, ok := strings.CutPrefix(f.Path, contract.AdoptedFolder); ok && !node.Holds(b.root.Join("/"+at), f) {
			return "", fmt.Errorf("/%s is not what it was", at)
		}
	}
	for _, f := range m.Files {
		for folder, place := range map[string]layout.Place{"units/": layout.SystemdUnits, "sysusers.d/": layout.Sysusers, "tmpfiles.d/": layout.Tmpfiles} {
			if name, ok := strings.CutPrefix(f.Path, folder); ok {
				want[filepath.Join(string(place), name)] = f
			}
		}
	}
	for _, place := range []layout.Place{layout.SystemdUnits, layout.Sysusers, layout.Tmpfiles} {
		entries, err := os.ReadDir(b.root.Path(place, ""))
		if err != nil {
			return "", err
		}
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), ".") || e.IsDir() {
				continue // being written, or kept for going back, when it died: heal's affair
			}
			at := filepath.Join(string(place), e.Name())
			data, err := os.ReadFile(b.root.Join(at))
			if f, wanted := want[at]; err != nil || !wanted || record.Sum(data) != f.SHA256 {
				return "", fmt.Errorf("%s is not of %q (wanted: %v)", at, version, wanted)
			}
			delete(want, at)
		}
	}
	if len(want) > 0 {
		return "", fmt.Errorf("missing of %q: %v", version, want)
	}
	var links []string
	for _, u := range m.Units.Enable {
		_, by, _ := strings.Cut(unit.Install(must(os.ReadFile(b.root.Join(filepath.Join(string(layout.SystemdUnits), u))))), "WantedBy=")
		links = append(links, by+".wants/"+u)
	}
	slices.Sort(links)
	if got := b.manager.Links(); !slices.Equal(got, links) {
		return "", fmt.Errorf("links %v, %q wants %v", got, version, links)
	}
	enabled := slices.Sorted(slices.Values(m.Units.Enable))
	if got := b.manager.Enabled(); !slices.Equal(got, enabled) {
		return "", fmt.Errorf("enabled %v, %q wants %v", got, version, enabled)
	}
	got := slices.DeleteFunc(b.manager.Active(), func(u string) bool { // one is stopped by heal, the other was only queued
		return u == trialTimer || strings.HasPrefix(u, "sluice-recover@")
	})
	if !slices.Equal(got, enabled) {
		return "", fmt.Errorf("active %v, %q wants %v", got, version, enabled)
	}
	return version, nil
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// after judges a recovered box: one build, and the result that says which. The
// old one unless the journal had been committed.
func (b *testbox) after(old, target string, committed bool) error {
	version, err := b.oneBuild()
	if err != nil {
		return err
	}
	want := old
	if committed {
		want = target
	}
	if version != want {
		return fmt.Errorf("it ends on %q, committed: %v", version, committed)
	}
	r, ok, err := record.Load[contract.Result](b.state, layout.Result)
	if err != nil {
		return err
	}
	if ok && string(r.Version) == target && (r.Outcome == outcome.Applied) != committed {
		return fmt.Errorf("it ends on %q, and the result says %s", version, r.Outcome)
	}
	return nil
}

// committed reports whether the journal on the disk, or its absence after a
// result, says that the new build stays.
func (b *testbox) committed(target string) bool {
	if j, ok, _ := record.Load[contract.Journal](b.state, layout.Journal); ok {
		return j.Phase == Gated
	}
	a, _, _ := record.Load[contract.Applied](b.state, layout.Applied)
	return string(a.Version) == target
}

// revive goes on after a death: the manager lives on after a kill, and boots
// anew after a power cut.
func (b *testbox) revive(s scenario, boot bool) error {
	if boot {
		b.manager.PowerCycle()
	}
	a := &Applier{State: b.state, Manager: b.manager, Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Now: time.Now}
	err := a.Recover(context.Background(), boot)
	if s.heal && err == nil { // later, it runs by itself
		err = s.act(b)
	}
	return err
}

func TestCrash(t *testing.T) {
	debug.SetGCPercent(400) // it makes much garbage, and time is what it needs
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			c := &crashes{t: t, s: s, dir: tree.InMemory(t), seen: map[string]bool{}}
			base := newBoxOf(t, s.component)
			s.prepare(base)
			c.run(base)
			total := c.first + c.second
			t.Logf("SHOW %s: %d of %d end on exactly one build", s.name, total-c.failed, total)
			t.Logf("%d deaths, and %d within the recoveries of what they left", c.first, c.second)
			if c.first < s.first || c.second < s.second && !testing.Short() {
				t.Errorf("%d points and %d within recoveries, there were %d and %d: what is not counted any more?", c.first, c.second, s.first, s.second)
			}
		})
	}
}

type crashes struct {
	t                     *testing.T
	s                     scenario
	dir                   string
	seen                  map[string]bool
	n                     int
	first, second, failed int
}

// fork forks a box into a folder that goes again.
func (c *crashes) fork(b *testbox, points *fault.Points, bad bool) (*testbox, func()) {
	c.n++
	dir := filepath.Join(c.dir, fmt.Sprint(c.n))
	return b.fork(dir, points, bad), func() { os.RemoveAll(dir) }
}

func (c *crashes) judge(err error, format string, args ...any) {
	if err != nil {
		if c.failed++; c.failed <= 5 {
			c.t.Errorf("%s: %v", fmt.Sprintf(format, args...), err)
		}
	}
}

func (c *crashes) run(base *testbox) {
	old, target := c.s.old, base.candidate()
	for n := 1; ; n++ {
		where := ""
		points := &fault.Points{At: n, Seen: func(i int, op, object string) {
			if i == n {
				where = op + " " + filepath.Base(object)
			}
		}}
		dead, gone := c.fork(base, points, c.s.bad)
		_ = c.s.act(dead)
		if points.Count() < n {
			c.judge(dead.after(old, target, !c.s.bad), "without a death")
			gone()
			return
		}
		c.first++
		committed := !c.s.heal && dead.committed(target)
		c.judge(dead.instant(), "died at %d, %s", n, where)
		picture := fmt.Sprintf("%x", dead.picture())
		for _, boot := range []bool{false, true} {
			revived, gone := c.fork(dead, nil, false)
			err := revived.revive(c.s, boot)
			if err == nil {
				err = revived.after(old, target, committed)
			}
			c.judge(err, "died at %d, %s; boot %v", n, where, boot)
			gone()
			if key := fmt.Sprint(picture, boot); !c.seen[key] {
				c.seen[key] = true
				if !testing.Short() && c.s.second > 0 {
					c.again(dead, old, target, committed, boot, fmt.Sprintf("died at %d, %s", n, where))
				}
			}
		}
		gone()
	}
}

// again dies within the recovery of a state, at each of its points.
func (c *crashes) again(dead *testbox, old, target string, committed, boot bool, first string) {
	for m := 1; ; m++ {
		where := ""
		points := &fault.Points{At: m, Seen: func(i int, op, object string) {
			if i == m {
				where = op + " " + filepath.Base(object)
			}
		}}
		second, gone := c.fork(dead, points, false)
		_ = second.revive(c.s, boot)
		if points.Count() < m {
			gone()
			return
		}
		c.second++
		c.judge(second.instant(), "%s; again at %d, %s; boot %v", first, m, where, boot)
		revived := second.reborn()
		err := revived.revive(c.s, boot)
		if err == nil {
			err = revived.after(old, target, committed)
		}
		c.judge(err, "%s; again at %d, %s; boot %v", first, m, where, boot)
		gone()
	}
}
