package store

import (
	"context"
	"io"
	"strings"
	"time"
)

// prefix is a part of a store that is a store itself: the tree of one fleet in a
// bucket that several share.
type prefix struct {
	whole Store
	part  string // ends in /
}

// Prefix returns the part of a store below a prefix, which ends in /.
func Prefix(s Store, part string) (Store, error) {
	if err := checkPrefix(part); err != nil {
		return nil, err
	}
	return prefix{s, part}, nil
}

func (p prefix) String() string {
	return p.whole.String() + " (" + strings.TrimSuffix(p.part, "/") + ")"
}

func (p prefix) Get(ctx context.Context, key string, limit int64, unless string) (Object, error) {
	if err := checkKey(key); err != nil { // else the whole would check something else
		return Object{}, keyError(p, "reading", key, err)
	}
	return p.whole.Get(ctx, p.part+key, limit, unless)
}

func (p prefix) Open(ctx context.Context, key string, offset int64) (*Stream, error) {
	if err := checkKey(key); err != nil {
		return nil, keyError(p, "reading", key, err)
	}
	return p.whole.Open(ctx, p.part+key, offset)
}

func (p prefix) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond Condition) (string, error) {
	if err := checkKey(key); err != nil {
		return "", keyError(p, "writing", key, err)
	}
	return p.whole.Put(ctx, p.part+key, body, size, cond)
}

// Skew is that of the whole.
func (p prefix) Skew() (time.Duration, bool) {
	if d, ok := p.whole.(Dated); ok {
		return d.Skew()
	}
	return 0, false
}

func (p prefix) List(ctx context.Context, under string) ([]string, error) {
	if err := checkPrefix(under); err != nil {
		return nil, keyError(p, "listing", under, err)
	}
	keys, err := p.whole.List(ctx, p.part+under)
	for i, k := range keys {
		keys[i] = strings.TrimPrefix(k, p.part)
	}
	return keys, err
}
