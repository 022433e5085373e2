package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

// chunkWindow is how many chunks of an Op are under way at a time.
const chunkWindow = 4

// chunkOf is the part of value that the i-th chunk holds which the Op writes.
func (o *Op) chunkOf(value []byte, i int) []byte {
	n := o.Route.PG.payload()
	return value[i*n : min((i+1)*n, len(value))]
}

func (o *Op) readChunks(manifest []byte) Action {
	pg := o.Route.PG
	m, err := layout.ParseManifest(manifest, pg.HeapLo, pg.HeapHi)
	if err != nil {
		return o.finish(err)
	}
	if len(m.Chunks) == 0 {
		// Nothing would be posted; no writer makes one.
		return o.finish(&layout.CorruptError{What: "manifest", Off: 8, Check: "chunk count", Want: 1})
	}
	o.Record.Key = o.Key // the record's own may lie where a chunk is read to
	o.chunksOf(&m)
	switch {
	case o.InPlace() && o.showChunks():
		return o.post(stepReadChunks)
	case o.Part != nil && !o.Part.InPlace:
		return o.gottenPart(m)
	}
	return o.copyChunks()
}

// copyChunks reads the chunks to memory of the caller, or into buffers.
func (o *Op) copyChunks() Action {
	if o.Kind == Get && o.readLen >= o.from() {
		if b := o.env.Into(o, o.readLen); len(b) >= o.readLen {
			o.whole, o.lo, o.hi = b[:o.readLen], 0, o.readLen
			o.begin()
			return o.readWindow(0)
		}
	}
	return o.readBuffered()
}

// chunksOf makes the chunks of m those that are read.
func (o *Op) chunksOf(m *layout.Manifest) {
	o.need().readID = m.ID
	o.slotRead, o.windowed, o.chunksShown, o.parts = false, false, false, nil
	o.readLen, o.payload, o.readOffs = int(m.Len), int(m.Payload), o.readOffs[:0]
	for _, c := range m.Chunks {
		o.readOffs = append(o.readOffs, uint64(c.Unit)*layout.UnitSize)
	}
}

// readBuffered reads all chunks at once, into buffers of the Op.
func (o *Op) readBuffered() Action {
	o.begin()
	o.windowed = false
	for i, off := range o.readOffs {
		n := layout.RecordLen(0, min(o.readLen-i*o.payload, o.payload))
		o.add(Access{Verb: Read, Space: Heap, Replica: o.Route.PG.Reader(), Off: off, Buf: o.recBuf(1+i, n)})
	}
	return o.post(stepReadChunks)
}

// readWindow reads the chunks from first on that fit the window, in the round that has begun. A chunk that is wanted
// whole goes straight to its part of the caller's memory; another one, to a buffer, since its CRC covers all of it.
func (o *Op) readWindow(first int) Action {
	o.first, o.windowed = first, true
	for i := first; i < o.windowEnd(); i++ {
		k, lo := i-first, i*o.payload
		hi := min(lo+o.payload, o.readLen)
		a := Access{Verb: Read, Space: Heap, Replica: o.Route.PG.Reader(), Off: o.readOffs[i]}
		if o.values[k] = (Value{}); o.inOne || lo < o.lo || hi > o.hi {
			a.Buf = o.recBuf(1+k, layout.RecordLen(0, hi-lo))
		} else {
			o.values[k] = Value{Bytes: o.whole[lo-o.lo : hi-o.lo], chunk: true, id: o.readID, index: uint64(i)}
			a.Buf, a.Apart = o.recBuf(1+k, layout.RecordHeaderSize), uint8(1+k)
		}
		o.add(a)
	}
	return o.post(stepReadChunks)
}

// windowEnd is the chunk behind the window.
func (o *Op) windowEnd() int {
	return min(o.first+chunkWindow, (o.hi+o.payload-1)/o.payload)
}

// gotWindow judges the chunks of a window. If one that went to the caller is not as the manifest says, the window is
// read once more, to where a damaged one can be mended.
func (o *Op) gotWindow() Action {
	if o.stale() {
		o.env.Forget(o)
		return o.readGroup()
	}
	for i := o.first; i < o.windowEnd(); i++ {
		k := i - o.first
		if v := &o.values[k]; v.Bytes != nil {
			if r := (layout.Record{}); v.N != len(v.Bytes) || r.ParseApart(o.recAt(1+k), v.Bytes, v.CRC) != nil {
				o.inOne = true
				o.begin()
				return o.readWindow(o.first)
			}
			continue
		}
		r, err := o.chunkAt(o.recAt(1+k), i)
		if err != nil {
			return o.mendChunk(k, i, o.readOffs[i], err)
		}
		at := i * o.payload
		from, to := max(o.lo, at), min(o.hi, at+len(r.Value))
		copy(o.whole[from-o.lo:to-o.lo], r.Value[from-at:to-at])
	}
	if next := o.windowEnd(); next*o.payload < o.hi {
		o.begin()
		return o.readWindow(next)
	}
	o.Record.Value = o.whole
	return o.finish(nil)
}

func (o *Op) gotChunks() Action {
	switch {
	case o.windowed:
		return o.gotWindow()
	case o.chunksShown:
		return o.gotShown()
	}
	o.parts = o.parts[:0]
	for i, off := range o.readOffs {
		r, err := o.chunkAt(o.recAt(1+i), i)
		if err != nil {
			return o.mendChunk(i, i, off, err)
		}
		o.parts = append(o.parts, r.Value)
	}
	if o.Kind == Modify {
		r := o.Record
		return o.modify(&r)
	}
	return o.finish(nil)
}

// chunkAt parses the i-th chunk of the value that is being read, of the length that the manifest says.
func (o *Op) chunkAt(b []byte, i int) (layout.Record, error) {
	r, err := layout.ParseRecord(b)
	switch want := min(o.payload, o.readLen-i*o.payload); {
	case err != nil:
	case r.Flags&layout.FlagChunk == 0 || r.Version != o.readID || r.Expiry != uint64(i):
		err = &layout.CorruptError{What: "chunk", Check: "manifest id", Got: r.Version, Want: o.readID}
	case len(r.Value) != want:
		err = &layout.CorruptError{What: "chunk", Check: "length", Got: uint64(len(r.Value)), Want: uint64(want)}
	}
	return r, err
}

func (o *Op) inChunks() bool {
	if o.draft() != nil {
		return true
	}
	n := layout.RecordLen(len(o.Key), len(o.Value))
	return n > layout.MaxRecordSize || o.Whole != 0 && n > int(o.Whole)
}

func (o *Op) manifest() []byte {
	m := make([]byte, layout.ManifestLen(len(o.chunks)))
	n := uint64(len(o.Value))
	if d := o.draft(); d != nil {
		n = d.Len
	}
	layout.EncodeManifest(m, layout.Manifest{Len: n, Payload: uint32(o.Route.PG.payload()), ID: o.chunkID,
		Chunks: o.chunks})
	return m
}

func chunkWord(c layout.Chunk) layout.Word { return layout.MakeLive(c.Ver, 0, c.Code, c.Unit) }

func (o *Op) dropChunks(by func(*PG, layout.Word)) {
	if o.far == nil {
		return
	}
	for _, c := range o.chunks {
		by(o.Route.PG, chunkWord(c))
	}
	o.chunks, o.chunksWritten = o.chunks[:0], false
}

// prepareChunks takes places for the chunks and writes them everywhere. The
// Op comes back through start when Alloc or Post have been obeyed.
func (o *Op) prepareChunks() Action {
	if o.need().chunksWritten {
		return 0
	}
	d := o.draft()
	if d != nil && o.Part.Link {
		return o.finish(ErrDraft) // another placement group epoch has replicas that lack them
	}
	want := layout.ChunkCount(len(o.Value), o.Route.PG.payload())
	for i := len(o.chunks); i < want; i++ {
		code, _ := layout.CodeFor(layout.RecordLen(0, len(o.chunkOf(o.Value, i))))
		o.wantCode = code
		unit, ver, code, ok := o.env.Alloc(o.Route.PG, code)
		if !ok {
			return Alloc
		}
		o.chunks = append(o.chunks, layout.Chunk{Unit: unit, Code: code, Ver: ver})
	}
	if d == nil || o.chunkID == 0 {
		o.chunkID = o.env.Version(0)
	}
	return o.writeWindow(0)
}

// writeWindow writes the chunks from first on that fit the window.
func (o *Op) writeWindow(first int) Action {
	o.begin()
	o.first = first
	for i := first; i < min(first+chunkWindow, len(o.chunks)); i++ {
		p, h := o.chunkOf(o.Value, i), layout.RecordHeader{Version: o.chunkID, Flags: layout.FlagChunk,
			Expiry: uint64(o.base + i), Writer: o.env.Session()}
		k, n, apart := i-first, layout.RecordLen(0, len(p)), uint8(0)
		var b []byte
		if n < o.from() {
			b = o.recBuf(1+k, n)
			layout.EncodeRecord(b, h, nil, p)
		} else {
			b, apart = o.recBuf(1+k, layout.RecordHeaderSize), uint8(1+k)
			layout.EncodeHead(b, h, nil, len(p))
			o.values[k] = Value{Bytes: p, CRC: layout.HeadCRC(b)}
		}
		for r := range o.Route.PG.Replicas {
			o.add(Access{Verb: Write, Space: Heap, Replica: r, Off: uint64(o.chunks[i].Unit) * layout.UnitSize, Buf: b,
				Apart: apart})
		}
	}
	return o.post(stepWriteChunks)
}

// wroteWindow goes on when the chunks of a window are written everywhere.
func (o *Op) wroteWindow() Action {
	if next := o.first + chunkWindow; next < len(o.chunks) {
		return o.writeWindow(next)
	}
	o.chunksWritten = true
	switch {
	case o.draft() != nil:
		return o.wrotePart()
	case o.x == 0:
		return o.lockGroup()
	case o.Kind == Prepare:
		return o.place(nil) // a put, which needs nothing of the record before
	}
	return o.update()
}

// endUnlinked ends an Op that has taken x away, or has nothing to take away: whatever goes with x is the Op's, which
// nobody reuses before that. The manifests among it are read first, since their chunks go with them.
func (o *Op) endUnlinked() Action {
	o.begin()
	switch {
	case o.isSettled():
		for _, w := range o.manifestsMet() {
			o.readGone(w)
		}
	case o.x.Readable() && o.xFlags&HintManifest != 0:
		o.readGone(o.x)
	}
	if len(o.Accesses) > 0 {
		return o.post(stepReadManifest)
	}
	o.unlink()
	return o.decided()
}

// readGone adds a READ of w's record at the head.
func (o *Op) readGone(w layout.Word) {
	o.add(Access{Verb: Read, Space: Heap, Off: w.Off(), Buf: o.recBuf(len(o.Accesses), w.ReadLen())})
}

func (o *Op) gotManifest() Action {
	pg := o.Route.PG
	for i := range o.Accesses {
		r, err := layout.ParseRecord(o.recAt(i))
		if err != nil || r.Flags&layout.FlagManifest == 0 {
			continue
		}
		if m, err := layout.ParseManifest(r.Value, pg.HeapLo, pg.HeapHi); err == nil {
			for _, c := range m.Chunks {
				o.env.Unlinked(pg, chunkWord(c))
			}
		}
	}
	o.unlink()
	return o.decided()
}
