package memnode

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cenkalti/backoff/v5"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/admit"
	"github.com/kvd-project/kvd/internal/alarm"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/keeper"
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
	var before *registration // this process's own, which the directory has to be told of anew
	for n.ctx.Err() == nil {
		reg, how := n.register(kept, before)
		if reg == nil {
			return
		}
		if how == KeptAll {
			switch n.serve(reg) {
			case lifeClosed:
				return
			case lifeAgain:
				if kept, before = nil, reg; !n.barAll() {
					return
				}
				continue
			}
		}
		if kept != nil && how != KeptAll {
			n.setKept(how)
		}
		kept, before = nil, nil
		if how == KeptPutBack { // nobody has connected, and nobody may have any of it
			n.log.Error("the memory that this process has is of an earlier time than that of the process which "+
				"registered last, as if it was put back from a copy: starting empty",
				"reason", how.String())
			n.forgetKept(how)
			continue
		}
		n.log.Warn("the directory does not know this memory node any more: its regions are not served any more and "+
			"it registers again",
			"node_id", reg.nodeID, "incarnation", reg.incarnation)
		if !n.reset() {
			return
		}
	}
}

// lifeEnd is why a registration is over.
type lifeEnd uint8

const (
	lifeDisowned lifeEnd = 1 + iota // the directory does not know it
	lifeAgain                       // the directory was recovered, and wants to be told of it anew
	lifeClosed                      // the node is closed, or ends with its process
)

// register returns nil when the node is closed. A process with kept memory registers the incarnation of that, and one
// that registers again its own. Unless it gives KeptAll the directory does not take it for what it knows: the memory is
// to be dropped, and with KeptPutBack not to be retained either.
func (n *Node) register(kept *state, before *registration) (reg *registration, how Kept) {
	reg = &registration{incarnation: dirpb.RandomID()}
	switch {
	case kept != nil:
		reg.incarnation, reg.nodeID = kept.incarnation, kept.nodeID
	case before != nil:
		reg.incarnation, reg.nodeID = before.incarnation, before.nodeID
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
		if err == nil && rep.GetRecovered() != 0 && n.ctx.Err() == nil &&
			(kept == nil || kept.cluster == rep.GetClusterId()) {
			n.heardOfRecovery(rep.GetClusterId(), rep.GetRecovered()) // nobody is connected before the registration
			req = n.registering(reg)
			continue
		}
		var keys []token.Key
		if err == nil && (kept == nil || kept.cluster == rep.GetClusterId()) {
			keys, err = admit.Keys(rep.GetKeys())
		}
		if err == nil && rep.GetSessions() == nil && rep.GetRecovered() == 0 {
			err = errNoSessions
		}
		if n.ctx.Err() != nil {
			return nil, KeptPending
		}
		n.exchanged("register", err)
		if err != nil {
			if status.Code(err) == codes.ResourceExhausted {
				n.tooSmall(kept, fmt.Errorf("%w: %w: raise memory, or drain the memory node first", ErrCapacity, err))
				return nil, KeptPending
			}
			if (kept != nil || before != nil) && n.disowned(reg, err) {
				return reg, KeptDisowned
			}
			if !n.wait(bo.NextBackOff(), nil) {
				return nil, KeptPending
			}
			continue
		}
		if kept != nil && kept.cluster != rep.GetClusterId() {
			n.log.Warn("the directory is another cluster's than the one that the kept memory is of", "cluster",
				rep.GetClusterId(), "kept", kept.cluster)
			return reg, KeptDisowned
		}
		if rep.GetStale() {
			return reg, KeptPutBack
		}
		n.keep.after = []uint64{n.nonce}
		reg.nodeID = rep.GetNodeId()
		reg.interval = defaultHeartbeat
		if ms := rep.GetHeartbeatMillis(); ms != 0 {
			ms = min(ms, uint64(maxHeartbeat/time.Millisecond))
			reg.interval = max(time.Duration(ms)*time.Millisecond, minHeartbeat)
		}
		n.mu.Lock()
		if n.mu.clusterID != rep.GetClusterId() {
			// Another cluster numbers its sessions anew.
			n.mu.clusterID, n.mu.sessions, n.mu.told = rep.GetClusterId(), admit.Sessions{}, position{}
		}
		n.mu.told.take(rep.GetPosition())
		n.takeKeysLocked(keys)
		n.learnLocked(rep.GetSessions(), nil) // before anybody may connect
		n.mu.saved = reg
		n.mu.Unlock()
		if err := n.saveState(reg); err != nil {
			n.exchanged("register", err)
			if !n.wait(bo.NextBackOff(), nil) {
				return nil, KeptPending
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
		return reg, KeptAll
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
		Nonce:         n.nonce,
		After:         n.keep.after,
	}
	n.mu.Lock()
	req.Retained = n.offersLocked()
	req.Position = n.mu.told.of(n.mu.clusterID)
	held := n.heldLocked()
	n.mu.Unlock()
	req.Held = reportHeld(held)
	for _, d := range n.devices {
		req.Endpoints = append(req.Endpoints, d.endpoint)
	}
	return req
}

// replace has another process take over, as an operator wants, if that one could serve the regions that are here.
// Otherwise it tells the directory why this one stays, which is asked for again until the directory knows.
func (n *Node) replace() {
	if n.o.MayRestart != nil {
		if err := n.o.MayRestart(n.regionBytes()); err != nil {
			n.log.Error("another process was to take over, and could not serve: this one stays", "err", err)
			n.report(err, true)
			return
		}
	}
	n.restarts.Do(n.o.Restart)
}

// regionBytes is what the regions that the directory wants here need.
func (n *Node) regionBytes() (sum int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.mu.regions {
		if !r.dying {
			sum += int64(r.want.GetRegionBytes())
		}
	}
	return sum
}

// tooSmall ends this process's part, since it lends less than the regions of its memory node need. Kept memory stays
// for another process, whose settings may be others.
func (n *Node) tooSmall(kept *state, err error) {
	if kept != nil {
		n.tryAgain(err)
		return
	}
	n.report(err, false)
	n.mu.Lock()
	n.mu.err = err
	n.mu.Unlock()
	close(n.failed)
	<-n.ctx.Done()
}

// report tells the directory, once, why this process does not serve, or with stays why no other one takes over.
func (n *Node) report(why error, stays bool) {
	err := n.call(n.ctx, exchangeTimeout, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.ReportNode(ctx, &dirpb.ReportNodeRequest{Name: n.o.Name, Trouble: keeper.Trouble(why.Error()),
			Stays: stays})
		return err
	})
	if err != nil && n.ctx.Err() == nil {
		n.log.Warn("the directory is not told what is wrong here", "err", err)
	}
}

// registerAgain tells a directory that has become one of a later version what the one before did not take in, and one
// that has taken this memory node out of placement groups, as it was silent, that they are dropped, and what of them is
// retained. The directory admits this process as the one that it is; if it does not get to that, the next heartbeat's
// reply asks again.
func (n *Node) registerAgain(reg *registration) {
	err := n.call(n.ctx, exchangeTimeout, func(ctx context.Context, d dirpb.DirectoryClient) error {
		_, err := d.RegisterNode(ctx, n.registering(reg))
		return err
	})
	if err == nil {
		n.log.Info("memory node registered again, as the directory asked: it is of a later version now, or went on "+
			"without this memory node, which was silent",
			"node_id", reg.nodeID, "boot", n.boot)
	} else if n.ctx.Err() == nil {
		n.exchanged("register", err)
	}
}

// serve heartbeats until the directory disowns the registration, wants it again, or the
// node is closed.
func (n *Node) serve(reg *registration) lifeEnd {
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
			return lifeClosed
		case errors.Is(err, errKicked):
			continue // it has been heard
		case err != nil:
			n.exchanged("heartbeat", err)
		case rep.GetRecovered() != 0:
			return lifeAgain
		case rep.GetUnknownNode() && n.leaving.Load():
			<-n.ctx.Done() // sessions may still use the regions
			return lifeClosed
		case rep.GetUnknownNode() && rep.GetRestart() && n.o.Keeper != nil && n.o.Restart != nil:
			// The next process begins with what is here, or without it, as the directory wants.
			n.restarts.Do(n.o.Restart)
			<-n.ctx.Done()
			return lifeClosed
		case rep.GetUnknownNode():
			return lifeDisowned
		default:
			n.exchanged("heartbeat", nil)
			if rep.GetRestart() && n.o.Keeper != nil && n.o.Restart != nil {
				n.replace()
			}
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
			return lifeClosed
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
	for _, d := range n.o.Devices {
		if f := d.Device.Caps().Fabric; f != nil {
			req.Stats.Fabrics = append(req.Stats.Fabrics, &dirpb.Fabric{Device: f.Device, Port: uint32(f.Port),
				GidIndex: int32(f.GIDIndex), Gid: f.GID, GidType: f.GIDType, PathMtu: uint32(f.PathMTU),
				TrafficClass: uint32(f.TrafficClass), ServiceLevel: uint32(f.ServiceLevel),
				PkeyIndex: uint32(f.PKeyIndex), Pkey: uint32(f.PKey), HopLimit: uint32(f.HopLimit),
				FlowLabel: uint32(f.FlowLabel), RetryCount: uint32(f.RetryCount), RnrRetry: uint32(f.RNRRetry),
				Timeout: uint32(f.Timeout)})
		}
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
	req.Position = n.mu.told.of(n.mu.clusterID)
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
	if err == nil && !rep.GetUnknownNode() && rep.GetRecovered() == 0 && rep.GetSessions() == nil {
		err = errNoSessions
	}
	if err != nil || rep.GetUnknownNode() || rep.GetRecovered() != 0 {
		return rep, err
	}
	keys, err := admit.Keys(rep.GetKeys())
	if err == nil {
		err = n.noteTold(reg, rep) // before anything of it is acted on
	}
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
	n.holdToQuotasLocked(rep.GetQuotas())
	return rep, nil
}

// reset ends a life: nobody may connect, every peer is fenced, then every region
// is dropped, but for its memory, and the connections to the adapter, which nobody uses any more, end. It
// returns false when the node is closed first.
func (n *Node) reset() bool {
	if !n.barAll() {
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

// barAll lets nobody connect before the next registration, and fences every peer. It returns false when the node is
// closed first.
func (n *Node) barAll() bool {
	n.mu.Lock()
	n.mu.reg = nil
	n.mu.fencing = map[uint32]*fence{} // the directory asks the next life anew
	n.mu.Unlock()
	return n.fencePeers("every session", func() []*peer {
		peers := make([]*peer, 0, len(n.mu.byPeer))
		for _, p := range n.mu.byPeer {
			peers = append(peers, p)
		}
		return peers
	})
}

// call is one exchange with the directory; ctx, which ends with the node's Close, ends it.
func (n *Node) call(ctx context.Context, timeout time.Duration,
	fn func(context.Context, dirpb.DirectoryClient) error) error {
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
	case code == codes.AlreadyExists && code != status.Code(before):
		n.log.Info("this memory node's name is taken; asking again, as the process that has it may have ended", "err",
			err)
	case code == codes.AlreadyExists && err.Error() != before.Error():
		n.log.Error("another process has this memory node's name; asking again, as it may end", "err", err)
	case err == nil && status.Code(before) == codes.AlreadyExists: // what follows says that it has the name
	case err == nil && before != nil:
		n.log.Info("directory answers again", "what", what)
	case code == codes.DataLoss && code != status.Code(before):
		n.log.Error("the directory was put back from a backup, or has lost what it told this memory node, which does "+
			"not follow it: the regions stay as they are, and served",
			"what", what, "err", err)
	case (code == codes.PermissionDenied || code == codes.Unauthenticated) && code != status.Code(before):
		n.log.Error("the directory refuses this memory node; trying on, as an operator may change that", "what", what,
			"err", err)
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
