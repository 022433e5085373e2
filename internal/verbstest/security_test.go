package verbstest

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// The adapter refuses what a session may not do; that costs the session the connection that it asked over,
// and nobody else anything.
func TestSecurityMatrix(t *testing.T) {
	needs(t, "1")
	s := newStore(t, 2*time.Second, node{"m1", 0, []string{"--janitor"}}, node{"m2", 1, nil})
	s.namespace("ours", 2, 16<<20)
	s.namespace("theirs", 1, 8<<20)
	s.start(node{"m3", 3, nil}) // has nothing of these two
	s.namespace("moved", 1, 8<<20)
	by := s.bystander("ours")

	rw, ro, victim := s.guesser("ours", false, true), s.guesser("ours", true, true), s.guesser("theirs", false, true)
	our, their := rw.region("m1"), victim.region("m1")
	other, theirOwn := rw.mustConnect("m1"), victim.mustConnect("m1") // that keep working

	// target is memory that must stay as it is.
	type target struct {
		q    *qp
		rkey uint64
		addr uint64
		n    int
	}
	header := target{other, our.indexRKey, our.index, 64}
	ourEnd := target{other, our.heapRKey, our.heapEnd - 64, 64}
	theirs := target{theirOwn, their.heapRKey, their.heap, 64}
	theirIndex := target{theirOwn, their.indexRKey, their.index, 64}
	access := []string{remAccessErr}
	rights := []string{remAccessErr, remInvReqErr} // of the connection, not of the region
	var rows [][]string
	for _, c := range []struct {
		name string
		who  *guesser
		wr   rdma.WR
		want []string
		at   target
	}{
		{"READ with another namespace's rkey", rw, rw.readWR(their.heapRKey, their.heap, 64), access, theirs},
		{"WRITE with another namespace's rkey", rw, rw.writeWR(their.heapRKey, their.heap), access, theirs},
		{"CAS with another namespace's rkey", rw, rw.casWR(their.indexRKey, their.index+4096, 0, 1), access,
			theirIndex},
		{"WRITE by a read-only session", ro, ro.writeWR(our.heapRKey, our.lastW), rights, ourEnd},
		{"CAS by a read-only session", ro, ro.casWR(our.indexRKey, our.indexEnd-8, 0, 1), rights,
			target{other, our.indexRKey, our.indexEnd - 8, 8}},
		{"WRITE to the index, which takes atomics only", rw, rw.writeWR(our.indexRKey, our.index), access, header},
		{"CAS in the heap, which takes none", rw, rw.casWR(our.heapRKey, our.lastW, 0, 1), access, ourEnd},
		{"READ one byte beyond the index", rw, rw.readWR(our.indexRKey, our.indexEnd-63, 64), access, header},
		{"READ behind the index, where the heap begins", rw, rw.readWR(our.indexRKey, our.indexEnd, 8), access, header},
		{"CAS behind the index", rw, rw.casWR(our.indexRKey, our.indexEnd, 0, 1), access, header},
		{"WRITE one byte beyond the heap", rw, rw.writeWR(our.heapRKey, our.heapEnd-7), access, ourEnd},
		{"WRITE before the heap, where the index ends", rw, rw.writeWR(our.heapRKey, our.heap-8), access,
			target{other, our.indexRKey, our.indexEnd - 8, 8}},
		{"READ with an rkey one bit off", rw, rw.readWR(our.heapRKey^1, our.heap, 8), access, ourEnd},
	} {
		t.Run(c.name, func(t *testing.T) {
			q := c.who.mustConnect("m1")
			if st := q.do(c.who.readWR(our.heapRKey, our.heap, 64)); st != success {
				t.Fatalf("a READ that is allowed, before: %s", st)
			}
			before := c.at.q.read(c.at.rkey, c.at.addr, c.at.n)
			got := q.do(c.wr)
			rows = append(rows, []string{c.name, got})
			if !slices.Contains(c.want, got) {
				t.Errorf("%s, want %v", got, c.want)
			}
			q.broken()
			if st := q.do(c.who.readWR(our.heapRKey, our.heap, 8)); st == success {
				t.Error("the connection works on")
			}
			if after := c.at.q.read(c.at.rkey, c.at.addr, c.at.n); !bytes.Equal(after, before) {
				t.Errorf("the bytes changed from %x to %x", before, after)
			}
			other.read(our.heapRKey, our.heap, 8)
			by.moves(t)
		})
	}

	t.Run("rkey of a dropped region", func(t *testing.T) {
		g := s.guesser("moved", false, true)
		r := g.region("m3")
		early := g.mustConnect("m3")
		early.read(r.heapRKey, r.heap, 8)
		reads, writes, swaps := g.mustConnect("m3"), g.mustConnect("m3"), g.mustConnect("m3")
		s.must("drain", "m3")
		testutil.UntilNone(t, "m3 holds nothing", func() string {
			st := s.status()
			if n := st.GetNodeStats()[member(st.GetMap(), "m3").GetId()].GetRegisteredBytes(); n != 0 {
				return itoa(n) + " bytes registered"
			}
			return ""
		})
		for _, a := range []struct {
			name string
			q    *qp
			wr   rdma.WR
		}{
			{"READ of a region that was dropped, by a connection that used it", early, g.readWR(r.heapRKey, r.heap, 8)},
			{"READ of a region that was dropped", reads, g.readWR(r.heapRKey, r.heap, 8)},
			{"WRITE to a region that was dropped", writes, g.writeWR(r.heapRKey, r.heap)},
			{"CAS in a region that was dropped", swaps, g.casWR(r.indexRKey, r.index+4096, 0, 1)},
		} {
			got := a.q.do(a.wr)
			rows = append(rows, []string{a.name, got})
			if got != remAccessErr {
				t.Errorf("%s: %s, want %s", a.name, got, remAccessErr)
			}
			a.q.broken()
		}
		const noRegion = "no region of the namespace here"
		refused := func(what string) {
			t.Helper()
			if _, err := g.connect("m3"); !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), noRegion) {
				t.Errorf("%s: %v, want a refusal: %s", what, err, noRegion)
			}
			rows = append(rows, []string{what, "refused: " + noRegion})
		}
		refused("connecting to a memory node that has dropped its regions")
		s.nodes["m3"].kill()
		s.start(node{"m3", 3, nil})
		refused("connecting to the process that took the place of one that was killed")
		by.moves(t)
	})

	t.Run("session that was revoked", func(t *testing.T) {
		g := s.guesser("ours", false, false)
		q := g.mustConnect("m1")
		before := other.read(our.heapRKey, our.lastW, 8)
		q.read(our.heapRKey, our.heap, 8)
		testutil.UntilNone(t, "the session is fenced", func() string {
			if l := s.life(g.id); l != dirpb.SessionLife_SESSION_FENCED {
				return l.String()
			}
			return ""
		})
		got := q.do(g.writeWR(our.heapRKey, our.lastW))
		rows = append(rows, []string{"WRITE of a session that was fenced", got})
		if got == success {
			t.Error("it succeeded")
		}
		q.broken()
		_, err := g.connect("m1")
		if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), "the session has ended") {
			t.Errorf("connecting again: %v, want a refusal that says that the session has ended", err)
		}
		rows = append(rows, []string{"connecting again", "refused: the session has ended"})
		if after := other.read(our.heapRKey, our.lastW, 8); !bytes.Equal(after, before) {
			t.Errorf("the bytes changed from %x to %x", before, after)
		}
		by.moves(t)
	})

	if by.quit(); by.err != nil {
		t.Errorf("the bystander: %v", by.err)
	}
	rows = append(rows, []string{"another client meanwhile", itoa(by.ops.Load()) + " operations, no error"})
	printTable("What a memory node's adapter answers, over "+provider, []string{"attempt", "answer"}, rows)
}
