package simtest

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
	"github.com/kvd-project/kvd/internal/layout"
)

// streaming is a value on its way, of which a client has written some chunks.
type streaming struct {
	e     *Event
	draft *index.Draft
	part  index.Part
	at    int // bytes of the value that are written
}

// streamPayload is what a chunk of a Stream holds, bytes: with its header it is one unit. Other long values have one
// chunk each then, or two.
const streamPayload = layout.UnitSize - layout.RecordHeaderSize

// streamChunks is how many chunks a Stream has, one for each operation.
const streamChunks = 2

func (c *cl) beginStream(s Step) {
	c.values++
	v := fmt.Sprintf("%d.%d", c.i, c.values)
	v += strings.Repeat("_", (streamChunks-1)*streamPayload+1)
	e := &Event{Client: c.i, Verb: Stream, Key: s.Key, Value: v, Call: c.w.tick()}
	c.stream = &streaming{e: e, draft: &index.Draft{Len: uint64(len(v))}}
	c.stream.part.Draft = c.stream.draft
	c.core.Gather(c.stream.draft)
	c.streamPart()
}

// streamPart begins the next operation of the Stream.
func (c *cl) streamPart() {
	s := c.stream
	r := c.newRun(c.laneFor(s.e.Key))
	if r == nil {
		return
	}
	r.e, r.step = s.e, Step{Stream, s.e.Key}
	o := &r.t.Op
	o.Kind, o.Key, o.Part = index.Put, keyOf(s.e.Key), &s.part
	o.Hash, o.Check = hashOf(s.e.Key)
	if left := s.e.Value[s.at:]; left == "" {
		s.part.Link = true
	} else {
		o.Value = []byte(left[:min(streamPayload, len(left))])
	}
	c.start(r)
}

// streamed takes the answer of an operation of a Stream, and reports whether others follow.
func (c *cl) streamed(r *running) bool {
	if r.e.Verb != Stream {
		return false
	}
	if s := c.stream; r.t.Op.Err == nil && !s.part.Link {
		s.at += len(r.t.Op.Value)
		c.tell(uint64(s.at))
		return true
	}
	c.w.streamed[b2i(r.t.Op.Err == nil)]++
	if r.t.Op.Err == nil {
		c.core.Forget(c.stream.draft)
		c.stream = nil
	}
	c.endStream(r)
	return false
}

// endStream gives up what a Stream has written that has failed.
func (c *cl) endStream(r *running) {
	if r.e.Verb == Stream && c.stream != nil {
		d := c.stream.draft
		c.lanes[0].Deliver(func(l *engine.Lane) { l.TakeBack(d) })
		c.stream = nil
	}
}

// streamWide are random scopes with values that are written a chunk at a time, with anything in between.
var streamWide = map[string]Config{
	"stream": {Payload: streamPayload, Units: 48, Epochs: 8, Crashes: 1, Failures: 2, Deadlines: 2, WritePieces: 2,
		Scripts: [][]Step{
			{k(Stream, 0), k(Stream, 1), k(Del, 0), k(Stream, 0), k(CAS, 1)},
			{k(Get, 0), k(Put, 0), k(Incr, 0), k(Get, 1), k(Del, 1), k(Stream, 0)},
			{k(Add, 0), k(Get, 0), k(Stream, 1)}},
		Setup: k0(0), Warm: true},
	"stream-reuse": {Payload: streamPayload, Long: 0xb6, Units: 14, Epochs: 12, Deadlines: 1, Scripts: [][]Step{
		{k(Stream, 0), k(Put, 0), k(Stream, 0), k(Del, 0), k(Stream, 0)},
		{k(Get, 0), k(Stream, 0), k(Get, 0), k(Incr, 0), k(Get, 0)}}, Setup: one, Warm: true},
	"stream-loss": {Payload: streamPayload, Units: 96, Replicas: 2, Nodes: 3, Janitors: 1, NodeCrashes: 1,
		NodePauses: 1, Crashes: 1, Failures: 1, Scripts: [][]Step{
			{k(Stream, 0), k(Stream, 1), k(Del, 0), k(Stream, 0)}, {k(Get, 0), k(Stream, 0), k(Get, 0), k(Get, 1)}},
		Setup: one, Warm: true},
	"stream-join": {Payload: streamPayload, Units: 96, Replicas: 2, Missing: 1, Nodes: 2, Janitors: 1,
		Scripts: [][]Step{{k(Stream, 0), k(Stream, 1), k(Stream, 0)}, {k(Get, 0), k(Stream, 1), k(Get, 1), k(Get, 0)}},
		Setup:   one, Warm: true},
	"stream-recall": {Payload: streamPayload, Units: 24, TwoExtents: true, Janitors: 1, Acts: []Act{{Recall, 1, 0}},
		Epochs: 6, Scripts: [][]Step{
			{k(Stream, 0), k(Put, 2), k(Stream, 0), k(Stream, 2)}, {k(Get, 0), k(Stream, 2), k(Put, 2), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"stream-recall-in-place": {Payload: streamPayload, Units: 24, TwoExtents: true, Janitors: 1, InPlace: true,
		Acts: []Act{{Recall, 1, 0}}, Epochs: 6, Scripts: [][]Step{
			{k(Stream, 0), k(Put, 2), k(Stream, 0), k(Stream, 2)}, {k(Get, 0), k(Stream, 2), k(Put, 2), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"stream-fence": {Payload: streamPayload, Units: 24, Replicas: 2, Nodes: 3, TwoExtents: true, Janitors: 1, Pauses: 2,
		Acts: []Act{{Recall, 1, 0}, {Drain, 1, 0}}, Epochs: 6, Scripts: [][]Step{
			{k(Stream, 0), k(Put, 2), k(Stream, 0), k(Stream, 2)}, {k(Get, 0), k(Stream, 2), k(Stream, 0), k(Get, 2)}},
		Setup: []Step{k(Put, 0), k(Put, 2)}, Warm: true},
	"stream-migrate": {Payload: streamPayload, Units: 96, PGs: 2, Janitors: 1, Children: 2,
		Acts: []Act{{Migrate, 1, 2}}, Crashes: 1, Scripts: [][]Step{
			{k(Stream, 0), k(Stream, 10), k(Del, 0), k(Stream, 0)},
			{k(Get, 10), k(Stream, 10), k(Get, 0), k(Incr, 10)}},
		Setup: k0(0), Warm: true},
}

// streamScopes are searched exhaustively.
var streamScopes = map[string]Config{
	"stream-update": {Payload: streamPayload, Scripts: [][]Step{{k(Stream, 0)}, {k(Put, 0), k(Get, 0)}}, Setup: one,
		Warm: true},
	"stream-insert": {Payload: streamPayload, Failures: 1, Scripts: [][]Step{{k(Stream, 0)}, {k(Get, 0)}}},
}

func init() {
	maps.Copy(wide, streamWide)
	maps.Copy(scopes, streamScopes)
	for name := range streamWide {
		heavy[name] = 4
	}
	heavy["stream-loss"], heavy["stream-migrate"], heavy["stream-fence"] = 8, 8, 8
}

// TestStreams: among what the searches see are values that are linked, and values that are interrupted.
func TestStreams(t *testing.T) {
	for _, name := range sorted(streamWide) {
		var linked, failed int
		for seed := range uint64(60) {
			w, err := NewWorld(wide[name], false)
			if err != nil {
				t.Fatal(err)
			}
			w.runRandom(seed)
			failed, linked = failed+w.streamed[0], linked+w.streamed[1]
			err = w.err
			w.Close()
			if err != nil {
				t.Fatalf("%s\n%v", replayHint(name, false, seed), err)
			}
		}
		t.Logf("%s: %d streams were linked, %d failed", name, linked, failed)
		if interrupted := name != "stream" && name != "stream-reuse"; linked == 0 || interrupted && failed == 0 {
			t.Errorf("%s: %d streams were linked, %d failed", name, linked, failed)
		}
	}
}
