package peers

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/wrongport"
)

// follower is a peer that follows this gateway, and what it has still to be told.
type follower struct {
	p      *Peers
	cancel context.CancelCauseFunc
	share  *netsrv.Share
	wake   chan struct{} // capacity 1
	mu     struct {
		sync.Mutex
		next           *peerspb.FollowReply // nil: nothing to tell
		size           int                  // bytes of next
		heard          uint64
		messages, keys bool // wanted
	}
}

const (
	// maxQueue bounds what a follower has still to be told, in bytes; a message that is longer goes alone. perItem is
	// what each message or key takes besides its bytes.
	maxQueue, perItem = 16 << 20, 64
	// introduceFor is how long a follower that the directory has not named yet may wait for that.
	introduceFor = 3 * time.Second
)

// beginLocked begins the next reply, if there is none yet.
func (f *follower) beginLocked() {
	if f.mu.next == nil {
		f.mu.next = &peerspb.FollowReply{}
		select {
		case f.wake <- struct{}{}:
		default:
		}
	}
}

// charged is what n bytes of the queue cost: as they are, and encoded.
func charged(n int) int64 { return 2 * int64(n) }

// roomLocked makes room for an item of n bytes in the next reply, or reports that the follower is too slow.
func (f *follower) roomLocked(n int) bool {
	n += perItem
	if f.mu.size > 0 && f.mu.size+n > maxQueue || !f.share.Try(charged(n)) {
		return false
	}
	f.beginLocked()
	f.mu.size += n
	return true
}

func (f *follower) addMessage(m *Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case !f.mu.messages:
	case f.roomLocked(len(m.Channel) + len(m.Payload)):
		f.mu.next.Messages = append(f.mu.next.Messages, m)
	default:
		f.p.dropped.Add(1)
	}
}

// addKeys tells of keys, of all of them if there are none.
func (f *follower) addKeys(keys [][]byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.mu.keys {
		return
	}
	all := len(keys) == 0
	for _, k := range keys {
		if f.mu.next != nil && f.mu.next.AllKeys {
			return
		}
		if all = !f.roomLocked(len(k)); all {
			break
		}
		f.mu.next.Keys = append(f.mu.next.Keys, k)
	}
	if !all {
		return
	}
	f.beginLocked()
	freed := 0
	for _, k := range f.mu.next.Keys {
		freed += len(k) + perItem
	}
	f.mu.size -= freed
	f.share.Drop(charged(freed))
	f.mu.next.Keys, f.mu.next.AllKeys = nil, true
}

// want takes a follower's request, which holds from here on.
func (f *follower) want(q *peerspb.FollowRequest) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.p.wantMessages.Add(bit(q.Messages) - bit(f.mu.messages))
	f.p.wantKeys.Add(bit(q.Keys) - bit(f.mu.keys))
	f.mu.messages, f.mu.keys, f.mu.heard = q.Messages, q.Keys, q.Number
	f.beginLocked() // an answer is due
}

func bit(b bool) int32 {
	if b {
		return 1
	}
	return 0
}

// take gives what is to be told next, or nil, and what the share holds for it.
func (f *follower) take() (r *peerspb.FollowReply, held int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	r, held = f.mu.next, charged(f.mu.size)
	if r != nil {
		r.Heard = f.mu.heard
	}
	f.mu.next, f.mu.size = nil, 0
	return r, held
}

// service is what peers call.
type service struct {
	peerspb.UnimplementedGatewaysServer
	p *Peers
}

// Follow serves a follower until either end is gone.
func (s service) Follow(stream grpc.BidiStreamingServer[peerspb.FollowRequest, peerspb.FollowReply]) error {
	p := s.p
	q, err := stream.Recv()
	if err != nil {
		return err
	}
	id := string(q.Id)
	if err := p.introduced(stream.Context(), id); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	f := &follower{p: p, cancel: cancel, wake: make(chan struct{}, 1)}
	f.share = p.o.Budget.Share(func(int64) { cancel(netsrv.ErrBudget) })
	p.mu.Lock()
	if was := p.mu.followers[id]; was != nil {
		was.cancel(errReplaced)
	}
	p.mu.followers[id] = f
	p.mu.Unlock()
	f.want(q)
	defer func() {
		p.mu.Lock()
		if p.mu.followers[id] == f {
			delete(p.mu.followers, id)
		}
		p.mu.Unlock()
		f.want(&peerspb.FollowRequest{}) // nothing is added any more
		f.share.Drop(f.share.Held())
		f.share.Close()
	}()
	go func() { // ends with the stream
		for {
			q, err := stream.Recv()
			if err != nil {
				cancel(err)
				return
			}
			f.want(q)
		}
	}()
	for {
		select {
		case <-f.wake:
		case <-ctx.Done():
			return status.Error(codes.Aborted, context.Cause(ctx).Error())
		case <-p.ctx.Done():
			return status.Error(codes.Unavailable, "the gateway stops")
		}
		if r, held := f.take(); r != nil {
			err := stream.Send(r)
			f.share.Drop(held)
			if err != nil {
				return err
			}
		}
	}
}

// introduced waits until the directory names a gateway of this id.
func (p *Peers) introduced(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, introduceFor)
	defer cancel()
	for {
		p.mu.Lock()
		changed, known := p.mu.changed, p.mu.known[id] != nil
		p.mu.Unlock()
		if known {
			return nil
		}
		select {
		case <-changed:
		case <-p.ctx.Done():
			return status.Error(codes.Unavailable, "the gateway stops")
		case <-ctx.Done():
			return status.Error(codes.PermissionDenied, "the directory names no such gateway among those that serve "+
				"the same databases")
		}
	}
}

// following is a peer that this gateway follows.
type following struct {
	peer *dirpb.PeerGateway
	kick chan struct{} // capacity 1: the interest has changed
	// Guarded by Peers.mu: the latest request that the peer has heard, 0 while there is no stream, and what ends the
	// stream.
	heard  uint64
	cancel context.CancelCauseFunc
	// Guarded likewise: since when it is not followed, zero if it is, and why.
	since time.Time
	why   error
}

// keepFollowing follows a peer until the directory does not name it any more and its stream has ended.
func (p *Peers) keepFollowing(f *following) {
	id := string(f.peer.Id)
	for failures := 0; ; {
		began := time.Now()
		err := p.follow(f)
		p.mu.Lock()
		heard := f.heard > 0
		f.heard = 0
		if f.why = err; heard || f.since.IsZero() {
			f.since = time.Now()
		}
		gone := p.mu.known[id] == nil || p.ctx.Err() != nil
		if gone {
			delete(p.mu.following, id)
		}
		p.changedLocked()
		p.mu.Unlock()
		if heard && p.ctx.Err() == nil {
			p.lost()
		}
		if gone {
			return
		}
		if failures++; heard && time.Since(began) > maxRetry {
			failures = 1
		}
		if failures == 1 || failures%64 == 0 {
			p.o.Logger.Warn("another gateway is not followed", "peer", f.peer.Addr, "err", err)
		}
		p.pause(min(retry<<min(failures, 10), maxRetry))
	}
}

// follow is one stream, from its first request to its end. Requests are numbered from 1 on in it.
func (p *Peers) follow(f *following) error {
	creds := insecure.NewCredentials()
	if p.o.TLS != nil {
		host, _, err := net.SplitHostPort(f.peer.Addr)
		if err != nil {
			return err
		}
		conf, err := certs.ForHost(p.o.Identities.Called(p.o.TLS, identity.Gateway), host)
		if err != nil {
			return err
		}
		creds = credentials.NewTLS(conf)
	}
	ctx, cancel := context.WithCancelCause(p.ctx)
	defer cancel(nil)
	p.mu.Lock()
	f.cancel = cancel
	p.mu.Unlock()
	in := &inlet{ctx: ctx, share: p.o.Budget.Share(func(int64) { cancel(netsrv.ErrBudget) })}
	defer in.close()
	dial := func(ctx context.Context, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		return inletConn{c, in}, nil
	}
	conn, err := grpc.NewClient("passthrough:///"+f.peer.Addr,
		grpc.WithTransportCredentials(wrongport.Creds(creds, "a gateway's listen-peers", nil)), grpc.WithNoProxy(),
		grpc.WithContextDialer(dial), grpc.WithDisableServiceConfig(),
		grpc.WithMaxHeaderListSize(maxHeader), grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxReply),
			grpc.ForceCodecV2(in.codec())),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 2 * keepaliveTime, Timeout: keepaliveTimeout}))
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := peerspb.NewGatewaysClient(conn).Follow(ctx)
	if err != nil {
		return err
	}
	send := func() error {
		p.mu.Lock()
		q := &peerspb.FollowRequest{Number: p.mu.interest.Number + 1, Messages: p.mu.interest.Messages,
			Keys: p.mu.interest.Keys}
		p.mu.Unlock()
		q.Id = []byte(p.id)
		in.asks(q)
		return stream.Send(q)
	}
	if err := send(); err != nil {
		return err
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		for {
			select {
			case <-f.kick:
			case <-ctx.Done():
				return
			}
			if send() != nil {
				return // Recv says why
			}
		}
	})
	for {
		r, err := stream.Recv()
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		p.mu.Lock()
		first := f.heard == 0
		if r.Heard > f.heard {
			f.heard = r.Heard
			p.changedLocked()
		}
		p.mu.Unlock()
		if first {
			p.lost()
		}
		if len(r.Messages)+len(r.Keys) > 0 || r.AllKeys {
			p.deliver(Heard{r.Messages, r.Keys, r.AllKeys})
		}
		in.delivered()
	}
}
