//go:build verbs && cgo && linux

package verbs

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/rdmatest"
)

// capture receives the packets of a network interface, both ways, from here on. After a time without one that a
// connection would take it fails t.
func capture(t *testing.T, netdev string) (next func() []byte) {
	t.Helper()
	const all = unix.ETH_P_ALL << 8 // in network byte order
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	dev, err := net.InterfaceByName(netdev)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: dev.Index}); err != nil {
		t.Fatal(err)
	}
	wait := unix.NsecToTimeval(int64(100 * time.Millisecond))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 64<<10)
	end := time.Now().Add(30 * time.Second)
	return func() []byte {
		t.Helper()
		for time.Now().Before(end) {
			n, _, err := unix.Recvfrom(fd, b, 0)
			if err == nil {
				return b[:n]
			}
			if err != unix.EINTR && err != unix.EAGAIN {
				t.Fatal(err)
			}
		}
		t.Fatal("packets of one side did not come")
		return nil
	}
}

// systemHopLimit is net.ipv4.ip_default_ttl of the machine.
const systemHopLimit = 64

// Packets of either side have the DSCP that it was told, whoever connects. Their hop limit is the route's: Linux sees
// to that over RoCE.
func TestFabric(t *testing.T) {
	needAdapters(t)
	for _, c := range []Connect{ConnectTCP, ConnectCM} {
		t.Run(c.String(), func(t *testing.T) { packets(t, c) })
	}
}

func packets(t *testing.T, connect Connect) {
	sides := map[netip.Addr]Fabric{
		netip.MustParseAddr("10.77.1.1"): {TrafficClass: 46 << 2, HopLimit: 33, GIDType: "RoCE v2", ServiceLevel: 3},
		netip.MustParseAddr("10.77.1.2"): {TrafficClass: 26 << 2, HopLimit: 17, GIDAddress: "10.77.0.0/16",
			FlowLabel: 5},
	}
	passive, active := sides[netip.MustParseAddr("10.77.1.1")], sides[netip.MustParseAddr("10.77.1.2")]
	passive.GIDAddress = "10.77.1.1"
	next := capture(t, "n0")
	e := rdmatest.NewEnv(t, rdmatest.Harness{Passive: open(t, Options{Device: "rxe0", Fabric: passive,
		Connect: connect}), Active: open(t, Options{Device: "rxe1", Fabric: active, Connect: connect}),
		Addr: "127.0.0.1:0"})
	mr := e.Memory(4096, rdmatest.All)
	l := e.Dial()
	e.Must(l.OK(l.Write(mr, 0, l.Buf(64)), l.Read(mr, 0, l.Buf(64))))
	if l := e.H.Active.Caps().Fabric; l.Device != "rxe1" || l.GID != "10.77.1.2" || l.GIDType != "RoCE v2" ||
		l.TrafficClass != 26<<2 || l.HopLimit != 17 || l.FlowLabel != 5 || l.RetryCount != 6 || l.PKey != 0xffff {
		t.Errorf("the adapter says of itself: %+v", l)
	}
	seen := make(map[netip.Addr]bool)
	for len(seen) < len(sides) {
		p := next()
		if len(p) < 28 || p[0]>>4 != 4 || p[9] != unix.IPPROTO_UDP {
			continue
		}
		udp := p[int(p[0]&15)*4:]
		from := netip.AddrFrom4([4]byte(p[12:16]))
		want, ours := sides[from]
		// The self-test of an adapter is a connection to itself, from before. Queue pair 1 is the connection manager's.
		if len(udp) < 20 || binary.BigEndian.Uint16(udp[2:]) != 4791 || !ours || string(udp[13:16]) == "\x00\x00\x01" ||
			from == netip.AddrFrom4([4]byte(p[16:20])) {
			continue
		}
		if int(p[1]) != want.TrafficClass || p[8] != systemHopLimit {
			t.Fatalf("a packet of %v has traffic class %d and hop limit %d, want %d and %d", from, p[1], p[8],
				want.TrafficClass, systemHopLimit)
		}
		seen[from] = true
	}
}

// A P_Key or a GID that the port does not have is refused as the adapter is opened, with its name.
func TestFabricRefused(t *testing.T) {
	needAdapters(t)
	for want, f := range map[string]Fabric{
		"PKeyIndex is 9":                {PKeyIndex: 9},
		"no GID of type RoCE v1":        {GIDType: "RoCE v1"},
		"no GID within 192.0.2.0/24":    {GIDAddress: "192.0.2.0/24"},
		"TrafficClass is 256, want 0 t": {TrafficClass: 256},
	} {
		d, err := Open(Options{Device: "rxe0", Fabric: f})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", f, err, want)
		}
		if err == nil {
			t.Error(d.Close())
		}
	}
}
