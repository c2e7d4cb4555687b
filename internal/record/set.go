package record

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/layout"
)

// Sum is the digest of some bytes.
func Sum(data []byte) contract.Digest {
	sum := sha256.Sum256(data)
	return contract.Digest(hex.EncodeToString(sum[:]))
}

// Hex is the digest that a running SHA-256 has come to.
func Hex(h hash.Hash) contract.Digest { return contract.Digest(hex.EncodeToString(h.Sum(nil))) }

// HashFile returns the digest and the size of what r holds.
func HashFile(r io.Reader) (contract.Digest, int64, error) {
	h := sha256.New()
	n, err := io.Copy(h, r)
	return Hex(h), n, err
}

// CheckSet compares every file of a set with its manifest, whose digest must
// be want: bytes, modes, and that nothing else is there.
func CheckSet(set string, want contract.Digest) (contract.Manifest, error) {
	m, digest, err := Manifest(set)
	if err != nil {
		return m, err
	}
	if digest != want {
		return m, fmt.Errorf("%q: its manifest is not the one that was signed", set)
	}
	listed := map[string]bool{contract.ManifestName: true}
	for _, f := range m.Files {
		listed[f.Path] = true
		if err := checkFile(filepath.Join(set, filepath.FromSlash(f.Path)), f); err != nil {
			return m, err
		}
	}
	return m, filepath.WalkDir(set, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if rel, _ := filepath.Rel(set, path); !listed[filepath.ToSlash(rel)] {
			return fmt.Errorf("%q is not in the manifest", path)
		}
		return nil
	})
}

func checkFile(path string, want contract.File) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return fmt.Errorf("%q is no regular file", path)
	case st.Mode().Perm() != fs.FileMode(want.Mode):
		return fmt.Errorf("%q has mode %04o, not %04o", path, st.Mode().Perm(), want.Mode)
	case st.Size() != want.Size:
		return fmt.Errorf("%q has %d bytes, not %d", path, st.Size(), want.Size)
	}
	got, _, err := HashFile(f)
	if err != nil {
		return err
	}
	if got != want.SHA256 {
		return fmt.Errorf("%q has other bytes than were signed", path)
	}
	return nil
}

// The states of what has drifted.
const (
	Damaged = "damaged" // a set, on the disk
	Drifted = "drifted" // not as the good build made it
	Unknown = "unknown" // could not be looked at
)

// MaxDrift is the most that drift.json tells of; a box with more has been
// taken apart, and these say so.
const MaxDrift = 64

// NoteDamage says in drift.json that the good set is damaged, or that it is
// not any more. What else has drifted is still told.
func (s State) NoteDamage(version contract.Version, damage error, at contract.Time) error {
	var others []contract.DriftRef
	if d := Optional[contract.Drift](s, layout.Drift); d != nil {
		for _, r := range d.Refs {
			if r.State != Damaged {
				others = append(others, r)
			}
		}
	}
	return s.NoteDrift(version, damage, others, at)
}

// NoteDrift says in drift.json what is not as the good build made it. Nothing
// to say: there is no such file.
func (s State) NoteDrift(version contract.Version, damage error, refs []contract.DriftRef, at contract.Time) error {
	if damage != nil {
		refs = append([]contract.DriftRef{{Ref: "set:" + string(version), State: Damaged, Text: contract.Clip(damage.Error())}}, refs...)
	}
	if len(refs) == 0 {
		return s.Disk.Remove(s.Path(layout.Drift))
	}
	refs = refs[:min(len(refs), MaxDrift)]
	for i, room := 0, contract.MaxDriftText; i < len(refs); i++ { // a record that is too long could not be read again
		if room -= len(refs[i].Text) + len(refs[i].Ref); room < 0 {
			refs = refs[:i]
		}
	}
	return s.Save(layout.Drift, contract.Drift{Schema: contract.One, At: at, SetDamaged: damage != nil, Refs: refs})
}

// Prune removes every set but those to keep, and what unfinished runs left.
func (s State) Prune(keep ...contract.Version) error {
	entries, err := os.ReadDir(s.Path(layout.Sets))
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for _, v := range keep {
		wanted[string(v)] = true
	}
	var errs []error
	for _, e := range entries {
		if !wanted[e.Name()] && (strings.HasPrefix(e.Name(), ".") || e.IsDir()) {
			errs = append(errs, s.Disk.RemoveTree(s.Set(contract.Version(e.Name()))))
		}
	}
	return errors.Join(errs...)
}
