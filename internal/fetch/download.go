package fetch

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
)

// partSuffix ends the name of a download that is not whole yet.
const partSuffix = ".part"

const (
	chunk = 64 << 10 // bytes that are read at once, so memory does not grow with the object
	spare = 16 << 20 // bytes that a download leaves free on the disk
)

func (f *Fetcher) objectPath(w *follow) string {
	return filepath.Join(f.Root.Download(string(w.state.Name), string(w.pending.Version)), layout.ObjectName)
}

// download brings the bundle of the pending promote to incoming/, resuming
// what is there of it. At most its signed size and one byte are read.
func (f *Fetcher) download(ctx context.Context, w *follow) error {
	a := w.pointer.Payload.Current.Artifacts[contract.Here()]
	path := f.objectPath(w)
	if free, err := durable.Free(filepath.Dir(filepath.Dir(path))); err == nil && free < a.Size+a.TarSize+spare {
		return outcome.Defer(outcome.NoSpace, "the bundle and its tree need %d bytes below %q, so many are not free", a.Size+a.TarSize+spare, filepath.Dir(filepath.Dir(path)))
	}
	if err := f.Disk.Mkdir(filepath.Dir(path), 0o750|fs.ModeSetgid); err != nil {
		return err
	}
	for _, name := range []string{path, path + partSuffix} { // nothing but a file is one of ours
		if st, err := os.Lstat(name); err == nil && !st.Mode().IsRegular() {
			if err := f.Disk.RemoveTree(name); err != nil {
				return err
			}
		}
	}
	part, err := os.OpenFile(path+partSuffix, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o640)
	if err != nil {
		return err
	}
	defer part.Close()
	hash := sha256.New()
	have, err := io.Copy(hash, io.LimitReader(part, a.Size+1))
	if err != nil {
		return err
	}
	if have < a.Size {
		n, err := f.receive(ctx, w, a, have, io.MultiWriter(part, hash))
		have += n
		w.pending.Downloaded += n
		var known *outcome.Error
		if errors.As(err, &known) {
			return err
		}
		if err != nil {
			return outcome.Defer(outcome.Store, "downloading %q: %w", a.Key, err)
		}
	}
	if have != a.Size || record.Hex(hash) != a.SHA256 {
		// Not what was signed: nothing of it is worth resuming.
		return errors.Join(outcome.Defer(outcome.DigestMismatch, "%q in the store is not the object that was signed", a.Key), f.Disk.Remove(part.Name()))
	}
	if err := part.Sync(); err != nil {
		return err
	}
	return f.Disk.Rename(part.Name(), path)
}

// receive streams an object from an offset, at the box's rate.
func (f *Fetcher) receive(ctx context.Context, w *follow, a contract.Artifact, offset int64, to io.Writer) (int64, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	body, err := f.Store.Open(ctx, a.Key, offset)
	if err != nil {
		return 0, err
	}
	defer body.Close()
	if body.Size != a.Size {
		return 0, outcome.Defer(outcome.DigestMismatch, "%q has %d bytes in the store, %d were signed", a.Key, body.Size, a.Size)
	}
	patience := store.NewPatience(cancel)
	defer patience.Stop()
	buf := make([]byte, chunk)
	limited := io.LimitReader(body, a.Size-offset+1)
	var n int64
	start := time.Now()
	for {
		got, err := limited.Read(buf)
		if got > 0 {
			if _, err := to.Write(buf[:got]); err != nil {
				return n, err
			}
			n += int64(got)
			patience.Got(got)
			f.Beat()
			f.Status("%s %s: downloading, %d of %d bytes", w.state.Name, w.pending.Version, offset+n, a.Size)
			if err := f.pace(ctx, n, start, patience); err != nil {
				return n, err
			}
		}
		if err == io.EOF {
			return n, nil
		}
		if err != nil {
			if ctx.Err() != nil {
				return n, fmt.Errorf("%w: the body came slower than %d bytes a second", store.ErrTransient, store.Slowest)
			}
			return n, fmt.Errorf("%w: %w", store.ErrTransient, err)
		}
	}
}

// pace sleeps until n bytes are due at the box's rate.
func (f *Fetcher) pace(ctx context.Context, n int64, start time.Time, patience *store.Patience) error {
	if f.Box.Rate == 0 {
		return nil
	}
	due := time.Duration(float64(n) / float64(f.Box.Rate) * float64(time.Second))
	ahead := due - time.Since(start)
	if ahead <= 0 {
		return nil
	}
	patience.Excuse(ahead)
	select {
	case <-time.After(ahead):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
