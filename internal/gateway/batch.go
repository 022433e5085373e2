package gateway

import (
	"bytes"
	"context"
	"errors"
	"hash/maphash"
	"io"
	"strconv"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/resp"
)

// A batch is commands that a connection has sent already and that go to the store
// together: one client.Do for all of them. Those on one key make a unit, which is one
// operation of the store, so that they are atomic together and in order. Those on
// different keys take effect in any order, as those of different connections would.
type batch struct {
	c       *conn
	now     int64 // Unix ms
	start   time.Time
	w       resp.Writer
	entries []entry
	units   []*unit // all[:n]
	all     []*unit
	ops     []client.Op
	seed    maphash.Seed
	table   []int32   // unit + 1 by hash of the key; 0: none
	hold    bool      // EXEC: nothing runs until all of it is here
	lookups [2]uint64 // misses and hits not counted yet

	// The command whose replies are being written; it may have come in several
	// batches.
	cur struct {
		start    int // in w
		errors   int // w.Errors then
		sum      int64
		failed   bool
		streamed bool // part of it has been sent
	}
}

// entry is a command, or its share of one key.
type entry struct {
	cmd         *command
	args        [][]byte
	unit        int32 // -1: none
	next        int32 // the unit's next entry; -1: none
	first, last bool  // of its command
	n           int   // first: keys of the command
	lo, hi      int   // its reply in unit.out
	count       int64
	text        string // the reply, an error, of one that goes nowhere
}

type kind uint8

const (
	readValue kind = 1 + iota // a Get of nothing but the value
	read
	put    // replies do not depend on what was there
	putIf  // one entry
	remove // one entry
	update
)

// unit is what the batch does to one key.
type unit struct {
	b           *batch
	name        []byte
	hash, slot  uint64 // in b.table
	kind        kind
	first, last int32 // entries
	cond        client.Cond
	value       []byte
	expires     int64
	watched     bool
	version     uint64 // watched
	got         uint64 // version read; 0: no such key
	k           key
	out         resp.Writer
	into        []byte
	apply       client.UpdateFunc // b's u.change
	err         error
	stored      bool
}

const (
	maxEntries  = 4096
	maxUnits    = 1024
	firstWindow = 32
	// A batch should not read more than this, in bytes; see conn.window.
	batchBytes = 8 << 20
	keepInto   = 4 << 10 // of a pooled unit's buffers
	keepReply  = 64 << 10
	streamFrom = 1 << 20
	tableSize  = 4096 // power of two, over twice maxUnits
)

var batches = sync.Pool{New: func() any {
	return &batch{seed: maphash.MakeSeed(), table: make([]int32, tableSize)}
}}

func newBatch(c *conn) *batch {
	b := batches.Get().(*batch)
	b.c, b.w.Proto, b.w.Errors = c, c.proto, 0
	b.tick()
	return b
}

func (b *batch) free() {
	b.reset()
	b.w.Reset(keepReply)
	b.c = nil
	b.hold = false
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

func (b *batch) tick() {
	b.start = time.Now()
	b.now = b.start.UnixMilli()
}

// reset forgets entries and units.
func (b *batch) reset() {
	for _, u := range b.units {
		b.table[u.slot] = 0
		u.name, u.value, u.k.value, u.err, u.watched = nil, nil, nil, nil, false
		u.out.Reset(keepInto)
		if cap(u.into) > keepInto {
			u.into = nil
		}
		if cap(u.k.own) > keepInto {
			u.k.own = nil
		}
	}
	clear(b.ops)
	clear(b.entries)
	b.units, b.entries, b.ops = b.units[:0], b.entries[:0], b.ops[:0]
}

// fail adds a command that is answered with an error and goes nowhere.
func (b *batch) fail(cmd *command, text string) {
	b.entries = append(b.entries, entry{cmd: cmd, unit: -1, next: -1, first: true, last: true, text: text})
}

// unitOf finds or makes the unit of a key.
func (b *batch) unitOf(name []byte) (int32, *unit) {
	n := len(b.units)
	if n == 0 {
		return 0, b.newUnit(name)
	}
	if n == 1 && bytes.Equal(b.units[0].name, name) {
		return 0, b.units[0]
	}
	if n == 1 {
		b.enter(0)
	}
	if 2*n >= len(b.table) {
		b.table = make([]int32, 2*len(b.table))
		for i := range b.units {
			b.enter(int32(i))
		}
	}
	h := maphash.Bytes(b.seed, name)
	mask := uint64(len(b.table) - 1)
	for i := h & mask; b.table[i] != 0; i = (i + 1) & mask {
		if u := b.units[b.table[i]-1]; u.hash == h && bytes.Equal(u.name, name) {
			return b.table[i] - 1, u
		}
	}
	u := b.newUnit(name)
	b.enter(int32(n))
	return int32(n), u
}

// enter puts unit i in the table.
func (b *batch) enter(i int32) {
	u := b.units[i]
	u.hash = maphash.Bytes(b.seed, u.name)
	mask := uint64(len(b.table) - 1)
	at := u.hash & mask
	for b.table[at] != 0 {
		at = (at + 1) & mask
	}
	b.table[at] = i + 1
	u.slot = at
}

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
	u.k.now, u.k.maxValue = b.now, b.c.g.o.MaxValueBytes
	return u
}

// add gives a command, or one key's share of it, to the key's unit.
func (b *batch) add(e entry, name []byte, want kind) (*unit, error) {
	if !b.hold && (len(b.units) >= b.c.window || len(b.entries) >= maxEntries) {
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
		case u.kind <= read && want <= read:
			u.kind = max(u.kind, want)
		case u.kind != put || want != put:
			u.kind = update
		}
	}
	u.last = at
	return u, nil
}

// admit adds a command on keys.
func (b *batch) admit(cmd *command, args [][]byte) error {
	switch cmd.fold {
	case single:
		name := args[cmd.first]
		if bad := badKey(name); bad != "" {
			b.fail(cmd, bad)
			return nil
		}
		return b.admitOne(cmd, args, name)
	case setAll:
		if len(args)%2 == 0 {
			b.fail(cmd, wrongArgs(cmd))
			return nil
		}
	}
	step := cmd.step
	for i := 1; i < len(args); i += step {
		if bad := badKey(args[i]); bad != "" {
			b.fail(cmd, bad)
			return nil
		}
	}
	n := (len(args) - 1) / step
	for i := range n {
		a := args[1+i*step:][:step]
		want := cmd.kind
		e := entry{cmd: cmd, args: a, first: i == 0, last: i == n-1, n: n}
		u, err := b.add(e, a[0], want)
		if err != nil {
			return err
		}
		if want == put {
			u.value, u.expires = a[1], 0
		}
	}
	return nil
}

func (b *batch) admitOne(cmd *command, args [][]byte, name []byte) error {
	want := cmd.kind
	var value []byte
	var cond client.Cond
	var at int64
	var bad string
	switch cmd.special {
	case plainSet:
		value = args[2]
		want = put
		if len(args) > 3 {
			var a setArgs
			a, bad = parseSet("set", args[3:], b.now, false)
			at = a.expires
			switch {
			case a.get || a.keepTTL:
				want = update
			case a.nx:
				want, cond = putIf, client.IfAbsent
			case a.xx:
				want, cond = putIf, client.IfPresent
			}
		}
	case setNX:
		value, cond = args[2], client.IfAbsent
	case setFor1, setFor1000:
		value = args[3]
		at, bad = expireAt(cmd.name, args[2], cmd.special == setFor1000, false, b.now)
	}
	if bad != "" {
		b.fail(cmd, bad)
		return nil
	}
	if at != 0 && at <= b.now {
		want = update // which makes a delete of it
	}
	u, err := b.add(entry{cmd: cmd, args: args, first: true, last: true, n: 1}, name, want)
	if err == nil && want >= put {
		u.value, u.expires, u.cond = value, at, cond
	}
	return err
}

func badKey(name []byte) string {
	if len(name) == 0 || len(name) > client.MaxKeyLen {
		return "ERR kvd: key of " + strconv.Itoa(len(name)) + " bytes: keys have 1 to " + strconv.Itoa(client.MaxKeyLen)
	}
	return ""
}

var (
	errUnchanged = errors.New("unchanged")
	errWatched   = errors.New("watched key has changed")
)

// load sets the key's state.
func (u *unit) load(it client.Item, present bool) {
	k := &u.k
	k.present, k.value, k.flags, k.changed, k.expires = present, it.Value, it.Flags, false, 0
	if !it.Expires.IsZero() {
		k.expires = it.Expires.UnixMilli()
	}
}

// change is the unit as a client.UpdateFunc.
func (u *unit) change(cur client.Item, present bool) (client.Change, error) {
	if u.watched && cur.Version != u.version {
		return client.Change{}, errWatched
	}
	u.load(cur, present)
	k := &u.k
	u.out.Reset(keepInto)
	u.out.Proto = u.b.w.Proto
	for i := u.first; i >= 0; {
		e := &u.b.entries[i]
		k.count = 0
		e.lo = u.out.Len()
		e.cmd.key(k, e.args, &u.out)
		e.hi, e.count = u.out.Len(), k.count
		i = e.next
	}
	switch {
	case !k.changed, !k.present && !present:
		return client.Change{}, errUnchanged
	case !k.present:
		return client.Change{Delete: true}, nil
	}
	return client.Change{Value: k.value, Expires: timeOf(k.expires), Flags: k.flags}, nil
}

func timeOf(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms)
}

// run performs the batch and writes its replies. Its error is that of sending.
func (b *batch) run() error {
	if len(b.entries) == 0 {
		return nil
	}
	b.perform()
	err := b.replies()
	b.reset()
	return err
}

func (b *batch) perform() {
	if len(b.units) > calmUnits {
		b.c.waits()
	}
	if len(b.units) == 1 && !b.hold {
		b.performOne(b.units[0])
	} else if len(b.units) > 0 {
		b.performAll()
	}
	if !b.hold && len(b.units) > 0 {
		b.c.adapt(b)
	}
}

// adapt makes the window, in keys, such that a batch reads little at a time: nobody
// knows how long values are until they have been read.
func (c *conn) adapt(b *batch) {
	n := 0
	for _, u := range b.units {
		n += len(u.k.value)
	}
	if n > batchBytes {
		c.window = max(1, len(b.units)*batchBytes/n)
	} else if c.window < maxUnits && len(b.units) >= c.window/2 {
		c.window = min(2*c.window, maxUnits)
	}
}

// performOne is performAll for one unit, by the methods that cost least.
func (b *batch) performOne(u *unit) {
	ctx, api := b.c.ctx, b.c.api
	switch {
	case u.kind == readValue:
		n, err := getInto(ctx, api, u.name, &u.into)
		u.settle(client.Item{Value: u.into[:n]}, err)
	case u.kind == put && u.expires == 0:
		_, err := api.Put(ctx, u.name, u.value, client.PutOptions{})
		u.settle(client.Item{}, err)
	case u.kind == putIf && u.cond == client.IfAbsent && u.expires == 0:
		_, err := api.PutIfAbsent(ctx, u.name, u.value, client.PutOptions{})
		u.settle(client.Item{}, err)
	case u.kind == remove:
		u.settle(client.Item{}, api.Delete(ctx, u.name))
	default:
		b.performAll()
	}
}

// getInto reads a value to the start of *buf, which it makes longer if it must.
func getInto(ctx context.Context, api client.API, name []byte, buf *[]byte) (int, error) {
	if cap(*buf) == 0 {
		*buf = make([]byte, 512)
	}
	for {
		b := (*buf)[:cap(*buf)]
		*buf = b
		n, err := api.GetInto(ctx, name, b)
		if err == nil {
			return n, nil
		}
		if !errors.Is(err, io.ErrShortBuffer) {
			return 0, err
		}
		*buf = make([]byte, n+n/8)
	}
}

// performAll performs all units in one client.Do.
func (b *batch) performAll() {
	for i, u := range b.units {
		if i == len(b.ops) {
			b.ops = append(b.ops, client.Op{})
		}
		o := &b.ops[i]
		o.Key = u.name
		switch u.kind {
		case readValue, read:
			if u.into == nil {
				u.into = make([]byte, 0, 512)
			}
			o.Kind, o.Into = client.OpGet, u.into
		case put, putIf:
			o.Kind, o.Value, o.Expires, o.Cond = client.OpPut, u.value, timeOf(u.expires), client.Always
			if u.kind == putIf {
				o.Cond = u.cond
			}
		case remove:
			o.Kind = client.OpDelete
		default:
			o.Kind, o.Update = client.OpUpdate, u.apply
		}
	}
	b.c.api.Do(b.c.ctx, b.ops[:len(b.units)])
	for i, u := range b.units {
		o := &b.ops[i]
		if o.Kind == client.OpGet && cap(o.Item.Value) > cap(u.into) {
			u.into = o.Item.Value
		}
		u.settle(o.Item, o.Err)
	}
}

// settle takes the store's answer.
func (u *unit) settle(it client.Item, err error) {
	u.stored = err == nil
	switch u.kind {
	case readValue, read:
		if u.got = it.Version; errors.Is(err, client.ErrNotFound) {
			it, u.got, u.stored, err = client.Item{}, 0, false, nil
		}
		u.load(it, u.stored)
	case putIf:
		if errors.Is(err, client.ErrExists) || errors.Is(err, client.ErrNotFound) {
			err = nil
		}
	case remove:
		if errors.Is(err, client.ErrNotFound) {
			err = nil
		}
	case update:
		if errors.Is(err, errUnchanged) {
			err = nil
		}
	}
	u.err = err
}

// replies writes what the entries' commands reply, in order.
func (b *batch) replies() error {
	m := &b.c.g.m
	took := time.Since(b.start)
	var cmd *command // of the last n, which all went well
	n := uint64(0)
	for i := range b.entries {
		e := &b.entries[i]
		b.reply(e)
		if !e.last {
			if b.w.Len() > streamFrom {
				b.cur.streamed = true
				if err := b.c.push(&b.w); err != nil {
					return err
				}
			}
			continue
		}
		if b.w.Errors != b.cur.errors {
			m.note(e.cmd, 1, true, took)
		} else {
			if e.cmd != cmd {
				m.note(cmd, n, false, took)
				cmd, n = e.cmd, 0
			}
			n++
		}
		if !b.hold {
			if err := b.c.replied(&b.w, b.cur.start, b.cur.streamed); err != nil {
				return err
			}
		}
	}
	m.note(cmd, n, false, took)
	m.batch(len(b.entries))
	m.misses.Add(b.lookups[0])
	m.hits.Add(b.lookups[1])
	b.lookups = [2]uint64{}
	return nil
}

func (b *batch) reply(e *entry) {
	w, cur := &b.w, &b.cur
	if e.first {
		cur.start, cur.errors, cur.sum, cur.failed, cur.streamed = w.Len(), w.Errors, 0, false, false
		if e.cmd.fold == list && e.unit >= 0 {
			w.Array(e.n)
		}
	}
	if e.unit < 0 {
		if e.text != "" {
			w.Error(e.text)
		} else {
			e.cmd.conn(b.c, w, e.args)
		}
		return
	}
	if cur.failed {
		return
	}
	u := b.units[e.unit]
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
	case readValue, read:
		k.count = 0
		e.cmd.key(k, e.args, w)
		cur.sum += k.count
		if e.cmd.lookup {
			b.lookups[bit(k.present)]++
		}
	case put:
		if e.cmd.fold == single {
			w.OK()
		}
	case putIf:
		switch {
		case e.cmd.special == setNX:
			w.Int(bit(u.stored))
		case u.stored:
			w.OK()
		default:
			w.Null()
		}
	case remove:
		cur.sum += bit(u.stored)
	case update:
		w.Raw(u.out.Bytes()[e.lo:e.hi])
		if e.hi > e.lo && u.out.Bytes()[e.lo] == '-' {
			w.Errors++
		}
		cur.sum += e.count
	}
	if e.last {
		switch e.cmd.fold {
		case sum:
			w.Int(cur.sum)
		case setAll:
			w.OK()
		}
	}
}
