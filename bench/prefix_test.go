package bench

import (
	"fmt"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/kvd-project/kvd/client"
)

// comparePrefix times what a cache of prefixes asks: how many of 128 keys, from the first on, are there. Beside it are
// Redis's pipeline of EXISTS, one Exists after the other, and a Do of GETs.
func comparePrefix(t *testing.T, r *report, st *store) {
	const asked = 128
	rd := startRedis(t)
	ctx := t.Context()
	n := scaled(100_000, 1_000)
	s := newKeySet(n)
	rd.load(t, rd.open(t, 1), s)
	for _, provider := range []string{"shm", "tcp"} {
		ns := "prefix-" + provider
		st.sized(t, ns, n)
		c := st.open(t, provider, ns)
		load(t, c, s)
		o := &redis.Options{Addr: rd.addr, PoolSize: 1}
		if provider == "shm" {
			o.Network, o.Addr = "unix", rd.sock
		}
		rc := redis.NewClient(o)
		t.Cleanup(func() { rc.Close() })
		calls, at := scaled(500, 5), 0
		keys, names := make([][]byte, asked), make([]string, asked)
		next := func() {
			for i := range keys {
				keys[i] = s.at(at)
				at++
			}
		}
		prefix := func() error {
			next()
			if k, err := c.ExistsPrefix(ctx, keys); k != asked || err != nil {
				return fmt.Errorf("%d keys: %w", k, err)
			}
			return nil
		}
		pipeline := func() error {
			next()
			for i, k := range keys {
				names[i] = string(k)
			}
			p := rc.Pipeline()
			for _, k := range names {
				p.Exists(ctx, k)
			}
			_, err := p.Exec(ctx)
			return err
		}
		single := func() error {
			next()
			for _, k := range keys {
				if _, err := c.Exists(ctx, k); err != nil {
					return err
				}
			}
			return nil
		}
		b := newBatcher(s, asked, 0)
		for _, rival := range []struct {
			what string
			want *target
			do   func() error
		}{
			{"go-redis's pipeline of EXISTS", atMost(0.8), pipeline},
			{"one Exists after the other", nil, single},
			{"Do of as many GETs with Into", nil, func() error { return b.do(ctx, c, client.OpGet) }},
		} {
			d := takeTurns(rounds(), func() latency { return latencyOf(t, calls, prefix) },
				func() latency { return latencyOf(t, calls, rival.do) })
			d.row(r, fmt.Sprintf("%s ExistsPrefix of %d, p50, against %s", provider, asked, rival.what), micros,
				latency.median, rival.want)
		}
	}
}

// BenchmarkExists is one Exists, and an ExistsPrefix of 128, of remembered keys; beside them is a GetInto.
func BenchmarkExists(b *testing.B) {
	st := startStore(b, 1<<30)
	s := newKeySet(scaled(100_000, 1_000))
	for _, provider := range []string{"shm", "tcp"} {
		st.sized(b, provider, s.len())
		c := st.open(b, provider, provider)
		load(b, c, s)
		i, dst := 0, make([]byte, valueLen)
		b.Run(provider+"/exists", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.Exists(b.Context(), s.at(i)); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
		b.Run(provider+"/get", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.GetInto(b.Context(), s.at(i), dst); err != nil {
					b.Fatal(err)
				}
				i++
			}
		})
		b.Run(provider+"/prefix-128", func(b *testing.B) {
			keys := make([][]byte, 128)
			b.ReportAllocs()
			for b.Loop() {
				for k := range keys {
					keys[k] = s.at(i)
					i++
				}
				if n, err := c.ExistsPrefix(b.Context(), keys); n != len(keys) || err != nil {
					b.Fatal(n, err)
				}
			}
		})
	}
}
