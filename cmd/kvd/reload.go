package main

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/config"
)

// live is what SIGHUP changes in a role that runs.
type live struct {
	level slog.LevelVar
	mu    struct {
		sync.Mutex
		log   *slog.Logger // nil: the role has not begun
		pairs []*pair
		files []reloadable
	}
}

// reloadable is a file that a part of the role reads again. read takes over all of it, or nothing.
type reloadable struct {
	key  string // of the setting
	read func() error
}

// reloads has SIGHUP call read; key is the setting that names the file.
func (a *app) reloads(key string, read func() error) {
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	a.live.mu.files = append(a.live.mu.files, reloadable{key, read})
}

// pair is a certificate and its key, which can be read again while they are in use.
type pair struct {
	current atomic.Pointer[tls.Certificate]
	read    func() (*tls.Config, error)
	ca      *x509.CertPool // as it is used until the process ends
}

// logger makes the role's logger.
func (a *app) logger(l config.Log) *slog.Logger {
	a.live.level.Set(l.SlogLevel())
	log := l.Logger(a.stderr, &a.live.level)
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	a.live.mu.log = log
	return log
}

// creds calls read, which loads the files of TLS settings, and has SIGHUP read the
// certificate and its key again.
func (a *app) creds(read func() (*tls.Config, error)) (*tls.Config, error) {
	conf, err := read()
	if conf == nil || err != nil {
		return conf, err
	}
	p := &pair{read: read, ca: conf.RootCAs}
	p.current.Store(&conf.Certificates[0])
	conf.Certificates = nil
	conf.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return p.current.Load(), nil }
	conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return p.current.Load(), nil }
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	a.live.mu.pairs = append(a.live.mu.pairs, p)
	return conf, nil
}

// onHangup has SIGHUP, which would end the process, reload what can be reloaded, until stop
// is called. load reads the settings anew.
func (a *app) onHangup(running config.Settings, load func() (config.Settings, error)) (stop func()) {
	hup, done, ended := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(hup, syscall.SIGHUP)
	go func() {
		defer close(ended)
		for {
			select {
			case <-hup:
				a.reload(running, load)
			case <-done:
				return
			}
		}
	}()
	// The signal stays caught: the process is about to end as it was asked to.
	return func() { close(done); <-ended }
}

// reload takes over the level of the log, certificates and files of users, and says what it took over, what
// waits for the next start, and what is wrong. Certificates hold for new connections.
func (a *app) reload(running config.Settings, load func() (config.Settings, error)) {
	a.live.mu.Lock()
	log, pairs, files := a.live.mu.log, slices.Clone(a.live.mu.pairs), slices.Clone(a.live.mu.files)
	a.live.mu.Unlock()
	if log == nil {
		return // the role is about to read everything
	}
	fresh, err := load()
	if err != nil {
		log.Error("SIGHUP: the settings are kept as they were, since they cannot be read again", "err", err)
		return
	}
	now := []any{"log.level", config.LogLevel(fresh).String()}
	later := slices.DeleteFunc(config.Differ(running, fresh), func(key string) bool { return key == "log.level" })
	failed := false
	for _, p := range pairs {
		conf, err := p.read()
		if err != nil {
			failed = true
			log.Error("SIGHUP: the certificate is kept as it was", "err", err)
			continue
		}
		p.current.Store(&conf.Certificates[0])
		if !p.ca.Equal(conf.RootCAs) && !slices.Contains(later, "tls.ca") {
			later = append(later, "tls.ca") // the same file with others in it
		}
		now = append(now, "tls.cert", fmt.Sprintf("valid until %s", conf.Certificates[0].Leaf.NotAfter.UTC().Format(time.DateTime)))
	}
	for _, f := range files {
		if err := f.read(); err != nil {
			failed = true
			log.Error("SIGHUP: the users are kept as they were", "setting", f.key, "err", err)
			continue
		}
		now = append(now, f.key, "read")
	}
	if len(later) > 0 {
		log.Warn("SIGHUP: other settings take effect when the process is started again", "changed", strings.Join(later, ", "))
	}
	// Said while the lower of both levels holds.
	old := a.live.level.Level()
	a.live.level.Set(min(old, config.LogLevel(fresh)))
	if !failed {
		log.Info("SIGHUP: reloaded", now...)
	}
	a.live.level.Set(config.LogLevel(fresh))
}

// loader reads r's settings again, from where they came.
func loader(r role, file string, flags *pflag.FlagSet) func() (config.Settings, error) {
	return func() (config.Settings, error) {
		s, _ := r.defaults()
		return s, config.Load(s, file, flags)
	}
}
