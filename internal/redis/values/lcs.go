package values

import (
	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = severalKeys(map[string]SeveralFunc{
	"lcs": cmdLCS,
})

// cmdLCS is the longest common subsequence of two values, by the usual table. It stands in memory as a whole, since the
// way back through it gives the matches. The table has 4 bytes for each pair of bytes, so it is bounded, and taken from
// the connection's share, before it is made.
func cmdLCS(t Keys, args [][]byte, w *resp.Writer) error {
	t.Load(args[1], args[2])
	a, b := t.Key(args[1]), t.Key(args[2])
	if a.Present && a.Type != client.Plain || b.Present && b.Type != client.Plain {
		return refusal("ERR The specified keys must contain string values")
	}
	var o lcsOptions
	p := OptionsOf(args[3:])
	for p.More() {
		switch {
		case p.Flag("idx"):
			o.idx = true
		case p.Flag("len"):
			o.length = true
		case p.Flag("withmatchlen"):
			o.withLen = true
		case p.Option("minmatchlen", 1):
			o.least = max(p.Int(), 0)
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	if o.idx && o.length {
		return refusal("ERR If you want both the length and indexes, please just use IDX.")
	}
	size := 4 * int64(len(a.Value)+1) * int64(len(b.Value)+1)
	if size > int64(a.MaxValue) {
		return refusal("ERR Insufficient memory, transient memory for LCS exceeds proto-max-bulk-len")
	}
	if size > freeTable && !t.Take(size) {
		return nil
	}
	lcs(w, a.Value, b.Value, o)
	return nil
}

// freeTable is how many bytes of a table need no memory to be taken first.
const freeTable = 64 << 10

// lcsOptions are IDX, LEN, WITHMATCHLEN and MINMATCHLEN.
type lcsOptions struct {
	idx, length, withLen bool
	least                int64 // bytes of a match that is told
}

// lcs fills the table and goes the way back that Redis goes: of several longest subsequences it must be the same one.
func lcs(w *resp.Writer, a, b []byte, o lcsOptions) {
	row := len(b) + 1
	// Entry i*row + j is the length for the first i bytes of a and the first j of b.
	table := make([]uint32, (len(a)+1)*row)
	for i := range a {
		for j := range b {
			at := (i+1)*row + j + 1
			if a[i] == b[j] {
				table[at] = table[at-row-1] + 1
			} else {
				table[at] = max(table[at-row], table[at-1])
			}
		}
	}
	n := int(table[len(table)-1])
	if o.length {
		w.Int(int64(n))
		return
	}
	result := make([]byte, n)
	var matches resp.Writer
	found := 0
	at := n
	none := len(a)
	aLo, aHi, bLo, bHi := none, 0, 0, 0 // of the match at hand
	for i, j := len(a), len(b); i > 0 && j > 0; {
		// emit says that the match at hand ends here, and is written; the last match comes first.
		emit := false
		if a[i-1] == b[j-1] {
			at--
			result[at] = a[i-1]
			switch {
			case aLo == none:
				aLo, aHi, bLo, bHi = i-1, i-1, j-1, j-1
			case aLo == i && bLo == j:
				aLo--
				bLo--
			default:
				emit = true
			}
			emit = emit || aLo == 0 || bLo == 0
			i--
			j--
		} else {
			// Where both ways are as good Redis goes back in b, and so does this.
			if table[(i-1)*row+j] > table[i*row+j-1] {
				i--
			} else {
				j--
			}
			emit = aLo != none
		}
		if !emit {
			continue
		}
		if size := int64(aHi - aLo + 1); o.idx && (o.least == 0 || size >= o.least) {
			found++
			matches.Array(2 + int(Bit(o.withLen)))
			matches.Array(2)
			matches.Int(int64(aLo))
			matches.Int(int64(aHi))
			matches.Array(2)
			matches.Int(int64(bLo))
			matches.Int(int64(bHi))
			if o.withLen {
				matches.Int(size)
			}
		}
		aLo = none
	}
	if !o.idx {
		w.Bulk(result)
		return
	}
	w.Map(2)
	w.BulkString("matches")
	w.Array(found)
	w.Raw(matches.Bytes())
	w.BulkString("len")
	w.Int(int64(n))
}
