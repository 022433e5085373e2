package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime/debug"
	"strings"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/config"
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
				Limit: fmt.Sprintf("HugePages_Free (%d MiB pages)", hugePageBytes>>20), Want: want, Have: free,
				Unit: "pages",
				Hint: fmt.Sprintf("reserve them through /sys/kernel/mm/hugepages/hugepages-%dkB/nr_hugepages",
					hugePageBytes>>10), Err: errTooLow,
			})
		}
	}
	if lock && !hasIPCLock() {
		var r unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err == nil && r.Cur < uint64(memory) {
			errs = append(errs, &mem.LimitError{
				Limit: "RLIMIT_MEMLOCK", Want: memory, Have: int64(min(r.Cur, math.MaxInt64)), Unit: "bytes",
				Hint: "raise it with LimitMEMLOCK= in the systemd unit or ulimit -l, or grant CAP_IPC_LOCK",
				Err:  errTooLow,
			})
		}
	}
	return errors.Join(errs...)
}

// checkLent refuses to lend want bytes beyond what there is. of says what these are.
func checkLent(r mem.Limits, of string, want int64) error {
	var have []string
	if r.Machine != 0 && uint64(want) > r.Machine {
		have = append(have, "this machine has "+mib(r.Machine))
	}
	if r.Group != 0 && uint64(want) > r.Group {
		have = append(have, "its control group (cgroup) allows "+mib(r.Group))
	}
	if len(have) == 0 {
		return nil
	}
	return fmt.Errorf("%s: that is %s, and %s, beyond which processes are killed: lend less, or set overcommit", of,
		mib(uint64(want)), strings.Join(have, " and "))
}

// mib writes bytes so that two amounts can be compared.
func mib(n uint64) string {
	if n < 10<<30 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}

// checkRoom refuses to lend more memory than there is, unless overcommit says so. A pool of huge pages has a size of
// its own, which checkLimits looks at. Memory that is there already is not refused: its next process would leave it to
// nobody.
func checkRoom(c *config.MemNode, kept bool, r mem.Limits, log *slog.Logger) error {
	if c.Overcommit || c.HugePageBytes() != 0 {
		return nil
	}
	err := checkLent(r, "memory "+c.Memory.String(), int64(c.Memory))
	if err != nil && kept {
		log.Error("memory of the process before is served, but there is less than may be lent", "err", err)
		return nil
	}
	return err
}

// devMemory is what each memory node of a store in one process lends: what was asked for, which is refused if there is
// less, or else the default, or less of it, so that all of them together lend half of what there is at most.
func devMemory(c *config.Dev, asked bool, r mem.Limits, log *slog.Logger) (config.Size, error) {
	all := c.Memory * config.Size(c.Memnodes)
	if asked {
		if c.Overcommit {
			return c.Memory, nil
		}
		return c.Memory, checkLent(r, fmt.Sprintf("memory %v of each of %d memory nodes", c.Memory, c.Memnodes),
			int64(all))
	}
	most := config.Size(r.Least() / 2)
	if most == 0 || all <= most || c.Overcommit {
		return c.Memory, nil
	}
	less := max(most/config.Size(c.Memnodes)/(16<<20)*(16<<20), config.MinMemory)
	log.Warn("memory nodes lend less than usual, as there is little memory here", "memory", less.String(), "usual",
		c.Memory.String(), "there_is", mib(r.Least()),
		"hint", "set memory to choose another size")
	return less, nil
}

// connLimit is how many connections each of some servers may have if so many are wanted: their
// descriptors must leave some for everything else. The log is told if that is less than somebody asked for.
func connLimit(want, servers int, asked bool, log *slog.Logger) int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return want
	}
	most := int(min(r.Cur-min(r.Cur/4, filesKept), math.MaxInt32)) / servers
	if most = max(most, 1); want <= most {
		return want
	}
	level := slog.LevelDebug
	if asked {
		level = slog.LevelWarn
	}
	log.Log(context.Background(), level, "fewer connections are taken than max-connections allows: the process may "+
		"not have that many open files",
		"max_connections", want, "taken", most, "RLIMIT_NOFILE", r.Cur, "hint",
		"raise it with LimitNOFILE= in the systemd unit or ulimit -n")
	return most
}

// filesOf is how many open files a role needs at least: a few times what it has without clients. With fewer it would
// begin, and stop somewhere at the first that it cannot open.
func filesOf(s config.Settings) uint64 {
	if dev, ok := s.(*config.Dev); ok {
		return 128 + 64*uint64(dev.Memnodes)
	}
	return 128
}

// checkFiles refuses a process that may not have the open files that its role needs.
func checkFiles(s config.Settings) error {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || r.Cur >= filesOf(s) {
		return nil
	}
	return fmt.Errorf("RLIMIT_NOFILE is %d open files, want at least %d: raise it with LimitNOFILE= in the systemd "+
		"unit or ulimit -n", r.Cur, filesOf(s))
}

// filesKept of the open files that a process may have, but no more than a quarter, are not for the
// connections of clients.
const filesKept = 4096

// hasIPCLock tells whether the process may lock memory beyond its limit.
func hasIPCLock() bool {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return false
	}
	return data[0].Effective&(1<<unix.CAP_IPC_LOCK) != 0
}

// collectSeldom has garbage collected when the heap is five times of what lived after the last time, and not twice, or
// when the process has nine tenths of the memory that its control group allows: a collection looks at the stacks of
// thousands of connections, and renewals that come meanwhile wait for it. GOGC and GOMEMLIMIT count if they are set.
func collectSeldom(log *slog.Logger) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
	limit := func() (uint64, error) {
		if n := mem.Limited().Least(); n != 0 {
			return n, nil
		}
		return 0, memlimit.ErrNoLimit
	}
	if _, err := memlimit.Set(memlimit.WithProvider(limit)); err != nil {
		log.Warn("the memory that the process may use is not known: set GOMEMLIMIT if it is less than the machine's",
			"err", err)
	}
}
