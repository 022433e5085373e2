package live

import (
	"bytes"
	"slices"

	"github.com/kvd-project/kvd/internal/redis/exec"
)

// LateTracking is what a client caches of a transaction in which CLIENT TRACKING or CLIENT CACHING is queued. They hold
// from their turn on, which comes when all keys have been read. So keys are entered behind the transaction, with the
// versions that it read. They must be looked at again at once, for what was written in between. It belongs to the
// client's goroutine.
type LateTracking struct {
	Began *Tracking // what the client cached by when the transaction began
	keys  []*exec.Key
	// Keys that the client has written itself behind that, of those that it has read, and of those with prefixes.
	told, prefixed [][]byte
}

// Forget is called when a command's turn comes and the client caches nothing.
func (l *LateTracking) Forget() { l.keys = nil }

// Performed takes a key of a command whose turn has come, which has read it, or may have written it, for a client that
// caches. The transaction has taken effect.
func (l *LateTracking) Performed(how *Tracking, k *exec.Key, reads, writes bool) {
	if reads && !slices.Contains(l.keys, k) {
		l.keys = append(l.keys, k)
	}
	if !writes || !k.Changed || how.NoLoop {
		return
	}
	at := slices.Index(l.keys, k)
	switch {
	case at >= 0:
		l.keys = slices.Delete(l.keys, at, at+1)
		l.told = append(l.told, []byte(k.Name))
	// Prefixes that it had when it began have been told of all that the transaction wrote.
	case how.follows(k.Name) && !l.Began.follows(k.Name):
		l.prefixed = append(l.prefixed, []byte(k.Name))
	}
}

// IsEmpty reports whether there is nothing to enter, nor to tell.
func (l *LateTracking) IsEmpty() bool { return len(l.keys)+len(l.told)+len(l.prefixed) == 0 }

// EnterLate enters the keys, and tells the client of its own writes, when the transaction's replies have been written.
// It returns the keys whose versions must be looked at again.
func (t *Tracked) EnterLate(box *Outbox, l *Listener, late *LateTracking) []exec.KeyName {
	t.mu.Lock()
	for _, name := range late.told {
		t.tellLocked(box, l, name)
	}
	if len(late.prefixed) > 0 {
		slices.SortFunc(late.prefixed, bytes.Compare)
		t.tellLocked(box, l, slices.CompactFunc(late.prefixed, bytes.Equal)...)
	}
	t.mu.Unlock()
	names := make([]exec.KeyName, len(late.keys))
	for i, k := range late.keys {
		version := k.Version
		if !k.Present {
			version = 0
		}
		t.Enter(box, l, k.DB, []byte(k.Name))
		t.SetVersion(box, l, k.DB, []byte(k.Name), version)
		names[i] = k.KeyName
	}
	return names
}
