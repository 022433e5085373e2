package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/driver"
)

// caller is somebody who calls.
type caller struct {
	name  string
	conf  *tls.Config   // nil: he speaks in clear
	role  identity.Role // 0: none
	alert string        // TLS's reason to refuse him, of callers that no listener with TLS hears
	token []byte        // of a session of his own, or of somebody else's if he can have none
}

// heard reports whether TLS lets a caller in.
func (c caller) heard() bool { return c.conf != nil && c.alert == "" }

// whoever is everybody who may call: those with a role, as the first ones, and others.
func whoever(t *testing.T, a *identitytest.Authority, revoked tls.Certificate) (all []caller) {
	for _, r := range identity.Every.All() {
		all = append(all, caller{name: r.String(), conf: a.Config(a.Role(r.String(), "it")), role: r})
	}
	other := identitytest.New(t)
	stranger := other.Config(other.Role("operator", "it"))
	stranger.RootCAs = a.Pool // he knows whom he calls
	nobody := a.Config(tls.Certificate{})
	nobody.Certificates = nil
	expired := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }
	return append(all,
		caller{name: "no identity", conf: a.Config(a.Leaf())},
		caller{name: "no certificate", conf: nobody, alert: "certificate required"},
		caller{name: "expired", conf: a.Config(a.Role("operator", "it", expired)), alert: "expired certificate"},
		caller{name: "revoked", conf: a.Config(revoked), alert: "bad certificate"},
		caller{name: "other authority", conf: stranger, alert: "unknown certificate authority"},
		caller{name: "in clear"},
	)
}

// silence is how a listener ends a connection on which nothing is said. TLS 1.3 tells a caller of his refusal there.
func silence(addr string, conf *tls.Config, protocols ...string) error {
	conf = conf.Clone()
	conf.NextProtos = protocols
	conn, err := (&tls.Dialer{NetDialer: &net.Dialer{Timeout: patience}, Config: conf}).Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	_, err = conn.Read(make([]byte, 1))
	return err
}

// errNoTLS is how listeners with TLS refuse those who speak in clear: they hang up, and say an alert at most.
var errNoTLS = errors.New("hung up on in clear")

// speakClear greets a listener in clear, and gives its whole answer.
func speakClear(network, addr, greeting string) (answer string, err error) {
	conn, err := net.DialTimeout(network, addr, patience)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, greeting); err != nil {
		return "", err
	}
	b, err := io.ReadAll(conn)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return string(b), err
	}
	const alert = 0x15 // of TLS's record types
	if len(b) == 0 || b[0] == alert || bytes.Contains(b, []byte("Client sent an HTTP request to an HTTPS server")) {
		return "", errNoTLS
	}
	return string(b), nil
}

// listener is a row of the table in docs/tls.md, at one process.
type listener struct {
	row  string
	what string // process, or path; for people
	// ask uses the listener as a caller does whom TLS let in; nil: it served him.
	ask func(caller) error
	// Of listeners with TLS: where, how TLS is told of what follows, and what is said there in clear.
	addr, protocol, greeting string
	// words of its refusal of a caller whom TLS let in; empty: those of package identity.
	words string
	// token: it is asked without one, which is the reason for all who come that far.
	token bool
}

// try tells how a listener treats a caller; nil: it served him.
func (l listener) try(c caller) error {
	switch {
	case l.addr == "" || c.heard():
		return l.ask(c)
	case c.conf == nil:
		answer, err := speakClear("tcp", l.addr, l.greeting)
		if err == nil {
			err = fmt.Errorf("in clear it says %q", answer) // which is no refusal either
		}
		return err
	case l.protocol != "":
		return silence(l.addr, c.conf, l.protocol)
	}
	return silence(l.addr, c.conf)
}

// refusal is what a listener's refusal of a caller has to say, and why it is one, for people.
func (l listener) refusal(c caller) (words, why string) {
	switch {
	case l.addr != "" && c.conf == nil:
		return errNoTLS.Error(), "TLS"
	case l.addr != "" && c.alert != "":
		return c.alert, "TLS"
	case l.token && (l.addr == "" || sessions.Has(c.role)):
		return token.ErrInvalid.Error(), "token"
	case l.words != "":
		words = l.words
	case c.role == 0:
		words = "the certificate has no identity"
	default:
		words = "has the role " + c.role.String() + ", and "
	}
	if c.role == 0 {
		return words, "identity"
	}
	return words, "role"
}

// sessions is which roles may open sessions.
var sessions = dirpb.Rights()[dirpb.Directory_OpenSession_FullMethodName]

// served gives which callers the table of the manual lets in, by its rows.
func served(t *testing.T) map[string]func(caller) bool {
	t.Helper()
	_, table, ok := strings.Cut(string(mustRead(t, "../../docs/tls.md")),
		"| listener of a store with TLS | serves |\n|---|---|\n")
	if !ok {
		t.Fatal("docs/tls.md has no table of listeners")
	}
	table, _, _ = strings.Cut(table, "\n\n")
	rows := make(map[string]func(caller) bool)
	for line := range strings.SplitSeq(table, "\n") {
		row, whom, ok := strings.Cut(strings.Trim(line, "| "), " | ")
		if !ok {
			t.Fatalf("a row has no two cells: %s", line)
		}
		switch whom {
		case "nobody":
			rows[row] = func(caller) bool { return false }
		case "anybody":
			rows[row] = func(caller) bool { return true }
		case "any certificate":
			rows[row] = caller.heard
		default:
			var roles identity.Roles
			for name := range strings.SplitSeq(whom, ", ") {
				r, err := identity.ParseRole(name)
				if err != nil {
					t.Fatalf("%s: %v", line, err)
				}
				roles |= identity.RolesOf(r)
			}
			rows[row] = func(c caller) bool { return roles.Has(c.role) }
		}
	}
	return rows
}

// matrix is what was found: a line for each RPC and listener, a column for each caller.
type matrix map[string][]string

func (m matrix) print(t *testing.T, all []caller) {
	t.Helper()
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "\t")
	cells := 0
	for _, c := range all {
		fmt.Fprint(w, c.name, "\t")
	}
	for _, line := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprint(w, "\n", line, "\t", strings.Join(m[line], "\t"), "\t")
		cells += len(m[line])
	}
	_ = w.Flush()
	t.Logf("%d cells; yes: it is served, else why it is not\n%s", cells, &b)
}

// harm gives a request for each RPC that would harm the store, or tell of others' affairs, if its caller were
// let do it.
func (s *secured) harm() map[string]proto.Message {
	me := &dirpb.Access{Who: identified("client/it"), Right: dirpb.Right_RIGHT_ADMIN}
	return map[string]proto.Message{
		dirpb.Directory_OpenSession_FullMethodName:  &dirpb.OpenSessionRequest{Namespace: theirs},
		dirpb.Directory_Renew_FullMethodName:        &dirpb.RenewRequest{SessionId: s.victim.id, Number: 1 << 60},
		dirpb.Directory_CloseSession_FullMethodName: &dirpb.CloseSessionRequest{SessionId: s.victim.id},
		dirpb.Directory_WatchMap_FullMethodName:     &dirpb.WatchMapRequest{SessionId: s.victim.id},
		dirpb.Directory_GrantExtent_FullMethodName: &dirpb.GrantExtentRequest{SessionId: s.victim.id, PgId: 1,
			WantUnits: 1, PlaceUnits: 1},
		dirpb.Directory_GrantStatus_FullMethodName:  &dirpb.GrantStatusRequest{SessionId: s.victim.id, PgId: 1},
		dirpb.Directory_SessionState_FullMethodName: &dirpb.SessionStateRequest{SessionId: s.victim.id},
		dirpb.Directory_RequestSplit_FullMethodName: &dirpb.RequestSplitRequest{SessionId: s.victim.id, ShardId: 1},
		dirpb.Directory_Meet_FullMethodName: &dirpb.MeetRequest{SessionIds: []uint32{s.victim.id},
			Id: []byte("0123456789abcdef"), Addr: "127.0.0.1:9"},
		dirpb.Directory_Pages_FullMethodName: &dirpb.PagesRequest{Id: []byte("0123456789abcdef"),
			Role: "memnode", Name: "m", Addr: "127.0.0.1:9"},

		dirpb.Directory_RegisterNode_FullMethodName: &dirpb.RegisterNodeRequest{Name: "m", Incarnation: 1,
			CapacityBytes: 64 << 20,
			Endpoints:     []*dirpb.Endpoint{{Provider: "tcp", Addr: "127.0.0.1:9"}}},
		dirpb.Directory_Heartbeat_FullMethodName: &dirpb.HeartbeatRequest{
			NodeId: s.node.Id, Incarnation: s.node.Incarnation, FencedSessions: []uint32{s.victim.id}},
		dirpb.Directory_PublishRegion_FullMethodName: &dirpb.PublishRegionRequest{
			NodeId: s.node.Id, Incarnation: s.node.Incarnation, PgId: 1},
		dirpb.Directory_LeaveNode_FullMethodName: &dirpb.LeaveNodeRequest{
			NodeId: s.node.Id, Incarnation: s.node.Incarnation},
		dirpb.Directory_ReportNode_FullMethodName: &dirpb.ReportNodeRequest{Name: s.node.Name, Trouble: "none"},

		dirpb.Directory_KeepVolume_FullMethodName: &dirpb.KeepVolumeRequest{Volume: volume(), UsedBytes: 1 << 30},
		dirpb.Directory_GiveUpTier_FullMethodName: &dirpb.GiveUpTierRequest{Name: volume().Name},

		dirpb.Directory_FindWork_FullMethodName: &dirpb.FindWorkRequest{},
		dirpb.Directory_ClaimJob_FullMethodName: &dirpb.ClaimJobRequest{SessionId: s.victim.id},
		dirpb.Directory_ReportJob_FullMethodName: &dirpb.ReportJobRequest{SessionId: s.victim.id, JobId: 1,
			Finished: true},

		dirpb.Directory_StartJob_FullMethodName: &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_SCRUB,
			Namespace: theirs, Repair: true},
		dirpb.Directory_DrainNode_FullMethodName:   &dirpb.DrainNodeRequest{Node: "m"},
		dirpb.Directory_RemoveNode_FullMethodName:  &dirpb.RemoveNodeRequest{Node: "m", Force: true},
		dirpb.Directory_GiveUpNode_FullMethodName:  &dirpb.GiveUpNodeRequest{Node: "m"},
		dirpb.Directory_RestartNode_FullMethodName: &dirpb.RestartNodeRequest{Node: "m"},
		dirpb.Directory_Rebalance_FullMethodName:   &dirpb.RebalanceRequest{Namespace: theirs},
		dirpb.Directory_CreateNamespace_FullMethodName: &dirpb.CreateNamespaceRequest{Name: "mine", Replicas: 1,
			BytesPerNode: 8 << 20},
		dirpb.Directory_SetNamespace_FullMethodName: &dirpb.SetNamespaceRequest{Name: theirs, LimitBytes: 1 << 20,
			Owner: me.Who},
		dirpb.Directory_DeleteNamespace_FullMethodName: &dirpb.DeleteNamespaceRequest{Name: theirs, EndSessions: true},
		dirpb.Directory_AcceptLoss_FullMethodName:      &dirpb.AcceptLossRequest{Name: theirs},
		dirpb.Directory_Status_FullMethodName:          &dirpb.StatusRequest{},
		dirpb.Directory_JoinDirectory_FullMethodName: &dirpb.JoinDirectoryRequest{Id: "e", RaftAddr: "127.0.0.1:9",
			GrpcAddr: "127.0.0.1:9"},
		dirpb.Directory_RemoveDirectory_FullMethodName: &dirpb.RemoveDirectoryRequest{Id: "d"},
		dirpb.Directory_RotateKey_FullMethodName:       &dirpb.RotateKeyRequest{Force: true},
		dirpb.Directory_Audit_FullMethodName:           &dirpb.AuditRequest{},

		dirpb.Directory_WhoAmI_FullMethodName:        &dirpb.WhoAmIRequest{},
		dirpb.Directory_ShowNamespace_FullMethodName: &dirpb.ShowNamespaceRequest{Name: theirs},
		dirpb.Directory_GrantAccess_FullMethodName:   &dirpb.GrantAccessRequest{Namespace: theirs, Access: me},
		dirpb.Directory_RevokeAccess_FullMethodName: &dirpb.RevokeAccessRequest{
			Namespace: theirs, Who: identified("gateway/it")},
		healthpb.Health_Check_FullMethodName: &healthpb.HealthCheckRequest{},
		healthpb.Health_List_FullMethodName:  &healthpb.HealthListRequest{},
		healthpb.Health_Watch_FullMethodName: &healthpb.HealthCheckRequest{},
	}
}

// harmless are requests of RPCs that answer them at once, and change nothing; of those that are not there: empty ones.
var harmless = map[string]proto.Message{
	dirpb.Directory_OpenSession_FullMethodName:     &dirpb.OpenSessionRequest{Namespace: "nowhere"},
	dirpb.Directory_WatchMap_FullMethodName:        &dirpb.WatchMapRequest{SessionId: 1 << 30},
	dirpb.Directory_CreateNamespace_FullMethodName: &dirpb.CreateNamespaceRequest{Name: "of\x00nobody"},
}

// rpcs lists what a directory node serves, and whether it answers by a stream.
func rpcs() map[string]bool {
	all := make(map[string]bool)
	for _, d := range []grpc.ServiceDesc{dirpb.Directory_ServiceDesc, healthpb.Health_ServiceDesc} {
		for _, m := range d.Methods {
			all["/"+d.ServiceName+"/"+m.MethodName] = false
		}
		for _, m := range d.Streams {
			all["/"+d.ServiceName+"/"+m.StreamName] = true
		}
	}
	return all
}

// call makes a caller call an RPC, with a request that does harm unless he has the right, and tells why he is refused;
// empty: he is served.
func (s *secured) call(t *testing.T, c caller, method string, streams bool, harm proto.Message) (why string) {
	t.Helper()
	rights := rights.WithHealth(dirpb.Rights())[method]
	if c.heard() && rights.Has(c.role) {
		err := s.invoke(c.name, method, streams, harmless[method])
		switch status.Code(err) {
		case codes.PermissionDenied, codes.Unauthenticated, codes.Unavailable, codes.DeadlineExceeded:
			t.Errorf("%s of %s, who may: %v", method, c.name, err)
			return "NO"
		}
		return ""
	}
	err := s.invoke(c.name, method, streams, harm)
	code, words, why := codes.PermissionDenied, "has the role "+c.role.String()+", and "+path.Base(method)+" is for "+
		rights.String(), "role"
	switch {
	case !c.heard():
		code, words, why = codes.Unavailable, "", "TLS" // gRPC may lose TLS's reason
	case c.role == 0:
		code, words, why = codes.Unauthenticated, "the certificate has no identity", "identity"
	}
	if status.Code(err) != code || !strings.Contains(status.Convert(err).Message(), words) {
		t.Errorf("%s of %s, who may not: %v, want %v and %q", method, c.name, err, code, words)
	}
	if err == nil {
		return "YES"
	}
	return why
}

// watchAll tells whether a caller may watch the map of all namespaces, which is for those who may ask for the status.
func (s *secured) watchAll(t *testing.T, c caller) (why string) {
	t.Helper()
	const method = dirpb.Directory_WatchMap_FullMethodName
	if !sessions.Has(c.role) { // who may not watch any
		return s.call(t, c, method, true, &dirpb.WatchMapRequest{})
	}
	err := s.invoke(c.name, method, true, &dirpb.WatchMapRequest{})
	if dirpb.Rights()[dirpb.Directory_Status_FullMethodName].Has(c.role) {
		if err != nil {
			t.Errorf("the map of all namespaces to %s: %v", c.name, err)
		}
		return "yes"
	}
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "without a session is for") {
		t.Errorf("the map of all namespaces to %s, who may not have it: %v", c.name, err)
	}
	return "role"
}

// listeners lists every way into the processes, but for the RPCs of the directory.
func (s *secured) listeners() (all []listener) {
	const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	health := func(row, addr string, ask func(caller) error) {
		all = append(all, listener{row: row, addr: addr, protocol: "h2", greeting: preface, ask: ask})
	}
	health("directory: `listen`, health checks", s.directory, func(c caller) error {
		return s.invoke(c.name, healthpb.Health_Check_FullMethodName, false, &healthpb.HealthCheckRequest{})
	})
	health("memory node: `health-listen`", s.memnode["health"], func(c caller) error {
		return askHealth(s.ctx(), s.memnode["health"], c.conf)
	})
	health("gateway: `listen-peers`, what gateways tell each other", s.gateway["peers"], func(c caller) error {
		return askPeers(s.ctx(), s.gateway["peers"], c.conf)
	})
	for what, ask := range operating {
		all = append(all, listener{row: "gateway: `listen-peers`, clients and slow log (`kvctl gateways`)", what: what,
			addr: s.gateway["peers"], protocol: "h2", greeting: preface,
			ask: func(c caller) error { return askGateway(s.ctx(), s.gateway["peers"], c.conf, ask) }})
	}
	all = append(all, listener{row: "directory: `raft-listen`", addr: s.raft,
		greeting: "\xff\xff\xff\xff\xff\xff\xff\xff", words: "bad certificate",
		ask: func(c caller) error { return askRaft(s.raft, c.conf) }})

	hello := "KVDt\x00\x00\x00\x00" // begins a connection of rdma/tcp
	for row, tok := range map[string]func(c caller) []byte{
		"with a session token": func(c caller) []byte { return c.token },
		"without one":          func(c caller) []byte { return make([]byte, len(c.token)) },
	} {
		l := listener{row: "memory node: `listen-tcp`, `listen-verbs`, " + row, addr: s.memnode["tcp"], greeting: hello,
			ask: func(c caller) error { return dialProvider(s.t, "tcp", s.memnode["tcp"], c.conf, tok(c)) }}
		local := listener{row: "memory node: `shm-socket`, " + row,
			ask: func(c caller) error { return dialProvider(s.t, "shm", s.shm, nil, tok(c)) }}
		if row == "without one" {
			l.token, local.token = true, true
		}
		all = append(all, l, local)
	}

	all = append(all, listener{row: "memory node: `control-socket`, to root and the memory node's own user",
		ask: func(caller) error {
			_, err := keeper.Choose(s.ctx(), s.control, "/nowhere/kvd")
			if errors.Is(err, keeper.ErrRefused) && strings.Contains(err.Error(), "no such file") {
				return nil // it was heard; internal/keeper's tests have other users
			}
			return fmt.Errorf("a choice of no program: %w", err)
		}})
	paths := func(row, process, addr string, paths ...string) {
		for _, p := range paths {
			all = append(all, listener{row: row, what: process + p, addr: addr, greeting: "GET " + p +
				" HTTP/1.0\r\n\r\n",
				ask: func(c caller) error { return askHTTP(s.ctx(), "https://"+addr+p, c.conf) }})
		}
	}
	private := []string{"/", "/metrics", "/debug/pprof/", "/debug/pprof/heap"}
	for role, addr := range s.http {
		paths("`http-listen`: `/healthz`, `/readyz`", role, addr, "/healthz", "/readyz")
		paths("`http-listen`: all else", role, addr, private...)
	}
	paths("`http-listen`: `/healthz`, `/readyz`", "janitor on loopback", s.loopback, "/healthz", "/readyz")
	paths("`http-listen`: all else", "janitor on loopback", s.loopback, private...)

	ping := func(network, addr string, encrypted bool) func(caller) error {
		return func(c caller) error {
			conf := c.conf
			if !encrypted {
				conf = nil
			} else if conf != nil {
				conf = conf.Clone()
				conf.ServerName = "127.0.0.1"
			}
			if got := redis(s.t, network, addr, conf, "PING"); got != "+PONG" {
				return fmt.Errorf("PING is answered %q", got)
			}
			return nil
		}
	}
	g := s.gateway
	return append(all,
		listener{row: "gateway: `listen-tls`", addr: g["tls"], greeting: "PING\r\n", ask: ping("tcp", g["tls"], true)},
		listener{row: "gateway: `listen`, `listen-unix`, `listen-memcached`, in clear", what: "listen",
			ask: ping("tcp", g["redis"], false)},
		listener{row: "gateway: `listen`, `listen-unix`, `listen-memcached`, in clear", what: "listen-unix",
			ask: ping("unix", s.unix, false)},
		listener{row: "gateway: `listen`, `listen-unix`, `listen-memcached`, in clear", what: "listen-memcached",
			ask: func(caller) error {
				if got := memcachedSay(s.t, g["memcached"], "version\r\n", 1); !strings.HasPrefix(got, "VERSION ") {
					return fmt.Errorf("version is answered %q", got)
				}
				return nil
			}})
}

// askPeers follows a gateway, as one that the directory does not name; nil: that is the only thing that is wrong.
func askPeers(ctx context.Context, addr string, conf *tls.Config) error {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		return err
	}
	defer conn.Close()
	s, err := peerspb.NewGatewaysClient(conn).Follow(ctx)
	if err == nil {
		err = s.Send(&peerspb.FollowRequest{Id: make([]byte, 16), Number: 1})
	}
	if err == nil || errors.Is(err, io.EOF) { // Recv says why
		_, err = s.Recv()
	}
	if err != nil && strings.Contains(err.Error(), "names no such gateway") {
		return nil
	}
	return err
}

// operating is what operators ask of a gateway.
var operating = map[string]func(context.Context, peerspb.GatewaysClient) error{
	"describe": func(ctx context.Context, g peerspb.GatewaysClient) error {
		_, err := g.Describe(ctx, &peerspb.DescribeRequest{})
		return err
	},
	"clients": func(ctx context.Context, g peerspb.GatewaysClient) error {
		s, err := g.ListClients(ctx, &peerspb.ListClientsRequest{})
		if err == nil {
			_, err = s.Recv()
		}
		if errors.Is(err, io.EOF) { // there are none
			return nil
		}
		return err
	},
	"slow log": func(ctx context.Context, g peerspb.GatewaysClient) error {
		_, err := g.SlowLog(ctx, &peerspb.SlowLogRequest{})
		return err
	},
	"kill": func(ctx context.Context, g peerspb.GatewaysClient) error {
		_, err := g.KillClient(ctx, &peerspb.KillClientRequest{Id: 1 << 60})
		return err
	},
}

func askGateway(ctx context.Context, addr string, conf *tls.Config,
	ask func(context.Context, peerspb.GatewaysClient) error) error {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		return err
	}
	defer conn.Close()
	return ask(ctx, peerspb.NewGatewaysClient(conn))
}

func askHealth(ctx context.Context, addr string, conf *tls.Config) error {
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	return err
}

// askRaft says a byte that raft does not know, so that it hangs up on those whom it hears.
func askRaft(addr string, conf *tls.Config) error {
	conn, err := (&tls.Dialer{NetDialer: &net.Dialer{Timeout: patience}, Config: conf}).Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	_, unsent := conn.Write([]byte{0xff})
	if _, err = conn.Read(make([]byte, 1)); errors.Is(err, io.EOF) && unsent == nil {
		return nil
	}
	return errors.Join(err, unsent)
}

func askHTTP(ctx context.Context, url string, conf *tls.Config) error {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	c := http.Client{Transport: &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}}
	r, err := c.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", r.Status, b)
	}
	return err
}

// ways are the settings by which a role listens.
func ways(settings any) (keys []string) {
	v := reflect.TypeOf(settings).Elem()
	for i := range v.NumField() {
		key := v.Field(i).Tag.Get("mapstructure")
		if regexp.MustCompile(`^([a-z]+-)?listen(-[a-z]+)?$|-socket$`).MatchString(key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// TestMatrix asks everybody at every door: real processes with certificates let in whom the tables of
// docs/tls.md name, and nobody else, each of whom is told why.
func TestMatrix(t *testing.T) {
	s := startSecured(t)
	m := make(matrix)
	t.Run("RPCs", func(t *testing.T) {
		harm, all := s.harm(), rpcs()
		for method := range all {
			if m[method] = make([]string, len(s.callers)); harm[method] == nil {
				t.Fatalf("%s has no harmful request: give it one", method)
			}
		}
		// An operator may do anything. All others are refused what they may not do, so nothing changes.
		ask := func(operator bool) {
			t.Helper()
			for method, streams := range all {
				for i, c := range s.callers {
					if operator == (c.role == identity.Operator) {
						m[method][i] = cmp.Or(s.call(t, c, method, streams, harm[method]), "yes")
					}
				}
			}
		}
		ask(true)
		before := s.state()
		ask(false)
		var cells []string
		for _, c := range s.callers {
			cells = append(cells, s.watchAll(t, c))
		}
		m[dirpb.Directory_WatchMap_FullMethodName+" without a session"] = cells
		s.unchanged(t, before)
	})
	t.Run("listeners", func(t *testing.T) {
		rows, seen := served(t), make(map[string]bool)
		text := strings.Join(slices.Sorted(maps.Keys(rows)), "\n")
		for role, settings := range map[string]any{"directory": &config.Directory{}, "memory node": &config.MemNode{},
			"gateway": &config.Gateway{}, "janitor": &config.Janitor{}} {
			for _, key := range ways(settings) {
				if !regexp.MustCompile("(?m)^(" + role + ": .*)?`" + key + "`").MatchString(text) {
					t.Errorf("the table of listeners lacks %s of a %s", key, role)
				}
			}
		}
		for _, l := range s.listeners() {
			serves := rows[l.row]
			if seen[l.row] = true; serves == nil {
				t.Errorf("the table of listeners lacks %q", l.row)
				continue
			}
			var cells []string
			for _, c := range s.callers {
				words, why := l.refusal(c)
				switch err := l.try(c); {
				case serves(c) && err != nil:
					t.Errorf("%s %s serves %s: %v", l.row, l.what, c.name, err)
					why = "NO"
				case serves(c):
					why = "yes"
				case err == nil:
					t.Errorf("%s %s does not serve %s, and it did", l.row, l.what, c.name)
					why = "YES"
				case !strings.Contains(err.Error(), words):
					t.Errorf("%s %s to %s: %v, want %q", l.row, l.what, c.name, err, words)
				}
				cells = append(cells, why)
			}
			m[strings.TrimSpace(l.row+" "+l.what)] = cells
		}
		for row := range rows {
			if !seen[row] {
				t.Errorf("docs/tls.md has %q, and nobody tries it", row)
			}
		}
	})
	m.print(t, s.callers)
	t.Run("client", s.clientTries)
}

// public are RPCs that tell everybody of himself, or of a session whether it lives.
var public = []string{dirpb.Directory_SessionState_FullMethodName, dirpb.Directory_WhoAmI_FullMethodName}

// clientTries has a client, who has a namespace of his own, try all there is to change the cluster, to learn the key by
// which tokens are signed, and to reach another tenant's bytes, of which he knows the rkeys.
func (s *secured) clientTries(t *testing.T) {
	before, trail, harm := s.state(), s.trail(), s.harm()
	for method, streams := range rpcs() {
		if !strings.HasPrefix(method, "/"+dirpb.Directory_ServiceDesc.ServiceName+"/") ||
			slices.Contains(public, method) {
			continue
		}
		if err := s.invoke("client", method, streams, harm[method]); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%s of a client: %v, want a refusal for want of a right", method, err)
		}
	}
	if err := s.invoke("client", dirpb.Directory_OpenSession_FullMethodName, false,
		&dirpb.OpenSessionRequest{}); status.Code(err) != codes.NotFound {
		t.Errorf("a session of a client in the default namespace, which nobody has made: %v", err)
	}
	for _, w := range s.mapOf(s.own, func(*dirpb.Map) bool { return true }).Namespaces {
		if w.Name != mine {
			t.Errorf("a client sees %v", w)
		}
	}
	for provider, addr := range map[string]string{"tcp": s.memnode["tcp"], "shm": s.shm} {
		k := s.keys(s.victim, provider)
		bytes := s.read(t, provider, addr, k)
		for _, try := range []struct {
			what       string
			op         rdma.Opcode
			rkey, addr uint64
			n          int
		}{
			{"READ of another tenant's heap", rdma.OpRead, k.HeapRkey, k.HeapBase, 64},
			{"READ of another tenant's index", rdma.OpRead, k.IndexRkey, k.IndexBase, 64},
			{"WRITE to another tenant's heap", rdma.OpWrite, k.HeapRkey, k.HeapBase, 64},
			{"CAS in another tenant's index", rdma.OpCmpAndSwp, k.IndexRkey, k.IndexBase + 4096, 8},
		} {
			w, err := connect(t, provider, addr, s.own.conf, s.own.token)
			if err != nil {
				t.Fatal(err)
			}
			if st := w.do(try.op, try.rkey, try.addr, try.n); st != driver.RemAccessErr {
				t.Errorf("%s over %s: %v, want %v", try.what, provider, st, driver.RemAccessErr)
			}
			w.close()
		}
		if after := s.read(t, provider, addr, k); !slices.Equal(after, bytes) {
			t.Errorf("over %s another tenant's bytes were %x and are %x", provider, bytes, after)
		}
	}
	s.unchanged(t, before)
	if after := s.trail(); !proto.Equal(trail, after) {
		t.Errorf("the audit trail was\n%s\nand is\n%s", prototext.Format(trail), prototext.Format(after))
	}
}
