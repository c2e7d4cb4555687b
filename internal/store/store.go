// Package store is the bucket: get, open, put and list, with conditional
// writes. A store is opened from one URL, SLUICE_STORE.
//
// It does not promise that what it hands out was signed by anybody.
package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
)

// What a store answers, beside fs.ErrNotExist.
var (
	ErrConflict    = errors.New("somebody else wrote it meanwhile")
	ErrTransient   = errors.New("the store does not answer now")
	ErrDenied      = errors.New("the store denies it")
	ErrNotModified = errors.New("not modified")
	ErrTooLarge    = errors.New("it is larger than it may be")
	ErrRange       = errors.New("it is not that long")
)

// An Object is one small object, whole.
type Object struct {
	Data []byte
	ETag string
}

// A Stream is an object that is being read. The caller closes it.
type Stream struct {
	io.ReadCloser
	ETag string
	Size int64 // of the whole object
}

// A Condition says when a Put may happen. The zero value: always.
type Condition struct {
	IfMatch string // only over the object with this ETag
	IfNone  bool   // only if there is none
}

// A Store is a bucket, or a part of one. Keys have the form that
// contract.KeyForm checks. All methods are safe for concurrent use.
type Store interface {
	// Get reads an object of at most limit bytes. If its ETag is unless, the
	// answer is ErrNotModified.
	Get(ctx context.Context, key string, limit int64, unless string) (Object, error)
	// Open streams an object from an offset, which must be within it.
	Open(ctx context.Context, key string, offset int64) (*Stream, error)
	// Put writes an object whole, or not at all, and returns its ETag.
	Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond Condition) (string, error)
	// List returns the keys below a prefix, sorted. The prefix ends in /.
	List(ctx context.Context, prefix string) ([]string, error)
	// String is the store's URL, without secrets.
	String() string
}

// Pointer reads the pointer of a channel: of the majors that speaks can read, the
// highest that there is.
func Pointer(ctx context.Context, s Store, speaks contract.Speaks, c contract.Component, ch contract.Channel) (Object, error) {
	err := fs.ErrNotExist
	for _, major := range speaks.Majors(contract.PointerLadder) {
		var o Object
		if o, err = s.Get(ctx, contract.PointerKey(c, ch, major), contract.MaxEnvelope, ""); !IsNotExist(err) {
			return o, err
		}
	}
	return Object{}, err
}

// PutBytes writes a small object.
func PutBytes(ctx context.Context, s Store, key string, data []byte, cond Condition) (string, error) {
	return s.Put(ctx, key, bytes.NewReader(data), int64(len(data)), cond)
}

// TrustDocument reads trust document n.
func TrustDocument(ctx context.Context, s Store, n int) ([]byte, error) {
	o, err := s.Get(ctx, contract.TrustKey(n), contract.MaxEnvelope, "")
	return o.Data, err
}

// A Waiter is a Store whose bell need not be polled.
type Waiter interface {
	// Wait reads control/serial once its ETag is not unless any more. It waits at
	// most MaxWait, and then answers ErrNotModified.
	Wait(ctx context.Context, limit int64, unless string) (Object, error)
}

// Dated is a Store whose answers bear a time.
type Dated interface {
	// Skew is how far the local clock was ahead of the store's when it last
	// answered; false if it has not.
	Skew() (time.Duration, bool)
}

// An Identity says where the files are that a box proves itself with, by their
// names; "" for one that there is not. The caller owns them.
type Identity func(name string) string

// Credentials are the identity that systemd hands to a service, as the units load
// it: LoadCredential=identity:/etc/sluice/identity.
func Credentials(name string) string {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, "identity_"+name)
}

// IdentityIn is what systemd has handed to this program; by hand, the folder itself.
func IdentityIn(folder string) Identity {
	if os.Getenv("CREDENTIALS_DIRECTORY") != "" {
		return Credentials
	}
	return func(name string) string { return filepath.Join(folder, name) }
}

// kinds is how a store's URL may look.
const kinds = "write file:///srv/bucket, s3://bucket/prefix?endpoint=… or https://door.example.com"

// Open opens the store that a URL names, for whom systemd says that this is.
func Open(raw string) (Store, error) { return OpenAs(raw, Credentials) }

// OpenAs opens the store that a URL names.
func OpenAs(raw string, id Identity) (Store, error) {
	u, err := url.Parse(raw)
	if err != nil || u.Scheme == "" {
		return nil, outcome.Config("SLUICE_STORE is no URL: %s", kinds)
	}
	if u.User != nil {
		return nil, outcome.Config("SLUICE_STORE must not hold credentials: see the operating guide for where they go")
	}
	switch u.Scheme {
	case "file":
		return newDir(u)
	case "s3":
		return newS3(u, id)
	case "https":
		return newDoor(u, id)
	}
	return nil, outcome.Config("SLUICE_STORE: %q is no kind of store: %s", u.Scheme, kinds)
}

// keyError says what was done to which key of which store.
func keyError(s Store, verb, key string, err error) error {
	return fmt.Errorf("%s %q of %s: %w", verb, key, s, err)
}

func checkKey(key string) error {
	if err := contract.KeyForm(key); err != nil {
		return fmt.Errorf("%w: %s", ErrDenied, err)
	}
	return nil
}

func checkPrefix(prefix string) error {
	trimmed, ok := strings.CutSuffix(prefix, "/")
	if !ok {
		return fmt.Errorf("%w: prefix %q must end in /", ErrDenied, prefix)
	}
	return checkKey(trimmed)
}

// readAll reads at most limit bytes, and tells at the limit from over it.
func readAll(r io.Reader, limit int64) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("%w: over %d bytes", ErrTooLarge, limit)
	}
	return data, nil
}

// IsNotExist reports whether an object is not there.
func IsNotExist(err error) bool { return errors.Is(err, fs.ErrNotExist) }
