package memnode

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"
	"runtime/debug"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/rdma"
)

func someState(regions int) *state {
	s := &state{cluster: "c1", node: "m1", host: "host1", nodeID: 7, incarnation: 1 << 60, boot: 9,
		lives: []uint64{1 << 61, 5}, told: position{1, 2, 3, 4}}
	for k := range regions {
		s.regions = append(s.regions, &keptRegion{
			item: fmt.Sprintf("region/%d/1", k), pg: uint32(k + 1), namespace: 3, epoch: 5, since: 11,
			regionBytes: regionBytes, indexSize: indexBytes, pageBytes: 2 << 20,
			keys: []keptKeys{{"tcp", 1, 2}, {"shm", 3, 4}},
		})
	}
	return s
}

func newStateFile() *stateFile {
	return &stateFile{mem: &rdma.Memory{Bytes: make([]byte, 2*statePage)}}
}

// TestStateSaysWhatWasWrittenLast: both pages have it.
func TestStateSaysWhatWasWrittenLast(t *testing.T) {
	f := newStateFile()
	if _, err := f.read(); !errors.Is(err, errStateNone) {
		t.Errorf("nothing written: %v", err)
	}
	for k := range 5 {
		want := someState(k)
		if err := f.write(want); err != nil {
			t.Fatal(err)
		}
		for page := range uint64(2) {
			again := &stateFile{mem: &rdma.Memory{Bytes: slices.Clone(f.mem.Bytes)}}
			clear(again.page(page))
			got, err := again.read()
			if err != nil || !reflect.DeepEqual(got, want) || again.seq != f.seq {
				t.Fatalf("without page %d: %+v, %v; want %+v", page, got, err, want)
			}
		}
	}
}

// TestStateFlipped: with any bit of a page changed the other one serves, and is written last of both. With any byte of
// both changed nothing is believed.
func TestStateFlipped(t *testing.T) {
	f := newStateFile()
	for k := range 3 {
		if err := f.write(someState(1 + k)); err != nil {
			t.Fatal(err)
		}
	}
	want := someState(3)
	used := stateHead + len(want.encode())
	for page := range uint64(2) {
		for at := range used {
			for bit := range 8 {
				f.page(page)[at] ^= 1 << bit
				again := &stateFile{mem: f.mem}
				if s, err := again.read(); err != nil || !reflect.DeepEqual(s, want) || again.whole == page ||
					!again.torn || !errors.Is(again.spoiled, errStateDamaged) {
					t.Fatalf("page %d byte %d bit %d: %+v, %v; %+v", page, at, bit, s, err, again.spoiled)
				}
				f.page(page)[at] ^= 1 << bit
			}
		}
	}
	for at := range used {
		other := (at * 31) % used
		f.page(0)[at] ^= 4
		f.page(1)[other] ^= 32
		if s, err := (&stateFile{mem: f.mem}).read(); s != nil || !errors.Is(err, errStateDamaged) {
			t.Fatalf("bytes %d and %d: %+v, %v", at, other, s, err)
		}
		f.page(0)[at] ^= 4
		f.page(1)[other] ^= 32
	}
}

// TestStateInTheOthersPlace: a page is believed in its own place alone.
func TestStateInTheOthersPlace(t *testing.T) {
	f := newStateFile()
	if err := f.write(someState(1)); err != nil {
		t.Fatal(err)
	}
	before := slices.Clone(f.mem.Bytes)
	if err := f.write(someState(2)); err != nil {
		t.Fatal(err)
	}
	for page := range uint64(2) {
		m := slices.Clone(f.mem.Bytes)
		again := &stateFile{mem: &rdma.Memory{Bytes: m}}
		clear(again.page(1 - page))
		copy(again.page(page), before[(1-page)*statePage:][:statePage])
		if s, err := again.read(); s != nil || !errors.Is(err, errStateDamaged) {
			t.Errorf("page %d in the place of %d: %+v, %v", 1-page, page, s, err)
		}
	}
}

// TestStateOfAnotherFormat: a state of another format is told from a damaged one, that of a version whose checksum does
// not cover the format, too.
func TestStateOfAnotherFormat(t *testing.T) {
	for _, format := range []uint32{2, stateFormat + 1} {
		f := newStateFile()
		if err := f.write(someState(1)); err != nil {
			t.Fatal(err)
		}
		for page := range uint64(2) {
			p := f.page(page)
			binary.LittleEndian.PutUint32(p[8:], format)
			binary.LittleEndian.PutUint32(p[12:], sumOf(p, uint64(len(someState(1).encode()))))
		}
		if s, err := (&stateFile{mem: f.mem}).read(); s != nil || !errors.Is(err, errStateFormat) ||
			errors.Is(err, errStateDamaged) {
			t.Errorf("format %d: %+v, %v", format, s, err)
		}
	}
}

// TestStateInterrupted: a process that dies while it writes, at any page of memory, also with one page of the state
// damaged, leaves the state before or the one that it wrote, and nothing that looks damaged. The next process has both
// pages the same before it goes on.
func TestStateInterrupted(t *testing.T) {
	if raceEnabled {
		t.Skip("a write to memory that is protected ends in the race detector's own code, which does not survive it; " +
			"make test runs it")
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	mem, err := unix.Mmap(-1, 0, 2*statePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(mem) })
	const regions = 200 // more than a page of memory
	before, after := someState(regions), someState(regions+1)
	os := unix.Getpagesize()
	used := (stateHead + len(after.encode()) + os - 1) / os * os
	for _, damaged := range []int{-1, 0, 1} {
		for at := 0; at < 2*statePage; at += os {
			if at%statePage >= used {
				continue
			}
			clear(mem)
			if err := (&stateFile{mem: &rdma.Memory{Bytes: mem}}).write(before); err != nil {
				t.Fatal(err)
			}
			if damaged >= 0 {
				mem[damaged*statePage+100] ^= 1
			}
			f := &stateFile{mem: &rdma.Memory{Bytes: mem}}
			if s, err := f.read(); err != nil || !reflect.DeepEqual(s, before) {
				t.Fatalf("%v", err)
			}
			if err := unix.Mprotect(mem[at:][:os], unix.PROT_READ); err != nil {
				t.Fatal(err)
			}
			func() {
				defer func() {
					if recover() == nil {
						t.Errorf("it was written though memory at %#x could not be", at)
					}
				}()
				_ = f.write(after)
			}()
			if err := unix.Mprotect(mem[at:][:os], unix.PROT_READ|unix.PROT_WRITE); err != nil {
				t.Fatal(err)
			}
			f = &stateFile{mem: &rdma.Memory{Bytes: mem}}
			s, err := f.read()
			if err != nil || !reflect.DeepEqual(s, before) && !reflect.DeepEqual(s, after) {
				t.Fatalf("damaged %d, died at %#x: %v", damaged, at, err)
			}
			// Death at the first bytes of the damaged page leaves the damage.
			if f.spoiled != nil && damaged*statePage != at {
				t.Errorf("damaged %d, died at %#x: %v", damaged, at, f.spoiled)
			}
		}
	}
}

// TestStateFull: more regions than there is room for are refused, and what was written before counts.
func TestStateFull(t *testing.T) {
	f := newStateFile()
	if err := f.write(someState(1)); err != nil {
		t.Fatal(err)
	}
	if err := f.write(someState(statePage / 100)); !errors.Is(err, errStateFull) {
		t.Errorf("%v", err)
	}
	if s, err := (&stateFile{mem: f.mem}).read(); err != nil || len(s.regions) != 1 {
		t.Errorf("%+v %v", s, err)
	}
}

// TestStateRefuses: bodies that no process writes, with the right checksum.
func TestStateRefuses(t *testing.T) {
	for what, change := range map[string]func(*state){
		"no incarnation":    func(s *state) { s.incarnation = 0 },
		"too many lives":    func(s *state) { s.lives = make([]uint64, maxLives+1) },
		"no boot":           func(s *state) { s.boot = 0 },
		"the last boot":     func(s *state) { s.boot = ^uint64(0) },
		"a group twice":     func(s *state) { s.regions = append(s.regions, s.regions[0]) },
		"no item":           func(s *state) { s.regions[0].item = "" },
		"no index":          func(s *state) { s.regions[0].indexSize = 0 },
		"index beyond":      func(s *state) { s.regions[0].indexSize = regionBytes },
		"odd size":          func(s *state) { s.regions[0].regionBytes++ },
		"too large a size":  func(s *state) { s.regions[0].regionBytes = 1 << 62 },
		"large pages":       func(s *state) { s.regions[0].pageBytes = 1 << 40 },
		"too many keys":     func(s *state) { s.regions[0].keys = make([]keptKeys, maxRegionKeys+1) },
		"a text too long":   func(s *state) { s.node = string(make([]byte, maxStateText+1)) },
		"an item too long":  func(s *state) { s.regions[0].item = string(make([]byte, maxStateText+1)) },
		"a text of 64 KiB":  func(s *state) { s.cluster = string(make([]byte, 1<<16)) },
		"an empty provider": func(s *state) { s.regions[0].keys[0].provider = string(make([]byte, 1<<16)) },
	} {
		s := someState(2)
		change(s)
		if got, err := decodeState(s.encode()); !errors.Is(err, errStateDamaged) {
			t.Errorf("%s: %+v, %v", what, got, err)
		}
	}
	b := someState(2).encode()
	for n := range b {
		if _, err := decodeState(b[:n]); !errors.Is(err, errStateDamaged) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if _, err := decodeState(append(slices.Clone(b), 0)); !errors.Is(err, errStateDamaged) {
		t.Errorf("a byte more: %v", err)
	}
}

// FuzzState: a body is refused, or says what is written of it again.
func FuzzState(f *testing.F) {
	f.Add([]byte{})
	f.Add(someState(0).encode())
	f.Add(someState(3).encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		if s, err := decodeState(b); err == nil && !bytes.Equal(s.encode(), b) {
			t.Errorf("%x says %+v", b, s)
		}
	})
}
