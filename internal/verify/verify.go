// Package verify parses what came from the network: signatures, compression,
// archives. It has no network itself and another user id than fetch.
//
// It is triggered by the marker fetched; it reads incoming/ through intake
// and root's records; it writes verified/<version>/tree, the hint and its
// verdict, and raises requested. Root believes none of it: stage checks
// everything again on a copy.
package verify

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"sluice/internal/bundle"
	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/durable"
	"sluice/internal/intake"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
)

// keepTrees is how many verified trees stay: the one that is asked for, and
// the one before.
const keepTrees = 2

const (
	treeFolder = 0o750 | fs.ModeSetgid
	fileMode   = 0o640
)

// A Verifier verifies what fetch has brought for one component.
type Verifier struct {
	State  record.State
	Log    *slog.Logger
	Status func(format string, args ...any)
}

// Run is one run of the service. It waits for the host's lock until ctx ends.
func (v *Verifier) Run(ctx context.Context) error {
	if _, err := marker.Take(v.State.Root, layout.DataOf, layout.Fetched, string(v.State.Name)); err != nil {
		return err
	}
	lock, err := durable.Acquire(ctx, v.State.Path(layout.VerifyLock))
	if err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	ask, err := v.verify(ctx)
	lock.Release()
	if err != nil || !ask {
		return err
	}
	return marker.Produce(v.State.Root, layout.RequestMark, layout.Requested, string(v.State.Name)) // last, with no lock held
}

// verify reports whether root is to be asked.
func (v *Verifier) verify(ctx context.Context) (bool, error) {
	in, err := intake.OpenFolder(v.State.Path(layout.DataOf))
	if err != nil {
		return false, err
	}
	defer in.Close()
	p, set, err := v.pointer(in)
	if errors.Is(err, fs.ErrNotExist) {
		return false, v.prune("")
	}
	if err != nil {
		return false, err
	}
	conf, err := config.LoadComponent(v.State.Root, v.State.Name)
	if err != nil {
		return false, err
	}
	known := v.State.Decision(&p.Pointer, set, conf.Digest)
	action, why := decide.Pointer(known)
	switch action {
	case decide.Ignore:
		return false, outcome.Refuse(outcome.Replay, "the pointer of %s is older than what this box has seen", p.PromotedAt)
	case decide.Nothing, decide.Wait:
		v.Log.Info("nothing to ask for", "component", v.State.Name, "version", p.Payload.Current.Version, "why", why)
		return false, v.prune("")
	}
	if err := v.prune(p.Payload.Current.Version); err != nil {
		return false, err
	}
	if action == decide.Update {
		if err := v.tree(ctx, in, p, known); err != nil {
			return false, err
		}
	}
	hint := contract.Hint{Schema: contract.One, Version: p.Payload.Current.Version, PromotedAt: p.PromotedAt, Noop: action == decide.Noop, SeenAt: contract.At(time.Now())}
	if err := v.State.Disk.WriteFile(v.State.Path(layout.Hint), hint.Encode(), fileMode); err != nil {
		return false, err
	}
	v.Log.Info("verified", "component", v.State.Name, "version", hint.Version, "promoted_at", hint.PromotedAt, "noop", hint.Noop)
	return true, nil
}

// pointer checks what fetch handed over, by a walk of its own from root's trust.
func (v *Verifier) pointer(in *intake.Folder) (trust.Pointer, trust.Set, error) {
	uid, err := v.State.Root.UID(layout.UserFetch)
	if err != nil {
		return trust.Pointer{}, trust.Set{}, err
	}
	read := func(rel string) ([]byte, error) {
		data, err := in.Read(rel, uid, contract.MaxEnvelope)
		if errors.Is(err, intake.ErrRejected) {
			err = outcome.Refuse(outcome.BadSignature, "%w", err)
		}
		return data, err
	}
	data, err := read(v.rel(layout.Pointer))
	if err != nil {
		return trust.Pointer{}, trust.Set{}, err
	}
	own, err := v.State.Trust()
	if err != nil {
		return trust.Pointer{}, own, err
	}
	set, err := own.Walk(func(n int) ([]byte, error) {
		return read(filepath.Join(v.rel(layout.Incoming), layout.StepName(n)))
	}, nil)
	if err != nil {
		return trust.Pointer{}, set, err
	}
	p, err := CheckPointer(v.State, set, data)
	return p, set, err
}

// rel is a place as seen from the folder that intake walks from.
func (v *Verifier) rel(p layout.Place) string {
	return strings.TrimPrefix(string(p), string(layout.DataOf)+"/")
}

// CheckPointer checks an envelope for the channel of a box.
func CheckPointer(s record.State, set trust.Set, data []byte) (trust.Pointer, error) {
	conf, err := config.LoadComponent(s.Root, s.Name)
	if err != nil {
		return trust.Pointer{}, err
	}
	return set.Pointer(data, s.Name, conf.Channel)
}

// tree makes verified/<version>/tree, unless root has the set or the tree is
// there and checks.
func (v *Verifier) tree(ctx context.Context, in *intake.Folder, p trust.Pointer, known decide.In) error {
	release := p.Payload.Current
	artifact := release.Artifacts[contract.Here()]
	useless := known.Damaged && known.Applied != nil && known.Applied.Version == release.Version
	if _, digest, err := record.Manifest(v.State.Set(release.Version)); err == nil && digest == artifact.ManifestSHA256 && !useless {
		return nil
	}
	tree := v.State.Root.Tree(string(v.State.Name), string(release.Version))
	if checkTree(tree, artifact.ManifestSHA256) == nil {
		return nil
	}
	// First of all, so that fetch does not take it for a tree that is there.
	if err := v.State.Disk.RemoveTree(tree); err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	verdict, err := v.unpack(ctx, in, p, tree)
	verdict.Schema, verdict.Version, verdict.PromotedAt, verdict.Key, verdict.SHA256 = contract.One, release.Version, p.PromotedAt, artifact.Key, artifact.SHA256
	if last, ok, lerr := record.Load[contract.Verdict](v.State, layout.Verdict); ok && lerr == nil && last.Version == verdict.Version && last.PromotedAt.Equal(verdict.PromotedAt.Time) {
		verdict.Attempt = last.Attempt
	}
	verdict.Attempt++
	if err != nil {
		verdict.Reason = contract.Clip(err.Error())
	}
	if werr := v.State.Disk.WriteFile(v.State.Path(layout.Verdict), contract.EncodeRecord(verdict), fileMode); werr != nil {
		return errors.Join(err, werr)
	}
	return err
}

// unpack proves the object and unpacks it under a name that says it is not
// proven; the rename to tree is the proof.
func (v *Verifier) unpack(ctx context.Context, in *intake.Folder, p trust.Pointer, tree string) (contract.Verdict, error) {
	verdict := contract.Verdict{Verdict: "deferred", Warnings: []string{}}
	release := p.Payload.Current
	artifact := release.Artifacts[contract.Here()]
	uid, err := v.State.Root.UID(layout.UserFetch)
	if err != nil {
		return verdict, err
	}
	object, err := in.Open(filepath.Join(v.rel(layout.Incoming), string(release.Version), layout.ObjectName), uid, artifact.Size)
	if err != nil {
		return verdict, outcome.Defer(outcome.DigestMismatch, "%w", err)
	}
	defer object.Close()
	v.Status("%s %s: verifying %d bytes", v.State.Name, release.Version, artifact.Size)
	digest, size, err := record.HashFile(io.LimitReader(object, artifact.Size+1))
	if err != nil {
		return verdict, outcome.Defer(outcome.IO, "%w", err)
	}
	if size != artifact.Size || digest != artifact.SHA256 {
		verdict.Verdict = "bad"
		return verdict, outcome.Defer(outcome.DigestMismatch, "%q is not the object that was signed", object.Name())
	}
	if free, err := durable.Free(v.State.Path(layout.Verified)); err == nil && free < artifact.TarSize {
		return verdict, outcome.Defer(outcome.NoSpace, "%d bytes are free below %q, the tree needs %d", free, v.State.Path(layout.Verified), artifact.TarSize)
	}
	partial := filepath.Join(filepath.Dir(tree), ".tree.partial")
	disk := v.State.Disk
	err = errors.Join(disk.RemoveTree(partial), disk.Mkdir(filepath.Dir(tree), treeFolder), disk.Mkdir(partial, treeFolder))
	if err != nil {
		return verdict, outcome.Defer(outcome.IO, "%w", err)
	}
	if _, err := object.Seek(0, io.SeekStart); err != nil {
		return verdict, err
	}
	m, err := bundle.Unpack(disk, io.LimitReader(object, artifact.Size), partial, artifact, v.State.Name, release.Version)
	if err != nil {
		switch {
		case contract.IsUpgrade(err): // the bundle is good, this build too old for it
			err = outcome.Defer(outcome.UpgradeNeeded, "%w", err)
		case errors.Is(err, bundle.ErrBad):
			verdict.Verdict, err = "bad", outcome.Refuse(outcome.BadBundle, "%w", err)
		default:
			err = outcome.Defer(outcome.IO, "%w", err)
		}
		return verdict, errors.Join(err, disk.RemoveTree(partial))
	}
	verdict.Warnings = bundle.Lint(ctx, partial, m)
	if err := errors.Join(disk.SyncTree(partial), disk.Rename(partial, tree)); err != nil {
		return verdict, outcome.Defer(outcome.IO, "%w", err)
	}
	verdict.Verdict = "good"
	return verdict, nil
}

// checkTree compares a verified tree with its manifest; modes are the set's
// affair.
func checkTree(tree string, want contract.Digest) error {
	m, digest, err := record.Manifest(tree)
	if err != nil {
		return err
	}
	if digest != want {
		return errors.New("another manifest")
	}
	for _, f := range m.Files {
		r, err := os.Open(filepath.Join(tree, filepath.FromSlash(f.Path)))
		if err != nil {
			return err
		}
		digest, size, err := record.HashFile(r)
		r.Close()
		if err != nil || size != f.Size || digest != f.SHA256 {
			return fmt.Errorf("%q has other bytes", f.Path)
		}
	}
	return nil
}

// prune keeps the newest trees, and the one of version keep.
func (v *Verifier) prune(keep contract.Version) error {
	marker.Tidy(v.State.Path(layout.Requested))
	verified := v.State.Path(layout.Verified)
	entries, err := os.ReadDir(verified)
	if err != nil {
		return err
	}
	type aged struct {
		name string
		at   time.Time
	}
	var trees []aged
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.IsDir() && e.Name() != "mark" && e.Name() != string(keep) {
			trees = append(trees, aged{e.Name(), info.ModTime()})
		}
	}
	sort.Slice(trees, func(i, j int) bool { return trees[i].at.After(trees[j].at) })
	if keep != "" {
		trees = append([]aged{{}}, trees...)
	}
	for i, t := range trees {
		if i >= keepTrees {
			if err := v.State.Disk.RemoveTree(filepath.Join(verified, t.name)); err != nil {
				return err
			}
		}
	}
	return nil
}
