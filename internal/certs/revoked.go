package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"time"
)

// ErrListExpired means that a list of revoked certificates should have been renewed. Its certificates stay refused.
var ErrListExpired = errors.New("the list of revoked certificates has expired, and its certificates stay refused")

// RevokedError means that the peer's certificate, or one between it and the authority, has been revoked.
type RevokedError struct {
	Cert *x509.Certificate
	At   time.Time // when the authority revoked it
}

func (e *RevokedError) Error() string {
	return fmt.Sprintf("certificate %s of %.200s was revoked on %s", e.Cert.SerialNumber.Text(16), Identity(e.Cert),
		e.At.UTC().Format(time.DateTime))
}

// Revoked is which certificates their authorities have revoked. It is never changed; nil has none.
type Revoked struct {
	lists []*x509.RevocationList
	at    map[issued]time.Time
}

// issued names a certificate by its authority's key, since authorities of one name may come after one another, and the
// serial number.
type issued struct{ authority, serial string }

func issuedBy(authority *x509.Certificate, serial *big.Int) issued {
	return issued{string(authority.RawSubjectPublicKeyInfo), serial.Text(16)}
}

// ParseRevoked reads the lists of a PEM file (X509 CRL, RFC 5280). It refuses all of it if one cannot be read or is not
// signed by one of the authorities, and a file without any.
func ParseRevoked(text []byte, authorities []*x509.Certificate) (*Revoked, error) {
	lists, err := ParseLists(text)
	if err != nil {
		return nil, err
	}
	r := &Revoked{lists: lists, at: make(map[issued]time.Time)}
	for i, l := range lists {
		signer := slices.IndexFunc(authorities, func(a *x509.Certificate) bool {
			return l.CheckSignatureFrom(a) == nil
		})
		if signer < 0 {
			return nil, fmt.Errorf("list %d, of %.200s: no authority of tls.ca that may sign lists has signed it", i+1,
				l.Issuer)
		}
		for _, e := range l.RevokedCertificateEntries {
			k := issuedBy(authorities[signer], e.SerialNumber)
			if at, ok := r.at[k]; !ok || e.RevocationTime.Before(at) {
				r.at[k] = e.RevocationTime
			}
		}
	}
	return r, nil
}

// ParseLists reads the lists of a PEM file, whoever signed them.
func ParseLists(text []byte) (all []*x509.RevocationList, err error) {
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		text = rest
		if block.Type != "X509 CRL" {
			continue
		}
		l, err := x509.ParseRevocationList(block.Bytes)
		if err == nil {
			err = checkList(l)
		}
		if err != nil {
			return nil, fmt.Errorf("list %d: %w", len(all)+1, err)
		}
		all = append(all, l)
	}
	if bytes.Contains(text, []byte("-----BEGIN ")) {
		return nil, fmt.Errorf("what begins behind list %d is not PEM to its end", len(all))
	}
	if len(all) == 0 {
		return nil, errors.New("no list of revoked certificates in it")
	}
	return all, nil
}

// checkList refuses lists that say less, or other, than that these certificates of their issuer are revoked: changes to
// another list, parts of one, and lists about others' certificates. RFC 5280, section 5.2, has such extensions
// critical.
func checkList(l *x509.RevocationList) error {
	if l.NextUpdate.IsZero() {
		return errors.New("it has no time by which it is renewed (nextUpdate)")
	}
	for _, x := range l.Extensions {
		if x.Critical {
			return unknownExtension(x.Id)
		}
	}
	for _, e := range l.RevokedCertificateEntries {
		for _, x := range e.Extensions {
			if x.Critical {
				return fmt.Errorf("certificate %s: %w", e.SerialNumber.Text(16), unknownExtension(x.Id))
			}
		}
	}
	return nil
}

func unknownExtension(id asn1.ObjectIdentifier) error {
	return fmt.Errorf("it has the critical extension %v, which is not understood: want a full list of its issuer's "+
		"own certificates", id)
}

// Lists are those that r was made of. The caller does not change them.
func (r *Revoked) Lists() []*x509.RevocationList {
	if r == nil {
		return nil
	}
	return r.lists
}

// Number is that of a list, in hexadecimal; empty if it has none.
func Number(l *x509.RevocationList) string {
	if l.Number == nil {
		return ""
	}
	return l.Number.Text(16)
}

// expired tells of a list that should have been renewed.
func (r *Revoked) expired(now time.Time) error {
	for _, l := range r.Lists() {
		if now.After(l.NextUpdate) {
			return fmt.Errorf("%w: that of %s, number %s, was to be renewed by %s", ErrListExpired, l.Issuer, Number(l),
				l.NextUpdate.UTC().Format(time.DateTime))
		}
	}
	return nil
}

// VerifyConnection refuses a peer one of whose verified chains has a revoked certificate, with a *RevokedError. It is a
// tls.Config's.
func (r *Revoked) VerifyConnection(cs tls.ConnectionState) error {
	if r == nil || len(r.at) == 0 {
		return nil
	}
	for _, chain := range cs.VerifiedChains {
		for i, c := range chain[:max(len(chain)-1, 0)] {
			if at, ok := r.at[issuedBy(chain[i+1], c.SerialNumber)]; ok {
				return &RevokedError{Cert: c, At: at}
			}
		}
	}
	return nil
}

// StillWelcome reports whether a handshake by conf, a server's, would now end as well as it did for the peer of cs. An
// error says why not, such as a *RevokedError.
func StillWelcome(conf *tls.Config, cs tls.ConnectionState) error {
	if conf.GetConfigForClient != nil {
		now, err := conf.GetConfigForClient(&tls.ClientHelloInfo{})
		if err != nil {
			return err
		}
		if now != nil {
			conf = now
		}
	}
	if conf.VerifyConnection == nil {
		return nil
	}
	return conf.VerifyConnection(cs)
}
