package metrics

import (
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	kvdtest "github.com/kvd-project/kvd/internal/testutil"
)

func TestRDMA(t *testing.T) {
	c := RDMA(fstest.MapFS{
		"mlx5_0/ports/1/hw_counters/out_of_sequence":  {Data: []byte("7\n")},
		"mlx5_0/ports/1/hw_counters/rx_read_requests": {Data: []byte("9\n")},
		"rxe0/ports/2/counters/link_downed":           {Data: []byte("1\n")},
	})
	if err := testutil.CollectAndCompare(c, strings.NewReader(`
# HELP kvd_rdma_counter_total Losses and signs of congestion that the machine's RDMA adapters have counted, by the `+
		`counter's name in sysfs. kind says what it means: given_up, link_lost, damaged, dropped, out_of_order, timeout, `+
		`not_ready, refused, ignored, slowed, marked or waited.
# TYPE kvd_rdma_counter_total counter
kvd_rdma_counter_total{counter="out_of_sequence",device="mlx5_0",kind="out_of_order",port="1"} 7
kvd_rdma_counter_total{counter="link_downed",device="rxe0",kind="link_lost",port="2"} 1
`)); err != nil {
		t.Error(err)
	}
	if n := testutil.CollectAndCount(RDMA(fstest.MapFS{})); n != 0 {
		t.Errorf("%d without adapters", n)
	}
}

// stuck is a folder that answers when it is let go.
type stuck struct {
	fs.FS
	asked chan struct{}
	goOn  chan struct{}
}

func (s stuck) Open(name string) (fs.File, error) {
	s.asked <- struct{}{}
	<-s.goOn
	return s.FS.Open(name)
}

// An adapter that does not answer holds one reader, however many scrapes there are, and they end.
func TestRDMAStuck(t *testing.T) {
	s := stuck{fstest.MapFS{"a/ports/1/counters/link_downed": {Data: []byte("1")}}, make(chan struct{}, 99),
		make(chan struct{})}
	c := RDMA(s).(*rdmaCollector)
	for i := range 3 {
		if cs := c.counters(time.Millisecond); cs != nil {
			t.Errorf("%v of an adapter that does not answer", cs)
		}
		if i == 0 {
			kvdtest.Until(t, "a reader asks", func() bool { return len(s.asked) == 1 })
		}
	}
	if n := len(s.asked); n != 1 {
		t.Errorf("%d readers, want 1", n)
	}
	close(s.goOn)
	kvdtest.Until(t, "the adapter's counters are there", func() bool { return len(c.counters(time.Minute)) == 1 })
}
