package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/testutil"
)

// subscribed is a connection that listens to a channel of a gateway.
type subscribed struct {
	net.Conn
	r *bufio.Reader
}

func subscribe(t *testing.T, addr, channel string) *subscribed {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	s := &subscribed{c, bufio.NewReader(c)}
	fmt.Fprintf(c, "SUBSCRIBE %s\r\n", channel)
	s.line(t, ":1")
	return s
}

// line reads up to a line, and returns those before it.
func (s *subscribed) line(t *testing.T, want string) (read []string) {
	t.Helper()
	_ = s.SetReadDeadline(time.Now().Add(patience))
	for {
		l, err := s.r.ReadString('\n')
		if err != nil {
			t.Errorf("after %q: %v", read, err)
			return read
		}
		if l = strings.TrimSpace(l); l == want {
			return read
		}
		read = append(read, l)
	}
}

// Gateways of the same databases find each other through the directory, with TLS, and messages pass between them; those
// of other databases hear nothing; one that is killed is missed by nobody, and its successor is found.
func TestGatewaysMeet(t *testing.T) {
	gatewaysMeet(t, "")
}

// TestServerName: a store whose certificates have no addresses, but a name that all processes are told. A process that
// is not told it trusts none of them.
func TestServerName(t *testing.T) {
	gatewaysMeet(t, "store.internal")
}

// TestGatewayUncovered: a gateway whose certificate is not for its listen-peers says so as it starts, and the store's
// status has it as a problem, with the setting's name; so it does of the gateway that cannot call it.
func TestGatewayUncovered(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s"}, files.flags("directory")...)...)
	start(t, env, append([]string{"memnode", "--name=m", "--directory=" + d.kv["directory"], "--memory=64MiB",
		"--shm-socket=off"}, files.flags("memnode")...)...)
	cfg := files.load("operator")
	createNamespace(t, d.kv["directory"], "cache", cfg, files.identity("gateway"))
	f := files.files("gateway", func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(10, 0, 0, 31)} })
	gateway := func(flags ...string) *process {
		return start(t, env,
			append([]string{"gateway", "--directory=" + d.kv["directory"], "--databases=cache", "--listen=127.0.0.1:0",
				"--listen-memcached=off"}, flags...)...)
	}
	gateway(files.flags("gateway")...)
	gateway("--tls-ca="+f.CA, "--tls-cert="+f.Cert, "--tls-key="+f.Key).says(
		"its certificate does not cover 127.0.0.1, where others call it (listen-peers)", 1)

	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{d.kv["directory"]}, TLS: cfg})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for _, want := range []string{"its certificate does not cover 127.0.0.1, where others call it (listen-peers)",
		"it cannot call 1 of 1 others of its databases"} {
		testutil.Until(t, want, func() bool {
			var st *dirpb.StatusReply
			err := dir.Call(ctx, func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
				st, err = c.Status(ctx, &dirpb.StatusRequest{})
				return err
			})
			return err == nil && strings.Contains(fmt.Sprint(overview.Problems(st)), want)
		})
	}
}

// gatewaysMeet has certificates for 127.0.0.1, or else for serverName alone.
func gatewaysMeet(t *testing.T, serverName string) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	flags := func(role string) []string {
		if serverName == "" {
			return files.flags(role)
		}
		f := files.files(role, func(c *x509.Certificate) { c.IPAddresses, c.DNSNames = nil, []string{serverName} })
		return []string{"--tls-ca=" + f.CA, "--tls-cert=" + f.Cert, "--tls-key=" + f.Key, "--tls-server-name=" +
			serverName}
	}
	cfg := files.load("operator")
	cfg.ServerName = serverName
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s"}, flags("directory")...)...)
	if serverName != "" {
		named := flags("operator")
		for _, tc := range []struct {
			flags []string
			code  int
		}{{named, 0}, {named[:3], 1}} {
			var out, errs bytes.Buffer
			if code := run(t.Context(), append([]string{"health", d.kv["directory"]}, tc.flags...), &out,
				&errs); code != tc.code {
				t.Errorf("kvd health %q: exit status %d, want %d: %s", tc.flags[3:], code, tc.code, &errs)
			}
		}
	}
	start(t, env, append([]string{"memnode", "--name=m", "--directory=" + d.kv["directory"], "--memory=64MiB",
		"--shm-socket=off"}, flags("memnode")...)...)
	for _, ns := range []string{"cache", "other"} {
		createNamespace(t, d.kv["directory"], ns, cfg, files.identity("gateway"))
	}
	gateway := func(databases string) *process {
		return start(t, env,
			append([]string{"gateway", "--directory=" + d.kv["directory"], "--databases=" + databases,
				"--listen=127.0.0.1:0", "--listen-memcached=off", "--http-listen=127.0.0.1:0"}, flags("gateway")...)...)
	}
	a, b, far := gateway("cache"), gateway("cache"), gateway("other")
	sub, deaf := subscribe(t, a.kv["redis"], "news"), subscribe(t, far.kv["redis"], "news")
	arrives := func(from *process, mark string) {
		t.Helper()
		// Before they have met a message is lost: publish until one arrives.
		done := make(chan struct{})
		go func() {
			defer close(done)
			sub.line(t, mark)
		}()
		for until := time.Now().Add(patience); time.Now().Before(until); {
			redis(t, "tcp", from.kv["redis"], nil, "PUBLISH news "+mark)
			select {
			case <-done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
		t.Fatalf("no message %s", mark)
	}
	arrives(b, "first")
	if got := redis(t, "tcp", far.kv["redis"], nil, "PUBLISH news own"); got != ":1" {
		t.Errorf("%q", got)
	}
	if read := deaf.line(t, "own"); slices.Contains(read, "first") {
		t.Errorf("a gateway of other databases hears %q", read)
	}
	b.stop(syscall.SIGKILL)
	c := gateway("cache")
	arrives(c, "second")
	if code := c.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}
