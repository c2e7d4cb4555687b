package fetch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"sluice/internal/config"
	"sluice/internal/contract"
	"sluice/internal/layout"
	"sluice/internal/store"
)

// Watch follows the box's components until ctx ends. A poll that finds
// nothing writes nothing.
func (f *Fetcher) Watch(ctx context.Context) error {
	var last time.Time // of a full pass
	var local string
	tick := time.NewTicker(f.Box.Poll)
	defer tick.Stop()
	heard := f.listen(ctx)
	rung, err := false, error(nil)
	for {
		f.Beat()
		if heard == nil {
			rung, err = f.bell(ctx)
		}
		if err != nil && ctx.Err() == nil {
			f.Status("the store does not answer: %s", err)
			rung = false
		}
		now := time.Now()
		full := last.IsZero() || now.Sub(last) >= fullPass
		// Even without news something may be due: a spread, a retry, an answer of root's.
		if here := f.local(); full || rung || here != local || f.due(now) {
			local = here
			if err := f.pass(ctx, full || rung); err != nil && ctx.Err() == nil {
				f.Log.Debug(err.Error())
			}
			if full {
				last = now
			}
			if err == nil {
				f.Status("following %d components", len(f.follows))
			}
		}
		rung = false
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case n := <-heard:
			rung, err = n.rang, n.err
		}
	}
}

// maxListenRetry is the longest that a bell is not listened to after it could not
// be heard.
const maxListenRetry = time.Minute

// A news is what has been heard of a bell.
type news struct {
	rang bool
	err  error // why it can't be heard
}

// listen has a store that can tell of its bell do so. Of another store it returns
// nil: it is polled. However fast the store answers, it is not asked more often than
// it would be polled.
func (f *Fetcher) listen(ctx context.Context) <-chan news {
	w, ok := f.Store.(store.Waiter)
	if !ok {
		return nil
	}
	heard := make(chan news)
	go func() {
		etag, pause, deaf := "", f.Box.Poll, false
		for ctx.Err() == nil {
			began := time.Now()
			o, err := w.Wait(ctx, contract.MaxSerial, etag)
			var n news
			switch {
			case err == nil:
				n.rang, etag = true, o.ETag
			case errors.Is(err, store.ErrNotModified), store.IsNotExist(err): // nothing; or there was no promote yet
			default:
				n.err = err
			}
			if n.rang || n.err != nil || deaf {
				select {
				case heard <- n:
				case <-ctx.Done():
					return
				}
			}
			if deaf = n.err != nil; deaf {
				pause = min(2*pause, maxListenRetry)
			} else {
				pause = f.Box.Poll
			}
			select {
			case <-time.After(time.Until(began.Add(pause))):
			case <-ctx.Done():
			}
		}
	}()
	return heard
}

// bell asks whether control/serial has changed. Without one, every hour has
// to do.
func (f *Fetcher) bell(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	o, err := f.Store.Get(ctx, contract.SerialKey, contract.MaxSerial, f.serial)
	switch {
	case errors.Is(err, store.ErrNotModified), store.IsNotExist(err):
		return false, nil
	case err != nil:
		return false, err
	}
	f.serial = o.ETag
	return true, nil
}

// due reports whether a component waits for a time that may have come, or for
// a pointer that could not be read.
func (f *Fetcher) due(now time.Time) bool {
	for _, w := range f.follows {
		if w.raw == nil || w.said != "" || w.pending.Version != "" {
			return true
		}
	}
	return f.heart.due(now)
}

// local is a fingerprint of root's records and of /etc/sluice, by the times
// and sizes of the files: every one of them is replaced whole when it changes.
func (f *Fetcher) local() string {
	var s string
	stat := func(path string) {
		if st, err := os.Lstat(path); err == nil {
			s += fmt.Sprintf("%s %d %d\n", path, st.Size(), st.ModTime().UnixNano())
		}
	}
	stat(f.Root.Path(layout.Etc, ""))
	stat(f.Root.Path(layout.Hold, ""))
	names, _ := config.Components(f.Root)
	for _, n := range names {
		for _, p := range []layout.Place{layout.ComponentConf, layout.Seen, layout.Applied, layout.Result, layout.Journal, layout.Drift, layout.Trust, layout.Verdict} {
			stat(f.Root.Path(p, string(n)))
		}
	}
	return s
}
