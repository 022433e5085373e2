package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/identity"
)

// pagesPause is between two times that a process tells the directory of its page. The directory forgets it after 15 s.
const pagesPause = 5 * time.Second

// pageOptions say which page a process has.
type pageOptions struct {
	role, name string
	// advertise is host:port or a host that others call this process by, if it has a setting for that; its host stands
	// for an http-listen of all addresses.
	advertise  string
	tls        *tls.Config
	directory  []string
	identities identity.Mapping
}

// meetPages tells the directory of web's page and has it lead to those of the other processes, until stop is called. If
// web is nil it does nothing.
func meetPages(web *httpd.Server, o pageOptions) (stop func(), err error) {
	if web == nil {
		return func() {}, nil
	}
	// That the directory does not answer is the role's to tell.
	dir, err := dirclient.Open(dirclient.Options{Addrs: o.directory, TLS: o.tls, Identities: o.identities})
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var links []httpd.Link
	web.Linked(func() []httpd.Link {
		mu.Lock()
		defer mu.Unlock()
		return links
	})
	q := &dirpb.PagesRequest{Id: []byte(rand.Text()[:16]), Role: o.role, Name: o.name,
		Addr: pageAddr(web.Addr(), o.advertise), Tls: o.tls != nil, HostId: hostid.ID()}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if r := askPages(ctx, dir, q); r != nil && r.News != q.News {
				mu.Lock()
				links, q.News = linksTo(r.Pages), r.News
				mu.Unlock()
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(pagesPause):
			}
		}
	}()
	return func() {
		cancel()
		<-done
		_ = dir.Close() // nobody waits for an answer
	}, nil
}

// askPages gives the directory's answer, or nil: it may be of a version that does not know of pages.
func askPages(ctx context.Context, dir *dirclient.Client, q *dirpb.PagesRequest) (r *dirpb.PagesReply) {
	ctx, cancel := context.WithTimeout(ctx, pagesPause)
	defer cancel()
	err := dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		r, err = d.Pages(ctx, q)
		return err
	})
	if err != nil {
		return nil
	}
	return r
}

func linksTo(pages []*dirpb.PageAt) []httpd.Link {
	var all []httpd.Link
	for _, p := range pages {
		all = append(all, httpd.Link{Role: p.GetRole(), Name: p.GetName(), Addr: p.GetAddr(), TLS: p.GetTls()})
	}
	return all
}

// processName names a process that has no name of its own.
func processName() string {
	host, _ := os.Hostname() // empty: the address is left to tell it
	return fmt.Sprintf("%s pid %d", host, os.Getpid())
}

// pageAddr is where others find a page that is served at listen.
func pageAddr(listen, advertise string) string {
	host, port, err := net.SplitHostPort(listen)
	if err != nil || advertise == "" {
		return listen
	}
	if ip, err := netip.ParseAddr(host); err == nil && !ip.IsUnspecified() {
		return listen
	}
	if h, _, err := net.SplitHostPort(advertise); err == nil {
		advertise = h
	}
	return net.JoinHostPort(advertise, port)
}
