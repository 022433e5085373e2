package server

import (
	"context"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
)

func pageRequest(id, name, addr, host string) *dirpb.PagesRequest {
	return &dirpb.PagesRequest{Id: []byte(strings.Repeat(id, 16)), Role: "memnode", Name: name, Addr: addr,
		HostId: host}
}

// Processes hear of each other's pages, of those on loopback if they are on the same machine, and nothing once they
// know.
func TestPages(t *testing.T) {
	c := dial(t, single(t, vfs.NewMem(), forever))
	ask := func(q *dirpb.PagesRequest) (names string, news uint64) {
		t.Helper()
		r, err := c.Pages(testCtx(t), q)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range r.Pages {
			names += p.Role + " " + p.Name + " " + p.Addr + "; "
		}
		return names, r.News
	}
	a, b, l := pageRequest("a", "m10", "10.0.0.1:1", "h1"), pageRequest("b", "m2", "m2.example:1", "h2"),
		pageRequest("l", "m3", "127.0.0.1:1", "h1")
	wild := pageRequest("w", "m4", "[::]:2", "h2") // the request comes from here, which is h2, by its own account
	for _, tc := range []struct {
		q    *dirpb.PagesRequest
		want string
	}{
		{a, ""},
		{b, "memnode m10 10.0.0.1:1; "},
		{l, "memnode m2 m2.example:1; memnode m10 10.0.0.1:1; "},
		{wild, "memnode m2 m2.example:1; memnode m10 10.0.0.1:1; "},
		{a, "memnode m2 m2.example:1; memnode m3 127.0.0.1:1; "},
		{b, "memnode m4 127.0.0.1:2; memnode m10 10.0.0.1:1; "},
		// the one before it, at its address, is gone
		{pageRequest("x", "again", "10.0.0.1:1", ""), "memnode m2 m2.example:1; "},
	} {
		names, news := ask(tc.q)
		if names != tc.want || news == 0 {
			t.Errorf("%s hears of %q and %d, want %q", tc.q.Name, names, news, tc.want)
		}
		tc.q.News = news
		if names, again := ask(tc.q); names != "" || again != news {
			t.Errorf("%s hears of %q again", tc.q.Name, names)
		}
	}
	for what, change := range map[string]func(*dirpb.PagesRequest){
		"id":                   func(q *dirpb.PagesRequest) { q.Id = q.Id[1:] },
		"role":                 func(q *dirpb.PagesRequest) { q.Role = "operator" },
		"name":                 func(q *dirpb.PagesRequest) { q.Name = strings.Repeat("x", 257) },
		"addr":                 func(q *dirpb.PagesRequest) { q.Addr = "javascript" },
		"a port":               func(q *dirpb.PagesRequest) { q.Addr = "javascript:alert(1)" },
		"port from 1 to 65535": func(q *dirpb.PagesRequest) { q.Addr = "h:0" },
		"host_id":              func(q *dirpb.PagesRequest) { q.HostId = strings.Repeat("x", 257) },
	} {
		q := pageRequest("z", "z", "h:1", "h")
		change(q)
		_, err := c.Pages(testCtx(t), q)
		wantCode(t, err, codes.InvalidArgument, what)
	}
}

// A page is forgotten when its process is not heard any more, and there are so many at most.
func TestPagesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pages
		page := func(name string) *knownPage {
			return &knownPage{PageAt: &dirpb.PageAt{Name: name, Addr: name}, until: time.Now().Add(pageTime)}
		}
		for i := range maxPages {
			if !p.add(strings.Repeat("i", i), page(strings.Repeat("n", i))) {
				t.Fatalf("page %d is refused", i)
			}
		}
		if p.add("more", page("more")) || !p.add("", page("")) {
			t.Error("one more is let in, or one that is known is not")
		}
		if n := len(p.others("", "")); n != maxPages-1 {
			t.Errorf("%d others", n)
		}
		time.Sleep(pageTime / 2)
		p.add("", page(""))
		time.Sleep(pageTime/2 + 1)
		if n := len(p.others("else", "")); n != 1 || !p.add("more", page("more")) {
			t.Errorf("%d are left", n)
		}
	})
}

// An address that stands for all of a process's own is where its request comes from.
func TestPageAddress(t *testing.T) {
	for _, tc := range []struct{ from, addr, want string }{
		{"192.0.2.7:999", "0.0.0.0:80", "192.0.2.7:80"}, {"192.0.2.7:999", ":80", "192.0.2.7:80"},
		{"192.0.2.7:999", "h:80", "h:80"},
		{"[2001:db8::1]:999", "[::]:80", "[2001:db8::1]:80"}, {"[::ffff:192.0.2.7]:999", "[::]:80", "192.0.2.7:80"},
		{"[fe80::1%lo]:9", "[::]:80", "[fe80::1]:80"},
	} {
		from, err := net.ResolveTCPAddr("tcp", tc.from)
		if err != nil {
			t.Fatal(err)
		}
		ctx := peer.NewContext(context.Background(), &peer.Peer{Addr: from})
		if got, err := checkPage(ctx, pageRequest("a", "m", tc.addr, "")); err != nil || got != tc.want {
			t.Errorf("%s from %s: %q, %v", tc.addr, tc.from, got, err)
		}
	}
	_, err := checkPage(context.Background(), pageRequest("a", "m", "0.0.0.0:80", ""))
	wantCode(t, err, codes.InvalidArgument, "host")
}

// A process that shows a certificate tells of pages of its own role alone.
func TestPagesOfRoles(t *testing.T) {
	a := identitytest.New(t)
	n := directoryNode(t, a, Options{})
	c := dirpb.NewDirectoryClient(dialTLS(t, n, a.Config(a.Role("gateway", "it"))))
	q := pageRequest("a", "m", "h:1", "")
	_, err := c.Pages(testCtx(t), q)
	wantCode(t, err, codes.PermissionDenied, "gateway/it is no memnode")
	q.Role = "gateway"
	if _, err := c.Pages(testCtx(t), q); err != nil {
		t.Error(err)
	}
}
