package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/internal/metrics"
)

func (a *app) devRole() role {
	return role{
		name:  "dev",
		short: "Run a whole store in one process",
		long: `Run a whole store in one process: a directory node, memory nodes, a janitor and a
gateway, for clients of this machine. It needs no configuration, keeps everything in
memory, and forgets it when it stops. With --archive it makes snapshots in a folder every
minute and at the end, and restores the newest of each namespace at the start.

There are two namespaces: default, for what must stay, and cache, which evicts. Clients of
Redis find cache in their database 0 and default in 1; those of memcached use cache, too,
unless memcached-database says otherwise.
If another process has one of the gateway's default ports, the gateway takes a free one;
the ready line says which, and the lines behind it what to type next.

With a command behind --, the store is that command's alone: it runs with the store's
address in KVD_DIRECTORY, and the store ends with it, with its exit status. The directory
then takes a free port, and all other listeners are off, unless flags say otherwise.`,
		example: `  kvd dev
  kvd dev --memnodes 3 --memory 4GiB --memcached off
  kvd dev --memcached-database sessions
  kvd dev --archive ~/kvd
  kvd dev -- kvctl bench -w B`,
		takesCommand: true,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultDev()
			return c, func(ctx context.Context) error { return a.dev(ctx, c) }
		},
	}
}

func (a *app) dev(ctx context.Context, c *config.Dev) (err error) {
	if len(a.command) > 0 {
		a.serveNothing(c)
	}
	log := a.logger(c.Log)
	closing := func(fn func() error) { err = errors.Join(err, fn()) }
	if c.Memory, err = devMemory(c, a.given("memory"), mem.Limited(), log); err != nil {
		return err
	}
	// An address that is taken is refused before anything starts.
	web, err := a.devHTTP(ctx, c, log)
	if err != nil {
		return err
	}
	defer closing(web.Close)
	l := make(listeners)
	defer closing(func() error { return l.close() }) // the gateway did, unless it never began
	if err := a.devListeners(ctx, c, l, log); err != nil {
		return err
	}
	raft := metrics.Raft() // before raft has begun
	s, err := devstore.Start(ctx, devstore.Options{
		Addr: c.Listen, Nodes: c.Memnodes, CapacityBytes: int64(c.Memory), Namespaces: devNamespaces(c),
		Lease: c.Lease, EpochInterval: c.EpochInterval, Logger: log,
		NoJanitor: true, // one that counts its jobs follows
	})
	if err != nil {
		return err
	}
	defer closing(s.Close)
	jobs := metrics.NewJanitor()
	j, err := startJanitor(janitorOptions{directory: s.Directory(), jobs: jobs, log: log})
	if err != nil {
		return err
	}
	defer closing(j.stop)
	keep, err := startDevArchive(ctx, c, s, log)
	if err != nil {
		return err
	}
	defer closing(keep.stop)
	settings := config.DefaultGateway()
	settings.Directory, settings.Databases = s.Directory(), []string{"cache", "default"}
	settings.MemcachedDatabase, settings.BufferMemory, settings.ListenPeers = c.MemcachedDB, c.BufferMemory, peersOf(l)
	g, err := openGateway(ctx, gatewayOptions{settings: settings, servers: l.servers(), devices: s.Devices(), log: log})
	if err != nil {
		return err
	}
	defer closing(g.close)
	defer notify(log, daemon.SdNotifyStopping)
	b, err := a.serveDevBroker(ctx, c, g, log)
	if err != nil {
		return err
	}
	defer closing(b.close)
	g.serve(l)
	d := s.DirectoryNodes()[0]
	doors := g.doors(web)
	doors["grpc"], doors["raft"] = d.Doors()
	cs := append(slices.Concat(g.collectors(), b.collectors(), keep.collectors()), raft, jobs, metrics.RaftLog(d),
		metrics.Directory("d1", d), metrics.Renewals(d), metrics.Listeners(doors))
	for i, n := range s.Nodes() {
		cs = append(cs, metrics.MemNode("m"+strconv.Itoa(i+1), n))
	}
	if err := web.Register(cs...); err != nil {
		return err
	}
	web.Chart(distinctCharts(gatewayCharts(), directoryCharts(), memnodeCharts())...)
	web.Serving(stopping(ctx, func() error {
		return errors.Join(directoryReady(d), g.ready(), b.ready())
	}), withTables(directoryPage(d, g.use.byName), func() []httpd.Table { return append(g.tables(), b.tables()...) }))
	if len(a.command) > 0 {
		return a.runCommand(ctx, s.Directory(), b.path())
	}
	addrs, err := devEndpoints(ctx, s)
	if err != nil {
		return err
	}
	if err := a.announceNext(log, devNext(s.Directory()[0], l, web.Addr(), c.Archive), "dev", "directory",
		strings.Join(s.Directory(), ","),
		"memnodes", strconv.Itoa(c.Memnodes), "memory", c.Memory.String(),
		"shm", addrs["shm"], "tcp", addrs["tcp"],
		"redis", l.addr("redis"), "memcached", l.addr("memcached"), "broker", b.path(),
		"http", web.Addr()); err != nil {
		return err
	}
	wait, cancel := context.WithCancel(ctx)
	defer cancel()
	g.onFail(cancel) // close says why
	err = s.Wait(wait)
	if ctx.Err() != nil {
		g.drain()
	}
	return err
}

// devNamespaces are made at the start.
func devNamespaces(c *config.Dev) []devstore.Namespace {
	all := []devstore.Namespace{
		{Name: "default", Mode: dirpb.NamespaceMode_NAMESPACE_STORE},
		{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1},
	}
	if name := c.MemcachedDB; name != "" && name != "default" && name != "cache" {
		all = append(all, devstore.Namespace{Name: name, Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1})
	}
	return all
}

// devListeners adds those of Redis's and memcached's protocol to l.
func (a *app) devListeners(ctx context.Context, c *config.Dev, l listeners, log *slog.Logger) error {
	for _, x := range []struct{ name, addr string }{{"redis", c.Redis}, {"memcached", c.Memcached}} {
		if x.addr == config.Off {
			continue
		}
		lis, err := a.devListen(ctx, x.name, x.addr, log)
		if err != nil {
			return err
		}
		l[x.name] = lis
	}
	return nil
}

// peersOf is where other gateways call the one that has these listeners: nowhere if it has no clients.
func peersOf(l listeners) string {
	if l["redis"] == nil {
		return config.Off
	}
	return anyPort
}

// serveNothing changes the defaults for a store that is one command's alone: it takes nobody's port,
// and logs errors only.
func (a *app) serveNothing(c *config.Dev) {
	for key, set := range map[string]func(){
		"listen": func() {
			c.Listen = anyPort
		}, "redis": func() { c.Redis = config.Off }, "memcached": func() { c.Memcached = config.Off },
		"broker": func() { c.Broker = config.Off },
		"http":   func() { c.HTTP = config.Off }, "log.level": func() { c.Log.Level = "error" },
	} {
		if !a.given(key) {
			set()
		}
	}
}

// commandPatience is how long a command may take to end when the store was told to.
const commandPatience = 10 * time.Second

// runCommand runs the command that the store is for, until it ends. Its failure is an *exec.ExitError,
// which run makes the exit status.
func (a *app) runCommand(ctx context.Context, directory []string, socket string) error {
	cmd := exec.CommandContext(ctx, a.command[0], a.command[1:]...)
	cmd.Env = append(os.Environ(), "KVD_DIRECTORY="+strings.Join(directory, ","))
	if socket != "" {
		cmd.Env = append(cmd.Env, "KVD_BROKER="+socket)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, a.stdout, a.stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = commandPatience
	return cmd.Run()
}

// devNext says what to type next: addresses only if they are not the ones that the
// commands use by themselves.
func devNext(directory string, l listeners, web, archive string) string {
	var b strings.Builder
	kvctl := "kvctl"
	if directory != config.DefaultDirectory {
		kvctl += " --directory " + directory
	}
	line := func(command, what string) { fmt.Fprintf(&b, "  %-40s  # %s\n", command, what) }
	b.WriteString("In another terminal:\n")
	line(kvctl+" put greeting hello", "then: "+kvctl+" get greeting")
	line(kvctl+" status", "what there is; kvctl help lists what can be done")
	if addr := l.addr("redis"); addr != "" {
		cli := "redis-cli"
		if addr != config.DefaultRedis {
			_, port, _ := net.SplitHostPort(addr)
			cli += " -p " + port
		}
		line(cli+" set greeting hello", "namespace cache")
	}
	if web != "" {
		line("http://"+web+"/", "a page to read")
	}
	if archive == config.Off {
		b.WriteString("Ctrl-C stops it, and everything is forgotten.\n")
	} else {
		b.WriteString("Ctrl-C stops it, and snapshots are in " + archive + ".\n")
	}
	return b.String()
}

// devHTTP is http, at another port if the usual one is taken.
func (a *app) devHTTP(ctx context.Context, c *config.Dev, log *slog.Logger) (*httpd.Server, error) {
	s, err := a.http(ctx, "dev", "http", c.HTTP, nil, identity.Mapping{}, log)
	if a.spare("http", err, log) {
		s, err = a.http(ctx, "dev", "http", anyPort, nil, identity.Mapping{}, log)
	}
	return s, err
}

func (a *app) devListen(ctx context.Context, key, addr string, log *slog.Logger) (net.Listener, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if a.spare(key, err, log) {
		l, err = new(net.ListenConfig).Listen(ctx, "tcp", anyPort)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	return l, nil
}

const anyPort = "127.0.0.1:0"

// spare tells whether another port will do: the default one is taken, and nobody asked
// for it.
func (a *app) spare(key string, err error, log *slog.Logger) bool {
	if !errors.Is(err, syscall.EADDRINUSE) || a.given(key) {
		return false
	}
	log.Warn("the default port is taken; another is used, see the ready line", "setting", key, "err", err)
	return true
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
