package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/inside"
)

// database is one of Options.Databases. Those with one Client share its namespace: the store changes keys of theirs in
// one step, and each but the first has a prefix before its keys' names there, see inside.DatabasePrefix. Commands, and
// whoever hears of keys, know the names without it; a name gets it where an operation of the store is made.
type database struct {
	api    client.API // shared.api
	shared *namespace // never nil
	number int        // in the namespace
	prefix string     // of the stored names of its keys
}

// namespace is that of one database or several.
type namespace struct {
	api client.API // the Client of its databases
	dbs []int      // in it, by their numbers there

	peak atomic.Uint64 // the most bytes of records that INFO has told

	counted struct { // how many keys each of dbs has, for INFO
		sync.Mutex
		keys []uint64
		at   time.Time // when they were counted
	}
}

// placeDatabases finds out which databases share a namespace.
// The order of Options.Databases decides which of those in a namespace has which prefix, so it must not change while
// there is data.
func placeDatabases(all []Database) []database {
	dbs := make([]database, len(all))
	for i, d := range all {
		x := &dbs[i]
		x.api = d.Client
		for j := range i {
			if all[j].Client == d.Client {
				x.shared = dbs[j].shared
			}
		}
		if x.shared == nil {
			x.shared = &namespace{api: d.Client}
		}
		x.number = len(x.shared.dbs)
		x.prefix = inside.DatabasePrefix(x.number)
		x.shared.dbs = append(x.shared.dbs, i)
	}
	return dbs
}

func (g *Gateway) namespaces() (all []*namespace) {
	for i := range g.dbs {
		if g.dbs[i].number == 0 {
			all = append(all, g.dbs[i].shared)
		}
	}
	return all
}

// label is how a database is called for operators.
func (g *Gateway) label(db int) string {
	if name := g.o.Databases[db].Name; len(g.dbs[db].shared.dbs) == 1 {
		return name
	} else {
		return fmt.Sprintf("%s (SELECT %d)", name, db)
	}
}

// emptyKey is the stored name of the empty one, where a name has a byte at least.
var emptyKey = []byte(inside.EmptyKey)

// stored is a key's name in the store: name itself, unless it is empty or gets a prefix.
// The result may alias name, so that the common case copies nothing.
func (d *database) stored(name []byte) []byte {
	if d.prefix == "" && len(name) > 0 {
		return name
	}
	return d.storedLong(name)
}

// storedLong is the part of stored that makes a name; it is apart so that stored is inlined.
func (d *database) storedLong(name []byte) []byte {
	if d.prefix == "" {
		return emptyKey
	}
	return append(append(make([]byte, 0, len(d.prefix)+len(name)), d.prefix...), name...)
}

// appendStored appends a key's name in the store to dst.
func (d *database) appendStored(dst []byte, name string) []byte {
	if d.prefix == "" && name == "" {
		return append(dst, emptyKey...)
	}
	return append(append(dst, d.prefix...), name...)
}

// longNames is how many bytes of names get a prefix, and so a copy, in the store, if these are long.
// It is in bytes. Short names are within what a batch may have for nothing.
func (b *batch) longNames() (n int64) {
	if b.c.in.prefix == "" {
		return 0
	}
	for _, u := range b.units {
		if len(u.name) > eachLimit {
			n += int64(len(u.name))
		}
	}
	return n
}

// find is the index among dbs of the database that has a stored key, and the key's name there; -1: none of them has it.
func (n *namespace) find(stored []byte) (i int, name []byte) {
	i, name = inside.DatabaseOf(stored)
	if i >= len(n.dbs) {
		return -1, nil
	}
	return i, name
}

// badKey is the error for a name that no key of a database can have; the store would refuse it, too, but for the whole
// batch. The empty name is good, as in Redis.
func badKey[S string | []byte](d *database, name S) error {
	switch most := client.MaxKeyLen - len(d.prefix); {
	case len(name) > most && d.prefix != "":
		return refusal(fmt.Sprintf("ERR kvd: key of %d bytes: keys have up to %d in this database, whose namespace "+
			"has others", len(name), most))
	case len(name) > most:
		return refusal(fmt.Sprintf("ERR kvd: key of %d bytes: keys have up to %d", len(name), most))
	case !inside.IsOwn(name):
		return nil
	case isLibraries(name):
		return refusal("ERR kvd: this key is reserved for libraries of functions")
	case string(name) == inside.EmptyKey:
		return refusal("ERR kvd: this key is reserved for the empty key")
	}
	return refusal("ERR kvd: keys that begin with \"\\x00" + inside.OwnPrefix[1:] +
		"\" are reserved for other databases of the namespace")
}

// isLibraries reports whether a name is of the key that gateways keep libraries in. Users neither see nor touch it.
func isLibraries[S string | []byte](name S) bool { return string(name) == inside.FunctionsKey }

// countKeys counts the keys of each of the databases in a namespace. If there are several it reads all of the
// namespace, and else the index, in which the key of libraries counts, too. A key that moves meanwhile may count twice.
// The numbers are in the order of n.dbs. A record that cannot be read is passed over, and what rest makes of it is the
// error.
func (g *Gateway) countKeys(ctx context.Context, n *namespace) ([]uint64, error) {
	keys := make([]uint64, len(n.dbs))
	if len(keys) == 1 {
		var err error
		keys[0], err = n.api.Count(ctx)
		return keys, err
	}
	count := func(stored []byte) bool {
		if i, _ := n.find(stored); i >= 0 {
			keys[i]++
		}
		return false
	}
	var damaged error // of the first page with a corrupt record
	for at := (client.Cursor{}); !at.Done; {
		from := at
		for _, err := range n.api.Scan(ctx, client.ScanOptions{Cursor: &at, KeysOnly: true, Match: count}) {
			switch {
			case errors.Is(err, client.ErrCorrupt) && at != from:
				damaged = cmp.Or(damaged, err)
			case err != nil:
				return nil, err
			}
		}
	}
	return keys, g.rest(damaged)
}

// KeyCount is how many keys a database has, up to a second old.
// INFO is asked often, by monitors, and a count takes long. Others wait meanwhile and get the same number.
// It may be called concurrently, and waits for the store.
func (g *Gateway) KeyCount(db int) (uint64, error) {
	d := &g.dbs[db]
	n := &d.shared.counted
	n.Lock()
	defer n.Unlock()
	if time.Since(n.at) > time.Second {
		keys, err := g.countKeys(g.ctx, d.shared)
		if err != nil {
			return 0, err
		}
		if set := g.functions.now.Load(); db == 0 && keys[0] > 0 && len(keys) == 1 && set != nil && set.version != 0 {
			keys[0]-- // as far as is known
		}
		n.keys, n.at = keys, time.Now()
	}
	return n.keys[d.number], nil
}
