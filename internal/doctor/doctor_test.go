package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"unicode"

	"github.com/cockroachdb/datadriven"

	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/verbs"
)

// files is a machine's, some of them unreadable.
type files struct {
	m   fstest.MapFS
	bad map[string]error
}

func (f files) Open(name string) (fs.File, error) {
	if err := f.bad[name]; err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return f.m.Open(name)
}

// machine is a System under construction.
type machine struct {
	files
	s        System
	provider string
	asked    []verbs.DeviceInfo // from libibverbs
	askedErr error
	denied   map[string]bool
	stats    map[string]uint64 // every interface's, of ethtool
	dcb      *DCB              // likewise
}

// newMachine is one without adapters, on which nothing is wrong.
func newMachine() *machine {
	m := &machine{files: files{fstest.MapFS{}, map[string]error{}}, denied: map[string]bool{}}
	m.describe(`
proc/modules = "ib_core 1 0 - Live 0x0\n"
proc/self/status = "Name:\tx\nCapEff:\t0000000000000000\n"
proc/self/uid_map = "         0          0 4294967295"
proc/self/cgroup = 0::/user.slice
proc/sys/net/core/rmem_max = 4194304
proc/sys/net/core/wmem_max = 4194304
lib/modules/6.12.9/modules.builtin = kernel/drivers/infiniband/sw/siw/siw.ko
lib/modules/6.12.9/modules.dep = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz\nkernel/drivers/infiniband/core/ib-uverbs.ko:\n"
sys/kernel/mm/hugepages/hugepages-2048kB/
  nr_hugepages = 512
  free_hugepages = 500
  resv_hugepages = 12
sys/kernel/mm/hugepages/hugepages-1048576kB/
  nr_hugepages = 4
  free_hugepages = 4
  resv_hugepages = 0
sys/kernel/mm/transparent_hugepage/
  enabled = always [madvise] never
  shmem_enabled = always within_size [advise] never deny force
sys/class/net/
  lo/operstate = unknown
  lo/type = 772
  eno1/operstate = down
  eno1/type = 1
  wlan0/operstate = up
  wlan0/type = 1
`)
	m.s = System{
		FS:      m.files,
		Devices: func() ([]verbs.DeviceInfo, error) { return m.asked, m.askedErr },
		Choose: func(ds []verbs.DeviceInfo) (verbs.Choice, error) {
			return verbs.Choose(ds, &verbs.Options{})
		},
		Memlock: func() (uint64, uint64, error) { return unlimited, unlimited, nil },
		Release: func() (string, error) { return "6.12.9", nil },
		Access: func(p string) error {
			if m.denied[p] {
				return syscall.EACCES
			}
			return nil
		},
		SharedMemory: func() error { return nil },
		Ethtool: func(string) (map[string]uint64, error) {
			if m.stats == nil {
				return nil, syscall.EOPNOTSUPP
			}
			return m.stats, nil
		},
		DCB: func(string) (DCB, error) {
			if m.dcb == nil {
				return DCB{}, syscall.EOPNOTSUPP
			}
			return *m.dcb, nil
		},
		Interfaces: func() ([]Interface, error) {
			return []Interface{{Name: "ens1np0", MTU: 9000, Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.7")}}}, nil
		},
		CPUs: 8,
	}
	return m
}

// describe adds files: "path = text", where text may be a Go string; "path ! why"
// cannot be read; "path -" is not there. Lines that are indented are below the
// folder named before.
func (m *machine) describe(text string) {
	dir := ""
	for line := range strings.Lines(text) {
		name := strings.TrimSpace(line)
		if name == "" {
			continue
		}
		if line[0] != ' ' {
			dir = ""
		}
		if strings.HasSuffix(name, "/") {
			dir = name
			m.m[strings.TrimSuffix(name, "/")] = &fstest.MapFile{Mode: fs.ModeDir | 0o755}
			continue
		}
		if p, why, ok := strings.Cut(name, " ! "); ok {
			m.m[dir+p], m.bad[dir+p] = &fstest.MapFile{}, errors.New(why)
			continue
		}
		if p, ok := strings.CutSuffix(name, " -"); ok {
			delete(m.m, dir+p)
			continue
		}
		p, v, _ := strings.Cut(name, " =")
		v = strings.TrimSpace(v)
		if q, err := strconv.Unquote(v); err == nil {
			v = q
		}
		m.m[dir+p] = &fstest.MapFile{Data: []byte(v + "\n")}
	}
}

// setUp reads a directive's arguments and its files.
func (m *machine) setUp(t *testing.T, d *datadriven.TestData) {
	m.describe(d.Input)
	number := func(s string) uint64 {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			d.Fatalf(t, "%v", err)
		}
		return n
	}
	for _, a := range d.CmdArgs {
		switch a.Key {
		case "provider":
			m.provider = a.Vals[0]
		case "release":
			m.s.Release = func() (string, error) { return a.Vals[0], nil }
		case "memlock": // soft, hard
			m.s.Memlock = func() (uint64, uint64, error) { return number(a.Vals[0]), number(a.Vals[1]), nil }
		case "deny":
			m.denied[a.Vals[0]] = true
		case "ethtool": // name:value
			m.stats = map[string]uint64{}
			for _, v := range a.Vals {
				name, n, _ := strings.Cut(v, ":")
				m.stats[name] = number(n)
			}
		case "pfc": // bits of priorities
			m.dcb = cmp.Or(m.dcb, &DCB{})
			m.dcb.PFC = uint8(number(a.Vals[0]))
		case "dscp": // dscp:priority
			m.dcb = cmp.Or(m.dcb, &DCB{})
			m.dcb.DSCP = map[int]uint8{}
			for _, v := range a.Vals {
				dscp, prio, _ := strings.Cut(v, ":")
				m.dcb.DSCP[int(number(dscp))] = uint8(number(prio))
			}
		case "no-memfd":
			m.s.SharedMemory = func() error { return errors.New("memfd_create: permission denied") }
		case "library": // what libibverbs says: "none", or mtu and atomics of each adapter
			m.s.Built = true
			if a.Vals[0] == "none" {
				m.askedErr = fmt.Errorf("%w: libibverbs.so.1 not found", verbs.ErrUnavailable)
				continue
			}
			x := &exam{System: m.s}
			names, err := x.list(sysAdapters)
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			for _, n := range names {
				in := x.fromSysfs(n).DeviceInfo
				if a.Vals[0] == "refuses" {
					m.asked = append(m.asked, verbs.DeviceInfo{Name: n, Err: syscall.EACCES})
					continue
				}
				in.MemoryWindows, in.MaxQPRdAtom, in.MaxInitRdAtom = "type 1 and 2", 16, 16
				in.Atomics = map[string]driver.AtomicScope{"none": driver.AtomicNone, "hca": driver.AtomicHCA,
					"glob": driver.AtomicCPU}[a.Vals[1]]
				for i := range in.Ports {
					in.Ports[i].MTU, in.Ports[i].MaxMTU = int(number(a.Vals[0])), 4096
				}
				m.asked = append(m.asked, in)
			}
		default:
			d.Fatalf(t, "unknown argument %q", a.Key)
		}
	}
}

func (m *machine) examine() []Finding { return Examine(m.s, m.provider) }

// Each file of testdata/machines describes machines and what is said of them: all of it, or
// after "machine" what is not said of one where nothing is wrong as well.
func TestMachines(t *testing.T) {
	plain := map[Finding]bool{}
	for _, f := range newMachine().examine() {
		plain[f] = true
	}
	datadriven.Walk(t, "testdata/machines", func(t *testing.T, path string) {
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			m := newMachine()
			m.setUp(t, d)
			var out strings.Builder
			group := ""
			for _, f := range m.examine() {
				if d.Cmd == "machine" && plain[f] {
					continue
				}
				if f.Group != group {
					group = f.Group
					fmt.Fprintln(&out, group)
				}
				fmt.Fprintf(&out, "  %v %s: %s\n", f.Level, f.Check, f.Found)
				if f.Advice != "" {
					fmt.Fprintf(&out, "    -> %s\n", f.Advice)
				}
			}
			return out.String()
		})
	})
}

// There are findings that print, in all groups, without a command that the file has written, whatever a
// file says, and if it cannot be read.
func TestHostileFiles(t *testing.T) {
	check := func(what string, m *machine) {
		t.Helper()
		var groups []string
		for _, f := range m.examine() {
			if !slices.Contains(groups, f.Group) {
				groups = append(groups, f.Group)
			}
			if f.Check == "" || f.Found == "" || f.Level < OK || f.Level > Fail {
				t.Errorf("%s: incomplete %+v", what, f)
			}
			for _, s := range []string{f.Group, f.Check, f.Found, f.Advice} {
				if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 || len(s) > 8192 {
					t.Errorf("%s: does not print: %q", what, s)
				}
			}
			if strings.Contains(f.Advice, "reboot") {
				t.Errorf("%s: advice %q", what, f.Advice)
			}
		}
		for _, g := range []string{"machine", "kernel modules", "this program", "adapters", "memory", "network",
			"providers"} {
			if !slices.Contains(groups, g) {
				t.Errorf("%s: nothing about %s", what, g)
			}
		}
	}
	n := 0
	paths, err := filepath.Glob("testdata/machines/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		f, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		datadriven.RunTestFromString(t, string(f), func(t *testing.T, d *datadriven.TestData) string {
			base := newMachine()
			base.setUp(t, d)
			for _, name := range slices.Sorted(maps.Keys(base.m)) {
				for _, bad := range []string{"", "\n", "-1", "99999999999999999999999", "0xffffffff", ":", "4:",
					"$(reboot);`reboot`", "../../../../reboot",
					"\x00\xff\x1b[2J\r\n\u202e", strings.Repeat("a b:=,/[", 1<<9), "0::/../../x\n1:rdma:/y\n::\n"} {
					m := newMachine()
					m.setUp(t, d)
					m.m[name] = &fstest.MapFile{Data: []byte(bad)}
					check(fmt.Sprintf("%s: %.20q", name, bad), m)
					n++
				}
				m := newMachine()
				m.setUp(t, d)
				m.bad[name] = syscall.EACCES
				check(name+" unreadable", m)
			}
			return d.Expected
		})
	}
	if n < 1000 {
		t.Errorf("only %d machines", n)
	}
}

// This machine can be examined, and shares memory.
func TestLocal(t *testing.T) {
	fs := Examine(Local(verbs.Options{}), "")
	i := slices.IndexFunc(fs, func(f Finding) bool { return f.Group == "providers" && f.Check == "shm" })
	if i < 0 || fs[i].Level != OK {
		t.Errorf("shm: %+v", fs)
	}
	if i := slices.IndexFunc(fs, func(f Finding) bool { return f.Check == "kernel" }); i < 0 || fs[i].Level != OK {
		t.Errorf("kernel: %+v", fs)
	}
}

// The steps of iboe_get_mtu: headers of 96 bytes below a power of two.
func TestRoceMTU(t *testing.T) {
	for netdev, want := range map[int64]int{9000: 4096, 4200: 4096, 4192: 4096, 4191: 2048, 1500: 1024, 1119: 512,
		352: 256, 351: 0, 0: 0, -1 << 63: 0} {
		if got := roceMTU(netdev); got != want {
			t.Errorf("interface with %d: %d, want %d", netdev, got, want)
		}
	}
}
