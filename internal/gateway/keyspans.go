package gateway

import (
	"github.com/kvd-project/kvd/internal/redis/acl"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// access is what the command does to its first key.
func (cmd *command) access(args [][]byte) spec.Access {
	switch cmd.Finder {
	case spec.FindSet: // with GET it tells the value before, which is to read it
		for _, o := range args[min(3, len(args)):] {
			if values.Fold(o, "get") {
				return cmd.Access | spec.Reads
			}
		}
	case spec.FindBitfield:
		return bitFieldAccess(args)
	}
	return cmd.Access
}

// bitFieldAccess is what BITFIELD does to its key: it reads and writes, unless all of it is GET. Arguments that are
// wrong write, as in Redis.
func bitFieldAccess(args [][]byte) spec.Access {
	p := values.OptionsOf(args[min(2, len(args)):])
	for p.More() {
		switch {
		case p.Option("get", 2):
			p.Str()
			p.Str()
		case p.Option("overflow", 1):
			p.Str()
		default:
			return spec.Reads | spec.Changes
		}
	}
	return spec.Reads
}

// storeSpans finds the keys of STORE and STOREDIST, behind the options that begin at an argument.
// The command writes the last one, and a user needs the right to all of them, as in Redis. Of three or more, arguments
// between them may count as keys, too.
func storeSpans(args [][]byte, at int) (keys, also acl.Span) {
	for i := at; i+1 < len(args); i++ {
		if !values.Fold(args[i], "store") && !values.Fold(args[i], "storedist") {
			continue
		}
		i++
		switch {
		case also.First == 0:
			also = acl.Span{First: i, Last: i, Step: 1}
		case also.First == also.Last:
			also.Last, also.Step = i, i-also.First
		default:
			also.Step = gcd(also.Step, i-also.Last)
			also.Last = i
		}
	}
	return acl.Span{First: 1, Last: 1, Step: 1}, also
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// sortSpans are the key and, with STORE, the one that is written.
// Keys of patterns are none of these: they are read when they are known.
func sortSpans(args [][]byte) (keys, also acl.Span) {
	for i := 2; i < len(args); i++ {
		switch {
		case values.Fold(args[i], "limit"):
			i += 2
		case values.Fold(args[i], "by"), values.Fold(args[i], "get"):
			i++
		case values.Fold(args[i], "store") && i+1 < len(args):
			i++
			also = acl.Span{First: i, Last: i, Step: 1} // the last one counts
		}
	}
	return acl.Span{First: 1, Last: 1, Step: 1}, also
}

// groupReadSpans finds the keys of XREADGROUP, whose group and consumer may have any name. Redis takes the first such
// word from the fourth argument on; where that is not the one that the command takes, a user needs the right to both.
func groupReadSpans(args [][]byte) (keys, also acl.Span) {
	keys = behindStreams(args, 4)
	for i := 1; i < len(args); i++ {
		switch o := args[i]; {
		case values.Fold(o, "block"), values.Fold(o, "count"):
			i++
			continue
		case values.Fold(o, "group"):
			i += 2
			continue
		case values.Fold(o, "noack"):
			continue
		case i >= 4 && values.Fold(o, "streams"): // else GROUP is not there, and the command fails
			also = behindStreams(args, i)
		}
		break
	}
	switch {
	case also == keys:
		return keys, acl.Span{}
	case keys.First == 0:
		return also, acl.Span{}
	}
	return keys, also
}

// behindStreams are the keys behind the first STREAMS from an argument on, half of what is there.
// In XREAD it is the first such word: as a number it would be an error.
func behindStreams(args [][]byte, from int) (keys acl.Span) {
	for i := from; i < len(args); i++ {
		if n := (len(args) - i - 1) / 2; n > 0 && values.Fold(args[i], "streams") {
			return acl.Span{First: i + 1, Last: i + n, Step: 1}
		}
	}
	return keys
}
