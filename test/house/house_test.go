// Package house tests what the house promises of itself: who may import what,
// how narrow the units are, and that lists which must agree do.
package house

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/coreos/go-systemd/v22/unit"

	"sluice/internal/bundle"
	"sluice/internal/contract"
	"sluice/internal/layout"
)

const top = "../.."

// forbidden says what a program must not link, and why.
var forbidden = []struct {
	programs []string
	imports  []string
	why      string
}{
	{[]string{"stage", "apply", "recover"}, []string{"net/http", "crypto/tls", "crypto/x509"}, "root parses nothing that a network peer chooses"},
	{[]string{"stage", "apply", "recover"}, []string{"github.com/minio/minio-go/v7"}, "root has no way to the store: a third user asks it"},
	{[]string{"stage", "apply", "recover"}, []string{"github.com/klauspost/compress/zstd", "archive/tar"}, "a bug in a decoder must not be root's: verify unpacks"},
	{[]string{"verify"}, []string{"net/http", "github.com/minio/minio-go/v7"}, "what parses hostile bytes has no network to send them to"},
	{[]string{"fetch"}, []string{"github.com/godbus/dbus/v5", "github.com/coreos/go-systemd/v22/dbus"}, "what talks to the network has no words for the service manager"},
}

func TestImports(t *testing.T) {
	for _, f := range forbidden {
		for _, program := range f.programs {
			out, err := exec.Command("go", "list", "-deps", "sluice/cmd/"+program).Output()
			if err != nil {
				t.Fatal(err)
			}
			deps := strings.Fields(string(out))
			if !slices.Contains(deps, "sluice/internal/layout") {
				t.Fatalf("%s: the list of imports is not what it should be", program)
			}
			for _, dep := range deps {
				for _, no := range f.imports {
					if dep == no || strings.HasPrefix(dep, no+"/") {
						t.Errorf("%s links %s: %s", program, dep, f.why)
					}
				}
			}
		}
	}
}

// pure packages do no I/O.
func TestPurePackages(t *testing.T) {
	for _, p := range []string{"graph", "decide", "contract", "outcome", "layout"} {
		out, err := exec.Command("go", "list", "-f", `{{join .Imports " "}}`, "sluice/internal/"+p).Output()
		if err != nil {
			t.Fatal(err)
		}
		for _, dep := range strings.Fields(string(out)) {
			if p == "layout" && (dep == "os" || dep == "os/user") {
				continue // owner.go gives folders their owners
			}
			if dep == "os" || dep == "os/exec" || dep == "io/ioutil" || strings.HasPrefix(dep, "golang.org/x/sys") || dep == "sluice/internal/durable" {
				t.Errorf("internal/%s imports %s", p, dep)
			}
		}
	}
}

// Imports go down only. A package may import what is on a lower floor.
func TestFloors(t *testing.T) {
	floors := [][]string{
		{"fault", "layout", "outcome"},
		{"contract"},
		{"graph", "durable", "intake", "decide", "unit", "systemd"},
		{"trust", "marker", "config", "store"},
		{"record"},
		{"bundle", "node", "program", "selftest", "token"},
		{"fetch", "verify", "stage", "apply", "fleet", "door"},
		{"enroll"},
	}
	floor := map[string]int{}
	for i, names := range floors {
		for _, n := range names {
			floor["sluice/internal/"+n] = i
		}
	}
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "sluice/internal/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		at, known := floor[fields[0]]
		if !known {
			t.Errorf("%s has no floor: add it to this test", fields[0])
		}
		for _, dep := range fields[1:] {
			if below, ours := floor[dep]; ours && below >= at {
				t.Errorf("%s imports %s, which is not below it", fields[0], dep)
			}
		}
	}
}

// thresholds are what `systemd-analyze security` may say of a unit, times ten.
var thresholds = map[string]int{
	"sluice-fetch.service": 12, "sluice-pointer@.service": 12, "sluice-verify@.service": 8, "sluice-stage@.service": 12,
	"sluice-apply@.service": 20, "sluice-recover@.service": 20, "sluice-recover-boot.service": 20, "sluice-heal.service": 20, "sluice-trial.service": 20,
}

func TestUnitsAreNarrow(t *testing.T) {
	units, err := filepath.Glob(filepath.Join(top, "units", "*.service"))
	if err != nil || len(units) != len(thresholds) {
		t.Fatalf("%d services, %d thresholds, %v", len(units), len(thresholds), err)
	}
	for _, u := range units {
		limit, known := thresholds[filepath.Base(u)]
		if !known {
			t.Errorf("%s has no threshold", u)
			continue
		}
		out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--no-pager", fmt.Sprintf("--threshold=%d", limit), u).CombinedOutput()
		if err != nil {
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			t.Errorf("%s is wider than %.1f: %s (%v)", filepath.Base(u), float64(limit)/10, lines[len(lines)-1], err)
		}
	}
}

func read(t *testing.T, name string) []*unit.UnitOption {
	t.Helper()
	f, err := os.Open(filepath.Join(top, "units", name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	opts, err := unit.DeserializeOptions(f)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return opts
}

func all(opts []*unit.UnitOption, name string) string {
	var out []string
	for _, o := range opts {
		if o.Name == name {
			out = append(out, o.Value)
		}
	}
	return strings.Join(out, " ")
}

// The rules of the units that no tool checks.
func TestUnitRules(t *testing.T) {
	for name := range thresholds {
		opts := read(t, name)
		execs := 0
		for _, o := range opts {
			if strings.HasPrefix(o.Name, "Exec") && o.Name != "ExecPaths" {
				execs++
			}
		}
		if execs != 1 {
			t.Errorf("%s: %d Exec lines: after a daemon-reload a running oneshot would take the others from the new file", name, execs)
		}
		want := "/opt/sluice/sluice/good/bin/"
		switch {
		case all(opts, "User") != "":
			want = "/opt/sluice/sluice/current/bin/"
		case name == "sluice-trial.service":
			want = "/opt/sluice/sluice/prior/bin/"
		}
		if !strings.HasPrefix(all(opts, "ExecStart"), want) {
			t.Errorf("%s runs %s, not from %s", name, all(opts, "ExecStart"), want)
		}
		if all(opts, "Type") == "oneshot" && !strings.Contains(name, "recover-boot") && (all(opts, "StartLimitIntervalSec") != "0" || all(opts, "SuccessExitStatus") != "69") {
			t.Errorf("%s: a oneshot needs StartLimitIntervalSec=0 and SuccessExitStatus=69", name)
		}
	}
	if opts := read(t, "sluice-apply@.service"); all(opts, "OnFailure") != "sluice-recover@%i.service" || all(opts, "TimeoutStartSec") != "infinity" {
		t.Error("sluice-apply@.service: OnFailure= and the timeout are frozen")
	}
	if opts := read(t, "sluice-stage@.service"); all(opts, "Wants") != "sluice-pointer@%i.service" || all(opts, "Requires") != "" || all(opts, "RestrictAddressFamilies") != "none" {
		t.Error("sluice-stage@.service: it wants its pointer, requires nothing, and has no socket")
	}
	for _, c := range []struct {
		unit   string
		marker layout.Place
	}{{"sluice-verify@.path", layout.Fetched}, {"sluice-stage@.path", layout.Requested}, {"sluice-apply@.path", layout.Staged}} {
		if got, want := all(read(t, c.unit), "PathExists"), strings.ReplaceAll(string(c.marker), "{component}", "%i"); got != want {
			t.Errorf("%s watches %s, the layout says %s", c.unit, got, want)
		}
	}
	users, err := os.ReadFile(filepath.Join(top, "units/sysusers.d/sluice.conf"))
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range []string{layout.UserFetch, layout.UserVerify, layout.UserPointer} {
		if !regexp.MustCompile(`(?m)^u ` + u + ` `).Match(users) {
			t.Errorf("sysusers.d makes no user %s", u)
		}
	}
}

// Directives that say what they are for by themselves.
var plain = strings.Fields("Description Documentation Type ExecStart User Group WantedBy Restart RestartSec OnUnitActiveSec")

// Every other directive stands under a comment that says why.
func TestEveryDirectiveHasAReason(t *testing.T) {
	units, _ := filepath.Glob(filepath.Join(top, "units", "sluice-*"))
	for _, f := range units {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(string(data), "# ") {
			t.Errorf("%s does not begin with what it is for", f)
		}
		reason, run := false, 0
		for _, line := range strings.Split(string(data), "\n") {
			name, _, directive := strings.Cut(line, "=")
			switch {
			case strings.HasPrefix(line, "#"):
				reason, run = true, 0
			case !directive:
				reason = false
			case slices.Contains(plain, name):
			case !reason:
				t.Errorf("%s: %s has no reason in front of it", filepath.Base(f), line)
			default:
				if run++; run > 8 {
					t.Errorf("%s: the reason of %s is too far away", filepath.Base(f), line)
				}
			}
		}
	}
}

// The pipeline's manifest names exactly the units that there are.
func TestManifestNamesEveryUnit(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(top, "units/manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := contract.Spoken.DecodeRecipe([]byte(strings.ReplaceAll(string(data), "@VERSION@", "1")), contract.Here())
	if err != nil {
		t.Fatal(err)
	}
	named := slices.Concat(m.Units.Enable, m.Units.Inert)
	units, _ := filepath.Glob(filepath.Join(top, "units", "sluice-*"))
	for _, u := range units {
		if !slices.Contains(named, filepath.Base(u)) {
			t.Errorf("units/manifest.json does not name %s", filepath.Base(u))
		}
	}
	if len(named) != len(units) {
		t.Errorf("%d units are named, %d are there", len(named), len(units))
	}
}

// systemd itself finds nothing to say. It exits 0 on a misspelt directive, so
// that anything it says is a failure.
func TestUnitsAreWellSpelt(t *testing.T) {
	var m contract.Manifest
	m.Component = "sluice"
	units, _ := filepath.Glob(filepath.Join(top, "units", "sluice-*"))
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "units"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, u := range units {
		data, err := os.ReadFile(u)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "units", filepath.Base(u)), data, 0o644); err != nil {
			t.Fatal(err)
		}
		m.Files = append(m.Files, contract.File{Path: "units/" + filepath.Base(u)})
	}
	for _, said := range bundle.Lint(t.Context(), dir, m) {
		t.Error(said)
	}
}

// What is kept is text: no program that was built by chance.
func TestNoPrograms(t *testing.T) {
	out, err := exec.Command("git", "-C", top, "ls-files", "-z").Output()
	if err != nil {
		t.Skip("not a checkout: ", err)
	}
	const most = 1 << 20
	for _, name := range strings.Split(strings.Trim(string(out), "\x00"), "\x00") {
		data, err := os.ReadFile(filepath.Join(top, name))
		if err == nil && (len(data) > most || strings.HasPrefix(string(data), "\x7fELF")) {
			t.Errorf("%s has %d bytes, or is a program", name, len(data))
		}
	}
}

// The attacks of docs/threat-model.md are those that are played.
func TestAttacksArePlayed(t *testing.T) {
	src, err := os.ReadFile(filepath.Join(top, "test/hand/attack_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	docs, err := os.ReadFile(filepath.Join(top, "docs/threat-model.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := func(text []byte, form string) []string {
		var out []string
		for _, m := range regexp.MustCompile(form).FindAllSubmatch(text, -1) {
			out = append(out, string(m[1]))
		}
		slices.Sort(out)
		return out
	}
	played := names(src, `(?m)^\t"([^"]+)": +func\(w \*world, m \*mallory\)`)
	told := names(docs, "`TestAttacks/([^`]+)`")
	if len(played) < 14 || !slices.Equal(played, told) {
		t.Errorf("played: %q\ntold of: %q", played, told)
	}
}

// Every word that a reason can begin with is explained, and every invariant
// stands in the code.
func TestDocsNameWhatThereIs(t *testing.T) {
	src, err := os.ReadFile(filepath.Join(top, "internal/outcome/outcome.go"))
	if err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile(filepath.Join(top, "docs/operating.md"))
	if err != nil {
		t.Fatal(err)
	}
	words := regexp.MustCompile(`Word += "([^"]+)"`).FindAllStringSubmatch(string(src), -1)
	if len(words) < 20 {
		t.Fatalf("only %d words found: the pattern is out of date", len(words))
	}
	for _, w := range words {
		if !strings.Contains(string(guide), "`"+w[1]+"`") {
			t.Errorf("docs/operating.md does not explain %s", w[1])
		}
	}
	var code strings.Builder
	files, _ := filepath.Glob(filepath.Join(top, "internal/*/*.go"))
	for _, f := range files {
		if !strings.HasSuffix(f, "_test.go") {
			data, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			code.Write(data)
		}
	}
	for i := 1; i <= 6; i++ {
		if !strings.Contains(code.String(), fmt.Sprintf("(I%d)", i)) {
			t.Errorf("no code cites I%d", i)
		}
	}
	for _, tag := range []string{"// SWITCH", "// COMMIT"} {
		if n := strings.Count(code.String(), tag); n != 1 {
			t.Errorf("%s stands %d times in the code, not once", tag, n)
		}
	}
}
