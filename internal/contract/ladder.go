// Package contract is every document that is written down: the types, their
// strict decoding and the version check. It does no I/O.
//
// Formats and their history are in docs/contracts.md.
package contract

import (
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

func (s Step) String() string { return fmt.Sprintf("%d.%d", s.Major, s.Minor) }

// Speaks is what a build reads: for each ladder the highest minor of each
// major.
type Speaks map[Ladder][]Step

// Spoken is what this build reads.
var Spoken = Speaks{
	EnvelopeLadder: {{1, 0}}, PointerLadder: {{1, 0}}, ManifestLadder: {{1, 0}}, HintLadder: {{1, 0}},
	HeartbeatLadder: {{1, 0}}, RecordsLadder: {{1, 0}}, TrustLadder: {{1, 0}},
}

// One is the first step of every ladder, which all documents of this build
// are stamped with.
var One = Step{1, 0}

// An UpgradeError says that a document is of a version this build does not
// read. Its word is upgrade-needed.
type UpgradeError struct{ text string }

func (e *UpgradeError) Error() string { return e.text }

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

// probe reads one version member out of anything, for the error that a reader
// needs when strict decoding fails on a newer document.
func probe(data []byte, member string) (Step, bool) {
	members, err := object(data)
	if err != nil {
		return Step{}, false
	}
	var s Step
	if json.Unmarshal(members[member], &s) != nil {
		return Step{}, false
	}
	return s, true
}

// decode reads a document whose version is in member.
func (s Speaks) decode(l Ladder, member string, data []byte, limit int, v any) error {
	if len(data) > limit {
		return fmt.Errorf("reading a %s document: it is over %d bytes", l, limit)
	}
	if found, ok := probe(data, member); ok {
		if err := s.Check(l, found); err != nil {
			return err
		}
	}
	if err := strictDecode(data, v); err != nil {
		return fmt.Errorf("reading a %s document: %w", l, err)
	}
	return nil
}
