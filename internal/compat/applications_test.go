package compat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
)

// application is somebody's library and a script of testdata/applications that uses it as its
// README does. A script prints its checks like those of client libraries; its arguments are the
// ports of Redis and memcached, and a database.
type application struct {
	name   string
	script string // for Go, the name that testdata/applications/go knows
	use    string // for docs/compatibility.md
}

var applications = []application{
	{"Django", "django_cache.py", "its cache in memcached, by pymemcache and pylibmc"},
	{"Django sessions", "django_sessions.py", "in its cache in memcached"},
	{"django-redis", "django_redis_.py", "cache, sessions, lock"},
	{"Flask-Caching", "flask_caching_.py", "in Redis and memcached"},
	{"Flask-Limiter", "flask_limiter_.py", "fixed and moving windows in Redis, fixed in memcached"},
	{"Flask-Session", "flask_session_.py", "in Redis and memcached"},
	{"limits", "limits_.py", "all its strategies, in Redis and memcached"},
	{"dogpile.cache", "dogpile_cache.py", "in Redis and memcached (text and binary), with its lock"},
	{"Celery", "celery_.py", "broker and result backend"},
	{"RQ", "rq_.py", "a worker"},
	{"redis-py's Lock", "redis_lock.py", ""},
	{"nginx", "nginx.py", "`memcached_pass`"},

	{"connect-redis", "connect_redis.mjs", "express-session in Redis"},
	{"connect-memjs", "connect_memjs.mjs", "express-session in memcached (binary)"},
	{"rate-limit-redis", "express_rate_limit.mjs", "express-rate-limit, by node-redis and ioredis"},
	{"rate-limiter-flexible", "rate_limiter_flexible.mjs", ""},
	{"redlock", "redlock.mjs", ""},
	{"Keyv", "keyv.mjs", "`@keyv/redis`"},
	{"@keyv/memcache", "keyv_memcache.mjs", "memcached (binary)"},
	{"cache-manager", "cache_manager.mjs", "with `@keyv/redis`"},
	{"Bull", "bull.mjs", ""},
	{"BullMQ", "bullmq.mjs", ""},
	{"ioredis", "ioredis_multi.mjs", "MULTI over several keys, scripts as commands, Pub/Sub"},

	{"phpredis sessions", "phpredis_sessions.php", "with session locking"},
	{"php-memcached sessions", "php_memcached_sessions.php", "with session locking, text and binary"},
	{"php-memcached", "php_memcached.php", "text and binary"},

	{"Dalli", "dalli.rb", "memcached (binary)"},
	{"Rails' MemCacheStore", "mem_cache_store.rb", "by Dalli"},
	{"Rails' RedisCacheStore", "redis_cache_store.rb", ""},
	{"Sidekiq", "sidekiq.rb", "a processor of jobs"},

	{"redislock", "redislock", "`github.com/bsm/redislock`"},
	{"redsync", "redsync", "`github.com/go-redsync/redsync/v4`"},
	{"redis_rate", "redis_rate", "`github.com/go-redis/redis_rate/v10`"},
	{"go-redis/cache", "go-redis/cache", "`github.com/go-redis/cache/v9`"},
	{"gocache", "gocache", "`github.com/eko/gocache/lib/v4`, in Redis and memcached"},
	{"ulule/limiter", "ulule/limiter", "`github.com/ulule/limiter/v3`"},
	{"redistore", "redistore", "`github.com/boj/redistore`, for gorilla/sessions"},
	{"asynq", "asynq", "`github.com/hibiken/asynq`"},
}

// source is where the version of an application comes from.
func (a application) source() string {
	switch filepath.Ext(a.script) {
	case ".py":
		return "Debian 12"
	case ".mjs":
		return "npm"
	case ".php", ".rb":
		return "Debian 12"
	}
	return "Go"
}

// beside is how many applications run at a time on a server. Most of the time they wait.
const beside = 3

// applicationTime bounds a script; a check within it has less.
const applicationTime = 90 * time.Second

// TestApplications runs them all. An application passes if all its checks do.
func TestApplications(t *testing.T) {
	open(t)
	modules := nodeModules(t)
	var build struct {
		sync.Once
		program string
		err     error
	}
	dir := t.TempDir()
	argv := func(a application) ([]string, error) {
		path := filepath.Join("testdata", "applications", a.script)
		switch filepath.Ext(a.script) {
		case ".py":
			return []string{"/usr/bin/python3", "-B", "-W", "ignore", path}, nil
		case ".mjs":
			return []string{"node", "--no-warnings", filepath.Join(modules, a.script)}, nil
		case ".php":
			return []string{"php", path}, nil
		case ".rb":
			return []string{"/usr/bin/ruby", "-W0", path}, nil
		}
		build.Do(func() {
			build.program = filepath.Join(dir, "applications")
			cmd := exec.Command("go", "build", "-o", build.program, ".")
			cmd.Dir = filepath.Join("testdata", "applications", "go")
			if out, err := cmd.CombinedOutput(); err != nil {
				build.err = fmt.Errorf("%v: %w\n%s", cmd, err, out)
			}
		})
		return []string{build.program, a.script}, build.err
	}
	suite(t, applicationsSuite, func(t *testing.T, at target) (results, error) {
		if err := empty(t.Context(), at); err != nil {
			return nil, err
		}
		var mu sync.Mutex
		r := make(results)
		var errs []error
		var wg sync.WaitGroup
		slots := make(chan struct{}, beside)
		for i := range applications {
			// Those of Go are last in the list, and first here: they are built while others run.
			a := applications[len(applications)-1-i]
			wg.Go(func() {
				args, err := argv(a)
				slots <- struct{}{}
				defer func() { <-slots }()
				var got result
				if err == nil {
					args = append(args, portOf(at.redis), portOf(at.memcached), strconv.Itoa(i%databases))
					got = applicationResult(t.Context(), a, args)
				}
				mu.Lock()
				defer mu.Unlock()
				r[a.name], errs = got, append(errs, err)
			})
		}
		wg.Wait()
		for name, x := range r {
			if at.name == "reference" && x.state == failed {
				errs = append(errs, fmt.Errorf("%s fails on the original: %v", name, x.failures))
			}
		}
		return r, errors.Join(errs...)
	})
}

// applicationsSuite is the name of their list.
const applicationsSuite = "applications"

func applicationResult(ctx context.Context, a application, argv []string) result {
	python, err := filepath.Abs("testdata/python")
	if err != nil {
		return result{state: failed, failures: map[string]string{a.name: err.Error()}}
	}
	said, err := converse(ctx, applicationTime, nil, []string{"PYTHONPATH=" + python, "NODE_ENV=production"}, argv...)
	failures := make(map[string]string)
	for check, why := range said.failed {
		failures[a.name+": "+check] = why
	}
	if err != nil {
		failures[a.name+": ends early"] = err.Error()
	} else if said.passed+len(said.failed) == 0 {
		failures[a.name+": no checks"] = "none was made"
	}
	if len(failures) > 0 {
		return result{state: failed, failures: failures, version: said.version}
	}
	return result{state: passed, version: said.version}
}

// empty makes the servers forget what was there: a limit would have been reached.
func empty(ctx context.Context, at target) error {
	c := redis.NewClient(&redis.Options{Addr: at.redis})
	defer c.Close()
	m := memcache.New(at.memcached)
	defer m.Close()
	return errors.Join(c.FlushAll(ctx).Err(), m.DeleteAll())
}

// applicationTable is the list as docs/compatibility.md shows it.
func applicationTable(e expected) string {
	b := new(strings.Builder)
	fmt.Fprintf(b, "kvd: %s. The originals: %s.\n\n| application | version | use | passes |\n|---|---|---|---|\n",
		e.counts, e.reference)
	for _, a := range applications {
		byReason := make(map[string][]string)
		for place, reason := range e.reasons {
			if check, ok := strings.CutPrefix(place, a.name+": "); ok {
				byReason[reason] = append(byReason[reason], check)
			}
		}
		var why []string
		for reason, checks := range byReason {
			slices.Sort(checks)
			why = append(why, fmt.Sprintf("%s (%s)", reason, strings.Join(checks, " / ")))
		}
		slices.Sort(why)
		row := "yes"
		if len(why) > 0 {
			row = "no: " + strings.Join(why, "; ")
		}
		fmt.Fprintf(b, "| %s | %s (%s) | %s | %s |\n", a.name, cmp.Or(e.versions[a.name], "?"), a.source(), a.use,
			strings.ReplaceAll(row, "|", `\|`))
	}
	return b.String()
}

// TestApplicationScripts wants each script to be somebody's, and each name to be there once.
func TestApplicationScripts(t *testing.T) {
	names, scripts := make(map[string]bool), make(map[string]bool)
	for _, a := range applications {
		if names[a.name] {
			t.Errorf("%s is there twice", a.name)
		}
		names[a.name], scripts[a.script] = true, true
		if strings.Contains(a.name, ":") {
			t.Errorf("%s: a place is NAME: CHECK", a.name)
		}
	}
	files, err := filepath.Glob("testdata/applications/*")
	must(t, err)
	var bodies strings.Builder
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil {
			bodies.Write(b)
		}
	}
	for _, f := range files {
		name := filepath.Base(f)
		if name == "go" || scripts[name] {
			continue
		}
		if stem := strings.TrimSuffix(name, ".rb"); !strings.Contains(bodies.String(), "/"+name) &&
			!strings.Contains(bodies.String(), `require_relative "`+stem+`"`) {
			t.Errorf("nobody uses %s", f)
		}
	}
}
