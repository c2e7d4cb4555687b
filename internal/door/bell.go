package door

import (
	"context"
	"errors"
	"io/fs"
	"sync"
	"time"

	"sluice/internal/contract"
	"sluice/internal/store"
)

// bells are the control/serial of each fleet that somebody waits for. However
// many wait, the store is asked by one.
type bells struct {
	poll time.Duration

	mu   sync.Mutex
	each map[string]*ring
}

// A ring is one bell. It is looked at for as long as somebody waits.
type ring struct {
	waiting int
	object  store.Object
	read    bool          // object is what the store had
	err     error         // why it could not be looked at last
	changed chan struct{} // closed when object is another one
	stop    context.CancelFunc
}

// wait answers with a fleet's bell once its ETag is not unless any more, and with
// ErrNotModified when ctx ends, or when the door closes.
func (b *bells) wait(ctx, closing context.Context, fleet string, s store.Store, unless string) (store.Object, error) {
	b.mu.Lock()
	r := b.each[fleet]
	if r == nil {
		life, stop := context.WithCancel(closing)
		r = &ring{changed: make(chan struct{}), stop: stop}
		b.each[fleet] = r
		go b.watch(life, r, s)
	}
	r.waiting++
	defer func() {
		b.mu.Lock()
		if r.waiting--; r.waiting == 0 {
			r.stop()
			delete(b.each, fleet)
		}
		b.mu.Unlock()
	}()
	for {
		if r.read && r.object.ETag != unless {
			defer b.mu.Unlock()
			if r.object.ETag == "" {
				return r.object, fs.ErrNotExist
			}
			return r.object, nil
		}
		changed := r.changed
		b.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			b.mu.Lock()
			err := r.err
			b.mu.Unlock()
			if err != nil { // whether it rang is not known
				return store.Object{}, err
			}
			return store.Object{}, store.ErrNotModified
		case <-closing.Done():
			return store.Object{}, store.ErrNotModified
		}
		b.mu.Lock()
	}
}

// watch looks at one bell.
func (b *bells) watch(ctx context.Context, r *ring, s store.Store) {
	tick := time.NewTicker(b.poll)
	defer tick.Stop()
	for {
		b.look(ctx, r, s)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (b *bells) look(ctx context.Context, r *ring, s store.Store) {
	ctx, cancel := context.WithTimeout(ctx, storeTime)
	defer cancel()
	b.mu.Lock()
	last := r.object.ETag
	b.mu.Unlock()
	o, err := s.Get(ctx, contract.SerialKey, contract.MaxSerial, last)
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case errors.Is(err, store.ErrNotModified):
		r.err = nil
		return
	case err != nil && !store.IsNotExist(err):
		r.err = err // a store that is away for a moment rings no bell
		return
	}
	r.err = nil
	if r.read && o.ETag == last {
		return
	}
	r.object, r.read = o, true
	close(r.changed)
	r.changed = make(chan struct{})
}
