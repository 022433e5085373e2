// Package token makes and checks the session tokens that clients show memory
// nodes when they connect a QP.
//
// The directory signs what a session may do with the cluster key, which memory
// nodes receive when they register; so a memory node can check a token without
// calling anybody. A token proves what was granted, not that the session is
// still live: which sessions are, the directory tells memory nodes when they register and
// with every heartbeat.
// All functions are pure and may be called concurrently.
package token

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
)

// Grant is what a token says. Every field is signed.
//
//	0        4        8        10      12        44
//	+--------+--------+--------+-------+---------+
//	|session |namesp. | rights | zero  | HMAC    |   little-endian
//	+--------+--------+--------+-------+---------+
type Grant struct {
	Session   uint32
	Namespace uint32
	ReadOnly  bool
}

// Size is a token's length in bytes.
const Size = 12 + sha256.Size

// KeySize is the cluster key's length in bytes.
const KeySize = 32

// ErrInvalid means the bytes are not a token signed with the key.
var ErrInvalid = errors.New("invalid session token")

// Sign makes the token of g.
func Sign(key []byte, g Grant) []byte {
	b := make([]byte, 12, Size)
	binary.LittleEndian.PutUint32(b[0:], g.Session)
	binary.LittleEndian.PutUint32(b[4:], g.Namespace)
	if g.ReadOnly {
		b[8] = 1
	}
	return append(b, mac(key, b)...)
}

// Verify checks b and returns what it grants.
func Verify(key, b []byte) (Grant, error) {
	if len(b) != Size {
		return Grant{}, fmt.Errorf("%w: %d bytes, want %d", ErrInvalid, len(b), Size)
	}
	if !hmac.Equal(mac(key, b[:12]), b[12:]) {
		return Grant{}, fmt.Errorf("%w: signature", ErrInvalid)
	}
	if b[8] > 1 || b[9] != 0 || b[10] != 0 || b[11] != 0 {
		return Grant{}, fmt.Errorf("%w: rights", ErrInvalid)
	}
	return Grant{
		Session:   binary.LittleEndian.Uint32(b[0:]),
		Namespace: binary.LittleEndian.Uint32(b[4:]),
		ReadOnly:  b[8] == 1,
	}, nil
}

func mac(key, b []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte("kvd session token v1"))
	h.Write(b)
	return h.Sum(nil)
}
