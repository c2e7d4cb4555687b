// Package systemd is the service manager as Sluice uses it: over D-Bus on a
// live box, by systemctl --root on another tree, and a recorder that stands
// in for it in tests.
package systemd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"sluice/internal/layout"
)

// A Unit is what the manager says of a unit at one moment. One sample lies: a
// crash-looper looks active between two deaths.
type Unit struct {
	Name          string
	LoadState     string
	ActiveState   string
	SubState      string
	UnitFileState string
	FragmentPath  string
	InvocationID  string
	NRestarts     uint32
	MainPID       int
	ActiveEnter   uint64 // µs, monotonic
	Left          uint64 // µs, monotonic: when it last became inactive; 0: not since it was loaded
	MainStart     uint64 // µs, monotonic: when the main process started
	ExitCode      int    // of the main process: si_code; 0: it runs, or never ran
	ExitStatus    int
	Result        string
	Type          string
	NeedReload    bool
	HasJob        bool
	TimeoutStop   time.Duration
	Exec          string // the program of the first ExecStart=
}

// Active reports whether the unit is up, or a oneshot that did its work.
func (u Unit) Active() bool { return u.ActiveState == "active" || u.ActiveState == "reloading" }

// Wanted reports whether the unit is up, or on its way there.
func (u Unit) Wanted() bool {
	return u.HasJob || u.ActiveState != "inactive" && u.ActiveState != "failed" && u.ActiveState != "deactivating" && u.ActiveState != ""
}

// JobDone is the result of a job that succeeded.
const JobDone = "done"

// A Profile is how far a command that the manager runs for us may reach.
type Profile int

// The profiles.
const (
	Tool      Profile = iota // root, unconfined: systemd-sysusers, systemd-tmpfiles
	Isolated                 // a throwaway user, everything read-only, no network
	Loopbound                // the same, with loopback
	Scratch                  // Isolated, with a tree in memory that it may write and run programs from: $TMPDIR
)

// A Command is one command to be run outside the sandbox of its caller.
type Command struct {
	Argv    []string
	Profile Profile
	Timeout time.Duration
	Output  int // bytes of both streams that are kept
}

// An Output is how a command ended.
type Output struct {
	Text   string // the first bytes of both streams
	Status int    // exit status; -1 if it did not exit by itself
	Ended  string // in words, if it did not exit by itself
}

// RunPattern matches the units that Run makes.
const RunPattern = "sluice-run-*.service"

// ErrNoUnit is what Disable answers when it changed nothing and a unit's file
// is not there.
var ErrNoUnit = errors.New("there is no such unit file")

// ErrAway is a manager that can't be spoken to. It says nothing about any unit.
var ErrAway = errors.New("the service manager is away")

// A Manager is a service manager. Methods that start, stop or restart wait
// for the job and return its result; errors are of the conversation itself.
type Manager interface {
	Live() bool // units run, and can be judged
	Unit(ctx context.Context, name string) (Unit, error)
	Reload(ctx context.Context) error
	Enable(ctx context.Context, units []string) (changed bool, err error)
	Disable(ctx context.Context, units []string) (changed bool, err error)
	ResetFailed(ctx context.Context, unit string) error
	Start(ctx context.Context, unit string) (job string, err error)
	Queue(ctx context.Context, unit string) error // a start that nobody waits for
	Stop(ctx context.Context, unit string) (job string, err error)
	Restart(ctx context.Context, unit string) (job string, err error)
	Run(ctx context.Context, c Command) (Output, error)
	Failed(ctx context.Context, pattern string) ([]string, error)
	// Watch wakes its reader when something happened to some unit; read
	// properties to know what. stop ends it.
	Watch(ctx context.Context) (wake <-chan struct{}, stop func())
	// Tail returns the last lines that an invocation of a unit logged.
	Tail(ctx context.Context, u Unit) string
	Close()
}

// Done makes an error of a job that did not end as done.
func Done(doing, unit, job string, err error) error {
	if err == nil && job != JobDone {
		err = fmt.Errorf("the job ended as %q", job)
	}
	if err != nil {
		return fmt.Errorf("%s %q: %w", doing, unit, err)
	}
	return nil
}

// Of returns the manager of a tree.
func Of(root layout.Root) Manager {
	if root.Live() {
		return &Live{}
	}
	return &Offline{Root: root}
}
