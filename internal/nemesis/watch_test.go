package nemesis

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
)

const watchEvery = 100 * time.Millisecond

// leaderStatus asks for the status, by a Call of a directory of so many nodes, until the
// leader tells it, who alone knows where memory is; or, after as many answers, whoever does.
func leaderStatus(ctx context.Context,
	call func(context.Context, func(context.Context, dirpb.DirectoryClient) error) error, nodes int) (
	st *dirpb.StatusReply, err error) {
	answers := 0
	err = call(ctx, func(ctx context.Context, d dirpb.DirectoryClient) error {
		got, err := d.Status(ctx, &dirpb.StatusRequest{})
		if err != nil {
			return err
		}
		st = got
		if answers++; answers < nodes && len(got.GetUsage()) > 0 && !got.GetUsage()[0].GetEstimated() {
			return status.Error(codes.Unavailable, "it does not lead") // the next one, please
		}
		return nil
	})
	if st != nil {
		err = nil
	}
	return st, err
}

// watchMain prints the store's status over and over, as lines of
//
//	status  AT  JSON
//	error   TEXT
func watchMain(directory []string) error {
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	c, err := dirclient.Open(dirclient.Options{Addrs: directory, AttemptTimeout: 500 * time.Millisecond})
	if err != nil {
		return err
	}
	defer c.Close()
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		at := now()
		call, end := context.WithTimeout(ctx, 2*time.Second)
		st, err := leaderStatus(call, c.Call, len(directory))
		end()
		line := "error\t" + strconv.Quote(fmt.Sprint(err))
		if err == nil {
			b, err := protojson.Marshal(st)
			if err != nil {
				return err
			}
			var flat bytes.Buffer
			if err := json.Compact(&flat, b); err != nil {
				return err
			}
			line = fmt.Sprintf("status\t%d\t%s", at, flat.Bytes())
		}
		if _, err := fmt.Fprintln(os.Stdout, line); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// watcher keeps what watchMain prints. It may be used concurrently.
type watcher struct {
	mu sync.Mutex
	st *dirpb.StatusReply // the newest; never nil once there was one
	at int64              // when it was asked for
}

func (w *watcher) line(l string) {
	kind, rest, _ := strings.Cut(l, "\t")
	if kind != "status" {
		return
	}
	at, doc, _ := strings.Cut(rest, "\t")
	n, err := strconv.ParseInt(at, 10, 64)
	st := &dirpb.StatusReply{}
	if err != nil || (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal([]byte(doc), st) != nil {
		return // cut short by its end
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// Any directory node may answer, also one that lags.
	if w.st == nil || st.GetRaftApplied() >= w.st.GetRaftApplied() {
		w.st, w.at = st, n
	}
}

func (w *watcher) get() (st *dirpb.StatusReply, at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.st, w.at
}

func namespaceOf(m *dirpb.Map, name string) *dirpb.Namespace {
	for _, n := range m.GetNamespaces() {
		if n.GetName() == name {
			return n
		}
	}
	return nil
}

func nodeNamed(m *dirpb.Map, name string) *dirpb.Node {
	for _, n := range m.GetNodes() {
		if n.GetName() == name {
			return n
		}
	}
	return nil
}

// whole tells what keeps st from being a store that could lose a memory node
// again: every copy there and nothing under way. gone are incarnations of memory
// nodes that are known to be dead.
func whole(st *dirpb.StatusReply, memnodes int, gone map[uint64]bool) error {
	if st == nil {
		return errors.New("no status yet")
	}
	if !slices.ContainsFunc(st.GetDirectory(), (*dirpb.DirectoryNode).GetLeader) {
		return errors.New("the directory has no leader")
	}
	m := st.GetMap()
	up := map[uint32]*dirpb.Node{}
	for _, n := range m.GetNodes() {
		switch {
		case gone[n.GetIncarnation()]:
			return fmt.Errorf("memory node %s: its death is not known yet", n.GetName())
		case n.GetState() != dirpb.NodeState_NODE_UP:
			return fmt.Errorf("memory node %s: %v", n.GetName(), n.GetState())
		}
		up[n.GetId()] = n
	}
	if len(up) != memnodes {
		return fmt.Errorf("%d memory nodes of %d", len(up), memnodes)
	}
	replicas := map[uint32]int{}
	for _, n := range m.GetNamespaces() {
		replicas[n.GetId()] = int(n.GetReplicas())
	}
	for _, p := range m.GetPgs() {
		bad := func(format string, a ...any) error {
			return fmt.Errorf("placement group %d, epoch %d: %s", p.GetId(), p.GetEpoch(), fmt.Sprintf(format, a...))
		}
		switch want := replicas[p.GetNamespaceId()]; {
		case p.GetState() != dirpb.PGState_PG_ACTIVE:
			return bad("%v", p.GetState())
		case p.GetJoining(), p.GetPlanned() != nil, p.GetLeaving() != nil:
			return bad("a member joins or leaves")
		case len(p.GetMembers()) != want:
			return bad("%d replicas of %d", len(p.GetMembers()), want)
		}
		for _, mb := range p.GetMembers() {
			if n := up[mb.GetNodeId()]; n.GetIncarnation() != mb.GetIncarnation() {
				return bad("a member is of another incarnation than memory node %s", n.GetName())
			}
		}
	}
	return nil
}

// lost tells of data of the run's namespace that no copy is left of.
func lost(st *dirpb.StatusReply) error {
	ns := namespaceOf(st.GetMap(), namespace).GetId()
	for _, p := range st.GetMap().GetPgs() {
		if p.GetNamespaceId() == ns && p.GetState() == dirpb.PGState_PG_LOST {
			return fmt.Errorf("placement group %d, epoch %d, has no copy left", p.GetId(), p.GetEpoch())
		}
	}
	return nil
}

// placement finds a key's placement group. Keys on their way to another count
// with the one that they leave.
type placement struct {
	namespace string
	seed      uint64
	shards    []*dirpb.Shard
	// members are memory nodes' names by placement group.
	members map[uint32][]string
}

func placementOf(st *dirpb.StatusReply, namespace string) *placement {
	m := st.GetMap()
	ns := namespaceOf(m, namespace)
	p := &placement{namespace: namespace, seed: ns.GetHashSeed(), members: map[uint32][]string{}}
	names := map[uint32]string{}
	for _, n := range m.GetNodes() {
		names[n.GetId()] = n.GetName()
	}
	for _, g := range m.GetPgs() {
		if g.GetNamespaceId() != ns.GetId() {
			continue
		}
		p.members[g.GetId()] = nil
		for _, mb := range g.GetMembers() {
			p.members[g.GetId()] = append(p.members[g.GetId()], names[mb.GetNodeId()])
		}
	}
	for _, s := range m.GetShards() {
		if s.GetNamespaceId() == ns.GetId() {
			p.shards = append(p.shards, s)
		}
	}
	// The deepest first: a child covers part of what its parent covered.
	slices.SortFunc(p.shards, func(a, b *dirpb.Shard) int { return cmp.Compare(b.GetDepth(), a.GetDepth()) })
	return p
}

// holders are the memory nodes that hold anything.
func (p *placement) holders() (names []string) {
	for _, m := range p.members {
		names = append(names, m...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// pg is 0 for a key of no shard.
func (p *placement) pg(key string) uint32 {
	h := xxh3.Hash128Seed([]byte(key), p.seed).Lo
	for _, s := range p.shards {
		if layout.ShardPrefix(h, uint8(s.GetDepth())) == s.GetPrefix() {
			return s.GetPgId()
		}
	}
	return 0
}

// crowd is for shards that are alike, as those of a new namespace are.
func (p *placement) crowd() *crowd {
	return &crowd{Seed: p.seed, Depth: uint8(p.shards[0].GetDepth()), Segments: p.shards[0].GetSegments()}
}

// keys gives a key of every placement group that has a shard.
func (p *placement) keys(prefix string) map[uint32]string {
	want := map[uint32]bool{}
	for _, s := range p.shards {
		want[s.GetPgId()] = true
	}
	out := map[uint32]string{}
	for i := 0; len(out) < len(want); i++ {
		key := fmt.Sprintf("%s/%d", prefix, i)
		if pg := p.pg(key); want[pg] && out[pg] == "" {
			out[pg] = key
		}
	}
	return out
}
