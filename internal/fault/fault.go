// Package fault numbers the durable operations of a run, so that a test can
// make one of them die, fail or wait. Outside tests the value is nil and costs
// one comparison.
package fault

import (
	"errors"
	"sync"
)

// errSkipped passes an operation over: it is reported as done.
var errSkipped = errors.New("passed over at a fault point")

// Done makes nothing of the error of an operation that is passed over. Only
// what a test wants to see missing asks for it: an fsync.
func Done(err error) error {
	if errors.Is(err, errSkipped) {
		return nil
	}
	return err
}

// ErrDead is what every operation answers after the fatal point: a killed
// process does nothing more, tidying up included.
var ErrDead = errors.New("killed at a fault point")

// Points counts operations and acts at one of them. The zero value only
// counts. It is safe for concurrent use.
type Points struct {
	// At is the number, from 1, of the operation to act at; 0 is none.
	At int
	// Err is what that operation answers instead of being done; the run goes
	// on. nil means: die there, before the operation.
	Err error
	// Refuse, if not nil, says with which error an operation fails.
	Refuse func(op, object string) error
	// Skip, if not nil, says which fsyncs are passed over, as if they were not
	// in the code.
	Skip func(op, object string) bool
	// Seen, if not nil, is told of every operation that is about to be done.
	Seen func(n int, op, object string)

	mu   sync.Mutex
	n    int
	dead bool
}

// Hit is called before each operation. A nil Points does nothing.
func (p *Points) Hit(op, object string) error {
	if p == nil {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return ErrDead
	}
	p.n++
	if p.Seen != nil {
		p.Seen(p.n, op, object)
	}
	if p.Refuse != nil {
		if err := p.Refuse(op, object); err != nil {
			return err
		}
	}
	if p.Skip != nil && p.Skip(op, object) {
		return errSkipped
	}
	if p.n != p.At {
		return nil
	}
	if p.Err != nil {
		return p.Err
	}
	p.dead = true
	return ErrDead
}

// Count returns how many operations there have been.
func (p *Points) Count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n
}
