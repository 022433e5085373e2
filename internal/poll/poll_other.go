//go:build !linux

package poll

import (
	"errors"
	"fmt"
	"time"
)

var errNoEpoll = fmt.Errorf("epoll: %w", errors.ErrUnsupported)

func yieldThread() {}

// Poller exists on Linux only.
type Poller struct{}

// New fails: without epoll, connections keep a goroutine each.
func New() (*Poller, error) { return nil, errNoEpoll }

// Close does nothing.
func (*Poller) Close() {}

// Add fails.
func (*Poller) Add(int) error { return errNoEpoll }

// Remove does nothing.
func (*Poller) Remove(int) {}

// Wake does nothing.
func (*Poller) Wake() {}

// Slept is false.
func (*Poller) Slept() bool { return false }

// Look is false.
func (*Poller) Look(time.Duration) bool { return false }

// Wait returns at once.
func (*Poller) Wait(time.Duration) ([]int, bool) { return nil, false }
