package suite

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// An Authority signs certificates for a test.
type Authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	PEM  []byte
	Pool *x509.CertPool
}

// NewAuthority makes one.
func NewAuthority(t *testing.T) *Authority {
	t.Helper()
	a := &Authority{t: t}
	pair := a.make("the one who signs", nil, nil)
	a.cert, a.key = pair.Leaf, pair.PrivateKey.(*ecdsa.PrivateKey)
	a.PEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
	a.Pool = x509.NewCertPool()
	a.Pool.AddCert(a.cert)
	return a
}

// Pair makes a certificate, for a server at an address or a client with SPIFFE ids,
// and its key.
func (a *Authority) Pair(address string, uris ...string) tls.Certificate {
	a.t.Helper()
	return a.make(address, uris, a.cert)
}

// Unsigned is Pair of whom nobody vouches for.
func (a *Authority) Unsigned(uris ...string) tls.Certificate {
	a.t.Helper()
	return a.make("nobody", uris, nil)
}

func (a *Authority) make(address string, uris []string, parent *x509.Certificate) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	a.must(err)
	c := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: address}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}}
	if ip := net.ParseIP(address); ip != nil {
		c.IPAddresses = []net.IP{ip}
	}
	for _, u := range uris {
		parsed, err := url.Parse(u)
		a.must(err)
		c.URIs = append(c.URIs, parsed)
	}
	signer, by := a.key, parent
	if parent == nil {
		signer, by = key, c
		c.IsCA, c.BasicConstraintsValid = true, true
	}
	der, err := x509.CreateCertificate(rand.Reader, c, by, &key.PublicKey, signer)
	a.must(err)
	leaf, err := x509.ParseCertificate(der)
	a.must(err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// Write writes a certificate and its key, PEM, into a folder, under a name with
// .crt and .key.
func (a *Authority) Write(dir, name string, pair tls.Certificate) (cert, key string) {
	a.t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	a.must(err)
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	a.must(os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o644))
	a.must(os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
	return cert, key
}

func (a *Authority) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}
