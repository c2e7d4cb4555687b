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
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/apply"
	"sluice/internal/config"
	"sluice/internal/durable"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/selftest"
	"sluice/internal/systemd"
)

func main() { program.Main(command()) }

func command() *ffcli.Command {
	set, common := flag.NewFlagSet("recover", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	check := set.Bool("check", false, "change nothing: try this build's programs on a scratch tree, and read the box's records")
	boot := set.Bool("boot", false, "recover every component; stop, judge and wait for nothing")
	return &ffcli.Command{Name: "recover", ShortHelp: "finish or undo a roll that was cut", ShortUsage: "recover -component NAME | recover -boot | recover -check | recover heal", FlagSet: set, Subcommands: []*ffcli.Command{heal()},
		LongHelp: "Reads /opt/sluice/NAME/journal.json. Forward from phase gated, only to record from\nreverted, back from anywhere else; then the journal is removed. Without a journal there is nothing to do.",
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			if *check {
				return selftest.Run(ctx, common.Root(), program.Status)
			}
			if *boot == (common.Component != "") {
				return outcome.Usage("say -component NAME or -boot, and only one of them")
			}
			if *boot {
				return each(common, record.State.Open, func(a *apply.Applier) error { return a.Recover(ctx, true) })
			}
			state, err := common.State()
			if err != nil {
				return err
			}
			manager := systemd.Of(common.Root())
			defer manager.Close()
			return applier(state, manager).Recover(ctx, false)
		}}
}

func heal() *ffcli.Command {
	set, common := flag.NewFlagSet("recover heal", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	return &ffcli.Command{Name: "heal", ShortHelp: "put right what nothing else would", ShortUsage: "recover heal", FlagSet: set,
		LongHelp: "Starts path units that do not watch, removes what killed runs left, and starts the recovery of a\nroll that nobody is at work on. What is not as the good build made it is told in drift.json. A\nself-update that does not prove itself within an hour is put back. It restarts no service of a\ncomponent.",
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			all := func(record.State) bool { return true }
			return each(common, all, func(a *apply.Applier) error { return a.Heal(ctx) })
		}}
}

func applier(state record.State, manager systemd.Manager) *apply.Applier {
	box, err := config.LoadBox(state.Root)
	if err != nil {
		program.Log.Warn(fmt.Sprintf("%s, ignoring: recovery goes by the defaults", err))
	}
	return &apply.Applier{State: state, Manager: manager, Box: box, Log: program.Log, Status: program.Status, Now: time.Now, Auto: program.Started()}
}

// each does something for every component of the box that is wanted. One
// component's failure doesn't stop the next.
func each(common *program.Common, wanted func(record.State) bool, do func(*apply.Applier) error) error {
	manager := systemd.Of(common.Root())
	defer manager.Close()
	names, err := record.Components(common.Root())
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		state := record.State{Root: common.Root(), Disk: &durable.Disk{}, Name: name}
		if wanted(state) && (common.Component == "" || common.Component == string(name)) {
			errs = append(errs, do(applier(state, manager)))
		}
	}
	return errors.Join(errs...)
}
