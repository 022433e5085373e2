package deploy

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// spoil flips a bit of what a process's memory holds of text, wherever it does.
func (p *process) spoil(text string) {
	p.t.Helper()
	p.overwrite([]byte(text), 0, func(b []byte) { b[0] ^= 1 }, 1)
}

// overwrite has edit change the n bytes that lie so many bytes behind each place of a
// process's memory that holds text.
func (p *process) overwrite(text []byte, behind int64, edit func([]byte), n int) {
	p.t.Helper()
	pid := p.cmd.Process.Pid
	mem, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer mem.Close()
	found := 0
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
		for at := 0; ; found++ {
			i := bytes.Index(b[at:], text)
			if i < 0 {
				break
			}
			there := int64(from) + int64(at+i) + behind
			old := make([]byte, n)
			if _, err := mem.ReadAt(old, there); err != nil {
				p.t.Fatal(err)
			}
			edit(old)
			if _, err := mem.WriteAt(old, there); err != nil {
				p.t.Fatal(err)
			}
			at += i + 1
		}
	}
	if found == 0 {
		p.t.Fatalf("nothing in the memory of process %d is %.20q", pid, text)
	}
}

// indexed is where the index of a region has a key: what the region begins with, and the
// offsets of the key's group and slot.
type indexed struct {
	region      []byte
	group, slot int64
}

var dumped = regexp.MustCompile(`(?m)^ +0x([0-9a-f]{8})  ((?:[0-9a-f]{2} )+) *(\S.*)$`)

// indexed asks kvctl dump, which must find one key in the group.
func (s *tried) indexed(namespace, key string) (at indexed) {
	s.t.Helper()
	text := s.kvctl("", "--namespace", namespace, "dump", key)
	for _, m := range dumped.FindAllStringSubmatch(text, -1) {
		off, err := strconv.ParseInt(m[1], 16, 64)
		if err != nil {
			s.t.Fatal(err)
		}
		b, err := hex.DecodeString(strings.ReplaceAll(m[2], " ", ""))
		switch {
		case err != nil:
			s.t.Fatal(err)
		case off == int64(len(at.region)) && at.group == 0:
			at.region = append(at.region, b...)
		case strings.HasPrefix(m[3], "header "):
			at.group = off
		case strings.HasPrefix(m[3], "slot ") && strings.Contains(m[3], " LIVE "):
			at.slot = off
		}
	}
	if len(at.region) < 48 || at.group == 0 || at.slot == 0 {
		s.t.Fatalf("kvctl dump shows no region, group and slot:\n%s", text)
	}
	return at
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
