package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/loopback"
	"github.com/kvd-project/kvd/internal/testutil"
)

type memcachedServer struct {
	*process
	addr string
	*memcachedConn
}

func startMemcached(tb testing.TB) *memcachedServer {
	tb.Helper()
	addr := freeAddr(tb)
	_, port, _ := strings.Cut(addr, ":")
	p := start(tb, exec.Command("memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", port, "-U", "0", "-m", "1024"))
	return &memcachedServer{p, addr, dialMemcached(tb, addr)}
}

// memcachedConn speaks memcached's text protocol, to whatever serves it. It belongs to
// one goroutine.
type memcachedConn struct {
	net.Conn
	r   *bufio.Reader
	req []byte
}

// dialMemcached connects as soon as somebody listens.
func dialMemcached(tb testing.TB, addr string) *memcachedConn {
	tb.Helper()
	c := &memcachedConn{}
	testutil.UntilNone(tb, "memcached listens", func() (err error) { c.Conn, err = net.Dial("tcp", addr); return err })
	tb.Cleanup(func() { c.Close() })
	c.r = bufio.NewReaderSize(c.Conn, 64<<10)
	return c
}

// set stores a value and waits for the answer.
func (c *memcachedConn) set(key, value []byte) error {
	c.req = append(append(c.req[:0], "set "...), key...)
	c.req = strconv.AppendInt(append(c.req, " 0 0 "...), int64(len(value)), 10)
	c.req = append(append(append(c.req, "\r\n"...), value...), "\r\n"...)
	if _, err := c.Write(c.req); err != nil {
		return err
	}
	line, err := c.r.ReadSlice('\n')
	if err == nil && string(line) != "STORED\r\n" {
		err = fmt.Errorf("set %q: %q", key, line)
	}
	return err
}

// get reads keys in one request and returns how many were there.
func (c *memcachedConn) get(keys ...[]byte) (hits int, err error) {
	c.req = append(c.req[:0], "get"...)
	for _, k := range keys {
		c.req = append(append(c.req, ' '), k...)
	}
	if _, err := c.Write(append(c.req, "\r\n"...)); err != nil {
		return 0, err
	}
	for {
		line, err := c.r.ReadSlice('\n')
		switch {
		case err != nil:
			return hits, err
		case string(line) == "END\r\n":
			return hits, nil
		case !bytes.HasPrefix(line, []byte("VALUE ")):
			return hits, fmt.Errorf("get: %q", line)
		}
		n, err := strconv.Atoi(string(bytes.TrimSpace(line[bytes.LastIndexByte(line, ' '):])))
		if err != nil {
			return hits, err
		}
		if _, err := c.r.Discard(n + len("\r\n")); err != nil {
			return hits, err
		}
		hits++
	}
}

func (m *memcachedServer) load(tb testing.TB, s *keySet) {
	tb.Helper()
	w := bufio.NewWriterSize(m.Conn, 256<<10)
	for i := range s.len() {
		fmt.Fprintf(w, "set %s 0 0 %d noreply\r\n", s.key(i), valueLen)
		_, _ = w.Write(value(i))
		_, _ = w.WriteString("\r\n")
	}
	if err := w.Flush(); err != nil {
		tb.Fatal(err)
	}
	// The answer to stats comes after all of that; the hash table grows behind it.
	testutil.UntilNone(tb, "memcached has answered", func() error {
		if m.stats(tb, "stats")["hash_is_expanding"] != 0 {
			return fmt.Errorf("memcached's hash table is still growing")
		}
		return nil
	})
}

// stats asks for numbers; others are left out.
func (c *memcachedConn) stats(tb testing.TB, command string) map[string]int64 {
	tb.Helper()
	if _, err := fmt.Fprintf(c, "%s\r\n", command); err != nil {
		tb.Fatal(err)
	}
	got := map[string]int64{}
	for {
		line, err := c.r.ReadString('\n')
		if err != nil {
			tb.Fatal(err)
		}
		f := strings.Fields(line)
		if len(f) == 1 && f[0] == "END" {
			return got
		}
		if len(f) != 3 || f[0] != "STAT" {
			tb.Fatalf("memcached said %q", line)
		}
		if n, err := strconv.ParseInt(f[2], 10, 64); err == nil {
			got[f[1]] = n
		}
	}
}

// freeAddr is a loopback address that nobody listens on just now, for servers
// that cannot choose one and say which.
func freeAddr(tb testing.TB) string {
	tb.Helper()
	addr, err := loopback.FreeAt("127.0.0.1")
	if err != nil {
		tb.Fatal(err)
	}
	return addr
}
