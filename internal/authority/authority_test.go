package authority

import (
	"strings"
	"testing"
	"time"
)

func TestIssueRefuses(t *testing.T) {
	now := time.Now()
	ca, err := New("kvd", now, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	for want, q := range map[string]Request{
		`name "a/b"`:            {Name: "a/b", Role: "client", Valid: 1},
		`name ".."`:             {Name: "..", Role: "client", Valid: 1},
		`role "root"`:           {Name: "a", Role: "root", Valid: 1},
		`group "a b"`:           {Name: "a", Role: "client", Groups: []string{"a b"}, Valid: 1},
		"17 groups":             {Name: "a", Role: "client", Groups: make([]string, 17), Valid: 1},
		"others call a gateway": {Name: "a", Role: "gateway", Valid: 1},
		"nobody calls a client": {Name: "a", Role: "client", DNS: []string{"h"}, Valid: 1},
		`DNS name "a b"`:        {Name: "a", Role: "gateway", DNS: []string{"a b"}, Valid: 1},
		"the authority expires": {Name: "a", Role: "client", Valid: 2 * time.Hour},
		"valid for 0s":          {Name: "a", Role: "client"},
	} {
		if _, _, _, err := ca.Issue(now, q); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", q, err, want)
		}
	}
}

// Only an authority of New is one.
func TestParseRefuses(t *testing.T) {
	now := time.Now()
	ca, err := New("kvd", now, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	_, cert, key, err := ca.Issue(now, Request{Name: "a", Role: "client", Valid: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Parse(cert, key); err == nil || !strings.Contains(err.Error(), "no authority's") {
		t.Error(err)
	}
	if _, err := Parse(ca.CertPEM(), key); err == nil {
		t.Error("took the key of another")
	}
	caKey, err := ca.KeyPEM()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := Parse(ca.CertPEM(), caKey); err != nil || !again.Certificate().Equal(ca.Certificate()) {
		t.Error(err)
	}
}
