package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/verbs"
)

const sysAdapters = "sys/class/infiniband"

// adapter is what libibverbs and sysfs tell of one adapter.
type adapter struct {
	verbs.DeviceInfo
	// asked: DeviceInfo is libibverbs's. If not it is sysfs's, which knows neither
	// limits nor atomics, nor the active MTU.
	asked    bool
	soft     bool     // Soft-RoCE
	netdevs  []string // its network interfaces
	subnet   []subnet // parallel to Ports, or shorter
	problems []error  // what sysfs did not tell
}

// unknownState is a port's of which sysfs does not tell.
const unknownState = "in an unknown state"

// subnet is what sysfs alone tells of a port.
type subnet struct {
	phys  string // "LinkUp", "Disabled", "Polling"
	smLID int
}

// adapters finds the adapters and reports on each.
func (x *exam) adapters() {
	x.group = "adapters"
	names, err := x.list(sysAdapters)
	if err != nil {
		x.unknown("found", err)
	}
	for _, n := range names {
		x.devices = append(x.devices, x.fromSysfs(n))
	}
	var infos []verbs.DeviceInfo
	infos, x.listErr = x.Devices()
	for _, d := range infos {
		i := slices.IndexFunc(x.devices, func(a adapter) bool { return a.Name == d.Name })
		if i < 0 {
			i = len(x.devices)
			x.devices = append(x.devices, adapter{})
		}
		a := &x.devices[i]
		if d.Err != nil && len(a.Ports) > 0 {
			a.Err = d.Err // sysfs still has its ports
			continue
		}
		if a.Transport != "" {
			d.Transport = a.Transport // libibverbs calls everything else InfiniBand
		}
		a.DeviceInfo, a.asked = d, d.Err == nil
	}
	x.library()
	if len(x.devices) > 0 {
		x.uverbs()
	}
	if len(x.devices) == 0 && err == nil {
		x.noAdapter()
	}
	for _, a := range x.devices {
		x.group = "adapter " + printable(a.Name)
		x.adapter(a)
	}
}

// infos are the adapters as verbs.Choose takes them.
func (x *exam) infos() (ds []verbs.DeviceInfo) {
	for _, a := range x.devices {
		ds = append(ds, a.DeviceInfo)
	}
	return ds
}

// fromSysfs reads /sys/class/infiniband/NAME.
func (x *exam) fromSysfs(name string) (a adapter) {
	dir := path.Join(sysAdapters, name)
	a.Name = name
	text := func(p string) string {
		s, err := x.read(p)
		if err != nil {
			a.problems = append(a.problems, err)
		}
		return s
	}
	optional := func(p string) string { s, _ := x.read(p); return s }

	_, kind := numbered(text(path.Join(dir, "node_type")))
	switch kind {
	case "CA":
		a.Transport = "InfiniBand"
	case "RNIC":
		a.Transport = "iWARP"
	default:
		a.Transport = kind
	}
	a.Firmware = optional(path.Join(dir, "fw_ver"))
	// Only rxe tells the interface it sits on in this way.
	if p := optional(path.Join(dir, "parent")); p != "" {
		a.soft, a.netdevs = true, []string{p}
	} else if ns, err := x.list(path.Join(dir, "device/net")); err == nil {
		a.netdevs = ns
	}
	ports, err := x.list(path.Join(dir, "ports"))
	if err != nil {
		a.problems = append(a.problems, err)
	}
	for _, n := range ports {
		num, err := strconv.Atoi(n)
		if err != nil || num < 1 || num > 255 {
			a.problems = append(a.problems, fmt.Errorf("/%s has a port %.20q, want a number from 1 to 255", dir, n))
			continue
		}
		pdir := path.Join(dir, "ports", n)
		p := verbs.PortInfo{Number: num, LinkLayer: text(path.Join(pdir, "link_layer")),
			Speed: optional(path.Join(pdir, "rate"))}
		_, p.State = numbered(text(path.Join(pdir, "state")))
		p.State = cmp.Or(p.State, unknownState)
		var sub subnet
		_, sub.phys = numbered(optional(path.Join(pdir, "phys_state")))
		lid := func(file string) int {
			s := optional(path.Join(pdir, file))
			n, err := strconv.ParseUint(s, 0, 32)
			if s != "" && err != nil {
				a.problems = append(a.problems, cannotRead(path.Join(pdir, file), fmt.Errorf("%.40q is not a LID", s)))
			}
			return int(n)
		}
		p.LID, sub.smLID = lid("lid"), lid("sm_lid")
		var bad []error
		p.GIDs, bad = x.gids(pdir, p.LinkLayer)
		a.problems = append(a.problems, bad...)
		a.Ports, a.subnet = append(a.Ports, p), append(a.subnet, sub)
	}
	return a
}

// numbered takes apart "4: ACTIVE".
func numbered(s string) (number, word string) {
	n, w, ok := strings.Cut(s, ":")
	if !ok {
		return "", s
	}
	return n, strings.TrimSpace(w)
}

// gids reads the entries of a port's GID table that are in use.
func (x *exam) gids(pdir, linkLayer string) (gs []verbs.GIDInfo, bad []error) {
	names, err := x.list(path.Join(pdir, "gids"))
	if err != nil {
		return nil, []error{err}
	}
	for _, n := range names {
		file := path.Join(pdir, "gids", n)
		s, err := x.read(file)
		if err != nil {
			// An entry of the table may go while it is read.
			if !errors.Is(err, fs.ErrNotExist) {
				bad = append(bad, err)
			}
			continue
		}
		i, err := strconv.Atoi(n)
		addr, aerr := netip.ParseAddr(s)
		if err != nil || i < 0 || aerr != nil || !addr.Is6() {
			bad = append(bad, cannotRead(file, fmt.Errorf("%.60q is not a GID", s)))
			continue
		}
		if addr.IsUnspecified() {
			continue
		}
		g := verbs.GIDInfo{Index: i, GID: addr}
		t, _ := x.read(path.Join(pdir, "gid_attrs/types", n))
		switch {
		case linkLayer == "InfiniBand":
			g.Type = verbs.GIDInfiniBand
		case t == "RoCE v2":
			g.Type = verbs.GIDRoCEv2
		case t == "IB/RoCE v1":
			g.Type = verbs.GIDRoCEv1
		}
		g.Netdev, _ = x.read(path.Join(pdir, "gid_attrs/ndevs", n))
		gs = append(gs, g)
	}
	return gs, bad
}

// library reports whether libibverbs shows the adapters that the kernel has.
func (x *exam) library() {
	if !x.Built {
		return // said of the binary
	}
	const install = "libibverbs needs the adapter's user-space driver (apt install ibverbs-providers, dnf install " +
		"libibverbs) and its /dev/infiniband/uverbs file"
	if err := x.listErr; err != nil {
		found := strings.TrimPrefix(err.Error(), verbs.ErrUnavailable.Error()+": ")
		if len(x.devices) == 0 {
			x.add(Note, "libibverbs", found, "")
		} else {
			x.add(Warn, "libibverbs", found, install)
		}
		return
	}
	var missing []string
	for _, a := range x.devices {
		if !a.asked && a.Err == nil {
			missing = append(missing, a.Name)
		}
	}
	if len(missing) > 0 {
		x.add(Warn, "libibverbs", "found, but does not show "+strings.Join(missing, ", "), install)
		return
	}
	x.add(OK, "libibverbs", "found", "")
}

// noAdapter says how to come by one.
func (x *exam) noAdapter() {
	if x.container != "" {
		x.add(Note, "found", "no RDMA adapter visible in this container",
			"if the host has one: --device=/dev/infiniband --network=host --ulimit memlock=-1")
		return
	}
	// A NIC's network module loads by itself, its RDMA module not always.
	for _, m := range [][2]string{{"mlx5_core", "mlx5_ib"}, {"mlx4_core", "mlx4_ib"}, {"ice", "irdma"},
		{"bnxt_en", "bnxt_re"},
		{"qede", "qedr"}, {"cxgb4", "iw_cxgb4"}, {"mana", "mana_ib"}} {
		if slices.Contains(x.loaded, m[0]) && !slices.Contains(x.loaded, m[1]) {
			x.add(Note, "found", fmt.Sprintf("no RDMA adapter, but %s is loaded and %s is not", m[0], m[1]),
				"if the network adapter can do RDMA: modprobe "+m[1])
			return
		}
	}
	advice := "Soft-RoCE works for trying things: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev " +
		x.anyNetdev()
	if x.noModules == nil && !slices.Contains(x.available, "rdma_rxe") && !slices.Contains(x.loaded, "rdma_rxe") {
		advice = "Soft-RoCE works for trying things, but this kernel has no rdma_rxe: distributions leave it out of " +
			"their cloud kernels, not of their generic ones"
	}
	found := "no RDMA adapter"
	if x.vm != "" {
		found += "; a virtual machine has those that its host hands through, as a PCI device or SR-IOV function"
	}
	x.add(Note, "found", found, advice)
}

// anyNetdev names an interface to put Soft-RoCE on: one that is up, if possible.
func (x *exam) anyNetdev() string {
	names, _ := x.list("sys/class/net")
	for _, n := range names {
		state, _ := x.read(path.Join("sys/class/net", n, "operstate"))
		kind, _ := x.read(path.Join("sys/class/net", n, "type"))
		if state == "up" && kind == "1" && word(n) != "" {
			return n
		}
	}
	return "eth0"
}

// word is s if it can stand in a command as it is, else empty.
func word(s string) string {
	if strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.:@-") != "" {
		return ""
	}
	return s
}

func (x *exam) adapter(a adapter) {
	what := a.Transport
	if what == "" {
		what = "unknown transport"
	}
	if a.soft {
		what += " (Soft-RoCE)"
	}
	if a.Firmware != "" && a.Firmware != "0.0.0" {
		what += ", firmware " + a.Firmware
	}
	switch {
	case a.Err != nil:
		x.add(Warn, "device", fmt.Sprintf("%s; cannot be opened: %v", what, a.Err), "")
	case a.Transport == "iWARP":
		x.add(Note, "device", what+": its connections are made by the RDMA connection manager, and an agent of the "+
			"memory node executes atomics", "librdmacm1 is needed, and modprobe rdma_ucm")
	case a.Transport != "InfiniBand":
		x.add(Warn, "device", what+": kvd needs reliable connections (RC) of InfiniBand or RoCE", "use tcp")
	case a.soft:
		x.add(Note, "device", what+": the kernel's software sends the packets",
			"for trying things and for tests, not for speed: expect tens of µs where an adapter takes 2")
	default:
		x.add(OK, "device", what, "")
	}
	for _, err := range a.problems {
		x.unknown("sysfs", err)
	}
	if len(a.Ports) == 0 && a.Err == nil {
		x.add(Warn, "ports", "none", "")
	}
	for i, p := range a.Ports {
		var sub subnet
		if i < len(a.subnet) {
			sub = a.subnet[i]
		}
		x.port(a, p, sub)
	}
	x.abilities(a)
	x.numa(a)
	x.cgroup(a.Name)
}

func (x *exam) port(a adapter, p verbs.PortInfo, sub subnet) {
	check := fmt.Sprintf("port %d", p.Number)
	roce := p.LinkLayer == "Ethernet"
	dev := netdevOf(a, p)
	var parts []string
	for _, s := range []string{p.LinkLayer, p.State, p.Speed} {
		if s != "" {
			parts = append(parts, s)
		}
	}
	found := strings.Join(parts, ", ")
	if !roce {
		found += fmt.Sprintf(", LID %d", p.LID)
		if sub.smLID != 0 {
			found += fmt.Sprintf(", subnet manager at LID %d", sub.smLID)
		}
	}
	if sub.phys != "" && sub.phys != "LinkUp" {
		found += ", link " + sub.phys
	}
	bad := Warn
	if x.otherActive(a.Name, p.Number) {
		bad = Note // a second port without a cable is usual
	}
	const manager = "systemctl start opensm on one host of the fabric, or turn on the switch's subnet manager"
	switch {
	case p.State == "ACTIVE" && !roce && (p.LID == 0 || p.LID >= 0xc000): // 0xc000: multicast
		x.add(bad, check, found+": no subnet manager has given it a LID", manager)
	case p.State == "ACTIVE":
		x.add(OK, check, found, "")
	case p.State == unknownState:
		// Why is among the adapter's problems.
	case roce && (sub.phys == "" || sub.phys == "Disabled"):
		x.add(bad, check, found, "ip link set "+dev+" up")
	case roce:
		x.add(bad, check, found, fmt.Sprintf("ip link set %s up; if it is up, look at the cable and the switch's "+
			"port: ethtool %s", dev, dev))
	case p.State == "INIT":
		x.add(bad, check, found+": the link is up, and no subnet manager has configured the port", manager)
	case p.State == "ARMED":
		x.add(bad, check, found+": the subnet manager has not activated the port yet",
			"wait; if it stays so, restart the subnet manager (opensm)")
	default:
		x.add(bad, check, found, "plug in the cable; look at the port with ibstat "+cmp.Or(word(a.Name), "DEVICE"))
	}
	x.mtu(a, p, dev)
	x.gidTable(a, p, dev)
	x.fabric(a, p, dev)
}

// otherActive tells whether a port other than the named one is ACTIVE.
func (x *exam) otherActive(name string, port int) bool {
	for _, a := range x.devices {
		for _, p := range a.Ports {
			if (a.Name != name || p.Number != port) && p.State == "ACTIVE" {
				return true
			}
		}
	}
	return false
}

// netdevOf names a port's network interface, or says DEV.
func netdevOf(a adapter, p verbs.PortInfo) string {
	dev := ""
	for _, g := range p.GIDs {
		dev = cmp.Or(dev, g.Netdev)
	}
	if dev == "" && len(a.netdevs) == 1 {
		dev = a.netdevs[0]
	}
	return cmp.Or(word(dev), "DEV")
}

// roceMTU is the path MTU, bytes, that fits an interface's (iboe_get_mtu in the
// kernel's ib_addr.h): what is left below the headers, rounded down.
func roceMTU(netdev int64) int {
	const headers = 40 + 8 + 12 + 4 + 28 + 4 // GRH, UDP, BTH, XRCETH, AtomicETH, ICRC
	for m := 4096; m >= 256; m /= 2 {
		if netdev >= int64(m)+headers {
			return m
		}
	}
	return 0
}

func (x *exam) mtu(a adapter, p verbs.PortInfo, dev string) {
	check := fmt.Sprintf("port %d MTU", p.Number)
	if p.LinkLayer != "Ethernet" {
		if p.MTU > 0 {
			x.add(OK, check, fmt.Sprintf("%d, at most %d", p.MTU, p.MaxMTU), "")
		}
		return
	}
	if a.Transport == "iWARP" || dev == "DEV" {
		return
	}
	n, err := x.readInt(path.Join("sys/class/net", dev, "mtu"))
	found, active := fmt.Sprintf("%d; %s has %d", p.MTU, dev, n), p.MTU
	switch {
	case errors.Is(err, fs.ErrNotExist):
		found = fmt.Sprintf("%d; %s is in another network namespace", p.MTU, dev)
		if p.MTU == 0 {
			return
		}
	case err != nil:
		x.unknown(check, err)
		return
	case active == 0: // sysfs does not tell
		active = roceMTU(n)
		found = fmt.Sprintf("%d, from %s's %d", active, dev, n)
	}
	switch {
	case active >= 4096:
		x.add(OK, check, found, "")
	case active == p.MaxMTU:
		x.add(OK, check, found+"; the adapter can do no more", "")
	case active >= 1024:
		x.add(Note, check, found, moreMTU(dev))
	default:
		x.add(Warn, check, found, moreMTU(dev))
	}
}

func moreMTU(dev string) string {
	return fmt.Sprintf("4096 needs 4200 or more: ip link set %s mtu 9000, on both sides, with a switch that carries it",
		dev)
}

func (x *exam) gidTable(a adapter, p verbs.PortInfo, dev string) {
	switch {
	case a.Transport == "iWARP":
		return // they are MAC addresses
	case p.State != "ACTIVE" && len(p.GIDs) == 0:
		return // the link comes first
	}
	const most = 8
	check := fmt.Sprintf("port %d GIDs", p.Number)
	var shown []string
	var v4, routable, v2 bool
	for i, g := range p.GIDs {
		r := !g.GID.IsLinkLocalUnicast() && g.Type == verbs.GIDRoCEv2
		routable = routable || r
		v4 = v4 || r && g.GID.Is4In6()
		v2 = v2 || g.Type == verbs.GIDRoCEv2
		if i < most {
			s := fmt.Sprintf("%d: %v %v", g.Index, g.GID.Unmap(), g.Type)
			if g.GID.IsLinkLocalUnicast() && g.Type != verbs.GIDInfiniBand {
				s += " link-local"
			}
			if g.Netdev != "" {
				s += " " + g.Netdev
			}
			shown = append(shown, s)
		}
	}
	if n := len(p.GIDs) - most; n > 0 {
		shown = append(shown, fmt.Sprintf("and %d more", n))
	}
	found := strings.Join(shown, "; ")
	if found == "" {
		found = "none"
	}
	address := "ip addr add 10.0.0.1/24 dev " + dev + ", with an address of your network"
	if x.container != "" && dev != "DEV" && !x.exists("sys/class/net/"+dev) {
		address = "run the container with --network=host: " + dev + " is not in its network"
	}
	switch {
	case p.LinkLayer == "InfiniBand" && len(p.GIDs) > 0, v4:
		x.add(OK, check, found, "")
	case p.LinkLayer == "InfiniBand":
		x.add(Warn, check, found, "")
	case routable:
		x.add(Note, check, found+"; no IPv4 one", "IPv6 works; for IPv4: "+address)
	case len(p.GIDs) > 0 && !v2:
		x.add(Warn, check, found+"; no RoCE v2 one", "assign an address ("+address+
			"); an adapter that knows RoCE v1 only stays within one network segment")
	case p.State != "ACTIVE":
		x.add(Note, check, found, "then "+address)
	default:
		x.add(Warn, check, found+"; only this link can reach it", address)
	}
}

// abilities reports what only libibverbs tells.
func (x *exam) abilities(a adapter) {
	if a.Err != nil || a.Transport != "InfiniBand" {
		return
	}
	if !a.asked {
		if !x.Built {
			x.add(Note, "atomics", "not known: only libibverbs tells", "run a kvctl that was made by make build-verbs")
		}
		return
	}
	switch a.Atomics {
	case driver.AtomicHCA:
		x.add(Note, "atomics", "scope hca: atomic among verbs through this adapter, not with a CPU's",
			"a memory node that serves verbs here refuses shm, and has the adapter execute tcp's CAS; with "+
				"--rdma-atomics agent a CPU executes every CAS instead")
	case driver.AtomicCPU:
		x.add(OK, "atomics",
			"scope glob: atomic with a CPU's as well; a memory node can serve shm and tcp beside verbs", "")
	default:
		x.add(Note, "atomics", "none: a memory node here executes every CAS by an agent, on a CPU; READ and WRITE "+
			"need none", "")
	}
	x.add(OK, "memory windows", a.MemoryWindows, "")
	depth := fmt.Sprintf("%d READs and atomics under way on one connection as target, %d as initiator", a.MaxQPRdAtom,
		a.MaxInitRdAtom)
	if a.MaxQPRdAtom < 4 || a.MaxInitRdAtom < 4 {
		x.add(Note, "max_qp_rd_atom", depth, "more lanes help: each has a connection of its own")
	} else {
		x.add(OK, "max_qp_rd_atom", depth, "")
	}
}

func (x *exam) numa(a adapter) {
	file := path.Join(sysAdapters, a.Name, "device/numa_node")
	n, err := x.readInt(file)
	if errors.Is(err, fs.ErrNotExist) {
		return // rxe, siw
	}
	if err != nil {
		x.unknown("NUMA node", err)
		return
	}
	nodes, _ := x.read("sys/devices/system/node/online")
	switch {
	case n < 0:
		x.add(OK, "NUMA node", "not told by the firmware, or the machine has only one", "")
	case nodes == "" || nodes == "0":
		x.add(OK, "NUMA node", fmt.Sprintf("%d, the only one", n), "")
	default:
		found := fmt.Sprintf("%d of %s", n, nodes)
		if cpus, err := x.read(fmt.Sprintf("sys/devices/system/node/node%d/cpulist", n)); err == nil {
			found += ", CPUs " + cpus
		}
		x.add(Note, "NUMA node", found, fmt.Sprintf("keep processes near it: numactl --cpunodebind=%d --preferred=%d "+
			"kvd memnode …", n, n))
	}
}

// cgroup reports what rdma.max (cgroup-v2.rst, "RDMA") leaves of an adapter to this
// process: the lowest limit on the way to the root.
func (x *exam) cgroup(name string) {
	text, err := x.read("proc/self/cgroup")
	if err != nil {
		return // without cgroups nothing is limited
	}
	for line := range strings.Lines(text) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		var base string
		switch {
		case f[0] == "0" && f[1] == "":
			base = "sys/fs/cgroup"
		case slices.Contains(strings.Split(f[1], ","), "rdma"):
			base = "sys/fs/cgroup/rdma"
		default:
			continue
		}
		// Clean keeps "/../x", of a process outside its cgroup namespace, below base.
		for dir := path.Clean("/" + f[2]); ; dir = path.Dir(dir) {
			file := path.Join(base, dir, "rdma.max")
			if s, err := x.read(file); err == nil {
				x.rdmaMax(name, file, s)
			} else if !errors.Is(err, fs.ErrNotExist) {
				x.unknown("cgroup", err)
			}
			if dir == "/" {
				break
			}
		}
	}
}

func (x *exam) rdmaMax(name, file, text string) {
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != name {
			continue
		}
		for _, limit := range f[1:] {
			if _, v, _ := strings.Cut(limit, "="); v != "max" {
				x.add(Warn, "cgroup", fmt.Sprintf("/%s limits %s", file, limit),
					fmt.Sprintf("every process takes one hca_handle, every connection, queue and region a "+
						"hca_object: write '%s hca_handle=max hca_object=max' there", cmp.Or(word(name), "DEVICE")))
			}
		}
	}
}

// uverbs looks at the files through which a process talks to adapters.
func (x *exam) uverbs() {
	const dir = "dev/infiniband"
	names, err := x.list(dir)
	if err != nil {
		x.unknown("uverbs", err)
		return
	}
	var open, refused []string
	for _, n := range names {
		if !strings.HasPrefix(n, "uverbs") {
			continue
		}
		file := "/" + path.Join(dir, n)
		if dev, err := x.read(path.Join("sys/class/infiniband_verbs", n, "ibdev")); err == nil {
			n += " of " + dev
		}
		if err := x.Access(file); err != nil {
			refused = append(refused, fmt.Sprintf("%s: %v", n, err))
		} else {
			open = append(open, n)
		}
	}
	switch {
	case len(refused) > 0:
		x.add(Warn, "uverbs", "this user may not use "+strings.Join(refused, ", "),
			"rdma-core's udev rules open them to everyone: install rdma-core, then udevadm trigger; or chmod 0666 "+
				"/dev/infiniband/uverbs*")
	case len(open) > 0:
		x.add(OK, "uverbs", strings.Join(open, ", "), "")
	case x.container != "":
		x.add(Warn, "uverbs", "no /dev/infiniband/uverbs file in this container",
			"start it with --device=/dev/infiniband --network=host --ulimit memlock=-1")
	case !slices.Contains(x.loaded, "ib_uverbs"):
		x.add(Warn, "uverbs", "no /dev/infiniband/uverbs file, and ib_uverbs is not loaded", "modprobe ib_uverbs")
	default:
		x.add(Warn, "uverbs", "no /dev/infiniband/uverbs file",
			"is udev running? in a systemd unit, PrivateDevices=yes hides them")
	}
}

// verbsUsable tells whether a kvd process can use verbs, with what, or why not.
func (x *exam) verbsUsable() (found, advice string, ok bool) {
	c, err := x.Choose(x.infos())
	if err != nil {
		return err.Error(), "", false
	}
	a := x.devices[c.Device]
	found = fmt.Sprintf("%s/%d", a.Name, a.Ports[c.Port].Number)
	if c.GID >= 0 {
		found += fmt.Sprintf("/%d", c.GID)
	}
	found += fmt.Sprintf(" (%s: %s)", c.Addr, c.Reason)
	switch {
	case !x.Built:
		return "would use " + found + ", but this binary was built without verbs",
			"run the kvd and kvctl that make build-verbs makes", false
	case x.listErr != nil:
		return "would use " + found + ", but libibverbs does not work", "", false
	case !a.asked:
		return "would use " + found + ", but libibverbs does not show it", "", false
	}
	return found, "to use another: --rdma-device NAME/PORT/GIDINDEX", true
}
