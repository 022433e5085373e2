package tier

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/rdma"
)

const (
	// exchangeTimeout bounds one exchange with the directory.
	exchangeTimeout = 2 * time.Second
	// leastAgain and mostAgain bound the time between two.
	leastAgain, mostAgain = 5 * time.Millisecond, time.Minute
	// fenceTimeout bounds how long the end of a connection is waited for.
	fenceTimeout = time.Second
)

// run tells the directory of the tier node, and does as it says, until the Service ends.
func (s *Service) run() {
	again := time.NewTimer(0)
	defer again.Stop()
	said := ""
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-again.C:
		case <-s.kick:
		}
		pause, err := s.exchange()
		if s.ctx.Err() != nil {
			return
		}
		s.mu.Lock()
		s.mu.err = err
		if err == nil {
			s.mu.heard = time.Now()
		}
		s.mu.Unlock()
		switch {
		case errors.Is(err, ErrGivenUp):
			s.log.Error("the tier node ends", "err", err)
			s.end(err)
			return
		case err != nil && err.Error() != said:
			s.log.Warn("the directory does not take this tier node", "err", err)
		case err == nil && said != "":
			s.log.Info("the directory takes this tier node again")
		}
		if said = ""; err != nil {
			said = err.Error()
		}
		again.Reset(min(max(pause, leastAgain), mostAgain))
	}
}

// exchange tells the directory what is here, and takes in what it says.
func (s *Service) exchange() (again time.Duration, err error) {
	const pause = exchangeTimeout / 4 // after an error
	ctx, cancel := context.WithTimeout(s.ctx, exchangeTimeout)
	defer cancel()
	q := s.says()
	var r *dirpb.KeepVolumeReply
	err = s.o.Directory.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		r, err = d.KeepVolume(ctx, q)
		return err
	})
	if status.Code(err) == codes.NotFound {
		return 0, fmt.Errorf("volume %d: %w", q.Volume.Id, ErrGivenUp)
	}
	if err != nil {
		return pause, err
	}
	if err := s.known(r); err != nil {
		return pause, err
	}
	keys, err := admit.Keys(r.GetKeys())
	if err == nil && r.GetSessions() == nil {
		err = errors.New("the directory does not say which sessions live")
	}
	if err != nil {
		return pause, err
	}
	s.mu.Lock()
	s.mu.keys = keys
	s.mu.sessions.Learn(r.Sessions)
	var ended []rdma.Peer
	for p, x := range s.mu.peers {
		if s.mu.sessions.Ended(x.session) {
			ended = append(ended, p)
		}
	}
	s.mu.Unlock()
	s.fence(ended)
	if s.serve(r.Namespaces) {
		s.tell()
	}
	s.tidy(r)
	select {
	case <-s.ready:
	default:
		close(s.ready)
		s.log.Info("the directory knows this tier node", "volume", r.VolumeId, "boot", s.folder.Boot)
	}
	return time.Duration(min(r.AgainMillis, uint64(mostAgain.Milliseconds()))) * time.Millisecond, nil
}

// says is all that the directory is to know.
func (s *Service) says() *dirpb.KeepVolumeRequest {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := &dirpb.Volume{Id: s.folder.Volume, Name: s.o.Name, Folder: s.folder.Folder, Boot: s.folder.Boot,
		Process: s.folder.process, HostId: s.o.HostID, Domain: s.o.Domain, Version: s.o.Version,
		CapacityBytes: uint64(s.o.SizeBytes)}
	v.Endpoints = []*dirpb.Endpoint{s.endpoint}
	q := &dirpb.KeepVolumeRequest{Volume: v, ClusterId: s.folder.Cluster}
	for id, n := range ordered.All(s.mu.spaces) {
		v.Regions = append(v.Regions, &dirpb.VolumeRegion{NamespaceId: id, Rkey: n.region.RKey(), Bytes: regionBytes})
		q.UsedBytes += uint64(n.Store.Stats().Bytes)
	}
	return q
}

// known takes in which volume the folder is, and of which namespaces. Both are written down before anything is kept.
func (s *Service) known(r *dirpb.KeepVolumeReply) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch f := s.folder; {
	case r.GetVolumeId() == 0 || r.ClusterId == "":
		return errors.New("the directory gave no id to the folder")
	case f.Volume != 0 && (f.Volume != r.VolumeId || f.Cluster != r.ClusterId):
		return fmt.Errorf("the folder is volume %d of the store %s, and the directory says volume %d of %s", f.Volume,
			f.Cluster, r.VolumeId, r.ClusterId)
	default:
		names := maps.Clone(f.Namespaces)
		if names == nil {
			names = make(map[uint32]uint64)
		}
		for _, w := range r.Namespaces {
			names[w.NamespaceId] = r.Recoveries
		}
		return f.become(r, names)
	}
}

// become writes down what a folder is by a reply, if that differs.
func (f *folder) become(r *dirpb.KeepVolumeReply, namespaces map[uint32]uint64) error {
	if f.Volume == r.VolumeId && f.Cluster == r.ClusterId && maps.Equal(f.Namespaces, namespaces) {
		return nil
	}
	next := *f
	next.Volume, next.Cluster, next.Namespaces = r.VolumeId, r.ClusterId, namespaces
	if err := next.write(); err != nil {
		return err
	}
	*f = next
	return nil
}

// serve opens and closes namespaces as the directory says, and reports whether that changes what it is to know.
func (s *Service) serve(work []*dirpb.TierWork) (changed bool) {
	wanted := make(map[uint32]*dirpb.TierWork, len(work))
	for _, w := range work {
		wanted[w.NamespaceId] = w
	}
	s.mu.Lock()
	have := maps.Clone(s.mu.spaces)
	maps.DeleteFunc(s.mu.failures, func(id uint32, _ error) bool { return wanted[id] == nil })
	s.mu.Unlock()
	for id, n := range have {
		if w := wanted[id]; w != nil {
			s.mu.Lock()
			n.work = w
			s.mu.Unlock()
			continue
		}
		changed = true
		s.mu.Lock()
		delete(s.mu.spaces, id)
		s.mu.Unlock()
		s.closing[id] = n
	}
	for _, w := range work {
		if have[w.NamespaceId] != nil || s.closing[w.NamespaceId] != nil {
			continue
		}
		n, err := s.open(w)
		s.mu.Lock()
		if before := s.mu.failures[w.NamespaceId]; err != nil {
			s.mu.failures[w.NamespaceId] = err
			if before == nil {
				s.log.Error("files of a namespace cannot be opened", "namespace", w.Namespace, "err", err)
			}
		} else {
			delete(s.mu.failures, w.NamespaceId)
			s.mu.spaces[w.NamespaceId], changed = n, true
		}
		s.mu.Unlock()
	}
	return changed
}

// tidy closes namespaces that are not this tier node's any more, and takes their files away. So it does with those that
// went while the process was not there. A failure is tried again after the next reply. Ids of namespaces are not given
// out again.
func (s *Service) tidy(r *dirpb.KeepVolumeReply) {
	for id, n := range ordered.All(s.closing) {
		s.fence(s.peersOf(id))
		if err := n.close(); err != nil {
			s.stays(id, "files of a namespace that is gone are not closed yet", "err", err)
			continue
		}
		delete(s.closing, id)
		delete(s.told, id)
		s.log.Info("a namespace is not on this tier node any more", "namespace", n.work.Namespace, "id", id)
	}
	ids, err := s.folder.namespaceDirs()
	if err != nil {
		s.stays(0, "the folder cannot be listed", "err", err)
		return
	}
	names := maps.Clone(s.folder.Namespaces)
	maps.DeleteFunc(names, func(id uint32, _ uint64) bool { return !slices.Contains(ids, id) })
	for _, w := range r.Namespaces {
		names[w.NamespaceId] = r.Recoveries
	}
	for _, id := range ids {
		named := slices.ContainsFunc(r.Namespaces, func(w *dirpb.TierWork) bool { return w.NamespaceId == id })
		if named || s.closing[id] != nil {
			continue
		}
		path := filepath.Join(s.o.Folder, namespaceDir(id))
		// A directory that was recovered may have forgotten a namespace that is there.
		if since, ok := names[id]; !ok || since != r.Recoveries {
			s.stays(id, "files stay of a namespace that the directory does not know: it has not named it since it was "+
				"recovered; if the namespace is gone, stop the tier node and remove them", "path", path)
			continue
		}
		if err := os.RemoveAll(path); err != nil {
			s.stays(id, "files of a namespace that is gone are not removed yet", "err", err)
			continue
		}
		delete(names, id)
		delete(s.told, id)
		s.log.Info("files of a namespace that is gone are removed", "id", id)
	}
	s.mu.Lock()
	err = s.folder.become(r, names)
	s.mu.Unlock()
	if err != nil {
		s.stays(0, "which namespaces have files here is not written down yet", "err", err)
	}
}

// stays logs why files of a namespace are still there, unless that was logged last. 0 is for all of them.
func (s *Service) stays(id uint32, why string, more ...any) {
	if text := fmt.Sprint(why, more); s.told[id] != text {
		s.told[id] = text
		s.log.Warn(why, append([]any{"id", id}, more...)...)
	}
}

func (s *Service) peersOf(namespace uint32) (peers []rdma.Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p, x := range s.mu.peers {
		if x.namespace == namespace {
			peers = append(peers, p)
		}
	}
	return peers
}

// fence ends connections.
func (s *Service) fence(peers []rdma.Peer) {
	for _, p := range peers {
		ctx, cancel := context.WithTimeout(s.ctx, fenceTimeout)
		err := p.Fence(ctx)
		cancel()
		if err != nil {
			s.log.Debug("a connection does not end", "remote", p.Remote(), "err", err)
			continue
		}
		s.gone(p)
	}
}

// Stats is a snapshot for metrics and people.
type Stats struct {
	Volume, Boot uint64
	// LastHeard is when the directory last answered; zero: never. Err is why the last exchange failed, or nil.
	LastHeard   time.Time
	Err         error
	SizeBytes   int64
	Connections int
	// FailedReads were answered with zeroes since the disk did not give what is there.
	FailedReads uint64
	Namespaces  []NamespaceStats
}

// NamespaceStats is what is here of one namespace.
type NamespaceStats struct {
	ID   uint32
	Name string
	// Err is why its files cannot be opened, or nil; the sums are 0 then.
	Err error
	// Bytes are of its files, LiveBytes of objects that nobody dropped, WrittenBytes since the start.
	Bytes, LiveBytes int64
	WrittenBytes     uint64
	BudgetBytes      uint64 // to be demoted, by all tier nodes together
}

// Stats tells how the tier node is.
func (s *Service) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := Stats{Volume: uint64(s.folder.Volume), Boot: s.folder.Boot, LastHeard: s.mu.heard, Err: s.mu.err,
		SizeBytes: s.o.SizeBytes, Connections: len(s.mu.peers), FailedReads: s.mu.reads}
	for id, n := range ordered.All(s.mu.spaces) {
		x := NamespaceStats{ID: id, Name: n.work.Namespace}
		sums := n.Store.Stats()
		x.Bytes, x.LiveBytes, x.WrittenBytes = sums.Bytes, sums.Live, sums.Written
		for _, b := range n.work.Budgets {
			x.BudgetBytes += b.Bytes
		}
		st.Namespaces = append(st.Namespaces, x)
	}
	for _, id := range slices.Sorted(maps.Keys(s.mu.failures)) {
		st.Namespaces = append(st.Namespaces, NamespaceStats{ID: id, Err: s.mu.failures[id]})
	}
	return st
}
