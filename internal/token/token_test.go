package token

import (
	"bytes"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	key := bytes.Repeat([]byte{7}, KeySize)
	for _, g := range []Grant{{Session: 1, Namespace: 2}, {Session: 1 << 31, Namespace: 9, ReadOnly: true}} {
		tok := Sign(key, g)
		got, err := Verify(key, tok)
		if err != nil || got != g {
			t.Fatalf("Verify(Sign(%+v)) = %+v, %v", g, got, err)
		}
		for i := range tok {
			bad := bytes.Clone(tok)
			bad[i] ^= 1
			if _, err := Verify(key, bad); err == nil {
				t.Fatalf("byte %d flipped: accepted", i)
			}
		}
		if _, err := Verify(key, tok[:Size-1]); err == nil {
			t.Fatal("short token accepted")
		}
		if _, err := Verify(bytes.Repeat([]byte{8}, KeySize), tok); err == nil {
			t.Fatal("foreign key accepted")
		}
	}
}
