package archive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
	"time"
)

// The lock of a destination is a row of files with numbers, in a folder whose name no namespace can have. The newest
// counts: it names who holds the lock, and how soon the next one comes. A lock belongs to the maker of the next number:
// files are made if they are absent, so it is one. The newest is never taken away. So clocks need not agree, and a
// holder that stood still finds a later number.
const (
	lockDir = "LOCK/"
	// missedBeats is how many beats are missed before another takes the lock over.
	missedBeats = 3
	// maxLockFile bounds a file of the lock, in bytes.
	maxLockFile = 4 << 10
	// Bounds of a beat that a file tells of.
	minBeat, maxBeat = 10 * time.Millisecond, time.Hour
)

// errLockLost: another has taken the lock over.
var errLockLost = errors.New("another archive has taken over the lock of the destination")

// beatNumber is the number of a file of the lock; 0: it is somebody else's.
func beatNumber(name string) uint64 {
	n, err := strconv.ParseUint(strings.TrimSuffix(path.Base(name), ".json"), 10, 62)
	if err != nil || name != beatName(n) {
		return 0
	}
	return n
}

// beat is the content of a file of the lock.
type beat struct {
	Holder string `json:"holder"`
	// Millis is when the next one follows, at the latest.
	Millis int64 `json:"millis"`
	// Released: nobody holds the lock.
	Released bool `json:"released"`
}

// lock is how one archive takes the lock of a destination. It belongs to one goroutine.
type lock struct {
	d      Destination
	holder string // unlike that of any other
	every  time.Duration
	n      uint64    // the file that it made last
	at     time.Time // before that was made: others wait from when they see it
}

func beatName(n uint64) string { return fmt.Sprintf("%s%020d.json", lockDir, n) }

// newest gives the newest file's number and what it says; 0: there is none.
func (l *lock) newest(ctx context.Context) (n uint64, b beat, err error) {
	all, err := l.d.List(ctx, lockDir)
	if err != nil {
		return 0, b, err
	}
	for _, f := range all {
		n = max(n, beatNumber(f.Name))
	}
	if n == 0 {
		return 0, b, nil
	}
	b, err = l.read(ctx, n)
	return n, b, err
}

func (l *lock) read(ctx context.Context, n uint64) (b beat, err error) {
	text, err := readAll(ctx, l.d, beatName(n), maxLockFile)
	if err != nil {
		return b, err
	}
	if err := json.Unmarshal(text, &b); err != nil {
		return b, &CorruptError{beatName(n), -1, err}
	}
	return b, nil
}

// next makes the file behind n, and takes older ones away. errLockLost: another has made it, or later ones.
func (l *lock) next(ctx context.Context, n uint64, released bool) error {
	text, err := json.Marshal(beat{l.holder, l.every.Milliseconds(), released})
	if err != nil {
		return err
	}
	var began time.Time
	for {
		if n++; n >= 1<<61 {
			return fmt.Errorf("%s: number %d is too great for a lock's file: take it away", l.d, n-1)
		}
		began = time.Now()
		err := l.d.PutIfAbsent(ctx, beatName(n), text)
		if err == nil {
			break
		}
		if !exists(err) {
			return err
		}
		// Perhaps a try of this one made it that was thought to have failed.
		b, err := l.read(ctx, n)
		if err != nil || b.Holder != l.holder {
			return errors.Join(errLockLost, err)
		}
		if b.Released == released {
			break
		}
	}
	all, err := l.d.List(ctx, lockDir)
	if err != nil {
		return err
	}
	for _, f := range all {
		if beatNumber(f.Name) > n {
			return errLockLost
		}
	}
	l.n, l.at = n, began
	for _, f := range all {
		if k := beatNumber(f.Name); k > 0 && k < l.n {
			_ = l.d.Delete(ctx, f.Name) // the next beat tries again
		}
	}
	return nil
}

// acquire waits until nobody holds the lock, and takes it. waiting is told who does.
func (l *lock) acquire(ctx context.Context, waiting func(holder string)) error {
	seen, since := uint64(0), time.Time{}
	for {
		n, b, err := l.newest(ctx)
		if errors.Is(err, fs.ErrNotExist) {
			continue // there is a newer one by now
		}
		if bad := (*CorruptError)(nil); errors.As(err, &bad) { // whoever made it has as long as this one would
			b, err = beat{Holder: "unknown: " + bad.Error(), Millis: l.every.Milliseconds()}, nil
		}
		if err != nil {
			return err
		}
		wait := time.Duration(0)
		if n > 0 && !b.Released {
			if n != seen {
				seen, since = n, time.Now()
				waiting(b.Holder)
			}
			millis := min(max(b.Millis, minBeat.Milliseconds()), maxBeat.Milliseconds())
			their := time.Duration(millis) * time.Millisecond
			wait = min(time.Until(since.Add(missedBeats*their)), their)
		}
		if wait <= 0 {
			if err := l.next(ctx, n, false); !errors.Is(err, errLockLost) {
				return err
			}
			continue
		}
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
}

// sleep waits, or says why ctx has ended.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// hold calls fn while it holds the lock, and then releases it. fn's context ends if the lock is lost.
func (l *lock) hold(ctx context.Context, waiting func(holder string), fn func(context.Context) error) error {
	if err := l.acquire(ctx, waiting); err != nil {
		return err
	}
	held, lose := context.WithCancelCause(ctx)
	defer lose(nil)
	beats, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := l.beat(beats); err != nil {
			lose(err)
		}
	}()
	err := fn(held)
	stop()
	<-done
	if cause := context.Cause(held); cause != nil && ctx.Err() == nil {
		return cause // nothing of it is this one's any more
	}
	tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), missedBeats*l.every)
	defer cancel()
	if e := l.next(tidy, l.n, true); e != nil && !errors.Is(e, errLockLost) {
		err = errors.Join(err, fmt.Errorf("release the lock of %s: %w", l.d, e)) // it is taken over all the same
	}
	return err
}

// beat makes files until ctx ends; an error says that the lock is lost. Those that nobody could have seen missing do
// not matter.
func (l *lock) beat(ctx context.Context) error {
	last := l.at
	for {
		if sleep(ctx, max(0, min(l.every, time.Until(last.Add(l.every))))) != nil {
			return nil
		}
		try, cancel := context.WithDeadline(ctx, last.Add(missedBeats*l.every))
		err := l.next(try, l.n, false)
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, errLockLost):
			return err
		case err == nil:
			last = l.at
		case time.Since(last) >= (missedBeats-1)*l.every:
			return fmt.Errorf("%w, or may have: %w", errLockLost, err)
		}
	}
}
