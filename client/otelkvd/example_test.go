package otelkvd_test

import (
	"context"
	"log"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/otelkvd"
)

// The SDK is set up as for any other library. Spans and metrics go to its global providers.
func ExampleInstrument() {
	ctx := context.Background()
	o := client.Options{Directory: []string{"127.0.0.1:7700"}, Namespace: "sessions"}
	if err := otelkvd.Instrument(&o, otelkvd.Options{}); err != nil {
		log.Fatal(err)
	}
	c, err := client.Open(ctx, o)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	// A span "get sessions" of the kind client, a child of the one in ctx.
	if _, err := c.Get(ctx, []byte("key")); err != nil {
		log.Print(err)
	}
}
