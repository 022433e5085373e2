package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/server"
)

// serveDirectory runs a directory node in this process: unlike kvd directory it takes any certificate.
func serveDirectory(t *testing.T, conf *tls.Config) *server.Node {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	n, err := server.Open(ctx, server.Options{ID: "d", InMemory: true, Bootstrap: true, GRPCAddr: "127.0.0.1:0",
		RaftAddr: "127.0.0.1:0", Lease: 5 * time.Second, TLS: conf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	if err := n.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	return n
}

// Everybody who calls the directory asks nothing of a process whose certificate has another role: its answers could
// name memory nodes of its own, and the key by which tokens are believed.
func TestImpostorDirectory(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	n := serveDirectory(t, files.load("client"))
	const want = "spiffe://test.example/kvd/client/it has the role client, and answering as a directory is for " +
		"directory"
	for role, args := range map[string][]string{
		"memnode": {"--name=m", "--memory=64MiB", "--shm-socket=off"},
		"janitor": {},
		"gateway": {"--listen=127.0.0.1:0", "--listen-memcached=off"},
	} {
		args = append([]string{role, "--directory=" + n.Addr()}, args...)
		spawn(t, env, append(args, files.flags(role)...)...).says(want, 1)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: []string{n.Addr()}, Provider: "tcp",
		TLS: files.load("operator")})
	if err == nil {
		_ = c.Close()
	}
	if !errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrUnknownOutcome) ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("the library: %v, want %q, and that nothing happened", err, want)
	}
}

// Everybody who calls a memory node reads and writes nothing where the certificate has another role.
func TestImpostorMemoryNode(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	n := serveDirectory(t, files.load("directory"))
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{n.Addr()}, TLS: files.load("memnode")})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	tcp, err := providers.Open("tcp", providers.Options{TLSServer: files.load("gateway")})
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	m, err := memnode.Open(ctx, memnode.Options{Name: "m", CapacityBytes: 64 << 20, Directory: dir,
		Devices: []memnode.DeviceListen{{Device: tcp, Addr: "127.0.0.1:0"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Ready(ctx); err != nil {
		t.Fatal(err)
	}
	createNamespace(t, n.Addr(), "cache", files.load("operator"), files.identity("gateway"), files.identity("client"))

	const want = "spiffe://test.example/kvd/gateway/it has the role gateway, and answering as a memnode is for memnode"
	c, err := client.Open(ctx, client.Options{Directory: []string{n.Addr()}, Namespace: "cache", Provider: "tcp",
		TLS: files.load("client"), OpTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Put(ctx, []byte("k"), []byte("v"), client.PutOptions{})
	if client.Outcome(err) != rdma.No || err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the library: %v, want %q, and that nothing happened", err, want)
	}
	g := start(t, env,
		append([]string{"gateway", "--directory=" + n.Addr(), "--listen=127.0.0.1:0", "--listen-memcached=off"},
			files.flags("gateway")...)...)
	if got := redis(t, "tcp", g.kv["redis"], nil, "SET k v"); !strings.Contains(got, want) {
		t.Errorf("a gateway answers %q, want %q", got, want)
	}
}

// Certificates without a SPIFFE id name the role by an organizational unit, for those who are told which unit means it.
func TestUnitsOfOthers(t *testing.T) {
	files := newCertificates(t)
	conf := files.load("")
	conf.Certificates = []tls.Certificate{files.Leaf(func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "d", OrganizationalUnit: []string{"control"}}
	})}
	n := serveDirectory(t, conf)
	open := func(i client.Identities) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		c, err := client.Open(ctx, client.Options{Directory: []string{n.Addr()}, Namespace: "none", Provider: "tcp",
			TLS: files.load("client"), Identities: i, OpTimeout: time.Second})
		if err == nil {
			_ = c.Close()
		}
		return err
	}
	if err := open(client.Identities{Units: []string{"control=directory"}}); !errors.Is(err, client.ErrNoNamespace) {
		t.Errorf("with the unit: %v, want the directory's answer", err)
	}
	if err := open(client.Identities{Units: []string{"control"}}); !errors.Is(err, client.ErrInvalid) || !strings.Contains(err.Error(), `Identities: "control": want an organizational unit and its role`) {
		t.Errorf("half a unit: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	args := append([]string{"gateway", "--listen=127.0.0.1:0", "--listen-memcached=off", "--databases=none",
		"--directory=" + n.Addr(), "--identity-units=control=directory"}, files.flags("gateway")...)
	var out, errs bytes.Buffer
	if code := run(ctx, args, &out, &errs); code != exitFailure ||
		!strings.Contains(errs.String(), "kvctl namespace create none") {
		t.Errorf("a gateway: exit status %d, %s", code, &errs)
	}
}
