package main

import (
	"crypto/x509"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/authority"
	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/ctl"
)

const day = 24 * time.Hour

// readCert gives the certificate of a file.
func readCert(t *testing.T, file string) *x509.Certificate {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	all, err := certs.Parse(text)
	if err != nil || len(all) != 1 {
		t.Fatal(len(all), err)
	}
	return all[0]
}

// A certificate of every role is accepted for what the role does, and for nothing else.
func TestCerts(t *testing.T) {
	e := &env{t: t, now: time.Now}
	dir := filepath.Join(t.TempDir(), "ca")
	e.must("", "certs", "init", "--dir", dir, "--trust-domain", "example.org")
	ca := readCert(t, filepath.Join(dir, "ca.pem"))
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	for _, role := range authority.Roles() {
		for _, called := range []bool{false, true} {
			name := role
			args := []string{"certs", "issue", name, "--dir", dir, "--role", role, "--days", "7", "--out",
				filepath.Join(dir, name)}
			if called {
				name += "-at"
				args[2] = name
				args = append(args, "--dns", "host.example,other.example", "--ip", "192.0.2.1", "--ip", "::1")
			}
			refused := called && role == "client" || !called &&
				slices.Contains([]string{"directory", "memnode", "tier", "gateway"}, role)
			r := e.run("", args...)
			if (r.code == ctl.ExitUsage) != refused || (r.code == ctl.ExitOK) == refused {
				t.Fatalf("%s, called %v: %+v", role, called, r)
			}
			if refused && !called && !(strings.Contains(r.stderr, "--dns") && strings.Contains(r.stderr, "--ip")) {
				t.Errorf("%s: the refusal does not say how to give an address: %s", role, r.stderr)
			}
			if refused {
				continue
			}
			c := readCert(t, filepath.Join(dir, role, name+".pem"))
			if len(c.URIs) != 1 || c.URIs[0].String() != "spiffe://example.org/kvd/"+role+"/"+name {
				t.Errorf("%s: URIs %v", role, c.URIs)
			}
			if left := time.Until(c.NotAfter); left > 7*day || left < 7*day-time.Hour {
				t.Errorf("%s: valid for %v", role, left)
			}
			for usage, want := range map[x509.ExtKeyUsage]bool{x509.ExtKeyUsageClientAuth: true,
				x509.ExtKeyUsageServerAuth: called, x509.ExtKeyUsageCodeSigning: false} {
				usages := []x509.ExtKeyUsage{usage}
				if _, err := c.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: usages}); (err == nil) != want {
					t.Errorf("%s, called %v, usage %v: %v", role, called, usage, err)
				}
			}
			for _, host := range []string{"host.example", "192.0.2.1", "::1"} {
				if err := c.VerifyHostname(host); (err == nil) != called {
					t.Errorf("%s at %s: %v", role, host, err)
				}
			}
			if _, err := (certs.Files{CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, role, name+".pem"),
				Key: filepath.Join(dir, role, name+"-key.pem")}).Load(); err != nil {
				t.Error(err)
			}
		}
	}
	out := e.must("", "certs", "show", filepath.Join(dir, "operator", "operator.pem"), filepath.Join(dir, "ca.pem"))
	for _, want := range []string{"spiffe://example.org/kvd/operator/operator\n", "uses      client\n", "6 days left\n",
		"uses      authority\n", "ECDSA P-256\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("show lacks %q:\n%s", want, out)
		}
	}
	e.must("", "certs", "issue", "ann", "--dir", dir, "--role", "client", "--group", "sales,emea", "--group", "b")
	if c := readCert(t, filepath.Join(dir, "ann.pem")); !slices.Equal(
		slices.Sorted(slices.Values(c.Subject.Organization)), []string{"b", "emea", "sales"}) {
		t.Errorf("the groups are %q", c.Subject.Organization)
	}
	if out := e.must("", "certs", "show", filepath.Join(dir, "ann.pem")); !strings.Contains(
		out, "groups    b, emea, sales\n") {
		t.Errorf("show lacks the groups:\n%s", out)
	}
	if r := e.run("", "certs", "issue", "bob", "--dir", dir, "--role", "client", "--group", "a b"); r.code !=
		ctl.ExitUsage || !strings.Contains(r.stderr, `group "a b"`) {
		t.Errorf("a bad group: %+v", r)
	}
	e.now = func() time.Time { return time.Now().Add(8 * day) }
	if r := e.run("", "certs", "show", filepath.Join(dir, "operator", "operator.pem")); r.code != ctl.ExitNo ||
		!strings.Contains(r.stdout, "NOT VALID NOW") {
		t.Errorf("show of one that has expired: %+v", r)
	}
}

// Keys can be read by their owner alone, nothing is overwritten, and half of a pair is not left behind.
func TestCertsFiles(t *testing.T) {
	e := &env{t: t, now: time.Now}
	dir := t.TempDir()
	issue := []string{"certs", "issue", "x", "--dir", dir, "--role", "client"}
	if r := e.run("", issue...); r.code != ctl.ExitOther || !strings.Contains(r.stderr, "kvctl certs init") ||
		!strings.Contains(r.stderr, "it did not happen") {
		t.Errorf("without an authority: %+v", r)
	}
	e.must("", "certs", "init", "--dir", dir)
	e.must("", issue...)
	for file, want := range map[string]fs.FileMode{"ca-key.pem": 0o600, "x-key.pem": 0o600} {
		st, err := os.Stat(filepath.Join(dir, file))
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v, %v", file, st.Mode(), err)
		}
	}
	read := func() (all []string) {
		for _, f := range []string{"ca.pem", "ca-key.pem", "x.pem", "x-key.pem"} {
			b, err := os.ReadFile(filepath.Join(dir, f))
			if err != nil {
				t.Error(err)
			}
			all = append(all, string(b))
		}
		return all
	}
	before := read()
	for _, args := range [][]string{issue, {"certs", "init", "--dir", dir}} {
		if r := e.run("", args...); r.code != ctl.ExitOther ||
			!strings.Contains(r.stderr, "file exists (it did not happen)") {
			t.Errorf("%v again: %+v", args, r)
		}
	}
	if !slices.Equal(before, read()) {
		t.Error("files were overwritten")
	}
	writeFile(t, filepath.Join(dir, "y.pem"), nil)
	if r := e.run("", "certs", "issue", "y", "--dir", dir, "--role", "client"); r.code != ctl.ExitOther {
		t.Errorf("%+v", r)
	}
	if _, err := os.Stat(filepath.Join(dir, "y-key.pem")); err == nil {
		t.Error("a key without its certificate was left behind")
	}
	for _, args := range [][]string{
		{"issue", "../z", "--role", "client"}, {"issue", "..", "--role", "client"}, {"issue", "z"},
		{"issue", "z", "--role", "root"}, {"issue", "z", "--role", "client", "--days", "0"},
		{"issue", "z", "--role", "client", "--days", "3651"}, {"issue", "z", "--role", "gateway", "--ip", "host"},
		{"issue", "z", "--role", "gateway", "--dns", "10.0.0.1"},
		{"init", "--trust-domain", "A/b"}, {"init", "--days", "99999999"}, {"show"},
	} {
		if r := e.run("", append(append([]string{"certs"}, args...), "--dir="+dir)[:]...); r.code != ctl.ExitUsage {
			t.Errorf("%v: %+v", args, r)
		}
	}
	if r := e.run("", "certs", "show", filepath.Join(dir, "x-key.pem")); r.code != ctl.ExitOther ||
		strings.Contains(r.stderr, before[3][40:60]) {
		t.Errorf("show of a key: %+v", r)
	}
}

// The list of revoked certificates is made, grows and is renewed; what was revoked stays so, with its date.
func TestCertsRevoke(t *testing.T) {
	now := time.Now()
	e := &env{t: t, now: func() time.Time { return now }}
	dir := t.TempDir()
	at := func(file string) string { return filepath.Join(dir, file) }
	e.must("", "certs", "init", "--dir", dir)
	for _, name := range []string{"a", "b", "c"} {
		e.must("", "certs", "issue", name, "--role", "client", "--dir", dir)
	}
	serial := func(name string) string { return readCert(t, at(name+".pem")).SerialNumber.Text(16) }
	lists := func() *x509.RevocationList {
		text, err := os.ReadFile(at("crl.pem"))
		if err != nil {
			t.Fatal(err)
		}
		all, err := certs.ParseLists(text)
		if err != nil || len(all) != 1 {
			t.Fatal(len(all), err)
		}
		if _, err := certs.ParseRevoked(text, []*x509.Certificate{readCert(t, at("ca.pem"))}); err != nil {
			t.Error(err)
		}
		return all[0]
	}
	first := now
	if out := e.must("", "certs", "revoke", "a", "--dir", dir); !strings.Contains(out, "revoked   "+serial("a")+" on "+
		first.UTC().Format(time.DateTime)) || !strings.Contains(out, "364 days left") &&
		!strings.Contains(out, "365 days left") {
		t.Errorf("revoke:\n%s", out)
	}
	now = now.Add(time.Hour)
	e.must("", "certs", "revoke", "b", "a", "--serial", serial("c"), "--days", "30", "--dir", dir)
	l := lists()
	if len(l.RevokedCertificateEntries) != 3 || l.Number.Int64() != 2 ||
		!l.RevokedCertificateEntries[0].RevocationTime.Equal(first.Truncate(time.Second)) {
		t.Errorf("number %v, %v", l.Number, l.RevokedCertificateEntries)
	}
	now = now.Add(31 * day)
	if r := e.run("", "certs", "show", at("crl.pem")); r.code != ctl.ExitNo || !strings.Contains(r.stdout, "EXPIRED") ||
		!strings.Contains(r.stdout, serial("c")) {
		t.Errorf("show of one that has expired: %+v", r)
	}
	e.must("", "certs", "revoke", "--dir", dir)
	if l := lists(); len(l.RevokedCertificateEntries) != 3 || l.Number.Int64() != 3 {
		t.Errorf("renewed: number %v, %v", l.Number, l.RevokedCertificateEntries)
	}
	if out := e.must("", "certs", "show", at("crl.pem"), "-o", "json"); !strings.Contains(out, `"number":"3"`) &&
		!strings.Contains(out, `"number": "3"`) || !strings.Contains(out, serial("b")) {
		t.Errorf("show:\n%s", out)
	}
	before, err := os.ReadFile(at("crl.pem"))
	if err != nil {
		t.Fatal(err)
	}
	other := t.TempDir()
	e.must("", "certs", "init", "--dir", other)
	e.must("", "certs", "issue", "stranger", "--role", "client", "--dir", other)
	stranger, err := os.ReadFile(filepath.Join(other, "stranger.pem"))
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, at("stranger.pem"), stranger)
	for want, args := range map[string][]string{
		"--serial revokes a certificate whose file is gone": {"gone"},
		"no certificate that this authority has issued":     {"stranger"},
		"ca.pem: it is no certificate":                      {"ca"},
		"want a serial number in hexadecimal":               {"--serial", "x"},
		"serial number 0":                                   {"--serial", "0"},
		"--days 0":                                          {"a", "--days", "0"},
	} {
		if r := e.run("", append([]string{"certs", "revoke", "--dir", dir}, args...)...); r.code == ctl.ExitOK ||
			!strings.Contains(r.stderr, want) {
			t.Errorf("%v: %+v", args, r)
		}
	}
	if after, err := os.ReadFile(at("crl.pem")); err != nil || string(after) != string(before) {
		t.Errorf("a revocation that was refused changed the list: %v", err)
	}
	writeFile(t, filepath.Join(other, "crl.pem"), before)
	if r := e.run("", "certs", "revoke", "--dir", other); r.code == ctl.ExitOK ||
		!strings.Contains(r.stderr, "the list is not this authority's") {
		t.Errorf("the list of another authority: %+v", r)
	}
	if r := e.run("", "--tls-crl", at("crl.pem"), "status"); r.code != ctl.ExitUsage ||
		!strings.Contains(r.stderr, "want --tls-ca as well") {
		t.Errorf("--tls-crl alone: %+v", r)
	}
	if r := e.run("", "--tls-ca", filepath.Join(other, "ca.pem"), "--tls-crl", at("crl.pem"), "status"); r.code !=
		ctl.ExitUsage || !strings.Contains(r.stderr, "crl.pem: list 1, of CN=") {
		t.Errorf("--tls-crl of another authority: %+v", r)
	}
}
