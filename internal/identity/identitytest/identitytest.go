// Package identitytest makes authorities and certificates for tests: of any role, and of none.
//
// It leaves what a certificate means to package identity. Start with [New] and [Authority.Leaf]. An
// Authority may be used concurrently.
package identitytest

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

// TrustDomain is that of certificates which [Authority.Role] makes.
const TrustDomain = "test.example"

// Authority signs certificates for one test.
type Authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	// Pool holds the authority's certificate alone.
	Pool *x509.CertPool
}

// New makes an authority, which is valid for an hour.
func New(t testing.TB) *Authority {
	t.Helper()
	a := &Authority{t: t, Pool: x509.NewCertPool()}
	a.key = a.newKey()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, &a.key.PublicKey, a.key)
	if err == nil {
		a.cert, err = x509.ParseCertificate(der)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.Pool.AddCert(a.cert)
	return a
}

func (a *Authority) newKey() *ecdsa.PrivateKey {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	return key
}

// Leaf makes a certificate for servers and clients at 127.0.0.1, which change changes before it
// is signed. It names no role.
func (a *Authority) Leaf(change ...func(*x509.Certificate)) tls.Certificate {
	a.t.Helper()
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, f := range change {
		f(c)
	}
	key := a.newKey()
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, &key.PublicKey, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

// SPIFFE gives a certificate the URI id.
func SPIFFE(id string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		u, err := url.Parse(id)
		if err != nil {
			panic(err)
		}
		c.URIs = append(c.URIs, u)
	}
}

// Role makes the certificate of role, such as "memnode", called name.
func (a *Authority) Role(role, name string, change ...func(*x509.Certificate)) tls.Certificate {
	a.t.Helper()
	return a.Leaf(append([]func(*x509.Certificate){SPIFFE("spiffe://" + TrustDomain + "/kvd/" + role + "/" + name)},
		change...)...)
}

// Config is mutual TLS 1.3 with cert on both sides of connections.
func (a *Authority) Config(cert tls.Certificate) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, RootCAs: a.Pool,
		ClientCAs:  a.Pool,
		ClientAuth: tls.RequireAndVerifyClientCert}
}

// Revoke writes a list of revoked certificates as a PEM file into a folder of the test's.
func (a *Authority) Revoke(certs ...tls.Certificate) (file string) {
	a.t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: time.Now().Add(-time.Hour),
		NextUpdate: time.Now().Add(time.Hour)}
	for _, c := range certs {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{
			SerialNumber: c.Leaf.SerialNumber, RevocationTime: list.ThisUpdate})
	}
	der, err := x509.CreateRevocationList(rand.Reader, list, a.cert, a.key)
	if err == nil {
		file = filepath.Join(a.t.TempDir(), "crl.pem")
		err = os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der}), 0o600)
	}
	if err != nil {
		a.t.Fatal(err)
	}
	return file
}

// Files writes the authority, cert and its key as PEM files into a folder of the test's.
func (a *Authority) Files(cert tls.Certificate) (ca, certificate, key string) {
	a.t.Helper()
	dir := a.t.TempDir()
	write := func(name, kind string, der []byte) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			a.t.Fatal(err)
		}
		return file
	}
	der, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		a.t.Fatal(err)
	}
	return write("ca.pem", "CERTIFICATE", a.cert.Raw), write("cert.pem", "CERTIFICATE", cert.Certificate[0]),
		write("key.pem", "PRIVATE KEY", der)
}
