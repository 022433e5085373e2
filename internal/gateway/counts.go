package gateway

import (
	"bytes"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// INFO's counters are Prometheus's, which only grow. So CONFIG RESETSTAT notes what they were, and INFO shows the
// differences.

// tally is what the counters of a Gateway were at some time.
type tally struct {
	commands            []commandTally // by command.id
	hits, misses        uint64
	read, written       uint64
	accepted, refused   uint64
	authFails           uint64
	denied              [acl.DeniedAuth + 1]uint64
	expired, evicted    uint64 // by the clients of the databases
	errors              map[string]uint64
	errorReplies, batch uint64
}

// commandTally is of one command. calls are without those that were rejected before they began.
type commandTally struct {
	calls, failed, rejected, nanos uint64
	buckets                        [timeBuckets + 1]uint64
}

// infoCounts are the errors that clients were answered with, and what CONFIG RESETSTAT has set INFO back to.
type infoCounts struct {
	replies atomic.Uint64 // errors

	mu     sync.Mutex
	errors map[string]uint64 // by their first word
	base   tally
}

// maxErrorClasses bounds the first words that are counted, since scripts choose them, and errorClassLen the length of
// one, as Redis does.
const maxErrorClasses, errorClassLen = 128, 32

// noteError counts an error by its first word; text has no dash.
func (c *infoCounts) noteError(text []byte) {
	c.replies.Add(1)
	class := []byte("ERR")
	if i := bytes.IndexByte(text[:min(len(text), errorClassLen)], ' '); i > 0 {
		class = text[:i]
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.errors == nil {
		c.errors = make(map[string]uint64)
	}
	if _, ok := c.errors[string(class)]; ok || len(c.errors) < maxErrorClasses {
		c.errors[string(class)]++
	}
}

// noteErrors counts the errors of a reply that begins at byte start of w: n of them, nested ones too. Errors that have
// been sent already cannot be looked at, and count as ERR.
func (g *Gateway) noteErrors(w *resp.Writer, start, n int) {
	reply := w.Bytes()[min(start, w.Len()):]
	for range n {
		text, rest := nextError(reply)
		g.counts.noteError(text)
		reply = rest
	}
}

// nextError finds the first error in a reply, skipping what is in strings of a length that is told, and what is behind
// it.
func nextError(reply []byte) (text, rest []byte) {
	for len(reply) > 0 {
		line, behind, _ := bytes.Cut(reply, []byte("\r\n"))
		if len(line) == 0 {
			reply = behind
			continue
		}
		switch line[0] {
		case '-':
			return line[1:], behind
		case '$', '=', '!':
			if n, err := strconv.Atoi(string(line[1:])); err == nil && n >= 0 {
				behind = behind[min(n+2, len(behind)):]
			}
		}
		reply = behind
	}
	return nil, nil
}

// tally reads the counters, one after the other while they change.
func (g *Gateway) tally() (t tally) {
	t.commands = make([]commandTally, len(commandsByID))
	for i := range g.m.commands {
		s, c := &g.m.commands[i], &t.commands[i]
		c.rejected = s.rejected.Load()
		c.failed = s.failed.Load()
		c.calls = s.ok.Load() + c.failed
		c.calls -= min(c.rejected, c.calls)
		c.failed -= min(c.rejected, c.failed)
		c.nanos = s.nanos.Load()
		for j := range s.buckets {
			c.buckets[j] = s.buckets[j].Load()
		}
	}
	t.hits, t.misses, t.read, t.written = g.m.hits.Load(), g.m.misses.Load(), g.m.read.Load(), g.m.written.Load()
	t.refused = g.srv.Refused()
	t.accepted, t.authFails, t.batch = g.srv.Accepted()+t.refused, g.m.authFails.Load(), g.m.batches.Load()
	for i := range t.denied {
		t.denied[i] = g.m.denied[i].Load()
	}
	for _, n := range g.namespaces() {
		if s, ok := n.api.(statser); ok {
			st := s.Stats()
			t.expired += st.Expired
			t.evicted += st.Evicted
		}
	}
	t.errorReplies = g.counts.replies.Load()
	g.counts.mu.Lock()
	t.errors = maps.Clone(g.counts.errors)
	g.counts.mu.Unlock()
	return t
}

// since is what has been counted since CONFIG RESETSTAT, or since the start.
func (g *Gateway) since() tally {
	t := g.tally()
	g.counts.mu.Lock()
	b := g.counts.base
	g.counts.mu.Unlock()
	for i := range b.commands {
		c, o := &t.commands[i], &b.commands[i]
		take(&c.calls, o.calls)
		take(&c.failed, o.failed)
		take(&c.rejected, o.rejected)
		take(&c.nanos, o.nanos)
		for j := range c.buckets {
			take(&c.buckets[j], o.buckets[j])
		}
	}
	for i := range t.denied {
		take(&t.denied[i], b.denied[i])
	}
	for class, n := range b.errors {
		if t.errors[class] -= min(n, t.errors[class]); t.errors[class] == 0 {
			delete(t.errors, class)
		}
	}
	for _, x := range []struct {
		at   *uint64
		base uint64
	}{{&t.hits, b.hits}, {&t.misses, b.misses}, {&t.read, b.read}, {&t.written, b.written}, {&t.accepted, b.accepted},
		{&t.refused, b.refused},
		{&t.authFails, b.authFails}, {&t.expired, b.expired}, {&t.evicted, b.evicted},
		{&t.errorReplies, b.errorReplies}, {&t.batch, b.batch}} {
		take(x.at, x.base)
	}
	return t
}

// take subtracts, and stops at 0: counters are not read at one time.
func take(n *uint64, by uint64) { *n -= min(by, *n) }

func (t *tally) total() (calls uint64) {
	for i := range t.commands {
		calls += t.commands[i].calls
	}
	return calls
}

// resetCounts is CONFIG RESETSTAT.
func (g *Gateway) resetCounts() {
	t := g.tally()
	g.counts.mu.Lock()
	defer g.counts.mu.Unlock()
	g.counts.base = t
}

// percentile is the time in µs that so many percent of the calls took no longer than, with what is inside a bucket
// spread evenly over it.
func (c *commandTally) percentile(p float64) float64 {
	var n uint64
	for _, k := range c.buckets {
		n += k
	}
	rank, sum := p/100*float64(n), uint64(0)
	for i, k := range c.buckets {
		if k == 0 || float64(sum+k) < rank {
			sum += k
			continue
		}
		from, to := 0.0, float64(uint64(1)<<i)
		if i > 0 {
			from = to / 2
		}
		return from + (to-from)*max(0, rank-float64(sum))/float64(k)
	}
	return 0
}

// unsafeInInfo are the bytes that Redis does not print in a field of INFO.
var unsafeInInfo = strings.NewReplacer("#", "_", ":", "_", "\n", "_", "\r", "_")

// cmdConfigResetStat sets back what INFO shows. Counters that Prometheus reads go on.
func cmdConfigResetStat(c *conn, w *resp.Writer, _ [][]byte) error {
	c.g.resetCounts()
	w.OK()
	return nil
}
