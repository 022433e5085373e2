package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/archive"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/metrics"
)

const (
	devEvery = time.Minute
	// devBeat is short, so that a kvd dev that was killed does not keep the next one from its folder.
	devBeat = 2 * time.Second
)

// devKeep are the snapshots that stay: some hours and days, for those who have deleted too much.
var devKeep = archive.Keep{Last: 3, Hourly: 6, Daily: 7}

// devArchive is the archive of a kvd dev; nil: it has none.
type devArchive struct {
	s       *archive.Service
	from    *source
	end     func() error // of the folder
	cancel  context.CancelFunc
	stopped chan error
}

// startDevArchive restores what the folder of c.Archive has, and archives from then on.
func startDevArchive(ctx context.Context, c *config.Dev, s *devstore.Store, log *slog.Logger) (_ *devArchive,
	err error) {
	if c.Archive == config.Off {
		return nil, nil
	}
	dir, err := filepath.Abs(c.Archive)
	if err != nil {
		return nil, err
	}
	d, end, err := archive.OpenFolder(&url.URL{Scheme: "file", Path: dir}, true)
	if err != nil {
		return nil, fmt.Errorf("archive: %w", err)
	}
	a := &devArchive{end: end, stopped: make(chan error, 1)}
	if a.from, err = openSource(sourceOptions{directory: s.Directory(), devices: s.Devices(), log: log}); err != nil {
		return nil, errors.Join(err, end())
	}
	if err := a.restore(ctx, d, log); err != nil {
		return nil, errors.Join(fmt.Errorf("archive: %w", err), a.from.dir.Close(), end())
	}
	a.s = archive.NewService(archive.ServiceOptions{Dest: d, Source: a.from, Every: devEvery, Keep: devKeep,
		Beat: devBeat, Holder: holderName(), AtEnd: true, Now: time.Now, Logger: log})
	run, cancel := context.WithCancel(context.Background())
	a.cancel = cancel
	go func() { a.stopped <- a.s.Run(run) }()
	return a, nil
}

// restore brings back the newest snapshot of each namespace, which is made if it is not there.
func (a *devArchive) restore(ctx context.Context, d archive.Destination, log *slog.Logger) error {
	all, err := archive.List(ctx, d, "")
	if err != nil {
		return err
	}
	there, err := a.from.Namespaces(ctx)
	if err != nil {
		return err
	}
	done := make(map[string]bool)
	for _, e := range all { // the newest of each namespace first
		if !e.Complete || done[e.Namespace] {
			continue
		}
		done[e.Namespace] = true
		snap, err := archive.Open(ctx, d, e.Namespace, e.ID)
		if err == nil && !slices.Contains(there, e.Namespace) {
			err = a.create(ctx, &snap.Manifest)
		}
		if err == nil {
			err = a.restoreOne(ctx, snap, log)
		}
		if err != nil {
			return fmt.Errorf("restore %s of %s: %w", e.ID, e.Namespace, err)
		}
	}
	return nil
}

// create makes the namespace of a snapshot, with half of the memory that is free.
func (a *devArchive) create(ctx context.Context, m *archive.Manifest) error {
	st, err := a.from.status(ctx)
	if err != nil {
		return err
	}
	q := &dirpb.CreateNamespaceRequest{Name: m.Namespace.Name, Mode: dirpb.NamespaceMode_NAMESPACE_STORE,
		Replicas: min(m.Namespace.Replicas, uint32(len(st.GetMap().GetNodes()))), LimitBytes: m.Namespace.LimitBytes,
		MaxValueBytes: m.Namespace.MaxValue}
	if m.Namespace.Mode == "cache" {
		q.Mode = dirpb.NamespaceMode_NAMESPACE_CACHE
	}
	ctx, cancel := context.WithTimeout(ctx, sourcePatience)
	defer cancel()
	return a.from.dir.CallOnce(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.CreateNamespace(ctx, q)
		return err
	})
}

func (a *devArchive) restoreOne(ctx context.Context, snap *archive.Snapshot, log *slog.Logger) (err error) {
	x, err := a.from.open(ctx, snap.Namespace.Name, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.Close()) }()
	r, err := archive.Restore(ctx, reader{x, inside.Of(x)}, snap, archive.RestoreOptions{Mode: archive.IfNewer,
		Now: time.Now})
	if err == nil {
		log.Info("a snapshot was restored", "namespace", snap.Namespace.Name, "id", snap.ID, "keys", r.Restored,
			"expired", r.Expired)
	}
	return err
}

// collectors are those of the archive.
func (a *devArchive) collectors() []prometheus.Collector {
	if a == nil {
		return nil
	}
	return []prometheus.Collector{metrics.Archive(a.s)}
}

// stop makes the last snapshots.
func (a *devArchive) stop() error {
	if a == nil {
		return nil
	}
	a.cancel()
	return errors.Join(<-a.stopped, a.from.dir.Close(), a.end())
}
