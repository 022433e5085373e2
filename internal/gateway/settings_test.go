package gateway

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/testutil"
)

// settingValues are what a setting may be given, good and bad.
var settingValues = []string{"0", "1", "5", "100", "-1", "-5", "2147483647", "2147483648", "9223372036854775807",
	"9223372036854775808", "007", "+5", " 1", "1.5", "0x10", "abc", "",
	"1kb", "2MB", "1b", "1k", "1m", "1g", "1gb", "1tb", "1%", "-1kb", "yes", "no", "YES", "maybe", "everysec", "ALWAYS",
	"debug", "on-empty-db", "clients", "99999999999999999999"}

// TestSettingsLikeRedis: CONFIG SET of the settings that have no effect here, or one on what is shown, answers as a
// redis-server, and so does CONFIG GET then.
func TestSettingsLikeRedis(t *testing.T) {
	theirs, ours := dial(t, "unix", startRedis(t)), dial(t, "tcp", serve(t, Options{Databases: fake()}))
	same := func(cmd ...string) {
		t.Helper()
		if got, want := ours.do(t, cmd...), theirs.do(t, cmd...); got != want {
			t.Errorf("%q:\n got %q\nwant %q", cmd, got, want)
		}
	}
	for line := range strings.Lines(strings.TrimSpace(heldText)) {
		for _, name := range strings.Fields(line)[2:] {
			same("CONFIG", "GET", name)
			for _, v := range settingValues {
				if name == "client-query-buffer-limit" && v == "2MB" { // it would bound what this test says
					continue
				}
				same("CONFIG", "SET", name, v)
				same("CONFIG", "GET", name)
			}
			same("CONFIG", "SET", strings.ToUpper(name), strings.Fields(line)[0])
		}
	}
	for _, v := range []string{"normal 1 2 3", "normal 1mb 2kb 3 pubsub 1 1 1", "replica 5 5 5", "slave 4 4 4",
		"foo 1 2 3", "normal 1 2", "normal x 2 3", "normal 1 2 x", "", "normal 1  2 3",
		"NORMAL 7 7 7", "master 1 1 1", "normal -1 2 3", "normal 1 2 -3", "normal 0 0 0"} {
		same("CONFIG", "SET", "client-output-buffer-limit", v)
		same("CONFIG", "GET", "client-output-buffer-limit")
	}
	for _, v := range []string{"50", "50 99", "0 100", "101", "x", "", "50.5 99.9", "99 50", "-1", "50  99"} {
		same("CONFIG", "SET", percentilesName, v)
		same("CONFIG", "GET", percentilesName)
	}
	for _, c := range []string{"hz 5 hz 6", "hz 5 nosuch 6", "hz 11 hash-max-listpack-entries abc", "hz", "hz 1 x",
		"hash-max-ziplist-entries 5 hash-max-listpack-entries 6", "databases 4", "hz 5 databases 4 nosuch 1",
		"nosuch 1 databases 4", "slowlog-max-len -1", "slowlog-log-slower-than -5", "timeout -1",
		"latency-monitor-threshold -1", "timeout x", "notify-keyspace-events %%%", "appendonly no", "maxmemory 0",
		"save"} {
		same(append([]string{"CONFIG", "SET"}, strings.Fields(c)...)...)
		same("CONFIG", "GET", "hz")
		same("CONFIG", "GET", "hash-max-listpack-entries")
	}
	// Encodings by these settings.
	sizes := []string{"0", "1", "3", "1000"}
	for i, set := range [][]string{{"hash-max-ziplist-entries"}, {"hash-max-listpack-value"},
		{"set-max-intset-entries"}, {"zset-max-listpack-entries"}, {"zset-max-ziplist-value"}} {
		for _, size := range sizes {
			same("CONFIG", "SET", set[0], size)
			for n := 1; n <= 700; n += 1 + 3*n {
				k := fmt.Sprint("k", i, size, n)
				for _, cmd := range []string{"HSET", "SADD", "ZADD", "RPUSH"} {
					args := []string{cmd, k + cmd}
					for j := range n {
						switch cmd {
						case "HSET":
							args = append(args, fmt.Sprint("f", j), strings.Repeat("v", n))
						case "ZADD":
							args = append(args, strconv.Itoa(j), fmt.Sprint(strings.Repeat("m", n), j))
						default:
							args = append(args, strconv.Itoa(j))
						}
					}
					same(args...)
					same("OBJECT", "ENCODING", k+cmd)
				}
			}
		}
		same("CONFIG", "SET", set[0], "512")
	}
}

// TestSettings: a setting that tools and suites set can be set, to what it is by default too, and both names show it.
func TestSettings(t *testing.T) {
	addr, _ := start(t, Options{Databases: fake()})
	p := dial(t, "tcp", addr)
	all := p.do(t, "CONFIG", "GET", "*")
	for name, s := range settings {
		if !strings.Contains(all, bulk(name)) {
			t.Errorf("CONFIG GET * lacks %s", name)
		}
		if s.set == nil {
			p.want(t, "-ERR CONFIG SET failed (possibly related to argument '"+name+
				"') - can't set immutable config\r\n", "CONFIG", "SET", name, "1")
			continue
		}
		if r := p.do(t, "CONFIG", "GET", name); strings.HasPrefix(r, "*2\r\n") {
			p.want(t, "+OK\r\n", "CONFIG", "SET", name, strings.Split(r, "\r\n")[4])
		}
	}
	p.want(t, "+OK\r\n", "CONFIG", "SET", "hash-max-ziplist-entries", "2")
	p.want(t, "*2\r\n"+bulk("hash-max-listpack-entries")+bulk("2"), "CONFIG", "GET", "hash-max-listpack-entries")
	p.do(t, "HSET", "h", "a", "1", "b", "2")
	p.want(t, bulk("listpack"), "OBJECT", "ENCODING", "h")
	p.do(t, "HSET", "h", "c", "3")
	p.want(t, bulk("hashtable"), "OBJECT", "ENCODING", "h")
	p.want(t, "+OK\r\n", "CONFIG", "SET", "hash-max-listpack-entries", "3")
	p.want(t, bulk("listpack"), "OBJECT", "ENCODING", "h")
	// All or nothing.
	p.want(t, "-ERR CONFIG SET failed (possibly related to argument 'hz') - argument couldn't be parsed into an "+
		"integer\r\n", "CONFIG", "SET", "timeout", "77", "hz", "x")
	p.want(t, "*2\r\n"+bulk("timeout")+bulk("0"), "CONFIG", "GET", "timeout")
}

// infoField is a field of INFO, "" if it is not there.
func infoField(t *testing.T, p *peer, section, name string) string {
	t.Helper()
	for line := range strings.SplitSeq(p.do(t, "INFO", section), "\r\n") {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			return v
		}
	}
	return ""
}

// TestMemoryOfCache: INFO and CONFIG GET tell how much a cache may have, how much it has, that it evicts and how much
// it has evicted, and of a store beside it that it does not.
func TestMemoryOfCache(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := devstore.Start(ctx, devstore.Options{Providers: []string{"shm"}, Namespaces: []devstore.Namespace{
		{Name: "cache", Mode: dirpb.NamespaceMode_NAMESPACE_CACHE, Replicas: 1, BytesPerNode: 32 << 20},
		{Name: "store", Mode: dirpb.NamespaceMode_NAMESPACE_STORE, Replicas: 1, BytesPerNode: 32 << 20}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	var dbs []Database
	for _, name := range []string{"cache", "store"} {
		c, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices(), Namespace: name})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		dbs = append(dbs, Database{name, c})
	}
	p := dial(t, "tcp", serve(t, Options{Databases: dbs}))
	most, err := strconv.ParseInt(infoField(t, p, "memory", "maxmemory"), 10, 64)
	if err != nil || most < 16<<20 || most > 32<<20 {
		t.Fatalf("maxmemory of a cache of 32 MiB is %d, %v", most, err)
	}
	p.want(t, "*4\r\n"+bulk("maxmemory")+bulk(fmt.Sprint(most))+bulk("maxmemory-policy")+bulk("allkeys-lru"), "CONFIG",
		"GET", "maxmemory", "maxmemory-policy")
	p.want(t, "+OK\r\n", "CONFIG", "SET", "maxmemory", fmt.Sprint(most))
	if r := p.do(t, "CONFIG", "SET", "maxmemory", "1"); !strings.Contains(r, "kvctl namespace set") {
		t.Errorf("CONFIG SET maxmemory: %q", r)
	}
	for name, want := range map[string]string{"maxmemory_human": human(uint64(most)),
		"maxmemory_policy": "allkeys-lru"} {
		if got := infoField(t, p, "memory", name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	number := func(section, name string) int64 {
		t.Helper()
		n, err := strconv.ParseInt(infoField(t, p, section, name), 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		return n
	}
	value := strings.Repeat("v", 4<<10)
	for i := 0; number("stats", "evicted_keys") == 0 || number("memory", "used_memory") < most/2; i++ {
		if i > 200 {
			t.Fatalf("of 200 times 256 keys of 4 KiB %d bytes are used, of %d, and %d were evicted",
				number("memory", "used_memory"), most, number("stats", "evicted_keys"))
		}
		for j := range 256 {
			p.do(t, "SET", fmt.Sprint("key:", i, ":", j), value)
		}
	}
	if used := number("memory", "used_memory"); used > most {
		t.Errorf("used_memory of a full cache is %d, of %d", used, most)
	}
	if n := number("memory", "used_memory_peak"); n < number("memory", "used_memory") {
		t.Errorf("used_memory_peak is %d", n)
	}
	p.want(t, "+OK\r\n", "CONFIG", "RESETSTAT")
	if n := number("stats", "evicted_keys"); n != 0 {
		t.Errorf("evicted_keys after CONFIG RESETSTAT: %d", n)
	}
	// Records of another session count, too.
	q := dial(t, "tcp", serve(t, Options{Databases: []Database{dbs[1], dbs[0]}}))
	other, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices(), Namespace: "cache"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { other.Close() })
	o := dial(t, "tcp", serve(t, Options{Databases: []Database{{"cache", other}}}))
	testutil.Until(t, "another session knows what is used", func() bool {
		o.do(t, "SET", "k", strconv.Itoa(time.Now().Nanosecond()))
		n, _ := strconv.ParseInt(infoField(t, o, "memory", "used_memory"), 10, 64)
		return n > 1<<20 // of which it has a key alone
	})
	if got := infoField(t, q, "memory", "maxmemory_policy"); got != "noeviction" {
		t.Errorf("the policy of a store is %s", got)
	}
	q.want(t, "+OK\r\n", "SELECT", "1")
	if got := infoField(t, q, "memory", "maxmemory_policy"); got != "allkeys-lru" {
		t.Errorf("the policy of a cache is %s", got)
	}
}

// TestNotServed: what cannot be done here is refused with what to use instead.
func TestNotServed(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	n := 0
	for _, f := range spec.Table {
		if f.Instead == "" {
			continue
		}
		n++
		args := slices.Repeat([]string{"1"}, max(f.Arity, -f.Arity)-1)
		p.want(t, "-ERR kvd does not support '"+f.Name+"': "+f.Instead+"\r\n", append([]string{f.Name}, args...)...)
	}
	if n == 0 {
		t.Error("all of them are served")
	}
	p.send(t) // redis-cli --rdb says it so
	fmt.Fprintf(p, "SYNC\r\n")
	if r := string(p.reply(t)); !strings.Contains(r, "kvctl export") {
		t.Errorf("SYNC: %q", r)
	}
}
