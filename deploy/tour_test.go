package deploy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

// notRun are the commands of the documents that the tour leaves out, and why.
var notRun = map[string]string{
	"make build":                    "what it makes is in the first machine's folder bin",
	"make build-verbs":              "builds with cgo; make test-verbs runs what it makes",
	"kvctl doctor --provider verbs": "wants an RDMA adapter",
	"kvctl perf --provider verbs --rdma-device mlx5_0":                                                                  "wants an RDMA adapter",
	"kvd memnode --name m1 --memory 64GiB --listen-verbs 10.0.0.1:7403 --shm-socket off --config /etc/kvd/memnode.yaml": "wants an RDMA adapter with that address",
}

// said is a command of a document and what the document says that it prints.
type said struct {
	where   string // file:line
	machine string // whose prompt it stands behind; empty: of the one that has no name
	command string
	output  []string // nil: nothing is said
	program string   // a Go program, in place of a command
}

// refused reports whether the document shows that the command fails.
func (s said) refused() bool {
	return len(s.output) > 0 && refusal.MatchString(s.output[len(s.output)-1])
}

// tour lists the commands of a document: each line of a block of kind sh, and in one of
// kind console each line behind "$ ", or behind "MACHINE$ ", with the lines that follow it as its
// output. A block of kind go is a program.
func tour(t *testing.T, file string) (all []said) {
	t.Helper()
	kind := ""
	for i, line := range strings.Split(read(t, file), "\n") {
		where := fmt.Sprintf("%s:%d", filepath.Base(file), i+1)
		typed := prompt.FindStringSubmatch(line)
		switch {
		case kind == "" && strings.HasPrefix(line, "```"):
			switch kind = strings.TrimPrefix(line, "```"); kind {
			case "":
				kind = "text"
			case "go":
				all = append(all, said{where: where})
			}
		case strings.HasPrefix(line, "```"):
			kind = ""
		case kind == "go":
			all[len(all)-1].program += line + "\n"
		case kind == "sh" && strings.TrimSpace(line) != "":
			all = append(all, said{where: where, command: line})
		case kind == "console" && typed != nil:
			all = append(all, said{where: where, machine: typed[1], command: typed[2]})
		case kind == "console" && len(all) == 0:
			t.Fatalf("%s: output without a command", where)
		case kind == "console":
			all[len(all)-1].output = append(all[len(all)-1].output, line)
		}
	}
	return all
}

// machine is a row of a document's table of machines.
type machine struct{ name, address string }

var machineRow = regexp.MustCompile("(?m)^\\| `([a-z][a-z0-9]*)` \\| (\\d+\\.\\d+\\.\\d+\\.\\d+) \\|")

// machinesOf lists the machines of documents, and wants all those that commands are typed on.
func machinesOf(t *testing.T, files []string, run []said) (all []machine) {
	t.Helper()
	for _, file := range files {
		for _, m := range machineRow.FindAllStringSubmatch(read(t, filepath.Join("..", file)), -1) {
			all = append(all, machine{name: m[1], address: m[2]})
		}
	}
	for _, s := range run {
		if s.machine != "" && !slices.ContainsFunc(all, func(m machine) bool { return m.name == s.machine }) {
			t.Errorf("%s: no table has the address of machine %s", s.where, s.machine)
		}
	}
	return all
}

// bare is a command without its comment, and with single spaces.
func bare(command string) string {
	if i := strings.Index(command, " # "); i >= 0 {
		command = command[:i]
	}
	return strings.Join(strings.Fields(command), " ")
}

var (
	prompt   = regexp.MustCompile(`^([a-z][a-z0-9]*)?\$ (.*)$`)
	serves   = regexp.MustCompile(`^((go run \./cmd/)?kvd (dev|directory|memnode|janitor|gateway)|(go run |/usr/bin/python3 )(\./)?examples/\S+)( |$)`)
	errorsTo = regexp.MustCompile(`2>\S+$`)
	refusal  = regexp.MustCompile(`^kvctl [a-z ]+: `)
	quantity = regexp.MustCompile(`^(\d[\d.]*)((?:[a-zA-Zµ%/]+)?)$`)
	raftRole = regexp.MustCompile(`^(leader|voter)$`)
	hexID    = regexp.MustCompile(`^[0-9a-f]{16}$`)
	moment   = regexp.MustCompile(`^\d{4}-\d\d-\d\dT[\d:.]+Z$`)
)

// sameText compares what is printed with what is said, field by field. The rule for what
// differs between two runs: a number with a point, a unit, or more than two digits stands
// for any number with that unit, a time for any time, sixteen hexadecimal digits for any such, a line of a
// table may be as long as it likes, and any directory node may lead. Everything else is word for word.
func sameText(want, got string) bool {
	w, g := strings.Fields(want), strings.Fields(got)
	if len(w) != len(g) {
		return false
	}
	for i := range w {
		a, b := quantity.FindStringSubmatch(w[i]), quantity.FindStringSubmatch(g[i])
		switch {
		case w[i] == g[i]:
		case strings.Trim(w[i]+g[i], "─") == "":
		case raftRole.MatchString(w[i]) && raftRole.MatchString(g[i]):
		case moment.MatchString(w[i]) && moment.MatchString(g[i]):
		case hexID.MatchString(w[i]) && hexID.MatchString(g[i]):
		case a != nil && b != nil && a[2] == b[2] && (a[2] != "" || strings.Contains(a[1], ".") || len(a[1]) > 2):
		default:
			return false
		}
	}
	return true
}

func TestSameText(t *testing.T) {
	for _, c := range []struct {
		want, got string
		same      bool
	}{
		{"hello", "hello", true}, {"hello", "hullo", false}, {"2", "3", false},
		{"version 1764148823961337857", "version 12", true},
		{"29.97s", "30s", true}, {"29.97s", "30ms", false}, {" a  ─── 0.3", "a ───── 17.0", true}, {"a b", "a", false},
		{"d1 leader", "d1 voter", true}, {"tcp 10.0.0.21:7402", "tcp 10.0.0.22:7402", false},
		{"2025-11-26T09:20:53.971Z", "2026-01-01T00:00:00.000Z", true}, {"kvd_ready 1", "kvd_ready 0", false},
		{"Store 370f569ca55a5c9a", "Store 4d22418999628f00", true}, {"Store 370f569ca55a5c9a", "Store 4d22", false},
	} {
		if got := sameText(c.want, c.got); got != c.same {
			t.Errorf("%q, %q: %v", c.want, c.got, got)
		}
	}
}

// world is how the commands of the documents get ports, files and processes of their own.
var world = []string{"unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"}

func needWorld(t *testing.T) {
	t.Helper()
	probe := "ip link set lo up && mount -t proc none /proc && mount -t tmpfs none /var/lib && ip link add br0 type " +
		"bridge && ip link add v type veth peer name w"
	if out, err := exec.Command(world[0], append(world[1:], "sh", "-c", probe)...).CombinedOutput(); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("no network of its own: %v: %s", err, out)
		}
		t.Skipf("the commands need ports, files and processes of their own, for which this machine gives no "+
			"namespaces (unshare, ip): %v: %s", err, out)
	}
}

// operating are the pages for operators, in the order in which one reads them: a page goes on with the store of those
// before.
var operating = []string{"docs/install.md", "docs/tls.md", "docs/gateway.md", "docs/memory.md", "docs/backup.md",
	"docs/changes.md", "docs/watching.md"}

// toured are the documents whose commands are run, each group in a world of its own.
var toured = [][]string{{"README.md"}, {"docs/first-hour.md"}, {"examples/README.md"}, {"docs/failures.md"}, operating}

// Every command of the documents that are toured does what it says: they are run one
// after the other, word for word and with the ports that they name, in a network, file
// system and process space of their own; and those of a machine in one with nothing but what
// the commands before have brought there. A command that serves is left running and waited for; any
// other ends with status 0, or, where the document shows a refusal, without.
func TestTour(t *testing.T) {
	if testing.Short() {
		t.Skip("it runs every command of the documents, for half a minute; run it without -short")
	}
	needWorld(t)
	unused := make(map[string]bool)
	for c := range notRun {
		unused[c] = true
	}
	var run [][]said
	for _, files := range toured {
		run = append(run, toRun(t, files, unused))
	}
	for c := range unused {
		t.Errorf("no document has the command that is not run: %s", c)
	}
	for i, files := range toured {
		t.Run(files[0], func(t *testing.T) {
			t.Parallel() // each has a world of its own, and waits more than it works
			for _, problem := range goTour(t, tourLimit(t), run[i], machinesOf(t, files, run[i])) {
				t.Error(problem)
			}
		})
	}
}

// tourLimit is how long a tour may take. On a busy machine that is ten times of what it takes alone; it ends a minute
// before its package has to, to tell what it has seen.
func tourLimit(t *testing.T) time.Duration {
	limit := 15 * time.Minute
	if end, ok := t.Deadline(); ok {
		limit = min(limit, max(time.Until(end)-time.Minute, time.Minute))
	}
	return limit
}

// looks matches commands that change nothing.
var looks = regexp.MustCompile(`^(kvctl (directory list|nodes|whoami|namespace show|--namespace [a-z]+ get)|redis-cli .* get|until (curl|kvctl gateways)|while (kvctl|pgrep))\b`)

// leftOut lists the commands of machines with one of them missing, or a machine of a loop over machines.
func leftOut(run []said) (all [][]said, what []string) {
	run = slices.DeleteFunc(slices.Clone(run), func(s said) bool { return s.machine == "" })
	for i, s := range run {
		if s.refused() || looks.MatchString(s.command) {
			continue
		}
		all = append(all, slices.Delete(slices.Clone(run), i, i+1))
		what = append(what, s.command)
		head, tail, _ := strings.Cut(s.command, ";")
		of, ok := strings.CutPrefix(head, "for m in ")
		if !ok || strings.Contains(tail, "scp ~/ca/crl.pem $m") { // the revoked do not show themselves to every machine
			continue
		}
		for _, m := range strings.Fields(of) {
			fewer := slices.Clone(run)
			fewer[i].command = "for m in " + strings.Join(slices.DeleteFunc(strings.Fields(of), func(w string) bool {
				return w == m
			}), " ") + ";" + tail
			all = append(all, fewer)
			what = append(what, m+" of "+s.command)
		}
	}
	return all, what
}

// A newcomer needs each of the commands of the pages for operators that are typed on machines: without any of
// them, or for one machine less, the rest does not do what the document says.
func TestTourNeedsAll(t *testing.T) {
	step, err := strconv.Atoi(os.Getenv("KVD_TOUR")) // 1: each; 4: every fourth
	if err != nil || step < 1 {
		t.Skip("it goes the tour from empty machines 70 times, for minutes: make tour-mutants")
	}
	needWorld(t)
	run := toRun(t, operating, map[string]bool{})
	all, what := leftOut(run)
	machines := machinesOf(t, operating, run)
	for i, fewer := range all {
		if i%step != 0 {
			continue
		}
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			problems := goTour(t, time.Minute, fewer, machines)
			if len(problems) == 0 {
				t.Errorf("not missed: %s", what[i])
				return
			}
			first, _, _ := strings.Cut(problems[0], "\n")
			t.Logf("without %s: %s", what[i], first)
		})
	}
}

// toRun lists the commands of documents that can be run here, and takes the others out of unused.
func toRun(t *testing.T, files []string, unused map[string]bool) (run []said) {
	t.Helper()
	programs := t.TempDir()
	var all []said
	for _, file := range files {
		all = append(all, tour(t, filepath.Join("..", file))...)
	}
	for i, s := range all {
		if s.program != "" {
			s.command = "go run " + writeProgram(t, programs, i, s.program)
		}
		c := bare(s.command)
		missing := missingTool(c)
		switch {
		case notRun[c] != "":
			delete(unused, c)
		case missing != "" && os.Getenv("CI") != "":
			t.Errorf("%s: %s is not installed", s.where, missing)
		case missing != "":
			t.Logf("%s: left out, %s is not installed here: %s", s.where, missing, s.command)
		default:
			run = append(run, s)
		}
	}
	return run
}

// goTour runs commands in a world of their own, and tells what is not as the document says.
func goTour(t *testing.T, limit time.Duration, run []said, machines []machine) []string {
	t.Helper()
	bin, dir := commands(t), t.TempDir()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	home, all := filepath.Join(dir, "home"), filepath.Join(dir, "machines")
	for name, text := range map[string]string{"todo": strings.Repeat("call somebody\n", 80), "more/ideas": "x\n"} {
		name = filepath.Join(home, "notes", name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, []byte(text), 0o644)); err !=
			nil {
			t.Fatal(err)
		}
	}
	for _, m := range machines[:min(len(machines), 1)] { // the first one has what make build makes
		its := filepath.Join(all, m.name, "home")
		if err := errors.Join(os.MkdirAll(its, 0o755), os.Symlink(bin, filepath.Join(its, "bin"))); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, world[0], append(world[1:], "bash", "-c", script(run, machines, home, limit))...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_RUNTIME_DIR="+home, "RUNTIME_DIRECTORY=", "GOPROXY=off",
		"GOFLAGS=", "GOBIN="+filepath.Join(home, "bin"),
		"MACHINES="+all, "SYSTEM="+os.Getenv("PATH"), "PATH="+filepath.Join(home, "bin")+":"+bin+":"+os.Getenv("PATH"),
		"KVD_DIRECTORY=")
	for _, v := range []string{"GOCACHE", "GOMODCACHE", "GOPATH"} {
		out, err := exec.Command("go", "env", v).Output()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(cmd.Env, v+"="+strings.TrimSpace(string(out)))
	}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	problems := compare(run, string(out))
	if err != nil {
		problems = append(problems, fmt.Sprintf("%v: %s", err, &errs))
	}
	return problems
}

// writeProgram puts a program into a folder of its own, and gives its file.
func writeProgram(t *testing.T, dir string, i int, text string) string {
	t.Helper()
	file := filepath.Join(dir, fmt.Sprint("program.", i), "main.go")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

// The Go programs of the documents compile, as gofmt would have them; the tour runs those that
// it comes across.
func TestPrograms(t *testing.T) {
	found := 0
	for _, pattern := range []string{"../*.md", "../docs/*.md", "../examples/*.md", "../docs/rfcs/*.md",
		"../rdma/*/README.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			for i, s := range tour(t, file) {
				if s.program == "" {
					continue
				}
				found++
				if text, err := format.Source([]byte(s.program)); err != nil || string(text) != s.program {
					t.Errorf("%s: not as gofmt has it (%v)", s.where, err)
				}
				name := writeProgram(t, t.TempDir(), i, s.program)
				if out, err := exec.Command("go", "vet", name).CombinedOutput(); err != nil {
					t.Errorf("%s: %v: %s", s.where, err, out)
				}
			}
		}
	}
	if found == 0 {
		t.Error("no document has a program")
	}
}

// provided are the words that a command may begin with without being installed here: kvd's, the
// shell's, and those that machines.sh has.
var provided = []string{"kvctl", "kvd", "export", "for", "until", "while", "do", "done", "break", "ssh", "scp"}

// redisPy is there if Debian's Python has redis-py.
var redisPy = sync.OnceValue(func() bool { return exec.Command("/usr/bin/python3", "-c", "import redis").Run() == nil })

// missingTool names the first command of a pipeline that is not installed.
func missingTool(command string) string {
	if strings.HasPrefix(command, "/usr/bin/python3 ") && !redisPy() {
		return "python3-redis"
	}
	for _, part := range regexp.MustCompile(`[|&;]+`).Split(strings.ReplaceAll(command, ">&", ">"), -1) {
		f := strings.Fields(part)
		if len(f) == 0 || slices.Contains(provided, f[0]) {
			continue
		}
		if _, err := exec.LookPath(f[0]); err != nil {
			return f[0]
		}
	}
	return ""
}

// Before and behind the output of command n stand separator n and separator n with its
// status.
const separator = "\x1e"

// script types commands one after the other, each into the shell of its machine, until the first that
// ends otherwise than the document says. Those that serve are left running; they may take until limit to become ready.
func script(run []said, machines []machine, dir string, limit time.Duration) string {
	var b strings.Builder
	b.WriteString("ip link set lo up && mount -t proc none /proc && mount -t tmpfs none /var/lib && mkdir " +
		"/var/lib/kvd || exit 1\nexec </dev/null\n")
	if len(machines) > 0 {
		b.WriteString(". deploy/testdata/machines.sh\n")
	}
	for _, m := range machines {
		fmt.Fprintf(&b, "machine %s %s || exit 1\n", m.name, m.address)
	}
	for i, s := range run {
		fmt.Fprintf(&b, "printf '%s%d\\n'\n", separator, i)
		text := fmt.Sprintf("{ %s\n} 2>&1\n", s.command)
		if serves.MatchString(s.command) {
			log := filepath.Join(dir, fmt.Sprint("served.", i))
			// The process may take a while to build, or to find a leader.
			text = fmt.Sprintf("{ %[1]s\n} >%[2]s 2>&1 &\n"+
				"p=$!; for _ in $(seq %[4]d); do grep -q '^ready ' %[2]s && break; kill -0 $p 2>/dev/null || break; "+
				"sleep 0.1; done\n"+
				"grep -q '^ready ' %[2]s || { cat %[2]s %[3]s; false; }\n", s.command, log,
				strings.TrimPrefix(errorsTo.FindString(s.command), "2>"), limit/(100*time.Millisecond))
		}
		if s.machine != "" {
			text = fmt.Sprintf("on %s <<'%[2]s'\n%[3]s%[2]s\n", s.machine, separator, text)
		}
		b.WriteString(text)
		end := "[ $status = 0 ] || exit 0"
		if s.refused() {
			end = "[ $status != 0 ] || exit 0"
		}
		fmt.Fprintf(&b, "status=$?; printf '%s%d %%d\\n' $status; %s\n", separator, i, end)
	}
	return b.String()
}

// compare judges what a script printed.
func compare(run []said, out string) (problems []string) {
	say := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	for i, s := range run {
		_, rest, ok := strings.Cut(out, fmt.Sprintf("%s%d\n", separator, i))
		text, rest, ended := strings.Cut(rest, fmt.Sprintf("%s%d ", separator, i))
		line, _, whole := strings.Cut(rest, "\n")
		if !ok || !ended || !whole {
			say("%s: did not end: %s\n%s", s.where, s.command, text)
			return problems
		}
		if (line != "0") != s.refused() {
			say("%s: status %s: %s\n%s", s.where, line, s.command, text)
			return problems
		}
		if s.output == nil {
			continue
		}
		got := strings.Split(strings.TrimRight(text, "\r\n"), "\n")
		if !slices.EqualFunc(s.output, got, sameText) {
			say("%s: %s\nprints\n%s\nbut the document says\n%s", s.where, s.command, text, strings.Join(s.output, "\n"))
		}
	}
	return problems
}

// named matches kvctl or kvd with the words and flags behind it.
var named = regexp.MustCompile(`\b(kvctl|kvd)((?: +(?:[a-z][a-z-]*|--[a-z-]+|-[a-z]))*)`)

// understood reports whether there is a command that begins with words, and has the flags
// among them. Words behind a command are its arguments.
func understood(bin, program string, words []string) error {
	help := ""
	flags := slices.DeleteFunc(slices.Clone(words), func(w string) bool { return !strings.HasPrefix(w, "-") })
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return strings.HasPrefix(w, "-") })
	for n := len(words); help == ""; n-- {
		if n == 0 && len(words) > 0 {
			return fmt.Errorf("%s has no command %s", program, words[0])
		}
		out, err := exec.Command(filepath.Join(bin, program), append([]string{"help"}, words[:n]...)...).Output()
		if err == nil {
			help = string(out)
		}
	}
	for _, f := range flags {
		if !regexp.MustCompile(`(?m)(^|[ ,])` + f + `\b`).MatchString(help) {
			return fmt.Errorf("%s %s has no flag %s", program, strings.Join(words, " "), f)
		}
	}
	return nil
}

// Commands that the documents name in a sentence or a table exist, with their flags.
func TestNamedCommands(t *testing.T) {
	bin := commands(t)
	span := regexp.MustCompile("`([^`\n]+)`")
	for _, file := range []string{"../README.md", "../examples/README.md", "../docs/README.md", "../docs/first-hour.md",
		"../docs/failures.md", "../docs/compatibility.md", "../docs/performance.md", "../docs/rdma.md",
		"../docs/compared.md",
		"../docs/install.md", "../docs/tls.md", "../docs/gateway.md", "../docs/memory.md", "../docs/changes.md",
		"../docs/backup.md", "../docs/snapshots.md", "../docs/watching.md"} {
		for _, m := range span.FindAllStringSubmatch(read(t, file), -1) {
			c := named.FindStringSubmatch(m[1])
			if c == nil || !strings.HasPrefix(m[1], c[1]+" ") {
				continue
			}
			if err := understood(bin, c[1], strings.Fields(c[2])); err != nil {
				t.Errorf("%s: `%s`: %v", file, m[1], err)
			}
		}
	}
}

// Every alert names a command that shows its condition.
func TestAlertsNameCommands(t *testing.T) {
	bin := commands(t)
	var f struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "alerts.yaml")), &f); err != nil {
		t.Fatal(err)
	}
	info := regexp.MustCompile(`\bredis-cli( -h \S+)? info \w+`)
	for _, g := range f.Groups {
		for _, r := range g.Rules {
			text := r.Annotations["summary"] + " " + r.Annotations["description"]
			found := info.MatchString(text)
			for _, m := range named.FindAllStringSubmatch(text, -1) {
				if m[2] == "" {
					continue
				}
				found = true
				if err := understood(bin, m[1], strings.Fields(m[2])[:1]); err != nil {
					t.Errorf("%s: %v", r.Alert, err)
				}
			}
			if !found {
				t.Errorf("%s names no command that shows its condition", r.Alert)
			}
		}
	}
}
