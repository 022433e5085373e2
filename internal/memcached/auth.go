package memcached

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// users are digests of passwords by name. They never change.
type users map[string][sha256.Size]byte

const (
	// maxLoginLine and maxLoginValue bound what a stranger may say at a time, in bytes.
	maxLoginLine, maxLoginValue = 2 << 10, 1 << 10
)

// parseUsers reads lines NAME:PASSWORD. Its error tells of a line without what is in it.
func parseUsers(file string, text []byte) (users, error) {
	u := make(users)
	var errs []error
	for i, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSuffix(line, "\r")
		name, password, ok := strings.Cut(line, ":")
		bad := func(why string) { errs = append(errs, fmt.Errorf("%s:%d: %s", file, i+1, why)) }
		switch _, twice := u[name]; {
		case line == "":
		case !ok || name == "" || password == "":
			bad("want NAME:PASSWORD")
		case strings.ContainsAny(line, " \t\x00"):
			bad("want no space: the protocol has one between the name and the password")
		case len(line) > maxLoginValue:
			bad(fmt.Sprintf("%d bytes, want at most %d", len(line), maxLoginValue))
		case twice:
			bad("the name is there twice")
		default:
			u[name] = sha256.Sum256([]byte(password))
		}
	}
	if len(u) == 0 && len(errs) == 0 {
		errs = append(errs, fmt.Errorf("%s: no user", file))
	}
	return u, errors.Join(errs...)
}

// accepts takes the same time for a name that nobody has.
func (u users) accepts(name, password []byte) bool {
	want, known := u[string(name)]
	got := sha256.Sum256(password)
	return subtle.ConstantTimeCompare(want[:], got[:]) == 1 && known
}

// ReloadUsers reads Options.AuthFile again, and takes over all of it or nothing. Connections of users that
// the file has no more are closed. Without a file it does nothing.
func (s *Server) ReloadUsers() error {
	if s.o.AuthFile == "" {
		return nil
	}
	text, err := os.ReadFile(s.o.AuthFile)
	if err != nil {
		return fmt.Errorf("memcached users: %w", err)
	}
	u, err := parseUsers(s.o.AuthFile, text)
	if err != nil {
		return fmt.Errorf("memcached users: %w", err)
	}
	s.users.Store(&u)
	s.conns.Lock()
	defer s.conns.Unlock()
	for c := range s.conns.all {
		if name := c.user.Load(); name != nil {
			if _, stays := u[*name]; !stays {
				c.link.Kill()
			}
		}
	}
	return nil
}

// admitted reports whether the connection may give commands.
func (c *conn) admitted() bool { return c.user.Load() != nil || c.s.users.Load() == nil }

var (
	unauthenticated = reply{"CLIENT_ERROR unauthenticated", resBad}
	badTermination  = reply{"CLIENT_ERROR bad command line termination", resBad}
	badLoginValue   = reply{"CLIENT_ERROR bad authentication token format", resBad}
	badLogin        = reply{"CLIENT_ERROR authentication failure", resBad}
)

// logIn is the first command of a connection in text: "set KEY FLAGS EXPTIME BYTES" with "NAME PASSWORD" as the
// value; nothing is stored. Any other is refused. The words are memcached's (try_read_command_asciiauth). An
// error ends the connection.
func (c *conn) logIn(toks [][]byte) (reply, error) {
	if len(toks) < 5 || string(toks[0]) != "set" {
		return unauthenticated, nil
	}
	n, ok := valueLen(toks[4])
	if !ok {
		return unauthenticated, nil
	}
	if n > maxLoginValue {
		c.say(badLoginValue) // what follows cannot be told from commands
		return badLoginValue, errQuit
	}
	value, whole, give, err := c.readValue(n)
	defer give()
	if err != nil {
		return c.unread(err), err
	}
	if !whole {
		return badTermination, nil
	}
	words := bytes.Fields(value)
	if len(words) < 2 {
		return badLoginValue, nil
	}
	if !c.accepts(words[0], words[1]) {
		return badLogin, nil
	}
	return stored, nil
}

// accepts lets the connection in if the name and the password are a user's.
func (c *conn) accepts(name, password []byte) bool {
	if d := c.s.guesses.Delay(c.peer); d > 0 {
		// Before the password is looked at, so that a client that hangs up instead of waiting has learnt nothing.
		c.link.Waits()
		select {
		case <-time.After(d):
		case <-c.s.ctx.Done():
		}
	}
	if !c.s.users.Load().accepts(name, password) {
		failures := c.s.stats.authFails.Add(1)
		c.s.guesses.Wrong(c.peer)
		c.s.o.Logger.Warn("wrong password", "protocol", "memcached", "peer", c.peer, "failures", failures)
		return false
	}
	user := string(name)
	c.user.Store(&user)
	return true
}
