// Package peers has the gateways that serve the same databases tell each other what happens: messages that are
// published, and keys that are written. Operators ask a gateway about its clients at the same place. They find each
// other through the directory (Meet), and each follows every other one by a stream of its own (peerspb). The stream
// says what its follower wants to hear: a gateway without subscribers and without clients that cache is told nothing.
//
// Delivery is at most once, as Redis's. A gateway that follows too slowly misses messages, which are counted. It is
// told that any key may have changed, instead of the keys; so is one whose stream ended. Queues and replies are charged
// to the gateway's buffer memory, and a peer that sends what was not asked for is cut off. With TLS both ends of a
// stream have the role gateway. The caller shows the id that it has registered, which the directory tells only gateways
// of the same databases.
//
// The meaning of messages is left to internal/gateway. Start with [Peers] and [Options]. A Peers' methods may be called
// concurrently. Those that a gateway calls while it serves do nothing on a nil *Peers: it is alone then.
//
// The shape is that of NATS's routes: a mesh of direct connections, interest sent ahead of traffic.
package peers

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/rights"
)

// Message is one that was published. It must not be changed.
type Message = peerspb.Message

// Heard is what a peer tells. It belongs to the callee.
type Heard struct {
	Messages []*Message
	Keys     [][]byte // that may have changed, in any database
	AllKeys  bool     // any key may have changed
}

// Options configure Peers.
type Options struct {
	// Listener is where peers call, which Close closes. Required.
	Listener net.Listener
	// Advertise is where they call, host:port, if that is not the Listener's address.
	Advertise string
	// TLS is for both directions; nil: in clear.
	TLS *tls.Config
	// Identities says how peers' certificates name them.
	Identities identity.Mapping
	// Meet asks the directory (dirpb.Directory's Meet), with the gateway's sessions filled in. Required.
	Meet func(context.Context, *dirpb.MeetRequest) (*dirpb.MeetReply, error)
	// Budget has the memory for what peers have still to be told, and for what they tell. Default: one of its own.
	Budget *netsrv.Budget
	// PartAfter is after how long streams end with peers that the directory does not name any more. A new leader of the
	// directory knows nobody for a moment. Default 10 s.
	PartAfter time.Duration
	// Logger receives background errors. Default: discard.
	Logger *slog.Logger
}

// Peers are the other gateways. New makes one that Start sets to work.
type Peers struct {
	o    Options
	id   string
	addr string
	ctx  context.Context
	stop context.CancelFunc
	wg   sync.WaitGroup
	door *netsrv.Door
	grpc *grpc.Server

	deliver  func(Heard)
	lost     func()
	operated Operated

	// How many followers want each; for a look without a lock.
	wantMessages, wantKeys atomic.Int32
	dropped                atomic.Uint64

	mu struct {
		sync.Mutex
		started   bool
		changed   chan struct{} // closed when anything here changes
		known     map[string]*dirpb.PeerGateway
		followers map[string]*follower // those that follow this gateway
		following map[string]*following
		unnamed   map[string]time.Time  // since when the directory has not named a peer that there is a stream with
		afar      []string              // addresses of peers that mean nothing on this machine
		interest  peerspb.FollowRequest // the latest
	}
}

const (
	idBytes = 16
	// retry is the least time between two attempts to follow a peer; it doubles up to maxRetry.
	retry, maxRetry = 20 * time.Millisecond, 2 * time.Second
	// meetWait is how long the directory may hold back a list that is known.
	meetWait = time.Second
	// maxConns is how many peers may call at a time: one each, and a new one while the old one has not been missed.
	maxConns = 4096
	// maxReply bounds a reply: the longest message, and as much again as a queue holds.
	maxReply   = 160 << 20
	maxHeader  = 8 << 10
	connectFor = 5 * time.Second
	// keepalive finds a peer that is gone without a word.
	keepaliveTime, keepaliveTimeout = 5 * time.Second, 3 * time.Second
)

// allowed is which roles may call what.
var allowed = rights.Table{
	peerspb.Gateways_Follow_FullMethodName:      identity.RolesOf(identity.Gateway),
	peerspb.Gateways_Describe_FullMethodName:    identity.RolesOf(identity.Operator),
	peerspb.Gateways_ListClients_FullMethodName: identity.RolesOf(identity.Operator),
	peerspb.Gateways_SlowLog_FullMethodName:     identity.RolesOf(identity.Operator),
	peerspb.Gateways_KillClient_FullMethodName:  identity.RolesOf(identity.Operator),
}

// New prepares Peers and takes over the Listener.
func New(o Options) (*Peers, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.PartAfter == 0 {
		o.PartAfter = 10 * time.Second
	}
	if o.Budget == nil {
		o.Budget = netsrv.NewBudget(0)
	}
	p := &Peers{o: o, addr: o.Advertise}
	if p.addr == "" {
		p.addr = o.Listener.Addr().String()
	}
	var id [idBytes]byte
	rand.Read(id[:])
	p.id = string(id[:])
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.mu.changed = make(chan struct{})
	p.mu.known = make(map[string]*dirpb.PeerGateway)
	p.mu.followers = make(map[string]*follower)
	p.mu.following = make(map[string]*following)
	p.mu.unnamed = make(map[string]time.Time)
	if err := p.uncovered(); err != nil {
		o.Logger.Warn("other gateways and operators cannot call this gateway: give it a certificate for that "+
			"address, or set the setting to one that the certificate covers", "addr", p.addr, "err", err)
	}
	var err error
	if p.door, err = netsrv.NewDoor(netsrv.Limits{MaxConns: maxConns, HandshakeTimeout: connectFor,
		Logger: o.Logger}); err != nil {
		return nil, err
	}
	so := []grpc.ServerOption{grpc.ConnectionTimeout(connectFor), grpc.MaxConcurrentStreams(16),
		grpc.MaxRecvMsgSize(4 << 10), grpc.MaxHeaderListSize(maxHeader),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true})}
	if o.TLS != nil {
		welcome := func(cs tls.ConnectionState) error { return certs.StillWelcome(o.TLS, cs) }
		so = append(so, allowed.ServerOptions(o.Identities, welcome, o.Logger)...)
		so = append(so, grpc.Creds(credentials.NewTLS(o.TLS)))
	}
	p.grpc = grpc.NewServer(so...)
	peerspb.RegisterGatewaysServer(p.grpc, service{p: p})
	return p, nil
}

// Start begins to meet and to follow. deliver takes what each peer tells, in its order; those of several peers are
// called at the same time. lost says that a peer may have written keys without telling: its stream began or ended. o
// answers operators.
func (p *Peers) Start(deliver func(Heard), lost func(), o Operated) {
	p.mu.Lock()
	p.deliver, p.lost, p.operated, p.mu.started = deliver, lost, o, true
	p.mu.Unlock()
	// nil after Stop; a lost listener shows in peers that cannot call
	p.wg.Go(func() { _ = p.grpc.Serve(p.door.Listen(p.o.Listener)) })
	p.wg.Go(p.meet)
}

// Close says goodbye to the directory, if that is there, and ends the streams.
func (p *Peers) Close() error {
	p.mu.Lock()
	started := p.mu.started
	p.mu.Unlock()
	p.stop()
	p.grpc.Stop()
	if !started {
		return p.o.Listener.Close()
	}
	p.wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	// else it is forgotten after some seconds
	_, _ = p.o.Meet(ctx, &dirpb.MeetRequest{Id: []byte(p.id), Addr: p.addr, Leaves: true})
	return nil
}

// Addr is where peers call, as the directory tells them.
func (p *Peers) Addr() string { return p.addr }

// Door counts the connections of peers, for metrics.
func (p *Peers) Door() *netsrv.Door { return p.door }

// Stats are counted since the start, but for the peers.
type Stats struct {
	Known     int    // peers that the directory names
	Following int    // of them, followed now
	Followers int    // that follow this gateway
	Dropped   uint64 // messages that followers were too slow for
}

// Stats may be called at any time, of a nil *Peers too.
func (p *Peers) Stats() (s Stats) {
	if p == nil {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s = Stats{Known: len(p.mu.known), Followers: len(p.mu.followers), Dropped: p.dropped.Load()}
	for _, f := range p.mu.following {
		if f.heard > 0 {
			s.Following++
		}
	}
	return s
}

// changedLocked wakes those who wait for a change.
func (p *Peers) changedLocked() {
	close(p.mu.changed)
	p.mu.changed = make(chan struct{})
}

// meet keeps the list of peers.
func (p *Peers) meet() {
	news, failures := uint64(0), 0
	for p.ctx.Err() == nil {
		r, err := p.o.Meet(p.ctx, &dirpb.MeetRequest{Id: []byte(p.id), Addr: p.addr, HostId: hostid.ID(),
			Trouble: p.trouble(), News: news, WaitMillis: uint64(meetWait.Milliseconds())})
		if err != nil {
			if failures++; failures == 1 && p.ctx.Err() == nil {
				p.o.Logger.Warn("the directory does not name other gateways", "err", err)
			}
			p.pause(min(retry<<min(failures, 10), maxRetry))
			continue
		}
		failures = 0
		if r.News != news {
			news = r.News
			p.learn(r.Gateways)
		}
		p.partUnnamed(time.Now())
	}
}

func (p *Peers) pause(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-p.ctx.Done():
	}
}

// partUnnamed ends the streams with peers that the directory has not named for long: they may have lost the right to
// hear.
func (p *Peers) partUnnamed(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	end := make(map[string][]context.CancelCauseFunc)
	for id, f := range p.mu.followers {
		end[id] = append(end[id], f.cancel)
	}
	for id, f := range p.mu.following {
		if f.cancel != nil {
			end[id] = append(end[id], f.cancel)
		}
	}
	for id := range p.mu.unnamed {
		if p.mu.known[id] != nil || end[id] == nil {
			delete(p.mu.unnamed, id)
		}
	}
	for id, all := range end {
		switch since, is := p.mu.unnamed[id]; {
		case p.mu.known[id] != nil:
		case !is:
			p.mu.unnamed[id] = now
		case now.Sub(since) >= p.o.PartAfter:
			for _, cancel := range all {
				cancel(errUnnamed)
			}
		}
	}
}

// learn takes a new list of peers. A peer that is not in it any more, as after a change of the directory's leader, is
// followed for a while yet.
func (p *Peers) learn(list []*dirpb.PeerGateway) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ctx.Err() != nil {
		return
	}
	clear(p.mu.known)
	p.mu.afar = nil
	for _, g := range list {
		id := string(g.Id)
		if len(id) != idBytes || id == p.id {
			continue
		}
		p.mu.known[id] = g
		if p.mu.following[id] != nil {
			continue
		}
		if !reachable(g) {
			p.mu.afar = append(p.mu.afar, g.Addr)
			p.o.Logger.Warn("a gateway on another machine listens for peers on its own only: set its listen-peers",
				"addr", g.Addr)
			continue
		}
		f := &following{peer: g, kick: make(chan struct{}, 1)}
		p.mu.following[id] = f
		p.wg.Go(func() { p.keepFollowing(f) })
	}
	p.changedLocked()
}

// reachable reports whether a peer's address means something on this machine.
func reachable(g *dirpb.PeerGateway) bool {
	host, _, err := net.SplitHostPort(g.Addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host != "localhost" && (ip == nil || !ip.IsLoopback()) || hostid.Same(g.HostId, hostid.ID())
}

// Want says what this gateway wants to hear from now on. A peer that is met later hears it first of all.
func (p *Peers) Want(messages, keys bool) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	q := &p.mu.interest
	if q.Messages == messages && q.Keys == keys {
		return
	}
	q.Messages, q.Keys = messages, keys
	q.Number++
	for _, f := range p.mu.following {
		select {
		case f.kick <- struct{}{}:
		default: // it is about to look
		}
	}
}

// AwaitHeard waits until the peers that are followed have heard what was wanted last, at most until ctx ends. It calls
// waits, if not nil, before it waits.
func (p *Peers) AwaitHeard(ctx context.Context, waits func()) {
	if p == nil {
		return
	}
	p.mu.Lock()
	number := p.mu.interest.Number + 1 // as streams count
	for !p.isHeardLocked(number) {
		changed := p.mu.changed
		p.mu.Unlock()
		if waits != nil {
			waits()
			waits = nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
		p.mu.Lock()
	}
	p.mu.Unlock()
}

func (p *Peers) isHeardLocked(number uint64) bool {
	for _, f := range p.mu.following {
		if f.heard > 0 && f.heard < number {
			return false
		}
	}
	return true
}

// Publish tells peers of a message, which it copies. It never waits.
func (p *Peers) Publish(shard bool, channel, payload []byte) {
	if p == nil || p.wantMessages.Load() == 0 {
		return
	}
	both := make([]byte, 0, len(channel)+len(payload))
	both = append(append(both, channel...), payload...)
	m := &Message{Channel: both[:len(channel):len(channel)], Payload: both[len(channel):], Shard: shard}
	p.tell(func(f *follower) { f.addMessage(m) })
}

// WantsMessages reports whether Publish has anybody to tell.
func (p *Peers) WantsMessages() bool { return p != nil && p.wantMessages.Load() > 0 }

// WantsKeys reports whether Changed has anybody to tell.
func (p *Peers) WantsKeys() bool { return p != nil && p.wantKeys.Load() > 0 }

// Changed tells peers of keys that were written, which it copies; none: any key may have been. It never waits.
func (p *Peers) Changed(keys ...[]byte) {
	if !p.WantsKeys() {
		return
	}
	own := make([][]byte, len(keys))
	for i, k := range keys {
		own[i] = append([]byte(nil), k...)
	}
	p.tell(func(f *follower) { f.addKeys(own) })
}

func (p *Peers) tell(f func(*follower)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range p.mu.followers {
		f(x)
	}
}

// errUnnamed ends the streams with a peer that is none any more.
var errUnnamed = errors.New("the directory does not name the gateway any more")

// errReplaced ends the stream of a follower that has called again.
var errReplaced = errors.New("the gateway follows by another stream")
