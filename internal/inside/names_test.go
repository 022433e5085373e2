package inside

import (
	"strings"
	"testing"
)

// A name in the store is of one database, by one name, and every name in a database comes back from the store.
func TestDatabaseOf(t *testing.T) {
	for n := range 100 {
		for _, name := range []string{"k", "", "\x00", "0", ":", "1:k", OwnPrefix, OwnPrefix + "1:k", FunctionsKey,
			EmptyKey} {
			stored := DatabasePrefix(n) + name
			if n == 0 && (name == "" || IsOwn(name)) {
				continue // which no client can give to a key
			}
			if got, shown := DatabaseOf([]byte(stored)); got != n || string(shown) != name {
				t.Errorf("%q is %q in database %d, want %q in %d", stored, shown, got, name, n)
			}
			if IsOwn(stored) != (n > 0) {
				t.Errorf("%q: IsOwn is %v", stored, IsOwn(stored))
			}
		}
	}
	for _, nobodys := range []string{FunctionsKey, OwnPrefix, OwnPrefix + "1", OwnPrefix + ":k", OwnPrefix + "0:k",
		OwnPrefix + "01:k", OwnPrefix + "+1:k", OwnPrefix + "-1:k",
		OwnPrefix + "1a:k", OwnPrefix + "99999:k", OwnPrefix + strings.Repeat("1", 30) + ":k"} {
		if n, name := DatabaseOf([]byte(nobodys)); n != -1 || name != nil {
			t.Errorf("%q is %q in database %d, want none", nobodys, name, n)
		}
		if !IsOwn(nobodys) {
			t.Errorf("%q may be given by anybody", nobodys)
		}
	}
	if n, name := DatabaseOf([]byte(EmptyKey)); n != 0 || len(name) != 0 || !IsOwn(EmptyKey) {
		t.Errorf("the empty key is %q in database %d", name, n)
	}
	for _, plain := range []string{"", "k", "\x00", "\x00kvd:", "\x00kvd: x", "kvd:db1:k"} {
		if n, name := DatabaseOf([]byte(plain)); n != 0 || string(name) != plain || IsOwn(plain) {
			t.Errorf("%q is %q in database %d", plain, name, n)
		}
	}
}
