package client

import (
	"time"

	"github.com/kvd-project/kvd/index"
	"github.com/kvd-project/kvd/internal/engine"
)

// The images of a mirror come from what operations READ anyway, and from a reader that goes through the index. The
// reader begins when a key is looked for in the images, and again while keys are. So a session at rest READs nothing.
const (
	// imagesEvery is how far the beginnings of two passes are apart at least. With a pass that takes as long at most,
	// no image is older than 90 s.
	imagesEvery = 45 * time.Second
	// imagesBatch is how many segments are READ at a time, 4,352 bytes each, and imagesPause follows: a thousand
	// segments a second.
	imagesBatch = 8
	imagesPause = 8 * time.Millisecond
)

// readImages reads the images of the session's mirror until the session ends.
func (s *sess) readImages() {
	for {
		select {
		case <-s.core.MirrorAsked():
		case <-s.ctx.Done():
			return
		}
		next := time.Now().Add(imagesEvery)
		s.readIndex()
		if !s.rest(time.Until(next)) {
			return
		}
	}
}

// rest waits for d, and reports whether the session goes on.
func (s *sess) rest(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-s.ctx.Done():
		return false
	}
}

// readIndex is a pass through the index. It is over early where there is no room for images, or the index cannot be
// READ: what is left is for the next pass.
func (s *sess) readIndex() {
	var pages [imagesBatch]index.Page
	for prefix, segment := uint64(0), uint32(0); ; {
		for i := range pages {
			pages[i] = index.Page{Segment: segment + uint32(i), Images: true}
		}
		if !s.readSegments(prefix, pages[:]) {
			return
		}
		segment += imagesBatch
		if pages[imagesBatch-1].End {
			if prefix, segment = s.nextShard(prefix), 0; prefix == 0 {
				return
			}
		}
		if !s.rest(imagesPause) {
			return
		}
	}
}

// readSegments shows the session's mirror the segments of pages, all of them of the shard that covers prefix, and what
// has moved of them. It reports whether that worked and there was room.
func (s *sess) readSegments(prefix uint64, pages []index.Page) bool {
	var ops [imagesBatch]engine.Op
	left := make([]*engine.Op, 0, imagesBatch)
	for i := range pages {
		ops[i] = engine.Op{Kind: index.Scan, Hash: prefix, Scan: &pages[i], Lane: int32(1 + i%s.core.KeyLanes())}
		left = append(left, &ops[i])
	}
	for len(left) > 0 {
		s.core.Do(s.ctx, left)
		more := left[:0]
		for _, o := range left {
			if o.Err != nil || o.Scan.Full {
				return false
			}
			if o.Scan.Next != 0 {
				o.Scan.From = o.Scan.Next
				more = append(more, o)
			}
		}
		left = more
	}
	return true
}
