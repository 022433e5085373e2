// Package identity says whose a certificate is, and which role its owner has in the store.
// The owner is a directory node, a memory node, a gateway, a janitor, an archive, an
// operator or a client.
//
// It leaves checking chains and dates to crypto/tls, and what a role may do to its callers. For
// RPCs, the table beside the directory's contract (internal/dirpb) says what a role may do.
//
// Start with [Mapping], which reads a certificate, and [Identity]. Everything here is a value: it
// may be used concurrently, and nothing is kept.
//
// Names are SPIFFE ids in the URI of X.509-SVIDs; organizational units as roles follow
// Kubernetes, which has groups there.
package identity

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/kvd-project/kvd/internal/certs"
)

// Role is what an identity may be in the store. The zero value is none.
type Role uint8

// The roles, in the order in which tables list them.
const (
	Directory Role = 1 + iota
	MemNode
	Tier
	Gateway
	Janitor
	Archive
	Operator
	Client
)

var roleNames = [...]string{Directory: "directory", MemNode: "memnode", Tier: "tier", Gateway: "gateway",
	Janitor: "janitor", Archive: "archive", Operator: "operator", Client: "client"}

func (r Role) String() string {
	if r == 0 || int(r) >= len(roleNames) {
		return fmt.Sprintf("Role(%d)", uint8(r))
	}
	return roleNames[r]
}

// ParseRole is the inverse of String.
func ParseRole(s string) (Role, error) {
	if i := slices.Index(roleNames[1:], s); i >= 0 {
		return Role(i + 1), nil
	}
	return 0, fmt.Errorf("role %.64q: want one of %s", s, Every)
}

// Roles is a set of roles.
type Roles uint16

// Every holds all roles.
const Every = Roles(1<<(Client+1) - 1<<Directory)

// RolesOf is the set of these.
func RolesOf(roles ...Role) (s Roles) {
	for _, r := range roles {
		s |= 1 << r
	}
	return s
}

// Has reports whether r is in the set.
func (s Roles) Has(r Role) bool { return r != 0 && s&(1<<r) != 0 }

// All lists the set in the order of the constants.
func (s Roles) All() (roles []Role) {
	for r := Directory; r <= Client; r++ {
		if s.Has(r) {
			roles = append(roles, r)
		}
	}
	return roles
}

// String names the roles with commas between.
func (s Roles) String() string {
	var names []string
	for _, r := range s.All() {
		names = append(names, r.String())
	}
	return strings.Join(names, ", ")
}

// MaxNameBytes is the longest name and the longest trust domain, so that an identity fits
// where the directory keeps it.
const MaxNameBytes = 64

// Identity is the owner of a certificate. The zero value is nobody: a caller without TLS.
type Identity struct {
	// TrustDomain is that of a SPIFFE id; empty if the subject of the certificate named the role.
	TrustDomain string
	Role        Role
	Name        string // 1..MaxNameBytes printable bytes without a slash
}

// String is the SPIFFE id, or role/name of an identity without one; empty for nobody. Two
// identities are the same if their strings are.
func (i Identity) String() string {
	switch {
	case i == (Identity{}):
		return ""
	case i.TrustDomain == "":
		return i.Role.String() + "/" + i.Name
	}
	return "spiffe://" + i.TrustDomain + "/kvd/" + i.Role.String() + "/" + i.Name
}

var (
	// ErrNoCertificate means that the peer has shown no certificate that was verified.
	ErrNoCertificate = errors.New("no verified certificate: show one of the cluster's authorities")
	// ErrUnidentified means that a verified certificate does not say whose it is.
	ErrUnidentified = errors.New("the certificate has no identity")
)

// DeniedError means that an identity lacks the role that something is for. Nothing was done.
type DeniedError struct {
	Identity Identity
	Right    string // as in "DrainNode"
	Want     Roles
}

func (e *DeniedError) Error() string {
	return fmt.Sprintf("%s has the role %v, and %s is for %v", e.Identity, e.Identity.Role, e.Right, e.Want)
}

// IsRefusal reports whether a handshake failed, or a call was refused, for the identity of the peer.
func IsRefusal(err error) bool {
	return errors.Is(err, ErrUnidentified) || errors.As(err, new(*DeniedError))
}

// Mapping says how certificates name their owners. The zero value takes SPIFFE ids of any trust
// domain.
type Mapping struct {
	// TrustDomain is the only one whose SPIFFE ids count; empty: every one that the
	// authorities vouch for.
	TrustDomain string
	// Units gives the role of a certificate without a SPIFFE id by an organizational unit (OU) of
	// its subject. The subject's common name (CN) is the name then. Empty: such certificates are
	// refused.
	Units map[string]Role
}

// ParseMapping reads settings: units are UNIT=ROLE.
func ParseMapping(trustDomain string, units []string) (Mapping, error) {
	m := Mapping{TrustDomain: trustDomain}
	if trustDomain != "" {
		if td, err := spiffeid.TrustDomainFromString(trustDomain); err != nil || td.Name() != trustDomain {
			return Mapping{}, fmt.Errorf("trust domain %.80q: want a name of lower-case letters, digits, dots, "+
				"dashes and underscores, such as prod.example.org", trustDomain)
		}
		if len(trustDomain) > MaxNameBytes {
			return Mapping{}, fmt.Errorf("trust domain of %d bytes, want at most %d", len(trustDomain), MaxNameBytes)
		}
	}
	for _, u := range units {
		unit, name, ok := strings.Cut(u, "=")
		if !ok || unit == "" {
			return Mapping{}, fmt.Errorf("%.80q: want an organizational unit and its role, such as storage=memnode", u)
		}
		r, err := ParseRole(name)
		if err != nil {
			return Mapping{}, fmt.Errorf("%.80q: %w", u, err)
		}
		if old, ok := m.Units[unit]; ok && old != r {
			return Mapping{}, fmt.Errorf("organizational unit %.64q has the roles %v and %v, want one", unit, old, r)
		}
		if m.Units == nil {
			m.Units = make(map[string]Role)
		}
		m.Units[unit] = r
	}
	return m, nil
}

// Form describes the certificates that m takes, for people.
func (m Mapping) Form() string {
	td := m.TrustDomain
	if td == "" {
		td = "TRUST-DOMAIN"
	}
	s := fmt.Sprintf("want the URI spiffe://%s/kvd/ROLE/NAME among its subject alternative names, ROLE one of %v", td,
		Every)
	if len(m.Units) > 0 {
		s += fmt.Sprintf("; or a subject with a common name and one of the organizational units %s",
			strings.Join(slices.Sorted(maps.Keys(m.Units)), ", "))
	}
	return s
}

// OfCertificate gives the owner of a certificate that has been verified. An error matches
// ErrUnidentified and says which form is expected.
func (m Mapping) OfCertificate(c *x509.Certificate) (Identity, error) {
	fail := func(format string, args ...any) (Identity, error) {
		return Identity{}, fmt.Errorf("%w: %s (subject %.128q): %s", ErrUnidentified, fmt.Sprintf(format, args...),
			c.Subject, m.Form())
	}
	var ids []spiffeid.ID
	for _, u := range c.URIs {
		if !strings.EqualFold(u.Scheme, "spiffe") {
			continue
		}
		id, err := spiffeid.FromURI(u)
		if err != nil {
			return fail("%.128q: %v", u, err)
		}
		ids = append(ids, id)
	}
	switch {
	case len(ids) > 1:
		return fail("%d SPIFFE ids, want one", len(ids))
	case len(ids) == 1:
		i, err := m.ofID(ids[0])
		if err != nil {
			return fail("%.160q: %v", ids[0], err)
		}
		return i, nil
	case len(m.Units) == 0:
		return fail("no SPIFFE id")
	}
	var role Role
	for _, u := range c.Subject.OrganizationalUnit {
		switch r := m.Units[u]; {
		case r == 0 || r == role:
		case role != 0:
			return fail("its organizational units mean the roles %v and %v", role, r)
		default:
			role = r
		}
	}
	if role == 0 {
		return fail("no SPIFFE id, and no organizational unit that means a role")
	}
	if err := checkName(c.Subject.CommonName); err != nil {
		return fail("common name %v", err)
	}
	return Identity{Role: role, Name: c.Subject.CommonName}, nil
}

func (m Mapping) ofID(id spiffeid.ID) (Identity, error) {
	td := id.TrustDomain().Name()
	if m.TrustDomain != "" && td != m.TrustDomain {
		return Identity{}, errors.New("it is of another trust domain")
	}
	if len(td) > MaxNameBytes {
		return Identity{}, fmt.Errorf("trust domain of %d bytes, want at most %d", len(td), MaxNameBytes)
	}
	parts := strings.Split(id.Path(), "/") // "", kvd, role, name
	if len(parts) != 4 || parts[1] != "kvd" {
		return Identity{}, errors.New("its path is not /kvd/ROLE/NAME")
	}
	r, err := ParseRole(parts[2])
	if err != nil {
		return Identity{}, err
	}
	if err := checkName(parts[3]); err != nil {
		return Identity{}, fmt.Errorf("name %w", err)
	}
	return Identity{TrustDomain: td, Role: r, Name: parts[3]}, nil
}

func checkName(s string) error {
	if s == "" || len(s) > MaxNameBytes {
		return fmt.Errorf("of %d bytes, want 1..%d", len(s), MaxNameBytes)
	}
	for i, r := range s {
		if !unicode.IsPrint(r) || r == utf8.RuneError || r == '/' {
			return fmt.Errorf("%q holds %q at byte %d, want printable characters and no slash", s, r, i)
		}
	}
	return nil
}

// OfConnection gives the peer of a TLS connection whose handshake is done. An error matches
// ErrNoCertificate or ErrUnidentified.
func (m Mapping) OfConnection(cs *tls.ConnectionState) (Identity, error) {
	// PeerCertificates may hold what nobody verified.
	if len(cs.VerifiedChains) == 0 || len(cs.VerifiedChains[0]) == 0 {
		return Identity{}, ErrNoCertificate
	}
	return m.OfCertificate(cs.VerifiedChains[0][0])
}

// Admit gives the peer of a TLS connection if it has one of the roles in want, which right is for.
// An error matches ErrNoCertificate or ErrUnidentified, or is a *DeniedError.
func (m Mapping) Admit(cs *tls.ConnectionState, right string, want Roles) (Identity, error) {
	i, err := m.OfConnection(cs)
	if err == nil && !want.Has(i.Role) {
		err = &DeniedError{Identity: i, Right: right, Want: want}
	}
	return i, err
}

// Called is conf for calls to processes of one role: others fail the handshake, so nothing is sent to them. The caller
// owns the result; nil, which is no TLS, stays nil.
func (m Mapping) Called(conf *tls.Config, role Role) *tls.Config {
	if conf == nil {
		return nil
	}
	return m.Require(conf, "answering as a "+role.String(), RolesOf(role))
}

// Require is conf for connections whose peers must have one of the roles in want, which right is
// for. Others fail the handshake, after their chains were verified. The caller owns the result;
// conf stays as it is.
func (m Mapping) Require(conf *tls.Config, right string, want Roles) *tls.Config {
	return certs.With(conf, func(c *tls.Config) {
		verify := c.VerifyConnection
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			if verify != nil {
				if err := verify(cs); err != nil {
					return err
				}
			}
			_, err := m.Admit(&cs, right, want)
			return err
		}
	})
}
