package values

import (
	"bytes"
	"math"
	"math/big"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = oneKey(map[string]KeyFunc{
	"append":      cmdAppend,
	"decr":        cmdDecr,
	"decrby":      cmdDecrBy,
	"del":         cmdDel,
	"exists":      cmdExists,
	"get":         cmdGet,
	"getdel":      cmdGetDel,
	"getex":       cmdGetEX,
	"getrange":    cmdGetRange,
	"getset":      cmdGetSet,
	"incr":        cmdIncr,
	"incrby":      cmdIncrBy,
	"incrbyfloat": cmdIncrByFloat,
	"mget":        cmdMGet,
	"mset":        cmdMSet,
	"psetex":      cmdPSetEX,
	"set":         cmdSet,
	"setex":       cmdSetEX,
	"setnx":       cmdSetNX,
	"setrange":    cmdSetRange,
	"strlen":      cmdStrlen,
	"substr":      cmdGetRange,
	"touch":       cmdExists,
	"unlink":      cmdDel,
})

const (
	// The texts are Redis's, since clients look for them.
	ErrSyntax            = args.Syntax
	errWrongType refusal = "WRONGTYPE Operation against a key holding the wrong kind of value"
	ErrNotInt            = args.NotInt
	ErrNotFloat          = args.NotFloat
	errNoKey     refusal = "ERR no such key"
	// errSameObject: COPY and MOVE of a key to itself.
	errSameObject refusal = "ERR source and destination objects are the same"
	errTooLong    refusal = "ERR string exceeds maximum allowed size (proto-max-bulk-len)"
	errOffset     refusal = "ERR offset is out of range"
	errOverflow   refusal = "ERR increment or decrement would overflow"
	errNotFinite  refusal = "ERR increment would produce NaN or Infinity"
)

// Fold compares with a lower-case word.
func Fold(b []byte, word string) bool { return args.Is(b, word) }

// refusal is what a command says that is not performed, in Redis's words.
type refusal = args.Refusal

// OptionsOf reads arguments.
func OptionsOf(list [][]byte) args.Parser { return args.New(list) }

// WriteRefusal replies with what a command was refused for, if it was. A refusal for want of room has no reply yet.
func WriteRefusal(w *resp.Writer, err error) {
	if err != nil && err != ErrRoom {
		w.Error(err.Error())
	}
}

// SetArgs are the options of SET and GETEX.
type SetArgs struct {
	NX, XX, Get, KeepTTL, persist bool
	Expires                       int64 // Unix ms; 0: none given
}

// expiryUnits are the options that give an expiry.
var expiryUnits = [...]struct {
	word              string
	seconds, absolute bool
}{{"ex", true, false}, {"px", false, false}, {"exat", true, true}, {"pxat", false, true}}

// expiryUnit reads such an option with a number behind it. unit is its place, -1 before the first one: it may be given
// again, and no other one.
func expiryUnit(p *args.Parser, unit *int) bool {
	for i := range expiryUnits {
		if (*unit < 0 || *unit == i) && p.Option(expiryUnits[i].word, 1) {
			*unit = i
			return true
		}
	}
	return false
}

// ParseSet reads options.
// SET and GETEX differ in what they allow, and Redis has a reply for each mistake. The order of the cases is that of
// its parser (parseExtendedStringArgumentsOrReply in t_string.c).
// name is for the error reply. A unit of time may be given several times, in Redis, too, and the last number counts.
func ParseSet(name string, opts [][]byte, now int64, getex bool) (a SetArgs, err error) {
	var num []byte
	unit := -1
	p := OptionsOf(opts)
	for p.More() {
		switch {
		case !getex && !a.XX && p.Flag("nx"):
			a.NX = true
		case !getex && !a.NX && p.Flag("xx"):
			a.XX = true
		case !getex && p.Flag("get"):
			a.Get = true
		case !getex && unit < 0 && p.Flag("keepttl"):
			a.KeepTTL = true
		case getex && unit < 0 && p.Flag("persist"):
			a.persist = true
		case !a.KeepTTL && !a.persist && expiryUnit(&p, &unit):
			num = p.Str()
		default:
			p.Wrong()
		}
	}
	if err = p.End(); err != nil || unit < 0 {
		return a, err
	}
	a.Expires, err = ExpireAt(name, num, expiryUnits[unit].seconds, expiryUnits[unit].absolute, now)
	return a, err
}

// ExpireAt is the time in Unix ms that num, which must be positive, asks for.
// It refuses what does not fit an int64 of milliseconds rather than wrapping around to a time
// that has passed, which would delete the key.
func ExpireAt(name string, num []byte, seconds, absolute bool, now int64) (at int64, err error) {
	at, ok := resp.ParseInt(num)
	if !ok {
		return 0, ErrNotInt
	}
	if at <= 0 || seconds && at > math.MaxInt64/1000 {
		return 0, badExpire(name)
	}
	if seconds {
		at *= 1000
	}
	if !absolute {
		if at > math.MaxInt64-now {
			return 0, badExpire(name)
		}
		at += now
	}
	return at, nil
}

// badExpire is Redis's reply to a time that is not positive or too far away.
func badExpire(name string) refusal {
	return refusal("ERR invalid expire time in '" + name + "' command")
}

// bulkOrNull is the reply of a command that returns the value as it is at the moment, before or
// after the change.
// The value is copied to w, so that it may change afterwards.
func bulkOrNull(k *Key, w *resp.Writer) {
	if k.Present {
		w.Bulk(k.Value)
	} else {
		w.Null()
	}
}

// Bit is how a reply, or a count, says yes.
func Bit(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// cmdGet, like every keyFunc, sees a key and not a store: whether it is performed by itself, in
// a batch, in a turn of a loop or in a transaction is the batch's affair.
func cmdGet(k *Key, _ [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	bulkOrNull(k, w)
	return nil
}

// cmdMGet is one key of MGET, which has nothing to say of collections.
func cmdMGet(k *Key, _ [][]byte, w *resp.Writer) error {
	if k.Type != client.Plain {
		w.Null()
		return nil
	}
	bulkOrNull(k, w)
	return nil
}

// cmdSet is SET with all its options. The batch performs most of them without this function, as
// a put (see batch.admitOne); it is for those whose reply or effect depends on what was there,
// and for several commands on one key.
func cmdSet(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := ParseSet("set", args[3:], k.Now, false)
	if err != nil {
		return err
	}
	if a.Get {
		if err := k.typed(client.Plain); err != nil {
			return err
		}
		bulkOrNull(k, w)
	}
	if a.NX && k.Present || a.XX && !k.Present {
		if !a.Get {
			w.Null()
		}
		return nil
	}
	at := a.Expires
	if a.KeepTTL {
		at = k.Expires
	}
	k.Flags = 0
	k.SetAs(client.Plain, args[2], at)
	if !a.Get {
		w.OK()
	}
	return nil
}

// cmdSetNX replies first, since set changes what the reply depends on.
func cmdSetNX(k *Key, args [][]byte, w *resp.Writer) error {
	w.Int(Bit(!k.Present))
	if !k.Present {
		k.set(args[2], 0)
	}
	return nil
}

func cmdSetEX(k *Key, args [][]byte, w *resp.Writer) error { return setFor(k, args, w, "setex", true) }

func cmdPSetEX(k *Key, args [][]byte, w *resp.Writer) error {
	return setFor(k, args, w, "psetex", false)
}

// setFor is SETEX and PSETEX. Unlike SET they refuse a time of 0 or less, so neither ever
// deletes.
func setFor(k *Key, args [][]byte, w *resp.Writer, name string, seconds bool) error {
	at, err := ExpireAt(name, args[2], seconds, false, k.Now)
	if err != nil {
		return err
	}
	k.Flags = 0
	k.SetAs(client.Plain, args[3], at)
	w.OK()
	return nil
}

// cmdGetSet forgets the expiry, as SET does.
func cmdGetSet(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	bulkOrNull(k, w)
	k.Flags = 0
	k.SetAs(client.Plain, args[2], 0)
	return nil
}

// cmdGetDel of a key that does not exist changes nothing, so that the store is not written to.
func cmdGetDel(k *Key, _ [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	bulkOrNull(k, w)
	if k.Present {
		k.Delete()
	}
	return nil
}

// cmdGetEX looks at the options first, but says what is wrong with a time only if there is a
// key: Redis does it in this order. Without an option that changes the expiry it is a read, and
// nothing is written.
func cmdGetEX(k *Key, args [][]byte, w *resp.Writer) error {
	a, err := ParseSet("getex", args[2:], k.Now, true)
	if err != ErrSyntax {
		if !k.Present {
			w.Null()
			return nil
		}
		if err := k.typed(client.Plain); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	bulkOrNull(k, w)
	if k.Present && (a.persist && k.Expires != 0 || a.Expires != 0) {
		k.set(k.Value, a.Expires)
	}
	return nil
}

// cmdAppend may run again on a newer value, so it must not append to the same buffer twice:
// mutable begins with the value as it is now.
func cmdAppend(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	n := len(k.Value) + len(args[2])
	if n > k.MaxValue {
		return errTooLong
	}
	b, err := k.mutable(n)
	if err != nil {
		return err
	}
	k.Own = append(b, args[2]...)
	k.set(k.Own, k.Expires)
	w.Int(int64(n))
	return nil
}

// length is the whole value's, bytes.
func (k *Key) length() int { return max(k.Whole, len(k.Value)) }

// cmdStrlen is 0 for a key that is not there, and counts bytes.
func cmdStrlen(k *Key, _ [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	w.Int(int64(k.length()))
	return nil
}

// LengthPart is what STRLEN and TYPE need of a value, and EXISTS of one that is not known yet: none of its bytes.
func LengthPart([][]byte, int) (from, to int) { return 0, 0 }

// RangePart is what GETRANGE needs of a value of n bytes.
func RangePart(args [][]byte, n int) (from, to int) {
	start, ok1 := resp.ParseInt(args[2])
	end, ok2 := resp.ParseInt(args[3])
	if !ok1 || !ok2 {
		return 0, 0
	}
	return byteRange(start, end, n)
}

// byteRange is the bytes of a value of n bytes from start to end, which belongs to them. Negative numbers count from
// the end.
func byteRange(start, end int64, n int) (from, to int) {
	if start < 0 && end < 0 && start > end {
		return 0, 0
	}
	if start < 0 {
		start = max(start+int64(n), 0)
	}
	if end < 0 {
		end = max(end+int64(n), 0)
	}
	end = min(end, int64(n)-1)
	if start > end {
		return 0, 0
	}
	return int(start), int(end + 1)
}

// cmdGetRange counts from the end if a number is negative. The reply to a range that is empty,
// or of a key that does not exist, is the empty string and not null.
func cmdGetRange(k *Key, args [][]byte, w *resp.Writer) error {
	start, ok1 := resp.ParseInt(args[2])
	end, ok2 := resp.ParseInt(args[3])
	if !ok1 || !ok2 {
		return ErrNotInt
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	from, to := byteRange(start, end, k.length())
	if from == to {
		w.Bulk(nil)
		return nil
	}
	w.Bulk(k.Value[from-k.From : to-k.From])
	return nil
}

// cmdSetRange fills a gap before the offset with zeros. The limit is checked before the value is
// made longer, since the offset is the client's and could ask for gigabytes.
func cmdSetRange(k *Key, args [][]byte, w *resp.Writer) error {
	off, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return ErrNotInt
	case off < 0:
		return errOffset
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	switch {
	case len(args[3]) == 0:
		w.Int(int64(len(k.Value)))
		return nil
	case off > int64(k.MaxValue) || int(off)+len(args[3]) > k.MaxValue:
		return errTooLong
	}
	at := int(off)
	n := max(len(k.Value), at+len(args[3]))
	had := len(k.Value)
	b, err := k.mutable(n)
	if err != nil {
		return err
	}
	b = b[:n]
	if at > had {
		clear(b[had:at])
	}
	copy(b[at:], args[3])
	k.Own = b
	k.set(b, k.Expires)
	w.Int(int64(n))
	return nil
}

// cmdIncr and its like are updates, of which the store tries again until nobody else has written in between: no
// increment is ever lost, whichever gateways they come by. All of a batch on one key are one update.
func cmdIncr(k *Key, _ [][]byte, w *resp.Writer) error { return incr(k, 1, w) }
func cmdDecr(k *Key, _ [][]byte, w *resp.Writer) error { return incr(k, -1, w) }

// cmdIncrBy parses as strictly as Redis: " 1", "+1" and "01" are no integers.
func cmdIncrBy(k *Key, args [][]byte, w *resp.Writer) error {
	n, ok := resp.ParseInt(args[2])
	if !ok {
		return ErrNotInt
	}
	return incr(k, n, w)
}

// cmdDecrBy adds the negative number, which the least int64 does not have.
func cmdDecrBy(k *Key, args [][]byte, w *resp.Writer) error {
	n, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return ErrNotInt
	case n == math.MinInt64:
		return refusal("ERR decrement would overflow")
	default:
		return incr(k, -n, w)
	}
}

// incr adds to an integer, 0 if there is no key. Expiry and flags stay; what would overflow
// changes nothing.
func incr(k *Key, by int64, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	old := int64(0)
	if k.Present {
		var ok bool
		if old, ok = resp.ParseInt(k.Value); !ok {
			return ErrNotInt
		}
	}
	if by > 0 && old > math.MaxInt64-by || by < 0 && old < math.MinInt64-by {
		return errOverflow
	}
	k.setInt(old + by)
	w.Int(old + by)
	return nil
}

// maxLongDouble is how long the text of a long double must be less than, as in Redis.
const maxLongDouble = 5 << 10

// parseLongDouble reads a number in x87's long double, in which Redis counts: all of the text is one that strtold(3)
// takes, with no white space before it. A number that is too large, or too small, is none; NaN is none either.
func parseLongDouble(b []byte) (*big.Float, bool) {
	if len(b) == 0 || len(b) >= maxLongDouble || number.IsSpace(b[0]) {
		return nil, false
	}
	f, used, inRange := number.LongDouble(b)
	return f, used == len(b) && inRange
}

// cmdIncrByFloat writes the sum as Redis does ("%.17Lf" without trailing zeros), so that a value
// that both have counted up is the same text.
func cmdIncrByFloat(k *Key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	old := new(big.Float).SetPrec(number.LongDoubleBits)
	if k.Present {
		var ok bool
		if old, ok = parseLongDouble(k.Value); !ok {
			return ErrNotFloat
		}
	}
	by, ok := parseLongDouble(args[2])
	if !ok {
		return ErrNotFloat
	}
	digits, ok := appendSum(k.Own[:0], old, by)
	if !ok {
		return errNotFinite
	}
	k.Own = digits
	k.set(k.Own, k.Expires)
	w.Bulk(k.Own)
	return nil
}

// appendSum appends a + b, as INCRBYFLOAT writes it; ok is false if that is no finite number.
// It is exact to 64 bits of mantissa, and has 17 digits behind the point at most. -0 is written as 0.
func appendSum(dst []byte, a, b *big.Float) (_ []byte, ok bool) {
	if a.IsInf() || b.IsInf() {
		return dst, false
	}
	sum := new(big.Float).SetPrec(number.LongDoubleBits).Add(a, b)
	if sum.MantExp(nil) > number.LongDoubleMax {
		return dst, false
	}
	dst = sum.Append(dst, 'f', 17)
	dst = bytes.TrimRight(dst, "0")
	dst = bytes.TrimSuffix(dst, []byte("."))
	if string(dst) == "-0" {
		dst = append(dst[:0], '0')
	}
	return dst, true
}

// cmdExists counts a key as often as it is named, as Redis does: each mention is an entry of its
// own.
func cmdExists(k *Key, _ [][]byte, _ *resp.Writer) error { k.Count = Bit(k.Present); return nil }

// cmdDel counts and deletes; of two mentions of one key the second finds it gone.
func cmdDel(k *Key, _ [][]byte, _ *resp.Writer) error {
	if k.Count = Bit(k.Present); k.Present {
		k.Delete()
	}
	return nil
}

// cmdMSet is one key of MSET: its share of the arguments is the name and the value.
func cmdMSet(k *Key, args [][]byte, _ *resp.Writer) error {
	k.Flags = 0
	k.SetAs(client.Plain, args[1], 0)
	return nil
}

// Clip is what Redis prints of b with "%.*s": n bytes at most, none from NUL on.
func Clip(b []byte, n int) string {
	b = b[:min(len(b), max(n, 0))]
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}
