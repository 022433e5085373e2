package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// TestNameTaken: a second process with the name of a memory node that lives is refused, nothing is lost, and the status
// and the logs name both. It gets the name when the first has ended; of memory that the first kept, when an operator
// gives that up.
func TestNameTaken(t *testing.T) {
	for _, keep := range []string{"off", "on"} {
		t.Run("keep "+keep, func(t *testing.T) {
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			s := newKeptStore(t, exe, "--keep="+keep)
			for k := range 20 {
				s.put(fmt.Sprint("k", k), "v")
			}
			m1 := func() *dirpb.Node { return s.status().GetMap().GetNodes()[0] }
			before := m1()
			clash := func() *process {
				p := spawn(t, s.env, s.args...)
				for _, x := range []struct {
					at   *process
					text string
				}{{p, "this memory node's name is taken"}, {p, "another process has this memory node's name"},
					{s.d, "two processes want the name of one memory node"}} {
					if !x.at.stderr.holds(x.text) {
						t.Fatalf("no log says %q", x.text)
					}
				}
				s.until("a rival in the status", func() bool { return m1().GetRival() != "" })
				return p
			}
			second := clash()
			_, at, _ := strings.Cut(m1().GetRival(), "tcp ")
			wantProblem(t, s.status(), "another process wants the name of memory node m1 and is refused", s.m.kv["tcp"],
				at)
			if !strings.Contains(second.stderr.String(), "tcp "+s.m.kv["tcp"]) ||
				!strings.Contains(s.d.stderr.String(), "tcp "+at) {
				t.Errorf("the second's log does not name %s, or the directory's %s", s.m.kv["tcp"], at)
			}
			for k := range 20 {
				if got := s.get(fmt.Sprint("k", k)); got != "v" {
					t.Fatalf("beside a process of the same name k%d is %q", k, got)
				}
			}
			if now := m1(); now.GetIncarnation() != before.GetIncarnation() || now.GetBoot() != before.GetBoot() ||
				lostOf(s.status()) != 0 {
				t.Errorf("the memory node is %v now, and was %v", now, before)
			}
			second.stop(syscall.SIGTERM)
			s.until("end of the clash", func() bool { return m1().GetRival() == "" })

			second = clash()
			_ = s.m.stop(syscall.SIGKILL)
			if keep == "on" {
				s.until("wait for the memory", func() bool { return m1().GetWaiting() })
				if !second.stderr.holds("kvctl nodes give-up m1") {
					t.Fatal("the second does not say what it waits for")
				}
				if now := m1(); now.GetIncarnation() != before.GetIncarnation() {
					t.Fatalf("another process has taken the name of kept memory: %v", now)
				}
				s.call(func(ctx context.Context, d dirpb.DirectoryClient) error {
					_, err := d.GiveUpNode(ctx, &dirpb.GiveUpNodeRequest{Node: "m1"})
					return err
				})
			}
			second.ready()
			if got := s.get("k0"); got != "" {
				t.Errorf("after the end of its memory a key is %q", got)
			}
			s.put("k0", "w")
			wantProblem(t, s.status(), "namespace "+onlyCopy+" lost keys")
		})
	}
}
