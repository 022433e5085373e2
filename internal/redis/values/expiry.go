package values

import (
	"math"

	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"expire":          cmdExpire,
	"expireat":        cmdExpireAt,
	"expiretime":      cmdExpireTime,
	"memory|usage":    cmdMemoryUsage,
	"object|freq":     cmdFreq,
	"object|refcount": cmdRefcount,
	"persist":         cmdPersist,
	"pexpire":         cmdPExpire,
	"pexpireat":       cmdPExpireAt,
	"pexpiretime":     cmdPExpireTime,
	"pttl":            cmdPTTL,
	"ttl":             cmdTTL,
	"type":            cmdType,
})

// cmdType names types as Redis does.
func cmdType(k *Key, _ [][]byte, w *resp.Writer) error {
	if k.Present {
		w.Simple(k.Type.String())
	} else {
		w.Simple("none")
	}
	return nil
}

// ttl tells when the key expires: -2 if there is none, -1 if never. Seconds are rounded to the
// nearest, as in Redis.
func ttl(k *Key, w *resp.Writer, absolute, millis bool) {
	switch at := k.Expires; {
	case !k.Present:
		w.Int(-2)
	case at == 0:
		w.Int(-1)
	default:
		if !absolute {
			at = max(at-k.Now, 0)
		}
		if !millis {
			at = at/1000 + Bit(at%1000 >= 500)
		}
		w.Int(at)
	}
}

// cmdTTL and the others that tell an expiry differ in their unit, and in whether it counts from now.
func cmdTTL(k *Key, _ [][]byte, w *resp.Writer) error         { ttl(k, w, false, false); return nil }
func cmdPTTL(k *Key, _ [][]byte, w *resp.Writer) error        { ttl(k, w, false, true); return nil }
func cmdExpireTime(k *Key, _ [][]byte, w *resp.Writer) error  { ttl(k, w, true, false); return nil }
func cmdPExpireTime(k *Key, _ [][]byte, w *resp.Writer) error { ttl(k, w, true, true); return nil }

// cmdPersist writes only if there is an expiry to remove.
func cmdPersist(k *Key, _ [][]byte, w *resp.Writer) error {
	yes := k.Present && k.Expires != 0
	if yes {
		k.set(k.Value, 0)
	}
	w.Int(Bit(yes))
	return nil
}

// cmdExpire and the others that set an expiry differ likewise. Each rewrites the record, since the expiry is a part of
// it.
func cmdExpire(k *Key, args [][]byte, w *resp.Writer) error {
	return expire(k, args, w, "expire", true, false)
}
func cmdPExpire(k *Key, args [][]byte, w *resp.Writer) error {
	return expire(k, args, w, "pexpire", false, false)
}
func cmdExpireAt(k *Key, args [][]byte, w *resp.Writer) error {
	return expire(k, args, w, "expireat", true, true)
}
func cmdPExpireAt(k *Key, args [][]byte, w *resp.Writer) error {
	return expire(k, args, w, "pexpireat", false, true)
}

// expire is the four commands that set the expiry. Redis's order of checks is kept: options,
// their combination, the number, and then the key. A time that has passed deletes the key and is
// answered with 1.
// A key that does not expire has, to GT and LT, the expiry at infinity.
func expire(k *Key, args [][]byte, w *resp.Writer, name string, seconds, absolute bool) error {
	var nx, xx, gt, lt bool
	p := OptionsOf(args[3:])
	for p.More() {
		switch {
		case p.Flag("nx"):
			nx = true
		case p.Flag("xx"):
			xx = true
		case p.Flag("gt"):
			gt = true
		case p.Flag("lt"):
			lt = true
		default:
			p.Refuse(refusal("ERR Unsupported option " + string(p.Str())))
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	switch {
	case nx && (xx || gt || lt):
		return refusal("ERR NX and XX, GT or LT options at the same time are not compatible")
	case gt && lt:
		return refusal("ERR GT and LT options at the same time are not compatible")
	}
	at, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	if seconds {
		if at > math.MaxInt64/1000 || at < math.MinInt64/1000 {
			return badExpire(name)
		}
		at *= 1000
	}
	if !absolute {
		if at > math.MaxInt64-k.Now {
			return badExpire(name)
		}
		at += k.Now
	}
	has := k.Expires != 0
	if !k.Present || nx && has || xx && !has || gt && (!has || at <= k.Expires) || lt && has && at >= k.Expires {
		w.Int(0)
		return nil
	}
	if at <= k.Now {
		k.Delete()
	} else {
		k.set(k.Value, at)
	}
	w.Int(1)
	return nil
}

// cmdRefcount is 1: no two keys share a value.
func cmdRefcount(k *Key, _ [][]byte, w *resp.Writer) error {
	if k.Present {
		w.Int(1)
	} else {
		w.Null()
	}
	return nil
}

// Adjust ends two of Redis's error texts.
const Adjust = " Please note that when switching between policies at runtime LRU and LFU data will take some time to " +
	"adjust."

// cmdFreq answers as a Redis whose policy is about time: counts of uses mean something to clients of the store alone.
func cmdFreq(k *Key, _ [][]byte, w *resp.Writer) error {
	if !k.Present {
		w.Null()
		return nil
	}
	return refusal("ERR An LFU maxmemory policy is not selected, access frequency not tracked." + Adjust)
}

const (
	// recordOverhead is what a record and its slot take beside key and value, in bytes; see internal/layout.
	recordOverhead = 48
	// RecordUnit is what the length of a record is rounded up to, in bytes.
	RecordUnit = 64
)

// cmdMemoryUsage estimates one copy of the record. SAMPLES is checked and ignored, since a
// string has nothing to sample.
// The unit is bytes. Each further copy takes as much, and the index its share besides.
func cmdMemoryUsage(k *Key, args [][]byte, w *resp.Writer) error {
	p := OptionsOf(args[3:])
	if p.Left() == 2 && p.Flag("samples") && p.Int() < 0 {
		p.Wrong()
	}
	if err := p.End(); err != nil {
		return err
	}
	if !k.Present {
		w.Null()
		return nil
	}
	n := recordOverhead + len(args[2]) + len(k.Value)
	w.Int(int64((n + RecordUnit - 1) / RecordUnit * RecordUnit))
	return nil
}
