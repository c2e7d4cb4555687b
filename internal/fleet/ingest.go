package fleet

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"sluice/internal/bundle"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
)

// Ingest mirrors bundles of one version, each for another platform, and
// returns the release that they are. Present and equal: skipped; present and
// different: everything stops, a version is immutable. progress is told of
// the bytes that are done, of all.
func Ingest(ctx context.Context, s store.Store, files []string, now time.Time, progress func(done, total int64)) (contract.Component, contract.Release, error) {
	r := contract.Release{Artifacts: map[contract.Platform]contract.Artifact{}, Source: "file", ReleasedAt: contract.At(now)}
	var c contract.Component
	var total, done int64
	infos := map[string]bundle.Info{}
	for _, file := range files {
		info, err := Inspect(file)
		if err != nil {
			return c, r, err
		}
		m := info.Manifest
		if c == "" {
			c, r.Version = m.Component, m.Version
		}
		if m.Component != c || m.Version != r.Version {
			return c, r, outcome.Usage("%q is %s %s, the first bundle is %s %s: one promote is of one version", file, m.Component, m.Version, c, r.Version)
		}
		if _, twice := r.Artifacts[m.Platform]; twice {
			return c, r, outcome.Usage("%q is a second bundle for platform %s", file, m.Platform)
		}
		r.Artifacts[m.Platform] = contract.Artifact{Key: contract.BootstrapKey(c, r.Version, fmt.Sprintf("%s_%s_%s%s", c, r.Version, m.Platform, bundle.Suffix)),
			Size: info.Size, SHA256: info.SHA256, TarSize: info.TarSize, ManifestSHA256: info.ManifestSHA256}
		infos[file], total = info, total+info.Size
	}
	for _, file := range files {
		a := r.Artifacts[infos[file].Manifest.Platform]
		if err := mirror(ctx, s, file, a, func(n int64) { progress(done+n, total) }); err != nil {
			return c, r, err
		}
		done += a.Size
		progress(done, total)
	}
	return c, r, nil
}

// Inspect reads a bundle file whole, in a scratch folder.
func Inspect(file string) (bundle.Info, error) {
	f, err := os.Open(file)
	if err != nil {
		return bundle.Info{}, err
	}
	defer f.Close()
	scratch, err := os.MkdirTemp("", "sluice-inspect-")
	if err != nil {
		return bundle.Info{}, err
	}
	defer os.RemoveAll(scratch)
	info, err := bundle.Inspect(&durable.Disk{}, f, scratch)
	if err != nil {
		return info, fmt.Errorf("%q: %w", file, err)
	}
	return info, nil
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
