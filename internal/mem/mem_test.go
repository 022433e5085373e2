package mem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
)

func TestAllocRoundsUpAndZeroes(t *testing.T) {
	page := os.Getpagesize()
	for _, shared := range []bool{false, true} {
		m, err := Alloc(int64(page)+1, driver.AllocOptions{Name: "t", Shared: shared})
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Bytes) != 2*page || !bytes.Equal(m.Bytes, make([]byte, 2*page)) {
			t.Errorf("shared=%v: %d bytes, want %d zeroes", shared, len(m.Bytes), 2*page)
		}
		if (m.FD >= 0) != shared {
			t.Errorf("shared=%v: FD %d", shared, m.FD)
		}
		m.Bytes[2*page-1] = 7
		if err := m.Free(); err != nil {
			t.Error(err)
		}
	}
}

func TestAllocRefuses(t *testing.T) {
	for _, c := range []struct {
		size int64
		o    driver.AllocOptions
		want error
	}{
		{0, driver.AllocOptions{}, ErrSize},
		{-1, driver.AllocOptions{Shared: true}, ErrSize},
		{1<<63 - 1, driver.AllocOptions{}, ErrSize},
		{4096, driver.AllocOptions{HugePageBytes: 4096}, ErrHugePageSize},
	} {
		if m, err := Alloc(c.size, c.o); !errors.Is(err, c.want) || m != nil {
			t.Errorf("Alloc(%d, %+v) = %v, want %v", c.size, c.o, err, c.want)
		}
	}
}

// The importer sees the owner's bytes, and the owner cannot pull them away.
func TestMapSharesAndIsSealed(t *testing.T) {
	m, err := Alloc(1<<20, driver.AllocOptions{Name: "t", Shared: true})
	if err != nil {
		t.Fatal(err)
	}
	v, err := Map(m.FD, 1<<20, unix.PROT_READ|unix.PROT_WRITE)
	if err != nil {
		t.Fatal(err)
	}
	defer Unmap(v)
	m.Bytes[12345] = 42
	v[54321] = 43
	if v[12345] != 42 || m.Bytes[54321] != 43 {
		t.Error("the two mappings do not share bytes")
	}
	for _, size := range []int64{0, 1 << 10, 1 << 21} {
		if err := unix.Ftruncate(m.FD, size); !errors.Is(err, unix.EPERM) {
			t.Errorf("ftruncate to %d: %v, want EPERM", size, err)
		}
	}
	if _, err := unix.FcntlInt(uintptr(m.FD), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); !errors.Is(err, unix.EPERM) {
		t.Errorf("adding a seal: %v, want EPERM", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(m.FD, &st); err != nil || st.Mode&0o777 != 0o600 {
		t.Errorf("mode %o err %v, want 600", st.Mode, err)
	}
	// Freed pages come back although v still maps them.
	if err := m.Free(); err != nil {
		t.Fatal(err)
	}
	if v[12345] != 0 || v[54321] != 0 {
		t.Error("Free left the pages with the importer")
	}
}

// A read-only reopening cannot be mapped for writing.
func TestMapReadOnly(t *testing.T) {
	m, err := Alloc(4096, driver.AllocOptions{Shared: true})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Free()
	ro, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", m.FD), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ro)
	if _, err := Map(ro, 4096, unix.PROT_READ|unix.PROT_WRITE); !errors.Is(err, unix.EACCES) {
		t.Errorf("writable mapping of a read-only descriptor: %v, want EACCES", err)
	}
	v, err := Map(ro, 4096, unix.PROT_READ)
	if err != nil {
		t.Fatal(err)
	}
	if err := Unmap(v); err != nil {
		t.Error(err)
	}
}

// Control pages keep what they say after their owner has gone; a read-only one
// takes nothing from anybody else.
func TestAllocControl(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		m, err := AllocControl(64, "t", readOnly)
		if err != nil {
			t.Fatal(err)
		}
		w, err := Map(m.FD, 4096, unix.PROT_READ|unix.PROT_WRITE)
		if readOnly && !errors.Is(err, unix.EPERM) {
			t.Errorf("writable mapping of a read-only one: %v, want EPERM", err)
		}
		if err == nil {
			defer Unmap(w)
		}
		v, err := Map(m.FD, 4096, unix.PROT_READ)
		if err != nil {
			t.Fatal(err)
		}
		m.Bytes[9] = 9
		if err := m.Free(); err != nil {
			t.Error(err)
		}
		if v[9] != 9 {
			t.Error("Free took the bytes from the importer")
		}
		if err := Unmap(v); err != nil {
			t.Error(err)
		}
	}
}

// Hostile descriptors: unsealed, too small, not a memfd, closed.
func TestMapRefuses(t *testing.T) {
	raw, err := unix.MemfdCreate("t", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(raw)
	if err := unix.Ftruncate(raw, 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := Map(raw, 4096, unix.PROT_READ); !errors.Is(err, ErrNotSealed) {
		t.Errorf("unsealed memfd: %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(raw), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
		t.Fatal(err)
	}
	if _, err := Map(raw, 4097, unix.PROT_READ); !errors.Is(err, ErrTooSmall) {
		t.Errorf("memfd too small: %v", err)
	}
	if _, err := Map(raw, 0, unix.PROT_READ); !errors.Is(err, ErrSize) {
		t.Errorf("size 0: %v", err)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	for _, fd := range []int{int(f.Fd()), -1} {
		if b, err := Map(fd, 4096, unix.PROT_READ); err == nil {
			_ = Unmap(b)
			// tmpfs files report seals too, but a fresh one has F_SEAL_SEAL only.
			t.Errorf("Map(fd %d) succeeded", fd)
		}
	}
}

// Running into RLIMIT_MEMLOCK says so, with the number and the remedy.
func TestLockLimit(t *testing.T) {
	done := make(chan error)
	go func() {
		// The thread loses its capability and ends with the goroutine.
		runtime.LockOSThread()
		var h unix.CapUserHeader
		var d [2]unix.CapUserData
		h.Version = unix.LINUX_CAPABILITY_VERSION_3
		if err := unix.Capget(&h, &d[0]); err != nil {
			done <- err
			return
		}
		d[0].Effective &^= 1 << unix.CAP_IPC_LOCK
		if err := unix.Capset(&h, &d[0]); err != nil {
			done <- err
			return
		}
		var old unix.Rlimit
		if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
			done <- err
			return
		}
		low := old
		low.Cur = 65536
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &low); err != nil {
			done <- err
			return
		}
		defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)
		m, err := Alloc(1<<20, driver.AllocOptions{Name: "big", Lock: true})
		if err == nil {
			err = m.Free()
		}
		done <- err
	}()
	err := <-done
	var l *LimitError
	if !errors.As(err, &l) || l.Have != 65536 || l.Want != 1<<20 {
		t.Fatalf("err = %v, want a LimitError with 65536 of 1048576 bytes", err)
	}
	for _, s := range []string{"RLIMIT_MEMLOCK is 64 KiB", "LimitMEMLOCK=", "ulimit -l", "CAP_IPC_LOCK"} {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%q lacks %q", err, s)
		}
	}
}

// kB is a number of /proc/self/status.
func kB(t *testing.T, name string) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			if _, err := fmt.Sscan(v, &n); err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no %s in\n%s", name, b)
	return 0
}

// Locked memory is all there at once, and unlocked by Free, even while somebody else maps it.
func TestLocked(t *testing.T) {
	const size = 1 << 20
	for _, shared := range []bool{false, true} {
		before := kB(t, "VmLck")
		m, err := Alloc(size, driver.AllocOptions{Name: "t", Lock: true, Shared: shared})
		if l := (*LimitError)(nil); errors.As(err, &l) && l.Have < size {
			t.Skipf("this process may not lock a mebibyte: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := kB(t, "VmLck") - before; n != size>>10 {
			t.Errorf("shared=%v: %d kB locked, want %d", shared, n, size>>10)
		}
		there := make([]byte, size/os.Getpagesize())
		if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m.Bytes[0])), size,
			uintptr(unsafe.Pointer(&there[0]))); e != 0 {
			t.Fatal(e)
		}
		if i := bytes.IndexByte(there, 0); i >= 0 {
			t.Errorf("shared=%v: page %d is not there", shared, i)
		}
		if shared {
			v, err := Map(m.FD, size, unix.PROT_READ)
			if err != nil {
				t.Fatal(err)
			}
			defer Unmap(v)
		}
		if err := m.Free(); err != nil {
			t.Error(err)
		}
		if n := kB(t, "VmLck"); n != before {
			t.Errorf("shared=%v: %d kB locked after Free, before %d", shared, n, before)
		}
	}
}

// Memory of huge pages is whole pages, zeroed, and shared like any. Free gives back those that
// were touched even while somebody else maps them, and the promise of the others then.
func TestHugePages(t *testing.T) {
	const page, pages, touched = 2 << 20, 4, 3
	if os.Getenv("KVD_PAGES") != "1" {
		t.Skip("it takes huge pages, and counts the machine's: make test-pages, as root")
	}
	before := FreeHugePages(page)
	if before < pages {
		t.Fatalf("%d huge pages of 2 MiB are free, want %d", before, pages)
	}
	for _, shared := range []bool{false, true} {
		for _, lock := range []bool{false, true} {
			taken := func(when string, want int64) {
				t.Helper()
				if n := before - FreeHugePages(page); n != want {
					t.Errorf("shared=%v, lock=%v: %d huge pages are taken %s, want %d", shared, lock, n, when, want)
				}
			}
			m, err := Alloc((pages-1)*page+1, driver.AllocOptions{Name: "t", HugePageBytes: page, Shared: shared,
				Lock: lock})
			if err != nil {
				t.Fatal(err)
			}
			taken("at once", pages)
			if len(m.Bytes) != pages*page || !bytes.Equal(m.Bytes[:touched*page], make([]byte, touched*page)) {
				t.Errorf("shared=%v, lock=%v: %d bytes, want %d zeroes", shared, lock, len(m.Bytes), pages*page)
			}
			var v []byte
			if shared {
				if v, err = Map(m.FD, pages*page, unix.PROT_READ|unix.PROT_WRITE); err != nil {
					t.Fatal(err)
				}
				m.Bytes[page+1] = 42
				v[2*page] = 43
				if v[page+1] != 42 || m.Bytes[2*page] != 43 {
					t.Errorf("lock=%v: the two mappings do not share bytes", lock)
				}
			}
			if err := m.Free(); err != nil {
				t.Error(err)
			}
			if shared && !lock {
				taken("while somebody maps them", pages-touched)
			} else {
				taken("after Free", 0)
			}
			if shared {
				if err := Unmap(v); err != nil {
					t.Error(err)
				}
			}
			taken("in the end", 0)
		}
	}
}

// More huge pages than the machine has reserved.
func TestHugePageLimit(t *testing.T) {
	for _, shared := range []bool{false, true} {
		_, err := Alloc(1<<44, driver.AllocOptions{HugePageBytes: 2 << 20, Shared: shared})
		var l *LimitError
		if !errors.As(err, &l) {
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) {
				t.Skipf("kernel without hugetlbfs: %v", err)
			}
			t.Fatalf("shared=%v: %v, want a LimitError", shared, err)
		}
		if l.Want != 1<<23 || !strings.Contains(err.Error(), "vm.nr_hugepages") ||
			!strings.Contains(err.Error(), "HugePages_Free") {
			t.Errorf("shared=%v: %v", shared, err)
		}
	}
}

// TestFile: memory of a file has the file's bytes, also after it was mapped anew, and all pages are there at once;
// nothing else passes for it.
func TestFile(t *testing.T) {
	file := func(size int64) *os.File {
		t.Helper()
		fd, err := unix.MemfdCreate("t", unix.MFD_CLOEXEC) // a file of a tmpfs, but for its name
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), "/memory/t")
		t.Cleanup(func() { _ = f.Close() })
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		return f
	}
	f := file(0)
	o := driver.AllocOptions{Name: "t", File: f}
	m, err := Alloc(1<<16, o)
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Size != 1<<16 || st.Blocks*512 != 1<<16 {
		t.Errorf("%d bytes, of which %d are there, %v", st.Size, st.Blocks*512, err)
	}
	copy(m.Bytes[1<<15:], "still there")
	again, err := Alloc(1<<16, o)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(again.Bytes[1<<15:][:11]); got != "still there" {
		t.Errorf("the file's memory holds %q", got)
	}
	if err := errors.Join(again.Free(), m.Free()); err != nil {
		t.Error(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for what, o := range map[string]driver.AllocOptions{
		"smaller": {File: file(1 << 15)}, "larger": {File: file(1 << 17)}, "shared": {File: f, Shared: true},
		"adopted":    {File: f, Adopt: f},
		"huge pages": {File: file(0), HugePageBytes: 2 << 20}, "a device": {File: null},
	} {
		if m, err := Alloc(1<<16, o); !errors.Is(err, ErrOther) || m != nil {
			t.Errorf("%s: %v, want %v", what, err, ErrOther)
		}
	}
}

// TestFileTooLarge: a file system that is too small for a file says so when the memory is made, and not when it is
// touched.
func TestFileTooLarge(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("cannot mount a tmpfs of 64 KiB: %v", err)
		}
		t.Skipf("cannot mount a tmpfs of 64 KiB: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	f, err := os.Create(dir + "/region")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := Alloc(1<<17, driver.AllocOptions{File: f})
	var l *LimitError
	if !errors.As(err, &l) || l.Want != 1<<17 || l.Have != 1<<16 || m != nil ||
		!strings.Contains(err.Error(), f.Name()) {
		t.Errorf("%v, %+v", err, l)
	}
}

// TestAdopt: memory whose mapping went away without a Free has its bytes for the next that maps it, and nothing else
// passes for it.
func TestAdopt(t *testing.T) {
	o := driver.AllocOptions{Name: "t", Shared: true}
	m, err := Alloc(1<<16, o)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(m.FD)
	if err != nil {
		t.Fatal(err)
	}
	kept := os.NewFile(uintptr(fd), "kept")
	defer kept.Close()
	copy(m.Bytes[1<<15:], "still there")
	o.Adopt = kept
	again, err := Alloc(1<<16, o)
	if err != nil {
		t.Fatal(err)
	}
	if got := string(again.Bytes[1<<15:][:11]); got != "still there" {
		t.Errorf("adopted memory holds %q", got)
	}
	unsealed, err := unix.MemfdCreate("t", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	loose := os.NewFile(uintptr(unsealed), "loose")
	defer loose.Close()
	if err := loose.Truncate(1 << 16); err != nil {
		t.Fatal(err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, c := range []struct {
		name   string
		size   int64
		change func(*driver.AllocOptions)
		want   error
	}{
		{"smaller", 1 << 15, func(*driver.AllocOptions) {}, ErrOther},
		{"larger", 1 << 17, func(*driver.AllocOptions) {}, ErrOther},
		{"huge pages", 1 << 21, func(o *driver.AllocOptions) { o.HugePageBytes = 2 << 20 }, ErrOther},
		{"private", 1 << 16, func(o *driver.AllocOptions) { o.Shared = false }, ErrOther},
		{"not sealed", 1 << 16, func(o *driver.AllocOptions) { o.Adopt = loose }, ErrNotSealed},
		{"a device", 1 << 16, func(o *driver.AllocOptions) { o.Adopt = null }, ErrNotSealed},
	} {
		o := o
		c.change(&o)
		if m, err := Alloc(c.size, o); !errors.Is(err, c.want) || m != nil {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if err := errors.Join(again.Free(), m.Free()); err != nil {
		t.Error(err)
	}
}
