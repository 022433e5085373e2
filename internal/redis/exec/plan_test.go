package exec

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// shelf is a host of databases in one namespace each, with some memory.
type shelf struct {
	dbs       []client.API
	memory    int64
	encodings values.EncodingLimits
	began     int // keys that were to be read
	seen      []KeyName
	rests     int
	meanwhile func() bool
}

func (s *shelf) API(db int) client.API  { return s.dbs[db] }
func (s *shelf) Together(a, b int) bool { return a == b }
func (s *shelf) Prepare(k *Key)         { k.Stored, k.MaxValue, k.Limits = []byte(k.Name), 1<<20, &s.encodings }
func (s *shelf) Drop(n int64)           { s.memory += n }
func (s *shelf) Sees(n KeyName)         { s.seen = append(s.seen, n) }

// Rest does what somebody else does meanwhile.
func (s *shelf) Rest(time.Duration) bool {
	s.rests++
	return s.meanwhile == nil || s.meanwhile()
}

func (s *shelf) Refuses(n KeyName) error {
	return map[string]error{"bad": errors.New("ERR bad")}[n.Name]
}

func (s *shelf) Take(n int64) error {
	if n > s.memory {
		return errors.New("no memory")
	}
	s.memory -= n
	return nil
}

func (s *shelf) Context(bool) context.Context {
	return inside.LimitMemory(context.Background(), limits.OneLimit)
}

func (s *shelf) Begins(keys []*Key) func(error) {
	s.began += len(keys)
	return func(error) {}
}

var limits = Limits{OneLimit: 64 << 10, EachLimit: 4 << 10, Few: 4, AtOnce: 8, Tries: 4, ReadCost: 3, WriteCost: 3,
	PutCost: 1}

func newShelf(dbs int) *shelf {
	s := &shelf{memory: 1 << 20}
	for range dbs {
		s.dbs = append(s.dbs, clienttest.New(clienttest.Options{}))
	}
	return s
}

func (s *shelf) plan(t *testing.T) *Plan {
	p := new(Plan)
	p.Open(s, &limits)
	p.Begin(1e12, 0)
	t.Cleanup(func() {
		if p.Close(); s.memory != 1<<20 {
			t.Errorf("%d bytes of memory are left, of 1 MiB", s.memory)
		}
	})
	return p
}

// put writes a key behind the plan's back.
func (s *shelf) put(t *testing.T, name, value string) {
	t.Helper()
	if _, err := s.dbs[0].Put(t.Context(), []byte(name), []byte(value), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (s *shelf) value(t *testing.T, db int, name string) string {
	t.Helper()
	v, err := s.dbs[db].Get(t.Context(), []byte(name))
	if errors.Is(err, client.ErrNotFound) {
		return "none"
	} else if err != nil {
		t.Fatal(err)
	}
	return string(v.Value)
}

// steps are commands that are made of functions.
type steps struct {
	begin func()
	run   func()
}

func (s steps) Begin() { s.begin() }
func (s steps) Run()   { s.run() }

// set is what a command does.
func (p *Plan) set(name, value string) {
	k := p.Key([]byte(name))
	k.SetAs(client.Plain, []byte(value), 0)
}

// TestCommit: keys change together, if what was used of them is still what was read, and not at all otherwise.
func TestCommit(t *testing.T) {
	for _, c := range []struct {
		what   string
		does   func(s *shelf, p *Plan)
		behind string // is written before the commit
		err    error
		a, b   string
	}{
		{"one key", func(_ *shelf, p *Plan) { p.set("a", "2") }, "", nil, "2", "1"},
		{"two keys", func(_ *shelf, p *Plan) { p.set("a", "2"); p.set("b", "2") }, "", nil, "2", "2"},
		{"a write of one", func(_ *shelf, p *Plan) { p.set("a", "2"); p.set("b", "2") }, "b", ErrChanged, "1", "3"},
		{"a write of what was read", func(_ *shelf, p *Plan) { p.Key([]byte("a")); p.set("b", "2") }, "a", ErrChanged,
			"3", "1"},
		{"a write of what was peeked at", func(_ *shelf, p *Plan) { p.Peek([]byte("a")); p.set("b", "2") }, "a", nil,
			"3", "2"},
		{"reads alone", func(_ *shelf, p *Plan) { p.Key([]byte("a")); p.Key([]byte("b")) }, "", nil, "1", "1"},
		{"reads, and a write", func(_ *shelf, p *Plan) { p.Key([]byte("a")); p.Key([]byte("b")) }, "b", ErrChanged,
			"1", "3"},
		{"an absent key, and a write", func(_ *shelf, p *Plan) { p.Key([]byte("a")); p.Key([]byte("c")) }, "c",
			ErrChanged, "1", "1"},
		{"two namespaces", func(_ *shelf, p *Plan) {
			p.set("a", "2")
			p.KeyIn(1, []byte("b"))
		}, "", ErrDatabases, "1", "1"},
		{"a delete", func(_ *shelf, p *Plan) { p.Key([]byte("a")).Delete(); p.set("b", "2") }, "", nil, "none", "2"},
	} {
		s := newShelf(2)
		s.put(t, "a", "1")
		s.put(t, "b", "1")
		p := s.plan(t)
		if c.does(s, p); p.Err != nil {
			t.Errorf("%s: %v", c.what, p.Err)
		}
		if c.behind != "" {
			s.put(t, c.behind, "3")
		}
		err := p.Commit()
		if a, b := s.value(t, 0, "a"), s.value(t, 0, "b"); !errors.Is(err, c.err) || a != c.a || b != c.b {
			t.Errorf("%s: %v, a is %s and b is %s; want %v, %s, %s", c.what, err, a, b, c.err, c.a, c.b)
		}
	}
}

// TestMove: the keys of a MOVE change in two namespaces, and the first write is taken back if the second fails.
func TestMove(t *testing.T) {
	for _, behind := range []bool{false, true} {
		s := newShelf(2)
		s.put(t, "a", "1")
		p := s.plan(t)
		p.Moves = true
		from, to := p.Key([]byte("a")), p.KeyIn(1, []byte("a"))
		to.SetAs(client.Plain, []byte("1"), 0)
		from.Delete()
		want, here, there := error(nil), "none", "1"
		if behind {
			s.put(t, "a", "3")
			want, here, there = ErrChanged, "3", "none"
		}
		if err := p.Commit(); !errors.Is(err, want) || s.value(t, 0, "a") != here || s.value(t, 1, "a") != there {
			t.Errorf("behind %t: %v, %s here and %s there", behind, err, s.value(t, 0, "a"), s.value(t, 1, "a"))
		}
	}
}

// TestGivenUp: names that are refused, too little memory, and a group's key that is not alone are errors.
func TestGivenUp(t *testing.T) {
	s := newShelf(1)
	p := s.plan(t)
	if p.Key([]byte("bad")); p.Err == nil || p.Err.Error() != "ERR bad" {
		t.Errorf("a bad name: %v", p.Err)
	}
	p.Begin(1e12, 0)
	if p.Take(2 << 20); p.Err == nil {
		t.Error("2 MiB were to be had of one")
	}
	p.Begin(1e12, 0)
	p.Add(KeyName{Name: "a"})
	p.Lone = true
	if p.Key([]byte("b")); !errors.Is(p.Err, ErrAlone) {
		t.Errorf("another key in a group: %v", p.Err)
	}
	if p.Cut(1); len(p.Keys) != 1 || len(p.Find) != 1 {
		t.Errorf("%d keys, %d by name", len(p.Keys), len(p.Find))
	}
}

// TestTogether: keys are loaded together, once, in as many operations as may be at a time, and what is there is seen.
func TestTogether(t *testing.T) {
	s := newShelf(1)
	s.put(t, "k3", "x")
	p := s.plan(t)
	var names [][]byte
	for i := range 20 {
		names = append(names, []byte{'k', byte('0' + i)})
	}
	p.Load(names...)
	p.Load(names[3], []byte("k3"))
	if s.began != 20 || len(s.seen) != 1 || s.seen[0].Name != "k3" || len(p.Keys) != 20 {
		t.Errorf("%d reads, %d keys, seen %v", s.began, len(p.Keys), s.seen)
	}
	if s.memory == 1<<20 {
		t.Error("many keys took no memory")
	}
	for _, k := range p.Keys {
		if k.Used {
			t.Errorf("%s is a condition", k.Name)
		}
	}
}

// TestPerform: what is read and has changed meanwhile is read again, until the commit succeeds or somebody gives up.
func TestPerform(t *testing.T) {
	for _, c := range []struct {
		what   string
		behind int // tries between whose read and commit somebody writes
		rests  int // after which it is not to go on; 0: never
		want   int // bytes for which the first try has no room
		err    error
		tries  int
		a      string
	}{
		{"nobody else", 0, 0, 0, nil, 1, "1+"},
		{"one write of somebody else", 1, 0, 0, nil, 2, "x+"},
		{"many", 9, 0, 0, nil, 10, "x+"},
		{"always", maxTries, 0, 0, ErrAgain, maxTries, "x"},
		{"no more tries", maxTries, 3, 0, client.ErrClosed, 4, "x"},
		{"no room", 0, 0, 80 << 10, nil, 2, "1+"},
	} {
		s := newShelf(1)
		s.put(t, "a", "1")
		p := s.plan(t)
		s.meanwhile = func() bool { return s.rests != c.rests }
		tries, begun := 0, 0
		err := p.Perform(time.UnixMilli(1e12), 0, []KeyName{{Name: "a"}}, Look, steps{func() { begun++ },
			func() {
				k := p.Key([]byte("a"))
				k.SetAs(client.Plain, append(k.Value[:len(k.Value):len(k.Value)], '+'), 0)
				if tries++; tries <= c.behind {
					s.put(t, "a", "x")
				}
				if p.Room < c.want {
					k.Want = c.want
				}
			}})
		if a := s.value(t, 0, "a"); !errors.Is(err, c.err) || tries != c.tries || begun < tries || a != c.a {
			t.Errorf("%s: %v in %d tries, begun %d times, a is %s; want %v in %d, %s", c.what, err, tries, begun, a,
				c.err, c.tries, c.a)
		}
	}
}

// TestPerformReply: replies take memory as they are made, and nothing is done without it.
func TestPerformReply(t *testing.T) {
	for reply, ok := range map[int64]bool{100: true, 400 << 10: true, 2 << 20: false} {
		s := newShelf(1)
		p := s.plan(t)
		err := p.Perform(time.UnixMilli(1e12), 0, nil, Look, steps{func() {}, func() {
			p.set("a", "1")
			p.Take(reply)
		}})
		if done := s.value(t, 0, "a") == "1"; done != ok || (err == nil) != ok {
			t.Errorf("%d bytes for a reply: %v, done %t", reply, err, done)
		}
	}
}

// TestWays: whatever the way, a key becomes the same, replies with memory for them are made once, and there is an
// error where there is none to be had.
func TestWays(t *testing.T) {
	appends := func(p *Plan) {
		k := p.Key([]byte("a"))
		k.SetAs(client.Plain, append(k.Value[:len(k.Value):len(k.Value)], "+++"...), 0)
	}
	for _, c := range []struct {
		what   string
		way    Way
		does   func(p *Plan)
		ok     bool
		a      string
		stored int // bytes of what was there
	}{
		{"an append", Modify, appends, true, "1+++", 1},
		{"an append to a long value", Modify, appends, true, "", 100 << 10},
		{"an append to one that is too long", Modify, appends, false, "", 600 << 10},
		{"a put without memory", Modify, func(p *Plan) { p.set("a", string(make([]byte, 600<<10))) }, false, "1", 1},
		{"a look", Modify, func(p *Plan) { p.Key([]byte("a")) }, true, "1", 1},
		{"a delete", Modify, func(p *Plan) { p.Key([]byte("a")).Delete() }, true, "none", 1},
		{"a reply that is too long", Modify, func(p *Plan) { appends(p); p.Take(2 << 20) }, false, "1", 1},
		{"another key", Modify, func(p *Plan) { appends(p); p.Key([]byte("b")) }, true, "1+++", 1},
		{"memory", Modify, func(p *Plan) { appends(p); p.Take(100 << 10) }, true, "1+++", 1},
		{"a mistake", Modify, func(p *Plan) { appends(p); p.Fail("ERR no") }, false, "1", 1},
		{"a bad key", Modify, func(*Plan) {}, false, "1", 1},
		{"a question", Ask, func(p *Plan) {
			if k := p.Key([]byte("a")); !k.Present || k.Value != nil {
				p.Fail("ERR it was read, or not there")
			}
		}, true, "", 600 << 10},
		{"a question and a delete", Ask, func(p *Plan) { p.Key([]byte("a")).Delete() }, true, "none", 600 << 10},
		{"a question and a put", Ask, func(p *Plan) { p.set("a", "2") }, true, "2", 600 << 10},
		{"a question and a put without memory", Ask, func(p *Plan) { p.set("a", string(make([]byte, 2<<20))) },
			false, "1", 1},
		{"a put", Overwrite, func(p *Plan) { p.set("a", "2") }, true, "2", 1},
		{"a long put", Overwrite, func(p *Plan) { p.set("a", string(make([]byte, 100<<10))) }, true, "", 1},
		{"a put without memory", Overwrite, func(p *Plan) { p.set("a", string(make([]byte, 2<<20))) }, false, "1",
			1},
		{"a put that deletes", Overwrite, func(p *Plan) { p.set("a", "2"); p.Key([]byte("a")).Delete() }, true,
			"none", 1},
		{"no put", Overwrite, func(*Plan) {}, true, "1", 1},
	} {
		s := newShelf(1)
		s.put(t, "a", "1"+string(make([]byte, c.stored-1)))
		p := s.plan(t)
		name := map[bool]string{true: "bad", false: "a"}[c.what == "a bad key"]
		err := p.Perform(time.UnixMilli(1e12), 0, []KeyName{{Name: name}}, c.way, steps{func() {},
			func() { c.does(p) }})
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", c.what, err)
		}
		if a := s.value(t, 0, "a"); c.a != "" && a != c.a {
			t.Errorf("%s: a is %.10q, want %q", c.what, a, c.a)
		}
		if c.way == Overwrite && c.what != "a put that deletes" && s.began > 0 {
			t.Errorf("%s: it was read", c.what)
		}
	}
}

// TestModifyBeginsAnew: if somebody else is faster the commands begin anew, on what is there then.
func TestModifyBeginsAnew(t *testing.T) {
	s := newShelf(1)
	s.put(t, "a", "1")
	p := s.plan(t)
	runs, begun := 0, 0
	s.dbs[0] = twice{s.dbs[0]}
	err := p.Perform(time.UnixMilli(1e12), 0, []KeyName{{Name: "a"}}, Modify, steps{func() { begun++ },
		func() {
			if runs++; p.DB != 0 {
				t.Errorf("run %d begins in database %d", runs, p.DB)
			}
			k := p.Key([]byte("a"))
			p.DB = 1 // SELECT
			k.SetAs(client.Plain, append(k.Value[:1:1], '+'), 0)
		}})
	if a := s.value(t, 0, "a"); err != nil || runs != 2 || begun != 2 || a != "1+" || p.Keys[0].Version == 0 {
		t.Errorf("%v: %d runs, begun %d times, a is %s, version %d", err, runs, begun, a, p.Keys[0].Version)
	}
}

// TestOverwriteBeginsAnew: a put that was refused is tried again.
func TestOverwriteBeginsAnew(t *testing.T) {
	s := newShelf(1)
	s.put(t, "a", "1")
	p := s.plan(t)
	refusals := 0
	s.dbs[0].(*clienttest.Store).Fail(func(_ context.Context, o *client.Op) (f clienttest.Fault) {
		if o.Kind == client.OpPut && refusals == 0 {
			f.Err = client.ErrConflict
			refusals++
		}
		return f
	})
	err := p.Perform(time.UnixMilli(1e12), 0, []KeyName{{Name: "a"}}, Overwrite, steps{func() {}, func() {
		p.set("a", "2")
	}})
	if a := s.value(t, 0, "a"); err != nil || refusals != 1 || a != "2" {
		t.Errorf("%v behind %d refusals, a is %s", err, refusals, a)
	}
}

// twice is a store that begins each change anew once.
type twice struct{ client.API }

func (s twice) Do(ctx context.Context, ops []client.Op) {
	for i := range ops {
		if f := ops[i].Update; f != nil {
			ops[i].Update = func(cur client.Item, present bool) (client.Change, error) {
				f(cur, present)
				return f(cur, present)
			}
		}
	}
	s.API.Do(ctx, ops)
}
