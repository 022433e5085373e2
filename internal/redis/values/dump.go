package values

import (
	"errors"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/rdb"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"dump":           cmdDump,
	"restore":        cmdRestore,
	"restore-asking": cmdRestore,
})

// A payload is Redis's: type and value as in an RDB file, the version of that, and a checksum (package rdb). So values
// move between this store and Redis in both directions, as long as neither has a kind of value that the other has not.

// cmdDump returns a value as RESTORE of this store and of Redis takes it. Its expiry is not in it.
func cmdDump(k *Key, args [][]byte, w *resp.Writer) error {
	if !k.Present {
		w.Null()
		return nil
	}
	v, err := partsOf(k.Type, k.Value)
	if err != nil {
		return collectionError(k.Type, args[1], err)
	}
	w.Bulk(rdb.Append(nil, v))
	return nil
}

// restoreArgs are the options of RESTORE. The time of the last use is checked, and means nothing here.
type restoreArgs struct {
	replace, absolute bool // REPLACE; ABSTTL: the time is a Unix time
}

// parseRestore reads what is behind the payload.
func parseRestore(args [][]byte) (a restoreArgs, err error) {
	idle, freq := false, false
	p := OptionsOf(args[4:])
	for p.More() {
		switch {
		case p.Flag("replace"):
			a.replace = true
		case p.Flag("absttl"):
			a.absolute = true
		// Redis takes either of them, as its policy is, and not both.
		case !freq && p.Option("idletime", 1):
			if idle = true; p.Int() < 0 {
				p.Refuse("ERR Invalid IDLETIME value, must be >= 0")
			}
		case !idle && p.Option("freq", 1):
			freq = true
			if n := p.Int(); n < 0 || n > 255 {
				p.Refuse("ERR Invalid FREQ value, must be >= 0 and <= 255")
			}
		default:
			p.Wrong()
		}
	}
	return a, p.End()
}

// restoreRatio is more times than a payload's length its value can have, in memory, by compression or by being in many
// parts.
const restoreRatio = 300

// mostRestored bounds what a payload's value can take in memory. That of a stream says once which fields many entries
// have. It is in bytes. A payload is the client's, and a few bytes of it could ask for gigabytes.
func mostRestored(payload []byte) int {
	most := restoreRatio * len(payload)
	if rdb.IsStream(payload) {
		most = max(most, collection.MaxLen)
	}
	return most
}

// cmdRestore looks at things in Redis's order: the key, the time, the checksum, and then the value.
// The time is in ms, from now on or as Unix time with ABSTTL, and 0 is never. A time that has passed leaves no key.
func cmdRestore(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := parseRestore(args)
	if err != nil {
		return err
	}
	if !a.replace && k.Present {
		return refusal("BUSYKEY Target key name already exists.")
	}
	ttl, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	if ttl < 0 {
		return refusal("ERR Invalid TTL value, must be >= 0")
	}
	// Parse is bounded by the room that there is. If that was the reason to fail, the command runs again with all that
	// it may need.
	v, err := rdb.Parse(args[3], k.Room)
	if most := min(k.MaxValue, mostRestored(args[3])); errors.Is(err, rdb.ErrFormat) && k.Room < most {
		k.Want = most // it may be only that there is little room
		return ErrRoom
	}
	var value []byte
	var t client.Type
	if err == nil {
		t, value, err = valueOf(v)
	}
	switch {
	case errors.Is(err, rdb.ErrChecksum):
		return refusal("ERR DUMP payload version or checksum are wrong")
	case errors.Is(err, rdb.ErrFormat):
		return refusal("ERR Bad data format")
	case err != nil:
		return collectionError(t, args[1], err)
	}
	if ttl != 0 && !a.absolute {
		ttl += k.Now
	}
	k.Flags = 0
	k.SetAs(t, value, ttl)
	w.OK()
	return nil
}
