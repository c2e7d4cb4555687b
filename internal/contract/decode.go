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
// its tag says omitzero.
func strictDecode(data []byte, v any) error {
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		return errors.New("it begins with a byte-order mark")
	}
	if err := depth(data); err != nil {
		return err
	}
	if err := json.Unmarshal(data, v, json.RejectUnknownMembers(true)); err != nil {
		return tidy(err)
	}
	return whole(data, reflect.TypeOf(v).Elem(), "")
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
func whole(data []byte, t reflect.Type, where string) error {
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
			if err := whole(item, t.Elem(), fmt.Sprintf("%s[%d]", where, i)); err != nil {
				return err
			}
		}
	case reflect.Map:
		members, err := object(data)
		if err != nil {
			return err
		}
		for name, m := range members {
			if err := whole(m, t.Elem(), where+"."+name); err != nil {
				return err
			}
		}
	case reflect.Struct:
		members, err := object(data)
		if err != nil {
			return err
		}
		return wholeStruct(members, t, where)
	}
	return nil
}

func wholeStruct(members map[string]jsontext.Value, t reflect.Type, where string) error {
	for i := range t.NumField() {
		field := t.Field(i)
		if field.Anonymous { // its members stand in the same object
			if err := wholeStruct(members, field.Type, where); err != nil {
				return err
			}
			continue
		}
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		m, there := members[name]
		switch {
		case there:
			if err := whole(m, field.Type, strings.TrimPrefix(where+"."+name, ".")); err != nil {
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

// encode writes a document: deterministic, indented by two, one newline.
func encode(v any) []byte {
	data, err := json.Marshal(v, json.Deterministic(true), jsontext.WithIndent("  "), jsontext.AllowInvalidUTF8(true))
	if err != nil {
		panic(fmt.Sprintf("contract: a document of ours can't be written: %v", err)) // a mistake in a type of this package
	}
	return append(data, '\n')
}
