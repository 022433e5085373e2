package otelkvd_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/otelkvd"
	"github.com/kvd-project/kvd/internal/devstore"
)

// secret is in every key and value of these tests, so that any of them that gets into a span or a metric is seen.
const secret = "hunter2"

// rig is a Client whose spans and metrics are kept.
type rig struct {
	t        *testing.T
	options  client.Options
	spans    *tracetest.SpanRecorder
	reader   *metric.ManualReader
	tracer   trace.Tracer // the program's own
	provider *sdktrace.TracerProvider
}

func newRig(t *testing.T, o client.Options) *rig {
	t.Helper()
	r := &rig{t: t, options: o, spans: tracetest.NewSpanRecorder(), reader: metric.NewManualReader()}
	r.provider = sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(r.spans))
	r.tracer = r.provider.Tracer("program")
	if err := otelkvd.Instrument(&r.options,
		otelkvd.Options{TracerProvider: r.provider, MeterProvider: metric.NewMeterProvider(
			metric.WithReader(r.reader))}); err != nil {
		t.Fatal(err)
	}
	return r
}

// store is a Client of a store of its own.
func store(t *testing.T) (*rig, *client.Client) {
	t.Helper()
	s, err := devstore.Start(t.Context(), devstore.Options{CapacityBytes: 64 << 20, Providers: []string{"shm"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	r := newRig(t, client.Options{Directory: s.Directory(), Devices: s.Devices()})
	c, err := client.Open(t.Context(), r.options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return r, c
}

// attrs are attributes by name, as text.
func attrs(list []attribute.KeyValue) map[string]string {
	m := map[string]string{}
	for _, a := range list {
		m[string(a.Key)] = a.Value.Emit()
	}
	return m
}

// check compares the spans that have ended since, in the order in which they ended, with want: name, status and the
// attributes that not all have. All are children of parent, except where want says of which other one.
func (r *rig) check(parent trace.Span, want ...string) {
	r.t.Helper()
	var got []string
	ended := r.spans.Ended()
	names := map[trace.SpanID]string{parent.SpanContext().SpanID(): ""}
	for _, s := range ended {
		names[s.SpanContext().SpanID()] = " in " + s.Name()
	}
	for _, s := range ended {
		if s.InstrumentationScope().Name != otelkvd.Scope {
			continue
		}
		if s.SpanKind() != trace.SpanKindClient || s.EndTime().Before(s.StartTime()) {
			r.t.Errorf("%s: %v from %v to %v", s.Name(), s.SpanKind(), s.StartTime(), s.EndTime())
		}
		in, known := names[s.Parent().SpanID()]
		if !known || s.SpanContext().TraceID() != parent.SpanContext().TraceID() {
			r.t.Errorf("%s is no child of the caller's span", s.Name())
		}
		a := attrs(s.Attributes())
		host, port, _ := net.SplitHostPort(r.options.Directory[0])
		for k, v := range map[string]string{"db.system.name": "kvd", "db.namespace": "default", "server.address": host,
			"server.port": port, "db.operation.name": strings.TrimSuffix(s.Name(), " default")} {
			if a[k] != v {
				r.t.Errorf("%s: %s is %q, want %q", s.Name(), k, a[k], v)
			}
			delete(a, k)
		}
		if n, err := strconv.Atoi(a["kvd.round_trips"]); err != nil || n == 0 && s.Status().Code != codes.Error {
			r.t.Errorf("%s: %q round trips", s.Name(), a["kvd.round_trips"])
		}
		delete(a, "kvd.round_trips")
		line := s.Name() + in
		if s.Status().Code != codes.Unset {
			line += fmt.Sprintf(" %v %q", s.Status().Code, s.Status().Description)
		}
		for _, k := range []string{"db.operation.batch.size", "db.response.status_code", "error.type", "kvd.outcome",
			"kvd.batch.failed"} {
			if v, ok := a[k]; ok {
				line += " " + k + "=" + v
				delete(a, k)
			}
		}
		if len(a) > 0 || len(s.Events()) > 0 {
			r.t.Errorf("%s has %v and events %v, too", s.Name(), a, s.Events())
		}
		got = append(got, line)
	}
	if d := cmp.Diff(want, got); d != "" {
		r.t.Errorf("spans (-want +got):\n%s", d)
	}
	if dump := fmt.Sprintf("%+v", tracetest.SpanStubsFromReadOnlySpans(ended)); strings.Contains(dump, secret) {
		r.t.Errorf("a span has a key or a value: %s", dump)
	}
}

// durations are how many operations the histogram has, by name and error.
func (r *rig) durations() map[string]uint64 {
	r.t.Helper()
	var rm metricdata.ResourceMetrics
	if err := r.reader.Collect(context.Background(), &rm); err != nil {
		r.t.Fatal(err)
	}
	if dump := fmt.Sprintf("%+v", rm); strings.Contains(dump, secret) {
		r.t.Errorf("a metric has a key or a value: %s", dump)
	}
	counts := map[string]uint64{}
	for _, s := range rm.ScopeMetrics {
		for _, m := range s.Metrics {
			h, ok := m.Data.(metricdata.Histogram[float64])
			if !ok || m.Name != "db.client.operation.duration" || m.Unit != "s" {
				r.t.Errorf("metric %s in %q: %T", m.Name, m.Unit, m.Data)
				continue
			}
			for _, p := range h.DataPoints {
				if most := float64(p.Count) * time.Minute.Seconds(); p.Sum <= 0 || p.Sum > most || p.Bounds[0] != 1e-6 {
					r.t.Errorf("%d operations took %v s, from bucket %v on", p.Count, p.Sum, p.Bounds[0])
				}
				a := attrs(p.Attributes.ToSlice())
				if a["db.system.name"] != "kvd" || a["db.namespace"] != "default" || a["server.address"] == "" ||
					a["server.port"] == "" {
					r.t.Errorf("a histogram of %v", a)
				}
				counts[strings.TrimSpace(a["db.operation.name"]+" "+a["error.type"]+
					a["db.response.status_code"])] += p.Count
			}
		}
	}
	return counts
}

func TestOperations(t *testing.T) {
	r, c := store(t)
	ctx, parent := r.tracer.Start(t.Context(), "caller")
	k := func(s string) []byte { return []byte(secret + s) }
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	wants := func(err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Fatalf("%v, want %v", err, want)
		}
	}
	_, err := c.Put(ctx, k("a"), k("1"), client.PutOptions{})
	must(err)
	_, err = c.Get(ctx, k("a"))
	must(err)
	_, err = c.GetInto(ctx, k("none"), make([]byte, 8))
	wants(err, client.ErrNotFound)
	_, err = c.PutIfAbsent(ctx, k("a"), k("2"), client.PutOptions{})
	wants(err, client.ErrExists)
	_, err = c.Update(ctx, k("a"), func(client.Item, bool) (client.Change, error) {
		return client.Change{Value: k("3")}, nil
	})
	must(err)
	_, err = c.Incr(ctx, k("a"), 1)
	wants(err, client.ErrNotInteger)
	c.MultiGet(ctx, [][]byte{k("a"), k("none")})
	c.Do(ctx, []client.Op{{Kind: client.OpGet, Key: k("a")}, {Kind: client.OpPut, Key: k("b"), Value: k("1")},
		{Kind: client.OpPut}})
	must(client.Txn(ctx, c, func(tx *client.Tx) error {
		err := tx.Load(k("a"), k("b"))
		tx.Put(k("a"), k("4"), client.PutOptions{})
		tx.Put(k("b"), k("4"), client.PutOptions{})
		return err
	}))
	for _, err := range c.Scan(ctx, client.ScanOptions{}) {
		must(err)
	}
	own := errors.New("the caller's, of " + secret)
	_, err = c.Update(ctx, k("a"), func(client.Item, bool) (client.Change, error) { return client.Change{}, own })
	wants(err, own)
	_, err = c.Update(ctx, k("a"), func(client.Item, bool) (client.Change, error) {
		return client.Change{Delete: true}, nil
	})
	must(err)
	must(c.Delete(ctx, k("b")))
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	_, err = c.Get(canceled, k("a"))
	wants(err, context.Canceled)
	must(c.Close())
	_, err = c.Put(ctx, k("a"), k("1"), client.PutOptions{})
	wants(err, client.ErrClosed)

	r.check(parent,
		"put default", "get default",
		"get default db.response.status_code=not_found",
		"put default db.response.status_code=exists",
		"update default",
		`update default Error "value is not an integer" error.type=not_integer kvd.outcome=did not happen`,
		"BATCH get default db.operation.batch.size=2",
		`BATCH default Error "invalid argument" db.operation.batch.size=3 error.type=invalid kvd.outcome=happened in part kvd.batch.failed=1`,
		"BATCH get default db.operation.batch.size=2", "transaction default db.operation.batch.size=2",
		"scan default",
		`update default Error "other error" error.type=_OTHER kvd.outcome=did not happen`,
		"delete default in update default", "update default", "delete default",
		`get default Error "context canceled" error.type=canceled kvd.outcome=did not happen`,
		`put default Error "client closed" error.type=closed kvd.outcome=did not happen`,
	)
	if d := cmp.Diff(map[string]uint64{
		"put": 1, "get": 1, "get not_found": 1, "put exists": 1, "update": 2, "update not_integer": 1,
		"update _OTHER": 1, "BATCH get": 2, "BATCH invalid": 1,
		"transaction": 1, "scan": 1, "delete": 2, "get canceled": 1, "put closed": 1,
	}, r.durations()); d != "" {
		t.Errorf("durations (-want +got):\n%s", d)
	}
}

// A store does not lose an answer on demand, so the outcomes that remain are given to the Events as a Client would.
func TestOutcomes(t *testing.T) {
	r := newRig(t, client.Options{Directory: []string{"store.example:7700"}})
	ctx, parent := r.tracer.Start(t.Context(), "caller")
	e := r.options.Events
	lost := fmt.Errorf("put %q: %w: %w", secret, client.ErrUnknownOutcome, client.ErrUnavailable)
	gone := fmt.Errorf("put %q: %w", secret, client.ErrUnavailable)
	for _, ev := range []client.OpEvent{
		{Kind: "put", Err: lost},
		{Kind: "put", Err: gone},
		{Kind: "transaction", Ops: make([]client.Op, 2), Err: lost},
		{Kind: "put", Ops: []client.Op{{Err: gone}, {Err: lost}, {}}},
		{Kind: "delete", Ops: []client.Op{{Err: gone}, {Err: gone}}},
		{Kind: "delete", Ops: []client.Op{{Err: client.ErrNotFound}, {}}},
		{Kind: "no kind of this version", Err: client.ErrFull},
	} {
		ev.Took, ev.Rounds = time.Millisecond, 1
		e.End(e.Begin(ctx, ev), ev)
	}
	for range 2 { // the second one finds what the first has made
		ev := client.OpEvent{Kind: "get", Err: client.ErrForbidden, Took: time.Millisecond}
		e.End(e.Begin(ctx, ev), ev)
	}
	r.check(parent,
		`put default Error "unknown outcome" error.type=unknown_outcome kvd.outcome=may have happened`,
		`put default Error "store unavailable" error.type=unavailable kvd.outcome=did not happen`,
		`transaction default Error "unknown outcome" db.operation.batch.size=2 error.type=unknown_outcome kvd.outcome=may have happened`,
		`BATCH put default Error "store unavailable" db.operation.batch.size=3 error.type=unavailable kvd.outcome=may have happened kvd.batch.failed=2`,
		`BATCH delete default Error "store unavailable" db.operation.batch.size=2 error.type=unavailable kvd.outcome=did not happen kvd.batch.failed=2`,
		"BATCH delete default db.operation.batch.size=2",
		`batch default Error "no memory left" error.type=full kvd.outcome=did not happen`,
		`get default Error "permission denied" error.type=forbidden kvd.outcome=did not happen`,
		`get default Error "permission denied" error.type=forbidden kvd.outcome=did not happen`,
	)
	if n := r.durations()["get forbidden"]; n != 2 {
		t.Errorf("%d operations were forbidden, want 2", n)
	}
}

// Spans that the program does not sample cost no attributes, and operations are measured all the same.
func TestNotSampled(t *testing.T) {
	spans, reader := tracetest.NewSpanRecorder(), metric.NewManualReader()
	r := &rig{t: t, reader: reader, options: client.Options{Directory: []string{"store.example:7700"}}}
	tp := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans), sdktrace.WithSampler(sdktrace.NeverSample()))
	if err := otelkvd.Instrument(&r.options,
		otelkvd.Options{TracerProvider: tp, MeterProvider: metric.NewMeterProvider(metric.WithReader(reader))}); err !=
		nil {
		t.Fatal(err)
	}
	ev := client.OpEvent{Kind: "get", Took: time.Millisecond, Rounds: 1}
	e := r.options.Events
	e.End(e.Begin(t.Context(), ev), ev)
	if n := len(spans.Ended()); n != 0 || r.durations()["get"] != 1 {
		t.Errorf("%d spans and %v, want none and one get", n, r.durations())
	}
}

func TestInstrumentTwice(t *testing.T) {
	o := client.Options{Directory: []string{"[::1]:7700", "b:7700"}, Namespace: "other"}
	if err := otelkvd.Instrument(&o, otelkvd.Options{}); err != nil {
		t.Fatal(err)
	}
	if err := otelkvd.Instrument(&o, otelkvd.Options{}); err == nil {
		t.Error("Events that are there were replaced")
	}
}
