package tier

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/testutil"
	"github.com/kvd-project/kvd/internal/tierstore"
	"github.com/kvd-project/kvd/internal/token"
	"github.com/kvd-project/kvd/rdma"
	"github.com/kvd-project/kvd/rdma/tcp"
)

var key = token.Key{Generation: 1, Secret: bytes.Repeat([]byte{7}, token.KeySize)}

// directory answers KeepVolume as the test says.
type directory struct {
	dirpb.DirectoryClient

	mu    sync.Mutex
	asked []*dirpb.KeepVolumeRequest
	reply *dirpb.KeepVolumeReply
	err   error
}

func newDirectory() *directory {
	return &directory{reply: &dirpb.KeepVolumeReply{VolumeId: 3, ClusterId: "c", AgainMillis: 5,
		Keys:     []*dirpb.TokenKey{{Generation: 1, Key: key.Secret}},
		Sessions: &dirpb.Sessions{Last: 9, Live: []uint32{5, 6}},
		Namespaces: []*dirpb.TierWork{{NamespaceId: 1, Namespace: "a", HashSeed: 4, Volumes: []uint32{2, 3},
			Tier: &dirpb.Tier{Nodes: []string{"t1"}}}}}}
}

func (d *directory) Call(ctx context.Context, fn func(context.Context, dirpb.DirectoryClient) error) error {
	return fn(ctx, d)
}

func (d *directory) KeepVolume(_ context.Context, q *dirpb.KeepVolumeRequest, _ ...grpc.CallOption) (
	*dirpb.KeepVolumeReply, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, q)
	return proto.CloneOf(d.reply), d.err
}

func (d *directory) change(fn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fn()
}

// region is what the directory was told of a namespace, nil if it was told of none.
func (d *directory) region(namespace uint32) (r *dirpb.VolumeRegion) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, x := range d.asked[len(d.asked)-1].Volume.Regions {
		if x.NamespaceId == namespace {
			r = x
		}
	}
	return r
}

func device(t *testing.T) *rdma.Device {
	t.Helper()
	d, err := tcp.Open(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	dev := rdma.NewDevice("tcp", d)
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

func open(t *testing.T, d *directory, folder string) *Service {
	t.Helper()
	s, err := Open(Options{Name: "t1", Folder: folder, SizeBytes: 1 << 30, Device: device(t), Addr: "127.0.0.1:0",
		Directory: d})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	if err := s.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

// lane is a session's connection to s.
type lane struct {
	t  *testing.T
	cq *rdma.CQ
	qp *rdma.QP
	mr *rdma.MR
}

func dial(t *testing.T, s *Service, g token.Grant) (*lane, error) {
	t.Helper()
	g.Lanes, g.Expires = 4, time.Now().Add(time.Hour).Unix()
	b, err := token.Sign(key, g)
	if err != nil {
		t.Fatal(err)
	}
	dev := device(t)
	pd, err := dev.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(8)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dev.Alloc(1<<20, rdma.AllocOptions{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	mr, err := pd.RegMR(m, 0, 1<<20, rdma.AccessLocal)
	if err != nil {
		t.Fatal(err)
	}
	qp, err := dev.Dial(t.Context(), pd, cq, s.endpoint.Addr, binary.LittleEndian.AppendUint32(b, 0))
	t.Cleanup(func() {
		var errs []error
		if err == nil {
			errs = append(errs, qp.Close())
		}
		if err := errors.Join(append(errs, cq.Close(), mr.Deregister(), m.Free(), pd.Dealloc())...); err != nil {
			t.Error(err)
		}
	})
	return &lane{t, cq, qp, mr}, err
}

func (l *lane) read(rkey, at uint64, n int) ([]byte, error) {
	l.t.Helper()
	b := l.mr.Bytes()[:n]
	if _, err := l.qp.PostSend([]rdma.WR{{ID: 1, Op: rdma.OpRead, Local: b, LKey: l.mr.LKey(), RemoteAddr: at,
		RKey: rkey, Flags: rdma.Signaled}}); err != nil {
		return nil, err
	}
	var wc [1]rdma.WC
	testutil.Until(l.t, "the READ", func() bool { return l.cq.Poll(wc[:]) == 1 })
	if wc[0].Status.String() != "SUCCESS" {
		return nil, &rdma.WCError{WC: wc[0]}
	}
	return bytes.Clone(b), nil
}

func namespace(t *testing.T, s *Service, d *directory, id uint32) (*Namespace, *dirpb.VolumeRegion) {
	t.Helper()
	testutil.Until(t, "the namespace", func() bool { return d.region(id) != nil })
	for _, n := range s.Namespaces() {
		if n.Work().NamespaceId == id {
			return n, d.region(id)
		}
	}
	t.Fatalf("namespace %d is not here", id)
	return nil, nil
}

// A session READs objects of its namespace, zeroes where there are none, and nothing of another namespace; sessions
// that have ended, and those of namespaces that are not here, do not connect.
func TestReads(t *testing.T) {
	d := newDirectory()
	s := open(t, d, t.TempDir())
	n, region := namespace(t, s, d, 1)
	body := bytes.Repeat([]byte("value"), 1000)
	at, err := n.Store.Append(tierstore.Ident{Hash: 1, Version: 2}, 0, body)
	if err != nil {
		t.Fatal(err)
	}
	l, err := dial(t, s, token.Grant{Session: 5, Namespace: 1})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := l.read(region.Rkey, at.Region(), len(body)); err != nil || !bytes.Equal(got, body) {
		t.Fatalf("%v, the same %v", err, bytes.Equal(got, body))
	}
	if got, err := l.read(region.Rkey, 1<<50, 100); err != nil || !bytes.Equal(got, make([]byte, 100)) {
		t.Fatalf("where nothing is: %v", err)
	}
	for what, g := range map[string]token.Grant{"ended": {Session: 4, Namespace: 1},
		"elsewhere": {Session: 6, Namespace: 2}} {
		if _, err := dial(t, s, g); !errors.Is(err, rdma.ErrRefused) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// The end of a session is the end of its connections.
	d.change(func() { d.reply.Sessions = &dirpb.Sessions{Last: 9, Live: []uint32{6}} })
	testutil.Until(t, "no connection", func() bool { return s.Stats().Connections == 0 })

	d.change(func() {
		d.reply.Namespaces = append(d.reply.Namespaces, &dirpb.TierWork{NamespaceId: 2, Namespace: "b", HashSeed: 5,
			Tier: &dirpb.Tier{Nodes: []string{"t1"}}})
	})
	namespace(t, s, d, 2)
	l, err = dial(t, s, token.Grant{Session: 6, Namespace: 2})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.read(region.Rkey, at.Region(), len(body)); err == nil {
		t.Error("a session READ another namespace's files")
	}
}

// Objects outlive the process; boots are counted, and the id of the volume stays. The files of a namespace go with it.
func TestRestart(t *testing.T) {
	d, dir := newDirectory(), t.TempDir()
	s := open(t, d, dir)
	n, _ := namespace(t, s, d, 1)
	at, err := n.Store.Append(tierstore.Ident{Hash: 1, Version: 2}, 0, []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(s.o); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Fatalf("a folder was opened twice: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-n.Done:
	default:
		t.Error("a closed namespace is not done")
	}
	s = open(t, d, dir)
	n, _ = namespace(t, s, d, 1)
	got := make([]byte, 5)
	if err := n.Store.Read(t.Context(), at.Region(), got); err != nil || string(got) != "value" {
		t.Fatalf("%q: %v", got, err)
	}
	d.change(func() {
		first, last := d.asked[0].Volume, d.asked[len(d.asked)-1].Volume
		if first.Boot != 1 || first.Id != 0 || last.Boot != 2 || last.Id != 3 || first.Folder != last.Folder ||
			first.Process == last.Process {
			t.Errorf("%v\n%v", first, last)
		}
		d.reply.Namespaces = nil
	})
	testutil.Until(t, "the files to go", func() bool {
		_, err := os.Stat(filepath.Join(dir, "namespace-1"))
		return errors.Is(err, os.ErrNotExist) && d.region(1) == nil
	})
}

// Files stay of a namespace that a directory does not name once it is recovered, and of one that it never named. Once
// named by that directory, they go with the namespace, also while the process is not there.
func TestForgotten(t *testing.T) {
	d, dir := newDirectory(), t.TempDir()
	d.reply.Namespaces = append(d.reply.Namespaces, &dirpb.TierWork{NamespaceId: 2, Namespace: "b", HashSeed: 5,
		Tier: &dirpb.Tier{Nodes: []string{"t1"}}})
	both := d.reply.Namespaces
	if err := os.Mkdir(filepath.Join(dir, "namespace-77"), 0o700); err != nil {
		t.Fatal(err)
	}
	s := open(t, d, dir)
	n, _ := namespace(t, s, d, 1)
	at, err := n.Store.Append(tierstore.Ident{Hash: 1, Version: 2}, 0, []byte("value"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dial(t, s, token.Grant{Session: 5, Namespace: 1}); err != nil {
		t.Fatal(err)
	}
	namespace(t, s, d, 2)
	have := func(want ...uint32) {
		t.Helper()
		asked := 0
		d.change(func() { asked = len(d.asked) })
		testutil.Until(t, "the replies", func() bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			return len(d.asked) > asked+2 // what the last one but one said is done
		})
		if got, err := s.folder.namespaceDirs(); err != nil || !slices.Equal(got, want) {
			t.Fatalf("files of namespaces %d, want %d: %v", got, want, err)
		}
	}
	d.change(func() { d.reply.Recoveries, d.reply.Namespaces = 1, nil })
	have(1, 2, 77)
	if len(s.Namespaces()) > 0 {
		t.Error("files of a namespace that is not named are open")
	}
	d.change(func() { d.reply.Namespaces = both[:1] })
	n, _ = namespace(t, s, d, 1)
	got := make([]byte, 5)
	if err := n.Store.Read(t.Context(), at.Region(), got); err != nil || string(got) != "value" {
		t.Fatalf("%q: %v", got, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	d.change(func() { d.reply.Namespaces = nil })
	s = open(t, d, dir)
	have(2, 77)
	d.change(func() {
		if q := d.asked[len(d.asked)-1]; q.ClusterId != "c" {
			t.Errorf("the folder is said to be of %q", q.ClusterId)
		}
	})
}

// A folder that was given up is not used, one of another store neither, and a damaged one is named.
func TestForeignFolder(t *testing.T) {
	d, dir := newDirectory(), t.TempDir()
	s := open(t, d, dir)
	d.change(func() { d.reply.ClusterId = "another" })
	testutil.Until(t, "a refusal", func() bool {
		err := s.Stats().Err
		return err != nil && strings.Contains(err.Error(), "of the store c")
	})
	d.change(func() {
		d.reply.ClusterId, d.err = "c", status.Error(codes.FailedPrecondition, "this directory never gave the id 3")
	})
	testutil.Until(t, "another refusal", func() bool {
		err := s.Stats().Err
		return err != nil && strings.Contains(err.Error(), "never gave")
	})
	if err := s.Err(); err != nil {
		t.Fatalf("a folder that the directory does not know: %v", err)
	}
	d.change(func() { d.reply.ClusterId, d.err = "c", status.Error(codes.NotFound, "it was given up") })
	<-s.Done()
	if !errors.Is(s.Err(), ErrGivenUp) {
		t.Fatal(s.Err())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, volumeFile)
	for text, want := range map[string]string{"{": "damaged", `{"Format":9,"Folder":1}`: "format 9"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openFolder(dir); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "nothing was changed") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Segments are divided among volumes alike by all of them, evenly, and a volume that comes takes from each.
func TestOwner(t *testing.T) {
	if Owner(nil, 1, 1) != 0 {
		t.Error("a segment of nobody has an owner")
	}
	const segments = 30_000
	count := make(map[uint32]int)
	for i := range uint32(segments) {
		before, after := Owner([]uint32{1, 2, 3}, 7, i), Owner([]uint32{3, 1, 2, 9}, 7, i)
		if before != after && after != 9 {
			t.Fatalf("segment %d goes from %d to %d", i, before, after)
		}
		count[after]++
	}
	for v, n := range count {
		if n < segments/4*9/10 || n > segments/4*11/10 {
			t.Errorf("volume %d has %d of %d segments", v, n, segments)
		}
	}
	if len(count) != 4 {
		t.Errorf("%v", count)
	}
}

// A service says what it needs.
func TestOptions(t *testing.T) {
	_, err := Open(Options{})
	for _, want := range []string{"Name", "Folder", "SizeBytes", "Directory", "Device"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
