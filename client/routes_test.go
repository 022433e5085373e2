package client_test

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/gapload"
	"github.com/kvd-project/kvd/internal/testutil"
)

// TestTwoPorts pulls one of two ports of a memory node under load, and plugs it in again, 50 times: no operation fails,
// and each time both carry connections again.
func TestTwoPorts(t *testing.T) {
	t.Parallel()
	r := newRig(t, "tcp", 1, 5*time.Second)
	n := r.nodes[0]
	r.stopNode(0)
	dev := r.open()
	n.more = []way{{dev, newProxy(t, "127.0.0.1:1")}}
	r.startNode(0)
	if err := n.node.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	ports := []*proxy{n.proxy, n.more[0].proxy}
	c := r.client(r.options())
	l := gapload.Start(t, c, 2, 100<<10)
	defer l.Halt()
	both := func() bool {
		up := 0
		for _, p := range c.Stats().Routes {
			if p.Connections >= 2 && p.Err == "" {
				up++
			}
		}
		return up == len(ports)
	}
	testutil.Until(t, "both ports carry connections", both)
	pulls := 50
	if testing.Short() {
		pulls = 15
	}
	if s := os.Getenv("KVD_PULLS"); s != "" {
		var err error
		if pulls, err = strconv.Atoi(s); err != nil {
			t.Fatal(err)
		}
	}
	var back time.Duration
	for i := range pulls {
		ports[i%2].setDown(true)
		l.Progress(5)
		plugged := time.Now()
		ports[i%2].setDown(false)
		testutil.Until(t, fmt.Sprintf("both ports carry connections again: %+v", c.Stats().Routes), both)
		back = max(back, time.Since(plugged))
		l.Progress(40) // a port that fails as soon as it is in use would be left alone for a while
	}
	l.Halt()
	t.Logf("%d pulls, %v; both ports were in use again after %v at most", pulls, l, back)
}
