package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/hashicorp/raft"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/raftstore"
)

// RecoverOptions say which data folder a cluster goes on with.
type RecoverOptions struct {
	// DataDir is the data folder of a directory node that does not run. Required.
	DataDir string
	// ID is that node's. Required.
	ID string
	// Version is what the program calls itself.
	Version string
	// Logger: default none.
	Logger *slog.Logger
	// Confirm is told what the folder holds, and refuses with an error. Required.
	Confirm func(Folder) error
}

// Folder is what a data folder holds.
type Folder struct {
	ClusterID  string
	Term, Last uint64   // of the log's last entry
	Applied    uint64   // entry that the state reflects
	Recoveries uint64   // that there were before
	Led        []Led    // the latest leaderships, the last one first
	Others     []string // directory nodes that the folder knows besides its own
	Namespaces []string
	Nodes      []string // memory nodes
}

// Led is a leadership that a data folder knows. Memory nodes that were told of an entry of its term up to
// Last were told nothing that the folder lacks.
type Led struct{ Term, Last uint64 }

// folderLeds is how many leaderships a Folder names.
const folderLeds = 4

// ErrOthersRun refuses a recovery while another directory node, or something at its address, answers.
var ErrOthersRun = errors.New("another directory node may still run")

// recoverDial bounds how long a directory node is given to answer.
const recoverDial = 2 * time.Second

// Recover makes the data folder of one directory node a cluster of its own, for when a majority of the others is gone
// for good. Entries that the others committed and this folder does not have are lost; all sessions end. It is refused
// while one of the others answers. Other directory nodes join it afterwards, with empty folders. An error says that the
// folder is as it was, unless it says otherwise; Recover may be repeated.
func Recover(ctx context.Context, o RecoverOptions) (f Folder, err error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	store, err := raftstore.Open(ctx, raftstore.Options{Dir: o.DataDir, Logger: o.Logger})
	if err != nil {
		return f, fmt.Errorf("recover: %w", err)
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	own, err := openDisk(store, o.ID, true)
	if err != nil {
		return f, fmt.Errorf("recover: data folder %s: %w", o.DataDir, err)
	}
	m, err := newMachine(store, o.Logger)
	if err != nil {
		return f, fmt.Errorf("recover: restore from %s: %w", o.DataDir, err)
	}
	if f, err = folderOf(store, m, o.ID); err != nil {
		return f, fmt.Errorf("recover: data folder %s: %w", o.DataDir, err)
	}
	var addr string
	var others []*fsmpb.Directory
	m.view(func(s *fsm.State) {
		addr = s.DirectoryNode(o.ID).GetRaftAddr()
		for _, d := range s.Directory() {
			if d.Id != o.ID {
				others = append(others, d)
			}
		}
	})
	for _, d := range others {
		if err := silent(ctx, d); err != nil {
			return f, err
		}
	}
	if err := o.Confirm(f); err != nil {
		return f, err
	}
	c := &fsmpb.Command{
		Op: &fsmpb.Command_Recover{
			Recover: &fsmpb.Recover{Node: o.ID, UnixMillis: time.Now().UnixMilli(), Key: newKey(),
				PreviousKey: newKey()}},
		Audit: &dirpb.AuditEntry{UnixMillis: time.Now().UnixMilli(), Action: actRecoverDirectory, Object: o.ID,
			Detail: fmt.Sprintf("entry=%d term=%d", f.Last, f.Term)}}
	conf := raft.DefaultConfig()
	conf.LocalID, conf.Logger = own.server(), newRaftLogger(o.Logger)
	_, transport := raft.NewInmemTransport(raft.ServerAddress(addr))
	err = raft.RecoverCluster(conf, recovering{m, c}, store, stable{store}, store.Snapshots(), transport,
		raft.Configuration{Servers: []raft.Server{{
			Suffrage: raft.Voter, ID: own.server(), Address: raft.ServerAddress(addr),
		}}})
	if err != nil {
		return f, fmt.Errorf("recover: data folder %s may be recovered in part: repeat it: %w", o.DataDir, err)
	}
	return f, nil
}

// recovering is a machine whose snapshot is that of the recovered state.
type recovering struct {
	*machine
	command *fsmpb.Command
}

func (r recovering) Snapshot() (raft.FSMSnapshot, error) {
	if err := r.recoverAs(r.command); err != nil {
		return nil, err
	}
	return r.machine.Snapshot()
}

// Restore is not for a state that is later than the snapshot already.
func (r recovering) Restore(b io.ReadCloser) error {
	if r.appliedIndex() > 0 {
		return b.Close()
	}
	return r.machine.Restore(b)
}

// folderOf tells what a folder holds, and refuses one that is not a member's of this id.
func folderOf(store *raftstore.Store, m *machine, id string) (f Folder, err error) {
	if f.Last, err = store.LastIndex(); err != nil {
		return f, err
	}
	l := new(raft.Log)
	snaps, err := store.Snapshots().List()
	switch {
	case err != nil:
		return f, err
	case f.Last > 0:
		err = store.GetLog(f.Last, l)
	case len(snaps) > 0:
		l.Term, f.Last = snaps[0].Term, snaps[0].Index
	}
	if err != nil {
		return f, err
	}
	f.Term, f.Applied = l.Term, m.appliedIndex()
	m.view(func(s *fsm.State) {
		f.ClusterID, f.Recoveries = s.Meta().ClusterId, s.Meta().Recoveries
		switch {
		case f.ClusterID == "":
			err = ErrNoState
		case s.DirectoryNode(id) == nil:
			err = fmt.Errorf("it knows no directory node %q", id)
		}
		end := f.Applied
		for _, r := range s.Reigns()[:min(len(s.Reigns()), folderLeds)] {
			f.Led = append(f.Led, Led{r.Term, end})
			end = r.Base
		}
		for _, d := range s.Directory() {
			if d.Id != id {
				f.Others = append(f.Others, d.Id+" at "+d.GrpcAddr)
			}
		}
		for _, w := range s.Map(nil).Namespaces {
			f.Namespaces = append(f.Namespaces, w.Name)
		}
		for _, n := range s.Nodes() {
			f.Nodes = append(f.Nodes, n.Name)
		}
	})
	return f, err
}

// silent refuses a recovery if anything answers at a directory node's addresses.
func silent(ctx context.Context, d *fsmpb.Directory) error {
	for _, addr := range []string{d.GrpcAddr, d.RaftAddr} {
		ctx, cancel := context.WithTimeout(ctx, recoverDial)
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		cancel()
		if err == nil {
			_ = c.Close() // nothing was sent
			return fmt.Errorf("%w: directory node %q, or another process, answers at %s; nothing was done. If a "+
				"majority of the directory nodes can be started, start them; "+
				"if not, stop this one for good", ErrOthersRun, d.Id, addr)
		}
	}
	return nil
}
