package bench

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// gauges reads the metrics of a process that have no other sample of the same name.
func gauges(t *testing.T, addr string) map[string]float64 {
	t.Helper()
	r, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatal(r.Status, err)
	}
	all := make(map[string]float64)
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			name, _, _ = strings.Cut(name, "{")
			all[name], _ = strconv.ParseFloat(value[strings.LastIndexByte(value, ' ')+1:], 64)
		}
	}
	return all
}

// mapped tells how many bytes of memfds this process maps, and how many bytes of anything else are resident.
func mapped(t *testing.T) (files, resident int64) {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines, memfd := bufio.NewScanner(f), false
	for lines.Scan() {
		w := strings.Fields(lines.Text())
		switch {
		case len(w) > 0 && !strings.HasSuffix(w[0], ":"): // the head of a mapping
			memfd = strings.Contains(lines.Text(), "/memfd:")
		case len(w) == 3 && (w[0] == "Size:" && memfd || w[0] == "Rss:" && !memfd):
			kib, err := strconv.ParseInt(w[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			if w[0] == "Size:" {
				files += kib << 10
			} else {
				resident += kib << 10
			}
		}
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return files, resident
}

// TestClients prints what clients take: queue pairs and memory of a memory node by its metrics, and what the
// clients map of it. Each has a provider of its own, as if it were alone in its process, and four lanes.
func TestClients(t *testing.T) {
	gated(t, "bench-clients")
	const lanes = 4
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	defer table.Flush()
	fmt.Fprintln(table, "provider\tclients\tlanes\tqueue pairs\tsessions\tMiB in regions\tMiB resident there\t"+
		"MiB mapped by a client\tMiB of its own in a client")
	for _, provider := range []string{"shm", "tcp"} {
		for _, n := range scaled([]int{100, 1000}, []int{5}) {
			t.Run(fmt.Sprint(provider, n), func(t *testing.T) { fmt.Fprintln(table, takenBy(t, provider, n, lanes)) })
		}
	}
}

// takenBy gives TestClients's row of n clients of a memory node.
func takenBy(t *testing.T, provider string, n, lanes int) string {
	_, d := startKvd(t, "directory", "--id=d1", "--bootstrap", "--data-dir="+t.TempDir(),
		"--listen=127.0.0.1:0", "--raft-listen=127.0.0.1:0", "--lease=30s")
	_, m := startKvd(t, "memnode", "--name=m1", "--memory=128MiB", "--directory="+d["directory"],
		"--http-listen=127.0.0.1:0")
	s := &store{directory: d["directory"]}
	s.namespace(t, &dirpb.CreateNamespaceRequest{Name: "clients", Replicas: 1, BytesPerNode: 64 << 20})
	filesBefore, ownBefore := mapped(t)
	var opening sync.WaitGroup
	for i := range n {
		opening.Go(func() { openApart(t, s, provider, lanes, i) })
		if i%16 == 15 {
			opening.Wait()
		}
	}
	if opening.Wait(); t.Failed() {
		t.FailNow()
	}
	var now map[string]float64
	testutil.Until(t, "the memory node to count all queue pairs", func() bool {
		now = gauges(t, m["http"])
		return int(now["kvd_memnode_connections"]) >= n*lanes
	})
	files, own := mapped(t)
	each := func(bytes int64) float64 { return float64(max(bytes, 0)) / float64(n) / (1 << 20) }
	return fmt.Sprintf("%s\t%d\t%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t%.1f", provider, n, lanes,
		now["kvd_memnode_connections"], now["kvd_memnode_sessions"],
		now["kvd_memnode_registered_bytes"]/(1<<20), now["process_resident_memory_bytes"]/(1<<20),
		each(files-filesBefore), each(own-ownBefore))
}

// openApart opens a client with a provider of its own, and has each of its lanes connect.
func openApart(t *testing.T, s *store, provider string, lanes, number int) {
	d, err := providers.Open(provider, providers.Options{})
	if err != nil {
		t.Error(err)
		return
	}
	c, err := client.Open(t.Context(), client.Options{Directory: []string{s.directory}, Namespace: "clients",
		Provider: provider, Devices: []*rdma.Device{d}, Lanes: lanes, CacheBytes: 1 << 16, OpTimeout: time.Minute})
	if err != nil {
		t.Error(err)
		return
	}
	t.Cleanup(func() { _, _ = c.Close(), d.Close() })
	for k := range 16 * lanes {
		if _, err := c.Get(t.Context(), fmt.Appendf(nil, "key %d of %d", k, number)); !errors.Is(
			err, client.ErrNotFound) {
			t.Error("a key that nobody put:", err)
		}
	}
}
