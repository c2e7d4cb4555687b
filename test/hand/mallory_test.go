package hand

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/layout"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/test/suite"
)

// A mallory stands between a box and the real S3 server, and answers as it
// likes.
type mallory struct {
	*suite.Wire
	mu    sync.Mutex
	asked []string
	wrote int64 // bytes that its own answers had taken off them
}

func newMallory(t *testing.T, gateway string) *mallory {
	t.Helper()
	m := &mallory{Wire: suite.NewWire(t, &url.URL{Scheme: "http", Host: gateway}, nil, nil)}
	m.answers(nil)
	return m
}

// answers makes mallory answer by a rule from now on; nil: honestly.
func (m *mallory) answers(rule func(w http.ResponseWriter, r *http.Request) bool) {
	m.mu.Lock()
	m.asked, m.wrote = nil, 0
	m.mu.Unlock()
	m.Spoil(func(w http.ResponseWriter, r *http.Request) bool {
		m.mu.Lock()
		m.asked = append(m.asked, r.Method+" "+r.URL.Path)
		m.mu.Unlock()
		return rule != nil && rule(w, r)
	})
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

// pointerKey is where the pointer that the box follows is.
const pointerKey = "control/system/edge/stable.json"

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

// evil is a release that nobody but the attacker wants, mirrored to the store, and
// a pointer to it that nobody has signed.
func (w *world) evil(p contract.Pointer) contract.Pointer {
	w.t.Helper()
	object, tarSize, manifest := w.pack("evil", func(*contract.Manifest, *[]entry) {})
	key := contract.BootstrapKey("edge", "evil", "bundle.tar.zst")
	w.put(key, object)
	p.Payload.Current = contract.Release{Version: "evil", Source: "file", ReleasedAt: p.PromotedAt, Artifacts: map[contract.Platform]contract.Artifact{
		contract.Here(): {Key: key, Size: int64(len(object)), SHA256: record.Sum(object), TarSize: tarSize, ManifestSHA256: manifest}}}
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

// await waits until something is so, for as long as anything may take here.
func (w *world) await(what string, so func() bool) {
	w.t.Helper()
	for end := time.Now().Add(2 * time.Minute); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("waited too long for %s", what)
		}
	}
}

func mustPayload(w *world, data []byte) []byte {
	w.t.Helper()
	e, err := contract.Spoken.DecodeEnvelope(data)
	w.must(err)
	return e.Payload
}

// current is the artifact of the channel's current release.
func (w *world) current() contract.Artifact {
	w.t.Helper()
	p, err := contract.Spoken.DecodePointer(mustPayload(w, w.raw(pointerKey)))
	w.must(err)
	return p.Payload.Current.Artifacts[contract.Here()]
}

// intercepted is a deployment in a bucket of its own, whose box has mallory on its
// way there.
func intercepted(t *testing.T, buckets, address, bucket string) (*world, *mallory) {
	t.Helper()
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
	return w, m
}
