package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/config"
	"github.com/kvd-project/kvd/internal/identity"
)

// pollEvery is how often files of certificates are looked at.
const pollEvery = time.Second

// live is what changes in a role that runs: the level of the log by SIGHUP, certificates by that and
// when their files change.
type live struct {
	level slog.LevelVar
	mu    struct {
		sync.Mutex
		log     *slog.Logger // nil: the role has not begun
		files   []reloadable
		sources []*certs.Source
		poll    *time.Ticker // stopped until there are sources: a role without TLS is not woken
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

// logger makes the role's logger.
func (a *app) logger(l config.Log) *slog.Logger {
	a.live.level.Set(l.SlogLevel())
	log := l.Logger(a.stderr, &a.live.level)
	for _, name := range slices.Sorted(maps.Keys(a.misspelt)) {
		log.Warn("a variable of the environment is no setting and is not read", "variable", name, "did_you_mean",
			a.misspelt[name])
	}
	a.misspelt = nil
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	a.live.mu.log = log
	return log
}

// creds loads the files of TLS settings, and has them taken anew when they change. It gives nil if there
// are none.
func (a *app) creds(o certs.Options) (*tls.Config, error) {
	if o.Files == (certs.Files{}) {
		return nil, nil
	}
	s, err := certs.Open(o)
	if err != nil {
		return nil, err
	}
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	a.live.mu.sources = append(a.live.mu.sources, s)
	a.live.mu.poll.Reset(pollEvery)
	return s.Config(), nil
}

// ofRole is the files of t, but refuses a certificate of this process whose role is not want:
// others would refuse it call by call.
func ofRole(t config.TLS, i config.Identity, want identity.Role) certs.Options {
	o := t.Options()
	o.Check = func(own *x509.Certificate) error {
		id, err := i.Mapping().OfCertificate(own)
		if err == nil && id.Role != want {
			err = &identity.DeniedError{Identity: id, Right: "this process's certificate", Want: identity.RolesOf(want)}
		}
		return err
	}
	return o
}

// sources are those of all certificates that the role uses.
func (a *app) sources() []*certs.Source {
	a.live.mu.Lock()
	defer a.live.mu.Unlock()
	return slices.Clone(a.live.mu.sources)
}

// keepFresh has SIGHUP, which would end the process, reload what can be reloaded, and looks at files of
// certificates now and then, until stop is called. load reads the settings anew.
func (a *app) keepFresh(running config.Settings, load func() (config.Settings, error)) (stop func()) {
	hup, done, ended := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{})
	signal.Notify(hup, syscall.SIGHUP)
	t := time.NewTicker(pollEvery)
	t.Stop()
	a.live.mu.Lock()
	a.live.mu.poll = t
	a.live.mu.Unlock()
	go func() {
		defer close(ended)
		defer t.Stop()
		for {
			select {
			case <-hup:
				a.reload(running, load)
			case <-t.C:
				a.pollCerts()
			case <-done:
				return
			}
		}
	}()
	// The signal stays caught: the process is about to end as it was asked to.
	return func() { close(done); <-ended }
}

// pollCerts takes over files of certificates that have changed.
func (a *app) pollCerts() {
	a.live.mu.Lock()
	log := a.live.mu.log
	a.live.mu.Unlock()
	for _, s := range a.sources() {
		switch changed, err := s.Poll(); {
		case errors.Is(err, certs.ErrListExpired):
			log.Warn("files of certificates are in use as before", "err", err)
		case err != nil:
			log.Error("files of certificates have changed and are not usable: those in use are kept", "err", err)
		case changed:
			log.Info("certificates taken anew from their files", inUse(s)...)
		}
	}
}

// inUse describes, for the log, what s gives.
func inUse(s *certs.Source) []any {
	set := s.Current()
	all := []any{"tls.cert", fmt.Sprintf("valid until %s", set.Pair.Leaf.NotAfter.UTC().Format(time.DateTime)),
		"tls.ca", len(set.Authorities)}
	for _, l := range set.Revoked.Lists() {
		all = append(all, "tls.crl", fmt.Sprintf("number %s with %d revoked", certs.Number(l),
			len(l.RevokedCertificateEntries)))
	}
	return all
}

// reload takes over the level of the log, certificates and files of users, and says what it took over, what
// waits for the next start, and what is wrong. Certificates hold for new connections, as do those
// that pollCerts finds.
func (a *app) reload(running config.Settings, load func() (config.Settings, error)) {
	a.live.mu.Lock()
	log, files := a.live.mu.log, slices.Clone(a.live.mu.files)
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
	for _, s := range a.sources() {
		if _, err := s.Reload(); err != nil {
			failed = true
			log.Error("SIGHUP: the certificates in use are kept", "err", err)
			continue
		}
		now = append(now, inUse(s)...)
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
		log.Warn("SIGHUP: other settings take effect when the process is started again", "changed",
			strings.Join(later, ", "))
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
