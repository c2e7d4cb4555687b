package contract

import (
	"encoding/hex"
	"fmt"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/go-json-experiment/json/jsontext"
)

// A Component is the name of a thing that is updated as one.
type Component string

// A Channel says which pointer a box follows.
type Channel string

// A Version names one immutable release of a component. Versions are compared
// for equality only.
type Version string

// A Platform is GOOS-GOARCH.
type Platform string

// A Label names a box.
type Label string

// A Digest is a lower-case hex SHA-256.
type Digest string

var (
	nameForm     = regexp.MustCompile(`^[a-z][a-z0-9-]{0,31}$`)
	versionForm  = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	platformForm = regexp.MustCompile(`^[a-z0-9]{1,16}-[a-z0-9]{1,16}$`)
	labelForm    = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,62}$`)
)

// reserved names can't be components: they stand for something else in a
// path or on a command line.
var reserved = map[string]bool{
	"box": true, "trust": true, "before-sluice": true, "keygen": true, "init": true, "bundle": true,
	"update": true, "rollback": true, "status": true, "enroll": true, "why": true, "refresh": true,
	"door": true, "delta": true, "console": true, "hold": true, "resume": true, "upkeep": true, "help": true,
	"version": true, "identity": true,
}

// BeforeSluice is the version of the set that holds what was on a box before its
// first roll of a component: nobody can release it.
const BeforeSluice Version = "before-sluice"

// Reserved reports whether no release may bear this version.
func (v Version) Reserved() bool { return strings.EqualFold(string(v), string(BeforeSluice)) }

func parse[T ~string](dst *T, what, form, s string, ok bool) error {
	if !ok {
		return fmt.Errorf("%q is no %s: it must be %s", clip(s), what, form)
	}
	*dst = T(s)
	return nil
}

// clip keeps a hostile value from filling a message.
func clip(s string) string {
	const most = 80
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}

// UnmarshalText parses a component's name.
func (c *Component) UnmarshalText(b []byte) error {
	if reserved[string(b)] {
		return fmt.Errorf("%q is a reserved name: call the component something else", b)
	}
	return parse(c, "component", "a to z first, then up to 31 of a to z, 0 to 9 and -", string(b), nameForm.Match(b))
}

// UnmarshalText parses a channel's name.
func (c *Channel) UnmarshalText(b []byte) error {
	return parse(c, "channel", "a to z first, then up to 31 of a to z, 0 to 9 and -", string(b), nameForm.Match(b))
}

// Valid reports whether c is the name of a channel.
func (c Channel) Valid() bool { return nameForm.MatchString(string(c)) }

// UnmarshalText parses a version.
func (v *Version) UnmarshalText(b []byte) error {
	return parse(v, "version", "a letter or digit first, then up to 63 of letters, digits and . _ -", string(b),
		versionForm.Match(b))
}

// UnmarshalText parses a platform.
func (p *Platform) UnmarshalText(b []byte) error {
	return parse(p, "platform", "GOOS-GOARCH, as linux-amd64", string(b), platformForm.Match(b))
}

// UnmarshalText parses the name of a box.
func (l *Label) UnmarshalText(b []byte) error {
	return parse(l, "label", "a to z or 0 to 9 first, then up to 62 of a to z, 0 to 9, . and -", string(b), labelForm.Match(b))
}

// UnmarshalText parses a digest.
func (d *Digest) UnmarshalText(b []byte) error {
	raw, err := hex.DecodeString(string(b))
	return parse(d, "digest", "64 lower-case hex digits", string(b), err == nil && len(raw) == 32 && strings.ToLower(string(b)) == string(b))
}

// Parse returns s as a name of type T, or says what is wrong with it.
func Parse[T any, P interface {
	*T
	UnmarshalText([]byte) error
}](s string) (T, error) {
	var v T
	err := P(&v).UnmarshalText([]byte(s))
	return v, err
}

// Here is the platform of this program.
func Here() Platform { return Platform(runtime.GOOS + "-" + runtime.GOARCH) }

// A Time has one form only, so that equal means equal bytes.
type Time struct{ time.Time }

// TimeForm is that form: nine digits, Z.
const TimeForm = "2006-01-02T15:04:05.000000000Z"

// At returns t as a Time: UTC, without a monotonic reading.
func At(t time.Time) Time { return Time{t.Round(0).UTC()} }

// MarshalText writes the one form.
func (t Time) MarshalText() ([]byte, error) { return []byte(t.UTC().Format(TimeForm)), nil }

// UnmarshalText reads the one form.
func (t *Time) UnmarshalText(b []byte) error {
	v, err := time.Parse(TimeForm, string(b))
	if err != nil || v.Format(TimeForm) != string(b) {
		return fmt.Errorf("%q is no time: it must look like %s", clip(string(b)), TimeForm)
	}
	t.Time = v
	return nil
}

// MarshalJSON and UnmarshalJSON hide those of time.Time, which know other forms.
func (t Time) MarshalJSON() ([]byte, error) { return []byte(`"` + t.String() + `"`), nil }

// UnmarshalJSON reads the one form.
func (t *Time) UnmarshalJSON(b []byte) error {
	s, err := jsontext.AppendUnquote(nil, b)
	if err != nil {
		return err
	}
	return t.UnmarshalText(s)
}

func (t Time) String() string { return t.UTC().Format(TimeForm) }

// A Duration is written as Go writes it: 20s, 5m.
type Duration time.Duration

// MarshalText writes d as Go does.
func (d Duration) MarshalText() ([]byte, error) { return []byte(time.Duration(d).String()), nil }

// UnmarshalText reads a duration that is not negative.
func (d *Duration) UnmarshalText(b []byte) error {
	v, err := time.ParseDuration(string(b))
	if err != nil || v < 0 {
		return fmt.Errorf("%q is no duration: it must be like 20s or 5m, and not negative", clip(string(b)))
	}
	*d = Duration(v)
	return nil
}
