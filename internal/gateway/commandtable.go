package gateway

import (
	_ "embed"
	"encoding/json"
	"slices"
	"strings"
	"sync"

	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// tableText is what a redis-server of redisVersion says of the commands that are served, in COMMAND INFO and DOCS; a
// line for each. TestTableLikeRedis makes it, from the server's own answers.
//
//go:embed table.jsonl
var tableText string

// tableRow is a line of tableText. Replies are strings, numbers and arrays, and objects of one member for other types:
// simple, set and map.
type tableRow struct {
	Name      string `json:"name"`
	Flags     any    `json:"flags"`
	Tips      any    `json:"tips"`
	Keys      any    `json:"keys"` // key specifications
	Since     any    `json:"since,omitempty"`
	Arguments any    `json:"arguments,omitempty"`
	DocFlags  any    `json:"doc_flags,omitempty"`
}

// table has the lines of tableText by name. It is read when somebody asks, since few do; a line that cannot be read is
// left out, and TestTableLikeRedis tells of it.
var table = sync.OnceValue(func() map[string]*tableRow {
	rows := make(map[string]*tableRow)
	for line := range strings.Lines(tableText) {
		row := new(tableRow)
		if json.Unmarshal([]byte(line), row) == nil {
			rows[row.Name] = row
		}
	}
	return rows
})

func writeTree(w *resp.Writer, v any) {
	switch v := v.(type) {
	case string:
		w.BulkString(v)
	case float64:
		w.Int(int64(v))
	case []any:
		w.Array(len(v))
		writeAll(w, v)
	case map[string]any:
		for kind, inner := range v { // one
			switch list, _ := inner.([]any); kind {
			case "simple":
				w.Simple(inner.(string))
			case "set":
				w.Set(len(list))
				writeAll(w, list)
			case "map":
				w.Map(len(list) / 2)
				writeAll(w, list)
			}
		}
	}
}

func writeAll(w *resp.Writer, list []any) {
	for _, v := range list {
		writeTree(w, v)
	}
}

func members(v any) []any {
	set, _ := v.(map[string]any)
	list, _ := set["set"].([]any)
	return list
}

// keyFlags are the flags of a command's first key, or of those behind it: the last specification is of these.
func (cmd *command) keyFlags(first bool) []any {
	row := table()[cmd.name]
	if row == nil {
		return nil
	}
	list := members(row.Keys)
	if len(list) == 0 {
		return nil
	}
	at := 0
	if !first {
		at = len(list) - 1
	}
	spec, _ := list[at].(map[string]any)
	fields, _ := spec["map"].([]any)
	for i := 0; i+1 < len(fields); i += 2 {
		if fields[i] == "flags" {
			return members(fields[i+1])
		}
	}
	return nil
}

// optionFlags are the flags of the key of a command whose options say what it does with it; nil: its specification's.
func optionFlags(cmd *command, args [][]byte) []string {
	switch cmd.name {
	case "set":
		for _, a := range args[3:] {
			if values.Fold(a, "get") {
				return []string{"RW", "access", "update"}
			}
		}
		return []string{"OW", "update"}
	case "bitfield":
		if bitFieldNeeds(args)&acl.NeedWrite != 0 {
			return []string{"RW", "access", "update"}
		}
		return []string{"RO", "access"}
	}
	return nil
}

// cmdCommandGetKeys tells which arguments of a command are keys, and cmdCommandGetKeysAndFlags what the command does
// with each as well.
func cmdCommandGetKeys(_ *conn, w *resp.Writer, args [][]byte) error {
	return writeKeys(w, args, false)
}
func cmdCommandGetKeysAndFlags(_ *conn, w *resp.Writer, args [][]byte) error {
	return writeKeys(w, args, true)
}

func writeKeys(w *resp.Writer, args [][]byte, withFlags bool) error {
	cmd, args, err := ofCommand(args)
	if err != nil {
		return err
	}
	spans := both(cmd.keySpans(args))
	w.Array(keysIn(spans))
	special := optionFlags(cmd, args)
	first := true
	for _, s := range spans {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			if !withFlags {
				w.Bulk(args[i])
				continue
			}
			w.Array(2)
			w.Bulk(args[i])
			if special != nil {
				w.Set(len(special))
				for _, f := range special {
					w.Simple(f)
				}
				continue
			}
			flags := cmd.keyFlags(first)
			first = false
			w.Set(len(flags))
			writeAll(w, flags)
		}
	}
	return nil
}

// ofCommand finds the command that GETKEYS is about, and its words.
// It goes by the same numbers that describe tells, so that a client which trusts COMMAND finds the same keys.
func ofCommand(args [][]byte) (cmd *command, words [][]byte, err error) {
	words = args[2:]
	cmd = find(words[0])
	if cmd != nil && cmd.sub != nil && len(words) > 1 {
		cmd = cmd.subcommand(words[1])
	}
	switch {
	case cmd == nil:
		return nil, nil, refusal("ERR Invalid command specified")
	case cmd.first == 0 && cmd.counted == 0 && cmd.spans == nil:
		return nil, nil, refusal("ERR The command has no key arguments")
	case cmd.arity > 0 && len(words) != cmd.arity || len(words) < -cmd.arity:
		return nil, nil, refusal("ERR Invalid number of arguments specified for command")
	case keysIn(both(cmd.keySpans(words))) == 0 && !cmd.mayHaveNoKeys():
		return nil, nil, refusal("ERR Invalid arguments specified for command")
	}
	return cmd, words, nil
}

// mayHaveNoKeys reports whether Redis has a command go without keys, as EVAL does.
func (cmd *command) mayHaveNoKeys() bool {
	row := table()[cmd.name]
	if row == nil {
		return false
	}
	return slices.ContainsFunc(members(row.Flags), func(f any) bool {
		flag, _ := f.(map[string]any)
		return flag["simple"] == "no_mandatory_keys"
	})
}

func keysIn(spans [2]acl.Span) (n int) {
	for _, s := range spans {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			n++
		}
	}
	return n
}
