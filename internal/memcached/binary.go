package memcached

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// The binary protocol. A connection speaks it whose first byte is binRequest.
//
//	0     1    2      4      5      6       8         12       16    24
//	+-----+----+------+------+------+-------+---------+--------+-----+--------+-----+-------+
//	|magic| op |keylen|extlen|  0   |status | bodylen | opaque | cas | extras | key | value |
//	+-----+----+------+------+------+-------+---------+--------+-----+--------+-----+-------+
//
// Numbers are big-endian. status is a response's; bodylen counts all that follows the header.
const (
	binRequest, binResponse = 0x80, 0x81
	binHeader               = 24
	maxExtras               = 20
)

// status is a response's.
type status uint16

const (
	binOK          status = 0x00
	binNotFound    status = 0x01
	binExists      status = 0x02
	binTooLarge    status = 0x03
	binInvalid     status = 0x04
	binNotStored   status = 0x05
	binNotNumeric  status = 0x06
	binAuthError   status = 0x20
	binUnknown     status = 0x81
	binOutOfMemory status = 0x82
	binInternal    status = 0x84
)

var statusText = map[status]string{binNotFound: "Not found", binExists: "Data exists for key.",
	binTooLarge: "Too large.", binInvalid: "Invalid arguments",
	binNotStored: "Not stored.", binNotNumeric: "Non-numeric server-side value for incr or decr",
	binAuthError: "Auth failure.", binUnknown: "Unknown command"}

// The opcodes that are told apart beyond their command.
const (
	opGet, opGetQ, opGetK, opGetKQ           = 0x00, 0x09, 0x0c, 0x0d
	opTouch, opGat, opGatQ, opGatK, opGatKQ  = 0x1c, 0x1d, 0x1e, 0x23, 0x24
	opSASLMechanisms, opSASLAuth, opSASLStep = 0x20, 0x21, 0x22
)

// opcode is what a request of it must look like.
type opcode struct {
	cmd    command
	known  bool
	quiet  bool // success is not answered, nor the miss of a lookup
	extras int8 // bytes; -1: none or 4
	key    int8 // 1: it has one, 0: it may have, -1: it has none
	value  bool // it may have one
}

var opcodes = [256]opcode{
	opGet: {cmdGet, true, false, 0, 1, false}, opGetQ: {cmdGet, true, true, 0, 1, false},
	opGetK: {cmdGet, true, false, 0, 1, false}, opGetKQ: {cmdGet, true, true, 0, 1, false},
	0x01: {cmdSet, true, false, 8, 1, true}, 0x11: {cmdSet, true, true, 8, 1, true},
	0x02: {cmdAdd, true, false, 8, 1, true}, 0x12: {cmdAdd, true, true, 8, 1, true},
	0x03: {cmdReplace, true, false, 8, 1, true}, 0x13: {cmdReplace, true, true, 8, 1, true},
	0x0e: {cmdAppend, true, false, 0, 1, true}, 0x19: {cmdAppend, true, true, 0, 1, true},
	0x0f: {cmdPrepend, true, false, 0, 1, true}, 0x1a: {cmdPrepend, true, true, 0, 1, true},
	0x04: {cmdDelete, true, false, 0, 1, false}, 0x14: {cmdDelete, true, true, 0, 1, false},
	0x05: {cmdIncr, true, false, 20, 1, false}, 0x15: {cmdIncr, true, true, 20, 1, false},
	0x06: {cmdDecr, true, false, 20, 1, false}, 0x16: {cmdDecr, true, true, 20, 1, false},
	0x07: {cmdQuit, true, false, 0, -1, false}, 0x17: {cmdQuit, true, true, 0, -1, false},
	0x08: {cmdFlushAll, true, false, -1, -1, false}, 0x18: {cmdFlushAll, true, true, -1, -1, false},
	0x0a: {cmdNoop, true, false, 0, -1, false}, 0x0b: {cmdVersion, true, false, 0, -1, false},
	0x10: {cmdStats, true, false, 0, 0, false}, 0x1b: {cmdVerbosity, true, false, 4, -1, false},
	opTouch: {cmdTouch, true, false, 4, 1, false},
	opGat:   {cmdGat, true, false, 4, 1, false}, opGatQ: {cmdGat, true, true, 4, 1, false},
	opGatK: {cmdGat, true, false, 4, 1, false}, opGatKQ: {cmdGat, true, true, 4, 1, false},
	opSASLMechanisms: {cmdSASL, true, false, 0, -1, false}, opSASLAuth: {cmdSASL, true, false, 0, 1, true},
	opSASLStep: {cmdSASL, true, false, 0, 1, true},
}

// request is a request whose value has not been read; its key is conn.key.
type request struct {
	opcode
	op     byte
	opaque uint32
	cas    uint64
	ext    [maxExtras]byte
	extLen int
	value  int // bytes that follow
	began  time.Time
}

// fits reports whether a request has the parts that its opcode has.
func (q *request) fits(key int) bool {
	switch {
	case q.extLen != int(q.extras) && !(q.extras < 0 && (q.extLen == 0 || q.extLen == 4)):
		return false
	case q.key > 0 && key == 0, q.key < 0 && key > 0:
		return false
	}
	return q.opcode.value || q.value == 0
}

// readPacket reads a request up to its value and performs it. An error ends the connection.
func (c *conn) readPacket() error {
	h, err := c.r.Peek(binHeader)
	if err != nil {
		return err
	}
	q := request{op: h[1], opaque: binary.BigEndian.Uint32(h[12:]), cas: binary.BigEndian.Uint64(h[16:])}
	q.opcode, q.extLen = opcodes[q.op], int(h[4])
	key, body := int(binary.BigEndian.Uint16(h[2:])), int(binary.BigEndian.Uint32(h[8:]))
	magic := h[0]
	q.value = body - key - q.extLen
	c.midway = true
	c.said++
	// A request that contradicts itself is the last: nobody can tell where the next one begins.
	switch {
	case magic != binRequest:
		return errQuit
	case q.value < 0:
		return c.lastAnswer(&q, binUnknown)
	case !c.admitted() && q.cmd != cmdSASL && q.cmd != cmdVersion:
		return c.lastAnswer(&q, binAuthError)
	case key > maxKeyLen, q.known && !q.fits(key):
		return c.lastAnswer(&q, binInvalid)
	}
	b, err := c.r.Peek(binHeader + q.extLen + key)
	if err != nil {
		return err
	}
	q.began = time.Now()
	copy(q.ext[:], b[binHeader:binHeader+q.extLen])
	c.key = append(c.key[:0], b[binHeader+q.extLen:]...)
	if _, err := c.r.Discard(len(b)); err != nil {
		return err
	}
	if q.cmd == cmdGet && q.known && !inside.IsOwn(c.key) {
		c.queue(c.key, lookup{cmd: cmdGet, began: q.began, binary: true, op: q.op, opaque: q.opaque})
		return nil
	}
	c.performLookups()
	res, err := result(0), error(nil)
	if q.known && inside.IsOwn(c.key) {
		res, err = c.refuseKey(&q)
	} else {
		res, err = c.perform(&q)
	}
	if err == nil || err == errQuit {
		c.done(q.command(), res, q.began)
	}
	return err
}

func (q *request) command() command {
	if !q.known {
		return cmdUnknown
	}
	return q.cmd
}

// perform performs a request other than a lookup.
func (c *conn) perform(q *request) (result, error) {
	if !q.known {
		if err := c.skip(q.value); err != nil {
			return resBad, err
		}
		return c.fails(q, binUnknown), nil
	}
	switch q.cmd {
	case cmdSet, cmdAdd, cmdReplace, cmdAppend, cmdPrepend:
		return c.binaryStore(q)
	case cmdSASL:
		return c.sasl(q)
	case cmdDelete:
		c.s.detail.noteDelete(c.key)
		var err error
		if q.cas == 0 {
			err = c.remove(c.key)
		} else {
			err = c.removeVersion(c.key, q.cas)
		}
		return c.ends(q, err, 0, nil), nil
	case cmdIncr, cmdDecr:
		return c.binaryIncr(q), nil
	case cmdTouch, cmdGat:
		return c.binaryTouch(q), nil
	case cmdFlushAll:
		at := time.Time{}
		if q.extLen > 0 {
			at = c.expiresAt(int64(binary.BigEndian.Uint32(q.ext[:])))
		}
		if r := c.flushAll(at); r.res != resOK {
			return c.troubles(q, r), nil
		}
	case cmdVersion:
		return c.ends(q, nil, 0, []byte(version)), nil
	case cmdStats:
		return c.binaryStats(q), nil
	case cmdQuit:
		return c.ends(q, nil, 0, nil), errQuit
	}
	return c.ends(q, nil, 0, nil), nil
}

// ownKey is what is wrong with a key of a database that shares the namespace. A key of text has no such bytes.
const ownKey = "key is reserved for other databases of the namespace"

// refuseKey answers a request for such a key.
func (c *conn) refuseKey(q *request) (result, error) {
	if err := c.skip(q.value); err != nil {
		return resBad, err
	}
	c.head(q.op, binInvalid, 0, 0, len(ownKey), q.opaque, 0)
	c.out().WriteString(ownKey)
	return resBad, nil
}

// head writes a response's header.
func (c *conn) head(op byte, s status, ext, key, value int, opaque uint32, cas uint64) {
	var h [binHeader]byte
	h[0], h[1], h[4] = binResponse, op, byte(ext)
	binary.BigEndian.PutUint16(h[2:], uint16(key))
	binary.BigEndian.PutUint16(h[6:], uint16(s))
	binary.BigEndian.PutUint32(h[8:], uint32(ext+key+value))
	binary.BigEndian.PutUint32(h[12:], opaque)
	binary.BigEndian.PutUint64(h[16:], cas)
	c.out().Write(h[:])
}

// fails answers with a failure in the protocol's own words.
func (c *conn) fails(q *request, s status) result {
	text := statusText[s]
	c.head(q.op, s, 0, 0, len(text), q.opaque, 0)
	c.out().WriteString(text)
	switch s {
	case binNotFound:
		return resMiss
	case binExists, binNotStored:
		return resRefused
	case binTooLarge:
		return resTrouble
	}
	return resBad
}

// troubles answers with the failure that the text protocol has the words for.
func (c *conn) troubles(q *request, r reply) result {
	s, text := binInternal, strings.TrimPrefix(r.text, "SERVER_ERROR ")
	if r == outOfMemory || r == noBuffers {
		s = binOutOfMemory
	}
	c.head(q.op, s, 0, 0, len(text), q.opaque, 0)
	c.out().WriteString(text)
	return r.res
}

// lastAnswer answers a request behind which nothing can be understood.
func (c *conn) lastAnswer(q *request, s status) error {
	c.performLookups()
	c.done(q.command(), c.fails(q, s), time.Now())
	return errQuit
}

// ends answers a request that succeeded, or failed with err. Quiet ones that succeeded are not answered.
func (c *conn) ends(q *request, err error, version uint64, value []byte) result {
	switch {
	case err == nil && q.quiet:
	case err == nil:
		c.head(q.op, binOK, 0, 0, len(value), q.opaque, version)
		c.out().Write(value)
	case errors.Is(err, client.ErrNotFound) && (q.cmd == cmdAppend || q.cmd == cmdPrepend):
		return c.fails(q, binNotStored)
	case errors.Is(err, client.ErrNotFound):
		return c.fails(q, binNotFound)
	case errors.Is(err, client.ErrExists), errors.Is(err, client.ErrConflict):
		return c.fails(q, binExists)
	case errors.Is(err, errNotNumeric):
		return c.fails(q, binNotNumeric)
	case errors.Is(err, errTooLarge):
		return c.fails(q, binTooLarge)
	default:
		return c.troubles(q, c.trouble(err))
	}
	return resOK
}

func (c *conn) binaryStore(q *request) (result, error) {
	op := client.Op{Kind: client.OpPut, Key: c.key}
	if q.extLen > 0 {
		op.Flags, op.Expires = binary.BigEndian.Uint32(q.ext[:]), c.expiresAt(int64(binary.BigEndian.Uint32(q.ext[4:])))
	}
	switch {
	case q.cas != 0:
		op.Cond, op.Version = client.IfVersion, q.cas
	case q.cmd == cmdAdd:
		op.Cond = client.IfAbsent
	case q.cmd == cmdReplace:
		op.Cond = client.IfPresent
	}
	c.s.detail.noteSet(c.key)
	if q.value > c.s.o.MaxValueBytes {
		if err := c.skip(q.value); err != nil {
			return resTrouble, err
		}
		if q.cmd == cmdSet {
			if err := c.remove(c.key); err != nil && !errors.Is(err, client.ErrNotFound) {
				return c.ends(q, err, 0, nil), nil
			}
		}
		return c.fails(q, binTooLarge), nil
	}
	value, give, err := c.readBytes(q.value)
	defer give()
	if err != nil {
		if r := c.trouble(err); r == noBuffers {
			c.troubles(q, r)
		}
		return resTrouble, err
	}
	op.Value = value
	if q.cmd == cmdAppend || q.cmd == cmdPrepend {
		c.join(&op, q.cmd == cmdAppend, nil)
	}
	version, err := c.write(op)
	return c.ends(q, err, version, nil), nil
}

// neverCreate is the expiry of an incr or decr that leaves an absent item absent.
const neverCreate = 0xffffffff

func (c *conn) binaryIncr(q *request) result {
	delta, initial, exp := binary.BigEndian.Uint64(q.ext[:]), binary.BigEndian.Uint64(q.ext[8:]),
		binary.BigEndian.Uint32(q.ext[16:])
	var n uint64
	var sum []byte
	version, give, err := c.update(c.key, func(cur client.Item, present bool) (client.Change, error) {
		var err error
		ch := client.Change{Expires: cur.Expires, Flags: cur.Flags}
		switch {
		case !present && exp == neverCreate:
			return ch, client.ErrNotFound
		case !present:
			n, ch.Expires = initial, c.expiresAt(int64(exp))
		case q.cas != 0 && cur.Version != q.cas:
			return ch, client.ErrConflict
		default:
			n, err = number(cur.Value, delta, q.cmd == cmdDecr)
		}
		sum = strconv.AppendUint(sum[:0], n, 10)
		ch.Value, ch.Note = sum, noteOfSum(cur, sum)
		return ch, err
	})
	give()
	return c.ends(q, err, version, binary.BigEndian.AppendUint64(nil, n))
}

func (c *conn) binaryTouch(q *request) result {
	var it client.Item
	version, give, err := c.touch(c.key, c.expiresAt(int64(binary.BigEndian.Uint32(q.ext[:]))), &it)
	defer give()
	it.Version = version
	c.s.detail.noteGet(c.key, err == nil)
	if q.cmd == cmdGat {
		c.found(err)
	} else if it.Value = nil; err == nil {
		c.binaryItem(q.op, q.opaque, nil, &it)
		return resOK
	}
	return c.binaryGot(q.op, q.opaque, c.key, &it, err)
}

// binaryGot answers a lookup.
func (c *conn) binaryGot(op byte, opaque uint32, key []byte, it *client.Item, err error) result {
	q := request{opcode: opcodes[op], op: op, opaque: opaque}
	if op != opGetK && op != opGetKQ && op != opGatK && op != opGatKQ {
		key = nil
	}
	switch {
	case err == nil:
		c.binaryItem(op, opaque, key, it)
		return resOK
	case !errors.Is(err, client.ErrNotFound):
		return c.troubles(&q, c.trouble(err))
	case q.quiet:
	case key == nil:
		return c.fails(&q, binNotFound)
	default:
		c.head(op, binNotFound, 0, len(key), 0, opaque, 0)
		c.out().Write(key)
	}
	return resMiss
}

func (c *conn) binaryItem(op byte, opaque uint32, key []byte, it *client.Item) {
	c.head(op, binOK, 4, len(key), len(it.Value), opaque, it.Version)
	c.out().Write(binary.BigEndian.AppendUint32(c.num[:0], it.Flags))
	c.out().Write(key)
	c.out().Write(it.Value)
}

// binaryStats answers with a response for each line and an empty one.
func (c *conn) binaryStats(q *request) result {
	// memcached compares the beginnings of these.
	section := string(c.key)
	how, detail := strings.CutPrefix(section, "detail")
	switch {
	case detail:
		return c.binaryDetail(q, how)
	case strings.HasPrefix(section, "reset"):
		c.s.resetStats()
	default:
		if strings.HasPrefix(section, "settings") {
			section = "settings"
		}
		c.link.Waits() // counting takes its time
		stats, ok := c.s.section(section)
		if !ok {
			return c.fails(q, binNotFound)
		}
		for _, s := range stats {
			value := fmt.Sprint(s.value)
			c.head(q.op, binOK, 0, len(s.name), len(value), q.opaque, 0)
			c.out().WriteString(s.name)
			c.out().WriteString(value)
		}
	}
	return c.ends(q, nil, 0, nil)
}

// sasl answers requests for mechanisms, of which there is PLAIN, and logs in. A password may be as long as in text.
func (c *conn) sasl(q *request) (result, error) {
	switch {
	case q.value > maxLoginValue:
		return c.fails(q, binInvalid), errQuit
	case q.op == opSASLMechanisms && c.s.users.Load() != nil:
		return c.ends(q, nil, 0, []byte("PLAIN")), nil
	}
	value, give, err := c.readBytes(q.value)
	defer give()
	if err != nil {
		return resBad, err
	}
	if c.s.users.Load() == nil {
		return c.fails(q, binUnknown), nil // as memcached without SASL
	}
	// PLAIN (RFC 4616) takes one step: whom to act as, which is left alone, a name and a password.
	words := strings.SplitN(string(value), "\x00", 3)
	if q.op != opSASLAuth || string(c.key) != "PLAIN" || len(words) != 3 ||
		!c.accepts([]byte(words[1]), []byte(words[2])) {
		return c.fails(q, binAuthError), nil
	}
	return c.ends(q, nil, 0, []byte("Authenticated")), nil
}
