package bench

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
)

// compareCrowd times small requests to a gateway beside many clients that ask for a long value all the time, against a
// quiet gateway. They read their replies, or leave them.
func compareCrowd(t *testing.T, r *report, st *store) {
	const size = 4 << 20
	crowd := scaled(150, 5)
	st.namespace(t, &dirpb.CreateNamespaceRequest{Name: "crowd", Replicas: 1, BytesPerNode: 256 << 20, Shards: 1,
		IndexPercent: 1})
	c := st.open(t, "shm", "crowd")
	if _, err := c.Put(t.Context(), []byte("large"), bytes.Repeat([]byte{7}, size), client.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	g := startGateway(t, st.directory, "crowd")
	host, port, err := net.SplitHostPort(g.redis)
	if err != nil {
		t.Fatal(err)
	}
	small := func() benchmarked {
		return redisBenchmark(t, "get", scaled(20_000, 500), "-h", host, "-p", port, "-d", "100", "-P", "1", "-c", "10")
	}
	rd := startRedis(t)
	if err := rd.open(t, 1).Set(t.Context(), "large", bytes.Repeat([]byte{7}, size), 0).Err(); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		what, addr string
		reads      bool
	}{
		{"read them", g.redis, true}, {"leave them", g.redis, false},
		{"read them, of a redis-server", rd.addr, true}, // which take processors alone
	} {
		beside := func() (b benchmarked) {
			var wg sync.WaitGroup
			var conns []net.Conn
			for range crowd {
				conn, err := net.Dial("tcp", x.addr)
				if err != nil {
					t.Fatal(err)
				}
				conns = append(conns, conn)
				wg.Go(func() { asks(conn, x.reads) })
			}
			b = small()
			for _, conn := range conns {
				conn.Close()
			}
			wg.Wait()
			return b
		}
		d := takeTurns(rounds(), beside, small)
		what := fmt.Sprintf("gateway GET, 10 clients, beside %d that ask for %d MiB and %s, against none, ", crowd,
			size>>20, x.what)
		d.row(r, what+"p50", micros, func(b benchmarked) float64 { return b.p50 }, nil)
		d.row(r, what+"p99", micros, func(b benchmarked) float64 { return b.p99 }, atMost(2))
	}
}

// asks asks for the long value until the connection ends.
func asks(conn net.Conn, reads bool) {
	for {
		if _, err := io.WriteString(conn, "GET large\r\n"); err != nil {
			return
		}
		if !reads {
			continue // until the socket takes no more
		}
		line, b := []byte{}, make([]byte, 1)
		for !bytes.HasSuffix(line, []byte("\r\n")) {
			if _, err := conn.Read(b); err != nil {
				return
			}
			line = append(line, b[0])
		}
		n, err := strconv.ParseInt(string(bytes.TrimPrefix(bytes.TrimSpace(line), []byte("$"))), 10, 64)
		if err != nil {
			continue // an error: no memory
		}
		if _, err := io.CopyN(io.Discard, conn, n+2); err != nil {
			return
		}
	}
}
