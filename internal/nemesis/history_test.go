package nemesis

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sys/unix"
)

// Verbs of the load.
const (
	verbGet   = "get"
	verbPut   = "put"
	verbAdd   = "add" // PutIfAbsent
	verbCAS   = "cas"
	verbDel   = "del"
	verbDelIf = "delif" // DeleteVersion
	verbIncr  = "incr"
)

// Outcomes. An operation without one was under way when its client died.
const (
	outOK       = "ok"
	outNotFound = "notfound"
	outExists   = "exists"
	outConflict = "conflict"
	outNo       = "no"      // an error that says: did not happen
	outUnknown  = "unknown" // an error that says: may have happened
)

// event is one operation on one key. A value is named by its id, see makeValue;
// a counter's is its decimal number.
type event struct {
	ID         uint64 `json:"id"` // of this life of the client, from 1
	Client     int    `json:"c"`
	Life       int    `json:"l"` // of the client: 1 and up
	Worker     int    `json:"w"`
	Verb       string `json:"v"`
	Key        string `json:"k"`
	Value      string `json:"val,omitempty"` // written
	Old        string `json:"old,omitempty"` // cas, delif: the value whose version is expected
	OldVersion uint64 `json:"oldver,omitempty"`
	Call       int64  `json:"t"` // CLOCK_MONOTONIC, ns
	reply
}

// reply is how an operation ended.
type reply struct {
	Return  int64  `json:"r,omitempty"` // 0: it did not
	Out     string `json:"out,omitempty"`
	Got     string `json:"got,omitempty"` // get, incr
	Version uint64 `json:"ver,omitempty"` // of what was got or written
	Err     string `json:"err,omitempty"`
}

// ended is the line of an operation's end.
type ended struct {
	ID uint64 `json:"id"`
	reply
}

func (e *event) pending() bool { return e.Out == "" || e.Out == outUnknown }

// now reads CLOCK_MONOTONIC, which all processes of a machine share.
func now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err) // the clock exists on every Linux
	}
	return ts.Nano()
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// makeValue is a value of at least size bytes that says what it is, so that any
// reader notices a foreign or torn one:
//
//	key 0 id 0 filler crc
//
// crc is CRC-32C of all before it, little-endian; the filler depends on the id.
func makeValue(key, id string, size int) []byte {
	b := make([]byte, 0, max(size, len(key)+len(id)+6))
	b = append(append(append(append(b, key...), 0), id...), 0)
	for seed := id + "|"; len(b) < size-4; {
		b = append(b, seed[:min(len(seed), size-4-len(b))]...)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// parseValue returns the id of key's value b. The error tells what b is instead.
func parseValue(key string, b []byte) (id string, err error) {
	if len(b) < 6 {
		return "", fmt.Errorf("value of %q has %d bytes %x", key, len(b), b)
	}
	body, sum := b[:len(b)-4], binary.LittleEndian.Uint32(b[len(b)-4:])
	k, rest, _ := bytes.Cut(body, []byte{0})
	i, _, ok := bytes.Cut(rest, []byte{0})
	switch {
	case crc32.Checksum(body, castagnoli) != sum:
		return "", fmt.Errorf("value of %q is torn: %d bytes begin with %.80q and do not match their checksum", key,
			len(b), b)
	case !ok:
		return "", fmt.Errorf("value of %q names no writer: %.80q", key, b)
	case string(k) != key:
		return "", fmt.Errorf("value of %q is key %q's, written as %q", key, k, i)
	}
	return string(i), nil
}

// historyFile holds what one life of a client did to the keys of one round.
func historyFile(dir string, client, life int, round int64) string {
	return filepath.Join(dir, fmt.Sprintf("c%d.%d.%d", client, life, round))
}

// readHistory reads a file of lines, an event at the call and an ended at the
// return. A last line without its end was being written when the client died.
func readHistory(r io.Reader) ([]event, error) {
	var all []event
	at := map[uint64]int{}
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		i, seen := at[e.ID]
		switch {
		case e.ID == 0:
			return nil, fmt.Errorf("line %d has no id", n)
		case e.Verb != "" && !seen:
			at[e.ID] = len(all)
			all = append(all, e)
		case e.Verb == "" && seen && all[i].Out == "" && e.Out != "" && e.Return >= all[i].Call:
			all[i].reply = e.reply
		default:
			return nil, fmt.Errorf("line %d fits to no call: %s", n, bytes.TrimSpace(line))
		}
	}
}

func loadHistory(file string) ([]event, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h, err := readHistory(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return h, nil
}

// saveHistory writes a key's events as lines, in the order of their calls. It is
// for people: ids of several clients meet in it.
func saveHistory(file string, h []event) error {
	h = slices.Clone(h)
	slices.SortFunc(h, func(a, b event) int { return cmp.Compare(a.Call, b.Call) })
	var b bytes.Buffer
	for i := range h {
		line, err := json.Marshal(&h[i])
		if err != nil {
			return err
		}
		b.Write(append(line, '\n'))
	}
	return os.WriteFile(file, b.Bytes(), 0o644)
}

// model is one key: the id of its value, "" when absent.
var model = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, in, _ any) (bool, any) {
		v, e := state.(string), in.(*event)
		free := e.pending() // whatever it answered, nobody heard
		switch e.Verb {
		case verbGet:
			if e.Out == outNotFound {
				return v == "", v
			}
			return v != "" && v == e.Got, v
		case verbPut:
			return true, e.Value
		case verbAdd:
			if v != "" {
				return free || e.Out == outExists, v
			}
			return free || e.Out == outOK, e.Value
		case verbDel:
			if v == "" {
				return free || e.Out == outNotFound, v
			}
			return free || e.Out == outOK, ""
		case verbIncr:
			n, _ := strconv.ParseInt(cmp.Or(v, "0"), 10, 64) // counters hold nothing else
			by, _ := strconv.ParseInt(e.Value, 10, 64)
			sum := strconv.FormatInt(n+by, 10)
			return free || e.Got == sum, sum
		case verbCAS, verbDelIf:
			switch {
			case v == "":
				return free || e.Out == outNotFound, v
			case v != e.Old:
				return free || e.Out == outConflict, v
			}
			return free || e.Out == outOK, e.Value // none for delif
		}
		return false, v
	},
	Equal: func(a, b any) bool { return a.(string) == b.(string) },
	DescribeOperation: func(in, _ any) string {
		e := in.(*event)
		s := fmt.Sprintf("c%d.%d.%d %s %s", e.Client, e.Life, e.Worker, e.Verb, e.Value)
		if e.Old != "" {
			s += " if " + e.Old
		}
		return strings.TrimSpace(s) + ": " + cmp.Or(e.Out, "died") + " " + e.Got
	},
}

// operations are those events of one key that may have had an effect, or that
// saw one. Unknown outcomes may take effect at any time after their call.
func operations(h []event) []porcupine.Operation {
	var ops []porcupine.Operation
	for i := range h {
		e := &h[i]
		if e.Out == outNo || e.Verb == verbGet && e.pending() {
			continue
		}
		op := porcupine.Operation{ClientId: len(ops), Input: e, Call: e.Call, Return: e.Return}
		if e.pending() {
			op.Return = math.MaxInt64
		}
		ops = append(ops, op)
	}
	return ops
}

const noOrder = "no order of the operations explains their answers"

// linearizable tells whether some order of one key's operations explains their
// answers. Having found neither an order nor a contradiction after limit is an error too.
func linearizable(h []event, limit time.Duration) error {
	ops := operations(h)
	switch porcupine.CheckOperationsTimeout(model, ops, limit) {
	case porcupine.Ok:
		return nil
	case porcupine.Illegal:
		return errors.New(noOrder)
	}
	return fmt.Errorf("no verdict on %d operations within %v", len(ops), limit)
}

// versions tells whether the versions of one key's events name what was written:
// no two values share one, and no written value has two.
func versions(h []event) error {
	value := map[uint64]string{}
	version := map[string]uint64{}
	for i := range h {
		e := &h[i]
		v := e.Value
		if e.Verb == verbGet {
			v = e.Got
		}
		if e.Out != outOK || e.Verb == verbDel || e.Verb == verbDelIf || e.Verb == verbIncr {
			continue
		}
		if e.Version == 0 {
			return fmt.Errorf("%s of %q has version 0", e.Verb, v)
		}
		if other, ok := value[e.Version]; ok && other != v {
			return fmt.Errorf("version %d is both %q and %q", e.Version, other, v)
		}
		value[e.Version] = v
		if strings.Contains(v, ".") { // a value that is written once; a counter's come again
			if other, ok := version[v]; ok && other != e.Version {
				return fmt.Errorf("%q has versions %d and %d", v, other, e.Version)
			}
			version[v] = e.Version
		}
		if e.Verb == verbCAS && e.Version <= e.OldVersion {
			return fmt.Errorf("a compare-and-swap of version %d made version %d", e.OldVersion, e.Version)
		}
	}
	return nil
}
