// Package durable is how everything that must survive is written, renamed,
// removed and locked. What one of its calls has returned from is on the disk: file and
// folder are fsynced (rename(2) alone is atomic, not durable). That goes for
// what a call finds done already, too: a program that was killed between a
// rename and its fsync leaves what is seen and not yet durable.
//
// It does not promise that a call which failed changed nothing: the new
// content may be there or not, never half of it. Temporary names end in .tmp;
// the next write of the same path removes what a kill left.
package durable

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"sluice/internal/fault"
)

// TempSuffix ends the name of a file that is being written.
const TempSuffix = ".tmp"

// A Disk does durable operations. The zero value is ready; Fault is nil
// outside tests.
type Disk struct {
	Fault *fault.Points
	// Shared: others may write the same path at the same time, without a lock.
	// Every temporary file has a name of its own, and what a kill leaves stays.
	Shared bool
	// Replace: what stands in the way of a write, a rename or a folder, of
	// whatever kind, goes. It is for programs whose folder is nobody else's, and
	// which may not always have been themselves.
	Replace bool
}

// WriteFile puts data whole under path: temporary file in the same folder,
// write, fsync, rename, fsync of the folder. The mode is exact, whatever the
// umask. An existing file is replaced, one behind a link is not followed.
func (d *Disk) WriteFile(path string, data []byte, mode fs.FileMode) error {
	temp, err := d.Create(path, mode)
	if err != nil {
		return err
	}
	if _, err := temp.Write(data); err != nil {
		return errors.Join(err, temp.Abandon())
	}
	return temp.Commit()
}

// A Temp is a file being written beside the path it will have.
type Temp struct {
	disk *Disk
	file *os.File
	path string
}

// Create opens a new file that Commit will put under path. The content is
// not readable under path before that.
func (d *Disk) Create(path string, mode fs.FileMode) (*Temp, error) {
	if err := d.Fault.Hit("create", path); err != nil {
		return nil, err
	}
	name := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+TempSuffix)
	if d.Shared {
		name = filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+"."+rand.Text()+TempSuffix)
	}
	// What a killed run left under this name is nobody's: its owner held the lock that we hold.
	if err := os.RemoveAll(name); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := f.Chmod(mode); err != nil {
		f.Close()
		return nil, errors.Join(err, os.Remove(name))
	}
	return &Temp{d, f, path}, nil
}

// Write adds to the file.
func (t *Temp) Write(p []byte) (int, error) {
	if err := t.disk.Fault.Hit("write", t.path); err != nil {
		return 0, err
	}
	return t.file.Write(p)
}

// Chmod sets the mode that the file will have.
func (t *Temp) Chmod(mode fs.FileMode) error { return t.file.Chmod(mode) }

// Commit makes the file durable under its path.
func (t *Temp) Commit() error {
	if err := t.disk.fsync(t.file, t.path); err != nil {
		return errors.Join(err, t.Abandon())
	}
	if err := t.file.Close(); err != nil {
		return errors.Join(err, t.disk.remove(t.file.Name()))
	}
	if err := t.disk.Rename(t.file.Name(), t.path); err != nil {
		return errors.Join(err, t.disk.remove(t.file.Name()))
	}
	return nil
}

// Abandon removes the file.
func (t *Temp) Abandon() error {
	t.file.Close()
	return t.disk.remove(t.file.Name())
}

func (d *Disk) fsync(f *os.File, path string) error {
	if err := d.Fault.Hit("fsync", path); err != nil {
		return fault.Done(err)
	}
	return f.Sync()
}

func (d *Disk) remove(path string) error {
	if err := d.Fault.Hit("remove", path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Rename moves old to path, replacing what is there, and fsyncs the folder of
// path and, if it is another one, that of old.
func (d *Disk) Rename(old, path string) error {
	if err := d.Fault.Hit("rename", path); err != nil {
		return err
	}
	err := os.Rename(old, path)
	if d.Replace && (errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, fs.ErrExist)) {
		err = errors.Join(os.RemoveAll(path), os.Rename(old, path))
	}
	if err != nil {
		return err
	}
	if err := d.SyncFolder(filepath.Dir(path)); err != nil {
		return err
	}
	if filepath.Dir(old) != filepath.Dir(path) {
		return d.SyncFolder(filepath.Dir(old))
	}
	return nil
}

// Exchange swaps two names in one folder, both of which exist.
func (d *Disk) Exchange(a, b string) error {
	if err := d.Fault.Hit("exchange", a); err != nil {
		return err
	}
	if err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE); err != nil {
		return &os.LinkError{Op: "exchange", Old: a, New: b, Err: err}
	}
	return d.SyncFolder(filepath.Dir(a))
}

// SyncFolder makes the names in a folder durable.
func (d *Disk) SyncFolder(path string) error {
	if err := d.Fault.Hit("fsync folder", path); err != nil {
		return fault.Done(err)
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// Remove takes away a file or link. What is not there is no error.
func (d *Disk) Remove(path string) error {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		if err := d.remove(path); err != nil {
			return err
		}
	}
	err := d.SyncFolder(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nor is its folder
	}
	return err
}

// RemoveTree takes away a folder and all in it. The name goes first, by a
// rename to a dot name with the temporary suffix, so that nobody ever sees
// half a tree under it.
func (d *Disk) RemoveTree(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	doomed := path
	if base := filepath.Base(path); !strings.HasPrefix(base, ".") {
		doomed = filepath.Join(filepath.Dir(path), "."+base+TempSuffix)
		if err := d.removeAll(doomed); err != nil {
			return err
		}
		if err := d.Rename(path, doomed); err != nil {
			return err
		}
	}
	return d.removeAll(doomed)
}

func (d *Disk) removeAll(path string) error {
	if err := d.Fault.Hit("remove tree", path); err != nil {
		return err
	}
	return os.RemoveAll(path)
}

// Symlink makes path a link to target, replacing what is there by one rename,
// so that there is no moment at which path does not resolve (I4).
// A path that is a link to target already is left alone.
func (d *Disk) Symlink(target, path string) error {
	if have, err := os.Readlink(path); err == nil && have == target {
		return d.SyncFolder(filepath.Dir(path))
	}
	temp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+TempSuffix)
	if err := d.remove(temp); err != nil {
		return err
	}
	if err := d.Fault.Hit("symlink", path); err != nil {
		return err
	}
	if err := os.Symlink(target, temp); err != nil {
		return err
	}
	// A link has no descriptor to fsync: the folder's fsync, in Rename, carries it.
	if err := d.Rename(temp, path); err != nil {
		return errors.Join(err, d.remove(temp))
	}
	return nil
}

// Mkdir makes a folder, and those above it that are missing, with exactly mode;
// an existing folder is left as it is. A setgid bit is inherited from folder to
// folder, and not set again: a sandbox with RestrictSUIDSGID= forbids that.
func (d *Disk) Mkdir(path string, mode fs.FileMode) error {
	if st, err := os.Lstat(path); err == nil && st.IsDir() {
		return d.SyncFolder(filepath.Dir(path))
	} else if err == nil && !d.Replace {
		return &fs.PathError{Op: "mkdir", Path: path, Err: unix.ENOTDIR}
	} else if err == nil {
		if err := os.Remove(path); err != nil {
			return err
		}
	}
	if parent := filepath.Dir(path); parent != path {
		if err := d.Mkdir(parent, mode); err != nil {
			return err
		}
	}
	if err := d.Fault.Hit("mkdir", path); err != nil {
		return err
	}
	if err := os.Mkdir(path, mode.Perm()); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	const bits = fs.ModePerm | fs.ModeSetgid
	if st.Mode()&bits != mode&bits {
		if err := os.Chmod(path, mode); err != nil {
			return err
		}
	}
	return d.SyncFolder(filepath.Dir(path))
}

// SyncTree fsyncs a folder and every folder below it, deepest first. Files
// are not touched: who wrote them has fsynced them.
func (d *Disk) SyncTree(path string) error {
	var folders []string
	err := filepath.WalkDir(path, func(p string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() {
			folders = append(folders, p)
		}
		return err
	})
	for i := len(folders) - 1; i >= 0 && err == nil; i-- {
		err = d.SyncFolder(folders[i])
	}
	return err
}

// Free returns the bytes that this user can still write on the filesystem of
// path.
func Free(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, fmt.Errorf("asking for the free space of %q: %w", path, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// CopyFile puts the whole of r under path, as WriteFile does.
func (d *Disk) CopyFile(path string, r io.Reader, mode fs.FileMode) error {
	temp, err := d.Create(path, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(temp, r); err != nil {
		return errors.Join(err, temp.Abandon())
	}
	return temp.Commit()
}
