package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// secured is a store of real processes with certificates, of two tenants.
type secured struct {
	t                  *testing.T
	callers            []caller
	conns              map[string]*grpc.ClientConn // to the directory, by the caller's name
	directory, raft    string                      // addresses
	memnode, gateway   map[string]string           // of ready lines
	http               map[string]string           // addresses, by role
	loopback           string                      // the same of a janitor, on loopback
	unix, shm, control string                      // sockets
	node               *dirpb.Node
	// victim is a client of the first namespace, and own is the client's among the callers, of the second one.
	victim, own session
}

// theirs is the namespace that the victim uses, and all callers but the client; mine is the client's.
const theirs, mine = "theirs", "mine"

// cold is the namespace that names the tier node among the callers.
const cold = "cold"

type session struct {
	directory dirpb.DirectoryClient
	conf      *tls.Config // of its identity
	id        uint32
	token     []byte
}

func (s *secured) ctx() context.Context {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	s.t.Cleanup(cancel)
	return ctx
}

// session opens one for a caller.
func (s *secured) session(c caller, namespace string) session {
	s.t.Helper()
	x := session{directory: dirpb.NewDirectoryClient(s.conns[c.name]), conf: c.conf}
	// Memory nodes, tier nodes and janitors have others' work alone.
	r, err := x.directory.OpenSession(s.ctx(), &dirpb.OpenSessionRequest{Namespace: namespace, Client: c.name,
		Background: identity.RolesOf(identity.MemNode, identity.Tier, identity.Janitor).Has(c.role), KnowsStubs: true})
	if err != nil {
		s.t.Fatalf("a session of %s: %v", c.name, err)
	}
	x.id, x.token = r.SessionId, r.Token
	return x
}

func startSecured(t *testing.T) *secured {
	t.Helper()
	env, dir := runtimeDir(t)
	files := newCertificates(t)
	revoked := files.Role("operator", "it")
	list := files.Revoke(revoked)
	s := &secured{t: t, callers: whoever(t, files.Authority, revoked), conns: make(map[string]*grpc.ClientConn),
		raft: freeAddr(t), unix: filepath.Join(dir, "gateway.sock"), shm: filepath.Join(dir, "memnode.sock"),
		control: filepath.Join(dir, "keeper.sock")}
	kvd := func(role string, args ...string) map[string]string {
		t.Helper()
		// All addresses, so that HTTP is not as on loopback.
		return start(t, env,
			append(append([]string{role, "--http-listen=0.0.0.0:0", "--tls-crl=" + list}, files.flags(role)...),
				args...)...).kv
	}
	d := kvd("directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen="+s.raft,
		"--bootstrap", "--lease=1m", "--scrub-interval=0")
	s.directory = d["directory"]
	s.memnode = kvd("memnode", "--name=m", "--directory="+s.directory, "--memory=64MiB", "--janitor=false",
		"--shm-socket="+s.shm, "--control-socket="+s.control, "--health-listen=127.0.0.1:0")
	victim := caller{name: "victim", conf: files.Config(files.Role("client", "victim"))}
	for _, c := range append(slices.Clone(s.callers), victim) {
		creds := insecure.NewCredentials()
		if c.conf != nil {
			creds = credentials.NewTLS(c.conf)
		}
		conn, err := grpc.NewClient("passthrough:///"+s.directory, grpc.WithTransportCredentials(creds))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		s.conns[c.name] = conn
	}
	s.tenants()
	s.gateway = kvd("gateway", "--directory="+s.directory, "--databases="+theirs, "--listen=127.0.0.1:0",
		"--listen-memcached=127.0.0.1:0", "--listen-unix="+s.unix, "--listen-tls=127.0.0.1:0")
	s.http = map[string]string{"directory": d["http"], "memnode": s.memnode["http"], "gateway": s.gateway["http"],
		"janitor": kvd("janitor", "--directory="+s.directory)["http"]}
	s.loopback = kvd("janitor", "--directory="+s.directory, "--http-listen=127.0.0.1:0")["http"]
	for role, addr := range s.http {
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			t.Fatal(err)
		}
		s.http[role] = net.JoinHostPort("127.0.0.1", port)
	}

	s.victim = s.session(victim, theirs)
	for i, c := range s.callers {
		switch {
		case c.role == identity.Client:
			s.own = s.session(c, mine)
			s.callers[i].token = s.own.token
		case c.role == identity.Tier:
			s.callers[i].token = s.session(c, cold).token
		case sessions.Has(c.role):
			s.callers[i].token = s.session(c, theirs).token
		default:
			s.callers[i].token = s.victim.token
		}
	}
	s.node = s.status().GetMap().GetNodes()[0]
	return s
}

// tenants makes the two namespaces, and gives everybody the right to his own.
func (s *secured) tenants() {
	s.t.Helper()
	operator := dirpb.NewDirectoryClient(s.conns["operator"])
	for namespace, owner := range map[string]string{theirs: "client/victim", mine: "client/it"} {
		_, err := operator.CreateNamespace(s.ctx(), &dirpb.CreateNamespaceRequest{Name: namespace, Replicas: 1,
			BytesPerNode: 24 << 20, Owner: identified(owner)})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	s.register()
	_, err := operator.CreateNamespace(s.ctx(), &dirpb.CreateNamespaceRequest{Name: cold, Replicas: 1,
		BytesPerNode: 12 << 20, Tier: &dirpb.Tier{Nodes: []string{volume().Name}, Copies: 1, Bytes: 1 << 30}})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, who := range []string{"gateway/it", "archive/it"} {
		_, err := operator.GrantAccess(s.ctx(), &dirpb.GrantAccessRequest{
			Namespace: theirs, Access: &dirpb.Access{Who: identified(who), Right: dirpb.Right_RIGHT_WRITE}})
		if err != nil {
			s.t.Fatal(err)
		}
	}
}

// volume is that of the tier node among the callers.
func volume() *dirpb.Volume {
	return &dirpb.Volume{Name: "t", Folder: 7, Boot: 1, Process: 1, CapacityBytes: 1 << 30,
		Endpoints: []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}}
}

// register has the tier node among the callers register its volume, once the directory knows such.
func (s *secured) register() {
	s.t.Helper()
	testutil.Until(s.t, "a volume", func() bool {
		_, err := dirpb.NewDirectoryClient(s.conns["tier"]).KeepVolume(s.ctx(),
			&dirpb.KeepVolumeRequest{Volume: volume()})
		if err != nil && status.Code(err) != codes.FailedPrecondition {
			s.t.Fatal(err)
		}
		return err == nil
	})
}

// identified is the identity of ROLE/NAME.
func identified(who string) string { return "spiffe://" + identitytest.TrustDomain + "/kvd/" + who }

// status is what an operator sees of the cluster.
func (s *secured) status() *dirpb.StatusReply {
	s.t.Helper()
	r, err := dirpb.NewDirectoryClient(s.conns["operator"]).Status(s.ctx(), &dirpb.StatusRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// trail is the audit trail.
func (s *secured) trail() *dirpb.AuditReply {
	s.t.Helper()
	r, err := dirpb.NewDirectoryClient(s.conns["operator"]).Audit(s.ctx(), &dirpb.AuditRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// state is the part of the status that stays as it is while nobody changes anything.
func (s *secured) state() *dirpb.StatusReply {
	s.t.Helper()
	r := s.status()
	r.NodeStats, r.Usage, r.Epoch, r.MinEpoch, r.RaftApplied = nil, nil, 0, 0, 0
	if r.Position != nil {
		r.Position.Index = 0 // as RaftApplied
	}
	// who has the operator's new key by now is no change of anybody's
	r.KeyUse = &dirpb.KeyUse{Generation: r.KeyUse.GetGeneration()}
	for _, v := range r.Map.Volumes {
		v.SilentMillis = 0
	}
	for _, x := range r.Sessions {
		x.AgeMillis, x.ReportEpoch = 0, 0
	}
	return r
}

// invoke calls any RPC, of which it takes the first answer.
func (s *secured) invoke(name, method string, streams bool, q proto.Message) error {
	if q == nil {
		q = &emptypb.Empty{}
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if !streams {
		return s.conns[name].Invoke(ctx, method, q, &emptypb.Empty{})
	}
	stream, err := s.conns[name].NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := errors.Join(stream.SendMsg(q), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return stream.RecvMsg(&emptypb.Empty{}) // has the status
}

// wire is a connection to a memory node.
type wire struct {
	t  *testing.T
	qp *rdma.QP
	cq *rdma.CQ
	mr *rdma.MR
	// close ends it.
	close func()
}

// connect connects to a memory node with a token, as the first lane of its session.
func connect(t *testing.T, provider, addr string, conf *tls.Config, tok []byte) (*wire, error) {
	t.Helper()
	var undo []func() error
	w := &wire{t: t, close: func() {
		for _, f := range slices.Backward(undo) {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	}}
	must := func(err error, f func() error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		undo = append(undo, f)
	}
	d, err := providers.Open(provider, providers.Options{TLSClient: conf})
	must(err, d.Close)
	pd, err := d.AllocPD()
	must(err, pd.Dealloc)
	mem, err := d.Alloc(4096, rdma.AllocOptions{Name: "test"})
	must(err, mem.Free)
	w.mr, err = pd.RegMR(mem, 0, 4096, rdma.AccessLocal)
	must(err, w.mr.Deregister)
	w.cq, err = d.CreateCQ(16)
	must(err, w.cq.Close)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if w.qp, err = d.Dial(ctx, pd, w.cq, addr, binary.LittleEndian.AppendUint32(slices.Clone(tok), 0)); err != nil {
		w.close()
		return nil, err
	}
	undo = append(undo, w.qp.Close)
	return w, nil
}

func dialProvider(t *testing.T, provider, addr string, conf *tls.Config, tok []byte) error {
	t.Helper()
	w, err := connect(t, provider, addr, conf, tok)
	if err == nil {
		w.close()
	}
	return err
}

// do posts one verb on the first n bytes of the wire's memory, and waits for its end.
func (w *wire) do(op rdma.Opcode, rkey, addr uint64, n int) driver.Status {
	w.t.Helper()
	r := rdma.WR{ID: 1, Op: op, Local: w.mr.Bytes()[:n], LKey: w.mr.LKey(), RemoteAddr: addr, RKey: rkey,
		Flags: rdma.Signaled, Swap: 1}
	if _, err := w.qp.PostSend([]rdma.WR{r}); err != nil {
		w.t.Fatal(err)
	}
	limit := time.After(patience)
	for {
		var wcs [1]rdma.WC
		if w.cq.Poll(wcs[:]) == 1 {
			return wcs[0].Status
		}
		select {
		case <-w.cq.Ready():
		case <-limit:
			w.t.Fatal("a verb does not end")
		}
	}
}

// mapOf waits for a map as a session sees it.
func (s *secured) mapOf(x session, like func(*dirpb.Map) bool) *dirpb.Map {
	s.t.Helper()
	w, err := x.directory.WatchMap(s.ctx(), &dirpb.WatchMapRequest{SessionId: x.id})
	for err == nil {
		var m *dirpb.Map
		if m, err = w.Recv(); err == nil && m.Renew == nil && like(m) {
			return m
		}
	}
	s.t.Fatalf("session %d waits for a map: %v", x.id, err)
	return nil
}

// keys waits for the rkeys of a session's namespace.
func (s *secured) keys(x session, provider string) (k *dirpb.RegionKeys) {
	s.t.Helper()
	s.mapOf(x, func(m *dirpb.Map) bool {
		all := m.GetPgs()[0].GetMembers()[0].GetKeys()
		i := slices.IndexFunc(all, func(k *dirpb.RegionKeys) bool { return k.Provider == provider })
		if i >= 0 {
			k = all[i]
		}
		return k != nil
	})
	return k
}

// read gives bytes of the victim's index and heap.
func (s *secured) read(t *testing.T, provider, addr string, k *dirpb.RegionKeys) (b []byte) {
	t.Helper()
	w, err := connect(t, provider, addr, s.victim.conf, s.victim.token)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	for _, at := range [][2]uint64{{k.IndexRkey, k.IndexBase}, {k.IndexRkey, k.IndexBase + 4096},
		{k.HeapRkey, k.HeapBase}} {
		if st := w.do(rdma.OpRead, at[0], at[1], 64); st != driver.Success {
			t.Fatalf("READ by the victim: %v", st)
		}
		b = append(b, w.mr.Bytes()[:64]...)
	}
	return b
}

func (s *secured) unchanged(t *testing.T, before *dirpb.StatusReply) {
	t.Helper()
	if after := s.state(); !proto.Equal(before, after) {
		t.Errorf("the state was\n%s\nand is\n%s", prototext.Format(before), prototext.Format(after))
	}
}
