package nemesis

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// verdictLimit bounds the search for an order of one key's operations.
const verdictLimit = time.Minute

// life is one life of a client, which leaves one file a round.
type life struct {
	client, life int
	over         int64 // it is done with rounds below
	dead         bool
}

// checker checks rounds in turn, each when no client can add to it any more, and
// deletes what it has checked. It may be used concurrently.
type checker struct {
	dir   string // histories
	keep  string // where failing ones go
	round time.Duration
	fail  func(string)
	// also gets every round's events.
	also func([]event)

	mu struct {
		sync.Mutex
		lives    []*life
		next     int64 // round to check
		ops      map[string]map[string]int
		errs     map[string]int // by outcome and text without keys and numbers
		keys     int
		most     int // operations of one key
		slowest  time.Duration
		failures int
	}
}

func newChecker(dir, keep string, round time.Duration, fail func(string), also func([]event)) *checker {
	c := &checker{dir: dir, keep: keep, round: round, fail: fail, also: also}
	c.mu.ops, c.mu.errs = map[string]map[string]int{}, map[string]int{}
	c.mu.next = now() / int64(round)
	return c
}

// born adds a life before it starts.
func (c *checker) born(client, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.lives = append(c.mu.lives, &life{client: client, life: n, over: now() / int64(c.round)})
}

func (c *checker) each(client, n int, f func(*life)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.mu.lives {
		if l.client == client && l.life == n {
			f(l)
		}
	}
}

// over says that a life is done with rounds below round; died, that it is with all.
func (c *checker) over(client, n int, round int64) {
	c.each(client, n, func(l *life) { l.over = max(l.over, round) })
}

func (c *checker) died(client, n int) { c.each(client, n, func(l *life) { l.dead = true }) }

// ready gives the files of the next round if it can be checked.
func (c *checker) ready() (round int64, files []string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	round = c.mu.next
	if round >= now()/int64(c.round) {
		return 0, nil, false
	}
	for _, l := range c.mu.lives {
		if !l.dead && l.over <= round {
			return 0, nil, false
		}
		files = append(files, historyFile(c.dir, l.client, l.life, round))
	}
	c.mu.next++
	return round, files, true
}

// run checks until ctx ends, and then what is left of dead clients.
func (c *checker) run(ctx context.Context) {
	for {
		ending := ctx.Err() != nil
		round, files, ok := c.ready()
		if ok {
			c.check(round, files)
			continue
		}
		if ending {
			return
		}
		select {
		case <-ctx.Done():
			// The round under way has nobody in it.
			for end := (now()/int64(c.round) + 1) * int64(c.round); now() < end; {
				time.Sleep(time.Duration(end - now()))
			}
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (c *checker) check(round int64, files []string) {
	var all []event
	for _, f := range files {
		h, err := loadHistory(f)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			c.fail(err.Error())
		}
		all = append(all, h...)
	}
	if c.also != nil {
		c.also(all)
	}
	byKey := map[string][]event{}
	c.mu.Lock()
	for i := range all {
		e := &all[i]
		byKey[e.Key] = append(byKey[e.Key], *e)
		if c.mu.ops[e.Verb] == nil {
			c.mu.ops[e.Verb] = map[string]int{}
		}
		out := e.Out
		if out == "" {
			out = "died"
		}
		c.mu.ops[e.Verb][out]++
		if e.Err != "" {
			c.mu.errs[out+": "+plain(e.Err)]++
		}
	}
	c.mu.keys += len(byKey)
	c.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		h := byKey[key]
		began := time.Now()
		err := errors.Join(versions(h), linearizable(h, verdictLimit))
		c.mu.Lock()
		c.mu.most, c.mu.slowest = max(c.mu.most, len(h)), max(c.mu.slowest, time.Since(began))
		if err != nil {
			c.mu.failures++
		}
		keep := c.mu.failures <= 10
		c.mu.Unlock()
		if err != nil && keep {
			file := filepath.Join(c.keep, "history-"+strings.ReplaceAll(key, "/", "-")+".jsonl")
			c.fail(fmt.Sprintf("key %q: %v; its %d operations are in %s", key, err, len(h), file))
			if err := saveHistory(file, h); err != nil {
				c.fail(err.Error())
			}
		}
	}
	for _, f := range files {
		if err := os.Remove(f); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.fail(err.Error())
		}
	}
}

var details = regexp.MustCompile(`"[^"]*"|[0-9][0-9.:]*`)

// plain is an error's text without keys, addresses and numbers.
func plain(text string) string {
	text = details.ReplaceAllString(text, "*")
	return text[:min(len(text), 160)]
}

// summary is what was checked.
func (c *checker) summary() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	total := 0
	for _, verb := range slices.Sorted(maps.Keys(c.mu.ops)) {
		outs := c.mu.ops[verb]
		fmt.Fprintf(&b, "  %-6s", verb)
		for _, o := range slices.Sorted(maps.Keys(outs)) {
			fmt.Fprintf(&b, " %s=%d", o, outs[o])
			total += outs[o]
		}
		b.WriteByte('\n')
	}
	for _, text := range slices.Sorted(maps.Keys(c.mu.errs)) {
		fmt.Fprintf(&b, "  %6d× %s\n", c.mu.errs[text], text)
	}
	verdict := "linearizable"
	if c.mu.failures > 0 {
		verdict = fmt.Sprintf("NOT linearizable: %d keys", c.mu.failures)
	}
	return fmt.Sprintf("operations %d\n%shistory    %s: %d keys, at most %d operations each, slowest verdict %v\n",
		total, b.String(), verdict, c.mu.keys, c.mu.most, c.mu.slowest.Round(time.Millisecond))
}
