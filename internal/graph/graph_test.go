package graph

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A world records what a walk did.
type world struct {
	calls []string
	fail  map[Ref]bool
}

func (w *world) node(ref Ref, batch string) Node {
	do := func(dir string) func(context.Context) error {
		return func(context.Context) error { return w.did(dir, ref) }
	}
	return Node{Ref: ref, Batch: batch, Up: do("up"), Down: do("down")}
}

func (w *world) did(dir string, refs ...Ref) error {
	for _, r := range refs {
		w.calls = append(w.calls, dir+" "+string(r))
	}
	for _, r := range refs {
		if w.fail[r] {
			return errors.New("told to fail")
		}
	}
	return nil
}

func (w *world) batches() map[string]Batch {
	return map[string]Batch{"b": {
		Up:   func(_ context.Context, r []Ref) error { return w.did("up", r...) },
		Down: func(_ context.Context, r []Ref) error { return w.did("down", r...) },
	}}
}

// genLedger makes a random ledger over a few refs. Edges go from lower to
// higher refs, so it has no cycle, but batches may make one.
func genLedger(t *rapid.T, w *world, batched bool) Ledger {
	const refs = 8
	l := Ledger{Batches: w.batches()}
	for i := range rapid.IntRange(1, 4).Draw(t, "contributions") {
		c := Contribution{Name: fmt.Sprint("c", i), Live: rapid.Bool().Draw(t, "live")}
		for r := range refs {
			if rapid.Bool().Draw(t, "has") {
				batch := ""
				if batched && r%3 == 0 {
					batch = "b"
				}
				c.Nodes = append(c.Nodes, w.node(Ref(fmt.Sprint("n", r)), batch))
			}
		}
		for range rapid.IntRange(0, 10).Draw(t, "edges") {
			a, b := rapid.IntRange(0, refs-1).Draw(t, "a"), rapid.IntRange(0, refs-1).Draw(t, "b")
			if a < b {
				c.Edges = append(c.Edges, Edge{Ref(fmt.Sprint("n", a)), Ref(fmt.Sprint("n", b))})
			}
		}
		l.Contributions = append(l.Contributions, c)
	}
	for r := range refs {
		if rapid.IntRange(0, 4).Draw(t, "fails") == 0 {
			w.fail[Ref(fmt.Sprint("n", r))] = true
		}
	}
	return l
}

func known(l Ledger) (all, wanted map[Ref]bool) {
	all, wanted = map[Ref]bool{}, map[Ref]bool{}
	for _, c := range l.Contributions {
		for _, n := range c.Nodes {
			all[n.Ref] = true
			wanted[n.Ref] = wanted[n.Ref] || c.Live
		}
	}
	return
}

func states(reports []Report) map[Ref]Report {
	m := map[Ref]Report{}
	for _, r := range reports {
		m[r.Ref] = r
	}
	return m
}

func TestConvergeProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{fail: map[Ref]bool{}}
		l := genLedger(t, w, false)
		all, wanted := known(l)
		reports := l.Fold().Converge(context.Background(), Walk{})

		// Every walk ends and reports each node once.
		by := states(reports)
		if len(reports) != len(all) || len(by) != len(all) {
			t.Fatalf("%d reports of %d nodes", len(reports), len(all))
		}
		index := func(call string) int { return slices.Index(w.calls, call) }
		for ref := range all {
			// Nothing wanted by a live contribution is ever taken down, and the other way round.
			if wanted[ref] && index("down "+string(ref)) >= 0 || !wanted[ref] && index("up "+string(ref)) >= 0 {
				t.Fatalf("%s went the wrong way: %v", ref, w.calls)
			}
		}
		for _, c := range l.Contributions { // live and retiring edges alike
			for _, e := range c.Edges {
				if !all[e.From] || !all[e.To] || wanted[e.From] != wanted[e.To] {
					continue
				}
				first, second := "up "+string(e.From), "up "+string(e.To)
				before, after := e.From, e.To
				if !wanted[e.From] {
					first, second = "down "+string(e.To), "down "+string(e.From)
					before, after = e.To, e.From
				}
				if index(second) >= 0 && (index(first) < 0 || index(first) > index(second)) {
					t.Fatalf("%q before %q: %v", second, first, w.calls)
				}
				// A node that did not succeed blocks exactly its dependants.
				if s := by[before].State; (s == Failure || s == Blocked) && by[after].State != Blocked {
					t.Fatalf("%s is %s, but %s is %s", before, s, after, by[after].State)
				}
			}
		}
		for ref, r := range by {
			if r.State == Blocked && !hasBadNeighbour(l, by, wanted, ref) {
				t.Fatalf("%s is blocked by nothing", ref)
			}
			if r.State == Failure != (w.fail[ref] && r.State != Blocked) {
				t.Fatalf("%s: %s", ref, r.State)
			}
		}
	})
}

func hasBadNeighbour(l Ledger, by map[Ref]Report, wanted map[Ref]bool, ref Ref) bool {
	for _, c := range l.Contributions {
		for _, e := range c.Edges {
			n, at := e.From, e.To
			if !wanted[ref] {
				n, at = e.To, e.From
			}
			if at != ref || wanted[n] != wanted[ref] {
				continue
			}
			if r, ok := by[n]; ok && (r.State == Failure || r.State == Blocked) {
				return true
			}
		}
	}
	return false
}

// With batches too every node is reported once, and no batch takes down what
// is wanted.
func TestBatchProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{fail: map[Ref]bool{}}
		l := genLedger(t, w, true)
		all, wanted := known(l)
		reports := l.Fold().Converge(context.Background(), Walk{})
		if len(reports) != len(all) || len(states(reports)) != len(all) {
			t.Fatalf("%d reports of %d nodes", len(reports), len(all))
		}
		for _, call := range w.calls {
			dir, ref, _ := strings.Cut(call, " ")
			if (dir == "up") != wanted[Ref(ref)] {
				t.Fatalf("%s is wrong: %v", call, w.calls)
			}
		}
	})
}

func TestCycleIsReportedAndNeverHangs(t *testing.T) {
	w := &world{}
	l := Ledger{Contributions: []Contribution{{Name: "c", Live: true, Nodes: []Node{w.node("a", ""), w.node("b", ""), w.node("z", "")},
		Edges: []Edge{{"a", "b"}, {"b", "a"}}}}}
	by := states(l.Fold().Converge(context.Background(), Walk{}))
	if by["a"].State != Blocked || by["b"].State != Blocked || by["z"].State != Done {
		t.Error(by)
	}
	if !strings.Contains(by["a"].Err.Error(), "a ← b") {
		t.Error(by["a"].Err)
	}
	self := Ledger{Contributions: []Contribution{{Live: true, Nodes: []Node{w.node("a", "")}, Edges: []Edge{{"a", "a"}}}}}
	if by := states(self.Fold().Converge(context.Background(), Walk{})); by["a"].State != Blocked {
		t.Error(by)
	}
}

func TestBatchIsOneCallAndOneFailure(t *testing.T) {
	for _, fails := range []bool{false, true} {
		w := &world{fail: map[Ref]bool{"x": fails}}
		calls := 0
		l := Ledger{Batches: map[string]Batch{"b": {Up: func(_ context.Context, r []Ref) error { calls++; return w.did("up", r...) }}},
			Contributions: []Contribution{{Live: true, Nodes: []Node{w.node("f", ""), w.node("x", "b"), w.node("y", "b")}, Edges: []Edge{{"f", "x"}, {"f", "y"}}}}}
		by := states(l.Fold().Converge(context.Background(), Walk{}))
		want := Done
		if fails {
			want = Failure
		}
		if calls != 1 || by["x"].State != want || by["y"].State != want {
			t.Errorf("%d calls, %v", calls, by)
		}
	}
}

func TestConflict(t *testing.T) {
	n := func(content string) []Node { return []Node{{Ref: "file:/x", Content: content}} }
	for want, l := range map[int]Ledger{
		1: {Contributions: []Contribution{{Name: "a", Live: true, Nodes: n("1")}, {Name: "b", Live: true, Nodes: n("2")}}},
		0: {Contributions: []Contribution{{Name: "a", Live: false, Nodes: n("1")}, {Name: "b", Live: true, Nodes: n("2")}}},
	} {
		if got := l.Fold().Conflicts; len(got) != want {
			t.Errorf("%v", got)
		}
	}
}

func TestCheckDecides(t *testing.T) {
	for answer, want := range map[Answer]State{Success: Already, Skipped: Already, Completed: Already, Failed: Done, Unknown: Done, Immaterial: Done} {
		w := &world{}
		n := w.node("a", "")
		n.Check = func(context.Context) Check { return Check{Answer: answer} }
		by := states(Ledger{Contributions: []Contribution{{Live: true, Nodes: []Node{n}}}}.Fold().Converge(context.Background(), Walk{}))
		if by["a"].State != want {
			t.Errorf("answer %d: %s", answer, by["a"].State)
		}
	}
	w := &world{}
	n := w.node("a", "")
	n.Check = func(context.Context) Check { panic("x") }
	m := w.node("b", "")
	m.Up = func(context.Context) error { panic("y") }
	by := states(Ledger{Contributions: []Contribution{{Live: true, Nodes: []Node{n, m}}}}.Fold().Converge(context.Background(), Walk{}))
	if by["a"].State != Done || by["b"].State != Failure {
		t.Error(by)
	}
}
