package loopback

import (
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
)

// No port is given twice, nor one that somebody listens on or that the kernel may choose.
func TestFree(t *testing.T) {
	l, err := net.Listen("tcp", net.JoinHostPort(Host(), port(looked.Load()+10)))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	kernels, most := 0, 0
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(string(b), &kernels, &most); err != nil {
		t.Fatal(err)
	}
	const callers, each = 8, 500
	var wg sync.WaitGroup
	got := make(chan string, callers*each)
	for range callers {
		wg.Go(func() {
			for range each {
				addr, err := Free()
				if err != nil {
					t.Error(err)
				}
				got <- addr
			}
		})
	}
	wg.Wait()
	close(got)
	seen := map[string]bool{l.Addr().String(): true}
	for addr := range got {
		if seen[addr] {
			t.Fatalf("%s was given twice, or is in use", addr)
		}
		seen[addr] = true
		a, err := net.ResolveTCPAddr("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		if kernels >= firstPort+ports && a.Port >= kernels {
			t.Fatalf("%s: the kernel chooses ports from %d on", addr, kernels)
		}
	}
}

// A host that is none of this machine is an error, and not looked for on every port.
func TestFreeAtNone(t *testing.T) {
	was := looked.Load()
	if addr, err := FreeAt("198.51.100.1"); err == nil || looked.Load() != was+1 {
		t.Errorf("%s, %v, after %d ports", addr, err, looked.Load()-was)
	}
}
