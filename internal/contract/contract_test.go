package contract

import (
	"bytes"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/outcome"
)

var (
	at     = At(time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC))
	digest = Digest(strings.Repeat("ab", 32))
	tuple  = Tuple{"stable", "1.0.0", at}
)

func samplePointer() Pointer {
	return Pointer{One, "edge", "stable", at, PointerPayload{One,
		Release{"1.0.0", map[Platform]Artifact{"linux-amd64": {Key: "bootstrap/edge/1.0.0/linux-amd64.tar.zst", Size: 10, SHA256: digest, TarSize: 20, ManifestSHA256: digest}}, "file", at},
		[]Release{}, Duration(5 * time.Minute), []Audit{{"promote", "", "1.0.0", "ann@example.com", at, strings.Repeat("0", 32)}}, Time{}, Time{}}}
}

func sampleManifest() Manifest {
	return Manifest{Schema: One, Component: "edge", Version: "1.0.0", Platform: "linux-amd64",
		Files:          []File{{"bin/edge", 0o755, 5, digest}, {"units/edge.service", 0o644, 7, digest}, {"sysusers.d/edge.conf", 0o644, 7, digest}},
		VersionCommand: []string{"bin/edge", "version"},
		Units:          Units{Enable: []string{"edge.service"}, Restart: []Restart{{Unit: "edge.service", Inputs: []string{"bin/edge"}}}},
		Gate:           Gate{Duration(20 * time.Second), Duration(15 * time.Second), []Probe{{HTTP: "http://127.0.0.1:8080/healthz", Status: 200}, {TCP: "127.0.0.1:8443"}, {Exec: []string{"bin/edge", "check"}}}},
		Needs:          map[Component]Version{"base": "2"}}
}

func withDeltas(p Pointer) Pointer {
	for name, a := range p.Payload.Current.Artifacts {
		a.Deltas = []Delta{{"0.9.0", digest, "bootstrap/edge/1.0.0/from-0.9.0", 3, digest}}
		p.Payload.Current.Artifacts[name] = a
	}
	return p
}

func withExpiry(p Pointer) Pointer {
	p.Payload.RefreshedAt, p.Payload.ExpiresAt = at, At(at.Add(14*24*time.Hour))
	return p
}

func sampleEnvelope() Envelope {
	return Envelope{PayloadType(PointerLadder), samplePointer().Encode(), []Signature{{strings.Repeat("cd", 32), "c2lnbmF0dXJl"}}}
}

func sampleTrust(expires Time) Trust {
	return Trust{One, at, TrustPayload{One, 1, map[string][]byte{strings.Repeat("cd", 32): bytes.Repeat([]byte{7}, 32)},
		map[Ladder]Family{PointerLadder: {[]string{strings.Repeat("cd", 32)}, 1}}, expires}}
}

func sampleHeartbeat() Heartbeat {
	return Heartbeat{One, "box-1", "shop", "linux-amd64", at, Speaks{EnvelopeLadder: {{1, 0}}, PointerLadder: {{1, 2}, {2, 0}}}, map[Component]ComponentStatus{
		"edge": {Channel: "stable", Running: "1.0.0", Target: "1.0.0", Downloaded: 5, Result: &Result{One, tuple, outcome.Applied, "", 1, digest, at, 5, 20},
			Journal: &JournalBrief{"gating", "gate", 0}, Front: &Verdict{One, "1.0.0", at, "bootstrap/edge/1.0.0/x", digest, "good", "", []string{}, 1}}}}
}

// Every document of every minor that was ever written is read for ever.
func TestGolden(t *testing.T) {
	for name, doc := range map[string]codec{
		"pointer-1.0":   {encode: samplePointer().Encode, decode: func(b []byte) (any, error) { return Spoken.DecodePointer(b) }},
		"pointer-1.1":   {encode: withDeltas(samplePointer()).Encode, decode: func(b []byte) (any, error) { return Spoken.DecodePointer(b) }},
		"pointer-1.2":   {encode: withExpiry(withDeltas(samplePointer())).Encode, decode: func(b []byte) (any, error) { return Spoken.DecodePointer(b) }},
		"envelope-1.0":  {encode: sampleEnvelope().Encode, decode: func(b []byte) (any, error) { return Spoken.DecodeEnvelope(b) }},
		"heartbeat-1.0": {encode: sampleHeartbeat().Encode, decode: func(b []byte) (any, error) { return Spoken.DecodeHeartbeat(b) }},
		"deployment-1.0": {encode: Deployment{One, "file:///srv/bucket", "shop", "box-1", sampleEnvelope(), map[Component]Channel{"sluice": "stable"}, map[Component]Water{"sluice": {at, 1, []string{"k"}}}}.Encode,
			decode: func(b []byte) (any, error) { return Spoken.DecodeDeployment(b) }},
		"verdict-1.0":       record(Verdict{One, "1.0.0", at, "bootstrap/edge/1.0.0/x", digest, "bad", "digest-mismatch: x", []string{"w"}, 1}),
		"pending-1.0":       record(Pending{One, tuple, 5, true, 1, 7}),
		"manifest-1.0":      {encode: sampleManifest().Encode, decode: func(b []byte) (any, error) { return Spoken.DecodeManifest(b) }},
		"hint-1.0":          {encode: Hint{One, "1.0.0", at, false, at}.Encode, decode: func(b []byte) (any, error) { return Spoken.DecodeHint(b) }},
		"trust-1.0":         {encode: sampleTrust(Time{}).Encode, decode: func(b []byte) (any, error) { return Spoken.DecodeTrust(b) }},
		"trust-expires-1.0": {encode: sampleTrust(at).Encode, decode: func(b []byte) (any, error) { return Spoken.DecodeTrust(b) }},
		"seen-1.0":          record(Seen{One, map[Channel]Water{"stable": {at, 1, []string{"k"}}}}),
		"applied-1.0":       record(Applied{One, Build{tuple, digest}, at}),
		"staged-1.0":        record(Staged{One, Build{tuple, digest}}),
		"versions-1.0":      record(Versions{One, VersionLog{{"2", digest}, {"1", digest}}}),
		"journal-1.0":       record(Journal{One, "x", "edge", "gating", "gate", Build{tuple, digest}, &Build{tuple, digest}, []string{"edge.service"}, "", 0, at, "b"}),
		"drift-1.0":         record(Drift{One, at, true, []DriftRef{{"set:1.0.0", "damaged", "bin/edge has other bytes"}}}),
		"trial-1.0":         record(Trial{One, "2.0.0", "1.0.0", at, 600, false}),
		"result-1.0":        record(Result{One, tuple, outcome.RolledBack, "gate: it did not come up", 1, digest, at, 5, -1}),
	} {
		path := filepath.Join("testdata", "golden", name+".json")
		want, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) && os.Getenv("GOLDEN") == "new" { // a golden document is only ever added
			if err := os.WriteFile(path, doc.encode(), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := doc.encode(); !bytes.Equal(got, want) {
			t.Errorf("%s: written differently:\n%s", name, got)
		}
		if _, err := doc.decode(want); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A codec is how one kind of document is written and read.
type codec struct {
	encode func() []byte
	decode func([]byte) (any, error)
	fuzz   func(t *testing.T, data []byte)
}

func record[T Record](r T) codec {
	read := func(b []byte) (T, error) {
		var v T
		err := Spoken.DecodeRecord(b, &v)
		return v, err
	}
	return codec{
		func() []byte { return EncodeRecord(r) },
		func(b []byte) (any, error) { return read(b) },
		func(t *testing.T, data []byte) {
			if v, err := read(data); err == nil {
				again(t, "record", func() []byte { return EncodeRecord(v) }, func(b []byte) ([]byte, error) {
					v, err := read(b)
					return EncodeRecord(v), err
				})
			}
		},
	}
}

func TestStrictDecoding(t *testing.T) {
	good := string(Hint{One, "1.0.0", at, false, at}.Encode())
	if _, err := Spoken.DecodeHint([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for name, doc := range map[string]string{
		"unknown member":   strings.Replace(good, `"noop"`, `"x": 1, "noop"`, 1),
		"duplicate member": strings.Replace(good, `"noop"`, `"noop": true, "noop"`, 1),
		"wrong case":       strings.Replace(good, `"noop"`, `"Noop"`, 1),
		"missing member":   strings.Replace(good, `"noop": false,`, ``, 1),
		"null member":      strings.Replace(good, `false`, `null`, 1),
		"wrong type":       strings.Replace(good, `false`, `"false"`, 1),
		"trailing data":    good + "{}",
		"trailing byte":    good + "x",
		"byte-order mark":  "\xef\xbb\xbf" + good,
		"invalid UTF-8":    strings.Replace(good, "1.0.0", "1.\xff", 1),
		"no object":        "[]",
		"null":             "null",
		"empty":            "",
		"over the limit":   good + strings.Repeat(" ", MaxHint),
		"other time form":  strings.Replace(good, ".000000006Z", "Z", 1),
		"version with /":   strings.Replace(good, "1.0.0", "../x", 1),
		"deep":             strings.Replace(good, `false`, strings.Repeat("[", 5000)+strings.Repeat("]", 5000), 1),
	} {
		if _, err := Spoken.DecodeHint([]byte(doc)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := Spoken.DecodeHint([]byte(good + strings.Repeat(" ", MaxHint-len(good)))); err != nil {
		t.Errorf("exactly the limit: %v", err)
	}
}

func TestVersionCheck(t *testing.T) {
	s := Speaks{PointerLadder: {{1, 2}, {2, 0}}}
	for step, want := range map[Step]string{
		{1, 0}: "", {1, 2}: "", {2, 0}: "",
		{1, 3}: "pointer 1.3 is newer than this sluice reads (1.0 to 1.2): upgrade sluice to read this",
		{3, 0}: "pointer 3.0: unsupported major (this sluice reads 1, 2)",
		{0, 9}: "pointer 0.9: unsupported major (this sluice reads 1, 2)",
	} {
		err := s.Check(PointerLadder, step)
		if (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: %v", step, err)
		}
	}
	// The explicit error also where strict decoding would fail first.
	doc := strings.Replace(strings.Replace(string(samplePointer().Encode()), `"schema": "1.0"`, `"schema": "1.9"`, 1), `"spread"`, `"new": 1, "spread"`, 1)
	_, err := Spoken.DecodePointer([]byte(doc))
	var up *UpgradeError
	if !errors.As(err, &up) {
		t.Errorf("a newer minor with an unknown member: %v", err)
	}
}

func TestManifestRules(t *testing.T) {
	if err := sampleManifest().Check(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Manifest){
		`without ".."`:              func(m *Manifest) { m.Files[0].Path = "../x" },
		"relative and clean":        func(m *Manifest) { m.Files[0].Path = "/bin/x" },
		"are one name":              func(m *Manifest) { m.Files = append(m.Files, File{"BIN/edge", 0o755, 1, digest}) },
		"is a file and a folder":    func(m *Manifest) { m.Files = append(m.Files, File{"bin", 0o755, 1, digest}) },
		"can't list itself":         func(m *Manifest) { m.Files[2].Path = "manifest.json" },
		"over 536870912 bytes":      func(m *Manifest) { m.Files[0].Size, m.Files[1].Size = MaxUnpacked, 1 },
		"no unit file":              func(m *Manifest) { m.Files[1].Path = "units/x.txt" },
		"belong to the component":   func(m *Manifest) { m.Files[1].Path = "units/sluice-x.service" },
		"must be named edge.conf":   func(m *Manifest) { m.Files[2].Path = "sysusers.d/other.conf" },
		"no file of the bundle":     func(m *Manifest) { m.VersionCommand = []string{"bin/other"} },
		"no version_command":        func(m *Manifest) { m.VersionCommand = nil },
		"not executable":            func(m *Manifest) { m.Files[0].Mode = 0o644 },
		"only services":             func(m *Manifest) { m.Units.Restart[0].Unit = "edge.socket" },
		"only timers":               func(m *Manifest) { m.Units.Quiesce = []string{"edge.socket"} },
		"in quiesce and in restart": func(m *Manifest) { m.Units.Quiesce = []string{"edge.service"} },
		"exactly one of":            func(m *Manifest) { m.Gate.Probes[0].TCP = "127.0.0.1:1" },
		"loopback address":          func(m *Manifest) { m.Gate.Probes[1].TCP = "192.0.2.1:80" },
		"over 15m0s together":       func(m *Manifest) { m.Gate.Soak = MaxGate },
		"needs itself":              func(m *Manifest) { m.Needs["edge"] = "1" },
	} {
		m, err := Spoken.DecodeManifest(sampleManifest().Encode())
		if err != nil {
			t.Fatal(err)
		}
		change(&m)
		if err := m.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
	self := sampleManifest()
	self.Component, self.Files = "sluice", []File{{"units/sluice-apply@.service", 0o644, 1, digest}}
	self.VersionCommand, self.Gate.Probes, self.Units = nil, nil, Units{Quiesce: []string{"sluice-apply@.service"}}
	if err := self.Check(); err == nil || !strings.Contains(err.Error(), "end the transaction") {
		t.Errorf("quiesce of apply: %v", err)
	}
}

func TestPointerRules(t *testing.T) {
	for want, change := range map[string]func(*Pointer){
		"is not below":                        func(p *Pointer) { setKey(p, "bootstrap/other/1.0.0/x") },
		"must be a clean":                     func(p *Pointer) { setKey(p, "bootstrap/edge/1.0.0/../x") },
		"is no key":                           func(p *Pointer) { setKey(p, "bootstrap/edge/1.0.0/%2e") },
		"history has 11":                      func(p *Pointer) { p.Payload.History = make([]Release, 11) },
		"spread is over":                      func(p *Pointer) { p.Payload.Spread = MaxSpread + 1 },
		"it expires at":                       func(p *Pointer) { p.Payload.RefreshedAt, p.Payload.ExpiresAt = at, At(at.Add(-1)) },
		"was refreshed at":                    func(p *Pointer) { p.Payload.ExpiresAt = at },
		"only the current release has deltas": func(p *Pointer) { p.Payload.History = []Release{withDeltas(samplePointer()).Payload.Current} },
		"deltas, the most is 16": func(p *Pointer) {
			a := p.Payload.Current.Artifacts["linux-amd64"]
			a.Deltas = make([]Delta, 17)
			p.Payload.Current.Artifacts = map[Platform]Artifact{"linux-amd64": a}
		},
		"the delta from 0.9.0": func(p *Pointer) {
			*p = withDeltas(*p)
			p.Payload.Current.Artifacts["linux-amd64"].Deltas[0].Key = "bootstrap/rim/1/x"
		},
	} {
		p := samplePointer()
		change(&p)
		if err := p.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}

func setKey(p *Pointer, key string) {
	p.Payload.Current.Artifacts = map[Platform]Artifact{"linux-amd64": {Key: key, Size: 1, SHA256: digest, TarSize: 1, ManifestSHA256: digest}}
}

func TestCore(t *testing.T) {
	future := `{"envelope":"9.9","component":"edge","channel":"canary","promoted_at":"` + at.String() + `","payload":{"schema":"7.0"},"more":[1]}`
	wrap := func(statement string) []byte {
		return []byte(`{"seals":[],"payload":"` + base64.StdEncoding.EncodeToString([]byte(statement)) + `","payloadType":7}`)
	}
	c, err := DecodeCore(wrap(future))
	if err != nil || c.Component != "edge" || c.Channel != "canary" || !c.PromotedAt.Equal(at.Time) || c.Envelope != (Step{9, 9}) {
		t.Errorf("%+v, %v", c, err)
	}
	if _, err := DecodeCore(wrap(`{"envelope":"1.0"}`)); err == nil {
		t.Error("a core without a component")
	}
	// An envelope that is made otherwise, and says so, needs a newer sluice; one
	// that does not say so is none.
	var up *UpgradeError
	if _, err := Spoken.DecodeEnvelope(wrap(future)); !errors.As(err, &up) || err.Error() != "envelope 9.9: unsupported major (this sluice reads 1)" {
		t.Error(err)
	}
	if _, err := Spoken.DecodeEnvelope(wrap(strings.Replace(future, "9.9", "1.0", 1))); err == nil || errors.As(err, &up) {
		t.Error(err)
	}
}

func TestVersionLogForgetsTheOldest(t *testing.T) {
	var l VersionLog
	for i := range MaxVersions + 2 {
		l = l.With(Version("v"+strings.Repeat("x", i%60)+string(rune('a'+i/60))), digest, func(v Version) bool { return v == "va" })
	}
	if len(l) != MaxVersions || l[0].Version != "va" || l[1].Version == "vx"+"a" {
		t.Errorf("%d entries, first %v %v", len(l), l[0], l[1])
	}
}

func TestNames(t *testing.T) {
	for _, s := range []string{"", "Edge", "1x", "box", "before-sluice", "e_x", strings.Repeat("a", 33)} {
		if _, err := Parse[Component](s); err == nil {
			t.Errorf("component %q accepted", s)
		}
	}
	for _, s := range []string{"", ".x", "..", "a/b", strings.Repeat("a", 65)} {
		if _, err := Parse[Version](s); err == nil {
			t.Errorf("version %q accepted", s)
		}
	}
	if _, err := Parse[Digest](strings.Repeat("AB", 32)); err == nil {
		t.Error("upper-case digest accepted")
	}
}
