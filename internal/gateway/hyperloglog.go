package gateway

import (
	"bytes"
	"fmt"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// HyperLogLogs are strings, in Redis's own representation. PFCOUNT keeps no estimate in the value, as Redis does: it
// stays a read.

const (
	errNoHLL      = "WRONGTYPE Key is not a valid HyperLogLog string value."
	errCorruptHLL = "INVALIDOBJ Corrupted HLL object detected"
)

// isHLL is k.typed for HyperLogLogs.
// It looks at the header only. Damage behind that is found by those who read it, and is errCorruptHLL.
func isHLL(k *key) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	if k.present && !collection.IsHyperLogLog(k.value) {
		return refusal(errNoHLL)
	}
	return nil
}

// hllRoom is more than a HyperLogLog ever takes.
const hllRoom = 16 << 10

// ownHLL is the key's HyperLogLog, a new one if there is none, in a buffer that may be written to.
// hllRoom is asked for at once, since adding may turn a sparse one into a dense one.
func ownHLL(k *key) (b []byte, err error) {
	if !k.present {
		return collection.NewHyperLogLog(), nil
	}
	return k.mutable(max(hllRoom, len(k.value)))
}

// cmdPFAdd replies 1 if the estimate may have changed, or the key was made, and writes only then.
func cmdPFAdd(k *key, args [][]byte, w *resp.Writer) error {
	if err := isHLL(k); err != nil {
		return err
	}
	b, err := ownHLL(k)
	if err != nil {
		return err
	}
	// PFADD without elements makes a key that is not there, as in Redis.
	changed := !k.present
	for _, e := range args[2:] {
		now, c, err := collection.AddHyperLogLog(b, e)
		if err != nil {
			return refusal(errCorruptHLL)
		}
		b, changed = now, changed || c
	}
	if changed {
		k.set(b, k.expires)
	}
	w.Int(bit(changed))
	return nil
}

// cmdPFCount of several keys is the estimate of their union.
func cmdPFCount(t Keys, args [][]byte, w *resp.Writer) error {
	t.load(args[1:]...)
	// An element counts once however many of the keys have counted it: registers are merged by their maxima.
	var r collection.HyperLogLogRegisters
	for _, name := range args[1:] {
		k := t.key(name)
		if err := isHLL(k); err != nil {
			return err
		}
		if k.present && r.Merge(k.value) != nil {
			return refusal(errCorruptHLL)
		}
	}
	w.Int(int64(r.Count()))
	return nil
}

// cmdPFMerge counts its destination as a source, too, and makes it dense if one of them is, as Redis does.
func cmdPFMerge(t Keys, args [][]byte, w *resp.Writer) error {
	t.load(args[1:]...)
	var r collection.HyperLogLogRegisters
	dense := false
	for _, name := range args[1:] {
		k := t.key(name)
		if err := isHLL(k); err != nil {
			return err
		}
		if !k.present {
			continue
		}
		dense = dense || collection.IsDenseHyperLogLog(k.value)
		if r.Merge(k.value) != nil {
			return refusal(errCorruptHLL)
		}
	}
	k := t.key(args[1])
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
	k.set(b, k.expires)
	w.OK()
	return nil
}

// cmdPFDebug is for tests that compare the representation with Redis's, and for the curious.
func cmdPFDebug(k *key, args [][]byte, w *resp.Writer) error {
	if !k.present {
		return refusal("ERR The specified key does not exist")
	}
	if err := isHLL(k); err != nil {
		return err
	}
	var r collection.HyperLogLogRegisters
	if r.Merge(k.value) != nil {
		return refusal(errCorruptHLL)
	}
	dense := collection.IsDenseHyperLogLog(k.value)
	switch {
	case fold(args[1], "getreg"):
		w.Array(len(r))
		for _, v := range r {
			w.Int(int64(v))
		}
		// In Redis these subcommands make the value dense on the way, which is a write.
		return makeDense(k)
	case fold(args[1], "encoding"):
		w.Simple(map[bool]string{true: "dense", false: "sparse"}[dense])
	case fold(args[1], "todense"):
		if err := makeDense(k); err != nil {
			return err
		}
		w.Int(bit(!dense))
	case fold(args[1], "decode"):
		if dense {
			return refusal("ERR HLL encoding is not sparse")
		}
		var s bytes.Buffer
		collection.EachHyperLogLogRun(k.value, func(n int, v uint8, long bool) {
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
		return refusal("ERR Unknown PFDEBUG subcommand '" + clip(args[1], len(args[1])) + "'")
	}
	return nil
}

// makeDense is what two of the subcommands do in Redis.
func makeDense(k *key) error {
	if collection.IsDenseHyperLogLog(k.value) {
		return nil
	}
	if hllRoom > k.room {
		k.want = hllRoom
		return errRoom
	}
	d, err := collection.DenseHyperLogLog(k.value)
	if err != nil {
		return refusal(errCorruptHLL)
	}
	k.set(d, k.expires)
	return nil
}
