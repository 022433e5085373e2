// Package admit decides, from what the directory says, whose connections memory nodes and tier nodes take. It knows
// which keys sign tokens, which sessions live, and who may show a token.
//
// It leaves to them what a session may then do, and the end of its connections. Start with
// [Keys], [Verify] and [Sessions]. A Sessions is not safe for concurrent use: its owner locks it. No buffer is kept.
//
// Ids are given out in order and once, so a few words tell the living from the dead. Keys that are told apart by
// generations follow JSON Web Tokens.
package admit

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/token"
)

// ErrIdentity refuses a session's token to a peer whose certificate is another's.
var ErrIdentity = errors.New("the session token is another identity's")

// LaneSize is the length of the lane's number, in bytes and little-endian, behind the token in a connection's private
// data. token.BulkLane is added to it for the lane's second connection.
const LaneSize = 4

// Connects is which roles have sessions, and with them connections.
var Connects = dirpb.Rights()[dirpb.Directory_OpenSession_FullMethodName]

// maxKeys is how many keys a directory takes tokens of: the present one and the one before.
const maxKeys = 2

// Keys checks what the directory says of keys. The first is the present one.
func Keys(list []*dirpb.TokenKey) ([]token.Key, error) {
	if len(list) == 0 || len(list) > maxKeys {
		return nil, fmt.Errorf("the directory sent %d keys for session tokens, want 1 or %d", len(list), maxKeys)
	}
	keys := make([]token.Key, len(list))
	for i, k := range list {
		if len(k.GetKey()) != token.KeySize || k.GetGeneration() == 0 ||
			k.GetGeneration() != list[0].GetGeneration()-uint32(i) {
			return nil, fmt.Errorf("the directory sent key %d for session tokens with generation %d and %d bytes, "+
				"want %d bytes and each generation one less than that before",
				i, k.GetGeneration(), len(k.GetKey()), token.KeySize)
		}
		keys[i] = token.Key{Generation: k.GetGeneration(), Secret: k.GetKey()}
	}
	return keys, nil
}

// Verify checks a session's token, and that its owner shows it: peer is the identity of a connection's certificate, if
// it has TLS. A token of a later key than these is a *token.GenerationError.
func Verify(keys []token.Key, b []byte, tls bool, peer identity.Identity) (token.Grant, error) {
	g, err := token.Verify(keys, b, time.Now())
	if err != nil {
		return token.Grant{}, err
	}
	if tls && g.Identity != peer.String() {
		return token.Grant{}, fmt.Errorf("%w: session %d is %s's, and the peer is %s", ErrIdentity, g.Session,
			orNobody(g.Identity), peer)
	}
	return g, nil
}

func orNobody(identity string) string {
	if identity == "" {
		return "nobody" // it was opened without TLS
	}
	return identity
}

// Sessions are those that the directory admits, as it said last. It gives ids out in order and never again. So a
// session that it has told of and does not call live has ended; a greater id is younger than what it said. The zero
// value has heard of none.
type Sessions struct {
	last uint32 // greatest id that the directory has told of
	live map[uint32]struct{}
}

// Learn takes in what the directory says. The last id does not fall. If the directory lost what it knew of sessions,
// their tokens do not become those of the next with their ids.
func (s *Sessions) Learn(r *dirpb.Sessions) {
	s.last = max(s.last, r.GetLast())
	s.live = make(map[uint32]struct{}, len(r.GetLive()))
	for _, id := range r.GetLive() {
		s.live[id] = struct{}{}
	}
}

// Ended reports whether a session has ended, or is being fenced.
func (s *Sessions) Ended(id uint32) bool {
	_, live := s.live[id]
	return id <= s.last && !live
}
