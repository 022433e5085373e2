package live

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// newTracked is a table of most keys in two databases, in which client i of the radios has number i+1.
func newTracked(most int, radios ...*radio) (t *Tracked, listeners []*Listener) {
	t = &Tracked{}
	for _, r := range radios {
		listeners = append(listeners, &Listener{Client: r})
	}
	t.Init(most, 2, func(id int64) *Listener {
		if id > int64(len(listeners)) {
			return nil
		}
		return listeners[id-1]
	})
	return t, listeners
}

// invalidates is the message of RESP3 for keys.
func invalidates(keys ...string) string {
	var w resp.Writer
	w.Proto = 3
	w.Push(2)
	w.BulkString("invalidate")
	w.Array(len(keys))
	for _, k := range keys {
		w.BulkString(k)
	}
	return string(w.Bytes())
}

func never() bool { return false }

// TestTracked: a client hears once of each key that it has read, whichever way it changes, and keeps what it wrote.
func TestTracked(t *testing.T) {
	a, b := &radio{resp3: true}, &radio{resp3: true}
	x, ls := newTracked(10, a, b)
	var box Outbox
	want := func(why, heardA, heardB string) {
		t.Helper()
		if box.Flush(); a.heard != heardA || b.heard != heardB {
			t.Errorf("%s: heard %q and %q, want %q and %q", why, a.heard, b.heard, heardA, heardB)
		}
		a.heard, b.heard = "", ""
	}
	x.Track(ls[0], &Tracking{NoLoop: true}, never)
	x.Track(ls[1], &Tracking{}, never)
	read := func(l *Listener, key string, version uint64) {
		x.Enter(&box, l, 0, []byte(key))
		x.SetVersion(&box, l, 0, []byte(key), version)
	}
	read(ls[0], "k", 1)
	read(ls[1], "k", 1)
	want("both read the same version", "", "")
	read(ls[1], "k", 2)
	want("the other one read a newer one", invalidates("k"), "")
	read(ls[0], "k", 2)
	x.Invalidate(&box, ls[0], []Written{{Name: []byte("k"), Read: true, Version: 3}})
	want("its own write", "", invalidates("k"))
	name := exec.KeyName{Name: "k"}
	x.Compare(&box, name, UnknownVersion)
	x.Compare(&box, name, 3)
	want("it caches what it has left", "", "")
	x.Compare(&box, name, 4)
	x.Compare(&box, name, 5)
	want("it was written elsewhere", invalidates("k"), "")
	read(ls[0], "k", 5)
	x.InvalidateAll(&box)
	want("anything may have been written", ">2\r\n$10\r\ninvalidate\r\n_\r\n", ">2\r\n$10\r\ninvalidate\r\n_\r\n")
	read(ls[0], "k", 5)
	if keys, items, _ := x.Counts(); keys != 1 || items != 1 || len(x.Names()) != 1 || x.Clients() != 2 {
		t.Errorf("%d keys, %d items, %d clients", keys, items, x.Clients())
	}
	if !x.Leave(ls[0]) || x.Leave(ls[0]) {
		t.Error("it leaves once")
	}
	if keys, items, _ := x.Counts(); keys+items > 0 || x.Clients() != 1 {
		t.Errorf("%d keys, %d items, %d clients are left", keys, items, x.Clients())
	}
	x.Enter(&box, ls[0], 0, []byte("k"))
	if len(x.Names()) > 0 {
		t.Error("a client that has left enters a key")
	}
}

// TestTrackedIsBounded: a full table loses keys, whose clients are told.
func TestTrackedIsBounded(t *testing.T) {
	a := &radio{resp3: true}
	x, ls := newTracked(3, a)
	x.Track(ls[0], &Tracking{}, never)
	var box Outbox
	for i := range 10 {
		x.Enter(&box, ls[0], 1, fmt.Appendf(nil, "k%d", i))
	}
	box.Flush()
	if keys, items, _ := x.Counts(); keys != 3 || items != 3 || strings.Count(a.heard, "invalidate") != 7 {
		t.Errorf("%d keys, %d items, heard %q", keys, items, a.heard)
	}
}

// TestRedirect: another client hears in its place, in RESP2 if it listens; when that has gone, the client hears of it.
func TestRedirect(t *testing.T) {
	a, b := &radio{resp3: true}, &radio{memory: 1 << 10}
	x, ls := newTracked(3, a, b)
	how := &Tracking{BCast: true, Redirect: 2, Prefixes: []string{"k"}}
	x.Track(ls[0], how, never)
	var box Outbox
	write := func() {
		x.Invalidate(&box, nil, []Written{{Name: []byte("k2")}, {Name: []byte("other")}, {Name: []byte("k1")}})
		box.Flush()
	}
	write()
	if a.heard+b.heard != "" {
		t.Errorf("heard %q and %q", a.heard, b.heard)
	}
	var h Hub
	h.Init()
	var w resp.Writer
	h.Subscribe(&w, ls[1], ToChannel, words("__redis__:invalidate"))
	write()
	if want := "*3\r\n$7\r\nmessage\r\n$20\r\n__redis__:invalidate\r\n*2\r\n$2\r\nk1\r\n$2\r\nk2\r\n"; b.heard != want {
		t.Errorf("heard %q, want %q", b.heard, want)
	}
	x.find = func(int64) *Listener { return nil }
	write()
	write()
	if want := ">2\r\n$21\r\ntracking-redir-broken\r\n:2\r\n"; a.heard != want || how.Letters() != "tRB" {
		t.Errorf("heard %q, want %q; its letters are %s", a.heard, want, how.Letters())
	}
}

// TestChecksEnd: the looks at versions begin with the first client that needs them, and end with the last one.
func TestChecksEnd(t *testing.T) {
	x, ls := newTracked(1, &radio{}, &radio{})
	begun := 0
	begin := func() bool { begun++; return true }
	x.Track(ls[0], &Tracking{BCast: true}, begin)
	if begun != 0 || x.Checking() {
		t.Error("somebody looks for a client with BCAST")
	}
	x.Track(ls[1], &Tracking{}, begin)
	x.Track(ls[1], &Tracking{NoLoop: true}, begin)
	if begun != 1 || x.Rests() || !x.Checking() {
		t.Errorf("%d have begun to look; one goes on: %t", begun, x.Checking())
	}
	x.Leave(ls[0])
	x.Leave(ls[1])
	if !x.Checking() || !x.Rests() || x.Checking() {
		t.Error("somebody looks for nobody")
	}
}

// TestParseTracking: options are refused in Redis's words, and a mode follows another one or does not.
func TestParseTracking(t *testing.T) {
	bcast := &Tracking{BCast: true, Prefixes: []string{"ab"}}
	for _, c := range []struct {
		args string
		was  *Tracking
		want string // the start of the error, or the prefixes
	}{
		{"on", nil, ""},
		{"off", nil, "off"},
		{"maybe", nil, "ERR syntax error"},
		{"on redirect 3", nil, "ERR The client ID you want redirect to does not exist"},
		{"on redirect 1 redirect 1", nil, "ERR A client can only redirect to a single other client"},
		{"off nonsense", nil, "ERR syntax error"},
		{"on prefix a", nil, "ERR PREFIX option requires BCAST"},
		{"on bcast", nil, `[""]`},
		{"on bcast prefix cd prefix b", bcast, `["ab" "cd" "b"]`},
		{"on bcast prefix a", bcast, "ERR Prefix 'a' overlaps with an existing prefix 'ab'"},
		{"on bcast prefix a prefix ab", nil, "ERR Prefix 'a' overlaps with another provided prefix 'ab'"},
		{"on bcast optin", nil, "ERR OPTIN and OPTOUT are not compatible with BCAST"},
		{"on optin optout", nil, "ERR You can't specify both OPTIN mode and OPTOUT mode"},
		{"on optin", &Tracking{OptOut: true}, "ERR You can't switch OPTIN/OPTOUT mode"},
		{"on", bcast, "ERR You can't switch BCAST mode on/off"},
	} {
		how, err := ParseTracking(words(c.args), func(id int64) bool { return id == 1 })
		got := "off"
		if how != nil {
			err = how.Follow(c.was)
		}
		switch {
		case err != nil:
			got = err.Error()
		case how != nil && how.BCast:
			got = fmt.Sprintf("%q", how.Prefixes)
		case how != nil:
			got = ""
		}
		if err == nil && got != c.want || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: got %s, want %s", c.args, got, c.want)
		}
	}
}

// TestNotes: which reads a client caches, by its mode and by what it has said of the command.
func TestNotes(t *testing.T) {
	for _, c := range []struct {
		how  *Tracking
		want [3]bool // as usual, yes, no
	}{
		{nil, [3]bool{}},
		{&Tracking{}, [3]bool{true, true, true}},
		{&Tracking{BCast: true}, [3]bool{}},
		{&Tracking{OptIn: true}, [3]bool{false, true, false}},
		{&Tracking{OptOut: true}, [3]bool{true, true, false}},
	} {
		for i, said := range []Caching{CachingAsUsual, CachingYes, CachingNo} {
			if got := c.how.Notes(said); got != c.want[i] {
				t.Errorf("%+v, %d: %t", c.how, said, got)
			}
		}
	}
	if _, err := (*Tracking)(nil).ParseCaching(words("yes")); err == nil {
		t.Error("a client that caches nothing says what it caches")
	}
	if c, err := (&Tracking{OptOut: true}).ParseCaching(words("NO")); c != CachingNo || err != nil {
		t.Errorf("%d, %v", c, err)
	}
}

// TestLateTracking: keys that a transaction reads behind CACHING are entered behind it, and its own writes told.
func TestLateTracking(t *testing.T) {
	a := &radio{resp3: true}
	x, ls := newTracked(10, a)
	how := &Tracking{Prefixes: []string{"p"}}
	x.Track(ls[0], how, never)
	var late LateTracking
	key := func(name string, changed, present bool) *exec.Key {
		k := &exec.Key{KeyName: exec.KeyName{DB: 1, Name: name}, Version: 7}
		k.Changed, k.Present = changed, present
		return k
	}
	if !late.IsEmpty() {
		t.Error("there is something to enter")
	}
	kept, wrote := key("kept", false, true), key("wrote", true, true)
	late.Performed(how, kept, true, false)
	late.Performed(how, kept, true, false)
	late.Performed(how, wrote, true, false)
	late.Performed(how, wrote, false, true)
	late.Performed(how, key("p2", true, true), false, true)
	late.Performed(how, key("p1", true, false), false, true)
	var box Outbox
	names := x.EnterLate(&box, ls[0], &late)
	box.Flush()
	if want := invalidates("wrote") + invalidates("p1", "p2"); a.heard != want {
		t.Errorf("heard %q, want %q", a.heard, want)
	}
	if len(names) != 1 || names[0] != kept.KeyName || len(x.Names()) != 1 {
		t.Errorf("looks at %v, and %v are cached", names, x.Names())
	}
	if late.Forget(); late.keys != nil {
		t.Error("keys are left")
	}
}

// TestEachEvent: the events of a change are Redis's, in their order, and go to the channels that are asked for.
func TestEachEvent(t *testing.T) {
	for _, c := range []struct {
		ev   exec.Event
		ch   exec.Change
		want string
	}{
		{exec.Event{Class: values.OnNew, Name: "set"}, exec.Change{Created: true, Expires: 5}, "new set expire"},
		{exec.Event{Class: values.OnStream, Name: "lpop"}, exec.Change{Deleted: true}, "lpop del"},
		{exec.Event{Class: values.OnStream, Name: "sinterstore"}, exec.Change{Deleted: true}, "del"},
		{exec.Event{Class: values.OnGeneric, Name: "expire"}, exec.Change{Deleted: true}, "del"},
		{exec.Event{Class: values.OnGeneric, Name: "rename_from"}, exec.Change{Deleted: true}, "rename_from"},
		{exec.Event{Class: values.OnNew, Name: "getex"}, exec.Change{}, "persist"},
		{exec.Event{Class: values.OnNew, Name: "getex"}, exec.Change{Expires: 5}, "expire"},
		{exec.Event{Class: values.OnStream, Name: "xadd"}, exec.Change{Also: "xtrim"}, "xadd xtrim"},
	} {
		var got []string
		EachEvent(c.ev, c.ch, func(ev exec.Event) { got = append(got, ev.Name) })
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%v, %+v: %s, want %s", c.ev, c.ch, s, c.want)
		}
	}
	var got []string
	say := func(channel, payload []byte) { got = append(got, string(channel)+"="+string(payload)) }
	ev := exec.Event{Class: values.OnNew, Name: "set"}
	KeyMessages(values.OnStream|values.OnKeyspace|values.OnKeyevent, 3, ev, []byte("k"), say)
	if len(got) > 0 {
		t.Errorf("told of %q, which nobody asked for", got)
	}
	KeyMessages(values.OnNew|values.OnKeyspace, 3, ev, []byte("k"), say)
	KeyMessages(values.OnNew|values.OnKeyevent, 3, ev, []byte("k"), say)
	if s := strings.Join(got, " "); s != "__keyspace@3__:k=set __keyevent@3__:set=k" {
		t.Errorf("told %s", s)
	}
}
