package dirpb

import (
	"strconv"
	"strings"
)

// EndpointName names a memory node's nth endpoint of a provider, from 1: "tcp", "tcp/2". Region keys have the name of
// their endpoint. Versions that know of one endpoint of a provider alone find the first one by the provider's name, and
// leave the others.
func EndpointName(provider string, nth int) string {
	if nth == 1 {
		return provider
	}
	return provider + "/" + strconv.Itoa(nth)
}

// Carrier is the provider by which an endpoint is reached.
func (e *Endpoint) Carrier() string {
	p, _, _ := strings.Cut(e.GetProvider(), "/")
	return p
}

// Addresses says where endpoints listen, for people.
func Addresses(all []*Endpoint) string {
	texts := make([]string, len(all))
	for i, e := range all {
		texts[i] = e.GetProvider() + " " + e.GetAddr()
	}
	return strings.Join(texts, ", ")
}
