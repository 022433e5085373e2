package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/layout"
	"github.com/kvd-project/kvd/internal/ycsb"
)

// loadEnv has this binary use a store as YCSB's workload A does, until SIGTERM; it is a loadConfig.
const loadEnv = "KVD_E2E_LOAD"

type loadConfig struct {
	Directory, Gateways  []string
	Namespace, Provider  string
	Records              uint64
	Threads, RedisClient int
	Pace, Timeout        time.Duration
	Seed                 uint64
	Result               string // file of a loadResult
}

// loadResult counts operations by Redis's clients and by the library alike.
type loadResult struct {
	Ops, Failed, Unknown      uint64
	FirstFailed, FirstUnknown string
	Longest                   time.Duration
}

// errUnknown is an end of which a Redis client does not know whether the command has happened.
var errUnknown = errors.New("unknown outcome")

func (r *loadResult) count(what string, took time.Duration, err error) {
	r.Ops++
	r.Longest = max(r.Longest, took)
	n, first := &r.Failed, &r.FirstFailed
	switch {
	case err == nil:
		return
	case errors.Is(err, client.ErrUnknownOutcome), errors.Is(err, errUnknown):
		n, first = &r.Unknown, &r.FirstUnknown
	}
	if *n++; *n == 1 {
		*first = fmt.Sprintf("%s after %v: %v", what, took, err)
	}
}

const valueBytes = 1000

// asYCSB performs one request.
type asYCSB func(key string, write bool) error

func load(doc string) error {
	var cfg loadConfig
	if err := json.Unmarshal([]byte(doc), &cfg); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var users []asYCSB
	if cfg.Threads > 0 {
		c, err := client.Open(ctx, client.Options{Directory: cfg.Directory, Provider: cfg.Provider,
			Namespace: cfg.Namespace, CacheBytes: 1 << 20, OpTimeout: cfg.Timeout})
		if err != nil {
			return err
		}
		defer c.Close()
		for range cfg.Threads {
			users = append(users, func(key string, write bool) (err error) {
				if write {
					_, err = c.Put(context.Background(), []byte(key), make([]byte, valueBytes), client.PutOptions{})
				} else {
					_, err = c.Get(context.Background(), []byte(key))
				}
				return err
			})
		}
	}
	for n := range cfg.RedisClient {
		r := &redisUser{gateways: cfg.Gateways, at: n, timeout: cfg.Timeout}
		defer r.hangUp()
		users = append(users, r.do)
	}
	a, err := ycsb.ByName("a")
	if err != nil {
		return err
	}
	keys := ycsb.NewKeyspace(cfg.Records)
	var mu sync.Mutex
	var sum loadResult
	var wg sync.WaitGroup
	fmt.Println("ready load")
	for n, do := range users {
		g, err := ycsb.New(ycsb.Options{Workload: a, Keyspace: keys, Seed: cfg.Seed, Stream: uint64(n)})
		if err != nil {
			return err
		}
		wg.Go(func() {
			pace := time.NewTicker(cfg.Pace)
			defer pace.Stop()
			for ctx.Err() == nil {
				q := g.Next()
				key := string(ycsb.Key(nil, q.Record))
				began := time.Now()
				err := do(key, q.Op == ycsb.Update)
				took := time.Since(began)
				mu.Lock()
				sum.count(fmt.Sprint(q.Op, " ", key), took, err)
				mu.Unlock()
				<-pace.C
			}
		})
	}
	wg.Wait()
	b, err := json.Marshal(sum)
	if err != nil {
		return err
	}
	return os.WriteFile(cfg.Result, b, 0o600)
}

// redisUser is a Redis client as docs/changes.md wants it: it looks whether the gateway has hung up before it sends a
// command, and sends one again, by another gateway, where nothing was sent or the gateway said that nothing was done.
type redisUser struct {
	gateways []string
	at       int
	timeout  time.Duration
	c        *net.TCPConn // nil: none
	r        *bufio.Reader
}

func (r *redisUser) do(key string, write bool) error {
	command := fmt.Sprintf("*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n", len(key), key)
	if write {
		command = fmt.Sprintf("*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(key), key, valueBytes,
			make([]byte, valueBytes))
	}
	err := errors.New("no try")
	for end := time.Now().Add(r.timeout); time.Now().Before(end); {
		if err = r.connect(); err != nil {
			r.elsewhere()
			continue
		}
		if _, err := io.WriteString(r.c, command); err != nil {
			r.elsewhere()
			return fmt.Errorf("%w: sending: %w", errUnknown, err)
		}
		line, err := r.r.ReadString('\n')
		if err != nil {
			r.elsewhere()
			return fmt.Errorf("%w: no reply: %w", errUnknown, err)
		}
		switch line = strings.TrimSpace(line); {
		case write && line == "+OK":
			return nil
		case !write && line == "$"+strconv.Itoa(valueBytes):
			if _, err := io.CopyN(io.Discard, r.r, valueBytes+2); err != nil {
				r.elsewhere()
				return fmt.Errorf("%w: half a reply: %w", errUnknown, err)
			}
			return nil
		case strings.HasPrefix(line, "-LOADING ") && strings.HasSuffix(line, "nothing was done"):
			r.elsewhere()
		case strings.HasPrefix(line, "-ERR unknown outcome"):
			return fmt.Errorf("%w: %s", errUnknown, line)
		default:
			return errors.New(line)
		}
	}
	return fmt.Errorf("not within %v: %w", r.timeout, err)
}

func (r *redisUser) connect() error {
	if r.c != nil && !r.ended() {
		return nil
	}
	r.elsewhere()
	c, err := net.DialTimeout("tcp", r.gateways[r.at%len(r.gateways)], time.Second)
	if err != nil {
		time.Sleep(time.Millisecond) // nobody listens for a moment, perhaps at none of them
		return err
	}
	r.c, r.r = c.(*net.TCPConn), bufio.NewReader(c)
	return nil
}

// ended reports whether the gateway has closed the connection, as far as is known here.
func (r *redisUser) ended() (over bool) {
	raw, err := r.c.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Read(func(fd uintptr) bool {
		n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
		over = n == 0 && err == nil || err != nil && !errors.Is(err, unix.EAGAIN)
		return true
	})
	return over || err != nil
}

func (r *redisUser) elsewhere() {
	r.hangUp()
	r.at++
}

func (r *redisUser) hangUp() {
	if r.c != nil {
		_ = r.c.Close() // what came over it has been read, or is not awaited
		r.c = nil
	}
}

// program is a kvd in a folder of its own, which can be replaced.
type program string

func (w *world) program(from string) program {
	w.t.Helper()
	p := program(filepath.Join(w.t.TempDir(), "kvd"))
	p.replace(w, from)
	return p
}

// writeProgram is os.WriteFile of what is to be executed. No other goroutine starts a process meanwhile: until it
// executes its own program, that has the file open for writing as well, and nobody can execute it ("text file busy").
func writeProgram(path string, b []byte, mode os.FileMode) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, b, mode)
}

// replace puts another program in its place at once, as install(1) and package managers do.
func (p program) replace(w *world, from string) {
	w.t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = writeProgram(string(p)+".new", b, 0o755)
	}
	if err == nil {
		err = os.Rename(string(p)+".new", string(p))
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) startProgram(path string, args ...string) *daemon {
	w.t.Helper()
	cmd := exec.Command(path, args...)
	cmd.Env = w.env
	d := w.run(cmd)
	d.awaitReady()
	return d
}

// linked builds a kvd that calls itself by another version.
func linked(t *testing.T, version string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvd-"+version)
	cmd := exec.Command("go", "build", "-ldflags", "-X main.version="+version, "-o", path,
		"github.com/kvd-project/kvd/cmd/kvd")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return path
}

// upgraded is a store of three directory nodes, three memory nodes, a janitor and two gateways, under load.
type upgraded struct {
	*world
	records   uint64
	pace      time.Duration
	dirAddrs  []string
	dirArgs   [][]string
	dirs      []*daemon
	programs  []program
	memnodes  []*daemon
	gateways  []string
	gwArgs    [][]string
	gws       []*daemon
	janitorAt string
}

func newUpgraded(t *testing.T, records uint64, pace time.Duration) *upgraded {
	u := &upgraded{world: newWorld(t), records: records, pace: pace}
	old := filepath.Join(bin, "kvd")
	for range 3 {
		u.dirAddrs = append(u.dirAddrs, freeAddr(t))
	}
	u.dir = strings.Join(u.dirAddrs, ",")
	for n, at := range u.dirAddrs {
		args := []string{"directory", "--id", fmt.Sprint("d", n+1), "--data-dir", t.TempDir(), "--listen", at,
			"--raft-listen", freeAddr(t), "--lease", "2s", "--election-timeout", "1s", "--bootstrap"}
		if n > 0 {
			args = append(args[:len(args)-1], "--join", u.dirAddrs[0])
		}
		u.dirArgs = append(u.dirArgs, args)
		u.dirs = append(u.dirs, u.startProgram(old, args...))
	}
	memory := max(64<<20, 4*records*valueBytes)
	for n := range 3 {
		u.programs = append(u.programs, u.program(old))
		u.memnodes = append(u.memnodes, u.startProgram(string(u.programs[n]), "memnode", "--name", fmt.Sprint("m", n+1),
			"--directory", u.dir, "--memory", fmt.Sprint(memory>>20, "MiB"), "--janitor=false"))
	}
	u.janitorAt = freeAddr(t)
	u.startProgram(old, "janitor", "--directory", u.dir, "--http-listen", u.janitorAt)
	u.must(nil, "namespace", "create", "ycsb", "--replicas", "2")
	u.fill()
	for n := range 2 {
		u.gateways = append(u.gateways, freeAddr(t))
		u.gwArgs = append(u.gwArgs, []string{"gateway", "--directory", u.dir, "--databases", "ycsb", "--listen",
			u.gateways[n], "--listen-memcached", "off"})
		u.gws = append(u.gws, u.startProgram(old, u.gwArgs[n]...))
	}
	return u
}

func (u *upgraded) open() *client.Client {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.t.Context(), patience)
	defer cancel()
	c, err := client.Open(ctx, client.Options{Directory: u.dirAddrs, Provider: "tcp", Namespace: "ycsb",
		OpTimeout: patience})
	if err != nil {
		u.t.Fatal(err)
	}
	return c
}

// fill puts all records.
func (u *upgraded) fill() {
	u.t.Helper()
	c := u.open()
	defer c.Close()
	var wg sync.WaitGroup
	for n := range uint64(8) {
		wg.Go(func() {
			for r := n; r < u.records; r += 8 {
				if _, err := c.Put(u.t.Context(), ycsb.Key(nil, r), make([]byte, valueBytes),
					client.PutOptions{}); err != nil {
					u.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// sound reads all records, and has the memory checked.
func (u *upgraded) sound() {
	u.t.Helper()
	c := u.open()
	defer c.Close()
	for r := range u.records {
		if i, err := c.Get(u.t.Context(), ycsb.Key(nil, r)); err != nil || len(i.Value) != valueBytes {
			u.t.Errorf("record %d: %d bytes, %v", r, len(i.Value), err)
			return
		}
	}
	u.until("kvctl check to find nothing", func() bool {
		_, _, status := u.ctl(nil, "--namespace", "ycsb", "check")
		return status == 0
	})
}

// under performs work under the load of two client processes and one of Redis clients, and wants no failed operation;
// and none of unknown outcome but of those processes, tcp, shm or Redis. It gives the number of operations, and by how
// much the janitor's counters have grown.
func (u *upgraded) under(what string, timeout time.Duration, work func(), unsure ...string) (ops int,
	copied map[string]float64) {
	u.t.Helper()
	var loads []*daemon
	var results []string
	for n := range 3 {
		cfg := loadConfig{Directory: u.dirAddrs, Gateways: u.gateways, Namespace: "ycsb",
			Provider: []string{"tcp", "shm", ""}[n], Records: u.records, Pace: u.pace,
			Timeout: timeout, Seed: uint64(n), Result: filepath.Join(u.t.TempDir(), "result")}
		if cfg.Threads = 2; n == 2 {
			cfg.Threads, cfg.RedisClient = 0, 4
		}
		doc, err := json.Marshal(cfg)
		if err != nil {
			u.t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(slices.Clone(u.env), loadEnv+"="+string(doc))
		loads, results = append(loads, u.run(cmd)), append(results, cfg.Result)
	}
	for _, d := range loads {
		d.awaitReady()
	}
	before := u.copied()
	began := time.Now()
	work()
	took := time.Since(began)
	copied = u.copied()
	for n, d := range loads {
		if status := d.signal(syscall.SIGTERM); status != 0 {
			u.t.Errorf("client process %d: exit status %d\n%s", n, status, d.stderr)
			continue
		}
		var r loadResult
		if b, err := os.ReadFile(results[n]); err != nil || json.Unmarshal(b, &r) != nil || r.Ops == 0 {
			u.t.Errorf("client process %d: no operations: %v: %s", n, err, b)
		}
		who := []string{"tcp", "shm", "Redis"}[n]
		ops += int(r.Ops)
		u.t.Logf("%s: %s: %d operations in %v, %d failed, %d of unknown outcome %s, the longest took %v", what, who,
			r.Ops, took.Round(time.Millisecond),
			r.Failed, r.Unknown, r.FirstUnknown, r.Longest.Round(time.Millisecond))
		if r.Failed != 0 || r.Unknown != 0 && !slices.Contains(unsure, who) {
			u.t.Errorf("%s: %s: %d of %d operations failed, and %d have an unknown outcome, the first: %s; %s", what,
				who, r.Failed, r.Ops, r.Unknown, r.FirstFailed, r.FirstUnknown)
		}
	}
	for name, n := range copied {
		copied[name] = n - before[name]
		u.t.Logf("%s: %s: %.3f", what, name, copied[name])
	}
	return ops, copied
}

// wantRejoins sees that memory nodes that left their placement groups and joined them again, all of them once, copied
// what had changed: a join READs the index of both copies twice, and of each of the records that were written meanwhile
// both copies, and WRITEs one.
func (u *upgraded) wantRejoins(ops int, copied map[string]float64) {
	u.t.Helper()
	var status struct {
		Map struct {
			PGs []struct {
				ID         uint32
				Members    []struct{}
				IndexBytes string `json:"index_bytes"`
			}
			Shards []struct {
				PG       uint32 `json:"pg_id"`
				Segments int
			}
		}
	}
	if err := json.Unmarshal(u.must(nil, "-o", "json", "status"), &status); err != nil {
		u.t.Fatal(err)
	}
	index, copies, pass := 0, 0, 0 // pass: what the joins READ of words if they look at each once
	for _, pg := range status.Map.PGs {
		for _, sh := range status.Map.Shards {
			if sh.PG == pg.ID {
				pass += sh.Segments * layout.SegmentSize * len(pg.Members) * len(pg.Members)
			}
		}
		n, err := strconv.Atoi(pg.IndexBytes)
		if err != nil {
			u.t.Fatal(err)
		}
		index, copies = index+n*len(pg.Members), copies+len(pg.Members)
	}
	const recordBytes = valueBytes + 128 // with its key and header, in whole units
	most := 4*index + 3*ops*recordBytes
	joins, bytes := int(copied[`kvd_janitor_jobs_total{kind="join",result="done"}`]),
		int(copied[`kvd_janitor_job_transferred_bytes_total{kind="join"}`])
	u.t.Logf("%d joins of %d copies transferred %d bytes; their indexes have %d, and %d operations ran meanwhile: at "+
		"most %d", joins, copies, bytes, index, ops, most)
	// From zeroes each record of each copy is read twice and written once, and words are looked at once.
	if all := pass + 3*2*int(u.records)*valueBytes; pass == 0 || bytes > all {
		u.t.Errorf("joins transferred %d bytes: as many as without what the memory nodes held, %d at least", bytes, all)
	}
	if joins != copies || bytes > most || bytes == 0 {
		u.t.Errorf("%d joins of %d copies transferred %d bytes, want at most %d", joins, copies, bytes, most)
	}
}

// copied are what the janitor has counted of its jobs.
func (u *upgraded) copied() map[string]float64 {
	u.t.Helper()
	_, page := fetch("http://" + u.janitorAt + "/metrics")
	sum := make(map[string]float64)
	for line := range strings.Lines(page) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		v, err := strconv.ParseFloat(value, 64)
		if ok && err == nil && strings.HasPrefix(name, "kvd_janitor_") && v > 0 {
			sum[name] += v
		}
	}
	if page == "" {
		u.t.Error("the janitor has no metrics")
	}
	return sum
}

// wantVersions has every memory node say this version.
func (u *upgraded) wantVersions(version string) {
	u.t.Helper()
	dec := json.NewDecoder(bytes.NewReader(u.must(nil, "-o", "json", "nodes")))
	for n := 0; ; n++ {
		var node struct{ Name, Version string }
		if err := dec.Decode(&node); errors.Is(err, io.EOF) && n == 3 {
			return
		} else if err != nil {
			u.t.Fatal(err)
		}
		if node.Version != version {
			u.t.Errorf("%s is of version %q, want %q", node.Name, node.Version, version)
		}
	}
}

// directories replaces the directory nodes, the leader last.
func (u *upgraded) directories(path string) {
	u.t.Helper()
	type row struct {
		ID           string
		Leader       bool
		SilentMillis string `json:"silent_millis"`
	}
	list := func() (all []row) {
		out, _, _ := u.ctl(nil, "-o", "json", "directory", "list")
		for dec := json.NewDecoder(bytes.NewReader(out)); ; {
			var r row
			if dec.Decode(&r) != nil {
				return all
			}
			all = append(all, r)
		}
	}
	var order []int
	for n, r := range list() {
		if order = append(order, n); r.ID != fmt.Sprint("d", n+1) {
			u.t.Fatalf("directory node %d is %q", n+1, r.ID)
		}
	}
	leads := func() int { return slices.IndexFunc(list(), func(r row) bool { return r.Leader }) }
	last := leads()
	slices.SortStableFunc(order, func(a, b int) int { return boolInt(a == last) - boolInt(b == last) })
	for _, n := range order {
		if status := u.dirs[n].signal(syscall.SIGTERM); status != 0 {
			u.t.Fatalf("d%d: exit status %d\n%s", n+1, status, u.dirs[n].stderr)
		}
		u.dirs[n] = u.startProgram(path, u.dirArgs[n]...)
		u.until("every directory node to answer", func() bool {
			all := list()
			return len(all) == 3 && slices.ContainsFunc(all, func(r row) bool {
				return r.Leader
			}) && !slices.ContainsFunc(all, func(r row) bool { return r.SilentMillis != "0" })
		})
	}
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// replaceGateways ends one gateway after the other, and starts it again.
func (u *upgraded) replaceGateways(path string) {
	u.t.Helper()
	for n, d := range u.gws {
		if status := d.signal(syscall.SIGTERM); status != 0 {
			u.t.Fatalf("gateway %d: exit status %d\n%s", n+1, status, d.stderr)
		}
		u.gws[n] = u.startProgram(path, u.gwArgs[n]...)
	}
}

// TestUpgrade: every process of a store is replaced by one of another version while clients use it, and no operation
// fails: directory nodes, the leader last; memory nodes, which leave their placement groups for it; gateways. Back
// again memory nodes are replaced in place, by a program of another name: operations wait, and none fails within the
// client's timeout, though a write may end without telling its outcome. KVD_UPGRADE_RECORDS is how many records there
// are.
func TestUpgrade(t *testing.T) {
	records, pace := uint64(1000), 5*time.Millisecond
	if text := os.Getenv("KVD_UPGRADE_RECORDS"); text != "" {
		var err error
		if records, err = strconv.ParseUint(text, 10, 32); err != nil || records == 0 {
			t.Fatalf("KVD_UPGRADE_RECORDS=%q: want a number above 0", text)
		}
		pace = time.Millisecond
	} else if testing.Short() {
		t.Skip("it replaces every process of a store, for half a minute")
	}
	next := linked(t, "v9.9.9-next")
	u := newUpgraded(t, records, pace)
	const timeout = 5 * time.Second
	u.under("directory nodes", timeout, func() { u.directories(next) })
	ops, copied := u.under("memory nodes, --leave", timeout, func() {
		for n, p := range u.programs {
			p.replace(u.world, next)
			worker := u.memnodes[n].pid()
			u.must(nil, "nodes", "restart", fmt.Sprint("m", n+1), "--leave")
			if u.memnodes[n].pid() == worker {
				t.Errorf("m%d: worker %d was not replaced", n+1, worker)
			}
		}
	})
	u.wantRejoins(ops, copied)
	u.wantVersions("v9.9.9-next")
	// A gateway ends connections that have been silent, and may do so as their client sends.
	u.under("gateways", timeout, func() { u.replaceGateways(next) }, "Redis")
	old := filepath.Join(bin, "kvd")
	u.under("memory nodes, in place", timeout, func() {
		for n := range u.programs {
			u.must(nil, "nodes", "restart", fmt.Sprint("m", n+1), "--binary", old)
		}
		// A write whose connection was lost is looked up; of a key that another client has written since that does not
		// tell.
	}, "tcp", "shm", "Redis")
	out, err := exec.Command(old, "version").Output()
	if err != nil {
		t.Fatal(err)
	}
	u.wantVersions(strings.Fields(string(out))[1])
	u.sound()
	if audit := string(u.must(nil, "audit")); strings.Count(audit, "leave=true") != 3 ||
		strings.Count(audit, "program="+old) != 3 {
		t.Errorf("the audit log has\n%s", audit)
	}
}

// TestRestartByAnotherProgram: a program that is not fit is refused, and nothing happens; one that does not come up is
// followed by the one before, and kvctl says so; nothing is lost in either case.
func TestRestartByAnotherProgram(t *testing.T) {
	w := newWorld(t)
	w.dir = freeAddr(t)
	w.start(w.directory(t.TempDir(), freeAddr(t))...)
	m := w.start(w.memnode("m1")...)
	w.must(nil, "namespace", "create", "one", "--replicas", "1")
	w.must([]byte("v"), "--namespace", "one", "put", "k")
	script := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(t.TempDir(), name)
		if err := errors.Join(writeProgram(path, []byte(text), 0o600), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	worker := m.pid()
	for path, want := range map[string]string{
		script("writable", "#!/bin/sh\n", 0o777): "others than its owner may write it",
		t.TempDir():                              "no regular file",
		"/nowhere/kvd":                           "no such file",
	} {
		_, stderr, status := w.ctl(nil, "nodes", "restart", "m1", "--binary", path)
		if status != 1 || !strings.Contains(stderr, want) || !strings.Contains(stderr, "nothing was done") ||
			m.pid() != worker {
			t.Errorf("%s: exit status %d, %q; the worker was %d and is %d", path, status, stderr, worker, m.pid())
		}
	}
	for path, want := range map[string]string{
		script("fails", "#!/bin/sh\nexit 7\n", 0o755): "exit status 7",
		script("ends", "#!/bin/sh\nexit 0\n", 0o755):  "exit status 0",
		script("garbage", "\x7fELF", 0o755):           "exec format error",
	} {
		_, stderr, status := w.ctl(nil, "nodes", "restart", "m1", "--binary", path)
		if status != 1 || !strings.Contains(stderr, want) || !strings.Contains(stderr, "a process of the one before "+
			"it serves") {
			t.Errorf("%s: exit status %d, %q\n%s", path, status, stderr, m.stderr)
		}
		if got := string(w.must(nil, "--namespace", "one", "get", "k")); got != "v" {
			t.Errorf("after %s the key is %q", path, got)
		}
	}
	// In place all is as before; and a last copy does not leave.
	w.must(nil, "nodes", "restart", "m1")
	_, stderr, status := w.ctl(nil, "nodes", "restart", "m1", "--leave")
	if status != 1 || !strings.Contains(stderr, `"m1" has the only copy of placement group`) ||
		!strings.Contains(stderr, "nothing was done") {
		t.Errorf("--leave of the only copy: exit status %d, %q", status, stderr)
	}
	if got := string(w.must(nil, "--namespace", "one", "get", "k")); got != "v" {
		t.Errorf("at the end the key is %q", got)
	}
}
