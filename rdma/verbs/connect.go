package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// Connect says how the two queue pairs of a connection learn of each other. The control channel is a TCP connection
// in any case. The zero value is ConnectAuto.
type Connect uint8

const (
	// ConnectAuto: over the control channel, unless one side's adapter (iWARP) or setting needs the manager.
	ConnectAuto Connect = iota
	// ConnectTCP: over the control channel only.
	ConnectTCP
	// ConnectCM: by the RDMA connection manager only (rdma_cm(7)), which needs librdmacm and an IP address of the
	// adapter's.
	ConnectCM
)

func (c Connect) String() string {
	return [...]string{"auto", "tcp", "cm", "invalid"}[min(int(c), 3)]
}

// ParseConnect reads what String gives; "" is auto.
func ParseConnect(s string) (Connect, error) {
	switch s {
	case "", "auto":
		return ConnectAuto, nil
	case "tcp":
		return ConnectTCP, nil
	case "cm":
		return ConnectCM, nil
	}
	return 0, fmt.Errorf("%q: want auto, tcp or cm", s)
}

// ways is a set of ways to connect queue pairs. Older peers say 0, and know wayTCP.
type ways uint8

const (
	wayTCP ways = 1 << iota
	wayCM
)

// ways are those that one side can go.
func (c Connect) ways(iwarp bool) ways {
	switch {
	case iwarp || c == ConnectCM:
		return wayCM
	case c == ConnectTCP:
		return wayTCP
	}
	return wayTCP | wayCM
}

// choose is the way that both sides can go, of two the one without the manager.
func (w ways) choose(offered ways) (ways, error) {
	switch both := w & offered; {
	case both&wayTCP != 0:
		return wayTCP, nil
	case both != 0:
		return wayCM, nil
	case w == wayCM:
		return 0, errors.New("this side connects by the RDMA connection manager, and the dialer does not: it is of " +
			"an older version, or set to tcp")
	}
	return 0, errors.New("this side does not connect by the RDMA connection manager, which the dialer needs")
}

// A nonce ties the connection of the manager to the control channel that gave it to the dialer, once.
type nonce [16]byte

// rendezvous is where and as whom a dialer's connection of the manager is awaited: it stands behind a welcome with
// wayCM.
//
//	0         16     18      34          42          46
//	+---------+------+-------+-----------+-----------+
//	| address | port | nonce | word addr | word rkey |
//	+---------+------+-------+-----------+-----------+
//
// The address is an IPv6 one in network order, or an IPv4 one mapped. The word is for the dialer to READ if both are of
// iWARP, see iwarp.go; else 0.
type rendezvous struct {
	at       netip.AddrPort
	nonce    nonce
	word     uint64
	wordRKey uint32
}

const rendezvousSize = 46

func (r *rendezvous) append(b []byte) []byte {
	ip := r.at.Addr().As16()
	b = append(b, ip[:]...)
	b = binary.LittleEndian.AppendUint16(b, r.at.Port())
	b = append(b, r.nonce[:]...)
	b = binary.LittleEndian.AppendUint64(b, r.word)
	return binary.LittleEndian.AppendUint32(b, r.wordRKey)
}

// parseRendezvous takes rendezvousSize bytes.
func parseRendezvous(b []byte) (r rendezvous, err error) {
	r.at = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b)).Unmap(), binary.LittleEndian.Uint16(b[16:]))
	r.nonce, r.word, r.wordRKey = nonce(b[18:]), binary.LittleEndian.Uint64(b[34:]), binary.LittleEndian.Uint32(b[42:])
	if a := r.at.Addr(); a.IsUnspecified() || a.IsMulticast() || r.at.Port() == 0 {
		return r, fmt.Errorf("the connection manager's address is %v", r.at)
	}
	return r, nil
}

// The private data of a request to the manager. InfiniBand pads it with zeros.
//
//	0      4         5       21
//	+------+---------+-------+
//	| kvdV | version | nonce |
//	+------+---------+-------+
const cmPrivateSize = 21

func (n *nonce) private() (b [cmPrivateSize]byte) {
	copy(b[:], wireMagic)
	b[4] = wireVersion
	copy(b[5:], n[:])
	return b
}

func parsePrivate(b []byte) (n nonce, ok bool) {
	if len(b) < cmPrivateSize || string(b[:4]) != wireMagic || b[4] != wireVersion {
		return n, false
	}
	return nonce(b[5:cmPrivateSize]), true
}
