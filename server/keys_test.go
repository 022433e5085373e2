package server

import (
	"context"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/server/lead"
)

// verified is what a token says to a memory node that has these keys.
func verified(t testing.TB, keys []*dirpb.TokenKey, tok []byte) token.Grant {
	t.Helper()
	var k []token.Key
	for _, x := range keys {
		k = append(k, token.Key{Generation: x.Generation, Secret: x.Key})
	}
	g, err := token.Verify(k, tok, time.Now())
	if err != nil {
		t.Fatalf("token %x: %v", tok, err)
	}
	return g
}

// A new key signs once every memory node has it, and another one follows when every session has its tokens.
func TestRotateKey(t *testing.T) {
	n := single(t, vfs.NewMem(), forever)
	c := dial(t, n)
	ctx := testCtx(t)
	m1, m2 := newMemnode(t, "m1", 1, just(n)), newMemnode(t, "m2", 1, just(n))
	a, quiet := open(t, c), open(t, c)
	m1.silence()
	m2.silence()
	held := map[uint32]uint64{a.SessionId: a.TokenNumber, quiet.SessionId: quiet.TokenNumber}
	beat := func(m *memnode, generation uint32) *dirpb.HeartbeatReply {
		t.Helper()
		r, err := c.Heartbeat(ctx, &dirpb.HeartbeatRequest{NodeId: m.id, Incarnation: 1, KeyGeneration: generation})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	// renewed is the session's renewal, which takes the token that it is given.
	renewed := func(x *dirpb.OpenSessionReply, want uint32) {
		t.Helper()
		r, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, Number: numbers.Add(1),
			TokenNumber: held[x.SessionId]})
		if err != nil {
			t.Fatal(err)
		}
		if (len(r.Token) > 0) != (want != 0) {
			t.Fatalf("a renewal brings a token of %d bytes, want one of key %d", len(r.Token), want)
		}
		if want == 0 {
			return
		}
		g := verified(t, beat(m1, 0).Keys, r.Token)
		if g.Session != x.SessionId || g.Namespace != x.NamespaceId || g.Generation != want ||
			r.TokenNumber != lead.TokenNumber(want, g.Expires) {
			t.Fatalf("a renewal brings %+v, number %x; want a token of key %d", g, r.TokenNumber, want)
		}
		held[x.SessionId] = r.TokenNumber
	}
	rotate := func(force bool) error {
		_, err := c.RotateKey(ctx, &dirpb.RotateKeyRequest{Force: force})
		return err
	}
	news := beat(m1, 1).News
	beat(m2, 1)
	renewed(a, 0)
	if err := rotate(false); err != nil {
		t.Fatal(err)
	}
	r := beat(m1, 1)
	if len(r.Keys) != 2 || r.Keys[0].Generation != 2 || r.Keys[1].Generation != 1 || r.News == news {
		t.Fatalf("after a rotation a heartbeat brings %d keys and news %d, before %d", len(r.Keys), r.News, news)
	}
	renewed(a, 0)
	if g := verified(t, r.Keys, open(t, c).Token); g.Generation != 1 {
		t.Fatalf("a token of key %d, which no memory node has", g.Generation)
	}
	wantCode(t, rotate(false), codes.FailedPrecondition, "without the key of generation 2: 2 memory nodes (m1, m2) "+
		"and 3 sessions (1, 2, 3);", "no key was made")
	if beat(m1, 2); n.keyUse(t).Signs != 1 {
		t.Fatal("a key signs that m2 has not")
	}
	renewed(a, 0)
	wantCode(t, rotate(false), codes.FailedPrecondition, "1 memory node (m2) and 3 sessions")
	beat(m2, 2)
	if _, err := c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: 3}); err != nil {
		t.Fatal(err)
	}
	renewed(a, 2)
	wantCode(t, rotate(false), codes.FailedPrecondition, ": 2 sessions (1, 2);") // a has not said that it has it
	renewed(a, 0)
	wantCode(t, rotate(false), codes.FailedPrecondition, ": 1 session (2);")
	u := n.keyUse(t)
	if u.Generation != 2 || u.Signs != 2 || len(u.NodesBehind) != 0 || len(u.SessionsBehind) != 1 ||
		u.MadeUnixMillis == 0 {
		t.Fatalf("the status says %v", u)
	}
	renewed(quiet, 2)
	renewed(quiet, 0)
	if err := rotate(false); err != nil {
		t.Fatal(err)
	}
	wantCode(t, rotate(false), codes.FailedPrecondition, "generation 3")
	if err := rotate(true); err != nil {
		t.Fatal(err)
	}
	if r := beat(m1, 2); len(r.Keys) != 2 || r.Keys[0].Generation != 4 || r.Keys[1].Generation != 3 {
		t.Fatalf("forced: %d keys, the present one %d", len(r.Keys), r.Keys[0].Generation)
	}
	renewed(a, 3) // what m1 takes as soon as it hears of it
	// A memory node that was started again has to say anew what it has.
	beat(m1, 4)
	beat(m2, 4)
	renewed(a, 4)
	q := m1.q
	m1.dies()
	q.Incarnation = 2
	testutil.Until(t, "the next process of m1", func() bool {
		_, err := c.RegisterNode(ctx, q)
		return err == nil
	})
	if u := n.keyUse(t); u.Signs != 3 || len(u.NodesBehind) != 1 || u.NodesBehind[0] != "m1" {
		t.Fatalf("the status says %v", u)
	}
	renewed(a, 0) // nothing is wrong with the token of the present key that it has
}

func (n *Node) keyUse(t testing.TB) *dirpb.KeyUse {
	t.Helper()
	st, err := n.Status(context.Background(), &dirpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return st.KeyUse
}

// A token is replaced before it expires.
func TestTokenLife(t *testing.T) {
	n := start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, Lease: forever, TokenLife: 2 * time.Second})
	c := dial(t, n)
	newMemnode(t, "m1", 1, just(n))
	x := open(t, c)
	var r *dirpb.RenewReply
	testutil.Until(t, "another token", func() bool {
		var err error
		if r, err = c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: x.SessionId, Number: numbers.Add(1),
			TokenNumber: x.TokenNumber}); err != nil {
			t.Fatal(err)
		}
		return len(r.Token) > 0
	})
	if r.TokenNumber <= x.TokenNumber {
		t.Fatalf("token %x follows %x", r.TokenNumber, x.TokenNumber)
	}
	if r, err := c.Renew(testCtx(t), &dirpb.RenewRequest{SessionId: x.SessionId, Number: numbers.Add(1)}); err != nil ||
		len(r.Token) > 0 {
		t.Fatalf("a session that shows no token is given %d bytes, %v", len(r.GetToken()), err)
	}
}

// A session's tokens allow the lanes of its namespace's quota, and never more than the directory's limit.
func TestLanesOf(t *testing.T) {
	for quota, want := range map[uint32]uint32{0: maxLanes, 1: 1, maxLanes: maxLanes, maxLanes + 1: maxLanes} {
		if got := lanesOf(&dirpb.Namespace{Quota: &dirpb.Quota{Lanes: quota}}); got != want {
			t.Errorf("quota lanes %d: %d, want %d", quota, got, want)
		}
	}
}
