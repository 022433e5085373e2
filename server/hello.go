package server

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/server/fsm"
)

// A connection to the Raft port begins with a hello in each direction, the caller's first; raft has it afterwards. The
// caller says whom it means to call, by its own configuration, and nobody else answers: what raft counts as a member's
// vote or acknowledgement comes from that member, with the disk that it had when it became one.
//
//	0       4     5       6       8
//	+-------+-----+-------+-------+--------------------------------------------------+
//	| magic | ver | flags | bytes | server, wanted, cluster, address, process, refusal |
//	+-------+-----+-------+-------+--------------------------------------------------+
//
// Integers are little-endian, and each text has its length before it, in 2 bytes. A version leaves
// out of account what follows the texts that it knows.
type hello struct {
	probe   bool          // the caller asks who is there, and says nothing else
	server  raft.ServerID // who speaks
	wanted  raft.ServerID // who is called; empty in answers
	cluster string        // of who speaks; empty: it does not know that yet
	address string        // of the Raft port of who speaks, as it tells others
	process string        // random, of the process that speaks
	refusal string        // of an answer: why there is nothing more to say; empty: go on
}

const (
	helloMagic   = "kvdR" // raft's own calls begin with a byte less than 16
	helloVersion = 1
	helloHeader  = 8
	helloProbe   = 1 // a flag
	// maxHello bounds what is read of a hello behind its header, in bytes.
	maxHello = 4 << 10
	// maxRefusal bounds the text of a refusal, in bytes.
	maxRefusal = 1 << 10
	// probeTimeout is how long somebody is asked who he is.
	probeTimeout = 2 * time.Second
)

var (
	errHello = errors.New("that is no hello of a directory node")
	// errRefused says that a caller of the Raft port means somebody else, or is not who he says.
	errRefused = errors.New("nothing was heard")
	// errSilent means that a call to the Raft port ended before an answer began, as a version that knows no hello ends
	// it.
	errSilent = errors.New("it hung up without an answer")
)

func (h *hello) fields() []*string {
	return []*string{(*string)(&h.server), (*string)(&h.wanted), &h.cluster, &h.address, &h.process, &h.refusal}
}

func (h *hello) append(b []byte) []byte {
	flags := byte(0)
	if h.probe {
		flags |= helloProbe
	}
	b = append(b, helloMagic...)
	b = append(b, helloVersion, flags, 0, 0)
	start := len(b)
	for _, f := range h.fields() {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(*f)))
		b = append(b, *f...)
	}
	binary.LittleEndian.PutUint16(b[start-2:], uint16(len(b)-start))
	return b
}

// readHello reads a hello of which first has been read.
func readHello(r io.Reader, first []byte) (h hello, err error) {
	var head [helloHeader]byte
	if n, err := io.ReadFull(r, head[copy(head[:], first):]); err != nil {
		if n == 0 && len(first) == 0 {
			return h, fmt.Errorf("%w: %w", errSilent, err)
		}
		return h, err
	}
	size := int(binary.LittleEndian.Uint16(head[6:]))
	if string(head[:4]) != helloMagic || size > maxHello {
		return h, errHello
	}
	if head[4] != helloVersion {
		return h, fmt.Errorf("%w: version %d, want %d", errHello, head[4], helloVersion)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return h, err
	}
	h.probe = head[5]&helloProbe != 0
	for _, f := range h.fields() {
		if len(body) < 2 {
			return h, errHello
		}
		n := int(binary.LittleEndian.Uint16(body))
		if body = body[2:]; n > len(body) || n > maxRefusal {
			return h, errHello
		}
		*f, body = string(body[:n]), body[n:]
	}
	for _, f := range h.fields()[:5] { // they are printed
		if err := fsm.CheckText("hello", *f); err != nil {
			return h, fmt.Errorf("%w: %w", errHello, err)
		}
	}
	if h.server == "" {
		return h, errHello
	}
	return h, nil
}

// party is what streams know of the node that they serve. Its functions may be called concurrently.
type party struct {
	server  raft.ServerID
	process string
	cluster func() string
	// at is the member with an address, by the node's configuration; addressOf the address of one. Empty: there is
	// none.
	at        func(address string) raft.ServerID
	addressOf func(raft.ServerID) string
	// mixed reports whether members may be of a version that knows no hello.
	mixed func() bool
}

// begin lets callers in, and calls out.
func (s *streams) begin(p *party) {
	s.party = p
	close(s.begun)
}

// known waits for begin.
func (s *streams) known(ctx context.Context) (*party, error) {
	select {
	case <-s.begun:
		return s.party, nil
	case <-s.stop:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *streams) hello(p *party) hello {
	return hello{server: p.server, cluster: p.cluster(), address: s.advertise.String(), process: p.process}
}

// otherCluster refuses a hello of another cluster.
func (p *party) otherCluster(h *hello) error {
	if own := p.cluster(); own != "" && h.cluster != "" && own != h.cluster {
		return fmt.Errorf("%v is in the cluster %s, and %v in %s", diskOf(h.server), h.cluster, diskOf(p.server), own)
	}
	return nil
}

// call calls address and lets on only if wanted answers, whom a probe asks for nothing else. The connection is nil
// after a probe; the hello is the answer's, its server empty if that is of a version that knows no hello.
func (s *streams) call(ctx context.Context, address string, wanted raft.ServerID, probe bool) (net.Conn, hello, error) {
	p, err := s.known(ctx)
	if err != nil {
		return nil, hello{}, err
	}
	c, err := s.dial(ctx, address)
	if err != nil {
		return nil, hello{}, err
	}
	h, err := s.exchange(ctx, c, p, wanted, probe)
	if errors.Is(err, errSilent) && p.mixed() && diskOf(wanted).incarnation == "" {
		_ = c.Close() // nothing of raft's was sent
		if c, err = s.dial(ctx, address); err != nil {
			return nil, hello{}, err
		}
	}
	if err != nil {
		return nil, h, fmt.Errorf("%s: %w", address, errors.Join(err, c.Close()))
	}
	if probe {
		return nil, h, c.Close()
	}
	return c, h, nil
}

// exchange says hello on c, and hears who answers.
func (s *streams) exchange(ctx context.Context, c net.Conn, p *party, wanted raft.ServerID, probe bool) (hello, error) {
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	mine := s.hello(p)
	mine.wanted, mine.probe = wanted, probe
	if _, err := c.Write(mine.append(nil)); err != nil {
		return hello{}, fmt.Errorf("%w: %w", errSilent, err)
	}
	h, err := readHello(c, nil)
	switch {
	case err != nil:
		return h, err
	case h.server != wanted:
		return h, fmt.Errorf("%v answers, and not %v", diskOf(h.server), diskOf(wanted))
	case h.refusal != "":
		return h, fmt.Errorf("it refuses: %q", h.refusal)
	}
	if err := p.otherCluster(&h); err != nil {
		return h, err
	}
	if !stop() {
		return h, ctx.Err()
	}
	return h, nil
}

// probe asks who serves the Raft port at address, and returns an error unless that is wanted.
func (s *streams) probe(ctx context.Context, address string, wanted raft.ServerID) (hello, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	_, h, err := s.call(ctx, address, wanted, true)
	return h, err
}

// greet hears a caller's hello, of which a byte has been read, and answers. The error says why it is not let in.
func (s *streams) greet(c *streamConn, first []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	p, err := s.known(ctx)
	if err != nil {
		return err
	}
	h, err := readHello(c.Conn, first)
	if err != nil {
		return err
	}
	refusal := s.judgeCaller(ctx, p, &h)
	mine := s.hello(p)
	if refusal != nil {
		text := refusal.Error()
		mine.refusal = text[:min(len(text), maxRefusal)]
		refusal = fmt.Errorf("%w: %w", errRefused, refusal)
	}
	_, err = c.Write(mine.append(nil))
	return cmp.Or(refusal, err)
}

// judgeCaller returns why a caller is not let in.
func (s *streams) judgeCaller(ctx context.Context, p *party, h *hello) error {
	if err := p.otherCluster(h); err != nil {
		return err
	}
	if h.wanted != p.server {
		return fmt.Errorf("%v calls for %v, and this is %v", diskOf(h.server), diskOf(h.wanted), diskOf(p.server))
	}
	if h.probe {
		return nil
	}
	// Two processes with the same disk would vote twice. Members that have moved call before others know their address.
	known := p.addressOf(h.server)
	if h.server == p.server {
		known = s.advertise.String()
	}
	if known == "" || known == h.address && h.server != p.server {
		return nil
	}
	process := p.process
	if h.server != p.server {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		other, err := s.probe(ctx, known, h.server)
		if err != nil {
			return nil
		}
		process = other.process
	}
	if process != h.process {
		return fmt.Errorf("%v runs at %s, so that at %s, which calls, has a copy of its data folder", diskOf(h.server),
			known, h.address)
	}
	return nil
}

// hearRaw returns why a caller is not heard who says no hello. Those of a version that knows none are, by a member that
// may be among such.
func (s *streams) hearRaw() error {
	ctx, cancel := context.WithTimeout(context.Background(), handshakeTimeout)
	defer cancel()
	p, err := s.known(ctx)
	if err == nil && !p.mixed() {
		err = errHello
	}
	return err
}
