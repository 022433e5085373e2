package exec

import (
	"fmt"
	"testing"

	"github.com/kvd-project/kvd/client"
)

// crowd is a group that appends to each key, while somebody writes the first so many times.
type crowd struct {
	t      *testing.T
	s      *shelf
	g      Group
	behind int
	runs   []int
	wrote  []int
}

func (c *crowd) Begin(int) {}

func (c *crowd) Run(bool) {
	for i := range c.g.Members {
		m := &c.g.Members[i]
		if !m.Left() {
			continue
		}
		c.runs[i]++
		k := m.Key([]byte(m.name.Name))
		k.SetAs(client.Plain, append(k.Value[:len(k.Value):len(k.Value)], '+'), 0)
	}
	if c.runs[0] <= c.behind {
		c.s.put(c.t, "k0", "x")
	}
}

func (c *crowd) Wrote(i int) { c.wrote[i]++ }

// TestGroup: each Member takes effect by itself, once. Those whose keys others write run again, until they are Alone.
func TestGroup(t *testing.T) {
	for _, c := range []struct {
		members, behind int
		memory          int64
		ok, alone       bool
		first           string
	}{
		{2, 0, 1 << 20, true, false, "1+"},
		{2, 0, 0, true, false, "1+"},
		{2, groupTries - 1, 1 << 20, true, false, "x+"},
		{2, groupTries, 1 << 20, true, true, "x"},
		{8, 1, 1 << 20, true, false, "x+"},
		{8, 1, 1 << 10, false, false, "1"},
	} {
		x := &crowd{t: t, s: newShelf(1), behind: c.behind, runs: make([]int, c.members), wrote: make([]int, c.members)}
		x.s.memory = c.memory
		x.g.Open(x.s, &limits, 0)
		for i := range c.members {
			name := fmt.Sprint("k", i)
			x.s.put(t, name, "1")
			p := new(Plan)
			p.Open(x.s, &limits)
			x.g.Add(p, name)
		}
		if x.g.MemberOf([]byte("k1")) != 1 || x.g.MemberOf([]byte("none")) != -1 {
			t.Error("members are not found")
		}
		err := x.g.Perform(func() int64 { return 1e12 }, x)
		if first := x.s.value(t, 0, "k0"); (err == nil) != c.ok || first != c.first || x.g.Members[0].Alone != c.alone {
			t.Errorf("%+v: %v, the first is %s, alone %t", c, err, first, x.g.Members[0].Alone)
		}
		if c.ok {
			if v := x.s.value(t, 0, "k1"); v != "1+" || x.runs[1] != 1 || x.wrote[1] != 1 || !x.g.Members[1].Done {
				t.Errorf("%+v: the second is %s after %d runs, told %d times", c, v, x.runs[1], x.wrote[1])
			}
		}
		if x.g.Close(); x.s.memory != c.memory {
			t.Errorf("%+v: %d bytes of memory are left", c, x.s.memory)
		}
	}
}
