package tcp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// authority signs certificates for one test.
type authority struct {
	t    testing.TB
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t, pool: x509.NewCertPool()}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	var der []byte
	der, a.key = a.sign(template, template, nil)
	var err error
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.pool.AddCert(a.cert)
	return a
}

// sign makes a key and its certificate; signer nil means self-signed.
func (a *authority) sign(template, parent *x509.Certificate, signer *ecdsa.PrivateKey) ([]byte, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return der, key
}

func (a *authority) leaf(serial int64) tls.Certificate {
	a.t.Helper()
	der, key := a.sign(&x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "node"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}, a.cert, a.key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// tlsOptions are mutual TLS under one new authority.
func tlsOptions(t testing.TB) (passive, active Options) {
	t.Helper()
	a := newAuthority(t)
	return Options{TLSServer: &tls.Config{Certificates: []tls.Certificate{a.leaf(2)}, ClientCAs: a.pool,
			ClientAuth: tls.RequireAndVerifyClientCert}},
		Options{TLSClient: &tls.Config{Certificates: []tls.Certificate{a.leaf(3)}, RootCAs: a.pool}}
}

func TestConformanceTLS(t *testing.T) {
	rdmatest.Run(t, func(t *testing.T) rdmatest.Harness {
		passive, active := tlsOptions(t)
		return harness(t, passive, active)
	})
}

// TestTLSRefuses lists the dialers that mutual TLS keeps out, the one in clear
// among them, and checks that Accept never hears of them.
func TestTLSRefuses(t *testing.T) {
	passive, active := tlsOptions(t)
	_, stranger := tlsOptions(t)
	trusting := Options{TLSClient: &tls.Config{RootCAs: active.TLSClient.RootCAs}}
	ended := make(chan PeerClosed, 1)
	passive.Events.PeerClosed = func(e PeerClosed) { ended <- e }
	for name, o := range map[string]Options{
		"in clear":                     {},
		"unknown authority both ways":  stranger,
		"no certificate of the dialer": trusting,
	} {
		t.Run(name, func(t *testing.T) {
			e := rdmatest.NewEnv(t, harness(t, passive, o))
			l := e.Unconnected(4096)
			if q, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, e.Listener().Addr(), nil); err == nil {
				_ = q.Close()
				t.Fatal("dial succeeded")
			}
			if got := <-ended; got.Reason != ReasonHandshake || got.Err == nil ||
				!strings.Contains(got.String(), "handshake") {
				t.Errorf("the listener saw %v", got)
			}
			if n := len(e.Peers()); n != 0 {
				t.Errorf("Accept ran %d times", n)
			}
		})
	}
}
