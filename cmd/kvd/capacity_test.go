package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// restarted has the directory replace the memory node's process, as kvctl nodes restart does.
func (s *keptStore) restarted() error {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	return s.dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.RestartNode(ctx, &dirpb.RestartNodeRequest{Node: "m1"})
		return err
	})
}

// TestRestartWithOtherMemory: a memory node grows in place when its file is changed. With less memory than its regions
// need, another name or a file that cannot be read the process that serves stays, and the operator hears why.
func TestRestartWithOtherMemory(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "m1.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("name: m1\nmemory: 64MiB\n")
	s := newKeptStore(t, exe, "--config="+file)
	s.put("k", "v")
	m1 := func() *dirpb.Node { return s.status().GetMap().GetNodes()[0] }
	worker := s.worker()
	for _, c := range []struct{ text, want string }{
		{"name: m1\nmemory: 16MiB\n", "regions need 32 MiB, and memory is 16 MiB"},
		{"name: m2\nmemory: 64MiB\n", `its name would be "m2"`},
		{"name: m1\nmemory: much\n", "its settings have changed, and are not good"},
	} {
		write(c.text)
		err := s.restarted()
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "was not restarted, and "+
			"its process serves on") || !strings.Contains(err.Error(), c.want) {
			t.Fatalf("%q: the restart ends with %v", c.text, err)
		}
		if n := m1(); s.worker() != worker || n.GetBoot() != 1 || n.GetPauseMillis() != 0 || n.GetTrouble() != "" {
			t.Fatalf("%q: worker %d, was %d; %v", c.text, s.worker(), worker, n)
		}
	}
	write("name: m1\nmemory: 128MiB\n")
	if err := s.restarted(); err != nil {
		t.Fatal(err)
	}
	s.m.ready()
	if n := m1(); n.GetCapacityBytes() != 128<<20 || n.GetBoot() != 2 {
		t.Errorf("after its growth: %v", n)
	}

	// A worker that dies is followed whatever the file says: the next one leaves the memory where it is until the file
	// is right.
	write("name: m1\nmemory: 16MiB\n")
	if err := syscall.Kill(s.worker(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	const want = "regions need 32 MiB, and memory is 16 MiB"
	s.until("trouble", func() bool { return strings.Contains(m1().GetTrouble(), want) })
	wantProblem(t, s.status(), "memory node m1 does not come up: ", want)
	write("name: m1\nmemory: 32MiB\n")
	s.m.ready()
	if got := s.get("k"); got != "v" {
		t.Errorf("with memory enough the key is %q", got)
	}
	if n := lostOf(s.status()); n != 0 {
		t.Errorf("%d losses", n)
	}
	s.until("end of the trouble", func() bool { return m1().GetTrouble() == "" })
}

// TestStartWithLessMemory: a process that lends less than the regions of its memory node need ends, and says why; so
// does the status.
func TestStartWithLessMemory(t *testing.T) {
	for _, keep := range []string{"on", "off"} {
		t.Run("keep "+keep, func(t *testing.T) {
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			s := newKeptStore(t, exe, "--keep="+keep)
			s.put("k", "v")
			_ = s.m.stop(syscall.SIGKILL)
			p := spawn(t, s.env, append(s.args, "--memory=16MiB")...)
			if code := p.wait(); code != exitFailure {
				t.Fatalf("exit status %d\n%s", code, p.stderr)
			}
			if want := `memory node "m1" lends 16 MiB, and its regions need 32 MiB: raise memory`; !strings.Contains(p.stderr.String(), want) {
				t.Errorf("it does not say %q:\n%s", want, p.stderr)
			}
			if got := s.status().GetMap().GetNodes()[0].GetTrouble(); !strings.Contains(
				got, "its regions need 32 MiB") {
				t.Errorf("the status has trouble %q", got)
			}
			s.m = start(t, s.env, s.args...)
			s.put("k", fmt.Sprint("w", keep))
		})
	}
}
