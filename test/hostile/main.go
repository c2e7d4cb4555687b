// Hostile is what a captured fetch or verify could do: it swaps every file it
// can reach for links, FIFOs, sockets, devices, huge, leased, changing and
// hard-linked files, folders where files belong and links in the middle of
// paths, and puts the right bytes back now and then. The tests run it as the
// users of those programs.
package main

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// huge is the size of a sparse file; most is that of a file which it may have
// found, and not made.
const (
	huge = 10 << 30
	most = 1 << 20
)

type hostile struct {
	base   string
	random *rand.Rand
	files  map[string][]byte // what was there, by path
	paths  []string
	swaps  int
}

// usage: hostile FOLDER SWAPS SEED MARKER STOP. It goes on after SWAPS until
// the file STOP is there, then prints how many there were.
func main() {
	swaps, err1 := strconv.Atoi(os.Args[2])
	seed, err2 := strconv.ParseUint(os.Args[3], 10, 64)
	if err1 != nil || err2 != nil {
		fmt.Fprintln(os.Stderr, "usage: hostile FOLDER SWAPS SEED MARKER STOP")
		os.Exit(2)
	}
	h := &hostile{base: os.Args[1], random: rand.New(rand.NewPCG(seed, 0)), files: map[string][]byte{}}
	signal.Ignore(syscall.SIGIO) // a lease that is broken
	_ = filepath.WalkDir(h.base, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return nil
		}
		if st, err := e.Info(); err == nil && st.Size() <= most {
			if data, err := os.ReadFile(path); err == nil {
				h.files[path] = data
				h.paths = append(h.paths, path)
			}
		}
		return nil
	})
	for {
		h.swap(h.paths[h.random.IntN(len(h.paths))])
		// It may have made a FIFO of the marker itself.
		if f, err := os.OpenFile(os.Args[4], os.O_CREATE|os.O_WRONLY|unix.O_NONBLOCK, 0o640); err == nil {
			f.Close()
		}
		if _, err := os.Lstat(os.Args[5]); err == nil && h.swaps >= swaps {
			break
		}
	}
	for path := range h.files { // as it was, so that somebody could use it
		h.restore(path)
	}
	fmt.Println(h.swaps)
}

func (h *hostile) restore(path string) {
	for dir := filepath.Dir(path); len(dir) > len(h.base); dir = filepath.Dir(dir) {
		if st, err := os.Lstat(dir); err == nil && !st.IsDir() {
			_ = os.RemoveAll(dir)
		}
	}
	_ = os.MkdirAll(filepath.Dir(path), 0o750)
	_ = os.RemoveAll(path)
	_ = os.WriteFile(path, h.files[path], 0o640)
}

// swap puts something else in the place of a file, by one rename where that
// can be.
func (h *hostile) swap(path string) {
	h.swaps++
	temp := filepath.Join(filepath.Dir(path), ".swap")
	_ = os.RemoveAll(temp)
	switch h.random.IntN(24) {
	case 0:
		_ = os.Symlink("/etc/shadow", temp)
	case 1:
		_ = os.Symlink("/opt/sluice/edge/seen.json", temp)
	case 2:
		_ = os.Symlink("/dev/zero", temp)
	case 3:
		_ = unix.Mkfifo(temp, 0o640)
	case 4:
		if l, err := net.Listen("unix", temp); err == nil {
			l.(*net.UnixListener).SetUnlinkOnClose(false)
			l.Close()
		}
	case 5:
		_ = os.WriteFile(temp, nil, 0o640)
		_ = os.Truncate(temp, huge)
	case 6: // two names of one file
		_ = os.Link(h.paths[h.random.IntN(len(h.paths))], temp)
	case 7:
		_ = os.Mkdir(temp, 0o750)
	case 8:
		_ = os.MkdirAll(filepath.Join(temp, "deep", "er"), 0o750)
		_ = os.WriteFile(filepath.Join(temp, "deep", "x"), nil, 0o640)
	case 9: // leased: who opens it waits
		_ = os.WriteFile(temp, h.files[path], 0o640)
		if f, err := os.Open(temp); err == nil {
			_, _ = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
			defer f.Close()
		}
	case 10: // a link in the middle of the path
		dir := filepath.Dir(path)
		if len(dir) > len(h.base) {
			aside := dir + ".aside"
			_ = os.RemoveAll(aside)
			if os.Rename(dir, aside) == nil {
				_ = os.Symlink([]string{"/etc", aside, "/proc/self", "."}[h.random.IntN(4)], dir)
			}
		}
		return
	case 11: // changes while it is read
		if f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0); err == nil {
			noise := make([]byte, 1+h.random.IntN(8192))
			for range 8 {
				_, _ = f.WriteAt(noise, int64(h.random.IntN(4096)))
			}
			f.Close()
		}
		return
	case 12:
		_ = unix.Mknod(temp, unix.S_IFCHR|0o640, int(unix.Mkdev(1, 5))) // not allowed; a link to one is
		_ = os.Symlink("/dev/full", temp)
	default: // right again: root gets further
		h.restore(path)
		return
	}
	if os.Rename(temp, path) != nil {
		_ = os.RemoveAll(path)
		_ = os.Rename(temp, path)
	}
}
