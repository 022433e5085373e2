package gateway

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// setting is a parameter of Redis's.
// A value is a function of the Gateway, since some are what the options say.
type setting struct {
	name string               // lower case
	get  func(c *conn) string // as CONFIG GET shows it
	// set looks at a value, and gives back what makes it the setting's. The error says what is wrong with it, and is a
	// part of the reply. nil: cannot be changed.
	set func(c *conn, v string) (apply func(), err error)
}

// fixed is a setting that cannot be changed, and has no value here.
func fixed(name, value string) setting {
	return setting{name: name, get: func(*conn) string { return value }}
}

// same is a setting that may be set to what it is.
// Tools write back what they have read, and must not fail over that.
func same(name string, get func(c *conn) string) setting {
	return setting{name: name, get: get, set: func(c *conn, v string) (func(), error) {
		if v != get(c) {
			return nil, refusal("kvd cannot change it to that")
		}
		return func() {}, nil
	}}
}

// orElse has other words for a value that a setting refuses.
func orElse(why string, s setting) setting {
	set := s.set
	s.set = func(c *conn, v string) (func(), error) {
		apply, err := set(c, v)
		if err != nil {
			err = refusal(why)
		}
		return apply, err
	}
	return s
}

func always(value string) func(*conn) string { return func(*conn) string { return value } }

func numberParam(name string, least, most int64, get func(c *conn) int64, set func(c *conn, n int64)) setting {
	return setting{name: name, get: func(c *conn) string { return strconv.FormatInt(get(c), 10) },
		set: func(c *conn, v string) (func(), error) {
			n, err := parseInteger(v, least, most)
			return func() { set(c, n) }, err
		}}
}

// parseInteger and its like read values as Redis does, with its words for what is wrong.
func parseInteger(v string, least, most int64) (n int64, err error) {
	n, ok := resp.ParseInt([]byte(v))
	switch {
	case !ok:
		return 0, refusal("argument couldn't be parsed into an integer")
	case n < least || n > most:
		return 0, between(least, most)
	}
	return n, nil
}

func between(least, most int64) refusal {
	return refusal(fmt.Sprintf("argument must be between %d and %d inclusive", least, most))
}

// parseBytes reads digits and a unit, in any case. No digits are 0, as in Redis.
func parseBytes(v string, least, most int64) (n int64, err error) {
	digits := v
	for i, c := range []byte(v) {
		if c < '0' || c > '9' {
			digits = v[:i]
			break
		}
	}
	factor, ok := map[string]int64{"": 1, "b": 1, "k": 1000, "kb": 1 << 10, "m": 1e6, "mb": 1 << 20, "g": 1e9,
		"gb": 1 << 30}[strings.ToLower(v[len(digits):])]
	if !ok || digits == "" && v != "" {
		return 0, refusal("argument must be a memory value")
	}
	if digits != "" {
		u, err := strconv.ParseUint(digits, 10, 63)
		if err != nil || int64(u) > math.MaxInt64/factor {
			return 0, between(least, most)
		}
		n = int64(u) * factor
	}
	if n < least || n > most {
		return 0, between(least, most)
	}
	return n, nil
}

// split cuts a value at each of its spaces; one without a byte has no parts.
func split(v string) []string {
	if v == "" {
		return nil
	}
	return strings.Split(v, " ")
}

func parseBool(v string) (string, error) {
	if v = strings.ToLower(v); v != "yes" && v != "no" {
		return "", refusal("argument must be 'yes' or 'no'")
	}
	return v, nil
}

func parseOneOf(v string, names []string) (string, error) {
	if v = strings.ToLower(v); !slices.Contains(names, v) {
		return "", refusal("argument(s) must be one of the following: " + strings.Join(names, ", "))
	}
	return v, nil
}

// heldText has the settings that can be set as in Redis and have no effect here but those that encodingLimits and
// latencyTracking name: tools and test suites set them before they go on, and what is read is what was set. A line is
// the default, the kind with its bounds, and the names. Those that promise something which kvd does not do are not
// among them: see settings.
const heldText = `
512 int:0: hash-max-listpack-entries hash-max-ziplist-entries
64 bytes:0: hash-max-listpack-value hash-max-ziplist-value
512 int:0: set-max-intset-entries
128 int:0: zset-max-listpack-entries zset-max-ziplist-entries
64 bytes:0: zset-max-listpack-value zset-max-ziplist-value
-2 int:-2147483648:2147483647 list-max-listpack-size list-max-ziplist-size
0 int:0:2147483647 list-compress-depth
4096 bytes:0: stream-node-max-bytes
100 int:0: stream-node-max-entries
3000 bytes:0: hll-sparse-max-bytes
5000 int:0: busy-reply-threshold lua-time-limit
1073741824 bytes:1048576: client-query-buffer-limit
1048576 bytes:1: repl-backlog-size
3600 int:0: repl-backlog-ttl
60 int:1:2147483647 repl-timeout
10 int:1:2147483647 repl-ping-replica-period repl-ping-slave-period
yes bool repl-diskless-sync
5 int:0:2147483647 repl-diskless-sync-delay
no bool repl-disable-tcp-nodelay
disabled disabled,on-empty-db,swapdb repl-diskless-load
100 int:0:2147483647 replica-priority slave-priority
yes bool replica-serve-stale-data slave-serve-stale-data
no bool replica-lazy-flush slave-lazy-flush
yes bool replica-ignore-maxmemory slave-ignore-maxmemory
10 int:0:2147483647 min-replicas-max-lag min-slaves-max-lag
1 int:1:10 active-expire-effort
1 int:1:99 active-defrag-cycle-min
25 int:1:99 active-defrag-cycle-max
10 int:0:1000 active-defrag-threshold-lower
100 int:0:1000 active-defrag-threshold-upper
104857600 bytes:1: active-defrag-ignore-bytes
1000 int:1: active-defrag-max-scan-fields
5 int:1:2147483647 maxmemory-samples
10 int:0:100 maxmemory-eviction-tenacity
10 int:0:2147483647 lfu-log-factor
1 int:0:2147483647 lfu-decay-time
10 int:0:2147483647 hz
yes bool dynamic-hz
yes bool activerehashing
no bool lazyfree-lazy-eviction
no bool lazyfree-lazy-expire
no bool lazyfree-lazy-server-del
no bool lazyfree-lazy-user-del
no bool lazyfree-lazy-user-flush
yes bool rdbcompression
yes bool rdb-save-incremental-fsync
no bool rdb-del-sync-files
yes bool stop-writes-on-bgsave-error
everysec everysec,always,no appendfsync
no bool no-appendfsync-on-rewrite
100 int:0:2147483647 auto-aof-rewrite-percentage
67108864 bytes:0: auto-aof-rewrite-min-size
yes bool aof-rewrite-incremental-fsync
yes bool aof-load-truncated
yes bool aof-use-rdb-preamble
no bool aof-timestamp-enabled
no no,yes,clients sanitize-dump-payload
yes bool jemalloc-bg-thread
yes bool crash-log-enabled
yes bool crash-memcheck-enabled
notice debug,verbose,notice,warning loglevel
15000 int:0: cluster-node-timeout
yes bool latency-tracking
`

// held are the values of such settings that are not their defaults, by first name. The zero value is ready for use.
type held struct {
	mu sync.Mutex
	by map[string]string
}

func (h *held) get(name, otherwise string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if v, ok := h.by[name]; ok {
		return v
	}
	return otherwise
}

func (h *held) set(name, v string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.by == nil {
		h.by = make(map[string]string)
	}
	h.by[name] = v
}

// setDefaults makes the limits what the settings are at the start.
func setDefaults(e *values.EncodingLimits) {
	for _, s := range heldSettings {
		if at := e.Of(s.name); at != nil {
			n, _ := strconv.ParseInt(s.otherwise, 10, 64)
			at.Store(n)
		}
	}
}

// heldSetting is a line of heldText, by its first name.
type heldSetting struct{ name, otherwise string }

// heldSettings are the lines of heldText.
var heldSettings []heldSetting

// parseHeld makes settings of heldText, one for each name. It panics over a mistake there, at the program's start.
func parseHeld() (list []setting) {
	for line := range strings.Lines(strings.TrimSpace(heldText)) {
		words := strings.Fields(line)
		first, otherwise, parse := words[2], words[0], parserOf(words[1])
		heldSettings = append(heldSettings, heldSetting{first, otherwise})
		for _, name := range words[2:] {
			list = append(list, setting{name: name, get: func(c *conn) string { return c.g.held.get(first, otherwise) },
				set: func(c *conn, v string) (func(), error) {
					v, err := parse(v)
					return func() { c.g.hold(first, v) }, err
				}})
		}
		if _, err := parse(otherwise); err != nil {
			panic(line + err.Error())
		}
	}
	return list
}

func (g *Gateway) hold(name, v string) {
	if at := g.encodings.Of(name); at != nil {
		n, _ := strconv.ParseInt(v, 10, 64)
		at.Store(n)
		g.encodings.Set.Store(true)
	}
	// Redis, too, makes something else of these.
	switch n, _ := strconv.ParseInt(v, 10, 64); name {
	case "hz":
		v = strconv.FormatInt(min(max(n, 1), 500), 10)
	case "repl-backlog-size":
		v = strconv.FormatInt(max(n, 16<<10), 10)
	}
	g.held.set(name, v)
}

// parserOf reads the kind of a line of heldText.
func parserOf(kind string) func(v string) (string, error) {
	word, bounds, _ := strings.Cut(kind, ":")
	from, to, _ := strings.Cut(bounds, ":")
	least, _ := strconv.ParseInt(from, 10, 64)
	most, err := strconv.ParseInt(to, 10, 64)
	if err != nil {
		most = math.MaxInt64
	}
	numbers := func(parse func(string, int64, int64) (int64, error)) func(string) (string, error) {
		return func(v string) (string, error) {
			n, err := parse(v, least, most)
			return strconv.FormatInt(n, 10), err
		}
	}
	switch word {
	case "int":
		return numbers(parseInteger)
	case "bytes":
		return numbers(parseBytes)
	case "bool":
		return parseBool
	}
	names := strings.Split(kind, ",")
	return func(v string) (string, error) { return parseOneOf(v, names) }
}

// outputLimits are the classes of client-output-buffer-limit with their defaults, in the order in which it shows them.
// Replicas are called slave there.
var outputLimits = []struct{ class, otherwise string }{{"normal", "0 0 0"}, {"slave", "268435456 67108864 60"},
	{"pubsub", "33554432 8388608 60"}}

const outputLimitName = "client-output-buffer-limit"

// outputLimit is a held setting of its own form: options bound the output, and the same for all clients.
var outputLimit = setting{name: outputLimitName, get: func(c *conn) string {
	var words []string
	for _, l := range outputLimits {
		words = append(words, l.class, c.g.held.get(outputLimitName+" "+l.class, l.otherwise))
	}
	return strings.Join(words, " ")
}, set: func(c *conn, v string) (func(), error) {
	words := split(v)
	if len(words)%4 != 0 {
		return nil, refusal("Wrong number of arguments in buffer limit configuration.")
	}
	limits := make(map[string]string)
	for part := range slices.Chunk(words, 4) {
		class := strings.ToLower(part[0])
		if class == "replica" {
			class = "slave"
		}
		if !slices.ContainsFunc(outputLimits, func(l struct{ class, otherwise string }) bool {
			return l.class == class
		}) {
			return nil, refusal("Invalid client class specified in buffer limit configuration.")
		}
		hard, err1 := parseBytes(part[1], 0, math.MaxInt64)
		soft, err2 := parseBytes(part[2], 0, math.MaxInt64)
		seconds, err3 := strconv.ParseInt(part[3], 10, 64)
		if errors.Join(err1, err2, err3) != nil || seconds < 0 {
			return nil, refusal("Error in hard, soft or soft_seconds setting in buffer limit configuration.")
		}
		limits[class] = fmt.Sprint(hard, soft, seconds)
	}
	return func() {
		for class, l := range limits {
			c.g.held.set(outputLimitName+" "+class, l)
		}
	}, nil
}}

// percentilesName is the setting that says what INFO latencystats shows.
const percentilesName, defaultPercentiles = "latency-tracking-info-percentiles", "50 99 99.9"

var percentilesSetting = setting{name: percentilesName, get: func(c *conn) string {
	return c.g.held.get(percentilesName, defaultPercentiles)
},
	set: func(c *conn, v string) (func(), error) {
		var words []string
		for _, w := range split(v) {
			p, err := strconv.ParseFloat(w, 64)
			switch {
			case err != nil || math.IsNaN(p):
				return nil, refusal("Invalid latency-tracking-info-percentiles parameters")
			case p < 0 || p > 100:
				return nil, refusal("latency-tracking-info-percentiles parameters should sit between [0.0,100.0]")
			}
			words = append(words, strconv.FormatFloat(p, 'g', -1, 64))
		}
		return func() { c.g.held.set(percentilesName, strings.Join(words, " ")) }, nil
	}}

// settings are those of Redis's, by name, that clients, tools and test suites read or set. Of those that do something
// in Redis, CONFIG SET takes no value that promises what kvd does not do, such as a log of commands; timeout,
// notify-keyspace-events and those of the slow log have their effect.
var settings = byName(parseHeld(), []setting{
	same("activedefrag", always("no")), // Go's allocator moves nothing
	same("appendonly", always("no")),   // there is no log of commands
	{name: "aclfile", get: func(c *conn) string { return c.g.o.ACLFile }},
	{name: "acllog-max-len", get: func(*conn) string { return strconv.Itoa(acl.MaxEntries) }},
	fixed("bind", ""), // the process's own settings say where it listens
	{name: "databases", get: func(c *conn) string { return strconv.Itoa(len(c.g.o.Databases)) }},
	fixed("dir", ""), // nothing is kept on disk
	numberParam("latency-monitor-threshold", 0, math.MaxInt64, func(c *conn) int64 {
		return c.g.slow.LatencyFrom()
	}, func(c *conn, n int64) { c.g.slow.SetLatency(n) }),
	same("maxclients", func(c *conn) string { return strconv.Itoa(c.g.o.MaxConns) }),
	// Of the namespace of the database that the connection has chosen.
	orElse("kvd cannot change it to that: kvctl namespace set NAME --limit does",
		same("maxmemory", func(c *conn) string {
			return strconv.FormatUint(c.g.memoryOf(c.db).most, 10)
		})),
	orElse("kvd cannot change it to that: whether a namespace evicts is said when it is made, by kvctl namespace "+
		"create --mode", same("maxmemory-policy", func(c *conn) string {
		u := c.g.memoryOf(c.db)
		return u.policy()
	})),
	same("maxmemory-clients", always("0")),
	same("min-replicas-to-write", always("0")),
	{name: "notify-keyspace-events", get: func(c *conn) string { return values.EventClass(c.g.notify.Load()).String() },
		set: func(c *conn, v string) (func(), error) {
			events, ok := values.ParseEvents([]byte(v))
			if !ok {
				return nil, refusal("Invalid event class character. Use 'Ag$lshzxeKEtmdn'.")
			}
			return func() { c.g.notify.Store(uint32(events)) }, nil
		}},
	// of values as well as of arguments
	same("proto-max-bulk-len", func(c *conn) string { return strconv.Itoa(c.g.o.MaxValueBytes) }),
	fixed("requirepass", ""), // shown to nobody
	same("save", always("")), // there are no snapshots
	numberParam("slowlog-log-slower-than", -1, math.MaxInt64, func(c *conn) int64 {
		micros, _ := c.g.slow.Settings()
		return micros
	}, func(c *conn, n int64) { c.g.slow.SetTime(n) }),
	numberParam("slowlog-max-len", 0, math.MaxInt64, func(c *conn) int64 {
		_, n := c.g.slow.Settings()
		return n
	}, func(c *conn, n int64) { c.g.slow.SetLen(n) }),
	same("tcp-keepalive", always("30")),
	numberParam("timeout", 0, math.MaxInt32, func(c *conn) int64 { return c.g.idle.Load() / int64(time.Second) },
		func(c *conn, n int64) { c.g.idle.Store(n * int64(time.Second)) }),
	same("tracking-table-max-keys", func(c *conn) string { return strconv.Itoa(c.g.o.TrackingKeys) }),
	outputLimit,
	percentilesSetting,
})

func byName(lists ...[]setting) map[string]setting {
	all := make(map[string]setting)
	for _, list := range lists {
		for _, s := range list {
			all[s.name] = s
		}
	}
	return all
}

// cmdConfigGet takes patterns, several of them, and returns a setting once however many match.
func cmdConfigGet(c *conn, w *resp.Writer, args [][]byte) error {
	var found []setting
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		for _, p := range args[2:] {
			if glob.Match(lower(nil, p), []byte(name)) {
				found = append(found, settings[name])
				break
			}
		}
	}
	w.Map(len(found))
	for _, s := range found {
		w.BulkString(s.name)
		w.BulkString(s.get(c))
	}
	return nil
}

// cmdConfigSet changes all of its parameters or none. It changes this gateway alone, until that ends.
// Redis looks at all names before it looks at values, and so names the first of them that is wrong.
func cmdConfigSet(c *conn, w *resp.Writer, args [][]byte) error {
	if len(args)%2 != 0 {
		return values.ErrSyntax
	}
	failed := func(arg []byte, why string) error {
		return refusal("ERR CONFIG SET failed (possibly related to argument '" + values.Clip(arg, 128) + "') - " + why)
	}
	chosen := make(map[string]bool)
	for i := 2; i < len(args); i += 2 {
		s, ok := settings[string(lower(nil, args[i]))]
		switch {
		case !ok:
			return refusal("ERR Unknown option or number of arguments for CONFIG SET - '" + values.Clip(args[i], 128) +
				"'")
		case s.set == nil:
			return failed(args[i], "can't set immutable config")
		case chosen[s.name]:
			return failed(args[i], "duplicate parameter")
		}
		chosen[s.name] = true
	}
	var changes []func()
	for i := 2; i < len(args); i += 2 {
		apply, err := settings[string(lower(nil, args[i]))].set(c, string(args[i+1]))
		if err != nil {
			return failed(args[i], err.Error())
		}
		changes = append(changes, apply)
	}
	for _, apply := range changes {
		apply()
	}
	w.OK()
	return nil
}
