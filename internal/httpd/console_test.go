package httpd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const odd = `<script>alert(1)</script><img src=x onerror="a()">'&`

// oddPage has names that others chose in every place where text may be.
func oddPage() Page {
	return Page{
		Health: Health{Text: odd, Mend: odd},
		Tables: []Table{{Title: odd, Header: []string{odd}, Rows: [][]string{{odd}}},
			{Title: "Jobs", Header: []string{"kind"}}},
		Pictures: []Picture{{Title: odd, Bars: []Bar{{Label: odd, Note: odd, Parts: []Part{{odd, 1, odd}}}}}},
	}
}

// The page shows what the role says, and nothing of it becomes HTML or a script.
func TestPage(t *testing.T) {
	s := start(t, Options{})
	s.Serving(func() error { return nil }, func(context.Context) (Page, error) { return oddPage(), nil })
	code, b, h := get(t, s, "/")
	if code != 200 || !strings.HasPrefix(h.Get("Content-Type"), "text/html") {
		t.Errorf("%d, %v", code, h)
	}
	for _, w := range []string{"<h1>kvd gateway</h1>", "Version v1 &lt;test&gt;, up 0s.", "<td>&lt;script&gt;alert(1)",
		"<td>none</td>", `<p id="health-mend">&lt;script`, `class="trouble"`} {
		if !strings.Contains(b, w) {
			t.Errorf("page lacks %q:\n%s", w, b)
		}
	}
	// The one script is the page's own.
	if n := strings.Count(b, "<script"); n != 1 || strings.Contains(b, "<img") {
		t.Errorf("%d scripts:\n%s", n, b)
	}
}

// The page loads nothing from another host, and a browser is told to load nothing else either.
func TestPageLoadsItsOwn(t *testing.T) {
	s := start(t, Options{})
	_, b, h := get(t, s, "/")
	policies := h.Get("Content-Security-Policy")
	for _, w := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "connect-src 'self'",
		"frame-ancestors 'none'"} {
		if !strings.Contains(policies, w) {
			t.Errorf("the policy lacks %q: %s", w, policies)
		}
	}
	if strings.Contains(policies, "unsafe") || strings.Contains(policies, "http") || strings.Contains(policies, "*") {
		t.Errorf("the policy is %s", policies)
	}
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(b, -1) {
		if code, _, _ := get(t, s, m[1]); !strings.HasPrefix(m[1], "/") || strings.HasPrefix(m[1], "//") ||
			code != 200 && m[1] != "/readyz" {
			t.Errorf("the page links %s: %d", m[1], code)
		}
	}
	if m := regexp.MustCompile(`(?i)\s(on[a-z]+|style)=`).FindString(b); m != "" {
		t.Errorf("the page has%s, which the policy refuses", m)
	}
	for path, text := range map[string]string{"/console.js": string(consoleJS), "/console.css": string(consoleCSS)} {
		if _, b, h := get(t, s, path); b != text || !strings.HasPrefix(h.Get("Content-Type"), "text/") {
			t.Errorf("%s: %q, %d bytes", path, h.Get("Content-Type"), len(b))
		}
		for _, bad := range []string{"innerHTML", "insertAdjacentHTML", "document.write", "eval(", "https:", "//cdn"} {
			if strings.Contains(text, bad) {
				t.Errorf("%s has %s", path, bad)
			}
		}
	}
}

func poll1(t *testing.T, s *Server) poll {
	t.Helper()
	code, b, h := get(t, s, "/state.json")
	var p poll
	if err := json.Unmarshal([]byte(b), &p); err != nil || code != 200 || h.Get("Content-Type") != "application/json" {
		t.Fatalf("%d, %q, %v: %.200s", code, h.Get("Content-Type"), err, b)
	}
	return p
}

// /state.json tells what the page does, with the names as they are; < is written so that no reader takes it for HTML.
func TestState(t *testing.T) {
	s := start(t, Options{})
	s.Serving(func() error { return nil }, func(context.Context) (Page, error) { return oddPage(), nil })
	p := poll1(t, s)
	if p.Role != "gateway" || p.Version != "v1 <test>" || p.Health.Mend != odd || p.Tables[0].Rows[0][0] != odd ||
		p.Pictures[0].Bars[0].Parts[0].Text != odd {
		t.Errorf("%+v", p)
	}
	if _, b, _ := get(t, s, "/state.json"); strings.ContainsAny(b, "<>") || strings.Contains(b, "null") {
		t.Errorf("it says %s", b)
	}
}

// The first line says whether the role is ready, what is wrong with the store, or why nobody can say.
func TestHealthLine(t *testing.T) {
	s := start(t, Options{})
	ok, bad := func() error { return nil }, func() error { return errors.New("no leader") }
	says := func(h Health, err error) func(context.Context) (Page, error) {
		return func(context.Context) (Page, error) { return Page{Health: h}, err }
	}
	for _, tc := range []struct {
		ready func() error
		page  func(context.Context) (Page, error)
		want  Health
	}{
		{ok, nil, Health{Well: true, Text: "ready"}},
		{bad, nil, Health{Text: "not ready: no leader"}},
		{ok, says(Health{true, "all is well", ""}, nil), Health{true, "all is well", ""}},
		{ok, says(Health{false, "m1 is down", "kvd"}, nil), Health{false, "m1 is down", "kvd"}},
		{bad, says(Health{true, "all is well", ""}, nil), Health{false, "not ready: no leader. all is well", ""}},
		{ok, says(Health{}, errors.New("no answer from <d1>")), Health{Text: "no answer from <d1>"}},
	} {
		s.Serving(tc.ready, tc.page)
		if got := poll1(t, s).Health; got != tc.want {
			t.Errorf("got %+v, want %+v", got, tc.want)
		}
	}
}

// However much the role says, what is sent is bounded, and says how much is left out; and characters
// that cannot be seen are shown as such.
func TestBounds(t *testing.T) {
	long := strings.Repeat("é", maxCell) // twice as many bytes
	var p Page
	for _, n := range []int{maxRows, maxRows + 7} {
		var q Table
		for range n {
			q.Rows = append(q.Rows, []string{"x"})
		}
		p.Tables = append(p.Tables, q)
	}
	p.Tables = append(p.Tables, Table{Rows: [][]string{{long}, {"a\x00\u202Eb\xff"}}},
		Table{Rows: make([][]string, 400)})
	for i := range p.Tables[3].Rows {
		p.Tables[3].Rows[i] = []string{long, long}
	}
	p.Pictures = []Picture{{Bars: make([]Bar, maxBars+3)},
		{Bars: []Bar{{Parts: make([]Part, maxParts)}, {Parts: make([]Part, 1)}}}}
	p.Pictures[1].Bars[0].Parts[0].Size, p.Pictures[1].Bars[0].Parts[1].Size = -1, 2
	got := bound(p)
	for i, want := range [][2]int{{maxRows, 0}, {maxRows, 7}, {2, 0}} {
		if q := got.Tables[i]; len(q.Rows) != want[0] || q.More != want[1] {
			t.Errorf("table %d: %d rows and %d more, want %v", i, len(q.Rows), q.More, want)
		}
	}
	q := got.Tables[2].Rows
	if s := q[0][0]; len(s) != maxCell+len("…") || !strings.HasSuffix(s, "é…") || q[1][0] != "a\uFFFD\uFFFDb\uFFFD" {
		t.Errorf("%d bytes, %q", len(s), q[1][0])
	}
	if q := got.Tables[3]; q.More == 0 || q.More+len(q.Rows) != 400 || len(q.Rows)*2*maxCell > maxText {
		t.Errorf("%d rows of long cells, %d more", len(q.Rows), q.More)
	}
	if q := got.Pictures; len(q[0].Bars) != maxBars || q[0].More != 3 || len(q[1].Bars) != 1 || q[1].More != 1 ||
		len(q[1].Bars[0].Parts) != 1 || q[1].Bars[0].Parts[0].Size != 2 {
		t.Errorf("%d and %d bars, %d and %d more, %v", len(q[0].Bars), len(q[1].Bars), q[0].More, q[1].More, q[1].Bars)
	}
	if b, err := json.Marshal(got); err != nil || len(b) > 4*maxText {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

// Many who poll are one question to the role, and one who goes away spoils nobody's answer.
func TestPollsShareAnAnswer(t *testing.T) {
	asked := 0
	s := &Server{}
	st := &state{ready: func() error { return nil }, page: func(ctx context.Context) (Page, error) {
		asked++
		return Page{Health: Health{true, fmt.Sprint("answer ", asked), ""}}, ctx.Err()
	}, ages: newAges()}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		if h := s.shown(gone, st).Health; h.Text != "answer 1" {
			t.Fatalf("%+v", h)
		}
	}
	st.at = st.at.Add(-fresh)
	if h := s.shown(t.Context(), st).Health; h.Text != "answer 2" {
		t.Errorf("later: %+v", h)
	}
}

// Charts show how fast counters grew, shares and quantiles, and nothing where nothing happened.
func TestCharts(t *testing.T) {
	reg := prometheus.NewRegistry()
	counter := func(name string) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: "Test."})
		reg.MustRegister(c)
		return c
	}
	hits, misses := counter("hits"), counter("misses")
	seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "seconds", Help: "Test.",
		Buckets: []float64{0.001, 0.002, 0.004}}, []string{"command"})
	reg.MustRegister(seconds)
	h := newHistory([]Chart{{"All", "", []Line{
		{Name: "rate", Of: []string{"hits", "misses"}},
		{Name: "share", Of: []string{"hits"}, Beside: []string{"misses"}},
		{Name: "half", Of: []string{"seconds"}, Quantile: 0.5}, {Name: "most", Of: []string{"seconds"}, Quantile: 0.99},
		{Name: "none", Of: []string{"other"}},
		{Name: "level", Of: []string{"gauge"}, Level: true, Times: 0.5},
		{Name: "twice", Of: []string{"hits"}, Times: 2},
	}}})
	level := prometheus.NewGauge(prometheus.GaugeOpts{Name: "gauge", Help: "Test."})
	reg.MustRegister(level)
	level.Set(6)
	look := func() {
		fs, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		h.add(fs)
	}
	want := func(text string) {
		t.Helper()
		got := ""
		for _, l := range h.data()[0].Lines {
			got += " " + l.Name
			for _, v := range l.Values {
				if v == nil {
					got += " -"
				} else {
					got += fmt.Sprintf(" %.4g", *v)
				}
			}
		}
		if got != " "+text {
			t.Errorf("got%s, want %s", got, text)
		}
	}
	hits.Add(5)
	seconds.WithLabelValues("get").Observe(9)
	look()
	want("rate share half most none level twice")
	look()
	want("rate 0 share - half - most - none - level 3 twice 0")
	hits.Add(30)
	level.Set(4)
	misses.Add(10)
	for range 4 { // half of all within the middle of the second bucket
		seconds.WithLabelValues("get").Observe(0.0005)
		seconds.WithLabelValues("put").Observe(0.003)
	}
	for range 8 {
		seconds.WithLabelValues("put").Observe(0.0015)
	}
	look()
	want("rate 0 4 share - 75 half - 1.5 most - 3.92 none - - level 3 2 twice 0 6")
	seconds.WithLabelValues("put").Observe(1)
	look()
	want("rate 0 4 0 share - 75 - half - 1.5 4 most - 3.92 4 none - - - level 3 2 2 twice 0 6 0")
	for range 2 * maxSamples {
		look()
	}
	if n := len(h.data()[0].Lines[0].Values); n != maxSamples-1 {
		t.Errorf("%d values", n)
	}
}

// A Server shows the charts that it is handed, from metrics that are registered with it.
func TestServerCharts(t *testing.T) {
	s := start(t, Options{})
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "kvd_test_total", Help: "Test."})
	if err := s.Register(c); err != nil {
		t.Fatal(err)
	}
	if got := poll1(t, s).Charts; len(got) != 0 {
		t.Errorf("none, but %v", got)
	}
	s.Chart(Chart{"Tests", "a second", []Line{{Name: "done", Of: []string{"kvd_test_total"}}}})
	fs, err := s.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	s.history.Load().add(fs)
	s.Serving(func() error { return nil }, nil) // no answer is fresh
	got := poll1(t, s).Charts
	if len(got) != 1 || got[0].Title != "Tests" || got[0].EverySeconds != 10 || len(got[0].Lines[0].Values) != 1 ||
		*got[0].Lines[0].Values[0] != 0 {
		t.Errorf("%+v", got)
	}
}

// Text can be read on the page, in light and in dark: its contrast is at least 4.5 to 1, as WCAG wants.
func TestContrast(t *testing.T) {
	light, dark, ok := strings.Cut(string(consoleCSS), "prefers-color-scheme: dark")
	if !ok {
		t.Fatal("no dark mode")
	}
	dark, _, _ = strings.Cut(dark, "\n}\n")
	luminance := func(css, name string) float64 {
		t.Helper()
		m := regexp.MustCompile("--" + name + ": #([0-9a-f]+);").FindStringSubmatch(css)
		if m == nil {
			t.Fatalf("no %s", name)
		}
		hex := m[1]
		if len(hex) == 3 {
			hex = string([]byte{hex[0], hex[0], hex[1], hex[1], hex[2], hex[2]})
		}
		var rgb [3]uint8
		if _, err := fmt.Sscanf(hex, "%02x%02x%02x", &rgb[0], &rgb[1], &rgb[2]); err != nil {
			t.Fatal(err)
		}
		sum := 0.0
		for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
			v := float64(rgb[i]) / 255
			if v <= 0.04045 {
				v /= 12.92
			} else {
				v = math.Pow((v+0.055)/1.055, 2.4)
			}
			sum += weight * v
		}
		return sum
	}
	for mode, css := range map[string]string{"light": light, "dark": dark} {
		for _, name := range []string{"text", "faint", "well", "trouble"} {
			a, b := luminance(css, name), luminance(css, "back")
			if c := (max(a, b) + 0.05) / (min(a, b) + 0.05); c < 4.5 {
				t.Errorf("%s: %s has a contrast of %.2f", mode, name, c)
			}
		}
	}
}

// pageOf is a large one, with n somewhere in it.
func pageOf(n int) Page {
	var p Page
	for i := range 10 {
		t := Table{Title: fmt.Sprint("table ", i), Header: []string{"a", "b"}}
		for j := range maxRows {
			t.Rows = append(t.Rows, []string{fmt.Sprint(j), "b", "c", "d", "e", "f"})
		}
		t.Rows[n%maxRows][1] = fmt.Sprint(n)
		q := Picture{Title: fmt.Sprint("picture ", i)}
		for j := range maxBars {
			q.Bars = append(
				q.Bars, Bar{Label: fmt.Sprint(j), Parts: []Part{{"live", float64(j), "live"}, {"free", 1, "free"}}})
		}
		q.Bars[n%maxBars].Parts[0].Size = float64(n)
		p.Tables, p.Pictures = append(p.Tables, t), append(p.Pictures, q)
	}
	return p
}

// BenchmarkPoll is what a Server does for polls of a large page, which happens at most once a second: it compares the
// page with the one before, and tells what has changed.
func BenchmarkPoll(b *testing.B) {
	var p Page
	s := &Server{}
	st := &state{ready: func() error {
		return nil
	}, page: func(context.Context) (Page, error) { return p, nil }, ages: newAges()}
	s.state.Store(st)
	size := 0
	for n := 0; b.Loop(); n++ {
		b.StopTimer()
		p = pageOf(n)
		b.StartTimer()
		st.at = time.Time{}
		text, err := s.polled(b.Context(), fmt.Sprint(st.ages.name, ".", n))
		if err != nil {
			b.Fatal(err)
		}
		size = len(text)
	}
	b.ReportMetric(float64(size), "bytes")
}

// follow applies news to what was told before, as console.js does.
func follow(t *testing.T, was poll, n news) poll {
	t.Helper()
	again := func(from, to any) {
		b, err := json.Marshal(from)
		if err == nil {
			err = json.Unmarshal(b, to)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	was.Seen = n.Seen
	if n.Health != nil {
		was.Health = *n.Health
	}
	if n.Links != nil {
		was.Links = *n.Links
	}
	was.Tables = append(append([]Table{}, was.Tables...),
		make([]Table, max(0, n.Tables.Count-len(was.Tables)))...)[:n.Tables.Count]
	for _, x := range n.Tables.Changed {
		at := &was.Tables[x.At]
		at.Title, at.Header, at.More = x.Title, x.Header, x.More
		at.Rows = append(append([][]string{}, at.Rows...),
			make([][]string, max(0, x.Rows.Count-len(at.Rows)))...)[:x.Rows.Count]
		for _, r := range x.Rows.Changed {
			at.Rows[r.At] = nil
			again(r.Is, &at.Rows[r.At])
		}
	}
	was.Pictures = append(append([]Picture{}, was.Pictures...),
		make([]Picture, max(0, n.Pictures.Count-len(was.Pictures)))...)[:n.Pictures.Count]
	for _, x := range n.Pictures.Changed {
		at := &was.Pictures[x.At]
		at.Title, at.More = x.Title, x.More
		at.Bars = append(append([]Bar{}, at.Bars...), make([]Bar, max(0, x.Rows.Count-len(at.Bars)))...)[:x.Rows.Count]
		for _, r := range x.Rows.Changed {
			at.Bars[r.At] = Bar{}
			again(r.Is, &at.Bars[r.At])
		}
	}
	return was
}

// A page that names the state that it has seen is told what has changed since and nothing else; put together it is all
// that there is, whatever comes, goes and changes, and however many states were missed.
func TestNews(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	word := func() string { return fmt.Sprint("w", random.IntN(3)) }
	page := func() (p Page) {
		p.Health = Health{Well: random.IntN(2) == 0, Text: word()}
		for range random.IntN(4) {
			t := Table{Title: word(), Header: []string{word()}}
			for range random.IntN(5) {
				t.Rows = append(t.Rows, []string{word(), word()})
			}
			p.Tables = append(p.Tables, t)
		}
		for range random.IntN(3) {
			q := Picture{Title: word()}
			for range random.IntN(4) {
				b := Bar{Label: word(), Bad: random.IntN(2) == 0}
				for range random.IntN(3) {
					b.Parts = append(b.Parts, Part{word(), 1 + float64(random.IntN(2)), word()})
				}
				q.Bars = append(q.Bars, b)
			}
			p.Pictures = append(p.Pictures, q)
		}
		return p
	}
	var now Page
	var linked []Link
	s := &Server{}
	s.Linked(func() []Link { return linked })
	st := &state{ready: func() error {
		return nil
	}, page: func(context.Context) (Page, error) { return now, nil }, ages: newAges()}
	s.state.Store(st)
	ask := func(seen string, to any) {
		t.Helper()
		b, err := s.polled(t.Context(), seen)
		if err == nil {
			err = json.Unmarshal(b, to)
		}
		if err != nil {
			t.Fatalf("%v: %.200s", err, b)
		}
	}
	var told []poll
	for i := range 300 {
		now, linked = page(), nil
		if random.IntN(2) == 0 {
			linked = []Link{{"gateway", word(), "10.0.0.1:1", false}}
		}
		st.at = time.Time{}
		for _, seen := range []string{"", "?", "1", st.ages.name, st.ages.name + ".0",
			fmt.Sprint(st.ages.name, ".", i+2), "other.1"} {
			var all poll
			if ask(seen, &all); all.Role != s.o.Role || all.Seen != fmt.Sprint(st.ages.name, ".", i+1) ||
				all.Tables == nil {
				t.Fatalf("%q: %+v", seen, all)
			}
			told = append(told[:i], all)
		}
		want, err := json.Marshal(told[i].Page)
		if err != nil {
			t.Fatal(err)
		}
		for _, from := range []int{i, max(0, i-1), random.IntN(i + 1)} {
			var was poll
			b, err := json.Marshal(told[from])
			if err == nil {
				err = json.Unmarshal(b, &was) // a copy
			}
			var n news
			ask(told[from].Seen, &n)
			got := follow(t, was, n)
			text, err2 := json.Marshal(got.Page)
			if err != nil || err2 != nil || string(text) != string(want) || !slices.Equal(got.Links, told[i].Links) ||
				n.Since != told[from].Seen {
				t.Fatalf("from state %d to %d:\n%s, want\n%s", from, i, text, want)
			}
			if from == i && (n.Health != nil || n.Links != nil || n.Charts != nil || len(n.Tables.Changed)+
				len(n.Pictures.Changed) > 0) {
				t.Fatalf("nothing has changed, but %+v", n)
			}
		}
	}
}

// A page leads to others by nothing but a host and a port, and what their processes call themselves is text.
func TestLinks(t *testing.T) {
	for addr, want := range map[string]bool{
		"10.0.0.1:7481": true, "m1.example:80": true, "my_host:1": true, "[2001:db8::1]:7481": true,
		"localhost:65535": true,
		"":                false, "m1": false, ":80": false, "0.0.0.0:80": false, "[::]:80": false, "m1:0": false,
		"m1:65536": false,
		"m1:+80":   false, "m1:080": false, "m1:http": false,
		"javascript:alert(1)": false, "javascript:1": true, // a host of that name: the scheme is ours
		"a/b:80": false, "a@b:80": false, "a b:80": false, "a#b:80": false, "a?b:80": false, "a%2e:80": false,
		`a"b:80`: false, "a<b:80": false, "é:80": false, "-a:80": false,
		"[fe80::1%eth0]:80": false, "[::ffff:1.2.3.4]:80": false, "010.0.0.1:80": true, strings.Repeat("a", 300) +
			":80": false, "a:80\n": false, "a\x00:80": false,
	} {
		if IsAddr(addr) != want {
			t.Errorf("%q: %v", addr, !want)
		}
	}
	s := start(t, Options{})
	s.Linked(func() []Link {
		return []Link{{"memnode", odd, "10.0.0.1:7481", false}, {"gateway", "g", "[2001:db8::1]:7483", true},
			{"memnode", "bad", `"><script>:80`, false}}
	})
	want := []linkData{{"memnode", odd, "http://10.0.0.1:7481/"}, {"gateway", "g", "https://[2001:db8::1]:7483/"}}
	if got := poll1(t, s).Links; !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	_, b, _ := get(t, s, "/")
	for _, w := range []string{`<a rel="noreferrer" href="http://10.0.0.1:7481/">memnode &lt;script&gt;`, `<a rel="noreferrer" href="https://[2001:db8::1]:7483/">gateway g</a>`} {
		if !strings.Contains(b, w) {
			t.Errorf("the page lacks %s:\n%s", w, b)
		}
	}
	if strings.Count(b, "<script") != 1 || strings.Contains(b, "bad") {
		t.Errorf("it shows:\n%s", b)
	}
}
