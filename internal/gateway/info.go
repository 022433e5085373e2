package gateway

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// statser is a database's client that counts, as *client.Client does.
// Fakes in tests do not, and a database that does not count is left out of INFO.
type statser interface{ Stats() client.Stats }

// infoSections are INFO's, with the fields of Redis that monitoring tools read. Those that kvd knows
// and Redis does not begin with kvd_. Fields for things that do not exist here say so with the
// value that such a tool takes for healthy.
// They are in the order in which INFO shows them. write is called by the goroutine of the connection that asks, and may
// wait for the store.
var infoSections = []struct {
	name  string
	extra bool // only if asked for by name, or by "all"
	write func(x *infoOf, line func(key string, value any))
}{
	{"Server", false, func(x *infoOf, line func(string, any)) {
		g := x.g
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
		line("hz", settings["hz"].get(x.c))
		line("configured_hz", settings["hz"].get(x.c))
		line("io_threads_active", 0)
	}},
	{"Clients", false, func(x *infoOf, line func(string, any)) {
		g := x.g
		line("connected_clients", g.srv.Conns())
		line("cluster_connections", 0)
		line("maxclients", g.o.MaxConns)
		line("blocked_clients", g.waits.clients.Load()+g.pausing.clients.Load())
		line("tracking_clients", g.tracked.Clients())
		line("clients_in_timeout_table", 0)
	}},
	{"Memory", false, func(x *infoOf, line func(string, any)) {
		g := x.g
		m := g.memoryOf(x.c.db)
		// A session knows what was granted to it and what it wrote.
		var live, granted uint64
		for _, n := range g.namespaces() {
			if s, ok := n.api.(statser); ok {
				st := s.Stats()
				live += st.LiveUnits * values.RecordUnit
				granted += st.GrantedUnits * values.RecordUnit
			}
		}
		line("used_memory", m.used)
		line("used_memory_human", human(m.used))
		line("used_memory_rss", m.process)
		line("used_memory_rss_human", human(m.process))
		line("used_memory_peak", m.peak)
		line("used_memory_peak_human", human(m.peak))
		line("used_memory_peak_perc", percent(m.used, m.peak))
		line("used_memory_overhead", 0)
		line("used_memory_startup", 0)
		line("used_memory_dataset", m.used)
		line("used_memory_dataset_perc", "100.00%")
		cached, bytes := g.scripts.cache.Len()
		line("used_memory_lua", bytes)
		line("used_memory_lua_human", human(uint64(bytes)))
		line("used_memory_scripts", bytes)
		line("used_memory_scripts_human", human(uint64(bytes)))
		line("number_of_cached_scripts", cached)
		line("kvd_session_live_bytes", live)
		line("kvd_session_granted_bytes", granted)
		line("kvd_heap_bytes", m.heap)
		line("kvd_queued_reply_bytes", g.m.queued.Load())
		line("kvd_reserved_buffer_bytes", g.o.Budget.Used())
		_, slow := g.slow.Size()
		line("kvd_slowlog_bytes", slow)
		line("maxmemory", m.most)
		line("maxmemory_human", human(m.most))
		line("maxmemory_policy", m.policy())
		line("mem_not_counted_for_evict", 0)
		line("mem_replication_backlog", 0)
		line("mem_clients_slaves", 0)
		line("mem_clients_normal", g.o.Budget.Used())
		line("mem_cluster_links", 0)
		line("mem_aof_buffer", 0)
		line("mem_allocator", "go")
		line("active_defrag_running", 0)
		line("lazyfree_pending_objects", 0)
		line("lazyfreed_objects", 0)
	}},
	{"Persistence", false, func(x *infoOf, line func(string, any)) {
		// Nothing is ever saved or loaded here: tools that wait for a save to end must find that it has.
		line("loading", 0)
		line("async_loading", 0)
		line("current_save_keys_processed", 0)
		line("current_save_keys_total", 0)
		line("rdb_changes_since_last_save", 0)
		line("rdb_bgsave_in_progress", 0)
		line("rdb_last_save_time", x.g.started.Unix())
		line("rdb_last_bgsave_status", "ok")
		line("rdb_last_bgsave_time_sec", -1)
		line("rdb_current_bgsave_time_sec", -1)
		line("rdb_saves", 0)
		line("rdb_last_cow_size", 0)
		line("aof_enabled", 0)
		line("aof_rewrite_in_progress", 0)
		line("aof_rewrite_scheduled", 0)
		line("aof_last_rewrite_time_sec", -1)
		line("aof_current_rewrite_time_sec", -1)
		line("aof_last_bgrewrite_status", "ok")
		line("aof_last_write_status", "ok")
		line("aof_last_cow_size", 0)
		line("module_fork_in_progress", 0)
		line("module_fork_last_cow_size", 0)
	}},
	{"Stats", false, func(x *infoOf, line func(string, any)) {
		g, t := x.g, x.counted()
		ops, in, out := g.rates.since(t.total(), t.read, t.written)
		line("total_connections_received", t.accepted)
		line("total_commands_processed", t.total())
		line("instantaneous_ops_per_sec", ops)
		line("total_net_input_bytes", t.read)
		line("total_net_output_bytes", t.written)
		line("instantaneous_input_kbps", in)
		line("instantaneous_output_kbps", out)
		line("rejected_connections", t.refused)
		line("sync_full", 0)
		line("sync_partial_ok", 0)
		line("sync_partial_err", 0)
		// By this gateway; the client library does it.
		line("expired_keys", t.expired)
		line("expired_stale_perc", "0.00")
		line("expired_time_cap_reached_count", 0)
		line("evicted_keys", t.evicted)
		line("evicted_clients", g.m.evicted.Load())
		line("keyspace_hits", t.hits)
		line("keyspace_misses", t.misses)
		channels, patterns, shards := g.hub.Counts()
		line("pubsub_channels", channels)
		line("pubsub_patterns", patterns)
		line("pubsubshard_channels", shards)
		line("latest_fork_usec", 0)
		line("total_forks", 0)
		line("migrate_cached_sockets", 0)
		line("slave_expires_tracked_keys", 0)
		line("active_defrag_hits", 0)
		line("active_defrag_misses", 0)
		line("active_defrag_key_hits", 0)
		line("active_defrag_key_misses", 0)
		keys, items, prefixes := g.tracked.Counts()
		line("tracking_total_keys", keys)
		line("tracking_total_items", items)
		line("tracking_total_prefixes", prefixes)
		line("unexpected_error_replies", 0)
		line("total_error_replies", t.errorReplies)
		line("dump_payload_sanitizations", 0)
		line("acl_access_denied_auth", t.authFails)
		line("acl_access_denied_cmd", t.denied[acl.DeniedCommand])
		line("acl_access_denied_key", t.denied[acl.DeniedKey])
		line("acl_access_denied_channel", t.denied[acl.DeniedChannel])
		line("kvd_batches", t.batch)
	}},
	{"Replication", false, func(x *infoOf, line func(string, any)) {
		// Copies are the memory nodes' affair; a client that looks for somebody to write to finds it.
		line("role", "master")
		line("connected_slaves", 0)
		line("master_failover_state", "no-failover")
		line("master_replid", x.g.runID)
		line("master_replid2", strings.Repeat("0", len(x.g.runID)))
		line("master_repl_offset", 0)
		line("second_repl_offset", -1)
		line("repl_backlog_active", 0)
		line("repl_backlog_size", settings["repl-backlog-size"].get(x.c))
		line("repl_backlog_first_byte_offset", 0)
		line("repl_backlog_histlen", 0)
	}},
	{"CPU", false, func(_ *infoOf, line func(string, any)) {
		var u, children syscall.Rusage
		seconds := func(t syscall.Timeval) string { return fmt.Sprintf("%d.%06d", t.Sec, t.Usec) }
		if syscall.Getrusage(syscall.RUSAGE_SELF, &u) == nil && syscall.Getrusage(syscall.RUSAGE_CHILDREN, &children) ==
			nil {
			line("used_cpu_sys", seconds(u.Stime))
			line("used_cpu_user", seconds(u.Utime))
			line("used_cpu_sys_children", seconds(children.Stime))
			line("used_cpu_user_children", seconds(children.Utime))
		}
	}},
	{"Modules", false, func(*infoOf, func(string, any)) {}},
	{"Commandstats", true, func(x *infoOf, line func(string, any)) {
		t := x.counted()
		for _, cmd := range commandsByID {
			if c := &t.commands[cmd.ID]; cmd != unknown && c.calls+c.rejected > 0 {
				us := c.nanos / 1000
				line("cmdstat_"+cmd.Name,
					fmt.Sprintf("calls=%d,usec=%d,usec_per_call=%.2f,rejected_calls=%d,failed_calls=%d",
						c.calls, us, float64(us)/float64(max(c.calls, 1)), c.rejected, c.failed))
			}
		}
	}},
	{"Errorstats", false, func(x *infoOf, line func(string, any)) {
		t := x.counted()
		for _, class := range slices.Sorted(maps.Keys(t.errors)) {
			line("errorstat_"+unsafeInInfo.Replace(class), fmt.Sprintf("count=%d", t.errors[class]))
		}
	}},
	{"Latencystats", true, func(x *infoOf, line func(string, any)) {
		if settings["latency-tracking"].get(x.c) != "yes" {
			return
		}
		t := x.counted()
		percentiles := split(percentilesSetting.get(x.c))
		for _, cmd := range commandsByID {
			c := &t.commands[cmd.ID]
			if cmd == unknown || c.calls == 0 {
				continue
			}
			var fields []string
			for _, p := range percentiles {
				f, _ := strconv.ParseFloat(p, 64)
				fields = append(fields, fmt.Sprintf("p%s=%.3f", p, c.percentile(f)))
			}
			line("latency_percentiles_usec_"+cmd.Name, strings.Join(fields, ","))
		}
	}},
	{"Cluster", false, func(x *infoOf, line func(string, any)) { line("cluster_enabled", values.Bit(x.g.o.Cluster)) }},
	{"Keyspace", false, func(x *infoOf, line func(string, any)) {
		// A database that cannot be counted now is left out, as an empty one is in Redis.
		for i := range x.g.o.Databases {
			if n, err := x.g.KeyCount(i); err == nil && n > 0 {
				line("db"+strconv.Itoa(i), fmt.Sprintf("keys=%d,expires=0,avg_ttl=0", n))
			}
		}
	}},
}

type infoOf struct {
	g       *Gateway
	c       *conn // that asks
	tallied *tally
}

// counted reads the counters once.
func (x *infoOf) counted() *tally {
	if x.tallied == nil {
		t := x.g.since()
		x.tallied = &t
	}
	return x.tallied
}

func percent(n, of uint64) string { return fmt.Sprintf("%.2f%%", 100*float64(n)/float64(max(of, 1))) }

// rates are how much was done a second between two readings of INFO that are rateLeast apart, or the last such two.
type rates struct {
	sync.Mutex
	at          time.Time
	n, in, out  uint64
	ops         uint64
	kbIn, kbOut float64
}

const rateLeast = time.Second

// since is as Redis shows it. Counters that were set back count from 0.
func (r *rates) since(n, in, out uint64) (ops uint64, kbIn, kbOut string) {
	r.Lock()
	defer r.Unlock()
	if now := time.Now(); now.Sub(r.at) >= rateLeast {
		if seconds := now.Sub(r.at).Seconds(); !r.at.IsZero() {
			r.ops = uint64(float64(n-min(r.n, n)) / seconds)
			r.kbIn, r.kbOut = float64(in-min(r.in, in))/1024/seconds, float64(out-min(r.out, out))/1024/seconds
		}
		r.at, r.n, r.in, r.out = now, n, in, out
	}
	return r.ops, fmt.Sprintf("%.2f", r.kbIn), fmt.Sprintf("%.2f", r.kbOut)
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
func cmdInfo(c *conn, w *resp.Writer, args [][]byte) error {
	var s strings.Builder
	x := infoOf{g: c.g, c: c}
	for _, sec := range infoSections {
		want := len(args) == 1 && !sec.extra
		for _, a := range args[1:] {
			want = want || values.Fold(a, strings.ToLower(sec.name)) || values.Fold(a, "all") ||
				values.Fold(a, "everything") || values.Fold(a, "default") && !sec.extra
		}
		if !want {
			continue
		}
		if s.Len() > 0 {
			s.WriteString("\r\n")
		}
		s.WriteString("# " + sec.name + "\r\n")
		sec.write(&x, func(key string, value any) { fmt.Fprintf(&s, "%s:%v\r\n", key, value) })
	}
	w.Verbatim("txt", s.String())
	return nil
}
