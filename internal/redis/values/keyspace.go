package values

import (
	"bytes"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/resp"
)

var _ = severalKeys(map[string]SeveralFunc{
	"copy":     cmdCopy,
	"move":     cmdMove,
	"msetnx":   cmdMSetNX,
	"rename":   cmdRename,
	"renamenx": cmdRenameNX,
})

// cmdMSetNX sets all of its keys or none.
// All of the keys are conditions of the write, so that no two MSETNX of gateways can both succeed on a common key.
func cmdMSetNX(t Keys, args [][]byte, w *resp.Writer) error {
	if len(args)%2 == 0 {
		return refusal("ERR wrong number of arguments for 'msetnx' command")
	}
	for i := 1; i < len(args); i += 2 {
		if t.Key(args[i]).Present {
			w.Int(0)
			return nil
		}
	}
	for i := 1; i < len(args); i += 2 {
		t.Key(args[i]).SetAs(client.Plain, args[i+1], 0)
	}
	w.Int(1)
	return nil
}

func cmdRename(t Keys, args [][]byte, w *resp.Writer) error {
	return rename(t, args[1], args[2], false, w)
}

func cmdRenameNX(t Keys, args [][]byte, w *resp.Writer) error {
	return rename(t, args[1], args[2], true, w)
}

// rename makes one key what another one is, which goes. With nx it must not be there.
// The expiry goes with the value. A key that is renamed to itself stays, and is no event.
func rename(t Keys, from, to []byte, nx bool, w *resp.Writer) error {
	t.Load(from, to)
	src := t.Key(from)
	switch {
	case !src.Present:
		return errNoKey
	case bytes.Equal(from, to):
	case nx && t.Key(to).Present:
		w.Int(0)
		return nil
	default:
		dst := t.Key(to)
		dst.become(src)
		src.Delete()
		t.Name(dst, OnNew, "new")
		t.Name(src, OnGeneric, "rename_from")
		t.Name(dst, OnGeneric, "rename_to")
	}
	switch {
	case !nx:
		w.OK()
	default:
		w.Int(Bit(!bytes.Equal(from, to)))
	}
	return nil
}

// become makes the key what another one is. Both have the one value from now on, in a buffer that neither writes to.
// Giving up other.own is what keeps the common value from being written to by a later command of the same step.
func (k *Key) become(other *Key) {
	k.Present, k.Value, k.Expires, k.Flags, k.Type = true, other.Value, other.Expires, other.Flags, other.Type
	k.Changed = true
	other.Own = nil
}

// cmdCopy copies between databases, too. Those of several namespaces do not change together: such a copy is of the
// value that the source had at some time while it was made.
func cmdCopy(t Keys, args [][]byte, w *resp.Writer) error {
	db, replace := t.Current(), false
	p := OptionsOf(args[3:])
	for p.More() {
		switch {
		case p.Flag("replace"):
			replace = true
		case p.Option("db", 1):
			var err error
			db, err = t.DBIndex(p.Str())
			p.Fail(err)
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return err
	}
	if db == t.Current() && bytes.Equal(args[1], args[2]) {
		return errSameObject
	}
	src := t.Peek(args[1])
	if t.Together(db) {
		src = t.Key(args[1])
	}
	if !src.Present {
		w.Int(0)
		return nil
	}
	dst := t.KeyIn(db, args[2])
	if dst.Present && !replace {
		w.Int(0)
		return nil
	}
	dst.become(src)
	t.Name(dst, OnNew, "new")
	t.Name(dst, OnGeneric, "copy_to")
	w.Int(1)
	return nil
}

// cmdMove moves a key to another database, with its expiry. If that is in another namespace it takes two steps
// (staged.move); a transaction or a script is one, so that there it is refused, unless there is nothing to move.
func cmdMove(t Keys, args [][]byte, w *resp.Writer) error {
	db, err := t.DBIndex(args[2])
	switch {
	case err != nil:
		return err
	case db == t.Current():
		return errSameObject
	}
	src := t.Key(args[1])
	if !src.Present {
		w.Int(0)
		return nil
	}
	dst := t.KeyIn(db, args[1])
	if dst.Present {
		w.Int(0)
		return nil
	}
	dst.become(src)
	src.Delete()
	t.Name(dst, OnNew, "new")
	t.Name(src, OnGeneric, "move_from")
	t.Name(dst, OnGeneric, "move_to")
	w.Int(1)
	return nil
}
