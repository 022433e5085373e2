package ring

import (
	"bytes"
	"errors"
	"flag"
	"math/rand/v2"
	"os"
	"reflect"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write the C header")

// TestHeader: the header of the C library is of this package.
func TestHeader(t *testing.T) {
	const name = "../../client/c/kvd_ring.h"
	if *rewrite {
		if err := os.WriteFile(name, []byte(Header()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if string(b) != Header() {
		t.Errorf("%s differs from what internal/ring defines: go generate ./internal/ring", name)
	}
	// The struct's fields are in the order in which these are encoded.
	for _, n := range []Kind{KindHello, KindBye, KindWelcome, KindRegionGone} {
		want := map[Kind]int{KindHello: 1, KindBye: 5, KindWelcome: 64, KindRegionGone: 69}[n]
		if int(n) != want {
			t.Errorf("a kind is %d, want %d", n, want)
		}
	}
}

// TestEntries: the bytes of entries, and what is not one.
func TestEntries(t *testing.T) {
	s := Submission{OpPut, FlagIfVersion, 0x0203, 0x04050607, 0x08090a0b, 0x0c0d0e0f, 0x1011121314151617,
		0x18191a1b1c1d1e1f, 0x2021222324252627, 0x28292a2b2c2d2e2f, 0x30313233, 0x34353637}
	var b [EntrySize]byte
	s.Put(b[:])
	if want := "\x02\x04\x03\x02\x07\x06\x05\x04\x0b\x0a\x09\x08\x0f\x0e\x0d\x0c\x17\x16"; string(b[:18]) != want {
		t.Errorf("a submission is % x, want % x", b[:18], want)
	}
	if got, err := ParseSubmission(b[:]); got != s || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
	b[60] = 1
	if _, err := ParseSubmission(b[:]); !errors.Is(err, ErrProtocol) {
		t.Errorf("a submission with more: %v", err)
	}
	c := Completion{0x01020304, Unknown, System, 0x0708, 0x090a0b0c0d0e0f10, 0x1112131415161718, 0x191a1b1c1d1e1f20,
		0x21222324, 0x25262728, 0x292a2b2c2d2e2f30, 0x3132333435363738, 0x393a3b3c}
	c.Put(b[:])
	if got, err := ParseCompletion(b[:]); got != c || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
	if want := "\x04\x03\x02\x01\x02\x15\x08\x07\x10\x0f"; string(b[:10]) != want {
		t.Errorf("a completion is % x, want % x", b[:10], want)
	}
	for at, v := range map[int]byte{4: 3, 5: byte(System) + 1, 63: 1} {
		bad := b
		if bad[at] = v; true {
			if _, err := ParseCompletion(bad[:]); !errors.Is(err, ErrProtocol) {
				t.Errorf("byte %d of a completion is %d: %v", at, v, err)
			}
		}
	}
}

// pair is a ring and its ends.
func pair(t testing.TB, depth uint32) (mem []byte, s *Server, c *Client) {
	t.Helper()
	l := LayoutOf(depth)
	mem = make([]byte, l.Len+8)
	mem = mem[:l.Len]
	l.Format(mem)
	got, err := ParseHeader(mem)
	if err != nil || got != l {
		t.Fatalf("%+v, %v, want %+v", got, err, l)
	}
	return mem, NewServer(mem, l), NewClient(mem, got)
}

// TestQueue: entries come in order, round the ring and past the end of its indexes, each once.
func TestQueue(t *testing.T) {
	mem, s, c := pair(t, MinDepth)
	for _, at := range []int{offSQHead, offSQTail, offCQHead, offCQTail} {
		word(mem, at).Store(^uint32(0) - 20)
	}
	s.taken, s.written, c.taken, c.written = ^uint32(20), ^uint32(20), ^uint32(20), ^uint32(20)
	r := rand.New(rand.NewPCG(1, 2))
	var under []uint32
	next, submitted, completed := uint32(0), 0, 0
	for submitted < 1000 || len(under) > 0 {
		for range r.IntN(MinDepth) {
			if tag := next; submitted < 1000 && c.Submit(&Submission{Op: OpNop, Tag: tag, Word: uint64(tag) * 3}) {
				next++
				submitted++
			}
		}
		c.Publish()
		got, err := s.Take(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range got {
			if x.Word != uint64(x.Tag)*3 {
				t.Fatalf("%+v", x)
			}
			under = append(under, x.Tag)
		}
		if c.Passed() != c.written || s.Live() != len(under) {
			t.Fatalf("%d of %d are passed, %d of %d live", c.Passed(), c.written, s.Live(), len(under))
		}
		r.Shuffle(len(under), func(i, j int) { under[i], under[j] = under[j], under[i] })
		for range r.IntN(len(under) + 1) {
			s.Complete(&Completion{Tag: under[0], Version: uint64(under[0]) * 5})
			under = under[1:]
		}
		s.Publish()
		done, err := c.Reap(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range done {
			if completed++; x.Version != uint64(x.Tag)*5 {
				t.Fatalf("%+v", x)
			}
		}
	}
	if completed != 1000 {
		t.Errorf("%d of 1000 are complete", completed)
	}
}

// TestSleep: an end that is about to sleep sees what was queued before, and is woken for what comes later, once.
func TestSleep(t *testing.T) {
	_, s, c := pair(t, MinDepth)
	if c.Submit(&Submission{Op: OpNop}); c.Publish() {
		t.Error("a broker that is awake is to be woken")
	}
	if s.Idle() {
		t.Error("a broker sleeps beside a submission")
	}
	if _, err := s.Take(nil); err != nil || !s.Idle() {
		t.Errorf("no sleep after the last one: %v", err)
	}
	c.Submit(&Submission{Op: OpNop, Tag: 1})
	if !c.Publish() || c.Publish() {
		t.Error("a broker that sleeps is woken once")
	}
	s.At(1)
	c.At(1)
	if s.Beside(1) || c.Beside(1) || !s.Beside(0) {
		t.Error("an end waits awake for one on its own processor, or not for one on another")
	}
}

// TestHostileRing: what the other end may write to a ring is noticed.
func TestHostileRing(t *testing.T) {
	for what, change := range map[string]func(mem []byte, s *Server, c *Client){
		"a tail too far ahead": func(mem []byte, _ *Server, _ *Client) { word(mem, offSQTail).Store(MinDepth + 1) },
		"a tail behind":        func(mem []byte, _ *Server, _ *Client) { word(mem, offSQTail).Store(^uint32(0)) },
		"a slot twice": func(mem []byte, _ *Server, c *Client) {
			for tag := range uint32(2) {
				c.Submit(&Submission{Op: OpNop, Tag: tag})
			}
			copy(mem[offSubmissions+EntrySize:][:EntrySize], mem[offSubmissions:])
			c.Publish()
		},
		"no zero at the end": func(mem []byte, _ *Server, c *Client) {
			c.Submit(&Submission{Op: OpNop})
			mem[offSubmissions+EntrySize-1] = 1
			c.Publish()
		},
	} {
		mem, s, c := pair(t, MinDepth)
		change(mem, s, c)
		if got, err := s.Take(nil); !errors.Is(err, ErrProtocol) || len(got) > 1 {
			t.Errorf("%s: %d submissions, %v", what, len(got), err)
		}
	}
	mem, s, c := pair(t, MinDepth)
	c.Submit(&Submission{Op: OpNop, Tag: 3})
	c.Publish()
	s.Take(nil)
	s.Complete(&Completion{Tag: 3})
	s.Publish()
	copy(mem[c.l.CQ+EntrySize:][:EntrySize], mem[c.l.CQ:])
	word(mem, offCQTail).Store(2)
	if got, err := c.Reap(nil); !errors.Is(err, ErrProtocol) || len(got) != 1 {
		t.Errorf("a completion twice: %d, %v", len(got), err)
	}
}

// TestHostileHeader: every byte of a header that is another makes it no header, or is not looked at.
func TestHostileHeader(t *testing.T) {
	mem, _, _ := pair(t, MinDepth)
	for at := range headerSize {
		for bit := range 8 {
			bad := bytes.Clone(mem)
			bad[at] ^= 1 << bit
			l, err := ParseHeader(bad)
			if minor := at == 6 || at == 7; (err == nil) != (minor || at >= 12 && at < 16) {
				t.Errorf("byte %d, bit %d: %+v, %v", at, bit, l, err)
			}
		}
	}
	for n := range 64 {
		if _, err := ParseHeader(mem[:n*64]); !errors.Is(err, ErrProtocol) {
			t.Errorf("a ring of %d bytes: %v", n*64, err)
		}
	}
	if _, err := ParseHeader(mem[:len(mem)-1]); !errors.Is(err, ErrProtocol) {
		t.Errorf("a ring without its last byte: %v", err)
	}
}

// TestMessages: each message is read as it was written; cut off or with more it is none.
func TestMessages(t *testing.T) {
	hello := Hello{MinDepth, 1 << 30, 3, "default", "secret", "trainer"}
	welcome := Welcome{MaxDepth, 1, 64 << 20, MaxKey, 512, 1 << 30, 1 << 28, "broker"}
	register := Register{4096, 1 << 20}
	refused := Refused{No, Denied, "no right to that"}
	region := Region{7, 1 << 40, 4096}
	numbered := func(b []byte) (any, error) { return ParseNumbered(b) }
	for _, x := range []struct {
		b     []byte
		kind  Kind
		want  any
		parse func([]byte) (any, error)
	}{
		{hello.Message(9), KindHello, hello, func(b []byte) (any, error) { return ParseHello(b) }},
		{welcome.Message(9), KindWelcome, welcome, func(b []byte) (any, error) { return ParseWelcome(b) }},
		{register.Message(9), KindRegister, register, func(b []byte) (any, error) { return ParseRegister(b) }},
		{refused.Message(9), KindRefused, refused, func(b []byte) (any, error) { return ParseRefused(b) }},
		{region.Message(), KindRegion, region, func(b []byte) (any, error) { return ParseRegion(b) }},
		{Numbered(Head{KindDone, 9}, 7), KindDone, uint32(7), numbered},
		{Bare(Head{KindBye, 9}), KindBye, nil, func(b []byte) (any, error) { return nil, ParseBare(b) }},
	} {
		h, body, err := ParseHead(x.b)
		if err != nil || h.Kind != x.kind {
			t.Errorf("kind %d: %+v, %v", x.kind, h, err)
			continue
		}
		if got, err := x.parse(body); err != nil || !reflect.DeepEqual(got, x.want) {
			t.Errorf("kind %d: %+v, %v, want %+v", x.kind, got, err, x.want)
		}
		if _, err := x.parse(append(bytes.Clone(body), 0)); !errors.Is(err, ErrProtocol) {
			t.Errorf("kind %d with a byte more: %v", x.kind, err)
		}
		for n := range body {
			if _, err := x.parse(body[:n]); !errors.Is(err, ErrProtocol) {
				t.Errorf("kind %d with %d of %d bytes: %v", x.kind, n, len(body), err)
			}
		}
		if _, _, err := ParseHead(x.b[:len(x.b)-1]); !errors.Is(err, ErrProtocol) {
			t.Errorf("kind %d, cut off: %v", x.kind, err)
		}
	}
	long := Refused{No, Internal, strings.Repeat("x", 2*MaxMessage)}
	if b := long.Message(1); len(b) != MaxMessage {
		t.Errorf("a long text makes a message of %d bytes", len(b))
	}
	newer := hello.Message(1)
	newer[headSize+4] = 2
	if _, err := ParseHello(newer[headSize:]); err == nil || !strings.Contains(err.Error(), "version 2, this one 1") {
		t.Errorf("another version: %v", err)
	}
}

// FuzzServer: whatever a client writes to a ring, the broker's end takes each slot once, or says that it is broken.
func FuzzServer(f *testing.F) {
	f.Add([]byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, b []byte) {
		mem, s, _ := pair(t, MinDepth)
		for len(b) > 3 {
			at := (int(b[0]) | int(b[1])<<8) % len(mem)
			n := copy(mem[at:], b[3:min(len(b), 3+int(b[2]))])
			b = b[3+n:]
			got, err := s.Take(nil)
			if err != nil && !errors.Is(err, ErrProtocol) || len(got) > MinDepth {
				t.Fatalf("%d submissions, %v", len(got), err)
			}
			for _, x := range got {
				clear(s.Slot(x.Tag))
				s.Complete(&Completion{Tag: x.Tag})
			}
			s.Publish()
			if err != nil {
				return
			}
		}
	})
}

// FuzzMessage: whatever comes is a message, or broken.
func FuzzMessage(f *testing.F) {
	f.Add((&Hello{Namespace: "default"}).Message(1))
	f.Add((&Welcome{Depth: MinDepth}).Message(1))
	f.Fuzz(func(t *testing.T, b []byte) {
		_, body, err := ParseHead(b)
		if err != nil {
			return
		}
		_, e1 := ParseHello(body)
		_, e2 := ParseWelcome(body)
		_, e3 := ParseRegister(body)
		_, e4 := ParseRefused(body)
		_, e5 := ParseRegion(body)
		_, e6 := ParseNumbered(body)
		for _, err := range []error{e1, e2, e3, e4, e5, e6} {
			if err != nil && !errors.Is(err, ErrProtocol) {
				t.Error(err)
			}
		}
	})
}
