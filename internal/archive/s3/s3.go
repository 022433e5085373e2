// Package s3 keeps the files of an archive as objects of a bucket. It leaves what they hold to package archive, and
// requests, signatures and their repetition to minio-go.
//
// Start with [Open], which gives an archive.Destination. Its methods may be called concurrently. A file that is being
// written owns a buffer of [PartBytes], and belongs to one goroutine.
//
// A file is there only if none was: its last request has the condition If-None-Match. An answer may be lost and the
// request be repeated. So each file carries a random name of who put it, and a writer knows its own. Repositories
// of restic and Pebble's shared objects rest on the same service.
package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/minio/minio-go/v7/pkg/s3utils"
	_ "golang.org/x/crypto/x509roots/fallback" // public authorities, for machines and images that have none

	"github.com/kvd-project/kvd/internal/archive"
)

const (
	// PartBytes is what goes in one request, and what a file that is being written holds in memory. A longer one
	// is a multipart upload.
	PartBytes = 8 << 20
	// patience is how long a connection may stand still.
	patience = time.Minute
	// tries is how often a request is made, and how often a read goes on from where it was cut without a byte more.
	tries = 6
	// uploadSuffix ends the names that List gives of uploads without an end, and that Delete knows.
	uploadSuffix = ".upload"
	// putBy is the metadata that names who put a file.
	putBy = "Kvd-Put"
)

// bucket is a Destination of objects below a prefix.
type bucket struct {
	c            minio.Core
	name, prefix string // prefix: "" or with a slash at its end

	mu       sync.Mutex
	excludes bool // the server is known to keep If-None-Match
}

var _ archive.Destination = (*bucket)(nil)

// Open opens s3://BUCKET/PREFIX. getenv tells what no command line should: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
// AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION, and AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL. Nothing is asked of
// the server yet. The function that it gives ends its idle connections.
func Open(u *url.URL, getenv func(string) string) (archive.Destination, func() error, error) {
	return open(u, getenv, patience)
}

func open(u *url.URL, getenv func(string) string, patience time.Duration) (archive.Destination, func() error, error) {
	first := func(names ...string) (v string) {
		for _, name := range names {
			if v = getenv(name); v != "" {
				break
			}
		}
		return v
	}
	b := &bucket{name: u.Host}
	if p := strings.Trim(u.Path, "/"); p != "" {
		if err := archive.CheckFileName(p); err != nil {
			return nil, nil, err
		}
		b.prefix = p + "/"
	}
	if u.User != nil || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, nil, errors.New("want s3://BUCKET or s3://BUCKET/PREFIX alone; keys come by the environment")
	}
	if err := s3utils.CheckValidBucketName(u.Host); err != nil {
		return nil, nil, err
	}
	if getenv("AWS_ACCESS_KEY_ID") == "" || getenv("AWS_SECRET_ACCESS_KEY") == "" {
		return nil, nil, errors.New("s3 wants AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment")
	}
	end, err := url.Parse(first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
	if err == nil && *end == (url.URL{}) {
		end = &url.URL{Scheme: "https", Host: "s3.amazonaws.com"}
	}
	if err != nil || end.Host == "" || end.User != nil || strings.Trim(end.Path, "/") != "" || end.RawQuery != "" ||
		end.Scheme != "https" && end.Scheme != "http" {
		return nil, nil, errors.New("AWS_ENDPOINT_URL: want https://HOST:PORT alone")
	}
	region := first("AWS_REGION", "AWS_DEFAULT_REGION")
	if region == "" {
		region = "us-east-1" // which services without regions want
	}
	t := &http.Transport{Proxy: http.ProxyFromEnvironment, DialContext: dialer(patience),
		TLSHandshakeTimeout: patience, IdleConnTimeout: patience / 2, MaxIdleConnsPerHost: 8, DisableCompression: true}
	c, err := minio.NewCore(end.Host, &minio.Options{Secure: end.Scheme == "https", Region: region,
		Transport: transport{t}, MaxRetries: tries, Creds: credentials.NewStaticV4(getenv("AWS_ACCESS_KEY_ID"),
			getenv("AWS_SECRET_ACCESS_KEY"), getenv("AWS_SESSION_TOKEN"))})
	if err != nil {
		return nil, nil, err
	}
	b.c = *c
	return b, func() error {
		t.CloseIdleConnections()
		return nil
	}, nil
}

// dialer makes connections that fail once they stand still for so long: neither a byte came nor one went.
func dialer(patience time.Duration) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		d := net.Dialer{Timeout: patience}
		c, err := d.DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &conn{c, patience}, nil
	}
}

type conn struct {
	net.Conn
	patience time.Duration
}

func (c *conn) Read(p []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

// Write puts off the end of a Read that waits for the answer, too.
func (c *conn) Write(p []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (b *bucket) String() string {
	return "s3://" + b.name + strings.TrimSuffix("/"+b.prefix, "/")
}

// key is the object of a file.
func (b *bucket) key(name string) (string, error) {
	return b.prefix + name, archive.CheckFileName(name)
}

// known gives an error as a Destination should.
func known(err error) error {
	switch r := minio.ToErrorResponse(err); {
	case err == nil:
		return nil
	case r.Code == minio.NoSuchKey:
		return fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	case r.StatusCode == http.StatusPreconditionFailed:
		return fmt.Errorf("%w: %w", fs.ErrExist, err)
	}
	return err
}

// options are those of a file that is put only if there is none.
func options(id string) minio.PutObjectOptions {
	o := minio.PutObjectOptions{UserMetadata: map[string]string{putBy: id}, DisableContentSha256: true} // it has a sum
	o.SetMatchETagExcept("*")
	return o
}

// settlePut repeats fn, which makes a file that id puts, if the server wants that. fn's error may be of a repetition
// that has found what the first try made.
func (b *bucket) settlePut(ctx context.Context, key, id string, fn func() error) error {
	for try := 1; ; try++ {
		err := fn()
		r := minio.ToErrorResponse(err)
		switch {
		case err == nil:
			return nil
		case r.StatusCode == http.StatusPreconditionFailed, r.Code == minio.NoSuchUpload:
			st, e := b.c.StatObject(ctx, b.name, key, minio.StatObjectOptions{})
			if e == nil && st.UserMetadata[putBy] == id {
				return nil
			}
			return errors.Join(known(err), e)
		case r.StatusCode != http.StatusConflict || try == tries: // another puts it at this moment
			return known(err)
		}
		select {
		case <-time.After(time.Duration(try) * 100 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// put makes a file in one request.
func (b *bucket) put(ctx context.Context, key string, p []byte) error {
	id, sum := rand.Text(), sha256.Sum256(p)
	once := func() error {
		_, err := b.c.PutObject(ctx, b.name, key, bytes.NewReader(p), int64(len(p)), "", hex.EncodeToString(sum[:]),
			options(id))
		return err
	}
	if err := b.settlePut(ctx, key, id, once); err != nil {
		return err
	}
	// A server that does not know the condition would take every lock twice. So the first file is put twice.
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.excludes {
		return nil
	}
	err := once()
	switch b.excludes = minio.ToErrorResponse(err).StatusCode == http.StatusPreconditionFailed; {
	case b.excludes:
		return nil
	case err == nil:
		return fmt.Errorf("%s: the server puts an object in the place of another, though If-None-Match forbids it: "+
			"snapshots and locks want a server that keeps it", b)
	}
	return err
}

// PutIfAbsent implements [archive.Destination].
func (b *bucket) PutIfAbsent(ctx context.Context, name string, p []byte) error {
	key, err := b.key(name)
	if err != nil {
		return err
	}
	return b.put(ctx, key, p)
}

// Create implements [archive.Destination].
func (b *bucket) Create(ctx context.Context, name string) (archive.File, error) {
	key, err := b.key(name)
	if err != nil {
		return nil, err
	}
	return &file{b: b, ctx: ctx, key: key, id: rand.Text()}, nil
}

// file is one that is being written.
type file struct {
	b       *bucket
	ctx     context.Context
	key, id string
	buf     []byte
	upload  string // "": not begun
	parts   []minio.CompletePart
	done    bool
}

// Write implements io.Writer.
func (f *file) Write(p []byte) (n int, err error) {
	for len(p) > 0 {
		if f.buf == nil {
			f.buf = make([]byte, 0, PartBytes)
		}
		k := min(len(p), PartBytes-len(f.buf))
		f.buf = append(f.buf, p[:k]...)
		n, p = n+k, p[k:]
		if len(f.buf) == PartBytes {
			if err := f.part(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// part sends what is in memory as a part of an upload.
func (f *file) part() (err error) {
	if f.upload == "" {
		f.upload, err = f.b.c.NewMultipartUpload(f.ctx, f.b.name, f.key,
			minio.PutObjectOptions{UserMetadata: map[string]string{putBy: f.id}})
		if err != nil {
			return err
		}
	}
	n, sum := len(f.parts)+1, sha256.Sum256(f.buf)
	p, err := f.b.c.PutObjectPart(f.ctx, f.b.name, f.key, f.upload, n, bytes.NewReader(f.buf), int64(len(f.buf)),
		minio.PutObjectPartOptions{Sha256Hex: hex.EncodeToString(sum[:]), DisableContentSha256: true})
	if err != nil {
		return err
	}
	f.parts, f.buf = append(f.parts, minio.CompletePart{PartNumber: n, ETag: p.ETag}), f.buf[:0]
	return nil
}

// Commit implements [archive.File].
func (f *file) Commit() error {
	switch {
	case f.done:
		return fs.ErrClosed
	case f.upload == "":
		if err := f.b.put(f.ctx, f.key, f.buf); err != nil {
			return err
		}
	default:
		if len(f.buf) > 0 {
			if err := f.part(); err != nil {
				return err
			}
		}
		err := f.b.settlePut(f.ctx, f.key, f.id, func() error {
			_, err := f.b.c.CompleteMultipartUpload(f.ctx, f.b.name, f.key, f.upload, f.parts, options(f.id))
			return err
		})
		if err != nil {
			return err
		}
	}
	f.done, f.buf = true, nil
	return nil
}

// Abort implements [archive.File]. List shows an upload that it cannot take away.
func (f *file) Abort() {
	if f.done {
		return
	}
	f.done, f.buf = true, nil
	if f.upload != "" { // the context may be over
		tidy, cancel := context.WithTimeout(context.WithoutCancel(f.ctx), patience)
		defer cancel()
		_ = f.b.c.AbortMultipartUpload(tidy, f.b.name, f.key, f.upload)
	}
}

// Read implements [archive.Destination].
func (b *bucket) Read(ctx context.Context, name string) (io.ReadCloser, error) {
	key, err := b.key(name)
	if err != nil {
		return nil, err
	}
	o := &object{b: b, ctx: ctx, key: key}
	if err := o.open(); err != nil {
		return nil, err
	}
	return o, nil
}

// object is a file that is read. A read that is cut goes on from where it was.
type object struct {
	b         *bucket
	ctx       context.Context
	key, etag string
	off, size int64
	cuts      int // without a byte between them
	body      io.ReadCloser
}

// open asks for what is left of the object.
func (o *object) open() error {
	var how minio.GetObjectOptions
	if o.etag != "" {
		if err := errors.Join(how.SetMatchETag(o.etag), how.SetRange(o.off, o.size-1)); err != nil {
			return err
		}
	}
	body, info, _, err := o.b.c.GetObject(o.ctx, o.b.name, o.key, how)
	if err != nil {
		return known(err)
	}
	if info.Size < 0 {
		return errors.Join(fmt.Errorf("%s/%s: the server does not say how long it is", o.b, o.key), body.Close())
	}
	if o.etag == "" {
		o.etag, o.size = info.ETag, info.Size
	} else if info.Size != o.size-o.off {
		return errors.Join(fmt.Errorf("%s/%s: %d bytes from %d on of %d", o.b, o.key, info.Size, o.off, o.size),
			body.Close())
	}
	o.body = body
	return nil
}

func (o *object) Read(p []byte) (n int, err error) {
	for {
		switch {
		case o.off >= o.size:
			return 0, io.EOF
		case len(p) == 0:
			return 0, nil
		case o.body == nil:
			if err := o.open(); err != nil {
				return 0, err
			}
		}
		n, err = o.body.Read(p[:min(int64(len(p)), o.size-o.off)])
		o.off += int64(n)
		if err != nil {
			_ = o.Close() // what it says does not matter: the sums of the file do
			o.body = nil
		}
		if n > 0 {
			o.cuts = 0
			return n, nil
		}
		if err == nil {
			return 0, nil
		}
		if o.cuts++; o.cuts == tries || o.ctx.Err() != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return 0, err
		}
	}
}

func (o *object) Close() error {
	if o.body == nil {
		return nil
	}
	return o.body.Close()
}

// Delete implements [archive.Destination]. A name with uploadSuffix is of uploads.
func (b *bucket) Delete(ctx context.Context, name string) error {
	key, err := b.key(name)
	if err != nil {
		return err
	}
	if of, ok := strings.CutSuffix(key, uploadSuffix); ok {
		return b.c.RemoveIncompleteUpload(ctx, b.name, of)
	}
	if err := known(b.c.RemoveObject(ctx, b.name, key, minio.RemoveObjectOptions{})); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// List implements [archive.Destination].
func (b *bucket) List(ctx context.Context, prefix string) ([]archive.Info, error) {
	if at, ok := strings.CutSuffix(prefix, "/"); ok || prefix != "" {
		if err := archive.CheckFileName(at); err != nil {
			return nil, err
		}
	}
	var all []archive.Info
	add := func(key, suffix string, size int64, at time.Time) {
		name, ok := strings.CutPrefix(key, b.prefix)
		// Others are somebody else's.
		if ok && strings.HasPrefix(name, prefix) && archive.CheckFileName(name+suffix) == nil {
			all = append(all, archive.Info{Name: name + suffix, Bytes: size, Time: at})
		}
	}
	under := minio.ListObjectsOptions{Prefix: b.prefix + prefix, Recursive: true}
	for o := range b.c.ListObjectsIter(ctx, b.name, under) {
		if o.Err != nil {
			return nil, o.Err
		}
		add(o.Key, "", o.Size, o.LastModified)
	}
	var err error
	for o := range b.c.ListIncompleteUploads(ctx, b.name, under.Prefix, true) { // to its end: it is a goroutine
		if o.Err != nil {
			if minio.ToErrorResponse(o.Err).Code != minio.NoSuchUpload { // some say so of none
				err = o.Err
			}
			continue
		}
		add(o.Key, uploadSuffix, o.Size, o.Initiated)
	}
	slices.SortFunc(all, func(a, b archive.Info) int { return strings.Compare(a.Name, b.Name) })
	all = slices.CompactFunc(all, func(a, b archive.Info) bool { return a.Name == b.Name })
	return all, errors.Join(err, ctx.Err())
}
