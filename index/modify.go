package index

import (
	"bytes"

	"github.com/kvd-project/kvd/internal/layout"
)

// modify computes the new record from cur (nil: the key is absent).
func (o *Op) modify(cur *layout.Record) Action {
	if cur != nil && o.isExpired(&cur.RecordHeader) {
		cur = nil
	}
	if cur != nil && cur.Stub && !o.Keeps && !o.holds(cur) {
		return o.readObject(cur)
	}
	if cur != nil && cur.Flags&layout.FlagManifest != 0 {
		// The whole value is needed; the caller reads chunks into Parts first.
		if len(o.need().parts) == 0 {
			o.Record = *cur
			return o.readChunks(cur.Value)
		}
		c := *cur
		c.Value = bytes.Join(o.parts, nil)
		c.Flags &^= layout.FlagManifest
		cur = &c
	}
	v, flags, exp, err := o.Modify(cur)
	if o.far != nil {
		o.parts = nil
	}
	switch {
	case err != nil && o.atA:
		return o.answerAfterSync(err)
	case err != nil:
		return o.finish(err)
	}
	o.dropPlace()
	o.Value, o.Flags, o.Expiry, o.stub = v, flags, exp, cur != nil && cur.Stub
	if o.stub {
		o.Value, o.Flags = bytes.Clone(cur.Value), cur.Flags
	}
	if o.x != 0 {
		return o.update()
	}
	return o.lockGroup()
}
