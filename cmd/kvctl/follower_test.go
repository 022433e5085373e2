package main

import (
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// Commands that show the store go on from a directory node that follows to the leader. Where
// none answers they say whose answer they show and how old it is.
func TestViewsAskTheLeader(t *testing.T) {
	m := func(node string) *dirpb.Map {
		return &dirpb.Map{
			Nodes:      []*dirpb.Node{{Id: 1, Name: node, State: dirpb.NodeState_NODE_UP}},
			Namespaces: []*dirpb.Namespace{{Id: 1, Name: "default", Replicas: 1}},
		}
	}
	leader := &fakeDirectory{now: &dirpb.StatusReply{AnsweredBy: "d1", Leads: true, Epoch: 4711, RaftApplied: 9,
		Map:       m("new"),
		Jobs:      []*dirpb.Job{{Id: 88, Kind: dirpb.JobKind_JOB_SCRUB, Trouble: "no janitor"}},
		NodeStats: map[uint32]*dirpb.NodeStats{1: {Connections: 77}}}}
	leader.now.Directory = []*dirpb.DirectoryNode{{Id: "d1", GrpcAddr: leader.serve(t), Leader: true, Voter: true},
		{Id: "d2", Voter: true}}
	follower := &fakeDirectory{now: &dirpb.StatusReply{AnsweredBy: "d2", AgeMillis: 3200, RaftApplied: 7, Map: m("old"),
		Directory: leader.now.Directory,
		Jobs:      []*dirpb.Job{{Id: 88, Kind: dirpb.JobKind_JOB_SCRUB}}}}
	e := &env{t: t, flags: []string{"--directory", follower.serve(t), "--timeout", "10s"}}
	for line, want := range map[string]string{"status": "4711", "stats": "77", "nodes": "new", "jobs": "no janitor"} {
		r := e.run("", line)
		if r.code != ctl.ExitOK || !strings.Contains(r.stdout, want) || r.stderr != "" ||
			strings.Contains(r.stdout, "does not lead") {
			t.Errorf("%s: want %q of the leader's: %+v", line, want, r)
		}
	}

	// Nobody leads.
	follower.mu.Lock()
	follower.now.Directory = []*dirpb.DirectoryNode{{Id: "d1", Voter: true}, {Id: "d2", Voter: true},
		{Id: "d3", Voter: true}}
	follower.mu.Unlock()
	const answer = "answer of directory node d2, which does not lead: it is 3.2s old"
	if r := e.run("", "nodes"); r.code != ctl.ExitOK || !strings.Contains(r.stdout, "old") ||
		!strings.Contains(r.stderr, answer) {
		t.Errorf("nodes: %+v", r)
	}
	r := e.run("", "status")
	for _, want := range []string{answer, "the directory has no leader: 2 of its 3 nodes must run",
		"reclaim epoch  -"} {
		if r.code != ctl.ExitOK || !strings.Contains(r.stdout, want) {
			t.Errorf("status lacks %q: %+v", want, r)
		}
	}
	// A command that changes something does not take that for an answer.
	if r := e.run("", "--timeout", "500ms", "drain", "old"); r.code != ctl.ExitUnavailable {
		t.Errorf("drain: %+v", r)
	}
}
