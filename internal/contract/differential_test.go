package contract

import (
	"bytes"
	stdjson "encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// A tree is a JSON document as the standard library's tokenizer sees it, with
// its members in their order: made without the decoder that is tested.
type tree struct {
	names  []string // of an object's members
	kids   []*tree
	kind   byte   // '{', '[', or 0
	scalar string // as it is written
}

func parseTree(t *testing.T, data string) *tree {
	t.Helper()
	d := stdjson.NewDecoder(strings.NewReader(data))
	d.UseNumber()
	var value func() *tree
	value = func() *tree {
		token, err := d.Token()
		if err != nil {
			t.Fatal(err)
		}
		switch v := token.(type) {
		case stdjson.Delim:
			n := &tree{kind: byte(v)}
			for d.More() {
				if v == '{' {
					name, err := d.Token()
					if err != nil {
						t.Fatal(err)
					}
					n.names = append(n.names, name.(string))
				}
				n.kids = append(n.kids, value())
			}
			if _, err := d.Token(); err != nil {
				t.Fatal(err)
			}
			return n
		default:
			text, err := stdjson.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			return &tree{scalar: string(text)}
		}
	}
	return value()
}

// write writes the tree, with white space where JSON lets it be.
func (n *tree) write(b *strings.Builder, r *rand.Rand) {
	space := func() { b.WriteString([]string{"", "", " ", "\n", "\t", "\r\n"}[r.IntN(6)]) }
	space()
	switch n.kind {
	case 0:
		b.WriteString(n.scalar)
	default:
		b.WriteByte(n.kind)
		for i, k := range n.kids {
			if i > 0 {
				b.WriteByte(',')
			}
			if n.kind == '{' {
				space()
				name, _ := stdjson.Marshal(n.names[i])
				b.Write(name)
				space()
				b.WriteByte(':')
			}
			k.write(b, r)
		}
		space()
		b.WriteByte(n.kind + 2) // } or ]
	}
	space()
}

func (n *tree) clone() *tree {
	c := &tree{slices.Clone(n.names), nil, n.kind, n.scalar}
	for _, k := range n.kids {
		c.kids = append(c.kids, k.clone())
	}
	return c
}

// all are the nodes of a tree that pass.
func (n *tree) all(pass func(*tree) bool) []*tree {
	var out []*tree
	if pass(n) {
		out = append(out, n)
	}
	for _, k := range n.kids {
		out = append(out, k.all(pass)...)
	}
	return out
}

func pick[T any](r *rand.Rand, from []T) (T, bool) {
	if len(from) == 0 {
		var none T
		return none, false
	}
	return from[r.IntN(len(from))], true
}

// optional are the members that a document may do without, or whose names are
// data; said here once more, so that the types are not their own judge.
var optional = strings.Fields(`deltas expires_at refreshed_at version_command version_text units gate needs reads enable inert restart quiesce inputs
	pass_within soak probes tcp http status exec good proved result journal trial front label watermarks`)

// fixed reports whether all members of an object are of its form: those of a map
// are data.
func fixed(n *tree) bool {
	return n.kind == '{' && len(n.names) > 0 && !slices.ContainsFunc(n.names, func(s string) bool {
		return strings.ContainsAny(s, "-0123456789.") && !strings.Contains(s, "sha256") || slices.Contains([]string{"stable", "edge", "base", "sluice", "pointer", "records"}, s) ||
			s == "envelope" && slices.Contains(n.names, "pointer")
	})
}

// A mutation makes a document that must not be accepted, or that must still be.
type mutation struct {
	name string
	good bool
	do   func(r *rand.Rand, root *tree) bool // reports whether it found something to do
	text func(r *rand.Rand, doc string) string
}

func onTree(good bool, name string, do func(r *rand.Rand, root *tree) bool) mutation {
	return mutation{name, good, do, nil}
}

func onText(name string, text func(r *rand.Rand, doc string) string) mutation {
	return mutation{name, false, nil, text}
}

var mutations = []mutation{
	onTree(true, "members in another order", func(r *rand.Rand, root *tree) bool {
		for _, n := range root.all(fixed) {
			r.Shuffle(len(n.kids), func(i, j int) {
				n.kids[i], n.kids[j], n.names[i], n.names[j] = n.kids[j], n.kids[i], n.names[j], n.names[i]
			})
		}
		return true
	}),
	onTree(true, "escaped characters", func(r *rand.Rand, root *tree) bool {
		for _, n := range root.all(func(n *tree) bool {
			return strings.HasPrefix(n.scalar, `"`) && len(n.scalar) > 2 && n.scalar[1] != '\\'
		}) {
			n.scalar = fmt.Sprintf(`"\u%04x%s`, n.scalar[1], n.scalar[2:])
		}
		return true
	}),
	onTree(false, "duplicate member", func(r *rand.Rand, root *tree) bool {
		n, ok := pick(r, root.all(func(n *tree) bool { return n.kind == '{' && len(n.kids) > 0 }))
		if ok {
			i := r.IntN(len(n.kids))
			n.names, n.kids = append(n.names, n.names[i]), append(n.kids, n.kids[i].clone())
		}
		return ok
	}),
	onTree(false, "case-folded member", func(r *rand.Rand, root *tree) bool {
		n, ok := pick(r, root.all(fixed))
		if ok {
			i := r.IntN(len(n.names))
			at := r.IntN(len(n.names[i]))
			folded := n.names[i][:at] + strings.ToUpper(n.names[i][at:at+1]) + n.names[i][at+1:]
			ok = folded != n.names[i]
			n.names[i] = folded
		}
		return ok
	}),
	onTree(false, "unknown member", func(r *rand.Rand, root *tree) bool {
		n, ok := pick(r, root.all(fixed))
		if ok {
			i := r.IntN(len(n.names) + 1)
			n.names, n.kids = slices.Insert(n.names, i, "novel"), slices.Insert(n.kids, i, &tree{scalar: "1"})
		}
		return ok
	}),
	onTree(false, "missing member", func(r *rand.Rand, root *tree) bool {
		n, ok := pick(r, root.all(fixed))
		if ok {
			i := r.IntN(len(n.names))
			if slices.Contains(optional, n.names[i]) {
				return false
			}
			n.names, n.kids = slices.Delete(n.names, i, i+1), slices.Delete(n.kids, i, i+1)
		}
		return ok
	}),
	onTree(false, "null", func(r *rand.Rand, root *tree) bool {
		n, ok := pick(r, root.all(func(*tree) bool { return true }))
		if ok {
			*n = tree{scalar: "null"}
		}
		return ok
	}),
	onTree(false, "wrong type", func(r *rand.Rand, root *tree) bool {
		n, _ := pick(r, root.all(func(*tree) bool { return true }))
		switch {
		case n.kind == '{':
			*n = tree{kind: '[', kids: []*tree{{scalar: "1"}}}
		case n.kind == '[':
			*n = tree{scalar: `"x"`}
		case n.scalar[0] == '"':
			*n = tree{scalar: "true"}
		default:
			*n = tree{scalar: `"1"`}
		}
		return true
	}),
	onTree(false, "deep nesting", func(r *rand.Rand, root *tree) bool {
		n, _ := pick(r, root.all(func(*tree) bool { return true }))
		for range []int{33, 100, 5000}[r.IntN(3)] {
			*n = tree{kind: []byte("[{")[r.IntN(2)], names: []string{"a"}, kids: []*tree{n.shallow()}}
		}
		return true
	}),
	onTree(false, "huge number", func(r *rand.Rand, root *tree) bool {
		n, ok := pick(r, root.all(func(n *tree) bool { return n.kind == 0 && strings.ContainsAny(n.scalar[:1], "-0123456789") }))
		if ok {
			n.scalar = []string{"1e400", "9223372036854775808", "-9223372036854775809", "1" + strings.Repeat("0", 3000), "1.5", "0.1e-999"}[r.IntN(6)]
		}
		return ok
	}),
	onText("trailing data", func(r *rand.Rand, doc string) string {
		return doc + []string{"{}", "x", "null", doc, "\x00", ","}[r.IntN(6)]
	}),
	onText("leading data", func(r *rand.Rand, doc string) string { return []string{"x", "[", ",", "\x00"}[r.IntN(4)] + doc }),
	onText("byte-order mark", func(r *rand.Rand, doc string) string {
		return []string{"\xef\xbb\xbf", "\xfe\xff", "\xff\xfe"}[r.IntN(3)] + doc
	}),
	onText("invalid UTF-8", func(r *rand.Rand, doc string) string {
		at := strings.Index(doc, `"`) + 1 + r.IntN(3)
		return doc[:at] + []string{"\xff", "\xc0\xaf", "\xed\xa0\x80"}[r.IntN(3)] + doc[at:]
	}),
	onText("cut short", func(r *rand.Rand, doc string) string {
		return strings.TrimSpace(doc)[:r.IntN(len(strings.TrimSpace(doc)))]
	}),
	onText("one byte gone wrong", func(r *rand.Rand, doc string) string {
		i := strings.IndexAny(doc, "{}:,")
		if i < 0 {
			return doc + "%"
		}
		return doc[:i] + "%" + doc[i+1:]
	}),
}

func (n *tree) shallow() *tree { c := *n; return &c }

// maxMemory is the most that decoding one document may take.
const maxMemory = 4 << 20

// Thousands of documents, sound and not: one is accepted when the version check
// and the strict decoder both say so. None makes a decoder panic, or take more than
// its share of memory.
func TestDecodersAgreeWithTheirRules(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	docs := goldens(t)
	const rounds = 600 // of each golden document
	accepted, refused, most := 0, 0, uint64(0)
	for _, g := range docs {
		root := parseTree(t, g.data)
		for range rounds {
			n, names, good := root.clone(), []string{}, true
			var texts []mutation
			for range 1 + r.IntN(3) {
				m := mutations[r.IntN(len(mutations))]
				if !good && !m.good && m.text == nil {
					continue // two wrongs may make a right: a member that is there twice, and then is not
				}
				if m.text != nil {
					texts = []mutation{m}
				} else if !m.do(r, n) {
					continue
				}
				names, good = append(names, m.name), good && m.good
			}
			var b strings.Builder
			n.write(&b, r)
			doc := b.String()
			for _, m := range texts {
				doc = m.text(r, doc)
			}
			used, err := measured(func() error { return readers[g.name](Spoken, []byte(doc)) })
			most = max(most, used)
			if (err == nil) != good {
				t.Fatalf("%s with %q: %v\n%.2000s", g.name, names, err, doc)
			}
			if g.name != "manifest" && used > maxMemory {
				t.Errorf("%s with %q: %d bytes of memory for a document of %d", g.name, names, used, len(doc))
			}
			if err != nil {
				refused++
				continue
			}
			accepted++
			if !utf8.ValidString(doc) || !stdjson.Valid([]byte(doc)) {
				t.Errorf("%s: accepted, and the standard library says that it is no JSON: %q", g.name, doc)
			}
		}
		// Whatever its version says is asked first: the strict decoder has no say then.
		if g.name == "envelope" {
			continue
		}
		for _, step := range []Step{{1, 9}, {2, 0}, {0, 1}} {
			err := readers[g.name](Spoken, []byte(stamp(g.data, "schema", step)))
			var up *UpgradeError
			if !errors.As(err, &up) {
				t.Errorf("%s stamped %s: %v", g.name, step, err)
			}
		}
	}
	t.Logf("%d accepted, %d refused, at most %d bytes of memory", accepted, refused, most)
	if accepted < 500 || refused < 5000 {
		t.Errorf("%d accepted, %d refused: too few of one kind to say anything", accepted, refused)
	}
}

// measured returns what a call allocated in all, which is more than it ever held.
func measured(do func() error) (uint64, error) {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc, err
}

// What is made to be dear to decode, at the limit and over it.
func TestDecodersAreFrugal(t *testing.T) {
	full := func(begin, part, end string) []byte {
		n := (MaxEnvelope - len(begin) - len(end)) / len(part)
		return []byte(begin + strings.Repeat(part, n) + end)
	}
	members := func(begin, value string) []byte {
		var b bytes.Buffer
		b.WriteString(begin)
		for i := 0; b.Len() < MaxEnvelope-len(value)-20; i++ {
			fmt.Fprintf(&b, `"%x":%s,`, i, value)
		}
		b.WriteString(`"z":1}`)
		return append(b.Bytes(), bytes.Repeat([]byte("}"), strings.Count(begin, "{")-1)...)
	}
	audit := func() []byte {
		p := withExpiry(withDeltas(samplePointer()))
		for len(p.Encode()) < MaxEnvelope-2000 && len(p.Payload.Audit) < MaxAudit {
			p.Payload.Audit = append(p.Payload.Audit, Audit{"promote", "1", "2", strings.Repeat("é", 300), at, strings.Repeat("0", 32)})
		}
		return p.Encode()
	}
	for name, doc := range map[string][]byte{
		"one member after another":    members("{", "1"),
		"objects in objects":          members(`{"payload":{"current":{"artifacts":{`, "{}"),
		"empty history":               full(`{"payload":{"history":[`, "{},", "{}]}}"),
		"empty strings":               full(`{"a":[`, `"",`, `""]}`),
		"an escape after another":     full(`{"a":"`, `\u0001`, `"}`),
		"as deep as it goes":          full("", `{"payload":`, ""),
		"arrays as deep as they go":   full("", "[", ""),
		"a number without an end":     full(`{"schema":`, "9", "}"),
		"nothing but space":           full("", " ", ""),
		"a pointer at its limits":     audit(),
		"an envelope full of nothing": full(`{"payloadType":"","payload":"","signatures":[`, `{"keyid":"","sig":""},`, `{"keyid":"","sig":""}]}`),
		"a payload full of A":         full(`{"payloadType":"","signatures":[],"payload":"`, "AAAA", `"}`),
		"a deep payload, as a core":   full(`{"payload":"`, "eyJh", `"}`),
	} {
		if len(doc) > MaxEnvelope {
			t.Fatalf("%s: %d bytes", name, len(doc))
		}
		for reader, read := range readers {
			if reader == "manifest" || reader == "hint" && len(doc) > MaxHint {
				continue
			}
			if used, _ := measured(func() error { return read(Spoken, doc) }); used > maxMemory {
				t.Errorf("%s, read as %s: %d bytes of memory", name, reader, used)
			}
		}
		if used, _ := measured(func() error { _, err := DecodeCore(doc); return err }); used > maxMemory {
			t.Errorf("%s, read as a core: %d bytes of memory", name, used)
		}
		over := append(slices.Clone(doc), bytes.Repeat([]byte(" "), MaxEnvelope+1-len(doc))...)
		for _, reader := range []string{"pointer", "trust", "envelope", "heartbeat", "deployment", "result", "seen"} {
			used, err := measured(func() error { return readers[reader](Spoken, over) })
			if err == nil || !strings.Contains(err.Error(), "over 65536 bytes") || used > 64<<10 {
				t.Errorf("%s, one byte over the limit, read as %s: %v, %d bytes of memory", name, reader, err, used)
			}
		}
	}
}
