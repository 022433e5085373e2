package verbs

import (
	"errors"
	"fmt"
	"net/netip"
)

// Fabric are parameters of connections that a network may ask for, with the names of ibv_modify_qp(3). The zero value
// is the defaults. Each side says them for the packets that it sends.
type Fabric struct {
	// TrafficClass is the GRH's, and over RoCE v2 the whole byte in the IP header: a DSCP times 4. 0 to 255, default 0.
	TrafficClass int
	// ServiceLevel is the SL of InfiniBand. RoCE adapters take it for the priority if they do not trust the DSCP. 0
	// to 15, default 0.
	ServiceLevel int
	// PKeyIndex is the partition's place in the port's P_Key table. Both sides have to be in one partition. Default 0.
	PKeyIndex int
	// GIDType is "RoCE v2", "RoCE v1" or "IB": no other GID is chosen. Default any.
	GIDType string
	// GIDAddress is an address or a prefix ("10.1.0.0/16"): no GID elsewhere is chosen. Default any.
	GIDAddress string
	// RetryCount is how often a packet is sent again that nobody acknowledges. 1 to 6, as 7 means for ever to some
	// adapters. Default 6. Options.PeerTimeout is for all tries together.
	RetryCount int
	// RNRRetry is how often a packet is sent again that finds no receive posted, which agents' atomics alone may. 1 to
	// 6; 7 means for ever. Default 6.
	RNRRetry int
	// HopLimit is the GRH's, over InfiniBand: how many routers packets pass at most. 1 to 255, default 64. Over RoCE,
	// Linux puts the route's in its place.
	HopLimit int
	// FlowLabel is the GRH's, from which adapters may make the UDP source port. Up to 1048575; 0 is one at random for
	// each connection, so that they spread over paths.
	FlowLabel int
}

func (f *Fabric) validate() error {
	var errs []error
	for _, x := range []struct {
		name             string
		v, least, most   int
		orDefault, hints string
	}{
		{"TrafficClass", f.TrafficClass, 0, 255, "", " (a DSCP times 4)"},
		{"ServiceLevel", f.ServiceLevel, 0, 15, "", ""},
		{"PKeyIndex", f.PKeyIndex, 0, 65535, "", ""},
		{"RetryCount", f.RetryCount, 0, 6, ", 0 being the default", "; 7 would mean for ever to some adapters"},
		{"RNRRetry", f.RNRRetry, 0, 6, ", 0 being the default", "; 7 would mean for ever"},
		{"HopLimit", f.HopLimit, 0, 255, ", 0 being the default", ""},
		{"FlowLabel", f.FlowLabel, 0, 1<<20 - 1, ", 0 being one at random", ""},
	} {
		if x.v < x.least || x.v > x.most {
			errs = append(errs, fmt.Errorf("%s is %d, want %d to %d%s%s", x.name, x.v, x.least, x.most, x.orDefault,
				x.hints))
		}
	}
	if f.GIDType != "" && f.GIDType != GIDRoCEv2.String() && f.GIDType != GIDRoCEv1.String() &&
		f.GIDType != GIDInfiniBand.String() {
		errs = append(errs, fmt.Errorf("GIDType is %q, want %v, %v or %v", f.GIDType, GIDRoCEv2, GIDRoCEv1,
			GIDInfiniBand))
	}
	if _, err := f.prefix(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// prefix is GIDAddress; not valid if that is empty.
func (f *Fabric) prefix() (netip.Prefix, error) {
	if f.GIDAddress == "" {
		return netip.Prefix{}, nil
	}
	if p, err := netip.ParsePrefix(f.GIDAddress); err == nil {
		return p, nil
	}
	a, err := netip.ParseAddr(f.GIDAddress)
	if err != nil || a.Zone() != "" {
		return netip.Prefix{}, fmt.Errorf("GIDAddress is %q, want an address or a prefix, such as 10.1.0.0/16",
			f.GIDAddress)
	}
	a = a.Unmap()
	return netip.PrefixFrom(a, a.BitLen()), nil
}

// takes says whether g may be chosen.
func (f *Fabric) takes(g GIDInfo) bool {
	p, err := f.prefix()
	return err == nil && (f.GIDType == "" || g.Type.String() == f.GIDType) &&
		(!p.IsValid() || p.Contains(g.GID.Unmap()))
}

// wanted is for errors: which GIDs takes takes.
func (f *Fabric) wanted() string {
	s := ""
	if f.GIDType != "" {
		s += " of type " + f.GIDType
	}
	if f.GIDAddress != "" {
		s += " within " + f.GIDAddress
	}
	return s
}
