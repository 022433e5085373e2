// Applications runs a Go library against a Redis and a memcached, as its README does.
//
//	applications NAME REDIS MEMCACHED DB
//
// It says on stdout how each check went, one line each, `ok NAME` or `fail NAME: why`,
// and `done` at the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// at is what the program was told.
type at struct {
	redis, memcached string // host:port
	db               string
	client           *redis.Client
}

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: applications NAME REDIS MEMCACHED DB")
		os.Exit(2)
	}
	a := at{redis: "127.0.0.1:" + os.Args[2], memcached: "127.0.0.1:" + os.Args[3], db: os.Args[4]}
	o, err := redis.ParseURL("redis://" + a.redis + "/" + a.db)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	a.client = redis.NewClient(o)
	run, ok := applications[os.Args[1]]
	if !ok {
		fmt.Fprintf(os.Stderr, "no application %q\n", os.Args[1])
		os.Exit(2)
	}
	version(run.module)
	run.checks(a)
	fmt.Println("done")
}

// version says which version of the module runs.
func version(module string) {
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if m.Path == module {
			fmt.Println("version", strings.TrimPrefix(m.Version, "v"))
		}
	}
}

// checkTime bounds a check.
const checkTime = 15 * time.Second

// check runs f at once. A check that does not end keeps its goroutine until the program ends.
func check(name string, f func(ctx context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), checkTime)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	var err error
	select {
	case err = <-done:
	case <-time.After(checkTime + time.Second):
		err = fmt.Errorf("no end after %v", checkTime)
	}
	if err != nil {
		fmt.Printf("fail %s: %s\n", name, strings.ReplaceAll(err.Error(), "\n", " "))
		return
	}
	fmt.Printf("ok %s\n", name)
}

func equal(got, want any) error {
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("got %v, want %v", got, want)
	}
	return nil
}

// all runs f several times side by side.
func all(n int, f func() error) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { errs[i] = f() })
	}
	wg.Wait()
	return errors.Join(errs...)
}
