package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/bundle"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fleet"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/store"
)

func keygen() *ffcli.Command {
	set := flag.NewFlagSet("sluice keygen", flag.ContinueOnError)
	out := set.String("o", "", "`name` of the key: writes NAME.key and NAME.pub")
	return &ffcli.Command{Name: "keygen", ShortHelp: "make a signing key", ShortUsage: "sluice keygen -o NAME", FlagSet: set,
		Exec: func(_ context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			if *out == "" {
				return outcome.Usage("say where to: -o NAME")
			}
			id, err := fleet.GenerateKey(*out)
			if err != nil {
				return err
			}
			fmt.Printf("%s\n", id)
			fmt.Fprintf(os.Stderr, "%s.key signs: keep it where only you can read it. %s.pub is for init\n", *out, *out)
			return nil
		}}
}

func initialize() *ffcli.Command {
	set := flag.NewFlagSet("sluice init", flag.ContinueOnError)
	var (
		url        = set.String("store", "", "`URL` of the store")
		key        = set.String("key", "", "the operator's key: NAME.key signs, NAME.pub finds the key beside it (`file`)")
		out        = set.String("o", "deployment.json", "`file` that boxes are enrolled with")
		name       = set.String("fleet", "", "`name` of the fleet")
		components = set.String("components", "sluice=stable", "what boxes follow: `component=channel,…`")
	)
	return &ffcli.Command{Name: "init", ShortHelp: "make a store a deployment", ShortUsage: "sluice init -store URL -key NAME.pub -o FILE", FlagSet: set,
		Exec: func(ctx context.Context, args []string) error {
			if err := program.NoOperands(args); err != nil {
				return err
			}
			follows, err := parseComponents(*components)
			if err != nil {
				return err
			}
			s, err := openStore(*url)
			if err != nil {
				return err
			}
			// The document is signed by the key that it names.
			if stem, ok := strings.CutSuffix(*key, ".pub"); ok {
				*key = stem + ".key"
			}
			private, err := fleet.PrivateKey(*key)
			if err != nil {
				return err
			}
			d, err := fleet.Init(ctx, s, private, *name, follows, time.Now())
			if err != nil {
				return err
			}
			if err := (&durable.Disk{}).WriteFile(*out, d.Encode(), 0o644); err != nil {
				return err
			}
			fmt.Printf("%s is a deployment; enroll boxes with %s\n", s, *out)
			return nil
		}}
}

func parseComponents(list string) (map[contract.Component]contract.Channel, error) {
	out := map[contract.Component]contract.Channel{"sluice": "stable"}
	for _, pair := range strings.Split(list, ",") {
		name, channel, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok {
			return nil, outcome.Usage("%q must be component=channel", pair)
		}
		c, err := contract.Parse[contract.Component](name)
		if err != nil {
			return nil, &outcome.UsageError{Err: err}
		}
		if out[c], err = contract.Parse[contract.Channel](channel); err != nil {
			return nil, &outcome.UsageError{Err: err}
		}
	}
	return out, nil
}

func openStore(url string) (store.Store, error) {
	if url == "" {
		return nil, outcome.Config("say which store: -store URL or SLUICE_STORE")
	}
	return store.Open(url)
}

func pack() *ffcli.Command {
	set := flag.NewFlagSet("sluice bundle", flag.ContinueOnError)
	out := set.String("o", "", "`file` to write; default: <component>_<version>_<platform>.tar.zst")
	asJSON := set.Bool("json", false, "print what a pointer would say of it, as JSON")
	return &ffcli.Command{Name: "bundle", ShortHelp: "make a bundle of a folder", ShortUsage: "sluice bundle DIR -o FILE", FlagSet: set,
		LongHelp: "DIR holds manifest.json, which says everything but the files, and the files: bin/, etc/, share/,\nunits/, sysusers.d/, tmpfiles.d/.",
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say which folder, and only that")
			}
			m, err := bundle.Read(args[0])
			if err != nil {
				return outcome.Refuse(outcome.BadBundle, "%w", err)
			}
			if said := bundle.Lint(ctx, args[0], m); len(said) > 0 {
				return outcome.Refuse(outcome.BadBundle, "systemd-analyze verify says: %s", strings.Join(said, "; "))
			}
			file := *out
			if file == "" {
				file = fmt.Sprintf("%s_%s_%s%s", m.Component, m.Version, m.Platform, bundle.Suffix)
			}
			info, err := writeBundle(file, args[0], m)
			if err != nil {
				return err
			}
			if *asJSON {
				_, err := os.Stdout.Write(contract.EncodeJSON(map[string]any{"file": file, "size": info.Size, "sha256": info.SHA256, "tar_size": info.TarSize, "manifest_sha256": info.ManifestSHA256}))
				return err
			}
			fmt.Printf("%s: %s %s for %s, %d files, %d bytes\n", file, m.Component, m.Version, m.Platform, len(m.Files), info.Size)
			return nil
		}}
}

func writeBundle(file, dir string, m contract.Manifest) (bundle.Info, error) {
	temp, err := (&durable.Disk{}).Create(file, 0o644)
	if err != nil {
		return bundle.Info{}, err
	}
	done, end := progress(filepath.Base(file))
	defer end()
	info, err := bundle.Pack(temp, dir, m, func(n int64) { done(n, m.Size()) })
	if err != nil {
		return info, fmt.Errorf("packing %q: %w", dir, errors.Join(err, temp.Abandon()))
	}
	return info, temp.Commit()
}

// A list is a flag that may be given more than once.
type list []string

func (l *list) String() string     { return strings.Join(*l, ",") }
func (l *list) Set(s string) error { *l = append(*l, s); return nil }

// operator are the flags of what changes a pointer.
type operator struct {
	set                        *flag.FlagSet
	store, chan_               string
	keys                       list
	yes, json, strand, replace bool
}

func newOperator(verb string) *operator {
	o := &operator{set: flag.NewFlagSet("sluice "+verb, flag.ContinueOnError)}
	o.set.StringVar(&o.store, "store", "", "`URL` of the store")
	o.set.Var(&o.keys, "key", "`file` of a signing key; once for each, if the trust document wants more than one")
	o.set.StringVar(&o.chan_, "channel", "stable", "`name` of the channel")
	o.set.BoolVar(&o.yes, "yes", false, "don't ask")
	o.set.BoolVar(&o.json, "json", false, "print the new pointer as JSON")
	o.set.BoolVar(&o.strand, "strand", false, "write also what some boxes of the channel are too old to read")
	return o
}

func (o *operator) open(ctx context.Context) (*fleet.Operator, error) {
	s, err := openStore(o.store)
	if err != nil {
		return nil, err
	}
	keys, err := privateKeys(o.keys)
	if err != nil {
		return nil, err
	}
	op, err := fleet.NewOperator(ctx, s, keys...)
	if err != nil {
		return nil, err
	}
	op.Strand, op.Replace = o.strand, o.replace
	op.Tell = func(s string) { fmt.Fprintln(os.Stderr, s) }
	return op, nil
}

func privateKeys(files list) ([]ed25519.PrivateKey, error) {
	if len(files) == 0 {
		files = list{""} // says what is missing
	}
	var keys []ed25519.PrivateKey
	for _, file := range files {
		key, err := fleet.PrivateKey(file)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	return keys, nil
}

// A life is a flag: a duration that may be in days. It is nil until it is given.
type life struct{ *time.Duration }

func (l *life) String() string { return "" }

func (l *life) Set(s string) error {
	text := s
	if days, ok := strings.CutSuffix(s, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 32)
		if err != nil {
			return fmt.Errorf("%q is no number of days", s)
		}
		text = fmt.Sprintf("%dh", 24*n)
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 || d > maxLife {
		return fmt.Errorf("%q is no time to live: write 14d or 36h, at most %dd, or 0 for ever", s, maxLife/(24*time.Hour))
	}
	l.Duration = &d
	return nil
}

// maxLife is the longest that anything signed may count.
const maxLife = 20 * 365 * 24 * time.Hour

func (o *operator) lifeFlag() *life {
	l := &life{}
	o.set.Var(l, "expires", "boxes install nothing from the pointer after this `time`, as 14d, unless it is refreshed; 0: for ever")
	return l
}

func (o *operator) channel() (contract.Channel, error) {
	ch, err := contract.Parse[contract.Channel](o.chan_)
	if err != nil {
		return ch, &outcome.UsageError{Err: err}
	}
	return ch, nil
}

// component returns the component of the operands, "" if there is none.
func component(args []string) (contract.Component, error) {
	if len(args) == 0 {
		return "", nil
	}
	if len(args) > 1 {
		return "", outcome.Usage("%q is one word too many", args[1])
	}
	c, err := contract.Parse[contract.Component](args[0])
	if err != nil {
		return c, &outcome.UsageError{Err: err}
	}
	return c, nil
}

func update() *ffcli.Command {
	o := newOperator("update")
	var files, platforms list
	o.set.Var(&files, "file", "`bundle` to promote; once for each platform")
	o.set.Var(&platforms, "platform", "`name` of a platform that must be among the bundles")
	spread := o.set.Duration("spread", 0, "boxes wait a part of this that is theirs")
	life := o.lifeFlag()
	o.set.BoolVar(&o.replace, "replace", false, "begin a new pointer, without a history, where there is one that no trusted key signed")
	return &ffcli.Command{Name: "update", ShortHelp: "promote a release", ShortUsage: "sluice update [COMPONENT] -file BUNDLE [-channel stable] [-spread 5m] [-expires 14d]", FlagSet: o.set,
		Exec: func(ctx context.Context, args []string) error {
			want, err := component(args)
			if err != nil {
				return err
			}
			ch, err := o.channel()
			if err != nil {
				return err
			}
			if len(files) == 0 {
				return outcome.Usage("say what to promote: -file BUNDLE")
			}
			if *spread < 0 || contract.Duration(*spread) > contract.MaxSpread {
				return outcome.Usage("-spread %s: it must be between 0 and %s", *spread, time.Duration(contract.MaxSpread))
			}
			op, err := o.open(ctx)
			if err != nil {
				return err
			}
			plan, err := fleet.Read(files, time.Now())
			if err != nil {
				return err
			}
			c := plan.Component
			if want != "" && want != c {
				return outcome.Usage("the bundle is of component %s, not of %s", c, want)
			}
			for _, p := range platforms {
				if _, there := plan.Release.Artifacts[contract.Platform(p)]; !there {
					return outcome.Usage("none of the bundles is for platform %s", p)
				}
			}
			return o.change(ctx, op, c, ch, fmt.Sprintf("promote %s %s to channel %s of %s?", c, plan.Release.Version, ch, op.Store), func() (contract.Pointer, error) {
				done, end := progress("mirroring")
				err := plan.Mirror(ctx, op.Store, done)
				end()
				if err != nil {
					return contract.Pointer{}, err
				}
				return op.Promote(ctx, c, ch, fleet.Promotion{Release: plan.Release, Spread: *spread, Life: life.Duration, Manifest: plan.Manifest})
			})
		}}
}

func rollback() *ffcli.Command {
	o := newOperator("rollback")
	return &ffcli.Command{Name: "rollback", ShortHelp: "promote the release before", ShortUsage: "sluice rollback COMPONENT [-channel stable]", FlagSet: o.set,
		Exec: func(ctx context.Context, args []string) error {
			c, err := component(args)
			if err != nil {
				return err
			}
			if c == "" {
				return outcome.Usage("say which component")
			}
			ch, err := o.channel()
			if err != nil {
				return err
			}
			op, err := o.open(ctx)
			if err != nil {
				return err
			}
			p, _, err := op.Pointer(ctx, c, ch)
			if err != nil {
				return err
			}
			if len(p.Payload.History) == 0 { // it says so; there is nothing to ask about
				_, err := op.Rollback(ctx, c, ch)
				return err
			}
			question := fmt.Sprintf("roll %s back from %s to %s on channel %s of %s?", c, p.Payload.Current.Version, p.Payload.History[0].Version, ch, op.Store)
			return o.change(ctx, op, c, ch, question, func() (contract.Pointer, error) { return op.Rollback(ctx, c, ch) })
		}}
}

func refresh() *ffcli.Command {
	o := newOperator("refresh")
	life := o.lifeFlag()
	return &ffcli.Command{Name: "refresh", ShortHelp: "let pointers count for longer", ShortUsage: "sluice refresh [COMPONENT [-channel stable]] [-expires 14d]", FlagSet: o.set,
		LongHelp: "Signs the pointer anew with another expiry, as far ahead as the last time unless -expires says\notherwise. It is no promote: no box rolls. Without COMPONENT: every pointer that expires.",
		Exec: func(ctx context.Context, args []string) error {
			c, err := component(args)
			if err != nil {
				return err
			}
			ch, err := o.channel()
			if err != nil {
				return err
			}
			op, err := o.open(ctx)
			if err != nil {
				return err
			}
			targets, failed := []fleet.Target{{Component: c, Channel: ch}}, error(nil)
			if c == "" {
				targets, failed = op.Expiring(ctx)
			}
			for _, t := range targets { // one that fails keeps no other from it
				p, err := op.Refresh(ctx, t.Component, t.Channel, life.Duration)
				if err != nil {
					failed = errors.Join(failed, err)
					continue
				}
				if err := o.refreshed(p); err != nil {
					return err
				}
			}
			return failed
		}}
}

func (o *operator) refreshed(p contract.Pointer) error {
	if o.json {
		_, err := os.Stdout.Write(p.Encode())
		return err
	}
	expires := "never expires"
	if at := p.Payload.ExpiresAt; !at.IsZero() {
		expires = "expires at " + at.Format(time.RFC3339)
	}
	fmt.Printf("%s %s on %s %s\n", p.Component, p.Payload.Current.Version, p.Channel, expires)
	return nil
}

// change asks, changes a pointer, and says who follows it.
func (o *operator) change(ctx context.Context, op *fleet.Operator, c contract.Component, ch contract.Channel, question string, do func() (contract.Pointer, error)) error {
	if !o.yes {
		if err := confirm(os.Stderr, question); err != nil {
			return err
		}
	}
	p, err := do()
	if err != nil {
		return err
	}
	if o.json {
		_, err := os.Stdout.Write(p.Encode())
		return err
	}
	fmt.Printf("%s is %s on %s, promoted at %s\n", c, p.Payload.Current.Version, ch, p.PromotedAt)
	rows, err := fleet.Status(ctx, op.Store, op.Trust, time.Now())
	if err != nil {
		return err
	}
	for _, r := range rows {
		if r.Component == string(c) && r.Channel == string(ch) {
			fmt.Printf("  %s runs %s\n", r.Label, orDash(r.Running))
		}
	}
	if p.Payload.Spread > 0 {
		fmt.Printf("boxes roll within %s\n", time.Duration(p.Payload.Spread))
	}
	return nil
}

func status() *ffcli.Command {
	set := flag.NewFlagSet("sluice status", flag.ContinueOnError)
	var (
		url     = set.String("store", "", "`URL` of the store")
		channel = set.String("channel", "", "only this `channel`")
		asJSON  = set.Bool("json", false, "print JSON")
		check   = set.Bool("check", false, "exit 1 if a box stands out")
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
			var upgrade *contract.UpgradeError
			if errors.As(err, &upgrade) && trusted.Number > 0 { // what can be told, is
				fmt.Fprintf(os.Stderr, "needs a newer sluice: %s\n", err)
			} else if err != nil {
				return err
			}
			show := func() (standOut, rows int, err error) {
				all, err := fleet.Status(ctx, s, trusted, time.Now())
				if err != nil {
					return 0, 0, err
				}
				for _, line := range fleet.Expiries(all, trusted, time.Now()) {
					fmt.Fprintln(os.Stderr, line)
					standOut++
				}
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
				return standOut, len(shown), err
			}
			for {
				if *watch && !*asJSON {
					fmt.Print("\033[H\033[J") // home, and clear
				}
				standOut, rows, err := show()
				if err != nil {
					return err
				}
				if !*watch {
					if *check && standOut > 0 {
						return fmt.Errorf("%d things stand out, of %d rows", standOut, rows)
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
