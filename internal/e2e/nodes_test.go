package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// on tells on how many memory nodes each namespace is.
func (w *world) on() map[string]int {
	w.t.Helper()
	var st struct {
		Map struct {
			Namespaces []struct {
				ID   uint32
				Name string
			}
			Pgs []struct {
				NamespaceID uint32 `json:"namespace_id"`
				Members     []struct {
					NodeID uint32 `json:"node_id"`
				}
			}
		}
	}
	if err := json.Unmarshal(w.must(nil, "status", "-o", "json"), &st); err != nil {
		w.t.Fatal(err)
	}
	n := make(map[string]int)
	for _, ns := range st.Map.Namespaces {
		nodes := make(map[uint32]bool)
		for _, p := range st.Map.Pgs {
			for _, m := range p.Members {
				if p.NamespaceID == ns.ID {
					nodes[m.NodeID] = true
				}
			}
		}
		n[ns.Name] = len(nodes)
	}
	return n
}

// TestManyMemoryNodes: on twelve small memory nodes ten namespaces have room, each on some of them: on as many as it
// says, as its limit needs, or on eight. A namespace without a limit is written more than eight have room for. It takes
// further ones, and no write fails. The status stays short.
func TestManyMemoryNodes(t *testing.T) {
	const nodes = 12
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	var all []*daemon
	for i := range nodes {
		all = append(all, w.spawn(w.memnode(fmt.Sprint("m", i+1))...))
	}
	for _, m := range all {
		m.awaitReady()
	}
	for name, how := range map[string][]string{
		"grows": {"--bytes", "4MiB", "--replicas", "1"},
		"cache": {"--bytes", "4MiB", "--replicas", "1", "--mode", "cache"},
		"three": {"--bytes", "8MiB", "--replicas", "2", "--nodes", "3"},
		"small": {"--bytes", "8MiB", "--replicas", "2", "--limit", "8MiB"},
		"n1":    {"--bytes", "4MiB"}, "n2": {"--bytes", "4MiB"}, "n3": {"--bytes", "4MiB"}, "n4": {"--bytes", "4MiB"},
		"n5": {"--bytes", "4MiB"}, "n6": {"--bytes", "4MiB"},
	} {
		w.must(nil, append([]string{"namespace", "create", name}, how...)...)
		w.must([]byte(name), "--namespace", name, "put", "name")
	}
	for ns, got := range w.on() {
		switch {
		case ns == "three" && got == 3, ns == "small" && got < 8, ns != "three" && ns != "small" && got == 8:
		default:
			t.Errorf("namespace %s is on %d memory nodes of %d", ns, got, nodes)
		}
	}
	// Eight have room for 29 MiB, and more are taken at three quarters. 31 MiB are written.
	spread := false
	w.fills("grows", 4000, func() {
		if spread || w.on()["grows"] == 8 {
			return
		}
		w.until("the namespace to be spread over all memory nodes", func() bool {
			return w.on()["grows"] == nodes && !strings.Contains(string(w.must(nil, "status")),
				"grows (being rebalanced)")
		})
		spread = true
	})
	if !spread {
		t.Error("the namespace is still on 8 memory nodes")
	}

	st, rest := string(w.must(nil, "status", "--check")), string(w.must(nil, "status", "--all"))
	if n := strings.Count(st, "\n"); n > 50 || !strings.Contains(st, "12 up, 0 down") ||
		!strings.Contains(st, "kvctl status --all shows every one") {
		t.Errorf("status has %d lines:\n%s", n, st)
	}
	if n := strings.Count(rest, "\n"); n < 100 {
		t.Errorf("status --all has %d lines:\n%s", n, rest)
	}
	for ns := range w.on() {
		if got := string(w.must(nil, "--namespace", ns, "get", "name")); got != ns {
			t.Errorf("namespace %s has %q", ns, got)
		}
	}
}

// fills puts values of 8 KiB into a namespace, of which none may fail, and reads them back: small ones, so that hashes
// fill placement groups about equally. After every 64 it calls rest: a write waits 8 s for memory that is on its way,
// which is little for a machine that does other things.
func (w *world) fills(ns string, values int, rest func()) {
	w.t.Helper()
	device, err := providers.Open("tcp", providers.Options{})
	if err != nil {
		w.t.Fatal(err)
	}
	defer device.Close()
	c, err := client.Open(w.t.Context(), client.Options{Directory: []string{w.dir}, Namespace: ns,
		Devices: []*rdma.Device{device}, OpTimeout: patience})
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	value := func(i int) []byte { return slices.Repeat(fmt.Appendf(nil, "%08d", i), 1<<10) }
	for i := range values {
		if _, err := c.Put(w.t.Context(), fmt.Appendf(nil, "key%d", i), value(i), client.PutOptions{}); err != nil {
			w.t.Fatalf("put %d of %d, on %d memory nodes: %v\n%s", i, values, w.on()[ns], err,
				linesWith(string(w.must(nil, "status", "--all")), " "+ns+" "))
		}
		if i%64 == 63 {
			rest()
		}
	}
	for i := range values {
		if it, err := c.Get(w.t.Context(), fmt.Appendf(nil, "key%d", i)); err != nil ||
			!slices.Equal(it.Value, value(i)) {
			w.t.Fatalf("get %d: %d bytes, %v", i, len(it.Value), err)
		}
	}
}

// linesWith are the lines of text that contain part.
func linesWith(text, part string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), func(l string) bool {
		return !strings.Contains(l, part)
	}), "\n")
}
