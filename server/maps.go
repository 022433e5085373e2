package server

import (
	"sync"

	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// maps are the newest maps that somebody watches. All sessions of a namespace see the same one, so it is made and
// encoded once for all of them.
type maps struct {
	mu struct {
		sync.Mutex
		version uint64
		of      map[uint32]*sharedMap // by namespace, 0: what operators see
	}
}

// sharedMap is one map for all who watch it.
type sharedMap struct {
	version uint64
	content *dirpb.Map

	once  sync.Once
	bytes encoded
	err   error
}

// show is the map of session x, or of operators for nil. The state is locked.
func (m *maps) show(s *fsm.State, x *fsmpb.Session) *sharedMap {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v := s.MapVersion(); m.mu.of == nil || m.mu.version != v {
		m.mu.version, m.mu.of = v, make(map[uint32]*sharedMap)
	}
	out := m.mu.of[x.GetNamespaceId()]
	if out == nil {
		out = &sharedMap{version: m.mu.version, content: s.Map(x)}
		m.mu.of[x.GetNamespaceId()] = out
	}
	return out
}

// forget has the next maps made of another state.
func (m *maps) forget() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.of = nil
}

// encode gives the map as it is sent. The state need not be locked.
func (m *sharedMap) encode() (encoded, error) {
	m.once.Do(func() { m.bytes, m.err = proto.Marshal(m.content) })
	return m.bytes, m.err
}

// encoded is a message for SendMsg of a grpc.ServerStream that is encoded already. It is not to be changed.
type encoded []byte

// codec is gRPC's for protobuf, which sends an encoded message as it is.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(encodingproto.Name)} }

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if b, ok := v.(encoded); ok {
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return c.CodecV2.Marshal(v)
}
