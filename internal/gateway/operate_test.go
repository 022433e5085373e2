package gateway

import (
	"strings"
	"testing"
)

// TestOperated: operators see what CLIENT LIST, SLOWLOG GET and INFO say, and what they end is ended.
func TestOperated(t *testing.T) {
	onBothWays(t, func(t *testing.T, p *peer, g *Gateway) {
		o := operated{g}
		p.want(t, "+OK\r\n", "CLIENT", "SETNAME", "me")
		p.want(t, "+OK\r\n", "SET", "a", "1")
		p.want(t, bulk("1"), "GET", "a")
		p.want(t, "$-1\r\n", "GET", "b")
		p.want(t, "+OK\r\n", "CONFIG", "SET", "slowlog-log-slower-than", "0")
		p.want(t, "+OK\r\n", "SET", "slow", "\x00")
		p.want(t, "+OK\r\n", "AUTH", "default", "sesame")
		p.want(t, "+OK\r\n", "CONFIG", "SET", "slowlog-log-slower-than", "-1")
		q := dial(t, "tcp", p.RemoteAddr().String())
		q.want(t, "+OK\r\n", "MULTI")
		q.want(t, "+QUEUED\r\n", "GET", "a")

		d := o.Describe()
		n, _ := g.totals()
		if d.Commands != n || d.Commands < 9 || d.Hits != 1 || d.Misses != 1 || d.SlowCommands != 3 ||
			d.MaxClients != 10_000 || d.MemoryBytes == 0 || d.Version != "devel" || d.Paused != "" ||
			len(d.Listen) != 1 || d.Listen[0] != p.RemoteAddr().String() || d.Clients < 2 {
			t.Errorf("%v", d)
		}
		list := p.do(t, "CLIENT", "LIST")
		me, other := int64(0), int64(0)
		for _, c := range o.Clients() {
			switch c.Addr {
			case p.LocalAddr().String():
				me = c.Id
				if c.Name != "me" || c.Command != "client|list" || c.Flags != "N" || c.User != "default" ||
					c.Queued != -1 {
					t.Errorf("%v", c)
				}
			case q.LocalAddr().String():
				other = c.Id
				if c.Flags != "x" || c.Queued != 1 {
					t.Errorf("%v", c)
				}
			}
			if !strings.Contains(list, "addr="+c.Addr+" ") {
				t.Errorf("%v is not in %q", c, list)
			}
		}
		if me == 0 || other == 0 {
			t.Fatalf("not all of them: %v", o.Clients())
		}
		slow := o.SlowLog(0)
		if len(slow) != 3 || string(slow[1].Args[2]) != "\x00" || slow[1].Name != "me" ||
			slow[1].Addr != p.LocalAddr().String() || string(slow[0].Args[2]) != "(redacted)" ||
			len(o.SlowLog(2)) != 2 {
			t.Errorf("%v", slow)
		}
		if addr, ok := o.Kill(other); !ok || addr != q.LocalAddr().String() {
			t.Errorf("%q, %v", addr, ok)
		}
		q.closed(t)
		if _, ok := o.Kill(1 << 40); ok {
			t.Error("it ended nobody's connection")
		}
		p.want(t, "+OK\r\n", "CLIENT", "PAUSE", "1000000", "WRITE")
		if d := o.Describe(); d.Paused != "write" {
			t.Errorf("%v", d)
		}
	})
}
