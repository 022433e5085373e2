package verbstest

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token/tokentest"
	"github.com/kvd-project/kvd/rdma"
)

// Over verbs, too, nobody gets a queue pair with a token that the directory did not sign, at a memory node without a
// region of its namespace, or once its key has been replaced twice; what is connected goes on.
func TestTokens(t *testing.T) {
	needs(t, "1")
	s := newStore(t, 2*time.Second, node{"m1", 0, []string{"--janitor"}})
	s.namespace("ours", 1, 8<<20)
	s.start(node{"m2", 1, nil}) // has nothing of it
	by := s.bystander("ours")
	g := s.guesser("ours", false, true)
	r := g.region("m1")
	early, good := g.mustConnect("m1"), g.token
	shown := func(name string, tok []byte) error {
		t.Helper()
		g.token = tok
		defer func() { g.token = good }()
		_, err := g.connect(name)
		return err
	}
	refused := func(what, want string, err error) {
		t.Helper()
		if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want a refusal: %s", what, err, want)
		}
	}
	for _, f := range tokentest.Forgeries(good) {
		refused(f.Name, "session token", shown("m1", f.Token))
	}
	refused("at another memory node", "no region of the namespace here", shown("m2", good))
	g.mustConnect("m1")
	s.must("keys", "rotate", "--force")
	s.must("keys", "rotate", "--force")
	testutil.UntilNone(t, "the token's key is dropped", func() string { // when m1 has heard of it
		err := shown("m1", good)
		if err == nil {
			return "the token is taken"
		}
		refused("after two rotations", "which was replaced", err)
		return ""
	})
	early.read(r.heapRKey, r.heap, 8)
	by.moves(t)
}
