package compat

import (
	"fmt"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
)

// TestClusterClients: clients of a Redis Cluster find the one node that a gateway is with --redis-cluster, and all keys
// there.
func TestClusterClients(t *testing.T) {
	l := open(t)
	p, err := l.run("cluster-gateway", l.kvd, "gateway", "--directory", l.dev.ready["directory"], "--databases", "db13",
		"--listen", "127.0.0.1:0", "--listen-memcached", "off", "--http-listen", "off", "--redis-cluster")
	must(t, err)
	defer func() { must(t, p.stop()) }()
	addr, ctx := p.ready["redis"], t.Context()

	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{addr}})
	defer c.Close()
	var want []string
	pipe := c.Pipeline()
	for i := range 100 {
		want = append(want, fmt.Sprint(i))
		pipe.Set(ctx, fmt.Sprintf("key:%d", i), i, 0)
	}
	_, err = pipe.Exec(ctx)
	must(t, err)
	for i, v := range want {
		if got, err := c.Get(ctx, fmt.Sprintf("key:%d", i)).Result(); err != nil || got != v {
			t.Fatalf("go-redis: key %d is %q, %v", i, got, err)
		}
	}
	if got, err := c.ClusterCountKeysInSlot(ctx, 15495).Result(); err != nil || got != 0 {
		t.Errorf("go-redis: %d keys in a slot of none, %v", got, err)
	}
	_, err = c.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.Incr(ctx, "{a}1")
		p.Incr(ctx, "{a}2")
		return nil
	})
	must(t, err)

	r, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}})
	must(t, err)
	defer r.Close()
	if got, err := r.Do(ctx, r.B().Get().Key("key:7").Build()).ToString(); err != nil || got != "7" {
		t.Errorf("rueidis: %q, %v", got, err)
	}
	if r.Mode() != rueidis.ClientModeCluster {
		t.Errorf("rueidis takes it for %v, want a cluster", r.Mode())
	}
	out, err := output(t, "", "redis-cli", "-c", "-p", portOf(addr), "get", "key:42")
	if must(t, err); strings.TrimSpace(out) != "42" {
		t.Errorf("redis-cli -c: %q", out)
	}
}
