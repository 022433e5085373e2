package bench

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	features "golang.org/x/sys/cpu"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// compareLong compares ways to move long values over shm with each other, and with copying where the processor has no
// AVX-512.
func compareLong(t *testing.T, r *report, _ *store) {
	const size, batch = 1 << 20, 64
	st := startStore(t, scaled[int64](8<<30, 1<<30))
	room := func(name string, bytes uint64) {
		st.namespace(t, &dirpb.CreateNamespaceRequest{Name: name, Replicas: 1, BytesPerNode: scaled(bytes, 128<<20),
			Shards: 1, Segments: 1, IndexPercent: 1})
	}
	room("long", 1<<30)
	v := newLong(t.Error, st.open(t, "shm", "long"), scaled(batch, 2))
	v.warm(1<<30, size)

	for _, x := range []struct {
		what string
		do   func(c *client.Client, i int)
		ops  client.OpKind
	}{{"PUT", v.put(size), client.OpPut}, {"GET", v.get(size), client.OpGet}} {
		r.contest(fmt.Sprintf("shm %ss of 1 MiB, 64 in one call, bytes/s, against one at a time", x.what), gigs,
			atLeast(0.85), v.speed(size*len(v.keys), v.batch(x.ops, size)), v.speed(size, x.do))
	}
	for _, x := range []struct {
		what string
		do   func(c *client.Client, i int)
	}{{"PUTs", v.put(size)}, {"GETs", v.get(size)}} {
		pair := func(g int) func() float64 {
			return func() float64 {
				return size * together(g, v.turn, func(g, i int) { x.do(v.c, i*2+g) })
			}
		}
		r.contest(fmt.Sprintf("shm %s of 1 MiB, 2 goroutines, bytes/s, against 1", x.what), gigs, atLeast(1.5), pair(2),
			pair(1))
	}

	room("narrow", 1<<30)
	ask := startNarrow(t, st.directory)
	for _, x := range []struct {
		what string
		want float64
	}{{"GET", 0.25}, {"PUT", 0.2}} {
		for _, n := range scaled([]int{1 << 20, 16 << 20}, []int{1 << 20}) {
			r.contest(fmt.Sprintf("shm %s of %d MiB without AVX-512, bytes/s, against memcpy", x.what, n>>20), gigs,
				atLeast(x.want), func() float64 { return ask(x.what, n) }, func() float64 { return ask("copy", n) })
		}
	}

	const large = 64 << 20
	room("tight", 1<<30)
	room("wide", 4<<30)
	most := scaled(large, size)
	tight, wide := newLong(t.Error, st.open(t, "shm", "tight"), 1), newLong(t.Error, st.open(t, "shm", "wide"), 1)
	tight.warm(1<<30, most)
	wide.warm(4<<30, most)
	r.contest("shm PUTs of 64 MiB into 1 GiB, bytes/s, against into 4 GiB", gigs, atLeast(0.5),
		tight.speed(most, tight.put(most)), wide.speed(most, wide.put(most)))
}

// long is a client with keys whose values are long.
type long struct {
	fail     func(...any)
	c        *client.Client
	keys     [][]byte
	src, dst []byte
	turn     time.Duration
}

func newLong(fail func(...any), c *client.Client, keys int) *long {
	v := &long{fail: fail, c: c, turn: scaled(200*time.Millisecond, time.Millisecond)}
	for i := range keys {
		v.keys = append(v.keys, binary.BigEndian.AppendUint64(nil, uint64(i)))
	}
	most := scaled(client.MaxValueLen, 2<<20)
	v.src, v.dst = make([]byte, most), make([]byte, most)
	for i := range v.src {
		v.src[i] = byte(i * 7)
	}
	copy(v.dst, v.src) // so that all pages are there
	return v
}

// warm writes more than a namespace's bytes with values of size bytes, so that all of its pages have been used.
func (v *long) warm(bytes, size int) {
	put := v.put(size)
	for i := range scaled(max(bytes*5/4/size, len(v.keys)), len(v.keys)) {
		put(v.c, i)
	}
}

// speed measures f, which moves so many bytes.
func (v *long) speed(bytes int, f func(c *client.Client, i int)) func() float64 {
	i := 0
	return func() float64 { return perSecond(v.turn, bytes, func() { f(v.c, i); i++ }) }
}

func (v *long) put(size int) func(*client.Client, int) {
	return func(c *client.Client, i int) {
		if _, err := c.Put(context.Background(), v.keys[i%len(v.keys)], v.src[:size], client.PutOptions{}); err != nil {
			v.fail(err)
		}
	}
}

// into is where the value of a key is read to.
func (v *long) into(i, size int) []byte { return v.dst[i%len(v.keys)*size:][:size:size] }

func (v *long) get(size int) func(*client.Client, int) {
	return func(c *client.Client, i int) {
		if n, err := c.GetInto(context.Background(), v.keys[i%len(v.keys)], v.into(i, size)); err != nil || n != size {
			v.fail(n, "bytes:", err)
		}
	}
}

// batch performs an operation on all keys in one call.
func (v *long) batch(kind client.OpKind, size int) func(*client.Client, int) {
	ops := make([]client.Op, len(v.keys))
	for i := range ops {
		ops[i] = client.Op{Kind: kind, Key: v.keys[i], Value: v.src[:size]}
	}
	return func(c *client.Client, _ int) {
		for i := range ops {
			ops[i].Into = v.into(i, size)
		}
		c.Do(context.Background(), ops)
		for i := range ops {
			if err := ops[i].Err; err != nil {
				v.fail(err)
			}
		}
	}
}

// startNarrow starts a client of namespace "narrow" whose processor has no AVX-512, and returns what measures it:
// "GET", "PUT" or "copy", of so many bytes.
func startNarrow(t *testing.T, directory string) (ask func(what string, size int) float64) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), envRole+"=narrow", envDirectory+"="+directory, "GODEBUG=cpu.avx512f=off")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe() // its end ends the child
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Error(err)
		}
	})
	lines := bufio.NewReader(out)
	return func(what string, size int) float64 {
		if _, err := fmt.Fprintln(in, what, size); err != nil {
			t.Fatal(err)
		}
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		bytes, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
		if err != nil {
			t.Fatal(err)
		}
		return bytes
	}
}

// runNarrow is that client: for each line of its input it prints bytes a second.
func runNarrow() error {
	if features.X86.HasAVX512F {
		return errors.New("the processor has AVX-512")
	}
	d, err := providers.Open("shm", providers.Options{})
	if err != nil {
		return err
	}
	c, err := client.Open(context.Background(), client.Options{Namespace: "narrow", Provider: "shm",
		Directory: []string{os.Getenv(envDirectory)}, Devices: []*rdma.Device{d}})
	if err != nil {
		return errors.Join(err, d.Close())
	}
	var failed error
	v := newLong(func(what ...any) { failed = errors.Join(failed, errors.New(fmt.Sprintln(what...))) }, c, 1)
	v.warm(1<<30, 1<<20)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() && failed == nil {
		var what string
		var size int
		if _, err := fmt.Sscan(in.Text(), &what, &size); err != nil || size <= 0 || size > len(v.src) {
			return fmt.Errorf("asked for %q: %w", in.Text(), err)
		}
		f := func(*client.Client, int) { copy(v.dst[:size], v.src[:size]) }
		switch what {
		case "PUT":
			f = v.put(size)
		case "GET":
			v.put(size)(c, 0)
			f = v.get(size)
		}
		fmt.Println(v.speed(size, f)())
	}
	return errors.Join(failed, in.Err(), c.Close(), d.Close())
}
