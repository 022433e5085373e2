package httpd

import (
	"net"
	"strconv"
)

// maxLinks bounds the processes that a page leads to.
const maxLinks = 256

// Link is where the page of another process is, by what that process told of itself.
type Link struct {
	Role, Name string
	Addr       string // host:port
	TLS        bool
}

// linkData is a Link as the page shows it.
type linkData struct {
	Role string `json:"role"`
	Name string `json:"name"`
	Href string `json:"href"`
}

// href is the address of the page, or empty if Addr is not host:port. It has no character that means anything in HTML
// or in a URL but its own: hosts are letters, digits, dots, hyphens and underscores, or IP addresses without a zone.
func (l Link) href() string {
	if !IsAddr(l.Addr) {
		return ""
	}
	scheme := "http://"
	if l.TLS {
		scheme = "https://"
	}
	return scheme + l.Addr + "/"
}

// IsAddr tells whether addr is host:port, of a host that can be called, and has no character that is not needed for
// that.
func IsAddr(addr string) bool {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || len(addr) > 256 {
		return false
	}
	if p, err := strconv.ParseUint(port, 10, 16); err != nil || p == 0 || strconv.FormatUint(p, 10) != port {
		return false
	}
	if ip := net.ParseIP(host); ip != nil {
		return !ip.IsUnspecified() && net.JoinHostPort(ip.String(), port) == addr
	}
	for _, c := range []byte(host) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return host != "" && host[0] != '-'
}

// linksOf are those that the page shows: of processes that have an address.
func linksOf(all []Link) []linkData {
	out := []linkData{}
	for _, l := range all {
		if at := l.href(); at != "" && len(out) < maxLinks {
			out = append(out, linkData{clean(l.Role), clean(l.Name), at})
		}
	}
	return out
}

// Linked has the page lead to those of the processes that links tells of, which is asked at most once a second.
func (s *Server) Linked(links func() []Link) {
	if s != nil {
		s.links.Store(&links)
	}
}
