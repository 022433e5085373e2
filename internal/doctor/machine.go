package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// host reports what kind of machine this is.
func (x *exam) host() {
	x.group = "machine"
	release, err := x.Release()
	if err != nil {
		x.unknown("kernel", err)
	} else {
		x.add(OK, "kernel", "Linux "+release, "")
	}
	x.add(OK, "CPUs", strconv.Itoa(x.CPUs), "")
	x.vm, x.container = x.hypervisor(), x.containerKind()
	switch {
	case x.container != "":
		found := "container (" + x.container + ")"
		if x.vm != "" {
			found += " in a virtual machine (" + x.vm + ")"
		}
		x.add(OK, "kind", found, "")
	case x.vm != "":
		x.add(OK, "kind", "virtual machine ("+x.vm+")", "")
	default:
		x.add(OK, "kind", "neither container nor virtual machine that says so", "")
	}
}

// containerKind is "docker", "podman" and the like, or empty.
func (x *exam) containerKind() string {
	if s, err := x.read("run/systemd/container"); err == nil && s != "" {
		return s
	}
	if x.exists("run/.containerenv") {
		return "podman"
	}
	if x.exists(".dockerenv") {
		return "docker"
	}
	if x.exists("var/run/secrets/kubernetes.io") {
		return "kubernetes"
	}
	text, _ := x.read("proc/1/cgroup")
	for _, kind := range []string{"docker", "kubepods", "containerd", "lxc", "libpod"} {
		if strings.Contains(text, "/"+kind) {
			return kind
		}
	}
	return ""
}

// hypervisor is the maker of the virtual machine, or empty.
func (x *exam) hypervisor() string {
	if s, err := x.read("sys/hypervisor/type"); err == nil && s != "" {
		return s
	}
	vendor, _ := x.read("sys/class/dmi/id/sys_vendor")
	product, _ := x.read("sys/class/dmi/id/product_name")
	for _, v := range []string{"QEMU", "VMware", "Xen", "Amazon EC2", "Google Compute Engine", "innotek", "Parallels",
		"DigitalOcean", "Alibaba", "OpenStack"} {
		if strings.Contains(vendor+" "+product, v) && !strings.Contains(product, "metal") {
			return strings.TrimSpace(vendor + " " + product)
		}
	}
	if strings.Contains(product, "Virtual Machine") || strings.Contains(product, "KVM") {
		return strings.TrimSpace(vendor + " " + product)
	}
	cpu, _ := x.read("proc/cpuinfo")
	if _, flags, ok := strings.Cut(cpu, "\nflags"); ok {
		flags, _, _ = strings.Cut(flags, "\n")
		if slices.Contains(strings.Fields(flags), "hypervisor") {
			return "of an unknown kind"
		}
	}
	return ""
}

// rdmaModules are the kernel modules worth naming: the core's, then drivers.
var rdmaModules = []string{"ib_core", "ib_uverbs", "rdma_ucm",
	"mlx5_ib", "mlx4_ib", "irdma", "bnxt_re", "iw_cxgb4", "qedr", "hns_roce_hw_v2", "mana_ib", "erdma", "efa", "ocrdma",
	"vmw_pvrdma",
	"rdma_rxe", "siw"}

// modules finds what the kernel has of RDMA.
func (x *exam) modules() {
	x.group = "kernel modules"
	if text, err := x.read("proc/modules"); err != nil {
		// A kernel without loadable modules has no such file.
		if !errors.Is(err, fs.ErrNotExist) {
			x.unknown("loaded", err)
		}
	} else {
		for line := range strings.Lines(text) {
			if name, _, ok := strings.Cut(line, " "); ok {
				x.loaded = append(x.loaded, name)
			}
		}
	}
	if release, err := x.Release(); err != nil {
		x.noModules = err
	} else if dir := path.Join("lib/modules", release); !fs.ValidPath(dir) || strings.Contains(release, "/") {
		x.noModules = fmt.Errorf("kernel release %.60q is not a folder's name", release)
	} else {
		builtin, err := x.moduleNames(path.Join(dir, "modules.builtin"))
		x.loaded = append(x.loaded, builtin...)
		var err2 error
		x.available, err2 = x.moduleNames(path.Join(dir, "modules.dep"))
		if x.noModules = err2; err2 == nil {
			x.noModules = err
		}
	}
	var on, off []string
	for _, m := range rdmaModules {
		switch {
		case slices.Contains(x.loaded, m):
			on = append(on, m)
		case slices.Contains(x.available, m):
			off = append(off, m)
		}
	}
	x.add(OK, "loaded", orNone(on), "")
	if x.noModules != nil {
		x.add(Note, "available", x.noModules.Error(), "")
	} else {
		x.add(OK, "available", orNone(off), "")
	}
}

// moduleNames reads a list such as modules.dep ("kernel/x/ib_core.ko.xz: …").
func (x *exam) moduleNames(file string) (names []string, err error) {
	text, err := x.read(file)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), ":")
		name, _, ok := strings.Cut(path.Base(line), ".ko")
		if ok {
			names = append(names, strings.ReplaceAll(name, "-", "_"))
		}
	}
	return names, nil
}

func orNone(s []string) string {
	if len(s) == 0 {
		return "none of RDMA"
	}
	return strings.Join(s, " ")
}

func (x *exam) binary() {
	x.group = "this program"
	if x.Built {
		x.add(OK, "verbs", "built in", "")
	} else {
		x.add(Note, "verbs", "not built in", "make build-verbs (needs a C compiler) makes a kvd and a kvctl that can "+
			"use adapters")
	}
}

// clientLock is the memory, bytes, that a client with some lanes locks, with room
// to spare.
const clientLock = 64 << 20

func (x *exam) memory() {
	x.group = "memory"
	x.memlock()
	x.hugePages()
	x.transparent()
}

func (x *exam) memlock() {
	const check = "RLIMIT_MEMLOCK"
	soft, hard, err := x.Memlock()
	if err != nil {
		x.unknown(check, err)
		return
	}
	found := fmt.Sprintf("soft %s, hard %s", size(soft), size(hard))
	cap, err := x.lockCapability()
	if err != nil {
		x.unknown("CAP_IPC_LOCK", err)
	}
	if cap {
		// The adapter's memory is judged in the first user namespace (capable() in
		// ib_umem_get), where a rootless container's capabilities mean nothing.
		first, err := x.firstUserNamespace()
		if err != nil {
			x.unknown("CAP_IPC_LOCK", err)
		}
		if first {
			x.add(OK, check, found+"; CAP_IPC_LOCK lifts it", "")
			return
		}
		found += "; CAP_IPC_LOCK of a user namespace does not lift it for adapters"
	} else if err == nil {
		found += "; no CAP_IPC_LOCK"
	}
	const raise = "LimitMEMLOCK=infinity in the systemd unit, --ulimit memlock=-1 for a container, or '* - memlock " +
		"unlimited' in /etc/security/limits.d/kvd.conf and a new login (now: ulimit -l unlimited)"
	switch {
	case soft == unlimited:
		x.add(OK, check, found, "")
	case soft < clientLock && len(x.devices) > 0:
		x.add(Warn, check, found+": with verbs a client locks a few MiB a lane, a memory node all that it lends", raise)
	case soft < clientLock:
		x.add(Note, check, found+": matters for verbs, and for lock: true of a memory node", raise)
	default:
		x.add(Note, check,
			found+": enough for clients; a memory node with verbs or lock: true can lend no more than that", raise)
	}
}

// lockCapability tells whether CAP_IPC_LOCK, bit 14, is effective.
func (x *exam) lockCapability() (bool, error) {
	const file = "proc/self/status"
	text, err := x.read(file)
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			if err != nil {
				return false, cannotRead(file, fmt.Errorf("CapEff %.40q is not a hexadecimal number",
					strings.TrimSpace(v)))
			}
			return n>>14&1 == 1, nil
		}
	}
	return false, cannotRead(file, errors.New("it has no line CapEff"))
}

// firstUserNamespace tells whether user ids are the machine's own.
func (x *exam) firstUserNamespace() (bool, error) {
	text, err := x.read("proc/self/uid_map")
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil // the kernel has no user namespaces
	}
	return slices.Equal(strings.Fields(text), []string{"0", "0", "4294967295"}), err
}

func (x *exam) hugePages() {
	const dir = "sys/kernel/mm/hugepages"
	for _, p := range []struct {
		name, folder, reserve string
	}{
		{"2 MiB", "hugepages-2048kB", "sysctl -w vm.nr_hugepages=N (keep it in /etc/sysctl.d/90-kvd.conf)"},
		{"1 GiB", "hugepages-1048576kB", "boot with hugepagesz=1G hugepages=N, or echo N > /" + dir +
			"/hugepages-1048576kB/nr_hugepages"},
	} {
		check := p.name + " pages"
		var n [3]int64
		var err error
		for i, file := range []string{"nr_hugepages", "free_hugepages", "resv_hugepages"} {
			if n[i], err = x.readInt(path.Join(dir, p.folder, file)); err != nil {
				break
			}
		}
		switch {
		case errors.Is(err, fs.ErrNotExist):
			x.add(Note, check, "not offered by this kernel or CPU", "")
		case err != nil:
			x.unknown(check, err)
		case n[0] == 0:
			x.add(Note, check, "none", "only for huge-pages: "+strings.ReplaceAll(p.name, " ", "")+
				" of a memory node: "+p.reserve)
		default:
			x.add(OK, check, fmt.Sprintf("%d, %d free, %d of these reserved", n[0], n[1], n[2]), "")
		}
	}
}

// transparent reports on transparent huge pages. Lent memory is a memfd, so both
// files have a say.
func (x *exam) transparent() {
	for _, f := range []struct{ check, file, want string }{
		{"THP", "enabled", "madvise"},
		{"THP for shared memory", "shmem_enabled", "advise"},
	} {
		file := "sys/kernel/mm/transparent_hugepage/" + f.file
		s, err := x.read(file)
		if errors.Is(err, fs.ErrNotExist) {
			x.add(Note, f.check, "not offered by this kernel", "")
			continue
		}
		if err != nil {
			x.unknown(f.check, err)
			continue
		}
		_, mode, _ := strings.Cut(s, "[")
		mode, _, ok := strings.Cut(mode, "]")
		switch {
		case !ok:
			x.unknown(f.check, cannotRead(file, fmt.Errorf("%.60q names no mode in brackets", s)))
		case mode == "never" || mode == "deny":
			x.add(Note, f.check, mode, fmt.Sprintf("fewer TLB misses on large memory without huge-pages: echo %s > /%s",
				f.want, file))
		default:
			x.add(OK, f.check, mode, "")
		}
	}
}

// socketBuffer is what rdma/tcp asks for, bytes: the default of its
// Options.SocketBuffer.
const socketBuffer = 1 << 20

func (x *exam) network() {
	x.group = "network"
	for _, name := range []string{"rmem_max", "wmem_max"} {
		n, err := x.readInt("proc/sys/net/core/" + name)
		check := "net.core." + name
		switch {
		case errors.Is(err, fs.ErrNotExist):
			x.add(Note, check, "not shown in this network namespace", "")
		case err != nil:
			x.unknown(check, err)
		case n < socketBuffer:
			x.add(Note, check, fmt.Sprintf("%s; tcp asks for %s", size(uint64(max(n, 0))), size(socketBuffer)),
				fmt.Sprintf("sysctl -w %s=%d (keep it in /etc/sysctl.d/90-kvd.conf)", check, socketBuffer))
		default:
			x.add(OK, check, size(uint64(n)), "")
		}
	}
}

// providers says which of them this machine can use.
func (x *exam) providers() {
	x.group = "providers"
	level := func(name string, other Level) Level {
		if x.provider == name || x.provider == "" && name != "verbs" {
			return Fail
		}
		return other
	}
	if err := x.SharedMemory(); err != nil {
		advice := "memfd_create(2) with seals needs Linux 3.17, pidfd_open(2) 5.3, and a " +
			"seccomp profile that allows them"
		if s, _ := x.read("proc/sys/vm/memfd_noexec"); s == "2" {
			advice = "sysctl -w vm.memfd_noexec=1, or a kernel of 6.3 or newer; " + advice
		}
		x.add(level("shm", Warn), "shm", err.Error(), advice)
	} else {
		x.add(OK, "shm", "works: sealed memfds, so the size of /dev/shm does not matter", "")
	}
	x.add(OK, "tcp", "works", "")
	found, advice, ok := x.verbsUsable()
	other := Warn
	if len(x.devices) == 0 {
		other = Note
		if !x.Built {
			found += ", and this binary was built without verbs"
		}
	}
	switch l := level("verbs", other); {
	case ok:
		x.add(OK, "verbs", found, advice)
	case l == Note:
		x.add(l, "verbs", found, "not needed: shm and tcp work without")
	default:
		x.add(l, "verbs", found, cmp.Or(advice, "see above what is in the way"))
	}
}
