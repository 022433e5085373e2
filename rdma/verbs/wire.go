package verbs

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/rdma/driver"
)

// The control channel is a TCP connection, with TLS if configured, that lives as
// long as the queue pair. The dialer sends a hello, the listener a welcome; all
// numbers are little-endian, the GID is in network order.
//
//	hello     0      4         5      6     7        8          44         46
//	          +------+---------+------+-----+--------+----------+----------+---------+
//	          | kvdV | version | ways | pad | domain | endpoint | priv len | private |
//	          +------+---------+------+-----+--------+----------+----------+---------+
//	welcome   0      4         5        6     7        8          44         46
//	          +------+---------+--------+-----+--------+----------+----------+----------------------+
//	          | kvdV | version | status | way | domain | endpoint | text len | refusal, or rendezvous |
//	          +------+---------+--------+-----+--------+----------+----------+----------------------+
//	endpoint  0     4     8         12    14    15       16          17       20   36
//	          +-----+-----+---------+-----+-----+--------+-----------+--------+-----+
//	          | QPN | PSN | flow    | LID | MTU | global | rd atomic | pad    | GID |
//	          +-----+-----+---------+-----+-----+--------+-----------+--------+-----+
//
// A hello has the ways that the dialer can connect its queue pair; the welcome has the one that is taken. Older peers
// have 0 there, which is wayTCP. With wayCM the dialer connects by the RDMA connection manager next, and the welcome
// tells where and with which nonce.
//
// Afterwards the dialer sends one byte, bye, when it has put its queue pair into
// the error state, and the listener answers with one, goodbye, when it has
// destroyed its own, so that nothing sent before can land any more. The end of
// the connection at either side means that the queue pair of that side is gone or
// about to be.
const (
	wireMagic    = "kvdV"
	wireVersion  = 1
	endpointSize = 36
	headSize     = 8 + endpointSize + 2
	maxRefusal   = 1024
	wireBye      = 'B'
	wireGoodbye  = 'G'
)

// domain says who executes atomics on the target's memory. In a hello: what the
// dialer's adapter can do at best.
type domain uint8

const (
	domainNIC   domain = 1 + iota // the target's adapter
	domainAgent                   // an agent of the target
)

const (
	statusWelcome = 1
	statusRefused = 2
)

// endpoint is what one side's queue pair needs to know of the other's.
type endpoint struct {
	qpn, psn uint32 // 24 bits
	flow     uint32 // 20 bits
	lid      uint16
	mtu      uint8 // enum ibv_mtu
	global   bool  // addressed by GID
	// rdAtomic bounds the READs and atomics under way: in a hello, as many as the
	// dialer can have; in a welcome, as many as it may.
	rdAtomic uint8
	gid      [16]byte
}

// hello opens a connection.
type hello struct {
	ways    ways
	domain  domain
	ep      endpoint
	private []byte
}

// welcome answers it. With a refusal the rest is void.
type welcome struct {
	way     ways // one of them
	domain  domain
	ep      endpoint
	refused bool
	// textLen bytes follow: a refusal's reason, or a rendezvous.
	textLen int
	meet    rendezvous // with wayCM; parseWelcome leaves it out
}

func (e *endpoint) append(b []byte) []byte {
	le := binary.LittleEndian
	b = le.AppendUint32(b, e.qpn)
	b = le.AppendUint32(b, e.psn)
	b = le.AppendUint32(b, e.flow)
	b = le.AppendUint16(b, e.lid)
	b = append(b, e.mtu, byte01(e.global), e.rdAtomic, 0, 0, 0)
	return append(b, e.gid[:]...)
}

func byte01(v bool) byte {
	if v {
		return 1
	}
	return 0
}

func parseEndpoint(b []byte) (endpoint, error) {
	le := binary.LittleEndian
	e := endpoint{qpn: le.Uint32(b), psn: le.Uint32(b[4:]), flow: le.Uint32(b[8:]), lid: le.Uint16(b[12:]), mtu: b[14],
		global: b[15] == 1, rdAtomic: b[16]}
	copy(e.gid[:], b[20:36])
	switch {
	case e.qpn >= 1<<24 || e.psn >= 1<<24 || e.flow >= 1<<20:
		return e, fmt.Errorf("QPN %#x, PSN %#x or flow label %#x is too long", e.qpn, e.psn, e.flow)
	case mtuBytes(e.mtu) == 0:
		return e, fmt.Errorf("MTU code %d, want 1 to 5", e.mtu)
	case e.rdAtomic == 0:
		return e, errors.New("no READ or atomic may be under way")
	case b[15] > 1:
		return e, fmt.Errorf("global flag %d", b[15])
	}
	return e, nil
}

func (h *hello) append(b []byte) []byte {
	b = append(b, wireMagic...)
	b = append(b, wireVersion, byte(h.ways), 0, byte(h.domain))
	b = h.ep.append(b)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(h.private)))
	return append(b, h.private...)
}

func (w *welcome) append(b []byte, refusal string) []byte {
	status := byte(statusWelcome)
	if w.refused {
		status = statusRefused
	}
	if len(refusal) > maxRefusal {
		refusal = refusal[:maxRefusal]
	}
	b = append(b, wireMagic...)
	b = append(b, wireVersion, status, byte(w.way), byte(w.domain))
	b = w.ep.append(b)
	if !w.refused && w.way == wayCM {
		return w.meet.append(binary.LittleEndian.AppendUint16(b, rendezvousSize))
	}
	b = binary.LittleEndian.AppendUint16(b, uint16(len(refusal)))
	return append(b, refusal...)
}

var errNotVerbs = errors.New("the peer does not speak the verbs provider's protocol")

func parseHead(b []byte) error {
	switch {
	case string(b[:4]) != wireMagic:
		return errNotVerbs
	case b[4] != wireVersion:
		return fmt.Errorf("the peer's protocol version is %d, ours is %d: upgrade the older of the two", b[4],
			wireVersion)
	}
	return nil
}

// parseHello takes the first headSize bytes; n bytes of private data follow.
func parseHello(b []byte) (h hello, n int, err error) {
	if err := parseHead(b); err != nil {
		return h, 0, err
	}
	if h.ways = ways(b[5]); h.ways == 0 {
		h.ways = wayTCP
	}
	h.domain = domain(b[7])
	if h.domain != domainNIC && h.domain != domainAgent {
		return h, 0, fmt.Errorf("atomics of kind %d", h.domain)
	}
	if h.ep, err = parseEndpoint(b[8:]); err != nil {
		return h, 0, err
	}
	n = int(binary.LittleEndian.Uint16(b[8+endpointSize:]))
	if n > driver.MaxPrivate {
		return h, 0, fmt.Errorf("private data of %d bytes, at most %d", n, driver.MaxPrivate)
	}
	return h, n, nil
}

// parseWelcome takes the first headSize bytes; textLen bytes follow.
func parseWelcome(b []byte) (w welcome, err error) {
	if err := parseHead(b); err != nil {
		return w, err
	}
	w.textLen = int(binary.LittleEndian.Uint16(b[8+endpointSize:]))
	if w.textLen > maxRefusal {
		return w, fmt.Errorf("refusal of %d bytes, at most %d", w.textLen, maxRefusal)
	}
	switch b[5] {
	case statusRefused:
		w.refused = true
		return w, nil
	case statusWelcome:
	default:
		return w, fmt.Errorf("status %d", b[5])
	}
	if w.way = ways(b[6]); w.way == 0 {
		w.way = wayTCP
	}
	want := 0
	switch w.way {
	case wayTCP:
	case wayCM:
		want = rendezvousSize
	default:
		return w, fmt.Errorf("way %d to connect queue pairs", w.way)
	}
	if w.textLen != want {
		return w, fmt.Errorf("%d bytes behind a welcome, want %d", w.textLen, want)
	}
	w.domain = domain(b[7])
	if w.domain != domainNIC && w.domain != domainAgent {
		return w, fmt.Errorf("atomics of kind %d", w.domain)
	}
	w.ep, err = parseEndpoint(b[8:])
	return w, err
}

// An atomic that an agent executes is a SEND of an atomicRequest, which an
// atomicReply answers.
//
//	request  0     4    5     8      16        24        32     40
//	         +-----+----+-----+------+---------+---------+------+
//	         | seq | op | pad | rkey | address | compare | swap |
//	         +-----+----+-----+------+---------+---------+------+
//	reply    0     4        5     8       16
//	         +-----+--------+-----+-------+
//	         | seq | status | pad | found |
//	         +-----+--------+-----+-------+
const (
	requestSize = 40
	replySize   = 16
)

type atomicRequest struct {
	seq                 uint32
	op                  driver.Opcode
	rkey                uint64
	addr, compare, swap uint64
}

func (r *atomicRequest) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b, r.seq)
	le.PutUint32(b[4:], uint32(r.op))
	le.PutUint64(b[8:], r.rkey)
	le.PutUint64(b[16:], r.addr)
	le.PutUint64(b[24:], r.compare)
	le.PutUint64(b[32:], r.swap)
}

// parseRequest reads requestSize bytes; what they say is for the agent to check.
func parseRequest(b []byte) atomicRequest {
	le := binary.LittleEndian
	return atomicRequest{seq: le.Uint32(b), op: driver.Opcode(b[4]), rkey: le.Uint64(b[8:]),
		addr: le.Uint64(b[16:]), compare: le.Uint64(b[24:]), swap: le.Uint64(b[32:])}
}

type atomicReply struct {
	seq    uint32
	status driver.Status
	found  uint64
}

func (r *atomicReply) put(b []byte) {
	le := binary.LittleEndian
	le.PutUint32(b, r.seq)
	le.PutUint32(b[4:], uint32(r.status))
	le.PutUint64(b[8:], r.found)
}

func parseReply(b []byte) (atomicReply, error) {
	le := binary.LittleEndian
	r := atomicReply{seq: le.Uint32(b), status: driver.Status(b[4]), found: le.Uint64(b[8:])}
	switch r.status {
	case driver.Success, driver.RemInvReqErr, driver.RemAccessErr, driver.RemOpErr, driver.GeneralErr:
		return r, nil
	}
	return r, fmt.Errorf("status %d in an atomic's reply", b[4])
}
