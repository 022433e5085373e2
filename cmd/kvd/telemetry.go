package main

import (
	"context"
	"errors"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvd-project/kvd/internal/netsrv"
)

// openExporter is otlp.Open in a kvd with the tag otel; nil: OpenTelemetry's SDK is left out, which would not fit into
// the size that kvd may have.
var openExporter func(ctx context.Context, service, version string, metrics prometheus.Gatherer, log *slog.Logger) (
	netsrv.Exporter, error)

var errNoExporter = usageError{errors.New("otlp: this kvd was built without OpenTelemetry; make build-otel makes " +
	"bin/otel/kvd, which has it")}

// telemetry exports what a role does; nil: nothing does. reg has the metrics that it exports.
type telemetry struct {
	netsrv.Exporter
	reg *prometheus.Registry
}

// telemetryOf exports a role's metrics if on says so, and gives what its servers tell of commands.
func telemetryOf(ctx context.Context, on bool, role string, log *slog.Logger) (*telemetry, error) {
	if !on {
		return nil, nil
	}
	if openExporter == nil {
		return nil, errNoExporter
	}
	t := &telemetry{reg: prometheus.NewRegistry()}
	var err error
	if t.Exporter, err = openExporter(ctx, "kvd-"+role, versionText(), t.reg, log); err != nil {
		return nil, usageError{err}
	}
	return t, nil
}

// answered is for a server's Options.Answered. database is the namespace of a server that does not name it; nil: of
// commands nothing is told.
func (t *telemetry) answered(protocol, database string) func(netsrv.Answered) {
	if t == nil {
		return nil
	}
	return func(a netsrv.Answered) {
		if a.Database == "" {
			a.Database = database
		}
		t.Answered(protocol, a)
	}
}

// export adds metrics to those that are exported, and gives them with those of the exporter itself.
func (t *telemetry) export(cs []prometheus.Collector) ([]prometheus.Collector, error) {
	if t == nil {
		return cs, nil
	}
	cs = append(cs, t.collectors()...)
	for _, c := range cs {
		if err := t.reg.Register(c); err != nil {
			return nil, err
		}
	}
	return cs, nil
}

// collectors tell how much the collector took: those made that are neither exported nor failed wait, or were dropped.
func (t *telemetry) collectors() (cs []prometheus.Collector) {
	for i, state := range []string{"made", "exported", "failed"} {
		cs = append(cs, prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: "kvd_otlp_spans_total",
				Help: "Spans of commands: made, taken by the collector, and refused by it or lost on the way " +
					"to it.",
				ConstLabels: prometheus.Labels{"state": state}}, func() float64 {
				made, exported, failed := t.Spans()
				return float64([]uint64{made, exported, failed}[i])
			}))
	}
	return cs
}

func (t *telemetry) close() error {
	if t == nil {
		return nil
	}
	return t.Close()
}
