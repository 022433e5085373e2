package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/archive"
	"github.com/kvd-project/kvd/internal/archive/places"
	"github.com/kvd-project/kvd/internal/buildinfo"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

func (a *app) archiveRole() role {
	return role{
		name:  "archive",
		short: "Run an archive, which makes snapshots",
		long: `Run an archive. It makes snapshots of namespaces at intervals, as kvctl snapshot
create does, and takes old ones away. It only reads the store. Several may have one
destination: one works, and the others wait until it is silent for a minute.`,
		example: `  kvd archive --to file:///var/backups/kvd --every 15m --keep-last 8 --keep-daily 30
  kvd archive --to s3://backups/kvd --namespaces users,orders`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultArchive()
			return c, func(ctx context.Context) error { return a.archive(ctx, c) }
		},
	}
}

func (a *app) archive(ctx context.Context, c *config.Archive) (err error) {
	log := a.logger(c.Log)
	closing := func(fn func() error) { err = errors.Join(err, fn()) }
	creds, err := a.creds(c.TLS.Options())
	if err != nil {
		return usageError{err}
	}
	dest, closeDest, err := places.Open(c.To, true)
	if err != nil {
		return usageError{fmt.Errorf("to: %w", err)}
	}
	defer closing(closeDest)
	web, err := a.http(ctx, "archive", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer closing(web.Close)
	vo, err := verbsOptions(c.RDMADevice, c.RDMA, log)
	if err != nil {
		return err
	}
	devices, err := openDevices(c.Provider, providers.Options{TLSClient: creds, Identities: c.Identity.Mapping(),
		Require: c.Require, Verbs: vo})
	if err != nil {
		return err
	}
	defer closing(func() error { return providers.Close(devices) })
	from, err := openSource(sourceOptions{directory: c.Directory,
		namespaces: slices.Compact(slices.Sorted(slices.Values(c.Namespaces))), provider: c.Provider,
		require: c.Require, devices: devices, tls: creds, identity: c.Identity, log: log})
	if err != nil {
		return err
	}
	defer closing(from.dir.Close)
	if _, err := endpoints(ctx, from.dir); err != nil { // it is ready when a directory answers
		return err
	}
	s := archive.NewService(archive.ServiceOptions{Dest: dest, Source: from, Every: c.Every, Rate: int64(c.Rate),
		Keep:   archive.Keep{Last: c.KeepLast, Hourly: c.KeepHourly, Daily: c.KeepDaily},
		Holder: holderName(), Now: time.Now, Logger: log})
	err = web.Register(metrics.Archive(s), metrics.Listeners(map[string]*netsrv.Door{"http": web.Door()}))
	if err != nil {
		return err
	}
	defer notify(log, daemon.SdNotifyStopping)
	web.Serving(stopping(ctx, func() error { return s.Stats().Err }), archivePage(s))
	if err := a.announce(log, "archive", "directory", strings.Join(c.Directory, ","), "to", dest.String(), "http",
		web.Addr()); err != nil {
		return err
	}
	return s.Run(ctx)
}

// holderName is who holds the lock of a destination, for people.
func holderName() string {
	host, _ := os.Hostname() // empty: the pid is left
	return fmt.Sprintf("kvd on %s, pid %d", host, os.Getpid())
}

// archivePage is what a page tells of an archive.
func archivePage(s *archive.Service) func(context.Context) (httpd.Page, error) {
	return func(context.Context) (httpd.Page, error) {
		st := s.Stats()
		t := httpd.Table{Title: "Snapshots", Header: []string{"namespace", "newest done", "writes since", "failures"}}
		for name, n := range st.Namespaces {
			done := "-"
			if !n.Success.IsZero() {
				done = n.Success.UTC().Format(time.RFC3339)
			}
			t.Rows = append(t.Rows, []string{name, done, n.Since.UTC().Format(time.RFC3339), fmt.Sprint(n.Failures)})
		}
		slices.SortFunc(t.Rows, slices.Compare)
		return httpd.Page{Tables: []httpd.Table{t}}, nil
	}
}

type sourceOptions struct {
	directory, namespaces []string // namespaces: empty: all
	provider, require     string
	devices               []*rdma.Device
	tls                   *tls.Config
	identity              config.Identity
	log                   *slog.Logger
}

// source is the store that an archive reads.
type source struct {
	o   sourceOptions
	dir *dirclient.Client
}

var _ archive.Source = (*source)(nil)

func openSource(o sourceOptions) (*source, error) {
	dir, err := dirclient.Open(dirclient.Options{Addrs: o.directory, TLS: o.tls, Identities: o.identity.Mapping(),
		Logger: o.log})
	if err != nil {
		return nil, err
	}
	return &source{o, dir}, nil
}

// sourcePatience is how long a question to the directory, or the begin of a session, may take.
const sourcePatience = 30 * time.Second

func (s *source) status(ctx context.Context) (st *dirpb.StatusReply, err error) {
	ctx, cancel := context.WithTimeout(ctx, sourcePatience)
	defer cancel()
	err = s.dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		st, err = d.Status(ctx, &dirpb.StatusRequest{})
		return err
	})
	return st, err
}

// Namespaces implements [archive.Source].
func (s *source) Namespaces(ctx context.Context) ([]string, error) {
	if len(s.o.namespaces) > 0 {
		return s.o.namespaces, nil
	}
	st, err := s.status(ctx)
	var all []string
	for _, ns := range st.GetMap().GetNamespaces() {
		if !ns.GetDeleting() {
			all = append(all, ns.GetName())
		}
	}
	return all, err
}

// reader is a session with its tools.
type reader struct {
	*client.Client
	inside.Tools
}

// Open implements [archive.Source].
func (s *source) Open(ctx context.Context, name string) (archive.Store, archive.Manifest, func() error, error) {
	st, err := s.status(ctx)
	if err != nil {
		return nil, archive.Manifest{}, nil, err
	}
	m, ok := archive.ManifestOf(st, name, buildinfo.Line("kvd", version))
	if !ok {
		return nil, m, nil, fmt.Errorf("%w: there is none of that name", client.ErrNoNamespace)
	}
	c, err := s.open(ctx, name, true)
	if err != nil {
		return nil, m, nil, err
	}
	return reader{c, inside.Of(c)}, m, c.Close, nil
}

func (s *source) open(ctx context.Context, name string, readOnly bool) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, sourcePatience)
	defer cancel()
	return client.Open(ctx, client.Options{Directory: s.o.directory, Namespace: name, Devices: s.o.devices,
		Provider: s.o.provider, Require: s.o.require, Name: fmt.Sprintf("kvd archive pid %d", os.Getpid()),
		TLS:        s.o.tls,
		Identities: client.Identities(s.o.identity), ReadOnly: readOnly, Logger: s.o.log})
}
