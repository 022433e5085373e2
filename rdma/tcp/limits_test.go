package tcp

import (
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// p99 is of n READs, one after the other.
func p99(l *rdmatest.Lane, mr *rdma.MR, n int) time.Duration {
	var took []time.Duration
	for range n {
		began := time.Now()
		l.E.Must(l.OK(l.Read(mr, 0, l.Word())))
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[n*99/100]
}

// TestListenerIsBounded: beside thousands of idle connections and hundreds of hostile ones a client is served as
// before, they take no more memory than README.md says, new clients come in while there is room, and a connection over
// the limit hears why it is refused.
func TestListenerIsBounded(t *testing.T) {
	const (
		idle, hostile, handshakes = 2000, 200, 64
		// Hostile in four ways behind the hello, and in three ways in it.
		most  = idle + 4*hostile + 10
		bound = idle*(24<<10) + 4*hostile*(220<<10) + handshakes*(80<<10)
	)
	door, err := NewDoor(netsrv.Limits{MaxConns: most, MaxHandshakes: handshakes, HandshakeTimeout: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	e, d := looping(t, Options{Door: door, PeerTimeout: time.Minute})
	mr := e.Memory(1<<20, rdmatest.All)
	good := e.Dial()
	addr := e.Listener().Addr()
	before := testutil.Memory()
	quiet := p99(good, mr, 2000)
	for range idle {
		greeted(t, addr)
	}
	d.waitInLoops(t, idle+1)
	t.Logf("%d idle connections take %.1f MB", idle, float64(testutil.Memory()-before)/1e6)

	reads := doorbellOf(requestOf(driver.OpRead, mr.RKey(), 0, 1<<20))
	for range 40 { // more than sockets hold
		reads = append(reads, reads[:frameSize+requestSize]...)
	}
	for _, say := range [][]byte{
		{}, []byte("KVD"), append(appendHello(nil, make([]byte, 512))[:helloSize], "half of the private data"...),
	} {
		for range hostile {
			_, _ = rawPeer(t, addr).Write(say) // it may have had to give way
		}
	}
	var deaf []net.Conn
	for _, say := range [][]byte{
		doorbellOf(requestOf(driver.OpWrite, mr.RKey(), 0, 1<<20, make([]byte, 1000)...)), // and no more of it
		[]byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
		reads, doorbellOf(requestOf(driver.OpRead, mr.RKey(), 0, 8))[:frameSize+1],
	} {
		for range hostile {
			c := greeted(t, addr)
			_ = c.(*net.TCPConn).SetReadBuffer(4 << 10)
			_, _ = c.Write(say) // it may be hung up on
			deaf = append(deaf, c)
		}
	}
	attacked := p99(good, mr, 2000)
	grown := testutil.UntilGrown(t, "connections", before, bound)
	st := door.Stats()
	t.Logf("with %d hostile ones: %.1f MB, bound %.1f MB; p99 of a READ %v, quiet %v; %+v", 7*hostile,
		float64(grown)/1e6, float64(bound)/1e6, attacked, quiet, st)
	if st.Conns > most || st.Handshakes > handshakes || st.Refused[netsrv.ReasonHandshake] == 0 {
		t.Errorf("%+v", st)
	}
	rivals := 0
	for door.Stats().Conns-door.Stats().Handshakes < most {
		greeted(t, addr) // the rest of the places: half handshakes give way
		rivals++
	}
	if _, err := e.H.Active.Dial(e.Ctx(), good.PD, good.CQ, addr, nil); !errors.Is(err, driver.ErrRefused) ||
		!strings.Contains(err.Error(), "too many connections") {
		t.Errorf("over the limit, with %d more: %v", rivals, err)
	}
	for _, c := range deaf {
		_ = c.Close()
	}
	testutil.UntilNone(t, "connections too many", func() int { return max(0, door.Stats().Conns-(most-hostile)+1) })
	e.Dial()
	e.Must(good.OK(good.Read(mr, 0, good.Word())))
}

// TestHalfTLSHandshakes: strangers who begin a TLS handshake and do not go on take a bounded memory, and who has a
// certificate is served beside them.
func TestHalfTLSHandshakes(t *testing.T) {
	const flood, handshakes = 500, 16
	passive, active := tlsOptions(t)
	var err error
	if passive.Door, err = NewDoor(netsrv.Limits{MaxHandshakes: handshakes, HandshakeTimeout: time.Hour}); err != nil {
		t.Fatal(err)
	}
	e := rdmatest.NewEnv(t, harness(t, passive, active))
	e.Dial()
	addr := e.Listener().Addr()
	before := testutil.Memory()
	for i := range flood {
		c := rawPeer(t, addr)
		_, _ = c.Write([]byte("\x16\x03\x01\x02\x00\x01")[:i%6]) // it may have had to give way
	}
	e.Dial()
	grown := testutil.UntilGrown(t, "half handshakes", before, handshakes*(160<<10)+4<<20)
	st := passive.Door.Stats()
	t.Logf("%d half handshakes, at most %d at a time: %.1f MB, %+v", flood, handshakes, float64(grown)/1e6, st)
	if st.Handshakes > handshakes {
		t.Errorf("%+v", st)
	}
}

// TestHandshakeSlots: a connection that is refused for its token, and does not go, counts as one in the handshake.
func TestHandshakeSlots(t *testing.T) {
	door, err := NewDoor(netsrv.Limits{MaxHandshakes: 2})
	if err != nil {
		t.Fatal(err)
	}
	d := open(t, Options{Door: door})
	l, err := d.Listen("127.0.0.1:0", driver.ListenOptions{
		Accept: func(driver.ConnRequest) (driver.PD, driver.Access, error) {
			return nil, 0, errors.New("no such session")
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for range 20 {
		c := rawPeer(t, l.Addr())
		if _, err := c.Write(appendHello(nil, nil)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, welcomeSize)); err != nil {
			t.Fatal(err)
		}
	}
	if st := door.Stats(); st.Conns > 2 || st.Refused[netsrv.ReasonHandshake] < 18 {
		t.Errorf("%+v", st)
	}
}
