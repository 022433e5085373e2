package memnode

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
)

// region is memory of one placement group: one mapping, registered with every
// device in the namespace's PD as two MRs, so that the index takes no WRITE.
type region struct {
	want  *dirpb.WantRegion
	inc   uint64 // the incarnation that it is of
	bytes int64  // of the mapping
	mem   *rdma.Memory
	mrs   []*rdma.MR
	keys  []*dirpb.RegionKeys // of every device; nil: not yet

	item      string        // its name at the keeper; empty: it is not there
	pageBytes int           // 0: normal pages
	old       []keptKeys    // that it had with the process before this one
	took      time.Duration // to get its memory

	// Guarded by Node.mu.
	epoch        uint32 // the latest of the placement group that the directory told, if it told another one than want's
	dying        bool   // some of it is deregistered
	retiring     bool   // its memory is to be retained
	published    bool
	publishedSeq uint64 // heartbeats up to this one may not know of it
}

// wantSet is what heartbeat seq's reply asked for.
type wantSet struct {
	seq     uint64
	regions []*dirpb.WantRegion
	retain  []uint32 // placement groups of which the directory may want what is retained
	again   bool     // this process is to register again, when it has dropped what is not wanted
}

// failure is a region's trouble. It is retried, ever more rarely.
type failure struct {
	namespace uint32
	err       error
	pause     time.Duration
	next      time.Time
}

const (
	minRetry = 500 * time.Millisecond
	maxRetry = 30 * time.Second
)

// keepRegions makes the node's regions those that the directory wants. It is
// the only goroutine that makes or drops them while it runs, but for taking their memory. Heartbeats do not
// wait for it: pinning memory takes its time.
func (n *Node) keepRegions(ctx context.Context, reg *registration, wants <-chan wantSet) {
	made := make(chan *making)
	defer n.endMaking(reg, made)
	var last wantSet
	want := map[uint32]*dirpb.WantRegion{}
	for {
		select {
		case <-ctx.Done():
			return
		case m := <-made:
			w := want[m.want.GetPgId()]
			n.takeMade(reg, m, w != nil && sameLayout(w, m.want))
			if w != nil {
				n.haveRegion(ctx, reg, w, last.seq, made)
			}
		case last = <-wants:
			want = make(map[uint32]*dirpb.WantRegion, len(last.regions))
			for _, r := range last.regions {
				want[r.GetPgId()] = r
			}
			left := n.dropUnwanted(want, last.retain)
			if n.dropRetained(want, last.retain); last.again && left == 0 {
				n.registerAgain(reg)
			}
			n.forgetNamespaces(ctx)
			for _, r := range last.regions {
				if ctx.Err() != nil {
					return
				}
				n.haveRegion(ctx, reg, r, last.seq, made)
			}
		}
	}
}

// dropUnwanted drops the regions that want does not name, or names with another
// layout or since another time, and returns how many of them could not be dropped yet. A node that is disowned, with
// want nil, or leaves retains their memory; and that of placement groups in may, which the directory may want again.
func (n *Node) dropUnwanted(want map[uint32]*dirpb.WantRegion, may []uint32) (left int) {
	n.mu.Lock()
	var drop []*region
	for pg, m := range n.mu.making {
		if w := want[pg]; w == nil || !sameLayout(w, m.want) {
			m.cancel()
		}
	}
	for pg, r := range n.mu.regions {
		if w := want[pg]; r.dying || w == nil || !sameLayout(w, r.want) {
			drop = append(drop, r)
		}
	}
	for pg := range n.mu.failures {
		if want[pg] == nil && n.mu.regions[pg] == nil {
			delete(n.mu.failures, pg)
		}
	}
	n.mu.Unlock()
	for _, r := range drop {
		pg := r.want.GetPgId()
		retained, err := n.retire(r, want == nil || want[pg] == nil && slices.Contains(may, pg))
		n.outcome(pg, r.want.GetNamespaceId(), "drop", err)
		if err != nil {
			left++
			continue
		}
		n.log.Info("region dropped", "pg", pg, "bytes", r.bytes, "retained", retained)
		n.retryNow()
	}
	return left
}

// forgetNamespaces releases the PDs of namespaces that have neither a region nor a connection
// here any more, as those that were deleted, and their connections to the adapter. The
// goroutine that makes and drops regions calls it, so nobody is about to make one.
func (n *Node) forgetNamespaces(ctx context.Context) {
	n.mu.Lock()
	defer n.mu.Unlock()
	used := make(map[uint32]bool)
	for _, r := range n.mu.regions {
		used[r.want.GetNamespaceId()] = true
	}
	for _, m := range n.mu.making {
		used[m.want.GetNamespaceId()] = true
	}
	for ns, l := range n.mu.loops {
		if used[ns] {
			continue
		}
		n.mu.Unlock() // no agent is inside a region that is gone
		err := l.close(ctx)
		n.mu.Lock()
		if err != nil {
			n.log.Debug("cannot close a connection to the adapter; trying again", "namespace", ns, "err", err)
			used[ns] = true
			continue
		}
		delete(n.mu.loops, ns)
	}
	for _, p := range n.mu.byPeer {
		used[p.namespace] = true
	}
	for _, d := range n.devices {
		for ns, pd := range d.pds {
			// It fails while the last connection is being torn down; then the next call does it.
			if !used[ns] && pd.Dealloc() == nil {
				delete(d.pds, ns)
			}
		}
	}
}

func sameLayout(a, b *dirpb.WantRegion) bool {
	return a.GetSince() == b.GetSince() && a.GetNamespaceId() == b.GetNamespaceId() &&
		a.GetRegionBytes() == b.GetRegionBytes() && a.GetIndexBytes() == b.GetIndexBytes()
}

// haveRegion makes and publishes one region as far as that is missing; one whose memory is to be taken from the system
// comes back by made. That the directory calls it published counts only for keys that this process published: it may
// mean those of a region dropped since.
func (n *Node) haveRegion(ctx context.Context, reg *registration, w *dirpb.WantRegion, seq uint64,
	made chan<- *making) {
	pg := w.GetPgId()
	n.mu.Lock()
	r, f := n.mu.regions[pg], n.mu.failures[pg]
	wait := f != nil && time.Now().Before(f.next)
	stuck := r != nil && (r.dying || !sameLayout(w, r.want))
	done := r != nil && r.published && (w.GetPublished() || seq <= r.publishedSeq)
	done = done || n.mu.making[pg] != nil
	n.mu.Unlock()
	if wait || stuck || done {
		return
	}
	if r == nil {
		var err error
		if r, err = n.beginRegion(ctx, reg, w, made); err != nil {
			n.outcome(pg, w.GetNamespaceId(), "make", err)
		}
		if err != nil || r == nil {
			return
		}
	}
	ctx, cancel := context.WithTimeout(ctx, exchangeTimeout)
	defer cancel()
	err := n.o.Directory.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.PublishRegion(ctx, &dirpb.PublishRegionRequest{
			NodeId: reg.nodeID, Incarnation: reg.incarnation, Boot: n.boot, PgId: pg, Keys: r.keys, Since: w.GetSince(),
		})
		return err
	})
	if ctx.Err() == context.Canceled {
		return
	}
	n.outcome(pg, w.GetNamespaceId(), "publish", err)
	if err != nil {
		return
	}
	n.mu.Lock()
	r.published, r.publishedSeq = true, n.seq.Load()
	n.mu.Unlock()
}

// beginRegion makes a region of memory that was retained, which it gives, or has the memory for another one taken; or
// it does nothing, and says why.
func (n *Node) beginRegion(ctx context.Context, reg *registration, w *dirpb.WantRegion, made chan<- *making) (*region,
	error) {
	size := w.GetRegionBytes()
	if err := checkLayout(size, w.GetIndexBytes()); err != nil {
		return nil, err
	}
	if err := n.endLeftovers(w.GetNamespaceId()); err != nil {
		return nil, err
	}
	page := uint64(max(os.Getpagesize(), n.o.HugePageBytes))
	n.makeRoom((size + page - 1) / page * page)
	r, err := n.takeRetained(w, (size+page-1)/page*page)
	if err != nil {
		return nil, err
	}
	if r != nil {
		r.want, r.inc = w, reg.incarnation
		return r, n.finishRegion(reg, r, true, n.prepare(reg, r, true))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	// CapacityBytes is at most 2^50, so the sums cannot wrap.
	if size > uint64(n.o.CapacityBytes) || (size+page-1)/page*page > uint64(n.o.CapacityBytes-n.mu.used) {
		return nil, fmt.Errorf("%w: region of %s (pages of %s), %s of %s in use", ErrCapacity, units.Bytes(size),
			units.Bytes(page), units.Bytes(n.mu.used), units.Bytes(n.o.CapacityBytes))
	}
	r = &region{want: w, inc: reg.incarnation, bytes: int64((size + page - 1) / page * page),
		pageBytes: n.o.HugePageBytes}
	n.mu.used += r.bytes
	n.makeLocked(ctx, reg, r, made)
	return nil, nil
}

// prepare writes the header of r, which has memory, and registers it with every device. Nobody else knows r, and others
// may be prepared at the same time. After an error drop takes back its keys.
func (n *Node) prepare(reg *registration, r *region, retained bool) error {
	pds, l, err := n.domains(r.want.GetNamespaceId())
	if err != nil {
		return err
	}
	if err := InitRegion(r.mem.Bytes, r.want, reg.incarnation, retained); err != nil {
		return err
	}
	return n.registerMRs(r, pds, l)
}

// finishRegion makes r, which is prepared unless there was trouble, one of the node's, or drops it.
func (n *Node) finishRegion(reg *registration, r *region, retained bool, err error) error {
	n.mu.Lock()
	n.mu.regions[r.want.GetPgId()] = r
	n.mu.Unlock()
	if err == nil {
		err = n.saveState(reg) // before anybody is told of the region
	}
	if err != nil {
		// Nobody knows the keys yet, so nothing can be inside.
		return errors.Join(err, n.drop(r))
	}
	n.log.Info("region made", "pg", r.want.GetPgId(), "namespace", r.want.GetNamespaceId(), "bytes", r.bytes,
		"index_bytes", r.want.GetIndexBytes(),
		"retained", retained, "took", r.took)
	return nil
}

// domains are the namespace's PDs, of every device, and where atomics of other devices than the adapter go.
func (n *Node) domains(namespace uint32) (pds []*rdma.PD, l *loop, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	pds = make([]*rdma.PD, len(n.devices))
	for i, d := range n.devices {
		if pds[i], err = d.pdLocked(namespace); err != nil {
			return nil, nil, err
		}
	}
	l, err = n.loopLocked(namespace)
	return pds, l, err
}

func regionName(pg uint32) string { return fmt.Sprintf("kvd-pg-%d", pg) }

// registerMRs gives r its MRs and keys. Atomics of devices other than the adapter's go by l.
func (n *Node) registerMRs(r *region, pds []*rdma.PD, l *loop) error {
	if l != nil {
		if err := l.ready(); err != nil {
			return err
		}
	}
	index, size := int64(r.want.GetIndexBytes()), int64(r.want.GetRegionBytes())
	var keys []*dirpb.RegionKeys
	for i, d := range n.devices {
		var old keptKeys
		for _, k := range r.old {
			if k.provider == d.name && d.dev.Caps().ChoosesKeys {
				old = k
			}
		}
		im, err := regMR(pds[i], r.mem, 0, index, rdma.AccessRemoteRead|rdma.AccessRemoteAtomic, old.index)
		if err != nil {
			return fmt.Errorf("index: %w", err)
		}
		r.mrs = append(r.mrs, im)
		if l != nil && !d.isAdapter() {
			if err := im.ProxyAtomics(l.on(r.mrs[0])); err != nil { // the adapter's index
				return fmt.Errorf("leave atomics of %s to the adapter of %s: %w", d.name, n.hca.name, err)
			}
		}
		hm, err := regMR(pds[i], r.mem, index, size-index, rdma.AccessRemoteRead|rdma.AccessRemoteWrite, old.heap)
		if err != nil {
			return fmt.Errorf("heap: %w", err)
		}
		r.mrs = append(r.mrs, hm)
		keys = append(keys, &dirpb.RegionKeys{
			Provider:  d.name,
			IndexRkey: im.RKey(),
			IndexBase: im.Base(),
			HeapRkey:  hm.RKey(),
			HeapBase:  hm.Base(),
		})
	}
	n.mu.Lock()
	r.keys = keys
	n.mu.Unlock()
	return nil
}

// regMR registers with an rkey that is known, or with a new one if that is 0.
func regMR(pd *rdma.PD, m *rdma.Memory, off, n int64, a rdma.Access, rkey uint64) (*rdma.MR, error) {
	if rkey == 0 {
		return pd.RegMR(m, off, n, a)
	}
	return pd.RegMRAs(m, off, n, a, rkey)
}

// drop deregisters a region, then frees it. A provider that cannot confirm that
// nobody is inside a verb leaves the rest to another drop.
func (n *Node) drop(r *region) error {
	n.mu.Lock()
	r.dying, r.published, r.retiring = true, false, false
	reg := n.mu.saved
	n.mu.Unlock()
	if reg != nil {
		if err := n.saveState(reg); err != nil { // before any of it is another's
			return fmt.Errorf("pg %d: %w", r.want.GetPgId(), err)
		}
	}
	if err := r.deregister(); err != nil {
		return err
	}
	var err error
	if r.mem != nil {
		err = r.mem.Free()
		r.mem = nil
	}
	if r.item != "" {
		err = errors.Join(err, n.o.Keeper.Drop(r.item))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.used -= r.bytes
	for _, m := range []map[uint32]*region{n.mu.regions, n.mu.retained} {
		if pg := r.want.GetPgId(); m[pg] == r {
			delete(m, pg)
		}
	}
	if err != nil {
		return fmt.Errorf("pg %d: free %s: %w", r.want.GetPgId(), units.Bytes(r.bytes), err)
	}
	return nil
}

// deregister takes r's keys back from every provider. A provider that cannot confirm that nobody is inside a verb
// leaves the rest to another call.
func (r *region) deregister() error {
	for len(r.mrs) > 0 {
		last := len(r.mrs) - 1
		if err := r.mrs[last].Deregister(); err != nil && !errors.Is(err, rdma.ErrClosed) {
			return fmt.Errorf("pg %d: %w", r.want.GetPgId(), err)
		}
		r.mrs = r.mrs[:last]
	}
	return nil
}

// retryNow lets failed regions try again: there is room now.
func (n *Node) retryNow() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, f := range n.mu.failures {
		f.next = time.Time{}
	}
}

// outcome keeps, and logs when it is new, why a region is not as wanted.
func (n *Node) outcome(pg, namespace uint32, what string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f := n.mu.failures[pg]
	if err == nil {
		delete(n.mu.failures, pg)
		return
	}
	err = fmt.Errorf("%s region of pg %d: %w", what, pg, err)
	if f == nil {
		f = &failure{namespace: namespace, pause: minRetry}
		n.mu.failures[pg] = f
	} else {
		f.pause = min(2*f.pause, maxRetry)
	}
	if f.err == nil || f.err.Error() != err.Error() {
		n.log.Error("region trouble; trying again later", "pg", pg, "err", err, "retry_in", f.pause)
	}
	f.err, f.next = err, time.Now().Add(f.pause)
}
