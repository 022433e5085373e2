// Package certs gives TLS configurations whose certificate, key and authorities are those that
// their files hold now. A file that changes holds for the next connection. That takes no
// restart, and no end to connections that there are.
//
// It leaves to its callers when to look at the files, and what to log. Start with [Source].
// Everything may be called concurrently. A configuration from [Source.Config] belongs to the
// caller, who may clone it and must change it by [With] alone.
//
// Servers take the files' content from GetConfigForClient, for which crypto/tls has it; calls do so
// through [ForHost].
package certs

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/internal/units"
)

// Files names PEM files, and who shows what others hold.
type Files struct {
	CA   string // authorities that peers' certificates must come from
	Cert string // the certificate that is shown, and those between it and the authority
	Key  string // its private key
	CRL  string // lists of certificates that the authorities have revoked; empty: none has been
	// ServerName is the name that the certificate of everybody who is called has; empty: the name or the IP address
	// that is called.
	ServerName string
}

// Set is what files hold. It is never changed.
type Set struct {
	Authorities []*x509.Certificate
	Pool        *x509.CertPool // of Authorities
	Pair        tls.Certificate
	Revoked     *Revoked
}

// config is for one connection, accepted or made.
func (s *Set) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{s.Pair}, RootCAs: s.Pool,
		ClientCAs:  s.Pool,
		ClientAuth: tls.RequireAndVerifyClientCert, VerifyConnection: s.Revoked.VerifyConnection}
}

// contents are the bytes of files, by the order in Files.
type contents struct {
	bytes   [4][]byte // nil of a file without a name
	changed time.Time // of the file that changed last
}

func (c *contents) equal(d *contents) bool {
	for i := range c.bytes {
		if !bytes.Equal(c.bytes[i], d.bytes[i]) {
			return false
		}
	}
	return true
}

func (f Files) read() (c contents, err error) {
	for i, x := range []struct{ key, file string }{{"tls.ca", f.CA}, {"tls.cert", f.Cert}, {"tls.key", f.Key},
		{"tls.crl", f.CRL}} {
		if x.file == "" && x.key == "tls.crl" {
			continue
		}
		text, changed, err := readFile(x.file)
		if err != nil {
			return c, fmt.Errorf("%s: %w", x.key, err)
		}
		c.bytes[i] = text
		if changed.After(c.changed) {
			c.changed = changed
		}
	}
	return c, nil
}

// maxFile bounds what is read every second; the largest bundles of public authorities have a quarter of it.
const maxFile = 1 << 20

func readFile(name string) (text []byte, changed time.Time, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, changed, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, changed, err
	}
	text, err = io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%s has more than %s", name, units.Bytes(maxFile))
	}
	return text, st.ModTime(), err
}

// parse checks c, all of it: half of a bundle must not pass for a smaller one.
func (f Files) parse(c contents) (*Set, error) {
	s := &Set{Pool: x509.NewCertPool()}
	var err error
	if s.Authorities, err = Parse(c.bytes[0]); err != nil {
		return nil, fmt.Errorf("tls.ca: %s: %w", f.CA, err)
	}
	for _, a := range s.Authorities {
		s.Pool.AddCert(a)
	}
	if s.Pair, err = tls.X509KeyPair(c.bytes[1], c.bytes[2]); err != nil {
		return nil, fmt.Errorf("tls.cert %s, tls.key %s: %w", f.Cert, f.Key, err)
	}
	if f.CRL != "" {
		if s.Revoked, err = ParseRevoked(c.bytes[3], s.Authorities); err != nil {
			return nil, fmt.Errorf("tls.crl: %s: %w", f.CRL, err)
		}
	}
	return s, nil
}

// Load reads the files once.
func (f Files) Load() (*Set, error) {
	c, err := f.read()
	if err != nil {
		return nil, err
	}
	return f.parse(c)
}

// LoadConfig is for servers and for calls to them, by what the files hold now.
func (f Files) LoadConfig() (*tls.Config, error) {
	s, err := f.Load()
	if err != nil {
		return nil, err
	}
	c := s.config()
	c.ServerName = f.ServerName
	return c, nil
}

// Parse reads the certificates of a PEM file. It refuses a file without any, and one with half of one.
func Parse(text []byte) (all []*x509.Certificate, err error) {
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		text = rest
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(all)+1, err)
		}
		all = append(all, c)
	}
	if bytes.Contains(text, []byte("-----BEGIN ")) {
		return nil, fmt.Errorf("what begins behind certificate %d is not PEM to its end", len(all))
	}
	if len(all) == 0 {
		return nil, errors.New("no certificate in it")
	}
	return all, nil
}

// Identity is who c is for: its first URI, or its subject if it has none.
func Identity(c *x509.Certificate) string {
	if len(c.URIs) > 0 {
		return c.URIs[0].String()
	}
	return c.Subject.String()
}

// CheckTime tells why c is not valid at now.
func CheckTime(c *x509.Certificate, now time.Time) error {
	switch {
	case now.Before(c.NotBefore):
		return fmt.Errorf("it is not valid before %v", c.NotBefore)
	case now.After(c.NotAfter):
		return fmt.Errorf("it expired on %v", c.NotAfter)
	}
	return nil
}

// Options configure a Source.
type Options struct {
	Files Files
	// Anonymous lets peers that call show no certificate.
	Anonymous bool
	// AtUse, if not nil, has connections look at the files, a second after the last look at the earliest. Programs
	// that make no connections are not woken. It hears what Poll would say, and must not block.
	AtUse func(error)
	// Check, if not nil, refuses a certificate that will not do, at the start and later.
	Check func(*x509.Certificate) error
}

// Source is what files hold, taken anew when they change.
type Source struct {
	o       Options
	current atomic.Pointer[current]
	taken   atomic.Uint64
	refused atomic.Uint64
	looked  atomic.Int64 // Unix nanoseconds of the last look at use
	mu      struct {
		sync.Mutex
		used contents // from which current was made
		seen contents // of a poll that left them to come to rest
		said string   // the refusal that Poll has told, or would tell if it came again
		told bool
		late *Revoked // whose expiry Poll has told
	}
}

type current struct {
	set  *Set
	conf *tls.Config // of one connection, accepted or made
}

// Open loads the files.
func Open(o Options) (*Source, error) {
	s := &Source{o: o}
	c, err := o.Files.read()
	if err != nil {
		return nil, err
	}
	if err := s.takeLocked(c, false); err != nil {
		return nil, err
	}
	return s, nil
}

// takeLocked makes c current. After the start a certificate that is not valid now is refused if
// the one in use is. The caller holds mu, or is Open.
func (s *Source) takeLocked(c contents, again bool) error {
	set, err := s.o.Files.parse(c)
	if err != nil {
		return err
	}
	if again {
		if now := time.Now(); CheckTime(s.current.Load().set.Pair.Leaf, now) == nil {
			err = CheckTime(set.Pair.Leaf, now)
		}
	}
	if err == nil && s.o.Check != nil {
		err = s.o.Check(set.Pair.Leaf)
	}
	if err != nil {
		return fmt.Errorf("tls.cert %s: %w", s.o.Files.Cert, err)
	}
	conf := set.config()
	if s.o.Anonymous {
		conf.ClientAuth, conf.ClientCAs = tls.NoClientCert, nil
	}
	s.current.Store(&current{set, conf})
	s.mu.used = c
	return nil
}

// Reload takes over what the files hold, if it is something else than what is in use; an error says
// why that is kept.
func (s *Source) Reload() (changed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, err := s.o.Files.read()
	return s.reloadLocked(c, err)
}

func (s *Source) reloadLocked(c contents, err error) (changed bool, _ error) {
	if err == nil && c.equal(&s.mu.used) {
		return false, nil
	}
	if err == nil {
		err = s.takeLocked(c, true)
	}
	if err != nil {
		s.refused.Add(1)
		return false, err
	}
	s.taken.Add(1)
	return true, nil
}

// rest is how long files must have been left alone: a certificate and its key, or two authorities, are
// seldom written at once.
const rest = 200 * time.Millisecond

// Poll is Reload for a caller that looks every second or so. It waits for files that are being
// written to come to rest. If they stay as they are, it waits no longer than to its next call.
// It gives an error when it has found the same one twice, and then not again. An error that
// matches ErrListExpired says that a list in use has expired; nothing was refused.
func (s *Source) Poll() (changed bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c, err := s.o.Files.read()
	age := time.Since(c.changed) // negative if another machine's clock gave the time
	if err == nil && age >= 0 && age < rest && !c.equal(&s.mu.used) && !c.equal(&s.mu.seen) {
		s.mu.seen = c
		return false, nil
	}
	changed, err = s.reloadLocked(c, err)
	switch {
	case err == nil:
		s.mu.said, s.mu.told = "", false
		if r := s.Current().Revoked; !changed && r != s.mu.late {
			if err = r.expired(time.Now()); err != nil {
				err, s.mu.late = fmt.Errorf("tls.crl %s: %w", s.o.Files.CRL, err), r
			}
		}
	case err.Error() != s.mu.said:
		s.mu.said, s.mu.told = err.Error(), false
		err = nil
	case s.mu.told:
		err = nil
	default:
		s.mu.told = true
	}
	return changed, err
}

// pollAtUse is Poll for a connection, if that is asked for and it is time.
func (s *Source) pollAtUse() {
	if s.o.AtUse == nil {
		return
	}
	now, last := time.Now().UnixNano(), s.looked.Load()
	if now-last < int64(time.Second) || !s.looked.CompareAndSwap(last, now) {
		return
	}
	if _, err := s.Poll(); err != nil {
		s.o.AtUse(err)
	}
}

// Taken counts how often Reload or Poll took over other content.
func (s *Source) Taken() uint64 { return s.taken.Load() }

// Refused counts how often Reload or Poll found other content and kept what is in use.
func (s *Source) Refused() uint64 { return s.refused.Load() }

// Files are those that the Source reads.
func (s *Source) Files() Files { return s.o.Files }

// Current is what is in use.
func (s *Source) Current() *Set { return s.current.Load().set }

// InUse is a certificate, or a list of revoked ones, and the file from which it came.
type InUse struct {
	File     string
	Identity string // for whom it is; of a list, who made it
	Serial   string // in hexadecimal; of a list, its number
	NotAfter time.Time
}

// InUse lists the certificates that are in use: the one that is shown, those that come with it, and authorities; and
// lists of revoked certificates.
func (s *Source) InUse() (all []InUse) {
	set := s.Current()
	for _, der := range set.Pair.Certificate {
		// A peer, not this process, needs those behind the first, so they may be anything.
		if c, err := x509.ParseCertificate(der); err == nil {
			all = append(all, InUse{s.o.Files.Cert, Identity(c), c.SerialNumber.Text(16), c.NotAfter})
		}
	}
	for _, c := range set.Authorities {
		all = append(all, InUse{s.o.Files.CA, Identity(c), c.SerialNumber.Text(16), c.NotAfter})
	}
	for _, l := range set.Revoked.Lists() {
		all = append(all, InUse{s.o.Files.CRL, l.Issuer.String(), Number(l), l.NextUpdate})
	}
	return all
}

// Config is for servers and for calls to them, and always goes by what is in use. Calls are made
// through [ForHost]; without that they trust nobody.
func (s *Source) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			s.pollAtUse()
			return s.current.Load().conf, nil
		},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return &s.Current().Pair, nil
		},
		RootCAs:    x509.NewCertPool(),
		ServerName: s.o.Files.ServerName,
	}
}

// ForHost is c for one call to host, a name or an IP address, unless c names another. If c has
// GetConfigForClient, certificates, RootCAs and VerifyConnection are those that it gives now: crypto/tls has no
// such function for calls.
func ForHost(c *tls.Config, host string) (*tls.Config, error) {
	c = c.Clone()
	if c.ServerName == "" {
		c.ServerName = host
	}
	if c.GetConfigForClient == nil {
		return c, nil
	}
	now, err := c.GetConfigForClient(&tls.ClientHelloInfo{ServerName: host})
	if err != nil {
		return nil, err
	}
	if now != nil {
		c.Certificates, c.GetClientCertificate, c.RootCAs = now.Certificates, now.GetClientCertificate, now.RootCAs
		c.VerifyConnection = now.VerifyConnection
	}
	return c, nil
}

// With is c with a change, which also reaches what GetConfigForClient gives.
func With(c *tls.Config, change func(*tls.Config)) *tls.Config {
	c = c.Clone()
	if get := c.GetConfigForClient; get != nil {
		c.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			inner, err := get(h)
			if inner == nil || err != nil {
				return inner, err
			}
			inner = inner.Clone()
			change(inner)
			return inner, nil
		}
	}
	change(c)
	return c
}
