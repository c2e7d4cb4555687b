package box

import (
	"fmt"
	"strings"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/outcome"
)

// The gate and the manager judge together: whatever is wrong with a version,
// the good one is back, and the reason is one that a person can use.
func TestBadVersions(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	edge := func(version, fault string, change func(map[string]string)) string {
		files := Edge(must[string](t)(BuildEdge(ctx, version, fault)), version)
		files["manifest.json"] = strings.Replace(files["manifest.json"], `"soak": "7s"`, `"soak": "2s"`, 1)
		if change != nil {
			change(files)
		}
		return must[string](t)(f.Bundle(ctx, "edge-"+version, files))
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, edge("1", "", nil))), outcome.Applied))
	unit := func(from, to string) func(map[string]string) {
		return func(m map[string]string) {
			m["units/edge.service"] = strings.Replace(m["units/edge.service"], from, to, 1)
		}
	}
	for version, c := range map[string]struct {
		fault  string
		change func(map[string]string)
		word   outcome.Word
		says   string
	}{
		"2": {"exits 78", nil, outcome.Gate, "exited 78"},
		"3": {"exits 0", nil, outcome.Gate, "its start job ended as"},
		"4": {"deaf", nil, outcome.Gate, "not within 5s"},
		"5": {"dies", func(m map[string]string) {
			m["manifest.json"] = strings.Replace(m["manifest.json"], `"soak": "2s"`, `"soak": "7s"`, 1)
		}, outcome.Soak, "out of cheese"},
		"6": {"", unit("ExecStart=/opt/sluice/edge/current/bin/edge", "ExecStart=/opt/sluice/edge/current/bin/other"), outcome.Gate, "its start job ended as"},
		"7": {"", unit("User=edge", "User=nobody-of-that-name"), outcome.Gate, "exit status 217"},
		"8": {"", func(m map[string]string) { m["sysusers.d/edge.conf"] = "u edge - \"not: valid\"\n" }, outcome.Converge, "systemd-sysusers"},
		"9": {"", func(m map[string]string) { m["tmpfiles.d/edge.conf"] = "d /run/edge 0755 nobody-of-that-name - -\n" }, outcome.Converge, "systemd-tmpfiles"},
	} {
		r := must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, edge(version, c.fault, c.change))), outcome.RolledBack))
		if r.Word() != c.word || !strings.Contains(r.Reason, c.says) {
			t.Errorf("%s %s: the reason is %q, want %s and %q", version, c.fault, r.Reason, c.word, c.says)
		}
		if answer, err := f.Exec(ctx, "curl", "-sS", "--max-time", "5", "http://127.0.0.1:8080/"); err != nil || strings.TrimSpace(answer) != "1" {
			t.Errorf("%s %s: the service answers %q, %v", version, c.fault, answer, err)
		}
	}
}

// What a service may do to the two that judge it: the manager's words and the
// gate's own looks agree on the end, and the reason is one that a person can use.
func TestTwoJudges(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	edge := func(version, fault, gate string) string {
		files := Edge(must[string](t)(BuildEdge(ctx, version, fault)), version)
		files["units/edge.service"] = strings.Replace(files["units/edge.service"], "RestartSec=1", "RestartSec=1\nTimeoutStopSec=3", 1)
		files["manifest.json"] = strings.Replace(files["manifest.json"], `"pass_within": "5s", "soak": "7s"`, gate, 1)
		return must[string](t)(f.Bundle(ctx, "edge-"+version, files))
	}
	const quick = `"pass_within": "5s", "soak": "1s"`
	answers := func(version string) {
		t.Helper()
		if answer, err := f.Exec(ctx, "curl", "-sS", "--max-time", "5", "http://127.0.0.1:8080/"); err != nil || strings.TrimSpace(answer) != version {
			t.Errorf("the service answers %q, not %q, %v", answer, version, err)
		}
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, edge("1", "", quick))), outcome.Applied))
	// A unit that has used up its start limit would be stopped by a restart,
	// and then not started: also by the one that goes back.
	limit := func() {
		t.Helper()
		must[struct{}](t)(struct{}{}, Until(ctx, "start-limit-hit", RollTime, func() (bool, error) {
			_, _ = f.Exec(ctx, "systemctl", "restart", "edge.service")
			out, err := f.Exec(ctx, "systemctl", "show", "-P", "Result", "edge.service")
			return strings.TrimSpace(out) == "start-limit-hit", err
		}))
	}
	limit()
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, edge("2", "", quick))), outcome.Applied))
	answers("2")
	for version, c := range map[string]struct {
		fault, gate, says string
		before            func()
	}{
		"3": {"kills all", quick, "signal 9", nil},
		"4": {"forks", quick, "its start job ended as", nil},
		"5": {"stubborn", quick, "not within 5s", nil},
		"6": {"slow", quick, "took 15", nil},
		"7": {"exits", quick, "flux capacitor", limit},
	} {
		if c.before != nil {
			c.before()
		}
		r := must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, edge(version, c.fault, c.gate))), outcome.RolledBack))
		if r.Word() != outcome.Gate || !strings.Contains(r.Reason, c.says) {
			t.Errorf("%s: the reason is %q, want %q", c.fault, r.Reason, c.says)
		}
		answers("2")
		if out, err := f.Exec(ctx, "pgrep", "-f", "keep"); err == nil {
			t.Errorf("%s: a child is left: %s", c.fault, out)
		}
	}
	// As late as that, and told so beforehand, it is good.
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, edge("8", "slow", `"pass_within": "20s", "soak": "1s"`))), outcome.Applied))
	answers("8")
}

// A version command runs as a throwaway user in a unit of its own, which ends
// with all that it started.
func TestVersionCommandsInABox(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	for version, c := range map[string]struct{ script, says string }{
		"1": {"echo 2", "does not print"},
		"2": {"while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done", "would not stop printing"},
		"3": {"sleep 987 & sleep 987", "did not end in 30s"},
		"4": {"sleep 987 & touch /etc/touched /data/touched /opt/touched; id -u >/dev/full; echo 5", "does not print"},
	} {
		files := map[string]string{"bin/edge": "#!/bin/sh\n" + c.script + "\n",
			"manifest.json": fmt.Sprintf(`{"component": "edge", "version": "v%s", "version_command": ["bin/edge"]}`, version)}
		r := must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "v"+version, files)))), outcome.Refused))
		if r.Word() != outcome.VersionLie || !strings.Contains(r.Reason, c.says) {
			t.Errorf("%q: the reason is %q, want %q", c.script, r.Reason, c.says)
		}
		if out, err := f.Exec(ctx, "pgrep", "-f", "sleep 987"); err == nil {
			t.Errorf("%q: processes are left: %s", c.script, out)
		}
	}
	if out, _ := f.Exec(ctx, "find", "/etc/touched", "/data/touched", "/opt/touched"); out != "" {
		t.Errorf("the command wrote %s", out)
	}
}

// A path unit that the manager gave up on is armed again by heal.
func TestHealArmsAgain(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	if _, err := f.Exec(ctx, "systemctl", "stop", "sluice-verify@edge.path", "sluice-apply@edge.path"); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Exec(ctx, "systemctl", "start", "sluice-heal.service"); err != nil {
		t.Fatal(err)
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "edge", sleeper("edge", "1", "1s"))))), outcome.Applied))
}
