package index_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/index"
)

func fields(s string) []string { return strings.Fields(s) }

// crashScripts are the operations that a client does not finish, each with what
// others did before.
var crashScripts = []struct {
	name   string
	setup  string // operations of client 2, separated by ";"
	warm   bool   // the crashing client has a hint
	full   int    // home slots that are taken
	op     string
	before string // value of k before; "" is absent
	after  string // and once op has happened
}{
	{"insert", "", false, 0, "put k new", "", "new"},
	{"insert-again", "put k old;del k", false, 0, "put k new", "", "new"},
	{"insert-stash", "", false, 30, "put k new", "", "new"},
	{"update", "put k old", true, 0, "put k new", "old", "new"},
	{"update-no-hint", "put k old", false, 0, "put k new", "old", "new"},
	{"update-stash", "put k old", false, 30, "put k new", "old", "new"},
	{"update-lost", "put k old;put k newer", true, 0, "put k new", "newer", "new"},
	{"delete", "put k old", true, 0, "del k", "old", ""},
	{"delete-stash", "put k old", true, 30, "del k", "old", ""},
	{"if-absent", "", false, 0, "put k new if-absent", "", "new"},
	{"if-present", "put k old", false, 0, "put k new if-present", "old", "new"},
	{"modify", "put k old", true, 0, "append k +", "old", "old+"},
	{"modify-absent", "", false, 0, "append k +", "", "+"},
	{"cache-insert", "", false, 0, "put k new", "", "new"},
	{"cache-update", "put k old", true, 0, "put k new", "old", "new"},
	{"cache-evict", "put k old", false, 0, "evict k", "old", ""},
	{"cache-evict-again", "put k older;evict k;put k old", false, 0, "evict k", "old", ""},
}

// TestCrashAtEveryStep stops a client after every single access of an operation,
// declares it fenced, and lets others work on the same key and group. They must
// finish, see the operation as happened or not happened, and agree on it from the
// first of them on.
func TestCrashAtEveryStep(t *testing.T) {
	followUps := []string{"get k", "exists k", "put k mine", "put k mine if-absent", "put k mine if-present", "del k",
		"append k *", "put kk other"}
	crashes := 0
	for _, s := range crashScripts {
		for r := uint8(1); r <= 3; r++ {
			for _, next := range followUps {
				for accesses := 0; ; accesses++ {
					name := fmt.Sprintf("%s r=%d, crash after %d accesses, then %s", s.name, r, accesses, next)
					w := newWorld(r, 256)
					w.fill(home(), s.full)
					if strings.HasPrefix(s.name, "cache") {
						w.asCache()
					}
					reader := w.client(3)
					crasher := w.client(1)
					if s.warm && strings.Contains(s.name, "lost") {
						first, rest, _ := strings.Cut(s.setup, ";")
						must(t, w.client(2).do(t, fields(first)...))
						must(t, crasher.do(t, "get", "k"))
						must(t, w.client(2).do(t, fields(rest)...))
					} else if s.setup != "" {
						for op := range strings.SplitSeq(s.setup, ";") {
							must(t, w.client(2).do(t, fields(op)...))
						}
						if s.warm {
							must(t, crasher.do(t, "get", "k"))
						}
					}
					if s.before != "" {
						must(t, reader.do(t, "get", "k")) // a hint of the old word
					}
					if s.full > 0 {
						// The home group has room again.
						must(t, w.client(2).do(t, "del", "f07"))
						if strings.HasPrefix(s.name, "insert") {
							w.fill(home(), s.full)
						}
					}
					must(t, crasher.start(fields(s.op)))
					left := accesses
					done := false
					for left > 0 && !done {
						was := crasher.verbs
						_, done = crasher.advance(left, noFault)
						left -= crasher.verbs - was
					}
					w.fenced[crasher.id] = true
					crashes++
					w.follow(t, name, s.before, s.after, next)
					if done {
						break
					}
				}
			}
		}
	}
	t.Logf("%d crashes", crashes)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// follow runs next by a client that knows nothing of the crash and checks its
// answer; then what all others see.
func (w *world) follow(t *testing.T, name, before, after, next string) {
	t.Helper()
	value := func(c *client) string {
		switch err := c.do(t, "get", "k"); {
		case errors.Is(err, index.ErrNotFound):
			return ""
		case err != nil:
			t.Fatalf("%s: get: %v", name, err)
		}
		return string(c.op.Record.Value)
	}
	c := w.client(2)
	err := c.do(t, fields(next)...)
	// Values that k may have after next, given its answer.
	var want []string
	for _, v := range []string{before, after} {
		switch next {
		case "get k":
			if err == nil && v == string(c.op.Record.Value) || v == "" && errors.Is(err, index.ErrNotFound) {
				want = append(want, before, after)
				if v == after {
					want = []string{after}
				}
			}
		case "exists k":
			if err == nil && v != "" || v == "" && errors.Is(err, index.ErrNotFound) {
				want = append(want, v)
			}
		case "put k mine":
			if err == nil {
				want = append(want, "mine")
			}
		case "put k mine if-absent":
			if v == "" && err == nil {
				want = append(want, "mine")
			} else if v != "" && errors.Is(err, index.ErrExists) {
				want = append(want, v)
			}
		case "put k mine if-present":
			if v != "" && err == nil {
				want = append(want, "mine")
			} else if v == "" && errors.Is(err, index.ErrNotFound) {
				want = append(want, v)
			}
		case "del k":
			if v != "" && err == nil || v == "" && errors.Is(err, index.ErrNotFound) {
				want = append(want, "")
			}
		case "append k *":
			if err == nil {
				want = append(want, v+"*")
			}
		case "put kk other":
			if err == nil {
				want = append(want, v)
			}
		}
	}
	// A client with an old hint, then one with none.
	got := value(w.client(3))
	ok := false
	for _, v := range want {
		ok = ok || v == got
	}
	if !ok {
		t.Fatalf("%s: answered %v, then k is %q; want one of %q", name, err, got, want)
	}
	if again := value(w.client(4)); again != got {
		t.Fatalf("%s: k is %q, then %q for another client", name, got, again)
	}
	if next == "put kk other" {
		must(t, w.client(4).do(t, "get", "kk"))
	}
	// The group still takes writes.
	must(t, w.client(4).do(t, "put", "k", "last"))
	if v := value(w.client(3)); v != "last" {
		t.Fatalf("%s: k is %q after the last put", name, v)
	}
}
