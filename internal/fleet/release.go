package fleet

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"sluice/internal/bundle"
	"sluice/internal/contract"
	"sluice/internal/durable"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/store"
)

// Names of a public release, below <base>/ and <base>/<tag>/.
const (
	latestFile = "latest.txt"
	sumsFile   = "SHA256SUMS"
	sigSuffix  = ".minisig"
)

// Limits of a public release.
const (
	maxLatest  = 256     // bytes of latest.txt
	maxSums    = 1 << 20 // bytes of SHA256SUMS
	maxSig     = 4 << 10 // bytes of its signature
	maxAsset   = 1 << 30 // bytes of an asset
	headerTime = 30 * time.Second
)

// Releases are the public releases of a vendor: whoever serves them is not
// trusted, the vendor's key is.
type Releases struct {
	Base   string // URL
	Vendor VendorKey
	Cache  string // folder that downloads are kept in until they are mirrored, and resumed from
	// Progress is told of the bytes of one asset that are there, of all.
	Progress func(asset string, done, total int64)

	client *http.Client
	lock   *durable.Lock // of the release that is being ingested
}

// OpenReleases checks where releases are found, and whose they are.
func OpenReleases(base, vendorKey string) (*Releases, error) {
	u, err := url.Parse(base)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" {
		return nil, outcome.Config("SLUICE_RELEASES must be like https://releases.example.com/router")
	}
	if vendorKey == "" {
		return nil, outcome.Config("say whose releases count: SLUICE_VENDOR_KEY, the file of the vendor's minisign public key")
	}
	key, err := ReadVendorKey(vendorKey)
	if err != nil {
		return nil, err
	}
	cache, err := os.UserCacheDir() // never a folder that others can write to
	if err != nil {
		return nil, outcome.Config("set HOME or XDG_CACHE_HOME: what is downloaded is kept there until it is mirrored: %w", err)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DialContext = (&net.Dialer{Timeout: headerTime}).DialContext
	transport.ResponseHeaderTimeout, transport.DisableCompression = headerTime, true
	base = strings.TrimSuffix(base, "/")
	// Of each vendor's place its own: two may have the same tags.
	return &Releases{Base: base, Vendor: key, Cache: filepath.Join(cache, "sluice", "releases", string(record.Sum([]byte(base)))), Progress: func(string, int64, int64) {}, client: &http.Client{Transport: transport}}, nil
}

// version is that of a tag, the name of a release at its vendor: with a v before it,
// or not.
func version(tag string) (contract.Version, error) {
	v, err := contract.Parse[contract.Version](strings.TrimPrefix(tag, "v"))
	if err != nil {
		return v, outcome.Refuse(outcome.BadBundle, "%q is no tag of a release: %w", tag, err)
	}
	return v, nil
}

// Latest finds out which release is the newest.
func (r *Releases) Latest(ctx context.Context) (string, error) {
	data, err := r.get(ctx, latestFile, maxLatest)
	if store.IsNotExist(err) {
		return "", outcome.Config("%s has no %s: say which version, -version V", r.Base, latestFile)
	}
	if err != nil {
		return "", err
	}
	tag := strings.TrimSpace(string(data))
	_, err = version(tag)
	return tag, err
}

// Sums are the digests of a release's assets, by their names, as the vendor has
// signed them.
type Sums struct {
	Tag     string
	Version contract.Version
	digests map[string]contract.Digest
}

// Sums reads the digests of one version: below its tag, which begins with a v or
// does not.
func (r *Releases) Sums(ctx context.Context, tag string) (Sums, error) {
	v, err := version(tag)
	if err != nil {
		return Sums{}, err
	}
	tags := []string{tag}
	if !strings.HasPrefix(tag, "v") {
		tags = []string{"v" + tag, tag}
	}
	for _, tag := range tags {
		data, err := r.get(ctx, tag+"/"+sumsFile, maxSums)
		if store.IsNotExist(err) {
			continue
		}
		if err != nil {
			return Sums{}, err
		}
		sig, err := r.get(ctx, tag+"/"+sumsFile+sigSuffix, maxSig)
		if store.IsNotExist(err) {
			return Sums{}, outcome.Refuse(outcome.BadSignature, "release %s has no %s%s: nothing of it can be trusted; ask its vendor", tag, sumsFile, sigSuffix)
		}
		if err != nil {
			return Sums{}, err
		}
		if err := r.Vendor.Verify(data, sig); err != nil {
			return Sums{}, fmt.Errorf("%w: %s of release %s. Nothing was promoted; find out who changed it, or whether SLUICE_VENDOR_KEY is the right key", err, sumsFile, tag)
		}
		digests, err := parseSums(data)
		if err != nil {
			return Sums{}, outcome.Refuse(outcome.BadBundle, "%s of release %s: %w", sumsFile, tag, err)
		}
		return Sums{tag, v, digests}, nil
	}
	return Sums{}, outcome.Refuse(outcome.NoArtifact, "%s has no release %s", r.Base, tag)
}

var sumsLine = regexp.MustCompile(`^([0-9a-f]{64}) [ *]([A-Za-z0-9][A-Za-z0-9._-]{0,254})$`)

// parseSums reads what sha256sum(1) writes.
func parseSums(data []byte) (map[string]contract.Digest, error) {
	out := map[string]contract.Digest{}
	lines := bufio.NewScanner(bytes.NewReader(data))
	for lines.Scan() {
		m := sumsLine.FindStringSubmatch(lines.Text())
		if m == nil {
			return nil, fmt.Errorf("%q is no line of digest and name", lines.Text())
		}
		if other, twice := out[m[2]]; twice && other != contract.Digest(m[1]) {
			return nil, fmt.Errorf("%q has two digests", m[2])
		}
		out[m[2]] = contract.Digest(m[1])
	}
	return out, lines.Err()
}

// assetName is what a bundle of a release is called.
func assetName(c contract.Component, v contract.Version, p contract.Platform) string {
	return fmt.Sprintf("%s_%s_%s%s", c, v, p, bundle.Suffix)
}

// Components returns what a release has bundles of.
func (s Sums) Components() []contract.Component {
	var out []contract.Component
	for name := range s.digests {
		if c, _, ok := s.bundle(name); ok && !slices.Contains(out, c) {
			out = append(out, c)
		}
	}
	slices.Sort(out)
	return out
}

// Platforms returns the platforms that a release has a component for.
func (s Sums) Platforms(c contract.Component) []contract.Platform {
	var out []contract.Platform
	for name := range s.digests {
		if component, p, ok := s.bundle(name); ok && component == c {
			out = append(out, p)
		}
	}
	slices.Sort(out)
	return out
}

// bundle reads the name of an asset of this version.
func (s Sums) bundle(name string) (contract.Component, contract.Platform, bool) {
	first, rest, _ := strings.Cut(name, "_"+string(s.Version)+"_")
	c, cerr := contract.Parse[contract.Component](first)
	p, perr := contract.Parse[contract.Platform](strings.TrimSuffix(rest, bundle.Suffix))
	return c, p, cerr == nil && perr == nil && assetName(c, s.Version, p) == name
}

// Ingest brings the bundles of a component for some platforms here, each with the
// digest that the vendor signed. Nothing is mirrored yet. What was brought before
// is resumed, or taken as it is.
func (r *Releases) Ingest(ctx context.Context, s Sums, c contract.Component, platforms []contract.Platform, now time.Time) (Plan, error) {
	if err := r.own(ctx, s.Tag); err != nil {
		return Plan{}, err
	}
	for _, p := range platforms { // before anything is downloaded
		if _, there := s.digests[assetName(c, s.Version, p)]; !there {
			return Plan{}, outcome.Refuse(outcome.NoArtifact, "release %s has no %s: ask its vendor, or promote for the others alone with -platform", s.Tag, assetName(c, s.Version, p))
		}
	}
	var files []string
	for _, p := range platforms {
		file, err := r.download(ctx, s, assetName(c, s.Version, p))
		if err != nil {
			return Plan{}, err
		}
		files = append(files, file)
	}
	plan, err := Read(files, now)
	if err != nil {
		return plan, err
	}
	if plan.Component != c || plan.Release.Version != s.Version {
		return plan, outcome.Refuse(outcome.BadBundle, "the bundles of %s %s say that they are %s %s: ask the vendor", c, s.Version, plan.Component, plan.Release.Version)
	}
	for _, p := range platforms {
		name := assetName(c, s.Version, p)
		if a, there := plan.Release.Artifacts[p]; there && a.SHA256 != s.digests[name] {
			return plan, outcome.Refuse(outcome.DigestMismatch, "%s was changed on this machine since it was checked", name)
		}
		if _, there := plan.Release.Artifacts[p]; !there {
			return plan, outcome.Refuse(outcome.BadBundle, "%s is not for platform %s: ask the vendor", assetName(c, s.Version, p), p)
		}
	}
	plan.Release.Source = "release:" + s.Tag
	return plan, nil
}

// own takes the downloads of a release for this run, which keeps them until it ends.
func (r *Releases) own(ctx context.Context, tag string) error {
	if r.lock != nil {
		return nil
	}
	if err := os.MkdirAll(r.Cache, 0o700); err != nil {
		return err
	}
	now, cancel := context.WithCancel(ctx)
	cancel() // another run is told of at once
	lock, err := durable.Acquire(now, filepath.Join(r.Cache, tag+".lock"))
	if err != nil {
		return outcome.Defer(outcome.IO, "another run is at work on release %s: %w", tag, err)
	}
	r.lock = lock
	return nil
}

// Forget removes what was downloaded of a release, once it is mirrored.
func (r *Releases) Forget(s Sums) error { return os.RemoveAll(filepath.Join(r.Cache, s.Tag)) }

// download brings one asset. What is not proven says so in its name.
func (r *Releases) download(ctx context.Context, s Sums, name string) (string, error) {
	path := filepath.Join(r.Cache, s.Tag, name)
	if digest, err := digestOf(path); err == nil && digest == s.digests[name] {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	part, err := os.OpenFile(path+".unverified", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return "", err
	}
	defer part.Close()
	if err := r.receive(ctx, s.Tag+"/"+name, name, part); err != nil {
		return "", err
	}
	digest, err := digestOf(part.Name())
	if err != nil {
		return "", err
	}
	if digest != s.digests[name] {
		return "", errors.Join(outcome.Refuse(outcome.DigestMismatch, "%s of release %s is not the file that its vendor signed (%s, and not %s). Nothing was promoted; run it again, and if it stays so, tell the vendor", name, s.Tag, digest, s.digests[name]),
			os.Remove(part.Name())) // nothing of it is worth resuming
	}
	return path, os.Rename(part.Name(), path)
}

func digestOf(path string) (contract.Digest, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	digest, _, err := record.HashFile(f)
	return digest, err
}

// receive appends what is missing of an asset to a file.
func (r *Releases) receive(ctx context.Context, rel, name string, part *os.File) error {
	have, err := part.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a, err := r.ask(ctx, rel, have)
	if store.IsNotExist(err) {
		return outcome.Refuse(outcome.NoArtifact, "%s is signed, and %s does not have it: ask the vendor", name, r.Base)
	}
	if err != nil {
		return err
	}
	defer a.Body.Close()
	switch a.StatusCode {
	case http.StatusRequestedRangeNotSatisfiable: // it was all there
		return nil
	case http.StatusOK: // from the beginning, whatever was asked for
		if have, err = 0, part.Truncate(0); err == nil {
			_, err = part.Seek(0, io.SeekStart)
		}
		if err != nil {
			return err
		}
	}
	total := have + a.ContentLength
	if a.ContentLength < 0 {
		return outcome.Defer(outcome.Store, "%s does not say how long %s is", r.Base, name)
	}
	if total > maxAsset {
		return outcome.Refuse(outcome.BadBundle, "%s has %d bytes, the most is %d", name, total, maxAsset)
	}
	patience := store.NewPatience(cancel)
	defer patience.Stop()
	buf := make([]byte, 64<<10)
	for {
		n, err := a.Body.Read(buf)
		if n > 0 {
			if _, err := part.Write(buf[:n]); err != nil {
				return err
			}
			patience.Got(n)
			have += int64(n)
			r.Progress(name, have, total)
		}
		if err == io.EOF {
			return part.Sync()
		}
		if err != nil {
			return outcome.Defer(outcome.Store, "%s stopped after %d of %d bytes: %w: run it again, it goes on from there", name, have, total, err)
		}
	}
}

// get reads a small file whole.
func (r *Releases) get(ctx context.Context, rel string, limit int64) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*headerTime)
	defer cancel()
	a, err := r.ask(ctx, rel, 0)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	data, err := io.ReadAll(io.LimitReader(a.Body, limit+1))
	if err != nil {
		return nil, outcome.Defer(outcome.Store, "reading %s/%s: %w", r.Base, rel, err)
	}
	if int64(len(data)) > limit {
		return nil, outcome.Refuse(outcome.BadBundle, "%s/%s is over %d bytes", r.Base, rel, limit)
	}
	return data, nil
}

func (r *Releases) ask(ctx context.Context, rel string, offset int64) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.Base+"/"+rel, nil)
	if err != nil {
		return nil, err
	}
	if offset > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	a, err := r.client.Do(req)
	if err != nil {
		return nil, outcome.Defer(outcome.Store, "%w", err)
	}
	switch {
	case a.StatusCode == http.StatusOK, offset > 0 && (a.StatusCode == http.StatusPartialContent || a.StatusCode == http.StatusRequestedRangeNotSatisfiable):
		return a, nil
	case a.StatusCode == http.StatusNotFound:
		err = &fs.PathError{Op: "reading", Path: r.Base + "/" + rel, Err: fs.ErrNotExist}
	case a.StatusCode >= 500, a.StatusCode == http.StatusTooManyRequests:
		err = outcome.Defer(outcome.Store, "%s/%s: %s", r.Base, rel, a.Status)
	default:
		err = fmt.Errorf("%s/%s: %s", r.Base, rel, a.Status)
	}
	a.Body.Close()
	return nil, err
}
