package dirpb

import "strings"

// Addresses says where endpoints listen, for people.
func Addresses(all []*Endpoint) string {
	texts := make([]string, len(all))
	for i, e := range all {
		texts[i] = e.GetProvider() + " " + e.GetAddr()
	}
	return strings.Join(texts, ", ")
}
