package tenants

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity"
	"github.com/kvd-project/kvd/internal/units"
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
		return ctl.Usagef("--owner: want an identity, or group:NAME")
	}
	if q.owner == "" {
		return nil
	}
	if err := identity.CheckWho(q.owner); err != nil {
		return ctl.Usagef("--owner %w", err)
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
		"quota-index":    func() (err error) { out.IndexBytes, err = ctl.ParseBytes(q.index); return err },
	} {
		if !q.changed(flag) {
			continue
		}
		given = true
		if err := take(); err != nil {
			return nil, ctl.Usagef("--%s: %w", flag, err)
		}
	}
	if !given {
		return nil, nil
	}
	return out, nil
}

// of is the quota for a namespace that there is, after what was not given.
func (q *quotaFlags) of(ctx context.Context, b ctl.Backend, name string) (*dirpb.Quota, error) {
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
	return 0, ctl.Usagef("%q: want read, write or admin", s)
}

func (a *commands) completeRight() cobra.CompletionFunc {
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

func (a *commands) namespaceGrantCommand() *cobra.Command {
	return ctl.Changes(&cobra.Command{
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
				return ctl.UsageError(err)
			}
			return a.WithBackend(func(b ctl.Backend) error {
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

func (a *commands) namespaceRevokeCommand() *cobra.Command {
	return ctl.Changes(&cobra.Command{
		Use:   "revoke NAME WHO",
		Short: "Take the right of an identity or a group in a namespace",
		Long: `Take the right that an identity or a group was granted in a namespace. Its sessions are
ended at once, unless it has the right by another entry.

` + whoHelp,
		Args:              cobra.ExactArgs(2),
		ValidArgsFunction: a.completeRight(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := identity.CheckWho(args[1]); err != nil {
				return ctl.UsageError(err)
			}
			return a.WithBackend(func(b ctl.Backend) error {
				rep, err := ctl.Call(cmd.Context(), b, false, func(ctx context.Context, d dirpb.DirectoryClient) (
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
func (a *commands) printAccess(ns *dirpb.Namespace, fencing uint32) error {
	if fencing > 0 {
		a.Say("kvctl: %d sessions had more, and are ended", fencing)
	}
	if a.JSON() {
		return a.PrintProto(ns)
	}
	a.printWho(ns)
	return nil
}

func (a *commands) printWho(ns *dirpb.Namespace) {
	var rows []ctl.Row
	if ns.GetOwner() == "" {
		rows = append(rows, ctl.Row{"everybody", "write: it has no owner"})
	} else {
		rows = append(rows, ctl.Row{ns.GetOwner(), "owner"})
	}
	a.PrintTable(ctl.Row{"Who", "Right"}, append(rows, ctl.MapTo(ns.GetAccess(), func(x *dirpb.Access) ctl.Row {
		return ctl.Row{x.GetWho(), ctl.Short(x.GetRight())}
	})...))
}

func showNamespace(ctx context.Context, b ctl.Backend, name string) (rep *dirpb.ShowNamespaceReply, err error) {
	err = b.Directory(ctx, true, func(ctx context.Context, d dirpb.DirectoryClient) (err error) {
		rep, err = d.ShowNamespace(ctx, &dirpb.ShowNamespaceRequest{Name: name})
		return err
	})
	return rep, err
}

func (a *commands) namespaceShowCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "show NAME",
		Short: "Show who may use a namespace, and what it has taken of its quotas",
		Long: `Show who may use a namespace, its quotas, and what it has taken of them. Operators may,
and those who have admin in it.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: a.completeNamespace(),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.WithBackend(func(b ctl.Backend) error {
				rep, err := showNamespace(cmd.Context(), b, args[0])
				if err != nil {
					return err
				}
				if a.JSON() {
					return a.PrintProto(rep)
				}
				a.printTenant(rep)
				return nil
			})
		},
	}
}

func (a *commands) printTenant(rep *dirpb.ShowNamespaceReply) {
	ns, q := rep.GetNamespace(), rep.GetNamespace().GetQuota()
	bound := func(n uint64, text string) string {
		if n == 0 {
			return "-"
		}
		return text
	}
	a.printWho(ns)
	fmt.Fprintln(a.Stdout)
	rows := []ctl.Row{
		{"bytes", units.Rounded(rep.GetGrantedBytes()), bound(ns.GetLimitBytes(), units.Rounded(ns.GetLimitBytes()))},
		{"index", units.Rounded(rep.GetIndexBytes()), bound(q.GetIndexBytes(), units.Rounded(q.GetIndexBytes()))},
		{"sessions", fmt.Sprint(rep.GetSessions()), bound(uint64(q.GetSessions()), fmt.Sprint(q.GetSessions()))},
		{"max-value", "", units.Rounded(maxValueOf(ns))},
		{"lanes", "", bound(uint64(q.GetLanes()), fmt.Sprintf("%d for each session to each memory node",
			q.GetLanes()))},
		{"tcp-ops", "", bound(q.GetTcpOpsPerSecond(), fmt.Sprintf("%d/s at each memory node", q.GetTcpOpsPerSecond()))},
	}
	if n := ns.GetMaxPinnedPercent(); n != 0 {
		rows = append(rows, ctl.Row{"max-pinned", "", fmt.Sprintf("%d%%", n)})
	}
	a.PrintTable(ctl.Row{"Quota", "Taken", "Of"}, rows)
}

func (a *commands) whoAmICommand() *cobra.Command {
	return &cobra.Command{
		Use:   "whoami",
		Short: "Show whose certificate this is, and what it may do",
		Long: `Show the identity, role and groups of the certificate in --tls-cert, as the directory
knows them, and the namespaces that it may use.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithBackend(func(b ctl.Backend) error {
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

func (a *commands) printWhoAmI(rep *dirpb.WhoAmIReply) error {
	if a.JSON() {
		return a.PrintProto(rep)
	}
	if rep.GetIdentity() == "" {
		_, err := fmt.Fprintln(a.Stdout, "nobody is known: there is no TLS, so everybody is operator")
		return err
	}
	groups := "-"
	if len(rep.GetGroups()) > 0 {
		groups = strings.Join(rep.GetGroups(), ", ")
	}
	for _, line := range [][2]string{{"identity", rep.GetIdentity()}, {"role", rep.GetRole()}, {"groups", groups}} {
		if _, err := fmt.Fprintf(a.Stdout, "%-9s %s\n", line[0], ctl.Visible(line[1])); err != nil {
			return err
		}
	}
	if len(rep.GetNamespaces()) == 0 {
		_, err := fmt.Fprintln(a.Stdout, "no namespace lets it in; an owner or operator may: kvctl namespace grant "+
			"NAME "+ctl.Visible(rep.GetIdentity())+" write")
		return err
	}
	fmt.Fprintln(a.Stdout)
	a.PrintTable(ctl.Row{"Namespace", "Right"}, ctl.MapTo(rep.GetNamespaces(), func(x *dirpb.NamespaceRight) ctl.Row {
		return ctl.Row{x.GetNamespace(), ctl.Short(x.GetRight())}
	}))
	return nil
}
