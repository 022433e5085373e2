// Package driver is the contract between the portable verbs types of package
// rdma and the providers that move bytes (sim, shm, tcp, verbs).
//
// It holds data types (WR, WC, Caps, Memory) and five small interfaces (Device, PD, MR, CQ, QP) plus the
// passive side (Listener, Peer). Package rdma, above it, does once what every provider would otherwise
// repeat. These are argument checks that need no provider state, counters, and error conversion. Users of the
// store never import this package; providers never import rdma.
//
// Concurrency: Device, PD, MR and Listener methods may be called concurrently.
// A CQ and all QPs attached to it belong to one goroutine at a time (a lane). Other goroutines may use only
// CQ.Ready, Waiter.Wake, QP.State and QP.Close.
//
// Buffers: the local buffer of a WR, and its Value, belong to the provider from PostSend on. They are the caller's
// again when that WR's WC, or a later WC of the same QP, has been polled. Cancelling a wait does not return them, but
// see Value.Detach.
//
// The vocabulary and semantics are those of ibv_post_send(3), ibv_poll_cq(3),
// ibv_reg_mr(3); the split of portable type over driver follows database/sql.
package driver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"time"
)

// Opcode is a work request's verb. The zero value is invalid.
type Opcode uint8

const (
	// OpRead copies remote memory to Local, and on to Value. Up to Caps.WholeBytes, aligned 8-byte words are read
	// whole; the READ as a whole is not a snapshot.
	OpRead Opcode = 1 + iota
	// OpWrite copies Local, and Value behind it, to remote memory. Bytes land in any order, but see Caps.Sums. Up
	// to Caps.WholeBytes, aligned 8-byte words land whole.
	OpWrite
	// OpCmpAndSwp compares the remote 8-byte word with Compare and, if equal,
	// replaces it with Swap. Local (8 bytes) receives the word found before.
	OpCmpAndSwp
	// OpFetchAdd adds Swap to the remote 8-byte word (wrapping). Local (8 bytes)
	// receives the word found before.
	OpFetchAdd
)

// NumOpcodes bounds arrays indexed by Opcode.
const NumOpcodes = 5

var opcodeNames = [NumOpcodes]string{"INVALID", "READ", "WRITE", "CMP_AND_SWP", "FETCH_ADD"}

func (o Opcode) String() string {
	if int(o) < len(opcodeNames) {
		return opcodeNames[o]
	}
	return fmt.Sprintf("Opcode(%d)", uint8(o))
}

// IsAtomic reports whether o is one of the two 8-byte atomics.
func (o Opcode) IsAtomic() bool { return o == OpCmpAndSwp || o == OpFetchAdd }

// SendFlags modify one WR, as in ibv_post_send(3).
type SendFlags uint8

const (
	// Signaled asks for a WC on success. A WR without it produces a WC only
	// when it fails.
	Signaled SendFlags = 1 << iota
	// Fence holds the WR back until every earlier READ and atomic of the QP
	// has completed.
	Fence
	// Inline copies Local during PostSend, so the caller may reuse it at once.
	// WRITE only, at most Caps.MaxInline bytes.
	Inline
	// IfHit lets a CMP_AND_SWP take effect only if the latest CMP_AND_SWP in front of it on the QP took effect. Else it
	// is skipped: it completes, Local receives the complement of Compare, and it counts as one that missed. So a
	// chain of them stops at the first that misses. Only if Caps.StopAtMiss.
	IfHit
)

// WR is one work request. Local must lie inside the local MR that LKey names.
type WR struct {
	ID         uint64 // returned in the WC
	Op         Opcode
	Flags      SendFlags
	Local      []byte
	LKey       uint64
	RemoteAddr uint64 // MR.Base + offset inside the remote MR, in bytes
	RKey       uint64
	Compare    uint64 // CMP_AND_SWP
	Swap       uint64 // CMP_AND_SWP: new word; FETCH_ADD: addend
	Value      *Value // the second SGE of a READ or a WRITE, or nil
}

// Status is a WC's status, named after ibv_wc_status.
type Status uint8

const (
	Success      Status = 1 + iota
	LocLenErr           // LOC_LEN_ERR: longer than Caps.MaxMsg
	LocQPOpErr          // LOC_QP_OP_ERR: malformed WR
	LocProtErr          // LOC_PROT_ERR: Local not inside the MR of LKey
	WRFlushErr          // WR_FLUSH_ERR: the QP was in error; effect unknown
	RemInvReqErr        // REM_INV_REQ_ERR: target refused the request's form
	RemAccessErr        // REM_ACCESS_ERR: rkey, bounds, rights or PD refused
	RemOpErr            // REM_OP_ERR: target failed while executing
	RetryExcErr         // RETRY_EXC_ERR: target silent; effect unknown
	GeneralErr          // GENERAL_ERR: provider failed; effect unknown
)

var statusNames = [...]string{"INVALID", "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_PROT_ERR",
	"WR_FLUSH_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR", "REM_OP_ERR", "RETRY_EXC_ERR", "GENERAL_ERR"}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("Status(%d)", uint8(s))
}

// WC is one work completion. Any status but Success moved the QP to the error
// state: every WR behind it completes with WRFlushErr.
type WC struct {
	ID     uint64
	QPNum  uint32
	Op     Opcode
	Status Status
}

// Access are the rights of an MR, or the most a connection may use.
type Access uint8

const (
	AccessRemoteRead Access = 1 << iota
	AccessRemoteWrite
	AccessRemoteAtomic
	// AccessLocal marks an MR that is only the local side of WRs.
	AccessLocal
)

// AtomicScope says against what a provider's atomics are atomic.
type AtomicScope uint8

const (
	// AtomicNone: no atomics.
	AtomicNone AtomicScope = 1 + iota
	// AtomicHCA: only against atomics through the same adapter (IBV_ATOMIC_HCA).
	AtomicHCA
	// AtomicCPU: against CPU atomics on the target as well.
	AtomicCPU
)

func (a AtomicScope) String() string {
	return [...]string{"invalid", "none", "hca", "cpu"}[min(int(a), 3)]
}

// Caps states what a provider guarantees. It never changes while a Device is
// open.
type Caps struct {
	AtomicScope AtomicScope
	// Port names an adapter and its port, ADAPTER/PORT; empty: the device is of no adapter. With AtomicHCA, atomics
	// through all ports of one adapter are atomic with each other.
	Port string
	// AtomicThenRead: a READ posted behind an atomic on one QP sees its effect
	// without Fence.
	AtomicThenRead bool
	// StopAtMiss: WRs may have the flag IfHit.
	StopAtMiss bool
	// TearBytes is the largest aligned unit that a READ sees whole; at least 8.
	TearBytes int
	MaxInline int // bytes
	MaxMsg    int // bytes of one READ or WRITE
	MaxSendWR int // WRs outstanding on one QP
	// WholeBytes: a READ or WRITE of at most these bytes moves aligned 8-byte words whole. A longer one, or one with a
	// Value, may move any byte by itself. At least LeastWholeBytes.
	WholeBytes int
	// MaxSGE is how many pieces of memory a WR has at most, Local being one. It is 2 or more if WRs may have a Value,
	// else 1. Package rdma makes up for a provider that lacks this, AnyMemory or Sums: see Value.SGEs.
	MaxSGE int
	// AnyMemory: Value.Bytes need not be registered.
	AnyMemory bool
	// Sums: the provider calls Value.Start and Value.Seal, and takes the CRC while it moves the bytes. Local of
	// a WRITE with a Value lands behind all of Value.
	Sums bool
	// Synchronous: PostSend has executed the WRs when it returns; PollCQ finds
	// their WCs at once and nobody ever needs to wait.
	Synchronous bool
	// SelfFencing: a WR can take effect, and a READ return bytes, only while the
	// memory node has not fenced the session. A memory node that is declared lost while
	// it lives on fences nobody, so with several copies a lease is checked all the same.
	SelfFencing bool
	// EnforcesRights: the target, not the initiator, checks rkey, bounds and
	// rights.
	EnforcesRights bool
	// SilentRefusals: the target ends the connection when it refuses a WR, and gives no reason. The WR, and those in
	// front of it that have not completed, end with RETRY_EXC_ERR. Nobody knows whether they happened.
	SilentRefusals bool
	// AtomicsByAgent: READ and WRITE are the device's, atomics are messages that
	// the target's CPU answers.
	AtomicsByAgent bool
	// ChoosesKeys: the provider makes up rkeys, and PDs are KeyChoosers, so that memory that is adopted can have the
	// rkeys that it had.
	ChoosesKeys bool
	// Functions: PDs are FuncRegistrars.
	Functions bool
	// SharedWire: the WRs of a QP take turns on one stream, so a short one waits for the long ones in front of it. A
	// second QP to the same target has a stream of its own.
	SharedWire bool
	// Maps: QPs are Mappers.
	Maps bool
	// Fabric says how an adapter's packets go, for people; nil: there is no adapter.
	Fabric *Fabric
}

// Fabric are an adapter's parameters of every connection, with the names of ibv_modify_qp(3).
type Fabric struct {
	Device       string
	Port         int
	GIDIndex     int // -1: packets have no GRH; GID and GIDType are empty then
	GID, GIDType string
	PathMTU      int // bytes; a peer's may be less
	TrafficClass int
	ServiceLevel int
	PKeyIndex    int
	PKey         uint16
	HopLimit     int
	FlowLabel    int // 0: each connection has one at random
	RetryCount   int
	RNRRetry     int
	Timeout      int // 4.096 µs · 2^Timeout for an acknowledgement
}

// LeastWholeBytes is the longest READ of index words that users of providers may rely on, bytes.
const LeastWholeBytes = 16 << 10

// AllocOptions say how registered memory is mapped.
type AllocOptions struct {
	// Name labels the mapping (memfd name, metrics).
	Name string
	// HugePageBytes is 0 for normal pages, or 2<<20 or 1<<30.
	HugePageBytes int
	// Lock pins the pages with mlock(2) and touches them.
	Lock bool
	// Shared makes the mapping a memfd that other processes can map.
	Shared bool
	// Adopt, if not nil, is the memfd of memory that an earlier process allocated with the same size and
	// options, Shared among them. The memory is mapped as it is, and not zeroed. The caller keeps the file.
	// Providers whose memory ends with its process refuse it with ErrNotSupport.
	Adopt *os.File
	// File, if not nil, is a file of a tmpfs or hugetlbfs that is the memory in place of a memfd. An empty file
	// gets the size and all of its pages. Any other file is mapped as it is, and must be of the same size and
	// pages. It has no seals, so no other process maps it by Shared. The caller keeps the file. The same
	// providers refuse it.
	File *os.File
	// Populate, if not nil, has all pages taken from the system before Alloc returns, in the name of this
	// process. It is called for each part, of 32 MiB or one huge page, by up to four goroutines at once. It calls
	// take in its turn. An error, take's or its own, ends Alloc, and nothing stays. Nil: a page is taken when
	// somebody first touches it, unless Lock or File says otherwise. It is not kept in Memory.Opts.
	Populate func(take func() error) error
}

// Memory is mapped outside the Go heap (except under sim). The one who
// allocated it owns it and calls Free after every MR over it is deregistered.
type Memory struct {
	Bytes []byte
	FD    int // memfd, or -1
	Opts  AllocOptions
	free  func() error
}

// NewMemory wraps a mapping; free unmaps it and may be nil.
func NewMemory(b []byte, fd int, o AllocOptions, free func() error) *Memory {
	o.Populate = nil
	return &Memory{Bytes: b, FD: fd, Opts: o, free: free}
}

// Free unmaps. It is not idempotent and not safe while any MR covers it.
func (m *Memory) Free() error {
	if m.free == nil {
		return nil
	}
	f := m.free
	m.free, m.Bytes = nil, nil
	return f()
}

// Errors that PostSend and the control calls return. PostSend's are "not
// applied": wrs[n:] had no effect.
var (
	ErrQueueFull  = errors.New("send queue full")
	ErrClosed     = errors.New("closed")
	ErrQPError    = errors.New("QP in error state")
	ErrRefused    = errors.New("connection refused by the memory node")
	ErrNotSupport = errors.New("not supported by the provider")
	// ErrNoAccess is Mapper's: what RemAccessErr is to a READ.
	ErrNoAccess = errors.New("access refused by the memory node")
)

// Device is one opened provider instance.
type Device interface {
	Caps() Caps
	// Alloc maps size bytes (rounded up to the page size), zeroed unless adopted.
	Alloc(size int64, o AllocOptions) (*Memory, error)
	AllocPD() (PD, error)
	// CreateCQ makes a queue for at least depth WCs.
	CreateCQ(depth int) (CQ, error)
	// Dial connects a QP to a Listener at addr. It blocks; ctx bounds it.
	Dial(ctx context.Context, r DialRequest) (QP, error)
	// Listen accepts connections until the Listener is closed.
	Listen(addr string, o ListenOptions) (Listener, error)
	// Close releases the device. QPs, MRs, CQs and Listeners must be closed
	// first; Close reports any that are not.
	Close() error
}

// PD is a protection domain: MRs and QPs of different PDs never meet.
type PD interface {
	// RegMR registers n bytes of m from off (8-byte aligned).
	RegMR(m *Memory, off, n int64, a Access) (MR, error)
	// Dealloc fails while MRs or QPs of the PD remain.
	Dealloc() error
}

// MR is a registered memory region.
type MR interface {
	LKey() uint64
	// RKey is unguessable for providers whose rkeys travel in clear.
	RKey() uint64
	// Base is the remote address of the MR's first byte: made up anew for each
	// MR with verbs, 0 elsewhere.
	Base() uint64
	// Deregister revokes the keys. WRs that arrive later get RemAccessErr.
	Deregister() error
}

// AtomicFunc executes one atomic on the word at byte off of an MR and returns the
// word found. Any status but Success says, as in a WC, whether it took effect.
type AtomicFunc func(op Opcode, off, compare, swap uint64) (found uint64, s Status)

// AtomicProxier is an MR whose atomics are executed by a CPU of the target. They can be left to another
// device: the one in whose atomic domain the memory is.
type AtomicProxier interface {
	// ProxyAtomics makes f, which may be called concurrently, execute every atomic
	// on the MR from now on. It is called before the rkey is handed out.
	ProxyAtomics(f AtomicFunc)
}

// ReadFunc fills b with the bytes of a function region from off on. It has to return soon after ctx has ended. Success,
// RemAccessErr and RemOpErr are what it may return; an error ends the connection, as that of any READ.
type ReadFunc func(ctx context.Context, off uint64, b []byte) Status

// FuncRegistrar is a PD that can have function regions: their bytes are wherever a function finds them, on a disk, say.
type FuncRegistrar interface {
	// RegFunc registers a region of n bytes without memory, which can only be READ. f performs its READs, a long one in
	// pieces, in up to workers goroutines at once. A QP's READs are answered in their order, those behind on the
	// same QP after them; other QPs do not wait. Deregister ends f's context and waits for the calls under way.
	RegFunc(n int64, workers int, f ReadFunc) (MR, error)
}

// KeyChooser is a PD whose provider makes up rkeys itself, and so can give memory that outlived a process the
// rkeys that it had there.
type KeyChooser interface {
	// RegMRAs is RegMR with this rkey. It fails if the key is 0, which names nothing, or is in use.
	RegMRAs(m *Memory, off, n int64, a Access, rkey uint64) (MR, error)
}

// RateLimiter is a PD whose connections' verbs the CPU of the target executes, which can make them wait.
type RateLimiter interface {
	// LimitRate bounds how many verbs a second execute for all connections of the PD together, from
	// now on; 0 is no limit, as before the first call. Verbs over the limit execute later, and
	// connections that wait have their turns one after the other. It may be called concurrently and does not block.
	LimitRate(perSecond uint64)
	// Paced is how long connections have waited for that, all together.
	Paced() time.Duration
}

// CQ collects the WCs of the QPs attached to it.
type CQ interface {
	// Poll fills wcs with finished work. It may spin for some microseconds while
	// work is outstanding, and does not block otherwise. WCs of one QP come in
	// posting order.
	Poll(wcs []WC) int
	// Ready is a channel of capacity 1 that receives when, after a Poll that found
	// nothing, another may find something. A receive may be spurious; none is lost.
	// Where Waiter is used as well, Ready is called anew before each wait for the channel.
	Ready() <-chan struct{}
	Close() error
}

// Waiter is a CQ whose waiting goroutine can itself take in what connections bring,
// which saves being woken by another one.
type Waiter interface {
	// Wait returns true when Poll may find something, after a Wake, or after d, 0 being
	// no limit; perhaps earlier. It returns false, at once, if nothing that it could wait
	// for is outstanding, or if the CQ cannot do better than Ready at the moment. It belongs
	// to the goroutine that Polls.
	Wait(d time.Duration) bool
	// Wake makes the Wait under way, or else the next one, return. Any goroutine may call it.
	Wake()
}

// QPState is a QP's state, reduced to what an initiator meets.
type QPState uint8

const (
	StateRTS QPState = 1 + iota
	// StateErr: nothing posted from now on takes effect. WRs posted before may still land until the peer
	// confirms (Peer.Fence) or the QP is Closed.
	StateErr
	StateClosed
)

// QP is one reliable connection (RC) to a memory node.
//
// WRs take effect at the target in posting order, but for two exceptions. Adapters are allowed these
// (InfiniBand Architecture vol. 1, "Work Request Operation Ordering"), and Fence on the later WR takes them
// away. A READ may see a WRITE or an atomic that is behind it. Without Caps.AtomicThenRead, a READ may also
// miss an atomic in front of it. An unsignaled WR that succeeds produces no WC. A WR that fails always does,
// and every WR behind it completes with WRFlushErr, signaled or not.
type QP interface {
	Num() uint32
	// PostSend queues wrs in order behind one doorbell and returns how many it
	// took. n < len(wrs) comes with ErrQueueFull, ErrQPError or ErrClosed;
	// wrs[n:] were not posted and had no effect. It never blocks on the peer's
	// execution. It does not keep wrs.
	PostSend(wrs []WR) (n int, err error)
	State() QPState
	// Close moves the QP to error, flushes outstanding WRs (their WCs stay
	// readable on the CQ) and returns when none of the caller's buffers will be
	// touched any more.
	Close() error
}

// Aborter is a QP that can be closed without waiting for its peer. Providers
// whose Close waits for a confirmation have it.
type Aborter interface {
	// Abort is Close, at once: what was posted may still land, which is of no
	// interest if the peer's memory has been given up.
	Abort() error
}

// AgentAtomics is a QP that may differ from its device in who executes atomics:
// the target decides.
type AgentAtomics interface {
	// AtomicsByAgent: see Caps.AtomicsByAgent.
	AtomicsByAgent() bool
}

// DialRequest describes the active side's connection.
type DialRequest struct {
	PD   PD
	CQ   CQ
	Addr string
	// Private is handed to the Listener's Accept; at most MaxPrivate bytes.
	Private []byte
}

// MaxPrivate bounds DialRequest.Private (the tightest carrier, RDMA CM over
// InfiniBand RC, allows 56 bytes; ours is larger and framed by each provider).
const MaxPrivate = 512

// ConnRequest is what Accept decides on.
type ConnRequest struct {
	Private []byte // hostile until checked; valid during Accept only
	Remote  string // for logs: "10.0.0.1:5" or "pid 12 uid 0"
	Peer    Peer
	// TLS is the connection's state after the handshake; nil: it was set up in clear.
	TLS *tls.ConnectionState
}

// ListenOptions configure the passive side.
type ListenOptions struct {
	// Accept names the PD the new QP joins and the most rights it may use, or
	// refuses with an error whose text the dialer sees. It may be called
	// concurrently and must not block for long.
	Accept func(ConnRequest) (PD, Access, error)
	// Closed is called once when a connection is gone and nothing of it can
	// land any more. May be nil.
	Closed func(Peer)
}

// Peer is the passive side's handle on one connection.
type Peer interface {
	// Fence moves the QP to error and returns nil once nothing of it can land
	// in this side's memory any more, or an error if it cannot confirm within
	// ctx. Idempotent.
	Fence(ctx context.Context) error
	Remote() string
}

// Listener accepts connections.
type Listener interface {
	// Addr is what a dialer passes as DialRequest.Addr, with the port chosen.
	Addr() string
	// CPUNanos is the CPU time this process has spent executing verbs for its
	// peers; 0 for providers that need none.
	CPUNanos() int64
	// Close fences every peer and stops listening.
	Close() error
}
