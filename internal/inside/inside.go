// Package inside is the back door to package client, for the programs of the store itself. The janitor performs
// repairs through it, and kvctl looks at bytes. Gateways learn by it of an operation that is about to wait.
//
// These tools name types of internal packages, and they change with the protocol. So they are no part of the public
// API of package client: a user could neither name their types nor rely on them. A method cannot be exported to one
// module only. Therefore package client registers here, when it is initialised, how the tools of one of its Clients
// are reached. Everything else is in package client.
//
// Start with [Of], whose [Tools] are as concurrent as the Client is, and [OnWait]. The results of Tools are
// the caller's, but for a View, which is shared and must not be changed.
//
// The form is that of package internal of grpc-go: a hook that the package with the state fills in. It keeps the
// public documentation to what users need.
package inside

import (
	"context"
	"fmt"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/index/repair"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// Tools are what the programs of the store use of a Client besides its API. Its methods may be called
// concurrently. Their errors are those of package client.
type Tools interface {
	// Locate tells where key lives under the present map.
	Locate(key []byte) (Location, error)
	// ReadRaw reads n bytes at offset off of one replica's region, both in bytes. They may change while they are read.
	ReadRaw(ctx context.Context, pg uint32, replica int, off uint64, n int) ([]byte, error)
	// LastUse is how long ago the use of key was last noted; noted is false if the namespace's placement groups keep no
	// such notes, as only caches do. 0: it is not known, or just now. The error is ErrNotFound of package client
	// without such a key.
	LastUse(ctx context.Context, key []byte) (ago time.Duration, noted bool, err error)
	// Memory is how many bytes records take in the namespace, of all sessions, as the directory and this Client know
	// it; how many they may take, 0 if that is not known yet; and whether the namespace evicts. It asks nobody.
	Memory() (used, most uint64, evicts bool)
	// Session is the id of the session in force. It waits while a lost one is being replaced.
	Session(ctx context.Context) (uint32, error)
	// ViewAtLeast waits for a map of at least the version given. The View must not be changed.
	ViewAtLeast(ctx context.Context, version uint64) (*engine.View, error)
	// UnderWay marks this moment: over reports whether every operation, of any session, that was under way then has
	// ended, so that its verbs have completed or can have no effect any more. over never says so once the session in
	// force at the call is lost.
	UnderWay(ctx context.Context) (over func() bool, err error)
	// PutGiven puts records whose versions are given, and leaves in each what came of it. Each is an operation of its
	// own.
	PutGiven(ctx context.Context, records []Given)
	// Work performs a janitor's operations of one kind, several at a time, and leaves
	// what they found in each. Errors stand in the order of works.
	Work(ctx context.Context, kind index.Kind, works []*repair.Work) []error
}

// Location is where a key lives.
type Location struct {
	PG, ShardID             uint32
	Home, Stash             uint64 // region offsets of its home and stash group, in bytes
	RegionBytes, IndexBytes uint64
	AccessBytes             uint64 // IndexBytes, or 0: no access words
	Hash                    uint64
	Replicas                int
}

// Given is a record that stood in a store before, such as one of a snapshot. It is put unless the key has a record of
// the same version or a later one, be it expired. So versions of a key only grow. Two records of one key and one
// version are equal if both come of one namespace.
type Given struct {
	Key   []byte
	Value []byte             // with the tail that Flags tell of
	Flags layout.RecordFlags // of layout.FlagsOfValue
	// Version is at most ten minutes ahead of the clock; else the record is refused as invalid.
	Version uint64
	Expiry  uint64 // Unix ms; 0: never

	// Err is ErrConflict of package client if the key has such a record. Found is its version then, if not 0.
	Err   error
	Found uint64
}

var toolsOf func(c any) (Tools, bool)

// Register tells how the tools of a Client are reached; ok is false if c is no Client. Package client calls it
// once, in an init function.
func Register(of func(c any) (t Tools, ok bool)) { toolsOf = of }

// Of gives the tools of c, a *client.Client; anything else is a mistake in the program, and panics.
func Of(c any) Tools {
	if t, ok := Find(c); ok {
		return t
	}
	panic(fmt.Sprintf("inside: %T is no *client.Client", c))
}

// Find is Of for what may be something else.
func Find(c any) (t Tools, ok bool) {
	if toolsOf == nil {
		return nil, false
	}
	return toolsOf(c)
}

// FunctionsKey is the name of the key in which gateways keep the libraries of functions. Its value is what FUNCTION
// DUMP returns, and to delete it is FUNCTION FLUSH. Gateways neither show it to their clients nor let them name it, by
// whatever protocol (see [IsOwn]). A cache may evict it.
const FunctionsKey = "\x00kvd: libraries of functions"

// EmptyKey is the name of the key in which gateways keep what has the empty name for clients of Redis's protocol.
// They need it because a record has a key of one byte at least. Clients name it by the empty name alone (see [IsOwn]).
const EmptyKey = "\x00kvd: the empty key. In the protocol of Redis a key may have no bytes, in the store it has one " +
	"at least. " +
	"Clients of gateways read and write the value of this key by the empty name, and by no other: " +
	"it is an ordinary key of its namespace, which expires, is evicted and is deleted like any."
