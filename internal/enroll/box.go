package enroll

import (
	"fmt"
	"os"
	"path/filepath"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// A BoxView is what `sluice box --json` prints.
type BoxView struct {
	Schema     contract.Step                        `json:"schema"`
	Components map[contract.Component]ComponentView `json:"components"`
	Todo       []string                             `json:"todo"` // what its owner should run
}

// A ComponentView is one component of a BoxView.
type ComponentView struct {
	Channel string                 `json:"channel"`
	Running string                 `json:"running"`
	Good    string                 `json:"good"`
	Pending string                 `json:"pending"`
	Held    bool                   `json:"held"`
	Result  *contract.Result       `json:"result"`
	Journal *contract.JournalBrief `json:"journal"`
	Trial   *contract.Trial        `json:"trial"` // a self-update that has yet to prove itself in use
	Drift   []contract.DriftRef    `json:"drift"` // what is not as the good build made it
}

// View reads what this box runs, from world-readable files only.
func View(root layout.Root) (BoxView, error) {
	v := BoxView{Schema: contract.One, Components: map[contract.Component]ComponentView{}, Todo: []string{}}
	names, err := config.Components(root)
	if err != nil {
		return v, err
	}
	if len(names) == 0 {
		return v, outcome.Config("this is no box yet: `sluice enroll FILE` makes it one")
	}
	for _, name := range names {
		v.Components[name] = v.component(record.State{Root: root, Name: name})
	}
	if config.Held(root) {
		v.Todo = append(v.Todo, "sluice resume")
	}
	return v, nil
}

func (v *BoxView) component(s record.State) ComponentView {
	c := ComponentView{Held: config.Held(s.Root), Trial: record.Optional[contract.Trial](s, layout.Trial), Drift: []contract.DriftRef{}}
	if d := record.Optional[contract.Drift](s, layout.Drift); d != nil {
		c.Drift = d.Refs
		for _, r := range d.Refs {
			v.Todo = append(v.Todo, fmt.Sprintf("look at %s of %s, which is %s: %s", r.Ref, s.Name, r.State, r.Text))
		}
	}
	if conf, err := config.LoadComponent(s.Root, s.Name); err != nil {
		v.Todo = append(v.Todo, "mend: "+err.Error())
	} else {
		c.Channel = string(conf.Channel)
	}
	if set, err := s.Trust(); err != nil {
		v.Todo = append(v.Todo, "mend: "+err.Error())
	} else if err := set.Expired(contract.At(time.Now())); err != nil {
		v.Todo = append(v.Todo, "tell the operator: "+err.Error())
	}
	c.Running, c.Good = link(s, layout.Current), link(s, layout.Good)
	if r, ok, err := record.Load[contract.Result](s, layout.Result); err != nil {
		v.Todo = append(v.Todo, "look at: "+err.Error())
	} else if ok {
		c.Result = &r
		if r.Outcome == outcome.RollbackFailed {
			v.Todo = append(v.Todo, fmt.Sprintf("look at %s, whose good build does not pass its gate; then promote another", s.Name))
		}
	}
	if staged, ok, err := record.Load[contract.Staged](s, layout.StagedRecord); ok && err == nil && string(staged.Version) != c.Good && (c.Result == nil || staged.PromotedAt.After(c.Result.PromotedAt.Time)) {
		c.Pending = string(staged.Version)
	}
	if j, ok, err := record.Load[contract.Journal](s, layout.Journal); err != nil {
		v.Todo = append(v.Todo, s.RecoverCommand())
	} else if ok {
		c.Journal = &contract.JournalBrief{Phase: j.Phase, Node: j.Node, Tries: j.Tries}
		if j.Tries > 0 {
			v.Todo = append(v.Todo, s.RecoverCommand())
		}
	}
	return c
}

func link(s record.State, p layout.Place) string {
	target, err := os.Readlink(s.Path(p))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}
