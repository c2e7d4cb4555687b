// Package node is what a graph holds on a box: the sets' link, files,
// accounts, units, the gate. Expand turns a build into its nodes.
package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/graph"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// Deadlines of the nodes. Stopping an old process has its own: its
// TimeoutStopUSec and stopSlack, at most maxStop.
const (
	callTimeout  = 30 * time.Second
	toolTimeout  = 60 * time.Second
	startTimeout = 2 * time.Minute
	stopSlack    = 5 * time.Second
	maxStop      = 2 * time.Minute
	toolOutput   = 4 << 10
)

// Refs of what a component has one of.
const (
	Gate graph.Ref = "gate"
	Link graph.Ref = "link:current"
)

// Batches of nodes that are done in one call.
const (
	batchAccounts = "accounts"
	batchTmpfiles = "tmpfiles"
	batchEnabled  = "enabled"
)

// A Build is one side of a transaction: a set, and what its manifest says.
// The zero value is nothing at all: what a first install comes from.
type Build struct {
	Manifest contract.Manifest
	Set      string // folder
}

// None reports whether this is nothing at all.
func (b Build) None() bool { return b.Set == "" }

// A Maker makes the nodes of one component.
type Maker struct {
	State      record.State
	Manager    systemd.Manager
	Components []contract.Component // that the box follows: instances of templates that are enabled
	// Boot: nothing is stopped, judged or waited for; starts are queued, since
	// a program that is ordered before a unit can't wait for it.
	Boot bool
	// Passed: the gate has been passed in an earlier life. Only what must be in
	// place and what comes after the gate is made.
	Passed bool
	// Gate is what the gate does; nil: there is none to pass.
	Gate func(context.Context) error
	// Restarting is told before the first restart, so that answers can be watched.
	Restarting func()
	// Jobs collects the result of each restart, for the gate to judge.
	Jobs map[string]string
	// WasActive are units that are to be active before the gate, on the way back.
	WasActive []string

	keep     []string // services of the live build: not stopped by being disabled
	relinked []string // units that the live build enables by other links
}

// Changed returns the units that a move between two builds restarts: those
// whose own file or one of whose inputs differs, byte for byte.
func Changed(a, b Build) []string {
	var out []string
	for _, r := range a.Manifest.Units.Restart {
		if b.None() || restarts(r, a.Manifest, b.Manifest) {
			out = append(out, r.Unit)
		}
	}
	return out
}

func restarts(r contract.Restart, a, b contract.Manifest) bool {
	if !slices.ContainsFunc(b.Units.Restart, func(o contract.Restart) bool { return o.Unit == r.Unit }) {
		return true
	}
	// Both builds' inputs count, so that the answer is the same from both sides.
	inputs := []string{contract.UnitsFolder + contract.UnitFile(r.Unit), contract.UnitsFolder + socketOf(r.Unit)}
	for _, m := range []contract.Manifest{a, b} {
		i := slices.IndexFunc(m.Units.Restart, func(o contract.Restart) bool { return o.Unit == r.Unit })
		inputs = append(inputs, m.Units.Restart[i].Inputs...)
		if len(m.Units.Restart[i].Inputs) == 0 {
			for _, f := range slices.Concat(a.Files, b.Files) {
				inputs = append(inputs, f.Path)
			}
		}
	}
	return slices.ContainsFunc(inputs, func(in string) bool { return differs(in, a, b) })
}

func socketOf(service string) string { return strings.TrimSuffix(service, ".service") + ".socket" }

// Ledger is that of a move to live, away from retiring.
func (k Maker) Ledger(live, retiring Build) graph.Ledger {
	for _, r := range live.Manifest.Units.Restart {
		k.keep = append(k.keep, r.Unit)
	}
	k.relinked = k.relink(live, retiring)
	return graph.Ledger{Batches: k.Batches(), Contributions: []graph.Contribution{k.Expand(retiring, live, false), k.Expand(live, retiring, true)}}
}

// Expand returns what a build contributes, given the build on the other side
// of the transaction.
func (k Maker) Expand(b, other Build, live bool) graph.Contribution {
	c := graph.Contribution{Name: fmt.Sprintf("%s@%s", k.State.Name, b.Manifest.Version), Live: live}
	if b.None() {
		c.Name = string(k.State.Name) + "@nothing"
	}
	e := expansion{Maker: k, b: b, other: other, c: &c}
	if !b.None() {
		e.quiet()
		if b.Manifest.Version != contract.BeforeSluice { // nothing ran from a set then
			e.add(k.link(b))
		}
		e.files(false)
		if !k.Passed {
			e.accounts()
		}
	}
	if b.hasUnits() || other.hasUnits() {
		e.add(k.reload("reload"))
	}
	if !b.None() {
		e.fresh()
		e.active()
		e.add(graph.Node{Ref: Gate, Help: "what must become true, and stay true", Content: string(b.Manifest.Version), Up: k.gate})
		e.files(true)
		e.enabled()
	}
	e.edges()
	return c
}

func (b Build) hasUnits() bool { return len(b.Manifest.UnitFiles()) > 0 }

// An expansion is a contribution in the making. Stages come in order: each
// node waits for all of the stages before its own.
type expansion struct {
	Maker
	b, other Build
	c        *graph.Contribution
	stages   [][]graph.Ref
}

func (e *expansion) add(nodes ...graph.Node) {
	var refs []graph.Ref
	for _, n := range nodes {
		e.c.Nodes = append(e.c.Nodes, n)
		refs = append(refs, n.Ref)
	}
	if len(refs) > 0 {
		e.stages = append(e.stages, refs)
	}
}

// edges makes every node wait for all nodes of earlier stages. Neighbouring
// stages would do to order them, but not on the way down, where a node
// between two others may be one that stays.
func (e *expansion) edges() {
	for i, stage := range e.stages {
		for _, earlier := range e.stages[:i] {
			for _, to := range stage {
				for _, from := range earlier {
					e.c.Edges = append(e.c.Edges, graph.Edge{From: from, To: to})
				}
			}
		}
	}
}

// Batches returns the calls that do many nodes at once.
func (k Maker) Batches() map[string]graph.Batch {
	return map[string]graph.Batch{
		batchAccounts: {Up: func(ctx context.Context, refs []graph.Ref) error { return k.tool(ctx, refs, "systemd-sysusers") }},
		batchTmpfiles: {Up: func(ctx context.Context, refs []graph.Ref) error {
			return k.tool(ctx, refs, "systemd-tmpfiles", "--create")
		}},
		batchEnabled: {Up: k.arm, Down: k.disarm},
	}
}

func names(refs []graph.Ref) []string {
	var out []string
	for _, r := range refs {
		_, name, _ := strings.Cut(string(r), ":")
		out = append(out, name)
	}
	return out
}

func (k Maker) within(ctx context.Context, d time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return do(ctx)
}
