package peers

import (
	"crypto/x509"
	"fmt"
	"net"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/certs"
)

const (
	// quietFor is how long a peer may not be followed before others are told: the directory names one that was killed
	// for some seconds.
	quietFor = 10 * time.Second
	// maxTrouble bounds what the directory is told, in bytes.
	maxTrouble = 400
)

// setting is the one that says where peers call.
func (p *Peers) setting() string {
	if p.o.Advertise != "" {
		return "advertise-peers"
	}
	return "listen-peers"
}

// uncovered says why no peer that calls Addr takes this gateway's certificate; nil: it does. It goes by the certificate
// in use.
func (p *Peers) uncovered() error {
	if p.o.TLS == nil {
		return nil
	}
	host, _, err := net.SplitHostPort(p.addr)
	if err != nil {
		return nil
	}
	// Peers look for the name that this gateway looks for when it calls them.
	conf, err := certs.ForHost(p.o.TLS, host)
	if err != nil || len(conf.Certificates) == 0 || len(conf.Certificates[0].Certificate) == 0 {
		return nil
	}
	leaf := conf.Certificates[0].Leaf
	if leaf == nil {
		if leaf, err = x509.ParseCertificate(conf.Certificates[0].Certificate[0]); err != nil {
			return nil
		}
	}
	if err := leaf.VerifyHostname(conf.ServerName); err != nil {
		if conf.ServerName != host {
			return fmt.Errorf("its certificate does not cover %s (tls.server-name), by which others call it: %w",
				conf.ServerName, err)
		}
		return fmt.Errorf("its certificate does not cover %s, where others call it (%s): %w", host, p.setting(), err)
	}
	return nil
}

// trouble says what keeps peers from hearing each other, for the directory; "" if nothing does.
func (p *Peers) trouble() string {
	if err := p.uncovered(); err != nil {
		return clip(err.Error())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n, first := len(p.mu.afar), ""
	if n > 0 {
		first = p.mu.afar[0] + " of another machine: it listens for others on its own only (listen-peers)"
	}
	for id, f := range p.mu.following {
		if p.mu.known[id] == nil || f.heard > 0 || f.since.IsZero() || time.Since(f.since) < quietFor {
			continue
		}
		if n++; n == 1 {
			first = fmt.Sprintf("%s: %s", f.peer.Addr, status.Convert(f.why).Message())
		}
	}
	if n == 0 {
		return ""
	}
	return clip(fmt.Sprintf("it cannot call %d of %d others of its databases, such as %s", n, len(p.mu.known), first))
}

// clip makes a text one that the directory takes.
func clip(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r) || r == utf8.RuneError:
			return '?'
		}
		return r
	}, s)
	if len(s) > maxTrouble {
		s = strings.ToValidUTF8(s[:maxTrouble-3], "") + "..."
	}
	return s
}
