// Package providers is the map from a provider's name, as flags and
// configuration files spell it, to its opener. Commands import it, tests, and
// package client for those who name no device; other libraries are handed opened
// devices.
//
// It leaves what a provider is to package driver. Start with [OpenFor], or with [Open] for one
// device. All functions may be called concurrently. The caller owns a device and closes
// it.
// The shape follows database/sql, without a registry to fill at run time.
package providers

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/shm"
	"github.com/kvd-project/kvd/rdma/tcp"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// ErrUnknown means that no provider has the name.
var ErrUnknown = errors.New("unknown provider")

// ErrUnavailable means that this machine, or this binary, cannot use the provider.
var ErrUnavailable = verbs.ErrUnavailable

// RequireRDMA is the one value of Options.Require beside none, of client.Options.Require and of the setting require.
const RequireRDMA = "rdma"

// CheckRequire says what is wrong with require beside provider.
func CheckRequire(require, provider string) error {
	switch {
	case require != "" && require != RequireRDMA:
		return fmt.Errorf("want %s, or nothing", RequireRDMA)
	case require == RequireRDMA && provider != "" && provider != "verbs":
		return fmt.Errorf("provider is %s, and only verbs is RDMA", provider)
	}
	return nil
}

// Options are what commands know about a provider's surroundings.
type Options struct {
	// TLSServer and TLSClient are for providers that talk over a network; nil
	// means in clear.
	TLSServer, TLSClient *tls.Config
	// Identities says how memory nodes' certificates name their owners, for OpenFor.
	Identities identity.Mapping
	// TCPDoor and ShmDoor are those providers' Options.Door.
	TCPDoor, ShmDoor *netsrv.Door
	// TCPSocket and ShmSocket are those providers' Options.Socket, and ShmCells is Options.Cells.
	TCPSocket, ShmSocket func(addr string, listen func() (net.Listener, error)) (net.Listener, error)
	ShmCells             shm.Cells
	// Require is RequireRDMA, or empty. Then OpenFor opens no provider but verbs.
	Require string
	// Verbs choose the adapter; TLS is filled in. Its Logger also hears which
	// provider OpenFor leaves out. For OpenFor, Device may be several, with commas between.
	Verbs verbs.Options
}

// openers is ordered from the provider a client likes best.
var openers = []struct {
	name string
	open func(Options) (*rdma.Device, error)
}{
	{"verbs", func(o Options) (*rdma.Device, error) {
		o.Verbs.TLSServer, o.Verbs.TLSClient = o.TLSServer, o.TLSClient
		d, err := verbs.Open(o.Verbs)
		if err != nil {
			return nil, err
		}
		return rdma.NewDevice("verbs", d), nil
	}},
	{"shm", func(o Options) (*rdma.Device, error) {
		d, err := shm.Open(shm.Options{Door: o.ShmDoor, Socket: o.ShmSocket, Cells: o.ShmCells})
		if err != nil {
			return nil, err
		}
		return rdma.NewDevice("shm", d), nil
	}},
	{"tcp", func(o Options) (*rdma.Device, error) {
		d, err := tcp.Open(tcp.Options{TLSServer: o.TLSServer, TLSClient: o.TLSClient, Door: o.TCPDoor,
			Socket: o.TCPSocket})
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

// OpenFor opens the devices that a client reaches memory nodes by. With a name, that is the
// provider of that name alone. Without one, that is every provider that this machine can
// use; the one that a client prefers comes first. If verbs was left out, the others know why (rdma.Device.PassedOver).
// With TLS, they connect to peers of the role memnode alone.
func OpenFor(provider string, o Options) (devices []*rdma.Device, err error) {
	o.TLSClient = o.Identities.Called(o.TLSClient, identity.MemNode)
	if err := CheckRequire(o.Require, provider); err != nil {
		return nil, fmt.Errorf("require %q: %w", o.Require, err)
	}
	if o.Require == RequireRDMA {
		devices, err := openVerbs(o)
		if err != nil {
			return nil, fmt.Errorf("require is %s, so no other provider takes its place: %w", RequireRDMA, err)
		}
		return devices, nil
	}
	if provider != "" {
		if provider == "verbs" {
			return openVerbs(o)
		}
		d, err := Open(provider, o)
		if err != nil {
			return nil, err
		}
		return []*rdma.Device{d}, nil
	}
	var why error // why verbs, which comes first, was left out
	for _, p := range openers {
		var ds []*rdma.Device
		var err error
		if p.name == "verbs" {
			ds, err = openVerbs(o)
		} else if d, derr := p.open(o); derr != nil {
			err = derr
		} else {
			ds = []*rdma.Device{d}
		}
		switch {
		case err == nil:
			for _, d := range ds {
				d.PassOver(why)
			}
			devices = append(devices, ds...)
		case errors.Is(err, ErrUnavailable) && (verbs.Built || o.Verbs.Device == ""):
			why = err
			if l := o.Verbs.Logger; l != nil && verbs.Built {
				l.Info("provider left out", "provider", p.name, "reason", err)
			}
		default:
			return nil, fmt.Errorf("%s: %w", p.name, errors.Join(err, Close(devices)))
		}
	}
	return devices, nil
}

// openVerbs opens the adapters, or their ports, that o.Verbs.Device lists with commas between. Those that are
// unavailable are left out if there are others.
func openVerbs(o Options) (devices []*rdma.Device, err error) {
	var errs []error
	list := o.Verbs.Device
	for _, o.Verbs.Device = range strings.Split(list, ",") {
		o.Verbs.Device = strings.TrimSpace(o.Verbs.Device)
		d, err := Open("verbs", o)
		switch {
		case err == nil:
			devices = append(devices, d)
		case !errors.Is(err, ErrUnavailable):
			return nil, errors.Join(err, Close(devices))
		default:
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil && len(devices) == 0 {
		return nil, err
	} else if l := o.Verbs.Logger; err != nil && l != nil {
		l.Warn("an RDMA adapter is left out", "reason", err)
	}
	return devices, nil
}

// Close closes all the devices.
func Close(devices []*rdma.Device) error {
	var errs []error
	for _, d := range devices {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

// Names lists the providers, the one that a client prefers first.
func Names() []string {
	var names []string
	for _, p := range openers {
		names = append(names, p.name)
	}
	return slices.Clip(names)
}
