package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/keeper/keepertest"
	"github.com/kvd-project/kvd/internal/layout"
)

// rotten is a store of two memory nodes whose memory is files, and gateways of it: `one` has a copy of each record,
// and `two` has two.
type rotten struct {
	*world
	folders         []string
	redisAt, memcAt map[string]string // by namespace
	http            string            // of the gateway of two
}

// rot changes a byte of what region files have of the records of some values: part "key", "value" or "header". Of the
// copies of one, those in `in`: 0 and 1 are the memory nodes', so that each is the head of about half.
func (r *rotten) rot(values []string, part string, in ...int) {
	r.t.Helper()
	changed := 0
	for _, k := range in {
		files, err := filepath.Glob(r.folders[k] + "/region.*")
		if err != nil {
			r.t.Fatal(err)
		}
		for _, file := range files {
			changed += r.rotFile(file, values, part)
		}
	}
	if changed == 0 {
		r.t.Fatalf("no record of %q in memory nodes %v", values, in)
	}
}

func (r *rotten) rotFile(file string, values []string, part string) (changed int) {
	r.t.Helper()
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	b, err := os.ReadFile(file)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, v := range values {
		for at := 0; ; {
			i := bytes.Index(b[at:], []byte(v))
			if i < 0 {
				break
			}
			i += at
			at = i + 1
			// The record begins at a unit before its value.
			for off := i &^ (layout.UnitSize - 1); off >= 0 && off > i-4*layout.UnitSize; off -= layout.UnitSize {
				rec, err := layout.ParseRecord(b[off:])
				if err != nil || off+layout.RecordHeaderSize+len(rec.Key) > i ||
					string(rec.Value[:min(len(v), len(rec.Value))]) != v {
					continue
				}
				byteAt := map[string]int{"key": off + layout.RecordHeaderSize, "value": off + layout.RecordHeaderSize +
					len(rec.Key) + len(rec.Value) - 1, "header": off + 12}[part]
				if _, err := f.WriteAt([]byte{b[byteAt] ^ 0x40}, int64(byteAt)); err != nil {
					r.t.Fatal(err)
				}
				changed++
				break
			}
		}
	}
	return changed
}

func newRotten(t *testing.T) *rotten {
	r := &rotten{world: newWorld(t), redisAt: map[string]string{}, memcAt: map[string]string{}}
	r.dir = freeAddr(t)
	r.start(r.directory(t.TempDir(), freeAddr(t))...)
	for _, name := range []string{"m1", "m2"} {
		r.folders = append(r.folders, filepath.Join(keepertest.Folder(t), name))
		r.start(append(r.memnode(name), "--memory-path", r.folders[len(r.folders)-1])...)
	}
	r.must(nil, "namespace", "create", "one", "--replicas", "1", "--bytes", "8MiB")
	r.must(nil, "namespace", "create", "two", "--replicas", "2", "--bytes", "8MiB")
	for _, ns := range []string{"one", "two"} {
		r.redisAt[ns], r.memcAt[ns] = freeAddr(t), freeAddr(t)
		r.http = freeAddr(t)
		r.start("gateway", "--databases", ns, "--directory", r.dir, "--listen", r.redisAt[ns], "--listen-memcached",
			r.memcAt[ns], "--http-listen", r.http)
	}
	return r
}

// TestRot flips bytes of records in the files of memory nodes, and runs commands on them: of kvctl, of Redis and of
// memcached. With a good copy each does what it does otherwise. Without, whatever needs the value says that it is
// damaged, and whatever does not goes over it.
func TestRot(t *testing.T) {
	r := newRotten(t)
	type step struct {
		name       string
		good, lost string // what is answered where a copy is good, and where none is
		run        func(ns, key string) string
	}
	ctl := func(args ...string) func(ns, key string) string {
		return func(ns, key string) string {
			var in []byte
			if args[0] == "put" {
				in = []byte("new")
			}
			out, stderr, status := r.ctl(in, append([]string{"--namespace", ns, "--provider", "tcp"},
				append(args, key)...)...)
			return fmt.Sprintf("%d %.5s%s", status, out, stderr)
		}
	}
	redis := func(format string) func(ns, key string) string {
		return func(ns, key string) string {
			c := r.redis(r.redisAt[ns])
			got := c.do(format, key)
			if strings.HasPrefix(got, "$") && got != "$-1" {
				line, _ := c.r.ReadString('\n')
				got += " " + line
			}
			return got
		}
	}
	memc := func(format string) func(ns, key string) string {
		return func(ns, key string) string { return r.redis(r.memcAt[ns]).do(format, key) }
	}
	steps := []step{
		{"get", "0 value", "5 ", ctl("get")},
		{"put", "0 ", "0 ", ctl("put")},
		{"del", "0 ", "0 ", ctl("del")},
		{"GET", "$", "-", redis("GET %s")},
		{"SET", "+OK", "+OK", redis("SET %s new")},
		{"DEL", ":1", ":1", redis("DEL %s")},
		{"UNLINK", ":1", ":1", redis("UNLINK %s")},
		{"GETDEL", "$", "-", redis("GETDEL %s")},
		{"APPEND", ":", "-", redis("APPEND %s x")},
		{"RENAME from", "+OK", "-", redis("RENAME %s renamed")},
		{"RENAME to", "+OK", "-ERR kvd: get", func(ns, key string) string {
			c := r.redis(r.redisAt[ns])
			c.do("SET sound v")
			return c.do("RENAME sound %s", key)
		}},
		{"memcached set", "STORED", "STORED", memc("set %s 0 0 1\r\nx")},
		{"memcached get", "VALUE", "SERVER_ERROR", memc("get %s")},
		{"memcached delete", "DELETED", "DELETED", memc("delete %s")},
	}
	n := 0
	for _, ns := range []string{"one", "two"} {
		for _, part := range []string{"value", "key", "header"} {
			for _, in := range [][]int{{0}, {1}, {0, 1}} {
				if ns == "one" && len(in) == 1 {
					continue
				}
				var values, keys []string
				for range steps {
					n++
					keys, values = append(keys, fmt.Sprint("key", n)), append(values, fmt.Sprintf("value-%d.", n))
				}
				var lines strings.Builder
				for i := range keys {
					fmt.Fprintf(&lines, "%s\t%s\n", keys[i], values[i])
				}
				r.must([]byte(lines.String()), "--namespace", ns, "--provider", "tcp", "pipe")
				r.rot(values, part, in...)
				for i, s := range steps {
					want := s.good
					if len(in) == 2 && part != "key" { // which whoever asks for the key knows
						want = s.lost
					}
					if got := s.run(ns, keys[i]); !strings.HasPrefix(got, want) {
						t.Errorf("%s, the %s damaged in %v: %s %s: %q, want %q", ns, part, in, s.name, keys[i], got,
							want)
					}
				}
			}
		}
	}
	if _, page := fetch("http://" + r.http + "/metrics"); !regexp.MustCompile(
		`(?m)^kvd_client_mended_copies_total\{[^}]*\} [1-9]`).MatchString(page) {
		t.Error("the gateway's metrics do not say that copies were mended")
	}
	// All that is left is what no copy tells, until it is freed.
	for _, ns := range []string{"two", "one"} {
		out, _, status := r.ctl(nil, "--namespace", ns, "-o", "json", "check", "--repair")
		var rep struct {
			Freed    int `json:"freed_records"`
			Problems []string
		}
		if err := json.Unmarshal(out, &rep); err != nil || status != 1 || rep.Freed == 0 ||
			!strings.Contains(fmt.Sprint(rep.Problems), "no good copy at") {
			t.Fatalf("check --repair of %s: exit status %d, %v\n%s", ns, status, err, out)
		}
		r.must(nil, "--namespace", ns, "check")
	}
}

// TestRotErased: what deletes many keys deletes all that can be read, and says what it leaves. kvctl del --lost frees
// that of one key.
func TestRotErased(t *testing.T) {
	r := newRotten(t)
	for _, ns := range []string{"one", "two"} {
		for _, part := range []string{"value", "key", "header"} {
			for _, how := range []string{"flush", "prefix", "FLUSHALL", "flush_all"} {
				for _, in := range [][]int{{1}, {0, 1}} {
					if len(in) == 2 && (how == "flush" || part == "value") || ns == "two" && part == "value" {
						r.erase(ns, part, how, in...)
					}
				}
			}
		}
		r.ctl(nil, "--namespace", ns, "check", "--repair")
		r.must(nil, "--namespace", ns, "check")
	}
}

// erase deletes all of a namespace two of whose records are damaged.
func (r *rotten) erase(ns, part, how string, in ...int) {
	r.t.Helper()
	const n = 20
	about := fmt.Sprintf("%s, %s, the %s damaged in %v", how, ns, part, in)
	kvctl := func(args ...string) (out string, status int) {
		o, stderr, status := r.ctl(nil, append([]string{"--namespace", ns, "--provider", "tcp"}, args...)...)
		return string(o) + stderr, status
	}
	var lines strings.Builder
	var keys, values []string
	for i := range n {
		keys, values = append(keys, fmt.Sprint("key", i)), append(values, fmt.Sprintf("value-%d.", i))
		fmt.Fprintf(&lines, "%s\t%s\n", keys[i], values[i])
	}
	r.must([]byte(lines.String()), "--namespace", ns, "--provider", "tcp", "pipe")
	r.rot(values[:2], part, in...)
	lost := len(in) == 2
	switch how {
	case "flush", "prefix":
		args := map[string][]string{"flush": {"flush", "--yes"}, "prefix": {"del", "--prefix", "key"}}[how]
		if out, status := kvctl(args...); lost != (status == 5) || !lost && status != 0 || lost &&
			!strings.Contains(out, "record at 0x") {
			r.t.Errorf("%s: exit status %d\n%s", about, status, out)
		}
	case "FLUSHALL":
		if got := r.redis(r.redisAt[ns]).do("FLUSHALL"); lost != strings.Contains(got, "corrupt") || !lost &&
			got != "+OK" {
			r.t.Errorf("%s: %s", about, got)
		}
	case "flush_all":
		if got := r.redis(r.memcAt[ns]).do("flush_all"); lost != strings.Contains(got, "corrupt") || !lost &&
			got != "OK" {
			r.t.Errorf("%s: %s", about, got)
		}
	}
	out, _ := kvctl("scan", "--limit", "0")
	for _, k := range keys[2:] {
		if slices.Contains(strings.Fields(out), k) {
			r.t.Errorf("%s: %s is left", about, k)
		}
	}
	for _, k := range keys[:2] {
		if out, status := kvctl("del", "--lost", k); status > 1 || lost && status != 0 && part != "key" {
			r.t.Errorf("%s: del --lost: exit status %d\n%s", about, status, out)
		}
		if out, status := kvctl("put", k, "new"); status != 0 {
			r.t.Errorf("%s: put: exit status %d\n%s", about, status, out)
		}
	}
}
