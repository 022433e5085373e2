package layout

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
)

// vectors runs one file of test vectors; cmd prints what a reader of the bytes
// must know.
func vectors(t *testing.T, file string, cmd func(t *testing.T, d *datadriven.TestData) string) {
	datadriven.RunTest(t, "testdata/"+file, cmd)
}

func num[T ~uint8 | ~uint16 | ~uint32 | ~uint64](t *testing.T, d *datadriven.TestData, key string, def T) T {
	t.Helper()
	var s string
	if !d.MaybeScanArgs(t, key, &s) {
		return def
	}
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		d.Fatalf(t, "%s: %v", key, err)
	}
	return T(n)
}

func unhex(t *testing.T, d *datadriven.TestData, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		d.Fatalf(t, "%v", err)
	}
	return b
}

func hexLines(b []byte) string {
	var s strings.Builder
	for i := 0; i < len(b); i += 16 {
		fmt.Fprintf(&s, "% x\n", b[i:min(i+16, len(b))])
	}
	return s.String()
}

func TestWordVectors(t *testing.T) {
	vectors(t, "word", func(t *testing.T, d *datadriven.TestData) string {
		var w Word
		switch d.Cmd {
		case "live":
			w = MakeLive(num[uint16](t, d, "ver", 0), num[uint16](t, d, "fp", 0),
				num[uint8](t, d, "code", 0), num[uint32](t, d, "unit", 0))
		case "delete":
			w = Word(num[uint64](t, d, "word", 0)).Delete(num[uint32](t, d, "session", 0))
		case "state":
			w = Word(num[uint64](t, d, "word", 0)).WithState(num[State](t, d, "to", 0))
		case "parse":
			w = Word(num[uint64](t, d, "word", 0))
		}
		return fmt.Sprintf("word     %016x\nstate %v ver=%d fp=%03x code=%d unit=%d deleter=%d\nreads    +%#x len=%d "+
			"units=%d readable=%v\nprints   %v\n",
			uint64(w), w.State(), w.Ver(), w.FP(), w.Code(), w.Unit(), w.Deleter(), w.Off(), w.ReadLen(), w.Units(),
			w.Readable(), w)
	})
}

func TestSizeCodeVectors(t *testing.T) {
	vectors(t, "sizecode", func(t *testing.T, d *datadriven.TestData) string {
		var out strings.Builder
		for _, f := range strings.Fields(d.Input) {
			n, err := strconv.Atoi(f)
			if err != nil {
				d.Fatalf(t, "%v", err)
			}
			c, ok := CodeFor(n)
			fmt.Fprintf(&out, "%d: ", n)
			if !ok {
				fmt.Fprintln(&out, "too long")
				continue
			}
			fmt.Fprintf(&out, "code %d = %dB in %d units\n", c, SizeOf(c), UnitsOf(c))
		}
		return out.String()
	})
}

func TestSizeCodes(t *testing.T) {
	check := func(n int) {
		c, ok := CodeFor(n)
		if ok != (n <= MaxRecordSize) {
			t.Fatalf("CodeFor(%d) ok=%v", n, ok)
		}
		if !ok {
			return
		}
		size := SizeOf(c)
		if size < n {
			t.Fatalf("CodeFor(%d)=%d holds only %d", n, c, size)
		}
		if c > 0 && SizeOf(c-1) >= n {
			t.Fatalf("CodeFor(%d)=%d, but code %d holds it too", n, c, c-1)
		}
		if n >= 64 && (size-n)*16 > n {
			t.Fatalf("CodeFor(%d)=%d reads %d bytes, over 6.25%% too many", n, c, size)
		}
		if u := int(UnitsOf(c)); u*UnitSize < size || (u-1)*UnitSize >= size {
			t.Fatalf("UnitsOf(%d)=%d for %d bytes", c, u, size)
		}
	}
	for n := 1; n <= 70000; n++ {
		check(n)
	}
	for c := 0; c < 256; c++ {
		for d := -2; d <= 2; d++ {
			check(SizeOf(uint8(c)) + d)
		}
		if c > 0 && SizeOf(uint8(c)) <= SizeOf(uint8(c-1)) {
			t.Fatalf("code %d is not longer than code %d", c, c-1)
		}
	}
	check(MaxRecordSize)
	check(MaxRecordSize + 1)
	if n := SizeOf(255); n != MaxRecordSize {
		t.Fatalf("SizeOf(255)=%d, want MaxRecordSize %d", n, MaxRecordSize)
	}
}

func TestWordFields(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		ver, fp, code, unit := uint16(rng.Uint32())%VerMod, uint16(rng.Uint32())&0xfff, uint8(rng.Uint32()),
			rng.Uint32()
		w := MakeLive(ver, fp, code, unit)
		if w.State() != Live || w.Ver() != ver || w.FP() != fp || w.Code() != code || w.Unit() != unit {
			t.Fatalf("%#x does not keep ver=%d fp=%#x code=%d unit=%d", uint64(w), ver, fp, code, unit)
		}
		for s := Live; s <= Moved; s++ {
			if x := w.WithState(s); x.State() != s || x.WithState(Live) != w {
				t.Fatalf("%#x in state %v is %#x", uint64(w), s, uint64(x))
			}
		}
		session := rng.Uint32()
		if e := w.Delete(session); e.State() != Empty || e.Ver() != ver || e.Unit() != unit ||
			e.Deleter() != session&0xfffff {
			t.Fatalf("%#x deleted by %d is %#x", uint64(w), session, uint64(e))
		}
	}
}

// A key's group lies inside its shard and its segment's stash behind it; the
// fingerprint does not depend on either.
func TestPlacement(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, segments := range []uint32{1, 2, 3, 17, 4096, 1 << 20} {
		seen := map[uint64]bool{}
		for range 20000 {
			h := rng.Uint64()
			home, stash := GroupOff(h, segments)
			if home%GroupSize != 0 || stash%SegmentSize != StashGroup*GroupSize ||
				home/SegmentSize != stash/SegmentSize ||
				stash+GroupSize > uint64(segments)*SegmentSize || home >= stash {
				t.Fatalf("hash %#x in %d segments: home %#x stash %#x", h, segments, home, stash)
			}
			if home2, _ := GroupOff(h^0xfff, segments); home2 != home {
				t.Fatalf("hash %#x: the fingerprint's bits move the group", h)
			}
			seen[home] = true
		}
		if want := min(int(segments)*SegmentGroups, 10000); len(seen) < want*9/10 {
			t.Errorf("%d segments: %d groups used, want about %d", segments, len(seen), want)
		}
	}
	if p := ShardPrefix(0xffffffff_ffffffff, 0); p != 0 {
		t.Errorf("ShardPrefix at depth 0 is %d", p)
	}
	if p := ShardPrefix(0xa5000000_00000000, 4); p != 0xa {
		t.Errorf("ShardPrefix at depth 4 is %#x", p)
	}
}

func TestRecordVectors(t *testing.T) {
	vectors(t, "record", func(t *testing.T, d *datadriven.TestData) string {
		var out bytes.Buffer
		switch d.Cmd {
		case "encode":
			var key, value string
			d.MaybeScanArgs(t, "key", &key)
			d.MaybeScanArgs(t, "value", &value)
			b := make([]byte, RecordLen(len(key), len(value)))
			n := EncodeRecord(b, RecordHeader{Version: num[uint64](t, d, "version", 0),
				Flags:  num[RecordFlags](t, d, "flags", 0),
				Expiry: num[uint64](t, d, "expiry", 0), Writer: num[uint32](t, d, "writer", 0),
				Pinned: num[uint32](t, d, "pinned", 0),
				Parent: MakeLive(num[uint16](t, d, "ver", 0), 0, num[uint8](t, d, "size", 0),
					num[uint32](t, d, "parent", 0)).AsParent()}, []byte(key), []byte(value))
			out.WriteString(hexLines(b[:n]))
			if err := DumpRecord(&out, 0x40, b); err != nil {
				d.Fatalf(t, "%v", err)
			}
		case "parse":
			b := unhex(t, d, d.Input)
			if _, err := ParseRecord(b); err != nil {
				fmt.Fprintf(&out, "error: %v\n", err)
				break
			}
			if err := DumpRecord(&out, 0, b); err != nil {
				d.Fatalf(t, "%v", err)
			}
		case "dump":
			if err := DumpRecord(&out, 0, unhex(t, d, d.Input)); err != nil {
				d.Fatalf(t, "%v", err)
			}
		}
		return out.String()
	})
}

func TestManifestVectors(t *testing.T) {
	vectors(t, "manifest", func(t *testing.T, d *datadriven.TestData) string {
		var out bytes.Buffer
		switch d.Cmd {
		case "encode":
			m := Manifest{Len: num[uint64](t, d, "len", 0), Payload: num[uint32](t, d, "payload", 0),
				ID: num[uint64](t, d, "id", 0)}
			for _, line := range strings.Split(strings.TrimSpace(d.Input), "\n") {
				var c Chunk
				if _, err := fmt.Sscanf(line, "unit=%d code=%d ver=%d", &c.Unit, &c.Code, &c.Ver); err != nil {
					d.Fatalf(t, "%q: %v", line, err)
				}
				m.Chunks = append(m.Chunks, c)
			}
			b := make([]byte, ManifestLen(len(m.Chunks)))
			EncodeManifest(b, m)
			out.WriteString(hexLines(b))
			rec := make([]byte, RecordLen(1, len(b)))
			EncodeRecord(rec, RecordHeader{Flags: FlagManifest}, []byte("k"), b)
			if err := DumpRecord(&out, 0, rec); err != nil {
				d.Fatalf(t, "%v", err)
			}
		case "parse":
			m, err := ParseManifest(unhex(t, d, d.Input), num[uint32](t, d, "lo", 0), num[uint32](t, d, "hi", 1<<32-1))
			if err != nil {
				return fmt.Sprintf("error: %v\n", err)
			}
			fmt.Fprintf(&out, "%+v\n", m)
		}
		return out.String()
	})
}

func TestRegionVectors(t *testing.T) {
	vectors(t, "region", func(t *testing.T, d *datadriven.TestData) string {
		b := make([]byte, RegionPageSize)
		InitRegion(b, RegionHeader{PG: num[uint32](t, d, "pg", 0), Namespace: num[uint32](t, d, "ns", 0),
			Epoch: num[uint32](t, d, "epoch", 0), RegionBytes: num[uint64](t, d, "region", 0),
			IndexBytes: num[uint64](t, d, "index", 0), Incarnation: num[uint64](t, d, "incarnation", 0)})
		if d.HasArg("flip") {
			b[num[uint64](t, d, "flip", 0)] ^= 1
		}
		if d.HasArg("cut") {
			b = b[:num[uint64](t, d, "cut", 0)]
		}
		var out bytes.Buffer
		if err := DumpRegion(&out, b); err != nil {
			d.Fatalf(t, "%v", err)
		}
		return out.String()
	})
}

func TestGroupVectors(t *testing.T) {
	vectors(t, "group", func(t *testing.T, d *datadriven.TestData) string {
		b := make([]byte, num[uint64](t, d, "size", GroupSize))
		for _, line := range strings.Split(strings.TrimSpace(d.Input), "\n") {
			if line == "" {
				continue
			}
			var off int
			var word uint64
			if _, err := fmt.Sscanf(line, "%v %v", &off, &word); err != nil {
				d.Fatalf(t, "%q: %v", line, err)
			}
			for i := range 8 {
				b[off+i] = byte(word >> (8 * i))
			}
		}
		var out bytes.Buffer
		dump := DumpGroup
		if d.Cmd == "segment" {
			dump = DumpSegment
		}
		if err := dump(&out, num[uint64](t, d, "off", 0x1000), b, num[uint32](t, d, "lo", 0x100),
			num[uint32](t, d, "hi", 0x1000)); err != nil {
			d.Fatalf(t, "%v", err)
		}
		return out.String()
	})
}

// A record round-trips, and no single changed byte of it goes unnoticed.
func TestRecordDetectsEveryFlip(t *testing.T) {
	key, value := []byte("a key"), []byte("some value")
	b := make([]byte, RecordLen(len(key), len(value)))
	h := RecordHeader{Version: 7, Expiry: 8, Writer: 9}
	EncodeRecord(b, h, key, value)
	SetVersion(b, 12)
	r, err := ParseRecord(append(b, 0xff, 0xff)) // over-read
	if err != nil {
		t.Fatal(err)
	}
	if r.Version != 12 || r.Expiry != 8 || r.Writer != 9 || !bytes.Equal(r.Key, key) || !bytes.Equal(r.Value, value) {
		t.Fatalf("parsed %+v", r)
	}
	for i := range len(b) * 8 {
		b[i/8] ^= 1 << (i % 8)
		if _, err := ParseRecord(b); !isCorrupt(err) {
			t.Fatalf("bit %d flipped: error %v, want *CorruptError", i, err)
		}
		b[i/8] ^= 1 << (i % 8)
	}
	for n := range len(b) {
		if _, err := ParseRecord(b[:n]); !isCorrupt(err) {
			t.Fatalf("cut to %d bytes: error %v, want *CorruptError", n, err)
		}
	}
}

func isCorrupt(err error) bool {
	var c *CorruptError
	return errors.As(err, &c) && len(c.Bytes) <= 64
}

// A record names its parent, and no other word: every bit of what it keeps of that tells, as do those that it need
// not keep, state and fp.
func TestRecordNamesItsParent(t *testing.T) {
	key, value := []byte("a key"), []byte("some value")
	for _, w := range []Word{MakeLive(0x3ff, 0xfff, 0xff, 1<<32-1), MakeLive(0, 0, 0, 1),
		MakeLive(0x2a5, 0x5a5, 0x96, 77)} {
		b := make([]byte, RecordLen(len(key), len(value)))
		for _, expiry := range []uint64{0, 1_700_000_000_123, MaxChildExpiry, 1<<64 - 1} {
			EncodeRecord(b, RecordHeader{Version: 7, Expiry: expiry, Parent: w.AsParent()}, key, value)
			r, err := ParseRecord(b)
			if err != nil {
				t.Fatalf("child of %v: %v", w, err)
			}
			if !r.IsChildOf(w) || r.Expiry != min(expiry, MaxChildExpiry) || r.Pinned != 0 || r.Writer != 0 {
				t.Errorf("child of %v: %+v", w, r.RecordHeader)
			}
			for bit := range 64 {
				o := w ^ 1<<bit
				same := bit >= wordFPShift && bit < wordVerShift // the key's
				if r.IsChildOf(o) != same {
					t.Errorf("child of %v is one of %v: %v", w, o, !same)
				}
			}
		}
	}
	b := make([]byte, RecordLen(len(key), len(value)))
	EncodeRecord(b, RecordHeader{Version: 7, Writer: 77}, key, value)
	if r, err := ParseRecord(b); err != nil || r.IsChildOf(MakeLive(0, 0, 0, 77)) {
		t.Errorf("a record that names no parent is a child: %+v, %v", r.RecordHeader, err)
	}
}

func FuzzParseRecord(f *testing.F) {
	for _, c := range []struct{ key, value string }{{"k", ""}, {"key", "value"},
		{strings.Repeat("k", 300), strings.Repeat("v", 5000)}} {
		b := make([]byte, RecordLen(len(c.key), len(c.value)))
		EncodeRecord(b, RecordHeader{Version: 1, Expiry: 2, Writer: 3}, []byte(c.key), []byte(c.value))
		f.Add(b)
		f.Add(append(b, 0, 0, 0))
		f.Add(b[:len(b)-1])
	}
	child := make([]byte, RecordLen(1, 1))
	EncodeRecord(child, RecordHeader{Version: 1, Parent: MakeLive(5, 0, 6, 7).AsParent()}, []byte("k"), []byte("v"))
	f.Add(child)
	chunk := make([]byte, RecordLen(0, 9))
	EncodeRecord(chunk, RecordHeader{Version: 1, Flags: FlagChunk}, nil, []byte("some part"))
	f.Add(chunk)
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := DumpRecord(discard{}, 0, b); err != nil {
			t.Fatal(err)
		}
		// Also bytes whose CRC happens to be good, which a fuzzer does not find.
		if len(b) >= RecordHeaderSize {
			fixed := bytes.Clone(b)
			if n := RecordHeaderSize + int(fixed[8]) + int(fixed[9])<<8; n <= len(fixed) {
				vlen := len(fixed) - n
				fixed[12], fixed[13], fixed[14], fixed[15] = byte(vlen), byte(vlen>>8), byte(vlen>>16), byte(vlen>>24)
				SetVersion(fixed, 1)
				parseRecord(t, fixed)
			}
		}
		parseRecord(t, b)
	})
}

func parseRecord(t *testing.T, b []byte) {
	r, err := ParseRecord(b)
	if err != nil {
		if !isCorrupt(err) {
			t.Fatalf("error %T %v, want *CorruptError", err, err)
		}
		return
	}
	if len(r.Key) != int(r.KeyLen) || len(r.Value) != int(r.ValueLen) || cap(r.Key) != len(r.Key) ||
		cap(r.Value) != len(r.Value) {
		t.Fatalf("key %d/%d value %d/%d", len(r.Key), r.KeyLen, len(r.Value), r.ValueLen)
	}
	if (len(r.Key) == 0) != (r.Flags&FlagChunk != 0) {
		t.Fatalf("key of %d bytes with flags %v", len(r.Key), r.Flags)
	}
	again := make([]byte, RecordLen(len(r.Key), len(r.Value)))
	EncodeRecord(again, r.RecordHeader, r.Key, r.Value)
	if !bytes.Equal(again, b[:len(again)]) {
		t.Fatal("a parsed record encodes to other bytes")
	}
	if err := DumpRecord(discard{}, 0, b); err != nil {
		t.Fatal(err)
	}
	if r.Flags&FlagManifest != 0 {
		_, _ = ParseManifest(r.Value, 0, 1<<32-1)
	}
}

func FuzzParseManifest(f *testing.F) {
	for _, n := range []int{0, 1, 2, 32} {
		m := Manifest{Len: uint64(n * ChunkSize), ID: 7}
		for i := range n {
			code, _ := CodeFor(RecordLen(0, ChunkSize))
			m.Chunks = append(m.Chunks, Chunk{Unit: uint32(i) * 40000, Code: code, Ver: uint16(i)})
		}
		b := make([]byte, ManifestLen(n))
		EncodeManifest(b, m)
		f.Add(b, uint32(0), uint32(1<<32-1))
		f.Add(b, uint32(1), uint32(100000))
	}
	m := Manifest{Len: 3 * ChunkPayload, Payload: ChunkPayload, ID: 7, Chunks: []Chunk{{0, 0xf0, 1}, {32768, 0xf0, 2},
		{65536, 0xf0, 3}}}
	b := make([]byte, ManifestLen(3))
	EncodeManifest(b, m)
	f.Add(b, uint32(0), uint32(1<<32-1))
	f.Fuzz(func(t *testing.T, b []byte, lo, hi uint32) {
		m, err := ParseManifest(b, lo, hi)
		if err != nil {
			if !isCorrupt(err) {
				t.Fatalf("error %T %v, want *CorruptError", err, err)
			}
			return
		}
		rest := m.Len
		for i, c := range m.Chunks {
			n := min(rest, uint64(m.Payload))
			rest -= n
			if c.Unit < lo || uint64(c.Unit)+uint64(UnitsOf(c.Code)) > uint64(hi) {
				t.Fatalf("chunk %+v outside [%d,%d)", c, lo, hi)
			}
			if SizeOf(c.Code) < RecordLen(0, int(n)) {
				t.Fatalf("chunk %d: place of %d bytes for %d", i, SizeOf(c.Code), RecordLen(0, int(n)))
			}
		}
		if rest != 0 {
			t.Fatalf("chunks miss %d of %d bytes", rest, m.Len)
		}
		again := make([]byte, ManifestLen(len(m.Chunks)))
		EncodeManifest(again, m)
		if !bytes.Equal(again, b) {
			t.Fatal("a parsed manifest encodes to other bytes")
		}
	})
}

func FuzzGroup(f *testing.F) {
	g := make([]byte, GroupSize)
	f.Add(g, uint32(0), uint32(0))
	for i := range g {
		g[i] = byte(i * 7)
	}
	f.Add(bytes.Clone(g), uint32(10), uint32(1<<30))
	f.Add(bytes.Repeat([]byte{0xff}, GroupSize), uint32(0), uint32(1<<32-1))
	f.Add([]byte{1, 2, 3}, uint32(0), uint32(1))
	f.Fuzz(func(t *testing.T, b []byte, lo, hi uint32) {
		if err := DumpGroup(discard{}, 0, b, lo, hi); err != nil {
			t.Fatal(err)
		}
		if err := DumpSegment(discard{}, 0, b, lo, hi); err != nil {
			t.Fatal(err)
		}
		if err := Group(b).Check(lo, hi); err != nil {
			if !isCorrupt(err) {
				t.Fatalf("error %T %v, want *CorruptError", err, err)
			}
			return
		}
		for i := range GroupSlots {
			if w := Group(b).Slot(i); w.Readable() &&
				(w.Unit() < lo || uint64(w.Unit())+uint64(w.Units()) > uint64(hi)) {
				t.Fatalf("slot %d: %v outside [%d,%d)", i, w, lo, hi)
			}
		}
	})
}

func FuzzParseRegion(f *testing.F) {
	b := make([]byte, RegionPageSize)
	f.Add(bytes.Clone(b))
	InitRegion(b, RegionHeader{PG: 1, Namespace: 2, Epoch: 3, RegionBytes: 1 << 30, IndexBytes: 1 << 20,
		Incarnation: 4})
	f.Add(bytes.Clone(b))
	f.Add(bytes.Clone(b[:regionHeaderLen]))
	f.Add(bytes.Clone(b[:40]))
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := DumpRegion(discard{}, b); err != nil {
			t.Fatal(err)
		}
		h, err := ParseRegion(b)
		if err != nil {
			if !isCorrupt(err) && !errors.Is(err, ErrMagic) && !errors.Is(err, ErrFormat) &&
				!errors.Is(err, ErrChecksum) {
				t.Fatalf("error %T %v is none of the four", err, err)
			}
			return
		}
		if h.IndexBytes < RegionPageSize || h.IndexBytes > h.RegionBytes {
			t.Fatalf("accepted %+v", h)
		}
		again := make([]byte, RegionPageSize)
		InitRegion(again, h)
		if !bytes.Equal(again[:regionHeaderLen], b[:regionHeaderLen]) {
			t.Fatal("a parsed region header encodes to other bytes")
		}
	})
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// The time of an access word may be set to one ahead, and of two the later one kept, also where their counter begins
// anew.
func TestAccessAhead(t *testing.T) {
	w := MakeLive(1, 0x155, 1, 1)
	const turn = AccessTickMillis << accessTimeBits
	for _, now := range []uint64{1_700_000_000_000, turn * 7, turn*7 - 1000, turn*7 + 1000} {
		a := MakeAccess(w, now, 77, now+10_000)
		for _, a := range []AccessWord{a, 0} {
			if a.AheadTicks(now) != 0 {
				t.Errorf("at %d: %#x is %d ticks ahead", now, uint64(a), a.AheadTicks(now))
			}
		}
		for _, ahead := range []uint64{AccessTickMillis, 1000, MaxPinMillis} {
			b := a.At(now + ahead)
			if got := uint64(b.AheadTicks(now)); got != ahead/AccessTickMillis {
				t.Errorf("at %d: %d ticks ahead, want %d", now, got, ahead/AccessTickMillis)
			}
			if b.PastTicks(now) != 0 || b.Count() != 77 || !b.Of(w) || !b.Expires() || b.Expired(now) ||
				!b.Expired(now+11_000) {
				t.Errorf("at %d: %#x, want as %#x", now, uint64(b), uint64(a))
			}
			if a.Later(b) != b || b.Later(a) != b || b.AheadTicks(now+ahead) != 0 {
				t.Errorf("at %d: the later of %#x and %#x is %#x", now, uint64(a), uint64(b), uint64(a.Later(b)))
			}
		}
	}
}

// Where nothing is known nothing lies ahead, whatever the time is; a word of that time says that it does.
func TestNothingAhead(t *testing.T) {
	const round = 1 << 26 * AccessTickMillis
	w := MakeLive(1, 7, 1, 1)
	for _, left := range []uint64{1000, 20 * 60_000, 70 * 60_000} {
		now := uint64(7*round - left)
		if n := AccessWord(0).AheadTicks(now); n != 0 {
			t.Errorf("%d ms before the times begin anew: %d ticks ahead", left, n)
		}
		if n := MakeAccess(w, now, 1, 0).At(7 * round).AheadTicks(now); uint64(n) != left/AccessTickMillis {
			t.Errorf("%d ms before the times begin anew: %d ticks ahead, want %d", left, n, left/AccessTickMillis)
		}
	}
}
