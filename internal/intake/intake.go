// Package intake is the only way to open what a less privileged program
// wrote. It walks down from a folder that only root can rename, follows no
// link, crosses no mount, never blocks, and hands out regular files of the
// expected owner with one link and a limited size, and nothing else.
//
// It does not promise that a file's content stays as it was read: who needs
// that copies it while hashing, and trusts the copy.
package intake

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrRejected is a thing that is not a file intake would read: whoever wrote
// it is broken or hostile.
var ErrRejected = errors.New("not acceptable")

// ErrBusy is a file that can't be opened without waiting (a lease, fcntl(2)).
var ErrBusy = errors.New("held by a lease")

// A Folder is an open folder that walks start from.
type Folder struct {
	file *os.File
	name string
}

// OpenFolder opens the folder a walk starts from. All of name must be in the
// hands of somebody trusted.
func OpenFolder(name string) (*Folder, error) {
	f, err := os.OpenFile(name, unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &Folder{f, name}, nil
}

// Close closes the folder; files opened from it stay open.
func (d *Folder) Close() error { return d.file.Close() }

// Own gives the folder itself its owner, group and mode; -1 leaves one as it
// is.
func (d *Folder) Own(uid, gid int, mode fs.FileMode) error {
	if err := d.file.Chown(uid, gid); err != nil {
		return err
	}
	return d.file.Chmod(mode) // after the chown, which drops the setgid bit
}

// walkFlags keeps a walk beneath its folder and off every link and mount
// (openat2(2)).
const walkFlags = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS

// Sub opens a folder below d, whoever owns it. A mount may be crossed:
// ReadWritePaths= makes a mark/ folder one.
func (d *Folder) Sub(rel string) (*Folder, error) {
	fd, err := d.openat(rel, unix.O_DIRECTORY|unix.O_RDONLY, walkFlags)
	if err != nil {
		return nil, d.explain(rel, err)
	}
	return &Folder{os.NewFile(uintptr(fd), path.Join(d.name, rel)), path.Join(d.name, rel)}, nil
}

// Open opens a regular file below d: owned by uid, with one link, of at most
// limit bytes now. The caller must still bound its reads: a file can grow.
func (d *Folder) Open(rel string, uid int, limit int64) (*os.File, error) {
	// O_NONBLOCK: a plain open waits for a FIFO's writer, and up to 45 s for a lease.
	fd, err := d.openat(rel, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, walkFlags|unix.RESOLVE_NO_XDEV)
	if err != nil {
		return nil, d.explain(rel, err)
	}
	f := os.NewFile(uintptr(fd), path.Join(d.name, rel))
	if err := acceptable(fd, uid, limit); err != nil {
		f.Close()
		return nil, fmt.Errorf("reading %q: %w: %s", f.Name(), ErrRejected, err)
	}
	return f, nil
}

func acceptable(fd, uid int, limit int64) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return errors.New("it is no regular file")
	case int(st.Uid) != uid:
		return fmt.Errorf("it belongs to uid %d, not %d", st.Uid, uid)
	case st.Nlink != 1:
		return fmt.Errorf("it has %d links", st.Nlink)
	case st.Size > limit:
		return fmt.Errorf("it is over %d bytes", limit)
	}
	return nil
}

// Read returns the whole of a file, as Open finds it.
func (d *Folder) Read(rel string, uid int, limit int64) ([]byte, error) {
	f, err := d.Open(rel, uid, limit)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("reading %q: %w: it is over %d bytes", f.Name(), ErrRejected, limit)
	}
	return data, nil
}

func (d *Folder) explain(rel string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT):
		return &fs.PathError{Op: "open", Path: path.Join(d.name, rel), Err: fs.ErrNotExist}
	case errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("opening %q: %w", path.Join(d.name, rel), ErrBusy)
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("opening %q: %w: %s", path.Join(d.name, rel), ErrRejected, err)
	}
	return &fs.PathError{Op: "open", Path: path.Join(d.name, rel), Err: err}
}

func (d *Folder) openat(rel string, flags int, resolve uint64) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_NOFOLLOW | unix.O_CLOEXEC), Resolve: resolve}
	for range renameRetries {
		fd, err := unix.Openat2(int(d.file.Fd()), rel, &how)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN) && strings.Contains(rel, "/"):
			// Also what openat2 says when a folder of the walk was renamed meanwhile.
			continue
		case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EPERM):
			return d.walk(rel, flags)
		}
		return fd, err
	}
	return -1, unix.EAGAIN
}

// renameRetries bounds how often somebody who renames folders can make us
// begin again.
const renameRetries = 32

// walk is openat2 for kernels before 5.6 and for sandboxes that don't know
// it: one component at a time, no link followed. It can't see mounts.
func (d *Folder) walk(rel string, flags int) (int, error) {
	names := strings.Split(rel, "/")
	at := int(d.file.Fd())
	for i, name := range names {
		if name == "" || name == "." || name == ".." {
			return -1, unix.EXDEV
		}
		f := unix.O_DIRECTORY | unix.O_PATH
		if i == len(names)-1 {
			f = flags
		}
		fd, err := unix.Openat(at, name, f|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if at != int(d.file.Fd()) {
			unix.Close(at)
		}
		if err != nil {
			return -1, err
		}
		at = fd
	}
	return at, nil
}

// maxRemovals bounds what Remove does for somebody who fills a folder.
const maxRemovals = 10_000

// Remove takes away an entry of d itself, of whatever kind. It is renamed
// first, which takes the name away at once; then it is removed, up to 10,000
// entries of it. What stays is under a dot name and is its owner's affair.
// An entry that is not there is fs.ErrNotExist.
func (d *Folder) Remove(name string) error {
	fd := int(d.file.Fd())
	// A name of its own: whoever may write here could have put anything under a
	// name that is known.
	away := takenPrefix(name) + rand.Text()
	left := maxRemovals
	if err := unix.Renameat(fd, name, fd, away); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return &fs.PathError{Op: "remove", Path: path.Join(d.name, name), Err: fs.ErrNotExist}
		}
		return &fs.PathError{Op: "remove", Path: path.Join(d.name, name), Err: err}
	}
	_ = removeAt(fd, away, &left)
	return nil
}

func takenPrefix(name string) string { return "." + name + ".taken-" }

// Tidy removes what Remove of a name had to leave. It is for the owner of what
// was left.
func (d *Folder) Tidy(name string) {
	names, _ := d.file.Readdirnames(maxRemovals)
	_, _ = d.file.Seek(0, io.SeekStart)
	left := maxRemovals
	for _, n := range names {
		if strings.HasPrefix(n, takenPrefix(name)) {
			_ = removeAt(int(d.file.Fd()), n, &left)
		}
	}
}

func removeAt(dir int, name string, left *int) error {
	if *left--; *left < 0 {
		return unix.E2BIG
	}
	err := unix.Unlinkat(dir, name, 0)
	if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM) {
		return err
	}
	if err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR); !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	for {
		names, err := f.Readdirnames(256)
		for _, n := range names {
			if err := removeAt(fd, n, left); err != nil && !errors.Is(err, unix.ENOENT) {
				return err
			}
		}
		if len(names) == 0 || err != nil {
			break
		}
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}
