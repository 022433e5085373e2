package s3

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/minio/minio-go/v7"
	"go.uber.org/goleak"

	"github.com/kvd-project/kvd/internal/archive"
	"github.com/kvd-project/kvd/internal/testutil"
)

func TestMain(m *testing.M) {
	minio.DefaultRetryUnit, minio.DefaultRetryCap = time.Millisecond, 5*time.Millisecond
	goleak.VerifyTestMain(m)
}

const secret = "the-secret-of-the-test"

// server is a service with a bucket of the name bkt. before is asked about each request, and may answer it.
type server struct {
	*httptest.Server
	fake     http.Handler
	before   atomic.Pointer[func(w http.ResponseWriter, r *http.Request) bool]
	requests atomic.Int64
}

func serve(t *testing.T) *server {
	t.Helper()
	backend := s3mem.New()
	if err := backend.CreateBucket("bkt"); err != nil {
		t.Fatal(err)
	}
	s := &server{fake: gofakes3.New(backend).Server()}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		if f := s.before.Load(); f != nil && (*f)(w, r) {
			return
		}
		s.do(w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

// do does a request. gofakes3 does not look at the condition of a completed upload.
func (s *server) do(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost && r.URL.Query().Has("uploadId") && r.Header.Get("If-None-Match") == "*" {
		head := httptest.NewRecorder()
		s.fake.ServeHTTP(head, httptest.NewRequest(http.MethodHead, r.URL.Path, nil))
		if head.Code == http.StatusOK {
			w.WriteHeader(http.StatusPreconditionFailed)
			return
		}
	}
	if r.ContentLength == 0 {
		r.Header.Set("Content-Length", "0") // net/http takes it away
	}
	s.fake.ServeHTTP(w, r)
}

// fault has f answer requests from now on, if it says so.
func (s *server) fault(f func(w http.ResponseWriter, r *http.Request) bool) { s.before.Store(&f) }

func (s *server) env(name string) string {
	return map[string]string{"AWS_ENDPOINT_URL": s.URL, "AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": secret,
		"AWS_REGION": "eu-north-1"}[name]
}

func (s *server) open(t *testing.T, patience time.Duration) archive.Destination {
	t.Helper()
	d, end, err := open(&url.URL{Scheme: "s3", Host: "bkt", Path: "/some/prefix"}, s.env, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func noise(n int) []byte {
	r, b := rand.NewChaCha8([32]byte{1}), make([]byte, n)
	_, _ = r.Read(b)
	return b
}

const shop = "shop/20261122T003000Z-full/"

var began = time.Date(2026, 11, 22, 0, 30, 0, 0, time.UTC)

// write makes a snapshot of three segments: the last has the value long.
func write(ctx context.Context, d archive.Destination, long []byte) error {
	w, err := archive.NewWriter(ctx, d, "shop", began)
	if err != nil {
		return err
	}
	return fill(ctx, w, long)
}

// fill writes the segments and the manifest.
func fill(ctx context.Context, w *archive.Writer, long []byte) (err error) {
	for i, v := range [][]byte{[]byte("v"), nil, long} {
		g := w.Segment()
		defer g.Abort()
		r := archive.Record{Key: fmt.Appendf(nil, "k%d", i), Value: v, Version: 1}
		if err := g.Add(ctx, &r); err != nil {
			return err
		}
		if err := g.Close(); err != nil {
			return err
		}
	}
	_, err = w.Commit(ctx, archive.Manifest{T1: began, Writer: "test"})
	return err
}

// verify reads the snapshots of d that have a manifest.
func verify(t *testing.T, d archive.Destination) (n int) {
	t.Helper()
	all, err := archive.List(t.Context(), d, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if !e.Complete {
			continue
		}
		n++
		s, err := archive.Open(t.Context(), d, "shop", e.ID)
		if err == nil {
			err = archive.Verify(t.Context(), s, nil)
		}
		if err != nil || s.Keys != 3 {
			t.Fatalf("snapshot %s: %v", e.ID, err)
		}
	}
	return n
}

func TestFiles(t *testing.T) {
	s := serve(t)
	d := s.open(t, time.Minute)
	ctx := t.Context()
	if got := d.String(); got != "s3://bkt/some/prefix" {
		t.Errorf("String: %s", got)
	}
	for _, n := range []int{0, 1, PartBytes - 1, PartBytes, PartBytes + 1, 2 * PartBytes} {
		name, want := fmt.Sprintf("x/%d", n), noise(n)
		for try := range 2 {
			f, err := d.Create(ctx, name)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(f, io.LimitReader(bytes.NewReader(want), int64(n)))
			if err == nil {
				err = f.Commit()
			}
			f.Abort()
			if try == 0 && err != nil || try == 1 && !errors.Is(err, fs.ErrExist) {
				t.Fatalf("%s, time %d: %v", name, try, err)
			}
		}
		r, err := d.Read(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err = errors.Join(err, r.Close()); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %d bytes: %v", name, len(got), err)
		}
	}
	if err := d.PutIfAbsent(ctx, "x/1", nil); !errors.Is(err, fs.ErrExist) {
		t.Errorf("PutIfAbsent: %v", err)
	}
	for _, name := range []string{"../y", "x/../../y", "", "x//y", "/x"} {
		_, err := d.Create(ctx, name)
		_, e := d.Read(ctx, name)
		if err == nil || e == nil || d.Delete(ctx, name) == nil || d.PutIfAbsent(ctx, name, nil) == nil {
			t.Errorf("%q is a name", name)
		}
	}
	all, err := d.List(ctx, "x/")
	if err != nil || len(all) != 6 || all[0].Name != "x/0" || all[1].Bytes != 1 || all[1].Time.IsZero() {
		t.Errorf("List: %+v, %v", all, err)
	}
	for range 2 {
		if err := d.Delete(ctx, "x/1"); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Read(ctx, "x/1"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read of what is gone: %v", err)
	}
	f, err := d.Create(ctx, "y/1") // nobody ends it
	if err == nil {
		_, err = f.Write(noise(PartBytes))
	}
	if err != nil {
		t.Fatal(err)
	}
	if all, err = d.List(ctx, "y/"); err != nil || len(all) != 1 || all[0].Name != "y/1"+uploadSuffix {
		t.Fatalf("List of an upload: %+v, %v", all, err)
	}
	if err := d.Delete(ctx, all[0].Name); err != nil {
		t.Fatal(err)
	}
	if all, err = d.List(ctx, "y/"); err != nil || len(all) != 0 {
		t.Errorf("List: %+v, %v", all, err)
	}
}

// Each request fails twice, before it is done or after: all goes well, and a file is its writer's.
func TestServerFails(t *testing.T) {
	s := serve(t)
	d := s.open(t, time.Minute)
	for _, after := range []bool{false, true} {
		var n atomic.Int64
		s.fault(func(w http.ResponseWriter, r *http.Request) bool {
			if n.Add(1)%3 == 0 {
				return false
			}
			if after {
				s.do(httptest.NewRecorder(), r)
			}
			http.Error(w, "", []int{500, 503, 429}[n.Load()%3])
			return true
		})
		if err := write(t.Context(), d, noise(PartBytes+PartBytes/2)); err != nil {
			t.Fatalf("after %v: %v", after, err)
		}
		s.before.Store(nil)
	}
	if n := verify(t, d); n != 2 {
		t.Errorf("%d snapshots, want 2", n)
	}
	s.fault(func(w http.ResponseWriter, _ *http.Request) bool {
		http.Error(w, "", http.StatusInternalServerError)
		return true
	})
	if err := d.PutIfAbsent(t.Context(), "x", nil); err == nil || errors.Is(err, fs.ErrExist) {
		t.Errorf("a server that always fails: %v", err)
	}
	if _, err := d.List(t.Context(), ""); err == nil {
		t.Error("List of a server that always fails")
	}
}

// cut ends the connection after so many bytes of the answer.
type cut struct {
	http.ResponseWriter
	left int
}

func (c *cut) Write(p []byte) (int, error) {
	n, err := c.ResponseWriter.Write(p[:min(len(p), c.left)])
	if c.left -= n; c.left == 0 {
		_ = http.NewResponseController(c.ResponseWriter).Flush()
		panic(http.ErrAbortHandler)
	}
	return n, err
}

// Transfers are cut in both directions, and stand still: they go on, or begin again.
func TestCutsAndSlowParts(t *testing.T) {
	s := serve(t)
	d := s.open(t, 10*time.Second) // what works has that, too, beside whatever runs
	long := noise(PartBytes + 1<<20)
	var n, slow atomic.Int64
	s.fault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut {
			return false
		}
		switch {
		case n.Add(1)%2 == 0:
			_, _ = io.CopyN(io.Discard, r.Body, r.ContentLength/2)
			panic(http.ErrAbortHandler)
		case r.URL.Query().Has("partNumber") && slow.Add(1) == 1:
			_, _ = io.Copy(io.Discard, r.Body) // and no answer
			<-r.Context().Done()
			return true
		}
		return false
	})
	if err := write(t.Context(), d, long); err != nil {
		t.Fatal(err)
	}
	if slow.Load() == 0 {
		t.Error("no part was slow")
	}
	s.fault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, ".kvs") {
			s.do(&cut{w, 1 << 20}, r)
			return true
		}
		return false
	})
	before := s.requests.Load()
	if verify(t, d) != 1 || s.requests.Load()-before < 8 {
		t.Errorf("%d requests", s.requests.Load()-before)
	}
	// Without a byte more it does not go on for ever.
	s.fault(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Range") == "" {
			s.do(&cut{w, 1 << 20}, r)
		} else {
			w.Header().Set("Content-Length", fmt.Sprint(len(long)))
			w.WriteHeader(http.StatusPartialContent)
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		return true
	})
	r, err := d.Read(t.Context(), shop+"seg-000003.kvs")
	if err != nil {
		t.Fatal(err)
	}
	if _, err = io.ReadAll(r); err == nil {
		t.Error("read to the end")
	}
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

// TestKilledAtEveryCall: whichever request is the writer's last, done or not, there is no manifest without its
// segments; and what it left can be taken away.
func TestKilledAtEveryCall(t *testing.T) {
	long := noise(PartBytes + 1)
	for die := int64(1); ; die++ {
		s := serve(t)
		ctx, kill := context.WithCancel(t.Context())
		var n atomic.Int64
		s.fault(func(w http.ResponseWriter, r *http.Request) bool {
			k := n.Add(1)
			if k == die && die%2 == 0 {
				s.do(httptest.NewRecorder(), r)
			}
			if k >= die {
				kill()
				panic(http.ErrAbortHandler)
			}
			return false
		})
		failed := write(ctx, s.open(t, time.Minute), long)
		kill()
		s.before.Store(nil)
		d := s.open(t, time.Minute)
		if done := verify(t, d); failed == nil && done != 1 {
			t.Fatalf("%d snapshots of one that went well", done)
		}
		e := archive.Entry{Namespace: "shop", ID: "20261122T003000Z-full"}
		if err := archive.Remove(t.Context(), d, e); err != nil {
			t.Fatal(err)
		}
		if all, err := d.List(t.Context(), ""); err != nil || len(all) > 0 {
			t.Fatalf("killed at request %d: %v is left, %v", die, all, err)
		}
		if failed == nil {
			if die < 9 {
				t.Errorf("%d requests", die)
			}
			return
		}
	}
}

// TestLateManifest: a server that writes a manifest after its writer gave up makes a snapshot that is whole, since the
// writer took none of its segments away.
func TestLateManifest(t *testing.T) {
	s := serve(t)
	d := s.open(t, time.Minute)
	var late *http.Request
	s.fault(func(_ http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPut || !strings.HasSuffix(r.URL.Path, archive.ManifestName) {
			return false
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		late = r.Clone(context.Background())
		late.Body = io.NopCloser(bytes.NewReader(body))
		panic(http.ErrAbortHandler)
	})
	w, err := archive.NewWriter(t.Context(), d, "shop", began)
	if err != nil {
		t.Fatal(err)
	}
	if err := fill(t.Context(), w, []byte("v")); err == nil {
		t.Fatal("it went well without an answer")
	}
	if err := w.Abort(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.before.Store(nil)
	if n := verify(t, d); n != 0 {
		t.Errorf("%d snapshots before the manifest came", n)
	}
	answer := httptest.NewRecorder()
	if s.do(answer, late); answer.Code != http.StatusOK {
		t.Fatalf("the late request: %d %s", answer.Code, answer.Body)
	}
	if n := verify(t, d); n != 1 {
		t.Errorf("%d snapshots after the manifest came, want one that is whole", n)
	}
}

// TestPublicAuthorities: a machine that has no authorities knows the public ones.
func TestPublicAuthorities(t *testing.T) {
	if os.Getenv("KVD_NO_AUTHORITIES") != "" {
		pool, err := x509.SystemCertPool()
		if err != nil || pool.Equal(x509.NewCertPool()) {
			t.Errorf("no authorities: %v", err)
		}
		return
	}
	c := exec.Command(os.Args[0], "-test.run", "^TestPublicAuthorities$", "-test.v")
	c.Env = append(os.Environ(), "KVD_NO_AUTHORITIES=1", "SSL_CERT_FILE="+t.TempDir()+"/none",
		"SSL_CERT_DIR="+t.TempDir())
	if out, err := c.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestPublicAuthorities")) {
		t.Errorf("%v\n%s", err, out)
	}
}

// A server that does not keep If-None-Match is refused: it would give a lock to two.
func TestServerWithoutConditions(t *testing.T) {
	s := serve(t)
	s.fault(func(w http.ResponseWriter, r *http.Request) bool {
		r.Header.Del("If-None-Match")
		return false
	})
	err := s.open(t, time.Minute).PutIfAbsent(t.Context(), "x/1", nil)
	if err == nil || !strings.Contains(err.Error(), "If-None-Match") {
		t.Errorf("PutIfAbsent: %v", err)
	}
}

// none is a store without namespaces.
type none struct{}

func (none) Namespaces(context.Context) ([]string, error) { return nil, nil }

func (none) Open(context.Context, string) (archive.Store, archive.Manifest, func() error, error) {
	return nil, archive.Manifest{}, nil, errors.ErrUnsupported
}

// waiter is a log that notes whether an archive waits.
type waiter struct{ waits atomic.Bool }

func (w *waiter) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("this one waits")) {
		w.waits.Store(true)
	}
	return len(p), nil
}

// TestLock: of two archives one works; the other takes over when it has ended.
func TestLock(t *testing.T) {
	s, w := serve(t), new(waiter)
	run := func() (*archive.Service, func()) {
		a := archive.NewService(archive.ServiceOptions{Dest: s.open(t, time.Minute), Source: none{}, Every: time.Hour,
			Beat: 2 * time.Second, Holder: "test", Now: time.Now, Logger: slog.New(slog.NewTextHandler(w, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- a.Run(ctx) }()
		return a, func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	a, stopA := run()
	testutil.Until(t, "the first works", func() bool { return a.Stats().Holds })
	b, stopB := run()
	testutil.Until(t, "the second waits", w.waits.Load)
	if !a.Stats().Holds || b.Stats().Holds {
		t.Errorf("the first: %+v; the second: %+v", a.Stats(), b.Stats())
	}
	stopA()
	testutil.Until(t, "the second works", func() bool { return b.Stats().Holds })
	stopB()
}

// No secret is in a String, a URL or an error.
func TestSecrets(t *testing.T) {
	s := serve(t)
	d := s.open(t, time.Minute)
	s.fault(func(w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, "<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
		return true
	})
	_, err := d.List(t.Context(), "")
	if err == nil || !strings.Contains(err.Error(), "no") {
		t.Errorf("List: %v", err)
	}
	said := []string{d.String(), fmt.Sprint(err)}
	with := func(name, value string) func(string) string {
		return func(n string) string {
			if n == name {
				return value
			}
			return s.env(n)
		}
	}
	for _, bad := range []struct {
		u   string
		env func(string) string
	}{
		{"s3://me:" + secret + "@bkt/x", s.env}, {"s3:///x", s.env}, {"s3://bkt/../x", s.env},
		{"s3://bkt/x?key=" + secret, s.env},
		{"s3://bkt", with("AWS_SECRET_ACCESS_KEY", "")}, {"s3://bkt", with("AWS_ACCESS_KEY_ID", "")},
		{"s3://bkt", with("AWS_ENDPOINT_URL", "https://me:"+secret+"@h")},
		{"s3://bkt", with("AWS_ENDPOINT_URL", "h:9000")},
		{"s3://bkt", with("AWS_ENDPOINT_URL_S3", "https://h/path")}, {"s3://bkt", with("AWS_ENDPOINT_URL", "ftp://h")},
	} {
		u, err := url.Parse(bad.u)
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = Open(u, bad.env)
		if err == nil {
			t.Errorf("%s was opened", bad.u)
		}
		said = append(said, fmt.Sprint(err))
	}
	if i := slices.IndexFunc(said, func(s string) bool { return strings.Contains(s, secret) }); i >= 0 {
		t.Errorf("%q has the secret", said[i])
	}
	if os.Getenv("AWS_ENDPOINT_URL") == "" {
		d, end, err := Open(&url.URL{Scheme: "s3", Host: "bkt"}, with("AWS_ENDPOINT_URL", ""))
		if err != nil || d.String() != "s3://bkt" {
			t.Fatalf("%v, %v", d, err)
		}
		if err := end(); err != nil {
			t.Error(err)
		}
	}
}
