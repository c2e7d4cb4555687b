package box

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// The manager executes itself anew, as its package's upgrade makes it do, in
// the middle of a version command and in the middle of a soak. It says nothing
// about the build: both rolls end as they would have.
func TestManagerExecutesItselfAnew(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	files := sleeper("edge", "1", "4s")
	files["bin/edge"] = "#!/bin/sh\nsleep 2\necho edge 1\n"
	files["manifest.json"] = strings.Replace(files["manifest.json"], `"version": "1"`, `"version": "1", "version_command": ["bin/edge"]`, 1)
	p := must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "edge", files))))
	must[struct{}](t)(struct{}{}, Until(ctx, "the version command to run", RollTime, func() (bool, error) {
		out, err := f.Exec(ctx, "systemctl", "list-units", "--no-legend", "--state=activating", "sluice-run-*")
		return strings.Contains(out, "sluice-run"), err
	}))
	must[string](t)(f.Exec(ctx, "systemctl", "daemon-reexec"))
	must[struct{}](t)(struct{}{}, Until(ctx, "the soak", RollTime, func() (bool, error) {
		out, err := f.Exec(ctx, "systemctl", "show", "-P", "StatusText", "sluice-apply@edge.service")
		return strings.Contains(out, "soak"), err
	}))
	must[string](t)(f.Exec(ctx, "systemctl", "daemon-reexec"))
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
}

// What the two unprivileged users may leave in each other's way, and in root's:
// nobody waits for it, nobody fails for ever, and the next promote goes through.
func TestLeftoversOfAHostileUser(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	in, out := string(layout.Root("/").Path(layout.Incoming, "edge")), string(layout.Root("/").Path(layout.Verified, "edge"))
	for i, c := range []struct{ user, script string }{
		{"sluice-verify", "rm -f OUT/verdict.json; mkfifo OUT/verdict.json"},
		{"sluice-verify", "mkdir -p OUT/NEXT/tree; mkfifo OUT/NEXT/tree/manifest.json"},
		{"sluice-verify", "rm -rf OUT/requested.json; ln -s /etc/shadow OUT/requested.json"},
		{"sluice-verify", "mkdir -p OUT/.requested.json.tmp/x OUT/mark/requested/deep/deeper"},
		{"sluice-fetch", "cd IN/mark; mkdir -m700 .fetched.taken fetched; touch .fetched.taken/x fetched/x"},
		{"sluice-fetch", "cd IN/mark; mkdir -m700 fetched; touch fetched/x"},
		{"sluice-fetch", "rm -rf IN/pointer.json; mkfifo IN/pointer.json"},
		{"sluice-fetch", "mkdir -p IN/NEXT/bundle.unverified/x; mkfifo IN/NEXT/bundle.unverified.part"},
		{"sluice-fetch", "rm -f IN/pending.json; mkfifo IN/pending.json; truncate -s 20G IN/sparse"},
	} {
		version := string(rune('1' + i))
		script := strings.NewReplacer("IN", in, "OUT", out, "NEXT", version).Replace(c.script)
		must[string](t)(f.Exec(ctx, "runuser", "-u", c.user, "--", "sh", "-c", script))
		p := must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "v"+version, sleeper("edge", version, "100ms")))))
		r, err := f.Ended(ctx, p, outcome.Applied)
		if err != nil || f.running("edge") != version {
			t.Fatalf("%s: %s: %+v, %v", c.user, c.script, r, err)
		}
	}
	if out := must[string](t)(f.Exec(ctx, "systemctl", "show", "-P", "NRestarts", "sluice-fetch.service")); strings.TrimSpace(out) != "0" {
		t.Errorf("fetch was restarted %s times", strings.TrimSpace(out))
	}
}

// Enrolling again gives no folder away that fetch puts a link to in place of
// its own.
func TestEnrollingAgainFollowsNoLink(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	must[string](t)(f.Exec(ctx, "mkdir", "-m", "0755", "/srv/victim"))
	mark := string(layout.Root("/").Path(layout.FetchedMark, "edge"))
	must[string](t)(f.Exec(ctx, "runuser", "-u", layout.UserFetch, "--", "sh", "-c", "mv "+mark+" "+mark+".real && ln -s /srv/victim "+mark))
	if err := f.Enroll(ctx, "-label", "box-1"); err == nil {
		t.Error("a link in place of a folder was taken")
	}
	st, err := os.Stat(filepath.Join(f.Root, "srv/victim"))
	if err != nil || st.Mode().Perm() != 0o755 || st.Mode()&os.ModeSetgid != 0 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	must[string](t)(f.Exec(ctx, "runuser", "-u", layout.UserFetch, "--", "sh", "-c", "rm "+mark+" && mv "+mark+".real "+mark))
	if err := f.Enroll(ctx, "-label", "box-1"); err != nil {
		t.Error(err)
	}
}

// apply, stage and recover are killed again and again while promotes go
// through: each ends, on one build, with no roll left open.
func TestKilledAgainAndAgain(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	for i := range 6 {
		version := string(rune('1' + i))
		p := must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "v"+version, sleeper("edge", version, "1s")))))
		for _, unit := range []string{"sluice-stage@edge.service", "sluice-apply@edge.service", "sluice-recover@edge.service"}[:1+i%3] {
			_ = Until(ctx, unit+" to run", 10*time.Second, func() (bool, error) { // it may not run at all
				out, err := f.Exec(ctx, "systemctl", "kill", "-s", "KILL", unit)
				_ = out
				return err == nil, err
			})
		}
		if _, err := f.Ended(ctx, p, outcome.Applied); err != nil {
			t.Fatal(err)
		}
		a, _, err := record.Load[contract.Applied](f.State("edge"), layout.Applied)
		if err != nil || string(a.Version) != version || f.running("edge") != version {
			t.Errorf("applied %s, runs %s, %v", a.Version, f.running("edge"), err)
		}
	}
}
