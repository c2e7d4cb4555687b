package trust

import (
	"crypto/ed25519"
	"errors"
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
