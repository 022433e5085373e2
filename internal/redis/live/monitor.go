package live

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// MaxShown bounds the line that MONITOR has of a command, in bytes of arguments: what is longer is cut.
const MaxShown = 1 << 20

// Monitors are the clients that MONITOR. Their unread lines are bounded as messages of publish/subscribe are. Its
// methods may be called concurrently. Lock order: Monitors before an output. The zero value has none.
type Monitors struct {
	mu struct {
		sync.Mutex
		all  map[*Listener]struct{}
		line []byte // of one command at a time, so that the lines of many long ones take no memory
	}
}

// Add adds a client. It calls begun before anybody else can add or remove one; begun must not wait.
func (m *Monitors) Add(l *Listener, begun func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.all == nil {
		m.mu.all = make(map[*Listener]struct{})
	}
	m.mu.all[l] = struct{}{}
	begun()
}

// Remove removes a client. If it was the last one it calls none before anybody else can add one; none must not wait.
func (m *Monitors) Remove(l *Listener, none func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.mu.all, l)
	if len(m.mu.all) == 0 {
		none()
	}
}

// Count is how many there are.
func (m *Monitors) Count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.mu.all)
}

// Each calls f for each of them. f must not wait, nor call the Monitors.
func (m *Monitors) Each(f func(l *Listener)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for l := range m.mu.all {
		f(l)
	}
}

// Show gives them what lines appends to a buffer, which is theirs then. It goes out with the box's flush.
// lines is called with the lock held, and must not wait. Lines of several clients are in the order in which they came
// here. That is about the order in which the commands took effect, and need not be it.
func (m *Monitors) Show(box *Outbox, lines func(b []byte) []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := lines(m.mu.line[:0])
	for l := range m.mu.all {
		l.Output().Push(box, all)
	}
	if cap(all) <= keepForm {
		m.mu.line = all
	}
}

// AppendCommand appends the line for a command of n arguments; passwords are left out. args are the first of them.
// The form is Redis's: +<seconds>.<microseconds> [<database> <address>] "<argument>" ... It is a simple string of RESP,
// so no byte of an argument may be a line's end: appendRepr sees to that.
func AppendCommand(b []byte, from string, cmd *spec.Command, args [][]byte, n, db int) []byte {
	now := time.Now()
	b = fmt.Appendf(b, "+%d.%06d [%d %s]", now.Unix(), now.Nanosecond()/1000, db, from)
	room := MaxShown
	for i, a := range args {
		if room <= 0 {
			b = fmt.Appendf(b, ` "... (%d more arguments)"`, n-i)
			break
		}
		b = append(b, ' ')
		switch rest := len(a) - room; {
		case cmd.Secret.Hides(args, i, values.Fold):
			b = append(b, `"(redacted)"`...)
		case rest > 0:
			b = appendRepr(b, a[:room])
			b = append(strconv.AppendInt(append(b[:len(b)-1], "... ("...), int64(rest), 10), ` more bytes)"`...)
		default:
			b = appendRepr(b, a)
		}
		room -= len(a) + len(` ""`)
	}
	return append(b, "\r\n"...)
}

// appendRepr appends a string as Redis's sdscatrepr has it.
// A byte becomes four at most.
func appendRepr(b, s []byte) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for _, c := range s {
		switch {
		case c == '\\' || c == '"':
			b = append(b, '\\', c)
		case c == '\n':
			b = append(b, `\n`...)
		case c == '\r':
			b = append(b, `\r`...)
		case c == '\t':
			b = append(b, `\t`...)
		case c == '\a':
			b = append(b, `\a`...)
		case c == '\b':
			b = append(b, `\b`...)
		case c < ' ' || c > '~':
			b = append(b, '\\', 'x', hex[c>>4], hex[c&15])
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
