package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/server"
)

// kvctl asks nothing of a process that shows another role than directory, and is told of units by flags.
func TestImpostorDirectory(t *testing.T) {
	a := identitytest.New(t)
	ca, cert, key := a.Files(a.Role("operator", "ann"))
	serve := func(own tls.Certificate) *server.Node {
		n, err := server.Open(t.Context(), server.Options{ID: "d", InMemory: true, Bootstrap: true,
			GRPCAddr: "127.0.0.1:0", RaftAddr: "127.0.0.1:0", Lease: 5 * time.Second, TLS: a.Config(own)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = n.Close() })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := n.Ready(ctx); err != nil {
			t.Fatal(err)
		}
		return n
	}
	kvctl := func(args ...string) (int, string) {
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(),
			append([]string{"--tls-ca=" + ca, "--tls-cert=" + cert, "--tls-key=" + key}, args...))
		return code, errs.String()
	}
	n := serve(a.Role("gateway", "g1"))
	for _, args := range [][]string{{"namespace", "create", "mine"}, {"put", "k", "v"}} {
		code, errs := kvctl(append([]string{"--directory=" + n.Addr(), "--timeout=1s"}, args...)...)
		if code != ctl.ExitUnavailable || !strings.Contains(errs, "spiffe://test.example/kvd/gateway/g1 has the role "+
			"gateway, and answering as a directory is for directory") ||
			!strings.Contains(errs, "(it did not happen)") {
			t.Errorf("%s: exit status %d, %s", args, code, errs)
		}
	}
	n = serve(a.Leaf(func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "d", OrganizationalUnit: []string{"control"}}
	}))
	if code, errs := kvctl("--directory="+n.Addr(), "--identity-units=control=directory,sre=operator",
		"status"); code != ctl.ExitOK {
		t.Errorf("units: exit status %d, %s", code, errs)
	}
	for flag, want := range map[string]string{"--identity-units=control": "want an organizational unit and its role",
		"--identity-trust-domain=A": "want a name of lower-case letters"} {
		if code, errs := kvctl(flag, "status"); code != ctl.ExitUsage || !strings.Contains(errs, want) {
			t.Errorf("%s: exit status %d, %s", flag, code, errs)
		}
	}
}
