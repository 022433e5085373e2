package verbs

import (
	"io/fs"
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
