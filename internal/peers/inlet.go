package peers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	pb "google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
)

// inlet is what a stream takes from a peer: no more than was asked for, and no more memory than the Budget has. It
// counts bytes as they come, since gRPC holds a reply until it is whole, and looks at a reply before it is decoded,
// since two bytes may become a hundred.
type inlet struct {
	ctx   context.Context
	share *netsrv.Share
	mu    struct {
		sync.Mutex
		asked   []ask // in order, from the latest on that the peer has heard
		pending int64 // bytes that came and are not decoded
		held    int64 // of the Share, for them
		whole   int64 // of the Share, for the reply that was decoded last
		read    time.Time
		closed  bool
	}
}

// ask is a request that was sent.
type ask struct {
	number         uint64
	messages, keys bool
}

const (
	// freeBytes may come in any case: replies that bring nothing, and what keeps the connection alive, of which there
	// may be freeRate bytes a second.
	freeBytes, freeRate = 64 << 10, 1 << 10
	takeStep            = 1 << 20
	maxAsked            = 64
	// mostItems is more than a queue holds of messages and keys.
	mostItems = (maxQueue + maxQueue/8) / perItem
	// itemBytes is what a message or a key takes decoded, besides its bytes.
	itemBytes = 192
	// budgetPatience is how long a peer is not read from while there is no memory.
	budgetPatience = time.Second
)

var errUnasked = errors.New("the peer sends what nobody asked for")

// asks notes a request that is about to be sent.
func (in *inlet) asks(q *peerspb.FollowRequest) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.mu.asked = append(in.mu.asked, ask{q.Number, q.Messages, q.Keys})
	if a := in.mu.asked; len(a) > maxAsked { // a peer that answers none
		a[1] = ask{a[0].number, a[0].messages || a[1].messages, a[0].keys || a[1].keys}
		in.mu.asked = a[1:]
	}
}

// wantedLocked is what requests up to a number, or all, ask for.
func (in *inlet) wantedLocked(upTo uint64) (messages, keys bool) {
	for _, q := range in.mu.asked {
		if q.number <= upTo {
			messages, keys = messages || q.messages, keys || q.keys
		}
	}
	return messages, keys
}

// came charges for n bytes that were read from the peer.
func (in *inlet) came(n int) error {
	in.mu.Lock()
	now := time.Now()
	m := &in.mu
	if m.read.IsZero() {
		m.read = now
	}
	m.pending = max(0, m.pending-freeRate*int64(now.Sub(m.read)/time.Second)) + int64(n)
	if now.Sub(m.read) >= time.Second {
		m.read = now
	}
	more := m.pending - freeBytes - m.held
	messages, keys := in.wantedLocked(^uint64(0))
	in.mu.Unlock()
	switch {
	case more <= 0:
		return nil
	case !messages && !keys:
		return errUnasked
	}
	more = (more + takeStep - 1) / takeStep * takeStep
	if err := in.share.Take(in.ctx, more, budgetPatience); err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if m.closed {
		in.share.Drop(more)
		return net.ErrClosed
	}
	m.held += more
	return nil
}

// checkReply checks a reply, and charges for what it becomes.
func (in *inlet) checkReply(b []byte) error {
	var r struct{ heard, messages, keys, bytes uint64 }
	all := false
	for at := b; len(at) > 0; {
		num, kind, n := protowire.ConsumeTag(at)
		if n < 0 {
			return protowire.ParseError(n)
		}
		at = at[n:]
		if n = protowire.ConsumeFieldValue(num, kind, at); n < 0 {
			return protowire.ParseError(n)
		}
		switch num {
		case 1:
			if kind == protowire.VarintType {
				r.heard, _ = protowire.ConsumeVarint(at)
			}
		case 2:
			r.messages++
			r.bytes += uint64(n)
		case 3:
			r.keys++
			r.bytes += uint64(n)
		case 4:
			all = true
		}
		at = at[n:]
		if r.messages+r.keys > mostItems {
			return fmt.Errorf("the peer sends more than %d messages and keys at once", mostItems)
		}
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	// A reply may bring what an earlier request of this time asked for.
	asked := in.mu.asked
	if len(asked) == 0 || r.heard < asked[0].number || r.heard > asked[len(asked)-1].number {
		return fmt.Errorf("the peer has heard request %d, which was not sent", r.heard)
	}
	messages, keys := in.wantedLocked(r.heard)
	for len(asked) > 1 && asked[0].number < r.heard {
		asked = asked[1:]
	}
	in.mu.asked = asked
	items := r.messages + r.keys
	switch {
	case r.messages > 0 && !messages, (r.keys > 0 || all) && !keys:
		return errUnasked
	case items > 1 && r.bytes+perItem*items > mostItems*perItem:
		return fmt.Errorf("the peer sends %d messages and %d keys of %d bytes at once", r.messages, r.keys, r.bytes)
	}
	whole := int64(itemBytes * items)
	if len(b) > freeBytes {
		whole += 2 * int64(len(b)) // gRPC's copy in one piece, and the fields'; then what subscribers are sent
	}
	if !in.share.Try(whole) {
		return netsrv.ErrBudget
	}
	in.mu.whole = whole
	return nil
}

// decoded says that a reply of so many bytes is not in pieces any more.
func (in *inlet) decoded(n int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.mu.pending = max(0, in.mu.pending-int64(n+n/64+64)) // what frames and TLS add to it
	if keep := max(0, in.mu.pending-freeBytes); keep < in.mu.held {
		in.share.Drop(in.mu.held - keep)
		in.mu.held = keep
	}
}

// delivered says that the latest reply has gone on.
func (in *inlet) delivered() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.share.Drop(in.mu.whole)
	in.mu.whole = 0
}

// close gives all memory back. A last Read may still be under way.
func (in *inlet) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.mu.closed = true
	in.share.Drop(in.mu.held + in.mu.whole)
	in.share.Close()
}

// inletConn is a connection that an inlet watches.
type inletConn struct {
	net.Conn
	in *inlet
}

// Read is of net.Conn.
func (c inletConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil {
		err = c.in.came(n)
	}
	return n, err
}

// replies is gRPC's codec, which has an inlet look at each reply.
type replies struct {
	encoding.CodecV2
	in *inlet
}

func (in *inlet) codec() encoding.CodecV2 { return replies{encoding.GetCodecV2(proto.Name), in} }

// Unmarshal is of encoding.CodecV2.
func (c replies) Unmarshal(data mem.BufferSlice, v any) error {
	r, is := v.(*peerspb.FollowReply)
	if !is {
		return c.CodecV2.Unmarshal(data, v)
	}
	n := data.Len()
	defer c.in.decoded(n)
	buf := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buf.Free()
	if err := c.in.checkReply(buf.ReadOnlyData()); err != nil {
		return err
	}
	return pb.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(buf.ReadOnlyData(), r)
}
