package box

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/record"
)

// nextVersion is what the programs of the next pipeline call themselves.
const nextVersion = "0.1.1"

// nextPipeline is this repository as its next release.
var nextPipeline = sync.OnceValues(func() (map[string]string, error) {
	dir, err := os.MkdirTemp("", "sluice-next-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	c := exec.Command(goTool(), "build", "-trimpath", "-ldflags", "-s -w -X sluice/internal/program.Version="+nextVersion, "-o", dir, "sluice/cmd/...")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	files := map[string]string{}
	for place, glob := range map[string]string{"bin/": filepath.Join(dir, "*"), "units/": "../../units/sluice-*", "sysusers.d/": "../../units/sysusers.d/*", "tmpfiles.d/": "../../units/tmpfiles.d/*", "": "../../units/manifest.json"} {
		paths, err := filepath.Glob(glob)
		if err != nil {
			return nil, err
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil {
				return nil, err
			}
			files[place+filepath.Base(path)] = string(data)
		}
	}
	files["manifest.json"] = strings.Replace(files["manifest.json"], `"soak": "5s"`, `"soak": "1s"`, 1)
	files["units/sluice-apply@.service"] += "# of the next release\n"
	return files, nil
})

// promotePipeline promotes the next pipeline under a version, spoilt or not.
func (f *Fleet) promotePipeline(t *testing.T, version string, spoil func(map[string]string)) contract.Pointer {
	t.Helper()
	files := maps.Clone(must[map[string]string](t)(nextPipeline()))
	files["manifest.json"] = strings.Replace(files["manifest.json"], `"version": "@VERSION@"`, fmt.Sprintf(`"version": %q, "version_text": %q`, version, nextVersion), 1)
	if spoil != nil {
		spoil(files)
	}
	return must[contract.Pointer](t)(f.Promote(t.Context(), must[string](t)(f.Bundle(t.Context(), "pipeline-"+version, files))))
}

// there reports whether something stands at a place of a component.
func (f *Fleet) there(p layout.Place, c contract.Component) bool {
	_, err := os.Lstat(f.State(c).Path(p))
	return err == nil
}

// onePipeline judges that links, record, programs and units of the pipeline are
// of one version, and that it works: it rolls a component.
func (f *Fleet) onePipeline(t *testing.T, version, next string) {
	t.Helper()
	ctx := t.Context()
	state := f.State(layout.Pipeline)
	good, _ := os.Readlink(state.Path(layout.Good))
	a, _, err := record.Load[contract.Applied](state, layout.Applied)
	if filepath.Base(good) != version || f.running(layout.Pipeline) != version || string(a.Version) != version || err != nil || state.Open() {
		t.Errorf("good is %s, current %s, applied %s, %v; a journal: %v", good, f.running(layout.Pipeline), a.Version, err, state.Open())
	}
	m, _, err := record.Manifest(state.Set(contract.Version(version)))
	if err != nil {
		t.Fatal(err)
	}
	installed, _ := filepath.Glob(filepath.Join(f.Root, string(layout.SystemdUnits), "sluice-*"))
	for _, path := range installed {
		if st, err := os.Lstat(path); err != nil || !st.Mode().IsRegular() {
			continue // a drop-in's folder
		}
		data := must[[]byte](t)(os.ReadFile(path))
		if file, ships := m.File(contract.UnitsFolder + filepath.Base(path)); !ships || record.Sum(data) != file.SHA256 {
			t.Errorf("unit file %s is not that of %s", filepath.Base(path), version)
		}
	}
	if failed := strings.TrimSpace(must[string](t)(f.Exec(ctx, "systemctl", "list-units", "--failed", "--no-legend", "--plain", "sluice-*"))); failed != "" && !strings.HasPrefix(failed, "sluice-apply@sluice") {
		t.Errorf("failed: %s", failed)
	}
	must[contract.Result](t)(f.Ended(ctx, must[contract.Pointer](t)(f.Promote(ctx, must[string](t)(f.Bundle(ctx, "edge-"+next, sleeper("edge", next, "100ms"))))), outcome.Applied))
	if f.running("edge") != next {
		t.Errorf("edge runs %s, not %s", f.running("edge"), next)
	}
}

// The pipeline is a component of itself: it is on trial until it has brought a
// request through, and then nothing is left of that.
func TestPipelineUpdatesItself(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	// As hardened machines have it: the self-test runs programs of its own.
	must[string](t)(f.Exec(ctx, "mount", "-o", "remount,noexec", "/tmp"))
	p := f.promotePipeline(t, nextVersion, nil)
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
	must[struct{}](t)(struct{}{}, Until(ctx, "the end of the trial", RollTime, func() (bool, error) {
		return !f.there(layout.Trial, layout.Pipeline) && !f.there(layout.Prior, layout.Pipeline), nil
	}))
	if r, _, err := record.Load[contract.Result](f.State(layout.Pipeline), layout.Result); err != nil || r.Outcome != outcome.Applied {
		t.Errorf("after the trial: %+v, %v", r, err)
	}
	if out := must[string](t)(f.Exec(ctx, "/opt/sluice/sluice/good/bin/apply", "-version")); !strings.Contains(out, nextVersion) {
		t.Errorf("good is %s", out)
	}
	f.onePipeline(t, nextVersion, "1")
	if out := must[string](t)(f.Exec(ctx, "systemctl", "show", "-P", "MainPID", "sluice-fetch.service")); strings.TrimSpace(out) == "0" {
		t.Error("fetch does not run")
	}
	// Heal, with no trial, stops who watches one.
	must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-heal.service"))
	if out, err := f.Exec(ctx, "systemctl", "is-active", "sluice-trial.timer"); err == nil {
		t.Errorf("sluice-trial.timer is %s", out)
	}
}

// A release whose stage, apply or recover exits with an error, hangs, or dies
// by a signal never becomes good. The box ends with the old pipeline, working.
func TestBrokenPipelines(t *testing.T) {
	for _, name := range []string{"stage", "apply", "recover"} {
		t.Run(name, func(t *testing.T) {
			f := enrolled(t, "edge=stable")
			n := 0
			for how, script := range map[string]string{"exits": "exit 1", "dies": "kill -SEGV $$", "hangs": "sleep 600"} {
				n++
				p := f.promotePipeline(t, name+"-"+how, func(files map[string]string) {
					files["bin/"+name] = fmt.Sprintf("#!/bin/sh\n[ \"$1\" = -version ] && { echo %s %s; exit 0; }\n%s\n", name, nextVersion, script)
				})
				r := must[contract.Result](t)(f.Ended(t.Context(), p, outcome.RolledBack))
				if r.Word() != outcome.Gate || !strings.Contains(r.Reason, "self-test") || name != "recover" && !strings.Contains(r.Reason, name) {
					t.Errorf("%s %s: the reason is %s", name, how, r.Reason)
				}
				f.onePipeline(t, "0.1.0", fmt.Sprint(n))
			}
		})
	}
}

// A release that passes its gate and can't bring a request to its end is put
// back by heal, which runs from the pipeline before it: recover is broken as
// well, outside a self-test.
func TestTrialIsPutBack(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	p := f.promotePipeline(t, "broken", func(files map[string]string) {
		files["bin/verify"] = "#!/bin/sh\nexit 1\n"
		files["bin/recover.real"] = files["bin/recover"]
		files["bin/recover"] = "#!/bin/sh\ncase \"$*\" in *-root*) exec \"$(dirname \"$(readlink -f \"$0\")\")/recover.real\" \"$@\" ;; esac\nexit 1\n"
	})
	must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
	state := f.State(layout.Pipeline)
	trial, ok, err := record.Load[contract.Trial](state, layout.Trial)
	if !ok || trial.Version != "broken" || trial.Prior != "0.1.0" {
		t.Fatalf("%+v, %v", trial, err)
	}
	if out := must[string](t)(f.Sluice(ctx, "box", "-json")); !strings.Contains(out, "trial") {
		t.Errorf("`sluice box` says nothing of the trial: %s", out)
	}
	// It is at it for an hour.
	trial.UptimeS = 3601
	must[struct{}](t)(struct{}{}, os.WriteFile(state.Path(layout.Trial), contract.EncodeRecord(trial), fs.FileMode(0o644)))
	must[string](t)(f.Exec(ctx, "systemctl", "start", "sluice-heal.service"))
	r := must[contract.Result](t)(f.Ended(ctx, p, outcome.RolledBack))
	if r.Word() != outcome.Gate || !strings.Contains(r.Reason, "did not bring a request to its end") {
		t.Errorf("the reason is %s", r.Reason)
	}
	f.onePipeline(t, "0.1.0", "1")
	if f.there(layout.Trial, layout.Pipeline) || f.there(layout.Prior, layout.Pipeline) {
		t.Error("it is still on trial")
	}
}

// Units that keep the new pipeline from doing its work are found in use, and
// the way back needs none of them.
func TestBrokenUnitsOfAPipeline(t *testing.T) {
	f := enrolled(t, "edge=stable")
	ctx := t.Context()
	narrow := func(files map[string]string, unit string) {
		at := "units/" + unit
		narrowed := strings.Replace(files[at], "ReadWritePaths=/opt/sluice /etc", "ReadWritePaths=/opt/sluice", 1)
		if narrowed == files[at] {
			t.Fatalf("%s: there is nothing to narrow", unit)
		}
		files[at] = narrowed
	}
	for i, spoil := range []func(map[string]string){
		func(files map[string]string) { narrow(files, "sluice-apply@.service") },
		func(files map[string]string) {
			files["bin/verify"] = "#!/bin/sh\nexit 1\n"
			narrow(files, "sluice-recover@.service")
			files["units/sluice-trial.service"] = strings.Replace(files["units/sluice-trial.service"], "ReadWritePaths=", "ReadWritePaths=/nowhere ", 1)
		},
	} {
		p := f.promotePipeline(t, fmt.Sprint("units-", i), spoil)
		must[contract.Result](t)(f.Ended(ctx, p, outcome.Applied))
		state := f.State(layout.Pipeline)
		if i == 0 { // apply has been told, and failed to show what it can do
			must[struct{}](t)(struct{}{}, Until(ctx, "stage's part of the proof", RollTime, func() (bool, error) {
				trial := record.Optional[contract.Trial](state, layout.Trial)
				if trial == nil {
					return false, fmt.Errorf("there is no trial")
				}
				out, err := f.Exec(ctx, "systemctl", "is-failed", "sluice-apply@sluice.service")
				return trial.Proved && strings.TrimSpace(out) == "failed", err
			}))
		}
		trial, ok, err := record.Load[contract.Trial](state, layout.Trial)
		if !ok {
			t.Fatalf("round %d: it is not on trial: %v", i, err)
		}
		trial.UptimeS = 3601
		must[struct{}](t)(struct{}{}, os.WriteFile(state.Path(layout.Trial), contract.EncodeRecord(trial), fs.FileMode(0o644)))
		_, _ = f.Exec(ctx, "systemctl", "start", "sluice-heal.service")
		must[contract.Result](t)(f.Ended(ctx, p, outcome.RolledBack))
		_, _ = f.Exec(ctx, "systemctl", "start", "sluice-heal.service") // and once more, for what is left
		f.onePipeline(t, "0.1.0", fmt.Sprint(i))
	}
}
