package measure

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/cost"
	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/overview"
)

func (a *commands) costCommand() *cobra.Command {
	o := cost.Options{Replicas: 1} // until the namespace is known
	c := ctl.Changes(&cobra.Command{
		Use:   "cost",
		Short: "Measure round trips and verbs of every operation, and compare them with the table",
		Long: "Run every operation on keys of its own, and count its round trips (RTT) and verbs.\n" +
			"Compare them with the cost table of docs/protocol.md, for the namespace's number of\n" +
			"replicas (r). + are verbs that follow the answer. The table's other columns are shown\n" +
			"beside. Shown is the most frequent count of the trials. Exit status 1 if one differs.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.WithBackend(func(b ctl.Backend) error {
				o.Prefix = "\x00kvctl-cost/" + rand.Text() + "/"
				o.Open = func(ctx context.Context) (cost.Session, error) {
					return b.Open(ctx, ctl.SessionOptions{Lanes: 1})
				}
				o.OpenMirrored = func(ctx context.Context) (cost.Session, error) {
					return b.Open(ctx, ctl.SessionOptions{Lanes: 1, Mirrored: true})
				}
				o.Group = func(s cost.Session, key []byte) (uint32, error) {
					at, err := s.(ctl.Store).Locate(key)
					return at.PG, err
				}
				if err := o.Validate(); err != nil {
					return ctl.UsageError(err)
				}
				replicas, err := a.replicas(cmd.Context(), b)
				if err != nil {
					return err
				}
				o.Replicas = replicas
				rows, err := cost.Measure(cmd.Context(), o)
				if err != nil {
					return err
				}
				if err := a.printCost(rows, replicas); err != nil {
					return err
				}
				if !cost.AllOK(rows) {
					return ctl.Fail(ctl.ExitNo)
				}
				return nil
			})
		},
	})
	c.Flags().IntVar(&o.Trials, "trials", 16, "how often to run each operation")
	c.Flags().IntVar(&o.Batch, "batch", 32, "keys of a MULTI-GET")
	c.Flags().IntVar(&o.ValueBytes, "value-size", 64, "length of the values in bytes")
	return c
}

// replicas is how many copies the namespace has; the default one comes into being
// with the first session.
func (a *commands) replicas(ctx context.Context, b ctl.Backend) (int, error) {
	s, err := b.Open(ctx, ctl.SessionOptions{Lanes: 1, ReadOnly: true})
	if err != nil {
		return 0, err
	}
	defer a.Closed("session", s.Close)
	st, err := ctl.ClusterStatus(ctx, b)
	if err != nil {
		return 0, err
	}
	ns, err := a.OwnNamespace(st.GetMap())
	if err != nil {
		return 0, err
	}
	for _, p := range overview.Groups(st.GetMap(), ns.GetId()) {
		if lacks := overview.Lacks(st.GetMap(), p); lacks != "" {
			return 0, ctl.ExitWith(ctl.ExitUnavailable,
				fmt.Errorf("placement group %d: %s: what is counted now is not "+
					"what the table is about", p.GetId(), lacks))
		}
	}
	return int(ns.GetReplicas()), nil
}

func (a *commands) printCost(rows []cost.Row, replicas int) error {
	if a.JSON() {
		return a.PrintJSON(map[string]any{"replicas": replicas, "ok": cost.AllOK(rows), "operations": rows})
	}
	header := ctl.Row{"Operation", fmt.Sprintf("Measured, r = %d", replicas), "Expected"}
	for i := range rows[0].Table {
		header = append(header, fmt.Sprintf("r = %d", i+1))
	}
	header = append(header, "Doorbells", "Read B", "Written B", "Trials", "")
	show := func(c cost.Cost) string {
		if c.Behind > 0 {
			return fmt.Sprintf("%d / %d + %d", c.RTT, c.Verbs, c.Behind)
		}
		return fmt.Sprintf("%d / %d", c.RTT, c.Verbs)
	}
	a.PrintTable(header, ctl.MapTo(rows, func(r cost.Row) ctl.Row {
		verdict := "ok"
		if !r.OK {
			verdict = "DIFFERS"
		}
		out := ctl.Row{r.Operation, show(cost.Cost{RTT: r.RTT, Verbs: r.Verbs, Behind: r.Behind}),
			show(cost.Cost{RTT: r.WantRTT, Verbs: r.WantVerbs, Behind: r.WantBehind})}
		for _, c := range r.Table {
			out = append(out, show(c))
		}
		return append(out, r.Doorbells, r.ReadBytes, r.WriteBytes, fmt.Sprintf("%d of %d", r.Agree, r.Trials), verdict)
	}))
	return nil
}
