package systemd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/coreos/go-systemd/v22/unit"

	"sluice/internal/fault"
	"sluice/internal/layout"
)

// Recorder stands in for the manager in tests: it keeps unit states in
// memory, reads unit files where a box has them, makes the links of [Install]
// there (as systemd does, without an fsync), and writes down every call that
// changes something, in order.
type Recorder struct {
	Root  layout.Root
	Fault *fault.Points
	// OnStart decides how a start of a unit ends: the job's result, and what
	// becomes of the unit, which is active otherwise. nil: all is well.
	OnStart func(unit string, u *Unit) (job string)
	// OnRun decides how a command ends. nil: it prints its own arguments.
	OnRun func(c Command) Output

	mu    sync.Mutex
	calls []string
	units map[string]*Unit
	lives int
}

// Calls returns what was called, in order.
func (r *Recorder) Calls() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

// Forget forgets the calls.
func (r *Recorder) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = nil
}

// Enabled returns the enabled units, sorted.
func (r *Recorder) Enabled() []string {
	var out []string
	for _, link := range r.Links() {
		out = append(out, filepath.Base(link))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Links returns the links of enablement, sorted, as target.wants/unit.
func (r *Recorder) Links() []string {
	links, _ := filepath.Glob(r.Root.Join(filepath.Join(string(layout.SystemdUnits), "*.wants", "*")))
	for i, l := range links {
		links[i] = filepath.Join(filepath.Base(filepath.Dir(l)), filepath.Base(l))
	}
	return links
}

// wanted are the links that enabling a unit makes.
func (r *Recorder) wanted(name string) []string {
	data, err := os.ReadFile(r.Root.Join(r.file(name)))
	if err != nil {
		return nil
	}
	opts, _ := unit.DeserializeOptions(bytes.NewReader(data))
	var out []string
	for _, o := range opts {
		if o.Section == "Install" && o.Name == "WantedBy" {
			out = append(out, filepath.Join(o.Value+".wants", name))
		}
	}
	return out
}

// Active returns the active units, sorted.
func (r *Recorder) Active() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []string
	for name, u := range r.units {
		if u.Active() {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

func (r *Recorder) call(op string, objects ...string) error {
	line := strings.TrimSpace(op + " " + strings.Join(objects, " "))
	if err := r.Fault.Hit("manager: "+op, strings.Join(objects, " ")); err != nil {
		return err
	}
	r.calls = append(r.calls, line)
	return nil
}

func (r *Recorder) unit(name string) *Unit {
	if r.units == nil {
		r.units = map[string]*Unit{}
	}
	if r.units[name] == nil {
		r.units[name] = &Unit{Name: name, ActiveState: "inactive", SubState: "dead", Result: "success"}
	}
	return r.units[name]
}

// file is where the unit file of a unit is.
func (r *Recorder) file(name string) string {
	if at := strings.Index(name, "@"); at >= 0 {
		name = name[:at+1] + filepath.Ext(name)
	}
	return filepath.Join(string(layout.SystemdUnits), name)
}

// Live says that units can be judged.
func (r *Recorder) Live() bool { return true }

// Close does nothing.
func (r *Recorder) Close() {}

// Unit returns a unit's state.
func (r *Recorder) Unit(_ context.Context, name string) (Unit, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	u := *r.unit(name)
	u.LoadState = "not-found"
	path := r.file(name)
	if _, err := os.Lstat(r.Root.Join(path)); err == nil {
		u.LoadState, u.FragmentPath, u.UnitFileState = "loaded", path, "disabled"
		if slices.Contains(r.Enabled(), name) {
			u.UnitFileState = "enabled"
		}
	}
	return u, nil
}

// Reload is recorded.
func (r *Recorder) Reload(context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.call("reload")
}

// Enable is recorded.
func (r *Recorder) Enable(_ context.Context, units []string) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call("enable", units...); err != nil {
		return false, err
	}
	changed := false
	for _, u := range units {
		r.unit(u)
		for _, link := range r.wanted(u) {
			at := r.Root.Join(filepath.Join(string(layout.SystemdUnits), link))
			if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
				return changed, err
			}
			err := os.Symlink(r.file(u), at)
			changed = changed || err == nil
			if err != nil && !errors.Is(err, fs.ErrExist) {
				return changed, err
			}
		}
	}
	return changed, nil
}

// Disable is recorded.
func (r *Recorder) Disable(_ context.Context, units []string) (bool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call("disable", units...); err != nil {
		return false, err
	}
	changed, missing := false, false
	for _, u := range units {
		r.unit(u)
		for _, link := range r.Links() {
			if filepath.Base(link) == u {
				changed = true
				if err := os.Remove(r.Root.Join(filepath.Join(string(layout.SystemdUnits), link))); err != nil {
					return changed, err
				}
			}
		}
		_, err := os.Lstat(r.Root.Join(r.file(u)))
		missing = missing || err != nil
	}
	if missing && !changed {
		return false, ErrNoUnit // as systemd 252 does
	}
	return changed, nil
}

// ResetFailed is recorded.
func (r *Recorder) ResetFailed(_ context.Context, unit string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.call("reset-failed", unit)
}

func (r *Recorder) begin(op, name string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call(op, name); err != nil {
		return "", err
	}
	u := r.unit(name)
	r.lives++
	u.ActiveState, u.SubState, u.Result = "active", "running", "success"
	u.InvocationID, u.ActiveEnter, u.MainPID, u.NRestarts = fmt.Sprint("life-", r.lives), uint64(r.lives), r.lives, 0
	u.ExitCode, u.ExitStatus, u.NeedReload, u.Exec = 0, 0, false, ""
	if r.OnStart != nil {
		return r.OnStart(name, u), nil
	}
	return JobDone, nil
}

// Start is recorded.
func (r *Recorder) Start(_ context.Context, unit string) (string, error) {
	return r.begin("start", unit)
}

// Restart is recorded.
func (r *Recorder) Restart(_ context.Context, unit string) (string, error) {
	return r.begin("restart", unit)
}

// Queue is recorded.
func (r *Recorder) Queue(_ context.Context, unit string) error {
	_, err := r.begin("queue", unit)
	return err
}

// Stop is recorded.
func (r *Recorder) Stop(_ context.Context, unit string) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call("stop", unit); err != nil {
		return "", err
	}
	u := r.unit(unit)
	u.ActiveState, u.SubState, u.MainPID = "inactive", "dead", 0
	return JobDone, nil
}

// Run is recorded, by the program's name.
func (r *Recorder) Run(_ context.Context, c Command) (Output, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call("run", filepath.Base(c.Argv[0])); err != nil {
		return Output{}, err
	}
	if r.OnRun != nil {
		return r.OnRun(c), nil
	}
	return Output{Text: strings.Join(c.Argv, " ")}, nil
}

// Watch never wakes.
func (r *Recorder) Watch(context.Context) (<-chan struct{}, func()) { return nil, func() {} }

// Tail says who would be asked.
func (r *Recorder) Tail(_ context.Context, u Unit) string { return "log of " + u.Name }

// Clone returns a manager in the same state, of another tree: what a test
// goes on with after a process has died.
func (r *Recorder) Clone(root layout.Root) *Recorder {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := &Recorder{Root: root, lives: r.lives, units: map[string]*Unit{}}
	for name, u := range r.units {
		copied := *u
		c.units[name] = &copied
	}
	return c
}

// PowerCycle forgets what runs: after it only what is enabled, and has a file,
// is started by the boot.
func (r *Recorder) PowerCycle() {
	r.mu.Lock()
	defer r.mu.Unlock()
	enabled := r.Enabled()
	for name, u := range r.units {
		_, err := os.Lstat(r.Root.Join(r.file(name)))
		if *u = (Unit{Name: name, ActiveState: "inactive", SubState: "dead", Result: "success"}); slices.Contains(enabled, name) && err == nil {
			r.lives++
			u.ActiveState, u.InvocationID = "active", fmt.Sprint("life-", r.lives)
		}
	}
}

// Failed finds none.
func (r *Recorder) Failed(context.Context, string) ([]string, error) { return nil, nil }
