// Package otelkvd makes OpenTelemetry spans and metrics of what a program does with the store: it is a binding of
// client.Events to go.opentelemetry.io/otel. It is a module of its own, so that the client library does without
// OpenTelemetry; the SDK, and where it exports to, are the program's.
//
// Start with [Instrument]. The Events that it sets may be called concurrently, and keep nothing of an operation when
// that is over.
//
// An operation is a span of kind client, a child of the span in the context of the call. It is also a value of the
// histogram db.client.operation.duration. Both are as the semantic conventions for databases have them. Neither has
// keys or values, nor texts of errors, which name keys.
package otelkvd

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/dbconv"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/rdma"
)

// Scope is the name of the tracer and of the meter.
const Scope = "github.com/kvd-project/kvd/client/otelkvd"

// System is db.system.name.
const System = "kvd"

// Attributes that the conventions have no names for.
const (
	// RoundTripsKey counts the round trips to memory nodes that the operation took.
	RoundTripsKey = attribute.Key("kvd.round_trips")
	// OutcomeKey says of an operation with an error.type whether it happened: "did not happen" or "may have
	// happened". It says "happened in part" of several operations if some did.
	OutcomeKey = attribute.Key("kvd.outcome")
	// FailedKey counts those of several operations that have an error; an answer such as "not found" is none.
	FailedKey = attribute.Key("kvd.batch.failed")
)

// bounds are the buckets that the conventions advise, from 1 ms on, and finer ones below: over shm an operation takes a
// microsecond.
var bounds = []float64{1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5,
	10}

// Options choose where spans and metrics go. The zero value takes the global providers.
type Options struct {
	// TracerProvider makes the spans. Default otel.GetTracerProvider().
	TracerProvider trace.TracerProvider
	// MeterProvider takes the metrics. Default otel.GetMeterProvider().
	MeterProvider metric.MeterProvider
}

// Instrument sets c.Events, which must be nil, so that a Client opened with c is traced and measured. The Namespace and
// the first address of the Directory, which stands for the store, become attributes: they have to be set before.
func Instrument(c *client.Options, o Options) error {
	if c.Events != nil {
		return errors.New("otelkvd: Events are set already")
	}
	if o.TracerProvider == nil {
		o.TracerProvider = otel.GetTracerProvider()
	}
	if o.MeterProvider == nil {
		o.MeterProvider = otel.GetMeterProvider()
	}
	hist, err := dbconv.NewClientOperationDuration(
		o.MeterProvider.Meter(Scope, metric.WithSchemaURL(semconv.SchemaURL)),
		metric.WithExplicitBucketBoundaries(bounds...))
	if err != nil {
		return err
	}
	t := &telemetry{tracer: o.TracerProvider.Tracer(Scope, trace.WithSchemaURL(semconv.SchemaURL)), hist: hist.Inst(),
		common: common(c)}
	for _, kind := range []string{"get", "exists", "pin", "put", "delete", "update", "scan", "transaction", "batch"} {
		t.newOp(key{kind: kind})
		t.newOp(key{kind: kind, several: true})
	}
	c.Events = &client.Events{Begin: t.begin, End: t.end}
	return nil
}

// common are the attributes of all spans and metrics of a Client.
func common(c *client.Options) []attribute.KeyValue {
	ns := c.Namespace
	if ns == "" {
		ns = "default"
	}
	as := []attribute.KeyValue{semconv.DBSystemNameKey.String(System), semconv.DBNamespace(ns)}
	if len(c.Directory) == 0 {
		return as // Open refuses that
	}
	host, port, err := net.SplitHostPort(c.Directory[0])
	if err != nil {
		return append(as, semconv.ServerAddress(c.Directory[0]))
	}
	as = append(as, semconv.ServerAddress(host))
	if n, err := strconv.Atoi(port); err == nil {
		as = append(as, semconv.ServerPort(n))
	}
	return as
}

// key is an operation as the conventions name it.
type key struct {
	kind    string // OpEvent.Kind
	several bool
}

// op is what all operations of a key have in common.
type op struct {
	span  string // its name
	start trace.SpanStartOption
	attrs []attribute.KeyValue
	ok    []metric.RecordOption // of an operation without error
	other sync.Map              // of one with an error: []metric.RecordOption, by *class
}

// telemetry is what Instrument makes. ops is not changed afterwards.
type telemetry struct {
	tracer trace.Tracer
	hist   metric.Float64Histogram
	common []attribute.KeyValue
	ops    map[key]*op
}

func (t *telemetry) newOp(k key) {
	name := k.kind
	if k.several && k.kind != "transaction" {
		if name = "BATCH"; k.kind != "batch" {
			name += " " + k.kind
		}
	}
	attrs := append(t.common[:len(t.common):len(t.common)], semconv.DBOperationName(name))
	namespace := t.common[1].Value.AsString()
	if t.ops == nil {
		t.ops = map[key]*op{}
	}
	t.ops[k] = &op{span: name + " " + namespace, start: trace.WithAttributes(attrs...), attrs: attrs,
		ok: []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(attrs...))}}
}

// op is that of an event; one whose kind is not known here counts as a batch.
func (t *telemetry) op(ev *client.OpEvent) *op {
	if o := t.ops[key{ev.Kind, ev.Ops != nil}]; o != nil {
		return o
	}
	return t.ops[key{"batch", ev.Ops != nil}]
}

var clientKind = trace.WithSpanKind(trace.SpanKindClient)

func (t *telemetry) begin(ctx context.Context, ev client.OpEvent) context.Context {
	o := t.op(&ev)
	ctx, span := t.tracer.Start(ctx, o.span, clientKind, o.start)
	if ev.Ops != nil && span.IsRecording() {
		span.SetAttributes(semconv.DBOperationBatchSize(len(ev.Ops)))
	}
	return ctx
}

func (t *telemetry) end(ctx context.Context, ev client.OpEvent) {
	o := t.op(&ev)
	c, failed := classOf(ev.Err), 0
	if ev.Ops != nil && ev.Err == nil {
		c, failed = classOfSeveral(ev.Ops)
	}
	record := o.ok
	if c != nil {
		record = o.failed(c)
	}
	t.hist.Record(ctx, ev.Took.Seconds(), record...)
	span := trace.SpanFromContext(ctx)
	defer span.End()
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(RoundTripsKey.Int(ev.Rounds))
	if failed > 0 {
		span.SetAttributes(FailedKey.Int(failed))
	}
	if c == nil {
		return
	}
	span.SetAttributes(c.attr())
	if c.answer {
		return
	}
	happened := outcome(ev.Err)
	if ev.Ops != nil && ev.Err == nil {
		happened = outcomeOfSeveral(ev.Ops, failed)
	}
	span.SetAttributes(OutcomeKey.String(happened))
	span.SetStatus(codes.Error, c.text)
}

// failed is what a metric of o with an error has.
func (o *op) failed(c *class) []metric.RecordOption {
	if r, ok := o.other.Load(c); ok {
		return r.([]metric.RecordOption)
	}
	r := []metric.RecordOption{
		metric.WithAttributeSet(attribute.NewSet(append(o.attrs[:len(o.attrs):len(o.attrs)], c.attr())...))}
	o.other.Store(c, r)
	return r
}

// class is a kind of error. Its name and its text are fixed: those of errors name keys.
type class struct {
	err    error
	name   string
	text   string // of the span's status
	answer bool   // the operation completed: db.response.status_code, and no error
}

func (c *class) attr() attribute.KeyValue {
	if c.answer {
		return semconv.DBResponseStatusCode(c.name)
	}
	return semconv.ErrorTypeKey.String(c.name)
}

// classes are in the order in which an error is looked for: an unknown outcome has a cause that is among the others.
var classes = []*class{
	{err: client.ErrUnknownOutcome, name: "unknown_outcome", text: "unknown outcome"},
	{err: client.ErrNotFound, name: "not_found", answer: true},
	{err: client.ErrExists, name: "exists", answer: true},
	{err: client.ErrConflict, name: "conflict", answer: true},
	{err: io.ErrShortBuffer, name: "short_buffer", answer: true},
	{err: client.ErrFull, name: "full", text: "no memory left"},
	{err: client.ErrCorrupt, name: "corrupt", text: "corrupt memory"},
	{err: client.ErrWrongType, name: "wrong_type", text: "value is a collection"},
	{err: client.ErrNotInteger, name: "not_integer", text: "value is not an integer"},
	{err: client.ErrOverflow, name: "overflow", text: "increment overflows"},
	{err: client.ErrTxnTooLarge, name: "transaction_too_large", text: "transaction too large"},
	{err: client.ErrTxnContended, name: "transaction_contended", text: "transaction contended"},
	{err: client.ErrInvalid, name: "invalid", text: "invalid argument"},
	{err: client.ErrNoNamespace, name: "no_namespace", text: "unknown namespace"},
	{err: client.ErrForbidden, name: "forbidden", text: "permission denied"},
	{err: client.ErrClosed, name: "closed", text: "client closed"},
	{err: client.ErrUnavailable, name: "unavailable", text: "store unavailable"},
	{err: context.Canceled, name: "canceled", text: "context canceled"},
	{err: context.DeadlineExceeded, name: "deadline_exceeded", text: "context deadline exceeded"},
}

// other is of errors of a caller's own function.
var other = &class{name: "_OTHER", text: "other error"}

// classOf is nil without an error.
func classOf(err error) *class {
	if err == nil {
		return nil
	}
	for _, c := range classes {
		if errors.Is(err, c.err) {
			return c
		}
	}
	return other
}

// classOfSeveral is the class of the first error that is not an answer; nil: there is none. failed is how many there
// are.
func classOfSeveral(ops []client.Op) (first *class, failed int) {
	for i := range ops {
		if c := classOf(ops[i].Err); c != nil && !c.answer {
			if failed++; first == nil {
				first = c
			}
		}
	}
	return first, failed
}

// outcome is OutcomeKey's value.
func outcome(err error) string {
	if client.Outcome(err) == rdma.Unknown {
		return "may have happened"
	}
	return client.Outcome(err).String()
}

func outcomeOfSeveral(ops []client.Op, failed int) string {
	for i := range ops {
		if client.Outcome(ops[i].Err) == rdma.Unknown {
			return "may have happened"
		}
	}
	if failed < len(ops) {
		return "happened in part"
	}
	return rdma.No.String()
}
