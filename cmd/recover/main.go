// Recover finishes or undoes a roll that was cut. systemd runs it at boot and
// when apply has failed.
//
// Reads and writes what apply does. It needs nothing but root's own files, and
// runs from the good set, never from a candidate.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/apply"
	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

func main() { program.Main(command()) }

func command() *ffcli.Command {
	set, common := flag.NewFlagSet("recover", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	boot := set.Bool("boot", false, "recover every component; stop, judge and wait for nothing")
	return &ffcli.Command{Name: "recover", ShortHelp: "finish or undo a roll that was cut", ShortUsage: "recover -component NAME | recover -boot", FlagSet: set,
		LongHelp: "Reads /opt/sluice/NAME/journal.json. Forward from phase gated, back from anywhere else; then the\njournal is removed. Without a journal there is nothing to do.",
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			if *boot == (common.Component != "") {
				return outcome.Usage("say -component NAME or -boot, and only one of them")
			}
			names, err := components(common, *boot)
			if err != nil {
				return err
			}
			manager := systemd.Of(common.Root())
			defer manager.Close()
			box, err := config.LoadBox(common.Root())
			if err != nil {
				program.Log.Warn(fmt.Sprintf("%s, ignoring: recovery goes by the defaults", err))
			}
			var errs []error // one component's failure doesn't stop the next
			for _, name := range names {
				a := &apply.Applier{State: record.State{Root: common.Root(), Disk: &durable.Disk{}, Name: name}, Manager: manager, Box: box, Log: program.Log, Status: program.Status, Now: time.Now}
				errs = append(errs, a.Recover(ctx, *boot))
			}
			return errors.Join(errs...)
		}}
}

// components returns the one that is asked for, or all that have a journal.
func components(common *program.Common, all bool) ([]contract.Component, error) {
	if !all {
		name, err := common.Name()
		return []contract.Component{name}, err
	}
	entries, err := os.ReadDir(common.Root().Path(layout.Opt, ""))
	if err != nil {
		return nil, err
	}
	var names []contract.Component
	for _, e := range entries {
		name, err := contract.Parse[contract.Component](e.Name())
		if err == nil && (record.State{Root: common.Root(), Name: name}).Open() {
			names = append(names, name)
		}
	}
	return names, nil
}
