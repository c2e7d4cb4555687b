// Package graph is what a build wants true on a box, and the walks that make
// it so: a ledger of contributions, one fold, one walk in two directions. It
// knows nothing of files or systemd, and does no I/O but through its nodes.
package graph

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// A Ref names the place that a node is about, not its content: two
// declarations of one ref are one node.
type Ref string

// An Answer is what a check found.
type Answer int

// The answers. Failed, Unknown and Immaterial mean: run up.
const (
	Success    Answer = iota // the effect is there
	Skipped                  // there is nothing to do here
	Completed                // it did its work and stopped
	Failed                   // the effect is not there
	Unknown                  // it could not be looked at
	Immaterial               // asking costs as much as doing
)

// A Check is an answer, and a few words for it.
type Check struct {
	Answer Answer
	Text   string
}

// A Node is one thing that a build wants true. Check reads only; Up and Down
// are safe to repeat. A nil function has nothing to do.
type Node struct {
	Ref     Ref
	Help    string // one line
	Content string // what can be compared between two declarations; "" for none
	Batch   string // nodes of one batch are done in one call per direction
	Check   func(context.Context) Check
	Up      func(context.Context) error
	Down    func(context.Context) error
}

// An Edge says that From is up before To, and down after it.
type Edge struct{ From, To Ref }

// A Batch does many nodes in one call. Its failure is the failure of each.
type Batch struct {
	Up, Down func(context.Context, []Ref) error
}

// A Contribution is one declaration: a component at a version.
type Contribution struct {
	Name  string
	Live  bool // wanted; otherwise retiring
	Nodes []Node
	Edges []Edge
}

// A Ledger is all that has been declared and still stands.
type Ledger struct {
	Contributions []Contribution
	Batches       map[string]Batch
}

// A Conflict is one ref that two live contributions want differently.
type Conflict struct {
	Ref       Ref
	Claimants []string
}

// A Dag is a folded ledger: every ref once, in an order that keeps all edges
// of live and retiring contributions.
type Dag struct {
	Conflicts []Conflict
	nodes     map[Ref]Node
	wanted    map[Ref]bool
	groups    []*group // in order; members of a cycle are left out
	cyclic    []*group
	batches   map[string]Batch
}

// A group is what is done at once: a node, or the members of a batch.
type group struct {
	name    string
	members []Ref
	before  map[*group]bool // up before this one
	after   map[*group]bool
}

// Fold makes one graph of a ledger. Wanted is the union of the refs of live
// contributions; the order is the union of the edges of live and retiring
// ones. Of two declarations of a ref, a live one counts before a retiring one
// and a later one before an earlier one.
func (l Ledger) Fold() *Dag {
	d := &Dag{nodes: map[Ref]Node{}, wanted: map[Ref]bool{}, batches: l.Batches}
	owner := map[Ref]string{}
	var order []Ref
	for _, live := range []bool{false, true} {
		for _, c := range l.Contributions {
			if c.Live != live {
				continue
			}
			for _, n := range c.Nodes {
				old, known := d.nodes[n.Ref]
				if !known {
					order = append(order, n.Ref)
				}
				if known && live && d.wanted[n.Ref] && old.Content != n.Content {
					d.Conflicts = append(d.Conflicts, Conflict{n.Ref, []string{owner[n.Ref], c.Name}})
				}
				d.nodes[n.Ref], owner[n.Ref] = n, c.Name
				if live {
					d.wanted[n.Ref] = true
				}
			}
		}
	}
	d.rewrite(order)
	d.sort(l)
	return d
}

// rewrite makes groups of the nodes: all members of a batch become one. What
// is wanted and what is not are never in one group, so that nothing wanted
// ever lands in a removal.
func (d *Dag) rewrite(order []Ref) {
	byName := map[string]*group{}
	for _, ref := range order {
		name := string(ref)
		if batch := d.nodes[ref].Batch; batch != "" {
			name = fmt.Sprintf("%s (wanted: %v)", batch, d.wanted[ref])
		}
		g := byName[name]
		if g == nil {
			g = &group{name: name, before: map[*group]bool{}, after: map[*group]bool{}}
			byName[name], d.groups = g, append(d.groups, g)
		}
		g.members = append(g.members, ref)
	}
}

// sort orders the groups by the edges, keeping the order of declaration where
// they say nothing. Groups of a cycle are set aside.
func (d *Dag) sort(l Ledger) {
	of := map[Ref]*group{}
	for _, g := range d.groups {
		for _, m := range g.members {
			of[m] = g
		}
	}
	for _, c := range l.Contributions {
		for _, e := range c.Edges {
			from, to := of[e.From], of[e.To]
			if from == nil || to == nil || from == to && e.From != e.To {
				continue // an edge to what nobody declares, or within one call
			}
			to.before[from], from.after[to] = true, true
		}
	}
	waits := map[*group]int{}
	for _, g := range d.groups {
		waits[g] = len(g.before)
	}
	rest := d.groups
	d.groups = nil
	for {
		i := slices.IndexFunc(rest, func(g *group) bool { return waits[g] == 0 })
		if i < 0 {
			break
		}
		g := rest[i]
		rest = slices.Delete(slices.Clone(rest), i, i+1)
		d.groups = append(d.groups, g)
		for next := range g.after {
			waits[next]--
		}
	}
	d.cyclic = rest
}

// Wanted reports whether a live contribution wants ref.
func (d *Dag) Wanted(ref Ref) bool { return d.wanted[ref] }

// Order returns every ref in the order in which it would come up.
func (d *Dag) Order() []Ref {
	var out []Ref
	for _, g := range d.groups {
		out = append(out, g.members...)
	}
	return out
}

// Node returns the node of a ref.
func (d *Dag) Node(ref Ref) (Node, bool) {
	n, ok := d.nodes[ref]
	return n, ok
}

func (g *group) label() string {
	if len(g.members) == 1 {
		return string(g.members[0])
	}
	names := make([]string, len(g.members))
	for i, m := range g.members {
		names[i] = string(m)
	}
	return strings.Join(names, " ")
}
