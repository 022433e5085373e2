package verbs

import (
	"bytes"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// sysfsRoot is where the kernel shows adapters.
func sysfsRoot() fs.FS { return os.DirFS("/sys/class/infiniband") }

// Present names the adapters that this machine's kernel shows, also where this process cannot use them.
func Present() (names []string) {
	all, err := fs.ReadDir(sysfsRoot(), ".")
	if err != nil {
		return nil // no RDMA in this kernel
	}
	for _, f := range all {
		names = append(names, f.Name())
	}
	return names
}

// ipoibAddr is an address of a network interface on an InfiniBand port, which is how the RDMA connection manager knows
// the port; invalid if it has none. root is like /sys/class/infiniband.
func ipoibAddr(root fs.FS, device string, port int) netip.Addr {
	dir := path.Join(device, "device", "net")
	files, err := fs.ReadDir(root, dir)
	if err != nil {
		return netip.Addr{}
	}
	for _, f := range files {
		b, err := fs.ReadFile(root, path.Join(dir, f.Name(), "dev_port"))
		if err != nil || strings.TrimSpace(string(b)) != strconv.Itoa(port-1) {
			continue
		}
		in, err := net.InterfaceByName(f.Name())
		if err != nil {
			continue
		}
		if a := routable(in); len(a) > 0 {
			return a[0]
		}
	}
	return netip.Addr{}
}

// iwarpAddrs lists the addresses of the network interfaces of an iWARP port. Its GID begins with their hardware
// address, as the kernel's connection manager has it, too.
func iwarpAddrs(gids []GIDInfo, all []net.Interface) (addrs []netip.Addr) {
	for _, g := range gids {
		b := g.GID.As16()
		for _, in := range all {
			if len(in.HardwareAddr) == 6 && bytes.Equal(in.HardwareAddr, b[:6]) {
				addrs = append(addrs, routable(&in)...)
			}
		}
	}
	return addrs
}

// routable lists an interface's addresses but the link-local ones.
func routable(in *net.Interface) (addrs []netip.Addr) {
	all, err := in.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLinkLocalUnicast() {
			addrs = append(addrs, p.Addr().Unmap())
		}
	}
	return addrs
}

// readGIDs lists the entries in use of a port's GID table, from root, which is
// like /sys/class/infiniband. Entries that cannot be read are left out.
func readGIDs(root fs.FS, device string, port int) (gids []GIDInfo) {
	dir := path.Join(device, "ports", strconv.Itoa(port))
	files, err := fs.ReadDir(root, path.Join(dir, "gids"))
	if err != nil {
		return nil
	}
	text := func(name string) string {
		b, err := fs.ReadFile(root, path.Join(dir, name))
		if err != nil {
			return "" // an entry that is not in use has no type
		}
		return strings.TrimSpace(string(b))
	}
	for _, f := range files {
		i, err := strconv.Atoi(f.Name())
		if err != nil || i < 0 {
			continue
		}
		a, err := netip.ParseAddr(text(path.Join("gids", f.Name())))
		if err != nil || a.IsUnspecified() {
			continue
		}
		g := GIDInfo{Index: i, GID: netip.AddrFrom16(a.As16()), Netdev: text(path.Join("gid_attrs", "ndevs", f.Name()))}
		switch t := text(path.Join("gid_attrs", "types", f.Name())); t {
		case "RoCE v2":
			g.Type = GIDRoCEv2
		case "IB/RoCE v1":
			g.Type = GIDRoCEv1
			if text("link_layer") == "InfiniBand" {
				g.Type = GIDInfiniBand
			}
		default:
			continue
		}
		gids = append(gids, g)
	}
	slices.SortFunc(gids, func(a, b GIDInfo) int { return a.Index - b.Index })
	return gids
}
