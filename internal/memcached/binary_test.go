package memcached_test

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/memcached"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// requests are lines as request has them.
func requests(t *testing.T, lines ...string) string {
	var b []byte
	for _, l := range lines {
		b = append(b, request(t, l)...)
	}
	return string(b)
}

// binaryTalk has a conversation in lines as player has them, on a connection of its own.
func binaryTalk(t *testing.T, addr string, lines ...string) string {
	p := &player{addr: addr, ordinals: make(map[string]int)}
	defer p.hangUp()
	return p.bin(t, strings.Join(lines, "\n"))
}

// TestSASL: a connection authenticates by PLAIN, and may do nothing else before but ask for the version.
func TestSASL(t *testing.T) {
	users := authFile(t, "user:pass\n")
	addr, s := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}), AuthFile: users})
	answer := func(op, status int, value string) string {
		return fmt.Sprintf("0x81 op=%#02x status=%#02x type=0 cas=0 opaque=0 value=%q\n", op, status, value)
	}
	refused := answer(0x21, 0x20, "Auth failure.")
	for _, x := range []struct {
		say  []string
		want string
	}{
		{[]string{"get k=a"}, answer(0, 0x20, "Auth failure.") + "(closed)\n"},
		{[]string{"setq k=a v=x f=0 e=0"}, answer(0x11, 0x20, "Auth failure.") + "(closed)\n"},
		{[]string{"0x7f"}, answer(0x7f, 0x20, "Auth failure.") + "(closed)\n"},
		{[]string{"saslauth k=PLAIN v=" + strings.Repeat("x", 2000)}, answer(0x21, 0x04, "Invalid arguments") +
			"(closed)\n"},
	} {
		if got := binaryTalk(t, addr, x.say...); got != x.want {
			t.Errorf("%v: %s, want %s", x.say, got, x.want)
		}
	}
	// The noop that the player sends behind every request is refused until a login has succeeded, so this is without
	// player.
	login := func(lines ...string) string {
		return talk(t, addr, requests(t, append(lines, "get k=a")...))
	}
	last := string(slices.Concat([]byte{0x81, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 13}, make([]byte, 12),
		[]byte("Auth failure.")))
	for _, bad := range []string{"saslauth k=PLAIN v=\\0user\\0bad", "saslauth k=PLAIN v=\\0nobody\\0pass",
		"saslauth k=PLAIN v=user", "saslauth k=PLAIN", "saslauth k=LOGIN v=\\0user\\0pass",
		"saslstep k=PLAIN v=\\0user\\0pass", "saslauth k=PLAIN v=\\0user\\0pass\\0"} {
		if got := login(bad); !strings.Contains(got, "Auth failure.") || !strings.HasSuffix(got, last) {
			t.Errorf("%s: %q", bad, got)
		}
	}
	got := binaryTalk(t, addr, "saslauth k=PLAIN v=\\0user\\0pass", "saslmechs", "version", "set k=a v=x f=0 e=0",
		"get k=a", "saslauth k=PLAIN v=\\0user\\0bad", "get k=a")
	want := answer(0x21, 0, "Authenticated") + answer(0x20, 0, "PLAIN") + answer(0x0b, 0, memcached.Version) +
		"0x81 op=0x01 status=0x00 type=0 cas=$1 opaque=0\n" +
		"0x81 op=0x00 status=0x00 type=0 cas=$1 opaque=0 ext=00000000 value=\"x\"\n" + refused +
		"0x81 op=0x00 status=0x00 type=0 cas=$1 opaque=0 ext=00000000 value=\"x\"\n"
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	// A user who is taken out is disconnected, as one of the text protocol.
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(testutil.Limit))
	io.WriteString(c, requests(t, "saslauth k=PLAIN v=as\\0user\\0pass")) //nolint:errcheck // reading tells
	b := make([]byte, 24+len("Authenticated"))
	if _, err := io.ReadFull(c, b); err != nil || !strings.HasSuffix(string(b), "Authenticated") {
		t.Fatalf("%q, %v", b, err)
	}
	if err := errorsOf(os.WriteFile(users, []byte("other:pass\n"), 0o644), s.ReloadUsers()); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(b); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a user who is no more: %q, %v", b[:n], err)
	}
}

// Lookups up to a noop go to the store together, and the misses of quiet ones are not answered.
func TestBinaryPipelining(t *testing.T) {
	store := &counting{API: clienttest.New(clienttest.Options{})}
	addr, _ := serve(t, memcached.Options{Client: store})
	binaryTalk(t, addr, "set k=b v=x f=5 e=0")
	store.batches = nil
	got := talk(t, addr, requests(t, "getkq k=a o=1", "getkq k=b o=2", "getq k=c o=3", "get k=d o=4", "getkq k=e o=5",
		"noop o=6", "quitq"))
	r := bufio.NewReader(strings.NewReader(got))
	var opaques []uint32
	for {
		h := make([]byte, 24)
		if _, err := io.ReadFull(r, h); err != nil {
			break
		}
		opaques = append(opaques, binary.BigEndian.Uint32(h[12:]))
		io.CopyN(io.Discard, r, int64(binary.BigEndian.Uint32(h[8:]))) //nolint:errcheck // the next header tells
	}
	if !slices.Equal(opaques, []uint32{2, 4, 6}) {
		t.Errorf("answers to %v: %q", opaques, got)
	}
	if !slices.Equal(store.batches, []int{5}) {
		t.Errorf("went in batches of %v", store.batches)
	}
}

// A value that is too large is passed over, and takes the old one with it if it was to be set. The server does not wait
// without end for a value that does not come.
func TestBinaryLimits(t *testing.T) {
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}), MaxValueBytes: 100,
		IOTimeout: 50 * time.Millisecond})
	v := strings.Repeat("x", 101)
	const large = "type=0 cas=0 opaque=0 value=\"Too large.\"\n"
	got := binaryTalk(t, addr, "set k=a v=x f=0 e=0", "add k=a v="+v+" f=0 e=0", "append k=a v="+v, "append k=a v="+
		v[:100], "get k=a", "setq k=a v="+v+" f=0 e=0", "get k=a")
	want := "0x81 op=0x01 status=0x00 type=0 cas=$1 opaque=0\n0x81 op=0x02 status=0x03 " + large +
		"0x81 op=0x0e status=0x03 " + large + "0x81 op=0x0e status=0x03 " + large +
		"0x81 op=0x00 status=0x00 type=0 cas=$1 opaque=0 ext=00000000 value=\"x\"\n0x81 op=0x11 status=0x03 " + large +
		"0x81 op=0x00 status=0x01 type=0 cas=0 opaque=0 value=\"Not found\"\n"
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	for _, half := range []string{"\x80", requests(t, "get k=a")[:24], requests(t, "set k=a v=x f=0 e=0 b=4000000000"),
		requests(t, "set k=a v=x f=0 e=0 b=50"), requests(t, "0x7f b=4000000000")} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(testutil.Limit))
		io.WriteString(c, half) //nolint:errcheck // reading tells
		if b, err := io.ReadAll(c); err != nil || len(b) > 0 {
			t.Errorf("%q: %q, %v", half, b, err)
		}
		c.Close()
	}
}

// A collection of Redis's is no value, but can be replaced and deleted.
func TestCollections(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	addr, _ := serve(t, memcached.Options{Client: store})
	ops := []client.Op{{Kind: client.OpPut, Key: []byte("h"), Value: []byte("x"), Type: client.Hash},
		{Kind: client.OpPut, Key: []byte("a"), Value: []byte("x")}}
	if store.Do(t.Context(), ops); ops[0].Err != nil || ops[1].Err != nil {
		t.Fatal(ops[0].Err, ops[1].Err)
	}
	const refused = "SERVER_ERROR the value is a collection of Redis's; nothing was done\r\n"
	for _, say := range []string{"get h", "incr h 1", "mg h v", "mg h T30", "ma h", "md h I", "append h 0 0 1\r\nx",
		"touch h 1", "gat 0 h"} {
		if got := talk(t, addr, say+"\r\n"); got != refused {
			t.Errorf("%q: %q", say, got)
		}
	}
	if got := talk(t, addr, "get a h\r\n"); got != "VALUE a 0 1\r\nx\r\n"+refused {
		t.Errorf("beside a value: %q", got)
	}
	if got, want := binaryTalk(t, addr, "get k=h"), fmt.Sprintf("0x81 op=0x00 status=0x84 type=0 cas=0 opaque=0 "+
		"value=%q\n", refused[len("SERVER_ERROR "):len(refused)-2]); got != want {
		t.Errorf("binary: %s, want %s", got, want)
	}
	if got := talk(t, addr, "set h 0 0 1\r\ny\r\nget h\r\ndelete h\r\n"); got !=
		"STORED\r\nVALUE h 0 1\r\ny\r\nEND\r\nDELETED\r\n" {
		t.Errorf("a set: %q", got)
	}
}

// Wrong passwords cost as much as in text.
func TestSASLIsSlowToGuess(t *testing.T) {
	addr, _ := serve(t, memcached.Options{Client: clienttest.New(clienttest.Options{}),
		AuthFile: authFile(t, "user:pass\n")})
	say := ""
	for range 11 {
		say += requests(t, "saslauth k=PLAIN v=\\0user\\0bad")
	}
	began := time.Now()
	if got := talk(t, addr, say+requests(t, "saslauth k=PLAIN v=\\0user\\0pass", "quitq")); !strings.HasSuffix(
		got, "Authenticated") {
		t.Errorf("got %q", got)
	}
	if took := time.Since(began); took < netsrv.GuessDelay {
		t.Errorf("it took %v after many wrong passwords", took)
	}
}

// The server neither panics nor stops answering, and what it says is whole responses, whatever is sent.
func FuzzBinary(f *testing.F) {
	for _, l := range []string{"get k=a", "getkq k=a", "set k=a v=x f=1 e=0", "append k=a v=x", "incr k=a d=1 i=1 e=0",
		"gat k=a e=1", "delete k=a", "stat", "stat k=settings",
		"flush e=0", "version", "saslauth k=PLAIN v=\\0a\\0b", "0x7f v=x", "get k=a n=9", "set k=a v=x f=0 e=0 b=1"} {
		f.Add(slices.Concat(request(f, l), request(f, "noop")))
	}
	addr, _ := serve(f, memcached.Options{Client: clienttest.New(clienttest.Options{MaxBytes: 1 << 20, Evict: true}),
		IOTimeout: time.Second})
	f.Fuzz(func(t *testing.T, b []byte) {
		got := []byte(talk(t, addr, "\x80"+string(b[min(1, len(b)):])))
		for len(got) > 0 {
			if len(got) < 24 || got[0] != 0x81 || len(got) < 24+int(binary.BigEndian.Uint32(got[8:])) {
				t.Fatalf("half a response: %q", got)
			}
			got = got[24+int(binary.BigEndian.Uint32(got[8:])):]
		}
		if got := talk(t, addr, "mn\r\n"); got != "MN\r\n" {
			t.Fatalf("afterwards: %q", got)
		}
	})
}
