package fsm

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ordered"
)

// maxNamed bounds the sessions that a refusal names.
const maxNamed = 3

// deleteNamespace takes a namespace away: nobody opens a session in it any more, those that
// live are fenced, and it goes with the last of them. Its regions outlive its sessions, as
// those of any placement group do, so no verb of a session that has not heard of it lands in
// memory that is somebody else's.
func (s *State) deleteNamespace(q *dirpb.DeleteNamespaceRequest) (*dirpb.DeleteNamespaceReply, error) {
	w, id := s.NamespaceNamed(q.GetName()), q.GetId()
	switch {
	case id != 0 && w.GetId() != id && id <= s.meta.NamespaceId && s.namespaces[id] == nil:
		return &dirpb.DeleteNamespaceReply{Id: id}, nil // asked again
	case w == nil:
		return nil, fmt.Errorf("namespace %.64q: %w", q.GetName(), ErrNotFound)
	case id != 0 && w.Id != id:
		return nil, fmt.Errorf("%w: namespace %q has id %d, not %d", ErrInvalid, w.Name, w.Id, id)
	}
	var live []uint32
	var clients []string
	for _, x := range ordered.Values(s.sessions) {
		if x.NamespaceId != w.Id || x.Life != dirpb.SessionLife_SESSION_LIVE {
			continue
		}
		live = append(live, x.Id)
		if !x.Background {
			clients = append(clients, fmt.Sprintf("%d %.64q", x.Id, x.Client))
		}
	}
	if n := len(clients); n > 0 && !q.EndSessions {
		named := strings.Join(clients[:min(n, maxNamed)], ", ")
		if n > maxNamed {
			named += ", …"
		}
		return nil, fmt.Errorf("%w: namespace %q has %d sessions that live (%s); stop them, or have them ended",
			ErrRefused, w.Name, n, named)
	}
	if !w.Deleting {
		w = proto.CloneOf(w)
		w.Deleting = true
		s.putNamespace(w)
	}
	s.fence(live)
	s.endNamespace(w.Id)
	return &dirpb.DeleteNamespaceReply{Id: w.Id, Fencing: s.SessionsIn(w.Id)}, nil
}

// checkStays returns why nothing may be begun in a namespace.
func (s *State) checkStays(namespace uint32) error {
	if w := s.namespaces[namespace]; w.GetDeleting() {
		return fmt.Errorf("%w: namespace %q is being deleted", ErrRefused, w.Name)
	}
	return nil
}

// endNamespace removes a namespace that is being deleted and has no session left, with all
// that belongs to it. Memory nodes give its regions back as they hear that nobody wants them.
func (s *State) endNamespace(id uint32) {
	if !s.namespaces[id].GetDeleting() || s.SessionsIn(id) > 0 {
		return
	}
	for _, j := range s.Jobs() {
		if j.NamespaceId == id {
			jobRows.drop(s, j.Id)
		}
	}
	for _, sh := range s.Shards(id) {
		shardRows.drop(s, sh.Id)
	}
	for _, pg := range s.PGs(id) {
		s.dropPG(pg.Id)
	}
	s.dropVolumeRegions(id)
	namespaceRows.drop(s, id)
	s.refreshUsed()
}
