// Package httpd serves what operators and their tools ask a process over HTTP.
// That is /metrics, /healthz, /readyz, /debug/pprof, a page to read and its state
// as JSON.
//
// It leaves what is measured to internal/metrics and what there is to say to the role. The role hands it collectors, a
// question whether the role is ready, and a [Page]. Start with [Start] and [Server]. A Server's methods may be called
// concurrently. A Server owns its listener and connections from Start until Close.
//
// With TLS, and at an address that others can reach, who asks for more than /healthz and /readyz has to be an operator.
// On loopback requests are answered that name localhost or an address as their host, and no others.
//
// It changes nothing, whatever it is asked. /debug/pprof/cmdline is left out, since a
// command line may hold a password.
package httpd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/netsrv"
)

const (
	// Requests have no body and little in their headers.
	headerBytes   = 16 << 10
	headerTimeout = 5 * time.Second
	idleTimeout   = 10 * time.Second
	// writeTimeout is longer than a profile of 60 s.
	writeTimeout = 90 * time.Second
	// scrapes bounds the requests for metrics that are answered at once.
	scrapes = 4
)

// errStarting is why a role is not ready before [Server.Serving].
var errStarting = errors.New("starting")

// Options configure a Server.
type Options struct {
	// Addr to listen on, host:port. Required.
	Addr string
	// TLS, if not nil, is used for every connection. It must ask callers for certificates.
	TLS *tls.Config
	// Identities read the certificates of callers.
	Identities identity.Mapping
	// Role and Version are for people. Required.
	Role, Version string
	// Logger receives errors of requests. Default: discard.
	Logger *slog.Logger
}

// Server serves one process's endpoints. A nil one serves nothing, and its methods
// may be called too.
type Server struct {
	o     Options
	door  *netsrv.Door
	lis   net.Listener
	http  *http.Server
	reg   *prometheus.Registry
	began time.Time
	done  chan struct{}
	state atomic.Pointer[state]
	// history is nil until Chart.
	history atomic.Pointer[history]
	// links is nil until Linked.
	links atomic.Pointer[func() []Link]
}

// Start listens and serves; the role counts as not ready. ctx bounds Start alone.
func Start(ctx context.Context, o Options) (*Server, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	door, err := netsrv.NewDoor(netsrv.Limits{MaxConns: maxConns, HandshakeTimeout: headerTimeout, Replace: true,
		Light: true, Logger: o.Logger})
	if err != nil {
		return nil, err
	}
	lis, err := new(net.ListenConfig).Listen(ctx, "tcp", o.Addr)
	if err != nil {
		return nil, err
	}
	s := &Server{o: o, door: door, lis: lis, reg: prometheus.NewRegistry(), began: time.Now(),
		done: make(chan struct{})}
	s.Serving(func() error { return errStarting }, nil)
	s.reg.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "kvd_build_info", Help: "1, with the role, its version and Go's.",
			ConstLabels: prometheus.Labels{"role": o.Role, "version": o.Version, "goversion": runtime.Version()},
		}, func() float64 { return 1 }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kvd_ready", Help: "1 while /readyz says that the role " +
			"serves, else 0."}, func() float64 {
			if s.state.Load().ready() != nil {
				return 0
			}
			return 1
		}),
	)
	errs := slog.NewLogLogger(o.Logger.Handler(), slog.LevelWarn)
	guests := s.door.Listen(lis)
	s.http = &http.Server{
		Handler: newCrowd().handler(s.handler(errs)), ConnContext: connContext, ReadHeaderTimeout: headerTimeout,
		ReadTimeout: headerTimeout, WriteTimeout: writeTimeout,
		IdleTimeout: idleTimeout, MaxHeaderBytes: headerBytes, ErrorLog: errs, Protocols: new(http.Protocols),
	}
	// A connection is busy while its request is answered, so it has one at a time; see crowd. Programs as make builds
	// them have no HTTP/2.
	s.http.Protocols.SetHTTP1(true)
	go func() {
		defer close(s.done)
		var err error
		if o.TLS != nil {
			s.http.TLSConfig = certs.With(o.TLS, func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} })
			err = s.http.ServeTLS(guests, "", "")
		} else {
			err = s.http.Serve(guests)
		}
		if !errors.Is(err, http.ErrServerClosed) {
			o.Logger.Error("the HTTP endpoints are gone", "addr", s.Addr(), "err", err)
		}
	}()
	return s, nil
}

// Addr is where the Server listens; empty for a nil one.
func (s *Server) Addr() string {
	if s == nil {
		return ""
	}
	return s.lis.Addr().String()
}

// Door counts the connections; nil for a nil Server.
func (s *Server) Door() *netsrv.Door {
	if s == nil {
		return nil
	}
	return s.door
}

// Register adds metrics.
func (s *Server) Register(cs ...prometheus.Collector) error {
	if s == nil {
		return nil
	}
	for _, c := range cs {
		if err := s.reg.Register(c); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	return nil
}

// Serving says how the role is from now on: ready tells why it does not serve, or nil.
// page, unless nil, is asked what to show people, at most once a second. ready may be called concurrently.
func (s *Server) Serving(ready func() error, page func(context.Context) (Page, error)) {
	if s != nil {
		s.state.Store(&state{ready: ready, page: page, ages: newAges()})
	}
}

// Close ends every connection and waits for the goroutines of the listener and the charts. It is
// idempotent, and not to be called concurrently.
func (s *Server) Close() error {
	if s == nil {
		return nil
	}
	err := s.http.Close()
	<-s.done
	if h := s.history.Swap(nil); h != nil {
		close(h.stop)
		<-h.done
	}
	return err
}

func (s *Server) handler(errs *log.Logger) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.whole(promhttp.HandlerFor(s.reg, promhttp.HandlerOpts{
		ErrorLog: errs, ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: scrapes, Registry: s.reg,
	})))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { say(w, http.StatusOK, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := s.state.Load().ready(); err != nil {
			say(w, http.StatusServiceUnavailable, err.Error())
			return
		}
		say(w, http.StatusOK, "ok")
	})
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", http.NotFound)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	mux.HandleFunc("GET /{$}", s.page)
	mux.HandleFunc("GET /state.json", s.stateJSON)
	mux.HandleFunc("GET /console.js", file("text/javascript", consoleJS))
	mux.HandleFunc("GET /console.css", file("text/css", consoleCSS))
	guarded := s.guard(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		if s.onLoopback() && !isLocal(r.Host) {
			s.o.Logger.Warn("a request was refused", "remote", r.RemoteAddr, "err", errForeignHost)
			h.Set("Connection", "close")
			say(w, http.StatusMisdirectedRequest, errForeignHost.Error())
			return
		}
		if r.TLS != nil { // a certificate may have been revoked since the handshake
			if err := certs.StillWelcome(s.o.TLS, *r.TLS); err != nil {
				h.Set("Connection", "close")
				say(w, http.StatusForbidden, err.Error())
				return
			}
		}
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Content-Security-Policy", policy)
		h.Set("Cache-Control", "no-store")
		guarded.ServeHTTP(w, r)
	})
}

// policy lets the page load its own script, style and state, and nothing of any other host.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; frame-ancestors 'none'"

// errNoProfiles is why profiles are not given: they take CPU time, and show what the process is doing.
var errNoProfiles = errors.New("profiles are for operators, whom nobody knows without TLS: set tls.ca, tls.cert and " +
	"tls.key, or let http-listen be loopback")

// errForeignHost is why a request with another host is not answered on loopback. A browser sends such a one for a page
// of another host, whose name was made to mean this machine, and would give that page the answer.
var errForeignHost = errors.New("this process serves its own machine alone: ask for localhost or a literal address, " +
	"as in http://127.0.0.1:PORT, and for no other name")

// isLocal reports whether a request's Host, with or without a port, is localhost or an address: no name that somebody
// else could have chosen.
func isLocal(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	} else if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	_, err := netip.ParseAddr(host)
	return err == nil || strings.EqualFold(host, "localhost")
}

func (s *Server) onLoopback() bool {
	a, ok := s.lis.Addr().(*net.TCPAddr)
	return ok && a.IP.IsLoopback()
}

// guard has mux serve those who may ask, and everybody asks for health. On loopback without TLS all may.
func (s *Server) guard(mux *http.ServeMux) http.Handler {
	if s.onLoopback() && s.o.TLS == nil {
		return mux
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// The pattern is ours; the path is the caller's, and as long as he likes.
		_, pattern := mux.Handler(r)
		if pattern == "GET /healthz" || pattern == "GET /readyz" {
			mux.ServeHTTP(w, r)
			return
		}
		who, err := s.admit(r.TLS, cmp.Or(pattern, "anything else here"))
		if err == nil {
			mux.ServeHTTP(w, r)
			return
		}
		s.o.Logger.Warn("a request was refused", "identity", who.String(), "remote", r.RemoteAddr, "err", err)
		code := http.StatusForbidden
		if errors.Is(err, identity.ErrUnidentified) || errors.Is(err, identity.ErrNoCertificate) {
			code = http.StatusUnauthorized
		}
		say(w, code, err.Error())
	})
}

// admit tells why a caller may not have what serves pattern. Without TLS everybody is an operator, but profiles
// are for nobody then.
func (s *Server) admit(cs *tls.ConnectionState, pattern string) (identity.Identity, error) {
	if s.o.TLS != nil {
		return s.o.Identities.Admit(cs, pattern, identity.RolesOf(identity.Operator))
	}
	if strings.HasPrefix(pattern, "GET /debug/") {
		return identity.Identity{}, errNoProfiles
	}
	return identity.Identity{}, nil
}

// answer is a response that is not sent yet.
type answer struct {
	header http.Header
	code   int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header         { return a.header }
func (a *answer) WriteHeader(code int)        { a.code = code }
func (a *answer) Write(p []byte) (int, error) { return a.body.Write(p) }

// whole sends what h answers when it is complete, so that there is one line in the log, and
// not one for each metric, if the client has gone.
func (s *Server) whole(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := answer{header: w.Header(), code: http.StatusOK}
		h.ServeHTTP(&a, r)
		w.WriteHeader(a.code)
		if _, err := w.Write(a.body.Bytes()); err != nil {
			s.o.Logger.Warn("the client did not wait for the metrics", "peer", r.RemoteAddr, "err", err)
		}
	})
}

func say(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	fmt.Fprintln(w, text)
}
