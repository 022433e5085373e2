package main

import (
	"cmp"
	"context"
	"errors"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/server"
)

func (a *app) directoryRole() role {
	return role{
		name:  "directory",
		short: "Run a directory node",
		long: `Run a directory node. The directory is one, three or five of them. It knows memory
nodes, namespaces and sessions, and takes no part in reading or writing keys.

The first node starts the cluster with --bootstrap, the others --join it. Started
again, a node remembers its cluster and needs neither. Where all nodes are told the same,
as by a container engine, --bootstrap and --join go together, and --join names them all:
the first of them starts the cluster once the others have said that they are in none.`,
		example: `  kvd directory --id d1 --data-dir /var/lib/kvd --bootstrap
  kvd directory --id d2 --data-dir /var/lib/kvd2 --listen 127.0.0.1:7410 --raft-listen 127.0.0.1:7411 --join 127.0.0.1:7400`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultDirectoryNode()
			return c, func(ctx context.Context) error { return a.directory(ctx, c) }
		},
	}
}

func (a *app) directory(ctx context.Context, c *config.Directory) (err error) {
	log := a.logger(c.Log)
	collectSeldom(log)
	scrub := c.ScrubInterval
	if scrub == 0 {
		scrub = -1 // never; 0 is the library's default
	}
	creds, err := a.creds(ofRole(c.TLS, c.Identity, identity.Directory))
	if err != nil {
		return usageError{err}
	}
	web, err := a.http(ctx, "directory", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, web.Close()) }()
	raft := metrics.Raft() // before raft has begun
	n, err := server.Open(ctx, server.Options{
		ID: c.ID, DataDir: c.DataDir,
		GRPCAddr: c.Listen, GRPCAdvertise: c.Advertise, RaftAddr: c.RaftListen, RaftAdvertise: c.RaftAdvertise,
		MaxConns: connLimit(c.MaxConnections, 1, a.given("max-connections"), log), MaxConnsPerAddr: c.MaxPerAddress,
		Bootstrap: c.Bootstrap, Join: c.Join,
		Lease: c.Lease, EpochInterval: c.EpochInterval, ElectionTimeout: c.ElectionTimeout, ScrubInterval: scrub,
		LastCopyWait: c.LastCopyWait,
		TLS:          creds, Identities: c.Identity.Mapping(), Insecure: c.Insecure, Version: versionText(),
		Logger: log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	defer notify(log, daemon.SdNotifyStopping)
	doors := map[string]*netsrv.Door{"http": web.Door()}
	doors["grpc"], doors["raft"] = n.Doors()
	if err := web.Register(raft, metrics.RaftLog(n), metrics.Directory(c.ID, n), metrics.Renewals(n),
		metrics.Listeners(doors)); err != nil {
		return err
	}
	web.Chart(directoryCharts()...)
	web.Serving(stopping(ctx, func() error { return directoryReady(n) }), directoryPage(n, (*usage)(nil).byName))
	stop, err := meetPages(web, pageOptions{role: "directory", name: c.ID, advertise: c.Advertise, tls: creds,
		directory: []string{cmp.Or(c.Advertise, n.Addr())}, identities: c.Identity.Mapping()})
	if err != nil {
		return err
	}
	defer stop()
	if err := n.Ready(ctx); err != nil {
		return err
	}
	if err := a.announce(log, "directory", "id", c.ID, "directory", n.Addr(), "http", web.Addr(), "data-dir",
		c.DataDir); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-n.Done(): // Close says why
	}
	return nil
}
