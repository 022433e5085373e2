package gateway

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// shelf performs commands on keys in memory, as a transaction over any of them would, and without a store: it shows
// what a command does that a store may refuse.
type shelf struct {
	t   *staged
	w   resp.Writer
	all []string
}

func newShelf(proto int, names ...string) *shelf {
	g := &Gateway{dbs: make([]database, 1)}
	g.o.MaxValueBytes = client.MaxValueLen
	s := &shelf{t: newStaged(&conn{g: g, share: netsrv.NewBudget(1 << 30).Share(nil)}), all: names}
	s.t.Now = 1e12
	s.w.Proto = proto
	for _, n := range names {
		k := s.t.Add(stagedName{DB: 0, Name: n})
		k.Room = math.MaxInt
	}
	return s
}

// do performs a command on the shelf's keys. It may be of one key or of several.
func (s *shelf) do(t testing.TB, args ...string) []byte {
	t.Helper()
	var a [][]byte
	for _, x := range args {
		a = append(a, []byte(x))
	}
	cmd := find(a[0])
	if cmd != nil && cmd.sub != nil {
		cmd = cmd.subcommand(a[1])
	}
	if cmd == nil || cmd.key == nil && cmd.keys == nil {
		t.Fatalf("%q is not for a shelf", args)
	}
	s.w.Reset(1 << 20)
	if cmd.Arity > 0 && len(a) != cmd.Arity || len(a) < -cmd.Arity {
		values.WriteRefusal(&s.w, wrongArgs(cmd))
		return s.w.Bytes()
	}
	s.t.run(cmd, a, &s.w)
	if s.t.Err != nil || len(s.t.Keys) != len(s.all) {
		t.Fatalf("%q: %v, %d keys", args, s.t.Err, len(s.t.Keys))
	}
	return s.w.Bytes()
}

// zgen makes random commands on sorted sets and positions.
type zgen struct{ *rand.Rand }

const zkeys = 6

func (g zgen) pick(s ...string) string { return s[g.IntN(len(s))] }
func (g zgen) key() string             { return "z" + strconv.Itoa(g.IntN(zkeys)) }
func (g zgen) member() string {
	return g.pick("a", "b", "c", "d", "e", "f", "g", "1", "2", "10", "", "A", "hello world", "\x00\r\n", "é", "-", "+",
		strconv.Itoa(g.IntN(300)), strconv.Itoa(g.IntN(30)))
}

func (g zgen) score() string {
	if g.IntN(3) > 0 {
		return strconv.Itoa(g.IntN(20) - 5)
	}
	return g.pick("0", "-0", "1.5", "0.1", "3.0e3", "1e300", "-1e300", "inf", "-inf", "+inf", "Infinity", "nan",
		"1e400", "1e-400", "abc", "", " 1", "1 ", "0x10", "0x1p-3", "1_0",
		"5e-324", "123456789.123456789", "4503599627370497", "12345678901234567890", "1e17", "0.30000000000000004",
		"1e16", "1e21", "-1.7976931348623157e308", "1.", ".5", ".", "+5", "--5", "1e", "3.14159265358979",
		strconv.FormatFloat(g.NormFloat64()*math.Pow(10, float64(g.IntN(40)-20)), 'g', -1, 64))
}

func (g zgen) bound() string {
	return g.pick("", "", "(") + g.pick("-inf", "+inf", "0", "1", "5", "-3", "10", "inf", "1.5", "nan", "", "abc", " 2",
		"2 ", "1e400", "-1e400", "3\x00x", "(1", "0x3")
}

func (g zgen) lex() string {
	return g.pick("-", "+", "[", "(", "[a", "(a", "[c", "(c", "[f", "(g", "[b", "a", "", "--", "[1", "(10", "[\xff",
		"[hello", "(-")
}

func (g zgen) index() string {
	return g.pick("0", "1", "2", "-1", "-2", "5", "10", "-10", "1000", "-1000", "9223372036854775807",
		"-9223372036854775808", "abc", "1.5", "", "+1")
}

func (g zgen) some(n int, f func() string) (list []string) {
	for range n {
		list = append(list, f())
	}
	return list
}

func (g zgen) options(list ...string) (out []string) {
	for range max(0, g.IntN(6)-3) {
		out = append(out, strings.Split(list[g.IntN(len(list))], " ")...)
	}
	return out
}

func (g zgen) limit() string {
	return "LIMIT " + g.pick("0", "1", "2", "-1", "5", "x", "1000") + " " + g.pick("0", "1", "2", "-1", "5", "-5", "x",
		"9223372036854775807")
}

func (g zgen) command() []string {
	k := g.key()
	if g.IntN(60) == 0 {
		if g.IntN(10) == 0 {
			k = "g0"
		}
		if g.IntN(2) == 0 {
			return append([]string{"SADD", k}, g.some(1+g.IntN(8), g.member)...)
		}
		return [][]string{{"SET", k, "text"}, {"DEL", k}, {"TYPE", k}, {"SETNX", k, "text"}}[g.IntN(4)]
	}
	switch n := g.IntN(34); n {
	case 0, 1, 2, 3, 4, 5:
		a := append([]string{"ZADD", k}, g.options("nx", "XX", "gt", "LT", "ch", "INCR")...)
		for range 1 + g.IntN(5)*g.IntN(2)*g.IntN(2) {
			a = append(a, g.score(), g.member())
		}
		if g.IntN(25) == 0 {
			a = append(a, "1")
		}
		return a
	case 6:
		a := []string{"ZADD", k} // many, as one score often
		same := g.IntN(2) == 0
		for range g.IntN(200) {
			s := g.IntN(50)
			if same {
				s = 0
			}
			a = append(a, strconv.Itoa(s), strconv.Itoa(g.IntN(300)))
		}
		return a
	case 7:
		return []string{"ZINCRBY", k, g.score(), g.member()}
	case 8:
		return append([]string{"ZREM", k}, g.some(1+g.IntN(12), g.member)...)
	case 9:
		return []string{"ZREMRANGEBYRANK", k, g.index(), g.index()}
	case 10:
		return []string{"ZREMRANGEBYSCORE", k, g.bound(), g.bound()}
	case 11:
		return append([]string{g.pick("ZPOPMIN", "zpopmax"), k}, g.options("1", "2", "0", "-1", "abc", "100")...)
	case 12:
		return []string{"ZCARD", k}
	case 13:
		return []string{"ZCOUNT", k, g.bound(), g.bound()}
	case 14:
		return []string{"ZSCORE", k, g.member()}
	case 15:
		return append([]string{"ZMSCORE", k}, g.some(1+g.IntN(12), g.member)...)
	case 16:
		return []string{g.pick("ZRANK", "ZREVRANK"), k, g.member()}
	case 17, 18:
		return append([]string{g.pick("ZRANGE", "ZREVRANGE"), k, g.index(), g.index()},
			g.options("withscores", "REV", "WITHSCORES", g.limit(), "foo")...)
	case 19, 20:
		return append([]string{"ZRANGE", k, g.bound(), g.bound(), "BYSCORE"},
			g.options("withscores", "REV", g.limit(), "limit 1", "bylex")...)
	case 21:
		return append([]string{g.pick("ZRANGEBYSCORE", "ZREVRANGEBYSCORE"), k, g.bound(), g.bound()},
			g.options("withscores", g.limit(), "rev", "WITHSCORES")...)
	case 22:
		return append([]string{"ZRANDMEMBER", k}, g.options("1", "-3", "1000", "withscores", "0", "abc",
			"-9223372036854775808", "5", "-4611686018427387905 withscores")...)
	case 23:
		return append([]string{"ZSCAN", k, g.pick("0", "0", "0", "abc", "")},
			g.options("COUNT 1000", "match *", "MATCH 1*", "count 0", "count", "foo 1", "count x")...)
	case 24:
		return g.store(k)
	case 25, 26:
		name := g.pick("ZUNION", "ZINTER", "ZDIFF", "ZINTERCARD")
		return append(append([]string{name}, g.sources()...), g.combineOptions("withscores", "limit 2", "LIMIT 0",
			"limit -1", "limit x")...)
	case 27:
		return []string{"OBJECT", "ENCODING", k}
	case 28:
		names := g.some(1+g.IntN(3), g.key)
		if g.IntN(2) == 0 {
			a := []string{g.pick("BZPOPMIN", "bzpopmax"), names[0], g.pick("x", "-1", "")}
			if g.IntN(2) == 0 { // one that has something, most often
				return []string{"BZPOPMIN", names[0], "0.001"}
			}
			return a
		}
		if g.IntN(4) == 0 {
			return []string{"BZMPOP", g.pick("0.001", "x"), "1", names[0], g.pick("min", "MAX"), "count",
				g.pick("2", "0", "x")}
		}
		return append(append(
			[]string{"ZMPOP", g.pick(strconv.Itoa(len(names)), strconv.Itoa(len(names)), "0", "x", "9")}, names...),
			append([]string{g.pick("MIN", "max", "foo")},
				g.options("COUNT 2", "count 0", "count x", "COUNT 100")...)...)
	case 29:
		return []string{g.pick("EXPIRE", "PERSIST"), k, "100000"}[:2+g.IntN(2)]
	default:
		return g.geo(k)
	}
}

// sources is a number and so many keys, most often.
func (g zgen) sources() []string {
	names := g.some(1+g.IntN(4), g.key)
	return append([]string{g.pick(strconv.Itoa(len(names)), strconv.Itoa(len(names)), strconv.Itoa(len(names)), "0",
		"-1", "x", "20")}, names...)
}

func (g zgen) combineOptions(more ...string) []string {
	return g.options(append(more, "weights 1 2", "WEIGHTS 2.5", "weights 1 2 3", "weights x", "weights inf",
		"weights -1 0.1", "aggregate sum", "AGGREGATE MIN", "aggregate max", "aggregate foo", "aggregate")...)
}

func (g zgen) store(k string) []string {
	switch g.IntN(3) {
	case 0:
		src := g.key()
		switch g.IntN(3) {
		case 0:
			return append([]string{"ZRANGESTORE", k, src, g.bound(), g.bound(), "byscore"},
				g.options(g.limit(), "rev", "withscores")...)
		case 1:
			return []string{"ZRANGESTORE", k, "lex", "[a", "+", "bylex"}
		}
		return append([]string{"ZRANGESTORE", k, src, g.index(), g.index()}, g.options("rev", g.limit(), "byscore")...)
	case 1:
		return []string{"ZREMRANGEBYRANK", k, "0", "-20"}
	}
	name, sources := g.pick("ZUNIONSTORE", "ZINTERSTORE", "ZDIFFSTORE"), g.sources()
	return append(append([]string{name, k}, sources...), g.combineOptions("withscores")...)
}

// lexical commands are on a key of their own, whose members have all the same score: else they mean nothing.
func (g zgen) lexical() []string {
	k := "lex"
	switch g.IntN(8) {
	case 0, 1:
		a := []string{"ZADD", k}
		for range 1 + g.IntN(6) {
			a = append(a, "0", g.member())
		}
		return a
	case 2:
		return []string{"ZREMRANGEBYLEX", k, g.lex(), g.lex()}
	case 3:
		return []string{"ZLEXCOUNT", k, g.lex(), g.lex()}
	case 4, 5:
		return append([]string{g.pick("ZRANGEBYLEX", "ZREVRANGEBYLEX"), k, g.lex(), g.lex()},
			g.options(g.limit(), "withscores", "rev")...)
	}
	return append([]string{"ZRANGE", k, g.lex(), g.lex(), "bylex"},
		g.options(g.limit(), "rev", "withscores", "byscore")...)
}

// distances is a key whose scores may differ in their last digits, since sine and cosine are rounded otherwise there.
const distances = "gd"

func (g zgen) storeTo(key string) []string {
	if g.IntN(3) == 0 {
		return []string{"storedist", distances}
	}
	return []string{g.pick("STORE", "store"), key}
}

func (g zgen) lon() string {
	if g.IntN(12) == 0 {
		return g.pick("180", "-180", "181", "abc", "nan", "0", "179.9999")
	}
	return strconv.FormatFloat(g.Float64()*360-180, 'f', 6, 64)
}

func (g zgen) lat() string {
	if g.IntN(12) == 0 {
		return g.pick("85.05112878", "-85.05112878", "86", "abc", "", "0", "-85")
	}
	return strconv.FormatFloat(g.Float64()*170-85, 'f', 6, 64)
}

func (g zgen) place() string { return "p" + strconv.Itoa(g.IntN(120)) }

func (g zgen) radius() []string {
	return []string{strconv.FormatFloat(math.Pow(10, g.Float64()*8), 'f', 3, 64),
		g.pick("m", "km", "FT", "mi", "m", "m", "parsec")}
}

// geo commands search keys of their own: positions that are equally far away come in any order.
func (g zgen) geo(k string) []string {
	if g.IntN(5) == 0 {
		// any score is a position
		return append([]string{g.pick("GEOPOS", "GEOHASH", "GEODIST"), k}, g.some(2, g.member)...)
	}
	k = "g" + strconv.Itoa(g.IntN(2))
	to := "g" + strconv.Itoa(g.IntN(3))
	options := func(more ...string) []string {
		return g.options(append(more, "WITHDIST", "withhash", "WITHCOORD", "asc", "DESC", "count 5", "COUNT 3 ANY",
			"any", "count 0", "count x", "asc withdist", "asc withcoord withhash")...)
	}
	switch g.IntN(9) {
	case 0, 1, 2:
		a := append([]string{"GEOADD", k}, g.options("nx", "xx", "CH")...)
		for range 1 + g.IntN(8) {
			a = append(a, g.lon(), g.lat(), g.place())
		}
		return a
	case 3:
		return append([]string{"GEODIST", k, g.place(), g.place()}, g.options("m", "KM", "ft", "mi", "foo")...)
	case 4:
		return append([]string{g.pick("GEOPOS", "GEOHASH"), k}, g.some(1+g.IntN(4), g.place)...)
	case 5:
		a := append(append([]string{g.pick("GEORADIUS", "GEORADIUS_RO"), k, g.lon(), g.lat()}, g.radius()...),
			options()...)
		if g.IntN(4) == 0 {
			return append(append([]string{"GEORADIUS", k, g.lon(), g.lat()}, g.radius()...),
				append(options(), g.storeTo(to)...)...)
		}
		return a
	case 6:
		return append(append([]string{g.pick("GEORADIUSBYMEMBER", "GEORADIUSBYMEMBER_RO"), k, g.place()},
			g.radius()...), options()...)
	case 7:
		a := []string{"GEOSEARCH", k}
		if g.IntN(5) == 0 {
			if a = []string{"GEOSEARCHSTORE", to, k}; g.storeTo("")[0] == "storedist" {
				a = []string{"GEOSEARCHSTORE", distances, k, "storedist"}
			}
		}
		if g.IntN(2) == 0 {
			a = append(a, "FROMMEMBER", g.place())
		} else if g.IntN(8) > 0 {
			a = append(a, "fromlonlat", g.lon(), g.lat())
		}
		r := g.radius()
		if g.IntN(2) == 0 {
			a = append(append(a, "BYBOX", r[0]), g.radius()...)
		} else if g.IntN(8) > 0 {
			a = append(append(a, "byradius"), r...)
		}
		return append(a, options("frommember p1", "byradius 1 m", "fromlonlat 1 1")...)
	}
	return [][]string{{"ZRANGE", to, "0", "-1", "withscores"}, {"ZRANGE", distances, "0", "-1"}}[g.IntN(2)]
}

// any is a command of any kind.
func (g zgen) any() []string {
	if g.IntN(6) == 0 {
		return g.lexical()
	}
	return g.command()
}

// alikeZ is whether two replies to a command are the same but for chance.
func alikeZ(cmd []string, got, want []byte) bool {
	switch strings.ToLower(cmd[0]) {
	case "zscan", "zrandmember":
		a, b := strings.Split(string(got), "\r\n"), strings.Split(string(want), "\r\n")
		if cmd[0] == "ZSCAN" && b[0] == "*2" && a[0] == "*2" && (a[2] != "0" || b[2] != "0") {
			return true // a part of a large set
		}
		if cmd[0] == "ZRANDMEMBER" && b[0][0] != '-' && !slices.Contains(cmd, "1000") {
			return a[0][0] == b[0][0] && (b[0][0] == '$' || a[0] == b[0]) // others were chosen
		}
		slices.Sort(a)
		slices.Sort(b)
		return slices.Equal(a, b)
	}
	return bytes.Equal(got, want)
}

// TestSortedSetsLikeRedis compares seeded commands on a shelf, where all of them are possible, with a redis-server's.
func TestSortedSetsLikeRedis(t *testing.T) {
	seeds := uint64(40)
	if n, err := strconv.Atoi(os.Getenv("KVD_SEEDS")); err == nil {
		seeds = uint64(n)
	}
	redis := startRedis(t)
	names := []string{"lex", "g0", "g1", "g2", distances}
	for i := range zkeys {
		names = append(names, "z"+strconv.Itoa(i))
	}
	bad := 0
	for seed := range seeds {
		g := zgen{rand.New(rand.NewPCG(seed, 11))}
		proto := 2 + int(seed%2)
		s := newShelf(proto, names...)
		theirs := dial(t, "unix", redis)
		theirs.do(t, "FLUSHALL")
		theirs.do(t, "HELLO", strconv.Itoa(proto))
		var script []string
		for range 600 {
			c := g.any()
			script = append(script, fmt.Sprintf("%.200q", c))
			got, want := s.do(t, c...), []byte(theirs.do(t, c...))
			if !alikeZ(c, got, want) {
				t.Errorf("seed %d, RESP%d: %.300q\n got %.400q\nwant %.400q\nafter\n%s", seed, proto, c, got, want,
					strings.Join(script[max(0, len(script)-4):], "\n"))
				if bad++; bad > 8 {
					t.FailNow()
				}
				break
			}
		}
	}
}

// TestSortedSetsServed is the same over a gateway, in pipelines.
func TestSortedSetsServed(t *testing.T) {
	redis := startRedis(t)
	for name, api := range map[string]func(t *testing.T) client.API{
		"fake":  func(*testing.T) client.API { return clienttest.New(clienttest.Options{}) },
		"store": func(t *testing.T) client.API { return newStore(t) },
	} {
		t.Run(name, func(t *testing.T) {
			addr := serve(t, Options{Databases: []Database{{"default", api(t)}}})
			for seed := range uint64(4) {
				g := zgen{rand.New(rand.NewPCG(seed, 12))}
				ours, theirs := dial(t, "tcp", addr), dial(t, "unix", redis)
				for _, p := range []*peer{ours, theirs} {
					p.do(t, "FLUSHALL")
					p.do(t, "HELLO", strconv.Itoa(2+int(seed%2)))
				}
				for range 40 {
					var cmds [][]string
					for range 1 + g.IntN(30) {
						cmds = append(cmds, g.any())
					}
					ours.send(t, cmds...)
					theirs.send(t, cmds...)
					for _, c := range cmds {
						if got, want := ours.reply(t), theirs.reply(t); !alikeZ(c, got, want) {
							t.Fatalf("seed %d: %.300q\n got %.400q\nwant %.400q", seed, c, got, want)
						}
					}
				}
			}
		})
	}
}

func TestSortedSets(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	for _, c := range []struct{ cmd, reply string }{
		{"ZADD z 1 a 2 b 2 c", ":3\r\n"},
		{"ZADD z CH 3 a 2 b 4 d", ":2\r\n"},
		{"ZADD z INCR 0.5 a", bulk("3.5")},
		{"ZADD z NX INCR 1 a", "$-1\r\n"},
		{"ZADD z NX XX 1 a", "-ERR XX and NX options at the same time are not compatible\r\n"},
		{"ZINCRBY z nan a", "-ERR value is not a valid float\r\n"},
		{"ZRANGE z 0 -1 WITHSCORES", "*8\r\n" + bulk("b") + bulk("2") + bulk("c") + bulk("2") + bulk("a") +
			bulk("3.5") + bulk("d") + bulk("4")},
		{"ZREVRANGE z 0 0", "*1\r\n" + bulk("d")},
		{"ZRANGE z (2 +inf BYSCORE LIMIT 1 5", "*1\r\n" + bulk("d")},
		{"ZRANK z a", ":2\r\n"},
		{"ZREVRANK z a", ":1\r\n"},
		{"ZCOUNT z 2 3.5", ":3\r\n"},
		{"ZSCORE z x", "$-1\r\n"},
		{"ZMSCORE z a x", "*2\r\n" + bulk("3.5") + "$-1\r\n"},
		{"ZINTERCARD 2 z z LIMIT 3", ":3\r\n"},
		{"ZDIFF 2 z other", "*4\r\n" + bulk("b") + bulk("c") + bulk("a") + bulk("d")},
		{"ZUNIONSTORE z 1 z WEIGHTS 2", ":4\r\n"},
		{"ZSCORE z a", bulk("7")},
		{"ZUNIONSTORE to 1 z", ":4\r\n"},
		{"ZDIFFSTORE to 2 z to", ":0\r\n"},
		{"EXISTS to", ":0\r\n"},
		{"ZMPOP 1 z MAX COUNT 1", "*2\r\n" + bulk("z") + "*1\r\n*2\r\n" + bulk("d") + bulk("8")},
		{"ZMPOP 2 none z MAX", "*2\r\n" + bulk("z") + "*1\r\n*2\r\n" + bulk("a") + bulk("7")},
		{"ZADD z 7 a", ":1\r\n"},
		{"ZMPOP 2 none none2 MIN", "*-1\r\n"},
		{"TYPE z", "+zset\r\n"},
		{"OBJECT ENCODING z", bulk("listpack")},
		{"GET z", wrongType},
		{"SET text 1", "+OK\r\n"},
		{"ZADD text 1 a", wrongType},
		{"ZUNION 2 z text", wrongType},
		{"GEORADIUS text 1 1 1 m", wrongType},
		{"ZPOPMIN z 3", "*6\r\n" + bulk("b") + bulk("4") + bulk("c") + bulk("4") + bulk("a") + bulk("7")},
		{"EXISTS z", ":0\r\n"},
		{"GEOADD g 13.361389 38.115556 Palermo 15.087269 37.502669 Catania", ":2\r\n"},
		{"GEODIST g Palermo Catania", bulk("166274.1516")},
		{"GEOHASH g Palermo x", "*2\r\n" + bulk("sqc8b49rny0") + "$-1\r\n"},
		{"GEOPOS g Palermo x", "*2\r\n*2\r\n" + bulk("13.36138933897018433") + bulk("38.11555639549629859") +
			"*-1\r\n"},
		{"GEOSEARCH g FROMLONLAT 15 37 BYRADIUS 200 km ASC WITHDIST", "*2\r\n*2\r\n" + bulk("Catania") +
			bulk("56.4413") + "*2\r\n" + bulk("Palermo") + bulk("190.4424")},
		{"GEOADD g 200 1 x", "-ERR invalid longitude,latitude pair 200.000000,1.000000\r\n"},
		{"COMMAND GETKEYS GEORADIUS g 1 1 1 m STORE to", "*2\r\n" + bulk("g") + bulk("to")},
		{"COMMAND GETKEYS ZUNIONSTORE to 2 a b", "*3\r\n" + bulk("to") + bulk("a") + bulk("b")},
		{"HELLO 3", ""},
		{"ZRANGE g 0 0 WITHSCORES", "*1\r\n*2\r\n" + bulk("Palermo") + ",3479099956230698\r\n"},
		{"ZSCORE g x", "_\r\n"},
	} {
		if got := p.do(t, strings.Fields(c.cmd)...); c.reply != "" && got != c.reply {
			t.Errorf("%s: got %q, want %q", c.cmd, got, c.reply)
		}
	}
}

// TestSortedSetsStored: commands over several keys, which change keys of a shelf.
func TestSortedSetsStored(t *testing.T) {
	s := newShelf(2, "a", "b", "to")
	for _, c := range []struct{ cmd, reply string }{
		{"ZADD a 1 x 2 y", ":2\r\n"},
		{"ZADD b 10 y 20 z", ":2\r\n"},
		{"SET to text EX 100", "+OK\r\n"},
		{"ZUNIONSTORE to 2 a b", ":3\r\n"},
		{"TTL to", ":-1\r\n"},
		{"ZRANGE to 0 -1 WITHSCORES", "*6\r\n" + bulk("x") + bulk("1") + bulk("y") + bulk("12") + bulk("z") +
			bulk("20")},
		{"ZINTERSTORE to 2 a b AGGREGATE MAX", ":1\r\n"},
		{"ZDIFFSTORE to 2 a a", ":0\r\n"},
		{"EXISTS to", ":0\r\n"},
		{"ZRANGESTORE to b 0 0 REV", ":1\r\n"},
		{"EXPIRE to 100", ":1\r\n"},
		{"ZADD to 1 new", ":1\r\n"},
		{"PERSIST to", ":1\r\n"},
		{"ZRANGE to 0 -1", "*2\r\n" + bulk("new") + bulk("z")},
		{"ZRANGESTORE to b 5 6", ":0\r\n"},
		{"ZMPOP 2 to b MIN", "*2\r\n" + bulk("b") + "*1\r\n*2\r\n" + bulk("y") + bulk("10")},
		{"GEOADD a 13.361389 38.115556 Palermo", ":1\r\n"},
		{"GEOSEARCHSTORE to a FROMMEMBER Palermo BYBOX 1 1 m STOREDIST", ":1\r\n"},
		{"ZSCORE to Palermo", bulk("0")},
		{"GEORADIUS a 100 1 1 m STORE to", ":0\r\n"},
		{"EXISTS to", ":0\r\n"},
	} {
		if got := string(s.do(t, strings.Fields(c.cmd)...)); got != c.reply {
			t.Errorf("%s: got %q, want %q", c.cmd, got, c.reply)
		}
	}
}

// TestSortedSetsCorrupt: bytes that are no sorted set are an error that names the key, and stay as they are.
func TestSortedSetsCorrupt(t *testing.T) {
	api := clienttest.New(clienttest.Options{})
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", api}}}))
	bad := client.Op{Kind: client.OpPut, Key: []byte("k"), Value: []byte("no sorted set"), Type: client.SortedSet}
	api.Do(t.Context(), []client.Op{bad})
	const want = "-ERR kvd: corrupt zset at key \"k\": nothing was done\r\n"
	for _, c := range []string{"ZADD k 1 a", "ZINCRBY k 1 a", "ZREM k a", "ZREMRANGEBYRANK k 0 1", "ZPOPMIN k",
		"ZCARD k", "ZCOUNT k 0 1", "ZSCORE k a", "ZMSCORE k a", "ZRANK k a",
		"ZRANGE k 0 1", "ZRANDMEMBER k", "ZRANDMEMBER k 1", "ZSCAN k 0", "ZUNION 1 k", "ZUNIONSTORE k 1 k",
		"ZRANGESTORE k k 0 1", "ZMPOP 1 k MIN", "GEOADD k 1 1 a", "GEODIST k a b", "GEOPOS k a",
		"GEOHASH k a", "GEORADIUS k 1 1 1 m", "GEOSEARCH k FROMMEMBER a BYRADIUS 1 m"} {
		p.want(t, want, strings.Fields(c)...)
	}
	p.want(t, "+zset\r\n", "TYPE", "k")
	p.want(t, bulk("skiplist"), "OBJECT", "ENCODING", "k")
	p.want(t, ":1\r\n", "DEL", "k")
}

// TestLargeSortedSets: a set may be as long as a collection may be, whatever memory that takes, and no longer.
func TestLargeSortedSets(t *testing.T) {
	for name, api := range map[string]func(t *testing.T) client.API{
		"fake":  func(*testing.T) client.API { return clienttest.New(clienttest.Options{}) },
		"store": func(t *testing.T) client.API { return newStore(t) },
	} {
		t.Run(name, func(t *testing.T) {
			p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", api(t)}}}))
			const n = 10_000
			add := []string{"ZADD", "z"}
			for i := range n {
				add = append(add, strconv.Itoa(i%100), fmt.Sprintf("member:%06d", i))
			}
			p.want(t, fmt.Sprintf(":%d\r\n", n), add...)
			p.want(t, ":0\r\n", add...)
			p.want(t, fmt.Sprintf(":%d\r\n", n), "ZCARD", "z")
			p.want(t, ":50\r\n", "ZRANK", "z", "member:005000")
			p.want(t, bulk("99.5"), "ZINCRBY", "z", "0.5", "member:000099")
			p.want(t, ":9999\r\n", "ZRANK", "z", "member:000099")
			p.want(t, fmt.Sprintf(":%d\r\n", n), "ZUNIONSTORE", "z", "2", "z", "z")
			p.want(t, bulk("skiplist"), "OBJECT", "ENCODING", "z")
			if r := p.do(t, "ZRANGE", "z", "0", "-1"); !strings.HasPrefix(r, "*10000\r\n") {
				t.Errorf("%.100q", r)
			}
			big := strings.Repeat("x", 1<<20)
			for i := range 3 {
				p.want(t, ":1\r\n", "ZADD", "z", "1", big+strconv.Itoa(i))
			}
			p.want(t, "-ERR kvd: zset longer than 4 MiB, or than values may be: nothing was done\r\n", "ZADD", "z", "1",
				big)
			p.want(t, "$-1\r\n", "ZSCORE", "z", big)
			p.want(t, "-ERR kvd: random members of more than 4 MiB\r\n", "ZRANDMEMBER", "z", "-1000000000")
			p.want(t, ":10003\r\n", "ZREMRANGEBYRANK", "z", "0", "-1")
			p.want(t, ":0\r\n", "EXISTS", "z")
		})
	}
}

// TestZScanWhileItChanges: a member that is there all the time is returned once, and a set that is large takes several
// calls.
func TestZScanWhileItChanges(t *testing.T) {
	s := newShelf(2, "z")
	for i := range 1000 {
		s.do(t, "ZADD", "z", strconv.Itoa(i), "stays"+strconv.Itoa(i))
	}
	seen := map[string]int{}
	calls := 0
	for cursor := "0"; calls == 0 || cursor != "0"; calls++ {
		lines := strings.Split(string(s.do(t, "ZSCAN", "z", cursor, "COUNT", "50", "MATCH", "stays*")), "\r\n")
		cursor = lines[2]
		for i := 5; i < len(lines); i += 4 {
			seen[lines[i]]++
		}
		for i := range 40 {
			s.do(t, "ZADD", "z", "-1", fmt.Sprint("comes", calls, i))
			s.do(t, "ZREM", "z", fmt.Sprint("comes", calls-2, i))
		}
	}
	if calls < 10 || calls > 100 {
		t.Errorf("%d calls of ZSCAN", calls)
	}
	for i := range 1000 {
		if n := seen["stays"+strconv.Itoa(i)]; n != 1 {
			t.Errorf("member %d was returned %d times", i, n)
		}
	}
}

// FuzzSortedSet: any bytes as a sorted set, and any argument, are a reply and no panic.
func FuzzSortedSet(f *testing.F) {
	s := newShelf(2, "k")
	s.do(f, "ZADD", "k", "1", "a", "2", "b")
	f.Add(s.t.Keys[0].Value, "a", "(1", "5")
	f.Add([]byte{1, 0, 0, 0}, "[a", "-", "+inf")
	f.Fuzz(func(t *testing.T, value []byte, a, b, c string) {
		for _, cmd := range [][]string{
			{"ZADD", "k", b, a}, {"ZADD", "k", "xx", b, a}, {"ZRANGE", "k", b, c},
			{"ZRANGE", "k", b, c, "byscore", "rev", "limit", b, c}, {"ZRANGE", "k", a, b, "bylex"},
			{"ZREM", "k", a, b, a},
			{"ZREMRANGEBYSCORE", "k", b, c}, {"ZREMRANGEBYLEX", "k", a, b}, {"ZREMRANGEBYRANK", "k", b, c},
			{"ZSCAN", "k", b, "match", c}, {"ZPOPMAX", "k", b},
			{"ZUNION", "2", "k", "k", "weights", b, c, "withscores"},
			{"GEOADD", "k", b, c, a}, {"GEOSEARCH", "k", "frommember", a, "byradius", b, "m", "withcoord", "count", c},
			{"GEOPOS", "k", a}, {"ZINCRBY", "k", b, a},
		} {
			s := newShelf(3, "k")
			k := &s.t.Keys[0].Key
			k.Value, k.Present, k.Type = value, true, client.SortedSet
			if r := s.do(t, cmd...); len(r) == 0 {
				t.Errorf("%q: no reply", cmd)
			}
			if k.Changed && k.Present {
				if _, err := collection.ParseZSet(k.Value); err != nil {
					t.Errorf("%q makes %x of %x: %v", cmd, k.Value, value, err)
				}
			}
		}
	})
}
