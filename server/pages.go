package server

import (
	"cmp"
	"context"
	"encoding/binary"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/rights"
)

// pages knows where the pages for people are that processes have told this leader of. As a meeting it is soft, and
// nothing but links depends on it.
type pages struct {
	mu struct {
		sync.Mutex
		all map[string]*knownPage // by the process's id
	}
}

// knownPage is where a process has its page.
type knownPage struct {
	*dirpb.PageAt
	host  string    // the machine, if nobody else can call there
	until time.Time // forgotten then
}

const (
	// A process tells of its page every 5 s.
	pageTime                 = 15 * time.Second
	maxPages                 = 1024
	pageIDBytes, maxPageText = 16, 256
)

// Pages registers where a process has its page for people, and tells it where the others have theirs. All of it is by
// the processes' own account but their roles, if they show certificates.
func (n *Node) Pages(ctx context.Context, q *dirpb.PagesRequest) (*dirpb.PagesReply, error) {
	l, err := n.leader()
	if err != nil {
		return nil, err
	}
	addr, err := checkPage(ctx, q)
	if err != nil {
		return nil, err
	}
	x := &knownPage{PageAt: &dirpb.PageAt{Role: q.Role, Name: q.Name, Addr: addr, Tls: q.Tls},
		until: time.Now().Add(pageTime)}
	if loops(addr) {
		x.host = cmp.Or(q.HostId, "?") // an id that no machine has
	}
	if !l.pages.add(string(q.Id), x) {
		return nil, status.Errorf(codes.ResourceExhausted, "%d pages are registered, want at most %d", maxPages,
			maxPages)
	}
	reply := &dirpb.PagesReply{Pages: l.pages.others(string(q.Id), q.HostId)}
	if reply.News = newsOfPages(reply.Pages); reply.News == q.News {
		reply.Pages = nil
	}
	return reply, nil
}

// checkPage gives the address of the page, with a host.
func checkPage(ctx context.Context, q *dirpb.PagesRequest) (addr string, err error) {
	bad := func(format string, args ...any) (string, error) {
		return "", status.Errorf(codes.InvalidArgument, format, args...)
	}
	if len(q.Id) != pageIDBytes {
		return bad("id: %d bytes, want %d", len(q.Id), pageIDBytes)
	}
	for _, f := range []struct{ field, text string }{{"name", q.Name}, {"addr", q.Addr}, {"host_id", q.HostId}} {
		if len(f.text) > maxPageText {
			return bad("%s: %d bytes, want at most %d", f.field, len(f.text), maxPageText)
		}
	}
	var role identity.Role
	for _, r := range []identity.Role{identity.Directory, identity.MemNode, identity.Gateway, identity.Janitor} {
		if r.String() == q.Role {
			role = r
		}
	}
	if role == 0 {
		return bad("role: %.64q, want directory, memnode, gateway or janitor", q.Role)
	}
	if i := rights.Caller(ctx); i.String() != "" && i.Role != role {
		return "", status.Errorf(codes.PermissionDenied, "role: %s is no %s", i, q.Role)
	}
	host, port, err := net.SplitHostPort(q.Addr)
	if err != nil {
		return bad("addr: %.64q, want host:port", q.Addr)
	}
	if p, err := strconv.ParseUint(port, 10, 16); err != nil || p == 0 {
		return bad("addr: %.64q, want a port from 1 to 65535", q.Addr)
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		from, err := netip.ParseAddrPort(remoteOf(ctx))
		if err != nil {
			return bad("addr: %.64q, want a host that others can call", q.Addr)
		}
		host = from.Addr().Unmap().WithZone("").String()
	}
	return net.JoinHostPort(host, port), nil
}

// loops tells whether an address means another machine on each.
func loops(addr string) bool {
	host, _, _ := net.SplitHostPort(addr)
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// add registers a page, or reports that there are too many.
func (p *pages) add(id string, x *knownPage) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.all[id] == nil && len(p.mu.all) >= maxPages {
		p.forgetLocked()
		if len(p.mu.all) >= maxPages {
			return false
		}
	}
	if p.mu.all == nil {
		p.mu.all = make(map[string]*knownPage)
	}
	p.mu.all[id] = x
	return true
}

func (p *pages) forgetLocked() {
	now := time.Now()
	for id, x := range p.mu.all {
		if now.After(x.until) {
			delete(p.mu.all, id)
		}
	}
}

// others are the pages but one that a process of a machine can lead to, in order. Of a process that was started again
// there is one.
func (p *pages) others(id, host string) (list []*dirpb.PageAt) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forgetLocked()
	me := p.mu.all[id]
	for other, x := range p.mu.all {
		if other != id && (me == nil || x.Addr != me.Addr) && (x.host == "" || x.host == host) {
			list = append(list, x.PageAt)
		}
	}
	slices.SortFunc(list, func(a, b *dirpb.PageAt) int {
		return cmp.Or(cmp.Compare(a.Role, b.Role), cmp.Compare(len(a.Name), len(b.Name)), cmp.Compare(a.Name, b.Name),
			cmp.Compare(a.Addr, b.Addr))
	})
	return slices.CompactFunc(list, func(a, b *dirpb.PageAt) bool {
		return a.Addr == b.Addr && a.Name == b.Name && a.Role == b.Role
	})
}

// newsOfPages sums up a list, never 0.
func newsOfPages(list []*dirpb.PageAt) uint64 {
	h := fnv.New64a()
	for _, x := range list {
		for _, s := range []string{x.Role, x.Name, x.Addr, strconv.FormatBool(x.Tls)} {
			_, _ = h.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(s))), s...)) // never fails
		}
	}
	return h.Sum64() | 1
}
