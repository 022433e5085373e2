package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// MultiCAS performs ops, which put, delete or keep a key each, in one step: either all of it happens or nothing
// does. It is the multi-word compare-and-swap of Harris, Fraser and Pratt (DISC'02). No key may be there twice;
// MaxTxnKeys and MaxTxnBytes bound them.
//
// Each Op's Cond must hold at that instant. If one does not hold nothing is done. That Op has the Err that a Put
// would have: ErrConflict, ErrExists or ErrNotFound. Other Ops may have one, too. The error of MultiCAS wraps it
// and names the key. An OpDelete or an OpKeep without condition does not mind whether the key is there. When all is
// done each Op's Item has the Version that its key has, 0: none. That of an OpKeep with Typed has the rest as well.
// So several such Ops read keys as they are at one instant. Other errors: ErrTxnTooLarge, ErrTxnContended (others
// kept it from happening until the OpTimeout), or those of a Put; Outcome tells whether it happened.
//
// With hints for all n keys it takes 2r round trips at r replicas, and 3nr + r verbs; nr verbs more follow behind the
// answer. Over shm and tcp, puts and deletes of keys in one placement group of one copy take one round trip and 5n
// verbs. See "One chain" in docs/protocol.md.
func (c *Client) MultiCAS(ctx context.Context, ops []Op) error {
	if err := checkTxn(ops, c.MaxValueLen()); err != nil {
		return err
	}
	if looks := len(ops) == 0 || len(ops) == 1 && ops[0].Kind == OpKeep; c.o.ReadOnly && !looks {
		return errReadOnly
	}
	switch {
	case len(ops) == 0:
		return nil
	case len(ops) == 1:
		return c.singleCAS(ctx, ops)
	}
	if c.hot != nil {
		for i := range ops {
			c.countHot(ops[i].Key)
		}
	}
	if c.o.Events == nil {
		_, err := c.multiCAS(ctx, ops)
		return err
	}
	ctx, end := c.beginEvent(ctx, OpEvent{Kind: "transaction", Ops: ops})
	rounds, err := c.multiCAS(ctx, ops)
	end(rounds, 0, err)
	return err
}

// singleCAS is a MultiCAS of one key, which needs no transaction.
func (c *Client) singleCAS(ctx context.Context, ops []Op) error {
	o := &ops[0]
	if o.Kind != OpPut {
		ops = []Op{*o} // another operation takes its place
	}
	x := &ops[0]
	all := o.Kind == OpKeep && o.Typed
	switch {
	case o.Kind == OpDelete && o.Cond == IfAbsent, o.Kind == OpKeep:
		x.Kind, x.Cond, x.Typed = OpGet, Always, true
	case o.Kind == OpDelete && o.Cond == IfPresent:
		x.Cond = Always
	}
	c.Do(ctx, ops)
	v, err := x.Item.Version, x.Err
	x.Err = nil
	absent := errors.Is(err, ErrNotFound)
	switch {
	case x.Kind == OpGet && (err == nil || absent):
		err = o.refused(v)
	case absent && o.Cond == Always:
		err = nil
	}
	switch o.Item.Version = 0; {
	case all && err == nil:
		o.Item = x.Item
	case o.Kind != OpDelete && err == nil:
		o.Item.Version = v
	}
	if err != nil && Outcome(err) == rdma.No {
		o.Err = err
		err = fmt.Errorf("MultiCAS %q: %w", shortKey(o.Key), err)
	}
	return err
}

// refused is the Err of o if its key has the version given, 0: none.
func (o *Op) refused(version uint64) error {
	switch {
	case version == 0 && (o.Cond == IfVersion || o.Cond == IfPresent):
		return ErrNotFound
	case version != 0 && o.Cond == IfAbsent:
		return ErrExists
	case o.Cond == IfVersion && version != o.Version:
		return ErrConflict
	}
	return nil
}

// multiCAS performs ops as a transaction: it is tried until it is decided, refused or out of time. rounds are the round
// trips to the answer.
func (c *Client) multiCAS(ctx context.Context, ops []Op) (rounds int, err error) {
	began := uint64(time.Now().UnixNano())
	until := int64(0)
	for try := 0; ; try++ {
		s, err := c.live(ctx)
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return rounds, err
		}
		t := s.newTxn(ops, began, try)
		err = t.perform(ctx)
		rounds += t.rounds
		if again := retryable(err) || errors.Is(err, errTxnLost); !again {
			return rounds, err
		}
		if !c.patient(&until) {
			if errors.Is(err, errTxnLost) {
				return rounds, fmt.Errorf("%w %d times in %v", ErrTxnContended, try+1, c.o.OpTimeout)
			}
			return rounds, fmt.Errorf("%w: MultiCAS: %w", ErrUnavailable, err)
		}
		if err := c.pauseTxn(ctx, try, errors.Is(err, errTxnLost)); err != nil {
			return rounds, err
		}
	}
}

// pauseTxn waits before a transaction is tried again that others have aborted: longer from try to try, so that they get
// on.
func (c *Client) pauseTxn(ctx context.Context, try int, lost bool) error {
	if !lost {
		return c.pause(ctx)
	}
	if try == 0 {
		return nil
	}
	inside.WillWait(ctx)
	select {
	case <-time.After(rand.N(100 * time.Microsecond << min(try, 6))):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.ctx.Done():
		return ErrClosed
	}
}

// errTxnLost: somebody aborted the transaction, or a key is on its way elsewhere. Nothing was done.
var errTxnLost = errors.New("aborted by others")

// txn is one attempt at a transaction; its coordinator is the goroutine that performs it, and, behind the answer,
// another one. A lane may look at it still if an operation's outcome is unknown, so nothing of it is used for another
// attempt.
type txn struct {
	s      *sess
	ops    []Op
	legs   []leg        // of ops
	reqs   []*engine.Op // those under way
	began  uint64       // of the first attempt
	try    int
	x      *statusWord
	at     index.StatusAt
	rounds int   // of its operations, to the answer
	doubt  []int // ops of which it is not known whether there is an intent, or will be

	decision decision // the first one
	decided  bool     // it has been used

	// Memory for few keys.
	few struct {
		legs [fewLegs]leg
		reqs [fewLegs]*engine.Op
	}
}

// fewLegs is how many keys an attempt has room for that is made at once.
const fewLegs = 2

// decision is a swing of the status word.
type decision struct {
	call
	txn index.Txn
}

// leg is an attempt's part of one key. Its settle shares nothing with its prepare, which a lane may look at still.
type leg struct {
	prepare, settle call
	intent, after   index.Txn // of these calls
	placed, settled bool      // by together
}

func (s *sess) newTxn(ops []Op, began uint64, try int) *txn {
	t := &txn{s: s, ops: ops, began: began, try: try}
	if t.legs, t.reqs = t.few.legs[:], t.few.reqs[:]; len(ops) > fewLegs {
		t.legs, t.reqs = make([]leg, len(ops)), make([]*engine.Op, len(ops))
	}
	t.legs, t.reqs = t.legs[:len(ops)], t.reqs[:len(ops)]
	return t
}

// perform makes the attempt, and settles it, or has that done.
func (t *txn) perform(ctx context.Context) error {
	s := t.s
	pg, err := t.home()
	if err != nil {
		return err
	}
	if t.x, err = s.status.take(ctx, pg); err != nil {
		return err
	}
	t.at = t.x.at
	t.at.Seq++
	if err := t.request(); err != nil {
		s.status.put(t.x, false)
		return err
	}
	if over, err := t.together(ctx); over {
		return err
	}
	placed, err := t.prepare(ctx)
	if err == nil {
		return t.commit(ctx, layout.Commit)
	}
	if !placed && len(t.doubt) == 0 {
		s.status.put(t.x, false) // nobody knows of it: its number is used again
		return err
	}
	t.afterwards(ctx, layout.Undecided)
	return err
}

// home is the placement group of the status word: that of the first key that is written, so that if all its copies are
// lost there is such a key among what is lost.
func (t *txn) home() (pg uint32, err error) {
	i := 0
	for i < len(t.ops)-1 && t.ops[i].Kind == OpKeep {
		i++
	}
	if t.ops[i].Kind == OpKeep {
		i = 0
	}
	v := t.s.core.View()
	sh := v.ShardOf(t.s.hash(t.ops[i].Key))
	if sh == nil {
		return 0, fmt.Errorf("%w: no shard for %q", engine.ErrLease, shortKey(t.ops[i].Key))
	}
	return sh.PG.ID, nil
}

// request fills in what is asked for each key.
func (t *txn) request() error {
	for i := range t.ops {
		o, q := &t.ops[i], &t.legs[i].prepare
		q.Kind, q.Key, q.Asker, q.item, q.Cond, q.IfVersion, q.typed = index.Prepare, o.Key, q, &q.own, o.Cond,
			o.Version, o.Kind == OpKeep && o.Typed
		effect := index.KeepKey
		switch o.Kind {
		case OpPut:
			effect = index.PutKey
			q.Expiry = expiryAt(o.Expires)
			if q.Pinned, o.Err = t.s.c.pinnedUntil(o.PinUntil, q.Expiry); o.Err != nil {
				return o.Err
			}
			q.Value, q.Flags = withTail(o.Value, o.Flags, o.Note, o.Type)
		case OpDelete:
			effect = index.DeleteKey
		}
		q.Txn = &t.legs[i].intent
		*q.Txn = index.Txn{Status: t.at, Effect: effect, TS: t.began, Coord: uint64(t.s.id),
			Try: uint8(min(t.try, 255))}
		t.s.hashKey(q)
	}
	return nil
}

// prepare places an intent at every key that has none. err says why not, and placed whether there is one all the same.
func (t *txn) prepare(ctx context.Context) (placed bool, err error) {
	reqs := t.reqs[:0]
	for i := range t.legs {
		if !t.legs[i].placed {
			reqs = append(reqs, &t.legs[i].prepare.Op)
		}
	}
	t.s.core.Do(ctx, reqs)
	rounds := 0
	defer func() { t.rounds += rounds }()
	for i := range t.legs {
		o, q := &t.ops[i], &t.legs[i].prepare
		rounds = max(rounds, int(q.Rounds))
		switch o.Err = nil; {
		case q.Err == nil:
			placed = true
			continue
		case errors.Is(q.Err, ErrUnknownOutcome):
			t.doubt = append(t.doubt, i)
		}
		err = t.worse(err, t.failed(o, q))
	}
	return placed, err
}

// failed is the attempt's error if its Op's Prepare, q, has failed. That may have placed an intent, which will never
// lead to anything: nothing has happened.
func (t *txn) failed(o *Op, q *call) error {
	switch err := q.Err; {
	case errors.Is(err, index.ErrMoving):
		return errTxnLost
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrExists), errors.Is(err, ErrConflict):
		o.Err = err
		return fmt.Errorf("MultiCAS %q: %w", shortKey(o.Key), err)
	case errors.Is(err, ErrUnknownOutcome):
		return fmt.Errorf("%w: MultiCAS %q: %w", ErrUnavailable, shortKey(o.Key), noEffect{err})
	case retryable(err):
		return err
	}
	return t.s.c.public(t.s, q)
}

// worse is the error that says more: a refusal is final, and an attempt that is tried again is none yet.
func (t *txn) worse(a, b error) error {
	rank := func(err error) int {
		switch {
		case err == nil:
			return 0
		case errors.Is(err, errTxnLost), retryable(err):
			return 1
		case errors.Is(err, ErrNotFound), errors.Is(err, ErrExists), errors.Is(err, ErrConflict):
			return 3
		}
		return 2
	}
	if rank(b) > rank(a) {
		return b
	}
	return a
}

// noEffect is an error that happened on the way, of an attempt that did not happen as a whole.
type noEffect struct{ err error }

func (e noEffect) Error() string { return e.err.Error() }

// commit decides, when every intent is on every replica; or aborts what nobody knows the verdict of.
func (t *txn) commit(ctx context.Context, as layout.Verdict) error {
	verdict, rounds, err := t.decide(ctx, as)
	t.rounds += rounds
	switch {
	case err == nil && verdict == layout.Commit:
		t.answer()
		t.afterwards(ctx, layout.Commit)
		return nil
	case err == nil:
		t.afterwards(ctx, layout.Abort)
		return errTxnLost
	}
	if as == layout.Abort {
		err = fmt.Errorf("%w: %w", ErrUnknownOutcome, err) // what is to be aborted may have happened
	}
	t.afterwards(ctx, layout.Undecided)
	return t.undecided(err)
}

// decide swings the status word, and tells what it says then.
func (t *txn) decide(ctx context.Context, verdict layout.Verdict) (v layout.Verdict, rounds int, err error) {
	d := &t.decision
	if t.decided {
		d = new(decision)
	}
	t.decided = true
	d.txn = index.Txn{Status: t.at, Found: t.x.word, Verdict: verdict}
	q := &d.call
	q.Kind, q.Lane, q.Asker, q.item = index.Decide, int32(1+int(t.at.Off/8)%t.s.core.KeyLanes()), q, &q.own
	q.Txn = &d.txn
	q.ops[0] = &q.Op
	t.s.core.Do(ctx, q.ops[:])
	if q.Err != nil {
		return layout.Undecided, int(q.Rounds), q.Err
	}
	t.x.word = q.Txn.Found
	v, _ = q.Txn.Found.Of(t.at.Seq)
	return v, int(q.Rounds), nil
}

// versionOf is the version of a key whose intent led to what it says, 0: it is not there.
func versionOf(p *index.Placed) uint64 {
	if p.Intent.Final == 0 {
		return 0
	}
	return p.Version
}

// afterwards settles what the attempt has left, behind the answer: at once if the provider executes within PostSend,
// and else, or if that does not do, by another goroutine. verdict is what is decided; Undecided: not known yet, and to
// be ABORT.
func (t *txn) afterwards(ctx context.Context, verdict layout.Verdict) {
	s := t.s
	var left []*engine.Op
	if verdict != layout.Undecided && s.core.Lanes()[0].Synchronous() {
		if ctx.Done() != nil {
			ctx = context.WithoutCancel(ctx)
		}
		if left = t.settleSome(ctx, t.settles(verdict)); len(left) == 0 && len(t.doubt) == 0 {
			t.done()
			return
		}
	}
	doubt := make([][]byte, len(t.doubt))
	for i, k := range t.doubt {
		doubt[i] = bytes.Clone(t.ops[k].Key)
	}
	if !s.status.work() {
		return // the session has ended; the directory has it swept
	}
	go func() {
		defer s.wg.Done()
		v := verdict
		if v == layout.Undecided {
			if v = t.resolve(s.ctx); v == layout.Undecided {
				return
			}
		}
		if left == nil {
			left = t.settles(v)
		}
		for left = t.settleSome(s.ctx, left); len(left) > 0 && t.wait(s.ctx); {
			left = t.settleSome(s.ctx, left)
		}
		for _, key := range doubt {
			// An intent may be there, or come: keeping the key takes it away, and then nothing can land that expects
			// the word before.
			_, _ = s.c.multiCAS(s.ctx, []Op{{Kind: OpKeep, Key: key}})
		}
		if len(left) == 0 {
			t.done()
		}
	}()
}

// done gives the status word back: no intent of the attempt is left.
func (t *txn) done() {
	t.x.at.Seq = t.at.Seq
	t.s.status.put(t.x, len(t.doubt) > 0)
}

// resolve aborts the transaction, unless it is decided, and goes on until that is known; Undecided: it never will be,
// since the session has ended.
func (t *txn) resolve(ctx context.Context) layout.Verdict {
	for {
		v, _, err := t.decide(ctx, layout.Abort)
		switch {
		case err == nil:
			return v
		case errors.Is(err, index.ErrStatusLost):
			return layout.Abort
		case !t.wait(ctx):
			return layout.Undecided
		}
	}
}

// wait is the pause between two tries behind the answer; false if the session has ended.
func (t *txn) wait(ctx context.Context) bool {
	select {
	case <-time.After(20 * time.Millisecond):
	case <-ctx.Done():
	}
	return ctx.Err() == nil && !t.s.core.Dead()
}

// settles are operations that take the attempt's intents away.
func (t *txn) settles(verdict layout.Verdict) []*engine.Op {
	left := t.reqs[:0]
	for i := range t.legs {
		g := &t.legs[i]
		if g.prepare.Err != nil || g.settled {
			continue
		}
		q := &g.settle
		g.after = index.Txn{Status: t.at, Placed: g.intent.Placed, Verdict: verdict}
		q.Kind, q.Hash, q.Check, q.Txn, q.Asker, q.item = index.Settle, g.prepare.Hash, g.prepare.Check, &g.after, q,
			&q.own
		left = append(left, &q.Op)
	}
	return left
}

// settleSome performs ops, and gives those that have to be tried again.
func (t *txn) settleSome(ctx context.Context, ops []*engine.Op) (left []*engine.Op) {
	t.s.core.Do(ctx, ops)
	for _, op := range ops {
		if op.Err != nil {
			left = append(left, op)
		}
	}
	return left
}
