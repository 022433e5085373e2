package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sort"
	"time"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
	"github.com/prometheus/prometheus/model/value"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
)

// Evaluation is what `promql eval` reads from its standard input, as JSON. Times are in seconds.
type Evaluation struct {
	// Every is the time between two scrapes, and between two evaluations.
	Every int64
	// Scrapes are what targets served, by time; those of one target do not overlap.
	Scrapes []Scrape
	Rules   []Rule
	At      int64
}

// Scrape is what one target served from one time to another, both included. An empty Text is
// a target that did not answer.
type Scrape struct {
	Instance, Text string
	From, To       int64
}

// Rule is an alert.
type Rule struct {
	Alert, Expr string
	For         int64
}

// Firing is an alert that fires, with the labels of one of its series.
type Firing struct {
	Alert  string
	Labels map[string]string
}

// eval tells which rules fire: whose expression has had a result, with the same labels, at
// every evaluation for as long as they ask.
func eval(in io.Reader, out io.Writer) error {
	var e Evaluation
	if err := json.NewDecoder(in).Decode(&e); err != nil {
		return err
	}
	if e.Every <= 0 {
		return fmt.Errorf("every %d s, want > 0", e.Every)
	}
	s := make(store)
	for _, x := range e.Scrapes {
		if err := s.add(x, e.Every); err != nil {
			return fmt.Errorf("%s: %w", x.Instance, err)
		}
	}
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 50_000_000, Timeout: time.Minute,
		LookbackDelta: 5 * time.Minute,
		Parser:        parser.NewParser(parser.Options{})})
	fires := []Firing{}
	for _, r := range e.Rules {
		var held []labels.Labels
		for t := e.At; t >= e.At-r.For; t -= e.Every {
			q, err := engine.NewInstantQuery(context.Background(), s, nil, r.Expr, time.Unix(t, 0))
			if err != nil {
				return fmt.Errorf("%s: %w", r.Alert, err)
			}
			res := q.Exec(context.Background())
			v, err := res.Vector()
			if err != nil {
				return fmt.Errorf("%s: %w", r.Alert, err)
			}
			var now []labels.Labels
			for _, x := range v {
				l := labels.NewBuilder(x.Metric).Del(labels.MetricName).Labels()
				if t == e.At || slices.ContainsFunc(held, func(h labels.Labels) bool { return labels.Equal(h, l) }) {
					now = append(now, l)
				}
			}
			q.Close()
			if held = now; len(held) == 0 {
				break
			}
		}
		for _, l := range held {
			fires = append(fires, Firing{r.Alert, l.Map()})
		}
	}
	return json.NewEncoder(out).Encode(fires)
}

// store is a storage.Queryable of all samples, by metric and then by the text of their labels.
type store map[string]map[string]*samples

type samples struct {
	labels labels.Labels
	list   []chunks.Sample
	target string
}

// sample is a float at a time in milliseconds; it is asked for nothing else.
type sample struct {
	chunks.Sample
	t int64
	v float64
}

func (s sample) T() int64                 { return s.t }
func (s sample) ST() int64                { return 0 }
func (s sample) F() float64               { return s.v }
func (s sample) Type() chunkenc.ValueType { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample      { return s }

// add puts in what a target served. Its series that are not served any more become stale, as
// all do when it does not answer.
func (s store) add(x Scrape, every int64) error {
	now := map[string]bool{}
	put := func(l labels.Labels, v float64) {
		k, name := l.String(), l.Get(labels.MetricName)
		if s[name] == nil {
			s[name] = make(map[string]*samples)
		}
		o := s[name][k]
		if o == nil {
			o = &samples{labels: l, target: x.Instance}
			s[name][k] = o
		}
		now[k] = true
		for t := x.From; t <= x.To; t += every {
			o.list = append(o.list, sample{t: t * 1000, v: v})
		}
	}
	of := func(l labels.Labels) labels.Labels {
		return labels.NewBuilder(l).Set("instance", x.Instance).Set("job", "kvd").Labels()
	}
	if x.Text != "" {
		p := textparse.NewPromParser([]byte(x.Text), labels.NewSymbolTable(), false)
		for {
			kind, err := p.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			if kind != textparse.EntrySeries {
				continue
			}
			var l labels.Labels
			p.Labels(&l)
			_, _, v := p.Series()
			put(of(l), v)
		}
	}
	up := 0.0
	if x.Text != "" {
		up = 1
	}
	put(of(labels.FromStrings(labels.MetricName, "up")), up)
	for _, series := range s {
		for k, o := range series {
			if o.target == x.Instance && !now[k] {
				o.list = append(o.list, sample{t: x.From * 1000, v: math.Float64frombits(value.StaleNaN)})
			}
		}
	}
	return nil
}

// Querier implements [storage.Queryable].
func (s store) Querier(mint, maxt int64) (storage.Querier, error) { return querier{s, mint, maxt}, nil }

type querier struct {
	s          store
	mint, maxt int64
}

// Select implements [storage.Querier].
func (q querier) Select(_ context.Context, _ bool, _ *storage.SelectHints, ms ...*labels.Matcher) storage.SeriesSet {
	set := &seriesSet{}
	name := ""
	for _, m := range ms {
		if m.Name == labels.MetricName && m.Type == labels.MatchEqual {
			name = m.Value
		}
	}
	for _, x := range q.s[name] { // every expression names its metrics
		if slices.ContainsFunc(ms, func(m *labels.Matcher) bool { return !m.Matches(x.labels.Get(m.Name)) }) {
			continue
		}
		after := func(t int64) int {
			return sort.Search(len(x.list), func(i int) bool { return x.list[i].T() > t })
		}
		if in := x.list[after(q.mint-1):after(q.maxt)]; len(in) > 0 {
			set.all = append(set.all, storage.NewListSeries(x.labels, in))
		}
	}
	slices.SortFunc(set.all, func(a, b storage.Series) int { return labels.Compare(a.Labels(), b.Labels()) })
	return set
}

// LabelValues implements [storage.LabelQuerier]; no expression asks.
func (querier) LabelValues(context.Context, string, *storage.LabelHints, ...*labels.Matcher) ([]string,
	annotations.Annotations, error) {
	return nil, nil, nil
}

// LabelNames implements [storage.LabelQuerier]; no expression asks.
func (querier) LabelNames(context.Context, *storage.LabelHints, ...*labels.Matcher) ([]string, annotations.Annotations,
	error) {
	return nil, nil, nil
}

// Close implements [storage.LabelQuerier].
func (querier) Close() error { return nil }

type seriesSet struct {
	all []storage.Series
	n   int
}

func (s *seriesSet) Next() bool                        { s.n++; return s.n <= len(s.all) }
func (s *seriesSet) At() storage.Series                { return s.all[s.n-1] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }
