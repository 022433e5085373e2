package compat

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// secured is a store whose parts talk TLS, with a gateway that does, and another
// gateway, of the lab's store, with a password.
type secured struct {
	gateway       *proc
	password      *proc  // supersecret, which miniredis's tests know
	ca, cert, key string // PEM files
	// miniredis holds the certificates under the names that its tests read.
	miniredis map[string][]byte
}

var secure = sync.OnceValues(func() (*secured, error) { return theLab.startSecured() })

func (l *lab) secured() (*secured, error) { return secure() }

func (l *lab) startSecured() (*secured, error) {
	s := &secured{ca: filepath.Join(l.dir, "ca.pem"), cert: filepath.Join(l.dir, "gateway.pem"),
		key: filepath.Join(l.dir, "gateway.key")}
	if err := s.certificates(l.dir); err != nil {
		return nil, err
	}
	creds := func(role string) []string {
		return []string{"--tls-ca", s.ca, "--tls-cert", filepath.Join(l.dir, role+".pem"), "--tls-key",
			filepath.Join(l.dir, role+".key")}
	}
	kvd := func(role string, args ...string) (*proc, error) {
		return l.run("tls-"+role, append(append([]string{l.kvd, role}, args...), creds(role)...)...)
	}
	d, err := kvd("directory", "--id", "d", "--data-dir", filepath.Join(l.dir, "d"), "--bootstrap",
		"--listen", "127.0.0.1:0", "--raft-listen", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := d.ready["directory"]
	if _, err := kvd("memnode", "--name", "m", "--directory", addr, "--memory", "512MiB", "--shm-socket", "off"); err !=
		nil {
		return nil, err
	}
	if err := l.namespace(addr, "cache",
		append(creds("operator"), "--owner", "spiffe://compat/kvd/gateway/it")...); err != nil {
		return nil, err
	}
	if s.gateway, err = kvd("gateway", "--directory", addr, "--listen", "off", "--listen-tls", "127.0.0.1:0",
		"--listen-memcached", "off", "--http-listen", "off"); err != nil {
		return nil, err
	}
	s.password, err = l.run("password-gateway", l.kvd, "gateway", "--directory", l.dev.ready["directory"],
		"--databases", "db14,db15",
		"--listen", "127.0.0.1:0", "--listen-memcached", "off", "--http-listen", "off", "--password", "supersecret")
	return s, err
}

// certificates makes an authority, and in dir a certificate for each role of the store; clients of the gateway
// show the gateway's own.
func (s *secured) certificates(dir string) error {
	caKey, err1 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	key, err2 := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, IsCA: true,
		BasicConstraintsValid: true,
		NotBefore:             time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kvd"}, NotBefore: ca.NotBefore,
		NotAfter: ca.NotAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth,
			x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost", "Server"},
	}
	caDER, err1 := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	keyDER, err2 := x509.MarshalPKCS8PrivateKey(key)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	caPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: caDER})
	var certPEM []byte
	for _, role := range []string{"directory", "memnode", "operator", "gateway"} {
		leaf.URIs = []*url.URL{{Scheme: "spiffe", Host: "compat", Path: "/kvd/" + role + "/it"}}
		leafDER, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, caKey)
		if err != nil {
			return err
		}
		certPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leafDER})
		if err := errors.Join(
			os.WriteFile(filepath.Join(dir, role+".pem"), certPEM, 0o600),
			os.WriteFile(filepath.Join(dir, role+".key"), keyPEM, 0o600)); err != nil {
			return err
		}
	}
	// They trust what they show: the authority comes along.
	both := append(bytes.Clone(certPEM), caPEM...)
	s.miniredis = map[string][]byte{"server.crt": both, "server.key": keyPEM, "client.crt": both, "client.key": keyPEM}
	return os.WriteFile(s.ca, caPEM, 0o600)
}

func TestTLS(t *testing.T) {
	l := open(t)
	s, err := l.secured()
	must(t, err)
	port := portOf(s.gateway.ready["tls"])
	cli := []string{"redis-cli", "-h", "localhost", "-p", port, "--tls", "--cacert", s.ca}
	out, err := output(t, "set k v\nget k\n", append(cli, "--cert", s.cert, "--key", s.key)...)
	if err != nil || out != "OK\nv\n" {
		t.Errorf("with a certificate: %v\n%s", err, out)
	}
	out, err = output(t, "", append(cli, "ping")...)
	if err == nil {
		t.Errorf("without a certificate: %s", out)
	}
	out, err = output(t, "", "redis-benchmark", "-h", "localhost", "-p", port, "--tls", "--cacert", s.ca, "--cert",
		s.cert, "--key", s.key,
		"-t", "set,get", "-n", "2000", "-P", "16", "--csv")
	if err != nil {
		t.Errorf("redis-benchmark: %v\n%s", err, out)
	}
	contains(t, out, `"GET"`)
}

func TestPassword(t *testing.T) {
	l := open(t)
	s, err := l.secured()
	must(t, err)
	addr := s.password.ready["redis"]
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"ping"}, "NOAUTH Authentication required.\n"},
		{[]string{"-a", "wrong", "--no-auth-warning", "ping"}, "AUTH failed: WRONGPASS invalid username-password " +
			"pair or user is disabled.\nNOAUTH Authentication required.\n"},
		{[]string{"-a", "supersecret", "--no-auth-warning", "ping"}, "PONG\n"},
		{[]string{"--user", "default", "--pass", "supersecret", "--no-auth-warning", "ping"}, "PONG\n"},
		{[]string{"-3", "-a", "supersecret", "--no-auth-warning", "ping"}, "PONG\n"},
	} {
		out, _ := output(t, "", append([]string{"redis-cli", "-p", portOf(addr)}, tc.args...)...)
		if got := strings.ReplaceAll(out, "\n\n", "\n"); got != tc.want {
			t.Errorf("redis-cli %q: got %q, want %q", tc.args, got, tc.want)
		}
	}
	for protocol := 2; protocol <= 3; protocol++ {
		c := redis.NewClient(&redis.Options{Addr: addr, Password: "supersecret", Protocol: protocol, DB: 1,
			ClientName: "compat"})
		must(t, c.Set(t.Context(), "k", "v", 0).Err())
		must(t, c.Close())
		c = redis.NewClient(&redis.Options{Addr: addr, Protocol: protocol})
		err := c.Set(t.Context(), "k", "v", 0).Err()
		if err == nil || err.Error() != "NOAUTH Authentication required." {
			t.Errorf("without a password: %v", err)
		}
		must(t, c.Close())
	}
}
