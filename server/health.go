package server

import (
	"context"

	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// health serves the gRPC health protocol: a node is healthy while it leads, or
// knows where the leader is, until it begins to stop.
type health struct {
	healthpb.UnimplementedHealthServer
	n *Node
}

func (h health) Check(_ context.Context, q *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if s := q.GetService(); s != "" && s != dirpb.Directory_ServiceDesc.ServiceName {
		return nil, status.Errorf(codes.NotFound, "no service %.64q", s)
	}
	if h.n.ctx.Err() != nil {
		return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_NOT_SERVING}, nil
	}
	if h.n.leading.Load() != nil || h.n.leaderGRPC() != "" {
		return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}, nil
	}
	return &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_NOT_SERVING}, nil
}
