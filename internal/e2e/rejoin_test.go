package e2e

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/client"
)

var joined = regexp.MustCompile(`janitor: done.* kind=JOB_JOIN .*synced=(\d+) .*transferred_bytes=(\d+)`)

// joins are those that the janitors of some memory nodes have done: how many words differed, and how much was read and
// written.
func joins(nodes ...*daemon) (words, bytes []uint64) {
	for _, d := range nodes {
		for _, m := range joined.FindAllStringSubmatch(d.stderr.String(), -1) {
			w, _ := strconv.ParseUint(m[1], 10, 64)
			b, _ := strconv.ParseUint(m[2], 10, 64)
			words, bytes = append(words, w), append(bytes, b)
		}
	}
	return words, bytes
}

// TestRejoin: a memory node whose process stands still for longer than its lease joins again with what it held, so that
// only what was changed meanwhile is copied; one that has lost its memory gets everything.
func TestRejoin(t *testing.T) {
	const records, changed, groups = 4000, 200, 2 // of placement groups: one for each memory node
	w := newWorld(t)
	w.dir = freeAddr(t)
	dir := w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m1, m2 := w.start(append(w.memnode("m1"), "--janitor=false")...), w.start(w.memnode("m2")...)
	w.must(nil, "namespace", "create", "two", "--replicas", "2")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: []string{w.dir}, Provider: "tcp", Namespace: "two",
		OpTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	value := func(k, version int) []byte { return []byte(strings.Repeat(fmt.Sprintf("%07d.", k+version), 128)) }
	put := func(n, version int) {
		for k := range n {
			if _, err := c.Put(ctx, fmt.Appendf(nil, "key %d", k), value(k, version), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(records, 0)
	stopped := m1.pid()
	if err := syscall.Kill(stopped, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	lost := func(n int) {
		t.Helper()
		w.until("m1 to be declared lost", func() bool {
			return strings.Count(dir.stderr.String(), `memory node \"m1\" is down`) == n
		})
	}
	lost(1)
	put(changed, 1)
	if err := syscall.Kill(stopped, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	// next waits for a join of each placement group, and sums up those behind the first n.
	next := func(n int, nodes ...*daemon) (words, bytes uint64) {
		t.Helper()
		w.until("joins", func() bool {
			ws, bs := joins(nodes...)
			if len(ws) < n+groups {
				return false
			}
			words, bytes = 0, 0
			for i := range groups {
				words, bytes = words+ws[n+i], bytes+bs[n+i]
			}
			return true
		})
		return words, bytes
	}
	words, kept := next(0, m2)
	// The first of the changes may have been under way to m1 when the client heard of its loss, and have arrived when
	// m1 went on.
	if words < changed-1 || words > changed+100 {
		t.Errorf("%d words differed after %d of %d records had changed", words, changed, records)
	}
	w.must(nil, "--namespace", "two", "check")

	m1.signal(syscall.SIGKILL)
	lost(2)
	w.start(append(w.memnode("m1"), "--janitor=false")...)
	_, all := next(groups, m2)
	if all < records<<10 || kept > all/4 {
		t.Errorf("the joins with what was held transferred %d bytes, those from zeroes %d", kept, all)
	}
	t.Logf("%d of %d records changed: %d bytes; from zeroes: %d bytes", changed, records, kept, all)
	w.must(nil, "--namespace", "two", "check")
	for k := range records {
		i, err := c.Get(ctx, fmt.Appendf(nil, "key %d", k))
		version := 0
		if k < changed {
			version = 1
		}
		if err != nil || string(i.Value) != string(value(k, version)) {
			t.Fatalf("key %d: %.20q, %v", k, i.Value, err)
		}
	}
}
