// Package otlp exports what a process does by OTLP, the protocol of OpenTelemetry. It exports as spans the commands
// that its servers answer. It also exports its metrics, which are those for Prometheus.
//
// It leaves queues, retries, connections and most of the variables OTEL_* to OpenTelemetry's SDK. Only a kvd with the
// tag otel links it: the SDK and its exporters have some 2 MB.
//
// Start with [Open]; methods of the Exporter may be called concurrently. A collector that is slow, or gone, costs spans
// and nothing else. Spans wait in a queue of OTEL_BSP_MAX_QUEUE_SIZE, and those that do not fit are dropped.
package otlp

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvd-project/kvd/internal/netsrv"
)

// Scope is the name of the tracer.
const Scope = "github.com/kvd-project/kvd/gateway"

// closeTime is how long Close waits for what has not been exported.
const closeTime = 2 * time.Second

// troubleEvery is how often trouble with the collector is logged, at most.
const troubleEvery = time.Minute

// exporter is what Open makes.
type exporter struct {
	log    *slog.Logger
	tracer trace.Tracer                  // nil: no spans are exported
	ends   []func(context.Context) error // they export the rest
	names  sync.Map                      // *operation by operationKey
	share  float64                       // of the commands for which the SDK is asked for a span

	made, exported, failed atomic.Uint64 // spans
	told                   atomic.Int64  // Unix ns of the last trouble that was logged
}

// Open begins to export. service and version are service.name and service.version, unless OTEL_SERVICE_NAME or
// OTEL_RESOURCE_ATTRIBUTES say otherwise; log receives trouble with the collector. Variables that it cannot follow are
// errors; a collector that cannot be reached is none.
func Open(ctx context.Context, service, version string, metrics prometheus.Gatherer, log *slog.Logger) (
	_ netsrv.Exporter, err error) {
	e := &exporter{log: log}
	withSpans, withMetrics, err := checkVariables()
	if err != nil {
		return nil, err
	}
	// These are the process's, which exports once.
	otel.SetErrorHandler(otel.ErrorHandlerFunc(e.trouble))
	otel.SetLogger(logr.FromSlogHandler(log.Handler()))
	// No resource.WithProcess: command lines may have a password.
	res, err := resource.New(ctx, resource.WithService(), resource.WithAttributes(semconv.ServiceName(service),
		semconv.ServiceVersion(version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.Close())
		}
	}()
	if withSpans {
		x, err := otlptracegrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("exporter of spans: %w", err)
		}
		// The SDK would go on without a sampler that it does not know.
		var refused []error
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { refused = append(refused, err) }))
		options := []sdktrace.TracerProviderOption{sdktrace.WithResource(res), sdktrace.WithBatcher(counted{x, e})}
		if e.share = shareOf(os.Getenv("OTEL_TRACES_SAMPLER"), os.Getenv("OTEL_TRACES_SAMPLER_ARG")); e.share < 1 {
			options = append(options, sdktrace.WithSampler(sdktrace.AlwaysSample())) // of those that it is asked for
		}
		p := sdktrace.NewTracerProvider(options...)
		otel.SetErrorHandler(otel.ErrorHandlerFunc(e.trouble)) // nothing is exported yet
		e.ends = append(e.ends, p.Shutdown)
		if len(refused) > 0 {
			return nil, fmt.Errorf("OTEL_TRACES_SAMPLER or OTEL_TRACES_SAMPLER_ARG: %w", errors.Join(refused...))
		}
		e.tracer = p.Tracer(Scope, trace.WithInstrumentationVersion(version), trace.WithSchemaURL(semconv.SchemaURL))
	}
	if withMetrics {
		x, err := otlpmetricgrpc.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("exporter of metrics: %w", err)
		}
		p := metric.NewMeterProvider(metric.WithResource(res),
			metric.WithReader(
				metric.NewPeriodicReader(
					x, metric.WithProducer(bridge.NewMetricProducer(bridge.WithGatherer(metrics))))))
		e.ends = append(e.ends, p.Shutdown)
	}
	log.Info("exports by OTLP", "spans", withSpans, "metrics", withMetrics)
	return e, nil
}

// shareOf is the share of commands that a sampler of the SDK takes. Each command is the root of a trace of its own, so
// chance alone decides, and asking the SDK costs more than many a command does. 1 leaves it to the SDK, which knows
// whether the values are wrong.
func shareOf(sampler, arg string) float64 {
	switch strings.TrimPrefix(strings.ToLower(strings.TrimSpace(sampler)), "parentbased_") {
	case "always_off":
		return 0
	case "traceidratio":
		if r, err := strconv.ParseFloat(strings.TrimSpace(arg), 64); err == nil && r >= 0 && r < 1 {
			return r
		}
	}
	return 1
}

// checkVariables refuses what the SDK would pass over, or do otherwise than asked, and tells which signals are
// exported.
func checkVariables() (spans, metrics bool, err error) {
	var errs []error
	check := func(name, want string, ok func(v string) bool) {
		if v := os.Getenv(name); v != "" && !ok(v) {
			errs = append(errs, fmt.Errorf("%s: %q, want %s", name, v, want))
		}
	}
	number := func(v string) bool {
		n, err := strconv.Atoi(v)
		return err == nil && n > 0
	}
	for _, name := range []string{"OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
		"OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT",
		"OTEL_METRIC_EXPORT_INTERVAL", "OTEL_METRIC_EXPORT_TIMEOUT"} {
		check(name, "a number > 0", number)
	}
	check("OTEL_SDK_DISABLED", "true or false", func(v string) bool {
		return strings.EqualFold(v, "true") || strings.EqualFold(v, "false")
	})
	for _, signal := range []string{"", "TRACES_", "METRICS_"} {
		check("OTEL_EXPORTER_OTLP_"+signal+"TIMEOUT", "a number of milliseconds > 0", number)
		check("OTEL_EXPORTER_OTLP_"+signal+"COMPRESSION", "gzip or none", func(v string) bool {
			return v == "gzip" || v == "none"
		})
		check("OTEL_EXPORTER_OTLP_"+signal+"PROTOCOL", "grpc", func(v string) bool { return v == "grpc" })
		check("OTEL_EXPORTER_OTLP_"+signal+"ENDPOINT", "http://HOST:PORT, or https:// for TLS", func(v string) bool {
			u, err := url.Parse(v)
			return err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https")
		})
		for _, file := range []string{"CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"} {
			check("OTEL_EXPORTER_OTLP_"+signal+file, "a PEM file that can be read", func(v string) bool {
				b, err := os.ReadFile(v)
				block, _ := pem.Decode(b)
				return err == nil && block != nil
			})
		}
	}
	exports := func(signal string) bool {
		check("OTEL_"+signal+"_EXPORTER", "otlp or none", func(v string) bool { return v == "otlp" || v == "none" })
		return os.Getenv("OTEL_"+signal+"_EXPORTER") != "none" && !strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"),
			"true")
	}
	spans, metrics = exports("TRACES"), exports("METRICS")
	return spans, metrics, errors.Join(errs...)
}

// trouble logs an error of the SDK, now and then: while a collector is gone there is one every few seconds.
func (e *exporter) trouble(err error) {
	now, last := time.Now().UnixNano(), e.told.Load()
	if last != 0 && now-last < int64(troubleEvery) || !e.told.CompareAndSwap(last, now) {
		return
	}
	e.log.Warn("OTLP: not all is exported", "err", err, "spans", e.made.Load(), "exported", e.exported.Load())
}

// Close exports what it can of the rest in a moment.
func (e *exporter) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	errs := make([]error, len(e.ends))
	var wg sync.WaitGroup
	for i, end := range e.ends {
		wg.Go(func() { errs[i] = end(ctx) })
	}
	wg.Wait()
	// Its own end must not fail a process because of its collector.
	if err := errors.Join(errs...); err != nil || e.exported.Load() < e.made.Load() {
		e.log.Warn("OTLP: not all was exported", "err", err, "spans", e.made.Load(), "exported", e.exported.Load())
	}
	return nil
}

// Spans are counts of spans: made, exported, and refused by the collector. The others wait, or were dropped.
func (e *exporter) Spans() (made, exported, failed uint64) {
	exported, failed = e.exported.Load(), e.failed.Load()
	return e.made.Load(), exported, failed
}

// counted counts the spans that go to the collector.
type counted struct {
	sdktrace.SpanExporter
	e *exporter
}

func (c counted) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	err := c.SpanExporter.ExportSpans(ctx, spans)
	if err != nil {
		c.e.failed.Add(uint64(len(spans)))
	} else {
		c.e.exported.Add(uint64(len(spans)))
	}
	return err
}

// operationKey is a command of a protocol in a database. There are as many as commands, which are a server's own, and
// databases.
type operationKey struct{ protocol, command, database string }

// operation is what all spans of an operationKey have.
type operation struct {
	span  string // its name
	start trace.SpanStartOption
}

var serverKind = trace.WithSpanKind(trace.SpanKindServer)

// Answered makes a span of a command that has just been answered.
func (e *exporter) Answered(protocol string, a netsrv.Answered) {
	if e.tracer == nil || e.share < 1 && rand.Float64() >= e.share {
		return
	}
	end := time.Now()
	o := e.operation(operationKey{protocol, a.Command, a.Database})
	_, span := e.tracer.Start(context.Background(), o.span, serverKind, o.start, trace.WithTimestamp(end.Add(-a.Took)))
	if !span.IsRecording() {
		return
	}
	e.made.Add(1)
	span.SetAttributes(peer(a.Client)...)
	if a.Error != "" {
		outcome := "did not happen"
		if a.Unknown {
			outcome = "may have happened"
		}
		span.SetAttributes(semconv.ErrorTypeKey.String(a.Error), attribute.String("kvd.outcome", outcome))
		span.SetStatus(codes.Error, a.Error)
	}
	span.End(trace.WithTimestamp(end))
}

func (e *exporter) operation(k operationKey) *operation {
	if o, ok := e.names.Load(k); ok {
		return o.(*operation)
	}
	o := &operation{span: k.command + " " + k.database,
		start: trace.WithAttributes(semconv.DBSystemNameKey.String("kvd"),
			semconv.DBNamespace(k.database), semconv.DBOperationName(k.command),
			semconv.NetworkProtocolName(k.protocol))}
	e.names.Store(k, o)
	return o
}

// peer is where a command came from.
func peer(a net.Addr) []attribute.KeyValue {
	if a == nil {
		return nil
	}
	if !slices.Contains([]string{"tcp", "tcp4", "tcp6"}, a.Network()) {
		return []attribute.KeyValue{semconv.NetworkTransportKey.String(a.Network())}
	}
	as := []attribute.KeyValue{semconv.NetworkTransportTCP}
	host, port, err := net.SplitHostPort(a.String())
	if err != nil {
		return as
	}
	as = append(as, semconv.ClientAddress(host))
	if n, err := strconv.Atoi(port); err == nil {
		as = append(as, semconv.ClientPort(n))
	}
	return as
}
