package box

import (
	"crypto/rand"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// small gives a box filesystems of its own for /data and /opt, and boots it
// again on them.
func small(t *testing.T, b *Box, data, opt string) {
	t.Helper()
	must[struct{}](t)(struct{}{}, b.Cut())
	for name, size := range map[string]string{"data": data, "opt": opt} {
		at := filepath.Join(b.Root, name)
		must[struct{}](t)(struct{}{}, os.MkdirAll(at, 0o755))
		must[struct{}](t)(struct{}{}, unix.Mount("tmpfs", at, "tmpfs", 0, "mode=755,size="+size))
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	must[struct{}](t)(struct{}{}, b.Boot(t.Context()))
}

// fill leaves so many bytes of a filesystem; free gives them back.
func (f *Fleet) fill(t *testing.T, folder string, leave int64) (free func()) {
	t.Helper()
	path := filepath.Join(f.Root, folder, "ballast")
	left := must[int64](t)(durable.Free(filepath.Dir(path)))
	file := must[*os.File](t)(os.Create(path))
	defer file.Close()
	if err := unix.Fallocate(int(file.Fd()), 0, 0, left-leave); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		must[struct{}](t)(struct{}{}, os.Remove(path))
	}
}

// A disk that is full, before a download, before what it unpacks to, and before
// the set: the promote waits and says why, nothing that runs is touched, and it
// goes through once there is room.
func TestFullDisks(t *testing.T) {
	b := open(t)
	small(t, b, "96m", "160m")
	f := must[*Fleet](t)(NewFleet(t.Context(), b, os.Getenv("BIN"), Bucket, "edge=stable"))
	must[struct{}](t)(struct{}{}, f.Enroll(t.Context(), "-label", "box-1"))
	ctx := t.Context()
	noise := make([]byte, 3<<20) // does not compress
	bundle := func(version string, zeroes int) string {
		_, _ = rand.Read(noise)
		files := sleeper("edge", version, "100ms")
		files["share/noise"], files["share/zeroes"] = string(noise), strings.Repeat("\x00", zeroes)
		return must[string](t)(f.Bundle(ctx, "edge-"+version, files))
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, bundle("1", 6<<20))), outcome.Applied))
	state := f.State("edge")
	waits := func(what string, is func() string) {
		t.Helper()
		must[struct{}](t)(struct{}{}, Until(ctx, what, RollTime, func() (bool, error) {
			said := is()
			return strings.Contains(said, string(outcome.NoSpace)) || strings.Contains(said, "free"), fmt.Errorf("it says %q", said)
		}))
		if f.running("edge") == "" || state.Open() {
			t.Errorf("%s: what runs was touched", what)
		}
	}
	heartbeat := func() string {
		data, _ := os.ReadFile(filepath.Join(f.Root, "srv/bucket/status/boxes/box-1.json"))
		h, err := contract.Spoken.DecodeHeartbeat(data)
		if err != nil {
			return err.Error()
		}
		return h.Components["edge"].Pending
	}
	verdict := func() string {
		v := record.Optional[contract.Verdict](state, layout.Verdict)
		if v == nil {
			return ""
		}
		return v.Verdict + " " + v.Reason
	}
	result := func() string {
		r := record.Optional[contract.Result](state, layout.Result)
		if r == nil || r.Outcome != outcome.Deferred {
			return ""
		}
		return r.Reason
	}
	for i, c := range []struct {
		what, folder string
		leave        int64
		zeroes       int
		downloaded   bool
		says         func() string
	}{
		{"a full incoming/", "data", 1 << 20, 6 << 20, false, heartbeat},
		{"a full verified/", "data", 5 << 20, 24 << 20, true, verdict},
		{"a full sets/", "opt", 10 << 20, 6 << 20, false, result},
	} {
		version := fmt.Sprint(i + 2)
		file := bundle(version, c.zeroes)
		var p contract.Pointer
		var free func()
		if c.downloaded { // it fills up after that
			must[string](t)(f.Exec(ctx, "systemctl", "stop", "sluice-verify@edge.path"))
			p = must[contract.Pointer](t)(f.Promote(ctx, file))
			must[struct{}](t)(struct{}{}, Until(ctx, "the download", RollTime, func() (bool, error) {
				_, err := os.Stat(filepath.Join(f.Root, layout.Root("/").Download("edge", version), layout.ObjectName))
				return err == nil, err
			}))
			free = f.fill(t, c.folder, c.leave)
			must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-verify@edge.path"))
		} else {
			free = f.fill(t, c.folder, c.leave)
			p = must[contract.Pointer](t)(f.Promote(ctx, file))
		}
		waits(c.what, c.says)
		free()
		must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
		if f.running("edge") != version {
			t.Errorf("%s: it runs %s", c.what, f.running("edge"))
		}
	}
}

// Markers are raised a thousand times at random moments while the stages run:
// the last promote is handled, no unit ends in failed, and none of them spins.
func TestMarkersRaisedWithoutEnd(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	state := f.State("edge")
	marks := []string{state.Path(layout.Fetched), state.Path(layout.Requested), state.Path(layout.Staged)}
	bundles := []string{}
	for i := range 4 {
		bundles = append(bundles, must[string](t)(f.Bundle(ctx, fmt.Sprint("v", i), sleeper("edge", fmt.Sprint(i), "100ms"))))
	}
	began := time.Now()
	var last contract.Pointer
	for i := range 1000 {
		// By the owner of the folder it would be the same: what a marker says is that it is there.
		m := marks[mathrand.IntN(len(marks))]
		if file, err := os.OpenFile(m, os.O_CREATE|os.O_WRONLY, 0o666); err == nil {
			file.Close()
		}
		if i%250 == 100 {
			last = must[contract.Pointer](t)(f.Promote(ctx, bundles[i/250]))
		}
		<-time.After(time.Duration(mathrand.Int64N(int64(30 * time.Millisecond))))
	}
	must[contract.Result](t)(f.Ended(ctx, last, outcome.Applied))
	if f.running("edge") != "3" {
		t.Errorf("it runs %s", f.running("edge"))
	}
	must[struct{}](t)(struct{}{}, Until(ctx, "all markers to be taken", RollTime, func() (bool, error) {
		for _, m := range marks {
			if _, err := os.Lstat(m); err == nil {
				return false, fmt.Errorf("%s is there", m)
			}
		}
		return true, nil
	}))
	took := time.Since(began)
	if failed := strings.TrimSpace(must[string](t)(f.Exec(ctx, "systemctl", "list-units", "--failed", "--no-legend", "--plain", "sluice-*"))); failed != "" {
		t.Errorf("failed: %s", failed)
	}
	for _, step := range []string{"verify", "stage", "apply"} {
		path := fmt.Sprintf("sluice-%s@edge.path", step)
		if out, err := f.Exec(ctx, "systemctl", "is-active", path); err != nil {
			t.Errorf("%s is %s", path, out)
		}
		runs := strings.Count(must[string](t)(f.Exec(ctx, "journalctl", "--no-pager", "-q", "-o", "cat", "-u", fmt.Sprintf("sluice-%s@edge.service", step))), "Starting sluice-")
		// Each run lasts a second at least.
		if most := int(took/time.Second) + 2; runs > most || runs == 0 {
			t.Errorf("%s ran %d times in %s", step, runs, took)
		}
	}
}
