package verbstest

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// tenants are two clients with certificates, each with a namespace of its own on the same memory nodes.
type tenants struct {
	t      *testing.T
	s      *store
	ca     *identitytest.Authority
	stolen tls.Certificate // ann's, and revoked
	// ann owns the namespace that bob is after.
	ann, bob         *guesser
	annConf, bobConf *tls.Config
	annRPC           *dirclient.Client
	rows             [][]string
}

// client gives a client's certificate, its identity, and its way to the directory.
func (x *tenants) client(name string) (conf *tls.Config, identity string, rpc *dirclient.Client) {
	conf = x.ca.Config(x.ca.Role("client", name))
	return conf, "spiffe://" + identitytest.TrustDomain + "/kvd/client/" + name, x.s.caller(conf)
}

// refused notes that a memory node refuses a connection, and says why.
func (x *tenants) refused(what string, err error, want string) {
	x.t.Helper()
	x.rows = append(x.rows, []string{what, "refused: " + want})
	if !errors.Is(err, rdma.ErrRefused) || !strings.Contains(err.Error(), want) {
		x.t.Errorf("%s: %v, want a refusal: %s", what, err, want)
	}
}

// TestTenants has a client, over TLS, try all there is to get at another tenant's memory. Nobody connects but with a
// session's token, and only as the session's owner while the session lives; the adapter refuses the other tenant's
// rkeys; and no byte changes.
func TestTenants(t *testing.T) {
	needs(t, "1")
	x := &tenants{t: t, ca: identitytest.New(t)}
	x.stolen = x.ca.Role("client", "ann")
	x.s = newStoreTLS(t, x.ca, []tls.Certificate{x.stolen}, 2*time.Second, node{"m1", 0, nil}, node{"m2", 1, nil})
	annConf, ann, annRPC := x.client("ann")
	bobConf, bob, bobRPC := x.client("bob")
	x.annConf, x.bobConf, x.annRPC = annConf, bobConf, annRPC
	x.s.namespaceOf(ann, "ours", 2, 16<<20)
	x.s.namespaceOf(bob, "theirs", 2, 8<<20)
	x.ann, x.bob = x.s.guesserAs(annRPC, annConf, "ours", false, true), x.s.guesserAs(bobRPC, bobConf, "theirs", false,
		true)

	ours, witness := x.ann.region("m1"), x.ann.mustConnect("m1")
	bytesOfOurs := func() []byte {
		return bytes.Join(
			[][]byte{witness.read(ours.indexRKey, ours.index, 64), witness.read(ours.indexRKey, ours.index+4096, 64),
				witness.read(ours.heapRKey, ours.heap, 64)}, nil)
	}
	before := bytesOfOurs()
	x.stealBytes(ours) // by connections that are his to make
	x.forgeTokens()
	x.showNoTokens()
	x.showOthersTokens()
	x.replayTokens(ours)
	x.revokeAccess(ours)
	x.rotateKeys()
	if after := bytesOfOurs(); !bytes.Equal(after, before) {
		t.Errorf("the bytes changed from %x to %x", before, after)
	}
	printTable("Two tenants of the same memory nodes, over "+provider+" and TLS", []string{"attempt", "answer"}, x.rows)
}

// stealBytes uses another tenant's rkeys.
func (x *tenants) stealBytes(ours region) {
	for _, c := range []struct {
		what string
		wr   rdma.WR
	}{
		{"READ of another tenant's heap", x.bob.readWR(ours.heapRKey, ours.heap, 64)},
		{"READ of another tenant's index", x.bob.readWR(ours.indexRKey, ours.index, 64)},
		{"WRITE to another tenant's heap", x.bob.writeWR(ours.heapRKey, ours.heap)},
		{"CAS in another tenant's index", x.bob.casWR(ours.indexRKey, ours.index+4096, 0, 1)},
	} {
		q := x.bob.mustConnect("m1")
		got := q.do(c.wr)
		x.rows = append(x.rows, []string{c.what, got})
		if got != remAccessErr {
			x.t.Errorf("%s: %s, want %s", c.what, got, remAccessErr)
		}
		q.broken()
	}
}

// forgeTokens shows tokens that this cluster's directory did not sign.
func (x *tenants) forgeTokens() {
	good := x.ann.token
	for i := range good {
		x.ann.token = bytes.Clone(good)
		x.ann.token[i] ^= 1 << (i % 8)
		if _, err := x.ann.connect("m1"); !errors.Is(err, rdma.ErrRefused) ||
			!strings.Contains(err.Error(), "session token") {
			x.t.Errorf("a token with another byte %d: %v, want a refusal", i, err)
		}
	}
	x.ann.token = good
	x.rows = append(x.rows, []string{fmt.Sprintf("a token with any of its %d bytes altered", len(good)), "refused"})
	elsewhere := newStoreTLS(x.t, x.ca, nil, time.Minute, node{"m9", 2, nil})
	x.refused("a token on the memory node of another cluster", x.stranger(elsewhere, "m9", x.annConf, good),
		"signature")
}

// showOthersTokens shows a good token with other certificates than its owner's.
func (x *tenants) showOthersTokens() {
	x.refused("another client's certificate, with a good token", x.stranger(x.s, "m1", x.bobConf, x.ann.token),
		"the session token is another identity's")
	stranger := identitytest.New(x.t)
	strange := stranger.Config(stranger.Role("client", "ann"))
	strange.RootCAs = x.ca.Pool
	bare := x.ca.Config(tls.Certificate{})
	bare.Certificates = nil
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }
	for _, c := range []struct {
		what string
		conf *tls.Config
		want string
		tls  bool // that refuses
	}{
		{"no TLS", nil, "", true},
		{"no certificate", bare, "certificate required", true},
		{"a certificate that has expired", x.ca.Config(x.ca.Role("client", "ann", expired)), "expired certificate",
			true},
		{"a certificate that was revoked", x.ca.Config(x.stolen), "bad certificate", true},
		{"a certificate of another authority", strange, "unknown certificate authority", true},
		{"a certificate without an identity", x.ca.Config(x.ca.Leaf()), "the certificate has no identity", false},
		{"a directory node's certificate", x.ca.Config(x.ca.Role("directory", "d1")), "has the role directory", false},
	} {
		err := x.stranger(x.s, "m1", c.conf, x.ann.token)
		if what := c.what + ", with a good token"; !c.tls {
			x.refused(what, err, c.want)
		} else if x.rows = append(x.rows, []string{what, strings.TrimSuffix("hung up on: "+c.want, ": ")}); err ==
			nil || !strings.Contains(err.Error(), c.want) {
			x.t.Errorf("%s: %v, want %q", what, err, c.want)
		}
	}
}

// showNoTokens has every role connect without a token.
func (x *tenants) showNoTokens() {
	sessions := dirpb.Rights()[dirpb.Directory_OpenSession_FullMethodName]
	for _, r := range identity.Every.All() {
		want := "session token"
		if !sessions.Has(r) {
			want = "has the role " + r.String()
		}
		x.refused("no token, as "+r.String(), x.stranger(x.s, "m1", x.ca.Config(x.ca.Role(r.String(), "it")),
			make([]byte, len(x.ann.token))), want)
	}
}

// stranger connects to a store's memory node with a certificate, or none if conf is nil, and a token that need not
// belong together.
func (x *tenants) stranger(s *store, name string, conf *tls.Config, token []byte) error {
	x.t.Helper()
	g := &guesser{s: s, dev: openDevice(x.t, provider, 3, conf, nil), token: token, most: 1}
	var err error
	if g.pd, err = g.dev.AllocPD(); err != nil {
		x.t.Fatal(err)
	}
	q, err := g.connect(name)
	if err == nil {
		_ = q.qp.Abort()
	}
	if err := g.pd.Dealloc(); err != nil {
		x.t.Error(err)
	}
	return err
}

// rotateKeys shows a token of a key that has been replaced twice. A token of the key before is good.
func (x *tenants) rotateKeys() {
	for n := range 2 {
		ctx, cancel := context.WithTimeout(x.t.Context(), patience)
		err := x.s.rpc.CallOnce(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.RotateKey(ctx, &dirpb.RotateKeyRequest{Force: true}) // guessers do not take over another token
			return err
		})
		if cancel(); err != nil {
			x.t.Fatal(err)
		}
		testutil.UntilNone(x.t, "memory nodes have the key", func() string {
			return strings.Join(x.s.status().GetKeyUse().GetNodesBehind(), ", ")
		})
		if _, err := x.ann.connect("m1"); n == 0 && err != nil {
			x.t.Errorf("a token of the key before: %v", err)
		} else if n == 1 {
			x.refused("a token of a key that was replaced twice", err, "which was replaced")
		}
	}
}

// replayTokens shows tokens of sessions that have ended.
func (x *tenants) replayTokens(ours region) {
	closed := x.s.guesserAs(x.annRPC, x.annConf, "ours", false, false)
	closed.mustConnect("m1")
	x.s.callAs(x.annRPC, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: closed.id})
		return err
	})
	lapsed := x.s.guesserAs(x.annRPC, x.annConf, "ours", false, false)
	q := lapsed.mustConnect("m1")
	x.fenced(lapsed)
	if got := q.do(lapsed.writeWR(ours.heapRKey, ours.heap)); got == success {
		x.t.Error("a fenced session writes")
	}
	for _, m := range []struct{ name, where string }{{"m1", ""}, {"m2", ", on a memory node to which it had not " +
		"connected"}} {
		_, err := lapsed.connect(m.name)
		x.refused("a token after its session was fenced"+m.where, err, "the session has ended")
		_, err = closed.connect(m.name)
		x.refused("a token after its session was closed"+m.where, err, "the session has ended")
	}
}

// revokeAccess takes a right from a client who is at work with it.
func (x *tenants) revokeAccess(ours region) {
	conf, carl, rpc := x.client("carl")
	x.s.callAs(x.annRPC, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.GrantAccess(ctx, &dirpb.GrantAccessRequest{
			Namespace: "ours", Access: &dirpb.Access{Who: carl, Right: dirpb.Right_RIGHT_WRITE}})
		return err
	})
	g := x.s.guesserAs(rpc, conf, "ours", false, false)
	q := g.mustConnect("m1")
	q.read(ours.heapRKey, ours.heap, 8)
	var revoked *dirpb.RevokeAccessReply
	x.s.callAs(x.annRPC, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		revoked, err = d.RevokeAccess(ctx, &dirpb.RevokeAccessRequest{Namespace: "ours", Who: carl})
		return err
	})
	if revoked.Fencing != 1 {
		x.t.Errorf("%d sessions are fenced, want 1", revoked.Fencing)
	}
	x.fenced(g)
	if got := q.do(g.writeWR(ours.heapRKey, ours.heap)); got == success {
		x.t.Error("a client whose right was revoked writes")
	}
	for _, m := range []struct{ name, where string }{{"m1", ""}, {"m2", ", on a memory node to which it had not " +
		"connected"}} {
		_, err := g.connect(m.name)
		x.refused("a token after its owner's right was revoked"+m.where, err, "the session has ended")
	}
	ctx, cancel := context.WithTimeout(x.t.Context(), patience)
	defer cancel()
	err := rpc.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "ours"})
		return err
	})
	x.rows = append(x.rows, []string{"another session after its right was revoked", status.Code(err).String()})
	if status.Code(err) != codes.PermissionDenied {
		x.t.Errorf("a session of a client whose right was revoked: %v", err)
	}
}

// fenced waits until all memory nodes have confirmed that a session is.
func (x *tenants) fenced(g *guesser) {
	x.t.Helper()
	testutil.UntilNone(x.t, fmt.Sprintf("session %d is fenced", g.id), func() string {
		if l := x.s.life(g.id); l != dirpb.SessionLife_SESSION_FENCED {
			return l.String()
		}
		return ""
	})
}
