package bench

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// compareBeside times small GETs of a client that reads or writes large values with another goroutine at the same time,
// against small ones alone, and the large ones likewise.
func compareBeside(t *testing.T, r *report, st *store) {
	n := scaled(10_000, 1_000)
	s := newKeySet(n)
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "beside", Replicas: 1,
		BytesPerNode: scaled[uint64](1<<30, 256<<20), Shards: 1, IndexPercent: 1})
	c := st.open(t, "tcp", "beside")
	load(t, c, s)
	ctx, key, at := t.Context(), []byte("large"), 0
	calls, alone := scaled(1000, 50), scaled(500*time.Millisecond, time.Millisecond)
	for _, size := range scaled([]int{1 << 20, 16 << 20}, []int{1 << 20}) {
		value, into := bytes.Repeat([]byte{7}, size), make([]byte, size)
		put := func() error { _, err := c.Put(ctx, key, value, client.PutOptions{}); return err }
		if err := put(); err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			what string
			do   func() error
		}{
			{"GETs", func() error { _, err := c.GetInto(ctx, key, into); return err }},
			{"PUTs", put},
		} {
			small := func() latency {
				return latencyOf(t, calls, func() error { at++; _, err := c.Get(ctx, s.at(at)); return err })
			}
			large := func(over func() bool) float64 { // bytes a second
				began, did := time.Now(), 0
				for did == 0 || !over() {
					if err := x.do(); err != nil {
						t.Error(err)
						return 1
					}
					did += size
				}
				return float64(did) / time.Since(began).Seconds()
			}
			var speeds, speedsAlone []float64
			both := func() (l latency) {
				var wg sync.WaitGroup
				stop := make(chan struct{})
				wg.Go(func() {
					speeds = append(speeds, large(func() bool {
						select {
						case <-stop:
							return true
						default:
							return false
						}
					}))
				})
				l = small()
				close(stop)
				wg.Wait()
				return l
			}
			d := takeTurns(rounds(), both, func() latency {
				ends := time.Now().Add(alone)
				speedsAlone = append(speedsAlone, large(func() bool { return time.Now().After(ends) }))
				return small()
			})
			what := fmt.Sprintf("beside %s of %d MiB by the same client", x.what, size>>20)
			d.row(r, "tcp Get, p50, "+what+", against alone", micros, latency.median, atMost(1.5))
			d.row(r, "tcp Get, p99, "+what+", against alone", micros, latency.tail, nil)
			r.add(fmt.Sprintf("tcp %s of %d MiB, bytes/s, beside Gets, against alone", x.what, size>>20), gigs,
				median(speeds), median(speedsAlone), median(speeds)/median(speedsAlone), nil)
		}
	}
}
