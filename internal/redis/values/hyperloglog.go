package values

import (
	"bytes"
	"fmt"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"pfadd":   cmdPFAdd,
	"pfdebug": cmdPFDebug,
})

var _ = severalKeys(map[string]SeveralFunc{
	"pfcount": cmdPFCount,
	"pfmerge": cmdPFMerge,
})

// HyperLogLogs are strings, in Redis's own representation. PFCOUNT keeps no estimate in the value, as Redis does: it
// stays a read.

const (
	errNoHLL      = "WRONGTYPE Key is not a valid HyperLogLog string value."
	errCorruptHLL = "INVALIDOBJ Corrupted HLL object detected"
)

// isHLL is k.typed for HyperLogLogs.
// It looks at the header only. Damage behind that is found by those who read it, and is errCorruptHLL.
func isHLL(k *Key) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	if k.Present && !collection.IsHyperLogLog(k.Value) {
		return refusal(errNoHLL)
	}
	return nil
}

// hllRoom is more than a HyperLogLog ever takes.
const hllRoom = 16 << 10

// ownHLL is the key's HyperLogLog, a new one if there is none, in a buffer that may be written to.
// hllRoom is asked for at once, since adding may turn a sparse one into a dense one.
func ownHLL(k *Key) (b []byte, err error) {
	if !k.Present {
		return collection.NewHyperLogLog(), nil
	}
	return k.mutable(max(hllRoom, len(k.Value)))
}

// cmdPFAdd replies 1 if the estimate may have changed, or the key was made, and writes only then.
func cmdPFAdd(k *Key, args [][]byte, w *resp.Writer) error {
	if err := isHLL(k); err != nil {
		return err
	}
	b, err := ownHLL(k)
	if err != nil {
		return err
	}
	// PFADD without elements makes a key that is not there, as in Redis.
	changed := !k.Present
	for _, e := range args[2:] {
		now, c, err := collection.AddHyperLogLog(b, e)
		if err != nil {
			return refusal(errCorruptHLL)
		}
		b, changed = now, changed || c
	}
	if changed {
		k.set(b, k.Expires)
	}
	w.Int(Bit(changed))
	return nil
}

// cmdPFCount of several keys is the estimate of their union.
func cmdPFCount(t Keys, args [][]byte, w *resp.Writer) error {
	t.Load(args[1:]...)
	// An element counts once however many of the keys have counted it: registers are merged by their maxima.
	var r collection.HyperLogLogRegisters
	for _, name := range args[1:] {
		k := t.Key(name)
		if err := isHLL(k); err != nil {
			return err
		}
		if k.Present && r.Merge(k.Value) != nil {
			return refusal(errCorruptHLL)
		}
	}
	w.Int(int64(r.Count()))
	return nil
}

// cmdPFMerge counts its destination as a source, too, and makes it dense if one of them is, as Redis does.
func cmdPFMerge(t Keys, args [][]byte, w *resp.Writer) error {
	t.Load(args[1:]...)
	var r collection.HyperLogLogRegisters
	dense := false
	for _, name := range args[1:] {
		k := t.Key(name)
		if err := isHLL(k); err != nil {
			return err
		}
		if !k.Present {
			continue
		}
		dense = dense || collection.IsDenseHyperLogLog(k.Value)
		if r.Merge(k.Value) != nil {
			return refusal(errCorruptHLL)
		}
	}
	k := t.Key(args[1])
	b, err := ownHLL(k)
	if err != nil {
		return err
	}
	if dense {
		b, err = collection.DenseHyperLogLog(b)
	}
	if err == nil {
		b, err = r.AddTo(b)
	}
	if err != nil {
		return refusal(errCorruptHLL)
	}
	k.set(b, k.Expires)
	w.OK()
	return nil
}

// cmdPFDebug is for tests that compare the representation with Redis's, and for the curious.
func cmdPFDebug(k *Key, args [][]byte, w *resp.Writer) error {
	if !k.Present {
		return refusal("ERR The specified key does not exist")
	}
	if err := isHLL(k); err != nil {
		return err
	}
	var r collection.HyperLogLogRegisters
	if r.Merge(k.Value) != nil {
		return refusal(errCorruptHLL)
	}
	dense := collection.IsDenseHyperLogLog(k.Value)
	switch {
	case Fold(args[1], "getreg"):
		w.Array(len(r))
		for _, v := range r {
			w.Int(int64(v))
		}
		// In Redis these subcommands make the value dense on the way, which is a write.
		return makeDense(k)
	case Fold(args[1], "encoding"):
		w.Simple(map[bool]string{true: "dense", false: "sparse"}[dense])
	case Fold(args[1], "todense"):
		if err := makeDense(k); err != nil {
			return err
		}
		w.Int(Bit(!dense))
	case Fold(args[1], "decode"):
		if dense {
			return refusal("ERR HLL encoding is not sparse")
		}
		var s bytes.Buffer
		collection.EachHyperLogLogRun(k.Value, func(n int, v uint8, long bool) {
			switch {
			case v > 0:
				fmt.Fprintf(&s, "v:%d,%d ", v, n)
			case long:
				fmt.Fprintf(&s, "Z:%d ", n)
			default:
				fmt.Fprintf(&s, "z:%d ", n)
			}
		})
		w.Bulk(bytes.TrimSuffix(s.Bytes(), []byte(" ")))
	default:
		return refusal("ERR Unknown PFDEBUG subcommand '" + Clip(args[1], len(args[1])) + "'")
	}
	return nil
}

// makeDense is what two of the subcommands do in Redis.
func makeDense(k *Key) error {
	if collection.IsDenseHyperLogLog(k.Value) {
		return nil
	}
	if hllRoom > k.Room {
		k.Want = hllRoom
		return ErrRoom
	}
	d, err := collection.DenseHyperLogLog(k.Value)
	if err != nil {
		return refusal(errCorruptHLL)
	}
	k.set(d, k.Expires)
	return nil
}
