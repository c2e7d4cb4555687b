// Package record reads and writes root's records of a component, and keeps
// damaged ones from ever being read as "start afresh".
package record

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/trust"
)

// State is root's state of one component.
type State struct {
	Root layout.Root
	Disk *durable.Disk
	Name contract.Component
}

// Path returns where a place of this component is.
func (s State) Path(p layout.Place) string { return s.Root.Path(p, string(s.Name)) }

// Set returns the folder of a version's set.
func (s State) Set(v contract.Version) string { return s.Root.Set(string(s.Name), string(v)) }

// A DamagedError is a record that can't be read.
type DamagedError struct {
	Path string
	Err  error
}

func (e *DamagedError) Error() string { return fmt.Sprintf("%q is damaged: %s", e.Path, e.Err) }
func (e *DamagedError) Unwrap() error { return e.Err }

// ReadFile reads at most limit bytes of a regular file. It never waits.
func ReadFile(path string, limit int64) ([]byte, error) {
	// O_NONBLOCK: who wrote it may have made it a FIFO, or hold a lease on it.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || !st.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("reading %q: it is no regular file", path))
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("reading %q: it is over %d bytes", path, limit)
	}
	return data, err
}

// Load reads a record. It reports whether there is one; an unreadable one is
// a DamagedError.
func Load[T contract.Record](s State, p layout.Place) (T, bool, error) {
	var v T
	data, err := ReadFile(s.Path(p), contract.MaxRecord)
	if errors.Is(err, fs.ErrNotExist) {
		return v, false, nil
	}
	if err == nil {
		err = contract.Spoken.DecodeRecord(trimPadding(data), &v)
	}
	if err != nil {
		return v, false, &DamagedError{s.Path(p), err}
	}
	return v, true, nil
}

// Optional is Load for who can do without: a record that is not there, or that
// root has to repair, is nil.
func Optional[T contract.Record](s State, p layout.Place) *T {
	v, ok, err := Load[T](s, p)
	if !ok || err != nil {
		return nil
	}
	return &v
}

// DiskWord is the word of an error that the disk is to blame for, which says
// nothing about the build; otherwise, for any other.
func DiskWord(err error, otherwise outcome.Word) outcome.Word {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return outcome.NoSpace
	case errors.Is(err, unix.EIO), errors.Is(err, unix.EROFS):
		return outcome.IO
	}
	return otherwise
}

// Records are root's records of a component, but for the trust documents.
var Records = []layout.Place{layout.Seen, layout.Applied, layout.Result, layout.StagedRecord, layout.Versions, layout.Journal, layout.Drift, layout.Trial}

// Components returns the components that root has state of, on this box.
func Components(root layout.Root) ([]contract.Component, error) {
	entries, err := os.ReadDir(root.Path(layout.Opt, ""))
	if err != nil {
		return nil, err
	}
	var out []contract.Component
	for _, e := range entries {
		if name, err := contract.Parse[contract.Component](e.Name()); err == nil && e.IsDir() {
			out = append(out, name)
		}
	}
	return out, nil
}

// Readable says which record of a box is of a version that who speaks so can't
// read. Damage is no affair of versions.
func Readable(root layout.Root, speaks contract.Speaks) error {
	names, err := Components(root)
	if err != nil {
		return err
	}
	for _, name := range names {
		state := State{Root: root, Name: name}
		for _, place := range Records {
			data, err := ReadFile(state.Path(place), contract.MaxRecord)
			if err != nil {
				continue
			}
			if err := speaks.CheckRecord(trimPadding(data)); err != nil {
				return fmt.Errorf("%q: %w", state.Path(place), err)
			}
		}
	}
	return nil
}

// RecoverCommand is what the owner of a box runs when recovery is stuck.
func (s State) RecoverCommand() string {
	return fmt.Sprintf("%s/bin/recover -component %s", layout.Root("/").Path(layout.Good, layout.Pipeline), s.Name)
}

// EndTrial ends the trial of a self-update, well or not. The record goes first:
// it decides.
func (s State) EndTrial() error {
	return errors.Join(s.Disk.Remove(s.Path(layout.Trial)), s.Disk.Remove(s.Path(layout.Prior)))
}

// Decision gathers what this box knows for deciding what a pointer means, which
// was checked by set: root's, or one that was walked to from there.
func (s State) Decision(p *contract.Pointer, set trust.Set, config contract.Digest) decide.In {
	drift, seen := Optional[contract.Drift](s, layout.Drift), Optional[contract.Seen](s, layout.Seen)
	if seen != nil {
		*seen = set.Counting(*seen)
	}
	own, err := s.Trust()
	return decide.In{Damaged: drift != nil && drift.SetDamaged, Pointer: p, Platform: contract.Here(), Config: config, Ahead: err == nil && set.Number > own.Number, Seen: seen, Applied: Optional[contract.Applied](s, layout.Applied),
		Result: Optional[contract.Result](s, layout.Result), Journal: Optional[contract.Journal](s, layout.Journal), Trial: Optional[contract.Trial](s, layout.Trial)}
}

// LoadOrQuarantine is Load for root: a damaged record is moved aside under a
// name that says so and told to report, and then there is none.
func LoadOrQuarantine[T contract.Record](s State, p layout.Place, report func(error)) (T, bool, error) {
	v, ok, err := Load[T](s, p)
	var damaged *DamagedError
	if !errors.As(err, &damaged) {
		return v, ok, err
	}
	to := aside(damaged.Path)
	if err := s.Disk.Rename(damaged.Path, to); err != nil {
		return v, false, err
	}
	report(fmt.Errorf("%w: moved to %q", damaged, filepath.Base(to)))
	var none T
	return none, false, nil
}

// aside is where a damaged record is kept, under a name that says so.
func aside(path string) string {
	return path + ".damaged-" + strconv.FormatInt(time.Now().UnixNano(), 10)
}

// Save writes a record durably, readable by all.
func (s State) Save(p layout.Place, r contract.Record) error {
	if st, err := os.Lstat(s.Path(p)); err == nil && st.IsDir() { // no record: nobody wrote it by us
		if err := s.Disk.Rename(s.Path(p), aside(s.Path(p))); err != nil {
			return err
		}
	}
	if err := s.Disk.WriteFile(s.Path(p), contract.EncodeRecord(r), 0o644); err != nil {
		return fmt.Errorf("recording %q: %w", s.Path(p), err)
	}
	return nil
}

const sinceThen = "; since then deferred, "

// Conclude writes result.json: how a promote ended here. Attempts are counted
// by kind: what was deferred before takes no try from what is interrupted.
func (s State) Conclude(r contract.Result) error {
	r.Schema, r.Reason, r.Attempt = contract.One, contract.Clip(r.Reason), s.NextAttempt(r.Tuple, r.Outcome)
	// A roll that was cut, and then waits for something, is still the one that
	// was cut so often: a build that takes the machine down with it would be
	// tried for ever if a deferral forgot that.
	if last := Optional[contract.Result](s, layout.Result); last != nil && r.Outcome == outcome.Deferred && last.Tuple.Equal(r.Tuple) && last.Outcome == outcome.RolledBack {
		before, _, _ := strings.Cut(last.Reason, sinceThen)
		r.Outcome, r.Attempt, r.Reason = last.Outcome, last.Attempt, contract.Clip(before+sinceThen+r.Reason)
	}
	return s.Save(layout.Result, r)
}

// NextAttempt is the number that the next result of a promote will bear, if it
// has this outcome.
func (s State) NextAttempt(t contract.Tuple, o outcome.Outcome) int {
	if last := Optional[contract.Result](s, layout.Result); last != nil && last.Tuple.Equal(t) && last.Outcome == o {
		return last.Attempt + 1
	}
	return 1
}

// journalSize is one block: a journal is rewritten in place of one of the
// same size, so going back needs no new room.
const journalSize = 4096

// SaveJournal writes the open transaction, padded to one block, before what it
// tells of happens (I1).
func (s State) SaveJournal(j contract.Journal) error {
	data := contract.EncodeRecord(j)
	if pad := journalSize - len(data); pad > 0 {
		data = append(data, strings.Repeat(" ", pad-1)+"\n"...)
	}
	if err := s.Disk.WriteFile(s.Path(layout.Journal), data, 0o644); err != nil {
		return fmt.Errorf("writing the journal %q: %w", s.Path(layout.Journal), err)
	}
	return nil
}

func trimPadding(data []byte) []byte {
	return []byte(strings.TrimRight(string(data), " \n"))
}

// Open reports whether a transaction is open. A disk that can't tell counts as
// yes: who goes on from there reads the journal, and says what is wrong.
func (s State) Open() bool {
	_, err := os.Lstat(s.Path(layout.Journal))
	return !errors.Is(err, fs.ErrNotExist)
}

// TrustNumber is the number of the newest document that root has accepted, whether
// it can be read or not; 0 if there is none.
func (s State) TrustNumber() int {
	newest := 0
	entries, _ := os.ReadDir(s.Path(layout.Trust))
	for _, e := range entries {
		if stem, ok := strings.CutSuffix(e.Name(), ".json"); ok {
			if n, err := strconv.Atoi(stem); err == nil {
				newest = max(newest, n)
			}
		}
	}
	return newest
}

// Trust returns the trust in force: the newest document that root has
// accepted.
func (s State) Trust() (trust.Set, error) {
	newest := s.TrustNumber()
	if newest == 0 {
		return trust.Set{}, outcome.Config("this box trusts nobody for component %q yet: enroll it", s.Name)
	}
	data, err := ReadFile(s.Root.TrustFile(string(s.Name), newest), contract.MaxEnvelope)
	if err != nil {
		return trust.Set{}, err
	}
	set, err := trust.Accepted(data)
	if contract.IsUpgrade(err) {
		return set, fmt.Errorf("trust document %d of component %q: %w", newest, s.Name, err)
	}
	if err != nil {
		return set, outcome.Config("trust document %d of component %q is damaged on this box: enroll it again: %w", newest, s.Name, err)
	}
	return set, nil
}

// Manifest reads the manifest of a set, and its digest.
func Manifest(set string) (contract.Manifest, contract.Digest, error) {
	data, err := ReadFile(filepath.Join(set, contract.ManifestName), contract.MaxManifest)
	if err != nil {
		return contract.Manifest{}, "", err
	}
	m, err := contract.Spoken.DecodeManifest(data)
	return m, Sum(data), err
}
