package spelling

import (
	"slices"
	"testing"
)

func TestNear(t *testing.T) {
	names := []string{"directory", "data-dir", "id", "get", "del", "put", "records", "no-load", "tls-ca", "tls-cert",
		"tls-crl", "memory"}
	for typed, want := range map[string][]string{
		"directroy":   {"directory"},
		"directories": {"directory"},
		"Directory":   {"directory"},
		"datadir":     {"data-dir"},
		"memmory":     {"memory"},
		"record":      {"records"},
		"recrods":     {"records"},
		"noload":      {"no-load"},
		"gte":         {"get"},
		"git":         {"get"},
		"it":          {"id"},
		"tls-cr":      {"tls-ca", "tls-crl"},
		"tls-c":       {"tls-ca"},
		"pet":         {"get", "put"},
		"frobnicate":  nil,
		"port":        nil,
		"x":           nil,
		"":            nil,
		"\xff\xfe":    nil,
	} {
		if got := Near(typed, names); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", typed, got, want)
		}
	}
	if got := Near("a", []string{"b", "c", "d", "e"}); len(got) != Most {
		t.Errorf("%q", got)
	}
	if got := DidYouMean([]string{"get", "put"}); got != "; did you mean get or put?" {
		t.Error(got)
	}
}
