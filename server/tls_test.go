package server

import (
	"context"
	"crypto/tls"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// testTLS is a directory node's.
func testTLS(t *testing.T) *tls.Config {
	t.Helper()
	a := identitytest.New(t)
	return a.Config(a.Role("directory", "d"))
}

func TestTLS(t *testing.T) {
	conf := testTLS(t)
	a := ready(t, start(t, Options{ID: "d1", InMemory: true, Bootstrap: true, TLS: conf}))
	b := ready(t, start(t, Options{ID: "d2", InMemory: true, Join: []string{a.Addr()}, TLS: conf}))
	testutil.Until(t, "two voters", func() bool { return len(b.members()) == 2 && b.appliedBy(a) })

	// Without a certificate neither listener talks.
	bare := conf.Clone()
	bare.Certificates = nil
	ctx := testCtx(t)
	conn, err := grpc.NewClient("passthrough:///"+a.Addr(), grpc.WithTransportCredentials(credentials.NewTLS(bare)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = dirpb.NewDirectoryClient(conn).Status(ctx, &dirpb.StatusRequest{})
	wantCode(t, err, codes.Unavailable)
	raw, err := tls.Dial("tcp", string(a.transport.LocalAddr()), bare)
	if err == nil {
		_ = raw.SetReadDeadline(time.Now().Add(patience))
		_, err = raw.Read(make([]byte, 1)) // TLS 1.3 tells a client of its refusal on the first read
		raw.Close()
	}
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("raft talks to a stranger: %v", err)
	}
}

// appliedBy reports whether n has applied what leader has.
func (n *Node) appliedBy(leader *Node) bool {
	return n.machine.appliedIndex() >= leader.machine.appliedIndex()
}
