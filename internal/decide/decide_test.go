package decide

import (
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(s int) contract.Time { return contract.At(t0.Add(time.Duration(s) * time.Second)) }
func digest(c string) contract.Digest {
	return contract.Digest(strings.Repeat(c, 64))
}

func pointer(v contract.Version, s int) *contract.Pointer {
	return &contract.Pointer{Component: "edge", Channel: "stable", PromotedAt: at(s), Payload: contract.PointerPayload{
		Current: contract.Release{Version: v, Artifacts: map[contract.Platform]contract.Artifact{"linux-amd64": {ManifestSHA256: digest("a")}}}}}
}

func seen(s int) *contract.Seen {
	return &contract.Seen{Channels: map[contract.Channel]contract.Water{"stable": {PromotedAt: at(s)}}}
}

func applied(v contract.Version, d string) *contract.Applied {
	return &contract.Applied{Build: contract.Build{Tuple: contract.Tuple{Channel: "stable", Version: v, PromotedAt: at(1)}, ManifestSHA256: digest(d)}}
}

func result(o outcome.Outcome, reason string, v contract.Version, s, attempt int) *contract.Result {
	return &contract.Result{Tuple: contract.Tuple{Channel: "stable", Version: v, PromotedAt: at(s)}, Outcome: o, Reason: reason, Attempt: attempt, Config: digest("c")}
}

func TestPointer(t *testing.T) {
	for name, c := range map[string]struct {
		in   In
		want Action
	}{
		"no pointer":                      {In{}, Nothing},
		"other platform":                  {In{Pointer: pointer("2", 5), Platform: "linux-arm64"}, Nothing},
		"first pointer ever":              {In{Pointer: pointer("2", 5)}, Update},
		"older than the watermark":        {In{Pointer: pointer("2", 5), Seen: seen(6)}, Ignore},
		"at the watermark":                {In{Pointer: pointer("2", 5), Seen: seen(5), Applied: applied("1", "b")}, Update},
		"runs already, same promote":      {In{Pointer: pointer("1", 5), Seen: seen(5), Applied: applied("1", "a")}, Nothing},
		"runs already, newer promote":     {In{Pointer: pointer("1", 5), Seen: seen(4), Applied: applied("1", "a")}, Noop},
		"same version, other bytes":       {In{Pointer: pointer("1", 5), Seen: seen(4), Applied: applied("1", "b")}, Update},
		"rolled back":                     {In{Pointer: pointer("2", 5), Result: result(outcome.RolledBack, "gate: x", "2", 5, 1)}, Nothing},
		"rolled back, promoted again":     {In{Pointer: pointer("2", 6), Result: result(outcome.RolledBack, "gate: x", "2", 5, 1)}, Update},
		"interrupted once":                {In{Pointer: pointer("2", 5), Result: result(outcome.RolledBack, "interrupted: x", "2", 5, 1)}, Update},
		"interrupted three times":         {In{Pointer: pointer("2", 5), Result: result(outcome.RolledBack, "interrupted: x", "2", 5, 3)}, Nothing},
		"deferred":                        {In{Pointer: pointer("2", 5), Result: result(outcome.Deferred, "needs: x", "2", 5, 9)}, Update},
		"refused":                         {In{Pointer: pointer("2", 5), Result: result(outcome.Refused, "version-lie: x", "2", 5, 1)}, Nothing},
		"foreign file, same conf":         {In{Pointer: pointer("2", 5), Config: digest("c"), Result: result(outcome.Refused, "foreign-file: x", "2", 5, 1)}, Nothing},
		"foreign file, conf changed":      {In{Pointer: pointer("2", 5), Config: digest("d"), Result: result(outcome.Refused, "foreign-file: x", "2", 5, 1)}, Update},
		"applied never suppresses":        {In{Pointer: pointer("2", 5), Result: result(outcome.Applied, "", "2", 5, 1), Applied: applied("1", "b")}, Update},
		"journal open for it":             {In{Pointer: pointer("2", 5), Journal: &contract.Journal{Target: contract.Build{Tuple: pointer("2", 5).Tuple()}}}, Wait},
		"journal open for another":        {In{Pointer: pointer("3", 6), Journal: &contract.Journal{Target: contract.Build{Tuple: pointer("2", 5).Tuple()}}}, Update},
		"rollback failed":                 {In{Pointer: pointer("2", 5), Result: result(outcome.RollbackFailed, "gate: x", "2", 5, 1)}, Nothing},
		"terminal for another channel":    {In{Pointer: pointer("2", 5), Result: &contract.Result{Tuple: contract.Tuple{Channel: "canary", Version: "2", PromotedAt: at(5)}, Outcome: outcome.RolledBack, Reason: "gate: x"}}, Update},
		"watermark of another channel":    {In{Pointer: pointer("2", 5), Seen: &contract.Seen{Channels: map[contract.Channel]contract.Water{"canary": {PromotedAt: at(9)}}}}, Update},
		"runs already, trust has moved":   {In{Pointer: pointer("1", 5), Seen: seen(5), Applied: applied("1", "a"), Ahead: true}, Noop},
		"refused, trust has moved":        {In{Pointer: pointer("2", 5), Ahead: true, Result: result(outcome.Refused, "version-lie: x", "2", 5, 1)}, Noop},
		"another build, trust has moved":  {In{Pointer: pointer("2", 5), Seen: seen(5), Applied: applied("1", "b"), Ahead: true}, Update},
		"a replay, trust has moved":       {In{Pointer: pointer("2", 5), Seen: seen(6), Ahead: true}, Ignore},
		"runs already, damaged":           {In{Pointer: pointer("1", 5), Seen: seen(5), Applied: applied("1", "a"), Damaged: true}, Update},
		"runs already, never seen before": {In{Pointer: pointer("1", 5), Applied: applied("1", "a")}, Noop},
	} {
		if c.in.Platform == "" {
			c.in.Platform = "linux-amd64"
		}
		if got, why := Pointer(c.in); got != c.want {
			t.Errorf("%s: %s (%s), want %s", name, got, why, c.want)
		}
	}
}

// What time it is, when the box's clock may be wrong.
func TestNow(t *testing.T) {
	day := 24 * time.Hour
	built := t0.Add(-100 * day)
	for name, c := range map[string]struct {
		clock  time.Time
		signed []time.Duration // past t0
		want   time.Time
	}{
		"nothing signed":                      {t0, nil, t0},
		"all signed is older":                 {t0, []time.Duration{-time.Hour, -30 * day}, t0},
		"an hour behind":                      {t0, []time.Duration{time.Hour}, t0.Add(time.Hour)},
		"the newest counts":                   {t0, []time.Duration{time.Hour, 3 * day, -day}, t0.Add(3 * day)},
		"exactly seven days behind":           {t0, []time.Duration{7 * day}, t0.Add(7 * day)},
		"a time from the far future":          {t0, []time.Duration{5000 * day}, t0.Add(7 * day)},
		"a clock before the build":            {built.Add(-1), []time.Duration{0}, t0},
		"a clock exactly at the build":        {built, []time.Duration{0}, built.Add(7 * day)},
		"a clock before the build, far ahead": {time.Unix(0, 0), []time.Duration{5000 * day}, t0.Add(5000 * day)},
	} {
		var signed []contract.Time
		for _, d := range c.signed {
			signed = append(signed, contract.At(t0.Add(d)))
		}
		if got := Now(c.clock, built, signed...); !got.Equal(c.want) {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	if got := Now(time.Unix(0, 0), time.Time{}, contract.At(t0)); !got.Equal(time.Unix(0, 0).Add(MaxAhead)) {
		t.Errorf("a build without a date: %s", got)
	}
}

func TestOffset(t *testing.T) {
	counts := [4]int{}
	for i := range 4000 {
		label := contract.Label("box" + strings.Repeat("x", i%50) + string(rune('a'+i/50%26)) + string(rune('a'+i/1300)))
		d := Offset(4*time.Minute, label, "edge", at(1))
		if d < 0 || d >= 4*time.Minute {
			t.Fatalf("%s waits %s", label, d)
		}
		counts[d/time.Minute]++
	}
	for i, n := range counts {
		if n < 800 || n > 1200 {
			t.Errorf("%d of 4000 boxes in minute %d", n, i)
		}
	}
	if Offset(time.Hour, "a", "edge", at(1)) == Offset(time.Hour, "a", "edge", at(2)) {
		t.Error("the same place in two promotes")
	}
	// An operator prints the plan before the boxes act on it: this figure is a contract.
	if got := Offset(time.Hour, "a", "edge", at(1)); got != 2562995510500 {
		t.Errorf("box a waits %d, not what it always waited", got)
	}
	if Offset(0, "a", "edge", at(1)) != 0 {
		t.Error("waits without a spread")
	}
}

func TestBackoff(t *testing.T) {
	for attempts, want := range map[int]time.Duration{0: FirstRetry, 1: FirstRetry, 2: 2 * FirstRetry, 4: 8 * FirstRetry, 50: MaxRetry} {
		if got := Backoff(attempts); got != want {
			t.Errorf("Backoff(%d) = %s", attempts, got)
		}
	}
}
