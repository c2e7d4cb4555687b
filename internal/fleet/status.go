package fleet

import (
	"context"
	"fmt"
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

// stuck begins the reason of a box that rolls and does not get anywhere.
const stuck = "stuck"

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
}

// Status reads pointers and heartbeats and says in which state every box is.
// A heartbeat that can't be read is a row of its own.
func Status(ctx context.Context, s store.Store, set trust.Set, now time.Time) ([]Row, error) {
	keys, err := s.List(ctx, contract.StatusPrefix)
	if err != nil {
		return nil, err
	}
	rows := []Row{}
	pointers := map[string]shown{}
	for _, key := range keys {
		label, ok := strings.CutSuffix(strings.TrimPrefix(key, contract.StatusPrefix), ".json")
		if !ok {
			continue
		}
		o, err := s.Get(ctx, key, contract.MaxHeartbeat, "")
		if store.IsNotExist(err) {
			continue
		}
		var beat contract.Heartbeat
		if err == nil {
			beat, err = contract.Spoken.DecodeHeartbeat(o.Data)
		}
		if err != nil {
			rows = append(rows, Row{Label: label, State: Unreadable, Reason: err.Error(), Speaks: contract.Speaks{}})
			continue
		}
		for name, c := range beat.Components {
			key := contract.PointerKey(name, c.Channel)
			if _, known := pointers[key]; !known {
				pointers[key] = readPointer(ctx, s, set, name, c.Channel)
			}
			r := row(beat, name, c, pointers[key].pointer, now)
			if err := pointers[key].err; err != nil {
				r.State, r.Reason = Unreadable, err.Error()
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

// shown is what the store shows of a channel: a pointer, none, or one that
// can't be read or does not count.
type shown struct {
	pointer *contract.Pointer
	err     error
}

func readPointer(ctx context.Context, s store.Store, set trust.Set, c contract.Component, ch contract.Channel) shown {
	o, err := s.Get(ctx, contract.PointerKey(c, ch), contract.MaxEnvelope, "")
	if store.IsNotExist(err) {
		return shown{}
	}
	if err != nil {
		return shown{err: err}
	}
	p, err := set.Pointer(o.Data, c, ch)
	if err != nil {
		return shown{err: err}
	}
	return shown{pointer: &p.Pointer}
}

func row(beat contract.Heartbeat, name contract.Component, c contract.ComponentStatus, p *contract.Pointer, now time.Time) Row {
	r := Row{Label: string(beat.Label), Fleet: beat.Fleet, Platform: string(beat.Platform), Component: string(name), Channel: string(c.Channel),
		Running: c.Running, At: beat.At.String(), AgeS: int64(now.Sub(beat.At.Time) / time.Second), Downloaded: c.Downloaded, Speaks: beat.Speaks}
	if p != nil {
		r.Target = string(p.Payload.Current.Version)
	}
	if c.Result != nil {
		r.Outcome = string(c.Result.Outcome)
	}
	r.State, r.Reason = state(c, p, now.Sub(beat.At.Time), now)
	return r
}

// state is a box's one state, and the one reason for it.
func state(c contract.ComponentStatus, p *contract.Pointer, age time.Duration, now time.Time) (State, string) {
	ofTarget := p != nil && c.Result != nil && c.Result.Tuple.Equal(p.Tuple())
	switch {
	case age > SilentAfter:
		return Silent, "no heartbeat for " + age.Round(time.Second).String()
	case c.Journal != nil && c.Journal.Tries > 1:
		return Rolling, fmt.Sprintf("%s: recovery has failed at %s: run `sluice box` there", stuck, c.Journal.Node)
	case c.Journal != nil:
		return Rolling, string(c.Journal.Phase)
	case ofTarget && c.Result.Outcome == outcome.RollbackFailed:
		return RollbackFailed, c.Result.Reason
	case ofTarget && c.Result.Outcome == outcome.RolledBack:
		return RolledBack, c.Result.Reason
	case ofTarget && c.Result.Outcome == outcome.Refused:
		return Refused, c.Result.Reason
	case p == nil:
		return Waiting, "nothing is promoted on this channel"
	case c.Running == string(p.Payload.Current.Version):
		return Current, ""
	case c.Held:
		return Held, "its owner holds it"
	case ofTarget && c.Result.Outcome == outcome.Deferred:
		return Waiting, c.Result.Reason
	case c.Result != nil && c.Result.PromotedAt.After(p.PromotedAt.Time) && c.Result.Channel == p.Channel:
		return Ahead, "it has seen a newer promote than the store shows"
	case now.Sub(p.PromotedAt.Time) > LateAfter+time.Duration(p.Payload.Spread):
		return Behind, c.Pending
	}
	return Waiting, c.Pending
}

// StandsOut reports whether somebody should look: -check exits by it.
func (r Row) StandsOut() bool {
	switch r.State {
	case Current, Waiting, Held:
		return false
	case Rolling:
		return strings.HasPrefix(r.Reason, stuck)
	}
	return true
}
