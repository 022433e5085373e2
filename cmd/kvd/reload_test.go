package main

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/config"
)

// says waits until the process has logged text n times.
func (p *process) says(text string, n int) {
	p.t.Helper()
	for end := time.Now().Add(patience); strings.Count(p.stderr.String(), text) < n; time.Sleep(5 * time.Millisecond) {
		select {
		case <-p.exited:
			p.t.Fatalf("it ended: %v", p.cmd.ProcessState)
		default:
		}
		if time.Now().After(end) {
			p.t.Fatalf("it does not say %q", text)
		}
	}
}

func (p *process) hangUp() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		p.t.Fatal(err)
	}
}

// SIGHUP ends no daemon.
func TestHangup(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	addr := d.kv["directory"]
	m := start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB")
	all := []*process{
		start(t, env, "gateway", "--directory="+addr, "--databases=default", "--listen=127.0.0.1:0", "--listen-memcached=off"),
		start(t, env, "janitor", "--directory="+addr),
		start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--memnodes=1", "--redis=off", "--memcached=off", "--http=off"),
		m, d,
	}
	for _, p := range all {
		for n := range 2 {
			p.hangUp()
			p.says(`msg="SIGHUP: reloaded" log.level=INFO`, n+1)
		}
	}
	for _, p := range all {
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d of %v, want 0", code, p.cmd.Args[1:])
		}
	}
}

// SIGHUP takes over the level of the log and the certificate, and names what it does not.
func TestReload(t *testing.T) {
	env, dir := runtimeDir(t)
	old, renewed := newCertificates(t).files("directory"), newCertificates(t).files("directory")
	file := filepath.Join(dir, "directory.yaml")
	write := func(rest string) {
		t.Helper()
		text := fmt.Sprintf("id: d\nbootstrap: true\nlisten: 127.0.0.1:0\nraft-listen: 127.0.0.1:0\ndata-dir: %s\ntls: {ca: %s, cert: %s, key: %s}\n%s",
			filepath.Join(dir, "data"), old.CA, old.Cert, old.Key, rest)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("log: {level: warn}\n")
	d := start(t, env, "directory", "--config="+file, "--election-timeout=400ms")
	client, err := old.Load()
	if err != nil {
		t.Fatal(err)
	}
	served := func() []byte {
		t.Helper()
		c := client.Clone()
		c.InsecureSkipVerify, c.NextProtos = true, []string{"h2"} // who signed it is not the question
		conn, err := tls.Dial("tcp", d.kv["directory"], c)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].Raw
	}
	replace := func(by config.TLS) {
		t.Helper()
		for from, to := range map[string]string{by.Cert: old.Cert, by.Key: old.Key} {
			b, err := os.ReadFile(from)
			if err == nil {
				err = os.WriteFile(to, b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	before := served()

	write("log: {level: debug}\nlease: 9s\n")
	replace(renewed)
	d.hangUp()
	d.says(`msg="SIGHUP: reloaded" log.level=DEBUG tls.cert="valid until`, 1)
	d.says(`msg="SIGHUP: other settings take effect when the process is started again" changed=lease`, 1)
	want, err := renewed.Load()
	if err != nil {
		t.Fatal(err)
	}
	if now := served(); bytes.Equal(now, before) || !bytes.Equal(now, want.Certificates[0].Certificate[0]) {
		t.Error("new connections do not get the new certificate")
	}

	// Whose certificates are accepted stays as it was, and it says so, though the setting is the same.
	ca, err := os.ReadFile(renewed.CA)
	if err == nil {
		err = os.WriteFile(old.CA, ca, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	d.hangUp()
	d.says(`msg="SIGHUP: other settings take effect when the process is started again" changed="lease, tls.ca"`, 1)
	served()

	replace(newCertificates(t).files("client"))
	d.hangUp()
	d.says("has the role client, and this process's certificate is for directory", 1)
	if err := os.WriteFile(old.Key, []byte("half of a ke"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.hangUp()
	d.says("SIGHUP: the certificate is kept as it was", 2)
	write("lease: soon\n")
	d.hangUp()
	d.says("SIGHUP: the settings are kept as they were", 1)
	if now := served(); !bytes.Equal(now, want.Certificates[0].Certificate[0]) {
		t.Error("a certificate that cannot be read replaced one that could")
	}
	if code := d.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}
