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

	"github.com/kvd-project/kvd/internal/testutil"
)

// says waits until the process has logged text n times.
func (p *process) says(text string, n int) {
	p.t.Helper()
	testutil.Until(p.t, fmt.Sprintf("it says %q", text), func() bool {
		if strings.Count(p.stderr.String(), text) >= n {
			return true
		}
		select {
		case <-p.exited:
			p.t.Fatalf("it ended: %v", p.cmd.ProcessState)
		default:
		}
		return false
	})
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
	d := start(t, env, "directory", "--id=d", "--data-dir="+t.TempDir(), "--listen=127.0.0.1:0",
		"--raft-listen=127.0.0.1:0", "--bootstrap", "--lease=5s")
	addr := d.kv["directory"]
	m := start(t, env, "memnode", "--name=m", "--directory="+addr, "--memory=64MiB")
	all := []*process{
		start(t, env, "gateway", "--directory="+addr, "--databases=default", "--listen=127.0.0.1:0",
			"--listen-memcached=off"),
		start(t, env, "janitor", "--directory="+addr),
		start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--memnodes=1", "--redis=off", "--memcached=off",
			"--http=off"),
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

// SIGHUP takes over the level of the log and certificates, and names what it does not; certificates
// are taken over without it, too.
func TestReload(t *testing.T) {
	env, dir := runtimeDir(t)
	authority := newCertificates(t)
	old, renewed, other := newCertificates(t).files("directory"), authority.files("directory"),
		authority.files("client")
	file := filepath.Join(dir, "directory.yaml")
	write := func(rest string) {
		t.Helper()
		text := fmt.Sprintf("id: d\nbootstrap: true\nlisten: 127.0.0.1:0\nraft-listen: 127.0.0.1:0\ndata-dir: "+
			"%s\ntls: {ca: %s, cert: %s, key: %s}\n%s",
			filepath.Join(dir, "data"), old.CA, old.Cert, old.Key, rest)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	replace := func(files map[string]string) {
		t.Helper()
		for from, to := range files {
			b, err := os.ReadFile(from)
			if err == nil {
				err = os.WriteFile(to, b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	write("log: {level: warn}\n")
	d := start(t, env, "directory", "--config="+file, "--election-timeout=400ms")
	first, err := old.Load()
	if err != nil {
		t.Fatal(err)
	}
	second, err := renewed.Load()
	if err != nil {
		t.Fatal(err)
	}
	served := func(as *tls.Config) ([]byte, error) {
		t.Helper()
		c := as.Clone()
		c.InsecureSkipVerify, c.NextProtos = true, []string{"h2"} // who signed it is not the question
		conn, err := tls.Dial("tcp", d.kv["directory"], c)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		_, err = conn.Read(make([]byte, 1)) // settings of HTTP/2, or the refusal
		return conn.ConnectionState().PeerCertificates[0].Raw, err
	}
	if got, err := served(first); err != nil || !bytes.Equal(got, first.Certificates[0].Certificate[0]) {
		t.Fatalf("at the start: %v", err)
	}

	write("log: {level: debug}\nlease: 9s\n")
	replace(map[string]string{renewed.Cert: old.Cert, renewed.Key: old.Key})
	d.hangUp()
	d.says(`msg="SIGHUP: reloaded" log.level=DEBUG tls.cert="valid until`, 1)
	d.says(`msg="SIGHUP: other settings take effect when the process is started again" changed=lease`, 1)
	if got, err := served(first); err != nil || !bytes.Equal(got, second.Certificates[0].Certificate[0]) {
		t.Errorf("new connections do not get the new certificate: %v", err)
	}

	// So are those whose certificates are accepted.
	if _, err := served(second); err == nil {
		t.Error("a certificate of another authority is accepted")
	}
	replace(map[string]string{renewed.CA: old.CA})
	d.says(`msg="certificates taken anew from their files" tls.cert="valid until`, 1)
	if _, err := served(second); err != nil {
		t.Errorf("a certificate of the new authority: %v", err)
	}
	if _, err := served(first); err == nil || !strings.Contains(err.Error(), "unknown certificate authority") {
		t.Errorf("a certificate of the authority that was replaced: %v", err)
	}

	// A certificate of another role is not.
	replace(map[string]string{other.Cert: old.Cert, other.Key: old.Key})
	d.says("has the role client, and this process's certificate is for directory", 1)
	replace(map[string]string{renewed.Cert: old.Cert, renewed.Key: old.Key})

	key := mustRead(t, old.Key)
	if err := os.WriteFile(old.Key, []byte("half of a ke"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.says("files of certificates have changed and are not usable", 2)
	d.hangUp()
	d.says("SIGHUP: the certificates in use are kept", 1)
	write("lease: soon\n")
	d.hangUp()
	d.says("SIGHUP: the settings are kept as they were", 1)
	if got, err := served(second); err != nil || !bytes.Equal(got, second.Certificates[0].Certificate[0]) {
		t.Errorf("a certificate that cannot be read replaced one that could: %v", err)
	}
	if n := strings.Count(d.stderr.String(), "files of certificates have changed"); n != 2 {
		t.Errorf("said %d times, want 2", n)
	}
	if strings.Contains(d.stderr.String(), "half of a ke") || strings.Contains(d.stderr.String(), string(key[40:60])) {
		t.Error("the log holds parts of keys")
	}
	if code := d.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}

func mustRead(t *testing.T, file string) []byte {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
