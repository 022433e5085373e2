package index

import (
	"github.com/kvd-project/kvd/internal/layout"
)

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
	o.need().readID = m.ID
	o.Record.Key = o.Key // the record's own may lie where a chunk is read to
	o.readOffs = o.readOffs[:0]
	o.begin()
	for i, c := range m.Chunks {
		b := o.recBuf(1+i, layout.SizeOf(c.Code))
		o.readOffs = append(o.readOffs, uint64(c.Unit)*layout.UnitSize)
		o.add(Access{Verb: Read, Space: Heap, Replica: pg.Reader(), Off: uint64(c.Unit) * layout.UnitSize, Buf: b})
	}
	return o.post(stepReadChunks)
}

func (o *Op) gotChunks() Action {
	n := len(o.readOffs)
	o.parts = o.parts[:0]
	for i := range n {
		r, err := o.chunkAt(o.recAt(1+i), i, n)
		if err != nil {
			return o.mendChunk(i, n, o.readOffs[i], err)
		}
		o.parts = append(o.parts, r.Value)
	}
	if o.Kind == Modify {
		r := o.Record
		return o.modify(&r)
	}
	return o.finish(nil)
}

// chunkAt parses the i-th of n chunks of the value that is being read.
func (o *Op) chunkAt(b []byte, i, n int) (layout.Record, error) {
	r, err := layout.ParseRecord(b)
	if err == nil && (r.Flags&layout.FlagChunk == 0 || r.Version != o.readID || r.Expiry != uint64(i) ||
		i < n-1 && len(r.Value) != layout.ChunkSize) {
		err = &layout.CorruptError{What: "chunk", Check: "manifest id", Got: r.Version, Want: o.readID}
	}
	return r, err
}

func (o *Op) inChunks() bool {
	n := layout.RecordLen(len(o.Key), len(o.Value))
	return n > layout.MaxRecordSize || o.Whole != 0 && n > int(o.Whole)
}

func (o *Op) manifest() []byte {
	m := make([]byte, layout.ManifestLen(len(o.chunks)))
	layout.EncodeManifest(m, layout.Manifest{Len: uint64(len(o.Value)), ID: o.chunkID, Chunks: o.chunks})
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
	want := layout.ChunkCount(len(o.Value))
	for i := len(o.chunks); i < want; i++ {
		p := o.Value[i*layout.ChunkSize : min((i+1)*layout.ChunkSize, len(o.Value))]
		code, _ := layout.CodeFor(layout.RecordLen(0, len(p)))
		o.wantCode = code
		unit, ver, code, ok := o.env.Alloc(o.Route.PG, code)
		if !ok {
			return Alloc
		}
		o.chunks = append(o.chunks, layout.Chunk{Unit: unit, Code: code, Ver: ver})
	}
	o.chunkID = o.env.Version(0)
	o.begin()
	for i, c := range o.chunks {
		p := o.Value[i*layout.ChunkSize : min((i+1)*layout.ChunkSize, len(o.Value))]
		b := o.recBuf(1+i, layout.RecordLen(0, len(p)))
		layout.EncodeRecord(b, layout.RecordHeader{Version: o.chunkID, Flags: layout.FlagChunk,
			Expiry: uint64(i), Writer: o.env.Session()}, nil, p)
		for r := range o.Route.PG.Replicas {
			o.add(Access{Verb: Write, Space: Heap, Replica: r, Off: uint64(c.Unit) * layout.UnitSize, Buf: b})
		}
	}
	return o.post(stepWriteChunks)
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
