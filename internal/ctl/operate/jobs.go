package operate

import (
	"slices"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *commands) printJobs(st *dirpb.StatusReply) error {
	jobs := st.GetJobs()
	slices.SortFunc(jobs, func(x, y *dirpb.Job) int { return int(int64(x.GetId()) - int64(y.GetId())) })
	if a.JSON() {
		return ctl.PrintProtos(a.App, jobs)
	}
	ctl.PrintColumns(a.App, overview.JobColumns(st), jobs)
	return nil
}
