package s3

import (
	"errors"
	"io"
	"net/http"
	"sync"
)

// transport ends a request's hold on its body with the request. http.Transport may read a body still after it has
// answered, when minio-go sends that body anew already: both would read the one reader.
type transport struct{ *http.Transport }

var errRequestIsOver = errors.New("the request is over")

// RoundTrip implements [http.RoundTripper].
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil || r.Body == http.NoBody {
		return t.Transport.RoundTrip(r)
	}
	b := &body{ReadCloser: r.Body}
	r = r.Clone(r.Context())
	r.Body = b
	res, err := t.Transport.RoundTrip(r)
	if err != nil {
		b.leaveBody()
		return nil, err
	}
	res.Body = &answer{res.Body, b}
	return res, nil
}

// body is a request's, until leaveBody.
type body struct {
	mu sync.Mutex
	io.ReadCloser
	left bool
}

// Read implements [io.Reader].
func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left {
		return 0, errRequestIsOver
	}
	return b.ReadCloser.Read(p)
}

// leaveBody has nobody read the body any more, by the time that it returns.
func (b *body) leaveBody() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = true
}

// answer is the body of an answer, whose Close leaves that of the request.
type answer struct {
	io.ReadCloser
	of *body
}

// Close implements [io.Closer].
func (a *answer) Close() error {
	a.of.leaveBody()
	return a.ReadCloser.Close()
}
