package nemesis

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// restartMemnode is a kill of a memory node's worker, whose keeper starts another one with the same memory.
const restartMemnode = "restart-memnode"

// restartEvery is the time from one kill of workers to the next.
const restartEvery = 2 * time.Second

// worker is the process that serves in place of a keeper; 0: none does.
func (p *proc) worker() int {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.cmd.Process.Pid))
	for _, f := range files {
		b, _ := os.ReadFile(f) // the thread may have ended
		if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			return pid
		}
	}
	return 0
}

// holds tells whether a keeper holds memory whose name begins so.
func (p *proc) holds(name string) bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", p.cmd.Process.Pid))
	return slices.ContainsFunc(files, func(f string) bool {
		to, err := os.Readlink(f)
		return err == nil && strings.HasPrefix(to, "/memfd:"+name)
	})
}

// killWorker kills a keeper's worker, waiting for one that is about to start, and returns when it has gone. While no
// memory is kept it does nothing: such a worker would be followed by nobody. The worker stands still while its keeper
// is looked at.
func (p *proc) killWorker() (killed bool, err error) {
	for end := time.Now().Add(recoverLimit); time.Now().Before(end); time.Sleep(200 * time.Microsecond) {
		pid := p.worker()
		if pid == 0 || syscall.Kill(pid, syscall.SIGSTOP) != nil { // it may have ended just now
			continue
		}
		for still := false; !still && p.worker() == pid; {
			still, _ = allStopped(pid)
		}
		if p.worker() != pid {
			continue
		}
		if !p.holds("kvd-pg-") {
			return false, syscall.Kill(pid, syscall.SIGCONT)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return false, fmt.Errorf("%s: kill its worker: %w", p.name, err)
		}
		for ; p.worker() == pid; time.Sleep(200 * time.Microsecond) {
			if time.Now().After(end) {
				return false, fmt.Errorf("%s: its worker, %d, does not die", p.name, pid)
			}
		}
		return true, nil
	}
	return false, fmt.Errorf("%s has no worker\n%s", p.name, tail(p.log, 2000))
}

// restartWorkers kills the workers of memory nodes, and tells of how many: some may hold nothing.
func (h *harness) restartWorkers(victims []string) (n int, err error) {
	for _, v := range victims {
		killed, err := h.procs[v].killWorker()
		if err != nil {
			return n, err
		}
		if killed {
			n++
		}
	}
	h.faults[restartMemnode] += n
	return n, nil
}

// restartAny kills the worker of one memory node that holds something.
func (h *harness) restartAny() error {
	for _, k := range h.rng.Perm(len(h.scope.memnodes)) {
		if n, err := h.restartWorkers(h.scope.memnodes[k : k+1]); n > 0 || err != nil {
			return err
		}
	}
	return errors.New("no memory node holds anything")
}

// onlyRestarts kills workers of memory nodes for the run's duration: one, or every third time all at once, and sees
// when every client is served again. Files that were stored before are read back afterwards.
func (h *harness) onlyRestarts() error {
	if err := h.awaitServing(); err != nil {
		return err
	}
	if err := h.storeFiles(); err != nil {
		return err
	}
	began := time.Now()
	for n := 0; time.Since(began) < h.duration; n++ {
		if err := h.sleep(time.Until(began.Add(time.Duration(n) * restartEvery))); err != nil {
			return err
		}
		victims := slices.Clone(h.scope.memnodes)
		if n%3 != 2 {
			k := h.rng.IntN(len(victims))
			victims = victims[k : k+1]
		}
		at := now()
		if killed, err := h.restartWorkers(victims); err != nil {
			return err
		} else if killed == 0 {
			continue
		}
		if err := h.serving(now()); err != nil {
			return err
		}
		h.restarted = append(h.restarted, time.Duration(now()-at))
		if n%30 == 29 {
			h.logf("%d times workers were killed", n+1)
		}
	}
	if err := h.kept(); err != nil {
		return err
	}
	return h.compareFiles()
}

// kept wants all memory to be that of the beginning: the directory has noted no loss.
func (h *harness) kept() error {
	if err := h.whole(wholeLimit); err != nil {
		return err
	}
	st, _ := h.status.get()
	for _, n := range st.GetMap().GetNamespaces() {
		if n.GetLost() > 0 {
			return fmt.Errorf("namespace %s lost all copies of a placement group %d times", n.GetName(), n.GetLost())
		}
	}
	return nil
}

// Files that are stored before workers are killed.
const (
	keptFiles  = 2000
	keptPrefix = "kept/"
)

// storeFiles makes files of many sizes and stores them.
func (h *harness) storeFiles() error {
	dir := filepath.Join(h.work, "stored")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for n := range keptFiles {
		value := make([]byte, h.rng.IntN(2000))
		for k := range value {
			value[k] = byte(h.rng.Uint32())
		}
		if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(n)), value, 0o644); err != nil {
			return err
		}
	}
	if out, err := h.kvctl("import", dir, "--prefix", keptPrefix); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// compareFiles reads them back.
func (h *harness) compareFiles() error {
	stored, read := filepath.Join(h.work, "stored"), filepath.Join(h.work, "read")
	if out, err := h.kvctl("export", read, "--prefix", keptPrefix); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	for n := range keptFiles {
		name := strconv.Itoa(n)
		want, err := os.ReadFile(filepath.Join(stored, name))
		if err != nil {
			return err
		}
		got, err := os.ReadFile(filepath.Join(read, name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
			h.filesLost++
		case err != nil:
			return err
		case !bytes.Equal(got, want):
			h.fail(fmt.Sprintf("key %s%s has other bytes than were stored", keptPrefix, name))
		}
	}
	if h.filesLost > 0 {
		h.fail(fmt.Sprintf("%d keys of %d are lost", h.filesLost, keptFiles))
	}
	return nil
}

// restartTable says how soon every client was served again.
func (h *harness) restartTable() string {
	if len(h.restarted) == 0 {
		return ""
	}
	all := slices.Sorted(slices.Values(h.restarted))
	ms := func(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
	return fmt.Sprintf("restarts   %d; every client is served again after: median %v, p99 %v (%.2f leases), max %v; "+
		"%d keys of %d stored before are lost\n",
		len(all), ms(percentile(all, 50)), ms(percentile(all, 99)), float64(percentile(all, 99))/float64(h.lease),
		ms(all[len(all)-1]),
		h.filesLost, keptFiles)
}

// withoutKeepers kills a memory node that holds something, and returns when a client has missed what it had written.
func (h *harness) withoutKeepers() error {
	if err := h.calm(0.5, 1.5); err != nil {
		return err
	}
	st, _ := h.status.get()
	victim := placementOf(st, namespace).holders()[0]
	h.logf("kill %s, which has no keeper", victim)
	h.faults[killMemnode]++
	if err := h.procs[victim].kill(); err != nil {
		return err
	}
	if err := h.launch(victim, nil); err != nil {
		return err
	}
	select {
	case <-h.failed.Done():
		return nil
	case <-time.After(recoverLimit):
		return errors.New("nobody has missed anything")
	}
}

// reportControl wants a run without keepers to have failed for what its clients missed, and for nothing else.
func (h *harness) reportControl(t *testing.T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	missed := 0
	for _, f := range h.mu.failures {
		if strings.Contains(f, missedWrite) || strings.Contains(f, noOrder) || strings.Contains(f, ": bank: ") {
			missed++
		} else {
			t.Error(f)
		}
	}
	if missed == 0 {
		t.Error("a memory node without a keeper was killed, and no client missed what it had held")
	}
	t.Logf("control: as it has to be, %d times what was lost was missed", missed)
}
