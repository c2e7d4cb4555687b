package graph

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// A Direction is which way a node goes.
type Direction string

// The directions.
const (
	Up   Direction = "up"
	Down Direction = "down"
)

// A State is how one node ended in a walk.
type State string

// The states.
const (
	Done    State = "done"    // its up or down was run, and succeeded
	Already State = "skipped" // its effect was there, or gone, already
	Failure State = "failed"
	Blocked State = "blocked" // a neighbour that it waits for did not succeed in this pass
)

// A Report is one node's end in a walk.
type Report struct {
	Ref       Ref
	Direction Direction
	State     State
	Err       error // of failed and blocked
}

func (r Report) String() string {
	s := fmt.Sprintf("%s %s: %s", r.Ref, r.Direction, r.State)
	if r.Err != nil {
		s += ": " + r.Err.Error()
	}
	return s
}

// A Walk is a walk's surroundings.
type Walk struct {
	// Before is told of each change before it is made; its error is the
	// failure of the nodes.
	Before func(d Direction, label string) error
	// FirstFailure ends the walk there: what comes after is blocked. Going
	// forward there is no use in doing more; going back, all that can be done is.
	FirstFailure bool
}

// Converge is the two walks. Down: every ref that is known but not wanted,
// dependants before dependencies. Then up: every wanted ref, dependencies
// before dependants. One pass, one attempt a node, every node reported once.
// What does not depend on a failed node still runs.
func (d *Dag) Converge(ctx context.Context, w Walk) []Report {
	var reports []Report
	run := func(g *group, dir Direction, blocked *group, ended map[*group]bool) {
		if w.FirstFailure && Err(reports) != nil {
			for _, m := range g.members {
				reports = append(reports, Report{m, dir, Blocked, errors.New("the walk has ended before it")})
			}
			return
		}
		reports = append(reports, d.run(ctx, w, g, dir, blocked, ended)...)
	}
	for _, g := range d.cyclic {
		for _, m := range g.members {
			reports = append(reports, Report{m, d.direction(m), Blocked, errors.New("it waits for itself, through " + cycle(g))})
		}
	}
	ended := map[*group]bool{} // reached, in this pass, what its dependants and dependencies wait for
	for _, g := range slices.Backward(d.groups) {
		if !d.wanted[g.members[0]] {
			run(g, Down, blocker(g.after, ended, func(n *group) bool { return !d.wanted[n.members[0]] }), ended)
		}
	}
	for _, g := range d.groups {
		if d.wanted[g.members[0]] {
			run(g, Up, blocker(g.before, ended, func(n *group) bool { return d.wanted[n.members[0]] }), ended)
		}
	}
	return reports
}

func (d *Dag) direction(ref Ref) Direction {
	if d.wanted[ref] {
		return Up
	}
	return Down
}

// blocker returns a neighbour of the same direction that did not succeed.
func blocker(neighbours map[*group]bool, ended map[*group]bool, same func(*group) bool) *group {
	for n := range neighbours {
		if same(n) && !ended[n] {
			return n
		}
	}
	return nil
}

// cycle names the groups of a cycle that g is in or waits for.
func cycle(g *group) string {
	var path []string
	seen := map[*group]bool{}
	for at := g; at != nil && !seen[at]; {
		seen[at] = true
		path = append(path, at.label())
		var next *group
		for n := range at.before {
			if next == nil || n.label() < next.label() {
				next = n
			}
		}
		at = next
	}
	return strings.Join(path, " ← ")
}

// run takes one group in one direction.
func (d *Dag) run(ctx context.Context, w Walk, g *group, dir Direction, blocked *group, ended map[*group]bool) []Report {
	all := func(s State, err error) []Report {
		var out []Report
		for _, m := range g.members {
			out = append(out, Report{m, dir, s, err})
		}
		return out
	}
	if blocked != nil {
		return all(Blocked, fmt.Errorf("waits for %s", blocked.label()))
	}
	if err := ctx.Err(); err != nil {
		return all(Blocked, err)
	}
	var reports []Report
	var todo []Ref
	for _, m := range g.members {
		if dir == Up && d.there(ctx, m) {
			reports = append(reports, Report{m, dir, Already, nil})
			continue
		}
		todo = append(todo, m)
	}
	if len(todo) > 0 {
		err := d.change(ctx, w, g, dir, todo)
		state := Done
		if err != nil {
			state = Failure
		}
		for _, m := range todo {
			reports = append(reports, Report{m, dir, state, err})
		}
		if err != nil {
			return reports
		}
	}
	ended[g] = true
	return reports
}

// there asks a node whether its effect is there. A check that panics is the
// failure of one node, which then runs up.
func (d *Dag) there(ctx context.Context, ref Ref) (there bool) {
	check := d.nodes[ref].Check
	if check == nil {
		return false
	}
	defer func() {
		if recover() != nil {
			there = false
		}
	}()
	switch check(ctx).Answer {
	case Success, Skipped, Completed:
		return true
	}
	return false
}

func (d *Dag) change(ctx context.Context, w Walk, g *group, dir Direction, todo []Ref) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	if w.Before != nil {
		if err := w.Before(dir, g.label()); err != nil {
			return err
		}
	}
	if name := d.nodes[todo[0]].Batch; name != "" {
		do := d.batches[name].Up
		if dir == Down {
			do = d.batches[name].Down
		}
		if do == nil {
			return nil
		}
		return do(ctx, todo)
	}
	do := d.nodes[todo[0]].Up
	if dir == Down {
		do = d.nodes[todo[0]].Down
	}
	if do == nil {
		return nil
	}
	return do(ctx)
}

// Err joins what went wrong in a walk; nil if every node succeeded. Blocked
// nodes are only told of where nothing failed.
func Err(reports []Report) error {
	var failed, blocked []error
	for _, r := range reports {
		switch r.State {
		case Failure:
			failed = append(failed, fmt.Errorf("%s: %w", r.Ref, r.Err))
		case Blocked:
			blocked = append(blocked, fmt.Errorf("%s: %w", r.Ref, r.Err))
		}
	}
	if len(failed) > 0 {
		return errors.Join(failed...)
	}
	return errors.Join(blocked...)
}
