package nemesis

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// restartMemnode is a kill of a memory node's worker, whose keeper starts another one with the same memory.
const restartMemnode = "restart-memnode"

// killWorker kills the process that serves in place of a keeper, and returns when it has gone.
func (p *proc) killWorker() error {
	worker := func() int {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.cmd.Process.Pid))
		for _, f := range files {
			b, _ := os.ReadFile(f) // the thread may have ended
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
				return pid
			}
		}
		return 0
	}
	pid := worker()
	if pid == 0 {
		return fmt.Errorf("%s has no worker\n%s", p.name, tail(p.log, 2000))
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("%s: kill its worker: %w", p.name, err)
	}
	for end := time.Now().Add(recoverLimit); worker() == pid; time.Sleep(200 * time.Microsecond) {
		if time.Now().After(end) {
			return fmt.Errorf("%s: its worker, %d, does not die", p.name, pid)
		}
	}
	return nil
}

// onlyRestarts kills workers of memory nodes: one, or every third time all at once, and waits until every client is served again.
func (h *harness) onlyRestarts() error {
	for n := range h.restarts {
		if err := h.calm(0.5, 1.5); err != nil {
			return err
		}
		victims := slices.Clone(h.scope.memnodes)
		if n%3 != 2 {
			k := h.rng.IntN(len(victims))
			victims = victims[k : k+1]
		}
		h.logf("kill the workers of %s", strings.Join(victims, ","))
		h.faults[restartMemnode] += len(victims)
		began := now()
		for _, v := range victims {
			if err := h.procs[v].killWorker(); err != nil {
				return err
			}
		}
		if err := h.serving(now()); err != nil {
			return err
		}
		h.restarted = append(h.restarted, time.Duration(now()-began))
	}
	// The same memory nodes with the same memory: nothing was made anew.
	st, _ := h.status.get()
	return lost(st)
}

// restartTable says how soon every client was served again.
func (h *harness) restartTable() string {
	if len(h.restarted) == 0 {
		return ""
	}
	all := slices.Sorted(slices.Values(h.restarted))
	return fmt.Sprintf("restarts   %d; every client is served again after: median %v, p99 %v, max %v\n", len(all),
		percentile(all, 50).Round(time.Millisecond), percentile(all, 99).Round(time.Millisecond), all[len(all)-1].Round(time.Millisecond))
}
