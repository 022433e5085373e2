// Package loopback gives tests addresses at which a server may stop and begin to listen again.
//
// A port of 127.0.0.1 that was free a moment ago may be the local end of somebody's outgoing connection by now, whose kernel chose it,
// and then nobody can listen there. Outgoing connections of other programs do not begin at another address of 127.0.0.0/8. Start with [Free].
package loopback

import (
	"fmt"
	"net"
	"os"
)

// Host is a loopback address of this process alone, as far as no other has the same lower 22 bits of a pid.
func Host() string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>16&0x3f, pid>>8&0xff, pid&0xff)
}

// Free is an address of [Host] at which nobody listens, until somebody is told of it. It may be called concurrently.
func Free() (string, error) {
	l, err := net.Listen("tcp", net.JoinHostPort(Host(), "0"))
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}
