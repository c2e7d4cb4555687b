package outcome

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"
)

func TestTerminal(t *testing.T) {
	for _, c := range []struct {
		outcome Outcome
		word    Word
		attempt int
		want    bool
	}{
		{Applied, "", 1, false}, {Noted, "", 1, false},
		{Deferred, Needs, 99, false},
		{Refused, VersionLie, 1, true}, {Refused, ForeignFile, 1, true},
		{RolledBack, Gate, 1, true}, {RolledBack, Soak, 1, true}, {RolledBack, Converge, 1, true},
		{RolledBack, Interrupted, 1, false}, {RolledBack, Interrupted, 2, false}, {RolledBack, Interrupted, 3, true},
		{RolledBack, NoSpace, 2, false}, {RolledBack, IO, 3, true},
		{RollbackFailed, Gate, 1, true},
	} {
		if got := Terminal(c.outcome, c.word, c.attempt); got != c.want {
			t.Errorf("Terminal(%s, %s, %d) = %v", c.outcome, c.word, c.attempt, got)
		}
	}
}

func TestExit(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0}, {errors.New("x"), 1}, {Usage("x"), 2}, {Config("x"), 78},
		{fmt.Errorf("ctx: %w", Defer(Store, "x")), 69}, {Refuse(Replay, "x"), 1}, {Rollback(Gate, "x"), 1},
	} {
		if got := Exit(c.err); got != c.want {
			t.Errorf("Exit(%v) = %d, want %d", c.err, got, c.want)
		}
	}
}

func TestReason(t *testing.T) {
	err := Refuse(ForeignFile, "%q is not ours: %w", "/etc/x", fs.ErrExist)
	if got := err.Error(); got != `foreign-file: "/etc/x" is not ours: file already exists` {
		t.Error(got)
	}
	if !errors.Is(err, fs.ErrExist) {
		t.Error("the cause is lost")
	}
}
