package hand

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// bin is where the programs are.
var bin string

func TestMain(m *testing.M) {
	if os.Geteuid() == 0 {
		os.Setenv("PATH", os.Getenv("PATH")+":/usr/local/go/bin")
	}
	os.Setenv("AWS_ACCESS_KEY_ID", s3User)
	os.Setenv("AWS_SECRET_ACCESS_KEY", s3Secret)
	dir, err := os.MkdirTemp("", "sluice-hand-")
	if err == nil {
		bin = dir
		c := exec.Command("go", "build", "-o", bin, "sluice/cmd/...")
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		c.Stderr = os.Stderr
		err = c.Run()
	}
	code := 1
	if err == nil {
		code = m.Run()
	} else {
		fmt.Fprintln(os.Stderr, err)
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// A world is a deployment and one box of it, by hand.
type world struct {
	t      *testing.T
	dir    string
	root   layout.Root
	store  store.Store
	op     *fleet.Operator
	key    ed25519.PrivateKey
	bucket string
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// run runs a program and returns its exit status and all it printed.
func run(t *testing.T, program string, args ...string) (int, string) {
	t.Helper()
	c := exec.CommandContext(t.Context(), filepath.Join(bin, program), args...)
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.TempDir(), "AWS_ACCESS_KEY_ID=" + s3User, "AWS_SECRET_ACCESS_KEY=" + s3Secret}
	out, err := c.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return c.ProcessState.ExitCode(), string(out)
}

// ok runs a program that must succeed.
func (w *world) ok(program string, args ...string) string {
	w.t.Helper()
	status, out := run(w.t, program, args...)
	if status != 0 {
		w.t.Fatalf("%s %v: exit status %d: %s", program, args, status, out)
	}
	return out
}

func (w *world) box(program string, args ...string) (int, string) {
	w.t.Helper()
	return run(w.t, program, append(args, "-root", string(w.root), "-component", "edge")...)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir()}
	w.bucket = filepath.Join(w.dir, "bucket")
	w.must(os.Mkdir(w.bucket, 0o755))
	w.deploy("file://" + w.bucket)
	return w
}

// deploy makes a deployment in a store, and enrolls the box.
func (w *world) deploy(url string) {
	w.t.Helper()
	w.root = layout.Root(filepath.Join(w.dir, "box"))
	w.ok("sluice", "keygen", "-o", filepath.Join(w.dir, "key"))
	w.ok("sluice", "init", "-store", url, "-key", filepath.Join(w.dir, "key.pub"), "-components", "edge=stable", "-o", filepath.Join(w.dir, "deployment.json"))
	// A pipeline without programs: they are run from here.
	w.write("sluice/sysusers.d/sluice.conf", "u sluice-fetch -\nu sluice-verify -\nu sluice-pointer -\n", 0o644)
	units, err := filepath.Glob("../../units/sluice-*")
	w.must(err)
	for _, u := range units {
		data, err := os.ReadFile(u)
		w.must(err)
		w.write("sluice/units/"+filepath.Base(u), string(data), 0o644)
	}
	w.write("sluice/manifest.json", `{"component": "sluice", "version": "0", "gate": {"soak": "1ms"}}`, 0o644)
	w.ok("sluice", "bundle", filepath.Join(w.dir, "sluice"), "-o", filepath.Join(w.dir, "sluice.tar.zst"))
	w.ok("sluice", "update", "-store", url, "-key", filepath.Join(w.dir, "key.key"), "-file", filepath.Join(w.dir, "sluice.tar.zst"), "-yes")
	w.ok("sluice", "enroll", filepath.Join(w.dir, "deployment.json"), "-root", string(w.root), "-label", "box-1")
	w.store, err = store.Open(url)
	w.must(err)
	w.key, err = fleet.PrivateKey(filepath.Join(w.dir, "key.key"))
	w.must(err)
	w.op, err = fleet.NewOperator(context.Background(), w.store, w.key)
	w.must(err)
}

func (w *world) write(name, text string, mode fs.FileMode) {
	w.t.Helper()
	at := filepath.Join(w.dir, name)
	w.must(os.MkdirAll(filepath.Dir(at), 0o755))
	w.must(os.WriteFile(at, []byte(text), mode))
}

// script is a program that knows its version.
func script(version string) string { return "#!/bin/sh\necho edge " + version + "\n" }

// bundle makes a bundle of edge; program is bin/edge.
func (w *world) bundle(version, program string) string {
	w.t.Helper()
	name := "edge-" + version
	w.write(name+"/bin/edge", program, 0o755)
	w.write(name+"/units/edge.service", "[Service]\nExecStart=/opt/sluice/edge/current/bin/edge\n[Install]\nWantedBy=multi-user.target\n# "+version+"\n", 0o644)
	w.write(name+"/manifest.json", fmt.Sprintf(`{"component": "edge", "version": %q, "version_command": ["bin/edge"], "gate": {"soak": "1ms"},
		"units": {"enable": ["edge.service"], "restart": [{"unit": "edge.service"}]}}`, version), 0o644)
	out := filepath.Join(w.dir, name+".tar.zst")
	w.ok("sluice", "bundle", filepath.Join(w.dir, name), "-o", out)
	return out
}

func (w *world) promote(file string, args ...string) contract.Pointer {
	w.t.Helper()
	out := w.ok("sluice", append([]string{"update", "-store", w.store.String(), "-key", filepath.Join(w.dir, "key.key"), "-file", file, "-yes", "-json"}, args...)...)
	p, err := contract.Spoken.DecodePointer([]byte(out[max(0, strings.Index(out, "{")):])) // after what it warns of
	w.must(err)
	return p
}

// roll takes a box through all four programs.
func (w *world) roll() {
	w.t.Helper()
	for _, program := range []string{"fetch once", "verify", "stage", "apply"} {
		w.step(program, 0, "")
	}
}

// step runs one program and compares its exit status and what it says.
func (w *world) step(program string, status int, says string) {
	w.t.Helper()
	words := strings.Fields(program)
	var got int
	var out string
	if words[0] == "fetch" {
		got, out = run(w.t, "fetch", append(words[1:], "-root", string(w.root))...)
	} else {
		got, out = w.box(words[0], words[1:]...)
	}
	if got != status || !strings.Contains(out, says) {
		w.t.Errorf("%s: exit status %d, want %d and %q: %s", program, got, status, says, out)
	}
}

func (w *world) state() record.State { return record.State{Root: w.root, Name: "edge"} }

func (w *world) running() string {
	target, _ := os.Readlink(w.state().Path(layout.Current))
	return filepath.Base(target)
}

func (w *world) result() contract.Result {
	w.t.Helper()
	r, _, err := record.Load[contract.Result](w.state(), layout.Result)
	w.must(err)
	return r
}

// tree is every file of the box below a place, with its content; what is
// being written or staged shows.
func (w *world) tree(places ...layout.Place) map[string]string {
	w.t.Helper()
	out := map[string]string{}
	for _, p := range places {
		base := w.state().Path(p)
		err := filepath.WalkDir(base, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || filepath.Base(path) == "lock" {
				return err
			}
			if e.Type()&fs.ModeSymlink != 0 {
				out[path], err = os.Readlink(path)
				return err
			}
			data, err := os.ReadFile(path)
			out[path] = string(data)
			return err
		})
		w.must(err)
	}
	return out
}

// unchanged runs do and checks that root's side and /etc are what they were,
// but for the named files.
func (w *world) unchanged(do func(), but ...string) {
	w.t.Helper()
	places := []layout.Place{layout.OptOf, "/etc"}
	before := w.tree(places...)
	do()
	after := w.tree(places...)
	for _, m := range []map[string]string{before, after} {
		for path := range m {
			if before[path] != after[path] && !slices.Contains(but, filepath.Base(path)) {
				w.t.Errorf("%s changed", path)
			}
		}
	}
	for path := range w.tree(layout.OptOf, layout.DataOf) {
		if strings.Contains(path, ".partial") || strings.HasSuffix(path, ".tmp") {
			w.t.Errorf("%s is left behind", path)
		}
	}
}

func TestAPromoteByHand(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	if w.running() != "1" || w.result().Outcome != outcome.Applied {
		t.Errorf("runs %s: %+v", w.running(), w.result())
	}
	// The same version again is noted; a rollback brings what was before.
	two := w.bundle("2", script("2"))
	w.promote(two)
	w.roll()
	w.promote(two)
	w.step("fetch once", 0, "")
	w.step("verify", 0, "")
	w.step("stage", 0, "")
	if r := w.result(); r.Outcome != outcome.Noted || w.running() != "2" {
		t.Errorf("%+v", r)
	}
	w.ok("sluice", "rollback", "edge", "-store", w.store.String(), "-key", filepath.Join(w.dir, "key.key"), "-yes")
	w.roll()
	if w.running() != "1" || w.result().Outcome != outcome.Applied {
		t.Errorf("after the rollback: runs %s, %+v", w.running(), w.result())
	}
	if out := w.ok("sluice", "box", "-root", string(w.root)); !strings.Contains(out, "applied") {
		t.Error(out)
	}
	w.step("fetch once", 0, "")
	if out := w.ok("sluice", "status", "-store", w.store.String(), "-check"); !strings.Contains(out, "box-1") || !strings.Contains(out, "current") {
		t.Error(out)
	}
	status, out := run(t, "sluice", "rollback", "edge", "-store", w.store.String(), "-key", filepath.Join(w.dir, "key.key"), "-yes")
	if status != 1 || !strings.Contains(out, "history") {
		t.Errorf("rollback without a history: %d, %s", status, out)
	}
}

// sign puts a statement into the bucket as the pointer of stable.
func (w *world) putPointer(data []byte) {
	w.t.Helper()
	_, err := store.PutBytes(context.Background(), w.store, contract.PointerKey("edge", "stable", 1), data, store.Condition{})
	w.must(err)
}

// Every wrong pointer is refused by verify, in incoming/, and by stage, that
// gets it from the store itself, each with its word.
func TestWrongPointers(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	good := w.promote(w.bundle("2", script("2")))
	other := ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, 32))
	sign := func(change func(*contract.Pointer), key ed25519.PrivateKey) []byte {
		p := good
		change(&p)
		return trust.Sign(contract.PointerLadder, p.Encode(), key).Encode()
	}
	same := func(*contract.Pointer) {}
	valid := sign(same, w.key)
	padded := func(n int) []byte { return append(slices.Clone(valid), bytes.Repeat([]byte(" "), n-len(valid))...) }
	old := good.PromotedAt.Add(-time.Hour)
	for name, c := range map[string]struct {
		data   []byte
		verify int
		stage  int
		word   outcome.Word
	}{
		"oversized":      {padded(contract.MaxEnvelope + 1), 1, 69, ""},
		"truncated":      {valid[:len(valid)/2], 1, 1, outcome.BadSignature},
		"empty":          {nil, 1, 1, outcome.BadSignature},
		"unsigned":       {trust.Sign(contract.PointerLadder, good.Encode()).Encode(), 1, 1, outcome.BadSignature},
		"wrongly signed": {sign(same, other), 1, 1, outcome.BadSignature},
		"wrong channel":  {sign(func(p *contract.Pointer) { p.Channel = "canary" }, w.key), 1, 1, outcome.WrongChannel},
		"wrong component": {sign(func(p *contract.Pointer) {
			p.Component = "edgf"
			p.Payload.Current.Artifacts = nil
			p.Payload.History = []contract.Release{}
		}, w.key), 1, 1, outcome.WrongComponent},
		"replay":         {sign(func(p *contract.Pointer) { p.PromotedAt = contract.At(old) }, w.key), 1, 1, outcome.Replay},
		"a newer schema": {trust.Sign(contract.PointerLadder, bytes.Replace(good.Encode(), []byte(`"schema": "1.0"`), []byte(`"schema": "1.7"`), 1), w.key).Encode(), 69, 69, outcome.UpgradeNeeded},
	} {
		t.Run(name, func(t *testing.T) {
			w := &world{t, w.dir, w.root, w.store, w.op, w.key, w.bucket}
			w.must(os.WriteFile(w.state().Path(layout.Pointer), c.data, 0o640))
			w.unchanged(func() { w.step("verify", c.verify, string(c.word)) })
			w.putPointer(c.data)
			// A hint that fits, whoever wrote it.
			hint := contract.Hint{Schema: contract.One, Version: "2", PromotedAt: good.PromotedAt, SeenAt: good.PromotedAt}
			if c.word == outcome.Replay {
				hint.PromotedAt = contract.At(old)
			}
			w.must(os.WriteFile(w.state().Path(layout.Hint), hint.Encode(), 0o640))
			w.unchanged(func() { w.step("stage", c.stage, string(c.word)) })
			if c.word != outcome.Replay { // fetch passes over what is old without a word
				w.step("fetch once", c.verify, string(c.word))
			}
		})
	}
	// An envelope of exactly the limit passes.
	w.putPointer(padded(contract.MaxEnvelope))
	w.roll()
	if w.running() != "2" {
		t.Errorf("an envelope of exactly %d bytes: runs %s", contract.MaxEnvelope, w.running())
	}
	// Without a pointer in the store root defers.
	w.must(os.Remove(filepath.Join(w.bucket, contract.PointerKey("edge", "stable", 1))))
	w.unchanged(func() { w.step("stage", 69, string(outcome.Store)) })
	w.must(os.Remove(w.state().Path(layout.Pointer)))
	w.step("verify", 0, "")
}

func TestWrongHints(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	p := w.promote(w.bundle("2", script("2")))
	w.step("fetch once", 0, "")
	w.step("verify", 0, "")
	hint := func(change func(*contract.Hint)) []byte {
		h := contract.Hint{Schema: contract.One, Version: "2", PromotedAt: p.PromotedAt, SeenAt: p.PromotedAt}
		change(&h)
		return h.Encode()
	}
	valid := hint(func(*contract.Hint) {})
	for name, c := range map[string]struct {
		data   []byte
		status int
		word   string
		but    string // a record that changes all the same
	}{
		"garbage":               {[]byte("\x00\x01\x02"), 1, string(outcome.BadHint), ""},
		"empty":                 {nil, 1, string(outcome.BadHint), ""},
		"oversized":             {append(slices.Clone(valid), bytes.Repeat([]byte(" "), contract.MaxHint-len(valid)+1)...), 1, string(outcome.BadHint), ""},
		"a path":                {bytes.Replace(valid, []byte(`"2"`), []byte(`"../2"`), 1), 1, string(outcome.BadHint), ""},
		"a member too many":     {bytes.Replace(valid, []byte(`"noop"`), []byte(`"channel": "x", "noop"`), 1), 1, string(outcome.BadHint), ""},
		"older than pointer":    {hint(func(h *contract.Hint) { h.PromotedAt = contract.At(h.PromotedAt.Add(-1)) }), 0, string(outcome.StaleHint), ""},
		"newer than pointer":    {hint(func(h *contract.Hint) { h.PromotedAt = contract.At(h.PromotedAt.Add(1)) }), 69, string(outcome.Store), ""},
		"another version":       {hint(func(h *contract.Hint) { h.Version = "3" }), 0, string(outcome.StaleHint), ""},
		"says noop, and is not": {hint(func(h *contract.Hint) { h.Noop = true }), 69, string(outcome.StaleHint), "seen.json result.json"},
	} {
		w.must(os.WriteFile(w.state().Path(layout.Hint), c.data, 0o640))
		w.unchanged(func() { w.step("stage", c.status, c.word) }, strings.Fields(c.but)...)
		if t.Failed() {
			t.Fatal(name)
		}
	}
	w.must(os.Remove(w.state().Path(layout.Hint)))
	w.unchanged(func() { w.step("stage", 1, string(outcome.BadHint)) })
	w.must(os.WriteFile(w.state().Path(layout.Hint), append(slices.Clone(valid), bytes.Repeat([]byte(" "), contract.MaxHint-len(valid))...), 0o640))
	w.step("stage", 0, "") // exactly the limit
	w.step("apply", 0, "")
	if w.running() != "2" {
		t.Errorf("runs %s", w.running())
	}
}

// entry is one entry of a tar that is made by hand.
type entry struct {
	header tar.Header
	data   string
}

// craft makes a bundle that a well-meaning tool would not, and promotes it
// with digests that fit.
func (w *world) craft(version string, change func(m *contract.Manifest, entries *[]entry)) contract.Pointer {
	w.t.Helper()
	object, tarSize, manifest := w.pack(version, change)
	return w.promoteObject(version, object, tarSize, manifest)
}

// pack makes the object of a bundle, and says how long its tar is and which its
// manifest.
func (w *world) pack(version string, change func(m *contract.Manifest, entries *[]entry)) (object []byte, tarSize int64, digest contract.Digest) {
	w.t.Helper()
	program := script(version)
	m := contract.Manifest{Schema: contract.One, Component: "edge", Version: contract.Version(version), Platform: contract.Here(), VersionCommand: []string{"bin/edge"},
		Files: []contract.File{{Path: "bin/edge", Mode: 0o755, Size: int64(len(program)), SHA256: record.Sum([]byte(program))}}, Gate: contract.Gate{Soak: 1e6}}
	entries := []entry{{tar.Header{Name: "bin/edge", Typeflag: tar.TypeReg, Mode: 0o755}, program}}
	change(&m, &entries)
	manifest := m.Encode()
	var raw bytes.Buffer
	out := tar.NewWriter(&raw)
	for _, e := range append([]entry{{tar.Header{Name: contract.ManifestName, Typeflag: tar.TypeReg, Mode: 0o644}, string(manifest)}}, entries...) {
		if e.header.Typeflag == tar.TypeReg {
			e.header.Size = int64(len(e.data))
		}
		w.must(out.WriteHeader(&e.header))
		if e.header.Typeflag == tar.TypeReg {
			_, err := out.Write([]byte(e.data))
			w.must(err)
		}
	}
	w.must(out.Close())
	return compress(w.t, raw.Bytes()), int64(raw.Len()), record.Sum(manifest)
}

func compress(t *testing.T, data []byte) []byte {
	t.Helper()
	z, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	return z.EncodeAll(data, nil)
}

func (w *world) promoteObject(version string, object []byte, tarSize int64, manifest contract.Digest) contract.Pointer {
	w.t.Helper()
	key := contract.BootstrapKey("edge", contract.Version(version), "bundle.tar.zst")
	_, err := store.PutBytes(context.Background(), w.store, key, object, store.Condition{IfNone: true})
	w.must(err)
	p, err := w.op.Promote(context.Background(), "edge", "stable", fleet.Promotion{Release: contract.Release{Version: contract.Version(version), Source: "file", ReleasedAt: contract.At(time.Now()),
		Artifacts: map[contract.Platform]contract.Artifact{contract.Here(): {Key: key, Size: int64(len(object)), SHA256: record.Sum(object), TarSize: tarSize, ManifestSHA256: manifest}}}})
	w.must(err)
	return p
}

func TestWrongBundles(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	n := 1
	for name, change := range map[string]func(*contract.Manifest, *[]entry){
		"an unlisted file": func(_ *contract.Manifest, e *[]entry) {
			*e = append(*e, entry{tar.Header{Name: "etc/more", Typeflag: tar.TypeReg, Mode: 0o644}, "x"})
		},
		"an unlisted, empty file": func(_ *contract.Manifest, e *[]entry) {
			*e = append(*e, entry{tar.Header{Name: "etc/more", Typeflag: tar.TypeReg, Mode: 0o644}, ""})
		},
		"a missing file": func(_ *contract.Manifest, e *[]entry) { *e = nil },
		"a file twice":   func(_ *contract.Manifest, e *[]entry) { *e = append(*e, (*e)[0]) },
		"other bytes": func(_ *contract.Manifest, e *[]entry) {
			(*e)[0].data = strings.Replace((*e)[0].data, "edge", "EDGE", 1)
		},
		"a longer file":  func(_ *contract.Manifest, e *[]entry) { (*e)[0].data += "x" },
		"a path with ..": func(_ *contract.Manifest, e *[]entry) { (*e)[0].header.Name = "../../bin/edge" },
		"a path with .., listed": func(m *contract.Manifest, e *[]entry) {
			m.Files[0].Path, (*e)[0].header.Name = "bin/../../edge", "bin/../../edge"
		},
		"an absolute path": func(m *contract.Manifest, e *[]entry) {
			m.Files[0].Path, (*e)[0].header.Name = "/bin/edge", "/bin/edge"
		},
		"a symbolic link": func(_ *contract.Manifest, e *[]entry) {
			(*e)[0].header.Typeflag, (*e)[0].header.Linkname = tar.TypeSymlink, "/bin/sh"
		},
		"a hard link": func(_ *contract.Manifest, e *[]entry) {
			(*e)[0].header.Typeflag, (*e)[0].header.Linkname = tar.TypeLink, "manifest.json"
		},
		"a device":          func(_ *contract.Manifest, e *[]entry) { (*e)[0].header.Typeflag = tar.TypeChar },
		"a FIFO":            func(_ *contract.Manifest, e *[]entry) { (*e)[0].header.Typeflag = tar.TypeFifo },
		"a set-id mode":     func(m *contract.Manifest, _ *[]entry) { m.Files[0].Mode = 0o4755 },
		"another version":   func(m *contract.Manifest, _ *[]entry) { m.Version = "99" },
		"another component": func(m *contract.Manifest, _ *[]entry) { m.Component = "rim" },
		"another platform":  func(m *contract.Manifest, _ *[]entry) { m.Platform = "plan9-mips" },
		"a unit of the pipeline": func(m *contract.Manifest, _ *[]entry) {
			m.Files = append(m.Files, contract.File{Path: "units/sluice-x.service", Mode: 0o644, SHA256: record.Sum(nil)})
		},
		"accounts under any name": func(m *contract.Manifest, _ *[]entry) {
			m.Files = append(m.Files, contract.File{Path: "sysusers.d/basic.conf", Mode: 0o644, SHA256: record.Sum(nil)})
		},
	} {
		n++
		w.craft(fmt.Sprint("bad", n), change)
		w.step("fetch once", 0, "")
		w.unchanged(func() { w.step("verify", 1, string(outcome.BadBundle)) })
		if entries, _ := os.ReadDir(filepath.Join(w.state().Path(layout.Verified), fmt.Sprint("bad", n))); len(entries) > 0 {
			t.Errorf("%s: verify left %v", name, entries)
		}
		if t.Failed() {
			t.Fatal(name)
		}
	}
	// The same shape without a flaw goes through.
	w.craft("fine", func(*contract.Manifest, *[]entry) {})
	w.roll()
	if w.running() != "fine" {
		t.Errorf("runs %s", w.running())
	}
}

// An object that is not the signed one: of the same size, one byte longer,
// one byte shorter. Then the signed one goes through.
func TestWrongObjects(t *testing.T) {
	w := newWorld(t)
	p := w.promote(w.bundle("1", script("1")))
	path := filepath.Join(w.bucket, p.Payload.Current.Artifacts[contract.Here()].Key)
	object, err := os.ReadFile(path)
	w.must(err)
	changed := slices.Clone(object)
	changed[len(changed)/2] ^= 1
	for name, data := range map[string][]byte{"one byte changed": changed, "one byte more": append(slices.Clone(object), 0), "one byte less": object[:len(object)-1]} {
		w.must(os.WriteFile(path, data, 0o644))
		w.unchanged(func() { w.step("fetch once", 69, string(outcome.DigestMismatch)) })
		if left := slices.Collect(maps.Keys(w.tree(layout.Incoming))); slices.ContainsFunc(left, func(p string) bool { return strings.HasSuffix(p, "bundle.unverified") }) {
			t.Errorf("%s: left %v", name, left)
		}
	}
	w.must(os.WriteFile(path, object, 0o644))
	w.step("fetch once", 0, "")
	// It changes between fetch and verify.
	have := filepath.Join(w.root.Download("edge", "1"), "bundle.unverified")
	w.must(os.WriteFile(have, changed, 0o640))
	w.unchanged(func() { w.step("verify", 69, string(outcome.DigestMismatch)) })
	w.must(os.WriteFile(have, object, 0o640))
	w.step("verify", 0, "")
	// It changes between verify and stage.
	tree := filepath.Join(w.root.Tree("edge", "1"), "bin/edge")
	w.must(os.WriteFile(tree, []byte(strings.Replace(script("1"), "edge", "EDGE", 1)), 0o640))
	w.unchanged(func() { w.step("stage", 69, string(outcome.DigestMismatch)) }, "seen.json", "result.json", "versions.json")
	w.must(os.WriteFile(tree, []byte(script("1")), 0o640))
	w.step("stage", 0, "")
	// It is swapped after the copy.
	set := filepath.Join(w.state().Set("1"), "bin/edge")
	w.must(os.WriteFile(set, []byte(script("6")), 0o755))
	w.unchanged(func() { w.step("apply", 69, string(outcome.DigestMismatch)) }, "result.json", "staged")
	w.must(os.WriteFile(set, []byte(script("1")), 0o755))
	w.must(os.WriteFile(w.state().Path(layout.Staged), nil, 0o644))
	w.step("apply", 0, "")
	if w.running() != "1" {
		t.Errorf("runs %s", w.running())
	}
}

func TestMutated(t *testing.T) {
	w := newWorld(t)
	w.craft("1", func(*contract.Manifest, *[]entry) {})
	w.roll()
	w.craft("2", func(*contract.Manifest, *[]entry) {})
	w.roll()
	w.must(os.RemoveAll(filepath.Join(w.bucket, "bootstrap")))
	w.craft("1", func(m *contract.Manifest, _ *[]entry) { m.VersionText = "edge" })
	w.step("fetch once", 0, "")
	w.step("verify", 0, "")
	w.unchanged(func() { w.step("stage", 1, string(outcome.Mutated)) }, "seen.json", "result.json")
	if r := w.result(); r.Outcome != outcome.Refused || r.Word() != outcome.Mutated || w.running() != "2" {
		t.Errorf("%+v", r)
	}
	// Terminal: not even looked at again.
	w.step("stage", 0, "has ended here already")
}

// A version command that lies, hangs, floods or forks ends its release.
func TestVersionCommands(t *testing.T) {
	for name, c := range map[string]string{
		"lies":                  "#!/bin/sh\necho edge 2.1\n",
		"says nothing":          "#!/bin/sh\n",
		"fails":                 "#!/bin/sh\necho 2\nexit 3\n",
		"hangs":                 "#!/bin/sh\nsleep 1000\n",
		"floods":                "#!/bin/sh\nwhile :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done\n",
		"forks and goes on":     "#!/bin/sh\nsleep 1000 & sleep 1000\n",
		"says it after 4 KiB":   "#!/bin/sh\nhead -c 4096 /dev/zero | tr '\\0' a\necho\necho 2\n",
		"can't even be started": "#!/does/not/exist\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.promote(w.bundle("1", script("1")))
			w.roll()
			w.promote(w.bundle("2", c))
			w.step("fetch once", 0, "")
			w.step("verify", 0, "")
			w.step("stage", 0, "")
			w.unchanged(func() { w.step("apply", 1, string(outcome.VersionLie)) }, "result.json", "staged")
			if r := w.result(); r.Outcome != outcome.Refused || r.Word() != outcome.VersionLie || w.running() != "1" {
				t.Errorf("%+v", r)
			}
			// Nothing of it runs any more.
			if out, err := exec.Command("pgrep", "-f", w.dir+"/box/opt").CombinedOutput(); err == nil {
				t.Errorf("processes are left: %s", out)
			}
		})
	}
}

// A channel that a box is moved to may be older than the one it leaves.
func TestChannels(t *testing.T) {
	w := newWorld(t)
	one, two := w.bundle("1", script("1")), w.bundle("2", script("2"))
	w.promote(one) // stable, older
	canary := w.promote(two, "-channel", "canary")
	follow := func(channel string) {
		w.must(os.WriteFile(w.state().Path(layout.ComponentConf), []byte("SLUICE_CHANNEL="+channel+"\n"), 0o644))
	}
	for _, c := range []struct{ channel, want string }{{"canary", "2"}, {"stable", "1"}, {"canary", "2"}, {"stable", "1"}} {
		follow(c.channel)
		w.roll()
		if w.running() != c.want || string(w.result().Channel) != c.channel {
			t.Errorf("on %s it runs %s: %+v", c.channel, w.running(), w.result())
		}
	}
	if !canary.PromotedAt.After(w.result().PromotedAt.Time) {
		t.Error("stable was to be the older one")
	}
}

func TestNeeds(t *testing.T) {
	w := newWorld(t)
	w.craft("1", func(m *contract.Manifest, _ *[]entry) {
		m.Needs = map[contract.Component]contract.Version{"sluice": "7"}
	})
	w.step("fetch once", 0, "")
	w.step("verify", 0, "")
	w.unchanged(func() { w.step("stage", 69, string(outcome.Needs)) }, "seen.json", "result.json", "versions.json")
	w.craft("2", func(m *contract.Manifest, _ *[]entry) {
		m.Needs = map[contract.Component]contract.Version{"sluice": "0"}
	})
	w.roll()
	if w.running() != "2" {
		t.Errorf("runs %s", w.running())
	}
}

func TestHold(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.ok("sluice", "hold", "-root", string(w.root))
	w.unchanged(func() {
		w.step("fetch once", 0, "")
		w.step("stage", 0, "held")
		w.step("apply", 0, "held")
	})
	w.ok("sluice", "resume", "-root", string(w.root))
	w.roll()
	if w.running() != "1" {
		t.Errorf("runs %s", w.running())
	}
}

func TestDryRunMovesNothing(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.step("fetch once", 0, "")
	w.step("verify", 0, "")
	w.unchanged(func() { w.step("stage -dry-run", 0, "+ file:/etc/systemd/system/edge.service") })
	if _, err := os.Lstat(w.state().Path(layout.Requested)); err != nil {
		t.Error("the marker was taken")
	}
	w.step("stage", 0, "")
	w.step("apply", 0, "")
}

// What is not confirmed is not mirrored: a version would be taken for ever.
func TestNothingIsMirroredUnasked(t *testing.T) {
	w := newWorld(t)
	file := w.bundle("1", script("1"))
	for name, args := range map[string][]string{"nobody to ask": {"update", "-file", file}, "another component": {"update", "rim", "-file", file, "-yes"}, "another platform": {"update", "-file", file, "-platform", "plan9-mips", "-yes"}} {
		status, out := run(t, "sluice", append(args, "-store", w.store.String(), "-key", filepath.Join(w.dir, "key.key"))...)
		if status != 2 {
			t.Errorf("%s: exit status %d: %s", name, status, out)
		}
		if keys, err := w.store.List(context.Background(), "bootstrap/edge/"); err != nil || len(keys) > 0 {
			t.Errorf("%s: the store has %v, %v", name, keys, err)
		}
	}
}

// A set that is kept and was damaged is brought again when it is wanted.
func TestDamagedOldSetIsBroughtAgain(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	w.promote(w.bundle("2", script("2")))
	w.roll()
	w.must(os.Chmod(filepath.Join(w.state().Set("1"), "bin/edge"), 0o600))
	w.must(os.RemoveAll(filepath.Dir(w.root.Tree("edge", "1"))))
	w.ok("sluice", "rollback", "edge", "-store", w.store.String(), "-key", filepath.Join(w.dir, "key.key"), "-yes")
	w.step("fetch once", 0, "")
	w.step("verify", 0, "")
	w.step("stage", 69, string(outcome.DigestMismatch)) // and the damaged set is gone
	w.must(os.Remove(w.state().Path(layout.Pending)))   // fetch begins anew; by itself it waits a little
	w.must(os.Remove(w.state().Path(layout.Result)))
	w.roll()
	if w.running() != "1" {
		t.Errorf("runs %s", w.running())
	}
}

// Enrolling again after a first try that failed tries again, and says so if it
// fails again.
func TestEnrollAgain(t *testing.T) {
	w := newWorld(t)
	second := layout.Root(filepath.Join(w.dir, "second"))
	args := []string{"enroll", filepath.Join(w.dir, "deployment.json"), "-root", string(second), "-label", "box-2"}
	// Something stands where a file would go.
	w.write("second/etc/sysusers.d/sluice.conf", "# mine", 0o644)
	for range 2 {
		if status, out := run(t, "sluice", args...); status != 1 || !strings.Contains(out, string(outcome.ForeignFile)) {
			t.Errorf("exit status %d: %s", status, out)
		}
	}
	w.must(os.Remove(filepath.Join(string(second), "etc/sysusers.d/sluice.conf")))
	w.write("second/etc/sluice/hold", "", 0o644)
	if status, out := run(t, "sluice", args...); status != 1 || !strings.Contains(out, "held") {
		t.Errorf("held: exit status %d: %s", status, out)
	}
	w.must(os.Remove(filepath.Join(string(second), "etc/sluice/hold")))
	w.ok("sluice", args...)
	w.ok("sluice", args...)
}

// The deployment's watermark holds already for the first pointer.
func TestEnrollKnowsReplays(t *testing.T) {
	w := newWorld(t)
	data, err := os.ReadFile(filepath.Join(w.dir, "deployment.json"))
	w.must(err)
	d, err := contract.Spoken.DecodeDeployment(data)
	w.must(err)
	future := contract.At(time.Now().Add(time.Hour))
	d.Watermarks = map[contract.Component]contract.Water{"sluice": {PromotedAt: future, Trust: 1, KeyIDs: []string{}}}
	w.must(os.WriteFile(filepath.Join(w.dir, "deployment.json"), d.Encode(), 0o644))
	second := filepath.Join(w.dir, "second")
	if status, out := run(t, "sluice", "enroll", filepath.Join(w.dir, "deployment.json"), "-root", second); status != 1 || !strings.Contains(out, string(outcome.Replay)) {
		t.Errorf("exit status %d: %s", status, out)
	}
	seen, _, err := record.Load[contract.Seen](record.State{Root: layout.Root(second), Name: "sluice"}, layout.Seen)
	if err != nil || !seen.Channels["stable"].PromotedAt.Equal(future.Time) {
		t.Errorf("%+v, %v", seen, err)
	}
}

// A good set that was damaged keeps a new build from being tried, since there
// would be no way back; promoted once more it is brought again, and noted.
func TestDamagedGoodSetIsBroughtAgain(t *testing.T) {
	for name, damage := range map[string]func(set string) error{
		"changed": func(set string) error { return os.WriteFile(filepath.Join(set, "bin/edge"), []byte("rotten"), 0o755) },
		"gone":    os.RemoveAll,
	} {
		w := newWorld(t)
		one, two := w.bundle("1", script("1")), w.bundle("2", script("2"))
		w.promote(one)
		w.roll()
		w.must(os.RemoveAll(filepath.Dir(w.root.Tree("edge", "1"))))
		w.must(damage(w.state().Set("1")))
		w.promote(two)
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.step("stage", 0, "")
		w.step("apply", 69, string(outcome.BadGoodSet))
		w.promote(one)
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.step("stage", 0, "noted")
		if _, err := record.CheckSet(w.state().Set("1"), mustApplied(w).ManifestSHA256); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(w.state().Path(layout.Drift)); err == nil {
			t.Errorf("%s: drift.json is still there", name)
		}
		w.promote(two)
		w.roll()
		if w.running() != "2" {
			t.Errorf("%s: runs %s", name, w.running())
		}
	}
}

// Heal finds the damage, and the box mends itself without a promote.
func TestHealedByItself(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	w.step("fetch once", 0, "")
	w.must(os.Chmod(filepath.Join(w.state().Set("1"), "bin/edge"), 0o600))
	w.step("recover heal", 0, "damaged")
	w.step("fetch once", 0, "asking")
	w.step("verify", 0, "")
	w.step("stage", 0, "noted")
	w.step("recover heal", 0, "")
	if _, err := record.CheckSet(w.state().Set("1"), mustApplied(w).ManifestSHA256); err != nil {
		t.Error(err)
	}
	if d := record.Optional[contract.Drift](w.state(), layout.Drift); d != nil {
		t.Errorf("drift.json is still there: %+v", d)
	}
}

func mustApplied(w *world) contract.Applied {
	w.t.Helper()
	a, _, err := record.Load[contract.Applied](w.state(), layout.Applied)
	w.must(err)
	return a
}
