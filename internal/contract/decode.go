package contract

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// How deep a document may nest. Ours nest at most eight deep; one that is only asked for
// its version may be of a build to come.
const (
	maxDepth      = 32
	maxProbeDepth = 256
)

// strictDecode fills v from data: one object, no trailing bytes, no unknown,
// duplicate, wrong-case, missing or null member. A member is required unless
// its tag says omitzero. It returns the newest member that is there.
func strictDecode(data []byte, v any) (newest, error) {
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return newest{}, errors.New("it begins with a byte-order mark")
	}
	if nesting(data) > maxDepth {
		return newest{}, fmt.Errorf("it nests deeper than %d", maxDepth)
	}
	// First what is missing: thousands of empty members would be large ones once
	// they are decoded.
	n := newest{step: One}
	if err := n.whole(jsontext.NewDecoder(bytes.NewBuffer(data)), reflect.TypeOf(v).Elem(), ""); err != nil {
		return n, err
	}
	if err := json.Unmarshal(data, v, json.RejectUnknownMembers(true)); err != nil {
		return n, tidy(err)
	}
	return n, nil
}

// sinceTag marks a member that a later minor of its ladder added: `since:"1.2"`.
const sinceTag = "since"

// A newest is the newest member that a document uses, and the minor that brought
// it.
type newest struct {
	step   Step
	member string
}

func (n *newest) use(field reflect.StructField, where string) {
	tag, ok := field.Tag.Lookup(sinceTag)
	if !ok {
		return
	}
	var s Step
	if err := s.UnmarshalText([]byte(tag)); err != nil {
		panic("contract: " + field.Name + ": " + err.Error()) // a mistake in a type of this package
	}
	if n.step.before(s) {
		*n = newest{s, where}
	}
}

// lowest says the lowest step of its ladder that a document of ours can be stamped
// with: whoever reads no more than that can read it.
func lowest(v any) newest {
	n := newest{step: One}
	if err := n.whole(jsontext.NewDecoder(bytes.NewBuffer(encode(v))), reflect.TypeOf(v), ""); err != nil {
		panic(fmt.Sprintf("contract: a document of ours is not whole: %v", err))
	}
	return n
}

// tidy makes one line of what the library says.
func tidy(err error) error {
	if err == nil {
		return nil
	}
	s := strings.TrimPrefix(err.Error(), "json: ")
	return errors.New(strings.TrimPrefix(s, "jsontext: "))
}

// nesting is how deep a document nests, whatever else is wrong with it. It needs
// no memory: that of the library grows with the depth.
func nesting(data []byte) int {
	depth, deepest, quoted := 0, 0, false
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
			deepest = max(deepest, depth)
		case c == '}' || c == ']':
			depth--
		}
	}
	return deepest
}

var (
	textType = reflect.TypeFor[interface{ UnmarshalText([]byte) error }]()
	jsonType = reflect.TypeFor[json.UnmarshalerFrom]()
)

// whole finds nulls and missing members, which the library lets pass, and unknown
// ones. It goes through the document once, and keeps nothing of it.
func (n *newest) whole(d *jsontext.Decoder, t reflect.Type, where string) error {
	kind := d.PeekKind()
	if kind == 'n' {
		return fmt.Errorf("%s is null", orDocument(where))
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	p := reflect.PointerTo(t)
	leaf := p.Implements(textType) || p.Implements(jsonType) || t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8
	switch {
	case !leaf && kind == '[' && t.Kind() == reflect.Slice:
		return n.items(d, t.Elem(), where)
	case !leaf && kind == '{' && (t.Kind() == reflect.Map || t.Kind() == reflect.Struct):
		return n.members(d, t, where)
	}
	return tidy(d.SkipValue()) // a leaf; or of a wrong type, as the library says better
}

func (n *newest) items(d *jsontext.Decoder, t reflect.Type, where string) error {
	if _, err := d.ReadToken(); err != nil {
		return tidy(err)
	}
	for i := 0; d.PeekKind() != ']'; i++ {
		if err := n.whole(d, t, fmt.Sprintf("%s[%d]", where, i)); err != nil {
			return err
		}
	}
	_, err := d.ReadToken()
	return tidy(err)
}

func (n *newest) members(d *jsontext.Decoder, t reflect.Type, where string) error {
	if _, err := d.ReadToken(); err != nil {
		return tidy(err)
	}
	var there []string
	for d.PeekKind() != '}' {
		name, err := d.ReadToken()
		if err != nil {
			return tidy(err)
		}
		at := strings.TrimPrefix(where+"."+name.String(), ".")
		elem := t
		if t.Kind() == reflect.Map {
			elem = t.Elem()
		} else {
			field, known := member(t, name.String())
			if !known {
				return fmt.Errorf("%s has an unknown member %q", orDocument(where), clip(name.String()))
			}
			there, elem = append(there, name.String()), field.Type
			n.use(field, at)
		}
		if err := n.whole(d, elem, at); err != nil {
			return err
		}
	}
	if _, err := d.ReadToken(); err != nil {
		return tidy(err)
	}
	if t.Kind() == reflect.Map {
		return nil
	}
	return missing(t, there, where)
}

// member finds a member by its name in a struct, or in one that is embedded: its
// members stand in the same object.
func member(t reflect.Type, name string) (reflect.StructField, bool) {
	for i := range t.NumField() {
		field := t.Field(i)
		if field.Anonymous {
			if f, ok := member(field.Type, name); ok {
				return f, true
			}
		} else if tag, _, _ := strings.Cut(field.Tag.Get("json"), ","); tag == name {
			return field, true
		}
	}
	return reflect.StructField{}, false
}

func missing(t reflect.Type, there []string, where string) error {
	for i := range t.NumField() {
		field := t.Field(i)
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if field.Anonymous {
			if err := missing(field.Type, there, where); err != nil {
				return err
			}
		} else if !strings.Contains(options, "omitzero") && !slices.Contains(there, name) {
			return fmt.Errorf("%s has no member %q", orDocument(where), name)
		}
	}
	return nil
}

func orDocument(where string) string {
	if where == "" {
		return "the document"
	}
	return where
}

// find returns one member of an object, by the names on the way to it. It keeps
// nothing of the others.
func find(data []byte, names ...string) (jsontext.Value, bool) {
	for _, name := range names {
		d := jsontext.NewDecoder(bytes.NewBuffer(data))
		if t, err := d.ReadToken(); err != nil || t.Kind() != '{' {
			return nil, false
		}
		var found jsontext.Value
		for d.PeekKind() == '"' {
			t, err := d.ReadToken()
			if err != nil {
				return nil, false
			}
			if t.String() != name {
				if d.SkipValue() != nil {
					return nil, false
				}
				continue
			}
			v, err := d.ReadValue()
			if err != nil {
				return nil, false
			}
			found = v.Clone()
			break
		}
		if found == nil {
			return nil, false
		}
		data = found
	}
	return data, true
}

// encode writes a document: deterministic, indented by two, one newline.
func encode(v any) []byte {
	data, err := json.Marshal(v, json.Deterministic(true), jsontext.WithIndent("  "), jsontext.AllowInvalidUTF8(true))
	if err != nil {
		panic(fmt.Sprintf("contract: a document of ours can't be written: %v", err)) // a mistake in a type of this package
	}
	return append(data, '\n')
}
