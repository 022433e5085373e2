package verbs

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/testutil"
)

// Over the limit a dialer hears why it is refused, in the protocol's words; a half handshake gives way to it.
func TestTooManyConnections(t *testing.T) {
	door, err := NewDoor(netsrv.Limits{MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	l := testutil.Listen(t)
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	accept := func() (net.Conn, *netsrv.Guest) {
		t.Helper()
		c, g, err := door.Accept(l, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c, g
	}
	half := dial()
	_, first := accept()
	whole := dial()
	gone := make(chan struct{})
	go func() { // as whoever serves it does when it finds it closed
		defer close(gone)
		_, _ = half.Read(make([]byte, 1))
		first.Release()
	}()
	_, second := accept()
	<-gone
	if !second.Finish() || first.Err() == nil {
		t.Errorf("the first one stays: %v", first.Err())
	}
	third := dial()
	go func() { _, _, _ = door.Accept(l, nil) }() // ends with l
	text, err := io.ReadAll(third)
	if err != nil || len(text) < headSize {
		t.Fatalf("%q, %v", text, err)
	}
	w, err := parseWelcome(text[:headSize])
	if err != nil || !w.refused || string(text[headSize:]) != "too many connections" {
		t.Errorf("%+v, %q, %v", w, text[headSize:], err)
	}
	_ = whole.Close()
	if st := door.Stats(); st.Refused[netsrv.ReasonFull] != 1 || st.Refused[netsrv.ReasonHandshake] != 1 {
		t.Errorf("%+v", st)
	}
}
