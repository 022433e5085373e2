package verbstest

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/gapload"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// cut separates the i-th adapter from the others, and mend joins it to them again. Neither takes the adapter's own
// network device down: rxe, which finds no route then, ends the queue pair of the connection manager for good.
type cut struct{ cut, mend []string }

var (
	// pulled: the adapter sees that there is no carrier.
	pulled = cut{[]string{"down"}, []string{"up"}}
	// silent: the switch forwards nothing, and the adapter does not see it.
	silent = cut{[]string{"nomaster"}, []string{"master", "br0"}}
)

func setLink(t *testing.T, i int, to []string) {
	t.Helper()
	// Not by PATH: busybox has an ip of its own.
	cmd := exec.Command("/bin/ip", append([]string{"link", "set", fmt.Sprintf("p%d", i)}, to...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("p%d %v: %v: %s", i, to, err, out)
	}
}

// TestTwoPorts cuts ports of a memory node and of a client off under load, in turns, and joins them again. Either has
// two, so that no operation fails; and all ports come back into use. KVD_PULLS says how often.
func TestTwoPorts(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "the test of package client has two ports of tcp")
	pulls := 4
	if p := os.Getenv("KVD_PULLS"); p != "" {
		var err error
		if pulls, err = strconv.Atoi(p); err != nil {
			t.Fatal(err)
		}
	}
	cuts := []cut{pulled, silent}
	if os.Getenv("KVD_VERBS_CONNECT") == "cm" && os.Getenv("KVD_VERBS_NIC") != "siw" {
		cuts[0] = silent // without a carrier, too, rxe now and then ends that queue pair
	}
	s := newStore(t, 20*time.Second, node{"m1", 0, []string{"--rdma-device", nic(0) + "," + nic(1), "--listen-verbs",
		host(0) + ":0," + host(1) + ":0"}})
	s.namespace("default", 1, 64<<20)
	n := member(s.status().GetMap(), "m1")
	if len(n.GetEndpoints()) != 2 || endpoint(n, "verbs") == nil || endpoint(n, "verbs/2") == nil {
		t.Fatalf("endpoints %v", n.GetEndpoints())
	}
	c := s.client("verbs", 2, client.Options{Lanes: 2, OpTimeout: 30 * time.Second,
		Devices: []*rdma.Device{openDevice(t, "verbs", 2, nil, nil), openDevice(t, "verbs", 3, nil, nil)}})
	l := gapload.Start(t, c, 2, 80<<10)
	defer l.Halt()
	failed := func() bool {
		return slices.ContainsFunc(c.Stats().Routes, func(p client.RouteStats) bool { return p.Err != "" })
	}
	// Of a lane each connection has another port at both ends.
	inUse := func() string {
		used := map[string]int{}
		for _, p := range c.Stats().Routes {
			if p.Connections > 0 {
				used[p.Endpoint]++
				used[p.Port]++
			}
			if p.Err != "" {
				return fmt.Sprintf("%s to %s: %s", p.Port, p.Endpoint, p.Err)
			}
		}
		if len(used) < 4 {
			return fmt.Sprintf("in use are %v", used)
		}
		return ""
	}
	testutil.UntilNone(t, "all ports are in use", inUse)
	l.Progress(4)
	l.Forget() // connecting for the first time is slow under emulation
	var back time.Duration
	for i := range pulls {
		port := 1 + i%2*2 // n1 is the memory node's, n3 the client's
		setLink(t, port, cuts[i/2%2].cut)
		testutil.Until(t, fmt.Sprintf("a path by port %d has failed", port), failed)
		l.Progress(8)
		setLink(t, port, cuts[i/2%2].mend)
		begin := time.Now()
		testutil.UntilNone(t, fmt.Sprintf("port %d is in use again", port), inUse)
		back = max(back, time.Since(begin))
		l.Progress(60) // a port that fails as soon as it is in use would be left alone for a while
	}
	l.Halt()
	t.Logf("%d pulls, %v; all ports were in use again after %v at most", pulls, l, back)
}
