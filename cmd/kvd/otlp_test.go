package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	collectormetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	collectortrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/kvd-project/kvd/internal/otlp"
	"github.com/kvd-project/kvd/internal/testutil"
)

// withOTLP makes this program, run as kvd, one with the tag otel.
const withOTLP = "KVD_TEST_OTLP"

func init() {
	if os.Getenv(withOTLP) != "" {
		openExporter = otlp.Open
	}
}

// collector is a fake one: it keeps what it is sent, or never answers.
type collector struct {
	collectortrace.UnimplementedTraceServiceServer
	collectormetrics.UnimplementedMetricsServiceServer
	hang chan struct{} // nil: it answers; until it is closed it does not
	mu   struct {
		sync.Mutex
		spans    []*tracepb.ResourceSpans
		metrics  map[string]bool
		text     []string      // of all that came
		asked    int           // requests with spans
		more     chan struct{} // closed when anything comes
		metadata string
	}
}

// metricsHalf is the half of a collector that takes metrics: both have a method Export.
type metricsHalf struct {
	collectormetrics.UnimplementedMetricsServiceServer
	c *collector
}

func startCollector(t *testing.T, hangs bool) (c *collector, endpoint string) {
	t.Helper()
	c = &collector{}
	c.mu.metrics, c.mu.more = map[string]bool{}, make(chan struct{})
	if hangs {
		c.hang = make(chan struct{})
	}
	lis := testutil.Listen(t)
	s := grpc.NewServer()
	collectortrace.RegisterTraceServiceServer(s, c)
	collectormetrics.RegisterMetricsServiceServer(s, metricsHalf{c: c})
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Serve(lis); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		if hangs {
			close(c.hang)
		}
		s.Stop()
		wg.Wait()
	})
	return c, "OTEL_EXPORTER_OTLP_ENDPOINT=http://" + lis.Addr().String()
}

func (c *collector) came(text string) {
	c.mu.text = append(c.mu.text, text)
	close(c.mu.more)
	c.mu.more = make(chan struct{})
}

func (c *collector) Export(_ context.Context, r *collectortrace.ExportTraceServiceRequest) (
	*collectortrace.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	c.mu.spans = append(c.mu.spans, r.GetResourceSpans()...)
	c.mu.asked++
	c.came(r.String())
	c.mu.Unlock()
	if c.hang != nil {
		<-c.hang
	}
	return &collectortrace.ExportTraceServiceResponse{}, nil
}

func (m metricsHalf) Export(_ context.Context, r *collectormetrics.ExportMetricsServiceRequest) (
	*collectormetrics.ExportMetricsServiceResponse, error) {
	m.c.mu.Lock()
	for _, rm := range r.GetResourceMetrics() {
		for _, sm := range rm.GetScopeMetrics() {
			for _, x := range sm.GetMetrics() {
				m.c.mu.metrics[x.GetName()] = true
			}
		}
	}
	m.c.came(r.String())
	m.c.mu.Unlock()
	if m.c.hang != nil {
		<-m.c.hang
	}
	return &collectormetrics.ExportMetricsServiceResponse{}, nil
}

// until waits for what is true under the collector's lock.
func (c *collector) until(t *testing.T, what string, is func() bool) {
	t.Helper()
	late := time.After(patience)
	for {
		c.mu.Lock()
		done, more := is(), c.mu.more
		c.mu.Unlock()
		if done {
			return
		}
		select {
		case <-more:
		case <-late:
			t.Fatalf("the collector has no %s: %q", what, c.lines())
		}
	}
}

// attributes are attributes by name, as text.
func attributes(list []*common.KeyValue) map[string]string {
	m := map[string]string{}
	for _, a := range list {
		switch v := a.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			m[a.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			m[a.GetKey()] = fmt.Sprint(v.IntValue)
		default:
			m[a.GetKey()] = a.GetValue().String()
		}
	}
	return m
}

// lines are the spans, in the order in which they began: protocol, name, and the error and its outcome.
func (c *collector) lines() (lines []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []*tracepb.Span
	for _, rs := range c.mu.spans {
		for _, ss := range rs.GetScopeSpans() {
			all = append(all, ss.GetSpans()...)
		}
	}
	slices.SortStableFunc(all, func(a, b *tracepb.Span) int {
		return int(int64(a.GetStartTimeUnixNano()) - int64(b.GetStartTimeUnixNano()))
	})
	for _, s := range all {
		a := attributes(s.GetAttributes())
		line := a["network.protocol.name"] + " " + s.GetName()
		if a["error.type"] != "" {
			line += " " + a["error.type"] + ", " + a["kvd.outcome"] + ", " + s.GetStatus().GetCode().String()
		}
		if a["db.system.name"] != "kvd" || a["db.operation.name"]+" "+a["db.namespace"] != s.GetName() ||
			a["client.address"] != "127.0.0.1" || a["client.port"] == "" ||
			s.GetKind() != tracepb.Span_SPAN_KIND_SERVER || s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano() ||
			len(s.GetParentSpanId()) != 0 || len(s.GetEvents()) != 0 {
			line += fmt.Sprintf(": %v", s)
		}
		lines = append(lines, line)
	}
	return lines
}

// gatewayFor starts a store, and tells what starts a gateway of it that exports.
func gatewayFor(t *testing.T) (startGateway func(t *testing.T, env ...string) *process) {
	env, _ := runtimeDir(t)
	d := start(t, env, "dev", "--listen=127.0.0.1:0", "--memory=64MiB", "--redis=off", "--memcached=off", "--http=off")
	env = append(env, withOTLP+"=1", "OTEL_BSP_SCHEDULE_DELAY=10", "OTEL_METRIC_EXPORT_INTERVAL=50")
	return func(t *testing.T, more ...string) *process {
		t.Helper()
		return start(t, slices.Concat(env, more), "gateway", "--otlp", "--directory="+d.kv["directory"],
			"--listen=127.0.0.1:0", "--listen-memcached=127.0.0.1:0",
			"--listen-peers=off", "--http-listen=127.0.0.1:0", "--insecure", "--password=hunter2")
	}
}

// The commands of a gateway are spans, and its metrics are exported; neither has keys, values or passwords.
func TestOTLP(t *testing.T) {
	c, endpoint := startCollector(t, false)
	p := gatewayFor(t)(t, endpoint, "OTEL_RESOURCE_ATTRIBUTES=deployment.environment.name=trial")
	if got := redis(t, "tcp", p.kv["redis"], nil, "AUTH hunter2", "SET hunter2key hunter2value", "GET hunter2key",
		"HGET hunter2key f", "HUNTER2 hunter2key", "MULTI", "INCR hunter2n", "EXEC"); !strings.HasPrefix(
		got, "+OK +OK $12 hunter2value -WRONGTYPE ") {
		t.Errorf("replies: %q", got)
	}
	if got := memcachedSay(t, p.kv["memcached"], "get hunter2key\r\nhunter2\r\n", 4); got !=
		"VALUE hunter2key 0 12 hunter2value END ERROR" {
		t.Errorf("memcached's protocol: %q", got)
	}
	want := []string{"redis auth cache", "redis set cache", "redis get cache",
		"redis hget cache WRONGTYPE, did not happen, STATUS_CODE_ERROR",
		"redis unknown cache ERR, did not happen, STATUS_CODE_ERROR", "redis multi cache", "redis incr cache",
		"redis exec cache", "memcached get cache", "memcached unknown cache client_error, did not happen, " +
			"STATUS_CODE_ERROR"}
	c.until(t, "spans of all commands", func() bool {
		n := 0
		for _, rs := range c.mu.spans {
			for _, ss := range rs.GetScopeSpans() {
				n += len(ss.GetSpans())
			}
		}
		return n >= len(want)
	})
	got := c.lines()
	slices.Sort(got) // those of a transaction begin together
	slices.Sort(want)
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("spans (-want +got):\n%s", d)
	}
	c.until(t, "metrics", func() bool {
		return c.mu.metrics["kvd_gateway_commands_total"] && c.mu.metrics["kvd_client_operations_total"] &&
			c.mu.metrics["kvd_gateway_command_seconds"]
	})
	wantPage(t, p.kv["http"], "/metrics", 200, fmt.Sprintf(`kvd_otlp_spans_total{state="made"} %d`, len(want)))
	redis(t, "tcp", p.kv["redis"], nil, "AUTH hunter2", "TIME")
	if code := p.stop(syscall.SIGTERM); code != 0 {
		t.Errorf("exit status %d, want 0", code)
	}
	if got := c.lines(); !slices.Contains(got, "redis time cache") {
		t.Errorf("the last commands before the end are not among %q", got)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	a := attributes(c.mu.spans[0].GetResource().GetAttributes())
	if a["service.name"] != "kvd-gateway" || a["service.version"] == "" || a["service.instance.id"] == "" ||
		a["deployment.environment.name"] != "trial" || a["process.pid"] == "" {
		t.Errorf("resource: %v", a)
	}
	if all := strings.ToLower(strings.Join(c.mu.text, "\n")); strings.Contains(all, "hunter2") {
		t.Errorf("a key, a value or a password was exported: %.3000s", all)
	}
}

// A collector that does not answer, or is not there, costs spans and nothing else.
func TestOTLPCollectorGone(t *testing.T) {
	startGateway := gatewayFor(t)
	hanging, endpoint := startCollector(t, true)
	gone := "OTEL_EXPORTER_OTLP_ENDPOINT=http://" + freeAddr(t)
	for name, endpoint := range map[string]string{"hangs": endpoint, "gone": gone} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // a gateway ends when it has waited for its collector
			p := startGateway(t, endpoint, "OTEL_BSP_MAX_QUEUE_SIZE=8", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=4")
			if got := redis(t, "tcp", p.kv["redis"], nil, "AUTH hunter2", "SET k v"); got != "+OK +OK" {
				t.Fatal(got)
			}
			if name == "hangs" { // and is asked: from now on nothing leaves the queue
				hanging.until(t, "request", func() bool { return hanging.mu.asked > 0 })
			}
			commands := append([]string{"AUTH hunter2"}, slices.Repeat([]string{"GET k"}, 1000)...)
			if got := redis(t, "tcp", p.kv["redis"], nil, commands...); strings.Count(got, "$1 v") != 1000 {
				t.Errorf("1000 GETs: %.200s", got)
			}
			wantPage(t, p.kv["http"], "/metrics", 200, `kvd_otlp_spans_total{state="exported"} 0`,
				`kvd_otlp_spans_total{state="made"} 1003`)
			if code := p.stop(syscall.SIGTERM); code != 0 {
				t.Errorf("exit status %d, want 0", code)
			}
			if !p.stderr.holds("not all was exported") {
				t.Errorf("it does not say that spans were lost: %s", p.stderr)
			}
		})
	}
}

// A share of the commands is sampled. Chance decides: 4,000 of them have 1,000 ± 27.
func TestOTLPSampled(t *testing.T) {
	startGateway := gatewayFor(t)
	c, endpoint := startCollector(t, false)
	for _, sampler := range []string{"traceidratio", "parentbased_traceidratio"} {
		p := startGateway(t, endpoint, "OTEL_TRACES_SAMPLER="+sampler, "OTEL_TRACES_SAMPLER_ARG=0.25")
		commands := append([]string{"AUTH hunter2"}, slices.Repeat([]string{"GET k"}, 4000)...)
		if got := redis(t, "tcp", p.kv["redis"], nil, commands...); strings.Count(got, "(nil)") != 4000 &&
			strings.Count(got, "$-1") != 4000 {
			t.Fatalf("%.200q", got)
		}
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("exit status %d, want 0", code)
		}
		spans := len(c.lines())
		c.mu.Lock()
		c.mu.spans = nil
		c.mu.Unlock()
		if spans < 800 || spans > 1200 {
			t.Errorf("%s: %d spans of 4,000 commands, want a quarter", sampler, spans)
		}
	}
}

// A gateway that is to export nothing, or metrics alone, serves as ever.
func TestOTLPLess(t *testing.T) {
	startGateway := gatewayFor(t)
	c, endpoint := startCollector(t, false)
	for _, variable := range []string{"OTEL_SDK_DISABLED=true", "OTEL_TRACES_SAMPLER=always_off",
		"OTEL_TRACES_EXPORTER=none"} {
		p := startGateway(t, endpoint, variable)
		if got := redis(t, "tcp", p.kv["redis"], nil, "AUTH hunter2", "SET k v"); got != "+OK +OK" {
			t.Fatal(got)
		}
		wantPage(t, p.kv["http"], "/metrics", 200, `kvd_otlp_spans_total{state="made"} 0`)
		if code := p.stop(syscall.SIGTERM); code != 0 {
			t.Errorf("%s: exit status %d, want 0", variable, code)
		}
		c.mu.Lock()
		if spans, metrics := len(c.mu.spans), len(c.mu.metrics); spans > 0 ||
			(metrics == 0) != (variable == "OTEL_SDK_DISABLED=true") {
			t.Errorf("%s: %d spans and %d metrics were exported", variable, spans, metrics)
		}
		c.mu.Unlock()
	}
}

// Variables and settings that cannot be followed are refused by a line that names them.
func TestOTLPRefusals(t *testing.T) {
	env, _ := runtimeDir(t)
	for setting, want := range map[string]string{
		"": "otlp: this kvd was built without OpenTelemetry; make build-otel makes bin/otel/kvd, which has it",
		"OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf":          `OTEL_EXPORTER_OTLP_PROTOCOL: "http/protobuf", want grpc`,
		"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json":       `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: "http/json", want grpc`,
		"OTEL_EXPORTER_OTLP_ENDPOINT=collector:4317":         `OTEL_EXPORTER_OTLP_ENDPOINT: "collector:4317", want http://HOST:PORT, or https:// for TLS`,
		"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=ftp://a":        `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT: "ftp://a", want http://HOST:PORT, or https:// for TLS`,
		"OTEL_BSP_MAX_QUEUE_SIZE=many":                       `OTEL_BSP_MAX_QUEUE_SIZE: "many", want a number > 0`,
		"OTEL_EXPORTER_OTLP_COMPRESSION=br":                  `OTEL_EXPORTER_OTLP_COMPRESSION: "br", want gzip or none`,
		"OTEL_SDK_DISABLED=perhaps":                          `OTEL_SDK_DISABLED: "perhaps", want true or false`,
		"OTEL_TRACES_EXPORTER=zipkin":                        `OTEL_TRACES_EXPORTER: "zipkin", want otlp or none`,
		"OTEL_RESOURCE_ATTRIBUTES=no pairs":                  "OTEL_RESOURCE_ATTRIBUTES: ",
		"OTEL_EXPORTER_OTLP_CERTIFICATE=/nonexistent/ca.pem": `OTEL_EXPORTER_OTLP_CERTIFICATE: "/nonexistent/ca.pem", want a PEM file that can be read`,
		"OTEL_TRACES_SAMPLER=sometimes":                      "OTEL_TRACES_SAMPLER or OTEL_TRACES_SAMPLER_ARG: ",
	} {
		with := env
		if setting != "" {
			with = append(env[:len(env):len(env)], withOTLP+"=1", setting)
		}
		p := spawn(t, with, "gateway", "--otlp", "--directory=127.0.0.1:1", "--listen=127.0.0.1:0",
			"--listen-memcached=off")
		if code := p.wait(); code != exitUsage || !p.stderr.holds("kvd: "+want) {
			t.Errorf("%s: exit status %d, %s, want %q", setting, code, p.stderr, want)
		}
	}
}
