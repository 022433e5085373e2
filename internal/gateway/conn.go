package gateway

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/units"
)

// conn is one connection. Its own goroutine (handle) serves it, or a loop does, and owns all fields but
// those that say otherwise. internal/loop hands the connection over, so that they need no lock; fields
// that other goroutines read are atomic, or in mu.
type conn struct {
	// Set by handle.
	g  *Gateway
	id int64    // of CLIENT ID: from 1, and never used again
	nc net.Conn // not while it is in a loop; over replaces it when it leaves one
	// ctx is for one operation, smallCtx for one of many: both limit what it may read without
	// taking memory of the share first.
	ctx, smallCtx context.Context
	share         *netsrv.Share // of Options.Budget
	rd            *resp.Reader  // its limits are those of the user; see become
	incoming      input         // of nc
	out           output        // guards itself
	since         time.Time     // connected

	link        loop.Link // hands the connection over; guards itself
	clientState           // written by who serves the connection
	reading               // likewise
	visible               // guards itself

	remote, local net.Addr // as accepted; they do not change

	waited time.Duration // for memory, by the command at hand; not for others
	mu     struct {
		sync.Mutex
		name, libName, libVer string        // CLIENT SETNAME and SETINFO
		script                runningScript // that others may kill; zero: none runs
	}
}

// clientState is what the client has said that counts for later commands. The goroutine or loop that serves the
// connection owns it.
type clientState struct {
	proto int // RESP's version, 2 or 3; HELLO changes it
	// While it is false lookup asks admitted, which finds out whether user default needs a password still.
	authed bool // or user default needs no password
	// in is db's. Only use changes both.
	db      int
	in      *database    // which has db
	box     live.Outbox  // of what its commands publish; empty when what was read has been performed
	caching live.Caching // for the next command
	// tracksLate: what it caches of the transaction that runs is found out behind it, see live.LateTracking.
	tracksLate bool
	tx         transaction // MULTI and WATCH; ended with the connection
	reply      replyMode   // of the command at hand
	// skipFrom is rd.Empty when reply became replySkip.
	skipFrom uint64
	closing  bool // after this reply
}

// reading is how commands come. The goroutine or loop that serves the connection at the moment owns it.
type reading struct {
	untilSample int // commands until one is looked at for hot keys; 0: not drawn yet
	// window is how many keys a batch may have.
	// It is between 1 and maxUnits, and adapt changes it behind each batch.
	window int
	latest *command // that lookup found; most clients say the same again and again
	// deadline is whether reading has one.
	deadline bool
	said     int       // commands in one read
	filled   error     // of the last read in a loop
	lone     [][]byte  // the command of that read, if it is left to the turn; it came at that time
	came     time.Time // when lone was read
	asked    bool      // the turn has looked up what lone is about, and this was found:
	found    lookedUp  // means something while asked is set
	into     []byte    // for found; kept from lookup to lookup in a loop
}

// visible is for CLIENT LIST, Drain and others, from other goroutines. The goroutine or loop that serves the connection
// writes it, but for what ends the connection.
type visible struct {
	last   atomic.Pointer[command] // dispatched last; nil before the first
	active atomic.Int64            // Unix ms of the last reply; of the command, and negative, while one is performed
	// finishing is set when the connection ends because its client was silent, see Drain, and finished when it has been
	// told.
	finishing, finished atomic.Bool
	half                atomic.Int64             // Unix ms since when there has been half a command; 0: there is none
	user                atomic.Pointer[acl.User] // default before AUTH; never nil
	listener            live.Listener            // what it is subscribed to, and caches
	monitors            atomic.Bool              // MONITOR
	settling            atomic.Bool              // it waits for others, in CLIENT PAUSE
	seenDB              atomic.Int32             // db, for others
	seenP3              atomic.Bool              // proto is 3, for others
	inTx                atomic.Int32             // commands queued, -1: none
	blocked             atomic.Pointer[waiter]   // the command that waits; nil: none does
}

type lookedUp struct {
	client.Item
	Err error
}

// replyMode is what CLIENT REPLY has said.
type replyMode uint8

const (
	replyOn replyMode = iota
	replyOff
	replySkip     // this command
	replySkipNext // and this one, CLIENT REPLY SKIP, too
)

// errClosing ends a connection whose last reply has been sent: no reason to log.
var errClosing = errors.New("closing")

// counted is the connection as its reader sees it, in a loop or outside.
// Only the goroutine or the loop that serves the connection reads.
type counted struct{ c *conn }

// Read counts, and sets the idle timeout. A deadline is set only where one is due, since each costs the time of a
// lookup. A connection without an idle timeout that is between two commands has none. In a loop nothing waits, so that
// there are no deadlines: Tick looks after silent clients there. The deadline for half a command counts from its first
// byte, and conn.waited is added, since the gateway and not the client was slow then.
func (r counted) Read(p []byte) (n int, err error) {
	c := r.c
	if c.link.Looped() {
		n, err = c.link.Read(p)
		c.g.m.read.Add(uint64(n))
		return n, err
	}
	idle, half := c.g.idle.Load(), c.half.Load()
	switch {
	case c.finishing.Load(): // Link.CloseRead ends it
	case half != 0:
		c.nc.SetReadDeadline(time.UnixMilli(half).Add(c.g.commandTime(c.rd.Buffered()) + c.waited))
	case idle > 0 && !c.hears(): // those have nothing to say
		c.nc.SetReadDeadline(time.Now().Add(time.Duration(idle)))
	case c.deadline:
		c.nc.SetReadDeadline(time.Time{})
	}
	c.deadline = half != 0 || idle > 0
	n, err = c.incoming.Read(p)
	c.g.m.read.Add(uint64(n))
	return n, err
}

// hears reports whether the client is here to be told what it does not ask for.
func (c *conn) hears() bool { return c.listener.Listens() || c.monitors.Load() }

// commandTime is how long a command of which so many bytes have arrived may take to arrive.
// A fixed time alone would cut off honest clients on slow lines, and a time for each read would
// let a client hold memory for ever with a byte now and then.
// A MiB adds a second, so the slowest line that is served has 1 MiB/s once CommandTimeout is used up.
func (g *Gateway) commandTime(bytes int) time.Duration {
	return g.o.CommandTimeout + time.Duration(bytes)*time.Second>>20
}

// memoryPatience is how long a command waits in all for memory that others have; its client is not late meanwhile.
// While it waits it holds what it has; Budget ends the connection that holds the most if nobody
// gives anything back.
const memoryPatience = 10 * time.Second

// take takes memory for the command at hand.
// It must not wait in a loop, whose other connections have memory to give back.
// n is in bytes. An error is netsrv.ErrBudget, or says that the Gateway closes; nothing was taken then. The caller owes
// the share a Drop, or a Give if the memory is going to be used again.
func (c *conn) take(n int64) error {
	if c.share.Try(n) {
		return nil
	}
	c.link.Waits()
	began := time.Now()
	err := c.share.Take(c.g.ctx, n, memoryPatience-c.waited)
	c.waited += time.Since(began)
	return err
}

// takeBuffer is take, with the memory, which may hold anything.
func (c *conn) takeBuffer(n int) ([]byte, error) {
	c.link.Waits()
	began := time.Now()
	b, err := c.share.TakeBuffer(c.g.ctx, n, memoryPatience-c.waited)
	c.waited += time.Since(began)
	return b, err
}

// reserve is resp.Reader.Reserve.
// The reader asks before a buffer grows, so a length that a client announces costs nothing until
// the bytes have come.
func (c *conn) reserve(n int) bool {
	if n < 0 {
		c.share.Drop(int64(-n))
		return true
	}
	c.link.Waits() // for what is large, in any case
	return c.take(int64(n)) == nil
}

// evict closes the connection for the sake of others, who wait for memory.
// It is called by the Budget, on another connection's goroutine.
func (c *conn) evict(bytes int64) {
	c.g.m.evicted.Add(1)
	c.g.o.Logger.Warn("connection closed: it held the most memory while others waited for some", "peer", c.remote,
		"bytes", bytes)
	c.link.Kill()
}

// do performs an operation on one key, again with memory of the share if it needs that. give
// is to be called when what it read is not needed any more.
// How much that is, nobody knows before the value has been found: so the first try may read
// oneLimit, and its error tells how long the value is. The value may have become longer by the
// next try; hence the loop, and its bound.
// op may be called several times; every call but the last one has ended with a TooLargeError, and has done nothing.
func (c *conn) do(op func(ctx context.Context) error) (give func(), err error) {
	held := int64(0)
	err = op(c.ctx)
	for tries := 0; err != nil && tries < largeTries; tries++ {
		var large *inside.TooLargeError
		if !errors.As(err, &large) {
			break
		}
		n := readCost * int64(large.Want)
		if err = c.take(n - held); err != nil {
			break
		}
		held = max(held, n)
		err = op(inside.LimitMemory(c.ctx, large.Want))
	}
	if held == 0 {
		return func() {}, err
	}
	took := held
	return func() { c.share.Drop(took) }, err
}

// handle serves a connection from its first byte to its last. It reads, performs what has come,
// and replies; once the client has been calm for a while it gives the connection to a loop, and
// goes on with it when that gives it back: when there is something to wait for, or when the
// client begins to pipeline. However it ends, a command that has been performed is answered
// first, if the client still reads.
func (g *Gateway) handle(nc net.Conn) {
	c := &conn{g: g, id: g.lastID.Add(1), nc: nc, since: time.Now(),
		remote: nc.RemoteAddr(), local: nc.LocalAddr(), reading: reading{window: firstWindow}}
	c.link.Init(c, &g.loops, nc, g.calm)
	c.ctx = inside.OnWait(inside.LimitMemory(g.ctx, oneLimit), c.link.Waits)
	c.smallCtx = inside.OnWait(inside.LimitMemory(g.ctx, eachLimit), c.link.Waits)
	c.share = g.o.Budget.Share(c.evict)
	c.rd = resp.NewReader(counted{c}, g.limits(false))
	c.rd.Reserve = c.reserve
	// Its user is default, and its limits are a stranger's if that needs a password.
	c.becomeNew()
	c.out = output{timeout: g.o.WriteTimeout, limit: g.o.OutputBytes, share: c.share, queued: &g.m.queued,
		written: &g.m.written, turns: g.turns, link: &c.link, slow: c.slow, flooded: c.flooded}
	c.out.init()
	c.listener.Client = ear{c, c.share}
	c.over(nc)
	c.fresh()
	c.active.Store(c.since.UnixMilli())
	g.add(c)
	defer func() {
		g.remove(c)
		c.stopListening()
		c.stopTracking()
		c.stopMonitoring()
		c.box.Flush()
		c.rd.Release()
		c.tx.end(c)
		c.forgetWatched()
		c.out.finish()
		c.link.Kill()
		c.share.Drop(c.share.Held()) // of a command that panicked
		c.share.Close()
	}()
	for {
		// Fill waits for the client, for as long as counted.Read lets it.
		if err := c.rd.Fill(); err != nil {
			c.lost(err)
			return
		}
		if err := c.serve(); err != nil {
			return
		}
		if !c.link.Calmed(c.said) || !c.out.park() {
			continue
		}
		// Enter returns when the loop has given the connection back, or has ended it.
		err := c.link.Enter()
		c.out.unpark()
		if err != nil {
			if err == c.filled {
				c.lost(err)
			}
			return
		}
	}
}

// lost says last words to a client whose input cannot be taken.
// An end of input, a reset and an idle client are no reason to say anything.
func (c *conn) lost(err error) {
	var p *resp.ProtocolError
	var w resp.Writer
	switch {
	case errors.As(err, &p):
		c.g.m.protocolErrors.Add(1)
		if c.mute() {
			return
		}
		w.Error("ERR " + p.Error())
	case errors.Is(err, resp.ErrNoMemory):
		c.g.o.Logger.Warn("connection closed: out of buffer memory", "peer", c.remote)
		w.Error("ERR kvd: the gateway is out of buffer memory")
	case errors.Is(err, os.ErrDeadlineExceeded) && c.half.Load() != 0:
		c.lateCommand()
		return
	default:
		return
	}
	c.out.send(w.Bytes(), 0)
}

func (c *conn) lateCommand() {
	c.g.m.late.Add(1)
	c.g.o.Logger.Warn("connection closed: a command did not arrive in time", "peer", c.remote)
}

// slow is told that the client read too slowly.
func (c *conn) slow() {
	c.g.m.late.Add(1)
	c.g.o.Logger.Warn("connection closed: replies are not read", "peer", c.remote)
}

// flooded is told that the client left too many messages unread.
func (c *conn) flooded(pending int) {
	c.g.m.flooded.Add(1)
	c.g.o.Logger.Warn("connection closed: messages are not read", "peer", c.remote, "bytes", pending)
}

// fresh is the state of a new connection, and after RESET.
func (c *conn) fresh() {
	c.proto, c.reply = 2, replyOn
	c.seenP3.Store(false)
	c.use(0)
	c.tx.end(c)
	c.forgetWatched()
}

// use makes db the one that commands work on.
func (c *conn) use(db int) {
	c.db, c.in = db, &c.g.dbs[db]
	c.seenDB.Store(int32(db))
}

// serve performs what has been read. An error ends the connection.
// It is called on the connection's own goroutine only; a loop calls serveFrom.
func (c *conn) serve() error {
	args, err := c.rd.Next()
	return c.serveFrom(args, err, time.Now())
}

// serveFrom is serve if Next has been called once already, for what came at that time.
// All commands that have come are one batch, unless something among them has to be performed in
// between. Their replies are sent together at the end, or earlier where they have become many.
// half remembers since when a part of a command has been waiting for the rest: from there on
// CommandTimeout counts.
func (c *conn) serveFrom(args [][]byte, err error, came time.Time) error {
	b := newBatch(c, came)
	defer b.free()
	defer c.box.Flush()
	c.begin(b.now)
	b.heed = c.g.heed.Load() // after active; see awaitCommands
	c.said = 0
	for ; err != resp.ErrIncomplete; args, err = c.rd.Next() {
		c.said++
		c.waited = 0
		if err != nil {
			if err := b.run(); err != nil {
				return err
			}
			c.push(&b.w, 0)
			c.endSkip(b)
			c.lost(err)
			return err
		}
		if err := c.dispatch(b, args); err != nil {
			c.push(&b.w, 0)
			return err
		}
	}
	b.found = c.asked && len(b.units) == 1 // else it was refused
	if err := b.run(); err != nil {
		return err
	}
	err = c.push(&b.w, 0)
	// Not b.now: its client was neither silent nor slow while it waited for the reply.
	now := time.Now().UnixMilli()
	if c.said > 0 { // the command that comes is another one
		c.waited = 0
	}
	switch half := c.half.Load(); {
	// A deadline for the rest of a command counts from when its first part was seen, however often more of it comes.
	case c.rd.Buffered() == 0 && half != 0:
		c.half.Store(0)
	case c.rd.Buffered() > 0 && (half == 0 || c.said > 0):
		c.half.Store(now)
	}
	c.active.Store(now)
	return err
}

// push sends what has been written. If paid is not 0, so many bytes of the share stand for
// it, and it is the output's from now on.
// The writer's buffer then serves again, if it has not grown beyond keepReply; one that has been
// paid for is gone, since it may be in the queue for as long as its client does not read.
// It may wait, for as long as the client has more to read than Options.OutputBytes; in a loop the connection leaves it
// first.
func (c *conn) push(w *resp.Writer, paid int64) error {
	err := c.out.send(w.Bytes(), paid)
	if paid > 0 {
		w.Reset(0)
	} else {
		w.Reset(keepReply)
	}
	return err
}

// mute reports whether the reply to the command at hand is not to be sent.
func (c *conn) mute() bool { return c.reply == replyOff || c.reply == replySkip }

// endSkip ends what CLIENT REPLY SKIP has said if an empty command has come since: to Redis that
// is the command whose reply is skipped. Commands of the batch came before.
func (c *conn) endSkip(b *batch) {
	if c.reply == replySkip && len(b.entries)+len(b.scripts) == 0 && c.rd.Empty != c.skipFrom {
		c.reply = replyOn
	}
}

// replied ends a command whose reply starts at byte start of w.
// streamed says that a part of the reply has gone out already, which cannot be taken back:
// CLIENT REPLY is looked at before that.
// Replies are cut off behind the fact rather than not written: the command has been performed either way, and what it
// replied says whether it failed.
func (c *conn) replied(w *resp.Writer, start int, streamed bool) error {
	switch c.reply {
	case replyOff:
		if !streamed {
			w.Truncate(start)
		}
	case replySkip:
		if !streamed {
			w.Truncate(start)
		}
		c.reply = replyOn
	case replySkipNext:
		c.reply, c.skipFrom = replySkip, c.rd.Empty
	}
	if w.Len() >= sendFrom {
		return c.push(w, 0)
	}
	return nil
}

// dispatch performs a command or adds it to the batch.
// Commands on keys join the batch. All others must see what those before them have done, and
// must not be seen by them, so the batch is performed first. An error ends the connection;
// errors that the client is told of are replies.
// The order of the steps is the contract: a pause holds a command up before its rights are looked at for the last time;
// Drain refuses it before it is noted as a use of a key; and a command that joins no batch runs when all before it have
// been performed.
func (c *conn) dispatch(b *batch, args [][]byte) error {
	cmd, bad := c.lookup(args)
	if cmd == unknown && (values.Fold(args[0], "post") || values.Fold(args[0], "host:")) {
		// As Redis does: a web page can make a browser send commands in the body of a request.
		c.g.m.httpRequests.Add(1)
		c.g.o.Logger.Warn("connection closed: it speaks HTTP, as a browser does that a web page abuses", "peer",
			c.remote)
		if err := b.run(); err != nil {
			return err
		}
		return errClosing
	}
	if cmd != c.last.Load() {
		c.last.Store(cmd)
	}
	c.endSkip(b)
	// EXEC may set it.
	if (c.caching != live.CachingAsUsual || cmd.batch != nil) && !strings.HasPrefix(cmd.Name, "client|") {
		defer func() {
			if !c.tx.queueing { // MULTI passes it on to EXEC
				c.caching = live.CachingAsUsual
			}
		}()
	}
	if bad == nil && b.heed&heedPause != 0 {
		if err := c.awaitUnpause(b, cmd, args); err != nil {
			return err
		}
		cmd, bad = c.lookup(args)
	}
	if c.g.stopping.Load() || c.finishing.Load() {
		bad = errStopping
	}
	if bad == nil && !c.tx.queueing {
		c.countHot(cmd, args)
	}
	if bad == nil && !c.tx.queueing && b.joins(cmd, args) {
		return b.addScript(cmd, args)
	}
	if len(b.scripts) > 0 {
		if err := b.run(); err != nil {
			return err
		}
		b.tick()
	}
	switch {
	case bad != nil || c.tx.queueing && !cmd.Is(spec.AtOnce):
		return c.queue(b, cmd, args, bad)
	case cmd.key != nil:
		return b.admit(cmd, args)
	}
	if err := b.run(); err != nil {
		return err
	}
	b.tick()
	if !cmd.Is(spec.Swift) {
		c.link.Waits()
	}
	w := &b.w
	w.Proto = c.proto
	if cmd.block != nil { // the replies before it need not wait
		if err := c.push(w, 0); err != nil {
			return err
		}
	}
	start, errs := w.Len(), w.Errors
	switch {
	case cmd.block != nil:
		worked, err := c.performBlocking(cmd, w, args)
		if err != nil {
			return err
		}
		b.tick()
		b.start = b.start.Add(-worked)
	case cmd.keys != nil:
		c.performSeveral(cmd, w, args, b.start)
	case cmd.batch != nil:
		if err := cmd.batch(c, b, args); err != nil {
			return err
		}
	default:
		values.WriteRefusal(w, cmd.conn(c, w, args))
	}
	w.Proto = c.proto
	b.heed = c.g.heed.Load() // it may have changed that, or taken long
	x := ended{cmd: cmd, args: args, start: start, errs: errs, took: time.Since(b.start),
		shown: b.heed&heedMonitor == 0 || cmd.keys != nil} // what is staged shows itself
	if err := b.finish(&x); err != nil {
		return err
	}
	b.countAlike()
	if c.closing {
		return errClosing
	}
	return nil
}

// queue is for commands that are not performed now: MULTI has been said, or they
// are wrong.
// A refused command is answered at once, and makes EXEC fail, as in Redis. Even then the reply
// waits its turn behind those of the batch.
func (c *conn) queue(b *batch, cmd *command, args [][]byte, why error) error {
	if why == nil && cmd.Is(spec.InSteps) {
		why = refusal("ERR kvd: '" + cmd.Name + "' cannot be done in one step with others, so it is not allowed in a " +
			"transaction")
	}
	if why == nil && !c.tx.push(c, cmd, args) {
		why = refusal("ERR kvd: transaction of more than " + units.Bytes(c.g.queryBytes()))
	}
	if why != nil {
		if c.tx.queueing {
			c.tx.broken = true
		}
		if cmd.batch != nil && why != errStopping { // an EXEC that is refused ends the transaction all the same
			why = refusal("EXECABORT Transaction discarded because of: " + strings.TrimPrefix(why.Error(), "ERR "))
			c.tx.end(c)
			c.forgetWatched()
		}
		b.fail(cmd, why)
		return nil
	}
	if err := b.run(); err != nil {
		return err
	}
	if cmd.ID == spec.CmdSelect {
		c.tx.db = c.selected(c.tx.db, args)
	}
	start := b.w.Len()
	b.w.Simple("QUEUED")
	return c.replied(&b.w, start, false)
}

// lookup finds the command, or says why it is refused. cmd is never nil.
// The order of the checks is that of Redis's processCommand, since clients see which one comes
// first; in particular nobody learns before AUTH more than which commands exist.
// It performs nothing, and may be asked twice about one command. args has one element at least.
func (c *conn) lookup(args [][]byte) (cmd *command, err error) {
	if cmd = c.latest; cmd == nil || !values.Fold(args[0], cmd.Name) {
		cmd = find(args[0])
		c.latest = cmd
	}
	switch {
	case cmd == nil:
		cmd, err = unknown, unknownCommand(args)
	case cmd.sub != nil:
		if len(args) < 2 {
			if cmd.conn == nil {
				return cmd, wrongArgs(cmd)
			}
			break
		}
		sub := cmd.subcommand(args[1])
		if sub == nil {
			err = refusal("ERR unknown subcommand '" + values.Clip(args[1], 128) + "'. Try " +
				strings.ToUpper(cmd.Name) + " HELP.")
			cmd = unknown
			break
		}
		cmd = sub
	}
	if err == nil && cmd.mistaken(len(args)) {
		err = wrongArgs(cmd)
	}
	if err == nil && !cmd.Has(spec.FlagNoAuth) {
		if c.authed || c.admitted() {
			err = c.refusal(cmd, args)
		} else {
			err = refusal("NOAUTH Authentication required.")
		}
	}
	if err == nil && c.proto == 2 && c.listener.Listens() && !cmd.Is(spec.WhileListening) {
		err = refusal("ERR Can't execute '" + cmd.Name + "': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / " +
			"RESET are allowed in this context")
	}
	if err == nil && cmd.conn == nil && cmd.batch == nil && cmd.key == nil && cmd.keys == nil {
		err = cmd.notHere()
	}
	return cmd, err
}

// refusal is what a command says that is not performed, in Redis's words.
type refusal = args.Refusal

func wrongArgs(cmd *command) refusal {
	return refusal("ERR wrong number of arguments for '" + cmd.Name + "' command")
}

// unknownCommand repeats the client's words, as Redis does, but no more than 128 bytes of them:
// a reply must not become long because a request was.
func unknownCommand(args [][]byte) refusal {
	var s strings.Builder
	for _, a := range args[1:] {
		if s.Len() >= 128 {
			break
		}
		s.WriteString("'" + values.Clip(a, 128-s.Len()) + "' ")
	}
	return refusal("ERR unknown command '" + values.Clip(args[0], 128) + "', with args beginning with: " + s.String())
}
