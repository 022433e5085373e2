package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// queueOf is the CQ below a Lane's last QP.
func queueOf(t *testing.T, e *rdmatest.Env) *cq {
	t.Helper()
	d := e.H.Active.Driver().(*device)
	d.mu.Lock()
	defer d.mu.Unlock()
	var last *qp
	for q := range d.mu.qps {
		if last == nil || q.num > last.num {
			last = q
		}
	}
	return last.cq
}

// readers says who reads each QP of a CQ, in the order of dialing, and whether the CQ is minded.
func (c *cq) readers() (by []readBy, minded bool) {
	c.own.Lock()
	defer c.own.Unlock()
	for _, q := range c.own.qps {
		by = append(by, q.by)
	}
	return by, c.own.minder != nil
}

// silent is a memory node that says nothing after the welcome, and then, when it is told to,
// what it is given.
func silent(t *testing.T) (addr string, say chan []byte) {
	say = make(chan []byte)
	addr = rawNode(t, func(c net.Conn) {
		if welcomeDialer(c) != nil {
			return
		}
		for b := range say {
			if b == nil {
				return
			}
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() { close(say) })
	return addr, say
}

func wrote(seq uint16) []byte {
	return appendReply(nil, reply{op: driver.OpWrite, status: driver.Success, seq: seq})
}

// crowd is QPs to silent memory nodes on one CQ.
type crowd struct {
	e   *rdmatest.Env
	l   *rdmatest.Lane
	qps []*rdma.QP
	say []chan []byte
	mr  *rdma.MR
	// word is what all WRITEs write.
	word []byte
}

func newCrowd(t *testing.T, n int, o Options) *crowd {
	c := &crowd{e: rdmatest.NewEnv(t, waiting(harness(t, Options{}, o)))}
	c.l = c.e.Unconnected(4096)
	c.mr = c.e.Memory(64, rdmatest.All)
	c.word = c.l.Word()
	for range n {
		addr, say := silent(t)
		q, err := c.e.H.Active.Dial(c.e.Ctx(), c.l.PD, c.l.CQ, addr, nil)
		c.e.Must(err)
		t.Cleanup(func() { _ = q.Abort() })
		c.qps, c.say = append(c.qps, q), append(c.say, say)
	}
	return c
}

// post posts a WRITE on QP i; its memory node answers when it is told to.
func (c *crowd) post(i int, flags rdma.SendFlags) {
	w := c.l.Write(c.mr, 0, c.word)
	w.ID, w.Flags = uint64(i), flags
	n, err := c.qps[i].PostSend([]rdma.WR{w})
	if n != 1 {
		c.e.Must(err)
	}
}

// take waits for what nobody says, so that the QPs are read by who waits.
func (c *crowd) take(t *testing.T) {
	t.Helper()
	if !c.l.CQ.Wait(time.Millisecond) {
		t.Fatal("Wait has nothing to wait for")
	}
}

// wait is Wait and Poll until there is a WC.
func (c *crowd) wait(t *testing.T) rdma.WC {
	t.Helper()
	var wcs [1]rdma.WC
	for end := time.Now().Add(rdmatest.Patience); time.Now().Before(end); {
		if c.l.CQ.Poll(wcs[:]) == 1 {
			return wcs[0]
		}
		if !c.l.CQ.Wait(rdmatest.Patience) {
			t.Fatal("Wait has nothing to wait for")
		}
	}
	t.Fatalf("no WC within %v", rdmatest.Patience)
	panic("unreachable")
}

// TestWaitReads: after a Wait no goroutine stands between the socket and whoever waits,
// whether one memory node has something to answer or several, in whatever order they do.
func TestWaitReads(t *testing.T) {
	c := newCrowd(t, 3, Options{PeerTimeout: rdmatest.Patience})
	q := queueOf(t, c.e)
	if by, minded := q.readers(); !minded || !slices.Equal(by, []readBy{byCQ, byCQ, byCQ}) {
		t.Fatalf("read by %v, minded %v before any Wait", by, minded)
	}
	for round, order := range [][]int{{0}, {2, 1, 0}, {1, 0, 2}, {2}, {0, 2}} {
		for _, i := range order {
			c.post(i, rdma.Signaled)
		}
		c.take(t)
		for _, i := range order {
			c.say[i] <- wrote(c.seq(i))
			if wc := c.wait(t); wc.ID != uint64(i) || wc.Status != driver.Success {
				t.Fatalf("round %d: %+v, want QP %d's", round, wc, i)
			}
		}
		if by, minded := q.readers(); minded || !slices.Equal(by, []readBy{byCQ, byCQ, byCQ}) {
			t.Fatalf("round %d: read by %v, minded %v", round, by, minded)
		}
	}
	if c.l.CQ.Wait(0) {
		t.Error("Wait waits for nothing")
	}
}

// seq is the number of the last WR posted on QP i.
func (c *crowd) seq(i int) uint16 {
	n := c.qps[i].Counters()
	return uint16(n.Verbs[rdma.OpWrite] - 1)
}

// TestWaitEnds: a Wait ends when its time is over or it is woken, also before it has
// begun, with one QP and with several.
func TestWaitEnds(t *testing.T) {
	for n := range 3 {
		t.Run(fmt.Sprint(n, " outstanding"), func(t *testing.T) {
			c := newCrowd(t, 2, Options{PeerTimeout: rdmatest.Patience})
			for i := range n {
				c.post(i, rdma.Signaled)
			}
			cq := c.l.CQ
			if n == 0 {
				if cq.Wait(time.Hour) {
					t.Fatal("Wait waits for nothing")
				}
				return
			}
			for range 3 {
				if !cq.Wait(time.Millisecond) {
					t.Fatal("Wait has nothing to wait for")
				}
				cq.Wake()
				if !cq.Wait(time.Hour) {
					t.Fatal("Wait has nothing to wait for")
				}
				woken := make(chan bool)
				go func() { woken <- cq.Wait(time.Hour) }()
				testutil.Until(t, "the Wait is parked", func() bool { return queueOf(t, c.e).parked.Load() })
				cq.Wake()
				if !receive(t, woken, "a woken Wait") {
					t.Fatal("Wait has nothing to wait for")
				}
			}
			for i := range n {
				c.say[i] <- wrote(0)
			}
			got := []uint64{}
			for range n {
				wc := c.wait(t)
				if wc.Status != driver.Success {
					t.Fatal(wc)
				}
				got = append(got, wc.ID)
			}
			if slices.Sort(got); len(got) != n || got[n-1] != uint64(n-1) {
				t.Fatalf("completed %v", got)
			}
		})
	}
}

// TestReadyAfterWait: whoever turns to Ready gets what comes from then on.
func TestReadyAfterWait(t *testing.T) {
	c := newCrowd(t, 2, Options{PeerTimeout: rdmatest.Patience})
	for seq := range uint16(3) {
		c.post(0, rdma.Signaled)
		c.take(t)
		c.say[0] <- wrote(2 * seq)
		c.wait(t)
		c.post(0, rdma.Signaled)
		ready := c.l.CQ.Ready()
		c.say[0] <- wrote(2*seq + 1)
		var wcs [1]rdma.WC
		for c.l.CQ.Poll(wcs[:]) == 0 {
			receive(t, ready, "Ready")
		}
	}
}

// TestIdleAfterWait: nobody waits any more, and still replies to what is unsignaled are taken
// in and a memory node's end is noticed.
func TestIdleAfterWait(t *testing.T) {
	c := newCrowd(t, 2, Options{PeerTimeout: 400 * time.Millisecond})
	queue := queueOf(t, c.e)
	c.post(0, rdma.Signaled)
	c.post(1, rdma.Signaled)
	c.take(t)
	c.say[0] <- wrote(0)
	c.say[1] <- wrote(0)
	c.wait(t)
	c.wait(t)
	c.post(0, 0)
	c.say[0] <- wrote(1)
	c.say[1] <- nil
	d := c.e.H.Active.Driver().(*device)
	testutil.Until(t, "the reply to what is unsignaled is taken in", func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		for q := range d.mu.qps {
			if q.unreplied.Load() != 0 {
				return false
			}
		}
		return true
	})
	testutil.Until(t, "the end of an idle connection is noticed", func() bool {
		return c.qps[1].State() == driver.StateErr
	})
	if s := c.qps[0].State(); s != driver.StateRTS {
		t.Errorf("the other one is in state %d", s)
	}
	if by, minded := queue.readers(); !minded || by[0] != byCQ || by[1] != byNobody {
		t.Errorf("read by %v, minded %v while nobody waits", by, minded)
	}
	c.post(0, rdma.Signaled) // and it can be waited for again
	c.say[0] <- wrote(2)
	if wc := c.wait(t); wc.Status != driver.Success {
		t.Error(wc)
	}
}

// TestWaitLongerThanTicks: who waits keeps the sockets, however long it takes.
func TestWaitLongerThanTicks(t *testing.T) {
	c := newCrowd(t, 1, Options{PeerTimeout: 200 * time.Millisecond})
	queue := queueOf(t, c.e)
	c.post(0, rdma.Signaled)
	wc := c.wait(t)
	if wc.Status != driver.RetryExcErr {
		t.Fatalf("%+v, want RETRY_EXC_ERR of a silent peer", wc)
	}
	if by, _ := queue.readers(); !slices.Equal(by, []readBy{byNobody}) {
		t.Errorf("read by %v", by)
	}
}

// TestSilentPeerAmongSeveral: the one that is silent is given up, and its loss noticed
// by a Wait for both.
func TestSilentPeerAmongSeveral(t *testing.T) {
	c := newCrowd(t, 2, Options{PeerTimeout: 200 * time.Millisecond})
	c.post(0, rdma.Signaled)
	c.post(1, rdma.Signaled)
	seen := map[uint64]bool{}
	for range 2 {
		wc := c.wait(t)
		if wc.Status != driver.RetryExcErr || seen[wc.ID] {
			t.Fatalf("%+v, want RETRY_EXC_ERR once each", wc)
		}
		seen[wc.ID] = true
	}
}

// TestCloseDuringWait closes QPs under a Wait for them: their WCs come, none afterwards, and the
// other QPs go on.
func TestCloseDuringWait(t *testing.T) {
	for _, outstanding := range []int{1, 3} {
		for _, abort := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d outstanding, abort %v", outstanding, abort), func(t *testing.T) {
				c := newCrowd(t, 3, Options{PeerTimeout: 500 * time.Millisecond})
				for i := range outstanding {
					c.post(i, rdma.Signaled)
				}
				queue := queueOf(t, c.e)
				got := make(chan rdma.WC)
				go func() {
					for {
						var wcs [1]rdma.WC
						if c.l.CQ.Poll(wcs[:]) == 1 {
							got <- wcs[0]
							return
						}
						c.l.CQ.Wait(rdmatest.Patience)
					}
				}()
				testutil.Until(t, "the Wait is parked", func() bool { return queue.parked.Load() })
				end := c.qps[0].Close
				if abort {
					end = c.qps[0].Abort
				}
				closed := make(chan error, 1)
				go func() { closed <- end() }()
				if wc := receive(t, got, "the WC of the closed QP"); wc.ID != 0 || wc.Status != driver.WRFlushErr {
					t.Errorf("%+v, want WR_FLUSH_ERR of QP 0", wc)
				}
				if err := receive(t, closed, "Close"); !errors.Is(err, ErrUnconfirmed) {
					t.Errorf("Close gave %v, want ErrUnconfirmed", err)
				}
				for i := 1; i < outstanding; i++ {
					c.say[i] <- wrote(0)
					if wc := c.wait(t); wc.ID != uint64(i) || wc.Status != driver.Success {
						t.Errorf("%+v, want QP %d's success", wc, i)
					}
				}
			})
		}
	}
}

// TestCloseWhileWriting ends a QP whose WRITE waits for room in the socket, as its memory node reads nothing: by Abort
// at once, by Close after a PeerTimeout.
func TestCloseWhileWriting(t *testing.T) {
	for _, abort := range []bool{false, true} {
		t.Run(fmt.Sprintf("abort %v", abort), func(t *testing.T) {
			limit := 500 * time.Millisecond
			if abort {
				limit = 10 * rdmatest.Patience // that of the test's own is earlier
			}
			e := rdmatest.NewEnv(t, waiting(harness(t, Options{}, Options{PeerTimeout: limit})))
			l := e.Unconnected(maxMsg)
			mr := e.Memory(64, rdmatest.All) // its key is a stranger's to the silent one
			addr, _ := silent(t)
			q, err := e.H.Active.Dial(e.Ctx(), l.PD, l.CQ, addr, nil)
			e.Must(err)
			w := l.Write(mr, 0, l.Buf(maxMsg))
			w.ID = 7
			if n, err := q.PostSend([]rdma.WR{w}); n != 1 {
				t.Fatal(err)
			}
			end := q.Close
			if abort {
				end = q.Abort
			}
			ended := make(chan error, 1)
			go func() { ended <- end() }()
			if err := receive(t, ended, "the end"); !errors.Is(err, ErrUnconfirmed) {
				t.Errorf("it gave %v, want ErrUnconfirmed", err)
			}
			var wcs [2]rdma.WC
			if n := l.CQ.Poll(wcs[:]); n != 1 || wcs[0].ID != 7 || wcs[0].Status != driver.WRFlushErr {
				t.Errorf("%d WCs, %+v; want WR_FLUSH_ERR", n, wcs[0])
			}
		})
	}
}

// TestDialDuringWait: a QP that is new on a CQ under a Wait is waited for as well.
func TestDialDuringWait(t *testing.T) {
	c := newCrowd(t, 1, Options{PeerTimeout: rdmatest.Patience})
	queue := queueOf(t, c.e)
	c.post(0, rdma.Signaled)
	waited := make(chan bool)
	go func() { waited <- c.l.CQ.Wait(0) }()
	testutil.Until(t, "the Wait is parked", func() bool { return queue.parked.Load() })
	addr, say := silent(t)
	q, err := c.e.H.Active.Dial(c.e.Ctx(), c.l.PD, c.l.CQ, addr, nil)
	c.e.Must(err)
	t.Cleanup(func() { _ = q.Abort() })
	w := c.l.Write(c.mr, 0, c.l.Word())
	w.ID = 7
	if n, err := q.PostSend([]rdma.WR{w}); n != 1 {
		t.Fatal(err)
	}
	say <- wrote(0)
	if !receive(t, waited, "the Wait") {
		t.Fatal("Wait has nothing to wait for")
	}
	if wc := c.wait(t); wc.ID != 7 || wc.Status != driver.Success {
		t.Fatal(wc)
	}
}

// TestWaitLeavesNothingOpen counts the process's descriptors over CQs on which several
// QPs were waited for at once.
func TestWaitLeavesNothingOpen(t *testing.T) {
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	once := func(t *testing.T) {
		c := newCrowd(t, 2, Options{})
		c.post(0, rdma.Signaled)
		c.post(1, rdma.Signaled)
		c.take(t)
		c.say[1] <- wrote(0)
		c.wait(t)
		if queueOf(t, c.e).own.poller == nil {
			t.Fatal("no epoll descriptor")
		}
	}
	t.Run("first", once)
	before := open()
	for range 5 {
		t.Run("again", once)
	}
	testutil.Until(t, "every descriptor is closed", func() bool { return open() <= before })
}

// TestWaitOneProcessor: where goroutines take turns on one processor, a goroutine reads.
func TestWaitOneProcessor(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	c := newCrowd(t, 1, Options{})
	c.post(0, rdma.Signaled)
	if c.l.CQ.Wait(0) {
		t.Error("Wait read by itself")
	}
	c.say[0] <- wrote(0)
	if wc := collect(t, c.l, 1)[0]; wc.Status != driver.Success {
		t.Error(wc)
	}
}

// TestIdleBesideWaits: a connection on which nothing is outstanding ends, and that is noticed though the CQ is waited
// for without a pause, for another connection's replies.
func TestIdleBesideWaits(t *testing.T) {
	c := newCrowd(t, 2, Options{PeerTimeout: 400 * time.Millisecond})
	for i := range 2 {
		c.post(i, rdma.Signaled)
	}
	c.take(t)
	c.say[0] <- wrote(0)
	c.say[1] <- wrote(0)
	c.wait(t)
	c.wait(t)
	c.say[1] <- nil
	for end := time.Now().Add(rdmatest.Patience); c.qps[1].State() != driver.StateErr; {
		if time.Now().After(end) {
			t.Fatalf("the end of the idle connection is not noticed within %v", rdmatest.Patience)
		}
		c.post(0, rdma.Signaled)
		c.say[0] <- wrote(c.seq(0))
		if wc := c.wait(t); wc.Status != driver.Success {
			t.Fatal(wc)
		}
	}
	if s := c.qps[0].State(); s != driver.StateRTS {
		t.Errorf("the other one is in state %d", s)
	}
}
