package mem

import (
	"bufio"
	"bytes"
	"fmt"
	"math"
	"os"
	"path"
	"strconv"
	"strings"
)

// Limits are how many bytes of memory a process may have; 0: not known, or without a limit.
type Limits struct {
	Machine uint64 // what the machine has
	Group   uint64 // the least that a cgroup allows which this process is in, and all of that which no process is in
}

// Least is the smaller one.
func (l Limits) Least() uint64 {
	if l.Machine == 0 || l.Group != 0 && l.Group < l.Machine {
		return l.Group
	}
	return l.Machine
}

// Limited is what this process may have. [Room] leaves out the part that is taken.
func Limited() (l Limits) {
	l.Machine = uint64(fields("/proc/meminfo")["MemTotal:"]) << 10
	l.Group = limited("/")
	return l
}

// limited is the least limit of groups. The library automemlimit knows that, too, but neither of which group it is nor
// how much of it is left; and programs that link the client would carry it.
func limited(root string) (least uint64) {
	for _, g := range groups(root) {
		if n := readInt(path.Join(g.dir, g.limit)); n >= 0 && n < unlimited && (least == 0 || uint64(n) < least) {
			least = uint64(n)
		}
	}
	return least
}

// unlimited is what a cgroup of v1 has without a limit, less some pages.
const unlimited = math.MaxInt64 - 1<<30

// Room is how many bytes of pages this process can take now before the kernel ends a process. The second result says
// whose limit that is: the machine's, or that of a cgroup (v1 or v2) that this process is in. Room is -1 if nothing
// says. Cached files, which the kernel drops at once, count as room; swap does not.
func Room() (have int64, of string) { return room("/") }

// room is Room with the files of /proc and /sys below root.
func room(root string) (have int64, of string) {
	have = int64(math.MaxInt64)
	least := func(n int64, what string) {
		if n < have {
			have, of = max(0, n), what
		}
	}
	if v, ok := fields(path.Join(root, "proc/meminfo"))["MemAvailable:"]; ok {
		least(v<<10, "memory that the machine has available")
	}
	for _, g := range groups(root) {
		stat := fields(path.Join(g.dir, "memory.stat"))
		limit, used := readInt(path.Join(g.dir, g.limit)), readInt(path.Join(g.dir, g.usage))
		if limit >= 0 && used >= 0 { // "max" is no number
			least(limit-used+min(used, stat[g.files+"inactive_file"]+stat[g.files+"active_file"]),
				fmt.Sprintf("memory that cgroup %s has left", g.name))
		}
	}
	if of == "" {
		return -1, ""
	}
	return have, of
}

// group is a cgroup with a controller of memory, and what its files are called.
type group struct {
	name, dir           string
	limit, usage, files string
}

// groups are those that this process is in, and theirs.
func groups(root string) (all []group) {
	of, err := os.ReadFile(path.Join(root, "proc/self/cgroup"))
	if err != nil {
		return nil
	}
	mounts, err := os.ReadFile(path.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return nil
	}
	for line := range strings.Lines(string(of)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		g := group{limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", files: "total_"}
		kind := "cgroup"
		switch {
		case part[0] == "0" && part[1] == "":
			kind, g = "cgroup2", group{limit: "memory.max", usage: "memory.current"}
		case !strings.Contains(","+part[1]+",", ",memory,"):
			continue
		}
		top, at := mounted(mounts, kind, part[2])
		if at == "" {
			continue
		}
		// Of a container whose own cgroup is the mount's root, the path is seen from there, or from outside.
		name := path.Clean("/" + strings.TrimPrefix(part[2], strings.TrimSuffix(top, "/")))
		for {
			g.name, g.dir = name, path.Join(root, at, name)
			all = append(all, g)
			if name == "/" {
				break
			}
			name = path.Dir(name)
		}
	}
	return all
}

// mounted is where a cgroup file system with memory is, and which cgroup is its root; proc_pid_mountinfo(5). Of several
// it is the one that shows most of the cgroups above the one given.
func mounted(mounts []byte, kind, group string) (top, at string) {
	above := func(top string) bool { return strings.HasPrefix(group+"/", strings.TrimSuffix(top, "/")+"/") }
	for lines := bufio.NewScanner(bytes.NewReader(mounts)); lines.Scan(); {
		before, after, _ := strings.Cut(lines.Text(), " - ")
		f, fs := strings.Fields(before), strings.Fields(after)
		if len(f) < 5 || len(fs) < 3 || fs[0] != kind {
			continue
		}
		if kind == "cgroup" && !strings.Contains(","+fs[2]+",", ",memory,") {
			continue
		}
		if f[3], f[4] = escapes.Replace(f[3]), escapes.Replace(f[4]); at == "" || above(f[3]) &&
			(!above(top) || len(f[3]) < len(top)) {
			top, at = f[3], f[4]
		}
	}
	return top, at
}

// escapes are those of names in mountinfo.
var escapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// fields are the numbers of a file whose lines begin with a name and a number.
func fields(file string) map[string]int64 {
	all := make(map[string]int64)
	b, err := os.ReadFile(file)
	if err != nil {
		return all
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				all[f[0]] = n
			}
		}
	}
	return all
}
