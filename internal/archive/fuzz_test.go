package archive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"testing"
)

// seeds are a segment and a manifest as a writer makes them.
func seeds(f *testing.F) (segment, manifest []byte, info SegmentInfo) {
	f.Helper()
	d := newMemory()
	m, err := write(f.Context(), d, someRecords(6, 300), MaxSegment)
	if err != nil {
		f.Fatal(err)
	}
	return d.files[began1+m.Segments[0].Name], d.files[began1+ManifestName], m.Segments[0]
}

func FuzzBlock(f *testing.F) {
	segment, _, _ := seeds(f)
	f.Add(segment)
	f.Fuzz(func(t *testing.T, p []byte) {
		var b block
		if err := b.read(bytes.NewReader(p)); err != nil {
			return
		}
		if len(b.plain) == 0 || len(b.plain) > MaxBlock || b.records < 1 || b.records > MaxBlock {
			t.Errorf("%d records in %d bytes", b.records, len(b.plain))
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add(appendPut(nil, &Record{Key: []byte("key"), Version: 1}, 9, 4))
	f.Add(appendContinued(nil, 5))
	f.Fuzz(func(t *testing.T, p []byte) {
		var r Record
		kind, n, err := parseRecord(p, &r)
		if err != nil {
			return
		}
		if n < leastRecord || n > len(p) {
			t.Fatalf("%d of %d bytes", n, len(p))
		}
		var again []byte
		if kind == kindPut {
			again = appendPut(nil, &r, r.Len, len(r.Value))
		} else {
			again = appendContinued(nil, len(r.Value))
		}
		copy(again[len(again)-len(r.Value):], r.Value)
		var same Record
		if _, _, err := parseRecord(again, &same); err != nil || !bytes.Equal(same.Value, r.Value) ||
			!bytes.Equal(same.Key, r.Key) || same.Version != r.Version || same.Expiry != r.Expiry {
			t.Errorf("%+v becomes %+v, %v", r, same, err)
		}
	})
}

// asManifest gives a body the sum that it needs.
func asManifest(body []byte) []byte {
	m := bytes.TrimSuffix(bytes.TrimSpace(body), []byte("}"))
	return fmt.Appendf(bytes.Clone(m), "%s%08x\"}\n", sumStart, crc32.Checksum(m, castagnoli))
}

func FuzzManifest(f *testing.F) {
	_, manifest, _ := seeds(f)
	f.Add(append(bytes.Clone(manifest[:len(manifest)-sumLen]), '}'))
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := parseManifest(asManifest(body), "shop", "20261122T003000Z-full")
		if err != nil {
			return
		}
		for _, s := range m.Segments {
			if CheckFileName(s.Name) != nil || s.Bytes > longestSegment {
				t.Errorf("%+v", s)
			}
		}
	})
}

// readHostile reads all of a segment, whatever it is.
func readHostile(t *testing.T, p []byte, info SegmentInfo) {
	s := newSegment(io.NopCloser(bytes.NewReader(p)), "x", info)
	for n := int64(0); ; n++ {
		r, err := s.Next()
		if errors.Is(err, io.EOF) {
			if n != info.Records || int64(len(p)) != info.Bytes {
				t.Errorf("%d records of %d", n, info.Records)
			}
			return
		}
		if err != nil {
			if c := (*CorruptError)(nil); !errors.As(err, &c) || c.Off > int64(len(p)) {
				t.Errorf("%v, want a place in %d bytes", err, len(p))
			}
			return
		}
		if err := r.check(); err != nil {
			t.Error(err)
		}
		want := r.Len
		v, err := s.Value(nil)
		if err == nil && len(v) != want || len(v) > want {
			t.Errorf("a value of %d bytes, want %d: %v", len(v), want, err)
		}
	}
}

func FuzzSegment(f *testing.F) {
	segment, _, info := seeds(f)
	f.Add(segment, info.Records, info.CRC)
	f.Fuzz(func(t *testing.T, p []byte, records int64, crc uint32) {
		p = bytes.Clone(p)
		// With sums that are right: those are no secret.
		for at := 0; len(p)-at >= headerSize; {
			n := int(p[at+8]) | int(p[at+9])<<8
			if n > len(p)-at-headerSize {
				break
			}
			q := p[at : at+headerSize+n]
			binary.LittleEndian.PutUint32(q[17:], blockCRC(q))
			at += len(q)
		}
		readHostile(t, p, SegmentInfo{Bytes: int64(len(p)), Records: records, CRC: crc})
	})
}

func FuzzArchive(f *testing.F) {
	segment, manifest, info := seeds(f)
	f.Add(manifest, segment)
	f.Fuzz(func(t *testing.T, manifest, segment []byte) {
		d := newMemory()
		d.files[began1+ManifestName], d.files[began1+info.Name] = manifest, segment
		all, err := read(d)
		if err == nil && len(all) == 0 && len(segment) == 0 && len(manifest) == 0 {
			t.Error("nothing is a snapshot")
		}
		for i := range all {
			if err := all[i].check(); err != nil {
				t.Error(err)
			}
		}
	})
}

// FuzzLock: whatever the file of a lock says, another can take the lock when its time is over.
func FuzzLock(f *testing.F) {
	f.Add(beatName(7), []byte(`{"holder":"x","millis":20000,"released":false}`))
	f.Add("LOCK/7.json", []byte("{}"))
	f.Fuzz(func(t *testing.T, name string, text []byte) {
		d := newMemory()
		d.files[name] = text
		l := &lock{d: d, holder: "a", every: minBeat}
		n, b, err := l.newest(t.Context())
		if bad := (*CorruptError)(nil); err != nil && !errors.As(err, &bad) {
			t.Fatal(err)
		}
		if n > 0 && name != beatName(n) || err != nil && b.Released {
			t.Errorf("file %q is number %d: %+v, %v", name, n, b, err)
		}
		if err := l.next(t.Context(), n, false); err != nil || l.n != n+1 {
			t.Errorf("number %d behind %d: %v", l.n, n, err)
		}
	})
}
