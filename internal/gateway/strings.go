package gateway

import (
	"bytes"
	"errors"
	"math"
	"math/big"
	"strconv"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/number"
	"github.com/kvd-project/kvd/internal/redis/args"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

// key is one key's state while the commands of a unit run on it, one after the
// other.
// It is loaded for each try, a unit's by unit.load and a staged one's by takeRead. Commands change it by set, delete
// and the like, never the store; nothing of it is shared between goroutines.
type key struct {
	now      int64 // Unix ms, the same for all of them
	maxValue int   // bytes, Options.MaxValueBytes
	limits   *encodingLimits

	present bool        // if not, the four below are zero
	value   []byte      // not to be written to, unless mutable made it
	expires int64       // Unix ms; 0: never
	flags   uint32      // memcached's; SET and its like make them 0
	typ     client.Type // of value; Plain if it is not present
	changed bool        // by a command; there is something to write
	// Of a long value a command with a part has that part alone: value begins at from of whole bytes. Else whole is 0.
	from, whole int

	own   []byte // what mutable uses; kept from unit to unit
	count int64  // what a command that sums over its keys adds
	also  string // the event of a stream that a command's change of it has beside its own, if any
	// room is how long a value mutable may make; want is how long the one is that it did not.
	room, want int
}

// errRoom: the command needs memory that has to be taken first; nothing was done.
var errRoom = errors.New("no room")

// unread stands for whatever type a value has that was not read, since the command takes plain ones only.
const unread client.Type = 255

// typed is nil if a command on values of a type can go on: there is no value, or one of the type. Redis looks at the
// type most often behind the arguments, and before anything depends on the value.
func (k *key) typed(t client.Type) error {
	if k.present && k.typ != t {
		return errWrongType
	}
	return nil
}

// hasOrZero reports whether there is a value of a type. If there is none it replied 0. Redis has such commands look
// whether there is a key before they look at its type.
func (k *key) hasOrZero(t client.Type, w *resp.Writer) (has bool, err error) {
	if !k.present {
		w.Int(0)
		return false, nil
	}
	err = k.typed(t)
	return err == nil, err
}

func (k *key) setAs(t client.Type, value []byte, expires int64) {
	k.typ = t
	k.set(value, expires)
}

// set makes value the key's, of the type that the key has. It may be the command's argument or k.own: nobody writes to
// it before the unit has ended. A time that has passed deletes, as in Redis.
func (k *key) set(value []byte, expires int64) {
	k.value, k.expires, k.present, k.changed = value, expires, true, true
	if expires != 0 && expires <= k.now {
		k.delete()
	}
}

// delete leaves the state of a key that does not exist, for the unit's further commands.
func (k *key) delete() {
	k.present, k.value, k.expires, k.flags, k.typ, k.changed = false, nil, 0, 0, client.Plain, true
}

// mutable is the value in a buffer that may be written to, with room for n bytes. The error is errRoom, and the command
// is to be given up, if that needs memory that has to be taken first. n is the length that the value is going to have
// at most, in bytes. The copy is what makes a command safe to run again.
func (k *key) mutable(n int) (b []byte, err error) {
	if n > k.room {
		k.want = n
		return nil, errRoom
	}
	if cap(k.own) < n {
		b := make([]byte, len(k.value), max(n, 2*cap(k.own)))
		copy(b, k.value)
		k.own = b
		return b, nil
	}
	k.own = append(k.own[:0], k.value...)
	return k.own, nil
}

// setInt stores n and keeps expiry and flags.
// The digits are in own, which is as good as any argument until the unit ends.
func (k *key) setInt(n int64) {
	k.own = strconv.AppendInt(k.own[:0], n, 10)
	k.set(k.own, k.expires)
}

const (
	// The texts are Redis's, since clients look for them.
	errSyntax            = args.Syntax
	errWrongType refusal = "WRONGTYPE Operation against a key holding the wrong kind of value"
	errNotInt            = args.NotInt
	errNotFloat          = args.NotFloat
	errNoKey     refusal = "ERR no such key"
	// errSameObject: COPY and MOVE of a key to itself.
	errSameObject refusal = "ERR source and destination objects are the same"
	errTooLong    refusal = "ERR string exceeds maximum allowed size (proto-max-bulk-len)"
	errOffset     refusal = "ERR offset is out of range"
	errOverflow   refusal = "ERR increment or decrement would overflow"
	errNotFinite  refusal = "ERR increment would produce NaN or Infinity"
)

// fold compares with a lower-case word.
func fold(b []byte, word string) bool { return args.Is(b, word) }

// refusal is what a command says that is not performed, in Redis's words.
type refusal = args.Refusal

// optionsOf reads arguments.
func optionsOf(list [][]byte) args.Parser { return args.New(list) }

// writeRefusal replies with what a command was refused for, if it was. A refusal for want of room has no reply yet.
func writeRefusal(w *resp.Writer, err error) {
	if err != nil && err != errRoom {
		w.Error(err.Error())
	}
}

// setArgs are the options of SET and GETEX.
type setArgs struct {
	nx, xx, get, keepTTL, persist bool
	expires                       int64 // Unix ms; 0: none given
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

// parseSet reads options.
// SET and GETEX differ in what they allow, and Redis has a reply for each mistake: the order in
// which the cases are looked at is that of its parser (parseExtendedStringArgumentsOrReply in
// t_string.c).
// name is for the error reply. A unit of time may be given several times, in Redis, too, and the last number counts.
func parseSet(name string, opts [][]byte, now int64, getex bool) (a setArgs, err error) {
	var num []byte
	unit := -1
	p := optionsOf(opts)
	for p.More() {
		switch {
		case !getex && !a.xx && p.Flag("nx"):
			a.nx = true
		case !getex && !a.nx && p.Flag("xx"):
			a.xx = true
		case !getex && p.Flag("get"):
			a.get = true
		case !getex && unit < 0 && p.Flag("keepttl"):
			a.keepTTL = true
		case getex && unit < 0 && p.Flag("persist"):
			a.persist = true
		case !a.keepTTL && !a.persist && expiryUnit(&p, &unit):
			num = p.Str()
		default:
			p.Wrong()
		}
	}
	if err = p.End(); err != nil || unit < 0 {
		return a, err
	}
	a.expires, err = expireAt(name, num, expiryUnits[unit].seconds, expiryUnits[unit].absolute, now)
	return a, err
}

// expireAt is the time in Unix ms that num, which must be positive, asks for.
// It refuses what does not fit an int64 of milliseconds rather than wrapping around to a time
// that has passed, which would delete the key.
func expireAt(name string, num []byte, seconds, absolute bool, now int64) (at int64, err error) {
	at, ok := resp.ParseInt(num)
	if !ok {
		return 0, errNotInt
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
func bulkOrNull(k *key, w *resp.Writer) {
	if k.present {
		w.Bulk(k.value)
	} else {
		w.Null()
	}
}

// bit is how a reply, or a count, says yes.
func bit(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// cmdGet, like every keyFunc, sees a key and not a store: whether it is performed by itself, in
// a batch, in a turn of a loop or in a transaction is the batch's affair.
func cmdGet(k *key, _ [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	bulkOrNull(k, w)
	return nil
}

// cmdMGet is one key of MGET, which has nothing to say of collections.
func cmdMGet(k *key, _ [][]byte, w *resp.Writer) error {
	if k.typ != client.Plain {
		w.Null()
		return nil
	}
	bulkOrNull(k, w)
	return nil
}

// cmdSet is SET with all its options. The batch performs most of them without this function, as
// a put (see batch.admitOne); it is for those whose reply or effect depends on what was there,
// and for several commands on one key.
func cmdSet(k *key, args [][]byte, w *resp.Writer) error {
	a, err := parseSet("set", args[3:], k.now, false)
	if err != nil {
		return err
	}
	if a.get {
		if err := k.typed(client.Plain); err != nil {
			return err
		}
		bulkOrNull(k, w)
	}
	if a.nx && k.present || a.xx && !k.present {
		if !a.get {
			w.Null()
		}
		return nil
	}
	at := a.expires
	if a.keepTTL {
		at = k.expires
	}
	k.flags = 0
	k.setAs(client.Plain, args[2], at)
	if !a.get {
		w.OK()
	}
	return nil
}

// cmdSetNX replies first, since set changes what the reply depends on.
func cmdSetNX(k *key, args [][]byte, w *resp.Writer) error {
	w.Int(bit(!k.present))
	if !k.present {
		k.set(args[2], 0)
	}
	return nil
}

func cmdSetEX(k *key, args [][]byte, w *resp.Writer) error { return setFor(k, args, w, "setex", true) }

func cmdPSetEX(k *key, args [][]byte, w *resp.Writer) error {
	return setFor(k, args, w, "psetex", false)
}

// setFor is SETEX and PSETEX. Unlike SET they refuse a time of 0 or less, so neither ever
// deletes.
func setFor(k *key, args [][]byte, w *resp.Writer, name string, seconds bool) error {
	at, err := expireAt(name, args[2], seconds, false, k.now)
	if err != nil {
		return err
	}
	k.flags = 0
	k.setAs(client.Plain, args[3], at)
	w.OK()
	return nil
}

// cmdGetSet forgets the expiry, as SET does.
func cmdGetSet(k *key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	bulkOrNull(k, w)
	k.flags = 0
	k.setAs(client.Plain, args[2], 0)
	return nil
}

// cmdGetDel of a key that does not exist changes nothing, so that the store is not written to.
func cmdGetDel(k *key, _ [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	bulkOrNull(k, w)
	if k.present {
		k.delete()
	}
	return nil
}

// cmdGetEX looks at the options first, but says what is wrong with a time only if there is a
// key: Redis does it in this order. Without an option that changes the expiry it is a read, and
// nothing is written.
func cmdGetEX(k *key, args [][]byte, w *resp.Writer) error {
	a, err := parseSet("getex", args[2:], k.now, true)
	if err != errSyntax {
		if !k.present {
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
	if k.present && (a.persist && k.expires != 0 || a.expires != 0) {
		k.set(k.value, a.expires)
	}
	return nil
}

// cmdAppend may run again on a newer value, so it must not append to the same buffer twice:
// mutable begins with the value as it is now.
func cmdAppend(k *key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	n := len(k.value) + len(args[2])
	if n > k.maxValue {
		return errTooLong
	}
	b, err := k.mutable(n)
	if err != nil {
		return err
	}
	k.own = append(b, args[2]...)
	k.set(k.own, k.expires)
	w.Int(int64(n))
	return nil
}

// length is the whole value's, bytes.
func (k *key) length() int { return max(k.whole, len(k.value)) }

// cmdStrlen is 0 for a key that is not there, and counts bytes.
func cmdStrlen(k *key, _ [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	w.Int(int64(k.length()))
	return nil
}

// lengthPart is what STRLEN and TYPE need of a value, and EXISTS of one that is not known yet: none of its bytes.
func lengthPart([][]byte, int) (from, to int) { return 0, 0 }

// rangePart is what GETRANGE needs of a value of n bytes.
func rangePart(args [][]byte, n int) (from, to int) {
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
func cmdGetRange(k *key, args [][]byte, w *resp.Writer) error {
	start, ok1 := resp.ParseInt(args[2])
	end, ok2 := resp.ParseInt(args[3])
	if !ok1 || !ok2 {
		return errNotInt
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	from, to := byteRange(start, end, k.length())
	if from == to {
		w.Bulk(nil)
		return nil
	}
	w.Bulk(k.value[from-k.from : to-k.from])
	return nil
}

// cmdSetRange fills a gap before the offset with zeros. The limit is checked before the value is
// made longer, since the offset is the client's and could ask for gigabytes.
func cmdSetRange(k *key, args [][]byte, w *resp.Writer) error {
	off, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return errNotInt
	case off < 0:
		return errOffset
	}
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	switch {
	case len(args[3]) == 0:
		w.Int(int64(len(k.value)))
		return nil
	case off > int64(k.maxValue) || int(off)+len(args[3]) > k.maxValue:
		return errTooLong
	}
	at := int(off)
	n := max(len(k.value), at+len(args[3]))
	had := len(k.value)
	b, err := k.mutable(n)
	if err != nil {
		return err
	}
	b = b[:n]
	if at > had {
		clear(b[had:at])
	}
	copy(b[at:], args[3])
	k.own = b
	k.set(b, k.expires)
	w.Int(int64(n))
	return nil
}

// cmdIncr and its like are updates, of which the store tries again until nobody else has written in between: no
// increment is ever lost, whichever gateways they come by. All of a batch on one key are one update.
func cmdIncr(k *key, _ [][]byte, w *resp.Writer) error { return incr(k, 1, w) }
func cmdDecr(k *key, _ [][]byte, w *resp.Writer) error { return incr(k, -1, w) }

// cmdIncrBy parses as strictly as Redis: " 1", "+1" and "01" are no integers.
func cmdIncrBy(k *key, args [][]byte, w *resp.Writer) error {
	n, ok := resp.ParseInt(args[2])
	if !ok {
		return errNotInt
	}
	return incr(k, n, w)
}

// cmdDecrBy adds the negative number, which the least int64 does not have.
func cmdDecrBy(k *key, args [][]byte, w *resp.Writer) error {
	n, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return errNotInt
	case n == math.MinInt64:
		return refusal("ERR decrement would overflow")
	default:
		return incr(k, -n, w)
	}
}

// incr adds to an integer, 0 if there is no key. Expiry and flags stay; what would overflow
// changes nothing.
func incr(k *key, by int64, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	old := int64(0)
	if k.present {
		var ok bool
		if old, ok = resp.ParseInt(k.value); !ok {
			return errNotInt
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
func cmdIncrByFloat(k *key, args [][]byte, w *resp.Writer) error {
	if err := k.typed(client.Plain); err != nil {
		return err
	}
	old := new(big.Float).SetPrec(number.LongDoubleBits)
	if k.present {
		var ok bool
		if old, ok = parseLongDouble(k.value); !ok {
			return errNotFloat
		}
	}
	by, ok := parseLongDouble(args[2])
	if !ok {
		return errNotFloat
	}
	digits, ok := appendSum(k.own[:0], old, by)
	if !ok {
		return errNotFinite
	}
	k.own = digits
	k.set(k.own, k.expires)
	w.Bulk(k.own)
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
func cmdExists(k *key, _ [][]byte, _ *resp.Writer) error { k.count = bit(k.present); return nil }

// cmdDel counts and deletes; of two mentions of one key the second finds it gone.
func cmdDel(k *key, _ [][]byte, _ *resp.Writer) error {
	if k.count = bit(k.present); k.present {
		k.delete()
	}
	return nil
}

// cmdMSet is one key of MSET: its share of the arguments is the name and the value.
func cmdMSet(k *key, args [][]byte, _ *resp.Writer) error {
	k.flags = 0
	k.setAs(client.Plain, args[1], 0)
	return nil
}

// clip is what Redis prints of b with "%.*s": n bytes at most, none from NUL on.
func clip(b []byte, n int) string {
	b = b[:min(len(b), max(n, 0))]
	if i := bytes.IndexByte(b, 0); i >= 0 {
		b = b[:i]
	}
	return string(b)
}

// leavesCollection reports whether a key has been changed to something that somebody may wait for.
// Plain values are nothing to wait for: no blocking command takes one.
func (k *key) leavesCollection() bool { return k.changed && k.present && k.typ != client.Plain }
