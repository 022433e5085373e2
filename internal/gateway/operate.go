package gateway

import (
	"fmt"
	"net"
	"runtime"
	"time"

	"github.com/kvd-project/kvd/internal/peers"
)

// operated is the Gateway as operators see it, at its Options.Peers.
// Package peers calls its methods from goroutines of its own.
type operated struct{ *Gateway }

var _ peers.Operated = operated{}

// totals are the commands that were answered, and those of them that failed.
// Subcommands are commands, and containers of their own are not counted besides.
func (g *Gateway) totals() (commands, failed uint64) {
	for i := range g.m.commands {
		ok, bad := g.m.commands[i].ok.Load(), g.m.commands[i].failed.Load()
		commands += ok + bad
		failed += bad
	}
	return commands, failed
}

// Describe is of peers.Operated.
// The numbers are of about one time. runtime.ReadMemStats stops the process for a moment.
func (g operated) Describe() *peers.Description {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	commands, _ := g.totals()
	return &peers.Description{
		Version: g.o.Version, UptimeMillis: uint64(time.Since(g.started).Milliseconds()), Listen: g.listens(),
		Clients: uint32(g.srv.Conns()), MaxClients: uint32(g.o.MaxConns), Commands: commands, Hits: g.m.hits.Load(),
		Misses:      g.m.misses.Load(),
		MemoryBytes: m.Sys - m.HeapReleased, BufferBytes: uint64(g.o.Budget.Used()),
		SlowCommands: uint64(g.slow.Logged()),
		Blocked:      uint32(g.waits.clients.Load() + g.pausing.clients.Load()), Monitors: uint32(g.monitors.Count()),
		Paused: g.pausing.word(),
	}
}

// listens is where clients connect.
// The addresses are those that were bound, with the port that the kernel chose if it was 0.
func (g *Gateway) listens() (addrs []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, l := range g.mu.listeners {
		if l.Addr().Network() == "unix" {
			addrs = append(addrs, "unix:"+l.Addr().String())
		} else {
			addrs = append(addrs, l.Addr().String())
		}
	}
	return addrs
}

func (g *Gateway) addListener(l net.Listener) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mu.listeners = append(g.mu.listeners, l)
}

func (g operated) Clients() (all []*peers.Client) {
	g.eachClient(func(c *conn) { all = append(all, c.describe()) })
	return all
}

// SlowLog is of peers.Operated.
// 0 means all, as protobuf's absent number does.
func (g operated) SlowLog(n int) (all []*peers.SlowCommand) {
	if n == 0 {
		n = -1
	}
	for _, e := range g.slow.Newest(int64(n)) {
		args := make([][]byte, len(e.Args))
		for i, a := range e.Args {
			args[i] = []byte(a)
		}
		all = append(all, &peers.SlowCommand{Id: e.ID, UnixMicros: e.At.UnixMicro(), TookMicros: e.Took.Microseconds(),
			Args: args, Addr: e.Peer, Name: e.Name})
	}
	return all
}

// Kill is of peers.Operated.
// A command that the connection is performing may have happened or not; its client is not told.
func (g operated) Kill(id int64) (addr string, found bool) {
	g.mu.Lock()
	c := g.mu.conns[id]
	g.mu.Unlock()
	if c == nil || c.link.Killed() {
		return "", false
	}
	c.link.Kill()
	return c.remote.String(), true
}

// describe is the connection for CLIENT LIST and operators; any goroutine may ask.
// Its fields are read one after the other while the connection goes on, so they need not be of one moment. Flags are
// Redis's letters.
func (c *conn) describe() *peers.Client {
	c.mu.Lock()
	name, lib, ver := c.mu.name, c.mu.libName, c.mu.libVer
	c.mu.Unlock()
	now := time.Now()
	channels, patterns, shards := c.g.hub.CountsOf(&c.listener)
	parts, unread := c.out.pending()
	d := &peers.Client{
		Id: c.id, Addr: c.remote.String(), LocalAddr: c.local.String(), Name: name,
		AgeSeconds:  int64(now.Sub(c.since).Seconds()),
		IdleSeconds: max(0, now.UnixMilli()-abs(c.active.Load())) / 1000, Db: c.seenDB.Load(),
		Channels: int32(channels), Patterns: int32(patterns), ShardChannels: int32(shards),
		Queued: c.inTx.Load(), OutputParts: int32(parts), OutputBytes: int64(unread), MemoryBytes: c.share.Held(),
		User: c.user.Load().Name, Redirect: -1, Protocol: 2,
		Library: lib, LibraryVersion: ver,
	}
	if l := c.last.Load(); l != nil && l != unknown {
		d.Command = l.Name
	}
	if c.seenP3.Load() {
		d.Protocol = 3
	}
	if c.monitors.Load() {
		d.Flags += "O"
	}
	if channels+patterns+shards > 0 {
		d.Flags += "P"
	}
	if c.inTx.Load() >= 0 {
		d.Flags += "x"
	}
	if c.blocked.Load() != nil {
		d.Flags += "b"
	}
	if t := c.listener.Tracking(); t != nil {
		d.Flags += t.Letters()
		d.Redirect = t.Redirect
	}
	if d.Flags == "" {
		d.Flags = "N"
	}
	return d
}

// line is the connection as CLIENT LIST shows it; any goroutine may ask. tot-mem is what it has of Options.Budget.
// It has no line's end. Names are printed as they are, which validName makes safe.
func (c *conn) line() string {
	d := c.describe()
	cmd := d.Command
	if cmd == "" {
		cmd = "NULL"
	}
	return fmt.Sprintf("id=%d addr=%s laddr=%s name=%s age=%d idle=%d flags=%s db=%d sub=%d psub=%d ssub=%d multi=%d "+
		"oll=%d omem=%d tot-mem=%d cmd=%s user=%s redir=%d resp=%d lib-name=%s lib-ver=%s",
		d.Id, d.Addr, d.LocalAddr, d.Name, d.AgeSeconds, d.IdleSeconds, d.Flags, d.Db, d.Channels, d.Patterns,
		d.ShardChannels, d.Queued,
		d.OutputParts, d.OutputBytes, d.MemoryBytes, cmd, d.User, d.Redirect, d.Protocol, d.Library, d.LibraryVersion)
}
