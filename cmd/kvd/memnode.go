package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/internal/mem"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma/driver"
	"github.com/kvd-project/kvd/rdma/shm"
	"github.com/kvd-project/kvd/rdma/tcp"
	"github.com/kvd-project/kvd/rdma/verbs"
)

func (a *app) memnodeRole() role {
	return role{
		name:  "memnode",
		short: "Run a memory node",
		long: `Run a memory node. It lends this machine's memory to the store and stays off the
data path: clients read and write the memory by themselves.

It runs as two processes: a keeper, which holds the memory, and a worker, which serves it. A
worker that dies is followed by another one, and nothing is lost; with keep off there is one process.
Where systemd stores descriptors for it (FileDescriptorStoreMax=), and with memory-path, the memory
outlives a restart of all of it: SIGTERM leaves the memory there, SIGINT gives it up. Elsewhere
its contents are gone when it is stopped; if the namespace keeps more than one copy,
another memory node gets one then. A janitor in the same process does its share of
such work, unless janitor is false.`,
		example: `  kvd memnode --name m1 --memory 64GiB
  kvd memnode --name m1 --memory 64GiB --huge-pages 2MiB --lock --config /etc/kvd/memnode.yaml`,
		defaults: func() (config.Settings, func(context.Context) error) {
			c := config.DefaultMemNode()
			return c, func(ctx context.Context) error { return a.memnode(ctx, c) }
		},
	}
}

// nodeDevices are those by which a memory node is reached.
type nodeDevices struct {
	options     providers.Options
	listens     []memnode.DeviceListen
	rdmaDevices []string       // verbs.Options.Device of those of them that are RDMA adapters
	undo        []func() error // what goes with them
}

// listenDevices opens those that c names, with verbs first, then shm. The caller closes the devices that
// are open, also after an error.
func listenDevices(c *config.MemNode, creds *tls.Config, doors map[string]*netsrv.Door, k *kept, log *slog.Logger) (
	*nodeDevices, error) {
	m := &nodeDevices{
		options: providers.Options{TLSServer: creds, TLSClient: c.Identity.Mapping().Called(creds, identity.MemNode),
			TCPDoor: doors["tcp"], ShmDoor: doors["shm"],
			ShmSocket: k.socket("shm"), ShmCells: k.cells()}}
	if c.ListenVerbs != config.Off {
		if err := m.openVerbs(c, doors["verbs"], k, log); err != nil {
			return m, fmt.Errorf("listen-verbs: %w", err)
		}
		if n := len(m.listens); n > 0 {
			if err := checkLimits(int64(c.Memory)*int64(n), 0, true); err != nil {
				return m, fmt.Errorf("memory %v, which RDMA pins for each of %d ports: %w", c.Memory, n, err)
			}
		}
	}
	shm := c.ShmSocket != config.Off
	if shm && c.MemoryPath != config.Off {
		log.Info("shm is left out: memory-path has files without seals, which a client that maps one could cut off " +
			"under the others")
		shm = false
	}
	if shm && c.ShmSocket == config.Auto && len(m.listens) > 0 && m.listens[0].Device.Caps().AtomicScope ==
		driver.AtomicHCA {
		log.Info("shm is left out: its clients' CPUs and the RDMA adapter cannot both do atomics on one memory " +
			"(rdma-atomics agent lets them)")
		shm = false
	}
	if shm {
		socket, remove, err := shmSocket(c.ShmSocket)
		if err != nil {
			return m, err
		}
		m.undo = append(m.undo, remove)
		if err := m.open("shm", socket, ""); err != nil {
			return m, err
		}
	}
	if c.ListenTCP == config.Off {
		return m, nil
	}
	advertise := config.List(c.AdvertiseTCP)
	for i, addr := range config.List(c.ListenTCP) {
		m.options.TCPSocket = k.socket(dirpb.EndpointName("tcp", i+1))
		if err := m.open("tcp", addr, nth(advertise, i)); err != nil {
			return m, err
		}
	}
	return m, nil
}

// nth is the i-th of all, or empty: it is not given.
func nth(all []string, i int) string {
	if i < len(all) {
		return all[i]
	}
	return ""
}

// openVerbs opens the RDMA adapters and ports that c names. Adapters of which each executes its own atomics leave them
// to agents, if that is not forbidden: those of one are not atomic with the other's.
func (m *nodeDevices) openVerbs(c *config.MemNode, door *netsrv.Door, k *kept, log *slog.Logger) error {
	ways, lacking, err := verbsListens(c, m.options.TLSServer != nil || c.Insecure, log)
	advertise := config.List(c.AdvertiseVerbs)
	for i := 0; i < len(ways) && err == nil; i++ {
		w := ways[i]
		w.options.Door, w.options.Socket = door, k.socket(dirpb.EndpointName("verbs", i+1))
		m.options.Verbs = w.options
		if err = m.open("verbs", w.addr, nth(advertise, i)); err != nil {
			break
		}
		if c.RDMAAtomics == config.Auto && w.options.Atomics != verbs.AtomicsAgent && m.adaptersDiffer() {
			log.Info("agents execute the atomics of several RDMA adapters: those of one adapter are not atomic with "+
				"another one's", "rdma-device", c.RDMADevice)
			if err = m.close(); err != nil {
				return err
			}
			m.listens = nil
			for j := range ways {
				ways[j].options.Atomics = verbs.AtomicsAgent
			}
			i = -1
		}
	}
	if c.ListenVerbs == config.Auto && errors.Is(err, providers.ErrUnavailable) {
		lacking, err = errors.Join(lacking, err), nil
	}
	switch {
	case lacking != nil && len(m.listens) == 0:
		log.Warn("RDMA is left out", "reason", lacking)
	case lacking != nil:
		log.Warn("some of rdma-device are left out", "reason", lacking)
	}
	m.rdmaDevices = nil
	for i := range m.listens {
		m.rdmaDevices = append(m.rdmaDevices, ways[i].options.Device)
	}
	return err
}

// adaptersDiffer reports whether an adapter executes atomics that are not atomic with those of another device.
func (m *nodeDevices) adaptersDiffer() bool {
	adapters, hca := make(map[string]bool), false
	for _, d := range m.listens {
		adapter, _, _ := strings.Cut(d.Device.Caps().Port, "/")
		adapters[adapter] = true
		hca = hca || d.Device.Caps().AtomicScope == driver.AtomicHCA
	}
	return hca && len(adapters) > 1
}

func (m *nodeDevices) open(name, addr, advertise string) error {
	d, err := providers.Open(name, m.options)
	if err != nil {
		return err
	}
	m.listens = append(m.listens, memnode.DeviceListen{Device: d, Addr: addr, Advertise: advertise})
	return nil
}

// doorsOf gives those of the devices that are open.
func (m *nodeDevices) doorsOf(all map[string]*netsrv.Door) map[string]*netsrv.Door {
	used := make(map[string]*netsrv.Door)
	for _, d := range m.listens {
		used[d.Device.Name()] = all[d.Device.Name()]
	}
	return used
}

func (m *nodeDevices) close() (err error) {
	for _, d := range m.listens {
		if e := d.Device.Close(); e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", d.Device.Name(), e))
		}
	}
	for _, f := range m.undo {
		err = errors.Join(err, f())
	}
	return err
}

// shmFiles is how many descriptors a connection takes on the passive side of shm.
const shmFiles = 3

// nodeDoors are those of the providers by their names. Each may have max-connections; asked says whether the user set
// that.
func nodeDoors(c *config.MemNode, asked bool, log *slog.Logger) (map[string]*netsrv.Door, error) {
	l := netsrv.Limits{MaxConns: connLimit(c.MaxConnections, 1, asked, log), MaxPerAddr: c.MaxPerAddress, Logger: log}
	doors := make(map[string]*netsrv.Door)
	var err error
	if doors["tcp"], err = tcp.NewDoor(l); err != nil {
		return nil, err
	}
	if doors["verbs"], err = verbs.NewDoor(l); err != nil {
		return nil, err
	}
	// All of its callers are of this machine. The log has heard of the limit already.
	doors["shm"], err = shm.NewDoor(netsrv.Limits{MaxConns: connLimit(l.MaxConns, shmFiles, false, log), Logger: log})
	return doors, err
}

// memnode is the keeper of a memory node, or its worker.
func (a *app) memnode(ctx context.Context, c *config.MemNode) error {
	client, err := keeper.Connect()
	if err != nil {
		return err
	}
	log := a.logger(c.Log)
	if client == nil {
		if c.Keep != config.Off && c.MemoryPath == config.Off {
			return a.keepMemnode(ctx, c)
		}
		// An earlier process may have been a keeper.
		if err := keeper.ClearSystemd(log); err != nil {
			return err
		}
	}
	k, err := openKept(ctx, client, c, log)
	if err != nil {
		return err
	}
	defer k.close()
	err = a.serveMemnode(ctx, c, k, log)
	if k.isReplaced() {
		return workerStatus(keeper.Again)
	}
	return err
}

func (a *app) serveMemnode(ctx context.Context, c *config.MemNode, k *kept, log *slog.Logger) (err error) {
	closing := func(what string, fn func() error) {
		if k.leaves() {
			return
		}
		if e := fn(); e != nil {
			err = errors.Join(err, fmt.Errorf("close %s: %w", what, e))
		}
	}
	creds, err := a.creds(ofRole(c.TLS, c.Identity, identity.MemNode))
	if err != nil {
		return usageError{err}
	}
	if err := checkRoom(c, k.regions, mem.Limited(), log); err != nil {
		return err
	}
	if err := checkLimits(int64(c.Memory), k.hugePageBytes(c), c.Lock); err != nil {
		return fmt.Errorf("memory %v: %w", c.Memory, err)
	}
	web, err := a.http(ctx, "memnode", "http-listen", c.HTTPListen, creds, c.Identity.Mapping(), log)
	if err != nil {
		return err
	}
	defer closing("HTTP endpoints", web.Close)
	// Its answer has the key by which tokens are believed.
	dir, err := dirclient.Open(dirclient.Options{Addrs: c.Directory, TLS: creds, Identities: c.Identity.Mapping(),
		Logger: log})
	if err != nil {
		return err
	}
	defer closing("directory client", dir.Close)

	o := memnode.Options{
		Name: c.Name, CapacityBytes: int64(c.Memory), HugePageBytes: c.HugePageBytes(), Lock: c.Lock,
		Populate:  c.Populate,
		Directory: dir, Domain: c.Domain, Identities: c.Identity.Mapping(), Logger: log, Version: versionText(),
		Control: k.control(c),
		Keeper:  k.keeper(), Door: k.door, Restart: k.replaceWorker,
		MayRestart: func(regionBytes int64) error { return a.mayRestart(c, regionBytes) },
	}
	doors, err := nodeDoors(c, a.given("max-connections"), log)
	if err != nil {
		return err
	}
	m, err := listenDevices(c, creds, doors, k, log)
	defer closing("devices", m.close)
	if err != nil {
		return err
	}
	o.Devices = m.listens
	n, err := memnode.Open(ctx, o)
	if err != nil {
		return err
	}
	k.serves(n)
	defer closing("memory node", n.Close)
	defer sayGoodbye(k, n, log)
	defer k.notifyStopping()

	doors = m.doorsOf(doors)
	doors["http"] = web.Door()
	web.Serving(stopping(ctx, func() error { return memnodeReady(n) }), nil)

	healthAddr, stop, err := memnodeHealthAt(ctx, c, creds, doors, log, n)
	if err != nil {
		return err
	}
	defer stop()
	if err := k.dropUnused(); err != nil {
		return err
	}
	stopPages, err := showMemnode(web, c, n, creds, doors)
	if err != nil {
		return err
	}
	defer stopPages()
	if err := n.Ready(k.serving); err != nil {
		return err
	}
	if c.Janitor {
		stopJanitor, err := janitorBeside(web, c, creds, strings.Join(m.rdmaDevices, ","), log)
		if err != nil {
			return err
		}
		defer stopJanitor()
	}
	at, err := published(k.serving, dir, c.Name, m.listens)
	if err != nil {
		return err
	}
	if err := k.isUp(versionText()); err != nil {
		return err
	}
	if err := a.announce(log, "memnode", "name", c.Name, "directory", strings.Join(c.Directory, ","),
		"verbs", addressesOf(at, "verbs"), "shm", addressesOf(at, "shm"), "tcp", addressesOf(at, "tcp"),
		"health", healthAddr, "http", web.Addr(), "memory",
		c.Memory.String()); err != nil {
		return err
	}
	<-k.serving.Done()
	return nil
}

// mayRestart reports why a process that reads the settings now could not take over from this one, which has c and
// regions of so many bytes.
func (a *app) mayRestart(c *config.MemNode, regionBytes int64) error {
	s, err := a.settings()
	if err != nil {
		return fmt.Errorf("its settings have changed, and are not good: %w", err)
	}
	next, ok := s.(*config.MemNode)
	switch {
	case !ok:
		return fmt.Errorf("its settings are of a %T", s)
	case next.Name != c.Name:
		return fmt.Errorf("its name would be %q: another memory node's, which has no use for its memory", next.Name)
	}
	return memnode.CheckCapacity(regionBytes, int64(next.Memory))
}

// sayGoodbye takes the node out of the store, unless another worker goes on serving its memory. Operations on it would
// stall for a lease otherwise.
func sayGoodbye(k *kept, n *memnode.Node, log *slog.Logger) {
	if k.leaves() {
		return
	}
	if err := n.Leave(context.Background()); err != nil {
		log.Warn("stopping without a goodbye", "err", err)
	}
}

// showMemnode gives web the node's metrics and charts, and lets its pages find those of the other roles, until stop is
// called. doors are the listeners to be counted, by name.
func showMemnode(web *httpd.Server, c *config.MemNode, n *memnode.Node, creds *tls.Config,
	doors map[string]*netsrv.Door) (stop func(), err error) {
	if err := web.Register(metrics.MemNode(c.Name, n), metrics.Listeners(doors)); err != nil {
		return nil, err
	}
	web.Chart(memnodeCharts()...)
	return meetPages(web, pageOptions{role: "memnode", name: c.Name, advertise: nth(config.List(c.AdvertiseTCP), 0),
		tls: creds, directory: c.Directory, identities: c.Identity.Mapping()})
}

// janitorBeside runs a janitor in the memory node's process until stop is called; device is the RDMA device that it may
// use. A janitor that fails later is logged and missed by nobody: others do its work.
func janitorBeside(web *httpd.Server, c *config.MemNode, creds *tls.Config, device string, log *slog.Logger) (
	stop func(), err error) {
	jobs := metrics.NewJanitor()
	if err := web.Register(jobs); err != nil {
		return nil, err
	}
	vo, err := verbsOptions(device, c.RDMA, log)
	if err != nil {
		return nil, err
	}
	j, err := startJanitor(janitorOptions{directory: c.Directory, verbs: vo, tls: creds, identity: c.Identity,
		jobs: jobs, log: log})
	if err != nil {
		return nil, err
	}
	return func() { _ = j.stop() }, nil
}

// memnodeHealthAt serves the health protocol if the settings want it, until stop is called.
func memnodeHealthAt(ctx context.Context, c *config.MemNode, creds *tls.Config, doors map[string]*netsrv.Door,
	log *slog.Logger, n *memnode.Node) (addr string, stop func(), err error) {
	if c.HealthListen == config.Off {
		return "", func() {}, nil
	}
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", c.HealthListen)
	if err != nil {
		return "", nil, fmt.Errorf("health-listen: %w", err)
	}
	addr = lis.Addr().String()
	door, stop, err := serveHealth(lis, creds, c.Identity.Mapping(), log, func() bool { return n.Stats().Registered })
	if err != nil {
		return "", nil, errors.Join(err, lis.Close())
	}
	doors["health"] = door
	return addr, stop, nil
}

// published waits until the directory shows this node's addresses: any directory
// node may answer, and one that does not lead may be a moment behind.
func published(ctx context.Context, dir *dirclient.Client, name string, devices []memnode.DeviceListen) (
	map[string]string, error) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		all, err := endpoints(ctx, dir)
		if err != nil {
			return nil, err
		}
		if at := all[name]; len(at) >= len(devices) {
			return at, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
	}
}

// addressesOf are those of a provider's endpoints, in their order, with commas between.
func addressesOf(at map[string]string, provider string) string {
	var all []string
	for i := 1; at[dirpb.EndpointName(provider, i)] != ""; i++ {
		all = append(all, at[dirpb.EndpointName(provider, i)])
	}
	return strings.Join(all, ",")
}

// verbsWay is where RDMA connections of an adapter's port are set up.
type verbsWay struct {
	addr    string
	options verbs.Options
}

// verbsListens gives where to set up RDMA connections, and which adapters to use; and, where that is chosen, why others
// are left out.
func verbsListens(c *config.MemNode, open bool, log *slog.Logger) (ways []verbsWay, lacking, err error) {
	devices, addrs := config.List(c.RDMADevice), config.List(c.ListenVerbs)
	for i := range max(len(devices), len(addrs)) {
		o, err := verbsOptions(nth(devices, i), c.RDMA, log)
		if err != nil {
			return nil, nil, err
		}
		if o.Connect, err = verbs.ParseConnect(c.RDMAConnect); err != nil {
			return nil, nil, fmt.Errorf("rdma-connect: %w", err)
		}
		switch c.RDMAAtomics {
		case "nic":
			o.Atomics = verbs.AtomicsNIC
		case "agent":
			o.Atomics = verbs.AtomicsAgent
		}
		w := verbsWay{addr: nth(addrs, i), options: o}
		if c.ListenVerbs == config.Auto {
			if w, err = verbsAuto(o, open); errors.Is(err, providers.ErrUnavailable) {
				lacking, err = errors.Join(lacking, err), nil
				continue
			}
		} else if host, _, herr := net.SplitHostPort(w.addr); herr != nil {
			err = herr
		} else if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() && !ip.IsLoopback() {
			w.options.Near = host
		}
		if err != nil {
			return nil, nil, err
		}
		ways = append(ways, w)
	}
	return ways, lacking, nil
}

// verbsAuto chooses the adapter, or its port, and listens at its address.
func verbsAuto(o verbs.Options, open bool) (verbsWay, error) {
	devices, err := verbs.Devices()
	if err != nil {
		return verbsWay{}, err
	}
	best, err := verbs.Choose(devices, &o)
	if err != nil {
		return verbsWay{}, fmt.Errorf("%w: %w", providers.ErrUnavailable, err)
	}
	host := "127.0.0.1"
	if a := best.Addr; open && a.IsValid() &&
		(a.Is4() || devices[best.Device].Ports[best.Port].LinkLayer == "Ethernet" && !a.IsLinkLocalUnicast()) {
		host = a.String()
	}
	o.Device = fmt.Sprintf("%s/%d/%d", devices[best.Device].Name, devices[best.Device].Ports[best.Port].Number,
		best.GID)
	return verbsWay{net.JoinHostPort(host, "0"), o}, nil
}
