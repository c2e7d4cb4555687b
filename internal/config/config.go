// Package config reads what the owner of a box decides: /etc/sluice/box.conf
// and one <component>.conf for each component the box follows. Both hold
// SLUICE_KEY=VALUE lines; an unknown key is an error, since it may be a
// misspelt restriction.
package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/peterbourgon/ff/v3"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
)

// EnvPrefix begins the name of every key and environment variable.
const EnvPrefix = "SLUICE"

// Defaults of box.conf.
const (
	DefaultPoll = 2 * time.Second
	MinPoll     = 100 * time.Millisecond
	maxConf     = 64 << 10 // bytes of a configuration file
	MaxAdopt    = 64       // paths that a first roll may take over
)

// A Box is box.conf.
type Box struct {
	Store   string        // URL
	Label   string        // how this box is called; the host's name if empty
	Fleet   string        // whose it is
	Rate    int64         // bytes a second of a download; 0: no limit
	Poll    time.Duration // how often control/serial is asked for
	MinSoak time.Duration // no soak is shorter
}

// Flags adds the keys of box.conf to a flag set, so that a flag or an
// environment variable may overrule the file.
func (b *Box) Flags(fs *flag.FlagSet) {
	fs.StringVar(&b.Store, "store", "", "`URL` of the store: file:///srv/bucket or s3://bucket/prefix?endpoint=…")
	fs.StringVar(&b.Label, "label", "", "`name` of this box (default: the host's name)")
	fs.StringVar(&b.Fleet, "fleet", "", "`name` of the fleet this box belongs to")
	fs.Int64Var(&b.Rate, "rate", 0, "`bytes` a second that a download may take; 0 for no limit")
	fs.DurationVar(&b.Poll, "poll", DefaultPoll, "how often the store is asked for news")
	fs.DurationVar(&b.MinSoak, "min-soak", 0, "no soak is shorter than this")
}

// Check completes and checks what was read.
func (b *Box) Check() error {
	if b.Label == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("asking for the host's name: %w", err)
		}
		b.Label = strings.ToLower(host)
	}
	if _, err := contract.Parse[contract.Label](b.Label); err != nil {
		return outcome.Config("SLUICE_LABEL: %w", err)
	}
	return b.checkNumbers()
}

func (b *Box) checkNumbers() error {
	if b.Rate < 0 || b.MinSoak < 0 || b.Poll < MinPoll {
		return outcome.Config("SLUICE_RATE and SLUICE_MIN_SOAK must not be negative, SLUICE_POLL not below %s", MinPoll)
	}
	return nil
}

// LoadBox reads box.conf of a root. Without a file every key has its default.
// The label is only fetch's affair: a host's name that is none keeps no box
// from being applied to.
func LoadBox(root layout.Root) (Box, error) {
	var b Box
	set := flag.NewFlagSet("box.conf", flag.ContinueOnError)
	b.Flags(set)
	if err := Complete(set, root); err != nil {
		return b, err
	}
	return b, b.checkNumbers()
}

// Complete fills the flags of a set that are still unset from box.conf.
func Complete(set *flag.FlagSet, root layout.Root) error {
	path := root.Path(layout.BoxConf, "")
	data, err := readLimited(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return parse(set, path, data)
}

// A Component is <component>.conf.
type Component struct {
	Channel contract.Channel
	// Adopt are absolute paths that the first roll may take over: units and
	// files that were put on the box by hand.
	Adopt  []string
	Digest contract.Digest // of the file: what a foreign-file refusal waits for to change
}

// LoadComponent reads the configuration of one component. A box that does not
// follow it is fs.ErrNotExist.
func LoadComponent(root layout.Root, name contract.Component) (Component, error) {
	path := root.Path(layout.ComponentConf, string(name))
	data, err := readLimited(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Component{}, outcome.Config("this box does not follow component %q: there is no %q: %w", name, path, fs.ErrNotExist)
	}
	if err != nil {
		return Component{}, err
	}
	var channel, adopt string
	set := flag.NewFlagSet(filepath.Base(path), flag.ContinueOnError)
	set.StringVar(&channel, "channel", "", "")
	set.StringVar(&adopt, "adopt", "", "")
	if err := parse(set, path, data); err != nil {
		return Component{}, err
	}
	sum := sha256.Sum256(data)
	c := Component{Digest: contract.Digest(hex.EncodeToString(sum[:]))}
	if c.Channel, err = contract.Parse[contract.Channel](channel); err != nil {
		return c, outcome.Config("%q: SLUICE_CHANNEL: %w", path, err)
	}
	c.Adopt = strings.Fields(adopt)
	if len(c.Adopt) > MaxAdopt {
		return c, outcome.Config("%q: SLUICE_ADOPT: it has %d paths, the most is %d", path, len(c.Adopt), MaxAdopt)
	}
	for _, p := range c.Adopt {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return c, outcome.Config("%q: SLUICE_ADOPT: %q must be an absolute path, without %q or a slash at its end", path, p, "..")
		}
	}
	return c, nil
}

// Components returns the names of the components that the box follows. A file
// in /etc/sluice whose name is no component's is not its business.
func Components(root layout.Root) ([]contract.Component, error) {
	entries, err := os.ReadDir(root.Path(layout.Etc, ""))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var names []contract.Component
	for _, e := range entries {
		stem, ok := strings.CutSuffix(e.Name(), ".conf")
		if name, err := contract.Parse[contract.Component](stem); ok && err == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Held reports whether the owner of the box wants nothing new.
func Held(root layout.Root) bool {
	_, err := os.Lstat(root.Path(layout.Hold, ""))
	return !errors.Is(err, fs.ErrNotExist) // a disk that can't tell: nothing new
}

func readLimited(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConf+1))
	if err == nil && len(data) > maxConf {
		err = outcome.Config("%q is over %d bytes", path, maxConf)
	}
	return data, err
}

// parse fills the flags of a set that are still unset from SLUICE_KEY=VALUE
// lines, and says which key of which file is wrong.
func parse(set *flag.FlagSet, path string, data []byte) error {
	given := map[string]bool{}
	set.Visit(func(f *flag.Flag) { given[f.Name] = true })
	seen := map[string]bool{}
	err := ff.EnvParser(bytes.NewReader(data), func(key, value string) error {
		stem, ok := strings.CutPrefix(key, EnvPrefix+"_")
		name := strings.ReplaceAll(strings.ToLower(stem), "_", "-")
		switch {
		case !ok:
			return fmt.Errorf("unknown key %q: keys begin with %s_", key, EnvPrefix)
		case seen[key]:
			return fmt.Errorf("key %q is there twice", key)
		case set.Lookup(name) == nil:
			return fmt.Errorf("unknown key %q", key)
		}
		seen[key] = true
		if given[name] {
			return nil
		}
		if err := set.Set(name, value); err != nil {
			return fmt.Errorf("key %q: %w", key, err)
		}
		return nil
	})
	if err != nil {
		return outcome.Config("%q: %w", path, err)
	}
	return nil
}
