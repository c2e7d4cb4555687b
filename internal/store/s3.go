package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"sluice/internal/outcome"
)

// Timeouts of one request to S3. A body has no deadline of its own: who reads
// it watches its pace.
const (
	dialTimeout   = 10 * time.Second
	headerTimeout = 30 * time.Second
	s3Retries     = 3
)

// probeKey is written by conditional writes before the first one that counts.
const probeKey = "control/conditional-write-probe"

// S3File is the name of the file, in AWS shared-credentials form, that a box reads
// S3 with.
const S3File = "s3"

type s3 struct {
	core   minio.Core
	bucket string
	prefix string // "" or ends in /
	url    string

	mu     sync.Mutex
	probed bool // the server honours conditional writes
	skew   time.Duration
	dated  bool // it has answered with a time
}

func (s *s3) Skew() (time.Duration, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.skew, s.dated
}

// note keeps the time of an answer (RFC 9110, 6.6.1).
func (s *s3) note(header http.Header) {
	if at, err := http.ParseTime(header.Get("Date")); err == nil {
		s.mu.Lock()
		s.skew, s.dated = time.Since(at), true
		s.mu.Unlock()
	}
}

func newS3(u *url.URL, id Identity) (Store, error) {
	q := u.Query()
	for name := range q {
		if name != "endpoint" && name != "region" {
			return nil, outcome.Config("SLUICE_STORE: s3:// takes endpoint and region, not %q", name)
		}
	}
	endpoint, secure := "s3.amazonaws.com", true
	if raw := q.Get("endpoint"); raw != "" {
		e, err := url.Parse(raw)
		if err != nil || e.Host == "" || (e.Scheme != "http" && e.Scheme != "https") || strings.Trim(e.Path, "/") != "" {
			return nil, outcome.Config("SLUICE_STORE: endpoint %q must be like https://s3.example.com", raw)
		}
		endpoint, secure = e.Host, e.Scheme == "https"
	}
	if u.Host == "" {
		return nil, outcome.Config("SLUICE_STORE: %q names no bucket: write s3://bucket/prefix?endpoint=…", u)
	}
	prefix := strings.Trim(u.Path, "/")
	if prefix != "" {
		if err := checkKey(prefix); err != nil {
			return nil, outcome.Config("SLUICE_STORE: %w", err)
		}
		prefix += "/"
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = (&net.Dialer{Timeout: dialTimeout}).DialContext
	transport.ResponseHeaderTimeout = headerTimeout
	core, err := minio.NewCore(endpoint, &minio.Options{Creds: s3Credentials(id), Secure: secure, Region: q.Get("region"), Transport: transport, MaxRetries: s3Retries})
	if err != nil {
		return nil, outcome.Config("SLUICE_STORE: %w", err)
	}
	return &s3{core: *core, bucket: u.Host, prefix: prefix, url: u.String()}, nil
}

// s3Credentials looks, in this order, at the environment, the box's identity, the
// shared file, and the instance's role.
func s3Credentials(id Identity) *credentials.Credentials {
	providers := []credentials.Provider{&credentials.EnvAWS{}}
	if file := id(S3File); file != "" {
		providers = append(providers, &credentials.FileAWSCredentials{Filename: file})
	}
	providers = append(providers, &credentials.FileAWSCredentials{}, &credentials.IAM{})
	return credentials.NewChainCredentials(providers)
}

func (s *s3) String() string { return s.url }

func s3Error(err error) error {
	r := minio.ToErrorResponse(err)
	switch {
	case r.Code == "NoSuchKey" || r.Code == "NotFound" && r.StatusCode == http.StatusNotFound:
		return fs.ErrNotExist
	case r.StatusCode == http.StatusNotModified:
		return ErrNotModified
	case r.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return ErrRange
	case r.StatusCode == http.StatusPreconditionFailed || r.StatusCode == http.StatusConflict:
		return ErrConflict
	case r.StatusCode >= 400 && r.StatusCode < 500 && r.StatusCode != http.StatusTooManyRequests && r.StatusCode != http.StatusRequestTimeout:
		return fmt.Errorf("%w: %s (%d %s)", ErrDenied, r.Message, r.StatusCode, r.Code)
	}
	return fmt.Errorf("%w: %s", ErrTransient, err)
}

func (s *s3) get(ctx context.Context, key string, opts minio.GetObjectOptions) (io.ReadCloser, minio.ObjectInfo, http.Header, error) {
	if err := checkKey(key); err != nil {
		return nil, minio.ObjectInfo{}, nil, err
	}
	body, info, header, err := s.core.GetObject(ctx, s.bucket, s.prefix+key, opts)
	s.note(header)
	if err != nil {
		return nil, info, header, s3Error(err)
	}
	return body, info, header, nil
}

func (s *s3) Get(ctx context.Context, key string, limit int64, unless string) (Object, error) {
	var opts minio.GetObjectOptions
	if unless != "" {
		if err := opts.SetMatchETagExcept(unless); err != nil {
			return Object{}, keyError(s, "reading", key, err)
		}
	}
	body, info, _, err := s.get(ctx, key, opts)
	if errors.Is(err, ErrNotModified) {
		return Object{ETag: unless}, ErrNotModified
	}
	if err != nil {
		return Object{}, keyError(s, "reading", key, err)
	}
	defer body.Close()
	data, err := readAll(body, limit)
	if err != nil {
		if !errors.Is(err, ErrTooLarge) {
			err = fmt.Errorf("%w: %s", ErrTransient, err)
		}
		return Object{}, keyError(s, "reading", key, err)
	}
	return Object{data, info.ETag}, nil
}

func (s *s3) Open(ctx context.Context, key string, offset int64) (*Stream, error) {
	var opts minio.GetObjectOptions
	if offset > 0 {
		if err := opts.SetRange(offset, 0); err != nil {
			return nil, keyError(s, "reading", key, err)
		}
	}
	body, info, header, err := s.get(ctx, key, opts)
	if err != nil {
		return nil, keyError(s, "reading", key, err)
	}
	size := info.Size
	if offset > 0 {
		if size, err = wholeSize(header, offset); err != nil {
			body.Close()
			return nil, keyError(s, "reading", key, err)
		}
	}
	return &Stream{body, info.ETag, size}, nil
}

func (s *s3) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond Condition) (string, error) {
	if err := checkKey(key); err != nil {
		return "", keyError(s, "writing", key, err)
	}
	if cond != (Condition{}) {
		if err := s.probe(ctx); err != nil {
			return "", keyError(s, "writing", key, err)
		}
	}
	etag, err := s.put(ctx, key, body, size, cond)
	if err != nil {
		return "", keyError(s, "writing", key, err)
	}
	return etag, nil
}

func (s *s3) put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond Condition) (string, error) {
	// One request, whatever the size: a condition can't stand on the parts of an upload.
	opts := minio.PutObjectOptions{DisableMultipart: true, ContentType: "application/octet-stream"}
	if cond.IfNone {
		opts.SetMatchETagExcept("*")
	}
	if cond.IfMatch != "" {
		opts.SetMatchETag(cond.IfMatch)
	}
	client := s.core.Client
	info, err := client.PutObject(ctx, s.bucket, s.prefix+key, body, size, opts)
	if err != nil {
		err = s3Error(err)
		if cond.IfMatch != "" && errors.Is(err, fs.ErrNotExist) {
			err = ErrConflict // it was there when its ETag was read
		}
		return "", err
	}
	return info.ETag, nil
}

// probe finds out, once, whether the server honours conditional writes. One
// that does not would let two operators overwrite each other without a word.
func (s *s3) probe(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.probed {
		return nil
	}
	for range 2 { // the first may be the one that makes it
		_, err := s.put(ctx, probeKey, strings.NewReader("x"), 1, Condition{IfNone: true})
		if errors.Is(err, ErrConflict) {
			s.probed = true
			return nil
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: the server ignores If-None-Match, so a promote could overwrite another one unseen: use a server with conditional writes", ErrDenied)
}

func (s *s3) List(ctx context.Context, prefix string) ([]string, error) {
	if err := checkPrefix(prefix); err != nil {
		return nil, keyError(s, "listing", prefix, err)
	}
	var keys []string
	for o := range s.core.Client.ListObjectsIter(ctx, s.bucket, minio.ListObjectsOptions{Prefix: s.prefix + prefix, Recursive: true}) {
		if o.Err != nil {
			return nil, keyError(s, "listing", prefix, s3Error(o.Err))
		}
		keys = append(keys, strings.TrimPrefix(o.Key, s.prefix))
	}
	slices.Sort(keys)
	return keys, nil
}
