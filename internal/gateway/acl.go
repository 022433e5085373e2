package gateway

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/google/renameio/v2"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/units"
)

// maxPasswordFile bounds a file with a password, in bytes.
const maxPasswordFile = 1 << 10

// ReloadPassword reads Options.PasswordFile again. Connections go on as the users that they are. A default
// user whom ACLFile defines, or ACL SETUSER has changed, keeps its own passwords. Without a file it does nothing.
func (g *Gateway) ReloadPassword() error {
	if g.o.PasswordFile == "" {
		return nil
	}
	password, err := readPassword(g.o.PasswordFile)
	if err != nil {
		return fmt.Errorf("password-file: %w", err)
	}
	g.users.SetPassword(password)
	return nil
}

// readPassword gives the only line of a file. Its errors hold nothing of what is in it.
// The line may end as on Windows. An empty password is refused, since it would be none at all.
func readPassword(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxPasswordFile+1))
	if err != nil {
		return "", err
	}
	line, _ := bytes.CutSuffix(text, []byte("\n"))
	line, _ = bytes.CutSuffix(line, []byte("\r"))
	switch {
	case len(text) > maxPasswordFile:
		return "", fmt.Errorf("%s: more than %s", file, units.Bytes(maxPasswordFile))
	case len(line) == 0:
		return "", fmt.Errorf("%s: no password in it", file)
	case bytes.ContainsAny(line, "\r\n\x00"):
		return "", fmt.Errorf("%s: want one line, with the password", file)
	}
	return string(line), nil
}

// ReloadUsers reads Options.ACLFile again, and takes over all of it or nothing. The rights of open
// connections change with their user's; those of users that are gone or off are closed. Without a file it
// does nothing.
func (g *Gateway) ReloadUsers() error { return g.reloadUsers(nil) }

// reloadUsers closes the connection self, if that has to go, after its reply.
func (g *Gateway) reloadUsers(self *conn) error {
	if g.o.ACLFile == "" {
		return nil
	}
	g.aclFile.Lock()
	defer g.aclFile.Unlock()
	text, err := os.ReadFile(g.o.ACLFile)
	if err != nil {
		return fmt.Errorf("users: %w", err)
	}
	if err := g.users.Load(g.o.ACLFile, text); err != nil {
		return fmt.Errorf("users: %w", err)
	}
	g.dismissUsers(self, true)
	g.dismissListeners(self)
	g.dismissTrackers(self)
	g.dismissMonitors(self)
	return nil
}

// saveUsers replaces the file in one step, so that a reader or a crash meets all of it, old or new.
// Passwords are in it as their SHA-256, as in Redis's file. The file keeps its permissions, and is its owner's alone if
// it is new.
func (g *Gateway) saveUsers() error {
	g.aclFile.Lock()
	defer g.aclFile.Unlock()
	return renameio.WriteFile(g.o.ACLFile, []byte(strings.Join(g.users.Lines(), "\n")+"\n"), 0o600,
		renameio.WithExistingPermissions())
}

// errNoACLFile is Redis's text, although there is no CONFIG REWRITE here.
const errNoACLFile = "ERR This Redis instance is not configured to use an ACL file. You may want to specify users " +
	"via the ACL SETUSER command and then issue a CONFIG REWRITE (assuming you have a Redis configuration file set) " +
	"in order to store users in the Redis configuration."

// aclCommands are about users.
func aclCommands() performers {
	return performers{
		spec.CmdAclCat:     cmdACLCat,
		spec.CmdAclDeluser: cmdACLDelUser,
		spec.CmdAclDryrun:  cmdACLDryRun,
		spec.CmdAclGenpass: cmdACLGenPass,
		spec.CmdAclGetuser: cmdACLGetUser,
		spec.CmdAclList:    cmdACLList,
		spec.CmdAclLoad:    cmdACLLoad,
		spec.CmdAclLog:     cmdACLLog,
		spec.CmdAclSave:    cmdACLSave,
		spec.CmdAclSetuser: cmdACLSetUser,
		spec.CmdAclUsers:   cmdACLUsers,
		spec.CmdAclWhoami: func(c *conn, w *resp.Writer, _ [][]byte) error {
			w.BulkString(c.user.Load().Name)
			return nil
		},
	}
}

// cmdACLCat lists commands that are served, so that nobody counts on a right to others.
// Redis lists those of its modules, too, of which there are none.
func cmdACLCat(_ *conn, w *resp.Writer, args [][]byte) error {
	var names []string
	switch len(args) {
	case 2:
		names = acl.Categories()
	case 3:
		cat, ok := acl.ParseCategory(string(args[2]))
		if !ok {
			return refusal("ERR Unknown category '" + values.Clip(args[2], 128) + "'")
		}
		for _, c := range commandsByID {
			if c.served() && c.categories&cat != 0 {
				names = append(names, c.Name)
			}
		}
	default:
		return wrongArgs(commandsByID[spec.CmdAclCat])
	}
	writeStrings(w, names)
	return nil
}

// writeStrings writes an array; no list here is long enough to be worth a stream.
func writeStrings(w *resp.Writer, list []string) {
	w.Array(len(list))
	for _, s := range list {
		w.BulkString(s)
	}
}

// Names are no secret among those who may ask: the category admin, which ACL is in, sees rules and hashes as well.
func cmdACLUsers(c *conn, w *resp.Writer, _ [][]byte) error {
	writeStrings(w, c.g.users.Names())
	return nil
}
func cmdACLList(c *conn, w *resp.Writer, _ [][]byte) error {
	writeStrings(w, c.g.users.Lines())
	return nil
}

// cmdACLSetUser changes this gateway alone; the file is what gateways can share. A list of rules is taken as a whole or
// not at all: half of one could leave a user with more than was meant. The log says who did it, and no rule, since
// rules may hold passwords. The new rights hold from the next command on, for connections that are open as well.
func cmdACLSetUser(c *conn, w *resp.Writer, args [][]byte) error {
	var rules []string
	for _, a := range args[3:] {
		rules = append(rules, string(a))
	}
	err := c.g.users.Set(string(args[2]), rules)
	var bad *acl.RuleError
	switch {
	case err == nil:
		c.g.dismissListeners(c)
		c.g.dismissTrackers(c)
		c.g.dismissMonitors(c)
		c.g.o.Logger.Info("user changed", "user", values.Clip(args[2], 128), "by", c.user.Load().Name, "peer", c.remote)
		w.OK()
	case errors.As(err, &bad):
		return refusal("ERR Error in ACL SETUSER modifier " + bad.Error())
	default:
		return refusal("ERR " + err.Error())
	}
	return nil
}

// cmdACLDelUser closes the connections of those users, also that of the caller behind the reply.
func cmdACLDelUser(c *conn, w *resp.Writer, args [][]byte) error {
	for _, a := range args[2:] {
		if string(a) == acl.DefaultUser {
			return refusal("ERR The 'default' user cannot be removed")
		}
	}
	n := 0
	for _, a := range args[2:] {
		if c.g.users.Delete(string(a)) != nil {
			n++
			c.g.o.Logger.Info("user deleted", "user", values.Clip(a, 128), "by", c.user.Load().Name, "peer", c.remote)
		}
	}
	// The connections are closed behind all deletions, in one look at them.
	if n > 0 {
		c.g.dismissUsers(c, false)
	}
	w.Int(int64(n))
	return nil
}

// cmdACLGetUser has a field that Redis 7.0 has not, databases, for users that may not work in all of them.
func cmdACLGetUser(c *conn, w *resp.Writer, args [][]byte) error {
	u := c.g.users.Find(string(args[2]))
	if u == nil {
		w.Null()
		return nil
	}
	in := u.Rights().Info()
	own := in.Selectors[0]
	w.Map(3 + ownFields(own))
	w.BulkString("flags")
	w.Set(len(in.Flags))
	for _, f := range in.Flags {
		w.BulkString(f)
	}
	// They are the SHA-256 of each, in hexadecimal digits.
	w.BulkString("passwords")
	writeStrings(w, in.Passwords)
	writeSelector(w, own)
	w.BulkString("selectors")
	w.Array(len(in.Selectors) - 1)
	for _, s := range in.Selectors[1:] {
		w.Map(ownFields(s))
		writeSelector(w, s)
	}
	return nil
}

// ownFields is how many fields writeSelector writes.
// A map's length comes before its fields.
func ownFields(s acl.SelectorInfo) int {
	if s.Databases == "" {
		return 3
	}
	return 4
}

// writeSelector writes rules as SETUSER would take them, so that tools can carry a user from one gateway to another.
func writeSelector(w *resp.Writer, s acl.SelectorInfo) {
	w.BulkString("commands")
	w.BulkString(s.Commands)
	w.BulkString("keys")
	w.BulkString(s.Keys)
	w.BulkString("channels")
	w.BulkString(s.Channels)
	if s.Databases != "" {
		w.BulkString("databases")
		w.BulkString(s.Databases)
	}
}

// cmdACLLoad says all that is wrong with the file, and then changes nothing.
func cmdACLLoad(c *conn, w *resp.Writer, _ [][]byte) error {
	if c.g.o.ACLFile == "" {
		return refusal(errNoACLFile)
	}
	if err := c.g.reloadUsers(c); err != nil {
		return refusal("ERR " + strings.ReplaceAll(err.Error(), "\n", "; ") +
			". WARNING: ACL errors detected, no change to the previously active ACL rules was performed")
	}
	c.g.o.Logger.Info("users reloaded", "by", c.user.Load().Name, "peer", c.remote)
	w.OK()
	return nil
}

// cmdACLSave answers as Redis does, without the reason: it has paths of the gateway's machine, which are for its log.
func cmdACLSave(c *conn, w *resp.Writer, _ [][]byte) error {
	if c.g.o.ACLFile == "" {
		return refusal(errNoACLFile)
	}
	if err := c.g.saveUsers(); err != nil {
		c.g.o.Logger.Error("users not saved", "err", err)
		return refusal("ERR There was an error trying to save the ACLs. Please check the server logs for more " +
			"information")
	}
	w.OK()
	return nil
}

// cmdACLLog is empty after a restart: it is of this gateway alone. The newest comes first, ten unless the caller wants
// more, with the fields of Redis 7.0 in its order, since tools print them as they come.
func cmdACLLog(c *conn, w *resp.Writer, args [][]byte) error {
	count := int64(10)
	switch p := values.OptionsOf(args[2:]); {
	case p.Left() > 1:
		return wrongArgs(commandsByID[spec.CmdAclLog])
	case p.Flag("reset"):
		c.g.denials.Reset()
		w.OK()
		return nil
	case p.More():
		if count = p.Int(); p.Err() != nil {
			return p.Err()
		}
	}
	now := time.Now()
	list := c.g.denials.Newest(int(min(count, acl.MaxEntries)))
	w.Array(len(list))
	for _, e := range list {
		w.Map(7)
		w.BulkString("count")
		w.Int(int64(e.Count))
		w.BulkString("reason")
		w.BulkString(e.Why.String())
		w.BulkString("context")
		w.BulkString(e.Context)
		w.BulkString("object")
		w.BulkString(e.Object)
		w.BulkString("username")
		w.BulkString(e.User)
		w.BulkString("age-seconds")
		w.Double(float64(now.Sub(e.At).Milliseconds()) / 1000)
		w.BulkString("client-info")
		w.BulkString(e.Client)
	}
	return nil
}

// cmdACLGenPass rounds bits up to whole hexadecimal digits.
// The password is shown once and kept nowhere.
func cmdACLGenPass(_ *conn, w *resp.Writer, args [][]byte) error {
	bits := int64(256)
	if len(args) > 3 {
		return wrongArgs(commandsByID[spec.CmdAclGenpass])
	}
	if len(args) == 3 {
		var ok bool
		if bits, ok = resp.ParseInt(args[2]); !ok {
			return values.ErrNotInt
		}
		if bits <= 0 || bits > 4096 {
			return refusal("ERR ACL GENPASS argument must be the number of bits for the output password, a " +
				"positive number " +
				"up to 4096")
		}
	}
	// crypto/rand never fails: the process ends before it gives weak bytes.
	secret := make([]byte, (bits+7)/8)
	rand.Read(secret)
	w.BulkString(hex.EncodeToString(secret)[:(bits+3)/4])
	return nil
}

// cmdACLDryRun is of the database that the connection is in. It records nothing: an operator asks, and the user did not
// try. A command that is not served is not found, whatever the user's rules say of it.
// Replies that say no are strings and no errors, as in Redis: the command itself went well.
func cmdACLDryRun(c *conn, w *resp.Writer, args [][]byte) error {
	u := c.g.users.Find(string(args[2]))
	if u == nil {
		return refusal("ERR User '" + values.Clip(args[2], 128) + "' not found")
	}
	args = args[3:]
	cmd := find(args[0])
	if cmd != nil && cmd.sub != nil && len(args) > 1 {
		cmd = cmd.subcommand(args[1])
	}
	switch {
	case cmd == nil:
		return refusal("ERR Command '" + values.Clip(args[0], 128) + "' not found")
	case cmd.mistaken(len(args)):
		return wrongArgs(cmd)
	}
	a := c.accessOf(cmd, args, c.db)
	switch why, at := u.Rights().Check(&a); why {
	case acl.Allowed:
		w.OK()
	case acl.DeniedCommand:
		w.BulkString("This user has no permissions to run the '" + cmd.Name + "' command")
	case acl.DeniedDatabase:
		w.BulkString("This user has no permissions to access this database")
	case acl.DeniedChannel:
		w.BulkString("This user has no permissions to access the '" + values.Clip(args[at], 128) + "' channel")
	default:
		w.BulkString("This user has no permissions to access the '" + values.Clip(args[at], 128) + "' key")
	}
	return nil
}
