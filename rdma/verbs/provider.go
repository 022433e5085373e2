//go:build verbs && cgo && linux

package verbs

// #cgo CFLAGS: -O2 -Wall
// #cgo LDFLAGS: -ldl
// #include <stdlib.h>
// #include "shim.h"
import "C"

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Built tells whether this binary can use RDMA adapters at all.
const Built = true

const (
	wantInline  = 256     // bytes
	wantSendWR  = 512     // WRs outstanding on a QP
	longestMsg  = 1 << 30 // bytes
	mostRdAtom  = 64      // READs and atomics under way on a QP
	drainBudget = time.Second
)

// device is one port of one adapter.
type device struct {
	o      Options
	info   DeviceInfo
	choice Choice
	port   PortInfo
	ctx    *C.struct_ibv_context
	mtu    uint8 // enum ibv_mtu
	gid    [16]byte
	global bool
	// ownBase: the adapter takes no addresses of our making for memory that others reach.
	ownBase bool
	// allRights: the adapter cannot limit what a connection may do to its PD's memory.
	allRights bool
	caps      driver.Caps
	native    bool // the adapter executes atomics on our memory
	// canCAS: the adapter can ask others for atomics.
	canCAS  bool
	timeout uint8 // of an acknowledgement: 4.096 µs · 2^timeout
	// initDepth and destDepth bound the READs and atomics under way on a QP.
	initDepth, destDepth uint8
	spin                 int64 // most nanoseconds a Poll spins

	cm struct {
		sync.Mutex
		manager *manager // nil until it is needed
	}

	async     *os.File // wakes watchAsync
	asyncDone chan struct{}

	departing departing

	mu struct {
		sync.Mutex
		closed                          bool
		pds, cqs, qps, peers, listeners int
	}
}

var _ driver.Device = (*device)(nil)

// load finds the library.
func load() error {
	var why [256]C.char
	if rc := C.kvd_load(&why[0], C.size_t(len(why))); rc != 0 {
		return fmt.Errorf("%w: %s (install libibverbs1 and ibverbs-providers)", ErrUnavailable, C.GoString(&why[0]))
	}
	return nil
}

// list calls f with the adapters; they are valid during the call only.
func list(f func([]*C.struct_ibv_device) error) error {
	if err := load(); err != nil {
		return err
	}
	var n C.int
	l := C.kvd_list(&n)
	if l == nil {
		err := syscall.Errno(-n)
		if err == syscall.ENOSYS {
			return fmt.Errorf("%w: the kernel has no RDMA support (modprobe ib_uverbs)", ErrUnavailable)
		}
		return fmt.Errorf("%w: list of adapters: %w", ErrUnavailable, err)
	}
	defer C.kvd_free_list(l)
	if n == 0 {
		return fmt.Errorf("%w: no RDMA adapter", ErrUnavailable)
	}
	return f(unsafe.Slice(l, int(n)))
}

// Devices describes the adapters that the verbs library shows. An error wraps
// ErrUnavailable.
func Devices() (infos []DeviceInfo, err error) {
	err = list(func(l []*C.struct_ibv_device) error {
		infos = describe(l, "")
		return nil
	})
	return infos, err
}

// describe asks the adapters, all or the one named, what they are; of the others it
// gives the name.
func describe(l []*C.struct_ibv_device, only string) []DeviceInfo {
	infos := make([]DeviceInfo, len(l))
	root := sysfsRoot()
	interfaces, _ := net.Interfaces() // none: then an iWARP port has no address
	table := make([]C.struct_ibv_gid_entry, 1024)
	for i, d := range l {
		if name := C.GoString(C.kvd_name(d)); only != "" && only != name {
			infos[i].Name = name
			continue
		}
		var c C.struct_kvd_device
		C.kvd_describe(d, &c, &table[0], C.int(len(table)))
		in := DeviceInfo{Name: C.GoString(c.name), Transport: "InfiniBand", MemoryWindows: "none"}
		if c.iwarp != 0 {
			in.Transport = "iWARP"
		}
		if c.err != 0 {
			in.Err = fmt.Errorf("open adapter: %w", syscall.Errno(c.err))
		} else {
			a := &c.attr
			in.Firmware = C.GoString(&a.fw_ver[0])
			switch a.atomic_cap {
			case C.IBV_ATOMIC_HCA:
				in.Atomics = driver.AtomicHCA
			case C.IBV_ATOMIC_GLOB:
				in.Atomics = driver.AtomicCPU
			default:
				in.Atomics = driver.AtomicNone
			}
			one := a.device_cap_flags&C.IBV_DEVICE_MEM_WINDOW != 0
			two := a.device_cap_flags&(C.IBV_DEVICE_MEM_WINDOW_TYPE_2A|C.IBV_DEVICE_MEM_WINDOW_TYPE_2B) != 0
			switch {
			case one && two:
				in.MemoryWindows = "type 1 and 2"
			case two:
				in.MemoryWindows = "type 2"
			case one:
				in.MemoryWindows = "type 1"
			}
			in.MaxQP, in.MaxQPWR, in.MaxCQE, in.MaxMR = int(a.max_qp), int(a.max_qp_wr), int(a.max_cqe), int(a.max_mr)
			in.MaxSGE, in.MaxSGERead = int(a.max_sge), int(a.max_sge_rd)
			in.MaxMRBytes, in.MaxQPRdAtom, in.MaxInitRdAtom = uint64(a.max_mr_size), int(a.max_qp_rd_atom),
				int(a.max_qp_init_rd_atom)
			for n := range min(int(a.phys_port_cnt), len(c.port)) {
				p := &c.port[n]
				pi := PortInfo{Number: n + 1, State: portState(int(p.state)), LinkLayer: "Ethernet",
					MTU: mtuBytes(uint8(p.active_mtu)), MaxMTU: mtuBytes(uint8(p.max_mtu)),
					MaxMsgBytes: int(p.max_msg_sz), LID: int(p.lid),
					Speed: portRate(root, in.Name, n+1)}
				if c.gids >= 0 {
					pi.GIDs = gidsOf(table[:c.gids], n+1)
				} else {
					pi.GIDs = readGIDs(root, in.Name, n+1)
				}
				if in.Transport == "iWARP" {
					pi.Addrs = iwarpAddrs(pi.GIDs, interfaces)
				}
				if p.link_layer != C.IBV_LINK_LAYER_ETHERNET {
					pi.LinkLayer = "InfiniBand"
				}
				in.Ports = append(in.Ports, pi)
			}
		}
		infos[i] = in
	}
	return infos
}

// gidsOf gives one port's part of an adapter's GID tables.
func gidsOf(table []C.struct_ibv_gid_entry, port int) (gids []GIDInfo) {
	for i := range table {
		e := &table[i]
		if int(e.port_num) != port {
			continue
		}
		g := GIDInfo{Index: int(e.gid_index), GID: netip.AddrFrom16(e.gid)}
		switch e.gid_type {
		case C.IBV_GID_TYPE_IB:
			g.Type = GIDInfiniBand
		case C.IBV_GID_TYPE_ROCE_V1:
			g.Type = GIDRoCEv1
		case C.IBV_GID_TYPE_ROCE_V2:
			g.Type = GIDRoCEv2
		}
		if n, err := net.InterfaceByIndex(int(e.ndev_ifindex)); err == nil {
			g.Netdev = n.Name
		}
		gids = append(gids, g)
	}
	return gids
}

func portState(s int) string {
	names := []string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"}
	if s < 0 || s >= len(names) {
		return fmt.Sprintf("state %d", s)
	}
	return names[s]
}

// Open makes a device of one adapter: it chooses port and GID, opens it, and
// tries its atomics.
func Open(o Options) (driver.Device, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("verbs: %w", err)
	}
	o.ensureDefaults()
	if o.Door == nil {
		var err error
		if o.Door, err = NewDoor(netsrv.Limits{HandshakeTimeout: o.HandshakeTimeout, Logger: o.Logger}); err != nil {
			return nil, fmt.Errorf("verbs: %w", err)
		}
	}
	d := &device{o: o, asyncDone: make(chan struct{})}
	err := list(func(l []*C.struct_ibv_device) error {
		sel, _ := parseSelector(o.Device)
		infos := describe(l, sel.name)
		var err error
		if d.choice, err = Choose(infos, &o); err != nil {
			return fmt.Errorf("%w: %w", ErrUnavailable, err)
		}
		d.info = infos[d.choice.Device]
		d.port = d.info.Ports[d.choice.Port]
		if rc := C.kvd_open(l[d.choice.Device], &d.ctx); rc != 0 {
			return fmt.Errorf("%w: open %s: %w", ErrUnavailable, d.info.Name, syscall.Errno(rc))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("verbs: %w", err)
	}
	if err := d.setUp(); err != nil {
		_ = C.kvd_close(d.ctx)
		return nil, fmt.Errorf("verbs: %s: %w", d.info.Name, err)
	}
	o.Logger.Info("RDMA adapter opened", "device", d.info.Name, "port", d.port.Number, "link_layer", d.port.LinkLayer,
		"gid_index", d.choice.GID, "gid", d.choice.Addr, "mtu", mtuBytes(d.mtu), "reason", d.choice.Reason,
		"atomics", map[bool]string{true: "nic", false: "agent"}[d.native], "inline_bytes", d.caps.MaxInline)
	return d, nil
}

// setUp finds out what the adapter can do.
func (d *device) setUp() error {
	in := &d.info
	d.global = d.port.LinkLayer == "Ethernet" || d.choice.GID > 0
	for _, g := range d.port.GIDs {
		if g.Index == d.choice.GID {
			d.gid = g.GID.As16()
		}
	}
	if d.iwarp() {
		d.gid = d.choice.Addr.As16()
	}
	d.mtu = mtuCode(cmp.Or(min(cmp.Or(d.o.MTU, d.port.MTU), d.port.MTU), 1024))
	d.timeout = 1
	tries := time.Duration(d.o.Fabric.RetryCount + 1)
	for d.timeout < 31 && tries*4096*time.Nanosecond<<(d.timeout+1) <= d.o.PeerTimeout {
		d.timeout++
	}
	d.initDepth = uint8(max(1, min(in.MaxInitRdAtom, mostRdAtom)))
	d.destDepth = uint8(max(1, min(in.MaxQPRdAtom, mostRdAtom)))
	if runtime.GOMAXPROCS(0) > 1 {
		d.spin = int64(maxSpin)
	}
	d.caps = driver.Caps{
		AtomicScope:    driver.AtomicCPU,
		Port:           fmt.Sprintf("%s/%d", in.Name, d.port.Number),
		AtomicThenRead: true,
		TearBytes:      8,
		MaxMsg:         longestMsg,
		MaxSendWR:      min(wantSendWR, in.MaxQPWR),
		WholeBytes:     driver.LeastWholeBytes,
		MaxSGE:         in.sges(),
		EnforcesRights: true,
		AtomicsByAgent: true,
		SharedWire:     true,
		SilentRefusals: d.iwarp(),
	}
	var err error
	if d.caps.Fabric, err = d.fabric(); err != nil {
		return err
	}
	if m := d.port.MaxMsgBytes; m > 0 {
		d.caps.MaxMsg = min(m, longestMsg)
	}
	d.canCAS = in.Atomics == driver.AtomicHCA || in.Atomics == driver.AtomicCPU
	if err := d.watchAsync(); err != nil {
		return err
	}
	test := d.selfTest()
	if d.iwarp() && test.err != nil { // it may take no addresses of our making
		d.ownBase = true
		test = d.selfTest()
	}
	if test.err != nil {
		d.stopAsync()
		return fmt.Errorf("connection to itself: %w", test.err)
	}
	d.caps.MaxInline = test.inline
	d.allRights = !test.limits
	d.canCAS = d.canCAS && test.atomics == nil
	if d.o.Atomics == AtomicsAgent || d.o.Atomics == AtomicsAuto && !d.canCAS {
		if d.o.Atomics == AtomicsAuto {
			d.o.Logger.Warn("the adapter has no usable atomics: an agent of the memory node executes them", "device",
				in.Name,
				"scope", in.Atomics, "self_test", test.atomics)
		}
		return nil
	}
	if !d.canCAS {
		d.stopAsync()
		return fmt.Errorf("no usable atomics: the adapter says %v, and the self-test %w", in.Atomics,
			cmp.Or(test.atomics, errors.New("was left out")))
	}
	d.native = true
	d.caps.AtomicsByAgent = false
	d.caps.AtomicScope = in.Atomics
	d.caps.AtomicThenRead = test.atomicThenRead
	return nil
}

// fabric is how packets go. It asks for the P_Key, since a QP with an index of none would fail later, or reach nobody.
// iWARP has no partitions.
func (d *device) fabric() (*driver.Fabric, error) {
	f := &d.o.Fabric
	var pkey C.uint16_t
	if d.iwarp() {
		if f.PKeyIndex != 0 {
			return nil, fmt.Errorf("PKeyIndex is %d, and iWARP has no P_Keys", f.PKeyIndex)
		}
	} else if rc := C.kvd_query_pkey(d.ctx, C.int(d.port.Number), C.int(f.PKeyIndex), &pkey); rc != 0 ||
		pkey&0x7fff == 0 {
		why := errors.New("the entry is empty")
		if rc != 0 {
			why = syscall.Errno(rc)
		}
		return nil, fmt.Errorf("PKeyIndex is %d, where port %d has no P_Key: %w", f.PKeyIndex, d.port.Number, why)
	}
	out := &driver.Fabric{Device: d.info.Name, Port: d.port.Number, GIDIndex: -1, PathMTU: mtuBytes(d.mtu),
		TrafficClass: f.TrafficClass, ServiceLevel: f.ServiceLevel, PKeyIndex: f.PKeyIndex, PKey: uint16(pkey),
		HopLimit: f.HopLimit, FlowLabel: f.FlowLabel, RetryCount: f.RetryCount, RNRRetry: f.RNRRetry,
		Timeout: int(d.timeout)}
	for _, g := range d.port.GIDs {
		if d.global && g.Index == d.choice.GID {
			out.GIDIndex, out.GID, out.GIDType = g.Index, g.GID.Unmap().String(), g.Type.String()
		}
	}
	return out, nil
}

// sges is how many pieces of memory WRs get.
func (in *DeviceInfo) sges() int {
	n := in.MaxSGE
	if in.MaxSGERead > 0 { // 0: nothing is said of READs
		n = min(n, in.MaxSGERead)
	}
	return max(1, min(n, 1+moreSGEs))
}

// iwarp tells whether the connection manager alone can connect, and the adapter moves queue pairs by itself then.
func (d *device) iwarp() bool { return d.info.Transport == "iWARP" }

func (d *device) Caps() driver.Caps { return d.caps }

func (d *device) Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	return mem.Alloc(size, o)
}

// watchAsync logs what the adapter reports by itself: ports that go down, and
// errors that belong to no WR.
func (d *device) watchAsync() error {
	f, err := pollable(int(d.ctx.async_fd), "verbs-async")
	if err != nil {
		return err
	}
	d.async = f
	go func() {
		defer close(d.asyncDone)
		waitReadable(f, func() bool {
			for {
				t := C.kvd_async(d.ctx)
				if t < 0 {
					return syscall.Errno(-t) == syscall.EAGAIN || syscall.Errno(-t) == syscall.EINTR
				}
				switch t {
				case C.IBV_EVENT_COMM_EST, C.IBV_EVENT_SQ_DRAINED, C.IBV_EVENT_QP_LAST_WQE_REACHED,
					C.IBV_EVENT_GID_CHANGE:
				default:
					d.o.Logger.Warn("RDMA adapter reports", "device", d.info.Name, "event",
						C.GoString(C.kvd_event_name(t)))
				}
			}
		})
	}()
	return nil
}

func (d *device) stopAsync() {
	_ = d.async.Close()
	<-d.asyncDone
}

// pollable gives a duplicate of a nonblocking descriptor to Go's poller. Closing
// it wakes the goroutines that wait for it.
func pollable(fd int, name string) (*os.File, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("dup %s: %w", name, err)
	}
	return os.NewFile(uintptr(dup), name), nil
}

// waitReadable calls take whenever f may have become readable, until take
// returns false or f is closed.
func waitReadable(f *os.File, take func() bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Read(func(uintptr) bool { return !take() })
}

// Close reports what is still open and leaves it open.
func (d *device) Close() error {
	d.departing.wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &d.mu
	if m.closed {
		return nil
	}
	if m.pds+m.cqs+m.qps+m.listeners > 0 {
		return fmt.Errorf("verbs: close device: %d PDs, %d CQs, %d QPs and %d listeners remain", m.pds, m.cqs, m.qps,
			m.listeners)
	}
	m.closed = true
	if d.cm.manager != nil {
		d.cm.manager.close()
	}
	d.stopAsync()
	if rc := C.kvd_close(d.ctx); rc != 0 {
		return fmt.Errorf("verbs: close %s: %w", d.info.Name, syscall.Errno(rc))
	}
	return nil
}

// limited turns the errno of a registration into what an operator can act on.
func limited(what string, bytes int64, rc C.int) error {
	err := syscall.Errno(rc)
	if err != syscall.ENOMEM {
		return fmt.Errorf("%s: %w", what, err)
	}
	have := int64(-1)
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil {
		have = int64(min(r.Cur, 1<<62))
	}
	return &mem.LimitError{Limit: "RLIMIT_MEMLOCK", Want: bytes, Have: have, Unit: "bytes",
		Err: fmt.Errorf("%s: %w", what, err),
		Hint: "registered memory is pinned: raise it with LimitMEMLOCK= in the systemd unit or ulimit -l, or grant " +
			"CAP_IPC_LOCK"}
}

// endpoint describes one of our queue pairs to its peer.
func (d *device) endpoint(qpn uint32) endpoint {
	flow := uint32(d.o.Fabric.FlowLabel)
	if flow == 0 {
		flow = random24() & (1<<20 - 1)
	}
	return endpoint{qpn: qpn, psn: random24(), flow: flow, lid: uint16(d.port.LID), mtu: d.mtu,
		global: d.global, rdAtomic: d.initDepth, gid: d.gid}
}

func (e *endpoint) String() string {
	return fmt.Sprintf("gid %v lid %d qpn %d", netip.AddrFrom16(e.gid).Unmap(), e.lid, e.qpn)
}

// portRate is the port's speed in the kernel's words, or "".
func portRate(root fs.FS, device string, port int) string {
	b, err := fs.ReadFile(root, path.Join(device, "ports", strconv.Itoa(port), "rate"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func (o *Options) ensureDefaults() {
	if o.PeerTimeout == 0 {
		o.PeerTimeout = 500 * time.Millisecond
	}
	o.Fabric.ensureDefaults()
	if o.HandshakeTimeout == 0 {
		o.HandshakeTimeout = defaultHandshakeTimeout
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Defaults of Fabric.
const (
	defaultRetryCount = 6
	defaultRNRRetry   = 6
	defaultHopLimit   = 64
)

func (f *Fabric) ensureDefaults() {
	if f.RetryCount == 0 {
		f.RetryCount = defaultRetryCount
	}
	if f.RNRRetry == 0 {
		f.RNRRetry = defaultRNRRetry
	}
	if f.HopLimit == 0 {
		f.HopLimit = defaultHopLimit
	}
}
