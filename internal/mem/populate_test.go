package mem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma/driver"
)

// TestPopulateAtOnce: a goroutine takes one part while others take others, up to four at a time.
func TestPopulateAtOnce(t *testing.T) {
	var in atomic.Int64
	all := make(chan struct{})
	o := driver.AllocOptions{Name: "t", Populate: func(take func() error) error {
		if in.Add(1) == mostTakers {
			close(all)
		}
		<-all // until as many are inside
		return errors.New("enough")
	}}
	if _, err := Alloc((mostTakers+2)*populatePart, o); err == nil || in.Load() != mostTakers {
		t.Errorf("%d at once, want %d; %v", in.Load(), mostTakers, err)
	}
	taking.Lock()
	defer taking.Unlock()
	if taking.bytes != 0 {
		t.Errorf("%d bytes count as being taken", taking.bytes)
	}
}

// TestPopulateRoom: before each part there has to be room for all that is not there yet, of parts under way, too. The
// bytes that these have already are not missed twice.
func TestPopulateRoom(t *testing.T) {
	const size = (mostTakers + 1) * populatePart
	for _, others := range []int64{0, populatePart} { // what others take of the room once a part is under way
		var have, in, began atomic.Int64
		have.Store(size + spareRoom)
		all := make(chan struct{})
		here := sync.OnceFunc(func() { close(all) })
		p := &parts{part: populatePart, size: size, room: func() (int64, string) { return have.Load(), "a room" }}
		err := p.all(func(take func() error) error {
			if in.Add(1) == mostTakers {
				here()
			}
			err := take()
			if err != nil {
				here()
			}
			return err
		}, func(_, n int64) error {
			if have.Add(-n / 2); began.Add(1) == 1 {
				have.Add(-others)
				<-all // which look for room now, or have
			}
			have.Add(-n / 2)
			return nil
		})
		var l *LimitError
		if short := others > 0; errors.As(err, &l) != short || !short && (err != nil || have.Load() != spareRoom) {
			t.Errorf("others take %d: %v, and %d are left", others, err, have.Load())
		}
		if have.Load() < spareRoom-others {
			t.Errorf("others take %d: %d are left", others, have.Load())
		}
		if taking.bytes != 0 || taking.parts != 0 {
			t.Errorf("%d bytes and %d parts count as being taken", taking.bytes, taking.parts)
		}
	}
}

// TestPopulate: all pages of new memory are there, of whatever kind, and were taken in parts; an error between two of
// them leaves nothing.
func TestPopulate(t *testing.T) {
	const size = populatePart + 1<<20
	for _, shared := range []bool{false, true} {
		for _, lock := range []bool{false, true} {
			t.Run(fmt.Sprintf("shared %v lock %v", shared, lock), func(t *testing.T) {
				before := kB(t, "VmLck")
				var parts atomic.Int64
				o := driver.AllocOptions{Name: "t", Shared: shared, Lock: lock,
					Populate: func(take func() error) error {
						parts.Add(1)
						return take()
					}}
				m, err := Alloc(size, o)
				if l := (*LimitError)(nil); lock && errors.As(err, &l) && l.Limit == "RLIMIT_MEMLOCK" {
					t.Skipf("this process may not lock 33 MiB: %v", err)
				}
				if err != nil {
					t.Fatal(err)
				}
				there := make([]byte, size/os.Getpagesize())
				if _, _, e := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&m.Bytes[0])), size,
					uintptr(unsafe.Pointer(&there[0]))); e != 0 {
					t.Fatal(e)
				}
				if i := bytes.IndexByte(there, 0); i >= 0 || parts.Load() != 2 {
					t.Errorf("page %d is not there after %d parts, want all after 2", i, parts.Load())
				}
				if n := kB(t, "VmLck") - before; lock && n != size>>10 {
					t.Errorf("%d kB locked, want %d", n, size>>10)
				}
				if !bytes.Equal(m.Bytes[:4096], make([]byte, 4096)) || m.Opts.Populate != nil {
					t.Error("it is not zero, or holds on to who populated it")
				}
				if err := m.Free(); err != nil {
					t.Error(err)
				}
				enough := errors.New("enough")
				o.Populate = func(take func() error) error { parts.Add(1); return enough }
				if m, err := Alloc(size, o); m != nil || !errors.Is(err, enough) || parts.Load() < 3 ||
					parts.Load() > 4 {
					t.Errorf("memory %v, %v after %d parts", m, err, parts.Load())
				}
				if n := kB(t, "VmLck"); n != before || taking.bytes != 0 {
					t.Errorf("%d kB locked, before %d; %d bytes still to be taken", n, before, taking.bytes)
				}
			})
		}
	}
}

// TestRoom: the least that a machine or a cgroup leaves counts, of either version, as seen from a container, too.
func TestRoom(t *testing.T) {
	const (
		machine = "proc/meminfo = MemTotal: 100 kB|MemAvailable: 64 kB"
		v2      = "proc/self/mountinfo = 29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"
		v1      = "proc/self/mountinfo = 30 24 0:27 %s /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
	)
	for _, c := range []struct {
		name  string
		files []string
		have  int64
		of    string
		limit uint64 // the least of a cgroup, 0: there is none
	}{
		{"nothing known", nil, -1, "", 0},
		{"machine", []string{machine}, 64 << 10, "memory that the machine has available", 0},
		{"v2 without a limit", []string{machine, v2, "proc/self/cgroup = 0::/a", "sys/fs/cgroup/a/memory.max = max",
			"sys/fs/cgroup/a/memory.current = 5"},
			64 << 10, "memory that the machine has available", 0},
		{"v2", []string{machine, v2, "proc/self/cgroup = 0::/a/b", "sys/fs/cgroup/a/b/memory.max = 9000",
			"sys/fs/cgroup/a/b/memory.current = 5000",
			"sys/fs/cgroup/a/b/memory.stat = inactive_file 100|active_file 10|anon 7",
			"sys/fs/cgroup/a/memory.max = 60000", "sys/fs/cgroup/a/memory.current = 6000"},
			4110, "memory that cgroup /a/b has left", 9000},
		{"v2 parent", []string{machine, v2, "proc/self/cgroup = 0::/a/b", "sys/fs/cgroup/a/b/memory.max = max",
			"sys/fs/cgroup/a/memory.max = 6000", "sys/fs/cgroup/a/memory.current = 7000"},
			0, "memory that cgroup /a has left", 6000},
		{"v2 container", []string{v2, "proc/self/cgroup = 0::/", "sys/fs/cgroup/memory.max = 600",
			"sys/fs/cgroup/memory.current = 500"},
			100, "memory that cgroup / has left", 600},
		{"v2 beside v1", []string{fmt.Sprintf(v1, "/") + "|29 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
			"proc/self/cgroup = 4:memory:/a|0::/a",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes = 700", "sys/fs/cgroup/memory/a/memory.usage_in_bytes = 500"},
			200, "memory that cgroup /a has left", 700},
		{"mounted twice", []string{fmt.Sprintf(v1, "/a/b") + `|31 24 0:27 /a /sys/fs/all\040groups rw - cgroup cgroup rw,memory|32 24 0:27 /x /x rw - cgroup cgroup rw,memory`, "proc/self/cgroup = 4:memory:/a/b",
			"sys/fs/cgroup/memory/memory.limit_in_bytes = 800", "sys/fs/cgroup/memory/memory.usage_in_bytes = 500",
			"sys/fs/all groups/b/memory.limit_in_bytes = 800", "sys/fs/all groups/b/memory.usage_in_bytes = 500",
			"sys/fs/all groups/memory.limit_in_bytes = 600", "sys/fs/all groups/memory.usage_in_bytes = 550"},
			50, "memory that cgroup / has left", 600},
		{"v1", []string{fmt.Sprintf(v1, "/"), "proc/self/cgroup = 5:cpu:/x|4:memory:/a",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes = 8000",
			"sys/fs/cgroup/memory/a/memory.usage_in_bytes = 5000",
			"sys/fs/cgroup/memory/a/memory.stat = inactive_file 1|total_inactive_file 50|total_active_file 5",
			"sys/fs/cgroup/memory/memory.limit_in_bytes = 9223372036854771712",
			"sys/fs/cgroup/memory/memory.usage_in_bytes = 5000"},
			3055, "memory that cgroup /a has left", 8000},
		{"v1 container", []string{fmt.Sprintf(v1, "/docker/x"), "proc/self/cgroup = 4:memory:/docker/x",
			"sys/fs/cgroup/memory/memory.limit_in_bytes = 8000", "sys/fs/cgroup/memory/memory.usage_in_bytes = 5000"},
			3000, "memory that cgroup / has left", 8000},
		{"beside", []string{fmt.Sprintf(v1, "/"), "proc/self/cgroup = 4:memory:/../x",
			"sys/fs/cgroup/memory/memory.limit_in_bytes = no", "sys/fs/x/memory.limit_in_bytes = 1"}, -1, "", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			for _, f := range c.files {
				name, text, _ := strings.Cut(f, " = ")
				name = filepath.Join(root, name)
				if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(name, []byte(strings.ReplaceAll(text, "|", "\n")+"\n"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if have, of := room(root); have != c.have || of != c.of {
				t.Errorf("%d of %q, want %d of %q", have, of, c.have, c.of)
			}
			if least := limited(root); least != c.limit {
				t.Errorf("the least limit of a cgroup is %d, want %d", least, c.limit)
			}
		})
	}
}
