package evicttest

import (
	"container/list"
	"math/rand/v2"
)

// Cache is a policy to compare with.
type Cache interface {
	// Access uses key, takes it in if it was not there, and tells whether it was.
	Access(key uint64) (hit bool)
}

// LRU forgets the least recently used key.
type LRU struct {
	capacity int
	order    *list.List // most recent first
	at       map[uint64]*list.Element
}

// NewLRU makes an LRU of capacity keys.
func NewLRU(capacity int) *LRU {
	return &LRU{capacity: capacity, order: list.New(), at: make(map[uint64]*list.Element, capacity)}
}

// Access is as in Cache.
func (c *LRU) Access(key uint64) bool {
	if e := c.at[key]; e != nil {
		c.order.MoveToFront(e)
		return true
	}
	if len(c.at) < c.capacity {
		c.at[key] = c.order.PushFront(key)
		return false
	}
	e := c.order.Back()
	delete(c.at, e.Value.(uint64))
	e.Value = key
	c.order.MoveToFront(e)
	c.at[key] = e
	return false
}

// LFU forgets the key used least often since it was taken in, of several the least
// recently used one.
type LFU struct {
	capacity int
	at       map[uint64]*lfuEntry
	byCount  map[int]*list.List // most recent first
	least    int
}

type lfuEntry struct {
	key   uint64
	count int
	e     *list.Element
}

// NewLFU makes an LFU of capacity keys.
func NewLFU(capacity int) *LFU {
	return &LFU{capacity: capacity, at: make(map[uint64]*lfuEntry, capacity), byCount: map[int]*list.List{}}
}

// Access is as in Cache.
func (c *LFU) Access(key uint64) bool {
	if x := c.at[key]; x != nil {
		c.unlink(x)
		if x.count == c.least && c.byCount[x.count] == nil {
			c.least++
		}
		x.count++
		c.link(x)
		return true
	}
	if len(c.at) >= c.capacity {
		x := c.byCount[c.least].Back().Value.(*lfuEntry)
		c.unlink(x)
		delete(c.at, x.key)
	}
	x := &lfuEntry{key: key, count: 1}
	c.at[key] = x
	c.link(x)
	c.least = 1
	return false
}

func (c *LFU) link(x *lfuEntry) {
	l := c.byCount[x.count]
	if l == nil {
		l = list.New()
		c.byCount[x.count] = l
	}
	x.e = l.PushFront(x)
}

func (c *LFU) unlink(x *lfuEntry) {
	l := c.byCount[x.count]
	if l.Remove(x.e); l.Len() == 0 {
		delete(c.byCount, x.count)
	}
}

// RedisLFU is allkeys-lfu of Redis (evict.c, 7.2) with its defaults: lfu-log-factor 10,
// lfu-decay-time 1 minute, maxmemory-samples 5, a pool of 16.
type RedisLFU struct {
	capacity  int
	perMinute uint64 // accesses
	clock     uint64 // accesses so far
	r         *rand.Rand
	at        map[uint64]int // index in keys
	keys      []redisKey
	pool      [16]redisPooled // ascending by idle, then empty ones
}

type redisKey struct {
	key     uint64
	counter uint8
	minute  uint16
}

type redisPooled struct {
	used bool
	key  uint64
	idle uint8
}

const (
	lfuInit    = 5
	lfuFactor  = 10
	lfuSamples = 5
)

// NewRedisLFU makes one of capacity keys. Its clock is a second for every perSecond accesses.
func NewRedisLFU(seed uint64, capacity int, perSecond uint64) *RedisLFU {
	return &RedisLFU{
		capacity:  capacity,
		perMinute: 60 * perSecond,
		r:         rand.New(rand.NewPCG(seed, 3)),
		at:        make(map[uint64]int, capacity),
	}
}

// Access is as in Cache.
func (c *RedisLFU) Access(key uint64) bool {
	c.clock++
	if i, ok := c.at[key]; ok {
		k := &c.keys[i]
		k.counter = c.logIncr(c.decayed(k))
		k.minute = c.minute()
		return true
	}
	if len(c.keys) >= c.capacity {
		c.evict()
	}
	c.at[key] = len(c.keys)
	c.keys = append(c.keys, redisKey{key, lfuInit, c.minute()})
	return false
}

func (c *RedisLFU) minute() uint16 { return uint16(c.clock / c.perMinute) }

// decayed is LFUDecrAndReturn.
func (c *RedisLFU) decayed(k *redisKey) uint8 {
	return k.counter - uint8(min(c.minute()-k.minute, uint16(k.counter)))
}

// logIncr is LFULogIncr.
func (c *RedisLFU) logIncr(counter uint8) uint8 {
	if counter == 255 {
		return 255
	}
	base := max(float64(counter)-lfuInit, 0)
	if c.r.Float64() < 1/(base*lfuFactor+1) {
		counter++
	}
	return counter
}

// evict is the loop of performEvictions.
func (c *RedisLFU) evict() {
	for {
		c.populate()
		for k := len(c.pool) - 1; k >= 0; k-- {
			if !c.pool[k].used {
				continue
			}
			key := c.pool[k].key
			c.pool[k].used = false
			i, ok := c.at[key]
			if !ok {
				continue // a ghost
			}
			last := len(c.keys) - 1
			c.keys[i] = c.keys[last]
			c.at[c.keys[i].key] = i
			c.keys = c.keys[:last]
			delete(c.at, key)
			return
		}
	}
}

// populate is evictionPoolPopulate.
func (c *RedisLFU) populate() {
	last := len(c.pool) - 1
	for range lfuSamples {
		s := &c.keys[c.r.IntN(len(c.keys))]
		idle := 255 - c.decayed(s)
		k := 0
		for k <= last && c.pool[k].used && c.pool[k].idle < idle {
			k++
		}
		switch {
		case k == 0 && c.pool[last].used:
			continue
		case k <= last && !c.pool[k].used:
		case !c.pool[last].used:
			copy(c.pool[k+1:], c.pool[k:last])
		default:
			k--
			copy(c.pool[:k], c.pool[1:k+1])
		}
		c.pool[k] = redisPooled{true, s.key, idle}
	}
}
