package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
)

// whoHelp says whom commands about access lists take.
const whoHelp = `WHO is an identity as kvctl whoami prints it (spiffe://TRUST-DOMAIN/kvd/ROLE/NAME, or
ROLE/NAME of certificates without a URI), or group:NAME for all whose certificates
have that organization (O).`

// quotaFlags are the flags of a namespace's owner and quotas.
type quotaFlags struct {
	owner           string
	sessions, lanes uint32
	tcpOps          uint64
	index           string
	changed         func(flag string) bool
}

func (q *quotaFlags) add(f *pflag.FlagSet) {
	f.StringVar(&q.owner, "owner", "", "who owns it, an identity or group:NAME")
	f.Uint32Var(&q.sessions, "quota-sessions", 0, "sessions that may be open at a time; 0: no quota")
	f.Uint32Var(&q.lanes, "quota-lanes", 0, "connections of a session to a memory node; 0: no quota")
	f.Uint64Var(&q.tcpOps, "quota-tcp-ops", 0, "verbs over tcp that each memory node executes in a second; 0: no quota")
	f.StringVar(&q.index, "quota-index", "0", "memory for the index, each copy counted once; 0: no quota")
	q.changed = f.Changed
}

// check refuses what no directory would take.
func (q *quotaFlags) check() error {
	if q.owner == "" && q.changed("owner") {
		return usagef("--owner: want an identity, or group:NAME")
	}
	if q.owner == "" {
		return nil
	}
	if err := identity.CheckWho(q.owner); err != nil {
		return usagef("--owner %w", err)
	}
	return nil
}

// quota is old with the quotas that were given; nil if none was.
func (q *quotaFlags) quota(old *dirpb.Quota) (*dirpb.Quota, error) {
	given := false
	out := &dirpb.Quota{Sessions: old.GetSessions(), Lanes: old.GetLanes(), TcpOpsPerSecond: old.GetTcpOpsPerSecond(),
		IndexBytes: old.GetIndexBytes()}
	for flag, take := range map[string]func() error{
		"quota-sessions": func() error { out.Sessions = q.sessions; return nil },
		"quota-lanes":    func() error { out.Lanes = q.lanes; return nil },
		"quota-tcp-ops":  func() error { out.TcpOpsPerSecond = q.tcpOps; return nil },
		"quota-index":    func() (err error) { out.IndexBytes, err = parseBytes(q.index); return err },
	} {
		if !q.changed(flag) {
			continue
		}
		given = true
		if err := take(); err != nil {
			return nil, usagef("--%s: %w", flag, err)
		}
	}
	if !given {
		return nil, nil
	}
	return out, nil
}

// of is the quota for a namespace that there is, after what was not given.
func (q *quotaFlags) of(ctx context.Context, b backend, name string) (*dirpb.Quota, error) {
	if given, err := q.quota(nil); given == nil {
		return nil, err
	}
	rep, err := showNamespace(ctx, b, name)
	if err != nil {
		return nil, err
	}
	return q.quota(rep.GetNamespace().GetQuota())
}

func rightOf(s string) (dirpb.Right, error) {
	if v, ok := dirpb.Right_value["RIGHT_"+strings.ToUpper(s)]; ok && v != 0 && s == strings.ToLower(s) {
		return dirpb.Right(v), nil
	}
	return 0, usagef("%q: want read, write or admin", s)
}

func (a *app) completeRight() cobra.CompletionFunc {
	names := a.completeNamespace()
	return func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
		switch len(args) {
		case 0:
			return names(cmd, args, word)
		case 2:
			return []string{"read", "write", "admin"}, cobra.ShellCompDirectiveNoFileComp
		}
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *app) namespaceGrantCommand() *cobra.Command {
	return changes(&cobra.Command{
		Use:   "grant NAME WHO read|write|admin",
		Short: "Give an identity or a group a right in a namespace",
		Long: `Give an identity or a group a right in a namespace, in the place of the one it had.
write includes read, and admin is to grant and revoke as well. If that is less,
sessions that need more are ended at once. Operators may, and those with admin.

` + whoHelp,
		Args:              cobra.ExactArgs(3),
		ValidArgsFunction: a.completeRight(),
		RunE: func(cmd *cobra.Command, args []string) error {
			right, err := rightOf(args[2])
			if err != nil {
				return err
			}
			if err := identity.CheckWho(args[1]); err != nil {
				return usageError(err)
			}
			return a.withBackend(func(b backend) error {
				var rep *dirpb.GrantAccessReply
				// Asked again it changes nothing.
				err := b.Directory(cmd.Context(), true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
					rep, err = d.GrantAccess(ctx, &dirpb.GrantAccessRequest{
						Namespace: args[0], Access: &dirpb.Access{Who: args[1], Right: right}})
					return err
				})
				if err != nil {
					return err
				}
				return a.printAccess(rep.GetNamespace(), rep.GetFencing())
			})
		},
	})
}

func (a *app) namespaceRevokeCommand() *cobra.Command {
	return changes(&cobra.Command{
		Use:   "revoke NAME WHO",
		Short: "Take the right of an identity or a group in a namespace",
		Long: `Take the right that an identity or a group was granted in a namespace. Its sessions are
ended at once, unless it has the right by another entry.

` + whoHelp,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeRight(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := identity.CheckWho(args[1]); err != nil {
				return usageError(err)
			}
			return a.withBackend(func(b backend) error {
				rep, err := call(cmd.Context(), b, false, func(ctx context.Context, d dirpb.DirectoryClient) (
					*dirpb.RevokeAccessReply, error) {
					return d.RevokeAccess(ctx, &dirpb.RevokeAccessRequest{Namespace: args[0], Who: args[1]})
				})
				if err != nil {
					return err
				}
				return a.printAccess(rep.GetNamespace(), rep.GetFencing())
			})
		},
	})
}

// printAccess prints an access list after it was changed.
func (a *app) printAccess(ns *dirpb.Namespace, fencing uint32) error {
	if fencing > 0 {
		a.say("kvctl: %d sessions had more, and are ended", fencing)
	}
	if a.json() {
		return a.printProto(ns)
	}
	a.printWho(ns)
	return nil
}

func (a *app) printWho(ns *dirpb.Namespace) {
	var rows []row
	if ns.GetOwner() == "" {
		rows = append(rows, row{"everybody", "write: it has no owner"})
	} else {
		rows = append(rows, row{ns.GetOwner(), "owner"})
	}
	a.printTable(row{"Who", "Right"}, append(rows, mapTo(ns.GetAccess(), func(x *dirpb.Access) row {
		return row{x.GetWho(), short(x.GetRight())}
	})...))
}

func showNamespace(ctx context.Context, b backend, name string) (rep *dirpb.ShowNamespaceReply, err error) {
	err = b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.ShowNamespace(ctx, &dirpb.ShowNamespaceRequest{Name: name})
		return err
	})
	return rep, err
}

func (a *app) namespaceShowCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "show NAME",
		Short: "Show who may use a namespace, and what it has taken of its quotas",
		Long: `Show who may use a namespace, its quotas, and what it has taken of them. Operators may,
and those who have admin in it.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNamespace(),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withBackend(func(b backend) error {
				rep, err := showNamespace(cmd.Context(), b, args[0])
				if err != nil {
					return err
				}
				if a.json() {
					return a.printProto(rep)
				}
				a.printTenant(rep)
				return nil
			})
		},
	}
}

func (a *app) printTenant(rep *dirpb.ShowNamespaceReply) {
	ns, q := rep.GetNamespace(), rep.GetNamespace().GetQuota()
	bound := func(n uint64, text string) string {
		if n == 0 {
			return "-"
		}
		return text
	}
	a.printWho(ns)
	fmt.Fprintln(a.stdout)
	rows := []row{
		{"bytes", bytesText(rep.GetGrantedBytes()), bound(ns.GetLimitBytes(), bytesText(ns.GetLimitBytes()))},
		{"index", bytesText(rep.GetIndexBytes()), bound(q.GetIndexBytes(), bytesText(q.GetIndexBytes()))},
		{"sessions", fmt.Sprint(rep.GetSessions()), bound(uint64(q.GetSessions()), fmt.Sprint(q.GetSessions()))},
		{"max-value", "", bytesText(maxValueOf(ns))},
		{"lanes", "", bound(uint64(q.GetLanes()), fmt.Sprintf("%d for each session to each memory node",
			q.GetLanes()))},
		{"tcp-ops", "", bound(q.GetTcpOpsPerSecond(), fmt.Sprintf("%d/s at each memory node", q.GetTcpOpsPerSecond()))},
	}
	if n := ns.GetMaxPinnedPercent(); n != 0 {
		rows = append(rows, row{"max-pinned", "", fmt.Sprintf("%d%%", n)})
	}
	a.printTable(row{"Quota", "Taken", "Of"}, rows)
}

func (a *app) whoAmICommand() *cobra.Command {
	return &cobra.Command{
		Use:   "whoami",
		Short: "Show whose certificate this is, and what it may do",
		Long: `Show the identity, role and groups of the certificate in --tls-cert, as the directory
knows them, and the namespaces that it may use.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withBackend(func(b backend) error {
				var rep *dirpb.WhoAmIReply
				err := b.Directory(cmd.Context(), true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
					rep, err = d.WhoAmI(ctx, &dirpb.WhoAmIRequest{})
					return err
				})
				if err != nil {
					return err
				}
				return a.printWhoAmI(rep)
			})
		},
	}
}

func (a *app) printWhoAmI(rep *dirpb.WhoAmIReply) error {
	if a.json() {
		return a.printProto(rep)
	}
	if rep.GetIdentity() == "" {
		_, err := fmt.Fprintln(a.stdout, "nobody is known: there is no TLS, so everybody is operator")
		return err
	}
	groups := "-"
	if len(rep.GetGroups()) > 0 {
		groups = strings.Join(rep.GetGroups(), ", ")
	}
	for _, line := range [][2]string{{"identity", rep.GetIdentity()}, {"role", rep.GetRole()}, {"groups", groups}} {
		if _, err := fmt.Fprintf(a.stdout, "%-9s %s\n", line[0], visible(line[1])); err != nil {
			return err
		}
	}
	if len(rep.GetNamespaces()) == 0 {
		_, err := fmt.Fprintln(a.stdout, "no namespace lets it in; an owner or operator may: kvctl namespace grant "+
			"NAME "+visible(rep.GetIdentity())+" write")
		return err
	}
	fmt.Fprintln(a.stdout)
	a.printTable(row{"Namespace", "Right"}, mapTo(rep.GetNamespaces(), func(x *dirpb.NamespaceRight) row {
		return row{x.GetNamespace(), short(x.GetRight())}
	}))
	return nil
}
