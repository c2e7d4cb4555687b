package hand

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fetch"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/token"
	"sluice/internal/trust"
	"sluice/test/suite"
)

// A gate is the door program, in front of a world's bucket.
type gate struct {
	w         *world
	authority *suite.Authority
	address   string
	args      []string
	cmd       *exec.Cmd
}

func openGate(w *world) *gate {
	w.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	w.must(err)
	g := &gate{w: w, authority: suite.NewAuthority(w.t), address: l.Addr().String()}
	w.must(l.Close())
	cert, key := g.authority.Write(w.dir, "door", g.authority.Pair("127.0.0.1"))
	g.args = []string{"-store", w.store.String(), "-listen", g.address, "-cert", cert, "-tls-key", key, "-health", "", "-grace", "1s"}
	g.start()
	w.t.Cleanup(g.kill)
	return g
}

func (g *gate) start() {
	g.w.t.Helper()
	g.cmd = exec.Command(filepath.Join(bin, "door"), g.args...)
	g.cmd.Stdout, g.cmd.Stderr = io.Discard, io.Discard
	g.w.must(g.cmd.Start())
	g.w.await("the door to open", func() bool {
		c, err := net.Dial("tcp", g.address)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

func (g *gate) kill() { _ = g.cmd.Process.Kill(); _ = g.cmd.Wait() }

// peak is the most memory that the door has had, in bytes.
func (g *gate) peak() int64 {
	g.w.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", g.cmd.Process.Pid))
	g.w.must(err)
	_, rest, _ := strings.Cut(string(data), "VmHWM:")
	kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	g.w.must(err)
	return kib << 10
}

// identity is that of a box which the door lets in.
func (g *gate) identity(label contract.Label) store.Identity {
	g.w.t.Helper()
	made, err := token.Make(context.Background(), g.w.store, label, "", time.Now())
	g.w.must(err)
	dir := filepath.Join(g.w.dir, "identity-"+string(label))
	g.w.must(os.Mkdir(dir, 0o700))
	g.w.must(os.WriteFile(filepath.Join(dir, store.TokenFile), []byte(made), 0o600))
	g.w.must(os.WriteFile(filepath.Join(dir, store.DoorCAFile), g.authority.PEM, 0o644))
	return func(name string) string { return filepath.Join(dir, name) }
}

func (g *gate) store(id store.Identity) store.Store {
	g.w.t.Helper()
	s, err := store.OpenAs("https://"+g.address, id)
	g.w.must(err)
	return s
}

// 100 slow readers of an object of 96 MiB, and the door stays small.
func TestSlowReadersOfADoor(t *testing.T) {
	t.Parallel()
	const readers, size, most = 100, 96 << 20, 64 << 20
	w := newWorld(t)
	object := filepath.Join(w.bucket, "bootstrap/edge/1/big")
	w.must(os.MkdirAll(filepath.Dir(object), 0o755))
	w.must(os.WriteFile(object, nil, 0o644))
	w.must(os.Truncate(object, size))
	g := openGate(w)
	s := g.store(g.identity("box-1"))
	w.await("the door to know the box", func() bool { _, err := s.Get(t.Context(), contract.SerialKey, 1<<10, ""); return err == nil })
	var all sync.WaitGroup
	bodies := make(chan *store.Stream, readers)
	for range readers {
		all.Go(func() {
			body, err := s.Open(t.Context(), "bootstrap/edge/1/big", 0)
			if err != nil {
				t.Error(err)
				return
			}
			for range 16 { // a little at a time
				if _, err := io.ReadFull(body, make([]byte, 16<<10)); err != nil {
					t.Error(err)
				}
			}
			bodies <- body
		})
	}
	all.Wait()
	peak := g.peak()
	t.Logf("SHOW the door's peak memory with %d slow readers of 96 MiB: %d MiB, the limit is %d", readers, peak>>20, most>>20)
	if peak > most {
		t.Errorf("the door takes %d MiB", peak>>20)
	}
	if len(bodies) != readers {
		t.Errorf("%d of %d could read", len(bodies), readers)
	}
	// One of them reads on to the end, whole.
	body := <-bodies
	if n, err := io.Copy(io.Discard, body); err != nil || n != size-16*16<<10 {
		t.Errorf("%d bytes, %v", n, err)
	}
	body.Close()
	for range readers - 1 {
		(<-bodies).Close()
	}
}

// A crowd is many boxes, of which all is real but root.
type crowd struct {
	w     *world
	gate  *gate
	boxes []*member
	bad   string // the version that no box keeps
}

type member struct {
	label contract.Label
	root  layout.Root
	state record.State
	store store.Store

	mu    sync.Mutex
	asked map[contract.Version]time.Time
}

func gather(w *world, g *gate, n int) *crowd {
	w.t.Helper()
	c := &crowd{w: w, gate: g}
	anchor := w.raw(contract.TrustKey(1))
	for i := range n {
		m := &member{label: contract.Label(fmt.Sprintf("box-%03d", i)), asked: map[contract.Version]time.Time{}}
		m.root = layout.Root(filepath.Join(w.dir, "crowd", string(m.label)))
		m.state = record.State{Root: m.root, Disk: &durable.Disk{}, Name: "edge"}
		for _, row := range layout.Folders() {
			w.must(os.MkdirAll(m.root.Path(row.Place, "edge"), 0o755))
		}
		w.must(os.WriteFile(m.root.Path(layout.ComponentConf, "edge"), []byte("SLUICE_CHANNEL=stable\n"), 0o644))
		w.must(os.WriteFile(m.root.TrustFile("edge", 1), anchor, 0o644))
		m.store = g.store(g.identity(m.label))
		c.boxes = append(c.boxes, m)
	}
	return c
}

// live lets the boxes live until ctx ends.
func (c *crowd) live(ctx context.Context, rate int64) *sync.WaitGroup {
	var all sync.WaitGroup
	for _, m := range c.boxes {
		all.Go(func() {
			f := &fetch.Fetcher{Root: m.root, Disk: &durable.Disk{}, Store: m.store, Box: config.Box{Label: string(m.label), Poll: 200 * time.Millisecond, Rate: rate},
				Log: slog.New(slog.DiscardHandler), Status: func(string, ...any) {}, Beat: func() {}}
			_ = f.Watch(ctx)
		})
		all.Go(func() { m.rootsPart(ctx, c) })
	}
	return &all
}

// rootsPart stands in for verify, stage and apply: what is asked for is applied, but
// for the bad version, which is rolled back.
func (m *member) rootsPart(ctx context.Context, c *crowd) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if os.Remove(m.state.Path(layout.Fetched)) != nil {
			continue
		}
		data, err := os.ReadFile(m.state.Path(layout.Pointer))
		if err != nil {
			continue
		}
		set, err := m.state.Trust()
		if err != nil {
			c.w.t.Error(err)
			return
		}
		p, err := set.Pointer(data, "edge", "stable")
		if err != nil {
			c.w.t.Error(err)
			return
		}
		m.conclude(c, p)
	}
}

func (m *member) conclude(c *crowd, p trust.Pointer) {
	v := p.Payload.Current.Version
	m.mu.Lock()
	if _, before := m.asked[v]; !before {
		m.asked[v] = time.Now()
	}
	m.mu.Unlock()
	now := contract.At(time.Now())
	r := contract.Result{Schema: contract.One, Tuple: p.Tuple(), Outcome: outcome.Applied, Attempt: 1, Config: record.Sum(nil), At: now, DownMS: -1}
	if string(v) == c.bad {
		r.Outcome, r.Reason = outcome.RolledBack, "gate: it did not come up"
	} else if err := m.state.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: contract.Build{Tuple: p.Tuple(), ManifestSHA256: p.Payload.Current.Artifacts[contract.Here()].ManifestSHA256}, At: now}); err != nil {
		c.w.t.Error(err)
	}
	for _, err := range []error{
		m.state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{"stable": p.Water()}}),
		m.state.Save(layout.Result, r),
	} {
		if err != nil {
			c.w.t.Error(err)
		}
	}
}

func (m *member) when(v contract.Version) time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.asked[v]
}

func (m *member) runs() contract.Version {
	if a := record.Optional[contract.Applied](m.state, layout.Applied); a != nil {
		return a.Version
	}
	return ""
}

func (c *crowd) count(pass func(*member) bool) int {
	n := 0
	for _, m := range c.boxes {
		if pass(m) {
			n++
		}
	}
	return n
}

// 200 boxes over one door: a promote with a spread follows the plan that was printed,
// and a bad release is halted after three, and those that had begun.
func TestTwoHundredBoxes(t *testing.T) {
	if testing.Short() {
		t.Skip("200 boxes take a minute")
	}
	t.Parallel()
	const boxes, spread, halt = 200, 30 * time.Second, 3
	w := newWorld(t)
	g := openGate(w)
	c := gather(w, g, boxes)
	c.bad = "3"
	ctx, stop := context.WithCancel(t.Context())
	all := c.live(ctx, 0)
	defer all.Wait()
	defer stop()
	update := func(args ...string) (int, string) {
		t.Helper()
		return run(t, "sluice", append([]string{"update", "-store", w.store.String(), "-key", w.own() + ".key", "-yes"}, args...)...)
	}
	w.promote(w.bundle("1", script("1")))
	w.await("all to run 1", func() bool { return c.count(func(m *member) bool { return m.runs() == "1" }) == boxes })
	w.await("all to have said so", func() bool {
		return strings.Count(w.ok("sluice", "status", "-store", w.store.String()), "current") == boxes
	})

	// The plan, and then exactly that.
	two := w.bundle("2", script("2"))
	status, out := update("-file", two, "-spread", spread.String(), "-plan", "-json")
	if status != 0 {
		t.Fatalf("exit status %d: %s", status, out)
	}
	var plan struct {
		PromotedAt contract.Time `json:"promoted_at"`
		Boxes      []struct {
			Label contract.Label
			At    contract.Time
		}
	}
	w.must(json.Unmarshal([]byte(out), &plan))
	if len(plan.Boxes) != boxes {
		t.Fatalf("%d boxes are planned", len(plan.Boxes))
	}
	if status, out := update("-file", two, "-spread", spread.String(), "-at", plan.PromotedAt.String(), "-wait"); status != 0 || !strings.Contains(out, fmt.Sprintf("%d run it, 0 did not take it", boxes)) {
		t.Fatalf("exit status %d: %s", status, out)
	}
	slots, late := map[contract.Label]time.Time{}, time.Duration(0)
	for _, b := range plan.Boxes {
		slots[b.Label] = b.At.Time
	}
	for _, m := range c.boxes {
		at := m.when("2")
		if slot, planned := slots[m.label]; !planned || at.Before(slot) {
			t.Errorf("%s: asked at %s, planned for %s", m.label, at, slot)
		} else {
			late = max(late, at.Sub(slot))
		}
	}
	t.Logf("SHOW %d boxes, a spread of %s: none before its time, the last %s after it", boxes, spread, late.Round(time.Millisecond))

	// A bad one.
	three := w.bundle("3", script("3"))
	status, out = update("-file", three, "-spread", spread.String(), "-halt-after", fmt.Sprint(halt))
	if status != 1 || !strings.Contains(out, "halted: ") || !strings.Contains(out, "2 is current again") {
		t.Errorf("exit status %d: %s", status, out)
	}
	w.await("all to have heard of it", func() bool {
		return c.count(func(m *member) bool {
			s := record.Optional[contract.Seen](m.state, layout.Seen)
			return s != nil && s.Channels["stable"].PromotedAt.After(plan.PromotedAt.Time) && record.Optional[contract.Result](m.state, layout.Result).Version == "2"
		}) == boxes
	})
	tried := c.count(func(m *member) bool { return !m.when("3").IsZero() })
	t.Logf("SHOW halt after %d: %d of %d boxes had tried it", halt, tried, boxes)
	if tried < halt || tried > boxes*3/4 { // those that had begun are among them
		t.Errorf("%d tried it", tried)
	}
	if n := c.count(func(m *member) bool { return m.runs() == "2" }); n != boxes {
		t.Errorf("%d run 2", n)
	}
}

// A door that is killed in the middle of downloads, and comes back: every box resumes,
// and ends applied.
func TestDoorIsKilled(t *testing.T) {
	t.Parallel()
	const boxes, size, kills = 8, 4 << 20, 3
	gateway := os.Getenv("VERSITYGW")
	if gateway == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	w := &world{t: t, dir: t.TempDir()} // in front of a bucket; the other tests have a folder
	w.bucket = filepath.Join(w.dir, "bucket")
	w.must(os.Mkdir(w.bucket, 0o755))
	w.deploy(s3URL("bucket", serveS3(t, gateway, w.dir)))
	noise := make([]byte, size)
	f, err := os.Open("/dev/urandom")
	w.must(err)
	defer f.Close()
	_, err = io.ReadFull(f, noise)
	w.must(err)
	w.write("edge-1/share/noise", string(noise), 0o644)
	g := openGate(w)
	c := gather(w, g, boxes)
	ctx, stop := context.WithCancel(t.Context())
	all := c.live(ctx, 512<<10) // eight seconds a download
	defer all.Wait()
	defer stop()
	w.promote(w.bundle("1", script("1")))
	have := func(m *member) int64 {
		files, _ := filepath.Glob(filepath.Join(m.root.Download("edge", "1"), "*"))
		var n int64
		for _, f := range files {
			if st, err := os.Stat(f); err == nil {
				n = max(n, st.Size())
			}
		}
		return n
	}
	for i := range int64(kills) {
		w.await("all to be in the middle", func() bool {
			return c.count(func(m *member) bool { return have(m) > (i+1)*size/(kills+2) || m.runs() == "1" }) == boxes
		})
		if c.count(func(m *member) bool { return m.runs() == "" }) == 0 {
			t.Fatalf("they were done before kill %d", i+1)
		}
		g.kill()
		g.start()
	}
	w.await("all to run 1", func() bool { return c.count(func(m *member) bool { return m.runs() == "1" }) == boxes })
	w.await("all to have said so", func() bool {
		return strings.Count(w.ok("sluice", "status", "-store", w.store.String()), "current") == boxes
	})
	for _, m := range c.boxes {
		beat, err := contract.Spoken.DecodeHeartbeat(w.raw(contract.StatusKey(m.label)))
		w.must(err)
		if got := beat.Components["edge"].Downloaded; got > size*3/2 {
			t.Errorf("%s has downloaded %d bytes of %d: it did not resume", m.label, got, size)
		}
	}
}
