package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/rdma"
)

// TestTxn: a transaction sees its own writes, happens as a whole, runs again if what it read has changed, and not if
// what it requires does not hold.
func TestTxn(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	ctx := t.Context()
	put := func(key, value string) uint64 {
		v, err := s.Put(ctx, []byte(key), []byte(value), client.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	get := func(key string) string {
		it, err := s.Get(ctx, []byte(key))
		if errors.Is(err, client.ErrNotFound) {
			return "-"
		}
		return string(it.Value)
	}
	a, b, none := []byte("a"), []byte("b"), []byte("none")
	v := put("a", "1")
	runs := 0
	err := client.Txn(ctx, s, func(tx *client.Tx) error {
		if runs++; runs == 1 {
			put("a", "2") // by somebody else, behind the read
			defer put("a", "3")
		}
		it, err := tx.Get(a)
		tx.Put(b, it.Value, client.PutOptions{Flags: 5})
		tx.Delete(a)
		if _, err := tx.Get(a); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("what was deleted: %v", err)
		}
		if it, err := tx.Get(b); err != nil || it.Flags != 5 {
			t.Errorf("what was put: %+v, %v", it, err)
		}
		return err
	})
	if err != nil || runs != 2 || get("a") != "-" || get("b") != "3" {
		t.Errorf("%v after %d runs, a is %s, b is %s", err, runs, get("a"), get("b"))
	}

	// A key that is required is not read, and does not make it run again.
	for _, require := range []func(tx *client.Tx){
		func(tx *client.Tx) { tx.Require(b, v) },
		func(tx *client.Tx) { tx.Require(none, v) },
		func(tx *client.Tx) { tx.Require(b, 0) },
	} {
		for _, writes := range []bool{false, true} {
			runs = 0
			err := client.Txn(ctx, s, func(tx *client.Tx) error {
				runs++
				require(tx)
				if _, err := tx.Get([]byte("b")); err != nil {
					return err
				}
				if writes {
					tx.Put(none, nil, client.PutOptions{})
				}
				return nil
			})
			if !errors.Is(err, client.ErrConflict) || runs != 1 || get("none") != "-" {
				t.Errorf("writes %v: %v after %d runs, none is %s", writes, err, runs, get("none"))
			}
		}
	}
	it, _ := s.Get(ctx, b)
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		tx.Require(b, it.Version)
		tx.Require(none, 0)
		tx.Put(a, []byte("4"), client.PutOptions{})
		return nil
	}); err != nil || get("a") != "4" {
		t.Errorf("%v, a is %s", err, get("a"))
	}

	// An error of the function's, a bad argument and an error of the store's leave everything as it is.
	mine := errors.New("mine")
	if err := client.Txn(ctx, s, func(tx *client.Tx) error { tx.Delete(a); return mine }); !errors.Is(err, mine) {
		t.Error(err)
	}
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		tx.Put(a, nil, client.PutOptions{TTL: -1})
		return nil
	}); !errors.Is(err, client.ErrInvalid) {
		t.Error(err)
	}
	s.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
		if string(o.Key) == "b" {
			return clienttest.Fault{Err: client.ErrUnavailable}
		}
		return clienttest.Fault{}
	})
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		tx.Delete(a)
		tx.Delete(b)
		return nil
	}); !errors.Is(err, client.ErrUnavailable) || get("a") != "4" {
		t.Errorf("%v, a is %s", err, get("a"))
	}
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		tx.Delete(a)
		_, err := tx.Get(b)
		return err
	}); !errors.Is(err, client.ErrUnavailable) {
		t.Error(err)
	}
	s.Fail(nil)

	// A sweep runs until it has seen one instant, which the store makes sure of after a few tries.
	runs = 0
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		if err := tx.Load(a, b, none, a); err != nil {
			return err
		}
		if runs++; runs < 20 {
			put("a", "5")
		}
		return nil
	}); err != nil || runs != 4 {
		t.Errorf("%v after %d runs", err, runs)
	}
	// A key that came and went between two looks, together with a change of another one, is noticed.
	runs = 0
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		runs++
		if _, err := tx.Get(none); runs == 1 {
			if !errors.Is(err, client.ErrNotFound) {
				return err
			}
			put("none", "there")
			put("other", "there")
			s.Fail(func(_ context.Context, o *client.Op) clienttest.Fault {
				if string(o.Key) == "none" && o.Kind == client.OpKeep { // goes before the commit does
					s.Fail(nil)
					if err := s.Delete(ctx, none); err != nil {
						t.Error(err)
					}
					if err := s.Delete(ctx, []byte("other")); err != nil {
						t.Error(err)
					}
				}
				return clienttest.Fault{}
			})
		}
		_, err := tx.Get([]byte("other"))
		if runs == 1 && err != nil || runs == 2 && !errors.Is(err, client.ErrNotFound) {
			t.Errorf("run %d: other: %v", runs, err)
		}
		return nil
	}); err != nil || runs != 2 {
		t.Errorf("%v after %d runs", err, runs)
	}
	s.Fail(nil)
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		_, err := tx.Get(a)
		put("a", "6")
		return err
	}); err != nil {
		t.Errorf("one key: %v", err)
	}
	runs = 0
	if err := client.Txn(ctx, s, func(tx *client.Tx) error {
		runs++
		_, err := tx.Get(a)
		tx.Delete(b)
		put("a", "7")
		return err
	}); !errors.Is(err, client.ErrTxnContended) || client.Outcome(err) != rdma.No || get("b") != "3" {
		t.Errorf("%v after %d runs, b is %s", err, runs, get("b"))
	}
}

// trips counts the round trips of an API, and has so much time for a transaction.
type trips struct {
	client.API
	do, cas int
	time    time.Duration
}

func (a *trips) Do(ctx context.Context, ops []client.Op) { a.do++; a.API.Do(ctx, ops) }

func (a *trips) MultiCAS(ctx context.Context, ops []client.Op) error {
	if len(ops) > 0 {
		a.cas++
	}
	return a.API.MultiCAS(ctx, ops)
}

func (a *trips) OpTimeout() time.Duration { return a.time }

// A retry reads what the try before has read in one round trip, however many the function takes; what the confirmation
// has read is not read again. After a few tries one MultiCAS tells all keys as they are at one instant, and a key that
// the function names besides is confirmed with them.
func TestTxnRetries(t *testing.T) {
	store := clienttest.New(clienttest.Options{})
	a := &trips{API: store}
	ctx := t.Context()
	keys := make([][]byte, 10)
	set := func(v string) {
		for _, k := range keys[:9] { // the last is absent
			if _, err := store.Put(ctx, k, []byte(v), client.PutOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for i := range keys {
		keys[i] = fmt.Append(nil, "k", i)
	}
	for _, c := range []struct {
		name            string
		writes, another bool
		changes         int // tries during which the keys change
		runs, do, cas   int
	}{
		{"still", false, false, 0, 1, 11, 1},
		{"once", false, false, 1, 2, 12, 2},
		{"always", false, false, 100, 4, 13, 4},
		{"always, and another key at last", false, true, 100, 4, 15, 5},
		{"written", true, false, 2, 3, 12, 3},
	} {
		set("before")
		a.do, a.cas = 0, 0
		runs := 0
		err := client.Txn(ctx, a, func(tx *client.Tx) error {
			runs++
			first := ""
			for i, k := range keys {
				it, err := tx.Get(k)
				if err != nil && !errors.Is(err, client.ErrNotFound) {
					return err
				}
				if i == 0 {
					first = string(it.Value)
				} else if i < 9 && string(it.Value) != first {
					t.Errorf("%s: run %d: %q and %q", c.name, runs, first, it.Value)
				}
			}
			if c.another && runs == 4 {
				if _, err := tx.Get([]byte("other")); !errors.Is(err, client.ErrNotFound) {
					return err
				}
			} else if runs <= c.changes {
				set(fmt.Sprint(runs))
			}
			if c.writes {
				tx.Put(keys[0], []byte("mine"), client.PutOptions{})
			}
			return nil
		})
		if err != nil || runs != c.runs || a.do != c.do || a.cas != c.cas {
			t.Errorf("%s: %v, %d runs, %d reads, %d MultiCAS; want %+v", c.name, err, runs, a.do, a.cas, c)
		}
	}
}

// A transaction has so much time as an operation, or what its context says, and tells that nothing was done.
func TestTxnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := clienttest.New(clienttest.Options{})
		a := &trips{API: store, time: 50 * time.Millisecond}
		key := []byte("k")
		try := func(ctx context.Context) error {
			return client.Txn(ctx, a, func(tx *client.Tx) error {
				_, err := tx.Get(key)
				tx.Put(key, []byte("mine"), client.PutOptions{})
				_, _ = store.Put(t.Context(), key, []byte("other"), client.PutOptions{})
				if errors.Is(err, client.ErrNotFound) {
					err = nil
				}
				return err
			})
		}
		began := time.Now()
		err := try(t.Context())
		if took := time.Since(began); !errors.Is(err, client.ErrTxnContended) || client.Outcome(err) != rdma.No ||
			!strings.Contains(err.Error(), "in 50ms") || took != 50*time.Millisecond {
			t.Errorf("%v after %v", err, took)
		}
		began = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		if err := try(ctx); !errors.Is(err, context.DeadlineExceeded) || client.Outcome(err) != rdma.No ||
			time.Since(began) != 200*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if it, err := store.Get(t.Context(), key); err != nil || string(it.Value) != "other" {
			t.Errorf("%q, %v", it.Value, err)
		}
	})
}

// TestTxnBlindWrites: a transaction that looks at what it has written itself, or is to delete, has read nothing of the
// store: others may write those keys meanwhile, and it neither fails nor runs again.
func TestTxnBlindWrites(t *testing.T) {
	s := clienttest.New(clienttest.Options{})
	ctx := t.Context()
	a, b := []byte("a"), []byte("b")
	for _, load := range []bool{false, true} {
		runs := 0
		err := client.Txn(ctx, s, func(tx *client.Tx) error {
			runs++
			tx.Put(a, []byte("mine"), client.PutOptions{})
			tx.Delete(b)
			if load {
				if err := tx.Load(a, b); err != nil {
					return err
				}
			}
			if it, err := tx.Get(a); err != nil || string(it.Value) != "mine" {
				t.Errorf("what was put: %q, %v", it.Value, err)
			}
			if _, err := tx.Get(b); !errors.Is(err, client.ErrNotFound) {
				t.Errorf("what was deleted: %v", err)
			}
			for _, k := range [][]byte{a, b} { // by somebody else, once
				if runs > 1 {
					break
				}
				if _, err := s.Put(ctx, k, []byte("theirs"), client.PutOptions{}); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil || runs != 1 {
			t.Errorf("%v after %d runs", err, runs)
		}
		if it, err := s.Get(ctx, a); err != nil || string(it.Value) != "mine" {
			t.Errorf("a is %q, %v", it.Value, err)
		}
		if it, err := s.Get(ctx, b); !errors.Is(err, client.ErrNotFound) {
			t.Errorf("b is %q, %v", it.Value, err)
		}
	}
}
