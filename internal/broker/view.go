package broker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/ring"
)

const (
	// defaultHold and maxHold are for how long a program may look.
	defaultHold = time.Second
	maxHold     = 10 * time.Second
	// maxRegions is how many regions a program may have at a time. The broker has a descriptor of each.
	maxRegions = 32
)

// views are what a program looks at in place. A View is over when its program releases it, when its time is over, or
// when the connection ends, whichever is first. Then nobody here knows its number any more.
type views struct {
	sync.Mutex
	all     map[uint64]*view // by the program's number
	regions map[inode]*region
	last    uint32 // number of a region
	closed  bool
}

// view is one of them. Its client.View belongs to whoever has the mutex.
type view struct {
	*client.View
	region *region
	lapse  *time.Timer
}

// inode tells files apart while somebody has them open.
type inode struct{ dev, ino uint64 }

// region is a file that the program has.
type region struct {
	id     inode
	number uint32 // of this connection, never used again
	file   *os.File
	views  int
	idle   *time.Timer // nil: it was never without Views
}

// takeView counts a View before its length is known.
func (t *tenant) takeView() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.views >= t.Limits.Views {
		return fmt.Errorf("this socket's programs have %d views, which is the limit", t.mu.views)
	}
	t.mu.views++
	t.stats.Views.Store(int64(t.mu.views))
	return nil
}

// takeShown counts n bytes of one.
func (t *tenant) takeShown(n int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n > t.Limits.ViewBytes-t.mu.shown {
		return fmt.Errorf("a view of %d bytes: this socket's programs have %d of %d", n, t.mu.shown, t.Limits.ViewBytes)
	}
	t.mu.shown += n
	t.stats.ViewBytes.Store(t.mu.shown)
	return nil
}

// leaveView gives both back.
func (t *tenant) leaveView(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.views--
	t.mu.shown -= n
	t.stats.Views.Store(int64(t.mu.views))
	t.stats.ViewBytes.Store(t.mu.shown)
}

// view performs VIEW.
func (q *queue) view(ctx context.Context, it *item) *ring.Completion {
	s, t := &it.sub, q.c.t
	hold := defaultHold
	if s.TTL != 0 {
		hold = time.Duration(min(s.TTL, uint64(time.Hour/time.Millisecond))) * time.Millisecond
	}
	switch {
	case t.Limits.ViewBytes == 0:
		return q.failure(s.Tag, ring.No, ring.Unsupported, "this socket has no views (view-memory is 0)")
	case hold > maxHold:
		return q.failure(s.Tag, ring.No, ring.Argument, fmt.Sprintf("a view stands for %v at most", maxHold))
	}
	if err := t.takeView(); err != nil {
		return q.failure(s.Tag, ring.No, ring.Busy, err.Error())
	}
	kept, shown := false, int64(0)
	defer func() {
		if !kept {
			t.leaveView(shown)
		}
	}()
	v, err := q.c.client.View(ctx, it.key, client.ViewOptions{Hold: hold})
	if err != nil {
		return q.failed(s, err, 0)
	}
	defer func() {
		if !kept {
			_ = v.Release()
		}
	}()
	if err := t.takeShown(v.Size); err != nil {
		return q.failure(s.Tag, ring.No, ring.Busy, err.Error())
	}
	shown = v.Size
	x, err := q.show(s, v, hold)
	kept = err == nil
	if err != nil {
		var no *refusal
		if errors.As(err, &no) {
			return q.failure(s.Tag, ring.No, no.code, no.Error())
		}
		return q.failed(s, err, 0)
	}
	return x
}

// show makes v one of the program's, who has its region before this returns.
func (q *queue) show(s *ring.Submission, v *client.View, hold time.Duration) (*ring.Completion, error) {
	h, err := v.Handle()
	if errors.Is(err, errors.ErrUnsupported) {
		return nil, refused(ring.Unsupported, "the value is short, or not in memory of this machine that can be "+
			"shown: get it")
	}
	if err != nil {
		return nil, err
	}
	_ = h.State.Close() // the verdict says as much
	if len(h.Parts) > ring.MaxParts {
		_ = h.Memory.Close()
		return nil, refused(ring.TooLarge, "the value has %d parts, and a view %d at most", len(h.Parts), ring.MaxParts)
	}
	x := &ring.Completion{Tag: s.Tag, Length: uint64(v.Size), Version: v.Version, Expires: unixMS(v.Expires),
		ValueFlags: v.Flags, Offset: uint64(h.Parts[0].Off)}
	if len(h.Parts) > 1 {
		x.Flags = ring.FlagChunked
		parts := make([]ring.Part, len(h.Parts))
		for i, p := range h.Parts {
			parts[i] = ring.Part{Offset: uint64(p.Off), Length: uint64(p.Len)}
		}
		ring.PutParts(q.server.Slot(s.Tag), parts)
	}
	if x.Region, x.ValidUntil, err = q.c.addView(s.Word, v, h.Memory, hold); err != nil {
		return nil, err
	}
	q.c.t.stats.Bytes.Add(x.Length)
	return x, nil
}

// addView makes v the program's View of that number, in memory whose file is addView's. until is when it lapses,
// nanoseconds of CLOCK_MONOTONIC. After an error v is the caller's still.
func (c *conn) addView(number uint64, v *client.View, memory *os.File, hold time.Duration) (reg uint32, until uint64,
	err error) {
	l := &c.views
	l.Lock()
	defer l.Unlock()
	var now unix.Timespec
	if l.closed {
		err = refused(ring.Closed, "the connection ends")
	} else if l.all[number] != nil {
		err = refused(ring.Argument, "the program has a view %d", number)
	} else {
		err = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	}
	if err != nil {
		return 0, 0, errors.Join(err, memory.Close())
	}
	r, err := c.regionLocked(memory)
	if err != nil {
		return 0, 0, err
	}
	if r.views++; r.idle != nil {
		r.idle.Stop()
	}
	x := &view{View: v, region: r}
	if l.all == nil {
		l.all = map[uint64]*view{}
	}
	l.all[number] = x
	x.lapse = time.AfterFunc(hold, func() {
		l.Lock()
		defer l.Unlock()
		if l.all[number] == x {
			c.t.stats.Lapsed.Add(1)
			_ = c.endViewLocked(number)
		}
	})
	return r.number, uint64(now.Nano() + hold.Nanoseconds()), nil
}

// regionLocked is the region of a file, which is regionLocked's. A program that does not have it yet gets it.
func (c *conn) regionLocked(f *os.File) (*region, error) {
	l := &c.views
	var st unix.Stat_t
	if err := unix.Fstat(descriptor(f), &st); err != nil {
		return nil, errors.Join(fmt.Errorf("fstat: %w", err), f.Close())
	}
	id := inode{st.Dev, st.Ino}
	if r := l.regions[id]; r != nil {
		return r, f.Close()
	}
	if len(l.regions) == maxRegions {
		var spare *region
		for _, r := range l.regions {
			if r.views == 0 {
				spare = r
			}
		}
		if spare == nil {
			return nil, errors.Join(refused(ring.Busy, "the program has views in %d regions, which is the limit",
				maxRegions), f.Close())
		}
		c.takeBackLocked(spare)
	}
	l.last++
	r := &region{id: id, number: l.last, file: f}
	m := ring.Region{Region: r.number, Length: uint64(st.Size)}
	if err := c.send(m.Message(), []int{descriptor(f)}); err != nil {
		c.end(err)
		return nil, errors.Join(refused(ring.Closed, "the connection ends: %v", err), f.Close())
	}
	if l.regions == nil {
		l.regions = map[inode]*region{}
	}
	l.regions[id] = r
	return r, nil
}

// takeBackLocked has the program forget a region without Views.
func (c *conn) takeBackLocked(r *region) {
	delete(c.views.regions, r.id)
	_ = r.file.Close()
	if c.views.closed {
		return
	}
	if err := c.send(ring.Numbered(ring.Head{Kind: ring.KindRegionGone}, r.number), nil); err != nil {
		c.end(err)
	}
}

// endViewLocked ends a View that there is, and gives its verdict.
func (c *conn) endViewLocked(number uint64) error {
	l := &c.views
	x := l.all[number]
	delete(l.all, number)
	x.lapse.Stop()
	err := x.Release()
	c.t.leaveView(x.Size)
	r := x.region
	if r.views--; r.views > 0 || l.closed {
		return err
	}
	r.idle = time.AfterFunc(c.t.Limits.RegionTime, func() {
		l.Lock()
		defer l.Unlock()
		if l.regions[r.id] == r && r.views == 0 {
			c.takeBackLocked(r)
		}
	})
	return err
}

// releaseView performs VIEW_RELEASE.
func (q *queue) releaseView(s *ring.Submission) *ring.Completion {
	l := &q.c.views
	l.Lock()
	defer l.Unlock()
	if l.all[s.Word] == nil {
		return q.failure(s.Tag, ring.No, ring.ViewExpired, "the view was not released in time, or there was none")
	}
	if err := q.c.endViewLocked(s.Word); err != nil {
		return q.failure(s.Tag, ring.No, codeOf(err), err.Error())
	}
	return &ring.Completion{Tag: s.Tag}
}

// viewing is how many Views the program has.
func (c *conn) viewing() int {
	c.views.Lock()
	defer c.views.Unlock()
	return len(c.views.all)
}

// endViews ends all of a connection that ends. There will be no more.
func (c *conn) endViews() {
	l := &c.views
	l.Lock()
	defer l.Unlock()
	l.closed = true
	for number := range l.all {
		_ = c.endViewLocked(number)
	}
	for _, r := range l.regions {
		if r.idle != nil {
			r.idle.Stop()
		}
		c.takeBackLocked(r)
	}
}
