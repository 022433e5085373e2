package gateway

import (
	"cmp"
	"errors"
	"runtime"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// memoryUse is what INFO and MEMORY tell of memory: the store's, of the namespace of a database, for that is what keys
// take and what is evicted from; and this process's.
type memoryUse struct {
	used, most uint64 // bytes of records in the namespace, and how many it may have. 0: it is not known
	peak       uint64 // the most of used that was told
	evicts     bool
	heap       uint64 // of this process, in use
	process    uint64 // of this process, from the system
	active     uint64 // of this process's heap, with holes
}

// memoryOf asks for the present state. The directory tells of the namespace some seconds late.
func (g *Gateway) memoryOf(db int) (u memoryUse) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u.heap, u.process, u.active = m.HeapAlloc, m.Sys-m.HeapReleased, m.HeapInuse
	n := g.dbs[db].shared
	if t, ok := inside.Find(n.api); ok {
		u.used, u.most, u.evicts = t.Memory()
	}
	for {
		u.peak = n.peak.Load()
		if u.used <= u.peak {
			return u
		}
		n.peak.CompareAndSwap(u.peak, u.used)
	}
}

// policy is Redis's name for what happens when the namespace is full. A cache evicts whatever is least likely to be
// used again, of all keys, which is nearest to the one that goes by the last use.
func (u *memoryUse) policy() string {
	if u.evicts {
		return "allkeys-lru"
	}
	return "noeviction"
}

// cmdMemoryStats has the fields of Redis. Those about what is not here are 0.
func cmdMemoryStats(c *conn, w *resp.Writer, _ [][]byte) error {
	u := c.g.memoryOf(c.db)
	keys := uint64(0)
	for i := range c.g.o.Databases {
		if c.g.dbs[i].shared == c.in.shared {
			if n, err := c.g.KeyCount(i); err == nil {
				keys += n
			}
		}
	}
	_, scripts := c.g.scripts.cache.Len()
	ratio := func(a, b uint64) float64 { return float64(a) / float64(max(b, 1)) }
	fields := []struct {
		name  string
		value any
	}{
		{"peak.allocated", u.peak}, {"total.allocated", u.used}, {"startup.allocated", uint64(0)},
		{"replication.backlog", uint64(0)},
		{"clients.slaves", uint64(0)}, {"clients.normal", uint64(c.g.o.Budget.Used())}, {"cluster.links", uint64(0)},
		{"aof.buffer", uint64(0)},
		{"lua.caches", uint64(scripts)}, {"functions.caches", uint64(0)}, {"overhead.total", uint64(0)},
		{"keys.count", keys},
		{"keys.bytes-per-key", u.used / max(keys, 1)}, {"dataset.bytes", u.used}, {"dataset.percentage", 100.0},
		{"peak.percentage", 100 * ratio(u.used, u.peak)}, {"allocator.allocated", u.heap},
		{"allocator.active", u.active},
		{"allocator.resident", u.process}, {"allocator-fragmentation.ratio", ratio(u.active, u.heap)},
		{"allocator-fragmentation.bytes", u.active - min(u.active, u.heap)},
		{"allocator-rss.ratio", ratio(u.process, u.active)},
		{"allocator-rss.bytes", u.process - min(u.process, u.active)}, {"rss-overhead.ratio", 1.0},
		{"rss-overhead.bytes", uint64(0)},
		{"fragmentation", 1.0}, {"fragmentation.bytes", uint64(0)},
	}
	w.Map(len(fields))
	for _, f := range fields {
		w.BulkString(f.name)
		switch v := f.value.(type) {
		case float64:
			w.Double(v)
		case uint64:
			w.Int(int64(v))
		}
	}
	return nil
}

// cmdIdleTime is of what clients of a cache note of a key's use, to know what to evict. Without a cache nothing is
// noted, and the error is that of a Redis that counts uses only. It is no keyFunc, since the time is not in the record.
func cmdIdleTime(c *conn, w *resp.Writer, args [][]byte) error {
	if err := badKey(c.in, args[2]); err != nil {
		return err
	}
	ago, noted, err := time.Duration(0), false, error(nil)
	if tools, ok := inside.Find(c.in.api); ok {
		ago, noted, err = tools.LastUse(c.ctx, c.in.stored(args[2]))
	} else if version, e := versionOf(c, args[2]); e != nil || version == 0 {
		err = cmp.Or(e, client.ErrNotFound)
	}
	switch {
	case errors.Is(err, client.ErrNotFound):
		w.Null()
	case err != nil:
		return refusal(c.g.storeError(err))
	case !noted:
		return refusal("ERR An LFU maxmemory policy is selected, idle time not tracked." + values.Adjust)
	default:
		w.Int(int64(ago / time.Second))
	}
	return nil
}
