package fleet

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"sluice/internal/outcome"
)

// What Debian's minisign signs, counts; anything else does not.
func TestVendorSignaturesOfMinisign(t *testing.T) {
	tool, err := exec.LookPath("minisign")
	if err != nil {
		t.Skip("minisign is not installed: `make test` installs it")
	}
	dir := t.TempDir()
	run := func(args ...string) {
		t.Helper()
		c := exec.Command(tool, args...)
		c.Dir = dir
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("minisign %v: %v: %s", args, err, out)
		}
	}
	sums := bytes.Repeat([]byte("0123456789abcdef  hello_1.0_linux-amd64.tar.zst\n"), 20)
	if err := os.WriteFile(filepath.Join(dir, "SHA256SUMS"), sums, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"vendor", "other"} {
		run("-G", "-W", "-p", name+".pub", "-s", name+".key")
	}
	run("-S", "-s", "vendor.key", "-m", "SHA256SUMS", "-x", "hashed", "-t", "release v1.0")
	run("-S", "-l", "-s", "vendor.key", "-m", "SHA256SUMS", "-x", "legacy", "-t", "release v1.0")
	read := func(name string) []byte {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	vendor, err := ReadVendorKey(filepath.Join(dir, "vendor.pub"))
	if err != nil {
		t.Fatal(err)
	}
	other, err := ReadVendorKey(filepath.Join(dir, "other.pub"))
	if err != nil {
		t.Fatal(err)
	}
	for _, kind := range []string{"hashed", "legacy"} {
		sig := read(kind)
		if err := vendor.Verify(sums, sig); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		for name, c := range map[string]struct {
			key  VendorKey
			sums []byte
			sig  []byte
		}{
			"another key":     {other, sums, sig},
			"other sums":      {vendor, append(bytes.Clone(sums), '\n'), sig},
			"no sums":         {vendor, nil, sig},
			"another comment": {vendor, sums, bytes.Replace(sig, []byte("v1.0"), []byte("v1.1"), 1)},
			"cut short":       {vendor, sums, sig[:len(sig)/2]},
			"more after it":   {vendor, sums, append(bytes.Clone(sig), "more\n"...)},
			"nothing":         {vendor, sums, nil},
		} {
			if err := c.key.Verify(c.sums, c.sig); outcome.Exit(err) != outcome.ExitFailed {
				t.Errorf("%s, %s: %v", kind, name, err)
			}
		}
	}
	if _, err := ReadVendorKey(filepath.Join(dir, "SHA256SUMS")); outcome.Exit(err) != outcome.ExitConfig {
		t.Error(err)
	}
}
