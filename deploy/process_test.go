package deploy

import (
	"bytes"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// spoil flips a bit of what a process's memory holds of text, wherever it does.
func (p *process) spoil(text string) {
	p.t.Helper()
	pid := p.cmd.Process.Pid
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer mem.Close()
	n := 0
	for line := range strings.Lines(read(p.t, fmt.Sprintf("/proc/%d/maps", pid))) {
		var from, to uint64
		var perms string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &perms); err != nil {
			p.t.Fatal(err)
		}
		if !strings.HasPrefix(perms, "rw") {
			continue
		}
		b := make([]byte, to-from)
		if _, err := mem.ReadAt(b, int64(from)); err != nil {
			continue // not all that is mapped can be read
		}
		for at := 0; ; n++ {
			i := bytes.Index(b[at:], []byte(text))
			if i < 0 {
				break
			}
			at += i
			if _, err := mem.WriteAt([]byte{b[at] ^ 1}, int64(from)+int64(at)); err != nil {
				p.t.Fatal(err)
			}
			at++
		}
	}
	if n == 0 {
		p.t.Fatalf("nothing in the memory of process %d is %.20q", pid, text)
	}
}

// limitSpace lets a process map so many bytes more than it has mapped.
func (p *process) limitSpace(more uint64) {
	p.t.Helper()
	pid := p.cmd.Process.Pid
	var pages uint64
	if _, err := fmt.Sscan(read(p.t, fmt.Sprintf("/proc/%d/statm", pid)), &pages); err != nil {
		p.t.Fatal(err)
	}
	most := pages*uint64(os.Getpagesize()) + more
	if err := unix.Prlimit(pid, unix.RLIMIT_AS, &unix.Rlimit{Cur: most, Max: most}, nil); err != nil {
		p.t.Fatal(err)
	}
}
