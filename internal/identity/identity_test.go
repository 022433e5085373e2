package identity_test

import (
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"net"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// subject gives a certificate a common name and organizational units.
func subject(cn string, units ...string) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.Subject = pkix.Name{CommonName: cn, OrganizationalUnit: units} }
}

func TestOfCertificate(t *testing.T) {
	a := identitytest.New(t)
	units := map[string]identity.Role{"storage": identity.MemNode, "ops": identity.Operator, "sre": identity.Operator}
	var (
		none  identity.Mapping
		only  = identity.Mapping{TrustDomain: "prod.example"}
		byOU  = identity.Mapping{Units: units}
		id    = identitytest.SPIFFE
		long  = strings.Repeat("n", identity.MaxNameBytes+1)
		exact = strings.Repeat("n", identity.MaxNameBytes)
	)
	for _, tc := range []struct {
		name string
		m    identity.Mapping
		cert []func(*x509.Certificate)
		want string // the identity, or part of the error after "error: "
	}{
		{"directory", none, []func(*x509.Certificate){id("spiffe://prod.example/kvd/directory/d1")},
			"spiffe://prod.example/kvd/directory/d1"},
		{"client", none, []func(*x509.Certificate){id("spiffe://prod.example/kvd/client/team-a.app_1")},
			"spiffe://prod.example/kvd/client/team-a.app_1"},
		{"trust domain", only, []func(*x509.Certificate){id("spiffe://prod.example/kvd/archive/a")},
			"spiffe://prod.example/kvd/archive/a"},
		{"longest name", none, []func(*x509.Certificate){id("spiffe://p/kvd/client/" + exact)},
			"spiffe://p/kvd/client/" + exact},
		{"another trust domain", only, []func(*x509.Certificate){id("spiffe://test.example/kvd/operator/eve")},
			"error: another trust domain"},
		{"a trust domain that begins alike", only, []func(*x509.Certificate){
			id("spiffe://prod.example.org/kvd/operator/eve")}, "error: another trust domain"},
		{"no id", none, nil, "error: no SPIFFE id"},
		{"two ids", none, []func(*x509.Certificate){id("spiffe://p/kvd/client/a"), id("spiffe://p/kvd/operator/a")},
			"error: 2 SPIFFE ids"},
		{"unknown role", none, []func(*x509.Certificate){id("spiffe://p/kvd/root/a")}, `error: role "root"`},
		{"role in capitals", none, []func(*x509.Certificate){id("spiffe://p/kvd/Operator/a")},
			`error: role "Operator"`},
		{"another service's", none, []func(*x509.Certificate){id("spiffe://p/ns/kvd/sa/operator")},
			"error: its path is not /kvd/ROLE/NAME"},
		{"no name", none, []func(*x509.Certificate){id("spiffe://p/kvd/operator")},
			"error: its path is not /kvd/ROLE/NAME"},
		{"too many parts", none, []func(*x509.Certificate){id("spiffe://p/kvd/operator/a/b")},
			"error: its path is not /kvd/ROLE/NAME"},
		{"dots", none, []func(*x509.Certificate){id("spiffe://p/kvd/client/../operator/a")},
			"error: path cannot contain dot segments"},
		{"name too long", none, []func(*x509.Certificate){id("spiffe://p/kvd/client/" + long)},
			"error: name of 65 bytes"},
		{"trust domain too long", none, []func(*x509.Certificate){id("spiffe://" + long + "/kvd/client/a")},
			"error: trust domain of 65 bytes"},
		{"a query", none, []func(*x509.Certificate){id("spiffe://p/kvd/client/a?x=1")},
			"error: path segment characters"},
		{"the scheme in capitals", none, []func(*x509.Certificate){id("SPIFFE://p/kvd/client/a")},
			"spiffe://p/kvd/client/a"},
		{"another URI", none, []func(*x509.Certificate){id("https://p/kvd/operator/a")}, "error: no SPIFFE id"},

		{"unit", byOU, []func(*x509.Certificate){subject("m1", "storage")}, "memnode/m1"},
		{"units that mean nothing", byOU, []func(*x509.Certificate){subject("m1", "berlin", "storage")}, "memnode/m1"},
		{"units of one role", byOU, []func(*x509.Certificate){subject("ann", "sre", "ops")}, "operator/ann"},
		{"units of two roles", byOU, []func(*x509.Certificate){subject("ann", "storage", "ops")},
			"error: mean the roles operator and memnode"},
		{"no unit that means a role", byOU, []func(*x509.Certificate){subject("ann", "sales")},
			"error: no organizational unit that means a role"},
		{"unit without mapping", none, []func(*x509.Certificate){subject("ann", "ops")}, "error: no SPIFFE id"},
		{"unit without name", byOU, []func(*x509.Certificate){subject("", "ops")}, "error: common name of 0 bytes"},
		{"a name with a slash", byOU, []func(*x509.Certificate){subject("a/b", "ops")},
			"error: printable characters and no slash"},
		{"a name that terminals obey", byOU, []func(*x509.Certificate){subject("a\x1b[2J", "ops")},
			"error: printable characters and no slash"},
		{"an id that is none before a unit", byOU, []func(*x509.Certificate){
			subject("ann", "ops"), id("spiffe://p/other")}, "error: its path is not /kvd/ROLE/NAME"},
		{"an id before a unit", byOU, []func(*x509.Certificate){subject("ann", "ops"), id("spiffe://p/kvd/client/a")},
			"spiffe://p/kvd/client/a"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.m.OfCertificate(a.Leaf(tc.cert...).Leaf)
			part, refused := strings.CutPrefix(tc.want, "error: ")
			switch {
			case !refused && (err != nil || got.String() != tc.want):
				t.Errorf("%q, %v", got, err)
			case refused && (!errors.Is(err, identity.ErrUnidentified) || got != identity.Identity{}):
				t.Errorf("%q, %v, want an error that matches ErrUnidentified", got, err)
			case refused && (!strings.Contains(err.Error(), part) || !strings.Contains(err.Error(), tc.m.Form())):
				t.Errorf("%v, want %q and the form %q", err, part, tc.m.Form())
			}
		})
	}
}

func TestParseMapping(t *testing.T) {
	for _, tc := range []struct {
		td    string
		units []string
		want  string
	}{
		{"", nil, ""},
		{"prod.example", []string{"ops=operator", "infra=memnode", "ops=operator"}, ""},
		{"Prod", nil, "trust domain"},
		{"spiffe://prod", nil, "trust domain"},
		{"prod/kvd", nil, "trust domain"},
		{strings.Repeat("a", 65), nil, "65 bytes"},
		{"", []string{"ops"}, "want an organizational unit and its role"},
		{"", []string{"=operator"}, "want an organizational unit and its role"},
		{"", []string{"ops=root"}, "want one of directory, memnode, tier, gateway, janitor, archive, operator, client"},
		{"", []string{"ops=operator", "ops=client"}, "operator and client"},
	} {
		_, err := identity.ParseMapping(tc.td, tc.units)
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q %q: %v, want %q", tc.td, tc.units, err, tc.want)
		}
	}
}

func TestRoles(t *testing.T) {
	for _, r := range identity.Every.All() {
		if got, err := identity.ParseRole(r.String()); got != r || err != nil {
			t.Errorf("%v is parsed to %v, %v", r, got, err)
		}
	}
	if s := identity.RolesOf(identity.Operator, identity.Directory); s.String() != "directory, operator" || s.Has(0) ||
		s.Has(identity.Client) {
		t.Errorf("the set is %v", s)
	}
	for _, s := range []string{"", "Role(0)", "root"} {
		if r, err := identity.ParseRole(s); err == nil {
			t.Errorf("%q is the role %v", s, r)
		}
	}
}

func TestOfConnection(t *testing.T) {
	a := identitytest.New(t)
	cert := a.Role("client", "app").Leaf
	for name, cs := range map[string]*tls.ConnectionState{
		"nothing shown":   {},
		"nobody verified": {PeerCertificates: []*x509.Certificate{cert}},
		"an empty chain":  {PeerCertificates: []*x509.Certificate{cert}, VerifiedChains: [][]*x509.Certificate{{}}},
	} {
		if i, err := (identity.Mapping{}).OfConnection(cs); !errors.Is(err, identity.ErrNoCertificate) {
			t.Errorf("%s: %v, %v", name, i, err)
		}
	}
	cs := &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{cert}}}
	i, err := (identity.Mapping{}).Admit(cs, "DrainNode", identity.RolesOf(identity.Operator))
	var denied *identity.DeniedError
	if !errors.As(err, &denied) || denied.Identity != i || i.Name != "app" {
		t.Fatalf("%v, %v", i, err)
	}
	if want := "spiffe://test.example/kvd/client/app has the role client, and DrainNode is for operator"; err.Error() !=
		want {
		t.Errorf("%q, want %q", err, want)
	}
}

// Require holds on both sides, also if the configuration follows its files, as those of processes do: a server of that
// kind takes all that it asks for from another configuration.
func TestRequire(t *testing.T) {
	a := identitytest.New(t)
	follows := func(role string) *tls.Config {
		ca, cert, key := a.Files(a.Role(role, "it"))
		s, err := certs.Open(certs.Options{Files: certs.Files{CA: ca, Cert: cert, Key: key}})
		if err != nil {
			t.Fatal(err)
		}
		return s.Config()
	}
	fixed := func(role string) *tls.Config {
		c := a.Config(a.Role(role, "it"))
		c.ClientAuth, c.ClientCAs = tls.RequireAndVerifyClientCert, c.RootCAs
		return c
	}
	want := identity.RolesOf(identity.Directory)
	for _, tc := range []struct {
		name           string
		server, client *tls.Config
		ok             bool
	}{
		{"both follow their files", follows("directory"), follows("directory"), true},
		{"both are fixed", fixed("directory"), fixed("directory"), true},
		{"a client of another role", follows("directory"), follows("client"), false},
		{"a client of another role, fixed", fixed("directory"), fixed("client"), false},
		{"a server of another role", follows("memnode"), follows("directory"), false},
		{"a server of another role, fixed", fixed("memnode"), fixed("directory"), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var m identity.Mapping
			l := testutil.Listen(t)
			y, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer y.Close()
			x, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			server := tls.Server(x, m.Require(tc.server, "this", want))
			conf, err := certs.ForHost(m.Require(tc.client, "this", want), "127.0.0.1")
			if err != nil {
				t.Fatal(err)
			}
			client := tls.Client(y, conf)
			served := make(chan error, 1)
			go func() {
				err := server.Handshake()
				if err != nil {
					x.Close()
				}
				served <- err
			}()
			if err = client.Handshake(); err != nil {
				y.Close()
			}
			if err = errors.Join(err, <-served); (err == nil) != tc.ok {
				t.Fatalf("%v, want ok: %v", err, tc.ok)
			}
			var denied *identity.DeniedError
			if err != nil && !errors.As(err, &denied) {
				t.Errorf("%v does not say who was denied", err)
			}
		})
	}
}
