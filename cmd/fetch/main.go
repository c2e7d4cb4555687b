// Fetch is the program of a box that talks to the network. systemd runs
// `fetch watch` all day and `fetch pointer` for root.
//
// Reads the store, /etc/sluice and root's records; writes incoming/ of each
// component and the heartbeat; raises the marker fetched. It verifies no
// bundle and decides nothing that root does not decide again.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fetch"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/store"
)

func main() { program.Main(command()) }

func command() *ffcli.Command {
	return &ffcli.Command{Name: "fetch", ShortHelp: "bring what this box's channels promote", ShortUsage: "fetch watch|once|pointer [flags]",
		LongHelp: "Reads the store, /etc/sluice and root's records. Writes /data/sluice/*/incoming and the\nbox's heartbeat in the store. Raises the marker `fetched` for verify.",
		Subcommands: []*ffcli.Command{
			verb("watch", "follow the store until stopped", func(ctx context.Context, f *fetch.Fetcher) error {
				program.Ready()
				return f.Watch(ctx)
			}),
			verb("once", "look once at every component", func(ctx context.Context, f *fetch.Fetcher) error { return f.Once(ctx) }),
			pointer(),
		}}
}

// flags are the flags of every verb; box.conf fills what they leave open.
func flags(name string) (*flag.FlagSet, *program.Common, *config.Box) {
	set, common, box := flag.NewFlagSet("fetch "+name, flag.ContinueOnError), &program.Common{}, &config.Box{}
	common.Flags(set)
	box.Flags(set)
	return set, common, box
}

// open completes the configuration from box.conf and opens the store.
func open(set *flag.FlagSet, common *program.Common, box *config.Box) (store.Store, error) {
	if err := config.Complete(set, common.Root()); err != nil {
		return nil, err
	}
	if err := box.Check(); err != nil {
		return nil, err
	}
	if box.Store == "" {
		return nil, outcome.Config("no store: set SLUICE_STORE in %q, or give -store URL", common.Root().Path(layout.BoxConf, ""))
	}
	return store.OpenAs(box.Store, store.IdentityIn(common.Root().Path(layout.Identity, "")))
}

func verb(name, short string, run func(context.Context, *fetch.Fetcher) error) *ffcli.Command {
	set, common, box := flags(name)
	return &ffcli.Command{Name: name, ShortHelp: short, ShortUsage: "fetch " + name + " [flags]", FlagSet: set, Exec: func(ctx context.Context, args []string) error {
		if err := program.NoOperands(args); err != nil {
			return err
		}
		root := common.Root()
		var only contract.Component
		if common.Component != "" {
			var err error
			if only, err = common.Name(); err != nil {
				return err
			}
		}
		if uid, err := root.UID(layout.UserFetch); err != nil || uid != os.Geteuid() {
			return outcome.Config("fetch runs as %s, so that verify accepts its files: runuser -u %s -- …, or -root DIR to work on another tree", layout.UserFetch, layout.UserFetch)
		}
		s, err := open(set, common, box)
		if err != nil {
			return err
		}
		disk := &durable.Disk{Replace: true}
		if err := disk.Mkdir(root.Path(layout.FetchRun, ""), 0o755); err != nil {
			return err
		}
		now, cancel := context.WithCancel(ctx)
		cancel() // a second fetch is told so at once
		lock, err := durable.Acquire(now, root.Path(layout.FetchLock, ""))
		if err != nil {
			return err
		}
		defer lock.Release()
		return run(ctx, &fetch.Fetcher{Root: root, Disk: disk, Store: s, Box: *box, Only: only, Log: program.Log, Status: program.Status, Beat: program.Beat})
	}}
}

func pointer() *ffcli.Command {
	set, common, box := flags("pointer")
	return &ffcli.Command{Name: "pointer", ShortHelp: "get one component's pointer for root", ShortUsage: "fetch pointer -component NAME [flags]", FlagSet: set,
		LongHelp: "Writes the raw envelope to the folder that systemd made for it ($RUNTIME_DIRECTORY), with the\ntrust documents that root does not have yet; without one, the envelope to standard output.",
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			name, err := common.Name()
			if err != nil {
				return err
			}
			s, err := open(set, common, box)
			if err != nil {
				return err
			}
			if err := fetch.Pointer(ctx, common.Root(), s, name, os.Getenv("RUNTIME_DIRECTORY"), os.Stdout); err != nil {
				return fmt.Errorf("getting the pointer of %s: %w", name, err)
			}
			return nil
		}}
}
