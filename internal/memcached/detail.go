package memcached

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// prefixEnd ends the prefix of a key, as memcached has it by default. Keys without it are not counted by prefix.
const prefixEnd = ':'

// maxPrefixes bounds the prefixes that are counted, since clients name them. The uses of further ones are not counted.
const maxPrefixes = 10_000

// usageText is memcached's answer to a `stats detail` that it does not understand.
const usageText = "CLIENT_ERROR usage: stats detail on|off|dump"

// prefixes are what `stats detail` counts. As in memcached, only what the words get, gat, delete and those that send a
// value do, and their like of the binary protocol, which has touch among them: neither incr nor meta commands.
type prefixes struct {
	on atomic.Bool
	mu sync.Mutex
	by map[string]*prefixUses
}

// prefixUses is how often keys of a prefix were used.
type prefixUses struct{ gets, hits, sets, deletes uint64 }

// noteUse counts a use of key, if anybody wants to know.
func (p *prefixes) noteUse(key []byte, count func(*prefixUses)) {
	if !p.on.Load() {
		return
	}
	prefix, _, ok := bytes.Cut(key, []byte{prefixEnd})
	if !ok || len(prefix) > 0 && !goodKey(prefix) { // what the binary protocol allows would end a line of dump
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	u := p.by[string(prefix)]
	if u == nil {
		if len(p.by) == maxPrefixes {
			return
		}
		if p.by == nil {
			p.by = make(map[string]*prefixUses)
		}
		u = new(prefixUses)
		p.by[string(prefix)] = u
	}
	count(u)
}

func (p *prefixes) noteGet(key []byte, found bool) {
	p.noteUse(key, func(u *prefixUses) {
		u.gets++
		if found {
			u.hits++
		}
	})
}

func (p *prefixes) noteSet(key []byte)    { p.noteUse(key, func(u *prefixUses) { u.sets++ }) }
func (p *prefixes) noteDelete(key []byte) { p.noteUse(key, func(u *prefixUses) { u.deletes++ }) }

// dump is what has been counted, in the order of the prefixes.
func (p *prefixes) dump() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(p.by)) {
		u := p.by[name]
		fmt.Fprintf(&b, "PREFIX %s get %d hit %d set %d del %d\r\n", name, u.gets, u.hits, u.sets, u.deletes)
	}
	return b.String() + "END\r\n"
}

// reset forgets what has been counted, and goes on counting.
func (p *prefixes) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.by = nil
}

// textDetail performs `stats detail`, of which toks has all words.
func (c *conn) textDetail(toks [][]byte) reply {
	how := ""
	if len(toks) > 2 {
		how = string(toks[2])
	}
	switch how {
	case "on", "off":
		c.s.detail.on.Store(how == "on")
		return ok
	case "dump":
		c.out().WriteString(c.s.detail.dump())
		return said
	}
	return reply{usageText, resBad}
}

// binaryDetail performs it by the words behind detail, of which memcached compares the beginning.
func (c *conn) binaryDetail(q *request, how string) result {
	switch {
	case strings.HasPrefix(how, " on"), strings.HasPrefix(how, " off"):
		c.s.detail.on.Store(strings.HasPrefix(how, " on"))
	case strings.HasPrefix(how, " dump"):
		const name = "detailed"
		text := c.s.detail.dump()
		c.head(q.op, binOK, 0, len(name), len(text), q.opaque, 0)
		c.out().WriteString(name)
		c.out().WriteString(text)
	default:
		return c.fails(q, binNotFound)
	}
	return c.ends(q, nil, 0, nil)
}
