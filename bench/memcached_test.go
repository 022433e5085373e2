package bench

import (
	"bufio"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

type memcachedServer struct {
	*process
	conn net.Conn
	r    *bufio.Reader
}

func startMemcached(tb testing.TB) *memcachedServer {
	tb.Helper()
	addr := freeAddr(tb)
	_, port, _ := strings.Cut(addr, ":")
	m := &memcachedServer{process: start(tb, exec.Command("memcached", "-u", "nobody", "-l", "127.0.0.1", "-p", port, "-U", "0", "-m", "1024"))}
	until(tb, func() (err error) { m.conn, err = net.Dial("tcp", addr); return err })
	tb.Cleanup(func() { m.conn.Close() })
	m.r = bufio.NewReader(m.conn)
	return m
}

func (m *memcachedServer) load(tb testing.TB, s *keySet) {
	tb.Helper()
	w := bufio.NewWriterSize(m.conn, 256<<10)
	for i := range s.len() {
		fmt.Fprintf(w, "set %s 0 0 %d noreply\r\n", s.key(i), valueLen)
		_, _ = w.Write(value(i))
		_, _ = w.WriteString("\r\n")
	}
	if err := w.Flush(); err != nil {
		tb.Fatal(err)
	}
	// The answer to stats comes after all of that; the hash table grows behind it.
	until(tb, func() error {
		if m.stats(tb, "stats")["hash_is_expanding"] != 0 {
			return fmt.Errorf("memcached's hash table is still growing")
		}
		return nil
	})
}

// stats asks for numbers; others are left out.
func (m *memcachedServer) stats(tb testing.TB, command string) map[string]int64 {
	tb.Helper()
	if _, err := fmt.Fprintf(m.conn, "%s\r\n", command); err != nil {
		tb.Fatal(err)
	}
	got := map[string]int64{}
	for {
		line, err := m.r.ReadString('\n')
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
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// until repeats f for up to ten seconds until it succeeds.
func until(tb testing.TB, f func() error) {
	tb.Helper()
	var err error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	tb.Fatal(err)
}
