package intake

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func open(t *testing.T) (string, *Folder) {
	t.Helper()
	dir := t.TempDir()
	f, err := OpenFolder(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return dir, f
}

func TestReadAcceptsOneRegularFile(t *testing.T) {
	dir, d := open(t)
	must(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "sub/f"), bytes.Repeat([]byte("x"), 10), 0o644))
	if got, err := d.Read("sub/f", os.Getuid(), 10); err != nil || len(got) != 10 {
		t.Errorf("a file of exactly the limit: %d bytes, %v", len(got), err)
	}
	if _, err := d.Read("sub/f", os.Getuid(), 9); !errors.Is(err, ErrRejected) {
		t.Errorf("one byte over the limit: %v", err)
	}
}

func TestReadRejects(t *testing.T) {
	dir, d := open(t)
	outside := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(outside, []byte("secret"), 0o644))
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Symlink(outside, in("link")))
	must(t, os.Symlink(filepath.Dir(outside), in("linkdir")))
	must(t, unix.Mkfifo(in("fifo"), 0o644))
	must(t, os.Mkdir(in("folder"), 0o755))
	must(t, os.WriteFile(in("two"), nil, 0o644))
	must(t, os.Link(in("two"), in("second")))
	must(t, os.WriteFile(in("plain"), nil, 0o644))
	must(t, os.WriteFile(in("folder/f"), nil, 0o644))
	must(t, os.Symlink("folder", in("inside"))) // a link that does not even leave
	for _, walk := range []bool{false, true} {
		for _, name := range []string{"link", "linkdir/secret", "inside/f", "fifo", "folder", "two", "../" + filepath.Base(dir) + "/plain", "plain/x"} {
			_, err := d.Read(name, os.Getuid(), 100)
			if walk {
				var fd int
				if fd, err = d.walk(name, unix.O_RDONLY|unix.O_NONBLOCK); err == nil {
					err = acceptable(fd, os.Getuid(), 100)
					unix.Close(fd)
				} else {
					err = d.explain(name, err)
				}
				if err == nil {
					t.Errorf("%s was opened by the walk", name)
				}
				continue
			}
			if !errors.Is(err, ErrRejected) {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := d.Read("plain", os.Getuid()+1, 100); err == nil || !strings.Contains(err.Error(), "belongs to uid") {
		t.Errorf("another owner: %v", err)
	}
	if _, err := d.Read("none", os.Getuid(), 100); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
}

func TestReadOfALeasedFileDoesNotBlock(t *testing.T) {
	dir, d := open(t)
	name := filepath.Join(dir, "leased")
	must(t, os.WriteFile(name, []byte("x"), 0o644))
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Read("leased", os.Getuid(), 100); !errors.Is(err, ErrBusy) {
		t.Errorf("got %v, want ErrBusy", err)
	}
}

func TestRemoveAnyKind(t *testing.T) {
	dir, d := open(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	keep := filepath.Join(t.TempDir(), "keep")
	must(t, os.WriteFile(keep, nil, 0o644))
	for kind, make := range map[string]func() error{
		"file":   func() error { return os.WriteFile(in("m"), nil, 0o644) },
		"folder": func() error { return os.MkdirAll(in("m/a/b/c"), 0o755) },
		"link":   func() error { return os.Symlink(filepath.Dir(keep), in("m")) },
		"fifo":   func() error { return unix.Mkfifo(in("m"), 0o644) },
	} {
		must(t, make())
		if err := d.Remove("m"); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("%s: left %v", kind, left)
		}
	}
	if _, err := os.Stat(keep); err != nil {
		t.Error("the target of a link was removed")
	}
	if err := d.Remove("m"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("absent: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
