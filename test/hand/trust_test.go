package hand

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/layout"
	"sluice/internal/outcome"
)

// A box that was off for twelve rotations, each of which takes every key out that
// was there before, catches up in one go; with a link missing it says which.
func TestTwelveRotations(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	last := w.own()
	const rotations = 12
	for i := range rotations {
		next, _ := w.keypair(fmt.Sprint("key-", i))
		w.trustIs([]string{last, next}, []string{next}, []string{"add", next + ".pub"}, []string{"remove", last + ".pub"})
		last = next
	}
	w.ok("sluice", "update", "-store", w.store.String(), "-key", last+".key", "-file", w.bundle("2", script("2")), "-yes")
	if status, out := run(t, "sluice", "update", "-store", w.store.String(), "-key", w.own()+".key", "-file", w.bundle("3", script("3")), "-yes"); status != 78 {
		t.Errorf("a key that was taken out: exit status %d: %s", status, out)
	}
	link := filepath.Join(w.bucket, contract.TrustKey(7))
	kept, err := os.ReadFile(link)
	w.must(err)
	w.must(os.Remove(link))
	w.unchanged(func() { w.step("fetch once", 1, "the store has trust document 8 and not 7") })
	w.step("fetch once", 1, "bad-signature") // publishes why
	for _, verb := range []string{"status", "trust show"} {
		if status, out := run(t, "sluice", append(strings.Fields(verb), "-store", w.store.String())...); status != 78 || !strings.Contains(out, "trust document 7 is missing") {
			t.Errorf("%s: exit status %d: %s", verb, status, out)
		}
	}
	w.must(os.WriteFile(link, kept, 0o644))
	w.roll()
	if r := w.result(); w.running() != "2" || r.Outcome != outcome.Applied {
		t.Errorf("runs %s: %+v", w.running(), r)
	}
	set, err := w.state().Trust()
	if err != nil || set.Number != rotations+1 {
		t.Errorf("trust document %d, %v", set.Number, err)
	}
	// What was handed on is gone once root has it.
	w.step("fetch once", 0, "")
	if left, _ := filepath.Glob(filepath.Join(w.state().Path(layout.Incoming), "trust-*.json")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// Another box, by the deployment file of the first day, and by a new one.
	again := filepath.Join(w.dir, "again.json")
	w.ok("sluice", "init", "-store", w.store.String(), "-key", last+".key", "-components", "edge=stable", "-o", again)
	for i, file := range []string{filepath.Join(w.dir, "deployment.json"), again} {
		b := &world{t: t, dir: w.dir, store: w.store, bucket: w.bucket, root: layout.Root(filepath.Join(w.dir, fmt.Sprint("box-", i)))}
		b.ok("sluice", "enroll", file, "-root", string(b.root), "-label", fmt.Sprint("more-", i))
		b.roll()
		if b.running() != "2" {
			t.Errorf("%s: runs %s", file, b.running())
		}
	}
}

// A box that has nothing else to do moves its trust all the same, and nothing of it
// rolls.
func TestTrustMovesAtRest(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	before, seen := w.result(), w.raw(pointerKey)
	alice, _ := w.keypair("alice")
	w.trustIs([]string{w.own(), alice}, []string{alice}, []string{"add", alice + ".pub"}, []string{"remove", w.own() + ".pub"})
	if string(w.raw(pointerKey)) == string(seen) {
		t.Error("the pointer was not signed anew")
	}
	w.unchanged(func() {
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.step("stage", 0, "has ended here already")
	}, "seen.json", "2.json")
	if set, err := w.state().Trust(); err != nil || set.Number != 2 {
		t.Errorf("trust document %d, %v", set.Number, err)
	}
	if r := w.result(); r != before {
		t.Errorf("%+v", r)
	}
	w.step("fetch once", 0, "")
	if _, err := os.Lstat(w.state().Path(layout.Fetched)); err == nil { // to let verify tidy up
		w.step("verify", 0, "nothing to ask for")
	}
	w.step("fetch once", 0, "")
	if _, err := os.Lstat(w.state().Path(layout.Fetched)); err == nil {
		t.Error("it asks again, with nothing to do")
	}
}

// The verbs that can't work say what to do, and change nothing.
func TestTrustVerbsRefuse(t *testing.T) {
	w := newWorld(t)
	alice, _ := w.keypair("alice")
	draft := filepath.Join(w.dir, "trust.json")
	at := []string{"-store", w.store.String(), "-o", draft}
	for line, c := range map[string]struct {
		status int
		says   string
	}{
		"trust":                       {2, "say what to do"},
		"trust add":                   {2, "say which key"},
		"trust add " + alice:          {78, "no such file"},
		"trust add " + alice + ".key": {78, `exactly one PEM block "PUBLIC KEY"`},
		"trust add " + alice + ".pub -family hint":      {2, "-family"},
		"trust add " + alice + ".pub -expires tomorrow": {2, "is no time to live"},
		"trust add " + alice + ".pub -expires 99999d":   {2, "at most"},
		"trust remove nobody":                           {78, "no such file"},
		"trust remove " + alice + ".pub":                {2, "counts for none"},
		"trust threshold":                               {2, "say how many"},
		"trust threshold x":                             {2, "no number"},
		"trust threshold 0":                             {2, "at least one"},
		"trust threshold 2":                             {2, "would need 2 signatures of 1 keys"},
	} {
		args := strings.Fields(line)
		if len(args) > 1 {
			args = append(args, at...)
		}
		status, out := run(t, "sluice", args...)
		if status != c.status || !strings.Contains(out, c.says) {
			t.Errorf("%s: exit status %d, want %d and %q: %s", line, status, c.status, c.says, out)
		}
		if _, err := os.Lstat(draft); err == nil {
			t.Fatalf("%s: left a draft", line)
		}
	}
	w.ok("sluice", append([]string{"trust", "add", alice + ".pub"}, at...)...)
	for line, c := range map[string]struct {
		status int
		says   string
	}{
		"trust sign " + draft + " -yes":                                                      {78, "say which key signs"},
		"trust sign nowhere -yes -key " + alice + ".key":                                     {78, "add, remove or threshold writes it"},
		"trust sign " + draft + " -key " + alice + ".key":                                    {2, "there is nobody to ask: add -yes"},
		"trust publish " + draft + " -yes -key " + alice + ".key -store " + w.store.String(): {1, "0 of the 1 signatures that a trust document needs are by keys of trust document 1"},
		"trust show " + w.own() + ".pub":                                                     {78, "reading an envelope"},
	} {
		before, err := os.ReadFile(draft)
		w.must(err)
		status, out := run(t, "sluice", strings.Fields(line)...)
		if status != c.status || !strings.Contains(out, c.says) {
			t.Errorf("%s: exit status %d, want %d and %q: %s", line, status, c.status, c.says, out)
		}
		after, err := os.ReadFile(draft)
		w.must(err)
		if string(before) != string(after) {
			t.Errorf("%s: changed the draft", line)
		}
		if strings.Contains(out, "PRIVATE") {
			t.Errorf("%s: %s", line, out)
		}
	}
	if out := w.ok("sluice", "trust", "show", draft); !strings.Contains(out, "trust document 2") || !strings.Contains(out, "signed by nobody yet") {
		t.Error(out)
	}
	if out := w.ok("sluice", "trust", "show", "-store", w.store.String(), "-json"); !strings.Contains(out, `"number": 1`) {
		t.Error(out)
	}
}

// What docs/operating.md tells to do is done, word for word.
func TestTheGuideOnKeys(t *testing.T) {
	guide, err := os.ReadFile("../../docs/operating.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, found := strings.Cut(string(guide), "## Keys: who may sign")
	text, _, ends := strings.Cut(text, "\n## ")
	if !found || !ends {
		t.Fatal("the chapter on keys is not where it was")
	}
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	for _, end := range []string{".key", ".pub"} {
		w.must(os.Link(w.own()+end, filepath.Join(w.dir, "operator"+end)))
	}
	w.keypair("alice")
	w.keypair("root")
	lines := 0
	for line := range strings.Lines(text) {
		command, ok := strings.CutPrefix(line, "    sluice ")
		if !ok {
			continue
		}
		command, _, _ = strings.Cut(command, "#")
		words := strings.Fields(command)
		if words[1] == "sign" || words[1] == "publish" {
			words = append(words, "-yes")
		}
		c := exec.Command(filepath.Join(bin, "sluice"), words...)
		c.Dir, c.Env = w.dir, []string{"PATH=" + os.Getenv("PATH"), "SLUICE_STORE=" + w.store.String()}
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("sluice %s: %v: %s", command, err, out)
		}
		lines++
	}
	set, err := fleet.Trust(t.Context(), w.store)
	if err != nil || set.Number != 2 || lines != 8 {
		t.Errorf("%d lines, document %d, %v", lines, set.Number, err)
	}
	// A deployment for new boxes is made by a key that counts, however many must sign.
	w.ok("sluice", "init", "-store", w.store.String(), "-key", filepath.Join(w.dir, "alice.key"), "-o", filepath.Join(w.dir, "new.json"))
}

// Enrolling again never takes a box back to an earlier trust document, whatever is
// damaged, and a new component begins where the others are.
func TestEnrollNeverGoesBack(t *testing.T) {
	w := newWorld(t)
	w.promote(w.bundle("1", script("1")))
	w.roll()
	alice, _ := w.keypair("alice")
	w.trustIs([]string{w.own(), alice}, []string{alice}, []string{"add", alice + ".pub"}, []string{"remove", w.own() + ".pub"})
	for _, p := range []string{"fetch once", "verify", "stage"} {
		w.step(p, 0, "")
	}
	deployment := filepath.Join(w.dir, "deployment.json") // of the first day
	enroll := func() (int, string) {
		return run(t, "sluice", "enroll", deployment, "-root", string(w.root), "-label", "box-1")
	}
	number := func() int { set, _ := w.state().Trust(); return set.Number }
	newest := w.root.TrustFile("edge", 2)
	w.must(os.WriteFile(newest, []byte("garbage"), 0o644))
	two := w.raw(contract.TrustKey(2))
	w.must(os.Remove(filepath.Join(w.bucket, contract.TrustKey(2))))
	if status, out := enroll(); status != 78 || !strings.Contains(out, "this box has accepted trust document 2") {
		t.Errorf("the store hides document 2: exit status %d: %s", status, out)
	}
	w.must(os.WriteFile(filepath.Join(w.bucket, contract.TrustKey(2)), two, 0o644))
	if status, out := enroll(); status != 0 || number() != 2 {
		t.Errorf("exit status %d, document %d: %s", status, number(), out)
	}
	// One of a version to come is left where it is.
	e, err := contract.Spoken.DecodeEnvelope(w.raw(contract.TrustKey(2)))
	w.must(err)
	e.Payload = []byte(strings.Replace(string(e.Payload), `"schema": "1.0"`, `"schema": "2.0"`, 1))
	w.must(os.WriteFile(newest, e.Encode(), 0o644))
	if status, out := enroll(); status == 0 || !strings.Contains(out, "unsupported major") {
		t.Errorf("exit status %d: %s", status, out)
	}
	if data, err := os.ReadFile(newest); err != nil || string(data) != string(e.Encode()) {
		t.Errorf("it is gone: %v", err)
	}
}

// A new box is not enrolled from a pointer that has expired.
func TestEnrollHeedsExpiry(t *testing.T) {
	w := newWorld(t)
	p := w.promote(filepath.Join(w.dir, "sluice.tar.zst"), "-expires", "1s")
	w.await("the pointer to expire", func() bool { return time.Now().After(p.Payload.ExpiresAt.Time) })
	root := filepath.Join(w.dir, "new")
	if status, out := run(t, "sluice", "enroll", filepath.Join(w.dir, "deployment.json"), "-root", root); status != 69 || !strings.Contains(out, "expired") {
		t.Errorf("exit status %d: %s", status, out)
	}
	w.ok("sluice", "refresh", "sluice", "-store", w.store.String(), "-key", w.own()+".key", "-expires", "1h")
	w.ok("sluice", "enroll", filepath.Join(w.dir, "deployment.json"), "-root", root)
}
