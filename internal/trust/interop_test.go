package trust

import (
	"context"
	"crypto"
	"crypto/ed25519"
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/secure-systems-lab/go-securesystemslib/dsse"

	"sluice/internal/contract"
)

// theirs is one of our keys, as the other implementation wants to have it.
type theirs struct{ key ed25519.PrivateKey }

func (k theirs) Sign(_ context.Context, data []byte) ([]byte, error) {
	return ed25519.Sign(k.key, data), nil
}

func (k theirs) Verify(_ context.Context, data, sig []byte) error {
	if !ed25519.Verify(pub(k.key), data, sig) {
		return errors.New("bad signature")
	}
	return nil
}
func (k theirs) KeyID() (string, error)   { return KeyID(pub(k.key)), nil }
func (k theirs) Public() crypto.PublicKey { return pub(k.key) }

// What we sign, another implementation of DSSE accepts; what it signs, we do.
func TestEnvelopesOfAnotherImplementation(t *testing.T) {
	ctx := context.Background()
	s, payload := first(t, key(1), key(2)), pointer().Encode()
	verifier, err := dsse.NewMultiEnvelopeVerifier(2, theirs{key(1)}, theirs{key(2)})
	if err != nil {
		t.Fatal(err)
	}
	check := func(data []byte) error {
		t.Helper()
		var e dsse.Envelope
		if err := json.Unmarshal(data, &e); err != nil {
			t.Fatal(err)
		}
		accepted, err := verifier.Verify(ctx, &e)
		if err == nil && len(accepted) != 2 {
			t.Errorf("%d keys were accepted", len(accepted))
		}
		return err
	}
	ours := Sign(contract.PointerLadder, payload, key(1), key(2))
	if err := check(ours.Encode()); err != nil {
		t.Errorf("ours, read by them: %v", err)
	}
	if err := check(Sign(contract.PointerLadder, payload, key(1), key(1)).Encode()); err == nil {
		t.Error("one key twice, read by them: accepted")
	}
	ours.PayloadType = contract.PayloadType(contract.TrustLadder)
	if err := check(ours.Encode()); err == nil {
		t.Error("of another type, read by them: accepted")
	}
	signer, err := dsse.NewEnvelopeSigner(theirs{key(1)})
	if err != nil {
		t.Fatal(err)
	}
	e, err := signer.SignPayload(ctx, contract.PayloadType(contract.PointerLadder), payload)
	if err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := s.Pointer(data, "edge", "stable"); err != nil || p.Payload.Current.Version != "1" {
		t.Errorf("theirs, read by us: %v", err)
	}
	if e, err = signer.SignPayload(ctx, contract.PayloadType(contract.TrustLadder), payload); err != nil {
		t.Fatal(err)
	}
	if data, err = json.Marshal(e); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Pointer(data, "edge", "stable"); err == nil {
		t.Error("theirs, of another type, read by us: accepted")
	}
	if got, want := string(PAE("é", []byte{0xff, 0, '\n'})), string(dsse.PAE("é", []byte{0xff, 0, '\n'})); got != want {
		t.Errorf("%q, they say %q", got, want)
	}
}

// The pre-authentication encoding is that of a third implementation, in another
// language.
func TestPAEOfAnotherLanguage(t *testing.T) {
	node, err := exec.LookPath("node")
	module := os.Getenv("SIGSTORE_CORE")
	if err != nil || module == "" {
		t.Skip("SIGSTORE_CORE names no folder with @sigstore/core, or there is no node: `make test` installs both")
	}
	script := filepath.Join(t.TempDir(), "pae.js")
	if err := os.WriteFile(script, []byte(`const { dsse } = require(process.argv[2]);
process.stdout.write(dsse.preAuthEncoding(process.argv[3], require('node:fs').readFileSync(0)).toString('hex'));
`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ kind, payload string }{
		{"http://example.com/HelloWorld", "hello world"}, {"", ""}, {"application/é", "\xff\x00\n"},
		{contract.PayloadType(contract.PointerLadder), string(pointer().Encode())}, {contract.PayloadType(contract.TrustLadder), strings.Repeat("x", 100_000)},
	} {
		cmd := exec.Command(node, script, filepath.Join(module, "node_modules/@sigstore/core"), c.kind)
		cmd.Stdin = strings.NewReader(c.payload)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		if got := hex.EncodeToString(PAE(c.kind, []byte(c.payload))); got != string(out) {
			t.Errorf("%q: %.200s, they say %.200s", c.kind, got, out)
		}
	}
}
