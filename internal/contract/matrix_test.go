package contract

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// readers are how each golden document is read, by any build.
var readers = map[string]func(Speaks, []byte) error{
	"pointer":    func(s Speaks, b []byte) error { _, err := s.DecodePointer(b); return err },
	"trust":      func(s Speaks, b []byte) error { _, err := s.DecodeTrust(b); return err },
	"manifest":   func(s Speaks, b []byte) error { _, err := s.DecodeManifest(b); return err },
	"hint":       func(s Speaks, b []byte) error { _, err := s.DecodeHint(b); return err },
	"heartbeat":  func(s Speaks, b []byte) error { _, err := s.DecodeHeartbeat(b); return err },
	"deployment": func(s Speaks, b []byte) error { _, err := s.DecodeDeployment(b); return err },
	"envelope":   func(s Speaks, b []byte) error { _, err := s.DecodeEnvelope(b); return err },
	"seen":       readRecord[Seen], "applied": readRecord[Applied], "staged": readRecord[Staged], "versions": readRecord[Versions],
	"journal": readRecord[Journal], "drift": readRecord[Drift], "trial": readRecord[Trial], "result": readRecord[Result],
	"verdict": readRecord[Verdict], "pending": readRecord[Pending],
}

func readRecord[T Record](s Speaks, b []byte) error {
	var v T
	return s.DecodeRecord(b, &v)
}

// ladderOf is the ladder that the documents of a name stand on.
func ladderOf(name string) Ladder {
	switch name {
	case "pointer", "trust", "manifest", "hint", "heartbeat", "envelope":
		return Ladder(name)
	case "deployment":
		return TrustLadder
	}
	return RecordsLadder
}

// A golden is a document of a minor, kept for ever.
type golden struct {
	name string
	step Step
	data string
}

func goldens(t *testing.T) []golden {
	t.Helper()
	paths, err := filepath.Glob("testdata/golden/*.json")
	if err != nil || len(paths) < len(readers) {
		t.Fatalf("%d golden documents, %v", len(paths), err)
	}
	var out []golden
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		stem := strings.TrimSuffix(filepath.Base(path), ".json")
		i := strings.LastIndex(stem, "-")
		name, _, _ := strings.Cut(stem, "-")
		step, err := Parse[Step](stem[i+1:])
		if err != nil || readers[name] == nil {
			t.Fatalf("%s: %v", path, err)
		}
		out = append(out, golden{name, step, string(data)})
	}
	return out
}

// Every minor that this build reads has a document that is kept, and what came
// with it a row in docs/contracts.md.
func TestEveryMinorIsKept(t *testing.T) {
	have := map[string]bool{}
	for _, g := range goldens(t) {
		have[string(ladderOf(g.name))+" "+g.step.String()] = true
	}
	docs, err := os.ReadFile("../../docs/contracts.md")
	if err != nil {
		t.Fatal(err)
	}
	table := string(docs)
	for l, steps := range Spoken {
		for _, s := range steps {
			for minor := range s.Minor + 1 {
				step := Step{s.Major, minor}
				if !have[string(l)+" "+step.String()] {
					t.Errorf("no golden document of %s %s", l, step)
				}
				if row := fmt.Sprintf("| %s | %s |", l, step); step != One && !strings.Contains(table, row) {
					t.Errorf("docs/contracts.md has no row %q", row)
				}
			}
		}
	}
	// A member that came later is in its row.
	var walk func(t reflect.Type)
	known := map[reflect.Type]bool{}
	walk = func(typ reflect.Type) {
		for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice || typ.Kind() == reflect.Map {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct || known[typ] || typ == reflect.TypeFor[Time]() {
			return
		}
		known[typ] = true
		for i := range typ.NumField() {
			f := typ.Field(i)
			if since := f.Tag.Get(sinceTag); since != "" {
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				if !regexp.MustCompile(`(?m)^\| [a-z]+ \| ` + regexp.QuoteMeta(since) + " \\|.*`" + name + "`").MatchString(table) {
					t.Errorf("%s of %s came with %s, docs/contracts.md does not say so", name, typ, since)
				}
			}
			walk(f.Type)
		}
	}
	for _, v := range []any{Pointer{}, Trust{}, Manifest{}, Hint{}, Heartbeat{}, Deployment{}, Envelope{}, Seen{}, Applied{}, Staged{}, Versions{}, Journal{}, Drift{}, Trial{}, Result{}, Verdict{}, Pending{}} {
		walk(reflect.TypeOf(v))
	}
	if !known[reflect.TypeFor[Delta]()] {
		t.Error("the walk does not get to deltas")
	}
}

// stamp says of a document that it is of another step.
func stamp(doc, member string, s Step) string {
	before, after, _ := strings.Cut(doc, `"`+member+`": "`) // the first is the document's own
	_, after, _ = strings.Cut(after, `"`)
	return before + `"` + member + `": "` + s.String() + `"` + after
}

// Documents of every step, read by builds that read other ones: as the table in
// docs/contracts.md has it, word for word.
func TestMatrix(t *testing.T) {
	builds := map[string][]Step{"1.0 only": {{1, 0}}, "this one": nil, "1.2 and 2.0": {{1, 2}, {2, 0}}, "2.1 only": {{2, 1}}}
	want := map[string]map[string]string{ // %s: the ladder
		"1.0 only": {
			"0.9": "%s 0.9: unsupported major (this sluice reads 1)", "1.0": "",
			"1.1": "%s 1.1 is newer than this sluice reads (1.0 to 1.0): upgrade sluice to read this",
			"1.2": "%s 1.2 is newer than this sluice reads (1.0 to 1.0): upgrade sluice to read this",
			"1.3": "%s 1.3 is newer than this sluice reads (1.0 to 1.0): upgrade sluice to read this",
			"2.0": "%s 2.0: unsupported major (this sluice reads 1)", "3.0": "%s 3.0: unsupported major (this sluice reads 1)"},
		"1.2 and 2.0": {
			"0.9": "%s 0.9: unsupported major (this sluice reads 1, 2)", "1.0": "", "1.1": "", "1.2": "",
			"1.3": "%s 1.3 is newer than this sluice reads (1.0 to 1.2): upgrade sluice to read this",
			"2.0": "", "3.0": "%s 3.0: unsupported major (this sluice reads 1, 2)"},
		"2.1 only": {
			"0.9": "%s 0.9: unsupported major (this sluice reads 2)", "1.0": "%s 1.0: unsupported major (this sluice reads 2)",
			"1.1": "%s 1.1: unsupported major (this sluice reads 2)", "1.2": "%s 1.2: unsupported major (this sluice reads 2)",
			"1.3": "%s 1.3: unsupported major (this sluice reads 2)", "2.0": "", "3.0": "%s 3.0: unsupported major (this sluice reads 2)"},
	}
	// This build reads pointers as 1.2, and of everything else 1.0.
	thisPointer := map[string]string{"0.9": want["1.0 only"]["0.9"], "1.0": "", "1.1": "", "1.2": "",
		"1.3": "pointer 1.3 is newer than this sluice reads (1.0 to 1.2): upgrade sluice to read this", "2.0": want["1.0 only"]["2.0"], "3.0": want["1.0 only"]["3.0"]}
	judge := func(what, text string, l Ladder, err error) {
		t.Helper()
		if strings.Contains(text, "%s") {
			text = fmt.Sprintf(text, l)
		}
		var up *UpgradeError
		if (err == nil) != (text == "") || err != nil && (err.Error() != text || !errors.As(err, &up)) {
			t.Errorf("%s: %v, want %q", what, err, text)
		}
	}
	cells := 0
	for _, g := range goldens(t) {
		l := ladderOf(g.name)
		for build, steps := range builds {
			speaks, table := Spoken, want["1.0 only"]
			if steps != nil {
				speaks, table = Speaks{EnvelopeLadder: {One}, l: steps}, want[build]
			} else if l == PointerLadder {
				table = thisPointer
			}
			for at, text := range table {
				step, err := Parse[Step](at)
				if err != nil {
					t.Fatal(err)
				}
				what := fmt.Sprintf("%s-%s stamped %s, read by %s", g.name, g.step, step, build)
				cells++
				if g.name == "envelope" { // its version is in what it carries; decoded elsewhere
					if step == One {
						judge(what, "", l, readers[g.name](speaks, []byte(g.data)))
					}
					continue
				}
				doc := stamp(g.data, "schema", step)
				err = readers[g.name](speaks, []byte(doc))
				if text == "" && step.before(g.step) { // it uses more than it says
					if err == nil || !strings.Contains(err.Error(), "the document says that it is "+at) {
						t.Errorf("%s: %v", what, err)
					}
				} else {
					judge(what, text, l, err)
				}
				// The same where strict decoding would fail first.
				if text != "" {
					judge(what+", with a member nobody knows", text, l, readers[g.name](speaks, []byte(strings.Replace(doc, "{", `{"novel": [{}], `, 1))))
				}
				if g.name == "pointer" || g.name == "trust" {
					sealed := stamp(g.data, "envelope", step)
					sealedSpeaks := Speaks{EnvelopeLadder: steps, PointerLadder: {{1, 2}}, TrustLadder: {{1, 2}}}
					text := table[at]
					if steps == nil {
						sealedSpeaks[EnvelopeLadder], text = Spoken[EnvelopeLadder], want["1.0 only"][at]
					}
					judge(what+" (its envelope)", text, EnvelopeLadder, readers[g.name](sealedSpeaks, []byte(sealed)))
				}
			}
		}
	}
	t.Logf("%d cells", cells)
	if cells < 17*4*7 {
		t.Errorf("only %d cells", cells)
	}
}

// A document is stamped with the lowest step that has all it uses.
func TestLowestMinor(t *testing.T) {
	for name, c := range map[string]struct {
		p      Pointer
		want   Step
		member string
	}{
		"nothing new":   {samplePointer(), One, ""},
		"deltas":        {withDeltas(samplePointer()), Step{1, 1}, "payload.current.artifacts.linux-amd64.deltas"},
		"expiry":        {withExpiry(samplePointer()), Step{1, 2}, "payload.expires_at"},
		"both":          {withExpiry(withDeltas(samplePointer())), Step{1, 2}, "payload.expires_at"},
		"stamped above": {func() Pointer { p := samplePointer(); p.Payload.Schema = Step{1, 2}; return p }(), One, ""},
	} {
		if step, member := c.p.Needs(); step != c.want || member != c.member {
			t.Errorf("%s: needs %s because of %q", name, step, member)
		}
		p, err := Spoken.DecodePointer(c.p.Encode())
		if err != nil || p.Payload.Schema != c.want {
			t.Errorf("%s: stamped %s, %v", name, p.Payload.Schema, err)
		}
	}
}

// Majors stand side by side, and no key is that of two pointers.
func TestPointerKeys(t *testing.T) {
	for key, c := range map[string]struct {
		component Component
		channel   Channel
		major     int
	}{
		"control/system/edge/stable.json":     {"edge", "stable", 1},
		"control/system/edge/stable.v2.json":  {"edge", "stable", 2},
		"control/system/edge/stable.v12.json": {"edge", "stable", 12},
	} {
		if got := PointerKey(c.component, c.channel, c.major); got != key {
			t.Errorf("%s, want %s", got, key)
		}
		if component, channel, major, ok := ParsePointerKey(key); !ok || component != c.component || channel != c.channel || major != c.major {
			t.Errorf("%s: %s %s %d %v", key, component, channel, major, ok)
		}
	}
	for _, key := range []string{"control/system/edge/stable.v1.json", "control/system/edge/stable.v02.json", "control/system/edge/stable.v2", "control/system/Edge/stable.json",
		"control/system/edge/x/stable.json", "control/system/edge/.json", "control/trust/1.json", "control/system/edge/stable.v9999999.json"} {
		if _, _, _, ok := ParsePointerKey(key); ok {
			t.Errorf("%s is taken for a pointer's", key)
		}
	}
}
