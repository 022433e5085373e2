package verbstest

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// missing tells whether a text names what keeps verbs from being used: what the
// binary lacks, or the machine.
func missing(s string) bool {
	return strings.Contains(s, "verbs") && slices.ContainsFunc([]string{"libibverbs", "adapter", "tag verbs"},
		func(m string) bool {
			return strings.Contains(s, m)
		})
}

// The same binaries serve a machine that has neither adapters nor the library, and
// say what is missing.
func TestNoHardware(t *testing.T) {
	needs(t, "none")
	s := newStore(t, 5*time.Second)
	m := spawn(t, "m1", environ(), filepath.Join(bin, "kvd"), "memnode", "--name", "m1", "--directory", s.addr,
		"--memory", "64MiB",
		"--listen-verbs", "auto").ready()
	if m.at["tcp"] == "" || m.at["shm"] == "" || m.at["verbs"] != "" {
		t.Errorf("m1 announces %v, want tcp and shm", m.at)
	}
	if !missing(m.log.String()) {
		t.Errorf("m1 does not log what keeps it from using verbs:\n%s", m.log)
	}
	ctl := func(args ...string) (out, stderr string, status int) {
		t.Helper()
		return run(t, append([]string{filepath.Join(bin, "kvctl"), "--directory", s.addr, "--timeout", "30s"},
			args...)...)
	}
	for i, by := range [][]string{nil, {"--provider", "tcp"}, {"--provider", "shm"}} {
		key := fmt.Sprintf("key%d", i)
		if _, stderr, status := ctl(append(by, "put", key, "value")...); status != 0 {
			t.Errorf("kvctl %v put: exit status %d: %s", by, status, stderr)
		}
		if out, stderr, status := ctl(append(by, "get", key)...); status != 0 || strings.TrimSpace(out) != "value" {
			t.Errorf("kvctl %v get: %q, exit status %d: %s", by, out, status, stderr)
		}
	}
	_, stderr, status := ctl("--provider", "verbs", "get", "key0")
	if (status != 2 && status != 3) || !missing(stderr) {
		t.Errorf("kvctl --provider verbs: exit status %d, want 2 or 3, and what is missing: %s", status, stderr)
	}
	fmt.Printf("\nkvctl --provider verbs, exit status %d: %s\n", status, strings.TrimSpace(stderr))
	out, stderr, status := ctl("doctor")
	if status != 0 || !strings.Contains(out, "verbs") {
		t.Errorf("kvctl doctor: exit status %d, want 0: not to have RDMA is no failure\n%s%s", status, out, stderr)
	}
	if _, _, status := ctl("--provider", "verbs", "doctor"); status != 1 {
		t.Errorf("kvctl --provider verbs doctor: exit status %d, want 1", status)
	}
	// Asked for an adapter by name, a memory node does without none.
	m2 := spawn(t, "m2", environ(), filepath.Join(bin, "kvd"), "memnode", "--name", "m2", "--directory", s.addr,
		"--memory", "64MiB",
		"--listen-verbs", "127.0.0.1:0")
	if status := m2.wait(); status == 0 || !missing(m2.log.String()) {
		t.Errorf("kvd memnode --listen-verbs 127.0.0.1:0: exit status %d, want a failure that says what is missing\n%s",
			status, m2.log)
	}
}
