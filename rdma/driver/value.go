package driver

import "sync"

// Value is the second SGE of a READ or a WRITE: memory of any kind for the remote bytes behind those of Local.
// It is meant for long values, which so move between the region and their user in one pass, CRC included.
//
// The provider has it, and what it refers to, from PostSend on until it gives Local back. Then the caller reads N and
// CRC, and may set all fields anew. If the WR failed, Bytes of a READ may have changed, and N and CRC mean nothing.
//
// Start and Seal are called at most once, by whichever goroutine moves the bytes. They must neither block nor use the
// QP or its CQ.
type Value struct {
	// Bytes is where a READ puts what is behind Local's bytes, or where a WRITE takes it from. Not empty.
	Bytes []byte
	// Slack is how many bytes behind Bytes a READ covers as well. They must lie in the remote MR, and are thrown away.
	Slack int
	// Start, unless nil, is called by a READ when Local is filled. It says how many of Bytes count, and which CRC-32C
	// theirs goes on from. If n is less than 0 or more than len(Bytes) the READ succeeds with N = -1. A nil Start has
	// all of Bytes count, and no CRC taken.
	Start func(local []byte) (n int, crc uint32)
	// Seal, unless nil, is called by a WRITE when all of Bytes is read, and before anything of Local is. It may change
	// Local. crc is the CRC-32C of the bytes that the WRITE stores behind Local, from CRC on.
	Seal func(local []byte, crc uint32)
	// N is how many of Bytes a READ has filled. The others may have changed, and mean nothing. -1: none count.
	N int
	// CRC is, after a READ with Start, the CRC-32C of Bytes[:N] from Start's on. Before a WRITE with Seal the caller
	// sets it: the CRC of Bytes goes on from it.
	CRC uint32
	// SGEs are where the bytes behind Local's go, or come from, one piece after the other. Package rdma sets them for
	// providers that lack AnyMemory or Sums: at least one, and Caps.MaxSGE-1 at most. Bytes, Start, Seal, N and CRC
	// are not set then. If Slack is not 0, the last piece is for what is thrown away.
	SGEs []SGE

	mu     sync.Mutex
	own    []byte // what there is instead of Bytes after Detach
	lender Lender // nil: Bytes is not lent
}

// SGE is a piece of local memory. It lies inside the local MR that LKey names.
type SGE struct {
	Bytes []byte
	LKey  uint64
}

// Lender has lent Bytes of Values to WRs under way.
type Lender interface {
	// Await returns when v is not lent any more. Any goroutine may call it.
	Await(v *Value)
}

// Detach returns when Bytes is not touched any more. WRs under way, and later ones, go on with a copy. It waits for a
// part of the transfer. If an adapter has Bytes itself it waits for the WC, and closes the QP if that takes long. Any
// goroutine may call it, before PostSend too. A Value that was detached is not used for anything else afterwards.
func (v *Value) Detach() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.lender != nil {
		l := v.lender
		v.mu.Unlock()
		l.Await(v)
		v.mu.Lock()
	}
	if v.own == nil {
		v.own = append([]byte(nil), v.Bytes...)
	}
}

// Acquire gives a provider what it may touch until Release, which is to come soon: len(Bytes) bytes.
func (v *Value) Acquire() []byte {
	v.mu.Lock()
	if v.own != nil {
		return v.own
	}
	return v.Bytes
}

// Release ends Acquire.
func (v *Value) Release() { v.mu.Unlock() }

// Lend gives Bytes to a WR until Return: Detach waits by l meanwhile. It reports false, and lends nothing, if the Value
// was detached.
func (v *Value) Lend(l Lender) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.own != nil {
		return false
	}
	v.lender = l
	return true
}

// Return ends Lend.
func (v *Value) Return() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lender = nil
}

// IsLent reports whether Lend was called, and Return was not yet.
func (v *Value) IsLent() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.lender != nil
}

// Open calls Start, and gives how many of Bytes a READ is to fill and which CRC to go on from. It sets N.
func (v *Value) Open(local []byte) (n int, crc uint32) {
	n = len(v.Bytes)
	if v.Start != nil {
		n, crc = v.Start(local)
	}
	if v.N = n; n < 0 || n > len(v.Bytes) {
		n, v.N = 0, -1
	}
	return n, crc
}

// Len is how many remote bytes the WR covers.
func (w *WR) Len() int {
	n := len(w.Local)
	switch v := w.Value; {
	case v == nil:
	case v.SGEs == nil:
		n += len(v.Bytes) + v.Slack
	default:
		for i := range v.SGEs {
			n += len(v.SGEs[i].Bytes)
		}
	}
	return n
}

// Formed tells whether the Value of a WR that has one is in order, beside what holds for every WR: maxMsg is
// Caps.MaxMsg.
func (v *Value) Formed(w *WR, maxMsg int) bool {
	n, slack := len(v.Bytes), v.Slack
	return n > 0 && n <= maxMsg && slack >= 0 && slack <= maxMsg && len(w.Local)+n+slack <= maxMsg &&
		w.Flags&Inline == 0 && (w.Op == OpRead || w.Op == OpWrite && slack == 0)
}
