package overview

import (
	"cmp"
	"slices"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// Memory is how the memory of one placement group is used, or of all that a namespace has.
// It is in bytes, and each copy counts once.
//
// Granted memory is live, free, foreign, in limbo, coming or lost; the rest of the heap waits,
// or is room. Recalled memory is granted memory too, so it is also one of these.
type Memory struct {
	Namespace string
	PG        uint32 // 0: all of the namespace's
	// Every directory node knows these. Waiting is memory that came back and may be granted
	// once enough reclaim epochs have passed. Recalled lies in extents that are being
	// recalled. Room may be granted now, but for a reserve that only janitors are granted.
	Heap, Granted, Waiting, Recalled, Room uint64
	// Known says that a leader has answered: another directory node knows nothing of what
	// follows.
	Known bool
	// Live memory holds records. Sessions have memory free that they were granted (Free),
	// or that others were granted (Foreign), and in limbo. Coming is on its way to the
	// session that it was granted to. Lost is nobody's.
	Live, Free, Foreign, Limbo, Coming, Lost uint64
	// Short says that a session found too little lately.
	Short bool
}

// Memories tells how memory is used in each placement group, by namespace and then by
// placement group.
func Memories(st *dirpb.StatusReply) []*Memory {
	name, of := make(map[uint32]string), make(map[uint32]string)
	for _, n := range st.GetMap().GetNamespaces() {
		name[n.GetId()] = n.GetName()
	}
	for _, p := range st.GetMap().GetPgs() {
		if n, ok := name[p.GetNamespaceId()]; ok {
			of[p.GetId()] = n
		}
	}
	var all []*Memory
	for _, u := range st.GetUsage() {
		n, ok := of[u.GetPgId()]
		if !ok {
			continue
		}
		heap, granted, waiting := u.GetHeapUnits(), u.GetGrantedUnits(), u.GetWaitingUnits()
		m := &Memory{
			Namespace: n, PG: u.GetPgId(),
			Heap: heap, Granted: granted, Waiting: waiting, Recalled: u.GetRecalledUnits(),
			Room:  heap - min(heap, granted+waiting),
			Known: u.GetEstimated(),
		}
		if m.Known {
			m.Live, m.Free, m.Foreign, m.Limbo = u.GetLiveUnits(), u.GetFreeUnits(), u.GetForeignUnits(),
				u.GetLimboUnits()
			m.Coming, m.Lost, m.Short = u.GetComingUnits(), u.GetLostUnits(), u.GetShort()
		}
		for _, v := range m.numbers() {
			*v *= layout.UnitSize
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b *Memory) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.PG, b.PG))
	})
	return all
}

// Sums adds up the placement groups of each namespace. A sum is known if all that it adds
// up is.
func Sums(all []*Memory) []*Memory {
	var sums []*Memory
	for _, m := range all {
		n := len(sums)
		if n == 0 || sums[n-1].Namespace != m.Namespace {
			sums = append(sums, &Memory{Namespace: m.Namespace, Known: true})
			n++
		}
		s := sums[n-1]
		s.Known, s.Short = s.Known && m.Known, s.Short || m.Short
		add := m.numbers()
		for i, v := range s.numbers() {
			*v += *add[i]
		}
	}
	return sums
}

func (m *Memory) numbers() []*uint64 {
	return []*uint64{&m.Heap, &m.Granted, &m.Waiting, &m.Recalled, &m.Room, &m.Live, &m.Free, &m.Foreign, &m.Limbo,
		&m.Coming, &m.Lost}
}
