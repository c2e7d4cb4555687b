// Package outcome is the table of how things end: the outcome of a promote on
// a box, the stable words that reasons start with, and the exit statuses of
// every program. It does no I/O.
package outcome

import (
	"errors"
	"fmt"
)

// An Outcome is how a promote ended on a box.
type Outcome string

// The outcomes.
const (
	Applied        Outcome = "applied"         // the box runs it
	Noted          Outcome = "noted"           // the box ran it already; only the watermark moved
	Deferred       Outcome = "deferred"        // not now; tried again by itself
	Refused        Outcome = "refused"         // never, for this promote
	RolledBack     Outcome = "rolled-back"     // tried; the good build is back
	RollbackFailed Outcome = "rollback-failed" // tried; the good build is back and does not pass its gate either
)

// A Word is what a reason starts with: stable, so that people and programs
// can look for it.
type Word string

// The words.
const (
	StaleHint      Word = "stale-hint"      // the hint is older than the pointer
	BadHint        Word = "bad-hint"        // not a hint; only logged, it could be anybody's
	BadSignature   Word = "bad-signature"   // no trusted key signed it
	WrongChannel   Word = "wrong-channel"   // signed, for another channel
	WrongComponent Word = "wrong-component" // signed, for another component
	Replay         Word = "replay"          // older than the watermark
	Expired        Word = "expired"         // nobody has refreshed it in time
	UpgradeNeeded  Word = "upgrade-needed"  // of a version this build does not read
	NoArtifact     Word = "no-artifact"     // nothing for this platform
	DigestMismatch Word = "digest-mismatch" // other bytes than were signed
	BadBundle      Word = "bad-bundle"      // the signed bytes break their own rules
	VersionLie     Word = "version-lie"     // the program does not say the version it is
	ForeignFile    Word = "foreign-file"    // something stands where it would go that is not Sluice's
	Needs          Word = "needs"           // another component must be there first
	Mutated        Word = "mutated"         // a known version with other bytes
	BadGoodSet     Word = "bad-good-set"    // the build to go back to is damaged
	NoSpace        Word = "no-space"        // the disk is too full
	IO             Word = "io"              // the disk failed
	Store          Word = "store"           // the store could not be read
	Converge       Word = "converge"        // a change to the box failed
	Gate           Word = "gate"            // it did not come up
	Soak           Word = "soak"            // it did not stay up
	Arm            Word = "arm"             // it runs, but something of it could not be enabled
	Late           Word = "late"            // boxes have not ended a promote in time; only the command says it
	Configuration  Word = "config"          // the box's own configuration is wrong
	Interrupted    Word = "interrupted"     // the roll was cut; says nothing about the build
)

// MaxAttempts is how often a promote is tried that was rolled back for a
// reason that says nothing about the build.
const MaxAttempts = 3

// Terminal reports whether an outcome for exactly one (channel, version,
// promoted_at) says that this promote is not to be tried again. foreign-file
// is terminal only until the component's configuration changes; who knows
// that asks for it itself.
func Terminal(o Outcome, w Word, attempt int) bool {
	switch o {
	case Refused, RollbackFailed:
		return true
	case RolledBack:
		switch w {
		case Interrupted, NoSpace, IO:
			return attempt >= MaxAttempts
		}
		return true
	}
	return false
}

// Exit statuses of all programs.
const (
	ExitDone     = 0  // done; also nothing to do, noted
	ExitFailed   = 1  // failed, refused or rolled back
	ExitUsage    = 2  // the command line is wrong
	ExitDeferred = 69 // may resolve by itself
	ExitConfig   = 78 // the configuration is wrong; waiting will not help
)

// An Error is an end that has an outcome and a word.
type Error struct {
	Outcome Outcome
	Word    Word
	Err     error // what happened, to what, and what the reader can do
}

func (e *Error) Error() string { return e.Reason() }
func (e *Error) Unwrap() error { return e.Err }

// Reason is the word and then prose, as result.json has it.
func (e *Error) Reason() string { return string(e.Word) + ": " + e.Err.Error() }

// Defer returns an Error that says: not now.
func Defer(w Word, format string, args ...any) error {
	return &Error{Deferred, w, fmt.Errorf(format, args...)}
}

// Refuse returns an Error that says: never, for this promote.
func Refuse(w Word, format string, args ...any) error {
	return &Error{Refused, w, fmt.Errorf(format, args...)}
}

// Rollback returns an Error that says: tried, and it did not do.
func Rollback(w Word, format string, args ...any) error {
	return &Error{RolledBack, w, fmt.Errorf(format, args...)}
}

// A ConfigError is a configuration that waiting will not mend.
type ConfigError struct{ Err error }

func (e *ConfigError) Error() string { return e.Err.Error() }
func (e *ConfigError) Unwrap() error { return e.Err }

// Config returns a ConfigError.
func Config(format string, args ...any) error { return &ConfigError{fmt.Errorf(format, args...)} }

// A UsageError is a command line that is wrong.
type UsageError struct{ Err error }

func (e *UsageError) Error() string { return e.Err.Error() }
func (e *UsageError) Unwrap() error { return e.Err }

// Usage returns a UsageError.
func Usage(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// Exit returns the exit status that err ends a program with.
func Exit(err error) int {
	var e *Error
	var c *ConfigError
	var u *UsageError
	switch {
	case err == nil:
		return ExitDone
	case errors.As(err, &u):
		return ExitUsage
	case errors.As(err, &c):
		return ExitConfig
	case errors.As(err, &e):
		switch e.Outcome {
		case Applied, Noted:
			return ExitDone
		case Deferred:
			return ExitDeferred
		}
	}
	return ExitFailed
}
