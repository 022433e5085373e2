// Package memcached serves the memcached protocol, text, meta commands and binary, from a
// namespace of the store. The cas unique of an item is its version, the flags are
// its flags.
//
// It leaves connections to internal/netsrv and everything that outlives a command
// to [client.API]: any number of Servers may serve one namespace. The words and the
// rules are those of memcached 1.6.18, but for these:
//
//   - flush_all deletes the keys one by one, those written meanwhile perhaps too. With a delay
//     the Server remembers it, and forgets it when it is closed.
//   - h and l of mg tell of accesses that asked for them or won an item. A plain get would have to
//     write to be noted.
//   - N also lets ms with MA or MP create an item, as later versions have it; k shows the key as it was sent.
//   - stats has no items and slabs, because there are none here; what lists keys is refused, as with -X.
//   - touch, gat, gats, T and a mg that wins an item or is noted change its cas unique, as every write does.
//   - a number that loses digits in decr is not padded with spaces. Flags beyond 32 bits are refused. Times
//     of expiry are not cut to 32 bits; a key in text has no control characters.
//   - a lookup that failed is SERVER_ERROR, not a miss.
//   - authentication is -Y alone. A wrong password is answered later after many of them, and a
//     user who is taken out of the file is disconnected.
//
// Start with [Options] and [Server]; its methods may be called concurrently. Clients that say
// little at a time are served by loops (internal/loop). Buffers belong to their connection.
package memcached

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/loop"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/units"
)

// Limits, in bytes.
const (
	maxKeyLen = 250
	// A line that long names 1,000 keys.
	maxLineLen = 256 << 10
	maxOpaque  = 32
	// batchKeys bounds the lookups that go to the store together, and so the values
	// that a connection holds.
	batchKeys = 64
	// keepBuffer is the longest buffer for lines that a connection keeps, keepInto the
	// longest for the value of each of batchKeys lookups.
	keepBuffer, keepInto = 16 << 10, 1 << 10
	// A lone operation may read so much, and each of several so much, without taking memory
	// of the connection's share first. Without taking any, freeKeys operations may read.
	oneLimit, eachLimit = loop.LimitOne, loop.LimitEach
	freeKeys            = 4
	// readCost is how often an operation may have in memory what it reads, and writeCost what
	// it writes.
	readCost, writeCost = 3, 3
	// largeTries is how often an operation is tried again with more memory, while others make the
	// value longer.
	largeTries = 8
	// memoryPatience is how long a command waits in all for memory that others have.
	memoryPatience = 10 * time.Second
)

// version is what clients are told: the commands are those of that memcached.
const version = "1.6.18-kvd"

// Options configure a Server. The zero value of every optional field is usable.
type Options struct {
	// Client is the namespace to serve. Required. The Server does not close it.
	Client client.API
	// Count counts the keys for `stats`. Default: Client's Count, which counts those of other databases in the
	// namespace, too.
	Count func(context.Context) (uint64, error)
	// AuthFile names a file of users, a line NAME:PASSWORD for each, as memcached -Y has it; it must exist. A
	// connection then has to say a name and a password first. Empty: none has to.
	AuthFile string
	// MaxConns is how many connections may be open. Default: netsrv's.
	MaxConns int
	// MaxPerAddr is how many of them one address may have; see netsrv.Limits, which has the default.
	MaxPerAddr int
	// MaxValueBytes bounds a value that is stored. Default 1 MiB, at most client.MaxValueLen.
	MaxValueBytes int
	// IOTimeout bounds the time from the first byte of a command to its last, the value's included.
	// It also bounds the wait for a peer that does not read. A second for each MiB that has come,
	// and one for each 64 KiB that the peer is to read, are added. Default 30 s.
	IOTimeout time.Duration
	// Budget bounds the memory, beyond some 64 KiB for each connection, in which long lines and
	// values are. It may be shared with other servers. Default: one of netsrv.DefaultBudget bytes.
	Budget *netsrv.Budget
	// Now is the clock that expiry times are counted from. Default time.Now.
	Now func() time.Time
	// Answered, if not nil, is told of every command, for tracing. It must not block.
	Answered func(netsrv.Answered)
	// Logger receives background errors and warnings. Default: discard.
	Logger *slog.Logger
}

func (o *Options) ensureDefaults() {
	o.MaxValueBytes = cmp.Or(o.MaxValueBytes, 1<<20)
	o.IOTimeout = cmp.Or(o.IOTimeout, 30*time.Second)
	if o.Budget == nil {
		o.Budget = netsrv.NewBudget(netsrv.DefaultBudget)
	}
	if o.Count == nil && o.Client != nil {
		o.Count = o.Client.Count
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
}

// Validate joins every problem.
func (o *Options) Validate() error {
	var errs []error
	if o.Client == nil {
		errs = append(errs, errors.New("no Client"))
	}
	if o.MaxValueBytes < 0 || o.MaxValueBytes > client.MaxValueLen {
		errs = append(errs, fmt.Errorf("MaxValueBytes: %s, want 1 byte to %s", units.Bytes(o.MaxValueBytes),
			units.Bytes(client.MaxValueLen)))
	}
	if o.IOTimeout < 0 {
		errs = append(errs, fmt.Errorf("IOTimeout: %v, want > 0", o.IOTimeout))
	}
	return errors.Join(errs...)
}

// Server serves any number of listeners.
type Server struct {
	o      Options
	net    *netsrv.Server
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	start  time.Time
	seed   maphash.Seed
	loops  loop.Loops
	calm   int // loop.Calm, but for tests
	stats  counters
	users  atomic.Pointer[users] // nil: without Options.AuthFile
	// guesses slows down those who try passwords.
	guesses netsrv.Guesses
	conns   struct {
		sync.Mutex
		all  map[*conn]struct{}
		last uint64 // number of a conn
	}
	later  laterFlush
	detail prefixes // `stats detail`
	base   struct { // what `stats reset` subtracts
		sync.Mutex
		tally tally
	}
	items struct { // what `stats` says of the store
		sync.Mutex
		n  uint64
		at time.Time
	}
}

// New makes a Server without listeners.
func New(o Options) (*Server, error) {
	o.ensureDefaults()
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("memcached options: %w", err)
	}
	s := &Server{o: o, start: o.Now(), seed: maphash.MakeSeed(), calm: loop.Calm}
	if err := s.ReloadUsers(); err != nil {
		return nil, err
	}
	var err error
	s.net, err = netsrv.New(
		netsrv.Options{Handle: s.handle, Limits: netsrv.Limits{MaxConns: o.MaxConns, MaxPerAddr: o.MaxPerAddr,
			Logger: o.Logger,
			Refuse: func(c net.Conn) { c.Write([]byte("ERROR Too many open connections\r\n")) }}})
	if err != nil {
		return nil, fmt.Errorf("memcached options: %w", err)
	}
	s.conns.all = make(map[*conn]struct{})
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.loops.Context, s.loops.Logger = s.ctx, o.Logger
	s.stats.seconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "kvd_memcached_command_seconds",
		Help:    "Time from a command's arrival to its reply; pipelined lookups share it.",
		Buckets: prometheus.ExponentialBuckets(1e-6, 4, 13),
	}, []string{"command"})
	for i, name := range commandNames {
		s.stats.observe[i] = s.stats.seconds.WithLabelValues(name)
	}
	return s, nil
}

// Serve accepts from l, which it closes, until the Server is closed (nil) or
// accepting fails for good.
func (s *Server) Serve(l net.Listener) error { return s.net.Serve(l) }

// Door counts the connections, for metrics.
func (s *Server) Door() *netsrv.Door { return s.net.Door() }

// Close ends all connections and waits until they are gone. It is idempotent.
func (s *Server) Close() error {
	s.cancel()
	s.conns.Lock()
	for c := range s.conns.all {
		c.link.Kill()
	}
	s.conns.Unlock()
	err := s.net.Close()
	s.loops.Close()
	s.later.wg.Wait() // ctx has ended
	return err
}

// quietTime is how long a connection must have been silent to be between two commands.
const quietTime = 100 * time.Millisecond

// Drain lets clients finish before Close. Connections end once their clients are silent for a
// moment, between two commands; others, and new ones, are served as ever until ctx ends. Then
// what has been received is the last. A command that has been performed is answered in any case.
func (s *Server) Drain(ctx context.Context) {
	tick := time.NewTicker(quietTime / 10)
	defer tick.Stop()
	done, end := ctx.Done(), (<-chan time.Time)(nil)
	for s.net.Conns() > 0 {
		s.finishQuiet(time.Now().Add(-quietTime).UnixMilli())
		select {
		case <-tick.C:
		case <-done:
			s.finishQuiet(0)
			done, end = nil, time.After(time.Second)
		case <-end:
			return
		}
	}
}

// finishQuiet finishes the connections that have been silent since; 0: all.
func (s *Server) finishQuiet(since int64) {
	s.conns.Lock()
	defer s.conns.Unlock()
	for c := range s.conns.all {
		if idle := c.idle.Load(); since == 0 || idle > 0 && idle <= since {
			c.link.CloseRead()
		}
	}
}

// Collectors are the Server's metrics, kvd_memcached_*.
func (s *Server) Collectors() []prometheus.Collector {
	return []prometheus.Collector{s.stats.seconds, collector{s}}
}

type command uint8

const (
	cmdGet command = iota
	cmdGets
	cmdGat
	cmdGats
	cmdSet
	cmdAdd
	cmdReplace
	cmdAppend
	cmdPrepend
	cmdCas
	cmdDelete
	cmdIncr
	cmdDecr
	cmdTouch
	cmdFlushAll
	cmdVersion
	cmdVerbosity
	cmdStats
	cmdQuit
	cmdMg
	cmdMs
	cmdMd
	cmdMa
	cmdMn
	cmdMe
	cmdNoop // this and what follows are of the binary protocol
	cmdSASL
	cmdUnknown
	numCommands
)

var commandNames = [numCommands]string{"get", "gets", "gat", "gats", "set", "add", "replace", "append", "prepend",
	"cas", "delete",
	"incr", "decr", "touch", "flush_all", "version", "verbosity", "stats", "quit", "mg", "ms", "md", "ma", "mn", "me",
	"noop", "sasl", "unknown"}

var commandOf = func() map[string]command {
	m := map[string]command{"bget": cmdGet}
	for i, n := range commandNames[:cmdNoop] {
		m[n] = command(i)
	}
	return m
}()

// result is how a command ended.
type result uint8

const (
	resOK      result = iota
	resMiss           // there is no such key
	resRefused        // NOT_STORED, EXISTS
	resBad            // ERROR, CLIENT_ERROR
	resTrouble        // SERVER_ERROR
	numResults
)

var resultNames = [numResults]string{"ok", "miss", "refused", "client_error", "server_error"}

// tally is what has been counted.
type tally struct {
	commands              [numCommands][numResults]uint64
	hits, misses          uint64
	bytesRead, bytesWrote uint64
}

type counters struct {
	commands              [numCommands][numResults]atomic.Uint64
	hits, misses          atomic.Uint64
	bytesRead, bytesWrote atomic.Uint64
	authFails             atomic.Uint64
	seconds               *prometheus.HistogramVec
	observe               [numCommands]prometheus.Observer
}

// done counts a command that has been answered.
func (c *conn) done(cmd command, r result, began time.Time) {
	took := time.Since(began)
	c.s.stats.commands[cmd][r].Add(1)
	c.s.stats.observe[cmd].Observe(took.Seconds())
	if c.s.o.Answered == nil {
		return
	}
	a := netsrv.Answered{Command: commandNames[cmd], Took: took, Client: c.peer}
	if r >= resBad {
		a.Error, a.Unknown = resultNames[r], c.unknown
	}
	c.unknown = false
	c.s.o.Answered(a)
}

func (c *counters) load() (t tally) {
	for i := range c.commands {
		for j := range c.commands[i] {
			t.commands[i][j] = c.commands[i][j].Load()
		}
	}
	t.hits, t.misses = c.hits.Load(), c.misses.Load()
	t.bytesRead, t.bytesWrote = c.bytesRead.Load(), c.bytesWrote.Load()
	return t
}

var (
	descCommands = prometheus.NewDesc("kvd_memcached_commands_total", "Commands answered.",
		[]string{"command", "result"}, nil)
	descConns    = prometheus.NewDesc("kvd_memcached_connections", "Open connections.", nil, nil)
	descAccepted = prometheus.NewDesc("kvd_memcached_connections_total", "Connections accepted.", nil, nil)
	descRefused  = prometheus.NewDesc("kvd_memcached_connections_refused_total", "Connections over the limit.", nil,
		nil)
	descHits    = prometheus.NewDesc("kvd_memcached_hits_total", "Lookups that found their key.", nil, nil)
	descMisses  = prometheus.NewDesc("kvd_memcached_misses_total", "Lookups that did not find their key.", nil, nil)
	descAuth    = prometheus.NewDesc("kvd_memcached_auth_failures_total", "Wrong passwords.", nil, nil)
	descRead    = prometheus.NewDesc("kvd_memcached_bytes_read_total", "Bytes received.", nil, nil)
	descWritten = prometheus.NewDesc("kvd_memcached_bytes_written_total", "Bytes sent.", nil, nil)
)

// collector gives the counters to Prometheus when it asks.
type collector struct{ s *Server }

func (c collector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

func (c collector) Collect(ch chan<- prometheus.Metric) {
	count := func(d *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n), labels...)
	}
	t := c.s.stats.load()
	for i := range t.commands {
		for j, n := range t.commands[i] {
			if n > 0 {
				count(descCommands, n, commandNames[i], resultNames[j])
			}
		}
	}
	ch <- prometheus.MustNewConstMetric(descConns, prometheus.GaugeValue, float64(c.s.net.Conns()))
	count(descAccepted, c.s.net.Accepted())
	count(descRefused, c.s.net.Refused())
	count(descHits, t.hits)
	count(descMisses, t.misses)
	count(descAuth, c.s.stats.authFails.Load())
	count(descRead, t.bytesRead)
	count(descWritten, t.bytesWrote)
}

// stat is one line of `stats`.
type stat struct {
	name  string
	value any
}

// section is a part of the statistics by its name.
func (s *Server) section(name string) (stats []stat, ok bool) {
	switch name {
	case "":
		return s.generalStats(), true
	case "settings":
		return s.settingStats(), true
	case "conns":
		return s.connStats(), true
	case "sizes":
		return []stat{{"sizes_status", "disabled"}}, true
	case "items", "slabs", "extstore":
		return nil, true // there are none here
	}
	return nil, false
}

func (s *Server) generalStats() []stat {
	s.base.Lock()
	b := s.base.tally
	s.base.Unlock()
	t := s.stats.load()
	sum := func(r result, cmds ...command) (n uint64) {
		for _, c := range cmds {
			n += t.commands[c][r] - b.commands[c][r]
		}
		return n
	}
	all := func(cmds ...command) (n uint64) {
		for r := range numResults {
			n += sum(r, cmds...)
		}
		return n
	}
	now := s.o.Now()
	stats := []stat{
		{"pid", os.Getpid()}, {"uptime", int64(now.Sub(s.start).Seconds())}, {"time", now.Unix()}, {"version", version},
		{"pointer_size", 64},
		{"max_connections", s.maxConns()}, {"curr_connections", s.net.Conns()}, {"total_connections", s.net.Accepted()},
		{"rejected_connections", s.net.Refused()},
		{"cmd_get", t.hits - b.hits + t.misses - b.misses},
		{"cmd_set", all(cmdSet, cmdAdd, cmdReplace, cmdAppend, cmdPrepend, cmdCas, cmdMs)},
		{"cmd_flush", all(cmdFlushAll)}, {"cmd_touch", all(cmdTouch, cmdGat, cmdGats)},
		{"cmd_meta", all(cmdMg, cmdMs, cmdMd, cmdMa, cmdMn, cmdMe)},
		{"get_hits", t.hits - b.hits}, {"get_misses", t.misses - b.misses},
		{"delete_hits", sum(resOK, cmdDelete, cmdMd)}, {"delete_misses", sum(resMiss, cmdDelete, cmdMd)},
		{"incr_hits", sum(resOK, cmdIncr)}, {"incr_misses", sum(resMiss, cmdIncr)},
		{"decr_hits", sum(resOK, cmdDecr)}, {"decr_misses", sum(resMiss, cmdDecr)},
		{"cas_hits", sum(resOK, cmdCas)}, {"cas_misses", sum(resMiss, cmdCas)}, {"cas_badval", sum(resRefused, cmdCas)},
		{"touch_hits", sum(resOK, cmdTouch)}, {"touch_misses", sum(resMiss, cmdTouch)},
		{"bytes_read", t.bytesRead - b.bytesRead}, {"bytes_written", t.bytesWrote - b.bytesWrote},
		{"total_items", sum(resOK, cmdSet, cmdAdd, cmdReplace, cmdAppend, cmdPrepend, cmdCas, cmdMs)},
	}
	if n, err := s.countItems(); err == nil {
		stats = append(stats, stat{"curr_items", n})
	} else {
		s.o.Logger.Warn("stats without curr_items", "err", err)
	}
	if c, ok := s.o.Client.(interface{ Stats() client.Stats }); ok { // fakes in tests do not count
		stats = append(stats, stat{"evictions", c.Stats().Evicted})
	}
	return stats
}

// itemsAge is how old the number of keys may be that `stats` tells: counting reads the whole index.
const itemsAge = 10 * time.Second

// countItems is how many keys there are, of whatever type. Others wait meanwhile and get the same number.
func (s *Server) countItems() (uint64, error) {
	i := &s.items
	i.Lock()
	defer i.Unlock()
	if now := s.o.Now(); i.at.IsZero() || now.Sub(i.at) > itemsAge {
		n, err := s.o.Count(s.ctx)
		if err != nil {
			return 0, err
		}
		i.n, i.at = n, now
	}
	return i.n, nil
}

// maxConns is what netsrv makes of 0, too.
func (s *Server) maxConns() int { return cmp.Or(s.o.MaxConns, 10_000) }

func (s *Server) settingStats() []stat {
	return []stat{{"maxconns", s.maxConns()}, {"item_size_max", s.o.MaxValueBytes}, {"cas_enabled", "yes"},
		{"flush_enabled", "yes"}, {"stat_key_prefix", string(prefixEnd)},
		{"detail_enabled", yesNo(s.detail.on.Load())}, {"binding_protocol", "auto-negotiate"}}
}

func (s *Server) resetStats() {
	t := s.stats.load()
	s.base.Lock()
	s.base.tally = t
	s.base.Unlock()
	s.detail.reset()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// connStats tells of the connections, those that have been open for longest first.
func (s *Server) connStats() (stats []stat) {
	s.conns.Lock()
	defer s.conns.Unlock()
	open := slices.SortedFunc(maps.Keys(s.conns.all), func(a, b *conn) int { return cmp.Compare(a.number, b.number) })
	for _, c := range open {
		state, since := "conn_parse_cmd", int64(0)
		if idle := c.idle.Load(); idle > 0 {
			state, since = "conn_read", max(0, time.Now().UnixMilli()-idle)/1000
		}
		name := strconv.FormatUint(c.number, 10)
		stats = append(stats, stat{name + ":addr", c.peer.Network() + ":" + c.peer.String()},
			stat{name + ":state", state},
			stat{name + ":secs_since_last_cmd", since})
	}
	return stats
}
