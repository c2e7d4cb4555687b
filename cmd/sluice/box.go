package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/enroll"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/systemd"
)

func boxFlags(verb string) (*flag.FlagSet, *string) {
	set := flag.NewFlagSet("sluice "+verb, flag.ContinueOnError)
	return set, set.String("root", "/", "work on the tree below this `folder`")
}

func enrollBox() *ffcli.Command {
	set, root := boxFlags("enroll")
	label := set.String("label", "", "`name` of this box (default: the deployment's, else the host's name)")
	prove := map[string]*string{
		store.S3File:         set.String("s3-credentials", "", "`file` with credentials for S3, in AWS shared form; kept in /etc/sluice/identity, as are the following"),
		store.TokenFile:      set.String("token-file", "", "`file` with the token that a door knows this box by"),
		store.ClientCertFile: set.String("client-cert", "", "`file` of the certificate that a door knows this box by, PEM"),
		store.ClientKeyFile:  set.String("client-key", "", "`file` of its key, PEM"),
		store.DoorCAFile:     set.String("ca", "", "`file` of who signs the door's certificate, if the system does not know, PEM"),
	}
	return &ffcli.Command{Name: "enroll", ShortHelp: "make this machine a box", ShortUsage: "sluice enroll FILE [-label NAME]", FlagSet: set,
		LongHelp: "Installs the component sluice and follows what the deployment names. Run again it adds what is\nmissing.",
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say which deployment file, and only that")
			}
			data, err := record.ReadFile(args[0], contract.MaxEnvelope)
			if err != nil {
				return outcome.Config("%w", err)
			}
			d, err := contract.Spoken.DecodeDeployment(data)
			if err != nil {
				return outcome.Config("%q: %w", args[0], err)
			}
			given := map[string]string{}
			for name, file := range prove {
				if *file != "" {
					given[name] = *file
				}
			}
			manager := systemd.Of(layout.Root(*root))
			defer manager.Close()
			done, end := progress("downloading sluice")
			defer end()
			e := &enroll.Enroller{Root: layout.Root(*root), Disk: &durable.Disk{}, Manager: manager, Deployment: d, Label: *label, Prove: given,
				Log: program.Log, Status: program.Status, Progress: done}
			if err := e.Run(ctx); err != nil {
				return err
			}
			fmt.Println("enrolled; `sluice box` shows what it does")
			return nil
		}}
}

func box() *ffcli.Command {
	set, root := boxFlags("box")
	asJSON := set.Bool("json", false, "print JSON")
	return &ffcli.Command{Name: "box", ShortHelp: "what this box runs, and how its last promote ended", ShortUsage: "sluice box [-json]", FlagSet: set,
		Exec: func(_ context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			v, err := enroll.View(layout.Root(*root))
			if err != nil {
				return err
			}
			if *asJSON {
				_, err := os.Stdout.Write(contract.EncodeJSON(v))
				return err
			}
			for _, todo := range v.Todo {
				fmt.Println("to do:", plain(todo))
			}
			t := tabwriter.NewWriter(os.Stdout, 0, 2, 2, ' ', 0)
			fmt.Fprintln(t, "COMPONENT\tCHANNEL\tRUNNING\tGOOD\tSTATE\tLAST")
			for _, name := range slices.Sorted(maps.Keys(v.Components)) {
				c := v.Components[name]
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", name, orDash(c.Channel), orDash(c.Running), orDash(c.Good), boxState(c), lastResult(c.Result))
			}
			return t.Flush()
		}}
}

func boxState(c enroll.ComponentView) string {
	switch {
	case c.Journal != nil:
		return fmt.Sprintf("rolling (%s)", c.Journal.Phase)
	case c.Held:
		return "held"
	case c.Trial != nil:
		return "on trial"
	case c.Pending != "":
		return "staged " + c.Pending
	}
	return "at rest"
}

func lastResult(r *contract.Result) string {
	if r == nil {
		return "-"
	}
	s := fmt.Sprintf("%s %s %s", r.Version, r.Outcome, r.At.Format(time.RFC3339))
	if r.Reason != "" {
		s += ": " + plain(r.Reason)
	}
	return s
}

func hold() *ffcli.Command {
	set, root := boxFlags("hold")
	return &ffcli.Command{Name: "hold", ShortHelp: "nothing new on this box until resumed", ShortUsage: "sluice hold", FlagSet: set,
		Exec: func(_ context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			return ownerOnly((&durable.Disk{}).WriteFile(layout.Root(*root).Path(layout.Hold, ""), nil, 0o644))
		}}
}

func resume() *ffcli.Command {
	set, root := boxFlags("resume")
	return &ffcli.Command{Name: "resume", ShortHelp: "let this box follow its channels again", ShortUsage: "sluice resume", FlagSet: set,
		Exec: func(_ context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			return ownerOnly((&durable.Disk{}).Remove(layout.Root(*root).Path(layout.Hold, "")))
		}}
}

func ownerOnly(err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return outcome.Config("only the box's owner may: run it as root: %w", err)
	case errors.Is(err, fs.ErrNotExist):
		return outcome.Config("this is no box yet: `sluice enroll FILE` makes it one: %w", err)
	}
	return err
}
