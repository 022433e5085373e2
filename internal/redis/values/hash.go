package values

import (
	"bytes"
	"errors"
	"math"
	"math/big"
	"math/rand/v2"
	"strconv"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/glob"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/units"
)

var _ = oneKey(map[string]KeyFunc{
	"hdel":         cmdHDel,
	"hexists":      cmdHExists,
	"hget":         cmdHGet,
	"hgetall":      cmdHGetAll,
	"hincrby":      cmdHIncrBy,
	"hincrbyfloat": cmdHIncrByFloat,
	"hkeys":        cmdHKeys,
	"hlen":         cmdHLen,
	"hmget":        cmdHMGet,
	"hmset":        cmdHMSet,
	"hrandfield":   cmdHRandField,
	"hscan":        cmdHScan,
	"hset":         cmdHSet,
	"hsetnx":       cmdHSetNX,
	"hstrlen":      cmdHStrlen,
	"hvals":        cmdHVals,
})

// collectionError is the reply to an error of package collection, about the key of that name. Nothing was done.
// The key's name is in it only if the value is corrupt, which an operator has to find.
func collectionError(t client.Type, name []byte, err error) error {
	if errors.Is(err, collection.ErrTooLong) {
		return refusal("ERR kvd: " + t.String() + " longer than " + units.Bytes(collection.MaxLen) +
			", or than values may be: nothing was done")
	}
	return refusal("ERR kvd: corrupt " + t.String() + " at key " + strconv.Quote(Clip(name, 128)) +
		": nothing was done")
}

// editable is a copy of the collection's bytes to change, with room for grow bytes more, or errRoom. The value
// stays as it is if the command gives up: what may become too long, which is known behind the change, is not changed in
// own, where the value of the unit's last command may be.
// grow is an upper bound, in bytes, so a value near its limit may turn out to fit when it has been changed; setEdited
// decides.
func (k *Key) editable(grow int) (b []byte, err error) {
	n := len(k.Value) + grow
	if n <= min(k.MaxValue, collection.MaxLen) {
		return k.mutable(n)
	}
	if n > k.Room {
		k.Want = n
		return nil, ErrRoom
	}
	return append(make([]byte, 0, n), k.Value...), nil
}

// setEdited makes b, which editable made, the value, and deletes the key if nothing is left. The expiry stays. It
// refuses what is too long. b is the key's from here on.
func (k *Key) setEdited(t client.Type, b, name []byte) error {
	switch {
	case len(b) > min(k.MaxValue, collection.MaxLen):
		return collectionError(t, name, collection.ErrTooLong)
	case len(b) == 0:
		k.Delete()
	default:
		k.Own = b
		k.SetAs(t, b, k.Expires)
	}
	return nil
}

// roomFor is about how many bytes strings add to a collection at most, one by one.
func roomFor(texts [][]byte) int {
	n := 16
	for _, s := range texts {
		n += len(s) + 10
	}
	return n
}

// hash is the key's hash, empty if there is none.
// The caller has looked at the type. The hash lies in the value, and must not be changed.
func (k *Key) hash() collection.Hash { return collection.Hash(k.Value) }

// hashLen counts the fields.
func (k *Key) hashLen(name []byte) (n int, err error) {
	if err := k.typed(client.Hash); err != nil {
		return 0, err
	}
	if n, err = k.hash().Len(); err != nil {
		return 0, collectionError(client.Hash, name, err)
	}
	return n, nil
}

// hashField is the value of a field, nil if there is none.
// args are the command's: the key's name, and behind it the field. The value lies in the hash; an empty one is not nil.
func (k *Key) hashField(args [][]byte) (value []byte, err error) {
	if err := k.typed(client.Hash); err != nil {
		return nil, err
	}
	if value, err = k.hash().Get(args[2]); err != nil {
		return nil, collectionError(client.Hash, args[1], err)
	}
	return value, nil
}

// setFields sets fields, and returns how many of them are new. pairs are fields and values by turns. It copies the hash
// once for all of them.
func (k *Key) setFields(name []byte, pairs [][]byte) (added int, err error) {
	// The old values of fields that are set again make room, which is not known before: the bound is for none of them.
	b, err := k.editable(roomFor(pairs))
	if err != nil {
		return 0, err
	}
	h, added, err := collection.Hash(b).SetAll(pairs)
	if err != nil {
		return 0, collectionError(client.Hash, name, err)
	}
	return added, k.setEdited(client.Hash, h, name)
}

// cmdHSet replies with how many fields are new; those that were there have their new values all the same.
func cmdHSet(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := hset(k, args, "hset")
	if err != nil {
		return err
	}
	w.Int(int64(n))
	return nil
}

// cmdHMSet is HSET with the reply OK.
func cmdHMSet(k *Key, args [][]byte, w *resp.Writer) error {
	if _, err := hset(k, args, "hmset"); err != nil {
		return err
	}
	w.OK()
	return nil
}

// hset is both; name is for the error of a field without a value.
func hset(k *Key, args [][]byte, name string) (added int, err error) {
	if len(args)%2 != 0 {
		return 0, refusal("ERR wrong number of arguments for '" + name + "' command")
	}
	if err := k.typed(client.Hash); err != nil {
		return 0, err
	}
	return k.setFields(args[1], args[2:])
}

// cmdHSetNX writes nothing if the field is there, with any value.
func cmdHSetNX(k *Key, args [][]byte, w *resp.Writer) error {
	switch value, err := k.hashField(args); {
	case err != nil:
		return err
	case value != nil:
		w.Int(0)
	default:
		if _, err := k.setFields(args[1], args[2:]); err != nil {
			return err
		}
		w.Int(1)
	}
	return nil
}

// cmdHGet replies null both for a field and for a hash that is not there.
func cmdHGet(k *Key, args [][]byte, w *resp.Writer) error {
	value, err := k.hashField(args)
	if err != nil {
		return err
	}
	fieldOrNull(value, w)
	return nil
}

func fieldOrNull(value []byte, w *resp.Writer) {
	if value == nil {
		w.Null()
	} else {
		w.Bulk(value)
	}
}

// cmdHMGet passes over the hash once for all the fields. Up to 16 values need no memory of their own.
func cmdHMGet(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Hash); err != nil {
		return err
	}
	var few [16][]byte
	values, err := k.hash().GetAll(few[:0], args[2:])
	if err != nil {
		return collectionError(client.Hash, args[1], err)
	}
	w.Array(len(values))
	for _, v := range values {
		fieldOrNull(v, w)
	}
	return nil
}

// cmdHGetAll is a map in RESP3, and in RESP2 an array of fields and values by turns. Their order is that in which the
// fields came, which clients must not count on: Redis has another one for large hashes.
func cmdHGetAll(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := k.hashLen(args[1])
	if err != nil {
		return err
	}
	w.Map(n)
	for field, value := range k.hash().All() {
		w.Bulk(field)
		w.Bulk(value)
	}
	return nil
}

// cmdHKeys and cmdHVals have the same order, so that a client may put them side by side if nobody has written in
// between.
func cmdHKeys(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := k.hashLen(args[1])
	if err != nil {
		return err
	}
	w.Array(n)
	for field := range k.hash().All() {
		w.Bulk(field)
	}
	return nil
}

func cmdHVals(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := k.hashLen(args[1])
	if err != nil {
		return err
	}
	w.Array(n)
	for _, value := range k.hash().All() {
		w.Bulk(value)
	}
	return nil
}

// cmdHLen walks the hash: its number of fields is not kept.
func cmdHLen(k *Key, args [][]byte, w *resp.Writer) error {
	n, err := k.hashLen(args[1])
	if err != nil {
		return err
	}
	w.Int(int64(n))
	return nil
}

// cmdHStrlen is 0 for a field that is not there, as for an empty value.
func cmdHStrlen(k *Key, args [][]byte, w *resp.Writer) error {
	value, err := k.hashField(args)
	if err != nil {
		return err
	}
	w.Int(int64(len(value)))
	return nil
}

func cmdHExists(k *Key, args [][]byte, w *resp.Writer) error {
	value, err := k.hashField(args)
	if err != nil {
		return err
	}
	w.Int(Bit(value != nil))
	return nil
}

// cmdHDel writes only if there is a field to delete.
func cmdHDel(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Hash); err != nil {
		return err
	}
	b, err := k.editable(0)
	if err != nil {
		return err
	}
	h, n, err := collection.Hash(b).Delete(args[2:])
	if err != nil {
		return collectionError(client.Hash, args[1], err)
	}
	if n > 0 {
		if err := k.setEdited(client.Hash, h, args[1]); err != nil {
			return err
		}
	}
	w.Int(int64(n))
	return nil
}

// cmdHIncrBy parses the increment before it looks at the key, as Redis does.
func cmdHIncrBy(k *Key, args [][]byte, w *resp.Writer) error {
	by, ok := resp.ParseInt(args[3])
	if !ok {
		return ErrNotInt
	}
	value, err := k.hashField(args)
	if err != nil {
		return err
	}
	old := int64(0)
	if value != nil {
		if old, ok = resp.ParseInt(value); !ok {
			return refusal("ERR hash value is not an integer")
		}
	}
	if by > 0 && old > math.MaxInt64-by || by < 0 && old < math.MinInt64-by {
		return errOverflow
	}
	var digits [20]byte
	if err := k.setField(args, strconv.AppendInt(digits[:0], old+by, 10)); err != nil {
		return err
	}
	w.Int(old + by)
	return nil
}

// setField sets the field that args names, in a hash that has been looked at.
// Behind an error the hash is as it was.
func (k *Key) setField(args [][]byte, value []byte) error {
	b, err := k.editable(len(args[2]) + len(value) + 2*10 + 16)
	if err != nil {
		return err
	}
	h, _, err := collection.Hash(b).Set(args[2], value)
	if err != nil {
		return collectionError(client.Hash, args[1], err)
	}
	return k.setEdited(client.Hash, h, args[1])
}

// cmdHIncrByFloat counts as INCRBYFLOAT does. The sum is written as text, so that the field may be read as any other.
func cmdHIncrByFloat(k *Key, args [][]byte, w *resp.Writer) error {
	by, ok := parseLongDouble(args[3])
	if !ok {
		return ErrNotFloat
	}
	if by.IsInf() {
		return refusal("ERR value is NaN or Infinity")
	}
	value, err := k.hashField(args)
	if err != nil {
		return err
	}
	old := new(big.Float).SetPrec(number.LongDoubleBits)
	if value != nil {
		if old, ok = parseLongDouble(value); !ok {
			return refusal("ERR hash value is not a float")
		}
	}
	var room [64]byte
	digits, ok := appendSum(room[:0], old, by)
	if !ok {
		return errNotFinite
	}
	if err := k.setField(args, digits); err != nil {
		return err
	}
	w.Bulk(digits)
	return nil
}

// randomCount parses the count of HRANDFIELD and SRANDMEMBER, of which a negative one allows repetitions.
func randomCount(b []byte) (n int64, err error) {
	n, ok := resp.ParseInt(b)
	switch {
	case !ok:
		return 0, ErrNotInt
	case n == math.MinInt64:
		return 0, refusal("ERR value is out of range, value must between -9223372036854775807 and 9223372036854775807")
	}
	return n, nil
}

// randomPlaces chooses count places at random, or if count is negative so many of which some may be the same. Since
// a client's number must not make a reply of any length, one that would be longer than a collection may be is refused.
// places are the collection's, of which there is one at least, and are put in another order. bytes is how long the
// collection is.
func randomPlaces(places []collection.Place, count int64, bytes int) (chosen []collection.Place, err error) {
	n := int64(len(places))
	if count >= n {
		return places, nil
	}
	if count >= 0 {
		for i := range int(count) {
			j := i + rand.IntN(len(places)-i)
			places[i], places[j] = places[j], places[i]
		}
		return places[:count], nil
	}
	if each := int64(bytes)/n + 16; count < -collection.MaxLen/each {
		return nil, refusal("ERR kvd: the reply to that count would be longer than " + units.Bytes(collection.MaxLen))
	}
	chosen = make([]collection.Place, -count)
	for i := range chosen {
		chosen[i] = places[rand.IntN(len(places))]
	}
	return chosen, nil
}

// cmdHRandField replies with fields, and WITHVALUES with their values behind them: in RESP3 each pair is an array.
func cmdHRandField(k *Key, args [][]byte, w *resp.Writer) error {
	count := int64(1)
	p := OptionsOf(args[2:])
	if p.More() {
		var err error
		if count, err = randomCount(p.Str()); err != nil {
			return err
		}
	}
	withValues := p.Flag("withvalues")
	switch err := p.End(); {
	case err != nil:
		return err
	case withValues && (count < -math.MaxInt64/2 || count > math.MaxInt64/2):
		return refusal("ERR value is out of range")
	}
	n, err := k.hashLen(args[1])
	if err != nil {
		return err
	}
	var few [128]collection.Place
	places := k.hash().Places(few[:0])
	switch {
	case n == 0 && len(args) == 2:
		w.Null()
		return nil
	case n == 0:
		w.Array(0)
		return nil
	}
	if places, err = randomPlaces(places, count, len(k.Value)); err != nil {
		return err
	}
	switch {
	case len(args) == 2:
	case withValues && w.Proto != 3:
		w.Array(2 * len(places))
	default:
		w.Array(len(places))
	}
	for _, p := range places {
		field, value := k.hash().At(p)
		if withValues && w.Proto == 3 {
			w.Array(2)
		}
		w.Bulk(field)
		if withValues {
			w.Bulk(value)
		}
	}
	return nil
}

// scanArgs are what HSCAN, SSCAN and ZSCAN are told.
type scanArgs struct {
	cursor  uint64 // 0: from the start
	count   int64  // about so many elements, at least 1
	pattern []byte // nil: all
}

// parseScan reads the options behind a cursor. Redis looks at them when it knows that there is a collection of the
// type.
func parseScan(cursor uint64, opts [][]byte) (a scanArgs, err error) {
	a = scanArgs{cursor: cursor, count: 10}
	p := OptionsOf(opts)
	for p.More() {
		switch {
		case p.Option("count", 1):
			if a.count = p.Int(); a.count < 1 {
				p.Wrong()
			}
		case p.Option("match", 1):
			a.pattern = p.Str()
		default:
			p.Wrong()
		}
	}
	return a, p.End()
}

// scanOf is the part of HSCAN, SSCAN and ZSCAN before the scan; some is false if there is nothing to scan, which it has
// replied, or an error.
func (k *Key) scanOf(t client.Type, args [][]byte, w *resp.Writer) (a scanArgs, some bool, err error) {
	cursor, ok := ParseCursor(args[2])
	if !ok {
		return a, false, refusal("ERR invalid cursor")
	}
	if err := k.typed(t); err != nil {
		return a, false, err
	}
	if !k.Present {
		replyScan(0, nil, w)
		return a, false, nil
	}
	a, err = parseScan(cursor, args[3:])
	return a, err == nil, err
}

// replyScan is the reply of a scan, with the strings that it found.
// A cursor of 0 says that the scan is over, also with an empty reply.
func replyScan(next uint64, found [][]byte, w *resp.Writer) {
	w.Array(2)
	w.BulkString(strconv.FormatUint(next, 10))
	w.Array(len(found))
	for _, s := range found {
		w.Bulk(s)
	}
}

// cmdHScan gives a small hash all at once whatever COUNT says, and of a large one about as many fields. The pattern is
// applied behind that, so a reply may have none and still a cursor.
func cmdHScan(k *Key, args [][]byte, w *resp.Writer) error {
	a, some, err := k.scanOf(client.Hash, args, w)
	if !some {
		return err
	}
	var found [][]byte
	next, err := k.hash().Scan(a.cursor, a.count, func(field, value []byte) {
		if a.pattern == nil || glob.Match(a.pattern, field) {
			found = append(found, field, value)
		}
	})
	if err != nil {
		return collectionError(client.Hash, args[1], err)
	}
	replyScan(next, found, w)
	return nil
}

// ParseCursor reads a number as C's strtoul does, which is how Redis reads a cursor. It may have a sign, or be nothing
// at all; a zero byte ends it.
func ParseCursor(b []byte) (n uint64, ok bool) {
	b, _, _ = bytes.Cut(b, []byte{0})
	n, used, inRange := number.Unsigned(b, 10)
	return n, inRange && used == len(b) && (used == 0 || !number.IsSpace(b[0]))
}
