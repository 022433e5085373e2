package tcp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// looping makes a memory node whose agents share one loop.
func looping(t *testing.T, o Options) (*rdmatest.Env, *device) {
	t.Helper()
	h := harness(t, Options{}, Options{})
	d := open(t, o).(*device)
	d.loops = 1
	h.Passive = rdma.NewDevice("tcp", d)
	return rdmatest.NewEnv(t, h), d
}

// inLoops is how many agents are in a loop.
func (d *device) inLoops() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for a := range d.mu.agents {
		a.link.Lock()
		if a.link.loop != nil {
			n++
		}
		a.link.Unlock()
	}
	return n
}

// waitInLoops waits until n agents are in a loop.
func (d *device) waitInLoops(t *testing.T, n int) {
	t.Helper()
	testutil.UntilNone(t, "agents in loops, beyond those expected", func() int { return d.inLoops() - n })
}

// TestQuietAgentsAreSmall: an agent whose peer says nothing keeps no buffers.
func TestQuietAgentsAreSmall(t *testing.T) {
	const n, most = 200, 24 << 10
	e, d := looping(t, Options{})
	e.Listener()
	before := testutil.Memory()
	for range n {
		greeted(t, e.Listener().Addr())
	}
	d.waitInLoops(t, n)
	t.Logf("a quiet connection takes %d bytes", testutil.UntilGrown(t, "quiet connections", before, n*most)/n)
}

// TestLoopWaitsForNobody has peers that a loop would have to wait for, in each way
// there is, beside one that is served all the same. Then they go on.
func TestLoopWaitsForNobody(t *testing.T) {
	e, d := looping(t, Options{})
	addr := e.Listener().Addr()
	mr, proxied := e.Memory(1<<20, rdmatest.All), e.Memory(64, rdmatest.All)
	rdmatest.Pattern(mr.Bytes(), 5)
	want := bytes.Clone(mr.Bytes()[:64<<10])
	entered, leave := make(chan struct{}), make(chan struct{})
	e.Must(proxied.ProxyAtomics(func(rdma.Opcode, uint64, uint64, uint64) (uint64, rdma.Status) {
		close(entered)
		<-leave
		return 9, driver.Success
	}))
	write := func(c net.Conn, b []byte) {
		t.Helper()
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(c net.Conn, op driver.Opcode, seq uint16, payload []byte) {
		t.Helper()
		b := make([]byte, replySize+len(payload))
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		r, err := parseReply(b, op, seq, len(payload))
		if err != nil || r.status != driver.Success || !bytes.Equal(b[replySize:], payload) {
			t.Fatalf("reply %+v, %v", r, err)
		}
	}

	half := doorbellOf(requestOf(driver.OpFetchAdd, mr.RKey(), 1<<19, 8, appendWord(nil, 1)...),
		requestOf(driver.OpRead, mr.RKey(), 0, 8))
	inHalf := greeted(t, addr)
	found := bytes.Clone(mr.Bytes()[1<<19:][:8])
	write(inHalf, half[:len(half)-1])
	expect(inHalf, driver.OpFetchAdd, 0, found)

	const asked = 256 // 16 MiB, more than any socket holds
	stalled := greeted(t, addr)
	for range asked {
		write(stalled, doorbellOf(requestOf(driver.OpRead, mr.RKey(), 0, len(want))))
	}

	waiting := greeted(t, addr)
	write(waiting, doorbellOf(requestOf(driver.OpFetchAdd, proxied.RKey(), 0, 8, appendWord(nil, 1)...)))
	receive(t, entered, "the proxy")

	long := doorbellOf(requestOf(driver.OpWrite, mr.RKey(), 1<<19+64, 1<<18, bytes.Repeat([]byte{3}, 1<<18)...))
	inLong := greeted(t, addr)
	write(inLong, long[:len(long)-1])

	// Left in the loop are the one with half a request, and the witness.
	witness := e.Dial()
	d.waitInLoops(t, 2)
	for range 100 {
		e.Must(witness.OK(witness.Read(mr, 0, witness.Word())))
	}

	write(inHalf, half[len(half)-1:])
	expect(inHalf, driver.OpRead, 1, want[:8])
	for i := range asked {
		expect(stalled, driver.OpRead, uint16(i), want)
	}
	close(leave)
	expect(waiting, driver.OpFetchAdd, 0, appendWord(nil, 9))
	write(inLong, long[len(long)-1:])
	expect(inLong, driver.OpWrite, 0, nil)
	if got := bytes.Count(mr.Bytes()[1<<19+64:][:1<<18], []byte{3}); got != 1<<18 {
		t.Errorf("%d bytes of the long WRITE landed", got)
	}
}

// TestAgentComesBack: who has said more than a loop executes goes back to it when
// it says little again, and not a descriptor is left of the moves.
func TestAgentComesBack(t *testing.T) {
	e, d := looping(t, Options{})
	const size = 1 << 20
	mr := e.Memory(size, rdmatest.All)
	l := e.DialWith(size, nil)
	b := l.Buf(size)
	d.waitInLoops(t, 1)
	before := descriptors(t)
	for range 5 {
		for _, w := range []rdma.WR{l.Write(mr, 0, b), l.Read(mr, 0, b)} {
			e.Must(l.OK(w))
			if n := d.inLoops(); n != 0 {
				t.Fatalf("%v of %d bytes was executed in a loop", w.Op, size)
			}
			for n := 0; d.inLoops() == 0; n++ {
				if n > 8*maxCalm {
					t.Fatalf("not back in a loop after %d small frames", n)
				}
				e.Must(l.OK(l.Read(mr, 8, b[:8])))
			}
		}
	}
	testutil.UntilNone(t, "descriptors too many", func() int { return max(0, descriptors(t)-before) })
}

func descriptors(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

// TestFenceManyInLoop fences agents in the middle of their work in one loop. None
// of them executes anything afterwards, and the others go on.
func TestFenceManyInLoop(t *testing.T) {
	e, d := looping(t, Options{})
	const n = 8
	mr := e.Memory(8*n, rdmatest.All)
	lanes := make([]*rdmatest.Lane, n)
	for i := range lanes {
		lanes[i] = e.Dial()
	}
	d.waitInLoops(t, n)
	peers := e.Peers()
	ended := make(chan error, n)
	started := make(chan struct{}, n)
	for i, l := range lanes {
		go func() {
			for k := 0; ; k++ {
				err := l.OK(l.Add(mr, uint64(8*i), l.Word(), 1))
				if k == 10 {
					started <- struct{}{}
				}
				if err != nil {
					ended <- err
					return
				}
			}
		}()
	}
	for range n {
		receive(t, started, "load")
	}
	for i, p := range peers {
		e.Must(p.Fence(e.Ctx()))
		if err := receive(t, ended, "the lane's end"); err == nil {
			t.Fatal("no error")
		}
		if got := d.inLoops(); got > n-1-i {
			t.Errorf("%d agents in the loop after %d fences", got, i+1)
		}
	}
	snapshot := bytes.Clone(mr.Bytes())
	l := e.Dial()
	e.Must(l.OK(l.Read(mr, 0, l.Word())))
	if !bytes.Equal(snapshot, mr.Bytes()) {
		t.Error("a fenced agent executed something")
	}
}

// TestSurveyHolds: what survey said can be executed without waiting can be, whatever
// is registered meanwhile.
func TestSurveyHolds(t *testing.T) {
	d := open(t, Options{}).(*device)
	p, g := newGuarded(t, d)
	whole := doorbellOf(requestOf(driver.OpWrite, seedKey, 0, 64, make([]byte, 64)...))
	a := newAgent(&listener{d: d}, &script{in: whole[:frameSize+requestSize], step: 1 << 10}, "survey")
	a.pd, a.access = p.(*pd), driver.AccessRemoteWrite
	a.resume()
	h, err := a.need(frameSize)
	if err != nil {
		t.Fatal(err)
	}
	if a.frame, err = parseFrame(h); err != nil {
		t.Fatal(err)
	}
	n, fits := a.survey(agentOut)
	if n != 1 || !fits {
		t.Fatalf("survey: %d requests, fits %v; want the one that will be refused", n, fits)
	}
	g.setKey(seedKey)
	if err := a.perform(n); !errors.Is(err, errVerb) {
		t.Errorf("perform gave %v, want a refusal", err)
	}
}

// TestOneProcessorHasNoLoops: there a loop would only be in the way.
func TestOneProcessorHasNoLoops(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	d, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if n := d.(*device).loops; n != 0 {
		t.Errorf("%d loops on one processor", n)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
}
