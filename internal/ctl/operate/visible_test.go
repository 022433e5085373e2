package operate

import (
	"bytes"
	"strings"
	"testing"
	"unicode"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// Names that others chose move no cursor, colour nothing and make no line of their own.
func TestForeignText(t *testing.T) {
	const evil = "a\x1b]0;owned\x07\x1b[2J\r\nFAKE m9 up\u202e\u009b31m\x7f"
	st := &dirpb.StatusReply{
		ClusterId: evil,
		Map: &dirpb.Map{
			Nodes: []*dirpb.Node{{Id: 1, Name: evil, HostId: evil, Domain: evil, State: dirpb.NodeState_NODE_UP,
				Endpoints: []*dirpb.Endpoint{{Provider: evil, Addr: evil}}}},
			Namespaces: []*dirpb.Namespace{{Id: 1, Name: evil}},
			Pgs: []*dirpb.PlacementGroup{
				{Id: 1, NamespaceId: 1, State: dirpb.PGState_PG_ACTIVE, Members: []*dirpb.Member{{NodeId: 1}}}},
		},
		Sessions:  []*dirpb.SessionInfo{{Id: 1, Client: evil, Namespace: evil}},
		Directory: []*dirpb.DirectoryNode{{Id: evil, RaftAddr: evil, GrpcAddr: evil}},
		Jobs:      []*dirpb.Job{{Id: 1, PgId: 1, Reason: evil, Trouble: evil}},
	}
	var out, errs bytes.Buffer
	a := &commands{ctl.New(strings.NewReader(""), &out, &errs)}
	for name, print := range map[string]func() error{
		"nodes":  func() error { return a.printNodes(st) },
		"stats":  func() error { return a.printStats(st) },
		"status": func() error { return a.printStatus(st, true) },
		"jobs":   func() error { return a.printJobs(st) },
		"say":    func() error { a.Say("kvctl: %s", strings.ReplaceAll(evil, "\n", "")); return nil },
		"error":  func() error { a.Say("%s", ctl.OneLine(evil)); return nil },
		"troubles": func() error {
			a.Say("%s", ctl.Troubles(st))
			return nil
		},
	} {
		out.Reset()
		errs.Reset()
		if err := print(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		text := out.String() + errs.String()
		for line := range strings.SplitSeq(text, "\n") {
			if strings.HasPrefix(strings.TrimSpace(line), "FAKE") {
				t.Errorf("%s: a name made a line of its own: %q", name, line)
			}
			for _, r := range line {
				if !unicode.IsPrint(r) {
					t.Errorf("%s prints %q in %q", name, r, line)
				}
			}
		}
		if !strings.Contains(text, `a\x1b]0;owned`) {
			t.Errorf("%s hides what it escapes: %q", name, text)
		}
	}
	for in, want := range map[string]string{"": "", "Zürich ✓ 1": "Zürich ✓ 1", "a\xffb": `a\xffb`, "\t": `\t`} {
		if got := ctl.Visible(in); got != want {
			t.Errorf("visible(%q) = %q, want %q", in, got, want)
		}
	}
}
