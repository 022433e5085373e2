package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/internal/rdmacounters"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// End is what one of two machines tells the other of itself, as JSON.
type End struct {
	Version    int         `json:"version"` // endVersion
	Host       string      `json:"host"`
	Interfaces []Interface `json:"interfaces"`
	Ports      []Port      `json:"ports"`
	// Counters are of all ports. Resent are TCP segments that this machine sent again.
	Counters []rdmacounters.Counter `json:"counters"`
	Resent   uint64                 `json:"tcp_segments_resent"`
	// To are the passive sides that serve there, as verbperf.Passive.To says.
	To []string `json:"to,omitempty"`
}

const (
	endVersion = 1
	// MaxEndBytes bounds an End as JSON.
	MaxEndBytes = 1 << 20
)

// Interface is a network interface.
type Interface struct {
	Name  string       `json:"name"`
	MTU   int          `json:"mtu"` // bytes
	Addrs []netip.Addr `json:"addresses"`
	// Lost are packets that it dropped or that came damaged.
	Lost uint64 `json:"lost"`
}

// Port is the port of an adapter that a kvd process would use.
type Port struct {
	Device    string     `json:"device"`
	Number    int        `json:"port"`
	LinkLayer string     `json:"link_layer"`
	MTU       int        `json:"mtu"` // of a path, bytes; 0: not known
	GID       netip.Addr `json:"gid"`
	GIDType   string     `json:"gid_type"` // empty on InfiniBand
}

// ParseEnd reads what the other machine says, whose text may hold anything that a [Finding] does not show as it is.
func ParseEnd(b []byte) (e End, err error) {
	if len(b) > MaxEndBytes {
		return e, fmt.Errorf("the other end says %d bytes, want at most %d", len(b), MaxEndBytes)
	}
	if err := json.Unmarshal(b, &e); err != nil {
		return e, fmt.Errorf("the other end says no JSON of kvctl doctor: %w", err)
	}
	if e.Version != endVersion {
		return e, fmt.Errorf("the other end speaks version %d of kvctl doctor, this one %d", e.Version, endVersion)
	}
	return e, nil
}

// LocalEnd is what s tells of itself; host is its name. An error says what is missing from the End it comes with.
func LocalEnd(s System, host string) (e End, err error) {
	x := &exam{System: s}
	e = End{Version: endVersion, Host: host}
	if e.Interfaces, err = s.Interfaces(); err != nil {
		err = fmt.Errorf("network interfaces: %w", err)
	}
	for i := range e.Interfaces {
		in := &e.Interfaces[i]
		for _, f := range []string{"rx_errors", "rx_missed_errors", "rx_fifo_errors", "tx_errors", "tx_dropped"} {
			n, _ := x.readInt(path.Join("sys/class/net", in.Name, "statistics", f)) // not every driver counts
			in.Lost += uint64(max(n, 0))
		}
	}
	x.adapters() // for x.devices: the findings are Examine's
	if c, cerr := s.Choose(x.infos()); cerr == nil {
		e.Ports = []Port{x.chosen(c)}
	}
	root, serr := fs.Sub(x.FS, sysAdapters)
	if serr == nil {
		e.Counters, serr = rdmacounters.Read(root)
	}
	e.Resent = x.resent()
	return e, cmp.Or(err, serr)
}

// chosen is the port that c names.
func (x *exam) chosen(c verbs.Choice) Port {
	a := x.devices[c.Device]
	p := a.Ports[c.Port]
	out := Port{Device: a.Name, Number: p.Number, LinkLayer: p.LinkLayer, MTU: p.MTU, GID: c.Addr}
	for _, g := range p.GIDs {
		if g.Index == c.GID {
			out.GIDType = g.Type.String()
		}
	}
	if out.MTU == 0 && p.LinkLayer == "Ethernet" {
		if n, err := x.readInt(path.Join("sys/class/net", netdevOf(a, p), "mtu")); err == nil {
			out.MTU = roceMTU(n)
		}
	}
	return out
}

// resent is RetransSegs of /proc/net/snmp (RFC 4022), or 0.
func (x *exam) resent() uint64 {
	text, _ := x.read("proc/net/snmp")
	var names []string
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "Tcp:" {
			continue
		}
		if i := slices.Index(names, "RetransSegs"); i >= 0 && i < len(f) {
			n, _ := strconv.ParseUint(f[i], 10, 64)
			return n
		}
		names = f
	}
	return 0
}

// Meeting is two ends before and after something was measured between them. Index 0 is this machine, 1 the other.
type Meeting struct {
	Before, After [2]End
	// Addrs are those that the ends talk by over TCP.
	Addrs [2]netip.Addr
}

// Compare tells what the two ends' settings and counters say of the way between them.
func (m *Meeting) Compare(group string) []Finding {
	x := &exam{group: group}
	m.interfaces(x)
	m.ports(x)
	m.losses(x)
	return x.out
}

// side names an end in a sentence.
var side = [2]string{"here", "there"}

func (m *Meeting) at(i int) (in Interface, ok bool) {
	for _, in := range m.After[i].Interfaces {
		if slices.ContainsFunc(in.Addrs, func(a netip.Addr) bool { return a.Unmap() == m.Addrs[i].Unmap() }) {
			return in, true
		}
	}
	return in, false
}

func (m *Meeting) interfaces(x *exam) {
	const check = "interface MTU"
	a, ok := m.at(0)
	b, there := m.at(1)
	if !ok || !there {
		x.add(Note, check, fmt.Sprintf("not compared: no interface with the address %v is known %s", m.Addrs[btoi(ok)],
			side[btoi(ok)]), "behind an address translation, look at ip link on both")
		return
	}
	found := fmt.Sprintf("%d %s (%s), %d %s (%s)", a.MTU, side[0], a.Name, b.MTU, side[1], b.Name)
	if a.MTU == b.MTU {
		x.add(OK, check, found, "")
		return
	}
	where, dev, mtu := side[0], a.Name, b.MTU
	if b.MTU > a.MTU {
		where, dev, mtu = side[1], b.Name, a.MTU
	}
	x.add(Warn, check, found+": the smaller end drops packets longer than its own, and connections hang once they "+
		"carry much", fmt.Sprintf("%s: ip link set %s mtu %d; or raise the other, with a switch that carries it", where,
		cmp.Or(word(dev), "DEV"), mtu))
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

func (m *Meeting) ports(x *exam) {
	var p [2]Port
	for i, e := range m.After {
		if len(e.Ports) == 0 {
			return // one end has no adapter
		}
		p[i] = e.Ports[0]
	}
	name := func(i int) string { return fmt.Sprintf("%s/%d %s", p[i].Device, p[i].Number, side[i]) }
	if p[0].LinkLayer != p[1].LinkLayer {
		x.add(Warn, "link layer", fmt.Sprintf("%s (%s), %s (%s): they cannot reach each other", p[0].LinkLayer, name(0),
			p[1].LinkLayer, name(1)), "name adapters of one fabric with --rdma-device NAME/PORT")
		return
	}
	if p[0].GIDType != p[1].GIDType {
		x.add(Warn, "RoCE version", fmt.Sprintf("%s (%s), %s (%s): neither hears the other", p[0].GIDType, name(0),
			p[1].GIDType, name(1)), "name GIDs of RoCE v2 on both: --rdma-device NAME/PORT/GIDINDEX")
	} else if p[0].GIDType != "" {
		x.add(OK, "RoCE version", fmt.Sprintf("%s (%s, %s)", p[0].GIDType, name(0), name(1)), "")
	}
	if p[0].GIDType != "" && p[0].GID.Unmap().Is4() != p[1].GID.Unmap().Is4() {
		x.add(Warn, "GID family", fmt.Sprintf("%v (%s), %v (%s): IPv4 on one end only", p[0].GID.Unmap(), name(0),
			p[1].GID.Unmap(), name(1)), "give both an IPv4 address, or name GIDs of IPv6 on both")
	}
	switch found := fmt.Sprintf("%d (%s), %d (%s)", p[0].MTU, name(0), p[1].MTU, name(1)); {
	case p[0].MTU == 0 || p[1].MTU == 0:
	case p[0].MTU == p[1].MTU:
		x.add(OK, "path MTU", found, "")
	default:
		x.add(Note, "path MTU", found+": connections take the smaller",
			"ip link set DEV mtu 9000 on both, with a switch that carries it")
	}
}

// losses reports the counters that grew meanwhile, at either end.
func (m *Meeting) losses(x *exam) {
	quiet := true
	for i := range m.Before {
		before, after := m.Before[i], m.After[i]
		byKind := map[rdmacounters.Kind][]rdmacounters.Counter{}
		for _, c := range rdmacounters.Growth(before.Counters, after.Counters) {
			if k, ok := rdmacounters.Lookup(c.Name); ok {
				byKind[k] = append(byKind[k], c)
			}
		}
		for _, k := range rdmacounters.Kinds {
			if len(byKind[k]) == 0 {
				continue
			}
			why, what := meaning(k, "DEV")
			level := Warn
			switch k {
			case rdmacounters.Marked, rdmacounters.Slowed, rdmacounters.Waited:
				level = Note
			}
			var s []string
			for _, c := range byKind[k] {
				s = append(s, fmt.Sprintf("%s/%d %s %d", c.Device, c.Port, c.Name, c.Value))
			}
			x.add(level, "counters "+side[i], "meanwhile "+strings.Join(s, ", ")+": "+why, what)
			quiet = false
		}
		if n := after.Resent - before.Resent; after.Resent > before.Resent {
			x.add(Note, "TCP "+side[i], fmt.Sprintf("%d segments were sent again meanwhile, of all connections", n),
				"a few under load are usual; many: look for drops with ethtool -S DEV, and compare MTUs")
			quiet = false
		}
		for _, in := range after.Interfaces {
			j := slices.IndexFunc(before.Interfaces, func(b Interface) bool { return b.Name == in.Name })
			if j >= 0 && in.Lost > before.Interfaces[j].Lost {
				x.add(Warn, "interface "+side[i], fmt.Sprintf("%s lost %d packets meanwhile", in.Name,
					in.Lost-before.Interfaces[j].Lost), "ethtool -S "+cmp.Or(word(in.Name), "DEV")+
					" tells of what kind; a damaged cable, or rings that are too small (ethtool -G)")
				quiet = false
			}
		}
	}
	if quiet {
		x.add(OK, "losses", fmt.Sprintf("none: of %d counters of adapters, and of TCP and the interfaces, none grew",
			len(m.After[0].Counters)+len(m.After[1].Counters)), "")
	}
}
