package apply

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/graph"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// Heal puts right what nothing else would: path units that the manager gave
// up on, leftovers of killed runs, a roll that was cut by hand and that no
// OnFailure= recovers, a self-update that does not prove itself. What the good
// build made is only looked at, and told of in drift.json. It restarts no
// service of a component. It waits for no lock: who holds one is at work.
func (a *Applier) Heal(ctx context.Context) error {
	busy, cancel := context.WithCancel(ctx)
	cancel()
	lock, err := durable.Acquire(busy, a.State.Path(layout.Lock))
	if errors.Is(err, durable.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	errs := []error{a.rearm(ctx)}
	putBack := false
	if !a.State.Open() {
		if conf, cerr := config.LoadComponent(a.State.Root, a.State.Name); cerr == nil { // it is followed
			a.conf = conf
			_, err = a.good() // a damaged applied.json is made again
			errs = append(errs, err)
		}
		if a.State.Name == layout.Pipeline {
			putBack, err = a.tryOn(ctx)
			errs = append(errs, err)
		}
	}
	open := a.State.Open()
	if !open {
		errs = append(errs, a.tidy(), a.look(ctx))
	}
	lock.Release()
	switch {
	case open && putBack:
		errs = append(errs, a.recoverFromPrior(ctx))
	case open:
		a.Log.Warn("a roll is open and nobody is at work on it: starting its recovery", "component", a.State.Name)
		errs = append(errs, a.Manager.Queue(ctx, fmt.Sprintf("sluice-recover@%s.service", a.State.Name)))
	}
	return errors.Join(errs...)
}

// rearm starts the path units that should watch and do not. A failed one
// never comes back by itself: its service has to be reset first.
func (a *Applier) rearm(ctx context.Context) error {
	// What a killed apply ran is nobody's any more.
	runs, err := a.Manager.Failed(ctx, systemd.RunPattern)
	errs := []error{err}
	for _, u := range runs {
		errs = append(errs, a.Manager.ResetFailed(ctx, u))
	}
	for _, step := range []string{"verify", "stage", "apply"} {
		path := fmt.Sprintf("sluice-%s@%s.path", step, a.State.Name)
		u, err := a.Manager.Unit(ctx, path)
		if err != nil {
			return err
		}
		if u.LoadState == "not-found" || u.Active() {
			continue
		}
		a.Log.Warn("a path unit does not watch: starting it", "component", a.State.Name, "unit", path, "state", u.ActiveState)
		_ = a.Manager.ResetFailed(ctx, fmt.Sprintf("sluice-%s@%s.service", step, a.State.Name)) // says nothing if it is not loaded
		_ = a.Manager.ResetFailed(ctx, path)
		job, err := a.Manager.Start(ctx, path)
		errs = append(errs, systemd.Done("starting", path, job, err))
	}
	if a.State.Name == layout.Pipeline {
		u, err := a.Manager.Unit(ctx, bootService)
		if err == nil && u.LoadState == "loaded" && u.UnitFileState != "enabled" {
			a.Log.Warn("recovery at boot is not enabled: enabling it", "unit", bootService, "state", u.UnitFileState)
			_, err = a.Manager.Enable(ctx, []string{bootService})
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// look compares the box with what the good build made of it, and tells of the
// difference. The link good follows applied.json.
func (a *Applier) look(ctx context.Context) error {
	applied, ok, err := record.LoadOrQuarantine[contract.Applied](a.State, layout.Applied, a.report)
	if err != nil || !ok {
		return err
	}
	set := a.State.Set(applied.Version)
	m, damage := record.CheckSet(set, applied.ManifestSHA256)
	if damage != nil {
		a.report(fmt.Errorf("the good set is damaged, it is fetched again when %s is what the channel shows: %w", applied.Version, damage))
	}
	var refs []contract.DriftRef
	if m.Component == a.State.Name { // it could be read
		if err := a.State.Disk.Symlink(filepath.Join("sets", string(applied.Version)), a.State.Path(layout.Good)); err != nil {
			return err
		}
		names, err := config.Components(a.State.Root)
		if err != nil {
			return err
		}
		dag := node.Maker{State: a.State, Manager: a.Manager, Components: names, Passed: true}.Ledger(node.Build{Manifest: m, Set: set}, node.Build{}).Fold()
		for _, ref := range dag.Order() {
			n, _ := dag.Node(ref)
			if n.Check == nil {
				continue
			}
			switch c := n.Check(ctx); c.Answer {
			case graph.Failed:
				refs = append(refs, contract.DriftRef{Ref: string(ref), State: record.Drifted, Text: contract.Clip(c.Text)})
			case graph.Unknown:
				refs = append(refs, contract.DriftRef{Ref: string(ref), State: record.Unknown, Text: contract.Clip(c.Text)})
			}
		}
	}
	for _, r := range refs {
		a.Log.Warn("not as the good build made it", "component", a.State.Name, "ref", r.Ref, "state", r.State, "text", r.Text)
	}
	return a.State.NoteDrift(applied.Version, damage, refs, contract.At(a.Now()))
}

// tidy removes what killed runs left among root's files of the component. The
// caller holds the lock, so that none of it is in use.
func (a *Applier) tidy() error {
	base := a.State.Path(layout.OptOf)
	entries, err := os.ReadDir(base)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") && strings.HasSuffix(e.Name(), durable.TempSuffix) {
			errs = append(errs, a.State.Disk.Remove(filepath.Join(base, e.Name())))
		}
	}
	// Cut before its journal was open, a roll leaves what it kept for going back.
	errs = append(errs, a.State.Disk.Remove(a.State.Path(layout.Reserve)))
	back := contract.BeforeSluice // a first roll's way
	if applied := record.Optional[contract.Applied](a.State, layout.Applied); applied != nil {
		back = applied.Version
	}
	if m, _, err := record.Manifest(a.State.Set(back)); err == nil {
		errs = append(errs, node.Maker{State: a.State}.DropWayBack(node.Build{Manifest: m}))
	}
	sets, err := os.ReadDir(a.State.Path(layout.Sets))
	if err != nil {
		return err
	}
	for _, e := range sets {
		if strings.HasPrefix(e.Name(), ".") { // being built, or being removed
			errs = append(errs, a.State.Disk.RemoveTree(filepath.Join(a.State.Path(layout.Sets), e.Name())))
		}
	}
	return errors.Join(errs...)
}
