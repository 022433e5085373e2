package gateway

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// A batch is commands that a connection has sent already and that go to the store
// together: one client.Do for all of them. Those on one key make a unit, which is one
// operation of the store, so that they are atomic together and in order. Those on
// different keys take effect in any order, as those of different connections would.
// Life of a batch: newBatch takes one from a pool; admit makes entries and units of commands;
// run performs the units, writes the replies in the order of the entries, and makes the batch
// empty again; free gives it back. Batches are pooled rather than kept by connections, since
// their buffers are long and few connections are served at a time: a warm one is in the
// processor's cache.
type batch struct {
	c     *conn       // whose commands these are; nil in the pool
	now   int64       // Unix ms
	start time.Time   // when the commands came; tick moves it, and what took is counted from here
	w     resp.Writer // replies that have not been pushed
	// Until run nothing of the commands but copies of numbers is kept: args, names and values alias the reader's
	// buffer. The reader does not reuse it before the batch has been run.
	entries []entry // in the order of the commands
	units   []*unit // all[:n]
	all     []*unit
	ops     []client.Op  // of the units, kept for their memory
	seed    maphash.Seed // of hashOf
	table   []int32      // unit + 1 by hash of the key; 0: none
	heed    uint32       // of the gateway, when the batch was begun or what took long was over
	found   bool         // the only unit has been performed, in a turn of a loop: c.found
	writes  bool         // a unit does
	heavy   int64        // bytes of long arguments of writes
	held    int64        // bytes of the share that stand for what units keep and nobody uses again
	pooled  int64        // and for what does
	lookups [2]uint64    // misses and hits not counted yet
	// alike is a command that went well so often, and took so long each time: not counted yet, see finish.
	alike struct {
		cmd  *command
		n    uint64
		took time.Duration
	}

	// Either scripts wait or entries do, never both: dispatch and addScript run the others first, so that order is
	// kept.
	scripts []groupedScript // that wait, without entries; see scriptgroup.go
	group   group           // of them, while they run
	exec    execMemory

	// The command whose replies are being written; it may have come in several
	// batches.
	cur struct {
		start    int // in w
		errors   int // w.Errors then
		sum      int64
		failed   bool
		streamed bool     // part of it has been sent
		late     bool     // part of it was read while it was written
		args     [][]byte // of the first key, if it is on several; the others are behind them
	}
}

// entry is a command, or its share of one key.
// Entries of one unit are a list through next, in the order in which they came; entries of one
// command follow each other.
type entry struct {
	cmd *command
	// Of a command on several keys, args are the share of this key: its name, and what follows it up to the next.
	args        [][]byte
	unit        int32 // -1: none
	next        int32 // the unit's next entry; -1: none
	first, last bool  // of its command
	n           int   // first: keys of the command
	lo, hi      int   // its reply in unit.out
	count       int64
	refused     error       // the reply of one that goes nowhere
	change      exec.Change // of an update
}

// unit is what the batch does to one key.
// It is kept with its buffers from batch to batch; reset forgets what belongs to a client.
type unit struct {
	b           *batch            // which has it, for apply
	name        []byte            // as the client has it, without the database's prefix
	hash, slot  uint64            // in b.table
	kind        spec.Kind         // the least that does for all of its entries
	first, last int32             // entries
	cond        client.Cond       // of putIf
	value       []byte            // of put and putIf: an argument, not a copy
	expires     int64             // of put and putIf, Unix ms; 0: never
	got         uint64            // version read, or left by an update; 0: no such key
	k           values.Key        // the state that commands see; load fills it in
	out         resp.Writer       // replies of an update, see entry.lo
	outRoom     int               // bytes that out may have
	into        []byte            // where the value is read to
	frame       []byte            // where a long one is read to, to be the reply; see replyHead
	large       int               // of a read that is put off until its reply: bytes to read it to
	apply       client.UpdateFunc // b's u.change
	err         error             // not an answer, such as ErrNotFound
	stored      bool              // it was there, or was written or deleted
	track       bool              // the client caches what it reads
}

const (
	// maxEntries and maxUnits bound a batch, which bounds how long the first of its commands waits for the reply.
	// firstWindow is how many keys a new connection's batches may have, before anything is known of the length of its
	// values; see adapt.
	maxEntries  = 4096
	maxUnits    = 1024
	firstWindow = 32
	// A batch should not read more than this, in bytes; see conn.window.
	batchBytes = 8 << 20
	keepInto   = 4 << 10 // of a pooled unit's buffers
	// Replies are sent once there are sendFrom bytes of them. A buffer that has grown on the way there
	// serves again, since making it anew for each batch cost more than the lookups.
	sendFrom, keepReply = 64 << 10, 128 << 10
	streamFrom          = 256 << 10
	// A lone operation may read so much, and each of several so much, without taking memory
	// of the connection's share first. Without taking any, freeUnits operations may read.
	oneLimit, eachLimit = loop.LimitOne, loop.LimitEach
	freeUnits           = 4
	// readCost is how often an operation may have in memory what it reads, and writeCost what
	// it writes: registered, as an item, changed, and as a reply.
	readCost, writeCost = 3, 3
	// putCost is the same for what is written without a look at what is there.
	putCost = 1
	// framing is how many bytes of a reply a byte of an encoded collection makes, at most: short elements have more
	// bytes around them there.
	framing = 5
	// largeTries is how often an operation is tried again with more memory, while others make the
	// value longer.
	largeTries = 8
	tableSize  = 256 // at first, so that few keys use few cache lines; a power of two
)

// The hash of keys is seeded, so that no client can choose keys that collide.
var batches = sync.Pool{New: func() any {
	return &batch{seed: maphash.MakeSeed(), table: make([]int32, tableSize)}
}}

// newBatch takes an empty batch for commands that came at that time. All of them see the same
// time, so that of two commands on one key the second never sees an earlier one.
func newBatch(c *conn, now time.Time) *batch {
	b := batches.Get().(*batch)
	b.c, b.w.Proto, b.w.Errors = c, c.proto, 0
	b.start, b.now = now, now.UnixMilli()
	return b
}

// free gives the batch back, less what a rare large one has left in it: the pool must not grow
// to the largest batch that ever was, times processors.
func (b *batch) free() {
	b.reset()
	b.countAlike()
	b.w.Reset(keepReply)
	b.c, b.cur.args = nil, nil
	if cap(b.entries) > maxEntries {
		b.entries = nil
	}
	if len(b.all) > maxUnits {
		clear(b.all[maxUnits:])
		b.all = b.all[:maxUnits]
		b.ops = nil
		b.table = make([]int32, tableSize)
	}
	batches.Put(b)
}

// tick moves the batch's time on, where a part of what came together has taken its time.
func (b *batch) tick() {
	b.start = time.Now()
	b.now = b.start.UnixMilli()
}

// reset forgets entries and units.
// Arguments, keys and values are dropped, so that a pooled batch keeps no reader's buffer alive,
// and shows nothing of one client to another.
func (b *batch) reset() {
	for _, u := range b.units {
		b.table[u.slot] = 0
		u.name, u.value, u.k.Value, u.err = nil, nil, nil, nil
		u.out.Reset(keepInto)
		if cap(u.into) > keepInto {
			u.into = nil
		}
		if cap(u.k.Own) > keepInto {
			u.k.Own = nil
		}
		u.large = 0
	}
	b.table = b.table[:tableSize]
	b.giveBack()
	b.heavy, b.found, b.writes = 0, false, false
	clear(b.ops)
	clear(b.entries)
	b.units, b.entries, b.ops = b.units[:0], b.entries[:0], b.ops[:0]
}

// fail adds a command that is answered with an error and goes nowhere.
// It is an entry nevertheless, since replies come in the order of commands.
func (b *batch) fail(cmd *command, why error) {
	b.entries = append(b.entries, entry{cmd: cmd, unit: -1, next: -1, first: true, last: true, refused: why})
}

// refuse is fail for a command that begins and finds its arguments wrong, which MONITOR shows, too.
func (b *batch) refuse(cmd *command, args [][]byte, why error) {
	b.fail(cmd, why)
	b.entries[len(b.entries)-1].args = args
}

// unitOf finds or makes the unit of a key.
// A single key, as most connections name at a time, and the same one again are found
// without hashing. The table is open addressing with linear probing, at most half full.
// The first return value is the unit's place in b.units. name is kept, and must stay as it is until reset.
func (b *batch) unitOf(name []byte) (int32, *unit) {
	n := len(b.units)
	if n == 0 {
		return 0, b.newUnit(name)
	}
	if n == 1 && bytes.Equal(b.units[0].name, name) {
		return 0, b.units[0]
	}
	if n == 1 {
		b.enterUnit(0, b.hashOf(b.units[0].name))
	}
	if 2*n >= len(b.table) {
		b.grow()
	}
	h := b.hashOf(name)
	mask := uint64(len(b.table) - 1)
	for i := h & mask; b.table[i] != 0; i = (i + 1) & mask {
		if u := b.units[b.table[i]-1]; u.hash == h && bytes.Equal(u.name, name) {
			return b.table[i] - 1, u
		}
	}
	u := b.newUnit(name)
	b.enterUnit(int32(n), h)
	return int32(n), u
}

// hashOf need not be that of the store: it lives as long as the batch.
func (b *batch) hashOf(name []byte) uint64 { return maphash.Bytes(b.seed, name) }

func (b *batch) enterUnit(i int32, h uint64) {
	u := b.units[i]
	mask := uint64(len(b.table) - 1)
	at := h & mask
	for b.table[at] != 0 {
		at = (at + 1) & mask
	}
	b.table[at] = i + 1
	u.hash, u.slot = h, at
}

// grow makes room in the table, whose units have all been entered.
// Units know their place in the table, so clearing costs what is in it, and not its length.
func (b *batch) grow() {
	for _, u := range b.units {
		b.table[u.slot] = 0
	}
	if n := 2 * len(b.table); n <= cap(b.table) {
		b.table = b.table[:n] // what is behind a table's end is all 0
	} else {
		b.table = make([]int32, n)
	}
	for i, u := range b.units {
		b.enterUnit(int32(i), u.hash)
	}
}

// newUnit takes the next unit, with the buffers that it had for another key. They lie behind
// pointers, since entries and the store hold on to them while the batch grows.
func (b *batch) newUnit(name []byte) *unit {
	n := len(b.units)
	if n == len(b.all) {
		u := &unit{}
		u.apply = u.change
		b.all = append(b.all, u)
	}
	u := b.all[n]
	b.units = b.all[:n+1]
	u.b, u.name, u.kind, u.first, u.last, u.slot = b, name, 0, -1, -1, 0
	u.large, u.track = 0, false
	u.k.Now, u.k.MaxValue, u.k.Limits = b.now, b.c.g.o.MaxValueBytes, &b.c.g.encodings
	return u
}

// add gives a command, or one key's share of it, to the key's unit.
// A batch of more keys than the window is performed first: the window is what keeps values that
// are read together within batchBytes (see adapt).
func (b *batch) add(e entry, name []byte, want spec.Kind) (*unit, error) {
	if want == spec.ReadValue && b.c.tracksReads() {
		want = spec.Read // for the version
	}
	if len(b.units) >= b.c.window || len(b.entries) >= maxEntries {
		if err := b.run(); err != nil {
			return nil, err
		}
		b.tick()
	}
	i, u := b.unitOf(name)
	e.unit, e.next = i, -1
	at := int32(len(b.entries))
	b.entries = append(b.entries, e)
	if u.first < 0 {
		u.first, u.kind = at, want
	} else {
		b.entries[u.last].next = at
		switch {
		case u.kind <= spec.Read && want <= spec.Read:
			u.kind = max(u.kind, want)
		case u.kind != spec.PutValue || want != spec.PutValue:
			u.kind = spec.Update
		}
	}
	u.last = at
	if want <= spec.Read && b.c.tracksReads() {
		u.track = true
	}
	if want >= spec.PutValue {
		b.writes = true
		for _, a := range e.args {
			if len(a) > eachLimit {
				b.heavy += int64(len(a))
			}
		}
	}
	return u, nil
}

// admit adds a command on keys.
// All keys of a command are checked before any becomes an entry: a command is refused as a
// whole, or not at all.
// An error is that of sending the replies of a batch that was full, and ends the connection. A refusal is an entry.
// Commands of several keys each become as many entries as they have keys, even if a key is named twice.
func (b *batch) admit(cmd *command, args [][]byte) error {
	switch cmd.Fold {
	case spec.Single:
		name := args[cmd.First]
		if err := badKey(b.c.in, name); err != nil {
			b.refuse(cmd, args, err)
			return nil
		}
		return b.admitOne(cmd, args, name)
	case spec.SetAll:
		if len(args)%2 == 0 {
			b.refuse(cmd, args, wrongArgs(cmd))
			return nil
		}
	}
	step := cmd.Step
	for i := 1; i < len(args); i += step {
		if err := badKey(b.c.in, args[i]); err != nil {
			b.refuse(cmd, args, err)
			return nil
		}
	}
	n := (len(args) - 1) / step
	for i := range n {
		a := args[1+i*step:][:step]
		want := cmd.Kind // put of MSET, and remove of DEL and UNLINK, whose answer says whether the key was there
		if want == spec.PutValue && b.c.g.notify.Load()&uint32(values.OnNew) != 0 {
			want = spec.Update // which tells whether the key was there
		}
		e := entry{cmd: cmd, args: a, first: i == 0, last: i == n-1, n: n}
		u, err := b.add(e, a[0], want)
		if err != nil {
			return err
		}
		if want == spec.PutValue {
			u.value, u.expires = a[1], 0
		}
	}
	return nil
}

// admitOne finds what the store can do in one round trip.
func (b *batch) admitOne(cmd *command, args [][]byte, name []byte) error {
	p, err := putOf(cmd, args, b.now)
	if err != nil {
		b.refuse(cmd, args, err)
		return nil
	}
	if p.kind == spec.PutValue && b.c.g.notify.Load()&uint32(values.OnNew) != 0 {
		p.kind = spec.Update // which tells whether the key was there
	}
	u, err := b.add(entry{cmd: cmd, args: args, first: true, last: true, n: 1}, name, p.kind)
	if err == nil && p.kind >= spec.PutValue {
		u.value, u.expires, u.cond = p.value, p.at, p.cond
	}
	return err
}

// put is what a command asks of the store, if it is one that most often writes without a look at what was there.
type put struct {
	kind  spec.Kind // the command's own, if it is no such one
	value []byte
	cond  client.Cond
	at    int64 // of expiry, Unix ms; 0: never
}

// putOf reads the arguments of such a command. A write that expires at once is none: as in Redis it deletes, and then
// what was there counts.
func putOf(cmd *command, args [][]byte, now int64) (p put, err error) {
	p.kind = cmd.Kind
	switch cmd.Put {
	case spec.PutSet:
		p.value, p.kind = args[2], spec.PutValue
		if len(args) > 3 {
			var a values.SetArgs
			a, err = values.ParseSet(cmd.Name, args[3:], now, false)
			p.at = a.Expires
			switch {
			case a.Get || a.KeepTTL:
				p.kind = spec.Update
			case a.NX:
				p.kind, p.cond = spec.PutIf, client.IfAbsent
			case a.XX:
				p.kind, p.cond = spec.PutIf, client.IfPresent
			}
		}
	case spec.PutSetnx:
		p.value, p.cond = args[2], client.IfAbsent
	case spec.PutPsetex, spec.PutSetex:
		p.value = args[3]
		p.at, err = values.ExpireAt(cmd.Name, args[2], cmd.Put == spec.PutSetex, false, now)
	}
	if p.at != 0 && p.at <= now {
		p.kind = spec.Update // which makes a delete of it
	}
	return p, err
}

var (
	// errUnchanged: the commands of an update changed nothing, so that there is nothing to write. It is an answer.
	errUnchanged = errors.New("unchanged")
)

// run performs the batch and writes its replies. Its error is that of sending.
// Errors of the store are replies.
func (b *batch) run() error {
	if len(b.scripts) > 0 {
		return b.runScripts()
	}
	if len(b.entries) == 0 {
		return nil
	}
	b.perform()
	err := b.replies()
	b.reset()
	return err
}

// perform asks the store. Memory is taken before: for each unit of a large batch what a record
// may be that needs no question, and for long arguments what the store makes of them. If there
// is none to be had, every unit fails alike, and the client is told for certain that nothing
// happened.
func (b *batch) perform() {
	n := len(b.units)
	if n > calmUnits {
		b.c.link.Waits()
	}
	if n == 0 {
		return
	}
	b.giveBack() // if it is performed again
	ctx, limit := b.c.ctx, oneLimit
	long := b.longNames()
	if n > freeUnits || b.heavy > 0 || long > 0 {
		need := writeCost*b.heavy + long
		for _, u := range b.units {
			if (u.kind == spec.PutValue || u.kind == spec.PutIf) && len(u.value) > eachLimit {
				need -= (writeCost - putCost) * int64(len(u.value)) // it is not copied
			}
		}
		if n > freeUnits {
			ctx, limit = b.c.smallCtx, eachLimit
			need += int64(n) * 2 * eachLimit
		}
		if err := b.c.take(need); err != nil {
			for _, u := range b.units {
				u.takeAnswer(client.Item{}, err)
			}
			return
		}
		b.pooled = need
	}
	for _, u := range b.units {
		u.k.Room, u.outRoom = limit, limit
	}
	b.beginTracking()
	switch {
	case b.found:
		b.units[0].takeAnswer(b.c.found.Item, b.c.found.Err)
	case n == 1:
		b.performOne(ctx, b.units[0])
	default:
		b.performUnits(ctx, b.units)
	}
	b.c.adapt(b)
	for _, u := range b.units {
		if u.err != nil {
			b.performLarge(u)
		}
	}
	b.announce()
	b.seen()
	b.endTracking()
	if b.writes || b.c.g.notify.Load()&uint32(values.OnMiss) != 0 {
		b.tellOfWrites()
	}
}

// giveBack gives back what stands for the units' memory.
// held stands for buffers that have gone, and pooled for such as are used again; the Budget
// counts them differently.
func (b *batch) giveBack() {
	b.c.share.Drop(b.held)
	b.c.share.Give(b.pooled)
	b.held, b.pooled = 0, 0
}

// adapt makes the window, in keys, such that a batch reads little at a time: nobody
// knows how long values are until they have been read.
// It falls at once, in proportion, and grows by doubling, as long as batches fill half of it.
func (c *conn) adapt(b *batch) {
	n := 0
	for _, u := range b.units {
		n += len(u.k.Value)
	}
	if n > batchBytes {
		c.window = max(1, len(b.units)*batchBytes/n)
	} else if c.window < maxUnits && len(b.units) >= c.window/2 {
		c.window = min(2*c.window, maxUnits)
	}
}

// performOne is performUnits for one unit, by the methods that cost least.
// The store has methods for the common operations that make no Op and no slice of them.
func (b *batch) performOne(ctx context.Context, u *unit) {
	api, name := b.c.in.api, b.c.in.stored(u.name)
	switch {
	case u.kind == spec.Presence:
		in, err := api.Exists(ctx, name)
		u.takeAnswer(client.Item{Version: in.Version, Expires: in.Expires}, err)
	case u.kind == spec.ReadValue:
		n, err := getInto(ctx, api, name, &u.into)
		u.takeAnswer(client.Item{Value: u.into[:n]}, err)
	case u.kind == spec.PutValue && u.expires == 0:
		_, err := api.Put(ctx, name, u.value, client.PutOptions{})
		u.takeAnswer(client.Item{}, err)
	case u.kind == spec.PutIf && u.cond == client.IfAbsent && u.expires == 0:
		_, err := api.PutIfAbsent(ctx, name, u.value, client.PutOptions{})
		u.takeAnswer(client.Item{}, err)
	case u.kind == spec.Remove:
		u.takeAnswer(client.Item{}, api.Delete(ctx, name))
	default:
		b.performUnits(ctx, []*unit{u})
	}
}

// performUnits fills in the operations, and takes their outcomes. A value is read to the unit's
// own buffer, which a longer value replaces, so that in the steady state nothing is allocated.
// The operations of b.ops are used again for every batch; clear in reset lets go of what they refer to. Do performs
// them in any order, and each has an outcome of its own: that one of them failed says nothing of the others.
func (b *batch) performUnits(ctx context.Context, units []*unit) {
	for i, u := range units {
		if i == len(b.ops) {
			b.ops = append(b.ops, client.Op{})
		}
		o := &b.ops[i]
		o.Key = b.c.in.stored(u.name)
		switch u.kind {
		case spec.Presence:
			o.Kind = client.OpExists
		case spec.ReadValue, spec.Read:
			if u.into == nil {
				u.into = make([]byte, 0, 512)
			}
			o.Kind, o.Into, o.Typed = client.OpGet, u.into, u.kind == spec.Read
		case spec.PutValue, spec.PutIf:
			o.Kind, o.Value, o.Expires, o.Cond = client.OpPut, u.value, exec.TimeOf(u.expires), client.Always
			if u.kind == spec.PutIf {
				o.Cond = u.cond
			}
		case spec.Remove:
			o.Kind = client.OpDelete
		default:
			o.Kind, o.Update, o.Typed = client.OpUpdate, u.apply, true
		}
	}
	b.c.in.api.Do(ctx, b.ops[:len(units)])
	for i, u := range units {
		o := &b.ops[i]
		if o.Kind == client.OpGet && cap(o.Item.Value) > cap(u.into) {
			u.into = o.Item.Value
		}
		u.takeAnswer(o.Item, o.Err)
	}
}

// takeAnswer takes the store's answer.
// That there is no such key, or that there is one, is an answer and not an error: commands say
// it in their own ways.
// u.err is left for what no command has words for. Whether it happened is for storeError to say: only
// client.ErrUnknownOutcome may have.
func (u *unit) takeAnswer(it client.Item, err error) {
	u.stored = err == nil
	switch u.kind {
	case spec.Presence, spec.ReadValue, spec.Read:
		if u.got = it.Version; errors.Is(err, client.ErrNotFound) {
			it, u.got, u.stored, err = client.Item{}, 0, false, nil
		}
		if errors.Is(err, client.ErrWrongType) { // of a readValue, whose commands need no more than that
			it, u.stored, err = client.Item{Type: values.Unread}, true, nil
		}
		u.load(it, u.stored)
	case spec.PutIf:
		if errors.Is(err, client.ErrExists) || errors.Is(err, client.ErrNotFound) {
			err = nil
		}
	case spec.Remove:
		if errors.Is(err, client.ErrNotFound) {
			err = nil
		}
	case spec.Update:
		if u.got = it.Version; errors.Is(err, errUnchanged) {
			err = nil
		}
	}
	u.err = err
}

// replies writes what the entries' commands reply, in order.
// Replies beyond streamFrom are sent before the command is over, since an MGET can be longer than what a
// connection may hold; from there on CLIENT REPLY and errors cannot take them back.
// The time that a command took is that of its whole batch, since they share the round trips.
func (b *batch) replies() error {
	m := &b.c.g.m
	took := time.Since(b.start)
	for i := range b.entries {
		e := &b.entries[i]
		if err := b.reply(e); err != nil {
			return err
		}
		if !e.last {
			if b.w.Len() > streamFrom && !b.c.mute() {
				b.cur.streamed = true
				if err := b.c.push(&b.w, 0); err != nil {
					return err
				}
			}
			continue
		}
		x := ended{cmd: e.cmd, args: e.args, start: b.cur.start, errs: b.cur.errors, took: b.tookFrom(took),
			refused: e.refused != nil, shown: b.heed&heedMonitor == 0, streamed: b.cur.streamed}
		if e.unit >= 0 && e.cmd.Fold != spec.Single {
			x.args, x.nameless = b.cur.args[:e.n*len(e.args)], true
		}
		if err := b.finish(&x); err != nil {
			return err
		}
	}
	b.countAlike()
	m.batch(len(b.entries))
	m.noteLookups(b.lookups)
	b.lookups = [2]uint64{}
	return nil
}

// reply writes an entry's reply, the command's head before its first one. A command of which one
// key failed replies with that error alone, which is why it is remembered in cur.
func (b *batch) reply(e *entry) error {
	w, cur := &b.w, &b.cur
	if e.first {
		cur.start, cur.errors, cur.sum, cur.failed, cur.streamed, cur.late = w.Len(), w.Errors, 0, false, false, false
		if e.cmd.Fold != spec.Single {
			cur.args = e.args
		}
		if e.cmd.Fold == spec.List && e.unit >= 0 {
			w.Array(e.n)
		}
	}
	if e.unit < 0 {
		values.WriteRefusal(w, e.refused)
		return nil
	}
	u := b.units[e.unit]
	if cur.failed || u.large > 0 && b.c.mute() {
		return nil
	}
	if u.large > 0 {
		paid, give := b.readLarge(e, u)
		cur.late = true
		defer give()
		if b.framed(u) {
			return b.replyFramed(e, u)
		}
		b.tell(e, u)
		if w.Len() > sendFrom {
			cur.streamed = true
			return b.c.push(w, paid)
		}
		b.c.share.Drop(paid)
		return nil
	}
	b.tell(e, u)
	return nil
}

// tell writes an entry's reply, or its part of one.
// Reads run their command now, on the value that was found; an update has run it already,
// perhaps several times, and what counts is in the unit's out.
func (b *batch) tell(e *entry, u *unit) {
	w, cur := &b.w, &b.cur
	if u.err != nil {
		if !cur.streamed {
			cur.failed = true
			w.Truncate(cur.start)
		}
		w.Error(b.c.g.storeError(u.err))
		return
	}
	k := &u.k
	switch u.kind {
	case spec.Presence, spec.ReadValue, spec.Read:
		k.Count = 0
		values.WriteRefusal(w, e.cmd.key(k, e.args, w))
		cur.sum += k.Count
		if e.cmd.Kind.Looks() {
			b.lookups[values.Bit(k.Present)]++
		}
	case spec.PutValue:
		if e.cmd.Fold == spec.Single {
			w.OK()
		}
	case spec.PutIf:
		switch {
		case e.cmd.Put == spec.PutSetnx:
			w.Int(values.Bit(u.stored))
		case u.stored:
			w.OK()
		default:
			w.Null()
		}
	case spec.Remove:
		cur.sum += values.Bit(u.stored)
	case spec.Update:
		w.Raw(u.out.Bytes()[e.lo:e.hi])
		if e.hi > e.lo && u.out.Bytes()[e.lo] == '-' {
			w.Errors++
		}
		cur.sum += e.count
	}
	if e.last {
		switch e.cmd.Fold {
		case spec.Sum:
			w.Int(cur.sum)
		case spec.SetAll:
			w.OK()
		}
	}
}
