package memnode

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/rdma"
)

// Keeper holds descriptors beyond this process; *keeper.Client and *keeper.Folder are. Its methods may be called
// concurrently.
type Keeper interface {
	// Create gives the file that is to be the memory of an item, which Drop removes; nil: it is to be a memfd, which
	// Put holds.
	Create(name string) (*os.File, error)
	// Put holds duplicates of fds under a name that is free, but for that of its own file.
	Put(name string, meta []byte, fds ...int) error
	// Drop closes what is held under a name.
	Drop(name string) error
	// Rename has what is held under a name be held under another one, which is free, and says where somebody finds it.
	Rename(from, to string) (where string, err error)
	// List gives what is held, which the caller closes.
	List() ([]*keeper.Item, error)
}

// The items of a node's at its keeper: its state, and a memfd for each region. RegionItems begins the latter's names,
// and without one of them there is nothing to keep. rescueItems begins those of what was kept aside.
const (
	stateItem   = "state"
	RegionItems = "region/"
	rescueItems = "rescue/"
)

// Kept says what a process had of the one before it. The zero value has no meaning.
type Kept uint8

const (
	// KeptOff: there is no keeper.
	KeptOff Kept = 1 + iota
	// KeptPending: it is being found out.
	KeptPending
	// KeptFirst: there was no process before.
	KeptFirst
	// KeptAll: all regions are as they were.
	KeptAll
	// KeptDamaged: the state cannot be believed.
	KeptDamaged
	// KeptVersion: the state is of another version.
	KeptVersion
	// KeptStranger: the state is of another memory node, or of another life of the machine.
	KeptStranger
	// KeptMissing: the memory of some region is gone or not as the state says, or cannot be mapped.
	KeptMissing
	// KeptOpen: it is not known which peers may still write to the memory.
	KeptOpen
	// KeptDisowned: the directory had given the memory up, or is another cluster's.
	KeptDisowned
	// KeptPutBack: the memory is of an earlier time than that of the process which registered last.
	KeptPutBack
)

// NumKept bounds arrays indexed by Kept.
const NumKept = 12

func (k Kept) String() string {
	names := [NumKept]string{"invalid", "off", "pending", "first", "kept", "damaged", "version", "stranger", "missing",
		"open", "disowned", "putback"}
	if k >= NumKept {
		return fmt.Sprintf("Kept(%d)", uint8(k))
	}
	return names[k]
}

// isRescued reports whether what is given up for this reason may be worth something to somebody who looks at it.
func (k Kept) isRescued() bool {
	return k == KeptDamaged || k == KeptVersion || k == KeptStranger || k == KeptMissing || k == KeptPutBack
}

// keeping is what a node has at its keeper.
type keeping struct {
	mu   sync.Mutex
	file *stateFile // nil: there is no keeper, or not yet
	// after are the nonces of processes whose memory this one may have, of which one has registered last; this
	// process's own among them. Only run changes it.
	after []uint64
}

// warm takes over what the process before this one had: it gives the state with every region mapped and registered, or
// nil if this process starts with nothing, and then nothing is left of what was there, or it is kept aside.
func (n *Node) warm() *state {
	if n.o.Keeper == nil {
		return nil
	}
	s, why, err := n.inherit()
	if n.ctx.Err() != nil {
		return nil
	}
	if errno := syscall.Errno(0); why == KeptPending || errors.As(err, &errno) {
		n.tryAgain(err)
		return nil
	}
	n.setKept(why)
	switch {
	case s != nil:
		n.log.Info("memory kept by the keeper is taken over", "regions", len(s.regions), "bytes",
			n.Stats().RegisteredBytes, "incarnation", s.incarnation, "boot", n.boot)
		return s
	case why == KeptFirst:
		n.log.Info("no earlier process has left memory: starting empty")
	default:
		n.log.Warn("memory that the keeper held is given up: starting empty", "reason", why.String(), "err", err)
	}
	n.forgetKept(why)
	return nil
}

// tryAgain leaves the memory to another process, as this one cannot tell whether it can be taken over: it lacks
// descriptors, or memory, or its keeper or adapter does not answer. It returns when the node is closed.
func (n *Node) tryAgain(err error) {
	n.log.Error("memory that the keeper holds cannot be taken over now: it is kept, and another process tries again",
		"err", err)
	n.mu.Lock()
	n.mu.err = err // for Ready
	n.mu.Unlock()
	n.report(err, false)
	if n.wait(time.Second, nil) && n.o.Restart != nil {
		n.restarts.Do(n.o.Restart)
	}
	<-n.ctx.Done()
}

func (n *Node) setKept(why Kept) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.kept = why
}

// inherit is warm without its consequences for what cannot be taken over.
func (n *Node) inherit() (*state, Kept, error) {
	items, err := n.o.Keeper.List()
	if err != nil {
		return nil, KeptPending, err
	}
	held := make(map[string]*keeper.Item, len(items))
	for _, i := range items {
		held[i.Name] = i
		defer i.Close()
	}
	n.countRescued(items)
	s, why, err := n.readState(held[stateItem])
	if err != nil {
		return nil, why, err
	}
	var regions []*region
	need := int64(0)
	for _, k := range s.regions {
		if len(k.keys) > 0 {
			need += int64(k.regionBytes)
		}
	}
	if err := CheckCapacity(need, n.o.CapacityBytes); err != nil {
		return nil, KeptPending, err
	}
	for _, k := range s.regions {
		r, err := n.adopt(k, held[k.item])
		if len(k.keys) == 0 { // retained: it is missed by nobody
			if err != nil {
				n.log.Warn("memory that was retained cannot be taken over", "pg", k.pg, "err", err)
				continue
			}
			delete(held, k.item)
			continue
		}
		if err != nil {
			return nil, KeptMissing, fmt.Errorf("placement group %d: %w", k.pg, err)
		}
		regions = append(regions, r)
		delete(held, k.item)
	}
	for name := range held { // which a process that died was about to use, or had given up
		if strings.HasPrefix(name, RegionItems) {
			n.log.Info("memory of a region that was not in use is given back", "item", name)
			if err := n.o.Keeper.Drop(name); err != nil {
				return nil, KeptPending, err
			}
		}
	}
	if err := n.doorClosed(); err != nil {
		return nil, KeptOpen, err
	}
	if err := n.registerAll(regions); err != nil {
		// The memory is there, and mapped: an adapter that is short of something, or does not answer, takes nothing of
		// it away.
		return nil, KeptPending, err
	}
	// A boot that is not written down could be that of two processes, and so could a nonce.
	s.boot++
	if len(s.lives) == maxLives {
		// So many have ended before they heard that they are registered. This one passes for the last of them.
		n.nonce = s.lives[maxLives-1]
	} else {
		s.lives = append(s.lives, n.nonce)
	}
	if err := n.keep.file.write(s); err != nil {
		return nil, KeptDamaged, err
	}
	n.mu.Lock()
	n.boot = s.boot
	n.mu.clusterID, n.mu.told = s.cluster, s.told
	n.mu.Unlock()
	n.keep.after = s.lives
	return s, KeptAll, nil
}

// CheckCapacity refuses, with ErrCapacity, to lend fewer bytes than regions that are there need.
func CheckCapacity(need, lent int64) error {
	if need <= lent {
		return nil
	}
	return fmt.Errorf("%w: regions need %d MiB, and memory is %d MiB: raise it, or drain the memory node first",
		ErrCapacity, need>>20, lent>>20)
}

// readState opens the state that item holds and checks that it is this node's.
func (n *Node) readState(item *keeper.Item) (*state, Kept, error) {
	if item == nil {
		return nil, KeptFirst, errStateNone
	}
	o := rdma.AllocOptions{Name: "kvd-state"}
	if item.File {
		o.HugePageBytes = n.o.HugePageBytes // all files beside it have pages of one size
	}
	m, err := n.allocKept(item, 2*statePage, o)
	if err != nil {
		return nil, KeptDamaged, err
	}
	n.keep.file = &stateFile{mem: m}
	s, err := n.keep.file.read()
	switch {
	case errors.Is(err, errStateNone):
		return nil, KeptFirst, err
	case errors.Is(err, errStateFormat):
		return nil, KeptVersion, err
	case err != nil:
		return nil, KeptDamaged, err
	case s.node != n.o.Name:
		return nil, KeptStranger, fmt.Errorf("the state is of memory node %q, and this is %q", s.node, n.o.Name)
	case !hostid.Same(s.host, n.o.HostID):
		return nil, KeptStranger, fmt.Errorf("the state is of machine %q, and this is %q", s.host, n.o.HostID)
	}
	if f := n.keep.file; f.torn {
		if f.spoiled != nil {
			n.log.Error("a page of the state that the earlier process left is damaged: the other one serves", "err",
				f.spoiled)
		}
		if err := f.write(s); err != nil { // before anything of it is acted on
			return nil, KeptDamaged, err
		}
	}
	return s, KeptAll, nil
}

// allocator is the device whose memory all others can register.
func (n *Node) allocator() *rdma.Device {
	for _, d := range n.devices {
		if d.dev.Name() == "shm" {
			return d.dev
		}
	}
	return n.devices[0].dev
}

// adopt maps a region that item holds and makes it one of the node's, or one that it retains.
func (n *Node) adopt(k *keptRegion, item *keeper.Item) (*region, error) {
	if item == nil {
		return nil, errors.New("the keeper does not hold its memory")
	}
	m, err := n.allocKept(item, int64(k.regionBytes),
		rdma.AllocOptions{Name: regionName(k.pg), HugePageBytes: int(k.pageBytes), Lock: n.o.Lock})
	if err != nil {
		return nil, err
	}
	r := &region{inc: k.incarnation, bytes: int64(len(m.Bytes)), mem: m, item: k.item, pageBytes: int(k.pageBytes),
		old: k.keys, want: &dirpb.WantRegion{
			PgId: k.pg, NamespaceId: k.namespace, RegionBytes: k.regionBytes, IndexBytes: k.indexSize, Epoch: k.epoch,
			Since: k.since,
		}}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.used += r.bytes
	if len(k.keys) == 0 {
		n.mu.retained[k.pg] = r
	} else {
		n.mu.regions[k.pg] = r
	}
	return r, nil
}

// allocKept maps what item holds. It takes over the descriptor.
func (n *Node) allocKept(item *keeper.Item, size int64, o rdma.AllocOptions) (*rdma.Memory, error) {
	f := os.NewFile(uintptr(item.FDs[0]), item.Name)
	item.FDs = item.FDs[1:]
	defer f.Close()
	if item.File {
		if st, err := f.Stat(); err != nil || st.Size() == 0 {
			return nil, errors.Join(errors.New("its file is empty: the process that made it did not get further"), err)
		}
		o.File = f
	} else {
		o.Adopt, o.Shared = f, true
	}
	return n.allocator().Alloc(size, o)
}

// allocItem makes memory that the keeper holds under a name from then on, whatever becomes of this process. After an
// error it holds nothing.
func (n *Node) allocItem(name string, size int64, o rdma.AllocOptions) (*rdma.Memory, error) {
	f, err := n.o.Keeper.Create(name)
	if err != nil {
		return nil, err
	}
	if o.File, o.Shared = f, f == nil; f != nil {
		defer f.Close()
		o.HugePageBytes = n.o.HugePageBytes // of the state, too
	}
	m, err := n.allocator().Alloc(size, o)
	if err == nil {
		if err = n.o.Keeper.Put(name, nil, m.FD); err == nil {
			return m, nil
		}
		err = errors.Join(err, m.Free())
	}
	if f != nil {
		err = errors.Join(err, n.o.Keeper.Drop(name))
	}
	return nil, err
}

// registerAll registers adopted regions, several at once: for an adapter their pages are pinned, which takes its time.
func (n *Node) registerAll(regions []*region) error {
	var wg sync.WaitGroup
	errs := make([]error, len(regions))
	turns := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, r := range regions {
		turns <- struct{}{}
		wg.Go(func() {
			defer func() { <-turns }()
			errs[i] = n.register1(r)
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return fmt.Errorf("placement group %d: %w", regions[i].want.GetPgId(), err)
		}
	}
	return nil
}

// register1 registers an adopted region with every device, under the rkeys that it had where the provider can. The
// region's header is not looked at: clients can write there, and one of them must not cost the others what is here.
func (n *Node) register1(r *region) error {
	pds, l, err := n.domains(r.want.GetNamespaceId())
	if err != nil {
		return err
	}
	if err := n.registerMRs(r, pds, l); err != nil {
		return err
	}
	same := len(r.keys) == len(r.old)
	for _, k := range r.keys {
		same = same && slices.Contains(r.old, keptKeys{k.GetProvider(), k.GetIndexRkey(), k.GetHeapRkey()})
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	r.published = same // the directory says if it does not know them
	return nil
}

// doorClosed waits until nothing that was posted to an earlier process can land any more, and says for whom it waits.
func (n *Node) doorClosed() error {
	if n.o.Door == nil {
		return nil
	}
	began := time.Now()
	for pause, said := time.Millisecond, false; ; pause = min(2*pause, 100*time.Millisecond) {
		inside, err := n.o.Door()
		if err != nil {
			return err
		}
		n.mu.Lock()
		n.mu.inside = inside
		n.mu.Unlock()
		if len(inside) == 0 {
			return nil
		}
		if !said && time.Since(began) >= n.o.FenceTimeout {
			said = true
			n.log.Error("clients of this machine are inside a verb that they began before the restart: the memory is "+
				"not served before they leave it or end",
				"peers", strings.Join(inside, ", "))
		}
		if !n.wait(pause, nil) {
			return n.ctx.Err()
		}
	}
}

// forgetKept gives back all that the keeper holds of regions, and what of it is mapped. Nobody was given a key by this
// process. Memory that may be worth something is kept aside instead.
func (n *Node) forgetKept(why Kept) {
	n.mu.Lock()
	var regions []*region
	for _, m := range []map[uint32]*region{n.mu.regions, n.mu.retained} {
		regions = slices.AppendSeq(regions, maps.Values(m))
	}
	n.mu.saved = nil
	n.mu.Unlock()
	rescued := n.o.Keeper != nil && why.isRescued() && n.keepAside(why)
	for _, r := range regions {
		if rescued {
			r.item = ""
		}
		n.mu.Lock()
		r.keys = nil // it is not retained either
		n.mu.Unlock()
		if err := n.drop(r); err != nil {
			n.log.Error("cannot give back memory of an earlier process", "err", err)
		}
	}
	n.keep.after = nil
	if n.o.Keeper == nil {
		return
	}
	items, err := n.o.Keeper.List()
	for _, i := range items {
		if strings.HasPrefix(i.Name, RegionItems) || i.Name == stateItem {
			err = errors.Join(err, n.o.Keeper.Drop(i.Name))
		}
		i.Close()
	}
	if err != nil {
		n.log.Error("the keeper does not let go of an earlier process's memory", "err", err)
	}
	n.unmapState()
}

// unmapState lets go of the state, which the keeper may hold on to.
func (n *Node) unmapState() {
	n.keep.mu.Lock()
	defer n.keep.mu.Unlock()
	if n.keep.file == nil {
		return
	}
	if err := n.keep.file.mem.Free(); err != nil {
		n.log.Error("cannot give back the state that was kept", "err", err)
	}
	n.keep.file = nil
}

// closeKept unmaps the state, and has the keeper forget it and what was kept aside.
func (n *Node) closeKept() {
	n.dropRescued("the memory node ends")
	n.keep.mu.Lock()
	has := n.keep.file != nil
	n.keep.mu.Unlock()
	if !has {
		return
	}
	if err := n.o.Keeper.Drop(stateItem); err != nil {
		n.log.Error("cannot give back the state that was kept", "err", err)
	}
	n.unmapState()
}

// saveState writes down what the next process has to know, for this registration. The regions that are named there are
// those that have all of their keys and that nobody has begun to drop, and, without keys, those that are retained.
func (n *Node) saveState(reg *registration) error {
	if n.o.Keeper == nil {
		return nil
	}
	n.keep.mu.Lock()
	defer n.keep.mu.Unlock()
	if n.keep.file == nil {
		m, err := n.allocItem(stateItem, 2*statePage, rdma.AllocOptions{Name: "kvd-state"})
		if err != nil {
			return fmt.Errorf("state for the keeper: %w", err)
		}
		n.keep.file = &stateFile{mem: m}
	}
	n.mu.Lock()
	s := &state{cluster: n.mu.clusterID, node: n.o.Name, host: n.o.HostID, nodeID: reg.nodeID,
		incarnation: reg.incarnation, boot: n.boot,
		lives: []uint64{n.nonce}, told: n.mu.told}
	for pg, r := range n.mu.regions {
		if r.dying && !r.retiring || r.keys == nil {
			continue
		}
		k := r.keptAs(pg)
		for _, x := range r.keys {
			if !r.retiring {
				k.keys = append(k.keys, keptKeys{x.GetProvider(), x.GetIndexRkey(), x.GetHeapRkey()})
			}
		}
		s.regions = append(s.regions, k)
	}
	for pg, r := range n.mu.retained {
		if !r.dying {
			s.regions = append(s.regions, r.keptAs(pg))
		}
	}
	n.mu.Unlock()
	slices.SortFunc(s.regions, func(a, b *keptRegion) int { return int(int64(a.pg) - int64(b.pg)) })
	return n.keep.file.write(s)
}

// keptAs is what the state says of r, without its keys.
func (r *region) keptAs(pg uint32) *keptRegion {
	return &keptRegion{item: r.item, incarnation: r.inc, pg: pg, namespace: r.want.GetNamespaceId(),
		epoch: r.lastEpoch(), since: r.want.GetSince(),
		regionBytes: r.want.GetRegionBytes(), indexSize: r.want.GetIndexBytes(), pageBytes: uint64(r.pageBytes)}
}

// disowned reports whether the refusal of a registration with memory of before means that the directory has given that
// memory up: it says so itself when it is asked as by a heartbeat.
func (n *Node) disowned(reg *registration, refusal error) bool {
	if status.Code(refusal) != codes.FailedPrecondition {
		return false
	}
	var rep *dirpb.HeartbeatReply
	err := n.call(n.ctx, exchangeTimeout, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: reg.nodeID, Incarnation: reg.incarnation})
		return err
	})
	return err == nil && rep.GetUnknownNode()
}
