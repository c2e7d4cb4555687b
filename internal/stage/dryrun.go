package stage

import (
	"context"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/graph"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// Changes lists the nodes that applying a build would change on this box: what
// would come down, then what would come up. The service manager is not asked,
// since stage has no way to it: units are told by their files alone.
func Changes(state record.State, m contract.Manifest) []string {
	var good node.Build
	if a, ok, err := record.Load[contract.Applied](state, layout.Applied); ok && err == nil {
		if old, _, err := record.Manifest(state.Set(a.Version)); err == nil {
			good = node.Build{Manifest: old, Set: state.Set(a.Version)}
		}
	}
	names, _ := config.Components(state.Root)
	k := node.Maker{State: state, Manager: &systemd.Offline{Root: state.Root}, Components: names}
	target := node.Build{Manifest: m, Set: state.Set(m.Version)}
	dag := k.Ledger(target, good).Fold()
	var down, up []string
	for _, ref := range dag.Order() {
		n, _ := dag.Node(ref)
		switch {
		case !dag.Wanted(ref):
			down = append([]string{"- " + string(ref)}, down...)
		case n.Check == nil || n.Check(context.Background()).Answer != graph.Success:
			up = append(up, "+ "+string(ref))
		}
	}
	return append(down, up...)
}
