package gateway

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/netsrv"
)

// heard are the commands that Options.Answered has told of, a line each.
type heard struct {
	mu    sync.Mutex
	lines []string
}

func (h *heard) answered(a netsrv.Answered) {
	line := a.Database + " " + a.Command
	if a.Error != "" {
		line += fmt.Sprintf(" %s %v", a.Error, a.Unknown)
	}
	if _, ok := a.Client.(*net.TCPAddr); !ok || a.Took < 0 {
		line += fmt.Sprintf(": took %v, from %v", a.Took, a.Client)
	}
	h.mu.Lock()
	h.lines = append(h.lines, line)
	h.mu.Unlock()
}

// TestAnswered: commands alone, pipelined, of several keys, in transactions, refused, failed and maybe done are told
// once each, before their replies are there.
func TestAnswered(t *testing.T) {
	var h *heard
	var store *clienttest.Store
	onBothWaysWith(t, func() Options {
		h, store = new(heard), clienttest.New(clienttest.Options{})
		return Options{Answered: h.answered, Databases: []Database{
			{"first", store}, {"second", clienttest.New(clienttest.Options{})}}}
	}, func(t *testing.T, p *peer, g *Gateway) {
		want := func(lines ...string) {
			t.Helper()
			h.mu.Lock()
			defer h.mu.Unlock()
			if !slices.Equal(h.lines, lines) {
				t.Errorf("told of %q, want %q", h.lines, lines)
			}
			h.lines = nil
		}
		p.do(t, "PING") // a connection in a loop was greeted before
		h.mu.Lock()
		h.lines = nil
		h.mu.Unlock()
		p.want(t, "+OK\r\n", "SET", "a", "1")
		p.want(t, bulk("1"), "GET", "a")
		want("first set", "first get")
		p.send(t, []string{"MSET", "b", "2", "c", "3"}, []string{"MGET", "a", "none"}, []string{"HGET", "a", "f"},
			[]string{"nosuch", "a"}, []string{"GET"}, []string{"CONFIG", "GET", "hz"})
		for range 6 {
			p.reply(t)
		}
		want("first mset", "first mget", "first hget WRONGTYPE false", "first unknown ERR false", "first get ERR false",
			"first config|get")
		p.send(t, []string{"MULTI"}, []string{"INCR", "a"}, []string{"HGET", "a", "f"}, []string{"EXEC"},
			[]string{"EVAL", "return redis.call('INCR', KEYS[1])", "1", "a"})
		for range 5 {
			p.reply(t)
		}
		want("first multi", "first incr", "first hget WRONGTYPE false", "first exec ERR false", "first eval")
		store.Fail(func(context.Context, *client.Op) clienttest.Fault {
			return clienttest.Fault{Err: errors.New("late"), Applied: true}
		})
		if r := p.do(t, "INCR", "a"); !strings.HasPrefix(r, "-"+unknownOutcome) {
			t.Errorf("INCR: %q", r)
		}
		store.Fail(func(context.Context, *client.Op) clienttest.Fault {
			return clienttest.Fault{Err: client.ErrUnavailable}
		})
		p.do(t, "MGET", "a", "b")
		store.Fail(nil)
		p.want(t, "+OK\r\n", "SELECT", "1")
		p.want(t, "$-1\r\n", "GET", "a")
		want("first incr ERR true", "first mget LOADING false", "second select", "second get")
	})
}

func TestErrorClass(t *testing.T) {
	for reply, want := range map[string]string{
		"":                                  "ERR false",
		"*2\r\n-WRONGTYPE x\r\n":            "ERR false",
		"-\r\n":                             "ERR false",
		"-lower case\r\n":                   "ERR false",
		"-MOVED 1 127.0.0.1:1\r\n":          "MOVED false",
		"-" + unknownOutcome + "why\r\n":    "ERR true",
		"-" + strings.Repeat("A", 99) + " ": strings.Repeat("A", 32) + " false",
	} {
		class, unknown := errorClass([]byte(reply))
		if got := fmt.Sprint(class, " ", unknown); got != want {
			t.Errorf("%q: %s, want %s", reply, got, want)
		}
	}
}
