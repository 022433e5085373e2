package main

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/httpd"
	"github.com/kvd-project/kvd/internal/overview"
)

const (
	// paceOver is about how long a job is watched before an earlier pace counts no more, and paceLeast how long it is
	// watched before any counts.
	paceOver, paceLeast = 30 * time.Second, 2 * time.Second
	// mostLeft bounds what is shown: nobody waits for a job that takes longer.
	mostLeft = 100 * time.Hour
)

// paces tells how fast jobs get on, from what two or more looks at them have found.
type paces map[uint32]*pace

// pace has where a job was at two times, the later one paceOver ago at most.
type pace struct{ early, late progress }

type progress struct {
	at   time.Time
	done uint64
}

// left looks at the jobs, and tells how long those take that get on.
func (p *paces) left(st *dirpb.StatusReply, now time.Time) map[uint32]time.Duration {
	next, left := make(paces), make(map[uint32]time.Duration)
	for _, j := range st.GetJobs() {
		is := progress{now, j.GetDone()}
		x := (*p)[j.GetId()]
		if x == nil || is.done < x.late.done { // it has begun anew
			x = &pace{is, is}
		}
		if now.Sub(x.late.at) > paceOver {
			x.early, x.late = x.late, is
		}
		next[j.GetId()] = x
		took, did := now.Sub(x.early.at), is.done-x.early.done
		if took >= paceLeast && did > 0 && j.GetTotal() > 0 {
			rest := j.GetTotal() - min(is.done, j.GetTotal())
			seconds := took.Seconds() / float64(did) * float64(rest)
			left[j.GetId()] = time.Duration(min(seconds, mostLeft.Seconds()) * float64(time.Second))
		}
	}
	*p = next
	return left
}

// leftText is for people, who need no more than about how long.
func leftText(left map[uint32]time.Duration, job uint32) string {
	d, ok := left[job]
	switch {
	case !ok:
		return "-"
	case d >= mostLeft:
		return "days"
	case d >= time.Hour:
		return d.Round(time.Minute).String()
	}
	return d.Round(time.Second).String()
}

func sortedJobs(st *dirpb.StatusReply) []*dirpb.Job {
	return slices.SortedFunc(slices.Values(st.GetJobs()), func(a, b *dirpb.Job) int {
		return cmp.Compare(a.GetId(), b.GetId())
	})
}

// jobPercent is how far a job is; empty: nobody knows.
func jobPercent(j *dirpb.Job) string {
	if j.GetTotal() == 0 {
		return ""
	}
	return fmt.Sprintf("%.0f", float64(min(j.GetDone(), j.GetTotal()))/float64(j.GetTotal())*100)
}

func jobsTable(st *dirpb.StatusReply, left map[uint32]time.Duration) httpd.Table {
	return tableOf("Jobs", append(overview.JobColumns(st),
		overview.Column[*dirpb.Job]{Head: "%", Text: func(j *dirpb.Job) string { return cmp.Or(jobPercent(j), "-") }},
		overview.Column[*dirpb.Job]{Head: "Left", Text: func(j *dirpb.Job) string { return leftText(left, j.GetId()) }},
	), sortedJobs(st))
}

// jobsPicture shows how far jobs are. A job that nobody has begun is all to do.
func jobsPicture(st *dirpb.StatusReply, left map[uint32]time.Duration) httpd.Picture {
	p := httpd.Picture{Title: "Jobs"}
	for _, j := range sortedJobs(st) {
		done, total := float64(min(j.GetDone(), j.GetTotal())), float64(j.GetTotal())
		b := httpd.Bar{Label: fmt.Sprintf("%d: %s", j.GetId(), overview.JobKind(j.GetKind())), Note: "not begun",
			Parts: []httpd.Part{{Kind: "done", Size: done, Text: fmt.Sprintf("done %d", j.GetDone())},
				{Kind: "to do", Size: max(total-done, 0), Text: fmt.Sprintf("to do %.0f", total-done)}}}
		if s := jobPercent(j); s != "" {
			b.Note = s + " %"
			if s := leftText(left, j.GetId()); s != "-" {
				b.Note += ", " + s + " left"
			}
		}
		b.Note = fmt.Sprintf("placement group %d: %s", j.GetPgId(), b.Note)
		if s := overview.JobTrouble(j); s != "" {
			b.Note, b.Bad = b.Note+": "+s, j.GetTrouble() != ""
		}
		p.Bars = append(p.Bars, b)
	}
	return p
}
