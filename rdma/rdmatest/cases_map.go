package rdmatest

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// shows maps n bytes of mr from off on, and checks that they are those of the memory node.
func shows(l *Lane, mr *rdma.MR, off uint64, n int) (*rdma.Mapping, error) {
	m, err := l.QP.Map(mr.RKey(), mr.Base()+off, n)
	if err != nil {
		return nil, err
	}
	if len(m.Bytes) != n || !bytes.Equal(m.Bytes, mr.Bytes()[off:][:n]) {
		return nil, fmt.Errorf("%d bytes at %d: got %d others", n, off, len(m.Bytes))
	}
	return m, nil
}

func mapShows(t *testing.T, e *Env) {
	l, mr := e.Dial(), e.Memory(3<<12, All)
	Pattern(mr.Bytes(), 1)
	for _, x := range []struct {
		off uint64
		n   int
	}{{0, 3 << 12}, {1, 7}, {4096 + 64, 4096}, {3<<12 - 1, 1}} {
		m, err := shows(l, mr, x.off, x.n)
		e.Must(err)
		b := fill(l.Buf(x.n), byte(x.n))
		e.Must(l.OK(l.Write(mr, x.off, b)))
		if !bytes.Equal(m.Bytes, b) {
			t.Fatalf("%d bytes at %d: not what a WRITE has left", x.n, x.off)
		}
		m.Release()
	}
	made := l.QP.Counters().Mapped
	m, err := shows(l, mr, 0, 8)
	e.Must(err)
	m.Release()
	if n := l.QP.Counters().Mapped; n != made || made > 1 {
		t.Errorf("%d mappings were made, %d before the last one", n, made)
	}
}

func mapRights(t *testing.T, e *Env) {
	l, mr, blind := e.Dial(), e.Memory(4096, All), e.Memory(4096, rdma.AccessRemoteWrite)
	gone, revoke := e.Region(e.PD, 4096, All)
	m, err := shows(l, gone, 0, 8)
	e.Must(err)
	m.Release()
	e.Must(revoke())
	for what, try := range map[string]func() (*rdma.Mapping, error){
		"behind the end": func() (*rdma.Mapping, error) { return l.QP.Map(mr.RKey(), mr.Base()+4089, 8) },
		"beyond it":      func() (*rdma.Mapping, error) { return l.QP.Map(mr.RKey(), mr.Base()+1<<40, 8) },
		"before it":      func() (*rdma.Mapping, error) { return l.QP.Map(mr.RKey(), mr.Base()-8, 8) },
		"nothing":        func() (*rdma.Mapping, error) { return l.QP.Map(mr.RKey(), mr.Base(), 0) },
		"less":           func() (*rdma.Mapping, error) { return l.QP.Map(mr.RKey(), mr.Base(), -1) },
		"no right":       func() (*rdma.Mapping, error) { return l.QP.Map(blind.RKey(), blind.Base(), 8) },
		"no key":         func() (*rdma.Mapping, error) { return l.QP.Map(0, mr.Base(), 8) },
		"another key":    func() (*rdma.Mapping, error) { return l.QP.Map(mr.RKey()^1<<40, mr.Base(), 8) },
		"deregistered":   func() (*rdma.Mapping, error) { return l.QP.Map(gone.RKey(), gone.Base(), 8) },
	} {
		if _, err := try(); !errors.Is(err, driver.ErrNoAccess) {
			t.Errorf("%s: %v", what, err)
		}
	}
	m, err = shows(l, mr, 0, 4096) // the connection is as it was
	e.Must(err)
	m.Release()
	e.Must(e.Peers()[0].Fence(e.Ctx()))
	if _, err := l.QP.Map(mr.RKey(), mr.Base(), 8); err == nil {
		t.Error("mapped by a connection that is fenced")
	}
}

func mapOutlives(t *testing.T, e *Env) {
	l := e.Dial()
	mr, revoke := e.Region(e.PD, 8192, All)
	Pattern(mr.Bytes(), 3)
	want := bytes.Clone(mr.Bytes()[:64])
	m, err := shows(l, mr, 0, 64)
	e.Must(err)
	other, err := shows(l, mr, 64, 64)
	e.Must(err)
	e.Must(revoke())
	keeps := e.Memory(64, All)
	e.Must(l.OK(l.Read(keeps, 0, l.Buf(8)))) // it notices
	see := func(when string) {
		t.Helper()
		if b := bytes.Clone(m.Bytes); !bytes.Equal(b, want) && !bytes.Equal(b, make([]byte, 64)) {
			t.Fatalf("%s: neither what was there nor zeroes", when)
		}
	}
	see("after the deregistration")
	other.Release()
	see("after the release of another mapping")
	e.Must(l.QP.Close())
	see("after the close")
	m.Release()
}
