package live

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/redis/spec"
)

// TestAppendCommand: lines are bounded, have no line's end inside, and hide passwords.
func TestAppendCommand(t *testing.T) {
	long := strings.Repeat("x", MaxShown+10)
	for _, c := range []struct {
		id   spec.ID
		args []string
		want string
	}{
		{spec.CmdSet, []string{"SET", "a", "b"}, `"SET" "a" "b"`},
		{spec.CmdSet, []string{"SET", "\r\n\t\a\b\\\"\x00\xff", "~"}, `"SET" "\r\n\t\a\b\\\"\x00\xff" "~"`},
		{spec.CmdSet, []string{"SET", long}, `"SET" "` + long[:MaxShown-6] + `... (16 more bytes)"`},
		{spec.CmdSet, []string{"SET", long[:MaxShown-9], "a", "b"}, `"SET" "` + long[:MaxShown-9] +
			`" "... (2 more arguments)"`},
		{spec.CmdAuth, []string{"AUTH", "me", "sesame"}, `"AUTH" "(redacted)" "(redacted)"`},
	} {
		var args [][]byte
		for _, a := range c.args {
			args = append(args, []byte(a))
		}
		got := string(AppendCommand(nil, "lua", &spec.Table[c.id], args, len(args), 3))
		if _, got, _ = strings.Cut(got, " "); got != "[3 lua] "+c.want+"\r\n" {
			t.Errorf("%.60q…: got …%q, want …%q", c.args, got[max(0, len(got)-60):], c.want[max(0, len(c.want)-60):])
		}
	}
}

// TestMonitors: all of them are shown each line, and somebody is told when there are none.
func TestMonitors(t *testing.T) {
	var m Monitors
	a, b := &radio{}, &radio{}
	la, lb := &Listener{Client: a}, &Listener{Client: b}
	begun, ended := 0, 0
	add := func(l *Listener) { m.Add(l, func() { begun++ }) }
	remove := func(l *Listener) { m.Remove(l, func() { ended++ }) }
	add(la)
	add(lb)
	var box Outbox
	show := func(line string) {
		m.Show(&box, func(buf []byte) []byte { return append(buf, line...) })
		box.Flush()
	}
	show("1;")
	remove(lb)
	show("2;")
	n := 0
	m.Each(func(*Listener) { n++ })
	if m.Count() != 1 || n != 1 || begun != 2 || ended != 0 {
		t.Errorf("%d and %d are there, %d have begun, it ended %d times", m.Count(), n, begun, ended)
	}
	remove(la)
	show("3;")
	if a.heard != "1;2;" || b.heard != "1;" || ended != 1 {
		t.Errorf("a was shown %q, b %q; it ended %d times", a.heard, b.heard, ended)
	}
	if !bytes.Equal(m.mu.line[:2], []byte("3;")) {
		t.Error("the buffer does not serve again")
	}
}
