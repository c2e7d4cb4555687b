// Apply rolls the box to what is staged, or back. systemd starts `apply
// -component NAME` when stage has raised its marker.
//
// Reads sets/ and root's records; writes them, /etc and the service manager's
// state. It never looks at the unprivileged side, and reaches no network
// beyond loopback. Whatever ends it, recover puts the good build back.
package main

import (
	"context"
	"flag"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/apply"
	"sluice/internal/marker"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

func main() { program.Main(command()) }

func command() *ffcli.Command {
	set, common := flag.NewFlagSet("apply", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	again := set.Bool("again", false, "try a promote that has ended here once more")
	return &ffcli.Command{Name: "apply", ShortHelp: "roll this box to what is staged, or back", ShortUsage: "apply -component NAME [-again]", FlagSet: set,
		LongHelp: "Reads /opt/sluice/NAME. Writes it, /etc/systemd/system, /etc/sysusers.d and /etc/tmpfiles.d, and\nrestarts what changed. Ends with applied.json and result.json.",
		Exec: common.Exec(func(ctx context.Context, state record.State) error {
			defer program.LastAtLeast(marker.MinRun, time.Now())
			manager := systemd.Of(common.Root())
			defer manager.Close()
			wait := time.Duration(0) // by hand: say at once who holds it
			if program.Started() {
				wait = apply.LockWait
			}
			locks, cancel := context.WithTimeout(ctx, wait)
			defer cancel()
			a := &apply.Applier{State: state, Manager: manager, Log: program.Log, Status: program.Status, Now: time.Now, Again: *again, Auto: program.Started()}
			return a.Run(ctx, locks)
		})}
}
