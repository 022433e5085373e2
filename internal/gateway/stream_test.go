package gateway

import (
	"bytes"
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/collection"
)

// TestStreamsLikeRedis sends seeded commands to a redis-server and to a gateway, and compares the replies byte for
// byte, but for clocks.
func TestStreamsLikeRedis(t *testing.T) {
	likeRedis(t, randomStreams, 24, clienttest.New(clienttest.Options{}))
}

// TestStreams: commands on a stream, and what those on any key do with one.
func TestStreams(t *testing.T) {
	entry := func(id string, texts ...string) string { return "*2\r\n" + bulk(id) + array(texts...) }
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", api}}}))
		for _, c := range []struct{ cmd, reply string }{
			{"XADD s NOMKSTREAM 1-1 f v", "$-1\r\n"},
			{"XADD s 1-1 f v", bulk("1-1")},
			{"XADD s 1-1 f v", "-ERR The ID specified in XADD is equal or smaller than the target stream top item\r\n"},
			{"XADD s 1-* f w", bulk("1-2")},
			{"TYPE s", "+stream\r\n"},
			{"OBJECT ENCODING s", bulk("stream")},
			{"SCAN 0 TYPE stream COUNT 1000", "*2\r\n" + bulk("0") + array("s")},
			{"GET s", wrongType},
			{"LPUSH s x", wrongType},
			{"INCR s", wrongType},
			{"SORT s", wrongType},
			{"XRANGE s - +", "*2\r\n" + entry("1-1", "f", "v") + entry("1-2", "f", "w")},
			{"XREVRANGE s + (1-1", "*1\r\n" + entry("1-2", "f", "w")},
			{"EXPIRE s 1000", ":1\r\n"},
			{"XDEL s 1-1 7-7", ":1\r\n"},
			{"TTL s", ":1000\r\n"},
			{"COPY s t", ":1\r\n"},
			{"RENAME t u", "+OK\r\n"},
			{"XLEN u", ":1\r\n"},
			{"XTRIM u MAXLEN 0", ":1\r\n"},
			{"EXISTS u", ":1\r\n"}, // an empty stream stays
			{"DEL u", ":1\r\n"},
			{"XGROUP CREATE s g 0", "+OK\r\n"},
			{"XGROUP CREATE s g 0", "-BUSYGROUP Consumer Group name already exists\r\n"},
			{"XREADGROUP GROUP g c STREAMS s >", "*1\r\n*2\r\n" + bulk("s") + "*1\r\n" + entry("1-2", "f", "w")},
			{"XREADGROUP GROUP g c STREAMS s >", "*-1\r\n"},
			{"XACK s g 1-2", ":1\r\n"},
			{"SET text x", "+OK\r\n"},
			{"XADD text * f v", wrongType},
			{"XREAD STREAMS text 0", wrongType},
			{"COMMAND GETKEYS XREADGROUP GROUP streams x COUNT 1 STREAMS a b > >", array("a", "b")},
			{"MULTI", "+OK\r\n"},
			{"XADD s 2-1 f v", "+QUEUED\r\n"},
			{"XREAD BLOCK 0 STREAMS s none 1-2 0", "+QUEUED\r\n"},
			{"XREAD BLOCK 0 STREAMS s $", "+QUEUED\r\n"},
			{"EXEC", "*3\r\n" + bulk("2-1") + "*1\r\n*2\r\n" + bulk("s") + "*1\r\n" + entry("2-1", "f", "v") +
				"*-1\r\n"},
			{"EVAL return{redis.call('xadd','s','2-2','f','v'),redis.call('xlen','s')} 1 s", "*2\r\n" + bulk("2-2") +
				":3\r\n"},
			{"EVAL return(redis.pcall('xread','block','1','streams','s','$').err) 0",
				bulk("ERR xread command is not allowed with BLOCK option from scripts")},
		} {
			p.want(t, c.reply, strings.Fields(c.cmd)...)
		}
		if t.Failed() {
			t.Fatal(name)
		}
	}
}

// TestStreamIDsGrow: ids that the gateway chooses are those of its clock, and greater than all before, even if these
// are of the future.
func TestStreamIDsGrow(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	now := time.Now().UnixMilli()
	id := strings.Split(p.do(t, "XADD", "s", "*", "f", "v"), "\r\n")[1]
	ms, seq, _ := strings.Cut(id, "-")
	if got, err := strconv.ParseInt(ms, 10, 64); err != nil || got < now || got > time.Now().UnixMilli() || seq != "0" {
		t.Errorf("%q at %d", id, now)
	}
	p.want(t, bulk("9000000000000-5"), "XADD", "s", "9000000000000-5", "f", "v")
	p.want(t, bulk("9000000000000-6"), "XADD", "s", "*", "f", "v")
}

// TestLongStreams: a pipeline makes a stream of many blocks, which is refused when it would become too long, and is
// whole then.
func TestLongStreams(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	var cmds [][]string
	for i := range 2000 {
		cmds = append(cmds, []string{"XADD", "s", strconv.Itoa(i+1) + "-0", "f", "value"},
			[]string{"SET", "k" + strconv.Itoa(i), "v"})
	}
	p.send(t, cmds...)
	for i := range 2000 {
		p.answers(t, bulk(strconv.Itoa(i+1)+"-0"))
		p.answers(t, "+OK\r\n")
	}
	p.want(t, "*1\r\n*2\r\n"+bulk("1500-0")+array("f", "value"), "XRANGE", "s", "1500", "1500")
	long := strings.Repeat("x", 3<<20)
	p.want(t, bulk("3000-0"), "XADD", "s", "3000", "f", long)
	if got := p.do(t, "XADD", "s", "3001", "f", long); !strings.HasPrefix(got, "-ERR kvd: stream longer than ") {
		t.Errorf("%.200q", got)
	}
	p.want(t, ":2001\r\n", "XLEN", "s")
	p.want(t, "+OK\r\n", "XGROUP", "CREATE", "s", "g", "0")
	if got := p.do(t, "XREADGROUP", "GROUP", "g", "c", "STREAMS", "s", ">"); len(got) < len(long) {
		t.Errorf("%.200q", got)
	}
	p.want(t, ":1999\r\n", "XTRIM", "s", "MAXLEN", "2")
}

// TestCorruptStreams: bytes that are no stream, and a stream whose entries are none, are an error that names the key,
// and stay as they are.
func TestCorruptStreams(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", store}}}))
	made := &collection.Stream{}
	made.AddGroup(&collection.StreamGroup{Name: []byte("g")})
	made.Add(collection.StreamID{MS: 1, Seq: 1}, [][]byte{[]byte("f"), []byte("v")})
	whole := made.Bytes(true)
	damaged := bytes.Clone(whole)
	damaged[len(damaged)-4] = 100 // longer than what is there
	const want = "-ERR kvd: corrupt stream at key \"s\": nothing was done\r\n"
	for _, b := range [][]byte{{0}, whole[:len(whole)-1], whole[1:], damaged} {
		ops := []client.Op{{Kind: client.OpPut, Key: []byte("s"), Value: b, Type: client.Stream}}
		if store.Do(t.Context(), ops); ops[0].Err != nil {
			t.Fatal(ops[0].Err)
		}
		for _, cmd := range []string{"XRANGE s - +", "XREVRANGE s + -", "XDEL s 1-1", "XREAD STREAMS s 0",
			"XREAD BLOCK 0 STREAMS s 0", "XREADGROUP GROUP g c STREAMS s >",
			"XSETID s 5", "XINFO STREAM s", "XINFO STREAM s FULL", "XINFO GROUPS s", "XCLAIM s g c 0 1-1",
			"XTRIM s MINID = 1-1"} {
			p.want(t, want, strings.Fields(cmd)...)
		}
		read := []client.Op{{Kind: client.OpGet, Key: []byte("s"), Typed: true}}
		if store.Do(t.Context(), read); read[0].Err != nil || !bytes.Equal(read[0].Item.Value, b) {
			t.Errorf("%q became %q, %v", b, read[0].Item.Value, read[0].Err)
		}
	}
}

// sameButTimes compares replies with times in them: idle ones, and those of the clock. Redis's radix tree may keep a
// node for a stream without entries.
func sameButTimes(cmd []string, got, want []byte) bool {
	a, b := strings.Split(string(got), "\r\n"), strings.Split(string(want), "\r\n")
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] == b[i] {
			continue
		}
		x, err1 := strconv.ParseInt(strings.TrimPrefix(a[i], ":"), 10, 64)
		y, err2 := strconv.ParseInt(strings.TrimPrefix(b[i], ":"), 10, 64)
		if len(a) > 7 && a[2] == "length" && a[3] == ":0" && i < 10 && b[3] == a[3] {
			continue
		}
		idle := i > 0 && a[i-1] == "idle" || strings.EqualFold(cmd[0], "xpending") && len(cmd) > 3 &&
			strings.HasPrefix(a[i+1], ":")
		if err1 != nil || err2 != nil || a[i][0] != ':' || b[i][0] != ':' || x-y > 5000 || y-x > 5000 || !idle &&
			min(x, y) < 1e11 {
			return false
		}
	}
	return true
}

// streamWords makes up arguments of commands on streams.
type streamWords struct{ *rand.Rand }

func (r streamWords) pick(s ...string) string { return s[r.IntN(len(s))] }

func (r streamWords) id() string {
	switch r.IntN(12) {
	case 0:
		return r.pick("0", "0-0", "-", "+", "(", "5-", "-5", "a", "", "1-2-3",
			"18446744073709551615-18446744073709551615", "18446744073709551616", " 7", "007", "+5", "3-x", "1-*")
	case 1, 2:
		return strconv.Itoa(r.IntN(60))
	}
	return strconv.Itoa(r.IntN(60)) + "-" + strconv.Itoa(r.IntN(4))
}

func (r streamWords) edge() string {
	if r.IntN(3) == 0 {
		return r.pick("-", "+", "(-", "(0", "(18446744073709551615-18446744073709551615", "(1-1")
	}
	return r.pick("", "", "", "(") + r.id()
}

func (r streamWords) num() string {
	return r.pick("0", "1", "2", "3", "5", "10", "100", "-1", "abc", "", "9223372036854775807", "1", "2", "5")
}

func (r streamWords) key() string      { return r.pick("s", "s", "s", "t", "text", "none") }
func (r streamWords) group() string    { return r.pick("g", "g", "g", "h", "nogroup") }
func (r streamWords) consumer() string { return r.pick("alice", "bob", "carol", "") }

func (r streamWords) trim() []string {
	by := []string{r.pick("MAXLEN", "maxlen", "MINID")}
	if how := r.pick("", "", "~", "="); how != "" {
		by = append(by, how)
	}
	if by[0] == "MINID" {
		by = append(by, r.id())
	} else {
		by = append(by, r.pick(r.num(), "20", "40"))
	}
	if r.IntN(5) == 0 {
		by = append(by, "LIMIT", r.num())
	}
	return by
}

func randomStreams(rng *rand.Rand) [][]string {
	r := streamWords{rng}
	one := func(s ...string) [][]string { return [][]string{s} }
	switch r.IntN(40) {
	case 0, 1, 2, 3, 4, 5, 6:
		c := []string{"XADD", r.key()}
		if r.IntN(8) == 0 {
			c = append(c, "NOMKSTREAM")
		}
		if r.IntN(6) == 0 {
			c = append(c, r.trim()...)
		}
		c = append(c, r.pick(r.id(), r.id(), strconv.Itoa(r.IntN(60))+"-*"), "f", r.num())
		if r.IntN(4) == 0 {
			c = append(c, "g", strings.Repeat("x", r.IntN(300)))
		}
		if r.IntN(15) == 0 {
			c = c[:len(c)-1]
		}
		return [][]string{c}
	case 7: // so that there is more than a block
		var all [][]string
		for range r.IntN(130) {
			all = append(all, []string{"XADD", "t", "100-*", "f", "v"})
		}
		return all
	case 8, 9:
		return one("XDEL", r.key(), r.id(), r.id())
	case 10, 11:
		return one(append([]string{"XTRIM", r.key()}, r.trim()...)...)
	case 12, 13:
		return one(r.pick("XRANGE", "XREVRANGE"), r.key(), r.edge(), r.edge())
	case 14:
		return one(r.pick("XRANGE", "XREVRANGE"), r.key(), r.edge(), r.edge(), r.pick("COUNT", "count", "x"), r.num())
	case 15:
		return one("XLEN", r.key())
	case 16:
		c := []string{"XSETID", r.key(), r.id()}
		if r.IntN(2) == 0 {
			c = append(c, r.pick("ENTRIESADDED", "MAXDELETEDID"), r.pick(r.num(), r.id()))
		}
		return [][]string{c}
	case 17, 18:
		c := []string{"XGROUP", r.pick("CREATE", "CREATE", "SETID"), r.key(), r.group(), r.pick(r.id(), "$", "0")}
		switch r.IntN(4) {
		case 0:
			c = append(c, "MKSTREAM")
		case 1:
			c = append(c, "ENTRIESREAD", r.num())
		}
		return [][]string{c}
	case 19:
		return one("XGROUP", r.pick("CREATECONSUMER", "DELCONSUMER"), r.key(), r.group(), r.consumer())
	case 20:
		return one("XGROUP", "DESTROY", r.pick("s", "t", "none"), r.group())
	case 21:
		return one("XREAD", "COUNT", r.num(), "STREAMS", r.key(), r.key(), r.pick(r.id(), "$"), r.pick(r.id(), ">"))
	case 22:
		return one(r.pick("XREAD", "xread"), r.pick("STREAMS", "BLOCK", "NOACK"), r.key(), r.id())
	case 23, 24, 25, 26, 27:
		c := []string{"XREADGROUP", "GROUP", r.group(), r.consumer()}
		if r.IntN(2) == 0 {
			c = append(c, "COUNT", r.num())
		}
		if r.IntN(5) == 0 {
			c = append(c, "NOACK")
		}
		if r.IntN(5) == 0 {
			return [][]string{append(c, "STREAMS", r.key(), r.key(), ">", r.pick(">", r.id(), "$"))}
		}
		return [][]string{append(c, "STREAMS", r.key(), r.pick(">", ">", ">", r.id(), "0"))}
	case 28, 29:
		return one("XACK", r.key(), r.group(), r.id(), r.id(), r.id())
	case 30:
		return one("XPENDING", r.key(), r.group())
	case 31:
		c := []string{"XPENDING", r.key(), r.group()}
		if r.IntN(4) == 0 {
			c = append(c, "IDLE", r.pick("0", "3600000", "x"))
		}
		c = append(c, r.edge(), r.edge(), r.num())
		if r.IntN(2) == 0 {
			c = append(c, r.consumer())
		}
		return [][]string{c}
	case 32, 33:
		c := []string{"XCLAIM", r.key(), r.group(), r.consumer(), r.pick("0", "0", "0", "3600000", "x"), r.id(), r.id(),
			r.id()}
		for range r.IntN(3) {
			c = append(c, r.pick("FORCE", "JUSTID", "LASTID", "RETRYCOUNT", "IDLE", "TIME", "foo"))
			if o := c[len(c)-1]; o != "FORCE" && o != "JUSTID" && o != "foo" {
				c = append(c, r.pick("5", r.id(), "1000", "0", "x"))
			}
		}
		return [][]string{c}
	case 34, 35:
		c := []string{"XAUTOCLAIM", r.key(), r.group(), r.consumer(), r.pick("0", "0", "0", "3600000", "x"), r.edge()}
		if r.IntN(2) == 0 {
			c = append(c, r.pick("COUNT", "JUSTID"))
			if c[len(c)-1] == "COUNT" {
				c = append(c, r.pick("1", "2", "0", "x"))
			}
		}
		return [][]string{c}
	case 36:
		return one("XINFO", "STREAM", r.key())
	case 37:
		c := []string{"XINFO", "STREAM", r.key(), "FULL"}
		if r.IntN(2) == 0 {
			c = append(c, "COUNT", r.num())
		}
		return [][]string{c}
	case 38:
		return append(one("XINFO", "GROUPS", r.key()), one("XINFO", "CONSUMERS", r.key(), r.group())...)
	}
	return one(strings.Fields(r.pick("DEL s", "DEL t", "SET text x", "TYPE s", "OBJECT ENCODING s", "RENAME t s",
		"COPY s t REPLACE", "LPUSH s x", "XINFO HELP", "XGROUP HELP",
		"XGROUP CREATE s g 0", "XGROUP CREATE s h $ MKSTREAM", "SCAN 0 TYPE stream MATCH none", "XGROUP NOSUCH s g",
		"XINFO STREAM s FULL x", "GET s", "EXPIRE s 10000", "PERSIST s"))...)
}

// TestStreamDumpsLikeRedis: either store restores the streams that the other dumps, whatever has been done to them
// before, and they are the same then. Redis checks all of a payload.
func TestStreamDumpsLikeRedis(t *testing.T) {
	theirs := dial(t, "unix", startRedis(t, "--sanitize-dump-payload", "yes"))
	ours := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", clienttest.New(clienttest.Options{})}}}))
	// The radix tree says how entries are cut into nodes.
	tree := regexp.MustCompile(`(\$15\r\nradix-tree-keys|\$16\r\nradix-tree-nodes)\r\n:\d+\r\n`)
	show := func(p *peer, key string) string {
		return p.do(t, "XRANGE", key, "-", "+") +
			tree.ReplaceAllString(p.do(t, "XINFO", "STREAM", key, "FULL", "COUNT", "0"), "")
	}
	restored := 0
	for seed := range uint64(16) {
		for _, way := range [][2]*peer{{theirs, ours}, {ours, theirs}, {ours, ours}} {
			rng := rand.New(rand.NewPCG(seed, 11))
			from, to := way[0], way[1]
			from.do(t, "FLUSHALL")
			to.do(t, "FLUSHALL")
			for range 150 {
				for _, cmd := range randomStreams(rng) {
					from.do(t, cmd...)
				}
			}
			from.do(t, "XADD", "s", "*", "f", strings.Repeat("long ", 1000), "-5", "007")
			for _, key := range []string{"s", "t"} {
				if from.do(t, "TYPE", key) != "+stream\r\n" {
					continue
				}
				want := show(from, key)
				_, payload, _ := strings.Cut(from.do(t, "DUMP", key), "\r\n")
				if got := to.do(t, "RESTORE", key, "0", strings.TrimSuffix(payload, "\r\n"), "REPLACE"); got !=
					"+OK\r\n" {
					t.Fatalf("seed %d: RESTORE %s: %q\n%q\nof\n%s", seed, key, got, payload, want)
				}
				if got := show(to, key); got != want {
					t.Fatalf("seed %d: %s was restored as\n%s\nwant\n%s", seed, key, got, want)
				}
				restored++
			}
		}
	}
	if restored < 60 {
		t.Errorf("%d streams were restored", restored)
	}
}
