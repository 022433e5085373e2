package verbstest

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/gapload"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// setLink takes the network device of the i-th adapter down, or up.
func setLink(t *testing.T, i int, to string) {
	t.Helper()
	// Not by PATH: busybox has an ip of its own.
	if out, err := exec.Command("/bin/ip", "link", "set", fmt.Sprintf("n%d", i), to).CombinedOutput(); err != nil {
		t.Fatalf("n%d %s: %v: %s", i, to, err, out)
	}
}

// TestTwoPorts takes ports of a memory node and of a client down under load, in turns, and up again. Either has two, so
// that no operation fails; and all ports come back into use. KVD_PULLS says how often.
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
		setLink(t, port, "down")
		l.Progress(8)
		setLink(t, port, "up")
		begin := time.Now()
		testutil.UntilNone(t, fmt.Sprintf("n%d is in use again", port), inUse)
		back = max(back, time.Since(begin))
		l.Progress(60) // a port that fails as soon as it is in use would be left alone for a while
	}
	l.Halt()
	t.Logf("%d pulls, %v; all ports were in use again after %v at most", pulls, l, back)
}
