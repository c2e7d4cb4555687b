// Package marker raises and takes markers: entries whose existence is a fact,
// which a .path unit watches with PathExists= (level-triggered: it fires for
// what was left at boot, and again when the service ends).
//
// A producer raises as its last act, after it has let go of its locks. A
// consumer takes as its very first act.
package marker

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/intake"
	"sluice/internal/layout"
)

// MinRun is the least that a run lasts which a path unit starts. It keeps
// somebody who raises markers without end from making a root oneshot spin.
const MinRun = time.Second

// Raise makes the marker exist. It is not fsynced: a marker lost to a power
// cut is raised again by fetch, once a minute, while root has not answered.
func Raise(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o640)
	if errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
		return nil // it exists, of whatever kind: that is all a marker says
	}
	if errors.Is(err, fs.ErrPermission) {
		if _, there := os.Lstat(path); there == nil {
			return nil // it exists, whosever it is
		}
	}
	if err != nil {
		return err
	}
	return f.Close()
}

// Produce raises a marker of an unprivileged program's, in a folder of its own.
// A folder that is not as the layout has it, which keeps the consumer from
// taking the marker away, is made anew: whoever broke it could do so because
// he was that program for a while.
func Produce(root layout.Root, mark, marker layout.Place, component string) error {
	folder, row := root.Path(mark, component), layout.RowOf(mark)
	if st, err := os.Lstat(folder); err != nil || !st.IsDir() || st.Mode().Perm() != row.FileMode().Perm() {
		if err := os.RemoveAll(folder); err != nil {
			return err
		}
		// The setgid bit, and with it the group, is inherited: a sandbox may not set it.
		umask := unix.Umask(0)
		err := os.Mkdir(folder, row.FileMode().Perm())
		unix.Umask(umask)
		if err != nil {
			return err
		}
	}
	return Raise(root.Path(marker, component))
}

// Tidy removes what a consumer could not, of what stood under a marker's name.
func Tidy(path string) {
	if d, err := intake.OpenFolder(filepath.Dir(path)); err == nil {
		d.Tidy(filepath.Base(path))
		d.Close()
	}
}

// Take takes the marker away, of whatever kind it is. base is the folder of
// the component that only root can rename; the walk from there follows no
// link. It reports whether the marker was there.
func Take(root layout.Root, base, marker layout.Place, component string) (bool, error) {
	basePath, markerPath := root.Path(base, component), root.Path(marker, component)
	rel, err := filepath.Rel(basePath, filepath.Dir(markerPath))
	if err != nil {
		return false, err
	}
	d, err := intake.OpenFolder(basePath)
	if err != nil {
		return false, err
	}
	defer d.Close()
	mark, err := d.Sub(rel)
	if err != nil {
		return false, err
	}
	defer mark.Close()
	err = mark.Remove(filepath.Base(markerPath))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}
