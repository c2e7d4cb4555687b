package box

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// A box was set up by hand: a service with its program, enabled and running.
// A first roll that fails puts exactly that back, while it runs and after a
// power cut; one that passes takes it over.
func TestAdopt(t *testing.T) {
	needsStrace(t)
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	unit, program := "/etc/systemd/system/edge.service", "/usr/local/bin/edge"
	must[struct{}](t)(struct{}{}, f.Write(program, must[string](t)(BuildEdge(ctx, "by-hand", "")), 0o755))
	must[struct{}](t)(struct{}{}, f.Write(unit, "[Unit]\nDescription=Put here by hand\n[Service]\nType=notify\nDynamicUser=yes\nExecStart="+program+"\n[Install]\nWantedBy=multi-user.target\n", 0o644))
	must[string](t)(f.Exec(ctx, "systemctl", "daemon-reload"))
	must[string](t)(f.Exec(ctx, "systemctl", "enable", "--now", "-q", "edge.service"))
	picture := func() string {
		t.Helper()
		var s strings.Builder
		out := must[string](t)(f.Exec(ctx, "find", "/etc/systemd/system", "/etc/sysusers.d", "/etc/tmpfiles.d", program, "-not", "-name", "sluice*", "-printf", "%p %M %U %G %l\n"))
		fmt.Fprint(&s, out)
		for _, path := range []string{unit, program} {
			fmt.Fprintln(&s, path, record.Sum(must[[]byte](t)(os.ReadFile(filepath.Join(f.Root, path)))))
		}
		for _, q := range [][]string{{"is-enabled", "edge.service"}, {"is-active", "edge.service"}, {"show", "-P", "FragmentPath", "edge.service"}, {"show", "-P", "NeedDaemonReload", "edge.service"}} {
			out, _ := f.Exec(ctx, append([]string{"systemctl"}, q...)...)
			fmt.Fprintln(&s, q, strings.TrimSpace(out))
		}
		answer, err := f.Exec(ctx, "curl", "-sS", "--max-time", "5", "http://127.0.0.1:8080/")
		fmt.Fprintln(&s, "answers", strings.TrimSpace(answer), err)
		_, err = os.Lstat(f.State("edge").Path(layout.Current))
		fmt.Fprintln(&s, "current", err != nil)
		return s.String()
	}
	before := picture()
	gate := `"pass_within": "5s", "soak": "500ms"`
	bad, good := f.edge(t, "1", "deaf", strings.Replace(gate, "5s", "1s", 1)), f.edge(t, "2", "", gate)

	r := must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bad)), outcome.Refused))
	if r.Word() != outcome.ForeignFile || !strings.Contains(r.Reason, "SLUICE_ADOPT") {
		t.Errorf("not told to: %s", r.Reason)
	}
	must[struct{}](t)(struct{}{}, f.Write("/etc/sluice/edge.conf", "SLUICE_CHANNEL=stable\nSLUICE_ADOPT="+unit+" "+program+"\n", 0o644))
	r = must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bad)), outcome.RolledBack))
	if r.Word() != outcome.Gate {
		t.Errorf("the first roll: %s", r.Reason)
	}
	if after := picture(); after != before {
		t.Errorf("it is not what it was:\n%s", differences(before, after))
	}
	p := f.held(t, good, "gating")
	must[string](t)(f.Sluice(ctx, "hold"))
	must[struct{}](t)(struct{}{}, f.Cut())
	must[struct{}](t)(struct{}{}, f.Boot(ctx))
	must[contract.Result](t)(f.Ended(ctx, p, outcome.RolledBack))
	must[struct{}](t)(struct{}{}, Until(ctx, "the service", RollTime, func() (bool, error) {
		_, err := f.Exec(ctx, "systemctl", "is-active", "edge.service")
		return err == nil, err
	}))
	if after := picture(); after != before {
		t.Errorf("after the cut it is not what it was:\n%s", differences(before, after))
	}
	must[string](t)(f.Sluice(ctx, "resume"))
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
	if version := f.oneBuild(t); version != "2" {
		t.Errorf("it runs %s", version)
	}
}

// What is not as the good build made it is told, and nothing of it is touched;
// recovery at boot is enabled again.
func TestHealTellsOfDrift(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "edge", sleeper("edge", "1", "100ms"))))), outcome.Applied))
	heal := func() contract.Drift {
		t.Helper()
		must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-heal.service"))
		d, _, err := record.Load[contract.Drift](f.State("edge"), layout.Drift)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := heal(); len(d.Refs) > 0 {
		t.Errorf("nothing has drifted: %+v", d)
	}
	must[string](t)(f.Exec(ctx, "systemctl", "disable", "-q", "edge.service", "sluice-recover-boot.service"))
	must[string](t)(f.Exec(ctx, "sh", "-c", "echo '# edited' >>/etc/systemd/system/edge.service"))
	d := heal()
	told := fmt.Sprint(d.Refs)
	if len(d.Refs) != 2 || !strings.Contains(told, "file:/etc/systemd/system/edge.service") || !strings.Contains(told, "enabled:edge.service") || d.SetDamaged {
		t.Errorf("%+v", d)
	}
	if out, _ := f.Exec(ctx, "systemctl", "is-enabled", "edge.service"); strings.TrimSpace(out) != "disabled" {
		t.Errorf("heal has touched it: %s", out)
	}
	if out := must[string](t)(f.Exec(ctx, "systemctl", "is-enabled", "sluice-recover-boot.service")); strings.TrimSpace(out) != "enabled" {
		t.Errorf("recovery at boot is %s", out)
	}
	if out := must[string](t)(f.Sluice(ctx, "box")); !strings.Contains(out, "look at enabled:edge.service") {
		t.Errorf("`sluice box` does not tell: %s", out)
	}
	// The next roll puts it right.
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "edge2", sleeper("edge", "2", "100ms"))))), outcome.Applied))
	if d := heal(); len(d.Refs) > 0 {
		t.Errorf("after a roll: %+v", d)
	}
}
