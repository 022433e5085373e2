package lead

import (
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
)

// Keys for session tokens are replaced without a gap: memory nodes take the tokens of the present key and of
// the one before. The directory signs with the present one once every memory node that is up has said that it takes its
// tokens, and with the one before until then. Sessions get new tokens with their renewals, and say which they show.
// Only when all have one of the present key is that made the one before. docs/protocol.md, "Tokens and keys".

// TokenNumber names a token by what its session and the directory have to know of it. That is the generation
// of its key, and when it expires in Unix seconds.
func TokenNumber(generation uint32, expires int64) uint64 {
	return uint64(generation)<<32 | uint64(uint32(expires))
}

// TokenGeneration is that of the key that signed the token; 0: there is no token.
func TokenGeneration(number uint64) uint32 { return uint32(number >> 32) }

// TokenExpires is when the token of a number expires, in Unix seconds.
func TokenExpires(number uint64) int64 { return int64(uint32(number)) }

// TakesKey notes the latest key whose tokens a process of a memory node takes, as it says with a heartbeat that has
// been heeded. It reports whether another key signs now.
func (l *Leader) TakesKey(s *fsm.State, id uint32, incarnation uint64, generation uint32) bool {
	if m := l.nodes[id]; m != nil && m.incarnation == incarnation {
		m.keyGeneration = max(m.keyGeneration, min(generation, s.KeyGeneration()))
	}
	before := l.signs
	return l.Signs(s) > before
}

// Signs is the generation of the key that signs session tokens.
func (l *Leader) Signs(s *fsm.State) uint32 {
	now := s.KeyGeneration()
	if l.signs = now; len(s.Keys()) > 1 && slices.ContainsFunc(s.Nodes(), l.lacksKey(now)) {
		l.signs = now - 1
	}
	return l.signs
}

// lacksKey says of a memory node that is up whether it may refuse tokens of a generation.
func (l *Leader) lacksKey(generation uint32) func(*dirpb.Node) bool {
	return func(m *dirpb.Node) bool {
		if m.State != dirpb.NodeState_NODE_UP {
			return false
		}
		x := l.nodes[m.Id]
		return x == nil || x.incarnation != m.Incarnation || x.keyGeneration < generation
	}
}

// Holds notes that a session was given a token when it was opened.
func (l *Leader) Holds(id uint32, number uint64) {
	if x := l.sessions.of(id); x != nil {
		x.token, x.tokenKnown = number, true
	}
}

// outdated reports whether a session shows tokens of an older key than the one that signs, so that the next key waits
// for it.
func (l *Leader) outdated(x *session) bool {
	return x.token != 0 && TokenGeneration(x.token) < l.signs
}

// KeyUse says which memory nodes and sessions have not taken over the present key, by what they have told this leader.
func (l *Leader) KeyUse(s *fsm.State) *dirpb.KeyUse {
	now := s.KeyGeneration()
	u := &dirpb.KeyUse{Generation: now, MadeUnixMillis: s.Meta().KeyUnixMillis, Signs: l.Signs(s)}
	if len(s.Keys()) == 1 {
		return u // nobody can have one of an older key
	}
	behind := l.lacksKey(now)
	for _, m := range s.Nodes() {
		if behind(m) {
			u.NodesBehind = append(u.NodesBehind, m.Name)
		}
	}
	for _, y := range s.Sessions() {
		if y.Life != dirpb.SessionLife_SESSION_LIVE {
			continue
		}
		if x := l.sessions.of(y.Id); x == nil || !x.tokenKnown || x.token != 0 && TokenGeneration(x.token) < now {
			u.SessionsBehind = append(u.SessionsBehind, y.Id)
		}
	}
	return u
}
