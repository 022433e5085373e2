package httpd

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
)

const (
	// sampleEvery is how often metrics are looked at for the charts.
	sampleEvery = 10 * time.Second
	// maxSamples bounds what is kept: ten minutes.
	maxSamples = 61
)

// Chart is a part of the page that scripts draw: metrics over the last minutes.
type Chart struct {
	Title string
	Unit  string // of its values, for people
	Lines []Line
}

// Line says how the values of a Chart come from metrics of the process, between two samples. By default, a value
// is how fast the sum of Of grew in a second. With Beside, it is the share of that growth in the growth of both,
// in percent. With Quantile, it is that quantile of the histograms Of, in milliseconds. With Level, it is the
// sum itself, at the later sample.
type Line struct {
	Name       string
	Of, Beside []string
	Quantile   float64
	Level      bool
	// Times is what rates and levels are multiplied with for people; 0: they are not.
	Times float64
}

type chartData struct {
	Title        string     `json:"title"`
	Unit         string     `json:"unit"`
	EverySeconds float64    `json:"every_seconds"`
	Lines        []lineData `json:"lines"`
}

// lineData has null where nothing happened that could be measured.
type lineData struct {
	Name   string     `json:"name"`
	Values []*float64 `json:"values"`
}

// history has samples of the metrics that charts are made of, the oldest first. A nil one has none.
type history struct {
	charts []Chart
	wanted map[string]bool
	stop   chan struct{}
	done   chan struct{}

	mu      sync.Mutex
	samples []sample
	count   uint64 // of samples, ever
}

// sample is the sums of metrics, by family.
type sample map[string]*sum

type sum struct {
	value   float64            // of counters and gauges
	count   float64            // of histograms
	buckets map[float64]uint64 // cumulative, by upper bound
}

// of gives a family's sums. A family that is not there yet has counted nothing: one with labels comes with what it
// counts.
func (s sample) of(name string) *sum {
	if u := s[name]; u != nil {
		return u
	}
	return &sum{}
}

// Chart begins to keep the metrics that charts are made of, until Close. It is called once at most.
func (s *Server) Chart(charts ...Chart) {
	if s == nil {
		return
	}
	h := newHistory(charts)
	if !s.history.CompareAndSwap(nil, h) {
		return
	}
	look := func() {
		fs, _ := s.reg.Gather() // what is there; /metrics tells what is not
		h.add(fs)
	}
	look()
	go func() {
		defer close(h.done)
		t := time.NewTicker(sampleEvery)
		defer t.Stop()
		for {
			select {
			case <-h.stop:
				return
			case <-t.C:
				look()
			}
		}
	}()
}

func newHistory(charts []Chart) *history {
	h := &history{charts: charts, wanted: make(map[string]bool), stop: make(chan struct{}), done: make(chan struct{})}
	for _, c := range charts {
		for _, l := range c.Lines {
			for _, name := range slices.Concat(l.Of, l.Beside) {
				h.wanted[name] = true
			}
		}
	}
	return h
}

func (h *history) add(fs []*dto.MetricFamily) {
	now := make(sample)
	for _, f := range fs {
		if !h.wanted[f.GetName()] {
			continue
		}
		u := &sum{buckets: make(map[float64]uint64)}
		for _, m := range f.GetMetric() {
			u.value += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			u.count += float64(m.GetHistogram().GetSampleCount())
			for _, b := range m.GetHistogram().GetBucket() {
				u.buckets[b.GetUpperBound()] += b.GetCumulativeCount()
			}
		}
		now[f.GetName()] = u
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.samples = append(h.samples, now)
	h.count++
	if n := len(h.samples) - maxSamples; n > 0 {
		h.samples = slices.Delete(h.samples, 0, n)
	}
}

// taken is how many samples there have been.
func (h *history) taken() uint64 {
	if h == nil {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.count
}

// data is what the charts show.
func (h *history) data() []chartData {
	out := []chartData{}
	if h == nil {
		return out
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.charts {
		d := chartData{c.Title, c.Unit, sampleEvery.Seconds(), []lineData{}}
		for _, l := range c.Lines {
			vs := []*float64{}
			for i := 1; i < len(h.samples); i++ {
				vs = append(vs, l.between(h.samples[i-1], h.samples[i]))
			}
			d.Lines = append(d.Lines, lineData{l.Name, vs})
		}
		out = append(out, d)
	}
	return out
}

// between is the line's value from one sample to the next; nil: there is none.
func (l Line) between(a, b sample) *float64 {
	grown := func(names []string) (n float64, known bool) {
		for _, name := range names {
			if b[name] != nil {
				n, known = n+b[name].value-a.of(name).value, true
			}
		}
		return n, known
	}
	if l.Quantile > 0 {
		return l.quantile(a, b)
	}
	n, known := grown(l.Of)
	switch times := cmp.Or(l.Times, 1); {
	case l.Level:
		n = 0
		for _, name := range l.Of {
			n += b.of(name).value
		}
		return only(n*times, known)
	case l.Beside == nil:
		return only(n/sampleEvery.Seconds()*times, known)
	}
	all, _ := grown(l.Beside)
	all += n
	return only(n/all*100, known && all > 0)
}

func only(v float64, known bool) *float64 {
	if !known {
		return nil
	}
	return &v
}

// quantile takes the values of a bucket for evenly spread, and those above all bounds for as great as the greatest
// bound.
func (l Line) quantile(a, b sample) *float64 {
	total, grown := 0.0, make(map[float64]float64)
	for _, name := range l.Of {
		before, now := a.of(name), b.of(name)
		total += now.count - before.count
		for le, n := range now.buckets {
			grown[le] += float64(n) - float64(before.buckets[le])
		}
	}
	rank, low, below := l.Quantile*total, 0.0, 0.0
	for _, le := range slices.Sorted(maps.Keys(grown)) {
		if n := grown[le]; n >= rank && n > below {
			low += (le - low) * (rank - below) / (n - below)
			break
		}
		low, below = le, grown[le]
	}
	return only(low*1000, total > 0)
}
