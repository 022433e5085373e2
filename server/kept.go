package server

import (
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/server/raftstore"
)

// To Raft what is committed is so for good. Once data folders of others were put back from a backup, a leader may be elected that lacks
// entries which this node has applied, and Raft would have this node cut them off, so that nobody had them any more, and leave its
// state as it is. A node that is asked to stops instead, and its folder stays what it is: the one to recover from.

// ErrOthersOlder stops a directory node whose leader lacks what it has applied.
var ErrOthersOlder = errors.New("the directory's other data folders are older than this one")

// keptLog is a log that gives up nothing that has been applied, unless a snapshot has it.
type keptLog struct {
	*raftstore.Store
	m *machine
}

// DeleteRange deletes the entries from lo to hi, both included: from the beginning after a snapshot, or up to the end before a leader's own
// take their place.
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
			err = fmt.Errorf("%w: their leader has something else in the place of entry %d of the log, of %d that are applied. Nothing was changed here. Keep this folder, "+
				"stop the others, and go on from it: kvctl directory recover; the others join then with empty folders", ErrOthersOlder, lo, applied)
			k.m.mu.Lock()
			defer k.m.mu.Unlock()
			k.m.haltLocked(err)
			return err
		}
	}
	return k.Store.DeleteRange(lo, hi)
}
