package store

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"sluice/internal/durable"
	"sluice/internal/outcome"
)

// dir is a folder. Its ETags are digests; writes are atomic and durable;
// conditional ones happen under a lock, so it must be on a filesystem with
// flock(2).
type dir struct {
	path string
	disk durable.Disk
}

// writeBuffer is how many bytes are written at once.
const writeBuffer = 1 << 20

// dirLock guards conditional writes. It is no key: keys don't begin with a dot.
const dirLock = ".lock"

func newDir(u *url.URL) (Store, error) {
	if u.Host != "" || !filepath.IsAbs(u.Path) || u.RawQuery != "" {
		return nil, outcome.Config("SLUICE_STORE: %q must be file:// and an absolute path, as file:///srv/bucket", u)
	}
	return &dir{path: filepath.Clean(u.Path), disk: durable.Disk{Shared: true}}, nil
}

func (d *dir) String() string { return "file://" + d.path }

// open opens a file of the folder without leaving it through a link.
func (d *dir) open(key string) (*os.File, fs.FileInfo, error) {
	if err := checkKey(key); err != nil {
		return nil, nil, err
	}
	root, err := os.OpenRoot(d.path)
	if err != nil {
		return nil, nil, dirError(err)
	}
	defer root.Close()
	f, err := root.OpenFile(key, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, dirError(err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fs.ErrNotExist // a folder is where keys begin, not a key
	}
	if err != nil {
		f.Close()
		return nil, nil, dirError(err)
	}
	return f, st, nil
}

func dirError(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
		return fs.ErrNotExist
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: %s", ErrDenied, err)
	}
	return fmt.Errorf("%w: %s", ErrTransient, err)
}

func (d *dir) Get(_ context.Context, key string, limit int64, unless string) (Object, error) {
	f, _, err := d.open(key)
	if err != nil {
		return Object{}, keyError(d, "reading", key, err)
	}
	defer f.Close()
	data, err := readAll(f, limit)
	if err != nil {
		return Object{}, keyError(d, "reading", key, err)
	}
	sum := sha256.Sum256(data)
	o := Object{data, hex.EncodeToString(sum[:])}
	if unless != "" && o.ETag == unless {
		return Object{ETag: unless}, ErrNotModified
	}
	return o, nil
}

func (d *dir) Open(_ context.Context, key string, offset int64) (*Stream, error) {
	f, st, err := d.open(key)
	if err != nil {
		return nil, keyError(d, "reading", key, err)
	}
	if offset > 0 && offset >= st.Size() {
		f.Close()
		return nil, keyError(d, "reading", key, ErrRange)
	}
	if _, err := f.Seek(offset, io.SeekStart); err != nil {
		f.Close()
		return nil, keyError(d, "reading", key, err)
	}
	// Every write makes a new file, so these three change with the content.
	s := st.Sys().(*syscall.Stat_t)
	return &Stream{f, fmt.Sprintf("%x-%x-%x", s.Ino, st.ModTime().UnixNano(), st.Size()), st.Size()}, nil
}

func (d *dir) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond Condition) (string, error) {
	if err := checkKey(key); err != nil {
		return "", keyError(d, "writing", key, err)
	}
	if _, err := os.Stat(d.path); err != nil {
		return "", outcome.Config("the folder of the store can't be used, make it first: %w", err)
	}
	name := filepath.Join(d.path, filepath.FromSlash(key))
	if cond != (Condition{}) {
		lock, err := durable.Acquire(ctx, filepath.Join(d.path, dirLock))
		if err != nil {
			return "", keyError(d, "writing", key, dirError(err))
		}
		defer lock.Release()
		if err := d.holds(name, cond); err != nil {
			return "", keyError(d, "writing", key, err)
		}
	}
	if err := d.disk.Mkdir(filepath.Dir(name), 0o755); err != nil {
		return "", keyError(d, "writing", key, dirError(err))
	}
	hash := sha256.New()
	temp, err := d.disk.Create(name, 0o644)
	if err != nil {
		return "", keyError(d, "writing", key, dirError(err))
	}
	buffered := bufio.NewWriterSize(temp, writeBuffer)
	n, err := io.Copy(io.MultiWriter(buffered, hash), io.LimitReader(body, size+1))
	if err == nil && n != size {
		err = fmt.Errorf("the body has not the %d bytes it was said to have", size)
	}
	if err == nil {
		err = buffered.Flush()
	}
	if err != nil {
		return "", keyError(d, "writing", key, errors.Join(err, temp.Abandon()))
	}
	if err := temp.Commit(); err != nil {
		return "", keyError(d, "writing", key, dirError(err))
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

func (d *dir) holds(name string, cond Condition) error {
	f, err := os.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		if cond.IfMatch != "" {
			return ErrConflict
		}
		return nil
	}
	if err != nil {
		return dirError(err)
	}
	defer f.Close()
	if cond.IfNone {
		return ErrConflict
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return dirError(err)
	}
	if hex.EncodeToString(hash.Sum(nil)) != cond.IfMatch {
		return ErrConflict
	}
	return nil
}

func (d *dir) List(_ context.Context, prefix string) ([]string, error) {
	if err := checkPrefix(prefix); err != nil {
		return nil, keyError(d, "listing", prefix, err)
	}
	var keys []string
	base := filepath.Join(d.path, filepath.FromSlash(prefix))
	err := filepath.WalkDir(base, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if e.Type().IsRegular() && !strings.HasPrefix(e.Name(), ".") { // a dot: being written
			rel, err := filepath.Rel(base, name)
			if err != nil {
				return err
			}
			keys = append(keys, path.Join(prefix, filepath.ToSlash(rel)))
		}
		return nil
	})
	if err != nil {
		return nil, keyError(d, "listing", prefix, dirError(err))
	}
	slices.Sort(keys)
	return keys, nil
}
