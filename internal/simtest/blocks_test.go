package simtest

import (
	"slices"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

// block is what the directory knows of the status words that a client is granted together. A session that ends leaves a
// dead one, which is free when every placement group has been gone through by a SETTLE that began after that.
type block struct {
	at    []index.StatusAt
	owner *cl
	state blockState
	swept map[uint32]bool // placement groups that have been gone through since it is dead
}

type blockState uint8

const (
	blockGranted blockState = iota
	blockDead
	blockFree
)

// sweeping is a SETTLE job that a janitor has.
type sweeping struct {
	janitor *cl
	blocks  []*block // that were dead when it began
}

// settleJob is added to a placement group's number for the number of its SETTLE.
const settleJob = 1 << 20

// grantBlock notes that c was granted its first status words.
func (w *World) grantBlock(c *cl) {
	if w.cfg.Heirs == 0 {
		return
	}
	b := &block{owner: c}
	for _, x := range c.status {
		b.at = append(b.at, x.at)
	}
	w.blocks = append(w.blocks, b)
}

// endBlocks notes that sessions have ended.
func (w *World) endBlocks() {
	for _, b := range w.blocks {
		if b.state == blockGranted && w.fenced(b.owner) {
			b.state, b.swept = blockDead, map[uint32]bool{}
			w.touch()
		}
	}
}

// closeBlock gives c's block back: none of its intents is left.
func (w *World) closeBlock(c *cl) {
	if slices.ContainsFunc(c.status, func(x *statusWord) bool { return x.busy }) {
		return // it does not know
	}
	for _, b := range w.blocks {
		if b.state == blockGranted && b.owner == c {
			b.state = blockFree
			w.touch()
		}
	}
}

// findBlock is the first block in a state, nil if there is none.
func (w *World) findBlock(s blockState) *block {
	if i := slices.IndexFunc(w.blocks, func(b *block) bool { return b.state == s }); i >= 0 {
		return w.blocks[i]
	}
	return nil
}

// canInherit reports whether a Grant may begin: it waits for a block that will be free.
func (w *World) canInherit() bool {
	if w.findBlock(blockFree) != nil {
		return true
	}
	return w.findBlock(blockDead) == nil &&
		!slices.ContainsFunc(w.blocks, func(b *block) bool { return b.state == blockGranted && b.owner.life != live })
}

// inherit grants c a free block, if there is one. It reads the words, and goes on from them.
func (c *cl) inherit() {
	b := c.w.findBlock(blockFree)
	if b == nil {
		return
	}
	b.state, b.owner = blockGranted, c
	c.status = nil
	for _, at := range b.at {
		r := c.newRun(0)
		if r == nil {
			return
		}
		r.grant = &statusWord{at: at, busy: true}
		c.status = append(c.status, r.grant)
		r.t.Op.Kind, r.t.Op.Txn = index.Decide, &index.Txn{Status: at}
		c.start(r)
	}
}

// inherited takes what a status word holds. Its last owner may have had another transaction under way, whose number is
// spent with it: somebody may still hold an intent of that which was lost with the only copy.
func (c *cl) inherited(r *running, err error) {
	x := r.grant
	if err != nil {
		return // it is put aside
	}
	x.word = r.t.Op.Txn.Found
	x.seq = x.word.Seq() + 1
	x.busy = false
	c.tell(uint64(x.word))
}

// isSweep reports whether j is the World's own, not the directory's.
func isSweep(j *dirpb.Job) bool { return j.Kind == dirpb.JobKind_JOB_SETTLE }

// sweepable is a SETTLE that a janitor may claim, nil if there is none.
func (w *World) sweepable() *dirpb.Job {
	for _, pg := range w.st.PGs(1) {
		if pg.State != dirpb.PGState_PG_ACTIVE || w.sweeps[pg.Id] != nil && !w.fenced(w.sweeps[pg.Id].janitor) ||
			slices.ContainsFunc(w.st.Jobs(), func(j *dirpb.Job) bool {
				return j.PgId == pg.Id || j.TargetPgId == pg.Id
			}) {
			continue
		}
		if len(w.deadFor(pg.Id)) > 0 {
			return &dirpb.Job{Id: settleJob + pg.Id, Kind: dirpb.JobKind_JOB_SETTLE, NamespaceId: 1, PgId: pg.Id}
		}
	}
	return nil
}

// deadFor lists the dead blocks for which pg has yet to be gone through.
func (w *World) deadFor(pg uint32) (list []*block) {
	for _, b := range w.blocks {
		if b.state == blockDead && !b.swept[pg] {
			list = append(list, b)
		}
	}
	return list
}

// claimJob makes c the owner of j.
func (c *cl) claimJob(j *dirpb.Job) error {
	w := c.w
	if isSweep(j) {
		w.sweeps[j.PgId] = &sweeping{c, w.deadFor(j.PgId)}
		w.touch()
		return nil
	}
	return w.apply(&fsmpb.Command{
		Op: &fsmpb.Command_ClaimJob{ClaimJob: &fsmpb.ClaimJob{SessionId: c.id, JobId: j.Id}}}).Err
}

// owns reports whether j is still c's.
func (c *cl) owns(j *dirpb.Job) bool {
	if isSweep(j) {
		s := c.w.sweeps[j.PgId]
		return s != nil && s.janitor == c
	}
	now := c.w.st.Job(j.Id)
	return now != nil && now.Owner == c.id
}

// endSweep ends a SETTLE that is done, or given back.
func (w *World) endSweep(j *dirpb.Job, done bool) {
	s := w.sweeps[j.PgId]
	delete(w.sweeps, j.PgId)
	w.touch()
	w.effects++
	if !done {
		return
	}
	for _, b := range s.blocks {
		if b.state != blockDead {
			continue
		}
		b.swept[j.PgId] = true
		if !slices.ContainsFunc(w.st.PGs(1), func(pg *dirpb.PlacementGroup) bool { return !b.swept[pg.Id] }) {
			b.state = blockFree
		}
	}
}

// blockSum identifies what the directory knows of blocks.
func (w *World) blockSum() (h uint64) {
	for _, b := range w.blocks {
		x := uint64(b.state) | uint64(b.owner.i)<<8
		for _, pg := range w.st.PGs(1) {
			x = x<<2 | uint64(b2i(b.swept[pg.Id]))<<1 | uint64(
				b2i(w.sweeps[pg.Id] != nil && slices.Contains(w.sweeps[pg.Id].blocks, b)))
		}
		h = h*31 + x
	}
	return h
}

// statusArray is where the status words are, in every placement group.
func (w *World) statusArray() []*dirpb.StatusArray {
	if w.cfg.Status == 0 {
		return nil
	}
	return []*dirpb.StatusArray{{Offset: w.statusBase(), Segments: 1}}
}

// relevantTxns notes the groups that transactions write to.
func (w *World) relevantTxns() {
	for _, t := range w.cfg.Txns {
		for _, p := range t {
			h, _ := hashOf(p.Key)
			home, _ := layout.GroupOff(h, uint32(w.cfg.Segments))
			c := int(home / layout.SegmentSize)
			w.relevant[[2]int{c, int(home%layout.SegmentSize) / layout.GroupSize}] = true
			w.relevant[[2]int{c, layout.StashGroup}] = true
		}
	}
}
