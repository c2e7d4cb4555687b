package bundle

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/record"
)

// source makes a folder that bundles are made of.
func source(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"manifest.json":      `{"component": "edge", "version": "1", "version_command": ["bin/edge"], "units": {"inert": ["edge.service"]}}`,
		"bin/edge":           "#!/bin/sh\necho 1\n",
		"units/edge.service": "[Service]\nExecStart=/bin/true\n",
		"share/data":         strings.Repeat("data ", 10_000),
	} {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		mode := os.FileMode(0o644)
		if strings.HasPrefix(name, "bin/") {
			mode = 0o755
		}
		if err := os.WriteFile(at, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func pack(t testing.TB, dir string) ([]byte, Info) {
	t.Helper()
	m, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	info, err := Pack(&out, dir, m, nil)
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes(), info
}

func artifact(i Info) contract.Artifact {
	return contract.Artifact{Key: "bootstrap/edge/1/x", Size: i.Size, SHA256: i.SHA256, TarSize: i.TarSize, ManifestSHA256: i.ManifestSHA256}
}

// A bundle says of itself what Pack said, unpacks to what went in, and is the
// same bytes again however the files were touched.
func TestRoundTrip(t *testing.T) {
	dir := source(t)
	data, info := pack(t, dir)
	if int64(len(data)) != info.Size || record.Sum(data) != info.SHA256 {
		t.Errorf("%+v of %d bytes", info, len(data))
	}
	if err := os.Chtimes(filepath.Join(dir, "bin/edge"), time.Unix(0, 0), time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	if again, _ := pack(t, dir); !bytes.Equal(again, data) {
		t.Error("packed twice, it is not the same")
	}
	seen, err := Inspect(&durable.Disk{}, bytes.NewReader(data), t.TempDir())
	if err != nil || seen.SHA256 != info.SHA256 || seen.Size != info.Size || seen.TarSize != info.TarSize || seen.ManifestSHA256 != info.ManifestSHA256 {
		t.Errorf("inspected as %+v, packed as %+v, %v", seen, info, err)
	}
	to := t.TempDir()
	m, err := Unpack(&durable.Disk{}, bytes.NewReader(data), to, artifact(info), "edge", "1")
	if err != nil || len(m.Files) != 3 {
		t.Fatal(m, err)
	}
	for _, f := range m.Files {
		got, err := os.ReadFile(filepath.Join(to, f.Path))
		if err != nil || record.Sum(got) != f.SHA256 {
			t.Errorf("%s: %v", f.Path, err)
		}
	}
}

func TestUnpackHoldsToWhatWasSigned(t *testing.T) {
	data, info := pack(t, source(t))
	for name, change := range map[string]func(a *contract.Artifact){
		"a larger tar":     func(a *contract.Artifact) { a.TarSize++ },
		"a smaller tar":    func(a *contract.Artifact) { a.TarSize-- },
		"another manifest": func(a *contract.Artifact) { a.ManifestSHA256 = record.Sum(nil) },
	} {
		a := artifact(info)
		change(&a)
		if _, err := Unpack(&durable.Disk{}, bytes.NewReader(data), t.TempDir(), a, "edge", "1"); !errors.Is(err, ErrBad) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for i := range 20 {
		broken := bytes.Clone(data)
		broken[len(broken)*i/20] ^= 0x10
		to := t.TempDir()
		if _, err := Unpack(&durable.Disk{}, bytes.NewReader(broken), to, artifact(info), "edge", "1"); err == nil {
			t.Errorf("byte %d changed, and it was taken", len(broken)*i/20)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	for says, change := range map[string]func(dir string) error{
		"no regular file": func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "share/link")) },
		"no such file":    func(dir string) error { return os.Remove(filepath.Join(dir, "manifest.json")) },
		"unknown member": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(`{"component":"edge","version":"1","gaet":{}}`), 0o644)
		},
		"nothing would ever start it": func(dir string) error {
			if err := os.WriteFile(filepath.Join(dir, "units/edge.service"), []byte("[Service]\nExecStart=/x\n[Install]\nWantedBy=multi-user.target\n"), 0o644); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(`{"component":"edge","version":"1","version_command":["bin/edge"],"units":{"enable":["edge.service"]}}`), 0o644)
		},
		"never disabled": func(dir string) error {
			if err := os.WriteFile(filepath.Join(dir, "units/edge.service"), []byte("[Service]\nExecStart=/x\n[Install]\nWantedBy=multi-user.target\nAlso=other.timer\n"), 0o644); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(`{"component":"edge","version":"1","version_command":["bin/edge"],"units":{"enable":["edge.service"],"restart":[{"unit":"edge.service"}]}}`), 0o644)
		},
		"makes no link": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "manifest.json"), []byte(`{"component":"edge","version":"1","version_command":["bin/edge"],"units":{"enable":["edge.service"]}}`), 0o644)
		},
		"does not have": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "units/lone.timer"), []byte("[Timer]\nOnCalendar=daily\n"), 0o644)
		},
		"stop each other": func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "units/edge.service"), []byte("[Unit]\nRequires=sluice-fetch.service\n[Service]\nExecStart=/x\n"), 0o644)
		},
	} {
		dir := source(t)
		if err := change(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(dir); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("want %q, got %v", says, err)
		}
	}
}

// Whatever a bundle is: no panic, nothing outside its folder, and what is
// accepted is exactly what its manifest lists.
func FuzzUnpack(f *testing.F) {
	data, _ := pack(f, source(f))
	f.Add(data)
	f.Add(data[:len(data)/2])
	f.Fuzz(func(t *testing.T, data []byte) {
		parent := t.TempDir()
		dir := filepath.Join(parent, "to")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		info, err := Inspect(&durable.Disk{}, bytes.NewReader(data), dir)
		if entries, _ := os.ReadDir(parent); len(entries) != 1 {
			t.Errorf("something was written outside: %v", entries)
		}
		if err != nil {
			return
		}
		for _, file := range info.Manifest.Files {
			got, err := os.ReadFile(filepath.Join(dir, file.Path))
			if err != nil || record.Sum(got) != file.SHA256 {
				t.Errorf("%s: %v", file.Path, err)
			}
		}
	})
}
