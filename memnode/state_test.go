package memnode

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/kvd-project/kvd/rdma"
)

func someState(regions int) *state {
	s := &state{cluster: "c1", node: "m1", host: "host1", nodeID: 7, incarnation: 1 << 60, boot: 9, told: position{1, 2, 3, 4}}
	for k := range regions {
		s.regions = append(s.regions, &keptRegion{
			item: fmt.Sprintf("region/%d/1", k), pg: uint32(k + 1), namespace: 3, epoch: 5, since: 11, regionBytes: regionBytes, indexSize: indexBytes, pageBytes: 2 << 20,
			keys: []keptKeys{{"tcp", 1, 2}, {"shm", 3, 4}},
		})
	}
	return s
}

func newStateFile() *stateFile {
	return &stateFile{mem: &rdma.Memory{Bytes: make([]byte, 2*statePage)}}
}

// TestStateSaysWhatWasWrittenLast: also if the process died while it wrote the next.
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
		again := &stateFile{mem: f.mem}
		got, err := again.read()
		if err != nil || !reflect.DeepEqual(got, want) || again.seq != f.seq {
			t.Fatalf("%+v, %v; want %+v", got, err, want)
		}
		// The next one is not written to the end.
		p := f.page(f.seq + 1)
		clear(p[:8])
		copy(p[8:], bytes.Repeat([]byte{0xaa}, 500))
		if got, err := (&stateFile{mem: f.mem}).read(); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("torn: %+v, %v; want %+v", got, err, want)
		}
	}
}

// TestStateFlipped: with any bit of it changed the state is refused, wherever it lies, and the other page is not
// taken for it.
func TestStateFlipped(t *testing.T) {
	f := newStateFile()
	for k := range 2 {
		if err := f.write(someState(2 + k)); err != nil {
			t.Fatal(err)
		}
	}
	for page := range 2 {
		used := stateHead + len(someState(2+(page+1)%2).encode())
		for at := range used {
			b := &f.mem.Bytes[page*statePage+at]
			for bit := range 8 {
				*b ^= 1 << bit
				if s, err := (&stateFile{mem: f.mem}).read(); s != nil || err == nil || !errors.Is(err, errStateDamaged) && !errors.Is(err, errStateFormat) {
					t.Fatalf("page %d byte %d bit %d: %+v, %v", page, at, bit, s, err)
				}
				*b ^= 1 << bit
			}
		}
	}
	if s, err := (&stateFile{mem: f.mem}).read(); err != nil || len(s.regions) != 3 {
		t.Errorf("%+v %v", s, err)
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
