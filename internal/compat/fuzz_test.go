package compat

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	fuzzSeed = flag.Uint64("seed", 1, "first seed of the random sequences of commands")
	fuzzRuns = flag.Int("runs", 0,
		"how many random sequences of commands there are; 0: as many as the gate has time for")
)

// step is a command of a sequence, with its arguments.
type step []string

// reply is what a server answered.
type reply struct {
	kind  byte   // of RESP; '!' if no answer came
	text  string // of a reply that is no list
	elems []reply
}

func (r reply) String() string {
	switch r.kind {
	case '*', '~', '%', '>':
		var parts []string
		for _, e := range r.elems {
			parts = append(parts, e.String())
		}
		return string(r.kind) + "[" + strings.Join(parts, " ") + "]"
	}
	return fmt.Sprintf("%c%q", r.kind, r.text)
}

// failed reports whether the server refused the command.
func (r reply) failed() bool { return r.kind == '-' || r.kind == '!' }

// session is a connection that begins with nothing in the databases.
type session interface {
	ask(step) reply
	io.Closer
}

// dialect is a protocol: how commands are made up, sent and compared.
type dialect interface {
	// sequence makes commands up.
	sequence(rng *rand.Rand) []step
	// begin connects to a server and empties it; each of the sequences that a seed
	// stands for is asked in all variants.
	begin(addr string, variant int) (session, error)
	variants() int
	// alike says whether two answers to the last of the steps mean the same.
	alike(steps []step, replies []reply, other reply) bool
	show(step) string
}

// difference is a line of a reviewed list.
type difference struct {
	command, ours, theirs *regexp.Regexp
	reason                string
	met                   int
}

// reviewed is such a list, of testdata/differences.
type reviewed struct {
	file    string
	left    map[string]string // commands that are not compared, and why
	allowed []*difference
}

// loadReviewed reads lines of two forms:
//
//	not COMMAND... -- REASON
//	COMMAND || OURS || THEIRS -- REASON
//
// The first lists commands that are not compared; a subcommand's name is "object|freq". The
// second has regular expressions of a command and of the answers to it that may differ.
func loadReviewed(name string) (*reviewed, error) {
	r := &reviewed{file: filepath.Join("testdata", "differences", name+".txt"), left: make(map[string]string)}
	b, err := os.ReadFile(r.file)
	if err != nil {
		return nil, err
	}
	for i, line := range strings.Split(string(b), "\n") {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		pattern, reason, ok := strings.Cut(line, " -- ")
		if !ok || reason == "" {
			return nil, fmt.Errorf("%s:%d: no reason: %s", r.file, i+1, line)
		}
		if names, ok := strings.CutPrefix(pattern, "not "); ok {
			for _, n := range strings.Fields(names) {
				r.left[n] = reason
			}
			continue
		}
		parts := strings.Split(pattern, " || ")
		if len(parts) != 3 {
			return nil, fmt.Errorf("%s:%d: line is neither not COMMAND... nor COMMAND || OURS || THEIRS: %s", r.file,
				i+1, line)
		}
		d := &difference{reason: reason}
		for j, at := range []**regexp.Regexp{&d.command, &d.ours, &d.theirs} {
			if *at, err = regexp.Compile("(?is)^(?:" + parts[j] + ")$"); err != nil {
				return nil, fmt.Errorf("%s:%d: %w", r.file, i+1, err)
			}
		}
		r.allowed = append(r.allowed, d)
	}
	return r, nil
}

// allows finds the line that a difference is on.
func (r *reviewed) allows(command string, ours, theirs reply) *difference {
	for _, d := range r.allowed {
		if d.command.MatchString(command) && d.ours.MatchString(ours.String()) &&
			d.theirs.MatchString(theirs.String()) {
			return d
		}
	}
	return nil
}

// divergence is where the answers to a sequence differ.
type divergence struct {
	steps        []step // up to the command that is answered differently
	ours, theirs reply
}

// fuzzer asks two servers the same.
type fuzzer struct {
	dialect
	ours, theirs string // addresses
	list         *reviewed
	commands     int
}

// play asks a sequence. It returns nil if all answers are alike, but for those that the list
// allows. After a difference that is allowed and leaves the databases different, the rest of
// the sequence would compare nothing.
func (f *fuzzer) play(steps []step, variant int) (*divergence, error) {
	a, err := f.begin(f.ours, variant)
	if err != nil {
		return nil, fmt.Errorf("the gateway: %w", err)
	}
	defer a.Close()
	b, err := f.begin(f.theirs, variant)
	if err != nil {
		return nil, fmt.Errorf("the original: %w", err)
	}
	defer b.Close()
	var replies []reply
	for i, s := range steps {
		theirs := make(chan reply, 1)
		go func() { theirs <- b.ask(s) }()
		ours, their := a.ask(s), <-theirs
		replies = append(replies, ours)
		f.commands++
		if f.alike(steps[:i+1], replies, their) {
			continue
		}
		d := f.list.allows(f.show(s), ours, their)
		if d == nil {
			return &divergence{steps[:i+1], ours, their}, nil
		}
		d.met++
		if !ours.failed() || !their.failed() {
			return nil, nil
		}
	}
	return nil, nil
}

// shrink leaves commands out as long as the last one is still answered differently.
func (f *fuzzer) shrink(d *divergence, variant int) *divergence {
	last := d.steps[len(d.steps)-1]
	for n := (len(d.steps) - 1) / 2; n > 0; n /= 2 {
		for at := 0; at+n < len(d.steps); {
			fewer := slices.Delete(slices.Clone(d.steps), at, at+n)
			got, err := f.play(fewer, variant)
			if err == nil && got != nil && len(got.steps) == len(fewer) && f.show(got.steps[len(got.steps)-1]) ==
				f.show(last) {
				d = got
			} else {
				at += n
			}
		}
	}
	return d
}

// maxDivergences bounds what a run prints: they repeat.
const maxDivergences = 25

// differs plays the sequences of some seeds and tells of each command that is answered
// differently, once, by the shortest sequence that shows it.
func (f *fuzzer) differs(t *testing.T, target string, runs int) {
	if *fuzzRuns > 0 {
		runs = *fuzzRuns
	}
	told := make(map[string]bool)
	began := time.Now()
	for seed := *fuzzSeed; seed < *fuzzSeed+uint64(runs); seed++ {
		for variant := range f.variants() {
			d, err := f.play(f.sequence(rand.New(rand.NewPCG(seed, 16))), variant)
			must(t, err)
			if d == nil {
				continue
			}
			name := strings.ToLower(d.steps[len(d.steps)-1][0]) + string(d.ours.kind) + string(d.theirs.kind)
			if told[name] {
				continue
			}
			told[name] = true
			d = f.shrink(d, variant)
			var b bytes.Buffer
			for _, s := range d.steps {
				fmt.Fprintf(&b, "\t%s\n", f.show(s))
			}
			t.Errorf("answers differ:\n%s\tours   %.400v\n\ttheirs %.400v\nagain: make fuzz-compat FUZZ=%s SEED=%d "+
				"RUNS=1 (variant %d)\nif it should be so, list it in %s",
				b.Bytes(), d.ours, d.theirs, target, seed, variant, f.list.file)
			if len(told) >= maxDivergences {
				t.Fatal("and so on")
			}
		}
	}
	t.Logf("%d commands in %v", f.commands, time.Since(began).Round(time.Millisecond))
	for _, d := range f.list.allowed {
		if d.met == 0 {
			t.Logf("%s: no command met %v", f.list.file, d.command)
		}
	}
}

// errNoAnswer: a server that did not answer in time.
var errNoAnswer = errors.New("no answer")

// answerTime bounds the wait for an answer. Commands that block do so for less.
const answerTime = 10 * time.Second
