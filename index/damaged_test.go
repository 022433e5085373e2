package index_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
)

// A group of ones says that its keys moved to where no map leads: every operation that
// goes by it ends at once, with an error that says where, in whichever group and on
// whichever replica it is.
func TestDamagedGroup(t *testing.T) {
	for replicas := uint8(1); replicas <= 3; replicas++ {
		for name, damage := range map[string]int{"header": 8, "header and lock": 16, "group": layout.GroupSize} {
			for where, off := range map[string]uint64{"home": home(), "stash": stash()} {
				t.Run(fmt.Sprintf("r%d/%s/%s", replicas, where, name), func(t *testing.T) {
					w := newWorld(replicas, 256)
					c := w.client(1)
					w.fill(home(), layout.GroupSlots) // so that there is business with the stash
					for k := range replicas {
						g := w.region[k][home():]
						g[1] = 1 // OVF
						copy(w.region[k][off:], bytes.Repeat([]byte{0xff}, damage))
					}
					for _, op := range []string{"get a", "put a v", "put a v if-absent", "put a v if-present",
						"put a v if=3", "del a", "del a if=3", "append a x"} {
						err := c.do(t, strings.Fields(op)...)
						var corrupt *layout.CorruptError
						if !errors.As(err, &corrupt) || corrupt.What != "group" {
							t.Errorf("%s: %v, want a corrupt group", op, err)
							continue
						}
						if want := fmt.Sprintf("pg 1 replica %d: group at %#x: ", replicas-1, off); !strings.Contains(
							err.Error(), want) &&
							!strings.Contains(err.Error(), strings.Replace(want, fmt.Sprint("replica ", replicas-1),
								"replica 0", 1)) {
							t.Errorf("%s: %q does not say where: %q", op, err, want)
						}
						if errors.Is(err, index.ErrUnknown) {
							t.Errorf("%s: %v: nothing was decided", op, err)
						}
						if c.op.Rounds > 4 {
							t.Errorf("%s took %d rounds", op, c.op.Rounds)
						}
					}
					if len(w.wrong) > 0 {
						t.Error(w.wrong)
					}
				})
			}
		}
	}
}

// A move does not go by a damaged header, which may say that the group has moved: its keys
// would be gone with the next map.
func TestMoveDamaged(t *testing.T) {
	for _, m := range moveCases() {
		t.Run(m.String(), func(t *testing.T) {
			w := m.world()
			want := fillMove(t, w)
			m.begin(w)
			g := w.region[0][home():][:8]
			sound := bytes.Clone(g)
			copy(g, bytes.Repeat([]byte{0xff}, 8))
			c := w.client(1)
			c.begin(workOp(index.Move, new(moveWork(homeGroup))))
			for done := false; !done; {
				_, done = c.advance(1<<30, noFault)
			}
			var corrupt *layout.CorruptError
			if !errors.As(c.op.Err, &corrupt) ||
				!strings.Contains(c.op.Err.Error(), fmt.Sprintf("pg 1 replica 0: group at %#x: ", home())) {
				t.Errorf("%v, want the corrupt group at %#x", c.op.Err, home())
			}
			if l := w.groupAt(0, home()).Lock(); l != 0 {
				t.Errorf("locked: %x", l)
			}
			copy(g, sound)
			w.moveAll(t, w.client(2))
			w.moved = true
			w.check(t, "moved", want)
		})
	}
}

// A Scan leaves out what is damaged, says so, and has all the rest.
func TestScanDamaged(t *testing.T) {
	for replicas := uint8(1); replicas <= 3; replicas++ {
		w := newWorld(replicas, 256)
		c := w.client(1)
		for _, k := range []string{"a", "b", "c@5", "d@7", "e@9"} {
			if err := c.do(t, "put", k, "v"); err != nil {
				t.Fatal(err)
			}
		}
		tail := w.region[replicas-1]
		group5 := uint64(shardOff + 5*layout.GroupSize)
		copy(tail[group5:], bytes.Repeat([]byte{0xff}, layout.GroupSize))
		// A word that names units outside the heap, and a record that was overwritten.
		const i = 0 // each is alone in its group
		x := w.groupAt(replicas-1, shardOff+7*layout.GroupSize).Slot(i)
		w.setSlot(replicas-1, shardOff+7*layout.GroupSize, i, x|0xffffffff)
		x = w.groupAt(replicas-1, shardOff+9*layout.GroupSize).Slot(i)
		for k := range replicas { // else another copy would serve
			copy(w.region[k][x.Off():], "damaged!")
		}
		if err := c.do(t, "scan"); err != nil {
			t.Fatal(err)
		}
		if got := c.answer(); !strings.HasPrefix(got, "done: [a b] next 0 end true") {
			t.Errorf("r=%d: %s", replicas, got)
		}
		for _, want := range []string{
			fmt.Sprintf("pg 1 replica %d: group at %#x: corrupt group at +0: reserved header bits", replicas-1, group5),
			fmt.Sprintf("group at %#x: corrupt group at +%d: slot names units outside the heap",
				shardOff+7*layout.GroupSize, layout.SlotOff(i)),
			fmt.Sprintf("record at %#x: corrupt record at +24: CRC-32C", x.Off()),
		} {
			if err := c.op.Scan.Corrupt; err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("r=%d: %v\nlacks %q", replicas, err, want)
			}
		}
		// A sound segment says nothing.
		clear(tail[group5:][:layout.GroupSize])
		for g := range uint64(layout.SegmentGroups) {
			if g != homeGroup {
				clear(tail[shardOff+g*layout.GroupSize:][:layout.GroupSize])
			}
		}
		if err := c.do(t, "scan"); err != nil || c.op.Scan.Corrupt != nil {
			t.Errorf("r=%d: %v, %v", replicas, err, c.op.Scan.Corrupt)
		}
	}
}

// Words that tell of a move which no map has: an operation waits for the map, as it may be late,
// until the directory has said that there is no newer one.
func TestMovedNowhere(t *testing.T) {
	const fine, late, ends = "done", "waits", "corrupt"
	for replicas := uint8(1); replicas <= 3; replicas++ {
		for name, forge := range map[string]func(w *world, k uint8, of int){
			"word": func(w *world, k uint8, i int) {
				w.setSlot(k, home(), i, w.groupAt(k, home()).Slot(i).WithState(layout.Moved))
			},
			"header": func(w *world, k uint8, i int) {
				w.setSlot(k, home(), i, 0)
				copy(w.region[k][home():], []byte{3, 2}) // SPLIT, depth 3
			},
		} {
			w := newWorld(replicas, 256)
			c := w.client(1)
			must(t, c.do(t, "put", "a", "v"))
			i := 0
			for ; w.groupAt(0, home()).Slot(i).State() != layout.Live; i++ {
			}
			for k := range replicas {
				forge(w, k, i)
			}
			delete(c.hints, "a")
			// Nothing but its outcome, after so many looks with this word of the directory's.
			try := func(op string, current uint64) (string, error) {
				if err := c.start(strings.Fields(op)); err != nil {
					t.Fatal(err)
				}
				for range 20 {
					for astray := false; !astray; {
						if _, done := c.advance(1<<30, noFault); done {
							var corrupt *layout.CorruptError
							if errors.As(c.op.Err, &corrupt) || errors.As(scanCorrupt(c.op), &corrupt) {
								return ends, errors.Join(c.op.Err, scanCorrupt(c.op))
							}
							return fine, c.op.Err
						}
						astray = c.op.Astray()
					}
					c.op.MapCurrent = current
				}
				c.op.Fail(errors.New("patience"))
				c.noWait()
				return late, nil
			}
			for _, op := range []string{"get a", "put a v", "put a v if-absent", "del a", "scan"} {
				what := fmt.Sprintf("r%d %s: %s", replicas, name, op)
				if op == "scan" && name == "header" {
					continue // it goes by words
				}
				if got, err := try(op, 0); got != late {
					t.Errorf("%s: %s, %v; want that it waits", what, got, err)
				}
				if got, err := try(op, 7); got != late { // of another map
					t.Errorf("%s: %s, %v; want that it waits", what, got, err)
				}
				got, err := try(op, 1)
				if got != ends ||
					!strings.Contains(fmt.Sprint(err), fmt.Sprintf("group at %#x: corrupt group at +", home())) ||
					!strings.Contains(fmt.Sprint(err), "pg 1 replica ") {
					t.Errorf("%s: %s, %v; want where it is corrupt", what, got, err)
				}
				if errors.Is(err, index.ErrUnknown) {
					t.Errorf("%s: %v: nothing was decided", what, err)
				}
				for k := range replicas {
					if l := w.groupAt(k, home()).Lock(); l != 0 {
						t.Errorf("%s: locked: %x", what, l)
					}
				}
			}
		}
	}
}

func scanCorrupt(o *index.Op) error {
	if o.Scan == nil {
		return nil
	}
	return o.Scan.Corrupt
}

// damage flips a byte of key's record at some replicas: at an offset in its header, or the first byte of its "key" or
// "value".
func (w *world) damage(t *testing.T, key string, replicas []uint8, where string) {
	t.Helper()
	off := map[string]uint64{"version": 6, "key length": 8, "flags": 10, "format": 11, "value length": 12, "expiry": 21,
		"crc": 24, "writer": 28,
		"key": layout.RecordHeaderSize, "value": layout.RecordHeaderSize + uint64(len(key))}[where]
	_, _, x, ok := w.find(0, key)
	if !ok {
		t.Fatalf("no record of %q", key)
	}
	for _, k := range replicas {
		w.region[k][x.Off()+off] ^= 0x55
	}
}

// copiesWhole is how many replicas have a whole record of key where the head's slot says.
func (w *world) copiesWhole(x layout.Word, key string) (n int) {
	for k := range w.pg.Replicas {
		if r, err := layout.ParseRecord(w.region[k][x.Off():][:x.ReadLen()]); err == nil && string(r.Key) == key {
			n++
		}
	}
	return n
}

// A damaged record is mended from another copy by whoever meets it, and without one it does not stand in the way of
// who wants something else there: a put or a delete without a condition. To all others it is damaged, at once, and
// nothing else is.
func TestDamagedRecord(t *testing.T) {
	places := []string{"version", "key length", "flags", "format", "value length", "expiry", "crc", "writer", "key",
		"value"}
	of := map[uint8][][]uint8{1: {{0}}, 2: {{0}, {1}, {0, 1}}, 3: {{0}, {1}, {2}, {0, 2}, {0, 1, 2}}}
	ops := []string{"get k", "put k v", "put k v if-absent", "put k v if-present", "put k v if=11", "del k",
		"del k if=11", "append k x", "refuse k", "scan"}
	for r := uint8(1); r <= 3; r++ {
		for _, damaged := range of[r] {
			for _, where := range places {
				for _, op := range ops {
					for _, hinted := range []bool{false, true} {
						name := fmt.Sprintf("r=%d, %s damaged on %v: %s, hinted %v", r, where, damaged, op, hinted)
						w := newWorld(r, 256)
						c := w.client(1)
						must(t, c.do(t, "put", "k", "old"))
						must(t, c.do(t, "put", "other", "x"))
						_, _, x, _ := w.find(0, "k")
						if !hinted {
							c = w.client(2)
						}
						w.damage(t, "k", damaged, where)
						lost := len(damaged) == int(r) && where != "key" && where != "key length" && where != "format"
						if op == "scan" {
							lost = len(damaged) == int(r) // it has no key of which it could know the bytes
						}
						blind := op == "put k v" || op == "del k"
						err := c.do(t, strings.Fields(op)...)
						var corrupt *layout.CorruptError
						switch {
						case op == "scan":
							got := c.answer()
							if (errors.As(c.op.Scan.Corrupt, &corrupt)) != lost || strings.Contains(got, "[k other]") ==
								lost || !strings.Contains(got, "other]") {
								t.Errorf("%s: %s, %v", name, got, c.op.Scan.Corrupt)
							}
						case lost && !blind && hinted && op == "del k if=11", lost && !blind && hinted &&
							op == "put k v if=11":
							must(t, err) // by the hint's word, which says which version it is
						case lost && !blind:
							if !errors.As(err, &corrupt) || errors.Is(err, index.ErrUnknown) {
								t.Errorf("%s: %v, want that it is corrupt", name, err)
							}
						case op == "put k v if-absent":
							if !errors.Is(err, index.ErrExists) {
								t.Errorf("%s: %v", name, err)
							}
						case op == "refuse k":
							if err == nil || err.Error() != `refused "old"` {
								t.Errorf("%s: %v", name, err)
							}
						case err != nil:
							t.Errorf("%s: %v", name, err)
						}
						if c.op.Rounds > 12 {
							t.Errorf("%s: %d rounds", name, c.op.Rounds)
						}
						_, _, y, there := w.find(0, "k")
						// that looks at the head
						met := slices.Contains(damaged, r-1) && (hinted || op != "put k v if-absent")
						if n := w.copiesWhole(x, "k"); met && there && y == x && !lost && n < int(r) {
							t.Errorf("%s: %d whole copies: who has met the damage has to mend it", name, n)
						}
						want := map[string]string{"put k v": "v", "put k v if-present": "v", "put k v if=11": "v",
							"append k x": "oldx", "del k": "", "del k if=11": ""}
						v, replaced := want[op]
						if lost && !blind && !(hinted && strings.HasSuffix(op, "if=11")) {
							replaced = false
						}
						d := w.client(3)
						err = d.do(t, "get", "k")
						switch {
						case replaced && v == "":
							if !errors.Is(err, index.ErrNotFound) {
								t.Errorf("%s, then get: %v", name, err)
							}
						case replaced:
							if err != nil || string(d.op.Record.Value) != v {
								t.Errorf("%s, then get: %q, %v", name, d.op.Record.Value, err)
							}
						case lost && op != "scan":
							if !errors.As(err, &corrupt) {
								t.Errorf("%s, then get: %v", name, err)
							}
						case !lost:
							if err != nil || string(d.op.Record.Value) != "old" {
								t.Errorf("%s, then get: %q, %v", name, d.op.Record.Value, err)
							}
						}
						must(t, d.do(t, "get", "other"))
						for k := range r {
							if l := w.groupAt(k, home()).Lock(); l != 0 {
								t.Errorf("%s: locked: %x", name, l)
							}
						}
						if len(w.wrong) > 0 {
							t.Errorf("%s: %v", name, w.wrong)
						}
					}
				}
			}
		}
	}
}

// Of a record that nobody can read, not even whose it is, nothing is assumed: a key that it may be keeps its error, and
// whoever asks for the key elsewhere finds it.
func TestUnreadableRecord(t *testing.T) {
	for r := uint8(1); r <= 3; r++ {
		w := newWorld(r, 256)
		c := w.client(1)
		must(t, c.do(t, "put", "k", "old"))
		_, _, x, _ := w.find(0, "k")
		for k := range r {
			copy(w.region[k][x.Off():], bytes.Repeat([]byte{0xff}, layout.UnitSize))
		}
		c = w.client(2)
		for _, op := range []string{"get k", "put k v", "put k v if-absent", "del k", "append k x", "put kk v"} {
			var corrupt *layout.CorruptError
			if err := c.do(t, strings.Fields(op)...); !errors.As(err, &corrupt) {
				t.Errorf("r=%d: %s: %v, want that it is corrupt", r, op, err)
			}
		}
		must(t, c.do(t, "put", "z", "v")) // of another fingerprint
		for k := range r {                // its key is in the stash: found all the same
			binary.LittleEndian.PutUint64(w.region[k][home():], uint64(layout.FlagOVF))
			y := layout.MakeLive(0, layout.FP(hashOf("kk")), 0, w.nextUnit)
			layout.EncodeRecord(w.region[k][y.Off():], layout.RecordHeader{Version: 1}, []byte("kk"), []byte("there"))
			w.setSlot(k, stash(), 4, y)
		}
		w.nextUnit++
		for _, op := range []string{"get kk", "put kk new", "append kk er", "del kk"} {
			must(t, c.do(t, strings.Fields(op)...))
		}
	}
}

// A replica that lacks a word whose record is damaged gets both: from a copy that is whole, and if none is with the
// damage. It must not show that there is no such key.
func TestSyncDamaged(t *testing.T) {
	for _, c := range []struct {
		replicas uint8
		damaged  []uint8 // replica 0 has the word alone, or 0 and 1 have
		at       uint8   // the last replica that has the word
		mine     bool    // the next one has the record already
		want     bool    // it is to be had
	}{
		{2, []uint8{0}, 0, false, false}, {2, []uint8{0}, 0, true, true}, {3, []uint8{0}, 1, false, true},
		{3, []uint8{1}, 1, false, true}, {3, []uint8{0, 1}, 1, false, false},
	} {
		for _, op := range []string{"sync", "scrub", "put m v"} {
			name := fmt.Sprintf("%+v %s", c, op)
			w := newWorld(c.replicas, 256)
			must(t, w.client(1).do(t, "put", "k", "old"))
			g, i, x, _ := w.find(0, "k")
			for k := c.at + 1; k < c.replicas; k++ {
				w.setSlot(k, g, i, 0)
				if !c.mine {
					clear(w.region[k][x.Off():][:x.ReadLen()])
				}
			}
			for _, k := range c.damaged {
				w.region[k][x.Off()+layout.RecordHeaderSize+1] ^= 1
			}
			must(t, w.client(2).do(t, strings.Fields(op)...))
			for k := range c.replicas {
				if w.groupAt(k, g).Slot(i) != x {
					t.Errorf("%s: replica %d lacks the word", name, k)
				}
			}
			d := w.client(3)
			err := d.do(t, "get", "k")
			var corrupt *layout.CorruptError
			if c.want && (err != nil || string(d.op.Record.Value) != "old") || !c.want && !errors.As(err, &corrupt) {
				t.Errorf("%s: get: %q, %v", name, d.op.Record.Value, err)
			}
		}
	}
}

// A chunk of a long value is mended like a record.
func TestDamagedChunk(t *testing.T) {
	for r := uint8(1); r <= 2; r++ {
		for _, damaged := range [][]uint8{{0}, {1}, {0, 1}}[:2*r-1] {
			for _, op := range []string{"get k", "append k x", "put k v", "del k"} {
				name := fmt.Sprintf("r=%d, %v: %s", r, damaged, op)
				w := newWorld(r, 1<<12)
				must(t, w.client(1).do(t, "put", "k", "kib8", "whole=4096"))
				_, _, x, _ := w.find(0, "k")
				rec, _ := layout.ParseRecord(w.region[0][x.Off():][:x.ReadLen()])
				m, err := layout.ParseManifest(rec.Value, w.pg.HeapLo, w.pg.HeapHi)
				must(t, err)
				for _, k := range damaged {
					w.region[k][uint64(m.Chunks[0].Unit)*layout.UnitSize+100] ^= 1
				}
				lost := len(damaged) == int(r)
				err = w.client(2).do(t, strings.Fields(op)...)
				var corrupt *layout.CorruptError
				if reads := op == "get k" || op == "append k x"; reads && lost != errors.As(err, &corrupt) ||
					!(reads && lost) && err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if op == "get k" && !lost && damaged[0] == r-1 &&
					w.region[0][uint64(m.Chunks[0].Unit)*layout.UnitSize+100] !=
						w.region[r-1][uint64(m.Chunks[0].Unit)*layout.UnitSize+100] {
					t.Errorf("%s: not mended", name)
				}
			}
		}
	}
}

// TestChunkOfOtherLength: a whole chunk with fewer or more bytes than its manifest says is damaged, at once, the last
// one too.
func TestChunkOfOtherLength(t *testing.T) {
	for _, op := range []string{"get k", "append k x"} {
		for chunk := range 2 {
			w := newWorld(1, 80_000)
			w.quiet = true
			must(t, w.client(1).do(t, "put", "k", "long7"))
			_, _, x, _ := w.find(0, "k")
			rec, _ := layout.ParseRecord(w.region[0][x.Off():][:x.ReadLen()])
			m, err := layout.ParseManifest(rec.Value, w.pg.HeapLo, w.pg.HeapHi)
			must(t, err)
			at := w.region[0][uint64(m.Chunks[chunk].Unit)*layout.UnitSize:]
			h := layout.HeadOf(at)
			layout.EncodeRecord(at, h, nil, make([]byte, h.ValueLen-1))
			err = w.client(2).do(t, strings.Fields(op)...)
			if corrupt := (*layout.CorruptError)(nil); !errors.As(err, &corrupt) {
				t.Errorf("%s, chunk %d of %d: %v", op, chunk, len(m.Chunks), err)
			}
		}
	}
}
