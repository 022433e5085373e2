package gateway

import (
	"net"
	"syscall"

	"github.com/kvd-project/kvd/internal/loop"
)

// input reads a connection outside of a loop, as loop.ReadNow does. It waits as net.Conn does, until its deadline.
// The connection's goroutine alone uses it.
type input struct {
	nc   net.Conn
	raw  syscall.RawConn // nil: nc reads
	read func(fd uintptr) bool
	// read's argument and answers.
	p   []byte
	n   int
	err error
}

// over says where to read from; raw is nc's, see rawOf.
func (in *input) over(nc net.Conn, raw syscall.RawConn) {
	in.nc, in.raw = nc, raw
	if in.read == nil { // made once, since it would be allocated for every read otherwise
		in.read = func(fd uintptr) bool {
			in.n, in.err = loop.ReadNow(fd, in.p)
			return in.err != loop.ErrNothing
		}
	}
}

func (in *input) Read(p []byte) (int, error) {
	if in.raw == nil {
		return in.nc.Read(p)
	}
	in.p, in.n, in.err = p, 0, nil
	err := in.raw.Read(in.read)
	in.p = nil
	if err == nil {
		err = in.err
	}
	return in.n, err
}

// over makes nc what the connection reads from and writes to, when it begins and when it has left a loop.
func (c *conn) over(nc net.Conn) {
	raw := rawOf(nc)
	c.nc = nc
	c.out.over(nc, raw)
	c.incoming.over(nc, raw)
}

// rawOf is the socket of a connection, nil if it has none of its own: with TLS, for one, what is read is not what it
// says.
func rawOf(nc net.Conn) syscall.RawConn {
	switch nc.(type) {
	case *net.TCPConn, *net.UnixConn:
		if raw, err := nc.(syscall.Conn).SyscallConn(); err == nil {
			return raw
		}
	}
	return nil
}
