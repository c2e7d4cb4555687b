package durable

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"sluice/internal/fault"
	"sluice/test/cut"
)

// What a call has returned from is there after a power cut. Each is cut
// directly behind, since a later durable call would hide an fsync that is
// missing; and each is cut once more without one of its fsyncs, when its
// effect has to be gone: this test can fail.
func TestPowerCut(t *testing.T) {
	is := func(text string) func(string) bool {
		return func(path string) bool { data, err := os.ReadFile(path); return err == nil && string(data) == text }
	}
	gone := func(path string) bool { _, err := os.Lstat(path); return errors.Is(err, fs.ErrNotExist) }
	folder := func(path string) bool { st, err := os.Lstat(path); return err == nil && st.IsDir() }
	link := func(target string) func(string) bool {
		return func(path string) bool { have, err := os.Readlink(path); return err == nil && have == target }
	}
	raw := func(t *testing.T, err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name    string
		prepare func(t *testing.T, x string) // made durable
		begun   func(t *testing.T, x string) // what a run did that was killed before its fsync
		do      func(d *Disk, x string) error
		effect  func(x string) bool
		fsyncs  string // those without which it is lost
	}{
		{"a new file", nil, nil, func(d *Disk, x string) error { return d.WriteFile(x, []byte("new"), 0o644) }, is("new"), "fsync, fsync folder"},
		{"a file replaced", func(t *testing.T, x string) { raw(t, os.WriteFile(x, []byte("old"), 0o644)) }, nil,
			func(d *Disk, x string) error { return d.WriteFile(x, []byte("new"), 0o644) }, is("new"), "fsync, fsync folder"},
		{"a file copied", nil, nil, func(d *Disk, x string) error { return d.CopyFile(x, strings.NewReader("new"), 0o644) }, is("new"), "fsync, fsync folder"},
		{"a rename", func(t *testing.T, x string) { raw(t, os.WriteFile(x+".a", []byte("new"), 0o644)) }, nil,
			func(d *Disk, x string) error { return d.Rename(x+".a", x) }, is("new"), "fsync folder"},
		{"an exchange", func(t *testing.T, x string) {
			raw(t, os.WriteFile(x, []byte("old"), 0o644))
			raw(t, os.WriteFile(x+".b", []byte("new"), 0o644))
		}, nil, func(d *Disk, x string) error { return d.Exchange(x, x+".b") }, is("new"), "fsync folder"},
		{"a removal", func(t *testing.T, x string) { raw(t, os.WriteFile(x, []byte("old"), 0o644)) }, nil,
			func(d *Disk, x string) error { return d.Remove(x) }, gone, "fsync folder"},
		{"a tree's removal", func(t *testing.T, x string) { raw(t, os.MkdirAll(filepath.Join(x, "deep"), 0o755)) }, nil,
			func(d *Disk, x string) error { return d.RemoveTree(x) }, gone, "fsync folder"},
		{"a link", nil, nil, func(d *Disk, x string) error { return d.Symlink("sets/2", x) }, link("sets/2"), "fsync folder"},
		{"a link replaced", func(t *testing.T, x string) { raw(t, os.Symlink("sets/1", x)) }, nil,
			func(d *Disk, x string) error { return d.Symlink("sets/2", x) }, link("sets/2"), "fsync folder"},
		{"a folder", nil, nil, func(d *Disk, x string) error { return d.Mkdir(x, 0o755) }, folder, "fsync folder"},
		{"folders", nil, nil, func(d *Disk, x string) error { return d.Mkdir(filepath.Join(x, "a", "b"), 0o755) },
			func(x string) bool { return folder(filepath.Join(x, "a", "b")) }, "fsync folder"},
		{"a tree", nil, func(t *testing.T, x string) { raw(t, os.MkdirAll(filepath.Join(x, "a", "b"), 0o755)) },
			func(d *Disk, x string) error { return errors.Join(d.SyncTree(x), d.SyncFolder(filepath.Dir(x))) },
			func(x string) bool { return folder(filepath.Join(x, "a", "b")) }, "fsync folder"},
		// Seen to be done, and not durable: whoever did it was killed.
		{"a link that is there", nil, func(t *testing.T, x string) { raw(t, os.Symlink("sets/2", x)) },
			func(d *Disk, x string) error { return d.Symlink("sets/2", x) }, link("sets/2"), "fsync folder"},
		{"a folder that is there", nil, func(t *testing.T, x string) { raw(t, os.Mkdir(x, 0o755)) },
			func(d *Disk, x string) error { return d.Mkdir(x, 0o755) }, folder, "fsync folder"},
		{"a removal that was done", func(t *testing.T, x string) { raw(t, os.WriteFile(x, []byte("old"), 0o644)) }, func(t *testing.T, x string) { raw(t, os.Remove(x)) },
			func(d *Disk, x string) error { return d.Remove(x) }, gone, "fsync folder"},
	} {
		for _, kind := range cut.Kinds {
			t.Run(c.name+" "+kind, func(t *testing.T) {
				disk := cut.New(t, kind, filepath.Join(t.TempDir(), "disk"))
				x := filepath.Join(disk.Path, "in", "x")
				after := func(skip string) bool {
					raw(t, disk.Clear())
					raw(t, os.Mkdir(filepath.Dir(x), 0o755))
					if c.prepare != nil {
						c.prepare(t, x)
					}
					raw(t, disk.Sync())
					if c.begun != nil {
						c.begun(t, x)
					}
					d := &Disk{Fault: &fault.Points{Skip: func(op, _ string) bool { return op == skip }}}
					raw(t, c.do(d, x))
					if !c.effect(x) {
						t.Fatal("it did not even do it")
					}
					raw(t, disk.Cut())
					raw(t, disk.Revive())
					return c.effect(x)
				}
				if !after("") {
					t.Error("after the cut it is gone")
				}
				for _, skip := range strings.Split(c.fsyncs, ", ") {
					if after(skip) {
						t.Errorf("without its %s it is there as well: this test sees nothing", skip)
					}
				}
			})
		}
	}
}
