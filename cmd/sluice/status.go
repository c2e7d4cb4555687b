package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/program"
)

func status() *ffcli.Command {
	set := flag.NewFlagSet("sluice status", flag.ContinueOnError)
	var (
		url     = set.String("store", "", "`URL` of the store")
		channel = set.String("channel", "", "only this `channel`")
		asJSON  = set.Bool("json", false, "print JSON")
		check   = set.Bool("check", false, "exit 1 if a box stands out, or a document expires soon")
		watch   = set.Bool("watch", false, "show it again every two seconds, until stopped")
	)
	return &ffcli.Command{Name: "status", ShortHelp: "what every box runs, and how its last promote ended", ShortUsage: "sluice status [-channel NAME] [-json] [-check]", FlagSet: set,
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			s, err := openStore(*url)
			if err != nil {
				return err
			}
			trusted, err := fleet.Trust(ctx, s)
			if contract.IsUpgrade(err) && trusted.Number > 0 { // what can be told, is
				fmt.Fprintf(os.Stderr, "needs a newer sluice: %s\n", err)
			} else if err != nil {
				return err
			}
			show := func() (said string, err error) {
				all, err := fleet.Status(ctx, s, trusted, time.Now())
				if err != nil {
					return "", err
				}
				standOut := 0
				shown := []fleet.Row{}
				for _, r := range all {
					if *channel == "" || r.Channel == *channel {
						shown = append(shown, r)
						if r.StandsOut() {
							standOut++
						}
					}
				}
				if *asJSON {
					_, err = os.Stdout.Write(contract.EncodeJSON(map[string]any{"schema": contract.One, "boxes": shown}))
				} else {
					err = table(os.Stdout, shown)
				}
				expiries := fleet.Expiries(shown, trusted, time.Now())
				for _, line := range expiries {
					fmt.Fprintln(os.Stderr, line)
				}
				if standOut+len(expiries) > 0 {
					said = fmt.Sprintf("%d of %d stand out, and %d documents have expired or will soon", standOut, len(shown), len(expiries))
				}
				return said, err
			}
			for {
				if *watch && !*asJSON {
					fmt.Print("\033[H\033[J") // home, and clear
				}
				said, err := show()
				if err != nil {
					return err
				}
				if !*watch {
					if *check && said != "" {
						return errors.New(said)
					}
					return nil
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(watchEvery):
				}
			}
		}}
}

// watchEvery is how often a watched status is read anew.
const watchEvery = 2 * time.Second

func table(w io.Writer, rows []fleet.Row) error {
	t := tabwriter.NewWriter(w, 0, 2, 2, ' ', 0)
	fmt.Fprintln(t, "BOX\tCOMPONENT\tCHANNEL\tRUNNING\tTARGET\tSTATE\tAGE\tREASON")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", r.Label, orDash(r.Component), orDash(r.Channel), orDash(r.Running), orDash(r.Target), r.State,
			time.Duration(r.AgeS)*time.Second, orDash(r.Reason))
	}
	return t.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
