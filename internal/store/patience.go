package store

import (
	"time"
)

// A body that is slower than Slowest for SlowPatience is given up, and resumed
// later.
const (
	Slowest      = 4 << 10 // bytes a second
	SlowPatience = 30 * time.Second
)

// A Patience gives up a body that comes too slowly.
type Patience struct {
	timer *time.Timer
	got   int64
}

// NewPatience begins to wait; giveUp is called when it has come to its end. The
// caller stops it.
func NewPatience(giveUp func()) *Patience {
	return &Patience{timer: time.AfterFunc(SlowPatience, giveUp)}
}

// Got tells of bytes that have come.
func (p *Patience) Got(n int) {
	if p.got += int64(n); p.got >= Slowest*int64(SlowPatience/time.Second) {
		p.got = 0
		p.timer.Reset(SlowPatience)
	}
}

// Excuse grants more time: it is the reader who is slow.
func (p *Patience) Excuse(d time.Duration) { p.timer.Reset(SlowPatience + d) }

// Stop ends it.
func (p *Patience) Stop() { p.timer.Stop() }
