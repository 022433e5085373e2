package overview

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

func TestBypasses(t *testing.T) {
	st := &dirpb.StatusReply{Leads: true}
	add := func(host, client, provider, reason string, adapter bool) {
		st.Sessions = append(st.Sessions, &dirpb.SessionInfo{Client: client, Life: dirpb.SessionLife_SESSION_LIVE,
			Paths: &dirpb.ClientPaths{Host: host, Adapter: adapter, Paths: []*dirpb.ClientPath{
				{Provider: provider, Reason: reason, Detail: "why: " + reason}}}})
	}
	add("x", "a pid 1", "tcp", "dial-failed", true)
	add("x", "a pid 1", "tcp", "dial-failed", true) // of another namespace
	add("x", "a pid 2", "tcp", "dial-failed", true)
	add("x", "b pid 3", "tcp", "asked-for", true)
	add("x", "b pid 4", "verbs", "", true)
	add("y", "c pid 5", "tcp", "no-adapter", false)
	add("y", "c pid 6", "tcp", "", false)
	gone := &dirpb.SessionInfo{Client: "gone", Life: dirpb.SessionLife_SESSION_FENCING, Paths: st.Sessions[0].Paths}
	st.Sessions = append(st.Sessions, gone, &dirpb.SessionInfo{Life: dirpb.SessionLife_SESSION_LIVE})

	if got := PathsText(st); got != "x 2 clients (dial-failed), y 1 client (no-adapter)" {
		t.Errorf("paths are %q", got)
	}
	all := Problems(st)
	if len(all) != 1 || all[0].What != "2 clients of host x: tcp is used though an RDMA adapter is there "+
		"(dial-failed): why: dial-failed" || !strings.Contains(all[0].Mend, "kvctl doctor") ||
		VerdictOf(st) != Degraded {
		t.Errorf("problems are %q", all)
	}

	// Nobody makes up more than can be shown.
	for i := range 1000 {
		add(fmt.Sprint("h", i), "x", "tcp", "dial-failed", true)
	}
	if n := len(Bypasses(st)); n != mostBypasses {
		t.Errorf("%d bypasses", n)
	}
	if all := Problems(st); len(all) != shownBypasses || !strings.Contains(all[len(all)-1].What, "more like it") {
		t.Errorf("%d problems, the last: %q", len(all), all[len(all)-1].What)
	}
}
