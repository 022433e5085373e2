package client

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/evict"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

type modifyFunc = func(cur *layout.Record) (value []byte, expiry uint64, err error)

// Client is one session with the store, renewed and reopened by itself. Its
// methods may be called concurrently.
type Client struct {
	o    Options
	dir  *dirclient.Client
	sess atomic.Pointer[sess]

	policy *evict.Policy
	stats  counts
	opened []*rdma.Device // those of o.Devices that are the Client's own

	mu struct {
		sync.Mutex
		closed bool
		wg     sync.WaitGroup // reopening and closing of lost sessions
		past   laneTotals     // of sessions that have ended
		last   laneTotals     // as Stats saw it last
	}
	ctx    context.Context
	cancel context.CancelFunc
}

func (o *Options) ensureDefaults() {
	o.Namespace = cmp.Or(o.Namespace, "default")
	o.Name = cmp.Or(o.Name, defaultName())
	o.Lanes = cmp.Or(o.Lanes, min(runtime.GOMAXPROCS(0), session.MaxLanes))
	o.CacheBytes = cmp.Or(o.CacheBytes, 64<<20)
	o.OpTimeout = cmp.Or(o.OpTimeout, 10*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate reports every bad field.
func (o *Options) Validate() error {
	var errs []error
	bad := func(f string, a ...any) {
		errs = append(errs, fmt.Errorf("%w: "+f, append([]any{ErrInvalid}, a...)...))
	}
	if len(o.Directory) == 0 {
		bad("Directory: no address")
	}
	if len(o.Devices) > 3 {
		bad("Devices: %d, want at most 3", len(o.Devices))
	}
	if o.Lanes < 1 || o.Lanes > session.MaxLanes {
		bad("Lanes: %d, want 1..%d", o.Lanes, session.MaxLanes)
	}
	if o.CacheBytes < 0 {
		bad("CacheBytes: %d, want >= 0 bytes", o.CacheBytes)
	}
	if o.OpTimeout < 0 {
		bad("OpTimeout: %v, want > 0", o.OpTimeout)
	}
	named := func(d *rdma.Device) bool { return d.Name() == o.Provider }
	switch {
	case o.Provider == "":
	case len(o.Devices) > 0 && !slices.ContainsFunc(o.Devices, named):
		bad("Provider: %q is not among Devices", o.Provider)
	case len(o.Devices) == 0 && !slices.Contains(providers.Names(), o.Provider):
		bad("Provider: %q, want one of %s", o.Provider, strings.Join(providers.Names(), ", "))
	}
	return errors.Join(errs...)
}

// Connect opens a Client of the namespace "default" with the defaults of all Options,
// without TLS. addrs are gRPC addresses of directory nodes; one of a cluster is enough, if it
// is up. ctx bounds the opening only, and so does the default OpTimeout.
func Connect(ctx context.Context, addrs ...string) (*Client, error) {
	o := Options{Directory: addrs}
	o.ensureDefaults()
	ctx, cancel := context.WithTimeout(ctx, o.OpTimeout)
	defer cancel()
	return Open(ctx, o)
}

// Open opens a session with the directory. ctx bounds the opening only; without a deadline,
// Open waits for a directory that does not answer.
func Open(ctx context.Context, o Options) (_ *Client, err error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	c := &Client{o: o, policy: evict.New(evict.Options{Seed: rand.Uint64(), GhostEntries: ghostEntries})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			c.cancel()
			err = errors.Join(err, c.release())
		}
	}()
	if c.dir, err = dirclient.Open(dirclient.Options{Addrs: o.Directory, TLS: o.TLS, Logger: o.Logger, AttemptTimeout: 8 * time.Second}); err != nil {
		return nil, err
	}
	if len(o.Devices) == 0 {
		c.opened, err = providers.OpenFor(o.Provider, providers.Options{TLSClient: o.TLS, Verbs: verbs.Options{Logger: o.Logger}})
		if err != nil {
			return nil, fmt.Errorf("open provider: %w", err)
		}
		c.o.Devices = c.opened
	}
	s, err := c.openSession(ctx, 0)
	if err != nil {
		return nil, err
	}
	c.sess.Store(s)
	return c, nil
}

// release gives back what Open took, when there is no session any more.
func (c *Client) release() error {
	var err error
	if c.dir != nil {
		err = c.dir.Close()
	}
	return errors.Join(err, providers.Close(c.opened))
}

// Close waits for operations under way (up to OpTimeout), gives memory back and
// closes the session. It is idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	was := c.mu.closed
	c.mu.closed = true
	c.mu.Unlock()
	if was {
		return nil
	}
	c.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), c.o.OpTimeout)
	defer cancel()
	// A reopening under way may still bring another session.
	c.mu.wg.Wait()
	c.sess.Load().close(ctx)
	return c.release()
}

// reopen replaces a lost session in the background.
func (c *Client) reopen(old *sess) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return
	}
	c.mu.wg.Add(2)
	go func() { // frees what is local; not under old's own goroutines
		defer c.mu.wg.Done()
		old.close(context.Background())
	}()
	go func() {
		defer c.mu.wg.Done()
		defer close(old.replaced)
		missing := false
		for wait := 10 * time.Millisecond; c.ctx.Err() == nil; wait = min(2*wait, time.Second) {
			s, err := c.openSession(c.ctx, old.nsID)
			switch {
			case err == nil:
				if c.sess.Store(s); missing {
					c.o.Logger.Info("there is a namespace of the name again", "namespace", c.o.Namespace, "id", s.nsID)
				}
				return
			case missing && errors.Is(err, ErrNoNamespace):
			case errors.Is(err, ErrNoNamespace):
				missing = true
				close(old.missing)
				c.o.Logger.Warn("the namespace was deleted: operations fail until there is one of the name again", "namespace", c.o.Namespace, "id", old.nsID)
			default:
				c.o.Logger.Warn("session not reopened yet", "err", err)
			}
			select {
			case <-time.After(wait):
			case <-c.ctx.Done():
			}
		}
	}()
}

// live is the session in force; it waits while a lost one is being replaced.
func (c *Client) live(ctx context.Context) (*sess, error) {
	s := c.sess.Load()
	if !s.dead.Load() {
		return s, nil
	}
	WillWait(ctx)
	t := time.NewTimer(c.o.OpTimeout)
	defer t.Stop()
	for s.dead.Load() {
		if c.ctx.Err() != nil {
			return nil, ErrClosed
		}
		select {
		case <-s.replaced:
		case <-s.missing:
			if s == c.sess.Load() {
				return nil, fmt.Errorf("%w %q: it was deleted", ErrNoNamespace, c.o.Namespace)
			}
		case <-c.ctx.Done():
			return nil, ErrClosed
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-t.C:
			return nil, fmt.Errorf("%w: session lost and not reopened within %v", ErrUnavailable, c.o.OpTimeout)
		}
		s = c.sess.Load()
	}
	return s, nil
}

func checkKey(key []byte) error {
	if len(key) == 0 || len(key) > MaxKeyLen {
		return fmt.Errorf("%w: key of %d bytes, want 1..%d", ErrInvalid, len(key), MaxKeyLen)
	}
	return nil
}

func checkValue(key, value []byte) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if len(value) > MaxValueLen {
		return fmt.Errorf("%w: value of %d bytes, at most %d", ErrInvalid, len(value), MaxValueLen)
	}
	return nil
}

func (s *sess) hash(key []byte) uint64 { return xxh3.Hash128Seed(key, s.seed.Load()).Lo }

// place hashes a key and returns its lane.
func (s *sess) place(key []byte) (d *laneDriver, hash, check uint64) {
	h := xxh3.Hash128Seed(key, s.seed.Load())
	return s.laneOf(h.Hi), h.Lo, h.Hi
}

func (s *sess) laneOf(check uint64) *laneDriver { return s.lanes[s.laneNumber(check)] }

func (s *sess) laneNumber(check uint64) int { return int((check >> 32) * uint64(len(s.lanes)) >> 32) }

// hashKey fills in the hashes and returns the key's lane.
func (s *sess) hashKey(c *call) (d *laneDriver) {
	d, c.hash, c.check = s.place(c.key)
	return d
}

// retryable reports that req did not happen and another session or map may do.
func retryable(err error) bool {
	return errors.Is(err, session.ErrLease) && !errors.Is(err, ErrUnknownOutcome)
}

// do performs one call.
func (c *Client) do(ctx context.Context, req *call) error {
	if c.o.Events != nil {
		ctx, end := c.begin(ctx, req)
		req.err = c.doOnce(ctx, req)
		end()
		return req.err
	}
	return c.doOnce(ctx, req)
}

func (c *Client) doOnce(ctx context.Context, req *call) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	req.limit = MemoryLimit(ctx)
	for until := int64(0); ; {
		s, err := c.live(ctx)
		if err != nil {
			return err
		}
		s.hashKey(req).exec(ctx, req)
		if req.err == nil {
			return nil
		}
		if !retryable(req.err) || !c.patient(&until) {
			return c.public(s, req)
		}
		if err := c.pause(ctx); err != nil {
			return err
		}
		req.err = nil
	}
}

// patient reports whether an operation that did not happen may be tried again:
// for OpTimeout from the first time. until is its memory, zero at first.
func (c *Client) patient(until *int64) bool {
	now := session.Nanos()
	if *until == 0 {
		*until = now + int64(c.o.OpTimeout)
	}
	return now < *until
}

// pause waits a moment before an operation is tried again.
func (c *Client) pause(ctx context.Context) error {
	WillWait(ctx)
	select {
	case <-time.After(2 * time.Millisecond):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.ctx.Done():
		return ErrClosed
	}
}

// public adds what the caller needs to know to an error: which operation, which
// key, why.
func (c *Client) public(s *sess, req *call) error {
	err := req.err
	var tooLarge *session.LimitError
	switch {
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrExists), errors.Is(err, ErrConflict),
		errors.Is(err, index.ErrUnchanged), errors.Is(err, errDelete), errors.Is(err, ErrNotInteger), errors.Is(err, ErrOverflow), errors.Is(err, io.ErrShortBuffer):
		return err // answers stay bare and cheap
	case errors.Is(err, ErrUnknownOutcome):
	case errors.As(err, new(*layout.CorruptError)):
		err = fmt.Errorf("%w: %w", ErrCorrupt, err)
	case errors.As(err, &tooLarge):
		return &TooLargeError{Want: tooLarge.Want}
	case errors.Is(err, session.ErrNoConn), errors.Is(err, session.ErrTimeout), errors.Is(err, session.ErrLease),
		errors.Is(err, session.ErrBuffer):
		s.mu.Lock()
		for n, e := range s.mu.connErr {
			if e != nil {
				err = fmt.Errorf("%w; memory node %d: %w", err, n, e)
				break
			}
		}
		s.mu.Unlock()
		err = fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return fmt.Errorf("%v %q: %w", req.kind, shortKey(req.key), err)
}

func shortKey(k []byte) []byte {
	if len(k) > 64 {
		return append(bytes.Clone(k[:61]), "..."...)
	}
	return k
}

// ---- answers -----------------------------------------------------------------

func takeItem(c *call, o *index.Op) {
	if o.Kind == index.Modify {
		return
	}
	if o.Parts() == nil {
		c.item = itemOf(&o.Record, c.dst)
		return
	}
	n := 0
	for _, p := range o.Parts() {
		n += len(p)
	}
	whole := c.dst[:0]
	if cap(whole) < n {
		whole = make([]byte, 0, n)
	}
	for _, p := range o.Parts() {
		whole = append(whole, p...)
	}
	c.item = Item{Version: o.Record.Version, Expires: expires(o.Record.Expiry)}
	c.item.Value, c.item.Flags = splitFlags(whole, o.Record.Flags)
}

func takeInto(c *call, o *index.Op) {
	if o.Parts() == nil {
		v, _ := splitFlags(o.Record.Value, o.Record.Flags)
		c.n = len(v)
		if copy(c.dst, v) < c.n {
			c.err = io.ErrShortBuffer
		}
		return
	}
	c.n = 0
	for _, p := range o.Parts() {
		copy(c.dst[min(c.n, len(c.dst)):], p)
		c.n += len(p)
	}
	if o.Record.Flags&layout.FlagUser != 0 {
		c.n -= 4
	}
	if c.n > len(c.dst) {
		c.err = io.ErrShortBuffer
	}
}

func takeRaw(c *call, o *index.Op) { c.item.Value = bytes.Clone(o.Record.Value) }

func expires(ms uint64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms))
}

func expiry(ttl time.Duration) (uint64, error) {
	if ttl < 0 {
		return 0, fmt.Errorf("%w: TTL %v, want >= 0", ErrInvalid, ttl)
	}
	if ttl == 0 {
		return 0, nil
	}
	return uint64(time.Now().Add(ttl).UnixMilli()), nil
}

// ---- operations ----------------------------------------------------------------

// Get returns the value of key, or ErrNotFound. With a remembered slot word it
// costs one round trip of two READs.
func (c *Client) Get(ctx context.Context, key []byte) (Item, error) {
	if err := checkKey(key); err != nil {
		return Item{}, err
	}
	if d, q := c.quick(ctx, false, key, nil, 0, 0); q != nil {
		it := itemOf(&q.Record, nil)
		d.handOver()
		return it, nil
	}
	req := call{kind: index.Get, key: key, take: takeItem}
	err := c.do(ctx, &req)
	return req.item, err
}

// GetInto copies the value of key to dst and returns its length. If dst is too
// short it returns the length needed and io.ErrShortBuffer; dst's content is then
// undefined. On the shm provider it allocates nothing.
func (c *Client) GetInto(ctx context.Context, key, dst []byte) (int, error) {
	if err := checkKey(key); err != nil {
		return 0, err
	}
	if d, q := c.quick(ctx, false, key, nil, 0, 0); q != nil {
		v, _ := splitFlags(q.Record.Value, q.Record.Flags)
		n := len(v)
		copied := copy(dst, v)
		d.handOver()
		if copied < n {
			return n, io.ErrShortBuffer
		}
		return n, nil
	}
	req := call{kind: index.Get, key: key, dst: dst, take: takeInto}
	err := c.do(ctx, &req)
	return req.n, err
}

// quick performs a cached GET or PUT at once if the key's lane is free and its provider
// allows. Unless q is nil the caller then leads the lane, and hands it over when it is
// done with q.
func (c *Client) quick(ctx context.Context, put bool, key, value []byte, flags layout.RecordFlags, expiry uint64) (d *laneDriver, q *session.Quick) {
	s := c.sess.Load()
	if !c.mayBeQuick(ctx, s) {
		return nil, nil
	}
	d, hash, check := s.place(key)
	if !d.tryLeadSoon() {
		return nil, nil
	}
	q = &d.quick[0]
	q.Put, q.Key, q.Value, q.Flags, q.Expiry, q.Hash, q.Check = put, key, value, flags, expiry, hash, check
	d.l.Quick(d.quick[:])
	if !q.OK {
		d.handOver()
		return nil, nil
	}
	return d, q
}

// mayBeQuick reports whether s takes operations that nobody is told of.
func (c *Client) mayBeQuick(ctx context.Context, s *sess) bool {
	return !s.dead.Load() && !s.shut.Load() && ctx.Err() == nil && c.o.Events == nil
}

// Put sets key to value and returns the new version.
func (c *Client) Put(ctx context.Context, key, value []byte, o PutOptions) (uint64, error) {
	return c.put(ctx, key, value, o, index.Always, 0)
}

// PutIfAbsent is Put, or ErrExists if key is present.
func (c *Client) PutIfAbsent(ctx context.Context, key, value []byte, o PutOptions) (uint64, error) {
	return c.put(ctx, key, value, o, index.IfAbsent, 0)
}

// CompareAndSwap is Put if key has the version given; else ErrConflict, or
// ErrNotFound if it is absent.
func (c *Client) CompareAndSwap(ctx context.Context, key []byte, version uint64, value []byte, o PutOptions) (uint64, error) {
	return c.put(ctx, key, value, o, index.IfVersion, version)
}

func (c *Client) put(ctx context.Context, key, value []byte, o PutOptions, cond index.Cond, version uint64) (uint64, error) {
	if err := checkValue(key, value); err != nil {
		return 0, err
	}
	exp, err := expiry(o.TTL)
	if err != nil {
		return 0, err
	}
	if c.o.ReadOnly {
		return 0, errReadOnly
	}
	value, flags := withFlags(value, o.Flags)
	if cond == index.Always {
		if d, q := c.quick(ctx, true, key, value, flags, exp); q != nil {
			version, err := d.quickPut(q)
			d.handOver()
			return version, err
		}
	}
	req := call{kind: index.Put, cond: cond, key: key, value: value, flags: flags, ifVersion: version, expiry: exp}
	if err := c.do(ctx, &req); err != nil {
		return 0, err
	}
	return req.version, nil
}

// quickPut is the answer of a Quick; the leader's.
func (d *laneDriver) quickPut(q *session.Quick) (version uint64, err error) {
	if q.Expiry != 0 {
		d.expires(q.Expiry, q.Hash)
	}
	if q.Err != nil {
		return 0, fmt.Errorf("%v %q: %w", index.Put, shortKey(q.Key), q.Err)
	}
	return q.Version, nil
}

var errReadOnly = fmt.Errorf("%w: the session is read-only", ErrInvalid)

// Delete removes key, or returns ErrNotFound.
func (c *Client) Delete(ctx context.Context, key []byte) error {
	return c.delete(ctx, call{kind: index.Delete, key: key})
}

// DeleteVersion is Delete if key has the version given, else ErrConflict.
func (c *Client) DeleteVersion(ctx context.Context, key []byte, version uint64) error {
	return c.delete(ctx, call{kind: index.Delete, key: key, cond: index.IfVersion, ifVersion: version})
}

func (c *Client) delete(ctx context.Context, req call) error {
	if err := checkKey(req.key); err != nil {
		return err
	}
	if c.o.ReadOnly {
		return errReadOnly
	}
	return c.do(ctx, &req)
}

// Incr adds delta to the decimal integer that key holds (absent counts as 0) and
// returns the sum. The expiry stays.
func (c *Client) Incr(ctx context.Context, key []byte, delta int64) (int64, error) {
	var sum int64
	buf := make([]byte, 0, 20)
	_, err := c.Update(ctx, key, func(cur Item, present bool) (Change, error) {
		var old int64
		if present {
			var err error
			if old, err = strconv.ParseInt(string(cur.Value), 10, 64); err != nil {
				return Change{}, ErrNotInteger
			}
		}
		if delta > 0 && old > math.MaxInt64-delta || delta < 0 && old < math.MinInt64-delta {
			return Change{}, ErrOverflow
		}
		sum = old + delta
		buf = strconv.AppendInt(buf[:0], sum, 10)
		return Change{Value: buf, Expires: cur.Expires, Flags: cur.Flags}, nil
	})
	return sum, err
}

// Touch sets key's time to live, 0 for none, or returns ErrNotFound. Its version
// changes.
func (c *Client) Touch(ctx context.Context, key []byte, ttl time.Duration) error {
	exp, err := expiry(ttl)
	if err != nil {
		return err
	}
	_, err = c.Update(ctx, key, func(cur Item, present bool) (Change, error) {
		if !present {
			return Change{}, ErrNotFound
		}
		return Change{Value: cur.Value, Expires: expires(exp), Flags: cur.Flags}, nil
	})
	return err
}

// ---- several keys ----------------------------------------------------------------

// multi performs calls together: one doorbell a lane and memory node for each
// round trip of all of them.
func (c *Client) multi(ctx context.Context, calls []*call) {
	if c.o.Events != nil {
		for _, q := range calls {
			_, end := c.begin(ctx, q) // one context is for all of them
			defer end()
		}
	}
	limit := MemoryLimit(ctx)
	for _, q := range calls {
		q.limit = limit
	}
	todo := calls
	for until := int64(0); len(todo) > 0; {
		s, err := c.live(ctx)
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			for _, q := range todo {
				q.err = err
			}
			return
		}
		s.multi(ctx, s.spread(todo))
		var again []*call
		retry := true
		for _, q := range todo {
			if q.err != nil && retryable(q.err) && retry {
				retry = c.patient(&until)
			}
			if q.err != nil && retryable(q.err) && retry {
				q.err, q.finished, q.cancel = nil, false, nil
				again = append(again, q)
			} else if q.err != nil {
				q.err = c.public(s, q)
			}
		}
		if todo = again; len(todo) > 0 {
			if err := c.pause(ctx); err != nil {
				for _, q := range todo {
					q.err = err
				}
				return
			}
		}
	}
}

// spread sorts calls by their keys' lanes.
func (s *sess) spread(calls []*call) [][]*call {
	byLane := make([][]*call, len(s.lanes))
	for _, q := range calls {
		d := s.hashKey(q)
		byLane[d.l.ID()] = append(byLane[d.l.ID()], q)
	}
	return byLane
}

func (s *sess) multi(ctx context.Context, byLane [][]*call) {
	deadline := session.Nanos() + int64(s.c.o.OpTimeout)
	ws := make([]*waiter, len(s.lanes))
	led := make([]bool, len(s.lanes))
	var wg sync.WaitGroup
	// Post on every lane before waiting on any.
	for i, qs := range byLane {
		if len(qs) == 0 {
			continue
		}
		d := s.lanes[i]
		ws[i] = newWaiter(qs, deadline)
		if s.dead.Load() || s.shut.Load() {
			for _, q := range qs {
				q.err = session.ErrLease
			}
			ws[i] = nil
			continue
		}
		if led[i] = d.tryLead(); led[i] {
			ws[i].leading = true
			for _, q := range qs {
				d.start(q)
			}
			d.pump()
		} else {
			d.enqueue(ws[i])
			d.l.Kick()
		}
	}
	// A lane that is led must be driven: operations of one lane may wait for an
	// insert lock that one of another lane holds, or for a view that comes only when
	// the other has quiesced. A waiter may be made the leader at any moment. So each
	// lane that is not done gets a goroutine of its own, the last one this.
	finish := func(i int) {
		if led[i] {
			s.lanes[i].drive(ctx, ws[i])
		} else {
			s.lanes[i].join(ctx, ws[i])
		}
	}
	last := -1
	for i, w := range ws {
		switch {
		case w == nil:
		case led[i] && w.left == 0:
			s.lanes[i].handOver()
		default:
			if last >= 0 {
				WillWait(ctx)
				wg.Add(1)
				go func(i int) {
					defer wg.Done()
					finish(i)
				}(last)
			}
			last = i
		}
	}
	if last >= 0 {
		finish(last)
	}
	wg.Wait()
}

// batchLimit bounds the operations of one multi step, and so its buffers.
const batchLimit = 1024

// MultiGet gets every key; the phases of all of them share round trips: one or
// two in all. Results stand in the order of keys, each with its own error.
func (c *Client) MultiGet(ctx context.Context, keys [][]byte) []Result {
	return c.batch(ctx, len(keys), func(o *Op, i int) { o.Kind, o.Key = OpGet, keys[i] })
}

// MultiPut puts every pair; each has its own outcome.
func (c *Client) MultiPut(ctx context.Context, pairs []KV) []Result {
	return c.batch(ctx, len(pairs), func(o *Op, i int) {
		p := &pairs[i]
		exp, err := expiry(p.TTL)
		o.Kind, o.Key, o.Value, o.Expires, o.Flags, o.Err = OpPut, p.Key, p.Value, expires(exp), p.Flags, err
	})
}

// MultiDelete deletes every key; each has its own outcome.
func (c *Client) MultiDelete(ctx context.Context, keys [][]byte) []Result {
	return c.batch(ctx, len(keys), func(o *Op, i int) { o.Kind, o.Key = OpDelete, keys[i] })
}

// batch performs n Ops that fill makes. One whose Err it sets is not performed.
func (c *Client) batch(ctx context.Context, n int, fill func(*Op, int)) []Result {
	ops, of, res := make([]Op, 0, n), make([]int, 0, n), make([]Result, n)
	for i := range n {
		var o Op
		if fill(&o, i); o.Err != nil {
			res[i].Err = o.Err
			continue
		}
		ops, of = append(ops, o), append(of, i)
	}
	c.Do(ctx, ops)
	for j := range ops {
		res[of[j]] = Result{Item: ops[j].Item, Err: ops[j].Err}
	}
	return res
}

// ---- scan --------------------------------------------------------------------

// Scan gives every pair from o.Cursor on. Every key that is present throughout a scan
// from the zero Cursor to its end is given at least once; a key that changes or moves
// meanwhile may be given twice. Order is that of hashes. Pairs are read about 200 at a time,
// while the loop asks for them; each stays the caller's. An error comes with a zero KV and is
// the last that is given, but for one that is ErrCorrupt and finds the cursor moved on: it says
// what had to be left out, and the rest follows.
func (c *Client) Scan(ctx context.Context, o ScanOptions) iter.Seq2[KV, error] {
	return func(yield func(KV, error) bool) {
		if o.Count < 0 {
			yield(KV{}, fmt.Errorf("%w: Count %d, want >= 0", ErrInvalid, o.Count))
			return
		}
		cur := o.Cursor
		if cur == nil {
			cur = new(Cursor)
		}
		given, until := 0, int64(0)
		for !cur.Done && (o.Count == 0 || given < o.Count) {
			page, next, err := c.scanPage(ctx, *cur, o)
			if err != nil && retryable(err) && c.patient(&until) {
				if err = c.pause(ctx); err == nil {
					continue
				}
			}
			if err != nil && (!errors.Is(err, ErrCorrupt) || next == *cur) {
				yield(KV{}, err)
				return
			}
			for _, kv := range page {
				if !yield(kv, nil) {
					return
				}
			}
			given += len(page)
			*cur, until = next, 0
			if err != nil && !yield(KV{}, err) {
				return
			}
		}
	}
}

const scanPageBytes = 1 << 20

// scanPage gives what stands at cur, and what is behind it.
func (c *Client) scanPage(ctx context.Context, cur Cursor, o ScanOptions) (kvs []KV, _ Cursor, _ error) {
	s, err := c.live(ctx)
	if err != nil {
		return nil, cur, err
	}
	var long [][]byte
	next := cur
	p := &index.Page{Cluster: cur.Cluster, Shard: cur.Shard, From: cur.Slot, Bytes: scanPageBytes, Expired: o.Expired}
	req := call{kind: index.Scan, prep: func(op *index.Op) { op.Hash, op.Scan = cur.Prefix, p }}
	var left error // what could not be read
	req.take = func(*call, *index.Op) {
		if p.Corrupt != nil {
			left = fmt.Errorf("scan: %w: %w", ErrCorrupt, p.Corrupt)
		}
		for i := range p.Found {
			r := &p.Found[i]
			if o.Match != nil && !o.Match(r.Key) {
				continue
			}
			kv := KV{Key: bytes.Clone(r.Key), Version: r.Version, Expires: expires(r.Expiry)}
			switch {
			case o.KeysOnly:
			case r.Flags&layout.FlagManifest != 0:
				long = append(long, kv.Key)
				continue
			default:
				it := itemOf(r, nil)
				kv.Value, kv.Flags = it.Value, it.Flags
			}
			kvs = append(kvs, kv)
		}
		switch {
		case p.Next != 0:
			next.Shard, next.Slot = p.Shard, p.Next
		case p.End:
			next = Cursor{Prefix: s.nextShard(cur.Prefix)}
			next.Done = next.Prefix == 0
		default:
			next.Cluster, next.Shard, next.Slot = cur.Cluster+1, 0, 0
		}
	}
	if ctx.Err() != nil {
		return nil, cur, context.Cause(ctx)
	}
	end := func() {}
	if c.o.Events != nil {
		ctx, end = c.begin(ctx, &req)
	}
	s.lanes[0].exec(ctx, &req)
	if req.err != nil {
		req.err = c.public(s, &req)
	}
	if end(); req.err != nil {
		return nil, cur, req.err
	}
	for _, k := range long { // values in chunks come by Get
		it, err := c.Get(ctx, k)
		switch {
		case errors.Is(err, ErrNotFound):
			continue
		case errors.Is(err, ErrCorrupt):
			left = errors.Join(left, err)
			continue
		case err != nil:
			return nil, cur, err
		}
		kvs = append(kvs, KV{Key: k, Value: it.Value, Version: it.Version, Expires: it.Expires, Flags: it.Flags})
	}
	return kvs, next, left
}

// nextShard is the left-aligned prefix behind the shard that covers prefix; 0
// behind the last.
func (s *sess) nextShard(prefix uint64) uint64 {
	v := s.core.View()
	sh := v.ShardOf(prefix)
	if sh == nil || sh.Depth == 0 {
		return 0
	}
	return uint64(sh.Prefix+1) << (64 - sh.Depth)
}

// Count is how many keys there are, from the index alone: keys that change or move
// meanwhile may count twice or not at all, and those that expired count until their
// memory is taken back.
func (c *Client) Count(ctx context.Context) (uint64, error) {
	v, err := c.ViewAtLeast(ctx, 0)
	if err != nil {
		return 0, err
	}
	n := uint64(0)
	const step = 256 // clusters
	for i := range v.Shards {
		sh := &v.Shards[i]
		tail := int(sh.PG.Replicas) - 1
		if sh.PG.Joining {
			tail--
		}
		for at := uint32(0); at < sh.Clusters; at += step {
			b, err := c.ReadRaw(ctx, sh.PG.ID, tail, sh.Off+uint64(at)*layout.ClusterSize, int(min(step, sh.Clusters-at))*layout.ClusterSize)
			if err != nil {
				return 0, err
			}
			for ; len(b) >= layout.GroupSize; b = b[layout.GroupSize:] {
				for k := range layout.GroupSlots {
					if layout.Group(b[:layout.GroupSize]).Slot(k).Readable() {
						n++
					}
				}
			}
		}
	}
	return n, nil
}

// ---- tools -------------------------------------------------------------------

// Location is where a key lives.
type Location struct {
	PG, ShardID             uint32
	Home, Stash             uint64 // region offsets of its home and stash group
	RegionBytes, IndexBytes uint64
	AccessBytes             uint64 // IndexBytes, or 0: no access words
	Hash                    uint64
	Replicas                int
}

// Locate tells where key lives under the present map.
func (c *Client) Locate(key []byte) (Location, error) {
	if err := checkKey(key); err != nil {
		return Location{}, err
	}
	s, err := c.live(c.ctx)
	if err != nil {
		return Location{}, err
	}
	q := call{key: key}
	s.hashKey(&q)
	v := s.core.View()
	sh := v.ShardOf(q.hash)
	if sh == nil {
		return Location{}, fmt.Errorf("%w: no shard for %q", ErrUnavailable, key)
	}
	home, stash := layout.GroupOff(q.hash, sh.Clusters)
	return Location{PG: sh.PG.ID, ShardID: sh.ID, Home: sh.Off + home, Stash: sh.Off + stash, Hash: q.hash,
		RegionBytes: sh.PG.RegionBytes, IndexBytes: sh.PG.IndexBytes, AccessBytes: sh.PG.AccessBytes, Replicas: int(sh.PG.Replicas)}, nil
}

// ReadRaw reads n bytes at offset off of one replica's region, for tools. They
// may change while they are read.
func (c *Client) ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error) {
	s, err := c.live(ctx)
	if err != nil {
		return nil, err
	}
	v := s.core.View()
	p := v.PGs[pg]
	switch {
	case p == nil:
		return nil, fmt.Errorf("%w: no placement group %d in this namespace", ErrInvalid, pg)
	case replica < 0 || replica >= int(p.Replicas):
		return nil, fmt.Errorf("%w: replica %d of placement group %d, which has %d", ErrInvalid, replica, pg, p.Replicas)
	case n <= 0 || off > p.RegionBytes || uint64(n) > p.RegionBytes-off:
		return nil, fmt.Errorf("%w: %d bytes at %#x of a region of %#x", ErrInvalid, n, off, p.RegionBytes)
	}
	out := make([]byte, 0, n)
	for len(out) < n {
		at := off + uint64(len(out))
		space, end := index.Heap, p.RegionBytes
		if at < p.IndexBytes {
			space, end = index.Index, p.IndexBytes
		}
		step := int(min(uint64(n-len(out)), end-at, 1<<20))
		req := call{kind: index.Raw, take: takeRaw, prep: func(o *index.Op) {
			o.Raw = &index.RawRead{PG: pg, Replica: uint8(replica), Space: space, Off: at, Len: step}
		}}
		s.lanes[0].exec(ctx, &req)
		if req.err != nil {
			return nil, c.public(s, &req)
		}
		out = append(out, req.item.Value...)
	}
	return out, nil
}

// Session is the id of the session in force.
func (c *Client) Session(ctx context.Context) (uint32, error) {
	s, err := c.live(ctx)
	if err != nil {
		return 0, err
	}
	return s.id, nil
}

// ViewAtLeast waits for a map of at least the version given.
func (c *Client) ViewAtLeast(ctx context.Context, version uint64) (*session.View, error) {
	for {
		s, err := c.live(ctx)
		if err != nil {
			return nil, err
		}
		if v := s.core.View(); v != nil && v.Version >= version {
			return v, nil
		}
		if err := c.pause(ctx); err != nil {
			return nil, err
		}
	}
}

// Work performs a janitor's operations of one kind, several at a time, and leaves
// what they found in each. Errors stand in the order of works.
func (c *Client) Work(ctx context.Context, kind index.Kind, works []*index.Work) []error {
	s, err := c.live(ctx)
	if err != nil {
		errs := make([]error, len(works))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	return c.work(ctx, s, kind, works)
}

// Stats returns a snapshot of this Client's counters since it was opened, and of what its
// present session holds.
func (c *Client) Stats() Stats {
	s := c.sess.Load()
	st := Stats{Ops: map[string]uint64{}, Rounds: map[string]uint64{}, Session: s.id,
		Epoch: s.core.Epoch(), MinEpoch: s.core.MinEpoch(), Evicted: c.stats.evicted.Load(),
		Expired: c.stats.expired.Load(), EvictedBytes: c.stats.evictedUnits.Load() * layout.UnitSize,
		SweepBytes: c.stats.sweepBytes.Load(), SweepForgotten: c.stats.sweepForgotten.Load()}
	c.mu.Lock()
	total, counted := c.mu.past, s.counted
	c.mu.Unlock()
	if !counted {
		total.wentBy(s.agenda.Counts(), session.Counts{})
	}
	var cached, inUse uint64
	for _, d := range s.lanes {
		if counted {
			break
		}
		x := new(struct { // its own: the session may end, and the lane come to it later
			laneTotals
			limbo, cached uint64
		})
		if !s.onLane(d.l, func(l *session.Lane) {
			x.laneTotals.add(l)
			x.limbo, x.cached = l.LimboUnits(), l.CachedUnits()
		}) {
			c.mu.Lock()
			total = c.mu.last
			c.mu.Unlock()
			counted = true
			break
		}
		total.sum(&x.laneTotals)
		st.LimboUnits += x.limbo
		cached += x.cached
	}
	total.into(&st)
	if counted {
		return st
	}
	c.mu.Lock()
	c.mu.last = total
	c.mu.Unlock()
	for _, h := range s.core.Heaps() {
		hs := h.Heap.Stats()
		st.GrantedUnits += uint64(hs.Granted)
		st.FreeUnits += uint64(hs.Free)
		st.ForeignUnits += hs.ForeignFree
		inUse += uint64(hs.InUse)
		st.RefusedPlaces += hs.RefusedPlaces
	}
	st.FreeUnits += cached
	st.LiveUnits = inUse - min(inUse, st.LimboUnits+cached)
	st.Connections = map[string]string{}
	s.mu.Lock()
	for id, p := range s.mu.provider {
		if n := s.mu.nodes[id]; n != nil {
			st.Connections[n.GetName()] = p
		}
	}
	s.mu.Unlock()
	return st
}

// laneTotals sums what lanes counted, and the agendas of their sessions.
type laneTotals struct {
	ops, rounds                          [index.NumKinds]uint64
	verbs                                rdma.Counters
	cacheHits, casLosses, unknown, notes uint64
	memoryWaits, leaked                  uint64
	went                                 session.Counts
}

// wentBy adds what an agenda counted since it had counted before.
func (t *laneTotals) wentBy(n, before session.Counts) {
	t.went.HandedBack += n.HandedBack - before.HandedBack
	t.went.Returned += n.Returned - before.Returned
	t.went.Received += n.Received - before.Received
	t.went.Refused += n.Refused - before.Refused
}

func (t *laneTotals) add(l *session.Lane) {
	for k := range t.ops {
		t.ops[k] += l.Stats.Ops[k]
		t.rounds[k] += l.Stats.Rounds[k]
	}
	n := l.Counters()
	t.verbs.Add(&n)
	t.cacheHits += l.Stats.CacheHits
	t.casLosses += l.Stats.CASLosses
	t.unknown += l.Stats.Unknown
	t.notes += l.Stats.Notes
	t.memoryWaits += l.Stats.MemoryWaits
	t.leaked += l.Stats.Leaked
}

func (t *laneTotals) sum(x *laneTotals) {
	for k := range t.ops {
		t.ops[k] += x.ops[k]
		t.rounds[k] += x.rounds[k]
	}
	t.verbs.Add(&x.verbs)
	t.cacheHits += x.cacheHits
	t.casLosses += x.casLosses
	t.unknown += x.unknown
	t.notes += x.notes
	t.memoryWaits += x.memoryWaits
	t.leaked += x.leaked
	t.wentBy(x.went, session.Counts{})
}

func (t *laneTotals) into(st *Stats) {
	for k := index.Get; k < index.NumKinds; k++ {
		st.Ops[k.String()], st.Rounds[k.String()] = t.ops[k], t.rounds[k]
	}
	st.Verbs, st.CacheHits, st.CASLosses, st.Unknown, st.Notes = t.verbs, t.cacheHits, t.casLosses, t.unknown, t.notes
	st.HandedBackUnits, st.ReturnedUnits, st.ReceivedUnits, st.RefusedUnits = t.went.HandedBack, t.went.Returned, t.went.Received, t.went.Refused
	st.LostUnits, st.MemoryWaits = t.leaked, t.memoryWaits
}
