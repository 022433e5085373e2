package memnode

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/alarm"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token"
)

const (
	defaultHeartbeat = 250 * time.Millisecond
	minHeartbeat     = 5 * time.Millisecond
	maxHeartbeat     = time.Minute
	// exchangeTimeout bounds one exchange with the directory, so that losing it
	// is noticed and logged.
	exchangeTimeout = 2 * time.Second
)

// errNoSessions refuses an answer by which every token would be good for ever.
var errNoSessions = errors.New("the directory does not say which sessions live: it is of an earlier version")

// run lives the node's lives in the directory's eyes, one registration each.
func (n *Node) run() {
	kept := n.warm()
	for n.ctx.Err() == nil {
		reg, ours := n.register(kept)
		if reg == nil {
			return
		}
		if ours && !n.serve(reg) {
			return
		}
		if kept = nil; !ours {
			n.setKept(KeptDisowned)
		}
		n.log.Warn("the directory does not know this memory node any more: its regions are not served any more and it registers again",
			"node_id", reg.nodeID, "incarnation", reg.incarnation)
		if !n.reset() {
			return
		}
	}
}

// register returns nil when the node is closed. A process with kept memory registers the incarnation of that; ours is false if
// the directory does not take it for what it knows, so that the memory is to be dropped.
func (n *Node) register(kept *state) (reg *registration, ours bool) {
	reg = &registration{incarnation: randomID()}
	if kept != nil {
		reg.incarnation, reg.nodeID = kept.incarnation, kept.nodeID
	}
	req := n.registering(reg)
	bo := backoff.NewExponentialBackOff()
	bo.InitialInterval, bo.MaxInterval = 20*time.Millisecond, time.Second
	for {
		var rep *dirpb.RegisterNodeReply
		err := n.call(n.ctx, exchangeTimeout, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
			rep, err = d.RegisterNode(ctx, req)
			return err
		})
		var keys []token.Key
		if err == nil {
			keys, err = keysOf(rep.GetKeys())
		}
		if err == nil && rep.GetSessions() == nil {
			err = errNoSessions
		}
		if n.ctx.Err() != nil {
			return nil, false
		}
		n.exchanged("register", err)
		if err != nil {
			if n.disowned(kept, err) {
				return reg, false
			}
			if !n.wait(bo.NextBackOff(), nil) {
				return nil, false
			}
			continue
		}
		if kept != nil && kept.cluster != rep.GetClusterId() {
			n.log.Warn("the directory is another cluster's than the one that the kept memory is of", "cluster", rep.GetClusterId(), "kept", kept.cluster)
			return reg, false
		}
		reg.nodeID = rep.GetNodeId()
		reg.interval = defaultHeartbeat
		if ms := rep.GetHeartbeatMillis(); ms != 0 {
			ms = min(ms, uint64(maxHeartbeat/time.Millisecond))
			reg.interval = max(time.Duration(ms)*time.Millisecond, minHeartbeat)
		}
		n.mu.Lock()
		if n.mu.clusterID != rep.GetClusterId() {
			// Another cluster numbers its sessions anew.
			n.mu.clusterID, n.mu.sessions = rep.GetClusterId(), sessions{}
		}
		n.takeKeysLocked(keys)
		n.learnLocked(rep.GetSessions(), nil) // before anybody may connect
		n.mu.saved = reg
		n.mu.Unlock()
		if err := n.saveState(reg); err != nil {
			n.exchanged("register", err)
			if !n.wait(bo.NextBackOff(), nil) {
				return nil, false
			}
			continue
		}
		n.mu.Lock()
		if n.ctx.Err() == nil {
			n.mu.reg = reg
		}
		n.mu.Unlock()
		n.log.Info("memory node registered", "node_id", reg.nodeID, "incarnation", reg.incarnation,
			"cluster", rep.GetClusterId(), "capacity_bytes", n.o.CapacityBytes, "heartbeat", reg.interval)
		return reg, true
	}
}

// registering is what this process says of itself.
func (n *Node) registering(reg *registration) *dirpb.RegisterNodeRequest {
	req := &dirpb.RegisterNodeRequest{
		Name:          n.o.Name,
		Incarnation:   reg.incarnation,
		Boot:          n.boot,
		Keeps:         n.o.Keeper != nil,
		HostId:        n.o.HostID,
		CapacityBytes: uint64(n.o.CapacityBytes),
		Domain:        n.o.Domain,
		Version:       n.o.Version,
		Control:       n.o.Control,
	}
	n.mu.Lock()
	req.Retained = n.offersLocked()
	n.mu.Unlock()
	for _, d := range n.devices {
		req.Endpoints = append(req.Endpoints, d.endpoint)
	}
	return req
}

// registerAgain tells a directory that has become one of a later version what the one before did not take in, and one that has
// taken this memory node out of placement groups, as it was silent, that they are dropped, and what of them is retained. The directory
// admits this process as the one that it is; if it does not get to that, the next heartbeat's reply asks again.
func (n *Node) registerAgain(reg *registration) {
	err := n.call(n.ctx, exchangeTimeout, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.RegisterNode(ctx, n.registering(reg))
		return err
	})
	if err == nil {
		n.log.Info("memory node registered again, as the directory asked: it is of a later version now, or went on without this memory node, which was silent",
			"node_id", reg.nodeID, "boot", n.boot)
	} else if n.ctx.Err() == nil {
		n.exchanged("register", err)
	}
}

// serve heartbeats until the directory disowns the registration (true) or the
// node is closed (false).
func (n *Node) serve(reg *registration) bool {
	ctx, cancel := context.WithCancel(n.ctx)
	wants := make(chan wantSet, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.keepRegions(ctx, reg, wants)
	}()
	defer func() {
		cancel()
		<-done
	}()
	news := uint64(0)
	for {
		seq := n.seq.Add(1)
		began := time.Now()
		rep, err := n.beat(reg, news)
		pause := reg.interval - time.Since(began) // which has passed if the directory had it wait for news
		switch {
		case n.ctx.Err() != nil:
			return false
		case errors.Is(err, errKicked):
			continue // it has been heard
		case err != nil:
			n.exchanged("heartbeat", err)
		case rep.GetUnknownNode() && n.leaving.Load():
			<-n.ctx.Done() // sessions may still use the regions
			return false
		case rep.GetUnknownNode() && rep.GetRestart() && n.o.Keeper != nil && n.o.Restart != nil:
			// The next process begins with what is here, or without it, as the directory wants.
			n.restarts.Do(n.o.Restart)
			<-n.ctx.Done()
			return false
		case rep.GetUnknownNode():
			return true
		default:
			n.exchanged("heartbeat", nil)
			if rep.GetNews() != news {
				news, pause = rep.GetNews(), minHeartbeat
			}
			select { // only the newest set matters
			case <-wants:
			default:
			}
			wants <- wantSet{seq, rep.GetRegions(), rep.GetRetainPgs(), rep.GetRegisterAgain()}
			select {
			case <-n.ready:
			default:
				close(n.ready)
			}
		}
		if pause > 0 && !n.wait(pause, n.kick) {
			return false
		}
	}
}

// errKicked ends a heartbeat that waits for news while this node has some.
var errKicked = errors.New("this memory node has news")

// beat sends one heartbeat, which waits for other news than these, and takes the fences out
// of the reply.
func (n *Node) beat(reg *registration, news uint64) (*dirpb.HeartbeatReply, error) {
	req := &dirpb.HeartbeatRequest{
		NodeId:      reg.nodeID,
		Incarnation: reg.incarnation,
		Boot:        n.boot,
		Stats:       &dirpb.NodeStats{DataPathCpuNanos: uint64(n.dataPathCPU())},
		News:        news,
		WaitMillis:  uint64(reg.interval / time.Millisecond),
	}
	kicked, cancel := context.WithCancelCause(n.ctx)
	defer cancel(nil)
	interrupt := func() { cancel(errKicked) }
	n.interrupt.Store(&interrupt)
	select {
	case <-n.kick: // what it was about is said now
	default:
	}
	n.mu.Lock()
	req.KeyGeneration = n.mu.keys[0].Generation // there are keys since this life was registered
	req.Stats.Connections, req.Stats.RegisteredBytes = uint64(len(n.mu.byPeer)), uint64(n.mu.used)
	for id, f := range n.mu.fencing {
		if f.confirmed && f.asked {
			req.FencedSessions = append(req.FencedSessions, id)
		}
	}
	n.mu.Unlock()
	slices.Sort(req.FencedSessions)
	// A leader that takes longer is as good as gone; another may lead by now.
	patience := min(max(4*reg.interval, exchangeTimeout/4), exchangeTimeout)
	var rep *dirpb.HeartbeatReply
	err := n.call(kicked, exchangeTimeout, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		ctx, cancel := alarm.WithTimeout(ctx, patience)
		defer cancel()
		rep, err = d.Heartbeat(ctx, req)
		return err
	})
	if n.interrupt.Store(nil); err != nil && errors.Is(context.Cause(kicked), errKicked) {
		return nil, errKicked
	}
	if err == nil && !rep.GetUnknownNode() && rep.GetSessions() == nil {
		err = errNoSessions
	}
	if err != nil || rep.GetUnknownNode() {
		return rep, err
	}
	keys, err := keysOf(rep.GetKeys())
	if err != nil {
		return rep, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.heartbeat = time.Now()
	n.takeKeysLocked(keys)
	for _, id := range req.FencedSessions {
		if !slices.Contains(rep.GetFenceSessions(), id) {
			delete(n.mu.fencing, id) // the directory has it
		}
	}
	n.learnLocked(rep.GetSessions(), rep.GetFenceSessions())
	if rep.GetRestart() && n.o.Keeper != nil && n.o.Restart != nil {
		n.restarts.Do(n.o.Restart)
	}
	n.holdToQuotasLocked(rep.GetQuotas())
	return rep, nil
}

// reset ends a life: nobody may connect, every peer is fenced, then every region
// is dropped, but for its memory, and the connections to the adapter, which nobody uses any more, end. It
// returns false when the node is closed first.
func (n *Node) reset() bool {
	n.mu.Lock()
	n.mu.reg = nil
	n.mu.fencing = map[uint32]*fence{} // the directory asks the next life anew
	n.mu.Unlock()
	fenced := n.fencePeers("every session", func() []*peer {
		peers := make([]*peer, 0, len(n.mu.byPeer))
		for _, p := range n.mu.byPeer {
			peers = append(peers, p)
		}
		return peers
	})
	if !fenced {
		return false
	}
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if n.dropUnwanted(nil, nil) == 0 {
			err := n.closeLoops(n.ctx)
			if err == nil {
				break
			}
			n.log.Error("cannot close the connections to the adapter; trying again", "err", err)
		}
		if !n.wait(pause, nil) {
			return false
		}
	}
	n.mu.Lock()
	n.mu.failures = map[uint32]*failure{}
	n.mu.Unlock()
	return true
}

// call is one exchange with the directory; ctx, which ends with the node's Close, ends it.
func (n *Node) call(ctx context.Context, timeout time.Duration, fn func(context.Context, dirpb.DirectoryClient) error) error {
	ctx, cancel := alarm.WithTimeout(ctx, timeout)
	defer cancel()
	return n.o.Directory.Call(ctx, fn)
}

// exchanged keeps and logs the outcome of talking to the directory; a failure
// that repeats is logged once.
func (n *Node) exchanged(what string, err error) {
	n.mu.Lock()
	before := n.mu.err
	n.mu.err = err
	n.mu.Unlock()
	code := status.Code(err)
	switch {
	case err == nil && before != nil:
		n.log.Info("directory answers again", "what", what)
	case (code == codes.PermissionDenied || code == codes.Unauthenticated) && code != status.Code(before):
		n.log.Error("the directory refuses this memory node; trying on, as an operator may change that", "what", what, "err", err)
	case err != nil && before == nil:
		n.log.Warn("directory does not answer; regions stay served", "what", what, "err", err)
	case err != nil && err.Error() != before.Error():
		n.log.Debug("directory still does not answer", "what", what, "err", err)
	}
}

// wait sleeps for d or until early receives; false: the node is closed.
func (n *Node) wait(d time.Duration, early <-chan struct{}) bool {
	t := alarm.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-early:
	case <-n.ctx.Done():
	}
	return n.ctx.Err() == nil
}

// kickHeartbeat makes the next heartbeat go out now.
func (n *Node) kickHeartbeat() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
	if f := n.interrupt.Load(); f != nil {
		(*f)()
	}
}
