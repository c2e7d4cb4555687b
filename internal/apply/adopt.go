package apply

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/unit"
)

// A box that was set up by hand has files where a first roll wants to put its
// own. SLUICE_ADOPT lists those that it may take over. Their bytes, and which of
// the units are enabled and active, are saved as the set before-sluice: for
// as long as nothing has been applied, that is what going back means.

// unitFolders are where the manager reads units from.
var unitFolders = append([]string{string(layout.SystemdUnits)}, elsewhere...)

// adopts reports whether this roll may take a path over. Only a first one does.
func (r *roll) adopts(path string) bool {
	return r.good.None() && slices.ContainsFunc(r.conf.Adopt, func(a string) bool { return r.samePath(a, path) })
}

// samePath reports whether two paths are one: /lib is a link to /usr/lib on
// most systems.
func (r *roll) samePath(a, b string) bool {
	if a == b || path.Base(a) != path.Base(b) {
		return a == b
	}
	da, aerr := os.Stat(r.State.Root.Join(path.Dir(a)))
	db, berr := os.Stat(r.State.Root.Join(path.Dir(b)))
	return aerr == nil && berr == nil && os.SameFile(da, db)
}

// adopt saves what this roll takes over, durably, before the journal opens. At
// each try it is saved afresh: between two tries the box is its owner's.
func (r *roll) adopt(ctx context.Context) error {
	if !r.good.None() || len(r.conf.Adopt) == 0 {
		return nil
	}
	partial := r.State.Root.PartialSet(string(r.State.Name), string(contract.BeforeSluice))
	set := r.State.Set(contract.BeforeSluice)
	disk := r.State.Disk
	m, err := r.takeOver(ctx, partial)
	if err != nil {
		return errors.Join(err, disk.RemoveTree(partial))
	}
	data := m.Encode()
	err = errors.Join(m.Check(), disk.WriteFile(filepath.Join(partial, contract.ManifestName), data, 0o644), disk.SyncTree(partial), disk.RemoveTree(set))
	if err == nil {
		err = disk.Rename(partial, set)
	}
	if err != nil {
		return errors.Join(outcome.Defer(wordOf(err, outcome.IO), "saving what SLUICE_ADOPT lists: %w", err), disk.RemoveTree(partial))
	}
	r.good = node.Build{Manifest: m, Set: set}
	r.journal.Good = &contract.Build{Tuple: contract.Tuple{Channel: r.conf.Channel, Version: m.Version}, ManifestSHA256: record.Sum(data)}
	r.Log.Info("taking over what was put here by hand", "component", r.State.Name, "paths", strings.Join(r.conf.Adopt, " "))
	return nil
}

// takeOver copies each path below partial, and returns the manifest of that.
func (r *roll) takeOver(ctx context.Context, partial string) (contract.Manifest, error) {
	m := contract.Manifest{Schema: contract.One, Component: r.State.Name, Version: contract.BeforeSluice, Platform: contract.Here(), Gate: r.target.Manifest.Gate}
	// Probes are for what is new, and so is a window that is shorter than usual.
	m.Gate.Probes, m.Gate.PassWithin = nil, max(m.Gate.PassWithin, contract.DefaultPassWithin)
	others, err := r.claims()
	if err != nil {
		return m, outcome.Defer(outcome.IO, "%w", err)
	}
	if err := errors.Join(r.State.Disk.RemoveTree(partial), r.State.Disk.Mkdir(partial, 0o755)); err != nil {
		return m, outcome.Defer(wordOf(err, outcome.IO), "%w", err)
	}
	for i, at := range r.conf.Adopt {
		if other, taken := others[at]; taken {
			return m, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which belongs to component %s", at, other)
		}
		if slices.ContainsFunc(r.conf.Adopt[:i], func(a string) bool { return r.samePath(a, at) }) {
			continue
		}
		if strings.Contains(path.Base(at), "@.") || strings.HasSuffix(path.Dir(at), ".d") && slices.Contains(unitFolders, path.Dir(path.Dir(at))) {
			return m, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q: templates and drop-ins can't be taken over, stop and move them away yourself", at)
		}
		data, mode, err := r.handMade(at)
		if err != nil {
			return m, err
		}
		f := contract.File{Path: r.placeOf(at), Mode: contract.Mode(mode), Size: int64(len(data)), SHA256: record.Sum(data)}
		to := filepath.Join(partial, filepath.FromSlash(f.Path))
		if err := errors.Join(r.State.Disk.Mkdir(filepath.Dir(to), 0o755), r.State.Disk.WriteFile(to, data, mode)); err != nil {
			return m, outcome.Defer(wordOf(err, outcome.IO), "saving %q: %w", at, err)
		}
		m.Files = append(m.Files, f)
		if err := r.takeOverUnit(ctx, &m, at, data); err != nil {
			return m, err
		}
	}
	slices.SortFunc(m.Files, func(a, b contract.File) int { return strings.Compare(a.Path, b.Path) })
	if err := m.Check(); err != nil {
		return m, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT: %w", err)
	}
	return m, nil
}

// handMade reads a file that is to be taken over. What could not be put back
// exactly is refused.
func (r *roll) handMade(at string) ([]byte, fs.FileMode, error) {
	path := r.State.Root.Join(at)
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which is not there", at)
	}
	if err != nil {
		return nil, 0, outcome.Defer(outcome.IO, "%w", err)
	}
	owner := st.Sys().(*syscall.Stat_t)
	switch {
	case !st.Mode().IsRegular():
		return nil, 0, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which is no regular file: put the file itself there", at)
	case owner.Uid != uint32(os.Geteuid()) || owner.Gid != uint32(os.Getegid()):
		return nil, 0, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which belongs to %d:%d: chown root:root it", at, owner.Uid, owner.Gid)
	case st.Mode()&(fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky) != 0 || st.Mode().Perm()&0o022 != 0 || st.Mode().Perm()&0o400 == 0:
		return nil, 0, outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, whose mode is %s: only its owner may write it, and must be able to read it", at, st.Mode())
	}
	data, err := record.ReadFile(path, contract.MaxUnpacked)
	if err != nil {
		return nil, 0, outcome.Defer(outcome.IO, "%w", err)
	}
	return data, st.Mode().Perm(), nil
}

// placeOf is where a copy stands in the set: as a build would ship it, if a
// build could.
func (r *roll) placeOf(at string) string {
	for _, folder := range []string{contract.UnitsFolder, contract.SysusersFolder, contract.TmpfilesFolder} {
		in := folder + path.Base(at)
		if _, ships := r.target.Manifest.File(in); node.Target(in) == at && (folder == contract.UnitsFolder || ships) {
			return in
		}
	}
	return contract.AdoptedFolder + strings.TrimPrefix(at, "/")
}

// extraLinks are links of enablement that enabling a unit again would not make.
func (r *roll) extraLinks(name string, data []byte) []string {
	install := strings.Fields(strings.NewReplacer("=", " ", "\n", " ").Replace(unit.Install(data)))
	links, _ := filepath.Glob(r.State.Root.Join(path.Join(string(layout.SystemdUnits), "*", name)))
	var extra []string
	for _, l := range links {
		target, kind, ok := strings.Cut(filepath.Base(filepath.Dir(l)), ".wants")
		if !ok {
			target, kind, ok = strings.Cut(filepath.Base(filepath.Dir(l)), ".requires")
		}
		if ok && kind == "" && !slices.Contains(install, target) {
			extra = append(extra, strings.TrimPrefix(l, string(r.State.Root)))
		}
	}
	return extra
}

// takeOverUnit notes what a unit is when it is taken over.
func (r *roll) takeOverUnit(ctx context.Context, m *contract.Manifest, at string, data []byte) error {
	name := path.Base(at)
	handled := slices.Contains(m.Units.Enable, name) || slices.Contains(m.Units.Inert, name) || slices.ContainsFunc(m.Units.Restart, func(u contract.Restart) bool { return u.Unit == name })
	if !slices.Contains(unitFolders, path.Dir(at)) || handled { // also listed where it comes from: it is one unit
		return nil
	}
	u, err := r.Manager.Unit(ctx, name)
	if err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	switch u.UnitFileState {
	case "enabled":
		if unit.Install(data) == "" {
			return outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which is enabled without an [Install] section: give it one, so that it can be enabled again", at)
		}
		if extra := r.extraLinks(name, data); len(extra) > 0 {
			return outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which its [Install] section does not make %v: say WantedBy= there, or remove the link", at, extra)
		}
		m.Units.Enable = append(m.Units.Enable, name)
	case "", "disabled", "static", "indirect":
		if m.Ships(name) {
			m.Units.Inert = append(m.Units.Inert, name)
		}
	default:
		return outcome.Refuse(outcome.ForeignFile, "SLUICE_ADOPT lists %q, which is %s: only what is enabled or disabled can be put back", at, u.UnitFileState)
	}
	if path.Ext(name) == ".service" && u.Wanted() {
		m.Units.Restart = append(m.Units.Restart, contract.Restart{Unit: name})
	}
	return nil
}
