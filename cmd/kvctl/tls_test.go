package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// A command that runs for long, such as the shell, shows and believes what its files of certificates hold now.
func TestTLSFilesAreFollowed(t *testing.T) {
	lis := testutil.Listen(t)
	addr := lis.Addr().String()
	var wg sync.WaitGroup
	defer wg.Wait()
	var s *grpc.Server
	// serve is a directory node whose certificates, its own and those of callers, come from auth.
	serve := func(auth *identitytest.Authority) {
		s = grpc.NewServer(grpc.Creds(credentials.NewTLS(auth.Config(auth.Role("directory", "d")))))
		dirpb.RegisterDirectoryServer(s, &fakeDirectory{now: &dirpb.StatusReply{}})
		began := s
		wg.Go(func() { _ = began.Serve(lis) })
	}
	old := identitytest.New(t)
	serve(old)
	defer func() { s.Stop() }()

	a := newProgram(strings.NewReader(""), new(bytes.Buffer), new(bytes.Buffer))
	a.Directory, a.Provider, a.Timeout = []string{addr}, "tcp", 5*time.Second
	a.TLSCA, a.TLSCert, a.TLSKey = old.Files(old.Role("operator", "ann"))
	b, err := ctl.OpenStore(a.App)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	ask := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), a.Timeout)
		defer cancel()
		return b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) error {
			_, err := d.Status(ctx, &dirpb.StatusRequest{})
			return err
		})
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}

	fresh := identitytest.New(t)
	ca, cert, key := fresh.Files(fresh.Role("operator", "ann"))
	if err := errors.Join(os.Rename(ca, a.TLSCA), os.Rename(cert, a.TLSCert), os.Rename(key, a.TLSKey)); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	if lis, err = net.Listen("tcp", addr); err != nil {
		t.Fatal(err)
	}
	serve(fresh)
	for end := time.Now().Add(testutil.Limit); ; { // the files are looked at once a second
		if err = ask(); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("with certificates of another authority: %v", err)
		}
	}
}
