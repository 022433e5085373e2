package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/tier"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma/tcp"
)

func (a *app) tierRole() role {
	return role{
		name:  "tier",
		short: "Run a tier node",
		long: `Run a tier node. It has a folder on a disk for values of the namespaces that name it,
which sessions read as they read memory. It moves no value there yet.

The folder is its own. Another process with a copy of it is refused.`,
		example: `  kvd tier --name t1 --folder /var/lib/kvd-tier --size 2TiB --directory 127.0.0.1:7400`,
		hidden:  true,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultTier()
			return c, func(ctx context.Context) error { return a.tier(ctx, c) }
		},
	}
}

func (a *app) tier(ctx context.Context, c *config.Tier) (err error) {
	log := a.logger(c.Log)
	closing := func(fn func() error) { err = errors.Join(err, fn()) }
	creds, err := a.creds(ofRole(c.TLS, c.Identity, identity.Tier))
	if err != nil {
		return usageError{err}
	}
	web, err := a.http(ctx, "tier", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer closing(web.Close)
	// Its answer has the key by which tokens are believed.
	dir, err := dirclient.Open(dirclient.Options{Addrs: c.Directory, TLS: creds, Identities: c.Identity.Mapping(),
		Logger: log})
	if err != nil {
		return err
	}
	defer closing(dir.Close)
	door, err := tcp.NewDoor(netsrv.Limits{MaxConns: connLimit(c.MaxConnections, 1, a.given("max-connections"), log),
		MaxPerAddr: c.MaxPerAddress, Logger: log})
	if err != nil {
		return err
	}
	device, err := providers.Open("tcp", providers.Options{TLSServer: creds, TCPDoor: door})
	if err != nil {
		return err
	}
	defer closing(device.Close)
	s, err := tier.Open(tier.Options{Name: c.Name, Folder: c.Folder, SizeBytes: int64(c.Size), Device: device,
		Addr: c.ListenTCP, Advertise: c.AdvertiseTCP, Directory: dir, Domain: c.Domain, Version: versionText(),
		Identities: c.Identity.Mapping(), Logger: log})
	if err != nil {
		return err
	}
	defer closing(s.Close)
	defer notify(log, daemon.SdNotifyStopping)
	err = web.Register(metrics.Tier(s), metrics.Listeners(map[string]*netsrv.Door{"tcp": door, "http": web.Door()}))
	if err != nil {
		return err
	}
	web.Serving(stopping(ctx, func() error { return s.Stats().Err }), tierPage(s))
	if err := s.Ready(ctx); err != nil {
		return err
	}
	if err := a.announce(log, "tier", "name", c.Name, "directory", strings.Join(c.Directory, ","), "folder", c.Folder,
		"tcp", s.Addr(), "volume", fmt.Sprint(s.Volume()), "http", web.Addr()); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case <-s.Done():
		return s.Err()
	}
}

// tierPage is what a page tells of a tier node.
func tierPage(s *tier.Service) func(context.Context) (httpd.Page, error) {
	return func(context.Context) (httpd.Page, error) {
		t := httpd.Table{Title: "Namespaces", Header: []string{"namespace", "files", "live", "written"}}
		for _, n := range s.Stats().Namespaces {
			if n.Err == nil {
				t.Rows = append(t.Rows, []string{n.Name, units.Bytes(uint64(n.Bytes)),
					units.Bytes(uint64(n.LiveBytes)), units.Bytes(n.WrittenBytes)})
			}
		}
		return httpd.Page{Tables: []httpd.Table{t}}, nil
	}
}
