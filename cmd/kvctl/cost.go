package main

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/internal/cost"
)

func (a *app) costCommand() *cobra.Command {
	var o cost.Options
	c := changes(&cobra.Command{
		Use:   "cost",
		Short: "Measure round trips and verbs of every operation, and compare them with the table",
		Long: "Run every operation on keys of its own, count its round trips (RTT) and verbs, and\n" +
			"compare them with the cost table of docs/protocol.md for one replica. Shown is the\n" +
			"most frequent count of the trials. Exit status 1 if one differs.",
		Args:    cobra.NoArgs,
		GroupID: "tools",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withBackend(func(b backend) error {
				o.Prefix = "\x00kvctl-cost/" + rand.Text() + "/"
				o.Open = func(ctx context.Context) (cost.Session, error) { return b.Open(ctx, sessionOptions{Lanes: 1}) }
				if err := o.Validate(); err != nil {
					return usageError(err)
				}
				rows, err := cost.Measure(cmd.Context(), o)
				if err != nil {
					return err
				}
				if err := a.printCost(rows); err != nil {
					return err
				}
				if !cost.AllOK(rows) {
					return fail(exitNo)
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

func (a *app) printCost(rows []cost.Row) error {
	if a.json() {
		return a.printJSON(map[string]any{"replicas": 1, "ok": cost.AllOK(rows), "operations": rows})
	}
	a.printTable(row{"Operation", "RTT/verbs", "Expected", "Doorbells", "Read B", "Written B", "Trials", ""}, mapTo(rows, func(r cost.Row) row {
		verdict := "ok"
		if !r.OK {
			verdict = "DIFFERS"
		}
		return row{r.Operation, fmt.Sprintf("%d / %d", r.RTT, r.Verbs), fmt.Sprintf("%d / %d", r.WantRTT, r.WantVerbs),
			r.Doorbells, r.ReadBytes, r.WriteBytes, fmt.Sprintf("%d of %d", r.Agree, r.Trials), verdict}
	}))
	return nil
}
