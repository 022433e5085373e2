package token

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
)

var (
	first  = Key{Generation: 1, Secret: bytes.Repeat([]byte{7}, KeySize)}
	second = Key{Generation: 2, Secret: bytes.Repeat([]byte{8}, KeySize)}
	third  = Key{Generation: 3, Secret: bytes.Repeat([]byte{9}, KeySize)}
	noon   = time.Unix(1_000_000, 0)
	good   = Grant{Session: 7, Namespace: 3, Lanes: 256, Expires: noon.Unix() + 3600,
		Identity: "spiffe://test/kvd/client/a"}
)

func mustSign(t testing.TB, k Key, g Grant) []byte {
	t.Helper()
	b, err := Sign(k, g)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestRoundTrip(t *testing.T) {
	for _, change := range []func(*Grant){
		func(*Grant) {},
		func(g *Grant) { g.ReadOnly = true },
		func(g *Grant) { g.Session, g.Namespace, g.Lanes = 1<<31, 1<<32-1, 1 },
		func(g *Grant) { g.Identity = "" },
		func(g *Grant) { g.Identity = strings.Repeat("i", MaxIdentity) },
	} {
		g := good
		change(&g)
		g.Generation = 2
		tok := mustSign(t, second, g)
		for name, keys := range map[string][]Key{"present": {second, first}, "before": {third, second}} {
			if got, err := Verify(keys, tok, noon); err != nil || got != g {
				t.Fatalf("%s: Verify(Sign(%+v)) = %+v, %v", name, g, got, err)
			}
		}
		for i := range tok {
			for x := 1; x < 256; x++ {
				bad := bytes.Clone(tok)
				bad[i] ^= byte(x)
				if got, err := Verify([]Key{second, first}, bad, noon); err == nil {
					t.Fatalf("byte %d is %d in the place of %d: taken as %+v", i, bad[i], tok[i], got)
				}
			}
		}
	}
}

// Each refusal says which check failed, and none shows a key.
func TestRefusals(t *testing.T) {
	tok := mustSign(t, second, good)
	forged := mustSign(t, Key{Generation: 2, Secret: first.Secret}, good)
	late := good
	late.Expires = noon.Unix()
	for name, c := range map[string]struct {
		keys []Key
		tok  []byte
		is   error
		want string
	}{
		"empty": {[]Key{second}, nil, ErrInvalid, "0 bytes, want 56 to 216"},
		"short": {[]Key{second}, tok[:len(tok)-1], ErrInvalid, "81 bytes with an identity of 26, want 82"},
		"long": {[]Key{second}, append(bytes.Clone(tok), 0), ErrInvalid,
			"83 bytes with an identity of 26, want 82"},
		"another key": {[]Key{second, first}, forged, ErrInvalid, "signature"},
		"expired":     {[]Key{second}, mustSign(t, second, late), ErrExpired, "1970-01-12T13:46:40Z"},
		"replaced twice": {[]Key{third, second}, mustSign(t, first, good), nil,
			"key generation 1, which was replaced: 3 is the present one"},
		"newer key": {[]Key{second, first}, mustSign(t, third, good), nil,
			"key generation 3, and 2 is the latest that is known here"},
		"no key": {nil, tok, nil, "0 is the latest"},
		"expired, forged": {[]Key{second}, mustSign(t, Key{Generation: 2, Secret: first.Secret}, late), ErrInvalid,
			"signature"},
	} {
		g, err := Verify(c.keys, c.tok, noon)
		if g != (Grant{}) || err == nil || !strings.Contains(err.Error(), c.want) || c.is != nil &&
			!errors.Is(err, c.is) || c.is == nil && !errors.As(err, new(*GenerationError)) {
			t.Errorf("%s: %+v, %v; want %q", name, g, err, c.want)
		}
	}
	for name, change := range map[string]func(*Grant){
		"session 0":    func(g *Grant) { g.Session = 0 },
		"namespace 0":  func(g *Grant) { g.Namespace = 0 },
		"0 lanes":      func(g *Grant) { g.Lanes = 0 },
		"of 161 bytes": func(g *Grant) { g.Identity = strings.Repeat("i", MaxIdentity+1) },
		"expires at":   func(g *Grant) { g.Expires = -1 },
		`identity "\x`: func(g *Grant) { g.Identity = "\xff" },
	} {
		g := good
		change(&g)
		if b, err := Sign(first, g); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: signed as %x, %v", name, b, err)
		}
	}
	if s := fmt.Sprintf("%v %+v %#v %s", first, first, first, []Key{first}); strings.Contains(s, "7") {
		t.Errorf("a key is shown as %s", s)
	}
}

func TestVectors(t *testing.T) {
	datadriven.RunTest(t, "testdata/token", func(t *testing.T, d *datadriven.TestData) string {
		var g Grant
		k := Key{Secret: bytes.Repeat([]byte{0xab}, KeySize)}
		d.ScanArgs(t, "session", &g.Session)
		d.ScanArgs(t, "namespace", &g.Namespace)
		d.ScanArgs(t, "generation", &k.Generation)
		var lanes int
		d.ScanArgs(t, "lanes", &lanes)
		d.ScanArgs(t, "expires", &g.Expires)
		d.MaybeScanArgs(t, "identity", &g.Identity)
		g.Lanes, g.ReadOnly = uint16(lanes), d.HasArg("read-only")
		b := mustSign(t, k, g)
		at := 0
		var out strings.Builder
		for _, f := range []struct {
			name string
			n    int
		}{{"session", 4}, {"namespace", 4}, {"generation", 4}, {"lanes", 2}, {"rights", 1}, {"n", 1}, {"expires", 8},
			{"identity", len(g.Identity)}, {"hmac", 32}} {
			fmt.Fprintf(&out, "%-11s% x\n", f.name, b[at:at+f.n])
			at += f.n
		}
		return out.String()
	})
}
