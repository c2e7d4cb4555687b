package stage

import (
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
	"sluice/test/tree"
)

// A bench is a box below a folder, with a verified tree that is asked for.
type bench struct {
	t      *testing.T
	root   layout.Root
	state  record.State
	key    ed25519.PrivateKey
	answer []byte // of the store
	steps  map[int][]byte
	clock  int64
	now    time.Time // of the box; zero: the real time
	built  time.Time
	life   [2]contract.Time // refreshed_at and expires_at of what is promoted
}

func newBench(t *testing.T, component contract.Component) *bench {
	t.Helper()
	b := &bench{t: t, root: layout.Root(t.TempDir())}
	b.state = record.State{Root: b.root, Disk: &durable.Disk{}, Name: component}
	for _, row := range layout.Folders() {
		b.must(os.MkdirAll(b.state.Path(row.Place), 0o755))
	}
	pub, key, err := ed25519.GenerateKey(nil)
	b.must(err)
	b.key = key
	document := trust.Sign(contract.TrustLadder, trust.NewDocument(contract.At(time.Unix(0, 0)), pub).Encode(), key)
	b.must(os.WriteFile(b.root.TrustFile(string(component), 1), document.Encode(), 0o644))
	b.must(os.WriteFile(b.state.Path(layout.ComponentConf), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
	return b
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// promote signs a pointer to a version, and lays out what verify would.
func (b *bench) promote(version string, change func(*contract.Manifest)) contract.Build {
	b.t.Helper()
	m := contract.Manifest{Schema: contract.One, Component: b.state.Name, Version: contract.Version(version), Platform: contract.Here(), VersionCommand: []string{"bin/edge"}}
	verified := b.root.Tree(string(b.state.Name), version)
	for path, text := range map[string]string{"bin/edge": "#!/bin/sh\necho " + version, "etc/deep/er/edge.conf": "of " + version} {
		mode := contract.Mode(0o644)
		if strings.HasPrefix(path, "bin/") {
			mode = 0o755
		}
		m.Files = append(m.Files, contract.File{Path: path, Mode: mode, Size: int64(len(text)), SHA256: record.Sum([]byte(text))})
		b.must(os.MkdirAll(filepath.Dir(filepath.Join(verified, path)), 0o755))
		b.must(os.WriteFile(filepath.Join(verified, path), []byte(text), 0o644))
	}
	slices.SortFunc(m.Files, func(a, b contract.File) int { return strings.Compare(a.Path, b.Path) })
	if change != nil {
		change(&m)
	}
	manifest := m.Encode()
	b.must(os.WriteFile(filepath.Join(verified, contract.ManifestName), manifest, 0o644))
	b.clock++
	at := contract.At(time.Unix(b.clock, 0))
	a := contract.Artifact{Key: contract.BootstrapKey(m.Component, m.Version, "x"), Size: 1, SHA256: record.Sum(nil), TarSize: m.Size(), ManifestSHA256: record.Sum(manifest)}
	p := contract.Pointer{Envelope: contract.One, Component: m.Component, Channel: "stable", PromotedAt: at, Payload: contract.PointerPayload{Schema: contract.One,
		Current: contract.Release{Version: m.Version, Artifacts: map[contract.Platform]contract.Artifact{contract.Here(): a}, ReleasedAt: at}, History: []contract.Release{}, Audit: []contract.Audit{}, RefreshedAt: b.life[0], ExpiresAt: b.life[1]}}
	b.answer = trust.Sign(contract.PointerLadder, p.Encode(), b.key).Encode()
	b.hint(contract.Hint{Schema: contract.One, Version: m.Version, PromotedAt: at, SeenAt: at})
	return contract.Build{Tuple: p.Tuple(), ManifestSHA256: a.ManifestSHA256}
}

func (b *bench) hint(h contract.Hint) {
	b.t.Helper()
	b.must(os.WriteFile(b.state.Path(layout.Hint), h.Encode(), 0o644))
	b.must(marker.Raise(b.state.Path(layout.Requested)))
}

func (b *bench) stage(points *fault.Points) error {
	state := b.state
	state.Disk = &durable.Disk{Fault: points}
	s := &Stager{State: state, Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Now: time.Now, Built: b.built, Ask: func(_ context.Context, folder string) error {
		err := errors.Join(os.Mkdir(folder, 0o700), os.WriteFile(filepath.Join(folder, "pointer.json"), b.answer, 0o644))
		for n, data := range b.steps {
			err = errors.Join(err, os.WriteFile(filepath.Join(folder, layout.StepName(n)), data, 0o644))
		}
		return err
	}}
	if !b.now.IsZero() {
		s.Now = func() time.Time { return b.now }
	}
	return s.Run(context.Background())
}

func (b *bench) fork(dir string) *bench {
	b.t.Helper()
	tree.Copy(b.t, dir, string(b.root))
	c := &bench{t: b.t, root: layout.Root(dir), key: b.key, answer: b.answer, clock: b.clock}
	c.state = record.State{Root: c.root, Disk: b.state.Disk, Name: b.state.Name}
	return c
}

// sound judges what must hold at every instant: a set that has its name is
// whole, staged.json names a whole set, and what is good is untouched.
func (b *bench) sound() error {
	entries, err := os.ReadDir(b.state.Path(layout.Sets))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		_, digest, err := record.Manifest(b.state.Set(contract.Version(e.Name())))
		if err == nil {
			_, err = record.CheckSet(b.state.Set(contract.Version(e.Name())), digest)
		}
		if err != nil {
			return fmt.Errorf("set %s: %w", e.Name(), err)
		}
	}
	if s, ok, err := record.Load[contract.Staged](b.state, layout.StagedRecord); err != nil || ok {
		if err == nil {
			_, err = record.CheckSet(b.state.Set(s.Version), s.ManifestSHA256)
		}
		if err != nil {
			return fmt.Errorf("staged.json: %w", err)
		}
	}
	good, err := os.Readlink(b.state.Path(layout.Good))
	if err != nil {
		return nil
	}
	_, err = os.Stat(filepath.Join(b.state.Path(layout.OptOf), good, "bin/edge"))
	return err
}

func (b *bench) staged() contract.Version {
	s, _, _ := record.Load[contract.Staged](b.state, layout.StagedRecord)
	return s.Version
}

// ready is a bench whose good build is 1, that has staged 2, which was
// overtaken, and that is asked for 3.
func ready(t *testing.T) (*bench, contract.Build) {
	b := newBench(t, "edge")
	one := b.promote("1", nil)
	b.must(b.stage(nil))
	b.must(b.state.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: one, At: one.PromotedAt}))
	for _, link := range []layout.Place{layout.Current, layout.Good} {
		b.must(os.Symlink("sets/1", b.state.Path(link)))
	}
	b.promote("2", nil)
	b.must(b.stage(nil))
	return b, b.promote("3", nil)
}

// stage dies at each of its durable operations, or is told that the disk is
// full, broken or read-only: nothing is ever half there, what is told says
// whose fault it was, and the next try stages.
func TestDiskErrors(t *testing.T) {
	base, three := ready(t)
	memory := tree.InMemory(t)
	for _, e := range []struct {
		err     error
		lasting bool
		word    outcome.Word
	}{{nil, true, ""}, {unix.ENOSPC, false, outcome.NoSpace}, {unix.ENOSPC, true, outcome.NoSpace}, {unix.EIO, false, outcome.IO}, {unix.EIO, true, outcome.IO}, {unix.EROFS, true, outcome.IO}} {
		n, failed := 1, 0
		for ; ; n++ {
			dir := filepath.Join(memory, fmt.Sprint(n))
			b := base.fork(filepath.Join(dir, "box"))
			points := &fault.Points{At: n}
			where := ""
			points.Seen = func(i int, op, object string) {
				if i == n {
					where = op + " " + filepath.Base(object)
				}
			}
			if e.err != nil {
				at := 0
				points.Refuse = func(op, object string) error {
					if at++; at == n || e.lasting && at > n {
						return &os.PathError{Op: op, Path: object, Err: e.err}
					}
					return nil
				}
			}
			err := b.stage(points)
			done := points.Count() < n
			said := b.sound()
			if !done && said == nil {
				r := record.Optional[contract.Result](b.state, layout.Result)
				if e.err != nil && err != nil && outcome.Exit(err) != outcome.ExitDeferred {
					said = fmt.Errorf("it exits with %d: %w", outcome.Exit(err), err)
				} else if e.err != nil && err != nil && !strings.HasPrefix(err.Error(), string(e.word)+": ") {
					said = fmt.Errorf("it says %w", err)
				} else if r != nil && r.Tuple.Equal(three.Tuple) && r.Terminal("") {
					said = fmt.Errorf("it is terminal: %+v", r)
				}
				b.must(marker.Raise(b.state.Path(layout.Requested)))
				if err := b.stage(nil); err != nil && said == nil {
					said = fmt.Errorf("the next try: %w", err)
				}
				if said == nil {
					said = b.sound()
				}
			}
			if said == nil && b.staged() != "3" {
				said = fmt.Errorf("staged is %s", b.staged())
			}
			if _, err := os.Lstat(b.state.Set("2")); err == nil && done {
				said = errors.New("the set that was overtaken is still there")
			}
			if said != nil {
				if failed++; failed < 6 {
					t.Errorf("%v (lasting %v) at %d, %s: %v", e.err, e.lasting, n, where, said)
				}
			}
			os.RemoveAll(dir)
			if done {
				break
			}
		}
		t.Logf("SHOW stage, %v (lasting %v): %d of %d points, nothing half there and the next try stages", e.err, e.lasting, n-1-failed, n-1)
		if n < 30 {
			t.Errorf("only %d points: what is not counted any more?", n-1)
		}
	}
}

// A pipeline that can't read a record of this box is not staged, nor is it
// rolled back to.
func TestReads(t *testing.T) {
	for reads, want := range map[string]bool{"": true, "1.0": true, "1.4": true, "0.9": false, "2.0": false} {
		b := newBench(t, layout.Pipeline)
		b.promote("1", func(m *contract.Manifest) {
			if reads != "" {
				var s contract.Step
				b.must(s.UnmarshalText([]byte(reads)))
				m.Reads = map[contract.Ladder]contract.Step{contract.RecordsLadder: s}
			}
		})
		b.must(b.state.Save(layout.Versions, contract.Versions{Schema: contract.One, Versions: contract.VersionLog{}}))
		err := b.stage(nil)
		if staged := b.staged() == "1"; staged != want {
			t.Errorf("reads %q: staged %v, %v", reads, staged, err)
		}
		if r := record.Optional[contract.Result](b.state, layout.Result); !want && (r == nil || r.Outcome != outcome.Deferred || r.Word() != outcome.UpgradeNeeded) {
			t.Errorf("reads %q: %+v", reads, r)
		}
	}
}

// A self-update is on trial until its own fetch, verify and stage have brought
// a request to its end, whichever that is: then apply is told. That it was applied
// stays what is told of it. What is handed over wrong proves nothing.
func TestTrial(t *testing.T) {
	for name, c := range map[string]struct {
		request func(b *bench, two contract.Build)
		told    bool
	}{
		"a no-op": {func(b *bench, two contract.Build) {
			b.hint(contract.Hint{Schema: contract.One, Version: "2", PromotedAt: two.PromotedAt, Noop: true, SeenAt: two.PromotedAt})
		}, true},
		"the next promote": {func(b *bench, _ contract.Build) { b.promote("3", nil) }, true},
		"one that needs something": {func(b *bench, _ contract.Build) {
			b.promote("3", func(m *contract.Manifest) { m.Needs = map[contract.Component]contract.Version{"edge": "9"} })
		}, true},
		"one with other bytes under a known version": {func(b *bench, _ contract.Build) {
			b.promote("1", func(m *contract.Manifest) { m.VersionText = "other" })
		}, true},
		"wrong bytes": {func(b *bench, _ contract.Build) {
			b.promote("3", nil)
			b.must(os.WriteFile(filepath.Join(b.root.Tree(string(layout.Pipeline), "3"), "bin/edge"), []byte("other"), 0o644))
		}, false},
	} {
		b := newBench(t, layout.Pipeline)
		b.promote("1", nil)
		b.must(b.stage(nil))
		two := b.promote("2", nil)
		b.must(b.stage(nil))
		b.must(b.state.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: two, At: two.PromotedAt}))
		b.must(b.state.Conclude(contract.Result{Tuple: two.Tuple, Outcome: outcome.Applied, At: two.PromotedAt, Config: record.Sum([]byte("SLUICE_CHANNEL=stable\n"))}))
		b.must(b.state.Save(layout.Trial, contract.Trial{Schema: contract.One, Version: "2", Prior: "1", PromotedAt: two.PromotedAt}))
		b.must(os.Symlink("sets/1", b.state.Path(layout.Prior)))
		b.must(os.Remove(b.state.Path(layout.Staged)))
		c.request(b, two)
		_ = b.stage(nil)
		if _, err := os.Lstat(b.state.Path(layout.Staged)); (err == nil) != c.told {
			t.Errorf("%s: apply is told: %v", name, err == nil)
		}
		if trial := record.Optional[contract.Trial](b.state, layout.Trial); trial == nil || trial.Proved != c.told {
			t.Errorf("%s: %+v", name, trial)
		}
		if r := record.Optional[contract.Result](b.state, layout.Result); name == "a no-op" && (r == nil || r.Outcome != outcome.Applied || r.Attempt != 1) {
			t.Errorf("%s: %+v", name, r)
		}
	}
}

// A damaged record is kept under a name that says so, and never read as "start
// afresh": an old promote is refused as before, a version keeps its bytes, and a
// new promote is staged.
func TestDamagedRecords(t *testing.T) {
	for _, place := range []layout.Place{layout.Seen, layout.Applied, layout.Result, layout.StagedRecord, layout.Versions} {
		for damage, change := range tree.Damages {
			b, _ := ready(t)
			old := b.answer
			hint := contract.Hint{Schema: contract.One, Version: "3", PromotedAt: contract.At(time.Unix(b.clock, 0)), SeenAt: contract.At(time.Unix(b.clock, 0))}
			four := b.promote("4", nil)
			b.must(b.stage(nil))
			b.must(b.state.Conclude(contract.Result{Tuple: four.Tuple, Outcome: outcome.Applied, At: four.PromotedAt, Config: record.Sum(nil)}))
			data, err := os.ReadFile(b.state.Path(place))
			b.must(err)
			b.must(os.WriteFile(b.state.Path(place), change(data), 0o644))

			answer := b.answer
			b.answer = old // a replayed pointer
			b.hint(hint)
			if err := b.stage(nil); outcome.Exit(err) == outcome.ExitDone || b.staged() == "3" {
				t.Errorf("%s %s: an old promote: %v, staged is %s", place, damage, err, b.staged())
			}
			b.answer = answer
			b.promote("5", nil)
			if err := b.stage(nil); err != nil || b.staged() != "5" {
				t.Errorf("%s %s: a new promote: %v, staged is %s", place, damage, err, b.staged())
			}
			b.must(b.sound())
			kept, _ := filepath.Glob(b.state.Path(place) + ".damaged-*")
			if place != layout.StagedRecord && len(kept) != 1 { // that one is apply's to read; here it is replaced
				t.Errorf("%s %s: kept as %v", place, damage, kept)
			}
			// The bytes of a version that is on this box are remembered without a record.
			b.promote("1", func(m *contract.Manifest) { m.VersionText = "other" })
			if err := b.stage(nil); err == nil || !strings.Contains(err.Error(), string(outcome.Mutated)) {
				t.Errorf("%s %s: other bytes: %v", place, damage, err)
			}
		}
	}
}

// ends is how the last promote ended.
func (b *bench) ends() outcome.Word {
	r, _, err := record.Load[contract.Result](b.state, layout.Result)
	b.must(err)
	return r.Word()
}

// What expires, by which clock: the box's own, or the newest signed time that it
// has seen.
func TestExpiry(t *testing.T) {
	day := 24 * time.Hour
	real := time.Now()
	for name, c := range map[string]struct {
		clock   time.Duration // of the box, past the real time
		seen    time.Duration // a promote that was seen on another channel, past the real time
		built   time.Duration // the build, past the real time
		expires time.Duration // the pointer, past the real time
		staged  bool
	}{
		"it has time left":                       {0, -day, -30 * day, time.Hour, true},
		"it has expired":                         {0, -day, -30 * day, -time.Hour, false},
		"the clock is behind, and that is known": {-3 * day, 0, -30 * day, -time.Hour, false},
		"the clock is behind, and nobody knows":  {-3 * day, -10 * day, -30 * day, -time.Hour, true},
		"the clock is ten days behind":           {-10 * day, 0, -30 * day, -4 * day, false},
		"the floor is seven days, and no more":   {-10 * day, 0, -30 * day, -2 * day, true},
		"the clock is before the build":          {-4000 * day, 0, -30 * day, -2 * day, false},
		"somebody signed a time from the future": {0, 9000 * day, -30 * day, 8 * day, true},
		"and it expires within seven days":       {0, 9000 * day, -30 * day, 6 * day, false},
		"the clock is ahead":                     {30 * day, -day, -30 * day, 14 * day, false},
	} {
		b := newBench(t, "edge")
		at := func(d time.Duration) contract.Time { return contract.At(real.Add(d)) }
		b.now = real.Add(c.clock)
		b.built = real.Add(c.built)
		b.must(b.state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{"canary": {PromotedAt: at(c.seen), Trust: 1, KeyIDs: []string{}}}}))
		b.life = [2]contract.Time{at(c.expires - 20*day), at(c.expires)}
		b.promote("1", nil)
		err := b.stage(nil)
		if staged := b.staged() == "1"; staged != c.staged || staged != (err == nil) {
			t.Errorf("%s: staged: %v, %v", name, staged, err)
		}
		if !c.staged && (b.ends() != outcome.Expired || outcome.Exit(err) != outcome.ExitDeferred) {
			t.Errorf("%s: %v", name, err)
		}
		// Refreshed, the same promote is staged: nobody promoted anything.
		if !c.staged {
			b.life = [2]contract.Time{at(c.expires), at(40 * day)}
			b.clock--
			b.promote("1", nil)
			if err := b.stage(nil); err != nil || b.staged() != "1" {
				t.Errorf("%s, refreshed: %v", name, err)
			}
		}
	}
}

// How a promote has ended is not forgotten because its pointer expires.
func TestExpiryForgetsNothing(t *testing.T) {
	b := newBench(t, "edge")
	now := time.Now()
	at := func(d time.Duration) contract.Time { return contract.At(now.Add(d)) }
	b.life = [2]contract.Time{at(-time.Hour), at(time.Hour)}
	build := b.promote("1", nil)
	for _, o := range []outcome.Outcome{outcome.Refused, outcome.RollbackFailed, outcome.RolledBack} {
		want := contract.Result{Schema: contract.One, Tuple: build.Tuple, Outcome: o, Reason: "version-lie: it lies", Attempt: 1, Config: b.config(), At: at(0), DownMS: -1}
		b.must(b.state.Save(layout.Result, want))
		for _, later := range []time.Duration{0, 2 * time.Hour} {
			b.now = now.Add(later)
			b.must(marker.Raise(b.state.Path(layout.Requested)))
			if err := b.stage(nil); err != nil {
				t.Errorf("%s, %s later: %v", o, later, err)
			}
			if got, _, err := record.Load[contract.Result](b.state, layout.Result); err != nil || got != want || b.staged() != "" {
				t.Errorf("%s, %s later: %+v, staged %q, %v", o, later, got, b.staged(), err)
			}
		}
	}
}

func (b *bench) config() contract.Digest {
	data, err := os.ReadFile(b.state.Path(layout.ComponentConf))
	b.must(err)
	return record.Sum(data)
}

// The answer that sluice-pointer@ has left is read once; a dry run moves nothing.
func TestAnswerIsReadOnce(t *testing.T) {
	b := newBench(t, "edge")
	b.promote("1", nil)
	b.steps = map[int][]byte{2: b.document(2, contract.At(time.Now()), contract.Time{})}
	answer := b.state.Path(layout.PointerAnswer)
	run := func(dry bool) error {
		b.must(os.MkdirAll(filepath.Dir(answer), 0o755))
		b.must(os.WriteFile(answer, b.answer, 0o644))
		b.must(os.WriteFile(filepath.Join(filepath.Dir(answer), layout.StepName(2)), b.steps[2], 0o644))
		s := &Stager{State: b.state, Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Now: time.Now, DryRun: dry, Plan: func(string, contract.Manifest) error { return nil }}
		return s.Run(context.Background())
	}
	b.must(run(true))
	if set, err := b.state.Trust(); err != nil || set.Number != 1 {
		t.Errorf("a dry run has moved trust to %d, %v", set.Number, err)
	}
	b.must(run(false))
	if _, err := os.Lstat(answer); err == nil {
		t.Error("the answer is still there")
	}
	if set, err := b.state.Trust(); err != nil || set.Number != 2 || b.staged() != "1" {
		t.Errorf("trust document %d, staged %q, %v", set.Number, b.staged(), err)
	}
	// Without an answer trust moves all the same: a long chain gets there in several runs.
	b.must(os.WriteFile(filepath.Join(filepath.Dir(answer), layout.StepName(3)), b.document(3, contract.At(time.Now()), contract.Time{}), 0o644))
	s := &Stager{State: b.state, Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Now: time.Now}
	if err := s.Run(context.Background()); outcome.Exit(err) != outcome.ExitDeferred {
		t.Errorf("%v", err)
	}
	if set, err := b.state.Trust(); err != nil || set.Number != 3 {
		t.Errorf("trust document %d, %v", set.Number, err)
	}
}

// What expired is a watermark too, and a floor that was made up is kept until the
// trust moves.
func TestWatermarks(t *testing.T) {
	b := newBench(t, "edge")
	old := b.promote("1", nil)
	answer := b.answer
	b.life = [2]contract.Time{contract.At(time.Now().Add(-2 * time.Hour)), contract.At(time.Now().Add(-time.Hour))}
	b.promote("2", nil)
	if err := b.stage(nil); b.ends() != outcome.Expired {
		t.Errorf("%v", err)
	}
	b.answer = answer
	b.hint(contract.Hint{Schema: contract.One, Version: "1", PromotedAt: old.PromotedAt, SeenAt: old.PromotedAt})
	if err := b.stage(nil); outcome.Exit(err) != outcome.ExitFailed || !strings.Contains(err.Error(), string(outcome.Replay)) {
		t.Errorf("older than what has expired: %v", err)
	}
	// seen.json is lost after a promote from the future was applied.
	far := contract.At(time.Now().AddDate(70, 0, 0))
	b.must(b.state.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: contract.Build{Tuple: contract.Tuple{Channel: "stable", Version: "9", PromotedAt: far}, ManifestSHA256: record.Sum(nil)}, At: far}))
	b.must(os.Remove(b.state.Path(layout.Seen)))
	b.life = [2]contract.Time{}
	b.promote("3", nil)
	for range 2 {
		b.must(marker.Raise(b.state.Path(layout.Requested)))
		if err := b.stage(nil); err == nil || !strings.Contains(err.Error(), string(outcome.Replay)) {
			t.Errorf("%v", err)
		}
	}
	b.steps = map[int][]byte{2: b.document(2, contract.At(time.Now()), contract.Time{})}
	b.must(marker.Raise(b.state.Path(layout.Requested)))
	if err := b.stage(nil); err != nil || b.staged() != "3" {
		t.Errorf("after the trust has moved: %v", err)
	}
}

// document signs trust document n: the same keys as before, made at a time.
func (b *bench) document(n int, made, expires contract.Time) []byte {
	doc := trust.NewDocument(made, b.key.Public().(ed25519.PublicKey))
	doc.Payload.Number, doc.Payload.ExpiresAt = n, expires
	return trust.Sign(contract.TrustLadder, doc.Encode(), b.key).Encode()
}

// An expired trust document stops updates until there is a newer one; a newer one
// resets the floor of time that the one before has let rise.
func TestTrustExpires(t *testing.T) {
	day := 24 * time.Hour
	real := time.Now()
	at := func(d time.Duration) contract.Time { return contract.At(real.Add(d)) }
	b := newBench(t, "edge")
	b.now, b.built = real, real.Add(-30*day)
	b.must(os.WriteFile(b.root.TrustFile("edge", 1), b.document(1, at(-20*day), at(-day)), 0o644))
	b.promote("1", nil)
	if err := b.stage(nil); b.ends() != outcome.Expired || !strings.Contains(err.Error(), "trust document 1 expired") || b.staged() != "" {
		t.Errorf("%v", err)
	}
	// One in the middle of a chain may have expired: it is only a step.
	b.steps = map[int][]byte{2: b.document(2, at(-10*day), at(-5*day)), 3: b.document(3, at(-day), at(30*day))}
	if err := b.stage(nil); err != nil || b.staged() != "1" {
		t.Errorf("%v", err)
	}
	for n := 1; n <= 3; n++ {
		if _, err := os.Stat(b.root.TrustFile("edge", n)); err != nil {
			t.Error(err)
		}
	}
	// A time from the future, seen under document 3, lets a pointer expire early;
	// document 4 puts that right.
	b.must(b.state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{
		"canary": {PromotedAt: at(9000 * day), Trust: 3, KeyIDs: []string{trust.KeyID(b.key.Public().(ed25519.PublicKey))}}}}))
	b.life = [2]contract.Time{at(-day), at(5 * day)}
	b.promote("2", nil)
	if err := b.stage(nil); b.ends() != outcome.Expired || b.staged() != "1" {
		t.Errorf("%v", err)
	}
	b.steps[4] = b.document(4, at(-time.Hour), at(30*day))
	if err := b.stage(nil); err != nil || b.staged() != "2" {
		t.Errorf("%v", err)
	}
}

// A walk that is killed at each of its steps goes on where it was, and a watermark
// whose key is taken out never comes back.
func TestWalkIsKilled(t *testing.T) {
	other := ed25519.NewKeyFromSeed([]byte(strings.Repeat("o", ed25519.SeedSize)))
	far := contract.At(time.Now().AddDate(70, 0, 0))
	for n := 1; ; n++ {
		b := newBench(t, "edge")
		b.must(b.state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{
			"stable": {PromotedAt: far, Trust: 1, KeyIDs: []string{trust.KeyID(b.key.Public().(ed25519.PublicKey))}}}}))
		b.promote("1", nil)
		if err := b.stage(nil); err == nil || !strings.Contains(err.Error(), string(outcome.Replay)) {
			t.Fatalf("before the rotation: %v", err)
		}
		two := trust.NewDocument(contract.At(time.Now()), other.Public().(ed25519.PublicKey))
		two.Payload.Number = 2
		b.steps = map[int][]byte{2: trust.Sign(contract.TrustLadder, two.Encode(), b.key, other).Encode()}
		b.key = other
		b.clock--
		b.promote("1", nil)
		points := &fault.Points{At: n}
		_ = b.stage(points)
		b.must(marker.Raise(b.state.Path(layout.Requested)))
		if err := b.stage(nil); err != nil || b.staged() != "1" {
			t.Errorf("killed at %d: %v", n, err)
		}
		seen, _, err := record.Load[contract.Seen](b.state, layout.Seen)
		if w := seen.Channels["stable"]; err != nil || w.PromotedAt.Equal(far.Time) || w.Trust != 2 {
			t.Errorf("killed at %d: the watermark is %+v, %v", n, w, err)
		}
		if points.Count() < n {
			if n < 10 {
				t.Errorf("only %d points", n)
			}
			break
		}
	}
}
