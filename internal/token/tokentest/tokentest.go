// Package tokentest makes session tokens that a memory node has to refuse, for tests of whatever takes tokens.
//
// It leaves showing them to its callers: package memnode's tests do so over providers of one process, others
// over real ones. It needs no key, as a forger has none.
//
// Start with [Forgeries]. Its functions are pure; what they return is the caller's.
package tokentest

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/kvd-project/kvd/internal/token"
)

// Forgery is a token that nobody signed.
type Forgery struct {
	Name  string // of what was altered
	Token []byte
}

// Forgeries alters a good token: every byte of it, its length, what it grants, and the key that signs it.
func Forgeries(good []byte) []Forgery {
	out := []Forgery{
		{"empty", nil},
		{"zeroes", make([]byte, len(good))},
		{"a byte short", bytes.Clone(good[:len(good)-1])},
		{"a byte long", append(bytes.Clone(good), 0)},
		{"without signature", bytes.Clone(good[:len(good)-32])},
	}
	for i := range good {
		b := bytes.Clone(good)
		b[i] ^= 1 << (i % 8)
		out = append(out, Forgery{fmt.Sprintf("byte %d", i), b})
	}
	for name, alter := range map[string]func(*token.Grant){
		"another session":    func(g *token.Grant) { g.Session++ },
		"another namespace":  func(g *token.Grant) { g.Namespace++ },
		"another generation": func(g *token.Grant) { g.Generation++ },
		"other rights":       func(g *token.Grant) { g.ReadOnly = !g.ReadOnly },
		"more lanes":         func(g *token.Grant) { g.Lanes++ },
		"a later expiry":     func(g *token.Grant) { g.Expires += 3600 },
		"another identity":   func(g *token.Grant) { g.Identity += "x" },
		"nothing":            func(*token.Grant) {},
	} {
		g := read(good)
		alter(&g)
		b, err := token.Sign(token.Key{Generation: g.Generation, Secret: bytes.Repeat([]byte{1}, token.KeySize)}, g)
		if err != nil {
			continue // no token can say it
		}
		out = append(out, Forgery{name + ", signed with a forger's key", b})
		b = append(bytes.Clone(b[:len(b)-32]), good[len(good)-32:]...)
		if !bytes.Equal(b, good) {
			out = append(out, Forgery{name + ", with the signature of the good one", b})
		}
	}
	return out
}

// read is what a token says, whoever signed it.
func read(b []byte) token.Grant {
	return token.Grant{
		Session: binary.LittleEndian.Uint32(b[0:]), Namespace: binary.LittleEndian.Uint32(b[4:]),
		Generation: binary.LittleEndian.Uint32(b[8:]),
		Lanes:      binary.LittleEndian.Uint16(b[12:]), ReadOnly: b[14] == 1,
		Expires: int64(binary.LittleEndian.Uint64(b[16:])), Identity: string(b[24 : len(b)-32]),
	}
}
