package keeper

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"unicode"

	"golang.org/x/sys/unix"
)

// A packet of the socket is a message; numbers are little-endian:
//
//	op u8, zero u8, name bytes u16, meta bytes u16, zero u16; name, meta; and, beside them, descriptors
//
//	op      from     has
//	put     worker   name, meta, 1 or 2 descriptors: hold them under a name that is free
//	drop    worker   name: close what is held under it
//	list    worker   nothing: say all that is held
//	up      worker   meta, its version: it serves
//	item    keeper   name, meta, descriptors; list's answers are these and then ok
//	ok      keeper   nothing: it was done
//	refuse  keeper   meta, a text: nothing was done
//
// The worker asks one question at a time.
const (
	opPut = 1 + iota
	opDrop
	opList
	opItem
	opOK
	opRefuse
	opUp
)

const (
	headSize = 8
	maxName  = 128
	maxMeta  = 256
	maxFiles = 2
	maxFrame = headSize + maxName + maxMeta
	// maxItems bounds what a keeper holds: two descriptors of each of 20,000 connections, regions and sockets.
	maxItems = 1 << 16
)

// Errors of a Client. ErrRefused says that nothing was done; every other error of Put and Drop, that it may have been.
var (
	ErrRefused  = errors.New("refused by the keeper")
	ErrProtocol = errors.New("keeper protocol violation")
)

// Item is what a keeper holds under a name. The holder of an Item closes its descriptors.
type Item struct {
	Name string
	Meta []byte
	// FDs are plain numbers: an os.File would have the runtime watch listening sockets, which are another process's.
	FDs []int
	// File says that it is a file of a Folder, which has no seals.
	File bool
}

// Close closes the descriptors.
func (i *Item) Close() {
	for _, fd := range i.FDs {
		_ = unix.Close(fd) // nothing was written by it
	}
	i.FDs = nil
}

type message struct {
	op   byte
	name string
	meta []byte
}

func (m *message) encode() []byte {
	b := make([]byte, headSize, headSize+len(m.name)+len(m.meta))
	b[0] = m.op
	binary.LittleEndian.PutUint16(b[2:], uint16(len(m.name)))
	binary.LittleEndian.PutUint16(b[4:], uint16(len(m.meta)))
	return append(append(b, m.name...), m.meta...)
}

// decode checks a packet with so many descriptors.
func decode(b []byte, files int) (*message, error) {
	if len(b) < headSize || b[1] != 0 || b[6] != 0 || b[7] != 0 {
		return nil, fmt.Errorf("%w: no message", ErrProtocol)
	}
	name, meta := int(binary.LittleEndian.Uint16(b[2:])), int(binary.LittleEndian.Uint16(b[4:]))
	if name > maxName || meta > maxMeta || len(b) != headSize+name+meta {
		return nil, fmt.Errorf("%w: a message of %d bytes with a name of %d and meta of %d", ErrProtocol, len(b), name,
			meta)
	}
	m := &message{op: b[0], name: string(b[headSize:][:name]), meta: append([]byte(nil), b[headSize+name:]...)}
	wantName, wantFiles, wantMeta := false, 0, false
	switch m.op {
	case opPut, opItem:
		wantName, wantFiles, wantMeta = true, maxFiles, true
	case opDrop:
		wantName = true
	case opList, opOK:
	case opRefuse, opUp:
		wantMeta = true
	default:
		return nil, fmt.Errorf("%w: operation %d", ErrProtocol, m.op)
	}
	switch {
	case wantName != (name > 0), meta > 0 && !wantMeta:
		return nil, fmt.Errorf("%w: operation %d with a name of %d bytes and meta of %d", ErrProtocol, m.op, name, meta)
	case files > wantFiles, files == 0 && wantFiles > 0:
		return nil, fmt.Errorf("%w: operation %d with %d descriptors", ErrProtocol, m.op, files)
	case strings.IndexFunc(m.name, func(r rune) bool {
		return r == unicode.ReplacementChar || !unicode.IsPrint(r)
	}) >= 0:
		return nil, fmt.Errorf("%w: name %q cannot be printed", ErrProtocol, m.name)
	}
	return m, nil
}

func send(c *net.UnixConn, m *message, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(m.encode(), oob, nil)
	return err
}

// errTooLong is a packet that was cut: nothing of it can be used, and the next one is whole.
var errTooLong = fmt.Errorf("%w: message too long, or no descriptors left here", ErrProtocol)

// receive gives a checked message and the descriptors that came with it. Only an error that is not ErrProtocol says
// that the socket is of no further use.
func receive(c *net.UnixConn) (*message, []int, error) {
	b, oob := make([]byte, maxFrame+1), make([]byte, unix.CmsgSpace(4*maxFiles)+64)
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, nil, err
	}
	if n == 0 {
		return nil, nil, net.ErrClosed // SOCK_SEQPACKET ends with an empty packet
	}
	var fds []int
	msgs, perr := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range msgs {
		if got, err := unix.ParseUnixRights(&m); err == nil {
			fds = append(fds, got...) // close-on-exec, as package net asks for
		}
	}
	var m *message
	switch {
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = errTooLong
	case perr != nil:
		err = fmt.Errorf("%w: %w", ErrProtocol, perr)
	default:
		m, err = decode(b[:n], len(fds))
	}
	if err != nil {
		(&Item{FDs: fds}).Close()
		return nil, nil, err
	}
	return m, fds, nil
}

// store is what a keeper holds. It serves one worker at a time.
type store struct {
	out   *Systemd // nil: what is held ends with this process
	mu    sync.Mutex
	items map[string]*Item
	order []string // as they came; names that are gone among them
}

// hasAny reports whether something is held under a name that begins so.
func (s *store) hasAny(prefix string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.items {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// closeAll leaves to out what that holds, or has it forget that.
func (s *store) closeAll(leave bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range s.items {
		if s.out != nil && !leave {
			s.out.remove(i)
		}
		i.Close()
	}
	s.items, s.order = nil, nil
	switch {
	case s.out == nil:
	case leave:
		s.out.close()
	default:
		s.out.end()
	}
}

// serve answers a worker until its socket ends. up is called when it says that it is.
func (s *store) serve(c *net.UnixConn, up func(version string)) {
	for {
		m, fds, err := receive(c)
		switch {
		case errors.Is(err, ErrProtocol):
		case err != nil:
			return
		case m.op == opList:
			err = s.list(c)
		case m.op == opUp:
			up(string(m.meta))
		default:
			err = s.change(m, fds)
		}
		reply := &message{op: opOK}
		if err != nil {
			text := err.Error()
			reply = &message{op: opRefuse, meta: []byte(text[:min(len(text), maxMeta)])}
		}
		if send(c, reply, nil) != nil {
			return
		}
	}
}

// change puts or drops. It takes over the descriptors.
func (s *store) change(m *message, fds []int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := &Item{Name: m.name, Meta: m.meta, FDs: fds}
	old := s.items[m.name]
	switch {
	case m.op == opDrop && old == nil:
		return fmt.Errorf("nothing is held under %q", m.name)
	case m.op == opDrop:
		if s.out != nil {
			s.out.remove(old)
		}
		old.Close()
		delete(s.items, m.name)
		return nil
	case m.op != opPut:
		i.Close()
		return fmt.Errorf("%w: operation %d is not a worker's", ErrProtocol, m.op)
	case old != nil:
		i.Close()
		return fmt.Errorf("%q is held already", m.name)
	case len(s.items) >= maxItems:
		i.Close()
		return fmt.Errorf("%d items are held, and no more are", maxItems)
	}
	if s.items == nil {
		s.items = make(map[string]*Item)
	}
	if len(s.order) >= 2*len(s.items)+64 {
		s.order = s.namesLocked()
	}
	if s.out != nil {
		s.out.add(i) // before the worker acts on it
	}
	s.items[m.name] = i
	s.order = append(s.order, m.name)
	return nil
}

// namesLocked are the names held, the oldest first. A name that went and came again is where it was last.
func (s *store) namesLocked() []string {
	seen := make(map[string]bool, len(s.items))
	var out []string
	for k := len(s.order) - 1; k >= 0; k-- {
		if n := s.order[k]; s.items[n] != nil && !seen[n] {
			seen[n] = true
			out = append(out, n)
		}
	}
	for a, b := 0, len(out)-1; a < b; a, b = a+1, b-1 {
		out[a], out[b] = out[b], out[a]
	}
	return out
}

func (s *store) list(c *net.UnixConn) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.namesLocked() {
		i := s.items[n]
		if err := send(c, &message{op: opItem, name: i.Name, meta: i.Meta}, i.FDs); err != nil {
			return err
		}
	}
	return nil
}

// Client is a worker's end. A nil one holds nothing: Put and Drop do nothing, and List is empty.
type Client struct {
	mu   sync.Mutex
	conn *net.UnixConn
	err  error // the socket is of no further use
	// outlives: what is held outlives the keeper.
	outlives bool
}

// Outlives tells whether what is held is there for the next keeper, too, after SIGTERM.
func (c *Client) Outlives() bool { return c != nil && c.outlives }

// Create makes no file: what a keeper holds has no name elsewhere.
func (c *Client) Create(string) (*os.File, error) { return nil, nil }

// Put has the keeper hold duplicates of the descriptors under a name that is free. The caller keeps its own.
func (c *Client) Put(name string, meta []byte, fds ...int) error {
	if c == nil {
		return nil
	}
	_, err := c.ask(&message{op: opPut, name: name, meta: meta}, fds)
	return err
}

// Drop has the keeper close what it holds under a name.
func (c *Client) Drop(name string) error {
	if c == nil {
		return nil
	}
	_, err := c.ask(&message{op: opDrop, name: name}, nil)
	return err
}

// Rename has the keeper hold under another name, which is free, what it holds under one, and says where that is. After
// an error, or if this process ends meanwhile, perhaps neither name is held. systemd, behind the keeper, holds a file
// once, so the one goes before the other comes.
func (c *Client) Rename(from, to string) (where string, err error) {
	items, err := c.List()
	if err != nil {
		return "", err
	}
	var is *Item
	for _, i := range items {
		defer i.Close()
		if i.Name == to || to == "" {
			return "", fmt.Errorf("keeper: %q: %w: %q is held already, or no name", from, ErrRefused, to)
		}
		if i.Name == from {
			is = i
		}
	}
	if is == nil {
		return "", fmt.Errorf("keeper: %q: %w: nothing is held under it", from, ErrRefused)
	}
	if err = c.Drop(from); err == nil {
		err = c.Put(to, is.Meta, is.FDs...)
	}
	return fmt.Sprintf("%s of the keeper, process %d", to, os.Getppid()), err
}

// Up tells the keeper that this worker serves, and its version.
func (c *Client) Up(version string) error {
	if c == nil {
		return nil
	}
	_, err := c.ask(&message{op: opUp, meta: []byte(version[:min(len(version), maxMeta)])}, nil)
	return err
}

// List gives what the keeper holds, the oldest first. The caller closes the items.
func (c *Client) List() ([]*Item, error) {
	if c == nil {
		return nil, nil
	}
	return c.ask(&message{op: opList}, nil)
}

func (c *Client) ask(m *message, fds []int) (items []*Item, err error) {
	if _, err := decode(m.encode(), len(fds)); err != nil || len(m.name) > maxName || len(m.meta) > maxMeta {
		return nil, fmt.Errorf("%w: %q: %w", ErrRefused, m.name, errors.Join(err, ErrProtocol))
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	defer func() {
		if err != nil {
			for _, i := range items {
				i.Close()
			}
			items = nil
		}
	}()
	if c.err != nil {
		return nil, c.err
	}
	fail := func(err error) ([]*Item, error) {
		c.err = fmt.Errorf("keeper: %q: %w", m.name, err)
		return items, c.err
	}
	if err := send(c.conn, m, fds); err != nil {
		return fail(err)
	}
	for {
		r, got, err := receive(c.conn)
		switch {
		case err != nil:
			return fail(err) // a list that misses an item is not one
		case r.op == opRefuse:
			return items, fmt.Errorf("keeper: %q: %w: %s", m.name, ErrRefused, r.meta)
		case r.op == opOK:
			return items, nil
		case r.op == opItem && m.op == opList && len(items) < maxItems:
			items = append(items, &Item{Name: r.name, Meta: r.meta, FDs: got})
		default:
			(&Item{FDs: got}).Close()
			return fail(fmt.Errorf("%w: answer %d", ErrProtocol, r.op))
		}
	}
}

// Close ends the connection; the keeper holds on.
func (c *Client) Close() error {
	if c == nil {
		return nil
	}
	return c.conn.Close()
}
