package memnode

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// InitRegion makes memory a region of an incarnation as the directory wants it, before anybody is given its
// keys. The memory is zero, or is what was retained of the placement group. An error leaves it as it was.
func InitRegion(mem []byte, w *dirpb.WantRegion, incarnation uint64, retained bool) error {
	if retained {
		var arrays []layout.Array
		for _, a := range w.GetRetain().GetArrays() {
			arrays = append(arrays, layout.Array{Off: a.GetOffset(), Segments: a.GetSegments()})
		}
		if err := layout.RetainIndex(mem[:w.GetIndexBytes()], arrays); err != nil {
			return fmt.Errorf("retained index: %w", err)
		}
	}
	layout.InitRegion(mem, layout.RegionHeader{
		PG:          w.GetPgId(),
		Namespace:   w.GetNamespaceId(),
		Epoch:       w.GetEpoch(),
		RegionBytes: w.GetRegionBytes(),
		IndexBytes:  w.GetIndexBytes(),
		Incarnation: incarnation,
	})
	return nil
}

// retire drops r, but for its memory if that is to be retained: as the caller says, or since this node has said
// goodbye. Then the next registration offers it.
func (n *Node) retire(r *region, wanted bool) (retained bool, err error) {
	n.mu.Lock()
	retains := (wanted || n.leaving.Load() || r.retiring) && r.keys != nil && r.mem != nil
	if retains {
		r.dying, r.published, r.retiring = true, false, true
	}
	reg := n.mu.saved
	n.mu.Unlock()
	if !retains {
		return false, n.drop(r)
	}
	if reg != nil {
		if err := n.saveState(reg); err != nil {
			return false, fmt.Errorf("pg %d: %w", r.want.GetPgId(), err)
		}
	}
	if err := r.deregister(); err != nil {
		return false, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	pg := r.want.GetPgId()
	delete(n.mu.regions, pg)
	r.dying, r.retiring, r.keys, r.old = false, false, nil, nil
	n.mu.retained[pg] = r
	return true, nil
}

// offersLocked is what a registration says of retained memory.
func (n *Node) offersLocked() (list []*dirpb.RetainedRegion) {
	for _, pg := range slices.Sorted(maps.Keys(n.mu.retained)) {
		r := n.mu.retained[pg]
		list = append(list, &dirpb.RetainedRegion{PgId: pg, Incarnation: r.inc, Since: r.want.GetSince()})
	}
	return list
}

// dropRetained gives back the retained memory that the directory can have no use for.
func (n *Node) dropRetained(want map[uint32]*dirpb.WantRegion, may []uint32) {
	if n.leaving.Load() {
		return // it is for the next process
	}
	n.mu.Lock()
	var drop []*region
	for pg, r := range n.mu.retained {
		if !slices.Contains(may, pg) && want[pg].GetRetain() == nil {
			drop = append(drop, r)
		}
	}
	n.mu.Unlock()
	for _, r := range drop {
		err := n.drop(r)
		n.outcome(r.want.GetPgId(), r.want.GetNamespaceId(), "drop retained", err)
		if err == nil {
			n.log.Info("retained memory dropped", "pg", r.want.GetPgId(), "bytes", r.bytes)
			n.retryNow()
		}
	}
}

// takeRetained gives the retained region that w is to be made of, or nil if it is to be made of zeroes, as it may
// always be. Then what else is retained makes room for so many bytes, if it has to.
func (n *Node) takeRetained(w *dirpb.WantRegion, size uint64) (*region, error) {
	n.mu.Lock()
	r, old := n.mu.retained[w.GetPgId()], w.GetRetain()
	if r != nil && old != nil && r.inc == old.GetIncarnation() && r.want.GetSince() == old.GetSince() &&
		r.want.GetNamespaceId() == w.GetNamespaceId() &&
		r.want.GetRegionBytes() == w.GetRegionBytes() && r.want.GetIndexBytes() == w.GetIndexBytes() {
		delete(n.mu.retained, w.GetPgId())
		n.mu.Unlock()
		return r, nil
	}
	var drop []*region
	lacks := size > uint64(n.o.CapacityBytes-min(n.mu.used, n.o.CapacityBytes))
	for _, x := range n.mu.retained {
		if x == r || lacks {
			drop = append(drop, x)
		}
	}
	n.mu.Unlock()
	var errs []error
	for _, x := range drop {
		errs = append(errs, n.drop(x))
	}
	return nil, errors.Join(errs...)
}
