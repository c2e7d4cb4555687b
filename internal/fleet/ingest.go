package fleet

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"time"

	"sluice/internal/bundle"
	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
)

// A Plan is a release whose bundles have been looked at, and not yet mirrored.
type Plan struct {
	Component contract.Component
	Release   contract.Release
	Manifest  contract.Step // the newest version of a manifest among the bundles
	files     map[contract.Platform]string
}

// Read looks at bundles of one version, each for another platform.
func Read(files []string, now time.Time) (Plan, error) {
	p := Plan{Release: contract.Release{Artifacts: map[contract.Platform]contract.Artifact{}, Source: "file", ReleasedAt: contract.At(now)}, files: map[contract.Platform]string{}}
	for _, file := range files {
		info, err := bundle.InspectFile(file)
		if err != nil {
			return p, outcome.Refuse(outcome.BadBundle, "%w", err)
		}
		m := info.Manifest
		if p.Component == "" {
			p.Component, p.Release.Version = m.Component, m.Version
		}
		if m.Component != p.Component || m.Version != p.Release.Version {
			return p, outcome.Usage("%q is %s %s, the first bundle is %s %s: one promote is of one version", file, m.Component, m.Version, p.Component, p.Release.Version)
		}
		if other, twice := p.files[m.Platform]; twice {
			return p, outcome.Usage("%q and %q are both for platform %s", other, file, m.Platform)
		}
		p.files[m.Platform] = file
		p.Manifest = p.Manifest.Max(m.Schema)
		p.Release.Artifacts[m.Platform] = contract.Artifact{Key: contract.BootstrapKey(m.Component, m.Version, assetName(m.Component, m.Version, m.Platform)),
			Size: info.Size, SHA256: info.SHA256, TarSize: info.TarSize, ManifestSHA256: info.ManifestSHA256}
	}
	return p, nil
}

// Mirror puts the bundles of a plan into the store. Present and equal:
// skipped; present and different: everything stops, a version is immutable.
// progress is told of the bytes that are done, of all.
func (p Plan) Mirror(ctx context.Context, s store.Store, progress func(done, total int64)) error {
	var done, total int64
	for _, a := range p.Release.Artifacts {
		total += a.Size
	}
	for platform, file := range p.files {
		a := p.Release.Artifacts[platform]
		if err := mirror(ctx, s, file, a, func(n int64) { progress(done+n, total) }); err != nil {
			return err
		}
		done += a.Size
		progress(done, total)
	}
	return nil
}

// mirror puts a bundle into the store, if it is not there.
func mirror(ctx context.Context, s store.Store, file string, a contract.Artifact, progress func(int64)) error {
	same, err := present(ctx, s, a)
	if same || err != nil {
		return err
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = s.Put(ctx, a.Key, &meter{f, 0, progress}, a.Size, store.Condition{IfNone: true})
	return err
}

// present reports whether the store has exactly this artifact.
func present(ctx context.Context, s store.Store, a contract.Artifact) (bool, error) {
	body, err := s.Open(ctx, a.Key, 0)
	if store.IsNotExist(err) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer body.Close()
	digest, size, err := record.HashFile(body)
	if err != nil {
		return false, err
	}
	if size != a.Size || digest != a.SHA256 {
		return false, outcome.Refuse(outcome.Mutated, "%q is in the store with other bytes (%s, these are %s): a version is immutable, release a new one", filepath.Dir(a.Key), digest, a.SHA256)
	}
	return true, nil
}

// meter tells of the bytes that are read.
type meter struct {
	f    io.ReadSeeker
	n    int64
	tell func(int64)
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.f.Read(p)
	m.n += int64(n)
	m.tell(m.n)
	return n, err
}

func (m *meter) Seek(offset int64, whence int) (int64, error) {
	n, err := m.f.Seek(offset, whence)
	m.n = n
	return n, err
}
