package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
		boxes      = set.String("box-store", "", "`URL` that boxes reach the store by, if it is another, as https://door.example.com")
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
			if *boxes != "" {
				if _, err := store.Open(*boxes); err != nil {
					return fmt.Errorf("-box-store: %w", err)
				}
				d.Store = *boxes
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
