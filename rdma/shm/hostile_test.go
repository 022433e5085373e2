package shm

import (
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// hostile is a memory node that does as it likes with what it shares with a dialer.
type hostile struct {
	cell  *cell
	table []uint64
	q     *QP
	cq    driver.CQ
	s     *side
}

// newHostile has answer take each request, and send what it likes.
func newHostile(t *testing.T, o Options, answer func(c *net.UnixConn, r request)) *hostile {
	t.Helper()
	page, err := mem.AllocControl(64, "cell", false)
	must(t, err)
	table, err := mem.AllocControl(4096, "table", true)
	must(t, err)
	addr := impostor(t, func(c *net.UnixConn) {
		if reply(c, 4096, nil, page.FD, table.FD) != nil {
			return
		}
		for buf := make([]byte, maxFrame); ; {
			n, err := c.Read(buf)
			if err != nil {
				return
			}
			if r, err := decodeRequest(buf[:n]); err == nil {
				answer(c, r)
			}
		}
	})
	h := &hostile{cell: cellOf(page.Bytes), table: words(table.Bytes)}
	h.s, err = newSide(o, driver.AccessLocal)
	must(t, err)
	h.cq, err = h.s.d.CreateCQ(1)
	must(t, err)
	q, err := h.s.d.Dial(within(t, rdmatest.Patience), driver.DialRequest{PD: h.s.pd, CQ: h.cq, Addr: addr})
	must(t, err)
	h.q = q.(*QP)
	t.Cleanup(func() { must(t, h.q.Close(), h.cq.Close(), h.s.close(), page.Free(), table.Free()) })
	return h
}

func (h *hostile) wr(op driver.Opcode, rkey uint64, bytes int) driver.WR {
	return driver.WR{Op: op, Flags: driver.Signaled, Local: h.s.m.Bytes[:bytes], LKey: h.s.mr.LKey(), RKey: rkey}
}

// ends fails the test if f does not return.
func ends(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(rdmatest.Patience):
		t.Fatal(what + " does not end")
	}
}

// scribble has write called over and over until the test, or the function it returns, ends it.
func scribble(t *testing.T, write func()) (stop func()) {
	var end atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !end.Load() {
			write()
		}
	}()
	stop = func() {
		end.Store(true)
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// Close ends whatever the memory node writes to the control cell, and it ends no earlier than a PostSend of another
// goroutine has: that one's memory is not unmapped under it.
func TestHostileCell(t *testing.T) {
	for name, write := range map[string]func(c *cell){
		"odd":            func(c *cell) { atomic.StoreUint64(&c.seq, 1) },
		"another odd":    func(c *cell) { atomic.AddUint64(&c.seq, 2); atomic.OrUint64(&c.seq, 1) },
		"always outside": func(c *cell) { atomic.StoreUint64(&c.seq, 0) },
		"never barred":   func(c *cell) { atomic.StoreUint64(&c.barred, 0) },
		"outside and not barred": func(c *cell) {
			atomic.StoreUint64(&c.seq, 0)
			atomic.StoreUint64(&c.barred, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := mem.Alloc(regionBytes, driver.AllocOptions{Shared: true})
			must(t, err)
			t.Cleanup(func() { must(t, m.Free()) })
			h := newHostile(t, Options{}, func(conn *net.UnixConn, r request) {
				_ = answer{id: r.id, status: driver.Success, access: driver.AccessRemoteRead, slot: 1, gen: 1,
					n: regionBytes, fileBytes: regionBytes, fd: m.FD}.send(conn)
			})
			atomic.StoreUint64(&h.table[1], 1)
			scribble(t, func() { write(h.cell) })
			begun, posted := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(posted)
				wrs := []driver.WR{h.wr(driver.OpRead, 42, regionBytes), h.wr(driver.OpRead, 42, regionBytes)}
				var wcs [4]driver.WC
				_, err := h.q.PostSend(wrs)
				close(begun)
				for err == nil {
					h.cq.Poll(wcs[:])
					_, err = h.q.PostSend(wrs)
				}
			}()
			<-begun
			ends(t, "Close", func() { must(t, h.q.Close()) })
			ends(t, "PostSend", func() { <-posted })
			if h.q.State() != driver.StateClosed {
				t.Errorf("state %v", h.q.State())
			}
			if _, err := h.q.PostSend([]driver.WR{h.wr(driver.OpRead, 42, 8)}); !errors.Is(err, driver.ErrClosed) {
				t.Errorf("PostSend after Close: %v", err)
			}
		})
	}
}

// A QP that has been fenced stays so when the memory node takes the bar away.
func TestUnbarred(t *testing.T) {
	h := newHostile(t, Options{}, func(*net.UnixConn, request) {})
	h.cell.bar()
	if s := h.q.State(); s != driver.StateErr {
		t.Fatalf("barred: %v", s)
	}
	atomic.StoreUint64(&h.cell.barred, 0)
	if s := h.q.State(); s != driver.StateErr {
		t.Errorf("the bar is gone: %v", s)
	}
	if _, err := h.q.PostSend([]driver.WR{h.wr(driver.OpRead, 1, 8)}); !errors.Is(err, driver.ErrQPError) {
		t.Errorf("PostSend: %v", err)
	}
}

// A PostSend waits RequestTimeout for all of the rkeys that it asks for, however many a memory node answers just in
// time.
func TestSlowAnswers(t *testing.T) {
	const limit, chain = 200 * time.Millisecond, 50
	m, err := mem.Alloc(4096, driver.AllocOptions{Shared: true})
	must(t, err)
	t.Cleanup(func() { must(t, m.Free()) })
	h := newHostile(t, Options{RequestTimeout: limit}, func(c *net.UnixConn, r request) {
		time.Sleep(limit / 4)
		_ = answer{id: r.id, status: driver.Success, access: driver.AccessRemoteRead, slot: 1, gen: 1, n: 4096,
			fileBytes: 4096, fd: m.FD}.send(c)
	})
	atomic.StoreUint64(&h.table[1], 1)
	var wrs []driver.WR
	for i := range uint64(chain) {
		wrs = append(wrs, h.wr(driver.OpRead, i+1, 8))
	}
	_, err = h.q.PostSend(wrs)
	must(t, err)
	var wcs [chain]driver.WC
	late := 0
	for _, wc := range wcs[:h.cq.Poll(wcs[:])] {
		if wc.Status == driver.RetryExcErr {
			late++
		}
	}
	if late != 1 {
		t.Errorf("%d WRs waited in vain, want 1 of %d", late, chain)
	}
}

// A table that changes all the time, and a word that does, hold up nobody for ever.
func TestHostileWords(t *testing.T) {
	m, err := mem.Alloc(4096, driver.AllocOptions{Shared: true})
	must(t, err)
	t.Cleanup(func() { must(t, m.Free()) })
	h := newHostile(t, Options{}, func(c *net.UnixConn, r request) {
		_ = answer{id: r.id, status: driver.Success, access: remoteRights, slot: 1, gen: 1, n: 4096, fileBytes: 4096,
			fd: m.FD}.send(c)
	})
	word := words(m.Bytes)
	scribble(t, func() {
		atomic.AddUint64(&h.table[0], 1)
		atomic.AddUint64(&h.table[1], 1)
		atomic.AddUint64(&word[0], 1)
		atomic.StoreUint64(&word[0], 0)
	})
	ends(t, "PostSend", func() {
		var wcs [4]driver.WC
		for range 2000 {
			cas := h.wr(driver.OpCmpAndSwp, 7, 8)
			if _, err := h.q.PostSend(
				[]driver.WR{cas, h.wr(driver.OpFetchAdd, 7, 8), h.wr(driver.OpRead, 7, 8)}); err != nil {
				return // the CAS gave up
			}
			h.cq.Poll(wcs[:])
		}
	})
}
