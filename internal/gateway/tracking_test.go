package gateway

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// eventsOf is what a connection that listens to all events hears of each command, which another one gives.
func eventsOf(t *testing.T, open func() *peer, cmds []string) string {
	sub, p := open(), open()
	p.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "KEAmn")
	sub.do(t, "PSUBSCRIBE", "__key*")
	sub.do(t, "SUBSCRIBE", "mark")
	var out strings.Builder
	for i, cmd := range cmds {
		fmt.Fprintf(&out, "%s\n", cmd)
		for part := range strings.SplitSeq(cmd, "|") {
			p.do(t, strings.Fields(part)...)
		}
		mark := message("mark", fmt.Sprint(i))
		p.do(t, "PUBLISH", "mark", fmt.Sprint(i))
		for {
			got := string(sub.reply(t))
			if got == mark {
				break
			}
			f := strings.Split(got, "\r\n")
			fmt.Fprintf(&out, "  %s %s\n", f[6], f[8])
		}
	}
	return out.String()
}

// Events are Redis's, in its order.
func TestEventsLikeRedis(t *testing.T) {
	cmds := strings.Split(strings.TrimSpace(`
SET a 1
SET a 2
SET b 1 EX 100
SET b 1 NX
SET c 1 NX
SET d 1 XX
SETNX e 1
SETNX e 1
SETEX f 100 1
PSETEX f 100000 1
GETSET a 3
GETSET g 3
GET a
GET none
MGET a none b
EXISTS none
TTL none
APPEND a x
APPEND h x
SETRANGE a 1 yy
INCR n
INCRBY n 4
DECR n
INCRBYFLOAT n 1.5
INCR a
GETDEL h
GETDEL none
GETEX a EX 100
GETEX a PERSIST
GETEX a
EXPIRE a 100
EXPIRE none 100
PERSIST a
PERSIST a
EXPIRE a 100 XX
EXPIREAT a 1
MSET m1 1 m2 2
MSETNX m3 1
MSETNX m3 1
RENAME m3 m4
RENAMENX m4 m5
COPY m5 m6
COPY m5 m6 REPLACE
SET mv 1 EX 100
MOVE mv 1
SET mv 2
MOVE mv 1
MOVE none 1
RENAME m6 m5
RENAME m5 m5
MSETNX x1 1 x2 2
MSETNX x1 1 x3 2
RPUSH l1 1 2 3 4 5 6
LMOVE l1 l2 LEFT RIGHT
LMOVE l1 l1 LEFT RIGHT
LMOVE l2 l2 LEFT RIGHT
RPOPLPUSH l2 l1
LMPOP 2 l2 l1 RIGHT COUNT 2
BLPOP l2 l1 0
BRPOP l1 0
BLMPOP 0 1 l1 LEFT
BLMOVE l1 l2 RIGHT LEFT 0
BRPOPLPUSH l2 l1 0
SADD s1 1 2
SADD s2 2 3
SMOVE s1 s2 1
SMOVE s1 s2 2
SMOVE s2 s3 1
SADD s1 2 9
SUNIONSTORE s4 s1 s2
SINTERSTORE s4 s1 s2
SINTERSTORE s4 s1 s3
SDIFFSTORE s4 s2 s3
ZADD z1 1 a 2 b
ZUNIONSTORE z2 1 z1
ZINTERSTORE z2 2 z1 z1
ZDIFFSTORE z3 2 z1 z2
ZRANGESTORE z3 z1 0 0
ZRANGESTORE z3 z1 5 6
ZMPOP 1 z1 MIN
BZPOPMAX z1 0
GEOADD g1 1 1 a
GEOSEARCHSTORE g2 g1 FROMLONLAT 1 1 BYRADIUS 1 km
GEORADIUS g1 1 1 1 km STORE g3
GEORADIUS g1 9 9 1 km STORE g3
SORT s2 STORE l3
BITOP AND bits x1 x2
SET void x
SETRANGE void 0 y
GETDEL void
PFADD h1 a
PFADD h2 b
PFMERGE h2 h1
EVAL redis.call('set','x1','7')redis.call('rename','x1','x4') 0
MULTI|SET x4 1|DEL x2|EXEC
XADD st 1-1 f v
XADD st MAXLEN 1 1-2 f v
XADD st MAXLEN 5 1-3 f v
XDEL st 1-2 7-7
XTRIM st MAXLEN 5
XTRIM st MAXLEN 0
XSETID st 2-0
XGROUP CREATE st g 0
XGROUP CREATE st2 g $ MKSTREAM
XGROUP SETID st g 0
XGROUP CREATECONSUMER st g c
XGROUP CREATECONSUMER st g c
XADD st 3-1 f v
XADD st 3-2 f v
XREADGROUP GROUP g c COUNT 1 STREAMS st >
XREADGROUP GROUP g d STREAMS st st2 > >
XREADGROUP GROUP g e STREAMS st >
XREADGROUP GROUP g e STREAMS st 0
XACK st g 3-1
XCLAIM st g f 0 3-2
XAUTOCLAIM st g h 0 0
XGROUP DELCONSUMER st g h
XGROUP DELCONSUMER st g none
XGROUP DESTROY st g
XGROUP DESTROY st g
COPY st st3
MULTI|XADD st MAXLEN 1 9-9 f v|XADD st 9-10 f v|XTRIM st MAXLEN 0|EXEC
EVAL redis.call('xadd','st','MAXLEN','1','10-1','f','v')redis.call('xadd','st','MAXLEN','1','10-2','f','v') 0
DEL m1 m2 none
UNLINK m5
SADD s5 1
SINTER s5 none
SINTER none none2
SINTERCARD 2 none s5
SUNION s5 none none
SDIFF none s5
SUNIONSTORE none3 s5 none
SINTERSTORE none3 none s5
SDIFFSTORE none none none2
ZUNION 2 none none2
ZINTER 2 none none2
ZDIFF 2 none none2
ZUNIONSTORE none 2 none2 none3
ZRANGESTORE none none2 0 -1
ZINTERCARD 2 none none2
ZRANGE none 0 -1
ZMPOP 1 none MIN
LMPOP 2 none none2 LEFT
LMOVE none none2 LEFT LEFT
SMOVE none none2 a
LCS none none2
COPY none none2
RENAME none none2
PFCOUNT none none2
PFCOUNT none
PFADD h9 a
PFMERGE none9 none2 h9
BITOP OR none none none2
BITOP OR none9 none h9
BITCOUNT none
GEOSEARCHSTORE none none2 FROMLONLAT 1 1 BYRADIUS 1 km
GEORADIUS none 1 1 1 km STORE none2
GEORADIUS_RO none 1 1 1 km
GEOSEARCH none FROMLONLAT 1 1 BYRADIUS 1 km
SORT none
SORT none STORE none2
SORT_RO none
SORT s5 BY w* GET v* GET #
XREAD STREAMS none none2 0 0
XREAD BLOCK 1 STREAMS none 0
XREADGROUP GROUP g c STREAMS none >
XLEN none
XRANGE none - +
XINFO STREAM none
XPENDING none g
OBJECT ENCODING none
OBJECT REFCOUNT none
OBJECT FREQ none
OBJECT IDLETIME none
MEMORY USAGE none
DUMP none
STRLEN none
GETRANGE none 0 1
GETBIT none 1
SUBSTR none 0 1
TYPE none
PTTL none
TOUCH none s5
HGET none f
HGETALL none
HSCAN none 0
LLEN none
LPOS none x
SSCAN none 0
SMEMBERS none
SRANDMEMBER none
ZSCORE none m
SCARD none
SPOP none
LPOP none
HDEL none f
SREM none x
SET none9 x GET
DEL none9
SET none9 x GET
DEL none9
SET none9 x XX GET
GETSET none9 x
DEL none9
BITFIELD none9 GET u8 0
BITFIELD_RO none9 GET u8 0
HINCRBY none9 f 1
DEL none9
MULTI|GET none|GET s6|SET s7 x|MGET none s7|SINTER s5 none|EXISTS none none|EXEC
MULTI|SET s8 x|GET s8|EXEC
MULTI|SET s8 x|GET none|GETDEL none|GETEX none|GETSET none9 x|EXEC
MULTI|SET s9 x|DEL none9|SET none9 1 GET|EXEC
EVAL redis.call('get','none')redis.call('sinter','none','none2')redis.call('del','s9')return redis.call('get','s9') 0
EVAL redis.call('get',KEYS[1])redis.call('set',KEYS[1],1)return redis.call('get',KEYS[1]) 1 none8
SETRANGE none 0
FLUSHDB
GET none`), "\n")
	sock := startRedis(t)
	addr := serve(t, Options{Databases: fake()})
	ours := eventsOf(t, func() *peer { return dial(t, "tcp", addr) }, cmds)
	theirs := eventsOf(t, func() *peer { return dial(t, "unix", sock) }, cmds)
	if ours != theirs {
		o, r := strings.Split(ours, "\n"), strings.Split(theirs, "\n")
		for i := range min(len(o), len(r)) {
			if o[i] != r[i] {
				t.Fatalf("line %d: ours:\n%s\nRedis's:\n%s", i, strings.Join(o[max(0, i-4):min(len(o), i+4)], "\n"),
					strings.Join(r[max(0, i-4):min(len(r), i+4)], "\n"))
			}
		}
	}
}

// notify-keyspace-events is shown as Redis shows it, and what it does not know is refused.
func TestEventSettingLikeRedis(t *testing.T) {
	sock := startRedis(t)
	addr := serve(t, Options{Databases: fake()})
	ours, theirs := dial(t, "tcp", addr), dial(t, "unix", sock)
	for _, v := range []string{"", "K", "E", "KEA", "AKEm", "Kg$lshzxetd", "gxE", "KEn", "AKn", "m", "dE", "KEAmn"} {
		for _, p := range []*peer{ours, theirs} {
			p.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", v)
		}
		got, want := ours.do(t, "CONFIG", "GET", "notify-keyspace-events"),
			theirs.do(t, "CONFIG", "GET", "notify-keyspace-events")
		if got != want {
			t.Errorf("%q: %q, want %q", v, got, want)
		}
	}
	if got := ours.do(t, "CONFIG", "SET", "notify-keyspace-events", "Q"); !strings.HasPrefix(
		got, "-ERR CONFIG SET failed") {
		t.Error(got)
	}
}

const trackingTalk = `
a: HELLO 3
a: CLIENT TRACKING ON
a: CLIENT TRACKINGINFO
a: CLIENT GETREDIR
b: SET k 1
a: GET k
b: SET k 2
a<
b: SET k 3
a: GET k
a: SET k 4
a<
a: MGET k other
b: SET other 1
a<
b: DEL k
a<
a: GET k
b: SET k 5
a<
a: CLIENT CACHING YES
a: CLIENT TRACKING ON BCAST
a: CLIENT TRACKING ON OPTIN OPTOUT
a: CLIENT TRACKING ON PREFIX x
a: CLIENT TRACKING OFF
a: CLIENT TRACKINGINFO
a: CLIENT GETREDIR
a: GET k
b: SET k 6
a: CLIENT TRACKING ON BCAST PREFIX x PREFIX y
a: CLIENT TRACKING ON BCAST PREFIX xx
a: CLIENT TRACKING ON BCAST PREFIX z PREFIX zz
a: CLIENT TRACKING ON BCAST OPTIN
a: CLIENT TRACKINGINFO
b: SET x1 1
a<
b: SET k 7
b: DEL x1
a<
a: SET y1 1
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON BCAST NOLOOP
a: SET y2 1
b: SET y3 1
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON OPTIN
a: CLIENT CACHING NO
a: GET k
b: SET k 8
a: CLIENT CACHING YES
a: CLIENT TRACKINGINFO
a: CLIENT CACHING YES
a: GET k
a: CLIENT TRACKINGINFO
b: SET k 9
a<
a: CLIENT CACHING YES
a: MULTI
a: GET k
a: EXEC
b: SET k 10
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON OPTOUT
a: CLIENT CACHING YES
a: CLIENT CACHING NO
a: GET k
b: SET k 11
a: GET k
b: FLUSHALL
a<
a: CLIENT TRACKING ON REDIRECT 999999
a: CLIENT TRACKING ON NOSUCH
a: CLIENT TRACKING maybe
a: CLIENT CACHING maybe
a: RESET
a: CLIENT TRACKINGINFO
`

// trackingInMulti is about what holds from within a transaction on.
const trackingInMulti = `
a: HELLO 3
a: CLIENT TRACKING ON OPTIN
a: MULTI
a: CLIENT CACHING YES
a: GET k
a: EXEC
b: SET k 1
a<
b: SET k 2
a: GET k
b: SET k 3
a: MULTI
a: GET j
a: CLIENT CACHING YES
a: GET k
a: MGET l m
a: EXEC
b: SET j 1
b: SET k 4
a<
b: SET m 1
a<
a: CLIENT CACHING YES
a: CLIENT GETREDIR
a: GET k
b: SET k 5
a<
a: CLIENT CACHING YES
a: PING
a: GET k
b: SET k 6
a: MULTI
a: CLIENT CACHING YES
a: SET k 7
a: GET k
a: EXEC
b: SET k 8
a<
a: MULTI
a: CLIENT CACHING YES
a: GET k
a: SET k 9
a: EXEC
a<
b: SET k 10
a: MULTI
a: CLIENT CACHING YES
a: EVAL return(redis.call('get',KEYS[1])) 1 k
a: EXEC
b: SET k 11
a<
a: MULTI
a: CLIENT CACHING YES
a: INCR k
a: EXEC
b: SET k 12
a: MULTI
a: CLIENT CACHING YES
a: DISCARD
a: GET k
b: SET k 13
a: WATCH k
b: SET k 14
a: MULTI
a: CLIENT CACHING YES
a: GET k
a: EXEC
a: GET k
b: SET k 15
a: MULTI
a: CLIENT TRACKING OFF
a: GET k
a: EXEC
b: SET k 16
a: MULTI
a: GET j
a: CLIENT TRACKING ON
a: GET k
a: EXEC
b: SET j 2
b: SET k 17
a<
a: MULTI
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON
a: GET l
a: EXEC
b: SET l 18
a<
a: CLIENT TRACKING OFF
a: MULTI
a: SET x0 1
a: CLIENT TRACKING ON BCAST PREFIX x PREFIX w
a: SET x1 1
a: MSET x3 1 k 2 x2 1
a: EXEC
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON OPTOUT
a: MULTI
a: GET k
a: CLIENT CACHING NO
a: GET j
a: EXEC
b: SET j 19
b: SET k 19
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON OPTIN NOLOOP
a: MULTI
a: CLIENT CACHING YES
a: GET k
a: EXEC
a: SET k 20
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON BCAST
b: MSET b 1 a 2 c 3
a<
a: MSET b 1 a 2 a 3
a<
b: MULTI
b: SET b 1
b: SET a 1
b: DEL c
b: EXEC
a<
b: DEL b a none
a<
b: EVAL redis.call('mset','y',1,'x',2)redis.call('set','w',3) 0
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON BCAST PREFIX p PREFIX o
b: MSET p2 1 o2 2 n1 1 o1 1 p1 1
a<
a<
a: CLIENT TRACKING OFF
a: CLIENT TRACKING ON
a: MGET a b c
b: MSET b 1 a 2 c 3
a<
a<
a<
a: PING
`

// TestHelloInMultiLikeRedis: a protocol that a transaction chooses is that of the replies behind it.
func TestHelloInMultiLikeRedis(t *testing.T) {
	sock := startRedis(t)
	addr := serve(t, Options{Databases: fake()})
	for _, queue := range []string{
		"HGETALL h;HELLO 3;HGETALL h", "HGETALL h;HELLO 3;HGETALL g;HGETALL h",
		"HSET h f 2;HELLO 3 SETNAME me;HGETALL h;HELLO 2;HGETALL h",
		"HSET h f 3;HELLO 3 SETNAME a#b;HELLO 4;HELLO x;HELLO 3 NOSUCH;HELLO;HGETALL h;HGETALL g",
		"HELLO 3 AUTH default any;HGETALL h;ZADD z 1 a;ZSCORE z a",
		"EVAL return(redis.call('hgetall',KEYS[1])) 1 h;HELLO 3;HGETALL h;HELLO 2;HGETALL g",
	} {
		said := map[string]string{}
		for _, side := range [][2]string{{"tcp", addr}, {"unix", sock}} {
			p := dial(t, side[0], side[1])
			p.do(t, "FLUSHALL")
			p.do(t, "HSET", "h", "f", "1")
			p.do(t, "HSET", "g", "f", "1")
			s := p.perform(t, "EXEC "+queue) + p.do(t, "HGETALL", "g")
			said[side[0]] = idOfHello.ReplaceAllString(s, "id:")
		}
		if said["tcp"] != said["unix"] {
			t.Errorf("%s:\n%q\nredis-server says\n%q", queue, said["tcp"], said["unix"])
		}
	}
}

var idOfHello = regexp.MustCompile(`id\r\n:[0-9]+`)

// TestTrackingInMultiLikeRedis: what a transaction says of tracking holds for the commands behind it, and clients with
// BCAST hear of keys that are written together at once.
func TestTrackingInMultiLikeRedis(t *testing.T) {
	sock := startRedis(t)
	_, body, _ := strings.Cut(strings.TrimSpace(trackingInMulti), "\n")
	theirs := talkAfterHello(t, func() *peer { return dial(t, "unix", sock) }, body)
	for _, n := range []int{1, 2} {
		addr := serve(t, Options{Databases: fake()[:n], TrackingCheck: time.Hour})
		diff(t, talkAfterHello(t, func() *peer { return dial(t, "tcp", addr) }, body), theirs)
	}
}

// Client-side caching is Redis's, byte for byte: one connection at a time is looked at, so that order is certain.
func TestTrackingLikeRedis(t *testing.T) {
	sock := startRedis(t)
	addr := serve(t, Options{Databases: fake()})
	_, body, _ := strings.Cut(strings.TrimSpace(trackingTalk), "\n")
	theirs := talkAfterHello(t, func() *peer { return dial(t, "unix", sock) }, body)
	ours := talkAfterHello(t, func() *peer { return dial(t, "tcp", addr) }, body)
	diff(t, ours, theirs)
}

func diff(t *testing.T, ours, theirs string) {
	t.Helper()
	o, r := strings.Split(ours, "\n"), strings.Split(theirs, "\n")
	for i := range min(len(o), len(r)) {
		if o[i] != r[i] {
			t.Fatalf("line %d: ours:\n%s\nRedis's:\n%s", i, strings.Join(o[max(0, i-4):min(len(o), i+4)], "\n"),
				strings.Join(r[max(0, i-4):min(len(r), i+4)], "\n"))
		}
	}
}

// talkAfterHello has the first connection speak RESP3.
func talkAfterHello(t *testing.T, open func() *peer, lines string) string {
	first := true
	return talk(t, func() *peer {
		p := open()
		if first {
			p.do(t, "HELLO", "3")
			first = false
		}
		return p
	}, lines)
}

// RESP2 hears of what it caches by another connection, as messages.
func TestTrackingRedirect(t *testing.T) {
	for _, proto := range []string{"2", "3"} {
		t.Run("RESP"+proto, func(t *testing.T) {
			addr := serve(t, Options{Databases: fake()})
			a, b, to := dial(t, "tcp", addr), dial(t, "tcp", addr), dial(t, "tcp", addr)
			to.do(t, "HELLO", proto)
			id := strings.Trim(to.do(t, "CLIENT", "ID"), ":\r\n")
			to.do(t, "SUBSCRIBE", "__redis__:invalidate")
			a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON", "REDIRECT", id)
			a.want(t, ":"+id+"\r\n", "CLIENT", "GETREDIR")
			a.do(t, "GET", "k")
			b.do(t, "SET", "k", "1")
			if proto == "2" {
				to.hears(t, "*3\r\n"+bulk("message")+bulk("__redis__:invalidate")+"*1\r\n"+bulk("k"))
			} else {
				to.hears(t, ">2\r\n"+bulk("invalidate")+"*1\r\n"+bulk("k"))
			}
			if list := b.do(t, "CLIENT", "LIST"); !strings.Contains(list, "flags=t ") ||
				!strings.Contains(list, "redir="+id) {
				t.Error(list)
			}
			to.Close()
			testutil.Until(t, "the other connection is gone", func() bool {
				return !strings.Contains(b.do(t, "CLIENT", "LIST"), "id="+id+" ")
			})
			a.do(t, "GET", "k")
			b.do(t, "SET", "k", "2")
			testutil.Until(t, "the broken redirection is told", func() bool {
				return strings.Contains(a.do(t, "CLIENT", "TRACKINGINFO"), "broken_redirect")
			})
		})
	}
}

// A client hears of writes that pass no gateway, and of expiry, within Options.TrackingCheck.
func TestWritesPastTheGateway(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: []Database{{"cache", db}}, TrackingCheck: 50 * time.Millisecond})
	a := dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "SET", "long", strings.Repeat("x", 200_000))
	a.want(t, "+OK\r\n", "SET", "brief", "1", "PX", "300")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for _, k := range []string{"k", "long", "brief"} {
		a.do(t, "GET", k)
	}
	message := func(k string) string { return ">2\r\n" + bulk("invalidate") + "*1\r\n" + bulk(k) }
	invalidated := func(k string) { t.Helper(); a.hears(t, message(k)) }
	if _, err := db.Put(t.Context(), []byte("k"), []byte("1"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	invalidated("k")
	if _, err := db.Put(t.Context(), []byte("long"), []byte("1"), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	two := []string{string(a.reply(t)), string(a.reply(t))} // a slow machine looks at both at once
	if want := []string{message("brief"), message("long")}; !slices.Equal(slices.Sorted(slices.Values(two)),
		slices.Sorted(slices.Values(want))) {
		t.Errorf("heard %q, want %q", two, want)
	}
	a.want(t, bulk("1"), "GET", "k")
	if err := db.Delete(t.Context(), []byte("k")); err != nil {
		t.Fatal(err)
	}
	invalidated("k")
	// Collections are written by other gateways that are no peers, the long one with more memory than a look has.
	for k, n := range map[string]int{"hash": 1, "long hash": 200_000} {
		a.want(t, ":1\r\n", "HSET", k, "f", strings.Repeat("x", n))
		a.want(t, ":1\r\n", "HLEN", k)
		if k == "hash" {
			a.want(t, bulk("x"), "HGET", k, "f")
		}
		ops := []client.Op{{Kind: client.OpGet, Key: []byte(k), Typed: true}}
		if db.Do(t.Context(), ops); ops[0].Err != nil {
			t.Fatal(ops[0].Err)
		}
		put := []client.Op{{Kind: client.OpPut, Key: []byte(k), Value: ops[0].Item.Value, Type: ops[0].Item.Type}}
		if db.Do(t.Context(), put); put[0].Err != nil {
			t.Fatal(put[0].Err)
		}
		invalidated(k)
	}
}

// A table that is full forgets keys, whose clients are told; one whose clients are gone is empty.
func TestTrackingTableFull(t *testing.T) {
	addr, g := start(t, Options{Databases: fake(), TrackingKeys: 10})
	a := dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	for i := range 30 {
		a.send(t, []string{"GET", fmt.Sprint("k", i)})
	}
	misses, told := 0, make(map[string]bool)
	for misses < 30 || len(told) < 20 {
		if got := string(a.reply(t)); got == "_\r\n" {
			misses++
		} else {
			told[got] = true
		}
	}
	if keys, items, _ := g.tracked.Counts(); keys != 10 || items != 10 {
		t.Errorf("%d keys, %d items", keys, items)
	}
	a.Close()
	testutil.Until(t, "an empty table", func() bool {
		keys, items, _ := g.tracked.Counts()
		return keys == 0 && items == 0 && !g.tracks()
	})
}

// A client that caches never shows a value for long that was written before it read it: its copy is gone when the
// writer has its reply and the invalidation has come.
func TestCachedReadsAreInvalidated(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), TrackingCheck: time.Hour})
	a, b := dial(t, "tcp", addr), dial(t, "tcp", addr)
	a.do(t, "HELLO", "3")
	a.want(t, "+OK\r\n", "CLIENT", "TRACKING", "ON")
	const n = 3000
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range n {
			b.do(t, "SET", "k", fmt.Sprint(i))
		}
	}()
	cached, reading := "", false
	for {
		if cached == "" && !reading {
			a.send(t, []string{"GET", "k"})
			reading = true
		}
		got := string(a.reply(t))
		if strings.HasPrefix(got, ">") {
			cached = ""
			continue
		}
		cached, reading = got, false
		if cached == bulk(fmt.Sprint(n-1)) {
			break
		}
		// A client that has cached something else is going to hear of it: else the next reply would time out.
	}
	<-done
}

// A key whose expiry was set here is told of when it has expired, and not if it was deleted, kept or given another time
// before.
func TestExpiredEvents(t *testing.T) {
	db := clienttest.New(clienttest.Options{})
	addr, g := start(t, Options{Databases: []Database{{"cache", db}}})
	sub, p := dial(t, "tcp", addr), dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "CONFIG", "SET", "notify-keyspace-events", "Ex")
	sub.do(t, "SUBSCRIBE", "__keyevent@0__:expired")
	for _, k := range []string{"deleted", "kept", "replaced"} {
		p.want(t, "+OK\r\n", "SET", k, "v", "PX", "2000")
	}
	p.want(t, ":1\r\n", "DEL", "deleted")
	p.want(t, ":1\r\n", "PERSIST", "kept")
	p.want(t, "+OK\r\n", "SET", "replaced", "w")
	// Keys that somebody else deleted: seen in time the one is none that expires, of the other it cannot be told.
	for k, at := range map[string]time.Time{"elsewhere": time.Now().Add(time.Hour),
		"late": time.Now().Add(-time.Millisecond)} {
		g.lookAtExpiry(dueKey{stagedName{Name: k}, at.UnixMilli(), false})
	}
	sub.hears(t, message("__keyevent@0__:expired", "late"))
	p.want(t, "+OK\r\n", "SET", "a", "v", "PX", "2010")
	sub.hears(t, message("__keyevent@0__:expired", "a"))
	p.want(t, "+OK\r\n", "SET", "b", strings.Repeat("x", 100_000))
	p.want(t, ":1\r\n", "PEXPIRE", "b", "100")
	sub.hears(t, message("__keyevent@0__:expired", "b"))
	testutil.Until(t, "nothing is left to look at", func() bool {
		g.expiries.Lock()
		defer g.expiries.Unlock()
		return len(g.expiries.times) == 0 && len(g.expiries.due) == 0 && !g.expiries.running
	})
}
