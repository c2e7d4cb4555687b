// Package decide holds the decisions of a box: pure functions from what was
// read to what is to be done. It does no I/O.
package decide

import (
	"crypto/sha256"
	"encoding/binary"
	"math/bits"
	"time"

	"sluice/internal/contract"
)

// An Action is what a pointer means to a box.
type Action string

// The actions.
const (
	Nothing Action = "nothing" // it runs this, or it is not for it, or it has tried it
	Ignore  Action = "ignore"  // older than what root has verified
	Wait    Action = "wait"    // root is at work on exactly this
	Noop    Action = "no-op"   // it runs this; root's watermark is to move
	Update  Action = "update"  // it is to run this
)

// In is what a box knows when it reads a pointer. What is not there is nil.
type In struct {
	Pointer  *contract.Pointer // checked by trust, for the box's channel
	Platform contract.Platform
	Seen     *contract.Seen
	Applied  *contract.Applied
	Result   *contract.Result
	Journal  *contract.Journal
	Config   contract.Digest // of the component's .conf
	Damaged  bool            // the good set is, on the disk
	Trial    *contract.Trial // of the pipeline's own last update
	Ahead    bool            // the trust that checked Pointer is newer than root's
}

// Pointer decides what a pointer means, and says why in a few words.
func Pointer(in In) (Action, string) {
	if in.Pointer == nil {
		return Nothing, "no pointer"
	}
	p := *in.Pointer
	artifact, ok := p.Payload.Current.Artifacts[in.Platform]
	if !ok {
		return Nothing, "nothing for platform " + string(in.Platform)
	}
	watermark := Watermark(in.Seen, p.Channel)
	target := contract.Build{Tuple: p.Tuple(), ManifestSHA256: artifact.ManifestSHA256}
	switch {
	case p.PromotedAt.Before(watermark.Time):
		return Ignore, "older than the watermark"
	case in.Result != nil && in.Result.Tuple.Equal(p.Tuple()) && in.Result.Terminal(in.Config):
		if in.Ahead {
			return Noop, "ended here; root's trust is to move"
		}
		return Nothing, "ended here as " + string(in.Result.Outcome)
	case in.Journal != nil && in.Journal.Target.Equal(p.Tuple()):
		return Wait, "root is at work on it"
	case in.Damaged:
		return Update, "the good set is damaged"
	case in.Applied != nil && in.Applied.Same(target):
		if p.PromotedAt.After(watermark.Time) {
			return Noop, "runs already; the watermark is to move"
		}
		if in.Ahead {
			return Noop, "runs already; root's trust is to move"
		}
		if in.Trial != nil && in.Trial.Version == target.Version {
			return Noop, "runs already, and is to prove that it can bring a request to its end"
		}
		return Nothing, "runs already"
	}
	return Update, "another build than the one that runs"
}

// Watermark is the newest promote that root has verified on a channel; the
// zero time if there is none.
func Watermark(seen *contract.Seen, ch contract.Channel) contract.Time {
	if seen == nil {
		return contract.Time{}
	}
	return seen.Channels[ch].PromotedAt
}

// MaxAhead is how far signed times may move a box past its own clock.
const MaxAhead = 7 * 24 * time.Hour

// Now is the time for what expires. A clock that is behind a signed time that
// was seen is slow: that time is the floor. But whoever signs times must not be
// able to move a box at will, so the floor is at most MaxAhead past the clock;
// but for a clock before the build's own date, which shows nothing at all.
func Now(clock, built time.Time, signed ...contract.Time) contract.Time {
	floor := clock
	if floor.Before(built) {
		floor = built
	}
	for _, t := range signed {
		if t.After(floor) {
			floor = t.Time
		}
	}
	if most := clock.Add(MaxAhead); floor.After(most) && !clock.Before(built) {
		floor = most
	}
	return contract.At(floor)
}

// Offset is the part of a spread that a box waits before it acts on a
// promote. It is deterministic, so an operator can print it beforehand, and
// different for every promote.
func Offset(spread time.Duration, label contract.Label, c contract.Component, promotedAt contract.Time) time.Duration {
	sum := sha256.Sum256([]byte(string(label) + "\x00" + string(c) + "\x00" + promotedAt.String()))
	hi, _ := bits.Mul64(binary.BigEndian.Uint64(sum[:8]), uint64(spread))
	return time.Duration(hi)
}

// Back-off of what is tried again.
const (
	FirstRetry = 5 * time.Second
	MaxRetry   = time.Hour
)

// Backoff is how long to wait after so many attempts: doubled each time, with
// a cap.
func Backoff(attempts int) time.Duration {
	d := FirstRetry
	for range attempts - 1 {
		if d *= 2; d >= MaxRetry {
			return MaxRetry
		}
	}
	return d
}
