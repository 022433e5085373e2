package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// TestLimit has agents take turns by a clock of the test's own.
func TestLimit(t *testing.T) {
	for _, c := range []struct {
		perSecond     uint64
		agents, chain int
		seconds       int
	}{
		{1, 1, 1, 20}, {1, 3, 1024, 30}, {3, 2, 2, 30}, {19, 5, 3, 10}, {1000, 1, 1, 2}, {1000, 64, 16, 2},
		{30_000, 7, 1024, 2}, {1_000_000, 4, 1024, 1}, {1_000_003, 9, 1, 1},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			l := newLimit(c.perSecond, 0)
			end := time.Duration(c.seconds) * time.Second
			turns, got := make([]time.Duration, c.agents), make([]int, c.agents)
			total := 0
			for {
				who := 0 // whose turn is first
				for i, at := range turns {
					if at < turns[who] {
						who = i
					}
				}
				at := turns[who]
				if at >= end {
					break
				}
				k, turn := l.reserve(at, c.chain, true)
				if k < 1 || k > c.chain || k > maxPiece || turn < at && turn < at-limitBurst {
					t.Fatalf("%d verbs at %v, asked for %d at %v", k, turn, c.chain, at)
				}
				if turn = max(turn, at); turn < end {
					got[who], total = got[who]+k, total+k
				}
				turns[who] = turn
			}
			if want := int(c.perSecond) * c.seconds; total < want*9/10 || total > want+l.piece {
				t.Errorf("%d verbs in %d s, want %d", total, c.seconds, want)
			}
			for i := range got {
				if d := got[i] - got[0]; d > 2*l.piece || d < -2*l.piece { // one at the beginning, one at the end
					t.Errorf("verbs of the agents: %d, want the same", got)
					break
				}
			}
		})
	}
}

// TestLimitSaves: what was not used for long counts for limitBurst, to agents and to loops.
func TestLimitSaves(t *testing.T) {
	const perSecond, burst = 1000, 50
	for _, patient := range []bool{true, false} {
		l := newLimit(perSecond, 0)
		at, n := time.Hour, 0
		for {
			k, turn := l.reserve(at, 10, patient)
			if k == 0 || turn > at {
				break
			}
			n += k
		}
		if n < burst || n > burst+10 {
			t.Errorf("%d verbs at once, want %d", n, burst)
		}
	}
	l := newLimit(maxLimit, 0)
	if k, turn := l.reserve(0, 1, true); k != 1 || turn != 0 || l.next.Load() != 1 {
		t.Errorf("%d verbs at %v, the next at %d ns", k, turn, l.next.Load())
	}
}

// allWays runs f in each way that an agent is served.
func allWays(t *testing.T, f func(t *testing.T, passive, active Options)) {
	bothWays(t, func(t *testing.T) { f(t, Options{}, Options{}) })
	t.Run("tls", func(t *testing.T) {
		passive, active := tlsOptions(t)
		f(t, passive, active)
	})
}

// agentsPaced is how many agents wait for a turn.
func agentsPaced(e *rdmatest.Env) (n int) {
	d := e.H.Passive.Driver().(*device)
	d.mu.Lock()
	defer d.mu.Unlock()
	for a := range d.mu.agents {
		a.link.Lock()
		if a.link.paced != nil {
			n++
		}
		a.link.Unlock()
	}
	return n
}

// paced is how long agents of pd have waited for turns.
func paced(pd *rdma.PD) time.Duration {
	d, _ := pd.Paced()
	return d
}

func awaitPaced(t *testing.T, e *rdmatest.Env, want int) {
	t.Helper()
	testutil.UntilNone(t, "agents that wait for a turn, beyond those expected", func() int {
		return agentsPaced(e) - want
	})
}

// additions is a chain of n FETCH_ADDs of 1 to the word at off.
func additions(l *rdmatest.Lane, mr *rdma.MR, off uint64, n int) []rdma.WR {
	wrs := make([]rdma.WR, n)
	word := l.Word()
	for i := range wrs {
		wrs[i] = l.Add(mr, off, word, 1)
	}
	return wrs
}

// queue has the next turn of each limit come so much later, as if others were in front.
func queue(e *rdmatest.Env, later time.Duration) {
	d := e.H.Passive.Driver().(*device)
	d.mu.Lock()
	defer d.mu.Unlock()
	for p := range d.mu.pds {
		if l := p.limit.Load(); l != nil {
			l.next.Add(int64(later))
		}
	}
}

// held posts a chain on a new lane whose turn comes in an hour, and waits until its agent waits.
func held(t *testing.T, e *rdmatest.Env, mr *rdma.MR, off uint64) (*rdmatest.Lane, uint64) {
	t.Helper()
	e.Must(e.PD.LimitRate(1))
	queue(e, time.Hour)
	l := e.Dial()
	before := agentsPaced(e)
	first, err := l.Post(additions(l, mr, off, 1000)...)
	e.Must(err)
	awaitPaced(t, e, before+1)
	return l, first
}

// TestLimitRate: several lanes with chains, short and long, get together no more than the limit, and each gets some.
func TestLimitRate(t *testing.T) {
	allWays(t, func(t *testing.T, passive, active Options) {
		const perSecond, verbs = 4000, 1200
		e := rdmatest.NewEnv(t, harness(t, passive, active))
		chains := []int{1, 2, 16, 300}
		mr := e.Memory(8*4, rdmatest.All)
		lanes := make([]*rdmatest.Lane, len(chains))
		wrs := make([][]rdma.WR, len(chains))
		for i, n := range chains {
			lanes[i] = e.Dial()
			wrs[i] = additions(lanes[i], mr, uint64(8*i), n)
		}
		var all, running atomic.Int64
		running.Store(int64(len(lanes)))
		began := now()
		e.Must(e.PD.LimitRate(perSecond))
		done := make([]int, len(chains))
		e.Must(rdmatest.Each(len(lanes), func(i int) error {
			defer running.Add(-1)
			for all.Load() < verbs || done[i] == 0 {
				if err := lanes[i].OK(wrs[i]...); err != nil {
					return err
				}
				done[i] += chains[i]
				all.Add(int64(chains[i]))
			}
			return nil
		}))
		took := now() - began
		piece := newLimit(perSecond, 0).piece
		if most := int(perSecond*took/time.Second) + piece; int(all.Load()) > most {
			t.Errorf("%d verbs in %v, want at most %d", all.Load(), took, most)
		}
		t.Logf("%d verbs in %v: %.0f a second of %d; by lane %d", all.Load(), took, float64(all.Load())/took.Seconds(),
			perSecond, done)
		if paced(e.PD) <= 0 || paced(e.PD) > took*time.Duration(len(lanes)) {
			t.Errorf("%d lanes waited for %v in %v", len(lanes), paced(e.PD), took)
		}
		for i := range lanes {
			if got := rdmatest.Le(mr.Bytes()[8*i:]); got != uint64(done[i]) {
				t.Errorf("lane %d: %d verbs took effect, %d completed", i, got, done[i])
			}
		}
	})
}

// TestLimitIsOfOnePD: a neighbour of the same loop works on while others wait.
func TestLimitIsOfOnePD(t *testing.T) {
	allWays(t, func(t *testing.T, passive, active Options) {
		e := rdmatest.NewEnv(t, harness(t, passive, active))
		d := e.H.Passive.Driver().(*device)
		d.loops = min(d.loops, 1)
		mr := e.Memory(64, rdmatest.All)
		other := e.NewPD(e.H.Passive)
		theirs, _ := e.Region(other, 64, rdmatest.All)
		e.Accept = func(r rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			if len(r.Private) > 0 {
				return other, rdmatest.All, nil
			}
			return e.PD, rdmatest.All, nil
		}
		neighbour := e.DialWith(rdmatest.LaneBytes, []byte("other"))
		for i := range 3 {
			held(t, e, mr, uint64(8*i))
		}
		word := neighbour.Word()
		for range 1000 {
			e.Must(neighbour.OK(neighbour.Read(theirs, 0, word)))
		}
		awaitPaced(t, e, 3)
		if paced(other) != 0 {
			t.Errorf("the neighbour waited for %v", paced(other))
		}
	})
}

// TestFencePaced: a fence of an agent that waits for a turn does not wait for it, and nothing of the chain is executed
// any more.
func TestFencePaced(t *testing.T) {
	allWays(t, func(t *testing.T, passive, active Options) {
		o, ended := events()
		passive.Events = o.Events
		e := rdmatest.NewEnv(t, harness(t, passive, active))
		mr := e.Memory(64, rdmatest.All)
		l, first := held(t, e, mr, 0)
		e.Must(e.Peers()[0].Fence(e.Ctx()))
		added := rdmatest.Le(mr.Bytes())
		e.Must(e.PD.LimitRate(0))
		if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonFenced || got.Err != nil {
			t.Errorf("ended %v", got)
		}
		wcs := collect(t, l, 1000)
		for i, wc := range wcs {
			want := driver.WRFlushErr
			switch {
			case i < int(added):
				want = driver.Success
			case i == int(added):
				want = driver.RetryExcErr
			}
			if wc.ID != first+uint64(i) || wc.Status != want {
				t.Fatalf("WC %d of %d that took effect: %+v, want %v", i, added, wc, want)
			}
		}
		if got := rdmatest.Le(mr.Bytes()); got != added || added >= 1000 {
			t.Errorf("%d verbs took effect, %d before the fence", got, added)
		}
	})
}

// TestFencedDoesNotWait: an agent that is fenced before it begins to wait for a turn does not.
func TestFencedDoesNotWait(t *testing.T) {
	d := open(t, Options{PeerTimeout: rdmatest.Patience}).(*device)
	p, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fds[1]) }()
	var cpu atomic.Int64
	m, err := newMeteredConn(os.NewFile(uintptr(fds[0]), "agent"), nil, nil, &cpu)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	a := newAgent(&listener{d: d}, m, "fenced")
	a.pd = p.(*pd)
	a.pd.LimitRate(1)
	a.pd.limit.Load().next.Add(int64(time.Hour))
	next := a.pd.limit.Load().next.Load()
	a.exec.Lock()
	a.fence()
	if _, err := a.pace(1); !errors.Is(err, errFenced) || a.pd.Paced() >= d.o.PeerTimeout/2 {
		t.Errorf("%v after waiting for %v", err, a.pd.Paced())
	}
	// Else a session that comes and goes would use up the tokens of others.
	if got := a.pd.limit.Load().next.Load(); got != next {
		t.Errorf("the next turn is %v later", time.Duration(got-next))
	}
}

// TestClosePaced: neither side's close waits for the turn.
func TestClosePaced(t *testing.T) {
	allWays(t, func(t *testing.T, passive, active Options) {
		o, ended := events()
		passive.Events = o.Events
		// Closing by the peer would be unconfirmed after this time; a slow machine is to have a lot of it.
		active.PeerTimeout = rdmatest.Patience
		e := rdmatest.NewEnv(t, harness(t, passive, active))
		mr := e.Memory(64, rdmatest.All)
		l, _ := held(t, e, mr, 0)
		e.Must(l.Close())
		if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonDeparted {
			t.Errorf("ended %v", got)
		}
		if got := rdmatest.Le(mr.Bytes()); got >= 1000 {
			t.Errorf("%d verbs were executed at once", got)
		}
		held(t, e, mr, 16)
		e.Must(e.Listener().Close())
		if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonFenced {
			t.Errorf("ended %v", got)
		}
	})
}

// TestBreakPaced: a connection that breaks while its agent waits for a turn ends then.
func TestBreakPaced(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		o, ended := events()
		e := rdmatest.NewEnv(t, harness(t, o, Options{}))
		mr := e.Memory(64, rdmatest.All)
		e.Must(e.PD.LimitRate(1))
		c := greeted(t, e.Listener().Addr())
		add := requestOf(driver.OpFetchAdd, mr.RKey(), 0, 8, appendWord(nil, 1)...)
		if _, err := c.Write(doorbellOf(slices.Repeat([][]byte{add}, 100)...)); err != nil {
			t.Fatal(err)
		}
		awaitPaced(t, e, 1)
		_ = c.(*net.TCPConn).SetLinger(0) // close(2) resets the connection
		_ = c.Close()
		if got := receive(t, ended, "PeerClosed"); got.Reason != ReasonLost || !errors.Is(got.Err, syscall.ECONNRESET) {
			t.Errorf("ended %v", got)
		}
	})
}

// TestLimitChanges: a higher limit, and none, hold at once for those who wait, too.
func TestLimitChanges(t *testing.T) {
	allWays(t, func(t *testing.T, passive, active Options) {
		passive.PeerTimeout = 10 * rdmatest.Patience // the limit is looked at again each half of it anyway
		active.PeerTimeout = passive.PeerTimeout
		e := rdmatest.NewEnv(t, harness(t, passive, active))
		mr := e.Memory(64, rdmatest.All)
		for i, perSecond := range []uint64{20_000, 0, 1 << 63} {
			l, first := held(t, e, mr, uint64(8*i))
			e.Must(e.PD.LimitRate(1)) // as it is
			if got := agentsPaced(e); got != 1 {
				t.Errorf("%d agents wait for a turn, want 1", got)
			}
			e.Must(e.PD.LimitRate(perSecond))
			for id := first; id < first+1000; id++ {
				if _, err := l.Wait(id); err != nil {
					t.Fatal(err)
				}
			}
			if got := rdmatest.Le(mr.Bytes()[8*i:]); got != 1000 {
				t.Errorf("%d of 1000 verbs took effect", got)
			}
		}
	})
}

// TestLongTurn: a peer whose turn is further away than its PeerTimeout hears that somebody is there.
func TestLongTurn(t *testing.T) {
	// The peer hears something 16 times in its patience: a busy machine may be late.
	const patient, turn = time.Second, 1500 * time.Millisecond
	passive, active := tlsOptions(t)
	for name, o := range map[string][2]Options{"clear": {}, "tls": {passive, active}} {
		o[0].PeerTimeout, o[1].PeerTimeout = patient/8, patient
		t.Run(name, func(t *testing.T) {
			bothReaders(t, func(t *testing.T, newHarness func(t testing.TB, passive, active Options) rdmatest.Harness) {
				e := rdmatest.NewEnv(t, newHarness(t, o[0], o[1]))
				mr := e.Memory(64, rdmatest.All)
				l := e.Dial()
				e.Must(e.PD.LimitRate(1000))
				queue(e, turn)
				e.Must(l.OK(additions(l, mr, 0, 3)...))
			})
		})
	}
}

// TestDeregisterPaced: an agent that waits for a turn holds no region.
func TestDeregisterPaced(t *testing.T) {
	allWays(t, func(t *testing.T, passive, active Options) {
		e := rdmatest.NewEnv(t, harness(t, passive, active))
		mr, revoke := e.Region(e.PD, 64, rdmatest.All)
		l, first := held(t, e, mr, 0)
		e.Must(revoke())
		added := rdmatest.Le(mr.Bytes())
		e.Must(e.PD.LimitRate(0))
		wcs, err := l.Wait(first + 999)
		if err != nil {
			t.Fatal(err)
		}
		if got := wcs[min(int(added), len(wcs)-1)].Status; got != driver.RemAccessErr {
			t.Errorf("the first verb behind the revocation completed with %v", got)
		}
	})
}

// TestHighLimitAllocatesNothing: a limit that nobody reaches costs no allocation, and leaves the agent in its loop.
func TestHighLimitAllocatesNothing(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
		l, wrs := cachedGet(e)
		e.Must(e.PD.LimitRate(maxLimit))
		wcs := make([]rdma.WC, 4)
		if n := testing.AllocsPerRun(200, func() { get(t, l, wrs, wcs) }); n >= 1 {
			t.Errorf("%v allocations a doorbell", n)
		}
		if paced(e.PD) != 0 {
			t.Errorf("a lane waited for %v", paced(e.PD))
		}
	})
}
