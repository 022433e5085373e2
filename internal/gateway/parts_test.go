package gateway

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestParts: commands that need a part of a long value reply as on the whole one, READ the chunks that the part is in,
// and take memory for the part alone.
func TestParts(t *testing.T) {
	const size = 9<<20 + 17 // five chunks
	c := newStore(t)
	value := make([]byte, size)
	for i := range value {
		value[i] = byte(rand.Uint32())
	}
	if _, err := c.Put(t.Context(), []byte("v"), value, client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	o := Options{Databases: []Database{{"default", c}}, Budget: netsrv.NewBudget(size + 1<<20)} // not for two
	addr, g := start(t, o)
	p := dial(t, "tcp", addr)
	num := func() int {
		n := []int{0, 1, 4095, 4096, 2<<20 - 1, 2 << 20, 2<<20 + 1, size - 1, size, size + 1}[rand.IntN(10)]
		if rand.IntN(2) == 0 {
			return -n
		}
		return n
	}
	place := func(i int) int { // negative numbers count from the end
		if i < 0 {
			return max(size+i, 0)
		}
		return i
	}
	p.want(t, fmt.Sprintf(":%d\r\n", size), "STRLEN", "v")
	for range 100 {
		from := num()
		to := from + rand.IntN(1000) - 100
		was := c.Stats().Verbs.ReadBytes
		hi := min(place(to)+1, size)
		lo := min(place(from), hi)
		if from < 0 && to < from {
			lo = hi // as in Redis, also where both are before the begin
		}
		if hi-lo > 1<<20 {
			continue
		}
		p.want(t, bulk(string(value[lo:hi])), "GETRANGE", "v", strconv.Itoa(from), strconv.Itoa(to))
		// The length, and two chunks at the most.
		if got := c.Stats().Verbs.ReadBytes - was; got > 2*(2<<20)+64<<10 {
			t.Errorf("GETRANGE %d %d READ %d bytes", from, to, got)
		}
		at := rand.IntN(9 * size)
		bit := byte(0)
		if at < 8*size {
			bit = value[at/8] >> (7 - at%8) & 1
		}
		p.want(t, fmt.Sprintf(":%d\r\n", bit), "GETBIT", "v", strconv.Itoa(at))
	}
	for _, cmd := range [][]string{{":1\r\n", "EXISTS", "v"}, {"+string\r\n", "TYPE", "v"}, {":1\r\n", "TOUCH", "v"},
		{":-1\r\n", "TTL", "v"}, {":1\r\n", "OBJECT", "REFCOUNT", "v"}} {
		p.want(t, cmd[0], cmd[1:]...)
	}
	for range 3 {
		p.want(t, bulk(string(value)), "GET", "v")
	}
	// Of one key, in one batch.
	p.send(t, []string{"GETRANGE", "v", "5", "8"}, []string{"STRLEN", "v"}, []string{"SUBSTR", "v", "-1", "-1"},
		[]string{"GETRANGE", "v", "x", "8"}, []string{"GETRANGE", "v", "3", "2"}, []string{"EXISTS", "v"})
	for _, want := range []string{bulk(string(value[5:9])), fmt.Sprintf(":%d\r\n", size),
		bulk(string(value[size-1:])), "-" + string(values.ErrNotInt) + "\r\n", "$0\r\n\r\n", ":1\r\n"} {
		if got := string(p.reply(t)); got != want {
			t.Errorf("got %.100q, want %.100q", got, want)
		}
	}
	testutil.UntilNone(t, "turns that are not over", func() int { return len(g.turns) })
	testutil.UntilNone(t, "bytes of the budget that are still taken", o.Budget.Used)
}
