// Package contract is every document that is written down: the types, their
// strict decoding and the version check. It does no I/O.
//
// Formats and their history are in docs/contracts.md.
package contract

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/go-json-experiment/json"
)

// A Ladder is one series of versions: what one reader parses as a whole.
type Ladder string

// The ladders. Each has its own numbers.
const (
	EnvelopeLadder  Ladder = "envelope"
	PointerLadder   Ladder = "pointer"
	ManifestLadder  Ladder = "manifest"
	HintLadder      Ladder = "hint"
	HeartbeatLadder Ladder = "heartbeat"
	RecordsLadder   Ladder = "records"
	TrustLadder     Ladder = "trust"
)

var ladderForm = regexp.MustCompile(`^[a-z]{1,32}$`)

// UnmarshalText reads the name of a ladder; also of one that this build has not
// heard of.
func (l *Ladder) UnmarshalText(b []byte) error {
	return parse(l, "kind of document", "up to 32 of a to z", string(b), ladderForm.Match(b))
}

// A Step is a place on a ladder: major.minor.
type Step struct{ Major, Minor int }

var stepForm = regexp.MustCompile(`^(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})$`)

// UnmarshalText reads a step.
func (s *Step) UnmarshalText(b []byte) error {
	m := stepForm.FindStringSubmatch(string(b))
	if m == nil {
		return fmt.Errorf("%q is no schema version: it must be like 1.0", clip(string(b)))
	}
	s.Major, _ = strconv.Atoi(m[1])
	s.Minor, _ = strconv.Atoi(m[2])
	return nil
}

// MarshalText writes a step.
func (s Step) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// before reports whether t is a later step than s.
func (s Step) before(t Step) bool {
	return s.Major < t.Major || s.Major == t.Major && s.Minor < t.Minor
}

// Max returns the later of two steps.
func (s Step) Max(t Step) Step {
	if s.before(t) {
		return t
	}
	return s
}

func (s Step) String() string { return fmt.Sprintf("%d.%d", s.Major, s.Minor) }

// Speaks is what a build reads: for each ladder the highest minor of each
// major.
type Speaks map[Ladder][]Step

// Spoken is what this build reads.
var Spoken = Speaks{
	EnvelopeLadder: {{1, 0}}, PointerLadder: {{1, 2}}, ManifestLadder: {{1, 0}}, HintLadder: {{1, 0}},
	HeartbeatLadder: {{1, 0}}, RecordsLadder: {{1, 0}}, TrustLadder: {{1, 0}},
}

// One is the first step of every ladder. A document is stamped with the lowest
// that has all it uses, which for most is this.
var One = Step{1, 0}

// Majors returns the majors that are read of a ladder, the highest first.
func (s Speaks) Majors(l Ladder) []int {
	var out []int
	for _, step := range s[l] {
		out = append(out, step.Major)
	}
	slices.Sort(out)
	slices.Reverse(out)
	return out
}

// An UpgradeError says that a document is of a version this build does not
// read. Its word is upgrade-needed.
type UpgradeError struct{ text string }

func (e *UpgradeError) Error() string { return e.text }

// IsUpgrade reports whether an error is that of a document that this build is too
// old for.
func IsUpgrade(err error) bool {
	var e *UpgradeError
	return errors.As(err, &e)
}

// Check is the version check: it fails closed, and is the same for every
// ladder.
func (s Speaks) Check(l Ladder, found Step) error {
	var majors []string
	for _, step := range s[l] {
		if step.Major != found.Major {
			majors = append(majors, strconv.Itoa(step.Major))
			continue
		}
		if found.Minor > step.Minor {
			return &UpgradeError{fmt.Sprintf("%s %s is newer than this sluice reads (%d.0 to %s): upgrade sluice to read this", l, found, step.Major, step)}
		}
		return nil
	}
	slices.Sort(majors)
	return &UpgradeError{fmt.Sprintf("%s %s: unsupported major (this sluice reads %s)", l, found, strings.Join(majors, ", "))}
}

// probe reads one version member out of anything, by the names on the way to it,
// for the error that a reader needs when strict decoding fails on a newer
// document.
func probe(data []byte, names ...string) (Step, bool) {
	var s Step
	if nesting(data) > maxProbeDepth {
		return s, false
	}
	member, ok := find(data, names...)
	return s, ok && json.Unmarshal(member, &s) == nil
}

// decode reads a document whose version is where the names lead to. It is
// accepted when the version check and the strict decoder both say so, and it uses
// nothing that is newer than the version it says it has.
func (s Speaks) decode(l Ladder, data []byte, limit int, v any, names ...string) error {
	if len(data) > limit {
		return fmt.Errorf("reading a %s document: it is over %d bytes", l, limit)
	}
	stamped, ok := probe(data, names...)
	if ok {
		if err := s.Check(l, stamped); err != nil {
			return err
		}
	}
	uses, err := strictDecode(data, v)
	if err != nil {
		return fmt.Errorf("reading a %s document: %w", l, err)
	}
	if stamped.before(uses.step) {
		return fmt.Errorf("reading a %s document: member %q came with %s %s, the document says that it is %s", l, uses.member, l, uses.step, stamped)
	}
	return nil
}
