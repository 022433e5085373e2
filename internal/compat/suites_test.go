package compat

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// results are a suite's tests by name.
type results map[string]result

type result struct {
	state state
	// failures says what went wrong, by place: the name of the test, with the lines of
	// its checks that failed where the suite tells them apart.
	failures map[string]string
	version  string // of an application
}

type state string

const (
	passed  state = "passed"
	failed  state = "failed"
	skipped state = "skipped"
)

func (r results) count(s state) (n int) {
	for _, x := range r {
		if x.state == s {
			n++
		}
	}
	return n
}

func (r results) counts() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", r.count(passed), r.count(failed), r.count(skipped))
}

// versions are those of applications, by name.
func (r results) versions() map[string]string {
	all := make(map[string]string)
	for name, x := range r {
		if x.version != "" {
			all[name] = x.version
		}
	}
	return all
}

// failures are those of all tests.
func (r results) failures() map[string]string {
	all := make(map[string]string)
	for _, x := range r {
		maps.Copy(all, x.failures)
	}
	return all
}

// suite runs other people's tests on the originals and on ours, and compares what
// fails on ours with testdata/expected/NAME.txt.
func suite(t *testing.T, name string, run func(t *testing.T, at target) (results, error)) {
	l := open(t)
	var wg sync.WaitGroup // most of their time they sleep
	var got, reference results
	var gotErr, referenceErr error
	wg.Go(func() { got, gotErr = run(t, l.ours()) })
	wg.Go(func() { reference, referenceErr = run(t, l.reference()) })
	wg.Wait()
	must(t, errors.Join(gotErr, referenceErr))
	if got.count(passed) == 0 || len(reference) == 0 {
		t.Fatalf("nothing passed: ours %s, reference %s\n%v", got.counts(), reference.counts(), got.failures())
	}
	t.Logf("kvd:       %s", got.counts())
	t.Logf("reference: %s", reference.counts())
	e, err := loadExpected(name)
	must(t, err)
	failures := got.failures()
	for app, x := range got {
		if v := e.versions[app]; x.version != "" && x.version != v {
			// Debian's updates may come at any time.
			t.Logf("%s is %s here, in %s %s", app, x.version, expectedFile(name), cmp.Or(v, "nothing"))
		}
	}
	if *rewrite {
		e.counts, e.reference = got.counts(), reference.counts()
		e.versions = got.versions()
		for place := range e.reasons {
			if failures[place] == "" {
				delete(e.reasons, place)
			}
		}
		for place, why := range failures {
			if _, ok := e.reasons[place]; !ok {
				e.reasons[place] = "" // for somebody to fill in
				t.Logf("%s: %s", place, why)
			}
		}
		must(t, e.save(name))
		return
	}
	for _, place := range slices.Sorted(maps.Keys(failures)) {
		if e.reasons[place] == "" {
			t.Errorf("fails, and %s does not list it: %s\n%s", expectedFile(name), place, failures[place])
		}
	}
	for _, place := range slices.Sorted(maps.Keys(e.reasons)) {
		if failures[place] == "" {
			t.Errorf("passes, and %s lists it: %s", expectedFile(name), place)
		}
	}
	// Tests that are not run any more would go unnoticed.
	if !t.Failed() && got.counts() != e.counts {
		t.Errorf("%s, want %s", got.counts(), e.counts)
	}
}

// testModule copies a module with its tests into a folder where they can be changed.
// keep says which test files of the folder sub stay.
func testModule(t *testing.T, module, sub string, keep func(name string) bool) string {
	t.Helper()
	download := exec.Command("go", "mod", "download", "-json", module)
	out, err := download.Output()
	if err != nil {
		t.Fatalf("%v: %v\n%s", download, err, out)
	}
	var m struct{ Dir string }
	must(t, json.Unmarshal(out, &m))
	dir := t.TempDir()
	must(t, os.CopyFS(dir, os.DirFS(m.Dir)))
	// The module cache is read-only, and so would be the copy.
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.Chmod(path, 0o755)
		}
		return os.Chmod(path, 0o644)
	}))
	tests, err := filepath.Glob(filepath.Join(dir, sub, "*_test.go"))
	must(t, err)
	for _, f := range tests {
		if !keep(filepath.Base(f)) {
			must(t, os.Remove(f))
		}
	}
	return dir
}

// edit replaces text that a file of a module must hold.
func edit(t *testing.T, path string, oldNew ...string) {
	t.Helper()
	b, err := os.ReadFile(path)
	must(t, err)
	for i := 0; i < len(oldNew); i += 2 {
		if !bytes.Contains(b, []byte(oldNew[i])) {
			t.Fatalf("%s does not hold %q any more", path, oldNew[i])
		}
		b = bytes.ReplaceAll(b, []byte(oldNew[i]), []byte(oldNew[i+1]))
	}
	must(t, os.WriteFile(path, b, 0o644))
}

// buildTest compiles the tests of a folder. The paths in it do not matter, so that the
// build cache helps the next time.
func buildTest(t *testing.T, dir string) string {
	t.Helper()
	program := filepath.Join(dir, "compat.test")
	build := exec.Command("go", "test", "-trimpath", "-vet=off", "-c", "-o", program, ".")
	build.Dir = dir
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", build, err, out)
	}
	return program
}

// runTest runs a test program, whose failure is no error.
func runTest(dir string, env []string, argv ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if exit := new(exec.ExitError); ctx.Err() == nil && errors.As(err, &exit) && exit.Exited() {
		err = nil
	}
	if err != nil {
		return out, fmt.Errorf("%v: %w\n%s", cmd, err, out[max(0, len(out)-8000):])
	}
	return out, nil
}

// goRedisModule and its like are what docs/compatibility.md names.
const (
	goRedisModule    = "github.com/redis/go-redis/v9@v9.23.0"
	miniredisModule  = "github.com/alicebob/miniredis/v2@v2.40.0"
	gomemcacheModule = "github.com/bradfitz/gomemcache@v0.0.0-20260422231931-4d751bb6e37c"
)

// TestGoRedisSuite runs go-redis's tests of all data types, of scans, scripts, functions, transactions,
// pipelines, Pub/Sub, client-side caching, ACLs, pools and the server, without those of clusters, sentinels and
// modules.
func TestGoRedisSuite(t *testing.T) {
	open(t)
	// The last rows are helpers of the first.
	keep := strings.Fields(`commands_test.go command_test.go tx_test.go iterator_test.go pipeline_test.go
		race_test.go pool_test.go redis_test.go bitmap_commands_test.go pubsub_test.go acl_commands_test.go csc_e2e_test.go
		universal_test.go autopipeline_test.go error_test.go script_server_sha_integration_test.go
		main_test.go export_test.go internal_test.go osscluster_test.go sentinel_test.go command_recorder_test.go
		probe_test.go search_test.go unit_test.go example_test.go re_endpoints_test.go tls_cert_auth_test.go`)
	dir := testModule(t, goRedisModule, ".", func(name string) bool { return slices.Contains(keep, name) })
	edit(t, filepath.Join(dir, "main_test.go"),
		`redisStackPort = "6379"`, `redisStackPort = os.Getenv("KVD_COMPAT_PORT")`,
		`if !RECluster {`, `if false {`) // what rings, sentinels and clusters need
	// A client that is given no address.
	edit(t, filepath.Join(dir, "options.go"), `"net/url"`, `"net/url"`+"\n\t\"os\"",
		`opt.Addr = "localhost:6379"`, `opt.Addr = "127.0.0.1:" + os.Getenv("KVD_COMPAT_PORT")`)
	// Its helper says that a goroutine is done before what failed in it is taken note of: where a
	// command is refused, another test, whichever runs then, would be the one that panics.
	edit(t, filepath.Join(dir, "main_test.go"),
		"defer GinkgoRecover()\n\t\t\t\tdefer wg.Done()\n", "defer wg.Done()\n\t\t\t\tdefer GinkgoRecover()\n")
	// A message may overtake a subscription of another connection that nobody has waited for.
	edit(t, filepath.Join(dir, "pubsub_test.go"), "\t\tch := pubsub.Channel()\n\n\t\tbigVal := bigVal()\n",
		"\t\tif _, err := pubsub.Receive(ctx); err != nil {\n\t\t\tFail(err.Error())\n\t\t}\n\t\tch := "+
			"pubsub.Channel()\n\n\t\tbigVal := bigVal()\n")
	program := buildTest(t, dir)
	// Not Credentials Provider: its wrong passwords slow AUTH down, for the other tests too.
	focus := `^go-redis (Commands (server|keys|scanning|strings|hashes|hyperloglog|lists|sets|sorted sets|streams|Geo add and radius search|` +
		`marshaling/unmarshaling|json marshaling/unmarshaling|debugging|Eval|EvalRO|Functions|SlowLog|Latency) |` +
		`Tx |ScanIterator |pipelining |races |pool |PubSub |Client |Client-side cache |Client-side cache strategies |Conn |Hook |Hook with |Dialer |` +
		`ACL |ACL (user commands|permissions|Categories) |AutoPipeline |NoRetry |withConn |error |UniversalClient should connect to simple servers|NewScriptServerSHA |Cmd |RawCmd |RawWriteToCmd |BitCount)`
	suite(t, "go-redis", func(t *testing.T, at target) (results, error) {
		report := filepath.Join(dir, at.name+".json")
		out, err := runTest(dir, []string{"KVD_COMPAT_PORT=" + portOf(at.redis), "REDIS_VERSION=7.0",
			"GOMEGA_DEFAULT_EVENTUALLY_TIMEOUT=10s"}, program,
			"-test.run", "^TestGinkgoSuite$", "-ginkgo.no-color", "-ginkgo.focus", focus, "-ginkgo.json-report", report)
		if err != nil {
			return nil, err
		}
		b, err := os.ReadFile(report)
		if err != nil {
			return nil, fmt.Errorf("%w\n%s", err, out)
		}
		return ginkgoResults(b)
	})
}

func ginkgoResults(report []byte) (results, error) {
	var all []struct {
		SpecReports []struct {
			ContainerHierarchyTexts []string
			LeafNodeType            string
			LeafNodeText            string
			State                   string
			Failure                 struct{ Message, ForwardedPanic string }
		}
	}
	if err := json.Unmarshal(report, &all); err != nil {
		return nil, err
	}
	r := make(results)
	for _, a := range all {
		for _, s := range a.SpecReports {
			if s.LeafNodeType != "It" {
				if s.State != "passed" {
					return nil, fmt.Errorf("%s: %s", s.LeafNodeType, s.Failure.Message)
				}
				continue
			}
			name := strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
			for i := 2; r[name].state != ""; i++ {
				name = fmt.Sprintf("%s #%d", strings.TrimSuffix(name, fmt.Sprintf(" #%d", i-1)), i)
			}
			switch {
			case s.State == "passed":
				r[name] = result{state: passed}
			case s.State == "skipped" && s.Failure.Message == "":
				// Out of focus.
			case s.State == "skipped":
				r[name] = result{state: skipped}
			default:
				r[name] = result{
					state: failed, failures: map[string]string{name: s.State + ": " + s.Failure.Message +
						s.Failure.ForwardedPanic}}
			}
		}
	}
	return r, nil
}

// TestMiniredisSuite runs the tests that compare miniredis with a real Redis, with the
// gateway as the real one: those of strings, keys, streams, transactions, connections and the
// server, without those of other data types, Lua and Pub/Sub. A check, which is a line
// of a test, fails where both disagree.
func TestMiniredisSuite(t *testing.T) {
	l := open(t)
	keep := []string{"string_test.go", "generic_test.go", "stream_test.go", "tx_test.go", "connection_test.go",
		"server_test.go", "command_test.go", "cluster_test.go"}
	dir := testModule(t, miniredisModule, "integration", func(name string) bool { return slices.Contains(keep, name) })
	original := filepath.Join(dir, "reference")
	must(t, os.CopyFS(original, os.DirFS(filepath.Join(dir, "integration"))))
	// It starts a redis-server for each test, and is told of ours instead.
	ours := filepath.Join(dir, "integration")
	b, err := os.ReadFile("testdata/ephemeral.go.txt")
	must(t, err)
	must(t, os.WriteFile(filepath.Join(ours, "ephemeral.go"), b, 0o644))
	s, err := l.secured()
	must(t, err)
	for name, b := range s.miniredis {
		must(t, os.WriteFile(filepath.Join(dir, "testdata", name), b, 0o644))
	}
	programs := map[string]string{"kvd": buildTest(t, ours), "reference": buildTest(t, original)}
	env := []string{"INT=1", "KVD_COMPAT_REDIS=" + l.ours().redis, "KVD_COMPAT_GATEWAY=" +
		strings.Join(s.password.argv[:len(s.password.argv)-2], " "), "KVD_COMPAT_TLS=" + s.gateway.ready["tls"]}
	suite(t, "miniredis", func(t *testing.T, at target) (results, error) {
		program := programs[at.name]
		out, err := runTest(filepath.Dir(program), env, program, "-test.v", "-test.timeout", "3m")
		if err != nil {
			return nil, err
		}
		return goTestResults(out)
	})
}

// TestGomemcacheSuite runs gomemcache's own test of a server at an address. Its other
// tests start a memcached, or need none.
func TestGomemcacheSuite(t *testing.T) {
	open(t)
	dir := testModule(t, gomemcacheModule, "memcache", func(string) bool { return true })
	edit(t, filepath.Join(dir, "memcache", "memcache_test.go"),
		`const localhostTCPAddr = "localhost:11211"`, `var localhostTCPAddr = os.Getenv("KVD_COMPAT_MEMCACHED")`,
		// It does not wait for its flush, which takes a while here and would delete what it sets.
		`io.WriteString(c, "flush_all\r\n")`, `io.WriteString(c, "flush_all\r\n"); c.Read(make([]byte, 4))`)
	program := buildTest(t, filepath.Join(dir, "memcache"))
	suite(t, "gomemcache", func(t *testing.T, at target) (results, error) {
		out, err := runTest(dir, []string{"KVD_COMPAT_MEMCACHED=" + at.memcached}, program, "-test.v", "-test.run",
			"^TestLocalhost$")
		if err != nil {
			return nil, err
		}
		return goTestResults(out)
	})
}

var (
	testLine  = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\S+)`)
	checkLine = regexp.MustCompile(`^ +(\w+\.go:\d+): (.*)`)
)

// goTestResults reads what go test -v prints about tests without subtests.
func goTestResults(out []byte) (results, error) {
	r := make(results)
	checks := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		if m := checkLine.FindStringSubmatch(line); m != nil {
			checks[m[1]] = m[2] // the last one, of those in a loop
		}
		if m := testLine.FindStringSubmatch(line); m != nil {
			x := result{state: map[string]state{"PASS": passed, "FAIL": failed, "SKIP": skipped}[m[1]]}
			if x.state == failed {
				// A test has one place, with the lines of all its failing checks.
				place, why := m[2], ""
				for _, c := range slices.SortedFunc(maps.Keys(checks), byLine) {
					file, line, _ := strings.Cut(c, ":")
					if !strings.Contains(place, file) {
						place += " " + file + ":" + line
					} else {
						place += "," + line
					}
					why += c + ": " + checks[c] + "\n"
				}
				x.failures = map[string]string{place: cmp.Or(why, "no reason given")}
			}
			r[m[2]], checks = x, make(map[string]string)
		}
	}
	if bytes.Contains(out, []byte("\npanic: ")) || bytes.Contains(out, []byte("\nfatal error: ")) {
		return nil, fmt.Errorf("it panicked:\n%s", out[max(0, len(out)-8000):])
	}
	return r, nil
}

func byLine(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

// TestMemccapable runs libmemcached's test of what a server can do, in text and in the binary protocol.
func TestMemccapable(t *testing.T) {
	line := regexp.MustCompile(`(?ms)^((?:ascii|binary) [a-z ]+?) {2,}.*?\[(pass|FAIL)\]`)
	suite(t, "memccapable", func(t *testing.T, at target) (results, error) {
		out, err := runTest(".", nil, "memccapable", "-h", "127.0.0.1", "-p", portOf(at.memcached), "-t", "1")
		if err != nil {
			return nil, err
		}
		r := make(results)
		for _, m := range line.FindAllStringSubmatch(string(out), -1) {
			if m[2] == "pass" {
				r[m[1]] = result{state: passed}
			} else {
				r[m[1]] = result{state: failed, failures: map[string]string{m[1]: string(out)}}
			}
		}
		return r, nil
	})
}
