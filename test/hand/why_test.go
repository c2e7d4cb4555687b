package hand

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fleet"
	"sluice/internal/layout"
	"sluice/internal/record"
	"sluice/internal/trust"
)

// faults are what is done to a box that runs 1, and the code that `sluice why` must
// give for it.
var faults = map[string]func(w *world, m *mallory){
	"bad-signature": func(w *world, m *mallory) {
		_, theirs := w.keypair("mallory")
		p := w.promote(w.bundle("2", script("2")))
		w.put(pointerKey, trust.Sign(contract.PointerLadder, p.Encode(), theirs).Encode())
	},
	"wrong-channel": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")), "-channel", "canary")
		w.put(pointerKey, w.raw("control/system/edge/canary.json"))
	},
	"wrong-component": func(w *world, m *mallory) { w.put(pointerKey, w.raw("control/system/sluice/stable.json")) },
	"ahead": func(w *world, m *mallory) {
		old := w.raw(pointerKey)
		w.promote(w.bundle("2", script("2")))
		w.roll()
		w.put(pointerKey, old)
	},
	"expired": func(w *world, m *mallory) {
		p := w.promote(w.bundle("2", script("2")), "-expires", "1s")
		w.await("the pointer to expire", func() bool { return time.Now().After(p.Payload.ExpiresAt.Time) })
	},
	"upgrade-needed": func(w *world, m *mallory) {
		p := w.promote(w.bundle("2", script("2")))
		w.put(pointerKey, trust.Sign(contract.PointerLadder, []byte(strings.Replace(string(p.Encode()), `"schema": "1.0"`, `"schema": "1.9"`, 1)), w.key).Encode())
	},
	"digest-mismatch": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")))
		w.put(w.current().Key, []byte(strings.Repeat("x", int(w.current().Size))))
	},
	"bad-bundle":  func(w *world, m *mallory) { w.craft("2", func(_ *contract.Manifest, e *[]entry) { *e = nil }) },
	"version-lie": func(w *world, m *mallory) { w.promote(w.bundle("2", script("3"))) },
	"foreign-file": func(w *world, m *mallory) {
		w.must(os.WriteFile(w.root.Join("/etc/systemd/system/more.service"), []byte("# by hand\n"), 0o644))
		w.craft("2", func(m *contract.Manifest, e *[]entry) {
			const unit = "[Service]\nExecStart=/opt/sluice/edge/current/bin/edge\n"
			m.Files = append(m.Files, contract.File{Path: "units/more.service", Mode: 0o644, Size: int64(len(unit)), SHA256: record.Sum([]byte(unit))})
			more := (*e)[0]
			more.header.Name, more.header.Mode, more.data = "units/more.service", 0o644, unit
			*e = append(*e, more)
		})
	},
	"needs": func(w *world, m *mallory) {
		w.craft("2", func(m *contract.Manifest, _ *[]entry) {
			m.Needs = map[contract.Component]contract.Version{"sluice": "9"}
		})
	},
	"mutated": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")))
		w.roll()
		w.must(os.RemoveAll(filepath.Join(w.bucket, "bootstrap")))
		w.craft("1", func(m *contract.Manifest, _ *[]entry) { m.VersionText = "edge" })
	},
	"gate": func(w *world, m *mallory) {
		w.craft("2", func(m *contract.Manifest, e *[]entry) {
			m.Gate.PassWithin, m.Gate.Probes = 1e6, []contract.Probe{{Exec: []string{"bin/edge", "check"}}}
			const program = "#!/bin/sh\n[ \"$1\" = check ] && exit 1\necho edge 2\n"
			m.Files[0].Size, m.Files[0].SHA256, (*e)[0].data = int64(len(program)), record.Sum([]byte(program)), program
		})
	},
	"held": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")))
		w.ok("sluice", "hold", "-root", string(w.root))
	},
	"no-pointer": func(w *world, m *mallory) { w.must(os.Remove(filepath.Join(w.bucket, pointerKey))) },
	"spread":     func(w *world, m *mallory) { w.promote(w.bundle("2", script("2")), "-spread", "24h") },
	"config": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")))
		w.must(os.WriteFile(w.state().Path(layout.ComponentConf), []byte("SLUICE_CHANEL=stable\n"), 0o644))
	},
	"no-artifact": func(w *world, m *mallory) {
		p := w.promote(w.bundle("2", script("2")))
		p.Payload.Current.Artifacts = map[contract.Platform]contract.Artifact{"plan9-mips": p.Payload.Current.Artifacts[contract.Here()]}
		w.put(pointerKey, trust.Sign(contract.PointerLadder, p.Encode(), w.key).Encode())
	},
	"store": func(w *world, m *mallory) {
		w.promote(w.bundle("2", script("2")))
		m.answers(on(pointerKey, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	},
	"stuck": func(w *world, m *mallory) {
		build := contract.Build{Tuple: contract.Tuple{Channel: "stable", Version: "2", PromotedAt: contract.At(time.Now())}, ManifestSHA256: record.Sum(nil)}
		s := w.state()
		s.Disk = &durable.Disk{}
		w.must(s.SaveJournal(contract.Journal{Schema: contract.One, ID: "x", Component: "edge", Phase: "reverting", Node: "file:/etc/x", Target: build, WasActive: []string{}, Tries: 3, StartedAt: build.PromotedAt}))
	},
	"bad-heartbeat": func(w *world, m *mallory) {},
	"silent":        func(w *world, m *mallory) {},
}

// Each fault has a reason of its own, and none is unknown.
func TestWhy(t *testing.T) {
	gateway := os.Getenv("VERSITYGW")
	if gateway == "" {
		t.Skip("VERSITYGW does not name the S3 server: `make test` builds it")
	}
	buckets := t.TempDir()
	address := serveS3(t, gateway, buckets)
	if len(faults) < 20 {
		t.Errorf("only %d faults", len(faults))
	}
	for want, induce := range faults {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			w, m := intercepted(t, buckets, address, "why-"+want)
			w.promote(w.bundle("1", script("1")))
			w.roll()
			induce(w, m)
			if want == "stuck" {
				_, _ = run(t, "fetch", "once", "-root", string(w.root))
			} else {
				w.pipeline()
				_, _ = run(t, "fetch", "once", "-root", string(w.root)) // publishes how it ended
			}
			key := contract.StatusKey("box-1")
			switch want {
			case "bad-heartbeat":
				w.put(key, []byte("garbage"))
			case "silent":
				beat, err := contract.Spoken.DecodeHeartbeat(w.raw(key))
				w.must(err)
				beat.At = contract.At(time.Now().Add(-time.Hour))
				w.put(key, beat.Encode())
			}
			out := w.ok("sluice", "why", "box-1", "-store", w.store.String(), "-json")
			var rows []struct {
				Row             fleet.Row
				Code, Means, Do string
			}
			w.must(json.Unmarshal([]byte(out), &rows))
			found := false
			for _, r := range rows {
				if r.Row.Component == "edge" || want == "bad-heartbeat" {
					found = true
					if r.Code != want || r.Means == "" || r.Do == "" {
						t.Errorf("%s, and not %s: %s", r.Code, want, out)
					}
				}
			}
			if !found {
				t.Errorf("no row of edge: %s", out)
			}
			if text := w.ok("sluice", "why", "box-1", "-store", w.store.String()); !strings.Contains(text, "  "+want+": ") || !strings.Contains(text, "to do: ") {
				t.Error(text)
			}
		})
	}
}
