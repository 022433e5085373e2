package httpd

import (
	"crypto/rand"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

// ages tells since which state of the page each part of it has been as it is, so that a page that has seen one
// is sent no more than what has changed since. Rows and bars are known by where they stand.
type ages struct {
	name     string // of the Serving that the states belong to
	now      uint64 // the latest state, from 1 on
	health   uint64
	links    uint64
	charts   uint64
	tables   []partAges
	pictures []partAges
}

// partAges are those of a table, or of a picture.
type partAges struct {
	frame uint64   // all of it but rows, and how many of these there are
	rows  []uint64 // of a picture: its bars
}

func newAges() ages { return ages{name: rand.Text()} }

// next goes on from what was last shown to p. charts says whether those are others now.
func (a *ages) next(last, p *Page, charts bool) {
	a.now++
	if a.now == 1 || last.Health != p.Health {
		a.health = a.now
	}
	if a.now == 1 || !slices.Equal(last.Links, p.Links) {
		a.links = a.now
	}
	if a.now == 1 || charts {
		a.charts = a.now
	}
	sameFrame := func(x, y *Table) bool {
		return x.Title == y.Title && x.More == y.More && len(x.Rows) == len(y.Rows) && slices.Equal(x.Header, y.Header)
	}
	a.tables = nextParts(a.tables, a.now, last.Tables, p.Tables, sameFrame, func(t *Table) [][]string {
		return t.Rows
	}, slices.Equal[[]string])
	sameTitle := func(x, y *Picture) bool {
		return x.Title == y.Title && x.More == y.More && len(x.Bars) == len(y.Bars)
	}
	a.pictures = nextParts(a.pictures, a.now, last.Pictures, p.Pictures, sameTitle, func(p *Picture) []Bar {
		return p.Bars
	}, sameBar)
}

func sameBar(x, y Bar) bool {
	return x.Label == y.Label && x.Note == y.Note && x.Bad == y.Bad && slices.Equal(x.Parts, y.Parts)
}

// nextParts gives the ages of parts, of which those before had the given ones.
func nextParts[P, R any](ages []partAges, now uint64, last, parts []P, sameFrame func(x, y *P) bool, rows func(*P) []R,
	sameRow func(x, y R) bool) []partAges {
	ages = slices.Grow(ages[:min(len(ages), len(parts))], len(parts))[:len(parts)]
	for i := range parts {
		var before []R
		if i >= len(last) || !sameFrame(&last[i], &parts[i]) {
			ages[i].frame = now
		}
		if i < len(last) {
			before = rows(&last[i])
		}
		these := rows(&parts[i])
		was := ages[i].rows
		ages[i].rows = slices.Grow(was[:min(len(was), len(these))], len(these))[:len(these)]
		for j, r := range these {
			if j >= len(before) || !sameRow(before[j], r) {
				ages[i].rows[j] = now
			}
		}
	}
	return ages
}

// seen names the latest state; since tells which one a name is.
func (a *ages) seen() string { return a.name + "." + strconv.FormatUint(a.now, 10) }

func (a *ages) since(seen string) (uint64, bool) {
	name, number, _ := strings.Cut(seen, ".")
	n, err := strconv.ParseUint(number, 10, 64)
	return n, err == nil && name == a.name && n > 0 && n <= a.now
}

// news is what /state.json?seen=STATE tells: what is not as it was in that state.
type news struct {
	Since    string         `json:"since"`
	Seen     string         `json:"seen"`
	Up       string         `json:"up"`
	Health   *Health        `json:"health,omitempty"`
	Links    *[]linkData    `json:"links,omitempty"`
	Charts   *[]chartData   `json:"charts,omitempty"`
	Tables   listNews[part] `json:"tables"`
	Pictures listNews[part] `json:"pictures"`
}

// listNews has of a list how long it is, and those of its elements that have changed.
type listNews[E any] struct {
	Count   int `json:"count"`
	Changed []E `json:"changed"`
}

// part is a Table or a Picture, of which no more rows, or bars, are there than have changed.
type part struct {
	At     int             `json:"at"`
	Title  string          `json:"title"`
	Header []string        `json:"header,omitempty"`
	More   int             `json:"more"`
	Rows   listNews[rowAt] `json:"rows"`
}

// rowAt is a row of a Table, or a Bar.
type rowAt struct {
	At int `json:"at"`
	Is any `json:"is"`
}

// since tells what has changed since a state that has been seen, and whether there was one.
func (st *state) since(seen, up string) ([]byte, bool, error) {
	from, ok := st.ages.since(seen)
	if !ok {
		return nil, false, nil
	}
	n := news{Since: seen, Seen: st.ages.seen(), Up: up}
	if st.ages.health > from {
		n.Health = &st.last.Health
	}
	if st.ages.links > from {
		links := linksOf(st.last.Links)
		n.Links = &links
	}
	if st.ages.charts > from {
		n.Charts = &st.charts
	}
	n.Tables = partsSince(from, st.ages.tables, func(i int) (part, func(j int) any) {
		t := &st.last.Tables[i]
		return part{Title: t.Title, Header: t.Header, More: t.More}, func(j int) any { return t.Rows[j] }
	})
	n.Pictures = partsSince(from, st.ages.pictures, func(i int) (part, func(j int) any) {
		p := &st.last.Pictures[i]
		return part{Title: p.Title, More: p.More}, func(j int) any { return p.Bars[j] }
	})
	b, err := json.Marshal(n)
	return b, true, err
}

func partsSince(from uint64, ages []partAges, of func(i int) (part, func(j int) any)) listNews[part] {
	all := listNews[part]{Count: len(ages), Changed: []part{}}
	for i, a := range ages {
		changed := []rowAt{}
		p, row := of(i)
		for j, age := range a.rows {
			if age > from {
				changed = append(changed, rowAt{j, row(j)})
			}
		}
		if a.frame > from || len(changed) > 0 {
			p.At, p.Rows = i, listNews[rowAt]{len(a.rows), changed}
			all.Changed = append(all.Changed, p)
		}
	}
	return all
}
