package trust

import (
	"crypto/ed25519"
	"errors"
	"io/fs"
	"strings"
	"testing"
	"time"

	"sluice/internal/contract"
	"sluice/internal/outcome"
)

var now = contract.At(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))

func key(n byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed([]byte(strings.Repeat(string(rune(n)), 32)))
}
func pub(k ed25519.PrivateKey) ed25519.PublicKey { return k.Public().(ed25519.PublicKey) }

func pointer() contract.Pointer {
	return contract.Pointer{Envelope: contract.One, Component: "edge", Channel: "stable", PromotedAt: now, Payload: contract.PointerPayload{Schema: contract.One,
		Current: contract.Release{Version: "1", Artifacts: map[contract.Platform]contract.Artifact{}, Source: "file", ReleasedAt: now},
		History: []contract.Release{}, Audit: []contract.Audit{}}}
}

func first(t *testing.T, keys ...ed25519.PrivateKey) Set {
	t.Helper()
	var pubs []ed25519.PublicKey
	for _, k := range keys {
		pubs = append(pubs, pub(k))
	}
	s, err := First(Sign(contract.TrustLadder, NewDocument(now, pubs...).Encode(), keys...).Encode())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func word(err error) outcome.Word {
	var e *outcome.Error
	if errors.As(err, &e) {
		return e.Word
	}
	return ""
}

func TestPAE(t *testing.T) { // the example of the DSSE specification
	if got := string(PAE("http://example.com/HelloWorld", []byte("hello world"))); got != "DSSEv1 29 http://example.com/HelloWorld 11 hello world" {
		t.Error(got)
	}
}

func TestPointer(t *testing.T) {
	s, p := first(t, key(1)), pointer().Encode()
	ok := Sign(contract.PointerLadder, p, key(1))
	if got, err := s.Pointer(ok.Encode(), "edge", "stable"); err != nil || got.Payload.Current.Version != "1" || len(got.Water().KeyIDs) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	twoSigned := Sign(contract.PointerLadder, p, key(9), key(1))
	twoSigned.Signatures[0].Sig = "!!"
	if _, err := s.Pointer(twoSigned.Encode(), "edge", "stable"); err != nil {
		t.Errorf("a malformed signature spoils only itself: %v", err)
	}
	changed := ok
	changed.Payload = []byte(strings.Replace(string(p), `"edge"`, `"edgf"`, 1))
	late := Sign(contract.PointerLadder, p)
	for range contract.MaxSignatures {
		late.Signatures = append(late.Signatures, contract.Signature{KeyID: "x", Sig: ""})
	}
	late.Signatures = append(late.Signatures, ok.Signatures...)
	sixteenth := late
	sixteenth.Signatures = late.Signatures[1:]
	if _, err := s.Pointer(sixteenth.Encode(), "edge", "stable"); err != nil {
		t.Errorf("the 16th signature: %v", err)
	}
	newer := Sign(contract.PointerLadder, []byte(strings.Replace(string(p), `"schema": "1.0"`, `"schema": "1.9"`, 1)), key(1))
	for name, c := range map[string]struct {
		data      []byte
		component contract.Component
		channel   contract.Channel
		want      outcome.Word
	}{
		"unsigned":         {Sign(contract.PointerLadder, p).Encode(), "edge", "stable", outcome.BadSignature},
		"wrong key":        {Sign(contract.PointerLadder, p, key(2)).Encode(), "edge", "stable", outcome.BadSignature},
		"another family":   {Sign(contract.TrustLadder, p, key(1)).Encode(), "edge", "stable", outcome.BadSignature},
		"changed payload":  {changed.Encode(), "edge", "stable", outcome.BadSignature},
		"17th signature":   {late.Encode(), "edge", "stable", outcome.BadSignature},
		"truncated":        {ok.Encode()[:100], "edge", "stable", outcome.BadSignature},
		"over the limit":   {append(ok.Encode(), make([]byte, contract.MaxEnvelope)...), "edge", "stable", outcome.BadSignature},
		"wrong component":  {ok.Encode(), "other", "stable", outcome.WrongComponent},
		"wrong channel":    {ok.Encode(), "edge", "canary", outcome.WrongChannel},
		"a newer minor":    {newer.Encode(), "edge", "stable", outcome.UpgradeNeeded},
		"not even base 64": {[]byte(`{"payloadType":"x","payload":"!","signatures":[]}`), "edge", "stable", outcome.BadSignature},
	} {
		if _, err := s.Pointer(c.data, c.component, c.channel); word(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestThresholdCountsAKeyOnce(t *testing.T) {
	doc := NewDocument(now, pub(key(1)), pub(key(2)))
	doc.Payload.Families[contract.PointerLadder] = contract.Family{Keys: doc.Payload.Families[contract.PointerLadder].Keys, Threshold: 2}
	s, err := First(Sign(contract.TrustLadder, doc.Encode(), key(1)).Encode())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pointer(Sign(contract.PointerLadder, pointer().Encode(), key(1), key(1)).Encode(), "edge", "stable"); word(err) != outcome.BadSignature {
		t.Errorf("the same key twice: %v", err)
	}
	if _, err := s.Pointer(Sign(contract.PointerLadder, pointer().Encode(), key(1), key(2)).Encode(), "edge", "stable"); err != nil {
		t.Error(err)
	}
}

// A key counts for the families that name it, and for no other.
func TestKeysOfFamilies(t *testing.T) {
	doc := NewDocument(now, pub(key(1)), pub(key(2)))
	doc.Payload.Families[contract.PointerLadder] = contract.Family{Keys: []string{KeyID(pub(key(1)))}, Threshold: 1}
	doc.Payload.Families[contract.TrustLadder] = contract.Family{Keys: []string{KeyID(pub(key(2)))}, Threshold: 1}
	if _, err := First(Sign(contract.TrustLadder, doc.Encode(), key(1)).Encode()); word(err) != outcome.BadSignature {
		t.Errorf("a trust document, by a key for pointers: %v", err)
	}
	s, err := First(Sign(contract.TrustLadder, doc.Encode(), key(2)).Encode())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pointer(Sign(contract.PointerLadder, pointer().Encode(), key(2)).Encode(), "edge", "stable"); word(err) != outcome.BadSignature {
		t.Errorf("a pointer, by a key for trust: %v", err)
	}
	// A document that is signed as one of a family that nobody is named for.
	if err := s.Vouches("release", Sign("release", []byte("{}"), key(1), key(2))); word(err) != outcome.BadSignature {
		t.Errorf("a family without keys: %v", err)
	}
	// A key under a wrong id is no key.
	doc.Payload.Keys[KeyID(pub(key(1)))] = pub(key(3))
	if _, err := First(Sign(contract.TrustLadder, doc.Encode(), key(2)).Encode()); word(err) != outcome.BadSignature {
		t.Errorf("a key under another's id: %v", err)
	}
}

// chain makes n documents, each by a key of its own: document i is signed by keys
// i-1 and i.
func chain(n int) map[int][]byte {
	out := map[int][]byte{}
	for i := 1; i <= n; i++ {
		doc := NewDocument(contract.At(now.Add(time.Duration(i)*time.Hour)), pub(key(byte(i%120+1))))
		doc.Payload.Number = i
		out[i] = Sign(contract.TrustLadder, doc.Encode(), key(byte(i%120+1)), key(byte((i-1)%120+1))).Encode()
	}
	return out
}

func from(docs map[int][]byte) func(int) ([]byte, error) {
	return func(n int) ([]byte, error) {
		if docs[n] == nil {
			return nil, fs.ErrNotExist
		}
		return docs[n], nil
	}
}

func TestWalk(t *testing.T) {
	docs := chain(MaxSteps + 10)
	one, err := First(docs[1])
	if err != nil {
		t.Fatal(err)
	}
	var steps []int
	note := func(next Set, _ []byte) error { steps = append(steps, next.Number); return nil }
	twelve := map[int][]byte{}
	for i := 2; i <= 13; i++ {
		twelve[i] = docs[i]
	}
	end, err := one.Walk(from(twelve), note)
	if err != nil || end.Number != 13 || len(steps) != 12 {
		t.Errorf("twelve in one go: at %d, steps %v, %v", end.Number, steps, err)
	}
	// Never backwards: what is older is not even asked for.
	if back, err := end.Walk(from(map[int][]byte{1: docs[1], 12: docs[12], 13: docs[13]}), nil); err != nil || back.Number != 13 {
		t.Errorf("at %d, %v", back.Number, err)
	}
	// An older one in the next one's place.
	if _, err := end.Walk(from(map[int][]byte{14: docs[13]}), nil); word(err) != outcome.BadSignature || !strings.Contains(err.Error(), "trust document 13 stands where 14 should") {
		t.Error(err)
	}
	// None is left out.
	if _, err := end.Walk(from(map[int][]byte{14: docs[15]}), nil); word(err) != outcome.BadSignature {
		t.Error(err)
	}
	three := NewDocument(now, pub(key(2)))
	three.Payload.Number = 3
	two := first(t, key(2))
	if _, err := two.Next(Sign(contract.TrustLadder, three.Encode(), key(2)).Encode()); word(err) != outcome.BadSignature {
		t.Errorf("a number is left out: %v", err)
	}
	delete(twelve, 7)
	if end, err := one.Walk(from(twelve), nil); err != nil || end.Number != 6 {
		t.Errorf("with a link missing: at %d, %v", end.Number, err)
	}
	if end, err := one.Walk(from(docs), nil); err != nil || end.Number != 1+MaxSteps {
		t.Errorf("a chain without an end: at %d, %v", end.Number, err)
	}
	stop := errors.New("the disk")
	if end, err := one.Walk(from(docs), func(next Set, _ []byte) error {
		if next.Number == 5 {
			return stop
		}
		return nil
	}); !errors.Is(err, stop) || end.Number != 4 {
		t.Errorf("a step that fails: at %d, %v", end.Number, err)
	}
}

// Whose watermark counts, and which signed times: after the trust has moved from
// document 1, keys 1 and 2, to document 2.
func TestCounting(t *testing.T) {
	a, b, c := KeyID(pub(key(1))), KeyID(pub(key(2))), KeyID(pub(key(3)))
	two := func(threshold int, keys ...ed25519.PrivateKey) Set {
		var pubs []ed25519.PublicKey
		for _, k := range keys {
			pubs = append(pubs, pub(k))
		}
		doc := NewDocument(contract.At(now.Add(time.Hour)), pubs...)
		doc.Payload.Number = 2
		f := doc.Payload.Families[contract.PointerLadder]
		f.Threshold = threshold
		doc.Payload.Families[contract.PointerLadder] = f
		s, err := first(t, key(1), key(2)).Next(Sign(contract.TrustLadder, doc.Encode(), append(keys, key(1))...).Encode())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	later := contract.At(now.Add(24 * time.Hour))
	for name, c := range map[string]struct {
		set    Set
		water  contract.Water
		counts bool
		time   bool
	}{
		"its only key is gone":                     {two(1, key(2)), contract.Water{Trust: 1, KeyIDs: []string{a}}, false, false},
		"its only key is there":                    {two(1, key(2)), contract.Water{Trust: 1, KeyIDs: []string{b}}, true, false},
		"one of its keys is gone":                  {two(1, key(2)), contract.Water{Trust: 1, KeyIDs: []string{a, b}}, true, false},
		"one of its keys is gone, and two must":    {two(2, key(2), key(3)), contract.Water{Trust: 1, KeyIDs: []string{a, b}}, false, false},
		"none is gone, and now two must":           {two(2, key(1), key(2)), contract.Water{Trust: 1, KeyIDs: []string{b}}, true, false},
		"of the newest document":                   {two(1, key(2)), contract.Water{Trust: 2, KeyIDs: []string{b}}, true, true},
		"nobody knows whose":                       {two(1, key(2)), contract.Water{Trust: 1, KeyIDs: []string{}}, false, false},
		"nobody knows whose, and no step was made": {first(t, key(1)), contract.Water{Trust: 0, KeyIDs: []string{}}, true, false},
		"nobody knows whose, of the newest":        {two(1, key(2)), contract.Water{Trust: 2, KeyIDs: []string{}}, true, true},
		"of a key that was never there, no step":   {first(t, key(1)), contract.Water{Trust: 1, KeyIDs: []string{c}}, true, true},
	} {
		c.water.PromotedAt = later
		seen := contract.Seen{Schema: contract.One, Channels: map[contract.Channel]contract.Water{"stable": c.water}}
		if _, counts := c.set.Counting(seen).Channels["stable"]; counts != c.counts {
			t.Errorf("%s: counts: %v", name, counts)
		}
		times := c.set.Times(seen)
		if (len(times) == 2) != c.time || !times[0].Equal(c.set.Document.PromotedAt.Time) {
			t.Errorf("%s: times %v", name, times)
		}
		if len(seen.Channels) != 1 {
			t.Errorf("%s: what was asked about was changed", name)
		}
	}
}

func TestCountersign(t *testing.T) {
	both := first(t, key(1), key(2))
	e := Sign(contract.PointerLadder, pointer().Encode(), key(9), key(1))
	signed := both.Countersign(contract.PointerLadder, e, key(2), key(8), key(1))
	if len(signed.Signatures) != 2 || string(signed.Payload) != string(e.Payload) {
		t.Errorf("%+v", signed.Signatures)
	}
	ids, err := both.verify(contract.PointerLadder, signed)
	if err != nil || len(ids) != 2 {
		t.Errorf("%v, %v", ids, err)
	}
}

func TestExpired(t *testing.T) {
	doc := NewDocument(now, pub(key(1)))
	doc.Payload.ExpiresAt = contract.At(now.Add(time.Hour))
	s, err := First(Sign(contract.TrustLadder, doc.Encode(), key(1)).Encode())
	if err != nil {
		t.Fatal(err)
	}
	p := pointer()
	p.Payload.RefreshedAt, p.Payload.ExpiresAt = now, contract.At(now.Add(time.Hour))
	checked, err := s.Pointer(Sign(contract.PointerLadder, p.Encode(), key(1)).Encode(), "edge", "stable")
	if err != nil {
		t.Fatal(err)
	}
	for what, expired := range map[string]func(contract.Time) error{"document": s.Expired, "pointer": checked.Expired} {
		if err := expired(contract.At(now.Add(time.Hour - 1))); err != nil {
			t.Errorf("%s, a nanosecond before: %v", what, err)
		}
		if err := expired(contract.At(now.Add(time.Hour))); word(err) != outcome.Expired || outcome.Exit(err) != outcome.ExitDeferred {
			t.Errorf("%s: %v", what, err)
		}
	}
	never := first(t, key(1))
	if err := never.Expired(contract.At(now.Add(1e9 * time.Second))); err != nil {
		t.Error(err)
	}
}

func TestRotation(t *testing.T) {
	one := first(t, key(1))
	doc := NewDocument(now, pub(key(2)))
	doc.Payload.Number = 2
	if _, err := one.Next(Sign(contract.TrustLadder, doc.Encode(), key(2)).Encode()); word(err) != outcome.BadSignature {
		t.Errorf("signed by the new key only: %v", err)
	}
	if _, err := one.Next(Sign(contract.TrustLadder, doc.Encode(), key(1)).Encode()); word(err) != outcome.BadSignature {
		t.Errorf("signed by the old key only: %v", err)
	}
	two, err := one.Next(Sign(contract.TrustLadder, doc.Encode(), key(1), key(2)).Encode())
	if err != nil || two.Number != 2 {
		t.Fatal(err)
	}
	if _, err := two.Pointer(Sign(contract.PointerLadder, pointer().Encode(), key(1)).Encode(), "edge", "stable"); word(err) != outcome.BadSignature {
		t.Errorf("the old key after the rotation: %v", err)
	}
}
