package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/values"
)

func fake() []Database {
	return []Database{{"cache", clienttest.New(clienttest.Options{})},
		{"default", clienttest.New(clienttest.Options{})}}
}

func bulk(s string) string { return fmt.Sprintf("$%d\r\n%s\r\n", len(s), s) }

func TestCommands(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	for _, c := range []struct{ cmd, reply string }{
		{"SET a 1", "+OK\r\n"},
		{"GET a", bulk("1")},
		{"INCRBY a 41", ":42\r\n"},
		{"APPEND a x", ":3\r\n"},
		{"INCR a", "-ERR value is not an integer or out of range\r\n"},
		{"SELECT 1", "+OK\r\n"},
		{"GET a", "$-1\r\n"},
		{"SELECT 2", "-ERR DB index is out of range\r\n"},
		{"SELECT 0", "+OK\r\n"},
		{"COPY a b DB 1", ":1\r\n"},
		{"MIGRATE host 1 a 0 1", "-ERR kvd does not support 'migrate': kvctl mirror copies a namespace to another " +
			"store, and DUMP and RESTORE a key to another server\r\n"},
		{"MIGRATE a", "-ERR wrong number of arguments for 'migrate' command\r\n"},
		{"MONITOR now", "-ERR wrong number of arguments for 'monitor' command\r\n"},
		{"MSETNX a 1 b 2", ":0\r\n"},
		{"EXISTS b", ":0\r\n"},
		{"MSETNX nx1 1 nx2 2 nx1 3", ":1\r\n"},
		{"GETDEL nx1", bulk("3")},
		{"GETDEL nx2", bulk("2")},
		{"MSETNX a", "-ERR wrong number of arguments for 'msetnx' command\r\n"},
		{"MSETNX a 1 b", "-ERR wrong number of arguments for 'msetnx' command\r\n"},
		{"CLUSTER INFO", "-ERR This instance has cluster support disabled\r\n"},
		{"CONFIG FOO", "-ERR unknown subcommand 'FOO'. Try CONFIG HELP.\r\n"},
		{"CONFIG GET", "-ERR wrong number of arguments for 'config|get' command\r\n"},
		{"OBJECT ENCODING a", bulk("embstr")},
		{"DEBUG SLEEP 0", "-ERR DEBUG command not allowed.\r\n"},
		{"COMMAND GETKEYS MSET a 1 b 2", "*2\r\n" + bulk("a") + bulk("b")},
		{"COMMAND INFO mset", "*1\r\n*10\r\n" + bulk("mset") +
			":-3\r\n*2\r\n+write\r\n+denyoom\r\n:1\r\n:-1\r\n:2\r\n*3\r\n+@write\r\n+@string\r\n+@slow\r\n*2\r\n" +
			bulk("request_policy:multi_shard") + bulk("response_policy:all_succeeded") +
			oneSpec("OW", "update", -1, 2) + "*0\r\n"},
		{"COMMAND INFO get", "*1\r\n*10\r\n" + bulk("get") +
			":2\r\n*2\r\n+readonly\r\n+fast\r\n:1\r\n:1\r\n:1\r\n*3\r\n+@read\r\n+@string\r\n+@fast\r\n*0\r\n" +
			oneSpec("RO", "access", 0, 1) + "*0\r\n"},
		{"COMMAND LIST FILTERBY MODULE x", "*0\r\n"},
		{"COMMAND LIST FILTERBY PATTERN p?ng", "*1\r\n" + bulk("ping")},
		{"CLIENT REPLY SKIP", ""},
		{"SET skipped 1", ""},
		{"EXISTS skipped skipped", ":2\r\n"},
		{"CLIENT REPLY OFF", ""},
		{"PING", ""},
		{"CLIENT REPLY ON", "+OK\r\n"},
		{"MULTI", "+OK\r\n"},
		{"FLUSHDB", "-ERR kvd: 'flushdb' cannot be done in one step with others, so it is not allowed in a " +
			"transaction\r\n"},
		{"EXEC", "-EXECABORT Transaction discarded because of previous errors.\r\n"},
		{"RESET", "+RESET\r\n"},
		{"QUIT", "+OK\r\n"},
	} {
		p.send(t, strings.Fields(c.cmd))
		if c.reply == "" {
			continue
		}
		if got := string(p.reply(t)); got != c.reply {
			t.Errorf("%s: got %q, want %q", c.cmd, got, c.reply)
		}
	}
	p.closed(t)
}

// TestEveryCommand gives each command that is served too few and some arguments:
// there is one reply and the connection goes on.
func TestEveryCommand(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), Debug: true})
	p := dial(t, "tcp", addr)
	for _, cmd := range commandsByID {
		for n := range 5 {
			args := strings.Split(cmd.Name, "|")
			if cmd.Name == "quit" || strings.HasPrefix(cmd.Name, "client|reply") ||
				strings.HasSuffix(cmd.Name, "subscribe") || cmd.Name == "client|kill" || cmd.Name == "monitor" ||
				cmd == unknown {
				continue
			}
			for range n {
				args = append(args, "1")
			}
			reply := p.do(t, args...)
			if cmd.Arity > 0 && len(args) != cmd.Arity && !strings.HasPrefix(reply, "-") {
				t.Errorf("%q: %q", args, reply)
			}
			p.do(t, "DISCARD")
			p.want(t, bulk("still here"), "ECHO", "still here")
			p.do(t, "HELLO", "2")
		}
	}
}

// TestPipelines compares what pipelines of every length and connections of their own
// do with a map.
func TestPipelines(t *testing.T) {
	for name, db := range map[string]func() client.API{
		"fake":  func() client.API { return clienttest.New(clienttest.Options{}) },
		"store": func() client.API { return newStore(t) },
	} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: []Database{{"default", db()}}})
			var wg sync.WaitGroup
			for w := range 4 {
				wg.Go(func() {
					p := dial(t, "tcp", addr)
					rng := rand.New(rand.NewPCG(uint64(w), 1))
					model := map[string]string{}
					for range 60 {
						var cmds [][]string
						var want []string
						for range 1 + rng.IntN(3000)*rng.IntN(2) {
							k := fmt.Sprintf("%d:%d", w, rng.IntN(200))
							v := strings.Repeat("v", rng.IntN(100)) + strconv.Itoa(rng.IntN(1e6))
							switch rng.IntN(5) {
							case 0:
								cmds, want = append(cmds, []string{"SET", k, v}), append(want, "+OK\r\n")
								model[k] = v
							case 1:
								cmds = append(cmds, []string{"GET", k})
								if v, ok := model[k]; ok {
									want = append(want, bulk(v))
								} else {
									want = append(want, "$-1\r\n")
								}
							case 2:
								_, ok := model[k]
								cmds, want = append(cmds, []string{"DEL", k}),
									append(want, fmt.Sprintf(":%d\r\n", values.Bit(ok)))
								delete(model, k)
							case 3:
								model[k] += v
								cmds, want = append(cmds, []string{"APPEND", k, v}),
									append(want, fmt.Sprintf(":%d\r\n", len(model[k])))
							case 4:
								k2 := fmt.Sprintf("%d:%d", w, rng.IntN(200))
								n := 0
								for _, x := range []string{k, k2} {
									if _, ok := model[x]; ok {
										n++
									}
								}
								cmds, want = append(cmds, []string{"EXISTS", k, k2}),
									append(want, fmt.Sprintf(":%d\r\n", n))
							}
						}
						sent := make(chan struct{})
						go func() { defer close(sent); p.send(t, cmds...) }()
						for i, r := range want {
							if got := string(p.reply(t)); got != r {
								t.Errorf("%.100q: got %.100q, want %.100q", cmds[i], got, r)
								return
							}
						}
						<-sent
					}
				})
			}
			wg.Wait()
		})
	}
}

// TestIncrFromMany: no increment is lost, pipelined or not.
func TestIncrFromMany(t *testing.T) {
	addr := serve(t, Options{Databases: []Database{{"default", newStore(t)}}})
	const conns, each, depth = 8, 20, 10
	var wg sync.WaitGroup
	for range conns {
		wg.Go(func() {
			p := dial(t, "tcp", addr)
			for range each {
				for range depth {
					p.send(t, []string{"INCR", "n"})
				}
				p.send(t, []string{"MULTI"}, []string{"INCR", "n"}, []string{"INCRBY", "n", "-1"}, []string{"EXEC"})
				for range depth + 4 {
					p.reply(t)
				}
			}
		})
	}
	wg.Wait()
	dial(t, "tcp", addr).want(t, bulk(strconv.Itoa(conns*each*depth)), "GET", "n")
}

func TestTransactions(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	p, q := dial(t, "tcp", addr), dial(t, "tcp", addr)
	tx := func(reply string, cmds ...string) {
		t.Helper()
		p.want(t, "+OK\r\n", "MULTI")
		for _, c := range cmds {
			p.want(t, "+QUEUED\r\n", strings.Fields(c)...)
		}
		p.want(t, reply, "EXEC")
	}
	tx("*0\r\n")
	tx("*4\r\n+OK\r\n:6\r\n+PONG\r\n"+bulk("6"), "SET a 5", "INCR a", "PING", "GET a")
	tx("*3\r\n:7\r\n+OK\r\n"+"*2\r\n"+bulk("7")+bulk("1"), "INCR a", "SET b 1", "MGET a b")
	tx("*4\r\n+OK\r\n:0\r\n:2\r\n+OK\r\n", "RENAME b c", "EXISTS b", "EXISTS a c", "SET a 6")
	tx("*2\r\n"+bulk("6")+"*2\r\n"+bulk("6")+"$-1\r\n", "GET a", "MGET a b")

	p.want(t, "+OK\r\n", "WATCH", "a")
	tx("*1\r\n:7\r\n", "INCR a")
	p.want(t, "+OK\r\n", "WATCH", "a")
	q.want(t, "+OK\r\n", "SET", "a", "7")
	tx("*-1\r\n", "INCR a")
	tx("*1\r\n:8\r\n", "INCR a") // nothing is watched any more
	p.want(t, "+OK\r\n", "WATCH", "none")
	q.want(t, "+OK\r\n", "SET", "none", "1")
	tx("*-1\r\n", "PING")
	p.want(t, "+OK\r\n", "WATCH", "a")
	q.want(t, "+OK\r\n", "SET", "a", "1")
	tx("*-1\r\n", "SET a 2") // a SET alone must not go around the version
	p.want(t, "+OK\r\n", "WATCH", "b")
	tx("*1\r\n+OK\r\n", "SET a 2")
	p.want(t, "+OK\r\n", "WATCH", "b")
	q.want(t, "+OK\r\n", "SET", "b", "1")
	tx("*-1\r\n", "SET a 3")
	q.want(t, bulk("2"), "GET", "a")
}

// TestSnapshot: an EXEC that reads two keys sees both as they were at one time.
func TestSnapshot(t *testing.T) {
	addr := serve(t, Options{Databases: fake()})
	w := dial(t, "tcp", addr)
	w.do(t, "MSET", "x", "0", "y", "0")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // x is never behind y
		for i := 1; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			w.do(t, "SET", "x", strconv.Itoa(i))
			w.do(t, "SET", "y", strconv.Itoa(i))
		}
	})
	p := dial(t, "tcp", addr)
	ok := 0
	for range 300 {
		p.send(t, []string{"MULTI"}, []string{"GET", "x"}, []string{"GET", "y"}, []string{"EXEC"})
		for range 3 {
			p.reply(t)
		}
		r := string(p.reply(t))
		if strings.HasPrefix(r, "-") {
			continue // x and y never stood still
		}
		n := regexp.MustCompile(`(?m)^\d+`).FindAllString(r, -1)
		x, _ := strconv.Atoi(n[0])
		y, _ := strconv.Atoi(n[1])
		if len(n) != 2 || x < y || x > y+1 {
			t.Fatalf("%q", r)
		}
		ok++
	}
	close(stop)
	wg.Wait()
	if ok == 0 {
		t.Error("no EXEC found its keys at rest")
	}
}

// TestScan: what is there throughout is returned, over two gateways.
func TestScan(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		t.Run(name, func(t *testing.T) {
			db := []Database{{"default", api}}
			ps := []*peer{dial(t, "tcp", serve(t, Options{Databases: db})),
				dial(t, "tcp", serve(t, Options{Databases: db}))}
			const n = 3000
			for i := range n {
				ps[0].send(t, []string{"SET", fmt.Sprintf("stays:%d", i), "v"})
			}
			for range n {
				ps[0].reply(t)
			}
			seen := map[string]bool{}
			cursor, pages := "0", 0
			for {
				p := ps[pages%2]
				p.do(t, "SET", fmt.Sprintf("comes:%d", pages), "v")
				p.do(t, "DEL", fmt.Sprintf("comes:%d", pages-5))
				r := p.do(t, "SCAN", cursor, "MATCH", "stays:*", "COUNT", "20")
				f := strings.Split(r, "\r\n")
				cursor = f[2]
				for _, s := range f[3:] {
					if strings.HasPrefix(s, "stays:") {
						seen[s] = true
					}
				}
				if pages++; cursor == "0" {
					break
				}
			}
			if len(seen) != n {
				t.Errorf("%d of %d keys in %d pages", len(seen), n, pages)
			}
			if pages < 2 {
				t.Errorf("all in %d page", pages)
			}
			ps[0].want(t, "*2\r\n"+bulk("0")+"*0\r\n", "SCAN", "0", "TYPE", "hash", "COUNT", "10000")
			for _, bad := range []string{"x", " 0", "1x", "+", "99999999999999999999"} {
				ps[0].want(t, "-ERR invalid cursor\r\n", "SCAN", bad)
			}
			// These are numbers, and behind them there is nothing.
			for _, beyond := range []string{"-1", "18446744073709551615"} {
				ps[0].want(t, "*2\r\n"+bulk("0")+"*0\r\n", "SCAN", beyond)
			}
			if r := ps[0].do(t, "RANDOMKEY"); !strings.HasPrefix(r, "$") || strings.HasPrefix(r, "$-1") {
				t.Errorf("RANDOMKEY: %q", r)
			}
			ps[0].want(t, "+OK\r\n", "FLUSHALL")
			ps[1].want(t, ":0\r\n", "DBSIZE")
			ps[1].want(t, "$-1\r\n", "RANDOMKEY")
			ps[1].want(t, "*0\r\n", "KEYS", "*")
		})
	}
}

func TestAuth(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), Password: "secret"})
	p := dial(t, "tcp", addr)
	p.want(t, "-NOAUTH Authentication required.\r\n", "GET", "a")
	p.want(t, "-NOAUTH Authentication required.\r\n", "PING")
	p.want(t, "-WRONGPASS invalid username-password pair or user is disabled.\r\n", "AUTH", "wrong")
	p.want(t, "-WRONGPASS invalid username-password pair or user is disabled.\r\n", "AUTH", "other", "secret")
	if r := p.do(t, "HELLO", "3"); !strings.HasPrefix(r, "-NOAUTH HELLO must be called") {
		t.Errorf("HELLO: %q", r)
	}
	p.want(t, "-NOAUTH Authentication required.\r\n", "MULTI")
	p.want(t, "+OK\r\n", "AUTH", "default", "secret")
	p.want(t, "$-1\r\n", "GET", "a")
	p.want(t, "+RESET\r\n", "RESET")
	p.want(t, "-NOAUTH Authentication required.\r\n", "GET", "a")
	if r := p.do(t, "HELLO", "3", "AUTH", "default", "secret", "SETNAME", "me"); !strings.HasPrefix(r, "%7") {
		t.Errorf("HELLO: %q", r)
	}
	p.want(t, bulk("me"), "CLIENT", "GETNAME")

	for in, reply := range map[string]string{
		"*11\r\n":                    "-ERR Protocol error: unauthenticated multibulk length\r\n",
		"*2\r\n$4\r\nAUTH\r\n$16385": "-ERR Protocol error: unauthenticated bulk length\r\n",
	} {
		p := dial(t, "tcp", addr)
		fmt.Fprint(p, in+"\r\n")
		if got := string(p.reply(t)); got != reply {
			t.Errorf("%q: %q", in, got)
		}
		p.closed(t)
	}
	q := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	if r := q.do(t, "AUTH", "x"); !strings.HasPrefix(r, "-ERR AUTH <password> called without any password configured") {
		t.Errorf("AUTH: %q", r)
	}
}

// TestStoreErrors: clients learn whether it happened.
func TestStoreErrors(t *testing.T) {
	s := clienttest.New(clienttest.Options{MaxKeys: 3})
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"cache", s}}}))
	fail := func(f clienttest.Fault) {
		s.Fail(func(context.Context, *client.Op) clienttest.Fault { return f })
	}
	p.want(t, "+OK\r\n", "MSET", "a", "1", "b", "2", "c", "3")
	p.want(t, "-OOM command not allowed when used memory > 'maxmemory'.\r\n", "SET", "d", "4")
	fail(clienttest.Fault{Err: client.ErrUnavailable})
	for _, cmd := range []string{"GET a", "SET a 1", "INCR a", "DEL a", "MGET a b c", "MSET a 1 b 2", "SETNX z 1",
		"EXISTS a b", "SCAN 0", "KEYS *", "DBSIZE", "FLUSHALL", "RENAME a b", "COPY a z", "WATCH a", "RANDOMKEY"} {
		if r := p.do(t, strings.Fields(cmd)...); !strings.HasPrefix(r, "-LOADING kvd: ") {
			t.Errorf("%s: %q", cmd, r)
		}
	}
	fail(clienttest.Fault{Err: errors.New("late"), Applied: true})
	if r := p.do(t, "INCR", "a"); !strings.HasPrefix(r, "-ERR unknown outcome: ") {
		t.Errorf("INCR: %q", r)
	}
	p.do(t, "MULTI")
	p.do(t, "INCR", "a")
	if r := p.do(t, "EXEC"); !strings.HasPrefix(r, "-ERR unknown outcome: ") {
		t.Errorf("EXEC: %q", r)
	}
	s.Fail(nil)
	p.want(t, bulk("3"), "GET", "a")
}

// damagedScan has memory behind some pages that cannot be read.
type damagedScan struct {
	client.API
	damaged error
}

func (d damagedScan) Scan(ctx context.Context, o client.ScanOptions) iter.Seq2[client.KV, error] {
	return func(yield func(client.KV, error) bool) {
		for kv, err := range d.API.Scan(ctx, o) {
			if !yield(kv, err) {
				return
			}
		}
		yield(client.KV{}, d.damaged)
	}
}

// TestDamagedScan: one damaged group does not take a scan's other keys with it.
func TestDamagedScan(t *testing.T) {
	log := &syncBuffer{}
	s := damagedScan{clienttest.New(clienttest.Options{}), fmt.Errorf("%w: pg 1 replica 0: group at 0x5700",
		client.ErrCorrupt)}
	p := dial(t, "tcp",
		serve(t, Options{Databases: []Database{{"cache", s}}, Logger: slog.New(slog.NewTextHandler(log, nil))}))
	p.want(t, "+OK\r\n", "SET", "a", "1")
	p.want(t, "*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n", "SCAN", "0")
	p.want(t, "*1\r\n$1\r\na\r\n", "KEYS", "*")
	p.want(t, bulk("a"), "RANDOMKEY")
	if r := p.do(t, "FLUSHALL"); !strings.HasPrefix(r, "-ERR kvd: corrupt memory: pg 1 replica 0: group at 0x5700") {
		t.Errorf("FLUSHALL, which cannot reach all: %q", r)
	}
	p.want(t, ":0\r\n", "DBSIZE")
	if got := log.String(); !strings.Contains(got, "keys left out of a scan") ||
		!strings.Contains(got, "group at 0x5700") {
		t.Errorf("logged %q", got)
	}
}

func TestLongKeysAndValues(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", newStore(t)}}}))
	k := strings.Repeat("k", client.MaxKeyLen)
	p.want(t, "+OK\r\n", "SET", k, "v")
	p.want(t, bulk("v"), "GET", k)
	p.want(t, "-ERR kvd: key of 65536 bytes: keys have up to 65535\r\n", "SET", k+"k", "v")
	p.want(t, "-ERR kvd: key of 65536 bytes: keys have up to 65535\r\n", "MGET", "a", k+"k")
	for _, n := range []int{511, 513, 100_000, 5 << 20} {
		v := strings.Repeat("0123456789", n/10+1)[:n]
		p.want(t, "+OK\r\n", "SET", "v", v)
		p.want(t, fmt.Sprintf(":%d\r\n", n), "STRLEN", "v")
		for range 2 {
			if got := p.do(t, "GET", "v"); got != bulk(v) {
				t.Errorf("a value of %d bytes comes back as %d", n, len(got))
			}
		}
		if got := p.do(t, "MGET", "v", k); got != "*2\r\n"+bulk(v)+bulk("v") {
			t.Errorf("a value of %d bytes comes back as %d", n, len(got))
		}
	}
	fmt.Fprintf(p, "*3\r\n$3\r\nSET\r\n$1\r\nv\r\n$%d\r\n", client.MaxValueLen+1)
	if got := string(p.reply(t)); got != "-ERR Protocol error: invalid bulk length\r\n" {
		t.Errorf("a value too long: %q", got)
	}
	p.closed(t)
}

func TestMetrics(t *testing.T) {
	addr, g := start(t, Options{Databases: fake(), MaxConns: 1})
	p := dial(t, "tcp", addr)
	p.do(t, "SET", "a", "1")
	p.send(t, []string{"GET", "a"}, []string{"GET", "b"}, []string{"INCR", "x", "y"})
	for range 3 {
		p.reply(t)
	}
	if r := string(dial(t, "tcp", addr).reply(t)); r != "-ERR max number of clients reached\r\n" {
		t.Errorf("%q", r)
	}
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(g.Collectors()...)
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range fams {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			switch {
			case m.Counter != nil:
				got[name] = fmt.Sprint(m.Counter.GetValue())
			case m.Gauge != nil:
				got[name] = fmt.Sprint(m.Gauge.GetValue())
			default:
				got[name] = fmt.Sprint(m.Histogram.GetSampleCount())
			}
		}
	}
	for name, want := range map[string]string{
		"kvd_gateway_commands_total get ok":     "2",
		"kvd_gateway_commands_total set ok":     "1",
		"kvd_gateway_commands_total incr error": "1",
		"kvd_gateway_command_seconds get":       "2",
		"kvd_gateway_hits_total":                "1",
		"kvd_gateway_misses_total":              "1",
		"kvd_gateway_connections":               "1",
		"kvd_gateway_connections_total":         "1",
		"kvd_gateway_connections_refused_total": "1",
		"kvd_gateway_protocol_errors_total":     "0",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %s", name, got[name], want)
		}
	}
	if got["kvd_gateway_bytes_read_total"] == "0" || got["kvd_gateway_bytes_written_total"] == "0" ||
		got["kvd_gateway_batch_commands"] == "0" {
		t.Errorf("%v", got)
	}
	if r := p.do(t, "INFO"); !strings.Contains(r, "keyspace_hits:1\r\n") || !strings.Contains(r, "db0:keys=1,") {
		t.Errorf("INFO: %s", r)
	}
}

func TestCloseAnswersNobody(t *testing.T) {
	g, err := New(Options{Databases: fake()})
	if err != nil {
		t.Fatal(err)
	}
	g.calm = testCalm
	sock := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- g.Serve(l) }()
	p := dial(t, "unix", sock)
	p.want(t, "+PONG\r\n", "PING")
	g.Close()
	g.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	p.closed(t)
}

func TestTable(t *testing.T) {
	seen := map[string]bool{}
	for i, c := range commandsByID {
		if int(c.ID) != i || seen[c.Name] {
			t.Errorf("%s: twice, or id %d at %d", c.Name, c.ID, i)
		}
		seen[c.Name] = true
		if len(c.Name) > maxName+16 {
			t.Errorf("%s: name too long to be found", c.Name)
		}
		if c.served() && c.Doc.Summary == "" {
			t.Errorf("%s: no summary", c.Name)
		}
		if c.key != nil && (c.Kind == 0 || c.First == 0) {
			t.Errorf("%s: no kind or key", c.Name)
		}
	}
	names := slices.Collect(func(yield func(string) bool) {
		for n := range commands {
			if !yield(n) {
				return
			}
		}
	})
	for _, n := range names {
		if find([]byte(strings.ToUpper(n))) != commands[n] {
			t.Errorf("%s is not found", n)
		}
	}
}

// TestSameAgain: the command that a connection remembers is taken for no other one, and no subcommand for a command.
func TestSameAgain(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", newStore(t)}}}))
	for range 2 {
		p.want(t, "+OK\r\n", "SET", "a", "1")
		p.want(t, "+OK\r\n", "sEt", "a", "2")
		p.want(t, "$1\r\n2\r\n", "GET", "a")
		p.want(t, "$1\r\n2\r\n", "get", "a")
		p.want(t, "$-1\r\n", "CLIENT", "GETNAME")
		p.want(t, "-ERR unknown command 'client|getname', with args beginning with: \r\n", "client|getname")
		p.want(t, "-ERR unknown command 'client|getname', with args beginning with: \r\n", "client|getname")
		p.want(t, ":1\r\n", "STRLEN", "a")
	}
}

// TestAllocations: in the steady state commands allocate nothing but what the client
// does: an object for a write, a handful for a batch of them.
func TestAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("under the race detector a sync.Pool forgets things at random")
	}
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", newStore(t)}}}))
	p.want(t, "+OK\r\n", "SET", "long", strings.Repeat("x", 1024))
	for _, c := range []struct {
		name     string
		wire     []byte
		max      float64
		maxBytes float64
	}{
		{"SET", encode("SET", "a", "0123456789"), 0.5, 512},
		{"GET", encode("GET", "a"), 0.5, 512},
		{"DEL", encode("DEL", "b"), 1.5, 512},
		{"SET x 16", pipeline("SET", 16), 1.5, 2 << 10},
		{"HSET", encode("HSET", "hash", "f7", "0123456789"), 1.5, 512},
		{"HGET", encode("HGET", "hash", "f7"), 0.5, 512},
		{"HINCRBY x 16", bytes.Repeat(encode("HINCRBY", "hash", "n", "0"), 16), 2.5, 2 << 10},
		{"GET x 16", pipeline("GET", 16), 0.5, 512},
		// These are the queue, its arguments, names of keys, and what the commands themselves take.
		{"EXEC of SET", execOf("SET", "a", "0123456789"), 4.5, 512},
		{"EXEC of INCRBY", execOf("INCRBY", "count", "0"), 7.5, 512},
		{"EXEC of GET", execOf("GET", "a"), 5.5, 512},
		// More than 64 KiB of replies: their buffer serves again, too.
		{"GET of 1 KiB x 64", bytes.Repeat(encode("GET", "long"), 64), 0.5, 2 << 10},
	} {
		buf := make([]byte, 128<<10)
		n := 0
		for i := range 200 {
			if _, err := p.Write(c.wire); err != nil {
				t.Fatal(err)
			}
			if i == 0 { // how long the reply is
				for range max(1, bytes.Count(c.wire, []byte("*"))) {
					n += len(p.reply(t))
				}
				continue
			}
			readN(t, p, buf[:n])
		}
		// Not testing.AllocsPerRun: on one processor a loop gets it back late, and what
		// others allocate meanwhile counts. That goes by time, so on a busy machine it is little only
		// in rounds that nothing interrupted: of their numbers the least counts.
		const rounds, runs = 50, 100
		got, size := math.Inf(1), math.Inf(1)
		var before, after runtime.MemStats
		for range rounds {
			runtime.ReadMemStats(&before)
			for range runs {
				p.Write(c.wire)
				readN(t, p, buf[:n])
			}
			runtime.ReadMemStats(&after)
			got = min(got, float64(after.Mallocs-before.Mallocs)/runs)
			size = min(size, float64(after.TotalAlloc-before.TotalAlloc)/runs)
		}
		t.Logf("%s: %v allocations, %.0f bytes", c.name, got, size)
		if got > c.max || size > c.maxBytes {
			t.Errorf("%s: %v allocations of %.0f bytes, want at most %v of %v", c.name, got, size, c.max, c.maxBytes)
		}
	}
}

func execOf(command ...string) []byte {
	return slices.Concat(encode("MULTI"), encode(command...), encode("EXEC"))
}

func pipeline(cmd string, n int) (b []byte) {
	for i := range n {
		c := []string{cmd, fmt.Sprintf("k%d", i), "v"}
		if cmd == "GET" {
			c = c[:2]
		}
		b = append(b, encode(c...)...)
	}
	return b
}

func readN(t testing.TB, p *peer, b []byte) {
	for len(b) > 0 {
		n, err := p.r.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		b = b[n:]
	}
}
