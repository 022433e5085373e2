package gateway

import (
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// calmUnits is for how many keys a loop has time.
// A batch of more keys leaves the loop first (Link.Waits), since the loop's other connections would wait for all of it.
const calmUnits = 64

var _ loop.Conn = (*conn)(nil)

// Link, and what follows, is as in loop.Conn.
func (c *conn) Link() *loop.Link { return &c.link }

// Moved drops the buffer for lookups on the way, since a connection that left a loop may not
// need it for long. In a loop output writes through the Link.
// fd says only whether the connection is in a loop now: it is the Link that reads and writes there.
func (c *conn) Moved(fd int) {
	c.into = nil
	if fd < 0 {
		c.over(c.link.Net())
		return
	}
	c.out.enterLoop()
}

// Read leaves a GET that comes by itself to the turn. More commands are a batch of their own. A batch of several
// commands shares its cache misses without others' help. In the turn, it would be out of the processor's nearest
// cache when its reply is due. alone says that nobody is there to share a lookup with. c.begin for a lone GET is
// before the lookup, so that Drain and CLIENT PAUSE see a command that is being performed.
func (c *conn) Read(alone bool) error {
	c.said, c.filled = 0, nil
	if err := c.rd.Fill(); err != nil {
		c.filled = err
		return err
	}
	args, err := c.rd.Next()
	if !alone && err == nil && c.rd.Buffered() == 0 && c.looksUp(args) {
		c.lone, c.came = args, time.Now()
		c.begin(c.came.UnixMilli())
		return nil
	}
	return c.serveFrom(args, err, time.Now())
}

// looksUp reports whether a command is a GET, and nothing speaks against it.
// A command that is refused, or queued by MULTI, must be dealt with in the order in which it came.
// A client that caches (CLIENT TRACKING) needs the version, which such a lookup does not ask for.
func (c *conn) looksUp(args [][]byte) bool {
	return len(args) == 2 && values.Fold(args[0], getCommand.Name) && c.authed && !c.tx.queueing &&
		c.listener.Tracking() == nil && badKey(c.in, args[1]) == nil && c.permitted(getCommand, args)
}

// Lookups is the GET that Read left, if it did.
// The loop gathers lookups of one store only, so it asks which one.
func (c *conn) Lookups() (store client.API, n, limit int) {
	if c.lone == nil {
		return nil, 0, 0
	}
	return c.in.api, 1, oneLimit
}

// Ask fills in the lookup. Its buffer is the connection's and not the loop's, since the value is
// there until the reply is written.
// Typed is not set: a collection is client.ErrWrongType then, and GET needs to know no more.
func (c *conn) Ask(ops []client.Op) {
	if c.into == nil {
		c.into = make([]byte, 0, 512)
	}
	ops[0].Kind, ops[0].Key, ops[0].Into = client.OpGet, c.in.stored(c.lone[1]), c.into
}

// Found keeps the buffer that the value needed, unless it is long, for the next lookup.
func (c *conn) Found(ops []client.Op) {
	c.found.Item, c.found.Err = ops[0].Item, ops[0].Err
	if n := cap(c.found.Item.Value); n > cap(c.into) && n <= keepInto {
		c.into = c.found.Item.Value[:0]
	}
	c.asked = true
}

// Finish performs the GET as any command. Its batch finds that the lookup has been made, or
// makes it if the loop had to stop it. serveFrom finds lone in the reader's buffer still,
// since nothing was read in between.
func (c *conn) Finish() (commands int, err error) {
	if c.lone != nil {
		err = c.serveFrom(c.lone, nil, c.came)
		c.lone, c.asked, c.found = nil, false, lookedUp{}
	}
	return c.said, err
}

// Tick ends connections that have said nothing, or half of a command, for too long.
// It may run beside the goroutine that serves the connection, so it uses atomic fields, and Kill, which ends what that
// waits for.
func (c *conn) Tick(now time.Time) {
	began := now.Add(-c.g.o.CommandTimeout).UnixMilli()
	idle := time.Duration(c.g.idle.Load())
	if half := c.half.Load(); half != 0 && half < began {
		c.lateCommand()
		c.link.Kill()
	} else if idle > 0 && !c.hears() && abs(c.active.Load()) < now.Add(-idle).UnixMilli() {
		c.link.Kill()
	}
}
