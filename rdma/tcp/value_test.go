package tcp

import (
	"io"
	"net"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// TestValueHalves: a WRITE with a Value is two requests and one WR. Once the first has landed, no refusal of the second
// says that nothing has.
func TestValueHalves(t *testing.T) {
	write := func(seq uint16, s driver.Status) []byte {
		return appendReply(nil, reply{op: driver.OpWrite, status: s, seq: seq})
	}
	for name, c := range map[string]struct {
		say  [][]byte
		want []driver.Status
	}{
		"both": {[][]byte{write(0, driver.Success), write(1, driver.Success), appendGoodbye(nil, 2)},
			[]driver.Status{driver.Success, driver.RetryExcErr}},
		"first refused": {[][]byte{write(0, driver.RemAccessErr)},
			[]driver.Status{driver.RemAccessErr, driver.WRFlushErr}},
		"second refused": {[][]byte{write(0, driver.Success), write(1, driver.RemAccessErr)},
			[]driver.Status{driver.RemOpErr, driver.WRFlushErr}},
		"second malformed": {[][]byte{write(0, driver.Success), write(1, driver.RemInvReqErr)},
			[]driver.Status{driver.RemOpErr, driver.WRFlushErr}},
		"lost at once": {nil, []driver.Status{driver.RetryExcErr, driver.WRFlushErr}},
		"lost between": {[][]byte{write(0, driver.Success)},
			[]driver.Status{driver.RetryExcErr, driver.WRFlushErr}},
	} {
		t.Run(name, func(t *testing.T) {
			addr := rawNode(t, func(n net.Conn) {
				if welcomeDialer(n) != nil {
					return
				}
				if _, err := io.ReadFull(n, make([]byte, frameSize+3*requestSize+5000+2*8)); err != nil {
					return
				}
				for _, b := range c.say {
					_, _ = n.Write(b)
				}
			})
			e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
			l := dialRaw(t, e, addr, 4096)
			defer func() { _ = l.QP.Close() }() // the peer confirms nothing
			local := l.Word()
			wr := func() rdma.WR {
				return rdma.WR{Op: rdma.OpWrite, Flags: rdma.Signaled, Local: local, LKey: l.Local.LKey(), RKey: 5}
			}
			w, behind := wr(), wr()
			w.Value = &rdma.Value{Bytes: make([]byte, 5000)}
			wcs, err := l.Do(w, behind)
			e.Must(err)
			if len(wcs) != 2 || wcs[0].Status != c.want[0] || wcs[1].Status != c.want[1] {
				t.Fatalf("WCs %+v, want %v", wcs, c.want)
			}
		})
	}
}

// TestValueQueueFull: a WRITE with a Value has two places in the send queue, and is taken whole or not at all.
func TestValueQueueFull(t *testing.T) {
	read, write := driver.WR{Op: driver.OpRead, Value: &driver.Value{}},
		driver.WR{Op: driver.OpWrite, Value: &driver.Value{}}
	plain := driver.WR{Op: driver.OpWrite}
	for _, c := range []struct {
		wrs        []driver.WR
		room, want int
	}{
		{nil, 0, 0}, {[]driver.WR{plain}, 0, 0}, {[]driver.WR{write}, 1, 0}, {[]driver.WR{write}, 2, 1},
		{[]driver.WR{read}, 1, 1},
		{[]driver.WR{plain, write, plain}, 3, 2}, {[]driver.WR{plain, write, plain}, 4, 3},
		{[]driver.WR{write, write}, 3, 1},
	} {
		if got := fitting(c.wrs, c.room); got != c.want {
			t.Errorf("of %d WRs %d fit into %d places, want %d", len(c.wrs), got, c.room, c.want)
		}
	}
	e := rdmatest.NewEnv(t, harness(t, Options{}, Options{}))
	mr, l := e.Memory(8192, rdmatest.All), e.Dial()
	wrs := make([]rdma.WR, maxSendWR/2+5)
	for i := range wrs {
		wrs[i] = l.Write(mr, 0, l.Local.Bytes()[:8])
		wrs[i].ID, wrs[i].Value = uint64(i), &rdma.Value{Bytes: make([]byte, 100)}
	}
	if n, err := l.QP.PostSend(wrs); n != maxSendWR/2 || err != rdma.ErrQueueFull {
		t.Fatalf("PostSend took %d, %v; want %d", n, err, maxSendWR/2)
	}
	wcs, err := l.Wait(maxSendWR/2 - 1)
	e.Must(err)
	if len(wcs) != maxSendWR/2 || wcs[0].ID != 0 || wcs[0].Status != driver.Success {
		t.Fatalf("%d WCs, the first %+v", len(wcs), wcs[0])
	}
	if n, err := l.QP.PostSend(wrs[:4]); n != 4 || err != nil {
		t.Fatalf("PostSend took %d, %v, after the queue was empty", n, err)
	}
	_, err = l.Wait(3)
	e.Must(err)
}
