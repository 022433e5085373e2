package driver

// Mapper is a QP whose target's memory can be seen without READs. Providers with Caps.Maps have it.
type Mapper interface {
	// Map shows the n bytes at addr of the MR that rkey names. It belongs to the goroutine that posts, and may wait
	// as the first use of an rkey does. It checks rkey, bounds and the right to READ when it is called and never
	// again: a fence does not end a Mapping. made says whether the system was asked for another mapping. ErrNotSupport:
	// this MR cannot be shown; ErrNoAccess: the target refuses it; other errors are of the connection.
	Map(rkey, addr uint64, n int) (m *Mapping, made bool, err error)
}

// Mapping is read-only memory of this process that shows bytes of a remote MR. Everybody else goes on changing them.
// It outlives the MR and the QP: bytes of an MR that was deregistered may become zero.
type Mapping struct {
	// Bytes must not be written to: that ends the process.
	Bytes []byte
	// FD is a descriptor, for reading, of the memory that Bytes is a part of, from byte Off on; -1: there is none. It
	// is the provider's until Release.
	FD  int
	Off int64

	release func()
}

// NewMapping wraps a provider's mapping; release gives it back.
func NewMapping(b []byte, fd int, off int64, release func()) *Mapping {
	return &Mapping{Bytes: b, FD: fd, Off: off, release: release}
}

// Release gives the mapping back: Bytes must not be used any more. It is called once, by any goroutine.
func (m *Mapping) Release() {
	m.Bytes, m.FD = nil, -1
	m.release()
}
