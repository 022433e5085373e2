package client

import (
	"cmp"
	"fmt"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// watch follows the map for as long as the session lives, and installs every version that the directory sends.
func (s *sess) watch() {
	err := s.c.dir.WatchMap(s.ctx, s.id, 0, func(m *dirpb.Map) error {
		if m.GetRenew() {
			s.agenda.Called()
			s.wake()
			return nil
		}
		if err := s.install(m); err != nil {
			s.c.o.Logger.Error("map refused", "version", m.GetVersion(), "err", err)
		}
		return nil
	})
	if s.ctx.Err() == nil {
		s.lost(fmt.Errorf("watch map: %w", err))
	}
}

// install checks a map, which is hostile until then, and makes it the view.
func (s *sess) install(m *dirpb.Map) error {
	v, err := engine.ViewOf(m, s.nsID)
	if err != nil {
		return err
	}
	nodes := make(map[uint32]*dirpb.Node, len(m.GetNodes()))
	for _, n := range m.GetNodes() {
		nodes[n.GetId()] = n
	}
	for _, n := range m.GetNamespaces() {
		if n.GetId() == s.nsID {
			s.seed.Store(n.GetHashSeed())
			s.limit.Store(n.GetLimitBytes())
			s.payload.Store(cmp.Or(n.GetChunkPayload(), layout.ChunkSize))
			s.maxValue.Store(int64(min(cmp.Or(n.GetMaxValueBytes(), DefaultMaxValueLen), MaxValueLen)))
			s.evicts.Store(n.GetMode() == dirpb.NamespaceMode_NAMESPACE_CACHE)
			s.pinned.Store(min(n.GetMaxPinnedPercent(), 100))
			s.core.SetPins(n.GetMaxPinnedPercent() != 0)
		}
	}
	s.mu.Lock()
	s.mu.nodes = nodes
	s.tellPathsLocked()
	s.mu.Unlock()
	s.core.InstallView(v)
	for _, l := range s.core.Lanes() {
		l.Visit()
	}
	s.agenda.NewMap()
	s.wake()
	if len(v.Shards) > 0 {
		s.once.Do(func() { close(s.ready) })
	}
	return nil
}

// WantMap: the watch brings every version by itself; waiting tasks try again.
func (s *sess) WantMap(uint64) { s.stir() }
