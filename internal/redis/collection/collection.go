// Package collection encodes Redis's collections: hashes, sets, sorted sets, lists and streams, each as the value of
// one record.
// docs/collections.md has the bytes.
//
// It is pure: a change makes the new value of the old one and copies the bytes that stay as they are. Functions
// append to a buffer of the caller's and keep nothing. Everything they parse is hostile until checked; a failed check
// is ErrCorrupt, never a panic. All of it may be used concurrently.
package collection

import "errors"

// MaxLen bounds an encoded collection, in bytes. Every change copies all of it.
const MaxLen = 4 << 20

var (
	// ErrCorrupt: the bytes are no collection of this type.
	ErrCorrupt = errors.New("corrupt collection")
	// ErrTooLong: the change would make a collection longer than MaxLen. Nothing was changed.
	ErrTooLong = errors.New("collection longer than 4 MiB")
)
