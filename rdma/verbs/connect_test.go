package verbs

import (
	"bytes"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
)

func TestConnect(t *testing.T) {
	for _, c := range []Connect{ConnectAuto, ConnectTCP, ConnectCM} {
		if got, err := ParseConnect(c.String()); err != nil || got != c {
			t.Errorf("%v became %v, %v", c, got, err)
		}
	}
	if _, err := ParseConnect("rdma"); err == nil {
		t.Error("took rdma")
	}
	for _, c := range []struct {
		listener, dialer ways
		want             ways
		why              string
	}{
		{ConnectAuto.ways(false), ConnectAuto.ways(false), wayTCP, ""},
		{ConnectAuto.ways(false), ConnectCM.ways(false), wayCM, ""},
		{ConnectCM.ways(false), ConnectAuto.ways(false), wayCM, ""},
		{ConnectAuto.ways(true), ConnectAuto.ways(true), wayCM, ""},
		{ConnectCM.ways(false), ConnectTCP.ways(false), 0, "older version"},
		{ConnectTCP.ways(false), ConnectCM.ways(false), 0, "does not connect by"},
		{ConnectTCP.ways(false), 1 << 7, 0, "does not connect by"},
	} {
		got, err := c.listener.choose(c.dialer)
		if got != c.want || (err != nil) != (c.why != "") || err != nil && !strings.Contains(err.Error(), c.why) {
			t.Errorf("a listener with %b and a dialer with %b: %b, %v; want %b, %q", c.listener, c.dialer, got, err,
				c.want, c.why)
		}
	}
}

// Older peers have zeros where ways are now.
func TestOlderPeers(t *testing.T) {
	b := (&hello{ways: wayTCP | wayCM, domain: domainNIC, ep: someEndpoint}).append(nil)
	b[5] = 0
	if h, _, err := parseHello(b); err != nil || h.ways != wayTCP {
		t.Errorf("an older hello: %+v, %v", h, err)
	}
	b = (&welcome{way: wayTCP, domain: domainNIC, ep: someEndpoint}).append(nil, "")
	b[6] = 0
	if w, err := parseWelcome(b); err != nil || w.way != wayTCP {
		t.Errorf("an older welcome: %+v, %v", w, err)
	}
}

func TestRendezvous(t *testing.T) {
	r := rendezvous{at: netip.MustParseAddrPort("10.0.0.1:7"), nonce: nonce{0: 1, 15: 9}, word: 1 << 63, wordRKey: 5}
	b := (&welcome{way: wayCM, domain: domainAgent, ep: someEndpoint, meet: r}).append(nil, "")
	w, err := parseWelcome(b[:headSize])
	if err != nil || w.textLen != rendezvousSize || len(b) != headSize+rendezvousSize {
		t.Fatalf("%+v, %v of %d bytes", w, err, len(b))
	}
	if got, err := parseRendezvous(b[headSize:]); err != nil || got != r {
		t.Errorf("%+v became %+v, %v", r, got, err)
	}
	for what, at := range map[string]string{"no port": "10.0.0.1:0", "no address": "0.0.0.0:1", "many": "224.0.0.1:1"} {
		bad := rendezvous{at: netip.MustParseAddrPort(at)}
		if got, err := parseRendezvous(bad.append(nil)); err == nil {
			t.Errorf("%s: took %+v", what, got)
		}
	}
	for what, change := range map[string][2]byte{"way": {6, 4}, "length": {headSize - 2, 1}} {
		bad := bytes.Clone(b[:headSize])
		bad[change[0]] = change[1]
		if w, err := parseWelcome(bad); err == nil {
			t.Errorf("another %s: took %+v", what, w)
		}
	}
}

func TestPrivate(t *testing.T) {
	n := nonce{3: 7}
	p := n.private()
	if got, ok := parsePrivate(append(p[:], make([]byte, 35)...)); !ok || got != n {
		t.Errorf("%v became %v, %v", n, got, ok)
	}
	for i := range 5 {
		bad := p
		bad[i]++
		if _, ok := parsePrivate(bad[:]); ok {
			t.Errorf("took private data with byte %d changed", i)
		}
	}
	if _, ok := parsePrivate(p[:20]); ok {
		t.Error("took private data that is too short")
	}
}

// The addresses of a port are its network interface's.
func TestManagerAddresses(t *testing.T) {
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	mine := net.Interface{Index: 1 << 20, HardwareAddr: net.HardwareAddr{2, 0, 0x5e, 0, 0x53, 1}}
	for _, in := range all {
		if in.Flags&net.FlagLoopback != 0 {
			mine.Index = in.Index
		}
	}
	want := routable(&mine)
	gids := []GIDInfo{gid(0, "200:5e00:5301::", GIDInfiniBand)}
	if got := iwarpAddrs(gids, []net.Interface{mine}); len(want) == 0 || !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	mine.HardwareAddr[5]++
	if got := iwarpAddrs(gids, []net.Interface{mine}); got != nil {
		t.Errorf("another interface has %v", got)
	}
	const dir = "mlx5_0/device/net/"
	fs := fstest.MapFS{dir + "lo/dev_port": {Data: []byte("1\n")}, dir + "gone0/dev_port": {Data: []byte("0\n")}}
	if got := ipoibAddr(fs, "mlx5_0", 2); !got.IsValid() {
		t.Error("an interface with an address has none")
	}
	if got := ipoibAddr(fs, "mlx5_0", 1); got.IsValid() {
		t.Errorf("an interface that is gone has %v", got)
	}
}
