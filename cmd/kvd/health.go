package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/config"
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

// serveHealth answers on lis until stop is called, which waits for it.
func serveHealth(lis net.Listener, creds *tls.Config, healthy func() bool) (stop func()) {
	var o []grpc.ServerOption
	if creds != nil {
		o = append(o, grpc.Creds(credentials.NewTLS(creds)))
	}
	s := grpc.NewServer(o...)
	healthpb.RegisterHealthServer(s, memnodeHealth{healthy: healthy})
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(lis) // nil after Stop; a lost listener shows as an unhealthy node
	}()
	return func() { s.Stop(); <-done }
}

func (a *app) healthCommand() *cobra.Command {
	h := config.DefaultHealth()
	cmd := &cobra.Command{
		Use:   "health ADDR",
		Short: "Ask a directory node, or a memory node's health-listen address, how it is",
		Long: `Ask the gRPC health service at ADDR, host:port. Exit status 0 says that it serves,
1 that it does not, or does not answer. It is what a container without a shell
runs as its health check.`,
		Example: `  kvd health 127.0.0.1:7400`,
		Args:    usageArgs(cobra.ExactArgs(1)),
	}
	file := settingFlags(cmd, h)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := config.Load(h, *file, cmd.Flags()); err != nil {
			return usageError{err}
		}
		if _, _, err := net.SplitHostPort(args[0]); err != nil {
			return usageError{fmt.Errorf("address %q: want host:port", args[0])}
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
	conn, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(creds))
	if err != nil {
		return fmt.Errorf("%s: %w", addr, err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, h.Timeout)
	defer cancel()
	r, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return fmt.Errorf("%s: %s", addr, status.Convert(err).Message())
	}
	if r.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("%s: %v", addr, r.GetStatus())
	}
	_, err = fmt.Fprintln(a.stdout, r.GetStatus())
	return err
}
