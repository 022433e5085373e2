package server

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/server/raftstore"
)

// disk is what a data folder says of itself: the directory node that it is of, for good, and its incarnation, which is
// made with it. To raft a member is both: a node that has lost its disk has forgotten whom it voted for and what it
// acknowledged, so it is another member than before, and whoever was told to count the former one counts nothing that
// this one says. Raft's configuration is where it says so; there each node has it as soon as the entry that makes it a
// member, and no later.
type disk struct {
	id          string
	incarnation string // empty: the folder is of a version that made none
}

const (
	// diskKey is the row of the stable store that has a disk: its id, a zero byte, its incarnation.
	diskKey = "kvd data folder"
	// incarnationMark comes between an id and an incarnation in a server id of raft's.
	incarnationMark = '#'
	incarnationLen  = 16 // hexadecimal digits
)

// server is how raft knows the member.
func (d disk) server() raft.ServerID {
	if d.incarnation == "" {
		return raft.ServerID(d.id)
	}
	return raft.ServerID(d.id + string(incarnationMark) + d.incarnation)
}

// diskOf is the inverse of server.
func diskOf(server raft.ServerID) disk {
	s := string(server)
	if i := strings.LastIndexByte(s, incarnationMark); i > 0 && isIncarnation(s[i+1:]) {
		return disk{s[:i], s[i+1:]}
	}
	return disk{id: s}
}

func isIncarnation(s string) bool {
	return len(s) == incarnationLen && strings.Trim(s, "0123456789abcdef") == ""
}

// String names the member to operators.
func (d disk) String() string {
	if d.incarnation == "" {
		return fmt.Sprintf("directory node %q with a data folder of an earlier version", d.id)
	}
	return fmt.Sprintf("directory node %q with the data folder %s", d.id, d.incarnation)
}

// openDisk is the disk in store, made if there is none. A store with a state and without a disk is of an earlier
// version: claimDisk writes it down, once the state is known to be of id.
func openDisk(store *raftstore.Store, id string, hasState bool) (disk, error) {
	b, err := store.Get([]byte(diskKey))
	if err != nil {
		return disk{}, err
	}
	if len(b) > 0 {
		name, incarnation, ok := bytes.Cut(b, []byte{0})
		d := disk{string(name), string(incarnation)}
		if !ok || d.id == "" || d.incarnation != "" && !isIncarnation(d.incarnation) {
			return disk{}, &raftstore.CorruptError{What: "name of the data folder", Why: fmt.Sprintf("%.128q", b)}
		}
		if d.id != id {
			return disk{}, fmt.Errorf("the data folder is of directory node %q, and was to be used as %q: nothing "+
				"was changed. Each directory node has a folder of its own, for good",
				d.id, id)
		}
		return d, nil
	}
	if hasState {
		return disk{id: id}, nil
	}
	b = make([]byte, incarnationLen/2)
	rand.Read(b) // crypto/rand: never fails
	d := disk{id, hex.EncodeToString(b)}
	return d, d.keep(store)
}

func (d disk) keep(store *raftstore.Store) error {
	return store.Set([]byte(diskKey), []byte(d.id+"\x00"+d.incarnation))
}

// claimDisk writes down whose the data folder of an earlier version is, if the cluster in it has such a node.
func (n *Node) claimDisk() error {
	if _, member := n.members()[n.opts.ID]; !member || n.disk.incarnation != "" {
		return nil
	}
	return n.disk.keep(n.store)
}
