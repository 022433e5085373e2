package server

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// Gateways that serve the same namespaces in the same order meet, hear of each other as they come and go, and nobody
// registers what is not his to register.
func TestMeet(t *testing.T) {
	_, c, _ := store(t, forever, 2, &dirpb.CreateNamespaceRequest{Name: "n", Replicas: 2, Shards: 4})
	if _, err := c.CreateNamespace(testCtx(t), &dirpb.CreateNamespaceRequest{Name: "m", Replicas: 1, Shards: 1}); err !=
		nil {
		t.Fatal(err)
	}
	n1, n2, m := openIn(t, c, "n").SessionId, openIn(t, c, "n").SessionId, openIn(t, c, "m").SessionId
	id := func(s string) []byte { return []byte(strings.Repeat(s, 16)) }
	meet := func(q *dirpb.MeetRequest) *dirpb.MeetReply {
		t.Helper()
		r, err := c.Meet(testCtx(t), q)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	a := &dirpb.MeetRequest{SessionIds: []uint32{n1}, Id: id("a"), Addr: "10.0.0.1:1", HostId: "h"}
	r := meet(a)
	if len(r.Gateways) != 0 {
		t.Fatalf("alone, and meets %v", r.Gateways)
	}
	// It waits for news.
	began := time.Now()
	if q := meet(&dirpb.MeetRequest{SessionIds: a.SessionIds, Id: a.Id, Addr: a.Addr, News: r.News,
		WaitMillis: 200}); q.News != r.News || time.Since(began) < 200*time.Millisecond {
		t.Fatalf("news %d after %v", q.News, time.Since(began))
	}
	heard := answers(t, func(ctx context.Context) (*dirpb.MeetReply, error) {
		for {
			q, err := c.Meet(ctx, &dirpb.MeetRequest{SessionIds: a.SessionIds, Id: a.Id, Addr: a.Addr, News: r.News,
				WaitMillis: 1 << 40})
			if err != nil || q.News != r.News {
				return q, err
			}
		}
	})
	meet(&dirpb.MeetRequest{SessionIds: []uint32{m}, Id: id("m"), Addr: "10.0.0.3:1"})
	meet(&dirpb.MeetRequest{SessionIds: []uint32{n1, m}, Id: id("x"), Addr: "10.0.0.4:1"})
	b := &dirpb.MeetRequest{SessionIds: []uint32{n2}, Id: id("b"), Addr: "10.0.0.2:1", HostId: "h2",
		Trouble: "cannot be called"}
	if r := meet(b); len(r.Gateways) != 1 || string(r.Gateways[0].Id) != string(a.Id) || r.Gateways[0].Addr != a.Addr {
		t.Fatalf("b meets %v", r.Gateways)
	}
	if r := <-heard; len(r.Gateways) != 1 || r.Gateways[0].Addr != b.Addr || r.Gateways[0].HostId != "h2" {
		t.Fatalf("a meets %v", r.Gateways)
	}
	st, err := c.Status(testCtx(t), &dirpb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var shown []string
	for _, g := range st.Gateways {
		shown = append(shown, fmt.Sprint(g.Addr, g.HostId, g.Namespaces, g.Trouble))
	}
	if want := []string{"10.0.0.1:1[n]", "10.0.0.2:1h2[n]cannot be called", "10.0.0.3:1[m]",
		"10.0.0.4:1[n m]"}; !slices.Equal(shown, want) {
		t.Errorf("operators see %q, want %q", shown, want)
	}
	b.Leaves = true
	meet(b)
	if r := meet(a); len(r.Gateways) != 0 {
		t.Fatalf("b has left, and a meets %v", r.Gateways)
	}
	for what, q := range map[string]*dirpb.MeetRequest{
		"session_ids": {Id: id("a"), Addr: "h:1"},
		"id":          {SessionIds: []uint32{n1}, Id: []byte("a"), Addr: "h:1"},
		"addr":        {SessionIds: []uint32{n1}, Id: id("a"), Addr: "h"},
		"host_id":     {SessionIds: []uint32{n1}, Id: id("a"), Addr: "h:1", HostId: strings.Repeat("h", 1000)},
		"trouble":     {SessionIds: []uint32{n1}, Id: id("a"), Addr: "h:1", Trouble: strings.Repeat("t", 1000)},
		"trouble: want at most 512 bytes of printable": {SessionIds: []uint32{n1}, Id: id("a"), Addr: "h:1",
			Trouble: "\x1b[31m"},
	} {
		_, err := c.Meet(testCtx(t), q)
		wantCode(t, err, codes.InvalidArgument, what)
	}
	_, err = c.Meet(testCtx(t), &dirpb.MeetRequest{SessionIds: []uint32{999}, Id: id("a"), Addr: "h:1"})
	wantCode(t, err, codes.NotFound, "session 999")
}

// Peers hear all messages and are believed: who may only read a namespace meets nobody of it, whatever session he
// shows, nor does he take the place of one, or drive it away.
func TestMeetWantsWrite(t *testing.T) {
	x := newTenants(t)
	ops, good, bad := x.as("operator", "ops"), x.as("gateway", "good"), x.as("gateway", "bad")
	const denied = codes.PermissionDenied
	for _, name := range []string{"a", "b"} {
		x.create(ops, &dirpb.CreateNamespaceRequest{Name: name, Owner: spiffe("gateway", "good"),
			BytesPerNode: 16 << 20})
	}
	for name, right := range map[string]dirpb.Right{"a": dirpb.Right_RIGHT_READ, "b": dirpb.Right_RIGHT_WRITE} {
		if _, err := x.grant(good, name, spiffe("gateway", "bad"), right); err != nil {
			t.Fatal(err)
		}
	}
	id := func(s string) []byte { return []byte(strings.Repeat(s, 16)) }
	meet := func(c dirpb.DirectoryClient, of string, sessions ...uint32) ([]*dirpb.PeerGateway, error) {
		r, err := c.Meet(testCtx(t), &dirpb.MeetRequest{SessionIds: sessions, Id: id(of), Addr: "10.0.0.1:1"})
		return r.GetGateways(), err
	}
	as, bs := x.opened(good, "a", false), x.opened(good, "b", false)
	met := func(what string, want int, of string, sessions ...uint32) {
		t.Helper()
		if all, err := meet(good, of, sessions...); err != nil || len(all) != want {
			t.Errorf("%s: meets %v, %v, want %d", what, all, err, want)
		}
	}
	met("alone", 0, "g", as)
	met("with two databases", 0, "h", as, bs)
	readA, readB, writeB := x.opened(bad, "a", true), x.opened(bad, "b", true), x.opened(bad, "b", false)
	for what, sessions := range map[string][]uint32{
		"bad has read in namespace \"a\", and wants write": {readA}, "and wants write": {writeB, readA},
		"is read-only": {readB},
	} {
		all, err := meet(bad, "x", sessions...)
		wantCode(t, err, denied, what)
		if len(all) > 0 {
			t.Errorf("%s: is told of %v", what, all)
		}
	}
	if _, err := meet(bad, "y", writeB); err != nil {
		t.Error(err)
	}
	// The id of another one, which it might have heard.
	_, err := meet(bad, "g", writeB)
	wantCode(t, err, denied, "another gateway")
	_, err = bad.Meet(testCtx(t), &dirpb.MeetRequest{SessionIds: []uint32{writeB}, Id: id("g"), Addr: "10.0.0.1:1",
		Leaves: true})
	wantCode(t, err, denied, "another gateway")
	met("still there", 0, "g", as)
	if st, err := ops.Status(testCtx(t), &dirpb.StatusRequest{}); err != nil || len(st.Gateways) != 3 {
		t.Errorf("%d gateways, %v, want 3", len(st.GetGateways()), err)
	}
	// Whose right was cut meets nobody any more.
	if _, err := x.grant(good, "b", spiffe("gateway", "bad"), dirpb.Right_RIGHT_READ); err != nil {
		t.Fatal(err)
	}
	if _, err := meet(bad, "y", writeB); err == nil {
		t.Error("its right was cut, and it meets others")
	}
}
