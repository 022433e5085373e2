package broker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/ring"
	"github.com/kvd-project/kvd/internal/testutil"
)

// sight is a View of the key k that a program has for long, and another program that looks at k again and again.
type sight struct {
	*world
	t          *testing.T
	p, other   *looker
	value      []byte
	c          ring.Completion
	slot       []byte
	put        int // values
	held, lost int // the other program's Views
}

const sightBytes = 100_000

// telling is the seq-th value, of a key that it names.
func telling(key string, seq int) []byte {
	b := make([]byte, sightBytes)
	for i := copy(b, fmt.Sprintf("%s %d ", key, seq)); i < len(b); i++ {
		b[i] = byte(i*7 + i>>8 + seq)
	}
	return b
}

// isOf reports whether b is one of a key's values, whole.
func isOf(key string, b []byte) bool {
	var of string
	var seq int
	n, err := fmt.Sscanf(string(b[:min(len(b), 40)]), "%s %d ", &of, &seq)
	return n == 2 && err == nil && of == key && bytes.Equal(b, telling(key, seq))
}

func newSight(t *testing.T, o devstore.Options) *sight {
	w := newWorldIn(t, o, func(s *Socket) { s.Limits.ViewBytes, s.Limits.RegionTime = 64<<20, 5*time.Millisecond }, nil)
	s := &sight{world: w, t: t, p: w.looker(t), other: w.looker(t)}
	s.value = s.store("k")
	s.c, s.slot = s.p.one(ring.Submission{Op: ring.OpView, Word: 1, TTL: 10_000}, "k", "")
	s.slot = bytes.Clone(s.slot)
	if got := s.p.see(s.c, s.slot); !bytes.Equal(got, s.value) {
		t.Fatal("other bytes than the value's")
	}
	return s
}

// store puts another value of a key, if there is memory for it.
func (s *sight) store(key string) []byte {
	s.t.Helper()
	s.put++
	b := telling(key, s.put)
	if _, err := s.world.c["default"].Put(s.t.Context(), []byte(key), b, client.PutOptions{}); err != nil &&
		!errors.Is(err, client.ErrFull) {
		s.t.Fatal(err)
	}
	return b
}

// shows reports whether the View's bytes are the value still.
func (s *sight) shows() bool { return bytes.Equal(s.p.see(s.c, s.slot), s.value) }

// glance has the other program look at k, and believe what it has seen by the verdict. It returns how that ended.
func (s *sight) glance() ring.Code {
	s.t.Helper()
	c, slot := s.other.one(ring.Submission{Op: ring.OpView, Word: 2, TTL: 10_000, Timeout: 2000}, "k", "")
	if c.Code != ring.OK {
		return c.Code
	}
	for s.other.regions[c.Region] == nil {
		s.other.told()
	}
	got := s.other.see(c, slot)
	r, _ := s.other.one(ring.Submission{Op: ring.OpViewRelease, Word: 2}, "", "")
	switch {
	case r.Code == ring.OK && !isOf("k", got):
		s.t.Errorf("a View that held has shown %q…", got[:20])
	case r.Code == ring.OK:
		s.held++
	case r.Code == ring.ViewExpired:
		s.lost++
	default:
		s.t.Errorf("the release of a View: code %d: %s", r.Code, s.other.text(r))
	}
	return r.Code
}

// until has the other program look until cond holds. At the end the long View is over.
func (s *sight) until(what string, cond func() bool) {
	s.t.Helper()
	testutil.Until(s.t, what, func() bool { s.glance(); return cond() })
	s.p.release(what, 1, ring.ViewExpired)
	if got := s.seen(); got != [2]int64{} {
		s.t.Errorf("views are left: %v", got)
	}
	s.t.Logf("%d views held, %d did not; %d values", s.held, s.lost, s.put)
}

// ask has a directory node do what may take long; the function that it returns reports whether it is done.
func (s *sight) ask(f func(ctx context.Context) error) (done func() bool) {
	c := make(chan error, 1)
	go func() { c <- f(s.t.Context()) }()
	return func() bool {
		select {
		case err := <-c:
			if err != nil {
				s.t.Error(err)
			}
			return true
		default:
			return false
		}
	}
}

// lentMemory counts the files of memory nodes' memory that this process has, and its mappings of such.
func lentMemory(t *testing.T) (n [2]int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range all {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil && strings.Contains(to, "memfd:kvd-pg-") {
			n[0]++
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	n[1] = strings.Count(string(maps), "memfd:kvd-pg-")
	return n
}

// TestViewsInChange: the memory that a View lies in is used again, evicted from, drained, lost or given up. No View
// that held has shown other bytes than a value of its key. The program may look all the time, and nothing of it is
// left.
func TestViewsInChange(t *testing.T) {
	one := []devstore.Namespace{{Name: "default", BytesPerNode: 16 << 20}}
	cache := []devstore.Namespace{{Name: "default", BytesPerNode: 16 << 20,
		Mode: dirpb.NamespaceMode_NAMESPACE_CACHE}}
	two := []devstore.Namespace{{Name: "default", BytesPerNode: 16 << 20, Replicas: 2}}
	before := lentMemory(t)
	for _, x := range []struct {
		what   string
		o      devstore.Options
		change func(s *sight)
	}{
		{"used again", devstore.Options{Namespaces: one}, func(s *sight) {
			n := 0
			s.until("the View's memory has other bytes", func() bool {
				for range 4 {
					err := s.world.c["default"].Delete(s.t.Context(), []byte("k"))
					if err != nil && !errors.Is(err, client.ErrNotFound) {
						s.t.Fatal(err)
					}
					n++
					s.store(fmt.Sprint("another", n%2))
					s.store("k")
				}
				return !s.shows()
			})
		}},
		{"evicted", devstore.Options{Namespaces: cache}, func(s *sight) {
			n := 0
			s.until("the View's memory has other bytes", func() bool {
				for range 16 {
					n++
					s.store(fmt.Sprint("other", n))
				}
				return !s.shows()
			})
			s.store("k")
			if code := s.glance(); code != ring.OK {
				s.t.Errorf("a View of the next value ended with code %d", code)
			}
		}},
		{"drained", devstore.Options{Namespaces: one}, func(s *sight) {
			if err := s.st.AddNode(s.t.Context(), "m2"); err != nil {
				s.t.Fatal(err)
			}
			done := s.ask(func(ctx context.Context) error {
				for {
					r, err := s.st.DirectoryNodes()[0].DrainNode(ctx, &dirpb.DrainNodeRequest{Node: "m1"})
					if err != nil || r.Regions == 0 {
						return err
					}
				}
			})
			s.until("the memory node has no region", done)
			for i, b := range s.p.see(s.c, s.slot) { // which can be read still
				if b != 0 && b != s.value[i] {
					s.t.Fatalf("byte %d of memory that was given up is another's", i)
				}
			}
			if code := s.glance(); code != ring.OK {
				s.t.Errorf("a View in the other memory node ended with code %d", code)
			}
			if it, err := s.world.c["default"].Get(s.t.Context(), []byte("k")); err != nil ||
				!bytes.Equal(it.Value, s.value) {
				s.t.Errorf("the value has %d bytes, %v", len(it.Value), err)
			}
		}},
		{"lost", devstore.Options{Nodes: 2, Namespaces: two, Lease: time.Second}, func(s *sight) {
			if err := s.st.KillNode(0); err != nil {
				s.t.Fatal(err)
			}
			s.until("k is written to the copy that is left", s.ask(func(ctx context.Context) error {
				_, err := s.world.c["default"].Put(ctx, []byte("k"), telling("k", 1000), client.PutOptions{})
				return err
			}))
			if it, err := s.world.c["default"].Get(s.t.Context(), []byte("k")); err != nil ||
				!bytes.Equal(it.Value, telling("k", 1000)) {
				s.t.Errorf("the value has %d bytes, %v", len(it.Value), err)
			}
		}},
		{"given up", devstore.Options{Namespaces: one}, func(s *sight) {
			done := s.ask(func(ctx context.Context) error {
				_, err := s.st.DirectoryNodes()[0].DeleteNamespace(ctx, &dirpb.DeleteNamespaceRequest{Name: "default",
					EndSessions: true})
				return err
			})
			s.until("the namespace is gone", func() bool { return done() && s.glance() != ring.OK })
		}},
	} {
		t.Run(x.what, func(t *testing.T) {
			if x.o.CapacityBytes == 0 {
				x.o.CapacityBytes = 64 << 20
			}
			s := newSight(t, x.o)
			x.change(s)
			s.p.close()
			s.other.close()
			testutil.UntilNone(t, "programs", s.b.tenants[0].stats.Clients.Load)
			if got := s.seen(); got != [2]int64{} {
				t.Errorf("views are left: %v", got)
			}
		})
		testutil.UntilNone(t, "memory of memory nodes", func() [2]int {
			n := lentMemory(t)
			return [2]int{n[0] - before[0], n[1] - before[1]}
		})
	}
}
