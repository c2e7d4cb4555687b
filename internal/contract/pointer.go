package contract

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// Limits of signed documents.
const (
	MaxEnvelope   = 64 << 10                 // bytes of an envelope that are ever read
	MaxPointer    = 48 << 10                 // bytes that a writer lets an envelope become
	MaxHistory    = 10                       // releases in a pointer's history
	MaxAudit      = 50                       // entries in a pointer's audit
	MaxSignatures = 16                       // signatures of an envelope that are looked at
	MaxSpread     = Duration(24 * time.Hour) // of a promote
	MaxDeltas     = 16                       // deltas of an artifact
	keySize       = 32                       // bytes of a public key: Ed25519 (RFC 8032)
)

// An Envelope is a DSSE envelope: a payload and who signed it.
type Envelope struct {
	PayloadType string      `json:"payloadType"`
	Payload     []byte      `json:"payload"` // base64 in JSON
	Signatures  []Signature `json:"signatures"`
}

// A Signature is one of an envelope's. It is text: a malformed one must spoil
// only itself.
type Signature struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

// PayloadType returns the type that a signature over a document of l covers.
func PayloadType(l Ladder) string { return "application/vnd.sluice." + string(l) + "+json" }

// DecodeEnvelope reads an envelope. Nothing in it is proven. One that is made
// otherwise than this build knows, and says so, is an UpgradeError.
func (s Speaks) DecodeEnvelope(data []byte) (Envelope, error) {
	var e Envelope
	if len(data) > MaxEnvelope {
		return e, fmt.Errorf("reading an envelope: it is over %d bytes", MaxEnvelope)
	}
	if _, err := strictDecode(data, &e); err != nil {
		if payload, perr := payloadOf(data); perr == nil {
			if found, ok := probe(payload, "envelope"); ok {
				if err := s.Check(EnvelopeLadder, found); err != nil {
					return e, err
				}
			}
		}
		return e, fmt.Errorf("reading an envelope: %w", err)
	}
	return e, nil
}

// Encode writes the envelope.
func (e Envelope) Encode() []byte { return encode(e) }

// A Pointer is the statement that names a channel's current release.
type Pointer struct {
	Envelope   Step           `json:"envelope"`
	Component  Component      `json:"component"`
	Channel    Channel        `json:"channel"`
	PromotedAt Time           `json:"promoted_at"`
	Payload    PointerPayload `json:"payload"`
}

// A PointerPayload is the pointer family's own part.
type PointerPayload struct {
	Schema  Step      `json:"schema"`
	Current Release   `json:"current"`
	History []Release `json:"history"` // newest first
	Spread  Duration  `json:"spread"`
	Audit   []Audit   `json:"audit"` // newest first

	// Nothing is installed from this pointer after ExpiresAt. A refresh changes
	// these two, and never PromotedAt.
	ExpiresAt   Time `json:"expires_at,omitzero" since:"1.2"`
	RefreshedAt Time `json:"refreshed_at,omitzero" since:"1.2"`
}

// Life is how long the pointer counts from a refresh on; 0: for ever.
func (p PointerPayload) Life() time.Duration { return p.ExpiresAt.Sub(p.RefreshedAt.Time) }

// A Release is one immutable version of a component.
type Release struct {
	Version    Version               `json:"version"`
	Artifacts  map[Platform]Artifact `json:"artifacts"`
	Source     string                `json:"source"` // release:<tag>, or file
	ReleasedAt Time                  `json:"released_at"`
}

// An Artifact is a release for one platform: an object in the store, and what
// vouches for everything in it.
type Artifact struct {
	Key            string `json:"key"`
	Size           int64  `json:"size"`
	SHA256         Digest `json:"sha256"`
	TarSize        int64  `json:"tar_size"`
	ManifestSHA256 Digest `json:"manifest_sha256"`

	Deltas []Delta `json:"deltas,omitzero" since:"1.1"` // of the current release only
}

// WithoutDeltas returns the release as a history keeps it.
func (r Release) WithoutDeltas() Release {
	kept := map[Platform]Artifact{}
	for p, a := range r.Artifacts {
		a.Deltas = nil
		kept[p] = a
	}
	r.Artifacts = kept
	return r
}

// A Delta makes an artifact of another version's files.
type Delta struct {
	From               Version `json:"from"`
	FromManifestSHA256 Digest  `json:"from_manifest_sha256"`
	Key                string  `json:"key"`
	Size               int64   `json:"size"`
	SHA256             Digest  `json:"sha256"`
}

// An Audit entry says who did what. Op is 16 random bytes in hex, so that a
// lost answer can be looked up.
type Audit struct {
	Action string `json:"action"`
	From   string `json:"from"`
	To     string `json:"to"`
	Actor  string `json:"actor"`
	At     Time   `json:"at"`
	Op     string `json:"op"`
}

// DecodePointer reads the statement out of an envelope's payload.
func (s Speaks) DecodePointer(data []byte) (Pointer, error) {
	var p Pointer
	if err := s.statement(PointerLadder, data, &p); err != nil {
		return p, err
	}
	return p, p.check()
}

// statement reads what an envelope carries: two ladders, the envelope's own
// and the family's.
func (s Speaks) statement(l Ladder, data []byte, v any) error {
	if len(data) > MaxEnvelope {
		return fmt.Errorf("reading a %s document: it is over %d bytes", l, MaxEnvelope)
	}
	if found, ok := probe(data, "envelope"); ok {
		if err := s.Check(EnvelopeLadder, found); err != nil {
			return err
		}
	}
	return s.decode(l, data, MaxEnvelope, v, "payload", "schema")
}

// Needs is the lowest step of the pointer ladder that has all that p uses, and
// the member that needs it.
func (p Pointer) Needs() (Step, string) {
	n := lowest(p)
	return n.step, n.member
}

// Encode writes the statement, stamped with the lowest step that has all it uses.
func (p Pointer) Encode() []byte {
	p.Payload.Schema = lowest(p).step
	return encode(p)
}

func (p Pointer) check() error {
	if len(p.Payload.History) > MaxHistory {
		return fmt.Errorf("reading a pointer: its history has %d releases, the most is %d", len(p.Payload.History), MaxHistory)
	}
	if len(p.Payload.Audit) > MaxAudit {
		return fmt.Errorf("reading a pointer: its audit has %d entries, the most is %d", len(p.Payload.Audit), MaxAudit)
	}
	if p.Payload.Spread > MaxSpread {
		return fmt.Errorf("reading a pointer: its spread is over %s", time.Duration(MaxSpread))
	}
	if e := p.Payload; e.ExpiresAt.IsZero() != e.RefreshedAt.IsZero() || e.Life() < 0 {
		return fmt.Errorf("reading a pointer: it expires at %s, and was refreshed at %s", e.ExpiresAt, e.RefreshedAt)
	}
	for i, r := range append([]Release{p.Payload.Current}, p.Payload.History...) {
		if r.Version.Reserved() {
			return fmt.Errorf("reading a pointer: %q is a reserved version", r.Version)
		}
		for platform, a := range r.Artifacts {
			if i > 0 && a.Deltas != nil {
				return fmt.Errorf("reading a pointer: %s for %s: only the current release has deltas", r.Version, platform)
			}
			if err := a.check(p.Component, r.Version); err != nil {
				return fmt.Errorf("reading a pointer: %s for %s: %w", r.Version, platform, err)
			}
		}
	}
	return nil
}

func (a Artifact) check(c Component, v Version) error {
	if err := checkObject(a.Key, a.Size, c, v); err != nil {
		return err
	}
	if a.TarSize <= 0 {
		return errors.New("its size is not positive")
	}
	if a.TarSize > MaxUnpacked {
		return fmt.Errorf("it unpacks to %d bytes, the most is %d", a.TarSize, MaxUnpacked)
	}
	if len(a.Deltas) > MaxDeltas {
		return fmt.Errorf("it has %d deltas, the most is %d", len(a.Deltas), MaxDeltas)
	}
	for _, d := range a.Deltas {
		if err := checkObject(d.Key, d.Size, c, v); err != nil {
			return fmt.Errorf("the delta from %s: %w", d.From, err)
		}
	}
	return nil
}

// checkObject checks what is said of an object of a version.
func checkObject(key string, size int64, c Component, v Version) error {
	if err := KeyForm(key); err != nil {
		return err
	}
	if !strings.HasPrefix(key, BootstrapKey(c, v, "")) {
		return fmt.Errorf("key %q is not below %q", clip(key), BootstrapKey(c, v, ""))
	}
	if size <= 0 {
		return errors.New("its size is not positive")
	}
	return nil
}

// keyPart is wide enough for every file name that is made of valid names.
var keyPart = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$`)

// KeyForm checks the name of an object: relative, clean, plain characters.
func KeyForm(key string) error {
	const maxKey = 512
	if key == "" || len(key) > maxKey || key != path.Clean(key) || path.IsAbs(key) {
		return fmt.Errorf("%q is no key: it must be a clean relative path of at most %d bytes", clip(key), maxKey)
	}
	for _, part := range strings.Split(key, "/") {
		if !keyPart.MatchString(part) {
			return fmt.Errorf("%q is no key: %q must be a letter or digit, then letters, digits and . _ -", clip(key), clip(part))
		}
	}
	return nil
}

// Keys of the bucket.
const (
	SerialKey      = "control/serial"
	PointersPrefix = "control/system/"
	TrustPrefix    = "control/trust/"
	StatusPrefix   = "status/boxes/"
	FleetsPrefix   = "fleets/"
)

// PointersOf begins the keys of a component's pointers.
func PointersOf(c Component) string { return PointersPrefix + string(c) + "/" }

// WrittenMajor is the major of the pointers that are written.
const WrittenMajor = 1

// PointerKey is where the pointer of a channel is, as a document of a major of
// its ladder. Majors live side by side.
func PointerKey(c Component, ch Channel, major int) string {
	if major == 1 {
		return PointersOf(c) + string(ch) + ".json"
	}
	return fmt.Sprintf("%s%s.v%d.json", PointersOf(c), ch, major)
}

var pointerKeyForm = regexp.MustCompile(`^` + PointersPrefix + `([^/]+)/([^/.]+)(?:\.v([1-9][0-9]{0,5}))?\.json$`)

// ParsePointerKey reads the key of a pointer.
func ParsePointerKey(key string) (c Component, ch Channel, major int, ok bool) {
	m := pointerKeyForm.FindStringSubmatch(key)
	if m == nil || c.UnmarshalText([]byte(m[1])) != nil || ch.UnmarshalText([]byte(m[2])) != nil {
		return "", "", 0, false
	}
	major = 1
	if m[3] != "" {
		major, _ = strconv.Atoi(m[3])
	}
	return c, ch, major, PointerKey(c, ch, major) == key
}

// FleetPrefix begins the keys of a fleet that shares a bucket with others.
func FleetPrefix(fleet string) string { return FleetsPrefix + fleet + "/" }

// TrustKey is where trust document n is.
func TrustKey(n int) string { return fmt.Sprintf("%s%d.json", TrustPrefix, n) }

// ParseTrustKey reads the number in the key of a trust document.
func ParseTrustKey(key string) (int, bool) {
	digits, ok := strings.CutPrefix(strings.TrimSuffix(key, ".json"), TrustPrefix)
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil && n > 0 && TrustKey(n) == key
}

// BootstrapKey is where an asset of a version is.
func BootstrapKey(c Component, v Version, asset string) string {
	return "bootstrap/" + string(c) + "/" + string(v) + "/" + asset
}

// StatusKey is where a box publishes its heartbeat.
func StatusKey(l Label) string { return StatusPrefix + string(l) + ".json" }

// A Trust is the statement that says whose signature counts.
type Trust struct {
	Envelope   Step         `json:"envelope"`
	PromotedAt Time         `json:"promoted_at"`
	Payload    TrustPayload `json:"payload"`
}

// A TrustPayload is the trust family's own part.
type TrustPayload struct {
	Schema   Step              `json:"schema"`
	Number   int               `json:"number"`
	Keys     map[string][]byte `json:"keys"` // key id → 32 bytes
	Families map[Ladder]Family `json:"families"`
	// No update is made after ExpiresAt, until there is a newer document.
	ExpiresAt Time `json:"expires_at,omitzero"`
}

// A Family says which keys count for one family of documents, and how many of
// them must sign.
type Family struct {
	Keys      []string `json:"keys"`
	Threshold int      `json:"threshold"`
}

// DecodeTrust reads the statement out of an envelope's payload.
func (s Speaks) DecodeTrust(data []byte) (Trust, error) {
	var t Trust
	if err := s.statement(TrustLadder, data, &t); err != nil {
		return t, err
	}
	if t.Payload.Number < 1 {
		return t, fmt.Errorf("reading a trust document: it has number %d", t.Payload.Number)
	}
	for id, key := range t.Payload.Keys {
		if _, err := Parse[Digest](id); err != nil || len(key) != keySize {
			return t, fmt.Errorf("reading a trust document: key %q of %d bytes: an id is 64 lower-case hex digits, a key %d bytes", clip(id), len(key), keySize)
		}
	}
	for name, f := range t.Payload.Families {
		for i, id := range f.Keys {
			if _, there := t.Payload.Keys[id]; !there || slices.Contains(f.Keys[:i], id) {
				return t, fmt.Errorf("reading a trust document: family %q names key %q, which is not among the keys, or twice", name, clip(id))
			}
		}
		if f.Threshold < 1 || f.Threshold > min(len(f.Keys), MaxSignatures) {
			return t, fmt.Errorf("reading a trust document: family %q needs %d signatures of %d keys", name, f.Threshold, len(f.Keys))
		}
	}
	return t, nil
}

// Encode writes the statement.
func (t Trust) Encode() []byte {
	t.Payload.Schema = lowest(t).step
	return encode(t)
}

// A Core is what may be read of a signed document of any version, even of a
// major that this build never heard of. It is frozen for ever.
type Core struct {
	Envelope   Step
	Component  Component
	Channel    Channel
	PromotedAt Time
}

// payloadOf reads what an envelope carries, whatever else it has.
func payloadOf(document []byte) ([]byte, error) {
	if nesting(document) > maxProbeDepth {
		return nil, fmt.Errorf("the document nests deeper than %d", maxProbeDepth)
	}
	var payload []byte
	member, _ := find(document, "payload")
	if json.Unmarshal(member, &payload) != nil {
		return nil, errors.New("the document has no payload in base64")
	}
	return payload, nil
}

// DecodeCore reads the routing core of an envelope, leniently: whatever else the
// document has, is no affair of it. Nothing in it is proven.
func DecodeCore(document []byte) (Core, error) {
	if len(document) > MaxEnvelope {
		return Core{}, fmt.Errorf("reading a routing core: the document is over %d bytes", MaxEnvelope)
	}
	var c Core
	payload, err := payloadOf(document)
	if err != nil {
		return c, fmt.Errorf("reading a routing core: %w", err)
	}
	if nesting(payload) > maxProbeDepth {
		return c, fmt.Errorf("reading a routing core: the payload nests deeper than %d", maxProbeDepth)
	}
	for _, m := range []struct {
		name string
		dst  interface{ UnmarshalText([]byte) error }
	}{{"envelope", &c.Envelope}, {"component", &c.Component}, {"channel", &c.Channel}, {"promoted_at", &c.PromotedAt}} {
		member, _ := find(payload, m.name)
		raw, err := jsontext.AppendUnquote(nil, member)
		if err == nil {
			err = m.dst.UnmarshalText(raw)
		}
		if err != nil {
			return Core{}, fmt.Errorf("reading a routing core: member %q: %w", m.name, err)
		}
	}
	return c, nil
}
