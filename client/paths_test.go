package client

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/session"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/sim"
)

func TestBypassReason(t *testing.T) {
	left, refused := errors.New("verbs unavailable: port 1 is DOWN"), errors.New("connection refused")
	nic := []string{"mlx5_0"}
	for _, c := range []struct {
		b            bypass
		want, detail string
	}{
		{bypass{}, "", ""},
		{bypass{passedOver: left}, "", ""}, // RDMA is nowhere
		{bypass{offered: true}, "asked-for", "settings"},
		{bypass{adapters: nic}, "asked-for", "settings"},
		{bypass{offered: true, passedOver: left, built: true}, "no-adapter", "m1"},
		{bypass{offered: true, passedOver: left}, "no-adapter", "m1"},
		{bypass{adapters: nic, passedOver: left}, "not-built", "DOWN"},
		{bypass{adapters: nic, passedOver: left, built: true}, "adapter-unusable", "mlx5_0: verbs unavailable: port 1"},
		{bypass{opened: true, built: true, adapters: nic}, "not-offered", "m1 offers no RDMA"},
		{bypass{opened: true, built: true, adapters: nic, offered: true, failed: refused}, "dial-failed", "m1: conn"},
	} {
		c.b.node = "m1"
		if got, detail := c.b.reason(); got != c.want || !strings.Contains(detail, c.detail) {
			t.Errorf("%+v: reason %q (%s), want %q with %q", c.b, got, detail, c.want, c.detail)
		}
	}
}

// A client that comes by tcp to memory nodes that offer RDMA warns once for a reason, and counts them all.
func TestPaths(t *testing.T) {
	var log bytes.Buffer
	c := &Client{o: Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}}
	device := rdma.NewDevice("tcp", sim.New(sim.Options{}).Device("c"))
	device.PassOver(errors.New("verbs unavailable: a reason"))
	core, err := engine.NewCore(engine.Options{Session: 1, Lanes: 1, CacheBytes: 1 << 20,
		Devices: []*rdma.Device{device}, Nanos: engine.Nanos, Millis: engine.Millis})
	if err != nil {
		t.Fatal(err)
	}
	c.o.Devices = []*rdma.Device{device}
	s := &sess{c: c, core: core, agenda: session.NewAgenda(core, session.AgendaOptions{})}
	s.mu.paths, s.mu.nodes = map[uint32]Path{}, map[uint32]*dirpb.Node{}
	verbs := []*dirpb.Endpoint{{Provider: "verbs"}, {Provider: "tcp"}}
	for id, n := range map[uint32]*dirpb.Node{1: {Name: "m1", Endpoints: verbs}, 2: {Name: "m2", Endpoints: verbs}} {
		s.mu.nodes[id], s.mu.paths[id] = n, s.pathBy(device, n, nil)
		c.bypassed(s.mu.paths[id])
	}
	s.mu.paths[3] = Path{Provider: "shm"} // it has left the map
	all := s.pathsLocked()
	if len(all) != 1 || all[0].Provider != "tcp" || all[0].Reason == "" || all[0].Connections != 2 {
		t.Errorf("paths are %+v, want two by tcp for one reason", all)
	}
	if n := strings.Count(log.String(), "tcp is used where RDMA is within reach"); n != 1 ||
		!strings.Contains(log.String(), "level=WARN") || !strings.Contains(log.String(), all[0].Reason) {
		t.Errorf("warned %d times:\n%s", n, log.String())
	}
	s.tellPathsLocked()
	ask, _ := s.agenda.DueRenewal(func() (uint64, bool) { return 0, false })
	if got := ask.Renew.GetPaths().GetPaths(); len(got) != 1 || got[0].GetReason() != all[0].Reason ||
		got[0].GetConnections() != 2 {
		t.Errorf("the directory is told of %v", got)
	}
	// The setting wants it so.
	c.o.Provider = "tcp"
	if p := s.pathBy(device, s.mu.nodes[1], nil); p.Reason != "asked-for" {
		t.Errorf("with the provider set, the path is %+v", p)
	}
	if err := errors.Join(core.Close(), device.Close()); err != nil {
		t.Error(err)
	}
}

// RequireRDMA takes nothing in its place, and says what is in the way.
func TestRequire(t *testing.T) {
	device := rdma.NewDevice("tcp", sim.New(sim.Options{}).Device("c"))
	device.PassOver(errors.New("verbs unavailable: a reason"))
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{Require: RequireRDMA, Provider: "tcp"}, "only verbs is RDMA"},
		{Options{Require: "verbs"}, "want rdma"},
		{Options{Require: RequireRDMA, Devices: []*rdma.Device{device}}, "verbs unavailable: a reason"},
	} {
		c.o.Directory = []string{"127.0.0.1:1"}
		c.o.ensureDefaults()
		if err := c.o.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("require %q, provider %q: %v, want %q", c.o.Require, c.o.Provider, err, c.want)
		}
	}
	// A memory node that comes later without RDMA.
	verbs := rdma.NewDevice("verbs", sim.New(sim.Options{}).Device("v"))
	core, err := engine.NewCore(engine.Options{Session: 1, Lanes: 1, CacheBytes: 1 << 20,
		Devices: []*rdma.Device{verbs, device}, Nanos: engine.Nanos, Millis: engine.Millis})
	if err != nil {
		t.Fatal(err)
	}
	s := &sess{c: &Client{o: Options{Devices: []*rdma.Device{verbs, device}, Provider: "verbs", Require: RequireRDMA}},
		core: core, agenda: session.NewAgenda(core, session.AgendaOptions{}), ctx: t.Context()}
	s.mu.nodes = map[uint32]*dirpb.Node{2: {Id: 2, Name: "m2", Endpoints: []*dirpb.Endpoint{{Provider: "tcp"}}}}
	_, err = s.dial(core.Lanes()[0], 0, 2, new(Path))
	if !errors.Is(err, errNoProvider) || !strings.Contains(err.Error(), `require is rdma`) ||
		!strings.Contains(err.Error(), `memory node "m2" does not offer verbs`) {
		t.Errorf("dialed a memory node without RDMA: %v", err)
	}
	if err := errors.Join(core.Close(), verbs.Close(), device.Close()); err != nil {
		t.Error(err)
	}
}
