package e2e

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// bytesEnv has this binary be a client process of TestBytes; it holds a bytesConfig.
const bytesEnv = "KVD_E2E_BYTES"

// bytesConfig is what a client process of TestBytes is told. It prints lines of JSON, each a bytesTally of all that it
// has done, and ends with SIGTERM.
type bytesConfig struct {
	Directory, Provider string
	Namespaces          []string
	Client, Life        int
	Workers             int
	Seed                uint64
	Keys                [4]int // of each class and namespace
}

// bytesTally is what a client process has done since it began.
type bytesTally struct {
	Gets, Hits, Misses int64
	Bytes              int64            // of hits
	Puts               int64            // and deletes, that were answered
	Failed             map[string]int64 // GETs, by kind of error
	FailedPuts         map[string]int64
	Wrong              []string // any is a failure
}

func (t *bytesTally) add(o *bytesTally) {
	t.Gets, t.Hits, t.Misses = t.Gets+o.Gets, t.Hits+o.Hits, t.Misses+o.Misses
	t.Bytes, t.Puts, t.Wrong = t.Bytes+o.Bytes, t.Puts+o.Puts, append(t.Wrong, o.Wrong...)
	for k, n := range o.Failed {
		t.Failed[k] += n
	}
	for k, n := range o.FailedPuts {
		t.FailedPuts[k] += n
	}
}

func newTally() *bytesTally {
	return &bytesTally{Failed: map[string]int64{}, FailedPuts: map[string]int64{}}
}

// Classes of keys: most are small. A GET takes a class so often, of 100,000.
var bytesClasses = [4]struct{ least, most, often int }{
	{100, 4 << 10, 91_500}, {8 << 10, 256 << 10, 8_000}, {256 << 10, 2 << 20, 450}, {4 << 20, 16 << 20, 50},
}

const (
	bytesMagic  = 0x6b76642d62797465
	bytesHead   = 32 // tenant, key, version, length
	bytesStep   = 0x9e3779b97f4a7c15
	bytesCanary = 0xa7
	bytesMargin = 64
)

func bytesSeed(tenant, key, version, n uint64) uint64 {
	x := tenant*0xbf58476d1ce4e5b9 ^ key*0x94d049bb133111eb ^ version*bytesStep ^ n
	return (x ^ x>>29) * 0xbf58476d1ce4e5b9
}

// makeBytes fills b with a value that says whose it is: each of its words follows from tenant, key, version, length and
// the word's place.
func makeBytes(b []byte, tenant, key, version uint64) {
	n := uint64(len(b))
	binary.LittleEndian.PutUint64(b, bytesMagic^tenant)
	binary.LittleEndian.PutUint64(b[8:], key)
	binary.LittleEndian.PutUint64(b[16:], version)
	binary.LittleEndian.PutUint64(b[24:], n)
	x, at := bytesSeed(tenant, key, version, n), bytesHead
	for ; at+8 <= len(b); at += 8 {
		binary.LittleEndian.PutUint64(b[at:], x)
		x += bytesStep
	}
	var last [8]byte
	binary.LittleEndian.PutUint64(last[:], x)
	copy(b[at:], last[:])
}

// judgeBytes tells why b is no whole value of that tenant's key, nil if it is one.
func judgeBytes(b []byte, tenant, key uint64) error {
	if len(b) < bytesHead {
		return fmt.Errorf("%d bytes, want a value", len(b))
	}
	head := [4]uint64{}
	for i := range head {
		head[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	if head[0] != bytesMagic^tenant || head[1] != key || head[3] != uint64(len(b)) {
		return fmt.Errorf("%d bytes of tenant %#x, key %d, length %d; want tenant %d, key %d", len(b),
			head[0]^bytesMagic, head[1], head[3], tenant, key)
	}
	x, at := bytesSeed(tenant, key, head[2], head[3]), bytesHead
	for ; at+8 <= len(b); at += 8 {
		if got := binary.LittleEndian.Uint64(b[at:]); got != x {
			return fmt.Errorf("word at %d of %d is %#x, want %#x; version %#x", at, len(b), got, x, head[2])
		}
		x += bytesStep
	}
	for ; at < len(b); at++ {
		if b[at] != byte(x) {
			return fmt.Errorf("byte %d of %d is %#x, want %#x; version %#x", at, len(b), b[at], byte(x), head[2])
		}
		x >>= 8
	}
	return nil
}

// bytesMemory is a worker's memory, which one GET after the other has, whosever they are.
type bytesMemory struct {
	all    []byte // canaries, but for what is lent
	last   []byte // lent to the last GET
	failed bool   // and that did not succeed
}

func newBytesMemory() *bytesMemory {
	m := &bytesMemory{all: make([]byte, bytesClasses[3].most+4<<10)}
	fillCanary(m.all)
	return m
}

func fillCanary(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = bytesCanary
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// clean tells what of b is neither a canary nor, with zeroes, zero.
func clean(b []byte, zeroes bool) error {
	const words = 0xa7a7a7a7a7a7a7a7
	for i := 0; i < len(b); {
		if w := uint64(0); i+8 <= len(b) {
			if w = binary.LittleEndian.Uint64(b[i:]); w == words || zeroes && w == 0 {
				i += 8
				continue
			}
		}
		if b[i] != bytesCanary && (!zeroes || b[i] != 0) {
			return fmt.Errorf("byte %d of %d is %#x", i, len(b), b[i])
		}
		i++
	}
	return nil
}

// lend gives memory of n bytes between canaries. If the last GET failed, its memory must be as that left it: no READ of
// it lands any more.
func (m *bytesMemory) lend(at, n int) (dst []byte, err error) {
	if m.failed {
		err = clean(m.last, false)
		fillCanary(m.last)
	}
	m.failed = false
	at += bytesMargin
	return m.all[at : at+n : at+n], err
}

// returned judges what is in dst when its GET is over, of which n bytes are the answer. Then all is canaries again.
func (m *bytesMemory) returned(at int, dst []byte, n int, failed bool) error {
	err := clean(dst[n:], true)
	for _, b := range [][]byte{m.all[at : at+bytesMargin], m.all[at+bytesMargin+len(dst):][:bytesMargin]} {
		if bad := clean(b, false); bad != nil {
			err = errors.Join(err, fmt.Errorf("outside of %d bytes: %w", len(dst), bad))
		}
	}
	fillCanary(dst)
	m.last, m.failed = dst, failed
	return err
}

// bytesClient is a client process of TestBytes.
type bytesClient struct {
	bytesConfig
	cs   []*client.Client // by tenant
	seq  atomic.Uint64
	mu   sync.Mutex
	all  *bytesTally
	stop context.Context
}

// bytesMain runs a client process until SIGTERM.
func bytesMain(doc string) error {
	x := &bytesClient{all: newTally()}
	if err := json.Unmarshal([]byte(doc), &x.bytesConfig); err != nil {
		return err
	}
	var cancel context.CancelFunc
	x.stop, cancel = signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	device, err := providers.Open(x.Provider, providers.Options{})
	if err != nil {
		return err
	}
	defer device.Close()
	for _, ns := range x.Namespaces {
		c, err := x.open(ns, device)
		if c == nil {
			return err
		}
		x.cs = append(x.cs, c)
	}
	var wg sync.WaitGroup
	for w := range x.Workers {
		wg.Go(func() { (&bytesWorker{x: x, n: w, m: newBytesMemory(), t: newTally()}).run() })
	}
	for x.stop.Err() == nil {
		select {
		case <-x.stop.Done():
		case <-time.After(100 * time.Millisecond):
		}
		x.report()
	}
	wg.Wait()
	x.report()
	for _, c := range x.cs {
		err = errors.Join(err, c.Close())
	}
	return err
}

// open gives a client of a namespace, nil with the end of the process.
func (x *bytesClient) open(ns string, device *rdma.Device) (*client.Client, error) {
	for {
		ctx, end := context.WithTimeout(x.stop, 5*time.Second)
		c, err := client.Open(ctx, client.Options{Directory: []string{x.Directory}, Namespace: ns,
			Provider: x.Provider, Devices: []*rdma.Device{device}, Name: fmt.Sprintf("bytes %d.%d", x.Client, x.Life),
			OpTimeout: 5 * time.Second, CacheBytes: 4 << 20})
		end()
		switch {
		case err == nil:
			return c, nil
		case x.stop.Err() != nil:
			return nil, nil
		case errors.Is(err, client.ErrInvalid):
			return nil, err
		}
	}
}

func (x *bytesClient) report() {
	x.mu.Lock()
	defer x.mu.Unlock()
	b, _ := json.Marshal(x.all) // plain numbers and texts
	_, _ = os.Stdout.Write(append(b, '\n'))
}

// bytesWorker does one operation after another, of one tenant after the other, in the same memory.
type bytesWorker struct {
	x      *bytesClient
	n      int
	m      *bytesMemory
	t      *bytesTally
	rng    *rand.Rand
	tenant int
	value  []byte
}

func (w *bytesWorker) run() {
	x := w.x
	w.rng = rand.New(rand.NewPCG(x.Seed, uint64(x.Client)<<40|uint64(x.Life)<<16|uint64(w.n)))
	for i := 0; x.stop.Err() == nil; i++ {
		if w.rng.IntN(8) == 0 {
			w.tenant = w.rng.IntN(len(x.cs))
		}
		switch p := w.rng.IntN(1000); {
		case p < 20:
			w.put()
		case p < 24:
			w.del()
		case p < 100:
			w.batch()
		case p < 250:
			w.get()
		default:
			w.getInto()
		}
		if i%64 == 0 || len(w.t.Wrong) > 0 {
			x.mu.Lock()
			x.all.add(w.t)
			x.mu.Unlock()
			w.t = newTally()
		}
	}
	x.mu.Lock()
	x.all.add(w.t)
	x.mu.Unlock()
}

// pick chooses a key.
func (w *bytesWorker) pick() (class int, key uint64) {
	p := w.rng.IntN(100_000)
	for p >= bytesClasses[class].often {
		p -= bytesClasses[class].often
		class++
	}
	return class, uint64(class)<<32 | uint64(w.rng.IntN(w.x.Keys[class]))
}

func bytesKey(key uint64) []byte { return binary.BigEndian.AppendUint64([]byte("bytes/"), key) }

// patient is a context that mostly lasts, and of long values sometimes ends while they are under way.
func (w *bytesWorker) patient(class int) (context.Context, context.CancelFunc) {
	if class == 0 && w.rng.IntN(200) > 0 || class > 0 && w.rng.IntN(8) > 0 {
		return context.Background(), func() {}
	}
	return context.WithTimeout(context.Background(), time.Duration(w.rng.Int64N(int64(20*time.Microsecond)<<(3*class))))
}

// room is how many bytes a GET of that class is lent: mostly enough.
func (w *bytesWorker) room(class int) int {
	c := bytesClasses[class]
	switch w.rng.IntN(8) {
	case 0:
		return c.least + w.rng.IntN(c.most-c.least)
	case 1:
		return w.rng.IntN(c.least)
	}
	return c.most
}

// over counts a GET that ended with err, and its value of n bytes, and says whether there is one.
func (w *bytesWorker) over(err error, n int) bool {
	w.t.Gets++
	switch {
	case err == nil:
		w.t.Hits, w.t.Bytes = w.t.Hits+1, w.t.Bytes+int64(n)
		return true
	case errors.Is(err, client.ErrNotFound):
		w.t.Misses++
	default:
		w.t.Failed[kindOf(err)]++
	}
	return false
}

// kindOf names the kind of an error.
func kindOf(err error) string {
	for _, k := range []struct {
		is   error
		name string
	}{
		{client.ErrUnknownOutcome, "unknown outcome"}, {context.DeadlineExceeded, "deadline"},
		{io.ErrShortBuffer, "short buffer"}, {client.ErrFull, "full"}, {client.ErrCorrupt, "corrupt"},
		{client.ErrUnavailable, "unavailable"}, {client.ErrNotFound, "not found"},
	} {
		if errors.Is(err, k.is) {
			return k.name
		}
	}
	return "other: " + err.Error()
}

func (w *bytesWorker) wrong(what string, class int, key uint64, err error) {
	if err != nil {
		w.t.Wrong = append(w.t.Wrong, fmt.Sprintf("client %d.%d.%d, %s of class %d, tenant %d, key %d: %v", w.x.Client,
			w.x.Life, w.n, what, class, w.tenant, key, err))
	}
}

func (w *bytesWorker) getInto() {
	class, key := w.pick()
	at := w.rng.IntN(1 << 10)
	dst, late := w.m.lend(at, w.room(class))
	w.wrong("before GetInto", class, key, late)
	ctx, cancel := w.patient(class)
	n, err := w.x.cs[w.tenant].GetInto(ctx, bytesKey(key), dst)
	cancel()
	if !w.over(err, n) {
		n = 0
	} else if n > len(dst) {
		w.wrong("GetInto", class, key, fmt.Errorf("%d bytes in %d", n, len(dst)))
		n = 0
	} else {
		w.wrong("GetInto", class, key, judgeBytes(dst[:n], uint64(w.tenant), key))
	}
	w.wrong(fmt.Sprintf("after GetInto (%v)", err), class, key, w.m.returned(at, dst, n, err != nil))
	if errors.Is(err, client.ErrNotFound) && w.rng.IntN(4) == 0 {
		w.putKey(class, key)
	}
}

func (w *bytesWorker) get() {
	class, key := w.pick()
	ctx, cancel := w.patient(class)
	it, err := w.x.cs[w.tenant].Get(ctx, bytesKey(key))
	cancel()
	if w.over(err, len(it.Value)) {
		w.wrong("Get", class, key, judgeBytes(it.Value, uint64(w.tenant), key))
	}
}

// batch gets some keys at once, into pieces of the memory.
func (w *bytesWorker) batch() {
	type part struct {
		class int
		key   uint64
		at    int
		dst   []byte
	}
	var ops []client.Op
	var parts []part
	most, at := 0, 0
	for range 2 + w.rng.IntN(14) {
		p := part{at: at}
		p.class, p.key = w.pick()
		n := w.room(p.class)
		if p.class == 3 || at+n+2*bytesMargin > len(w.m.all) {
			continue
		}
		dst, late := w.m.lend(at, n)
		w.wrong("before a batch", p.class, p.key, late)
		p.dst, at = dst, at+n+2*bytesMargin
		op := client.Op{Kind: client.OpGet, Key: bytesKey(p.key), Into: dst[:0]}
		if len(dst) == 0 {
			op.Into = nil
		}
		ops, parts, most = append(ops, op), append(parts, p), max(most, p.class)
	}
	ctx, cancel := w.patient(most)
	w.x.cs[w.tenant].Do(ctx, ops)
	cancel()
	for i, p := range parts {
		v, n := ops[i].Item.Value, 0
		if w.over(ops[i].Err, len(v)) {
			w.wrong("a batch", p.class, p.key, judgeBytes(v, uint64(w.tenant), p.key))
			if len(v) <= len(p.dst) && len(v) > 0 && &v[0] == &p.dst[0] {
				n = len(v)
			}
		}
		w.wrong(fmt.Sprintf("after a batch (%v)", ops[i].Err), p.class, p.key,
			w.m.returned(p.at, p.dst, n, ops[i].Err != nil))
	}
}

func (w *bytesWorker) put() {
	class, key := w.pick()
	if class == 0 && w.rng.IntN(4) == 0 { // else values of these classes would be written rarely
		class = 1 + w.rng.IntN(2)
		key = uint64(class)<<32 | uint64(w.rng.IntN(w.x.Keys[class]))
	}
	w.putKey(class, key)
}

// putKey writes a value of a key, as users of a cache do who have missed one.
func (w *bytesWorker) putKey(class int, key uint64) {
	c := bytesClasses[class]
	n := c.least + w.rng.IntN(c.most-c.least+1)
	if w.value = w.value[:0]; cap(w.value) < n {
		w.value = make([]byte, n)
	}
	w.value = w.value[:n]
	version := uint64(w.x.Client)<<56 | uint64(w.x.Life)<<40 | w.x.seq.Add(1)
	makeBytes(w.value, uint64(w.tenant), key, version)
	ctx, cancel := w.patient(class)
	_, err := w.x.cs[w.tenant].Put(ctx, bytesKey(key), w.value, client.PutOptions{})
	cancel()
	w.wrote(err)
}

func (w *bytesWorker) del() {
	_, key := w.pick()
	w.wrote(w.x.cs[w.tenant].Delete(context.Background(), bytesKey(key)))
}

func (w *bytesWorker) wrote(err error) {
	if err == nil || errors.Is(err, client.ErrNotFound) {
		w.t.Puts++
		return
	}
	w.t.FailedPuts[kindOf(err)]++
}
