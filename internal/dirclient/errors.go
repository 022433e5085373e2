package dirclient

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/wrongport"
)

var (
	// ErrUnavailable means that no directory node answered as leader in time.
	// The request did not happen, unless ErrUnknownOutcome matches as well.
	ErrUnavailable = errors.New("directory unavailable")
	// ErrUnknownOutcome means that the request was sent and its answer was not
	// received: it may have taken effect.
	ErrUnknownOutcome = errors.New("the request may have taken effect")
	// ErrClosed means that the Client was closed.
	ErrClosed = errors.New("directory client closed")
)

// Error says which addresses were tried, and why none answered. It matches
// ErrUnavailable always, ErrUnknownOutcome when Sent, and the context's error
// when that ended the call.
type Error struct {
	// Attempts holds the last one at each address.
	Attempts []Attempt
	// Sent: a request went out, in this or an earlier round, and may have taken
	// effect.
	Sent bool

	cause error
}

// Attempt is one node's failure to answer.
type Attempt struct {
	Addr string
	Err  error
	why  string // for people
	kind verdict
	dial bool // no connection was made
}

// noteAttempt keeps a as its address's last attempt. An attempt that only ctx's end cut off says less than
// the one before.
func (e *Error) noteAttempt(ctx context.Context, a Attempt) {
	i := slices.IndexFunc(e.Attempts, func(b Attempt) bool { return b.Addr == a.Addr })
	switch {
	case i < 0:
		e.Attempts = append(e.Attempts, a)
	case ctx.Err() == nil:
		e.Attempts[i] = a
	}
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("directory")
	dial, headless := len(e.Attempts) > 0, false
	for i, a := range e.Attempts {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(" " + a.Addr + ": " + a.why)
		dial = dial && a.dial
		headless = headless || a.kind == notLeader
	}
	switch {
	case len(e.Attempts) == 0 && e.cause != nil:
		b.WriteString(": " + e.cause.Error())
	case len(e.Attempts) == 0:
		b.WriteString(": not asked")
	case dial:
		b.WriteString("; is `kvd directory` running? (--directory)")
	case headless:
		b.WriteString("; are most of the directory's nodes running?")
	}
	if e.Sent {
		b.WriteString("; " + ErrUnknownOutcome.Error())
	}
	return b.String()
}

// Is matches the sentinels that describe e.
func (e *Error) Is(target error) bool {
	return target == ErrUnavailable || target == ErrUnknownOutcome && e.Sent
}

// NoEffect is err for a request that only asks, or whose effect nobody waits for. All that an
// [Error] says stays, except that the request may have taken effect.
func NoEffect(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) && e.Sent {
		asked := *e
		asked.Sent = false
		return &asked
	}
	return err
}

// Unwrap gives what ended the call and each node's error.
func (e *Error) Unwrap() []error {
	var errs []error
	if e.cause != nil {
		errs = append(errs, e.cause)
	}
	for _, a := range e.Attempts {
		errs = append(errs, a.Err)
	}
	return errs
}

// replyError is the directory's own answer: status.Code and status.FromError
// see its status, people see its text.
type replyError struct {
	addr string
	err  error
}

func (e *replyError) Error() string {
	if s, ok := status.FromError(e.err); ok {
		text := "directory " + e.addr + ": " + s.Message()
		if s.Code() == codes.Unimplemented && strings.HasPrefix(s.Message(), "unknown method ") { // gRPC's words
			text += "; nothing was done; it is of an earlier version: upgrade the directory nodes first"
		}
		return text
	}
	return e.err.Error()
}

func (e *replyError) Unwrap() error { return e.err }

// Message is what the directory said, without the address of the node that did. It is the text of an error that is no
// answer.
func Message(err error) string {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Message()
	}
	return err.Error()
}

// verdict is what an attempt's error means. The zero value has no meaning.
type verdict uint8

const (
	final     verdict = 1 + iota // the directory's answer, or the caller's own error
	notLeader                    // not applied; another node leads
	down                         // no answer
)

// judgeError classifies err; ctx is the caller's, not the attempt's.
func judgeError(ctx context.Context, err error) verdict {
	s, ok := status.FromError(err)
	if !ok {
		if errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return down
		}
		return final
	}
	switch s.Code() {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return down // Canceled: by the caller, or by a node that is shutting down
	case codes.FailedPrecondition:
		if notLeaderDetail(s) != nil {
			return notLeader
		}
	}
	return final
}

func notLeaderDetail(s *status.Status) *dirpb.NotLeader {
	for _, d := range s.Details() {
		if n, ok := d.(*dirpb.NotLeader); ok {
			return n
		}
	}
	return nil
}

// isNothingDone reports whether a node answered that the request took no effect.
func isNothingDone(err error) bool {
	return slices.ContainsFunc(status.Convert(err).Details(), func(d any) bool {
		_, ok := d.(*dirpb.NothingDone)
		return ok
	})
}

// leaderOf is the address in err's NotLeader detail, or "".
func leaderOf(err error) string {
	return notLeaderDetail(status.Convert(err)).GetLeader()
}

// attempt describes a failure at n for Error. sent tells a node that does not
// answer from one that could not be reached.
func (n *node) attempt(err error, v verdict, sent bool) Attempt {
	a := Attempt{Addr: n.addr, Err: err, kind: v}
	s := status.Convert(err)
	dialErr := n.dialErr.Load()
	switch {
	case v == notLeader && notLeaderDetail(s).GetLeader() != "":
		a.why = "not the leader, names " + notLeaderDetail(s).GetLeader()
	case v == notLeader:
		a.why = "not the leader, and knows none"
	case !sent && dialErr != nil:
		a.Err, a.why, a.dial = dialErr.err, brief(dialErr.err), !dialErr.talk
	case s.Code() == codes.Unavailable:
		a.why = inWords(s.Message())
	case sent:
		a.why = "no answer"
	default:
		a.why, a.dial = "cannot connect in time", true
	}
	return a
}

// inWords is what gRPC says of a connection that broke, without its terms.
func inWords(message string) string {
	inner, ok := strings.CutPrefix(message, `connection error: desc = "`)
	if !ok {
		return message
	}
	inner = strings.TrimSuffix(inner, `"`)
	if why, ok := strings.CutPrefix(inner, "error reading server preface: "); ok {
		return "the connection broke at once: " + why
	}
	return inner
}

// brief is the cause without the address and the system call, which the reader
// of an Error knows.
func brief(err error) string {
	if w := (*wrongport.Error)(nil); errors.As(err, &w) {
		return w.Error()
	}
	if o := (*net.OpError)(nil); errors.As(err, &o) {
		if s := (*os.SyscallError)(nil); errors.As(o.Err, &s) {
			return s.Err.Error()
		}
		return o.Err.Error()
	}
	return err.Error()
}
