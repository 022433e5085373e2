package raftstore

import (
	"sync"

	"github.com/cockroachdb/pebble/v2"
)

// compactions lets Pebble run one compaction at a time, as Pebble does by default, and none
// before start is called. An Open that fails frees what a compaction uses without waiting for
// it, so a compaction that began during Open would end the process with a panic.
type compactions struct {
	db pebble.DBForCompaction // set by Register, before any other call
	mu struct {
		sync.Mutex      // not held during calls to db, which take Pebble's own locks
		idle       bool // a compaction may begin
		refused    bool // TrySchedule refused one since next began to look
		ended      bool
		asking     sync.WaitGroup // calls to db; Add only under mu with ended false
	}
}

var (
	_ pebble.CompactionScheduler   = (*compactions)(nil)
	_ pebble.CompactionGrantHandle = (*compactions)(nil)
)

// start lets compactions begin. It is called once, after Open has succeeded.
func (c *compactions) start() { c.next() }

// next begins a compaction that waits, or else lets TrySchedule grant the next one. No
// compaction is under way when it is called.
func (c *compactions) next() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.mu.ended {
		c.mu.refused = false
		c.mu.asking.Add(1)
		c.mu.Unlock()
		waits, _ := c.db.GetWaitingCompaction()
		begun := waits && c.db.Schedule(c)
		c.mu.asking.Done()
		c.mu.Lock()
		if begun {
			return // Done calls next
		}
		if !c.mu.refused { // Pebble does not ask again for a compaction that was refused
			c.mu.idle = true
			return
		}
	}
}

func (c *compactions) Register(_ int, db pebble.DBForCompaction) { c.db = db }

func (c *compactions) Unregister() {
	c.mu.Lock()
	c.mu.ended, c.mu.idle = true, false
	c.mu.Unlock()
	c.mu.asking.Wait()
}

func (c *compactions) TrySchedule() (bool, pebble.CompactionGrantHandle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.mu.idle {
		c.mu.refused = true
		return false, nil
	}
	c.mu.idle = false
	return true, c
}

// UpdateGetAllowedWithoutPermission implements pebble.CompactionScheduler: it is always one.
func (c *compactions) UpdateGetAllowedWithoutPermission() {}

func (c *compactions) Started() {}

func (c *compactions) MeasureCPU(pebble.CompactionGoroutineKind) {}

func (c *compactions) CumulativeStats(pebble.CompactionGrantHandleStats) {}

func (c *compactions) Done() { c.next() }
