package index_test

import (
	"bytes"
	"errors"
	"fmt"
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
					for _, op := range []string{"get a", "put a v", "put a v if-absent", "put a v if-present", "put a v if=3", "del a", "del a if=3", "append a x"} {
						err := c.do(t, strings.Fields(op)...)
						var corrupt *layout.CorruptError
						if !errors.As(err, &corrupt) || corrupt.What != "group" {
							t.Errorf("%s: %v, want a corrupt group", op, err)
							continue
						}
						if want := fmt.Sprintf("pg 1 replica %d: group at %#x: ", replicas-1, off); !strings.Contains(err.Error(), want) && !strings.Contains(err.Error(), strings.Replace(want, fmt.Sprint("replica ", replicas-1), "replica 0", 1)) {
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
			if !errors.As(c.op.Err, &corrupt) || !strings.Contains(c.op.Err.Error(), fmt.Sprintf("pg 1 replica 0: group at %#x: ", home())) {
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
		copy(tail[x.Off():], "damaged!")
		if err := c.do(t, "scan"); err != nil {
			t.Fatal(err)
		}
		if got := c.answer(); !strings.HasPrefix(got, "done: [a b] next 0 end true") {
			t.Errorf("r=%d: %s", replicas, got)
		}
		for _, want := range []string{
			fmt.Sprintf("pg 1 replica %d: group at %#x: corrupt group at +0: reserved header bits", replicas-1, group5),
			fmt.Sprintf("group at %#x: corrupt group at +%d: slot names units outside the heap", shardOff+7*layout.GroupSize, layout.SlotOff(i)),
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
				if got != ends || !strings.Contains(fmt.Sprint(err), fmt.Sprintf("group at %#x: corrupt group at +", home())) || !strings.Contains(fmt.Sprint(err), "pg 1 replica ") {
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

// scanCorrupt is what a Scan could not read.
func scanCorrupt(o *index.Op) error {
	if o.Scan == nil {
		return nil
	}
	return o.Scan.Corrupt
}
