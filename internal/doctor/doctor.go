// Package doctor looks at a machine and says how well the providers shm, tcp and
// verbs will work on it. It also says what to do about what is in their way.
//
// It reads and never changes anything, opens no adapter by itself and sends
// nothing. Whether a peer can be reached is for kvctl perf to say. Start with
// [Examine], which turns a [System] into a list of [Finding]s, and [Local], the
// machine that this process runs on. A System is files and a few functions, so
// that tests can describe a machine they do not have. Examine may be called
// concurrently if the System's functions may; the caller owns what it returns.
//
// The content of files is taken for hostile: a file that cannot be read or
// makes no sense becomes a finding.
//
// The form, a mark a line and the command to run, is that of brew doctor and
// flutter doctor. Where the kernel tells what is in Documentation/ABI
// (sysfs-class-infiniband) and rdma-core's ibv_devinfo(1), rdma(8).
package doctor

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/kvd-project/kvd/rdma/verbs"
)

// Finding is the result of one check.
type Finding struct {
	Group  string `json:"group"` // what it is about: "adapter mlx5_0"
	Check  string `json:"check"`
	Level  Level  `json:"level"`
	Found  string `json:"found"`
	Advice string `json:"advice,omitempty"` // what to do, or empty
}

// Level says how bad a Finding is. The zero value is invalid.
type Level uint8

const (
	OK Level = 1 + iota
	// Note: it works, and could do with something, or means something.
	Note
	// Warn: something that is there does not work, or not well.
	Warn
	// Fail: a provider that must work does not.
	Fail
)

func (l Level) String() string {
	if l > Fail {
		l = 0
	}
	return [...]string{"invalid", "ok", "note", "warn", "fail"}[l]
}

// MarshalText is String.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// System is what Examine knows about a machine.
type System struct {
	// FS is the root of its files: /sys, /proc, /dev and /lib/modules are read.
	FS fs.FS
	// Built is verbs.Built, Devices is verbs.Devices.
	Built   bool
	Devices func() ([]verbs.DeviceInfo, error)
	// Choose picks the adapter, port and GID that a kvd process would.
	Choose func([]verbs.DeviceInfo) (verbs.Choice, error)
	// Memlock is RLIMIT_MEMLOCK, bytes; unlimited is all ones.
	Memlock func() (soft, hard uint64, err error)
	// Release is the kernel's: "6.12.9-amd64".
	Release func() (string, error)
	// Access tells why this user may not read and write a file; nil: it may.
	Access func(path string) error
	// SharedMemory makes a sealed memfd, and gives it back.
	SharedMemory func() error
	// Ethtool gives the statistics of an interface's driver, DCB its data center bridging.
	Ethtool func(dev string) (map[string]uint64, error)
	DCB     func(dev string) (DCB, error)
	// Interfaces gives name, MTU and addresses of the network interfaces.
	Interfaces func() ([]Interface, error)
	CPUs       int
}

// Providers are the names that Examine takes.
var Providers = []string{"shm", "tcp", "verbs"}

// Examine runs every check. Without the named provider the machine fails; "" is
// any store's need, shm and tcp.
func Examine(s System, provider string) []Finding {
	x := &exam{System: s, provider: provider}
	x.host()
	x.modules()
	x.binary()
	x.adapters()
	x.memory()
	x.network()
	x.keepers()
	x.providers()
	return x.out
}

// exam is one run of Examine.
type exam struct {
	System
	provider string
	out      []Finding
	group    string

	container string // which kind, or empty
	vm        string // the virtual machine's maker, or empty
	devices   []adapter
	listErr   error    // from Devices
	loaded    []string // kernel modules, loaded or built in
	available []string // kernel modules, to be loaded
	noModules error    // why available is not known
}

// add reports a finding of the group that is being looked at.
func (x *exam) add(l Level, check, found, advice string) {
	x.out = append(x.out, Finding{x.group, printable(check), l, printable(found), printable(advice)})
}

// unknown reports that a check could not be made.
func (x *exam) unknown(check string, err error) { x.add(Warn, check, err.Error(), "") }

// printable is one line, and not a long one, whatever files held.
func printable(s string) string {
	const most = 1500
	s = strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' {
			return ' '
		}
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
	if r := []rune(s); len(r) > most {
		s = string(r[:most]) + "…"
	}
	return s
}

// maxFile bounds what is read of one file, bytes; modules.dep has about 1 MB.
const maxFile = 8 << 20

// read gives a file's text without the space around it. The error names the file
// as people know it; it keeps wrapping fs.ErrNotExist and its like.
func (x *exam) read(path string) (string, error) {
	f, err := x.FS.Open(path)
	if err != nil {
		return "", cannotRead(path, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return "", cannotRead(path, err)
	}
	return strings.TrimSpace(string(b)), nil
}

func cannotRead(path string, err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		err = p.Err
	}
	return fmt.Errorf("cannot read /%s: %w", path, err)
}

func (x *exam) readInt(path string) (int64, error) {
	s, err := x.read(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return 0, cannotRead(path, fmt.Errorf("%.40q is not a number", s))
	}
	return n, nil
}

// list gives the names in a folder, numbers in their order. A folder that is not
// there is an empty one.
func (x *exam) list(path string) ([]string, error) {
	ds, err := fs.ReadDir(x.FS, path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, cannotRead(path, err)
	}
	var names []string
	for _, d := range ds {
		names = append(names, d.Name())
	}
	slices.SortFunc(names, func(a, b string) int {
		if len(a) != len(b) && isDigits(a) && isDigits(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
	return names, nil
}

func isDigits(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' }) < 0
}

func (x *exam) exists(path string) bool {
	_, err := fs.Stat(x.FS, path)
	return err == nil
}

// size prints bytes for people.
func size(n uint64) string {
	switch {
	case n == unlimited:
		return "unlimited"
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 10<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
