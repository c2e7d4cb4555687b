package box

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// Folders of a box that its operator works in.
const (
	Operator = "/srv/operator"
	Bucket   = "file:///srv/bucket"
)

// A Fleet is a deployment whose operator and whose only box live in one
// throwaway box.
type Fleet struct {
	*Box
	Store string
	Env   []string // of the operator's commands
}

// NewFleet makes a key and a deployment in a store, promotes the pipeline
// bundle, and does not enroll yet. bin holds the operator's command and the
// pipeline's bundle.
func NewFleet(ctx context.Context, b *Box, bin, store, components string) (*Fleet, error) {
	return newFleet(ctx, &Fleet{Box: b, Store: store}, bin, components)
}

func newFleet(ctx context.Context, f *Fleet, bin, components string) (*Fleet, error) {
	b, store := f.Box, f.Store
	if err := os.MkdirAll(filepath.Join(b.Root, "srv/bucket"), 0o755); err != nil {
		return nil, err
	}
	bundles, err := filepath.Glob(filepath.Join(bin, "sluice_*.tar.zst"))
	if err != nil || len(bundles) != 1 {
		return nil, fmt.Errorf("%d pipeline bundles in %q, want one: %w", len(bundles), bin, err)
	}
	if err := errors.Join(b.Copy(filepath.Join(bin, "sluice"), Operator+"/sluice"), b.Copy(bundles[0], Operator+"/sluice.tar.zst")); err != nil {
		return nil, err
	}
	for _, argv := range [][]string{
		{"keygen", "-o", Operator + "/key"},
		{"init", "-store", store, "-key", Operator + "/key.pub", "-components", components, "-o", Operator + "/deployment.json"},
		{"update", "-store", store, "-key", Operator + "/key.key", "-file", Operator + "/sluice.tar.zst", "-yes"},
	} {
		if _, err := f.Sluice(ctx, argv...); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// Sluice runs the operator's command.
func (f *Fleet) Sluice(ctx context.Context, args ...string) (string, error) {
	return f.Exec(ctx, append(append([]string{"env"}, f.Env...), append([]string{Operator + "/sluice"}, args...)...)...)
}

// Enroll makes the box one of the fleet.
func (f *Fleet) Enroll(ctx context.Context, args ...string) error {
	_, err := f.Sluice(ctx, append([]string{"enroll", Operator + "/deployment.json"}, args...)...)
	return err
}

// Promote promotes a bundle of the box, and returns the pointer.
func (f *Fleet) Promote(ctx context.Context, file string, args ...string) (contract.Pointer, error) {
	return f.pointer(ctx, append([]string{"update", "-store", f.Store, "-key", Operator + "/key.key", "-file", file, "-yes", "-json"}, args...)...)
}

// Rollback rolls a component back.
func (f *Fleet) Rollback(ctx context.Context, component string, args ...string) (contract.Pointer, error) {
	return f.pointer(ctx, append([]string{"rollback", component, "-store", f.Store, "-key", Operator + "/key.key", "-yes", "-json"}, args...)...)
}

func (f *Fleet) pointer(ctx context.Context, args ...string) (contract.Pointer, error) {
	out, err := f.Sluice(ctx, args...)
	if err != nil {
		return contract.Pointer{}, err
	}
	return contract.Spoken.DecodePointer([]byte(out))
}

// State is root's state of a component in the box.
func (f *Fleet) State(component contract.Component) record.State {
	return record.State{Root: layout.Root(f.Root), Name: component}
}

// RollTime is the most that a roll may take in a test.
const RollTime = 150 * time.Second

// Ended waits until a promote has ended in the box, and returns how. With
// outcomes, only one of them is an end.
func (f *Fleet) Ended(ctx context.Context, p contract.Pointer, ends ...outcome.Outcome) (contract.Result, error) {
	var r contract.Result
	err := Until(ctx, fmt.Sprintf("%s %s to end as %v", p.Component, p.Payload.Current.Version, ends), RollTime, func() (bool, error) {
		got, ok, err := record.Load[contract.Result](f.State(p.Component), layout.Result)
		if err != nil || !ok {
			return false, err
		}
		r = got
		if !r.Tuple.Equal(p.Tuple()) || f.State(p.Component).Open() {
			return false, fmt.Errorf("the last is %s %s: %s", r.Version, r.Outcome, r.Reason)
		}
		for _, o := range ends {
			if r.Outcome == o {
				return true, nil
			}
		}
		return len(ends) == 0, fmt.Errorf("it is %s: %s", r.Outcome, r.Reason)
	})
	if err != nil {
		logs, _ := f.Exec(context.WithoutCancel(ctx), "journalctl", "--no-pager", "-q", "-o", "short-precise", "-n", "40")
		err = fmt.Errorf("%w\n%s", err, logs)
	}
	return r, err
}

// Bundle makes a bundle of files on this machine, in the box.
func (f *Fleet) Bundle(ctx context.Context, name string, files map[string]string) (string, error) {
	dir := Operator + "/trees/" + name
	for path, text := range files {
		mode := fs.FileMode(0o644)
		if filepath.Dir(path) == "bin" {
			mode = 0o755
		}
		if err := f.Write(filepath.Join(dir, path), text, mode); err != nil {
			return "", err
		}
	}
	out := Operator + "/" + name + ".tar.zst"
	_, err := f.Sluice(ctx, "bundle", dir, "-o", out)
	return out, err
}

// BuildEdge builds the service of this repository at a version, with
// something wrong with it or not.
func BuildEdge(ctx context.Context, version, fault string) (string, error) {
	dir, err := os.MkdirTemp("", "sluice-edge-") // tests build the same version at the same time
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "edge")
	c := exec.CommandContext(ctx, goTool(), "build", "-trimpath", "-ldflags", fmt.Sprintf("-s -w -X 'main.version=%s' -X 'main.fault=%s'", version, fault), "-o", out, "sluice/test/edge")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building edge: %w: %s", err, msg)
	}
	data, err := os.ReadFile(out)
	return string(data), err
}

func goTool() string {
	if p, err := exec.LookPath("go"); err == nil {
		return p
	}
	return "/usr/local/go/bin/go" // sudo's PATH lacks it
}

// Edge is a bundle of the service, as files.
func Edge(program, version string) map[string]string {
	return map[string]string{
		"bin/edge":               program,
		"share/deep/er/edge.txt": "of " + version + "\n",
		"units/edge.service": `[Unit]
Description=A small HTTP service
Requires=edge.socket
After=edge.socket

[Service]
Type=notify
ExecStart=/opt/sluice/edge/current/bin/edge
User=edge
Restart=on-failure
RestartSec=1

[Install]
WantedBy=multi-user.target
`,
		"units/edge.socket": `[Unit]
Description=The socket of a small HTTP service

[Socket]
ListenStream=127.0.0.1:8080

[Install]
WantedBy=sockets.target
`,
		"sysusers.d/edge.conf": "u edge - \"A small HTTP service\"\n",
		"tmpfiles.d/edge.conf": "d /run/edge 0755 edge edge -\n",
		"manifest.json": fmt.Sprintf(`{
  "component": "edge",
  "version": %q,
  "version_command": ["bin/edge", "version"],
  "units": {"enable": ["edge.service", "edge.socket"], "restart": [{"unit": "edge.service", "inputs": ["bin/edge"]}]},
  "gate": {"pass_within": "5s", "soak": "7s", "probes": [{"http": "http://127.0.0.1:8080/", "status": 200}]}
}
`, version),
	}
}
