package client

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/units"
)

// A transaction has at most MaxTxnKeys keys, sixteen times as many if it writes nothing. Its keys and the values that
// it writes have at most MaxTxnBytes.
const (
	MaxTxnKeys  = 1024
	MaxTxnBytes = 64 << 20
)

// maxTxnKeeps bounds the keys of a transaction that writes nothing.
const maxTxnKeeps = 16 * MaxTxnKeys

// txnTries is how often f of a Txn runs.
const txnTries = 256

// txnReads is how often a transaction that only reads does so until it finds everything as it was, before it has the
// store keep the keys.
const txnReads = 3

// txnTime is how long a transaction is tried by an API that does not say, and whose context does not.
const txnTime = 10 * time.Second

// Tx is a transaction under way; see [Txn]. It belongs to the goroutine of its function, and is of no use afterwards.
type Tx struct {
	ctx   context.Context
	api   API
	ops   []Op           // in the order in which their keys were first named: OpKeep for what was read alone
	known []txKey        // of ops
	at    map[string]int // of ops, by key; nil while there are fewTxKeys of them at most
	err   error

	// ahead is what is known of keys that the try before has named, before this one does; with instant all of it was
	// there at one.
	ahead   map[string]Item
	instant bool
	// seen is what confirm has found of all keys, for the next try.
	seen map[string]Item

	names []byte // keys are in it
	// Memory for transactions of few keys.
	few struct {
		ops, loads [fewTxKeys]Op
		known      [fewTxKeys]txKey
		names      [64]byte
	}
}

// fewTxKeys is how many keys are looked for one by one.
const fewTxKeys = 4

type txKey struct {
	item     Item // if it was read; Version 0: there was nothing
	read     bool
	required bool // the condition is not what was read but what Require said
}

// Txn runs f, which reads and says what to write. Then it makes all of that true in one step if nothing that f has
// read or required has changed meanwhile. Otherwise f runs again, a few hundred times at most and for the
// OpTimeout, unless ctx has a deadline. f must have no other effects. If f fails, nothing is written and its error
// is Txn's. While f runs, what it reads may be of different instants.
//
// It takes effect as a whole, or not at all: Outcome tells. ErrConflict: a required version does not hold.
// ErrTxnContended: others have kept it from happening. Transactions are strictly serializable: each sees all that
// had ended before it began, and everybody else sees all of it or nothing. The ideas are from FaRM (SOSP'15) and
// Percolator (OSDI'10), from where intents come. A transaction that only reads costs two round trips, more if a key
// is absent. A Client that is ReadOnly cannot have more than one absent key in a transaction. A retry reads in one
// round trip what the try before has read. After a few tries, a transaction that only reads has the store keep
// these keys, and sees them as they are at that instant. It ends, whoever writes them, if f reads the same ones
// again.
func Txn(ctx context.Context, c API, f func(tx *Tx) error) error {
	began := time.Now()
	limited := false // ctx ends when the transaction's own time does
	var last *Tx
	for tries := range txnTries {
		if ctx.Err() != nil {
			return contended(ctx, context.Cause(ctx), tries, began)
		}
		if _, ok := ctx.Deadline(); tries == 1 && !ok { // a first try has the time of each of its operations
			limited = true
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadlineCause(ctx, began.Add(timeOf(c)), errTxnTime)
			defer cancel()
		}
		tx := &Tx{ctx: ctx, api: c}
		tx.ops, tx.known, tx.names = tx.few.ops[:0], tx.few.known[:0], tx.few.names[:0]
		if last != nil {
			if err := tx.follow(last, tries); err != nil {
				return contended(ctx, err, tries, began)
			}
		}
		err := f(tx)
		if err = errors.Join(tx.err, err); err != nil {
			if limited {
				err = contended(ctx, err, tries, began)
			}
			return err
		}
		switch err := tx.commit(); {
		case err == nil:
			return nil
		case errors.Is(err, ErrConflict), errors.Is(err, ErrNotFound), errors.Is(err, ErrExists):
			if final := tx.refused(err); final != nil {
				return final
			}
		default:
			return contended(ctx, err, tries, began)
		}
		last = tx
	}
	return fmt.Errorf("%w: what it reads has changed %d times", ErrTxnContended, txnTries)
}

// errTxnTime: the time of a transaction is over.
var errTxnTime = errors.New("the time of the transaction is over")

// timeOf is how long a transaction on c is tried.
func timeOf(c API) time.Duration {
	switch x := c.(type) {
	case *Client:
		return x.o.OpTimeout
	case interface{ OpTimeout() time.Duration }:
		return cmp.Or(x.OpTimeout(), txnTime)
	}
	return txnTime
}

// contended is err, or, if that is the end of the transaction's own time, what it comes from. An unknown outcome stays
// one.
func contended(ctx context.Context, err error, tries int, began time.Time) error {
	if err == nil || !errors.Is(context.Cause(ctx), errTxnTime) || errors.Is(err, ErrUnknownOutcome) {
		return err
	}
	return fmt.Errorf("%w: what it reads has changed %d times in %v, nothing was done", ErrTxnContended, tries,
		time.Since(began).Round(time.Millisecond))
}

// follow makes what last, the try before, has named known to this one: by what last has found when it was refused, by
// reading it again in one round trip, or by having the store keep it. A key that cannot be read is left to the
// function.
func (tx *Tx) follow(last *Tx, tries int) error {
	reads := !last.writes()
	if reads && tries >= txnReads {
		switch err := tx.snapshot(last); {
		case err == nil:
			return nil
		case !errors.Is(err, errReadOnly) && !errors.Is(err, ErrTxnTooLarge):
			return err
		}
	}
	if reads && last.seen != nil {
		tx.ahead = last.seen
		return nil
	}
	if !reads && tries > 1 { // the first retry is most often enough
		select {
		case <-time.After(rand.N(time.Millisecond << min(tries/8, 4))):
		case <-tx.ctx.Done():
			return context.Cause(tx.ctx)
		}
	}
	var ops []Op
	for i := range last.ops {
		if last.known[i].read {
			ops = append(ops, Op{Kind: OpGet, Key: last.ops[i].Key, Typed: true})
		}
	}
	tx.ahead = tx.lookUp(ops)
	return nil
}

// lookUp reads keys, and gives what is known of them then.
func (tx *Tx) lookUp(ops []Op) map[string]Item {
	m := make(map[string]Item, len(ops))
	if len(ops) > 0 {
		tx.api.Do(tx.ctx, ops)
	}
	for i := range ops {
		switch o := &ops[i]; {
		case o.Err == nil:
			m[string(o.Key)] = o.Item
		case errors.Is(o.Err, ErrNotFound):
			m[string(o.Key)] = Item{}
		}
	}
	return m
}

// snapshot has the store keep the keys that last has named, whatever they hold: what they hold then is of one instant.
func (tx *Tx) snapshot(last *Tx) error {
	ops := make([]Op, len(last.ops))
	for i := range ops {
		ops[i] = Op{Kind: OpKeep, Key: last.ops[i].Key, Typed: true}
	}
	if err := tx.api.MultiCAS(tx.ctx, ops); err != nil {
		return err
	}
	var long []Op
	tx.ahead, tx.instant = make(map[string]Item, len(ops)), true
	for i := range ops {
		if o := &ops[i]; o.Item.Version != 0 && o.Item.Value == nil { // in chunks
			long = append(long, Op{Kind: OpGet, Key: o.Key, Typed: true})
		}
		tx.ahead[string(ops[i].Key)] = ops[i].Item
	}
	for key, it := range tx.lookUp(long) {
		if it.Version != tx.ahead[key].Version {
			delete(tx.ahead, key) // changed since
			continue
		}
		tx.ahead[key] = it
	}
	for i := range long {
		if long[i].Err != nil && !errors.Is(long[i].Err, ErrNotFound) {
			delete(tx.ahead, string(long[i].Key))
		}
	}
	return nil
}

func (tx *Tx) writes() bool {
	return slices.ContainsFunc(tx.ops, func(o Op) bool { return o.Kind != OpKeep })
}

// find is the place of key; -1: it has not been named.
func (tx *Tx) find(key []byte) int {
	if tx.at != nil {
		if i, ok := tx.at[string(key)]; ok {
			return i
		}
		return -1
	}
	for i := range tx.ops {
		if bytes.Equal(tx.ops[i].Key, key) {
			return i
		}
	}
	return -1
}

// place is find for a key that is there from now on. The key is copied.
func (tx *Tx) place(key []byte) int {
	i := tx.find(key)
	if i >= 0 {
		return i
	}
	i = len(tx.ops)
	lo := len(tx.names)
	tx.names = append(tx.names, key...)
	tx.ops = append(tx.ops, Op{Kind: OpKeep, Key: tx.names[lo:len(tx.names):len(tx.names)]})
	tx.known = append(tx.known, txKey{})
	switch {
	case tx.at != nil:
		tx.at[string(key)] = i
	case i == fewTxKeys:
		tx.at = make(map[string]int)
		for j := range tx.ops {
			tx.at[string(tx.ops[j].Key)] = j
		}
	}
	return i
}

func (tx *Tx) op(key []byte) *Op { return &tx.ops[tx.place(key)] }

// Get is what key is to this transaction: what it wrote last, else what the store has. The Item is the transaction's,
// and may not be changed. A value of any type is given: look at Item.Type.
func (tx *Tx) Get(key []byte) (Item, error) {
	if err := tx.load(key); err != nil {
		return Item{}, err
	}
	i := tx.place(key)
	switch o := &tx.ops[i]; o.Kind {
	case OpPut:
		return Item{Value: o.Value, Expires: o.Expires, Flags: o.Flags, Note: o.Note, Type: o.Type}, nil
	case OpDelete:
		return Item{}, ErrNotFound
	}
	it := tx.known[i].item
	if it.Version == 0 {
		return Item{}, ErrNotFound
	}
	return it, nil
}

// Load reads keys together, which the transaction is going to get: one round trip instead of one each.
func (tx *Tx) Load(keys ...[]byte) error { return tx.load(keys...) }

func (tx *Tx) load(keys ...[]byte) error {
	clear(tx.few.loads[:])
	ops := tx.few.loads[:0]
	for _, k := range keys {
		i := tx.find(k)
		if i >= 0 && (tx.known[i].read || tx.ops[i].Kind != OpKeep) || slices.ContainsFunc(ops, func(o Op) bool {
			return bytes.Equal(o.Key, k)
		}) {
			continue
		}
		if it, ok := tx.ahead[string(k)]; ok {
			tx.found(k, it)
			continue
		}
		ops = append(ops, Op{Kind: OpGet, Key: k, Typed: true})
	}
	if len(ops) > 0 {
		tx.api.Do(tx.ctx, ops)
	}
	for i := range ops {
		o := &ops[i]
		if o.Err != nil && !errors.Is(o.Err, ErrNotFound) {
			return o.Err
		}
		tx.found(o.Key, o.Item)
	}
	return nil
}

func (tx *Tx) found(key []byte, it Item) {
	i := tx.place(key)
	w := &tx.known[i]
	if w.item, w.read = it, true; !w.required {
		tx.expect(&tx.ops[i], it.Version)
	}
}

// expect makes it a condition that o's key has a version, 0: none.
func (tx *Tx) expect(o *Op, version uint64) {
	if o.Cond, o.Version = IfVersion, version; version == 0 {
		o.Cond = IfAbsent
	}
}

// Put sets key to value, which must not change until Txn returns.
func (tx *Tx) Put(key, value []byte, o PutOptions) {
	exp, err := expiry(o.TTL)
	if err != nil && tx.err == nil {
		tx.err = err
	}
	tx.Set(key, Item{Value: value, Expires: expires(exp), Flags: o.Flags})
	tx.op(key).PinUntil = o.PinUntil
}

// Set makes key what it says, but for the Version, which is new. The value must not change until Txn returns.
func (tx *Tx) Set(key []byte, it Item) {
	o := tx.op(key)
	o.Kind, o.Value, o.Expires, o.Flags, o.Note, o.Type = OpPut, it.Value, it.Expires, it.Flags, it.Note, it.Type
	o.PinUntil = time.Time{}
}

// Delete removes key, if it is there.
func (tx *Tx) Delete(key []byte) {
	o := tx.op(key)
	o.Kind, o.Value, o.Expires, o.Flags, o.Note, o.Type = OpDelete, nil, time.Time{}, 0, 0, Plain
}

// Require makes the transaction fail with ErrConflict unless key has that version; 0: unless it is absent.
func (tx *Tx) Require(key []byte, version uint64) {
	i := tx.place(key)
	tx.expect(&tx.ops[i], version)
	tx.known[i].required = true
}

// refused is the error of the transaction if err is about what it requires; nil: it may be tried again.
func (tx *Tx) refused(err error) error {
	for i := range tx.ops {
		if tx.known[i].required && tx.ops[i].Err != nil {
			return fmt.Errorf("%w: %w", ErrConflict, err)
		}
	}
	return nil
}

// commit makes what f said true, in one step. After a refusal, the Ops refused have an Err.
func (tx *Tx) commit() error {
	writes := tx.writes()
	switch {
	case len(tx.ops) == 0 || !writes && len(tx.ops) == 1 && !tx.known[0].required:
		return nil
	case writes:
		return tx.api.MultiCAS(tx.ctx, tx.ops)
	case tx.instant:
		if known, err := tx.agree(); known {
			return err
		}
	}
	return tx.confirm()
}

// agree judges the transaction by what all keys held at one instant; known is false if it has named others.
func (tx *Tx) agree() (known bool, err error) {
	for i := range tx.ops {
		o := &tx.ops[i]
		it, ok := tx.ahead[string(o.Key)]
		if !ok {
			return false, nil
		}
		if o.Err = nil; it.Version != o.Version {
			o.Err, err = ErrConflict, fmt.Errorf("%w: %q", ErrConflict, shortKey(o.Key))
		}
	}
	return true, err
}

// confirm makes sure that all that was read was there at one time. No two writes share a version: a key that has the
// same one again has had it all the while. A key that is absent again may have come and gone, and others with it, so
// that the store has to keep it absent: at the instant at which it does, the others are what they were before and are
// afterwards.
func (tx *Tx) confirm() error {
	var absent, present []Op
	var which [2][]*Op
	for i := range tx.ops {
		o := &tx.ops[i]
		o.Err = nil
		if o.Version == 0 {
			absent, which[0] = append(absent, Op{Kind: OpKeep, Key: o.Key, Cond: IfAbsent}), append(which[0], o)
		} else {
			present, which[1] = append(present, Op{Kind: OpGet, Key: o.Key, Typed: true}), append(which[1], o)
		}
	}
	if err := tx.api.MultiCAS(tx.ctx, absent); err != nil {
		for i, o := range which[0] {
			o.Err = absent[i].Err
		}
		return err
	}
	tx.api.Do(tx.ctx, present)
	var refused error
	for i, o := range which[1] {
		if err := present[i].Err; err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
		if present[i].Item.Version != o.Version {
			o.Err, refused = ErrConflict, fmt.Errorf("%w: %q", ErrConflict, shortKey(o.Key))
		}
	}
	if refused == nil {
		return nil
	}
	tx.seen = make(map[string]Item, len(tx.ops))
	for _, o := range which[0] {
		tx.seen[string(o.Key)] = Item{}
	}
	for i, o := range which[1] {
		tx.seen[string(o.Key)] = present[i].Item
	}
	return refused
}

// checkTxn refuses ops that no MultiCAS performs, before anything is done.
func checkTxn(ops []Op, longest int64) error {
	most := MaxTxnKeys
	if len(ops) > most && !slices.ContainsFunc(ops, func(o Op) bool { return o.Kind != OpKeep }) {
		most = maxTxnKeeps
	}
	if len(ops) > most {
		return fmt.Errorf("%w: %d keys, at most %d", ErrTxnTooLarge, len(ops), most)
	}
	again := duplicates(ops)
	total := 0
	for i := range ops {
		o := &ops[i]
		o.Item, o.Err = Item{}, nil
		if total += len(o.Key); o.Kind == OpPut {
			total += len(o.Value)
		}
		switch err := checkKey(o.Key); {
		case err != nil:
			return err
		case o.Kind != OpPut && o.Kind != OpDelete && o.Kind != OpKeep:
			return fmt.Errorf("%w: Kind: %d, want OpPut, OpDelete or OpKeep", ErrInvalid, o.Kind)
		case checkCond(o.Cond) != nil:
			return checkCond(o.Cond)
		case again(i):
			return fmt.Errorf("%w: key %q is there twice", ErrInvalid, shortKey(o.Key))
		}
		if o.Kind == OpPut {
			if err := errors.Join(checkType(o.Type), checkValue(o.Key, o.Value, longest),
				CheckPinUntil(o.PinUntil)); err != nil {
				return err
			}
		}
	}
	if total > MaxTxnBytes && len(ops) > 1 {
		return fmt.Errorf("%w: %s, at most %s", ErrTxnTooLarge, units.Bytes(total), units.Bytes(MaxTxnBytes))
	}
	return nil
}

// duplicates tells whether the key of ops[i] is that of an earlier one, for each i in turn. A few are compared without
// more ado.
func duplicates(ops []Op) func(i int) bool {
	if len(ops) <= 16 {
		return func(i int) bool {
			return slices.ContainsFunc(ops[:i], func(o Op) bool { return bytes.Equal(o.Key, ops[i].Key) })
		}
	}
	seen := make(map[string]bool, len(ops))
	return func(i int) bool {
		was := seen[string(ops[i].Key)]
		seen[string(ops[i].Key)] = true
		return was
	}
}

// CheckTxn is what MultiCAS refuses of ops before it does anything, for other implementations of API.
// longest is what a value may have, bytes.
func CheckTxn(ops []Op, longest int64) error { return checkTxn(ops, longest) }
