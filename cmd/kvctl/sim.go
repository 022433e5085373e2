package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvd-project/kvd/internal/devstore"
)

// simStore is a whole store in this process over the simulated provider, for
// commands that bring their own data. It ends with the command.
type simStore struct {
	*remote
	s *devstore.Store
}

// simBytes is what the simulated store can hold; it is taken from the heap when
// it is first used.
const simBytes = 1 << 30

func openSim(a *app) (backend, error) {
	ctx, cancel := context.WithTimeout(context.Background(), a.timeout)
	defer cancel()
	s, err := devstore.Start(ctx, devstore.Options{CapacityBytes: simBytes, Providers: []string{devstore.Sim}, Seed: 1})
	if err != nil {
		return nil, fmt.Errorf("start the simulated store: %w", err)
	}
	r, err := newRemote(a, s.Directory(), nil, s.Devices())
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &simStore{r, s}, nil
}

func (s *simStore) Close() error {
	// The devices are the store's.
	return errors.Join(s.dir.Close(), s.s.Close())
}
