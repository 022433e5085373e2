package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/verbs"
)

func (a *app) janitorRole() role {
	return role{
		name:  "janitor",
		short: "Run a janitor",
		long: `Run a janitor. It does the store's background jobs with ordinary verbs, as any
client could: it fills new copies, splits and moves shards, empties extents, and
checks and repairs records. It holds nothing: any number of them may run, and one
that stops is replaced by the next to ask for work.

Every memory node runs one of its own unless its setting janitor is false.`,
		example: `  kvd janitor
  kvd janitor --directory 127.0.0.1:7400,127.0.0.1:7410 --window 64`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultJanitor()
			return c, func(ctx context.Context) error { return a.janitor(ctx, c) }
		},
	}
}

func (a *app) janitor(ctx context.Context, c *config.Janitor) (err error) {
	log := a.logger(c.Log)
	creds, err := a.creds(c.TLS.Options())
	if err != nil {
		return usageError{err}
	}
	web, err := a.http(ctx, "janitor", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, web.Close()) }()
	dir, err := dirclient.Open(dirclient.Options{Addrs: c.Directory, TLS: creds, Identities: c.Identity.Mapping(),
		Logger: log})
	if err != nil {
		return err
	}
	_, err = endpoints(ctx, dir) // it is ready when a directory answers
	if err := errors.Join(err, dir.Close()); err != nil {
		return err
	}
	jobs := metrics.NewJanitor()
	if err := web.Register(jobs, metrics.Listeners(map[string]*netsrv.Door{"http": web.Door()})); err != nil {
		return err
	}
	vo, err := verbsOptions(c.RDMADevice, c.RDMA, log)
	if err != nil {
		return err
	}
	j, err := startJanitor(janitorOptions{directory: c.Directory, provider: c.Provider, require: c.Require,
		verbs: vo,
		tls:   creds, identity: c.Identity, poll: c.Poll, window: c.Window, jobs: jobs, log: log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, j.stop()) }()
	defer notify(log, daemon.SdNotifyStopping)
	web.Serving(stopping(ctx, func() error {
		select {
		case <-j.done:
			return errors.New("the janitor stopped")
		default:
			return nil
		}
	}), nil)
	stop, err := meetPages(web, pageOptions{role: "janitor", name: processName(), tls: creds, directory: c.Directory,
		identities: c.Identity.Mapping()})
	if err != nil {
		return err
	}
	defer stop()
	if err := a.announce(log, "janitor", "directory", strings.Join(c.Directory, ","), "http", web.Addr()); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-j.done: // stop says why
	}
	return nil
}

type janitorOptions struct {
	directory []string
	provider  string // empty: any
	require   string // as in client.Options
	verbs     verbs.Options
	tls       *tls.Config
	identity  config.Identity
	poll      time.Duration // 0: the janitor's own default
	window    int           // 0: the janitor's own default
	jobs      *metrics.Janitor
	log       *slog.Logger
}

// runningJanitor is a janitor of this process, with devices of its own.
type runningJanitor struct {
	cancel  context.CancelFunc
	done    chan struct{} // closed when it has stopped
	err     error         // after done
	devices []*rdma.Device
}

func startJanitor(o janitorOptions) (j *runningJanitor, err error) {
	j = &runningJanitor{done: make(chan struct{})}
	if j.devices, err = openDevices(o.provider, providers.Options{TLSClient: o.tls, Identities: o.identity.Mapping(),
		Require: o.require, Verbs: o.verbs}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	j.cancel = cancel
	go func() {
		defer close(j.done)
		j.err = janitor.Run(ctx, janitor.Options{Directory: o.directory, Devices: j.devices, Provider: o.provider,
			Require: o.require, TLS: o.tls, Identities: client.Identities(o.identity),
			Logger: o.log, Poll: o.poll, Window: o.window,
			Done: func(kind dirpb.JobKind, took time.Duration, report *dirpb.JobReport, err error) {
				o.jobs.Count(kind, jobResult(ctx, err), took, report.GetTransferredBytes())
			}})
		if j.err != nil {
			o.log.Error("the janitor stopped: background jobs are left to others", "err", j.err)
		}
	}()
	return j, nil
}

// jobResult tells how a job ended with err; ctx is the janitor's.
func jobResult(ctx context.Context, err error) metrics.JobResult {
	switch {
	case err == nil:
		return metrics.JobDone
	case ctx.Err() != nil, errors.Is(err, janitor.ErrGone):
		return metrics.JobGivenUp
	default:
		return metrics.JobFailed
	}
}

// stop ends the janitor and says why it had stopped by itself, if it had.
func (j *runningJanitor) stop() error {
	j.cancel()
	<-j.done
	return errors.Join(j.err, providers.Close(j.devices))
}

// verbsOptions are what the settings say of the RDMA adapter.
func verbsOptions(device string, r config.RDMA, log *slog.Logger) (verbs.Options, error) {
	o := verbs.Options{Device: device, Logger: log, MTU: r.MTU, PeerTimeout: r.PeerTimeout, Fabric: verbs.Fabric{
		TrafficClass: r.TrafficClass, ServiceLevel: r.ServiceLevel, PKeyIndex: r.PKeyIndex, GIDType: r.GIDType,
		GIDAddress: r.GIDAddress, RetryCount: r.RetryCount, RNRRetry: r.RNRRetry, HopLimit: r.HopLimit,
		FlowLabel: r.FlowLabel}}
	one := o
	for _, one.Device = range append(config.List(device), "") {
		if err := one.Validate(); err != nil {
			return o, usageError{fmt.Errorf("rdma: %w", err)}
		}
	}
	return o, nil
}

// openDevices opens what clients of this process reach memory nodes by: one provider,
// or, if it is empty, all.
func openDevices(provider string, o providers.Options) ([]*rdma.Device, error) {
	if err := providers.CheckRequire(o.Require, provider); err != nil {
		return nil, usageError{fmt.Errorf("require %q: %w", o.Require, err)}
	}
	devices, err := providers.OpenFor(provider, o)
	if errors.Is(err, providers.ErrUnknown) {
		return nil, usageError{fmt.Errorf("provider: %w", err)}
	}
	return devices, err
}
