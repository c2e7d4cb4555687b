package contract

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// Whatever is decoded: no panic, and what is accepted is written and read
// again as the same.
func FuzzDecode(f *testing.F) {
	seeds, _ := filepath.Glob("testdata/golden/*.json")
	for _, s := range seeds {
		data, err := os.ReadFile(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"payloadType":"x","payload":"","signatures":[]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		again := func(name string, encode func() []byte, decode func([]byte) ([]byte, error)) {
			first := encode()
			second, err := decode(first)
			if err != nil || !bytes.Equal(first, second) {
				t.Errorf("%s: %v\n%s\n%s", name, err, first, second)
			}
		}
		if h, err := Spoken.DecodeHint(data); err == nil {
			again("hint", h.Encode, func(b []byte) ([]byte, error) { h, err := Spoken.DecodeHint(b); return h.Encode(), err })
		}
		if p, err := Spoken.DecodePointer(data); err == nil {
			again("pointer", p.Encode, func(b []byte) ([]byte, error) { p, err := Spoken.DecodePointer(b); return p.Encode(), err })
		}
		if m, err := Spoken.DecodeManifest(data); err == nil {
			again("manifest", m.Encode, func(b []byte) ([]byte, error) { m, err := Spoken.DecodeManifest(b); return m.Encode(), err })
		}
		if d, err := Spoken.DecodeTrust(data); err == nil {
			again("trust", d.Encode, func(b []byte) ([]byte, error) { d, err := Spoken.DecodeTrust(b); return d.Encode(), err })
		}
		if e, err := DecodeEnvelope(data); err == nil {
			again("envelope", e.Encode, func(b []byte) ([]byte, error) { e, err := DecodeEnvelope(b); return e.Encode(), err })
		}
		if h, err := Spoken.DecodeHeartbeat(data); err == nil {
			again("heartbeat", h.Encode, func(b []byte) ([]byte, error) { h, err := Spoken.DecodeHeartbeat(b); return h.Encode(), err })
		}
		if d, err := Spoken.DecodeDeployment(data); err == nil {
			again("deployment", d.Encode, func(b []byte) ([]byte, error) { d, err := Spoken.DecodeDeployment(b); return d.Encode(), err })
		}
		record(Seen{}).fuzz(again, data)
		record(Applied{}).fuzz(again, data)
		record(Staged{}).fuzz(again, data)
		record(Versions{}).fuzz(again, data)
		record(Journal{}).fuzz(again, data)
		record(Result{}).fuzz(again, data)
		record(Drift{}).fuzz(again, data)
		record(Verdict{}).fuzz(again, data)
		record(Pending{}).fuzz(again, data)
		_, _ = DecodeCore(data)
		_, _ = Spoken.DecodeRecipe(data, "linux-amd64")
	})
}
