package verbs

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Choice is the adapter, port and GID that a device uses, and why.
type Choice struct {
	Device, Port int // index into the devices and into their ports
	GID          int // index of the adapter's GID table; -1 on InfiniBand
	Addr         netip.Addr
	// Reason is for the log.
	Reason string
}

// Choose picks what o leaves open. An active port comes before all else, then the address that the user wants
// to be near. RoCE v2 with an IPv4 address, InfiniBand, RoCE v2 with another routable address, iWARP and RoCE v1
// follow in this order. Link-local addresses come last: nobody beyond the link can reach them, or with
// several links nobody at all.
func Choose(devices []DeviceInfo, o *Options) (Choice, error) {
	sel, err := parseSelector(o.Device)
	if err != nil {
		return Choice{}, err
	}
	var near netip.Addr
	if sel.name == "" && o.Near != "" {
		near, _ = netip.ParseAddr(o.Near)
		near = near.Unmap()
	}
	type candidate struct {
		Choice
		rank int
	}
	var all []candidate
	var against []string
	reject := func(format string, a ...any) { against = append(against, fmt.Sprintf(format, a...)) }
	for di, d := range devices {
		if sel.name != "" && d.Name != sel.name {
			continue
		}
		if d.Err != nil {
			reject("%s: %v", d.Name, d.Err)
			continue
		}
		iwarp := d.Transport == "iWARP"
		if iwarp && o.Connect == ConnectTCP {
			reject("%s is an iWARP adapter, whose connections only the RDMA connection manager can make (connect is "+
				"tcp)", d.Name)
			continue
		}
		for pi, p := range d.Ports {
			if sel.port != 0 && p.Number != sel.port {
				continue
			}
			if p.State != "ACTIVE" {
				reject("%s port %d is %s", d.Name, p.Number, p.State)
				continue
			}
			at := placesOf(p, iwarp)
			if len(at) == 0 && iwarp {
				reject("%s port %d: its network interface has no address", d.Name, p.Number)
			} else if len(at) == 0 {
				reject("%s port %d has no GID: give its network interface an address", d.Name, p.Number)
			} else if !slices.ContainsFunc(p.GIDs, o.Fabric.takes) {
				reject("%s port %d has no GID%s", d.Name, p.Number, o.Fabric.wanted())
			}
			for _, g := range at {
				if sel.gid >= 0 && g.Index != sel.gid {
					continue
				}
				if !o.Fabric.takes(g) {
					if sel.gid >= 0 {
						reject("GID index %d of %s port %d is not%s", g.Index, d.Name, p.Number, o.Fabric.wanted())
					}
					continue
				}
				c := candidate{Choice: Choice{Device: di, Port: pi, GID: g.Index, Addr: g.GID.Unmap()}}
				var why []string
				switch {
				case sel.name != "":
					why = append(why, "asked for")
				case near.IsValid() && c.Addr == near:
					c.rank += 100
					why = append(why, "it has the address "+near.String())
				}
				r, what := rankGID(p, g)
				if iwarp {
					r, what = 30, "iWARP"
				}
				c.rank += r
				c.Reason = strings.Join(append(why, what), ", ")
				all = append(all, c)
			}
		}
	}
	if len(all) == 0 {
		switch {
		case sel.name != "" && len(against) == 0:
			return Choice{}, fmt.Errorf("no adapter %q; there are: %s", o.Device,
				cmp.Or(strings.Join(names(devices), ", "), "none"))
		case len(against) == 0:
			return Choice{}, errors.New("no RDMA adapter")
		}
		return Choice{}, fmt.Errorf("no usable port: %s", strings.Join(against, "; "))
	}
	best := slices.MaxFunc(all, func(a, b candidate) int {
		return cmp.Or(a.rank-b.rank, b.Device-a.Device, b.Port-a.Port, b.GID-a.GID)
	})
	if n := len(all) - 1; n > 0 && sel.gid < 0 {
		best.Reason += fmt.Sprintf(", first of %d", n+1)
	}
	return best.Choice, nil
}

// placesOf are where a port can be reached: its GIDs, or an iWARP port's addresses.
func placesOf(p PortInfo, iwarp bool) (at []GIDInfo) {
	if !iwarp {
		return p.GIDs
	}
	for _, a := range p.Addrs {
		at = append(at, GIDInfo{GID: netip.AddrFrom16(a.As16())})
	}
	return at
}

func rankGID(p PortInfo, g GIDInfo) (rank int, what string) {
	a := g.GID
	local := a.IsLinkLocalUnicast()
	switch {
	case g.Type == GIDRoCEv2 && a.Is4In6():
		return 50, "RoCE v2 over IPv4"
	case g.Type == GIDRoCEv2 && !local:
		return 40, "RoCE v2 over IPv6"
	case p.LinkLayer == "InfiniBand":
		return 45, "InfiniBand"
	case g.Type == GIDRoCEv1 && !local:
		return 20, "RoCE v1: not routable"
	case g.Type == GIDRoCEv2:
		return 10, "RoCE v2 with a link-local address: reaches this link only"
	}
	return 5, "RoCE v1 with a link-local address: reaches this link only"
}

func names(devices []DeviceInfo) (ns []string) {
	for _, d := range devices {
		ns = append(ns, d.Name)
	}
	return ns
}
