// Stage is root's gate to the unprivileged side. systemd starts `stage
// -component NAME` when verify has raised its marker.
//
// Reads the hint, the pointer that sluice-pointer@ got, and the verified tree;
// writes sets/<version> and root's records; raises the marker staged. It runs
// nothing, and has no network.
package main

import (
	"context"
	"flag"
	"fmt"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/marker"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/stage"
)

func main() { program.Main(command()) }

// lockWait is how long a run waits for the component's lock, which a roll
// holds through its soak.
const lockWait = 20 * time.Minute

func command() *ffcli.Command {
	set, common := flag.NewFlagSet("stage", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	dry := set.Bool("dry-run", false, "copy and check in a scratch folder, list what would change, move no state")
	return &ffcli.Command{Name: "stage", ShortHelp: "stage what is asked for, and believe none of it", ShortUsage: "stage -component NAME [-dry-run]", FlagSet: set,
		LongHelp: "Reads /data/sluice/NAME/verified and /run/sluice-pointer/NAME. Writes /opt/sluice/NAME: sets/,\nseen.json, versions.json, staged.json and, if it ended here, result.json. Raises the marker\n`staged` for apply.",
		Exec: common.Exec(func(ctx context.Context, state record.State) error {
			defer program.LastAtLeast(marker.MinRun, time.Now())
			wait, cancel := context.WithTimeout(ctx, lockWait)
			defer cancel()
			s := &stage.Stager{State: state, Log: program.Log, Status: program.Status, DryRun: *dry, Now: time.Now, Built: program.Built(), Plan: func(_ string, m contract.Manifest) error {
				for _, line := range stage.Changes(state, m) {
					fmt.Println(line)
				}
				return nil
			}}
			if !common.Root().Live() {
				s.Ask = s.AskChild
			}
			return s.Run(wait)
		})}
}
