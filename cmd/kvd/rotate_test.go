package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/authority"
	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
)

// cluster is processes with certificates of their own, and an authority that may be replaced.
type cluster struct {
	t   *testing.T
	dir string
	ca  *authority.Authority
	run map[string]*process
	// again starts a process once more, with the files that it has by then.
	again map[string]func()
}

func newAuthority(t *testing.T) *authority.Authority {
	t.Helper()
	ca, err := authority.New("test", time.Now(), time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

func (c *cluster) files(name string) certs.Files {
	return certs.Files{CA: filepath.Join(c.dir, name+"-ca.pem"), Cert: filepath.Join(c.dir, name+".pem"),
		Key: filepath.Join(c.dir, name+"-key.pem")}
}

// trust has a process accept what these authorities signed, once it looks.
func (c *cluster) trust(name string, all ...*authority.Authority) {
	c.t.Helper()
	var text []byte
	for _, ca := range all {
		text = append(text, ca.CertPEM()...)
	}
	if err := os.WriteFile(c.files(name).CA, text, 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// issue gives a process another certificate. The two files are written one after the other.
func (c *cluster) issue(name, role string) {
	c.t.Helper()
	q := authority.Request{Name: name, Role: role, Valid: time.Minute * 50}
	if role != "client" {
		q.IPs = []net.IP{net.IPv4(127, 0, 0, 1)}
	}
	_, cert, key, err := c.ca.Issue(time.Now(), q)
	if err == nil {
		err = errors.Join(os.WriteFile(c.files(name).Cert, cert, 0o600), os.WriteFile(c.files(name).Key, key, 0o600))
	}
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) start(env []string, name, role string, args ...string) *process {
	c.t.Helper()
	c.trust(name, c.ca)
	c.issue(name, role)
	f := c.files(name)
	c.again[name] = func() {
		c.t.Helper()
		c.run[name] = start(c.t, env,
			append([]string{role, "--tls-ca=" + f.CA, "--tls-cert=" + f.Cert, "--tls-key=" + f.Key}, args...)...)
	}
	c.again[name]()
	return c.run[name]
}

// freeAddr gives an address at which nobody listens.
func freeAddr(t *testing.T) string {
	t.Helper()
	addr, err := loopback.FreeAt("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// load counts what a worker did and keeps what failed.
type load struct {
	name    string
	anew    bool // each time by a connection of its own
	done    atomic.Int64
	slowest atomic.Int64 // nanoseconds of what was done; one goroutine writes it
	mu      sync.Mutex
	failed  []string
}

func (l *load) count(took time.Duration, err error) {
	if err == nil {
		l.slowest.Store(max(l.slowest.Load(), int64(took)))
		l.done.Add(1)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, err.Error())
}

// line is a connection to a gateway's listen-tls.
type line struct {
	c net.Conn
	r *bufio.Reader
}

func dialLine(addr string, conf *tls.Config) (*line, error) {
	conf, err := certs.ForHost(conf, "127.0.0.1")
	if err != nil {
		return nil, err
	}
	c, err := (&tls.Dialer{NetDialer: &net.Dialer{Timeout: patience}, Config: conf}).Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &line{c, bufio.NewReader(c)}, nil
}

func (l *line) incr() error {
	if err := l.c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := io.WriteString(l.c, "INCR n\r\n"); err != nil {
		return err
	}
	s, err := l.r.ReadString('\n')
	if err == nil && !strings.HasPrefix(s, ":") {
		err = fmt.Errorf("answered %q", s)
	}
	return err
}

// refuses reports whether the listener at addr does not talk to a client of conf.
func refuses(t *testing.T, addr string, conf *tls.Config) bool {
	t.Helper()
	conn, err := (&tls.Dialer{NetDialer: &net.Dialer{Timeout: patience}, Config: conf}).Dial("tcp", addr)
	if err != nil {
		return true
	}
	defer conn.Close()
	// A listener that has accepted the certificate waits for more, or says its own first.
	if err := conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	_, err = conn.Read(make([]byte, 1))
	return err != nil && strings.Contains(err.Error(), "unknown certificate authority")
}

// rotation is a store under load whose certificates change.
type rotation struct {
	cluster
	roles  map[string]string // by name of the process; client is this one
	source *certs.Source     // of client
	at     []string          // the directory's addresses
	raft   string            // address of d1's Raft port
	loads  []*load
	stop   chan struct{}
	wg     sync.WaitGroup
	end    func() // of the work; returns when it has ended
}

// startRotation starts d1, d2, … and m1, m2, …, and a gateway.
func startRotation(t *testing.T, directories, memnodes int) *rotation {
	t.Helper()
	env, dir := runtimeDir(t)
	r := &rotation{cluster: cluster{t: t, dir: dir, ca: newAuthority(t), run: make(map[string]*process),
		again: make(map[string]func())}, raft: freeAddr(t), stop: make(chan struct{}),
		roles: map[string]string{"g": "gateway", "client": "client", "operator": "operator"}}
	for i := range directories {
		name, listen, raft, first := fmt.Sprint("d", i+1), freeAddr(t), r.raft, "--bootstrap"
		if i > 0 {
			raft, first = freeAddr(t), "--join="+r.at[0]
		}
		r.roles[name] = "directory"
		r.start(env, name, "directory", "--id="+name, "--data-dir="+t.TempDir(), "--listen="+listen, "--raft-listen="+
			raft, first, "--lease=5s", "--election-timeout=1s")
		r.at = append(r.at, listen)
	}
	for i := range memnodes {
		name := fmt.Sprint("m", i+1)
		r.roles[name] = "memnode"
		r.start(env, name, "memnode", "--name="+name, "--directory="+strings.Join(r.at, ","), "--memory=64MiB",
			"--shm-socket=off", "--health-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")
	}
	for _, name := range []string{"client", "operator"} {
		r.trust(name, r.ca)
		r.issue(name, r.roles[name])
	}
	r.end = sync.OnceFunc(func() { close(r.stop); r.wg.Wait() })
	var err error
	if r.source, err = certs.Open(certs.Options{Files: r.files("client")}); err != nil {
		t.Fatal(err)
	}
	createNamespace(t, r.at[0], "cache", r.operator(), "spiffe://test/kvd/gateway/g")
	createNamespace(t, r.at[0], "default", r.operator(), "spiffe://test/kvd/client/client")
	// At level debug no line is left out, and each change makes two: of calls, and of listen-tls.
	r.start(env, "g", "gateway", "--directory="+strings.Join(r.at, ","), "--listen=off", "--listen-memcached=off",
		"--listen-tls=127.0.0.1:0", "--log-level=debug")
	return r
}

// operator is what kvctl would show that starts now.
func (r *rotation) operator() *tls.Config {
	r.t.Helper()
	s, err := certs.Open(certs.Options{Files: r.files("operator")})
	if err != nil {
		r.t.Fatal(err)
	}
	return s.Config()
}

// work does something again and again.
func (r *rotation) work(name string, anew bool, once func(n int) error) {
	l := &load{name: name, anew: anew}
	r.loads = append(r.loads, l)
	r.wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-r.stop:
				return
			default:
				began := time.Now()
				err := once(n)
				l.count(time.Since(began), err)
			}
		}
	})
}

// workAll begins all kinds of work, and has the client's files looked at as a program would.
func (r *rotation) workAll(ctx context.Context) {
	conf, gateway := r.source.Config(), r.run["g"].kv["tls"]
	putGet := func(c *client.Client, key string) error {
		if _, err := c.Put(ctx, []byte(key), []byte("v"), client.PutOptions{}); err != nil {
			return err
		}
		_, err := c.Get(ctx, []byte(key))
		return err
	}
	lasting := open(r.t, r.at[0], "tcp", conf)
	staying, err := dialLine(gateway, conf)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = staying.c.Close() })
	r.t.Cleanup(r.end)
	r.work("a client that stays", false, func(n int) error { return putGet(lasting, fmt.Sprint("k", n%100)) })
	r.work("clients that come anew", true, func(n int) error {
		c, err := client.Open(ctx, client.Options{Directory: r.at, Provider: "tcp", TLS: conf})
		if err != nil {
			return err
		}
		return errors.Join(putGet(c, fmt.Sprint("n", n%100)), c.Close())
	})
	r.work("a connection that stays", false, func(int) error { return staying.incr() })
	r.work("connections that come anew", true, func(int) error {
		l, err := dialLine(gateway, conf)
		if err != nil {
			return err
		}
		defer l.c.Close()
		return l.incr()
	})
	r.wg.Go(func() {
		tick := time.NewTicker(pollEvery)
		defer tick.Stop()
		for {
			select {
			case <-r.stop:
				return
			case <-tick.C:
				if _, err := r.source.Poll(); err != nil {
					r.t.Error(err)
				}
			}
		}
	})
}

// taken makes a change to every process, and waits until each has taken it over, and work went on.
func (r *rotation) taken(what string, change func(name string)) {
	r.t.Helper()
	before, own := make(map[string]int), r.source.Taken()
	const words = "certificates taken anew from their files"
	for name, p := range r.run {
		before[name] = strings.Count(p.stderr.String(), words)
	}
	for name := range r.roles {
		change(name)
	}
	for name, p := range r.run {
		n := 1
		if name == "g" {
			n = 2
		}
		p.says(words, before[name]+n)
	}
	until := func(why string, ok func() bool) {
		r.t.Helper()
		testutil.Until(r.t, what+": "+why, ok)
	}
	until("the client takes them", func() bool { return r.source.Taken() > own })
	for _, l := range r.loads {
		was := l.done.Load()
		until(l.name+" goes on", func() bool { return l.done.Load() >= was+2 })
	}
}

// replaceAuthority gives everybody certificates of another authority, after which the old one's are worth nothing.
func (r *rotation) replaceAuthority() {
	r.t.Helper()
	old, next := r.ca, newAuthority(r.t)
	r.taken("both authorities", func(name string) { r.trust(name, old, next) })
	r.ca = next
	r.taken("certificates of the new authority", func(name string) { r.issue(name, r.roles[name]) })
	r.taken("the new authority alone", func(name string) { r.trust(name, next) })
}

// wantNoFailure ends all work, and says what it was.
func (r *rotation) wantNoFailure() {
	r.t.Helper()
	r.end()
	var all, failed, reconnects int
	for _, l := range r.loads {
		all += int(l.done.Load())
		failed += len(l.failed)
		if l.anew {
			reconnects += int(l.done.Load())
		}
		if len(l.failed) > 0 {
			r.t.Errorf("%s: %d operations failed: %q", l.name, len(l.failed), l.failed[:min(len(l.failed), 3)])
		}
		r.t.Logf("%-30s %8d operations, %d failed, the slowest took %v", l.name+":", l.done.Load(), len(l.failed),
			time.Duration(l.slowest.Load()).Round(time.Millisecond))
	}
	r.t.Logf("%-30s %8d operations, %d failed, %d reconnects", "together:", all, failed, reconnects)
}

// Certificates are replaced every second, then also their authority, under load over tcp, by clients that stay
// and clients that come anew: no operation fails and no connection breaks. Afterwards the old authority's
// certificates are worth nothing.
func TestRotation(t *testing.T) {
	r := startRotation(t, 2, 1)
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	r.workAll(ctx)
	tick := time.NewTicker(time.Second)
	for range 5 {
		<-tick.C
		for name, role := range r.roles {
			r.issue(name, role)
		}
	}
	tick.Stop()
	r.taken("certificates", func(name string) { r.issue(name, r.roles[name]) })
	former := r.source.Current()
	r.replaceAuthority()
	r.wantNoFailure()
	stale := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{former.Pair},
		InsecureSkipVerify: true}
	m := r.run["m1"].kv
	for what, addr := range map[string]string{"directory": r.at[0], "Raft": r.raft, "health": m["health"],
		"tcp": m["tcp"], "metrics": m["http"], "listen-tls": r.run["g"].kv["tls"]} {
		conf := stale.Clone()
		if what == "directory" || what == "health" {
			conf.NextProtos = []string{"h2"}
		}
		if !refuses(t, addr, conf) {
			t.Errorf("%s accepts a certificate of the old authority", what)
		}
	}
	// Without d2 there is no majority: d1 calls it, and it d1, by certificates that neither began with.
	if code := r.run["d2"].stop(syscall.SIGTERM); code != 0 {
		t.Errorf("d2: exit status %d, want 0", code)
	}
	r.again["d2"]()
	roundTrip(t, open(t, r.at[1], "tcp", r.source.Config()), "afterwards")
}

// rotateKey has the directory make a new key for session tokens, once everybody has taken over the present one.
func (r *rotation) rotateKey(ctx context.Context) (putOff int) {
	r.t.Helper()
	dir, err := dirclient.Open(dirclient.Options{Addrs: r.at, TLS: r.operator()})
	if err != nil {
		r.t.Fatal(err)
	}
	defer dir.Close()
	for end := time.Now().Add(patience); ; putOff++ {
		err := dir.CallOnce(ctx, func(ctx context.Context, c dirpb.DirectoryClient) error {
			_, err := c.RotateKey(ctx, &dirpb.RotateKeyRequest{})
			return err
		})
		if err == nil {
			return putOff
		}
		if status.Code(err) != codes.FailedPrecondition || time.Now().After(end) {
			r.t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// Every 10 s all certificates come from another authority and session tokens from another key, for as long as
// KVD_ROTATE says, with three directory nodes, two memory nodes and a gateway: no operation fails.
func TestRotationSoak(t *testing.T) {
	text := os.Getenv("KVD_ROTATE")
	if text == "" {
		t.Skip("it takes minutes: make rotate")
	}
	length, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	r := startRotation(t, 3, 2)
	ctx, cancel := context.WithTimeout(t.Context(), length+4*patience)
	defer cancel()
	r.workAll(ctx)
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	began, rotations, putOff := time.Now(), 0, 0
	for ; time.Since(began) < length; rotations++ {
		putOff += r.rotateKey(ctx)
		r.replaceAuthority()
		<-tick.C
	}
	r.wantNoFailure()
	t.Logf("%d rotations in %v of the authority, of all certificates and of the tokens' key (put off %d times, until "+
		"everybody had the one before)",
		rotations, time.Since(began).Round(time.Second), putOff)
}

// A program that uses the library goes on when all of its cluster's certificates come from another authority.
func TestClientTLSFiles(t *testing.T) {
	env, dir := runtimeDir(t)
	c := &cluster{t: t, dir: dir, ca: newAuthority(t), run: make(map[string]*process), again: make(map[string]func())}
	at := freeAddr(t)
	c.start(env, "d", "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen="+at, "--raft-listen="+freeAddr(t),
		"--bootstrap", "--lease=5s")
	c.start(env, "m", "memnode", "--name=m", "--directory="+at, "--memory=64MiB", "--shm-socket=off", "--listen-tcp="+
		freeAddr(t))
	for _, role := range []string{"client", "operator"} {
		c.trust(role, c.ca)
		c.issue(role, role)
	}
	operator, err := certs.Open(certs.Options{Files: c.files("operator")})
	if err != nil {
		t.Fatal(err)
	}
	createNamespace(t, at, "default", operator.Config(), "spiffe://test/kvd/client/client")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cl, err := client.Open(ctx, client.Options{Directory: []string{at}, Provider: "tcp",
		TLSFiles: client.TLSFiles(c.files("client"))})
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	roundTrip(t, cl, "before")
	c.ca = newAuthority(t)
	for name, role := range map[string]string{"client": "client", "m": "memnode", "d": "directory"} {
		c.trust(name, c.ca)
		c.issue(name, role)
	}
	for _, name := range []string{"m", "d"} {
		if code := c.run[name].stop(syscall.SIGTERM); code != 0 {
			t.Errorf("%s: exit status %d, want 0", name, code)
		}
	}
	c.again["d"]()
	c.again["m"]()
	for end := time.Now().Add(patience); ; { // its only copy went with the memory node
		_, err := cl.Put(ctx, []byte("afterwards"), []byte("v of afterwards"), client.PutOptions{})
		if err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	wantValue(t, cl, "afterwards")
}
