package inside

import (
	"bytes"
	"strconv"
	"strings"
)

// OwnPrefix begins the names that gateways have for themselves in the store, all but FunctionsKey and EmptyKey.
// They are the names of the keys of databases that share a namespace, but for the first database.
const OwnPrefix = "\x00kvd:db"

// DatabasePrefix begins the names in the store of the keys of database n of those that share a namespace, counted from
// 0. Database 0 has its keys as they are, beside all that other programs write there: its prefix is empty.
func DatabasePrefix(n int) string {
	if n == 0 {
		return ""
	}
	return OwnPrefix + strconv.Itoa(n) + ":"
}

// DatabaseOf takes a name in the store apart: which of the databases that share the namespace has the key, and by what
// name. n is -1 if none has: no client of a gateway sees such a key.
func DatabaseOf(stored []byte) (n int, name []byte) {
	if len(stored) == 0 || stored[0] != 0 {
		return 0, stored
	}
	switch string(stored) {
	case FunctionsKey:
		return -1, nil
	case EmptyKey:
		return 0, stored[:0]
	}
	rest, own := bytes.CutPrefix(stored, []byte(OwnPrefix))
	if !own {
		return 0, stored
	}
	end := bytes.IndexByte(rest, ':')
	if end < 1 || end > 4 {
		return -1, nil
	}
	n, err := strconv.Atoi(string(rest[:end]))
	if err != nil || n < 1 || strconv.Itoa(n) != string(rest[:end]) {
		return -1, nil
	}
	return n, rest[end+1:]
}

// IsOwn reports whether a name in the store is one that only gateways may give to a key.
func IsOwn[S string | []byte](stored S) bool {
	if len(stored) == 0 || stored[0] != 0 {
		return false
	}
	return string(stored) == FunctionsKey || string(stored) == EmptyKey || strings.HasPrefix(string(stored), OwnPrefix)
}
