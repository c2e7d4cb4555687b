package apply

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/fault"
	"sluice/internal/graph"
	"sluice/internal/layout"
	"sluice/internal/node"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/systemd"
)

// A roll is one open transaction.
type roll struct {
	*Applier
	journal contract.Journal
	target  node.Build
	good    node.Build // the zero value on a first install
	host    *hostLock
	started time.Time
	down    *downtime

	recovering bool // an earlier life opened the journal
	boot       bool
}

// roll applies a staged build. The caller holds the component's lock.
func (a *Applier) roll(ctx context.Context, _ *durable.Lock, b contract.Build) error {
	r := &roll{Applier: a, started: time.Now(), host: &hostLock{path: a.State.Path(layout.HostLock)}}
	if err := r.prepare(ctx, b); err != nil {
		return a.ends(b, err, r.started)
	}
	if err := r.host.take(ctx); err != nil {
		return err
	}
	defer r.host.release()
	if err := r.refuseForeign(ctx); err != nil {
		return a.ends(b, err, r.started)
	}
	if err := r.adopt(ctx); err != nil {
		return a.ends(b, err, r.started)
	}
	if err := r.keepWayBack(); err != nil {
		return a.ends(b, outcome.Defer(wordOf(err, outcome.IO), "%w", errors.Join(err, r.dropWayBack())), r.started)
	}
	if err := r.open(ctx, b); err != nil {
		return a.ends(b, outcome.Defer(wordOf(err, outcome.IO), "%w", errors.Join(err, r.dropWayBack())), r.started)
	}
	reason, err := r.forward(ctx)
	switch {
	case err == nil:
		return r.recordApplied(ctx, reason)
	case errors.Is(err, errDecided):
		return err
	}
	return r.back(ctx, err)
}

// prepare proves what can be proved before anything is touched.
func (r *roll) prepare(ctx context.Context, b contract.Build) error {
	r.Status("%s %s: checking", r.State.Name, b.Version)
	var err error
	if r.target, err = r.load(b); err != nil {
		return outcome.Defer(outcome.DigestMismatch, "the staged set is damaged: %w", err)
	}
	good, err := r.Applier.good()
	if err != nil {
		return outcome.Defer(outcome.BadGoodSet, "%w", err)
	}
	if good != nil {
		if r.good, err = r.load(*good); err != nil {
			if nerr := r.State.NoteDamage(good.Version, err, contract.At(r.Now())); nerr != nil {
				r.report(nerr)
			}
			return outcome.Defer(outcome.BadGoodSet, "a build that can't be gone back to is not left: %w", err)
		}
		r.journal.Good = good
	}
	if err := node.CheckShipped(r.target.Manifest); err != nil {
		return err
	}
	return r.version(ctx, r.target.Manifest, r.target.Set)
}

// reserveSize is more than the journal, the records and the link of going back
// need together.
const reserveSize = 64 << 10

// keepWayBack puts on the disk what is needed to go back, before anything
// changes: a disk that fills up in the middle still goes back.
func (r *roll) keepWayBack() error {
	if err := r.maker().KeepWayBack(r.good, r.target); err != nil {
		return err
	}
	return r.State.Disk.WriteFile(r.State.Path(layout.Reserve), make([]byte, reserveSize), 0o600)
}

func (r *roll) dropWayBack() error {
	return errors.Join(r.maker().DropWayBack(r.good), r.State.Disk.Remove(r.State.Path(layout.Reserve)))
}

// open writes the journal: from here on there is something to finish or undo.
func (r *roll) open(ctx context.Context, b contract.Build) error {
	r.journal = contract.Journal{Schema: contract.One, ID: newID(), Component: r.State.Name, Target: b, Good: r.journal.Good,
		WasActive: []string{}, StartedAt: contract.At(r.Now()), BootID: bootID()}
	for _, u := range r.good.Manifest.UnitFiles() {
		if got, err := r.Manager.Unit(ctx, u); err == nil && !strings.Contains(u, "@.") && got.Wanted() {
			r.journal.WasActive = append(r.journal.WasActive, u)
		}
	}
	return r.enter(Opening)
}

// newID names a transaction.
func newID() string {
	id := make([]byte, 8)
	_, _ = rand.Read(id) // never fails (crypto/rand)
	return hex.EncodeToString(id)
}

func bootID() string {
	data, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(data))
}

// enter writes a phase down, durably, before it begins.
func (r *roll) enter(p contract.Phase) error {
	r.journal.Phase, r.journal.Node = p, ""
	r.Log.Debug("phase", "component", r.State.Name, "phase", p)
	return r.State.SaveJournal(r.journal)
}

// maker makes the nodes of this transaction.
func (r *roll) maker() node.Maker {
	names, _ := config.Components(r.State.Root)
	return node.Maker{State: r.State, Manager: r.Manager, Components: names, Boot: r.boot, Jobs: map[string]string{}}
}

// note is told of every change before it is made.
func (r *roll) note(_ graph.Direction, label string) error {
	r.Status("%s: %s", r.State.Name, label)
	r.journal.Node = label
	err := r.State.SaveJournal(r.journal)
	if (r.journal.Phase == Reverting || r.journal.Phase == Gated) && !errors.Is(err, fault.ErrDead) {
		return nil // both survive it: what the journal says without it leads there as well
	}
	return err
}

// forward converges to the target: everything up to its gate, the gate, and
// what comes after. The commit is in the gate's node. What failed after it is
// arming: it goes back no more, and comes back as the reason.
func (r *roll) forward(ctx context.Context) (reason string, err error) {
	if err := r.enter(Converging); err != nil {
		return "", outcome.Rollback(wordOf(err, outcome.IO), "%w", err)
	}
	k := r.maker()
	r.down = watchDowntime(r.target.Manifest.Gate.Probes)
	defer r.down.stop()
	k.Restarting = r.down.start
	var gateErr error
	committed := false
	k.Gate = func(ctx context.Context) error {
		if gateErr = r.enter(Gating); gateErr != nil {
			return gateErr
		}
		if gateErr = r.gate(ctx, r.target, r.good, k.Jobs); gateErr != nil {
			return gateErr
		}
		if gateErr = r.enter(Gated); gateErr != nil { // COMMIT: from here on every crash ends on the new build
			// Whether it is on the disk can't be told. Going back now would
			// undo what recovery, which can tell, may go forward with.
			gateErr = fmt.Errorf("%w: %w", gateErr, errDecided)
			return gateErr
		}
		committed = true
		return nil
	}
	err = graph.Err(k.Ledger(r.target, r.good).Fold().Converge(ctx, graph.Walk{Before: r.note, FirstFailure: true}))
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, fault.ErrDead):
		return "", err
	case errors.Is(gateErr, errDecided):
		return "", gateErr
	case committed:
		return armed(err)
	case gateErr != nil:
		var judged *outcome.Error
		if !errors.As(gateErr, &judged) {
			gateErr = outcome.Rollback(wordOf(gateErr, outcome.Gate), "%w", gateErr)
		}
		return "", gateErr
	}
	return "", outcome.Rollback(wordOf(err, outcome.Converge), "%w", err)
}

// errDecided goes with what failed when it was no more for this run to choose
// between forward and back.
var errDecided = errors.New("the journal stays, and says where recovery goes")

// armed says what became of arming, which goes back no more: what failed is a
// reason to be recorded with the build that stays. But a disk or a manager that
// was not up to it is no end: the journal stays, and recovery goes forward again.
func armed(err error) (reason string, _ error) {
	if err == nil {
		return "", nil
	}
	if wordOf(err, outcome.Arm) != outcome.Arm {
		return "", fmt.Errorf("arming: %w: %w", err, errDecided)
	}
	return fmt.Sprintf("%s: %s", outcome.Arm, err), nil
}

// wordOf is the word of an error: a full or broken disk says nothing about
// the build.
func wordOf(err error, otherwise outcome.Word) outcome.Word {
	if errors.Is(err, systemd.ErrAway) {
		return outcome.Interrupted
	}
	return record.DiskWord(err, otherwise)
}

// recordApplied is the order that makes a build good (I1): the authority, the
// link that follows it, what is told, what is in nobody's way any more, and the
// journal last.
func (r *roll) recordApplied(ctx context.Context, reason string) error {
	b := r.journal.Target
	if err := r.maker().Settle(); err != nil {
		return err
	}
	// Before good moves: from then on root's programs are the new ones.
	if err := r.beginTrial(ctx); err != nil {
		return err
	}
	if err := r.State.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: b, At: contract.At(r.Now())}); err != nil {
		return err
	}
	if err := r.State.Disk.Symlink(filepath.Join("sets", string(b.Version)), r.State.Path(layout.Good)); err != nil {
		return err
	}
	down := time.Duration(-1)
	if r.down != nil {
		down = r.down.took()
	}
	if err := r.conclude(outcome.Applied, reason, down); err != nil {
		return err
	}
	return r.close(b)
}

// attemptNode is what the journal names in phase reverted: the result that is
// about to be written. No clock tells whether it has been.
func attemptNode(n int) string { return fmt.Sprintf("result:attempt-%d", n) }

// conclude writes the result, unless this same transaction has written it in
// an earlier life: it is one attempt.
func (r *roll) conclude(o outcome.Outcome, reason string, down time.Duration) error {
	last := record.Optional[contract.Result](r.State, layout.Result)
	if r.recovering && last != nil && last.Tuple.Equal(r.journal.Target.Tuple) && last.Outcome == o &&
		(r.journal.Phase != Reverted || r.journal.Node == attemptNode(last.Attempt)) {
		return nil
	}
	return r.finish(r.journal.Target.Tuple, o, reason, r.started, down)
}

// close prunes, and removes the journal: there is nothing left to finish.
func (r *roll) close(now contract.Build) error {
	keep := []contract.Version{now.Version, r.journal.Target.Version}
	if r.journal.Good != nil {
		keep = append(keep, r.journal.Good.Version)
	}
	if staged, ok, err := record.Load[contract.Staged](r.State, layout.StagedRecord); ok && err == nil {
		keep = append(keep, staged.Version)
	}
	trial := record.Optional[contract.Trial](r.State, layout.Trial)
	if trial != nil && trial.Version == r.journal.Target.Version && trial.Version != now.Version { // it did not prove itself
		if err := r.State.EndTrial(); err != nil {
			return err
		}
	} else if trial != nil {
		keep = append(keep, trial.Prior)
	}
	if err := r.State.Prune(keep...); err != nil {
		r.Log.Warn(fmt.Sprintf("pruning sets: %s, ignoring", err), "component", r.State.Name)
	}
	if err := r.dropWayBack(); err != nil {
		r.Log.Warn(fmt.Sprintf("removing what was kept for going back: %s, ignoring", err), "component", r.State.Name)
	}
	return r.State.Disk.Remove(r.State.Path(layout.Journal))
}

// back puts the good build back, and records why the new one was left.
func (r *roll) back(ctx context.Context, why error) error {
	if ctx.Err() != nil {
		// Told to stop, at shutdown or by hand. The journal says what to do.
		return fmt.Errorf("stopped in the middle of a roll, recover puts the good build back: %w", ctx.Err())
	}
	if errors.Is(why, fault.ErrDead) {
		return why
	}
	r.journal.Reason = contract.Clip(why.Error())
	return r.revert(ctx)
}

// revert converges to the good build. Its gate may fail once.
func (r *roll) revert(ctx context.Context) error {
	// The room that was kept for this.
	if err := r.State.Disk.Remove(r.State.Path(layout.Reserve)); err != nil {
		r.report(fmt.Errorf("%w, ignoring", err))
	}
	if err := r.enter(Reverting); err != nil {
		r.report(fmt.Errorf("%w, ignoring: the earlier phase says back as well", err))
	}
	r.Log.Warn("going back", "component", r.State.Name, "from", r.journal.Target.Version, "reason", r.journal.Reason)
	k := r.maker()
	k.WasActive = r.journal.WasActive
	var gateErr error
	k.Gate = func(ctx context.Context) error {
		if r.boot {
			return nil // what is to be judged has not been started yet
		}
		if gateErr = r.gate(ctx, r.good, r.target, k.Jobs); gateErr != nil && ctx.Err() == nil {
			for _, u := range node.Changed(r.good, r.target) {
				if err := k.Restart(ctx, u); err != nil {
					return err
				}
			}
			gateErr = r.gate(ctx, r.good, r.target, k.Jobs)
		}
		if errors.Is(gateErr, systemd.ErrAway) || errors.Is(gateErr, fault.ErrDead) {
			return gateErr // it was not judged: the journal stays
		}
		return nil // that the good build does not pass either keeps nothing from being armed
	}
	reports := k.Ledger(r.good, r.target).Fold().Converge(ctx, graph.Walk{Before: r.note})
	if ctx.Err() != nil {
		return fmt.Errorf("stopped while going back, recover goes on: %w", ctx.Err())
	}
	if err := graph.Err(reports); err != nil {
		return fmt.Errorf("going back from %s: %w: the journal stays, run `%s`", r.journal.Target.Version, err, r.State.RecoverCommand())
	}
	if err := k.Settle(); err != nil {
		return fmt.Errorf("going back from %s: %w: the journal stays", r.journal.Target.Version, err)
	}
	if err := r.goodIsApplied(); err != nil {
		return err
	}
	if gateErr != nil {
		r.journal.Reason = contract.Clip(fmt.Sprintf("%s; and the good build does not pass its gate either: %s", r.journal.Reason, gateErr))
		if err := r.conclude(outcome.RollbackFailed, r.journal.Reason, -1); err != nil {
			return err
		}
		return errors.Join(&outcome.Error{Outcome: outcome.RollbackFailed, Word: outcome.Gate, Err: errors.New(r.journal.Reason)}, r.close(r.old()))
	}
	r.journal.Phase, r.journal.Node = Reverted, attemptNode(r.State.NextAttempt(r.journal.Target.Tuple, outcome.RolledBack))
	if err := r.State.SaveJournal(r.journal); err != nil {
		return err
	}
	return r.recordRolledBack()
}

// goodIsApplied makes the records say what the journal says is good. They do
// already, but for a self-update that did not prove itself in use.
func (r *roll) goodIsApplied() error {
	if r.journal.Good == nil || r.journal.Good.Version == contract.BeforeSluice {
		return nil // nothing was ever good here
	}
	b := *r.journal.Good
	if a := record.Optional[contract.Applied](r.State, layout.Applied); a == nil || !a.Same(b) {
		if err := r.State.Save(layout.Applied, contract.Applied{Schema: contract.One, Build: b, At: contract.At(r.Now())}); err != nil {
			return err
		}
	}
	return r.State.Disk.Symlink(filepath.Join("sets", string(b.Version)), r.State.Path(layout.Good))
}

// old is the build that runs after going back; the zero value for none.
func (r *roll) old() contract.Build {
	if r.journal.Good == nil {
		return contract.Build{}
	}
	return *r.journal.Good
}

// recordRolledBack says why the new build was left.
func (r *roll) recordRolledBack() error {
	if err := r.conclude(outcome.RolledBack, r.journal.Reason, -1); err != nil {
		return err
	}
	word, text, _ := strings.Cut(r.journal.Reason, ": ")
	return errors.Join(&outcome.Error{Outcome: outcome.RolledBack, Word: outcome.Word(word), Err: errors.New(text)}, r.close(r.old()))
}

// hostLock is the one conversation with the service manager. It is let go of
// while a gate waits: a component that hangs in its soak holds up nobody else.
type hostLock struct {
	path string
	lock *durable.Lock
}

func (h *hostLock) take(ctx context.Context) (err error) {
	h.lock, err = durable.Acquire(ctx, h.path)
	return err
}

func (h *hostLock) release() {
	h.lock.Release()
	h.lock = nil
}

// version runs a build's version command, which must print its version as a
// whole word.
func (r *roll) version(ctx context.Context, m contract.Manifest, dir string) error {
	if len(m.VersionCommand) == 0 {
		return nil
	}
	want := m.VersionText
	if want == "" {
		want = string(m.Version)
	}
	argv := append([]string{filepath.Join(dir, filepath.FromSlash(m.VersionCommand[0]))}, m.VersionCommand[1:]...)
	out, err := r.Manager.Run(ctx, systemd.Command{Argv: argv, Profile: systemd.Isolated, Timeout: versionTime, Output: versionOutput})
	if err != nil {
		return outcome.Defer(outcome.IO, "%w", err)
	}
	if out.Ended != "" || out.Status != 0 {
		return outcome.Refuse(outcome.VersionLie, "%q: exit status %d%s", strings.Join(m.VersionCommand, " "), out.Status, andEnded(out.Ended))
	}
	if !hasWord(out.Text, want) {
		return outcome.Refuse(outcome.VersionLie, "%q does not print %q: %q", strings.Join(m.VersionCommand, " "), want, contract.Clip(out.Text))
	}
	return nil
}

func andEnded(s string) string {
	if s == "" {
		return ""
	}
	return ", " + s
}

const (
	versionTime   = 30 * time.Second
	versionOutput = 4 << 10 // bytes of both streams that are looked at
)

// hasWord reports whether text has a word that is not part of a longer
// version: 1.2 is not in 1.2.3.
func hasWord(text, word string) bool {
	for at := 0; ; {
		i := strings.Index(text[at:], word)
		if i < 0 {
			return false
		}
		start, end := at+i, at+i+len(word)
		if (start == 0 || !inWord(text[start-1])) && (end == len(text) || !inWord(text[end]) || text[end] == '.' && (end+1 == len(text) || !inWord(text[end+1]))) {
			return true
		}
		at = start + 1
	}
}

func inWord(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || strings.IndexByte("._-+~", c) >= 0
}
