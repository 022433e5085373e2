package verbstest

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma/driver"
)

// countEnv is how many connections TestQueuePairs makes, numbers with commas between them.
const countEnv = "KVD_VERBS_CONNECTIONS"

// holds is what a process has of verbs, and its memory in KiB.
type holds struct{ qps, cqs, mrs, pds, rss, pinned int }

func (h holds) sub(o holds) holds {
	return holds{h.qps - o.qps, h.cqs - o.cqs, h.mrs - o.mrs, h.pds - o.pds, h.rss - o.rss, h.pinned - o.pinned}
}

// held asks the kernel what the process with that id has. The kernel names the threads that made things.
func held(t *testing.T, pid int) (h holds) {
	t.Helper()
	threads := fmt.Sprintf("/proc/%d/task", pid)
	for what, n := range map[string]*int{"qp": &h.qps, "cq": &h.cqs, "mr": &h.mrs, "pd": &h.pds} {
		out, err := exec.Command("rdma", "-j", "resource", "show", what).Output()
		if err != nil {
			t.Fatalf("rdma resource show %s: %v", what, err)
		}
		var all []struct{ PID int }
		if err := json.Unmarshal(out, &all); err != nil {
			t.Fatalf("rdma resource show %s: %v\n%.400s", what, err, out)
		}
		for _, r := range all {
			if _, err := os.Stat(filepath.Join(threads, itoa(r.PID))); r.PID != 0 && err == nil {
				*n++
			}
		}
	}
	status := fieldsOf(t, fmt.Sprintf("/proc/%d/status", pid))
	h.rss, h.pinned = status["VmRSS"], status["VmPin"]
	return h
}

// fieldsOf are the numbers of a file of /proc with lines such as "VmRSS:  1234 kB".
func fieldsOf(t *testing.T, name string) map[string]int {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all := map[string]int{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if w := strings.Fields(lines.Text()); len(w) >= 2 {
			all[strings.TrimSuffix(w[0], ":")], _ = strconv.Atoi(w[1])
		}
	}
	return all
}

// kernelKiB is the memory that the kernel has for itself. A QP's and a CQ's rings are among it, which Soft-RoCE
// allocates there and lends to the process.
func kernelKiB(t *testing.T) (sum int) {
	t.Helper()
	all := fieldsOf(t, "/proc/meminfo")
	for _, f := range []string{"Slab", "VmallocUsed", "KernelStack", "PageTables", "Percpu"} {
		sum += all[f]
	}
	return sum
}

// TestQueuePairs prints what connections take of a memory node and of the kernel below it, and what a client takes.
// The connections' other ends are sockets alone, so that the kernel's part is the memory node's. When they end, the
// memory node gives back all queue pairs.
func TestQueuePairs(t *testing.T) {
	needs(t, "1")
	needsVerbs(t, "it has no queue pairs")
	s := newStore(t, 2*time.Hour, node{"m1", 0, []string{"--memory", "64MiB"}})
	s.namespace("clients", 1, 32<<20)
	header, addr := s.greeting("clients", "m1")
	pid := s.nodes["m1"].cmd.Process.Pid
	var rows [][]string
	defer func() {
		printTable("What connections take of a memory node, MiB; the kernel's part has the sockets of both ends",
			[]string{"connections", "QPs", "CQs", "MRs", "kernel, more", "resident", "resident, more", "pinned"}, rows)
	}()
	s.countClients("clients", 4)
	for _, f := range strings.Split(cmp.Or(os.Getenv(countEnv), "20"), ",") {
		n, err := strconv.Atoi(f)
		if err != nil || n < 1 {
			t.Fatalf("%s is %q, want numbers", countEnv, f)
		}
		before, kernel := held(t, pid), kernelKiB(t)
		conns := s.sockets("clients", header, addr, n)
		now, kernelNow := held(t, pid), kernelKiB(t)
		d := now.sub(before)
		if d.qps != n || d.cqs != 0 || d.mrs != 0 || d.pds != 0 {
			t.Errorf("%d connections take %+v of the memory node, want a QP each and nothing else", n, d)
		}
		t.Logf("%d connections take %+v and %d KiB of the kernel", n, d, kernelNow-kernel)
		rows = append(rows, []string{itoa(n), itoa(now.qps), itoa(now.cqs), itoa(now.mrs), mib(kernelNow - kernel),
			mib(now.rss), mib(d.rss), mib(now.pinned)})
		for _, c := range conns {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		testutil.UntilNone(t, "all queue pairs to be destroyed", func() string {
			if got := held(t, pid); got.qps > before.qps {
				return fmt.Sprintf("%d queue pairs, %d before", got.qps, before.qps)
			}
			return ""
		})
	}
}

// countClients prints what each of n clients with one lane takes, of both ends' kernel.
func (s *store) countClients(namespace string, n int) {
	t := s.t
	open := func() {
		c := s.client("verbs", 2, client.Options{Namespace: namespace})
		if _, err := c.Get(t.Context(), []byte("a key that nobody put")); !errors.Is(err, client.ErrNotFound) {
			t.Error(err)
		}
	}
	open() // what a process has once, however many clients
	settled := func() (holds, int) {
		runtime.GC()
		debug.FreeOSMemory()
		return held(t, os.Getpid()), kernelKiB(t)
	}
	before, kernel := settled()
	for range n {
		open()
	}
	now, kernelNow := settled()
	d := now.sub(before)
	if d.qps != n || d.cqs != n {
		t.Errorf("%d clients with one lane have %+v, want a QP and a CQ each", n, d)
	}
	each := func(v int) string { return strconv.FormatFloat(float64(v)/float64(n), 'f', 1, 64) }
	printTable("What a client with one lane takes, MiB; the kernel's part is that of both ends",
		[]string{"QPs", "CQs", "MRs", "PDs", "kernel", "resident", "pinned"},
		[][]string{{each(d.qps), each(d.cqs), each(d.mrs), each(d.pds), mib((kernelNow - kernel) / n), mib(d.rss / n),
			mib(d.pinned / n)}})
}

func mib(kib int) string { return strconv.FormatFloat(float64(kib)/1024, 'f', 2, 64) }

// greeting is how a dialer begins, without the private data, as a real one said it to a socket of the test's; and the
// address of the memory node.
func (s *store) greeting(namespace, name string) (header []byte, addr string) {
	t := s.t
	l := testutil.Listen(t)
	g := s.guesser(namespace, true, false)
	cq, err := g.dev.CreateCQ(16)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	heard := make(chan []byte, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			heard <- nil
			return
		}
		b := make([]byte, 4096)
		n, _ := c.Read(b)
		_ = c.Close()
		heard <- b[:n]
	}()
	private := []byte("private")
	if _, err := g.dev.Dial(ctx, g.pd, cq, l.Addr().String(), private); err == nil {
		t.Fatal("a dialer takes silence for a welcome")
	}
	if err := cq.Close(); err != nil {
		t.Error(err)
	}
	said := <-heard
	header, ok := bytes.CutSuffix(said, append(binary.LittleEndian.AppendUint16(nil, uint16(len(private))), private...))
	if !ok {
		t.Fatalf("a dialer says %q", said)
	}
	return header, endpoint(member(s.status().GetMap(), name), "verbs").GetAddr()
}

// sockets makes n connections to the memory node at addr, each of a session of its own, which have no queue pairs at
// this end.
func (s *store) sockets(namespace string, header []byte, addr string, n int) []net.Conn {
	s.t.Helper()
	conns, errs := make([]net.Conn, n), make([]error, n)
	var wg sync.WaitGroup
	const side = 4 // at a time
	for w := range side {
		wg.Go(func() {
			for i := w; i < n && errs[w] == nil; i += side {
				conns[i], errs[w] = s.socket(namespace, header, addr)
			}
		})
	}
	wg.Wait()
	s.t.Cleanup(func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close() // the test may have
			}
		}
	})
	if err := errors.Join(errs...); err != nil {
		made := len(slices.DeleteFunc(slices.Clone(conns), func(c net.Conn) bool { return c == nil }))
		s.t.Fatalf("%d connections of %d: %v", made, n, err)
	}
	return conns
}

func (s *store) socket(namespace string, header []byte, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	var rep *dirpb.OpenSessionReply
	if err := s.rpc.Call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: namespace, Client: "socket", ReadOnly: true})
		return err
	}); err != nil {
		return nil, err
	}
	private := binary.LittleEndian.AppendUint32(rep.GetToken(), 0)
	hello := append(binary.LittleEndian.AppendUint16(slices.Clone(header), uint16(len(private))), private...)
	// Handshakes may take too long where a processor is emulated. A client dials again, too.
	var errs []error
	for range 10 {
		c, err := greet(s.t.Context(), addr, hello, len(header))
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

// greet says hello to a memory node and returns when it is welcome.
func greet(ctx context.Context, addr string, hello []byte, header int) (net.Conn, error) {
	dialer := net.Dialer{Timeout: patience}
	c, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	welcome := make([]byte, header+2)
	if _, err = c.Write(hello); err == nil {
		_, err = io.ReadFull(c, welcome)
	}
	if text := binary.LittleEndian.Uint16(welcome[header:]); err == nil && text > 0 {
		why := make([]byte, min(int(text), driver.MaxPrivate))
		_, err = io.ReadFull(c, why)
		err = errors.Join(fmt.Errorf("refused: %q", why), err)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}
