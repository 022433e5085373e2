package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/inside"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/patient"
)

// damagedStore has memory in the first pages of a scan that cannot be read.
type damagedStore struct {
	ctl.Store
	pages int
}

func (d *damagedStore) Scan(_ context.Context, o client.ScanOptions) iter.Seq2[client.KV, error] {
	return func(yield func(client.KV, error) bool) {
		for cur := o.Cursor; !cur.Done; {
			at := cur.Segment
			if !yield(client.KV{Key: fmt.Append(nil, at)}, nil) {
				return
			}
			cur.Segment++
			cur.Done = cur.Segment == 20
			if at < uint32(d.pages) &&
				!yield(client.KV{}, fmt.Errorf("scan: %w: pg 1 replica 0: group at %#x", client.ErrCorrupt, 256*at)) {
				return
			}
		}
	}
}

// A damaged place does not take the other keys of a scan with it, and is told at the end.
func TestScanDamaged(t *testing.T) {
	for _, c := range []struct{ pages, named int }{{0, 0}, {1, 1}, {20, 8}} {
		var keys []string
		err := patient.Keys(t.Context(), &damagedStore{pages: c.pages}, client.ScanOptions{KeysOnly: true},
			func(kv client.KV) (bool, error) {
				keys = append(keys, string(kv.Key))
				return true, nil
			})
		if len(keys) != 20 {
			t.Errorf("%d damaged pages: %d keys, want 20", c.pages, len(keys))
		}
		if (err != nil) != (c.pages > 0) || err != nil &&
			(!errors.Is(err, client.ErrCorrupt) || strings.Count(err.Error(), "group at") != c.named) {
			t.Errorf("%d damaged pages: %v, want %d of them named", c.pages, err, c.named)
		}
		if err != nil && ctl.ExitCode(err) != ctl.ExitOther {
			t.Errorf("exit status %d, want %d", ctl.ExitCode(err), ctl.ExitOther)
		}
	}
}

// eachMemory calls fn with the shared memory of this process, a file at a time, and writes back what it has changed:
// through the mappings that there are, since nobody may make another one to write.
func eachMemory(t *testing.T, fn func(b []byte)) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	seen := map[string]bool{}
	for line := range strings.Lines(string(maps)) {
		var from, to uint64
		var perms, off, dev, inode, name string
		if _, err := fmt.Sscanf(line, "%x-%x %s %s %s %s %s", &from, &to, &perms, &off, &dev, &inode, &name); err !=
			nil ||
			perms != "rw-s" || !strings.HasPrefix(name, "/memfd:") || seen[inode+off] {
			continue
		}
		seen[inode+off] = true
		b := make([]byte, to-from)
		n, _ := mem.ReadAt(b, int64(from)) // a mapping may go on behind its file
		b = b[:n&^63]
		was := slices.Clone(b)
		fn(b)
		for i := 0; i < len(b); i += 64 {
			if now := b[i : i+64]; !slices.Equal(now, was[i:i+64]) {
				if _, err := mem.WriteAt(now, int64(from)+int64(i)); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

// damageRecords has damage change every record in memory whose value is one of values; it gets the record. It returns
// how many there were.
func damageRecords(t *testing.T, values []string, damage func(value string, rec []byte)) (n int) {
	t.Helper()
	eachMemory(t, func(b []byte) {
		for off := 0; off+layout.UnitSize <= len(b); off += layout.UnitSize {
			r, err := layout.ParseRecord(b[off:])
			if err != nil || !slices.Contains(values, string(r.Value)) {
				continue
			}
			n++
			damage(string(r.Value), b[off:][:layout.RecordLen(len(r.Key), len(r.Value))])
		}
	})
	return n
}

// flush and del --prefix delete all that can be read, and say what they had to leave; check --repair frees that.
func TestEraseDamaged(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		t.Run(fmt.Sprint(replicas), func(t *testing.T) {
			e := newEnv(t, devstore.Options{CapacityBytes: 64 << 20, Nodes: replicas, Replicas: replicas,
				Providers: []string{"shm"}})
			const n = 1000
			fill := func() {
				var lines strings.Builder
				for i := range n {
					fmt.Fprintf(&lines, "%s%d\tvalue-%d\n", []string{"a:", "b:"}[i%2], i, i)
				}
				e.must(lines.String(), "pipe")
			}
			ruin := func() {
				t.Helper()
				values := []string{"value-1", "value-2", "value-3", "value-4", "value-500"}
				if got := damageRecords(t, values, func(value string, rec []byte) {
					if value == "value-4" {
						clear(rec)
						return
					}
					rec[len(rec)-1] ^= 1
				}); got != len(values)*replicas {
					t.Fatalf("%d records damaged, want %d", got, len(values)*replicas)
				}
			}
			fill()
			ruin()
			r := e.run("", "-o", "json", "del", "--prefix", "a:")
			if r.code != ctl.ExitOther || !strings.Contains(r.stderr, "what is here was left out") ||
				!strings.Contains(r.stderr, "record at 0x") {
				t.Errorf("del --prefix: %+v", r)
			}
			if got := decode[erased](t, r.stdout); got.Deleted != n/2-3 {
				t.Errorf("del --prefix: %+v", got)
			}
			// A put or delete without a condition goes over it.
			e.must("", "put", "b:1", "new")
			e.must("", "del", "b:3")
			if r := e.run("", "get", "a:2"); r.code != ctl.ExitOther {
				t.Errorf("get: %+v", r)
			}
			if r := e.run("", "put", "a:4", "new"); r.code != ctl.ExitOther { // no copy tells whose record it is
				t.Errorf("put: %+v", r)
			}
			if r := e.run("", "del", "--lost", "b:7"); r.code != ctl.ExitNo {
				t.Errorf("del --lost of a sound key: %+v", r)
			}
			e.must("", "del", "--lost", "a:4")
			e.must("", "put", "a:4", "new")
			r = e.run("", "-o", "json", "flush", "--yes")
			if got := decode[erased](t, r.stdout); r.code != ctl.ExitOther ||
				got.Deleted != n/2 { // without b:3, with a:4
				t.Errorf("flush: %+v", r)
			}
			r = e.run("", "-o", "json", "check", "--repair")
			if got := decode[inside.CheckReport](t, r.stdout); r.code != ctl.ExitNo || got.Freed != 2 ||
				got.Lost != 0 ||
				got.Corrupt != 0 || len(got.Problems) == 0 {
				t.Errorf("check --repair: %+v", r)
			}
			e.must("", "check")
			e.must("", "put", "--if-absent", "a:2", "new")
			e.must("", "del", "a:2")
			if got := strings.Fields(e.must("", "scan", "--limit", "0")); len(got) != 0 {
				t.Errorf("left: %q", got)
			}
		})
	}
}

// With another copy nobody notices: what is damaged at the head or at the tail is mended on the way, or by check.
func TestMendedStore(t *testing.T) {
	e := newEnv(t, devstore.Options{CapacityBytes: 64 << 20, Nodes: 2, Replicas: 2, Providers: []string{"shm"}})
	values := make([]string, 40)
	var lines strings.Builder
	for i := range values {
		values[i] = fmt.Sprintf("value-%d", i)
		fmt.Fprintf(&lines, "k%d\t%s\n", i, values[i])
	}
	e.must(lines.String(), "pipe")
	seen := map[string]int{}
	damageRecords(t, values, func(value string, rec []byte) {
		var i int
		_, _ = fmt.Sscanf(value, "value-%d", &i)
		if seen[value]++; seen[value] == 1+i%2 { // one of its two copies
			rec[8+i%20] ^= 0x40
		}
	})
	for i, v := range values[:20] {
		if got := strings.TrimSpace(e.must("", "get", fmt.Sprint("k", i))); got != v {
			t.Errorf("get k%d: %q", i, got)
		}
	}
	if got := strings.Fields(e.must("", "scan", "--limit", "0")); len(got) != len(values) {
		t.Errorf("scan: %d keys", len(got))
	}
	e.must("", "check")
	if got := decode[erased](t, e.must("", "-o", "json", "flush", "--yes")); got.Deleted != len(values) {
		t.Errorf("flush: %+v", got)
	}
}
