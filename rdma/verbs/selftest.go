//go:build verbs && cgo && linux

package verbs

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/rdma/driver"
)

// testResult is a device's answer to its self-test.
type testResult struct {
	inline         int
	atomicThenRead bool
	limits         bool  // connections have no more rights than they are given
	atomics        error // why they cannot be used
	err            error // nothing works
}

// selfTest connects a queue pair to itself and tries the adapter's atomics.
func (d *device) selfTest() (r testResult) {
	t := &selfTest{d: d}
	defer func() {
		for _, f := range slices.Backward(t.undo) {
			r.err = errors.Join(r.err, f())
		}
	}()
	if r.err = t.open(); r.err != nil {
		return r
	}
	r.inline, r.limits = t.q.inline, true
	if r.err = t.writeAndRead(); r.err == nil && d.iwarp() {
		r.limits, r.err = t.limits(t.pd)
	}
	if r.err != nil || !d.canCAS {
		return r
	}
	if r.atomics = t.atomics(); r.atomics == nil {
		r.atomicThenRead, r.atomics = t.readsBehindAtomics()
	}
	return r
}

// selfTest is a queue pair connected to itself, over a page of memory: words of it at the
// front, and the target of its verbs behind them.
type selfTest struct {
	d    *device
	m    *driver.Memory
	reg  driver.MR // all of it, for the verbs
	own  driver.MR // the words at the front
	cq   driver.CQ
	q    *qp
	pd   driver.PD
	undo []func() error
	// Of iWARP: where it dials, and the rights that it gets there.
	l      driver.Listener
	rights driver.Access
}

// selfTestTarget is where the verbs' target begins, in bytes.
const selfTestTarget = 128

// open makes what the test needs; undo takes it back, also where open failed midway.
func (t *selfTest) open() (err error) {
	d := t.d
	if t.m, err = d.Alloc(4096, driver.AllocOptions{Name: "verbs-self-test"}); err != nil {
		return err
	}
	t.undo = append(t.undo, t.m.Free)
	p, err := d.AllocPD()
	if err != nil {
		return err
	}
	t.undo = append(t.undo, p.Dealloc)
	if t.cq, err = d.CreateCQ(256); err != nil {
		return err
	}
	t.undo = append(t.undo, t.cq.Close)
	rights := driver.AccessRemoteRead | driver.AccessRemoteWrite
	if d.canCAS {
		rights |= driver.AccessRemoteAtomic
	}
	native := d.native
	d.native = d.canCAS // register for the adapter's atomics
	t.reg, err = p.RegMR(t.m, 0, 4096, rights)
	d.native = native
	if err != nil {
		return err
	}
	t.undo = append(t.undo, t.reg.Deregister)
	if t.own, err = p.RegMR(t.m, 0, selfTestTarget, driver.AccessLocal); err != nil {
		return err
	}
	t.undo = append(t.undo, t.own.Deregister)
	t.pd = p
	if d.iwarp() {
		t.q, err = t.dial(p, rights)
		return err
	}
	if t.q, err = newQP(d, p.(*pd), t.cq.(*cq), rights); err != nil {
		return err
	}
	t.undo = append(t.undo, t.q.Close)
	ep := d.endpoint(t.q.num)
	ep.rdAtomic = min(d.initDepth, d.destDepth)
	return t.q.connect(ep, ep)
}

func (t *selfTest) word(i int) []byte { return t.m.Bytes[8*i : 8*i+8 : 8*i+8] }

// run posts wrs, aimed at the target, behind one doorbell and waits for the last one's
// completion.
func (t *selfTest) run(wrs ...driver.WR) error {
	for i := range wrs {
		wrs[i].LKey, wrs[i].RKey = t.own.LKey(), t.reg.RKey()
		wrs[i].RemoteAddr = t.reg.Base() + selfTestTarget
		wrs[i].ID = uint64(i)
	}
	wrs[len(wrs)-1].Flags |= driver.Signaled
	if n, err := t.q.PostSend(wrs); n < len(wrs) {
		return err
	}
	var wc [1]driver.WC
	for deadline := time.Now().Add(max(4*t.d.o.PeerTimeout, 2*time.Second)); ; {
		if t.cq.Poll(wc[:]) == 1 {
			if wc[0].Status != driver.Success {
				return fmt.Errorf("%v: %v", wc[0].Op, wc[0].Status)
			}
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New("no completion")
		}
		time.Sleep(20 * time.Microsecond)
	}
}

// writeAndRead leaves 41 in the target.
func (t *selfTest) writeAndRead() error {
	putWord(t.word(0), 41)
	if err := t.run(driver.WR{Op: driver.OpWrite, Local: t.word(0)},
		driver.WR{Op: driver.OpRead, Local: t.word(1)}); err != nil {
		return err
	}
	if got := getWord(t.word(1)); got != 41 {
		return fmt.Errorf("wrote 41, read %d", got)
	}
	return nil
}

// atomics tries the adapter's atomics on the 41 that writeAndRead left.
func (t *selfTest) atomics() error {
	for _, s := range []struct {
		op                           driver.Opcode
		compare, swap, before, after uint64
	}{
		{driver.OpCmpAndSwp, 40, 7, 41, 41},
		{driver.OpCmpAndSwp, 41, 0x0123456789abcdef, 41, 0x0123456789abcdef},
		{driver.OpFetchAdd, 0, 0x11, 0x0123456789abcdef, 0x0123456789abce00},
	} {
		if err := t.run(driver.WR{Op: s.op, Local: t.word(2), Compare: s.compare, Swap: s.swap}); err != nil {
			return err
		}
		if found, left := getWord(t.word(2)), getWord(t.m.Bytes[selfTestTarget:]); found != s.before ||
			left != s.after {
			return fmt.Errorf("%v found %#x and left %#x, want %#x and %#x", s.op, found, left, s.before, s.after)
		}
	}
	return nil
}

// readsBehindAtomics reports whether READs that follow an atomic see it. InfiniBand's table
// of operation ordering says that they do; adapters that do not keep to it are rare, and one
// that ever shows it is believed.
func (t *selfTest) readsBehindAtomics() (see bool, err error) {
	see = true
	for i := range uint64(16) {
		v := getWord(t.m.Bytes[selfTestTarget:])
		if err := t.run(driver.WR{Op: driver.OpCmpAndSwp, Local: t.word(2), Compare: v, Swap: v + i + 1},
			driver.WR{Op: driver.OpRead, Local: t.word(3)}); err != nil {
			return see, err
		}
		see = see && getWord(t.word(3)) == v+i+1
	}
	return see, nil
}
