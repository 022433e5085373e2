package memtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// childEnv holds a childConfig in the environment of a client process.
const childEnv = "KVD_MEMORY_CHILD"

// TestMain is also the client processes.
func TestMain(m *testing.M) {
	doc := os.Getenv(childEnv)
	if doc == "" {
		os.Exit(m.Run())
	}
	var cfg childConfig
	err := json.Unmarshal([]byte(doc), &cfg)
	if err == nil {
		err = childMain(cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// childConfig is what a client process is told when it starts. Then it takes lines from
// stdin, does what each says, and answers with a line:
//
//	fill PREFIX SIZE COUNT   puts keys 0 to COUNT of a prefix, and stops at an error
//	drop PREFIX SIZE COUNT   deletes them
//	mix PREFIX SIZE COUNT    performs so many transactions on mixKeys keys of a prefix, with single writes between them
//	done N ERROR             so many were; ERROR is quoted
type childConfig struct {
	Directory                 []string
	Namespace, Provider, Name string
}

// childMain ends when stdin does, and leaves its session open: it is there to be killed.
func childMain(cfg childConfig) error {
	device, err := providers.Open(cfg.Provider, providers.Options{})
	if err != nil {
		return err
	}
	ctx := context.Background()
	c, err := client.Open(ctx, client.Options{Directory: cfg.Directory, Namespace: cfg.Namespace,
		Provider: cfg.Provider,
		Devices:  []*rdma.Device{device}, Name: cfg.Name})
	if err != nil {
		return err
	}
	fmt.Println("done 0 " + strconv.Quote(""))
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var verb, prefix string
		var size, count, n int
		if _, err := fmt.Sscan(in.Text(), &verb, &prefix, &size, &count); err != nil {
			return fmt.Errorf("%q: %w", in.Text(), err)
		}
		var b []byte
		for n = 0; n < count && err == nil; n++ {
			key := keyOf(prefix, n, size)
			switch verb {
			case "drop":
				err = c.Delete(ctx, []byte(key))
				continue
			case "mix":
				err = mix(ctx, c, prefix, size)
				continue
			}
			b = stamp(b, key, size)
			_, err = c.Put(ctx, []byte(key), b, client.PutOptions{})
		}
		text := ""
		if err != nil {
			n, text = n-1, err.Error()
		}
		err = nil
		fmt.Printf("done %d %s\n", n, strconv.Quote(text))
	}
	return nil
}

// mixKeys is how many keys transactions and single writes meet at.
const mixKeys = 64

// mix performs a transaction on some keys of a prefix, and writes or deletes one by itself. Others may do so at the
// same time, so that it is an answer, too, that a condition does not hold.
func mix(ctx context.Context, c *client.Client, prefix string, size int) error {
	var ops []client.Op
	for _, i := range rand.Perm(mixKeys + 1)[:3+rand.IntN(3)] {
		key := keyOf(prefix, i, size)
		o := client.Op{Kind: client.OpPut, Key: []byte(key), Value: stamp(nil, key, 1+rand.IntN(size))}
		switch rand.IntN(10) {
		case 0, 1:
			o.Kind, o.Value = client.OpDelete, nil
		case 2:
			o.Kind, o.Value, o.Cond = client.OpKeep, nil, client.IfPresent
		case 3:
			o.Cond = client.IfAbsent
		}
		ops = append(ops, o)
	}
	single := ops[len(ops)-1:]
	ops = ops[:len(ops)-1]
	if single[0].Kind == client.OpKeep {
		single[0] = client.Op{Kind: client.OpGet, Key: single[0].Key}
	}
	c.Do(ctx, single)
	for _, err := range []error{c.MultiCAS(ctx, ops), single[0].Err} {
		if err != nil && !errors.Is(err, client.ErrNotFound) && !errors.Is(err, client.ErrExists) &&
			!errors.Is(err, client.ErrConflict) {
			return err
		}
	}
	return nil
}

// child is a client process. It serves one goroutine.
type child struct {
	r   *rig
	cmd *exec.Cmd
	in  *bufio.Writer
	out chan string // lines; closed with the process's end
	err strings.Builder
}

// spawn starts a client process and waits until it has a session.
func (r *rig) spawn(name string) *child {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	doc, err := json.Marshal(childConfig{Directory: r.s.Directory(), Namespace: r.ns, Provider: "shm", Name: name})
	if err != nil {
		r.t.Fatal(err)
	}
	c := &child{r: r, cmd: exec.Command(self), out: make(chan string, 1)}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(doc))
	c.cmd.Stderr = &c.err
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := c.cmd.StdinPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(c.kill)
	c.in = bufio.NewWriter(in)
	go func() {
		defer close(c.out)
		for s := bufio.NewScanner(out); s.Scan(); {
			c.out <- s.Text()
		}
	}()
	c.reply()
	return c
}

// tell gives the process an order; reply waits for its end.
func (c *child) tell(verb, prefix string, size, count int) {
	c.r.t.Helper()
	fmt.Fprintln(c.in, verb, prefix, size, count)
	if err := c.in.Flush(); err != nil {
		c.r.t.Fatalf("client process: %v\n%s", err, &c.err)
	}
}

func (c *child) reply() (n int, err error) {
	c.r.t.Helper()
	var line string
	select {
	case l, ok := <-c.out:
		if !ok {
			_ = c.cmd.Wait() // its stderr says more
			c.r.t.Fatalf("a client process ended by itself\n%s", &c.err)
		}
		line = l
	case <-c.r.ctx.Done():
		c.r.t.Fatalf("a client process is not done: %v\n%s", context.Cause(c.r.ctx), c.r.usage())
	}
	_, rest, _ := strings.Cut(line, " ")
	num, quoted, _ := strings.Cut(rest, " ")
	n, err1 := strconv.Atoi(num)
	text, err2 := strconv.Unquote(quoted)
	if err := errors.Join(err1, err2); err != nil {
		c.r.t.Fatalf("a client process said %q: %v", line, err)
	}
	if text != "" {
		err = errors.New(text)
	}
	return n, err
}

// kill is SIGKILL, and returns when the process is gone. It is idempotent.
func (c *child) kill() {
	if c.cmd.ProcessState != nil {
		return
	}
	_ = c.cmd.Process.Kill() // it may have ended
	for range c.out {
	}
	_ = c.cmd.Wait() // killed is what it should be
}
