package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Secrets are printed to those who ask for them, and to nobody else.
func TestSecrets(t *testing.T) {
	file := func(text string) string {
		t.Helper()
		name := filepath.Join(t.TempDir(), "gateway.yaml")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	config := func(args ...string) (code int, out, errs string) {
		t.Helper()
		var o, e bytes.Buffer
		code = run(t.Context(), append([]string{"config", "gateway"}, args...), &o, &e)
		return code, o.String(), e.String()
	}
	const secret = "hunter2-47119"
	for name, args := range map[string][]string{"flag": {"--password=" + secret}, "file": {"--config=" + file("password: "+secret)}} {
		code, out, errs := config(args...)
		if code != 0 || strings.Contains(out+errs, secret) || !strings.Contains(out, "password: REDACTED\n") {
			t.Errorf("%s: exit status %d, %s%s", name, code, out, errs)
		}
		// The redacted word would be a password that everybody knows.
		redacted := file(out)
		if code, _, errs := config("--config=" + redacted); code != exitUsage || !strings.Contains(errs, "password (from "+redacted+"): kvd config left it out: put it there") {
			t.Errorf("%s: reading it back: exit status %d, %s", name, code, errs)
		}
		code, out, errs = config(append(args, "--show-secrets")...)
		if code != 0 || !strings.Contains(out, "password: "+secret+"\n") {
			t.Errorf("%s: asked for: exit status %d, %s%s", name, code, out, errs)
		}
	}
	t.Setenv("KVD_PASSWORD", secret)
	if code, out, errs := config(); code != 0 || strings.Contains(out+errs, secret) {
		t.Errorf("variable: exit status %d, %s%s", code, out, errs)
	}
	if code, out, errs := config("--help"); code != 0 || strings.Contains(out+errs, secret) {
		t.Errorf("help: exit status %d, %s%s", code, out, errs)
	}
	t.Setenv("KVD_PASSWORD", "")
	// Without a secret nothing is left out.
	if code, out, errs := config(); code != 0 || !strings.Contains(out, "password: \"\"\n") {
		t.Errorf("none: exit status %d, %s%s", code, out, errs)
	}
	// Nor do mistakes show it.
	for _, text := range []string{"password: 4711947119\n", "password: [hunter2-47119]\n", "pasword: hunter2-47119\n", "password: {a: hunter2-47119}\n", "password: hunter2-47119\nlisten: x\n"} {
		code, out, errs := config("--config=" + file(text))
		if code != exitUsage || strings.Contains(out+errs, "47119") {
			t.Errorf("%q: exit status %d, %s%s", text, code, out, errs)
		}
	}
}

// The log of a gateway holds no password, neither the right one nor those that were tried.
func TestNoSecretsInLog(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--memnodes=1", "--redis=off", "--memcached=off", "--http=off")
	p := start(t, append(env, "KVD_PASSWORD=hunter2-47119"), "gateway", "--directory="+d.kv["directory"], "--databases=default", "--listen=127.0.0.1:0", "--log-level=debug", "--http-listen=127.0.0.1:0")
	if got := redis(t, "tcp", p.kv["redis"], nil, "AUTH wrong-47119", "AUTH user wrong-47119", "AUTH hunter2-47119", "CONFIG GET requirepass", "INFO all"); !strings.Contains(got, "WRONGPASS") || strings.Contains(got, "47119") {
		t.Errorf("answers hold a password: %s", got)
	}
	p.hangUp()
	p.says("SIGHUP: reloaded", 1)
	if text := p.stderr.String(); !strings.Contains(text, "wrong password") || strings.Contains(text, "47119") {
		t.Errorf("no word of a wrong password, or too many:\n%s", text)
	}
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
}
