package gateway

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
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
