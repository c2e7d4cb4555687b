package contract

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// seed adds the golden documents whose names begin so.
func seed(f *testing.F, prefixes ...string) {
	for _, p := range prefixes {
		paths, _ := filepath.Glob("testdata/golden/" + p + "*.json")
		if len(paths) == 0 {
			f.Fatalf("there is no golden document of %s", p)
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
}

// again checks that what was accepted is written and read again as the same.
func again(t *testing.T, name string, encode func() []byte, decode func([]byte) ([]byte, error)) {
	t.Helper()
	first := encode()
	second, err := decode(first)
	if err != nil || !bytes.Equal(first, second) {
		t.Errorf("%s: %v\n%s\n%s", name, err, first, second)
	}
}

// The one file that root reads from the unprivileged side.
func FuzzHint(f *testing.F) {
	seed(f, "hint")
	f.Fuzz(func(t *testing.T, data []byte) {
		if h, err := Spoken.DecodeHint(data); err == nil {
			if len(data) > MaxHint {
				t.Errorf("%d bytes were taken", len(data))
			}
			again(t, "hint", h.Encode, func(b []byte) ([]byte, error) { h, err := Spoken.DecodeHint(b); return h.Encode(), err })
		}
	})
}

func FuzzManifest(f *testing.F) {
	seed(f, "manifest")
	f.Fuzz(func(t *testing.T, data []byte) {
		if m, err := Spoken.DecodeManifest(data); err == nil {
			again(t, "manifest", m.Encode, func(b []byte) ([]byte, error) { m, err := Spoken.DecodeManifest(b); return m.Encode(), err })
			for _, file := range m.Files { // whatever it says, it stays where it belongs
				if filepath.IsAbs(file.Path) || !filepath.IsLocal(file.Path) || file.Mode&^0o755 != 0 {
					t.Errorf("%q with mode %o was taken", file.Path, file.Mode)
				}
			}
		}
		_, _ = Spoken.DecodeRecipe(data, "linux-amd64")
	})
}

func FuzzRecords(f *testing.F) {
	seed(f, "applied", "drift", "journal", "result", "seen", "staged", "trial", "versions", "verdict", "pending")
	f.Fuzz(func(t *testing.T, data []byte) {
		record(Seen{}).fuzz(t, data)
		record(Applied{}).fuzz(t, data)
		record(Staged{}).fuzz(t, data)
		record(Versions{}).fuzz(t, data)
		record(Journal{}).fuzz(t, data)
		record(Result{}).fuzz(t, data)
		record(Drift{}).fuzz(t, data)
		record(Trial{}).fuzz(t, data)
		record(Verdict{}).fuzz(t, data)
		record(Pending{}).fuzz(t, data)
		_ = Spoken.CheckRecord(data)
	})
}

// What is signed, and what boxes are enrolled with and publish.
func FuzzDecode(f *testing.F) {
	seed(f, "pointer", "trust", "envelope", "heartbeat", "deployment")
	f.Add([]byte(`{"payloadType":"x","payload":"","signatures":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if p, err := Spoken.DecodePointer(data); err == nil {
			again(t, "pointer", p.Encode, func(b []byte) ([]byte, error) { p, err := Spoken.DecodePointer(b); return p.Encode(), err })
		}
		if d, err := Spoken.DecodeTrust(data); err == nil {
			again(t, "trust", d.Encode, func(b []byte) ([]byte, error) { d, err := Spoken.DecodeTrust(b); return d.Encode(), err })
		}
		if e, err := Spoken.DecodeEnvelope(data); err == nil {
			again(t, "envelope", e.Encode, func(b []byte) ([]byte, error) { e, err := Spoken.DecodeEnvelope(b); return e.Encode(), err })
		}
		if h, err := Spoken.DecodeHeartbeat(data); err == nil {
			again(t, "heartbeat", h.Encode, func(b []byte) ([]byte, error) { h, err := Spoken.DecodeHeartbeat(b); return h.Encode(), err })
		}
		if d, err := Spoken.DecodeDeployment(data); err == nil {
			again(t, "deployment", d.Encode, func(b []byte) ([]byte, error) { d, err := Spoken.DecodeDeployment(b); return d.Encode(), err })
		}
		if k, err := Spoken.DecodeTokens(data, MaxEnvelope); err == nil {
			again(t, "tokens", k.Encode, func(b []byte) ([]byte, error) { k, err := Spoken.DecodeTokens(b, MaxEnvelope); return k.Encode(), err })
		}
		_, _ = DecodeCore(data)
	})
}
