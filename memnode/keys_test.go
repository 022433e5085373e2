package memnode

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/internal/token/tokentest"
	"github.com/kvd-project/kvd/rdma"
)

// everyProvider runs a test over each provider that there is without an adapter.
func everyProvider(t *testing.T, fn func(t *testing.T, provider string)) {
	for _, p := range []string{"tcp", "shm", "sim"} {
		t.Run(p, func(t *testing.T) { fn(t, p) })
	}
}

// Nobody connects with a token that the directory did not sign.
func TestForgedTokens(t *testing.T) {
	everyProvider(t, func(t *testing.T, provider string) {
		dir := newDirectory(t)
		n, _ := open(t, dir, 1<<20, provider)
		dir.want(1, 1)
		dir.want(2, 2)
		dir.keys(1, provider)
		dir.keys(2, provider)
		g := rw
		g.Identity = "client/a"
		good := private(g, 0)
		lane := good[len(good)-admit.LaneSize:]
		for _, f := range tokentest.Forgeries(good[:len(good)-admit.LaneSize]) {
			_, err := dial(t, dir, provider, append(f.Token, lane...))
			if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), "session token") {
				t.Errorf("%s: %v, want a refusal", f.Name, err)
			}
		}
		for _, b := range [][]byte{nil, lane[:3]} {
			if _, err := dial(t, dir, provider, b); !errors.Is(err, rdma.ErrRefused) ||
				!strings.Contains(err.Error(), "want a session token and a lane") {
				t.Errorf("private data of %d bytes: %v, want a refusal", len(b), err)
			}
		}
		if s := n.Stats(); s.Connections != 0 {
			t.Errorf("%d connections", s.Connections)
		}
		if _, err := dial(t, dir, provider, good); err != nil {
			t.Fatal(err)
		}
	})
}

// A token that is signed opens just what it says, here and now.
func TestRefusals(t *testing.T) {
	everyProvider(t, func(t *testing.T, provider string) {
		dir := newDirectory(t)
		n, _ := open(t, dir, 1<<20, provider)
		dir.want(1, 1)
		dir.keys(1, provider)
		dir.change(func() { dir.fence, dir.ended = []uint32{8}, []uint32{9} })
		dir.until("the fence", func() bool { return len(dir.last.FencedSessions) == 1 })
		with := func(change func(*token.Grant), lane uint32) []byte {
			g := rw
			change(&g)
			return private(g, lane)
		}
		foreign, err := token.Sign(token.Key{Generation: 1, Secret: keyOf(7).Secret},
			token.Grant{Session: 7, Namespace: 1, Lanes: 1, Expires: time.Now().Add(time.Hour).Unix()})
		if err != nil {
			t.Fatal(err)
		}
		for want, priv := range map[string][]byte{
			// of another cluster
			"session token: signature": binary.LittleEndian.AppendUint32(foreign, 0),
			"the session token has expired": with(func(g *token.Grant) {
				g.Expires = time.Now().Unix()
			}, 0),
			"1 is the latest that is known here": with(func(g *token.Grant) {
				g.Generation = 2
			}, 0),
			"no region of the namespace here: namespace 2 of session 7": with(func(g *token.Grant) {
				g.Namespace = 2
			}, 0),
			"quota lanes: lane 3 of session 7, want below 3": with(func(g *token.Grant) { g.Lanes = 3 }, 3),
			"session 8: the session has ended": with(func(g *token.Grant) {
				g.Session = 8
			}, 0),
			"session 9: the session has ended": with(func(g *token.Grant) {
				g.Session = 9
			}, 0),
		} {
			if _, err := dial(t, dir, provider, priv); !errors.Is(err, rdma.ErrRefused) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("%v, want a refusal: %s", err, want)
			}
		}
		if s := n.Stats(); s.Connections != 0 {
			t.Errorf("%d connections", s.Connections)
		}
		if _, err := dial(t, dir, provider, with(func(g *token.Grant) { g.Lanes = 3 }, 2)); err != nil {
			t.Fatal(err)
		}
		dir.change(func() { dir.regions = nil })
		testutil.Until(t, `len(n.Stats().Regions) == 0`, func() bool { return len(n.Stats().Regions) == 0 })
		if _, err := dial(t, dir, provider, private(rw, 1)); !errors.Is(err, rdma.ErrRefused) ||
			!strings.Contains(err.Error(), "no region") {
			t.Errorf("the region is gone: %v, want a refusal", err)
		}
	})
}

// Tokens of the present key and of the one before are taken; what is connected goes on whatever becomes of its key.
func TestKeysReplaced(t *testing.T) {
	everyProvider(t, func(t *testing.T, provider string) {
		dir := newDirectory(t)
		_, log := open(t, dir, 1<<20, provider)
		dir.want(1, 1)
		k := dir.keys(1, provider)
		of := func(generation uint32) token.Grant {
			g := rw
			g.Generation = generation
			return g
		}
		lanes := uint32(0)
		taken := func(generation uint32, want string) {
			t.Helper()
			lanes++
			_, err := dial(t, dir, provider, private(of(generation), lanes))
			if (err == nil) != (want == "") || err != nil &&
				(!errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), want)) {
				t.Fatalf("a token of key %d: %v, want %q", generation, err, want)
			}
		}
		old := mustDial(t, dir, provider, of(1), 0)
		for now := uint32(2); now <= 4; now++ {
			taken(now, "is the latest that is known here")
			dir.change(func() { dir.key = now })
			dir.until("the memory node has the key", func() bool { return dir.last.KeyGeneration == now })
			taken(now, "")
			taken(now-1, "")
			if now > 2 {
				taken(now-2, "which was replaced")
				taken(1, "which was replaced")
			}
		}
		if err := old.write(k.HeapRkey, k.HeapBase, "x"); err != nil {
			t.Fatalf("a connection from before fails: %v", err)
		}
		if log.count(string(keyOf(2).Secret[:4])) != 0 || log.count("tokens of another key are taken") != 3 {
			t.Fatal("keys are not logged as they should")
		}
	})
}

// A token of a key that is not known here has the memory node ask the directory; many have it ask no more often than
// there is time for an answer.
func TestUnknownKeyAsks(t *testing.T) {
	dir := newDirectory(t)
	dir.holds = true
	open(t, dir, 1<<20, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	g := rw
	g.Generation = 2
	began := time.Now()
	cancelled := func() int {
		if _, err := dial(t, dir, "tcp", private(g, 0)); !errors.Is(err, rdma.ErrRefused) {
			t.Fatalf("%v, want a refusal", err)
		}
		dir.mu.Lock()
		defer dir.mu.Unlock()
		return dir.cancelled
	}
	dir.until("a heartbeat waits", func() bool { return dir.held > 0 })
	for range 100 {
		cancelled()
	}
	if n, most := cancelled(), 1+int(time.Since(began)/askPause); n > most {
		t.Fatalf("%d heartbeats were given up, want at most %d", n, most)
	}
	testutil.Until(t, `cancelled() > 0`, func() bool { return cancelled() > 0 })
}

// Over TLS a session's token is good for its owner alone.
func TestTokenOfAnother(t *testing.T) {
	dir := newDirectory(t)
	n, _ := openWith(t, dir, 1<<20, func(o *Options) {
		o.Identities = identity.Mapping{TrustDomain: identitytest.TrustDomain}
	}, "tcp")
	dir.want(1, 1)
	dir.keys(1, "tcp")
	a := identitytest.New(t)
	chain := func(role, name string) *tls.ConnectionState {
		return &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{a.Role(role, name).Leaf}}}
	}
	const owner = "spiffe://" + identitytest.TrustDomain + "/kvd/client/a"
	for _, c := range []struct {
		identity string
		peer     *tls.ConnectionState
		want     string
	}{
		{owner, chain("client", "a"), ""},
		{owner, chain("client", "b"), "client/b"},
		{owner, chain("gateway", "a"), "gateway/a"},
		{owner, chain("operator", "a"), "operator/a"},
		{"client/a", chain("client", "a"), "client/a"}, // of no trust domain
		{"", chain("client", "a"), "is nobody's"},      // opened without TLS
		{owner, nil, ""}, // the device has no TLS: nobody can say
	} {
		p := &stubborn{}
		g := rw
		g.Identity = c.identity
		_, _, err := n.accept(n.devices[0], rdma.ConnRequest{Private: private(g, 0), Peer: p, TLS: c.peer})
		n.gone(p)
		if (err == nil) != (c.want == "") || err != nil &&
			(!errors.Is(err, admit.ErrIdentity) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("the token of %q: %v, want %q", c.identity, err, c.want)
		}
	}
}

// Regions of different namespaces share neither memory nor an MR nor a PD, and a connection has the PD of its
// namespace.
func TestNamespacesApart(t *testing.T) {
	for _, order := range [][]string{{"tcp", "shm"}, {"sim", "tcp"}} {
		t.Run(strings.Join(order, "+"), func(t *testing.T) {
			dir := newDirectory(t)
			n, _ := open(t, dir, 1<<20, order...)
			pds := map[*rdma.PD]uint32{}
			mrs, mems := map[*rdma.MR]uint32{}, map[*byte]uint32{}
			for pg := uint32(1); pg <= 6; pg++ {
				dir.want(pg, 1+pg%3)
				dir.keys(pg, order[0])
			}
			n.mu.Lock()
			for pg, r := range n.mu.regions {
				mems[&r.mem.Bytes[0]] = pg
				for _, m := range r.mrs {
					mrs[m] = pg
				}
			}
			for _, d := range n.devices {
				for ns, pd := range d.pds {
					pds[pd] = ns
				}
			}
			n.mu.Unlock()
			if len(mems) != 6 || len(mrs) != 6*2*len(order) || len(pds) != 3*len(order) {
				t.Fatalf("%d regions, %d MRs, %d PDs of 6 regions in 3 namespaces", len(mems), len(mrs), len(pds))
			}
			for _, p := range order {
				mine, other := dir.keys(3, p), dir.keys(1, p) // namespaces 1 and 2
				refused(t, p+": READ of another namespace's heap", func() error {
					_, err := mustDial(t, dir, p, rw, 0).read(other.HeapRkey, other.HeapBase, 8)
					return err
				}())
				refused(t, p+": CAS in another namespace's index", mustDial(t, dir, p, rw, 1).cas(other.IndexRkey,
					other.IndexBase+4096, 0, 1))
				if err := mustDial(t, dir, p, rw, 2).write(mine.HeapRkey, mine.HeapBase, "x"); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
