package main

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/outcome"
)

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
	o.set.BoolVar(&o.json, "json", false, "print the new pointer as JSON")
	o.set.BoolVar(&o.strand, "strand", false, "write also what some boxes of the channel are too old to read")
	return o
}

// newAsking is newOperator for what asks before it changes anything.
func newAsking(verb string) *operator {
	o := newOperator(verb)
	o.set.BoolVar(&o.yes, "yes", false, "don't ask")
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
	op.Tell = func(s string) { fmt.Fprintln(os.Stderr, plain(s)) }
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

func rollback() *ffcli.Command {
	o := newAsking("rollback")
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
			return o.change(ctx, op, question, func() (contract.Pointer, error) { return op.Rollback(ctx, c, ch) })
		}}
}

func refresh() *ffcli.Command {
	o := newOperator("refresh")
	o.chan_, o.set.Lookup("channel").DefValue = "", "" // without COMPONENT: all
	life := o.lifeFlag()
	return &ffcli.Command{Name: "refresh", ShortHelp: "let pointers count for longer", ShortUsage: "sluice refresh [COMPONENT [-channel stable]] [-expires 14d]", FlagSet: o.set,
		LongHelp: "Signs the pointer anew with another expiry, as far ahead as the last time unless -expires says\notherwise. It is no promote: no box rolls. Without COMPONENT: every pointer\nthat expires, of one channel if -channel is given.",
		Exec: func(ctx context.Context, args []string) error {
			c, err := component(args)
			if err != nil {
				return err
			}
			only := o.chan_ != ""
			o.chan_ = cmp.Or(o.chan_, "stable")
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
				targets = slices.DeleteFunc(targets, func(t fleet.Target) bool { return only && t.Channel != ch })
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
func (o *operator) change(ctx context.Context, op *fleet.Operator, question string, do func() (contract.Pointer, error)) error {
	if err := o.ask(question); err != nil {
		return err
	}
	p, err := do()
	if err != nil {
		return err
	}
	return o.changed(ctx, op, p)
}

func (o *operator) ask(question string) error {
	if o.yes {
		return nil
	}
	return confirm(os.Stderr, question)
}

// changed says what a pointer is now, and who follows it.
func (o *operator) changed(ctx context.Context, op *fleet.Operator, p contract.Pointer) error {
	if o.json {
		_, err := os.Stdout.Write(p.Encode())
		return err
	}
	fmt.Printf("%s is %s on %s, promoted at %s\n", p.Component, p.Payload.Current.Version, p.Channel, p.PromotedAt)
	rows, err := fleet.Status(ctx, op.Store, op.Trust, time.Now())
	if err != nil {
		return err
	}
	for _, r := range rows {
		if r.Component == string(p.Component) && r.Channel == string(p.Channel) {
			fmt.Printf("  %s runs %s\n", plain(r.Label), orDash(r.Running))
		}
	}
	if p.Payload.Spread > 0 {
		fmt.Printf("boxes roll within %s\n", time.Duration(p.Payload.Spread))
	}
	return nil
}
