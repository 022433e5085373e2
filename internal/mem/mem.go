// Package mem maps registered memory outside the Go heap: anonymous memory, or
// sealed memfds that another process of the machine can map too.
//
// It leaves registration, keys and rights to the providers. Start with [Alloc],
// which the exporting side calls, and [Map], which the importing side calls on a
// descriptor it was handed and does not trust. All functions may be called
// concurrently. The caller owns what they return and gives it back once, with
// Memory.Free or [Unmap], when nobody touches the bytes any more.
//
// Seals are the reason for memfds (memfd_create(2), "File sealing"). A file
// sealed against shrinking cannot be truncated under its readers, so mapping a
// stranger's memfd cannot end in SIGBUS. Memory outside the heap follows
// Pebble's manual package: the collector neither scans nor moves it.
package mem

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma/driver"
)

// Errors of this package. All mean that nothing was mapped.
var (
	// ErrSize means the size is not positive, or too large to address.
	ErrSize = errors.New("bad memory size")
	// ErrHugePageSize means a huge page size other than 2 MiB or 1 GiB.
	ErrHugePageSize = errors.New("huge page size must be 2 MiB or 1 GiB")
	// ErrNotSealed means a descriptor's owner could still truncate it.
	ErrNotSealed = errors.New("memory is not a memfd sealed against shrinking")
	// ErrOther means a memfd that is to be adopted is not of the size or the pages that are wanted.
	ErrOther = errors.New("memory is of another kind")
	// ErrTooSmall means a descriptor is smaller than its owner said.
	ErrTooSmall = errors.New("memfd is smaller than announced")
)

// LimitError is an allocation that a limit of the machine or of the process
// refused.
type LimitError struct {
	Limit string // "RLIMIT_MEMLOCK", "HugePages_Free (2 MiB pages)", or the room on a file system
	Want  int64  // bytes, or pages
	Have  int64  // bytes, or pages; -1 when it could not be read
	Unit  string // of Want and Have
	Hint  string // how to raise it
	Err   error  // from the kernel
}

func (e *LimitError) Error() string {
	amount := func(n int64) string {
		switch {
		case n < 0:
			return "unknown"
		case e.Unit == "bytes":
			return units.Bytes(n)
		}
		return fmt.Sprintf("%d %s", n, e.Unit)
	}
	return fmt.Sprintf("%s is %s, want %s more: %v (%s)", e.Limit, amount(e.Have), amount(e.Want), e.Err, e.Hint)
}

func (e *LimitError) Unwrap() error { return e.Err }

// seals keep the size for ever, and the seals themselves.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// thpBytes is the smallest mapping that asks for transparent huge pages.
const thpBytes = 2 << 20

// Alloc maps size bytes, zeroed, rounded up to the page size that o asks for. With o.Shared the memory is a memfd
// (Memory.FD) of fixed size that only this user may open again. Free unmaps it and gives a memfd's pages back even
// while another process still maps them. Huge pages that nobody has touched stay promised to the memfd until that
// process unmaps them. With o.Adopt it maps that memfd, which an Alloc of the same size and options made, with the
// bytes that it has. With o.File it is that file's bytes, and not a memfd's. If the file was empty, all of its pages
// are there from then on, so that using them cannot fail. With o.Populate all pages of new memory are there, and
// charged to this process's cgroup; what there is no room for is a *LimitError.
func Alloc(size int64, o driver.AllocOptions) (*driver.Memory, error) {
	m, err := alloc(size, o, seals, true)
	if err != nil {
		return nil, fmt.Errorf("alloc %q of %s: %w", o.Name, units.Bytes(size), err)
	}
	return m, nil
}

// AllocControl is Alloc of a small memfd of normal pages that keeps its bytes after Free,
// while another process maps it. With readOnly, only the mapping returned can change it:
// a process that is handed Memory.FD maps it read-only, however privileged
// (F_SEAL_FUTURE_WRITE).
func AllocControl(size int64, name string, readOnly bool) (*driver.Memory, error) {
	s := seals
	if readOnly {
		s |= unix.F_SEAL_FUTURE_WRITE
	}
	m, err := alloc(size, driver.AllocOptions{Name: name, Shared: true}, s, false)
	if err != nil {
		return nil, fmt.Errorf("alloc control %q of %s: %w", name, units.Bytes(size), err)
	}
	return m, nil
}

func alloc(size int64, o driver.AllocOptions, seals int, punch bool) (*driver.Memory, error) {
	page := int64(os.Getpagesize())
	switch o.HugePageBytes {
	case 0:
	case 2 << 20, 1 << 30:
		page = int64(o.HugePageBytes)
	default:
		return nil, fmt.Errorf("%w: %d bytes", ErrHugePageSize, o.HugePageBytes)
	}
	if size <= 0 || size > math.MaxInt-page {
		return nil, fmt.Errorf("%w: %d bytes", ErrSize, size)
	}
	size = (size + page - 1) &^ (page - 1)

	fd, mapFlags := -1, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|hugeFlag(o.HugePageBytes, unix.MAP_HUGETLB)
	var err error
	switch {
	case o.File != nil:
		fd, err = named(size, page, o)
	case o.Adopt != nil && !o.Shared:
		return nil, fmt.Errorf("%w: options do not say that it is shared", ErrOther)
	case o.Adopt != nil:
		fd, err = adopt(o.Adopt, size, page, seals)
	case o.Shared:
		fd, err = memfd(size, o)
	}
	if err != nil {
		return nil, err
	}
	if fd >= 0 {
		mapFlags = unix.MAP_SHARED
	}
	b, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, mapFlags)
	if err != nil {
		closeFD(fd)
		if o.HugePageBytes != 0 && errors.Is(err, unix.ENOMEM) {
			return nil, hugeLimit(size, o.HugePageBytes, err)
		}
		return nil, fmt.Errorf("mmap: %w", err)
	}
	fail := func(err error) (*driver.Memory, error) {
		_ = unix.Munmap(b)
		closeFD(fd)
		return nil, err
	}
	if fd >= 0 && o.Adopt == nil && o.File == nil {
		// After mmap, because F_SEAL_FUTURE_WRITE refuses writable mappings.
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
			return fail(fmt.Errorf("seal memfd: %w", err))
		}
	}
	adviseHuge(b, o.HugePageBytes)
	if o.Populate != nil && o.File == nil && o.Adopt == nil {
		if err := populate(b, fd, page, o); err != nil {
			return fail(err)
		}
	}
	if o.Lock {
		if err := unix.Mlock(b); err != nil {
			return fail(lockLimit(size, err))
		}
	}
	return driver.NewMemory(b, fd, o, func() error {
		var errs []error
		if fd >= 0 && punch {
			// Importers that have not unmapped yet must not keep the pages.
			if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size); err != nil {
				errs = append(errs, fmt.Errorf("free %q: punch hole: %w", o.Name, err))
			}
		}
		closeFD(fd)
		if err := unix.Munmap(b); err != nil {
			errs = append(errs, fmt.Errorf("free %q: munmap: %w", o.Name, err))
		}
		return errors.Join(errs...)
	}), nil
}

// adopt gives a descriptor of its own for a memfd of exactly these seals, size and pages.
func adopt(f *os.File, size, page int64, seals int) (int, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("adopt memfd: dup: %w", err)
	}
	var st unix.Stat_t
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	switch {
	case err != nil || got&^unix.F_SEAL_EXEC != seals: // which newer kernels add
		err = ErrNotSealed
	default:
		err = unix.Fstat(fd, &st)
	}
	if err == nil && (st.Size != size || int64(st.Blksize) != page) {
		err = fmt.Errorf("%w: %d bytes in pages of %d, want %d in pages of %d", ErrOther, st.Size, st.Blksize, size,
			page)
	}
	if err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("adopt memfd: %w", err)
	}
	return fd, nil
}

// named gives a descriptor of its own for o.File, which it gives the size if it has none.
func named(size, page int64, o driver.AllocOptions) (int, error) {
	if o.Shared || o.Adopt != nil {
		return -1, fmt.Errorf("%w: a file has no seals, so it cannot be shared, and is not adopted otherwise", ErrOther)
	}
	fd, err := unix.FcntlInt(o.File.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("memory file: dup: %w", err)
	}
	fail := func(err error) (int, error) {
		closeFD(fd)
		return -1, fmt.Errorf("memory file: %w", err)
	}
	var st unix.Stat_t
	var on unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &st), unix.Fstatfs(fd, &on)); err != nil {
		return fail(err)
	}
	huge := on.Type == unix.HUGETLBFS_MAGIC
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size != 0 && st.Size != size || huge != (o.HugePageBytes != 0) ||
		int64(on.Bsize) != page {
		return fail(fmt.Errorf("%w: mode %o, %d bytes in blocks of %d, want a file of %d in pages of %d", ErrOther,
			st.Mode, st.Size, on.Bsize, size, page))
	}
	if st.Size != 0 {
		return fd, nil
	}
	// A page that is not there when it is touched, as the file system is full by then, ends the process (SIGBUS).
	if err := inParts(size, page, o.Populate, func(off, n int64) error {
		return unix.Fallocate(fd, 0, off, n)
	}); err != nil {
		if !errors.Is(err, unix.ENOSPC) {
			return fail(fmt.Errorf("fallocate: %w", err))
		}
		have := int64(-1)
		if unix.Fstatfs(fd, &on) == nil {
			have = int64(on.Bavail) * int64(on.Bsize)
		}
		return fail(&LimitError{Limit: "room on the file system of " + o.File.Name(), Want: size, Have: have,
			Unit: "bytes", Err: err,
			Hint: "enlarge it with mount -o remount,size=, or the volume's size, or for a hugetlbfs vm.nr_hugepages; " +
				"or lend less memory"})
	}
	return fd, nil
}

// memfd makes a file of size bytes without seals.
func memfd(size int64, o driver.AllocOptions) (int, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING | hugeFlag(o.HugePageBytes, unix.MFD_HUGETLB)
	name := o.Name
	if name == "" {
		name = "kvd"
	}
	name = name[:min(len(name), 200)] // the kernel takes 249
	// Kernels before 6.3 do not know MFD_NOEXEC_SEAL.
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create: %w", err)
	}
	// A read-only descriptor must not let another user reopen it for writing
	// through /proc/self/fd.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("chmod memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, size); err != nil {
		closeFD(fd)
		return -1, fmt.Errorf("size memfd: %w", err)
	}
	return fd, nil
}

// Map maps the first size bytes of fd, a memfd that another process made, with
// prot (PROT_READ, PROT_WRITE). It does not take over fd. The owner can neither
// shrink it afterwards nor crash us by having lied about its size.
func Map(fd int, size int64, prot int) ([]byte, error) {
	if size <= 0 || size > math.MaxInt {
		return nil, fmt.Errorf("map memfd: %w: %d bytes", ErrSize, size)
	}
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil || got&unix.F_SEAL_SHRINK == 0 {
		return nil, fmt.Errorf("map memfd: %w", ErrNotSealed)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, fmt.Errorf("map memfd: fstat: %w", err)
	}
	if st.Size < size {
		return nil, fmt.Errorf("map memfd: %w: %d bytes of %d", ErrTooSmall, st.Size, size)
	}
	b, err := unix.Mmap(fd, 0, int(size), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map memfd: %w", err)
	}
	adviseHuge(b, 0)
	return b, nil
}

// Unmap undoes Map.
func Unmap(b []byte) error { return unix.Munmap(b) }

// hugeFlag gives base (MFD_HUGETLB or MAP_HUGETLB) with the page size, which
// both system calls encode alike, or 0 for normal pages.
func hugeFlag(pageBytes, base int) int {
	switch pageBytes {
	case 2 << 20:
		return base | 21<<unix.MFD_HUGE_SHIFT
	case 1 << 30:
		return base | 30<<unix.MFD_HUGE_SHIFT
	}
	return 0
}

// adviseHuge is a hint: kernels without transparent huge pages refuse it.
func adviseHuge(b []byte, hugePageBytes int) {
	if hugePageBytes == 0 && len(b) >= thpBytes {
		_ = unix.Madvise(b, unix.MADV_HUGEPAGE)
	}
}

func closeFD(fd int) {
	if fd >= 0 {
		_ = unix.Close(fd)
	}
}

func lockLimit(size int64, err error) error {
	have := int64(-1)
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil {
		have = int64(min(r.Cur, math.MaxInt64))
	}
	return &LimitError{
		Limit: "RLIMIT_MEMLOCK", Want: size, Have: have, Unit: "bytes", Err: fmt.Errorf("mlock: %w", err),
		Hint: "raise it with LimitMEMLOCK= in the systemd unit or ulimit -l, or grant CAP_IPC_LOCK",
	}
}

// FreeHugePages is how many huge pages of a size the machine has reserved that nobody has or
// was promised, -1 if that cannot be known.
func FreeHugePages(pageBytes int) int64 {
	dir := hugePagesDir(pageBytes)
	free, promised := readInt(dir+"free_hugepages"), readInt(dir+"resv_hugepages")
	if free < 0 || promised < 0 {
		return -1
	}
	return max(0, free-promised)
}

func hugePagesDir(pageBytes int) string {
	return fmt.Sprintf("/sys/kernel/mm/hugepages/hugepages-%dkB/", pageBytes>>10)
}

func hugeLimit(size int64, pageBytes int, err error) error {
	hint := "reserve them with sysctl vm.nr_hugepages="
	if pageBytes != 2<<20 {
		hint = "reserve them through " + hugePagesDir(pageBytes) +
			"nr_hugepages or at boot with hugepagesz=1G hugepages="
	}
	return &LimitError{
		Limit: fmt.Sprintf("HugePages_Free (%d MiB pages)", pageBytes>>20),
		Want:  size / int64(pageBytes), Have: FreeHugePages(pageBytes), Unit: "pages", Hint: hint,
		Err: fmt.Errorf("mmap: %w", err),
	}
}

// readInt reads a number from a file of /sys, or -1.
func readInt(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return -1
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return -1
	}
	return n
}
