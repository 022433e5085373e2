package wrongport

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/testutil"
)

// serves has every connection to the address that it returns handled by handle, which closes it.
func serves(t *testing.T, handle func(net.Conn)) string {
	lis := testutil.Listen(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		lis.Close()
		wg.Wait()
	})
	return lis.Addr().String()
}

// answers reads a line, as servers of text protocols do, and says something.
func answers(what string) func(net.Conn) {
	return func(c net.Conn) {
		if _, err := bufio.NewReader(c).ReadString('\n'); err == nil {
			_, _ = io.WriteString(c, what)
		}
	}
}

func web(t *testing.T, conf *tls.Config) string {
	lis := testutil.Listen(t)
	if conf != nil {
		lis = tls.NewListener(lis, conf)
	}
	s := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute,
		ErrorLog: log.New(io.Discard, "", 0)}
	go s.Serve(lis)
	t.Cleanup(func() { s.Close() })
	return lis.Addr().String()
}

func rpc(t *testing.T, conf *tls.Config) string {
	lis := testutil.Listen(t)
	var o []grpc.ServerOption
	if conf != nil {
		o = append(o, grpc.Creds(credentials.NewTLS(conf)))
	}
	s := grpc.NewServer(o...)
	healthpb.RegisterHealthServer(s, health.NewServer())
	go s.Serve(lis)
	t.Cleanup(s.Stop)
	return lis.Addr().String()
}

// The error says what likely answers in the place of what is called, in clear or by TLS.
func TestLikelyMistake(t *testing.T) {
	auth := identitytest.New(t)
	conf := auth.Config(auth.Role("directory", "d"))
	foreign := identitytest.New(t)
	closes := serves(t, func(net.Conn) {})
	reads := serves(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)) })
	silent := serves(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	for _, c := range []struct {
		name, addr    string
		clear, secret string // what the error has, by how it is called; empty: it works
	}{
		{"gRPC in clear", rpc(t, nil), "", "it speaks gRPC in clear, not TLS: leave out --tls-ca"},
		{"gRPC by TLS", rpc(t, conf), "it may want TLS (--tls-ca)", ""},
		{"gRPC by others' TLS", rpc(t, foreign.Config(foreign.Role("directory", "d"))), "it may want TLS (--tls-ca)",
			"certificate signed by unknown authority"},
		{"HTTP", web(t, nil), "it speaks HTTP/1", "it speaks HTTP/1"},
		{"HTTPS", web(t, conf), "it may want TLS (--tls-ca), or is not the port",
			"it speaks TLS, but not gRPC: is it the port?"},
		{"Redis", serves(t, answers("-ERR unknown command 'PRI'\r\n")), "it speaks Redis's protocol: is it the port?",
			""},
		{"Redis with a password", serves(t, answers("-NOAUTH Authentication required.\r\n")),
			"it speaks Redis's protocol: is it the port?", ""},
		{"memcached", serves(t, answers("ERROR\r\n")), "it speaks memcached's protocol: is it the port?", ""},
		{"SSH", serves(t, func(c net.Conn) {
			_, _ = io.WriteString(c, "SSH-2.0-OpenSSH_9.2\r\n")
			_, _ = io.Copy(io.Discard, c)
		}), "it speaks SSH: is it the port?", "it speaks SSH: is it the port?"},
		{"TLS's alert", serves(t, func(c net.Conn) {
			_, _ = c.Write([]byte{21, 3, 1, 0, 2, 2, 70})
			_, _ = io.Copy(io.Discard, c)
		}), "it speaks TLS: want --tls-ca", "tls: "},
		{"something", serves(t, func(c net.Conn) {
			_, _ = io.WriteString(c, "\x00\x01secret")
			_, _ = io.Copy(io.Discard, c)
		}), `another protocol (it began with "\x00\x01secret"): is it the port?`, `another protocol (it began with "\x00\x01sec"): is it the port?`},
		{"closes", closes, "it ends connections in clear: it may want TLS (--tls-ca), or is not the port",
			"it ends connections that begin with TLS: is it the port?"},
		{"closes after a byte", reads, "it ends connections in clear: it may want TLS (--tls-ca), or is not the port",
			"it ends connections that begin with TLS: is it the port?"},
		{"silent", silent, "it says nothing: is it the port?", "it does not answer in TLS: is it the port?"},
	} {
		for how, want := range map[string]string{"in clear": c.clear, "by TLS": c.secret} {
			if how == "by TLS" && want == "" && !strings.HasPrefix(c.name, "gRPC") {
				continue // they wait for the end of a line
			}
			t.Run(c.name+" "+how, func(t *testing.T) {
				t.Parallel()
				creds := insecure.NewCredentials()
				if how == "by TLS" {
					creds = credentials.NewTLS(auth.Config(auth.Role("operator", "ann")))
				}
				begun := make(chan error, 100)
				patience := 20 * time.Second // a busy machine is no silent one
				if c.name == "silent" {
					patience = 100 * time.Millisecond
				}
				conn, err := grpc.NewClient("passthrough:///"+c.addr,
					grpc.WithTransportCredentials(Creds(creds, "the port", func(err error) {
						select {
						case begun <- err:
						default:
						}
					})), grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: patience}))
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, err = healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{},
					grpc.WaitForReady(want == ""))
				told := <-begun
				if want == "" {
					if err != nil || told != nil {
						t.Fatalf("%v; begun with %v", err, told)
					}
					return
				}
				if err == nil || !strings.Contains(err.Error(), want) && c.name != "something" {
					t.Errorf("call: %v, want %s", err, want)
				}
				if told == nil || !strings.Contains(told.Error(), want) {
					t.Errorf("begun with %v, want %s", told, want)
				}
				if e := (*Error)(nil); errors.As(told, &e) && e.Unwrap() == nil {
					t.Errorf("%v has no cause", e)
				}
			})
		}
	}
}
