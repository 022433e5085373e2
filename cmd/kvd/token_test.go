package main

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/internal/dirclient"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/token/tokentest"
	"github.com/kvd-project/kvd/rdma/driver"
)

// A session's token is good for the certificate of its owner alone, and only as the directory signed it.
func TestTokenOverTLS(t *testing.T) {
	env, _ := runtimeDir(t)
	files := newCertificates(t)
	d := start(t, env,
		append([]string{"directory", "--id=d", "--data-dir=" + t.TempDir(), "--listen=127.0.0.1:0",
			"--raft-listen=127.0.0.1:0", "--bootstrap"}, files.flags("directory")...)...)
	addr := d.kv["directory"]
	m := start(t, env,
		append([]string{"memnode", "--name=m", "--directory=" + addr, "--memory=64MiB", "--shm-socket=off"},
			files.flags("memnode")...)...)
	owner := files.load("operator")
	dir, err := dirclient.Open(dirclient.Options{Addrs: []string{addr}, TLS: owner})
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	call := func(fn func(context.Context, dirpb.DirectoryClient) error) {
		t.Helper()
		if err := dir.Call(ctx, fn); err != nil {
			t.Fatal(err)
		}
	}
	var x *dirpb.OpenSessionReply
	call(func(ctx context.Context, c dirpb.DirectoryClient) (err error) {
		x, err = c.OpenSession(ctx, &dirpb.OpenSessionRequest{})
		return err
	})
	number := uint64(0)
	shown := func(role string, tok []byte) error {
		t.Helper()
		number++
		call(func(ctx context.Context, c dirpb.DirectoryClient) error { // its lease is short
			_, err := c.Renew(ctx, &dirpb.RenewRequest{SessionId: x.SessionId, Number: number,
				TokenNumber: x.TokenNumber})
			return err
		})
		return dialWith(t, m.kv["tcp"], files.load(role), binary.LittleEndian.AppendUint32(slices.Clone(tok), 0))
	}
	for _, role := range []string{"client", "gateway", "memnode"} {
		if err := shown(role, x.Token); !errors.Is(err, driver.ErrRefused) ||
			!strings.Contains(err.Error(), "another identity's") {
			t.Errorf("a %s shows the token of an operator: %v, want a refusal", role, err)
		}
	}
	for i, f := range tokentest.Forgeries(x.Token) {
		if i%10 != 0 && strings.HasPrefix(f.Name, "byte") {
			continue // package memnode's tests show them all
		}
		if err := shown("operator", f.Token); !errors.Is(err, driver.ErrRefused) ||
			!strings.Contains(err.Error(), "session token") {
			t.Errorf("%s: %v, want a refusal", f.Name, err)
		}
	}
	if err := shown("operator", x.Token); err != nil {
		t.Error(err)
	}
	call(func(ctx context.Context, c dirpb.DirectoryClient) error {
		_, err := c.CloseSession(ctx, &dirpb.CloseSessionRequest{SessionId: x.SessionId})
		return err
	})
	for err = nil; err == nil && ctx.Err() == nil; { // until the memory node hears of it
		err = dialWith(t, m.kv["tcp"], owner, binary.LittleEndian.AppendUint32(slices.Clone(x.Token), 0))
	}
	if !errors.Is(err, driver.ErrRefused) || !strings.Contains(err.Error(), "the session has ended") {
		t.Errorf("after the session has closed: %v, want a refusal", err)
	}
}
