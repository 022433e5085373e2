// Package gateway serves the store to Redis clients, over RESP2 and RESP3. It has strings, hashes, sets, sorted sets
// and lists, and what goes with them (expiry, SCAN, transactions, scripts, publish/subscribe).
//
// A [Gateway] keeps no data: any number of them serve the same namespaces. Each command is as linearizable as the
// client.API operation that it becomes. Commands that a connection has pipelined go to the store together. Those on one
// key take effect in order and at once, those on different keys in any order. MGET, MSET, DEL and their like are atomic
// for each of their keys alone. All other commands on several keys (staged.go), EXEC (tx.go), scripts (scripts.go) and
// functions (functions.go) take effect in one step, with client.API.MultiCAS. They run on what the store had, and again
// if that has changed until then. Keys of several databases change together if these share a namespace (databases.go);
// the flushes go step by step.
//
// The protocol is left to internal/redis/resp, connections to internal/netsrv. Start with
// [Options] and [New]. In the code, a command is a keyFunc (strings.go), and pipelined
// ones make a batch (batch.go). Loops (internal/loop, loop.go) serve clients that say
// little at a time. A Gateway's methods may be called concurrently. The clients in
// Options.Databases are the caller's, who closes them after the Gateway.
package gateway

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/hotkeys"
	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/luascript"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/admin"
	"github.com/kvd-project/kvd/internal/redis/live"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Database is what SELECT chooses. Databases with the same Client share its namespace; see database.
type Database struct {
	Name string // of the namespace, for operators
	// Client calls inside.WillWait before an operation waits, as a client.Client does:
	// until then it may hold up other connections.
	Client client.API
}

// Options configure a Gateway. The zero value of every optional field is usable.
type Options struct {
	// Databases are numbered from 0. Required.
	Databases []Database
	// Password, if not empty, is that of user default, and must be given with AUTH before anything else.
	Password string
	// PasswordFile names a file with Password in its only line, which must exist then. Not beside Password.
	PasswordFile string
	// ACLFile names a file of users in the form of Redis's aclfile, which must exist. Empty: there is user
	// default alone, unless ACL SETUSER makes others, which end with the Gateway. A file that does not
	// define default leaves it off, unless there is a password.
	ACLFile string
	// MaxConns is how many connections may be open at a time. Default 10,000.
	MaxConns int
	// MaxPerAddr is how many of them one address may have; see netsrv.Limits, which has the default.
	MaxPerAddr int
	// MaxValueBytes bounds a value, and any argument. Default client.DefaultMaxValueLen, at most client.MaxValueLen. A
	// namespace may allow less; see client.ErrTooLarge.
	MaxValueBytes int
	// IdleTimeout closes connections that have sent nothing for this long; 0 disables it.
	IdleTimeout time.Duration
	// WriteTimeout closes connections that have had replies to read for this long and read none. Default 60 s.
	WriteTimeout time.Duration
	// OutputBytes bounds a connection's unread replies; beyond it the Gateway takes no more commands from
	// it. Default 16 MiB.
	OutputBytes int
	// CommandTimeout closes a connection whose command has not arrived whole this long after it began; each
	// MiB of it that has arrived adds a second. Default 30 s.
	CommandTimeout time.Duration
	// Budget bounds the memory, beyond some 64 KiB for each connection, in which unfinished
	// commands, values on their way and unread replies are. It may be shared with other servers.
	// Default: one of netsrv.DefaultBudget bytes.
	Budget *netsrv.Budget
	// ScriptTimeout bounds the time of a script, or of all those of a transaction; then nothing of it has been done.
	// Default 5 s.
	ScriptTimeout time.Duration
	// ScriptMemory bounds the bytes of a script's values, about; they are out of Budget. Default 64 MiB.
	ScriptMemory int
	// Debug allows DEBUG SLEEP.
	Debug bool
	// Peers are the other gateways of the same databases; nil: there are none. They are the caller's, who closes them
	// before the Gateway.
	Peers *peers.Peers
	// TrackingKeys bounds the keys that clients cache by CLIENT TRACKING without BCAST; beyond it some are invalidated.
	// Default 100,000.
	TrackingKeys int
	// TrackingCheck is how often the Gateway looks whether such a key was written past it and its Peers. Default 10 s.
	TrackingCheck time.Duration
	// SlowLogTime is how long a command takes at least that SLOWLOG shows, as slowlog-log-slower-than; negative: it
	// shows none. Default 10 ms.
	SlowLogTime time.Duration
	// SlowLogLen is how many commands SLOWLOG shows at most, as slowlog-max-len. Default 128.
	SlowLogLen int
	// HotKeys has the Gateway estimate which keys are used most; see [Gateway.HotKeys].
	HotKeys bool
	// Cluster makes the Gateway a Redis Cluster of one node, for clients that speak to clusters only.
	Cluster bool
	// Answered, if not nil, is told of every command, for tracing; those of a transaction are commands, too. It must
	// not block.
	Answered func(netsrv.Answered)
	// Version is shown by INFO. Default "devel".
	Version string
	// Logger receives background errors and warnings. Default: discard.
	Logger *slog.Logger
}

// ensureDefaults fills in what is 0; see Options.
func (o *Options) ensureDefaults() {
	o.MaxConns = cmp.Or(o.MaxConns, 10_000)
	o.MaxValueBytes = cmp.Or(o.MaxValueBytes, client.DefaultMaxValueLen)
	o.WriteTimeout = cmp.Or(o.WriteTimeout, 60*time.Second)
	o.OutputBytes = cmp.Or(o.OutputBytes, 16<<20)
	o.CommandTimeout = cmp.Or(o.CommandTimeout, 30*time.Second)
	o.ScriptTimeout = cmp.Or(o.ScriptTimeout, 5*time.Second)
	o.ScriptMemory = cmp.Or(o.ScriptMemory, 64<<20)
	o.TrackingKeys = cmp.Or(o.TrackingKeys, 100_000)
	o.TrackingCheck = cmp.Or(o.TrackingCheck, 10*time.Second)
	o.SlowLogTime = cmp.Or(o.SlowLogTime, 10*time.Millisecond)
	o.SlowLogLen = cmp.Or(o.SlowLogLen, 128)
	if o.Budget == nil {
		o.Budget = netsrv.NewBudget(netsrv.DefaultBudget)
	}
	o.Version = cmp.Or(o.Version, "devel")
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate reports every bad field.
func (o *Options) Validate() error {
	var errs []error
	bad := func(f string, a ...any) { errs = append(errs, fmt.Errorf(f, a...)) }
	if len(o.Databases) == 0 {
		bad("Databases: none")
	}
	for i, d := range o.Databases {
		if d.Client == nil {
			bad("Databases[%d].Client: missing", i)
		}
	}
	if o.Password != "" && o.PasswordFile != "" {
		bad("PasswordFile: %q, and a Password: want one of them", o.PasswordFile)
	}
	if o.MaxConns < 0 {
		bad("MaxConns: %d, want > 0", o.MaxConns)
	}
	if o.MaxPerAddr < 0 {
		bad("MaxPerAddr: %d, want > 0", o.MaxPerAddr)
	}
	if o.MaxValueBytes < 0 || o.MaxValueBytes > client.MaxValueLen {
		bad("MaxValueBytes: %d, want 1..%d", o.MaxValueBytes, client.MaxValueLen)
	}
	if o.IdleTimeout < 0 {
		bad("IdleTimeout: %v, want >= 0", o.IdleTimeout)
	}
	if o.WriteTimeout < 0 {
		bad("WriteTimeout: %v, want > 0", o.WriteTimeout)
	}
	if o.OutputBytes < 0 {
		bad("OutputBytes: %d, want > 0", o.OutputBytes)
	}
	if o.CommandTimeout < 0 {
		bad("CommandTimeout: %v, want > 0", o.CommandTimeout)
	}
	if o.ScriptTimeout < 0 {
		bad("ScriptTimeout: %v, want > 0", o.ScriptTimeout)
	}
	if o.ScriptMemory < 0 {
		bad("ScriptMemory: %d bytes, want > 0", o.ScriptMemory)
	}
	if o.TrackingKeys < 0 {
		bad("TrackingKeys: %d, want > 0", o.TrackingKeys)
	}
	if o.TrackingCheck < 0 {
		bad("TrackingCheck: %v, want > 0", o.TrackingCheck)
	}
	if o.SlowLogLen < 0 {
		bad("SlowLogLen: %d, want > 0", o.SlowLogLen)
	}
	return errors.Join(errs...)
}

// Gateway is a RESP server. Its methods may be called concurrently.
type Gateway struct {
	// Set by New and not changed, or guarded by themselves, where nothing else is said.
	o      Options
	srv    *netsrv.Server     // accepts, and counts connections
	ctx    context.Context    // ends with Close; operations of the store and all that waits end with it
	cancel context.CancelFunc // ends ctx
	turns  chan struct{}      // takes one of each that copies a long value; see conn.longTurn
	dbs    []database         // Options.Databases
	calm   int                // loop.Calm, but for tests
	// heed is what there is to look at besides performing commands; see heedPause.
	heed    atomic.Uint32
	pausing pausing       // CLIENT PAUSE
	hot     *hotkeys.Keys // nil: nobody wants to know
	// stopping refuses commands; see Drain.
	stopping  atomic.Bool
	loops     loop.Loops // serve connections whose clients say little at a time
	waits     waits      // BLPOP and the like
	scripts   scripting  // EVAL and EVALSHA
	functions functions  // FCALL and FUNCTION

	figures  // what changes of it guards itself
	access   // likewise
	audience // likewise
	settable // likewise

	mu struct {
		sync.Mutex
		// Open connections by id. A connection that was found here may have ended by the time it is looked at; it stays
		// valid memory, and its atomic fields and its mu may still be used.
		conns     map[int64]*conn
		listeners []net.Listener // that Serve accepts from, for operators
	}
}

// figures are what INFO tells.
type figures struct {
	m       metrics      // atomic counters
	counts  infoCounts   // what INFO counts besides
	rates   rates        // INFO's
	started time.Time    // New, for INFO
	runID   string       // 40 hexadecimal digits, random for each start, as Redis's run_id
	lastID  atomic.Int64 // of conn.id
}

// access is who may do what.
type access struct {
	guesses netsrv.Guesses // wrong passwords, by address
	users   *acl.Users     // of Options.Password and ACLFile; they change while it runs
	denials acl.Log        // ACL LOG
	aclFile sync.Mutex     // held while Options.ACLFile is read or written
}

// audience are clients that hear of what others do.
type audience struct {
	monitors live.Monitors // MONITOR
	hub      live.Hub      // subscriptions
	notify   atomic.Uint32 // notify-keyspace-events, an eventClass; CONFIG SET writes it
	tracked  struct {      // CLIENT TRACKING
		live.Tracked                // it has a lock of its own
		checks       sync.WaitGroup // the goroutine that looks at versions
	}
	watchers watchers   // WATCH of absent keys
	expiries expiries   // events of class x
	interest sync.Mutex // held while Options.Peers is told what to tell
}

// settable is what CONFIG SET changes, beside what has a setting of its own.
type settable struct {
	idle      atomic.Int64          // IdleTimeout as CONFIG SET has it, ns
	slow      admin.Slow            // SLOWLOG and LATENCY
	held      held                  // settings without effect, and what has one of them:
	encodings values.EncodingLimits // CONFIG SET writes it
}

// New makes a Gateway that listens nowhere yet.
// It reads PasswordFile and ACLFile, starts to hear Options.Peers, and asks nothing of the store: the databases may be
// unavailable when a gateway starts.
func New(o Options) (*Gateway, error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, err
	}
	g := &Gateway{o: o, dbs: placeDatabases(o.Databases), calm: loop.Calm,
		turns: make(chan struct{}, max(1, runtime.GOMAXPROCS(0)/2)), figures: figures{started: time.Now()}}
	g.users = acl.NewUsers(catalog, o.Password)
	if err := g.ReloadPassword(); err != nil {
		return nil, err
	}
	if o.ACLFile != "" {
		if err := g.ReloadUsers(); err != nil {
			return nil, err
		}
	}
	var id [20]byte
	rand.Read(id[:])
	g.runID = hex.EncodeToString(id[:])
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.loops.Context, g.loops.Logger = g.ctx, o.Logger
	g.m.commands = make([]commandStats, len(commandsByID))
	g.idle.Store(int64(o.IdleTimeout))
	g.scripts.cache, g.scripts.groupTime = luascript.NewCache(scriptCacheBytes), groupTime
	g.functions.loading, g.functions.loadTime = make(chan struct{}, 1), loadTime
	g.mu.conns = make(map[int64]*conn)
	setDefaults(&g.encodings)
	g.waits.init(g)
	g.hub.Init()
	g.tracked.Init(o.TrackingKeys, len(o.Databases), g.listenerOf)
	if o.SlowLogTime < 0 {
		g.slow.SetTime(-1)
	} else {
		g.slow.SetTime(o.SlowLogTime.Microseconds())
	}
	g.slow.SetLen(int64(o.SlowLogLen))
	if o.HotKeys {
		g.hot = hotkeys.New()
	}
	var err error
	g.srv, err = netsrv.New(
		netsrv.Options{Handle: g.handle, Limits: netsrv.Limits{MaxConns: o.MaxConns, MaxPerAddr: o.MaxPerAddr,
			Logger: o.Logger,
			Refuse: func(c net.Conn) { c.Write([]byte("-ERR max number of clients reached\r\n")) }}})
	if err == nil && o.Peers != nil {
		o.Peers.Start(g.heard, g.missed, operated{g})
	}
	return g, err
}

// Serve accepts connections from l, which it closes, until Close (nil) or until
// accepting fails. It may run for several listeners at once.
func (g *Gateway) Serve(l net.Listener) error {
	g.addListener(l)
	return g.srv.Serve(l)
}

// Door counts the connections, for metrics.
func (g *Gateway) Door() *netsrv.Door { return g.srv.Door() }

// Close closes listeners and connections and waits for what they were doing.
// Operations that were on their way end with an error, and their clients may not learn how they went. Drain before it
// avoids that. The order is that connections go first, then those who wake, look up and expire for them.
func (g *Gateway) Close() error {
	g.cancel()
	g.each(func(c *conn) { c.link.Kill() })
	g.killScripts()
	err := g.srv.Close()
	g.pausing.end(&g.heed)
	g.loops.Close()
	g.waits.poller.Wait()
	g.tracked.checks.Wait()
	g.expiries.done.Wait()
	return err
}

// Collectors are for a Prometheus registry.
func (g *Gateway) Collectors() []prometheus.Collector { return []prometheus.Collector{collector{g}} }

// errNoMemory says that nothing was done, so that clients may try again.
const errNoMemory = "ERR kvd: the gateway is out of buffer memory; nothing was done"

// unknownOutcome begins the error of a command that may have happened.
const unknownOutcome = "ERR unknown outcome: "

// storeError words an error of the store as Redis clients understand it best.
// It answers whether the command happened: after unknownOutcome it may have; after LOADING, OOM and out of buffer
// memory it did not. The log gets the errors that no client can do anything about.
func (g *Gateway) storeError(err error) string {
	switch {
	case errors.Is(err, client.ErrUnknownOutcome):
		return unknownOutcome + brief(err)
	case errors.Is(err, netsrv.ErrBudget):
		g.o.Logger.Warn("command refused: out of buffer memory", "used", g.o.Budget.Used(), "of", g.o.Budget.Total())
		return errNoMemory
	case errors.Is(err, client.ErrFull):
		return "OOM command not allowed when used memory > 'maxmemory'."
	case errors.Is(err, client.ErrInvalid), errors.Is(err, client.ErrNoNamespace), errors.Is(err, client.ErrForbidden):
		return "ERR kvd: " + brief(err)
	case errors.Is(err, client.ErrUnavailable), errors.Is(err, client.ErrClosed), errors.Is(err, context.Canceled):
		// It did not happen, and clients try again after LOADING.
		return "LOADING kvd: " + brief(err)
	}
	g.o.Logger.Error("store failed", "err", err)
	return "ERR kvd: " + brief(err)
}

// brief keeps a chain of causes from filling the client's log.
func brief(err error) string {
	s := err.Error()
	if len(s) > 256 {
		s = s[:253] + "..."
	}
	return s
}

// add makes the connection known to CLIENT LIST, Drain and Close.
func (g *Gateway) add(c *conn) {
	g.mu.Lock()
	g.mu.conns[c.id] = c
	g.mu.Unlock()
}

// remove ends that; whoever has found the connection before may still look at it.
func (g *Gateway) remove(c *conn) {
	g.mu.Lock()
	delete(g.mu.conns, c.id)
	g.mu.Unlock()
	c.active.Store(abs(c.active.Load())) // nobody waits for what it was doing
}

// queryBytes bounds a command: a value, its key, and some more of both.
func (g *Gateway) queryBytes() int { return 2*g.o.MaxValueBytes + 1<<20 }

// limits are those of a connection's commands. Before AUTH they are Redis's, far below what a
// stranger could hold memory with.
// Args is a number of arguments; Bulk, of one of them, and Query, of a whole command, are bytes. A key may be a byte
// longer than the store's limit, so that it is refused in words by badKey and not as a protocol error.
func (g *Gateway) limits(authenticated bool) resp.Limits {
	if !authenticated {
		return resp.Limits{Args: 10, Bulk: 16 << 10, Query: 256 << 10, Unauthenticated: true}
	}
	return resp.Limits{Args: 1 << 20, Bulk: max(g.o.MaxValueBytes, client.MaxKeyLen+1), Query: g.queryBytes()}
}
