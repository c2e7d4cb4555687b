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
	"strings"

	"sluice/internal/contract"
	"sluice/internal/graph"
	"sluice/internal/layout"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

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

// target is Target, and, for what was on the box before its first roll, where
// that was.
func (b Build) target(file string) string {
	if at, ok := strings.CutPrefix(file, contract.AdoptedFolder); ok && b.Manifest.Version == contract.BeforeSluice {
		return "/" + at
	}
	return Target(file)
}

// late reports whether a unit file changes only after the commit: an old recover
// is never started by a new unit (I2).
func late(c contract.Component, file string) bool {
	name := path.Base(file)
	return c == layout.Pipeline && strings.HasPrefix(file, contract.UnitsFolder) && (strings.HasPrefix(name, "sluice-apply") || strings.HasPrefix(name, "sluice-recover"))
}

func differs(file string, a, b contract.Manifest) bool {
	fa, ina := a.File(file)
	fb, inb := b.File(file)
	return ina != inb || fa.SHA256 != fb.SHA256 || fa.Mode != fb.Mode
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
		if target := e.b.target(f.Path); target != "" && late(e.State.Name, f.Path) == afterGate {
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
	// What is none of our places is never taken away: a program that was put
	// on the box by hand stays where it is when a build takes over from it.
	keep := Target(f.Path) == ""
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
			if back := Sibling(to); Holds(back, f) {
				return e.State.Disk.Rename(back, to) // needs no room
			}
			data, err := readSigned(from, f)
			if err != nil {
				return err
			}
			if err := e.State.Disk.Mkdir(filepath.Dir(to), 0o755); err != nil {
				return err
			}
			return e.State.Disk.WriteFile(to, data, fs.FileMode(f.Mode))
		},
		Down: func(ctx context.Context) error {
			if keep {
				return nil
			}
			if isUnit && !e.Boot && !strings.Contains(name, "@.") {
				if err := e.stop(ctx, name); err != nil {
					return err
				}
			}
			return e.State.Disk.Remove(to)
		},
	}
}

// readSigned reads a file of a set, if it has the bytes that were signed.
func readSigned(path string, f contract.File) ([]byte, error) {
	data, err := record.ReadFile(path, contract.MaxUnpacked)
	if err == nil && record.Sum(data) != f.SHA256 {
		err = fmt.Errorf("%q has other bytes than were signed", path)
	}
	return data, err
}

// Sibling is where the way back of a file stands while a roll is open: in the
// same folder, so that going back is a rename.
func Sibling(target string) string {
	return filepath.Join(filepath.Dir(target), "."+filepath.Base(target)+".sluice-back")
}

// KeepWayBack writes the siblings of what a move away from b would change.
func (k Maker) KeepWayBack(b, next Build) error {
	for _, f := range b.Manifest.Files {
		target := Target(f.Path)
		if target == "" || !differs(f.Path, b.Manifest, next.Manifest) {
			continue
		}
		data, err := readSigned(filepath.Join(b.Set, filepath.FromSlash(f.Path)), f)
		if err != nil {
			return err
		}
		if err := k.State.Disk.WriteFile(Sibling(k.State.Root.Join(target)), data, fs.FileMode(f.Mode)); err != nil {
			return err
		}
	}
	return nil
}

// Settle makes durable what was seen to be in place and was not written by us
// in this life: what systemd wrote, which fsyncs no link of enablement and no
// folder that it renames into, and what a run left that was killed between a
// rename and its fsync. Before a transaction is closed nothing may depend on
// it any more.
func (k Maker) Settle() error {
	folders := []string{k.State.Root.Join("/etc"), k.State.Path(layout.Sysusers), k.State.Path(layout.Tmpfiles), k.State.Path(layout.SystemdUnits)}
	entries, err := os.ReadDir(k.State.Path(layout.SystemdUnits))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			folders = append(folders, filepath.Join(k.State.Path(layout.SystemdUnits), e.Name()))
		}
	}
	for _, f := range folders {
		if err := k.State.Disk.SyncFolder(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// DropWayBack removes the siblings of a build's files.
func (k Maker) DropWayBack(b Build) error {
	var errs []error
	for _, f := range b.Manifest.Files {
		if target := Target(f.Path); target != "" {
			errs = append(errs, k.State.Disk.Remove(Sibling(k.State.Root.Join(target))))
		}
	}
	return errors.Join(errs...)
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
