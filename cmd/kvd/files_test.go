package main

import (
	"strings"
	"testing"
)

// A process that may not have enough open files says so and how many it needs, and does not become ready. With as many
// it does.
func TestTooFewFiles(t *testing.T) {
	env, _ := runtimeDir(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap"}, "128"},
		{[]string{"memnode", "--name=m", "--directory=127.0.0.1:1", "--memory=64MiB"}, "128"},
		{[]string{"memnode", "--name=m", "--directory=127.0.0.1:1", "--memory=64MiB", "--keep=off"}, "128"},
		{[]string{"janitor", "--directory=127.0.0.1:1"}, "128"},
		{[]string{"gateway", "--directory=127.0.0.1:1", "--listen=127.0.0.1:0", "--listen-memcached=off"}, "128"},
		{[]string{"dev", "--memnodes=1", "--memory=64MiB", "--listen=127.0.0.1:0", "--redis=off", "--memcached=off",
			"--http=off"}, "192"},
		{[]string{"dev", "--memnodes=3", "--memory=64MiB", "--listen=127.0.0.1:0", "--redis=off", "--memcached=off",
			"--http=off"}, "320"},
	} {
		t.Run(c.args[0], func(t *testing.T) {
			t.Setenv("KVD_TEST_FILES", "64")
			p := spawn(t, env, c.args...)
			if code := p.wait(); code != exitFailure ||
				!strings.Contains(p.stderr.String(), "kvd: RLIMIT_NOFILE is 64 open files, want at least "+c.want+
					": raise it") {
				t.Errorf("status %d: %s", code, p.stderr)
			}
		})
	}
	for want, args := range map[string][]string{
		"128": {"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0", "--raft-listen=127.0.0.1:0",
			"--bootstrap"},
		"192": {"dev", "--memnodes=1", "--memory=64MiB", "--listen=127.0.0.1:0", "--redis=127.0.0.1:0",
			"--memcached=127.0.0.1:0", "--http=127.0.0.1:0"},
		"256": {"dev", "--memnodes=2", "--memory=64MiB", "--listen=127.0.0.1:0", "--redis=127.0.0.1:0",
			"--memcached=127.0.0.1:0", "--http=127.0.0.1:0"},
	} {
		t.Setenv("KVD_TEST_FILES", want)
		p := start(t, env, args...)
		if args[0] == "dev" {
			roundTrip(t, open(t, p.kv["directory"], "tcp", nil), "k")
		}
		if log := p.stderr.String(); strings.Contains(log, "too many open files") {
			t.Errorf("%s files: %s", want, log)
		}
	}
}
