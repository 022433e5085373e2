package gateway

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/luascript"
)

// grouped are scripts of one key, some of which cannot be performed with others.
var grouped = []string{
	"return redis.call('incr', KEYS[1])",
	"local n = redis.call('incr', KEYS[1]) if n == 1 then redis.call('pexpire', KEYS[1], ARGV[1]) end return n",
	"return redis.call('get', KEYS[1])",
	"redis.call('append', KEYS[1], '0') return redis.call('incrby', KEYS[1], ARGV[1])",
	"redis.call('del', KEYS[1]) return redis.call('exists', KEYS[1])",
	"redis.call('incr', KEYS[1]) return redis.call('nothing')",
	"redis.call('incr', KEYS[1]) return redis.pcall('hset', KEYS[1], 'f', 'v')",
	"return 7",
	"return {redis.call('incr', 'a'), redis.call('incr', KEYS[1])}",
	"redis.call('incr', KEYS[1]) return redis.call('get', 'b')",
	"redis.call('set', KEYS[1], '1') return #redis.call('keys', '*')",
	"redis.call('set', 'c', '100') return redis.pcall('get', 'a')",
	"redis.call('set', KEYS[1], string.rep('1', 18)) return redis.call('strlen', KEYS[1])",
	"redis.call('incr', KEYS[1]) return redis.call('publish', 'nobody', 'x')",
	"redis.call('setrange', KEYS[1], 70000, '1') redis.call('del', KEYS[1]) return 'long'",
	"return redis.call('select', '1') and redis.call('incr', KEYS[1])",
}

// testGroupTime is scripting.groupTime in these tests, so that groups do not depend on how fast the machine is.
var testGroupTime = patience

// TestPipelinedScripts: replies to scripts that are pipelined, among other commands, are those to the same ones that
// are sent one by one, in databases that share a namespace as in others.
func TestPipelinedScripts(t *testing.T) { comparePipelined(t) }

// TestPipelinedScriptsTakeLong: it is the same if a group ends behind each script.
func TestPipelinedScriptsTakeLong(t *testing.T) {
	testGroupTime = 0
	defer func() { testGroupTime = patience }()
	comparePipelined(t)
}

func comparePipelined(t *testing.T) {
	shared, alone := sharing(clienttest.New(clienttest.Options{}), 2),
		append(fake(), Database{"other", clienttest.New(clienttest.Options{})})
	p, single := dial(t, "tcp", serve(t, Options{Databases: shared})),
		dial(t, "tcp", serve(t, Options{Databases: alone}))
	for _, source := range grouped {
		p.do(t, "SCRIPT", "LOAD", source)
		single.do(t, "SCRIPT", "LOAD", source)
	}
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		cmds := [][]string{{"SELECT", strconv.Itoa(rnd.IntN(3))}}
		for range 1 + rnd.IntN(30) {
			key := string(rune('a' + rnd.IntN(4)))
			switch rnd.IntN(12) {
			case 0:
				cmds = append(cmds, []string{"INCR", key})
			case 1:
				cmds = append(cmds, []string{"MGET", "a", "b", "c", "d"})
			case 2:
				cmds = append(cmds, []string{"EVALSHA", luascript.SHA([]byte("none")), "1", key})
			case 3:
				cmds = append(cmds, []string{"EVALSHA_RO", luascript.SHA([]byte(grouped[rnd.IntN(3)])), "1", key,
					"60000"})
			default:
				n := len(grouped)
				if rnd.IntN(2) == 0 {
					n = 4
				}
				cmds = append(cmds, []string{"EVALSHA", luascript.SHA([]byte(grouped[rnd.IntN(n)])), "1", key, "60000"})
			}
		}
		p.send(t, cmds...)
		for _, cmd := range cmds {
			if got, want := string(p.reply(t)), single.do(t, cmd...); got != want {
				t.Fatalf("%q among %q: got %q, want %q", cmd, cmds, got, want)
			}
		}
	}
}

// TestPipelinedScriptsGoTogether: scripts on several keys are one read and one write of each key, however many there
// are.
func TestPipelinedScriptsGoTogether(t *testing.T) {
	for db := range 2 {
		scriptsGoTogether(t, db)
	}
}

func scriptsGoTogether(t *testing.T, db int) {
	store := clienttest.New(clienttest.Options{})
	p := inDatabase(t, serve(t, Options{Databases: sharing(store, 2)}), db)
	p.do(t, "SCRIPT", "LOAD", grouped[0])
	var reads, writes atomic.Int32
	store.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if o.Kind == client.OpGet {
			reads.Add(1)
		} else {
			writes.Add(1)
		}
		return clienttest.Fault{}
	})
	var cmds [][]string
	for i := range 32 {
		cmds = append(cmds, []string{"EVALSHA", luascript.SHA([]byte(grouped[0])), "1", string(rune('a' + i%4))})
	}
	p.send(t, cmds...)
	for i := range cmds {
		p.answers(t, ":"+strconv.Itoa(1+i/4)+"\r\n")
	}
	if reads.Load() != 4 || writes.Load() != 4 {
		t.Errorf("database %d: 32 scripts on 4 keys: %d reads and %d writes", db, reads.Load(), writes.Load())
	}
}

// TestPipelinedScriptsSkipReplies: CLIENT REPLY SKIP is about the script behind it, and no other.
func TestPipelinedScriptsSkipReplies(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	p.do(t, "SCRIPT", "LOAD", grouped[0])
	run := []string{"EVALSHA", luascript.SHA([]byte(grouped[0])), "1", "k"}
	p.send(t, run, []string{"CLIENT", "REPLY", "SKIP"}, run, run)
	p.answers(t, ":1\r\n")
	p.answers(t, ":3\r\n")
}

// TestPipelinedScriptsFail: the replies of scripts tell what the store said of their key, and of no other.
func TestPipelinedScriptsFail(t *testing.T) {
	for _, c := range []struct {
		fault clienttest.Fault
		reply string
		left  string // of the key
	}{
		{clienttest.Fault{Err: client.ErrFull}, "-OOM ", "$-1\r\n"},
		{clienttest.Fault{Err: client.ErrUnknownOutcome, Applied: true}, "-ERR unknown outcome", bulk("2")},
		{clienttest.Fault{Err: client.ErrUnknownOutcome}, "-ERR unknown outcome", "$-1\r\n"},
	} {
		store := clienttest.New(clienttest.Options{})
		p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", store}}}))
		p.do(t, "SCRIPT", "LOAD", grouped[0])
		store.Fail(func(_ context.Context, o *client.Op) (f clienttest.Fault) {
			if o.Kind != client.OpGet && string(o.Key) == "b" {
				f = c.fault
			}
			return f
		})
		run := func(key string) []string { return []string{"EVALSHA", luascript.SHA([]byte(grouped[0])), "1", key} }
		p.send(t, run("a"), run("b"), run("c"), run("b"))
		for _, want := range []string{":1\r\n", c.reply, ":1\r\n", c.reply} {
			if got := string(p.reply(t)); !strings.HasPrefix(got, want) {
				t.Errorf("%v: got %q, want %q", c.fault, got, want)
			}
		}
		store.Fail(nil)
		p.want(t, c.left, "GET", "b")
	}
}

// TestPipelinedScriptsAtomic: pipelined scripts of several connections on a few keys take effect one after the other.
func TestPipelinedScriptsAtomic(t *testing.T) {
	addr := serve(t, Options{Databases: []Database{{"default", newStore(t)}}})
	sources := []string{grouped[1], "local n = tonumber(redis.call('get', KEYS[1]) or '0') + 1 redis.call('set', " +
		"KEYS[1], n) return n"}
	const conns, rounds, depth, keys = 6, 20, 16, 3
	var mu sync.Mutex
	got := make(map[int][]int) // by key
	var wg sync.WaitGroup
	for c := range conns {
		p := dial(t, "tcp", addr)
		var cmds [][]string
		for i := range depth {
			p.do(t, "SCRIPT", "LOAD", sources[i%2])
			cmds = append(cmds, []string{"EVALSHA", luascript.SHA([]byte(sources[i%2])), "1",
				strconv.Itoa((c + i) % keys), "600000"})
		}
		wg.Go(func() {
			for range rounds {
				p.send(t, cmds...)
				for i := range cmds {
					reply := string(p.reply(t))
					n, err := strconv.Atoi(strings.Trim(reply, ":\r\n"))
					if err != nil {
						t.Errorf("%q", reply)
					}
					mu.Lock()
					got[(c+i)%keys] = append(got[(c+i)%keys], n)
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	for k, list := range got {
		slices.Sort(list)
		for i, n := range list {
			if n != i+1 {
				t.Fatalf("key %d: the %d-th increment said %d", k, i+1, n)
			}
		}
	}
}
