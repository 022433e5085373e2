package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
	"github.com/kvd-project/kvd/internal/rights"
	"github.com/kvd-project/kvd/internal/webget"
	"github.com/kvd-project/kvd/internal/wrongport"
)

// memnodeHealth serves the gRPC health protocol for a role without a gRPC
// service of its own.
type memnodeHealth struct {
	healthpb.UnimplementedHealthServer
	healthy func() bool
}

func (h memnodeHealth) Check(_ context.Context, q *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if q.GetService() != "" {
		return nil, status.Errorf(codes.NotFound, "no service %.64q", q.GetService())
	}
	s := healthpb.HealthCheckResponse_NOT_SERVING
	if h.healthy() {
		s = healthpb.HealthCheckResponse_SERVING
	}
	return &healthpb.HealthCheckResponse{Status: s}, nil
}

// A health service is asked by a few, in a few bytes.
const (
	healthConns, healthStreams, healthBytes = 64, 16, 4 << 10
	healthHandshake                         = 5 * time.Second
)

// serveHealth answers on lis until stop is called, which waits for it.
func serveHealth(lis net.Listener, creds *tls.Config, m identity.Mapping, log *slog.Logger, healthy func() bool) (
	door *netsrv.Door, stop func(), err error) {
	door, err = netsrv.NewDoor(netsrv.Limits{MaxConns: healthConns, HandshakeTimeout: healthHandshake, Replace: true,
		Light: true, Logger: log})
	if err != nil {
		return nil, nil, err
	}
	lis = door.Listen(lis)
	o := []grpc.ServerOption{grpc.ConnectionTimeout(healthHandshake), grpc.MaxConcurrentStreams(healthStreams),
		grpc.MaxRecvMsgSize(healthBytes), grpc.MaxHeaderListSize(healthBytes)}
	if creds != nil {
		welcome := func(cs tls.ConnectionState) error { return certs.StillWelcome(creds, cs) }
		o = append(o, rights.WithHealth(nil).ServerOptions(m, welcome, log)...)
		o = append(o, grpc.Creds(credentials.NewTLS(creds)))
	}
	s := grpc.NewServer(o...)
	healthpb.RegisterHealthServer(s, memnodeHealth{healthy: healthy})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(lis) // nil after Stop; a lost listener shows as an unhealthy node
	}()
	return door, func() { s.Stop(); <-done }, nil
}

func (a *app) healthCommand() *cobra.Command {
	h := config.DefaultHealth()
	cmd := &cobra.Command{
		Use:   "health ADDR",
		Short: "Ask a process how it is",
		Long: `Ask the gRPC health service at ADDR, host:port, of a directory node or a memory node's
health-listen. Where ADDR begins with http:// or https://, ask /readyz of any role's
http-listen, or /healthz where ADDR ends with that. Exit status 0 says that it serves,
1 that it does not, or does not answer. It is what a container without a shell runs as its health check.`,
		Example: `  kvd health 127.0.0.1:7400
  kvd health http://127.0.0.1:7483`,
		Args: usageArgs(cobra.ExactArgs(1)),
	}
	file := settingFlags(cmd, h)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := config.Load(h, *file, cmd.Flags()); err != nil {
			return usageError{err}
		}
		scheme, addr, web := strings.Cut(args[0], "://")
		page := "/readyz"
		if !web {
			addr = args[0]
		} else if host, ok := strings.CutSuffix(addr, "/healthz"); ok {
			addr, page = host, "/healthz"
		}
		if _, _, err := net.SplitHostPort(addr); err != nil || web && scheme != "http" && scheme != "https" {
			return usageError{fmt.Errorf("address %q: want host:port, or that after http:// or https://", args[0])}
		}
		if web {
			return a.healthHTTP(cmd.Context(), scheme+"://"+addr+page, h)
		}
		return a.health(cmd.Context(), args[0], h)
	}
	return cmd
}

func (a *app) health(ctx context.Context, addr string, h *config.Health) error {
	creds := insecure.NewCredentials()
	if cfg, err := h.TLS.Load(); err != nil {
		return usageError{err}
	} else if cfg != nil {
		creds = credentials.NewTLS(cfg)
	}
	var why atomic.Pointer[error]
	conn, err := grpc.NewClient("passthrough:///"+addr,
		grpc.WithTransportCredentials(wrongport.Creds(creds, "the gRPC port of a directory node, or a memory node's "+
			"health-listen",
			func(err error) { why.Store(&err) })))
	if err != nil {
		return fmt.Errorf("%s: %w", addr, err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, h.Timeout)
	defer cancel()
	r, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		if p := why.Load(); p != nil && *p != nil {
			return fmt.Errorf("%s: %w", addr, *p)
		}
		return fmt.Errorf("%s: %s", addr, status.Convert(err).Message())
	}
	if r.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("%s: %v", addr, r.GetStatus())
	}
	_, err = fmt.Fprintln(a.stdout, r.GetStatus())
	return err
}

func (a *app) healthHTTP(ctx context.Context, page string, h *config.Health) error {
	u, err := url.Parse(page)
	if err != nil {
		return usageError{err}
	}
	cfg, err := h.TLS.Load()
	if err != nil {
		return usageError{err}
	}
	ctx, cancel := context.WithTimeout(ctx, h.Timeout)
	defer cancel()
	code, body, err := webget.Get(ctx, u, cfg, healthBytes)
	if err != nil {
		return err
	}
	if code != http.StatusOK {
		return fmt.Errorf("%s: %d %s: %s", u, code, http.StatusText(code), strings.TrimSpace(string(body)))
	}
	_, err = fmt.Fprintln(a.stdout, healthpb.HealthCheckResponse_SERVING)
	return err
}
