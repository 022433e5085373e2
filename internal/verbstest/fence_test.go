package verbstest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// fenced watches a session from its last sign of life until it is fenced.
func (s *store) fenced(session uint32, leaseEnd time.Time) []string {
	s.t.Helper()
	var fencing, fenced time.Time
	testutil.UntilNone(s.t, fmt.Sprintf("session %d is fenced", session), func() string {
		switch l := s.life(session); l {
		case dirpb.SessionLife_SESSION_FENCING:
			if fencing.IsZero() {
				fencing = time.Now()
			}
			return l.String()
		case dirpb.SessionLife_SESSION_FENCED:
			fenced = time.Now()
			return ""
		default:
			return l.String()
		}
	})
	if fenced.Before(leaseEnd) {
		s.t.Errorf("session %d was fenced %v before its lease ended", session, leaseEnd.Sub(fenced))
	}
	if fencing.IsZero() {
		fencing = fenced // within one look at the directory
	}
	ms := func(d time.Duration) string { return d.Round(time.Millisecond / 10).String() }
	return []string{ms(fencing.Sub(leaseEnd)), ms(fenced.Sub(fencing)), ms(fenced.Sub(leaseEnd))}
}

// Once a session is fenced, nothing of it takes effect.
func TestFence(t *testing.T) {
	needs(t, "1")
	const lease = 2 * time.Second
	s := newStore(t, lease, node{"m1", 0, nil}, node{"m2", 1, nil})
	s.namespace("default", 2, 32<<20)
	var rows [][]string

	t.Run("queue pairs", func(t *testing.T) {
		witness := s.guesser("default", true, true)
		w := map[string]*qp{"m1": witness.mustConnect("m1"), "m2": witness.mustConnect("m2")}
		// The last words of the heaps, which nobody uses.
		g := s.guesser("default", false, false)
		const each = 4
		var qps []*qp
		for _, name := range []string{"m1", "m2"} {
			for range each {
				q := g.mustConnect(name)
				r := g.region(name)
				if st := q.do(g.writeWR(r.heapRKey, r.lastW)); st != success {
					t.Fatalf("WRITE before the fence: %s", st)
				}
				qps = append(qps, q)
			}
		}
		rows = append(rows, append([]string{fmt.Sprintf("a session that never renews, %d connections", 2*each)},
			s.fenced(g.id, g.opened.Add(g.lease))...))
		for i, q := range qps {
			r := g.region([]string{"m1", "m2"}[i/each])
			wr := g.writeWR(r.heapRKey, r.lastW)
			copy(wr.Local, "too late")
			if st := q.do(wr); st == success {
				t.Errorf("connection %d: a WRITE after the fence succeeded", i)
			}
			q.broken()
			if b := w[r.node].read(r.heapRKey, r.lastW, 8); string(b) != "guessed!" {
				t.Errorf("connection %d: %s holds %q", i, r.node, b)
			}
		}
		if _, err := g.connect("m1"); !errors.Is(err, rdma.ErrRefused) {
			t.Errorf("connecting after the fence: %v, want a refusal", err)
		}
	})

	t.Run("process", func(t *testing.T) {
		doc, err := json.Marshal(writerConfig{s.addr, provider, nic(3)})
		if err != nil {
			t.Fatal(err)
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		p := spawn(t, "writer", append(environ(), writerEnv+"="+string(doc)), self)
		session, err := strconv.ParseUint(strings.TrimPrefix(p.line(), "session "), 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		warm := map[string]bool{} // workers that have written several times
		for len(warm) < writers {
			if f := strings.Fields(p.line()); len(f) == 3 && f[1] == "ok" && len(f[2]) > 1 {
				warm[f[0]] = true
			}
		}
		p.stop()
		stopped := time.Now()
		// It renewed at most a renewal's time before it was stopped.
		rows = append(rows, append([]string{"a client process that is stopped (SIGSTOP); its lease ends up to 100 ms " +
			"earlier"}, s.fenced(uint32(session), stopped.Add(lease-100*time.Millisecond))...))

		good := s.client(provider, 2, client.Options{})
		seq := map[string]int{} // what the fenced session left
		for w := range writers {
			key := writerKey(w)
			it, err := good.Get(t.Context(), []byte(key))
			if err != nil {
				t.Fatal(err)
			}
			if seq[key], err = strconv.Atoi(string(it.Value)); err != nil {
				t.Fatal(err)
			}
			if _, err := good.Put(t.Context(), []byte(key), []byte("after"), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		p.signal(syscall.SIGCONT)
		if status := p.wait(); status != 0 {
			t.Fatalf("the writer's exit status is %d\n%s", status, p.log)
		}
		outcomes := map[string]int{}
		for l := range p.lines {
			f := strings.SplitN(l, " ", 3)
			if len(f) != 3 {
				t.Fatalf("the writer said %q", l)
			}
			if f[1] != "ok" {
				outcomes[f[1]]++
				continue
			}
			if n, err := strconv.Atoi(f[2]); err != nil || n > seq[f[0]] {
				t.Errorf("write %s of %s was acknowledged, but after the fence the key held %d: %v", f[2], f[0],
					seq[f[0]], err)
			}
		}
		if outcomes["unknown"]+outcomes["no"] != writers {
			t.Errorf("the stopped writes ended as %v, want %d that did not happen or are unknown", outcomes, writers)
		}
		for range 20 {
			for w := range writers {
				if it, err := good.Get(t.Context(), []byte(writerKey(w))); err != nil || string(it.Value) != "after" {
					t.Fatalf("%s holds %q, %v: a write of the fenced session landed", writerKey(w), it.Value, err)
				}
			}
		}
		fmt.Printf("\n%d writes were under way when the process was stopped; continued after the fence, they ended "+
			"as %v\n", writers, outcomes)
	})
	for _, n := range []string{"m1", "m2"} {
		if !strings.Contains(s.nodes[n].log.String(), "session fenced") {
			t.Errorf("%s does not log that a session was fenced", n)
		}
	}
	printTable(fmt.Sprintf("Fencing over %s, lease %v, memory nodes' heartbeats every 200 ms", provider, lease),
		[]string{"who", "lease ended until the directory fences", "until every memory node has confirmed", "together"},
		rows)
}

// writerEnv makes the test binary a client that writes; it holds a writerConfig.
const writerEnv = "KVD_VERBSTEST_WRITER"

// writers is how many goroutines it has, each with a key of its own.
const writers = 4

func writerKey(w int) string { return fmt.Sprintf("writer%d", w) }

type writerConfig struct{ Directory, Provider, Adapter string }

// writerMain counts in its keys until each of its goroutines has met an error. Only
// compare-and-swap changes them: in another session, too, it changes nothing that
// somebody else wrote meanwhile. Its stdout is
//
//	session ID
//	KEY ok NUMBER
//	KEY no|unknown ERROR
func writerMain(doc string) error {
	var cfg writerConfig
	if err := json.Unmarshal([]byte(doc), &cfg); err != nil {
		return err
	}
	dev, err := newDevice(cfg.Provider, cfg.Adapter, nil, nil)
	if err != nil {
		return err
	}
	c, err := client.Open(context.Background(), client.Options{Directory: []string{cfg.Directory},
		Devices:  []*rdma.Device{dev},
		Provider: cfg.Provider, Lanes: 2, OpTimeout: 5 * time.Second,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		return err
	}
	fmt.Println("session", c.Stats().Session)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			key := []byte(writerKey(w))
			version, err := c.Put(context.Background(), key, []byte("0"), client.PutOptions{})
			for n := 1; err == nil; n++ {
				value := strconv.AppendInt(nil, int64(n), 10)
				if version, err = c.CompareAndSwap(context.Background(), key, version, value,
					client.PutOptions{}); err == nil {
					fmt.Println(string(key), "ok", n)
				}
			}
			outcome := "no"
			if client.Outcome(err) == rdma.Unknown {
				outcome = "unknown"
			}
			fmt.Println(string(key), outcome, string(bytes.ReplaceAll([]byte(err.Error()), []byte("\n"), []byte("; "))))
		})
	}
	wg.Wait()
	return errors.Join(c.Close(), dev.Close())
}
