package main

import (
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
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/keeper"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/memnode"
	"github.com/kvd-project/kvd/rdma/shm"
)

// workerStatus is the exit status of a worker, which has said why it ended.
type workerStatus int

func (s workerStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// keepMemnode is the keeper of a memory node: this same command, run again, is its worker.
func (a *app) keepMemnode(ctx context.Context, c *config.MemNode) error {
	path, err := os.Executable()
	if err != nil {
		return err
	}
	log := c.Log.Logger(a.stderr, c.Log.SlogLevel()).With("node", c.Name)
	troubles := make(chan string, 1)
	// A program that knows no keepers refuses the setting; it would begin without the memory.
	o := keeper.Options{Path: path, Args: append(slices.Clone(a.args), "--keep="+c.Keep), Vital: memnode.RegionItems,
		Logger: log, Trouble: func(text string) {
			select {
			case <-troubles: // which nobody has heard yet, and is old
			default:
			}
			troubles <- text // the keeper alone sends
		}}
	if o.Store, err = keeper.OpenSystemd(o.Logger); err != nil {
		return err
	}
	if (c.ShmSocket == config.Auto || c.ControlSocket == config.Auto) && os.Getenv(runtimeDirectory) == "" {
		// The sockets are to be found there by clients of the next worker, and by operators.
		dir, remove, err := shmFolder()
		switch {
		case err == nil:
			defer func() { _ = remove() }() // it is a temporary folder
			o.Env = []string{runtimeDirectory + "=" + dir}
			o.Control = keeperSocket(c.ControlSocket, dir)
		case c.ShmSocket == config.Auto:
			return err
		default: // as in a container that has no folder for temporary files
			log.Warn("there is no control socket: kvctl nodes restart --binary finds no way in", "err", err)
		}
	} else {
		o.Control = keeperSocket(c.ControlSocket, runtimeFolder())
	}
	telling, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { a.tellTroubles(telling, c, troubles, log) })
	status, err := keeper.Run(ctx, o)
	end()
	wg.Wait()
	if err == nil && status != 0 {
		err = workerStatus(status)
	}
	return err
}

// tellTroubles tells the directory, until ctx ends, why no worker comes up.
func (a *app) tellTroubles(ctx context.Context, c *config.MemNode, troubles <-chan string, log *slog.Logger) {
	creds := sync.OnceValues(func() (*tls.Config, error) {
		return a.creds(ofRole(c.TLS, c.Identity, identity.MemNode))
	})
	for {
		select {
		case <-ctx.Done():
			return
		case text := <-troubles:
			if err := tellTrouble(ctx, c, creds, text, log); err != nil && ctx.Err() == nil {
				log.Warn("the directory is not told that no worker comes up", "err", err)
			}
		}
	}
}

// tellTrouble keeps no connection: a keeper has little to say.
func tellTrouble(ctx context.Context, c *config.MemNode, creds func() (*tls.Config, error), text string,
	log *slog.Logger) error {
	conf, err := creds()
	if err != nil {
		return err
	}
	dir, err := dirclient.Open(dirclient.Options{Addrs: c.Directory, TLS: conf, Identities: c.Identity.Mapping(),
		Logger: log})
	if err != nil {
		return err
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(ctx, troubleTimeout)
	defer cancel()
	return dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.ReportNode(ctx, &dirpb.ReportNodeRequest{Name: c.Name, Trouble: keeper.Trouble(text)})
		return err
	})
}

// troubleTimeout is of one report to the directory.
const troubleTimeout = 5 * time.Second

// socketItems begins the names of listening sockets at the keeper.
const socketItems = "listen/"

// kept is what a process has of those before it: a worker by its keeper, or a process by itself in a folder. Without
// either it has nothing, and keeps nothing.
type kept struct {
	client  *keeper.Client // nil: there is no keeper
	folder  *keeper.Folder // nil: there is no memory-path
	log     *slog.Logger
	regions bool // there was memory

	ctx      context.Context // ends when the worker is asked to end
	serving  context.Context // likewise, or when it is to be replaced
	replace  context.CancelFunc
	replaced atomic.Bool
	node     atomic.Pointer[memnode.Node]

	mu struct {
		sync.Mutex
		sockets map[string]*keeper.Item // not in use yet
		cells   []keptCell
		err     error // some cell cannot be looked at
	}
}

type keptCell struct {
	*shm.KeptCell
	item *keeper.Item
}

// openKept asks the keeper, or looks into the folder, for what is held, and bars all clients of this machine from it.
func openKept(ctx context.Context, client *keeper.Client, c *config.MemNode, log *slog.Logger) (*kept, error) {
	k := &kept{client: client, log: log, ctx: ctx}
	k.serving, k.replace = context.WithCancel(ctx)
	k.mu.sockets = make(map[string]*keeper.Item)
	list := client.List
	if c.MemoryPath != config.Off {
		var err error
		if k.folder, err = openMemoryPath(ctx, c, log); err != nil {
			return nil, err
		}
		list = k.folder.List
	}
	items, err := list()
	if err != nil {
		return nil, errors.Join(err, k.close())
	}
	for _, i := range items {
		switch {
		case strings.HasPrefix(i.Name, socketItems):
			k.mu.sockets[i.Name] = i
			continue
		case strings.HasPrefix(i.Name, shm.CellItems) && len(i.FDs) == 2:
			cell, err := shm.AdoptCell(i.FDs[0], i.FDs[1])
			if err == nil {
				k.mu.cells = append(k.mu.cells, keptCell{cell, i})
				continue
			}
			k.mu.err = errors.Join(k.mu.err, fmt.Errorf("%s of %s: %w", i.Name, i.Meta, err))
		case strings.HasPrefix(i.Name, memnode.RegionItems):
			k.regions = true
		}
		i.Close()
	}
	return k, nil
}

// openMemoryPath takes the folder for this process, if the memory that is to be lent fits.
func openMemoryPath(ctx context.Context, c *config.MemNode, log *slog.Logger) (*keeper.Folder, error) {
	f, err := keeper.OpenFolder(ctx, c.MemoryPath, c.HugePageBytes(), log)
	if err != nil {
		return nil, fmt.Errorf("memory-path: %w", err)
	}
	room, err := f.Room()
	if want := int64(c.Memory) + memnode.StateBytes(c.HugePageBytes()); err == nil && room >= 0 && room < want {
		err = fmt.Errorf("the file system of %s has %s, want %s for memory %v and what the next process has to know: "+
			"enlarge it, or lend less", c.MemoryPath, units.Bytes(room), units.Bytes(want), c.Memory)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("memory-path: %w", err), f.Close())
	}
	return f, nil
}

// close lets go of the folder, after the process has let go of what is in it. If it leaves that, the folder is its own
// to its end, as it serves as long.
func (k *kept) close() error {
	k.replace()
	if k.folder == nil || k.leaves() {
		return nil
	}
	return k.folder.Close()
}

// hugePageBytes is the size of huge pages that have to be free: regions that are there have theirs, and a folder has
// its own.
func (k *kept) hugePageBytes(c *config.MemNode) int {
	if k.regions || k.folder != nil {
		return 0
	}
	return c.HugePageBytes()
}

// serves says that n has the memory from now on.
func (k *kept) serves(n *memnode.Node) { k.node.Store(n) }

// replaceWorker has this worker end, so that the keeper starts another one.
func (k *kept) replaceWorker() {
	k.log.Info("another process is to take over: this one ends, and its keeper starts the next")
	k.replaced.Store(true)
	k.replace()
}

func (k *kept) isReplaced() bool { return k.replaced.Load() && k.ctx.Err() == nil }

// leaves tells whether this process leaves its memory to the next one, since it fails or is to be replaced. Only when
// it is asked to end does it say goodbye, and where its memory outlives that, only when it is asked by SIGINT: SIGTERM
// may be followed by another start.
func (k *kept) leaves() bool {
	switch {
	case k.client == nil && k.folder == nil:
		return false
	case k.ctx.Err() == nil:
	case k.folder == nil && !k.client.Outlives(), errors.Is(context.Cause(k.ctx), keeper.ErrInterrupted):
		return false
	}
	n := k.node.Load()
	return k.isReplaced() || k.regions || n != nil && n.Stats().RegisteredBytes > 0
}

// notifyStopping tells systemd that the memory node ends. A worker that another one follows does not: systemd would
// take the unit to be stopping, and kill the next worker when TimeoutStopSec has passed.
func (k *kept) notifyStopping() {
	if k.ctx.Err() != nil {
		notify(k.log, daemon.SdNotifyStopping)
	}
}

// control is the keeper's socket for operators, empty if there is none.
func (k *kept) control(c *config.MemNode) string {
	if k.client == nil {
		return ""
	}
	return keeperSocket(c.ControlSocket, runtimeFolder())
}

// isUp tells the keeper that this worker serves.
func (k *kept) isUp(version string) error {
	err := k.client.Up(version)
	if errors.Is(err, keeper.ErrRefused) { // it is of an earlier version
		k.log.Debug("the keeper does not care whether this process is up", "err", err)
		return nil
	}
	return err
}

// keeper is for the memory node, and nil if there is none.
func (k *kept) keeper() memnode.Keeper {
	switch {
	case k.folder != nil:
		return k.folder
	case k.client != nil:
		return k.client
	}
	return nil
}

// cells is for the shm provider, and nil if there is no keeper.
func (k *kept) cells() shm.Cells {
	if k.client == nil {
		return nil
	}
	return k.client
}

// door names the clients that are inside a verb which they began with an earlier worker.
func (k *kept) door() (inside []string, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	left := k.mu.cells[:0]
	for _, c := range k.mu.cells {
		if !c.Outside() {
			inside = append(inside, string(c.item.Meta))
			left = append(left, c)
			continue
		}
		err = errors.Join(err, c.Close(), k.client.Drop(c.item.Name))
		c.item.Close()
	}
	k.mu.cells = left
	return inside, errors.Join(err, k.mu.err)
}

// socket gives, for a provider, the listening socket of an earlier worker, in which clients wait that dialed meanwhile;
// or else opens one, which the keeper holds from then on.
func (k *kept) socket(provider string) func(string, func() (net.Listener, error)) (net.Listener, error) {
	return func(addr string, listen func() (net.Listener, error)) (net.Listener, error) {
		if k.client == nil {
			return listen()
		}
		name := socketItems + provider + "/" + addr
		k.mu.Lock()
		i := k.mu.sockets[name]
		delete(k.mu.sockets, name)
		k.mu.Unlock()
		if i != nil {
			l, err := listenerOf(i)
			if err == nil {
				return l, nil
			}
			k.log.Warn("the socket of the earlier process is of no use; another one is opened", "provider", provider,
				"addr", addr, "err", err)
			if err := k.client.Drop(name); err != nil {
				return nil, err
			}
		}
		l, err := listen()
		if err != nil {
			return nil, err
		}
		if err := k.holdSocket(name, l); err != nil {
			k.log.Warn("the keeper does not hold the socket: clients that dial during a restart are refused",
				"provider", provider, "addr", addr, "err", err)
		}
		return l, nil
	}
}

func (k *kept) holdSocket(name string, l net.Listener) error {
	s, ok := l.(syscall.Conn)
	if !ok {
		return fmt.Errorf("a %T has no descriptor", l)
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = k.client.Put(name, nil, int(fd)) })
	return errors.Join(cerr, err)
}

// listenerOf takes over the descriptor of a listening socket.
func listenerOf(i *keeper.Item) (net.Listener, error) {
	defer i.Close()
	if on, err := unix.GetsockoptInt(i.FDs[0], unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || on == 0 {
		return nil, errors.New("it does not listen")
	}
	f := os.NewFile(uintptr(i.FDs[0]), i.Name)
	i.FDs = i.FDs[1:]
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return l, nil
	}
	if path := u.Addr().String(); !strings.HasPrefix(path, "@") {
		if fi, err := os.Lstat(path); err != nil || fi.Mode().Type() != fs.ModeSocket {
			return nil, errors.Join(fmt.Errorf("nobody finds it at %s", path), err, u.Close())
		}
	}
	u.SetUnlinkOnClose(true)
	return u, nil
}

// dropUnused lets go of the sockets that the settings name no more.
func (k *kept) dropUnused() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	var errs []error
	for name, i := range k.mu.sockets {
		i.Close()
		errs = append(errs, k.client.Drop(name))
	}
	clear(k.mu.sockets)
	return errors.Join(errs...)
}

// runtimeDirectory is systemd's RuntimeDirectory=; several are separated by colons.
const runtimeDirectory = "RUNTIME_DIRECTORY"

// runtimeFolder is this service's own folder for sockets, empty if there is none.
func runtimeFolder() string {
	dir, _, _ := strings.Cut(os.Getenv(runtimeDirectory), ":")
	return dir
}

// keeperSocket gives the path of a keeper's socket for operators; empty: it is off.
func keeperSocket(setting, folder string) string {
	switch {
	case setting == config.Off:
		return ""
	case setting == config.Auto:
		return filepath.Join(folder, "keeper.sock")
	}
	return setting
}

// shmFolder makes a folder for a socket.
func shmFolder() (dir string, remove func() error, err error) {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if st, err := os.Stat(base); base == "" || err != nil || !st.IsDir() {
		base = "" // the temporary folder
	}
	if dir, err = os.MkdirTemp(base, "kvd-"); err != nil { // mode 0700
		return "", nil, fmt.Errorf("folder for the shm socket: %w (name one with --shm-socket, or off)", err)
	}
	return dir, func() error { return os.RemoveAll(dir) }, nil
}

// shmSocket gives the socket's address, and what removes the folder that was
// made for it.
func shmSocket(setting string) (addr string, remove func() error, err error) {
	if setting != config.Auto {
		return setting, func() error { return nil }, nil
	}
	const name = "memnode.sock"
	if dir := runtimeFolder(); dir != "" {
		return filepath.Join(dir, name), func() error { return nil }, nil
	}
	dir, remove, err := shmFolder()
	return filepath.Join(dir, name), remove, err
}
