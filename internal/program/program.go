// Package program is what every main shares: flags, logging, progress, exit
// status. Only it prints and exits.
package program

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peterbourgon/ff/v3"
	"github.com/peterbourgon/ff/v3/ffcli"
	"golang.org/x/sys/unix"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// Version is set when a release is built.
var Version = "0.0.0-dev"

// Date is when a release was built, in seconds since 1970; set when it is.
var Date = ""

// Built is that date, before which no clock shows anything; a build without one was
// built in 1970.
func Built() time.Time {
	s, _ := strconv.ParseInt(Date, 10, 64)
	return time.Unix(s, 0)
}

// exitHelp ends every help text: all programs end alike.
const exitHelp = `
exit status: 0 done, or nothing to do · 1 failed, refused or rolled back
             2 the command line is wrong · 69 deferred, may resolve by itself
             78 the configuration is wrong`

// Common are the flags that all programs of a box have.
type Common struct {
	RootDir   string
	Component string
}

// Flags adds them to a flag set.
func (c *Common) Flags(fs *flag.FlagSet) {
	fs.StringVar(&c.RootDir, "root", "/", "work on the tree below this `folder`; the service manager is only spoken to for /")
	fs.StringVar(&c.Component, "component", "", "`name` of the component to work on")
}

// State returns root's state of the component to work on.
func (c *Common) State() (record.State, error) {
	name, err := c.Name()
	return record.State{Root: c.Root(), Disk: &durable.Disk{}, Name: name}, err
}

// Exec makes a command of what is done with the component to work on.
func (c *Common) Exec(do func(ctx context.Context, state record.State) error) func(context.Context, []string) error {
	return func(ctx context.Context, args []string) error {
		if err := NoOperands(args); err != nil {
			return err
		}
		state, err := c.State()
		if err != nil {
			return err
		}
		return do(ctx, state)
	}
}

// Started reports whether the service manager started this program, and not
// somebody by hand.
func Started() bool { return os.Getenv("INVOCATION_ID") != "" }

// LastAtLeast keeps a run that a path unit started from being over too soon:
// somebody who raises markers without end could make it spin.
func LastAtLeast(d time.Duration, since time.Time) {
	if Started() {
		time.Sleep(time.Until(since.Add(d)))
	}
}

// Root returns the tree to work on.
func (c *Common) Root() layout.Root { return layout.Root(c.RootDir) }

// Name returns the component to work on.
func (c *Common) Name() (contract.Component, error) {
	if c.Component == "" {
		return "", outcome.Usage("say which component: -component NAME")
	}
	name, err := contract.Parse[contract.Component](c.Component)
	if err != nil {
		return "", &outcome.UsageError{Err: err}
	}
	return name, nil
}

// Main runs a command tree and exits. ctx ends at SIGTERM and SIGINT.
func Main(root *ffcli.Command) {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	err := Run(ctx, root, os.Args[1:], os.Stdout)
	stop()
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(outcome.ExitDone)
	}
	if err != nil {
		Report(root.Name, err)
	}
	os.Exit(outcome.Exit(err))
}

// Run parses args and runs the command they name. Flags may stand before or
// after operands; -- ends them. -help writes to out and answers flag.ErrHelp.
func Run(ctx context.Context, root *ffcli.Command, args []string, out io.Writer) error {
	var help string
	known := map[string]bool{}
	prepare(root, &help, known)
	if err := checkEnvironment(known); err != nil {
		return err
	}
	if slices.Equal(args, []string{"-version"}) || slices.Equal(args, []string{"--version"}) {
		fmt.Fprintln(out, root.Name, Version)
		return nil
	}
	args, err := arrange(root, args)
	if err != nil {
		return &outcome.UsageError{Err: err}
	}
	err = root.Parse(args)
	var none ffcli.NoExecError
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprintln(out, help)
		return err
	case errors.As(err, &none):
		return outcome.Usage("say what to do: %s -help lists it", root.Name)
	case err != nil:
		return &outcome.UsageError{Err: err}
	}
	return root.Run(ctx)
}

// prepare makes a command tree quiet: errors come back instead of being
// printed, help is handed over, environment variables fill flags, whose names
// are collected.
func prepare(c *ffcli.Command, help *string, known map[string]bool) {
	if c.FlagSet == nil {
		c.FlagSet = flag.NewFlagSet(c.Name, flag.ContinueOnError)
	}
	c.FlagSet.SetOutput(io.Discard)
	c.FlagSet.VisitAll(func(f *flag.Flag) { known[f.Name] = true })
	c.Options = append(c.Options, ff.WithEnvVarPrefix(config.EnvPrefix))
	c.UsageFunc = func(c *ffcli.Command) string {
		*help = strings.TrimSpace(ffcli.DefaultUsageFunc(c)) + "\n" + exitHelp
		return ""
	}
	for _, s := range c.Subcommands {
		prepare(s, help, known)
	}
}

// arrange moves flags in front of operands, since the flag package stops at
// the first operand: `update edge -channel canary` would promote to the wrong
// channel without a word. Words that name subcommands stay where they are.
func arrange(c *ffcli.Command, args []string) ([]string, error) {
	var flags, operands []string
	for i := 0; i < len(args); i++ {
		a := args[i]
		if a == "--" {
			operands = append(operands, args[i+1:]...)
			break
		}
		if len(a) < 2 || a[0] != '-' {
			if len(operands) == 0 {
				for _, s := range c.Subcommands {
					if s.Name == a {
						rest, err := arrange(s, args[i+1:])
						return append(append(flags, a), rest...), err
					}
				}
			}
			operands = append(operands, a)
			continue
		}
		name, _, valued := strings.Cut(strings.TrimLeft(a, "-"), "=")
		flags = append(flags, a)
		if name == "h" || name == "help" {
			return append(flags, operands...), nil
		}
		f := c.FlagSet.Lookup(name)
		if f == nil {
			return nil, fmt.Errorf("%s: there is no flag -%s: %s -help lists them", c.Name, name, c.Name)
		}
		if b, ok := f.Value.(interface{ IsBoolFlag() bool }); valued || ok && b.IsBoolFlag() {
			continue
		}
		if i++; i == len(args) {
			return nil, fmt.Errorf("%s: flag -%s needs a value", c.Name, name)
		}
		flags = append(flags, args[i])
	}
	if len(operands) > 0 {
		flags = append(flags, "--")
	}
	return append(flags, operands...), nil
}

// NoOperands is for commands that take none: one that is left over is a
// mistake, and not to be passed over.
func NoOperands(args []string) error {
	if len(args) > 0 {
		return outcome.Usage("%q is one word too many", args[0])
	}
	return nil
}

// keys are those of box.conf and of the operator. They may stand in the
// environment of every program, also of one that has no use for them.
var keys = []string{"store", "label", "fleet", "rate", "poll", "min-soak", "key", "releases", "vendor-key", "debug"}

// checkEnvironment refuses variables of ours that nothing reads: one may be a
// misspelt restriction.
func checkEnvironment(known map[string]bool) error {
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		stem, ours := strings.CutPrefix(name, config.EnvPrefix+"_")
		key := strings.ToLower(strings.ReplaceAll(stem, "_", "-"))
		if ours && !known[key] && !slices.Contains(keys, key) {
			return outcome.Config("environment variable %s: there is no such key", name)
		}
	}
	return nil
}
