package box

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// buildHostile puts the swapping program into the box.
func (f *Fleet) buildHostile(t *testing.T) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "hostile")
	c := exec.Command(goTool(), "build", "-o", out, "sluice/test/hostile")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if msg, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, msg)
	}
	must[struct{}](t)(struct{}{}, f.Copy(out, "/srv/hostile"))
}

// swap starts the swapping program as a user; stop ends it and returns how
// often it swapped.
func (f *Fleet) swap(t *testing.T, user, folder, marker string, atLeast int) (stop func() int) {
	t.Helper()
	seed := fmt.Sprint(time.Now().UnixNano())
	enough := "/srv/enough-" + seed
	c := f.Command(context.WithoutCancel(t.Context()), "runuser", "-u", user, "--", "/srv/hostile", folder, fmt.Sprint(atLeast), seed, marker, enough)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	must[struct{}](t)(struct{}{}, c.Start())
	return func() int {
		t.Helper()
		must[struct{}](t)(struct{}{}, f.Write(enough, "", 0o644))
		if err := c.Wait(); err != nil {
			t.Fatalf("%s: %v: %s", user, err, out.String())
		}
		n, err := strconv.Atoi(strings.TrimSpace(out.String()))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

var (
	openedCall = regexp.MustCompile(`^(?:\d+ )?open(?:at|at2)?\(.* = \d+<([^>]*)>`)
	readCall   = regexp.MustCompile(`^(?:\d+ )?(read|pread64|copy_file_range|sendfile|splice)\(\d+<([^>]*)>.* = (\d+)`)
	execCall   = regexp.MustCompile(`^(?:\d+ )?execve\(`)
	// What stage may open: its own state, its configuration, the pointer that a
	// third user got for it, what it is asked for, and what a Go program reads of
	// the machine.
	mayOpen = regexp.MustCompile(`^(/opt/sluice/(edge|sluice)(/.*)?|/opt/sluice|/etc/sluice(/(box|edge)\.conf)?|/etc/(passwd|group|localtime|nsswitch\.conf)|/run/sluice-pointer(/edge(/.*)?)?|/data/sluice(/edge(/verified(/.*)?)?)?|/data|/|/proc/self/.*|/proc/\d+/.*|/proc/sys/.*|/sys/(kernel/mm|fs/cgroup)(/.*)?|/dev/null|/usr/share/zoneinfo/.*)$`)
)

// Two captured programs swap whatever they can, a hundred thousand times and
// more, while root works: with the units as they are, and with each run of stage
// traced. Root opens nothing outside of what it was given, reads no more than the
// signed sizes, waits for nobody, and a true promote goes through afterwards.
func TestHostileUsers(t *testing.T) {
	needsStrace(t)
	f := enrolled(t, "edge=stable")
	f.buildHostile(t)
	ctx := t.Context()
	root := layout.Root("/")
	in, out := root.Path(layout.Incoming, "edge"), root.Path(layout.Verified, "edge")
	bundle := func(version string) string {
		files := sleeper("edge", version, "100ms")
		files["bin/edge"] = "#!/bin/sh\necho edge " + version + "\n"
		files["etc/deep/er/edge.conf"] = strings.Repeat("of "+version+"\n", 4000)
		files["manifest.json"] = strings.Replace(files["manifest.json"], `"version":`, `"version_command": ["bin/edge"], "version":`, 1)
		return must[string](t)(f.Bundle(ctx, "edge-"+version, files))
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bundle("1"))), outcome.Applied))
	must[string](t)(f.Exec(ctx, "systemctl", "stop", "sluice-stage@edge.path"))
	two := must[contract.Pointer](t)(f.Promote(ctx, bundle("2")))
	must[struct{}](t)(struct{}{}, Until(ctx, "a verified tree", RollTime, func() (bool, error) {
		_, err := os.Stat(filepath.Join(f.Root, root.Path(layout.Requested, "edge")))
		return err == nil, err
	}))

	const swaps = 60_000
	// Each run traced.
	must[string](t)(f.Exec(ctx, "systemctl", "stop", "sluice-verify@edge.path", "sluice-apply@edge.path", "sluice-fetch.service"))
	m, _, err := record.Manifest(filepath.Join(f.Root, root.Tree("edge", "2")))
	if err != nil {
		t.Fatal(err)
	}
	bound := int64(contract.MaxHint + 1 + contract.MaxManifest + 1 + len(m.Files))
	for _, file := range m.Files {
		bound += file.Size
	}
	must[string](t)(f.Exec(ctx, "mkdir", "-p", "/srv/trace"))
	stop := f.swap(t, layout.UserVerify, out, root.Path(layout.Requested, "edge"), swaps)
	const runs = 60
	most, deep := int64(0), 0
	for run := range runs {
		must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-pointer@edge.service"))
		name := fmt.Sprintf("/srv/trace/%d", run)
		said, err := f.Exec(ctx, "timeout", "60", "strace", "-ff", "-y", "-s", "0", "-o", name, "-e", "trace=open,openat,openat2,read,pread64,copy_file_range,sendfile,splice,execve", "/opt/sluice/sluice/good/bin/stage", "-component", "edge")
		if err != nil && strings.Contains(err.Error(), "exit status 124") {
			t.Fatalf("run %d: stage waits for somebody: %s", run, said)
		}
		got, inTree := f.judgeTrace(t, name, bound)
		most = max(most, got)
		if inTree {
			deep++
		}
		// So that the next one copies again.
		must[string](t)(f.Exec(ctx, "rm", "-rf", f.box(layout.Sets)+"/2", f.box(layout.StagedRecord), f.box(layout.Staged), f.box(layout.Result)))
	}
	total := stop()
	if deep == 0 {
		t.Error("no run came as far as the tree: this test sees nothing")
	}
	t.Logf("SHOW %d traced runs of stage, %d as far as the tree, read at most %d bytes of the unprivileged side, of %d allowed", runs, deep, most, bound)

	// The units as they are.
	must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-fetch.service", "sluice-verify@edge.path", "sluice-stage@edge.path", "sluice-apply@edge.path"))
	stops := []func() int{
		f.swap(t, layout.UserVerify, out, root.Path(layout.Requested, "edge"), swaps/2),
		f.swap(t, layout.UserFetch, in, root.Path(layout.Fetched, "edge"), swaps/2),
	}
	for _, stop := range stops {
		total += stop()
	}
	if total < 100_000 {
		t.Errorf("only %d swaps", total)
	}
	t.Logf("SHOW %d swaps by two hostile users while root works", total)

	// Nothing that was not signed has a name on root's side.
	sets := must[[]os.DirEntry](t)(os.ReadDir(f.State("edge").Path(layout.Sets)))
	for _, e := range sets {
		set := f.State("edge").Set(contract.Version(e.Name()))
		digest := two.Payload.Current.Artifacts[contract.Here()].ManifestSHA256
		if e.Name() == "1" {
			digest = two.Payload.History[0].Artifacts[contract.Here()].ManifestSHA256
		}
		if _, err := record.CheckSet(set, digest); err != nil && !strings.HasPrefix(e.Name(), ".") {
			t.Errorf("%s: %v", e.Name(), err)
		}
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bundle("3"))), outcome.Applied))
	if f.running("edge") != "3" {
		t.Errorf("it runs %s", f.running("edge"))
	}
}

// box is a place of component edge, as the box sees it.
func (f *Fleet) box(p layout.Place) string { return layout.Root("/").Path(p, "edge") }

// judgeTrace judges what one run opened, and returns how much it read of the
// unprivileged side, and whether it came as far as the tree.
func (f *Fleet) judgeTrace(t *testing.T, name string, bound int64) (got int64, inTree bool) {
	t.Helper()
	traces := must[[]string](t)(filepath.Glob(filepath.Join(f.Root, name) + ".*"))
	if len(traces) == 0 {
		t.Fatal("there is no trace")
	}
	execs, opens := 0, 0
	for _, path := range traces {
		for line := range strings.Lines(string(must[[]byte](t)(os.ReadFile(path)))) {
			line = strings.TrimSpace(line)
			if execCall.MatchString(line) {
				execs++
			}
			if c := openedCall.FindStringSubmatch(line); c != nil {
				if opens++; !mayOpen.MatchString(strings.TrimSuffix(c[1], " (deleted)")) {
					t.Errorf("stage opened %s: %s", c[1], line)
				}
				inTree = inTree || strings.Contains(c[1], "/tree/")
			}
			if c := readCall.FindStringSubmatch(line); c != nil && strings.HasPrefix(c[2], "/data/") {
				n, err := strconv.ParseInt(c[3], 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				got += n
			}
		}
	}
	if execs != 1 || opens == 0 {
		t.Errorf("%d programs were run, %d files opened", execs, opens)
	}
	if got > bound {
		t.Errorf("stage read %d bytes of the unprivileged side, allowed are %d", got, bound)
	}
	return got, inTree
}
