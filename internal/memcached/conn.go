package memcached

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/poll"
)

// conn is one connection; what serves it at the moment alone uses it.
type conn struct {
	s    *Server
	link loop.Link
	peer net.Addr
	// number is its own among all connections of the Server, from 1.
	number uint64
	r      *bufio.Reader
	w      *bufio.Writer // nil while there is nothing to send; see out
	long   []byte        // a line longer than r's buffer
	toks   [][]byte      // of the line at hand
	key    []byte        // of the value that is read
	// Lookups wait here for more of them, until something else is to be done: pend
	// and ops belong together, and arena has their keys. reserved bytes of the share stand for
	// their values; looked is set when a loop has performed them.
	pend     []lookup
	ops      []client.Op
	arena    []byte
	reserved int64
	looked   bool
	// slots is a hash table of the keys that wait: the batch's number, and below it pend's index in 8 bits. Those of
	// other batches are free.
	slots [4 * batchKeys]uint32
	batch uint32
	said  int  // commands since fresh was set
	fresh bool // a read is due, even between two commands
	// midway: a part of a command has come, so the rest may not take for ever. It began then, and so
	// many bytes have come since.
	midway bool
	began  time.Time
	came   int
	waited time.Duration // for memory; its client is not late meanwhile
	// unknown: the command at hand may have happened, and its error says so. For Options.Answered, which done tells.
	unknown bool
	// Both limit what an operation may read without taking memory of the share first: ctx one,
	// smallCtx each of many.
	ctx, smallCtx context.Context
	share         *netsrv.Share
	lineHeld      int64 // bytes of the share that stand for long and toks
	broken        error // of w
	speaks        protocol
	// idle is since when the connection waits for a command, in Unix ms; 0: it does not.
	idle atomic.Int64
	num  [24]byte
	// user is nil until the connection has authenticated.
	user atomic.Pointer[string]
}

// protocol is what a connection speaks, from its first byte on.
type protocol uint8

const (
	speaksNothing protocol = iota // nothing has come yet
	speaksText
	speaksBinary
)

// lookup is how one key's answer is told.
type lookup struct {
	cmd    command
	began  time.Time
	meta   *meta // mg
	last   bool  // of a get's keys: END
	binary bool  // op and opaque are its request's
	op     byte
	opaque uint32
}

var (
	errQuit = errors.New("quit")
	errTurn = errors.New("what was read has been performed")
)

func (s *Server) handle(nc net.Conn) {
	c := &conn{s: s, peer: nc.RemoteAddr(), batch: 1}
	c.link.Init(c, &s.loops, nc, s.calm)
	c.ctx = inside.OnWait(inside.LimitMemory(s.ctx, oneLimit), c.link.Waits)
	c.smallCtx = inside.OnWait(inside.LimitMemory(s.ctx, eachLimit), c.link.Waits)
	c.share = s.o.Budget.Share(func(bytes int64) {
		s.o.Logger.Warn("connection closed: it held the most memory while others waited for some", "peer", c.peer,
			"bytes", bytes)
		c.link.Kill()
	})
	s.conns.Lock()
	s.conns.last++
	c.number = s.conns.last
	s.conns.all[c] = struct{}{}
	s.conns.Unlock()
	defer func() {
		s.conns.Lock()
		delete(s.conns.all, c)
		s.conns.Unlock()
		c.link.Kill()
		c.share.Drop(c.share.Held()) // of a command that did not come whole, or that panicked
		c.share.Close()
	}()
	c.r = bufio.NewReaderSize(input{c}, 16<<10)
	for {
		if err := c.begin(); err != nil {
			break
		}
		if err := c.flushAnswers(); err != nil {
			return
		}
		if c.link.Calmed(c.said) {
			c.idle.Store(time.Now().UnixMilli())
			if err := c.link.Enter(); err == loop.ErrPanicked {
				return
			} else if err != nil {
				break
			}
		}
	}
	c.flushAnswers()
}

// begin reads, and performs the commands that have come, but for the lookups that they end with.
func (c *conn) begin() error {
	c.said, c.fresh = 0, true
	for {
		c.waited = 0
		if err := c.performNext(); err == errTurn {
			return nil
		} else if err != nil {
			return err
		}
		c.midway, c.began = false, time.Time{}
	}
}

// performNext reads a command and performs it. An error but errTurn ends the connection.
func (c *conn) performNext() error {
	if c.speaks == speaksNothing {
		first, err := c.r.Peek(1)
		if err != nil {
			return err
		}
		if c.speaks = speaksText; first[0] == binRequest {
			c.speaks = speaksBinary
		}
	}
	if c.speaks == speaksBinary {
		return c.readPacket()
	}
	line, err := c.readLine()
	if err != nil {
		return err
	}
	c.midway = true
	c.said++
	return c.command(line)
}

// input is what r reads: once between two commands, and then until they are whole. Before it waits
// for the peer, the peer gets all answers.
type input struct{ c *conn }

func (in input) Read(p []byte) (int, error) {
	c := in.c
	between := !c.midway && len(c.long) == 0 && c.r.Buffered() == 0
	if between && !c.fresh {
		return 0, errTurn
	}
	c.fresh = false
	if c.link.Looped() {
		n, err := c.link.Read(p)
		if n > 0 {
			c.idle.Store(0)
			c.s.stats.bytesRead.Add(uint64(n))
		}
		if err != loop.ErrNothing || between {
			return n, err
		}
		c.link.Waits()
	}
	if err := c.flushAnswers(); err != nil {
		return 0, err
	}
	nc := c.link.Net()
	limit := time.Time{}
	if !between {
		if c.began.IsZero() {
			c.began, c.came = time.Now(), 0
		}
		limit = c.began.Add(c.s.o.IOTimeout + time.Duration(c.came)*time.Second>>20 + c.waited)
	}
	if err := nc.SetReadDeadline(limit); err != nil {
		return 0, err
	}
	if between {
		c.idle.Store(time.Now().UnixMilli())
	}
	n, err := nc.Read(p)
	c.idle.Store(0)
	c.came += n
	c.s.stats.bytesRead.Add(uint64(n))
	return n, err
}

type output struct{ c *conn }

// turnBytes is how much of an answer is written before others have the processor. It is what a writer holds.
const turnBytes = 72 << 10

func (out output) Write(p []byte) (int, error) {
	c := out.c
	sent := 0
	if c.link.Looped() {
		sent = c.link.Write(p[:min(len(p), turnBytes)])
		c.s.stats.bytesWrote.Add(uint64(sent))
		if sent == len(p) {
			return sent, nil
		}
		c.link.Waits()
	}
	nc := c.link.Net()
	if err := nc.SetWriteDeadline(time.Now().Add(c.s.o.IOTimeout + time.Duration(len(p)-sent)*time.Second>>16)); err !=
		nil {
		return sent, err
	}
	for sent < len(p) {
		if sent > 0 {
			poll.Yield()
		}
		n, err := nc.Write(p[sent:min(len(p), sent+turnBytes)])
		c.s.stats.bytesWrote.Add(uint64(n))
		sent += n
		if err != nil {
			return sent, err
		}
	}
	return sent, nil
}

// flushAnswers performs what waits and sends all answers.
func (c *conn) flushAnswers() error {
	c.performLookups()
	if c.w == nil {
		return nil
	}
	err := c.w.Flush()
	c.w.Reset(nil)
	writers.Put(c.w)
	c.w = nil
	return err
}

// out is where answers are written. Connections share the buffers, and have one only until what they
// wrote is sent: it is long enough for what batchKeys lookups of values of 1 KiB find, which then
// take one write(2), and those who have nothing to say need none.
func (c *conn) out() *bufio.Writer {
	if c.w == nil {
		c.w = writers.Get().(*bufio.Writer)
		c.w.Reset(output{c})
	}
	return c.w
}

var writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, turnBytes) }}

// readLine returns the next line without its end; it is valid until r is used.
func (c *conn) readLine() ([]byte, error) {
	c.long = c.long[:0]
	if c.lineHeld > 0 {
		c.toks = nil
		c.share.Drop(c.lineHeld)
		c.lineHeld = 0
	}
	for {
		b, err := c.r.ReadSlice('\n')
		if err == bufio.ErrBufferFull || err == nil && len(c.long) > 0 {
			if c.lineHeld == 0 {
				// For the line, while it grows, and its tokens.
				if err := c.take(longLine); err != nil {
					return nil, err
				}
				c.lineHeld = longLine
			}
			c.long = append(c.long, b...)
			b = c.long
		}
		if len(b) > maxLineLen || len(b) > maxLoginLine && !c.admitted() {
			c.performLookups()
			c.out().WriteString("CLIENT_ERROR line too long\r\n")
			c.done(cmdUnknown, resBad, time.Now())
			return nil, bufio.ErrTooLong
		}
		switch {
		case err == bufio.ErrBufferFull && !mayBeLong(b):
			return nil, errQuit
		case err == bufio.ErrBufferFull:
			continue
		case err == nil:
			if cap(c.long) > keepBuffer {
				c.long = nil // b has it
			}
			b = b[:len(b)-1]
			return bytes.TrimSuffix(b, []byte("\r")), nil
		}
		return nil, err
	}
}

// longLine is what a line longer than r's buffer takes, in bytes.
const longLine = 8 * maxLineLen

// take takes memory for the command at hand. Before it waits the peer gets all answers.
func (c *conn) take(n int64) error {
	if c.share.Try(n) {
		return nil
	}
	c.link.Waits()
	began := time.Now()
	err := c.share.Take(c.s.ctx, n, memoryPatience-c.waited)
	c.waited += time.Since(began)
	return err
}

// do performs an operation on one key that writes a value of so many bytes, again with memory
// of the share if what is there needs that. give is to be called when what it read is not
// needed any more.
func (c *conn) do(value int, op func(ctx context.Context) error) (give func(), err error) {
	held := int64(0)
	give = func() { c.share.Drop(held) }
	if value > eachLimit {
		held = writeCost * int64(value)
		if err = c.take(held); err != nil {
			held = 0
			return give, err
		}
	}
	wrote := held
	err = op(c.ctx)
	for range largeTries {
		var large *inside.TooLargeError
		if !errors.As(err, &large) {
			break
		}
		c.link.Waits() // it takes its time
		n := wrote + readCost*int64(large.Want)
		if err = c.take(n - held); err != nil {
			break
		}
		held = max(held, n)
		err = op(inside.LimitMemory(c.ctx, large.Want))
	}
	return give, err
}

// remove deletes a key.
func (c *conn) remove(key []byte) error {
	give, err := c.do(0, func(ctx context.Context) error { return c.s.o.Client.Delete(ctx, key) })
	give()
	return err
}

// removeVersion deletes a key that has the version given.
func (c *conn) removeVersion(key []byte, version uint64) error {
	give, err := c.do(0, func(ctx context.Context) error { return c.s.o.Client.DeleteVersion(ctx, key, version) })
	give()
	return err
}

// tokens cuts a line at its spaces.
func (c *conn) tokens(line []byte) [][]byte {
	c.toks = c.toks[:0]
	for len(line) > 0 {
		i := bytes.IndexByte(line, ' ')
		if i < 0 {
			i = len(line)
		}
		if i > 0 {
			c.toks = append(c.toks, line[:i])
		}
		line = line[min(i+1, len(line)):]
	}
	return c.toks
}

// reply is what to say and how to count it.
type reply struct {
	text string
	res  result
}

var (
	ok          = reply{"OK", resOK}
	stored      = reply{"STORED", resOK}
	notStored   = reply{"NOT_STORED", resRefused}
	exists      = reply{"EXISTS", resRefused}
	notFound    = reply{"NOT_FOUND", resMiss}
	deleted     = reply{"DELETED", resOK}
	touched     = reply{"TOUCHED", resOK}
	badCommand  = reply{"ERROR", resBad}
	badFormat   = reply{"CLIENT_ERROR bad command line format", resBad}
	badChunk    = reply{"CLIENT_ERROR bad data chunk", resBad}
	badExptime  = reply{"CLIENT_ERROR invalid exptime argument", resBad}
	badDelta    = reply{"CLIENT_ERROR invalid numeric delta argument", resBad}
	badDelete   = reply{"CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]", resBad}
	notNumeric  = reply{"CLIENT_ERROR cannot increment or decrement non-numeric value", resBad}
	tooLarge    = reply{"SERVER_ERROR object too large for cache", resTrouble}
	noBuffers   = reply{"SERVER_ERROR out of buffer memory; nothing was done", resTrouble}
	outOfMemory = reply{"SERVER_ERROR out of memory storing object", resTrouble}
	unknown     = reply{"SERVER_ERROR outcome unknown: it may have happened", resTrouble}
	unavailable = reply{"SERVER_ERROR store unavailable", resTrouble}
	noNamespace = reply{"SERVER_ERROR the namespace was deleted", resTrouble}
	forbidden   = reply{"SERVER_ERROR the gateway may not use the namespace any more", resTrouble}
	wrongType   = reply{"SERVER_ERROR the value is a collection of Redis's; nothing was done", resTrouble}
	corrupt     = reply{"SERVER_ERROR corrupt memory; the log says where", resTrouble}
	said        = reply{"", resOK} // the command has written its answer
)

var (
	errNotNumeric = errors.New("not a number")
	errTooLarge   = errors.New("too large")
)

// trouble is the reply to an error that the command has no word of its own for.
func (c *conn) trouble(err error) reply {
	switch {
	case errors.Is(err, errNotNumeric):
		return notNumeric
	case errors.Is(err, errTooLarge):
		return tooLarge
	case errors.Is(err, client.ErrWrongType):
		return wrongType
	case errors.Is(err, netsrv.ErrBudget):
		c.s.o.Logger.Warn("command refused: out of buffer memory", "used", c.s.o.Budget.Used(), "of",
			c.s.o.Budget.Total())
		return noBuffers
	case errors.Is(err, client.ErrFull):
		return outOfMemory
	case errors.Is(err, client.ErrUnknownOutcome):
		c.s.o.Logger.Warn("outcome unknown", "err", err)
		c.unknown = true
		return unknown
	case errors.Is(err, client.ErrNoNamespace):
		return noNamespace // the client has logged it, once
	case errors.Is(err, client.ErrForbidden):
		return forbidden // likewise
	case errors.Is(err, client.ErrCorrupt):
		c.s.o.Logger.Error("command failed", "err", err)
		return corrupt
	}
	c.s.o.Logger.Warn("command failed", "err", err)
	return unavailable
}

// command performs one command. An error ends the connection.
func (c *conn) command(line []byte) error {
	began := time.Now()
	toks := c.tokens(line)
	cmd := cmdUnknown
	if len(toks) > 0 {
		if k, ok := commandOf[string(toks[0])]; ok {
			cmd = k
		}
	}
	if cmd == cmdUnknown && speaksHTTP(toks) {
		// A web page can make a browser send commands in the body of a request.
		c.s.o.Logger.Warn("connection closed: it speaks HTTP, as a browser does that a web page abuses", "peer", c.peer)
		c.performLookups()
		return errQuit
	}
	if !c.admitted() {
		r, err := c.logIn(toks)
		if err == nil {
			c.say(r)
		}
		c.done(cmd, r.res, began)
		return err
	}
	if cmd == cmdGet || cmd == cmdGets {
		if r, bad := c.get(cmd, toks, began); bad {
			c.performLookups()
			c.say(r)
			c.done(cmd, r.res, began)
		}
		return nil
	}
	if cmd >= cmdMg && cmd <= cmdMe {
		return c.metaCommand(cmd, toks, began)
	}
	c.performLookups()
	n, quiet := wordsOf[cmd], false
	r, err := badCommand, error(nil)
	if n.least <= len(toks) && (n.most == 0 || len(toks) <= n.most) {
		quiet = n.quiet && string(toks[len(toks)-1]) == "noreply"
		r, err = c.text(cmd, toks, quiet)
	}
	if err != nil {
		return err
	}
	if r.text != "" && !quiet {
		c.say(r)
	}
	c.done(cmd, r.res, began)
	return nil
}

// speaksHTTP reports whether a line that is no command is of an HTTP request: its first one, by which memcached knows
// it, whatever the method is, or one of those by which a Redis does.
func speaksHTTP(toks [][]byte) bool {
	return len(toks) > 0 && (bytes.HasPrefix(toks[len(toks)-1], []byte("HTTP/")) ||
		bytes.EqualFold(toks[0], []byte("post")) || bytes.EqualFold(toks[0], []byte("host:")))
}

// mayBeLong reports whether a line is of a command with any number of keys. memcached closes other connections that
// send so much without a line's end, which are lost or speak something else.
func mayBeLong(line []byte) bool {
	word, _, _ := bytes.Cut(bytes.TrimLeft(line, " "), []byte(" "))
	switch commandOf[string(word)] {
	case cmdGets, cmdGat, cmdGats:
		return true
	case cmdGet: // the zero value, too
		return string(word) == "get" || string(word) == "bget"
	}
	return false
}

// words is how many words a command has, its name counted, and whether the last of them may be noreply. memcached takes
// any word for that one, and counts it.
type words struct {
	least, most int // most 0: any
	quiet       bool
}

// wordsOf has the commands that text performs.
var wordsOf = [numCommands]words{
	cmdSet: {5, 6, true}, cmdAdd: {5, 6, true}, cmdReplace: {5, 6, true}, cmdAppend: {5, 6, true},
	cmdPrepend: {5, 6, true}, cmdCas: {6, 7, true},
	cmdIncr: {3, 4, true}, cmdDecr: {3, 4, true}, cmdTouch: {3, 4, true}, cmdDelete: {2, 4, true},
	cmdFlushAll: {1, 3, true}, cmdVerbosity: {2, 3, true}, cmdGat: {2, 0, false}, cmdGats: {2, 0, false},
	cmdVersion: {1, 0, false}, cmdStats: {1, 0, false}, cmdQuit: {1, 0, false},
}

func (c *conn) say(r reply) {
	c.out().WriteString(r.text)
	c.out().WriteString("\r\n")
}

// text performs a text command other than get and gets, which has as many words as it should.
func (c *conn) text(cmd command, toks [][]byte, quiet bool) (reply, error) {
	switch cmd {
	case cmdSet, cmdAdd, cmdReplace, cmdAppend, cmdPrepend, cmdCas:
		return c.store(cmd, toks)
	case cmdGat, cmdGats:
		return c.getAndTouch(cmd, toks), nil
	case cmdDelete:
		hold := len(toks) > 2 && string(toks[2]) == "0" // as clients of long ago say it
		switch {
		case len(toks) == 3 && !hold && !quiet, len(toks) == 4 && !(hold && quiet):
			return badDelete, nil
		case !goodKey(toks[1]):
			return badFormat, nil
		}
		c.s.detail.noteDelete(toks[1])
		return c.outcome(c.remove(toks[1]), deleted, notFound), nil
	case cmdIncr, cmdDecr:
		return c.incr(cmd, toks), nil
	case cmdTouch:
		if !goodKey(toks[1]) {
			return badFormat, nil
		}
		exp, ok := c.expiry(toks[2])
		if !ok {
			return badExptime, nil
		}
		_, give, err := c.touch(toks[1], exp, nil)
		give()
		return c.outcome(err, touched, notFound), nil
	case cmdFlushAll:
		if quiet {
			toks = toks[:len(toks)-1]
		}
		if len(toks) == 1 {
			return c.flushAll(time.Time{}), nil
		}
		at, good := c.expiry(toks[1])
		if !good {
			return badExptime, nil
		}
		return c.flushAll(at), nil
	case cmdVersion:
		return reply{"VERSION " + version, resOK}, nil
	case cmdVerbosity:
		if _, err := strconv.ParseUint(string(toks[1]), 10, 32); err != nil && !quiet {
			return badFormat, nil
		}
		return ok, nil
	case cmdStats:
		return c.showStats(toks), nil
	case cmdQuit:
		c.done(cmd, resOK, time.Now())
		return said, errQuit
	}
	return refusal(toks), nil
}

// refusal is the answer to what is no command here: some are known to memcached, which has them switched off.
func refusal(toks [][]byte) reply {
	if len(toks) > 0 {
		switch string(toks[0]) {
		case "shutdown":
			return reply{"ERROR: shutdown not enabled", resBad}
		case "refresh_certs":
			return reply{"Error TLS not enabled", resBad}
		case "lru_crawler":
			if len(toks) > 2 && (string(toks[1]) == "metadump" || string(toks[1]) == "mgdump") {
				return reply{"ERROR metadump not allowed", resBad}
			}
		}
	}
	return badCommand
}

// outcome is yes without an error, none if there is no such key.
func (c *conn) outcome(err error, yes, none reply) reply {
	switch {
	case err == nil:
		return yes
	case errors.Is(err, client.ErrNotFound):
		return none
	}
	return c.trouble(err)
}

// goodKey reports whether key can be a text command's.
func goodKey(key []byte) bool {
	if len(key) == 0 || len(key) > maxKeyLen {
		return false
	}
	for _, b := range key {
		if b <= ' ' || b == 0x7f {
			return false
		}
	}
	return true
}

// parseInt reads what an exptime may be, and more than a length.
func parseInt(b []byte) (int64, bool) {
	n, err := strconv.ParseInt(string(b), 10, 64)
	return n, err == nil && n < 1<<40 && n > -1<<40
}

// expiry reads an exptime.
func (c *conn) expiry(b []byte) (time.Time, bool) {
	n, ok := parseInt(b)
	if !ok {
		return time.Time{}, false
	}
	// Of a number that does not fit, memcached takes the lower 32 bits: libmemcached sends -1
	// without its sign, and means that the item be gone.
	return c.expiresAt(int64(int32(n))), true
}

// expiresAt is what an exptime means: 0 is never, up to 30 days counts from now, more is a Unix
// time, and what is negative has passed.
func (c *conn) expiresAt(n int64) time.Time {
	switch {
	case n == 0:
		return time.Time{}
	case n < 0:
		return time.UnixMilli(1)
	case n > 30*24*60*60:
		return time.Unix(n, 0)
	}
	return c.s.o.Now().Add(time.Duration(n) * time.Second)
}

// readValue reads n bytes and the line's end. give is to be called when they are not needed any more.
func (c *conn) readValue(n int) (value []byte, ok bool, give func(), err error) {
	buf, give, err := c.readBytes(n + 2)
	if err != nil {
		return nil, false, give, err
	}
	return buf[:n], string(buf[n:]) == "\r\n", give, nil
}

// readBytes reads so many bytes, which stay until more is read. give is to be called when they are not needed any more.
func (c *conn) readBytes(need int) (buf []byte, give func(), err error) {
	if need <= c.r.Size() {
		if buf, err = c.r.Peek(need); err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		_, _ = c.r.Discard(len(buf)) // they are there
		return buf, func() {}, err
	}
	// A peer that has not sent them shall not make us reserve them.
	const step = 64 << 10
	buf = make([]byte, 0, min(need, step))
	held := int64(0)
	give = func() { c.share.Drop(held) }
	for len(buf) < need {
		k := min(need-len(buf), step)
		if cap(buf)-len(buf) < k {
			size := min(need, 2*cap(buf)+k)
			if err := c.take(int64(size)); err != nil {
				return nil, give, err
			}
			buf = append(make([]byte, 0, size), buf...)
			c.share.Drop(held)
			held = int64(size)
		}
		m, err := io.ReadFull(c.r, buf[len(buf):len(buf)+k])
		buf = buf[:len(buf)+m]
		if err != nil {
			return nil, give, err
		}
	}
	return buf, give, nil
}

// skipValue reads past n bytes and the line's end.
func (c *conn) skipValue(n int) error { return c.skip(n + 2) }

// skip reads past n bytes.
func (c *conn) skip(n int) error {
	_, err := io.CopyN(io.Discard, c.r, int64(n))
	return err
}

// valueLen reads a value's announced length.
func valueLen(b []byte) (int, bool) {
	n, ok := parseInt(b)
	return int(n), ok && n >= 0 && n < 1<<31-2
}

func (c *conn) showStats(toks [][]byte) reply {
	section := ""
	if len(toks) > 1 {
		section = string(toks[1])
	}
	switch section {
	case "reset":
		c.s.resetStats()
		return reply{"RESET", resOK}
	case "detail":
		return c.textDetail(toks)
	case "cachedump":
		return reply{"CLIENT_ERROR stats cachedump not allowed", resBad} // as with -X
	}
	c.link.Waits() // counting takes its time
	stats, ok := c.s.section(section)
	if !ok {
		return badCommand
	}
	for _, s := range stats {
		fmt.Fprintf(c.out(), "STAT %s %v\r\n", s.name, s.value)
	}
	return reply{"END", resOK}
}
