package ctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/providers"
)

// Exit status. Scripts rely on it.
const (
	ExitOK          = 0
	ExitNo          = 1 // not found, condition failed, or a check found something
	ExitUsage       = 2
	ExitUnavailable = 3
	ExitUnknown     = 4 // it may have happened
	ExitOther       = 5 // a local file, corrupt bytes
	ExitForbidden   = 6 // no rights
	ExitInterrupted = 130
)

// Partly is the error of a command that had done some of its work, which format tells.
// If that is nothing, err is as it is.
func Partly(done bool, err error, format string, args ...any) error {
	if !done {
		return err
	}
	return ExitWith(ExitCode(err), fmt.Errorf(format+": %w", append(args, err)...))
}

// ExitError carries an exit status; with an empty text nothing is printed.
type ExitError struct {
	code int
	err  error
}

// Error is what is printed.
func (e *ExitError) Error() string {
	if e.err == nil {
		return ""
	}
	return e.err.Error()
}

// Unwrap is the error without its exit status.
func (e *ExitError) Unwrap() error { return e.err }

// ExitWith is err as the end of a command, with an exit status of its own.
func ExitWith(code int, err error) error { return &ExitError{code, err} }

// Fail ends a command with code, after it has printed what there is to say.
func Fail(code int) error { return &ExitError{code: code} }

// UsageError is err as wrong usage: nothing has happened.
func UsageError(err error) error { return ExitWith(ExitUsage, err) }

// Usagef is an error of wrong usage: nothing has happened.
func Usagef(format string, args ...any) error { return UsageError(fmt.Errorf(format, args...)) }

// ExitCode is the exit status of a command that ends with err. It tells what is known of its effect.
func ExitCode(err error) int {
	var e *ExitError
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &e):
		return e.code
	case is(client.ErrUnknownOutcome, dirclient.ErrUnknownOutcome):
		return ExitUnknown
	case is(client.ErrNotFound, client.ErrExists, client.ErrConflict, client.ErrNotInteger, client.ErrOverflow):
		return ExitNo
	case is(client.ErrInvalid, client.ErrTxnTooLarge, client.ErrNoNamespace, providers.ErrUnknown):
		return ExitUsage
	case is(client.ErrForbidden):
		return ExitForbidden
	case is(client.ErrUnavailable, client.ErrTxnContended, client.ErrFull, client.ErrClosed, providers.ErrUnavailable,
		dirclient.ErrUnavailable, dirclient.ErrClosed,
		context.Canceled, context.DeadlineExceeded):
		return ExitUnavailable
	case is(fs.ErrNotExist, fs.ErrPermission, fs.ErrExist):
		return ExitOther
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.OutOfRange, codes.Unimplemented:
		return ExitUsage
	case codes.NotFound, codes.AlreadyExists, codes.FailedPrecondition:
		return ExitNo
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.ResourceExhausted, codes.Aborted,
		codes.DataLoss:
		return ExitUnavailable
	case codes.Unauthenticated, codes.PermissionDenied:
		return ExitForbidden
	}
	return ExitOther
}
