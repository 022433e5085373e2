package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/rdma"
)

// A value that is read from somewhere is the same as one that is put whole, in the store and in its fake. It has one
// record, a window of chunks, several, or its flags in a chunk of their own.
func TestPutFrom(t *testing.T) {
	const window = 4 * layout.ChunkPayload
	test := func(t *testing.T, c client.API) {
		ctx := t.Context()
		sizes := []int{0, 1, 5000, 3900 << 10, 5<<20 + 3, window + 1, window - 2, window, 2*window - 4, 2*window + 77}
		if testing.Short() {
			sizes = sizes[:6]
		}
		for i, n := range sizes {
			for _, flags := range []uint32{0, 9} {
				key, want := fmt.Appendf(nil, "%d", i), noise(byte(n), n)
				r := iotest.OneByteReader(bytes.NewReader(want))
				if n > 5000 {
					r = iotest.DataErrReader(iotest.HalfReader(bytes.NewReader(want)))
				}
				version, err := c.PutFrom(ctx, key, r, int64(n), client.PutOptions{Flags: flags, TTL: time.Hour})
				if err != nil {
					t.Fatalf("%d bytes, flags %d: %v", n, flags, err)
				}
				it, err := c.Get(ctx, key)
				if err != nil || !bytes.Equal(it.Value, want) || it.Version != version || it.Flags != flags ||
					it.Expires.IsZero() {
					t.Fatalf("%d bytes, flags %d: %d bytes of version %d, want %d, flags %d: %v", n, flags,
						len(it.Value), it.Version, version, it.Flags, err)
				}
			}
			if err := c.Delete(ctx, fmt.Appendf(nil, "%d", i)); err != nil {
				t.Fatal(err)
			}
		}
	}
	each(t, func(t *testing.T, p string) {
		_, c := open(t, p, devstore.Options{CapacityBytes: 192 << 20}, client.Options{})
		test(t, c)
		booksAdd(t, c)
	})
	t.Run("fake", func(t *testing.T) { test(t, clienttest.New(clienttest.Options{})) })
}

// untouched fails the test if anybody reads it.
type untouched struct{ t *testing.T }

func (r untouched) Read([]byte) (int, error) {
	r.t.Error("a value was read that is refused without it")
	return 0, io.EOF
}

// A PutFrom that fails leaves what was there, says so, and leaves no memory behind.
func TestPutFromFails(t *testing.T) {
	const size = 20 << 20
	test := func(t *testing.T, c client.API) {
		ctx, k, old := t.Context(), []byte("k"), []byte("old")
		if _, err := c.Put(ctx, k, old, client.PutOptions{}); err != nil {
			t.Fatal(err)
		}
		value := noise(1, size+1)
		broken := errors.New("broken")
		gone, cancel := context.WithCancelCause(ctx)
		for what, f := range map[string]struct {
			ctx  context.Context
			key  []byte
			r    io.Reader
			size int64
			o    client.PutOptions
			want error
		}{
			"no key":        {ctx, nil, untouched{t}, size, client.PutOptions{}, client.ErrInvalid},
			"size":          {ctx, k, untouched{t}, -1, client.PutOptions{}, client.ErrInvalid},
			"long":          {ctx, k, untouched{t}, c.MaxValueLen() + 1, client.PutOptions{}, client.ErrTooLarge},
			"TTL":           {ctx, k, untouched{t}, size, client.PutOptions{TTL: -1}, client.ErrInvalid},
			"short reader":  {ctx, k, bytes.NewReader(value[:size-1]), size, client.PutOptions{}, io.ErrUnexpectedEOF},
			"longer one":    {ctx, k, bytes.NewReader(value), size, client.PutOptions{}, client.ErrInvalid},
			"shorter value": {ctx, k, bytes.NewReader(value[:9]), 10, client.PutOptions{}, io.ErrUnexpectedEOF},
			"longer value":  {ctx, k, bytes.NewReader(value[:9]), 8, client.PutOptions{}, client.ErrInvalid},
			"broken reader": {ctx, k, io.MultiReader(bytes.NewReader(value[:17<<20]), iotest.ErrReader(broken)), size,
				client.PutOptions{}, broken},
			"broken behind its end": {ctx, k, io.MultiReader(bytes.NewReader(value[:size]), iotest.ErrReader(broken)),
				size, client.PutOptions{}, broken},
			"nothing comes": {ctx, k, io.MultiReader(bytes.NewReader(value[:17<<20]), idle{}), size,
				client.PutOptions{}, io.ErrNoProgress},
			"caller goes": {gone, k, io.MultiReader(bytes.NewReader(value[:17<<20]), after(func() { cancel(broken) }),
				bytes.NewReader(value[17<<20:size])), size, client.PutOptions{}, broken},
		} {
			_, err := c.PutFrom(f.ctx, f.key, f.r, f.size, f.o)
			if !errors.Is(err, f.want) || client.Outcome(err) != rdma.No {
				t.Errorf("%s: %v, want %v", what, err, f.want)
			}
			if it, err := c.Get(ctx, k); err != nil || !bytes.Equal(it.Value, old) {
				t.Fatalf("%s: then there are %d bytes, %v", what, len(it.Value), err)
			}
		}
		if err := c.Delete(ctx, k); err != nil {
			t.Fatal(err)
		}
	}
	each(t, func(t *testing.T, p string) {
		st, c := open(t, p, devstore.Options{CapacityBytes: 192 << 20}, client.Options{})
		test(t, c)
		booksAdd(t, c)
		ro, err := client.Open(t.Context(), client.Options{Directory: st.Directory(), Devices: st.Devices(),
			ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		defer ro.Close()
		if _, err := ro.PutFrom(t.Context(), []byte("k"), untouched{t}, size, client.PutOptions{}); !errors.Is(err,
			client.ErrInvalid) {
			t.Errorf("read-only: %v", err)
		}
	})
	t.Run("fake", func(t *testing.T) { test(t, clienttest.New(clienttest.Options{})) })
}

type idle struct{}

func (idle) Read([]byte) (int, error) { return 0, nil }

// after is a reader of nothing that calls a function.
type after func()

func (f after) Read([]byte) (int, error) {
	f()
	return 0, io.EOF
}

// Several values at once take a window each of this process's memory, wait for each other beyond what they may have in
// the store, and leave nothing behind.
func TestPutFromTogether(t *testing.T) {
	if testing.Short() {
		t.Skip("moves gigabytes: make test does, without -short")
	}
	st, c := open(t, "shm", devstore.Options{CapacityBytes: 3 << 30}, client.Options{OpTimeout: time.Minute})
	allow(t, st, c, client.MaxValueLen)
	const n, size = 4, 200 << 20
	var before, most runtime.MemStats
	runtime.ReadMemStats(&before)
	errs := make(chan error)
	for i := range n {
		go func() {
			_, err := c.PutFrom(t.Context(), fmt.Appendf(nil, "%d", i), io.LimitReader(fill(i), size), size,
				client.PutOptions{})
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	runtime.ReadMemStats(&most)
	if took := most.TotalAlloc - before.TotalAlloc; took > 2*n*8<<20 {
		t.Errorf("%d MiB were allocated", took>>20)
	}
	b := make([]byte, 1<<20)
	for i := range n {
		for off := int64(0); off < size; off += 64<<20 - 3 {
			k, in, err := c.GetRange(t.Context(), fmt.Appendf(nil, "%d", i), off, b)
			if err != nil || in.Size != size || strings.Trim(string(b[:k]), string(rune('a'+i))) != "" {
				t.Fatalf("value %d at %d: %d of %d bytes, %v", i, off, k, in.Size, err)
			}
		}
		if err := c.Delete(t.Context(), fmt.Appendf(nil, "%d", i)); err != nil {
			t.Error(err)
		}
	}
	booksAdd(t, c)
}

// fill is a reader of one letter without end.
type fill int

func (f fill) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte('a' + f)
	}
	return len(b), nil
}

// A recall, or another member, that comes while a value is written takes it away, also if it is over by then. A value
// that can be read again is; otherwise the error says that nothing was stored.
func TestPutFromInterrupted(t *testing.T) {
	const size = 20 << 20
	st, c := open(t, "shm", devstore.Options{Nodes: 2, CapacityBytes: 256 << 20,
		Namespaces: []devstore.Namespace{{Name: "default", Replicas: 1, BytesPerNode: 96 << 20}}}, client.Options{})
	dir, ctx := st.DirectoryNodes()[0], t.Context()
	status := func() *dirpb.StatusReply {
		s, err := st.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	recalled := 0
	recall := func() {
		for _, pg := range status().GetMap().GetPgs() {
			for x := range uint32(6) {
				var err error
				testutil.Until(t, "a recall", func() bool { // sessions may have a change to acknowledge yet
					_, err = dir.StartJob(ctx, &dirpb.StartJobRequest{Kind: dirpb.JobKind_JOB_RECALL,
						Namespace: "default", PgId: pg.GetId(), Extent: x})
					return grpcstatus.Code(err) != codes.FailedPrecondition
				})
				switch grpcstatus.Code(err) {
				case codes.InvalidArgument:
					continue // nothing of it was granted
				case codes.OK, codes.AlreadyExists: // the directory recalls by itself, too
				default:
					t.Fatal(err)
				}
				recalled++
				testutil.UntilNone(t, "jobs", func() int { return len(status().GetJobs()) })
			}
		}
	}
	replicas := func(n uint32) func() {
		return func() {
			if _, err := dir.SetNamespace(ctx, &dirpb.SetNamespaceRequest{Name: "default", KeepLimit: true,
				Replicas: n}); err != nil {
				t.Fatal(err)
			}
			testutil.Until(t, "copies", func() bool {
				for _, pg := range status().GetMap().GetPgs() {
					if len(pg.GetMembers()) != int(n) || pg.GetJoining() {
						return false
					}
				}
				return true
			})
		}
	}
	k, value := []byte("k"), noise(1, size)
	for _, happens := range []struct {
		what string
		f    func()
	}{{"recall", recall}, {"one copy more", replicas(2)}, {"one copy less", replicas(1)}} {
		r := io.MultiReader(bytes.NewReader(value[:17<<20]), after(happens.f), bytes.NewReader(value[17<<20:]))
		_, err := c.PutFrom(ctx, k, r, size, client.PutOptions{})
		if !errors.Is(err, client.ErrInterrupted) || client.Outcome(err) != rdma.No {
			t.Errorf("%s: %v", happens.what, err)
		}
		if _, err := c.GetInto(ctx, k, nil); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("%s: then the key is there: %v", happens.what, err)
		}
	}
	again := &rereader{Reader: bytes.NewReader(value), at: 17 << 20, f: recall}
	version, err := c.PutFrom(ctx, k, again, size, client.PutOptions{})
	if err != nil || again.f != nil {
		t.Fatal(err)
	}
	if it, err := c.Get(ctx, k); err != nil || it.Version != version || !bytes.Equal(it.Value, value) {
		t.Errorf("read again, it is version %d of %d bytes: %v", it.Version, len(it.Value), err)
	}
	if recalled < 4 {
		t.Errorf("%d extents were recalled", recalled)
	}
}

// rereader calls f once, before the byte at.
type rereader struct {
	*bytes.Reader
	at int64
	f  func()
}

func (r *rereader) Read(b []byte) (int, error) {
	if r.f != nil && r.Size()-int64(r.Len()) >= r.at {
		r.f()
		r.f = nil
	}
	return r.Reader.Read(b)
}
