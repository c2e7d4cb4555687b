package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/peterbourgon/ff/v3/ffcli"

	"sluice/internal/contract"
	"sluice/internal/fleet"
	"sluice/internal/outcome"
)

// defaultWait is how long -wait waits for the boxes.
const defaultWait = 30 * time.Minute

// updating is one run of `sluice update`.
type updating struct {
	*operator
	files, platforms              list
	version, releases, vendor, at string
	spread, timeout               time.Duration
	life                          *life
	plan, wait                    bool
	haltAfter                     int

	op      *fleet.Operator
	channel contract.Channel
	now     time.Time // the promote time, if it is planned with
}

func update() *ffcli.Command {
	u := &updating{operator: newAsking("update")}
	u.life = u.lifeFlag()
	set := u.set
	set.Var(&u.files, "file", "`bundle` to promote; once for each platform. Without one, a release of -releases")
	set.Var(&u.platforms, "platform", "`name` of a platform: with -file one that must be among them, else the only ones that are promoted")
	set.StringVar(&u.version, "version", "", "`version` of the release; default: what latest.txt says")
	set.StringVar(&u.releases, "releases", "", "`URL` below which the vendor's releases are: latest.txt, TAG/SHA256SUMS and its signature, TAG/ASSET")
	set.StringVar(&u.vendor, "vendor-key", "", "`file` of the minisign key that the vendor signs releases with")
	set.DurationVar(&u.spread, "spread", 0, "boxes wait a part of this that is theirs")
	set.BoolVar(&u.plan, "plan", false, "only say which box would roll when")
	set.StringVar(&u.at, "at", "", "the promote `time` that -plan has printed")
	set.BoolVar(&u.wait, "wait", false, "follow the boxes until each has ended; exit 1 if one did not take it")
	set.DurationVar(&u.timeout, "timeout", defaultWait, "how long -wait and -halt-after wait")
	set.IntVar(&u.haltAfter, "halt-after", 0, "follow the boxes, and roll back once `N` did not take it")
	set.BoolVar(&u.replace, "replace", false, "begin a new pointer, without a history, where there is one that no trusted key signed")
	return &ffcli.Command{Name: "update", ShortHelp: "promote a release", ShortUsage: "sluice update [COMPONENT] [-version V | -file BUNDLE] [-channel stable] [-spread 5m] [-expires 14d] [-plan] [-wait] [-halt-after N]", FlagSet: set,
		LongHelp: "Of a vendor's release, all components that it has, or COMPONENT: everything is downloaded and\nchecked against what the vendor signed before the first byte is mirrored, and mirrored before a\npointer names it. Every step is safe to run again.",
		Exec:     u.run}
}

func (u *updating) run(ctx context.Context, args []string) error {
	want, err := component(args)
	if err != nil {
		return err
	}
	if u.channel, err = u.operator.channel(); err != nil {
		return err
	}
	if err := u.check(); err != nil {
		return err
	}
	if u.op, err = u.open(ctx); err != nil {
		return err
	}
	plans, done, err := u.plans(ctx, want)
	if err != nil {
		return err
	}
	if u.plan || u.spread > 0 || u.at != "" {
		if u.at == "" {
			u.now = time.Now()
		}
		if err := u.schedule(ctx, plans); err != nil || u.plan {
			return err
		}
	}
	var names []string
	for _, p := range plans {
		skipped, err := u.op.SkippedCanary(ctx, p.Component, p.Release.Version)
		if err != nil { // it is only asked for the warning's sake
			fmt.Fprintf(os.Stderr, "warning: whether %s %s was on channel %s is not known: %s\n", p.Component, p.Release.Version, fleet.CanaryChannel, plain(err.Error()))
		} else if skipped && u.channel != fleet.CanaryChannel {
			fmt.Fprintf(os.Stderr, "warning: %s %s was never on channel %s\n", p.Component, p.Release.Version, fleet.CanaryChannel)
		}
		if before, _, err := u.op.Pointer(ctx, p.Component, u.channel); err == nil && slices.ContainsFunc(before.Payload.History, func(r contract.Release) bool { return r.Version == p.Release.Version }) {
			fmt.Fprintf(os.Stderr, "warning: %s %s was on channel %s before: this goes back\n", p.Component, p.Release.Version, u.channel)
		}
		names = append(names, fmt.Sprintf("%s %s", p.Component, p.Release.Version))
	}
	if err := u.ask(fmt.Sprintf("promote %s to channel %s of %s?", strings.Join(names, ", "), u.channel, u.op.Store)); err != nil {
		return err
	}
	for _, p := range plans {
		mirrored, end := progress("mirroring " + string(p.Component))
		err := p.Mirror(ctx, u.op.Store, mirrored)
		end()
		if err != nil {
			return err
		}
	}
	var promoted []contract.Pointer
	var ends []error
	for _, p := range plans {
		if err := ctx.Err(); err != nil { // told to stop
			ends = append(ends, err)
			break
		}
		pointer, err := u.op.Promote(ctx, p.Component, u.channel, fleet.Promotion{Release: p.Release, Spread: u.spread, Life: u.life.Duration, Manifest: p.Manifest, At: u.now})
		if pointer.Component != "" { // it is promoted, even if something went wrong after that
			promoted = append(promoted, pointer)
			ends = append(ends, u.changed(ctx, u.op, pointer))
		}
		if err != nil {
			ends = append(ends, err)
			break
		}
	}
	if u.wait || u.haltAfter > 0 { // all of them are on their way: one may need another
		for _, p := range promoted {
			if ctx.Err() == nil {
				ends = append(ends, u.follow(ctx, p))
			}
		}
	}
	if len(promoted) == len(plans) {
		ends = append(ends, done())
	}
	return errors.Join(ends...)
}

// check says what is wrong with the flags alone.
func (u *updating) check() error {
	if u.spread < 0 || contract.Duration(u.spread) > contract.MaxSpread {
		return outcome.Usage("-spread %s: it must be between 0 and %s", u.spread, time.Duration(contract.MaxSpread))
	}
	if d := u.life.Duration; d != nil && *d > 0 && u.spread >= *d {
		return outcome.Usage("-spread %s: some boxes would begin after the pointer has expired (-expires %s)", u.spread, *d)
	}
	if len(u.files) > 0 && u.version != "" {
		return outcome.Usage("-version is of a vendor's release, -file brings its own")
	}
	if len(u.files) == 0 && u.releases == "" {
		return outcome.Usage("say what to promote: -file BUNDLE, or -releases URL (SLUICE_RELEASES)")
	}
	if u.haltAfter < 0 {
		return outcome.Usage("-halt-after %d: it must not be negative", u.haltAfter)
	}
	if u.timeout <= 0 {
		return outcome.Usage("-timeout %s: it must be positive", u.timeout)
	}
	if u.at != "" {
		at, err := contract.Parse[contract.Time](u.at)
		if err != nil {
			return outcome.Usage("-at: %w", err)
		}
		if ahead := time.Until(at.Time); ahead > maxAhead {
			return outcome.Usage("-at %s: it is %s from now, the most is %s", u.at, ahead.Round(time.Second), maxAhead)
		}
		u.now = at.Time
	}
	for _, p := range u.platforms {
		if _, err := contract.Parse[contract.Platform](p); err != nil {
			return &outcome.UsageError{Err: err}
		}
	}
	return nil
}

// maxAhead is how far in the future a promote may be planned: no box waits for it.
const maxAhead = 5 * time.Minute

// plans finds what is to be promoted. done tidies up once it has been.
func (u *updating) plans(ctx context.Context, want contract.Component) (plans []fleet.Plan, done func() error, err error) {
	done = func() error { return nil }
	if len(u.files) > 0 {
		p, err := u.local(want)
		return []fleet.Plan{p}, done, err
	}
	r, err := fleet.OpenReleases(u.releases, u.vendor)
	if err != nil {
		return nil, done, err
	}
	tag := u.version
	if tag == "" {
		if tag, err = r.Latest(ctx); err != nil {
			return nil, done, err
		}
	}
	sums, err := r.Sums(ctx, tag)
	if err != nil {
		return nil, done, err
	}
	components := sums.Components()
	if want != "" {
		components = []contract.Component{want}
	}
	if len(components) == 0 {
		return nil, done, outcome.Refuse(outcome.NoArtifact, "release %s has no bundles", sums.Tag)
	}
	for _, c := range components {
		platforms, err := u.needed(ctx, sums, c)
		if err != nil {
			return nil, done, err
		}
		var told func(n, total int64)
		end, last := func() {}, ""
		r.Progress = func(asset string, n, total int64) {
			if asset != last {
				end()
				told, end = progress(asset)
				last = asset
			}
			told(n, total)
		}
		p, err := r.Ingest(ctx, sums, c, platforms, time.Now())
		end()
		if err != nil {
			return nil, done, err
		}
		plans = append(plans, p)
	}
	return plans, func() error { return r.Forget(sums) }, nil
}

// needed are the platforms that a component is promoted for.
func (u *updating) needed(ctx context.Context, sums fleet.Sums, c contract.Component) ([]contract.Platform, error) {
	if len(u.platforms) > 0 {
		var out []contract.Platform
		for _, p := range u.platforms {
			out = append(out, contract.Platform(p))
		}
		return out, nil
	}
	platforms, err := fleet.NeededPlatforms(ctx, u.op.Store, c, time.Now())
	if err == nil && len(platforms) == 0 {
		platforms = sums.Platforms(c)
	}
	if err == nil && len(platforms) == 0 {
		err = outcome.Refuse(outcome.NoArtifact, "release %s has no bundle of %s", sums.Tag, c)
	}
	return platforms, err
}

// local reads the bundles that were given.
func (u *updating) local(want contract.Component) (fleet.Plan, error) {
	p, err := fleet.Read(u.files, time.Now())
	if err != nil {
		return p, err
	}
	if want != "" && want != p.Component {
		return p, outcome.Usage("the bundle is of component %s, not of %s", p.Component, want)
	}
	for _, name := range u.platforms {
		if _, there := p.Release.Artifacts[contract.Platform(name)]; !there {
			return p, outcome.Usage("none of the bundles is for platform %s", name)
		}
	}
	return p, nil
}

// schedule says which box rolls when.
func (u *updating) schedule(ctx context.Context, plans []fleet.Plan) error {
	out := os.Stderr
	if u.plan {
		out = os.Stdout
	}
	for _, p := range plans {
		slots, err := fleet.Schedule(ctx, u.op.Store, fleet.Target{Component: p.Component, Channel: u.channel}, u.spread, u.now)
		if err != nil {
			return err
		}
		if u.plan && u.json {
			if _, err := out.Write(contract.EncodeJSON(map[string]any{"component": p.Component, "channel": u.channel, "version": p.Release.Version, "promoted_at": contract.At(u.now), "boxes": slots})); err != nil {
				return err
			}
			continue
		}
		fmt.Fprintf(out, "%s %s on %s, if it is promoted at %s:\n", p.Component, p.Release.Version, u.channel, contract.At(u.now))
		for _, s := range slots {
			fmt.Fprintf(out, "  %s at %s\n", s.Label, s.At.Format("2006-01-02T15:04:05.000Z07:00"))
		}
	}
	if u.plan && !u.json {
		fmt.Fprintf(out, "to do exactly this: the same command with -at %s and without -plan, at once: a box waits its part from when it hears of the promote\n", contract.At(u.now))
	}
	return nil
}

// follow waits for the boxes, and rolls back once too many did not take it.
func (u *updating) follow(ctx context.Context, p contract.Pointer) error {
	limited, cancel := context.WithTimeout(ctx, u.timeout)
	defer cancel()
	what := fmt.Sprintf("%s %s on %s", p.Component, p.Payload.Current.Version, p.Channel)
	last := ""
	n, err := u.op.Follow(limited, p, u.haltAfter, func(n fleet.Tally) {
		line := fmt.Sprintf("%s: %d run it, %d did not take it, %d are on their way", what, n.Done, n.Failed, n.Left)
		if n.Held > 0 {
			line += fmt.Sprintf(", %d are held", n.Held)
		}
		if line != last {
			fmt.Fprintln(os.Stderr, line)
			last = line
		}
	})
	if err != nil {
		return err
	}
	for _, r := range n.Rows {
		switch r.State {
		case fleet.RolledBack, fleet.RollbackFailed, fleet.Refused:
			fmt.Fprintf(os.Stderr, "  %s: %s: %s\n", plain(r.Label), r.State, plain(r.Reason))
		}
	}
	if u.haltAfter > 0 && n.Failed >= u.haltAfter {
		back, err := u.op.Halt(ctx, p)
		if err != nil {
			return fmt.Errorf("%s: %d boxes did not take it, and it could not be taken back: %w", what, n.Failed, err)
		}
		return fmt.Errorf("halted: %d boxes did not take %s; %s is current again", n.Failed, what, back.Payload.Current.Version)
	}
	if n.Failed > 0 {
		return fmt.Errorf("%d boxes did not take %s", n.Failed, what)
	}
	if n.Lost > 0 {
		fmt.Fprintf(os.Stderr, "warning: %d heartbeats can't be read: whether their boxes took it is not known\n", n.Lost)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("%s: the boxes were not followed to the end: %w", what, err)
	}
	if n.Left > 0 {
		return &outcome.Error{Outcome: outcome.Deferred, Word: outcome.Late, Err: fmt.Errorf("%d boxes have not ended %s within %s: `sluice status` shows them", n.Left, what, u.timeout)}
	}
	return nil
}
