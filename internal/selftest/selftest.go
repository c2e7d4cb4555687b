// Package selftest is how a pipeline proves itself before a box depends on it.
// It reads the box's records, and rolls a component of its own forward, back and
// forward again on a scratch tree, with the very programs that stand beside it.
//
// It changes nothing outside that tree, needs no right but to read, and tells
// nothing of the service manager: there is none on a scratch tree.
package selftest

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
)

// The component, and the channel, that are rehearsed with.
const (
	component contract.Component = "rehearsal"
	channel   contract.Channel   = "stable"
)

// stepTime is how long one program may take on the scratch tree, where there
// is nothing to wait for.
const stepTime = 15 * time.Second

// Run reads the records of a box, and rehearses.
func Run(ctx context.Context, root layout.Root, status func(string, ...any)) error {
	if err := record.Readable(root, contract.Spoken); err != nil {
		return fmt.Errorf("a record of this box can't be read by this build: %w", err)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	scratch, err := os.MkdirTemp("", "sluice-self-test-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	r := &rehearsal{root: layout.Root(scratch), bin: filepath.Dir(self), disk: &durable.Disk{}, status: status, last: contract.At(time.Unix(0, 0))}
	r.state = record.State{Root: r.root, Disk: r.disk, Name: component}
	if err := r.prepare(); err != nil {
		return fmt.Errorf("preparing a scratch tree: %w", err)
	}
	return r.play(ctx)
}

type rehearsal struct {
	root   layout.Root
	bin    string // this build's programs
	disk   *durable.Disk
	state  record.State
	key    ed25519.PrivateKey
	status func(string, ...any)
	last   contract.Time
}

// prepare makes a box of the scratch tree: configuration, folders, a key of its
// own to trust.
func (r *rehearsal) prepare() error {
	for _, row := range layout.Folders() {
		if err := r.disk.Mkdir(r.state.Path(row.Place), 0o755); err != nil {
			return err
		}
	}
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	r.key = key
	document := trust.Sign(contract.TrustLadder, trust.NewDocument(contract.At(time.Now()), pub).Encode(), key)
	return errors.Join(
		r.write(r.root.Path(layout.BoxConf, ""), "SLUICE_STORE=file://"+r.bucket("")+"\nSLUICE_LABEL=rehearsal\n"),
		r.write(r.state.Path(layout.ComponentConf), "SLUICE_CHANNEL="+string(channel)+"\n"),
		r.write(r.root.TrustFile(string(component), 1), string(document.Encode())),
	)
}

func (r *rehearsal) bucket(key string) string { return filepath.Join(string(r.root), "bucket", key) }

func (r *rehearsal) write(path, text string) error {
	if err := r.disk.Mkdir(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return r.disk.WriteFile(path, []byte(text), 0o644)
}

// A scene is one promote, and how it has to end.
type scene struct {
	what    string
	version contract.Version
	probe   string // what the gate's probe does
	ends    outcome.Outcome
	word    outcome.Word
	runs    contract.Version
}

// play plays a life of a component: installed, rolled forward, failing its gate,
// cut in the middle and recovered, rolled back.
func (r *rehearsal) play(ctx context.Context) error {
	for _, s := range []scene{
		{"a first install", "1", "exit 0", outcome.Applied, "", "1"},
		{"a roll forward", "2", "exit 0", outcome.Applied, "", "2"},
		{"a gate that fails", "3", "exit 1", outcome.RolledBack, outcome.Gate, "2"},
		{"a roll that is cut", "4", "kill -9 $PPID", outcome.RolledBack, outcome.Interrupted, "2"},
		{"a roll back", "1", "exit 0", outcome.Applied, "", "1"},
	} {
		r.status("self-test: %s", s.what)
		if err := r.one(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s.what, err)
		}
	}
	return nil
}

func (r *rehearsal) one(ctx context.Context, s scene) error {
	build, err := r.promote(s)
	if err != nil {
		return err
	}
	if err := r.run(ctx, "stage"); err != nil {
		return err
	}
	if staged := record.Optional[contract.Staged](r.state, layout.StagedRecord); staged == nil || !staged.Tuple.Equal(build.Tuple) {
		return errors.New("stage has staged something else, or nothing")
	}
	err = r.run(ctx, "apply")
	if s.ends == outcome.Applied && err != nil {
		return err
	}
	if s.ends != outcome.Applied && err == nil {
		return errors.New("apply says that all is well")
	}
	if r.state.Open() {
		if err := r.run(ctx, "recover"); err != nil {
			return err
		}
	} else if s.word == outcome.Interrupted {
		return errors.New("it was cut, and left no journal")
	}
	result := record.Optional[contract.Result](r.state, layout.Result)
	if result == nil || !result.Tuple.Equal(build.Tuple) || result.Outcome != s.ends || result.Word() != s.word {
		return fmt.Errorf("the result is %+v", result)
	}
	current, _ := os.Readlink(r.state.Path(layout.Current))
	good, _ := os.Readlink(r.state.Path(layout.Good))
	if want := filepath.Join("sets", string(s.runs)); r.state.Open() || current != want || good != want {
		return fmt.Errorf("current is %q and good is %q, not %q; a journal is open: %v", current, good, want, r.state.Open())
	}
	return nil
}

// promote does what the operator, fetch and verify would: a signed pointer in
// the store, a verified tree, the hint and the marker.
func (r *rehearsal) promote(s scene) (contract.Build, error) {
	files := map[string]string{"bin/probe": "#!/bin/sh\necho rehearsal " + string(s.version) + "\n", "bin/check": "#!/bin/sh\n" + s.probe + "\n"}
	m := contract.Manifest{Schema: contract.One, Component: component, Version: s.version, Platform: contract.Here(), VersionCommand: []string{"bin/probe"},
		Gate: contract.Gate{PassWithin: contract.Duration(time.Millisecond), Soak: contract.Duration(time.Millisecond), Probes: []contract.Probe{{Exec: []string{"bin/check"}}}}}
	tree := r.root.Tree(string(component), string(s.version))
	if err := r.disk.RemoveTree(tree); err != nil {
		return contract.Build{}, err
	}
	for path, text := range files {
		m.Files = append(m.Files, contract.File{Path: path, Mode: 0o755, Size: int64(len(text)), SHA256: record.Sum([]byte(text))})
		if err := r.write(filepath.Join(tree, path), text); err != nil {
			return contract.Build{}, err
		}
	}
	slices.SortFunc(m.Files, func(a, b contract.File) int { return strings.Compare(a.Path, b.Path) })
	manifest := m.Encode()
	r.last = contract.At(time.Unix(r.last.Unix()+1, 0))
	artifact := contract.Artifact{Key: contract.BootstrapKey(component, s.version, "bundle"), Size: 1, SHA256: record.Sum(nil), TarSize: m.Size(), ManifestSHA256: record.Sum(manifest)}
	p := contract.Pointer{Envelope: contract.One, Component: component, Channel: channel, PromotedAt: r.last, Payload: contract.PointerPayload{Schema: contract.One,
		Current: contract.Release{Version: s.version, Artifacts: map[contract.Platform]contract.Artifact{contract.Here(): artifact}, Source: "file", ReleasedAt: r.last},
		History: []contract.Release{}, Audit: []contract.Audit{}}}
	hint := contract.Hint{Schema: contract.One, Version: s.version, PromotedAt: r.last, SeenAt: r.last}
	return contract.Build{Tuple: p.Tuple(), ManifestSHA256: artifact.ManifestSHA256}, errors.Join(
		r.write(filepath.Join(tree, contract.ManifestName), string(manifest)),
		r.write(r.bucket(contract.PointerKey(component, channel, 1)), string(trust.Sign(contract.PointerLadder, p.Encode(), r.key).Encode())),
		r.write(r.state.Path(layout.Hint), string(hint.Encode())),
		marker.Raise(r.state.Path(layout.Requested)),
	)
}

// run runs one of this build's programs on the scratch tree.
func (r *rehearsal) run(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	var said bytes.Buffer
	c := exec.CommandContext(ctx, filepath.Join(r.bin, name), "-root", string(r.root), "-component", string(component))
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir()} // of this run's own unit it knows nothing
	c.Stdout, c.Stderr = &said, &said
	c.WaitDelay = time.Second
	if err := c.Run(); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("it did not end in %s", stepTime)
		}
		return fmt.Errorf("%s: %w: %s", name, err, contract.Clip(said.String()))
	}
	return nil
}
