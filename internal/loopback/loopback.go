// Package loopback gives tests addresses at which a server may stop and begin to listen again.
//
// A port that a kernel has chosen, and that was free a moment ago, may by now be the local end of somebody's outgoing
// connection. It may also be chosen for another listener on port 0. Then nobody can listen there. So these ports are
// none that kernels choose, and a process gives each once, while there are others. Outgoing connections of other
// programs do not begin at another address of 127.0.0.0/8, either. Start with [Free].
package loopback

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
)

// Ports from firstPort on, so many, are free to give: Linux chooses from 32768 on, if nobody has changed that.
const firstPort, ports = 16384, 16384

// looked counts the ports that were looked at.
var looked atomic.Uint32

// port is the nth that this process looks at. Each process begins somewhere else, since all may give those of
// 127.0.0.1.
func port(n uint32) string { return strconv.Itoa(firstPort + int((uint32(os.Getpid())*997+n)%ports)) }

// Host is a loopback address of this process alone, unless another has the same lower 22 bits of a pid.
func Host() string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>16&0x3f, pid>>8&0xff, pid&0xff)
}

// Free is an address of [Host] at which nobody listens, until somebody is told of it. It may be called concurrently.
func Free() (string, error) { return FreeAt(Host()) }

// FreeAt is an address of a host at which nobody listens. Another process may be given the same one later, unless the
// host is [Host].
func FreeAt(host string) (addr string, err error) {
	for range ports {
		var l net.Listener
		l, err = net.Listen("tcp", net.JoinHostPort(host, port(looked.Add(1))))
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return "", err
		}
		return l.Addr().String(), l.Close()
	}
	return "", err
}
