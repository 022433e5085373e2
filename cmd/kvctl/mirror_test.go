package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/bulk"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

// ends are two stores, which the contexts src and dst name.
type ends struct {
	*env     // of src
	there    *env
	src, dst *client.Client
}

func newEnds(t *testing.T) *ends {
	t.Helper()
	var e ends
	var all [2]*env
	for i, name := range []string{"src", "dst"} {
		all[i] = newEnv(t, devstore.Options{CapacityBytes: 512 << 20, Namespaces: []devstore.Namespace{
			{Name: "default"}, {Name: "other", Mode: dirpb.NamespaceMode_NAMESPACE_STORE, BytesPerNode: 64 << 20}}})
		c := open(t, all[i], "default")
		if name == "src" {
			e.src = c
		} else {
			e.dst = c
		}
	}
	for i, name := range []string{"src", "dst"} {
		all[i].must("", "context", "set", name)
	}
	e.env, e.there = all[0], all[1]
	return &e
}

func open(t *testing.T, e *env, namespace string) *client.Client {
	t.Helper()
	c, err := client.Open(t.Context(), client.Options{Directory: e.store.Directory(), Namespace: namespace})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// mirror runs kvctl mirror, which must end with status code, and gives its report.
func (e *ends) mirror(code int, args ...string) (r mirrorReport, stderr string) {
	e.t.Helper()
	got := e.run("", append([]string{"-o", "json", "mirror"}, args...)...)
	if got.code != code {
		e.t.Fatalf("mirror %q: exit %d, want %d: %s%s", args, got.code, code, got.stdout, got.stderr)
	}
	if got.stdout != "" {
		if err := json.Unmarshal([]byte(got.stdout), &r); err != nil {
			e.t.Fatal(err)
		}
	}
	return r, got.stderr
}

// mirrorReport is a report that a test looks at.
type mirrorReport struct{ bulk.MirrorReport }

func (r mirrorReport) is(t *testing.T, keys, copied, same, gone, deleted int64) {
	t.Helper()
	if r.Keys != keys || r.Copied != copied || r.Same != same || r.Gone != gone || r.Deleted != deleted ||
		r.Refused != 0 {
		t.Errorf("%+v, want keys %d, copied %d, same %d, gone %d, deleted %d, refused 0", r, keys, copied, same, gone,
			deleted)
	}
}

func put(t *testing.T, c *client.Client, ops ...client.Op) {
	t.Helper()
	for i := range ops {
		if ops[i].Kind == 0 {
			ops[i].Kind = client.OpPut
		}
	}
	c.Do(t.Context(), ops)
	for _, op := range ops {
		if op.Err != nil {
			t.Fatalf("%q: %v", op.Key, op.Err)
		}
	}
}

// contents are all keys of a store with what is kept of them, but for versions.
func contents(t *testing.T, c *client.Client) map[string]client.Item {
	t.Helper()
	out := map[string]client.Item{}
	for kv, err := range c.Scan(t.Context(), client.ScanOptions{KeysOnly: true}) {
		if err != nil {
			t.Fatal(err)
		}
		ops := []client.Op{{Kind: client.OpGet, Key: kv.Key, Typed: true}}
		c.Do(t.Context(), ops)
		if ops[0].Err != nil {
			t.Fatal(ops[0].Err)
		}
		if len(ops[0].Item.Value) != kv.Len {
			t.Errorf("%.20q: Scan says %d bytes, Get %d", kv.Key, kv.Len, len(ops[0].Item.Value))
		}
		out[string(kv.Key)] = ops[0].Item
	}
	return out
}

func (e *ends) alike() {
	e.t.Helper()
	src, dst := contents(e.t, e.src), contents(e.t, e.dst)
	for k, it := range src {
		if got, ok := dst[k]; !ok || !bulk.SameItem(it, got) {
			e.t.Errorf("%.40q: at DST %v (%d bytes, %v, flags %d, note %d, expires %v), at SRC %d bytes, %v, flags "+
				"%d, note %d, expires %v", k, ok,
				len(got.Value), got.Type, got.Flags, got.Note, got.Expires, len(it.Value), it.Type, it.Flags, it.Note,
				it.Expires)
		}
	}
	for k := range dst {
		if _, ok := src[k]; !ok {
			e.t.Errorf("%.40q: at DST alone", k)
		}
	}
}

func TestMirror(t *testing.T) {
	e := newEnds(t)
	var ops []client.Op
	for i := range 1000 {
		ops = append(ops, client.Op{Key: fmt.Appendf(nil, "key:%04d", i), Value: randomBytes(i, uint64(i))})
	}
	far := time.Now().Add(time.Hour)
	put(t, e.src, append(ops,
		client.Op{Key: []byte("empty")},
		client.Op{Key: []byte{0}, Value: []byte("nul")},
		client.Op{Key: []byte("a\n\xff\x1b[31m\"quoted\""), Value: []byte{0, 1, 2}},
		client.Op{Key: randomBytes(client.MaxKeyLen, 1), Value: []byte("the longest key")},
		client.Op{Key: []byte("flags"), Value: []byte("x"), Flags: 7, Note: 1 << 40},
		client.Op{Key: []byte("expiring"), Value: []byte("x"), Expires: far},
		client.Op{Key: []byte("hash"), Value: []byte("as the gateway has it"), Type: client.Hash, Expires: far,
			Note: 3},
		client.Op{Key: []byte("list"), Value: []byte("too"), Type: client.List},
		client.Op{Key: []byte("long"), Value: randomBytes(9<<20+5, 2), Flags: 9, Note: 8},
	)...)
	r, _ := e.mirror(ctl.ExitOK, "src", "dst:default", "--dry-run")
	r.is(t, 1009, 1009, 0, 0, 0)
	if n := len(contents(t, e.dst)); n != 0 || !r.DryRun {
		t.Errorf("a dry run left %d keys, and said %+v", n, r)
	}
	r, _ = e.mirror(ctl.ExitOK, "src", "dst")
	r.is(t, 1009, 1009, 0, 0, 0)
	e.alike()
	r, _ = e.mirror(ctl.ExitOK, "src", "dst")
	r.is(t, 1009, 0, 1009, 0, 0)

	put(t, e.src, client.Op{Key: []byte("key:0000"), Value: []byte("changed")},
		client.Op{Key: []byte("new"), Value: []byte("new")},
		client.Op{Key: []byte("hash"), Value: []byte("plain now")},
		client.Op{Kind: client.OpDelete, Key: []byte("key:0001")},
		client.Op{Kind: client.OpDelete, Key: []byte("long")})
	if err := e.src.Touch(t.Context(), []byte("expiring"), 2*time.Hour); err != nil {
		t.Fatal(err)
	}
	put(t, e.dst, client.Op{Key: []byte("key:0002"), Value: []byte("changed at DST")},
		client.Op{Key: []byte("elsewhere"), Value: []byte("of DST")})
	r, _ = e.mirror(ctl.ExitOK, "src", "dst", "--delete", "--dry-run")
	r.is(t, 1008, 5, 1003, 0, 3)
	r, _ = e.mirror(ctl.ExitOK, "src", "dst", "--prefix", "key:", "--delete")
	r.is(t, 999, 2, 997, 0, 1)
	r, _ = e.mirror(ctl.ExitOK, "src", "dst")
	r.is(t, 1008, 3, 1005, 0, 0)
	r, _ = e.mirror(ctl.ExitOK, "src", "dst", "--delete")
	r.is(t, 1008, 0, 1008, 0, 2)
	e.alike()

	// And back: what came from there is there.
	r, _ = e.mirror(ctl.ExitOK, "dst", "src", "--delete")
	r.is(t, 1008, 0, 1008, 0, 0)
	// Two namespaces of one store.
	r, _ = e.mirror(ctl.ExitOK, ":default", ":other", "--prefix", "key:")
	r.is(t, 999, 999, 0, 0, 0)
	if text := e.must("", "mirror", ":default", ":other", "--prefix", "key:00"); !strings.Contains(
		text, "Keys  Copied  Bytes  Same") {
		t.Errorf("mirror prints %q", text)
	}
}

// Keys that are later at DST by the margin are left alone, and no others.
func TestMirrorGoesByVersions(t *testing.T) {
	e := newEnds(t)
	put(t, e.src, client.Op{Key: []byte("k"), Value: []byte("of SRC")})
	it, err := e.src.Get(t.Context(), []byte("k"))
	if err != nil {
		t.Fatal(err)
	}
	for later := int64(0); later <= int64(layout.VersionAt(uint64(1100*time.Millisecond))); {
		// the first one may be earlier: sessions have clocks of their own
		v, err := e.dst.Put(t.Context(), []byte("k"), []byte("somebody else's"), client.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		later = int64(v - it.Version)
		time.Sleep(10 * time.Millisecond)
	}
	r, _ := e.mirror(ctl.ExitOK, "src", "dst", "--margin", "1s")
	r.is(t, 1, 0, 1, 0, 0)
	// Nor does a version of the future say anything.
	e.meddle(nil, func(a *ctl.App, ops []client.Op) {
		if a.Directory[0] == e.there.store.Directory()[0] {
			ops[0].Item.Version = layout.VersionAt(uint64(time.Now().Add(time.Hour).UnixNano()))
		}
	})
	r, _ = e.mirror(ctl.ExitOK, "src", "dst", "--margin", "1s", "--dry-run")
	r.is(t, 1, 1, 0, 0, 0)
	e.backend = nil
	r, _ = e.mirror(ctl.ExitOK, "src", "dst", "--margin", "1s", "--compare")
	r.is(t, 1, 1, 0, 0, 0)
	put(t, e.src, client.Op{Key: []byte("k"), Value: []byte("changed")})
	r, _ = e.mirror(ctl.ExitOK, "src", "dst", "--margin", "1s")
	r.is(t, 1, 1, 0, 0, 0)
	e.alike()
}

func TestMirrorRefuses(t *testing.T) {
	e := newEnds(t)
	put(t, e.dst, client.Op{Key: []byte("k"), Value: []byte("v")})
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"src"}, ctl.ExitUsage, "usage: kvctl mirror SRC DST"},
		{[]string{"src", ""}, ctl.ExitUsage, `DST: "": want CONTEXT, CONTEXT:NAMESPACE or :NAMESPACE`},
		{[]string{"src:", "dst"}, ctl.ExitUsage, `SRC: "src:": want CONTEXT`},
		{[]string{"src", "nobody"}, ctl.ExitUsage, `DST: no context "nobody": want dst, src`},
		{[]string{"src", "dst:nothing"}, ctl.ExitUsage, `DST dst:nothing: unknown namespace`},
		{[]string{"src:nothing", "dst"}, ctl.ExitUsage, `SRC src:nothing: unknown namespace`},
		{[]string{"src", "src:default"}, ctl.ExitUsage, "SRC src and DST src:default are the same namespace"},
		{[]string{"src", ":default"}, ctl.ExitUsage, "SRC src and DST :default are the same namespace"},
		{[]string{"src", "dst", "--margin", "1ms"}, ctl.ExitUsage, "--margin 1ms: want at least 1s"},
		{[]string{"src", "dst", "--delete"}, ctl.ExitNo, "SRC src has no such key: nothing was deleted"},
	} {
		if _, said := e.mirror(c.code, c.args...); !strings.Contains(said, c.want) {
			t.Errorf("mirror %q says %q, want %q", c.args, said, c.want)
		}
	}
	if len(contents(t, e.dst)) != 1 {
		t.Error("what is at DST did not stay")
	}
}

// A full DST ends the run with its name; the next one goes on when there is room.
func TestMirrorFull(t *testing.T) {
	e := newEnds(t)
	dst := &env{t: t, flags: []string{"--directory", e.there.store.Directory()[0]}, now: time.Now}
	dst.must("", "namespace", "create", "small", "--bytes", "64MiB", "--limit", "16MiB")
	for i := range 20 {
		put(t, e.src, client.Op{Key: fmt.Appendf(nil, "big:%02d", i), Value: randomBytes(1<<20, uint64(i))})
	}
	_, said := e.mirror(ctl.ExitUnavailable, "src", "dst:small")
	if !strings.Contains(said, `DST dst:small has no room for "big:`) ||
		!strings.Contains(said, "run it again to go on") || strings.Contains(said, "it did not happen") {
		t.Errorf("a full DST: %q", said)
	}
	dst.must("", "namespace", "set", "small", "--limit", "48MiB")
	r, _ := e.mirror(ctl.ExitOK, "src", "dst:small")
	if r.Keys != 20 || r.Copied == 0 || r.Same == 0 || r.Copied+r.Same != 20 {
		t.Errorf("the next run: %+v", r)
	}
}

// meddled is a backend whose stores tell a test of batches before they are done, and afterwards.
type meddled struct {
	ctl.Backend
	side          *ctl.App
	before, after func(*ctl.App, []client.Op)
}

type meddledStore struct {
	ctl.Store
	m *meddled
}

func (m *meddled) Open(ctx context.Context, o ctl.SessionOptions) (ctl.Store, error) {
	s, err := m.Backend.Open(ctx, o)
	return meddledStore{s, m}, err
}

func (s meddledStore) Do(ctx context.Context, ops []client.Op) {
	s.m.before(s.m.side, ops)
	s.Store.Do(ctx, ops)
	s.m.after(s.m.side, ops)
}

// meddle has before and after see what mirror does; nil: nothing.
func (e *ends) meddle(before, after func(*ctl.App, []client.Op)) {
	var mu sync.Mutex
	locked := func(fn func(*ctl.App, []client.Op)) func(*ctl.App, []client.Op) {
		return func(a *ctl.App, ops []client.Op) {
			mu.Lock()
			defer mu.Unlock()
			if fn != nil && len(ops) > 0 {
				fn(a, ops)
			}
		}
	}
	e.backend = func(a *ctl.App) (ctl.Backend, error) {
		b, err := ctl.OpenStore(a)
		return &meddled{b, a, locked(before), locked(after)}, err
	}
}

// A run that is interrupted has done some of it, says so, and the next one does the rest.
func TestMirrorInterrupted(t *testing.T) {
	e := newEnds(t)
	var ops []client.Op
	for i := range 2000 {
		ops = append(ops, client.Op{Key: fmt.Appendf(nil, "key:%04d", i), Value: []byte("x")})
	}
	put(t, e.src, ops...)
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	e.meddle(func(_ *ctl.App, ops []client.Op) {
		if ops[0].Kind == client.OpPut {
			if n += len(ops); n > 500 {
				cancel()
			}
		}
	}, nil)
	got := e.runContext(ctx, "", "mirror", "src", "dst")
	if got.code != ctl.ExitInterrupted || !strings.Contains(got.stderr, "run it again to go on") {
		t.Errorf("interrupted: %+v", got)
	}
	e.backend = nil
	half := int64(len(contents(t, e.dst)))
	if half == 0 || half == 2000 {
		t.Errorf("%d keys were copied before, want some", half)
	}
	r, _ := e.mirror(ctl.ExitOK, "src", "dst")
	r.is(t, 2000, 2000-half, half, 0, 0)
	e.alike()
}

// Others write at both ends meanwhile, another mirror among them: what was read before does not replace it.
func TestMirrorBesideWriters(t *testing.T) {
	e := newEnds(t)
	put(t, e.src, client.Op{Key: []byte("both"), Value: []byte("of SRC")},
		client.Op{Key: []byte("goes"), Value: []byte("soon")})
	put(t, e.dst, client.Op{Key: []byte("only"), Value: []byte("of DST")},
		client.Op{Key: []byte("both"), Value: []byte("old")})
	met := 0
	e.meddle(func(a *ctl.App, ops []client.Op) {
		switch op := ops[0]; {
		case op.Kind == client.OpPut && met == 0: // between the comparison and the copy
			met++
			put(t, e.src, client.Op{Key: []byte("both"), Value: []byte("newer")})
			put(t, e.dst, client.Op{Key: []byte("both"), Value: []byte("newer")})
		case op.Kind == client.OpDelete && met == 1: // between the question and the deletion
			met++
			put(t, e.dst, client.Op{Key: []byte("only"), Value: []byte("written again")})
		case op.Kind == client.OpGet && string(op.Key) == "goes" &&
			strings.Join(a.Directory, "") == e.store.Directory()[0]:
			_ = e.src.Delete(t.Context(), op.Key)
		}
	}, nil)
	r, _ := e.mirror(ctl.ExitOK, "src", "dst", "--delete")
	r.is(t, 2, 0, 1, 1, 0)
	if met != 2 {
		t.Fatalf("the mirror was met %d times", met)
	}
	got := contents(t, e.dst)
	if string(got["both"].Value) != "newer" || string(got["only"].Value) != "written again" || len(got) != 2 {
		t.Errorf("DST has %v", got)
	}
}

// A put whose outcome is not known is looked up, a store that is away for a moment is waited for, and a key that cannot
// be read is named.
func TestMirrorFaults(t *testing.T) {
	e := newEnds(t)
	put(t, e.src, client.Op{Key: []byte("k"), Value: []byte("v")})
	fault := 0
	e.meddle(nil, func(_ *ctl.App, ops []client.Op) {
		switch {
		case ops[0].Kind == client.OpPut && fault == 0: // it happened
			ops[0].Err = fmt.Errorf("%w: cut off", client.ErrUnknownOutcome)
			fault++
		case ops[0].Kind == client.OpGet && fault == 1:
			ops[0].Err = fmt.Errorf("%w: for a moment", client.ErrUnavailable)
			fault++
		}
	})
	r, _ := e.mirror(ctl.ExitOK, "src", "dst")
	r.is(t, 1, 1, 0, 0, 0)
	if fault != 2 {
		t.Errorf("%d faults", fault)
	}
	e.meddle(nil, func(_ *ctl.App, ops []client.Op) {
		if ops[0].Kind == client.OpGet {
			ops[0].Err = errors.Join(client.ErrCorrupt, errors.New("here"))
		}
	})
	r, said := e.mirror(ctl.ExitNo, "src", "dst", "--delete")
	if r.Refused != 1 || !strings.Contains(said, `DST dst: "k": corrupt memory`) ||
		!strings.Contains(said, "nothing was deleted") {
		t.Errorf("%+v, %q", r, said)
	}
}
