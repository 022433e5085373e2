package netsrv

import (
	"net"
	"time"
)

// Answered is a command that a server has answered, as it tells who traces commands. It has nothing that the client
// said.
type Answered struct {
	Command  string // its name in the server's own list, such as "get" or "config|set"
	Database string // the namespace
	Took     time.Duration
	// Error is the class of the error that was the answer, such as "WRONGTYPE"; empty: it was none. Unknown says of an
	// error that the command may have happened; any other did not.
	Error   string
	Unknown bool
	Client  net.Addr
}

// Exporter tells others of commands.
type Exporter interface {
	// Answered tells of a command of a protocol, such as "redis". It does not block.
	Answered(protocol string, a Answered)
	// Spans counts what has been told.
	Spans() (made, exported, failed uint64)
	// Close waits a moment for what has not been told yet.
	Close() error
}
