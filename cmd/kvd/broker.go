package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/broker"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/overview"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/rdma"
)

func (a *app) brokerRole() role {
	return role{
		name:  "broker",
		short: "Run a broker for programs in C and Python of this machine",
		long: `Run a broker. Programs of this machine that are linked with libkvd, or use the Python
package kvd, connect to its socket. They share memory with it: values go straight between
that and memory nodes, and each operation has a verdict.

A broker is one tenant's: all its programs have the rights of its certificate, in its
namespaces. Run one for each tenant, with a socket of its own. It holds nothing: when it
is started again its programs go on.`,
		example: `  kvd broker
  kvd broker --namespaces models,default --users trainer,1001
  kvd broker --listen /run/kvd-team/broker.sock --secret-file /etc/kvd/team-secret`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultBrokerNode()
			return c, func(ctx context.Context) error { return a.broker(ctx, c) }
		},
	}
}

func (a *app) broker(ctx context.Context, c *config.Broker) (err error) {
	log := a.logger(c.Log)
	closing := func(fn func() error) { err = errors.Join(err, fn()) }
	creds, err := a.creds(c.TLS.Options())
	if err != nil {
		return usageError{err}
	}
	uids, err := userNumbers(c.Users)
	if err != nil {
		return usageError{fmt.Errorf("users: %w", err)}
	}
	secret, err := readSecret(c.SecretFile)
	if err != nil {
		return usageError{fmt.Errorf("secret-file: %w", err)}
	}
	if c.SecretFile != "" {
		warnOfReaders(log, "secret-file", c.SecretFile)
	}
	web, err := a.http(ctx, "broker", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer closing(web.Close)
	// A socket that is taken is refused before anything is asked of the store.
	lis, err := listenBroker(ctx, c.Listen, len(c.Users) > 0)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	defer closing(func() error { return closeListener(lis) })
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
	b, err := openBroker(ctx, brokerOptions{settings: c, listener: lis, uids: uids, secret: secret, devices: devices,
		tls: creds, log: log, page: brokerPage(ctx, web, c)})
	if err != nil {
		return err
	}
	defer closing(b.close)
	defer notify(log, daemon.SdNotifyStopping)
	if err := web.Register(b.collectors()...); err != nil {
		return err
	}
	web.Serving(stopping(ctx, b.ready), func(context.Context) (httpd.Page, error) {
		return httpd.Page{Lead: 1, Tables: append([]httpd.Table{b.use.table()}, b.tables()...)}, nil
	})
	stop, err := meetPages(web, pageOptions{role: "broker", name: processName(), tls: creds, directory: c.Directory,
		identities: c.Identity.Mapping()})
	if err != nil {
		return err
	}
	defer stop()
	if err := a.announce(log, "broker", "directory", strings.Join(c.Directory, ","), "namespaces",
		strings.Join(c.Namespaces, ","), "socket", c.Listen, "http", web.Addr()); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// brokerPage is where operators find a broker's page; empty: it has none. Of an http-listen of all addresses it is the
// one by which this machine reaches the directory.
func brokerPage(ctx context.Context, web *httpd.Server, c *config.Broker) string {
	if web == nil {
		return ""
	}
	own := ""
	if conn, err := new(net.Dialer).DialContext(ctx, "udp", c.Directory[0]); err == nil { // which sends nothing
		own = conn.LocalAddr().String()
		_ = conn.Close()
	}
	scheme := "http"
	if c.TLS.CA != "" {
		scheme = "https"
	}
	return scheme + "://" + pageAddr(web.Addr(), own)
}

// userNumbers are the users' numbers; nil if there are none.
func userNumbers(users []string) (uids []uint32, err error) {
	for _, name := range users {
		number := name
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			u, err := user.Lookup(name)
			if err != nil {
				return nil, err
			}
			number = u.Uid
		}
		n, err := strconv.ParseUint(number, 10, 32)
		if err != nil {
			return nil, err
		}
		uids = append(uids, uint32(n))
	}
	return uids, nil
}

// readSecret is the only line of a file.
func readSecret(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	sc := bufio.NewScanner(bytes.NewReader(b))
	if !sc.Scan() || sc.Text() == "" {
		return "", fmt.Errorf("%s is empty: want a line", file)
	}
	secret := sc.Text()
	if sc.Scan() {
		return "", fmt.Errorf("%s has several lines: want one", file)
	}
	return secret, nil
}

// listenBroker makes a broker's socket. It is open to all if the broker looks at who connects; else to this user and
// group.
func listenBroker(ctx context.Context, path string, open bool) (*net.UnixListener, error) {
	lis, err := listenUnix(ctx, "unixpacket", path)
	if err != nil {
		return nil, err
	}
	if open {
		if err := os.Chmod(path, 0o666); err != nil {
			return nil, errors.Join(err, lis.Close())
		}
	}
	return lis.(*net.UnixListener), nil
}

func closeListener(l net.Listener) error {
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// brokerOptions are what a broker needs besides its settings.
type brokerOptions struct {
	settings *config.Broker // valid; only read
	listener *net.UnixListener
	uids     []uint32
	secret   string
	devices  []*rdma.Device
	tls      *tls.Config
	// clients of namespaces that somebody else has opened, and closes afterwards.
	clients map[string]*client.Client
	log     *slog.Logger
	page    string // of brokerPage
}

// runningBroker serves programs, with a client for each namespace.
type runningBroker struct {
	names   []string
	clients []*client.Client
	use     *usage         // of clients; nil until all are open
	broker  *broker.Broker // nil: there is none
	at      *net.UnixListener
}

// openBroker waits until every namespace can be used, and serves.
func openBroker(ctx context.Context, o brokerOptions) (b *runningBroker, err error) {
	b = &runningBroker{at: o.listener}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
			b = nil
		}
	}()
	c := o.settings
	s := broker.Socket{Name: filepath.Base(c.Listen), Listener: o.listener, Namespaces: map[string]*client.Client{},
		Default: c.Namespaces[0], UIDs: o.uids, Secret: o.secret,
		Limits: broker.Limits{Clients: c.MaxClients, ArenaBytes: int64(c.ArenaMemory), Timeout: c.Timeout,
			Pins: c.MaxPins, ViewBytes: int64(c.ViewMemory), Views: c.Views}}
	for _, name := range c.Namespaces {
		if s.Namespaces[name] != nil {
			continue
		}
		if cl := o.clients[name]; cl != nil {
			s.Namespaces[name] = cl
			continue
		}
		cl, err := openWhenThere(ctx, name, o)
		if err != nil {
			return b, err
		}
		b.names, b.clients, s.Namespaces[name] = append(b.names, name), append(b.clients, cl), cl
	}
	if b.broker, err = broker.New([]broker.Socket{s}, o.log); err != nil {
		return b, err
	}
	b.use = newUsage(b.names, b.clients)
	b.broker.Serve()
	return b, nil
}

// openWhenThere opens a client, and waits for a store that is not there yet.
func openWhenThere(ctx context.Context, name string, o brokerOptions) (*client.Client, error) {
	host, _ := os.Hostname() // empty: the page is left to tell it
	for {
		c, err := client.Open(ctx, client.Options{Directory: o.settings.Directory, Namespace: name, Devices: o.devices,
			Provider: o.settings.Provider, Require: o.settings.Require,
			Name: overview.BrokerName(host, os.Getpid(), o.page), TLS: o.tls,
			Identities: client.Identities(o.settings.Identity), Logger: o.log, ViewBytes: int(o.settings.ViewMemory),
			Views: o.settings.Views, MirrorBytes: int(o.settings.Mirror)})
		switch {
		case err == nil:
			return c, nil
		case errors.Is(err, client.ErrNoNamespace):
			return nil, fmt.Errorf("namespace %q: %w: make it with kvctl namespace create %s", name, err, name)
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case !errors.Is(err, client.ErrUnavailable):
			return nil, fmt.Errorf("namespace %q: %w", name, err)
		}
		o.log.Warn("waiting for the store", "namespace", name, "err", err)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// ready tells whether every namespace has a session.
func (b *runningBroker) ready() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for i, c := range b.clients {
		if _, err := inside.Of(c).Session(ctx); err != nil {
			return fmt.Errorf("namespace %q: %w", b.names[i], err)
		}
	}
	return nil
}

func (b *runningBroker) collectors() []prometheus.Collector {
	if b.broker == nil {
		return nil
	}
	cs := []prometheus.Collector{metrics.Broker(b.broker)}
	for i, c := range b.clients {
		cs = append(cs, metrics.Client(b.names[i], c))
	}
	return cs
}

// tables are those of the page.
func (b *runningBroker) tables() []httpd.Table {
	if b.broker == nil {
		return nil
	}
	return []httpd.Table{b.table()}
}

// path is the socket's; empty: there is none.
func (b *runningBroker) path() string {
	if b.at == nil {
		return ""
	}
	return b.at.Addr().String()
}

// table is the programs that are connected, for people.
func (b *runningBroker) table() httpd.Table {
	t := httpd.Table{Title: "Programs", Header: []string{"program", "pid", "user", "namespace",
		"shared memory", "queues", "views", "operations", "since"}}
	all := b.broker.Clients()
	slices.SortFunc(all, func(x, y broker.Client) int { return x.Since.Compare(y.Since) })
	for _, c := range all {
		t.Rows = append(t.Rows, []string{c.Name, strconv.Itoa(int(c.PID)), strconv.Itoa(int(c.UID)), c.Namespace,
			units.Bytes(c.ArenaBytes), strconv.Itoa(c.Queues), strconv.Itoa(c.Views), strconv.FormatUint(c.Ops, 10),
			c.Since.UTC().Format(time.RFC3339)})
	}
	return t
}

// close ends what openBroker began, also half of it.
func (b *runningBroker) close() error {
	var errs []error
	if b.broker != nil {
		errs = append(errs, b.broker.Close())
	}
	b.use.close()
	for _, c := range b.clients {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// ownFolder makes a folder that nobody else may write to, or says why there is none: whoever may could put a socket of
// his in the place of ours.
func ownFolder(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	st, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	owner := st.Sys().(*syscall.Stat_t).Uid
	if !st.IsDir() || owner != uint32(os.Geteuid()) || st.Mode().Perm()&0o022 != 0 {
		return fmt.Errorf("%s: %v of user %d: want a folder that user %d alone may write to", dir, st.Mode(), owner,
			os.Geteuid())
	}
	return nil
}

// devBroker is where the broker of kvd dev listens; nil: nowhere. If nobody asked for a place it is the usual one, and
// one of this process's own if that is taken.
func (a *app) devBroker(ctx context.Context, c *config.Dev, log *slog.Logger) (lis *net.UnixListener, err error) {
	switch c.Broker {
	case config.Off:
		return nil, nil
	case config.Auto:
	default:
		if lis, err = listenBroker(ctx, c.Broker, false); err != nil {
			return nil, fmt.Errorf("broker: %w", err)
		}
		return lis, nil
	}
	path := config.DefaultBroker
	if os.Geteuid() != 0 {
		run := os.Getenv("XDG_RUNTIME_DIR")
		if run == "" {
			run = os.TempDir()
		}
		path = filepath.Join(run, fmt.Sprintf("kvd-%d", os.Geteuid()), "broker.sock")
	}
	if err := ownFolder(filepath.Dir(path)); err != nil {
		log.Warn("there is no broker for programs in C and Python", "setting", "broker", "err", err)
		return nil, nil
	}
	lis, err = listenBroker(ctx, path, false)
	if errors.Is(err, syscall.EADDRINUSE) {
		other := strings.TrimSuffix(path, ".sock") + "-" + strconv.Itoa(os.Getpid()) + ".sock"
		log.Warn("the default socket is taken; another is used, see the ready line", "setting", "broker", "err", err)
		lis, err = listenBroker(ctx, other, false)
	}
	if err != nil {
		log.Warn("there is no broker for programs in C and Python", "setting", "broker", "err", err)
		return nil, nil
	}
	return lis, nil
}

// serveDevBroker serves the namespaces that kvd dev has, by the clients of its gateway.
func (a *app) serveDevBroker(ctx context.Context, d *config.Dev, g *runningGateway, log *slog.Logger) (*runningBroker,
	error) {
	lis, err := a.devBroker(ctx, d, log)
	if lis == nil {
		return &runningBroker{}, err
	}
	c := config.DefaultBrokerNode()
	c.Namespaces, c.Listen = []string{"default", "cache"}, lis.Addr().String()
	c.ViewMemory, c.Views = 256<<20, 16 // of the user whose memory it is
	clients := map[string]*client.Client{}
	for i, name := range g.names {
		clients[name] = g.clients[i]
	}
	b, err := openBroker(ctx, brokerOptions{settings: c, listener: lis, clients: clients, log: log})
	if err != nil {
		return nil, errors.Join(err, closeListener(lis))
	}
	return b, nil
}
