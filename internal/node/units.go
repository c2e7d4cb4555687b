package node

import (
	"context"
	"errors"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/graph"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
	"sluice/internal/unit"
)

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
		// Links are made from [Install]: where that differs, those of the other
		// build are still there, and look like enabled.
		stale := slices.Contains(e.relinked, u)
		nodes = append(nodes, graph.Node{Ref: graph.Ref("enabled:" + u), Help: "enabled, and started if it is a timer, path or socket", Batch: batchEnabled,
			Check: func(ctx context.Context) graph.Check {
				if stale {
					return graph.Check{Answer: graph.Failed, Text: "its [Install] section changed"}
				}
				return e.isArmed(ctx, u)
			}})
	}
	e.add(nodes...)
}

// relink returns the units that two builds enable by other links.
func (k Maker) relink(live, retiring Build) []string {
	var out []string
	before := k.Enable(retiring.Manifest)
	for _, u := range k.Enable(live.Manifest) {
		file := contract.UnitsFolder + contract.UnitFile(u)
		if slices.Contains(before, u) && differs(file, live.Manifest, retiring.Manifest) && live.install(file) != retiring.install(file) {
			out = append(out, u)
		}
	}
	return out
}

// install is what enabling a unit file makes links of; what can't be read is
// like nothing else.
func (b Build) install(file string) string {
	data, err := record.ReadFile(filepath.Join(b.Set, filepath.FromSlash(file)), unit.MaxFile)
	if err != nil {
		return err.Error()
	}
	return unit.Install(data)
}

// arm enables units in one call, and starts those that may be started from
// here.
func (k Maker) arm(ctx context.Context, refs []graph.Ref) error {
	units := names(refs)
	var changed bool
	err := k.within(ctx, callTimeout, func(ctx context.Context) error {
		var stale []string
		for _, u := range units {
			if slices.Contains(k.relinked, u) {
				stale = append(stale, u)
			}
		}
		if len(stale) > 0 {
			if _, err := k.Manager.Disable(ctx, stale); err != nil && !errors.Is(err, systemd.ErrNoUnit) {
				return err
			}
		}
		var err error
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
