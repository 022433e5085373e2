package deploy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/metrics"
	"github.com/kvd-project/kvd/internal/testutil"
)

// scrape, rule and firing are what promql eval reads and prints.
type scrape struct {
	Instance, Text string
	From, To       int64
}

type rule struct {
	Alert, Expr string
	For         int64
}

type firing struct {
	Alert  string
	Labels map[string]string
}

// watcher is a Prometheus that scrapes real processes, but whose clock is its own: what it
// scraped is taken to have been so for as long as a test says.
type watcher struct {
	t       *testing.T
	promql  string
	rules   []rule
	names   *regexp.Regexp // the metrics that rules name, at the start of a line
	every   int64          // seconds between scrapes
	targets map[string]string
	tls     *tls.Config // nil: targets serve in clear
	now     int64
	past    []scrape
	fired   map[string]bool // by all watchers of the test
}

// watch makes a watcher of the processes that serve HTTP at addrs, by instance.
func watch(t *testing.T, promql string, every time.Duration, fired map[string]bool, addrs map[string]string) *watcher {
	t.Helper()
	w := &watcher{t: t, promql: promql, every: int64(every.Seconds()), targets: addrs, fired: fired}
	var r rules
	if err := yaml.Unmarshal([]byte(read(t, "alerts.yaml")), &r); err != nil {
		t.Fatal(err)
	}
	var exprs strings.Builder
	for _, g := range r.Groups {
		for _, a := range g.Rules {
			d := model.Duration(0)
			if a.For != "" {
				var err error
				if d, err = model.ParseDuration(a.For); err != nil {
					t.Fatal(err)
				}
			}
			// A condition that holds from one evaluation to another holds for that time.
			seconds := (int64(time.Duration(d).Seconds()) + w.every - 1) / w.every * w.every
			w.rules = append(w.rules, rule{a.Alert, strings.ReplaceAll(a.Expr, "\n", " "), seconds})
			exprs.WriteString(a.Expr + "\n")
		}
	}
	names := slices.Compact(
		slices.Sorted(slices.Values(regexp.MustCompile(`kvd_\w+`).FindAllString(exprs.String(), -1))))
	w.names = regexp.MustCompile(`(?m)^(` + strings.Join(names, "|") + `)[{ ].*\n`)
	return w
}

// scrapeTargets scrapes every target; one that does not answer serves nothing.
func (w *watcher) scrapeTargets() []scrape {
	var now []scrape
	c := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: w.tls}}
	scheme := "http://"
	if w.tls != nil {
		scheme = "https://"
	}
	for _, name := range slices.Sorted(maps.Keys(w.targets)) {
		s := scrape{Instance: name}
		if r, err := c.Get(scheme + w.targets[name] + "/metrics"); err == nil {
			b, err := io.ReadAll(r.Body)
			_ = r.Body.Close()
			if err == nil && r.StatusCode == http.StatusOK {
				s.Text = strings.Join(w.names.FindAllString(string(b), -1), "")
			}
		}
		now = append(now, s)
	}
	return now
}

var sampleLine = regexp.MustCompile(`(?m)^(.*) (\S+)$`)

// goOn takes what changed between two looks, real seconds apart, to go on changing at the
// same pace for d.
func (w *watcher) goOn(before, after []scrape, apart float64, d time.Duration) {
	w.t.Helper()
	value := func(m []string) float64 {
		v, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			w.t.Fatalf("%q: %v", m[0], err)
		}
		return v
	}
	for i := range after {
		was := make(map[string]float64)
		for _, m := range sampleLine.FindAllStringSubmatch(before[i].Text, -1) {
			was[m[1]] = value(m)
		}
		for at := w.every; at <= int64(d.Seconds()); at += w.every {
			text := sampleLine.ReplaceAllStringFunc(after[i].Text, func(line string) string {
				m := sampleLine.FindStringSubmatch(line)
				v := value(m)
				if old, ok := was[m[1]]; ok {
					v += (v - old) / apart * float64(at)
				}
				return fmt.Sprintf("%s %g", m[1], v)
			})
			w.past = append(w.past, scrape{Instance: after[i].Instance, Text: text, From: w.now + at, To: w.now + at})
		}
	}
	w.now += int64(d.Seconds()) / w.every * w.every
}

// hold takes what was scraped to be so for d from now on.
func (w *watcher) hold(s []scrape, d time.Duration) {
	steps := max(1, int64(d.Seconds())/w.every)
	for i := range s {
		s[i].From, s[i].To = w.now+w.every, w.now+steps*w.every
	}
	w.past = append(w.past, s...)
	w.now += steps * w.every
}

// firing are the alerts that fire now.
func (w *watcher) firing() map[string][]firing {
	w.t.Helper()
	in, err := json.Marshal(map[string]any{"Every": w.every, "At": w.now, "Scrapes": w.past, "Rules": w.rules})
	if err != nil {
		w.t.Fatal(err)
	}
	var errs bytes.Buffer
	cmd := exec.Command(w.promql, "eval")
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &errs
	out, err := cmd.Output()
	if err != nil {
		w.t.Fatalf("promql eval: %v: %s", err, &errs)
	}
	var list []firing
	if err := json.Unmarshal(out, &list); err != nil {
		w.t.Fatal(err)
	}
	all := make(map[string][]firing)
	for _, f := range list {
		all[f.Alert] = append(all[f.Alert], f)
	}
	return all
}

// until scrapes again and again until the alerts that fire, if it stays like that for d, are
// as ok wants.
func (w *watcher) until(what string, d time.Duration, ok func(map[string][]firing) bool) {
	w.t.Helper()
	past, now := slices.Clip(w.past), w.now
	var all map[string][]firing
	testutil.UntilNone(w.t, what, func() string {
		w.past, w.now = past, now
		w.hold(w.scrapeTargets(), d)
		if all = w.firing(); ok(all) {
			return ""
		}
		return fmt.Sprintf("fire %v", slices.Sorted(maps.Keys(all)))
	})
}

// fires waits until alerts fire, if what is so stays so for as long as they ask.
func (w *watcher) fires(alerts ...string) {
	w.t.Helper()
	longest := int64(0)
	for _, a := range alerts {
		i := slices.IndexFunc(w.rules, func(r rule) bool { return r.Alert == a })
		if i < 0 {
			w.t.Fatalf("there is no alert %s", a)
		}
		longest = max(longest, w.rules[i].For)
	}
	w.firesWithin(time.Duration(longest+w.every)*time.Second, alerts...)
}

// firesNow waits until alerts fire by what has been so already: those that look at how fast
// something grows.
func (w *watcher) firesNow(alerts ...string) {
	w.t.Helper()
	w.firesWithin(time.Duration(w.every)*time.Second, alerts...)
}

func (w *watcher) firesWithin(d time.Duration, alerts ...string) {
	w.t.Helper()
	w.until(fmt.Sprint("want ", alerts), d, func(all map[string][]firing) bool {
		for _, a := range alerts {
			if len(all[a]) == 0 {
				return false
			}
		}
		return true
	})
	for _, a := range alerts {
		w.fired[a] = true
	}
}

// only waits until no other alerts than these fire, although it stays like that for an hour.
func (w *watcher) only(alerts ...string) {
	w.t.Helper()
	w.until(fmt.Sprint("want no others than ", alerts), time.Hour, func(all map[string][]firing) bool {
		return slices.Equal(slices.Sorted(maps.Keys(all)), slices.Sorted(slices.Values(alerts)))
	})
}

// kill ends a process at once.
func (p *process) kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		p.t.Fatal(err)
	}
	<-p.exited
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// tried is the processes of one store, and how to speak to it.
type tried struct {
	t    *testing.T
	base int
	env  []string
	run  map[string]*process
	web  map[string]string // HTTP, by process
}

func newTried(t *testing.T, base int) *tried {
	dir := t.TempDir()
	return &tried{t: t, base: base, run: make(map[string]*process), web: make(map[string]string),
		env: []string{"XDG_RUNTIME_DIR=" + dir, "HOME=" + dir, "PATH=" + os.Getenv("PATH")}}
}

// directory starts directory node n of so many, again if it ran before.
func (s *tried) directory(n int, flags ...string) {
	s.t.Helper()
	name, at := fmt.Sprint("d", n), host(s.base+n)
	args := append([]string{commands(s.t) + "/kvd", "directory", "--id", name, "--data-dir",
		filepath.Join(s.env[0][len("XDG_RUNTIME_DIR="):], name),
		"--listen", at + ":7400", "--raft-listen", at + ":7401", "--http-listen", at + ":7480", "--epoch-interval",
		"10ms"}, flags...)
	if n == 1 {
		args = append(args, "--bootstrap")
	} else {
		args = append(args, "--join", host(s.base+1)+":7400")
	}
	s.web[name] = at + ":7480"
	s.run[name] = start(s.t, s.env, args...)
}

func (s *tried) directories() string {
	var all []string
	for n := 1; s.run[fmt.Sprint("d", n)] != nil; n++ {
		all = append(all, host(s.base+n)+":7400")
	}
	return strings.Join(all, ",")
}

// gateway starts gateway n, with a database each for these namespaces; it listens at the
// address that it returns.
func (s *tried) gateway(n int, databases string, flags ...string) string {
	s.t.Helper()
	name, at := fmt.Sprint("g", n), host(s.base+30+n)
	s.web[name] = at + ":7483"
	s.run[name] = start(s.t, s.env,
		append([]string{commands(s.t) + "/kvd", "gateway", "--directory", s.directories(), "--databases", databases,
			"--listen", at + ":6379", "--listen-memcached", "off", "--http-listen", s.web[name]}, flags...)...)
	return at + ":6379"
}

// archive starts an archive that makes snapshots every second.
func (s *tried) archive(to string) {
	s.t.Helper()
	s.web["a1"] = host(s.base+40) + ":7485"
	s.run["a1"] = start(s.t, s.env, commands(s.t)+"/kvd", "archive", "--directory", s.directories(), "--to",
		"file://"+to, "--every", "1s", "--keep-last", "1", "--http-listen", s.web["a1"])
}

func (s *tried) memnodeArgs(n int) []string {
	at := host(s.base + 10 + n)
	s.web[fmt.Sprint("m", n)] = at + ":7481"
	return []string{commands(s.t) + "/kvd", "memnode", "--name", fmt.Sprint("m", n), "--memory", "64MiB", "--directory",
		s.directories(),
		// what happens to it happens to one process
		"--listen-tcp", at + ":7402", "--shm-socket", "off", "--http-listen", at + ":7481", "--keep", "off"}
}

func (s *tried) memnode(n int) {
	s.t.Helper()
	s.run[fmt.Sprint("m", n)] = start(s.t, s.env, s.memnodeArgs(n)...)
}

// kvctl runs a command to its end, against one directory node if it is not "".
func (s *tried) kvctl(directory string, args ...string) string {
	s.t.Helper()
	if directory == "" {
		directory = s.directories()
	}
	return output(s.t, append(s.env, "KVD_DIRECTORY="+directory),
		append([]string{commands(s.t) + "/kvctl"}, args...)...)
}

// leader is the number of the directory node that leads.
func (s *tried) leader() (n int) {
	s.t.Helper()
	testutil.Until(s.t, "a directory node leads", func() bool {
		for i := 1; s.run[fmt.Sprint("d", i)] != nil; i++ {
			if strings.Contains(s.get(fmt.Sprint("d", i), "/metrics"), "\nkvd_directory_leader 1\n") {
				n = i
			}
		}
		return n != 0
	})
	return n
}

// get reads what a process serves, "" if it does not.
func (s *tried) get(name, path string) string {
	c := http.Client{Timeout: time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get("http://" + s.web[name] + path)
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	b, _ := io.ReadAll(r.Body) // what came is looked through
	return string(b)
}

// Every alert fires on a store in which what it is about is so, and none on one that is well.
// The processes are real, and so is what happens to them; time is the test's, and so is an adapter's sysfs.
func TestAlertsFire(t *testing.T) {
	promql := buildPromQL(t)
	fired := make(map[string]bool)
	stores := map[string]func(*testing.T, string, map[string]bool){
		"losses": losses, "frozen": frozen, "memory": memory, "gateway": gateway, "slow": slow, "limbo": limbo,
		"damage": damage,
		"index":  damagedIndex, "load": load, "certificates": certificates,
		"adapter": adapter, "archived": archived,
	}
	ran := 0
	for name, try := range stores {
		t.Run(name, func(t *testing.T) { ran++; try(t, promql, fired) })
	}
	if t.Failed() || ran < len(stores) {
		return
	}
	w := watch(t, promql, time.Minute, fired, nil)
	for _, r := range w.rules {
		if !fired[r.Alert] {
			t.Errorf("no store made %s fire", r.Alert)
		}
	}
}

func losses(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 60)
	for n := 1; n <= 3; n++ {
		s.directory(n)
	}
	s.memnode(1)
	s.memnode(2)
	s.kvctl("", "namespace", "create", "once", "--replicas", "1", "--bytes", "16MiB")
	s.kvctl("", "namespace", "create", "twice", "--replicas", "2", "--bytes", "16MiB")
	put := func() {
		t.Helper()
		for i := range 12 {
			s.kvctl("", "--namespace", "once", "put", fmt.Sprint("k", i), "v")
		}
	}
	put()
	w := watch(t, promql, 15*time.Second, fired, s.web)
	w.only()

	// The leader stands still five times, and another takes over.
	for range 5 {
		p := s.run[fmt.Sprint("d", s.leader())]
		p.signal(syscall.SIGSTOP)
		testutil.Until(t, "another one leads", func() bool { return s.run[fmt.Sprint("d", s.leader())] != p })
		p.signal(syscall.SIGCONT)
		w.hold(w.scrapeTargets(), time.Minute)
	}
	w.firesNow("KvdLeaderChanges")

	// A memory node dies that holds copies, and the only ones of a namespace.
	s.run["m2"].kill()
	w.fires("KvdMemoryNodeAwaited") // for ten leases
	w.fires("KvdMemoryNodeDown", "KvdCopiesMissing", "KvdNoRoomForCopies", "KvdPlacementGroupLost", "KvdDataLost")
	follower := s.leader()%3 + 1
	status := s.kvctl(host(s.base+follower)+":7400", "status")
	for _, want := range []string{"namespace once lost keys", "-> kvctl namespace accept-loss once",
		"memory node m2 is down", "-> kvd memnode --name m2",
		"namespace twice: placement groups", "no other memory node has room", "reclaim epoch  "} {
		if !strings.Contains(status, want) {
			t.Errorf("kvctl status of a follower lacks %q:\n%s", want, status)
		}
	}
	page := s.get(fmt.Sprint("d", follower), "/")
	if !strings.Contains(page, "kvctl namespace accept-loss once") || strings.Contains(page, "does not lead") {
		t.Errorf("a follower's page is not the leader's, or does not say what was lost:\n%s", page)
	}
	// It is back, and all is whole again, but for what is gone.
	s.memnode(2)
	w.only("KvdDataLost")
	s.kvctl("", "namespace", "accept-loss", "once")
	w.only()

	// It is killed and back before anybody missed it.
	put()
	s.run["m2"].kill()
	s.memnode(2)
	w.fires("KvdDataLost")
	w.only("KvdDataLost")
	if text := s.get(fmt.Sprint("d", s.leader()), "/metrics"); !strings.Contains(
		text, "kvd_directory_lost_total{namespace=\"once\"} 2\n") {
		t.Errorf("losses are not counted:\n%s", regexp.MustCompile(`(?m)^kvd_directory_los.*`).FindAllString(text, -1))
	}
	s.kvctl("", "namespace", "accept-loss", "once")
	w.only()

	// Directory nodes die: one that follows, then the majority.
	leader := s.leader()
	s.run[fmt.Sprint("d", leader%3+1)].kill()
	w.fires("KvdDirectoryNodeDown")
	w.only("KvdDirectoryNodeDown")
	if status := s.kvctl("", "status"); !strings.Contains(
		status, fmt.Sprintf("kvctl directory remove d%d", leader%3+1)) {
		t.Errorf("kvctl status does not say which directory node is silent:\n%s", status)
	}
	s.run[fmt.Sprint("d", leader)].kill()
	// It cannot say that it serves, so it is not waited for.
	cmd := exec.Command(s.memnodeArgs(3)[0], s.memnodeArgs(3)[1:]...)
	cmd.Env = s.env
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	w.fires("KvdDirectoryWithoutLeader", "KvdNotReady", "KvdMemoryNodeUnregistered")
	status = s.kvctl("", "status")
	for _, want := range []string{"does not lead: it is ", " old",
		"the directory has no leader: 2 of its 3 nodes must run", "-> start those that are down: kvd directory"} {
		if !strings.Contains(status, want) {
			t.Errorf("kvctl status without a leader lacks %q:\n%s", want, status)
		}
	}
}

// secured makes an authority and a certificate for a directory node at a host, valid for that many days, and
// gives the flags that name them, and what its clients go by.
func secured(t *testing.T, at string, days int) (dir string, flags []string, client *tls.Config) {
	t.Helper()
	dir = t.TempDir()
	kvctl := func(args ...string) {
		t.Helper()
		output(t, []string{"HOME=" + dir}, append([]string{commands(t) + "/kvctl", "certs"}, args...)...)
	}
	kvctl("init", "--dir", dir)
	kvctl("issue", "d1", "--role", "directory", "--ip", at, "--days", strconv.Itoa(days), "--dir", dir)
	kvctl("issue", "operator", "--role", "operator", "--dir", dir)
	file := func(name string) string { return filepath.Join(dir, name) }
	pair, err := tls.LoadX509KeyPair(file("operator.pem"), file("operator-key.pem"))
	if err != nil {
		t.Fatal(err)
	}
	client = &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: x509.NewCertPool(), Certificates: []tls.Certificate{
		pair}}
	client.RootCAs.AppendCertsFromPEM([]byte(read(t, file("ca.pem"))))
	return dir, []string{"--tls-ca", file("ca.pem"), "--tls-cert", file("d1.pem"), "--tls-key", file("d1-key.pem")},
		client
}

// certificates: one expires soon, and its file is replaced by half of another.
func certificates(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 50)
	dir, flags, conf := secured(t, host(51), 10)
	s.directory(1, flags...)
	w := watch(t, promql, time.Minute, fired, map[string]string{"d1": s.web["d1"]})
	w.tls = conf
	w.only("KvdCertificateExpires")
	w.fires("KvdCertificateExpires")

	began, before := time.Now(), w.scrapeTargets()
	if err := os.WriteFile(filepath.Join(dir, "d1-key.pem"), []byte("half of a k"), 0o600); err != nil {
		t.Fatal(err)
	}
	refused := regexp.MustCompile(`(?m)^kvd_tls_reloads_total{.*result="refused"} [3-9]`)
	var after []scrape
	testutil.UntilNone(t, "the files are refused", func() string {
		if after = w.scrapeTargets(); refused.MatchString(after[0].Text) {
			return ""
		}
		return fmt.Sprint(after)
	})
	w.goOn(before, after, time.Since(began).Seconds(), 25*time.Minute)
	w.firesNow("KvdCertificateFilesRefused")
}

// adapters serves the metrics of a machine whose /sys/class/infiniband is root.
func adapters(t *testing.T, root string) (addr string) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(metrics.RDMA(os.DirFS(root)))
	s := httptest.NewServer(promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// count writes a counter of port 1 of the adapter mlx5_0.
func count(t *testing.T, root, counter string, n int) {
	t.Helper()
	dir := filepath.Join(root, "mlx5_0/ports/1/hw_counters")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, counter), []byte(strconv.Itoa(n)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
}

// adapter: a port loses a few packets and is told of congestion, and then loses many.
func adapter(t *testing.T, promql string, fired map[string]bool) {
	root := t.TempDir()
	w := watch(t, promql, time.Minute, fired, map[string]string{"m1": adapters(t, root)})
	grow := func(lost, told int) {
		before := w.scrapeTargets()
		count(t, root, "packet_seq_err", lost)
		count(t, root, "rp_cnp_handled", told)
		w.goOn(before, w.scrapeTargets(), 60, 30*time.Minute)
	}
	count(t, root, "packet_seq_err", 1000)
	count(t, root, "rp_cnp_handled", 0)
	w.only()
	grow(1030, 60_000)
	if all := w.firing(); len(all) > 0 {
		t.Errorf("fire although little is lost: %v", all)
	}
	grow(1030+600, 60_000)
	w.firesNow("KvdRDMALosses")
}

// archived: a key is damaged, and then something is in the way of snapshots.
func archived(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 150)
	s.directory(1)
	s.memnode(1)
	to := t.TempDir()
	s.kvctl("", "namespace", "create", "default", "--bytes", "16MiB")
	s.archive(to)
	w := watch(t, promql, time.Minute, fired, map[string]string{"a1": s.web["a1"]})
	w.only()
	value := strings.Repeat("to be spoilt", 100)
	s.kvctl("", "put", "k", value)
	s.run["m1"].spoil(value)
	testutil.Until(t, "a snapshot without the key", func() bool {
		return strings.Contains(s.get("a1", "/metrics"), "\nkvd_archive_left_out_keys{namespace=\"default\"} 1\n")
	})
	w.fires("KvdSnapshotsLeaveOut")
	s.kvctl("", "put", "k", value)
	testutil.Until(t, "no folder for snapshots", func() bool {
		_ = os.RemoveAll(to + "/default") // one may just be written
		return os.WriteFile(to+"/default", nil, 0o600) == nil
	})
	w.fires("KvdSnapshotsBehind", "KvdNotReady")
}

// frozen: a client and a memory node stand still, so that what the loss of another memory
// node froze stays frozen.
func frozen(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 80)
	s.directory(1)
	s.memnode(1)
	s.memnode(2)
	s.kvctl("", "namespace", "create", "twice", "--replicas", "2", "--bytes", "16MiB")
	s.gateway(1, "twice")
	w := watch(t, promql, 15*time.Second, fired, map[string]string{"d1": s.web["d1"]})
	w.only()
	s.run["g1"].signal(syscall.SIGSTOP)
	s.run["m2"].kill()
	s.run["m1"].signal(syscall.SIGSTOP)
	w.fires("KvdPlacementGroupFrozen", "KvdFencesPending", "KvdReclaimStuck")
}

// redis is a connection to a gateway.
type redis struct {
	t *testing.T
	c net.Conn
	r *bufio.Reader
}

func dialRedis(t *testing.T, addr string) *redis {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() }) // perhaps for the second time
	return &redis{t, c, bufio.NewReader(c)}
}

// do sends a command and gives the first line of its reply.
func (r *redis) do(args ...string) string {
	r.t.Helper()
	if err := r.c.SetDeadline(time.Now().Add(patience)); err != nil {
		r.t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := io.WriteString(r.c, b.String()); err != nil {
		r.t.Fatal(err)
	}
	line, err := r.r.ReadString('\n')
	if err != nil {
		r.t.Fatalf("%.40q: %v", args, err)
	}
	line = strings.TrimSpace(line)
	if n, err := strconv.Atoi(strings.TrimPrefix(line, "$")); err == nil && line[0] == '$' && n >= 0 {
		if _, err := io.CopyN(io.Discard, r.r, int64(n)+2); err != nil {
			r.t.Fatal(err)
		}
	}
	return line
}

// memory: namespaces fill up in different ways.
func memory(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 120)
	s.directory(1, "--scrub-interval", "0")
	s.memnode(1)
	w := watch(t, promql, 15*time.Second, fired, s.web)
	s.kvctl("", "namespace", "create", "full", "--bytes", "8MiB", "--shards", "1")
	s.kvctl("", "namespace", "create", "cache", "--mode", "cache", "--bytes", "8MiB", "--shards", "1")
	addr := s.gateway(1, "full,cache")
	w.only()
	r := dialRedis(t, addr)
	value := strings.Repeat("v", 30<<10)

	// More is evicted from a cache within ten minutes than it holds, all the time.
	if got := r.do("SELECT", "1"); got != "+OK" {
		t.Fatal(got)
	}
	for i := range 12 {
		for k := range 300 {
			if got := r.do("SET", fmt.Sprint(i, " ", k), value); got != "+OK" {
				t.Fatal(got)
			}
		}
		w.hold(w.scrapeTargets(), 5*time.Minute)
	}
	w.firesNow("KvdCacheTooSmall")

	// A store holds all that it can, and somebody wants more.
	r.do("SELECT", "0")
	for k := 0; r.do("SET", fmt.Sprint(k), value) == "+OK"; k++ {
		if k > 1000 {
			t.Fatal("8 MiB hold 30 MB")
		}
	}
	want := func() { r.do("SET", "one more", value) }
	want()
	w.fires("KvdMemoryFull")
	w.fires("KvdMemoryShort")

	// A limit that is nearly used up.
	s.kvctl("", "namespace", "set", "full", "--limit", "1MiB")
	w.fires("KvdNamespaceFull")

	// An index with no room for another shard.
	out, err := exec.Command(commands(t)+"/kvctl", "--directory", s.directories(), "namespace", "create", "index",
		"--bytes", "8MiB",
		"--shards", "1", "--segments", "1000000").CombinedOutput()
	m := regexp.MustCompile(`has room for (\d+) in each`).FindSubmatch(out)
	if err == nil || m == nil {
		t.Fatalf("%v: %s", err, out)
	}
	s.kvctl("", "namespace", "create", "index", "--bytes", "8MiB", "--shards", "1", "--segments", string(m[1]))
	w.fires("KvdIndexFull")

	// A client is killed with memory that it did not use, and nobody is to look for it.
	s.kvctl("", "namespace", "create", "lost", "--bytes", "8MiB", "--shards", "1")
	r = dialRedis(t, s.gateway(2, "lost"))
	if got := r.do("SET", "k", value); got != "+OK" {
		t.Fatal(got)
	}
	s.run["g2"].kill()
	delete(s.web, "g2")
	w.fires("KvdMemoryLost")
}

// slow: the directory nodes that follow stand still again and again, though never for so long
// that there is another leader.
func slow(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 140)
	for n := 1; n <= 3; n++ {
		s.directory(n, "--election-timeout", "10s")
	}
	s.memnode(1)
	s.kvctl("", "namespace", "create", "n", "--bytes", "8MiB")
	w := watch(t, promql, 15*time.Second, fired, s.web)
	w.only()
	leader := s.leader()
	for i := range 12 {
		followers := []*process{s.run[fmt.Sprint("d", leader%3+1)], s.run[fmt.Sprint("d", (leader+1)%3+1)]}
		for _, p := range followers {
			p.signal(syscall.SIGSTOP)
		}
		time.AfterFunc(500*time.Millisecond, func() { // a commit waits for it
			for _, p := range followers {
				_ = p.cmd.Process.Signal(syscall.SIGCONT) // the test kills it if this fails
			}
		})
		s.kvctl("", "namespace", "set", "n", "--limit", fmt.Sprintf("%dMiB", 1+i))
		w.hold(w.scrapeTargets(), time.Minute)
	}
	w.firesNow("KvdSlowCommits")
}

// limbo: a client that stands still keeps what another one replaces from being used again.
func limbo(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 160)
	s.directory(1, "--lease", "60s")
	s.memnode(1)
	s.kvctl("", "namespace", "create", "n", "--bytes", "48MiB")
	w := watch(t, promql, 15*time.Second, fired, s.web)
	w.only()
	end := byTCP(t, s.directories(), "n")
	w.fires("KvdClientsByTCP")
	if status := s.kvctl("", "status"); !strings.Contains(status, "1 client of host x: tcp is used though an RDMA "+
		"adapter is there (dial-failed): GID index 3") {
		t.Errorf("kvctl status does not say why:\n%s", status)
	}
	end()
	r := dialRedis(t, s.gateway(1, "n"))
	still := dialRedis(t, s.gateway(2, "n"))
	still.do("SET", "k", "v")
	r.do("SET", "k", "v")
	w.only()
	delete(s.web, "g2") // it would not answer
	s.run["g2"].signal(syscall.SIGSTOP)
	value := strings.Repeat("v", 30<<10)
	for range 22 {
		for k := range 20 {
			if got := r.do("SET", fmt.Sprint(k), value); got != "+OK" {
				t.Fatal(got)
			}
		}
		w.hold(w.scrapeTargets(), time.Minute)
	}
	w.firesNow("KvdLimboGrowing")
}

// byTCP is a client of a namespace on a machine with an adapter that it cannot use, until end is called.
func byTCP(t *testing.T, directories, namespace string) (end func()) {
	d, err := dirclient.Open(dirclient.Options{Addrs: strings.Split(directories, ",")})
	if err != nil {
		t.Fatal(err)
	}
	call := func(f func(context.Context, dirpb.DirectoryClient) error) {
		t.Helper()
		if err := d.Call(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	var s *dirpb.OpenSessionReply
	call(func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		s, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{Namespace: namespace, Client: "x pid 1", ReadOnly: true})
		return err
	})
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: s.SessionId, Number: 1, Term: s.Term,
			ReportEpoch: s.Epoch, Paths: &dirpb.ClientPaths{Host: "x", Adapter: true, Paths: []*dirpb.ClientPath{
				{Provider: "tcp", Reason: "dial-failed", Detail: "GID index 3 is gone", Connections: 1}}}})
		return err
	})
	return func() {
		call(func(ctx context.Context, c dirpb.DirectoryClient) error {
			_, err := c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: s.SessionId})
			return err
		})
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

// damage: memory goes bad under the only copy of a record; a memory node stands still under a
// write; it has no address space left for a region.
func damage(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 200)
	s.directory(1)
	s.memnode(1)
	s.kvctl("", "namespace", "create", "n", "--bytes", "16MiB")
	w := watch(t, promql, 15*time.Second, fired, s.web)
	w.only()
	value := strings.Repeat("to be spoilt", 100)
	s.kvctl("", "--namespace", "n", "put", "k", value)
	s.run["m1"].spoil(value)
	// It finds something, so its exit status is 1.
	_ = exec.Command(commands(t)+"/kvctl", "--directory", s.directories(), "--namespace", "n", "check").Run()
	w.fires("KvdScrubLostRecords")

	// A memory node stands still while a client writes to it, until that gives up.
	r := dialRedis(t, s.gateway(1, "n"))
	if got := r.do("SET", "a", value); got != "+OK" {
		t.Fatal(got)
	}
	w.hold(w.scrapeTargets(), time.Minute)
	s.run["m1"].signal(syscall.SIGSTOP)
	for r.do("SET", "a", value) == "+OK" { // it is about to stop
	}
	s.run["m1"].signal(syscall.SIGCONT)
	w.firesNow("KvdUnknownOutcomes")

	// A memory node may have no more address space. The directory may have given it up while it stood still.
	testutil.Until(t, "the memory node is back", func() bool {
		return strings.Contains(s.get("d1", "/metrics"), "\nkvd_directory_node_up{node=\"m1\"} 1\n")
	})
	s.run["m1"].limitSpace(32 << 20)
	testutil.Until(t, "a memory node is up", func() bool { // it may still miss a lease
		return exec.Command(commands(t)+"/kvctl", "--directory", s.directories(), "namespace", "create", "more",
			"--bytes", "40MiB").Run() == nil
	})
	w.fires("KvdRegionsFailing")
}

// damagedIndex: bits of an index flip. A client takes back a place that was never given out
// in that length, and a group cannot move to another shard as nobody knows what has.
func damagedIndex(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 220)
	s.directory(1, "--scrub-interval", "0")
	s.memnode(1)
	s.kvctl("", "namespace", "create", "n", "--bytes", "16MiB")
	w := watch(t, promql, 15*time.Second, fired, s.web)
	r := dialRedis(t, s.gateway(1, "n"))
	if got := r.do("SET", "k", "v"); got != "+OK" {
		t.Fatal(got)
	}
	w.only()
	w.hold(w.scrapeTargets(), time.Minute)
	at := s.indexed("n", "k")
	// The code of the place's length is the fifth byte of a slot: 64 bytes become 1,024. The
	// record is read, as it is whole; its place cannot be taken back like that.
	s.run["m1"].overwrite(at.region, at.slot+4, func(b []byte) { b[0] ^= 0x40 }, 1)
	if got := r.do("DEL", "k"); got != ":1" {
		t.Fatal(got)
	}
	w.firesNow("KvdPlacesRefused")

	// A byte of a record's key flips; whoever asks for the key knows it, and mends the record.
	const spoilt = "a-key-to-be-spoilt"
	if got := r.do("SET", spoilt, "v"); got != "+OK" {
		t.Fatal(got)
	}
	w.hold(w.scrapeTargets(), time.Minute)
	s.run["m1"].spoil(spoilt)
	if got := r.do("GET", spoilt); strings.HasPrefix(got, "-") || got == "$-1" {
		t.Fatal(got)
	}
	w.firesNow("KvdMemoryDamaged")

	// A group's header says what no group says, and its shard is to be split.
	if got := r.do("SET", "k", "v"); got != "+OK" {
		t.Fatal(got)
	}
	at = s.indexed("n", "k")
	s.run["m1"].overwrite(at.region, at.group, func(b []byte) { b[0] = 0xff; b[1] = 0xff }, 2)
	w.hold(w.scrapeTargets(), 5*time.Minute)
	s.kvctl("", "--namespace", "n", "shards", "split", "--all")
	failed := regexp.MustCompile(`kvd_janitor_jobs_total\{kind="move",result="failed"\} (\d+)`)
	for n := 1; n <= 4; n++ {
		testutil.Until(t, fmt.Sprintf("%d jobs failed", n), func() bool {
			m := failed.FindStringSubmatch(s.get("m1", "/metrics"))
			if m == nil {
				return false
			}
			k, err := strconv.Atoi(m[1])
			return err == nil && k >= n
		})
		w.hold(w.scrapeTargets(), 2*time.Minute)
	}
	w.fires("KvdJobsFailing", "KvdJobsInTrouble")
	if got := s.kvctl("", "jobs"); !strings.Contains(got, "corrupt") {
		t.Errorf("kvctl jobs does not say why:\n%s", got)
	}
}

// load: clients keep a memory node's CPU busy by tcp.
func load(t *testing.T, promql string, fired map[string]bool) {
	s := newTried(t, 240)
	s.directory(1)
	s.memnode(1)
	w := watch(t, promql, time.Minute, fired, s.web)
	s.kvctl("", "namespace", "create", "n", "--bytes", "32MiB")
	w.only()
	bench := exec.Command(commands(t)+"/kvctl", "--directory", s.directories(), "--namespace", "n", "--provider", "tcp",
		"bench",
		"--workload", "C", "--value-size", "16384", "--records", "1000", "--threads", "16", "--lanes", "8", "--batch",
		"16", "--duration", "1h")
	if err := bench.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = bench.Process.Kill()
		_ = bench.Wait() // it was killed
	})
	// Seconds are those in which this machine, which does other things too, lets the memory node run.
	cpu := regexp.MustCompile(`(?m)^process_cpu_seconds_total (\S+)$`)
	ran := func() float64 {
		m := cpu.FindStringSubmatch(s.get("m1", "/metrics"))
		if m == nil {
			return 0
		}
		v, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	past, now := slices.Clip(w.past), w.now
	var all map[string][]firing
	testutil.Until(t, "the load matters", func() bool {
		w.past, w.now = past, now
		before, began := w.scrapeTargets(), ran()
		time.Sleep(time.Second / 2) // what is asked is how much happens in a time
		apart := ran() - began
		after := w.scrapeTargets()
		if apart <= 0 {
			return false
		}
		w.goOn(before, after, apart, 25*time.Minute)
		all = w.firing()
		return len(all["KvdDataPathCPU"]) > 0
	})
	fired["KvdDataPathCPU"] = true
}

// gateway: clients of a gateway fare badly.
func gateway(t *testing.T, promql string, fired map[string]bool) {
	at := host(180)
	s := newTried(t, 180)
	s.web["dev"] = at + ":7480"
	start(t, s.env, commands(t)+"/kvd", "dev", "--memory=64MiB", "--listen", at+":7400", "--redis", at+":6379",
		"--memcached", "off", "--http", s.web["dev"])
	s.web["g"] = at + ":7483"
	g := start(t, s.env, commands(t)+"/kvd", "gateway", "--directory", at+":7400", "--databases", "default", "--listen",
		at+":6380",
		"--listen-memcached", "off", "--http-listen", s.web["g"], "--max-connections", "1")
	w := watch(t, promql, time.Minute, fired, s.web)
	r := dialRedis(t, at+":6379")
	// For a day all lookups hit, and then none does.
	r.do("SET", "k", "v")
	for range 4 {
		for range 100 {
			if got := r.do("GET", "k"); got != "$1" {
				t.Fatal(got)
			}
		}
		w.hold(w.scrapeTargets(), 6*time.Hour)
	}
	for range 8 {
		for range 100 {
			r.do("GET", "nothing")
		}
		w.hold(w.scrapeTargets(), 5*time.Minute)
	}
	w.firesNow("KvdHitRatioDropped")
	// Commands that are none, and one connection too many, for ten minutes.
	dialRedis(t, at+":6380").do("PING")
	for range 12 {
		for range 100 {
			r.do("GET")
		}
		c, err := net.DialTimeout("tcp", at+":6380", patience)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = io.ReadAll(c) // it says why, and closes
		_ = c.Close()
		w.hold(w.scrapeTargets(), time.Minute)
	}
	w.firesNow("KvdGatewayErrors", "KvdConnectionsRefused")
	// It may open no more files, for a moment in which somebody calls.
	pid := g.cmd.Process.Pid
	var was unix.Rlimit
	if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &was); err != nil {
		t.Fatal(err)
	}
	limit := func(files uint64) {
		if err := unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: was.Max}, nil); err != nil {
			t.Fatal(err)
		}
	}
	failed := regexp.MustCompile(`kvd_listener_accept_failures_total\{.*listener="redis".*\} [1-9]`)
	var last []scrape
	testutil.Until(t, "a failure to accept is counted", func() bool {
		limit(3) // only the standard ones
		c, err := net.DialTimeout("tcp", at+":6380", patience)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond)) // it is told why it is refused, if it is accepted
		_, _ = io.ReadAll(c)
		limit(was.Cur)
		_ = c.Close()
		last = w.scrapeTargets()
		return slices.ContainsFunc(last, func(s scrape) bool { return failed.MatchString(s.Text) })
	})
	w.hold(last, time.Minute)
	w.firesNow("KvdOutOfDescriptors")
}
