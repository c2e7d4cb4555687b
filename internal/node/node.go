// Package node is what a graph holds on a box: the sets' link, files,
// accounts, units, the gate. Expand turns a build into its nodes.
package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/graph"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
	"sluice/internal/unit"
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

	keep []string // services of the live build: not stopped by being disabled
}

// Target returns where a file of a bundle goes outside the set; "" if it
// stays inside. Nothing else outside of /opt/sluice is written (I6).
func Target(file string) string {
	for folder, place := range map[string]layout.Place{contract.UnitsFolder: layout.SystemdUnits, contract.SysusersFolder: layout.Sysusers, contract.TmpfilesFolder: layout.Tmpfiles} {
		if name, ok := strings.CutPrefix(file, folder); ok {
			return path.Join(string(place), name)
		}
	}
	return ""
}

// late reports whether a unit file changes only after the commit: an old recover
// is never started by a new unit (I2).
func late(c contract.Component, file string) bool {
	name := path.Base(file)
	return c == layout.Pipeline && strings.HasPrefix(file, contract.UnitsFolder) && (strings.HasPrefix(name, "sluice-apply") || strings.HasPrefix(name, "sluice-recover"))
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

func differs(file string, a, b contract.Manifest) bool {
	fa, ina := a.File(file)
	fb, inb := b.File(file)
	return ina != inb || fa.SHA256 != fb.SHA256 || fa.Mode != fb.Mode
}

func socketOf(service string) string { return strings.TrimSuffix(service, ".service") + ".socket" }

// Enable returns the units that a build arms on this box: a template without
// an instance stands for one instance a component.
func (k Maker) Enable(m contract.Manifest) []string {
	var out []string
	for _, u := range m.Units.Enable {
		if at := strings.Index(u, "@."); at >= 0 {
			for _, c := range k.Components {
				out = append(out, u[:at+1]+string(c)+u[at+1:])
			}
			continue
		}
		out = append(out, u)
	}
	return out
}

// Ledger is that of a move to live, away from retiring.
func (k Maker) Ledger(live, retiring Build) graph.Ledger {
	for _, r := range live.Manifest.Units.Restart {
		k.keep = append(k.keep, r.Unit)
	}
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
		e.add(k.link(b))
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

func (e *expansion) quiet() {
	if e.Boot || e.Passed {
		return
	}
	var nodes []graph.Node
	for _, u := range e.b.Manifest.Units.Quiesce {
		nodes = append(nodes, graph.Node{
			Ref: graph.Ref("quiet:" + u), Help: "stopped before anything changes",
			Check: func(ctx context.Context) graph.Check { return e.inactive(ctx, u) },
			Up:    func(ctx context.Context) error { return e.stop(ctx, u) },
		})
	}
	e.add(nodes...)
}

func (k Maker) link(b Build) graph.Node {
	target := filepath.Join("sets", filepath.Base(b.Set))
	link := k.State.Path(layout.Current)
	return graph.Node{
		Ref: Link, Help: "the set that units run from", Content: target,
		Check: func(context.Context) graph.Check {
			if have, err := os.Readlink(link); err == nil && have == target {
				return graph.Check{Answer: graph.Success}
			}
			return graph.Check{Answer: graph.Failed}
		},
		// SWITCH: the rename that readers see.
		Up:   func(context.Context) error { return k.State.Disk.Symlink(target, link) },
		Down: func(context.Context) error { return k.State.Disk.Remove(link) },
	}
}

// files adds the files that have a place outside the set, those of the
// pipeline's own transaction only after the gate.
func (e *expansion) files(afterGate bool) {
	var nodes []graph.Node
	reload := false
	for _, f := range e.b.Manifest.Files {
		if target := Target(f.Path); target != "" && late(e.State.Name, f.Path) == afterGate {
			nodes = append(nodes, e.file(f, target))
			reload = reload || afterGate && (e.other.None() || differs(f.Path, e.b.Manifest, e.other.Manifest))
		}
	}
	e.add(nodes...)
	if reload {
		e.add(e.reload("reload:late"))
	}
}

func (e *expansion) file(f contract.File, target string) graph.Node {
	from, to := filepath.Join(e.b.Set, filepath.FromSlash(f.Path)), e.State.Root.Join(target)
	name := path.Base(target)
	isUnit := strings.HasPrefix(target, string(layout.SystemdUnits)+"/")
	return graph.Node{
		Ref: graph.Ref("file:" + target), Help: "a file of the build, at its place", Content: string(f.SHA256),
		Check: func(context.Context) graph.Check {
			if Holds(to, f) {
				return graph.Check{Answer: graph.Success}
			}
			return graph.Check{Answer: graph.Failed}
		},
		Up: func(context.Context) error {
			data, err := record.ReadFile(from, contract.MaxUnpacked)
			if err != nil {
				return err
			}
			if record.Sum(data) != f.SHA256 {
				return fmt.Errorf("%q has other bytes than were signed", from)
			}
			if err := e.State.Disk.Mkdir(filepath.Dir(to), 0o755); err != nil {
				return err
			}
			return e.State.Disk.WriteFile(to, data, fs.FileMode(f.Mode))
		},
		Down: func(ctx context.Context) error {
			if isUnit && !e.Boot && !strings.Contains(name, "@.") {
				if err := e.stop(ctx, name); err != nil {
					return err
				}
			}
			return e.State.Disk.Remove(to)
		},
	}
}

// Holds reports whether the file at a path is exactly a file of a build.
func Holds(at string, f contract.File) bool {
	st, err := os.Lstat(at)
	if err != nil || !st.Mode().IsRegular() || st.Size() != f.Size || st.Mode().Perm() != fs.FileMode(f.Mode) {
		return false
	}
	data, err := record.ReadFile(at, f.Size)
	return err == nil && record.Sum(data) == f.SHA256
}

// accounts adds the tools that read sysusers.d and tmpfiles.d, in this order
// and never the other: a tmpfiles line whose group does not resolve is
// dropped silently.
func (e *expansion) accounts() {
	tool := func(folder, batch, help string) {
		var nodes []graph.Node
		for _, f := range e.b.Manifest.Files {
			if strings.HasPrefix(f.Path, folder) {
				nodes = append(nodes, graph.Node{Ref: graph.Ref(batch + ":" + Target(f.Path)), Help: help, Batch: batch, Content: string(f.SHA256),
					Check: func(context.Context) graph.Check { return graph.Check{Answer: graph.Immaterial} }})
			}
		}
		e.add(nodes...)
	}
	tool(contract.SysusersFolder, batchAccounts, "accounts made by systemd-sysusers")
	tool(contract.TmpfilesFolder, batchTmpfiles, "files and folders made by systemd-tmpfiles")
}

func (k Maker) reload(ref graph.Ref) graph.Node {
	return graph.Node{Ref: ref, Help: "the manager has read the unit files",
		Check: func(context.Context) graph.Check { return graph.Check{Answer: graph.Immaterial} },
		Up: func(ctx context.Context) error {
			return k.within(ctx, callTimeout, func(ctx context.Context) error { return k.Manager.Reload(ctx) })
		}}
}

// fresh adds the restarts: sockets first, since a service that runs without
// its socket keeps the socket from being started.
func (e *expansion) fresh() {
	if e.Boot || e.Passed {
		return
	}
	changed := Changed(e.b, e.other)
	var sockets, services []graph.Node
	for _, name := range e.b.Manifest.UnitFiles() {
		if path.Ext(name) != ".socket" || strings.Contains(name, "@.") || !slices.Contains(e.b.Manifest.Units.Enable, name) {
			continue
		}
		_, had := e.other.Manifest.File(contract.UnitsFolder + name)
		service := strings.TrimSuffix(name, ".socket") + ".service"
		// A socket that is new comes before its service; one whose own file
		// changed is restarted; any other is left alone, so that clients queue
		// and lose nothing.
		if had && differs(contract.UnitsFolder+name, e.b.Manifest, e.other.Manifest) || !had && slices.Contains(changed, service) {
			sockets = append(sockets, graph.Node{Ref: graph.Ref("fresh:" + name), Help: "started before its service, since its file is new or changed",
				Up: func(ctx context.Context) error { return e.restartSocket(ctx, name, service) }})
		}
	}
	for _, u := range changed {
		services = append(services, graph.Node{
			Ref: graph.Ref("fresh:" + u), Help: "restarted, since its file or an input changed",
			Up:   func(ctx context.Context) error { return e.Restart(ctx, u) },
			Down: func(ctx context.Context) error { return e.stop(ctx, u) },
		})
	}
	e.add(sockets...)
	e.add(services...)
}

// Restart restarts a service, whatever its start limit says, and notes how
// the job ended: the gate judges that, since it knows the reason.
func (k Maker) Restart(ctx context.Context, u string) error {
	if k.Restarting != nil {
		k.Restarting()
	}
	// A unit in start-limit-hit is stopped by a restart and then not started;
	// one that is not loaded makes this call fail, which says nothing.
	_ = k.within(ctx, callTimeout, func(ctx context.Context) error { return k.Manager.ResetFailed(ctx, u) })
	return k.within(ctx, k.stopTime(ctx, u)+startTimeout, func(ctx context.Context) error {
		job, err := k.Manager.Restart(ctx, u)
		if err == nil && k.Jobs != nil {
			k.Jobs[u] = job
		}
		return err
	})
}

// restartSocket stops the service first: it holds the socket open.
func (k Maker) restartSocket(ctx context.Context, socket, service string) error {
	if err := k.stop(ctx, service); err != nil {
		return err
	}
	_ = k.within(ctx, callTimeout, func(ctx context.Context) error { return k.Manager.ResetFailed(ctx, socket) })
	return k.within(ctx, startTimeout, func(ctx context.Context) error {
		job, err := k.Manager.Restart(ctx, socket)
		return systemd.Done("restarting", socket, job, err)
	})
}

// active adds, on the way back, the units that were active and that neither
// a restart nor arming starts.
func (e *expansion) active() {
	if e.Boot || e.Passed {
		return
	}
	var nodes []graph.Node
	armed := e.Enable(e.b.Manifest)
	for _, u := range e.WasActive {
		if slices.Contains(Changed(e.b, e.other), u) || unit.Armed(u) && slices.Contains(armed, u) || !e.b.Manifest.Ships(u) {
			continue
		}
		pass := slices.Contains(e.b.Manifest.Units.Quiesce, u) // a oneshot that was in the middle of a pass
		nodes = append(nodes, graph.Node{Ref: graph.Ref("active:" + u), Help: "active, as it was before the roll",
			Check: func(ctx context.Context) graph.Check { return e.isActive(ctx, u) },
			Up: func(ctx context.Context) error {
				_ = e.within(ctx, callTimeout, func(ctx context.Context) error { return e.Manager.ResetFailed(ctx, u) })
				if pass {
					return e.within(ctx, callTimeout, func(ctx context.Context) error { return e.Manager.Queue(ctx, u) })
				}
				// How it ends is for the gate to judge, not for the way back to fail on.
				return e.within(ctx, startTimeout, func(ctx context.Context) error {
					_, err := e.Manager.Start(ctx, u)
					return err
				})
			}})
	}
	e.add(nodes...)
}

func (k Maker) gate(ctx context.Context) error {
	if k.Gate == nil {
		return nil
	}
	return k.Gate(ctx)
}

func (e *expansion) enabled() {
	var nodes []graph.Node
	for _, u := range e.Enable(e.b.Manifest) {
		nodes = append(nodes, graph.Node{Ref: graph.Ref("enabled:" + u), Help: "enabled, and started if it is a timer, path or socket", Batch: batchEnabled,
			Check: func(ctx context.Context) graph.Check { return e.isArmed(ctx, u) }})
	}
	e.add(nodes...)
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

func (k Maker) tool(ctx context.Context, refs []graph.Ref, argv ...string) error {
	for _, file := range names(refs) {
		argv = append(argv, k.State.Root.Join(file))
	}
	out, err := k.Manager.Run(ctx, systemd.Command{Argv: argv, Profile: systemd.Tool, Timeout: toolTimeout, Output: toolOutput})
	if err != nil {
		return err
	}
	if out.Status != 0 {
		return fmt.Errorf("%s: exit status %d%s: %s", argv[0], out.Status, out.Ended, bytes.TrimSpace([]byte(out.Text)))
	}
	return nil
}

// arm enables units in one call, and starts those that may be started from
// here.
func (k Maker) arm(ctx context.Context, refs []graph.Ref) error {
	units := names(refs)
	var changed bool
	err := k.within(ctx, callTimeout, func(ctx context.Context) (err error) {
		changed, err = k.Manager.Enable(ctx, units)
		return err
	})
	if err != nil {
		return err
	}
	if changed { // new links are dependencies that the manager has to read
		if err := k.within(ctx, callTimeout, func(ctx context.Context) error { return k.Manager.Reload(ctx) }); err != nil {
			return err
		}
	}
	var errs []error
	for _, u := range units {
		switch {
		case k.Boot:
			errs = append(errs, k.within(ctx, callTimeout, func(ctx context.Context) error { return k.Manager.Queue(ctx, u) }))
		case unit.Armed(u):
			errs = append(errs, k.start(ctx, u))
		}
	}
	return errors.Join(errs...)
}

func (k Maker) start(ctx context.Context, u string) error {
	return k.within(ctx, startTimeout, func(ctx context.Context) error {
		job, err := k.Manager.Start(ctx, u)
		return systemd.Done("starting", u, job, err)
	})
}

// disarm is disable --now: triggers first, so that nothing starts what has
// just been stopped.
func (k Maker) disarm(ctx context.Context, refs []graph.Ref) error {
	units := names(refs)
	slices.SortStableFunc(units, func(a, b string) int {
		switch {
		case unit.Armed(a) == unit.Armed(b):
			return 0
		case unit.Armed(a):
			return -1
		}
		return 1
	})
	if !k.Boot {
		for _, u := range units {
			if slices.Contains(k.keep, u) {
				continue
			}
			if err := k.stop(ctx, u); err != nil {
				return err
			}
		}
	}
	return k.within(ctx, callTimeout, func(ctx context.Context) error {
		_, err := k.Manager.Disable(ctx, units)
		if errors.Is(err, systemd.ErrNoUnit) {
			return nil // the walk that is undone had not come so far
		}
		return err
	})
}

func (k Maker) isArmed(ctx context.Context, u string) graph.Check {
	got, err := k.Manager.Unit(ctx, u)
	if err != nil {
		return graph.Check{Answer: graph.Unknown, Text: err.Error()}
	}
	if got.UnitFileState != "enabled" || k.Boot || unit.Armed(u) && k.Manager.Live() && !got.Active() {
		return graph.Check{Answer: graph.Failed, Text: got.UnitFileState + ", " + got.ActiveState}
	}
	return graph.Check{Answer: graph.Success}
}

func (k Maker) isActive(ctx context.Context, u string) graph.Check {
	got, err := k.Manager.Unit(ctx, u)
	if err != nil || !got.Active() {
		return graph.Check{Answer: graph.Failed}
	}
	return graph.Check{Answer: graph.Success}
}

func (k Maker) inactive(ctx context.Context, u string) graph.Check {
	got, err := k.Manager.Unit(ctx, u)
	if err == nil && (got.LoadState == "not-found" || got.ActiveState == "inactive") {
		return graph.Check{Answer: graph.Success}
	}
	return graph.Check{Answer: graph.Failed}
}

// stop stops a unit that is not inactive.
func (k Maker) stop(ctx context.Context, u string) error {
	got, err := k.Manager.Unit(ctx, u)
	if err == nil && (got.LoadState == "not-found" || got.ActiveState == "inactive" || got.ActiveState == "failed") {
		return nil
	}
	return k.within(ctx, k.stopTime(ctx, u), func(ctx context.Context) error {
		job, err := k.Manager.Stop(ctx, u)
		return systemd.Done("stopping", u, job, err)
	})
}

// stopTime is how long stopping a unit may take: as long as the manager gives
// it, and a little.
func (k Maker) stopTime(ctx context.Context, u string) time.Duration {
	got, err := k.Manager.Unit(ctx, u)
	if err != nil || got.TimeoutStop > maxStop-stopSlack {
		return maxStop
	}
	return got.TimeoutStop + stopSlack
}

func (k Maker) within(ctx context.Context, d time.Duration, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return do(ctx)
}

// CheckShipped refuses a manifest that enables, restarts or quiesces a unit
// which it does not ship: somebody else's.
func CheckShipped(m contract.Manifest) error {
	units := slices.Concat(m.Units.Enable, m.Units.Inert, m.Units.Quiesce)
	for _, r := range m.Units.Restart {
		units = append(units, r.Unit)
	}
	for _, u := range units {
		if !m.Ships(u) {
			return outcome.Refuse(outcome.ForeignFile, "%s %s handles unit %q, which it does not ship", m.Component, m.Version, u)
		}
	}
	return nil
}
