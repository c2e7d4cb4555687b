package contract

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// maxDepth is how deep a document may nest. Ours nest seven deep.
const maxDepth = 32

// strictDecode fills v from data: one object, no trailing bytes, no unknown,
// duplicate, wrong-case, missing or null member. A member is required unless
// its tag says omitzero. It returns the newest member that is there.
func strictDecode(data []byte, v any) (newest, error) {
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return newest{}, errors.New("it begins with a byte-order mark")
	}
	if err := depth(data); err != nil {
		return newest{}, err
	}
	if err := json.Unmarshal(data, v, json.RejectUnknownMembers(true)); err != nil {
		return newest{}, tidy(err)
	}
	n := newest{step: One}
	return n, n.whole(data, reflect.TypeOf(v).Elem(), "")
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
	if err := n.whole(encode(v), reflect.TypeOf(v), ""); err != nil {
		panic(fmt.Sprintf("contract: a document of ours is not whole: %v", err))
	}
	return n
}

// tidy makes one line of what the library says.
func tidy(err error) error {
	s := strings.TrimPrefix(err.Error(), "json: ")
	return errors.New(strings.TrimPrefix(s, "jsontext: "))
}

func depth(data []byte) error {
	d := jsontext.NewDecoder(bytes.NewReader(data))
	for {
		if _, err := d.ReadToken(); err != nil {
			return nil // the end, or something that Unmarshal says better
		}
		if d.StackDepth() > maxDepth {
			return fmt.Errorf("it nests deeper than %d", maxDepth)
		}
	}
}

var (
	textType = reflect.TypeFor[interface{ UnmarshalText([]byte) error }]()
	jsonType = reflect.TypeFor[json.UnmarshalerFrom]()
)

// whole finds nulls and missing members, which the library lets pass.
func (n *newest) whole(data []byte, t reflect.Type, where string) error {
	if string(bytes.TrimSpace(data)) == "null" {
		return fmt.Errorf("%s is null", orDocument(where))
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if p := reflect.PointerTo(t); p.Implements(textType) || p.Implements(jsonType) || t == reflect.TypeFor[jsontext.Value]() {
		return nil
	}
	switch t.Kind() {
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return nil
		}
		var items []jsontext.Value
		if err := json.Unmarshal(data, &items); err != nil {
			return tidy(err)
		}
		for i, item := range items {
			if err := n.whole(item, t.Elem(), fmt.Sprintf("%s[%d]", where, i)); err != nil {
				return err
			}
		}
	case reflect.Map:
		members, err := object(data)
		if err != nil {
			return err
		}
		for name, m := range members {
			if err := n.whole(m, t.Elem(), where+"."+name); err != nil {
				return err
			}
		}
	case reflect.Struct:
		members, err := object(data)
		if err != nil {
			return err
		}
		return n.wholeStruct(members, t, where)
	}
	return nil
}

func (n *newest) wholeStruct(members map[string]jsontext.Value, t reflect.Type, where string) error {
	for i := range t.NumField() {
		field := t.Field(i)
		if field.Anonymous { // its members stand in the same object
			if err := n.wholeStruct(members, field.Type, where); err != nil {
				return err
			}
			continue
		}
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		m, there := members[name]
		switch {
		case there:
			at := strings.TrimPrefix(where+"."+name, ".")
			n.use(field, at)
			if err := n.whole(m, field.Type, at); err != nil {
				return err
			}
		case !strings.Contains(options, "omitzero"):
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

func object(data []byte) (map[string]jsontext.Value, error) {
	var m map[string]jsontext.Value
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, tidy(err)
	}
	return m, nil
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
