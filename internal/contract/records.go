package contract

import (
	"fmt"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"sluice/internal/outcome"
)

// Limits of plain documents.
const (
	MaxHint      = 4 << 10  // bytes of the one file root reads from the unprivileged side
	MaxRecord    = 64 << 10 // bytes of a record
	MaxHeartbeat = 64 << 10 // bytes of a heartbeat
	MaxReason    = 1 << 10  // bytes of a reason that are kept
	MaxDriftText = 16 << 10 // bytes of all that is said of drift
	MaxSerial    = 256      // bytes of control/serial
	MaxVersions  = 64       // versions whose digests are remembered
)

// Clip makes one line of valid text, of at most MaxReason bytes, out of
// anything: reasons carry what services log.
func Clip(s string) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\n", "; ")
	if len(s) <= MaxReason {
		return s
	}
	return strings.ToValidUTF8(s[:MaxReason-len("…")], "") + "…"
}

// A Hint is what verify asks root for. Only Version and PromotedAt are taken
// from it, and neither is believed.
type Hint struct {
	Schema     Step    `json:"schema"`
	Version    Version `json:"version"`
	PromotedAt Time    `json:"promoted_at"`
	Noop       bool    `json:"noop"`
	SeenAt     Time    `json:"seen_at"`
}

// DecodeHint reads a hint.
func (s Speaks) DecodeHint(data []byte) (Hint, error) {
	var h Hint
	return h, s.decode(HintLadder, data, MaxHint, &h, "schema")
}

// Encode writes a hint.
func (h Hint) Encode() []byte { return encode(h) }

// A Tuple is one promote: what outcomes are for.
type Tuple struct {
	Channel    Channel `json:"channel"`
	Version    Version `json:"version"`
	PromotedAt Time    `json:"promoted_at"`
}

// Tuple returns the promote that a pointer is.
func (p Pointer) Tuple() Tuple { return Tuple{p.Channel, p.Payload.Current.Version, p.PromotedAt} }

// Equal compares two promotes.
func (t Tuple) Equal(u Tuple) bool {
	return t.Channel == u.Channel && t.Version == u.Version && t.PromotedAt.Equal(u.PromotedAt.Time)
}

// A Record is one of root's documents, or of a program's own notes.
type Record interface{ record() }

// Seen is the watermark of each channel.
type Seen struct {
	Schema   Step              `json:"schema"`
	Channels map[Channel]Water `json:"channels"`
}

// Water is the newest promote root has verified on a channel, and who vouched
// for it.
type Water struct {
	PromotedAt Time     `json:"promoted_at"`
	Trust      int      `json:"trust"`
	KeyIDs     []string `json:"keyids"`
}

// A Build is one set, and the promote that brought it.
type Build struct {
	Tuple
	ManifestSHA256 Digest `json:"manifest_sha256"`
}

// Same reports whether two builds are the same bytes, whatever promote
// brought them.
func (b Build) Same(c Build) bool {
	return b.Version == c.Version && b.ManifestSHA256 == c.ManifestSHA256
}

// Applied says which set is good.
type Applied struct {
	Schema Step `json:"schema"`
	Build
	At Time `json:"at"`
}

// Staged says what apply may converge to.
type Staged struct {
	Schema Step `json:"schema"`
	Build
}

// Versions remembers the manifest digest that each version had.
type Versions struct {
	Schema   Step       `json:"schema"`
	Versions VersionLog `json:"versions"`
}

// A VersionLog is a JSON object whose order is that of first sight, so that
// the oldest can be forgotten first.
type VersionLog []VersionEntry

// A VersionEntry is one version and what it was.
type VersionEntry struct {
	Version        Version
	ManifestSHA256 Digest
}

// Find returns the digest that a version had.
func (l VersionLog) Find(v Version) (Digest, bool) {
	for _, e := range l {
		if e.Version == v {
			return e.ManifestSHA256, true
		}
	}
	return "", false
}

// With returns l with one more entry, and the oldest that keep does not hold
// on to forgotten when there are more than MaxVersions.
func (l VersionLog) With(v Version, d Digest, keep func(Version) bool) VersionLog {
	if _, known := l.Find(v); known {
		return l
	}
	out := append(slices.Clone(l), VersionEntry{v, d})
	for i := 0; i < len(out)-1 && len(out) > MaxVersions; {
		if keep(out[i].Version) {
			i++
			continue
		}
		out = slices.Delete(out, i, i+1)
	}
	return out
}

// MarshalJSONTo writes the object in its order.
func (l VersionLog) MarshalJSONTo(e *jsontext.Encoder) error {
	if err := e.WriteToken(jsontext.BeginObject); err != nil {
		return err
	}
	for _, v := range l {
		if err := e.WriteToken(jsontext.String(string(v.Version))); err != nil {
			return err
		}
		if err := e.WriteToken(jsontext.String(string(v.ManifestSHA256))); err != nil {
			return err
		}
	}
	return e.WriteToken(jsontext.EndObject)
}

// UnmarshalJSONFrom reads the object in its order.
func (l *VersionLog) UnmarshalJSONFrom(d *jsontext.Decoder) error {
	t, err := d.ReadToken()
	if err != nil {
		return err
	}
	if t.Kind() != '{' {
		return fmt.Errorf("versions is no object")
	}
	out := VersionLog{}
	for d.PeekKind() == '"' {
		var e VersionEntry
		if err := json.UnmarshalDecode(d, &e.Version); err != nil {
			return err
		}
		if d.PeekKind() == 'n' {
			return fmt.Errorf("version %s is null", e.Version)
		}
		if err := json.UnmarshalDecode(d, &e.ManifestSHA256); err != nil {
			return err
		}
		out = append(out, e)
	}
	*l = out
	_, err = d.ReadToken()
	return err
}

// A Phase is how far a transaction has come. internal/apply/phases.go says
// what each means.
type Phase string

// A Journal is the open transaction.
type Journal struct {
	Schema    Step      `json:"schema"`
	ID        string    `json:"id"`
	Component Component `json:"component"`
	Phase     Phase     `json:"phase"`
	Node      string    `json:"node"` // the node that is being changed, or ""
	Target    Build     `json:"target"`
	Good      *Build    `json:"good,omitzero"` // absent: a first install
	WasActive []string  `json:"was_active"`
	Reason    string    `json:"reason"`
	Tries     int       `json:"tries"`
	StartedAt Time      `json:"started_at"`
	BootID    string    `json:"boot_id"`
}

// A Result is how the last promote ended here.
type Result struct {
	Schema Step `json:"schema"`
	Tuple
	Outcome outcome.Outcome `json:"outcome"`
	Reason  string          `json:"reason"`
	Attempt int             `json:"attempt"`
	Config  Digest          `json:"config"` // of the component's .conf
	At      Time            `json:"at"`
	TookMS  int64           `json:"took_ms"`
	DownMS  int64           `json:"down_ms"` // last good answer to first one after the restart; -1 if no probe could tell
}

// Word returns the stable word that the reason starts with.
func (r Result) Word() outcome.Word {
	for i := range len(r.Reason) {
		if r.Reason[i] == ':' {
			return outcome.Word(r.Reason[:i])
		}
	}
	return outcome.Word(r.Reason)
}

// Terminal reports whether the promote is not to be tried again. config is
// the digest of the component's .conf now: foreign-file is a fact about this
// box, which its owner may have mended.
func (r Result) Terminal(config Digest) bool {
	if r.Outcome == outcome.Refused && r.Word() == outcome.ForeignFile && r.Config != config {
		return false
	}
	return outcome.Terminal(r.Outcome, r.Word(), r.Attempt)
}

// A Trial is a self-update of the pipeline that has yet to prove itself in use:
// it ends when the new pipeline has brought a request to its end.
type Trial struct {
	Schema     Step    `json:"schema"`
	Version    Version `json:"version"`         // on trial
	Prior      Version `json:"prior"`           // the last that proved itself: what is put back
	PromotedAt Time    `json:"promoted_at"`     // of the promote that is on trial
	UptimeS    int64   `json:"uptime_s"`        // seconds that the box has been up since, as heal counts them
	Proved     bool    `json:"proved,omitzero"` // stage has had its part of the proof; apply's is left
}

// A Drift says what of a component is not as it was made. A damaged good set is
// fetched again.
type Drift struct {
	Schema     Step       `json:"schema"`
	At         Time       `json:"at"`
	SetDamaged bool       `json:"set_damaged"`
	Refs       []DriftRef `json:"refs"`
}

// A DriftRef is one thing that has drifted.
type DriftRef struct {
	Ref   string `json:"ref"`
	State string `json:"state"`
	Text  string `json:"text"`
}

// A Verdict is what verify thinks of a download. It comes from the
// unprivileged side.
type Verdict struct {
	Schema     Step     `json:"schema"`
	Version    Version  `json:"version"`
	PromotedAt Time     `json:"promoted_at"`
	Key        string   `json:"key"`
	SHA256     Digest   `json:"sha256"`
	Verdict    string   `json:"verdict"` // good, bad or deferred
	Reason     string   `json:"reason"`
	Warnings   []string `json:"warnings"`
	Attempt    int      `json:"attempt"`
}

// A Pending is what fetch waits for: its own notes, for its next life.
type Pending struct {
	Schema Step `json:"schema"`
	Tuple
	WaitedMS   int64 `json:"waited_ms"`  // of the box's part of the spread
	Asked      bool  `json:"asked"`      // fetched has been raised for it
	Attempts   int   `json:"attempts"`   // how often it was asked for again after deferred
	Downloaded int64 `json:"downloaded"` // bytes
}

func (Seen) record()     {}
func (Applied) record()  {}
func (Staged) record()   {}
func (Versions) record() {}
func (Journal) record()  {}
func (Result) record()   {}
func (Drift) record()    {}
func (Trial) record()    {}
func (Verdict) record()  {}
func (Pending) record()  {}

// DecodeRecord reads a record into v, a pointer to one.
func (s Speaks) DecodeRecord(data []byte, v any) error {
	return s.decode(RecordsLadder, data, MaxRecord, v, "schema")
}

// CheckRecord is the version check of a record that may not decode at all; what
// tells no version is not this check's affair.
func (s Speaks) CheckRecord(data []byte) error {
	if found, ok := probe(data, "schema"); ok {
		return s.Check(RecordsLadder, found)
	}
	return nil
}

// EncodeRecord writes a record.
func EncodeRecord(r Record) []byte { return encode(r) }

// A Heartbeat is what a box publishes of itself.
type Heartbeat struct {
	Schema     Step                          `json:"schema"`
	Label      Label                         `json:"label"`
	Fleet      string                        `json:"fleet"`
	Platform   Platform                      `json:"platform"`
	At         Time                          `json:"at"`
	Speaks     Speaks                        `json:"speaks"`
	Components map[Component]ComponentStatus `json:"components"`
}

// A ComponentStatus is one component of a heartbeat, or of `sluice box`.
type ComponentStatus struct {
	Channel    string        `json:"channel"` // "" if the box's configuration can't be read
	Running    string        `json:"running"` // "" if nothing is applied
	Target     string        `json:"target"`  // "" if no pointer has been read
	Pending    string        `json:"pending"` // what is waited for, in words
	Held       bool          `json:"held"`
	Result     *Result       `json:"result,omitzero"`
	Downloaded int64         `json:"downloaded"` // bytes, for the last promote
	Journal    *JournalBrief `json:"journal,omitzero"`
	Trial      *Trial        `json:"trial,omitzero"` // component sluice, while a self-update is on trial
	Drift      *Drift        `json:"drift,omitzero"` // what is not as the good build made it
	Front      *Verdict      `json:"front,omitzero"` // said by the unprivileged side
}

// A JournalBrief is what others see of an open transaction.
type JournalBrief struct {
	Phase Phase  `json:"phase"`
	Node  string `json:"node"`
	Tries int    `json:"tries"`
}

// DecodeHeartbeat reads a heartbeat.
func (s Speaks) DecodeHeartbeat(data []byte) (Heartbeat, error) {
	var h Heartbeat
	return h, s.decode(HeartbeatLadder, data, MaxHeartbeat, &h, "schema")
}

// Encode writes a heartbeat.
func (h Heartbeat) Encode() []byte { return encode(h) }

// A Deployment is the file that boxes are enrolled with.
type Deployment struct {
	Schema     Step                  `json:"schema"`
	Store      string                `json:"store"`
	Fleet      string                `json:"fleet"`
	Label      Label                 `json:"label,omitzero"`
	Trust      Envelope              `json:"trust"`
	Components map[Component]Channel `json:"components"`
	Watermarks map[Component]Water   `json:"watermarks,omitzero"`
}

// DecodeDeployment reads a deployment. Its trust document is not yet proven.
func (s Speaks) DecodeDeployment(data []byte) (Deployment, error) {
	var d Deployment
	return d, s.decode(TrustLadder, data, MaxEnvelope, &d, "schema")
}

// Encode writes a deployment.
func (d Deployment) Encode() []byte { return encode(d) }

// Tokens are the hashes of the tokens that a door knows.
type Tokens struct {
	Schema Step             `json:"schema"`
	Tokens map[Digest]Token `json:"tokens"` // SHA-256 of the token
}

// A Token says which box a token is of.
type Token struct {
	Label Label  `json:"label"`
	Fleet string `json:"fleet"` // "" for a box of the whole store's own
	At    Time   `json:"at"`    // when it was made
}

// DecodeTokens reads tokens of at most limit bytes.
func (s Speaks) DecodeTokens(data []byte, limit int) (Tokens, error) {
	var t Tokens
	return t, s.decode(RecordsLadder, data, limit, &t, "schema")
}

// Encode writes tokens.
func (t Tokens) Encode() []byte { return encode(t) }

// EncodeJSON writes anything that a program prints under --json.
func EncodeJSON(v any) []byte { return encode(v) }
