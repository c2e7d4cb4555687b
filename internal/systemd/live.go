package systemd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"sluice/internal/fault"
)

// Live is the manager of the running system, over its private socket: root
// reaches it without a D-Bus daemon, and before sysinit.target.
type Live struct {
	Fault *fault.Points // nil outside tests

	mu   sync.Mutex
	conn *sd.Conn
}

// A reason carries so many of a unit's last lines, if they can be had in time.
const (
	tailLines = "4"
	tailTime  = 5 * time.Second
)

var runs atomic.Int64

// Live says that units run here.
func (l *Live) Live() bool { return true }

// Close ends the conversation.
func (l *Live) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil {
		l.conn.Close()
		l.conn = nil
	}
}

// dial returns the connection, a fresh one if the last was lost.
func (l *Live) dial(ctx context.Context) (*sd.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conn != nil && l.conn.Connected() {
		return l.conn, nil
	}
	c, err := sd.NewSystemdConnectionContext(context.WithoutCancel(ctx))
	if err != nil {
		return nil, fmt.Errorf("speaking to the service manager: %w", err)
	}
	l.conn = c
	return c, nil
}

// The manager goes away and comes back when it executes itself anew, as it
// does when its package is upgraded.
const (
	awayFor   = 15 * time.Second // how long it may be away
	awayPause = 200 * time.Millisecond
)

// talk makes a call, again and again while the manager is away. What it
// answers, also that it refuses, is final. Every call of ours may be repeated.
func (l *Live) talk(ctx context.Context, do func(*sd.Conn) error) error {
	deadline := time.Now().Add(awayFor)
	for {
		c, err := l.dial(ctx)
		if err == nil {
			err = do(c)
		}
		var answer dbus.Error
		if err == nil || errors.As(err, &answer) && answer.Name != "org.freedesktop.DBus.Error.NoReply" && answer.Name != "org.freedesktop.DBus.Error.Disconnected" || ctx.Err() != nil {
			return err
		}
		l.Close() // a fresh connection next time
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: %w", ErrAway, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(awayPause):
		}
	}
}

// call is for calls that change something.
func (l *Live) call(ctx context.Context, op, object string, do func(*sd.Conn) error) error {
	if err := l.Fault.Hit(op, object); err != nil {
		return err
	}
	return l.talk(ctx, do)
}

// Unit asks for all properties at once.
func (l *Live) Unit(ctx context.Context, name string) (Unit, error) {
	var p map[string]any
	err := l.talk(ctx, func(c *sd.Conn) (err error) {
		p, err = c.GetAllPropertiesContext(ctx, name)
		return err
	})
	if err != nil {
		return Unit{}, fmt.Errorf("asking for the properties of %s: %w", name, err)
	}
	u := Unit{Name: name, LoadState: get[string](p, "LoadState"), ActiveState: get[string](p, "ActiveState"), SubState: get[string](p, "SubState"),
		UnitFileState: get[string](p, "UnitFileState"), FragmentPath: get[string](p, "FragmentPath"), NRestarts: get[uint32](p, "NRestarts"),
		MainPID: int(get[uint32](p, "MainPID")), ActiveEnter: get[uint64](p, "ActiveEnterTimestampMonotonic"), MainStart: get[uint64](p, "ExecMainStartTimestampMonotonic"),
		Left: get[uint64](p, "InactiveEnterTimestampMonotonic"), ExitCode: int(get[int32](p, "ExecMainCode")), ExitStatus: int(get[int32](p, "ExecMainStatus")), Result: get[string](p, "Result"), Type: get[string](p, "Type"),
		NeedReload: get[bool](p, "NeedDaemonReload"), TimeoutStop: microseconds(get[uint64](p, "TimeoutStopUSec")),
		InvocationID: fmt.Sprintf("%x", get[[]byte](p, "InvocationID"))}
	if job := get[[]any](p, "Job"); len(job) > 0 {
		u.HasJob = job[0] != uint32(0)
	}
	if starts := get[[][]any](p, "ExecStart"); len(starts) > 0 && len(starts[0]) > 0 {
		u.Exec, _ = starts[0][0].(string)
	}
	return u, nil
}

// microseconds is a time of the manager's; what is too large is for ever.
func microseconds(us uint64) time.Duration {
	if us > uint64(math.MaxInt64/time.Microsecond) {
		return math.MaxInt64
	}
	return time.Duration(us) * time.Microsecond
}

func get[T any](p map[string]any, name string) T {
	v, _ := p[name].(T)
	return v
}

// Reload is daemon-reload.
func (l *Live) Reload(ctx context.Context) error {
	return l.call(ctx, "reload", "", func(c *sd.Conn) error { return c.ReloadContext(ctx) })
}

// Enable makes the links of [Install]. It does not reload the manager.
func (l *Live) Enable(ctx context.Context, units []string) (changed bool, err error) {
	return changed, l.call(ctx, "enable", strings.Join(units, " "), func(c *sd.Conn) error {
		_, changes, err := c.EnableUnitFilesContext(ctx, units, false, false)
		changed = changed || len(changes) > 0
		return err
	})
}

// Disable removes the links of [Install].
func (l *Live) Disable(ctx context.Context, units []string) (changed bool, err error) {
	err = l.call(ctx, "disable", strings.Join(units, " "), func(c *sd.Conn) error {
		changes, err := c.DisableUnitFilesContext(ctx, units, false)
		changed = changed || len(changes) > 0
		return err
	})
	var said dbus.Error
	if errors.As(err, &said) && said.Name == "org.freedesktop.systemd1.NoSuchUnit" {
		err = ErrNoUnit
	}
	return changed, err
}

// ResetFailed clears a unit's failures and its start limit.
func (l *Live) ResetFailed(ctx context.Context, unit string) error {
	return l.call(ctx, "reset-failed", unit, func(c *sd.Conn) error { return c.ResetFailedUnitContext(ctx, unit) })
}

// Failed returns the units of a pattern that have failed.
func (l *Live) Failed(ctx context.Context, pattern string) (names []string, err error) {
	return names, l.talk(ctx, func(c *sd.Conn) error {
		units, err := c.ListUnitsByPatternsContext(ctx, []string{"failed"}, []string{pattern})
		names = nil
		for _, u := range units {
			names = append(names, u.Name)
		}
		return err
	})
}

type jobCall func(c *sd.Conn) func(ctx context.Context, name, mode string, ch chan<- string) (int, error)

func (l *Live) job(ctx context.Context, op, unit string, call jobCall) (string, error) {
	result := make(chan string, 1) // buffered: go-systemd sends while it holds its lock
	err := l.call(ctx, op, unit, func(c *sd.Conn) error {
		_, err := call(c)(ctx, unit, "replace", result)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("%s %q: %w", op, unit, err)
	}
	job, err := l.await(ctx, unit, result)
	if err != nil {
		return "", fmt.Errorf("%s %q: %w", op, unit, err)
	}
	if job == "" { // its end was not heard of, only seen
		u, err := l.Unit(ctx, unit)
		if err != nil {
			return "", err
		}
		job = "failed"
		if u.Active() || (op == "stop" || u.Type == "oneshot") && u.ActiveState == "inactive" && u.Result == "success" {
			job = JobDone
		}
	}
	return job, nil
}

// lookEvery is how often a unit is looked at while its job is waited for.
const lookEvery = time.Second

// await waits for the end of a unit's job. The signal that tells of it is lost
// with a connection; then it is seen from the unit, and the answer is "".
func (l *Live) await(ctx context.Context, unit string, result <-chan string) (string, error) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		select {
		case job := <-result:
			return job, nil
		case <-ctx.Done():
			return "", fmt.Errorf("the job did not end in time: %w", ctx.Err())
		case <-look.C:
		}
		u, err := l.Unit(ctx, unit)
		if err != nil {
			return "", err
		}
		if u.HasJob || u.ActiveState == "activating" && u.SubState != "auto-restart" || u.ActiveState == "deactivating" {
			continue
		}
		select {
		case job := <-result: // it came meanwhile
			return job, nil
		case <-time.After(awayPause):
			return "", nil
		}
	}
}

// Start starts a unit.
func (l *Live) Start(ctx context.Context, unit string) (string, error) {
	return l.job(ctx, "start", unit, func(c *sd.Conn) func(context.Context, string, string, chan<- string) (int, error) {
		return c.StartUnitContext
	})
}

// Stop stops a unit.
func (l *Live) Stop(ctx context.Context, unit string) (string, error) {
	return l.job(ctx, "stop", unit, func(c *sd.Conn) func(context.Context, string, string, chan<- string) (int, error) {
		return c.StopUnitContext
	})
}

// Restart restarts a unit.
func (l *Live) Restart(ctx context.Context, unit string) (string, error) {
	return l.job(ctx, "restart", unit, func(c *sd.Conn) func(context.Context, string, string, chan<- string) (int, error) {
		return c.RestartUnitContext
	})
}

// Queue queues a start.
func (l *Live) Queue(ctx context.Context, unit string) error {
	return l.call(ctx, "queue", unit, func(c *sd.Conn) error {
		_, err := c.StartUnitContext(ctx, unit, "replace", nil)
		return err
	})
}

// stopTime is how long a command may take to die of SIGTERM.
const stopTime = 2 * time.Second

// floodLimit is how much output is thrown away before a command is taken for
// a flood.
const floodLimit = 1 << 20

// Run runs a command in a transient unit: a child of the manager, with its own
// sandbox, whose whole control group ends with it.
func (l *Live) Run(ctx context.Context, cmd Command) (Output, error) {
	path, err := find(cmd.Argv[0])
	if err != nil {
		return Output{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, cmd.Timeout+stopTime+awayFor)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		return Output{}, err
	}
	defer r.Close()
	unit := fmt.Sprintf("sluice-run-%d-%d.service", os.Getpid(), runs.Add(1))
	argv := append([]string{path}, cmd.Argv[1:]...)
	props := append([]sd.Property{
		sd.PropDescription("Sluice: " + strings.Join(cmd.Argv, " ")), sd.PropType("oneshot"), sd.PropExecStart(argv, false),
		prop("StandardOutputFileDescriptor", dbus.UnixFD(w.Fd())), prop("StandardErrorFileDescriptor", dbus.UnixFD(w.Fd())),
		prop("TimeoutStartUSec", uint64(cmd.Timeout/time.Microsecond)), prop("TimeoutStopUSec", uint64(stopTime/time.Microsecond)),
		// At boot recovery comes before sysinit.target, which it would wait for.
		prop("DefaultDependencies", false),
	}, sandbox(cmd.Profile)...)
	result := make(chan string, 1)
	err = l.call(ctx, "run", strings.Join(cmd.Argv, " "), func(c *sd.Conn) error {
		_, err := c.StartTransientUnitContext(ctx, unit, "fail", props, result)
		return err
	})
	w.Close() // ours; the command has its own
	if err != nil {
		return Output{}, fmt.Errorf("running %q: %w", cmd.Argv[0], err)
	}
	text := make(chan string, 1)
	flood := make(chan struct{})
	go func() {
		kept, _ := io.ReadAll(io.LimitReader(r, int64(cmd.Output)))
		// What follows is thrown away: a full pipe would only make it hang.
		if n, _ := io.Copy(io.Discard, io.LimitReader(r, floodLimit)); n == floodLimit {
			close(flood)
		}
		text <- string(kept)
	}()
	out := Output{Status: -1}
	jobs, lost := make(chan string, 1), make(chan error, 1)
	go func() {
		job, err := l.await(ctx, unit, result)
		if err != nil {
			lost <- err
			return
		}
		jobs <- job
	}()
	ended, job := "it was killed", ""
	select {
	case job = <-jobs:
	case <-flood:
		ended, job = "it would not stop printing", "flood"
		_, _ = l.Stop(ctx, unit)
	case err := <-lost:
		_, _ = l.Stop(context.WithoutCancel(ctx), unit)
		return out, err
	}
	out.Text = <-text
	if job == JobDone {
		out.Status = 0
		return out, nil
	}
	u, err := l.Unit(ctx, unit)
	_ = l.ResetFailed(ctx, unit) // it goes; the name would stay loaded otherwise
	if err != nil {
		return out, err
	}
	switch {
	case job == "" && u.ActiveState != "failed": // its end was only seen; one that succeeds is unloaded
		out.Status = 0
		return out, nil
	case job != "flood" && u.Result == "exit-code":
		out.Status = u.ExitStatus
		return out, nil
	case u.Result == "timeout" || job == "timeout":
		ended = fmt.Sprintf("it did not end in %s", cmd.Timeout)
	}
	out.Ended = ended
	return out, nil
}

// find is exec.LookPath for a program that the manager, and not this process,
// will run: within NoExecPaths= nothing looks executable.
func find(name string) (string, error) {
	if filepath.IsAbs(name) {
		return name, nil
	}
	for _, dir := range []string{"/usr/bin", "/bin", "/usr/sbin", "/sbin"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return filepath.Join(dir, name), nil
		}
	}
	return "", &exec.Error{Name: name, Err: exec.ErrNotFound}
}

func prop(name string, v any) sd.Property { return sd.Property{Name: name, Value: dbus.MakeVariant(v)} }

// sandbox is what a command of a profile may not do.
func sandbox(p Profile) []sd.Property {
	if p == Tool {
		return nil
	}
	props := []sd.Property{
		prop("DynamicUser", true), prop("NoNewPrivileges", true), prop("ProtectSystem", "strict"), prop("ProtectHome", "yes"), prop("PrivateTmp", true),
		prop("PrivateDevices", true), prop("ProtectKernelTunables", true), prop("ProtectControlGroups", true), prop("RestrictSUIDSGID", true),
		prop("TasksMax", uint64(maxTasks)), prop("KillMode", "control-group"),
	}
	if p == Isolated || p == Scratch {
		props = append(props, prop("PrivateNetwork", true))
	}
	if p == Scratch { // not below /tmp, which may be mounted noexec, and its private twin with it
		type mount struct{ Path, Options string }
		props = append(props, prop("TemporaryFileSystem", []mount{{scratchFolder, "mode=1777,size=" + scratchSize}}), prop("Environment", []string{"TMPDIR=" + scratchFolder}))
	}
	if p != Loopbound {
		return props
	}
	type address struct {
		Family int32
		Bytes  []byte
		Prefix uint32
	}
	everywhere := []address{{2, make([]byte, 4), 0}, {10, make([]byte, 16), 0}}
	loopback := []address{{2, []byte{127, 0, 0, 0}, 8}, {10, append(make([]byte, 15), 1), 128}}
	return append(props, prop("IPAddressDeny", everywhere), prop("IPAddressAllow", loopback))
}

// Where a command of profile Scratch has its tree, and how large that gets.
const (
	scratchFolder = "/mnt"
	scratchSize   = "64M"
)

// maxTasks is how many processes a command of somebody else's may have.
const maxTasks = 64

// Watch wakes its reader at every change of a unit's properties.
func (l *Live) Watch(ctx context.Context) (<-chan struct{}, func()) {
	wake := make(chan struct{}, 1)
	c, err := sd.NewSystemdConnectionContext(ctx)
	if err != nil || c.Subscribe() != nil {
		return wake, func() {} // the reader has a clock of its own
	}
	updates, errs := make(chan *sd.PropertiesUpdate, 64), make(chan error, 64)
	c.SetPropertiesSubscriber(updates, errs)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-updates:
			case <-errs:
			case <-done:
				return
			}
			select {
			case wake <- struct{}{}:
			default:
			}
		}
	}()
	return wake, func() { close(done); c.Close() }
}

// Tail asks the journal.
func (l *Live) Tail(ctx context.Context, u Unit) string {
	if u.InvocationID == "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, tailTime)
	defer cancel()
	out, err := exec.CommandContext(ctx, "journalctl", "-q", "--no-pager", "-o", "cat", "-n", tailLines, "_SYSTEMD_INVOCATION_ID="+u.InvocationID).Output()
	var lines []string
	for line := range strings.Lines(string(out)) {
		lines = append(lines, strings.TrimSpace(line))
	}
	if err != nil && !errors.Is(err, exec.ErrNotFound) && len(lines) == 0 {
		return ""
	}
	return strings.Join(lines, " / ")
}
