// Package enroll makes a machine a box: trust, store, channels, users, and the
// component sluice as its first set, through the same transaction as any
// other. It may be cut and repeated; run again it adds what is missing.
package enroll

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sluice/internal/apply"
	"sluice/internal/bundle"
	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/durable"
	"sluice/internal/intake"
	"sluice/internal/layout"
	"sluice/internal/outcome"
	"sluice/internal/program"
	"sluice/internal/record"
	"sluice/internal/stage"
	"sluice/internal/store"
	"sluice/internal/systemd"
	"sluice/internal/trust"
)

// An Enroller enrolls a box.
type Enroller struct {
	Root       layout.Root
	Disk       *durable.Disk
	Manager    systemd.Manager
	Deployment contract.Deployment
	Label      string            // overrules the deployment's; the host's name if both are empty
	Prove      map[string]string // what it proves itself to the store with: the name in identity/ → the file that is copied there
	Log        *slog.Logger
	Status     func(format string, args ...any)
	Progress   func(done, total int64)

	first trust.Set // the deployment's trust document
}

// Run enrolls the box.
func (e *Enroller) Run(ctx context.Context) error {
	if e.Root.Live() && os.Geteuid() != 0 {
		return outcome.Config("enrolling a box changes all of it: run it as root")
	}
	if _, ok := e.Deployment.Components[layout.Pipeline]; !ok {
		return outcome.Config("the deployment does not name a channel of component %s: without it a box has no programs", layout.Pipeline)
	}
	first, err := trust.First(e.Deployment.Trust.Encode())
	if err != nil {
		return fmt.Errorf("the deployment's trust document: %w", err)
	}
	e.first = first
	if err := e.owners(); err != nil {
		return err
	}
	box, err := config.LoadBox(e.Root)
	if err != nil {
		return err
	}
	s, err := store.OpenAs(box.Store, store.IdentityIn(e.Root.Path(layout.Identity, "")))
	if err != nil {
		return err
	}
	if err := e.knock(ctx, s); err != nil {
		return err
	}
	if err := e.component(ctx, s, layout.Pipeline); err != nil {
		return err
	}
	if err := e.pipeline(ctx, s, box); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(e.Deployment.Components)) {
		if name == layout.Pipeline {
			continue
		}
		if err := e.component(ctx, s, name); err != nil {
			return err
		}
		if err := e.folders(name); err != nil {
			return err
		}
		// Last: fetch follows a component once its .conf is there.
		if err := e.conf(name); err != nil {
			return err
		}
		if err := e.arm(ctx, name); err != nil {
			return err
		}
		e.Log.Info("follows", "component", name, "channel", e.Deployment.Components[name])
	}
	return nil
}

// owners writes what the owner of the box decides, where it is not there yet.
func (e *Enroller) owners() error {
	for _, p := range []layout.Place{layout.Etc, layout.Identity, layout.Opt} {
		if err := e.folder(p, ""); err != nil {
			return err
		}
	}
	for name, file := range e.Prove {
		data, err := record.ReadFile(file, contract.MaxRecord)
		if err != nil {
			return outcome.Config("%w", err)
		}
		if err := e.Disk.WriteFile(filepath.Join(e.Root.Path(layout.Identity, ""), name), data, 0o600); err != nil {
			return err
		}
	}
	box := config.Box{Label: cmp.Or(e.Label, string(e.Deployment.Label)), Poll: config.DefaultPoll}
	if err := box.Check(); err != nil {
		return outcome.Config("%w: give one with -label", err)
	}
	text := fmt.Sprintf("# What this box follows. Keys: see sluice-fetch(8).\nSLUICE_STORE=%s\nSLUICE_LABEL=%s\n", e.Deployment.Store, box.Label)
	if e.Deployment.Fleet != "" {
		text += "SLUICE_FLEET=" + e.Deployment.Fleet + "\n"
	}
	return e.once(e.Root.Path(layout.BoxConf, ""), text)
}

// How often a door is knocked at that does not know the box: one that has just been
// told of it knows it a moment later.
const (
	knocks     = 5
	knockPause = time.Second
)

// knock finds out that this box is let in, before anything else is done.
func (e *Enroller) knock(ctx context.Context, s store.Store) error {
	for n := 1; ; n++ {
		_, err := s.Get(ctx, contract.SerialKey, contract.MaxRecord, "")
		if !errors.Is(err, store.ErrDenied) {
			return nil // whatever else is wrong shows when it matters
		}
		if n == knocks {
			return outcome.Config("%w: is this box's token, certificate or credential the right one?", err)
		}
		select {
		case <-time.After(knockPause):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// once writes a file of the owner's, unless he has it already.
func (e *Enroller) once(path, text string) error {
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return e.Disk.WriteFile(path, []byte(text), 0o644)
}

func (e *Enroller) conf(name contract.Component) error {
	return e.once(e.Root.Path(layout.ComponentConf, string(name)), fmt.Sprintf("SLUICE_CHANNEL=%s\n", e.Deployment.Components[name]))
}

func (e *Enroller) folder(p layout.Place, component contract.Component) error {
	row := layout.RowOf(p)
	path := e.Root.Path(p, string(component))
	if err := e.Disk.Mkdir(path, row.FileMode()); err != nil {
		return err
	}
	// The owner of a folder above may put a link in its place at any time: what
	// is given away is the folder that was opened, without following one.
	parent, err := intake.OpenFolder(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	folder, err := parent.Sub(filepath.Base(path))
	if err != nil {
		return err
	}
	defer folder.Close()
	uid, gid, err := e.Root.Owner(row)
	if err != nil {
		return err
	}
	return folder.Own(uid, gid, row.FileMode())
}

// component makes root's folders of a component, its trust and its first
// watermark.
func (e *Enroller) component(ctx context.Context, s store.Store, name contract.Component) error {
	for _, p := range []layout.Place{layout.OptOf, layout.Trust, layout.Sets, layout.StagedMark} {
		if err := e.folder(p, name); err != nil {
			return err
		}
	}
	state := record.State{Root: e.Root, Disk: e.Disk, Name: name}
	if err := e.trust(ctx, s, state); err != nil {
		return err
	}
	water, known := e.Deployment.Watermarks[name]
	if _, had, err := record.Load[contract.Seen](state, layout.Seen); had || err != nil || !known {
		return err
	}
	return state.Save(layout.Seen, contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{e.Deployment.Components[name]: water}})
}

// folders makes the unprivileged side of a component.
func (e *Enroller) folders(name contract.Component) error {
	for _, row := range layout.Folders() {
		if strings.HasPrefix(string(row.Place), string(layout.Data)) {
			if err := e.folder(row.Place, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// pipeline installs the component sluice, if the box has none: its own
// programs do the rest.
func (e *Enroller) pipeline(ctx context.Context, s store.Store, box config.Box) error {
	if err := e.conf(layout.Pipeline); err != nil {
		return err
	}
	state := record.State{Root: e.Root, Disk: e.Disk, Name: layout.Pipeline}
	if _, applied, err := record.Load[contract.Applied](state, layout.Applied); applied || err != nil {
		return err
	}
	conf, err := config.LoadComponent(e.Root, layout.Pipeline)
	if err != nil {
		return err
	}
	o, err := store.Pointer(ctx, s, contract.Spoken, layout.Pipeline, conf.Channel)
	if store.IsNotExist(err) {
		return outcome.Config("%s has no pointer of %s on channel %s: promote component %s first", s, layout.Pipeline, conf.Channel, layout.Pipeline)
	}
	if err != nil {
		return outcome.Defer(outcome.Store, "%w", err)
	}
	own, err := state.Trust()
	if err != nil {
		return err
	}
	set, err := e.walk(ctx, s, own, func(next trust.Set, data []byte) error {
		return e.Disk.WriteFile(e.Root.TrustFile(string(state.Name), next.Number), data, 0o644)
	})
	if err != nil {
		return err
	}
	p, err := set.Pointer(o.Data, layout.Pipeline, conf.Channel)
	if err != nil {
		return err
	}
	b, err := e.stage(ctx, s, state, set, p)
	if err != nil {
		return err
	}
	if err := e.users(ctx, state.Set(b.Version)); err != nil {
		return err
	}
	if err := e.folders(layout.Pipeline); err != nil {
		return err
	}
	if err := e.bucket(box); err != nil {
		return err
	}
	// Again: whoever enrolls wants it tried, however an earlier try ended.
	a := &apply.Applier{State: state, Manager: e.Manager, Log: e.Log, Status: e.Status, Now: time.Now, Again: true}
	if err := a.Run(ctx, ctx); err != nil {
		return err
	}
	if applied, _, err := record.Load[contract.Applied](state, layout.Applied); err != nil || !applied.Same(b) {
		return errors.Join(fmt.Errorf("component %s was not applied: is this box held?", layout.Pipeline), err)
	}
	return nil
}

// trust gives a component trust, where it has none that can be used: that of the
// deployment, and from there along the store's chain. A box never goes back: the
// chain must lead as far as any component of this box has come.
func (e *Enroller) trust(ctx context.Context, s store.Store, state record.State) error {
	_, err := state.Trust()
	if err == nil || contract.IsUpgrade(err) {
		return err
	}
	floor := state.TrustNumber()
	names, err := record.Components(e.Root)
	if err != nil {
		return err
	}
	for _, name := range names {
		floor = max(floor, record.State{Root: e.Root, Name: name}.TrustNumber())
	}
	documents := map[int][]byte{e.first.Number: e.Deployment.Trust.Encode()}
	set, err := e.walk(ctx, s, e.first, func(next trust.Set, data []byte) error {
		documents[next.Number] = data
		return nil
	})
	if err != nil {
		return err
	}
	if set.Number < floor {
		return outcome.Config("this box has accepted trust document %d, and the deployment and %s lead only to %d: ask its operator for a new deployment file", floor, s, set.Number)
	}
	if err := e.Disk.RemoveTree(state.Path(layout.Trust)); err != nil {
		return err
	}
	if err := e.folder(layout.Trust, state.Name); err != nil {
		return err
	}
	for _, n := range slices.Sorted(maps.Keys(documents)) {
		if err := e.Disk.WriteFile(e.Root.TrustFile(string(state.Name), n), documents[n], 0o644); err != nil {
			return err
		}
	}
	return nil
}

// walk follows the trust documents of the store, as stage would.
func (e *Enroller) walk(ctx context.Context, s store.Store, from trust.Set, step func(next trust.Set, data []byte) error) (trust.Set, error) {
	return from.Walk(func(n int) ([]byte, error) {
		data, err := store.TrustDocument(ctx, s, n)
		if err != nil && !store.IsNotExist(err) {
			err = outcome.Defer(outcome.Store, "%w", err)
		}
		return data, err
	}, step)
}

// stage brings the pipeline's bundle to its set, as fetch, verify and stage
// would.
func (e *Enroller) stage(ctx context.Context, s store.Store, state record.State, set trust.Set, p trust.Pointer) (contract.Build, error) {
	artifact, ok := p.Payload.Current.Artifacts[contract.Here()]
	b := contract.Build{Tuple: p.Tuple(), ManifestSHA256: artifact.ManifestSHA256}
	if !ok {
		return b, outcome.Refuse(outcome.NoArtifact, "%s %s has nothing for platform %s", layout.Pipeline, p.Payload.Current.Version, contract.Here())
	}
	seen, had, err := record.Load[contract.Seen](state, layout.Seen)
	if err != nil {
		return b, err
	}
	if !had {
		seen = contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{}}
	}
	seen = set.Counting(seen)
	now := decide.Now(time.Now(), program.Built(), append(set.Times(seen), p.PromotedAt, p.Payload.RefreshedAt)...)
	for _, err := range []error{set.Expired(now), p.Expired(now)} {
		if err != nil {
			return b, err
		}
	}
	if water := seen.Channels[p.Channel].PromotedAt; p.PromotedAt.Before(water.Time) {
		return b, outcome.Refuse(outcome.Replay, "the store's promote of %s is older than %s, which the deployment knows", p.PromotedAt, water)
	}
	if _, err := record.CheckSet(state.Set(b.Version), b.ManifestSHA256); err != nil {
		if err := e.fetch(ctx, s, state, artifact, b); err != nil {
			return b, err
		}
	}
	seen.Channels[p.Channel] = p.Water()
	versions := contract.Versions{Schema: contract.One, Versions: contract.VersionLog{{Version: b.Version, ManifestSHA256: b.ManifestSHA256}}}
	return b, errors.Join(state.Save(layout.Seen, seen), state.Save(layout.Versions, versions), state.Save(layout.StagedRecord, contract.Staged{Schema: contract.One, Build: b}))
}

func (e *Enroller) fetch(ctx context.Context, s store.Store, state record.State, a contract.Artifact, b contract.Build) error {
	scratch, err := os.MkdirTemp("", "sluice-enroll-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	file, err := os.Create(filepath.Join(scratch, layout.ObjectName))
	if err != nil {
		return err
	}
	defer file.Close()
	body, err := s.Open(ctx, a.Key, 0)
	if err != nil {
		return outcome.Defer(outcome.Store, "%w", err)
	}
	defer body.Close()
	if err := e.download(body, file, a); err != nil {
		return err
	}
	tree := filepath.Join(scratch, "tree")
	if err := os.Mkdir(tree, 0o700); err != nil {
		return err
	}
	if _, err := bundle.Unpack(e.Disk, file, tree, a, state.Name, b.Version); err != nil {
		return err
	}
	from, err := intake.OpenFolder(scratch)
	if err != nil {
		return err
	}
	defer from.Close()
	partial := e.Root.PartialSet(string(state.Name), string(b.Version))
	if _, err := stage.Copy(e.Disk, from, "tree", os.Geteuid(), b, partial, e.Status); err != nil {
		return errors.Join(err, e.Disk.RemoveTree(partial))
	}
	return errors.Join(e.Disk.RemoveTree(state.Set(b.Version)), e.Disk.Rename(partial, state.Set(b.Version)))
}

func (e *Enroller) download(body *store.Stream, file *os.File, a contract.Artifact) error {
	meter := &meter{tell: func(n int64) { e.Progress(n, a.Size) }}
	if _, err := io.Copy(io.MultiWriter(file, meter), io.LimitReader(body, a.Size+1)); err != nil {
		return outcome.Defer(outcome.Store, "%w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	digest, size, err := record.HashFile(file)
	if err != nil {
		return err
	}
	if size != a.Size || digest != a.SHA256 {
		return outcome.Refuse(outcome.DigestMismatch, "%q in the store is not the object that was signed", a.Key)
	}
	_, err = file.Seek(0, io.SeekStart)
	return err
}

type meter struct {
	n    int64
	tell func(int64)
}

func (m *meter) Write(p []byte) (int, error) {
	m.n += int64(len(p))
	m.tell(m.n)
	return len(p), nil
}

// usersTime is how long systemd-sysusers may take.
const usersTime = time.Minute

// users makes the users of the pipeline, whom its folders belong to. The
// transaction makes them again, with its own files in place.
func (e *Enroller) users(ctx context.Context, set string) error {
	file := filepath.Join(set, contract.SysusersFolder, "sluice.conf")
	out, err := e.Manager.Run(ctx, systemd.Command{Argv: []string{"systemd-sysusers", file}, Profile: systemd.Tool, Timeout: usersTime, Output: contract.MaxReason})
	if errors.Is(err, exec.ErrNotFound) {
		return outcome.Config("this machine has no systemd-sysusers: Sluice needs systemd: %w", err)
	}
	if err != nil {
		return err
	}
	if out.Status != 0 {
		return fmt.Errorf("making the users of Sluice: %s", out.Text)
	}
	return nil
}

// bucket lets fetch publish into a folder bucket on this machine.
func (e *Enroller) bucket(box config.Box) error {
	folder, ok := strings.CutPrefix(box.Store, "file://")
	if !ok || !e.Root.Live() {
		return nil
	}
	status := filepath.Join(folder, filepath.FromSlash(contract.StatusPrefix))
	if err := e.Disk.Mkdir(status, 0o755); err != nil {
		return err
	}
	uid, err := e.Root.UID(layout.UserFetch)
	if err != nil {
		return err
	}
	if err := os.Chown(status, uid, -1); err != nil {
		return err
	}
	dropin := e.Root.Join(filepath.Join(string(layout.SystemdUnits), "sluice-fetch.service.d"))
	if err := e.Disk.Mkdir(dropin, 0o755); err != nil {
		return err
	}
	return e.once(filepath.Join(dropin, "store.conf"), fmt.Sprintf("# The heartbeat goes into the folder that is this box's store.\n[Service]\nReadWritePaths=-%s\n", filepath.Join(folder, "status")))
}

// arm arms the instances of a component that was added after the pipeline was
// installed.
func (e *Enroller) arm(ctx context.Context, name contract.Component) error {
	units := []string{}
	for _, step := range []string{"verify", "stage", "apply"} {
		units = append(units, fmt.Sprintf("sluice-%s@%s.path", step, name))
	}
	if _, err := e.Manager.Enable(ctx, units); err != nil {
		return err
	}
	if err := e.Manager.Reload(ctx); err != nil {
		return err
	}
	for _, u := range units {
		job, err := e.Manager.Start(ctx, u)
		if err := systemd.Done("starting", u, job, err); err != nil {
			return err
		}
	}
	return nil
}
