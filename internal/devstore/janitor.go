package devstore

import (
	"context"
	"errors"

	"github.com/kvd-project/kvd/internal/janitor"
	"github.com/kvd-project/kvd/rdma"
)

// sweeper is the store's janitor, with devices of its own.
type sweeper struct {
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // after done
	devices []*rdma.Device
}

func (s *Store) startJanitor() error {
	w := &sweeper{cancel: func() {}, done: make(chan struct{})}
	s.sweep = w
	for _, p := range s.o.Providers {
		d, err := s.open(p, "janitor")
		if err != nil {
			close(w.done)
			return err // Close gives back what was opened
		}
		w.devices = append(w.devices, d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	o := janitor.Options{Directory: s.Directory(), Devices: w.devices, Logger: s.o.Logger}
	go func() {
		defer close(w.done)
		w.err = janitor.Run(ctx, o)
	}()
	return nil
}

func (w *sweeper) close() error {
	w.cancel()
	<-w.done
	errs := []error{w.err}
	for _, d := range w.devices {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}
