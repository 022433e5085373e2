package httpd

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// fresh is for how long an answer is given again: however many pages are open, the role is asked once in this time.
	fresh = time.Second
	// Bounds of what is shown. Names and their number are others' choice.
	maxRows  = 500     // of a table
	maxText  = 1 << 20 // bytes of all cells
	maxCell  = 2 << 10 // bytes of one
	maxBars  = 128     // of a picture
	maxParts = 2048    // of a picture
)

// Page is a role's state for people.
type Page struct {
	Health   Health    `json:"health"`
	Pictures []Picture `json:"pictures"`
	Tables   []Table   `json:"tables"`
	// Lead is how many of the tables come before charts and pictures. It stays as it is.
	Lead int `json:"lead"`
	// Links lead to the pages of other processes. The Server fills them in; see [Server.Linked].
	Links []Link `json:"-"`
}

// Health is a Page's first line.
type Health struct {
	Well bool   `json:"well"`
	Text string `json:"text"`
	Mend string `json:"mend,omitempty"` // what mends it: a command, if there is one
}

// Table is a part of the page. Cells of a row beyond those of the header are shown when somebody opens it.
type Table struct {
	Title  string     `json:"title"`
	Header []string   `json:"header"`
	Rows   [][]string `json:"rows"`
	More   int        `json:"more,omitempty"` // rows that are left out; the Server counts them
}

// Picture is a part of the page that scripts draw: stacked bars. All that it says is also in some table.
type Picture struct {
	Title string `json:"title"`
	Bars  []Bar  `json:"bars"`
	More  int    `json:"more,omitempty"` // bars that are left out; the Server counts them
}

// Bar is drawn at the length of all others, whatever the sum of its parts is.
type Bar struct {
	Label string `json:"label"`
	Note  string `json:"note,omitempty"`
	Bad   bool   `json:"bad,omitempty"` // the note is about trouble
	Parts []Part `json:"parts"`
}

// Part is a part of a Bar, if it has a size. Its kind gives the colour and is shown in the legend; console.css knows
// some.
type Part struct {
	Kind string  `json:"kind"`
	Size float64 `json:"size"`
	Text string  `json:"text"`
}

// state is what Serving was given, and what it answered last.
type state struct {
	ready func() error
	page  func(context.Context) (Page, error)

	mu   sync.Mutex
	at   time.Time // of last; zero: none
	last Page
	ages ages   // of last
	body []byte // of last, for polls; nil: not made yet
	// delta is what has changed from the state named deltaOf to last.
	delta   []byte
	deltaOf string
	charts  []chartData // as of the sample charted
	charted uint64
}

// shown is the Page now, or up to [fresh] ago. It holds no more than the bounds above, and no character that
// changes how others look.
func (s *Server) shown(ctx context.Context, st *state) Page {
	st.mu.Lock()
	defer st.mu.Unlock()
	if !st.at.IsZero() && time.Since(st.at) < fresh {
		return st.last
	}
	var p Page
	var trouble error
	if st.page != nil {
		// Others get this answer too, so it does not end with the one who asks.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), headerTimeout)
		defer cancel()
		p, trouble = st.page(ctx)
	}
	unready := st.ready()
	switch {
	case trouble != nil:
		p.Health = Health{Text: trouble.Error()}
	case unready != nil && p.Health.Text == "":
		p.Health = Health{Text: "not ready: " + unready.Error()}
	case unready != nil:
		p.Health.Well = false
		p.Health.Text = "not ready: " + unready.Error() + ". " + p.Health.Text
	case p.Health.Text == "":
		p.Health = Health{Well: true, Text: "ready"}
	}
	if f := s.links.Load(); f != nil {
		p.Links = (*f)()
	}
	p = bound(p)
	h := s.history.Load()
	n := h.taken()
	recharted := st.ages.now == 0 || n != st.charted
	if recharted {
		st.charts, st.charted = h.data(), n
	}
	st.ages.next(&st.last, &p, recharted)
	st.last, st.at, st.body, st.delta = p, time.Now(), nil, nil
	return st.last
}

// bound copies p within the bounds.
func bound(p Page) Page {
	out := Page{Health: Health{p.Health.Well, clean(p.Health.Text), clean(p.Health.Mend)}, Pictures: []Picture{},
		Tables: []Table{}, Lead: min(max(p.Lead, 0), len(p.Tables)), Links: p.Links[:min(len(p.Links), maxLinks)]}
	room := maxText
	for _, t := range p.Tables {
		b := Table{Title: clean(t.Title), Header: cleanAll(t.Header), Rows: [][]string{}}
		for i, row := range t.Rows {
			row = cleanAll(row)
			for _, c := range row {
				room -= len(c)
			}
			if i == maxRows || room < 0 {
				b.More = len(t.Rows) - i
				break
			}
			b.Rows = append(b.Rows, row)
		}
		out.Tables = append(out.Tables, b)
	}
	for _, q := range p.Pictures {
		b := Picture{Title: clean(q.Title), Bars: []Bar{}}
		parts := maxParts
		for i, bar := range q.Bars {
			if parts -= len(bar.Parts); i == maxBars || parts < 0 {
				b.More = len(q.Bars) - i
				break
			}
			copied := Bar{Label: clean(bar.Label), Note: clean(bar.Note), Bad: bar.Bad, Parts: []Part{}}
			for _, x := range bar.Parts {
				if x.Size > 0 {
					copied.Parts = append(copied.Parts, Part{Kind: clean(x.Kind), Size: x.Size, Text: clean(x.Text)})
				}
			}
			b.Bars = append(b.Bars, copied)
		}
		out.Pictures = append(out.Pictures, b)
	}
	return out
}

func cleanAll(row []string) []string {
	out := make([]string, len(row))
	for i, c := range row {
		out[i] = clean(c)
	}
	return out
}

// clean gives s with at most maxCell bytes, and a mark for each character that cannot be seen: one of them could
// turn the direction of the text around it.
func clean(s string) string {
	if len(s) > maxCell {
		s = strings.ToValidUTF8(s[:maxCell], "") + "…"
	}
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return '\uFFFD'
		}
		return r
	}, s)
}

// poll is what /state.json tells.
type poll struct {
	Role    string `json:"role"`
	Version string `json:"version"`
	Up      string `json:"up"`
	Seen    string `json:"seen"` // names this state
	Page
	Links  []linkData  `json:"links"`
	Charts []chartData `json:"charts"`
}

func (s *Server) stateJSON(w http.ResponseWriter, r *http.Request) {
	b, err := s.polled(r.Context(), r.URL.Query().Get("seen"))
	if err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write(b) // the reader has gone
}

// polled makes one text for all who poll while an answer is fresh: of all there is, or, for those who have seen a state
// before, of what has changed since.
func (s *Server) polled(ctx context.Context, seen string) (_ []byte, err error) {
	st := s.state.Load()
	s.shown(ctx, st)
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.delta != nil && st.deltaOf == seen {
		return st.delta, nil
	}
	b, ok, err := st.since(seen, s.up())
	if err != nil {
		return nil, err
	}
	if ok {
		st.delta, st.deltaOf = b, seen
		return b, nil
	}
	if st.body == nil {
		st.body, err = json.Marshal(poll{s.o.Role, s.o.Version, s.up(), st.ages.seen(), st.last, linksOf(st.last.Links),
			st.charts})
	}
	return st.body, err
}

func (s *Server) up() string { return time.Since(s.began).Round(time.Second).String() }

var (
	//go:embed console.js
	consoleJS []byte
	//go:embed console.css
	consoleCSS []byte
)

// file serves what the page loads.
func file(kind string, b []byte) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind+"; charset=utf-8")
		_, _ = w.Write(b) // the reader has gone
	}
}

// page shows the role to people. All that it shows goes through [html.EscapeString]: names are others'
// choice. A template would do that by itself, but it looks methods up by name while the program runs, so
// the linker could leave out no method of any type, which is 4 MB of kvd.
//
// Without scripts it is tables. console.js fills in pictures and charts, and keeps all of it up to date.
func (s *Server) page(w http.ResponseWriter, r *http.Request) {
	p := s.shown(r.Context(), s.state.Load())
	var b bytes.Buffer
	text := func(s string) { b.WriteString(html.EscapeString(s)) }
	b.WriteString(pageHead)
	text(s.o.Role)
	b.WriteString(pageStyle)
	text(s.o.Role)
	b.WriteString("</h1>\n<p id=\"version\">Version ")
	text(s.o.Version)
	b.WriteString(", up " + s.up() + ".</p>\n")
	state := "trouble"
	if p.Health.Well {
		state = "well"
	}
	fmt.Fprintf(&b, `<div id="health" role="status" class="%s"><p id="health-text">`, state)
	text(p.Health.Text)
	b.WriteString("</p>\n<p id=\"health-mend\">")
	text(p.Health.Mend)
	b.WriteString(pageLinks)
	for _, l := range linksOf(p.Links) {
		b.WriteString(`<li><a rel="noreferrer" href="`)
		text(l.Href)
		b.WriteString(`">`)
		text(l.Role + " " + l.Name)
		b.WriteString("</a></li>\n")
	}
	b.WriteString(pageLead)
	for i, t := range p.Tables {
		if i == p.Lead {
			b.WriteString(pageMain)
		}
		writeTable(&b, i, &t)
	}
	if len(p.Tables) == p.Lead {
		b.WriteString(pageMain)
	}
	b.WriteString("</div></main>\n</html>\n")
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write(b.Bytes()) // the reader has gone
}

func writeTable(b *bytes.Buffer, i int, t *Table) {
	text := func(s string) { b.WriteString(html.EscapeString(s)) }
	fmt.Fprintf(b, `<section><h2 id="t%d">`, i)
	text(t.Title)
	fmt.Fprintf(b, "</h2>\n"+`<div class="scroll" role="region" aria-labelledby="t%d" tabindex="0"><table><thead><tr>`, i)
	for _, c := range t.Header {
		b.WriteString(`<th scope="col">`)
		text(c)
		b.WriteString("</th>")
	}
	b.WriteString("</tr>\n</thead><tbody>")
	rows := t.Rows
	if len(rows) == 0 {
		rows = [][]string{{"none"}}
	}
	for _, row := range rows {
		b.WriteString("<tr>")
		shown := min(len(row), max(len(t.Header), 1))
		for j, c := range row[:shown] {
			b.WriteString("<td>")
			if more := row[shown:]; j == 0 && len(more) > 0 {
				b.WriteString("<details><summary>")
				text(c)
				b.WriteString("</summary><ul>")
				for _, m := range more {
					b.WriteString("<li>")
					text(m)
					b.WriteString("</li>")
				}
				b.WriteString("</ul></details>")
			} else {
				text(c)
			}
			b.WriteString("</td>")
		}
		b.WriteString("</tr>\n")
	}
	b.WriteString("</tbody></table></div>\n")
	if t.More > 0 {
		fmt.Fprintf(b, "<p class=\"more\">and %d more</p>\n", t.More)
	}
	b.WriteString("</section>\n")
}

// The page, around what changes.
const (
	pageHead = `<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>kvd `
	pageStyle = `</title>
<link rel="stylesheet" href="/console.css">
<script src="/console.js" defer></script>
<header><h1>kvd `
	pageLinks = `</p></div>
<nav aria-label="endpoints"><a href="/metrics">metrics</a> <a href="/state.json">state.json</a> <a href="/healthz">healthz</a> <a href="/readyz">readyz</a> <a href="/debug/pprof/">pprof</a></nav>
<nav aria-label="other processes"><ul id="links">
`
	pageLead = `</ul></nav>
</header>
<main><div id="lead">
`
	pageMain = `</div><div id="charts"></div><div id="pictures"></div><div id="tables">
`
)
