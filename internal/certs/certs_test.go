package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/authority"
	"github.com/kvd-project/kvd/internal/testutil"
)

// lab is an authority and files in a folder.
type lab struct {
	t     *testing.T
	ca    *authority.Authority
	files Files
}

func newLab(t *testing.T) *lab {
	t.Helper()
	dir := t.TempDir()
	l := &lab{t: t, ca: newCA(t), files: Files{CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, "c.pem"),
		Key: filepath.Join(dir, "k.pem")}}
	l.write(l.files.CA, l.ca.CertPEM())
	l.issue(time.Now(), time.Hour)
	return l
}

func newCA(t *testing.T) *authority.Authority {
	t.Helper()
	ca, err := authority.New("kvd", time.Now(), 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// write writes files that have been left alone for long.
func (l *lab) write(file string, text []byte) {
	l.t.Helper()
	old := time.Now().Add(-time.Minute)
	if err := errors.Join(os.WriteFile(file, text, 0o600), os.Chtimes(file, old, old)); err != nil {
		l.t.Fatal(err)
	}
}

func (l *lab) issue(now time.Time, valid time.Duration) (cert, key []byte) {
	l.t.Helper()
	_, cert, key, err := l.ca.Issue(now, authority.Request{Name: "m", Role: "memnode", DNS: []string{"node"},
		IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Valid: valid})
	if err != nil {
		l.t.Fatal(err)
	}
	l.write(l.files.Cert, cert)
	l.write(l.files.Key, key)
	return cert, key
}

func (l *lab) open(o Options) *Source {
	l.t.Helper()
	o.Files = l.files
	s, err := Open(o)
	if err != nil {
		l.t.Fatal(err)
	}
	return s
}

// forHost is ForHost of a Source's configuration.
func forHost(t *testing.T, c *tls.Config, host string) *tls.Config {
	t.Helper()
	c, err := ForHost(c, host)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// meet has a client call a server, and gives what each says of it.
func meet(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	t.Helper()
	lis := testutil.Listen(t)
	done := make(chan error, 1)
	go func() {
		c, err := lis.Accept()
		if err != nil {
			done <- err
			return
		}
		s := tls.Server(c, server)
		err = s.Handshake()
		if err == nil {
			_, err = s.Write([]byte{1})
		}
		done <- err
		_ = s.Close()
	}()
	c, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	tc := tls.Client(c, client)
	if clientErr = tc.Handshake(); clientErr == nil {
		_, clientErr = io.ReadFull(tc, make([]byte, 1))
	} else {
		_ = c.Close()
	}
	return <-done, clientErr
}

// A configuration that was made before its files changed goes by what they hold, on both sides.
func TestSourceFollowsFiles(t *testing.T) {
	server, client := newLab(t), newLab(t)
	client.ca = server.ca
	client.write(client.files.CA, server.ca.CertPEM())
	client.issue(time.Now(), time.Hour)
	ss, cs := server.open(Options{}), client.open(Options{})
	// Both see chains that were verified, on which rights can be built.
	verified := func(c *tls.Config) {
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			if len(cs.VerifiedChains) == 0 {
				return errors.New("nobody verified this chain")
			}
			return nil
		}
	}
	sconf, cconf := With(ss.Config(), verified), With(cs.Config(), verified)
	if serr, cerr := meet(t, sconf, forHost(t, cconf, "127.0.0.1")); serr != nil || cerr != nil {
		t.Fatal(serr, cerr)
	}
	// By name, and by neither of its names.
	if serr, cerr := meet(t, sconf, forHost(t, cs.Config(), "node")); serr != nil || cerr != nil {
		t.Fatal(serr, cerr)
	}
	for host, want := range map[string]string{"127.0.0.2": "certificate is valid for 127.0.0.1, not 127.0.0.2",
		"other": "certificate is valid for node, not other"} {
		if _, err := meet(t, sconf, forHost(t, cs.Config(), host)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("called as %s: %v", host, err)
		}
	}
	var unknown x509.UnknownAuthorityError
	astray := cs.Config()
	astray.ServerName = "node"
	if _, err := meet(t, sconf, astray); !errors.As(err, &unknown) {
		t.Errorf("a call that was not made through ForHost: %v", err)
	}

	// The server's authority is another now, then the client's too, then also their certificates.
	old := server.ca
	next := newCA(t)
	for _, l := range []*lab{server, client} {
		l.ca = next
		l.write(l.files.CA, next.CertPEM())
	}
	poll := func(s *Source) {
		t.Helper()
		if changed, err := s.Poll(); !changed || err != nil {
			t.Fatal(changed, err)
		}
	}
	poll(ss)
	if serr, _ := meet(t, sconf, forHost(t, cconf, "127.0.0.1")); serr == nil ||
		!strings.Contains(serr.Error(), "unknown authority") {
		t.Errorf("a client of the authority that was dropped met %v", serr)
	}
	poll(cs)
	if _, cerr := meet(t, sconf, forHost(t, cconf, "127.0.0.1")); !errors.As(cerr, &unknown) {
		t.Errorf("a server of the authority that was dropped met %v", cerr)
	}
	server.issue(time.Now(), time.Hour)
	client.issue(time.Now(), time.Hour)
	poll(ss)
	poll(cs)
	if serr, cerr := meet(t, sconf, forHost(t, cconf, "127.0.0.1")); serr != nil || cerr != nil {
		t.Fatal(serr, cerr)
	}
	if old.Certificate().Equal(ss.Current().Authorities[0]) || ss.Taken() != 2 || ss.Refused() != 0 {
		t.Errorf("%d taken, %d refused", ss.Taken(), ss.Refused())
	}
}

// Connections look at the files, if they are asked to, and not at each use.
func TestSourceLooksAtUse(t *testing.T) {
	server := newLab(t)
	client := &lab{t: t, ca: server.ca, files: Files{CA: server.files.CA + "2", Cert: server.files.Cert + "2",
		Key: server.files.Key + "2"}}
	client.write(client.files.CA, server.ca.CertPEM())
	client.issue(time.Now(), time.Hour)
	var heard []error
	cs := client.open(Options{AtUse: func(err error) { heard = append(heard, err) }})
	ss := server.open(Options{AtUse: func(err error) { t.Error(err) }})
	sconf, cconf := ss.Config(), cs.Config()
	for _, l := range []*lab{server, client} {
		l.ca = newCA(t)
	}
	client.ca = server.ca
	for _, l := range []*lab{server, client} {
		l.write(l.files.CA, l.ca.CertPEM())
		l.issue(time.Now(), time.Hour)
	}
	if serr, cerr := meet(t, sconf, forHost(t, cconf, "node")); serr != nil || cerr != nil {
		t.Fatal(serr, cerr)
	}
	if ss.Taken() != 1 || cs.Taken() != 1 {
		t.Errorf("server %d, client %d times", ss.Taken(), cs.Taken())
	}
	client.write(client.files.Key, []byte("half"))
	long, recent := int64(0), time.Now().Add(time.Hour).UnixNano()
	for i, tc := range []struct {
		looked  int64
		refused uint64
		heard   int
	}{{recent, 0, 0}, {long, 1, 0}, {recent, 1, 0}, {long, 2, 1}, {long, 3, 1}} {
		cs.looked.Store(tc.looked)
		if serr, cerr := meet(t, sconf, forHost(t, cconf, "node")); serr != nil || cerr != nil {
			t.Fatal(serr, cerr)
		}
		if len(heard) != tc.heard || cs.Refused() != tc.refused {
			t.Errorf("connection %d: heard %v, refused %d times", i, heard, cs.Refused())
		}
	}
}

// A session that was resumed does not outlive its authority.
func TestResumption(t *testing.T) {
	l := newLab(t)
	s := l.open(Options{})
	static := forHost(t, &tls.Config{MinVersion: tls.VersionTLS13, InsecureSkipVerify: true,
		ClientSessionCache: tls.NewLRUClientSessionCache(1), Certificates: []tls.Certificate{s.Current().Pair}}, "node")
	conf := s.Config()
	for range 2 {
		if serr, cerr := meet(t, conf, static); serr != nil || cerr != nil {
			t.Fatal(serr, cerr)
		}
	}
	l.ca = newCA(t)
	l.write(l.files.CA, l.ca.CertPEM())
	l.issue(time.Now(), time.Hour)
	if changed, err := s.Reload(); !changed || err != nil {
		t.Fatal(changed, err)
	}
	if serr, _ := meet(t, conf, static); serr == nil {
		t.Error("a session of the authority that was dropped goes on")
	}
}

// Files that cannot be used keep those that are, are told of once, and counted.
func TestSourceKeeps(t *testing.T) {
	l := newLab(t)
	s := l.open(Options{Check: func(c *x509.Certificate) error {
		if c.Subject.CommonName != "m" {
			return errors.New("bad name")
		}
		return nil
	}})
	good := s.Current()
	ca, cert, key := l.ca.CertPEM(), mustRead(t, l.files.Cert), mustRead(t, l.files.Key)
	two := append(append([]byte{}, ca...), newCA(t).CertPEM()...)
	other := newLab(t)
	otherCert, otherKey := other.issue(time.Now(), time.Hour)
	_, stranger, strangerKey,
		err := l.ca.Issue(time.Now(), authority.Request{Name: "x", Role: "client", Valid: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	// Issued with a clock of their own: one has expired, the other is for tomorrow.
	_, past, pastKey,
		err := l.ca.Issue(time.Now().Add(-time.Hour), authority.Request{Name: "m", Role: "client", Valid: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	_, future, futureKey,
		err := l.ca.Issue(time.Now().Add(time.Hour), authority.Request{Name: "m", Role: "client", Valid: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		ca, cert, key []byte
		want          string
	}{
		"empty authorities":      {nil, cert, key, "no certificate in it"},
		"half of the second":     {two[:len(two)-30], cert, key, "not PEM to its end"},
		"a key of another":       {ca, cert, otherKey, "does not match"},
		"a certificate, no key":  {ca, otherCert, key, "does not match"},
		"half of a key":          {ca, cert, key[:40], "tls.key"},
		"one that has expired":   {ca, past, pastKey, "it expired on"},
		"one for later":          {ca, future, futureKey, "it is not valid before"},
		"one that Check refuses": {ca, stranger, strangerKey, "bad name"},
		"authority: no DER": {[]byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), cert, key,
			"certificate 1"},
	} {
		t.Run(name, func(t *testing.T) {
			l.write(l.files.CA, tc.ca)
			l.write(l.files.Cert, tc.cert)
			l.write(l.files.Key, tc.key)
			before := s.Refused()
			var told []string
			for range 5 {
				changed, err := s.Poll()
				if changed {
					t.Error("taken over")
				}
				if err != nil {
					told = append(told, err.Error())
				}
			}
			if len(told) != 1 || !strings.Contains(told[0], tc.want) || s.Refused() != before+5 {
				t.Errorf("told %q, refused %d times", told, s.Refused()-before)
			}
			if _, err := s.Reload(); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("Reload: %v", err)
			}
			if s.Current() != good {
				t.Error("what is in use was not kept")
			}
			l.write(l.files.CA, ca)
			l.write(l.files.Cert, cert)
			l.write(l.files.Key, key)
			if changed, err := s.Poll(); changed || err != nil {
				t.Error(changed, err)
			}
		})
	}
	if err := os.Remove(l.files.CA); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Reload(); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

func mustRead(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Files that are being written are left to come to rest, but not for ever: other machines have other clocks.
func TestPollWaits(t *testing.T) {
	l := newLab(t)
	s := l.open(Options{})
	l.issue(time.Now(), time.Hour)
	touch := func(at time.Time) {
		t.Helper()
		if err := os.Chtimes(l.files.Key, at, at); err != nil {
			t.Fatal(err)
		}
	}
	touch(time.Now().Add(time.Hour))
	if changed, err := s.Poll(); !changed || err != nil {
		t.Errorf("a time that is to come: %v, %v", changed, err)
	}
	l.issue(time.Now(), time.Hour)
	began := time.Now()
	touch(began)
	changed, err := s.Poll()
	if took := time.Since(began); took < rest/2 && (changed || err != nil) {
		t.Errorf("files that were written just now: %v, %v", changed, err)
	}
	touch(time.Now())
	if again, err := s.Poll(); changed == again || err != nil {
		t.Errorf("the second poll: %v, %v", again, err)
	}
}
