// Command catalogue is an example: a service that answers for products over HTTP, with a kvd store as the cache before
// its source of truth.
//
// It shows how a program uses package client with care. It has a near cache in front of the store, a limit of time
// that is the cache's and not the request's, and metrics. It reads the source of truth when the store is away. Read
// catalogue.go first, then serve here. examples/python is the same service by way of a gateway, without the near
// cache.
//
// Handlers are called concurrently.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/prom"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); errors.Is(err, flag.ErrHelp) {
		os.Exit(2)
	} else if err != nil {
		fmt.Fprintf(os.Stderr, "catalogue: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) (err error) {
	f := flag.NewFlagSet("catalogue", flag.ContinueOnError)
	listen := f.String("listen", "127.0.0.1:8080", "address of the service")
	directory := f.String("directory", "127.0.0.1:7400",
		"addresses of the store's directory nodes, with commas between")
	namespace := f.String("namespace", "cache", "namespace to cache in")
	file := f.String("products", "examples/products.json", "file of products, in the place of a database")
	delay := f.Duration("source-delay", 20*time.Millisecond, "how long the source of truth takes to answer, as a "+
		"database does")
	if err := f.Parse(args); err != nil {
		return err
	}
	source, err := readTable(*file, *delay)
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	reg := prometheus.NewRegistry()
	c := newCatalogue(source, log)
	reg.MustRegister(c)
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	defer func() { cancel(); <-ended }()
	go func() {
		defer close(ended)
		connect(ctx, c, reg, log, client.Options{
			Directory: strings.Split(*directory, ","), Namespace: *namespace, Name: "catalogue", Logger: log,
			// A cache that takes longer than this is worth less than the source. cacheTime bounds single lookups.
			OpTimeout: time.Second,
		})
	}()
	fmt.Fprintf(out, "ready http=%s\n", l.Addr())
	return serve(ctx, l, c, reg)
}

// connect opens a client and has c use it until ctx ends. The service does not wait for that: without a store it is
// slower, and right. Once it is open, a client finds the store again by itself.
func connect(ctx context.Context, c *catalogue, reg *prometheus.Registry, log *slog.Logger, o client.Options) {
	for {
		try, cancel := context.WithTimeout(ctx, 2*time.Second)
		store, err := client.Open(try, o)
		cancel()
		if err == nil {
			defer store.Close()
			reg.MustRegister(prom.NewCollector(store))
			if err = c.use(store); err != nil {
				log.Error("near cache", "err", err)
				return
			}
			log.Info("the store is there")
			<-ctx.Done()
			return
		}
		log.Warn("no store yet: products come from their source", "err", err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return
		}
	}
}

// serve answers until ctx ends, and what it has begun then.
func serve(ctx context.Context, l net.Listener, c *catalogue, reg *prometheus.Registry) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /products/{id}", c.get)
	mux.HandleFunc("PUT /products/{id}", c.put)
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 2}))
	s := &http.Server{Handler: http.TimeoutHandler(mux, requestTime, "too slow\n"), ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:  10 * time.Second,
		WriteTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	done := make(chan error, 1)
	go func() {
		<-ctx.Done()
		last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		done <- s.Shutdown(last)
	}()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-done
}

// get answers GET /products/{id}; the header X-From says whether the cache or the source knew.
func (c *catalogue) get(w http.ResponseWriter, r *http.Request) {
	p, from, err := c.product(r.Context(), r.PathValue("id"))
	if err != nil {
		refuse(w, err)
		return
	}
	w.Header().Set("X-From", from)
	answer(w, p)
}

// put answers PUT /products/{id}.
func (c *catalogue) put(w http.ResponseWriter, r *http.Request) {
	var p product
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, 64<<10))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		http.Error(w, "the body: "+err.Error(), http.StatusBadRequest)
		return
	}
	p.ID = r.PathValue("id")
	if err := c.change(r.Context(), p); err != nil {
		refuse(w, err)
		return
	}
	answer(w, p)
}

func answer(w http.ResponseWriter, p product) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(p) // an error is the client's, who is gone
}

func refuse(w http.ResponseWriter, err error) {
	code := http.StatusInternalServerError
	switch {
	case errors.Is(err, errNoProduct):
		code = http.StatusNotFound
	case errors.Is(err, errInvalid):
		code = http.StatusBadRequest
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		code = http.StatusServiceUnavailable
	}
	http.Error(w, err.Error(), code)
}
