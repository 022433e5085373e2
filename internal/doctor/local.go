package doctor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// unlimited is RLIM_INFINITY.
const unlimited = ^uint64(0)

// Local is this machine, as this process sees it; o says what a kvd process would
// be started with.
func Local(o verbs.Options) System {
	return System{
		FS:      os.DirFS("/"),
		Built:   verbs.Built,
		Devices: verbs.Devices,
		Choose:  func(ds []verbs.DeviceInfo) (verbs.Choice, error) { return verbs.Choose(ds, &o) },
		Memlock: func() (soft, hard uint64, err error) {
			var r unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
				return 0, 0, fmt.Errorf("getrlimit: %w", err)
			}
			return r.Cur, r.Max, nil
		},
		Release: func() (string, error) {
			var u unix.Utsname
			if err := unix.Uname(&u); err != nil {
				return "", fmt.Errorf("uname: %w", err)
			}
			return unix.ByteSliceToString(u.Release[:]), nil
		},
		Access: func(path string) error {
			return unix.Faccessat(unix.AT_FDCWD, path, unix.R_OK|unix.W_OK, unix.AT_EACCESS)
		},
		SharedMemory: func() error {
			m, err := mem.Alloc(1, driver.AllocOptions{Name: "kvctl-doctor", Shared: true})
			if err != nil {
				return err
			}
			b, err := mem.Map(m.FD, 1, unix.PROT_READ)
			if err == nil {
				err = mem.Unmap(b)
			}
			return errors.Join(err, m.Free())
		},
		Ethtool:    readEthtool,
		DCB:        readDCB,
		Interfaces: interfaces,
		CPUs:       runtime.NumCPU(),
	}
}

func interfaces() (out []Interface, err error) {
	ifs, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	for _, i := range ifs {
		in := Interface{Name: i.Name, MTU: i.MTU}
		as, err := i.Addrs()
		if err != nil {
			continue // it is gone
		}
		for _, a := range as {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				in.Addrs = append(in.Addrs, p.Addr())
			}
		}
		out = append(out, in)
	}
	return out, nil
}
