package lead

import (
	"time"

	"github.com/kvd-project/kvd/server/fsm"
)

// troubleTime is how long the word of a memory node's keeper counts that no process of it comes up. Keepers repeat it
// more often.
const troubleTime = time.Minute

// trouble is what a memory node's keeper said last.
type trouble struct {
	text string
	at   time.Duration
}

// Troubled notes why no process of a memory node comes up, until one is heard. The next leader does not know of it.
func (l *Leader) Troubled(id uint32, text string, now time.Duration) {
	l.troubles[id] = trouble{text, now}
}

// Trouble is why no process of a memory node comes up; "" if nobody has said so lately.
func (l *Leader) Trouble(id uint32, now time.Duration) string {
	if t, ok := l.troubles[id]; ok && now < t.at+troubleTime {
		return t.text
	}
	return ""
}

// forgetTroubles drops those of memory nodes that are gone, and those that are old.
func (l *Leader) forgetTroubles(s *fsm.State, now time.Duration) {
	for id := range l.troubles {
		if s.Node(id) == nil || l.Trouble(id, now) == "" {
			delete(l.troubles, id)
		}
	}
	for id := range l.stays {
		if s.Node(id) == nil {
			delete(l.stays, id)
		}
	}
}
