package doctor

import "io/fs"

// troubleFile names the memory in which a keeper says why its workers do not come up (internal/keeper). proc(5): memory
// that is in no folder counts as deleted.
const troubleFile = "/memfd:kvd-trouble (deleted)"

// keepers finds keepers of memory nodes whose workers do not come up. Those of other users, into which this process may
// not look, are not seen.
func (x *exam) keepers() {
	x.group = "memory nodes"
	pids, err := x.list("proc")
	if err != nil {
		return // others have said that it cannot be read
	}
	for _, pid := range pids {
		if !isDigits(pid) {
			continue
		}
		fds, err := x.list("proc/" + pid + "/fd")
		if err != nil {
			continue
		}
		for _, fd := range fds {
			at := "proc/" + pid + "/fd/" + fd
			if to, err := fs.ReadLink(x.FS, at); err != nil || to != troubleFile {
				continue
			}
			if why, err := x.read(at); err == nil {
				x.add(Warn, "keeper "+pid, why, "the memory node's log says why its workers end; when that is "+
					"mended, the next one takes its memory over. kvctl status shows what waits for it")
			}
		}
	}
}
