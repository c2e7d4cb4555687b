package hand

import (
	"bytes"
	"crypto/ed25519"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
	"sluice/test/suite"
)

// attacks are what TUF and Uptane list; docs/threat-model.md says of each what
// Sluice does, and names it. Each begins with a box that runs 1, from an S3 server
// that mallory stands in front of, and says what must run when it is over.
var attacks = map[string]func(w *world, m *mallory) (runs string){
	"arbitrary software": func(w *world, m *mallory) (runs string) {
		p := w.promote(w.bundle("2", script("2")))
		object := w.raw(p.Payload.Current.Artifacts[contract.Here()].Key)
		m.answers(on("/bootstrap/", with(bytes.Repeat([]byte("evil"), len(object)/4+1)[:len(object)])))
		w.step("fetch once", 69, string(outcome.DigestMismatch))
		_, theirs := w.keypair("mallory")
		forged := trust.Sign(contract.PointerLadder, w.evil(p).Encode(), theirs)
		m.answers(on(pointerKey, with(forged.Encode())))
		w.step("fetch once", 1, string(outcome.BadSignature))
		// The name of the operator's key, and not its signature.
		forged.Signatures[0].KeyID = trust.KeyID(w.key.Public().(ed25519.PublicKey))
		m.answers(on(pointerKey, with(forged.Encode())))
		w.step("fetch once", 1, string(outcome.BadSignature))
		// A captured fetch and verify put it before root's feet.
		w.must(os.WriteFile(w.state().Path(layout.Pointer), forged.Encode(), 0o640))
		w.step("verify", 1, string(outcome.BadSignature))
		w.asks("evil", w.evil(p).PromotedAt, false)
		w.step("stage", 1, string(outcome.BadSignature))
		w.must(os.Remove(w.state().Path(layout.Hint)))
		w.must(os.Remove(w.state().Path(layout.Pointer)))
		// The right pointer, and a tree that verify never saw.
		m.answers(nil)
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.must(os.WriteFile(filepath.Join(w.root.Tree("edge", "2"), "bin/edge"), []byte(strings.Replace(script("2"), "edge", "evil", 1)), 0o640))
		w.step("stage", 69, string(outcome.DigestMismatch))
		return "1"
	},
	"rollback": func(w *world, m *mallory) (runs string) {
		old := w.raw(pointerKey)
		p, err := contract.Spoken.DecodePointer(mustPayload(w, old))
		w.must(err)
		w.promote(w.bundle("2", script("2")))
		w.roll()
		m.answers(on(pointerKey, with(old)))
		w.step("fetch once", 0, "") // seen before: passed over without a word
		w.must(os.WriteFile(w.state().Path(layout.Pointer), old, 0o640))
		w.step("verify", 1, string(outcome.Replay))
		w.asks("1", p.PromotedAt, false)
		w.unchanged(func() { w.step("stage", 1, string(outcome.Replay)) })
		w.holds("2")
		// Nor when the box has lost what it had seen.
		w.must(os.WriteFile(w.state().Path(layout.Seen), []byte("garbage"), 0o644))
		w.step("stage", 1, string(outcome.Replay))
		w.holds("2")
		// Or its operator wants to: a rollback is a promote.
		m.answers(nil)
		w.ok("sluice", "rollback", "edge", "-store", w.store.String(), "-key", w.own()+".key", "-yes")
		w.roll()
		return "1"
	},
	"fast-forward": func(w *world, m *mallory) (runs string) {
		// The key is stolen: a promote from a time that no other will ever be after.
		p := w.promote(w.bundle("2", script("2")))
		p.PromotedAt = contract.At(time.Now().AddDate(70, 0, 0))
		w.put(pointerKey, trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())
		w.roll()
		if w.running() != "2" || w.result().PromotedAt.Year() < 2090 {
			w.t.Fatalf("the attack did not come about: %+v", w.result())
		}
		alice, _ := w.keypair("alice")
		w.trustIs([]string{w.own(), alice}, []string{alice}, []string{"add", alice + ".pub"}, []string{"remove", w.own() + ".pub"})
		three := w.bundle("3", script("3"))
		promote := []string{"update", "-store", w.store.String(), "-key", alice + ".key", "-file", three, "-yes"}
		if status, out := run(w.t, "sluice", promote...); status != 1 || !strings.Contains(out, "-replace") {
			w.t.Errorf("over the thief's pointer: exit status %d: %s", status, out)
		}
		w.ok("sluice", append(promote, "-replace")...)
		w.roll()
		if w.running() != "3" || w.result().PromotedAt.After(time.Now()) || w.result().Outcome != outcome.Applied {
			w.t.Errorf("runs %s: %+v", w.running(), w.result())
		}
		seen, _, err := record.Load[contract.Seen](w.state(), layout.Seen)
		w.must(err)
		if water := seen.Channels["stable"]; !water.PromotedAt.Equal(w.result().PromotedAt.Time) || water.Trust != 2 {
			w.t.Errorf("the watermark is %+v", water)
		}
		// What the stolen key signed counts no more.
		m.answers(on(pointerKey, with(trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())))
		w.step("fetch once", 1, string(outcome.BadSignature))
		m.answers(nil)
		w.trustIs([]string{alice, w.own()}, []string{alice}, []string{"add", w.own() + ".pub"}) // found again
		return "3"
	},
	"indefinite freeze": func(w *world, m *mallory) (runs string) {
		p := w.promote(w.bundle("2", script("2")), "-expires", "1s")
		frozen := w.raw(pointerKey)
		w.await("the pointer to expire", func() bool { return time.Now().After(p.Payload.ExpiresAt.Time) })
		w.promote(w.bundle("3", script("3")), "-expires", "36h")
		w.step("fetch once", 0, "") // publishes
		if status, out := run(w.t, "sluice", "status", "-store", w.store.String(), "-check"); status != 1 || !strings.Contains(out, "the pointer of edge on stable expires in") {
			w.t.Errorf("status: exit status %d: %s", status, out)
		}
		m.answers(on(pointerKey, with(frozen)))
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.step("stage", 69, string(outcome.Expired))
		if r := w.result(); r.Outcome != outcome.Deferred || r.Word() != outcome.Expired {
			w.t.Errorf("%+v", r)
		}
		w.step("fetch once", 0, "") // publishes it
		if out := w.ok("sluice", "status", "-store", w.store.String()); !strings.Contains(out, "waiting") {
			w.t.Error(out)
		}
		w.holds("1") // which runs on
		// The document that says who may sign expires as well.
		m.answers(nil)
		last := w.promote(w.bundle("4", script("4")))
		doc := trust.NewDocument(contract.At(time.Now()), w.key.Public().(ed25519.PublicKey))
		doc.Payload.Number, doc.Payload.ExpiresAt = 2, contract.At(time.Now().Add(-time.Second))
		w.put(contract.TrustKey(2), trust.Sign(contract.TrustLadder, doc.Encode(), w.key).Encode())
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.step("stage", 69, "trust document 2 expired")
		w.holds("1")
		if status, out := run(w.t, "sluice", "rollback", "edge", "-store", w.store.String(), "-key", w.own()+".key", "-yes"); status != 78 || !strings.Contains(out, "trust document 2 expired") {
			w.t.Errorf("a promote that no box would take: exit status %d: %s", status, out)
		}
		w.step("fetch once", 0, "") // goes on telling
		w.trustIs([]string{w.own()}, []string{w.own()}, []string{"threshold", "1", "-expires", "0"})
		// A refresh is no promote; the box takes up what it waited for.
		w.ok("sluice", "refresh", "edge", "-store", w.store.String(), "-key", w.own()+".key", "-expires", "72h")
		w.roll()
		if r := w.result(); r.Outcome != outcome.Applied || !r.PromotedAt.Equal(last.PromotedAt.Time) || r.Version != "4" {
			w.t.Errorf("%+v", r)
		}
		if out := w.ok("sluice", "refresh", "-store", w.store.String(), "-key", w.own()+".key"); strings.Count(out, "expires at") != 1 || !strings.Contains(out, "edge 4 on stable") {
			w.t.Error(out)
		}
		before := w.result()
		w.roll()
		if r := w.result(); r != before {
			w.t.Errorf("a refresh rolled: %+v", r)
		}
		return "4"
	},
	"endless data": func(w *world, m *mallory) (runs string) {
		p := w.promote(w.bundle("2", script("2")))
		for _, part := range []string{pointerKey, "/control/trust/2.json"} {
			m.answers(on(part, m.endless))
			if status, out := run(w.t, "fetch", "once", "-root", string(w.root)); status == 0 {
				w.t.Errorf("%s without an end: %s", part, out)
			}
			w.asks("2", p.PromotedAt, false)
			w.step("stage", 69, string(outcome.Store))
			w.must(os.Remove(w.state().Path(layout.Hint)))
			const buffers = 16 << 20 // of sockets and of HTTP, for each try
			m.mu.Lock()
			if m.wrote == 0 || m.wrote > 4*buffers {
				w.t.Errorf("%s without an end: %d bytes were taken", part, m.wrote)
			}
			m.mu.Unlock()
		}
		m.answers(on("/bootstrap/", m.endless))
		if status, out := run(w.t, "fetch", "once", "-root", string(w.root)); status != 69 {
			w.t.Errorf("an object without an end: exit status %d: %s", status, out)
		}
		for path, data := range w.tree(layout.DataOf) {
			if int64(len(data)) > max(contract.MaxEnvelope, p.Payload.Current.Artifacts[contract.Here()].Size+1) {
				w.t.Errorf("%s has %d bytes", path, len(data))
			}
		}
		m.answers(nil)
		return "1"
	},
	"slow retrieval": func(w *world, m *mallory) (runs string) {
		p := w.promote(w.bundle("2", script("2")))
		size := p.Payload.Current.Artifacts[contract.Here()].Size
		gone := make(chan struct{})
		m.answers(on("/bootstrap/", func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("ETag", `"mallory"`)
			rw.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
			rw.Header().Set("Content-Length", fmt.Sprint(size))
			rw.WriteHeader(http.StatusOK)
			rw.(http.Flusher).Flush()
			<-r.Context().Done() // not one byte: less than the slowest that is put up with
			close(gone)
		}))
		w.step("fetch once", 69, "the body came slower than")
		<-gone
		m.answers(nil)
		return "1"
	},
	"extraneous dependencies": func(w *world, m *mallory) (runs string) {
		// The release says that it needs something this box never asked for; it is
		// signed, and in the store.
		evil := w.evil(w.promote(w.bundle("2", script("2"))))
		evil.Component, evil.Payload.History = "evil", []contract.Release{}
		evil.Payload.Current.Artifacts = map[contract.Platform]contract.Artifact{}
		w.put("control/system/evil/stable.json", trust.Sign(contract.PointerLadder, evil.Encode(), w.key).Encode())
		w.craft("3", func(m *contract.Manifest, _ *[]entry) {
			m.Needs = map[contract.Component]contract.Version{"evil": "evil"}
		})
		m.answers(nil)
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		w.step("stage", 69, string(outcome.Needs))
		w.step("fetch once", 0, "")
		for _, r := range m.requests() {
			if strings.Contains(r, "evil") {
				w.t.Errorf("the box asked for it: %s", r)
			}
		}
		return "1"
	},
	"mix-and-match": func(w *world, m *mallory) (runs string) {
		// What was never released together: the pointer of one channel on another, the
		// object of one version under the key of another, files of one in the tree of
		// another, the trust of another deployment.
		one := w.raw(w.current().Key)
		canary := w.promote(w.bundle("canary", script("canary")), "-channel", "canary")
		m.answers(on(pointerKey, with(w.raw("control/system/edge/canary.json"))))
		w.step("fetch once", 1, string(outcome.WrongChannel))
		w.asks("canary", canary.PromotedAt, false)
		w.step("stage", 1, string(outcome.WrongChannel))
		w.must(os.Remove(w.state().Path(layout.Hint)))
		w.promote(w.bundle("2", script("2")))
		m.answers(on("/bootstrap/edge/2/", with(one)))
		w.step("fetch once", 69, string(outcome.DigestMismatch))
		m.answers(nil)
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		program, err := os.ReadFile(filepath.Join(w.state().Set("1"), "bin/edge"))
		w.must(err)
		w.must(os.WriteFile(filepath.Join(w.root.Tree("edge", "2"), "bin/edge"), program, 0o640))
		w.step("stage", 69, string(outcome.DigestMismatch))
		manifest, err := os.ReadFile(filepath.Join(w.state().Set("1"), contract.ManifestName))
		w.must(err)
		w.must(os.WriteFile(filepath.Join(w.root.Tree("edge", "2"), contract.ManifestName), manifest, 0o640))
		w.step("stage", 69, string(outcome.DigestMismatch))
		_, other := w.keypair("elsewhere")
		doc := trust.NewDocument(contract.At(time.Now()), other.Public().(ed25519.PublicKey))
		doc.Payload.Number = 2
		m.answers(on("/control/trust/2.json", with(trust.Sign(contract.TrustLadder, doc.Encode(), other).Encode())))
		w.step("fetch once", 1, "trust document 2: "+string(outcome.BadSignature))
		w.step("stage", 1, "trust document 2: "+string(outcome.BadSignature))
		return "1"
	},
	"wrong software": func(w *world, m *mallory) (runs string) {
		// Signed, and for somebody else: another component, another platform.
		m.answers(on(pointerKey, with(w.raw("control/system/sluice/stable.json"))))
		w.step("fetch once", 1, string(outcome.WrongComponent))
		w.asks("0", contract.At(time.Now()), false)
		w.step("stage", 1, string(outcome.WrongComponent))
		w.must(os.Remove(w.state().Path(layout.Hint)))
		m.answers(nil)
		w.craft("plan9", func(m *contract.Manifest, _ *[]entry) { m.Platform = "plan9-mips" })
		w.step("fetch once", 0, "")
		w.step("verify", 1, string(outcome.BadBundle))
		p := w.promote(w.bundle("2", script("2")))
		p.Payload.Current.Artifacts = map[contract.Platform]contract.Artifact{"plan9-mips": p.Payload.Current.Artifacts[contract.Here()]}
		p.PromotedAt = contract.At(p.PromotedAt.Add(1))
		w.put(pointerKey, trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())
		w.step("fetch once", 0, "")
		w.asks("2", p.PromotedAt, false)
		w.step("stage", 1, string(outcome.NoArtifact))
		return "1"
	},
	"malicious mirror": func(w *world, m *mallory) (runs string) {
		w.promote(w.bundle("2", script("2")))
		for name, rule := range map[string]func(http.ResponseWriter, *http.Request) bool{
			"nothing is there":     func(w http.ResponseWriter, _ *http.Request) bool { http.NotFound(w, nil); return true },
			"garbage for all":      func(w http.ResponseWriter, r *http.Request) bool { with([]byte("evil"))(w, r); return true },
			"it denies everything": func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusForbidden); return true },
			"somewhere else": func(w http.ResponseWriter, r *http.Request) bool {
				http.Redirect(w, r, "http://127.0.0.1:1/evil", http.StatusFound)
				return true
			},
			"not modified, always": func(w http.ResponseWriter, _ *http.Request) bool { w.WriteHeader(http.StatusNotModified); return true },
		} {
			m.answers(rule)
			if said := w.pipeline(); w.running() != "1" {
				w.t.Errorf("%s: runs %s: %s", name, w.running(), said)
			}
		}
		m.answers(nil)
		w.roll() // at once, when it is honest again
		if w.running() != "2" {
			w.t.Errorf("runs %s", w.running())
		}
		return "2"
	},
	"key compromise below the threshold": func(w *world, m *mallory) (runs string) {
		alice, stolen := w.keypair("alice")
		bob, _ := w.keypair("bob")
		w.trustIs([]string{w.own(), alice, bob}, []string{alice, bob},
			[]string{"add", alice + ".pub"}, []string{"add", bob + ".pub"}, []string{"remove", w.own() + ".pub"}, []string{"threshold", "2"})
		w.roll() // its trust moves, with nothing else to do
		if set, err := w.state().Trust(); err != nil || set.Number != 2 {
			w.t.Fatalf("trust document %d, %v", set.Number, err)
		}
		p, err := contract.Spoken.DecodePointer(mustPayload(w, w.raw(pointerKey)))
		w.must(err)
		evil := w.evil(p)
		once := trust.Sign(contract.PointerLadder, evil.Encode(), stolen)
		twice := trust.Sign(contract.PointerLadder, evil.Encode(), stolen, stolen)
		former := trust.Sign(contract.PointerLadder, evil.Encode(), stolen, w.key)
		for name, e := range map[string]contract.Envelope{"one of two": once, "the same twice": twice, "and one that counts no more": former} {
			m.answers(on(pointerKey, with(e.Encode())))
			w.step("fetch once", 1, string(outcome.BadSignature))
			w.asks("evil", evil.PromotedAt, false)
			w.step("stage", 1, string(outcome.BadSignature))
			if w.t.Failed() {
				w.t.Fatal(name)
			}
		}
		// One key can't make itself enough.
		doc := trust.NewDocument(contract.At(time.Now()), stolen.Public().(ed25519.PublicKey))
		doc.Payload.Number = 3
		m.answers(on("/control/trust/3.json", with(trust.Sign(contract.TrustLadder, doc.Encode(), stolen).Encode())))
		w.step("fetch once", 1, "trust document 3: "+string(outcome.BadSignature))
		w.step("stage", 1, "trust document 3: "+string(outcome.BadSignature))
		m.answers(nil)
		w.must(os.Remove(w.state().Path(layout.Hint)))
		w.ok("sluice", "update", "-store", w.store.String(), "-key", alice+".key", "-key", bob+".key", "-file", w.bundle("2", script("2")), "-yes")
		w.roll()
		if w.running() != "2" {
			w.t.Errorf("runs %s", w.running())
		}
		w.trustIs([]string{alice, bob}, []string{alice, bob}, []string{"add", w.own() + ".pub"}, []string{"threshold", "1"})
		return "2"
	},
	"partial bundle": func(w *world, m *mallory) (runs string) {
		// A part of a release is withheld: of its object, of its archive, of what it
		// needs beside it.
		p := w.promote(w.bundle("2", script("2")))
		object := w.raw(p.Payload.Current.Artifacts[contract.Here()].Key)
		m.answers(on("/bootstrap/", func(rw http.ResponseWriter, r *http.Request) {
			rw.Header().Set("Content-Length", fmt.Sprint(len(object)))
			with(object[:len(object)/2])(rw, r)
		}))
		w.step("fetch once", 69, string(outcome.Store))
		w.unchanged(func() { w.step("verify", 0, "") })
		m.answers(nil)
		w.craft("3", func(_ *contract.Manifest, e *[]entry) { *e = nil })
		w.step("fetch once", 0, "")
		w.step("verify", 1, string(outcome.BadBundle))
		w.craft("4", func(m *contract.Manifest, _ *[]entry) {
			m.Needs = map[contract.Component]contract.Version{"sluice": "1"}
		})
		m.answers(on("/control/system/sluice/", func(w http.ResponseWriter, r *http.Request) { http.NotFound(w, r) }))
		w.pipeline()
		if r := w.result(); r.Outcome != outcome.Deferred || r.Word() != outcome.Needs {
			w.t.Errorf("%+v", r)
		}
		m.answers(nil)
		return "1"
	},
	"drop request": func(w *world, m *mallory) (runs string) {
		w.promote(w.bundle("2", script("2")))
		m.answers(func(w http.ResponseWriter, r *http.Request) bool { suite.CutOff(w); return true })
		for range 2 {
			if status, out := run(w.t, "fetch", "once", "-root", string(w.root)); status == 0 {
				w.t.Errorf("every request is dropped: %s", out)
			}
		}
		w.holds("1")
		// Only the writes: the box rolls all the same; what it says is not heard.
		m.answers(func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method != http.MethodPut {
				return false
			}
			suite.CutOff(w)
			return true
		})
		w.pipeline()
		if w.running() != "2" {
			w.t.Errorf("runs %s", w.running())
		}
		return "2"
	},
	"replay of nothing to do": func(w *world, m *mallory) (runs string) {
		// The bell never rings, and says nothing new for ever: a fetch that starts looks
		// at the pointers all the same, as it does once an hour.
		w.step("fetch once", 0, "")
		p := w.promote(w.bundle("2", script("2")))
		m.answers(on("/control/serial", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotModified) }))
		c := exec.CommandContext(w.t.Context(), filepath.Join(bin, "fetch"), "watch", "-root", string(w.root))
		c.Env = []string{"PATH=" + os.Getenv("PATH"), "AWS_ACCESS_KEY_ID=" + s3User, "AWS_SECRET_ACCESS_KEY=" + s3Secret}
		w.must(c.Start())
		w.await("fetch to ask", func() bool { _, err := os.Lstat(w.state().Path(layout.Fetched)); return err == nil })
		w.must(c.Process.Signal(os.Interrupt))
		_ = c.Wait()
		w.step("verify", 0, "")
		// A captured verify says that there is nothing to do, again and again.
		w.asks("2", p.PromotedAt, true)
		w.step("stage", 69, string(outcome.StaleHint))
		w.asks("1", mustApplied(w).PromotedAt, true)
		w.step("stage", 0, string(outcome.StaleHint))
		w.holds("1")
		w.must(os.Remove(w.state().Path(layout.Hint)))
		m.answers(nil)
		return "1"
	},
}

func TestAttacks(t *testing.T) {
	gateway := os.Getenv("VERSITYGW")
	if gateway == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	buckets := t.TempDir()
	address := serveS3(t, gateway, buckets)
	n := 0
	for name, attack := range attacks {
		n++
		bucket := fmt.Sprint("bucket-", n)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w, m := intercepted(t, buckets, address, bucket)
			w.promote(w.bundle("1", script("1")))
			w.roll()
			w.holds("1")
			w.holds(attack(w, m))
			// When it is over, the box takes the next honest promote.
			m.answers(nil)
			w.promote(w.bundle("after", script("after")))
			w.pipeline()
			w.holds("after")
		})
	}
}
