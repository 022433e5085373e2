package nemesis

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	crand "crypto/rand"

	"github.com/kvd-project/kvd/internal/dirpb"
)

const (
	namespace = "nemesis"
	// recoverLimit bounds what should take three leases.
	recoverLimit = time.Minute
	// wholeLimit bounds the making of new copies.
	wholeLimit = 2 * time.Minute
	endLimit   = 30 * time.Second
)

// settings of a run.
type settings struct {
	duration      time.Duration
	seed          uint64
	provider      string
	replicas      int
	lease         time.Duration
	epochInterval time.Duration
	memory        string
	clients       int
	kills         int
	stops         int
	// disks gives each directory node a disk of its own, in memory: whose pauses are
	// nobody's, and which can be full.
	disks   bool
	zombies int
	// restarts: only workers of memory nodes are killed; control: or memory nodes, for they have no keepers. See
	// restarts_test.go.
	restarts, control bool
	keep              bool // memory nodes have keepers
	only              []string
	// soak: clients are soakers, and only they are killed; see soak_test.go.
	soak bool
	// beside: namespaces with one copy are on the same memory nodes; see beside_test.go.
	beside bool
}

// harness is a run: the network, the processes on it, and what watches them.
type harness struct {
	settings
	began   int64
	rng     *rand.Rand
	work    string // folder of this run
	bin     string
	net     *network
	mounted []string
	scope   scope
	procs   map[string]*proc
	status  watcher
	probes  *probes
	checker *checker
	checked chan struct{} // closed when checker has ended
	endTime context.CancelFunc
	gone    map[uint64]bool // incarnations of memory nodes that were killed
	faults  map[string]int
	result  string // of kvctl check
	lost    int    // sessions that clients lost
	// elections are terms of the directory's leaders.
	elections int
	restarted []time.Duration
	filesLost int // of keptFiles
	soaked    soakBook
	bank      bankBook

	mu struct {
		sync.Mutex
		failures []string
	}
	failed context.Context // ends with the first failure
	stop   context.CancelCauseFunc
}

func (h *harness) logf(format string, a ...any) {
	fmt.Printf("%9.3fs  %s\n", time.Duration(now()-h.began).Seconds(), fmt.Sprintf(format, a...))
}

func (h *harness) fail(what string) {
	h.mu.Lock()
	h.mu.failures = append(h.mu.failures, what)
	n := len(h.mu.failures)
	h.mu.Unlock()
	if n <= 20 {
		h.logf("FAILED %s", what)
	}
	h.stop(errors.New(what))
}

// newHarness brings up a store with clients at work. ctx ends it early. The
// caller closes what is returned, also with an error.
func newHarness(ctx context.Context, s settings) (*harness, error) {
	id := make([]byte, 3)
	_, _ = crand.Read(id) // never fails
	h := &harness{settings: s, began: now(), procs: map[string]*proc{}, probes: newProbes(), gone: map[uint64]bool{},
		faults: map[string]int{}, rng: rand.New(rand.NewPCG(s.seed, 0)), result: "not run"}
	h.failed, h.stop = context.WithCancelCause(ctx)
	h.scope = scope{directories: []string{"d1", "d2", "d3"}, memnodes: []string{"m1", "m2", "m3"}, lease: s.lease,
		replicas: s.replicas, only: s.only}
	if s.stops > 0 {
		h.scope.gateways = []string{"g1", "g2"}
	}
	for c := range s.clients {
		h.scope.clients = append(h.scope.clients, "c"+strconv.Itoa(c))
	}
	var err error
	if h.work, err = os.MkdirTemp("", "kvdnem-"); err != nil {
		return h, err
	}
	for _, d := range []string{"histories", "failed"} {
		if err := os.Mkdir(filepath.Join(h.work, d), 0o755); err != nil {
			return h, err
		}
	}
	h.logf("seed %d, folder %s, namespaces kvdnem-%x-*", s.seed, h.work, id)
	if h.bin = os.Getenv("KVD_NEMESIS_BIN"); h.bin == "" {
		h.bin = h.work
		for _, c := range []string{"kvd", "kvctl"} {
			build := exec.Command("go", "build", "-o", filepath.Join(h.bin, c), "github.com/kvd-project/kvd/cmd/"+c)
			build.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := build.CombinedOutput(); err != nil {
				return h, fmt.Errorf("build %s: %w\n%s", c, err, out)
			}
		}
	}
	for _, d := range h.scope.directories {
		if err := h.disk(d); err != nil {
			return h, err
		}
	}
	hosts := slices.Concat(h.scope.directories, h.scope.memnodes, h.scope.clients, h.scope.gateways,
		[]string{"op", "redis", "g0"})
	h.net, err = newNetwork(hex.EncodeToString(id), hosts)
	if err != nil {
		return h, err
	}
	for _, c := range h.scope.clients {
		if s.zombies > 0 {
			if err := h.net.eager(c); err != nil {
				return h, err
			}
		}
	}
	for _, name := range hosts {
		h.procs[name] = &proc{name: name, urgent: s.stops > 0 || s.restarts, log: filepath.Join(h.work, name+".log"),
			died: func(p *proc, st *os.ProcessState) {
				h.fail(fmt.Sprintf("%s ended by itself: %v\n%s", p.name, st, tail(p.log, 3000)))
			}}
	}
	// Rounds are short enough for about 2,000 operations a key.
	round := 4 * time.Second
	if s.zombies > 0 {
		round = 2 * time.Second
	}
	h.checker = newChecker(filepath.Join(h.work, "histories"), filepath.Join(h.work, "failed"), round, h.fail,
		h.probes.touched)
	return h, h.up()
}

// environ is the environment without settings of ours, with more.
func environ(more ...string) []string {
	var env []string
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "KVD_") && !strings.HasPrefix(e, "XDG_RUNTIME_DIR=") &&
			!strings.HasPrefix(e, "RUNTIME_DIRECTORY=") {
			env = append(env, e)
		}
	}
	return append(env, more...)
}

func (h *harness) directories() []string {
	var out []string
	for _, d := range h.scope.directories {
		out = append(out, h.net.ip(d)+":7400")
	}
	return out
}

// up starts everything and waits until it serves.
func (h *harness) up() error {
	for _, name := range slices.Concat(h.scope.directories, h.scope.memnodes) {
		if err := h.launchReady(name); err != nil {
			return err
		}
	}
	if err := h.launch("op", nil); err != nil {
		return err
	}
	create := []string{"namespace", "create", namespace, "--replicas", strconv.Itoa(h.replicas)}
	if h.zombies > 0 {
		create = append(create, "--index-percent", "1") // see crowd: a name for each group has to be tried
	}
	if out, err := h.kvctl(create...); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	if h.beside {
		if err := h.createBeside(); err != nil {
			return err
		}
	}
	if err := h.whole(wholeLimit); err != nil {
		return err
	}
	for _, g := range h.scope.gateways {
		if err := h.launchReady(g); err != nil {
			return err
		}
	}
	for _, c := range h.scope.clients {
		if err := h.launch(c, nil); err != nil {
			return err
		}
	}
	if len(h.scope.gateways) > 0 {
		if err := h.launch("redis", nil); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	h.endTime, h.checked = cancel, make(chan struct{})
	go func() {
		defer close(h.checked)
		h.checker.run(ctx)
	}()
	if h.soak {
		return h.soaking(now())
	}
	return h.serving(now())
}

// launchReady starts the process of that name, for the first time or again, and waits until it
// says that it serves.
func (h *harness) launchReady(name string) error {
	ready := make(chan struct{})
	if err := h.launch(name, sync.OnceFunc(func() { close(ready) })); err != nil {
		return err
	}
	select {
	case <-ready:
		return nil
	case <-h.failed.Done():
		return context.Cause(h.failed)
	case <-time.After(recoverLimit):
		return fmt.Errorf("%s is not ready\n%s", name, tail(h.procs[name].log, 2000))
	}
}

// launch starts the process of that name, for the first time or again.
func (h *harness) launch(name string, ready func()) error {
	p := h.procs[name]
	announced := func(line string) {
		if ready != nil && strings.HasPrefix(line, "ready ") {
			ready()
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ip := h.net.ip(name)
	switch name[0] {
	case 'd':
		argv := []string{filepath.Join(h.bin, "kvd"), "directory", "--id", name, "--data-dir",
			filepath.Join(h.work, name, "data"),
			"--listen", ip + ":7400", "--raft-listen", ip + ":7401", "--lease", h.lease.String(),
			"--epoch-interval", h.epochInterval.String(), "--scrub-interval", h.lease.String(), "--insecure"}
		if name == h.scope.directories[0] {
			argv = append(argv, "--bootstrap")
		} else {
			argv = append(argv, "--join", h.directories()[0])
		}
		return p.start(h.net, environ(), argv, announced)
	case 'm':
		argv := []string{filepath.Join(h.bin, "kvd"), "memnode", "--name", name, "--directory",
			strings.Join(h.directories(), ","),
			"--memory", h.memory, "--listen-tcp", ip + ":7500", "--insecure"}
		if h.provider == "shm" {
			argv = append(argv, "--shm-socket", filepath.Join(h.work, name+".sock"))
		} else {
			argv = append(argv, "--shm-socket", "off")
		}
		if !h.keep {
			argv = append(argv, "--keep", "off") // a fault hits the whole memory node
		}
		return p.start(h.net, environ(), argv, announced)
	case 'g':
		argv := []string{filepath.Join(h.bin, "kvd"), "gateway", "--directory", strings.Join(h.directories(), ","),
			"--databases", namespace,
			"--listen", ip + ":6379", "--listen-memcached", "off", "--http-listen", "off", "--insecure"}
		return p.start(h.net, environ(), argv, announced)
	case 'r':
		return h.launchRedis(p, self)
	case 'o':
		env := environ("KVD_NEMESIS_PROGRAM=watch", "KVD_NEMESIS_DIRECTORY="+strings.Join(h.directories(), ","))
		return p.start(h.net, env, []string{self}, h.status.line)
	}
	if h.soak {
		return h.launchSoaker(p, self)
	}
	return h.launchClient(p, self)
}

func (h *harness) launchClient(p *proc, self string) error {
	n, err := strconv.Atoi(p.name[1:])
	if err != nil {
		return err
	}
	st, _ := h.status.get()
	cfg := loadConfig{Directory: h.directories(), Namespace: namespace, Provider: h.provider, Client: n,
		Life:      p.life + 1,
		Histories: h.checker.dir, Round: h.checker.round, Keys: 8, Workers: 4, Pace: 4 * time.Millisecond,
		ProbePace: 20 * time.Millisecond, OpTimeout: max(5*time.Second, 3*h.lease), LongBytes: 8 << 20,
		Churn:    h.zombies > 0,
		BankPace: 15 * time.Millisecond}
	// At most 8 clients use a key, with at most about 2,000 operations.
	cfg.Sets = (h.clients*cfg.Workers + 7) / 8
	cfg.Ops = 250
	if h.zombies > 0 {
		cfg.Keys, cfg.Pace, cfg.ProbePace, cfg.LongBytes = 4, time.Millisecond, 100*time.Millisecond, 2*longLeast
	}
	place := placementOf(st, namespace)
	if h.zombies > 0 {
		cfg.Crowd = place.crowd()
	}
	cfg.Probes = place.keys(fmt.Sprintf("probe/%d/%d", n, cfg.Life))
	if h.beside {
		cfg.Beside = map[string]map[uint32]string{}
		for _, b := range oneCopy {
			cfg.Beside[b.name] = placementOf(st, b.name).keys(fmt.Sprintf("probe/%d/%d", n, cfg.Life))
		}
	}
	doc, err := json.Marshal(cfg)
	if err != nil {
		return err
	}
	h.checker.born(n, cfg.Life)
	env := environ("KVD_NEMESIS_PROGRAM=load", "KVD_NEMESIS_LOAD="+string(doc))
	return p.start(h.net, env, []string{self},
		func(l string) { h.heard(n, cfg.Life, l) })
}

// heard takes a line of a client.
func (h *harness) heard(client, life int, line string) {
	f := strings.Split(line, "\t")
	var err error
	switch f[0] {
	case "round":
		var round int64
		if round, err = strconv.ParseInt(f[len(f)-1], 10, 64); err == nil {
			h.checker.over(client, life, round)
		}
	case "probe":
		var p probe
		if p, err = parseProbe(client, f[1:]); err == nil {
			h.probes.saw(p)
		}
	case "gone":
		err = h.heardGone(client, f[1:])
	case "moved":
		err = h.bank.heard(f[1:])
	case "swept":
		h.bank.swept()
	case "redis":
		err = h.probes.heardRedis(f[1:])
	case "bad":
		var text string
		if text, err = strconv.Unquote(f[len(f)-1]); err == nil {
			h.fail(text)
		}
	default:
		err = fmt.Errorf("client %d said %q", client, line)
	}
	if err != nil {
		h.fail(err.Error())
	}
}

// kvctl runs it on the operator's host.
func (h *harness) kvctl(args ...string) (out string, err error) {
	all := append([]string{"netns", "exec", h.net.ns("op"), filepath.Join(h.bin, "kvctl"), "--directory",
		strings.Join(h.directories(), ","), "--insecure", "--provider", h.provider, "--namespace", namespace}, args...)
	cmd := exec.CommandContext(h.failed, "ip", all...)
	cmd.Env = environ()
	var b bytes.Buffer
	cmd.Stdout, cmd.Stderr = &b, &b
	if err := cmd.Run(); err != nil {
		return b.String(), fmt.Errorf("kvctl %s: %w", strings.Join(args, " "), err)
	}
	return b.String(), nil
}

func (h *harness) sleep(d time.Duration) error {
	select {
	case <-h.failed.Done():
		return context.Cause(h.failed)
	case <-time.After(d):
		return nil
	}
}

// until polls until missing returns nothing.
func (h *harness) until(what string, limit time.Duration, missing func() string) error {
	for end := time.Now().Add(limit); ; {
		left := missing()
		if left == "" {
			return nil
		}
		if time.Now().After(end) {
			err := fmt.Errorf("%s: not within %v: %s", what, limit, left)
			h.fail(err.Error())
			return err
		}
		if err := h.sleep(20 * time.Millisecond); err != nil {
			return err
		}
	}
}

// whole waits until the store could lose a memory node again, and has nothing lost meanwhile.
func (h *harness) whole(limit time.Duration) error { return h.wholeAgain(limit, lost) }

// wholeAgain is whole that bears what bad does not tell of.
func (h *harness) wholeAgain(limit time.Duration, bad func(*dirpb.StatusReply) error) error {
	since := now()
	return h.until("every copy is there again", limit, func() string {
		st, at := h.status.get()
		if err := bad(st); err != nil {
			h.fail(err.Error())
		}
		if err := whole(st, len(h.scope.memnodes), h.gone); err != nil {
			return err.Error()
		}
		if at < since {
			return "no newer status"
		}
		return ""
	})
}

// clientNumbers are the clients' numbers.
func (h *harness) clientNumbers() (all []int) {
	for c := range h.scope.clients {
		all = append(all, c)
	}
	return all
}

func (h *harness) pgs() []uint32 {
	st, _ := h.status.get()
	var all []uint32
	for _, ns := range h.namespaces() {
		all = slices.AppendSeq(all, maps.Keys(placementOf(st, ns).keys("x")))
	}
	return all
}

// serving waits until every client has written to every placement group since then.
func (h *harness) serving(since int64) error {
	pgs, hungry := h.pgs(), 0
	err := h.until("every client is served", recoverLimit, func() (missing string) {
		hungry, missing = h.probes.served(since, h.clientNumbers(), pgs)
		return missing
	})
	if err != nil {
		for _, name := range append(slices.Clone(h.scope.memnodes), h.scope.clients[hungry]) {
			h.procs[name].dump()
		}
		return err
	}
	if len(h.scope.gateways) == 0 {
		return nil
	}
	return h.until("every Redis client is served", recoverLimit, func() string {
		return h.probes.redisServed(since, redisClients)
	})
}

// finish mends everything, stops the clients and checks the memory.
func (h *harness) finish() error {
	h.logf("settling")
	if err := h.awaitServing(); err != nil {
		return err
	}
	h.logf("stopping the clients")
	for n, c := range h.scope.clients {
		if err := h.procs[c].end(endLimit); err != nil {
			return err
		}
		h.checker.died(n, h.procs[c].life)
	}
	for _, name := range append([]string{"redis"}, h.scope.gateways...) {
		if err := h.procs[name].end(endLimit); err != nil {
			return err
		}
	}
	h.count()
	if h.lost < h.zombies/2 {
		h.fail(fmt.Sprintf("%d zombies lost %d sessions: their leases did not end", h.zombies, h.lost))
	}
	h.logf("auditing the bank")
	if err := h.audit(); err != nil {
		h.fail(err.Error())
		return err
	}
	h.logf("checking the memory")
	return h.sound()
}

// sound lets `kvctl check` look at the memory.
func (h *harness) sound() error {
	// Sessions of dead clients are fenced, and what they held is found, in the background.
	tries := 0
	err := h.until("kvctl check", recoverLimit, func() string {
		tries++
		for _, ns := range h.namespaces() {
			if out, err := h.kvctl("check", "--namespace", ns); err != nil {
				return fmt.Sprintf("%v\n%s", err, out)
			}
		}
		return ""
	})
	h.result = fmt.Sprintf("ok at try %d", tries)
	if err != nil {
		h.result = "FAILED: " + err.Error()
	}
	return err
}

// count looks through the logs. Directory nodes elect without being asked to when
// the machine is too busy, which excuses what is slow then.
func (h *harness) count() {
	all := func(hosts []string, text string) (n int) {
		for _, host := range hosts {
			if p := h.procs[host]; p != nil {
				n += strings.Count(tail(p.log, math.MaxInt), text)
			}
		}
		return n
	}
	h.lost = all(h.scope.clients, "session lost")
	h.elections = all(h.scope.directories, "directory: leading")
}

// close ends what is left and removes it. A failed run's folder stays, unless it had to fail.
func (h *harness) close() error {
	var errs []error
	for _, p := range h.procs {
		errs = append(errs, p.kill())
	}
	for n, c := range h.scope.clients {
		if h.checker != nil && h.procs[c] != nil {
			h.checker.died(n, h.procs[c].life)
		}
	}
	if h.endTime != nil {
		h.endTime()
		<-h.checked
	}
	for _, r := range h.probes.rude() {
		h.fail(r)
	}
	if h.net != nil {
		errs = append(errs, h.net.close())
	}
	h.count()
	for _, d := range h.mounted {
		errs = append(errs, run("umount", d))
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stop(nil)
	if len(h.mu.failures) > 0 && !h.control {
		h.logf("logs and histories are in %s", h.work)
		return errors.Join(errs...)
	}
	return errors.Join(append(errs, os.RemoveAll(h.work))...)
}

// summary is the run in a few lines.
func (h *harness) summary() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed       %d, provider %s, %d replicas, lease %v, %v\n", h.seed, h.provider, h.replicas, h.lease,
		time.Duration(now()-h.began).Round(time.Second))
	if h.soak {
		b.WriteString(h.soaked.summary())
	} else if h.checker != nil {
		b.WriteString(h.checker.summary())
	}
	if !h.soak {
		b.WriteString(h.bank.summary())
	}
	b.WriteString("faults    ")
	for _, k := range slices.Sorted(maps.Keys(h.faults)) {
		fmt.Fprintf(&b, " %s=%d", k, h.faults[k])
	}
	fmt.Fprintf(&b, "\nsessions   %d lost by clients\nelections  %d\n", h.lost, h.elections)
	leases := func(d time.Duration) float64 { return float64(d) / float64(h.lease) }
	for _, ns := range h.namespaces() {
		all, kills := h.probes.recoveries(ns)
		if kills == 0 && ns != namespace {
			continue
		}
		fmt.Fprintf(&b, "recovery   of %s: %d of %d kills alone", ns, len(all), kills)
		if len(all) > 0 {
			fmt.Fprintf(&b, ": median %.2f, p99 %.2f, max %.2f leases", leases(percentile(all, 50)),
				leases(percentile(all, 99)), leases(all[len(all)-1]))
		}
		b.WriteString("\n")
	}
	fmt.Fprintf(&b, "others     %d errors on keys that no kill concerns\n", len(h.probes.offends))
	b.WriteString(h.probes.partingTable())
	b.WriteString(h.restartTable())
	fmt.Fprintf(&b, "check      %s\n", h.result)
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.mu.failures); n > 0 {
		fmt.Fprintf(&b, "FAILED     %d times, first: %s\n", n, h.mu.failures[0])
	}
	return b.String()
}
