package fleet

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
	"sluice/internal/store"
	"sluice/internal/trust"
)

func seeded(n byte) ed25519.PrivateKey { return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{n}, 32)) }
func public(k ed25519.PrivateKey) ed25519.PublicKey {
	return k.Public().(ed25519.PublicKey)
}

// edited is a draft in a file, that goes through several hands.
func edited(t *testing.T, s store.Store, path string, changes ...func(*contract.TrustPayload) error) Draft {
	t.Helper()
	for _, change := range changes {
		d, err := Open(context.Background(), s, path)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Edit(time.Now(), change); err != nil {
			t.Fatal(err)
		}
		if err := d.Save(path); err != nil {
			t.Fatal(err)
		}
	}
	return signed(t, path)
}

// signed signs the draft of a file, each key by itself.
func signed(t *testing.T, path string, keys ...ed25519.PrivateKey) Draft {
	t.Helper()
	for _, k := range keys {
		d, err := ReadDraft(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Sign(k); err != nil {
			t.Fatal(err)
		}
		if err := d.Save(path); err != nil {
			t.Fatal(err)
		}
	}
	d, err := ReadDraft(path)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func publish(s store.Store, d Draft, keys ...ed25519.PrivateKey) (*Publication, error) {
	p, err := Prepare(context.Background(), s, d, keys, time.Now(), false)
	if err != nil {
		return p, err
	}
	return p, p.Publish(context.Background(), time.Now())
}

// Only what was looked at is signed anew: not what a thief has promoted while the
// operator thought about it, nor what he writes at the same instant.
func TestPublishSignsWhatWasLookedAt(t *testing.T) {
	ctx := context.Background()
	for name, when := range map[string]string{"before it is read again": "before", "between reading and writing": "within"} {
		l := &lossy{}
		o := open(t, func(s store.Store) store.Store { l.Store = s; return l })
		if _, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")}); err != nil {
			t.Fatal(err)
		}
		path, alice := filepath.Join(t.TempDir(), "trust.json"), seeded(3)
		edited(t, o.Store, path, AddKey(public(alice), Families), RemoveKey(trust.KeyID(public(key)), Families))
		d := signed(t, path, key, alice)
		p, err := Prepare(ctx, o.Store, d, []ed25519.PrivateKey{alice}, time.Now(), false)
		if err != nil || len(p.Anew) != 1 {
			t.Fatalf("%d anew, %q, %v", len(p.Anew), p.Skipped, err)
		}
		evil := func() {
			t.Helper()
			p, _, err := o.Pointer(ctx, "edge", "stable")
			if err == nil {
				p.Payload.Current, p.PromotedAt = release("evil"), contract.At(p.PromotedAt.Add(1))
				_, err = store.PutBytes(ctx, l.Store, contract.PointerKey("edge", "stable", 1), trust.Sign(contract.PointerLadder, p.Encode(), key).Encode(), store.Condition{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if when == "before" {
			evil()
		} else {
			l.next = func(put func() (string, error)) (string, error) { evil(); return put() }
		}
		if err := p.Publish(ctx, time.Now()); err == nil || !strings.Contains(err.Error(), "look at the list") {
			t.Errorf("%s: %v", name, err)
		}
		obj, err := o.Store.Get(ctx, contract.PointerKey("edge", "stable", 1), contract.MaxEnvelope, "")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Set.Pointer(obj.Data, "edge", "stable"); err == nil {
			t.Errorf("%s: what nobody looked at is signed", name)
		}
	}
}

// A trust document is never written over another operator's.
func TestPublishRacesAnother(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	path := filepath.Join(t.TempDir(), "trust.json")
	edited(t, o.Store, path, AddKey(public(seeded(3)), Families))
	p, err := Prepare(ctx, o.Store, signed(t, path, key), nil, time.Now(), false)
	if err != nil {
		t.Fatal(err)
	}
	other := NewDraft(o.Trust)
	if err := other.Edit(time.Now(), AddKey(public(seeded(4)), Families)); err != nil {
		t.Fatal(err)
	}
	if err := other.Sign(key); err != nil {
		t.Fatal(err)
	}
	if _, err := publish(o.Store, other); err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(ctx, time.Now()); !errors.Is(err, store.ErrConflict) {
		t.Errorf("%v", err)
	}
	if set, err := Trust(ctx, o.Store); err != nil || set.Names(contract.PointerLadder, public(seeded(4))) != nil {
		t.Errorf("the other's document is gone: %v", err)
	}
}

// A document is made as a file, signed in several places, and counts once
// enough keys of both documents have signed it.
func TestATrustDocumentIsMade(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	promoted, err := o.Promote(ctx, "edge", "stable", Promotion{Release: release("1")})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "trust.json")
	root, alice, bob := seeded(2), seeded(3), seeded(4)
	d := edited(t, o.Store, path,
		AddKey(public(root), []contract.Ladder{contract.TrustLadder}),
		AddKey(public(alice), []contract.Ladder{contract.PointerLadder}),
		AddKey(public(bob), []contract.Ladder{contract.PointerLadder}),
		RemoveKey(trust.KeyID(public(key)), Families),
		Threshold([]contract.Ladder{contract.PointerLadder}, 2))
	if d.Document.Payload.Number != 2 || len(d.Document.Payload.Keys) != 3 || len(d.Envelope.Signatures) != 0 || !d.Document.PromotedAt.After(o.Trust.Document.PromotedAt.Time) {
		t.Fatalf("%+v", d.Document)
	}
	wants := func(err error, says string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
		if set, err := Trust(ctx, o.Store); err != nil || set.Number != 1 {
			t.Errorf("the store has document %d, %v", set.Number, err)
		}
	}
	_, err = publish(o.Store, d, alice, bob)
	wants(err, "0 of the 1 signatures that a trust document needs are by keys of trust document 1")
	_, err = publish(o.Store, signed(t, path, root, alice), alice, bob)
	wants(err, "0 of the 1 signatures that a trust document needs are by keys of trust document 1")
	_, err = publish(o.Store, signed(t, path, key), alice)
	wants(err, "give the keys that sign it anew with -key")
	p, err := publish(o.Store, signed(t, path, key), alice, bob)
	if err != nil || len(p.Anew) != 1 || len(p.Skipped) != 0 {
		t.Fatalf("%d anew, %q, %v", len(p.Anew), p.Skipped, err)
	}
	set, err := Trust(ctx, o.Store)
	if err != nil || set.Number != 2 {
		t.Fatalf("%d, %v", set.Number, err)
	}
	obj, err := o.Store.Get(ctx, contract.PointerKey("edge", "stable", 1), contract.MaxEnvelope, "")
	if err != nil {
		t.Fatal(err)
	}
	if again, err := set.Pointer(obj.Data, "edge", "stable"); err != nil || !bytes.Equal(again.Encode(), promoted.Encode()) {
		t.Errorf("the pointer is another: %v", err)
	}
	if _, err := o.Trust.Pointer(obj.Data, "edge", "stable"); err == nil {
		t.Error("the old key's signature stays on it")
	}
	// Who may promote now.
	for name, c := range map[string]struct {
		keys []ed25519.PrivateKey
		ok   bool
	}{"the old key": {[]ed25519.PrivateKey{key}, false}, "one of two": {[]ed25519.PrivateKey{alice}, false}, "one twice": {[]ed25519.PrivateKey{alice, alice}, false},
		"one, and one for trust": {[]ed25519.PrivateKey{alice, root}, false}, "both": {[]ed25519.PrivateKey{alice, bob}, true}} {
		if _, err := NewOperator(ctx, o.Store, c.keys...); (err == nil) != c.ok || err != nil && outcome.Exit(err) != outcome.ExitConfig {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Again: nothing more to do; and a file that is behind is not gone on with.
	if p, err := publish(o.Store, signed(t, path)); err != nil || len(p.Anew) != 0 {
		t.Errorf("again: %v", err)
	}
	if _, err := Open(ctx, o.Store, path); outcome.Exit(err) != outcome.ExitConfig {
		t.Errorf("a file that is behind: %v", err)
	}
	// Another document 2 does not take its place.
	other := NewDraft(o.Trust)
	if err := other.Edit(time.Now(), AddKey(public(alice), Families)); err != nil {
		t.Fatal(err)
	}
	if err := other.Sign(key); err != nil {
		t.Fatal(err)
	}
	if _, err := publish(o.Store, other, alice); err == nil || !strings.Contains(err.Error(), "says something else") {
		t.Error(err)
	}
}

func TestEditsThatMakeNoSense(t *testing.T) {
	set := open(t, nil).Trust
	both := Families
	for name, c := range map[string]struct {
		change func(*contract.TrustPayload) error
		says   string
	}{
		"a key that is there":     {AddKey(public(key), both), "counts for pointer documents already"},
		"a key that is not there": {RemoveKey(trust.KeyID(public(seeded(9))), both), "counts for none"},
		"nobody left":             {RemoveKey(trust.KeyID(public(key)), both), "would need 1 signatures of 0 keys"},
		"more than there are":     {Threshold(both, 2), "would need 2 signatures of 1 keys"},
		"nobody needs to sign":    {Threshold(both, 0), "at least one"},
		"less than nobody":        {Threshold(both, -1), "at least one"},
	} {
		d := NewDraft(set)
		before := string(d.Document.Encode())
		if err := d.Edit(time.Now(), c.change); outcome.Exit(err) != outcome.ExitUsage || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		if len(set.Document.Payload.Keys) != 1 || string(NewDraft(set).Document.Encode()) != before {
			t.Errorf("%s: what was begun with has changed", name)
		}
	}
	// 17 signatures could never be looked at.
	d := NewDraft(set)
	for i := range byte(17) {
		if err := d.Edit(time.Now(), AddKey(public(seeded(10+i)), both)); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Edit(time.Now(), Threshold(both, 16)); err != nil {
		t.Error(err)
	}
	if err := d.Edit(time.Now(), Threshold(both, 17)); outcome.Exit(err) != outcome.ExitUsage {
		t.Error(err)
	}
}

// A change takes the signatures off, which were for what the file said before.
func TestAChangeTakesSignaturesOff(t *testing.T) {
	o, path := open(t, nil), filepath.Join(t.TempDir(), "trust.json")
	edited(t, o.Store, path, AddKey(public(seeded(2)), Families))
	if d := signed(t, path, key, seeded(2), key); len(d.Envelope.Signatures) != 2 {
		t.Errorf("%d signatures", len(d.Envelope.Signatures))
	}
	if d := edited(t, o.Store, path, Threshold(Families, 2)); len(d.Envelope.Signatures) != 0 {
		t.Errorf("%d signatures", len(d.Envelope.Signatures))
	}
	if err := os.WriteFile(path, []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(context.Background(), o.Store, path); err == nil {
		t.Error("something else stood there, and was taken over")
	}
}

// cutting stops at its nth write, before it or after it.
type cutting struct {
	store.Store
	left  int
	after bool
}

var errCut = errors.New("cut")

func (c *cutting) Put(ctx context.Context, key string, body io.ReadSeeker, size int64, cond store.Condition) (string, error) {
	c.left--
	if c.left < 0 || c.left == 0 && !c.after {
		return "", errCut
	}
	etag, err := c.Store.Put(ctx, key, body, size, cond)
	if c.left == 0 && err == nil {
		err = errCut
	}
	return etag, err
}

// Publishing is cut at each of its writes, and run again: it ends the same.
func TestPublishIsCut(t *testing.T) {
	ctx := context.Background()
	for _, after := range []bool{false, true} {
		for n := 1; ; n++ {
			o := open(t, nil)
			for _, c := range []contract.Component{"edge", "rim"} {
				if _, err := o.Promote(ctx, c, "stable", Promotion{Release: release("1")}); err != nil {
					t.Fatal(err)
				}
			}
			path, alice := filepath.Join(t.TempDir(), "trust.json"), seeded(3)
			edited(t, o.Store, path, AddKey(public(alice), Families), RemoveKey(trust.KeyID(public(key)), Families))
			d := signed(t, path, key, alice)
			cut := &cutting{o.Store, n, after}
			_, err := publish(cut, d, alice)
			if cut.left > 0 {
				if err != nil || n < 5 {
					t.Fatalf("%d writes, %v", n, err)
				}
				break
			}
			if err == nil && !(after && n == 1) { // a lost answer of the document is found to be its own
				t.Errorf("cut at %d: no error", n)
			}
			d = signed(t, path, key) // in another order
			if _, err := publish(o.Store, d, alice); err != nil {
				t.Errorf("cut at %d, again: %v", n, err)
			}
			set, err := Trust(ctx, o.Store)
			if err != nil || set.Number != 2 {
				t.Fatalf("cut at %d: document %d, %v", n, set.Number, err)
			}
			for _, c := range []contract.Component{"edge", "rim"} {
				if p, _, err := (&Operator{Store: o.Store, Trust: set}).Pointer(ctx, c, "stable"); err != nil || p.Payload.Current.Version != "1" {
					t.Errorf("cut at %d: %s: %v", n, c, err)
				}
			}
		}
	}
}

// What a thief has left in the store is not made good by a new document.
func TestPublishLeavesWhatNobodyVouchesFor(t *testing.T) {
	ctx := context.Background()
	o, alice := open(t, nil), seeded(3)
	for _, c := range []contract.Component{"edge", "rim", "hub"} {
		if _, err := o.Promote(ctx, c, "stable", Promotion{Release: release("1")}); err != nil {
			t.Fatal(err)
		}
	}
	p, _, err := o.Pointer(ctx, "edge", "stable")
	if err != nil {
		t.Fatal(err)
	}
	put := func(c contract.Component, e contract.Envelope) {
		t.Helper()
		if _, err := store.PutBytes(ctx, o.Store, contract.PointerKey(c, "stable", 1), e.Encode(), store.Condition{}); err != nil {
			t.Fatal(err)
		}
	}
	p.PromotedAt = contract.At(time.Now().AddDate(70, 0, 0)) // the stolen key: nothing is ever newer
	put("edge", trust.Sign(contract.PointerLadder, p.Encode(), key))
	p.PromotedAt = contract.At(time.Now())
	put("rim", trust.Sign(contract.PointerLadder, p.Encode(), seeded(8)))
	if _, err := store.PutBytes(ctx, o.Store, contract.PointerKey("huge", "stable", 1), make([]byte, contract.MaxEnvelope+1), store.Condition{}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "trust.json")
	edited(t, o.Store, path, AddKey(public(alice), Families), RemoveKey(trust.KeyID(public(key)), Families))
	done, err := publish(o.Store, signed(t, path, key, alice), alice)
	if err != nil || len(done.Anew) != 1 || done.Anew[0].Pointer.Component != "hub" || len(done.Skipped) != 3 {
		t.Fatalf("%d anew, %q, %v", len(done.Anew), done.Skipped, err)
	}
	after, err := NewOperator(ctx, o.Store, alice)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := after.Promote(ctx, "edge", "stable", Promotion{Release: release("2")}); outcome.Exit(err) != outcome.ExitFailed || !strings.Contains(err.Error(), "-replace") {
		t.Errorf("over what does not count: %v", err)
	}
	after.Replace = true
	if p, err := after.Promote(ctx, "edge", "stable", Promotion{Release: release("2")}); err != nil || history(p) != "2" || p.PromotedAt.After(time.Now().Add(time.Minute)) {
		t.Errorf("%+v, %v", p, err)
	}
}

// With a link missing, the command says which.
func TestAMissingLink(t *testing.T) {
	ctx := context.Background()
	o := open(t, nil)
	last := key
	for i := range byte(4) {
		path, next := filepath.Join(t.TempDir(), "trust.json"), seeded(20+i)
		edited(t, o.Store, path, AddKey(public(next), Families), RemoveKey(trust.KeyID(public(last)), Families))
		if _, err := publish(o.Store, signed(t, path, last, next)); err != nil {
			t.Fatal(err)
		}
		last = next
	}
	dir := strings.TrimPrefix(o.Store.String(), "file://")
	if err := os.Remove(filepath.Join(dir, contract.TrustKey(3))); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"promoting":  func() error { _, err := NewOperator(ctx, o.Store, last); return err }(),
		"drafting":   func() error { _, err := Open(ctx, o.Store, filepath.Join(t.TempDir(), "x")); return err }(),
		"publishing": func() error { _, err := publish(o.Store, NewDraft(o.Trust)); return err }(),
	} {
		if outcome.Exit(err) != outcome.ExitConfig || !strings.Contains(err.Error(), "trust document 3 is missing") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := Init(ctx, o.Store, last, "", nil, time.Now()); err == nil || !strings.Contains(err.Error(), "trust document 3 is missing") {
		t.Error(err)
	}
	// Nor is a chain begun anew whose first link is gone.
	if err := os.Remove(filepath.Join(dir, contract.TrustKey(1))); err != nil {
		t.Fatal(err)
	}
	if _, err := Init(ctx, o.Store, last, "", nil, time.Now()); err == nil || !strings.Contains(err.Error(), "trust document 1 is missing") {
		t.Error(err)
	}
}

// A deployment that is made after rotations begins with the newest document.
func TestInitAfterARotation(t *testing.T) {
	ctx := context.Background()
	o, alice, path := open(t, nil), seeded(3), filepath.Join(t.TempDir(), "trust.json")
	edited(t, o.Store, path, AddKey(public(alice), Families), RemoveKey(trust.KeyID(public(key)), Families))
	if _, err := publish(o.Store, signed(t, path, key, alice)); err != nil {
		t.Fatal(err)
	}
	d, err := Init(ctx, o.Store, alice, "", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if set, err := trust.First(d.Trust.Encode()); err != nil || set.Number != 2 {
		t.Errorf("document %d, %v", set.Number, err)
	}
	if _, err := Init(ctx, o.Store, key, "", nil, time.Now()); err == nil {
		t.Error("a key that was taken out makes deployments")
	}
}
