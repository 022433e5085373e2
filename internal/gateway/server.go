package gateway

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/acl"
	"github.com/kvd-project/kvd/internal/glob"
	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/resp"
)

// redisVersion is the one whose strings these are; clients choose commands by it.
const redisVersion = "7.0.15"

// cmdTime tells this machine's time. The store needs no clock that gateways share: expiry alone
// depends on it.
func cmdTime(_ *conn, w *resp.Writer, _ [][]byte) { writeTime(w, time.Now()) }

// writeTime is the reply to TIME: seconds, and microseconds of the second.
func writeTime(w *resp.Writer, now time.Time) {
	w.Array(2)
	w.BulkString(strconv.FormatInt(now.Unix(), 10))
	w.BulkString(strconv.Itoa(now.Nanosecond() / 1000))
}

// cmdWait returns 0 replicas, which is what a Redis without replicas says; that a write is on
// all copies when it is answered is the store's promise, and needs no waiting.
// The arguments are checked all the same, in Redis's order.
func cmdWait(_ *conn, w *resp.Writer, args [][]byte) {
	_, ok1 := resp.ParseInt(args[1])
	ms, ok2 := resp.ParseInt(args[2])
	switch {
	case !ok1:
		w.Error(errNotInt)
	case !ok2:
		w.Error("ERR timeout is not an integer or out of range")
	case ms < 0:
		w.Error("ERR timeout is negative")
	default:
		w.Int(0)
	}
}

// cmdLolwut names the version, and that this is no Redis, for those who look.
func cmdLolwut(c *conn, w *resp.Writer, args [][]byte) {
	if len(args) >= 3 && fold(args[1], "version") {
		if n, ok := resp.ParseInt(args[2]); !ok || int64(int(n)) != n {
			w.Error(errNotInt)
			return
		}
	}
	w.Verbatim("txt", "kvd "+c.g.o.Version+", speaks as Redis ver. "+redisVersion+"\n")
}

// cmdDebug is one command, as in Redis: rules of users name DEBUG, or DEBUG with a first argument.
func cmdDebug(c *conn, w *resp.Writer, args [][]byte) {
	switch {
	case fold(args[1], "help") && len(args) == 2:
		writeHelp(w, "debug", "SLEEP <seconds>", "    Stop this connection for <seconds>.")
	case fold(args[1], "sleep") && len(args) == 3:
		cmdDebugSleep(c, w, args)
	default:
		w.Error("ERR unknown subcommand or wrong number of arguments for '" + clip(args[1], 128) + "'. Try DEBUG HELP.")
	}
}

// cmdDebugSleep holds up only its connection, not the gateway as in Redis. It is for tests of
// clients, so Options.Debug must allow it.
// The time is in seconds, and may be a fraction. It ends early if the gateway closes.
func cmdDebugSleep(c *conn, w *resp.Writer, args [][]byte) {
	if !c.g.o.Debug {
		w.Error("ERR DEBUG command not allowed.")
		return
	}
	s, _, _ := number.Double(args[2]) // what is no number is 0, as in Redis
	if !(s >= 0 && s <= 1e6) {
		w.Error(errNotFloat)
		return
	}
	select {
	case <-time.After(time.Duration(s * float64(time.Second))):
	case <-c.ctx.Done():
	}
	w.OK()
}

// ---- INFO ----------------------------------------------------------------------

// statser is a database's client that counts, as *client.Client does.
// Fakes in tests do not, and a database that does not count is left out of INFO.
type statser interface{ Stats() client.Stats }

// infoSections are INFO's, with the fields of Redis that monitoring tools read. Those that kvd knows
// and Redis does not begin with kvd_. Fields for things that do not exist here say so with the
// value that such a tool takes for healthy.
// They are in the order in which INFO shows them. write is called by the goroutine of the connection that asks, and may wait for the store.
var infoSections = []struct {
	name  string
	extra bool // only if asked for by name, or by "all"
	write func(g *Gateway, line func(key string, value any))
}{
	{"Server", false, func(g *Gateway, line func(string, any)) {
		up := time.Since(g.started)
		line("redis_version", redisVersion)
		line("redis_mode", g.mode())
		line("kvd_version", g.o.Version)
		line("os", runtime.GOOS+" "+runtime.GOARCH)
		line("arch_bits", strconv.IntSize)
		line("process_id", os.Getpid())
		line("run_id", g.runID)
		line("server_time_usec", time.Now().UnixMicro())
		line("uptime_in_seconds", int64(up.Seconds()))
		line("uptime_in_days", int64(up.Hours()/24))
	}},
	{"Clients", false, func(g *Gateway, line func(string, any)) {
		line("connected_clients", g.srv.Conns())
		line("maxclients", g.o.MaxConns)
		line("blocked_clients", g.waits.clients.Load()+g.pausing.clients.Load())
		line("tracking_clients", g.tracked.clients.Load())
	}},
	{"Memory", false, func(g *Gateway, line func(string, any)) {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		// A session knows what was granted to it and what it wrote; how full the namespace is, kvctl
		// status says. used_memory is the gateway's own.
		var live, granted uint64
		for _, n := range g.namespaces() {
			if s, ok := n.api.(statser); ok {
				st := s.Stats()
				live += st.LiveUnits * recordUnit
				granted += st.GrantedUnits * recordUnit
			}
		}
		line("used_memory", m.HeapAlloc)
		line("used_memory_human", human(m.HeapAlloc))
		line("used_memory_rss", m.Sys-m.HeapReleased)
		line("used_memory_peak", m.HeapSys)
		line("kvd_session_live_bytes", live)
		line("kvd_session_granted_bytes", granted)
		line("kvd_queued_reply_bytes", g.m.queued.Load())
		line("kvd_reserved_buffer_bytes", g.o.Budget.Used())
		_, slow := g.slow.size()
		line("kvd_slowlog_bytes", slow)
		line("maxmemory", 0)
		line("maxmemory_human", "0B")
		line("maxmemory_policy", "noeviction")
		line("mem_allocator", "go")
	}},
	{"Persistence", false, func(g *Gateway, line func(string, any)) {
		// Nothing is ever saved or loaded here: tools that wait for a save to end must find that it has.
		line("loading", 0)
		line("rdb_changes_since_last_save", 0)
		line("rdb_bgsave_in_progress", 0)
		line("rdb_last_save_time", g.started.Unix())
		line("rdb_last_bgsave_status", "ok")
		line("aof_enabled", 0)
	}},
	{"Stats", false, func(g *Gateway, line func(string, any)) {
		n, failed := g.totals()
		line("total_connections_received", g.srv.Accepted()+g.srv.Refused())
		line("total_commands_processed", n)
		line("total_net_input_bytes", g.m.read.Load())
		line("total_net_output_bytes", g.m.written.Load())
		line("rejected_connections", g.srv.Refused())
		// The client library expires and evicts, and has metrics of its own for both.
		line("expired_keys", 0)
		line("evicted_keys", 0)
		line("keyspace_hits", g.m.hits.Load())
		line("keyspace_misses", g.m.misses.Load())
		channels, patterns, shards := g.hub.counts()
		keys, items, prefixes := g.tracked.counts()
		line("tracking_total_keys", keys)
		line("tracking_total_items", items)
		line("tracking_total_prefixes", prefixes)
		line("pubsub_channels", channels)
		line("pubsub_patterns", patterns)
		line("pubsubshard_channels", shards)
		line("total_error_replies", failed)
		line("acl_access_denied_auth", g.m.authFails.Load())
		line("acl_access_denied_cmd", g.m.denied[acl.DeniedCommand].Load())
		line("acl_access_denied_key", g.m.denied[acl.DeniedKey].Load())
		line("acl_access_denied_channel", g.m.denied[acl.DeniedChannel].Load())
		line("kvd_batches", g.m.batches.Load())
	}},
	{"Replication", false, func(g *Gateway, line func(string, any)) {
		// Copies are the memory nodes' affair; a client that looks for somebody to write to finds it.
		line("role", "master")
		line("connected_slaves", 0)
		line("master_replid", g.runID)
		line("master_repl_offset", 0)
	}},
	{"CPU", false, func(_ *Gateway, line func(string, any)) {
		var u syscall.Rusage
		if syscall.Getrusage(syscall.RUSAGE_SELF, &u) == nil {
			line("used_cpu_sys", fmt.Sprintf("%d.%06d", u.Stime.Sec, u.Stime.Usec))
			line("used_cpu_user", fmt.Sprintf("%d.%06d", u.Utime.Sec, u.Utime.Usec))
		}
	}},
	{"Modules", false, func(*Gateway, func(string, any)) {}},
	{"Commandstats", true, func(g *Gateway, line func(string, any)) {
		for _, cmd := range commandsByID {
			s := &g.m.commands[cmd.id]
			ok, failed := s.ok.Load(), s.failed.Load()
			if n := ok + failed; n > 0 {
				us := s.nanos.Load() / 1000
				line("cmdstat_"+cmd.name, fmt.Sprintf("calls=%d,usec=%d,usec_per_call=%.2f,rejected_calls=0,failed_calls=%d",
					n, us, float64(us)/float64(n), failed))
			}
		}
	}},
	{"Cluster", false, func(g *Gateway, line func(string, any)) { line("cluster_enabled", bit(g.o.Cluster)) }},
	{"Keyspace", false, func(g *Gateway, line func(string, any)) {
		// A database that cannot be counted now is left out, as an empty one is in Redis.
		for i := range g.o.Databases {
			if n, err := g.KeyCount(i); err == nil && n > 0 {
				line("db"+strconv.Itoa(i), fmt.Sprintf("keys=%d,expires=0,avg_ttl=0", n))
			}
		}
	}},
}

// human is a number of bytes as Redis prints it (bytesToHuman).
// Redis's units are powers of 1024, and it prints two digits of all but bytes.
func human(n uint64) string {
	f, units := float64(n), "BKMGT"
	for f >= 1024 && len(units) > 1 {
		f, units = f/1024, units[1:]
	}
	if units[0] == 'B' {
		return strconv.FormatUint(n, 10) + "B"
	}
	return fmt.Sprintf("%.2f%c", f, units[0])
}

// cmdInfo writes the sections that are asked for, in their own order, whatever the order of the
// arguments is.
// A section that does not exist is left out, as in Redis: the reply to it alone is empty. Names are in any case.
func cmdInfo(c *conn, w *resp.Writer, args [][]byte) {
	var s strings.Builder
	for _, sec := range infoSections {
		want := len(args) == 1 && !sec.extra
		for _, a := range args[1:] {
			want = want || fold(a, strings.ToLower(sec.name)) || fold(a, "all") || fold(a, "everything") || fold(a, "default") && !sec.extra
		}
		if !want {
			continue
		}
		if s.Len() > 0 {
			s.WriteString("\r\n")
		}
		s.WriteString("# " + sec.name + "\r\n")
		sec.write(c.g, func(key string, value any) { fmt.Fprintf(&s, "%s:%v\r\n", key, value) })
	}
	w.Verbatim("txt", s.String())
}

// ---- CONFIG --------------------------------------------------------------------

// setting is a parameter of Redis's as far as clients ask for it.
// A value is a function of the Gateway, since some are what the options say.
type setting struct {
	name string                          // lower case
	get  func(g *Gateway) string         // as CONFIG GET shows it
	set  func(g *Gateway, v []byte) bool // nil: cannot be changed
}

// fixed is a setting that cannot be changed, and has no value here.
func fixed(name, value string) setting {
	return setting{name: name, get: func(*Gateway) string { return value }}
}

// same is a setting that may be set to what it is.
// Tools write back what they have read, and must not fail over that.
func same(name, value string) setting {
	return setting{name: name, get: func(*Gateway) string { return value }, set: func(_ *Gateway, v []byte) bool { return string(v) == value }}
}

// accepted is a setting that has nothing to act on here, so that any number will do.
func accepted(name, value string) setting {
	return setting{name: name, get: func(*Gateway) string { return value }, set: func(_ *Gateway, v []byte) bool {
		_, ok := resp.ParseInt(v)
		return ok
	}}
}

// settings are those of Redis's that clients and tools read when they connect, and stop working
// without. CONFIG SET must not accept a value that promises an effect which it has not: timeout and
// notify-keyspace-events have one, and those of the slow log.
var settings = []setting{
	same("appendonly", "no"), // there is no log of commands
	{name: "aclfile", get: func(g *Gateway) string { return g.o.ACLFile }},
	{name: "acllog-max-len", get: func(*Gateway) string { return strconv.Itoa(acl.MaxEntries) }},
	fixed("bind", ""), // the process's own settings say where it listens
	{name: "databases", get: func(g *Gateway) string { return strconv.Itoa(len(g.o.Databases)) }},
	fixed("dir", ""), // nothing is kept on disk
	accepted("hz", "10"),
	{name: "latency-monitor-threshold", get: func(g *Gateway) string { return strconv.FormatInt(g.slow.latencyFrom(), 10) },
		set: func(g *Gateway, v []byte) bool {
			n, ok := resp.ParseInt(v)
			if ok = ok && n >= 0; ok {
				g.slow.setLatency(n)
			}
			return ok
		}},
	{name: "maxclients", get: func(g *Gateway) string { return strconv.Itoa(g.o.MaxConns) }},
	same("maxmemory", "0"),                 // memory nodes bound the store, and Options.Budget the gateway
	same("maxmemory-policy", "noeviction"), // a cache evicts by itself, in the client library
	{name: "notify-keyspace-events", get: func(g *Gateway) string { return eventClass(g.notify.Load()).String() },
		set: func(g *Gateway, v []byte) bool {
			c, ok := parseEvents(v)
			if ok {
				g.notify.Store(uint32(c))
			}
			return ok
		}},
	{name: "proto-max-bulk-len", get: func(g *Gateway) string { return strconv.Itoa(g.o.MaxValueBytes) }}, // of values as well as of arguments
	{name: "requirepass", get: func(*Gateway) string { return "" }},                                       // shown to nobody
	same("save", ""), // there are no snapshots
	{name: "slowlog-log-slower-than", get: func(g *Gateway) string {
		micros, _ := g.slow.settings()
		return strconv.FormatInt(micros, 10)
	}, set: func(g *Gateway, v []byte) bool {
		n, ok := resp.ParseInt(v)
		if ok = ok && n >= -1; ok {
			g.slow.setTime(n)
		}
		return ok
	}},
	{name: "slowlog-max-len", get: func(g *Gateway) string {
		_, n := g.slow.settings()
		return strconv.FormatInt(n, 10)
	}, set: func(g *Gateway, v []byte) bool {
		n, ok := resp.ParseInt(v)
		if ok = ok && n >= 0; ok {
			g.slow.setLen(n)
		}
		return ok
	}},
	fixed("tcp-keepalive", "30"),
	{name: "timeout", get: func(g *Gateway) string { return strconv.FormatInt(g.idle.Load()/int64(time.Second), 10) },
		set: func(g *Gateway, v []byte) bool {
			n, ok := resp.ParseInt(v)
			if ok = ok && n >= 0 && n < 1<<31; ok {
				g.idle.Store(n * int64(time.Second))
			}
			return ok
		}},
}

// cmdConfigGet takes patterns, several of them, and returns a setting once however many match.
func cmdConfigGet(c *conn, w *resp.Writer, args [][]byte) {
	var found []setting
	for _, s := range settings {
		for _, p := range args[2:] {
			if glob.Match(lower(nil, p), []byte(s.name)) {
				found = append(found, s)
				break
			}
		}
	}
	w.Map(len(found))
	for _, s := range found {
		w.BulkString(s.name)
		w.BulkString(s.get(c.g))
	}
}

// cmdConfigSet stops at the first parameter that it refuses; Redis would undo those before,
// which matters for none that can be set here.
// It changes this gateway alone, until that ends.
func cmdConfigSet(c *conn, w *resp.Writer, args [][]byte) {
	if len(args)%2 != 0 {
		w.Error("ERR wrong number of arguments for 'config|set' command")
		return
	}
	for i := 2; i < len(args); i += 2 {
		at := slices.IndexFunc(settings, func(s setting) bool { return fold(args[i], s.name) })
		switch {
		case at < 0:
			w.Error("ERR Unknown option or number of arguments for CONFIG SET - '" + clip(args[i], 128) + "'")
			return
		case settings[at].set == nil:
			w.Error("ERR CONFIG SET failed (possibly related to argument '" + clip(args[i], 128) + "') - can't set immutable config")
			return
		case !settings[at].set(c.g, args[i+1]):
			w.Error("ERR CONFIG SET failed (possibly related to argument '" + clip(args[i], 128) + "') - kvd cannot change it to that")
			return
		}
	}
	w.OK()
}

// cmdConfigResetStat changes nothing: counters that Prometheus reads must not go back.
func cmdConfigResetStat(_ *conn, w *resp.Writer, _ [][]byte) { w.OK() }

// ---- COMMAND -------------------------------------------------------------------

// servedCommands leaves out what only a refusal exists for, so that a client that asks first
// does not use it. The order is that of the names, since that of a map would differ from call to
// call.
// The list is the caller's. Subcommands are within their commands.
func servedCommands() []*command {
	var out []*command
	for _, c := range commands {
		if c.served() {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *command) int { return strings.Compare(a.name, b.name) })
	return out
}

// cmdCommand describes all commands; redis-cli and cluster clients ask for it as they connect,
// to learn which arguments are keys.
func cmdCommand(_ *conn, w *resp.Writer, _ [][]byte) {
	all := servedCommands()
	w.Array(len(all))
	for _, c := range all {
		describe(w, c)
	}
}

// cmdCommandCount counts what COMMAND describes, without subcommands.
func cmdCommandCount(_ *conn, w *resp.Writer, _ [][]byte) { w.Int(int64(len(servedCommands()))) }

// named finds "get" and "config|get".
// It returns nil for a command that is not served, too.
func named(b []byte) *command {
	name, sub, is := strings.Cut(string(b), "|")
	c := find([]byte(name))
	if c != nil && is {
		c = c.subcommand([]byte(sub))
	}
	if c == nil || !c.served() {
		return nil
	}
	return c
}

// cmdCommandInfo says null for a command that is not served, as Redis does for those it does not
// know.
func cmdCommandInfo(c *conn, w *resp.Writer, args [][]byte) {
	if len(args) == 2 {
		cmdCommand(c, w, args)
		return
	}
	w.Array(len(args) - 2)
	for _, a := range args[2:] {
		if cmd := named(a); cmd != nil {
			describe(w, cmd)
		} else {
			w.NullArray()
		}
	}
}

// describe is a command as COMMAND tells of it: ten fields since Redis 7, of which tips and key
// specifications are empty; clients then go by first, last and step.
// Of Redis's flags it has those that follow from what is known here.
func describe(w *resp.Writer, c *command) {
	w.Array(10)
	w.BulkString(c.name)
	w.Int(int64(c.arity))
	var flags []string
	if c.write {
		flags = append(flags, "write", "denyoom")
	} else if c.key != nil || c.keys != nil {
		flags = append(flags, "readonly")
	}
	if c.noAuth {
		flags = append(flags, "no_auth")
	}
	if c.block != nil {
		flags = append(flags, "blocking")
	}
	if c.counted > 0 || c.spans != nil {
		flags = append(flags, "movablekeys")
	}
	cats := c.categories.Names()
	if slices.Contains(cats, "fast") {
		flags = append(flags, "fast")
	}
	w.Set(len(flags))
	for _, f := range flags {
		w.Simple(f)
	}
	w.Int(int64(c.first))
	w.Int(int64(c.last))
	w.Int(int64(c.step))
	w.Set(len(cats))
	for _, cat := range cats {
		w.Simple("@" + cat)
	}
	w.Array(0)
	w.Array(0)
	subs := sortedSubs(c)
	w.Array(len(subs))
	for _, s := range subs {
		describe(w, s)
	}
}

// cmdCommandDocs is what redis-cli's help and completion are made of.
func cmdCommandDocs(_ *conn, w *resp.Writer, args [][]byte) {
	var list []*command
	if len(args) == 2 {
		list = servedCommands()
	}
	for _, a := range args[2:] {
		if c := named(a); c != nil {
			list = append(list, c)
		}
	}
	w.Map(len(list))
	for _, c := range list {
		document(w, c)
	}
}

// document writes the least that redis-cli needs; subcommands are documented within their
// command.
func document(w *resp.Writer, c *command) {
	subs := sortedSubs(c)
	w.BulkString(c.name)
	n := 2
	if len(subs) > 0 {
		n++
	}
	w.Map(n)
	w.BulkString("summary")
	w.BulkString(c.summary)
	w.BulkString("group")
	w.BulkString(c.group)
	if len(subs) > 0 {
		w.BulkString("subcommands")
		w.Map(len(subs))
		for _, s := range subs {
			document(w, s)
		}
	}
}

// cmdCommandList filters as Redis does. There are no modules, so the filter by one leaves
// nothing.
func cmdCommandList(_ *conn, w *resp.Writer, args [][]byte) {
	list := servedCommands()
	if len(args) > 2 {
		var want func(c *command) bool
		switch by := lower(nil, args[len(args)-1]); {
		case len(args) != 5 || !fold(args[2], "filterby"):
		case fold(args[3], "pattern"):
			want = func(c *command) bool { return glob.Match(by, []byte(c.name)) }
		// A category that does not exist has no commands, as in Redis.
		case fold(args[3], "aclcat"):
			cat, _ := acl.ParseCategory(string(by))
			want = func(c *command) bool { return c.categories&cat != 0 }
		case fold(args[3], "module"):
			want = func(*command) bool { return false }
		}
		if want == nil {
			w.Error(errSyntax)
			return
		}
		list = slices.DeleteFunc(list, func(c *command) bool { return !want(c) })
	}
	w.Array(len(list))
	for _, c := range list {
		w.BulkString(c.name)
	}
}

// both is for loops over what keySpans returns.
func both(a, b acl.Span) [2]acl.Span { return [2]acl.Span{a, b} }

// ---- CLIENT --------------------------------------------------------------------

const errClientName = "ERR Client names cannot contain spaces, newlines or special characters."

// validName refuses what would break the lines of CLIENT LIST: names are printed there as they
// are, to whoever asks.
// The empty name is good, and means none.
func validName(b []byte) bool {
	for _, c := range b {
		if c < '!' || c > '~' {
			return false
		}
	}
	return true
}

// setName is locked, since CLIENT LIST of other connections reads the name.
// Only the connection's own goroutine writes it, so it alone may read it without the lock.
func (c *conn) setName(b []byte) {
	c.mu.Lock()
	c.mu.name = string(b)
	c.mu.Unlock()
}

// clientCommands are apart from the table since they are many.
func clientCommands() *command {
	return container("client", "connection", "Commands about connections.", nil,
		onConn("client|id", 2, "", func(c *conn, w *resp.Writer, _ [][]byte) { w.Int(c.id) }, "Returns the connection's number."),
		onConn("client|info", 2, "", func(c *conn, w *resp.Writer, _ [][]byte) { w.Verbatim("txt", c.line()+"\n") }, "Describes the connection."),
		onConn("client|list", -2, "", cmdClientList, "Describes the connections to this gateway."),
		onConn("client|setname", 3, "", func(c *conn, w *resp.Writer, args [][]byte) {
			if !validName(args[2]) {
				w.Error(errClientName)
				return
			}
			c.setName(args[2])
			w.OK()
		}, "Names the connection."),
		onConn("client|getname", 2, "", func(c *conn, w *resp.Writer, _ [][]byte) {
			if c.mu.name == "" {
				w.Null()
			} else {
				w.BulkString(c.mu.name)
			}
		}, "Returns the connection's name."),
		onConn("client|setinfo", 4, "", cmdClientSetInfo, "Names the client's library."),
		onConn("client|no-evict", 3, "", onOff, "Is accepted."),
		onConn("client|no-touch", 3, "", onOff, "Is accepted."),
		onConn("client|reply", 3, "", cmdClientReply, "Turns replies off and on."),
		onConn("client|kill", -3, "", cmdClientKill, "Closes connections."),
		onConn("client|pause", -3, "", cmdClientPause, "Holds up commands of this gateway's clients."),
		onConn("client|unpause", 2, "", cmdClientUnpause, "Ends that."),
		onConn("client|unblock", -3, "", cmdClientUnblock, "Ends the waiting of a client of this gateway."),
		onConn("client|getredir", 2, "", cmdClientGetRedir, "Returns the connection that hears of what this one caches."),
		onConn("client|tracking", -3, "", cmdClientTracking, "Begins or ends telling the client which of the keys that it caches are written."),
		onConn("client|caching", 3, "", cmdClientCaching, "Says whether the next command's keys are cached."),
		onConn("client|trackinginfo", 2, "", cmdClientTrackingInfo, "Tells how the client caches."),
		helpOf("client", "GETNAME", "    Return the name of the current connection.", "ID", "    Return the ID of the current connection.",
			"INFO", "    Return information about the current client connection.", "KILL <option> ...", "    Kill connection(s).",
			"LIST [options ...]", "    Return information about client connections.", "UNPAUSE", "    Stop the current client pause, resuming traffic.",
			"PAUSE <timeout> [WRITE|ALL]", "    Suspend all, or just write, clients for <timeout> milliseconds.", "REPLY (ON|OFF|SKIP)", "    Control the replies sent to the current connection.",
			"SETNAME <name>", "    Assign the name <name> to the current connection.",
			"UNBLOCK <clientid> [TIMEOUT|ERROR]", "    Unblock the specified blocked client."))
}

// onOff accepts what would change how Redis evicts: here the client library decides that, for
// all alike.
func onOff(_ *conn, w *resp.Writer, args [][]byte) {
	if !fold(args[2], "on") && !fold(args[2], "off") {
		w.Error(errSyntax)
		return
	}
	w.OK()
}

// cmdClientSetInfo is what client libraries say of themselves as they connect; CLIENT LIST shows
// it.
// Values are bounded, since each connection keeps them.
func cmdClientSetInfo(c *conn, w *resp.Writer, args [][]byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch v := args[3]; {
	case len(v) > 256 || !validName(v):
		w.Error("ERR " + strings.ToLower(clip(args[2], 32)) + " cannot contain spaces, newlines or special characters.")
		return
	case fold(args[2], "lib-name"):
		c.mu.libName = string(v)
	case fold(args[2], "lib-ver"):
		c.mu.libVer = string(v)
	default:
		w.Error("ERR Unrecognized option '" + clip(args[2], 128) + "'")
		return
	}
	w.OK()
}

// cmdClientReply replies to ON alone. SKIP concerns the next command, so it must not touch a
// mode that is OFF; conn.replied moves the mode on.
func cmdClientReply(c *conn, w *resp.Writer, args [][]byte) {
	switch {
	case fold(args[2], "on"):
		c.reply = replyOn
		w.OK()
	case fold(args[2], "off"):
		c.reply = replyOff
	case fold(args[2], "skip"):
		if c.reply != replyOff {
			c.reply = replySkipNext
		}
	default:
		w.Error(errSyntax)
	}
}

// each calls f for the connections in the order of their numbers.
// f is called without the lock, so that it may take its time or end connections; some may have
// gone by then.
// A connection that comes while it runs is left out.
func (g *Gateway) each(f func(c *conn)) {
	g.mu.Lock()
	all := make([]*conn, 0, len(g.mu.conns))
	for _, c := range g.mu.conns {
		all = append(all, c)
	}
	g.mu.Unlock()
	slices.SortFunc(all, func(a, b *conn) int { return int(a.id - b.id) })
	for _, c := range all {
		f(c)
	}
}

// eachClient is each without the connections that were killed. To clients they have ended, though what serves
// them may not have seen it yet.
func (g *Gateway) eachClient(f func(c *conn)) {
	g.each(func(c *conn) {
		if !c.link.Killed() {
			f(c)
		}
	})
}

// clientType finds the connections of a type as CLIENT LIST and KILL name it; nil for an unknown one. There are no replicas.
// A connection is of type pubsub while it has subscriptions.
func clientType(name []byte) func(x *conn) bool {
	switch {
	case fold(name, "normal"):
		return func(x *conn) bool { return x.listens.Load() == 0 }
	case fold(name, "pubsub"):
		return func(x *conn) bool { return x.listens.Load() > 0 }
	case fold(name, "master"), fold(name, "replica"), fold(name, "slave"):
		return func(*conn) bool { return false }
	}
	return nil
}

// cmdClientList shows the connections to this gateway.
// Other gateways have clients of their own; kvctl shows those of all of them.
func cmdClientList(c *conn, w *resp.Writer, args [][]byte) {
	want := func(*conn) bool { return true }
	switch {
	case len(args) == 4 && fold(args[2], "type"):
		if want = clientType(args[3]); want == nil {
			w.Error("ERR Unknown client type '" + clip(args[3], 128) + "'")
			return
		}
	case len(args) > 3 && fold(args[2], "id"):
		ids := make(map[int64]bool)
		for _, a := range args[3:] {
			id, ok := resp.ParseInt(a)
			if !ok {
				w.Error("ERR Invalid client ID")
				return
			}
			ids[id] = true
		}
		want = func(c *conn) bool { return ids[c.id] }
	case len(args) != 2:
		w.Error(errSyntax)
		return
	}
	var s strings.Builder
	c.g.eachClient(func(c *conn) {
		if want(c) {
			s.WriteString(c.line() + "\n")
		}
	})
	w.Verbatim("txt", s.String())
}

// cmdClientKill ends connections of this gateway only: others have numbers of their own. The old
// form names one address and fails if there is none; the new one combines filters, all of which
// must match, spares the caller unless told otherwise, and counts. Only Kill is called, which
// may be called from any goroutine; what serves the connection then sees the end.
func cmdClientKill(c *conn, w *resp.Writer, args [][]byte) {
	var tests []func(x *conn) bool
	skipMe := true
	addr := func(a []byte) func(*conn) bool {
		s := string(a)
		return func(x *conn) bool { return x.remote.String() == s }
	}
	// CLIENT KILL ADDR has four words, so three of them are the form of before Redis 2.8.12.
	old := len(args) == 3
	if old {
		tests, skipMe = append(tests, addr(args[2])), false
	} else {
		if len(args)%2 != 0 {
			w.Error(errSyntax)
			return
		}
		for i := 2; i < len(args); i += 2 {
			v := args[i+1]
			switch o := args[i]; {
			case fold(o, "id"):
				id, ok := resp.ParseInt(v)
				if !ok || id < 1 {
					w.Error("ERR client-id should be greater than 0")
					return
				}
				tests = append(tests, func(x *conn) bool { return x.id == id })
			case fold(o, "addr"):
				tests = append(tests, addr(v))
			case fold(o, "laddr"):
				s := string(v)
				tests = append(tests, func(x *conn) bool { return x.local.String() == s })
			case fold(o, "user"):
				// The connections of a user that was deleted have been closed, so the name finds all that there are.
				u := c.g.users.Find(string(v))
				if u == nil {
					w.Error("ERR No such user '" + clip(v, 128) + "'")
					return
				}
				tests = append(tests, func(x *conn) bool { return x.user.Load() == u })
			case fold(o, "type"):
				is := clientType(v)
				if is == nil {
					w.Error("ERR Unknown client type '" + clip(v, 128) + "'")
					return
				}
				tests = append(tests, is)
			case fold(o, "skipme") && fold(v, "yes"):
				skipMe = true
			case fold(o, "skipme") && fold(v, "no"):
				skipMe = false
			default:
				w.Error(errSyntax)
				return
			}
		}
	}
	n := 0
	c.g.eachClient(func(x *conn) {
		for _, t := range tests {
			if !t(x) {
				return
			}
		}
		if x == c && skipMe {
			return
		}
		n++
		if x == c {
			c.closing = true // after the reply, which says that it was ended
		} else {
			x.link.Kill()
		}
	})
	switch {
	case !old:
		w.Int(int64(n))
	case n == 0:
		w.Error("ERR No such client")
	default:
		w.OK()
	}
}
