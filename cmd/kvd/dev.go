package main

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
)

func (a *app) devRole() role {
	return role{
		name:  "dev",
		short: "Run a whole store in one process",
		long: `Run a whole store in one process: a directory node, memory nodes and a janitor, for
clients of this machine. It needs no configuration, keeps everything in memory, and
forgets it when it stops.`,
		example: `  kvd dev
  kvd dev --memnodes 3 --memory 4GiB`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultDev()
			return c, func(ctx context.Context) error { return a.dev(ctx, c) }
		},
	}
}

func (a *app) dev(ctx context.Context, c *config.Dev) (err error) {
	log := c.Log.Logger(a.stderr)
	s, err := devstore.Start(ctx, devstore.Options{
		Addr: c.Listen, Nodes: c.Memnodes, CapacityBytes: int64(c.Memory),
		Lease: c.Lease, EpochInterval: c.EpochInterval, Logger: log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	defer notify(log, daemon.SdNotifyStopping)
	addrs, err := devEndpoints(ctx, s)
	if err != nil {
		return err
	}
	if err := a.announce(log, "dev", "directory", strings.Join(s.Directory(), ","),
		"memnodes", strconv.Itoa(c.Memnodes), "memory", c.Memory.String(),
		"shm", addrs["shm"], "tcp", addrs["tcp"]); err != nil {
		return err
	}
	return s.Wait(ctx)
}

// devEndpoints joins the memory nodes' addresses by provider.
func devEndpoints(ctx context.Context, s *devstore.Store) (map[string]string, error) {
	dir, err := dirclient.Open(dirclient.Options{Addrs: s.Directory()})
	if err != nil {
		return nil, err
	}
	all, err := endpoints(ctx, dir)
	if err := errors.Join(err, dir.Close()); err != nil {
		return nil, err
	}
	lists := make(map[string][]string)
	for _, node := range slices.Sorted(maps.Keys(all)) {
		for p, addr := range all[node] {
			lists[p] = append(lists[p], addr)
		}
	}
	joined := make(map[string]string)
	for p, l := range lists {
		joined[p] = strings.Join(l, ",")
	}
	return joined, nil
}
