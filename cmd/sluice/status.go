package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/outcome"
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
			trusted, note, err := fleet.TrustToRead(ctx, s)
			if err != nil {
				return err
			}
			if note != "" {
				fmt.Fprintln(os.Stderr, plain(note))
			}
			show := func() (said string, err error) {
				all, err := fleet.Everywhere(ctx, s, trusted, time.Now())
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
	name := func(r fleet.Row) string {
		if r.Fleet == "" {
			return plain(r.Label)
		}
		return plain(r.Fleet + "/" + r.Label)
	}
	fmt.Fprintln(t, "BOX\tCOMPONENT\tCHANNEL\tRUNNING\tTARGET\tSTATE\tAGE\tREASON")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", name(r), orDash(r.Component), orDash(r.Channel), orDash(r.Running), orDash(r.Target), r.State,
			time.Duration(r.AgeS)*time.Second, orDash(r.Reason))
	}
	return t.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return plain(s)
}

func why() *ffcli.Command {
	set := flag.NewFlagSet("sluice why", flag.ContinueOnError)
	url := set.String("store", "", "`URL` of the store")
	asJSON := set.Bool("json", false, "print JSON")
	return &ffcli.Command{Name: "why", ShortHelp: "one box: its state, the one reason, what to do", ShortUsage: "sluice why LABEL|FLEET/LABEL", FlagSet: set,
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say which box, by its label, and only that")
			}
			s, err := openStore(*url)
			if err != nil {
				return err
			}
			trusted, _, err := fleet.TrustToRead(ctx, s)
			if err != nil {
				return err
			}
			rows, err := fleet.Everywhere(ctx, s, trusted, time.Now())
			if err != nil {
				return err
			}
			rows = slices.DeleteFunc(rows, func(r fleet.Row) bool { return r.Label != args[0] && r.Fleet+"/"+r.Label != args[0] })
			if len(rows) == 0 {
				return fmt.Errorf("no box %q has ever published a heartbeat in %s: was it enrolled, and may it write %s?", args[0], s, contract.StatusKey(contract.Label(args[0])))
			}
			if *asJSON {
				out := []map[string]any{}
				for _, r := range rows {
					out = append(out, map[string]any{"row": r, "code": r.Code(), "means": r.Why().Means, "do": r.Why().Do})
				}
				_, err := os.Stdout.Write(contract.EncodeJSON(out))
				return err
			}
			for _, r := range rows {
				fmt.Printf("%s %s on %s: %s, runs %s\n", plain(r.Label), orDash(r.Component), orDash(r.Channel), r.State, orDash(r.Running))
				fmt.Printf("  %s: %s\n", r.Code(), r.Why().Means)
				if r.Reason != "" {
					fmt.Printf("  it says: %s\n", plain(r.Reason))
				}
				fmt.Printf("  to do: %s\n", r.Why().Do)
			}
			return nil
		}}
}
