// Package client is the Go library of the store. It looks keys up with one-sided READs and changes them with WRITE
// and compare-and-swap. It does so in the memory of the memory nodes, without waking them.
//
// It leaves the protocol to package index, and buffers, places and queue pairs to internal/engine. It leaves
// membership to the directory. It calls the directory only to open and renew its session, to learn of map changes
// and to get memory, never for an operation.
//
// Start with [Connect], or [Open] for its [Options], and [Client]. A Client's methods may be called concurrently.
// Keys and values passed in stay the caller's and are not changed; they may be
// reused when the call returns, also with an error. Returned slices are the
// caller's.
//
// Every error tells whether the operation happened; see [Outcome].
package client

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/providers"
	"github.com/kvd-project/kvd/rdma"
)

// Definite answers: the operation completed and changed nothing.
var (
	ErrNotFound = index.ErrNotFound
	ErrExists   = index.ErrExists
	// ErrConflict: the record's version is not the one given.
	ErrConflict = index.ErrConflict
	// ErrFull: the namespace has no memory, or the key's segment no slot, left.
	// Nothing was overwritten.
	ErrFull = index.ErrFull
	// ErrNotInteger: Incr met a value that is no decimal 64-bit integer.
	ErrNotInteger = errors.New("value is not an integer")
	// ErrOverflow: Incr would leave the range of int64.
	ErrOverflow = errors.New("increment overflows int64")
	// ErrTxnTooLarge: a transaction has more than MaxTxnKeys keys or MaxTxnBytes bytes. Nothing was done.
	ErrTxnTooLarge = errors.New("transaction too large")
	// ErrTxnContended: others have kept a transaction from happening until its tries ended. Nothing was done.
	ErrTxnContended = errors.New("transaction contended")
	// ErrWrongType: the value is a collection, and the operation takes plain values only; see Type.
	ErrWrongType = errors.New("value is a collection, not plain bytes")
)

// Other errors that callers test for.
var (
	// ErrUnavailable: the store cannot be reached; the operation did not happen.
	ErrUnavailable = errors.New("store unavailable")
	// ErrUnknownOutcome: the operation may have happened.
	ErrUnknownOutcome = index.ErrUnknown
	// ErrCorrupt: memory holds bytes that no client writes; the text says where. A Scan that returns it has
	// left them out and gave everything else; any other operation did not happen.
	ErrCorrupt = errors.New("corrupt memory")
	// ErrInvalid: an argument is out of range; nothing was sent.
	ErrInvalid = errors.New("invalid argument")
	// ErrTooLarge: a value is longer than its namespace allows; nothing was sent. It comes with ErrInvalid.
	ErrTooLarge = errors.New("value too large")
	// ErrInterrupted: the store took back memory that held what a PutFrom had written so far, or its session was lost.
	// Nothing was stored, and the same PutFrom may succeed with a reader that begins anew.
	ErrInterrupted = errors.New("the value's memory was taken back while it was written")
	// ErrClosed: the Client is closed.
	ErrClosed = errors.New("client closed")
	// ErrNoNamespace: the directory knows no such namespace. A Client whose
	// namespace was deleted returns it at once, and goes on by itself when a namespace of that name exists
	// again. The operation did not happen.
	ErrNoNamespace = errors.New("unknown namespace")
	// ErrForbidden: the directory opens no session for the owner of this client's certificate; the text
	// says why. A Client whose right was revoked returns it at once, and goes on by itself when it has the right
	// again. The operation did not happen.
	ErrForbidden = errors.New("permission denied")
)

// Outcome answers "did it happen?" for an error of this package; nil is Yes.
func Outcome(err error) rdma.Outcome {
	switch {
	case err == nil:
		return rdma.Yes
	case errors.Is(err, ErrUnknownOutcome):
		return rdma.Unknown
	default:
		return rdma.No
	}
}

// Limits, in bytes.
const (
	MaxKeyLen = 1<<16 - 1
	// MaxValueLen is the most that a namespace may allow for a value, and DefaultMaxValueLen what it allows unless its
	// operator says otherwise. Client.MaxValueLen is what a Client's namespace allows.
	MaxValueLen        = layout.MaxValueLen
	DefaultMaxValueLen = layout.DefaultMaxValue
)

// Options configure a Client. The zero value of every optional field is usable.
type Options struct {
	// Directory lists gRPC addresses of directory nodes. Required.
	Directory []string
	// Namespace is the one this Client works in. Default "default".
	Namespace string
	// Provider forces one of "shm", "tcp", "verbs"; "" takes, for each memory
	// node, the best that both ends have.
	Provider string
	// Require is RequireRDMA, or empty. Then the Client reaches memory nodes by verbs alone, and never by shm, also on
	// its own machine. Open fails if there is no usable adapter. Operations fail while a memory node that they
	// need does not offer verbs, or cannot be reached by it. All these errors say why.
	Require string
	// Devices are opened providers to choose from, best first. Several Clients may share them; the caller
	// closes them after the last Client. Default: Provider, or all that
	// this machine can use, opened with TLS and closed by the Client.
	Devices []*rdma.Device
	// Name is shown to operators. Default: program name and pid.
	Name string
	// ReadOnly asks for a session without rights to write.
	ReadOnly bool
	// Lanes is the number of queue pairs to each memory node. Over tcp and verbs each has a second one beside it once
	// there was a value of 64 KiB or more. Default: GOMAXPROCS, at most 16. If every device is a tcp provider it is 1,
	// since operations that share a connection share system calls. Values of 64 KiB and more then have a lane of their
	// own beside it.
	// A lane serves a goroutine at a time, so that many let many goroutines call at once. Over shm each processor
	// has a lane for all keys that it knows a hint of, and a whole batch is one chain. All else goes to the lanes
	// to which its keys hash.
	Lanes int
	// CacheBytes bounds the hints, which say where keys were found: with a hint a GET takes one round trip, without it
	// two. A key takes 32 bytes, in tables that double as they fill. Default: a 16th of the memory that the program may
	// use, but 64 MiB at least and 1 GiB at most.
	CacheBytes int
	// MirrorBytes bounds the images of groups that the Client keeps besides; 0: none. It READs all groups for it while
	// keys without a hint are asked for, 4 MB a second at most. Stats counts that as Rounds and Ops of kind scan. A
	// GET of a key without a hint then takes one round trip where an image has the key, and a PUT one less. The Client
	// may never have seen the key. It takes 9 to 13 bytes. Images older than 1,000 reclaim epochs are not looked into.
	MirrorBytes int
	// ViewBytes is how much Views that are not released may have together, bytes. Default 1 GiB.
	ViewBytes int
	// Views is how many there may be that are not released. Default 16.
	Views int
	// OpTimeout bounds every operation; its context may end it earlier. A Txn as a whole has so much time, too, unless
	// its context says how much it has. Default 10 s.
	OpTimeout time.Duration
	// TLS protects the connections to the directory, and those of devices that the Client opens to memory
	// nodes; nil means plain text.
	TLS *tls.Config
	// TLSFiles, if set, takes the place of TLS.
	TLSFiles TLSFiles
	// Identities says how certificates name their owners. With TLS, the Client asks nothing of a directory node
	// whose certificate has another role than directory. With TLS, its own devices connect to memory nodes of the
	// role memnode alone.
	Identities Identities
	// Logger receives background errors and warnings. Default: discard.
	Logger *slog.Logger
	// Background says that the session works for the store, not for a user: it does not keep
	// its namespace from being deleted.
	Background bool
	// NoEviction has this Client neither evict from a cache nor take back expired records; other sessions do.
	NoEviction bool
	// Events, if not nil, tells of operations.
	Events *Events
	// HotKeys has the Client estimate which keys are used most, see [Client.HotKeys].
	HotKeys bool
}

// Identities says how the certificates of the store's processes name their owners and these owners' roles. The zero
// value takes SPIFFE ids, spiffe://TRUST-DOMAIN/kvd/ROLE/NAME, of any trust domain.
type Identities struct {
	TrustDomain string // the only one that counts; empty: each one that the authorities vouch for
	// roles of certificates without a SPIFFE id by an organizational unit, such as "storage=memnode"
	Units []string
}

// RequireRDMA is a value of Options.Require.
const RequireRDMA = providers.RequireRDMA

// TLSFiles names PEM files. Content that changes holds for connections that are made a second later: a
// certificate is renewed, and an authority replaced, without another Client. Files that cannot be used
// are logged, and the content in use is kept.
type TLSFiles struct {
	CA   string // authorities that the store's certificates must come from
	Cert string // this program's certificate
	Key  string // its private key
	CRL  string // lists of certificates that the authorities have revoked; empty: none has been
	// ServerName is the name that all of the store's certificates have; empty: each has the name or the IP address that
	// is called.
	ServerName string
}

// Item is a value with what the store knows of it.
type Item struct {
	Value []byte
	// Version is the compare-and-swap token: it grows with every change while
	// the key exists, and no two writes share one.
	Version uint64
	// Expires is zero for a key that does not expire.
	Expires time.Time
	// Flags are the user's: the store keeps them with the value and gives them no
	// meaning. Flags other than 0 cost four bytes a record.
	Flags uint32
	// Note is as Flags, and costs eight bytes. A gateway keeps in it what a protocol remembers of an item beside
	// the Flags, which belong to its own users. Programs that share a namespace with gateways leave it as it is, or
	// 0.
	Note uint64
	// Type says what Value is.
	Type Type
}

// Type is what a value is. Gateways keep Redis's collections in one record each, in the encodings of
// docs/collections.md. The library gives them as they are, to those who ask for them only (Op.Typed, Scan). To all
// others a collection is ErrWrongType, so that nobody takes it for text, or counts it up. A Put replaces a value of
// any type.
type Type uint8

// The types.
const (
	Plain     Type = iota // any bytes
	Hash                  // fields and their values
	Set                   // members
	SortedSet             // members, by score
	List                  // elements, by place
	Stream                // entries, by id, and groups of consumers
)

// String is the type's name as Redis has it.
func (t Type) String() string {
	if t > Stream {
		return fmt.Sprintf("type %d", uint8(t))
	}
	return [...]string{"string", "hash", "set", "zset", "list", "stream"}[t]
}

// PutOptions qualify a Put.
type PutOptions struct {
	// TTL, if not 0, is the time from now after which the key expires, in whole milliseconds.
	TTL time.Duration
	// Flags are as in Item.
	Flags uint32
	// PinUntil, if not zero, has eviction pass over what is put until then, rounded up to a second. The record keeps
	// it, wherever it moves: unlike a Pin it is not lost. It ends with the record, that is with the next Put, Update or
	// Delete of the key, and at its expiry; Unpin leaves it. A time that has come pins nothing, as does any in a
	// namespace that is no cache. It is ErrInvalid after 2105, or where no key may be pinned (kvctl namespace set
	// --max-pinned). While more is pinned than the namespace allows, pinned keys are evicted first.
	PinUntil time.Time
}

// KV is one pair of a MultiPut, or of a Scan.
type KV struct {
	Key   []byte
	Value []byte
	// Version, Expires and Len, the length of the value, are filled in by Scan, also without Value.
	Version uint64
	Len     int
	Expires time.Time
	Flags   uint32        // as in Item
	Type    Type          // of Value; MultiPut puts plain values only
	TTL     time.Duration // MultiPut only
}

// Result is one key's outcome in a MultiGet, MultiPut or MultiDelete.
type Result struct {
	Item
	Err error
}

// Cursor is where a Scan goes on; the zero Cursor starts one. It is plain data
// and may be kept.
type Cursor struct {
	Prefix  uint64 // of the shard, left-aligned
	Segment uint32
	Shard   uint32 // the array that Slot belongs to
	Slot    uint16
	Done    bool
}

// ScanOptions qualify a Scan.
type ScanOptions struct {
	// Cursor, if not nil, is where the scan begins. The scan moves it on, until the loop has ended by itself, with
	// an error or by a break. The next scan from there gives everything that this one did not, and perhaps some
	// pairs again. Default: a cursor of the scan's own, at the start.
	Cursor *Cursor
	// Count, if not 0, ends the scan after about this many pairs, at a place that a cursor can name.
	Count int
	// Match, if not nil, selects keys.
	Match func(key []byte) bool
	// KeysOnly leaves Value nil.
	KeysOnly bool
	// Expired includes keys that have expired and whose memory was not taken back yet. A Delete of such a key takes
	// that memory back, and returns ErrNotFound.
	Expired bool
}

// API lists the operations, for users who want to substitute a fake.
type API interface {
	Get(ctx context.Context, key []byte) (Item, error)
	GetInto(ctx context.Context, key, dst []byte) (n int, err error)
	Put(ctx context.Context, key, value []byte, o PutOptions) (version uint64, err error)
	PutIfAbsent(ctx context.Context, key, value []byte, o PutOptions) (version uint64, err error)
	CompareAndSwap(ctx context.Context, key []byte, version uint64, value []byte, o PutOptions) (newVersion uint64,
		err error)
	Delete(ctx context.Context, key []byte) error
	DeleteVersion(ctx context.Context, key []byte, version uint64) error
	Incr(ctx context.Context, key []byte, delta int64) (int64, error)
	Touch(ctx context.Context, key []byte, ttl time.Duration) error
	MultiGet(ctx context.Context, keys [][]byte) []Result
	MultiPut(ctx context.Context, pairs []KV) []Result
	MultiDelete(ctx context.Context, keys [][]byte) []Result
	Scan(ctx context.Context, o ScanOptions) iter.Seq2[KV, error]
	Update(ctx context.Context, key []byte, f UpdateFunc) (version uint64, err error)
	Do(ctx context.Context, ops []Op)
	GetIfChanged(ctx context.Context, key []byte, version uint64) (it Item, changed bool, err error)
	Exists(ctx context.Context, key []byte) (Info, error)
	Pin(ctx context.Context, key []byte, until time.Time) error
	Unpin(ctx context.Context, key []byte) error
	ExistsPrefix(ctx context.Context, keys [][]byte) (n int, err error)
	Count(ctx context.Context) (keys uint64, err error)
	MultiCAS(ctx context.Context, ops []Op) error
	GetRange(ctx context.Context, key []byte, off int64, dst []byte) (n int, in Info, err error)
	Open(ctx context.Context, key []byte) (*Value, error)
	MaxValueLen() int64
	PutFrom(ctx context.Context, key []byte, r io.Reader, size int64, o PutOptions) (version uint64, err error)
	View(ctx context.Context, key []byte, o ViewOptions) (*View, error)
}

var _ API = (*Client)(nil)

// Stats counts what a Client did. Doorbells, verbs and bytes are per verb as
// posted; Rounds counts round trips of operations.
type Stats struct {
	// By kind: get, exists, put, delete, modify, scan; prepare, decide, settle of transactions.
	Ops       map[string]uint64
	Rounds    map[string]uint64
	Verbs     rdma.Counters
	CacheHits uint64 // operations that began with a cached word
	// MirrorHits are keys without a hint that were found where an image of their group had them, MirrorStale such as
	// were not. MirrorBytes is what the images of the present session take.
	MirrorHits, MirrorStale uint64
	MirrorBytes             int64
	Absent                  uint64 // gets and exists that found no key
	CASLosses               uint64
	Unknown                 uint64
	// Memory of the present session, in units of 64 bytes. GrantedUnits were granted to it. FreeUnits are a part of
	// them and hold nothing. LimboUnits held records that were replaced or deleted, which somebody may still read.
	// LiveUnits are the rest, which holds records, or places that other sessions unlinked and have not handed back
	// yet.
	LimboUnits, FreeUnits, LiveUnits, GrantedUnits uint64
	// ForeignUnits are free places, in units of 64 bytes, that other sessions were granted and this
	// one unlinked. They are not among GrantedUnits; the session uses them, or hands them back.
	ForeignUnits    uint64
	Session         uint32
	Epoch, MinEpoch uint64
	// Memory that went from session to session, in units of 64 bytes, of all sessions of this Client.
	// HandedBackUnits are free places that others were granted and that went home. ReturnedUnits is granted memory
	// that was given back to be granted to anybody. ReceivedUnits is granted memory that others had unlinked and
	// that came home.
	HandedBackUnits, ReturnedUnits, ReceivedUnits uint64
	// RefusedUnits came home, or were granted, and were not taken in: the message contradicts what the
	// session knows of them. LostUnits were given up after an unknown
	// outcome, since a verb that may still land could write to them. Both are lost until their
	// extent is recalled; both are in units of 64 bytes, of all sessions of this Client.
	RefusedUnits, LostUnits uint64
	// MemoryWaits counts operations, of all sessions of this Client, that found no free place and
	// waited for memory.
	MemoryWaits uint64
	// Records that this Client removed, of all its sessions: evicted from a cache, or taken
	// back because they had expired; and the bytes of both.
	Evicted, Expired, EvictedBytes uint64
	Notes                          uint64 // access words written
	// Pins counts keys that were pinned. PinsPassed counts how often eviction passed over a pinned record of a sample.
	// PinsOver counts samples taken while more was pinned than the namespace allows, so that no pin counted. PinsBroken
	// counts pinned records that were removed early, mostly for that.
	Pins, PinsPassed, PinsOver, PinsBroken uint64
	// Mended counts damaged copies of records that operations wrote anew from good ones, of all sessions of this
	// Client. If it is not 0, memory somewhere does not keep what is written to it.
	Mended uint64
	// SweepBytes is the memory in which the session remembers the expiries of its puts. SweepForgotten counts puts
	// that found no room there: their records are found later.
	SweepBytes, SweepForgotten uint64
	// RefusedPlaces counts places that this session unlinked and could not take back,
	// because their slot words cannot be right: index memory is damaged. They
	// are lost until their extent is recalled.
	RefusedPlaces uint64
	// Connections are by memory node. Each names the provider, and the executor of atomics if that is neither this
	// client nor the memory node's own device. Examples are "shm", "tcp (CAS proxied to the adapter)" and "verbs
	// (CAS by the memory node's agent)".
	Connections map[string]string
	// Routes are the ways to memory nodes where either end has several ports of a provider, by memory node. Others are
	// not listed.
	Routes []RouteStats
	// Paths are the same by provider and reason, in a fixed order.
	Paths []Path
}

// RouteStats are of one way to a memory node: from a device of the client to an endpoint of the memory node.
type RouteStats struct {
	Node     string // its name
	Endpoint string // the provider, and behind it which one of that the endpoint is: "verbs", "verbs/2"
	Addr     string // of the endpoint
	// Port is the client's own, "mlx5_0/1"; without an adapter it is the provider.
	Port        string
	Connections int       // that go this way now
	Failed      time.Time // when it was found not to work; zero: it works as far as is known
	Err         string    // why; empty: it works
}

// Path is a provider by which a Client reaches memory nodes.
type Path struct {
	Provider string
	// Reason is a word that says why it is tcp although RDMA is within reach. That is if this machine has an adapter,
	// or the memory node offers verbs. It is empty otherwise, and over shm. "asked-for": Provider or Devices leave no
	// choice. "not-built": this program has no verbs provider. "no-adapter": there is none on this machine.
	// "adapter-unusable": there is one, but it could not be opened. "not-offered": the memory node offers no verbs.
	// "dial-failed": it does, but the connection was not made.
	Reason string
	// Detail is the same for people, as the last connection found it; empty with an empty Reason.
	Detail      string
	Connections int // memory nodes that are reached so
}
