// Package bundle is a build as one file: a deterministic tar, compressed with
// zstd, whose first entry is the manifest that vouches for all the others.
package bundle

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"

	"github.com/klauspost/compress/zstd"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/record"
	"sluice/internal/unit"
)

// window bounds what a reader of a bundle must keep in memory.
const window = 8 << 20

// Suffix ends the name of a bundle.
const Suffix = ".tar.zst"

// ErrBad is a bundle that is not what was signed, or breaks its own rules.
var ErrBad = errors.New("bad bundle")

// An Info is what a pointer says of a bundle.
type Info struct {
	Manifest       contract.Manifest
	ManifestSHA256 contract.Digest
	Size           int64 // of the bundle
	SHA256         contract.Digest
	TarSize        int64
}

// Read opens a folder as a build. Its manifest.json says everything but the
// files, which are found; schema and platform may be left out.
func Read(dir string) (contract.Manifest, error) {
	data, err := record.ReadFile(filepath.Join(dir, contract.ManifestName), contract.MaxManifest)
	if err != nil {
		return contract.Manifest{}, err
	}
	m, err := contract.Spoken.DecodeRecipe(data, contract.Here())
	if err != nil {
		return m, fmt.Errorf("%q: %w", filepath.Join(dir, contract.ManifestName), err)
	}
	m.Files = []contract.File{}
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(dir, path)
		if err != nil || e.IsDir() || rel == contract.ManifestName {
			return err
		}
		f, err := readFile(path, filepath.ToSlash(rel), e)
		m.Files = append(m.Files, f)
		return err
	})
	if err != nil {
		return m, err
	}
	sort.Slice(m.Files, func(i, j int) bool { return m.Files[i].Path < m.Files[j].Path })
	if err := m.Check(); err != nil {
		return m, fmt.Errorf("%q: %w", dir, err)
	}
	return m, unit.Check(m, func(path string) ([]byte, error) {
		return record.ReadFile(filepath.Join(dir, filepath.FromSlash(path)), unit.MaxFile)
	})
}

func readFile(path, rel string, e fs.DirEntry) (contract.File, error) {
	if !e.Type().IsRegular() {
		return contract.File{}, fmt.Errorf("%q is no regular file: a bundle holds files and folders only", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return contract.File{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return contract.File{}, err
	}
	mode := contract.Mode(0o644)
	if st.Mode()&0o111 != 0 {
		mode = 0o755
	}
	digest, size, err := record.HashFile(f)
	return contract.File{Path: rel, Mode: mode, Size: size, SHA256: digest}, err
}

// Pack writes the build in dir, as Read found it, to w. progress, if not nil,
// is told of the bytes of the tar that are done.
func Pack(w io.Writer, dir string, m contract.Manifest, progress func(int64)) (Info, error) {
	info := Info{Manifest: m}
	hash := sha256.New()
	out := &counter{w: io.MultiWriter(w, hash)}
	z, err := zstd.NewWriter(out, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithWindowSize(window))
	if err != nil {
		return info, err
	}
	raw := &counter{w: z, progress: progress}
	t := tar.NewWriter(raw)
	manifest := m.Encode()
	info.ManifestSHA256 = record.Sum(manifest)
	if err := add(t, contract.ManifestName, 0o644, int64(len(manifest)), bytes.NewReader(manifest)); err != nil {
		return info, err
	}
	for _, f := range m.Files {
		src, err := os.Open(filepath.Join(dir, filepath.FromSlash(f.Path)))
		if err != nil {
			return info, err
		}
		check := sha256.New()
		err = add(t, f.Path, int64(f.Mode), f.Size, io.TeeReader(src, check))
		src.Close()
		if err == nil && record.Hex(check) != f.SHA256 {
			err = fmt.Errorf("%q changed while it was packed", src.Name())
		}
		if err != nil {
			return info, err
		}
	}
	if err := errors.Join(t.Close(), z.Close()); err != nil {
		return info, err
	}
	info.Size, info.TarSize, info.SHA256 = out.n, raw.n, record.Hex(hash)
	return info, nil
}

func add(t *tar.Writer, name string, mode, size int64, r io.Reader) error {
	if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: size}); err != nil {
		return err
	}
	_, err := io.Copy(t, r)
	return err
}

type counter struct {
	w        io.Writer
	n        int64
	progress func(int64)
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	if c.progress != nil {
		c.progress(c.n)
	}
	return n, err
}

// Inspect reads a bundle that no pointer vouches for, and says what a pointer
// would. It is laid out below dir while it is read.
func Inspect(disk *durable.Disk, r io.Reader, dir string) (Info, error) {
	hash := sha256.New()
	in := &counter{w: io.MultiWriter(hash)}
	z, err := reader(io.TeeReader(r, in))
	if err != nil {
		return Info{}, err
	}
	defer z.Close()
	raw := &io.LimitedReader{R: z, N: contract.MaxUnpacked + 1}
	m, err := unpack(disk, tar.NewReader(raw), dir, "")
	if err != nil {
		return Info{}, err
	}
	if _, err := io.Copy(io.Discard, raw); err != nil {
		return Info{}, fmt.Errorf("%w: %s", ErrBad, err)
	}
	if raw.N == 0 {
		return Info{}, fmt.Errorf("%w: it unpacks to more than %d bytes", ErrBad, contract.MaxUnpacked)
	}
	// What follows the last frame is part of the object.
	if _, err := io.Copy(in, r); err != nil {
		return Info{}, err
	}
	return Info{m, record.Sum(m.Encode()), in.n, record.Hex(hash), contract.MaxUnpacked + 1 - raw.N}, nil
}

// InspectFile is Inspect of a file, in a scratch folder that goes again.
func InspectFile(name string) (Info, error) {
	f, err := os.Open(name)
	if err != nil {
		return Info{}, err
	}
	defer f.Close()
	scratch, err := os.MkdirTemp("", "sluice-inspect-")
	if err != nil {
		return Info{}, err
	}
	defer os.RemoveAll(scratch)
	info, err := Inspect(&durable.Disk{}, f, scratch)
	if err != nil {
		return info, fmt.Errorf("%q: %w", name, err)
	}
	return info, nil
}

func reader(r io.Reader) (*zstd.Decoder, error) {
	return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(window), zstd.WithDecoderMaxMemory(contract.MaxUnpacked+1))
}

// Unpack reads a bundle from r and lays it out below dir, which must be there
// and empty: exactly the files that its manifest lists, whose digest must be
// the one that was signed, and a tar of exactly the signed size. What is
// wrong with the bytes is ErrBad; the caller removes what is half there.
func Unpack(disk *durable.Disk, r io.Reader, dir string, want contract.Artifact, c contract.Component, v contract.Version) (contract.Manifest, error) {
	z, err := reader(r)
	if err != nil {
		return contract.Manifest{}, err
	}
	defer z.Close()
	raw := &io.LimitedReader{R: z, N: want.TarSize + 1}
	m, err := unpack(disk, tar.NewReader(raw), dir, want.ManifestSHA256)
	if err != nil {
		return m, err
	}
	if m.Component != c || m.Version != v {
		return m, fmt.Errorf("%w: it is %s %s, not %s %s", ErrBad, m.Component, m.Version, c, v)
	}
	if m.Platform != contract.Here() {
		return m, fmt.Errorf("%w: it is for platform %s", ErrBad, m.Platform)
	}
	if _, err := io.Copy(io.Discard, raw); err != nil {
		return m, fmt.Errorf("%w: %s", ErrBad, err)
	}
	if raw.N != 1 {
		return m, fmt.Errorf("%w: it does not unpack to the %d bytes that were signed", ErrBad, want.TarSize)
	}
	return m, nil
}

func unpack(disk *durable.Disk, t *tar.Reader, dir string, wantManifest contract.Digest) (contract.Manifest, error) {
	var m contract.Manifest
	h, err := t.Next()
	if err != nil || h.Name != contract.ManifestName || h.Typeflag != tar.TypeReg || h.Size > contract.MaxManifest {
		return m, fmt.Errorf("%w: it does not begin with a manifest: %v", ErrBad, err)
	}
	data, err := io.ReadAll(t)
	if err != nil {
		return m, fmt.Errorf("%w: %s", ErrBad, err)
	}
	if wantManifest != "" && record.Sum(data) != wantManifest {
		return m, fmt.Errorf("%w: its manifest is not the one that was signed", ErrBad)
	}
	if m, err = contract.Spoken.DecodeManifest(data); err == nil && m.Version.Reserved() {
		err = fmt.Errorf("%q is a reserved version", m.Version)
	}
	if err != nil {
		return m, fmt.Errorf("%w: %w", ErrBad, err)
	}
	if err := disk.WriteFile(filepath.Join(dir, contract.ManifestName), data, treeFile); err != nil {
		return m, err
	}
	left := map[string]contract.File{}
	for _, f := range m.Files {
		left[f.Path] = f
	}
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return m, fmt.Errorf("%w: %s", ErrBad, err)
		}
		if h.Typeflag == tar.TypeDir {
			continue // folders are made by what is in them
		}
		f, listed := left[h.Name]
		if !listed {
			return m, fmt.Errorf("%w: %q is not in the manifest, or is there twice", ErrBad, h.Name)
		}
		if h.Typeflag != tar.TypeReg || h.Size != f.Size {
			return m, fmt.Errorf("%w: %q is no file of %d bytes", ErrBad, h.Name, f.Size)
		}
		if err := unpackFile(disk, t, dir, f); err != nil {
			return m, err
		}
		delete(left, h.Name)
	}
	for name := range left {
		return m, fmt.Errorf("%w: %q is missing", ErrBad, name)
	}
	return m, nil
}

// Modes of a verified tree: its files are not run from there.
const (
	treeFile   = 0o640
	treeFolder = 0o750 | fs.ModeSetgid
)

func unpackFile(disk *durable.Disk, r io.Reader, dir string, f contract.File) error {
	path := filepath.Join(dir, filepath.FromSlash(f.Path)) // CheckPath has seen to it that this is below dir
	if err := disk.Mkdir(filepath.Dir(path), treeFolder); err != nil {
		return err
	}
	hash := sha256.New()
	if err := disk.CopyFile(path, io.TeeReader(r, hash), treeFile); err != nil {
		return err
	}
	if record.Hex(hash) != f.SHA256 {
		return fmt.Errorf("%w: %q has other bytes than were signed", ErrBad, f.Path)
	}
	return nil
}
