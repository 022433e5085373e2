package fsm

import (
	"fmt"
	"math"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/kvd-project/kvd/internal/dirpb"
)

const (
	// MaxAudit is how many audit entries are kept, the latest ones.
	MaxAudit = 4096
	// MaxAuditDetail is the longest detail of an audit entry, in bytes.
	MaxAuditDetail = 512
)

// recordAudit keeps e as the next audit entry, in the place of the oldest if there are MaxAudit. Text that is too
// long is cut: a change is never refused for what is said of it.
func (s *State) recordAudit(e *dirpb.AuditEntry) *dirpb.AuditEntry {
	m := s.editMeta()
	m.AuditNumber++
	e = proto.CloneOf(e)
	e.Number = m.AuditNumber
	for _, text := range []struct {
		at   *string
		most int
	}{{&e.Identity, MaxLabelLen}, {&e.Remote, MaxLabelLen}, {&e.Action, MaxLabelLen}, {&e.Object, MaxLabelLen},
		{&e.Detail, MaxAuditDetail}} {
		if len(*text.at) > text.most {
			*text.at = strings.ToValidUTF8((*text.at)[:text.most], "")
		}
	}
	auditRows.put(s, auditSlot(e.Number), e)
	return e
}

func auditSlot(number uint64) uint32 { return uint32(number % MaxAudit) }

// Audit gives the audit entries with numbers greater than after, the latest limit of them (0: all), by
// number. It also gives how many there were once that made room for later ones.
func (s *State) Audit(after uint64, limit int) (entries []*dirpb.AuditEntry, dropped uint64) {
	last := s.meta.AuditNumber
	kept := min(last, MaxAudit)
	first := max(last-kept, min(after, last))
	if limit > 0 {
		first = max(first, last-min(last, uint64(limit)))
	}
	for number := first + 1; number <= last; number++ {
		entries = append(entries, s.audit[auditSlot(number)])
	}
	return entries, last - kept
}

func (s *State) checkAudit() error {
	last := s.meta.AuditNumber
	if last > math.MaxInt64 {
		return fmt.Errorf("%d audit entries: more than can have been", last)
	}
	if kept := min(last, MaxAudit); uint64(len(s.audit)) != kept {
		return fmt.Errorf("%d audit entries, want the last %d of %d", len(s.audit), kept, last)
	}
	for slot, e := range s.audit {
		if e.Number == 0 || e.Number > last || last-e.Number >= MaxAudit || auditSlot(e.Number) != slot {
			return fmt.Errorf("audit entry %d is in the row of slot %d, and %d is the last that there is", e.Number,
				slot, last)
		}
	}
	return nil
}
