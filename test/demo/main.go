// Demo shows Sluice on one timeline: a throwaway box with a real systemd, a
// key, a folder bucket, and a small HTTP service that is installed, rolled,
// rolled back. It exits 0 only if every step ended as it should.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/test/box"
)

func main() {
	bin := flag.String("bin", "bin", "`folder` with the programs and the pipeline's bundle")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, *bin)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

var began = time.Now()

func say(format string, args ...any) {
	fmt.Printf("%7.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
}

func run(ctx context.Context, bin string) (err error) {
	say("building four versions of a small HTTP service, two of them bad")
	edges := map[string]string{}
	for version, fault := range map[string]string{"1.0": "", "1.1": "", "1.2": "exits", "1.3": "dies"} {
		if edges[version], err = box.BuildEdge(ctx, version, fault); err != nil {
			return err
		}
	}
	say("booting a throwaway box with a systemd of its own")
	b, err := box.New(ctx, fmt.Sprintf("/var/tmp/sluice-demo-%d", os.Getpid()), "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Remove()) }()
	say("making a key and a folder bucket; promoting the pipeline itself")
	f, err := box.NewFleet(ctx, b, bin, box.Bucket, "edge=stable")
	if err != nil {
		return err
	}
	bundles := map[string]string{}
	for version, program := range edges {
		if bundles[version], err = f.Bundle(ctx, "edge-"+version, box.Edge(program, version)); err != nil {
			return err
		}
	}
	say("enrolling the box")
	if err := f.Enroll(ctx, "-label", "demo-box"); err != nil {
		return err
	}
	d := demo{f, bundles}
	if err := d.steps(ctx); err != nil {
		return err
	}
	var table string
	err = box.Until(ctx, "the box to publish what it runs", box.RollTime, func() (bool, error) {
		table, err = f.Sluice(ctx, "status", "-store", f.Store, "-check")
		return strings.Count(table, " current ") == 2, err
	})
	fmt.Println("\n$ sluice status\n" + table)
	return err
}

type demo struct {
	*box.Fleet
	bundles map[string]string
}

func (d demo) steps(ctx context.Context) error {
	promote := func(version string) func() (contract.Pointer, error) {
		return func() (contract.Pointer, error) { return d.Promote(ctx, d.bundles[version]) }
	}
	back := func() (contract.Pointer, error) { return d.Rollback(ctx, "edge") }
	if err := d.step(ctx, "promote 1.0: the first install", promote("1.0"), outcome.Applied, "", "1.0"); err != nil {
		return err
	}
	hammer := d.Command(ctx, box.Operator+"/trees/edge-1.0/bin/edge", "hammer")
	var counts strings.Builder
	hammer.Stdout = &counts
	if err := hammer.Start(); err != nil {
		return err
	}
	say("a client hammers the service")
	err := d.step(ctx, "promote 1.1: a roll, while it is hammered", promote("1.1"), outcome.Applied, "", "1.1")
	_, stopErr := d.Exec(ctx, "pkill", "-TERM", "-f", "edge hammer")
	if err := errors.Join(err, stopErr, hammer.Wait()); err != nil {
		return err
	}
	say("the client got %s", strings.TrimSpace(counts.String()))
	if !strings.Contains(counts.String(), " 0 lost") {
		return errors.New("the client lost requests")
	}
	for _, s := range []struct {
		what    string
		do      func() (contract.Pointer, error)
		want    outcome.Outcome
		reason  string
		running string
	}{
		{"promote 1.1 again: nothing to do but to note it", promote("1.1"), outcome.Noted, "", "1.1"},
		{"promote 1.2, which exits at start", promote("1.2"), outcome.RolledBack, "flux capacitor", "1.1"},
		{"the operator takes it back", back, outcome.Noted, "", "1.1"},
		{"promote 1.3, which dies after five seconds", promote("1.3"), outcome.RolledBack, "out of cheese", "1.1"},
		{"the operator takes it back", back, outcome.Noted, "", "1.1"},
		{"the operator rolls back once more, to 1.0", back, outcome.Applied, "", "1.0"},
	} {
		if err := d.step(ctx, s.what, s.do, s.want, s.reason, s.running); err != nil {
			return err
		}
	}
	return nil
}

// step does one thing, waits for how it ends in the box, and compares that
// with what should be: outcome, reason, and what the service answers.
func (d demo) step(ctx context.Context, what string, do func() (contract.Pointer, error), want outcome.Outcome, reason, running string) error {
	say("%s", what)
	p, err := do()
	if err != nil {
		return err
	}
	r, err := d.Ended(ctx, p, want)
	if err != nil {
		return err
	}
	say("  %s %s%s", r.Version, r.Outcome, because(r))
	if !strings.Contains(r.Reason, reason) {
		return fmt.Errorf("the reason is %q, and does not say %q", r.Reason, reason)
	}
	answer, err := d.Exec(ctx, "curl", "-sS", "--max-time", "5", "http://127.0.0.1:8080/")
	if err != nil {
		return err
	}
	if strings.TrimSpace(answer) != running {
		return fmt.Errorf("the service answers %q, not %q", answer, running)
	}
	return nil
}

func because(r contract.Result) string {
	switch {
	case r.Reason != "":
		return ": " + r.Reason
	case r.Outcome == outcome.Applied && r.DownMS >= 0:
		return fmt.Sprintf(" in %.1f s, no answer for %d ms of it", float64(r.TookMS)/1000, r.DownMS)
	}
	return ""
}
