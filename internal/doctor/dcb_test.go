package doctor

import (
	"encoding/binary"
	"reflect"
	"testing"

	"github.com/vishvananda/netlink/nl"
)

// answer is a DCB_CMD_IEEE_GET's, as dcbnl_ieee_fill in the kernel writes it.
func answer(pfc []byte, apps ...[]byte) []byte {
	ieee := nl.NewRtAttr(dcbIEEE|int(nl.NLA_F_NESTED), nil)
	ieee.AddRtAttr(dcbIEEEPFC, pfc)
	table := ieee.AddRtAttr(dcbAppTable|int(nl.NLA_F_NESTED), nil)
	for _, a := range apps {
		table.AddRtAttr(dcbApp, a)
	}
	b := append([]byte{0, dcbIEEEGet, 0, 0}, nl.NewRtAttr(dcbIfname, nl.ZeroTerminated("ens1")).Serialize()...)
	return append(b, ieee.Serialize()...)
}

func app(selector, priority byte, protocol uint16) []byte {
	return binary.NativeEndian.AppendUint16([]byte{selector, priority}, protocol)
}

func TestParseDCB(t *testing.T) {
	b := answer([]byte{8, 0b1001, 0, 0}, app(1, 4, 0x8906), app(dcbSelDSCP, 3, 26), app(dcbSelDSCP, 6, 48),
		app(dcbSelDSCP, 8, 1), []byte{5})
	d, err := parseDCB(b)
	if want := (DCB{PFC: 9, DSCP: map[int]uint8{26: 3, 48: 6}}); err != nil || !reflect.DeepEqual(d, want) {
		t.Errorf("%+v, %v; want %+v", d, err, want)
	}
	if s := priorities(d.PFC); s != "0, 3" {
		t.Errorf("priorities %q", s)
	}
	if d, err := parseDCB(b[:dcbHeaderBytes]); err != nil || d.PFC != 0 || d.DSCP != nil {
		t.Errorf("nothing said: %+v, %v", d, err)
	}
	// A cut or wrong answer is an error or less, never a panic.
	for n := range b {
		_, _ = parseDCB(b[:n])
		for _, v := range []byte{0, 1, 0xff} {
			wrong := append([]byte{}, b...)
			wrong[n] = v
			_, _ = parseDCB(wrong)
		}
	}
	if _, err := parseDCB(b[:2]); err == nil {
		t.Error("a header of 2 bytes is read")
	}
}

// The kernel answers: the loopback interface has neither, and no interface has such a name.
func TestAskKernel(t *testing.T) {
	for _, dev := range []string{"lo", "nonesuch0"} {
		if d, err := readDCB(dev); err == nil {
			t.Errorf("DCB of %s: %+v", dev, d)
		}
		if m, err := readEthtool(dev); err == nil && len(m) > 0 {
			t.Errorf("statistics of %s: %v", dev, m)
		}
	}
}
