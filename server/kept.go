package server

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/raftstore"
)

// To Raft what is committed is so for good. Once data folders of others were put back from a backup, a leader may be
// elected that lacks entries which this node has applied, and Raft would have this node cut them off, so that nobody
// had them any more, and leave its state as it is. A node that is asked to stops instead, and its folder stays what it
// is: the one to recover from.

// ErrOthersOlder stops a directory node whose leader lacks what it has applied.
var ErrOthersOlder = errors.New("the directory's other data folders are older than this one")

// keptLog is a log that gives up nothing that has been applied, unless a snapshot has it.
type keptLog struct {
	*raftstore.Store
	m *machine
}

// DeleteRange deletes the entries from lo to hi, both included. These are from the beginning after a
// snapshot, or up to the end before a leader's own take their place.
func (k keptLog) DeleteRange(lo, hi uint64) error {
	applied := k.m.appliedIndex()
	if lo <= applied {
		first, err := k.FirstIndex()
		if err != nil {
			return err
		}
		snaps, err := k.Snapshots().List()
		if err != nil {
			return err
		}
		if lo != first || len(snaps) == 0 || snaps[0].Index < min(hi, applied) {
			return k.m.keep("their leader has something else in the place of entry %d of the log, of %d that are "+
				"applied", lo, applied)
		}
	}
	return k.Store.DeleteRange(lo, hi)
}

// keep stops the node since others lack what it has.
func (m *machine) keep(why string, args ...any) error {
	err := fmt.Errorf("%w: "+why+". Nothing was changed here. Keep this folder, stop the others, and go on from it: "+
		"kvctl directory recover; "+
		"the others join then with empty folders", append([]any{ErrOthersOlder}, args...)...)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.haltLocked(err)
	return err
}

// keptSnapshots takes from a leader no snapshot that lacks what has been applied here. Raft sends one to a node that
// lacks the beginning of the leader's log, and of that a snapshot has everything.
type keptSnapshots struct {
	raft.SnapshotStore
	m *machine
}

func (k keptSnapshots) Create(version raft.SnapshotVersion, index, term uint64, conf raft.Configuration,
	confIndex uint64, t raft.Transport) (raft.SnapshotSink, error) {
	s, err := k.SnapshotStore.Create(version, index, term, conf, confIndex, t)
	if err != nil {
		return nil, err
	}
	return &keptSink{SnapshotSink: s, m: k.m}, nil
}

// keptSink is a snapshot on its way to the disk.
type keptSink struct {
	raft.SnapshotSink
	m    *machine
	b    []byte // what was written, of another node's
	ours bool
}

func (k *keptSink) Write(b []byte) (int, error) {
	if !k.ours {
		if len(b) > maxSnapshotBytes-len(k.b) {
			return 0, fmt.Errorf("snapshot is longer than %s", units.Bytes(maxSnapshotBytes))
		}
		k.b = append(k.b, b...)
	}
	return k.SnapshotSink.Write(b)
}

// Close makes the snapshot exist, unless it cannot be read or lacks what is applied.
func (k *keptSink) Close() error {
	if k.ours {
		return k.SnapshotSink.Close()
	}
	snap, state, err := readSnapshot(bytes.NewReader(k.b))
	switch {
	case errors.Is(err, fsm.ErrLevel):
		k.m.mu.Lock()
		k.m.haltLocked(fmt.Errorf("snapshot of entry %d: %w", snap.Applied, err))
		k.m.mu.Unlock()
	case err == nil:
		applied := k.m.appliedIndex()
		if state.Lacks(k.m.reached(), snap.Applied) {
			err = k.m.keep("their leader's snapshot of entry %d lacks something of the %d entries that are applied",
				snap.Applied, applied)
		}
	}
	if err != nil {
		return errors.Join(err, k.Cancel())
	}
	return k.SnapshotSink.Close()
}
