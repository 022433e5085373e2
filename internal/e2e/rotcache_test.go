package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/keeper/keepertest"
)

// TestRotCache: a cache whose records are damaged in their only copy goes on: what is evicted, and what expires, goes
// with them, so that the memory is there again.
func TestRotCache(t *testing.T) {
	r := &rotten{world: newWorld(t)}
	r.dir = freeAddr(t)
	r.start(r.directory(t.TempDir(), freeAddr(t))...)
	r.folders = []string{filepath.Join(keepertest.Folder(t), "m1")}
	r.start(append(r.memnode("m1"), "--memory-path", r.folders[0])...)
	r.must(nil, "namespace", "create", "page", "--mode", "cache", "--replicas", "1", "--bytes", "4MiB")
	redis := freeAddr(t)
	r.start("gateway", "--databases", "page", "--directory", r.dir, "--listen", redis, "--listen-memcached", "off")
	c := r.redis(redis)
	const n, size = 200, 1000
	var values []string
	for i := range n {
		v := fmt.Sprintf("value-%d.", i)
		values = append(values, v)
		more := ""
		if i%2 == 0 {
			more = " PX 300"
		}
		if got := c.do("SET old%d %s%s"+more, i, v, strings.Repeat("x", size)); got != "+OK" {
			t.Fatal(got)
		}
	}
	r.rot(values, "header", 0)
	// A damaged record that may be the key's, one of 4096 in its group, is in the way until it is evicted.
	hidden := 0
	write := func(from, to int) {
		for i := range to - from {
			if got := c.do("SET new%d %s", from+i, strings.Repeat("y", size)); got == "+OK" {
				continue
			} else if hidden++; !strings.Contains(got, "no whole copy on 1 replicas") || hidden > n/20 {
				t.Fatalf("SET %d: %s", from+i, got)
			}
		}
	}
	var rep struct {
		Records int `json:"records"`
		Corrupt int `json:"corrupt_records"`
	}
	// Expired records go by themselves. Of the others that are damaged, three times the cache's memory leaves a few
	// that the policy takes to be worth as much as others.
	written := 12000
	write(0, written)
	r.until("damaged records to be gone", func() bool {
		write(written, written+1000)
		written += 1000
		out, stderr, _ := r.ctl(nil, "--namespace", "page", "--provider", "tcp", "-o", "json", "check", "--no-repair")
		if err := json.Unmarshal(out, &rep); err != nil {
			t.Fatalf("%v\n%s", err, stderr)
		}
		return rep.Corrupt <= n/10 && rep.Records > 1000
	})
	t.Logf("%d records and %d damaged ones, after %d writes of which %d failed", rep.Records, rep.Corrupt, written,
		hidden)
	// A repair recalls the only extent there is. Meanwhile the gateway finds no memory, whatever it evicts. It has
	// written until now, so it may have evicted a third for what it would have written next.
	before := rep.Records
	out, stderr, _ := r.ctl(nil, "--namespace", "page", "--provider", "tcp", "-o", "json", "check", "--repair")
	if err := json.Unmarshal(out, &rep); err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	if rep.Corrupt > 0 || rep.Records < before/2 {
		t.Errorf("a repair left %d records of %d, of which %d are damaged\n%s", rep.Records, before, rep.Corrupt, out)
	}
	left := rep.Records
	// The gateway hands back memory that it evicted for writers and does not use. While nobody writes it evicts no more
	// than that third.
	for range 30 { // sessions come and go, and renewals with them
		out = r.must(nil, "--namespace", "page", "--provider", "tcp", "-o", "json", "check", "--no-repair")
		if err := json.Unmarshal(out, &rep); err != nil {
			t.Fatal(err)
		}
		if rep.Records < left/2 {
			t.Fatalf("a repair left %d records, and %d are there though nobody wrote", left, rep.Records)
		}
	}
	t.Logf("%d records, %d after a repair, and %d later", before, left, rep.Records)
	if out := string(r.must(nil, "status", "-o", "json")); strings.Contains(out, "corrupt memory") {
		t.Errorf("a job has trouble:\n%s", out)
	}
}
