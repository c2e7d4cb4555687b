package durable

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"sluice/internal/fault"
)

// The order of system calls is the whole promise of a durable write.
func TestWriteFileOrder(t *testing.T) {
	var ops []string
	d := &Disk{Fault: &fault.Points{Seen: func(_ int, op, _ string) { ops = append(ops, op) }}}
	path := filepath.Join(t.TempDir(), "f")
	if err := d.WriteFile(path, []byte("x"), 0o640); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(ops, ", "); got != "create, write, fsync, rename, fsync folder" {
		t.Error(got)
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o640 {
		t.Error(st.Mode())
	}
}

// Dying at any point leaves the old content or the new, whole.
func TestWriteFileDiesWhole(t *testing.T) {
	for at := 1; at <= 6; at++ {
		path := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
			t.Fatal(err)
		}
		d := &Disk{Fault: &fault.Points{At: at}}
		err := d.WriteFile(path, []byte("new"), 0o644)
		got, _ := os.ReadFile(path)
		want := "old"
		if at > 4 {
			want = "new"
		}
		if string(got) != want || (err == nil) != (at > 5) {
			t.Errorf("died at %d: %q, %v", at, got, err)
		}
	}
}

// An operation that fails leaves nothing behind.
func TestWriteFileFailsClean(t *testing.T) {
	for at := 1; at <= 4; at++ {
		dir := t.TempDir()
		d := &Disk{Fault: &fault.Points{At: at, Err: unix.ENOSPC}}
		if err := d.WriteFile(filepath.Join(dir, "f"), []byte("new"), 0o644); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("failed at %d: %v", at, err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("failed at %d: left %v", at, left)
		}
	}
}

func TestSymlinkReplacesAndKeeps(t *testing.T) {
	d := &Disk{}
	link := filepath.Join(t.TempDir(), "current")
	for _, target := range []string{"sets/1", "sets/2", "sets/2"} {
		if err := d.Symlink(target, link); err != nil {
			t.Fatal(err)
		}
		if got, _ := os.Readlink(link); got != target {
			t.Errorf("got %q, want %q", got, target)
		}
	}
	if left, _ := os.ReadDir(filepath.Dir(link)); len(left) != 1 {
		t.Errorf("left %v", left)
	}
}

func TestRemoveTree(t *testing.T) {
	d := &Disk{}
	dir := t.TempDir()
	for _, name := range []string{"set", ".set.partial"} {
		if err := os.MkdirAll(filepath.Join(dir, name, "a/b"), 0o755); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := d.RemoveTree(filepath.Join(dir, name)); err != nil {
				t.Error(err)
			}
		}
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left %v", left)
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	ctx := context.Background()
	l, err := Acquire(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v: who can open a lock can hold it", st.Mode())
	}
	now, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Acquire(now, path); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "held by pid") {
		t.Errorf("second holder: %v", err)
	}
	l.Release()
	if l, err = Acquire(now, path); err != nil {
		t.Errorf("after the release: %v", err)
	}
	l.Release()
}

func TestMkdirMode(t *testing.T) {
	d := &Disk{}
	path := filepath.Join(t.TempDir(), "a/b")
	if err := d.Mkdir(path, 0o700|fs.ModeSetgid); err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(path); st.Mode() != fs.ModeDir|fs.ModeSetgid|0o700 {
		t.Error(st.Mode())
	}
}

// Every folder above has the mode as well: one without the setgid bit would
// hand none on, and a sandbox may not set it.
func TestMkdirModeOfAll(t *testing.T) {
	dir := t.TempDir()
	const mode = 0o750 | fs.ModeSetgid
	if err := os.Chmod(dir, mode); err != nil {
		t.Fatal(err)
	}
	if err := (&Disk{}).Mkdir(filepath.Join(dir, "a/b/c"), mode); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"a", "a/b", "a/b/c"} {
		if st, err := os.Stat(filepath.Join(dir, p)); err != nil || st.Mode()&(fs.ModePerm|fs.ModeSetgid) != mode {
			t.Errorf("%s: %v, %v", p, st.Mode(), err)
		}
	}
}

// Replace takes away what stands in the way; without it that is an error.
func TestReplace(t *testing.T) {
	for _, replace := range []bool{true, false} {
		d := &Disk{Replace: replace}
		dir := t.TempDir()
		for _, name := range []string{"file", "tree/deep"} {
			if err := os.MkdirAll(filepath.Join(dir, name, "in", "the", "way"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("/etc", filepath.Join(dir, "folder")); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(filepath.Join(dir, ".tree.partial"), 0o755); err != nil {
			t.Fatal(err)
		}
		for what, err := range map[string]error{
			"a file over a folder": d.WriteFile(filepath.Join(dir, "file"), []byte("new"), 0o644),
			"a folder over a link": d.Mkdir(filepath.Join(dir, "folder"), 0o755),
			"a tree over a folder": d.Rename(filepath.Join(dir, ".tree.partial"), filepath.Join(dir, "tree")),
		} {
			if (err == nil) != replace {
				t.Errorf("%s, replace %v: %v", what, replace, err)
			}
		}
	}
}
