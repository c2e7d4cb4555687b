package apply

import (
	"context"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// Whatever the box's clock says, and whatever it does in the middle of a soak:
// nothing passes early, nothing is refused for it. The windows of a gate are
// time that passed with the box awake.
func TestClock(t *testing.T) {
	const soak = 300 * time.Millisecond
	day := 24 * time.Hour
	for name, clock := range map[string]func(call int) time.Time{
		"1970":                func(int) time.Time { return time.Unix(0, 0) },
		"ten years ahead":     func(int) time.Time { return time.Now().AddDate(10, 0, 0) },
		"a day forward":       func(n int) time.Time { return time.Now().Add(time.Duration(n/2) * day) },
		"a day back":          func(n int) time.Time { return time.Now().Add(-time.Duration(n/2) * day) },
		"backwards each time": func(n int) time.Time { return time.Now().Add(-time.Duration(n) * day) },
	} {
		b := newBox(t)
		calls := 0
		applier := func() *Applier {
			a := b.applier()
			a.Now = func() time.Time { calls++; return clock(calls) }
			return a
		}
		run := func() error { return applier().Run(context.Background(), context.Background()) }
		b.stage("1", nil, nil)
		b.must(run())
		two := b.stage("2", nil, func(m *contract.Manifest) { m.Gate.Soak = contract.Duration(soak) })
		began := time.Now() // with its monotonic reading
		b.must(run())
		if took := time.Since(began); took < soak {
			t.Errorf("%s: a soak of %s passed in %s", name, soak, took)
		}
		b.ended(two, outcome.Applied, "")
		// One that dies in its soak does so whatever time it is.
		three := b.stage("3", nil, func(m *contract.Manifest) { m.Gate.Soak = contract.Duration(soak) })
		looks := 0
		a := applier()
		a.Manager = tampering{b.manager, func(u *systemd.Unit) {
			if looks++; looks > 4 && b.link(layout.Current) == "3" {
				u.InvocationID += " again"
			}
		}}
		_ = a.Run(context.Background(), context.Background())
		b.ended(three, outcome.RolledBack, outcome.Soak)
		b.runs("2")
		// What was cut is recovered, three times, and then it is enough.
		four := b.stage("4", nil, nil)
		for attempt := 1; attempt <= outcome.MaxAttempts; attempt++ {
			b.cutAt(Gating)
			b.must(applier().Recover(context.Background(), false))
			if r := record.Optional[contract.Result](b.state, layout.Result); r == nil || r.Attempt != attempt || !r.Tuple.Equal(four) {
				t.Errorf("%s: attempt %d: %+v", name, attempt, r)
			}
		}
		b.runs("2")
		five := b.stage("5", nil, nil)
		b.must(run())
		b.ended(five, outcome.Applied, "")
		b.runs("5")
	}
}
