package dirpb

import (
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// EndpointName names a memory node's nth endpoint of a provider, from 1: "tcp", "tcp/2". Region keys have the name of
// their endpoint. Versions that know of one endpoint of a provider alone find the first one by the provider's name, and
// leave the others.
func EndpointName(provider string, nth int) string {
	if nth == 1 {
		return provider
	}
	return provider + "/" + strconv.Itoa(nth)
}

// Carrier is the provider by which an endpoint is reached.
func (e *Endpoint) Carrier() string {
	p, _, _ := strings.Cut(e.GetProvider(), "/")
	return p
}

// Addresses says where endpoints listen, for people.
func Addresses(all []*Endpoint) string {
	texts := make([]string, len(all))
	for i, e := range all {
		texts[i] = e.GetProvider() + " " + e.GetAddr()
	}
	return strings.Join(texts, ", ")
}

// Advertised is the address that clients dial of a listener at listen. That is advertise: a host, which takes the
// listener's port, or all of an address; or listen, if that is empty. An address that nobody can dial is an error.
func Advertised(listen, advertise string) (string, error) {
	host, port, err := net.SplitHostPort(listen)
	if advertise == "" {
		ip, perr := netip.ParseAddr(host)
		if err == nil && (host == "" || perr == nil && ip.IsUnspecified()) {
			return "", fmt.Errorf("listening on %s, which clients cannot dial: set Advertise to this machine's address",
				listen)
		}
		return listen, nil
	}
	if err != nil {
		return advertise, nil
	}
	switch h, p, err := net.SplitHostPort(advertise); {
	case err != nil:
		return net.JoinHostPort(strings.Trim(advertise, "[]"), port), nil
	case p == "0":
		return net.JoinHostPort(h, port), nil
	}
	return advertise, nil
}

// RandomID is a number that is not 0, and that nobody else draws: incarnations of memory, processes and folders are
// told apart by such.
func RandomID() uint64 {
	var b [8]byte
	for {
		rand.Read(b[:]) // crypto/rand: never fails
		if id := binary.LittleEndian.Uint64(b[:]); id != 0 {
			return id
		}
	}
}
