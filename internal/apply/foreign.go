package apply

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// elsewhere is where units come from that are nobody's of ours
// (systemd.unit(5), the system's unit search path).
var elsewhere = []string{"/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"}

// refuseForeign refuses to touch what is not ours: a target path that exists
// and that no set of ours accounts for, or a unit name that comes from
// elsewhere. The caller holds host.lock.
func (r *roll) refuseForeign(ctx context.Context) error {
	others, err := r.claims()
	if err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	for _, f := range r.target.Manifest.Files {
		target := node.Target(f.Path)
		if target == "" {
			continue
		}
		if other, taken := others[target]; taken {
			return outcome.Refuse(outcome.ForeignFile, "%q belongs to component %s", target, other)
		}
		if old, ours := r.good.Manifest.File(f.Path); ours {
			if err := r.keepDrift(target, old); err != nil {
				return outcome.Defer(outcome.IO, "%w", err)
			}
			continue
		}
		if alias, err := os.Readlink(r.State.Root.Join(target)); err == nil && r.good.Manifest.Ships(filepath.Base(alias)) && slices.Contains([]string{"/", string(layout.SystemdUnits)}, path.Join("/", path.Dir(alias))) {
			continue // enabling the good build made it an alias
		}
		if _, err := os.Lstat(r.State.Root.Join(target)); !errors.Is(err, fs.ErrNotExist) && !r.adopts(target) {
			return outcome.Refuse(outcome.ForeignFile, "%q exists, and no build of %s put it there: move it away, or let the first roll take it over with SLUICE_ADOPT, in %q", target, r.State.Name, r.State.Path(layout.ComponentConf))
		}
		if name, isUnit := strings.CutPrefix(target, string(layout.SystemdUnits)+"/"); isUnit {
			if err := r.refuseUnit(ctx, name); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *roll) refuseUnit(ctx context.Context, name string) error {
	for _, dir := range elsewhere {
		if at := path.Join(dir, name); exists(r.State.Root.Join(at)) && !r.adopts(at) {
			return outcome.Refuse(outcome.ForeignFile, "unit %q is there already, as %q", name, at)
		}
	}
	if strings.Contains(name, "@.") {
		return nil // only instances are loaded
	}
	u, err := r.Manager.Unit(ctx, name)
	if err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	if u.LoadState != "not-found" && u.FragmentPath != "" && u.FragmentPath != path.Join(string(layout.SystemdUnits), name) && !r.adopts(u.FragmentPath) {
		return outcome.Refuse(outcome.ForeignFile, "unit %q is loaded already, from %q", name, u.FragmentPath)
	}
	return nil
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// claims returns the target paths that the good set, or the open roll, of
// another component accounts for.
func (r *roll) claims() (map[string]contract.Component, error) {
	names, err := record.Components(r.State.Root)
	if err != nil {
		return nil, err
	}
	out := map[string]contract.Component{}
	for _, name := range names {
		if name == r.State.Name {
			continue
		}
		other := record.State{Root: r.State.Root, Disk: r.State.Disk, Name: name}
		var builds []contract.Build
		if a, ok, err := record.Load[contract.Applied](other, layout.Applied); ok && err == nil {
			builds = append(builds, a.Build)
		}
		if j, ok, err := record.Load[contract.Journal](other, layout.Journal); ok && err == nil {
			builds = append(builds, j.Target)
		}
		for _, b := range builds {
			m, _, err := record.Manifest(other.Set(b.Version))
			if err != nil {
				r.report(fmt.Errorf("component %s: %w, ignoring what it claims", name, err))
				continue
			}
			for _, f := range m.Files {
				if target := node.Target(f.Path); target != "" {
					out[target] = name
				}
			}
		}
	}
	return out, nil
}

// keepDrift saves a file of ours that somebody has changed beside itself,
// before it is replaced.
func (r *roll) keepDrift(target string, want contract.File) error {
	at := r.State.Root.Join(target)
	if !exists(at) || node.Holds(at, want) {
		return nil
	}
	aside := filepath.Join(filepath.Dir(at), "."+filepath.Base(at)+".sluice-drift")
	data, err := record.ReadFile(at, contract.MaxUnpacked)
	if err != nil {
		return err
	}
	r.Log.Warn(fmt.Sprintf("%q was changed on this box; what it was is kept as %q", target, filepath.Base(aside)), "component", r.State.Name)
	return r.State.Disk.WriteFile(aside, data, 0o644)
}
