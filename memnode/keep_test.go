package memnode

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

var (
	_ Keeper = (*keeper.Client)(nil)
	_ Keeper = (*keeper.Folder)(nil)
)

// memory is a keeper in this process.
type memory struct {
	mu    sync.Mutex
	items map[string]int
	err   error             // of Put
	deaf  error             // of List
	short bool              // Put fails while something is kept aside
	drops func(name string) // before Drop does anything
}

func newMemory(t *testing.T) *memory {
	k := &memory{items: map[string]int{}}
	t.Cleanup(func() {
		for _, fd := range k.items {
			_ = unix.Close(fd)
		}
	})
	return k
}

func (k *memory) Create(string) (*os.File, error) { return nil, nil }

func (k *memory) Put(name string, _ []byte, fds ...int) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for held := range k.items {
		if k.short && strings.HasPrefix(held, rescueItems) && strings.HasPrefix(name, RegionItems) {
			return unix.ENOSPC
		}
	}
	if k.err != nil {
		return k.err
	}
	fd, err := unix.FcntlInt(uintptr(fds[0]), unix.F_DUPFD_CLOEXEC, 0)
	if _, taken := k.items[name]; taken || len(fds) != 1 || err != nil {
		return fmt.Errorf("put %q: %w", name, err)
	}
	k.items[name] = fd
	return nil
}

func (k *memory) Drop(name string) error {
	if k.drops != nil {
		k.drops(name)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	fd, ok := k.items[name]
	if !ok {
		return fmt.Errorf("drop %q: nothing is there", name)
	}
	delete(k.items, name)
	return unix.Close(fd)
}

func (k *memory) Rename(from, to string) (string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	fd, ok := k.items[from]
	if _, taken := k.items[to]; !ok || taken {
		return "", fmt.Errorf("rename %q to %q: there is the one %v, and the other %v", from, to, ok, taken)
	}
	delete(k.items, from)
	k.items[to] = fd
	return "here", nil
}

func (k *memory) List() (items []*keeper.Item, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.deaf != nil {
		return nil, k.deaf
	}
	for name, fd := range k.items {
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		items = append(items, &keeper.Item{Name: name, FDs: []int{dup}})
	}
	return items, nil
}

func (k *memory) names() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.items))
}

// crash ends a node as a process ends that is killed: nobody is told, and its memory is not freed.
func crash(t *testing.T, n *Node) {
	t.Helper()
	n.closeOnce.Do(func() {
		n.cancel()
		n.wg.Wait()
		var errs []error
		for _, d := range n.devices {
			errs = append(errs, d.listener.Close())
		}
		for _, r := range n.mu.regions {
			for _, m := range slices.Backward(r.mrs) {
				errs = append(errs, m.Deregister())
			}
		}
		for _, d := range n.devices {
			for _, pd := range d.pds {
				errs = append(errs, pd.Dealloc())
			}
		}
		if err := errors.Join(errs...); err != nil {
			t.Error(err)
		}
	})
	n.mu.regions, n.mu.retained, n.mu.used, n.mu.reg = nil, nil, 0, nil // what the test's end looks at
}

// keeps opens a node with a keeper.
func keeps(t *testing.T, dir *directory, k *memory, change func(*Options)) (*Node, *logged) {
	t.Helper()
	return openWith(t, dir, 1<<20, func(o *Options) {
		o.Keeper = k
		change(o)
	}, "shm", "tcp")
}

func same(*Options) {}

// TestWarm: a process that is killed is followed by one with the same memory under the same incarnation and rkeys, and
// a greater boot; nothing is published again. A session that ended meanwhile does not get in.
func TestWarm(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	dir.want(2, 2)
	n, _ := keeps(t, dir, k, same)
	for _, provider := range []string{"shm", "tcp"} {
		key := dir.keys(1, provider)
		l := mustDial(t, dir, provider, token.Grant{Session: 5, Namespace: 1},
			map[string]uint32{"shm": 0, "tcp": 1}[provider])
		if err := l.write(key.HeapRkey, key.HeapBase, "by "+provider); err != nil {
			t.Fatal(err)
		}
	}
	dir.keys(2, "tcp")
	first := n.Stats()
	if first.Kept != KeptFirst {
		t.Errorf("the first process kept %v", first.Kept)
	}
	dir.beats(2)
	was := dir.published[1]
	publications := dir.publications
	crash(t, n)
	dir.change(func() { dir.ended = append(dir.ended, 5) })

	n, log := keeps(t, dir, k, same)
	dir.beats(3)
	s := n.Stats()
	if s.Kept != KeptAll || s.Incarnation != first.Incarnation || s.Boot <= first.Boot || len(s.Regions) != 2 ||
		s.RegisteredBytes != first.RegisteredBytes {
		t.Errorf("the second process: %+v\nthe first: %+v", s, first)
	}
	if q := dir.registered[1]; q.Incarnation != first.Incarnation || q.Boot != s.Boot || !q.Keeps {
		t.Errorf("registered: %v", q)
	}
	if dir.publications != publications {
		t.Errorf("%d publications, %d before", dir.publications, publications)
	}
	if log.count("memory kept by the keeper is taken over") != 1 {
		t.Error("nothing is said of the memory")
	}
	if _, err := dial(t, dir, "tcp", private(token.Grant{Session: 5, Namespace: 1}, 0)); err == nil {
		t.Error("a session that ended gets in")
	}
	for _, provider := range []string{"shm", "tcp"} {
		l := mustDial(t, dir, provider, token.Grant{Session: 6, Namespace: 1},
			map[string]uint32{"shm": 0, "tcp": 1}[provider])
		for _, x := range was.Keys {
			if x.Provider != provider {
				continue
			}
			b, err := l.read(x.HeapRkey, x.HeapBase, 6)
			if err != nil || string(b) != "by tcp" { // the later of both, at the same place
				t.Errorf("%s reads %q, %v", provider, b, err)
			}
		}
	}
}

// anyKeys is a provider that has its rkeys from an adapter.
type anyKeys struct{ driver.Device }

func (d anyKeys) Caps() driver.Caps {
	c := d.Device.Caps()
	c.ChoosesKeys = false
	return c
}

// TestWarmWithOtherKeys: rkeys that the provider cannot give again are others, which are published for the greater
// boot; those of other providers stay. Those of the process before lead nowhere.
func TestWarmWithOtherKeys(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	dir.want(2, 1)
	byAdapter := func(o *Options) {
		o.Devices[1].Device = rdma.NewDevice("tcp", anyKeys{o.Devices[1].Device.Driver()})
	}
	n, _ := keeps(t, dir, k, byAdapter)
	was := map[string]*dirpb.RegionKeys{"shm": dir.keys(1, "shm"), "tcp": dir.keys(1, "tcp")}
	dir.keys(2, "tcp")
	l := mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
	if err := l.write(was["tcp"].HeapRkey, was["tcp"].HeapBase, "kept"); err != nil {
		t.Fatal(err)
	}
	publications := dir.publications
	crash(t, n)

	n, _ = keeps(t, dir, k, byAdapter)
	dir.until("publications", func() bool { return dir.publications == publications+2 })
	dir.beats(3)
	now := map[string]*dirpb.RegionKeys{"shm": dir.keys(1, "shm"), "tcp": dir.keys(1, "tcp")}
	dir.change(func() {
		if q := dir.published[1]; dir.publications != publications+2 || q.Boot != n.Stats().Boot ||
			q.Incarnation != n.Stats().Incarnation || n.Stats().Kept != KeptAll {
			t.Errorf("%d publications, %d before; the last: %v", dir.publications, publications, q)
		}
	})
	if !proto.Equal(now["shm"], was["shm"]) || now["tcp"].IndexRkey == was["tcp"].IndexRkey ||
		now["tcp"].HeapRkey == was["tcp"].HeapRkey {
		t.Errorf("the keys were %v and are %v", was, now)
	}
	l = mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
	if b, err := l.read(now["tcp"].HeapRkey, now["tcp"].HeapBase, 4); err != nil || string(b) != "kept" {
		t.Errorf("%q, %v", b, err)
	}
	if b, err := l.read(was["tcp"].HeapRkey, was["tcp"].HeapBase, 4); err == nil {
		t.Errorf("the former rkey reads %q", b)
	}
}

// TestWarmDropsWhatIsNotWanted: regions that the directory wants no more, or of another time, go as ever, and the
// keeper has none of them.
func TestWarmDropsWhatIsNotWanted(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.wantSince(1, 1, 10)
	dir.wantSince(2, 1, 10)
	dir.wantSince(3, 1, 10)
	n, _ := keeps(t, dir, k, same)
	for pg := range uint32(3) {
		dir.keys(pg+1, "tcp")
	}
	crash(t, n)
	dir.change(func() { dir.regions = []*dirpb.WantRegion{dir.regions[0]} })
	dir.wantSince(2, 1, 11)
	dir.change(func() { delete(dir.published, 2) })
	n, _ = keeps(t, dir, k, same)
	dir.keys(2, "tcp")
	dir.beats(2)
	if s := n.Stats(); s.Kept != KeptAll || len(s.Regions) != 2 {
		t.Errorf("%+v", s)
	}
	if names := k.names(); len(names) != 3 || !strings.HasPrefix(names[0], "region/1/") ||
		!strings.HasPrefix(names[1], "region/2/") || names[2] != "state" {
		t.Errorf("held: %q", names)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if names := k.names(); len(names) != 0 {
		t.Errorf("after an orderly end the keeper holds %q", names)
	}
}

// TestStartsEmpty: if anything is missing or cannot be believed, nothing is kept, the incarnation is new, and the
// reason is said once.
func TestStartsEmpty(t *testing.T) {
	stateOf := func(t *testing.T, k *memory) []byte {
		b, err := unix.Mmap(k.items["state"], 0, 2*statePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Munmap(b) })
		return b
	}
	for what, c := range map[string]struct {
		change func(*testing.T, *directory, *memory)
		next   func(*Options)
		want   Kept
	}{
		"a flipped bit in each page": {func(t *testing.T, _ *directory, k *memory) {
			b := stateOf(t, k)
			b[100], b[statePage+200] = b[100]^1, b[statePage+200]^1
		}, same, KeptDamaged},
		"another version": {func(t *testing.T, _ *directory, k *memory) {
			b, le := stateOf(t, k), binary.LittleEndian
			for _, p := range [][]byte{b[:statePage], b[statePage:]} {
				le.PutUint32(p[8:], stateFormat+1)
				le.PutUint32(p[12:], sumOf(p, le.Uint64(p[24:])))
			}
		}, same, KeptVersion},
		"the state of nobody": {func(t *testing.T, _ *directory, k *memory) {
			_ = k.Drop("state")
			k.items["state"], _ = unix.MemfdCreate("other", unix.MFD_CLOEXEC)
		}, same, KeptDamaged},
		"no state":      {func(t *testing.T, _ *directory, k *memory) { _ = k.Drop("state") }, same, KeptFirst},
		"a region less": {func(t *testing.T, _ *directory, k *memory) { _ = k.Drop(k.names()[0]) }, same, KeptMissing},
		"a region of another size": {func(t *testing.T, _ *directory, k *memory) {
			name := k.names()[0]
			_ = k.Drop(name)
			k.items[name], _ = unix.MemfdCreate("other", unix.MFD_CLOEXEC)
		}, same, KeptMissing},
		"another machine": {func(*testing.T, *directory, *memory) {}, func(o *Options) {
			o.HostID = "host2"
		}, KeptStranger},
		"an unknown machine": {func(*testing.T, *directory, *memory) {}, func(o *Options) {
			o.HostID = " "
		}, KeptStranger},
		"another name": {func(*testing.T, *directory, *memory) {}, func(o *Options) {
			o.Name = "m2"
		}, KeptStranger},
		"another cluster": {func(_ *testing.T, d *directory, _ *memory) {
			d.change(func() { d.clusterID = "c2" })
		}, same, KeptDisowned},
		"a door that cannot be closed": {func(*testing.T, *directory, *memory) {}, func(o *Options) {
			o.Door = func() ([]string, error) { return nil, errors.New("a cell is gone") }
		}, KeptOpen},
	} {
		t.Run(what, func(t *testing.T) {
			dir, k := newDirectory(t), newMemory(t)
			dir.want(1, 1)
			dir.want(2, 1)
			n, _ := keeps(t, dir, k, same)
			key := dir.keys(1, "tcp")
			l := mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
			if err := errors.Join(l.write(key.HeapRkey, key.HeapBase, "gone"),
				l.write(dir.keys(2, "tcp").HeapRkey, 0, "gone")); err != nil {
				t.Fatal(err)
			}
			first := n.Stats()
			crash(t, n)
			c.change(t, dir, k)
			n, log := keeps(t, dir, k, c.next)
			for pg := range uint32(2) {
				key := dir.keys(pg+1, "tcp")
				l := mustDial(t, dir, "tcp", token.Grant{Session: 6, Namespace: 1}, pg)
				if b, err := l.read(key.HeapRkey, key.HeapBase, 4); err != nil || string(b) != "\x00\x00\x00\x00" {
					t.Errorf("pg %d: %q %v", pg+1, b, err)
				}
			}
			if s := n.Stats(); s.Kept != c.want || s.Incarnation == first.Incarnation ||
				s.RegisteredBytes != first.RegisteredBytes {
				t.Errorf("%+v", s)
			}
			if said := log.count("memory that the keeper held is given up"); c.want != KeptFirst &&
				c.want != KeptDisowned && said != 1 {
				t.Errorf("the reason is said %d times", said)
			}
			names := k.names()
			rescued := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
				return !strings.HasPrefix(name, rescueItems)
			})
			if len(names)-len(rescued) != 3 || len(rescued) > 0 != c.want.isRescued() {
				t.Errorf("held: %q", names)
			}
			for _, name := range rescued {
				b := make([]byte, 4)
				if _, err := unix.Pread(k.items[name], b, indexBytes); strings.HasPrefix(
					name, rescueItems+RegionItems) && what != "a region of another size" &&
					(err != nil || string(b) != "gone") {
					t.Errorf("%s has %q, %v", name, b, err)
				}
			}
			if s := n.Stats(); s.RescuedBytes > 2*regionBytes || s.RescuedBytes == 0 && len(rescued) > 1 {
				t.Errorf("%+v", s)
			}
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
			if names := k.names(); len(names) != 0 {
				t.Errorf("after an orderly end the keeper holds %q", names)
			}
		})
	}
}

// TestRescueGivesWay: one set of memory is kept aside at most, the next process counts it, and it gives way to a region
// that wants its room, not to one that fits.
func TestRescueGivesWay(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.wantSize(1, 384<<10)
	spoil := func(n *Node) *Node {
		crash(t, n)
		b, err := unix.Mmap(k.items[stateItem], 0, 2*statePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		b[100], b[statePage+100] = b[100]^1, b[statePage+100]^1
		if err := unix.Munmap(b); err != nil {
			t.Fatal(err)
		}
		next, _ := keeps(t, dir, k, same)
		dir.keys(1, "tcp")
		return next
	}
	rescued := func() (names []string) {
		return slices.DeleteFunc(k.names(), func(name string) bool { return !strings.HasPrefix(name, rescueItems) })
	}
	n, _ := keeps(t, dir, k, same)
	dir.keys(1, "tcp")
	n = spoil(n)
	first := rescued()
	if s := n.Stats(); len(first) != 2 || s.RescuedBytes != 384<<10 || s.RegisteredBytes != 384<<10 ||
		s.Kept != KeptDamaged {
		t.Errorf("kept aside: %q; %+v", first, s)
	}
	n = spoil(n)
	second := rescued()
	if len(second) != 2 || slices.Equal(first, second) {
		t.Errorf("kept aside: %q after %q", second, first)
	}
	crash(t, n)
	n, _ = keeps(t, dir, k, same)
	if s := n.Stats(); !slices.Equal(rescued(), second) || s.RescuedBytes != 384<<10 || s.Kept != KeptAll {
		t.Errorf("the next process has %q; %+v", rescued(), s)
	}
	dir.wantSize(2, 256<<10)
	dir.keys(2, "tcp")
	if !slices.Equal(rescued(), second) {
		t.Errorf("beside a region that fits there are %q", rescued())
	}
	dir.wantSize(3, 384<<10)
	dir.keys(3, "tcp")
	if s := n.Stats(); len(rescued()) != 0 || s.RescuedBytes != 0 || s.RegisteredBytes != 1<<20 {
		t.Errorf("kept aside: %q; %+v", rescued(), s)
	}
}

// TestGivenUp: the directory refuses the incarnation, which it has declared lost; another refusal is waited out, with
// the memory kept.
func TestGivenUp(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	n, _ := keeps(t, dir, k, same)
	dir.keys(1, "tcp")
	first := n.Stats()
	crash(t, n)
	dir.change(func() { dir.refuse = status.Error(codes.FailedPrecondition, "its regions take more than it lends") })
	beats := dir.heartbeats
	opened := make(chan *Node, 1)
	go func() {
		n, _ := keeps(t, dir, k, same)
		opened <- n
	}()
	dir.until("a question", func() bool { return dir.heartbeats >= beats+2 })
	dir.change(func() { dir.refuse = nil })
	n = <-opened
	if s := n.Stats(); s.Kept != KeptAll || s.Incarnation != first.Incarnation {
		t.Errorf("waited: %+v", s)
	}
	crash(t, n)

	dir.change(func() { dir.refuse, dir.forget = status.Error(codes.FailedPrecondition, "declared lost"), true })
	go func() {
		n, _ := keeps(t, dir, k, same)
		opened <- n
	}()
	dir.until("a question", func() bool { return !dir.forget })
	dir.change(func() { dir.refuse = nil })
	n = <-opened
	if s := n.Stats(); s.Kept != KeptDisowned || s.Incarnation == first.Incarnation {
		t.Errorf("given up: %+v", s)
	}
}

// TestDoor: nobody gets in, and nothing is registered, while a peer of the process before may still write.
func TestDoor(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	n, _ := keeps(t, dir, k, same)
	dir.keys(1, "tcp")
	crash(t, n)
	var mu sync.Mutex
	asked, inside := 0, []string{"pid 12 uid 0"}
	opened := make(chan *Node, 1)
	go func() {
		n, _ := keeps(t, dir, k, func(o *Options) {
			o.Door = func() ([]string, error) {
				mu.Lock()
				defer mu.Unlock()
				asked++
				return inside, nil
			}
		})
		opened <- n
	}()
	registered := 1
	for { // several times, so that it does wait
		dir.change(func() { registered = len(dir.registered) })
		mu.Lock()
		if asked > 3 || registered > 1 {
			break
		}
		mu.Unlock()
	}
	if registered != 1 {
		t.Error("registered with the door open")
	}
	inside = nil
	mu.Unlock()
	if s := (<-opened).Stats(); s.Kept != KeptAll || len(s.Inside) != 0 {
		t.Errorf("%+v", s)
	}
}

// TestNotKept: a region that the keeper does not take is not served.
func TestNotKept(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	n, _ := keeps(t, dir, k, same)
	k.mu.Lock()
	k.err = errors.New("full")
	k.mu.Unlock()
	dir.want(1, 1)
	dir.until("the region's failure", func() bool {
		s := n.Stats()
		return len(s.Regions) == 1 && s.Regions[0].Err != nil && s.RegisteredBytes == 0
	})
	k.mu.Lock()
	k.err = nil
	k.mu.Unlock()
	dir.keys(1, "tcp")
}

// TestRestartIsAsked: a process with a keeper is told once that it is to be replaced; one without is not.
func TestRestartIsAsked(t *testing.T) {
	for _, keeper := range []bool{true, false} {
		dir, k := newDirectory(t), newMemory(t)
		asked := make(chan struct{}, 8)
		openWith(t, dir, 1<<20, func(o *Options) {
			if keeper {
				o.Keeper = k
			}
			o.Restart = func() { asked <- struct{}{} }
		}, "tcp")
		dir.change(func() { dir.restart = true })
		dir.beats(4)
		if n := len(asked); keeper && n != 1 || !keeper && n != 0 {
			t.Errorf("with a keeper %v: asked %d times", keeper, n)
		}
	}
}

// fullDevice has no room for another MR.
type fullDevice struct{ driver.Device }

type fullPD struct{ driver.PD }

func (d fullDevice) AllocPD() (driver.PD, error) {
	pd, err := d.Device.AllocPD()
	return fullPD{pd}, err
}

func (fullPD) RegMRAs(*driver.Memory, int64, int64, driver.Access, uint64) (driver.MR, error) {
	return nil, errors.New("the connection to itself fails")
}

// TestTriesAgain: a process that lacks something to take the memory over leaves it as it is, and asks for another
// process, which has it all.
func TestTriesAgain(t *testing.T) {
	for what, change := range map[string]func(*memory, *Options){
		"an adapter that registers nothing": func(_ *memory, o *Options) {
			o.Devices[0].Device = rdma.NewDevice("tcp", fullDevice{o.Devices[0].Device.Driver()})
		},
		"a keeper that does not answer": func(k *memory, _ *Options) { k.deaf = errors.New("silent") },
		"no descriptors": func(_ *memory, o *Options) {
			o.Door = func() ([]string, error) { return nil, unix.EMFILE }
		},
	} {
		t.Run(what, func(t *testing.T) {
			dir, k := newDirectory(t), newMemory(t)
			dir.want(1, 1)
			n, _ := keeps(t, dir, k, same)
			dir.keys(1, "tcp")
			first, names := n.Stats(), k.names()
			crash(t, n)
			asked := make(chan struct{})
			o := Options{Name: "m1", CapacityBytes: 1 << 20, Directory: dir, HostID: "host1", Keeper: k,
				Restart: func() {
					close(asked)
				},
				Devices: []DeviceListen{{Device: dir.device("tcp"), Addr: "127.0.0.1:0"}}}
			change(k, &o)
			n, err := Open(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			<-asked
			if s := n.Stats(); s.Kept != KeptPending || s.Registered || !slices.Equal(k.names(), names) {
				t.Errorf("%+v, and the keeper holds %q of %q", s, k.names(), names)
			}
			crash(t, n)
			k.deaf = nil
			n, _ = keeps(t, dir, k, same)
			if s := n.Stats(); s.Kept != KeptAll || s.Incarnation != first.Incarnation {
				t.Errorf("%+v", s)
			}
		})
	}
}

// state is what the keeper's holds now, nil if it has none.
func (k *memory) state(t *testing.T) *state {
	t.Helper()
	k.mu.Lock()
	fd, ok := k.items[stateItem]
	k.mu.Unlock()
	if !ok {
		return nil
	}
	b := make([]byte, 2*statePage)
	if _, err := unix.Pread(fd, b, 0); err != nil {
		t.Error(err)
		return nil
	}
	s, err := (&stateFile{mem: &rdma.Memory{Bytes: b}}).read()
	if err != nil {
		t.Error(err)
	}
	return s
}

// kept gives what the state says of a placement group, nil for nothing.
func (s *state) kept(pg uint32) *keptRegion {
	for _, r := range s.regions {
		if r.pg == pg {
			return r
		}
	}
	return nil
}

// TestStateComesFirst: the state, and the keeper, have a region before the directory is told of its keys, and the state
// has it no more before the keeper lets go of its memory. A region that is retained is there without keys.
func TestStateComesFirst(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.told = func(q *dirpb.PublishRegionRequest) {
		r := k.state(t).kept(q.PgId)
		if r == nil || len(r.keys) != len(q.Keys) || r.since != q.Since || !slices.Contains(k.names(), r.item) {
			t.Errorf("%v is published, and the state has %+v, the keeper %q", q, r, k.names())
		}
	}
	dropped := make(chan string, 8)
	k.drops = func(name string) {
		if s := k.state(t); strings.HasPrefix(name, RegionItems) &&
			slices.ContainsFunc(s.regions, func(r *keptRegion) bool {
				return r.item == name
			}) {
			t.Errorf("%s is dropped, and the state has %+v", name, s.regions)
		}
		dropped <- name
	}
	for pg := range uint32(3) {
		dir.wantSince(pg+1, 1, 10)
	}
	n, _ := keeps(t, dir, k, same)
	for pg := range uint32(3) {
		dir.keys(pg+1, "tcp")
	}
	// By itself: whatever else changes has the state written, too.
	dir.change(func() { dir.regions, dir.retain = dir.regions[:2], []uint32{3} })
	testutil.Until(t, `len(n.Stats().Regions) == 2`, func() bool { return len(n.Stats().Regions) == 2 })
	if s := k.state(t); len(s.regions) != 3 || len(s.kept(3).keys) != 0 {
		t.Errorf("the state has %+v", s.regions)
	}
	item := k.state(t).kept(2).item
	dir.change(func() { dir.regions = dir.regions[:1] })
	if got := <-dropped; got != item {
		t.Errorf("dropped is %s, want %s", got, item)
	}
	testutil.Until(t, `len(n.Stats().Regions) == 1`, func() bool { return len(n.Stats().Regions) == 1 })
	if s := k.state(t); len(s.regions) != 2 || len(s.kept(1).keys) != 2 || len(s.kept(3).keys) != 0 {
		t.Errorf("the state has %+v", s.regions)
	}
	dir.change(func() { dir.retain = nil })
	<-dropped
	if s := k.state(t); len(s.regions) != 1 {
		t.Errorf("the state has %+v", s.regions)
	}
}

// TestNobodyBeforeTheState: while the state does not say that this process is registered, nobody gets in.
func TestNobodyBeforeTheState(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	k.err = errors.New("full")
	opened := make(chan *Node, 1)
	go func() {
		n, _ := keeps(t, dir, k, same)
		opened <- n
	}()
	dir.until("registrations", func() bool { return len(dir.registered) > 2 })
	if _, err := dial(t, dir, "tcp", private(rw, 0)); !errors.Is(err, rdma.ErrRefused) ||
		!strings.Contains(err.Error(), "not registered") {
		t.Errorf("got %v, want a refusal", err)
	}
	k.mu.Lock()
	k.err = nil
	k.mu.Unlock()
	if s := (<-opened).Stats(); !s.Registered {
		t.Errorf("%+v", s)
	}
}

// TestWarmGivesBackTheRest: regions at the keeper that the state does not name go, and whatever else the keeper holds
// stays.
func TestWarmGivesBackTheRest(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	n, _ := keeps(t, dir, k, same)
	dir.keys(1, "tcp")
	names := k.names()
	crash(t, n)
	for _, name := range []string{"region/1/0", "region/7/0", "listen/tcp"} {
		k.items[name], _ = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	n, _ = keeps(t, dir, k, same)
	if got := k.names(); n.Stats().Kept != KeptAll || !slices.Equal(got, append([]string{"listen/tcp"}, names...)) {
		t.Errorf("%v, held: %q", n.Stats().Kept, got)
	}
	crash(t, n)
}

// TestAnotherCluster: a directory that has become another cluster's numbers its sessions anew.
func TestAnotherCluster(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	keeps(t, dir, k, same)
	dir.keys(1, "tcp")
	dir.change(func() { dir.forget, dir.clusterID, dir.latest = true, "c2", 3 })
	dir.until("registration", func() bool { return len(dir.registered) == 2 })
	dir.keys(1, "tcp")
	mustDial(t, dir, "tcp", token.Grant{Session: 4, Namespace: 1}, 0) // younger than what it has told of
	if s := k.state(t); s.cluster != "c2" {
		t.Errorf("the state is of cluster %q", s.cluster)
	}
}

// TestEveryByteFlipped: with any byte of a page of its state changed a process takes everything over, and makes the
// page whole.
func TestEveryByteFlipped(t *testing.T) {
	dir, k := newDirectory(t), newMemory(t)
	dir.want(1, 1)
	n, _ := keeps(t, dir, k, same)
	key := dir.keys(1, "tcp")
	l := mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
	if err := l.write(key.HeapRkey, key.HeapBase, "kept"); err != nil {
		t.Fatal(err)
	}
	first := n.Stats()
	for at, used := 0, 1; at < used; at++ {
		crash(t, n)
		b, err := unix.Mmap(k.items[stateItem], 0, 2*statePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		f := &stateFile{mem: &rdma.Memory{Bytes: b}}
		s, err := f.read()
		if err != nil || len(s.regions) != 1 || f.torn {
			t.Fatalf("before byte %d: %+v, %v", at, s, err)
		}
		used = stateHead + len(s.encode())
		f.page(uint64(at/3) % 2)[at] ^= 1 << (at % 8)
		log := (*logged)(nil)
		n, log = keeps(t, dir, k, same)
		if got := n.Stats(); got.Kept != KeptAll || got.Incarnation != first.Incarnation ||
			log.count("a page of the state that the earlier process left is damaged") != 1 {
			t.Fatalf("byte %d: %+v", at, got)
		}
		if _, err := f.read(); err != nil || f.torn {
			t.Fatalf("byte %d: the page is still damaged: %v", at, f.spoiled)
		}
		if err := unix.Munmap(b); err != nil {
			t.Fatal(err)
		}
	}
	l = mustDial(t, dir, "tcp", token.Grant{Session: 5, Namespace: 1}, 0)
	if b, err := l.read(key.HeapRkey, key.HeapBase, 4); err != nil || string(b) != "kept" {
		t.Fatalf("%q, %v", b, err)
	}
}
