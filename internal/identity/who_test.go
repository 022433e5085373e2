package identity_test

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
)

func TestCheckWho(t *testing.T) {
	name := strings.Repeat("n", identity.MaxNameBytes)
	for who, want := range map[string]string{
		"spiffe://prod.example/kvd/client/shop":    "",
		"spiffe://prod.example/kvd/client/" + name: "",
		"client/shop":                            "",
		"client/Ann of Sales":                    "",
		"group:team-a":                           "",
		"group:Example, Inc.":                    "",
		"":                                       `"" is neither an identity nor a group: want spiffe://TRUST-DOMAIN/kvd/ROLE/NAME`,
		"shop":                                   `"shop" is neither`,
		"group:":                                 "the name of a group of 0 bytes, want 1..64",
		"group:a/b":                              `holds '/' at byte 1`,
		"group:a\nb":                             "want printable characters",
		"group:" + name + "n":                    "of 65 bytes",
		"root/shop":                              `role "root"`,
		"client/":                                "name of 0 bytes",
		"client/a/b":                             "no slash",
		"spiffe://prod.example/kvd/root/a":       `role "root"`,
		"spiffe://prod.example/ns/a":             "its path is not /kvd/ROLE/NAME",
		"spiffe://prod.example/kvd/client/a?x=1": "path segment characters",
		"spiffe://PROD.example/kvd/client/a":     "trust domain characters",
		"SPIFFE://prod.example/kvd/client/a":     "prod.example/kvd/client/a",
		"https://prod.example/kvd/client/a":      "scheme",
		"spiffe://prod.example/kvd/client/" + name + "n": "name of 65 bytes",
	} {
		err := identity.CheckWho(who)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", who, err, want)
		}
	}
}

// An identity of a certificate may stand in an access list as it is.
func TestCheckWhoTakesIdentities(t *testing.T) {
	for _, i := range []identity.Identity{{TrustDomain: "p.example", Role: identity.Client, Name: "a"},
		{Role: identity.Gateway, Name: "g 1"}} {
		if err := identity.CheckWho(i.String()); err != nil {
			t.Error(err)
		}
	}
}

func TestGroupsOf(t *testing.T) {
	a := identitytest.New(t)
	organizations := func(names ...string) []string { return names }
	var many []string
	for i := range identity.MaxGroups + 1 {
		many = append(many, fmt.Sprint("g", i))
	}
	for _, tc := range []struct {
		name  string
		in    []string
		want  []string
		error string
	}{
		{"none", nil, nil, ""},
		{"sorted, once each", organizations("b", "a", "b"), organizations("a", "b"), ""},
		{"a firm", organizations("Example, Inc."), organizations("Example, Inc."), ""},
		{"too many", many, nil, "17 organizations, which are groups, want at most 16"},
		{"too long", organizations(strings.Repeat("n", identity.MaxNameBytes+1)), nil, "of 65 bytes, want 1..64"},
		{"a slash", organizations("a/b"), nil, `"a/b" holds '/'`},
		{"a line break", organizations("a\nb"), nil, "want printable characters"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cert := a.Role("client", "a", func(c *x509.Certificate) {
				c.Subject = pkix.Name{CommonName: "a", Organization: tc.in}
			})
			got, err := identity.GroupsOf(cert.Leaf)
			if !slices.Equal(got, tc.want) || (err == nil) != (tc.error == "") || err != nil &&
				(!errors.Is(err, identity.ErrUnidentified) || !strings.Contains(err.Error(), tc.error)) {
				t.Errorf("%q, %v; want %q, %q", got, err, tc.want, tc.error)
			}
		})
	}
}
