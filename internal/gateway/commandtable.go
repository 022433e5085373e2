package gateway

import (
	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
)

// keyFlags are the flags of a command's first key, or of those behind it: the last specification is of these. Where
// options say what becomes of a key, they follow from that.
func (cmd *command) keyFlags(args [][]byte, first bool) []string {
	if cmd.Finder == spec.FindSet || cmd.Finder == spec.FindBitfield {
		switch cmd.access(args) {
		case spec.Reads:
			return []string{"RO", "access"}
		case spec.Changes:
			return []string{"OW", "update"}
		}
		return []string{"RW", "access", "update"}
	}
	switch all := cmd.Doc.Keys; {
	case len(all) == 0:
		return nil
	case first:
		return all[0].Flags
	default:
		return all[len(all)-1].Flags
	}
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
	first := true
	for _, s := range spans {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			if !withFlags {
				w.Bulk(args[i])
				continue
			}
			w.Array(2)
			w.Bulk(args[i])
			writeFlags(w, cmd.keyFlags(args, first))
			first = false
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
	case cmd.First == 0 && cmd.Counted == 0 && cmd.Finder == 0:
		return nil, nil, refusal("ERR The command has no key arguments")
	case cmd.mistaken(len(words)):
		return nil, nil, refusal("ERR Invalid number of arguments specified for command")
	case keysIn(both(cmd.keySpans(words))) == 0 && !cmd.Has(spec.FlagNoMandatoryKeys):
		return nil, nil, refusal("ERR Invalid arguments specified for command")
	}
	return cmd, words, nil
}

func keysIn(spans [2]acl.Span) (n int) {
	for _, s := range spans {
		for i := s.First; s.First > 0 && i <= s.Last; i += s.Step {
			n++
		}
	}
	return n
}
