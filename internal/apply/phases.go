// Package apply turns "the box is on set A" into "the box is on set B, and B
// has proved itself", or puts A back. This page is the whole of it; the rest
// of the package is how.
//
//	opening ──► converging ──► gating ──► gated ──► (recorded: applied)
//	                │             │
//	                └──────┬──────┘ failed, or found open by recover
//	                       ▼
//	                   reverting ──► reverted ──► (recorded: rolled-back)
//
// Two moments are named apart. The switch is the rename of `current`, which
// readers see; it is one node of the forward walk. The commit is the durable
// write of phase gated. Before the commit every crash ends on the old build,
// after it every crash ends on the new one (I1). Each is marked once in the
// code, in capitals.
package apply

import "sluice/internal/contract"

// The phases of a transaction, as journal.json names them.
const (
	Opening    contract.Phase = "opening"
	Converging contract.Phase = "converging"
	Gating     contract.Phase = "gating"
	Gated      contract.Phase = "gated"
	Reverting  contract.Phase = "reverting"
	Reverted   contract.Phase = "reverted"
)

// A Way is what recovery does with an open journal.
type Way string

// The ways.
const (
	Back    Way = "back"    // converge to the good set, and record why
	Forward Way = "forward" // arm and record
	Record  Way = "record"  // only record
)

// Phases is what each phase means: what the disk may be, and what recovery
// does.
var Phases = []struct {
	Phase    contract.Phase
	Disk     string
	Recovery Way
}{
	{Opening, "nothing has changed", Back},
	{Converging, "changing; the journal's node says how far; the switch is in here", Back},
	{Gating, "all of the new build is in place; its gate or soak is running", Back},
	{Gated, "the same, proved. Undoing a build that proved itself because its recorder was killed would be a rollback with no reason", Forward},
	{Reverting, "going back", Back},
	{Reverted, "all of the good build is in place, and has passed its gate", Record},
}

// Recovery returns what recovery does in a phase. One it does not know is
// treated as converging: back to good is always right.
func Recovery(p contract.Phase) Way {
	for _, row := range Phases {
		if row.Phase == p {
			return row.Recovery
		}
	}
	return Back
}
