package gateway

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/collection"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/testutil"
)

// array is an array of bulk strings as the wire has it.
func array(elems ...string) string {
	s := fmt.Sprintf("*%d\r\n", len(elems))
	for _, e := range elems {
		s += bulk(e)
	}
	return s
}

const wrongType = "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n"

func TestLists(t *testing.T) {
	for name, api := range map[string]client.API{"fake": clienttest.New(clienttest.Options{}), "store": newStore(t)} {
		p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", api}}}))
		for _, c := range []struct{ cmd, reply string }{
			{"RPUSHX l x", ":0\r\n"},
			{"RPUSH l b c", ":2\r\n"},
			{"LPUSH l a z", ":4\r\n"},
			{"LRANGE l 0 -1", array("z", "a", "b", "c")},
			{"TYPE l", "+list\r\n"},
			{"OBJECT ENCODING l", bulk("quicklist")},
			{"GET l", wrongType},
			{"LINDEX l -1", bulk("c")},
			{"LINDEX l 4", "$-1\r\n"},
			{"LSET l 1 aa", "+OK\r\n"},
			{"LSET l 4 x", "-ERR index out of range\r\n"},
			{"LINSERT l AFTER aa bb", ":5\r\n"},
			{"LINSERT l BEFORE nothing bb", ":-1\r\n"},
			{"LPOS l bb", ":2\r\n"},
			{"LPOS l bb RANK -1 COUNT 0", "*1\r\n:2\r\n"},
			{"LREM l 0 bb", ":1\r\n"},
			{"LRANGE l 1 2", array("aa", "b")},
			{"EXPIRE l 1000", ":1\r\n"},
			{"LTRIM l 1 -1", "+OK\r\n"},
			{"TTL l", ":1000\r\n"},
			{"LPOP l", bulk("aa")},
			{"RPOP l 5", array("c", "b")},
			{"EXISTS l", ":0\r\n"},
			{"LPOP l", "$-1\r\n"},
			{"LPOP l 1", "*-1\r\n"},
			{"RPUSH l 1 2 3", ":3\r\n"},
			{"TTL l", ":-1\r\n"},
			{"LMOVE l l LEFT RIGHT", bulk("1")},
			{"RPOPLPUSH l l", bulk("1")},
			{"LMOVE l other LEFT RIGHT", bulk("1")},
			{"LMOVE other l LEFT LEFT", bulk("1")},
			{"LMPOP 1 l RIGHT COUNT 2", "*2\r\n" + bulk("l") + array("3", "2")},
			{"BLPOP l 0", array("l", "1")},
			{"EXISTS l", ":0\r\n"},
			{"SET s 1", "+OK\r\n"},
			{"LPUSH s 1", wrongType},
			{"BRPOP s 0", wrongType},
			{"COMMAND GETKEYS BLMPOP 0 2 a b LEFT", array("a", "b")},
			{"COMMAND GETKEYS BRPOP a b 0", array("a", "b")},
			{"MULTI", "+OK\r\n"},
			{"RPUSH l 1", "+QUEUED\r\n"},
			{"LLEN l", "+QUEUED\r\n"},
			{"LPOP l", "+QUEUED\r\n"},
			{"EXEC", "*3\r\n:1\r\n:1\r\n" + bulk("1")},
			{"MULTI", "+OK\r\n"},
			{"RPUSH l 1", "+QUEUED\r\n"},
			{"BLPOP l 0", "+QUEUED\r\n"},
			{"BLPOP l 0", "+QUEUED\r\n"},
			{"BRPOPLPUSH l l 0", "+QUEUED\r\n"},
			{"EXEC", "*4\r\n:1\r\n" + array("l", "1") + "*-1\r\n$-1\r\n"},
		} {
			p.want(t, c.reply, strings.Fields(c.cmd)...)
		}
		if t.Failed() {
			t.Fatal(name)
		}
	}
}

// TestMoveElement performs commands on several lists without a store.
func TestMoveElement(t *testing.T) {
	list := func(s string) []byte {
		var elems [][]byte
		for _, e := range strings.Fields(s) {
			elems = append(elems, []byte(e))
		}
		b, err := collection.ListSplice(nil, 0, 0, 0, elems...)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []struct{ keys, cmd, reply, after string }{
		{"a: 1 2 3; b: 4", "LMOVE a b LEFT RIGHT", bulk("1"), "a: 2 3; b: 4 1"},
		{"a: 1; b:", "LMOVE a b RIGHT LEFT", bulk("1"), "a:; b: 1"},
		{"a:; b: 4", "LMOVE a b RIGHT LEFT", "$-1\r\n", "a:; b: 4"},
		{"a: 1 2; b: 4", "RPOPLPUSH a b", bulk("2"), "a: 1; b: 2 4"},
		{"a:; b: 4 5 6", "LMPOP 2 a b RIGHT COUNT 2", "*2\r\n" + bulk("b") + array("6", "5"), "a:; b: 4"},
		{"a:; b:", "LMPOP 2 a b RIGHT", "*-1\r\n", "a:; b:"},
		{"a:; b: 4 5", "BLPOP a b 0", array("b", "4"), "a:; b: 5"},
		{"a: 1; b: 4 5", "BLMOVE a b LEFT LEFT 0", bulk("1"), "a:; b: 1 4 5"},
		{"a: 1; b: !", "LMOVE a b LEFT LEFT", wrongType, "a: 1; b: !"},
		{"a: !; b: 1", "BLPOP a b 0", wrongType, "a: !; b: 1"},
	} {
		s := &staged{c: &conn{g: &Gateway{dbs: make([]database, 1)}}}
		s.Open(planHost{s.c}, &planLimits)
		s.c.g.o.MaxValueBytes = client.MaxValueLen
		for part := range strings.SplitSeq(c.keys, ";") {
			name, elems, _ := strings.Cut(strings.TrimSpace(part), ":")
			k := s.Add(stagedName{DB: 0, Name: name})
			switch elems = strings.TrimSpace(elems); elems {
			case "":
			case "!":
				k.Present, k.Value = true, []byte("text")
			default:
				k.Present, k.Type, k.Value = true, client.List, list(elems)
			}
		}
		args := [][]byte{}
		for _, a := range strings.Fields(c.cmd) {
			args = append(args, []byte(a))
		}
		w := newWriter()
		values.WriteRefusal(w, find(args[0]).keys(s, args, w))
		if got := string(w.Bytes()); got != c.reply {
			t.Errorf("%s: %s: got %q, want %q", c.keys, c.cmd, got, c.reply)
		}
		var after []string
		for _, k := range s.Keys {
			text := k.Name + ":"
			if k.Type == client.List {
				r := newWriter()
				all := [][]byte{nil, []byte(k.Name), []byte("0"), []byte("-1")}
				values.WriteRefusal(r, commandsByID[spec.CmdLrange].key(&k.Key, all, r))
				for i, f := range strings.Fields(string(r.Bytes())) {
					if i > 0 && i%2 == 0 {
						text += " " + f
					}
				}
			} else if k.Present {
				text += " !"
			}
			after = append(after, text)
		}
		if got := strings.Join(after, "; "); got != c.after {
			t.Errorf("%s: %s: then %s, want %s", c.keys, c.cmd, got, c.after)
		}
	}
}

// TestLongLists: lists longer than what needs no memory of the share, up to the limit, which an error names.
func TestLongLists(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	elem := strings.Repeat("e", 100<<10)
	n := 0
	for reply := ""; !strings.HasPrefix(reply, "-"); n++ {
		if reply = p.do(t, "RPUSH", "l", elem+strconv.Itoa(n)); n > 100 {
			t.Fatal("no limit was met")
		}
		if strings.HasPrefix(reply, "-") && (!strings.Contains(reply, "of at most 4 MiB; nothing was done") ||
			!strings.Contains(reply, "'l'")) {
			t.Errorf("%q", reply)
		}
	}
	if n--; n < 40 {
		t.Errorf("the limit was met at %d elements", n)
	}
	p.want(t, fmt.Sprintf(":%d\r\n", n), "LLEN", "l")
	p.want(t, bulk(elem+"7"), "LINDEX", "l", "7")
	p.want(t, bulk(elem+"0"), "LPOP", "l")
	p.want(t, bulk(elem+strconv.Itoa(n-1)), "RPOP", "l")
	p.want(t, "+OK\r\n", "LTRIM", "l", "3", "4")
	p.want(t, array(elem+"4", elem+"5"), "LRANGE", "l", "0", "-1")
	// Many short elements, in one pipeline on one key.
	var cmds [][]string
	for i := range 5000 {
		cmds = append(cmds, []string{"RPUSH", "m", strconv.Itoa(i)})
	}
	p.send(t, cmds...)
	for i := range cmds {
		if got := string(p.reply(t)); got != fmt.Sprintf(":%d\r\n", i+1) {
			t.Fatalf("%d: %q", i, got)
		}
	}
	p.want(t, bulk("4321"), "LINDEX", "m", "4321")
}

// TestCorruptLists: bytes that are no list are an error that names the key, whatever the command, and nothing changes.
func TestCorruptLists(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	p := dial(t, "tcp", serve(t, Options{Databases: []Database{{"default", store}}}))
	for _, bytes := range []string{"\x00\x00\x00\x00", "\x01", "\x05\x00\x00\x00\x01a\x01",
		"\x01\x00\x00\x00\xff\xff\xff\xff\x7f", "\x02\x00\x00\x00\x01a\x02\x01b\x03"} {
		ops := []client.Op{{Kind: client.OpPut, Key: []byte("bad"), Value: []byte(bytes), Type: client.List}}
		if store.Do(context.Background(), ops); ops[0].Err != nil {
			t.Fatal(ops[0].Err)
		}
		for _, cmd := range []string{"LPOP bad", "RPOP bad 2", "LINDEX bad 0", "LINDEX bad -1", "LRANGE bad 0 -1",
			"LPOS bad z", "LPOS bad z RANK -1",
			"LINSERT bad BEFORE z y", "LSET bad 0 x", "LREM bad 1 a", "LMOVE bad bad LEFT RIGHT",
			"LMPOP 1 bad LEFT COUNT 9", "BLPOP bad 0", "BLMOVE bad bad RIGHT LEFT 0"} {
			p.want(t, "-ERR kvd: corrupt list 'bad'\r\n", strings.Fields(cmd)...)
		}
		// These look at the head alone, or at no more than they need.
		if bytes[0] != 1 || len(bytes) == 1 {
			p.want(t, "-ERR kvd: corrupt list 'bad'\r\n", "LTRIM", "bad", "0", "0")
		}
		bad := binary.LittleEndian.Uint32(append([]byte(bytes), 0, 0, 0, 0)) == 0 || len(bytes) < 6 || bytes[0] == 5
		if got := p.do(t, "LLEN", "bad"); strings.HasPrefix(got, "-ERR kvd: corrupt list 'bad'") != bad {
			t.Errorf("LLEN of %q: %q", bytes, got)
		}
		read := []client.Op{{Kind: client.OpGet, Key: []byte("bad"), Typed: true}}
		if store.Do(context.Background(), read); read[0].Err != nil || string(read[0].Item.Value) != bytes {
			t.Errorf("%q became %q, %v", bytes, read[0].Item.Value, read[0].Err)
		}
	}
	// Fewer elements than it says: whatever takes the last of them would make a list of none.
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("bad"), Value: []byte("\x02\x00\x00\x00\x03abc\x03"),
		Type: client.List}}
	if store.Do(context.Background(), ops); ops[0].Err != nil {
		t.Fatal(ops[0].Err)
	}
	for _, cmd := range []string{"LPOP bad", "RPOP bad 1", "LPOP bad 2", "LRANGE bad 0 -1", "LREM bad 0 abc",
		"LMOVE bad bad LEFT RIGHT", "BLPOP bad 0", "LPOS bad z"} {
		p.want(t, "-ERR kvd: corrupt list 'bad'\r\n", strings.Fields(cmd)...)
	}
}

// TestRotateLongList: a list that is longer than this gateway may make values keeps its elements as it is turned
// around.
func TestRotateLongList(t *testing.T) {
	dbs := fake()
	p, q := dial(t, "tcp", serve(t, Options{Databases: dbs})),
		dial(t, "tcp", serve(t, Options{Databases: dbs, MaxValueBytes: 1024}))
	a, b, c := strings.Repeat("a", 1000), strings.Repeat("b", 1000), strings.Repeat("c", 1000)
	p.want(t, ":3\r\n", "RPUSH", "l", a, b, c)
	q.want(t, bulk(a), "LMOVE", "l", "l", "LEFT", "RIGHT")
	q.want(t, array(b, c, a), "LRANGE", "l", "0", "-1")
	q.want(t, bulk(a), "BRPOPLPUSH", "l", "l", "0")
	p.want(t, array(a, b, c), "LRANGE", "l", "0", "-1")
	q.want(t, "-ERR kvd: list 'l' would take 2.9 KiB, of at most 1 KiB; nothing was done\r\n", "RPUSH", "l", "x")
}

// TestLongReplies: the reply of a list can be longer than the list, and counts as memory with its own length.
func TestLongReplies(t *testing.T) {
	const budget = 48 << 20
	store := clienttest.New(clienttest.Options{})
	// 6 MB of reply, of which a socket takes 4 MB at most.
	b, err := collection.ListSplice(nil, 0, 0, 0, make([][]byte, 1_000_000)...)
	if err != nil {
		t.Fatal(err)
	}
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("l"), Value: b, Type: client.List}}
	if store.Do(t.Context(), ops); ops[0].Err != nil {
		t.Fatal(ops[0].Err)
	}
	o := Options{Databases: []Database{{"default", store}}, Budget: netsrv.NewBudget(budget)}
	addr, g := start(t, o)
	before := testutil.Memory()
	var ps []*peer
	ask := func() {
		p := dial(t, "tcp", addr)
		p.send(t, []string{"LRANGE", "l", "0", "-1"})
		ps = append(ps, p)
	}
	ask() // alone: of many, none may get enough of the memory in time
	testutil.Until(t, "a reply that nobody reads", func() bool { return g.m.queued.Load() > 1<<20 })
	for range 15 {
		ask()
	}
	testutil.Until(t, "more replies than there is memory for", func() bool { return o.Budget.Used() > budget/2 })
	testutil.UntilGrown(t, "replies", before, budget+16<<20)
	for _, p := range ps {
		p.Close()
	}
	testutil.Until(t, "their memory is back", func() bool { return o.Budget.Used() == 0 })
}

// TestListsLikeRedis sends seeded commands to a redis-server and to a gateway, and compares the replies byte for byte.
func TestListsLikeRedis(t *testing.T) {
	redis := startRedis(t)
	addr := serve(t, Options{Databases: []Database{{"default", newStore(t)}}})
	for seed := range uint64(12) {
		rng := rand.New(rand.NewPCG(seed, 11))
		ours, theirs := dial(t, "tcp", addr), dial(t, "unix", redis)
		for _, p := range []*peer{ours, theirs} {
			p.do(t, "HELLO", strconv.Itoa(2+int(seed%2)))
			p.do(t, "FLUSHALL")
		}
		var script []string
		for range 1000 {
			cmd := randomListCommand(rng)
			script = append(script, fmt.Sprintf("%.100q", cmd))
			if got, want := ours.do(t, cmd...), theirs.do(t, cmd...); got != want {
				t.Fatalf("seed %d: %.200q\n got %.400q\nwant %.400q\nafter\n%s", seed, cmd, got, want,
					strings.Join(script[max(0, len(script)-15):], "\n"))
			}
		}
	}
}

func randomListCommand(rng *rand.Rand) []string {
	pick := func(s ...string) string { return s[rng.IntN(len(s))] }
	key, other := pick("a", "b", "c", "text"), pick("a", "b", "c", "text")
	value := func() string {
		return pick("a", "b", "c", "", "1", "-7", "héé", strings.Repeat("x", rng.IntN(300)),
			strings.Repeat("y", rng.IntN(9000)))
	}
	index := func() string {
		return pick("0", "1", "2", "3", "-1", "-2", "-3", "5", "-5", "100", "-100", "9223372036854775807",
			"-9223372036854775808", "9223372036854775808", "abc", "", "01", "1.0")
	}
	number := func() string { return pick("0", "1", "2", "3", "10", "-1", "-2", "9223372036854775807", "x", "") }
	timeout := func() string {
		return pick("0.001", "0.01", "-1", "abc", "nan", "inf", "1e17", "", " 1", "0x0.01", "1e-9")
	}
	end := func() string { return pick("LEFT", "RIGHT", "left", "Right", "LEFT", "RIGHT", "up") }
	case2 := func(s string) string { return pick(s, strings.ToLower(s)) }
	some := func() (v []string) {
		for range 1 + rng.IntN(4) {
			v = append(v, value())
		}
		return v
	}
	switch rng.IntN(27) {
	case 0, 1, 2:
		return slices.Concat([]string{pick("LPUSH", "RPUSH", "rpush"), key}, some())
	case 3:
		return slices.Concat([]string{pick("LPUSHX", "RPUSHX"), key}, some())
	case 4:
		return []string{pick("LPOP", "RPOP"), key}
	case 5:
		return []string{pick("LPOP", "RPOP"), key, number()}
	case 6:
		return []string{pick("LPOP", "RPOP", "LLEN"), key, "1", "1"}[:2+rng.IntN(3)]
	case 7:
		return []string{"LLEN", key}
	case 8, 9:
		return []string{"LINDEX", key, index()}
	case 10, 11:
		return []string{"LRANGE", key, index(), index()}
	case 12:
		return []string{"LTRIM", key, pick("0", "0", "1", index()), pick("-1", "-1", "-2", "20", index())}
	case 13, 14:
		return []string{"LSET", key, index(), value()}
	case 15:
		return []string{"LINSERT", key, pick("BEFORE", "after", "AFTER", "x"), value(), value()}
	case 16:
		return []string{"LREM", key, pick("0", "1", "-1", "2", "-2", "x", "9223372036854775807"), value()}
	case 17, 18:
		cmd := []string{"LPOS", key, value()}
		for range rng.IntN(3) {
			cmd = append(cmd, pick("RANK", "COUNT", "maxlen", "Rank", "foo"), pick(number(), index()))
		}
		return cmd[:len(cmd)-max(0, rng.IntN(8)-6)]
	case 19:
		return []string{"LMOVE", key, other, end(), end()}
	case 20:
		return []string{"RPOPLPUSH", key, other}
	case 21:
		cmd := []string{"LMPOP", pick("1", "1", "1", "0", "-1", "x", "2"), key, end(), case2("COUNT"), number(), "more"}
		if cmd[1] == "2" {
			cmd = slices.Insert(cmd, 3, other)
		}
		return cmd[:4+rng.IntN(4)]
	case 22:
		return []string{pick("BLPOP", "BRPOP"), key, other, timeout()}
	case 23:
		return []string{pick("BLMOVE"), key, other, end(), end(), timeout()}
	case 24:
		cmd := []string{"BLMPOP", timeout(), pick("1", "1", "1", "0", "x", "2"), key, end(), case2("COUNT"), number(),
			"more"}
		return cmd[:5+rng.IntN(4)]
	case 25:
		return []string{"BRPOPLPUSH", key, other, timeout()}
	}
	switch rng.IntN(5) {
	case 0:
		return []string{"SET", "text", value()}
	case 1:
		return []string{"DEL", key}
	case 2:
		return []string{pick("TYPE", "EXISTS", "STRLEN", "GET", "TTL"), key}
	case 3:
		return []string{pick("PERSIST", "INCR"), key}
	}
	return []string{"OBJECT", "ENCODING", pick("a", "b", "c")}
}
