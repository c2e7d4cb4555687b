package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/token"
)

func doorVerb() *ffcli.Command {
	return &ffcli.Command{Name: "door", ShortHelp: "say which boxes a door lets in", ShortUsage: "sluice door token LABEL", Subcommands: []*ffcli.Command{doorToken()}}
}

func doorToken() *ffcli.Command {
	set := flag.NewFlagSet("sluice door token", flag.ContinueOnError)
	url := set.String("store", "", "`URL` of the store that the door serves")
	fleet := set.String("fleet", "", "`name` of the box's fleet, if it is one of fleets/NAME in the store")
	revoke := set.Bool("revoke", false, "make the box's token count no more, and make none")
	return &ffcli.Command{Name: "token", ShortHelp: "make the token that a door knows a box by", ShortUsage: "sluice door token LABEL > FILE", FlagSet: set,
		LongHelp: "Prints the token, once: the store keeps its hash alone. An earlier token of the box counts no more.\nThe box is enrolled with sluice enroll DEPLOYMENT -token-file FILE.",
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say which box, by its label, and only that")
			}
			label, err := contract.Parse[contract.Label](args[0])
			if err != nil {
				return &outcome.UsageError{Err: err}
			}
			if *fleet != "" {
				if _, err := contract.Parse[contract.Label](*fleet); err != nil {
					return outcome.Usage("-fleet %q is no name: a to z, 0 to 9, . and -", *fleet)
				}
			}
			s, err := openStore(*url)
			if err != nil {
				return err
			}
			if *revoke {
				found, err := token.Revoke(ctx, s, label, *fleet)
				if err == nil && !found {
					err = fmt.Errorf("box %s has no token", label)
				}
				return err
			}
			made, err := token.Make(ctx, s, label, *fleet, time.Now())
			if err != nil {
				return err
			}
			fmt.Println(made)
			fmt.Fprintf(os.Stderr, "box %s is let in by this token from now on, and by no earlier one; it is not kept anywhere\n", label)
			return nil
		}}
}
