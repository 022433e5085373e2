package bench

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvd-project/kvd/client"
)

const (
	keyLen   = 16
	valueLen = 64
)

// keySet is n keys of 16 bytes, and an order to visit them in.
type keySet struct {
	bytes []byte
	order []uint32
}

func newKeySet(n int) *keySet {
	s := &keySet{}
	for i := range n {
		s.bytes = fmt.Appendf(s.bytes, "user%012d", i)
	}
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	s.order = make([]uint32, max(n, 1<<16))
	for i := range s.order {
		s.order[i] = uint32(i % n)
	}
	rng.Shuffle(len(s.order), func(i, j int) { s.order[i], s.order[j] = s.order[j], s.order[i] })
	return s
}

func (s *keySet) len() int { return len(s.bytes) / keyLen }

func (s *keySet) key(i int) []byte { return s.bytes[i*keyLen : (i+1)*keyLen : (i+1)*keyLen] }

// at is the i-th key of the order, which repeats.
func (s *keySet) at(i int) []byte { return s.key(int(s.order[i%len(s.order)])) }

func value(i int) []byte {
	v := make([]byte, valueLen)
	rand.NewChaCha8([32]byte{byte(i), byte(i >> 8), byte(i >> 16)}).Read(v)
	return v
}

// load puts every key of s, and reads it so that c remembers where it is.
func load(tb testing.TB, c *client.Client, s *keySet) {
	tb.Helper()
	const batch = 512
	pairs := make([]client.KV, 0, batch)
	for i := range s.len() {
		pairs = append(pairs, client.KV{Key: s.key(i), Value: value(i)})
		if len(pairs) == batch || i == s.len()-1 {
			for _, r := range c.MultiPut(tb.Context(), pairs) {
				if r.Err != nil {
					tb.Fatal(r.Err)
				}
			}
			pairs = pairs[:0]
		}
	}
	warm(tb, c, s)
}

// warm reads every key of s.
func warm(tb testing.TB, c *client.Client, s *keySet) {
	tb.Helper()
	buf := make([]byte, valueLen)
	for i := range s.len() {
		if n, err := c.GetInto(tb.Context(), s.key(i), buf); err != nil || n != valueLen {
			tb.Fatalf("get %q: %d bytes, %v", s.key(i), n, err)
		}
	}
}
