package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/gateway"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

func (a *app) gatewayRole() role {
	return role{
		name:  "gateway",
		short: "Run a gateway for clients of Redis and memcached",
		long: `Run a gateway. It speaks the protocols of Redis and memcached to programs that know
no other, and is a client of the store on their behalf. It holds nothing: any number of
them may run on the same namespaces, best one on every machine with such programs.

It makes no namespace: kvctl namespace create cache --mode cache does.

A namespace that databases names several times, or with a number (cache,cache or cache*2),
is as many databases, whose keys change together in MULTI, scripts and MOVE.

listen and listen-memcached are in clear, so they are for this machine unless insecure
says otherwise, password or not; listen-tls is for others.

password-file has the password of all of Redis's protocol; acl-file and memcached-auth-file
name users and what they may do. SIGHUP reads the three again.`,
		example: `  kvd gateway
  kvd gateway --databases 'cache*16' # sixteen databases in one namespace, as Redis has
  kvd gateway --databases cache,sessions --listen-unix /run/kvd/redis.sock --listen-memcached off
  kvd gateway --listen off --listen-tls 0.0.0.0:6380 --config /etc/kvd/gateway.yaml`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultGateway()
			return c, func(ctx context.Context) error { return a.gateway(ctx, c) }
		},
	}
}

func (a *app) gateway(ctx context.Context, c *config.Gateway) (err error) {
	log := a.logger(c.Log)
	closing := func(fn func() error) { err = errors.Join(err, fn()) }
	creds, err := a.creds(c.TLS.Options())
	if err != nil {
		return usageError{err}
	}
	web, err := a.http(ctx, "gateway", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer closing(web.Close)
	if c.HasUsers() && c.MemcachedAuthFile == "" && c.ListenMemcached != config.Off && !c.Insecure {
		// memcached's protocol would be a way around the passwords of Redis's.
		if a.given("listen-memcached") {
			return usageError{fmt.Errorf("listen-memcached is %q: Redis's protocol has passwords, and memcached's "+
				"has none: want off, a memcached-auth-file, or insecure to do without", c.ListenMemcached)}
		}
		c.ListenMemcached = config.Off
		log.Info("memcached's protocol is off: Redis's has passwords, and it has none without memcached-auth-file")
	}
	otlp, err := telemetryOf(ctx, c.OTLP, "gateway", log)
	if err != nil {
		return err
	}
	defer closing(otlp.close)
	// An address that is taken is refused before anything is asked of the store.
	l, err := a.listenGateway(ctx, c)
	if err != nil {
		return err
	}
	defer closing(l.close) // the gateway did, unless it never began
	vo, err := verbsOptions(c.RDMADevice, c.RDMA, log)
	if err != nil {
		return err
	}
	devices, err := openDevices(c.Provider, providers.Options{TLSClient: creds, Identities: c.Identity.Mapping(),
		Require: c.Require,
		Verbs:   vo})
	if err != nil {
		return err
	}
	defer closing(func() error { return providers.Close(devices) })
	g, err := openGateway(ctx, gatewayOptions{settings: c, servers: l.servers(), devices: devices, tls: creds,
		otlp: otlp, log: log})
	if err != nil {
		return err
	}
	defer closing(g.close)
	for _, f := range []struct {
		key, file string
		read      func() error
	}{{"password-file", c.PasswordFile, g.redis.ReloadPassword}, {"acl-file", c.ACLFile, g.redis.ReloadUsers},
		{"memcached-auth-file", c.MemcachedAuthFile, g.memcached.ReloadUsers}} {
		if f.file == "" {
			continue
		}
		warnOfReaders(log, f.key, f.file)
		a.reloads(f.key, func() error {
			warnOfReaders(log, f.key, f.file)
			return f.read()
		})
	}
	defer notify(log, daemon.SdNotifyStopping)
	collectors, err := otlp.export(append(g.collectors(), metrics.Listeners(g.doors(web))))
	if err != nil {
		return err
	}
	if err := web.Register(collectors...); err != nil {
		return err
	}
	g.serve(l)
	web.Chart(gatewayCharts()...)
	web.Serving(stopping(ctx, g.ready), func(context.Context) (httpd.Page, error) {
		return httpd.Page{Lead: 1, Tables: append([]httpd.Table{g.use.table()}, g.tables()...)}, nil
	})
	stop, err := meetPages(web, pageOptions{role: "gateway", name: processName(), advertise: c.AdvertisePeers,
		tls: creds, directory: c.Directory, identities: c.Identity.Mapping()})
	if err != nil {
		return err
	}
	defer stop()
	if err := a.announce(log, "gateway", "directory", strings.Join(c.Directory, ","), "databases",
		strings.Join(c.Databases, ","),
		"redis", l.addr("redis"), "unix", l.addr("unix"), "tls", l.addr("tls"), "memcached", l.addr("memcached"),
		"peers", g.peersAddr(), "http", web.Addr()); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		g.drain()
	case <-g.failed: // close says why
	}
	return nil
}

// warnOfReaders says that a file of passwords is for more than its owner and a group.
func warnOfReaders(log *slog.Logger, key, file string) {
	if st, err := os.Stat(file); err == nil && st.Mode().Perm()&0o007 != 0 {
		log.Warn("others on this machine can read a file of passwords", "setting", key, "file", file, "mode",
			st.Mode().String(), "hint", "chmod o= "+file)
	}
}

// listeners are a gateway's, by what is spoken there: redis, unix and tls, which are
// all Redis's protocol, and memcached.
type listeners map[string]net.Listener

func (l listeners) addr(name string) string {
	if l[name] == nil {
		return ""
	}
	return l[name].Addr().String()
}

// servers is how many servers the listeners are for.
func (l listeners) servers() int {
	if l["memcached"] != nil && len(l) > 1 {
		return 2
	}
	return 1
}

func (l listeners) close() error {
	var errs []error
	for _, x := range l {
		if err := x.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (a *app) listenGateway(ctx context.Context, c *config.Gateway) (l listeners, err error) {
	l = make(listeners)
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	for _, x := range []struct{ name, key, addr string }{
		{"redis", "listen", c.Listen}, {"tls", "listen-tls", c.ListenTLS},
		{"memcached", "listen-memcached", c.ListenMemcached},
	} {
		if x.addr == config.Off {
			continue
		}
		lis, err := new(net.ListenConfig).Listen(ctx, "tcp", x.addr)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", x.key, err)
		}
		l[x.name] = lis
	}
	if l["tls"] != nil {
		creds, err := a.creds(c.ListenTLSOptions())
		if err != nil {
			return nil, usageError{fmt.Errorf("listen-tls: %w", err)}
		}
		l["tls"] = tls.NewListener(l["tls"], creds)
	}
	if c.ListenUnix != config.Off {
		lis, err := listenUnix(ctx, "unix", c.ListenUnix)
		if err != nil {
			return nil, fmt.Errorf("listen-unix: %w", err)
		}
		l["unix"] = lis
	}
	return l, nil
}

// listenUnix makes a socket for this user and group, mode 0660, and its folder, mode
// 0700, if there is none. A socket that nobody serves any more is replaced.
func listenUnix(ctx context.Context, network, path string) (net.Listener, error) {
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().Type() == fs.ModeSocket {
		conn, err := new(net.Dialer).DialContext(ctx, network, path)
		switch {
		case err == nil:
			return nil, errors.Join(fmt.Errorf("%s: %w", path, syscall.EADDRINUSE), conn.Close())
		case errors.Is(err, syscall.ECONNREFUSED):
			if err := os.Remove(path); err != nil {
				return nil, err
			}
		}
	}
	// A mode given afterwards would leave a moment for others to connect. The mask is the
	// process's, which makes no other file meanwhile.
	was := syscall.Umask(0o117)
	defer syscall.Umask(was)
	return new(net.ListenConfig).Listen(ctx, network, path)
}

// gatewayOptions are what a gateway needs besides its listeners.
type gatewayOptions struct {
	settings *config.Gateway // valid; only read
	servers  int             // how many servers, Redis's and memcached's, are listened for
	devices  []*rdma.Device
	tls      *tls.Config
	otlp     *telemetry
	log      *slog.Logger
}

// runningGateway serves the protocols of others, each with a client for every namespace.
type runningGateway struct {
	o         gatewayOptions
	names     []string // of the clients' namespaces
	clients   []*client.Client
	use       *usage       // nil until all are open
	peers     *peers.Peers // nil: it is alone
	dir       *dirclient.Client
	redis     *gateway.Gateway
	memcached *memcached.Server
	wg        sync.WaitGroup
	done      chan struct{} // closed by close
	failed    chan struct{} // closed when a listener is gone
	fail      sync.Once
	err       error // after failed
}

// openGateway waits until every database can be used.
func openGateway(ctx context.Context, o gatewayOptions) (g *runningGateway, err error) {
	g = &runningGateway{o: o, done: make(chan struct{}), failed: make(chan struct{})}
	defer func() {
		if err != nil {
			err = errors.Join(err, g.close())
			g = nil
		}
	}()
	c := o.settings
	databases := c.DatabaseNames()
	var dbs []gateway.Database
	for _, name := range databases {
		cl, err := g.open(ctx, name)
		if err != nil {
			return g, err
		}
		dbs = append(dbs, gateway.Database{Name: name, Client: cl})
	}
	mcName := cmp.Or(c.MemcachedDatabase, databases[0])
	mc, err := g.open(ctx, mcName)
	if err != nil {
		return g, err
	}
	budget := netsrv.NewBudget(int64(c.BufferMemory)) // of both servers together
	maxConns := connLimit(c.MaxConnections, o.servers, true, o.log)
	if err := g.openPeers(ctx, dbs, budget); err != nil {
		return g, err
	}
	if g.redis, err = gateway.New(gateway.Options{
		Databases:     dbs,
		Password:      c.Password,
		PasswordFile:  c.PasswordFile,
		ACLFile:       c.ACLFile,
		MaxConns:      maxConns,
		MaxPerAddr:    c.MaxPerAddress,
		Budget:        budget,
		MaxValueBytes: int(c.ProtoMaxBulkLen),
		ScriptTimeout: c.ScriptTimeout,
		ScriptMemory:  int(c.ScriptMemory),
		Peers:         g.peers,
		TrackingKeys:  c.TrackingKeys,
		TrackingCheck: c.TrackingCheck,
		SlowLogTime:   cmp.Or(c.SlowlogTime, time.Nanosecond), // 0 is a default there, and here every command
		SlowLogLen:    c.SlowlogMaxLen,
		HotKeys:       c.HotKeys,
		Cluster:       c.RedisCluster,
		Answered:      o.otlp.answered("redis", ""),
		Version:       versionText(),
		Logger:        o.log,
	}); err != nil {
		return g, err
	}
	var count func(context.Context) (uint64, error)
	if db := slices.Index(databases, mcName); db >= 0 { // whose keys memcached's clients see
		count = func(context.Context) (uint64, error) { return g.redis.KeyCount(db) }
	}
	g.memcached, err = memcached.New(memcached.Options{
		Client:        mc,
		Count:         count,
		AuthFile:      c.MemcachedAuthFile,
		MaxValueBytes: int(c.MemcachedItemSize),
		MaxConns:      maxConns,
		MaxPerAddr:    c.MaxPerAddress,
		Budget:        budget,
		Answered:      o.otlp.answered("memcached", mcName),
		Logger:        o.log,
	})
	g.use = newUsage(g.names, g.clients)
	return g, err
}

// openPeers listens for other gateways that serve the same databases, and says where to the directory.
func (g *runningGateway) openPeers(ctx context.Context, dbs []gateway.Database, budget *netsrv.Budget) error {
	c, o := g.o.settings, g.o
	if c.ListenPeers == config.Off {
		return nil
	}
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", c.ListenPeers)
	if err != nil {
		return fmt.Errorf("listen-peers: %w", err)
	}
	if g.dir, err = dirclient.Open(dirclient.Options{Addrs: c.Directory, TLS: o.tls, Identities: c.Identity.Mapping(),
		Logger: o.log}); err != nil {
		return errors.Join(err, lis.Close())
	}
	g.peers, err = peers.New(peers.Options{Listener: lis, Advertise: c.AdvertisePeers, TLS: o.tls,
		Identities: c.Identity.Mapping(), Budget: budget, Logger: o.log,
		Meet: func(ctx context.Context, q *dirpb.MeetRequest) (r *dirpb.MeetReply, err error) {
			for _, d := range dbs { // one that shares its namespace, too: the numbers are to be the same
				id, err := inside.Of(d.Client).Session(ctx)
				if err != nil {
					return nil, err
				}
				q.SessionIds = append(q.SessionIds, id)
			}
			err = g.dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
				r, err = d.Meet(ctx, q)
				return err
			})
			return r, err
		}})
	if err != nil {
		return errors.Join(err, lis.Close())
	}
	return nil
}

// peersAddr is where other gateways call; empty: nowhere.
func (g *runningGateway) peersAddr() string {
	if g.peers == nil {
		return ""
	}
	return g.peers.Addr()
}

// open gives the client of a namespace.
func (g *runningGateway) open(ctx context.Context, name string) (*client.Client, error) {
	if i := slices.Index(g.names, name); i >= 0 {
		return g.clients[i], nil
	}
	defer g.tellOfWaiting(name)()
	for {
		c, err := client.Open(ctx, client.Options{
			Directory: g.o.settings.Directory, Namespace: name, Devices: g.o.devices,
			Provider: g.o.settings.Provider, Require: g.o.settings.Require,
			Name: fmt.Sprintf("kvd gateway pid %d", os.Getpid()), TLS: g.o.tls,
			Identities: client.Identities(g.o.settings.Identity), Logger: g.o.log,
			// More than processors: whoever is interrupted while it owns a lane holds up
			// only those whose keys share it.
			Lanes: 8, MirrorBytes: int(g.o.settings.Mirror),
		})
		switch {
		case err == nil:
			g.names, g.clients = append(g.names, name), append(g.clients, c)
			return c, nil
		case errors.Is(err, client.ErrNoNamespace):
			return nil, fmt.Errorf("database %q: %w: make it with kvctl namespace create %s --mode cache", name, err,
				name)
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case !errors.Is(err, client.ErrUnavailable):
			return nil, fmt.Errorf("database %q: %w", name, err)
		}
		g.o.log.Warn("waiting for the store", "database", name, "err", err)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// waitTold is when a gateway first says that it waits for its directory, waitAgain how often after
// that.
const waitTold, waitAgain = time.Second, time.Minute

// why is why the directory does not answer; nil if it does.
func (g *runningGateway) why(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, whyPatience)
	defer cancel()
	c := g.o.settings
	dir, err := dirclient.Open(dirclient.Options{Addrs: c.Directory, TLS: g.o.tls, Identities: c.Identity.Mapping()})
	if err != nil {
		return err
	}
	defer dir.Close()
	err = dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.WhoAmI(ctx, &dirpb.WhoAmIRequest{})
		return err
	})
	return dirclient.NoEffect(err)
}

// whyPatience is longer than an attempt to connect takes.
const whyPatience = 3 * time.Second

// tellOfWaiting logs that a database cannot be opened, now and then until end is called: the client
// itself waits in silence for a directory that does not answer.
func (g *runningGateway) tellOfWaiting(database string) (end func()) {
	began := time.Now()
	told := false
	ctx, stop := context.WithCancel(context.Background())
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for pause := waitTold; ; pause = waitAgain {
			select {
			case <-time.After(pause):
				told = true
				g.o.log.Warn("waiting for the directory", "database", database, "directory",
					strings.Join(g.o.settings.Directory, ","), "for", time.Since(began).Round(time.Second), "err",
					g.why(ctx))
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() {
		stop()
		if <-stopped; told {
			g.o.log.Info("waits for the directory no longer", "database", database, "waited",
				time.Since(began).Round(time.Millisecond))
		}
	}
}

// serve hands over the listeners.
func (g *runningGateway) serve(l listeners) {
	for name, lis := range l {
		serve := g.redis.Serve
		if name == "memcached" {
			serve = g.memcached.Serve
		}
		g.wg.Go(func() {
			err := serve(lis)
			select {
			case <-g.done:
			default:
				g.fail.Do(func() { g.err = fmt.Errorf("%s: %w", name, err); close(g.failed) })
			}
		})
	}
}

// onFail has fn called when a listener is gone, or when all are closed.
func (g *runningGateway) onFail(fn func()) {
	g.wg.Go(func() {
		select {
		case <-g.failed:
		case <-g.done:
		}
		fn()
	})
}

// ready tells whether every database has a session.
func (g *runningGateway) ready() error {
	select {
	case <-g.failed:
		return g.err
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for i, c := range g.clients {
		if _, err := inside.Of(c).Session(ctx); err != nil {
			return fmt.Errorf("database %q: %w", g.names[i], err)
		}
	}
	return nil
}

func (g *runningGateway) collectors() []prometheus.Collector {
	cs := slices.Concat(g.redis.Collectors(), g.memcached.Collectors())
	for i, c := range g.clients {
		cs = append(cs, metrics.Client(g.names[i], c))
	}
	return cs
}

// doors are those of a process that serves g, by listener.
func (g *runningGateway) doors(web *httpd.Server) map[string]*netsrv.Door {
	all := map[string]*netsrv.Door{"redis": g.redis.Door(), "memcached": g.memcached.Door(), "http": web.Door()}
	if g.peers != nil {
		all["peers"] = g.peers.Door()
	}
	return all
}

// drainTime is how long a gateway that stops serves clients that go on talking.
const drainTime = 5 * time.Second

// drain lets clients finish, of both protocols. Those who come anew are refused last, by close.
func (g *runningGateway) drain() {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { g.redis.Drain(ctx) })
	wg.Go(func() { g.memcached.Drain(ctx) })
	wg.Wait()
}

// close ends what openGateway began, also half of it, and says why a listener was gone.
func (g *runningGateway) close() error {
	close(g.done)
	var errs []error
	if g.peers != nil {
		errs = append(errs, g.peers.Close())
	}
	if g.dir != nil {
		errs = append(errs, g.dir.Close())
	}
	if g.redis != nil {
		errs = append(errs, g.redis.Close())
	}
	if g.memcached != nil {
		errs = append(errs, g.memcached.Close())
	}
	g.wg.Wait()
	g.use.close()
	for _, c := range g.clients {
		errs = append(errs, c.Close())
	}
	select {
	case <-g.failed:
		errs = append(errs, g.err)
	default:
	}
	return errors.Join(errs...)
}
