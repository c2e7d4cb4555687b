package apply

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"sluice/internal/layout"
)

func TestHeal(t *testing.T) {
	b := newBox(t)
	for _, u := range []string{"sluice-verify@.path", "sluice-stage@.path"} {
		b.must(os.WriteFile(b.root.Join("/etc/systemd/system/"+u), nil, 0o644))
	}
	_, err := b.manager.Start(context.Background(), "sluice-verify@edge.path")
	b.must(err)
	b.stage("1", nil, nil)
	b.must(b.apply())
	left := []string{filepath.Join(b.state.Path(layout.OptOf), ".seen.json.tmp"), filepath.Join(b.state.Path(layout.Sets), ".9.partial", "x"), filepath.Join(b.state.Path(layout.Sets), ".8.tmp"),
		b.state.Path(layout.Reserve), b.root.Join("/etc/systemd/system/.edge.service.sluice-back")}
	for _, path := range left {
		b.must(os.MkdirAll(filepath.Dir(path), 0o755))
		b.must(os.WriteFile(path, nil, 0o644))
	}
	b.manager.Forget()
	b.must(b.applier().Heal(context.Background()))
	// Only what is installed and does not watch is started.
	want := []string{"reset-failed sluice-stage@edge.service", "reset-failed sluice-stage@edge.path", "start sluice-stage@edge.path"}
	if got := b.manager.Calls(); !slices.Equal(got, want) {
		t.Errorf("calls: %v", got)
	}
	for _, path := range left {
		if exists(path) {
			t.Errorf("%s is left", path)
		}
	}
	b.runs("1")
	b.manager.Forget()
	b.must(b.applier().Heal(context.Background()))
	if got := b.manager.Calls(); len(got) > 0 {
		t.Errorf("a second time: %v", got)
	}
}

func TestHealStartsTheRecoveryOfAnOpenRoll(t *testing.T) {
	b := newBox(t)
	b.stage("1", nil, nil)
	b.must(b.apply())
	b.stage("2", nil, nil)
	b.cutAt(Gating)
	b.manager.Forget()
	b.must(b.applier().Heal(context.Background()))
	if got := b.manager.Calls(); !slices.Equal(got, []string{"queue sluice-recover@edge.service"}) {
		t.Errorf("calls: %v", got)
	}
	if !b.state.Open() {
		t.Error("heal closed the roll itself")
	}
}
