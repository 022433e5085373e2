package live

import (
	"slices"
	"strings"
	"sync/atomic"

	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/values"
)

// Tracking is how a client caches (CLIENT TRACKING). It does not change, but for what [Tracked] finds out.
// The client's goroutine makes it, and makes another one for each change; others read it. A nil one caches nothing.
type Tracking struct {
	// The client hears of what it reads. With OPTIN it says so before each command, with OPTOUT it says when it does
	// not want that. With BCAST it hears of all keys with its prefixes.
	Redirect             int64 // the number of the client that hears of it, 0: this one
	BCast, OptIn, OptOut bool
	NoLoop               bool // it does not hear of its own writes
	Prefixes             []string
	broken               atomic.Bool // the client of Redirect is gone
}

// Caching is what CLIENT CACHING has said of the next command.
type Caching uint8

// CachingAsUsual holds if nothing was said.
const (
	CachingAsUsual Caching = iota
	CachingYes
	CachingNo
)

// Letters are those in the flags of CLIENT LIST.
func (t *Tracking) Letters() string {
	s := "t"
	if t.broken.Load() {
		s += "R"
	}
	if t.BCast {
		s += "B"
	}
	return s
}

// Notes reports whether the client caches what a command reads, if c was said of the command.
// With BCAST nothing is noted at reads: such clients hear of every key with their prefixes.
func (t *Tracking) Notes(c Caching) bool {
	return t != nil && !t.BCast && (!t.OptIn || c == CachingYes) && (!t.OptOut || c != CachingNo)
}

// follows reports whether a client with BCAST hears of a key.
func (t *Tracking) follows(name string) bool {
	return t != nil && slices.ContainsFunc(t.Prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// ParseTracking is what CLIENT TRACKING asks for, given its ON or OFF and the options. t is nil for OFF, and completed
// by [Tracking.Follow] for ON. exists reports whether there is a client of that number.
// All options are read before the first of them counts, as in Redis.
func ParseTracking(list [][]byte, exists func(id int64) bool) (t *Tracking, err error) {
	t = &Tracking{}
	p := values.OptionsOf(list[1:])
	for p.More() {
		switch {
		case p.Option("redirect", 1):
			if t.Redirect != 0 {
				p.Refuse("ERR A client can only redirect to a single other client")
			}
			if t.Redirect = p.Int(); !exists(t.Redirect) {
				p.Refuse("ERR The client ID you want redirect to does not exist")
			}
		case p.Flag("bcast"):
			t.BCast = true
		case p.Flag("optin"):
			t.OptIn = true
		case p.Flag("optout"):
			t.OptOut = true
		case p.Flag("noloop"):
			t.NoLoop = true
		case p.Option("prefix", 1):
			t.Prefixes = append(t.Prefixes, string(p.Str()))
		default:
			p.Wrong()
		}
	}
	if err := p.End(); err != nil {
		return nil, err
	}
	switch p := values.OptionsOf(list[:1]); {
	case p.Flag("on"):
		return t, nil
	case p.Flag("off"):
		return nil, nil
	}
	return nil, values.ErrSyntax
}

// maxPrefixes bounds those of a client, which has none in common with itself.
const maxPrefixes = 1024

// Follow completes t's prefixes with those of was, which is nil for a client that begins to cache. An error says why t
// cannot follow it, and t is of no use then. The texts are Redis's. Prefixes that overlap are refused, so that no
// client hears of a key twice.
func (t *Tracking) Follow(was *Tracking) error {
	const again = " mode before disabling tracking for this client, and then re-enabling it with a different mode."
	switch {
	case len(t.Prefixes) > 0 && !t.BCast:
		return refusal("ERR PREFIX option requires BCAST mode to be enabled")
	case was != nil && was.BCast != t.BCast:
		return refusal("ERR You can't switch BCAST mode on/off before disabling tracking for this client, and then " +
			"re-enabling it with a different mode.")
	case t.BCast && (t.OptIn || t.OptOut):
		return refusal("ERR OPTIN and OPTOUT are not compatible with BCAST")
	case t.OptIn && t.OptOut:
		return refusal("ERR You can't specify both OPTIN mode and OPTOUT mode")
	case was != nil && (t.OptIn && was.OptOut || t.OptOut && was.OptIn):
		return refusal("ERR You can't switch OPTIN/OPTOUT" + again)
	case !t.BCast:
		return nil
	}
	var have []string
	if was != nil {
		have = was.Prefixes
	}
	for i, p := range t.Prefixes {
		for _, q := range have {
			if strings.HasPrefix(p, q) || strings.HasPrefix(q, p) {
				return refusal("ERR Prefix '" + values.Clip([]byte(p), 128) + "' overlaps with an existing prefix '" +
					values.Clip([]byte(q), 128) + "'. Prefixes for a single client must not overlap.")
			}
		}
		for _, q := range t.Prefixes[i+1:] {
			if strings.HasPrefix(p, q) || strings.HasPrefix(q, p) {
				return refusal("ERR Prefix '" + values.Clip([]byte(p), 128) +
					"' overlaps with another provided prefix '" + values.Clip([]byte(q), 128) +
					"'. Prefixes for a single client must not overlap.")
			}
		}
	}
	if len(t.Prefixes) == 0 && len(have) == 0 {
		t.Prefixes = []string{""}
	}
	t.Prefixes = slices.Concat(have, t.Prefixes)
	if len(t.Prefixes) > maxPrefixes {
		return refusal("ERR kvd: more than 1024 prefixes")
	}
	return nil
}

// ParseCaching is what CLIENT CACHING says, given its YES or NO.
func (t *Tracking) ParseCaching(list [][]byte) (Caching, error) {
	switch p := values.OptionsOf(list); {
	case t == nil:
		return 0, refusal("ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or " +
			"OPTOUT mode enabled")
	case p.Flag("yes"):
		if !t.OptIn {
			return 0, refusal("ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.")
		}
		return CachingYes, nil
	case p.Flag("no"):
		if !t.OptOut {
			return 0, refusal("ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.")
		}
		return CachingNo, nil
	}
	return 0, values.ErrSyntax
}

// WriteInfo writes the reply to CLIENT TRACKINGINFO.
func (t *Tracking) WriteInfo(w *resp.Writer, c Caching) {
	flags, redirect, prefixes := []string{"off"}, int64(-1), []string(nil)
	if t != nil {
		flags, redirect, prefixes = []string{"on"}, t.Redirect, t.Prefixes
		for _, f := range []struct {
			is   bool
			name string
		}{{t.BCast, "bcast"}, {t.OptIn, "optin"}, {c == CachingYes, "caching-yes"}, {t.OptOut, "optout"},
			{c == CachingNo, "caching-no"}, {t.NoLoop, "noloop"}, {t.broken.Load(), "broken_redirect"}} {
			if f.is {
				flags = append(flags, f.name)
			}
		}
	}
	w.Map(3)
	w.BulkString("flags")
	w.Set(len(flags))
	for _, f := range flags {
		w.BulkString(f)
	}
	w.BulkString("redirect")
	w.Int(redirect)
	w.BulkString("prefixes")
	w.Array(len(prefixes))
	for _, p := range prefixes {
		w.BulkString(p)
	}
}
