// Package tree is what tests do to the tree of a box that stands in a folder:
// copy it, keep it in memory, damage what is in it.
package tree

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Copy copies a tree to a folder, symbolic links as they are.
func Copy(t testing.TB, to, from string) {
	t.Helper()
	if err := os.CopyFS(to, links{os.DirFS(from), from}); err != nil {
		t.Fatal(err)
	}
}

type links struct {
	fs.FS
	base string
}

func (l links) ReadLink(name string) (string, error) { return os.Readlink(filepath.Join(l.base, name)) }
func (l links) Lstat(name string) (fs.FileInfo, error) {
	return os.Lstat(filepath.Join(l.base, name))
}

// InMemory is a folder in memory, where fsync costs nothing. It goes with the
// test.
func InMemory(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "sluice-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Damages are what a disk, or a hand, can make of a record.
var Damages = map[string]func(data []byte) []byte{
	"emptied":        func([]byte) []byte { return nil },
	"truncated":      func(d []byte) []byte { return d[:len(d)/8] }, // a journal is padded
	"zeroes":         func(d []byte) []byte { return make([]byte, len(d)) },
	"garbage":        func([]byte) []byte { return []byte("\x7fELF\x02\x01") },
	"a newer minor":  func(d []byte) []byte { return schema(d, "1.9") },
	"another major":  func(d []byte) []byte { return schema(d, "7.0") },
	"over the limit": func(d []byte) []byte { return append(d, []byte(strings.Repeat(" ", 1<<17))...) },
}

func schema(d []byte, step string) []byte {
	return []byte(strings.Replace(string(d), `"schema": "1.0"`, `"schema": "`+step+`"`, 1))
}
