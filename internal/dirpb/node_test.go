package dirpb

import "testing"

func TestAdvertised(t *testing.T) {
	for _, c := range [][3]string{
		{"127.0.0.1:70", "", "127.0.0.1:70"},
		{"@kvd", "", "@kvd"},
		{"@kvd", "/run/kvd", "/run/kvd"},
		{"0.0.0.0:70", "m1.example", "m1.example:70"},
		{"0.0.0.0:70", "m1.example:0", "m1.example:70"},
		{"0.0.0.0:70", "m1.example:71", "m1.example:71"},
		{"[::]:70", "fe80::1", "[fe80::1]:70"},
		{"[::]:70", "[fe80::1]", "[fe80::1]:70"},
		{"[::]:70", "", ""},
		{":70", "", ""},
	} {
		got, err := Advertised(c[0], c[1])
		if got != c[2] || (err != nil) != (c[2] == "") {
			t.Errorf("Advertised(%q, %q) = %q, %v; want %q", c[0], c[1], got, err, c[2])
		}
	}
}
