package keys

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/patient"
)

// JSON lines hold all that a store keeps of a key but for its version: scan --long writes them, and pipe reads them.

// eachItem calls fn with every key that o selects and what it holds, until fn returns false or fails. most is how many
// keys fn takes at most; 0: all. Values are read some at a time, so that long ones do not add up. Corrupt records are
// left out, as by patient.Keys.
func eachItem(ctx context.Context, s ctl.Store, o client.ScanOptions, most int,
	fn func(key []byte, it client.Item) (bool, error)) error {
	var batch []client.Op
	var damaged []error
	size, given, stopped := 0, 0, false
	read := func() (more bool, err error) {
		ops := batch
		batch, size, stopped = nil, 0, true
		if err := patient.Read(ctx, s, ops); err != nil {
			return false, err
		}
		for _, op := range ops {
			switch {
			case op.Err == nil:
				given++
				if more, err := fn(op.Key, op.Item); !more || err != nil {
					return false, err
				}
			case errors.Is(op.Err, client.ErrCorrupt):
				damaged = append(damaged, fmt.Errorf("key %.64q: %w", op.Key, op.Err))
			case !errors.Is(op.Err, client.ErrNotFound): // deleted or expired since it was listed
				return false, fmt.Errorf("key %.64q: %w", op.Key, op.Err)
			}
		}
		stopped = false
		return true, nil
	}
	o.KeysOnly = true
	err := patient.Keys(ctx, s, o, func(kv client.KV) (bool, error) {
		if len(batch) > 0 && size+kv.Len > ctl.BatchBytes {
			if more, err := read(); !more || err != nil {
				return false, err
			}
		}
		batch, size = append(batch, client.Op{Kind: client.OpGet, Key: kv.Key, Typed: true}), size+kv.Len
		if len(batch) < ctl.BatchKeys && (most == 0 || len(batch) < most-given) {
			return true, nil
		}
		return read()
	})
	if !stopped && (err == nil || errors.Is(err, client.ErrCorrupt)) {
		_, e := read()
		err = errors.Join(err, e)
	}
	return errors.Join(err, patient.LeftOut(damaged))
}
