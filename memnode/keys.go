package memnode

import (
	"errors"
	"time"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/token"
)

var (
	// ErrNoRegion refuses a session whose namespace has no region here. A client whose map is older or newer than what
	// this node has tries again.
	ErrNoRegion = errors.New("no region of the namespace here")
	// ErrLanes refuses a connection beyond the session's share: its namespace's quota lanes, or the directory's limit.
	ErrLanes = errors.New("quota lanes")
)

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
	g, err := admit.Verify(keys, b, tls, peer)
	if unknown := (*token.GenerationError)(nil); errors.As(err, &unknown) && unknown.Generation > unknown.Newest {
		n.askForKeys()
	}
	return g, err
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
