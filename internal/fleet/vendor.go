package fleet

import (
	"aead.dev/minisign"

	"sluice/internal/outcome"
	"sluice/internal/record"
)

// A VendorKey is the minisign key that a vendor signs the sums of public releases
// with.
type VendorKey struct{ public minisign.PublicKey }

// maxVendorKey is the most bytes of a minisign public key's file.
const maxVendorKey = 4 << 10

// ReadVendorKey reads the file that `minisign -G` writes as its public key.
func ReadVendorKey(path string) (VendorKey, error) {
	var k VendorKey
	data, err := record.ReadFile(path, maxVendorKey)
	if err != nil {
		return k, outcome.Config("%w", err)
	}
	if err := k.public.UnmarshalText(data); err != nil {
		return k, outcome.Config("%q is no minisign public key", path)
	}
	return k, nil
}

// Verify checks a signature, the text of a .minisig, over a message. Both kinds
// count: over the message, and over its BLAKE2b hash, which minisign makes now.
func (k VendorKey) Verify(message, signature []byte) error {
	if !minisign.Verify(k.public, message, signature) {
		return outcome.Refuse(outcome.BadSignature, "the vendor's key %016X has not signed this", k.public.ID())
	}
	return nil
}
