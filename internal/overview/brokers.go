package overview

import (
	"cmp"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// Broker is a broker, by what its sessions say of it.
type Broker struct {
	// Host and PID are its machine's name and its process there.
	Host, PID  string
	Page       *url.URL // of its http-listen; nil: it has none
	Identity   string   // that opened its sessions; empty: nobody's
	Namespaces []string // in which it has sessions, ascending
}

// Name is short, and shared by brokers of several containers of a machine.
func (b *Broker) Name() string { return b.Host + "/" + b.PID }

// BrokerName is the name of a broker's sessions. Page is http or https with an address, or empty.
func BrokerName(host string, pid int, page string) string {
	return fmt.Sprintf("kvd broker %s pid %d at %s", cmp.Or(host, "?"), pid, cmp.Or(page, "-"))
}

var brokerName = regexp.MustCompile(`^kvd broker (\S+) pid ([0-9]+) at (\S+)$`)

// Brokers are those with a session that lives, by name. A broker tells of itself; its identity is known.
func Brokers(st *dirpb.StatusReply) (all []*Broker) {
	type whose struct{ name, identity string }
	known := map[whose]*Broker{}
	for _, s := range st.GetSessions() {
		m := brokerName.FindStringSubmatch(s.GetClient())
		if m == nil || s.GetLife() != dirpb.SessionLife_SESSION_LIVE {
			continue
		}
		b := known[whose{m[0], s.GetIdentity()}]
		if b == nil {
			b = &Broker{Host: m[1], PID: m[2], Page: pageOf(m[3]), Identity: s.GetIdentity()}
			known[whose{m[0], s.GetIdentity()}] = b
			all = append(all, b)
		}
		if !slices.Contains(b.Namespaces, s.GetNamespace()) {
			b.Namespaces = append(b.Namespaces, s.GetNamespace())
			slices.Sort(b.Namespaces)
		}
	}
	slices.SortStableFunc(all, func(a, b *Broker) int {
		return cmp.Or(strings.Compare(a.Host, b.Host), cmp.Compare(len(a.PID), len(b.PID)),
			strings.Compare(a.PID, b.PID), strings.Compare(a.Identity, b.Identity))
	})
	return all
}

// pageOf is nil for what is no address and no more.
func pageOf(text string) *url.URL {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Port() == "" || *u != (url.URL{Scheme: u.Scheme,
		Host: u.Host}) {
		return nil
	}
	return u
}
