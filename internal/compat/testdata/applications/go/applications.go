package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"time"

	"github.com/boj/redistore"
	"github.com/bradfitz/gomemcache/memcache"
	"github.com/bsm/redislock"
	"github.com/eko/gocache/lib/v4/cache"
	"github.com/eko/gocache/lib/v4/marshaler"
	"github.com/eko/gocache/lib/v4/store"
	memcachestore "github.com/eko/gocache/store/memcache/v4"
	redisstore "github.com/eko/gocache/store/redis/v4"
	rediscache "github.com/go-redis/cache/v9"
	"github.com/go-redis/redis_rate/v10"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
	"github.com/ulule/limiter/v3"
	limiterstore "github.com/ulule/limiter/v3/drivers/store/redis"
)

// applications are by name what main runs.
var applications = map[string]struct {
	module string
	checks func(at)
}{
	"redislock":      {"github.com/bsm/redislock", redislocks},
	"redsync":        {"github.com/go-redsync/redsync/v4", redsyncs},
	"redis_rate":     {"github.com/go-redis/redis_rate/v10", redisRate},
	"go-redis/cache": {"github.com/go-redis/cache/v9", redisCache},
	"gocache":        {"github.com/eko/gocache/lib/v4", gocache},
	"ulule/limiter":  {"github.com/ulule/limiter/v3", ululeLimiter},
	"redistore":      {"github.com/boj/redistore", redistoreSessions},
	"asynq":          {"github.com/hibiken/asynq", asynqs},
}

func redislocks(a at) {
	locker := redislock.New(a.client)
	check("obtain and release", func(ctx context.Context) error {
		lock, err := locker.Obtain(ctx, "redislock:a", time.Minute, nil)
		if err != nil {
			return err
		}
		if _, err := locker.Obtain(ctx, "redislock:a", time.Minute, nil); !errors.Is(err, redislock.ErrNotObtained) {
			return fmt.Errorf("obtained twice: %v", err)
		}
		if ttl, err := lock.TTL(ctx); err != nil || ttl < 50*time.Second {
			return fmt.Errorf("ttl %v, %v", ttl, err)
		}
		if err := lock.Release(ctx); err != nil {
			return err
		}
		if err := lock.Release(ctx); !errors.Is(err, redislock.ErrLockNotHeld) {
			return fmt.Errorf("released twice: %v", err)
		}
		return nil
	})
	check("refresh", func(ctx context.Context) error {
		lock, err := locker.Obtain(ctx, "redislock:r", time.Minute, &redislock.Options{Metadata: "who"})
		if err != nil {
			return err
		}
		if err := lock.Refresh(ctx, time.Hour, nil); err != nil {
			return err
		}
		if ttl, err := lock.TTL(ctx); err != nil || ttl < 50*time.Minute {
			return fmt.Errorf("ttl %v, %v", ttl, err)
		}
		return errors.Join(equal(lock.Metadata(), "who"), lock.Release(ctx))
	})
	check("counting under it", func(ctx context.Context) error {
		return countUnder(ctx, a.client, "redislock:n", func() (func() error, error) {
			lock, err := locker.Obtain(ctx, "redislock:c", time.Minute,
				&redislock.Options{RetryStrategy: redislock.LinearBackoff(2 * time.Millisecond)})
			return func() error { return lock.Release(ctx) }, err
		})
	})
}

// countUnder counts to 40 by reading and writing, which only a lock makes right.
func countUnder(ctx context.Context, c *redis.Client, key string, lock func() (func() error, error)) error {
	if err := c.Set(ctx, key, 0, 0).Err(); err != nil {
		return err
	}
	err := all(4, func() error {
		for range 10 {
			release, err := lock()
			if err != nil {
				return err
			}
			n, err := c.Get(ctx, key).Int()
			if err = errors.Join(err, c.Set(ctx, key, n+1, 0).Err(), release()); err != nil {
				return err
			}
		}
		return nil
	})
	return errors.Join(err, equal(c.Get(ctx, key).Val(), "40"))
}

func redsyncs(a at) {
	rs := redsync.New(goredis.NewPool(a.client))
	check("lock and unlock", func(ctx context.Context) error {
		m, other := rs.NewMutex("redsync:a"), rs.NewMutex("redsync:a", redsync.WithTries(1))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		if err := other.TryLockContext(ctx); err == nil {
			return errors.New("locked twice")
		}
		if ok, err := m.UnlockContext(ctx); !ok || err != nil {
			return fmt.Errorf("unlock: %v, %v", ok, err)
		}
		if err := other.LockContext(ctx); err != nil {
			return err
		}
		_, err := other.UnlockContext(ctx)
		return err
	})
	check("extend", func(ctx context.Context) error {
		m := rs.NewMutex("redsync:e", redsync.WithExpiry(time.Minute))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		if ok, err := m.ExtendContext(ctx); !ok || err != nil {
			return fmt.Errorf("extend: %v, %v", ok, err)
		}
		_, err := m.UnlockContext(ctx)
		return err
	})
	check("counting under it", func(ctx context.Context) error {
		return countUnder(ctx, a.client, "redsync:n", func() (func() error, error) {
			m := rs.NewMutex("redsync:c", redsync.WithExpiry(time.Minute), redsync.WithTries(1000),
				redsync.WithRetryDelay(2*time.Millisecond))
			return func() error { _, err := m.UnlockContext(ctx); return err }, m.LockContext(ctx)
		})
	})
}

func redisRate(a at) {
	l := redis_rate.NewLimiter(a.client)
	check("allow", func(ctx context.Context) error {
		var got []int
		for range 5 {
			r, err := l.Allow(ctx, "me", redis_rate.PerHour(3))
			if err != nil {
				return err
			}
			got = append(got, r.Allowed)
		}
		return equal(got, []int{1, 1, 1, 0, 0})
	})
	check("allow n, at most, reset", func(ctx context.Context) error {
		r, err := l.AllowN(ctx, "n", redis_rate.PerHour(10), 4)
		if err != nil {
			return err
		}
		if err := equal([]int{r.Allowed, r.Remaining}, []int{4, 6}); err != nil {
			return err
		}
		if r, err = l.AllowAtMost(ctx, "n", redis_rate.PerHour(10), 100); err != nil {
			return err
		}
		if err := errors.Join(equal(r.Allowed, 6), l.Reset(ctx, "n")); err != nil {
			return err
		}
		r, err = l.Allow(ctx, "n", redis_rate.PerHour(10))
		return errors.Join(err, equal(r.Remaining, 9))
	})
}

func redisCache(a at) {
	type object struct {
		Str string
		Num int
	}
	c := rediscache.New(
		&rediscache.Options{Redis: redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": a.redis}}),
			LocalCache: rediscache.NewTinyLFU(100, time.Minute)})
	check("set get delete", func(ctx context.Context) error {
		if err := c.Set(&rediscache.Item{Ctx: ctx, Key: "go-redis/cache:a", Value: &object{"x", 1},
			TTL: time.Hour}); err != nil {
			return err
		}
		var got object
		if err := c.GetSkippingLocalCache(ctx, "go-redis/cache:a", &got); err != nil {
			return err
		}
		if err := errors.Join(equal(got, object{"x", 1}), c.Delete(ctx, "go-redis/cache:a")); err != nil {
			return err
		}
		if err := c.Get(ctx, "go-redis/cache:a", &got); !errors.Is(err, rediscache.ErrCacheMiss) {
			return fmt.Errorf("after delete: %v", err)
		}
		return nil
	})
	check("once", func(ctx context.Context) error {
		calls := 0
		if err := c.Delete(ctx, "go-redis/cache:once"); err != nil && !errors.Is(err, rediscache.ErrCacheMiss) {
			return err
		}
		for range 3 {
			var got object
			err := c.Once(&rediscache.Item{Ctx: ctx, Key: "go-redis/cache:once", Value: &got,
				Do: func(*rediscache.Item) (any, error) {
					calls++
					return &object{"o", 2}, nil
				}})
			if err := errors.Join(err, equal(got, object{"o", 2})); err != nil {
				return err
			}
		}
		return equal(calls, 1)
	})
	check("setnx and setxx", func(ctx context.Context) error {
		item := &rediscache.Item{Ctx: ctx, Key: "go-redis/cache:nx", Value: "first", SetNX: true}
		if err := c.Set(item); err != nil {
			return err
		}
		item.Value = "second"
		if err := c.Set(item); err != nil {
			return err
		}
		var got string
		return errors.Join(c.GetSkippingLocalCache(ctx, item.Key, &got), equal(got, "first"))
	})
}

func gocache(a at) {
	type object struct{ ID int }
	for name, s := range map[string]store.StoreInterface{
		"redis":     redisstore.NewRedis(a.client),
		"memcached": memcachestore.NewMemcache(memcache.New(a.memcached), store.WithExpiration(time.Minute)),
	} {
		check("set get delete in "+name, func(ctx context.Context) error {
			c := cache.New[any](s)
			if err := c.Set(ctx, "gocache-k", []byte("v"), store.WithExpiration(time.Minute)); err != nil {
				return err
			}
			got, err := c.Get(ctx, "gocache-k")
			if b, ok := got.([]byte); ok {
				got = string(b)
			}
			if err := errors.Join(err, equal(got, "v"), c.Delete(ctx, "gocache-k")); err != nil {
				return err
			}
			if _, err := c.Get(ctx, "gocache-k"); err == nil {
				return errors.New("found after delete")
			}
			return nil
		})
		check("tags in "+name, func(ctx context.Context) error {
			m := marshaler.New(cache.New[any](s))
			for i := range 3 {
				if err := m.Set(ctx, "gocache-t"+strconv.Itoa(i), object{i}, store.WithTags([]string{"gocache-tag"}),
					store.WithExpiration(time.Minute)); err != nil {
					return err
				}
			}
			got, err := m.Get(ctx, "gocache-t1", new(object))
			if err := errors.Join(err, equal(got, &object{1}),
				m.Invalidate(ctx, store.WithInvalidateTags([]string{"gocache-tag"}))); err != nil {
				return err
			}
			if _, err := m.Get(ctx, "gocache-t1", new(object)); err == nil {
				return errors.New("found after its tag was invalidated")
			}
			return nil
		})
	}
}

func ululeLimiter(a at) {
	check("limit", func(ctx context.Context) error {
		s, err := limiterstore.NewStoreWithOptions(a.client, limiter.StoreOptions{Prefix: "ulule"})
		if err != nil {
			return err
		}
		l := limiter.New(s, limiter.Rate{Period: time.Hour, Limit: 3})
		var reached []bool
		for range 5 {
			c, err := l.Get(ctx, "me")
			if err != nil {
				return err
			}
			reached = append(reached, c.Reached)
		}
		c, err := l.Peek(ctx, "me")
		if err := errors.Join(err, equal(reached, []bool{false, false, false, true, true}),
			equal(c.Remaining, int64(0))); err != nil {
			return err
		}
		if _, err := l.Reset(ctx, "me"); err != nil {
			return err
		}
		c, err = l.Increment(ctx, "me", 2)
		return errors.Join(err, equal(c.Remaining, int64(1)))
	})
}

func redistoreSessions(a at) {
	check("sessions", func(context.Context) error {
		s, err := redistore.NewRediStoreWithDB(4, "tcp", a.redis, "", "", a.db, []byte("secret-key"))
		if err != nil {
			return err
		}
		defer s.Close()
		var cookie string
		visit := func(change func(values map[any]any), age int) (n any, err error) {
			r := httptest.NewRequest(http.MethodGet, "http://localhost/", nil)
			r.Header.Set("Cookie", cookie)
			session, err := s.Get(r, "session-key")
			if err != nil {
				return nil, err
			}
			n = session.Values["n"]
			change(session.Values)
			session.Options.MaxAge = age
			w := httptest.NewRecorder()
			err = session.Save(r, w)
			if age > 0 { // else the browser brings the old one again, as a thief would
				cookie = w.Header().Get("Set-Cookie")
			}
			return n, err
		}
		set := func(n int) func(map[any]any) { return func(v map[any]any) { v["n"] = n } }
		for i, age := range []int{3600, 3600, -1} {
			n, err := visit(set(i), age)
			if i == 0 {
				err = errors.Join(err, equal(n, nil))
			} else {
				err = errors.Join(err, equal(n, i-1))
			}
			if err != nil {
				return err
			}
		}
		n, err := visit(set(0), 3600)
		return errors.Join(err, equal(n, nil))
	})
}

func asynqs(a at) {
	db, _ := strconv.Atoi(a.db)
	o := asynq.RedisClientOpt{Addr: a.redis, DB: db, PoolSize: 10}
	c := asynq.NewClient(o)
	defer c.Close()
	inspector := asynq.NewInspector(o)
	defer inspector.Close()
	did := make(chan string, 10)
	server := asynq.NewServer(o, asynq.Config{Concurrency: 2, LogLevel: asynq.FatalLevel,
		TaskCheckInterval: 50 * time.Millisecond, DelayedTaskCheckInterval: 50 * time.Millisecond,
		ShutdownTimeout: time.Second})
	started := server.Start(asynq.HandlerFunc(func(_ context.Context, t *asynq.Task) error {
		did <- string(t.Payload())
		return nil
	}))
	if started == nil {
		defer server.Shutdown()
	}
	next := func(ctx context.Context) (string, error) {
		select {
		case s := <-did:
			return s, nil
		case <-ctx.Done():
			return "", errors.New("the task was not performed")
		}
	}
	check("a task", func(ctx context.Context) error {
		if started != nil {
			return started
		}
		if _, err := c.EnqueueContext(ctx, asynq.NewTask("t", []byte("now"))); err != nil {
			return err
		}
		got, err := next(ctx)
		return errors.Join(err, equal(got, "now"))
	})
	check("a task later, once", func(ctx context.Context) error {
		t := asynq.NewTask("t", []byte("later"))
		if _, err := c.EnqueueContext(ctx, t, asynq.ProcessIn(100*time.Millisecond), asynq.Unique(time.Hour)); err !=
			nil {
			return err
		}
		if _, err := c.EnqueueContext(ctx, t, asynq.Unique(time.Hour)); !errors.Is(err, asynq.ErrDuplicateTask) {
			return fmt.Errorf("enqueued twice: %v", err)
		}
		got, err := next(ctx)
		return errors.Join(err, equal(got, "later"))
	})
	check("queues", func(context.Context) error {
		queues, err := inspector.Queues()
		return errors.Join(err, equal(queues, []string{"default"}))
	})
}
