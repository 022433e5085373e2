package peers_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/peers/peerstest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// A gateway that others cannot call, for what its certificate says, tells so in its log when it starts, and the
// directory until it has another one.
func TestCertificateDoesNotCover(t *testing.T) {
	ca := identitytest.New(t)
	at := func(ips []net.IP, names ...string) tls.Certificate {
		return ca.Role("gateway", "g", func(c *x509.Certificate) { c.IPAddresses, c.DNSNames = ips, names })
	}
	here, elsewhere := []net.IP{net.IPv4(127, 0, 0, 1)}, []net.IP{net.IPv4(10, 0, 0, 31)}
	for _, c := range []struct {
		what       string
		cert       tls.Certificate
		advertise  string
		serverName string
		want       string // empty: all is well
	}{
		{"the listener's address", at(here), "", "", ""},
		{"another address", at(elsewhere), "", "", "its certificate does not cover 127.0.0.1, where others call it " +
			"(listen-peers): x509: certificate is valid for 10.0.0.31, not 127.0.0.1"},
		{"no address", at(nil, "g.example.org"), "", "",
			"does not cover 127.0.0.1, where others call it (listen-peers)"},
		{"the advertised address", at(elsewhere), "10.0.0.31:7404", "", ""},
		{"an advertised name", at(nil, "g.example.org"), "g.example.org:7404", "", ""},
		{"another advertised address", at(here), "10.0.0.32:7404", "",
			"does not cover 10.0.0.32, where others call it (advertise-peers)"},
		{"another advertised name", at(here, "g.example.org"), "h.example.org:7404", "",
			"does not cover h.example.org, where others call it (advertise-peers)"},
		{"one name of all", at(nil, "kvd.internal"), "10.0.0.32:7404", "kvd.internal", ""},
		{"not the name of all", at(here), "", "kvd.internal",
			"does not cover kvd.internal (tls.server-name), by which others call it"},
	} {
		conf := ca.Config(c.cert)
		conf.ServerName = c.serverName
		trouble := make(chan string, 1)
		var log bytes.Buffer
		p, err := peers.New(peers.Options{Listener: peerstest.Listen(t), Advertise: c.advertise, TLS: conf,
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
			Meet: func(ctx context.Context, q *dirpb.MeetRequest) (*dirpb.MeetReply, error) {
				if !q.Leaves {
					select {
					case trouble <- q.Trouble:
					default:
					}
				}
				<-ctx.Done()
				return nil, ctx.Err()
			}})
		if err != nil {
			t.Fatal(err)
		}
		said := log.String()
		p.Start(func(peers.Heard) {}, func() {}, nil)
		got := <-trouble
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if c.want == "" && got+said != "" || !strings.Contains(got, c.want) || c.want != "" &&
			!strings.Contains(said, c.want) {
			t.Errorf("%s: the directory hears %q, the log has %q; want %q", c.what, got, said, c.want)
		}
	}

	// Once the certificate is renewed nothing is told any more.
	var cert atomic.Pointer[tls.Certificate]
	old, renewed := at(elsewhere), at(here)
	cert.Store(&old)
	conf := ca.Config(old)
	inner := conf.Clone()
	conf.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		c := inner.Clone()
		c.Certificates = []tls.Certificate{*cert.Load()}
		return c, nil
	}
	r := peerstest.NewRoom()
	begin(t, r, peers.Options{TLS: conf})
	testutil.Until(t, "trouble", func() bool { return strings.Join(r.Troubles(), "") != "" })
	cert.Store(&renewed)
	testutil.Until(t, "no trouble", func() bool { return strings.Join(r.Troubles(), "") == "" })
}

// A gateway says which others it cannot call: one whose certificate is not for its address, and one that listens on
// another machine alone.
func TestTellsWhomItCannotCall(t *testing.T) {
	ca := identitytest.New(t)
	r := peerstest.NewRoom()
	begin(t, r, peers.Options{TLS: ca.Config(ca.Role("gateway", "a"))})
	troubles := func(want ...string) func() bool {
		return func() bool {
			all := strings.Join(r.Troubles(), "\n")
			for _, w := range want {
				if !strings.Contains(all, w) {
					return false
				}
			}
			return len(want) > 0 || all == ""
		}
	}
	far := &dirpb.MeetRequest{Id: []byte(strings.Repeat("f", 16)), Addr: "127.0.0.1:9", HostId: "another machine"}
	if _, err := r.Meet(t.Context(), far); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "word of a gateway on another machine",
		troubles("it cannot call 1 of 1 others of its databases, "+
			"such as 127.0.0.1:9 of another machine: it listens for others on its own only (listen-peers)"))
	far.Leaves = true
	if _, err := r.Meet(t.Context(), far); err != nil {
		t.Fatal(err)
	}
	testutil.Until(t, "no trouble", troubles())
	begin(t, r, peers.Options{TLS: ca.Config(ca.Role("gateway", "b", func(c *x509.Certificate) {
		c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 31)}
	}))})
	testutil.Until(t, "word of a certificate", troubles("its certificate does not cover 127.0.0.1",
		"it cannot call 1 of 1 others of its databases, such as 127.0.0.1:",
		"certificate is valid for 10.0.0.31, not 127.0.0.1"))
}
