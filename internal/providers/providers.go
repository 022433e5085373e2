// Package providers is the map from a provider's name, as flags and
// configuration files spell it, to its opener. Commands import it, and tests;
// libraries are handed opened devices.
//
// It leaves what a provider is to package driver. [Open] and [Names] are all of
// it; both may be called concurrently. The caller owns the device and closes it.
// The shape follows database/sql, without a registry to fill at run time.
package providers

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/shm"
	"github.com/kvd-project/kvd/rdma/tcp"
)

// ErrUnknown means that no provider has the name.
var ErrUnknown = errors.New("unknown provider")

// Options are what commands know about a provider's surroundings.
type Options struct {
	// TLSServer and TLSClient are for providers that talk over a network; nil
	// means in clear.
	TLSServer, TLSClient *tls.Config
}

// openers is ordered from the provider a client likes best.
var openers = []struct {
	name string
	open func(Options) (*rdma.Device, error)
}{
	{"shm", func(Options) (*rdma.Device, error) {
		d, err := shm.Open(shm.Options{})
		if err != nil {
			return nil, err
		}
		return rdma.NewDevice("shm", d), nil
	}},
	{"tcp", func(o Options) (*rdma.Device, error) {
		d, err := tcp.Open(tcp.Options{TLSServer: o.TLSServer, TLSClient: o.TLSClient})
		if err != nil {
			return nil, err
		}
		return rdma.NewDevice("tcp", d), nil
	}},
}

// Open opens the provider of that name.
func Open(name string, o Options) (*rdma.Device, error) {
	for _, p := range openers {
		if p.name == name {
			return p.open(o)
		}
	}
	return nil, fmt.Errorf("%w %q, want one of %s", ErrUnknown, name, strings.Join(Names(), ", "))
}

// Names lists the providers, the one that a client prefers first.
func Names() []string {
	var names []string
	for _, p := range openers {
		names = append(names, p.name)
	}
	return slices.Clip(names)
}
