package apply

import (
	"os"
	"strings"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// What runs is what was signed, byte for byte. This test is the process that
// is judged.
func TestExecutable(t *testing.T) {
	name, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	changed := append([]byte{}, self...)
	changed[len(changed)-1] ^= 1
	b := newBox(t)
	for version, c := range map[string]struct {
		program string
		exec    string
		says    string
	}{
		"1": {string(self), "/opt/sluice/edge/current/bin/edge", ""},
		"2": {string(changed), "/opt/sluice/edge/current/bin/edge", "does not run the"},
		"3": {"#!/bin/sh\n", "/opt/sluice/edge/current/bin/edge", ""}, // its interpreter runs
		"4": {string(changed), "/bin/sleep", ""},                      // not of the set
	} {
		b.stage(version, map[string]string{"bin/edge": c.program}, nil)
		s, _, err := record.Load[contract.Staged](b.state, layout.StagedRecord)
		b.must(err)
		a := b.applier()
		build, err := a.load(s.Build)
		b.must(err)
		j := &judge{roll: &roll{Applier: a}, build: build, proved: map[string]uint64{}}
		err = j.executable(systemd.Unit{Name: "edge.service", Exec: c.exec, MainPID: os.Getpid(), MainStart: 1})
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", version, err)
		}
	}
}
