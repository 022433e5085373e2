package layout

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

func TestIntentVectors(t *testing.T) {
	vectors(t, "intent", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "status":
			s := Status(num[uint64](t, d, "word", 0))
			if s == 0 {
				s = MakeStatus(num[uint64](t, d, "seq", 0), num[Verdict](t, d, "verdict", 0),
					num[uint32](t, d, "session", 0))
			}
			var b strings.Builder
			fmt.Fprintf(&b, "word   %016x\nslot   %v readable=%v\nprints %v\n", uint64(s), Word(s).State(),
				Word(s).Readable(), s)
			for seq := s.Seq(); seq < s.Seq()+3; seq++ {
				v, over := s.Of(max(seq, 1) - 1)
				fmt.Fprintf(&b, "of transaction %d: %v over=%v\n", max(seq, 1)-1, v, over)
			}
			if err := DumpStatus(&b, 4096, binary.LittleEndian.AppendUint64(nil, uint64(s))); err != nil {
				t.Fatal(err)
			}
			return b.String()
		case "encode":
			i := Intent{Kind: num[IntentKind](t, d, "kind", 0), Try: num[uint8](t, d, "try", 0),
				Long: IntentLong(num[uint16](t, d, "long", 0)), PG: num[uint32](t, d, "pg", 0),
				Generation: num[uint32](t, d, "gen", 0), Off: num[uint64](t, d, "off", 0),
				Seq:    num[uint64](t, d, "seq", 0),
				Parent: Word(num[uint64](t, d, "parent", 0)), Final: Word(num[uint64](t, d, "final", 0)),
				TS: num[uint64](t, d, "ts", 0), Coord: num[uint64](t, d, "coord", 0)}
			v := make([]byte, IntentLen)
			EncodeIntent(v, &i)
			b := make([]byte, RecordLen(1, IntentLen))
			EncodeRecord(b, RecordHeader{Version: 7, Flags: FlagIntent, Writer: 3}, []byte("k"), v)
			out := hexLines(v)
			if got, err := ParseIntent(v, 0, 1<<32-1); err == nil && got != i {
				t.Fatalf("parsed %+v, encoded %+v", got, i)
			}
			var dump bytes.Buffer
			if err := DumpRecord(&dump, 64, b); err != nil {
				t.Fatal(err)
			}
			return out + dump.String()
		}
		d.Fatalf(t, "unknown command")
		return ""
	})
}

// TestIntentRecords: an intent is nothing else besides, and does not expire.
func TestIntentRecords(t *testing.T) {
	for _, h := range []RecordHeader{{Flags: FlagIntent | FlagManifest}, {Flags: FlagIntent | FlagUser},
		{Flags: FlagIntent, Expiry: 1}} {
		b := make([]byte, RecordLen(1, IntentLen))
		EncodeRecord(b, h, []byte("k"), make([]byte, IntentLen))
		if _, err := ParseRecord(b); err == nil {
			t.Errorf("a record of flags %v that expires at %d is parsed", h.Flags, h.Expiry)
		}
	}
}

func TestStatusOff(t *testing.T) {
	const end = RegionPageSize + 2*GroupSize
	for off, want := range map[uint64]bool{0: false, RegionPageSize: false, RegionPageSize + GroupLockOff: false,
		RegionPageSize + GroupSlotsOff: true, RegionPageSize + GroupSlotsOff + 4: false, end - 8: true, end: false,
		end + GroupSlotsOff: false} {
		if got := StatusOff(off, end); got != want {
			t.Errorf("%#x is the offset of a status word: %v, want %v", off, got, want)
		}
	}
}

func FuzzParseIntent(f *testing.F) {
	live := MakeLive(1, 2, 3, 4)
	for kind := IntentKind(0); kind < 7; kind++ {
		i := Intent{Kind: kind, Seq: 1, Off: RegionPageSize + GroupSlotsOff, Parent: live, Final: live}
		b := make([]byte, IntentLen)
		EncodeIntent(b, &i)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := ParseIntent(b, 4, 100)
		if err != nil {
			if !isCorrupt(err) {
				t.Fatalf("%v", err)
			}
			return
		}
		for _, w := range []Word{i.Parent, i.Final} {
			if w.State() != Empty && (w.State() != Live || !InHeap(w, 4, 100)) {
				t.Fatalf("%v is accepted", w)
			}
		}
		again := make([]byte, IntentLen)
		if EncodeIntent(again, &i); !bytes.Equal(again, b) {
			t.Fatalf("%x encodes to %x", b, again)
		}
	})
}
