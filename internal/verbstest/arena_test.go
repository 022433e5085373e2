package verbstest

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
)

// Values in registered memory go to and from the adapter without a copy. Memory that a caller has back is not touched
// by packets that come late.
func TestArena(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "registered memory is as any other")
	s := newStore(t, 5*time.Second, node{"m1", 0, nil})
	s.namespace("default", 1, 80<<20)
	c := s.client(provider, 2, client.Options{Lanes: 1})
	const one, most = 1 << 20, 5<<20 + 7
	mem := make([]byte, 2*most+64)
	a, err := c.Register(mem)
	if err != nil {
		t.Fatal(err)
	}
	copied := func() uint64 { return c.Stats().Verbs.CopiedBytes }
	move := func(n int) {
		t.Helper()
		src, dst := mem[1:1+n], mem[most+16:most+16+n]
		for i := range src {
			src[i] = byte(i) ^ byte(i>>8) ^ byte(n)
		}
		if _, err := c.Put(t.Context(), []byte("k"), src, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		if got, err := c.GetInto(t.Context(), []byte("k"), dst); err != nil || got != n || !bytes.Equal(src, dst) {
			t.Fatalf("%d bytes: got %d, %v; or they differ", n, got, err)
		}
	}
	for _, n := range []int{100, 8 << 10, 100_003, most, one} {
		move(n)
	}
	if n := copied(); n != 0 {
		t.Errorf("%d bytes of values were copied", n)
	}

	// The network is gone: the caller goes, and the adapter is told to let go of the memory.
	dst := mem[most+16 : most+16+one]
	mend := lose(t, 2, "100%")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	begin := time.Now()
	_, err = c.GetInto(ctx, []byte("k"), dst)
	cancel()
	if err == nil {
		t.Fatal("a GET was answered without a network")
	}
	t.Logf("a caller with 50 ms had its memory back after %v", time.Since(begin))
	for i := range dst {
		dst[i] = 0xc5
	}
	mend()
	it, err := c.Get(t.Context(), []byte("k"))
	if err != nil || !bytes.Equal(it.Value, mem[1:1+one]) {
		t.Fatalf("got %d bytes, %v", len(it.Value), err)
	}
	if n := bytes.Count(dst, []byte{0xc5}); n != one {
		t.Errorf("%d bytes came after GetInto had returned", one-n)
	}
	if n := copied(); n < one-64 { // some bytes go with the key
		t.Errorf("%d bytes were copied of a GET into other memory", n)
	}
	if err := a.Deregister(); err != nil {
		t.Fatal(err)
	}
	was := copied()
	move(one)
	if n := copied() - was; n < 2*(one-64) {
		t.Errorf("%d bytes were copied of values in memory that was registered once", n)
	}
}
