package e2e

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/keeper/keepertest"
)

// TestRotCache: a cache whose records are damaged in their only copy goes on: what is evicted, and what expires, goes with them, so that the memory is there again.
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
	for i := range 12000 { // three times its memory
		// A damaged record that may be the key's, one of 4096 in its group, is in the way until it is evicted.
		if got := c.do("SET new%d %s", i, strings.Repeat("y", size)); got != "+OK" && !strings.Contains(got, "no whole copy on 1 replicas") {
			t.Fatalf("SET %d: %s", i, got)
		} else if got != "+OK" {
			t.Logf("SET %d: %s", i, got)
		}
	}
	out, stderr, _ := r.ctl(nil, "--namespace", "page", "--provider", "tcp", "-o", "json", "check", "--no-repair")
	var rep struct {
		Records int `json:"records"`
		Corrupt int `json:"corrupt_records"`
	}
	if err := json.Unmarshal(out, &rep); err != nil || rep.Corrupt > 0 || rep.Records == 0 {
		t.Errorf("%v: %d records and %d damaged ones\n%s", err, rep.Records, rep.Corrupt, stderr)
	}
}
