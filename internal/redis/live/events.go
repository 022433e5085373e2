package live

import (
	"strconv"
	"strings"

	"github.com/kvd-project/kvd/internal/redis/exec"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// EachEvent calls tell for the events of one command's change of one key. They are its own, and those of a new key, of
// an expiry that came with a value, and of a deletion. The order is Redis's: what made the key first, what happened to
// it, and its deletion last.
func EachEvent(ev exec.Event, ch exec.Change, tell func(exec.Event)) {
	if ch.Created {
		tell(exec.Event{Class: values.OnNew, Name: "new"})
	}
	// These two deletions are their own events: the key has not gone, it is elsewhere.
	goes := ch.Deleted && ev.Name != "rename_from" && ev.Name != "move_from"
	switch {
	case goes && (ev.Class == values.OnGeneric || strings.HasSuffix(ev.Name, "store")):
		ev = exec.Event{Class: values.OnGeneric, Name: "del"}
	case ev.Name == "getex":
		if ev.Name = "expire"; ch.Expires == 0 {
			ev.Name = "persist"
		}
	}
	tell(ev)
	if ch.Also != "" {
		tell(exec.Event{Class: values.OnStream, Name: ch.Also})
	}
	switch {
	case goes && ev.Name != "del":
		tell(exec.Event{Class: values.OnGeneric, Name: "del"})
	case ch.Expires != 0 && ev.Name == "set":
		tell(exec.Event{Class: values.OnGeneric, Name: "expire"})
	}
}

// KeyMessages calls publish for the messages of a key's event, if it is asked for: those classes that notify has, which
// are Redis's notify-keyspace-events. The channels are Redis's: __keyspace@<db>__:<key> and __keyevent@<db>__:<event>.
// Both slices are publish's to keep, but for the key.
func KeyMessages(notify values.EventClass, db int, ev exec.Event, key []byte, publish func(channel, payload []byte)) {
	if notify&ev.Class == 0 {
		return
	}
	at := "@" + strconv.Itoa(db) + "__:"
	if notify&values.OnKeyspace != 0 {
		publish(append([]byte("__keyspace"+at), key...), []byte(ev.Name))
	}
	if notify&values.OnKeyevent != 0 {
		publish([]byte("__keyevent"+at+ev.Name), key)
	}
}
