package durable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A Lock is a held flock(2). Passing it proves that the caller holds it.
type Lock struct{ file *os.File }

// ErrBusy says that somebody else holds the lock.
var ErrBusy = errors.New("busy")

// lockRetry is how often a lock is asked for while waiting: flock(2) has no
// deadline of its own.
const lockRetry = 50 * time.Millisecond

// Acquire takes the lock at path, which it makes with mode 0600 if it is not
// there: whoever can open a lock file can hold it. It waits until ctx ends;
// with a ctx that has ended it tries once. The error says who holds it.
func Acquire(ctx context.Context, path string) (*Lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			// For the reader of a "busy" message only; the flock is the lock.
			_ = f.Truncate(0)
			_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
			return &Lock{f}, nil
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EWOULDBLOCK):
			f.Close()
			return nil, fmt.Errorf("locking %q: %w", path, err)
		}
		select {
		case <-ctx.Done():
			holder := make([]byte, 32)
			n, _ := f.ReadAt(holder, 0)
			f.Close()
			return nil, fmt.Errorf("%q is %w, held by pid %s", path, ErrBusy, strings.TrimSpace(string(holder[:n])))
		case <-time.After(lockRetry):
		}
	}
}

// Release lets go. A nil Lock is no error.
func (l *Lock) Release() {
	if l != nil && l.file != nil {
		l.file.Close()
		l.file = nil
	}
}
