package acl

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

// DefaultUser is who a connection is until it authenticates.
const DefaultUser = "default"

// User is somebody who may authenticate. Connections keep it, and see at once when its rights change.
type User struct {
	Name   string
	rights atomic.Pointer[Rights]
}

// Rights are what the user may do now.
func (u *User) Rights() *Rights { return u.rights.Load() }

// Users are the users of a server. They always include DefaultUser.
type Users struct {
	catalog *Catalog
	none    *Rights // of users that nobody has
	def     *User
	mu      struct {
		sync.Mutex
		all     map[string]*User
		initial *Rights // of DefaultUser, unless a file or SETUSER gave it others
	}
}

// NewUsers makes Users with DefaultUser alone, who may do everything; password, if not empty, is what it
// must give before.
func NewUsers(c *Catalog, password string) *Users {
	u := &Users{catalog: c, none: newRights(c), def: &User{Name: DefaultUser}}
	u.mu.initial = initialRights(c, password)
	u.def.rights.Store(u.mu.initial)
	u.mu.all = map[string]*User{DefaultUser: u.def}
	return u
}

// initialRights are those of DefaultUser: all, behind the password if that is not empty.
func initialRights(c *Catalog, password string) *Rights {
	r := openRights(c)
	if password != "" {
		r = r.clone()
		r.noPass, r.passwords = false, []digest{sha256.Sum256([]byte(password))}
		r = r.seal()
	}
	return r
}

// SetPassword replaces the password of NewUsers by another one, which is not empty. A DefaultUser whose rights came
// from a file or from Set keeps those, until a file leaves it out.
func (u *Users) SetPassword(password string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	was := u.mu.initial
	u.mu.initial = initialRights(u.catalog, password)
	u.def.rights.CompareAndSwap(was, u.mu.initial)
}

// Default is DefaultUser.
func (u *Users) Default() *User { return u.def }

// Find returns nil if there is no such user.
func (u *Users) Find(name string) *User {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.mu.all[name]
}

// Names are those of all users, sorted.
func (u *Users) Names() []string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return slices.Sorted(maps.Keys(u.mu.all))
}

// Lines are all users as lines of a file, sorted by their names. They have hashes of passwords.
func (u *Users) Lines() (lines []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(u.mu.all)) {
		lines = append(lines, u.mu.all[name].Rights().Line(name))
	}
	return lines
}

// Authenticate finds a user by name and password. An unknown user, one that is off and a wrong password
// are not told apart, and take the same time.
func (u *Users) Authenticate(name, password []byte) (user *User, ok bool) {
	u.mu.Lock()
	user = u.mu.all[string(name)]
	u.mu.Unlock()
	r := u.none
	if user != nil {
		r = user.Rights()
	}
	if !r.accepts(sha256.Sum256(password)) {
		return nil, false
	}
	return user, true
}

// ErrName is Redis's refusal of a user's name.
var ErrName = errors.New("Usernames can't contain spaces or null characters")

// Set makes a user, or changes it by rules. It applies all of them, or none if one will not do;
// the error is then a *RuleError or an *UnmatchedError.
func (u *Users) Set(name string, rules []string) error {
	if name == "" || hasSpace(name) {
		return ErrName
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	user := u.mu.all[name]
	old := newRights(u.catalog)
	if user != nil {
		old = user.Rights()
	}
	r, err := old.apply(u.catalog, rules)
	if err != nil {
		return err
	}
	if user == nil {
		user = &User{Name: name}
		u.mu.all[name] = user
	}
	user.rights.Store(r)
	return nil
}

// Delete takes a user away, and all of its rights; nil if there is none. DefaultUser stays.
func (u *Users) Delete(name string) *User {
	u.mu.Lock()
	defer u.mu.Unlock()
	user := u.mu.all[name]
	if user == nil || user == u.def {
		return nil
	}
	delete(u.mu.all, name)
	user.rights.Store(u.none)
	return user
}

// Load replaces all users by those of a file in the form of Redis's aclfile, or none of them. In the
// latter case the error joins all that is wrong, each with the file and the line. It holds nothing of a
// password. DefaultUser is as NewUsers or SetPassword made it if there was a password, else off, unless
// the file defines it.
func (u *Users) Load(file string, text []byte) error {
	fresh := make(map[string]*Rights)
	var errs []error
	for i, line := range strings.Split(string(text), "\n") {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if err := u.loadLine(fresh, words); err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %w", file, i+1, err))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if fresh[DefaultUser] == nil {
		fresh[DefaultUser] = u.mu.initial
		if u.mu.initial.Open() {
			fresh[DefaultUser] = u.none
		}
	}
	for name, user := range u.mu.all {
		if fresh[name] == nil {
			delete(u.mu.all, name)
			user.rights.Store(u.none)
		}
	}
	for name, r := range fresh {
		user := u.mu.all[name]
		if user == nil {
			user = &User{Name: name}
			u.mu.all[name] = user
		}
		user.rights.Store(r)
	}
	return nil
}

func (u *Users) loadLine(into map[string]*Rights, words []string) error {
	if words[0] != "user" || len(words) < 2 {
		return errors.New("want: user NAME RULE...")
	}
	name := words[1]
	switch {
	case hasSpace(name):
		return ErrName
	case into[name] != nil:
		return fmt.Errorf("user %s is there twice", name)
	}
	r, err := newRights(u.catalog).apply(u.catalog, words[2:])
	var bad *RuleError
	switch {
	case errors.As(err, &bad) && !strings.ContainsRune("+-~%&(", rune(bad.Rule[0])):
		// It may be a password without its >, and errors are logged.
		return fmt.Errorf("user %s: rule %d: %w", name, bad.At, bad.Err)
	case err != nil:
		return fmt.Errorf("user %s: %w", name, err)
	}
	into[name] = r
	return nil
}
