package main

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
)

// firstWord gives the error of a TLS connection on which nothing is said, nil if the other side waits. With TLS 1.3 a
// client hears there that it is refused.
func firstWord(t *testing.T, addr string, conf *tls.Config) error {
	t.Helper()
	conn, err := (&tls.Dialer{NetDialer: &net.Dialer{Timeout: patience}, Config: conf}).Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil
}

// revocation is a store of which somebody has stolen certificates.
type revocation struct {
	cluster
	crl string
	ask *dirclient.Client // as an operator
}

func startRevocation(t *testing.T) *revocation {
	t.Helper()
	env, dir := runtimeDir(t)
	r := &revocation{cluster: cluster{t: t, dir: dir, ca: newAuthority(t), run: make(map[string]*process),
		again: make(map[string]func())}, crl: filepath.Join(dir, "crl.pem")}
	r.revoke()
	raft, flag := freeAddr(t), "--tls-crl="+r.crl
	d := r.start(env, "d", "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen="+
		raft, "--bootstrap", "--lease=2s", "--http-listen=127.0.0.1:0", flag)
	d.kv["raft"] = raft
	r.start(env, "m", "memnode", "--name=m", "--directory="+d.kv["directory"], "--memory=64MiB", "--shm-socket=off",
		"--health-listen=127.0.0.1:0", "--janitor=false", flag)
	r.trust("operator", r.ca)
	r.issue("operator", "operator")
	conf, err := r.files("operator").LoadConfig()
	if err != nil {
		t.Fatal(err)
	}
	createNamespace(t, d.kv["directory"], "cache", conf, "spiffe://test/kvd/gateway/g",
		"spiffe://test/kvd/client/thief", "spiffe://test/kvd/client/renewed")
	r.start(env, "g", "gateway", "--directory="+d.kv["directory"], "--listen=off", "--listen-memcached=off",
		"--listen-tls=127.0.0.1:0", "--log-level=debug", flag)
	if r.ask, err = dirclient.Open(dirclient.Options{Addrs: []string{d.kv["directory"]}, TLS: conf}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.ask.Close() })
	return r
}

// revoke has all processes refuse certificates, once they look.
func (r *revocation) revoke(serials ...*big.Int) {
	r.t.Helper()
	_, text, err := r.ca.Revoke(time.Now(), nil, serials, time.Hour)
	if err == nil {
		err = os.WriteFile(r.crl, text, 0o600)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *revocation) serial(name string) *big.Int {
	r.t.Helper()
	set, err := r.files(name).Load()
	if err != nil {
		r.t.Fatal(err)
	}
	return set.Pair.Leaf.SerialNumber
}

// open opens a client of the library with files of its own.
func (r *revocation) open(name string) *client.Client {
	r.t.Helper()
	r.trust(name, r.ca)
	r.issue(name, "client")
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: []string{r.run["d"].kv["directory"]}, Namespace: "cache",
		Provider: "tcp", TLSFiles: client.TLSFiles(r.files(name)), OpTimeout: patience})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = c.Close() })
	return c
}

// sessions are those that an identity has, other than ended ones.
func (r *revocation) sessions(name string) (ids []uint32) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	err := r.ask.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		st, err := d.Status(ctx, &dirpb.StatusRequest{})
		ids = nil
		for _, s := range st.GetSessions() {
			if s.GetIdentity() == "spiffe://test/kvd/client/"+name && s.GetLife() == dirpb.SessionLife_SESSION_LIVE {
				ids = append(ids, s.GetId())
			}
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return ids
}

// hello is what another directory node says first on a connection to the Raft port.
func (r *revocation) hello() []byte {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	wanted := ""
	err := r.ask.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		st, err := d.Status(ctx, &dirpb.StatusRequest{})
		if n := st.GetDirectory(); len(n) == 1 {
			wanted = n[0].GetId() + "#" + n[0].GetIncarnation()
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	var body []byte
	for _, text := range []string{"other", wanted, "", "127.0.0.1:1", "process", ""} {
		body = append(binary.LittleEndian.AppendUint16(body, uint16(len(text))), text...)
	}
	return append(binary.LittleEndian.AppendUint16([]byte("kvdR\x01\x00"), uint16(len(body))), body...)
}

// The holder of a revoked certificate is refused on every port, and a session that it had open is fenced within a
// lease. A program whose certificate was renewed before the old one was revoked keeps its session.
func TestRevocation(t *testing.T) {
	r := startRevocation(t)
	d, m, g := r.run["d"].kv, r.run["m"].kv, r.run["g"].kv
	for name, role := range map[string]string{"stolen": "client", "stolen-d": "directory"} {
		r.trust(name, r.ca)
		r.issue(name, role)
	}
	thief, renewed := r.open("thief"), r.open("renewed")
	roundTrip(t, thief, "a")
	roundTrip(t, renewed, "b")
	had := r.sessions("renewed")
	if len(had) != 1 || len(r.sessions("thief")) != 1 {
		t.Fatalf("%v and %v are open, want a session of each", had, r.sessions("thief"))
	}
	old := []*big.Int{r.serial("stolen"), r.serial("stolen-d"), r.serial("thief"), r.serial("renewed")}
	r.issue("renewed", "client")

	ports := map[string]struct{ addr, of string }{
		"directory": {d["directory"], "stolen"}, "Raft": {d["raft"], "stolen-d"}, "tcp": {m["tcp"], "stolen"},
		"health":     {m["health"], "stolen"},
		"listen-tls": {g["tls"], "stolen"}, "HTTP": {d["http"], "stolen"},
	}
	says := func(port, of string) error {
		set, err := r.files(of).Load()
		if err != nil {
			t.Fatal(err)
		}
		conf := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: set.Pool, Certificates: []tls.Certificate{set.Pair}}
		if port == "directory" || port == "health" {
			conf.NextProtos = []string{"h2"}
		}
		return firstWord(t, ports[port].addr, conf)
	}
	for port, p := range ports {
		if err := says(port, p.of); err != nil {
			t.Errorf("%s before: %v", port, err)
		}
	}
	set, err := r.files("stolen").LoadConfig()
	if err != nil {
		t.Fatal(err)
	}
	browser := http.Client{Timeout: patience, Transport: &http.Transport{TLSClientConfig: set}}
	defer browser.CloseIdleConnections()
	page := func() int {
		q, err := browser.Get("https://" + d["http"] + "/healthz")
		if err != nil {
			return 0
		}
		_, _ = io.Copy(io.Discard, q.Body) // so that the connection is used again
		_ = q.Body.Close()
		return q.StatusCode
	}
	if code := page(); code != http.StatusOK {
		t.Errorf("HTTP before: status %d", code)
	}

	set, err = r.files("stolen-d").LoadConfig()
	if err != nil {
		t.Fatal(err)
	}
	voter, err := tls.Dial("tcp", d["raft"], set)
	if err != nil {
		t.Fatal(err)
	}
	defer voter.Close()
	if _, err := voter.Write(append(r.hello(), 0)); err != nil { // it appends entries
		t.Fatal(err)
	}
	_ = voter.SetDeadline(time.Now().Add(patience))
	if _, err := voter.Read(make([]byte, 1)); err != nil {
		t.Fatalf("the directory node does not answer the hello: %v", err)
	}

	r.revoke(old...)
	began := time.Now()
	for name, n := range map[string]int{"d": 1, "m": 1, "g": 2} {
		r.run[name].says("certificates taken anew from their files", n)
	}
	for port, p := range ports {
		if err := says(port, p.of); err == nil || !strings.Contains(err.Error(), "bad certificate") {
			t.Errorf("%s accepts a revoked certificate: %v", port, err)
		}
	}
	if code := page(); code != http.StatusForbidden {
		t.Errorf("HTTP, by a connection from before: status %d, want 403", code)
	}
	_ = voter.SetDeadline(time.Now().Add(patience))
	_, err = voter.Write([]byte{0x80}) // none, in MessagePack
	if err == nil {
		_, err = io.Copy(io.Discard, voter) // the rest of its hello
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Raft, by a connection from before, answers, or waits: %v", err)
	}
	r.run["d"].says("a Raft connection is closed", 1)
	testutil.UntilNone(t, "sessions of a revoked certificate", func() int { return len(r.sessions("thief")) })
	t.Logf("fenced %v after the list was written; the lease is 2s, and files are looked at every second",
		time.Since(began))
	r.run["d"].says("of spiffe://test/kvd/client/thief was revoked on ", 1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := thief.Put(ctx, []byte("a"), []byte("stolen"), client.PutOptions{}); err == nil {
		t.Error("the session that was fenced writes")
	}
	wantValue(t, renewed, "a")
	roundTrip(t, renewed, "c")
	if now := r.sessions("renewed"); len(now) != 1 || now[0] != had[0] {
		t.Errorf("sessions %v of the certificate that was renewed, want %v as before", now, had)
	}
}

// A process does not begin with a list that is not its authority's.
func TestRevocationStart(t *testing.T) {
	t.Setenv("KVD_KEEP", "off") // a worker would be this test again
	files := newCertificates(t)
	c := &cluster{t: t, dir: t.TempDir(), ca: newAuthority(t)}
	r := &revocation{cluster: *c, crl: filepath.Join(c.dir, "crl.pem")}
	r.revoke()
	for _, role := range []string{"directory", "memnode", "janitor", "gateway"} {
		args := map[string][]string{"directory": {"--id=d", "--bootstrap", "--data-dir=" + t.TempDir()},
			"memnode": {"--name=m"}}[role]
		var out, errs strings.Builder
		if code := run(t.Context(), append(append([]string{role, "--tls-crl=" + r.crl}, args...), files.flags(role)...),
			&out, &errs); code != exitUsage ||
			!strings.Contains(errs.String(), "tls.crl: "+r.crl+": list 1, of CN=kvd authority test") {
			t.Errorf("%s: exit status %d, %s", role, code, &errs)
		}
	}
	var out, errs strings.Builder
	if code := run(t.Context(), append([]string{"health", "127.0.0.1:1", "--tls-crl=" + r.crl},
		files.flags("client")...), &out, &errs); code != exitUsage || !strings.Contains(errs.String(), "tls.crl: ") {
		t.Errorf("health: exit status %d, %s", code, &errs)
	}
	if _, err := client.Open(t.Context(), client.Options{Directory: []string{"127.0.0.1:1"},
		TLSFiles: client.TLSFiles(certs.Files{CRL: r.crl})}); !errors.Is(err, client.ErrInvalid) {
		t.Errorf("a list alone: %v", err)
	}
}
