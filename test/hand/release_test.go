package hand

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/record"
)

// A vendor serves public releases, that Debian's minisign has signed.
type vendor struct {
	*httptest.Server
	w   *world
	dir string

	mu    sync.Mutex
	cut   string // the body of this is cut in the middle, once
	asked []string
}

func newVendor(w *world) *vendor {
	w.t.Helper()
	if _, err := exec.LookPath("minisign"); err != nil {
		w.t.Skip("minisign is not installed: `make test` installs it")
	}
	v := &vendor{w: w, dir: filepath.Join(w.dir, "releases")}
	w.must(os.MkdirAll(v.dir, 0o755))
	for _, name := range []string{"vendor", "thief"} {
		v.minisign("-G", "-W", "-p", name+".pub", "-s", name+".key")
	}
	files := http.FileServer(http.Dir(v.dir))
	v.Server = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		v.mu.Lock()
		v.asked = append(v.asked, r.URL.Path+" "+r.Header.Get("Range"))
		cut := v.cut != "" && strings.HasSuffix(r.URL.Path, v.cut)
		if cut {
			v.cut = ""
		}
		v.mu.Unlock()
		if cut {
			data, err := os.ReadFile(filepath.Join(v.dir, r.URL.Path))
			if err != nil {
				panic(err)
			}
			rw.Header().Set("Content-Length", fmt.Sprint(len(data)))
			_, _ = rw.Write(data[:len(data)/2])
			_ = http.NewResponseController(rw).Flush()
			panic(http.ErrAbortHandler)
		}
		files.ServeHTTP(rw, r)
	}))
	w.t.Cleanup(v.Close)
	return v
}

func (v *vendor) minisign(args ...string) {
	v.w.t.Helper()
	c := exec.Command("minisign", args...)
	c.Dir = v.w.dir
	if out, err := c.CombinedOutput(); err != nil {
		v.w.t.Fatalf("minisign %v: %v: %s", args, err, out)
	}
}

// release publishes a version of edge for some platforms, and says that it is the
// newest.
func (v *vendor) release(version string, platforms ...contract.Platform) {
	v.w.t.Helper()
	dir := filepath.Join(v.dir, "v"+version)
	v.w.must(os.MkdirAll(dir, 0o755))
	for _, p := range platforms {
		object, _, _ := v.w.pack(version, func(m *contract.Manifest, _ *[]entry) { m.Platform = p })
		v.w.must(os.WriteFile(filepath.Join(dir, fmt.Sprintf("edge_%s_%s.tar.zst", version, p)), object, 0o644))
	}
	v.sign(version, "vendor")
	v.w.must(os.WriteFile(filepath.Join(v.dir, "latest.txt"), []byte("v"+version+"\n"), 0o644))
}

// sign makes the sums of what a release has, and signs them.
func (v *vendor) sign(version, key string) {
	v.w.t.Helper()
	dir := filepath.Join(v.dir, "v"+version)
	assets, err := filepath.Glob(filepath.Join(dir, "*.tar.zst"))
	v.w.must(err)
	var sums bytes.Buffer
	for _, a := range assets {
		data, err := os.ReadFile(a)
		v.w.must(err)
		fmt.Fprintf(&sums, "%s  %s\n", record.Sum(data), filepath.Base(a))
	}
	v.w.must(os.WriteFile(filepath.Join(dir, "SHA256SUMS"), sums.Bytes(), 0o644))
	v.minisign("-S", "-s", key+".key", "-m", filepath.Join(dir, "SHA256SUMS"), "-x", filepath.Join(dir, "SHA256SUMS.minisig"))
}

// update runs `sluice update` as the operator of the deployment.
func (v *vendor) update(args ...string) (int, string) {
	v.w.t.Helper()
	c := exec.Command(filepath.Join(bin, "sluice"), append([]string{"update", "-yes"}, args...)...)
	c.Env = []string{"PATH=" + os.Getenv("PATH"), "XDG_CACHE_HOME=" + filepath.Join(v.w.dir, "cache"), "SLUICE_STORE=" + v.w.store.String(), "SLUICE_KEY=" + v.w.own() + ".key",
		"SLUICE_RELEASES=" + v.URL, "SLUICE_VENDOR_KEY=" + filepath.Join(v.w.dir, "vendor.pub")}
	out, _ := c.CombinedOutput()
	return c.ProcessState.ExitCode(), string(out)
}

const other contract.Platform = "linux-riscv64"

// A release is found, checked, mirrored and promoted; again it is safe, and what was
// cut goes on where it was.
func TestARelease(t *testing.T) {
	w := newWorld(t)
	v := newVendor(w)
	v.release("1", contract.Here(), other)
	// No box has reported yet: all that the release has.
	if status, out := v.update(); status != 0 {
		t.Fatalf("exit status %d: %s", status, out)
	}
	p, err := contract.Spoken.DecodePointer(mustPayload(w, w.raw(pointerKey)))
	w.must(err)
	if p.Payload.Current.Source != "release:v1" || len(p.Payload.Current.Artifacts) != 2 {
		t.Errorf("%+v", p.Payload.Current)
	}
	w.roll()
	w.step("fetch once", 0, "")
	if w.running() != "1" {
		t.Errorf("runs %s", w.running())
	}
	// Now one has: only what it needs.
	v.release("2", contract.Here(), other)
	v.cut = ".tar.zst"
	if status, out := v.update("edge"); status != 69 || !strings.Contains(out, "run it again") {
		t.Errorf("cut: exit status %d: %s", status, out)
	}
	v.asked = nil
	if status, out := v.update("edge"); status != 0 {
		t.Errorf("exit status %d: %s", status, out)
	}
	if !slices.ContainsFunc(v.asked, func(s string) bool { return strings.Contains(s, ".tar.zst bytes=") }) || slices.ContainsFunc(v.asked, func(s string) bool { return strings.Contains(s, string(other)) }) {
		t.Errorf("asked %q", v.asked)
	}
	w.roll()
	if w.running() != "2" {
		t.Errorf("runs %s", w.running())
	}
	// Again, and an earlier one by its version, for one platform.
	if status, out := v.update(); status != 0 {
		t.Errorf("again: exit status %d: %s", status, out)
	}
	if status, out := v.update("-version", "1", "-platform", string(contract.Here()), "-channel", "canary"); status != 0 {
		t.Errorf("exit status %d: %s", status, out)
	}
	if status, out := v.update("-version", "2"); status != 0 || !strings.Contains(out, "warning: edge 2 was never on channel canary") {
		t.Errorf("exit status %d: %s", status, out)
	}
	if left, err := filepath.Glob(filepath.Join(w.dir, "cache/sluice/releases/*/*/*")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// What is not what the vendor signed is not promoted, nor is anything of it mirrored;
// and it is said what to do.
func TestWrongReleases(t *testing.T) {
	w := newWorld(t)
	v := newVendor(w)
	v.release("1", contract.Here())
	if status, out := v.update(); status != 0 {
		t.Fatalf("exit status %d: %s", status, out)
	}
	w.roll()
	w.step("fetch once", 0, "") // reports its platform
	in := func(version, name string) string { return filepath.Join(v.dir, "v"+version, name) }
	asset := func(version string, p contract.Platform) string {
		return in(version, fmt.Sprintf("edge_%s_%s.tar.zst", version, p))
	}
	n := 1
	for name, c := range map[string]struct {
		spoil func(version string)
		says  []string
		args  []string
	}{
		"sums that somebody else signed": {func(v2 string) { v.sign(v2, "thief") }, []string{"bad-signature", "Nothing was promoted", "SLUICE_VENDOR_KEY"}, nil},
		"sums that were changed": {func(v2 string) {
			f, err := os.OpenFile(in(v2, "SHA256SUMS"), os.O_APPEND|os.O_WRONLY, 0)
			w.must(err)
			_, err = f.WriteString(strings.Repeat("0", 64) + "  more\n")
			w.must(err)
			w.must(f.Close())
		}, []string{"bad-signature"}, nil},
		"no signature": {func(v2 string) { w.must(os.Remove(in(v2, "SHA256SUMS.minisig"))) }, []string{"bad-signature", "ask its vendor"}, nil},
		"no sums":      {func(v2 string) { w.must(os.Remove(in(v2, "SHA256SUMS"))) }, []string{"no-artifact", "has no release"}, nil},
		"the sums of another tag": {func(v2 string) {
			w.must(os.Rename(in("1", "SHA256SUMS"), in(v2, "SHA256SUMS")))
			w.must(os.Rename(in("1", "SHA256SUMS.minisig"), in(v2, "SHA256SUMS.minisig")))
			v.sign("1", "vendor")
		}, []string{"no-artifact", "has no bundles"}, nil},
		"an asset with other bytes":   {func(v2 string) { w.must(os.WriteFile(asset(v2, contract.Here()), []byte("other"), 0o644)) }, []string{"digest-mismatch", "Nothing was promoted"}, nil},
		"one of two with other bytes": {func(v2 string) { w.must(os.WriteFile(asset(v2, other), []byte("other"), 0o644)) }, []string{"digest-mismatch"}, []string{"-platform", string(contract.Here()), "-platform", string(other)}},
		"an asset that is not there":  {func(v2 string) { w.must(os.Remove(asset(v2, contract.Here()))) }, []string{"no-artifact", "ask the vendor"}, nil},
		"no asset for a platform":     {func(v2 string) { w.must(os.Remove(asset(v2, contract.Here()))); v.sign(v2, "vendor") }, []string{"no-artifact", "-platform"}, nil},
		"a bundle of another version": {func(v2 string) {
			data, err := os.ReadFile(asset("1", contract.Here()))
			w.must(err)
			w.must(os.WriteFile(asset(v2, contract.Here()), data, 0o644))
			v.sign(v2, "vendor")
		}, []string{"bad-bundle", "ask the vendor"}, nil},
		"what is no bundle": {func(v2 string) {
			w.must(os.WriteFile(asset(v2, contract.Here()), []byte("MZ"), 0o644))
			v.sign(v2, "vendor")
		}, []string{"bad-bundle"}, nil},
		"a version that is there with other bytes": {func(v2 string) {
			w.put(contract.BootstrapKey("edge", contract.Version(v2), fmt.Sprintf("edge_%s_%s.tar.zst", v2, other)), []byte("other"))
		}, []string{"mutated", "release a new one"}, []string{"-platform", string(contract.Here()), "-platform", string(other)}},
	} {
		n++
		version := fmt.Sprint(n)
		v.release(version, contract.Here(), other)
		c.spoil(version)
		before := string(w.raw(pointerKey))
		status, out := v.update(c.args...)
		if status == 0 {
			t.Errorf("%s: exit status 0: %s", name, out)
		}
		for _, says := range c.says {
			if !strings.Contains(out, says) {
				t.Errorf("%s: does not say %q: %s", name, says, out)
			}
		}
		if string(w.raw(pointerKey)) != before {
			t.Errorf("%s: the pointer was changed", name)
		}
		if !strings.Contains(name, "that is there with other") {
			if keys, err := w.store.List(t.Context(), contract.BootstrapKey("edge", contract.Version(version), "")); err != nil || len(keys) > 0 {
				t.Errorf("%s: mirrored %v, %v", name, keys, err)
			}
		}
	}
	v.release("99", contract.Here())
	if status, out := v.update(); status != 0 {
		t.Errorf("a right one: exit status %d: %s", status, out)
	}
	w.roll()
	if w.running() != "99" {
		t.Errorf("runs %s", w.running())
	}
	for line, status := range map[string]int{"-version ../x": 1, "-version 1 -file x": 2, "-releases ftp://example.com/": 78, "-vendor-key nowhere": 78, "-halt-after -1": 2, "-timeout 0s": 2, "-at yesterday": 2, "-at 2099-01-01T00:00:00.000000000Z": 2, "-platform x": 2, "nothing": 1} {
		if got, out := v.update(strings.Fields(line)...); got != status {
			t.Errorf("%s: exit status %d, want %d: %s", line, got, status, out)
		}
	}
}
