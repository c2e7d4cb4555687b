package main

import (
	"context"
	"crypto/ed25519"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/outcome"
	"sluice/internal/trust"
)

func trustVerb() *ffcli.Command {
	return &ffcli.Command{Name: "trust", ShortHelp: "say whose signatures count", ShortUsage: "sluice trust show|add|remove|threshold|sign|publish",
		LongHelp:    "The next trust document is made as a file (-o): changed with add, remove and threshold, carried to\nwhere the keys are and signed there with sign, carried back and published with publish. Nothing in\nthe file is secret. It counts once the keys of the document before and its own have signed it.",
		Subcommands: []*ffcli.Command{trustShow(), trustAdd(), trustRemove(), trustThreshold(), trustSign(), trustPublish()}}
}

func trustShow() *ffcli.Command {
	set := flag.NewFlagSet("sluice trust show", flag.ContinueOnError)
	url := set.String("store", "", "`URL` of the store")
	asJSON := set.Bool("json", false, "print JSON")
	return &ffcli.Command{Name: "show", ShortHelp: "what the store's newest trust document says, or a file's", ShortUsage: "sluice trust show [FILE]", FlagSet: set,
		Exec: func(ctx context.Context, args []string) error {
			if len(args) > 1 {
				return outcome.Usage("%q is one word too many", args[1])
			}
			document := contract.Trust{}
			var draft fleet.Draft
			if len(args) == 1 {
				d, err := fleet.ReadDraft(args[0])
				if err != nil {
					return outcome.Config("%w", err)
				}
				draft, document = d, d.Document
			} else {
				s, err := openStore(*url)
				if err != nil {
					return err
				}
				trusted, err := fleet.Trust(ctx, s)
				if err != nil {
					return err
				}
				document = trusted.Document
			}
			if *asJSON {
				_, err := os.Stdout.Write(document.Encode())
				return err
			}
			fmt.Print(fleet.Describe(document))
			if len(args) == 1 {
				fmt.Print(signedBy(draft))
			}
			return nil
		}}
}

func signedBy(d fleet.Draft) string {
	signed := d.SignedBy()
	if len(signed) == 0 {
		return "signed by nobody yet\n"
	}
	text := "signed by\n"
	for _, id := range slices.Sorted(maps.Keys(signed)) {
		text += fmt.Sprintf("    %s (%s)\n", plain(id), signed[id])
	}
	return text
}

// editor are the flags of what changes a draft.
type editor struct {
	set             *flag.FlagSet
	store, families string
	out             string
	life            life
}

func newEditor(verb string) *editor {
	e := &editor{set: flag.NewFlagSet("sluice trust "+verb, flag.ContinueOnError)}
	e.set.StringVar(&e.store, "store", "", "`URL` of the store")
	e.set.StringVar(&e.families, "family", "pointer,trust", "`families` of documents that it is about: pointer, trust or both")
	e.set.StringVar(&e.out, "o", "trust.json", "`file` of the next document: begun if it is not there, changed if it is")
	e.set.Var(&e.life, "expires", "boxes take nothing new after this `time`, as 365d, unless there is a newer document; 0: for ever")
	return e
}

func (e *editor) edit(ctx context.Context, change func(families []contract.Ladder) (func(*contract.TrustPayload) error, error)) error {
	var families []contract.Ladder
	for _, name := range strings.Split(e.families, ",") {
		if !slices.Contains(fleet.Families, contract.Ladder(name)) {
			return outcome.Usage("-family %q: it must be pointer, trust or pointer,trust", e.families)
		}
		families = append(families, contract.Ladder(name))
	}
	do, err := change(families)
	if err != nil {
		return err
	}
	s, err := openStore(e.store)
	if err != nil {
		return err
	}
	d, err := fleet.Open(ctx, s, e.out)
	if err != nil {
		return err
	}
	now := time.Now()
	err = d.Edit(now, func(p *contract.TrustPayload) error {
		if e.life.Duration != nil {
			p.ExpiresAt = contract.Time{}
			if *e.life.Duration > 0 {
				p.ExpiresAt = contract.At(now.Add(*e.life.Duration))
			}
		}
		return do(p)
	})
	if err != nil {
		return err
	}
	if err := d.Save(e.out); err != nil {
		return err
	}
	fmt.Print(fleet.Describe(d.Document))
	fmt.Fprintf(os.Stderr, "%s is to be signed: sluice trust sign %s -key NAME.key, then sluice trust publish %s\n", e.out, e.out, e.out)
	return nil
}

func trustAdd() *ffcli.Command {
	e := newEditor("add")
	return &ffcli.Command{Name: "add", ShortHelp: "let a key sign, in the next trust document", ShortUsage: "sluice trust add NAME.pub [-family pointer] [-o FILE]", FlagSet: e.set,
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say which key, and only that: NAME.pub")
			}
			return e.edit(ctx, func(families []contract.Ladder) (func(*contract.TrustPayload) error, error) {
				pub, err := fleet.PublicKey(args[0])
				return fleet.AddKey(pub, families), err
			})
		}}
}

func trustRemove() *ffcli.Command {
	e := newEditor("remove")
	return &ffcli.Command{Name: "remove", ShortHelp: "let a key sign no more, in the next trust document", ShortUsage: "sluice trust remove NAME.pub|KEY-ID [-family pointer] [-o FILE]", FlagSet: e.set,
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say which key, and only that: NAME.pub, or its id")
			}
			return e.edit(ctx, func(families []contract.Ladder) (func(*contract.TrustPayload) error, error) {
				id := args[0]
				if _, err := contract.Parse[contract.Digest](id); err != nil {
					pub, err := fleet.PublicKey(id)
					if err != nil {
						return nil, err
					}
					id = trust.KeyID(pub)
				}
				return fleet.RemoveKey(id, families), nil
			})
		}}
}

func trustThreshold() *ffcli.Command {
	e := newEditor("threshold")
	return &ffcli.Command{Name: "threshold", ShortHelp: "say how many keys must sign, in the next trust document", ShortUsage: "sluice trust threshold N -family pointer [-o FILE]", FlagSet: e.set,
		Exec: func(ctx context.Context, args []string) error {
			if len(args) != 1 {
				return outcome.Usage("say how many, and only that")
			}
			n, err := strconv.Atoi(args[0])
			if err != nil {
				return outcome.Usage("%q is no number of keys", args[0])
			}
			return e.edit(ctx, func(families []contract.Ladder) (func(*contract.TrustPayload) error, error) {
				return fleet.Threshold(families, n), nil
			})
		}}
}

func trustSign() *ffcli.Command {
	set := flag.NewFlagSet("sluice trust sign", flag.ContinueOnError)
	var keys list
	set.Var(&keys, "key", "`file` of the key that signs; may repeat")
	yes := set.Bool("yes", false, "don't ask")
	return &ffcli.Command{Name: "sign", ShortHelp: "sign the next trust document; needs no store", ShortUsage: "sluice trust sign FILE -key NAME.key", FlagSet: set,
		Exec: func(_ context.Context, args []string) error {
			d, err := draft(args)
			if err != nil {
				return err
			}
			private, err := privateKeys(keys)
			if err != nil {
				return err
			}
			fmt.Print(fleet.Describe(d.Document))
			if !*yes {
				if err := confirm(os.Stderr, fmt.Sprintf("sign %s?", args[0])); err != nil {
					return err
				}
			}
			for _, key := range private {
				if err := d.Sign(key); err != nil {
					return err
				}
			}
			if err := d.Save(args[0]); err != nil {
				return err
			}
			fmt.Print(signedBy(d))
			return nil
		}}
}

// draft reads the one file that is the operand.
func draft(args []string) (fleet.Draft, error) {
	if len(args) != 1 {
		return fleet.Draft{}, outcome.Usage("say which file, and only that: the one that add, remove or threshold wrote")
	}
	d, err := fleet.ReadDraft(args[0])
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: add, remove or threshold writes it", err)
	}
	if err != nil {
		return d, outcome.Config("%w", err)
	}
	return d, nil
}

func trustPublish() *ffcli.Command {
	set := flag.NewFlagSet("sluice trust publish", flag.ContinueOnError)
	url := set.String("store", "", "`URL` of the store")
	var keys list
	set.Var(&keys, "key", "`file` of a key that signs pointers from now on; may repeat")
	yes := set.Bool("yes", false, "don't ask")
	strand := set.Bool("strand", false, "publish also what some boxes are too old to read")
	return &ffcli.Command{Name: "publish", ShortHelp: "make a signed trust document the newest", ShortUsage: "sluice trust publish FILE [-key NAME.key]", FlagSet: set,
		LongHelp: "Pointers that would not count any more are signed anew with the keys of -key; their promote times\nstay, and no box rolls. Look at the list before you say yes: after a theft, what was promoted with\nthe stolen key is among them. It may be cut and run again.",
		Exec: func(ctx context.Context, args []string) error {
			d, err := draft(args)
			if err != nil {
				return err
			}
			s, err := openStore(*url)
			if err != nil {
				return err
			}
			var private []ed25519.PrivateKey
			if len(keys) > 0 {
				if private, err = privateKeys(keys); err != nil {
					return err
				}
			}
			p, err := fleet.Prepare(ctx, s, d, private, time.Now(), *strand)
			if err != nil {
				return err
			}
			fmt.Print(fleet.Describe(d.Document))
			for _, r := range p.Anew {
				by := "-"
				if a := r.Pointer.Payload.Audit; len(a) > 0 {
					by = plain(a[0].Actor)
				}
				fmt.Printf("to sign anew: %s %s on %s, promoted at %s by %s\n", r.Pointer.Component, orDash(string(r.Pointer.Payload.Current.Version)), r.Pointer.Channel, r.Pointer.PromotedAt.Format(time.RFC3339), by)
			}
			for _, line := range p.Skipped {
				fmt.Printf("left as it is, boxes will not accept it: %s\n", plain(line))
			}
			if !*yes {
				if err := confirm(os.Stderr, fmt.Sprintf("publish trust document %d in %s?", p.Set.Number, s)); err != nil {
					return err
				}
			}
			if err := p.Publish(ctx, time.Now()); err != nil {
				return err
			}
			fmt.Printf("trust document %d is published; %d pointers are signed anew\n", p.Set.Number, len(p.Anew))
			return nil
		}}
}
