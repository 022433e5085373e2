// Package looptest sets the stage for tests of servers whose connections are in loops. The stage is a
// store in which operations on some keys do what a loop must cope with.
//
// It leaves connections, and the protocol on them, to the tests. Start with [New]. A Stage's channels may be used
// by any goroutine.
package looptest

import (
	"context"
	"fmt"
	"strings"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/inside"
)

// Long is the value of the key "long": more than a lookup may read in a loop.
var Long = strings.Repeat("x", 200_000)

// Stage is a store with the keys k0 to k9, whose values are 0 to 9, and Long. Operations on three more keys are
// special. "hold" keeps the goroutine that performs it without saying so, as a long turn of a loop does. "slow" waits,
// and says so; "panic" panics.
type Stage struct {
	Store *clienttest.Store
	// Held receives when an operation on "hold" has begun. It goes on when Hold is closed.
	Held, Hold chan struct{}
	// Waiting receives when an operation on "slow" has begun to wait, which those of a loop do not. It goes on
	// when Release is closed.
	Waiting, Release chan struct{}
}

// New sets a stage.
func New(ctx context.Context) *Stage {
	s := &Stage{Store: clienttest.New(clienttest.Options{}), Held: make(chan struct{}), Hold: make(chan struct{}),
		Waiting: make(chan struct{}, 1), Release: make(chan struct{})}
	for i := range 10 {
		s.put(ctx, fmt.Sprint("k", i), fmt.Sprint(i))
	}
	s.put(ctx, "long", Long)
	s.Store.Fail(s.perform)
	return s
}

func (s *Stage) put(ctx context.Context, key, value string) {
	if _, err := s.Store.Put(ctx, []byte(key), []byte(value), client.PutOptions{}); err != nil {
		panic(fmt.Sprintf("a fake store refused %s: %v", key, err))
	}
}

func (s *Stage) perform(ctx context.Context, o *client.Op) clienttest.Fault {
	switch string(o.Key) {
	case "hold":
		s.Held <- struct{}{}
		<-s.Hold
	case "panic":
		panic("of a test")
	case "slow":
		inside.WillWait(ctx)
		if ctx.Err() != nil { // a loop's: it does not wait
			return clienttest.Fault{Err: context.Cause(ctx)}
		}
		s.Waiting <- struct{}{}
		<-s.Release
	}
	return clienttest.Fault{}
}
