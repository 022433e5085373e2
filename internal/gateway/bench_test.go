package gateway

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/luascript"
)

// BenchmarkSmall is what a command on a small value costs, asked for one at a time (in a
// loop and by a goroutine of its own) and pipelined.
func BenchmarkSmall(b *testing.B) {
	value := strings.Repeat("v", 100)
	for _, c := range []struct {
		name  string
		calm  int
		depth int
	}{{"loop", 1, 1}, {"goroutine", math.MaxInt, 1}, {"pipelined", math.MaxInt, 32}} {
		for _, op := range []string{"GET", "SET"} {
			b.Run(op+"/"+c.name, func(b *testing.B) {
				was := testCalm
				testCalm = c.calm
				defer func() { testCalm = was }()
				addr := serve(b, Options{Databases: []Database{{"default", newStore(b)}}})
				p := dial(b, "tcp", addr)
				var request []byte
				n := 0
				for i := range c.depth {
					k := fmt.Sprint("key:", i)
					if reply := p.do(b, "SET", k, value); reply != "+OK\r\n" {
						b.Fatal(reply)
					}
					if op == "GET" {
						request = append(request, encode("GET", k)...)
						n += len(bulk(value))
					} else {
						request = append(request, encode("SET", k, value)...)
						n += len("+OK\r\n")
					}
				}
				reply := make([]byte, n)
				b.ReportAllocs()
				for b.Loop() {
					if _, err := p.Write(request); err != nil {
						b.Fatal(err)
					}
					if _, err := io.ReadFull(p.r, reply); err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				if bytes.HasPrefix(reply, []byte("-")) {
					b.Fatalf("%q", reply)
				}
			})
		}
	}
}

// BenchmarkStep is what takes effect in one step costs: transactions on a key and on two, and scripts.
func BenchmarkStep(b *testing.B) {
	exec := func(commands ...[]string) (requests [][]string) {
		return append(append([][]string{{"MULTI"}}, commands...), []string{"EXEC"})
	}
	const script = "return redis.call('INCR', KEYS[1])"
	incr, get := []string{"INCR", "n"}, []string{"GET", "k"}
	for _, c := range []struct {
		name     string
		requests [][]string
	}{
		{"SET", exec([]string{"SET", "k", strings.Repeat("v", 100)})},
		{"INCR", exec(incr)},
		{"GET", exec(get)},
		{"INCR,EXPIRE", exec(incr, []string{"EXPIRE", "n", "100"})},
		{"INCR,GET", exec(incr, get)},
		{"EVALSHA", [][]string{{"EVALSHA", luascript.SHA([]byte(script)), "1", "n"}}},
		{"EVALSHA*16", slices.Repeat([][]string{{"EVALSHA", luascript.SHA([]byte(script)), "1", "n"}}, 16)},
		{"MSETNX", [][]string{{"MSETNX", "n", "1", "k", "2"}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			addr := serve(b, Options{Databases: []Database{{"default", newStore(b)}}})
			p := dial(b, "tcp", addr)
			p.do(b, "SET", "k", "v")
			p.do(b, "SCRIPT", "LOAD", script)
			var request []byte
			for _, r := range c.requests {
				request = append(request, encode(r...)...)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := p.Write(request); err != nil {
					b.Fatal(err)
				}
				for range c.requests {
					if r := p.reply(b); len(r) == 0 || r[0] == '-' {
						b.Fatalf("%q", r)
					}
				}
			}
		})
	}
}
