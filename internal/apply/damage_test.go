package apply

import (
	"os"
	"path/filepath"
	"testing"

	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/test/tree"
)

// Whatever is damaged of root's records: it is kept under a name that says so,
// the service goes on, and the next promote goes through from the build that
// is good, never from nothing.
func TestDamagedRecords(t *testing.T) {
	for _, place := range []layout.Place{layout.Seen, layout.Applied, layout.Result, layout.StagedRecord, layout.Versions} {
		for damage, change := range tree.Damages {
			b := newBox(t)
			b.stage("1", nil, nil)
			b.must(b.apply())
			path := b.state.Path(place)
			if place == layout.Seen || place == layout.Versions { // stage writes these
				b.must(os.WriteFile(path, []byte(`{"schema": "1.0", "channels": {}}`), 0o644))
			}
			tuple := b.stage("2", nil, nil)
			data, err := os.ReadFile(path)
			b.must(err)
			b.must(os.WriteFile(path, change(data), 0o644))
			b.manager.OnStart = nil
			err = b.apply()
			switch place {
			case layout.StagedRecord: // nothing says what to apply: nothing is
				if err != nil {
					t.Errorf("%s, %s: %v", place, damage, err)
				}
				b.runs("1")
				b.stage("2", nil, nil)
				b.must(b.apply())
			case layout.Versions: // stage's affair
				b.must(err)
			default:
				if err != nil {
					t.Errorf("%s, %s: %v", place, damage, err)
				}
				b.ended(tuple, outcome.Applied, "")
			}
			b.runs("2")
			kept, _ := filepath.Glob(path + ".damaged-*")
			if place != layout.Versions && len(kept) != 1 {
				t.Errorf("%s, %s: kept as %v", place, damage, kept)
			}
			// And back from there, if it has to be: the good build was known.
			three := b.stage("3", nil, nil)
			b.manager.OnStart = b.failsOn("3")
			_ = b.apply()
			b.ended(three, outcome.RolledBack, outcome.Gate)
			b.runs("2")
			if t.Failed() {
				t.Fatal(place, damage)
			}
		}
	}
}

// A damaged applied.json is made again from the good link, also when it is the
// way back that needs it.
func TestDamagedAppliedStillGoesBack(t *testing.T) {
	for damage, change := range tree.Damages {
		b := newBox(t)
		b.stage("1", nil, nil)
		b.must(b.apply())
		two := b.stage("2", nil, nil)
		data, err := os.ReadFile(b.state.Path(layout.Applied))
		b.must(err)
		b.must(os.WriteFile(b.state.Path(layout.Applied), change(data), 0o644))
		b.manager.OnStart = b.failsOn("2")
		_ = b.apply()
		b.ended(two, outcome.RolledBack, outcome.Gate)
		b.runs("1")
		if t.Failed() {
			t.Fatal(damage)
		}
	}
}
