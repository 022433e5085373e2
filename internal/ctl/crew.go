package ctl

import (
	"context"
	"sync"
)

// Crew runs goroutines that share an end: the first error ends all of them.
type Crew struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// NewCrew is a crew without goroutines. It ends with ctx, too.
func NewCrew(ctx context.Context) *Crew {
	c := &Crew{}
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	return c
}

// Run starts n goroutines that perform fn.
func (c *Crew) Run(n int, fn func(context.Context) error) {
	for range n {
		c.wg.Go(func() {
			if err := fn(c.ctx); err != nil {
				c.cancel(err)
			}
		})
	}
}

// Wait waits for all of them, and returns the first error.
func (c *Crew) Wait() error {
	c.wg.Wait()
	err := context.Cause(c.ctx)
	c.cancel(nil)
	return err
}
