package marker

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"sluice/internal/layout"
)

func TestRaiseAndTake(t *testing.T) {
	root := layout.Root(t.TempDir())
	mark := root.Path(layout.RequestMark, "edge")
	if err := os.MkdirAll(mark, 0o755); err != nil {
		t.Fatal(err)
	}
	path := root.Path(layout.Requested, "edge")
	for kind, make := range map[string]func() error{
		"raised": func() error { return Raise(path) },
		"folder": func() error { return os.MkdirAll(filepath.Join(path, "deep"), 0o755) },
		"link":   func() error { return os.Symlink("/nowhere", path) },
	} {
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if err := Raise(path); err != nil {
			t.Errorf("%s: raising what is raised: %v", kind, err)
		}
		was, err := Take(root, layout.DataOf, layout.Requested, "edge")
		if !was || err != nil {
			t.Errorf("%s: take = %v, %v", kind, was, err)
		}
		if left, _ := os.ReadDir(mark); len(left) > 0 {
			t.Errorf("%s: left behind %v", kind, left)
		}
	}
	if was, err := Take(root, layout.DataOf, layout.Requested, "edge"); was || err != nil {
		t.Errorf("take of nothing = %v, %v", was, err)
	}
}

func TestTakeFollowsNoLink(t *testing.T) {
	root := layout.Root(t.TempDir())
	elsewhere := t.TempDir()
	if err := os.MkdirAll(root.Path(layout.Verified, "edge"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(elsewhere, "requested"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(elsewhere, root.Path(layout.RequestMark, "edge")); err != nil {
		t.Fatal(err)
	}
	if _, err := Take(root, layout.DataOf, layout.Requested, "edge"); err == nil {
		t.Error("walked through a link")
	}
	if _, err := os.Stat(filepath.Join(elsewhere, "requested")); err != nil {
		t.Error("removed a file behind a link")
	}
}

// Whatever became of the folder, the marker is raised in one that its consumer
// can take it from.
func TestProduceMendsTheFolder(t *testing.T) {
	for name, spoil := range map[string]func(mark string) error{
		"as it was": func(string) error { return nil },
		"gone":      os.RemoveAll,
		"a link":    func(m string) error { return errors.Join(os.RemoveAll(m), os.Symlink("/etc", m)) },
		"a file":    func(m string) error { return errors.Join(os.RemoveAll(m), os.WriteFile(m, nil, 0o644)) },
		"narrow":    func(m string) error { return os.Chmod(m, 0o750) },
		"not empty": func(m string) error {
			return errors.Join(os.MkdirAll(filepath.Join(m, "x", "y"), 0o700), os.Chmod(m, 0o700))
		},
		"a markerly": func(m string) error { return os.Mkdir(filepath.Join(m, "fetched"), 0o700) },
	} {
		root := layout.Root(t.TempDir())
		mark := root.Path(layout.FetchedMark, "edge")
		if err := errors.Join(os.MkdirAll(mark, 0o770), os.Chmod(mark, 0o770), spoil(mark)); err != nil {
			t.Fatal(err)
		}
		if err := Produce(root, layout.FetchedMark, layout.Fetched, "edge"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if st, err := os.Lstat(mark); err != nil || !st.IsDir() || st.Mode().Perm() != 0o770 {
			t.Errorf("%s: the folder is %v, %v", name, st, err)
		}
		if was, err := Take(root, layout.DataOf, layout.Fetched, "edge"); !was || err != nil {
			t.Errorf("%s: taken: %v, %v", name, was, err)
		}
	}
}

// A marker that somebody else has raised is raised.
func TestRaisedBySomebodyElse(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to be somebody else")
	}
	dir := t.TempDir()
	for p := dir; p != "/tmp" && p != "/"; p = filepath.Dir(p) {
		if err := os.Chmod(p, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "requested")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread() // ends with the test: no other goroutine gets this thread
	if err := syscall.Setfsuid(65534); err != nil {
		t.Fatal(err)
	}
	err := Raise(path)
	missing := Raise(filepath.Join(dir, "none", "requested"))
	_ = syscall.Setfsuid(0)
	runtime.UnlockOSThread()
	if err != nil || missing == nil {
		t.Errorf("%v, %v", err, missing)
	}
}
