package server

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// inUse is the memory of this process, in bytes, after a collection.
func inUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// helloFor is a hello for n, as of a member that n does not know yet.
func helloFor(n *Node) []byte {
	h := hello{server: "stranger", wanted: n.disk.server(), address: "127.0.0.1:1", process: "p"}
	return h.append(nil)
}

// Two thousand connections to the Raft port, whether they say nothing or a hello and the first byte of a
// call, take what maxInbound of them may take; the directory works on beside them, and
// its nodes find each other afterwards.
func TestRaftPortBound(t *testing.T) {
	for _, attack := range []struct {
		name  string
		say   []byte
		bound int64
	}{
		{"silent", nil, maxInbound * (32 << 10)},
		{"hello", []byte{0}, maxInbound * inboundBytes},
	} {
		t.Run(attack.name, func(t *testing.T) {
			c := newCluster(t, 3, forever)
			leader := leaderOf(t, c.all()...)
			victim := c.all()[0]
			if victim == leader {
				victim = c.all()[1]
			}
			addr := string(victim.transport.LocalAddr())
			term := leader.raft.CurrentTerm()
			before := inUse()
			// As long as some of them wait at the door, whoever calls behind them soon gives way again.
			met := func() uint64 {
				s := victim.streams.door.Stats()
				return s.Accepted + s.Refused[netsrv.ReasonFull] + s.Refused[netsrv.ReasonAddress]
			}
			already := met()
			var conns []net.Conn
			defer func() {
				for _, c := range conns {
					c.Close()
				}
			}()
			// Connections that have been replaced are garbage when raft has noticed.
			take := func(i int) {
				most := attack.bound*12/10 + 4<<20 // the callers' ends are here, too
				testutil.Until(t, fmt.Sprintf("%d connections take at most %d bytes", i, most), func() bool {
					return inUse()-before <= most
				})
			}
			for i := range 2000 {
				conn, err := net.Dial("tcp", addr)
				if err != nil {
					t.Fatalf("connection %d: %v", i, err)
				}
				conns = append(conns, conn)
				say := attack.say
				if say != nil {
					say = append(helloFor(victim), say...)
				}
				if _, err := conn.Write(say); err != nil && i == 0 {
					t.Fatal(err)
				}
				if i%250 == 249 {
					take(i + 1)
				}
			}
			held := func() int { return victim.streams.door.Stats().Conns }
			testutil.Until(t, "all are accepted or refused", func() bool { return met()-already >= 2000 })
			take(2000)
			t.Logf("2000 connections take %.1f MB, bound %.1f MB", float64(inUse()-before)/1e6,
				float64(attack.bound)/1e6)
			if n := held(); n > maxInbound {
				t.Errorf("%d connections, want at most %d", n, maxInbound)
			}
			// The directory commits, its follower takes part.
			l := leaderOf(t, c.all()...)
			mark := &fsmpb.Command{Op: &fsmpb.Command_ReserveEpoch{ReserveEpoch: &fsmpb.ReserveEpoch{Ceiling: 1 << 40}}}
			testutil.Until(t, "a command is committed", func() bool {
				l = leaderOf(t, c.all()...)
				_, err := l.propose(testCtx(t), l.leading.Load(), mark)
				return err == nil
			})
			testutil.Until(t, "the follower under attack has it", func() bool { return victim.appliedBy(l) })
			if now := l.raft.CurrentTerm(); now != term {
				t.Logf("the term went from %d to %d", term, now)
			}
			// The listener lives: who calls now is heard.
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.Write(append(helloFor(victim), 0xff)); err != nil { // no call of raft's, which hangs up
				t.Fatal(err)
			}
			_ = conn.SetReadDeadline(time.Now().Add(patience))
			if h, err := readHello(conn, nil); err != nil || h.refusal != "" || h.server != victim.disk.server() {
				t.Errorf("answer %+v, %v", h, err)
			}
			if _, err := conn.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
				t.Errorf("raft does not look at a call: %v", err)
			}
		})
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// A flood of sessions that nobody renews makes no line of the log as long as the flood.
func TestLogLines(t *testing.T) {
	var log lockedBuffer
	n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: 2 * time.Second,
		EpochInterval: 2 * time.Second, LastCopyLeases: 1000,
		Logger: slog.New(slog.NewTextHandler(&log, nil))}))
	newMemnode(t, "m1", 1, just(n))
	c := dial(t, n)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 40 {
				_, _ = c.OpenSession(testCtx(t), &dirpb.OpenSessionRequest{Client: "flood"})
			}
		})
	}
	wg.Wait()
	testutil.Until(t, "all are fenced", func() bool {
		return strings.Contains(log.String(), "fencing sessions") && len(statusOf(t, c).Sessions) == 0
	})
	for line := range strings.Lines(log.String()) {
		if len(line) > 2*fsm.MaxLabelLen {
			t.Errorf("a line of %d bytes: %.200s", len(line), line)
		}
	}
}

// A flood from one host closes that host's connections, however fresh, before another's; and
// silent ones before those that said something.
func TestRaftPortFair(t *testing.T) {
	lis := testutil.Listen(t)
	var log lockedBuffer
	s, err := newStreams(lis, lis.Addr().String(), nil, identity.Mapping{}, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.begin(&party{server: "d1", cluster: func() string {
		return ""
	}, at: func(string) raft.ServerID { return "" }, addressOf: func(raft.ServerID) string { return "" }})
	call := func(from string, say string) net.Conn {
		t.Helper()
		conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).Dial("tcp", lis.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		if say != "" {
			h := hello{server: "d2", wanted: "d1", address: "127.0.0.1:1", process: "p"}
			say = string(h.append(nil)) + say
		}
		if _, err := conn.Write([]byte(say)); err != nil {
			t.Fatal(err)
		}
		return conn
	}
	heard := make(chan net.Conn)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := s.Accept()
			if err != nil {
				return
			}
			heard <- c
		}
	})
	defer wg.Wait()
	defer s.Close()
	call("127.0.0.2", "honest")
	honest := <-heard
	call("127.0.0.3", "host of the attack, earlier")
	early := <-heard
	for range 3 * maxInbound {
		call("127.0.0.3", "")
	}
	// The next ones are heard, and cost silent ones their place.
	for range maxInbound / 2 {
		call("127.0.0.3", "x")
		<-heard
	}
	for name, c := range map[string]net.Conn{"honest": honest, "early": early} {
		b := make([]byte, 6)
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := c.Read(b); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !strings.Contains(log.String(), "too many connections") {
		t.Error("nothing is logged")
	}
}

// Before TLS knows who calls, nothing of raft's is spent.
func TestRaftPortStrangers(t *testing.T) {
	conf := testTLS(t)
	n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, TLS: conf}))
	addr := string(n.transport.LocalAddr())
	before := inUse()
	var conns []net.Conn
	for i := range 1000 {
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
		if i%2 == 0 {
			_, _ = conn.Write([]byte{22, 3, 1}) // a handshake that does not go on
		}
	}
	grown := inUse() - before
	t.Logf("1000 half handshakes take %.1f MB", float64(grown)/1e6)
	if bound := int64(maxInbound * (64 << 10)); grown > bound*12/10 {
		t.Errorf("1000 half handshakes take %d bytes, want at most %d", grown, bound*12/10)
	}
	friend, err := tls.Dial("tcp", addr, clientTLS(conf))
	if err != nil {
		t.Fatalf("a node with a certificate is not served: %v", err)
	}
	friend.Close()
	for _, c := range conns {
		c.Close()
	}
}

// A call that announces a gigabyte and does not send it takes no more memory than one that says little.
func TestRaftPortAnnounced(t *testing.T) {
	n := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: forever}))
	addr := string(n.transport.LocalAddr())
	// MessagePack's: a map of one field, and what begins a long value.
	field := func(name string, value ...byte) []byte {
		b := append([]byte{0x81, 0xa0 | byte(len(name))}, name...)
		return append(b, value...)
	}
	giga := []byte{0x40, 0, 0, 0}
	for name, call := range map[string][]byte{
		"an entry's data": slices.Concat([]byte{0}, field("Entries", 0x91), field("Data", 0xc6), giga),
		"its text":        slices.Concat([]byte{0}, field("Entries", 0x91), field("Data", 0xdb), giga),
		"entries":         slices.Concat([]byte{0}, field("Entries", 0xdd), giga),
		"a leader":        slices.Concat([]byte{0}, field("Leader", 0xc6), giga),
		"a configuration": slices.Concat([]byte{2}, field("Configuration", 0xc6), giga),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(slices.Concat(helloFor(n), call, make([]byte, 100))); err != nil {
			t.Fatal(err)
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Errorf("%s: it is not hung up on: %v", name, err)
		}
		_ = conn.Close()
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 64<<20 {
			t.Errorf("%s: %d bytes are taken for it", name, took)
		}
	}
}
