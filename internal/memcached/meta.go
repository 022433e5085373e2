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
)

// meta is a parsed meta command.
type meta struct {
	cmd    command
	key    []byte // as the store has it
	sent   []byte // as it was sent
	flags  string // those that the answer shows, in their order
	opaque []byte
	binary bool // b: the key was sent in base64
	quiet  bool // q
	value  bool // v
	mode   byte // M, in capitals; 0: none

	cas, hasCas bool // c: show the version; C: compare
	compare     uint64
	expires     time.Time // T
	hasTTL      bool
	vivify      *time.Time // N
	clientFlags uint32     // F
	delta       uint64     // D, else 1
	initial     uint64     // J
}

// The flags that each command knows. Others are refused, since we could not do them right.
const (
	mgFlags = "bcfkOqstvT"
	msFlags = "bcCFkMNOqsT"
	mdFlags = "bCkOq"
	maFlags = "bcCDJkMNOqtTv"
)

var (
	badFlag      = reply{"CLIENT_ERROR invalid flag", resBad}
	badDuplicate = reply{"CLIENT_ERROR duplicate flag", resBad}
	badToken     = reply{"CLIENT_ERROR bad token in command line format", resBad}
	badEither    = reply{"CLIENT_ERROR invalid or duplicate flag", resBad} // what md and ma say
	badKey64     = reply{"CLIENT_ERROR error decoding key", resBad}
	badOpaque    = reply{"CLIENT_ERROR opaque token too long", resBad}
	badModeLen   = reply{"CLIENT_ERROR incorrect length for M token", resBad}
	badMsMode    = reply{"CLIENT_ERROR invalid mode for ms M token", resBad}
	badMaMode    = reply{"CLIENT_ERROR invalid mode for ma M token", resBad}
)

// parseMeta reads the flags of a command for the key sent. r is the answer to a bad
// one. The result outlives the line.
func (c *conn) parseMeta(cmd command, sent []byte, flags [][]byte, known string) (m *meta, r reply) {
	m = &meta{cmd: cmd, sent: bytes.Clone(sent), delta: 1}
	badFlag, badDuplicate, badToken := badFlag, badDuplicate, badToken
	if cmd == cmdMd || cmd == cmdMa {
		badFlag, badDuplicate, badToken = badEither, badEither, badEither
	}
	var seen [128]bool
	for _, f := range flags {
		b, token := f[0], string(f[1:])
		switch {
		case strings.IndexByte(known, b) < 0:
			return m, badFlag
		case seen[b]:
			return m, badDuplicate
		}
		seen[b] = true
		var err error
		good := true
		switch b {
		case 'b':
			m.binary = true
		case 'q':
			m.quiet = true
		case 'v':
			m.value = true
		case 'c':
			m.cas = true
		case 'O':
			if len(token) > maxOpaque {
				return m, badOpaque
			}
			m.opaque = []byte(token)
		case 'C':
			m.hasCas = true
			m.compare, err = strconv.ParseUint(token, 10, 64)
		case 'D':
			m.delta, err = strconv.ParseUint(token, 10, 64)
		case 'J':
			m.initial, err = strconv.ParseUint(token, 10, 64)
		case 'F':
			var n uint64
			n, err = strconv.ParseUint(token, 10, 32)
			m.clientFlags = uint32(n)
		case 'T':
			m.hasTTL = true
			m.expires, good = c.expiry([]byte(token))
		case 'N':
			m.vivify = new(time.Time)
			*m.vivify, good = c.expiry([]byte(token))
		case 'M':
			if len(token) != 1 {
				return m, badModeLen
			}
			m.mode = token[0]
			if 'a' <= m.mode && m.mode <= 'z' {
				m.mode -= 'a' - 'A'
			}
		}
		if err != nil || !good {
			return m, badToken
		}
		if strings.IndexByte("cfkOst", b) >= 0 {
			m.flags += string(f[:1])
		}
	}
	m.key = m.sent
	if m.binary {
		key := make([]byte, base64.StdEncoding.DecodedLen(len(sent)))
		n, err := base64.StdEncoding.Strict().Decode(key, sent)
		if err != nil || n == 0 || n > maxKeyLen {
			return m, badKey64
		}
		m.key = key[:n]
	} else if !goodKey(sent) {
		return m, badFormat
	}
	return m, reply{}
}

// metaCommand performs a meta command. An error ends the connection.
func (c *conn) metaCommand(cmd command, toks [][]byte, began time.Time) error {
	if cmd == cmdMg && len(toks) > 1 && len(toks[1]) <= maxKeyLen {
		m, r := c.parseMeta(cmd, toks[1], toks[2:], mgFlags)
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
	c.s.stats.done(cmd, r.res, began)
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
	}
	switch cmd {
	case cmdMs:
		return c.metaSet(toks)
	case cmdMg:
		return c.metaTouch(toks), nil
	case cmdMd:
		return c.metaDelete(toks), nil
	case cmdMa:
		return c.metaArithmetic(toks), nil
	}
	return c.metaDebug(toks), nil
}

// head writes a code and the flags that the command wants back; it may be nil if
// there is no item.
func (c *conn) head(m *meta, code string, it *client.Item) {
	c.out().WriteString(code)
	for _, f := range []byte(m.flags) {
		if it == nil && f != 'O' && f != 'k' {
			continue
		}
		c.out().WriteByte(' ')
		c.out().WriteByte(f)
		switch f {
		case 'O':
			c.out().Write(m.opaque)
		case 'k':
			c.out().Write(m.sent)
			if m.binary {
				c.out().WriteString(" b")
			}
		case 'c':
			c.out().Write(strconv.AppendUint(c.num[:0], it.Version, 10))
		case 'f':
			c.out().Write(strconv.AppendUint(c.num[:0], uint64(it.Flags), 10))
		case 's':
			c.out().Write(strconv.AppendInt(c.num[:0], int64(len(it.Value)), 10))
		case 't':
			c.out().Write(strconv.AppendInt(c.num[:0], c.secondsLeft(it.Expires), 10))
		}
	}
	c.out().WriteString("\r\n")
}

// secondsLeft is -1 for what does not expire.
func (c *conn) secondsLeft(t time.Time) int64 {
	if t.IsZero() {
		return -1
	}
	return max(0, int64((t.Sub(c.s.o.Now())+time.Second-1)/time.Second))
}

// item answers with an item, its value if that is wanted.
func (c *conn) item(m *meta, it *client.Item) {
	if !m.value {
		c.head(m, "HD", it)
		return
	}
	c.out().WriteString("VA ")
	c.head(m, strconv.Itoa(len(it.Value)), it)
	c.out().Write(it.Value)
	c.out().WriteString("\r\n")
}

// metaEnd answers a command that showed no item. Quiet commands leave out HD,
// and HD alone.
func (c *conn) metaEnd(m *meta, it *client.Item, err error) reply {
	var code string
	var res result
	switch {
	case err == nil:
		if !m.quiet {
			c.head(m, "HD", it)
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
	c.head(m, code, nil)
	return reply{"", res}
}

// metaGot answers a mg.
func (c *conn) metaGot(m *meta, it *client.Item, err error) result {
	switch {
	case err == nil:
		c.item(m, it)
	case errors.Is(err, client.ErrNotFound):
		if !m.quiet {
			c.head(m, "EN", nil)
		}
		return resMiss
	default:
		r := c.trouble(err)
		c.say(r)
		return r.res
	}
	return resOK
}

// metaTouch is a mg that changes the expiry, or has bad flags.
func (c *conn) metaTouch(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMg, toks[1], toks[2:], mgFlags)
	if r.text != "" {
		return r
	}
	var it client.Item
	version, give, err := c.touch(m.key, m.expires, &it)
	defer give()
	it.Version = version
	c.found(err)
	return reply{"", c.metaGot(m, &it, err)}
}

func (c *conn) metaSet(toks [][]byte) (reply, error) {
	n, okLen := valueLen(toks[2])
	if !okLen {
		return badFormat, nil
	}
	m, r := c.parseMeta(cmdMs, toks[1], toks[3:], msFlags)
	op := client.Op{Kind: client.OpPut, Key: m.key, Expires: m.expires, Flags: m.clientFlags}
	if m.hasCas {
		op.Cond, op.Version = client.IfVersion, m.compare
	}
	switch m.mode {
	case 0, 'S', 'A', 'P':
	case 'E', 'R':
		if m.hasCas {
			r = badFlag // one condition at a time
		} else if op.Cond = client.IfAbsent; m.mode == 'R' {
			op.Cond = client.IfPresent
		}
	default:
		r = badMsMode
	}
	if r.text == "" && n > c.s.o.MaxValueBytes {
		r = tooLarge
	}
	if r.text != "" {
		// The line is understood so far that the value can be passed over.
		return r, c.skipValue(n)
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
	if m.mode == 'A' || m.mode == 'P' {
		c.join(&op, m.mode == 'A', m.vivify)
	}
	version, err := c.write(op)
	it := client.Item{Value: value, Version: version, Flags: op.Flags, Expires: op.Expires}
	return c.metaEnd(m, &it, err), nil
}

func (c *conn) metaDelete(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMd, toks[1], toks[2:], mdFlags)
	if r.text != "" {
		return r
	}
	if m.hasCas {
		give, err := c.do(0, func(ctx context.Context) error { return c.s.o.Client.DeleteVersion(ctx, m.key, m.compare) })
		give()
		return c.metaEnd(m, nil, err)
	}
	return c.metaEnd(m, nil, c.remove(m.key))
}

func (c *conn) metaArithmetic(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMa, toks[1], toks[2:], maFlags)
	if r.text != "" {
		return r
	}
	down := m.mode == 'D' || m.mode == '-'
	if !down && m.mode != 0 && m.mode != 'I' && m.mode != '+' {
		return badMaMode
	}
	var it client.Item
	version, give, err := c.update(m.key, func(cur client.Item, present bool) (client.Change, error) {
		n, err := m.initial, error(nil)
		switch {
		case !present && m.vivify == nil:
			return client.Change{}, client.ErrNotFound
		case !present:
			it = client.Item{Expires: *m.vivify}
		case m.hasCas && cur.Version != m.compare:
			return client.Change{}, client.ErrConflict
		default:
			it = client.Item{Expires: cur.Expires, Flags: cur.Flags}
			n, err = number(cur.Value, m.delta, down)
		}
		if m.hasTTL && present {
			it.Expires = m.expires
		}
		it.Value = strconv.AppendUint(nil, n, 10)
		return client.Change{Value: it.Value, Expires: it.Expires, Flags: it.Flags}, err
	})
	give()
	it.Version = version
	if err == nil && m.value && !m.quiet {
		c.item(m, &it)
		return said
	}
	return c.metaEnd(m, &it, err)
}

// metaDebug says what there is to say of an item.
func (c *conn) metaDebug(toks [][]byte) reply {
	m, r := c.parseMeta(cmdMe, toks[1], toks[2:], "b")
	if r.text != "" {
		return r
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
	return reply{fmt.Sprintf("ME %s exp=%d cas=%d size=%d", m.sent, c.secondsLeft(it.Expires), it.Version, len(it.Value)), resOK}
}
