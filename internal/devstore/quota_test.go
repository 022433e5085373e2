package devstore

import (
	"context"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// A client of a namespace with a quota of verbs over tcp gets so many and no error; that of another
// namespace gets as many as it likes.
func TestQuotaOfVerbs(t *testing.T) {
	const perSecond = 2000
	s := start(t, Options{Nodes: 1, CapacityBytes: 64 << 20})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	dir, err := dirclient.Open(dirclient.Options{Addrs: s.Directory()})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for name, ops := range map[string]uint64{"small": perSecond, "any": 0} {
		if err := dir.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.CreateNamespace(ctx, &dirpb.CreateNamespaceRequest{Name: name, BytesPerNode: 16 << 20,
				Quota: &dirpb.Quota{TcpOpsPerSecond: ops}})
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	open := func(namespace string) *client.Client {
		c, err := client.Open(ctx, client.Options{Directory: s.Directory(), Devices: s.Devices(), Provider: "tcp",
			Namespace: namespace, Lanes: 4})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	small, neighbour := open("small"), open("any")
	defer small.Close()
	defer neighbour.Close()
	verbs := func() uint64 { n := small.Stats().Verbs; return n.Total() }
	began, before := time.Now(), verbs()
	var running atomic.Int64
	done := make(chan error, 8)
	for g := range cap(done) {
		running.Add(1)
		go func() {
			defer running.Add(-1)
			for i := 0; verbs()-before < 2000; i++ {
				k := []byte(strconv.Itoa(g) + "-" + strconv.Itoa(i%100))
				_, err := small.Put(ctx, k, k, client.PutOptions{})
				if err == nil {
					_, err = small.Get(ctx, k)
				}
				if err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for i := 0; i < 1000 || running.Load() > 0; i++ {
		k := []byte(strconv.Itoa(i % 1000))
		if _, err := neighbour.Put(ctx, k, k, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for range cap(done) {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	n, took := float64(verbs()-before), time.Since(began).Seconds()
	// Tokens of 50 ms may have been left, and a millisecond's worth may be early.
	if most := perSecond * (took + 0.051); n > most {
		t.Errorf("%.0f verbs in %.3f s, want at most %.0f", n, took, most)
	}
	t.Logf("%.0f verbs a second of %d", n/took, perSecond)
	for _, q := range s.Nodes()[0].Stats().Quotas {
		if limited := q.Name == "small"; limited != (q.TCPOps == perSecond) || limited != (q.Paced > 0) {
			t.Errorf("%+v", q)
		}
	}
}
