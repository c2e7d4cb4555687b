package box

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/test/suite"
)

// A wire is two namespaces with a cable between them, and nothing else.
const (
	boxAddress  = "10.77.0.1"
	doorAddress = "10.77.0.2"
)

// cable makes the namespace of a box and that of its door.
func cable(t *testing.T) (box, door string) {
	t.Helper()
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	box, door = fmt.Sprintf("sluice-box-%d", os.Getpid()), fmt.Sprintf("sluice-door-%d", os.Getpid())
	for _, ns := range []string{box, door} {
		run("netns", "add", ns)
		t.Cleanup(func() { run("netns", "del", ns) })
		run("-n", ns, "link", "set", "lo", "up")
	}
	run("link", "add", "wire0", "netns", box, "type", "veth", "peer", "name", "wire1", "netns", door)
	run("-n", box, "addr", "add", boxAddress+"/30", "dev", "wire0")
	run("-n", door, "addr", "add", doorAddress+"/30", "dev", "wire1")
	run("-n", box, "link", "set", "wire0", "up")
	run("-n", door, "link", "set", "wire1", "up")
	return box, door
}

// A box in a namespace of its own that can reach nothing but the door: enrolled by a
// token, rolled from a release that was ingested from a host of releases, which a
// real minisign has signed.
func TestBehindADoor(t *testing.T) {
	if _, err := exec.LookPath("minisign"); err != nil {
		t.Skip("minisign is not installed: `make test` installs it")
	}
	if err := Needs(); err != nil || os.Getenv("BIN") == "" {
		t.Skip("needs root, systemd-nspawn, and BIN: ", err)
	}
	t.Parallel()
	ctx := t.Context()
	bin, err := filepath.Abs(os.Getenv("BIN"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	host := func(program string, args ...string) string { // the operator's and the vendor's machine
		t.Helper()
		c := exec.CommandContext(ctx, program, args...)
		c.Dir, c.Env = dir, append(os.Environ(), "XDG_CACHE_HOME="+at("cache"))
		var errs strings.Builder
		c.Stderr = &errs
		out, err := c.Output()
		if err != nil {
			t.Fatalf("%s %v: %v: %s", program, args, err, errs.String())
		}
		return string(out)
	}
	sluice := func(args ...string) string { t.Helper(); return host(filepath.Join(bin, "sluice"), args...) }
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(at(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at(name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}

	// The vendor.
	host("minisign", "-G", "-W", "-p", "vendor.pub", "-s", "vendor.key")
	release := func(version string) {
		t.Helper()
		for path, text := range sleeper("quick", version, "1s") {
			mode := os.FileMode(0o644)
			if strings.HasPrefix(path, "bin/") {
				mode = 0o755
			}
			write("tree-"+version+"/"+path, text, mode)
		}
		asset := fmt.Sprintf("quick_%s_%s.tar.zst", version, contract.Here())
		if err := os.MkdirAll(at("releases/v"+version), 0o755); err != nil {
			t.Fatal(err)
		}
		sluice("bundle", at("tree-"+version), "-o", at("releases/v"+version+"/"+asset))
		data, err := os.ReadFile(at("releases/v" + version + "/" + asset))
		if err != nil {
			t.Fatal(err)
		}
		write("releases/v"+version+"/SHA256SUMS", fmt.Sprintf("%x  %s\n", sha256.Sum256(data), asset), 0o644)
		host("minisign", "-S", "-s", "vendor.key", "-m", "releases/v"+version+"/SHA256SUMS")
		write("releases/latest.txt", "v"+version+"\n", 0o644)
	}
	release("1")
	releases := httptest.NewServer(http.FileServer(http.Dir(at("releases"))))
	defer releases.Close()

	// The operator.
	if err := os.Mkdir(at("bucket"), 0o755); err != nil {
		t.Fatal(err)
	}
	bucket := "file://" + at("bucket")
	update := func(args ...string) contract.Pointer {
		t.Helper()
		out := sluice(append([]string{"update", "-store", bucket, "-key", "key.key", "-yes", "-json"}, args...)...)
		p, err := contract.Spoken.DecodePointer([]byte(out))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	doorURL := "https://" + doorAddress + ":8443"
	pipelines, _ := filepath.Glob(filepath.Join(bin, "sluice_*.tar.zst"))
	sluice("keygen", "-o", "key")
	sluice("init", "-store", bucket, "-box-store", doorURL, "-key", "key.pub", "-components", "quick=stable", "-o", "deployment.json")
	update("-file", pipelines[0])
	fromVendor := []string{"quick", "-releases", releases.URL, "-vendor-key", "vendor.pub"}
	p := update(fromVendor...)
	if p.Payload.Current.Source != "release:v1" {
		t.Errorf("%+v", p.Payload.Current)
	}
	write("token", sluice("door", "token", "box-1", "-store", bucket), 0o600)

	// The door.
	authority := suite.NewAuthority(t)
	cert, key := authority.Write(dir, "door", authority.Pair(doorAddress))
	boxNS, doorNS := cable(t)
	door := exec.Command("ip", "netns", "exec", doorNS, filepath.Join(bin, "door"), "-store", bucket, "-listen", doorAddress+":8443", "-cert", cert, "-tls-key", key)
	var said strings.Builder
	door.Stdout, door.Stderr = &said, &said
	if err := door.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = door.Process.Signal(os.Interrupt)
		if err := door.Wait(); err != nil {
			t.Errorf("the door: %v: %s", err, said.String())
		}
	})

	// The box.
	b, err := New(ctx, fmt.Sprintf("/var/tmp/sluice-%d-%s", os.Getpid(), t.Name()), "/run/netns/"+boxNS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			logs, _ := b.Exec(context.Background(), "journalctl", "--no-pager", "-q", "-o", "short-precise", "-n", "80")
			t.Log(logs)
		}
		if err := b.Remove(); err != nil {
			t.Error(err)
		}
	})
	f := &Fleet{Box: b, Store: doorURL}
	write("ca.crt", string(authority.PEM), 0o644)
	for _, name := range []string{"deployment.json", "token", "ca.crt"} {
		must[bool](t)(true, b.Copy(at(name), Operator+"/"+name))
	}
	must[bool](t)(true, b.Copy(filepath.Join(bin, "sluice"), Operator+"/sluice"))
	enroll := []string{Operator + "/sluice", "enroll", Operator + "/deployment.json", "-label", "box-1", "-ca", Operator + "/ca.crt"}
	if out, err := b.Exec(ctx, enroll...); err == nil || !strings.Contains(err.Error()+out, "is this box's token") {
		t.Errorf("without a token: %v: %s", err, out)
	}
	must[string](t)(b.Exec(ctx, append(enroll, "-token-file", Operator+"/token")...))
	if st, err := os.Stat(filepath.Join(b.Root, "etc/sluice/identity/token")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the token is kept as %v, %v", st, err)
	}
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
	release("2")
	must[contract.Result](t)(f.Ended(ctx, update(fromVendor...), outcome.Applied))
	if f.running("quick") != "2" {
		t.Errorf("runs %s", f.running("quick"))
	}
	// What it says is heard, and it reaches nothing else.
	s, err := store.Open(bucket)
	if err != nil {
		t.Fatal(err)
	}
	err = Until(ctx, "the heartbeat to say so", RollTime, func() (bool, error) {
		o, err := s.Get(ctx, contract.StatusKey("box-1"), contract.MaxHeartbeat, "")
		if store.IsNotExist(err) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		beat, err := contract.Spoken.DecodeHeartbeat(o.Data)
		return beat.Components["quick"].Running == "2", err
	})
	if err != nil {
		t.Error(err)
	}
	if out := sluice("status", "-store", bucket, "-check"); !strings.Contains(out, "current") {
		t.Error(out)
	}
	if routes := must[string](t)(b.Exec(ctx, "cat", "/proc/net/route")); strings.Count(routes, "\n") != 2 {
		t.Errorf("it has other ways out: %s", routes)
	}
	// A token that counts no more lets nobody in, and nothing of what runs is touched.
	sluice("door", "token", "box-1", "-store", bucket, "-revoke")
	release("3")
	update(fromVendor...)
	must[string](t)(b.Exec(ctx, "systemctl", "restart", "sluice-fetch.service")) // a request that waits for the bell is not cut off
	err = Until(ctx, "fetch to be turned away", RollTime, func() (bool, error) {
		out, err := b.Exec(ctx, "systemctl", "show", "-p", "StatusText", "sluice-fetch.service")
		return strings.Contains(out, "401"), err
	})
	if err != nil {
		t.Error(err)
	}
	write("token", sluice("door", "token", "box-1", "-store", bucket), 0o600)
	must[bool](t)(true, b.Copy(at("token"), Operator+"/token"))
	began := time.Now()
	must[string](t)(b.Exec(ctx, append(enroll, "-token-file", Operator+"/token")...))
	must[string](t)(b.Exec(ctx, "systemctl", "restart", "sluice-fetch.service"))
	err = Until(ctx, "the third release", RollTime, func() (bool, error) { return f.running("quick") == "3", nil })
	if err != nil {
		t.Error(err)
	}
	t.Logf("rolled %s after it was let in again", time.Since(began).Round(time.Second))
}
