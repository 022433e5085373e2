package engine_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/rdma/driver"
)

const longLen = 9000

// longOf is a long value of which each byte tells whose it is.
func longOf(c byte) string { return strings.Repeat(string(c), longLen) }

// lent is a GET's memory, between canaries.
type lent struct {
	all  []byte
	size int
}

const (
	canary  = 0xc5
	margin  = 64
	pattern = 0xa7 // what was there before
)

func lend(size int) *lent {
	x := &lent{all: bytes.Repeat([]byte{canary}, size+2*margin), size: size}
	for i := range x.dst() {
		x.dst()[i] = pattern
	}
	return x
}

func (x *lent) dst() []byte       { return x.all[margin:][:x.size:x.size] }
func (x *lent) Into(n int) []byte { return x.dst()[:min(n, x.size)] }
func (x *lent) check(want string) error {
	for i, b := range x.all {
		at := i - margin
		switch {
		case at < 0 || at >= x.size:
			if b != canary {
				return fmt.Errorf("byte %d of %d was written: %#x", at, x.size, b)
			}
		case at < len(want):
			if b != want[at] {
				return fmt.Errorf("byte %d is %#x, want %#x", at, b, want[at])
			}
		case b != 0 && b != pattern:
			return fmt.Errorf("byte %d behind the answer's %d is %#x", at, len(want), b)
		}
	}
	return nil
}

func (x *lent) holds(v []byte) bool { return unsafe.SliceData(v) == unsafe.SliceData(x.dst()) }

// into begins a GET whose value goes to x.
func (r *rig) into(key string, x *lent) *engine.Task {
	t := r.request(index.Get, key, "")
	t.Filler = x
	r.l.Start(t)
	return t
}

// fireOne has the next thing take effect; false: there is none.
func (r *rig) fireOne() bool {
	evs := r.fab.Events()
	if len(evs) == 0 {
		return false
	}
	_ = r.fab.Fire(evs[0])
	return true
}

// A GET's value is in its caller's memory and nowhere else, whole; or nothing of it is there. That holds whatever
// happens, and before whichever part of the READs.
func TestNeverSomebodyElsesBytes(t *testing.T) {
	type outcome struct {
		value string
		err   error
	}
	value := longOf('a')
	disturb := map[string]func(r *rig, x *engine.Task){
		"nothing": func(*rig, *engine.Task) {},
		"deleted": func(r *rig, _ *engine.Task) {
			off, w := r.slot(1, "a")
			putWord(r.nodes[0].mem[off:], uint64(w.Delete(9)))
		},
		"other key of the same size": func(r *rig, _ *engine.Task) { r.rewrite("b", longOf('b')) },
		"other key, other length":    func(r *rig, _ *engine.Task) { r.rewrite("bb", longOf('b')[1:]) },
		"longer than the place":      func(r *rig, _ *engine.Task) { r.record()[13] = 0xff },
		"a manifest": func(r *rig, _ *engine.Task) {
			r.record()[10] |= byte(layout.FlagManifest)
		},
		"flipped in the header": func(r *rig, _ *engine.Task) { r.record()[3] ^= 1 },
		"flipped in the key":    func(r *rig, _ *engine.Task) { r.record()[layout.RecordHeaderSize] ^= 1 },
		"flipped at the start":  func(r *rig, _ *engine.Task) { r.record()[layout.RecordHeaderSize+1] ^= 1 },
		"flipped at the end":    func(r *rig, _ *engine.Task) { r.record()[layout.RecordHeaderSize+longLen] ^= 1 },
		"lease over":            func(r *rig, _ *engine.Task) { r.now += rigLease },
		"cut":                   func(r *rig, _ *engine.Task) { r.disconnect(1) },
		"moved on": func(r *rig, _ *engine.Task) {
			r.epoch++
			r.offer(nil)
		},
		"gone": func(r *rig, x *engine.Task) { r.l.Orphan(x, engine.ErrTimeout) },
	}
	for name, f := range disturb {
		for _, hinted := range []bool{true, false} {
			for _, size := range []int{longLen, longLen - 1, longLen + 100, 1 << 20} {
				t.Run(fmt.Sprintf("%s, hinted %v, into %d", name, hinted, size), func(t *testing.T) {
					for at := 0; ; at++ {
						r := newRig(t, 1, false)
						r.put("a", value)
						if !hinted {
							r.startAgain()
						}
						mem := lend(size)
						x := r.into("a", mem)
						r.l.Pump()
						for range at {
							if !r.fireOne() {
								r.l.Pump()
							}
						}
						over := x.IsDone()
						var gone []byte
						if !over {
							f(r, x)
							if name == "gone" {
								gone = bytes.Clone(mem.all)
								if err := mem.check(""); err != nil {
									t.Fatalf("at %d: when its caller goes %v", at, err)
								}
							}
						}
						r.settleLane()
						if name == "cut" && !over {
							r.connect(1)
							r.settleLane()
						}
						got := outcome{string(x.Op.Record.Value), x.Op.Err}
						if !x.IsDone() {
							t.Fatalf("at %d: step %v", at, x.Op.Step())
						}
						switch {
						case got.err == nil && got.value != value:
							t.Fatalf("at %d: answered %d other bytes", at, len(got.value))
						case got.err != nil || !mem.holds(x.Op.Record.Value):
							got.value = "" // or it is in a buffer, from where Take copies it
						}
						if name == "nothing" && (got.err != nil || (got.value == "") != (size < longLen)) {
							t.Fatalf("at %d: %d bytes, %v", at, len(got.value), got.err)
						}
						if name == "lease over" && !over && !errors.Is(got.err, engine.ErrLease) {
							t.Fatalf("at %d: ended with %v", at, got.err)
						}
						if err := mem.check(got.value); err != nil {
							t.Fatalf("at %d: ended with %v: %v", at, got.err, err)
						}
						if gone != nil && !bytes.Equal(gone, mem.all) {
							t.Fatalf("at %d: written after its caller went", at)
						}
						r.l.Recycle(x)
						r.close()
						r.closed = true
						if over {
							break
						}
					}
				})
			}
		}
	}
}

// startAgain gives the lane another map without its hints, as for a new session.
func (r *rig) startAgain() {
	r.shard++
	r.install(nil)
}

// record is the memory of key "a" and what lies behind it.
func (r *rig) record() []byte {
	_, w := r.slot(1, "a")
	return r.nodes[0].mem[w.Off():][:w.ReadLen()]
}

// rewrite puts another record into the place of key "a".
func (r *rig) rewrite(key, value string) {
	layout.EncodeRecord(r.record(), layout.RecordHeader{Version: 1 << 40, Writer: 9}, []byte(key), []byte(value))
}

// grown is a GET's memory with another piece in its place once it is too short.
type grown struct {
	*lent
	longer []byte
}

func (x *grown) Into(n int) []byte {
	if n > x.size+x.size/16+layout.UnitSize && len(x.longer) < n {
		x.longer = make([]byte, n)
	}
	if x.longer != nil {
		return x.longer[:n]
	}
	return x.lent.Into(n)
}

// A GET whose caller found longer memory for it leaves nothing in the shorter one: a stale hint had READs put another
// value there.
func TestShorterMemoryIsCleared(t *testing.T) {
	r := newRig(t, 1, false)
	longer := strings.Repeat("b", 3*longLen)
	r.put("a", longer)
	off, w := r.slot(1, "a")
	r.put("a", longOf('a'))
	putWord(r.nodes[0].mem[off:], uint64(w)) // the hint is the other one
	mem := &grown{lent: lend(longLen)}
	x := r.request(index.Get, "a", "")
	x.Filler = mem
	r.l.Start(x)
	r.settleLane()
	if v, err := r.answer(x); err != nil || v != longer || mem.longer == nil {
		t.Fatalf("%.10q of %d bytes, %v", v, len(v), err)
	}
	if err := mem.check(""); err != nil {
		t.Error(err)
	}
	if bytes.Count(mem.longer[:len(longer)], []byte("b")) != len(longer) ||
		len(bytes.Trim(mem.longer[len(longer):], "\x00")) > 0 {
		t.Error("the longer memory does not hold the value alone")
	}
}

// A PUT's value leaves from its caller's memory. A change of that meanwhile changes that record alone, which is whole.
// When the caller has gone nothing of it is read any more.
func TestPutFromCaller(t *testing.T) {
	for _, how := range []string{"nothing", "scribbled", "gone", "fails"} {
		for _, replicas := range []int{1, 2} {
			t.Run(fmt.Sprintf("%s, %d copies", how, replicas), func(t *testing.T) {
				for at := 0; ; at++ {
					r := newRig(t, replicas, false)
					r.put("a", "old")
					src := []byte(longOf('a'))
					x := r.request(index.Put, "a", "")
					x.Op.Value = src
					r.l.Start(x)
					r.l.Pump()
					for range at {
						if !r.fireOne() {
							r.l.Pump()
						}
					}
					over := x.IsDone()
					if !over {
						switch how {
						case "scribbled":
							copy(src[longLen/2:], longOf('b'))
						case "gone":
							r.l.Orphan(x, engine.ErrTimeout)
							copy(src, longOf('b'))
						case "fails":
							r.disconnect(1)
							copy(src, longOf('b'))
						}
					}
					r.settleLane()
					if how == "fails" && !over {
						r.connect(1)
						r.settleLane()
					}
					_, err := r.answer(x)
					got, getErr := r.do(index.Get, "a", "")
					if getErr != nil {
						t.Fatalf("at %d: get: %v", at, getErr)
					}
					fits := false
					switch how {
					case "nothing":
						fits = got == longOf('a') && err == nil
					case "scribbled":
						mixed := strings.Trim(got, "ab") == "" && len(got) == longLen &&
							got[:longLen/2] == longOf('a')[:longLen/2]
						fits = err == nil && mixed
					case "gone":
						fits = got == longOf('a') || got == "old"
					case "fails":
						fits = err == nil && strings.Trim(got, "ab") == "" && len(got) == longLen
					}
					if !fits {
						t.Fatalf("at %d: ended with %v, %d bytes %.10q", at, err, len(got), got)
					}
					r.close()
					r.closed = true
					if over {
						break
					}
				}
			})
		}
	}
}

// A warm GET or PUT of a long value takes no buffer for it, on no kind of provider.
func TestNoBuffers(t *testing.T) {
	for _, synchronous := range []bool{false, true} {
		r := newRig(t, 2, synchronous)
		mem := lend(longLen)
		for i := range 4 {
			before := r.l.Stats.Buffered
			if _, err := r.do(index.Put, "a", longOf('a')); err != nil {
				t.Fatal(err)
			}
			x := r.into("a", mem)
			r.settleLane()
			if v, err := r.answer(x); err != nil || v != longOf('a') {
				t.Fatal(err)
			}
			if err := mem.check(longOf('a')); err != nil {
				t.Fatal(err)
			}
			if n := r.l.Stats.Buffered - before; i > 0 && n != 0 {
				t.Errorf("synchronous %v: %d bytes of buffers", synchronous, n)
			}
		}
	}
}

// A GET that finds a damaged copy answers with the good one.
func TestIntoMends(t *testing.T) {
	r := newRig(t, 2, false)
	r.put("a", longOf('a'))
	_, w := r.slot(2, "a")
	r.nodes[1].mem[w.Off()+layout.RecordHeaderSize+100] ^= 1
	mem := lend(longLen)
	x := r.into("a", mem)
	r.settleLane()
	if v, err := r.answer(x); err != nil || v != longOf('a') {
		t.Fatalf("%.10q, %v", v, err)
	}
	if err := mem.check(""); err != nil { // the answer is in a buffer, from where Take copies it
		t.Error(err)
	}
	r.wantCopies("a", longOf('a'))
}

// An Op of a crowd on a lane has its memory back when it has its error, though its WRs are under way.
func TestGivenUpInQueue(t *testing.T) {
	r := newRig(t, 1, false)
	r.put("a", longOf('a'))
	r.wire.post = func(q driver.QP, wrs []driver.WR) (int, error) { return 0, driver.ErrQueueFull }
	mem := lend(longLen)
	x := r.into("a", mem)
	r.l.Pump()
	r.l.Orphan(x, engine.ErrTimeout)
	was := slices.Clone(mem.all)
	r.wire.post = nil
	r.settleLane()
	if !errors.Is(x.Op.Err, engine.ErrTimeout) || !slices.Equal(was, mem.all) {
		t.Errorf("%v, written: %v", x.Op.Err, !slices.Equal(was, mem.all))
	}
	r.l.Recycle(x)
}
