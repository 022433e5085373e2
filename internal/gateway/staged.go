package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// staged is what a command on several keys, an EXEC or a script works on: the keys as the store had them, with what
// has been done to them so far. Nothing is written until all of it has run, and then either everything or nothing is;
// if a key has changed meanwhile all of it runs again. So a function that works on a staged may run several times, and
// must have no other effects.
//
// A store that fails does so in the middle of somebody's function. That one need not look: the key counts as absent
// from there on, and what the function replies goes nowhere. Loops ask failed. The goroutine of its connection uses it
// alone. Between two tries it is as it was before the first one, but for room, which only grows, and for what a
// script's time limit needs.
type staged struct {
	c   *conn
	now int64
	db  int // the one that key takes names of
	// keys are in the order in which they were first asked for, and find has the same by name. Pointers to them stay
	// good until the next try.
	keys []*stagedKey
	find map[stagedName]*stagedKey
	out  resp.Writer // what the function replies
	err  error       // why nothing of it is done
	lost bool        // a watched key has changed
	// moves: the function is a MOVE by itself, whose two keys need not change together.
	moves bool
	// mayWait: the function is a command that waits if it finds nothing. waited: it has done so.
	mayWait, waited bool
	// showing: somebody MONITORs.
	showing bool
	// scripted: it is a script that performs the command at hand.
	scripted bool

	scriptsEnd time.Time      // when scripts have run for long enough; zero: none has begun
	changes    []stagedChange // what has been done so far, if somebody wants to hear of it
	named      []namedChange  // and what the command at hand calls its own
	missed     []*stagedKey   // and what it has not found
	messages   []posted       // what scripts have published so far
	shown      shownLines     // for MONITOR

	room int   // bytes that a value may grow to, see key.mutable
	held int64 // bytes of the share
	// spacious is how many keys have memory to change in, and mayChange how many have changed, at most.
	spacious, mayChange int
	// grouped: it has its only key already, and no memory of its own; see scriptgroup.go.
	grouped bool

	// Memory that serves again.
	task    luascript.Task // of the script that runs
	host    scriptHost     // the same
	all     []*stagedKey   // keys are the first of them
	ops     []client.Op
	missing []*stagedKey // of loadNamed
	before  []values.Key // of snapshot
}

// stagedPool keeps those of few keys, empty.
var stagedPool = sync.Pool{New: func() any { return &staged{find: make(map[stagedName]*stagedKey)} }}

// keepStaged bounds the keys of a staged that is kept.
const keepStaged = 16

// newStaged makes an empty one, which the caller frees. room begins at oneLimit: a value up to that needs no memory of
// the share.
func newStaged(c *conn) *staged {
	t := stagedPool.Get().(*staged)
	t.c, t.room = c, oneLimit
	return t
}

// free gives back the memory of what has been read, and t, which nobody may use any more.
// A staged of many keys is left to the garbage collector, so that the pool stays small.
func (t *staged) free() {
	t.c.share.Drop(t.held)
	if len(t.all) > keepStaged {
		return
	}
	for _, k := range t.all {
		*k = stagedKey{}
	}
	clear(t.find)
	clear(t.ops[:cap(t.ops)])
	clear(t.before[:cap(t.before)])
	t.out.Reset(keepInto)
	t.host.w.Reset(keepInto)
	*t = staged{find: t.find, out: t.out, all: t.all, ops: t.ops, missing: t.missing, before: t.before,
		host: scriptHost{w: t.host.w}}
	stagedPool.Put(t)
}

// stagedName is a key's name as clients of a database have it, without the prefix that the store may have before it.
type stagedName struct {
	db   int
	name string
}

// stagedKey is a key as the commands see it, and what it was.
type stagedKey struct {
	values.Key
	stagedName
	bytes   []byte     // its name in the store
	version uint64     // 0: it was not there
	was     values.Key // as it was read
	used    bool       // a function has seen it, or it is watched: it is a condition
}

// A stagedFunc is a command that is more than a command on keys: it runs others, waits, or has libraries.
type stagedFunc func(t *staged, args [][]byte, w *resp.Writer) error

// onStaged makes a command on several keys of one.
func onStaged(f stagedFunc) values.SeveralFunc {
	return func(t values.Keys, args [][]byte, w *resp.Writer) error { return f(t.(*staged), args, w) }
}

// maxStaged bounds the keys of one function.
const maxStaged = 16 << 10

var (
	errManyKeys = errors.New("more than 16384 keys at once; nothing was done")
	// errDatabases: the store changes keys of one namespace in one step.
	errDatabases = errors.New("keys of databases in several namespaces cannot change together, nor one by what is in " +
		"another namespace; nothing was done")
	// errAgain: stagedTries tries have each met a write of somebody else.
	errAgain = errors.New("keys change too often; nothing was done")
)

// Key is the key of that name, read from the store when it is first asked for.
// The key becomes a condition of the commit even if it is only read. The pointer is good until the function returns.
func (t *staged) Key(name []byte) *values.Key { return t.KeyIn(t.db, name) }

// KeyIn is a key of another database.
func (t *staged) KeyIn(db int, name []byte) *values.Key {
	k := t.find[stagedName{db, string(name)}]
	if k == nil {
		k = t.newKey(db, string(name))
		t.read([]*stagedKey{k})
	}
	k.used = true
	return &k.Key
}

// Peek is the key as it was at some time since t began. It may be another one when t takes effect, unless t uses it
// otherwise. It is for reads that need not hold at the end. A key that is peeked at and not used is no condition: a
// write of it by somebody else makes nobody run again.
func (t *staged) Peek(name []byte) *values.Key {
	n := stagedName{t.db, string(name)}
	t.Load(name)
	return &t.find[n].Key
}

// Load reads keys together that a function may ask for, in one round trip instead of one each.
// Names that are there already, or come twice, cost nothing. It makes no conditions: a key that is loaded and never
// used is none.
func (t *staged) Load(names ...[]byte) {
	var all []stagedName
	for _, n := range names {
		all = append(all, stagedName{t.db, string(n)})
	}
	t.loadNamed(all)
}

// loadNamed is load for keys of any database.
func (t *staged) loadNamed(names []stagedName) {
	t.missing = t.missing[:0]
	for _, n := range names {
		if t.find[n] == nil {
			t.missing = append(t.missing, t.newKey(n.db, n.name))
		}
	}
	t.read(t.missing)
}

// maxPreload bounds the keys that are read before a function runs, which may use few of them: with more of them it
// could change none.
const maxPreload = client.MaxTxnKeys

// namesOf appends the keys that a command names. It leaves out those that the command is going to refuse.
// It is a guess at what the command will use: a key beyond it is read when it is asked for, at the price of a round
// trip.
func (g *Gateway) namesOf(dst []stagedName, cmd *command, db int, args [][]byte) []stagedName {
	for _, s := range both(cmd.keySpans(args)) {
		for i := s.First; s.First > 0 && i <= s.Last && len(dst) < maxPreload; i += s.Step {
			if badKey(&g.dbs[db], args[i]) == nil {
				dst = append(dst, stagedName{db, string(args[i])})
			}
		}
	}
	return dst
}

// These are of [values.Keys].

func (t *staged) Possible(name []byte) bool            { return badKey(t.in(), name) == nil }
func (t *staged) Fail(reply values.ResultError)        { t.err = reply }
func (t *staged) Failure() error                       { return t.err }
func (t *staged) Current() int                         { return t.db }
func (t *staged) DBIndex(b []byte) (db int, err error) { return t.c.dbIndex(b) }
func (t *staged) Together(db int) bool                 { return t.c.g.dbs[db].shared == t.in().shared }
func (t *staged) Waits() bool                          { return t.mayWait }

// Miss is for the event keymiss.
func (t *staged) Miss(name []byte) {
	t.missed = append(t.missed, t.find[stagedName{t.db, string(name)}])
}

// failed reports whether all of it is given up, so that a function can stop.
func (t *staged) failed() bool { return t.err != nil }

func (t *staged) newKey(db int, name string) *stagedKey {
	if err := badKey(&t.c.g.dbs[db], name); err != nil && t.err == nil {
		t.err = values.ResultError(err.Error())
	}
	t.needsMore()
	return t.addKey(db, name)
}

// needsMore ends a script of a group, which gives no more than one key.
// The error is errAlone, after which the script has had no effect and runs anew, over a staged of its own.
func (t *staged) needsMore() {
	if t.grouped && t.err == nil {
		t.err = errAlone
	}
}

// addKey is newKey for a name that may be one of the gateway's own.
// The key is absent until it is read. name is copied to nowhere else than the key and its stored form.
func (t *staged) addKey(db int, name string) *stagedKey {
	n := len(t.keys)
	if n == len(t.all) {
		t.all = append(t.all, &stagedKey{})
	}
	k := t.all[n]
	*k = stagedKey{stagedName: stagedName{db, name}, bytes: t.c.g.dbs[db].stored([]byte(name))}
	k.Now, k.MaxValue, k.Room, k.Limits = t.now, t.c.g.o.MaxValueBytes, t.room, &t.c.g.encodings
	if n >= maxStaged && t.err == nil {
		t.err = errManyKeys
	}
	t.keys = t.all[:n+1]
	t.find[k.stagedName] = k
	return k
}

// read fills in keys. Memory is taken as a batch does it: a few short values for nothing, more of them before they are
// read, and long ones when it is known how long they are.
func (t *staged) read(keys []*stagedKey) {
	for len(keys) > 0 && t.err == nil {
		n := 1
		for n < len(keys) && n < maxUnits && t.namespaceOf(keys[n]) == t.namespaceOf(keys[0]) {
			n++
		}
		t.readSome(keys[:n])
		keys = keys[n:]
	}
}

// opsOf is n operations, of which nothing is kept.
func (t *staged) opsOf(n int) []client.Op {
	t.ops = slices.Grow(t.ops[:0], n)[:n]
	return t.ops
}

// in is the database that key takes names of.
func (t *staged) in() *database { return &t.c.g.dbs[t.db] }

func (t *staged) namespaceOf(k *stagedKey) *namespace { return t.c.g.dbs[k.db].shared }

// readSome is read for keys of one namespace.
// Values that need memory are read again, one by one, with what they need. A value may have grown again by then; hence
// the tries. Keys beyond those that may change give back what is more than they take.
func (t *staged) readSome(keys []*stagedKey) {
	ctx := t.c.ctx
	if len(t.keys) > freeUnits {
		if ctx = t.c.smallCtx; !t.Take(int64(len(keys)) * 2 * eachLimit) {
			return
		}
		full := max(0, min(len(keys), client.MaxTxnKeys-t.spacious))
		t.spacious += full
		defer func() {
			spare := int64(0)
			for _, k := range keys[full:] {
				spare += max(0, 2*eachLimit-stagedCost-int64(2*len(k.bytes)+cap(k.Value)))
			}
			t.c.share.Drop(spare)
			t.held -= spare
		}()
	}
	ops := t.opsOf(len(keys))
	for i, k := range keys {
		ops[i] = client.Op{Kind: client.OpGet, Key: k.bytes, Typed: true}
	}
	api := t.namespaceOf(keys[0]).api
	defer t.trackReads(keys)()
	api.Do(ctx, ops)
	for i, k := range keys {
		o := &ops[i]
		for tries := 0; o.Err != nil && tries < largeTries; tries++ {
			var large *inside.TooLargeError
			if !errors.As(o.Err, &large) {
				break
			}
			if !t.Take(readCost * int64(large.Want)) {
				return
			}
			*o = client.Op{Kind: client.OpGet, Key: k.bytes, Typed: true}
			api.Do(inside.LimitMemory(t.c.ctx, large.Want), ops[i:i+1])
		}
		if err := k.takeRead(o); err != nil && t.err == nil {
			t.err = err
		}
		if k.version != 0 {
			t.c.sees(k.stagedName)
		}
	}
}

// takeRead makes the key what was read, or returns the error.
// That there is no such key is no error: version stays 0, which the commit's condition is made of.
func (k *stagedKey) takeRead(o *client.Op) error {
	switch it := o.Item; {
	case o.Err == nil:
		k.Present, k.Value, k.Flags, k.Type, k.version = true, it.Value, it.Flags, it.Type, it.Version
		if !it.Expires.IsZero() {
			k.Expires = it.Expires.UnixMilli()
		}
	case !errors.Is(o.Err, client.ErrNotFound):
		return o.Err
	}
	k.was = k.Key
	return nil
}

// stagedCost is about what a key takes beside its name and value.
const stagedCost = 1 << 10

// chargeChanges takes memory for keys that have changed, of which a command has changed n more at most, beyond those
// that have it. More than client.MaxTxnKeys are refused at the end only: some may be again what they were by then.
func (t *staged) chargeChanges(n int) {
	if t.mayChange += n; len(t.keys) <= client.MaxTxnKeys || t.mayChange <= t.spacious || t.err != nil {
		return
	}
	t.mayChange = 0
	for _, k := range t.keys {
		t.mayChange += int(values.Bit(k.Changed))
	}
	if more := t.mayChange - t.spacious; more > 0 && t.Take(int64(more)*2*eachLimit) {
		t.spacious += more
	}
}

// Take takes memory until all of it is over.
// n is in bytes. If there is none to be had all of it is given up; performStaged and free give back what was taken.
func (t *staged) Take(n int64) bool {
	if t.needsMore(); t.grouped {
		return false
	}
	if err := t.c.take(n); err != nil {
		t.err = err
		return false
	}
	t.held += n
	return true
}

// require makes all of it fail if a watched key has changed.
// The comparison is with the version that t has read now, and the commit's condition with the same, so that nothing is
// missed in between.
func (t *staged) require(x watch) {
	t.KeyIn(x.db, []byte(x.name))
	if k := t.find[x.stagedName]; t.err == nil && (k.version != x.version || x.touched()) {
		t.lost = true
	}
}

// run performs a command on keys, as a part of all of it.
// It is for commands with key or keys, from EXEC and from scripts as well as by themselves, whose arguments have been
// checked for their number and for the user's rights. It writes one reply. MGET and its like, which are atomic for each
// key alone elsewhere, are atomic as a whole here.
func (t *staged) run(cmd *command, args [][]byte, w *resp.Writer) {
	if t.showing && !t.scripted {
		t.shown.add(t, t.c.monitoredAs(), cmd, args)
	}
	if cmd.Writes() {
		defer t.chargeChanges(len(args))
	}
	defer t.noteChanges(cmd, args, w)()
	values.WriteRefusal(w, t.perform(cmd, args, w))
}

// perform is run without what follows a command.
func (t *staged) perform(cmd *command, args [][]byte, w *resp.Writer) error {
	if cmd.keys != nil {
		return cmd.keys(t, args, w)
	}
	if cmd.Fold == spec.Single {
		if err := badKey(t.in(), args[cmd.First]); err != nil {
			return err
		}
		k := t.Key(args[cmd.First])
		k.Count, k.Also = 0, ""
		return cmd.key(k, args, w)
	}
	if cmd.Fold == spec.SetAll && len(args)%2 == 0 {
		return wrongArgs(cmd)
	}
	var names [][]byte
	for i := 1; i < len(args); i += cmd.Step {
		if err := badKey(t.in(), args[i]); err != nil {
			return err
		}
		names = append(names, args[i])
	}
	t.Load(names...)
	if cmd.Fold == spec.List {
		w.Array(len(names))
	}
	sum := int64(0)
	for i, name := range names {
		k := t.Key(name)
		k.Count = 0
		values.WriteRefusal(w, cmd.key(k, args[1+i*cmd.Step:][:cmd.Step], w))
		sum += k.Count
	}
	switch cmd.Fold {
	case spec.SetAll:
		w.OK()
	case spec.List:
	default:
		w.Int(sum)
	}
	return nil
}

// stagedTries is how often a function runs, while others change what it has read.
// Each of them that fails means that somebody else's write has succeeded, so the store as a whole makes progress.
const stagedTries = 256

// performStaged runs f until it has taken effect in one step; names are the keys that it is going to use, as far as
// that is known. The replies are in the staged's out; err says why nothing was done, or that it is not known. It is to
// be freed when the replies have been sent. began is about now.
func (c *conn) performStaged(began time.Time, names []stagedName, watched []watch, f func(t *staged)) (t *staged,
	err error) {
	t = newStaged(c)
	t.showing = c.g.heed.Load()&heedMonitor != 0
	defer func() { t.tellMonitors() }()
	for tries := range stagedTries {
		// The pause grows with the tries, up to 64 ms, and is random: gateways that met once would meet again in step
		// otherwise.
		if tries > 1 && !c.g.pause(rand.N(time.Millisecond<<min(tries/8, 6))) { // the first retry is most often enough
			return t, client.ErrClosed
		}
		t.c.share.Drop(t.held)
		t.held, t.keys, t.changes, t.messages, t.err = 0, t.keys[:0], t.changes[:0], t.messages[:0], nil
		t.spacious, t.mayChange = 0, 0
		clear(t.find)
		t.shown.again()
		if tries > 0 {
			began = time.Now()
		}
		t.now, t.db = began.UnixMilli(), c.db
		t.out.Reset(keepReply)
		t.out.Proto, t.out.Errors = c.proto, 0
		// A try that was given up for want of room begins with memory for it, three times, as writeCost has it.
		if t.room > oneLimit && !t.Take(writeCost*int64(t.room)) {
			return t, t.err
		}
		t.loadNamed(names)
		for _, x := range watched {
			t.require(x)
		}
		if t.lost || t.err != nil {
			return t, t.err
		}
		f(t)
		// The reply was made in any case by now; its memory is taken so that many long ones at a time are refused.
		if t.err == nil && t.out.Len() > oneLimit {
			t.Take(2 * int64(t.out.Len()))
		}
		if t.err != nil {
			return t, t.err
		}
		if want := t.wanted(); want > 0 {
			t.room = max(want, 2*t.room)
			continue
		}
		switch err := t.commit(); {
		case err == nil && t.waited && c.link.PeerGone() && t.putBack():
			return t, errGone
		case err == nil:
			t.announce()
			t.tellOfWrites()
			t.conclude(true)
			return t, nil
		case !errors.Is(err, errWatched):
			if errors.Is(err, client.ErrUnknownOutcome) {
				// Nobody may be told of a change that may not have happened. Caches are told all the same: tellOfWrites
				// goes by the keys for them.
				t.changes = nil
				t.tellOfWrites()
				t.conclude(false)
			}
			return t, err
		}
	}
	return t, errAgain
}

// wanted is the longest value for which a command had no memory; 0: none.
// A command that wanted room has changed nothing and replied nothing; all of it begins anew with more.
func (t *staged) wanted() (n int) {
	for _, k := range t.keys {
		n = max(n, k.Want)
	}
	return n
}

// commit makes the store what the keys are now, in one step, if they were until then what was read; else it is
// errWatched, and nothing was done. Nothing is asked of the store if a single key was read: that read was of one
// instant. An error but errWatched and client.ErrUnknownOutcome says that nothing was done.
func (t *staged) commit() error {
	var used []*stagedKey
	writes, several := false, false
	for _, k := range t.keys {
		if k.used {
			used = append(used, k)
			writes = writes || k.writes()
			several = several || t.namespaceOf(k) != t.namespaceOf(used[0])
		}
	}
	switch {
	// Read keys may be of any namespace, as long as nothing is written.
	case writes && several && t.moves:
		return t.move(used[0], used[1])
	case writes && several:
		return errDatabases
	case writes:
		return t.write(used)
	case len(used) > 1:
		return t.confirm(used)
	}
	return nil
}

// writes reports whether the key is to be changed in the store.
// A key that was absent and is absent again has nothing to be written.
func (k *stagedKey) writes() bool { return k.Changed && (k.Present || k.version != 0) }

// op is the operation that makes the key what it is now, on condition that it was until then what was read.
// Versions are never used twice, so the condition on one is a condition on all that the key was, its expiry and type
// among it.
func (k *stagedKey) op() client.Op {
	o := client.Op{Kind: client.OpKeep, Key: k.bytes, Cond: client.IfVersion, Version: k.version}
	if k.version == 0 {
		o.Cond = client.IfAbsent
	}
	switch {
	case k.writes() && k.Present:
		o.Kind, o.Value, o.Expires, o.Flags, o.Type = client.OpPut, k.Value, timeOf(k.Expires), k.Flags, k.Type
	case k.writes():
		o.Kind = client.OpDelete
	}
	return o
}

// move is the commit of a MOVE: the key is put into the other database, on condition that it is absent there, and then
// deleted here, on condition of its version. Others may see both for a moment, and never neither. If it cannot be
// deleted here the other is deleted again.
func (t *staged) move(from, to *stagedKey) error {
	if err := t.write([]*stagedKey{to}); err != nil {
		return err
	}
	err := t.write([]*stagedKey{from})
	if err == nil || errors.Is(err, client.ErrUnknownOutcome) {
		return err
	}
	undo := &stagedKey{Key: values.Key{Changed: true}, stagedName: to.stagedName, bytes: to.bytes, version: to.version}
	if undoErr := t.write([]*stagedKey{undo}); undoErr != nil {
		return fmt.Errorf("%w: the key was put into database %d, could not be deleted in database %d (%v), and may "+
			"still be in both (%v)",
			client.ErrUnknownOutcome, to.db, from.db, err, undoErr)
	}
	return err
}

// write is commit for keys of one namespace, some of which are to be changed; afterwards their versions are those that
// they have now. The store may read for it as much as was read before, for which there is memory. A lone key that
// changes takes one conditional operation, which is cheaper than a transaction of the store.
func (t *staged) write(keys []*stagedKey) error {
	ops := t.opsOf(len(keys))
	read := oneLimit
	for i, k := range keys {
		ops[i] = k.op()
		read = max(read, len(k.was.Value))
	}
	api := t.namespaceOf(keys[0]).api
	give, err := t.c.do(func(ctx context.Context) error {
		if inside.MemoryLimit(ctx) < read {
			ctx = inside.LimitMemory(t.c.ctx, read)
		}
		if len(ops) > 1 || ops[0].Kind == client.OpKeep {
			return api.MultiCAS(ctx, ops)
		}
		ops[0].Err = nil
		api.Do(ctx, ops)
		return ops[0].Err
	})
	give()
	if refused(err) {
		return errWatched
	}
	for i, k := range keys {
		if err == nil {
			k.version = ops[i].Item.Version
		}
	}
	return err
}

// refused reports whether an operation was not performed since its key has changed.
// ErrNotFound is of a delete, or of a version that has gone; ErrExists of a key that had been absent.
func refused(err error) bool {
	return errors.Is(err, client.ErrConflict) || errors.Is(err, client.ErrNotFound) || errors.Is(err, client.ErrExists)
}

// confirm is the commit of a function that has only read: all that it found was there at one time. A version that is
// the same again was so all the while; a key that is absent again may have come and gone, so the store keeps it absent
// for an instant (see client.Txn). Keys of several namespaces may have been absent at several instants.
func (t *staged) confirm(used []*stagedKey) error {
	again := newStaged(t.c)
	again.room, again.spacious = t.room, client.MaxTxnKeys // nothing of it changes
	defer again.free()
	var keys, was []*stagedKey
	var absent [][]*stagedKey // each list of one namespace
	for _, k := range used {
		if k.version == 0 {
			i := slices.IndexFunc(absent, func(a []*stagedKey) bool { return t.namespaceOf(a[0]) == t.namespaceOf(k) })
			if i < 0 {
				i, absent = len(absent), append(absent, nil)
			}
			absent[i] = append(absent[i], k)
			continue
		}
		keys, was = append(keys, again.addKey(k.db, k.name)), append(was, k)
	}
	for _, keys := range absent {
		if err := t.write(keys); err != nil {
			return err
		}
	}
	again.read(keys)
	if again.err != nil {
		return again.err
	}
	for i, k := range was {
		if keys[i].version != k.version {
			return errWatched
		}
	}
	return nil
}

func (c *conn) stagedError(err error) string {
	var r values.ResultError
	switch {
	case errors.As(err, &r):
		return string(r)
	case errors.Is(err, errDatabases), errors.Is(err, errAgain), errors.Is(err, errManyKeys):
		return "ERR kvd: " + err.Error()
	case errors.Is(err, client.ErrTxnTooLarge), errors.Is(err, client.ErrTxnContended):
		return "ERR kvd: " + brief(err) + "; nothing was done"
	}
	return c.g.storeError(err)
}

// performSeveral performs a command on several keys by itself.
// It writes one reply to w, whether it went well or not.
func (c *conn) performSeveral(cmd *command, w *resp.Writer, args [][]byte, began time.Time) {
	t, err := c.performStaged(began, c.g.namesOf(nil, cmd, c.db, args), nil, func(t *staged) {
		t.moves = cmd.ID == spec.CmdMove
		t.run(cmd, args, &t.out)
	})
	defer t.free()
	if err != nil {
		w.Error(c.stagedError(err))
		return
	}
	w.Raw(t.out.Bytes())
	w.Errors += t.out.Errors
}

// execStaged performs a transaction on several keys. Commands on none are performed at their turn when the replies are
// written, once: nothing else of it runs then.
func (c *conn) execStaged(b *batch, queue []queued, watched []watch) error {
	w := &b.w
	type reply struct {
		lo, hi  int
		refused error
	}
	// Each reply is a part of t.out, and is found by its place since t.out may be moved while it grows.
	replies := make([]reply, len(queue))
	late := c.tracksInside(queue)
	c.tracksLate = late != nil
	t, err := c.performStaged(b.start, c.namesOfQueue(queue, watched), watched, func(t *staged) {
		for i, q := range queue {
			replies[i] = reply{lo: t.out.Len()}
			replies[i].refused = c.refusalAtExec(q.cmd, q.args, t.db)
			switch {
			case replies[i].refused != nil:
			case q.cmd.key != nil || q.cmd.keys != nil:
				t.run(q.cmd, q.args, &t.out)
			case q.cmd.ID == spec.CmdSelect:
				t.db = c.selected(t.db, q.args)
			case q.cmd.ID == spec.CmdHello:
				t.out.Proto = protocolBehind(q.args, t.out.Proto)
			}
			if t.showing && replies[i].refused == nil && q.cmd.key == nil && q.cmd.keys == nil {
				t.shown.add(t, c.monitoredAs(), q.cmd, q.args)
			}
			replies[i].hi = t.out.Len()
		}
	})
	c.tracksLate = false
	defer t.free()
	switch {
	case err != nil:
		w.Error(c.stagedError(err))
		return nil
	case t.lost:
		w.NullArray()
		return nil
	}
	w.Array(len(queue))
	for i, q := range queue {
		start, errs := w.Len(), w.Errors
		switch r := replies[i]; {
		case r.refused != nil:
			values.WriteRefusal(w, r.refused)
		case q.cmd.key != nil || q.cmd.keys != nil:
			w.Raw(t.out.Bytes()[r.lo:r.hi])
			if bytes.HasPrefix(t.out.Bytes()[r.lo:r.hi], []byte("-")) {
				w.Errors++
			}
		default:
			values.WriteRefusal(w, q.cmd.conn(c, w, q.args))
		}
		x := ended{cmd: q.cmd, args: q.args, start: start, errs: errs, took: time.Since(b.start), shown: true,
			inExec: true}
		if replies[i].refused != nil {
			x.args, x.refused = nil, true
		} else {
			late.performed(c, t, q)
		}
		if err := b.finish(&x); err != nil {
			return err
		}
	}
	b.countAlike()
	late.enterKeys(c)
	return nil
}

// namesOfQueue is the keys that a transaction names, and those that are watched.
func (c *conn) namesOfQueue(queue []queued, watched []watch) (names []stagedName) {
	for _, x := range watched {
		names = append(names, x.stagedName)
	}
	db := c.db
	for _, q := range queue {
		if names = c.g.namesOf(names, q.cmd, db, q.args); q.cmd.ID == spec.CmdSelect {
			db = c.selected(db, q.args)
		}
	}
	return names
}

// selected is the database behind a SELECT in database db.
// A number that is refused leaves the database as it is; the SELECT says so when its reply is due.
func (c *conn) selected(db int, args [][]byte) int {
	if n, err := c.dbIndex(args[1]); err == nil {
		return n
	}
	return db
}
