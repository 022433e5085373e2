package acl

import (
	"sync"
	"time"
)

// Event is something that was refused.
type Event struct {
	Why     Denial
	Context string // "toplevel", or "multi" between MULTI and EXEC
	Object  string // the command, the key, or AUTH
	User    string
	Client  string // the connection as CLIENT LIST has it
}

// Entry is an Event, and how often it happened of late.
type Entry struct {
	Event
	Count uint64
	At    time.Time // the last time
}

const (
	// MaxEntries is Redis's acllog-max-len by default, and maxLogged bounds what a client chose of an
	// entry, in bytes: strangers fill the log.
	MaxEntries, maxLogged = 128, 256
	// sameFor is how long an Event like one before is counted there.
	sameFor = time.Minute
	// lookBack is how many entries an Event is compared with.
	lookBack = 10
)

// Log keeps the last events. The zero value is ready.
type Log struct {
	mu struct {
		sync.Mutex
		entries []Entry // the newest first
	}
}

// Add records an event. Events that differ in the client alone are one entry, of the last of them.
func (l *Log) Add(e Event, now time.Time) {
	e.Object, e.User = e.Object[:min(len(e.Object), maxLogged)], e.User[:min(len(e.User), maxLogged)]
	entry := Entry{e, 1, now}
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.mu.entries
	at := -1
	for i := range all[:min(len(all), lookBack)] {
		x := all[i].Event
		x.Client = e.Client
		if x == e && now.Sub(all[i].At) <= sameFor {
			at, entry.Count = i, all[i].Count+1
			break
		}
	}
	if at < 0 {
		if at = len(all); at == MaxEntries {
			at--
		} else {
			all = append(all, Entry{})
		}
	}
	copy(all[1:at+1], all[:at])
	all[0] = entry
	l.mu.entries = all
}

// Newest are the last n entries, the newest first.
func (l *Log) Newest(n int) []Entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]Entry(nil), l.mu.entries[:min(max(n, 0), len(l.mu.entries))]...)
}

// Reset forgets all entries.
func (l *Log) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.entries = nil
}
