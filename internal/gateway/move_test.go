package gateway

import (
	"context"
	"strings"
	"testing"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/client/clienttest"
	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// moveStores is a gateway of two databases, the key k = 1 in the first one, and a connection that is in the second one.
func moveStores(t *testing.T) (here, there *clienttest.Store, p, other *peer) {
	t.Helper()
	here, there = clienttest.New(clienttest.Options{}), clienttest.New(clienttest.Options{})
	addr := serve(t, Options{Databases: []Database{{"here", here}, {"there", there}}})
	p, other = dial(t, "tcp", addr), dial(t, "tcp", addr)
	p.want(t, "+OK\r\n", "SET", "k", "1")
	other.want(t, "+OK\r\n", "SELECT", "1")
	return here, there, p, other
}

// TestMove: a key goes to another database with its type and expiry, if there is none of its name.
func TestMove(t *testing.T) {
	_, _, p, other := moveStores(t)
	for _, c := range []struct {
		p       *peer
		command string
		reply   string
	}{
		{p, "MOVE k 0", "-ERR source and destination objects are the same\r\n"},
		{p, "MOVE k 2", "-ERR DB index is out of range\r\n"},
		{p, "MOVE k x", "-" + string(values.ErrNotInt) + "\r\n"},
		{p, "MOVE none 1", ":0\r\n"},
		{p, "PEXPIREAT k 4000000000123", ":1\r\n"},
		{p, "MOVE k 1", ":1\r\n"},
		{p, "EXISTS k", ":0\r\n"},
		{other, "GET k", bulk("1")},
		{other, "PEXPIRETIME k", ":4000000000123\r\n"},
		{p, "RPUSH k 1 2", ":2\r\n"},
		{p, "MOVE k 1", ":0\r\n"},
		{p, "LLEN k", ":2\r\n"},
		{other, "DEL k", ":1\r\n"},
		{p, "MOVE k 1", ":1\r\n"},
		{other, "LRANGE k 0 -1", array("1", "2")},
		{other, "TTL k", ":-1\r\n"},
		{other, "MOVE k 0", ":1\r\n"},
		{p, "EVAL return(redis.call('move','k','1')) 0", "-ERR kvd: " + exec.ErrDatabases.Error() + "\r\n"},
		{p, "EVAL return(redis.call('move','none','1')) 0", ":0\r\n"},
		{p, "EXEC MOVE k 1", "-ERR kvd: " + exec.ErrDatabases.Error() + "\r\n"},
		{p, "EXEC MOVE none 1;LLEN k", "*2\r\n:0\r\n:2\r\n"},
		{other, "EXISTS k", ":0\r\n"},
		{p, "ACL SETUSER u on nopass ~* +@all db=0", "+OK\r\n"},
		{p, "ACL SETUSER writer on nopass %W~* +@all", "+OK\r\n"},
		{other, "AUTH writer any", "+OK\r\n"},
		{other, "MOVE k 0", "-NOPERM this user has no permissions to access one of the keys used as arguments\r\n"},
		{p, "AUTH u any", "+OK\r\n"},
		{p, "MOVE k 1", "-NOPERM this user has no permissions to access this database\r\n"},
	} {
		if got := c.p.perform(t, c.command); got != c.reply {
			t.Errorf("%s: got %q, want %q", c.command, got, c.reply)
		}
	}
}

// TestMoveWhenStepsFail: whatever fails, or is written meanwhile, the key is in one of the databases, and in both only
// if the reply says so.
func TestMoveWhenStepsFail(t *testing.T) {
	refused, unknown, applied := clienttest.Fault{Err: client.ErrUnavailable},
		clienttest.Fault{Err: client.ErrUnknownOutcome}, clienttest.Fault{Applied: true}
	set := func(p **peer, command string) func(*testing.T) clienttest.Fault {
		return func(t *testing.T) clienttest.Fault { (*p).do(t, strings.Fields(command)...); return clienttest.Fault{} }
	}
	var inHere, inThere *peer
	is := func(f clienttest.Fault) func(*testing.T) clienttest.Fault {
		return func(*testing.T) clienttest.Fault { return f }
	}
	type hook = func(*testing.T) clienttest.Fault
	for name, c := range map[string]struct {
		put, remove, undo  hook // what happens when the gateway is about to do that for the first time
		reply, here, there string
	}{
		"the put is refused":                     {put: is(refused), reply: "-LOADING ", here: "1"},
		"the put may have happened, and has not": {put: is(unknown), reply: "-ERR unknown outcome", here: "1"},
		"the put may have happened, and has": {put: is(applied), reply: "-ERR unknown outcome", here: "1",
			there: "1"},
		"the other key comes before the put": {put: set(&inThere, "SET k other"), reply: ":0\r\n", here: "1",
			there: "other"},
		"the key goes before the put": {put: set(&inHere, "DEL k"), reply: ":0\r\n"},
		"the delete is refused":       {remove: is(refused), reply: "-LOADING ", here: "1"},
		"the delete may have happened, and not": {remove: is(unknown), reply: "-ERR unknown outcome", here: "1",
			there: "1"},
		"the delete may have happened, and has": {remove: is(applied), reply: "-ERR unknown outcome", there: "1"},
		"the key changes before the delete":     {remove: set(&inHere, "APPEND k 2"), reply: ":1\r\n", there: "12"},
		"the key goes before the delete":        {remove: set(&inHere, "DEL k"), reply: ":0\r\n"},
		"the delete is refused, and so is undoing": {remove: is(refused), undo: is(refused),
			reply: "-ERR unknown outcome", here: "1", there: "1"},
		"the key changes, and then the other": {remove: set(&inHere, "APPEND k 2"), undo: set(&inThere, "APPEND k 3"),
			reply: "-ERR unknown outcome",
			here:  "12", there: "13"},
	} {
		t.Run(name, func(t *testing.T) {
			here, there, p, other := moveStores(t)
			inHere, inThere = dial(t, "tcp", p.RemoteAddr().String()), other
			if c.put != nil {
				atCommit(there, func() clienttest.Fault { return c.put(t) })
			}
			if c.undo != nil {
				asked := 0
				there.Fail(func(_ context.Context, o *client.Op) (fault clienttest.Fault) {
					if o.Kind == client.OpDelete {
						if asked++; asked == 1 {
							return c.undo(t)
						}
					}
					return fault
				})
			}
			if c.remove != nil {
				atCommit(here, func() clienttest.Fault { return c.remove(t) })
			}
			if got := p.do(t, "MOVE", "k", "1"); !strings.HasPrefix(got, c.reply) {
				t.Errorf("replied %q, want %q", got, c.reply)
			}
			here.Fail(nil)
			there.Fail(nil)
			for db, x := range map[*peer]string{p: c.here, other: c.there} {
				want := bulk(x)
				if x == "" {
					want = "$-1\r\n"
				}
				db.want(t, want, "GET", "k")
			}
		})
	}
}

// TestSwapDB: indexes are looked at in Redis's order; a swap of a database with itself changes nothing, and any other
// is refused.
func TestSwapDB(t *testing.T) {
	p := dial(t, "tcp",
		serve(t, Options{
			Databases: []Database{{"0", clienttest.New(clienttest.Options{})},
				{"1", clienttest.New(clienttest.Options{})}}}))
	for cmd, want := range map[string]string{
		"x 1": "-ERR invalid first DB index\r\n", "0 x": "-ERR invalid second DB index\r\n",
		"-1 1": "-ERR DB index is out of range\r\n",
		"0 2":  "-ERR DB index is out of range\r\n", "2 x": "-ERR invalid second DB index\r\n",
		"99999999999 1": "-ERR invalid first DB index\r\n", "1 1": "+OK\r\n",
		"0 1": "-ERR kvd: SWAPDB is not supported: gateways cannot change the order of their databases at one " +
			"moment; nothing was done\r\n",
	} {
		p.want(t, want, append([]string{"SWAPDB"}, strings.Fields(cmd)...)...)
	}
}
