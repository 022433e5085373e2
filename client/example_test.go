package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/devstore"
	"github.com/kvd-project/kvd/rdma"
)

func Example() {
	ctx := context.Background()
	// In place of kvd dev: a store in this process.
	store, err := devstore.Start(ctx, devstore.Options{CapacityBytes: 64 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()

	c, err := client.Connect(ctx, store.Directory()...) // or "127.0.0.1:7400"
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()

	if _, err := c.Put(ctx, []byte("greeting"), []byte("hello"), client.PutOptions{}); err != nil {
		log.Fatal(err)
	}
	item, err := c.Get(ctx, []byte("greeting"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", item.Value)

	// Only the version that was read is replaced.
	if _, err := c.CompareAndSwap(ctx, []byte("greeting"), item.Version, []byte("hello, world"),
		client.PutOptions{}); err != nil {
		log.Fatal(err)
	}
	_, err = c.CompareAndSwap(ctx, []byte("greeting"), item.Version, []byte("too late"), client.PutOptions{})
	fmt.Println(errors.Is(err, client.ErrConflict), client.Outcome(err) == rdma.No)

	for kv, err := range c.Scan(ctx, client.ScanOptions{}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s = %s\n", kv.Key, kv.Value)
	}

	// Output:
	// hello
	// true true
	// greeting = hello, world
}
