package fetch

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/trust"
)

var key = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32))

// counting counts what a store is asked for.
type counting struct {
	store.Store
	mu    sync.Mutex
	gets  map[string]int
	puts  int
	tick  chan struct{} // one for each look at the bell
	fails error         // what Open answers
	noPut bool
	short int64 // how many bytes a body has before it breaks; 0: all
}

func (c *counting) Get(ctx context.Context, key string, limit int64, unless string) (store.Object, error) {
	c.mu.Lock()
	c.gets[key]++
	c.mu.Unlock()
	if key == contract.SerialKey && c.tick != nil {
		c.tick <- struct{}{}
	}
	return c.Store.Get(ctx, key, limit, unless)
}

func (c *counting) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond store.Condition) (string, error) {
	c.puts++
	if c.noPut {
		return "", store.ErrDenied
	}
	return c.Store.Put(ctx, key, body, size, cond)
}

func (c *counting) Open(ctx context.Context, key string, offset int64) (*store.Stream, error) {
	c.gets[key]++
	if c.fails != nil {
		return nil, c.fails
	}
	s, err := c.Store.Open(ctx, key, offset)
	if err == nil && c.short > 0 {
		body := s.ReadCloser
		s.ReadCloser = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(io.LimitReader(body, c.short), broken{}), body}
	}
	return s, err
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("connection reset") }

type testbox struct {
	*Fetcher
	t     *testing.T
	store *counting
	state record.State
	n     int
}

func newBox(t *testing.T) *testbox {
	t.Helper()
	s, err := store.Open("file://" + t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root := layout.Root(t.TempDir())
	b := &testbox{t: t, store: &counting{Store: s, gets: map[string]int{}}, state: record.State{Root: root, Disk: &durable.Disk{}, Name: "edge"}}
	for _, row := range layout.Folders() {
		b.must(os.MkdirAll(root.Path(row.Place, "edge"), 0o755))
	}
	b.must(os.WriteFile(root.Path(layout.ComponentConf, "edge"), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
	document := trust.NewDocument(contract.At(time.Now()), key.Public().(ed25519.PublicKey))
	b.must(os.WriteFile(root.TrustFile("edge", 1), trust.Sign(contract.TrustLadder, document.Encode(), key).Encode(), 0o644))
	b.Fetcher = b.restarted()
	return b
}

// restarted is a fetch that knows only what is on the disk.
func (b *testbox) restarted() *Fetcher {
	return &Fetcher{Root: b.state.Root, Disk: &durable.Disk{}, Store: b.store, Box: config.Box{Label: "box-1", Poll: time.Millisecond},
		Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Beat: func() {}}
}

func (b *testbox) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// promote signs a pointer of a version whose bundle is some bytes.
func (b *testbox) promote(version string, spread time.Duration) contract.Pointer {
	b.t.Helper()
	ctx := context.Background()
	object := []byte("the bundle of " + version)
	k := contract.BootstrapKey("edge", contract.Version(version), "x")
	_, err := store.PutBytes(ctx, b.store, k, object, store.Condition{})
	b.must(err)
	b.n++
	p := contract.Pointer{Envelope: contract.One, Component: "edge", Channel: "stable", PromotedAt: contract.At(time.Unix(int64(b.n), 0)), Payload: contract.PointerPayload{Schema: contract.One,
		Current: contract.Release{Version: contract.Version(version), Source: "file", ReleasedAt: contract.At(time.Unix(1, 0)), Artifacts: map[contract.Platform]contract.Artifact{
			contract.Here(): {Key: k, Size: int64(len(object)), SHA256: record.Sum(object), TarSize: 1, ManifestSHA256: record.Sum([]byte(version))}}},
		History: []contract.Release{}, Spread: contract.Duration(spread), Audit: []contract.Audit{}}}
	_, err = store.PutBytes(ctx, b.store, contract.PointerKey("edge", "stable", 1), trust.Sign(contract.PointerLadder, p.Encode(), key).Encode(), store.Condition{})
	b.must(err)
	_, err = store.PutBytes(ctx, b.store, contract.SerialKey, fmt.Appendf(nil, "%d", b.n), store.Condition{})
	b.must(err)
	return p
}

// raised reports whether verify was told, and takes the marker.
func (b *testbox) raised() bool { return os.Remove(b.state.Path(layout.Fetched)) == nil }

// answers writes what root would.
func (b *testbox) answers(p contract.Pointer, o outcome.Outcome, reason string, attempt int) {
	b.t.Helper()
	b.must(b.state.Save(layout.Result, contract.Result{Schema: contract.One, Tuple: p.Tuple(), Outcome: o, Reason: reason, Attempt: attempt, Config: record.Sum(nil), At: contract.At(time.Now())}))
	if o == outcome.Applied {
		b.must(b.state.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: contract.Build{Tuple: p.Tuple(), ManifestSHA256: p.Payload.Current.Artifacts[contract.Here()].ManifestSHA256}, At: contract.At(time.Now())}))
		b.must(b.state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{"stable": {PromotedAt: p.PromotedAt, Trust: b.state.TrustNumber(), KeyIDs: []string{}}}}))
	}
}

func TestAsksOnceAndTidiesUp(t *testing.T) {
	b := newBox(t)
	ctx := context.Background()
	p := b.promote("1", 0)
	b.must(b.Once(ctx))
	if !b.raised() {
		t.Fatal("verify was not told")
	}
	b.must(b.Once(ctx))
	if b.raised() {
		t.Error("asked again within the minute")
	}
	b.answers(p, outcome.Applied, "", 1)
	b.must(b.Once(ctx))
	if !b.raised() {
		t.Error("verify was not told to tidy up")
	}
	entries, _ := os.ReadDir(b.state.Path(layout.Incoming))
	for _, e := range entries {
		if e.Name() != "mark" && e.Name() != "pointer.json" {
			t.Errorf("%s is left", e.Name())
		}
	}
	b.must(b.Once(ctx))
	if b.raised() {
		t.Error("tidied up twice")
	}
}

// A poll that finds nothing writes nothing: not to the disk, not to the store.
func TestIdlePollWritesNothing(t *testing.T) {
	b := newBox(t)
	p := b.promote("1", 0)
	b.must(b.Once(context.Background()))
	b.answers(p, outcome.Applied, "", 1)
	b.must(b.Once(context.Background()))
	ctx, cancel := context.WithCancel(context.Background())
	f := b.restarted()
	writes := 0
	f.Disk = &durable.Disk{Fault: &fault.Points{Seen: func(_ int, op, object string) { writes++ }}}
	b.store.tick = make(chan struct{})
	done := make(chan error)
	go func() { done <- f.Watch(ctx) }()
	for range 3 { // the first polls are a full pass and what follows from it
		<-b.store.tick
	}
	before, puts, pointers := writes, b.store.puts, b.store.gets[contract.PointerKey("edge", "stable", 1)]
	for range 20 {
		<-b.store.tick
	}
	if writes != before || b.store.puts != puts || b.store.gets[contract.PointerKey("edge", "stable", 1)] != pointers {
		t.Errorf("20 idle polls: %d writes to the disk, %d to the store, %d reads of the pointer", writes-before, b.store.puts-puts, b.store.gets[contract.PointerKey("edge", "stable", 1)]-pointers)
	}
	cancel()
	go func() {
		for range b.store.tick {
		}
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestTerminalOutcomesAreNotTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		outcome outcome.Outcome
		reason  string
		attempt int
		again   bool // once the back-off is over
	}{
		"rolled back":      {outcome.RolledBack, "gate: x", 1, false},
		"refused":          {outcome.Refused, "version-lie: x", 1, false},
		"interrupted":      {outcome.RolledBack, "interrupted: x", 1, true},
		"interrupted, 3":   {outcome.RolledBack, "interrupted: x", 3, false},
		"deferred":         {outcome.Deferred, "needs: x", 1, true},
		"rollback failed":  {outcome.RollbackFailed, "gate: x", 1, false},
		"foreign, config*": {outcome.Refused, "foreign-file: x", 1, true}, // another digest than the .conf has now
	} {
		b := newBox(t)
		p := b.promote("1", 0)
		b.must(b.Once(context.Background()))
		b.raised()
		b.answers(p, c.outcome, c.reason, c.attempt)
		b.must(b.Once(context.Background()))
		b.raised() // perhaps to tidy up
		if w := b.follows["edge"]; w.retry.IsZero() == c.again {
			t.Errorf("%s: retry at %s", name, w.retry)
		} else if c.again {
			w.retry = time.Now().Add(-time.Second)
		}
		b.must(b.Once(context.Background()))
		if got := b.raised(); got != c.again {
			t.Errorf("%s: asked again: %v", name, got)
		}
	}
}

// What was deferred is tried at once when what it may have waited for changes.
func TestDeferredIsTriedWhenTheWorldChanges(t *testing.T) {
	b := newBox(t)
	p := b.promote("1", 0)
	b.must(b.Once(context.Background()))
	b.raised()
	b.answers(p, outcome.Deferred, "needs: other 1", 5)
	b.must(b.Once(context.Background()))
	if b.raised() {
		t.Fatal("no back-off")
	}
	b.must(os.WriteFile(b.state.Root.Path(layout.ComponentConf, "other"), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
	other := record.State{Root: b.state.Root, Disk: &durable.Disk{}, Name: "other"}
	b.must(os.MkdirAll(other.Path(layout.Trust), 0o755))
	b.must(other.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: contract.Build{Tuple: contract.Tuple{Channel: "stable", Version: "1", PromotedAt: contract.At(time.Unix(1, 0))}, ManifestSHA256: record.Sum(nil)}, At: contract.At(time.Now())}))
	b.must(b.Once(context.Background()))
	if !b.raised() {
		t.Error("another component's change did not end the back-off")
	}
}

func TestSpreadIsWaitedAndSurvivesARestart(t *testing.T) {
	b := newBox(t)
	b.promote("1", 24*time.Hour)
	b.must(b.Once(context.Background()))
	if b.raised() || b.store.gets["bootstrap/edge/1/x"] > 0 {
		t.Fatal("it did not wait")
	}
	w := b.follows["edge"]
	w.since, w.noted = w.since.Add(-time.Hour), time.Time{}
	b.must(b.Once(context.Background()))
	f := b.restarted()
	b.must(f.Once(context.Background()))
	if got := f.follows["edge"].pending.WaitedMS; got < time.Hour.Milliseconds() {
		t.Errorf("%d ms are remembered", got)
	}
	// A newer promote within the spread: the newest wins.
	b.promote("2", 0)
	b.must(f.Once(context.Background()))
	if !b.raised() || b.store.gets["bootstrap/edge/1/x"] > 0 {
		t.Error("the newest did not win")
	}
}

func TestNoopDownloadsNothing(t *testing.T) {
	b := newBox(t)
	p := b.promote("1", 0)
	b.answers(p, outcome.Applied, "", 1)
	b.promote("1", 24*time.Hour) // nor does it wait
	b.must(b.Once(context.Background()))
	if !b.raised() || b.store.gets["bootstrap/edge/1/x"] > 0 {
		t.Errorf("downloads: %v", b.store.gets)
	}
}

// A download that is cut is resumed where it was.
func TestDownloadIsResumed(t *testing.T) {
	b := newBox(t)
	p := b.promote("1", 0)
	size := p.Payload.Current.Artifacts[contract.Here()].Size
	b.store.short = size / 2
	if err := b.Once(context.Background()); outcome.Exit(err) != outcome.ExitDeferred {
		t.Fatal(err)
	}
	if st, err := os.Stat(b.objectPath(b.follows["edge"]) + partSuffix); err != nil || st.Size() != size/2 {
		t.Fatalf("%v, %v", st, err)
	}
	b.store.short = 0
	// Not at once: a store that hands out wrong bytes would be asked at every poll.
	b.must(b.Once(context.Background()))
	if b.raised() {
		t.Error("no back-off after a failed download")
	}
	b.follows["edge"].retry = time.Now().Add(-time.Second)
	b.must(b.Once(context.Background()))
	if !b.raised() || b.follows["edge"].pending.Downloaded != size {
		t.Errorf("%d bytes were downloaded in all, of %d", b.follows["edge"].pending.Downloaded, size)
	}
}

func TestBadPointersAreSaidOnce(t *testing.T) {
	b := newBox(t)
	var log bytes.Buffer
	b.Log = slog.New(slog.NewTextHandler(&log, nil))
	b.promote("1", 0)
	_, err := store.PutBytes(context.Background(), b.store, contract.PointerKey("edge", "stable", 1), []byte("{}"), store.Condition{})
	b.must(err)
	for range 3 {
		if err := b.Once(context.Background()); outcome.Exit(err) != outcome.ExitFailed {
			t.Error(err)
		}
	}
	if n := strings.Count(log.String(), "bad-signature"); n != 1 {
		t.Errorf("said %d times", n)
	}
	if got := b.status("edge").Pending; !strings.Contains(got, "bad-signature") {
		t.Errorf("the heartbeat says %q", got)
	}
	b.promote("2", 0)
	b.must(b.Once(context.Background()))
	if !b.raised() {
		t.Error("a good pointer after a bad one")
	}
}

func TestHoldAndChannel(t *testing.T) {
	b := newBox(t)
	b.promote("1", 0)
	b.must(os.WriteFile(b.state.Path(layout.Hold), nil, 0o644))
	b.must(b.Once(context.Background()))
	if b.raised() || !b.status("edge").Held {
		t.Error("held, and asked all the same")
	}
	// Promoted while it was held: heard after the hold, without another bell.
	b.promote("2", 0)
	b.must(b.pass(context.Background(), true))
	b.must(os.Remove(b.state.Path(layout.Hold)))
	b.must(b.pass(context.Background(), false))
	if got := b.follows["edge"].pending.Version; !b.raised() || got != "2" {
		t.Errorf("after the hold it asked for %q", got)
	}
	b.must(os.WriteFile(b.state.Path(layout.ComponentConf), []byte("SLUICE_CHANNEL=canary\n"), 0o644))
	b.must(b.Once(context.Background()))
	b.raised() // to tidy up
	if w := b.follows["edge"]; w.pointer != nil || w.pending.Version != "" {
		t.Errorf("it followed a channel that root has left: %+v", w.pending)
	}
	b.must(os.WriteFile(b.state.Path(layout.ComponentConf), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
	b.must(b.pass(context.Background(), false)) // without a bell
	if !b.raised() {
		t.Error("the change of channel was not seen")
	}
}

// A heartbeat that can't be written is complained of once, and not tried at
// every pass.
func TestHeartbeatThatFails(t *testing.T) {
	b := newBox(t)
	var log bytes.Buffer
	b.Log = slog.New(slog.NewTextHandler(&log, nil))
	b.store.noPut = true
	for range 5 {
		_ = b.Once(context.Background())
	}
	if b.store.puts != 1 || strings.Count(log.String(), "heartbeat") != 1 {
		t.Errorf("%d tries; log: %s", b.store.puts, log.String())
	}
	b.store.noPut, b.heart.next = false, time.Time{}
	b.must(b.Once(context.Background()))
	if b.heart.failed {
		t.Error("it does not recover")
	}
}

// next publishes the trust document after n, with the same key.
func (b *testbox) next(n int) []byte {
	b.t.Helper()
	doc := trust.NewDocument(contract.At(time.Now()), key.Public().(ed25519.PublicKey))
	doc.Payload.Number = n + 1
	data := trust.Sign(contract.TrustLadder, doc.Encode(), key).Encode()
	_, err := store.PutBytes(context.Background(), b.store, contract.TrustKey(n+1), data, store.Condition{})
	b.must(err)
	return data
}

// Trust documents are read anew with each fresh pass, handed on to verify, and what
// is not of the chain is taken away.
func TestTrustIsHandedOn(t *testing.T) {
	b := newBox(t)
	p := b.promote("1", 0)
	b.must(b.Once(context.Background()))
	b.raised()
	b.answers(p, outcome.Applied, "", 1)
	b.must(b.Once(context.Background()))
	b.raised()
	step := func(n int) string { return filepath.Join(b.state.Path(layout.Incoming), layout.StepName(n)) }
	b.must(os.WriteFile(step(3), []byte("garbage"), 0o640))
	b.must(os.Mkdir(step(4), 0o755))
	b.must(os.WriteFile(filepath.Join(step(4), "x"), nil, 0o640))
	two := b.next(1)
	b.must(b.Once(context.Background()))
	if !b.raised() {
		t.Error("root was not asked to move its trust")
	}
	if data, err := os.ReadFile(step(2)); err != nil || !bytes.Equal(data, two) {
		t.Errorf("%v", err)
	}
	for _, n := range []int{3, 4} {
		if _, err := os.Lstat(step(n)); err == nil {
			t.Errorf("%s is left", step(n))
		}
	}
	b.must(os.WriteFile(b.state.Root.TrustFile("edge", 2), two, 0o644)) // root has it
	b.answers(p, outcome.Applied, "", 1)
	b.must(b.Once(context.Background()))
	if _, err := os.Lstat(step(2)); err == nil {
		t.Error("what root has is left")
	}
}

// What root gets is fresh: nothing of an earlier run, whatever it is.
func TestPointerForRoot(t *testing.T) {
	b := newBox(t)
	b.promote("1", 0)
	two := b.next(1)
	folder := t.TempDir()
	for _, name := range []string{"pointer.json", layout.StepName(2), layout.StepName(5)} {
		b.must(os.Mkdir(filepath.Join(folder, name), 0o755))
		b.must(os.WriteFile(filepath.Join(folder, name, "x"), nil, 0o644))
	}
	b.must(Pointer(context.Background(), b.state.Root, b.store, "edge", folder, nil))
	if data, err := os.ReadFile(filepath.Join(folder, layout.StepName(2))); err != nil || !bytes.Equal(data, two) {
		t.Errorf("%v", err)
	}
	if _, err := os.Lstat(filepath.Join(folder, layout.StepName(5))); err == nil {
		t.Error("a step of an earlier run is left")
	}
	// One that does not count is the last that is got.
	_, err := store.PutBytes(context.Background(), b.store, contract.TrustKey(3), two, store.Condition{})
	b.must(err)
	b.next(3)
	b.must(Pointer(context.Background(), b.state.Root, b.store, "edge", folder, nil))
	if _, err := os.Lstat(filepath.Join(folder, layout.StepName(3))); err != nil {
		t.Error("root does not see what is wrong")
	}
	if _, err := os.Lstat(filepath.Join(folder, layout.StepName(4))); err == nil {
		t.Error("a store can go on without an end")
	}
}
