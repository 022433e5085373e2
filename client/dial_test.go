package client

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

func TestVia(t *testing.T) {
	for _, c := range []struct {
		by    dirpb.AtomicsBy
		agent bool
		want  string
	}{
		{dirpb.AtomicsBy_ATOMICS_BY_UNSPECIFIED, false, "p"},
		{dirpb.AtomicsBy_ATOMICS_BY_CPU, false, "p"},
		{dirpb.AtomicsBy_ATOMICS_BY_NIC, false, "p"},
		{dirpb.AtomicsBy_ATOMICS_BY_NIC, true, "p (CAS by the memory node's agent)"},
		{dirpb.AtomicsBy_ATOMICS_BY_AGENT, false, "p (CAS by the memory node's agent)"},
		{dirpb.AtomicsBy_ATOMICS_BY_PROXY, false, "p (CAS proxied to the adapter)"},
		{99, false, "p"},
	} {
		if got := via("p", c.by, c.agent); got != c.want {
			t.Errorf("via(%v, %v) = %q, want %q", c.by, c.agent, got, c.want)
		}
	}
}

// A memory node that refuses the best provider is dialed by the next.
func TestDialRefused(t *testing.T) {
	f := sim.New(sim.Options{})
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	end := func(what string, c func() error) {
		t.Cleanup(func() {
			if err := c(); err != nil {
				t.Errorf("close %s: %v", what, err)
			}
		})
	}
	mem := rdma.NewDevice("m", f.Device("m"))
	pd, err := mem.AllocPD()
	must(err)
	refusal := errors.New("no device of that kind any more")
	admit := true
	listen := func(accept func() error) string {
		l, err := mem.Listen("", rdma.ListenOptions{Accept: func(rdma.ConnRequest) (*rdma.PD, rdma.Access, error) {
			return pd, rdma.AccessRemoteRead, accept()
		}})
		must(err)
		end("listener", l.Close)
		return l.Addr()
	}
	node := &dirpb.Node{Id: 1, Name: "m1", Incarnation: 7, Endpoints: []*dirpb.Endpoint{
		{Provider: "tcp", Atomics: dirpb.AtomicsBy_ATOMICS_BY_PROXY, Addr: listen(func() error {
			if admit {
				return nil
			}
			return refusal
		})},
		{Provider: "verbs", Atomics: dirpb.AtomicsBy_ATOMICS_BY_NIC, Addr: listen(func() error { return refusal })},
	}}

	devices := []*rdma.Device{rdma.NewDevice("verbs", f.Device("c1")), rdma.NewDevice("tcp", f.Device("c2"))}
	for _, d := range devices {
		end(d.Name(), d.Close)
	}
	core, err := engine.NewCore(engine.Options{Session: 1, Lanes: 1, CacheBytes: 1 << 20, Devices: devices,
		Nanos: engine.Nanos, Millis: engine.Millis})
	must(err)
	end("session", core.Close)
	s := &sess{c: &Client{o: Options{Devices: devices}}, core: core,
		agenda: session.NewAgenda(core, session.AgendaOptions{Token: []byte("token")})}
	s.ctx, s.cancel = context.WithCancelCause(t.Context())
	s.mu.nodes = map[uint32]*dirpb.Node{1: node}

	x, err := s.dial(core.Lanes()[0], 0, 1, new(Path))
	must(err)
	end("QP", x.qp.Close)
	if x.dev != 1 || x.how != "tcp (CAS proxied to the adapter)" || x.incarnation != 7 {
		t.Errorf("dialed device %d, %q, incarnation %d", x.dev, x.how, x.incarnation)
	}
	admit = false
	_, err = s.dial(core.Lanes()[0], 0, 1, new(Path))
	if !errors.Is(err, rdma.ErrRefused) || errors.Is(err, errNoProvider) ||
		strings.Count(err.Error(), refusal.Error()) != 2 {
		t.Errorf("refused by both: %v", err)
	}
}

// Two machines that cannot name themselves are not therefore one.
func TestDialNamelessHost(t *testing.T) {
	for _, c := range []struct {
		here, there string
		dialed      bool
	}{{"a", "a", true}, {"a", "b", false}, {"a", "", false}, {"", "a", false}, {"", "", false}} {
		device := rdma.NewDevice("shm", sim.New(sim.Options{}).Device("c"))
		core, err := engine.NewCore(engine.Options{Session: 1, Lanes: 1, CacheBytes: 1 << 20, Devices: []*rdma.Device{
			device},
			Nanos: engine.Nanos, Millis: engine.Millis})
		if err != nil {
			t.Fatal(err)
		}
		s := &sess{c: &Client{o: Options{Devices: []*rdma.Device{device}}}, core: core,
			agenda: session.NewAgenda(core, session.AgendaOptions{}), host: c.here}
		s.ctx, s.cancel = context.WithCancelCause(t.Context())
		s.mu.nodes = map[uint32]*dirpb.Node{
			1: {Id: 1, Name: "m1", HostId: c.there, Endpoints: []*dirpb.Endpoint{{Provider: "shm", Addr: "nobody"}}}}
		_, err = s.dial(core.Lanes()[0], 0, 1, new(Path))
		if dialed := !errors.Is(err, errNoProvider); err == nil || dialed != c.dialed {
			t.Errorf("from host %q to %q: %v, want dialed: %v", c.here, c.there, err, c.dialed)
		}
		if err := errors.Join(core.Close(), device.Close()); err != nil {
			t.Error(err)
		}
	}
}
