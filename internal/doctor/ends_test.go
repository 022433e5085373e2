package doctor

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/internal/rdmacounters"
)

// meet is two ends that are alike, and change does to them what a case is about.
func meet(change func(m *Meeting)) *Meeting {
	addr := [2]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")}
	m := &Meeting{Addrs: addr}
	for i := range addr {
		make1 := func() End {
			return End{Version: endVersion, Host: fmt.Sprint("h", i),
				Interfaces: []Interface{{Name: "lo", MTU: 65536}, {Name: "ens1", MTU: 9000, Addrs: addr[i : i+1]}},
				Ports: []Port{{Device: "mlx5_0", Number: 1, LinkLayer: "Ethernet", MTU: 4096, GID: addr[i],
					GIDType: "RoCE v2"}},
				Counters: []rdmacounters.Counter{{Device: "mlx5_0", Port: 1, Name: "out_of_sequence", Value: 10},
					{Device: "mlx5_0", Port: 1, Name: "np_cnp_sent", Value: 1}},
				Resent: 5}
		}
		m.Before[i], m.After[i] = make1(), make1()
	}
	change(m)
	return m
}

func TestMeetings(t *testing.T) {
	cases := map[string]func(m *Meeting){
		"alike": func(*Meeting) {},
		"mtu": func(m *Meeting) {
			m.After[1].Interfaces[1].MTU, m.After[1].Ports[0].MTU = 1500, 1024
		},
		"mtu-there": func(m *Meeting) { m.After[0].Interfaces[1].MTU = 1500 },
		"lossy": func(m *Meeting) {
			m.After[0].Counters[0].Value, m.After[1].Counters[1].Value = 17, 4
			m.After[1].Resent, m.After[0].Interfaces[1].Lost = 9, 3
		},
		"rebooted": func(m *Meeting) { m.After[1].Counters[0].Value, m.After[1].Resent = 2, 0 },
		"versions": func(m *Meeting) { m.After[1].Ports[0].GIDType = "RoCE v1" },
		"families": func(m *Meeting) { m.After[1].Ports[0].GID = netip.MustParseAddr("fd00::2") },
		"fabrics":  func(m *Meeting) { m.After[1].Ports[0].LinkLayer, m.After[1].Ports[0].GIDType = "InfiniBand", "" },
		"no-adapter": func(m *Meeting) {
			m.After[1].Ports = nil
			m.Addrs[1] = netip.MustParseAddr("192.0.2.1")
		},
		"hostile": func(m *Meeting) {
			m.After[1].Interfaces[1].Name, m.After[1].Interfaces[1].MTU = "$(reboot)\x1b[2J", 9001
			m.After[1].Ports[0].Device = strings.Repeat("\n", 9)
			m.After[1].Counters = append(m.After[1].Counters, rdmacounters.Counter{Name: "\x00"})
		},
	}
	datadriven.RunTest(t, "testdata/ends", func(t *testing.T, d *datadriven.TestData) string {
		change := cases[d.Cmd]
		if change == nil {
			d.Fatalf(t, "no such case")
		}
		delete(cases, d.Cmd)
		var out strings.Builder
		for _, f := range meet(change).Compare("against h1") {
			fmt.Fprintf(&out, "%v %s: %s\n", f.Level, f.Check, f.Found)
			if f.Advice != "" {
				fmt.Fprintf(&out, "  -> %s\n", f.Advice)
			}
		}
		return out.String()
	})
	for name := range cases {
		t.Errorf("testdata/ends has no case %s", name)
	}
}

// An end says what the machine has, and is read as it was said.
func TestEnd(t *testing.T) {
	m := newMachine()
	m.describe(`
sys/class/infiniband/mlx5_0/
  node_type = 1: CA
  device/net/ens1np0/mtu = 9000
  ports/1/state = 4: ACTIVE
  ports/1/link_layer = Ethernet
  ports/1/gids/3 = 0000:0000:0000:0000:0000:ffff:0a00:0007
  ports/1/gid_attrs/types/3 = RoCE v2
  ports/1/gid_attrs/ndevs/3 = ens1np0
  ports/1/hw_counters/out_of_sequence = 7
sys/class/net/ens1np0/mtu = 9000
sys/class/net/ens1np0/statistics/rx_errors = 2
sys/class/net/ens1np0/statistics/tx_dropped = 3
proc/net/snmp = "Ip: A\nIp: 1\nTcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 42 0\n"
`)
	e, err := LocalEnd(m.s, "h")
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"version":1,"host":"h","interfaces":[{"name":"ens1np0","mtu":9000,"addresses":["10.0.0.7"],"lost":5}],` +
		`"ports":[{"device":"mlx5_0","port":1,"link_layer":"Ethernet","mtu":4096,"gid":"10.0.0.7","gid_type":"RoCE v2"}],` +
		`"counters":[{"device":"mlx5_0","port":1,"counter":"out_of_sequence","value":7}],"tcp_segments_resent":42}`
	if string(b) != want {
		t.Errorf("got\n%s\nwant\n%s", b, want)
	}
	if got, err := ParseEnd(b); err != nil || got.Host != "h" || len(got.Counters) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, bad := range []string{"", "[]", `{"version":2}`, `{"version":1,"ports":[{"gid":"x"}]}`,
		`{"host":"` + strings.Repeat("h", MaxEndBytes) + `"}`} {
		if _, err := ParseEnd([]byte(bad)); err == nil {
			t.Errorf("%.40q is an end", bad)
		}
	}
	if e, err := LocalEnd(newMachine().s, ""); err != nil || e.Ports != nil || e.Resent != 0 {
		t.Errorf("without adapters: %+v, %v", e, err)
	}
}
