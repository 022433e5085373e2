package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
)

// The page shows what a leader knows of memory; another directory node says that it does not
// know, and never 0.
func TestMemoryTable(t *testing.T) {
	st := &dirpb.StatusReply{
		Map: &dirpb.Map{
			Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default"}, {Id: 2, Name: "cache"}},
			Pgs: []*dirpb.PlacementGroup{{Id: 1, NamespaceId: 1}, {Id: 2, NamespaceId: 2},
				{Id: 3, NamespaceId: 1}},
		},
		Usage: []*dirpb.PGUsage{
			{PgId: 1, HeapUnits: 1600, GrantedUnits: 1200, LiveUnits: 800, FreeUnits: 160, ForeignUnits: 16,
				LimboUnits: 32, ComingUnits: 48, LostUnits: 144,
				WaitingUnits: 64, RecalledUnits: 320, Short: true, Estimated: true},
			{PgId: 2, HeapUnits: 160, Estimated: true},
			{PgId: 3, HeapUnits: 1600, GrantedUnits: 16, LiveUnits: 16, Estimated: true},
		},
	}
	want := [][]string{
		{"cache", "all", "10.0 KiB", "0 B", "0.0", "0 B", "0 B", "0 B", "0 B", "0 B", "0 B", "10.0 KiB", "no"},
		{"cache", "2", "10.0 KiB", "0 B", "0.0", "0 B", "0 B", "0 B", "0 B", "0 B", "0 B", "10.0 KiB", "no"},
		{"default", "all", "200.0 KiB", "51.0 KiB", "25.5", "11.0 KiB", "2.0 KiB", "3.0 KiB", "4.0 KiB", "20.0 KiB",
			"9.0 KiB", "120.0 KiB",
			"yes"},
		{"default", "1", "100.0 KiB", "50.0 KiB", "50.0", "11.0 KiB", "2.0 KiB", "3.0 KiB", "4.0 KiB", "20.0 KiB",
			"9.0 KiB", "21.0 KiB", "yes"},
		{"default", "3", "100.0 KiB", "1.0 KiB", "1.0", "0 B", "0 B", "0 B", "0 B", "0 B", "0 B", "99.0 KiB", "no"},
	}
	if got := memoryTable(st); !reflect.DeepEqual(got.Rows, want) || len(got.Header) != len(want[0]) {
		t.Errorf("got  %q\nwant %q", got.Rows, want)
	}
	st.Usage = []*dirpb.PGUsage{{PgId: 1, HeapUnits: 1600, GrantedUnits: 1200, WaitingUnits: 64, RecalledUnits: 320}}
	want = [][]string{
		{"default", "all", "100.0 KiB", "-", "-", "-", "-", "-", "4.0 KiB", "20.0 KiB", "-", "21.0 KiB", "-"},
		{"default", "1", "100.0 KiB", "-", "-", "-", "-", "-", "4.0 KiB", "20.0 KiB", "-", "21.0 KiB", "-"},
	}
	if got := memoryTable(st); !reflect.DeepEqual(got.Rows, want) {
		t.Errorf("got  %q\nwant %q", got.Rows, want)
	}
}

// A namespace that is being deleted says so.
func TestNamespacesTable(t *testing.T) {
	st := &dirpb.StatusReply{
		Map: &dirpb.Map{Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default"}, {Id: 2, Name: "old", Deleting: true}}}}
	var got []string
	for _, r := range namespacesTable(st, nil).Rows {
		got = append(got, r[0])
	}
	if want := []string{"default", "old (being deleted)"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestHTTPRights: beyond loopback, every role shows its pages, metrics and profiles to operators alone, and its health
// to everybody with a certificate.
func TestHTTPRights(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	run := func(role string, args ...string) *process {
		t.Helper()
		return start(t, env,
			append(append([]string{role, "--http-listen=0.0.0.0:0", "--identity-units=sre=operator"}, args...),
				files.flags(role)...)...)
	}
	d := run("directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen=127.0.0.1:0",
		"--bootstrap")
	addr := "--directory=" + d.kv["directory"]
	all := map[string]*process{
		"directory": d,
		"memnode":   run("memnode", "--name=m", addr, "--memory=64MiB", "--shm-socket=off"),
		"janitor":   run("janitor", addr),
	}
	createNamespace(t, d.kv["directory"], "cache", files.load("operator"), files.identity("gateway"))
	all["gateway"] = run("gateway", addr, "--databases=cache", "--listen=127.0.0.1:0", "--listen-memcached=off",
		"--provider=tcp")
	callers := map[string]*tls.Config{"": files.load(""), "a unit": files.Config(files.Leaf(func(c *x509.Certificate) {
		c.Subject = pkix.Name{CommonName: "ann", OrganizationalUnit: []string{"sre"}}
	}))}
	for _, r := range identity.Every.All() {
		callers[r.String()] = files.load(r.String())
	}
	for role, p := range all {
		_, port, err := net.SplitHostPort(p.kv["http"])
		if err != nil {
			t.Fatal(err)
		}
		for as, cfg := range callers {
			c := http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: cfg}}
			defer c.CloseIdleConnections()
			for path, private := range map[string]bool{"/healthz": false, "/readyz": false, "/": true,
				"/state.json": true, "/console.js": true, "/metrics": true, "/debug/pprof/heap": true} {
				r, err := c.Get("https://127.0.0.1:" + port + path)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(r.Body)
				_ = r.Body.Close()
				code, text := http.StatusOK, ""
				switch {
				case !private || as == "operator" || as == "a unit":
				case as == "":
					code, text = http.StatusUnauthorized, "want the URI spiffe://"
				default:
					code, text = http.StatusForbidden, "/kvd/"+as+"/it has the role "+as+", and GET /"
				}
				if err != nil || r.StatusCode != code || !strings.Contains(string(b), text) {
					t.Errorf("%s of a %s, as %q: %d %.200q, want %d and %q; %v", path, role, as, r.StatusCode, b, code,
						text, err)
				}
			}
		}
		// Nobody without a certificate has any of it.
		bare := http.Client{
			Timeout: patience, Transport: &http.Transport{
				TLSClientConfig: &tls.Config{RootCAs: files.Pool, MinVersion: tls.VersionTLS13}}}
		defer bare.CloseIdleConnections()
		if r, err := bare.Get("https://127.0.0.1:" + port + "/healthz"); err == nil {
			_ = r.Body.Close()
			t.Errorf("a %s tells %d to a caller without a certificate", role, r.StatusCode)
		}
	}
}

// TestRefusalsInLog: a peer that is refused again and again makes few lines, on every port.
func TestRefusalsInLog(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	raft := freeAddr(t)
	began := time.Now()
	p := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen=" +
			raft, "--bootstrap",
			"--http-listen=0.0.0.0:0"}, files.flags("directory")...)...)
	start(t, env, append([]string{"memnode", "--name=m", "--directory=" + p.kv["directory"], "--memory=64MiB",
		"--shm-socket=off"}, files.flags("memnode")...)...)
	// waits for the memory node
	createNamespace(t, p.kv["directory"], "default", files.load("operator"), "spiffe://test.example/kvd/client/mine")
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	calls := func(name string) dirpb.DirectoryClient {
		t.Helper()
		c, err := grpc.NewClient("passthrough:///"+p.kv["directory"],
			grpc.WithTransportCredentials(credentials.NewTLS(files.Config(files.Role("client", name)))))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return dirpb.NewDirectoryClient(c)
	}
	mine, eves := calls("mine"), calls("eve")
	s, err := mine.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: "default", Client: "a test"})
	if err != nil {
		t.Fatal(err)
	}
	const times = 300
	for range times {
		if _, err := eves.DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m"}); status.Code(err) !=
			codes.PermissionDenied {
			t.Fatalf("a client drains: %v", err)
		}
		if _, err := eves.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: s.GetSessionId()}); status.Code(
			err) != codes.PermissionDenied {
			t.Fatalf("a client closes a session of another: %v", err)
		}
	}
	eve := files.Config(files.Role("client", "eve"))
	for range times / 3 {
		c, err := tls.Dial("tcp", raft, eve)
		if err != nil {
			t.Fatal(err)
		}
		// With TLS 1.3 the refusal comes after the client's handshake.
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Fatal("the Raft port serves a client")
		}
		_ = c.Close()
	}
	_, port, err := net.SplitHostPort(p.kv["http"])
	if err != nil {
		t.Fatal(err)
	}
	web := http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: eve}}
	defer web.CloseIdleConnections()
	for range times {
		r, err := web.Get("https://127.0.0.1:" + port + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, r.Body) // so that the connection is used again
		_ = r.Body.Close()
		if r.StatusCode != http.StatusForbidden {
			t.Fatalf("metrics for a client: %d", r.StatusCode)
		}
	}
	for _, line := range []string{`msg="a call was refused"`,
		`msg="directory: a connection to the Raft port was refused"`, `msg="a request was refused"`} {
		p.says(line, 1)
		// Ten at once, and one a second after that; see config's limitedLog.
		if n, most := strings.Count(p.stderr.String(), line), 11+int(time.Since(began)/time.Second); n > most {
			t.Errorf("%d lines %s, want at most %d", n, line, most)
		}
	}
}
