package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// What makes a row stand out.
const (
	SilentAfter = 15 * time.Minute // a heartbeat is due every five
	LateAfter   = 10 * time.Minute // on the old version so long after a promote
)

// A State is what a box is in; exactly one.
type State string

// The states.
const (
	Current        State = "current"
	Waiting        State = "waiting"
	Rolling        State = "rolling"
	Held           State = "held"
	Behind         State = "behind"
	Ahead          State = "ahead"
	Refused        State = "refused"
	RolledBack     State = "rolled-back"
	RollbackFailed State = "rollback-failed"
	Silent         State = "silent"
	Unreadable     State = "unreadable"
)

// A Row is one component of one box.
type Row struct {
	Label      string          `json:"label"`
	Fleet      string          `json:"fleet"`
	Platform   string          `json:"platform"`
	Component  string          `json:"component"`
	Channel    string          `json:"channel"`
	Running    string          `json:"running"`
	Target     string          `json:"target"`
	State      State           `json:"state"`
	Reason     string          `json:"reason"`
	Outcome    string          `json:"outcome"`
	At         string          `json:"at"`
	AgeS       int64           `json:"age_s"`
	Downloaded int64           `json:"downloaded"`
	Speaks     contract.Speaks `json:"speaks"`
	ExpiresAt  string          `json:"expires_at,omitzero"` // of the pointer
	Late       bool            `json:"late,omitzero"`       // it waits for longer after the promote than it should
}

// Status reads pointers and heartbeats and says in which state every box is.
// A heartbeat that can't be read is a row of its own. Of a pointer that this
// build is too old for only the routing core is used.
func Status(ctx context.Context, s store.Store, set trust.Set, now time.Time) ([]Row, error) {
	beats, err := heartbeats(ctx, s)
	if err != nil {
		return nil, err
	}
	rows := []Row{}
	pointers := map[Target]shown{}
	for _, b := range beats {
		if b.err != nil {
			rows = append(rows, Row{Label: b.label, State: Unreadable, Reason: unreadable(b.err), Speaks: contract.Speaks{}})
			continue
		}
		for name, c := range b.Components {
			at := Target{name, contract.Channel(c.Channel)}
			if _, known := pointers[at]; !known && at.Channel.Valid() {
				pointers[at] = readPointer(ctx, s, set, name, at.Channel)
			}
			r := row(b.Heartbeat, name, c, pointers[at].pointer, now)
			if err := pointers[at].err; err != nil {
				r.State, r.Reason = Unreadable, unreadable(err)
			}
			rows = append(rows, r)
		}
	}
	sort.Slice(rows, func(i, j int) bool {
		if rows[i].Label != rows[j].Label {
			return rows[i].Label < rows[j].Label
		}
		return rows[i].Component < rows[j].Component
	})
	return rows, nil
}

// Everywhere is Status of a store, and of every fleet that shares it. Fleets with
// trust documents of their own are read by those.
func Everywhere(ctx context.Context, s store.Store, set trust.Set, now time.Time) ([]Row, error) {
	rows, err := Status(ctx, s, set, now)
	if err != nil {
		return nil, err
	}
	keys, err := s.List(ctx, contract.FleetsPrefix) // S3 has no shorter way that all servers know
	if err != nil {
		return nil, err
	}
	var fleets []string
	for _, key := range keys {
		fleet, _, _ := strings.Cut(strings.TrimPrefix(key, contract.FleetsPrefix), "/")
		if !slices.Contains(fleets, fleet) {
			fleets = append(fleets, fleet)
		}
	}
	for _, fleet := range fleets {
		more, err := statusOfFleet(ctx, s, fleet, set, now)
		if err != nil { // the others are told of all the same
			more = []Row{{State: Unreadable, Reason: unreadable(err), Speaks: contract.Speaks{}}}
		}
		for i := range more {
			more[i].Fleet = fleet
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

func statusOfFleet(ctx context.Context, s store.Store, fleet string, set trust.Set, now time.Time) ([]Row, error) {
	part, err := store.Prefix(s, contract.FleetPrefix(fleet))
	if err != nil {
		return nil, err
	}
	own, err := Trust(ctx, part)
	if errors.Is(err, ErrNoDeployment) {
		own, err = set, nil
	}
	if err != nil && !contract.IsUpgrade(err) {
		return nil, err
	}
	return Status(ctx, part, own, now)
}

// TrustToRead is Trust for who only looks: what can be read is shown, whatever can't.
// note says what is wrong, "" if nothing is.
func TrustToRead(ctx context.Context, s store.Store) (set trust.Set, note string, err error) {
	set, err = Trust(ctx, s)
	switch {
	case contract.IsUpgrade(err) && set.Number > 0:
		return set, "needs a newer sluice: " + err.Error(), nil
	case errors.Is(err, ErrNoDeployment):
		if keys, lerr := s.List(ctx, contract.FleetsPrefix); lerr == nil && len(keys) > 0 {
			return set, "", nil // a bucket that fleets share, and none of its own
		}
	}
	return set, "", err
}

// unreadable is the reason of what can't be read; newer documents are nobody's
// fault.
func unreadable(err error) string {
	if contract.IsUpgrade(err) {
		return fmt.Sprintf("%s: needs a newer sluice: %s", outcome.UpgradeNeeded, err)
	}
	var word *outcome.Error
	if errors.As(err, &word) {
		return err.Error()
	}
	if errors.Is(err, store.ErrTransient) || errors.Is(err, store.ErrDenied) {
		return string(outcome.Store) + ": " + err.Error()
	}
	return CodeBadBeat + ": " + err.Error()
}

// shown is what the store shows of a channel: a pointer, none, or one that
// can't be read or does not count.
type shown struct {
	pointer *contract.Pointer
	err     error
}

func readPointer(ctx context.Context, s store.Store, set trust.Set, c contract.Component, ch contract.Channel) shown {
	o, err := store.Pointer(ctx, s, contract.Spoken, c, ch)
	if store.IsNotExist(err) {
		return shown{}
	}
	if err != nil {
		return shown{err: err}
	}
	p, err := set.Pointer(o.Data, c, ch)
	if err == nil {
		return shown{pointer: &p.Pointer}
	}
	var upgrade *contract.UpgradeError
	if core, cerr := contract.DecodeCore(o.Data); cerr == nil && errors.As(err, &upgrade) {
		err = fmt.Errorf("%w (%s on %s, promoted at %s)", upgrade, core.Component, core.Channel, core.PromotedAt)
	}
	return shown{err: err}
}

func row(beat contract.Heartbeat, name contract.Component, c contract.ComponentStatus, p *contract.Pointer, now time.Time) Row {
	r := Row{Label: string(beat.Label), Fleet: beat.Fleet, Platform: string(beat.Platform), Component: string(name), Channel: string(c.Channel),
		Running: c.Running, At: beat.At.String(), AgeS: int64(now.Sub(beat.At.Time) / time.Second), Downloaded: c.Downloaded, Speaks: beat.Speaks}
	if p != nil {
		r.Target = string(p.Payload.Current.Version)
		if !p.Payload.ExpiresAt.IsZero() {
			r.ExpiresAt = p.Payload.ExpiresAt.String()
		}
	}
	if c.Result != nil {
		r.Outcome = string(c.Result.Outcome)
	}
	r.State, r.Reason = state(c, p, now.Sub(beat.At.Time), now)
	r.Late = p != nil && r.State == Waiting && now.Sub(p.PromotedAt.Time) > LateAfter+time.Duration(p.Payload.Spread)
	if p != nil && (r.State == Waiting || r.State == Behind) {
		if _, there := p.Payload.Current.Artifacts[beat.Platform]; !there {
			r.State, r.Reason = Behind, fmt.Sprintf("%s: %s has nothing for platform %s", outcome.NoArtifact, p.Payload.Current.Version, beat.Platform)
		}
	}
	if p != nil && r.State != Silent {
		if beat.Speaks.Check(contract.PointerLadder, p.Payload.Schema) != nil {
			r.State, r.Reason = Unreadable, fmt.Sprintf("%s: needs a newer sluice: the box reads pointer %v, and this is %s: update component sluice there", outcome.UpgradeNeeded, beat.Speaks[contract.PointerLadder], p.Payload.Schema)
		}
	}
	return r
}

// ExpiryWarning is how long before it expires somebody is told of a pointer or a
// trust document.
const ExpiryWarning = 3 * 24 * time.Hour

// Expiries says what expires soon, or has: once each.
func Expiries(rows []Row, set trust.Set, now time.Time) []string {
	var out []string
	soon := func(what string, at time.Time, remedy string) {
		if at.IsZero() || at.After(now.Add(ExpiryWarning)) {
			return
		}
		left := at.Sub(now).Round(time.Minute)
		line := fmt.Sprintf("%s expires in %s, at %s: %s", what, left, at.Format(time.RFC3339), remedy)
		if left <= 0 {
			line = fmt.Sprintf("%s expired at %s, boxes take nothing new from it: %s", what, at.Format(time.RFC3339), remedy)
		}
		if !slices.Contains(out, line) {
			out = append(out, line)
		}
	}
	soon(fmt.Sprintf("trust document %d", set.Number), set.Document.Payload.ExpiresAt.Time, "make the next with `sluice trust`")
	for _, r := range rows {
		if at, err := contract.Parse[contract.Time](r.ExpiresAt); err == nil {
			soon(fmt.Sprintf("the pointer of %s on %s", r.Component, r.Channel), at.Time, fmt.Sprintf("sluice refresh %s -channel %s", r.Component, r.Channel))
		}
	}
	return out
}

// state is a box's one state, and the one reason for it.
func state(c contract.ComponentStatus, p *contract.Pointer, age time.Duration, now time.Time) (State, string) {
	ofTarget := p != nil && c.Result != nil && c.Result.Tuple.Equal(p.Tuple())
	switch {
	case age > SilentAfter:
		return Silent, CodeSilent + ": no heartbeat for " + age.Round(time.Second).String()
	case c.Journal != nil && c.Journal.Tries > 1:
		return Rolling, fmt.Sprintf("%s: recovery has failed at %s: run `sluice box` there", CodeStuck, c.Journal.Node)
	case c.Journal != nil:
		return Rolling, CodeRolling + ": " + string(c.Journal.Phase)
	case ofTarget && c.Result.Outcome == outcome.RollbackFailed:
		return RollbackFailed, c.Result.Reason
	case ofTarget && c.Result.Outcome == outcome.RolledBack:
		return RolledBack, c.Result.Reason
	case ofTarget && c.Result.Outcome == outcome.Refused:
		return Refused, c.Result.Reason
	case !contract.Channel(c.Channel).Valid():
		return Behind, because(string(outcome.Configuration), c)
	case p == nil:
		return Waiting, CodeNoPointer + ": nothing is promoted on this channel"
	case c.Running == string(p.Payload.Current.Version):
		return Current, ""
	case c.Held:
		return Held, CodeHeld + ": its owner holds it"
	case ofTarget && c.Result.Outcome == outcome.Deferred:
		return Waiting, c.Result.Reason
	case c.Result != nil && c.Result.PromotedAt.After(p.PromotedAt.Time) && c.Result.Channel == p.Channel:
		return Ahead, CodeAhead + ": it has seen a newer promote than the store shows"
	case now.Sub(p.PromotedAt.Time) > LateAfter+time.Duration(p.Payload.Spread):
		return Behind, because(CodeBehind, c)
	}
	return Waiting, because(CodeSpread, c)
}

// because is why a box has not begun: what it says itself, or what its verify says.
func because(otherwise string, c contract.ComponentStatus) string {
	if f := c.Front; f != nil && f.Verdict != "good" && c.Pending != "" && (c.Result == nil || f.PromotedAt.After(c.Result.PromotedAt.Time)) {
		if (Row{Reason: f.Reason}).known() {
			return f.Reason
		}
		return CodeVerify + ": " + f.Reason
	}
	if c.Pending == "" {
		return otherwise
	}
	if (Row{Reason: c.Pending}).known() {
		return c.Pending
	}
	return otherwise + ": " + c.Pending
}

// StandsOut reports whether somebody should look: -check exits by it.
func (r Row) StandsOut() bool {
	switch r.State {
	case Waiting:
		return r.Late
	case Current, Held:
		return false
	case Rolling:
		return strings.HasPrefix(r.Reason, CodeStuck)
	}
	return true
}
