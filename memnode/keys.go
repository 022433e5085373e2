package memnode

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/token"
)

var (
	// ErrIdentity refuses a session's token to a peer whose certificate is another's.
	ErrIdentity = errors.New("the session token is another identity's")
	// ErrNoRegion refuses a session whose namespace has no region here. A client whose map is older or newer than what
	// this node has tries again.
	ErrNoRegion = errors.New("no region of the namespace here")
	// ErrLanes refuses a connection beyond the session's share: its namespace's quota lanes, or the directory's limit.
	ErrLanes = errors.New("quota lanes")
)

// maxKeys is how many keys a directory takes tokens of: the present one and the one before.
const maxKeys = 2

// keysOf checks what the directory says of keys. The first is the present one.
func keysOf(list []*dirpb.TokenKey) ([]token.Key, error) {
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

// takeKeysLocked takes over the keys that the directory has now, in the place of those before.
func (n *Node) takeKeysLocked(keys []token.Key) {
	if len(n.mu.keys) > 0 && n.mu.keys[0].Generation != keys[0].Generation {
		n.log.Info("tokens of another key are taken from now on", "generation", keys[0].Generation, "before",
			n.mu.keys[0].Generation)
	}
	n.mu.keys = keys
}

// askPause is the least time between two heartbeats for the sake of tokens of a key that is not known here. Anybody can
// name such a key, and each ends a heartbeat that is under way, which is to have the time that it takes.
const askPause = exchangeTimeout

// verify checks a session's token, and that it is shown by the session's owner: of a connection with TLS, peer is
// the identity that its certificate has.
func (n *Node) verify(b []byte, tls bool, peer identity.Identity) (token.Grant, error) {
	n.mu.Lock()
	keys := n.mu.keys
	n.mu.Unlock()
	g, err := token.Verify(keys, b, time.Now())
	if err != nil {
		if unknown := (*token.GenerationError)(nil); errors.As(err, &unknown) && unknown.Generation > unknown.Newest {
			n.askForKeys()
		}
		return token.Grant{}, err
	}
	if tls && g.Identity != peer.String() {
		return token.Grant{}, fmt.Errorf("%w: session %d is %s's, and the peer is %s", ErrIdentity, g.Session,
			orNobody(g.Identity), peer)
	}
	return g, nil
}

// askForKeys has the directory say now what it would say with the next heartbeat: it may have made another key. The
// client whose token is refused meanwhile tries again.
func (n *Node) askForKeys() {
	n.mu.Lock()
	late := time.Since(n.mu.asked) >= askPause
	if late {
		n.mu.asked = time.Now()
	}
	n.mu.Unlock()
	if late {
		n.kickHeartbeat()
	}
}

func orNobody(identity string) string {
	if identity == "" {
		return "nobody" // it was opened without TLS
	}
	return identity
}

// hasRegionLocked reports whether a region of the namespace is here. The directory names a
// region in its map only after it has been made, so who knows of it finds it.
func (n *Node) hasRegionLocked(namespace uint32) bool {
	for _, r := range n.mu.regions {
		if !r.dying && r.want.GetNamespaceId() == namespace {
			return true
		}
	}
	return false
}
