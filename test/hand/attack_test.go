package hand

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/ed25519"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// A mallory stands between a box and the real S3 server, and answers as it
// likes.
type mallory struct {
	*httptest.Server
	proxy http.Handler // to the server
	mu    sync.Mutex
	rule  func(w http.ResponseWriter, r *http.Request) bool // reports whether it has answered
	asked []string
	wrote int64 // bytes that its own answers had taken off them
}

func newMallory(t *testing.T, gateway string) *mallory {
	t.Helper()
	m := &mallory{}
	m.proxy = &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: gateway})
		r.Out.Host = r.In.Host // it is part of what is signed
	}}
	m.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		m.asked = append(m.asked, r.Method+" "+r.URL.Path)
		rule := m.rule
		m.mu.Unlock()
		if rule == nil || !rule(w, r) {
			m.proxy.ServeHTTP(w, r)
		}
	}))
	t.Cleanup(m.Close)
	return m
}

// answers makes mallory answer by a rule from now on; nil: honestly.
func (m *mallory) answers(rule func(w http.ResponseWriter, r *http.Request) bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rule, m.asked, m.wrote = rule, nil, 0
}

func (m *mallory) requests() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.asked)
}

// on answers the reads of keys that contain a part.
func on(part string, answer http.HandlerFunc) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, part) {
			return false
		}
		answer(w, r)
		return true
	}
}

func with(data []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("ETag", `"mallory"`)
		w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		_, _ = w.Write(data)
	}
}

// endless answers with bytes that never end, as fast as they are taken.
func (m *mallory) endless(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("ETag", `"mallory"`)
	w.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
	chunk := bytes.Repeat([]byte(" "), 32<<10)
	for {
		n, err := w.Write(chunk)
		m.mu.Lock()
		m.wrote += int64(n)
		m.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func cutOff(w http.ResponseWriter, _ *http.Request) {
	if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
		conn.Close()
	}
}

const pointerOfEdge = "/control/system/edge/stable.json"

// raw is what the store has under a key.
func (w *world) raw(key string) []byte {
	w.t.Helper()
	o, err := w.store.Get(context.Background(), key, contract.MaxEnvelope, "")
	w.must(err)
	return o.Data
}

func (w *world) put(key string, data []byte) {
	w.t.Helper()
	_, err := store.PutBytes(context.Background(), w.store, key, data, store.Condition{})
	w.must(err)
}

// asks writes a hint, as a captured verify could at any time.
func (w *world) asks(version contract.Version, at contract.Time, noop bool) {
	w.t.Helper()
	h := contract.Hint{Schema: contract.One, Version: version, PromotedAt: at, Noop: noop, SeenAt: at}
	w.must(os.WriteFile(w.state().Path(layout.Hint), h.Encode(), 0o640))
}

// pipeline runs all four programs once, however they end, and returns what they
// say.
func (w *world) pipeline() string {
	w.t.Helper()
	_, said := run(w.t, "fetch", "once", "-root", string(w.root))
	for _, p := range []string{"verify", "stage", "apply"} {
		_, out := w.box(p)
		said += out
	}
	return said
}

// holds checks that an attack has brought nothing onto the box, and that it ends
// with the next honest promote.
func (w *world) holds(version string) {
	w.t.Helper()
	if w.running() != version || string(mustApplied(w).Version) != version {
		w.t.Errorf("runs %s, %s is recorded", w.running(), mustApplied(w).Version)
	}
	for path, text := range w.tree(layout.Sets, "/etc") {
		if strings.Contains(path, "evil") || strings.Contains(text, "evil") {
			w.t.Errorf("%s is of the attacker", path)
		}
	}
}

// evil is a release that nobody but the attacker wants, mirrored to the store.
func (w *world) evil(p contract.Pointer) contract.Pointer {
	w.t.Helper()
	program := "#!/bin/sh\necho edge evil\n"
	m := contract.Manifest{Schema: contract.One, Component: "edge", Version: "evil", Platform: contract.Here(), VersionCommand: []string{"bin/edge"},
		Files: []contract.File{{Path: "bin/edge", Mode: 0o755, Size: int64(len(program)), SHA256: record.Sum([]byte(program))}}, Gate: contract.Gate{Soak: 1e6}}
	manifest := m.Encode()
	var raw bytes.Buffer
	out := tar.NewWriter(&raw)
	for name, data := range map[string]string{contract.ManifestName: string(manifest)} {
		w.must(out.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(data))}))
		_, err := io.WriteString(out, data)
		w.must(err)
	}
	w.must(out.WriteHeader(&tar.Header{Name: "bin/edge", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))}))
	_, err := io.WriteString(out, program)
	w.must(err)
	w.must(out.Close())
	object := compress(w.t, raw.Bytes())
	key := contract.BootstrapKey("edge", "evil", "bundle.tar.zst")
	w.put(key, object)
	p.Payload.History = append([]contract.Release{p.Payload.Current}, p.Payload.History...)
	p.Payload.Current = contract.Release{Version: "evil", Source: "file", ReleasedAt: p.PromotedAt, Artifacts: map[contract.Platform]contract.Artifact{
		contract.Here(): {Key: key, Size: int64(len(object)), SHA256: record.Sum(object), TarSize: int64(raw.Len()), ManifestSHA256: record.Sum(manifest)}}}
	p.PromotedAt = contract.At(p.PromotedAt.Add(time.Second))
	return p
}

// keypair makes a key with the command.
func (w *world) keypair(name string) (file string, key ed25519.PrivateKey) {
	w.t.Helper()
	file = filepath.Join(w.dir, name)
	w.ok("sluice", "keygen", "-o", file)
	key, err := fleet.PrivateKey(file + ".key")
	w.must(err)
	return file, key
}

// trustIs makes, signs and publishes the next trust document, as an operator
// would: each edit is the words after `sluice trust`.
func (w *world) trustIs(signers, pointers []string, edits ...[]string) {
	w.t.Helper()
	draft := filepath.Join(w.dir, "trust.json")
	_ = os.Remove(draft)
	for _, e := range edits {
		w.ok("sluice", append(append([]string{"trust"}, e...), "-store", w.store.String(), "-o", draft)...)
	}
	for _, s := range signers { // each on a machine of its own, without a store
		w.ok("sluice", "trust", "sign", draft, "-key", s+".key", "-yes")
	}
	publish := []string{"trust", "publish", draft, "-store", w.store.String(), "-yes"}
	for _, p := range pointers {
		publish = append(publish, "-key", p+".key")
	}
	w.ok("sluice", publish...)
}

func (w *world) own() string { return filepath.Join(w.dir, "key") } // of the deployment

// attacks are what TUF and Uptane list; docs/threat-model.md says of each what
// Sluice does, and names it. Each begins with a box that runs 1, from an S3 server
// that mallory stands in front of.
var attacks = map[string]func(w *world, m *mallory){
	"arbitrary software": func(w *world, m *mallory) {
		p := w.promote(w.bundle("2", script("2")))
		object := w.raw(p.Payload.Current.Artifacts[contract.Here()].Key)
		m.answers(on("/bootstrap/", with(bytes.Repeat([]byte("evil"), len(object)/4+1)[:len(object)])))
		w.step("fetch once", 69, string(outcome.DigestMismatch))
		_, theirs := w.keypair("mallory")
		forged := trust.Sign(contract.PointerLadder, w.evil(p).Encode(), theirs)
		m.answers(on(pointerOfEdge, with(forged.Encode())))
		w.step("fetch once", 1, string(outcome.BadSignature))
		// The name of the operator's key, and not its signature.
		forged.Signatures[0].KeyID = trust.KeyID(w.key.Public().(ed25519.PublicKey))
		m.answers(on(pointerOfEdge, with(forged.Encode())))
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
	},
	"rollback": func(w *world, m *mallory) {
		old := w.raw("control/system/edge/stable.json")
		p, err := contract.Spoken.DecodePointer(mustPayload(w, old))
		w.must(err)
		w.promote(w.bundle("2", script("2")))
		w.roll()
		m.answers(on(pointerOfEdge, with(old)))
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
	},
	"fast-forward": func(w *world, m *mallory) {
		// The key is stolen: a promote from a time that no other will ever be after.
		p := w.promote(w.bundle("2", script("2")))
		p.PromotedAt = contract.At(time.Now().AddDate(70, 0, 0))
		w.put("control/system/edge/stable.json", trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())
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
		m.answers(on(pointerOfEdge, with(trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())))
		w.step("fetch once", 1, string(outcome.BadSignature))
		m.answers(nil)
		w.ok("sluice", "rollback", "edge", "-h") // the command is whole
		w.trustIs([]string{alice, w.own()}, []string{alice}, []string{"add", w.own() + ".pub"})
		w.promote(w.bundle("1b", script("1b")))
		w.roll()
		if w.running() != "1b" {
			w.t.Errorf("runs %s", w.running())
		}
		w.promote(w.bundle("1c", script("1c")))
		w.roll()
	},
	"indefinite freeze": func(w *world, m *mallory) {
		p := w.promote(w.bundle("2", script("2")), "-expires", "1s")
		frozen := w.raw("control/system/edge/stable.json")
		w.until(p.Payload.ExpiresAt.Time)
		w.promote(w.bundle("3", script("3")), "-expires", "36h")
		if status, out := run(w.t, "sluice", "status", "-store", w.store.String(), "-check"); status != 1 || !strings.Contains(out, "the pointer of edge on stable expires in") {
			w.t.Errorf("status: exit status %d: %s", status, out)
		}
		m.answers(on(pointerOfEdge, with(frozen)))
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
		alice, _ := w.keypair("alice")
		m.answers(nil)
		w.trustIs([]string{w.own()}, []string{w.own()}, []string{"add", alice + ".pub", "-expires", "2s"})
		p = w.promote(w.bundle("4", script("4")))
		w.step("fetch once", 0, "")
		w.step("verify", 0, "")
		doc := w.document(2)
		w.until(doc.Payload.ExpiresAt.Time)
		w.step("stage", 69, "trust document 2 expired")
		w.holds("1")
		if status, out := run(w.t, "sluice", "rollback", "edge", "-store", w.store.String(), "-key", w.own()+".key", "-yes"); status != 78 || !strings.Contains(out, "trust document 2 expired") {
			w.t.Errorf("a promote that no box would take: exit status %d: %s", status, out)
		}
		w.step("fetch once", 0, "") // goes on telling
		w.trustIs([]string{w.own()}, []string{w.own()}, []string{"remove", alice + ".pub", "-expires", "0"})
		// A refresh is no promote; the box takes up what it waited for.
		w.ok("sluice", "refresh", "edge", "-store", w.store.String(), "-key", w.own()+".key", "-expires", "72h")
		w.roll()
		if r := w.result(); r.Outcome != outcome.Applied || !r.PromotedAt.Equal(p.PromotedAt.Time) || r.Version != "4" {
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
	},
	"endless data": func(w *world, m *mallory) {
		p := w.promote(w.bundle("2", script("2")))
		for _, part := range []string{pointerOfEdge, "/control/trust/2.json"} {
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
	},
	"slow retrieval": func(w *world, m *mallory) {
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
	},
	"extraneous dependencies": func(w *world, m *mallory) {
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
	},
	"mix-and-match": func(w *world, m *mallory) {
		// What was never released together: the pointer of one channel on another, the
		// object of one version under the key of another, files of one in the tree of
		// another, the trust of another deployment.
		one := w.raw(mustApplied1(w).Key)
		canary := w.promote(w.bundle("canary", script("canary")), "-channel", "canary")
		m.answers(on(pointerOfEdge, with(w.raw("control/system/edge/canary.json"))))
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
	},
	"wrong software": func(w *world, m *mallory) {
		// Signed, and for somebody else: another component, another platform.
		m.answers(on(pointerOfEdge, with(w.raw("control/system/sluice/stable.json"))))
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
		w.put("control/system/edge/stable.json", trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())
		w.step("fetch once", 0, "")
		w.asks("2", p.PromotedAt, false)
		w.step("stage", 1, string(outcome.NoArtifact))
	},
	"malicious mirror": func(w *world, m *mallory) {
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
		w.promote(w.bundle("1", script("1")))
		w.roll()
	},
	"key compromise below the threshold": func(w *world, m *mallory) {
		alice, stolen := w.keypair("alice")
		bob, _ := w.keypair("bob")
		w.trustIs([]string{w.own(), alice, bob}, []string{alice, bob},
			[]string{"add", alice + ".pub"}, []string{"add", bob + ".pub"}, []string{"remove", w.own() + ".pub"}, []string{"threshold", "2"})
		w.roll() // its trust moves, with nothing else to do
		if set, err := w.state().Trust(); err != nil || set.Number != 2 {
			w.t.Fatalf("trust document %d, %v", set.Number, err)
		}
		p, err := contract.Spoken.DecodePointer(mustPayload(w, w.raw("control/system/edge/stable.json")))
		w.must(err)
		evil := w.evil(p)
		once := trust.Sign(contract.PointerLadder, evil.Encode(), stolen)
		twice := trust.Sign(contract.PointerLadder, evil.Encode(), stolen, stolen)
		former := trust.Sign(contract.PointerLadder, evil.Encode(), stolen, w.key)
		for name, e := range map[string]contract.Envelope{"one of two": once, "the same twice": twice, "and one that counts no more": former} {
			m.answers(on(pointerOfEdge, with(e.Encode())))
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
		w.promote(w.bundle("1", script("1")))
		w.roll()
	},
	"partial bundle": func(w *world, m *mallory) {
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
	},
	"drop request": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")))
		m.answers(func(w http.ResponseWriter, r *http.Request) bool { cutOff(w, r); return true })
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
			cutOff(w, r)
			return true
		})
		w.pipeline()
		if w.running() != "2" {
			w.t.Errorf("runs %s", w.running())
		}
		m.answers(nil)
		w.promote(w.bundle("1", script("1")))
		w.roll()
	},
	"replay of nothing to do": func(w *world, m *mallory) {
		// The bell never rings, and says nothing new for ever: a fetch that starts looks
		// at the pointers all the same, as it does once an hour.
		w.step("fetch once", 0, "")
		p := w.promote(w.bundle("2", script("2")))
		m.answers(on("/control/serial", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotModified) }))
		c := exec.CommandContext(w.t.Context(), filepath.Join(bin, "fetch"), "watch", "-root", string(w.root))
		c.Env = []string{"PATH=" + os.Getenv("PATH"), "AWS_ACCESS_KEY_ID=" + s3User, "AWS_SECRET_ACCESS_KEY=" + s3Secret}
		w.must(c.Start())
		for { // until the test's own end
			if _, err := os.Lstat(w.state().Path(layout.Fetched)); err == nil {
				break
			}
			if w.t.Context().Err() != nil {
				w.t.Fatal("fetch never asked")
			}
			time.Sleep(10 * time.Millisecond)
		}
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
	},
}

// until waits for a time to have come.
func (w *world) until(t time.Time) {
	w.t.Helper()
	select {
	case <-time.After(time.Until(t) + time.Millisecond):
	case <-w.t.Context().Done():
		w.t.Fatal("the test has no time left")
	}
}

func (w *world) document(n int) contract.Trust {
	w.t.Helper()
	d, err := contract.Spoken.DecodeTrust(mustPayload(w, w.raw(contract.TrustKey(n))))
	w.must(err)
	return d
}

func mustPayload(w *world, data []byte) []byte {
	w.t.Helper()
	e, err := contract.Spoken.DecodeEnvelope(data)
	w.must(err)
	return e.Payload
}

// mustApplied1 is the artifact of the channel's current release.
func mustApplied1(w *world) contract.Artifact {
	w.t.Helper()
	p, err := contract.Spoken.DecodePointer(mustPayload(w, w.raw("control/system/edge/stable.json")))
	w.must(err)
	return p.Payload.Current.Artifacts[contract.Here()]
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
			w := &world{t: t, dir: t.TempDir(), bucket: filepath.Join(buckets, bucket)}
			w.must(os.Mkdir(w.bucket, 0o755))
			w.deploy(s3URL(bucket, address))
			m := newMallory(t, address)
			conf := w.root.Path(layout.BoxConf, "")
			text, err := os.ReadFile(conf)
			w.must(err)
			through := strings.Replace(string(text), "http://"+address, m.URL, 1)
			if through == string(text) {
				t.Fatalf("mallory is not on the way: %s", text)
			}
			w.must(os.WriteFile(conf, []byte(through), 0o644))
			w.promote(w.bundle("1", script("1")))
			w.roll()
			w.holds("1")
			attack(w, m)
			if name != "fast-forward" && name != "rollback" && name != "indefinite freeze" {
				w.holds("1")
			}
			// When it is over, the box takes the next honest promote.
			m.answers(nil)
			w.promote(w.bundle("after", script("after")))
			w.pipeline()
			w.holds("after")
		})
	}
}
