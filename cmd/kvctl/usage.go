package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/spelling"
)

// knownCommand is the Args of commands that have others below them and take no arguments: a word that
// is none of these gets those that are near.
func knownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return ctl.Usagef("unknown command %q for %q%s", args[0], cmd.CommandPath(), didYouMean(cmd, args[0]))
}

// didYouMean asks for the commands below cmd that are near to typed, or is empty.
func didYouMean(cmd *cobra.Command, typed string) string {
	cmd.SuggestionsMinimumDistance = 2
	near := cmd.SuggestionsFor(typed)
	if typed == "" || len(near) == 0 {
		return ""
	}
	return fmt.Sprintf("; did you mean %s?", strings.Join(near, " or "))
}

// nearFlags adds to err, of cmd's flags, those that the one that there is not is nearly.
func nearFlags(cmd *cobra.Command, err error) error {
	unknown := (*pflag.NotExistError)(nil)
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	near := ctl.MapTo(spelling.Near(unknown.GetSpecifiedName(), names), func(n string) string { return "--" + n })
	return fmt.Errorf("%w%s", err, spelling.DidYouMean(near))
}

// usageOf has what args refuses end with how cmd is used.
func usageOf(args cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, words []string) error {
		switch err := args(cmd, words); {
		case err == nil:
			return nil
		case len(words) == 0:
			return ctl.Usagef("usage: %s", cmd.UseLine())
		default:
			return ctl.Usagef("wrong number of arguments, %d; usage: %s", len(words), cmd.UseLine())
		}
	}
}

// examples are command lines by the command's path without kvctl; TestExamples holds every command to one.
var examples = map[string]string{
	"":                      "kvctl put greeting hello\nkvctl --directory 10.0.0.11:7400 --tls-ca ca.pem status",
	"audit":                 "kvctl audit --last 5",
	"bench":                 "kvctl bench -w B --duration 5s",
	"bigkeys":               "kvctl bigkeys --top 20",
	"cas":                   "kvctl cas greeting 4711 goodbye",
	"certs":                 "kvctl certs init --dir ca --trust-domain example.org",
	"certs init":            "kvctl certs init --dir ca --trust-domain example.org",
	"certs issue":           "kvctl certs issue m1 --role memnode --ip 10.0.0.21 --dir ca",
	"certs revoke":          "kvctl certs revoke m1 --dir ca",
	"certs show":            "kvctl certs show ca/m1.pem",
	"check":                 "kvctl check --no-repair",
	"completion":            "source <(kvctl completion bash)",
	"completion bash":       "source <(kvctl completion bash)",
	"completion fish":       "kvctl completion fish | source",
	"completion powershell": "kvctl completion powershell | Out-String | Invoke-Expression",
	"completion zsh":        "source <(kvctl completion zsh)",
	"context":               "kvctl context list",
	"context delete":        "kvctl context delete prod",
	"context list":          "kvctl context list",
	"context set":           "kvctl --directory 10.0.0.11:7400 --tls-ca ca.pem context set prod",
	"context use":           "kvctl context use prod",
	"count":                 "kvctl count\nkvctl count --prefix session:",
	"cost":                  "kvctl cost --trials 4",
	"del":                   "kvctl del greeting\nkvctl del --prefix session: --dry-run",
	"directory":             "kvctl directory list",
	"directory join-info":   "kvctl directory join-info",
	"directory list":        "kvctl directory list",
	"directory recover": "kvctl directory recover --id d3 --data-dir /var/lib/kvd\nkvctl directory recover --id " +
		"d3 --data-dir /var/lib/kvd --yes",
	"directory remove":      "kvctl directory remove d3",
	"doctor":                "kvctl doctor --provider verbs",
	"drain":                 "kvctl drain m1 --dry-run\nkvctl drain m1 --wait",
	"du":                    "kvctl du --depth 2\nkvctl du --prefix notes/",
	"dump":                  "kvctl dump greeting",
	"exit":                  "exit",
	"export":                "kvctl export backup --prefix notes/",
	"flush":                 "kvctl flush --dry-run\nkvctl --namespace cache flush --yes",
	"brokers":               "kvctl brokers\nkvctl -o json brokers --interval 5s",
	"brokers programs":      "kvctl brokers programs node7/4711",
	"gateways":              "kvctl gateways\nkvctl -o json gateways --interval 5s",
	"gateways clients":      "kvctl gateways clients 10.0.0.31:7404",
	"gateways kill":         "kvctl gateways kill 10.0.0.31:7404 17",
	"gateways slowlog":      "kvctl gateways slowlog 10.0.0.31:7404 -n 20",
	"get":                   "kvctl get greeting\nkvctl -o json get greeting",
	"help":                  "kvctl help namespace create",
	"hotkeys":               "kvctl --namespace cache hotkeys",
	"import":                "kvctl import notes --prefix notes/",
	"incr":                  "kvctl incr hits 2\nkvctl incr hits -- -1",
	"jobs":                  "kvctl jobs",
	"keys":                  "kvctl keys show",
	"keys rotate":           "kvctl keys rotate",
	"keys show":             "kvctl keys show",
	"latency":               "kvctl latency greeting --duration 10s",
	"mget":                  "kvctl mget greeting hits",
	"exists":                "kvctl exists greeting hits",
	"pin":                   "kvctl pin greeting --for 10m",
	"unpin":                 "kvctl unpin greeting",
	"mirror":                "kvctl mirror :default :copy --dry-run\nkvctl mirror prod:shop standby:shop --delete",
	"namespace":             "kvctl namespace list",
	"namespace accept-loss": "kvctl namespace accept-loss drafts",
	"namespace create":      "kvctl namespace create cache --mode cache --bytes 1GiB --if-not-exists",
	"namespace delete":      "kvctl namespace delete drafts --dry-run",
	"namespace grant":       "kvctl namespace grant shop spiffe://example.org/kvd/client/till write",
	"namespace list":        "kvctl namespace list",
	"namespace revoke":      "kvctl namespace revoke shop spiffe://example.org/kvd/client/till",
	"namespace set":         "kvctl namespace set shop --replicas 2 --wait",
	"namespace show":        "kvctl namespace show shop",
	"nodes":                 "kvctl nodes",
	"nodes add":             "kvctl nodes add m4 --for 1m --wait",
	"nodes give-up":         "kvctl nodes give-up m1 --dry-run",
	"nodes remove":          "kvctl nodes remove m1 --dry-run",
	"nodes restart":         "kvctl nodes restart m1 --leave",
	"perf":                  "kvctl perf --provider tcp --sizes 64,64KiB",
	"pipe":                  "printf 'a\\t1\\nb\\t2\\n' | kvctl pipe",
	"put":                   "kvctl put session:1 token --ttl 30s",
	"rebalance":             "kvctl rebalance shop --dry-run\nkvctl rebalance shop --wait",
	"scan":                  "kvctl scan --prefix session: --long",
	"shards":                "kvctl --namespace shop shards",
	"shards split":          "kvctl shards split --all",
	"shell":                 "kvctl shell",
	"snapshot":              "kvctl snapshot list --from file:///var/backups/kvd",
	"snapshot copy":         "kvctl snapshot copy shop --from file:///var/backups/kvd --to file:///mnt/elsewhere",
	"snapshot create":       "kvctl snapshot create shop --to file:///var/backups/kvd --rate 200MiB/s",
	"snapshot list":         "kvctl snapshot list shop --from file:///var/backups/kvd",
	"snapshot prune":        "kvctl snapshot prune shop --from file:///var/backups/kvd --keep-last 7 --dry-run",
	"snapshot restore":      "kvctl --namespace new snapshot restore shop --from file:///var/backups/kvd --bytes 1GiB",
	"snapshot show":         "kvctl snapshot show shop --from file:///var/backups/kvd",
	"snapshot verify":       "kvctl snapshot verify shop --from file:///var/backups/kvd --against shop",
	"stat":                  "kvctl stat --interval 5s --count 12",
	"stats":                 "kvctl stats",
	"status":                "kvctl status\nkvctl status --check >/dev/null || echo not healthy",
	"support":               "kvctl support bundle kvd.tar.gz",
	"support bundle":        "kvctl support bundle kvd.tar.gz --http http://127.0.0.1:7480 --profiles --log kvd.log",
	"top":                   "kvctl top\nkvctl top --interval 10s --count 6 >nodes.txt",
	"ttl":                   "kvctl ttl session:1 90s",
	"txn":                   "kvctl txn require hits present put greeting hello del session:1",
	"use":                   "use shop",
	"version":               "kvctl version",
	"watch":                 "kvctl watch greeting\nkvctl watch --prefix session: --interval 5s",
	"whoami":                "kvctl whoami",
}

// explainUse gives c, and every command below it, its example and what it says of wrong arguments.
func explainUse(c *cobra.Command) {
	path := strings.TrimPrefix(strings.TrimPrefix(c.CommandPath(), "kvctl"), " ")
	if x := examples[path]; x != "" {
		c.Example = "  " + strings.ReplaceAll(x, "\n", "\n  ")
	}
	switch {
	case c.HasSubCommands():
		c.Args = knownCommand
	case c.Args != nil:
		c.Args = usageOf(c.Args)
	}
	for _, sub := range c.Commands() {
		explainUse(sub)
	}
}
