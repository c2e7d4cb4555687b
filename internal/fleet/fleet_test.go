package fleet

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
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

// lossy is a store that does something else at the next write of a pointer.
type lossy struct {
	store.Store
	next func(put func() (string, error)) (string, error)
	get  error // what the next read of a pointer answers
}

func (l *lossy) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond store.Condition) (string, error) {
	put := func() (string, error) { return l.Store.Put(ctx, key, body, size, cond) }
	if do := l.next; strings.HasPrefix(key, contract.PointersPrefix) && do != nil {
		l.next = nil
		return do(put)
	}
	return put()
}

func (l *lossy) Get(ctx context.Context, key string, limit int64, unless string) (store.Object, error) {
	if err := l.get; strings.HasPrefix(key, contract.PointersPrefix) && err != nil {
		l.get = nil
		return store.Object{}, err
	}
	return l.Store.Get(ctx, key, limit, unless)
}

// After a lost answer, a conflict or a write that was retried, the client reads
// back and says which of three it is; the history has exactly one entry, or none.
func TestLostAnswers(t *testing.T) {
	ctx := context.Background()
	type put = func() (string, error)
	landed := func(answer error) func(*lossy, *Operator) func(put) (string, error) {
		return func(*lossy, *Operator) func(put) (string, error) {
			return func(put put) (string, error) {
				if _, err := put(); err != nil {
					return "", err
				}
				return "", answer
			}
		}
	}
	notWritten := func(answer error) func(*lossy, *Operator) func(put) (string, error) {
		return func(*lossy, *Operator) func(put) (string, error) {
			return func(put) (string, error) { return "", answer }
		}
	}
	as := func(o *Operator, actor string) *Operator { other := *o; other.Actor = actor; return &other }
	two := 48 * time.Hour
	for name, c := range map[string]struct {
		do      func(*lossy, *Operator) func(put) (string, error)
		history string
		err     string // part of it; "" for none
		told    string
	}{
		"landed, answered as conflict by a retry": {landed(store.ErrConflict), "4 3 2 1", "", "already yours"},
		"landed, connection lost":                 {landed(store.ErrTransient), "4 3 2 1", "", "already yours"},
		"not written, connection lost":            {notWritten(store.ErrTransient), "3 2 1", "try again", ""},
		"not written, denied":                     {notWritten(store.ErrDenied), "3 2 1", "denies", ""},
		"not written, conflict out of nothing":    {notWritten(store.ErrConflict), "4 3 2 1", "", ""},
		"somebody else was faster": {func(l *lossy, o *Operator) func(put) (string, error) {
			return func(put put) (string, error) {
				if _, err := as(o, "bob@example.com").Promote(ctx, "edge", "stable", Promotion{Release: release("5")}); err != nil {
					return "", err
				}
				return put()
			}
		}, "5 3 2 1", "lost to bob@example.com, who made edge on stable 5 (promote)", ""},
		"somebody else was faster, and the answer was lost": {func(l *lossy, o *Operator) func(put) (string, error) {
			return func(put put) (string, error) {
				if _, err := as(o, "bob@example.com").Rollback(ctx, "edge", "stable"); err != nil {
					return "", err
				}
				_, _ = put()
				return "", store.ErrTransient
			}
		}, "2 1", "lost to bob@example.com, who made edge on stable 2 (rollback)", ""},
		"landed, connection lost, and somebody else came after": {func(l *lossy, o *Operator) func(put) (string, error) {
			return func(put put) (string, error) {
				if _, err := put(); err != nil {
					return "", err
				}
				if _, err := as(o, "bob@example.com").Promote(ctx, "edge", "stable", Promotion{Release: release("5")}); err != nil {
					return "", err
				}
				return "", store.ErrTransient
			}
		}, "5 4 3 2 1", "", "already yours; since then bob@example.com made it 5 (promote)"},
		"refreshed meanwhile": {func(l *lossy, o *Operator) func(put) (string, error) {
			return func(put put) (string, error) {
				if _, err := as(o, "cron@example.com").Refresh(ctx, "edge", "stable", &two); err != nil {
					return "", err
				}
				return put()
			}
		}, "4 3 2 1", "", ""},
		"landed, and can't be read back": {func(l *lossy, o *Operator) func(put) (string, error) {
			return func(put put) (string, error) {
				if _, err := put(); err != nil {
					return "", err
				}
				l.get = store.ErrTransient
				return "", store.ErrTransient
			}
		}, "4 3 2 1", "can't be told", ""},
	} {
		l := &lossy{}
		o := open(t, func(s store.Store) store.Store { l.Store = s; return l })
		var told []string
		o.Actor, o.Tell = "ann@example.com", func(s string) { told = append(told, s) }
		for _, v := range []contract.Version{"1", "2", "3"} {
			if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release(v)}); err != nil {
				t.Fatal(err)
			}
		}
		l.next = c.do(l, o)
		p, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("4")})
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", name, err, c.err)
		}
		if got := strings.Join(told, "; "); !strings.Contains(got, c.told) || (got == "") != (c.told == "") {
			t.Errorf("%s: told %q", name, got)
		}
		now, _, err := o.Pointer(ctx, "edge", "stable")
		if err != nil || history(now.Pointer) != c.history {
			t.Errorf("%s: %q, want %q, %v", name, history(now.Pointer), c.history, err)
		}
		if c.err == "" && history(p) != c.history {
			t.Errorf("%s: returned %q", name, history(p))
		}
		// The same once more makes no second entry.
		if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("4")}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		now, _, err = o.Pointer(ctx, "edge", "stable")
		if n := strings.Count(history(now.Pointer)+" ", "4 "); err != nil || n > 2 || n == 2 && !strings.HasPrefix(c.history, "5 4") {
			t.Errorf("%s: then %q, %v", name, history(now.Pointer), err)
		}
	}
}

// A refresh changes its two members and the signature; a promote keeps the life.
func TestRefresh(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	day := 24 * time.Hour
	clock := time.Now()
	o.Now = func() time.Time { return clock }
	if _, err := o.Refresh(ctx, "edge", "stable", &day); outcome.Exit(err) != outcome.ExitFailed {
		t.Errorf("without a promote: %v", err)
	}
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Refresh(ctx, "edge", "stable", nil); outcome.Exit(err) != outcome.ExitUsage {
		t.Errorf("without a life: %v", err)
	}
	fourteen, never := 14*day, time.Duration(0)
	first, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("2"), Life: &fourteen})
	if err != nil || !first.Payload.ExpiresAt.Equal(first.PromotedAt.Add(fourteen)) {
		t.Fatalf("%s, %v", first.Payload.ExpiresAt, err)
	}
	clock = clock.Add(10 * day)
	second, err := o.Refresh(ctx, "edge", "stable", nil)
	if err != nil || !second.Payload.ExpiresAt.Equal(clock.Add(fourteen)) || !second.Payload.RefreshedAt.Equal(clock) {
		t.Fatalf("%+v, %v", second.Payload, err)
	}
	same := second
	same.Payload.ExpiresAt, same.Payload.RefreshedAt = first.Payload.ExpiresAt, first.Payload.RefreshedAt
	if !bytes.Equal(same.Encode(), first.Encode()) {
		t.Errorf("a refresh changed more:\n%s\n%s", first.Encode(), second.Encode())
	}
	// A clock that was far ahead is put right by saying how long.
	clock = clock.Add(2000 * day)
	if _, err := o.Refresh(ctx, "edge", "stable", nil); err != nil {
		t.Fatal(err)
	}
	clock = clock.Add(-2000 * day)
	if p, err := o.Refresh(ctx, "edge", "stable", &fourteen); err != nil || !p.Payload.ExpiresAt.Equal(clock.Add(fourteen)) {
		t.Errorf("%s, %v", p.Payload.ExpiresAt, err)
	}
	// With a clock that went back it never expires earlier.
	clock = clock.Add(-5 * day)
	third, err := o.Refresh(ctx, "edge", "stable", nil)
	if err != nil || third.Payload.ExpiresAt.Before(second.Payload.ExpiresAt.Time) {
		t.Errorf("%s, %v", third.Payload.ExpiresAt, err)
	}
	clock = clock.Add(6 * day)
	if _, err := o.Promote(ctx, "rim", "canary", Promotion{Release: release("1")}); err != nil {
		t.Fatal(err)
	}
	if expiring, err := o.Expiring(ctx); err != nil || len(expiring) != 1 || expiring[0] != (Target{"edge", "stable"}) {
		t.Errorf("%v, %v", expiring, err)
	}
	for what, do := range map[string]func() (contract.Pointer, error){
		"promote": func() (contract.Pointer, error) {
			return o.Promote(ctx, "edge", "stable", Promotion{Release: release("3")})
		},
		"rollback": func() (contract.Pointer, error) { return o.Rollback(ctx, "edge", "stable") },
	} {
		if p, err := do(); err != nil || p.Payload.Life() != fourteen {
			t.Errorf("%s: lives %s, %v", what, p.Payload.Life(), err)
		}
	}
	p, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("4"), Life: &never})
	if err != nil || !p.Payload.ExpiresAt.IsZero() || p.Payload.RefreshedAt != (contract.Time{}) {
		t.Errorf("%+v, %v", p.Payload, err)
	}
	if step, _ := p.Needs(); step != contract.One {
		t.Errorf("without an expiry it needs %s", step)
	}
}

// A promote whose clock is behind the one before does not expire before it begins.
func TestLifeBeginsWithThePromote(t *testing.T) {
	o := open(t, nil)
	clock := time.Now().Add(6 * 24 * time.Hour)
	o.Now = func() time.Time { return clock }
	if _, err := o.Promote(context.Background(), "edge", "stable", Promotion{Release: release("1")}); err != nil {
		t.Fatal(err)
	}
	clock = time.Now()
	life := 3 * 24 * time.Hour
	if p, err := o.Promote(context.Background(), "edge", "stable", Promotion{Release: release("2"), Life: &life}); err != nil || p.Payload.ExpiresAt.Sub(p.PromotedAt.Time) != life {
		t.Errorf("promoted at %s, expires at %s, %v", p.PromotedAt, p.Payload.ExpiresAt, err)
	}
}

// A promote that began before the trust moved is signed by who counts now, or not
// written.
func TestTrustMovesBeforeAPromoteIsWritten(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	path := filepath.Join(t.TempDir(), "trust.json")
	edited(t, o.Store, path, AddKey(public(seeded(3)), Families), Threshold([]contract.Ladder{contract.PointerLadder}, 2))
	if _, err := publish(o.Store, signed(t, path, key)); err != nil {
		t.Fatal(err)
	}
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); outcome.Exit(err) != outcome.ExitConfig || !strings.Contains(err.Error(), "the trust has moved") {
		t.Errorf("%v", err)
	}
	o.Keys = append(o.Keys, seeded(3))
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil || o.Trust.Number != 2 {
		t.Errorf("document %d, %v", o.Trust.Number, err)
	}
}

// A bell that can't be rung is said to be that.
func TestBellThatCannotBeRung(t *testing.T) {
	o := open(t, nil)
	o.Store = &cutting{o.Store, 2, false}
	p, err := o.Promote(context.Background(), "edge", "stable", Promotion{Release: release("1")})
	if err == nil || !strings.Contains(err.Error(), "as it was to be") || history(p) != "1" {
		t.Errorf("%q, %v", history(p), err)
	}
}

// beats publishes what a box of an older build would.
func beats(t *testing.T, s store.Store, label contract.Label, ch contract.Channel, speaks contract.Speaks) {
	t.Helper()
	b := contract.Heartbeat{Schema: contract.One, Label: label, Platform: "linux-amd64", At: contract.At(time.Now()), Speaks: speaks,
		Components: map[contract.Component]contract.ComponentStatus{"edge": {Channel: string(ch), Running: "1"}}}
	if _, err := store.PutBytes(context.Background(), s, contract.StatusKey(label), b.Encode(), store.Condition{}); err != nil {
		t.Fatal(err)
	}
}

func TestCeilings(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	old := contract.Speaks{contract.EnvelopeLadder: {{Major: 1}}, contract.PointerLadder: {{Major: 1, Minor: 1}}, contract.ManifestLadder: {{Major: 1}}}
	beats(t, o.Store, "old-1", "stable", old)
	beats(t, o.Store, "old-2", "stable", old)
	beats(t, o.Store, "old-elsewhere", "canary", old)
	beats(t, o.Store, "new", "stable", contract.Spoken)
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil {
		t.Errorf("nothing new: %v", err)
	}
	life := time.Hour
	refused := func(err error, says string) {
		t.Helper()
		var e *outcome.Error
		if !errors.As(err, &e) || e.Word != outcome.UpgradeNeeded || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "old-1, old-2. ") {
			t.Error(err)
		}
	}
	_, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("2"), Life: &life})
	refused(err, "pointer 1.2 (because of payload.expires_at)")
	_, err = o.Promote(ctx, "edge", "stable", Promotion{Release: release("2"), Manifest: contract.Step{Major: 1, Minor: 3}})
	refused(err, "manifest 1.3")
	_, err = o.Refresh(ctx, "edge", "stable", &life)
	refused(err, "pointer 1.2")
	if p, _, err := o.Pointer(ctx, "edge", "stable"); err != nil || history(p.Pointer) != "1" {
		t.Errorf("%q, %v", history(p.Pointer), err)
	}
	o.Strand = true
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("2"), Life: &life}); err != nil {
		t.Errorf("-strand: %v", err)
	}
	// Who can't read the pointer that is there is not stranded by its refresh.
	o.Strand = false
	if _, err := o.Refresh(ctx, "edge", "stable", nil); err != nil {
		t.Errorf("a refresh: %v", err)
	}
	rows, err := Status(ctx, o.Store, o.Trust, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		if stuck := r.State == Unreadable && strings.HasPrefix(r.Reason, "upgrade-needed: needs a newer sluice: the box reads pointer [1.1], and this is 1.2"); stuck != (r.Label == "old-1" || r.Label == "old-2") {
			t.Errorf("%s: %s, %s", r.Label, r.State, r.Reason)
		}
	}
}

// What this command is too old for is shown, and not failed at.
func TestStatusOfNewerDocuments(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	p, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")})
	if err != nil {
		t.Fatal(err)
	}
	beats(t, o.Store, "box-1", "stable", contract.Spoken)
	beats(t, o.Store, "box-2", "canary", contract.Spoken)
	newer := func(doc []byte, old, new string) []byte {
		t.Helper()
		if !bytes.Contains(doc, []byte(old)) {
			t.Fatalf("%s has no %s", doc, old)
		}
		return bytes.Replace(doc, []byte(old), []byte(new), 1)
	}
	put := func(key string, data []byte) {
		t.Helper()
		if _, err := store.PutBytes(ctx, o.Store, key, data, store.Condition{}); err != nil {
			t.Fatal(err)
		}
	}
	beat, err := o.Store.Get(ctx, contract.StatusKey("box-2"), contract.MaxHeartbeat, "")
	if err != nil {
		t.Fatal(err)
	}
	put(contract.StatusKey("box-3"), newer(beat.Data, `"schema": "1.0"`, `"schema": "2.0", "novel": []`))
	for name, statement := range map[string][]byte{
		"a minor to come":     newer(p.Encode(), `"schema": "1.0"`, `"schema": "1.7", "novel": 1`),
		"a major to come":     newer(p.Encode(), `"schema": "1.0"`, `"schema": "3.0"`),
		"an envelope to come": newer(p.Encode(), `"envelope": "1.0"`, `"envelope": "2.0"`),
	} {
		put(contract.PointerKey("edge", "stable", 1), trust.Sign(contract.PointerLadder, statement, key).Encode())
		rows, err := Status(ctx, o.Store, o.Trust, time.Now())
		if err != nil || len(rows) != 3 {
			t.Fatalf("%s: %+v, %v", name, rows, err)
		}
		if r := rows[0]; r.State != Unreadable || !strings.Contains(r.Reason, "needs a newer sluice") || !strings.Contains(r.Reason, "edge on stable, promoted at "+p.PromotedAt.String()) {
			t.Errorf("%s: %+v", name, r)
		}
		if r := rows[1]; r.State != Waiting {
			t.Errorf("%s: another channel: %+v", name, r)
		}
		if r := rows[2]; r.State != Unreadable || r.Label != "box-3" || !strings.Contains(r.Reason, "needs a newer sluice: heartbeat 2.0: unsupported major (this sluice reads 1)") {
			t.Errorf("%s: %+v", name, r)
		}
		// Nor does anybody write over it.
		if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("2")}); outcome.Exit(err) != outcome.ExitDeferred {
			t.Errorf("%s: %v", name, err)
		}
	}
	// A pointer of another major beside this one is kept true, or nothing is written.
	put(contract.PointerKey("edge", "canary", 2), []byte("{}"))
	if _, err := o.Promote(ctx, "edge", "canary", Promotion{Release: release("2")}); err == nil || !strings.Contains(err.Error(), "also has a pointer of major 2") {
		t.Error(err)
	}
}

func TestExpiriesAreTold(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	life := 10 * 24 * time.Hour
	p, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1"), Life: &life})
	if err != nil {
		t.Fatal(err)
	}
	beats(t, o.Store, "box-1", "stable", contract.Spoken)
	beats(t, o.Store, "box-2", "stable", contract.Spoken)
	for after, want := range map[time.Duration]string{0: "", life - ExpiryWarning - time.Hour: "", life - ExpiryWarning + time.Hour: "expires in", life + time.Hour: "expired at"} {
		now := p.PromotedAt.Add(after)
		rows, err := Status(ctx, o.Store, o.Trust, now)
		if err != nil {
			t.Fatal(err)
		}
		lines := Expiries(rows, o.Trust, now)
		if (len(lines) == 1) != (want != "") || want != "" && (!strings.Contains(lines[0], want) || !strings.Contains(lines[0], "sluice refresh edge -channel stable")) {
			t.Errorf("after %s: %q", after, lines)
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
		if c.status.Channel == "" {
			c.status.Channel = "stable"
		}
		got, reason := state(c.status, c.p, c.age, now)
		if got != c.want || (Row{State: got, Reason: reason}).StandsOut() != c.wants {
			t.Errorf("%s: %s (%s)", name, got, reason)
		}
	}
}

// Fleets that share a bucket are seen from above, each by its own trust; from below
// only one's own.
func TestFleetsInOneBucket(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil {
		t.Fatal(err)
	}
	beats(t, o.Store, "box-1", "stable", contract.Spoken)
	for name, k := range map[string]ed25519.PrivateKey{"acme": seeded(5), "initech": seeded(6)} {
		part, err := store.Prefix(o.Store, contract.FleetPrefix(name))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Init(ctx, part, k, name, nil, time.Now()); err != nil {
			t.Fatal(err)
		}
		own, err := NewOperator(ctx, part, k)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := own.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil {
			t.Fatal(err)
		}
		beats(t, part, "box-1", "stable", contract.Spoken)
		if rows, err := Everywhere(ctx, part, own.Trust, time.Now()); err != nil || len(rows) != 1 || rows[0].State != Current {
			t.Errorf("%s: %+v, %v", name, rows, err)
		}
		if _, err := NewOperator(ctx, part, key); err == nil {
			t.Errorf("%s: another fleet's key counts", name)
		}
	}
	rows, err := Everywhere(ctx, o.Store, o.Trust, time.Now())
	if err != nil || len(rows) != 3 {
		t.Fatalf("%+v, %v", rows, err)
	}
	for i, fleet := range []string{"", "acme", "initech"} {
		if rows[i].Fleet != fleet || rows[i].State != Current || rows[i].Label != "box-1" {
			t.Errorf("%+v", rows[i])
		}
	}
}

// Every word that a reason may begin with, and every state, is explained.
func TestEverythingIsExplained(t *testing.T) {
	src, err := os.ReadFile("../outcome/outcome.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`Word += "([^"]+)"`).FindAllStringSubmatch(string(src), -1) {
		if e := (Row{Reason: m[1] + ": x"}).Why(); e.Means == "" || e.Do == "" {
			t.Errorf("%s is not explained", m[1])
		}
	}
	for _, s := range []State{Current, Waiting, Rolling, Held, Behind, Ahead, Refused, RolledBack, RollbackFailed, Silent, Unreadable} {
		if e := (Row{State: s}).Why(); e.Means == "" || e.Do == "" {
			t.Errorf("state %s without a reason is not explained", s)
		}
	}
}

// A box speaks for itself alone.
func TestABoxSpeaksForItself(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil {
		t.Fatal(err)
	}
	beats(t, o.Store, "box-2", "stable", contract.Spoken)
	data, err := o.Store.Get(ctx, contract.StatusKey("box-2"), contract.MaxHeartbeat, "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.PutBytes(ctx, o.Store, contract.StatusKey("box-1"), data.Data, store.Condition{}); err != nil {
		t.Fatal(err)
	}
	rows, err := Status(ctx, o.Store, o.Trust, time.Now())
	if err != nil || len(rows) != 2 || rows[0].Label != "box-1" || rows[0].State != Unreadable || rows[1].State != Current {
		t.Errorf("%+v, %v", rows, err)
	}
}

// What is followed is one promote: another one ends it, and is not undone.
func TestFollowOnePromote(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	for _, v := range []contract.Version{"1", "2"} {
		if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release(v)}); err != nil {
			t.Fatal(err)
		}
	}
	p, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("3")})
	if err != nil {
		t.Fatal(err)
	}
	beats(t, o.Store, "box-1", "stable", contract.Spoken) // runs 1
	other, err := o.Rollback(ctx, "edge", "stable")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.Follow(ctx, p, 0, func(Tally) {}); err == nil || !strings.Contains(err.Error(), "by another promote") {
		t.Errorf("%v", err)
	}
	if _, err := o.Halt(ctx, p); err == nil || !strings.Contains(err.Error(), "by another promote") {
		t.Errorf("%v", err)
	}
	if now, _, err := o.Pointer(ctx, "edge", "stable"); err != nil || !now.PromotedAt.Equal(other.PromotedAt.Time) {
		t.Errorf("%v", err)
	}
	if back, err := o.Halt(ctx, other); err != nil || history(back) != "1" {
		t.Errorf("%q, %v", history(back), err)
	}
	// Nothing that was ever seen is no success.
	ended, cancel := context.WithCancel(ctx)
	cancel()
	o.Store = &lossy{Store: o.Store, get: store.ErrTransient}
	if _, err := o.Follow(ended, other, 0, func(Tally) {}); err == nil {
		t.Error("nothing was seen, and that is well")
	}
}
