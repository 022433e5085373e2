package token

import (
	"bytes"
	"errors"
	"math"
	"testing"
	"time"
)

// FuzzVerify shows a memory node anything: only what was signed with one of the keys is taken, for
// just what it says and no longer.
func FuzzVerify(f *testing.F) {
	keys := []Key{{Generation: 3, Secret: bytes.Repeat([]byte{7}, KeySize)},
		{Generation: 2, Secret: bytes.Repeat([]byte{8}, KeySize)}}
	g := Grant{Session: 1, Namespace: 2, Lanes: 256, Expires: 1000, Identity: "client/a"}
	for _, k := range append(keys, Key{Generation: 1, Secret: keys[0].Secret},
		Key{Generation: 3, Secret: keys[1].Secret}) {
		f.Add(mustSign(f, k, g), uint32(1), uint32(2), uint16(1), int64(1000), "client/a", true)
	}
	f.Add([]byte{}, uint32(math.MaxUint32), uint32(math.MaxUint32), uint16(math.MaxUint16), int64(math.MaxInt64), "",
		false)
	// Rights that no version knows, signed.
	strange := mustSign(f, keys[0], g)
	strange = strange[:len(strange)-32]
	strange[14] = 9
	f.Add(append(strange, mac(keys[0].Secret, strange)...), uint32(1), uint32(1), uint16(1), int64(0), "x", true)
	f.Fuzz(func(t *testing.T, b []byte, session, namespace uint32, lanes uint16, expires int64, identity string,
		readOnly bool) {
		now := time.Unix(500, 0)
		got, err := Verify(keys, b, now)
		var gen *GenerationError
		switch {
		case err == nil && (got.Generation != 2 && got.Generation != 3 || got.Expires <= now.Unix()):
			t.Fatalf("%x is taken as %+v", b, got)
		case err == nil && !bytes.Equal(mustSign(t, keys[3-got.Generation], got), b):
			t.Fatalf("%x is taken as %+v, whose token is another", b, got)
		case err != nil && (got != Grant{} || !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrExpired) &&
			!errors.As(err, &gen)):
			t.Fatalf("%x: %+v, %v", b, got, err)
		}
		want := Grant{Session: session, Namespace: namespace, Generation: 3, Lanes: lanes, Expires: expires,
			Identity: identity, ReadOnly: readOnly}
		tok, err := Sign(keys[0], want)
		if err != nil {
			if want.check() == nil {
				t.Fatalf("%+v is not signed: %v", want, err)
			}
			return
		}
		if len(tok) > MaxSize {
			t.Fatalf("a token of %d bytes", len(tok))
		}
		if got, err := Verify(keys, tok, time.Unix(expires-1, 0)); err != nil || got != want {
			t.Fatalf("Verify(Sign(%+v)) = %+v, %v", want, got, err)
		}
		if _, err := Verify(keys, tok, time.Unix(expires, 0)); !errors.Is(err, ErrExpired) {
			t.Fatalf("%+v when it has expired: %v", want, err)
		}
		bad := bytes.Clone(tok)
		for i, x := range b { // any other bytes of the same length
			bad[i%len(bad)] ^= x
		}
		if !bytes.Equal(bad, tok) {
			if got, err := Verify(keys, bad, time.Unix(expires-1, 0)); err == nil {
				t.Fatalf("a token that was altered is taken as %+v", got)
			}
		}
	})
}
