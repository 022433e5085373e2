package deploy

import (
	"bufio"
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/testutil"
)

const patience = testutil.Limit

var binDir string

// commands is the folder of kvd and kvctl. It looks at what they are made of: that is not
// among the packages that this test is known to depend on, but a remembered result is
// void when files change that a test has looked at.
func commands(t *testing.T) string {
	t.Helper()
	if err := sources(); err != nil {
		t.Fatal(err)
	}
	return binDir
}

var sources = sync.OnceValue(func() error {
	return filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && (d.Name() == ".git" || d.Name() == "dist") { // releases in dist come and go
			return fs.SkipDir
		}
		return err
	})
})

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "kvd-deploy-")
	if err == nil {
		binDir = dir
		// As they ship, so that the sizes are those of what ships.
		build := exec.Command("make", "--no-print-directory", "-C", "..", "build", "OUT="+dir)
		build.Stderr = os.Stderr
		err = build.Run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build kvd and kvctl:", err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// The binaries stay small enough to be copied into every image: no debugging data, no paths of the
// machine that built them, and in kvctl nothing of the store's processes. kvd had 32 MB before snapshots and their
// compression came in, for its archive, and 32.3 MB before their buckets did, by minio-go.
// It had 33.9 MB before public authorities and tier nodes did.
func TestSizes(t *testing.T) {
	for name, most := range map[string]int64{"kvctl": 20_000_000, "kvd": 34_900_000} {
		st, err := os.Stat(filepath.Join(commands(t), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %.1f MB", name, float64(st.Size())/1e6)
		made, err := buildinfo.ReadFile(filepath.Join(commands(t), name))
		if err != nil {
			t.Fatal(err)
		}
		for key, want := range map[string]string{"-trimpath": "true", "-pgo": "kvd.pgo", "CGO_ENABLED": "0"} {
			if !slices.Contains(made.Settings, debug.BuildSetting{Key: key, Value: want}) {
				t.Errorf("%s was not made with %s=%s: %v", name, key, want, made.Settings)
			}
		}
		if st.Size() > most {
			t.Errorf("%s has %d bytes, want at most %d: go list -deps ./cmd/%s shows what came in; a use of "+
				"text/template or reflect's MethodByName keeps all methods of all types", name, st.Size(), most, name)
		}
	}
}

// The profile by which kvd is compiled is of kvd as it is: nearly all that the profile found of its own code to take
// time is still there by that name.
func TestProfileIsOfThisCode(t *testing.T) {
	out, err := exec.Command("go", "tool", "pprof", "-top", "-nodecount=1000000", "-nodefraction=0", "-unit=ns",
		"kvd.pgo").Output()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(filepath.Join(commands(t), "kvd"))
	if err != nil {
		t.Fatal(err)
	}
	const module = "github.com/kvd-project/kvd/"
	var all, here float64
	var gone []string
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 6 || !strings.HasPrefix(f[5], module) {
			continue
		}
		ns, err := strconv.ParseFloat(strings.TrimSuffix(f[0], "ns"), 64)
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if all += ns; bytes.Contains(program, []byte(f[5]+"\x00")) {
			here += ns
		} else if ns > 0 {
			gone = append(gone, f[5])
		}
	}
	if t.Logf("%.1f s, of which %.3f are gone", all/1e9, 1-here/all); all < 1e9 || here < 0.9*all {
		t.Errorf("kvd.pgo is of other code (make profile makes it anew): of %.1f s in functions of this module only "+
			"%.1f are in functions that are still there; gone are %q", all/1e9, here/1e9, gone)
	}
}

// host is loopback address number n of this test process, so that what the
// files say about ports can be tried as it is, whatever else runs here.
func host(n int) string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>8%128, pid&255, n)
}

// process is one started command.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	stderr bytes.Buffer // read after exited
	exited chan struct{}
}

// start starts args and waits for its ready line.
func start(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(args[0], args[1:]...), exited: make(chan struct{})}
	p.cmd.Env = env
	p.cmd.Stderr = &p.stderr
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout = w
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // ProcessState says how
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // most have exited
		<-p.exited
		_ = r.Close()
		if t.Failed() {
			t.Logf("%v: %s\n%s", args, p.cmd.ProcessState, &p.stderr)
		}
	})
	timer := time.AfterFunc(patience, func() { _ = p.cmd.Process.Kill() }) // ends the read
	line, err := bufio.NewReader(r).ReadString('\n')
	timer.Stop()
	if err != nil || !strings.HasPrefix(line, "ready ") {
		t.Fatalf("%v: no ready line: %q, %v", args, line, err)
	}
	return p
}

// stop ends the process as an engine or systemd does.
func (p *process) stop() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatal("SIGTERM does not end it")
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Errorf("%v: exit status %d after SIGTERM", p.cmd.Args, code)
	}
}

// output runs args to its end.
func output(t *testing.T, env []string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = env
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestSampleSettings(t *testing.T) {
	d := config.DefaultDirectoryNode()
	if err := config.Load(d, "directory.yaml", nil); err != nil {
		t.Error(err)
	}
	if d.ID != "d1" || !d.Bootstrap || d.DataDir != "/var/lib/kvd-directory" {
		t.Errorf("directory.yaml gives %+v", d)
	}
	m := config.DefaultMemNode()
	if err := config.Load(m, "memnode.yaml", nil); err != nil {
		t.Error(err)
	}
	if m.Name != "m1" || m.HugePages != config.Off || m.Memory != 1<<30 {
		t.Errorf("memnode.yaml gives %+v", m)
	}
	g := config.DefaultGateway()
	if err := config.Load(g, "gateway.yaml", nil); err != nil {
		t.Error(err)
	}
	if !slices.Equal(g.Databases, []string{"cache"}) || d.HTTPListen == config.Off || m.HTTPListen == config.Off ||
		g.HTTPListen == config.Off {
		t.Errorf("gateway.yaml gives %+v", g)
	}
	// Settings that are commented out are right as well, once the comment signs are gone.
	for name, s := range map[string]config.Settings{"directory.yaml": config.DefaultDirectoryNode(),
		"memnode.yaml": config.DefaultMemNode(), "gateway.yaml": config.DefaultGateway(),
		"broker.yaml": config.DefaultBrokerNode(), "archive.yaml": config.DefaultArchive()} {
		file := filepath.Join(t.TempDir(), name)
		var lines []string
		setting := regexp.MustCompile(`^#(?: ([a-z-]+: \S.*)|(  [a-z-]+: \S.*))$`)
		seen := map[string]bool{"bootstrap": true} // excludes join
		all := strings.Split(read(t, name), "\n")
		for _, l := range slices.Backward(all) { // the commented ones come later, and win
			l = setting.ReplaceAllString(l, "$1$2")
			key, _, _ := strings.Cut(l, ":")
			if strings.HasPrefix(l, "#") || seen[key] {
				continue
			}
			seen[key] = key != ""
			lines = append(lines, l)
		}
		slices.Reverse(lines)
		if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := config.Load(s, file, nil); err != nil {
			t.Errorf("%v\n%s", err, strings.Join(lines, "\n"))
		}
		if g, is := s.(*config.Gateway); is {
			_, port, _ := net.SplitHostPort(g.ListenPeers)
			if _, said, _ := net.SplitHostPort(g.AdvertisePeers); port == "0" || said != port {
				t.Errorf("%s: other gateways are told to call %s, and listen-peers is %s", name, g.AdvertisePeers,
					g.ListenPeers)
			}
		}
		if !strings.Contains(strings.Join(lines, "\n"), "\n  ca: /etc") || !strings.Contains(strings.Join(lines, "\n"),
			"0.0.0.0:") {
			t.Errorf("%s: its comments were not tried:\n%s", name, strings.Join(lines, "\n"))
		}
	}
}

// Settings that docs/install.md shows are complete, and over TLS: each of a machine among several.
func TestDocumentedSettings(t *testing.T) {
	for role, defaults := range map[string]func() config.Settings{
		"directory": func() config.Settings { return config.DefaultDirectoryNode() },
		"memnode":   func() config.Settings { return config.DefaultMemNode() },
		"gateway":   func() config.Settings { return config.DefaultGateway() },
	} {
		_, rest, found := strings.Cut(read(t, "../docs/install.md"), "```yaml\n# /etc/kvd/"+role+".yaml\n")
		text, _, ended := strings.Cut(rest, "```\n")
		if !found || !ended {
			t.Errorf("docs/install.md has no %s.yaml", role)
			continue
		}
		file := filepath.Join(t.TempDir(), role+".yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := config.Load(defaults(), file, nil); err != nil {
			t.Errorf("%s: %v", role, err)
		}
		// Without its certificate it would be refused: it listens beyond this machine.
		without, _, _ := strings.Cut(text, "tls:\n")
		if err := os.WriteFile(file, []byte(without), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := config.Load(defaults(), file, nil); err == nil {
			t.Errorf("%s: accepted without TLS", role)
		}
	}
}

// unit gives the settings of a unit's section; a key may be there several times.
func unit(t *testing.T, file, section string) map[string][]string {
	t.Helper()
	settings := make(map[string][]string)
	in := ""
	for l := range strings.Lines(read(t, file)) {
		l = strings.TrimSpace(l)
		switch k, v, ok := strings.Cut(l, "="); {
		case l == "" || l[0] == '#':
		case l[0] == '[':
			in = strings.Trim(l, "[]")
		case !ok:
			t.Errorf("%s: %q", file, l)
		case in == section:
			settings[k] = append(settings[k], v)
		}
	}
	return settings
}

var units = []string{"kvd-directory.service", "kvd-memnode.service", "kvd-gateway.service",
	"kvd-broker.service", "kvd-archive.service"}

func TestUnitsVerify(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd-analyze is not installed")
	}
	dir := t.TempDir()
	args := []string{"systemd-analyze", "verify"}
	for _, u := range units {
		text := strings.ReplaceAll(read(t, u), "/usr/local/bin/kvd", filepath.Join(commands(t), "kvd"))
		file := filepath.Join(dir, u)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, file)
	}
	// systemd does not parse a drop-in that it does not find beside its unit.
	dropIn := filepath.Join(dir, "kvd-memnode.service.d")
	if err := os.Mkdir(dropIn, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dropIn, "rdma.conf"), []byte(read(t, "kvd-memnode-rdma.conf")), 0o600); err !=
		nil {
		t.Fatal(err)
	}
	// It warns about a misspelt setting, and goes on.
	if out := output(t, os.Environ(), args...); strings.Contains(out, dir) || strings.Contains(out, "Unknown") {
		t.Error(out)
	}
}

// The units' commands serve with the sample settings, tell systemd so, also when a memory node's worker is
// replaced, and end when it asks.
func TestUnitsStart(t *testing.T) {
	root := t.TempDir() // stands for /
	at := host(1)
	sub := strings.NewReplacer("/usr/local/bin/", commands(t)+"/", "/etc/kvd/", root+"/etc/", "/var/lib/", root+"/lib/",
		"/run/", root+"/run/", "127.0.0.1", at)
	if err := errors.Join(os.Mkdir(root+"/etc", 0o700), os.Mkdir(root+"/run", 0o700)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"directory.yaml", "memnode.yaml", "gateway.yaml", "broker.yaml", "archive.yaml"} {
		if err := os.WriteFile(root+"/etc/"+name, []byte(sub.Replace(read(t, name))), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	notify := root + "/notify"
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: notify, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ready := func(file string) {
		t.Helper()
		if err := conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 64)
		if n, err := conn.Read(b); err != nil || string(b[:n]) != "READY=1" {
			t.Fatalf("%s: systemd is told %q, %v", file, b[:n], err)
		}
	}
	var started []*process
	kvctl := []string{"KVD_DIRECTORY=" + at + ":7400"}
	for _, file := range units {
		if file == "kvd-gateway.service" { // it makes no namespace
			output(t, kvctl, commands(t)+"/kvctl", "namespace", "create", "cache", "--mode", "cache", "--bytes",
				"256MiB")
		}
		u := unit(t, file, "Service")
		if got := u["Type"]; !slices.Equal(got, []string{"notify"}) {
			t.Fatalf("%s: Type=%q", file, got)
		}
		// There is no store here for what the environment says of it; systemd_test.go has it.
		env := append(slices.DeleteFunc(u["Environment"], func(e string) bool {
			return strings.HasPrefix(e, "FDSTORE=")
		}), "NOTIFY_SOCKET="+notify)
		for _, d := range u["RuntimeDirectory"] {
			d = filepath.Join(root, d)
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
			env = append(env, "RUNTIME_DIRECTORY="+d)
		}
		for _, line := range u["ExecStart"] {
			started = append(started, start(t, env, strings.Fields(sub.Replace(line))...))
			ready(file)
		}
	}
	if len(started) != len(units) {
		t.Fatalf("%d commands in %d units", len(started), len(units))
	}
	for _, provider := range []string{"shm", "tcp"} {
		output(t, kvctl, commands(t)+"/kvctl", "--provider="+provider, "put", provider, "value")
		if got := output(t, kvctl, commands(t)+"/kvctl", "--provider="+provider, "get", provider); strings.TrimSpace(
			got) != "value" {
			t.Errorf("get over %s: %q", provider, got)
		}
	}
	for _, port := range []string{"7480", "7481", "7483", "7484", "7485"} {
		output(t, nil, commands(t)+"/kvd", "health", "http://"+at+":"+port)
	}
	throughGateway(t, at)
	// The worker that ends does not say STOPPING=1: systemd would kill the next one.
	output(t, kvctl, commands(t)+"/kvctl", "nodes", "restart", "m1")
	ready(memnodeUnit)
	for _, p := range slices.Backward(started) {
		p.stop()
	}
}

// amongGateways publishes at one gateway until a subscriber of the other one hears it, which is when they have met.
func amongGateways(t *testing.T, one, two string) {
	t.Helper()
	dial := func(at string) net.Conn {
		t.Helper()
		c, err := net.DialTimeout("tcp", at+":6379", patience)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	from, to := dial(one), dial(two)
	if _, err := to.Write([]byte("SUBSCRIBE news\r\n")); err != nil {
		t.Fatal(err)
	}
	heard := make(chan string, 1)
	go func() {
		r := bufio.NewReader(to)
		for {
			l, err := r.ReadString('\n')
			if err != nil || l == "it is out\r\n" {
				heard <- l
				return
			}
		}
	}()
	replies := bufio.NewReader(from)
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for until := time.After(patience); ; {
		select {
		case got := <-heard:
			if got == "" {
				t.Error("the gateway of the subscriber closed its connection")
			}
			return
		case <-until:
			t.Fatal("a message does not come through")
		case <-again.C:
			if _, err := from.Write([]byte("PUBLISH news \"it is out\"\r\n")); err != nil {
				t.Fatal(err)
			}
			if l, err := replies.ReadString('\n'); err != nil || l != ":0\r\n" {
				t.Fatalf("PUBLISH: %q, %v", l, err)
			}
		}
	}
}

// throughGateway writes by Redis's protocol and reads by memcached's.
func throughGateway(t *testing.T, at string) {
	t.Helper()
	say := func(port, text string, lines int) (got string) {
		t.Helper()
		conn, err := net.DialTimeout("tcp", at+":"+port, patience)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		r := bufio.NewReader(conn)
		for range lines {
			l, err := r.ReadString('\n')
			if err != nil {
				t.Fatalf("%s: %v", port, err)
			}
			got += strings.TrimSpace(l) + " "
		}
		return got
	}
	if got := say("6379", "SET key value\r\nGET key\r\n", 3); got != "+OK $5 value " {
		t.Errorf("Redis's protocol: %q", got)
	}
	if got := say("11211", "get key\r\n", 3); got != "VALUE key 0 5 value END " {
		t.Errorf("memcached's protocol: %q", got)
	}
}

// composeFile is what compose.yaml uses of the format; other keys are mistakes.
type composeFile struct {
	Name     string
	Services map[string]service
	Networks map[string]struct{ Internal bool }
	Volumes  map[string]*struct{}
	Common   yaml.Node `yaml:"x-common"`
	Dir      yaml.Node `yaml:"x-directory"`
	Mem      yaml.Node `yaml:"x-memnode"`
	Gateway  yaml.Node `yaml:"x-gateway"`
}

type service struct {
	Image       string
	Entrypoint  []string
	Command     []string
	Environment map[string]string
	Networks    []string
	Volumes     []string
	Profiles    []string
	Restart     string
	ReadOnly    bool     `yaml:"read_only"`
	CapDrop     []string `yaml:"cap_drop"`
	SecurityOpt []string `yaml:"security_opt"`
	Ulimits     map[string]int
	Healthcheck struct {
		Test                       []string
		Interval, Timeout, Retries string
		StartPeriod                string `yaml:"start_period"`
	}
	DependsOn map[string]struct{ Condition string } `yaml:"depends_on"`
}

func compose(t *testing.T) composeFile {
	t.Helper()
	var c composeFile
	d := yaml.NewDecoder(strings.NewReader(read(t, "compose.yaml")))
	d.KnownFields(true)
	if err := d.Decode(&c); err != nil {
		t.Fatal(err)
	}
	return c
}

// order gives the services without a profile, those that others depend on first.
func (c composeFile) order(t *testing.T) []string {
	t.Helper()
	var names []string
	for _, n := range slices.Sorted(maps.Keys(c.Services)) {
		if len(c.Services[n].Profiles) == 0 {
			names = append(names, n)
		}
	}
	slices.SortStableFunc(names, func(a, b string) int {
		return len(c.Services[a].DependsOn) - len(c.Services[b].DependsOn)
	})
	for i, n := range names {
		for d, on := range c.Services[n].DependsOn {
			if !slices.Contains(names[:i], d) || on.Condition != "service_healthy" {
				t.Errorf("%s depends on %s (%s)", n, d, on.Condition)
			}
		}
	}
	return names
}

// Every service's command serves, its health check agrees, and the tool service
// reaches the store. Each service has an address of its own here too.
func TestComposeStarts(t *testing.T) {
	c := compose(t)
	names := c.order(t)
	if len(names) != 5 {
		t.Fatalf("services %q, want three directory nodes and two memory nodes", names)
	}
	var pairs []string
	for i, n := range slices.Sorted(maps.Keys(c.Services)) {
		pairs = append(pairs, n, host(10+i))
	}
	// A service's name stands for its address, as a whole word.
	byName := strings.NewReplacer(pairs...)
	word := regexp.MustCompile(`\b(` + strings.Join(slices.Sorted(maps.Keys(c.Services)), "|") + `)(:|$)`)
	sub := func(n, s string) string {
		s = word.ReplaceAllStringFunc(s, byName.Replace)
		own := byName.Replace(n)
		return strings.NewReplacer("0.0.0.0", own, "127.0.0.1", own).Replace(s)
	}
	env := func(n string) (env []string) {
		for k, v := range c.Services[n].Environment {
			if in, ok := strings.CutPrefix(v, "/data"); ok {
				v = t.TempDir() + in
			}
			env = append(env, k+"="+sub(n, v))
		}
		return env
	}
	var started []*process
	serve := func(n string) {
		t.Helper()
		s := c.Services[n]
		args := []string{commands(t) + "/kvd"}
		for _, a := range s.Command {
			if !strings.HasPrefix(a, "--id=") && !strings.HasPrefix(a, "--name=") {
				a = sub(n, a)
			}
			args = append(args, a)
		}
		started = append(started, start(t, env(n), args...))
		check := s.Healthcheck.Test
		if len(check) < 2 || check[0] != "CMD" || check[1] != "/kvd" {
			t.Fatalf("%s: health check %q: the image has nothing but kvd to run", n, check)
		}
		args = []string{commands(t) + "/kvd"}
		for _, a := range check[2:] {
			args = append(args, sub(n, a))
		}
		if got := output(t, nil, args...); got != "SERVING\n" {
			t.Errorf("%s: health check says %q", n, got)
		}
	}
	for _, n := range names {
		serve(n)
	}
	tool := c.Services["kvctl"]
	if !slices.Equal(tool.Entrypoint, []string{"/kvctl"}) || !slices.Equal(tool.Profiles, []string{"tools"}) {
		t.Errorf("service kvctl is %+v", tool)
	}
	toolEnv := env("kvctl")
	output(t, toolEnv, commands(t)+"/kvctl", "put", "hello", "world")
	if got := output(t, toolEnv, commands(t)+"/kvctl", "get", "hello"); strings.TrimSpace(got) != "world" {
		t.Errorf("get: %q", got)
	}
	once := c.Services["namespaces"]
	if !slices.Equal(once.Entrypoint, []string{"/kvctl"}) || once.Restart != "no" ||
		!slices.Equal(once.Profiles, slices.Concat(c.Services["g1"].Profiles, c.Services["b1"].Profiles)) ||
		c.Services["b1"].DependsOn["namespaces"] != c.Services["g1"].DependsOn["namespaces"] ||
		c.Services["g1"].DependsOn["namespaces"].Condition != "service_completed_successfully" {
		t.Errorf("service namespaces is %+v", once)
	}
	for range 2 { // it runs whenever the gateway is brought up
		output(t, env("namespaces"), append([]string{commands(t) + "/kvctl"}, once.Command...)...)
	}
	serve("g1")
	throughGateway(t, byName.Replace("g1"))
	serve("g2")
	amongGateways(t, byName.Replace("g1"), byName.Replace("g2"))
	serve("b1")
	if got := output(t, toolEnv, commands(t)+"/kvctl", "brokers", "--interval=0"); !strings.Contains(got,
		" broker.sock ") {
		t.Errorf("kvctl brokers: %s", got)
	}
	for _, p := range slices.Backward(started) {
		p.stop()
	}
}

func TestComposeNames(t *testing.T) {
	c := compose(t)
	for n, s := range c.Services {
		for _, net := range s.Networks {
			if net, ok := c.Networks[net]; !ok || !net.Internal {
				t.Errorf("%s: a network that is missing, or not internal while insecure is set", n)
			}
		}
		for _, v := range s.Volumes {
			name, at, _ := strings.Cut(v, ":")
			if _, ok := c.Volumes[name]; !ok || at != "/data" {
				t.Errorf("%s: volume %q", n, v)
			}
		}
		if s.Image != "kvd:latest" || !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) {
			t.Errorf("%s: %+v", n, s)
		}
	}
	if c.Services["m1"].Ulimits["memlock"] != -1 {
		t.Error("memory nodes may not lock memory")
	}
}

// TestEngine runs the image under a real engine, which `make test-deploy`
// provides. Without the compose plugin it runs the services as compose would.
func TestEngine(t *testing.T) {
	if os.Getenv("KVD_TEST_ENGINE") == "" {
		t.Skip("KVD_TEST_ENGINE is not set: run make test-deploy")
	}
	ensureEngine(t)
	docker := func(args ...string) string {
		t.Helper()
		return output(t, os.Environ(), append([]string{"docker"}, args...)...)
	}
	// of make image-context
	docker("build", "--tag", "kvd:latest", "--build-arg", "VERSION=v1.2.3", "--file", "Dockerfile", "../dist/image")
	label := `{{index .Config.Labels "org.opencontainers.image.version"}}`
	if got := strings.TrimSpace(docker("image", "inspect", "--format", label, "kvd:latest")); got != "v1.2.3" {
		t.Errorf("the image's label of its version is %q", got)
	}
	t.Run("memory path", engineRestart)
	put := []string{"put", "hello", "world"}
	get := []string{"get", "hello"}
	if exec.Command("docker", "compose", "version").Run() == nil {
		run := func(args ...string) string {
			return docker(append([]string{"compose", "-f", "compose.yaml"}, args...)...)
		}
		t.Cleanup(func() { run("down", "--volumes", "--timeout", "20") })
		run("up", "--detach", "--wait")
		run(append([]string{"run", "--rm", "kvctl"}, put...)...)
		if got := run(append([]string{"run", "--rm", "kvctl"}, get...)...); !strings.Contains(got, "world") {
			t.Errorf("get: %q", got)
		}
		return
	}
	t.Log("no compose plugin: docker run with what compose.yaml says")
	c := compose(t)
	prefix := fmt.Sprintf("kvd-test-%d-", os.Getpid())
	var undo [][]string
	t.Cleanup(func() {
		for _, u := range slices.Backward(undo) {
			if out, err := exec.Command("docker", u...).CombinedOutput(); err != nil {
				t.Errorf("docker %v: %v\n%s", u, err, out)
			}
		}
	})
	// An engine without CAP_SYS_RESOURCE, as in a sandbox, cannot raise a limit.
	limits := true
	if out, err := exec.Command("docker", "run", "--rm", "--ulimit", "memlock=-1", "kvd:latest",
		"version").CombinedOutput(); err != nil {
		if !strings.Contains(string(out), "error setting rlimit") {
			t.Fatalf("docker run: %v\n%s", err, out)
		}
		t.Logf("without the ulimits of compose.yaml, which this engine may not set: %s", out)
		limits = false
	}
	docker("network", "create", "--internal", prefix+"store")
	undo = append(undo, []string{"network", "rm", prefix + "store"})
	args := func(n string) []string {
		s := c.Services[n]
		a := []string{"run", "--network", prefix + "store", "--network-alias", n}
		if s.ReadOnly {
			a = append(a, "--read-only")
		}
		for _, v := range s.CapDrop {
			a = append(a, "--cap-drop", v)
		}
		for _, v := range s.SecurityOpt {
			a = append(a, "--security-opt", v)
		}
		for k, v := range s.Ulimits {
			if !limits {
				continue
			}
			a = append(a, "--ulimit", fmt.Sprintf("%s=%d", k, v))
		}
		for k, v := range s.Environment {
			a = append(a, "--env", k+"="+v)
		}
		for _, v := range s.Volumes {
			a = append(a, "--volume", prefix+v)
		}
		if len(s.Entrypoint) > 0 {
			a = append(a, "--entrypoint", s.Entrypoint[0])
		}
		return a
	}
	for _, n := range c.order(t) {
		s := c.Services[n]
		for _, v := range s.Volumes {
			name, _, _ := strings.Cut(v, ":")
			docker("volume", "create", prefix+name)
			undo = append(undo, []string{"volume", "rm", prefix + name})
		}
		docker(append(append(args(n), "--detach", "--name", prefix+n, s.Image), s.Command...)...)
		undo = append(undo, []string{"rm", "--force", prefix + n})
		undo = append(undo, []string{"stop", "--time", "20", prefix + n})
		waitHealthy(t, prefix+n, s.Healthcheck.Test[1:])
	}
	tool := func(cmd []string) string {
		return docker(append(append(args("kvctl"), "--rm", c.Services["kvctl"].Image), cmd...)...)
	}
	tool(put)
	if got := tool(get); !strings.Contains(got, "world") {
		t.Errorf("get: %q", got)
	}
}

// waitHealthy repeats a health check in a container as the engine does.
func waitHealthy(t *testing.T, container string, check []string) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		out, err := exec.Command("docker", append([]string{"exec", container}, check...)...).CombinedOutput()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			logs, _ := exec.Command("docker", "logs", container).CombinedOutput()
			t.Fatalf("%s is not healthy: %v %s\n%s", container, err, out, logs)
		}
		select {
		case <-t.Context().Done():
		case <-time.After(500 * time.Millisecond): // the engine's own interval is longer
		}
	}
}

// ensureEngine uses the engine that runs, or starts one for the test.
func ensureEngine(t *testing.T) {
	t.Helper()
	if exec.Command("docker", "info").Run() == nil {
		return
	}
	if _, err := exec.LookPath("dockerd"); err != nil {
		t.Fatal("no engine runs, and dockerd is not installed (Debian: docker.io)")
	}
	dir := t.TempDir()
	sock := "unix://" + dir + "/docker.sock"
	cmd := exec.Command("dockerd", "--host", sock, "--data-root", dir+"/data", "--exec-root", dir+"/exec", "--pidfile",
		dir+"/pid")
	var log lockedBuffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() { defer close(exited); _ = cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-exited
	})
	t.Setenv("DOCKER_HOST", sock)
	deadline := time.After(patience)
	for {
		if exec.Command("docker", "info").Run() == nil {
			return
		}
		select {
		case <-exited:
			t.Fatalf("dockerd cannot run here: %v\n%s", cmd.ProcessState, &log)
		case <-deadline:
			t.Fatalf("dockerd does not answer\n%s", &log)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The workflow runs the gate and nothing else, with the Go that the module wants.
func TestWorkflow(t *testing.T) {
	var w struct {
		Jobs map[string]struct {
			Container struct{ Image string }
			Steps     []struct{ Uses, Run string }
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "../.github/workflows/ci.yml")), &w); err != nil {
		t.Fatal(err)
	}
	gate, ok := w.Jobs["gate"]
	if !ok || len(w.Jobs) != 1 || len(gate.Steps) == 0 ||
		!slices.Contains(strings.Split(gate.Steps[len(gate.Steps)-1].Run, "\n"), ".ci/run") {
		t.Errorf("the last step of the only job, gate, does not call .ci/run: %+v", w.Jobs)
	}
	version := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindStringSubmatch(read(t, "../go.mod"))
	if version == nil || gate.Container.Image != "golang:"+version[1]+"-bookworm" {
		t.Errorf("the gate runs in %q, and go.mod says %q", gate.Container.Image, version)
	}
	if st, err := os.Stat("../.ci/run"); err != nil || st.Mode()&0o111 == 0 {
		t.Errorf(".ci/run cannot be run: %v", err)
	}
}
