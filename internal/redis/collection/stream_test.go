package collection

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// modelEntry is an entry in a model of a stream.
type modelEntry struct {
	id    StreamID
	texts string
}

func streamEntriesOf(t *testing.T, s *Stream, from, to StreamID, reverse bool) (all []modelEntry) {
	t.Helper()
	if err := s.Range(from, to, reverse, func(e StreamEntry) bool {
		var texts []string
		for b := range e.Texts() {
			texts = append(texts, string(b))
		}
		if len(texts) != 2*e.Pairs {
			t.Fatalf("%d texts of %d pairs", len(texts), e.Pairs)
		}
		all = append(all, modelEntry{e.ID, strings.Join(texts, " ")})
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// TestStreamBytes has the example of docs/collections.md.
func TestStreamBytes(t *testing.T) {
	s, _ := ParseStream(nil)
	s.Add(StreamID{1000, 0}, split("a", "1"))
	s.Add(StreamID{1005, 2}, split("a", "2"))
	s.AddGroup(&StreamGroup{Name: []byte("g"), Last: StreamID{1000, 0}, Read: 1})
	g := s.Group([]byte("g"))
	c, _ := g.See([]byte("c"), 7)
	g.Put(PendingEntry{StreamID{1000, 0}, 7, 1, c})
	got := fmt.Sprintf("%x", s.Bytes(true))
	want := strings.ReplaceAll("01 ed03000000000000 0200000000000000 0000000000000000 0000000000000000 "+
		"0200000000000000 02000000 50000000"+
		" 01 67 e803000000000000 0000000000000000 0100000000000000 01000000 01000000"+
		" 01 63 0700000000000000"+
		" e803000000000000 0000000000000000 0700000000000000 0100000000000000 00000000"+
		" 0e000000 0200 0000 e803000000000000 0000000000000000 ed03000000000000 0200000000000000"+
		" 00 00 01 01 61 01 31"+
		" 05 02 01 01 61 01 32", " ", "")
	if got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// TestStreamModel does random things to a stream and to a list of entries.
func TestStreamModel(t *testing.T) {
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 9))
		var model []modelEntry
		var b []byte
		last := StreamID{}
		id := func() StreamID { return StreamID{rng.Uint64N(last.MS + 2), rng.Uint64N(4)} }
		for range 300 {
			s, err := ParseStream(b)
			if err != nil {
				t.Fatal(err)
			}
			switch rng.IntN(6) {
			case 0, 1, 2:
				for range 1 + rng.IntN(40) {
					if last.Seq++; rng.IntN(2) == 0 {
						last = StreamID{last.MS + rng.Uint64N(300), rng.Uint64N(3)}
						if n := len(model); n > 0 && last.Compare(s.Last) <= 0 {
							last, _ = s.Last.Next()
						}
					}
					texts := []string{"f", strings.Repeat("v", rng.IntN(200)), strconv.Itoa(rng.IntN(9)),
						""}[:2+2*rng.IntN(2)]
					if last.Compare(s.Last) <= 0 {
						continue
					}
					s.Add(last, split(texts...))
					model = append(model, modelEntry{last, strings.Join(texts, " ")})
				}
			case 3:
				if len(model) == 0 {
					continue
				}
				gone := model[rng.IntN(len(model))].id
				if rng.IntN(4) == 0 {
					gone = id()
				}
				i := slices.IndexFunc(model, func(e modelEntry) bool { return e.id == gone })
				was, err := s.Delete(gone)
				if err != nil || was != (i >= 0) {
					t.Fatalf("seed %d: delete %v: %v, %v", seed, gone, was, err)
				}
				if was {
					model = slices.Delete(model, i, i+1)
				}
			case 4:
				trim := StreamTrim{Max: rng.Uint64N(uint64(len(model)) + 1), ByID: rng.IntN(2) == 0, MinID: id(),
					Blocks: rng.IntN(2) == 0}
				gone := max(0, len(model)-int(trim.Max))
				if trim.ByID {
					if gone = slices.IndexFunc(model, func(e modelEntry) bool {
						return e.id.Compare(trim.MinID) >= 0
					}); gone < 0 {
						gone = len(model)
					}
				}
				n, err := s.Trim(trim)
				if err != nil || n != gone && (!trim.Blocks || n > gone || gone-n > blockEntries) {
					t.Fatalf("seed %d: %+v: %d gone, %v, want %d", seed, trim, n, err, gone)
				}
				model = model[n:]
			}
			b = s.Bytes(rng.IntN(2) == 0)
			if s, err = ParseStream(b); err != nil || s.Len() != len(model) {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if got := streamEntriesOf(t, s, StreamID{}, MaxStreamID, false); !slices.Equal(got, model) {
				t.Fatalf("seed %d:\n%v, want\n%v", seed, got, model)
			}
			from, to := id(), id()
			var some []modelEntry
			for _, e := range model {
				if e.id.Compare(from) >= 0 && e.id.Compare(to) <= 0 {
					some = append(some, e)
				}
			}
			if got := streamEntriesOf(t, s, from, to, false); !slices.Equal(got, some) {
				t.Fatalf("seed %d: %v to %v: %v, want %v", seed, from, to, got, some)
			}
			slices.Reverse(some)
			if got := streamEntriesOf(t, s, from, to, true); !slices.Equal(got, some) {
				t.Fatalf("seed %d: %v to %v in reverse: %v, want %v", seed, from, to, got, some)
			}
		}
	}
}

// TestStreamAddAppends: a new entry leaves the bytes before it, but for the numbers in the heads, and needs no memory
// if there is room.
func TestStreamAddAppends(t *testing.T) {
	s, _ := ParseStream(make([]byte, 0, 4096))
	s.AddGroup(&StreamGroup{Name: []byte("group")})
	s.Add(StreamID{1, 0}, split("f", "v"))
	before := s.Bytes(true)
	was := bytes.Clone(before)
	s, _ = ParseStream(before)
	s.Add(StreamID{2, 0}, split("g", "w"))
	after := s.Bytes(false)
	k := s.blocks[0].at
	if &after[0] != &before[0] || !bytes.Equal(after[streamHead:k], was[streamHead:k]) ||
		!bytes.Equal(after[k+blockHead:len(was)], was[k+blockHead:]) {
		t.Errorf("%x became\n%x", was, after)
	}
}

// TestStreamGroups: consumers keep what is pending for them, whoever comes and goes.
func TestStreamGroups(t *testing.T) {
	g := &StreamGroup{}
	for i, name := range []string{"m", "z", "a", "k"} {
		c, made := g.See([]byte(name), int64(i))
		g.Put(PendingEntry{StreamID{uint64(10 - i), 0}, int64(i), 1, c})
		if _, again := g.See([]byte(name), int64(i)); !made || again {
			t.Errorf("%s is made %v, %v", name, made, again)
		}
	}
	owners := func() (all string) {
		for i := range g.Pending.Len() {
			p := g.Pending.At(i)
			all += fmt.Sprintf("%d:%s ", p.ID.MS, g.Consumers[p.Consumer].Name)
		}
		return all
	}
	if got := owners(); got != "7:k 8:a 9:z 10:m " {
		t.Error(got)
	}
	i, _ := g.Consumer([]byte("k"))
	if n := g.RemoveConsumer(i); n != 1 || owners() != "8:a 9:z 10:m " {
		t.Error(n, owners())
	}
	if i, found := g.Pending.Find(StreamID{9, 0}); !found {
		t.Error("9-0 is not found")
	} else if g.Drop(i); owners() != "8:a 10:m " {
		t.Error(owners())
	}
}

// TestStreamIDs: the ends of what ids can be.
func TestStreamIDs(t *testing.T) {
	if n, ok := (StreamID{7, math.MaxUint64}).Next(); n != (StreamID{8, 0}) || !ok {
		t.Error(n, ok)
	}
	if _, ok := MaxStreamID.Next(); ok {
		t.Error("there is one behind the last")
	}
	if p, ok := (StreamID{7, 0}).Prev(); p != (StreamID{6, math.MaxUint64}) || !ok {
		t.Error(p, ok)
	}
	if _, ok := (StreamID{}).Prev(); ok {
		t.Error("there is one before the first")
	}
	if s := MaxStreamID.Append(nil); string(s) != "18446744073709551615-18446744073709551615" {
		t.Error(string(s))
	}
}

// checkStream uses bytes as a stream: either they are found corrupt, or the stream can be changed, and what it becomes
// is one.
func checkStream(t *testing.T, b []byte) {
	s, err := ParseStream(bytes.Clone(b))
	if err != nil {
		if !errors.Is(err, ErrCorrupt) {
			t.Fatal(err)
		}
		return
	}
	if got := s.Bytes(false); len(b) > 0 && !bytes.Equal(got, b) {
		t.Fatalf("%x encoded again is %x", b, got)
	}
	n := 0
	if err = s.Range(StreamID{}, MaxStreamID, false, func(StreamEntry) bool {
		n++
		return true
	}); err == nil && n != s.Len() {
		t.Fatalf("%d entries, and %d", n, s.Len())
	}
	back := 0
	if err2 := s.Range(StreamID{}, MaxStreamID, true, func(StreamEntry) bool {
		back++
		return true
	}); (err == nil) != (err2 == nil) {
		t.Fatal(err, err2)
	}
	first, _ := s.Edge(false)
	for _, g := range s.Groups {
		s.Lag(g, first)
		s.CountTo(g.Last, first)
		i, _ := g.See([]byte("c"), 1)
		g.Put(PendingEntry{ID: StreamID{5, 5}, Consumer: i})
		g.RemoveConsumer(0)
		g.PendingOf()
	}
	s.Nodes()
	s.Delete(StreamID{1, 1})
	s.Trim(StreamTrim{Max: 2})
	s.Trim(StreamTrim{ByID: true, MinID: StreamID{3, 0}})
	if next, ok := s.Last.Next(); ok {
		s.Add(next, split("f", "v"))
	}
	s.AddGroup(&StreamGroup{Name: []byte("new"), Read: -1})
	if _, err := ParseStream(s.Bytes(true)); err != nil {
		t.Fatalf("%x became corrupt: %x", b, s.Bytes(true))
	}
}

func FuzzStream(f *testing.F) {
	s, _ := ParseStream(nil)
	for i := range uint64(4) {
		s.Add(StreamID{1 + i/2, 1 + i}, split("field", strings.Repeat("x", int(i))))
	}
	s.AddGroup(&StreamGroup{Name: []byte("g"), Last: StreamID{1, 2}, Read: 2})
	g := s.Groups[0]
	for _, name := range []string{"b", "a"} {
		c, _ := g.See([]byte(name), 1)
		g.Put(PendingEntry{StreamID{1, uint64(c + 1)}, 3, 1, c})
	}
	b := s.Bytes(true)
	for i := range b {
		f.Add(b[:i])
		x := bytes.Clone(b)
		x[i] ^= 0xff
		f.Add(x)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) { checkStream(t, b) })
}
