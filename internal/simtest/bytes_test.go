package simtest

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/layout"
)

// The end of a run reads all bytes: it finds what no verb did.
func TestEndReadsAllBytes(t *testing.T) {
	for name, spoil := range map[string]func(r *region, s *slot){
		"":                   func(*region, *slot) {},
		"CRC-32C":            func(r *region, s *slot) { r.bytes[s.now.Off()+layout.RecordHeaderSize] ^= 1 },
		"region header":      func(r *region, _ *slot) { r.bytes[0] ^= 1 },
		"replica 0 has LIVE": func(r *region, s *slot) { binary.LittleEndian.PutUint64(r.bytes[s.off:], 0) },
		"outside the heap": func(r *region, s *slot) {
			binary.LittleEndian.PutUint64(r.bytes[s.off+8:], uint64(layout.MakeLive(1, 0, 0, 1)))
		},
		"is in the slot at": func(r *region, s *slot) {
			binary.LittleEndian.PutUint64(r.bytes[s.off+8:], uint64(s.now))
		},
	} {
		w, err := NewWorld(Config{Replicas: 2, Setup: []Step{k(Put, 0)}, Scripts: [][]Step{nil}}, false)
		if err != nil {
			t.Fatal(err)
		}
		r := w.chain(1)[1]
		for _, s := range r.slots {
			if s.now.Readable() {
				spoil(r, s)
			}
		}
		switch err := w.Finish(); {
		case name == "" && err != nil:
			t.Errorf("nothing was spoilt: %v", err)
		case name != "" && (err == nil || !strings.Contains(err.Error(), "check: ") ||
			!strings.Contains(err.Error(), name)):
			t.Errorf("%s: %v", name, err)
		}
	}
}
