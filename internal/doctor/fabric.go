package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/internal/rdmacounters"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// fabric reports on what lies between this port and others: namespaces, versions of RoCE, what keeps packets from
// being lost, and what was lost.
func (x *exam) fabric(a adapter, p verbs.PortInfo, dev string) {
	roce := p.LinkLayer == "Ethernet" && a.Transport == "InfiniBand"
	if roce {
		x.namespaces(a, p)
		x.versions(a, p)
	}
	x.counters(a, p, dev)
	if p.LinkLayer != "Ethernet" || a.soft || dev == "DEV" || p.State != "ACTIVE" {
		return
	}
	x.ethtool(p, dev)
	if roce {
		x.lossless(a, p, dev)
	}
}

// namespaces looks for GIDs whose addresses another network namespace has, or none.
func (x *exam) namespaces(a adapter, p verbs.PortInfo) {
	check := fmt.Sprintf("port %d namespace", p.Number)
	away, names, orphans := []string{}, []string{}, []string{}
	for _, g := range p.GIDs {
		i := strconv.Itoa(g.Index)
		switch {
		case g.Netdev == "":
			orphans = append(orphans, i)
		case !x.exists("sys/class/net/" + g.Netdev):
			away = append(away, i)
			if !slices.Contains(names, g.Netdev) {
				names = append(names, g.Netdev)
			}
		}
	}
	if n := len(away); n > 0 {
		found := fmt.Sprintf("GIDs of another network namespace: %s (%s); nothing here can listen at their addresses, "+
			"and the routes are the other's", strings.Join(away, ", "), strings.Join(names, ", "))
		mode, err := x.read("sys/module/ib_core/parameters/netns_mode")
		if err == nil && mode == "Y" {
			found += "; adapters are shown in every namespace (rdma system: netns shared)"
		}
		level := Note
		if n == len(p.GIDs) {
			level = Warn
		}
		x.add(level, check, found, x.into(a, names[0]))
	}
	if len(orphans) > 0 && (len(away) > 0 || len(orphans) < len(p.GIDs)) {
		x.add(Note, check, fmt.Sprintf("GIDs of no network interface: %s; theirs is gone, and packets to them are not "+
			"answered", strings.Join(orphans, ", ")), fmt.Sprintf("take another: --rdma-device %s/%d/GIDINDEX",
			cmp.Or(word(a.Name), "NAME"), p.Number))
	}
}

// into says how a process comes to be where an interface is.
func (x *exam) into(a adapter, netdev string) string {
	dev, name := cmp.Or(word(netdev), "DEV"), cmp.Or(word(a.Name), "NAME")
	if x.container == "kubernetes" || x.container == "kubepods" {
		return "hostNetwork: true for the pod, or a virtual function of its own (SR-IOV device plugin, and the CNI " +
			"plugins sriov and rdma)"
	}
	if x.container != "" {
		return "run the container with --network=host, or move the adapter into it: rdma system set netns exclusive, " +
			"ip link set " + dev + " netns PID, rdma dev set " + name + " netns NAMESPACE"
	}
	return "run in the namespace that has " + dev + " (ip netns exec NAMESPACE kvd …), or bring it here: " +
		"ip netns exec NAMESPACE ip link set " + dev + " netns 1"
}

// versions tells which RoCE a port speaks.
func (x *exam) versions(a adapter, p verbs.PortInfo) {
	check := fmt.Sprintf("port %d RoCE", p.Number)
	var v1, v2, only1 []string // indexes; only1: addresses that are not link-local and have no v2
	for _, g := range p.GIDs {
		i := strconv.Itoa(g.Index)
		switch g.Type {
		case verbs.GIDRoCEv1:
			v1 = append(v1, i)
			if !g.GID.IsLinkLocalUnicast() && !slices.ContainsFunc(p.GIDs, func(o verbs.GIDInfo) bool {
				return o.GID == g.GID && o.Type == verbs.GIDRoCEv2
			}) {
				only1 = append(only1, i)
			}
		case verbs.GIDRoCEv2:
			v2 = append(v2, i)
		}
	}
	setV2 := fmt.Sprintf("cma_roce_mode -d %s -p %d -m 2", cmp.Or(word(a.Name), "NAME"), p.Number)
	switch {
	case len(only1) > 0 && len(v2) > 0:
		x.add(Warn, check, fmt.Sprintf("GIDs whose address is of version 1 only: %s; routers do not carry them, and a "+
			"peer of version 2 does not hear them", strings.Join(only1, ", ")),
			"take the address away and add it again (ip addr); if that does not help, load the adapter's driver anew")
	case len(v1) > 0 && len(v2) > 0:
		x.add(OK, check, fmt.Sprintf("versions 1 (GIDs %s) and 2 (GIDs %s); kvd takes 2, and both ends need the same",
			strings.Join(v1, ", "), strings.Join(v2, ", ")), "")
	}
	file := path.Join("sys/kernel/config/rdma_cm", a.Name, "ports", strconv.Itoa(p.Number), "default_roce_mode")
	if mode, err := x.read(file); err == nil && mode == "IB/RoCE v1" && len(v2) > 0 {
		x.add(Note, check, "the connection manager's default is version 1, which programs of rdma_cm take", setV2)
	}
}

// total says how much each counter has counted.
func total(cs []rdmacounters.Counter) string {
	var s []string
	for _, c := range cs {
		s = append(s, fmt.Sprintf("%s %d", c.Name, c.Value))
	}
	return strings.Join(s, ", ")
}

// counters reports the port's counters by what they mean.
func (x *exam) counters(a adapter, p verbs.PortInfo, dev string) {
	check := fmt.Sprintf("port %d counters", p.Number)
	root, err := fs.Sub(x.FS, sysAdapters)
	if err != nil {
		x.unknown(check, err)
		return
	}
	cs, err := rdmacounters.ReadPort(root, a.Name, p.Number)
	if err != nil {
		x.unknown(check, err)
	}
	if len(cs) == 0 {
		return
	}
	byKind := map[rdmacounters.Kind][]rdmacounters.Counter{}
	for _, c := range cs {
		if k, ok := rdmacounters.Lookup(c.Name); ok && c.Value > 0 {
			byKind[k] = append(byKind[k], c)
		}
	}
	if len(byKind) == 0 {
		x.add(OK, check, fmt.Sprintf("none of %d has counted a loss or a sign of congestion", len(cs)), "")
	}
	for _, k := range rdmacounters.Kinds {
		if len(byKind[k]) == 0 {
			continue
		}
		why, what := meaning(k, dev)
		level := Note
		switch k {
		case rdmacounters.Damaged, rdmacounters.Ignored:
			level = Warn
		case rdmacounters.Marked:
			level = OK
		}
		x.add(level, check, total(byKind[k])+" since the driver was loaded: "+why, what)
	}
	lost := len(byKind[rdmacounters.OutOfOrder]) + len(byKind[rdmacounters.Timeout])
	marked := len(byKind[rdmacounters.Marked]) + len(byKind[rdmacounters.Slowed])
	if lost > 0 && marked == 0 && p.LinkLayer == "Ethernet" && a.Transport == "InfiniBand" && !a.soft {
		x.add(Note, check, "packets were sent again, and no ECN mark was ever seen: nothing slows senders down before "+
			"a switch drops", "turn ECN on for RoCE's queue on the switches (their manuals say RED or WRED with ECN)")
	}
}

// meaning says what happened when counters of a kind grow, and what to do.
func meaning(k rdmacounters.Kind, dev string) (why, what string) {
	const again = "kvctl doctor --against HOST tells whether it still grows"
	switch k {
	case rdmacounters.OutOfOrder:
		return "packets were lost or overtook each other, and were sent again",
			"RoCE wants PFC or ECN on adapters and switches alike: look at the lines on PFC, and at drops " +
				"on the switch's ports; " + again
	case rdmacounters.Timeout:
		return "an answer was late or lost, and a packet was sent again after a time-out",
			"look for drops on the way " +
				"(ethtool -S " + dev + ", the switch's ports), and for a peer that was stopped; " + again
	case rdmacounters.GivenUp:
		return "connections ended since nobody answered",
			"usual when a peer's process or machine ends; else look " +
				"for a link that goes down (dmesg, the switch's log)"
	case rdmacounters.NotReady:
		return "a receiver had no buffer for a message",
			"kvd's own data path sends none: look at the other programs " +
				"on this adapter (rdma resource show qp)"
	case rdmacounters.Marked:
		return "ECN marks reached this port, so congestion is noticed",
			""
	case rdmacounters.Slowed:
		return "this port was told of congestion and sent more slowly",
			"ECN works; if it grows all the time, several " +
				"senders share one link: look at the peers' and the switch's load"
	case rdmacounters.Ignored:
		return "this port was told of congestion and did not slow down",
			"turn its reaction on: echo 1 > " +
				"/sys/class/net/" + dev + "/ecn/roce_rp/enable/PRIORITY, or the vendor's tool (mlxconfig, niccli)"
	case rdmacounters.Refused:
		return "requests named a key or a range that is not lent",
			"usual when a region is taken back or a client is " +
				"fenced; else a program here uses an old key: rdma resource show qp"
	case rdmacounters.Damaged:
		return "packets came with wrong bits, or broke the protocol",
			"clean or change the cable and the transceiver: " +
				"ethtool -m " + dev + ", mlxlink, ibqueryerrors"
	case rdmacounters.LinkLost:
		return "the link went down, or had to recover",
			"usual at a boot of either side; else change the cable: dmesg " +
				"tells when it was"
	case rdmacounters.Dropped:
		return "packets were dropped at this port, which had no room for them or no way on",
			"look at the lines on " +
				"PFC and pauses, and at PCIe's width and speed (lspci -vv, LnkSta)"
	}
	return "there was something to send, and no credit to send it",
		"usual under load; a slow receiver or a busy " +
			"link is behind it: ibqueryerrors, or the switch's counters, name it"
}

// pauseNames are ethtool's statistics of mlx5_core, ice and i40e, and bnxt_en that tell of pauses and drops.
var pauseNames = []struct {
	name *regexp.Regexp
	kind pauseKind
}{
	{regexp.MustCompile(`^rx_(prio[0-7]_pause|priority_[0-7]_xoff(\.nic)?|pfc_ena_frames_pri[0-7])$`), pfcReceived},
	{regexp.MustCompile(`^tx_(prio[0-7]_pause|priority_[0-7]_xoff(\.nic)?|pfc_ena_frames_pri[0-7])$`), pfcSent},
	{regexp.MustCompile(`^[rt]x_(global_pause|pause_frames|link_xoff(\.nic)?)$`), globalPause},
	{regexp.MustCompile(`^(tx_pause_storm_(warning|error)_events)$`), pauseStorm},
	{regexp.MustCompile(`^(rx_discards_phy|rx_prio[0-7]_(buf_)?discards?|tx_discards_phy|rx_dropped\.nic|` +
		`rx_total_discard_pkts|rx_discard_pkts_cos[0-7])$`), discards},
}

type pauseKind uint8

const (
	pfcReceived pauseKind = iota
	pfcSent
	globalPause
	pauseStorm
	discards
	pauseKinds
)

// ethtool reports what the interface's driver counts of pauses.
func (x *exam) ethtool(p verbs.PortInfo, dev string) {
	stats, err := x.Ethtool(dev)
	if err != nil || len(stats) == 0 {
		return // a driver without statistics is nothing to do about
	}
	var by [pauseKinds][]string
	known := 0
	for _, name := range slices.Sorted(maps.Keys(stats)) {
		for _, p := range pauseNames {
			if p.name.MatchString(name) {
				known++
				if n := stats[name]; n > 0 {
					by[p.kind] = append(by[p.kind], fmt.Sprintf("%s %d", name, n))
				}
			}
		}
	}
	check := fmt.Sprintf("port %d pauses", p.Number)
	if known > 0 && slices.IndexFunc(by[:], func(s []string) bool { return len(s) > 0 }) < 0 {
		x.add(OK, check, fmt.Sprintf("none of %d of %s's statistics has counted a pause or a drop", known, dev), "")
	}
	for k, what := range [pauseKinds][2]string{
		pfcReceived: {"the other end of the cable told this port to stop for a while, so PFC works",
			"if it grows fast, a receiver behind the switch is slow: look there for pauses that are sent"},
		pfcSent: {"this machine could not take packets as fast as they came, and told the switch to stop",
			"look at PCIe's width and speed (lspci -vv, LnkSta), at NUMA, and at what else uses the memory"},
		globalPause: {"the whole link was paused, RoCE with all the rest",
			"PFC for RoCE's priority alone is better: ethtool -A " + dev + " rx off tx off, then dcb pfc set dev " +
				dev + " prio-pfc all:off 3:on"},
		pauseStorm: {"this port paused its switch for so long that the adapter took it for a fault",
			"look for a stuck processor or a stopped virtual machine here, then at PCIe (dmesg)"},
		discards: {"packets were dropped at the port, which had no room for them",
			"if PFC is on, they were of another priority: look at the lines on PFC and trust"},
	} {
		if len(by[k]) > 0 {
			level := Note
			if pauseKind(k) == pauseStorm {
				level = Warn
			}
			x.add(level, check, strings.Join(by[k], ", ")+": "+what[0], what[1])
		}
	}
}

// lossless reports whether the adapter does its part to keep a fabric from losing RoCE's packets.
func (x *exam) lossless(a adapter, p verbs.PortInfo, dev string) {
	port := fmt.Sprintf("port %d ", p.Number)
	if d, err := x.DCB(dev); err == nil {
		x.pfc(port, dev, d)
	}
	name := cmp.Or(word(a.Name), "NAME")
	file := path.Join("sys/kernel/config/rdma_cm", a.Name, "ports", strconv.Itoa(p.Number), "default_roce_tos")
	switch tos, err := x.readInt(file); {
	case errors.Is(err, fs.ErrNotExist): // configfs has it once somebody asked
	case err != nil:
		x.unknown(port+"roce_tos", err)
	case tos == 0:
		x.add(Note, port+"roce_tos", "0: connections of the connection manager are of DSCP 0, as all other traffic is",
			fmt.Sprintf("if switches know RoCE by DSCP 26: cma_roce_tos -d %s -p %d -t 106", name, p.Number))
	default:
		x.add(OK, port+"roce_tos", fmt.Sprintf("%d: connections of the connection manager are of DSCP %d", tos,
			tos>>2&63), "")
	}
	for _, e := range [][2]string{{"roce_np", "marks it receives"}, {"roce_rp", "slowing down when told"}} {
		dir := path.Join("sys/class/net", dev, "ecn", e[0], "enable")
		names, err := x.list(dir)
		if err != nil || len(names) == 0 {
			continue // only some drivers have it
		}
		var off []string
		for _, n := range names {
			if on, err := x.readInt(path.Join(dir, n)); err == nil && on == 0 {
				off = append(off, n)
			}
		}
		check := port + "ECN"
		if len(off) == 0 {
			x.add(OK, check, e[0]+": "+e[1]+" is on for every priority", "")
			continue
		}
		x.add(Note, check, fmt.Sprintf("%s: %s is off for priorities %s", e[0], e[1], strings.Join(off, ", ")),
			"if RoCE is of one of them: echo 1 > /"+path.Join(dir, "PRIORITY"))
	}
}

func (x *exam) pfc(port, dev string, d DCB) {
	const same = ", the same on every adapter and switch port"
	mapped := uint8(1) // a DSCP without a priority is of 0
	for _, prio := range d.DSCP {
		mapped |= 1 << (prio & 7)
	}
	if d.PFC == 0 {
		x.add(Note, port+"PFC", "off: a switch that is full drops RoCE's packets, and the adapter sends them again",
			"unless the fabric relies on ECN alone: dcb pfc set dev "+dev+" prio-pfc 3:on (mlnx_qos -i "+dev+
				" --pfc 0,0,0,1,0,0,0,0)"+same)
	} else {
		x.add(OK, port+"PFC", "on for priorities "+priorities(d.PFC), "")
	}
	trust := "dcb app add dev " + dev + " dscp-prio 26:3 (mlnx_qos -i " + dev + " --trust dscp)" + same
	switch {
	case len(d.DSCP) == 0 && d.PFC&^1 != 0:
		x.add(Warn, port+"trust", "VLAN tags alone: packets without a tag are of priority 0, which PFC is not on for",
			trust)
	case len(d.DSCP) == 0:
		x.add(Note, port+"trust", "VLAN tags alone: packets without a tag are of priority 0", trust)
	case d.PFC != 0 && mapped&d.PFC == 0:
		x.add(Warn, port+"trust", fmt.Sprintf("DSCP, and no DSCP has a priority that PFC is on for (%s)",
			priorities(d.PFC)), trust)
	default:
		x.add(OK, port+"trust", fmt.Sprintf("DSCP: %d have a priority", len(d.DSCP)), "")
	}
}
