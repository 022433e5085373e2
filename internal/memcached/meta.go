package memcached

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// meta is a parsed meta command.
type meta struct {
	cmd    command
	key    []byte // as the store has it
	sent   []byte // as it was sent
	flags  string // those of metaOrdered, in their order
	opaque []byte
	binary bool // b: the key was sent in base64
	quiet  bool // q
	value  bool // v
	noBump bool // u
	access bool // h or l
	mode   byte // M; 0: none

	hasCas      bool // C
	compare     uint64
	invalidate  bool      // I
	expires     time.Time // T
	hasTTL      bool
	vivify      *time.Time // N
	recache     time.Time  // R; zero: none
	clientFlags uint32     // F
	delta       uint64     // D, else 1
	initial     uint64     // J
}

const (
	// metaFlags are those that some meta command knows. Every one takes all of them, and leaves alone those that are
	// not its own; P and L are for proxies.
	metaFlags = "bcfhklqstuvCDFIJLMNOPRT"
	// metaOrdered are those that an answer shows, and those that change what is shown behind them.
	metaOrdered = "cfhklstONRT"
	// maxMetaTokens is how many words a meta command has.
	maxMetaTokens = 19
)

var (
	badFlag      = reply{"CLIENT_ERROR invalid flag", resBad}
	badDuplicate = reply{"CLIENT_ERROR duplicate flag", resBad}
	badToken     = reply{"CLIENT_ERROR bad token in command line format", resBad}
	badEither    = reply{"CLIENT_ERROR invalid or duplicate flag", resBad} // what md and ma say of whatever is wrong
	badKey64     = reply{"CLIENT_ERROR error decoding key", resBad}
	badOwnKey    = reply{"CLIENT_ERROR " + ownKey, resBad}
	badOpaque    = reply{"CLIENT_ERROR opaque token too long", resBad}
	badModeLen   = reply{"CLIENT_ERROR incorrect length for M token", resBad}
	badDeltaMeta = reply{"CLIENT_ERROR invalid numeric delta value", resBad}
	badInitial   = reply{"CLIENT_ERROR invalid numeric initial value", resBad}
	badMsMode    = reply{"CLIENT_ERROR invalid mode for ms M token", resBad}
	badMaMode    = reply{"CLIENT_ERROR invalid mode for ma M token", resBad}
	badMgCount   = reply{"CLIENT_ERROR options flags are too long", resBad}
	badCount     = reply{"CLIENT_ERROR options flags too long", resBad}
)

// parseMeta reads the flags of a command for the key sent. r is the answer to a bad
// one. The result outlives the line.
func (c *conn) parseMeta(cmd command, sent []byte, flags [][]byte) (m *meta, r reply) {
	m = &meta{cmd: cmd, sent: bytes.Clone(sent), delta: 1}
	m.key = m.sent
	var seen [127]bool
	for _, f := range flags {
		b := f[0]
		switch {
		case int(b) >= len(seen) || seen[b]:
			return m, m.bad(badDuplicate)
		case strings.IndexByte(metaFlags, b) < 0:
			return m, m.bad(badFlag)
		}
		seen[b] = true
		// Of several faults memcached names the last, but for an unknown or repeated flag.
		if x := c.metaFlag(m, b, f[1:]); x.text != "" {
			r = x
		}
		if strings.IndexByte(metaOrdered, b) >= 0 {
			m.flags += string(f[:1])
		}
	}
	switch {
	case r.text != "":
		return m, m.bad(r)
	case len(m.opaque) >= maxOpaque:
		return m, badOpaque
	case !m.binary && !goodKey(sent):
		return m, badFormat
	case inside.IsOwn(m.key):
		return m, badOwnKey
	}
	return m, reply{}
}

// bad is the answer to faulty flags: md and ma do not tell faults apart.
func (m *meta) bad(r reply) reply {
	if m.cmd == cmdMd || m.cmd == cmdMa {
		return badEither
	}
	return r
}

// metaFlag reads one flag. The reply says what is wrong with it.
func (c *conn) metaFlag(m *meta, b byte, token []byte) (bad reply) {
	var err error
	good := true
	switch b {
	case 'b':
		key := make([]byte, base64.StdEncoding.DecodedLen(len(m.sent)))
		n, err := base64.StdEncoding.Decode(key, m.sent)
		if err != nil || n == 0 || n > maxKeyLen {
			return badKey64
		}
		m.binary, m.key = true, key[:n]
	case 'q':
		m.quiet = true
	case 'v':
		m.value = true
	case 'u':
		m.noBump = true
	case 'h', 'l':
		m.access = true
	case 'I':
		m.invalidate = true
	case 'O':
		m.opaque = bytes.Clone(token)
	case 'C':
		m.hasCas = true
		m.compare, err = strconv.ParseUint(string(token), 10, 64)
	case 'D':
		if m.delta, err = strconv.ParseUint(string(token), 10, 64); err != nil {
			return badDeltaMeta
		}
	case 'J':
		if m.initial, err = strconv.ParseUint(string(token), 10, 64); err != nil {
			return badInitial
		}
	case 'F':
		n, err := strconv.ParseUint(string(token), 10, 32)
		if err != nil {
			return badFormat
		}
		m.clientFlags = uint32(n)
	case 'T':
		m.hasTTL = true
		m.expires, good = c.expiry(token)
	case 'N':
		m.vivify = new(time.Time)
		*m.vivify, good = c.expiry(token)
	case 'R':
		m.recache, good = c.expiry(token)
	case 'M':
		if len(token) != 1 {
			return badModeLen
		}
		m.mode = token[0]
	}
	if err != nil || !good {
		return badToken
	}
	return reply{}
}

// metaCommand performs a meta command. An error ends the connection.
func (c *conn) metaCommand(cmd command, toks [][]byte, began time.Time) error {
	if cmd == cmdMg && len(toks) > 1 && len(toks) <= maxMetaTokens && len(toks[1]) <= maxKeyLen {
		m, r := c.parseMeta(cmd, toks[1], toks[2:])
		if r.text == "" && !m.hasTTL {
			c.queue(m.key, lookup{cmd: cmd, began: began, meta: m})
			return nil
		}
	}
	c.performLookups()
	r, err := c.metaNow(cmd, toks)
	if err != nil {
		return err
	}
	if r.text != "" {
		c.say(r)
	}
	c.done(cmd, r.res, began)
	return nil
}

func (c *conn) metaNow(cmd command, toks [][]byte) (reply, error) {
	switch {
	case cmd == cmdMn:
		return reply{"MN", resOK}, nil
	case len(toks) < 2 && cmd == cmdMe:
		return badFormat, nil
	case len(toks) < 2:
		return badCommand, nil
	case len(toks[1]) > maxKeyLen, cmd == cmdMs && len(toks) < 3:
		return badFormat, nil
	case len(toks) > maxMetaTokens && cmd == cmdMg:
		return badMgCount, nil
	case len(toks) > maxMetaTokens && cmd != cmdMe:
		return badCount, nil
	}
	switch cmd {
	case cmdMs:
		return c.metaSet(toks)
	case cmdMg:
		m, r := c.parseMeta(cmdMg, toks[1], toks[2:])
		if r.text != "" {
			return r, nil
		}
		return reply{"", c.metaVisit(m)}, nil
	case cmdMd:
		return c.metaDelete(toks), nil
	case cmdMa:
		return c.metaArithmetic(toks), nil
	}
	return c.metaDebug(toks), nil
}

// metaToken writes the flag f of an answer with its token, if it has one that it needs no item for.
func (c *conn) metaToken(m *meta, f byte) bool {
	switch f {
	case 'O':
		c.out().WriteString(" O")
		c.out().Write(m.opaque)
	case 'k':
		c.out().WriteString(" k")
		c.out().Write(m.sent)
		if m.binary {
			c.out().WriteString(" b")
		}
	default:
		return false
	}
	return true
}

// metaHead writes a code, and what shows of the flags without an item.
func (c *conn) metaHead(m *meta, code string) {
	c.out().WriteString(code)
	for _, f := range []byte(m.flags) {
		c.metaToken(m, f)
	}
	c.out().WriteString("\r\n")
}

// flag writes f and a number.
func (c *conn) flag(f byte, n int64) {
	c.out().Write(strconv.AppendInt(append(c.num[:0], ' ', f), n, 10))
}

// metaItem answers with the item that a mg or ma leaves, whose expiry was v.item.Expires before, and its value if that
// is wanted.
func (c *conn) metaItem(m *meta, v *visit, value []byte, version uint64) {
	if m.value {
		c.out().WriteString("VA ")
		c.out().Write(strconv.AppendInt(c.num[:0], int64(len(value)), 10))
	} else {
		c.out().WriteString("HD")
	}
	now, expires := c.s.o.Now(), v.item.Expires
	for _, f := range []byte(m.flags) {
		if c.metaToken(m, f) {
			continue
		}
		switch f {
		case 'T':
			expires = m.expires
		case 'N':
			if v.created {
				expires = *m.vivify
			}
		case 't':
			c.flag(f, c.secondsLeft(expires))
		case 'c':
			c.out().Write(strconv.AppendUint(append(c.num[:0], " c"...), version, 10))
		}
		if m.cmd != cmdMg {
			continue // ma shows no more
		}
		switch f {
		case 's':
			c.flag(f, int64(len(value)))
		case 'f':
			c.flag(f, int64(v.item.Flags))
		case 'h':
			c.flag(f, int64(note(v.item.Note)&noteHit/noteHit))
		case 'l':
			c.flag(f, note(v.item.Note).sinceAccess(now.Unix()))
		}
	}
	if m.cmd == cmdMg {
		if note(v.item.Note)&noteWon != 0 {
			c.out().WriteString(" Z")
		}
		if v.note&noteStale != 0 {
			c.out().WriteString(" X")
		}
		if v.won {
			c.out().WriteString(" W")
		}
	}
	c.out().WriteString("\r\n")
	if m.value {
		c.out().Write(value)
		c.out().WriteString("\r\n")
	}
}

// secondsLeft is -1 for what does not expire.
func (c *conn) secondsLeft(t time.Time) int64 {
	if t.IsZero() {
		return -1
	}
	return max(0, int64((t.Sub(c.s.o.Now())+time.Second-1)/time.Second))
}

// metaEnd answers a command that showed no item. Quiet commands leave out HD,
// and HD alone.
func (c *conn) metaEnd(m *meta, err error) reply {
	var code string
	var res result
	switch {
	case err == nil:
		if !m.quiet {
			c.metaHead(m, "HD")
		}
		return said
	case errors.Is(err, client.ErrNotFound):
		code, res = "NF", resMiss
		if m.cmd == cmdMs && (!m.hasCas || m.mode == 'A' || m.mode == 'P') {
			code = "NS"
		}
	case errors.Is(err, client.ErrExists):
		code, res = "NS", resRefused
	case errors.Is(err, client.ErrConflict):
		code, res = "EX", resRefused
	default:
		return c.trouble(err)
	}
	c.metaSaid(m, code, 0)
	return reply{"", res}
}

// metaSaid is metaHead with the version that a ms left, 0 if it left none.
func (c *conn) metaSaid(m *meta, code string, version uint64) {
	c.out().WriteString(code)
	for _, f := range []byte(m.flags) {
		if !c.metaToken(m, f) && f == 'c' && m.cmd == cmdMs {
			c.out().Write(strconv.AppendUint(append(c.num[:0], " c"...), version, 10))
		}
	}
	c.out().WriteString("\r\n")
}

// metaGot answers a mg that has been looked up. It has to write if it wins an item, vivifies one or notes an access.
func (c *conn) metaGot(m *meta, it *client.Item, err error) result {
	if err == nil || errors.Is(err, client.ErrNotFound) {
		v, none := m.visitItem(c.s.o.Now(), *it, err == nil)
		if none == nil && v.writes {
			return c.metaVisit(m)
		} else if none == nil {
			c.metaItem(m, &v, it.Value, it.Version)
			return resOK
		}
	}
	return c.metaMissed(m, err)
}

// metaMissed answers a mg that failed, or found nothing.
func (c *conn) metaMissed(m *meta, err error) result {
	if errors.Is(err, client.ErrNotFound) {
		if !m.quiet {
			c.metaHead(m, "EN")
		}
		return resMiss
	}
	r := c.trouble(err)
	c.say(r)
	return r.res
}

// errUnchanged ends an update that has nothing to write.
var errUnchanged = errors.New("unchanged")

// metaVisit performs a mg that may write, and answers it.
func (c *conn) metaVisit(m *meta) result {
	var v visit
	var value []byte
	version, give, err := c.update(m.key, func(cur client.Item, present bool) (_ client.Change, err error) {
		if v, err = m.visitItem(c.s.o.Now(), cur, present); err != nil {
			return client.Change{}, err
		}
		value = append(value[:0], cur.Value...)
		if !v.writes {
			return client.Change{}, errUnchanged
		}
		return client.Change{Value: cur.Value, Expires: v.expires, Flags: cur.Flags, Note: uint64(v.note)}, nil
	})
	defer give()
	if errors.Is(err, errUnchanged) {
		version, err = v.item.Version, nil
	}
	if m.hasTTL {
		c.found(err) // others have been counted when they were looked up
	}
	if err != nil {
		return c.metaMissed(m, err)
	}
	c.metaItem(m, &v, value, version)
	return resOK
}

func (c *conn) metaSet(toks [][]byte) (reply, error) {
	n, okLen := valueLen(toks[2])
	if !okLen {
		return badFormat, nil
	}
	m, r := c.parseMeta(cmdMs, toks[1], toks[3:])
	op := client.Op{Kind: client.OpPut, Key: m.key, Expires: m.expires, Flags: m.clientFlags}
	if m.hasCas && m.mode != 'E' {
		op.Cond, op.Version = client.IfVersion, m.compare
	}
	switch m.mode {
	case 0, 'S', 'A', 'P':
	case 'E':
		op.Cond = client.IfAbsent
	case 'R':
		if !m.hasCas {
			op.Cond = client.IfPresent
		}
	default:
		if r.text == "" {
			r = badMsMode
		}
	}
	if r.text != "" {
		// The line is understood so far that the value can be passed over.
		return r, c.skipValue(n)
	}
	if n > c.s.o.MaxValueBytes {
		return c.refuseLarge(m.key, n, true)
	}
	value, whole, give, err := c.readValue(n)
	defer give()
	if err != nil {
		return c.unread(err), err
	}
	if !whole {
		return badChunk, nil
	}
	op.Value = value
	switch {
	case m.mode == 'A' || m.mode == 'P':
		c.join(&op, m.mode == 'A', m.vivify)
	case m.invalidate && op.Cond == client.IfVersion:
		putStale(&op)
	}
	version, err := c.write(op)
	if err == nil && !m.quiet {
		c.metaSaid(m, "HD", version)
		return said, nil
	}
	return c.metaEnd(m, err), nil
}

// putStale makes of op, a Put with a version, a write that also replaces a newer item: it is stale then, and expires
// when that did.
func putStale(op *client.Op) {
	put := *op
	op.Kind, op.Update = client.OpUpdate, func(cur client.Item, present bool) (client.Change, error) {
		ch := client.Change{Value: put.Value, Expires: put.Expires, Flags: put.Flags}
		switch {
		case !present:
			return ch, client.ErrNotFound
		case cur.Version < put.Version:
			return ch, client.ErrConflict
		case cur.Version > put.Version:
			ch.Expires, ch.Note = cur.Expires, uint64(noteStale|note(cur.Note)&noteWon)
		}
		return ch, nil
	}
}

func (c *conn) metaDelete(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMd, toks[1], toks[2:])
	switch {
	case r.text != "":
		return r
	case m.invalidate:
		_, give, err := c.update(m.key, func(cur client.Item, present bool) (client.Change, error) {
			ch := client.Change{Value: cur.Value, Expires: cur.Expires, Flags: cur.Flags,
				Note: uint64(note(cur.Note)&^noteWon | noteStale)}
			switch {
			case !present:
				return ch, client.ErrNotFound
			case m.hasCas && cur.Version != m.compare:
				return ch, client.ErrConflict
			case m.hasTTL:
				ch.Expires = m.expires
			}
			return ch, nil
		})
		give()
		return c.metaEnd(m, err)
	case m.hasCas:
		return c.metaEnd(m, c.removeVersion(m.key, m.compare))
	}
	return c.metaEnd(m, c.remove(m.key))
}

func (c *conn) metaArithmetic(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMa, toks[1], toks[2:])
	if r.text != "" {
		return r
	}
	down := m.mode == 'D' || m.mode == '-'
	if !down && m.mode != 0 && m.mode != 'I' && m.mode != '+' {
		return badMaMode
	}
	var v visit
	var sum []byte
	version, give, err := c.update(m.key, func(cur client.Item, present bool) (client.Change, error) {
		n, err := m.initial, error(nil)
		v = visit{item: cur, created: !present}
		ch := client.Change{Expires: cur.Expires, Flags: cur.Flags}
		switch {
		case !present && m.vivify == nil:
			return ch, client.ErrNotFound
		case !present:
		case m.hasCas && cur.Version != m.compare:
			return ch, client.ErrConflict
		default:
			n, err = number(cur.Value, m.delta, down)
		}
		for _, f := range []byte(m.flags) { // their order counts
			if f == 'T' {
				ch.Expires = m.expires
			} else if f == 'N' && !present {
				ch.Expires = *m.vivify
			}
		}
		sum = strconv.AppendUint(sum[:0], n, 10)
		ch.Value, ch.Note = sum, noteOfSum(cur, sum)
		return ch, err
	})
	give()
	if err == nil && (v.created || !m.quiet) {
		c.metaItem(m, &v, sum, version)
		return said
	}
	return c.metaEnd(m, err)
}

// metaDebug says what there is to say of an item.
func (c *conn) metaDebug(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMe, toks[1], nil)
	if r.text == "" && len(toks) > 2 && string(toks[2]) == "b" {
		r = c.metaFlag(m, 'b', nil)
	}
	if r.text != "" {
		return badFormat
	}
	var it client.Item
	give, err := c.do(0, func(ctx context.Context) (err error) {
		it, err = c.s.o.Client.Get(ctx, m.key)
		return err
	})
	defer give()
	if errors.Is(err, client.ErrNotFound) {
		return reply{"EN", resMiss}
	}
	if err != nil {
		return c.trouble(err)
	}
	n, exp, fetched := note(it.Note), int64(-1), "no"
	if !it.Expires.IsZero() {
		exp = -c.secondsLeft(it.Expires) // memcached's sign
	}
	if n&noteHit != 0 {
		fetched = "yes"
	}
	return reply{fmt.Sprintf("ME %s exp=%d la=%d cas=%d fetch=%s size=%d", m.sent, exp,
		n.sinceAccess(c.s.o.Now().Unix()), it.Version,
		fetched, len(it.Value)), resOK}
}
