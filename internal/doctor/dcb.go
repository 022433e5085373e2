package doctor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// DCB is what an interface's driver tells of data center bridging (IEEE 802.1Qaz).
type DCB struct {
	PFC  uint8         // a bit for each priority that PFC is on for
	DSCP map[int]uint8 // the priority of each DSCP that has one; empty: the adapter trusts VLAN tags alone
}

// Of linux/dcbnl.h.
const (
	dcbIEEEGet     = 21 // DCB_CMD_IEEE_GET
	dcbIfname      = 1  // DCB_ATTR_IFNAME
	dcbIEEE        = 13 // DCB_ATTR_IEEE
	dcbIEEEPFC     = 2  // DCB_ATTR_IEEE_PFC
	dcbAppTable    = 3  // DCB_ATTR_IEEE_APP_TABLE
	dcbApp         = 1  // DCB_ATTR_IEEE_APP
	dcbSelDSCP     = 5  // IEEE_8021QAZ_APP_SEL_DSCP
	dcbHeaderBytes = 4  // struct dcbmsg
)

// header is a struct dcbmsg.
type header [dcbHeaderBytes]byte

func (h header) Len() int          { return len(h) }
func (h header) Serialize() []byte { return h[:] }

// readDCB asks the kernel (rtnetlink's RTM_GETDCB). An error says that nothing is known, most often since the driver
// has no such thing.
func readDCB(dev string) (DCB, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETDCB, 0)
	req.AddData(header{unix.AF_UNSPEC, dcbIEEEGet})
	req.AddData(nl.NewRtAttr(dcbIfname, nl.ZeroTerminated(dev)))
	answers, err := req.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return DCB{}, fmt.Errorf("DCB of %s: %w", dev, err)
	}
	if len(answers) != 1 {
		return DCB{}, fmt.Errorf("DCB of %s: %d answers, want 1", dev, len(answers))
	}
	return parseDCB(answers[0])
}

// parseDCB reads a DCB_CMD_IEEE_GET's answer, without its netlink header.
func parseDCB(b []byte) (d DCB, err error) {
	if len(b) < dcbHeaderBytes {
		return d, errors.New("DCB: a short answer")
	}
	ieee, err := attribute(b[dcbHeaderBytes:], dcbIEEE)
	if err != nil {
		return d, err
	}
	pfc, err := attribute(ieee, dcbIEEEPFC)
	if err != nil {
		return d, err
	}
	if len(pfc) >= 2 { // struct ieee_pfc: pfc_cap, pfc_en, ...
		d.PFC = pfc[1]
	}
	table, err := attribute(ieee, dcbAppTable)
	if err != nil {
		return d, err
	}
	return d, attributes(table, func(kind uint16, v []byte) {
		// struct dcb_app: selector, priority, protocol
		if kind == dcbApp && len(v) >= 4 && v[0] == dcbSelDSCP && v[1] < 8 {
			if d.DSCP == nil {
				d.DSCP = map[int]uint8{}
			}
			d.DSCP[int(binary.NativeEndian.Uint16(v[2:]))&63] = v[1]
		}
	})
}

// attribute is the value of the last one of a type, or nil.
func attribute(b []byte, kind uint16) (value []byte, err error) {
	return value, attributes(b, func(k uint16, v []byte) {
		if k == kind {
			value = v
		}
	})
}

// attributes calls f for each (struct nlattr: length, type, value, padding). nl.ParseRouteAttr panics if one is cut.
func attributes(b []byte, f func(kind uint16, value []byte)) error {
	const header = unix.SizeofNlAttr
	for len(b) > 0 {
		n := header
		if len(b) >= header {
			n = int(binary.NativeEndian.Uint16(b))
		}
		if n < header || n > len(b) {
			return fmt.Errorf("DCB: an attribute of %d bytes, where %d are left", n, len(b))
		}
		f(binary.NativeEndian.Uint16(b[2:])&nl.NLA_TYPE_MASK, b[header:n])
		b = b[min((n+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(b)):]
	}
	return nil
}

// readEthtool asks an interface's driver for its statistics (ethtool -S).
func readEthtool(dev string) (map[string]uint64, error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return nil, fmt.Errorf("ethtool: %w", err)
	}
	defer e.Close()
	m, err := e.Stats(dev)
	if err != nil {
		return nil, fmt.Errorf("ethtool: statistics of %s: %w", dev, err)
	}
	return m, nil
}

// priorities names the bits that are set.
func priorities(set uint8) string {
	var s []string
	for set != 0 {
		i := bits.TrailingZeros8(set)
		s, set = append(s, strconv.Itoa(i)), set&(set-1)
	}
	return strings.Join(s, ", ")
}
