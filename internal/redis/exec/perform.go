package exec

import (
	"errors"
	"math/rand/v2"
	"time"

	"github.com/kvd-project/kvd/client"
)

// maxTries is how often a Plan performs its Work, while others change what it has read.
// Each try that fails means that somebody else's write has succeeded, so the store as a whole makes progress.
const maxTries = 256

// ErrAgain: maxTries tries have each met a write of somebody else. Nothing was done.
var ErrAgain = errors.New("keys change too often; nothing was done")

// Work is what a Plan performs in one step. Its functions may run several times, and must have no other effects.
type Work struct {
	Keys []KeyName // that it is going to use, as far as that is known
	// Begin forgets what the try before has done. The Plan is empty.
	Begin func()
	// Run has the commands work on the Plan, and returns how many bytes of replies there are.
	Run func() (reply int)
}

// Perform performs w until it has taken effect in one step, which begins at that time in that database.
// Err is the error, unless that is of the commit. An error but client.ErrUnknownOutcome says that nothing was done.
func (p *Plan) Perform(at time.Time, db int, w *Work) error {
	for tries := range maxTries {
		// The pause grows with the tries, up to 64 ms, and is random: those who met once would meet again in step
		// otherwise. The first retry is most often enough.
		if tries > 1 && !p.host.Rest(rand.N(time.Millisecond<<min(tries/8, 6))) {
			return client.ErrClosed
		}
		if tries > 0 {
			at = time.Now()
		}
		p.Begin(at.UnixMilli(), db)
		w.Begin()
		again, err := p.try(w)
		if !again {
			return err
		}
	}
	return ErrAgain
}

// try is one try of Perform. A try that was given up for want of room is followed by one that begins with memory for
// it, as often as a value that is written takes it.
func (p *Plan) try(w *Work) (again bool, err error) {
	if p.Room > p.limits.OneLimit && !p.Take(p.limits.WriteCost*int64(p.Room)) {
		return false, p.Err
	}
	if p.LoadNamed(w.Keys); p.Err != nil {
		return false, p.Err
	}
	// The replies were made in any case by now; their memory is taken so that many long ones at a time are refused.
	if n := w.Run(); p.Err == nil && n > p.limits.OneLimit {
		p.Take(2 * int64(n))
	}
	if p.Err != nil {
		return false, p.Err
	}
	if want := p.Wanted(); want > 0 {
		p.Room = max(want, 2*p.Room)
		return true, nil
	}
	err = p.Commit()
	return errors.Is(err, ErrChanged), err
}
