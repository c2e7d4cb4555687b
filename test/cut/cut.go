// Package cut is a disk whose power can be cut: a filesystem on a loop device
// that is shut down without its log being flushed, so that what was not fsynced
// is gone. It needs root, loop devices and mkfs.
package cut

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The filesystems. ext4's default hides a missing fsync of a file that is
// renamed over another (auto_da_alloc, ext4(5)); it is off here.
var options = map[string]struct {
	mkfs  []string
	mount string
	size  int64 // bytes; the least that mkfs takes, and room for a scenario
}{
	"ext4": {[]string{"mkfs.ext4", "-q", "-F"}, "noauto_da_alloc", 32 << 20},
	"xfs":  {[]string{"mkfs.xfs", "-q"}, "", 300 << 20},
}

// Kinds are the filesystems there are.
var Kinds = []string{"ext4", "xfs"}

// The request and the flag of both filesystems' shutdown ioctl
// (linux/fs/ext4/ext4.h EXT4_IOC_SHUTDOWN, linux/fs/xfs/xfs_fs.h
// XFS_IOC_GOINGDOWN): stop now, and do not flush the log.
const (
	ioctlShutdown = 0x8004587d
	noLogFlush    = 2
)

// A Disk is one such filesystem, mounted.
type Disk struct {
	Path string // where

	kind, image, dev string
}

// New makes a disk and mounts it on a folder, which is made. It goes with the
// test. Where there can be none, the test is skipped and says why.
func New(t testing.TB, kind, path string) *Disk {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("power can only be cut by root")
	}
	o := options[kind]
	if _, err := exec.LookPath(o.mkfs[0]); err != nil {
		t.Skipf("there is no %s: apt-get install e2fsprogs xfsprogs", o.mkfs[0])
	}
	d := &Disk{Path: path, kind: kind, image: image(t)}
	if err := os.Truncate(d.image, o.size); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(o.mkfs[0], append(o.mkfs[1:], d.image)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", o.mkfs[0], err, out)
	}
	out, err := exec.Command("losetup", "--find", "--show", d.image).Output()
	if err != nil {
		t.Skipf("there is no loop device: %v", err)
	}
	d.dev = strings.TrimSpace(string(out))
	t.Cleanup(func() {
		_ = unix.Unmount(d.Path, unix.MNT_DETACH)
		if out, err := exec.Command("losetup", "--detach", d.dev).CombinedOutput(); err != nil {
			t.Errorf("losetup --detach %s: %v: %s", d.dev, err, out)
		}
	})
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := d.mount(); err != nil {
		t.Fatal(err)
	}
	return d
}

// image is an empty file in memory, where there is a folder for that: what is
// tested is what the filesystem hands to its device, not how fast that is.
func image(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "sluice-disk-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "disk")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (d *Disk) mount() error {
	if err := unix.Mount(d.dev, d.Path, d.kind, 0, options[d.kind].mount); err != nil {
		return fmt.Errorf("mounting %s (%s) on %q: %w", d.dev, d.kind, d.Path, err)
	}
	return nil
}

// Cut cuts the power: nothing that is not on the device by now will ever be.
func (d *Disk) Cut() error {
	f, err := os.Open(d.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), ioctlShutdown, noLogFlush); err != nil {
		return fmt.Errorf("shutting %q down: %w", d.Path, err)
	}
	return nil
}

// Revive mounts what is on the device, as the next boot would.
func (d *Disk) Revive() error {
	// A child that is forked by another test holds copies of all open files until
	// it executes its program.
	deadline := time.Now().Add(busyTime)
	err := unix.Unmount(d.Path, 0)
	for errors.Is(err, unix.EBUSY) && time.Now().Before(deadline) {
		<-time.After(busyPause)
		err = unix.Unmount(d.Path, 0)
	}
	if err != nil {
		return fmt.Errorf("unmounting %q: %w", d.Path, err)
	}
	return d.mount()
}

// How long, and how often, a busy filesystem is asked to go.
const (
	busyTime  = 10 * time.Second
	busyPause = 5 * time.Millisecond
)

// Sync makes all that is on the disk durable: where a test begins.
func (d *Disk) Sync() error {
	f, err := os.Open(d.Path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.Syncfs(int(f.Fd()))
}

// Clear removes all that is on the disk.
func (d *Disk) Clear() error {
	entries, err := os.ReadDir(d.Path)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(d.Path, e.Name())))
	}
	return errors.Join(errs...)
}
