package server

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	stdmaps "maps"
	"math"
	"slices"
	"sync"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/units"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
	"github.com/kvd-project/kvd/server/raftstore"
)

const maxSnapshotBytes = 1 << 30

// errDeposed answers a command that a leader proposed in an earlier term than
// the one its entry is of. It changed nothing.
var errDeposed = errors.New("leadership changed before the command was logged")

// machine hosts the state machine for raft: it locks the state, keeps its rows
// on disk and wakes watchers.
//
// The rows carry the log index they reflect, and a snapshot carries it too, so
// an entry is applied once even though raft replays its log from the last
// snapshot, and even though a snapshot taken during that replay holds later entries
// than its label says.
type machine struct {
	store *raftstore.Store
	log   *slog.Logger

	mu struct {
		sync.RWMutex
		state   *fsm.State
		applied uint64
		ruled   uint64        // the last applied entry of the term of the state's latest leadership; 0: not known
		halted  error         // why nothing is applied any more
		moved   chan struct{} // closed and replaced when the map has another version
		news    chan struct{} // the same when anything has changed that memory nodes are told of
	}

	// halt is told, once, of an entry or a snapshot of a level that this version does not know, or that applied entries
	// are to be replaced. Nothing is applied from then on.
	halt func(error)

	maps maps // of state; taken with mu held
	// ends are the sessions that are watched: their channels are closed when they begin to be fenced, or end. It is
	// taken with mu held.
	ends struct {
		sync.Mutex
		of map[uint32]chan struct{}
	}
}

// marks tell whether a state has changed in what others wait for.
type marks struct {
	version, sessions uint64
	keys              uint32
}

func marksOf(s *fsm.State) marks {
	m := marks{version: s.MapVersion(), keys: s.KeyGeneration()}
	_, m.sessions, _ = s.ChangedSessions(0)
	return m
}

var _ raft.BatchingFSM = (*machine)(nil)

// newMachine restores the newest of the applied rows and the newest snapshot.
func newMachine(store *raftstore.Store, log *slog.Logger) (*machine, error) {
	m := &machine{store: store, log: log, halt: func(error) {}}
	m.mu.moved, m.mu.news = make(chan struct{}), make(chan struct{})
	m.ends.of = make(map[uint32]chan struct{})
	applied, err := store.Applied()
	if err != nil {
		return nil, err
	}
	snaps, err := store.Snapshots().List()
	if err != nil {
		return nil, err
	}
	if len(snaps) > 0 && snaps[0].Index > applied {
		// A crash between a snapshot's arrival and its restore; or nothing but
		// entries that are not commands in between.
		_, r, err := store.Snapshots().Open(snaps[0].ID)
		if err != nil {
			return nil, err
		}
		return m, errors.Join(m.restore(r, applied), r.Close())
	}
	var rows []fsm.Row
	err = store.Rows(func(k, v []byte) error {
		rows = append(rows, fsm.Row{Key: append([]byte(nil), k...), Value: append([]byte{}, v...)})
		return nil
	})
	if err != nil {
		return nil, err
	}
	m.mu.applied = applied
	m.mu.state, err = fsm.Load(rows)
	return m, err
}

// view calls fn with the state locked for reading. Messages got from the state
// may be kept.
func (m *machine) view(fn func(s *fsm.State)) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	fn(m.mu.state)
}

// position is how far the state has got in the latest leadership that it knows; nil if nothing was applied of that by
// this process. A leader that was deposed may have applied entries of the next one already, which are not its own to
// tell of.
func (m *machine) position() *dirpb.Position {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.state.Position(m.mu.ruled)
}

// reached is how far the state has got, of whatever process.
func (m *machine) reached() *dirpb.Position {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.state.Position(m.mu.applied)
}

// viewAt is view with the entry up to which the state reflects the log.
func (m *machine) viewAt(fn func(s *fsm.State, applied uint64)) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	fn(m.mu.state, m.mu.applied)
}

// move is closed when the map has another version. Take it before looking at the state.
func (m *machine) move() <-chan struct{} {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.moved
}

// news is closed when the map has another version, or sessions or keys have changed: what memory nodes are told
// of. Take it before looking at the state.
func (m *machine) news() <-chan struct{} {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.news
}

// end is closed when a session that lives begins to be fenced, or ends. Call it with the state locked.
func (m *machine) end(session uint32) <-chan struct{} {
	m.ends.Lock()
	defer m.ends.Unlock()
	if m.ends.of[session] == nil {
		m.ends.of[session] = make(chan struct{})
	}
	return m.ends.of[session]
}

func (m *machine) appliedIndex() uint64 {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.mu.applied
}

func (m *machine) Apply(l *raft.Log) any { return m.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch answers every command with an fsm.Result.
func (m *machine) ApplyBatch(logs []*raft.Log) []any {
	out := make([]any, len(logs))
	var rows []raftstore.Row
	var lost []fsm.Lost
	var entries []*dirpb.AuditEntry
	m.mu.Lock()
	before, was := m.mu.applied, marksOf(m.mu.state)
	for i, l := range logs {
		if l.Index <= m.mu.applied {
			out[i] = fsm.Result{Err: fmt.Errorf("%w: entry %d was applied before", fsm.ErrExists, l.Index)}
			continue
		}
		if m.mu.halted != nil {
			out[i] = fsm.Result{Err: m.mu.halted}
			continue
		}
		if l.Type != raft.LogCommand {
			m.mu.applied = l.Index
			continue
		}
		res := applyEntry(m.mu.state, l)
		out[i] = res
		if l.Term == m.mu.state.ReignTerm() {
			m.mu.ruled = l.Index
		}
		if errors.Is(res.Err, fsm.ErrLevel) {
			// Others carry it out. A later version, started on this data folder, goes on with this entry.
			m.haltLocked(fmt.Errorf("entry %d of the log: %w", l.Index, res.Err))
			continue
		}
		m.mu.applied = l.Index
		lost = append(lost, res.Lost...)
		if res.Audit != nil {
			entries = append(entries, res.Audit)
		}
		for _, r := range res.Changes {
			rows = append(rows, raftstore.Row(r))
		}
	}
	applied := m.mu.applied
	m.wakeLocked(was)
	m.mu.Unlock()
	for _, x := range lost {
		what := []any{"pg", x.PG, "node", x.Node, "held_bytes", x.HeldBytes}
		text := "directory: data lost: a placement group lost its last copy"
		if x.Volume != 0 {
			text = "directory: data lost: a tier node was given up"
			what = []any{"volume", x.Volume, "tier_node", x.Node}
		}
		m.log.Warn(text, append([]any{"namespace", x.Namespace, "accept", "kvctl namespace accept-loss " + x.Namespace},
			what...)...)
	}
	for _, e := range entries {
		logAudit(m.log, e)
	}
	if applied > before {
		// The log has the entries, so rows that are not written cost a replay. A
		// store that fails stops the node by itself.
		if err := m.store.WriteRows(applied, rows); err != nil {
			m.log.Error("directory: applied state was not stored", "index", applied, "err", err)
		}
	}
	return out
}

func applyEntry(s *fsm.State, l *raft.Log) fsm.Result {
	c := new(fsmpb.Command)
	if err := proto.Unmarshal(l.Data, c); err != nil {
		return fsm.Result{Err: fmt.Errorf("%w: entry %d: %v", fsm.ErrInvalid, l.Index, err)}
	}
	if c.Term != l.Term {
		return fsm.Result{Err: errDeposed}
	}
	return fsm.Apply(s, c)
}

// recoverAs applies c, which is in no log, to the state and its rows.
func (m *machine) recoverAs(c *fsmpb.Command) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.halted != nil {
		return m.mu.halted
	}
	res := fsm.Apply(m.mu.state, c)
	if res.Err != nil {
		return res.Err
	}
	rows := make([]raftstore.Row, 0, len(res.Changes))
	for _, r := range res.Changes {
		rows = append(rows, raftstore.Row(r))
	}
	if res.Audit != nil {
		logAudit(m.log, res.Audit)
	}
	return m.store.WriteRows(m.mu.applied, rows)
}

// haltLocked ends the application of commands for good.
func (m *machine) haltLocked(err error) {
	if m.mu.halted == nil {
		m.mu.halted = err
		m.halt(err)
	}
}

// wakeLocked wakes those who wait for what has changed since the state was marked.
func (m *machine) wakeLocked(was marks) {
	is := marksOf(m.mu.state)
	if is == was {
		return
	}
	close(m.mu.news)
	m.mu.news = make(chan struct{})
	if is.version != was.version {
		close(m.mu.moved)
		m.mu.moved = make(chan struct{})
	}
	ids, _, ok := m.mu.state.ChangedSessions(was.sessions)
	m.ends.Lock()
	defer m.ends.Unlock()
	if !ok {
		ids = slices.Collect(stdmaps.Keys(m.ends.of))
	}
	for _, id := range ids {
		if ch := m.ends.of[id]; ch != nil {
			close(ch)
			delete(m.ends.of, id)
		}
	}
}

// Snapshot encodes the state at once; it is small, holding nothing per key.
func (m *machine) Snapshot() (raft.FSMSnapshot, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.mu.halted != nil {
		return nil, m.mu.halted // raft would drop entries that are not applied
	}
	snap := &fsmpb.Snapshot{Applied: m.mu.applied}
	for _, r := range m.mu.state.Rows() {
		snap.Rows = append(snap.Rows, &fsmpb.Row{Key: r.Key, Value: r.Value})
	}
	b, err := proto.Marshal(snap)
	return machineSnapshot(b), err
}

type machineSnapshot []byte

func (b machineSnapshot) Persist(sink raft.SnapshotSink) error {
	if k, ok := sink.(*keptSink); ok {
		k.ours = true
	}
	_, err := sink.Write(b)
	return err
}

func (machineSnapshot) Release() {}

// Restore replaces the state with a snapshot that raft received.
func (m *machine) Restore(r io.ReadCloser) error {
	return errors.Join(m.restore(r, 0), r.Close())
}

// readSnapshot reads a snapshot and the state in it. With fsm.ErrLevel the snapshot is there, and the state is not.
func readSnapshot(r io.Reader) (*fsmpb.Snapshot, *fsm.State, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxSnapshotBytes+1))
	if err != nil {
		return nil, nil, err
	}
	if len(b) > maxSnapshotBytes {
		return nil, nil, fmt.Errorf("snapshot is longer than %s", units.Bytes(maxSnapshotBytes))
	}
	snap := new(fsmpb.Snapshot)
	if err := proto.Unmarshal(b, snap); err != nil {
		return nil, nil, fmt.Errorf("corrupt snapshot: %w", err)
	}
	var rows []fsm.Row
	for _, r := range snap.Rows {
		rows = append(rows, fsm.Row{Key: r.Key, Value: r.Value})
	}
	state, err := fsm.Load(rows)
	return snap, state, err
}

// restore reads a snapshot and adopts it if it reflects more than index least.
func (m *machine) restore(r io.Reader, least uint64) error {
	snap, state, err := readSnapshot(r)
	m.mu.Lock()
	defer m.mu.Unlock()
	if errors.Is(err, fsm.ErrLevel) {
		m.haltLocked(fmt.Errorf("snapshot of entry %d: %w", snap.Applied, err))
	}
	if err != nil {
		return err
	}
	var disk []raftstore.Row
	for _, r := range snap.Rows {
		disk = append(disk, raftstore.Row{Key: r.Key, Value: append([]byte{}, r.Value...)})
	}
	if snap.Applied < least {
		return fmt.Errorf("snapshot reflects entry %d but the applied state entry %d", snap.Applied, least)
	}
	if err := m.store.ReplaceRows(snap.Applied, disk); err != nil {
		return err
	}
	m.mu.state, m.mu.applied, m.mu.ruled = state, snap.Applied, 0
	m.maps.forget()
	m.wakeLocked(marks{sessions: math.MaxUint64}) // of another state
	return nil
}
