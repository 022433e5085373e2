// Package wrongport says why a gRPC connection does not come about. The other end speaks TLS, or does
// not, or another service answers there.
//
// It leaves to its callers whom they call and what they do about it. [Creds] is all of it; what it returns may be used
// concurrently. gRPC itself tells of such a connection "error reading server preface: EOF".
package wrongport

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"google.golang.org/grpc/credentials"
)

// Creds is c for connections to want, such as "a directory node's gRPC port", whose errors name the likely mistake.
// begun, unless nil, is called once for each connection: with nil when the other end has said what it should, else with
// the error. A connection is in clear unless the credentials say that they are TLS.
func Creds(c credentials.TransportCredentials, want string, begun func(error)) credentials.TransportCredentials {
	if begun == nil {
		begun = func(error) {}
	}
	return &explaining{c, want, begun}
}

type explaining struct {
	credentials.TransportCredentials
	want  string
	begun func(error)
}

func (e *explaining) Clone() credentials.TransportCredentials {
	return &explaining{e.TransportCredentials.Clone(), e.want, e.begun}
}

func (e *explaining) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn,
	credentials.AuthInfo, error) {
	conn, info, err := e.TransportCredentials.ClientHandshake(ctx, authority, raw)
	secret := e.Info().SecurityProtocol == "tls"
	if err != nil && secret {
		err = e.handshake(ctx, err)
	}
	if err != nil {
		e.begun(err)
		return conn, info, err
	}
	return &listening{Conn: conn, e: e, secret: secret}, info, nil
}

// handshake explains why TLS did not begin.
func (e *explaining) handshake(ctx context.Context, err error) error {
	record := tls.RecordHeaderError{}
	switch {
	case errors.As(err, &record) && isSettings(record.RecordHeader[:]):
		return &Error{"it speaks gRPC in clear, not TLS: leave out --tls-ca, or give the other end its certificate",
			err}
	case errors.As(err, &record):
		return e.other(record.RecordHeader[:], err)
	case strings.Contains(err.Error(), "missing selected ALPN property"): // gRPC has no other sign
		return &Error{"it speaks TLS, but not gRPC: is it " + e.want + "?", err}
	case ended(err):
		return &Error{"it ends connections that begin with TLS: is it " + e.want + "?", err}
	case ctx.Err() != nil:
		return &Error{"it does not answer in TLS: is it " + e.want + "?", err}
	}
	return err
}

// Error is a connection that did not come about.
type Error struct {
	text string
	err  error
}

func (e *Error) Error() string { return e.text }

func (e *Error) Unwrap() error { return e.err }

// ended tells whether err is that the other end closed the connection, with or without having read all that it was
// sent.
func ended(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// listening is a connection of whose other end the first words are looked at.
type listening struct {
	net.Conn
	e      *explaining
	secret bool        // by TLS
	done   atomic.Bool // the first words came, or never will

	mu  sync.Mutex
	why *Error // what the end of the connection was taken for, under mu
}

func (l *listening) Read(b []byte) (int, error) {
	n, err := l.Conn.Read(b)
	l.mu.Lock()
	defer l.mu.Unlock()
	if n == 0 && err == nil || l.done.Swap(true) {
		return n, err
	}
	switch {
	case n > 0 && !isSettings(b[:n]):
		l.why = l.e.other(b[:n], errors.New("it is no HTTP/2"))
		n = 0
	case n == 0 && ended(err) && l.secret:
		l.why = &Error{"it ends connections: is it " + l.e.want + "?", err}
	case n == 0 && ended(err):
		l.why = &Error{"it ends connections in clear: it may want TLS (--tls-ca), or is not " + l.e.want, err}
	case n == 0 && errors.Is(err, net.ErrClosed):
		l.why = &Error{"it says nothing: is it " + l.e.want + "?", err}
	case n > 0:
		l.e.begun(nil)
		return n, err
	}
	if l.why != nil {
		err = l.why
	}
	l.e.begun(err)
	return n, err
}

// Write explains, too, why the other end is gone: it may have closed before all was sent that it would have answered.
// Its words come before that.
func (l *listening) Write(b []byte) (int, error) {
	n, err := l.Conn.Write(b)
	if !ended(err) {
		return n, err
	}
	if !l.done.Load() {
		l.Read(make([]byte, 64)) //nolint:errcheck // it leaves why
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why != nil {
		err = l.why
	}
	return n, err
}

// other explains the first words of another service.
func (e *explaining) other(said []byte, err error) *Error {
	what := fmt.Sprintf("another protocol (it began with %.24q)", said)
	for _, p := range protocols {
		if bytes.HasPrefix(said, []byte(p.begins)) {
			what = p.name
			break
		}
	}
	if what == speaksTLS {
		return &Error{"it speaks TLS: want --tls-ca", err}
	}
	return &Error{"it speaks " + what + ": is it " + e.want + "?", err}
}

const speaksTLS = "TLS"

// protocols are told by what services answer to the beginning of HTTP/2 or TLS; five bytes may be all there is of that.
var protocols = []struct{ begins, name string }{
	{"HTTP/", "HTTP/1, as at http-listen"},
	{"-", "Redis's protocol"},
	{"ERROR", "memcached's protocol"},
	{"CLIEN", "memcached's protocol"},
	{"SERVE", "memcached's protocol"},
	{"SSH-", "SSH"},
	{"\x15\x03", speaksTLS},
	{"\x16\x03", speaksTLS},
}

// isSettings tells whether b is the beginning of HTTP/2, as far as it goes: a SETTINGS frame, on no stream and no
// longer than a server has settings.
func isSettings(b []byte) bool {
	frame := []byte{0, 0, 0, 4}
	for i := range min(len(b), len(frame)) {
		if b[i] != frame[i] && i != 2 {
			return false
		}
	}
	return true
}
