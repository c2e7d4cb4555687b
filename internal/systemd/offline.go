package systemd

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"sluice/internal/layout"
)

// Offline stands in for the manager on another tree: enablement links by
// systemctl --root, accounts and temporary files by --root, commands as
// children. No unit runs, so none can be judged.
type Offline struct{ Root layout.Root }

// Live says that no unit runs here.
func (o *Offline) Live() bool { return false }

// Close does nothing.
func (o *Offline) Close() {}

// Unit finds only what the tree shows.
func (o *Offline) Unit(ctx context.Context, name string) (Unit, error) {
	u := Unit{Name: name, LoadState: "not-found", ActiveState: "inactive"}
	path := filepath.Join(string(layout.SystemdUnits), name)
	if _, err := os.Lstat(o.Root.Join(path)); err == nil {
		u.LoadState, u.FragmentPath = "loaded", path
	}
	if out, err := o.systemctl(ctx, "is-enabled", name); err == nil {
		u.UnitFileState = strings.TrimSpace(string(out))
	}
	return u, nil
}

func (o *Offline) systemctl(ctx context.Context, args ...string) ([]byte, error) {
	return exec.CommandContext(ctx, "systemctl", append([]string{"--root=" + string(o.Root), "--no-pager"}, args...)...).CombinedOutput()
}

func (o *Offline) links(ctx context.Context, verb string, units []string) (bool, error) {
	out, err := o.systemctl(ctx, append([]string{"-q", verb}, units...)...)
	if err != nil {
		return false, fmt.Errorf("systemctl --root %s %s: %w: %s", verb, strings.Join(units, " "), err, bytes.TrimSpace(out))
	}
	return true, nil
}

// Reload does nothing: nobody has read the files.
func (o *Offline) Reload(context.Context) error { return nil }

// Enable makes links.
func (o *Offline) Enable(ctx context.Context, units []string) (bool, error) {
	return o.links(ctx, "enable", units)
}

// Disable removes links.
func (o *Offline) Disable(ctx context.Context, units []string) (bool, error) {
	changed, err := o.links(ctx, "disable", units)
	if err != nil && strings.Contains(err.Error(), "does not exist") {
		err = ErrNoUnit
	}
	return changed, err
}

// ResetFailed does nothing.
func (o *Offline) ResetFailed(context.Context, string) error { return nil }

// Start does nothing.
func (o *Offline) Start(context.Context, string) (string, error) { return JobDone, nil }

// Queue does nothing.
func (o *Offline) Queue(context.Context, string) error { return nil }

// Stop does nothing.
func (o *Offline) Stop(context.Context, string) (string, error) { return JobDone, nil }

// Restart does nothing.
func (o *Offline) Restart(context.Context, string) (string, error) { return JobDone, nil }

// Run runs a command as a child, in a process group that ends with it. A tool
// of systemd is told of the tree.
func (o *Offline) Run(ctx context.Context, cmd Command) (Output, error) {
	argv := slices.Clone(cmd.Argv)
	if cmd.Profile == Tool {
		argv = slices.Insert(argv, 1, "--root="+string(o.Root))
	}
	ctx, cancel := context.WithTimeout(ctx, cmd.Timeout)
	defer cancel()
	c := exec.CommandContext(ctx, argv[0], argv[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.WaitDelay = stopTime
	kept := &bounded{limit: cmd.Output, flood: cancel}
	c.Stdout, c.Stderr = kept, kept
	err := c.Start()
	if err != nil { // as the manager would say: the command's fault, not ours
		return Output{Status: -1, Ended: err.Error()}, nil
	}
	err = c.Wait()
	_ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) // what it forked
	out := Output{Text: string(kept.data), Status: c.ProcessState.ExitCode()}
	switch {
	case kept.flooded:
		out.Status, out.Ended = -1, "it would not stop printing"
	case ctx.Err() != nil:
		out.Status, out.Ended = -1, fmt.Sprintf("it did not end in %s", cmd.Timeout)
	case out.Status < 0:
		out.Ended = err.Error()
	}
	return out, nil
}

// bounded keeps the first bytes, and calls flood when there is no end to it.
type bounded struct {
	limit, n int
	data     []byte
	flooded  bool
	flood    func()
}

func (b *bounded) Write(p []byte) (int, error) {
	if room := b.limit - len(b.data); room > 0 {
		b.data = append(b.data, p[:min(room, len(p))]...)
	}
	if b.n += len(p); b.n > b.limit+floodLimit && !b.flooded {
		b.flooded = true
		b.flood()
	}
	return len(p), nil
}

// Watch never wakes.
func (o *Offline) Watch(context.Context) (<-chan struct{}, func()) { return nil, func() {} }

// Tail knows nothing.
func (o *Offline) Tail(context.Context, Unit) string { return "" }

// Failed finds none.
func (o *Offline) Failed(context.Context, string) ([]string, error) { return nil, nil }
