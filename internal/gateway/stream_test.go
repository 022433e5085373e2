package gateway

import (
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client/clienttest"
)

// TestStreamsLikeRedis sends seeded commands to a redis-server and to a gateway, and compares the replies byte for byte, but for clocks.
func TestStreamsLikeRedis(t *testing.T) {
	if os.Getenv("KVD_COMPAT") != "1" {
		t.Skip("it needs redis-server: run make test-compat, or set KVD_COMPAT=1")
	}
	redis := startRedis(t)
	addr := serve(t, Options{Databases: []Database{{"default", clienttest.New(clienttest.Options{})}}})
	for seed := range uint64(24) {
		for _, proto := range []string{"2", "3"} {
			compareWith(t, randomStreams, seed, proto, dial(t, "tcp", addr), dial(t, "unix", redis))
		}
	}
}

// sameButTimes compares replies with times in them: idle ones, and those of the clock. Redis's radix tree may keep a node for a stream without entries.
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
		idle := i > 0 && a[i-1] == "idle" || strings.EqualFold(cmd[0], "xpending") && len(cmd) > 3 && strings.HasPrefix(a[i+1], ":")
		if err1 != nil || err2 != nil || a[i][0] != ':' || b[i][0] != ':' || x-y > 5000 || y-x > 5000 || !idle && min(x, y) < 1e11 {
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
		return r.pick("0", "0-0", "-", "+", "(", "5-", "-5", "a", "", "1-2-3", "18446744073709551615-18446744073709551615", "18446744073709551616", " 7", "007", "+5", "3-x", "1-*")
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
		c := []string{"XCLAIM", r.key(), r.group(), r.consumer(), r.pick("0", "0", "0", "3600000", "x"), r.id(), r.id(), r.id()}
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
	return one(strings.Fields(r.pick("DEL s", "DEL t", "SET text x", "TYPE s", "OBJECT ENCODING s", "RENAME t s", "COPY s t REPLACE", "LPUSH s x", "XINFO HELP", "XGROUP HELP",
		"XGROUP CREATE s g 0", "XGROUP CREATE s h $ MKSTREAM", "SCAN 0 TYPE stream MATCH none", "XGROUP NOSUCH s g", "XINFO STREAM s FULL x", "GET s", "EXPIRE s 10000", "PERSIST s"))...)
}
