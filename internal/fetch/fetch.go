// Package fetch is the only part of a box that talks to the network all day.
// It reads pointers, downloads what they name, and tells verify by a marker;
// it publishes what root recorded.
//
// It runs as a user that can write incoming/ and nothing else. Taken over, it
// can make the box install exactly what the operator signed for this box's
// channel, or nothing. It decides nothing that root does not decide again.
package fetch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/decide"
	"sluice/internal/durable"
	"sluice/internal/layout"
	"sluice/internal/marker"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
	"sluice/internal/trust"
)

// How often things happen that nobody asked for.
const (
	fullPass     = time.Hour        // everything is read again
	raiseAgain   = time.Minute      // while root has not answered
	noteInterval = time.Minute      // what has been waited is written down
	requestLimit = 60 * time.Second // one small request
)

// A Fetcher follows the components of a box.
type Fetcher struct {
	Root   layout.Root
	Disk   *durable.Disk
	Store  store.Store
	Box    config.Box
	Only   contract.Component // by hand: look at this component alone; "" for all
	Log    *slog.Logger
	Status func(format string, args ...any)
	Beat   func() // tells a watchdog that all is well

	follows map[contract.Component]*follow
	heart   heart
	serial  string         // ETag
	chain   map[int][]byte // trust documents of the store, as the last fresh pass read them; nil: not there
}

// A follow is what is known of one component between two looks.
type follow struct {
	state   record.State
	raw     []byte           // the envelope that was read last; nil: to be read
	channel contract.Channel // that it was read for
	pointer *trust.Pointer
	set     trust.Set      // that vouched for it: root's, or one that was walked to from there
	steps   map[int][]byte // the documents of that walk
	bad     string         // why the pointer does not count
	said    string         // the last complaint: each is logged once

	pending  contract.Pending
	since    time.Time // until when pending.WaitedMS counts
	noted    time.Time
	raised   time.Time     // zero: nothing outstanding
	retry    time.Time     // when what was deferred, here or at root, is tried again
	failures int           // downloads in a row that did not succeed
	answer   contract.Time // of the last result that was looked at
	world    string        // what a deferred promote may be waiting for
}

// Once looks at every component, reading all pointers anew, and publishes.
func (f *Fetcher) Once(ctx context.Context) error { return f.pass(ctx, true) }

// pass looks at every component. fresh: read the pointers anew.
func (f *Fetcher) pass(ctx context.Context, fresh bool) error {
	names, err := config.Components(f.Root)
	if err != nil {
		return err
	}
	followed := names
	if f.Only != "" {
		followed = []contract.Component{f.Only}
	}
	if f.follows == nil {
		f.follows = map[contract.Component]*follow{}
	}
	if fresh || f.chain == nil {
		f.chain = map[int][]byte{}
	}
	var errs []error
	for _, name := range followed {
		w := f.follows[name]
		if w == nil {
			w = &follow{state: record.State{Root: f.Root, Disk: f.Disk, Name: name}}
			w.pending, _, _ = record.Load[contract.Pending](w.state, layout.Pending) // unreadable: waited for nothing yet
			f.follows[name] = w
		}
		err := f.look(ctx, w, fresh || w.raw == nil)
		if err != nil {
			errs = append(errs, fmt.Errorf("component %s: %w", name, err))
			f.complain(w, err)
		} else if w.bad == "" {
			w.said = ""
		}
	}
	for name := range f.follows {
		if !slices.Contains(names, name) {
			delete(f.follows, name)
		}
	}
	return errors.Join(append(errs, f.publish(ctx, names))...)
}

// complain logs an error once, until another one takes its place.
func (f *Fetcher) complain(w *follow, err error) {
	if s := because(err); s != w.said {
		w.said = s
		f.Log.Warn(s, "component", w.state.Name)
	}
}

// look is one look at one component.
func (f *Fetcher) look(ctx context.Context, w *follow, fresh bool) error {
	if config.Held(f.Root) {
		w.raw = nil // what the bell said meanwhile is heard afterwards
		return nil
	}
	conf, err := config.LoadComponent(f.Root, w.state.Name)
	if err != nil {
		w.raw = nil
		return err
	}
	if w.channel != conf.Channel {
		fresh, w.pointer, w.channel = true, nil, conf.Channel
	}
	if fresh {
		if err := f.read(ctx, w, conf); err != nil {
			return err
		}
	}
	var p *contract.Pointer
	if w.pointer != nil {
		p = &w.pointer.Pointer
	}
	in := w.state.Decision(p, w.set, conf.Digest)
	action, why := decide.Pointer(in)
	switch action {
	case decide.Noop, decide.Update:
		return f.pursue(ctx, w, conf, action, in)
	case decide.Wait:
		return f.wait(w)
	}
	f.Log.Debug("nothing to do", "component", w.state.Name, "why", why)
	return f.settle(w)
}

// wait waits for root, which is at work. If it was cut off and nothing put it
// right, a marker once a minute drives it again from the front.
func (f *Fetcher) wait(w *follow) error {
	switch now := time.Now(); {
	case w.raised.IsZero():
		w.raised = now
	case w.pending.Asked && now.Sub(w.raised) >= raiseAgain:
		return f.ask(w, now)
	}
	return nil
}

// read reads the pointer of root's channel.
func (f *Fetcher) read(ctx context.Context, w *follow, conf config.Component) error {
	f.Beat()
	limited, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	o, err := store.Pointer(limited, f.Store, contract.Spoken, w.state.Name, conf.Channel)
	if store.IsNotExist(err) {
		w.raw, w.pointer, w.bad = []byte{}, nil, ""
		return nil
	}
	if err != nil {
		w.raw = nil
		return err
	}
	own, err := w.state.Trust()
	if err != nil {
		w.raw = nil
		return err
	}
	w.steps = map[int][]byte{}
	w.set, err = own.Walk(func(n int) ([]byte, error) { return f.step(ctx, n) }, func(next trust.Set, data []byte) error {
		w.steps[next.Number] = data
		return nil
	})
	if errors.Is(err, errStep) {
		w.raw = nil
		return err
	}
	var p trust.Pointer
	if err == nil {
		if p, err = w.set.Pointer(o.Data, w.state.Name, conf.Channel); err != nil {
			err = f.missing(ctx, w.set.Number, err)
		}
	}
	if err != nil {
		w.raw, w.pointer, w.bad = o.Data, nil, because(err)
		return err
	}
	w.raw, w.pointer, w.bad = o.Data, &p, ""
	return nil
}

// errStep is a trust document that could not be asked for.
var errStep = errors.New("asking for the trust documents")

// step reads trust document n, once a pass: every component walks one chain.
func (f *Fetcher) step(ctx context.Context, n int) ([]byte, error) {
	data, known := f.chain[n]
	if !known {
		f.Beat()
		ctx, cancel := context.WithTimeout(ctx, requestLimit)
		defer cancel()
		var err error
		if data, err = store.TrustDocument(ctx, f.Store, n); err != nil && !store.IsNotExist(err) {
			return nil, fmt.Errorf("%w: %w", errStep, err)
		}
		f.chain[n] = data
	}
	if data == nil {
		return nil, fs.ErrNotExist
	}
	return data, nil
}

// gapProbe is how far after a chain's end a document is looked for that it should
// have led to. A box may not list the store.
const gapProbe = 16

// missing says, of a pointer that the end of the chain does not vouch for, whether
// it is the chain that lacks a link.
func (f *Fetcher) missing(ctx context.Context, end int, bad error) error {
	var e *outcome.Error
	if !errors.As(bad, &e) || e.Word != outcome.BadSignature {
		return bad
	}
	for n := end + 2; n <= end+gapProbe; n++ {
		if _, err := f.step(ctx, n); err == nil {
			return fmt.Errorf("%w; the store has trust document %d and not %d, which leads to it: its operator has to put it back", bad, n, end+1)
		}
	}
	return bad
}

// settle tidies up after a promote has ended: what was downloaded goes, and
// verify is told to do the same.
func (f *Fetcher) settle(w *follow) error {
	w.raised, w.retry, w.answer = time.Time{}, time.Time{}, contract.Time{}
	if w.pending.Version == "" {
		return nil
	}
	if err := f.clean(w, ""); err != nil {
		return err
	}
	w.pending = contract.Pending{Schema: contract.One, Downloaded: w.pending.Downloaded}
	if err := f.Disk.Remove(w.state.Path(layout.Pending)); err != nil {
		return err
	}
	return marker.Produce(f.Root, layout.FetchedMark, layout.Fetched, string(w.state.Name))
}

// clean removes downloads of all versions but one.
func (f *Fetcher) clean(w *follow, keep contract.Version) error {
	marker.Tidy(w.state.Path(layout.Fetched))
	entries, err := os.ReadDir(w.state.Path(layout.Incoming))
	if err != nil {
		return err
	}
	own, terr := w.state.Trust()
	for _, e := range entries {
		if n, step := layout.StepNumber(e.Name()); step && terr == nil && (n <= own.Number || w.steps[n] == nil) {
			if err := f.Disk.RemoveTree(filepath.Join(w.state.Path(layout.Incoming), e.Name())); err != nil {
				return err
			}
			continue
		}
		if e.IsDir() && e.Name() != "mark" && e.Name() != string(keep) {
			if err := f.Disk.RemoveTree(filepath.Join(w.state.Path(layout.Incoming), e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// pursue brings a promote closer to root by one step.
func (f *Fetcher) pursue(ctx context.Context, w *follow, conf config.Component, action decide.Action, in decide.In) error {
	tuple := w.pointer.Tuple()
	now := time.Now()
	if !w.pending.Equal(tuple) {
		w.pending = contract.Pending{Schema: contract.One, Tuple: tuple}
		w.failures = 0
		w.since, w.noted, w.raised, w.retry, w.answer = now, time.Time{}, time.Time{}, time.Time{}, contract.Time{}
		if err := f.clean(w, tuple.Version); err != nil {
			return err
		}
	}
	if w.since.IsZero() {
		w.since = now // waited in an earlier life; the time between does not count
	}
	if action == decide.Update {
		if waiting, err := f.spread(w, now); waiting || err != nil {
			return err
		}
	}
	if f.backingOff(w, in, now) {
		return nil
	}
	if !w.raised.IsZero() && now.Sub(w.raised) < raiseAgain {
		return nil
	}
	if action == decide.Update && !f.present(w, in) {
		if err := f.download(ctx, w); err != nil {
			w.failures++
			w.retry, w.world = time.Now().Add(decide.Backoff(w.failures)), f.worldNow(w)
			return err
		}
		w.failures = 0
	}
	return f.ask(w, time.Now())
}

// spread waits the box's part of the spread, and writes down what it has
// waited, so that a box that is rebooted daily still gets there.
func (f *Fetcher) spread(w *follow, now time.Time) (bool, error) {
	offset := decide.Offset(time.Duration(w.pointer.Payload.Spread), contract.Label(f.Box.Label), w.state.Name, w.pointer.PromotedAt)
	waited := time.Duration(w.pending.WaitedMS)*time.Millisecond + now.Sub(w.since)
	if waited >= offset {
		return false, nil
	}
	f.Status("%s %s: %s of the spread are left", w.state.Name, w.pending.Version, (offset - waited).Round(time.Second))
	if now.Sub(w.noted) < noteInterval {
		return true, nil
	}
	w.pending.WaitedMS, w.since, w.noted = waited.Milliseconds(), now, now
	return true, f.note(w)
}

func (f *Fetcher) note(w *follow) error {
	return f.Disk.WriteFile(w.state.Path(layout.Pending), contract.EncodeRecord(w.pending), 0o640)
}

// backingOff reports whether a promote that was deferred, here or at root, is
// not to be tried again yet. A change of what it may have waited for ends that.
func (f *Fetcher) backingOff(w *follow, in decide.In, now time.Time) bool {
	if r := in.Result; r != nil && !r.At.Equal(w.answer.Time) {
		w.answer, w.raised = r.At, time.Time{} // an answer to another promote: root is free again, ask at once
		if r.Tuple.Equal(w.pending.Tuple) && r.Outcome != outcome.Applied && r.Outcome != outcome.Noted {
			w.world, w.retry = f.worldNow(w), now.Add(decide.Backoff(r.Attempt))
		}
	}
	if v := record.Optional[contract.Verdict](w.state, layout.Verdict); v != nil && v.Verdict != "good" && v.Version == w.pending.Version &&
		v.PromotedAt.Equal(w.pending.PromotedAt.Time) && v.Attempt > w.pending.Attempts {
		w.pending.Attempts, w.raised, w.world = v.Attempt, time.Time{}, f.worldNow(w)
		w.retry = now.Add(decide.Backoff(v.Attempt))
		if v.Verdict == "bad" {
			if err := f.clean(w, ""); err != nil {
				f.complain(w, err)
			}
		}
	}
	if w.retry.IsZero() || now.After(w.retry) {
		return false
	}
	if f.worldNow(w) != w.world {
		w.retry = time.Time{}
		return false
	}
	return true
}

// worldNow is a fingerprint of what a deferred promote may be waiting for: the
// pointer, which may have been refreshed or signed anew, the configuration, and
// what the other components run.
func (f *Fetcher) worldNow(w *follow) string {
	names, _ := config.Components(f.Root)
	s := fmt.Sprintf("%s %d\n", record.Sum(w.raw), w.set.Number)
	for _, name := range names {
		state := record.State{Root: f.Root, Disk: f.Disk, Name: name}
		conf, _ := config.LoadComponent(f.Root, name)
		s += string(name) + " " + string(conf.Digest)
		if a := record.Optional[contract.Applied](state, layout.Applied); a != nil {
			s += string(a.Version)
		}
		s += "\n"
	}
	return s
}

// present reports whether nothing has to be downloaded: root has the set, or
// verify the tree, or the bundle is here.
func (f *Fetcher) present(w *follow, in decide.In) bool {
	version := w.pending.Version
	artifact := w.pointer.Payload.Current.Artifacts[contract.Here()]
	places := []string{w.state.Set(version), f.Root.Tree(string(w.state.Name), string(version))}
	if in.Damaged && in.Applied != nil && in.Applied.Version == version {
		places = places[1:] // root has it, and it is no use
	}
	for _, dir := range places {
		if data, err := record.ReadFile(filepath.Join(dir, contract.ManifestName), contract.MaxManifest); err == nil && record.Sum(data) == artifact.ManifestSHA256 {
			return true
		}
	}
	st, err := os.Stat(f.objectPath(w))
	return err == nil && st.Size() == artifact.Size
}

// ask hands the pointer to verify, and raises the marker last.
func (f *Fetcher) ask(w *follow, now time.Time) error {
	if err := f.clean(w, w.pending.Version); err != nil { // a step that is not of this chain would end verify's walk
		return err
	}
	for n, data := range w.steps { // verify has no network, and walks the same chain
		if err := f.Disk.WriteFile(filepath.Join(w.state.Path(layout.Incoming), layout.StepName(n)), data, 0o640); err != nil {
			return err
		}
	}
	if err := f.Disk.WriteFile(w.state.Path(layout.Pointer), w.raw, 0o640); err != nil {
		return err
	}
	w.pending.Asked = true
	if err := f.note(w); err != nil {
		return err
	}
	w.raised, w.retry = now, time.Time{}
	f.Log.Info("asking for a promote", "component", w.state.Name, "version", w.pending.Version, "promoted_at", w.pending.PromotedAt)
	return marker.Produce(f.Root, layout.FetchedMark, layout.Fetched, string(w.state.Name))
}
