package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvd-project/kvd/server"
)

// recoverCommand makes one directory node's data folder a cluster of its own.
func (a *app) recoverCommand() *cobra.Command {
	var id, dir string
	var yes bool
	c := &cobra.Command{
		Use:   "recover --id ID --data-dir DIR --yes",
		Short: "Go on with one directory node's data folder when the majority is gone for good",
		Long: `Make the data folder of one directory node, which does not run, a cluster of its own. It is for when a
majority of the directory nodes, or of their data folders, is gone for good. While it can be started, start it.

Entries that the others had committed and this folder does not have are lost: namespaces, settings and
placement that are newer than it. Without --yes the command says what a folder has, and changes nothing.
kvctl status may name an entry and a term that memory nodes were told of. Then take a folder that was led in
that term up to that entry or a later one. Otherwise, and of several such, take the greatest term, then entry. All sessions end, and clients open others. Memory
nodes say what they hold. Keys of a placement group that they and the folder do not agree on are lost, and
kvctl status names them. Nothing is written to a placement group before what is linked there has been counted.

Start the directory node afterwards as ever, then the others with empty folders and --join.`,
		Example: `  kvd directory recover --id d3 --data-dir /var/lib/kvd
  kvd directory recover --id d3 --data-dir /var/lib/kvd --yes`,
		Args:                  usageArgs(cobra.NoArgs),
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if id == "" || dir == "" {
				return usageError{errors.New("want --id and --data-dir (see kvd directory recover --help)")}
			}
			return explain(a.recover(cmd.Context(), id, dir, yes))
		},
	}
	c.Flags().StringVar(&id, "id", "", "the directory node's")
	c.Flags().StringVar(&dir, "data-dir", "", "its data folder")
	c.Flags().BoolVar(&yes, "yes", false, "do it")
	return c
}

var errNotConfirmed = errors.New("nothing was done: want --yes, once the others are stopped for good and no other " +
	"folder is later")

func (a *app) recover(ctx context.Context, id, dir string, yes bool) error {
	_, err := server.Recover(ctx, server.RecoverOptions{DataDir: dir, ID: id, Version: versionText(),
		Logger: slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		Confirm: func(f server.Folder) error {
			fmt.Fprintf(a.stdout, "data folder   %s, directory node %s of cluster %s\nlast entry    %d of term %d; "+
				"%d is "+
				"applied; recovered %d times before\nled           %s\nnamespaces    %s\nmemory nodes  %s\nwithout   "+
				"    %s\n",
				dir, id, f.ClusterID, f.Last, f.Term, f.Applied, f.Recoveries, ledText(f.Led), listText(f.Namespaces),
				listText(f.Nodes), listText(f.Others))
			fmt.Fprintln(a.stdout,
				"what is lost  all that the directory decided after that entry; every session; keys "+
					"of placement groups that changed since")
			if !yes {
				return usageError{errNotConfirmed}
			}
			return nil
		}})
	if err != nil {
		return err
	}
	fmt.Fprintf(a.stdout, "recovered: start it with kvd directory --id %s --data-dir %s and its addresses, then "+
		"others with empty folders and --join\n", id, dir)
	return nil
}

func ledText(list []server.Led) string {
	var words []string
	for _, l := range list {
		words = append(words, fmt.Sprintf("term %d up to entry %d", l.Term, l.Last))
	}
	return listText(words)
}

func listText(list []string) string {
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}
