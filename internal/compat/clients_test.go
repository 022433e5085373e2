package compat

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bradfitz/gomemcache/memcache"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/kvd-project/kvd/internal/testutil"
)

// A client library's script says how its checks went; see testdata/node/check.mjs.

func TestNodeClients(t *testing.T) {
	open(t)
	dir := nodeModules(t)
	for _, script := range []string{"ioredis.mjs", "ioredis-users.mjs", "node-redis.mjs"} {
		t.Run(strings.TrimSuffix(script, ".mjs"), func(t *testing.T) {
			each(t, func(t *testing.T, at target) {
				runScript(t, at, "node", filepath.Join(dir, script), portOf(at.redis))
			})
		})
	}
}

func TestPythonClients(t *testing.T) {
	for script, addr := range map[string]func(target) string{
		"lmcache.py":           func(at target) string { return at.redis },
		"redis-py.py":          func(at target) string { return at.redis },
		"pymemcache-client.py": func(at target) string { return at.memcached },
		"pylibmc-client.py":    func(at target) string { return at.memcached },
	} {
		t.Run(strings.TrimSuffix(script, ".py"), func(t *testing.T) {
			each(t, func(t *testing.T, at target) {
				// Debian's python3, which has Debian's modules, whatever PATH says.
				runScript(t, at, "/usr/bin/python3", "-B", filepath.Join("testdata", "python", script),
					portOf(addr(at)))
			})
		})
	}
}

// nodeModules is a folder with the scripts and the modules of package-lock.json. It is
// kept for the next time, under the lock file's hash.
func nodeModules(t *testing.T) string {
	lock, err := os.ReadFile("testdata/node/package-lock.json")
	if err != nil {
		t.Fatal(err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "kvd-compat", fmt.Sprintf("node-%.6x", sha256.Sum256(lock)))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("testdata/node/*.*")
	must(t, err)
	more, err := filepath.Glob("testdata/applications/*.mjs")
	must(t, err)
	for _, f := range append(files, more...) {
		b, err := os.ReadFile(f)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(f)), b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	installed := filepath.Join(dir, "installed") // npm ci came to its end
	if _, err := os.Stat(installed); err == nil {
		return dir
	}
	npm := exec.Command("npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")
	npm.Dir = dir
	if out, err := npm.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", npm, err, out)
	}
	if err := os.WriteFile(installed, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// transcript is what a script said of its checks.
type transcript struct {
	version string // of what it is about; "" if it does not say
	passed  int
	failed  map[string]string // a check, and why it failed
}

// converse runs a script to its end, within bound. A script may ask for a restart of the server.
// An error says that the script did not come to its end; the transcript has what it said before.
func converse(ctx context.Context, bound time.Duration, restart func() error, env []string, argv ...string) (transcript,
	error) {
	said := transcript{failed: make(map[string]string)}
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = time.Second
	stderr := new(bytes.Buffer)
	cmd.Stderr = stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return said, err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return said, err
	}
	if err := cmd.Start(); err != nil {
		return said, err
	}
	var errs []error
	done := false
	for in := bufio.NewScanner(stdout); in.Scan(); {
		verb, rest, _ := strings.Cut(in.Text(), " ")
		switch verb {
		case "ok":
			said.passed++
		case "fail":
			name, why, _ := strings.Cut(rest, ": ")
			said.failed[name] = why
		case "version":
			said.version = rest
		case "restart":
			err := restart()
			_, err2 := fmt.Fprintln(stdin, "restarted")
			errs = append(errs, err, err2)
		case "done":
			done = true
		default:
			errs = append(errs, fmt.Errorf("unexpected line %q", in.Text()))
		}
	}
	if err := cmd.Wait(); err != nil || !done {
		errs = append(errs, fmt.Errorf("ended early: %v\n%s", err, stderr))
	}
	return said, errors.Join(errs...)
}

func runScript(t *testing.T, at target, argv ...string) {
	said, err := converse(t.Context(), 2*patience, at.restart, nil, argv...)
	for _, name := range slices.Sorted(maps.Keys(said.failed)) {
		t.Errorf("%s: %s", name, said.failed[name])
	}
	must(t, err)
	t.Logf("%d checks passed", said.passed)
}

// everyByte and large are what text and small buffers would spoil.
var (
	everyByte = func() []byte {
		b := make([]byte, 256)
		for i := range b {
			b[i] = byte(i)
		}
		return b
	}()
	large = func() []byte {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4 {
			binary.LittleEndian.PutUint32(b[i:], uint32(i))
		}
		return b
	}()
)

func TestGoRedis(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprintf("RESP%d", protocol), func(t *testing.T) {
			each(t, func(t *testing.T, at target) {
				goRedis(t, at, &redis.Options{Addr: at.redis, Protocol: protocol})
			})
		})
	}
}

func goRedis(t *testing.T, at target, o *redis.Options) {
	ctx := t.Context()
	c := redis.NewClient(o)
	defer c.Close()
	if err := c.FlushDB(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	t.Run("expiry", func(t *testing.T) {
		must(t, c.Set(ctx, "e", "v", 40*time.Millisecond).Err())
		testutil.UntilNone(t, "expire", func() error { return want(c.Get(ctx, "e").Err(), redis.Nil) })
		must(t, c.Set(ctx, "e", "v", time.Hour).Err())
		equal(t, c.TTL(ctx, "e").Val(), time.Hour)
		equal(t, c.Persist(ctx, "e").Val(), true)
		equal(t, c.TTL(ctx, "e").Val(), -1)
	})
	t.Run("pipeline", func(t *testing.T) {
		const n = 10_000
		cmds, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
			for i := range n {
				p.Set(ctx, "p"+strconv.Itoa(i), i, 0)
			}
			for i := range n {
				p.Get(ctx, "p"+strconv.Itoa(i))
			}
			return nil
		})
		must(t, err)
		for i, cmd := range cmds[n:] {
			equal(t, cmd.(*redis.StringCmd).Val(), strconv.Itoa(i))
		}
		equal(t, c.DBSize(ctx).Val() >= n, true)
	})
	t.Run("mget", func(t *testing.T) {
		got, err := c.MGet(ctx, "p1", "absent", "p2").Result()
		must(t, err)
		equal(t, fmt.Sprint(got), "[1 <nil> 2]")
	})
	t.Run("scan", func(t *testing.T) {
		seen := make(map[string]bool)
		it := c.Scan(ctx, 0, "p*", 100).Iterator()
		for it.Next(ctx) {
			seen[it.Val()] = true
		}
		must(t, it.Err())
		equal(t, len(seen), 10_000)
	})
	t.Run("transaction on one key", func(t *testing.T) {
		must(t, c.Set(ctx, "t", 0, 0).Err())
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 25 {
					_, err := c.TxPipelined(ctx, func(p redis.Pipeliner) error {
						p.Incr(ctx, "t")
						p.Incr(ctx, "t")
						p.Expire(ctx, "t", time.Hour)
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		equal(t, c.Get(ctx, "t").Val(), "400")
	})
	t.Run("watch", func(t *testing.T) {
		must(t, c.Set(ctx, "w", 0, 0).Err())
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for done := 0; done < 25; {
					err := c.Watch(ctx, func(tx *redis.Tx) error {
						n, err := tx.Get(ctx, "w").Int()
						if err != nil {
							return err
						}
						_, err = tx.TxPipelined(ctx, func(p redis.Pipeliner) error {
							return p.Set(ctx, "w", n+1, 0).Err()
						})
						return err
					}, "w")
					switch {
					case err == nil:
						done++
					case !errors.Is(err, redis.TxFailedErr):
						t.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		equal(t, c.Get(ctx, "w").Val(), "100")
	})
	t.Run("large and binary", func(t *testing.T) {
		must(t, c.Set(ctx, string(everyByte), large, 0).Err())
		got, err := c.Get(ctx, string(everyByte)).Bytes()
		must(t, err)
		equal(t, bytes.Equal(got, large), true)
	})
	t.Run("errors", func(t *testing.T) {
		must(t, c.Set(ctx, "word", "abc", 0).Err())
		equal(t, fmt.Sprint(c.Incr(ctx, "word").Err()), "ERR value is not an integer or out of range")
		must(t, want(c.Get(ctx, "absent").Err(), redis.Nil))
	})
	t.Run("publish/subscribe", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		s := c.Subscribe(ctx, "ch")
		defer s.Close()
		_, err := s.Receive(ctx) // the confirmation
		must(t, err)
		must(t, s.PSubscribe(ctx, "c*"))
		_, err = s.Receive(ctx)
		must(t, err)
		equal(t, c.Publish(ctx, "ch", "hello").Val(), int64(2))
		for range 2 {
			m, err := s.ReceiveMessage(ctx)
			must(t, err)
			equal(t, m.Payload, "hello")
		}
		must(t, s.Ping(ctx))
		equal(t, fmt.Sprint(c.PubSubNumSub(ctx, "ch").Val()), "map[ch:1]")
	})
	t.Run("reconnect", func(t *testing.T) {
		must(t, at.restart())
		testutil.UntilNone(t, "set", func() error { return c.Set(ctx, "again", "yes", 0).Err() })
		equal(t, c.Get(ctx, "again").Val(), "yes")
	})
}

func TestRueidis(t *testing.T) {
	each(t, func(t *testing.T, at target) {
		t.Run("client-side caching", func(t *testing.T) {
			rueidisCaches(t, rueidis.ClientOption{InitAddress: []string{at.redis}})
			rueidisCaches(t, rueidis.ClientOption{InitAddress: []string{at.redis}, ClientTrackingOptions: []string{
				"PREFIX", "cached:", "BCAST"}})
		})
		t.Run("publish/subscribe", func(t *testing.T) {
			for _, resp2 := range []bool{false, true} {
				rueidisListens(t, rueidis.ClientOption{InitAddress: []string{at.redis}, DisableCache: resp2,
					AlwaysRESP2: resp2})
			}
		})
		for _, resp2 := range []bool{false, true} {
			t.Run(map[bool]string{false: "RESP3", true: "RESP2"}[resp2], func(t *testing.T) {
				rueidisChecks(t, at, rueidis.ClientOption{InitAddress: []string{at.redis}, DisableCache: true,
					AlwaysRESP2: resp2})
			})
		}
	})
}

// rueidisCaches has a client serve a value from its own memory until another one writes it.
func rueidisCaches(t *testing.T, o rueidis.ClientOption) {
	ctx := t.Context()
	c, err := rueidis.NewClient(o)
	must(t, err)
	defer c.Close()
	o = rueidis.ClientOption{InitAddress: o.InitAddress, DisableCache: true}
	w, err := rueidis.NewClient(o)
	must(t, err)
	defer w.Close()
	get := func() (value string, hit bool) {
		t.Helper()
		r := c.DoCache(ctx, c.B().Get().Key("cached:k").Cache(), time.Hour)
		value, err := r.ToString()
		must(t, err)
		return value, r.IsCacheHit()
	}
	for _, v := range []string{"1", "2", "3"} {
		must(t, w.Do(ctx, w.B().Set().Key("cached:k").Value(v).Build()).Error())
		testutil.UntilNone(t, "the value that was written", func() error {
			if got, _ := get(); got != v {
				return fmt.Errorf("it is %q", got)
			}
			return nil
		})
		testutil.UntilNone(t, "a hit", func() error {
			if _, hit := get(); !hit {
				return errors.New("a miss")
			}
			return nil
		})
	}
}

// rueidisListens hears what another client publishes.
func rueidisListens(t *testing.T, o rueidis.ClientOption) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := rueidis.NewClient(o)
	must(t, err)
	defer c.Close()
	w, err := rueidis.NewClient(o)
	must(t, err)
	defer w.Close()
	heard := make(chan string, 1)
	go c.Receive(ctx, c.B().Subscribe().Channel("ch").Build(), func(m rueidis.PubSubMessage) {
		select {
		case heard <- m.Message:
		default:
		}
	})
	testutil.UntilNone(t, "a message", func() error {
		must(t, w.Do(ctx, w.B().Publish().Channel("ch").Message("hello").Build()).Error())
		select {
		case m := <-heard:
			equal(t, m, "hello")
			return nil
		default:
			return errors.New("none yet")
		}
	})
}

func rueidisChecks(t *testing.T, at target, o rueidis.ClientOption) {
	ctx := t.Context()
	c, err := rueidis.NewClient(o)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	must(t, c.Do(ctx, c.B().Flushdb().Build()).Error())
	t.Run("expiry", func(t *testing.T) {
		must(t, c.Do(ctx, c.B().Set().Key("e").Value("v").PxMilliseconds(40).Build()).Error())
		testutil.UntilNone(t, "expire", func() error {
			return want(c.Do(ctx, c.B().Get().Key("e").Build()).Error(), rueidis.Nil)
		})
	})
	// It sends what goroutines ask for at the same time together.
	t.Run("automatic pipelining", func(t *testing.T) {
		var wg sync.WaitGroup
		for i := range 500 {
			wg.Go(func() {
				k := "p" + strconv.Itoa(i)
				if err := c.Do(ctx, c.B().Set().Key(k).Value(k).Build()).Error(); err != nil {
					t.Error(err)
				}
				if v, err := c.Do(ctx, c.B().Get().Key(k).Build()).ToString(); v != k || err != nil {
					t.Errorf("get %s: %q, %v", k, v, err)
				}
				if err := c.Do(ctx, c.B().Incr().Key("n").Build()).Error(); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		n, err := c.Do(ctx, c.B().Get().Key("n").Build()).AsInt64()
		must(t, err)
		equal(t, n, 500)
	})
	t.Run("mget", func(t *testing.T) {
		got, err := rueidis.MGet(c, ctx, []string{"p1", "p2"})
		must(t, err)
		v, _ := got["p2"]
		text, err := v.ToString()
		must(t, err)
		equal(t, text, "p2")
	})
	t.Run("scan", func(t *testing.T) {
		seen := make(map[string]bool)
		for cursor := uint64(0); ; {
			e, err := c.Do(ctx, c.B().Scan().Cursor(cursor).Match("p*").Count(100).Build()).AsScanEntry()
			must(t, err)
			for _, k := range e.Elements {
				seen[k] = true
			}
			if cursor = e.Cursor; cursor == 0 {
				break
			}
		}
		equal(t, len(seen), 500)
	})
	t.Run("transaction on one key", func(t *testing.T) {
		out := c.DoMulti(ctx, c.B().Multi().Build(), c.B().Set().Key("t").Value("1").Build(),
			c.B().Incr().Key("t").Build(), c.B().Exec().Build())
		got, err := out[3].ToArray()
		must(t, err)
		n, err := got[1].AsInt64()
		must(t, err)
		equal(t, n, 2)
	})
	t.Run("large and binary", func(t *testing.T) {
		must(t, c.Do(ctx, c.B().Set().Key(string(everyByte)).Value(rueidis.BinaryString(large)).Build()).Error())
		got, err := c.Do(ctx, c.B().Get().Key(string(everyByte)).Build()).AsBytes()
		must(t, err)
		equal(t, bytes.Equal(got, large), true)
	})
	t.Run("reconnect", func(t *testing.T) {
		must(t, at.restart())
		testutil.UntilNone(t, "set", func() error {
			return c.Do(ctx, c.B().Set().Key("again").Value("yes").Build()).Error()
		})
	})
}

func TestGomemcache(t *testing.T) {
	each(t, func(t *testing.T, at target) {
		c := memcache.New(at.memcached)
		defer c.Close()
		must(t, c.FlushAll())
		t.Run("set get delete", func(t *testing.T) {
			must(t, c.Set(&memcache.Item{Key: "k", Value: everyByte, Flags: 1<<32 - 1}))
			it, err := c.Get("k")
			must(t, err)
			equal(t, bytes.Equal(it.Value, everyByte) && it.Flags == 1<<32-1, true)
			must(t, want(c.Add(&memcache.Item{Key: "k"}), memcache.ErrNotStored))
			must(t, want(c.Replace(&memcache.Item{Key: "absent"}), memcache.ErrNotStored))
			must(t, c.Delete("k"))
			must(t, want(c.Delete("k"), memcache.ErrCacheMiss))
		})
		t.Run("compare and swap", func(t *testing.T) {
			must(t, c.Set(&memcache.Item{Key: "n", Value: []byte("0")}))
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					for done := 0; done < 25; {
						it, err := c.Get("n")
						if err != nil {
							t.Error(err)
							return
						}
						n, _ := strconv.Atoi(string(it.Value))
						it.Value = []byte(strconv.Itoa(n + 1))
						switch err := c.CompareAndSwap(it); {
						case err == nil:
							done++
						case !errors.Is(err, memcache.ErrCASConflict):
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			n, err := c.Increment("n", 1)
			must(t, err)
			equal(t, n, 101)
		})
		t.Run("multi", func(t *testing.T) {
			var keys []string
			for i := range 500 {
				keys = append(keys, "m"+strconv.Itoa(i))
				must(t, c.Set(&memcache.Item{Key: keys[i], Value: []byte(keys[i])}))
			}
			got, err := c.GetMulti(append(keys, "absent"))
			must(t, err)
			equal(t, len(got), 500)
			for _, k := range slices.Sorted(maps.Keys(got)) {
				equal(t, string(got[k].Value), k)
			}
		})
		t.Run("expiry", func(t *testing.T) {
			must(t, c.Set(&memcache.Item{Key: "e", Value: []byte("v"), Expiration: 1}))
			it, err := c.GetAndTouch("e", 100)
			must(t, err)
			equal(t, string(it.Value), "v")
			must(t, c.Touch("e", -1))
			must(t, want(c.Touch("e", 1), memcache.ErrCacheMiss))
		})
		t.Run("large", func(t *testing.T) {
			v := large[:1000<<10] // memcached's limit of 1 MiB includes what it keeps beside the value
			must(t, c.Set(&memcache.Item{Key: "large", Value: v}))
			it, err := c.Get("large")
			must(t, err)
			equal(t, bytes.Equal(it.Value, v), true)
		})
		t.Run("reconnect", func(t *testing.T) {
			must(t, at.restart())
			testutil.UntilNone(t, "set", func() error {
				return c.Set(&memcache.Item{Key: "again", Value: []byte("yes")})
			})
		})
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t *testing.T, got, want T) {
	t.Helper()
	if got != want {
		t.Fatalf("got %v, want %v", got, want)
	}
}

// want is for until: nil once err is the wanted one.
func want(err, wanted error) error {
	if errors.Is(err, wanted) {
		return nil
	}
	return fmt.Errorf("got %v, want %w", err, wanted)
}
