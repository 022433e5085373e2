package nemesis

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// stored is what each namespace holds before the power goes.
const stored = "before"

// powerLoss kills every process of the store at the same time: directory nodes, memory nodes with the keepers of their
// memory, a gateway and clients with operations under way. Only the directory's disks are left, and behind the ends of
// their logs is the beginning of a write that was not finished. The store comes up by itself, says what is gone, and
// serves.
func (h *harness) powerLoss() error {
	for _, ns := range h.namespaces() {
		if out, err := h.kvctl("put", stored, "v", "--namespace", ns); err != nil {
			return fmt.Errorf("%s: %w\n%s", ns, err, out)
		}
	}
	if err := h.launchReady("g0"); err != nil {
		return err
	}
	var late string
	if err := h.until("a status with the namespaces", recoverLimit, func() string {
		st, _ := h.status.get()
		place := placementOf(st, single)
		if m := place.members[place.pg(stored)]; len(m) == 1 {
			late = m[0]
			return ""
		}
		return "no copy of " + stored
	}); err != nil {
		return err
	}
	st, _ := h.status.get()
	for _, n := range st.GetMap().GetNodes() {
		h.gone[n.GetIncarnation()] = true
	}
	off := slices.Concat(h.scope.clients, []string{"g0"}, h.scope.memnodes, h.scope.directories)
	if err := h.cutPower(off); err != nil {
		return err
	}
	for i, d := range h.scope.directories {
		if err := tear(filepath.Join(h.work, d, "data"), i); err != nil {
			return err
		}
	}
	for _, name := range slices.Concat(h.scope.directories, h.scope.memnodes, []string{"g0"}) {
		if name == late {
			continue
		}
		if err := h.launch(name, nil); err != nil {
			return err
		}
	}
	if err := h.givenUp(late); err != nil {
		return err
	}
	if err := h.launch(late, nil); err != nil {
		return err
	}
	if err := h.until("the store is up again", wholeLimit, func() string {
		st, _ := h.status.get()
		if err := whole(st, len(h.scope.memnodes), h.gone); err != nil {
			return err.Error()
		}
		return ""
	}); err != nil {
		return err
	}
	for _, ns := range h.namespaces() {
		if err := h.lostAll(ns); err != nil {
			return err
		}
	}
	return h.procs["g0"].end(endLimit)
}

// givenUp wants a memory node that stays away to be waited for, by operations that end, and gives it up.
func (h *harness) givenUp(late string) error {
	want := "memory node " + late + " is silent and has the only copy of"
	if err := h.until("the status says that "+late+" is waited for", recoverLimit, func() string {
		if out, err := h.kvctl("status"); err != nil || !strings.Contains(out, want) {
			return fmt.Sprintf("%v\n%s", err, out)
		}
		return ""
	}); err != nil {
		return err
	}
	began := time.Now()
	out, err := h.kvctl("get", stored, "--namespace", single, "--timeout", "1s")
	h.logf("while %s is waited for, a get says after %v: %s", late, time.Since(began).Round(time.Millisecond),
		lastLineOf(out))
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 3 {
		return fmt.Errorf("get of what %s holds: %w, want exit status 3: %q", late, err, out)
	}
	if err := h.besideLate(late); err != nil {
		return err
	}
	if out, err := h.kvctl("nodes", "give-up", late); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// cutPower kills processes, and what they started, without waiting for one before the next.
func (h *harness) cutPower(names []string) error {
	for _, name := range names {
		p := h.procs[name]
		p.asked.Store(true)
		if pid := p.worker(); pid != 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended, and dies with its keeper
		}
		if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for _, name := range names {
		if slices.Contains(h.scope.clients, name) {
			if err := h.killClient(name); err != nil {
				return err
			}
		} else if err := h.procs[name].kill(); err != nil {
			return err
		}
	}
	return nil
}

// tear puts behind the end of a directory node's newest write-ahead log what a write leaves that was under way: room
// that was made for it, a record without its end, or one with other bytes than its checksum says.
func tear(dir string, how int) error {
	logs, err := filepath.Glob(filepath.Join(dir, "*.log"))
	if err != nil || len(logs) == 0 {
		return fmt.Errorf("write-ahead log in %s: %v, %w", dir, logs, err)
	}
	file := slices.Max(logs)
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if len(b) < 64 {
		return fmt.Errorf("%s has %d bytes", file, len(b))
	}
	var torn []byte
	switch first := recordBytes(b); how % 3 {
	case 0:
		torn = make([]byte, 500)
	case 1:
		torn = b[:first/2]
	default:
		torn = slices.Clone(b[:first])
		torn[first-1] ^= 1
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(torn)
	return errors.Join(err, f.Close())
}

// recordBytes is the length of a log's first record: checksum u32, length u16, type u8, log number u32, bytes.
func recordBytes(b []byte) int { return min(len(b), 11+int(binary.LittleEndian.Uint16(b[4:]))) }

// lostAll wants the store to say that a namespace lost what it held, to have nothing of it, and to serve.
func (h *harness) lostAll(ns string) error {
	out, err := h.kvctl("status")
	if want := "namespace " + ns + " lost keys"; err != nil || !strings.Contains(out, want) {
		return fmt.Errorf("status without %q: %w\n%s", want, err, out)
	}
	out, err = h.kvctl("get", stored, "--namespace", ns)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(out, "not found") {
		return fmt.Errorf("get of what %s lost: %w, want exit status 1: %q", ns, err, out)
	}
	for _, args := range [][]string{{"put", "after", "w"}, {"get", "after"}, {"check"},
		{"namespace", "accept-loss", ns}} {
		if out, err = h.kvctl(append(args, "--namespace", ns)...); err != nil {
			return fmt.Errorf("%s: %w\n%s", ns, err, out)
		}
		if args[0] == "get" && strings.TrimSpace(out) != "w" {
			return fmt.Errorf("%s: get of what was put: %q", ns, out)
		}
	}
	if out, err = h.kvctl("status"); err != nil || strings.Contains(out, "namespace "+ns+" lost keys") {
		return fmt.Errorf("status after accept-loss: %w\n%s", err, out)
	}
	return nil
}
