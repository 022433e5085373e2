package lead

import (
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/server/fsm"
	"github.com/kvd-project/kvd/server/fsm/fsmpb"
)

const (
	// volumeWait is how long a tier node may be silent before caches take what it holds for lost. A store waits until
	// an operator gives it up.
	volumeWait = time.Minute
	// Tier nodes demote in a placement group that is full to the first of these, percent, until it is full to the
	// second.
	demoteFrom, demoteTo = 85, 75
)

// volume is what the leader knows of a volume of the state.
type volume struct {
	boot  uint64
	heard time.Duration
	used  uint64 // bytes, as it said last
}

// KeptVolume notes that the process of a volume was heard.
func (l *Leader) KeptVolume(id uint32, boot, used uint64, now time.Duration) {
	l.volumes[id] = &volume{boot: boot, heard: now, used: used}
}

// VolumeStats is how much of its disk a volume has said that it uses, in bytes, and how long it has not been heard. A
// leader hears each within moments after its election.
func (l *Leader) VolumeStats(id uint32, now time.Duration) (usedBytes uint64, silent time.Duration) {
	if x := l.volumes[id]; x != nil {
		return x.used, now - x.heard
	}
	return 0, now - l.began
}

// silenceVolumes tells of volumes that were not heard for long.
func (p *plan) silenceVolumes() {
	for id := range p.l.volumes {
		if p.s.Volume(id) == nil {
			delete(p.l.volumes, id)
		}
	}
	for _, v := range p.s.Volumes() {
		x := p.l.volumes[v.Id]
		if x == nil || x.boot < v.Boot { // of an earlier leader's time, or registered and not answered yet
			x = &volume{boot: v.Boot, heard: p.now}
			p.l.volumes[v.Id] = x
		}
		if v.State == dirpb.VolumeState_VOLUME_UP && p.now-x.heard >= volumeWait {
			p.add(&fsmpb.Command{Op: &fsmpb.Command_SilenceVolume{SilenceVolume: &fsmpb.SilenceVolume{VolumeId: v.Id,
				Boot: v.Boot}}}, "tier node %q was not heard for %v: caches take what it holds for lost", v.Name,
				volumeWait)
		}
	}
}

// TierBudgets is what is to be demoted in each placement group of a namespace, by its tier nodes together.
func (l *Leader) TierBudgets(s *fsm.State, namespace uint32, now time.Duration) (out []*dirpb.TierBudget) {
	for _, pg := range s.PGs(namespace) {
		m, most := l.memory(s, pg.Id), shareable(s, pg)
		live := l.Account(s, pg.Id, now).Live
		switch {
		case live*100 >= most*demoteFrom:
			m.demotes = true
		case live*100 <= most*demoteTo:
			m.demotes = false
		}
		if m.demotes {
			out = append(out, &dirpb.TierBudget{PgId: pg.Id, Bytes: (live - most*demoteTo/100) * layout.UnitSize})
		}
	}
	return out
}
