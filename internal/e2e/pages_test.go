package e2e

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/internal/mem"
)

const (
	pageKB    = 2048 // of a huge page
	nodePages = 32   // 64 MiB, what each memory node of these tests lends
)

// field is a number of /proc/PID/status, in kB.
func (d *daemon) field(name string) (kB int) {
	d.w.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.pid()))
	if err != nil {
		d.w.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[0] == name+":" {
			if kB, err = strconv.Atoi(f[1]); err != nil {
				d.w.t.Fatal(err)
			}
			return kB
		}
	}
	d.w.t.Fatalf("no %s in\n%s", name, b)
	return 0
}

// regions are the regions that processes map, their own and others', as sizes in kB by the
// kB of a page.
func regions(ds ...*daemon) map[int]int {
	t := ds[0].w.t
	t.Helper()
	sizes, seen := map[int]int{}, map[string]bool{}
	for _, d := range ds {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", d.pid()))
		if err != nil {
			t.Fatal(err)
		}
		region, size := false, 0
		for line := range strings.Lines(string(b)) {
			switch w := strings.Fields(line); {
			case !strings.HasSuffix(w[0], ":"): // addresses, rights, offset, device, inode, name
				region = strings.Contains(line, "kvd-pg-") && !seen[w[4]]
				seen[w[4]] = seen[w[4]] || region
			case region && w[0] == "Size:":
				size, err = strconv.Atoi(w[1])
			case region && w[0] == "KernelPageSize:":
				var page int
				page, err = strconv.Atoi(w[1])
				sizes[page] += size
			}
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
		}
	}
	return sizes
}

// moves puts values over each provider and gets them over each.
func (w *world) moves() {
	w.t.Helper()
	value := func(k string) []byte { return bytes.Repeat([]byte(k), 200_000) }
	for _, p := range []string{"shm", "tcp"} {
		for i := range 8 {
			k := fmt.Sprint(p, i)
			w.must(value(k), "--provider", p, "put", k)
		}
	}
	for _, by := range []string{"shm", "tcp"} {
		for _, p := range []string{"shm", "tcp"} {
			for i := range 8 {
				k := fmt.Sprint(by, i)
				if got := w.must(nil, "--provider", p, "get", k); !bytes.Equal(got, value(k)) {
					w.t.Fatalf("%s over %s: %d bytes", k, p, len(got))
				}
			}
		}
	}
}

// A store on huge pages: its regions are made of them, both providers serve them, and they
// come back however the memory nodes end. A memory node for which there are not enough does not start.
func TestHugePages(t *testing.T) {
	if os.Getenv("KVD_PAGES") != "1" {
		t.Skip("it takes huge pages, and counts the machine's: make test-pages, as root")
	}
	free := func() int { return int(mem.FreeHugePages(pageKB << 10)) }
	before := free()
	if want := 2*nodePages + 8; before < want {
		t.Fatalf("%d huge pages of 2 MiB are free, want %d", before, want)
	}
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(append(w.directory(t.TempDir(), freeAddr(t)), "--lease", "10s")...)
	node := func(name string) []string { return append(w.memnode(name), "--huge-pages", "2MiB") }
	nodes := []*daemon{w.start(node("m1")...), w.start(append(node("m2"), "--lock")...)}
	w.moves()
	sizes := regions(nodes...)
	if taken := before - free(); len(sizes) != 1 || taken == 0 || taken*pageKB != sizes[pageKB] {
		t.Errorf("regions by page size: %v kB, of %d huge pages", sizes, taken)
	}
	// Pages that are promised and were not touched yet are not free.
	left := free()
	m3 := w.spawn("memnode", "--name", "m3", "--directory", w.dir, "--memory", fmt.Sprintf("%dMiB", 2*(left+1)),
		"--huge-pages", "2MiB")
	if status := m3.wait(); status == 0 ||
		!strings.Contains(m3.stderr.String(), fmt.Sprintf("HugePages_Free (2 MiB pages) is %d pages, want %d", left,
			left+1)) {
		t.Errorf("with %d pages left for %d: exit status %d\n%s", left, left+1, status, m3.stderr)
	}
	if status := nodes[0].signal(syscall.SIGTERM); status != 0 {
		t.Errorf("exit status %d after SIGTERM\n%s", status, nodes[0].stderr)
	}
	nodes[1].signal(syscall.SIGKILL)
	w.until(fmt.Sprintf("%d huge pages to be free again", before), func() bool { return free() >= before })
}

// A store that locks its memory: all of a region is in memory from the first moment.
func TestLockedMemory(t *testing.T) {
	var r syscall.Rlimit
	const rlimitMemlock = 8
	if err := syscall.Getrlimit(rlimitMemlock, &r); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 && r.Cur < nodePages*pageKB<<10 {
		t.Skipf("RLIMIT_MEMLOCK is %d bytes and this is not root, want %d: ulimit -l", r.Cur, nodePages*pageKB<<10)
	}
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(append(w.directory(t.TempDir(), freeAddr(t)), "--lease", "10s")...)
	d := w.start(append(w.memnode("m1"), "--lock")...)
	w.moves()
	made := 0
	for _, kB := range regions(d) {
		made += kB
	}
	if locked, there := d.field("VmLck"), d.field("RssShmem"); made == 0 || locked < made || there < made {
		t.Errorf("%d kB of regions, %d kB locked, %d kB of shared memory there", made, locked, there)
	}
	if status := d.signal(syscall.SIGTERM); status != 0 {
		t.Errorf("exit status %d after SIGTERM\n%s", status, d.stderr)
	}
}
