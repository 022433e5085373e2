// Package exec performs commands on keys in one step, over a client.API alone. It knows no connection, no command, and
// nobody who wants to hear of what has been done.
//
// Start with [Plan] and its Perform. It reads keys when commands ask for them, and has the commands work on them. Then
// it writes what has changed if all is still what was read. Else somebody else was faster, and it begins anew.
//
// A Plan and its keys are for one goroutine. Values that it reads are the Plan's until it begins anew. Its memory is
// out of its owner's share. The shape is titan's: commands work on a transaction, and one place commits it.
package exec

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// A Host is what a Plan works for: it has the databases and the memory, and may want to know what is read.
type Host interface {
	// API is the client of a database's namespace, and Together whether two databases are in the same one.
	API(db int) client.API
	Together(a, b int) bool
	// Prepare fills in a new key's name in the store, the limits of its value, and whether it is Quiet. The name goes
	// into the memory of Stored, which is empty and the Plan's.
	Prepare(k *Key)
	// Refuses is why no key of the database can have the name, or nil.
	Refuses(n KeyName) error
	// Take takes n bytes of memory, and Drop gives them back.
	Take(n int64) error
	Drop(n int64)
	// Context is for operations that may each read so much without memory of their own: OneLimit, or EachLimit if there
	// are many.
	Context(many bool) context.Context
	// Begins hears that keys are going to be read; the returned function, that they have been, or why not.
	Begins(keys []*Key) (read func(err error))
	// Sees hears of a key that was there when it was read.
	Sees(n KeyName)
	// Rest waits between two tries, and reports whether there is to be another one.
	Rest(d time.Duration) bool
}

// Limits are a Host's, on memory and on how much is done at once.
type Limits struct {
	OneLimit, EachLimit int   // bytes that an operation may read without memory, alone and beside many
	Few                 int   // operations that count as alone
	AtOnce              int   // operations at a time
	Tries               int   // of an operation whose value grows meanwhile
	ReadCost            int64 // how often an operation may have in memory what it reads
	WriteCost, PutCost  int64 // and what it writes, as an answer to what was there or without a look
}

// maxKeys bounds the keys of one Plan, and keep those of one that is used again. Of each name in the store it keeps the
// memory of keepName bytes at most.
const maxKeys, keep, keepName = 16 << 10, 16, 256

var (
	// ErrManyKeys: a Plan has maxKeys keys at most. Nothing was done.
	ErrManyKeys = errors.New("more than 16384 keys at once; nothing was done")
	// ErrDatabases: the store changes keys of one namespace in one step. Nothing was done.
	ErrDatabases = errors.New("keys of databases in several namespaces cannot change together, nor one by what is in " +
		"another namespace; nothing was done")
	// ErrChanged: a key has another version than it had when it was read. Nothing was done.
	ErrChanged = errors.New("watched key has changed")
	// ErrAlone: a Plan that is one of a group needs more than its key. Nothing was done.
	ErrAlone = errors.New("more than a group gives")
)

// Plan is keys as the store had them, with what has been done to them so far. Nothing is written until Commit, and then
// either everything or nothing is.
//
// A store that fails does so in the middle of somebody's function. That one need not look: the key counts as absent
// from there on, and Err says so. Loops ask Failed. The zero value needs a Begin.
type Plan struct {
	host   Host
	limits *Limits

	Now int64 // Unix ms
	DB  int   // the one that Key takes names of
	// Keys are in the order in which they were first asked for, and Find has the same by name. Pointers to them stay
	// good until the next Begin.
	Keys []*Key
	Find map[KeyName]*Key
	Err  error // why nothing of it is done
	// Moves: the two keys are of a MOVE, and need not change together.
	Moves bool
	// Lone: it is one of a group, has its only key already, and no memory of its own.
	Lone bool
	// Room is bytes that a value may grow to without memory of the share.
	Room int
	// Changes are what has been noted since the Plan began, and MissedKeys what the command at hand has not found.
	Changes    []KeyChange
	MissedKeys []*Key
	namedKeys  []named // by the command at hand

	// Of Perform.
	way    Way
	does   Commands
	update client.UpdateFunc // runWithin, once it was needed
	looks  int               // of the store's at the key of a Modify
	fresh  Key               // that key before the first look
	began  int               // DB then

	held int64 // bytes of the share
	// spacious is how many keys have memory to change in, and mayChange how many have changed, at most.
	spacious, mayChange int

	// Memory that serves again.
	all     []*Key // Keys are the first of them
	ops     []client.Op
	used    []*Key       // of Commit
	missing []*Key       // of LoadNamed
	before  []values.Key // of Snapshot
}

// Open gives an empty Plan a Host. Its owner calls Close.
func (p *Plan) Open(h Host, l *Limits) {
	p.host, p.limits, p.Room = h, l, l.OneLimit
	if p.Find == nil {
		p.Find = make(map[KeyName]*Key)
	}
}

// Close gives back all memory of the share, and forgets the keys; it reports whether the Plan is small enough to be
// opened again.
func (p *Plan) Close() (again bool) {
	p.host.Drop(p.held)
	if len(p.all) > keep {
		return false
	}
	for _, k := range p.all {
		stored := k.Stored[:0]
		if cap(stored) > keepName {
			stored = nil
		}
		*k = Key{Stored: stored}
	}
	clear(p.Find)
	clear(p.ops[:cap(p.ops)])
	clear(p.before[:cap(p.before)])
	clear(p.used[:cap(p.used)])
	*p = Plan{Find: p.Find, all: p.all, ops: p.ops, used: p.used, missing: p.missing, update: p.update,
		before: p.before}
	return true
}

// Begin makes it what it was behind Open, but for Room, which only grows.
func (p *Plan) Begin(now int64, db int) {
	p.host.Drop(p.held)
	p.held, p.Keys, p.Changes, p.Err = 0, p.Keys[:0], p.Changes[:0], nil
	p.spacious, p.mayChange = 0, 0
	clear(p.Find)
	p.Now, p.DB = now, db
}

// Failed reports whether all of it is given up, so that a function can stop.
func (p *Plan) Failed() bool { return p.Err != nil }

// Fail is of [values.Keys].
func (p *Plan) Fail(reply values.ResultError) { p.Err = reply }

// Failure is of [values.Keys].
func (p *Plan) Failure() error { return p.Err }

// Current is of [values.Keys].
func (p *Plan) Current() int { return p.DB }

// Together is of [values.Keys].
func (p *Plan) Together(db int) bool { return p.host.Together(db, p.DB) }

// Possible is of [values.Keys].
func (p *Plan) Possible(name []byte) bool { return p.host.Refuses(KeyName{p.DB, string(name)}) == nil }

// Key is the key of that name, read from the store when it is first asked for.
// The key becomes a condition of the commit even if it is only read. The pointer is good until the function returns.
func (p *Plan) Key(name []byte) *values.Key { return p.KeyIn(p.DB, name) }

// KeyIn is a key of another database.
func (p *Plan) KeyIn(db int, name []byte) *values.Key {
	k := p.Find[KeyName{db, string(name)}]
	if k == nil {
		k = p.named(KeyName{db, string(name)})
		p.Read(k)
	}
	k.Used = true
	return &k.Key
}

// Peek is the key as it was at some time since the Plan began. It may be another one at the commit, unless it is used
// otherwise. It is for reads that need not hold at the end. A key that is peeked at and not used is no condition: a
// write of it by somebody else makes nobody run again.
func (p *Plan) Peek(name []byte) *values.Key {
	n := KeyName{p.DB, string(name)}
	p.Load(name)
	return &p.Find[n].Key
}

// Load reads keys together that a function may ask for, in one round trip instead of one each.
// Names that are there already, or come twice, cost nothing. It makes no conditions: a key that is loaded and never
// used is none.
func (p *Plan) Load(names ...[]byte) {
	var all []KeyName
	for _, n := range names {
		all = append(all, KeyName{p.DB, string(n)})
	}
	p.LoadNamed(all)
}

// LoadNamed is Load for keys of any database.
func (p *Plan) LoadNamed(names []KeyName) {
	p.missing = p.missing[:0]
	for _, n := range names {
		if p.Find[n] == nil {
			p.missing = append(p.missing, p.named(n))
		}
	}
	p.Read(p.missing...)
}

// named is Add for a name of a client's.
func (p *Plan) named(n KeyName) *Key {
	if err := p.host.Refuses(n); err != nil && p.Err == nil {
		p.Err = values.ResultError(err.Error())
	}
	p.NeedsMore()
	return p.Add(n)
}

// NeedsMore ends what runs as one of a group, which gives no more than one key. Err is ErrAlone then.
func (p *Plan) NeedsMore() {
	if p.Lone && p.Err == nil {
		p.Err = ErrAlone
	}
}

// Add adds a key, whose name may be one that no client can use. It is absent until it is read.
func (p *Plan) Add(name KeyName) *Key {
	n := len(p.Keys)
	if n == len(p.all) {
		p.all = append(p.all, &Key{})
	}
	k := p.all[n]
	p.renew(k, name)
	if n >= maxKeys && p.Err == nil {
		p.Err = ErrManyKeys
	}
	p.Keys = p.all[:n+1]
	p.Find[name] = k
	return k
}

// renew makes a key what it is before it is read.
func (p *Plan) renew(k *Key, name KeyName) {
	*k = Key{KeyName: name, Stored: k.Stored[:0]}
	k.Now, k.Room = p.Now, p.Room
	p.host.Prepare(k)
}

// Cut forgets all keys but the first n.
func (p *Plan) Cut(n int) {
	for _, k := range p.Keys[n:] {
		delete(p.Find, k.KeyName)
	}
	p.Keys = p.Keys[:n]
}

// Read fills in keys. A few short values take no memory. More of them take it before they are read, and long ones when
// it is known how long they are.
func (p *Plan) Read(keys ...*Key) {
	for len(keys) > 0 && p.Err == nil {
		n := 1
		for n < len(keys) && n < p.limits.AtOnce && p.host.Together(keys[n].DB, keys[0].DB) {
			n++
		}
		p.readSome(keys[:n])
		keys = keys[n:]
	}
}

// opsOf is n operations, of which nothing is kept.
func (p *Plan) opsOf(n int) []client.Op {
	p.ops = slices.Grow(p.ops[:0], n)[:n]
	return p.ops
}

// readSome is Read for keys of one namespace.
// Values that need memory are read again, one by one, with what they need. A value may have grown again by then; hence
// the tries. Keys beyond those that may change give back what is more than they take.
func (p *Plan) readSome(keys []*Key) {
	l, api := p.limits, p.host.API(keys[0].DB)
	many := len(p.Keys) > l.Few
	if many {
		if !p.Take(int64(len(keys)) * 2 * int64(l.EachLimit)) {
			return
		}
		full := max(0, min(len(keys), client.MaxTxnKeys-p.spacious))
		p.spacious += full
		defer func() {
			spare := int64(0)
			for _, k := range keys[full:] {
				spare += max(0, 2*int64(l.EachLimit)-keyCost-int64(2*len(k.Stored)+cap(k.Value)))
			}
			p.host.Drop(spare)
			p.held -= spare
		}()
	}
	ops := p.opsOf(len(keys))
	for i, k := range keys {
		if ops[i] = (client.Op{Kind: client.OpGet, Key: k.Stored, Typed: true}); p.way == Ask {
			ops[i] = client.Op{Kind: client.OpExists, Key: k.Stored}
		}
	}
	read := p.host.Begins(keys)
	defer func() { read(p.Err) }()
	api.Do(p.host.Context(many), ops)
	for i, k := range keys {
		o := &ops[i]
		for tries := 0; o.Err != nil && tries < l.Tries; tries++ {
			var large *inside.TooLargeError
			if !errors.As(o.Err, &large) {
				break
			}
			if !p.Take(l.ReadCost * int64(large.Want)) {
				return
			}
			*o = client.Op{Kind: client.OpGet, Key: k.Stored, Typed: true}
			api.Do(inside.LimitMemory(p.host.Context(false), large.Want), ops[i:i+1])
		}
		if err := k.TakeRead(o); err != nil && p.Err == nil {
			p.Err = err
		}
		if k.Version != 0 {
			p.host.Sees(k.KeyName)
		}
	}
}

// keyCost is about what a key takes beside its name and value.
const keyCost = 1 << 10

// ChargeChanges takes memory for keys that have changed, beyond those that have it. The command at hand has changed n
// more at most. More than client.MaxTxnKeys are refused at the end only: some may be again what they were by then.
func (p *Plan) ChargeChanges(n int) {
	if p.mayChange += n; len(p.Keys) <= client.MaxTxnKeys || p.mayChange <= p.spacious || p.Err != nil {
		return
	}
	p.mayChange = 0
	for _, k := range p.Keys {
		p.mayChange += int(values.Bit(k.Changed))
	}
	if more := p.mayChange - p.spacious; more > 0 && p.Take(int64(more)*2*int64(p.limits.EachLimit)) {
		p.spacious += more
	}
}

// Take takes memory until all of it is over.
// n is in bytes. If there is none to be had all of it is given up; Begin and Close give back what was taken.
func (p *Plan) Take(n int64) bool {
	if p.NeedsMore(); p.Lone {
		return false
	}
	if err := p.host.Take(n); err != nil {
		p.Err = err
		return false
	}
	p.held += n
	return true
}

// Wanted is the longest value for which a command had no memory; 0: none.
// A command that wanted room has changed nothing and replied nothing; all of it begins anew with more.
func (p *Plan) Wanted() (n int) {
	for _, k := range p.Keys {
		n = max(n, k.Want)
	}
	return n
}

// Commit makes the store what the keys are now, in one step, if they were until then what was read. Else it is
// ErrChanged, and nothing was done. Nothing is asked of the store if a single key was read: that read was of one
// instant. An error but ErrChanged and client.ErrUnknownOutcome says that nothing was done.
func (p *Plan) Commit() error {
	used := p.used[:0]
	writes, several := false, false
	for _, k := range p.Keys {
		if k.Used {
			used = append(used, k)
			writes = writes || k.Writes()
			several = several || !p.host.Together(k.DB, used[0].DB)
		}
	}
	p.used = used
	switch {
	// Keys that were read may be of any namespace if nothing is written.
	case writes && several && p.Moves:
		return p.move(used[0], used[1])
	case writes && several:
		return ErrDatabases
	case writes:
		return p.Write(used)
	case len(used) > 1:
		return p.confirm(used)
	}
	return nil
}

// move is the commit of a MOVE: the key is put into the other database, on condition that it is absent there, and then
// deleted here, on condition of its version. Others may see both for a moment, and never neither. If it cannot be
// deleted here the other is deleted again.
func (p *Plan) move(from, to *Key) error {
	if err := p.Write([]*Key{to}); err != nil {
		return err
	}
	err := p.Write([]*Key{from})
	if err == nil || errors.Is(err, client.ErrUnknownOutcome) {
		return err
	}
	undo := &Key{Key: values.Key{Changed: true}, KeyName: to.KeyName, Stored: to.Stored, Version: to.Version}
	if undoErr := p.Write([]*Key{undo}); undoErr != nil {
		return fmt.Errorf("%w: the key was put into database %d, could not be deleted in database %d (%v), and may "+
			"still be in both (%v)", client.ErrUnknownOutcome, to.DB, from.DB, err, undoErr)
	}
	return err
}

// Write is Commit for keys of one namespace; some are to be changed. Afterwards their versions are those that they have
// now. The store may read for it what was read before, since there is memory for that. A lone key that
// changes takes one conditional operation, which is cheaper than a transaction of the store.
func (p *Plan) Write(keys []*Key) error {
	ops := p.opsOf(len(keys))
	read := p.limits.OneLimit
	for i, k := range keys {
		ops[i] = k.Op()
		read = max(read, len(k.Was.Value))
	}
	err := p.write(p.host.API(keys[0].DB), ops, read)
	if Refused(err) {
		return ErrChanged
	}
	for i, k := range keys {
		if err == nil {
			k.Version = ops[i].Item.Version
		}
	}
	return err
}

// write performs the operations of Write, which may read so much without more memory. It takes more if they need it,
// and gives that back.
func (p *Plan) write(api client.API, ops []client.Op, read int) error {
	held := int64(0)
	defer func() { p.host.Drop(held) }()
	perform := func(want int) error {
		ctx := p.host.Context(false)
		if want = max(want, read); want > p.limits.OneLimit {
			ctx = inside.LimitMemory(ctx, want)
		}
		if len(ops) > 1 || ops[0].Kind == client.OpKeep {
			return api.MultiCAS(ctx, ops)
		}
		ops[0].Err = nil
		api.Do(ctx, ops)
		return ops[0].Err
	}
	err := perform(0)
	for tries := 0; err != nil && tries < p.limits.Tries; tries++ {
		var large *inside.TooLargeError
		if !errors.As(err, &large) {
			break
		}
		if n := p.limits.ReadCost * int64(large.Want); n > held {
			if err = p.host.Take(n - held); err != nil {
				break
			}
			held = n
		}
		err = perform(large.Want)
	}
	return err
}

// Refused reports whether an operation was not performed since its key has changed.
// ErrNotFound is of a delete, or of a version that has gone; ErrExists of a key that had been absent.
func Refused(err error) bool {
	return errors.Is(err, client.ErrConflict) || errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrExists)
}

// plans are for confirm.
var plans = sync.Pool{New: func() any { return new(Plan) }}

// confirm is the commit of a function that has only read: all that it found was there at one time. A version that is
// the same again was so all the while; a key that is absent again may have come and gone, so the store keeps it absent
// for an instant (see client.Txn). Keys of several namespaces may have been absent at several instants.
func (p *Plan) confirm(used []*Key) error {
	again := plans.Get().(*Plan)
	again.Open(p.host, p.limits)
	again.Room, again.spacious = p.Room, client.MaxTxnKeys // nothing of it changes
	defer func() {
		if again.Close() {
			plans.Put(again)
		}
	}()
	var keys, was []*Key
	var absent [][]*Key // each list of one namespace
	for _, k := range used {
		if k.Version == 0 {
			i := slices.IndexFunc(absent, func(a []*Key) bool { return p.host.Together(a[0].DB, k.DB) })
			if i < 0 {
				i, absent = len(absent), append(absent, nil)
			}
			absent[i] = append(absent[i], k)
			continue
		}
		keys, was = append(keys, again.Add(k.KeyName)), append(was, k)
	}
	for _, keys := range absent {
		if err := p.Write(keys); err != nil {
			return err
		}
	}
	again.Read(keys...)
	if again.Err != nil {
		return again.Err
	}
	for i, k := range was {
		if keys[i].Version != k.Version {
			return ErrChanged
		}
	}
	return nil
}
