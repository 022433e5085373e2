package server

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/lead"
)

// newKey draws a key for session tokens.
func newKey() []byte {
	key := make([]byte, fsm.KeyBytes)
	rand.Read(key) // crypto/rand: never fails
	return key
}

// sign makes a token of a live session, with the key of a generation that s has, and gives its number.
func (n *Node) sign(s *fsm.State, generation uint32, x *fsmpb.Session) ([]byte, uint64, error) {
	for _, k := range s.Keys() {
		if k.Generation != generation {
			continue
		}
		expires := time.Now().Add(n.opts.TokenLife).Unix()
		b, err := token.Sign(token.Key{Generation: k.Generation, Secret: k.Key}, token.Grant{
			Session: x.Id, Namespace: x.NamespaceId, ReadOnly: x.ReadOnly, Identity: x.Identity,
			Lanes: uint16(min(x.Lanes, maxLanes)), Expires: expires,
		})
		return b, lead.TokenNumber(generation, expires), err
	}
	return nil, 0, fmt.Errorf("no key of generation %d", generation)
}

// lanesOf is how many lanes a session that is opened in w has at most: connections to a memory node, each with a second
// one for long values.
func lanesOf(w *dirpb.Namespace) uint32 {
	if q := w.GetQuota().GetLanes(); q != 0 {
		return min(q, maxLanes)
	}
	return maxLanes
}

// signAgain gives a session another token in the place of the one with this number, if that is of an older key than the
// one that signs, or past half of its life; else nil. A session that shows no token gets none.
func (n *Node) signAgain(l *lead.Leader, s *fsm.State, id uint32, number uint64) ([]byte, uint64, error) {
	if number == 0 {
		return nil, 0, nil
	}
	signs, left := l.Signs(s), lead.TokenExpires(number)-time.Now().Unix()
	if lead.TokenGeneration(number) >= signs && left > int64(n.opts.TokenLife/2/time.Second) {
		return nil, 0, nil
	}
	return n.sign(s, signs, s.Session(id))
}

// RotateKey makes a new key for session tokens.
func (n *Node) RotateKey(ctx context.Context, q *dirpb.RotateKeyRequest) (*dirpb.RotateKeyReply, error) {
	l, err := n.confirmed(ctx)
	if err != nil {
		return nil, err
	}
	var u *dirpb.KeyUse
	n.withState(l, func(x *lead.Leader, s *fsm.State, _ time.Duration) { u = x.KeyUse(s) })
	if why := behind(u); why != "" && !q.Force {
		return nil, status.Errorf(codes.FailedPrecondition, "%s; what they show would be refused, so no key was "+
			"made: ask again once they have, or use force", why)
	}
	c := &fsmpb.Command{Op: &fsmpb.Command_RotateKey{RotateKey: &fsmpb.RotateKey{
		Generation: u.Generation + 1, Key: newKey(), UnixMillis: time.Now().UnixMilli(),
	}}}
	if _, err := n.do(ctx, l, audited(ctx, c, actRotateKey, fmt.Sprint(u.Generation+1), "force", q.Force)); err != nil {
		return nil, err
	}
	return &dirpb.RotateKeyReply{Generation: u.Generation + 1}, nil
}

// behindShown is how many of each kind an error names.
const behindShown = 8

// behind says who has not taken over the present key, "" if all have.
func behind(u *dirpb.KeyUse) string {
	some := func(names []string, one, many string) string {
		if len(names) == 0 {
			return ""
		}
		if len(names) > 1 {
			one = fmt.Sprintf("%d %s", len(names), many)
		}
		list := strings.Join(names[:min(len(names), behindShown)], ", ")
		if len(names) > behindShown {
			list += ", …"
		}
		return one + " (" + list + ")"
	}
	var sessions []string
	for _, id := range u.SessionsBehind {
		sessions = append(sessions, fmt.Sprint(id))
	}
	var who []string
	for _, x := range []string{some(u.NodesBehind, "1 memory node", "memory nodes"),
		some(sessions, "1 session", "sessions")} {
		if x != "" {
			who = append(who, x)
		}
	}
	if len(who) == 0 {
		return ""
	}
	return fmt.Sprintf("still without the key of generation %d: %s", u.Generation, strings.Join(who, " and "))
}
