package client_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	provider "github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

const (
	crashEnv      = "KVD_TEST_CRASH_DIRECTORY"
	crashProvider = "KVD_TEST_CRASH_PROVIDER"
)

// TestCrashChild is the process that TestCrash kills. It inserts and deletes new
// keys, which takes insert locks, and increments a counter, without end.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv(crashEnv)
	if dir == "" {
		t.Skip("not a child of TestCrash")
	}
	dev, err := provider.Open(os.Getenv(crashProvider), provider.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.Open(t.Context(), client.Options{Directory: []string{dir}, Devices: []*rdma.Device{dev}, Lanes: 4})
	if err != nil {
		t.Fatal(err)
	}
	for w := range 4 {
		go func() {
			for i := 0; ; i++ {
				k := fmt.Appendf(nil, "c%d", (i*4+w)%64)
				if _, err := c.Put(t.Context(), k, k, client.PutOptions{}); err != nil {
					panic(err)
				}
				if err := c.Delete(t.Context(), k); err != nil && !errors.Is(err, client.ErrNotFound) {
					panic(err)
				}
				n, err := c.Incr(t.Context(), []byte("count"), 1)
				if err != nil {
					panic(err)
				}
				if w == 0 {
					fmt.Println(n) // tells the parent how far it is
				}
			}
		}()
	}
	select {}
}

// TestCrash kills a client process in the midst of inserts: the others go on
// once its locks are broken, and see whole values only.
func TestCrash(t *testing.T) {
	for _, p := range []string{"shm", "tcp"} {
		t.Run(p, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, p, 1, time.Second)
			c := r.client(r.options())
			ctx := t.Context()
			rounds := 4
			if testing.Short() {
				rounds = 2
			}
			for round := range rounds {
				cmd := exec.Command(os.Args[0], "-test.run=^TestCrashChild$")
				cmd.Env = append(os.Environ(), crashEnv+"="+r.dir.Addr(), crashProvider+"="+p)
				var stderr bytes.Buffer
				cmd.Stderr = &stderr
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				acked := int64(0)
				lines := make([]byte, 4096)
				for i := range 5 + round {
					n, err := out.Read(lines)
					if err != nil {
						t.Fatalf("child: %v\n%s", err, stderr.Bytes())
					}
					f := strings.Fields(string(lines[:n]))
					if i > 0 && len(f) > 1 { // whole lines only
						acked, _ = strconv.ParseInt(f[len(f)-2], 10, 64)
					}
				}
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, out)
				_ = cmd.Wait()
				// Each key that the child wrote, locked or not, can be written.
				for i := range 64 {
					k := fmt.Appendf(nil, "c%d", i)
					if it, err := c.Get(ctx, k); err == nil && !bytes.Equal(it.Value, k) || err != nil &&
						!errors.Is(err, client.ErrNotFound) {
						t.Fatalf("get %s after the crash: %q, %v", k, it.Value, err)
					}
					if _, err := c.Put(ctx, k, k, client.PutOptions{}); err != nil {
						t.Fatalf("put %s after the crash: %v", k, err)
					}
					if err := c.Delete(ctx, k); err != nil {
						t.Fatal(err)
					}
				}
				if n, err := c.Incr(ctx, []byte("count"), 0); err != nil || n < acked {
					t.Fatalf("count is %d after the child was told %d: %v", n, acked, err)
				}
			}
		})
	}
}
