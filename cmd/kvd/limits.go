package main

import (
	"errors"
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/mem"
)

// errTooLow is what a limit that is too low now will end in when regions are
// made.
var errTooLow = errors.New("not all of the memory could be lent")

// checkLimits refuses at the start what would otherwise fail when the directory
// asks for regions.
func checkLimits(memory int64, hugePageBytes int, lock bool) error {
	var errs []error
	if hugePageBytes != 0 {
		want := (memory + int64(hugePageBytes) - 1) / int64(hugePageBytes)
		if free := mem.FreeHugePages(hugePageBytes); free < want {
			errs = append(errs, &mem.LimitError{
				Limit: fmt.Sprintf("HugePages_Free (%d MiB pages)", hugePageBytes>>20), Want: want, Have: free, Unit: "pages",
				Hint: fmt.Sprintf("reserve them through /sys/kernel/mm/hugepages/hugepages-%dkB/nr_hugepages", hugePageBytes>>10), Err: errTooLow,
			})
		}
	}
	if lock && !hasIPCLock() {
		var r unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err == nil && r.Cur < uint64(memory) {
			errs = append(errs, &mem.LimitError{
				Limit: "RLIMIT_MEMLOCK", Want: memory, Have: int64(min(r.Cur, math.MaxInt64)), Unit: "bytes",
				Hint: "raise it with LimitMEMLOCK= in the systemd unit or ulimit -l, or grant CAP_IPC_LOCK", Err: errTooLow,
			})
		}
	}
	return errors.Join(errs...)
}

// hasIPCLock tells whether the process may lock memory beyond its limit.
func hasIPCLock() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0
}
