package token

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzVerify shows a memory node anything: only what was signed with the key is taken, for
// just what it says.
func FuzzVerify(f *testing.F) {
	key := bytes.Repeat([]byte{7}, KeySize)
	f.Add(Sign(key, Grant{Session: 1, Namespace: 2}), uint32(1), uint32(2), true)
	f.Add(Sign(bytes.Repeat([]byte{8}, KeySize), Grant{Session: 1 << 31}), uint32(0), uint32(0), false)
	f.Add([]byte{}, uint32(1<<32-1), uint32(1<<32-1), true)
	// Rights that no version knows, signed.
	strange := Sign(key, Grant{Session: 1})[:12]
	strange[8] = 2
	f.Add(append(strange, mac(key, strange)...), uint32(1), uint32(0), true)
	f.Fuzz(func(t *testing.T, b []byte, session, namespace uint32, readOnly bool) {
		switch g, err := Verify(key, b); {
		case err == nil && !bytes.Equal(Sign(key, g), b):
			t.Fatalf("%x is taken as %+v, whose token is another", b, g)
		case err != nil && (!errors.Is(err, ErrInvalid) || g != Grant{}):
			t.Fatalf("%x: %+v, %v", b, g, err)
		}
		want := Grant{Session: session, Namespace: namespace, ReadOnly: readOnly}
		tok := Sign(key, want)
		if g, err := Verify(key, tok); err != nil || g != want {
			t.Fatalf("Verify(Sign(%+v)) = %+v, %v", want, g, err)
		}
		for i, x := range b { // any other bytes of the same length
			if j := i % Size; x != 0 {
				tok[j] ^= x
			}
		}
		if !bytes.Equal(tok, Sign(key, want)) {
			if g, err := Verify(key, tok); err == nil {
				t.Fatalf("a token that was altered is taken as %+v", g)
			}
		}
	})
}
