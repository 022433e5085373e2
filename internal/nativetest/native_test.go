package nativetest

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// envBin is the folder of kvd and kvctl; without it there are no tests.
const envBin = "KVD_NATIVE"

const library = "../../client/c"

// TestLibrary runs client/c/test/test.sh on a broker of its own, beside a store.
func TestLibrary(t *testing.T) {
	s := start(t)
	sock := filepath.Join(t.TempDir(), "broker")
	s.broker(t, sock)
	run(t, filepath.Join(library, "test/test.sh"), sock, s.namespace)
}

// TestKills has libkvd's own test kill brokers while they work.
func TestKills(t *testing.T) {
	s := start(t)
	run(t, "make", "-C", library, "CC=gcc", "build/kvd_test")
	sock := filepath.Join(t.TempDir(), "broker")
	args := append([]string{"kills", sock, s.namespace, "60"}, s.brokerArgs(sock)...)
	run(t, filepath.Join(library, "build/kvd_test"), args...)
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v", cmd, err)
	}
}

// store is a store of processes, `kvd dev`.
type store struct {
	bin, directory, namespace string
}

func start(t *testing.T) *store {
	t.Helper()
	bin := os.Getenv(envBin)
	if bin == "" {
		t.Skipf("%s is not set; run make test-native", envBin)
	}
	s := &store{bin: bin, namespace: "default"} // whose keys nobody evicts
	s.directory = ready(t, exec.Command(filepath.Join(bin, "kvd"), "dev", "--listen", "127.0.0.1:0", "--http", "off",
		"--redis", "off", "--memcached", "off", "--broker", "off", "--memory",
		"1GiB"))["directory"]
	return s
}

func (s *store) brokerArgs(sock string) []string {
	return []string{filepath.Join(s.bin, "kvd"), "broker", "--directory", s.directory, "--listen", sock,
		"--namespaces", s.namespace, "--view-memory", "64MiB"}
}

func (s *store) broker(t *testing.T, sock string) {
	t.Helper()
	args := s.brokerArgs(sock)
	ready(t, exec.Command(args[0], args[1:]...))
}

// ready starts a process of kvd, which ends with the test, and returns where it can be reached.
func ready(t *testing.T, cmd *exec.Cmd) map[string]string {
	t.Helper()
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	with, ok := strings.CutPrefix(strings.TrimSpace(line), "ready")
	if !ok {
		t.Fatalf("%s said %q: %v", cmd, line, err)
	}
	at := make(map[string]string)
	for _, kv := range strings.Fields(with) {
		if k, v, ok := strings.Cut(kv, "="); ok {
			at[k] = v
		}
	}
	return at
}
