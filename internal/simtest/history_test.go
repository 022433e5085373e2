package simtest

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/anishathalye/porcupine"
	"github.com/zeebo/xxh3"
)

// Outcome is an operation's answer.
type Outcome uint8

const (
	OK Outcome = 1 + iota
	NotFound
	Exists
	Conflict
	NotDone // an error that says: did not happen
	Unknown
)

func (o Outcome) String() string {
	return [...]string{"under way", "ok", "not found", "exists", "conflict", "not done", "unknown"}[o]
}

// reads reports whether v changes nothing.
func (v Verb) reads() bool { return v == Get || v == GetIf || v == Watch || v == Has }

// writes reports whether v leaves a value.
func (v Verb) writes() bool {
	return v == Put || v == PutEx || v == Add || v == Incr || v == CAS ||
		v == Stream || v == Give
}

// Event is one operation of a history.
type Event struct {
	Client  int
	Verb    Verb
	Key     int
	Value   string // written
	Old     string // CAS, DelIf, GetIf: the value whose version is expected; Evict, expired: the one removed
	Got     string // Get, GetIf; Has: of the version found, "" if that is nobody's who has his answer
	Out     Outcome
	Expired bool   // Evict: the record had expired
	Parts   []part // Txn
	Version uint64 // Give
	// versions gives the version of a value, Give: 0 if nobody has learned it.
	versions     func(key int, value string) uint64
	Call, Return int64
}

func (e *Event) String() string {
	if e.Verb == Txn {
		return fmt.Sprintf("c%d txn %v: %v", e.Client, e.Parts, e.Out)
	}
	s := fmt.Sprintf("c%d %v key%d", e.Client, e.Verb, e.Key)
	if e.Verb.writes() {
		s += " " + e.Value
	}
	switch {
	case e.Verb == Evict || e.Verb == expired:
		s += " of " + e.Old
	case e.Old != "":
		s += " if " + e.Old
	}
	if e.Out != 0 {
		s += fmt.Sprintf(": %v %s", e.Out, e.Got)
	}
	return s
}

func (e *Event) sum() string { return e.String() }

// scanned is a scan that reached its end.
type scanned struct {
	client    int
	call, end int64
	found     map[int]bool
}

// record adds an operation to the history.
func (w *World) record(e *Event) {
	w.hist = append(w.hist, *e)
	w.histSum = (w.histSum ^ xxh3.HashString(e.sum())) * 0x9e3779b97f4a7c15
	w.traceLine("      => %v", e)
}

// model is one key: the value, "" when absent.
var model = porcupine.Model{
	Init: func() any { return "" },
	Step: func(state, in, _ any) (bool, any) {
		v, e := state.(string), in.(*Event)
		unknown := e.Out == Unknown
		switch e.Verb {
		case Get, GetIf, Watch:
			if unknown {
				return true, v
			}
			if e.Out == NotFound {
				return v == "", v
			}
			return v != "" && v == e.Got, v
		case Has:
			if e.Out == NotFound {
				return v == "", v
			}
			return v != "" && (e.Got == "" || v == e.Got), v
		case Put, PutEx, Stream:
			return true, e.Value
		case Touch:
			return unknown || e.Out == NotFound == (v == ""), v
		case Evict:
			// It knows which record it removes.
			if v == e.Old {
				return true, ""
			}
			return unknown || e.Expired && v == "", v
		case expired:
			if v == e.Old {
				return true, ""
			}
			return true, v
		case Add:
			if v != "" {
				return unknown || e.Out == Exists, v
			}
			return unknown || e.Out == OK, e.Value
		case Give:
			there := uint64(0)
			if v != "" {
				there = e.versions(e.Key, v)
			}
			switch {
			case v == "" || there != 0 && there < e.Version:
				return unknown || e.Out == OK, e.Value
			case there != 0:
				return unknown || e.Out == Conflict, v
			case e.Out == Conflict:
				return true, v
			}
			return true, e.Value
		case Del:
			if v == "" {
				return unknown || e.Out == NotFound, v
			}
			return unknown || e.Out == OK, ""
		case Incr:
			if unknown {
				return true, v + "+"
			}
			return e.Value == v+"+", v + "+"
		case CAS, DelIf:
			want := ""
			if e.Verb == CAS {
				want = e.Value
			}
			switch {
			case v == "":
				return unknown || e.Out == NotFound, v
			case v != e.Old:
				return unknown || e.Out == Conflict, v
			}
			return unknown || e.Out == OK, want
		}
		return false, v
	},
	Equal: func(a, b any) bool { return a.(string) == b.(string) },
}

// CheckHistory reports an error if no order of the operations explains their
// answers (I13). Operations of unknown outcome may take effect at any time after
// their call, or never.
func CheckHistory(h []Event) error {
	if slices.ContainsFunc(h, func(e Event) bool { return e.Verb == Txn }) {
		return checkJoint(h)
	}
	byKey := map[int][]porcupine.Operation{}
	for i := range h {
		e := &h[i]
		if e.Out == NotDone || e.Verb.reads() && e.Out == Unknown {
			continue
		}
		op := porcupine.Operation{ClientId: len(byKey[e.Key]), Input: e, Call: e.Call, Return: e.Return}
		if e.Out == Unknown {
			op.Return = math.MaxInt64
		}
		byKey[e.Key] = append(byKey[e.Key], op)
	}
	for k, ops := range byKey {
		if !porcupine.CheckOperations(model, ops) {
			var b strings.Builder
			for i := range h {
				if h[i].Key == k {
					fmt.Fprintf(&b, "\n  [%d,%d] %v", h[i].Call, h[i].Return, &h[i])
				}
			}
			return fmt.Errorf("I13: no order explains the history of key%d:%s", k, b.String())
		}
	}
	return nil
}
