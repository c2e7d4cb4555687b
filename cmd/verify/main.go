// Verify parses what came from the network. systemd starts `verify -component
// NAME` when fetch has raised its marker.
//
// Reads incoming/ and root's records; writes verified/<version>/tree, the hint
// and its verdict; raises the marker requested. Root believes none of it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/bundle"
	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/verify"
)

func main() { program.Main(command()) }

// lockWait is how long a run waits for another component's to end.
const lockWait = 10 * time.Minute

func command() *ffcli.Command {
	set, common := flag.NewFlagSet("verify", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	return &ffcli.Command{Name: "verify", ShortHelp: "verify what was fetched, without a network", ShortUsage: "verify -component NAME | verify pointer -component NAME FILE | verify bundle FILE", FlagSet: set,
		LongHelp: "Reads /data/sluice/NAME/incoming. Writes /data/sluice/NAME/verified: the tree, the hint\n(requested.json) and the verdict. Raises the marker `requested` for stage.",
		Exec: common.Exec(func(ctx context.Context, state record.State) error {
			defer program.LastAtLeast(marker.MinRun, time.Now())
			if err := state.Disk.Mkdir(state.Path(layout.VerifyRun), 0o755); err != nil {
				return err
			}
			wait, cancel := context.WithTimeout(ctx, lockWait)
			defer cancel()
			state.Disk.Replace = true
			v := &verify.Verifier{State: state, Log: program.Log, Status: program.Status}
			return v.Run(wait)
		}),
		Subcommands: []*ffcli.Command{pointer(), file()}}
}

func one(args []string) (string, error) {
	if len(args) != 1 {
		return "", outcome.Usage("say which file, and only that")
	}
	return args[0], nil
}

func pointer() *ffcli.Command {
	set, common := flag.NewFlagSet("verify pointer", flag.ContinueOnError), &program.Common{}
	common.Flags(set)
	return &ffcli.Command{Name: "pointer", ShortHelp: "check a pointer with this box's trust and channel", ShortUsage: "verify pointer -component NAME FILE", FlagSet: set,
		Exec: func(_ context.Context, args []string) error {
			name, err := one(args)
			if err != nil {
				return err
			}
			state, err := common.State()
			if err != nil {
				return err
			}
			data, err := record.ReadFile(name, contract.MaxEnvelope)
			if err != nil {
				return outcome.Refuse(outcome.BadSignature, "%w", err)
			}
			set, err := state.Trust()
			if err != nil {
				return err
			}
			p, err := verify.CheckPointer(state, set, data)
			if err != nil {
				return err
			}
			fmt.Printf("%s %s on %s, promoted at %s, signed by %v\n", p.Component, p.Payload.Current.Version, p.Channel, p.PromotedAt, p.Water().KeyIDs)
			return nil
		}}
}

func file() *ffcli.Command {
	return &ffcli.Command{Name: "bundle", ShortHelp: "check a bundle by its own words", ShortUsage: "verify bundle FILE",
		LongHelp: "What is checked is that the bundle keeps its own rules and has the bytes that its manifest\nlists. Who made it, only a pointer says.",
		Exec: func(_ context.Context, args []string) error {
			name, err := one(args)
			if err != nil {
				return err
			}
			info, err := bundle.InspectFile(name)
			if errors.Is(err, bundle.ErrBad) {
				return outcome.Refuse(outcome.BadBundle, "%w", err)
			}
			if err != nil {
				return err
			}
			m := info.Manifest
			fmt.Printf("%s %s for %s: %d files, %d bytes unpacked\nsha256 %s\nmanifest %s\n", m.Component, m.Version, m.Platform, len(m.Files), m.Size(), info.SHA256, info.ManifestSHA256)
			return nil
		}}
}
