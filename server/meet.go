package server

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/lead"
)

// meeting knows the gateways that have registered with this leader. It is soft: a new leader knows none until they have
// called it, which they do within a second, and nothing but acquaintances among gateways depends on it.
type meeting struct {
	changed event
	mu      struct {
		sync.Mutex
		gateways map[string]*metGateway // by id
	}
}

// metGateway is a gateway that has registered.
type metGateway struct {
	*dirpb.PeerGateway
	group string // those that serve the same databases meet
	// namespaces are its databases, and identity is who opened its sessions.
	namespaces []uint32
	identity   string
	trouble    string    // dirpb.MeetRequest's
	until      time.Time // forgotten then
}

const (
	// A gateway registers again at least each second (waitMost), and is forgotten after meetTime.
	meetTime = 5 * time.Second
	// Bounds of what callers may have the leader remember.
	maxGateways, maxMeetSessions = 4096, 64
	meetIDBytes, maxMeetAddr     = 16, 256
	maxMeetTrouble               = 512
)

// Meet registers a gateway and tells it of the others that serve the same databases, and waits for a change of them if
// asked to.
func (n *Node) Meet(ctx context.Context, q *dirpb.MeetRequest) (*dirpb.MeetReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	if err := checkMeet(q); err != nil {
		return nil, err
	}
	var group strings.Builder
	g := &metGateway{PeerGateway: &dirpb.PeerGateway{Id: q.Id, Addr: q.Addr, HostId: q.HostId}, trouble: q.Trouble}
	n.withState(l, func(_ *lead.Leader, s *fsm.State, _ time.Duration) {
		for _, id := range q.SessionIds {
			y := s.Session(id)
			if y == nil || y.Life != dirpb.SessionLife_SESSION_LIVE {
				err = sessionGone(id)
				return
			}
			if err = ownedBy(ctx, fmt.Sprintf("session %d", id), y.Identity); err != nil {
				return
			}
			// Peers hear every message and the names of keys, and are believed: a gateway that may only read meets
			// nobody.
			if w := s.Namespace(y.NamespaceId); w != nil {
				err = fsm.CheckRight(w, callerOf(ctx, false), dirpb.Right_RIGHT_WRITE)
			}
			if err != nil {
				err = refusal(err)
				return
			}
			if y.ReadOnly {
				err = status.Errorf(codes.PermissionDenied, "session %d is read-only: gateways meet with sessions "+
					"that may write", id)
				return
			}
			fmt.Fprintf(&group, "%d ", y.NamespaceId)
			g.namespaces, g.identity = append(g.namespaces, y.NamespaceId), y.Identity
		}
	})
	if err != nil {
		return nil, err
	}
	g.group = group.String()
	if !l.meeting.isOwn(g) {
		return nil, status.Errorf(codes.PermissionDenied, "another gateway has registered with this id")
	}
	if q.Leaves {
		l.meeting.remove(string(q.Id))
		return &dirpb.MeetReply{}, nil
	}
	if !l.meeting.add(g) {
		return nil, status.Errorf(codes.ResourceExhausted, "%d gateways are registered, want at most %d", maxGateways,
			maxGateways)
	}
	reply := &dirpb.MeetReply{}
	n.await(ctx, l, q.WaitMillis, l.meeting.changed.next, func() bool {
		reply.Gateways = l.meeting.others(string(q.Id), g.group)
		reply.News = newsOfGateways(reply.Gateways)
		return reply.News != q.News
	})
	return reply, nil
}

func checkMeet(q *dirpb.MeetRequest) error {
	bad := func(format string, args ...any) error { return status.Errorf(codes.InvalidArgument, format, args...) }
	if len(q.SessionIds) == 0 || len(q.SessionIds) > maxMeetSessions {
		return bad("session_ids: %d sessions, want 1 to %d", len(q.SessionIds), maxMeetSessions)
	}
	if len(q.Id) != meetIDBytes {
		return bad("id: %d bytes, want %d", len(q.Id), meetIDBytes)
	}
	if _, _, err := net.SplitHostPort(q.Addr); err != nil || len(q.Addr) > maxMeetAddr {
		return bad("addr: %.64q, want host:port", q.Addr)
	}
	if len(q.HostId) > maxMeetAddr {
		return bad("host_id: %d bytes, want at most %d", len(q.HostId), maxMeetAddr)
	}
	if len(q.Trouble) > maxMeetTrouble || strings.ContainsFunc(q.Trouble, func(r rune) bool {
		return !unicode.IsPrint(r) || r == utf8.RuneError
	}) {
		return bad("trouble: want at most %d bytes of printable characters", maxMeetTrouble)
	}
	return nil
}

// add registers a gateway, or reports that there are too many.
func (m *meeting) add(g *metGateway) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	g.until = now.Add(meetTime)
	was := m.mu.gateways[string(g.Id)]
	if was == nil {
		for id, x := range m.mu.gateways {
			if now.After(x.until) {
				delete(m.mu.gateways, id)
			}
		}
		if len(m.mu.gateways) >= maxGateways {
			return false
		}
	}
	if m.mu.gateways == nil {
		m.mu.gateways = make(map[string]*metGateway)
	}
	m.mu.gateways[string(g.Id)] = g
	if was == nil || was.group != g.group || was.Addr != g.Addr {
		m.changed.happens()
	}
	return true
}

// isOwn reports whether nobody but the caller is registered with a gateway's id: others of its group know it.
func (m *meeting) isOwn(g *metGateway) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := m.mu.gateways[string(g.Id)]
	return was == nil || time.Now().After(was.until) || was.identity == g.identity
}

func (m *meeting) remove(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.mu.gateways, id)
	m.changed.happens()
}

// others are the gateways of a group but one, in order.
func (m *meeting) others(id, group string) (list []*dirpb.PeerGateway) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for _, g := range m.mu.gateways {
		if string(g.Id) != id && g.group == group && now.Before(g.until) {
			list = append(list, g.PeerGateway)
		}
	}
	slices.SortFunc(list, func(a, b *dirpb.PeerGateway) int { return bytes.Compare(a.Id, b.Id) })
	return list
}

// show is all gateways for operators, by address.
func (m *meeting) show(s *fsm.State) (list []*dirpb.GatewayInfo) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	for _, g := range m.mu.gateways {
		if !now.Before(g.until) {
			continue
		}
		info := &dirpb.GatewayInfo{Addr: g.Addr, HostId: g.HostId, Identity: g.identity, Trouble: g.trouble}
		for _, id := range g.namespaces {
			info.Namespaces = append(info.Namespaces, s.Namespace(id).GetName())
		}
		list = append(list, info)
	}
	slices.SortFunc(list, func(a, b *dirpb.GatewayInfo) int {
		return cmp.Or(strings.Compare(a.Addr, b.Addr), strings.Compare(a.HostId, b.HostId))
	})
	return list
}

// newsOfGateways sums up a list, never 0.
func newsOfGateways(list []*dirpb.PeerGateway) uint64 {
	h := fnv.New64a()
	for _, g := range list {
		for _, s := range [][]byte{g.Id, []byte(g.Addr), []byte(g.HostId)} {
			_, _ = h.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(s))), s...)) // never fails
		}
	}
	return h.Sum64() | 1
}
