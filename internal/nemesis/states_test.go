package nemesis

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/dirpb"
)

const diskBytes = "64m"

// disk makes the folder of a directory node.
func (h *harness) disk(name string) error {
	at := filepath.Join(h.work, name)
	if err := os.Mkdir(at, 0o755); err != nil || !h.disks {
		return err
	}
	if err := run("mount", "-t", "tmpfs", "-o", "size="+diskBytes, "tmpfs", at); err != nil {
		return err
	}
	h.mounted = append(h.mounted, at)
	return nil
}

// fill leaves no room on a directory node's disk.
func (h *harness) fill(name string) error {
	f, err := os.Create(filepath.Join(h.work, name, "filling"))
	if err != nil {
		return err
	}
	defer f.Close()
	for page := make([]byte, 4096); ; {
		if _, err := f.Write(page); errors.Is(err, syscall.ENOSPC) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func (h *harness) unfill(name string) error {
	return os.Remove(filepath.Join(h.work, name, "filling"))
}

// TestNemesisStates lets a whole machine stand still for as long as KVD_NEMESIS_STATES says,
// restarts everything at once, by a loss of power too, and gives directory nodes disks that are full or read-only.
// Each ends in a state that `kvctl status` describes, without a process that spins or that
// floods its log.
func TestNemesisStates(t *testing.T) {
	s := flagged(t, "KVD_NEMESIS_STATES", "make nemesis-states")
	s.disks, s.keep = true, true
	nemesis(t, s, func(h *harness) error {
		for _, state := range []struct {
			name string
			do   func() error
		}{
			{"frozen machine", h.frozen},
			{"follower starts on a full disk", h.fullDisk},
			{"follower starts on a read-only disk", h.readOnlyDisk},
			{"loss of power", h.powerLoss}, // the clients', too
		} {
			if err := h.quietly(state.name, state.do); err != nil {
				return err
			}
		}
		return h.quietly("restart of everything at once", h.restart)
	})
}

// directory gives a directory node that leads, or one that follows.
func (h *harness) directory(leads bool) (string, error) {
	st, _ := h.status.get()
	for _, d := range st.GetDirectory() {
		if d.GetLeader() == leads {
			return d.GetId(), nil
		}
	}
	return "", errors.New("no such directory node")
}

func (h *harness) frozen() error {
	h.logf("every directory node stands still for %v", h.duration)
	for _, d := range h.scope.directories {
		if err := h.procs[d].stop(); err != nil {
			return err
		}
	}
	if err := h.sleep(h.duration); err != nil {
		return err
	}
	for _, d := range h.scope.directories {
		if err := h.procs[d].resume(); err != nil {
			return err
		}
	}
	return h.awaitServing()
}

// refused waits until a process has ended by itself, with that in its log.
func (h *harness) refused(name string, want string) error {
	p := h.procs[name]
	select {
	case <-p.ended:
	case <-time.After(endLimit):
		p.dump()
		return fmt.Errorf("%s does not end\n%s", name, tail(p.log, 20000))
	}
	st := p.cmd.ProcessState
	p.cmd = nil
	if log := tail(p.log, 2000); st.ExitCode() != 1 || !strings.Contains(log, want) {
		return fmt.Errorf("%s ended with %v, without a word about %q:\n%s", name, st, want, log)
	}
	h.logf("%s ended: %q", name, lastLine(h.procs[name].log))
	return nil
}

func lastLine(file string) string { return lastLineOf(tail(file, 4000)) }

func lastLineOf(text string) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return all[len(all)-1]
}

// fullDisk has a follower, whose log is not flushed, start without room to do so, and
// another time with a little room. Pebble may find room itself, where the node was killed
// before it had removed files that are obsolete: then the node has to serve.
func (h *harness) fullDisk() error {
	for _, room := range []int64{0, 4096} {
		d, err := h.directory(false)
		if err != nil {
			return err
		}
		if err := errors.Join(h.procs[d].kill(), h.fill(d)); err != nil {
			return err
		}
		file := filepath.Join(h.work, d, "filling")
		st, err := os.Stat(file)
		if err == nil {
			err = os.Truncate(file, st.Size()-room)
		}
		if err != nil {
			return err
		}
		if err := h.refusedOrServes(d, "no space left on device"); err != nil {
			return err
		}
		if err := errors.Join(h.procs[d].kill(), h.unfill(d), h.launch(d, nil)); err != nil {
			return err
		}
		if err := h.awaitServing(); err != nil {
			return err
		}
	}
	return nil
}

// refusedOrServes starts a directory node, and waits until it has ended by itself, with that in
// its log, or serves: then the others cannot commit without it while one of them stands still.
func (h *harness) refusedOrServes(d, want string) error {
	ready := make(chan struct{})
	if err := h.launch(d, sync.OnceFunc(func() { close(ready) })); err != nil {
		return err
	}
	p := h.procs[d]
	p.asked.Store(true)
	select {
	case <-p.ended:
		return h.refused(d, want)
	case <-ready:
	case <-time.After(endLimit):
		p.dump()
		return fmt.Errorf("%s neither ends nor serves\n%s", d, tail(p.log, 20000))
	}
	still := h.procs[h.scope.directories[0]]
	if still == p {
		still = h.procs[h.scope.directories[1]]
	}
	if err := still.stop(); err != nil {
		return err
	}
	put := make(chan error, 1)
	go func() { // a new session is an entry of the log
		out, err := h.kvctl("put", "k", "v")
		if err != nil {
			err = fmt.Errorf("with %s and without %s: %w\n%s", d, still.name, err, out)
		}
		put <- err
	}()
	select {
	case <-p.ended: // the put goes on with still
		err := still.resume()
		<-put
		return errors.Join(err, h.refused(d, want))
	case err := <-put:
		h.logf("%s serves", d)
		return errors.Join(err, still.resume())
	case <-time.After(endLimit):
		p.dump()
		return errors.Join(fmt.Errorf("%s was ready, and neither ends nor commits\n%s", d, tail(p.log, 20000)),
			still.resume())
	}
}

func (h *harness) readOnlyDisk() error {
	d, err := h.directory(false)
	if err != nil {
		return err
	}
	at := filepath.Join(h.work, d)
	if err := errors.Join(h.procs[d].kill(), run("mount", "-o", "remount,ro", at), h.launch(d, nil)); err != nil {
		return err
	}
	h.procs[d].asked.Store(true)
	if err := errors.Join(h.refused(d, "read-only file system"), run("mount", "-o", "remount,rw", at),
		h.launch(d, nil)); err != nil {
		return err
	}
	return h.awaitServing()
}

// restart asks all processes of the store to end, at once, and starts them again. The memory nodes' data is
// gone, so nobody uses the store meanwhile.
func (h *harness) restart() error {
	all := slices.Concat(h.scope.directories, h.scope.memnodes)
	var wg sync.WaitGroup
	errs := make([]error, len(all))
	for i, name := range all {
		wg.Go(func() { errs[i] = h.procs[name].end(endLimit) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, name := range all {
		if err := h.launch(name, nil); err != nil {
			return err
		}
	}
	// Placement groups that nothing is left of are seen, or are not, before they are made anew.
	if err := h.wholeAgain(wholeLimit, func(*dirpb.StatusReply) error { return nil }); err != nil {
		return err
	}
	if out, err := h.kvctl("put", "k", "v"); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	if out, err := h.kvctl("get", "k"); err != nil || strings.TrimSpace(out) != "v" {
		return fmt.Errorf("get after the restart: %q, %w", out, err)
	}
	return nil
}

// quietly runs do, and then wants `kvctl status` to show a store in order, no directory node
// or memory node that is busy with nothing, and logs that people can read.
func (h *harness) quietly(name string, do func() error) error {
	if err := h.whole(wholeLimit); err != nil {
		return err
	}
	hosts := slices.Concat(h.scope.directories, h.scope.memnodes)
	began, sizes, lives := time.Now(), map[string]int64{}, map[string]int{}
	for _, host := range hosts {
		lives[host] = h.procs[host].life
		if st, err := os.Stat(h.procs[host].log); err == nil {
			sizes[host] = st.Size()
		}
	}
	h.logf("%s", name)
	h.faults[strings.ReplaceAll(name, " ", "-")]++
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	out, err := h.kvctl("status", "-o", "json")
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	took := time.Since(began)
	for _, host := range hosts {
		b, err := os.ReadFile(h.procs[host].log)
		if err != nil {
			return err
		}
		kinds := logKinds(b[sizes[host]:])
		// Each life may say so much at once.
		most := took.Seconds() + float64(logBurst*(1+h.procs[host].life-lives[host]))
		for _, kind := range slices.Sorted(maps.Keys(kinds)) {
			if n := kinds[kind]; float64(n) > most {
				h.fail(fmt.Sprintf("%s: %s logged %d times in %v: %s", name, host, n, took, kind))
			}
		}
	}
	busy, err := h.busy(hosts, 2*time.Second)
	for host, part := range busy {
		if part > 0.8 {
			h.fail(fmt.Sprintf("%s: %s uses %.0f %% of a processor", name, host, 100*part))
		}
	}
	return err
}

// logBurst is how many lines of one kind may come at once, as docs/watching.md says.
const logBurst = 10

// logKinds counts lines by what they say, without names and numbers.
func logKinds(log []byte) map[string]int {
	kinds := map[string]int{}
	for line := range bytes.Lines(log) {
		_, msg, ok := strings.Cut(string(line), "msg=")
		if !ok {
			continue
		}
		if q, err := strconv.QuotedPrefix(msg); err == nil {
			msg, _ = strconv.Unquote(q) // it is one
		}
		kinds[plain(msg)]++
	}
	return kinds
}

// busy is how much of a processor each process takes for so long.
func (h *harness) busy(hosts []string, d time.Duration) (map[string]float64, error) {
	used := func() (map[string]float64, error) {
		out := map[string]float64{}
		for _, name := range hosts {
			b, err := os.ReadFile(
				fmt.Sprintf("/proc/%d/stat", cmp.Or(h.procs[name].worker(), h.procs[name].cmd.Process.Pid)))
			if err != nil {
				return nil, err
			}
			for _, s := range strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))[11:13] {
				// utime, stime; proc(5)
				n, err := strconv.Atoi(s)
				if err != nil {
					return nil, err
				}
				out[name] += float64(n) / 100 // USER_HZ
			}
		}
		return out, nil
	}
	before, err := used()
	if err != nil {
		return nil, err
	}
	if err := h.sleep(d); err != nil {
		return nil, err
	}
	after, err := used()
	for name := range after {
		after[name] = (after[name] - before[name]) / d.Seconds()
	}
	return after, err
}
