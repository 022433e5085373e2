package client_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma"
)

// An operation that exceeds a quota is refused with the quota's name, and did not happen.
func TestQuotas(t *testing.T) {
	fill := func(t *testing.T, c *client.Client, size int) error {
		value := make([]byte, size)
		for i := range 1 << 17 {
			if _, err := c.Put(t.Context(), fmt.Appendf(nil, "key%d", i), value, client.PutOptions{}); err != nil {
				return err
			}
		}
		t.Fatal("it took everything")
		return nil
	}
	t.Run("bytes", func(t *testing.T) {
		r := newRig(t, "tcp", 1, 5*time.Second)
		r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: storeMode, Replicas: 1, BytesPerNode: 24 << 20,
			LimitBytes: 2 << 20})
		err := fill(t, r.client(r.options()), 1000)
		if !errors.Is(err, client.ErrFull) || client.Outcome(err) != rdma.No ||
			!strings.Contains(err.Error(), `quota bytes: namespace "default" has `) ||
			!strings.Contains(err.Error(), ", of 2 MiB") {
			t.Error(err)
		}
	})
	t.Run("index", func(t *testing.T) {
		r := newRig(t, "tcp", 1, 5*time.Second)
		r.startJanitor()
		const quota = 8 * layout.SegmentSize
		r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: storeMode, Replicas: 1, BytesPerNode: 24 << 20,
			Shards: 1, Segments: 1, Quota: &dirpb.Quota{IndexBytes: quota}})
		c := r.client(r.options())
		err := fill(t, c, 10)
		if !errors.Is(err, client.ErrFull) || client.Outcome(err) != rdma.No ||
			!strings.Contains(err.Error(), `quota index: namespace "default" has `) {
			t.Error(err)
		}
		if used := r.status().Usage[0].IndexBytesUsed - layout.RegionPageSize; used > quota || used < quota/2 {
			t.Errorf("the index has %d bytes, of %d", used, quota)
		}
		if it, err := c.Get(t.Context(), []byte("key0")); err != nil || len(it.Value) != 10 {
			t.Errorf("%v, %v", it, err)
		}
	})
	t.Run("sessions", func(t *testing.T) {
		r := newRig(t, "tcp", 1, 5*time.Second)
		r.create(&dirpb.CreateNamespaceRequest{Name: "default", Mode: storeMode, Replicas: 1, BytesPerNode: 24 << 20,
			Quota: &dirpb.Quota{Sessions: 1}})
		r.client(r.options())
		c, err := client.Open(t.Context(), r.options())
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, client.ErrUnavailable) || client.Outcome(err) != rdma.No ||
			!strings.Contains(err.Error(), "quota sessions") {
			t.Error(err)
		}
	})
}
