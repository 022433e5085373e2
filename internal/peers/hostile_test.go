package peers_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/hostid"
	"github.com/kvd-project/kvd/internal/livepeak"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/peers"
	"github.com/kvd-project/kvd/internal/peers/peerspb"
	"github.com/kvd-project/kvd/internal/peers/peerstest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// rawCodec sends bytes as they are, and does not look at what comes.
type rawCodec struct{}

func (rawCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (rawCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func (rawCodec) Name() string { return "proto" }

// forger is a peer that sends whatever it likes: to each stream a first reply, and then the other one over and over.
func forger(t *testing.T, r *peerstest.Room, id string, first, reply []byte) (streams *atomic.Int32) {
	t.Helper()
	lis := testutil.Listen(t)
	streams = new(atomic.Int32)
	s := grpc.NewServer(grpc.ForceServerCodecV2(rawCodec{}),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
			var q []byte
			if err := stream.RecvMsg(&q); err != nil {
				return err
			}
			streams.Add(1)
			if err := stream.SendMsg(&first); err != nil {
				return err
			}
			for {
				if err := stream.SendMsg(&reply); err != nil {
					return err
				}
			}
		}))
	go func() { _ = s.Serve(lis) }()
	t.Cleanup(s.Stop)
	if _, err := r.Meet(t.Context(), &dirpb.MeetRequest{Id: []byte(strings.Repeat(id, 16)), Addr: lis.Addr().String(),
		HostId: hostid.ID()}); err != nil {
		t.Fatal(err)
	}
	return streams
}

// journal is a log that can be asked.
type journal struct {
	sync.Mutex
	all strings.Builder
}

func (l *journal) Write(b []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.all.Write(b)
}

func (l *journal) says(text string) func() bool {
	return func() bool {
		l.Lock()
		defer l.Unlock()
		return strings.Contains(l.all.String(), text)
	}
}

func message(channel string) []byte {
	b, err := proto.Marshal(&peerspb.FollowReply{Heard: 1, Messages: []*peerspb.Message{{Channel: []byte(channel)}}})
	if err != nil {
		panic(err)
	}
	return b
}

// A peer that sends what nobody asked for, or more at once than a queue holds, is cut off before it is decoded, and
// takes little of this gateway's memory; nothing of it goes on.
func TestForgedReplies(t *testing.T) {
	const budget, bomb = 64 << 20, 150 << 20
	heard := func(n uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), n)
	}
	repeated := func(num protowire.Number, item []byte) []byte {
		one := protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), item)
		return append(heard(1), []byte(strings.Repeat(string(one), bomb/len(one)))...)
	}
	none, messages, keys := ask{}, ask{messages: true}, ask{keys: true}
	for name, c := range map[string]struct {
		ask   ask
		reply []byte
		why   string
	}{
		"a message that nobody asked for":      {none, message("ch"), "nobody asked for"},
		"a message where keys are wanted":      {keys, message("ch"), "nobody asked for"},
		"a key where messages are wanted":      {messages, append(heard(1), 0x1a, 1, 'k'), "nobody asked for"},
		"all keys where nothing is wanted":     {none, append(heard(1), 0x20, 1), "nobody asked for"},
		"empty messages that nobody asked for": {none, repeated(2, nil), "nobody asked for"},
		"long rubbish that nobody asked for":   {none, repeated(99, make([]byte, 1<<20)), "nobody asked for"},
		"empty messages":                       {messages, repeated(2, nil), "at once"},
		"empty keys":                           {keys, repeated(3, nil), "at once"},
		"short messages":                       {messages, repeated(2, []byte("\x0a\x08channel1")), "at once"},
		"messages of 1 MB":                     {messages, repeated(2, make([]byte, 1<<20)), "buffer memory"},
		"rubbish of 1 MB":                      {messages, repeated(99, make([]byte, 1<<20)), "buffer memory"},
		"a request that was not sent":          {messages, heard(99), "has heard request 99"},
		"no request":                           {messages, []byte{0x20, 1}, "has heard request 0"},
	} {
		t.Run(name, func(t *testing.T) {
			limit := int64(budget)
			if c.why == "at once" {
				limit = 16 * budget // it is number alone that stops it
			}
			r := peerstest.NewRoom()
			first := []byte{8, 1}
			if c.ask != none {
				first[1] = 2 // requests are numbered as interests change
			}
			if string(c.reply[:2]) == "\x08\x01" {
				copy(c.reply, first)
			}
			streams := forger(t, r, "f", first, c.reply)
			log := &journal{}
			b := netsrv.NewBudget(limit)
			most := livepeak.Watch(false)
			p := r.New(t, peers.Options{Budget: b, Logger: slog.New(slog.NewTextHandler(log, nil))})
			p.Want(c.ask.messages, c.ask.keys)
			e := &ear{}
			p.Start(e.deliver, e.lose, nil)
			testutil.Until(t, "the peer is cut off, and the log says why", log.says(c.why))
			testutil.Until(t, "it is tried again", func() bool { return streams.Load() > 1 })
			if !e.is(func(e *ear) bool { return len(e.messages)+len(e.keys)+e.all == 0 })() {
				t.Errorf("%d messages and %d keys went on", len(e.messages), len(e.keys))
			}
			p.Close()
			if used := b.Used(); used != 0 {
				t.Errorf("%d bytes of the budget are taken", used)
			}
			allowed := int64(budget)
			if c.why == "at once" {
				allowed = 3 * bomb // its bytes, in one piece and in gRPC's pieces
			}
			if top := most(); top > allowed {
				t.Errorf("the heap grew by %d MiB, want at most %d", top>>20, allowed>>20)
			}
		})
	}
}

type ask struct{ messages, keys bool }

// All that is wanted comes: the longest message there is, and those that were queued when they ceased to be wanted.
func TestLongestMessage(t *testing.T) {
	r := peerstest.NewRoom()
	a, _ := begin(t, r, peers.Options{})
	b, eb := begin(t, r, peers.Options{})
	testutil.Until(t, "they follow each other", following(1, a, b))
	for i := range 20 {
		want(t, b, true, true)
		for k := range 200 {
			a.Publish(false, fmt.Append(nil, i, "-", k), make([]byte, 1000))
			a.Changed(fmt.Append(nil, "k", k))
		}
		want(t, b, i%2 == 0, i%3 == 0)
		want(t, b, false, false)
	}
	want(t, b, true, false)
	a.Publish(false, []byte("ch"), make([]byte, 128<<20))
	testutil.Until(t, "it comes", eb.is(func(e *ear) bool {
		return strings.Contains(strings.Join(e.messages, " "), fmt.Sprint(128<<20))
	}))
	if s := b.Stats(); s.Following != 1 {
		t.Errorf("%+v", s)
	}
	// Nobody was cut off meanwhile.
	if !eb.is(func(e *ear) bool { return e.lost == 1 })() {
		t.Errorf("its stream began or ended %d times", eb.lost)
	}
}

// Queues for followers that read nothing are of the buffer memory, and given back.
func TestQueuesAreCharged(t *testing.T) {
	const limit = 8 << 20
	r := peerstest.NewRoom()
	wire := peerstest.Listen(t)
	b := netsrv.NewBudget(limit)
	a, _ := begin(t, r, peers.Options{Listener: wire, Budget: b})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for i := range 4 {
		id := []byte(strings.Repeat(string(rune('a'+i)), 16))
		if _, err := r.Meet(t.Context(), meetRequest(id)); err != nil {
			t.Fatal(err)
		}
		conn, err := grpc.NewClient("passthrough:///"+wire.Addr().String(),
			grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithInitialWindowSize(64<<10))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s, err := peerspb.NewGatewaysClient(conn).Follow(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(&peerspb.FollowRequest{Id: id, Number: 1, Messages: true, Keys: true}); err != nil &&
			err != io.EOF {
			t.Fatal(err)
		}
	}
	testutil.Until(t, "all are there", func() bool { return a.Stats().Followers == 4 && a.WantsKeys() })
	most := livepeak.Watch(false)
	for range 200 {
		a.Publish(false, []byte("ch"), make([]byte, 256<<10))
		a.Changed(make([]byte, 128<<10))
		if used := b.Used(); used > limit {
			t.Fatalf("%d bytes of %d are taken", used, limit)
		}
	}
	if top := most(); top > 8*limit { // gRPC's windows, and garbage
		t.Errorf("the heap grew by %d MiB", top>>20)
	}
	if a.Stats().Dropped == 0 {
		t.Error("nothing was dropped")
	}
	cancel()
	testutil.Until(t, "all is given back", func() bool { return b.Used() == 0 && a.Stats().Followers == 0 })
}

// A peer that the directory does not name any more, since its right was taken, hears nothing more, though it holds on
// to its stream.
func TestUnnamedPeersPart(t *testing.T) {
	r := peerstest.NewRoom()
	wire := peerstest.Listen(t)
	a, _ := begin(t, r, peers.Options{Listener: wire, PartAfter: 20 * time.Millisecond})
	id := []byte(strings.Repeat("u", 16))
	if _, err := r.Meet(t.Context(), meetRequest(id)); err != nil {
		t.Fatal(err)
	}
	s := follow(t, wire.Addr().String(), insecure.NewCredentials(), &peerspb.FollowRequest{
		Id: id, Number: 1, Messages: true})
	testutil.Until(t, "it is followed", func() bool { return a.WantsMessages() })
	q := meetRequest(id)
	q.Leaves = true
	if _, err := r.Meet(t.Context(), q); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := s.Recv(); err != nil {
				ended <- err
				return
			}
		}
	}()
	select {
	case err := <-ended:
		if !strings.Contains(err.Error(), "does not name") {
			t.Error(err)
		}
	case <-time.After(testutil.Limit):
		t.Fatal("it still hears")
	}
	testutil.Until(t, "nobody wants anything", func() bool { return !a.WantsMessages() && a.Stats().Followers == 0 })
}
