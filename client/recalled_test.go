package client_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// While the only extent of a cache is recalled nothing that a session evicts gives it memory. It keeps the records,
// though writers wait.
func TestRecallOfAllMemoryKeepsCache(t *testing.T) {
	// Nobody does the recall's work, so that it lasts.
	s, c := open(t, "shm", devstore.Options{CapacityBytes: 64 << 20, NoJanitor: true,
		Namespaces: []devstore.Namespace{{Name: "default", Mode: cacheMode, Replicas: 1, BytesPerNode: 4 << 20}}},
		client.Options{OpTimeout: 3 * time.Second})
	ctx := t.Context()
	value := make([]byte, 16<<10) // so that few keys fill it, and no shard grows
	for i := range 1000 {
		if _, err := c.Put(ctx, fmt.Appendf(nil, "key%d", i), value, client.PutOptions{}); err != nil {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	dir, err := dirclient.Open(dirclient.Options{Addrs: s.Directory()})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := dir.CallOnce(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		st, err := d.Status(ctx, &dirpb.StatusRequest{})
		if err != nil {
			return err
		}
		_, err = d.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_RECALL, Namespace: "default",
			PgId: st.GetMap().GetPgs()[0].GetId()})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string { // as of the lanes
		if st := c.Stats(); st.FreeUnits > 0 || st.LimboUnits > 0 {
			return fmt.Sprintf("%d units are free, %d in limbo", st.FreeUnits, st.LimboUnits)
		}
		return ""
	})
	before, err := c.Count(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var key []byte
	for kv, err := range c.Scan(ctx, client.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		key = kv.Key
		break
	}
	// A writer asks for memory all the time until it gives up.
	if _, err := c.Put(ctx, key, value, client.PutOptions{}); err == nil {
		t.Error("a put found memory while all of it was recalled")
	}
	after, err := c.Count(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d keys before, %d after", before, after)
	if after < before*9/10 || before < 100 { // what was under way when the recall began goes
		t.Errorf("%d keys before the recall, %d in it", before, after)
	}
}
