package main

import (
	"bytes"
	"context"
	"fmt"
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
	for name, args := range map[string][]string{"flag": {"--password=" + secret},
		"file": {"--config=" + file("password: "+secret)}} {
		code, out, errs := config(args...)
		if code != 0 || strings.Contains(out+errs, secret) || !strings.Contains(out, "password: REDACTED\n") {
			t.Errorf("%s: exit status %d, %s%s", name, code, out, errs)
		}
		// The redacted word would be a password that everybody knows.
		redacted := file(out)
		if code, _, errs := config("--config=" + redacted); code != exitUsage ||
			!strings.Contains(errs, "password (from "+redacted+"): kvd config left it out: put it there") {
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
	for _, text := range []string{"password: 4711947119\n", "password: [hunter2-47119]\n", "pasword: hunter2-47119\n",
		"password: {a: hunter2-47119}\n", "password: hunter2-47119\nlisten: x\n"} {
		code, out, errs := config("--config=" + file(text))
		if code != exitUsage || strings.Contains(out+errs, "47119") {
			t.Errorf("%q: exit status %d, %s%s", text, code, out, errs)
		}
	}
}

// The log of a gateway holds no password, neither the right one nor those that were tried.
func TestNoSecretsInLog(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--memnodes=1", "--redis=off",
		"--memcached=off", "--http=off")
	p := start(t, append(env, "KVD_PASSWORD=hunter2-47119"), "gateway", "--directory="+d.kv["directory"],
		"--databases=default", "--listen=127.0.0.1:0", "--log-level=debug", "--http-listen=127.0.0.1:0")
	if got := redis(t, "tcp", p.kv["redis"], nil, "AUTH wrong-47119", "AUTH user wrong-47119", "AUTH hunter2-47119",
		"CONFIG GET requirepass", "INFO all"); !strings.Contains(got, "WRONGPASS") || strings.Contains(got, "47119") {
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

// A password from a file is that in the file, without its line's end; SIGHUP reads it again, or keeps the one in use.
// Nobody else sees it.
func TestPasswordFile(t *testing.T) {
	env, _ := runtimeDir(t)
	d := start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--memnodes=1", "--redis=off",
		"--memcached=off", "--http=off")
	file := filepath.Join(t.TempDir(), "password")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	args := []string{"--directory=" + d.kv["directory"], "--databases=default", "--listen=127.0.0.1:0",
		"--password-file=" + file}
	refused := func(want string, args ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		var out, errs bytes.Buffer
		if code := run(ctx, append([]string{"gateway"}, args...), &out, &errs); code == 0 ||
			!strings.Contains(errs.String(), want) || strings.Contains(errs.String(), "47119") {
			t.Errorf("exit status %d, %s, want %q", code, &errs, want)
		}
	}
	refused("password-file: open "+file+": no such file", args...)
	write("one-47119\n")
	refused(`password-file is "`+file+`" (from --password-file): password is set too: want one of them`, append(args, "--password=two-47119")...)

	p := start(t, env, append([]string{"gateway", "--log-level=debug"}, args...)...)
	if p.kv["memcached"] != "" {
		t.Error("memcached's protocol goes around the password")
	}
	ask := func(password string) string {
		t.Helper()
		return redis(t, "tcp", p.kv["redis"], nil, "AUTH "+password, "GET k")
	}
	if got := ask("one-47119"); got != "+OK $-1" {
		t.Errorf("with the password: %q", got)
	}
	for i, text := range []string{"", "\n", "two-47119\n47119\n", strings.Repeat("47119", 1000)} {
		write(text)
		p.hangUp()
		p.says("SIGHUP: the users are kept as they were", i+1)
		if got := ask("one-47119"); got != "+OK $-1" {
			t.Errorf("after a bad file %.20q: %q", text, got)
		}
	}
	write("two-47119\r\n")
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	p.hangUp()
	p.says("SIGHUP: reloaded", 1)
	if got := ask("two-47119"); got != "+OK $-1" {
		t.Errorf("with the new password: %q", got)
	}
	if got := ask("one-47119"); !strings.Contains(got, "WRONGPASS") || !strings.Contains(got, "NOAUTH") {
		t.Errorf("with the old password: %q", got)
	}
	p.says(`msg="others on this machine can read a file of passwords" setting=password-file file=`+file+` mode=-rw-r--r--`, 1)
	if strings.Contains(p.stderr.String(), "47119") {
		t.Errorf("the log holds a password:\n%s", p.stderr)
	}
	var out, errs bytes.Buffer
	if code := run(t.Context(), append([]string{"config", "gateway", "--show-secrets"}, args...), &out, &errs); code !=
		0 || !strings.Contains(out.String(), "password-file: "+file+"\n") || strings.Contains(out.String(), "47119") {
		t.Errorf("kvd config: exit status %d, %s%s", code, &out, &errs)
	}
	if line := mustRead(t, fmt.Sprintf("/proc/%d/cmdline", p.cmd.Process.Pid)); bytes.Contains(line, []byte("47119")) {
		t.Errorf("ps shows %q", line)
	}
}
