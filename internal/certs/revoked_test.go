package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"math/big"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// revoke has l's authority revoke certificates, from then on, and writes the list.
func (l *lab) revoke(at time.Time, valid time.Duration, all ...*x509.Certificate) []byte {
	l.t.Helper()
	var serials []*big.Int
	for _, c := range all {
		serials = append(serials, c.SerialNumber)
	}
	_, text, err := l.ca.Revoke(at, nil, serials, valid)
	if err != nil {
		l.t.Fatal(err)
	}
	l.write(l.files.CRL, text)
	return text
}

// labs are a server's and a client's of one authority, each with a list that revokes nothing.
func labs(t *testing.T) (server, client *lab) {
	server, client = newLab(t), newLab(t)
	client.ca = server.ca
	client.write(client.files.CA, server.ca.CertPEM())
	client.issue(time.Now(), time.Hour)
	for _, l := range []*lab{server, client} {
		l.files.CRL = filepath.Join(filepath.Dir(l.files.CA), "crl.pem")
		l.revoke(time.Now(), time.Hour)
	}
	return server, client
}

// Both sides refuse certificates that are on the list, from its next look on, also in sessions that are resumed; and
// connections that there are learn of it.
func TestRevoked(t *testing.T) {
	server, client := labs(t)
	ss, cs := server.open(Options{}), client.open(Options{})
	sconf, cconf := ss.Config(), cs.Config()
	resuming := forHost(t, cconf, "node")
	resuming.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	for range 2 {
		if serr, cerr := meet(t, sconf, resuming); serr != nil || cerr != nil {
			t.Fatal(serr, cerr)
		}
	}
	state := func(s *Source) tls.ConnectionState {
		leaf := s.Current().Pair.Leaf
		return tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{leaf, s.Current().Authorities[0]}}}
	}
	if err := StillWelcome(sconf, state(cs)); err != nil {
		t.Error(err)
	}
	at := time.Now().Truncate(time.Second)
	server.revoke(at, time.Hour, cs.Current().Pair.Leaf)
	if changed, err := ss.Poll(); !changed || err != nil {
		t.Fatal(changed, err)
	}
	var revoked *RevokedError
	for name, conf := range map[string]*tls.Config{"anew": forHost(t, cconf, "node"), "resumed": resuming} {
		if serr, _ := meet(t, sconf, conf); !errors.As(serr, &revoked) || !revoked.At.Equal(at) ||
			!revoked.Cert.Equal(cs.Current().Pair.Leaf) {
			t.Errorf("%s: the server said %v", name, serr)
		}
	}
	if want := "of spiffe://kvd/kvd/memnode/m was revoked on " + at.UTC().Format(time.DateTime); !strings.Contains(
		revoked.Error(), want) {
		t.Errorf("%q lacks %q", revoked, want)
	}
	if err := StillWelcome(sconf, state(cs)); !errors.As(err, new(*RevokedError)) {
		t.Errorf("a connection that there is: %v", err)
	}
	// The other direction, beside a check that a caller has added.
	server.revoke(at, time.Hour)
	client.revoke(at, time.Hour, ss.Current().Pair.Leaf)
	for _, s := range []*Source{ss, cs} {
		if changed, err := s.Poll(); !changed || err != nil {
			t.Fatal(changed, err)
		}
	}
	checked := With(cconf, func(c *tls.Config) {
		verify := c.VerifyConnection
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			if verify == nil {
				return errors.New("nobody looks at the list")
			}
			return verify(cs)
		}
	})
	if _, cerr := meet(t, sconf, forHost(t, checked, "node")); !errors.As(cerr, &revoked) ||
		!revoked.Cert.Equal(ss.Current().Pair.Leaf) {
		t.Errorf("the client said %v", cerr)
	}
	if conf, err := client.files.LoadConfig(); err != nil {
		t.Error(err)
	} else if _, cerr := meet(t, sconf, forHost(t, conf, "node")); !errors.As(cerr, &revoked) {
		t.Errorf("a client that loads its files once said %v", cerr)
	}
	// An authority that has the same name, and gave the same serial number, is another.
	client.ca, client.files.CRL = newCA(t), ""
	client.issue(time.Now(), time.Hour)
	other := client.open(Options{}).Current().Pair.Leaf
	chain := tls.ConnectionState{
		VerifiedChains: [][]*x509.Certificate{
			{&x509.Certificate{SerialNumber: ss.Current().Pair.Leaf.SerialNumber,
				RawSubjectPublicKeyInfo: other.RawSubjectPublicKeyInfo}, client.ca.Certificate()}}}
	if err := cs.Current().Revoked.VerifyConnection(chain); err != nil {
		t.Errorf("a certificate of another authority: %v", err)
	}
}

// chain is a root, an authority between, and a certificate, by serial numbers 1, 2 and 3.
func chain(t *testing.T) (certs []*x509.Certificate, keys []*ecdsa.PrivateKey) {
	t.Helper()
	for i := range 3 {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{SerialNumber: big.NewInt(int64(i + 1)),
			Subject: pkix.Name{CommonName: string(rune('a' + i))}, NotBefore: time.Now().Add(-time.Hour),
			NotAfter: time.Now().Add(time.Hour),
			IsCA:     i < 2, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature}
		if c.IsCA {
			c.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
		}
		parent, by := c, key
		if i > 0 {
			parent, by = certs[i-1], keys[i-1]
		}
		der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, by)
		if err == nil {
			c, err = x509.ParseCertificate(der)
		}
		if err != nil {
			t.Fatal(err)
		}
		certs, keys = append(certs, c), append(keys, key)
	}
	return certs, keys
}

func listOf(t *testing.T, l x509.RevocationList, by *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	if l.Number == nil {
		l.Number = big.NewInt(7)
	}
	l.ThisUpdate, l.NextUpdate = time.Now(), time.Now().Add(time.Hour)
	der, err := x509.CreateRevocationList(rand.Reader, &l, by, key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
}

func entry(serial int64) x509.RevocationListEntry {
	return x509.RevocationListEntry{SerialNumber: big.NewInt(serial), RevocationTime: time.Now()}
}

// An authority between is revoked by the one above it, and revokes by a list of its own, in the same file.
func TestRevokedBetween(t *testing.T) {
	c, keys := chain(t)
	state := tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{c[2], c[1], c[0]}}}
	for name, tc := range map[string]struct {
		text    []byte
		revoked *x509.Certificate
	}{
		"the one between": {
			listOf(t, x509.RevocationList{RevokedCertificateEntries: []x509.RevocationListEntry{entry(2)}}, c[0],
				keys[0]), c[1]},
		"by the one between": {
			append(listOf(t, x509.RevocationList{}, c[0], keys[0]),
				listOf(t, x509.RevocationList{RevokedCertificateEntries: []x509.RevocationListEntry{entry(3)}}, c[1],
					keys[1])...), c[2]},
		"a number of the other's": {
			listOf(t, x509.RevocationList{RevokedCertificateEntries: []x509.RevocationListEntry{entry(3)}}, c[0],
				keys[0]), nil},
	} {
		r, err := ParseRevoked(tc.text, c[:2])
		if err != nil {
			t.Fatal(err)
		}
		var revoked *RevokedError
		if err := r.VerifyConnection(state); (err != nil) != (tc.revoked != nil) || errors.As(err, &revoked) &&
			!revoked.Cert.Equal(tc.revoked) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Lists that cannot be read, or are nobody's, or say less than they seem to, are refused with all that comes with them.
func TestListsRefused(t *testing.T) {
	server, _ := labs(t)
	s := server.open(Options{})
	good := mustRead(t, server.files.CRL)
	c, keys := chain(t)
	critical := pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 27}, Critical: true, Value: []byte{2, 1, 1}}
	own := func(l x509.RevocationList) []byte { return listOf(t, l, c[0], keys[0]) }
	server.write(server.files.CA,
		append(server.ca.CertPEM(), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c[0].Raw})...))
	if changed, err := s.Poll(); !changed || err != nil {
		t.Fatal(changed, err)
	}
	former := s.Current()
	partial := entry(3)
	partial.ExtraExtensions = []pkix.Extension{
		{Id: asn1.ObjectIdentifier{2, 5, 29, 29}, Critical: true, Value: []byte{0x30, 0}}}
	for name, tc := range map[string]struct {
		text []byte
		want string
	}{
		"empty":              {nil, "no list of revoked certificates in it"},
		"a certificate":      {server.ca.CertPEM(), "no list of revoked certificates in it"},
		"half of the second": {append(append([]byte{}, good...), good[:len(good)-30]...), "not PEM to its end"},
		"no DER":             {[]byte("-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n"), "list 1: "},
		"of another authority": {listOf(t, x509.RevocationList{}, c[1], keys[1]),
			"list 1, of CN=b: no authority of tls.ca that may sign lists has signed it"},
		"beside a good one": {
			append(append([]byte{}, good...), listOf(t, x509.RevocationList{}, c[1], keys[1])...), "list 2, of CN=b"},
		"changes to another list": {own(x509.RevocationList{ExtraExtensions: []pkix.Extension{critical}}),
			"critical extension 2.5.29.27"},
		"others' certificates": {
			own(x509.RevocationList{RevokedCertificateEntries: []x509.RevocationListEntry{partial}}),
			"certificate 3: it has the critical extension 2.5.29.29"},
		"more than is read of files": {make([]byte, maxFile+1), "has more than"},
	} {
		server.write(server.files.CRL, tc.text)
		if changed, err := s.Reload(); changed || err == nil || !strings.Contains(err.Error(), tc.want) ||
			!strings.Contains(err.Error(), "tls.crl: ") {
			t.Errorf("%s: %v, %v, want %q", name, changed, err, tc.want)
		}
		if s.Current() != former {
			t.Errorf("%s: what is in use was not kept", name)
		}
	}
	if _, err := Open(Options{Files: server.files}); err == nil {
		t.Error("a start with such a list")
	}
}

// A list that has expired goes on being one, and is told of once.
func TestListExpires(t *testing.T) {
	server, client := labs(t)
	ss, cs := server.open(Options{}), client.open(Options{})
	if _, err := ss.Poll(); err != nil {
		t.Error(err)
	}
	server.revoke(time.Now().Add(-2*time.Hour), time.Hour, cs.Current().Pair.Leaf)
	var told []string
	for range 4 {
		if _, err := ss.Poll(); err != nil {
			if !errors.Is(err, ErrListExpired) {
				t.Error(err)
			}
			told = append(told, err.Error())
		}
	}
	if len(told) != 1 || !strings.Contains(told[0], server.files.CRL) || ss.Taken() != 1 || ss.Refused() != 0 {
		t.Errorf("told %q, taken %d times, refused %d", told, ss.Taken(), ss.Refused())
	}
	if serr, _ := meet(t, ss.Config(), forHost(t, cs.Config(), "node")); !errors.As(serr, new(*RevokedError)) {
		t.Errorf("the server said %v", serr)
	}
	all := ss.InUse()
	if l := all[len(all)-1]; l.File != server.files.CRL || l.Serial != "1" || time.Until(l.NotAfter) > 0 {
		t.Errorf("in use: %+v", all)
	}
}
