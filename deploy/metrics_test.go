package deploy

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"github.com/kvd-project/kvd/internal/testutil"
)

var rewrite = flag.Bool("rewrite", false, "write the table of metrics in docs/metrics.md anew")

// rules is what alerts.yaml uses of Prometheus's format; other keys are mistakes.
type rules struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Alert, Expr         string
			For                 string
			Labels, Annotations map[string]string
		}
	}
}

// dashboard is what Grafana's tests would be about.
type dashboard struct {
	UID        string
	Templating struct {
		List []struct {
			Name  string
			Query json.RawMessage
		}
	}
	Panels []struct {
		ID      int
		Type    string
		Title   string
		GridPos struct{ H, W, X, Y int }
		Targets []struct{ RefID, Expr string }
	}
}

// expressions gives every PromQL expression of the files, by where it stands.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	all := make(map[string]string)
	var r rules
	d := yaml.NewDecoder(strings.NewReader(read(t, "alerts.yaml")))
	d.KnownFields(true)
	if err := d.Decode(&r); err != nil {
		t.Fatal(err)
	}
	for _, g := range r.Groups {
		for _, a := range g.Rules {
			where := "alert " + a.Alert
			if all[where] != "" || !slices.Contains([]string{"info", "warning", "critical"}, a.Labels["severity"]) ||
				a.Annotations["summary"] == "" {
				t.Errorf("%s: twice, or without severity or summary", where)
			}
			if a.For != "" {
				if _, err := model.ParseDuration(a.For); err != nil {
					t.Errorf("%s: for: %v", where, err)
				}
			}
			all[where] = a.Expr
		}
	}
	var b dashboard
	if err := json.Unmarshal([]byte(read(t, "grafana/kvd.json")), &b); err != nil {
		t.Fatal(err)
	}
	ids := make(map[int]bool)
	for _, p := range b.Panels {
		if ids[p.ID] || p.GridPos.X+p.GridPos.W > 24 || (p.Type == "row") != (len(p.Targets) == 0) {
			t.Errorf("panel %q: its id is taken, it does not fit, or it shows nothing", p.Title)
		}
		ids[p.ID] = true
		for _, x := range p.Targets {
			where := fmt.Sprintf("panel %q %s", p.Title, x.RefID)
			if all[where] != "" {
				t.Errorf("%s: twice", where)
			}
			all[where] = strings.ReplaceAll(x.Expr, "$__rate_interval", "5m")
		}
	}
	for _, v := range b.Templating.List {
		var q struct{ Query string }
		if err := json.Unmarshal(v.Query, &q); err != nil {
			continue // the data source's is a text
		}
		if m := regexp.MustCompile(`^label_values\((.*), (\w+)\)$`).FindStringSubmatch(q.Query); m != nil {
			all["variable "+v.Name] = "count by (" + m[2] + ") (" + m[1] + ")"
		} else {
			t.Errorf("variable %s: query %q", v.Name, q.Query)
		}
	}
	return all
}

// selected is what promql prints.
type selected struct {
	Metric string
	Equal  map[string]string
	Labels []string
}

// buildPromQL builds the command promql, which has a module of its own. Its modules are not among those that this one
// downloads: a test is skipped where they do not come by the network, but not in CI.
func buildPromQL(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "promql")
	out, err := goBuild(bin)
	switch {
	case err == nil:
	case noNetwork.MatchString(out) && os.Getenv("CI") == "":
		t.Skipf("Prometheus's parser is not among the modules that are here, and there is no network to get it: go "+
			"-C deploy/promql mod download. %.300s", out)
	default:
		t.Fatalf("build promql: %v\n%s", err, out)
	}
	return bin
}

// goBuild builds promql; out is what the go command says.
func goBuild(bin string, env ...string) (out string, err error) {
	build := exec.Command("go", "build", "-C", "promql", "-o", bin, ".")
	build.Env = append(append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS="), env...)
	b, err := build.CombinedOutput()
	return string(b), err
}

// noNetwork is what the go command, and the git that it may call, say of a network that is not there. A wrong checksum
// is something else.
var noNetwork = regexp.MustCompile(`dial tcp|no such host|module lookup disabled by GOPROXY=off|Couldn't connect to server|Could not resolve host|i/o timeout|TLS handshake timeout|network is unreachable`)

// TestNoNetwork: modules that do not come are told from code that does not compile.
func TestNoNetwork(t *testing.T) {
	for name, proxy := range map[string]string{"refused": "http://127.0.0.1:1", "off": "off"} {
		out, err := goBuild(os.DevNull, "GOFLAGS=-modcacherw", "GOPROXY="+proxy, "GOMODCACHE="+t.TempDir(),
			"GOTOOLCHAIN=local", "GONOSUMDB=*")
		if err == nil || !noNetwork.MatchString(out) {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
	if !noNetwork.MatchString("dial tcp: lookup proxy.example on 192.0.2.53:53: no such host") {
		t.Error("a name that is not found is not taken for a network that is not there")
	}
	for _, out := range []string{"verifying module: checksum mismatch", "./main.go:9:2: undefined: x",
		"go.mod:3: invalid go version", "unknown revision v0.316.0"} {
		if noNetwork.MatchString(out) {
			t.Errorf("%q is taken for a network that is not there", out)
		}
	}
}

// parse has Prometheus's own parser read expressions.
func parse(t *testing.T, exprs []string) [][]selected {
	t.Helper()
	var errs bytes.Buffer
	cmd := exec.Command(buildPromQL(t))
	cmd.Stdin, cmd.Stderr = strings.NewReader(strings.Join(exprs, "\n")), &errs
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &errs)
	}
	var all [][]selected
	for l := range bytes.Lines(out) {
		var s []selected
		if err := json.Unmarshal(l, &s); err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	if len(all) != len(exprs) {
		t.Fatalf("%d answers to %d expressions", len(all), len(exprs))
	}
	return all
}

// served is what a store in one process serves at /metrics after some traffic.
func served(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	at := host(40)
	web := at + ":7480"
	start(t, []string{"XDG_RUNTIME_DIR=" + t.TempDir()}, commands(t)+"/kvd", "dev", "--memory=64MiB", "--listen="+at+
		":7400",
		"--redis="+at+":6379", "--memcached="+at+":11211", "--http="+web)
	throughGateway(t, at)
	conn, err := net.DialTimeout("tcp", at+":6379", patience)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	_, err = io.WriteString(conn, "SELECT 1\r\nGET nothing\r\nSET a b\r\nINCR a\r\nQUIT\r\n")
	if err == nil {
		_, err = io.ReadAll(conn)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true}}
	end := byTCP(t, at+":7400", "default")
	families := scrapeOf(t, &c, "http://"+web)
	end()
	for name, f := range servedTLS(t) {
		if strings.HasPrefix(name, "kvd_tls_") {
			families[name] = f
		}
	}
	s := newTried(t, 200)
	s.directory(1)
	s.memnode(1)
	s.kvctl("", "namespace", "create", "default", "--bytes", "16MiB")
	s.archive(t.TempDir())
	testutil.Until(t, "a snapshot", func() bool {
		all := scrapeOf(t, &c, "http://"+s.web["a1"])
		maps.DeleteFunc(all, func(name string, _ *dto.MetricFamily) bool {
			return !strings.HasPrefix(name, "kvd_archive_")
		})
		maps.Copy(families, all)
		return all["kvd_archive_last_success_timestamp_seconds"] != nil
	})
	// Machines of tests have no adapter.
	root := t.TempDir()
	count(t, root, "packet_seq_err", 1)
	maps.Copy(families, scrapeOf(t, &c, "http://"+adapters(t, root)))
	return families
}

func scrapeOf(t *testing.T, c *http.Client, url string) map[string]*dto.MetricFamily {
	t.Helper()
	r, err := c.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	p := expfmt.NewTextParser(model.UTF8Validation)
	families, err := p.TextToMetricFamilies(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// servedTLS is what a directory node serves over TLS.
func servedTLS(t *testing.T) map[string]*dto.MetricFamily {
	t.Helper()
	s := newTried(t, 45)
	_, flags, conf := secured(t, host(46), 30)
	s.directory(1, flags...)
	c := http.Client{Timeout: patience, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: conf}}
	return scrapeOf(t, &c, "https://"+s.web["d1"])
}

// series gives the metrics that a family is queried as.
func series(f *dto.MetricFamily) []string {
	switch f.GetType() {
	case dto.MetricType_HISTOGRAM:
		return []string{f.GetName() + "_bucket", f.GetName() + "_sum", f.GetName() + "_count"}
	case dto.MetricType_SUMMARY:
		return []string{f.GetName(), f.GetName() + "_sum", f.GetName() + "_count"}
	}
	return []string{f.GetName()}
}

// Alerts and dashboard ask for what there is: every expression is PromQL, and every metric,
// label and value that it names is served.
func TestExpressions(t *testing.T) {
	exprs := expressions(t)
	if len(exprs) < 50 {
		t.Fatalf("%d expressions", len(exprs))
	}
	where := slices.Sorted(maps.Keys(exprs))
	var list []string
	for _, w := range where {
		list = append(list, strings.ReplaceAll(exprs[w], "\n", " "))
	}
	values := make(map[string]map[string]map[string]bool) // metric, label, value
	for _, f := range served(t) {
		for _, name := range series(f) {
			values[name] = make(map[string]map[string]bool)
			for _, m := range f.GetMetric() {
				for _, l := range m.GetLabel() {
					if values[name][l.GetName()] == nil {
						values[name][l.GetName()] = make(map[string]bool)
					}
					values[name][l.GetName()][l.GetValue()] = true
				}
			}
		}
	}
	for i, selectors := range parse(t, list) {
		for _, s := range selectors {
			labels := values[s.Metric]
			if labels == nil {
				t.Errorf("%s: there is no metric %s", where[i], s.Metric)
				continue
			}
			for _, l := range s.Labels {
				// Prometheus adds the first two; the third is the buckets'.
				if l != "job" && l != "instance" && l != "le" && labels[l] == nil {
					t.Errorf("%s: %s has no label %s", where[i], s.Metric, l)
				}
			}
			for l, v := range s.Equal {
				if !strings.Contains(v, "$") && !labels[l][v] {
					t.Errorf("%s: %s has no series with %s=%q", where[i], s.Metric, l, v)
				}
			}
		}
	}
}

// The table in docs/metrics.md lists what is served, with its labels, and nothing else.
func TestMetricsAreDocumented(t *testing.T) {
	var want []string
	for name, f := range served(t) {
		if !strings.HasPrefix(name, "kvd_") {
			continue
		}
		if f.GetHelp() == "" {
			t.Errorf("%s has no help text", name)
		}
		if unit := regexp.MustCompile(`(_ms|_millis\w*|_nanos\w*|_units\w*|_kb|_mb)$`).FindString(name); unit != "" {
			t.Errorf("%s: want seconds and bytes", name)
		}
		if strings.HasSuffix(name, "_total") != (f.GetType() == dto.MetricType_COUNTER) {
			t.Errorf("%s is a %v", name, f.GetType())
		}
		want = append(want, row(f))
	}
	slices.Sort(want)
	const doc = "../docs/metrics.md"
	table := regexp.MustCompile("(?m)(^\\| `kvd_.*\n)+")
	if *rewrite {
		text := table.ReplaceAllLiteralString(read(t, doc), strings.Join(want, "\n")+"\n")
		if err := os.WriteFile(doc, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rows := table.FindString(read(t, doc))
	if rows == "" {
		t.Fatalf("%s has no table of metrics", doc)
	}
	got := strings.Split(strings.TrimSpace(rows), "\n")
	for _, w := range want {
		if !slices.Contains(got, w) {
			t.Errorf("docs/metrics.md lacks\n%s", w)
		}
	}
	for _, g := range got {
		if !slices.Contains(want, g) {
			t.Errorf("docs/metrics.md has, but is not served like that:\n%s", g)
		}
	}
}

// row is a metric's line in the documentation.
func row(f *dto.MetricFamily) string {
	labels := make(map[string]bool)
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			labels[l.GetName()] = true
		}
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s |", f.GetName(), strings.ToLower(f.GetType().String()),
		strings.Join(slices.Sorted(maps.Keys(labels)), ", "), f.GetHelp())
}
