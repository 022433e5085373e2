package metrics

import (
	"io/fs"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/rdmacounters"
)

var rdmaCounter = prometheus.NewDesc("kvd_rdma_counter_total",
	"Losses and signs of congestion that the machine's RDMA adapters have counted, by the counter's name in sysfs. "+
		"kind says what it means: given_up, link_lost, damaged, dropped, out_of_order, timeout, not_ready, refused, "+
		"ignored, slowed, marked or waited.", []string{"device", "port", "counter", "kind"}, nil)

// rdmaPatience bounds how long a scrape waits for adapters: with a firmware that is stuck, readers of sysfs wait.
const rdmaPatience = time.Second

// RDMA shows the counters of this machine's adapters; root is /sys/class/infiniband. A scrape reads them, and has the
// last ones if that takes longer than a second. A single reader runs at a time, so a stuck adapter holds no others.
func RDMA(root fs.FS) prometheus.Collector { return &rdmaCollector{root: root} }

type rdmaCollector struct {
	root fs.FS
	mu   struct {
		sync.Mutex
		last []rdmacounters.Counter
		done chan struct{} // of the reader that is under way; nil: there is none
	}
}

func (c *rdmaCollector) Describe(ch chan<- *prometheus.Desc) { ch <- rdmaCounter }

func (c *rdmaCollector) Collect(ch chan<- prometheus.Metric) {
	out := sink(ch)
	for _, n := range c.counters(rdmaPatience) {
		if k, ok := rdmacounters.Lookup(n.Name); ok {
			out.count(rdmaCounter, float64(n.Value), text(n.Device), strconv.Itoa(n.Port), n.Name, k.String())
		}
	}
}

func (c *rdmaCollector) counters(patience time.Duration) []rdmacounters.Counter {
	c.mu.Lock()
	done := c.mu.done
	if done == nil {
		done = make(chan struct{})
		c.mu.done = done
		go func() {
			cs, _ := rdmacounters.Read(c.root) // what could be read; kvctl doctor says what could not
			c.mu.Lock()
			c.mu.last, c.mu.done = cs, nil
			c.mu.Unlock()
			close(done)
		}()
	}
	c.mu.Unlock()
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.last
}
