// Package authority makes a private certificate authority, the certificates of a cluster, and the list of those that
// are revoked.
//
// It leaves files to its callers: it takes and gives PEM. Start with [New] and [Authority.Issue].
// An Authority is never changed, and may be used concurrently. Its key leaves it by
// [Authority.KeyPEM] alone.
//
// A certificate says who shows it in a URI, spiffe://<trust domain>/kvd/<role>/<name>. The URI has
// the form that the SPIFFE-ID specification gives; the trust domain is the authority's own.
package authority

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
)

// hosts says whether a role needs names at which others call it.
type hosts int

const (
	hostsNeeded  hosts = iota + 1 // others always call it
	hostsAllowed                  // it may serve metrics, or kvctl perf
	hostsNever
)

type role struct {
	name  string
	hosts hosts
}

var roles = []role{
	{"directory", hostsNeeded}, {"memnode", hostsNeeded}, {"tier", hostsNeeded}, {"gateway", hostsNeeded},
	{"janitor", hostsAllowed}, {"archive", hostsAllowed}, {"operator", hostsAllowed},
	{"client", hostsNever},
}

// Roles lists the roles that a certificate can have.
func Roles() (names []string) {
	for _, r := range roles {
		names = append(names, r.name)
	}
	return names
}

// maxGroups is how many groups processes of the store take of a certificate.
const maxGroups = 16

// backdate is for clocks that are behind.
const backdate = 5 * time.Minute

var (
	// As the SPIFFE-ID specification has trust domains and path segments.
	trustDomain = regexp.MustCompile(`^[a-z0-9._-]{1,255}$`)
	segment     = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,64}$`)
)

// Authority signs certificates.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// New makes an authority with a key of its own, whose certificate is valid for that long from now.
func New(trust string, now time.Time, valid time.Duration) (*Authority, error) {
	if !trustDomain.MatchString(trust) {
		return nil, fmt.Errorf("trust domain %q: want at most 255 lower-case letters, digits, dots, dashes and "+
			"underscores", trust)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "kvd authority " + trust}, URIs: []*url.URL{{Scheme: "spiffe", Host: trust}},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(valid), IsCA: true, BasicConstraintsValid: true,
		MaxPathLenZero: true,
		KeyUsage:       x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &Authority{cert, key}, err
}

// Parse reads an authority from what CertPEM and KeyPEM gave.
func Parse(certPEM, keyPEM []byte) (*Authority, error) {
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, err
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	switch {
	case !ok:
		return nil, fmt.Errorf("its key is a %T, want one of ECDSA", pair.PrivateKey)
	case !pair.Leaf.IsCA:
		return nil, errors.New("it is no authority's certificate")
	case trustDomainOf(pair.Leaf) == "":
		return nil, errors.New("it names no trust domain: it was not made by kvctl certs init")
	}
	return &Authority{pair.Leaf, key}, nil
}

func trustDomainOf(c *x509.Certificate) string {
	if len(c.URIs) == 1 && c.URIs[0].Scheme == "spiffe" && c.URIs[0].Path == "" {
		return c.URIs[0].Host
	}
	return ""
}

// Certificate is the authority's own. The caller does not change it.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// CertPEM is the authority's certificate, which is no secret.
func (a *Authority) CertPEM() []byte { return encode("CERTIFICATE", a.cert.Raw) }

// KeyPEM is the authority's key: whoever has it can be anybody.
func (a *Authority) KeyPEM() ([]byte, error) { return keyPEM(a.key) }

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

func keyPEM(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return encode("PRIVATE KEY", der), err
}

// Request says what a certificate is for.
type Request struct {
	Name, Role string
	Groups     []string // organizations of the subject: at most 16 names, as Name
	DNS        []string // names at which others call its holder
	IPs        []net.IP // and addresses
	Valid      time.Duration
}

// validate joins every problem of q.
func (q *Request) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !segment.MatchString(q.Name) || strings.Trim(q.Name, ".") == "" {
		bad("name %q: want 1 to 64 letters, digits, dots, dashes and underscores", q.Name)
	}
	if len(q.Groups) > maxGroups {
		bad("%d groups, want at most %d", len(q.Groups), maxGroups)
	}
	for _, g := range q.Groups {
		if !segment.MatchString(g) {
			bad("group %q: want 1 to 64 letters, digits, dots, dashes and underscores", g)
		}
	}
	called := len(q.DNS)+len(q.IPs) > 0
	i := slices.IndexFunc(roles, func(r role) bool { return r.name == q.Role })
	switch {
	case i < 0:
		bad("role %q: want one of %s", q.Role, strings.Join(Roles(), ", "))
	case roles[i].hosts == hostsNeeded && !called:
		bad("others call a %s: give the names or addresses by which they do (--dns, --ip)", q.Role)
	case roles[i].hosts == hostsNever && called:
		bad("nobody calls a %s: want no names and addresses", q.Role)
	}
	for _, d := range q.DNS {
		if d == "" || strings.ContainsAny(d, " /:@") || net.ParseIP(d) != nil {
			bad("DNS name %q: want a host's name", d)
		}
	}
	if q.Valid <= 0 {
		bad("valid for %v, want more than 0", q.Valid)
	}
	return errors.Join(errs...)
}

// Issue signs a certificate with a key of its own, valid from now, and gives both. A certificate may
// be shown to servers, and, if it has names or addresses, to those who call them.
func (a *Authority) Issue(now time.Time, q Request) (cert *x509.Certificate, certPEM, key []byte, err error) {
	if err := q.validate(); err != nil {
		return nil, nil, nil, err
	}
	end := now.Add(q.Valid)
	if end.After(a.cert.NotAfter) {
		return nil, nil, nil,
			fmt.Errorf("the authority expires on %s, before the certificate would: ask for fewer days",
				a.cert.NotAfter.UTC().Format(time.DateTime))
	}
	own, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, nil, err
	}
	template := &x509.Certificate{
		Subject:   pkix.Name{CommonName: q.Name, OrganizationalUnit: []string{q.Role}, Organization: q.Groups},
		URIs:      []*url.URL{{Scheme: "spiffe", Host: trustDomainOf(a.cert), Path: "/kvd/" + q.Role + "/" + q.Name}},
		NotBefore: now.Add(-backdate), NotAfter: end, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		DNSNames: q.DNS, IPAddresses: q.IPs,
	}
	if len(q.DNS)+len(q.IPs) > 0 {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &own.PublicKey, a.key)
	if err != nil {
		return nil, nil, nil, err
	}
	if cert, err = x509.ParseCertificate(der); err != nil {
		return nil, nil, nil, err
	}
	key, err = keyPEM(own)
	return cert, encode("CERTIFICATE", der), key, err
}

// Revoke makes the list of certificates that are revoked. Those of old, which is a's own list or nil, keep the dates
// that they have there. Those with these serial numbers are revoked from now on. The list is to be renewed within
// valid.
func (a *Authority) Revoke(now time.Time, old *x509.RevocationList, serials []*big.Int, valid time.Duration) (
	list *x509.RevocationList, listPEM []byte, err error) {
	if valid <= 0 {
		return nil, nil, fmt.Errorf("valid for %v, want more than 0", valid)
	}
	next := &x509.RevocationList{Number: big.NewInt(1), ThisUpdate: now.Add(-backdate), NextUpdate: now.Add(valid)}
	if old != nil {
		if err := old.CheckSignatureFrom(a.cert); err != nil {
			return nil, nil, fmt.Errorf("the list is not this authority's: %w", err)
		}
		if old.Number == nil {
			return nil, nil, errors.New("the list has no number")
		}
		next.Number.Add(next.Number, old.Number)
		for _, e := range old.RevokedCertificateEntries {
			next.RevokedCertificateEntries = append(next.RevokedCertificateEntries,
				x509.RevocationListEntry{SerialNumber: e.SerialNumber, RevocationTime: e.RevocationTime,
					ReasonCode: e.ReasonCode})
		}
	}
	for _, serial := range serials {
		if serial.Sign() <= 0 {
			return nil, nil, fmt.Errorf("serial number %s: want more than 0", serial.Text(16))
		}
		if !slices.ContainsFunc(next.RevokedCertificateEntries, func(e x509.RevocationListEntry) bool {
			return e.SerialNumber.Cmp(serial) == 0
		}) {
			next.RevokedCertificateEntries = append(next.RevokedCertificateEntries, x509.RevocationListEntry{
				SerialNumber: serial, RevocationTime: now})
		}
	}
	der, err := x509.CreateRevocationList(rand.Reader, next, a.cert, a.key)
	if err != nil {
		return nil, nil, err
	}
	list, err = x509.ParseRevocationList(der)
	return list, encode("X509 CRL", der), err
}
