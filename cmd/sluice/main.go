// Sluice is the operator's command, and the window of a box's owner.
//
// The operator's verbs read and write a store; those of a box read its
// world-readable files, and enroll, hold and resume change it as root.
package main

import (
	"os"
	"slices"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/program"
)

func main() {
	// `sluice router update` is `sluice update router`.
	if a := os.Args; len(a) > 2 && !slices.ContainsFunc(verbs(), func(c *ffcli.Command) bool { return c.Name == a[1] }) &&
		slices.ContainsFunc(verbs(), func(c *ffcli.Command) bool { return c.Name == a[2] && takesComponent[a[2]] }) {
		a[1], a[2] = a[2], a[1]
	}
	program.Main(&ffcli.Command{Name: "sluice", ShortHelp: "keep boxes at the build that was promoted", ShortUsage: "sluice VERB [flags]", Subcommands: verbs()})
}

var takesComponent = map[string]bool{"update": true, "rollback": true, "refresh": true}

func verbs() []*ffcli.Command {
	return []*ffcli.Command{keygen(), initialize(), pack(), update(), rollback(), refresh(), status(), why(), trustVerb(), doorVerb(), enrollBox(), box(), hold(), resume()}
}
