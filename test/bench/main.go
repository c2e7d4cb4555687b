// Bench prints figures of Sluice beside those of a peer, measured in the same
// run: what a client that never pauses loses while a service is moved to
// another version. The peer is a plain `systemctl restart` of the same program
// that listens by itself, as a package's maintainer script does it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"sluice/internal/outcome"
	"sluice/test/box"
)

func main() {
	bin := flag.String("bin", "bin", "`folder` with the programs and the pipeline's bundle")
	rounds := flag.Int("n", 5, "how often each is done")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	err := run(ctx, *bin, *rounds)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// A figure is what one way did in each round.
type figure struct {
	lost []int           // requests
	took []time.Duration // from the command, or the promote, to its end; without pass and soak
}

func run(ctx context.Context, bin string, rounds int) (err error) {
	b, err := box.New(ctx, fmt.Sprintf("/var/tmp/sluice-bench-%d", os.Getpid()), "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Remove()) }()
	f, err := box.NewFleet(ctx, b, bin, box.Bucket, "edge=stable")
	if err != nil {
		return err
	}
	bundles := map[string]string{}
	for _, version := range []string{"1", "2"} {
		program, err := box.BuildEdge(ctx, version, "")
		if err != nil {
			return err
		}
		files := box.Edge(program, version)
		files["manifest.json"] = strings.Replace(files["manifest.json"], `"soak": "7s"`, `"soak": "1ms"`, 1)
		if bundles[version], err = f.Bundle(ctx, "edge-"+version, files); err != nil {
			return err
		}
	}
	if err := f.Enroll(ctx, "-label", "bench"); err != nil {
		return err
	}
	roll := func(version string) (time.Duration, error) {
		p, err := f.Promote(ctx, bundles[version])
		if err != nil {
			return 0, err
		}
		r, err := f.Ended(ctx, p, outcome.Applied)
		return time.Duration(r.TookMS) * time.Millisecond, err
	}
	if _, err := roll("1"); err != nil {
		return err
	}
	var sluice, plain figure
	for i := range rounds {
		if err := measure(ctx, f, &sluice, func() (time.Duration, error) { return roll([]string{"2", "1"}[i%2]) }); err != nil {
			return err
		}
	}
	unit := "[Service]\nType=notify\nExecStart=" + box.Operator + "/trees/edge-1/bin/edge\n"
	if err := f.Write("/etc/systemd/system/plain.service", unit, 0o644); err != nil {
		return err
	}
	for _, argv := range [][]string{{"systemctl", "stop", "edge.socket", "edge.service"}, {"systemctl", "daemon-reload"}, {"systemctl", "start", "plain.service"}} {
		if _, err := f.Exec(ctx, argv...); err != nil {
			return err
		}
	}
	for range rounds {
		restart := func() (time.Duration, error) {
			began := time.Now()
			_, err := f.Exec(ctx, "sh", "-c", "systemctl daemon-reload && systemctl restart plain.service")
			return time.Since(began), err
		}
		if err := measure(ctx, f, &plain, restart); err != nil {
			return err
		}
	}
	fmt.Printf("%d rounds each                       median lost   median ms\n", rounds)
	fmt.Printf("sluice: a roll, socket left alone   %11d  %10d\n", median(sluice.lost), median(sluice.took).Milliseconds())
	fmt.Printf("systemctl daemon-reload, restart    %11d  %10d\n", median(plain.lost), median(plain.took).Milliseconds())
	return nil
}

// measure hammers the service while it is moved.
func measure(ctx context.Context, f *box.Fleet, to *figure, move func() (time.Duration, error)) error {
	hammer := f.Command(ctx, box.Operator+"/trees/edge-1/bin/edge", "hammer")
	var counts strings.Builder
	hammer.Stdout = &counts
	if err := hammer.Start(); err != nil {
		return err
	}
	took, err := move()
	_, stopErr := f.Exec(ctx, "pkill", "-TERM", "-f", "edge hammer")
	if err := errors.Join(err, stopErr, hammer.Wait()); err != nil {
		return err
	}
	fields := strings.Fields(counts.String())
	if len(fields) < 2 {
		return fmt.Errorf("the client said %q", counts.String())
	}
	var lost int
	if _, err := fmt.Sscan(fields[len(fields)-2], &lost); err != nil {
		return err
	}
	to.lost, to.took = append(to.lost, lost), append(to.took, took)
	return nil
}

func median[T int | time.Duration](v []T) T {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}
