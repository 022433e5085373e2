package verbs

import (
	"bytes"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/kvd-project/kvd/rdma/driver"
)

func gid(index int, addr string, t GIDType) GIDInfo {
	return GIDInfo{Index: index, GID: netip.AddrFrom16(netip.MustParseAddr(addr).As16()), Type: t}
}

func port(n int, state, layer string, gids ...GIDInfo) PortInfo {
	return PortInfo{Number: n, State: state, LinkLayer: layer, GIDs: gids}
}

var machine = []DeviceInfo{
	{Name: "mlx5_0", Transport: "InfiniBand",
		Ports: []PortInfo{port(1, "DOWN", "Ethernet", gid(3, "10.0.0.9", GIDRoCEv2))}},
	{Name: "mlx5_1", Transport: "InfiniBand", Ports: []PortInfo{port(1, "ACTIVE", "Ethernet",
		gid(0, "fe80::1", GIDRoCEv1), gid(1, "fe80::1", GIDRoCEv2), gid(2, "10.0.0.1", GIDRoCEv1),
		gid(3, "10.0.0.1", GIDRoCEv2), gid(5, "2001:db8::1", GIDRoCEv2))}},
	{Name: "mlx5_2", Transport: "InfiniBand",
		Ports: []PortInfo{port(1, "ACTIVE", "InfiniBand", gid(0, "fe80::5:6", GIDInfiniBand))}},
	{Name: "cxgb4_0", Transport: "iWARP",
		Ports: []PortInfo{{Number: 1, State: "ACTIVE", LinkLayer: "Ethernet", GIDs: []GIDInfo{gid(0, "200:5e00:5301::",
			GIDInfiniBand)}, Addrs: []netip.Addr{netip.MustParseAddr("10.0.1.1")}}}},
	{Name: "rxe0", Transport: "InfiniBand",
		Ports: []PortInfo{port(1, "ACTIVE", "Ethernet", gid(0, "fe80::2", GIDRoCEv2))}},
	{Name: "rxe1", Transport: "InfiniBand",
		Ports: []PortInfo{port(1, "ACTIVE", "Ethernet", gid(1, "10.0.2.1", GIDRoCEv2))}},
	{Name: "dead", Transport: "InfiniBand", Err: errors.New("open adapter: permission denied")},
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		what    string
		o       Options
		devices []DeviceInfo
		device  string
		gid     int
		reason  string // or of the error
	}{
		{"RoCE v2 over IPv4 first", Options{}, machine, "mlx5_1", 3, "RoCE v2 over IPv4, first of 9"},
		{"near an address", Options{Near: "10.0.2.1"}, machine, "rxe1", 1,
			"it has the address 10.0.2.1, RoCE v2 over IPv4, first of 9"},
		{"near an address nobody has", Options{Near: "10.9.9.9"}, machine, "mlx5_1", 3,
			"RoCE v2 over IPv4, first of 9"},
		{"by name", Options{Device: "mlx5_2"}, machine, "mlx5_2", 0, "asked for, InfiniBand"},
		{"by name, not near", Options{Device: "rxe0", Near: "10.0.0.1"}, machine, "rxe0", 0,
			"asked for, RoCE v2 with a link-local address: reaches this link only"},
		{"by GID", Options{Device: "mlx5_1/1/2"}, machine, "mlx5_1", 2, "asked for, RoCE v1: not routable"},
		{"IPv6 before RoCE v1", Options{}, []DeviceInfo{{Name: "a", Ports: []PortInfo{port(1, "ACTIVE", "Ethernet",
			gid(0, "10.0.0.1", GIDRoCEv1), gid(1, "2001:db8::1", GIDRoCEv2))}}}, "a", 1,
			"RoCE v2 over IPv6, first of 2"},
		{"a port that is down", Options{Device: "mlx5_0"}, machine, "", 0, "mlx5_0 port 1 is DOWN"},
		{"iWARP", Options{Device: "cxgb4_0"}, machine, "cxgb4_0", 0, "asked for, iWARP"},
		{"near iWARP", Options{Near: "10.0.1.1"}, machine, "cxgb4_0", 0,
			"it has the address 10.0.1.1, iWARP, first of 9"},
		{"iWARP without the manager", Options{Device: "cxgb4_0", Connect: ConnectTCP}, machine, "", 0,
			"connect is tcp"},
		{"iWARP without an address", Options{}, []DeviceInfo{{Name: "a", Transport: "iWARP",
			Ports: []PortInfo{port(1, "ACTIVE", "Ethernet", gid(0, "200:5e00:5301::", GIDInfiniBand))}}}, "", 0,
			"a port 1: its network interface has no address"},
		{"one that cannot be opened", Options{Device: "dead"}, machine, "", 0, "permission denied"},
		{"no such adapter", Options{Device: "rxe7"}, machine, "", 0, "there are: mlx5_0, mlx5_1"},
		{"no such port", Options{Device: "rxe0/2"}, machine, "", 0, `no adapter "rxe0/2"`},
		{"no address", Options{}, []DeviceInfo{{Name: "a", Ports: []PortInfo{port(1, "ACTIVE", "Ethernet")}}}, "", 0,
			"a port 1 has no GID"},
		{"nothing", Options{}, nil, "", 0, "no RDMA adapter"},
		{"by the GID's type", Options{Fabric: Fabric{GIDType: "RoCE v1"}}, machine, "mlx5_1", 2,
			"RoCE v1: not routable, first of 2"},
		{"by the GID's prefix", Options{Fabric: Fabric{GIDAddress: "2001:db8::/32"}}, machine, "mlx5_1", 5,
			"RoCE v2 over IPv6"},
		{"by the GID's address", Options{Near: "10.0.0.1", Fabric: Fabric{GIDAddress: "10.0.2.1"}}, machine, "rxe1",
			1, "RoCE v2 over IPv4"},
		{"by a prefix that nobody has", Options{Device: "rxe1", Fabric: Fabric{GIDType: "RoCE v2",
			GIDAddress: "192.0.2.0/24"}}, machine, "", 0, "rxe1 port 1 has no GID of type RoCE v2 within 192.0.2.0/24"},
		{"another index than the type's", Options{Device: "mlx5_1/1/3", Fabric: Fabric{GIDType: "RoCE v1"}}, machine,
			"", 0, "GID index 3 of mlx5_1 port 1 is not of type RoCE v1"},
		{"nonsense", Options{Device: "a/b"}, machine, "", 0, "want NAME, NAME/PORT"},
	} {
		got, err := Choose(c.devices, &c.o)
		switch {
		case c.device == "" && (err == nil || !strings.Contains(err.Error(), c.reason)):
			t.Errorf("%s: %+v, %v; want an error with %q", c.what, got, err, c.reason)
		case c.device != "" && err != nil:
			t.Errorf("%s: %v", c.what, err)
		case c.device != "" && (c.devices[got.Device].Name != c.device || got.GID != c.gid || got.Reason != c.reason):
			t.Errorf("%s: chose %s gid %d because %q; want %s gid %d because %q", c.what, c.devices[got.Device].Name,
				got.GID, got.Reason, c.device, c.gid, c.reason)
		}
	}
}

func TestSelector(t *testing.T) {
	for s, want := range map[string]selector{
		"": {gid: -1}, "rxe0": {"rxe0", 0, -1}, "mlx5_0/2": {"mlx5_0", 2, -1}, "mlx5_0/1/3": {"mlx5_0", 1, 3},
		"mlx5_0/1/0": {"mlx5_0", 1, 0},
	} {
		if got, err := parseSelector(s); err != nil || got != want {
			t.Errorf("%q gave %+v, %v; want %+v", s, got, err, want)
		}
	}
	for _, s := range []string{"/1", "a/0", "a/x", "a/1/-1", "a/1/2/3", "a/1/99999999999999999999", "a/256"} {
		if got, err := parseSelector(s); err == nil {
			t.Errorf("%q gave %+v", s, got)
		}
	}
}

func TestOptions(t *testing.T) {
	bad := Options{Device: "a/", Near: "nowhere", MTU: 1500, Atomics: 9, Connect: 9, PeerTimeout: 1,
		HandshakeTimeout: -1, Fabric: Fabric{TrafficClass: 256, ServiceLevel: 16, PKeyIndex: -1, GIDType: "v2",
			GIDAddress: "10.0.0.0/33", RetryCount: 7, RNRRetry: 7, HopLimit: 256, FlowLabel: 1 << 20}}
	err := bad.Validate()
	for _, want := range []string{`"a/"`, `"nowhere"`, "1500", "Atomics is 9", "Connect is 9", "PeerTimeout is 1ns",
		"HandshakeTimeout is -1ns", "TrafficClass is 256, want 0 to 255", "ServiceLevel is 16", "PKeyIndex is -1",
		`GIDType is "v2", want RoCE v2`, `GIDAddress is "10.0.0.0/33"`, "RetryCount is 7, want 0 to 6", "RNRRetry is 7",
		"HopLimit is 256", "FlowLabel is 1048576"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %s", err, want)
		}
	}
	if _, err := Open(bad); err == nil || errors.Is(err, ErrUnavailable) {
		t.Errorf("Open gave %v, want the mistakes first", err)
	}
}

func TestReadGIDs(t *testing.T) {
	const p = "rxe0/ports/1/"
	fs := fstest.MapFS{}
	for name, text := range map[string]string{
		"link_layer": "Ethernet\n",
		"gids/0":     "fe80:0000:0000:0000:0000:0000:0000:0001\n", "gid_attrs/types/0": "RoCE v2\n",
		"gid_attrs/ndevs/0": "n0\n",
		"gids/1":            "0000:0000:0000:0000:0000:ffff:0a4d:0101\n", "gid_attrs/types/1": "IB/RoCE v1\n",
		"gid_attrs/ndevs/1": "n0\n",
		"gids/2":            "0000:0000:0000:0000:0000:0000:0000:0000\n",
		"gids/3":            "garbage",
		"gids/4":            "fe80:0000:0000:0000:0000:0000:0000:0004\n", // no type: not in use
		"gids/5":            "fe80:0000:0000:0000:0000:0000:0000:0005\n",
		"gids/weird":        "x", "gid_attrs/types/5": "RoCE v9\n",
	} {
		fs[p+name] = &fstest.MapFile{Data: []byte(text)}
	}
	want := []GIDInfo{gid(0, "fe80::1", GIDRoCEv2), gid(1, "10.77.1.1", GIDRoCEv1)}
	want[0].Netdev, want[1].Netdev = "n0", "n0"
	if got := readGIDs(fs, "rxe0", 1); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := readGIDs(fs, "rxe1", 1); got != nil {
		t.Errorf("an adapter that is not there has %v", got)
	}
}

var someEndpoint = endpoint{qpn: 0xabcdef, psn: 0x123456, flow: 0xfffff, lid: 7, mtu: 5, global: true, rdAtomic: 16,
	gid: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}}

func TestWire(t *testing.T) {
	h := hello{ways: wayTCP | wayCM, domain: domainNIC, ep: someEndpoint, private: []byte("token")}
	b := h.append(nil)
	got, n, err := parseHello(b[:headSize])
	got.private = b[headSize:]
	if err != nil || n != 5 || !reflect.DeepEqual(got, h) {
		t.Fatalf("hello %+v, %d, %v; want %+v", got, n, err, h)
	}
	w := welcome{way: wayTCP, domain: domainAgent, ep: someEndpoint}
	if got, err := parseWelcome(w.append(nil, "")[:headSize]); err != nil || got != w {
		t.Fatalf("welcome %+v, %v; want %+v", got, err, w)
	}
	long := strings.Repeat("x", 2*maxRefusal)
	b = (&welcome{refused: true}).append(nil, long)
	if got, err := parseWelcome(b[:headSize]); err != nil || !got.refused || got.textLen != maxRefusal ||
		len(b) != headSize+maxRefusal {
		t.Fatalf("refusal %+v, %v of %d bytes", got, err, len(b))
	}
	q := atomicRequest{seq: 1, op: driver.OpFetchAdd, rkey: 2, addr: 3, compare: 4, swap: 5}
	var rb [requestSize]byte
	q.put(rb[:])
	if got := parseRequest(rb[:]); got != q {
		t.Fatalf("request %+v, want %+v", got, q)
	}
	r := atomicReply{seq: 9, status: driver.RemAccessErr, found: 1 << 63}
	var pb [replySize]byte
	r.put(pb[:])
	if got, err := parseReply(pb[:]); err != nil || got != r {
		t.Fatalf("reply %+v, %v; want %+v", got, err, r)
	}
}

func TestWireRefuses(t *testing.T) {
	good := (&hello{domain: domainNIC, ep: someEndpoint}).append(nil)
	for _, c := range []struct {
		what string
		at   int
		to   byte
		why  string
	}{
		{"magic", 0, 'x', "does not speak"}, {"version", 4, 9, "version is 9"}, {"domain", 7, 3, "kind 3"},
		{"QPN", 11, 1, "too long"},
		{"PSN", 15, 1, "too long"}, {"flow", 18, 0x1f, "too long"}, {"MTU", 22, 6, "MTU code 6"},
		{"global", 23, 2, "global flag"},
		{"depth", 24, 0, "under way"}, {"private", headSize - 1, 255, "private data"},
	} {
		b := bytes.Clone(good)
		b[c.at] = c.to
		if _, _, err := parseHello(b); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, want an error with %q", c.what, err, c.why)
		}
	}
}

func FuzzWire(f *testing.F) {
	f.Add((&hello{domain: domainNIC, ep: someEndpoint, private: []byte("x")}).append(nil))
	f.Add((&welcome{domain: domainAgent, ep: someEndpoint}).append(nil, ""))
	f.Add((&welcome{refused: true}).append(nil, "no"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headSize {
			return
		}
		if h, n, err := parseHello(b[:headSize]); err == nil {
			if n > driver.MaxPrivate || mtuBytes(h.ep.mtu) == 0 {
				t.Fatalf("took %+v with %d bytes of private data", h, n)
			}
			again, _, err := parseHello(h.append(nil)[:headSize])
			if err != nil || !reflect.DeepEqual(again, h) {
				t.Fatalf("%+v became %+v, %v", h, again, err)
			}
		}
		if w, err := parseWelcome(b[:headSize]); err == nil && w.textLen > maxRefusal {
			t.Fatalf("took %+v", w)
		}
		if r, err := parseReply(b); err == nil && r.status < driver.Success {
			t.Fatalf("took %+v", r)
		}
	})
}
