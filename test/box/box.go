// Package box is a throwaway box with a real systemd, over this machine's own
// root: an overlay on a fresh tmpfs, booted by systemd-nspawn. Nothing of the
// machine changes. It needs root, and the packages systemd, systemd-container,
// dbus and attr.
package box

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// BootTime is the most that a boot may take.
const BootTime = 60 * time.Second

// masked is what a host may have that a box does not want.
var masked = strings.Fields(`systemd-logind.service systemd-journal-flush.service systemd-udevd.service systemd-udev-trigger.service
systemd-update-utmp.service systemd-remount-fs.service systemd-timesyncd.service dev-hugepages.mount dev-mqueue.mount sys-fs-fuse-connections.mount
systemd-pstore.service systemd-sysctl.service systemd-modules-load.service systemd-random-seed.service systemd-firstboot.service
systemd-machine-id-commit.service systemd-binfmt.service systemd-hwdb-update.service systemd-ask-password-console.path systemd-ask-password-wall.path
getty.target`)

// Needs says which program is missing for boxes, or nil.
func Needs() error {
	if os.Geteuid() != 0 {
		return errors.New("a box needs root")
	}
	for _, p := range []string{"systemd-nspawn", "nsenter", "setfattr", "dbus-daemon"} {
		if _, err := exec.LookPath(p); err != nil {
			return fmt.Errorf("a box needs %s: apt-get install systemd systemd-container dbus attr", p)
		}
	}
	return nil
}

// A Box is one throwaway box.
type Box struct {
	Name string
	Root string // the box's root, as this machine sees it
	// NetNS is the path of a network namespace to live in; "" for one of its
	// own with loopback only.
	NetNS string

	dir  string
	cmd  *exec.Cmd
	done chan error
	pid1 int
}

// New makes a box and boots it. dir is a folder that does not exist yet.
func New(ctx context.Context, dir, netns string) (*Box, error) {
	if err := Needs(); err != nil {
		return nil, err
	}
	b := &Box{Name: "box-" + filepath.Base(dir), dir: dir, Root: filepath.Join(dir, "root"), NetNS: netns}
	if err := b.prepare(); err != nil {
		return nil, errors.Join(err, b.Remove())
	}
	if err := b.Boot(ctx); err != nil {
		return nil, errors.Join(err, b.Remove())
	}
	return b, nil
}

func (b *Box) path(name string) string { return filepath.Join(b.dir, name) }

func (b *Box) prepare() error {
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", b.dir, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mounting a tmpfs on %q: %w", b.dir, err)
	}
	units := b.path("up/etc/systemd/system")
	for _, d := range []string{units, b.path("work"), b.Root, b.path("empty")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	// An opaque folder: none of the host's enabled units.
	if err := unix.Setxattr(units, "trusted.overlay.opaque", []byte("y"), 0); err != nil {
		return err
	}
	for _, u := range masked {
		if err := os.Symlink("/dev/null", filepath.Join(units, u)); err != nil {
			return err
		}
	}
	if err := os.Symlink("/lib/systemd/system/multi-user.target", filepath.Join(units, "default.target")); err != nil {
		return err
	}
	if err := unix.Mount("overlay", b.Root, "overlay", 0, fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", b.path("up"), b.path("work"))); err != nil {
		return fmt.Errorf("mounting the overlay: %w", err)
	}
	return nil
}

// Boot starts the box on the disk it has, and waits until it runs.
func (b *Box) Boot(ctx context.Context) error {
	console, err := os.OpenFile(b.path("console"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer console.Close()
	net := "--private-network"
	if b.NetNS != "" {
		net = "--network-namespace-path=" + b.NetNS
	}
	// In a control group of its own: two boxes in one would count, and kill,
	// each other's processes.
	own := `for d in /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup; do
		[ -e $d/cgroup.procs ] && mkdir -p "$d/$0" && echo $$ >"$d/$0/cgroup.procs"
	done 2>/dev/null
	exec "$@"`
	b.cmd = exec.Command("sh", "-c", own, b.Name, "systemd-nspawn", "-D", b.Root, "--boot", "--register=no", "--keep-unit", "--console=read-only", "-M", b.Name,
		"--resolv-conf=off", "--timezone=off", net, "--bind-ro="+b.path("empty")+":/lib/systemd/system-generators")
	b.cmd.Stdout, b.cmd.Stderr = console, console
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a ^C is for the test, which tidies up
	if err := b.cmd.Start(); err != nil {
		return err
	}
	b.done = make(chan error, 1)
	go func() { b.done <- b.cmd.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, BootTime)
	defer cancel()
	for {
		if b.findPID1() {
			out, _ := b.Exec(ctx, "systemctl", "is-system-running")
			if s := strings.TrimSpace(out); s == "running" || s == "degraded" {
				return nil
			}
		}
		select {
		case err := <-b.done:
			b.done <- err
			tail, _ := os.ReadFile(b.path("console"))
			return fmt.Errorf("the box died at boot: %v: %s", err, tail[max(0, len(tail)-1000):])
		case <-ctx.Done():
			return fmt.Errorf("the box did not boot: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// findPID1 finds the box's PID 1: the child of nspawn that is a systemd.
func (b *Box) findPID1() bool {
	pid := b.cmd.Process.Pid
	data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, child := range strings.Fields(string(data)) {
		comm, _ := os.ReadFile("/proc/" + child + "/comm")
		if strings.TrimSpace(string(comm)) == "systemd" {
			b.pid1, _ = strconv.Atoi(child)
			return true
		}
	}
	return false
}

// Command returns a command that runs in the box.
func (b *Box) Command(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"-t", strconv.Itoa(b.pid1), "-m", "-u", "-i", "-n", "-p", "--wd=/", "--"}, argv...)...)
}

// Exec runs a command in the box, and returns what it printed. An error holds
// that too.
func (b *Box) Exec(ctx context.Context, argv ...string) (string, error) {
	c := b.Command(ctx, argv...)
	var out, errout bytes.Buffer
	c.Stdout, c.Stderr = &out, &errout
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s%s", strings.Join(argv, " "), err, out.String(), errout.String())
	}
	return out.String(), nil
}

// Cut is a power cut: the whole box is killed at once.
func (b *Box) Cut() error {
	if err := syscall.Kill(b.pid1, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return err
	}
	return b.gone()
}

// Halt is an orderly shutdown.
func (b *Box) Halt() error {
	if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return b.gone()
}

func (b *Box) gone() error {
	select {
	case <-b.done:
		b.done <- nil
		return nil
	case <-time.After(BootTime):
		return errors.New("the box would not end")
	}
}

// Remove ends the box and takes away all of it.
func (b *Box) Remove() error {
	if b.cmd != nil && b.cmd.Process != nil {
		if b.pid1 != 0 {
			_ = syscall.Kill(b.pid1, syscall.SIGKILL)
		} else {
			_ = b.cmd.Process.Kill()
		}
		_ = b.gone()
	}
	var errs []error
	for _, m := range []string{b.Root, b.dir} {
		// Someone may still be looking into it: take the name away, the rest goes by itself.
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("unmounting %q: %w", m, err))
		}
	}
	for _, d := range []string{"systemd", "unified", "."} {
		removeGroups(filepath.Join("/sys/fs/cgroup", d, b.Name))
	}
	return errors.Join(append(errs, os.Remove(b.dir))...)
}

// removeGroups removes a control group and those below it, which have no
// processes any more.
func removeGroups(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			removeGroups(filepath.Join(dir, e.Name()))
		}
	}
	_ = os.Remove(dir)
}

// Write puts a file into the box.
func (b *Box) Write(path, text string, mode os.FileMode) error {
	at := filepath.Join(b.Root, path)
	if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(at, []byte(text), mode); err != nil {
		return err
	}
	return os.Chmod(at, mode)
}

// Copy copies a file of this machine into the box.
func (b *Box) Copy(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	st, err := os.Stat(from)
	if err != nil {
		return err
	}
	return b.Write(to, string(data), st.Mode().Perm())
}

// Until waits until something is true in the box. It says what it waited for.
func Until(ctx context.Context, what string, limit time.Duration, is func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		ok, err := is()
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited %s for %s: %w", limit, what, errors.Join(ctx.Err(), err))
		case <-time.After(50 * time.Millisecond):
		}
	}
}
