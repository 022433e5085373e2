package archive

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/kvd-project/kvd/internal/layout"
)

// errKilled is what all calls say once the process that makes them is to be dead.
var errKilled = errors.New("killed")

// memory is a Destination in memory. After so many calls that change something it is dead.
type memory struct {
	mu    sync.Mutex
	files map[string][]byte
	calls int
	die   int  // at which call, from 1 on; 0: never
	after bool // the call that it dies in has happened
}

func newMemory() *memory { return &memory{files: map[string][]byte{}} }

// call performs do unless it is dead.
func (m *memory) call(do func() error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls++
	switch {
	case m.die != 0 && m.calls == m.die && m.after:
		_ = do()
		return errKilled
	case m.die != 0 && m.calls >= m.die:
		return errKilled
	}
	return do()
}

type memoryFile struct {
	m    *memory
	name string
	b    []byte
}

func (f *memoryFile) Write(p []byte) (int, error) {
	return len(p), f.m.call(func() error {
		f.b = append(f.b, p...)
		return nil
	})
}

func (f *memoryFile) Commit() error {
	return f.m.call(func() error {
		if _, ok := f.m.files[f.name]; ok {
			return fs.ErrExist
		}
		f.m.files[f.name] = f.b
		return nil
	})
}

func (f *memoryFile) Abort() {}

func (m *memory) String() string { return "memory:" }

func (m *memory) Create(_ context.Context, name string) (File, error) {
	return &memoryFile{m: m, name: name}, m.call(func() error { return CheckFileName(name) })
}

func (m *memory) PutIfAbsent(_ context.Context, name string, b []byte) error {
	return m.call(func() error {
		if _, ok := m.files[name]; ok {
			return fs.ErrExist
		}
		m.files[name] = bytes.Clone(b)
		return CheckFileName(name)
	})
}

func (m *memory) Delete(_ context.Context, name string) error {
	return m.call(func() error {
		delete(m.files, name)
		return nil
	})
}

func (m *memory) Read(_ context.Context, name string) (io.ReadCloser, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	b, ok := m.files[name]
	if !ok {
		return nil, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	return io.NopCloser(bytes.NewReader(b)), nil
}

func (m *memory) List(_ context.Context, prefix string) (all []Info, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(m.files)) {
		if strings.HasPrefix(name, prefix) {
			all = append(all, Info{Name: name, Bytes: int64(len(m.files[name]))})
		}
	}
	return all, nil
}

var began = time.Date(2026, 11, 22, 0, 30, 0, 0, time.UTC)

const began1 = "shop/20261122T003000Z-full/"

// someRecords are short and long ones, of all types, with and without notes and flags.
func someRecords(n int, longest int) []Record {
	r := rand.New(rand.NewPCG(1, 2))
	var all []Record
	for i := range n {
		flags := layout.Type(i % 6).Flags()
		if i%2 == 1 {
			flags |= layout.FlagUser
		}
		if i%3 == 1 {
			flags |= layout.FlagNote
		}
		v := make([]byte, flags.TailLen()+r.IntN(longest))
		if i%4 > 0 { // others compress
			for k := range v {
				v[k] = byte(r.Uint32())
			}
		}
		all = append(all, Record{Key: fmt.Appendf(nil, "key %d", i), Value: v, Len: len(v), Version: 1 + r.Uint64()/2,
			Expiry: uint64(i%2) * r.Uint64(), Flags: flags})
	}
	return all
}

// write makes a snapshot of records; segments are cut at most bytes.
func write(ctx context.Context, d Destination, all []Record, most int64) (*Manifest, error) {
	w, err := NewWriter(ctx, d, "shop", began)
	if err != nil {
		return nil, err
	}
	w.most = most
	s := w.Segment()
	for i := range all {
		if err := s.Add(ctx, &all[i]); err != nil {
			return nil, err
		}
	}
	if err := s.Close(); err != nil {
		return nil, err
	}
	return w.Commit(ctx, Manifest{Cluster: "c", T1: began.Add(time.Second), Writer: "test"})
}

// read reads all of the only snapshot.
func read(d Destination) ([]Record, error) {
	s, err := Open(context.Background(), d, "shop", "20261122T003000Z-full")
	if err != nil {
		return nil, err
	}
	var all []Record
	for i := range s.Segments {
		g, err := s.Segment(context.Background(), i)
		if err != nil {
			return all, err
		}
		for {
			r, err := g.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return all, errors.Join(err, g.Close())
			}
			c := Record{Key: bytes.Clone(r.Key), Len: r.Len, Version: r.Version, Expiry: r.Expiry, Flags: r.Flags}
			if c.Value, err = g.Value([]byte{}); err != nil {
				return all, errors.Join(err, g.Close())
			}
			all = append(all, c)
		}
		if err := g.Close(); err != nil {
			return all, err
		}
	}
	return all, nil
}

func same(a, b []Record) bool {
	return slices.EqualFunc(a, b, func(a, b Record) bool {
		return bytes.Equal(a.Key, b.Key) && bytes.Equal(a.Value, b.Value) && a.Len == b.Len && a.Version == b.Version &&
			a.Expiry == b.Expiry && a.Flags == b.Flags
	})
}

// All records come back, from memory and from a folder, with values longer than a block.
func TestRoundTrip(t *testing.T) {
	d, end, err := OpenFolder(&url.URL{Scheme: "file", Path: t.TempDir() + "/a"}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer end()
	want := someRecords(40, 700<<10)
	for _, d := range []Destination{newMemory(), d} {
		m, err := write(t.Context(), d, want, 2<<20)
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Segments) < 4 || m.Keys != 40 {
			t.Errorf("%d keys in %d segments", m.Keys, len(m.Segments))
		}
		for _, s := range m.Segments {
			if s.Bytes > 2<<20 {
				t.Errorf("%s has %d bytes", s.Name, s.Bytes)
			}
		}
		got, err := read(d)
		if err != nil || !same(got, want) {
			t.Fatalf("%v: other records: %v", d, err)
		}
		all, err := List(t.Context(), d, "")
		if err != nil || len(all) != 1 || !all[0].Complete || all[0].ID != m.ID || !all[0].Begun.Equal(began) {
			t.Errorf("List says %+v, %v", all, err)
		}
		if _, err := write(t.Context(), d, want[:1], MaxSegment); err != nil {
			t.Fatal(err)
		}
		if all, err = List(t.Context(), d, "shop"); err != nil || len(all) != 2 || all[0].ID !=
			"20261122T003001Z-full" {
			t.Errorf("a second snapshot of that moment: %+v, %v", all, err)
		}
	}
	to := newMemory()
	s, err := Open(t.Context(), d, "shop", "20261122T003000Z-full")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Copy(t.Context(), s, to, nil); err != nil {
			t.Fatal(err)
		}
		if got, err := read(to); err != nil || !same(got, want) {
			t.Errorf("a copy has other records: %v", err)
		}
	}
}

// A record that is longer than a segment has one of its own.
func TestLongerThanASegment(t *testing.T) {
	d, all := newMemory(), someRecords(5, 300<<10)
	m, err := write(t.Context(), d, all, 1<<10)
	if err != nil || len(m.Segments) != 5 {
		t.Fatalf("%v, %d segments, want 5", err, len(m.Segments))
	}
	if got, err := read(d); err != nil || !same(got, all) {
		t.Errorf("other records: %v", err)
	}
}

// refused wants an error that names the file.
func refused(t *testing.T, d Destination, file, what string) {
	t.Helper()
	_, err := read(d)
	var c *CorruptError
	if !errors.As(err, &c) {
		t.Errorf("%s: %v, want a CorruptError", what, err)
	} else if c.File != file {
		t.Errorf("%s: %v, want one of %s", what, err, file)
	}
}

// A file that ends early, or has one bit that is another, is refused whichever it is.
func TestEveryByteAndBit(t *testing.T) {
	d := newMemory()
	m, err := write(t.Context(), d, someRecords(12, 60), 600)
	if err != nil {
		t.Fatal(err)
	}
	files := []string{began1 + ManifestName, began1 + m.Segments[0].Name, began1 + m.Segments[1].Name}
	for _, name := range files {
		good := d.files[name]
		for i := range good {
			d.files[name] = good[:i]
			refused(t, d, name, fmt.Sprintf("%d of %d bytes", i, len(good)))
			for bit := range 8 {
				bad := bytes.Clone(good)
				bad[i] ^= 1 << bit
				d.files[name] = bad
				refused(t, d, name, fmt.Sprintf("bit %d of byte %d", bit, i))
			}
		}
		d.files[name] = append(bytes.Clone(good), good...)
		refused(t, d, name, "twice the file")
		d.files[name] = good
	}
	if _, err := read(d); err != nil {
		t.Errorf("the files as they were: %v", err)
	}
}

// sealed is a segment of one block as a hostile writer makes it: with good sums.
func sealed(uncompressed, compressed, records uint32, codec byte, payload []byte) []byte {
	b := append([]byte(magic), make([]byte, headerSize-4)...)
	binary.LittleEndian.PutUint32(b[4:], uncompressed)
	binary.LittleEndian.PutUint32(b[8:], compressed)
	binary.LittleEndian.PutUint32(b[12:], records)
	b[16] = codec
	b = append(b, payload...)
	binary.LittleEndian.PutUint32(b[17:], blockCRC(b))
	return b
}

// put puts the segment in the place of the only one, with a manifest that agrees.
func put(t *testing.T, d *memory, segment []byte) {
	t.Helper()
	s, err := Open(t.Context(), d, "shop", "20261122T003000Z-full")
	if err != nil {
		t.Fatal(err)
	}
	s.Segments[0].Bytes, s.Segments[0].CRC = int64(len(segment)), crc32.Checksum(segment, castagnoli)
	b, err := s.Manifest.encode()
	if err != nil {
		t.Fatal(err)
	}
	d.files[began1+ManifestName], d.files[began1+s.Segments[0].Name] = b, segment
}

// Lengths, counts and compressed bytes that somebody has made up are refused, and take no memory.
func TestHostileSegments(t *testing.T) {
	key := []byte("key")
	good := appendPut(nil, &Record{Key: key, Version: 1}, 0, 0)
	longer := appendPut(nil, &Record{Key: key, Version: 1}, 4, 3)
	uvarint := func(head []byte, n ...uint64) []byte {
		for _, v := range n {
			head = binary.AppendUvarint(head, v)
		}
		return append(head, make([]byte, 40)...)
	}
	enc, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	bomb := enc.EncodeAll(make([]byte, 64<<20), nil)
	if err := enc.Close(); err != nil {
		t.Fatal(err)
	}
	// A frame of one segment with a content size of 2^63.
	claims := append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0xe0}, 0, 0, 0, 0, 0, 0, 0, 0x80, 1, 0, 0)
	none := func(p []byte, records uint32) []byte { return sealed(uint32(len(p)), uint32(len(p)), records, 0, p) }
	d := newMemory()
	if _, err := write(t.Context(), d, []Record{{Key: key, Version: 1}}, MaxSegment); err != nil {
		t.Fatal(err)
	}
	put(t, d, none(good, 1))
	if _, err := read(d); err != nil {
		t.Fatalf("a segment as a writer makes it: %v", err)
	}
	for what, b := range map[string][]byte{
		"block of 4 GiB":              sealed(1<<32-1, uint32(len(good)), 1, 1, good),
		"payload of 4 GiB":            sealed(1<<32-1, 1<<32-1, 1, 0, good),
		"more bytes than it becomes":  sealed(4, uint32(len(good)), 1, 1, good),
		"no bytes":                    sealed(0, 0, 1, 0, nil),
		"no records":                  none(good, 0),
		"4 billion records":           none(good, 1<<32-1),
		"two records, and one there":  none(good, 2),
		"one record, and two there":   none(append(bytes.Clone(good), good...), 1),
		"codec 2":                     sealed(uint32(len(good)), uint32(len(good)), 1, 2, good),
		"a bomb of 64 MiB":            sealed(MaxBlock, uint32(len(bomb)), 1, 1, bomb),
		"a frame of 2^63 bytes":       sealed(MaxBlock, uint32(len(claims)), 1, 1, claims),
		"no zstd":                     sealed(MaxBlock, uint32(len(good)), 1, 1, good),
		"key of 2^63 bytes":           none(uvarint([]byte{kindPut, 0}, 1<<63, 0, 0), 1),
		"key of 2^64-1 bytes":         none(uvarint([]byte{kindPut, 0}, 1<<64-1, 0, 0), 1),
		"no key":                      none(uvarint([]byte{kindPut, 0}, 0, 0, 0), 1),
		"value of 2^63 bytes":         none(uvarint([]byte{kindPut, 0}, 1, 1<<63, 1), 1),
		"value of 1 GiB":              none(uvarint([]byte{kindPut, 0}, 1, 1<<30, 1), 1),
		"part longer than the value":  none(uvarint([]byte{kindPut, 0}, 1, 1, 2), 1),
		"part of 2^63 bytes":          none(uvarint([]byte{kindPut, 0}, 1, 1, 1<<63), 1),
		"a number without an end":     none(append([]byte{kindPut, 0}, bytes.Repeat([]byte{0xff}, 40)...), 1),
		"value that does not go on":   none(appendPut(nil, &Record{Key: key, Version: 1}, 500<<20, 3), 1),
		"goes on, nothing began":      none(appendContinued(nil, 3), 1),
		"goes on for 2^63 bytes":      none(uvarint([]byte{kindContinued}, 1<<63), 1),
		"goes on with nothing":        none([]byte{kindContinued, 0, 0, 0}, 1),
		"begins within another":       none(append(appendPut(nil, &Record{Key: key, Version: 1}, 9, 3), good...), 2),
		"goes on beyond its value":    none(append(longer, appendContinued(nil, 9)...), 2),
		"a tombstone":                 none(append([]byte{2}, good[1:]...), 1),
		"kind 0":                      none(append([]byte{0}, good[1:]...), 1),
		"flags of a manifest":         none(append([]byte{kindPut, byte(layout.FlagManifest)}, good[2:]...), 1),
		"flags of an intent":          none(append([]byte{kindPut, byte(layout.FlagIntent)}, good[2:]...), 1),
		"a tail that is not there":    none(append([]byte{kindPut, byte(layout.FlagNote)}, good[2:]...), 1),
		"version 0":                   none(appendPut(nil, &Record{Key: key}, 0, 0), 1),
		"a block more than there are": append(none(good, 1), none(good, 1)...),
	} {
		put(t, d, b)
		refused(t, d, began1+"seg-000001.kvs", what)
	}
}

// A manifest that names what is not the snapshot's is refused, though its sum is right.
func TestHostileManifests(t *testing.T) {
	d := newMemory()
	m, err := write(t.Context(), d, someRecords(3, 10), MaxSegment)
	if err != nil {
		t.Fatal(err)
	}
	info := m.Segments[0]
	for what, change := range map[string]func(m *Manifest){
		"../x":                func(m *Manifest) { m.Segments[0].Name = "../20261122T003000Z-full/seg-000001.kvs" },
		"/etc/passwd":         func(m *Manifest) { m.Segments[0].Name = "/etc/passwd" },
		"..":                  func(m *Manifest) { m.Segments[0].Name = ".." },
		"MANIFEST.json":       func(m *Manifest) { m.Segments[0].Name = ManifestName },
		"no name":             func(m *Manifest) { m.Segments[0].Name = "" },
		"name with a NUL":     func(m *Manifest) { m.Segments[0].Name = "seg-000001.kvs\x00" },
		"a line more":         func(m *Manifest) { m.Segments[0].Name = "seg-000001.kvs\n" },
		"twice":               func(m *Manifest) { m.Segments, m.Keys = []SegmentInfo{info, info}, 6 },
		"-1 bytes":            func(m *Manifest) { m.Segments[0].Bytes = -1 },
		"2^63-1 bytes":        func(m *Manifest) { m.Segments[0].Bytes = 1<<63 - 1 },
		"2^63-1 records":      func(m *Manifest) { m.Segments[0].Records, m.Keys = 1<<63-1, 1<<63-1 },
		"-1 records":          func(m *Manifest) { m.Segments[0].Records, m.Keys = -1, -1 },
		"other keys":          func(m *Manifest) { m.Keys++ },
		"left out -1":         func(m *Manifest) { m.LeftOut = -1 },
		"another id":          func(m *Manifest) { m.ID = "20261122T003001Z-full" },
		"an id with a path":   func(m *Manifest) { m.ID = "../x" },
		"another namespace":   func(m *Manifest) { m.Namespace.Name = "other" },
		"a base":              func(m *Manifest) { m.Base = "20261122T003000Z-full" },
		"a cut":               func(m *Manifest) { m.Consistency = "cut" },
		"format 2":            func(m *Manifest) { m.Format = "kvsnap/2" },
		"a million of others": func(m *Manifest) { m.Segments = make([]SegmentInfo, maxSegments+1) },
	} {
		c := *m
		c.Segments = slices.Clone(m.Segments)
		change(&c)
		b, err := c.encode()
		if err != nil {
			t.Fatal(err)
		}
		d.files[began1+ManifestName] = b
		refused(t, d, began1+ManifestName, what)
	}
	// Fields of later versions are let pass.
	b, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	body := append([]byte(`{"later":[1],`), b[1:len(b)-sumLen]...)
	d.files[began1+ManifestName] = fmt.Appendf(body, "%s%08x\"}\n", sumStart, crc32.Checksum(body, castagnoli))
	if _, err := read(d); err != nil {
		t.Errorf("a field more: %v", err)
	}
	for _, id := range []string{"..", "../x", "20261122T003000Z-full/..", "20261322T003000Z-full", "x"} {
		if _, err := Open(t.Context(), d, "shop", id); err == nil || !strings.Contains(err.Error(), "no id") {
			t.Errorf("id %q: %v", id, err)
		}
	}
	for _, name := range []string{"..", ".", "", "a/b", "../a", strings.Repeat("a", 65), "A"} {
		if _, err := Open(t.Context(), d, name, ""); err == nil || !strings.Contains(err.Error(), "no name") {
			t.Errorf("namespace %q: %v", name, err)
		}
	}
}

// A writer may die at each call: there is never a manifest without its segments, and a snapshot is there only whole.
func TestKilledAtEveryCall(t *testing.T) {
	all := someRecords(6, 3000)
	whole := newMemory()
	if _, err := write(t.Context(), whole, all, 5000); err != nil {
		t.Fatal(err)
	}
	if whole.calls < 8 {
		t.Fatalf("%d calls are too few to try", whole.calls)
	}
	for die := 1; die <= whole.calls; die++ {
		for _, after := range []bool{false, true} {
			d := newMemory()
			d.die, d.after = die, after
			if _, err := write(t.Context(), d, all, 5000); !errors.Is(err, errKilled) {
				t.Fatalf("dead at call %d: %v", die, err)
			}
			d.die = 0
			_, there := d.files[began1+ManifestName]
			if want := after && die == whole.calls; there != want {
				t.Errorf("dead at call %d, after it %v: a manifest is there: %v", die, after, there)
			}
			got, err := read(d)
			if there && (err != nil || !same(got, all)) {
				t.Errorf("dead at call %d: other records: %v", die, err)
			}
			if !there && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("dead at call %d: %v, want that it is not there", die, err)
			}
		}
	}
	// The same when a snapshot is taken away.
	for die := 1; ; die++ {
		d := newMemory()
		if _, err := write(t.Context(), d, all, 5000); err != nil {
			t.Fatal(err)
		}
		d.calls, d.die = 0, die
		err := removeSnapshot(t.Context(), d, began1)
		d.die = 0
		if err == nil {
			if len(d.files) > 0 {
				t.Errorf("%d files stay", len(d.files))
			}
			return
		}
		if _, there := d.files[began1+ManifestName]; there {
			if got, err := read(d); err != nil || !same(got, all) {
				t.Errorf("dead at call %d of the removal: %v", die, err)
			}
		}
	}
}
