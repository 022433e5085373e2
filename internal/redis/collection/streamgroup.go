package collection

import (
	"bytes"
	"encoding/binary"
	"slices"
	"sort"
)

// Group finds a group; nil: there is none.
func (s *Stream) Group(name []byte) *StreamGroup {
	if i, found := s.groupAt(name); found {
		return s.Groups[i]
	}
	return nil
}

func (s *Stream) groupAt(name []byte) (int, bool) {
	return slices.BinarySearchFunc(s.Groups, name, func(g *StreamGroup, name []byte) int {
		return bytes.Compare(g.Name, name)
	})
}

// AddGroup adds a group, unless there is one of that name.
func (s *Stream) AddGroup(g *StreamGroup) bool {
	i, found := s.groupAt(g.Name)
	if !found {
		s.Groups = slices.Insert(s.Groups, i, g)
	}
	return !found
}

// RemoveGroup removes a group, if there is one.
func (s *Stream) RemoveGroup(name []byte) bool {
	i, found := s.groupAt(name)
	if found {
		s.Groups = slices.Delete(s.Groups, i, i+1)
	}
	return found
}

// StreamGroupRoom is about how many bytes a group or a consumer of that name adds at most, with that number of pending
// entries.
func StreamGroupRoom(name []byte, pending int) int {
	return streamHead + textLen(name) + groupNumbers + pending*pendingBytes
}

// Consumer finds a consumer.
func (g *StreamGroup) Consumer(name []byte) (i int, found bool) {
	return slices.BinarySearchFunc(g.Consumers, name, func(c StreamConsumer, name []byte) int {
		return bytes.Compare(c.Name, name)
	})
}

// See makes a consumer, if it is not there, and notes when it was seen.
func (g *StreamGroup) See(name []byte, now int64) (i int, made bool) {
	i, found := g.Consumer(name)
	if !found {
		g.renumber(i, 1)
		g.Consumers = slices.Insert(g.Consumers, i, StreamConsumer{Name: name})
	}
	g.Consumers[i].Seen = now
	return i, !found
}

// RemoveConsumer removes a consumer and what is pending for it, which it counts.
func (g *StreamGroup) RemoveConsumer(i int) (pending int) {
	kept := g.Pending[:0]
	for j := range g.Pending.Len() {
		if e := g.Pending[j*pendingBytes:][:pendingBytes]; g.Pending.At(j).Consumer != i {
			kept = append(kept, e...)
		}
	}
	pending = (len(g.Pending) - len(kept)) / pendingBytes
	g.Pending = kept
	g.renumber(i+1, -1)
	g.Consumers = slices.Delete(g.Consumers, i, i+1)
	return pending
}

// renumber says that the places of consumers from the i-th on change.
func (g *StreamGroup) renumber(i, by int) {
	for j := range g.Pending.Len() {
		if p := g.Pending.At(j); p.Consumer >= i {
			p.Consumer += by
			g.Pending.Set(j, p)
		}
	}
}

// PendingOf counts what is pending for each consumer.
func (g *StreamGroup) PendingOf() []int {
	n := make([]int, len(g.Consumers))
	for j := range g.Pending.Len() {
		n[g.Pending.At(j).Consumer]++
	}
	return n
}

// Pending is what has been delivered and not been acknowledged, in the order of ids.
type Pending []byte

// PendingEntry is an entry of Pending.
type PendingEntry struct {
	ID        StreamID
	Delivered int64 // Unix ms
	Times     int64
	Consumer  int // its place among the group's
}

// Len counts the entries.
func (p Pending) Len() int { return len(p) / pendingBytes }

func (p Pending) id(i int) StreamID { return idAt(p[i*pendingBytes:]) }

// At is the i-th entry.
func (p Pending) At(i int) PendingEntry {
	b := p[i*pendingBytes:][:pendingBytes]
	return PendingEntry{idAt(b), int64(binary.LittleEndian.Uint64(b[16:])), int64(binary.LittleEndian.Uint64(b[24:])),
		int(binary.LittleEndian.Uint32(b[32:]))}
}

// Set changes the i-th entry.
func (p Pending) Set(i int, e PendingEntry) {
	b := appendID(p[i*pendingBytes:i*pendingBytes], e.ID)
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Delivered))
	b = binary.LittleEndian.AppendUint64(b, uint64(e.Times))
	binary.LittleEndian.AppendUint32(b, uint32(e.Consumer))
}

// Find is where an id is, or would be.
func (p Pending) Find(id StreamID) (i int, found bool) {
	return sort.Find(p.Len(), func(i int) int { return id.Compare(p.id(i)) })
}

// Put adds an entry, or changes the one with its id.
func (g *StreamGroup) Put(e PendingEntry) {
	i, found := g.Pending.Find(e.ID)
	if !found {
		at := i * pendingBytes
		g.Pending = slices.Insert(g.Pending, at, make([]byte, pendingBytes)...)
	}
	g.Pending.Set(i, e)
}

// Drop removes the i-th pending entry.
func (g *StreamGroup) Drop(i int) {
	g.Pending = slices.Delete(g.Pending, i*pendingBytes, (i+1)*pendingBytes)
}

// HasDeleted reports whether an entry from an id on may have been deleted from the middle of the stream; first is its
// first entry's id.
func (s *Stream) HasDeleted(from, first StreamID) bool {
	return s.n > 0 && s.MaxDeleted != (StreamID{}) && first.Compare(s.MaxDeleted) <= 0 &&
		from.Compare(s.MaxDeleted) <= 0
}

// CountTo is how many entries the stream has ever had up to an id; -1: nobody knows.
func (s *Stream) CountTo(id, first StreamID) int64 {
	added := int64(s.Added)
	switch {
	case added == 0:
		return 0
	case s.n == 0 && id.Compare(s.Last) <= 0:
		return added
	case id == s.Last:
		return added
	case id.Compare(s.Last) > 0:
		return -1
	}
	if s.MaxDeleted == (StreamID{}) || s.MaxDeleted.Compare(first) < 0 {
		switch c := id.Compare(first); {
		case c < 0:
			return added - int64(s.n)
		case c == 0:
			return added - int64(s.n) + 1
		}
	}
	return -1
}

// Lag is how many entries a group has yet to read; ok is false if nobody knows.
func (s *Stream) Lag(g *StreamGroup, first StreamID) (lag int64, ok bool) {
	if s.Added == 0 {
		return 0, true
	}
	read := g.Read
	if read == -1 || s.HasDeleted(g.Last, first) {
		read = s.CountTo(g.Last, first)
	}
	return int64(s.Added) - read, read != -1
}
