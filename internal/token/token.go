// Package token makes and checks the session tokens that clients show memory
// nodes when they connect a QP.
//
// The directory signs, with a key of the cluster, what a session may do. Memory nodes receive the key when
// they register and with every heartbeat. So a memory node can check a token without calling anybody. Keys
// are replaced now and then: each has a generation, and memory nodes take tokens of the present key and of
// the one before. A token proves what was granted, not that the session is still live. The directory tells
// memory nodes which sessions are, when they register and with every heartbeat.
//
// Start with [Sign] and [Verify]. All functions are pure and may be called concurrently. They keep no buffer.
//
// Expiry and generations of keys follow JSON Web Tokens (exp, kid); the form has one algorithm and no choice of it.
package token

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"
)

// Key signs tokens and checks them.
type Key struct {
	Generation uint32 // 1 for a cluster's first
	Secret     []byte // KeySize bytes
}

// String names the key without its secret, which is not for logs.
func (k Key) String() string { return fmt.Sprintf("key %d", k.Generation) }

// GoString is String.
func (k Key) GoString() string { return k.String() }

// KeySize is the length of a key's secret in bytes.
const KeySize = 32

// BulkLane is added to the number of a lane, behind a token, where the connection is the lane's second one to a memory
// node.
const BulkLane = 1 << 31

// ProbeLane is the first of ProbeLanes numbers, behind a token, of connections that show whether a memory node can be
// reached by an endpoint. They replace no lane's. Memory nodes of one endpoint a provider need not know them.
const (
	ProbeLane  = 1 << 30
	ProbeLanes = 16
)

// Grant is what a token says. Every field is signed.
//
//	0        4        8          12      14       15       16       24        24+n      56+n
//	+--------+--------+----------+-------+--------+--------+--------+---------+---------+
//	|session |namesp. |generation| lanes | rights | n      |expires | identity| HMAC    |   little-endian
//	+--------+--------+----------+-------+--------+--------+--------+---------+---------+
//
//	session    and namespace, generation: ids, never 0
//	lanes      the session's lanes are numbered below it; 1..65535
//	rights     1 reads, 2 reads and writes
//	n          length of identity, at most MaxIdentity
//	expires    Unix seconds, from which on the token is void
//	identity   whose session it is, as in internal/identity; empty: it was opened without TLS
//	HMAC       SHA-256 with the key of that generation, over Context and all that is before
//
// Vectors: testdata/token.
type Grant struct {
	Session    uint32
	Namespace  uint32
	Generation uint32 // of the key that signs it; Sign sets it
	Lanes      uint16
	ReadOnly   bool
	Expires    int64 // Unix seconds
	Identity   string
}

const (
	headSize = 24
	// MaxIdentity is the longest identity in bytes.
	MaxIdentity = 160
	// MinSize and MaxSize bound a token's length in bytes.
	MinSize = headSize + sha256.Size
	MaxSize = MinSize + MaxIdentity

	rightRead, rightWrite = 1, 2

	context = "kvd session token v2"
)

// Why Verify refuses a token.
var (
	// ErrInvalid means that the bytes are no token, or that its signature is wrong.
	ErrInvalid = errors.New("invalid session token")
	// ErrExpired means that a token was signed by one of the keys, and is too old.
	ErrExpired = errors.New("the session token has expired")
)

// GenerationError means that a token is of none of the keys, by what it says itself: nobody has
// checked its signature.
type GenerationError struct {
	Generation uint32 // that the token names
	Newest     uint32 // of the keys
}

func (e *GenerationError) Error() string {
	if e.Generation > e.Newest {
		return fmt.Sprintf("session token of key generation %d, and %d is the latest that is known here", e.Generation,
			e.Newest)
	}
	return fmt.Sprintf("session token of key generation %d, which was replaced: %d is the present one", e.Generation,
		e.Newest)
}

// Sign makes the token of g with k, whose generation it names whatever g says. An error means that g does not fit into
// one.
func Sign(k Key, g Grant) ([]byte, error) {
	g.Generation = k.Generation
	if err := g.check(); err != nil {
		return nil, fmt.Errorf("session token: %w", err)
	}
	b := make([]byte, 0, MinSize+len(g.Identity))
	b = binary.LittleEndian.AppendUint32(b, g.Session)
	b = binary.LittleEndian.AppendUint32(b, g.Namespace)
	b = binary.LittleEndian.AppendUint32(b, g.Generation)
	b = binary.LittleEndian.AppendUint16(b, g.Lanes)
	if g.ReadOnly {
		b = append(b, rightRead)
	} else {
		b = append(b, rightWrite)
	}
	b = append(b, byte(len(g.Identity)))
	b = binary.LittleEndian.AppendUint64(b, uint64(g.Expires))
	b = append(b, g.Identity...)
	return append(b, mac(k.Secret, b)...), nil
}

// check says which field of g no token has.
func (g Grant) check() error {
	switch {
	case g.Session == 0 || g.Namespace == 0 || g.Generation == 0:
		return fmt.Errorf("session %d, namespace %d, key generation %d: want none of them 0", g.Session, g.Namespace,
			g.Generation)
	case g.Lanes == 0:
		return errors.New("0 lanes, want at least 1")
	case g.Expires < 0:
		return fmt.Errorf("expires at %d, want Unix seconds", g.Expires)
	case len(g.Identity) > MaxIdentity || !utf8.ValidString(g.Identity):
		return fmt.Errorf("identity %.80q of %d bytes, want UTF-8 of at most %d", g.Identity, len(g.Identity),
			MaxIdentity)
	}
	return nil
}

// Verify checks b with the key of keys that it names, and now, and returns what it grants. An error matches ErrInvalid
// or ErrExpired, or is a *GenerationError.
func Verify(keys []Key, b []byte, now time.Time) (Grant, error) {
	fail := func(format string, args ...any) (Grant, error) {
		return Grant{}, fmt.Errorf("%w: %s", ErrInvalid, fmt.Sprintf(format, args...))
	}
	if len(b) < MinSize || len(b) > MaxSize {
		return fail("%d bytes, want %d to %d", len(b), MinSize, MaxSize)
	}
	if want := MinSize + int(b[15]); len(b) != want {
		return fail("%d bytes with an identity of %d, want %d", len(b), b[15], want)
	}
	g := Grant{
		Session:    binary.LittleEndian.Uint32(b[0:]),
		Namespace:  binary.LittleEndian.Uint32(b[4:]),
		Generation: binary.LittleEndian.Uint32(b[8:]),
		Lanes:      binary.LittleEndian.Uint16(b[12:]),
		ReadOnly:   b[14] == rightRead,
		Expires:    int64(binary.LittleEndian.Uint64(b[16:])),
		Identity:   string(b[headSize : len(b)-sha256.Size]),
	}
	var key *Key
	newest := uint32(0)
	for i := range keys {
		if newest = max(newest, keys[i].Generation); keys[i].Generation == g.Generation {
			key = &keys[i]
		}
	}
	if key == nil {
		return Grant{}, &GenerationError{Generation: g.Generation, Newest: newest}
	}
	if body := b[:len(b)-sha256.Size]; !hmac.Equal(mac(key.Secret, body), b[len(body):]) {
		return fail("signature")
	}
	if b[14] != rightRead && b[14] != rightWrite {
		return fail("rights %d", b[14])
	}
	if err := g.check(); err != nil {
		return fail("%v", err)
	}
	if now.Unix() >= g.Expires {
		return Grant{}, fmt.Errorf("%w: at %s, and it is %s here", ErrExpired, stamp(time.Unix(g.Expires, 0)),
			stamp(now))
	}
	return g, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func mac(secret, b []byte) []byte {
	h := hmac.New(sha256.New, secret)
	h.Write([]byte(context))
	h.Write(b)
	return h.Sum(nil)
}
