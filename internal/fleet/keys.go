package fleet

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"sluice/internal/durable"
	"sluice/internal/outcome"
	"sluice/internal/record"
	"sluice/internal/trust"
)

const (
	privateBlock = "PRIVATE KEY" // PKCS#8
	publicBlock  = "PUBLIC KEY"  // SPKI
	maxKeyFile   = 16 << 10
)

// GenerateKey writes NAME.key, readable by its owner only, and NAME.pub. It
// overwrites neither, and returns the key's id.
func GenerateKey(name string) (string, error) {
	for _, path := range []string{name + ".key", name + ".pub"} {
		if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("%q is there already: a key is never overwritten, choose another name", path)
		}
	}
	pub, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return "", err
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return "", err
	}
	spki, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return "", err
	}
	disk := &durable.Disk{}
	if err := disk.WriteFile(name+".key", pem.EncodeToMemory(&pem.Block{Type: privateBlock, Bytes: pkcs8}), 0o600); err != nil {
		return "", err
	}
	return trust.KeyID(pub), disk.WriteFile(name+".pub", pem.EncodeToMemory(&pem.Block{Type: publicBlock, Bytes: spki}), 0o644)
}

// PrivateKey reads the key that promotes are signed with. A file that others
// can read is refused. Nothing of its content is ever in an error.
func PrivateKey(path string) (ed25519.PrivateKey, error) {
	if path == "" {
		return nil, outcome.Config("say which key signs: -key FILE or SLUICE_KEY")
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, outcome.Config("%w", err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, outcome.Config("%q can be read by others: chmod 600 it, and think about who has read it", path)
	}
	block, err := readPEM(path, privateBlock)
	if err != nil {
		return nil, err
	}
	key, err := x509.ParsePKCS8PrivateKey(block)
	private, ok := key.(ed25519.PrivateKey)
	if err != nil || !ok {
		return nil, outcome.Config("%q holds no ed25519 key: make one with `sluice keygen`", path)
	}
	return private, nil
}

// PublicKey reads the key of a NAME.pub.
func PublicKey(path string) (ed25519.PublicKey, error) {
	block, err := readPEM(path, publicBlock)
	if err != nil {
		return nil, err
	}
	key, err := x509.ParsePKIXPublicKey(block)
	public, ok := key.(ed25519.PublicKey)
	if err != nil || !ok {
		return nil, outcome.Config("%q holds no ed25519 key: make one with `sluice keygen`", path)
	}
	return public, nil
}

func readPEM(path, kind string) ([]byte, error) {
	data, err := record.ReadFile(path, maxKeyFile)
	if err != nil {
		return nil, outcome.Config("%w", err)
	}
	block, rest := pem.Decode(data)
	if block == nil || block.Type != kind || len(rest) > 0 {
		return nil, outcome.Config("%q must hold exactly one PEM block %q", path, kind)
	}
	return block.Bytes, nil
}
