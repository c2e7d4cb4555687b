package stage

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/intake"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
	"sluice/internal/unit"
)

var errNoted = &outcome.Error{Outcome: outcome.Noted, Err: errors.New("runs already")}

// onDisk is an end that root's own disk is to blame for, or something on it.
func onDisk(err error) error {
	return outcome.Defer(record.DiskWord(err, outcome.IO), "%w", err)
}

// accept brings a verified promote to sets/ and staged.json. It reports
// whether apply is to run; an outcome.Error says how the promote ended.
func (s *Stager) accept(data *intake.Folder, p trust.Pointer, hint contract.Hint) (bool, error) {
	artifact, ok := p.Payload.Current.Artifacts[contract.Here()]
	if !ok {
		return false, outcome.Refuse(outcome.NoArtifact, "%s has nothing for platform %s", p.Payload.Current.Version, contract.Here())
	}
	build := contract.Build{Tuple: p.Tuple(), ManifestSHA256: artifact.ManifestSHA256}
	applied, has, err := record.LoadOrQuarantine[contract.Applied](s.State, layout.Applied, s.report)
	if err != nil {
		return false, err
	}
	noop := has && applied.Same(build)
	if noop {
		_, damage := record.CheckSet(s.State.Set(build.Version), build.ManifestSHA256)
		if !s.DryRun {
			if err := s.State.NoteDamage(build.Version, damage, contract.At(time.Now())); err != nil {
				return false, onDisk(err)
			}
		}
		switch {
		case damage == nil:
			return false, errNoted
		case hint.Noop: // what it is made from is not here; fetch brings it, now that it can know
			return false, outcome.Defer(outcome.BadGoodSet, "%s runs already, and its set is damaged: %w", build.Version, damage)
		}
	} else if hint.Noop {
		return false, outcome.Defer(outcome.StaleHint, "the hint says that %s runs already, root's records do not", build.Version)
	}
	if err := s.remember(p, build, applied); err != nil {
		return false, err
	}
	partial := s.State.Root.PartialSet(string(s.State.Name), string(build.Version))
	if s.DryRun {
		if partial, err = os.MkdirTemp("", "sluice-dry-run-"); err != nil {
			return false, err
		}
		defer os.RemoveAll(partial)
	}
	set := s.State.Set(build.Version)
	if m, err := record.CheckSet(set, build.ManifestSHA256); err == nil {
		if err := s.admit(m); err != nil {
			return false, err
		}
		return s.finish(build, set, m)
	}
	// Damaged, or not there. Nobody uses it: it goes before anything else, so
	// that fetch does not take it for the set and brings what it is made from.
	if !s.inUse(set) && !s.DryRun {
		if err := s.State.Disk.RemoveTree(set); err != nil {
			return false, onDisk(err)
		}
	}
	m, err := s.copy(data, build, partial)
	if err == nil {
		err = s.admit(m)
	}
	if err != nil {
		return false, errors.Join(err, s.State.Disk.RemoveTree(partial))
	}
	if s.DryRun {
		return s.finish(build, partial, m)
	}
	if err := s.name(partial, set); err != nil {
		return false, onDisk(err)
	}
	if noop { // mended
		if err := s.State.NoteDamage(build.Version, nil, contract.At(time.Now())); err != nil {
			return false, onDisk(err)
		}
		return false, errNoted
	}
	return s.finish(build, set, m)
}

// see moves the watermark forward, and never back (I5), but for what no longer
// counts. The same promote may be vouched for anew, after the trust has moved.
func (s *Stager) see(p trust.Pointer, seen contract.Seen) error {
	last, known := seen.Channels[p.Channel]
	if known && last.PromotedAt.Equal(p.PromotedAt.Time) && last.Trust == p.Water().Trust || s.DryRun {
		return nil
	}
	seen.Channels[p.Channel] = p.Water()
	return s.State.Save(layout.Seen, seen)
}

// remember holds a version to the bytes it had when it was first seen here.
func (s *Stager) remember(p trust.Pointer, b contract.Build, applied contract.Applied) error {
	versions, ok, err := record.LoadOrQuarantine[contract.Versions](s.State, layout.Versions, s.report)
	if err != nil {
		return err
	}
	if !ok {
		versions = contract.Versions{Schema: contract.One, Versions: contract.VersionLog{}}
	}
	known, had := versions.Versions.Find(b.Version)
	if _, digest, err := record.Manifest(s.State.Set(b.Version)); err == nil && !had {
		known, had = digest, true
	}
	if had && known != b.ManifestSHA256 {
		return outcome.Refuse(outcome.Mutated, "%s was here before with other bytes (manifest %s, now %s): a version is immutable, release a new one", b.Version, known, b.ManifestSHA256)
	}
	if had || s.DryRun {
		return nil
	}
	versions.Versions = versions.Versions.With(b.Version, b.ManifestSHA256, func(v contract.Version) bool {
		return v == applied.Version || slices.ContainsFunc(p.Payload.History, func(r contract.Release) bool { return r.Version == v })
	})
	return s.State.Save(layout.Versions, versions)
}

// admit checks what the build needs of this box: other components at their
// versions, and, if it is a pipeline, records that it can read.
func (s *Stager) admit(m contract.Manifest) error {
	if m.Component == layout.Pipeline {
		reads, ok := m.Reads[contract.RecordsLadder]
		if !ok {
			reads = contract.One // which every pipeline reads
		}
		if err := record.Readable(s.State.Root, contract.Speaks{contract.RecordsLadder: {reads}}); err != nil {
			return outcome.Defer(outcome.UpgradeNeeded, "%s %s reads records up to %s, and this box has newer ones: %w", m.Component, m.Version, reads, err)
		}
	}
	for name, version := range m.Needs {
		other := record.State{Root: s.State.Root, Disk: s.State.Disk, Name: name}
		a, ok, err := record.Load[contract.Applied](other, layout.Applied)
		if err != nil || !ok || a.Version != version {
			return outcome.Defer(outcome.Needs, "%s %s needs %s %s, which this box does not run", m.Component, m.Version, name, version)
		}
	}
	return nil
}

// name gives a finished set its name. A damaged set that runs is exchanged in
// one step.
func (s *Stager) name(partial, set string) error {
	disk := s.State.Disk
	if _, err := os.Lstat(set); err == nil && s.inUse(set) {
		return errors.Join(disk.Exchange(partial, set), disk.RemoveTree(partial))
	}
	return disk.Rename(partial, set)
}

// inUse reports whether a set is one that runs, or is gone back to.
func (s *Stager) inUse(set string) bool {
	for _, link := range []layout.Place{layout.Current, layout.Good, layout.Prior} {
		if target, err := os.Readlink(s.State.Path(link)); err == nil && filepath.Base(target) == filepath.Base(set) {
			return true
		}
	}
	return false
}

// finish says what apply may converge to.
func (s *Stager) finish(b contract.Build, set string, m contract.Manifest) (bool, error) {
	if s.DryRun {
		return false, s.Plan(set, m)
	}
	last := record.Optional[contract.Staged](s.State, layout.StagedRecord)
	if err := s.State.Save(layout.StagedRecord, contract.Staged{Schema: contract.One, Build: b}); err != nil {
		return false, err
	}
	// What was staged before and never became good is in nobody's way any more:
	// without this every promote that is overtaken would leave its set.
	if last != nil && last.Version != b.Version && !s.inUse(s.State.Set(last.Version)) {
		if err := s.State.Disk.RemoveTree(s.State.Set(last.Version)); err != nil {
			s.Log.Warn(fmt.Sprintf("removing a set that was overtaken: %s, ignoring", err), "component", s.State.Name)
		}
	}
	s.Log.Info("staged", "component", s.State.Name, "version", b.Version, "promoted_at", b.PromotedAt)
	return true, nil
}

// copy copies a verified tree into a set that only root can reach, and trusts
// the copy. Bytes that are wrong say nothing about the release.
func (s *Stager) copy(data *intake.Folder, b contract.Build, partial string) (contract.Manifest, error) {
	uid, err := s.State.Root.UID(layout.UserVerify)
	if err != nil {
		return contract.Manifest{}, err
	}
	tree := filepath.Join("verified", string(b.Version), "tree")
	m, err := Copy(s.State.Disk, data, tree, uid, b, partial, s.Status)
	if err == nil && m.Component != s.State.Name {
		err = outcome.Refuse(outcome.BadBundle, "it is a bundle of %s", m.Component)
	}
	return m, err
}

// Copy copies the tree that stands at rel below a folder, whose files belong
// to uid, to partial: the manifest first, then each file that it lists. Every
// digest is taken of the copy.
func Copy(disk *durable.Disk, from *intake.Folder, rel string, uid int, b contract.Build, partial string, status func(string, ...any)) (contract.Manifest, error) {
	raw, err := from.Read(filepath.Join(rel, contract.ManifestName), uid, contract.MaxManifest)
	if err != nil {
		return contract.Manifest{}, outcome.Defer(outcome.DigestMismatch, "%w", err)
	}
	if record.Sum(raw) != b.ManifestSHA256 {
		return contract.Manifest{}, outcome.Defer(outcome.DigestMismatch, "the manifest in %q is not the one that was signed", rel)
	}
	m, err := contract.Spoken.DecodeManifest(raw)
	if contract.IsUpgrade(err) {
		return m, outcome.Defer(outcome.UpgradeNeeded, "%w", err)
	}
	if err != nil {
		return m, outcome.Refuse(outcome.BadBundle, "%w", err)
	}
	if m.Version != b.Version || m.Platform != contract.Here() {
		return m, outcome.Refuse(outcome.BadBundle, "the manifest is that of %s for %s", m.Version, m.Platform)
	}
	// Room for the set, and for one more of its size: what is written beside it.
	if free, err := durable.Free(filepath.Dir(partial)); err != nil || free < 2*m.Size() {
		return m, outcome.Defer(outcome.NoSpace, "%d bytes are free below %q, %s needs twice its %d", free, filepath.Dir(partial), b.Version, m.Size())
	}
	if err := errors.Join(disk.RemoveTree(partial), disk.Mkdir(partial, 0o755), disk.WriteFile(filepath.Join(partial, contract.ManifestName), raw, 0o644)); err != nil {
		return m, onDisk(err)
	}
	var done int64
	for _, f := range m.Files {
		if err := copyFile(disk, from, filepath.Join(rel, f.Path), uid, f, filepath.Join(partial, filepath.FromSlash(f.Path))); err != nil {
			return m, err
		}
		done += f.Size
		status("%s %s: staging, %d of %d bytes", m.Component, m.Version, done, m.Size())
	}
	if err := disk.SyncTree(partial); err != nil {
		return m, onDisk(err)
	}
	err = unit.Check(m, func(path string) ([]byte, error) {
		return record.ReadFile(filepath.Join(partial, filepath.FromSlash(path)), unit.MaxFile)
	})
	if err != nil {
		return m, outcome.Refuse(outcome.BadBundle, "%w", err)
	}
	return m, nil
}

// copyFile copies one file while it is hashed. The copy has its name and mode
// only once it is proven.
func copyFile(disk *durable.Disk, from *intake.Folder, rel string, uid int, f contract.File, to string) error {
	in, err := from.Open(rel, uid, f.Size)
	if err != nil {
		return outcome.Defer(outcome.DigestMismatch, "%w", err)
	}
	defer in.Close()
	if err := disk.Mkdir(filepath.Dir(to), 0o755); err != nil {
		return onDisk(err)
	}
	temp, err := disk.Create(to, 0o600)
	if err != nil {
		return onDisk(err)
	}
	hash := sha256.New()
	n, err := io.Copy(io.MultiWriter(temp, hash), io.LimitReader(in, f.Size+1))
	if err != nil {
		return onDisk(fmt.Errorf("copying %q: %w", rel, errors.Join(err, temp.Abandon())))
	}
	if n != f.Size || record.Hex(hash) != f.SHA256 {
		return errors.Join(outcome.Defer(outcome.DigestMismatch, "%q has other bytes than were signed", rel), temp.Abandon())
	}
	if err := temp.Chmod(fs.FileMode(f.Mode)); err != nil {
		return onDisk(errors.Join(err, temp.Abandon()))
	}
	if err := temp.Commit(); err != nil {
		return onDisk(err)
	}
	return nil
}
