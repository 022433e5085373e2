package fsm

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ordered"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// MaxAccess is how many entries the access list of a namespace holds.
const MaxAccess = 256

// Caller is who asks for something, as namespaces know callers.
type Caller struct {
	Identity   string // empty: it called without TLS, and may do everything
	Groups     []string
	Everywhere bool // its role lets it use every namespace, whoever owns that
}

// is reports whether an owner or an entry of an access list means c.
func (c Caller) is(who string) bool {
	group, ok := strings.CutPrefix(who, identity.GroupPrefix)
	return !ok && who == c.Identity || ok && slices.Contains(c.Groups, group)
}

// RightOf is the most that a namespace lets c do. A namespace without an owner is everybody's.
func RightOf(w *dirpb.Namespace, c Caller) dirpb.Right {
	switch {
	case c.Identity == "" || c.Everywhere:
		return dirpb.Right_RIGHT_ADMIN
	case w.Owner == "":
		return dirpb.Right_RIGHT_WRITE
	case c.is(w.Owner):
		return dirpb.Right_RIGHT_ADMIN
	}
	right := dirpb.Right_RIGHT_UNSPECIFIED
	for _, a := range w.Access {
		if c.is(a.Who) {
			right = max(right, a.Right)
		}
	}
	return right
}

func rightText(r dirpb.Right) string {
	if r == dirpb.Right_RIGHT_UNSPECIFIED {
		return "no right"
	}
	return strings.ToLower(strings.TrimPrefix(r.String(), "RIGHT_"))
}

// CheckRight refuses, with ErrForeign, a caller that lacks a right in a namespace.
func CheckRight(w *dirpb.Namespace, c Caller, want dirpb.Right) error {
	has := RightOf(w, c)
	if has >= want {
		return nil
	}
	owner := "has no owner"
	if w.Owner != "" {
		owner = "belongs to " + w.Owner
	}
	return fmt.Errorf("%w: %s has %s in namespace %q, and wants %s. It %s, who or an operator may give the right: "+
		"kvctl namespace grant %s %s %s",
		ErrForeign, c.Identity, rightText(has), w.Name, rightText(want), owner, w.Name, shellWord(c.Identity),
		rightText(want))
}

// shellWord is s as a shell takes it for one word.
func shellWord(s string) string {
	plain := func(r rune) bool {
		return r < 0x80 && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' ||
			strings.ContainsRune("-._:/", r))
	}
	if s != "" && !strings.ContainsFunc(s, func(r rune) bool { return !plain(r) }) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// opener is who opened a session, or is about to.
func opener(c *fsmpb.OpenSession) Caller {
	return Caller{Identity: c.GetIdentity(), Groups: c.GetGroups(), Everywhere: c.GetEverywhere()}
}

func openerOf(x *fsmpb.Session) Caller {
	return Caller{Identity: x.Identity, Groups: x.Groups, Everywhere: x.Everywhere}
}

// wantedBy is the right that a session needs.
func wantedBy(readOnly bool) dirpb.Right {
	if readOnly {
		return dirpb.Right_RIGHT_READ
	}
	return dirpb.Right_RIGHT_WRITE
}

// counted reports whether a session counts against its namespace's quota. Those of janitors do not.
func counted(background, everywhere bool, identity string) bool {
	return !background || !everywhere && identity != ""
}

// CheckOpen says why a session may not be opened in a namespace, nil if it may: its owner's access list, or
// its quota of sessions.
func (s *State) CheckOpen(c *fsmpb.OpenSession) error {
	w := s.namespaces[c.GetNamespaceId()]
	switch {
	case w == nil:
		return fmt.Errorf("namespace %d: %w", c.GetNamespaceId(), ErrNotFound)
	case w.Deleting:
		return fmt.Errorf("namespace %q is being deleted: %w", w.Name, ErrNotFound)
	case w.Tier != nil && !c.KnowsStubs:
		return fmt.Errorf("%w: namespace %q has values on tier nodes, which this client cannot read: run a later "+
			"version of it", ErrRefused, w.Name)
	}
	if err := CheckRight(w, opener(c), wantedBy(c.ReadOnly)); err != nil {
		return err
	}
	most := w.GetQuota().GetSessions()
	if most == 0 || !counted(c.Background, c.Everywhere, c.Identity) {
		return nil
	}
	if n := s.SessionsOf(w.Id); n >= most {
		return fmt.Errorf("%w: quota sessions: namespace %q has %d sessions open or being fenced, of %d", ErrFull,
			w.Name, n, most)
	}
	return nil
}

// CheckAccess says why the access list of a namespace is not to be changed so, nil if it may be.
func (s *State) CheckAccess(c *fsmpb.SetAccess) error {
	w := s.namespaces[c.GetNamespaceId()]
	who, right := c.GetAccess().GetWho(), c.GetAccess().GetRight()
	if w == nil {
		return fmt.Errorf("namespace %d: %w", c.GetNamespaceId(), ErrNotFound)
	}
	by := Caller{Identity: c.Identity, Groups: c.Groups, Everywhere: c.Everywhere}
	if err := errors.Join(CheckRight(w, by, dirpb.Right_RIGHT_ADMIN), s.checkStays(w.Id)); err != nil {
		return err
	}
	if err := identity.CheckWho(who); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	_, there := findAccess(w, who)
	switch {
	case right < 0 || right > dirpb.Right_RIGHT_ADMIN:
		return fmt.Errorf("%w: right %d, want read, write or admin", ErrInvalid, right)
	case w.Owner == "":
		return fmt.Errorf("%w: namespace %q has no owner, so everybody may use it; an operator gives it one: kvctl "+
			"namespace set %s --owner WHO", ErrRefused, w.Name, w.Name)
	case who == w.Owner:
		return fmt.Errorf("%w: namespace %q belongs to %s, who may do everything; an operator gives it to another: "+
			"kvctl namespace set %s --owner WHO", ErrRefused, w.Name, who, w.Name)
	case right == dirpb.Right_RIGHT_UNSPECIFIED && !there:
		return fmt.Errorf("%s is not in the access list of namespace %q: %w", who, w.Name, ErrNotFound)
	case !there && len(w.Access) >= MaxAccess:
		return fmt.Errorf("%w: the access list of namespace %q has %d entries, the most there are; grant a group",
			ErrFull, w.Name, len(w.Access))
	}
	return nil
}

func findAccess(w *dirpb.Namespace, who string) (int, bool) {
	return slices.BinarySearchFunc(w.Access, who, func(a *dirpb.Access, who string) int {
		return cmp.Compare(a.Who, who)
	})
}

// setAccess gives somebody a right in a namespace, or takes it, and fences the sessions that
// need more than is left. It returns how many.
func (s *State) setAccess(c *fsmpb.SetAccess) (*dirpb.Namespace, uint32, error) {
	if err := s.CheckAccess(c); err != nil {
		return nil, 0, err
	}
	w := s.namespaces[c.NamespaceId]
	at, there := findAccess(w, c.Access.Who)
	if there && w.Access[at].Right == c.Access.Right {
		return w, 0, nil
	}
	w = proto.CloneOf(w)
	if there {
		w.Access = slices.Delete(w.Access, at, at+1)
	}
	if c.Access.Right != dirpb.Right_RIGHT_UNSPECIFIED {
		w.Access = slices.Insert(w.Access, at, c.Access)
	}
	s.putNamespace(w)
	return w, s.fenceBeyond(w), nil
}

// setOwner gives w, which is the caller's alone, to somebody. The former owner keeps what the access list says.
func setOwner(w *dirpb.Namespace, owner string) {
	w.Owner = owner
	w.Access = slices.DeleteFunc(w.Access, func(a *dirpb.Access) bool { return a.Who == owner })
}

// fenceBeyond fences the sessions of w that may do more than w lets those do who opened them. It returns how
// many it began to fence.
func (s *State) fenceBeyond(w *dirpb.Namespace) uint32 {
	var ids []uint32
	for _, x := range ordered.Values(s.sessions) {
		if x.NamespaceId == w.Id && x.Life == dirpb.SessionLife_SESSION_LIVE && RightOf(w, openerOf(x)) < wantedBy(
			x.ReadOnly) {
			ids = append(ids, x.Id)
		}
	}
	s.fence(ids)
	return uint32(len(ids))
}

// quotaOf is q as a namespace keeps it: nil if it bounds nothing.
func quotaOf(q *dirpb.Quota) *dirpb.Quota {
	if q.GetSessions() == 0 && q.GetLanes() == 0 && q.GetTcpOpsPerSecond() == 0 && q.GetIndexBytes() == 0 {
		return nil
	}
	return &dirpb.Quota{Sessions: q.Sessions, Lanes: q.Lanes, TcpOpsPerSecond: q.TcpOpsPerSecond,
		IndexBytes: q.IndexBytes}
}

func checkTenancy(owner string) error {
	if owner == "" {
		return nil
	}
	if err := identity.CheckWho(owner); err != nil {
		return fmt.Errorf("%w: owner %w", ErrInvalid, err)
	}
	return nil
}

func checkAccessList(w *dirpb.Namespace) error {
	if err := checkTenancy(w.Owner); err != nil {
		return fmt.Errorf("%d: %w", w.Id, err)
	}
	if n := len(w.Access); n > MaxAccess || n > 0 && w.Owner == "" {
		return fmt.Errorf("%d: an access list of %d entries, and the owner %q", w.Id, n, w.Owner)
	}
	for i, a := range w.Access {
		if identity.CheckWho(a.Who) != nil || a.Right < dirpb.Right_RIGHT_READ || a.Right > dirpb.Right_RIGHT_ADMIN ||
			a.Who == w.Owner ||
			i > 0 && a.Who <= w.Access[i-1].Who {
			return fmt.Errorf("%d: entry %d of the access list, %.160q with right %d", w.Id, i, a.Who, a.Right)
		}
	}
	return nil
}

// IndexBytes is how much of their indexes a namespace's shards and status words have in all placement groups
// together. Those on their way to larger or more arrays count too. Each copy counts once.
func (s *State) IndexBytes(namespace uint32) (bytes uint64) {
	for _, pg := range s.PGs(namespace) {
		if h := s.heaps[pg.Id]; h != nil {
			bytes += h.IndexNext - min(h.IndexNext, layout.RegionPageSize)
			for _, a := range h.IndexFree {
				bytes -= min(bytes, arrayBytes(a.Segments))
			}
		}
	}
	return bytes
}

// firstSegments is how many segments each of the first shards of a new namespace may have by its quota: as many as
// asked for, or so many that they fill an eighth of it, and one at least.
func firstSegments(q *dirpb.CreateNamespaceRequest, shards int) (uint32, error) {
	quota := q.GetQuota().GetIndexBytes()
	if quota == 0 {
		return math.MaxUint32, nil
	}
	least := max(q.Segments, 1)
	if need := uint64(shards) * arrayBytes(least); need > quota {
		return 0, fmt.Errorf("%w: quota index: %d shards of %d segments need %s of index, of %s", ErrInvalid, shards,
			least, units.Bytes(need), units.Bytes(quota))
	}
	if q.Segments != 0 {
		return q.Segments, nil
	}
	return uint32(min(max(quota/8/uint64(shards)/layout.SegmentSize, 1), math.MaxUint32)), nil
}

// CheckIndexQuota refuses, with ErrFull, to let the shards of a namespace grow by that number of segments. A shard that
// moves gives back as many later, and does not grow.
func (s *State) CheckIndexQuota(namespace uint32, segments uint32) error {
	w := s.namespaces[namespace]
	most := w.GetQuota().GetIndexBytes()
	if most == 0 {
		return nil
	}
	if used, more := s.IndexBytes(namespace), arrayBytes(segments); used > most || more > most-used {
		return fmt.Errorf("%w: quota index: namespace %q has %s of index, of %s, and wants %s more", ErrFull, w.Name,
			units.Bytes(used), units.Bytes(most), units.Bytes(more))
	}
	return nil
}
