package compat

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// spellings are numbers as people and programs write them, and what looks like numbers.
var spellings = []string{
	"", "0", "-0", "+0", "00", "007", "010", "1", "2", "3", "5", "-1", "-2", "+1", "--1", "+-1", "- 1", " 1", "1 ",
	"\t1", "\n1", "1\n", "\v1\f", " ", "1a", "a1", "abc", "1,5",
	"1\x00", "1\x002", "\x00", "\x001", "1.5", "2.0", "1.", ".5", "-.5", ".", "-.", "+", "-", "1.5.1", "1..2", "1e",
	"1e+", "1e-", "1e1", "1E1", "1e+1", "1e-1", "1e05", "1.e1", ".1e1", ".e1",
	"e1", "1e1.5", "1p5", "1_000", "1__0", "0b1", "0o7", "0x", "0X", "0x1", "0X1F", "-0x1f", "+0x1f", "0x.8", "0x8.",
	"0x.", "0x1.8", "0x1p", "0x1p+", "0x1p4", "0x1P-4", "0x1p4.5", "0xg", "0x1g",
	"0x 1", "0x-1", "0x_1", "0x1e5", "x1", "inf", "-inf", "+inf", "INF", "Inf", "infi", "infinity", "-Infinity",
	"+INFINITY", "infinityx", "nan", "NaN", "-nan", "+nan", "nan(", "nan()", "nan(123)",
	"nano", "null", "true", "1d", "1f", "1L", "0x1.8p1", "1e308", "1.7976931348623157e308", "1.7976931348623159e308",
	"-1.8e308", "1e400", "-1e400", "1e99999999999999999999",
	"0e99999999999999999999", "1e-99999999999999999999", "1e-307", "2.2250738585072014e-308", "2.2250738585072011e-308",
	"1e-308", "4.9406564584124654e-324", "5e-324", "2e-324", "1e-400",
	"-1e-400", "0x1p-1074", "0x1p-1075", "0x1p1023", "0x1p1024", "0x1p16383", "0x1p16384", "0x1p-16445", "0x1p-16446",
	"1e4932", "1.2e4932", "3.3621e-4932", "1e-4940", "3.6e-4951", "1e-4952",
	"1e5000", "1e-5000", "127", "128", "255", "256", "2147483647", "2147483648", "-2147483648", "-2147483649",
	"4294967295", "4294967296", "9007199254740993", "9223372036854775807",
	"9223372036854775808", "-9223372036854775807", "-9223372036854775808", "-9223372036854775809",
	"18446744073709551615", "18446744073709551616", "-18446744073709551615", "99999999999999999999",
	"0.1", "3.0", "100.00", "0.000000000000000001", "123456789012345678901234567890", "1e23",
	"3.14159265358979323846264338327950288", "#1", "1-1", "(1", "[1", "１", "²", "1\xff",
}

// modest is a mark in front of commands which a number like -2^31 makes reply with as many elements.
const modest = "~"

// own is a mark in front of commands whose answers are about the server: only whether they are errors, and which, is
// compared.
const own = "?"

// numberCommands have @ where a spelling is put in. They use the keys of numberKeys.
var numberCommands = strings.Split(strings.TrimSpace(`
INCRBY s @
DECRBY s @
INCRBYFLOAT s @
INCRBYFLOAT f @
INCR v=@
DECR v=@
INCRBY v=@ 1
DECRBY v=@ 1
INCRBYFLOAT v=@ 0
INCRBYFLOAT v=@ 1.5
GETRANGE s @ 5
GETRANGE s 0 @
SUBSTR s @ 5
SUBSTR s 0 @
SETRANGE s @ x
SETEX s @ v
PSETEX s @ v
SET s v EX @
SET s v PX @
SET s v EXAT @
SET s v PXAT @
GETEX s EX @
GETEX s PX @
GETEX s EXAT @
GETEX s PXAT @
LCS s f MINMATCHLEN @ IDX
GETBIT s @
SETBIT s @ 1
SETBIT s 1 @
BITCOUNT s @ 5
BITCOUNT s 0 @
BITPOS s @
BITPOS s 1 @
BITPOS s 1 0 @
BITFIELD s GET u@ 0
BITFIELD s GET i@ 0
BITFIELD s GET u8 @
BITFIELD s GET u8 #@
BITFIELD s SET u8 @ 1
BITFIELD s SET u8 0 @
BITFIELD s SET u8 #@ 1
BITFIELD s INCRBY i64 @ 1
BITFIELD s INCRBY i64 0 @
BITFIELD s OVERFLOW SAT INCRBY u8 0 @
BITFIELD_RO s GET u8 @
EXPIRE s @
PEXPIRE s @
EXPIREAT s @
PEXPIREAT s @
COPY s s2 DB @
MOVE s @
SELECT @
SWAPDB @ 14
SWAPDB 14 @
SCAN @ MATCH nothing
SCAN 0 COUNT @ MATCH nothing
HSCAN h1 @
HSCAN h1 0 COUNT @
SSCAN e @
SSCAN e 0 COUNT @
ZSCAN z1 @
ZSCAN z1 0 COUNT @
SORT l LIMIT @ 2
SORT l LIMIT 0 @
SORT_RO l LIMIT @ 2
SORT_RO l LIMIT 0 @
SORT w=@
SORT_RO w=@
SORT w=@ DESC
SORT w=@ ALPHA
SORT l BY v=@*
SORT_RO l BY v=@*
OBJECT ENCODING v=@
RESTORE r @ $payload
RESTORE r 0 $payload IDLETIME @
RESTORE r 0 $payload FREQ @
RESTORE r 9999999999999 $payload ABSTTL
RESTORE r @ $payload ABSTTL
HINCRBY h a @
HINCRBYFLOAT h a @
HINCRBYFLOAT h b @
HINCRBY j=@ a 1
HINCRBYFLOAT j=@ a 0
HINCRBYFLOAT j=@ a 1.5
~HRANDFIELD h1 @
~HRANDFIELD h1 @ WITHVALUES
LPOP l @
RPOP l @
LINDEX l @
LSET l @ x
LRANGE l @ 5
LRANGE l 0 @
LTRIM l @ 5
LTRIM l 0 @
LREM l @ a
LPOS l a RANK @
LPOS l a COUNT @
LPOS l a MAXLEN @
LMPOP @ l LEFT
LMPOP 1 l LEFT COUNT @
BLMPOP @ 1 l LEFT
BLMPOP 0 @ l LEFT
BLMPOP 0 1 l LEFT COUNT @
BLPOP l @
BRPOP l @
BRPOPLPUSH l l2 @
BLMOVE l l2 LEFT LEFT @
SPOP e @
~SRANDMEMBER e @
SINTERCARD @ e
SINTERCARD 1 e LIMIT @
ZADD z @ d
ZADD z INCR @ a
ZADD z GT @ a
ZINCRBY z @ a
ZRANGE z @ 5 WITHSCORES
ZRANGE z 0 @
ZRANGE z @ +inf BYSCORE
ZRANGE z -inf @ BYSCORE
ZRANGE z (@ +inf BYSCORE
ZRANGE z -inf (@ BYSCORE
ZRANGE z -inf +inf BYSCORE LIMIT @ 2
ZRANGE z -inf +inf BYSCORE LIMIT 0 @
ZRANGESTORE z2 z @ 5
ZRANGESTORE z2 z 0 @
ZRANGESTORE z2 z @ +inf BYSCORE
ZRANGESTORE z2 z -inf +inf BYSCORE LIMIT @ 2
ZRANGESTORE z2 z -inf +inf BYSCORE LIMIT 0 @
ZREVRANGE z @ 5
ZREVRANGE z 0 @
ZRANGEBYSCORE z @ +inf
ZRANGEBYSCORE z -inf @
ZRANGEBYSCORE z -inf +inf LIMIT @ 2
ZRANGEBYSCORE z -inf +inf LIMIT 0 @
ZREVRANGEBYSCORE z @ -inf
ZREVRANGEBYSCORE z +inf @
ZREVRANGEBYSCORE z +inf -inf LIMIT @ 2
ZREVRANGEBYSCORE z +inf -inf LIMIT 0 @
ZRANGEBYLEX y - + LIMIT @ 2
ZRANGEBYLEX y - + LIMIT 0 @
ZREVRANGEBYLEX y + - LIMIT @ 2
ZREVRANGEBYLEX y + - LIMIT 0 @
ZREMRANGEBYRANK z @ 5
ZREMRANGEBYRANK z 0 @
ZREMRANGEBYSCORE z @ +inf
ZREMRANGEBYSCORE z -inf @
ZCOUNT z @ +inf
ZCOUNT z -inf @
ZPOPMIN z @
ZPOPMAX z @
ZMPOP @ z MIN
ZMPOP 1 z MIN COUNT @
BZMPOP @ 1 z MIN
BZMPOP 0 @ z MIN
BZMPOP 0 1 z MIN COUNT @
BZPOPMIN z @
BZPOPMAX z @
~ZRANDMEMBER z1 @
~ZRANDMEMBER z1 @ WITHSCORES
ZINTERCARD @ z
ZINTERCARD 1 z LIMIT @
ZUNION @ z
ZUNION 1 z WEIGHTS @ WITHSCORES
ZINTER @ z
ZINTER 1 z WEIGHTS @ WITHSCORES
ZDIFF @ z
ZUNIONSTORE z2 @ z
ZUNIONSTORE z2 1 z WEIGHTS @
ZINTERSTORE z2 @ z
ZINTERSTORE z2 1 z WEIGHTS @
ZDIFFSTORE z2 @ z
GEOADD g @ 38 m
GEOADD g 13 @ m
GEORADIUS g @ 38 200 km
GEORADIUS g 15 @ 200 km
GEORADIUS g 15 37 @ km
GEORADIUS g 15 37 200 km COUNT @ ASC
GEORADIUS_RO g @ 38 200 km
GEORADIUS_RO g 15 @ 200 km
GEORADIUS_RO g 15 37 @ km
GEORADIUS_RO g 15 37 200 km COUNT @ ASC
GEORADIUSBYMEMBER g p @ km ASC
GEORADIUSBYMEMBER g p 200 km COUNT @ ASC
GEORADIUSBYMEMBER_RO g p @ km ASC
GEORADIUSBYMEMBER_RO g p 200 km COUNT @ ASC
GEOSEARCH g FROMLONLAT @ 37 BYRADIUS 200 km ASC
GEOSEARCH g FROMLONLAT 15 @ BYRADIUS 200 km ASC
GEOSEARCH g FROMLONLAT 15 37 BYRADIUS @ km ASC
GEOSEARCH g FROMLONLAT 15 37 BYBOX @ 400 km ASC
GEOSEARCH g FROMLONLAT 15 37 BYBOX 400 @ km ASC
GEOSEARCH g FROMLONLAT 15 37 BYRADIUS 200 km ASC COUNT @
GEOSEARCHSTORE z2 g FROMLONLAT @ 37 BYRADIUS 200 km ASC
GEOSEARCHSTORE z2 g FROMLONLAT 15 @ BYRADIUS 200 km ASC
GEOSEARCHSTORE z2 g FROMLONLAT 15 37 BYRADIUS @ km ASC
GEOSEARCHSTORE z2 g FROMLONLAT 15 37 BYBOX @ 400 km ASC
GEOSEARCHSTORE z2 g FROMLONLAT 15 37 BYBOX 400 @ km ASC
GEOSEARCHSTORE z2 g FROMLONLAT 15 37 BYRADIUS 200 km ASC COUNT @
XADD x MAXLEN @ 9-9 a b
XADD x MAXLEN ~ 1 LIMIT @ 9-9 a b
XADD x @ a b
XADD x @-1 a b
XADD x 9-@ a b
XTRIM x MAXLEN @
XTRIM x MINID @
XTRIM x MAXLEN ~ 1 LIMIT @
XRANGE x @ +
XRANGE x - @
XRANGE x - + COUNT @
XREVRANGE x + @
XREVRANGE x + - COUNT @
XREAD COUNT @ STREAMS x 0
XREAD BLOCK @ STREAMS x 0
XREAD STREAMS x @-0
XREADGROUP GROUP gr c COUNT @ STREAMS x >
XREADGROUP GROUP gr c BLOCK @ STREAMS x >
XDEL x @
XACK x gr @
XSETID x @
XSETID x 9-9 ENTRIESADDED @
XSETID x 9-9 MAXDELETEDID @ ENTRIESADDED 9
XGROUP CREATE x g2 0 ENTRIESREAD @
XGROUP CREATE x g2 @
XGROUP SETID x gr 0 ENTRIESREAD @
XPENDING x gr - + @
XPENDING x gr IDLE @ - + 5
XCLAIM x gr c @ 1-1
XCLAIM x gr c 0 1-1 IDLE @ FORCE JUSTID
XCLAIM x gr c 0 1-1 TIME @ FORCE JUSTID
XCLAIM x gr c 0 1-1 RETRYCOUNT @ FORCE JUSTID
XAUTOCLAIM x gr c @ 0
XAUTOCLAIM x gr c 0 @
XAUTOCLAIM x gr c 0 0 COUNT @
XINFO STREAM x FULL COUNT @
RESTORE-ASKING r @ $payload
RESTORE-ASKING r 0 $payload IDLETIME @
RESTORE-ASKING r 0 $payload FREQ @
WAIT @ 1
WAIT 0 @
?ACL GENPASS @
?ACL LOG @
?CLIENT KILL ID @
?CLIENT LIST ID @
?CLIENT PAUSE @ WRITE
?CLIENT TRACKING ON REDIRECT @
CLIENT UNBLOCK @
?HELLO @
?LOLWUT VERSION @
?MEMORY USAGE s SAMPLES @
?SLOWLOG GET @
EVAL $number @
EVAL_RO $number @
EVALSHA 0000000000000000000000000000000000000000 @
EVALSHA_RO 0000000000000000000000000000000000000000 @
FCALL nosuch @
FCALL_RO nosuch @
EVAL $tonumber 0 @
EVAL $base2 0 @
EVAL $base8 0 @
EVAL $base10 0 @
EVAL $base16 0 @
EVAL $base36 0 @
EVAL $sum 0 @
EVAL $modulo 0 @
EVAL $minus 0 @
EVAL $floor 0 @
EVAL $sub 0 @
EVAL $hex 0 @
EVAL $integer 0 @
EVAL $bits 0 @
EVAL $json 0 @
EVAL $source 0 @
EVAL $bound 0 @
`), "\n")

// numberWords stand for arguments that have spaces.
var numberWords = map[string]string{
	"$number":   "return {#KEYS, #ARGV}",
	"$tonumber": "return tostring(tonumber(ARGV[1]))",
	"$base2":    "return tostring(tonumber(ARGV[1], 2))",
	"$base8":    "return tostring(tonumber(ARGV[1], 8))",
	"$base10":   "return tostring(tonumber(ARGV[1], 10))",
	"$base16":   "return tostring(tonumber(ARGV[1], 16))",
	"$base36":   "return tostring(tonumber(ARGV[1], 36))",
	"$sum": "local ok, n = pcall(function() return ARGV[1] + 0 end) return ok and string.format('%.17g', n) or " +
		"'none'",
	"$modulo": "local ok, n = pcall(function() return ARGV[1] % 3 end) return ok and string.format('%.17g', n) or " +
		"'none'",
	"$minus":   "local ok, n = pcall(function() return -ARGV[1] end) return ok and string.format('%.17g', n) or 'none'",
	"$floor":   "local ok, n = pcall(math.floor, ARGV[1]) return ok and tostring(n) or 'none'",
	"$sub":     "local ok, n = pcall(string.sub, 'abcdef', ARGV[1]) return ok and n or 'none'",
	"$hex":     "local ok, n = pcall(string.format, '%x', ARGV[1]) return ok and n or 'none'",
	"$integer": "local ok, n = pcall(string.format, '%d', ARGV[1]) return ok and n or 'none'",
	"$bits":    "local ok, n = pcall(bit.tobit, ARGV[1]) return ok and tostring(n) or 'none'",
	"$json": "local ok, n = pcall(cjson.decode, '[' .. ARGV[1] .. ']') return ok and type(n) == 'table' and " +
		"tostring(n[1]) or 'none'",
	"$source": "local f = loadstring('return ' .. ARGV[1]) local ok, n = pcall(f or error) return ok and " +
		"tostring(n) or 'none'",
	"$bound": "local ok, n = pcall(function() for i = ARGV[1], 3 do return i end return 'no turn' end) return ok " +
		"and tostring(n) or 'none'",
}

// noRangeError clears errno of redis-server: its SORT takes what an earlier command has left there for its own.
var noRangeError = step{"ZADD", "q", "1", "q"}

// numberKeys are made anew for each command that names them, and read behind it. A command of which a word begins with
// a key and = has the spelling in the key's value, too.
var numberKeys = map[string]struct{ make, read string }{
	"s":  {"SET s 10", "GET s;PEXPIRETIME s"},
	"f":  {"SET f 10.5", "GET f"},
	"v":  {"SET v @", "GET v"},
	"r":  {"", "GET r;PEXPIRETIME r"},
	"h":  {"HSET h a 10 b 10.5", "HGET h a;HGET h b"},
	"j":  {"HSET j a @", "HGETALL j"},
	"h1": {"HSET h1 a 10", ""},
	"l":  {"RPUSH l a b c a", "LRANGE l 0 -1"},
	"l2": {"", "LRANGE l2 0 -1"},
	"w":  {"RPUSH w 1 @ 2 10;ZADD q 1 q", ""},
	"e":  {"SADD e a", "SMEMBERS e"},
	"z":  {"ZADD z 1 a 2 b 3 c", "ZRANGE z 0 -1 WITHSCORES"},
	"z1": {"ZADD z1 1 a", ""},
	"z2": {"", "ZRANGE z2 0 -1 WITHSCORES"},
	"y":  {"ZADD y 0 a 0 b 0 c", ""},
	"g":  {"GEOADD g 13.361389 38.115556 p 15.087269 37.502669 c", "ZRANGE g 0 -1 WITHSCORES"},
	"x": {"XADD x 1-1 a b;XADD x 2-1 a c;XGROUP CREATE x gr 0;XREADGROUP GROUP gr c COUNT 1 STREAMS x >;XCLAIM x gr " +
		"c 0 1-1 IDLE 3000000 JUSTID", "XRANGE x - +;XINFO GROUPS x;XINFO STREAM x"},
}

// afterNumber puts right what a command with a number did to the connection.
var afterNumber = map[string]string{"SELECT": "SELECT 14", "SWAPDB": "SELECT 14", "MOVE": "SELECT 14",
	"HELLO":  "HELLO 2",
	"CLIENT": "CLIENT UNPAUSE;CLIENT TRACKING OFF"}

// bare is a line of numberCommands without its mark.
func bare(line string) string { return strings.TrimLeft(line, modest+own) }

// numberWord splits a command, puts the spelling into it, and finds the keys that it uses.
func numberWord(line, spelling string) (s step, keys []string) {
	for _, word := range strings.Fields(bare(line)) {
		name, rest, valued := strings.Cut(word, "=@")
		if _, is := numberKeys[name]; is && len(s) > 0 {
			keys = append(keys, name)
			if valued {
				word = name
				if strings.HasPrefix(rest, "*") {
					word = name + "*" // with elements that are not there: see BY
				}
			}
		}
		if text, is := numberWords[word]; is {
			word = text
		}
		s = append(s, strings.ReplaceAll(word, "@", spelling))
	}
	return s, keys
}

// numberSteps are a command with a spelling and what stands around it; the answers to those behind the first prepared
// ones are compared.
func numberSteps(line, spelling string) (steps []step, prepared int) {
	s, keys := numberWord(line, spelling)
	add := func(lines string) {
		for l := range strings.SplitSeq(lines, ";") {
			if l == "" {
				continue
			}
			words := strings.Fields(l)
			for i, w := range words {
				if w == "@" {
					words[i] = spelling
				}
			}
			steps = append(steps, words)
		}
	}
	if len(keys) > 0 {
		steps = append(steps, append(step{"DEL", "s2"}, keys...))
	}
	for _, k := range keys {
		add(numberKeys[k].make)
		if k == "v" && strings.Contains(line, "*") { // weights of three elements
			steps = append(steps, step{"MSET", "va", spelling, "vb", "1", "vc", "2"}, noRangeError)
		}
	}
	prepared = len(steps)
	steps = append(steps, s)
	add(afterNumber[s[0]])
	for _, k := range keys {
		add(numberKeys[k].read)
	}
	return steps, prepared
}

// numericArgs counts the arguments that the documentation calls numbers.
func numericArgs(args []docArg) (n int) {
	for _, a := range args {
		switch a.kind {
		case "integer", "double", "unix-time":
			n++
		}
		n += numericArgs(a.args)
	}
	return n
}

// TestNumbers puts each spelling of a number where each command takes one, and wants the answers of redis-server, and
// the same keys behind it. A served command whose documentation has a number must be in the table, as often as it has
// numbers.
func TestNumbers(t *testing.T) {
	l := open(t)
	list, err := loadReviewed("numbers")
	must(t, err)
	d, err := newRedisDialect(t.Context(), l.ours().redis, l.reference().redis, list)
	must(t, err)
	original := redis.NewClient(&redis.Options{Addr: l.reference().redis, DB: 14})
	defer original.Close()
	const setting = "proto-max-bulk-len"
	before, err := original.ConfigGet(t.Context(), setting).Result()
	must(t, err)
	must(t, original.ConfigSet(t.Context(), setting, strconv.Itoa(64<<20)).Err())
	defer original.ConfigSet(context.WithoutCancel(t.Context()), setting, before[setting])
	must(t, original.Set(t.Context(), "payload", "10", 0).Err())
	payload, err := original.Dump(t.Context(), "payload").Result()
	must(t, err)
	numberWords["$payload"] = payload
	for _, c := range d.all {
		have := 0
		for _, line := range numberCommands {
			if name := strings.Join(c.words, " ") + " "; strings.HasPrefix(strings.ToLower(bare(line))+" ", name) {
				have += strings.Count(line, "@")
			}
		}
		if want := numericArgs(c.args); have < want {
			t.Errorf("%s has %d numbers, and the table has %d of them", c.name, want, have)
		}
	}
	a, err := d.begin(l.ours().redis, 0)
	must(t, err)
	defer a.Close()
	b, err := d.begin(l.reference().redis, 0)
	must(t, err)
	defer b.Close()
	asked, told := 0, 0
	began := time.Now()
	for _, line := range numberCommands {
		var cases [][]step
		var firsts []int
		for _, sp := range spellings {
			if n, err := strconv.ParseInt(sp, 10, 64); strings.HasPrefix(line, modest) && err == nil && n < -1000 {
				continue
			}
			steps, first := numberSteps(line, sp)
			cases, firsts = append(cases, steps), append(firsts, first)
		}
		theirs := make(chan [][]reply, 1)
		go func() { theirs <- b.(*redisSession).askAll(cases) }()
		ours := a.(*redisSession).askAll(cases)
		their := <-theirs
		shown := 0
	next:
		for i, steps := range cases {
			asked++
			if len(ours[i]) != len(steps) || len(their[i]) != len(steps) {
				t.Fatalf("%s: a server stopped answering: ours %v, theirs %v", d.show(steps[firsts[i]]), ours[i],
					their[i])
			}
			for j := firsts[i]; j < len(steps); j++ {
				x, y := ours[i][j], their[i][j]
				if strings.HasPrefix(line, own) && x.kind != '-' && y.kind != '-' {
					continue
				}
				if sameReply(d.describe(steps[j]), steps[j], x, y) {
					continue
				}
				command := d.show(steps[firsts[i]])
				if known := list.allows(command, x, y); known != nil {
					known.met++
					continue next
				}
				if shown++; shown <= 8 {
					t.Errorf("%s, then %s\n\tours   %.200v\n\ttheirs %.200v", command, d.show(steps[j]), x, y)
				}
				told++
				continue next
			}
		}
	}
	t.Logf("%d numbers in %d places, %d answers in %v; %d differ", len(spellings), len(numberCommands), asked,
		time.Since(began).Round(time.Millisecond), told)
	for _, k := range list.allowed {
		if k.met == 0 {
			t.Logf("%s: no answer differs as %v says", list.file, k.command)
		}
	}
}

// askAll sends lists of commands together, and returns their answers, fewer if the server stops answering.
func (s *redisSession) askAll(cases [][]step) (replies [][]reply) {
	sent := make(chan struct{})
	defer func() { <-sent }()
	if s.SetDeadline(time.Now().Add(patience)) != nil {
		close(sent)
		return make([][]reply, len(cases))
	}
	go func() {
		defer close(sent)
		for _, c := range cases {
			var b strings.Builder
			for _, cmd := range c {
				fmt.Fprintf(&b, "*%d\r\n", len(cmd))
				for _, arg := range cmd {
					fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(arg), arg)
				}
			}
			if _, err := io.WriteString(s, b.String()); err != nil {
				return // what is missing is seen by the reader
			}
		}
	}()
	for _, c := range cases {
		var all []reply
		for range c {
			r, err := s.read()
			if err != nil {
				return append(replies, slices.Repeat([][]reply{all}, len(cases)-len(replies))...)
			}
			all = append(all, r)
		}
		replies = append(replies, all)
	}
	return replies
}
