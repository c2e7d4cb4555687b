package box

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// open makes a throwaway box for a test. What is missing for one is said.
func open(t *testing.T) *Box {
	t.Helper()
	t.Parallel()
	if err := Needs(); err != nil {
		t.Skip(err)
	}
	if os.Getenv("BIN") == "" {
		t.Skip("BIN does not name the folder of the programs: `make test` does")
	}
	b, err := New(t.Context(), fmt.Sprintf("/var/tmp/sluice-%d-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-")), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			logs, _ := b.Exec(context.Background(), "journalctl", "--no-pager", "-q", "-o", "short-precise", "-n", "80")
			t.Log(logs)
		}
		if err := b.Remove(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// enrolled makes a fleet of one box over a folder bucket.
func enrolled(t *testing.T, components string) *Fleet {
	t.Helper()
	b := open(t)
	f, err := NewFleet(t.Context(), b, os.Getenv("BIN"), Bucket, components)
	if err == nil {
		err = f.Enroll(t.Context(), "-label", "box-1")
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// sleeper is a component whose service sleeps.
func sleeper(name, version, soak string) map[string]string {
	return map[string]string{
		"units/" + name + ".service": "[Unit]\nDescription=Sleeps\n[Service]\nType=exec\nExecStart=/bin/sleep infinity\n# " + version + "\n[Install]\nWantedBy=multi-user.target\n",
		"manifest.json":              fmt.Sprintf(`{"component": %q, "version": %q, "units": {"enable": ["%s.service"], "restart": [{"unit": "%s.service"}]}, "gate": {"pass_within": "5s", "soak": %q}}`, name, version, name, name, soak),
	}
}

func (f *Fleet) running(c contract.Component) string {
	target, _ := os.Readlink(filepath.Join(f.Root, string(layout.Root("/").Path(layout.Current, string(c)))))
	return filepath.Base(target)
}

// startS3 starts a real S3 server in the box, with an empty bucket and a log
// of every request.
func startS3(t *testing.T, b *Box) (url string, env []string, requests func() string) {
	t.Helper()
	gw := os.Getenv("VERSITYGW")
	if gw == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	must[struct{}](t)(struct{}{}, b.Copy(gw, "/srv/versitygw"))
	must[struct{}](t)(struct{}{}, os.MkdirAll(filepath.Join(b.Root, "srv/s3/fleet"), 0o755))
	server := b.Command(context.WithoutCancel(t.Context()), "/srv/versitygw", "--access", "operator", "--secret", "operator-secret", "--port", "127.0.0.1:7070", "--quiet", "--access-log", "/srv/s3.log", "posix", "/srv/s3")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Wait() }() // it ends with the box
	must[struct{}](t)(struct{}{}, Until(t.Context(), "the S3 server", 20*time.Second, func() (bool, error) {
		_, err := b.Exec(t.Context(), "curl", "-sS", "-o", "/dev/null", "http://127.0.0.1:7070/")
		return err == nil, err
	}))
	must[struct{}](t)(struct{}{}, b.Write(Operator+"/s3", "[default]\naws_access_key_id = operator\naws_secret_access_key = operator-secret\n", 0o600))
	return "s3://fleet?region=us-east-1&endpoint=http://127.0.0.1:7070", []string{"AWS_ACCESS_KEY_ID=operator", "AWS_SECRET_ACCESS_KEY=operator-secret"}, func() string {
		log, _ := os.ReadFile(filepath.Join(b.Root, "srv/s3.log"))
		return string(log)
	}
}

// exporter is a real public service, at one of its releases.
func exporter(program, version string, extra map[string]string, gate string) map[string]string {
	files := map[string]string{
		"bin/node_exporter":           program,
		"units/exporter.service":      "[Unit]\nDescription=Figures of this machine\n[Service]\nUser=exporter\nExecStart=/opt/sluice/exporter/current/bin/node_exporter --web.listen-address=127.0.0.1:9100 --collector.textfile.directory=/var/lib/exporter\nRestart=on-failure\n[Install]\nWantedBy=multi-user.target\n",
		"sysusers.d/exporter.conf":    "u exporter - \"Figures of this machine\" /var/lib/exporter\n",
		"tmpfiles.d/exporter.conf":    "d /var/lib/exporter 0750 exporter exporter -\n",
		"units/exporter-tidy.timer":   "[Unit]\nDescription=Tidies now and then\n[Timer]\nOnCalendar=daily\n[Install]\nWantedBy=timers.target\n",
		"units/exporter-tidy.service": "[Unit]\nDescription=Tidies\n[Service]\nType=oneshot\nExecStart=/bin/true\n# of " + version + "\n",
	}
	enable := `"exporter.service", "exporter-tidy.timer"`
	for name, text := range extra {
		files[name] = text
		if strings.HasSuffix(name, ".timer") {
			enable += fmt.Sprintf(", %q", filepath.Base(name))
		}
	}
	files["manifest.json"] = fmt.Sprintf(`{"component": "exporter", "version": %q, "version_command": ["bin/node_exporter", "--version"], "version_text": %q,
		"units": {"enable": [%s], "restart": [{"unit": "exporter.service", "inputs": ["bin/node_exporter"]}], "quiesce": ["exporter-tidy.timer", "exporter-tidy.service"]},
		"gate": %s}`, version, strings.SplitN(version, "-", 2)[0], enable, gate)
	return files
}

// buildExporter builds a release of node_exporter through the module proxy,
// once. A plain install would print an empty version.
func buildExporter(t *testing.T, version string) string {
	t.Helper()
	cache := must[string](t)(os.UserCacheDir())
	dir := filepath.Join(cache, "sluice-tools", "node_exporter@v"+version)
	program := filepath.Join(dir, "node_exporter")
	if _, err := os.Stat(program); err != nil {
		c := exec.CommandContext(t.Context(), goTool(), "install", "-trimpath", "-ldflags", "-s -w -X github.com/prometheus/common/version.Version="+version, "github.com/prometheus/node_exporter@v"+version)
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "GOBIN="+dir, "GOFLAGS=")
		c.Dir = os.TempDir()
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("building node_exporter %s: %v: %s", version, err, out)
		}
	}
	return string(must[[]byte](t)(os.ReadFile(program)))
}

// volatile are the properties of a unit that a restart may change: process,
// invocation and control-group ids, times, resource counters, NRestarts and
// what was run when.
var volatile = regexp.MustCompile(`^(.*PID|InvocationID|ControlGroupId|.*Timestamp(Monotonic)?|.*USec(Realtime|Monotonic)?|Memory.*|CPU.*|IO.*|IP.*|Tasks.*|NRestarts|Exec.*|NFileDescriptorStore|StatusText|Job|Result|SubState)=`)

// snapshot is all that a roll may touch: the release's files, every link of
// enablement, which set is current, and what the manager says of the units.
func (f *Fleet) snapshot(t *testing.T, units ...string) string {
	t.Helper()
	var s strings.Builder
	for _, dir := range []string{"/etc/systemd/system", "/etc/sysusers.d", "/etc/tmpfiles.d", "/opt/sluice/exporter/current/", "/opt/sluice/exporter/sets/1.10.1"} {
		base := filepath.Join(f.Root, dir)
		err := filepath.WalkDir(base, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			fmt.Fprintf(&s, "%s %s", strings.TrimPrefix(path, f.Root), info.Mode())
			if info.Mode()&fs.ModeSymlink != 0 {
				target, _ := os.Readlink(path)
				fmt.Fprintf(&s, " -> %s", target)
			} else if info.Mode().IsRegular() {
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				fmt.Fprintf(&s, " %x", sha256.Sum256(data))
			}
			s.WriteByte('\n')
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	fmt.Fprintln(&s, f.running("exporter"))
	out := must[string](t)(f.Exec(t.Context(), append([]string{"systemctl", "show", "--all"}, units...)...))
	for line := range strings.Lines(out) {
		if !volatile.MatchString(line) { // the manager lists what it has in a set in no order
			name, values, _ := strings.Cut(strings.TrimSpace(line), "=")
			words := strings.Fields(values)
			slices.Sort(words)
			fmt.Fprintf(&s, "%s=%s\n", name, strings.Join(words, " "))
		}
	}
	return s.String()
}

func differences(a, b string) string {
	var out []string
	la, lb := strings.Split(a, "\n"), strings.Split(b, "\n")
	for _, l := range la {
		if !slices.Contains(lb, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range lb {
		if !slices.Contains(la, l) {
			out = append(out, "+ "+l)
		}
	}
	return strings.Join(out, "\n")
}

// A real public service rolls between two of its releases, from a real S3
// server, and a gate that fails leaves the box byte for byte as it was.
func TestRealServiceFromS3(t *testing.T) {
	ctx := t.Context()
	b := open(t)
	url, env, requests := startS3(t, b)
	fleet := must[*Fleet](t)
	f := fleet(newFleetWithEnv(ctx, b, url, env, "exporter=stable"))
	must[struct{}](t)(struct{}{}, f.Enroll(ctx, "-label", "box-1", "-s3-credentials", Operator+"/s3"))
	old, recent := buildExporter(t, "1.10.1"), buildExporter(t, "1.10.2")
	timer := map[string]string{"units/exporter-%s.timer": "[Unit]\nDescription=Of one release only\n[Timer]\nOnCalendar=weekly\n[Install]\nWantedBy=timers.target\n",
		"units/exporter-%s.service": "[Unit]\nDescription=Of one release only\n[Service]\nType=oneshot\nExecStart=/bin/true\n"}
	only := func(name string) map[string]string {
		m := map[string]string{}
		for k, v := range timer {
			m[fmt.Sprintf(k, name)] = v
		}
		return m
	}
	probe := `{"pass_within": "10s", "soak": "2s", "probes": [{"http": "http://127.0.0.1:9100/metrics", "status": %d}]}`
	good, bad := fmt.Sprintf(probe, 200), strings.Replace(fmt.Sprintf(probe, 418), "10s", "3s", 1)
	bundle := must[string](t)
	one := bundle(f.Bundle(ctx, "one", exporter(old, "1.10.1", only("old"), good)))
	broken := bundle(f.Bundle(ctx, "broken", exporter(recent, "1.10.2-broken", only("new"), bad)))
	two := bundle(f.Bundle(ctx, "two", exporter(recent, "1.10.2", only("new"), good)))

	promote := must[contract.Pointer](t)
	result := must[contract.Result](t)
	result(f.Ended(ctx, promote(f.Promote(ctx, one)), outcome.Applied))
	units := []string{"exporter.service", "exporter-tidy.timer", "exporter-tidy.service", "exporter-old.timer", "exporter-old.service", "exporter-new.timer", "exporter-new.service"}
	before := f.snapshot(t, units...)
	r := result(f.Ended(ctx, promote(f.Promote(ctx, broken)), outcome.RolledBack))
	if r.Word() != outcome.Gate || !strings.Contains(r.Reason, "418") {
		t.Errorf("the reason: %s", r.Reason)
	}
	if after := f.snapshot(t, units...); after != before {
		t.Errorf("the box is not what it was:\n%s", differences(before, after))
	}

	r = result(f.Ended(ctx, promote(f.Promote(ctx, two)), outcome.Applied))
	metrics := must[string](t)(f.Exec(ctx, "curl", "-sS", "http://127.0.0.1:9100/metrics"))
	if !strings.Contains(metrics, `version="1.10.2"`) || f.running("exporter") != "1.10.2" {
		t.Errorf("the release that answers is not 1.10.2; current is %s", f.running("exporter"))
	}
	for unit, want := range map[string]string{"exporter-old.timer": "not-found", "exporter-new.timer": "enabled", "exporter-tidy.timer": "enabled", "exporter.service": "enabled"} {
		got, _ := f.Exec(ctx, "systemctl", "is-enabled", unit)
		if got = strings.TrimSpace(got); got != want && !(want == "not-found" && got == "") {
			t.Errorf("%s is %q, want %q", unit, got, want)
		}
	}
	t.Logf("SHOW node_exporter 1.10.1 -> 1.10.2 from S3: %d ms, no answer for %d ms of it", r.TookMS, r.DownMS)

	// A promote of the same is noted, and downloads nothing.
	downloads := func() (n int) {
		for line := range strings.Lines(requests()) {
			if strings.Contains(line, "bootstrap/exporter/1.10.2/") {
				n++
			}
		}
		return n
	}
	count := downloads()
	if count == 0 {
		t.Fatal("the server's log shows no download at all")
	}
	again := promote(f.Promote(ctx, two))
	result(f.Ended(ctx, again, outcome.Noted))
	// Of the operator's own reads and writes there are as many as in any promote of what is mirrored: one.
	if now := downloads(); now != count+1 {
		t.Errorf("%d requests for the bundle, then %d: more than the operator's own", count, now)
	}
}

func newFleetWithEnv(ctx context.Context, b *Box, store string, env []string, components string) (*Fleet, error) {
	return newFleet(ctx, &Fleet{Box: b, Store: store, Env: env}, os.Getenv("BIN"), components)
}

// Three components are promoted at the same moment, and one hangs in its
// soak: the others end. A file that another one has is refused.
func TestThreeComponents(t *testing.T) {
	f := enrolled(t, "slow=stable,quick=stable,third=stable,thief=stable")
	ctx := t.Context()
	pointers := map[string]contract.Pointer{}
	bundles := map[string]string{}
	for name, soak := range map[string]string{"slow": "60s", "quick": "1s", "third": "1s"} {
		bundles[name] = must[string](t)(f.Bundle(ctx, name, sleeper(name, "1", soak)))
	}
	for name, b := range bundles {
		pointers[name] = must[contract.Pointer](t)(f.Promote(ctx, b))
	}
	for _, name := range []string{"quick", "third"} {
		must[contract.Result](t)(f.Ended(ctx, pointers[name], outcome.Applied))
	}
	j, open, err := record.Load[contract.Journal](f.State("slow"), layout.Journal)
	if err != nil || !open || j.Phase != "gating" {
		t.Errorf("slow is not in its soak: %+v, %v", j, err)
	}
	stolen := sleeper("thief", "1", "1s")
	stolen["units/quick.service"] = stolen["units/thief.service"]
	p := must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "thief", stolen))))
	r := must[contract.Result](t)(f.Ended(ctx, p, outcome.Refused))
	if r.Word() != outcome.ForeignFile || !strings.Contains(r.Reason, "quick") {
		t.Errorf("the reason: %s", r.Reason)
	}
	if f.running("thief") != "." {
		t.Errorf("thief runs %s", f.running("thief"))
	}
	must[contract.Result](t)(f.Ended(ctx, pointers["slow"], outcome.Applied))
}

// The operator rolls back in each phase of the roll that this undoes. The box
// ends on the old build every time.
func TestRollbackInEveryPhase(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	files := func(version string) map[string]string {
		m := sleeper("edge", version, "3s")
		// It takes its time to start, so that converging lasts.
		m["units/edge.service"] = strings.Replace(m["units/edge.service"], "ExecStart=", "ExecStartPre=/bin/sleep 2\nExecStart=", 1)
		return m
	}
	one, two := must[string](t)(f.Bundle(ctx, "one", files("1"))), must[string](t)(f.Bundle(ctx, "two", files("2")))
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, one)), outcome.Applied))
	at := func(phase contract.Phase) func() bool {
		return func() bool {
			j, _, _ := record.Load[contract.Journal](f.State("edge"), layout.Journal)
			return j.Phase == phase
		}
	}
	there := func(p layout.Place) func() bool {
		return func() bool { _, err := os.Lstat(f.State("edge").Path(p)); return err == nil }
	}
	for _, moment := range []struct {
		name string
		is   func() bool
	}{
		{"at once", func() bool { return true }},
		{"fetched", there(layout.Pointer)},
		{"staged", func() bool {
			s, _, _ := record.Load[contract.Staged](f.State("edge"), layout.StagedRecord)
			return s.Version == "2"
		}},
		{"converging", at("converging")},
		{"gating", at("gating")},
		{"applied", func() bool { return f.running("edge") == "2" && !f.State("edge").Open() }},
	} {
		must[contract.Pointer](t)(f.Promote(ctx, two))
		must[struct{}](t)(struct{}{}, Until(ctx, moment.name, RollTime, func() (bool, error) { return moment.is(), nil }))
		back := must[contract.Pointer](t)(f.Rollback(ctx, "edge"))
		r := must[contract.Result](t)(f.Ended(ctx, back, outcome.Applied, outcome.Noted))
		if f.running("edge") != "1" {
			t.Errorf("%s: it runs %s after %+v", moment.name, f.running("edge"), r)
		}
		if out, err := f.Exec(ctx, "systemctl", "is-active", "edge.service"); err != nil {
			t.Errorf("%s: edge.service is %s", moment.name, out)
		}
	}
}

// A second promote within the spread of the first: the newest wins, and the
// first is never fetched. A promote that was rolled back is not tried again
// when the bell rings.
func TestSpreadAndBell(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	bundle := func(version string) string {
		return must[string](t)(f.Bundle(ctx, "v"+version, sleeper("edge", version, "1s")))
	}
	p := must[contract.Pointer](t)(f.Promote(ctx, bundle("1"), "-spread", "24h"))
	must[struct{}](t)(struct{}{}, Until(ctx, "the box to wait its part of the spread", RollTime, func() (bool, error) {
		w, ok, err := record.Load[contract.Pending](f.State("edge"), layout.Pending)
		return ok && w.Tuple.Equal(p.Tuple()) && !w.Asked, err
	}))
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bundle("2"))), outcome.Applied))
	versions, _, err := record.Load[contract.Versions](f.State("edge"), layout.Versions)
	if _, had := versions.Versions.Find("1"); had || err != nil || f.running("edge") != "2" {
		t.Errorf("1 was staged: %v, %v; it runs %s", versions, err, f.running("edge"))
	}

	bad := sleeper("edge", "3", "1s")
	bad["units/edge.service"] = strings.Replace(bad["units/edge.service"], "/bin/sleep infinity", "/bin/false", 1)
	r := must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "v3", bad)))), outcome.RolledBack))
	began := must[string](t)(f.Exec(ctx, "systemctl", "show", "-P", "InvocationID", "sluice-apply@edge.service"))
	for range 3 {
		must[struct{}](t)(struct{}{}, f.Write("/srv/bucket/control/serial", time.Now().String(), 0o644))
		// The bell has been heard once the box has published that it has looked.
		must[struct{}](t)(struct{}{}, Until(ctx, "a poll", RollTime, func() (bool, error) {
			out, err := f.Exec(ctx, "systemctl", "show", "-P", "StatusText", "sluice-fetch.service")
			return strings.Contains(out, "following"), err
		}))
	}
	if now := must[string](t)(f.Exec(ctx, "systemctl", "show", "-P", "InvocationID", "sluice-apply@edge.service")); now != began {
		t.Error("the bell made the box try again")
	}
	if again, _, _ := record.Load[contract.Result](f.State("edge"), layout.Result); !again.At.Equal(r.At.Time) || f.running("edge") != "2" {
		t.Errorf("%+v, runs %s", again, f.running("edge"))
	}
}

// The box goes on after a power cut in its soak, and the service with it.
func TestPowerCutInTheSoak(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	// With accounts and a timer of its own: at boot their tools must not wait
	// for what waits for recovery.
	build := func(version, soak string) string {
		files := sleeper("edge", version, soak)
		files["sysusers.d/edge.conf"] = "u edge - -\n"
		files["tmpfiles.d/edge.conf"] = "d /run/edge 0755 edge edge -\n"
		files["units/only"+version+".timer"] = "[Timer]\nOnCalendar=weekly\n[Install]\nWantedBy=timers.target\n"
		files["units/only"+version+".service"] = "[Service]\nType=oneshot\nExecStart=/bin/true\n"
		files["manifest.json"] = strings.Replace(files["manifest.json"], `"edge.service"]`, `"edge.service", "only`+version+`.timer"]`, 1)
		return must[string](t)(f.Bundle(ctx, "v"+version, files))
	}
	one, two := build("1", "1s"), build("2", "20s")
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, one)), outcome.Applied))
	p := must[contract.Pointer](t)(f.Promote(ctx, two))
	must[struct{}](t)(struct{}{}, Until(ctx, "the soak", RollTime, func() (bool, error) {
		j, _, err := record.Load[contract.Journal](f.State("edge"), layout.Journal)
		return j.Phase == "gating", err
	}))
	// What was interrupted is tried again; not while this is looked at.
	must[string](t)(f.Sluice(ctx, "hold"))
	must[struct{}](t)(struct{}{}, f.Cut())
	must[struct{}](t)(struct{}{}, f.Boot(ctx))
	r := must[contract.Result](t)(f.Ended(ctx, p, outcome.RolledBack))
	if r.Word() != outcome.Interrupted {
		t.Errorf("the reason: %s", r.Reason)
	}
	for _, unit := range []string{"edge.service", "only1.timer"} {
		if out, err := f.Exec(ctx, "systemctl", "is-active", unit); err != nil {
			t.Errorf("%s is %s: %v", unit, out, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(f.Root, "etc/systemd/system/only2.timer")); err == nil {
		t.Error("a unit of the build that was undone is left")
	}
	// A boot with nothing to recover does not even start it.
	must[struct{}](t)(struct{}{}, f.Cut())
	must[struct{}](t)(struct{}{}, f.Boot(ctx))
	if out := must[string](t)(f.Exec(ctx, "systemctl", "show", "-P", "ConditionResult", "sluice-recover-boot.service")); strings.TrimSpace(out) != "no" {
		t.Errorf("its condition was %s", out)
	}
	// Once resumed it is tried again, and passes.
	must[string](t)(f.Sluice(ctx, "resume"))
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
}
