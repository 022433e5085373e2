package shm

import (
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// behind makes a pair whose passive side lets connections in by a Door of these limits.
func behind(t *testing.T, l netsrv.Limits) (*pair, *netsrv.Door) {
	t.Helper()
	door, err := NewDoor(l)
	must(t, err)
	return newPairOf(t, Options{Door: door}), door
}

// silent connects, and says nothing.
func (p *pair) silent(t *testing.T) net.Conn {
	t.Helper()
	c, err := net.Dial("unixpacket", p.ln.Addr())
	must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func openFiles(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(all)
}

// Processes that say nothing give way to each other and to those that do, and hold few descriptors.
func TestSilentGiveWay(t *testing.T) {
	const most, flood = 8, 300
	p, door := behind(t, netsrv.Limits{MaxHandshakes: most, HandshakeTimeout: time.Hour})
	before := openFiles(t)
	for range flood {
		p.silent(t)
	}
	must(t, p.dial(t).Close())
	testutil.Until(t, "all were let in", func() bool { return door.Stats().Accepted == flood+2 })
	st := door.Stats()
	if st.Handshakes > most || st.Refused[netsrv.ReasonHandshake] < flood-most {
		t.Errorf("%+v", st)
	}
	// The test holds its own ends.
	if n := openFiles(t) - before - flood; n > most+6 {
		t.Errorf("%d descriptors more", n)
	}
}

// A process that connects has so long to say what it wants.
func TestSilentIsClosed(t *testing.T) {
	// Nobody else has to connect within that time.
	door, err := NewDoor(netsrv.Limits{HandshakeTimeout: 50 * time.Millisecond})
	must(t, err)
	passive, err := newSide(Options{Door: door}, rdmatest.All)
	must(t, err)
	p := &pair{}
	p.ln, err = passive.d.Listen("@kvd-"+t.TempDir(), driver.ListenOptions{
		Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) { return passive.pd, rdmatest.All, nil },
	})
	must(t, err)
	t.Cleanup(func() { must(t, p.ln.Close(), passive.close()) })
	c := p.silent(t)
	must(t, c.SetDeadline(time.Now().Add(rdmatest.Patience)))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("%v, want the end", err)
	}
	testutil.Until(t, "it counts", func() bool { return door.Stats().Refused[netsrv.ReasonTimeout] == 1 })
	testutil.Until(t, "none is open", func() bool { s := door.Stats(); return s.Conns == 0 && s.Handshakes == 0 })
}

// Over the limit a client hears why, and has a place when another has gone.
func TestTooManyConnections(t *testing.T) {
	p, door := behind(t, netsrv.Limits{MaxConns: 2})
	second := p.dial(t)
	// It is told so if its hello is there when it is refused; else it finds the socket closed.
	for told := false; !told; {
		_, err := p.active.d.Dial(within(t, rdmatest.Patience),
			driver.DialRequest{PD: p.active.pd, CQ: p.cq, Addr: p.ln.Addr()})
		if err == nil {
			t.Fatal("a third connection")
		}
		told = errors.Is(err, driver.ErrRefused) && strings.Contains(err.Error(), "too many connections")
	}
	must(t, second.Close())
	testutil.Until(t, "its place is free", func() bool { return door.Stats().Conns == 1 })
	must(t, p.dial(t).Close())
}
