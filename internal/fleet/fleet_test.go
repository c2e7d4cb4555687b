package fleet

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
)

var key = ed25519.NewKeyFromSeed(bytes.Repeat([]byte{1}, 32))

func open(t *testing.T, wrap func(store.Store) store.Store) *Operator {
	t.Helper()
	s, err := store.Open("file://" + t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Init(context.Background(), s, key, "", map[contract.Component]contract.Channel{"sluice": "stable"}, time.Now()); err != nil {
		t.Fatal(err)
	}
	if wrap != nil {
		s = wrap(s)
	}
	o, err := NewOperator(context.Background(), s, key)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func release(v contract.Version) contract.Release {
	return contract.Release{Version: v, Artifacts: map[contract.Platform]contract.Artifact{}, Source: "file", ReleasedAt: contract.At(time.Unix(1, 0))}
}

func history(p contract.Pointer) string {
	var s []string
	for _, r := range append([]contract.Release{p.Payload.Current}, p.Payload.History...) {
		s = append(s, string(r.Version))
	}
	return strings.Join(s, " ")
}

func TestPromoteAndRollback(t *testing.T) {
	o := open(t, nil)
	ctx := context.Background()
	var last contract.Pointer
	for _, c := range []struct{ promote, want string }{{"1", "1"}, {"2", "2 1"}, {"2", "2 1"}, {"3", "3 2 1"}, {"", "2 1"}, {"", "1"}} {
		var p contract.Pointer
		var err error
		if c.promote != "" {
			p, err = o.Promote(ctx, "edge", "stable", Promotion{Release: release(contract.Version(c.promote))})
		} else {
			p, err = o.Rollback(ctx, "edge", "stable")
		}
		if err != nil || history(p) != c.want {
			t.Errorf("%q: %q, want %q; %v", c.promote, history(p), c.want, err)
		}
		if !p.PromotedAt.After(last.PromotedAt.Time) {
			t.Errorf("%s is not after %s", p.PromotedAt, last.PromotedAt)
		}
		last = p
	}
	if _, err := o.Rollback(ctx, "edge", "stable"); outcome.Exit(err) != outcome.ExitFailed || !strings.Contains(err.Error(), "nothing to go back to") {
		t.Error(err)
	}
}

// A clock that went back makes no promote that boxes take for a replay.
func TestClockThatWentBack(t *testing.T) {
	o := open(t, nil)
	first, err := o.Promote(context.Background(), "edge", "stable", Promotion{Release: release("1")})
	if err != nil {
		t.Fatal(err)
	}
	o.Now = func() time.Time { return time.Unix(0, 0) }
	second, err := o.Promote(context.Background(), "edge", "stable", Promotion{Release: release("2")})
	if err != nil || second.PromotedAt.Sub(first.PromotedAt.Time) != time.Nanosecond {
		t.Errorf("%s after %s, %v", second.PromotedAt, first.PromotedAt, err)
	}
}

// lossy writes a pointer and loses the answer, as a cut connection does.
type lossy struct {
	store.Store
	answer error
	before bool // it is lost on the way there
}

func (l *lossy) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond store.Condition) (string, error) {
	answer := l.answer
	if !strings.HasPrefix(key, "control/system/") || answer == nil {
		return l.Store.Put(ctx, key, body, size, cond)
	}
	l.answer = nil
	if l.before {
		return "", answer
	}
	if _, err := l.Store.Put(ctx, key, body, size, cond); err != nil {
		return "", err
	}
	return "", answer
}

func TestLostAnswers(t *testing.T) {
	ctx := context.Background()
	for name, c := range map[string]struct {
		answer error
		before bool
		fails  bool
	}{
		"landed, answered as conflict by a retry": {store.ErrConflict, false, false},
		"landed, connection lost":                 {store.ErrTransient, false, false},
		"not written, connection lost":            {store.ErrTransient, true, true},
		"not written, conflict":                   {store.ErrConflict, true, false},
	} {
		l := &lossy{}
		o := open(t, func(s store.Store) store.Store { l.Store = s; return l })
		for _, v := range []contract.Version{"1", "2", "3"} {
			if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release(v)}); err != nil {
				t.Fatal(err)
			}
		}
		l.answer, l.before = c.answer, c.before
		p, err := o.Rollback(ctx, "edge", "stable")
		if (err != nil) != c.fails || c.fails && !errors.Is(err, c.answer) {
			t.Errorf("%s: %v", name, err)
		}
		now, _, err := o.Pointer(ctx, "edge", "stable")
		want := "2 1"
		if c.fails {
			want = "3 2 1"
		} else if history(p) != want {
			t.Errorf("%s: returned %q", name, history(p))
		}
		if err != nil || history(now.Pointer) != want {
			t.Errorf("%s: %q, want %q, %v", name, history(now.Pointer), want, err)
		}
	}
}

// A pointer keeps to its limits: the audit goes first, and history ends at ten.
func TestPointerStaysSmall(t *testing.T) {
	o := open(t, nil)
	o.Actor = strings.Repeat("a", 1000)
	var p contract.Pointer
	var err error
	for i := range 60 {
		if p, err = o.Promote(context.Background(), "edge", "stable", Promotion{Release: release(contract.Version("v" + strings.Repeat("x", i)))}); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.Payload.History) != contract.MaxHistory || len(p.Payload.Audit) >= contract.MaxAudit || len(p.Payload.Audit) < 10 {
		t.Errorf("%d in the history, %d in the audit", len(p.Payload.History), len(p.Payload.Audit))
	}
}

func TestKeyThatBoxesDoNotTrust(t *testing.T) {
	o := open(t, nil)
	if _, err := NewOperator(context.Background(), o.Store, ed25519.NewKeyFromSeed(bytes.Repeat([]byte{2}, 32))); outcome.Exit(err) != outcome.ExitConfig {
		t.Error(err)
	}
}

func TestStates(t *testing.T) {
	now := time.Unix(100_000, 0)
	p := &contract.Pointer{Component: "edge", Channel: "stable", PromotedAt: contract.At(now.Add(-time.Minute)), Payload: contract.PointerPayload{Current: release("2")}}
	res := func(o outcome.Outcome, reason string) *contract.Result {
		return &contract.Result{Tuple: p.Tuple(), Outcome: o, Reason: reason}
	}
	old := *p
	old.PromotedAt = contract.At(now.Add(-time.Hour))
	ahead := res(outcome.Applied, "")
	ahead.PromotedAt = contract.At(now)
	for name, c := range map[string]struct {
		status contract.ComponentStatus
		p      *contract.Pointer
		age    time.Duration
		want   State
		wants  bool
	}{
		"current":         {contract.ComponentStatus{Running: "2"}, p, 0, Current, false},
		"waiting":         {contract.ComponentStatus{Running: "1"}, p, 0, Waiting, false},
		"deferred":        {contract.ComponentStatus{Running: "1", Result: res(outcome.Deferred, "needs: x")}, p, 0, Waiting, false},
		"rolling":         {contract.ComponentStatus{Journal: &contract.JournalBrief{Phase: "gating", Tries: 0}}, p, 0, Rolling, false},
		"stuck":           {contract.ComponentStatus{Journal: &contract.JournalBrief{Phase: "reverting", Tries: 2}}, p, 0, Rolling, true},
		"held":            {contract.ComponentStatus{Running: "1", Held: true}, p, 0, Held, false},
		"behind":          {contract.ComponentStatus{Running: "1"}, &old, 0, Behind, true},
		"ahead":           {contract.ComponentStatus{Running: "3", Channel: "stable", Result: ahead}, p, 0, Ahead, true},
		"refused":         {contract.ComponentStatus{Running: "1", Result: res(outcome.Refused, "mutated: x")}, p, 0, Refused, true},
		"rolled back":     {contract.ComponentStatus{Running: "1", Result: res(outcome.RolledBack, "gate: x")}, p, 0, RolledBack, true},
		"rollback failed": {contract.ComponentStatus{Running: "1", Result: res(outcome.RollbackFailed, "gate: x")}, p, 0, RollbackFailed, true},
		"silent":          {contract.ComponentStatus{Running: "2"}, p, time.Hour, Silent, true},
		"no pointer":      {contract.ComponentStatus{}, nil, 0, Waiting, false},
	} {
		got, reason := state(c.status, c.p, c.age, now)
		if got != c.want || (Row{State: got, Reason: reason}).StandsOut() != c.wants {
			t.Errorf("%s: %s (%s)", name, got, reason)
		}
	}
}
