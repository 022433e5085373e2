package config

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write docs/settings.md anew")

// TestSettingsAreDocumented: docs/settings.md has every setting with its default, and nothing else.
func TestSettingsAreDocumented(t *testing.T) {
	var b strings.Builder
	b.WriteString("# Settings\n\nThis page lists every setting of kvd with its default and what it means. It is for " +
		"those who write files of settings.\n" +
		"[Installing](install.md#settings) says how flags, variables and files give settings. The list is generated: " +
		"`go test ./internal/config -run Documented -rewrite`.\n\n" +
		"[kvd dev](#kvd-dev) · [kvd directory](#kvd-directory) · [kvd memnode](#kvd-memnode) · " +
		"[kvd janitor](#kvd-janitor) · [kvd gateway](#kvd-gateway) · [kvd broker](#kvd-broker) · " +
		"[kvd archive](#kvd-archive)\n\n" +
		"The flag of a setting has hyphens for dots. Its variable is `KVD_` and the setting in capitals, with " +
		"underscores.\n")
	for _, role := range []struct {
		name string
		s    Settings
	}{{"dev", DefaultDev()}, {"directory", DefaultDirectoryNode()}, {"memnode", DefaultMemNode()},
		{"janitor", DefaultJanitor()}, {"gateway", DefaultGateway()}, {"broker", DefaultBrokerNode()},
		{"archive", DefaultArchive()}} {
		fmt.Fprintf(&b, "\n## kvd %s\n\n| setting | default | |\n|---|---|---|\n", role.name)
		for _, f := range fields(role.s) {
			value := "`" + format(f.value) + "`"
			if value == "``" {
				value = ""
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s |\n", f.key, value, strings.ReplaceAll(f.usage, "|", "\\|"))
		}
	}
	const doc = "../../docs/settings.md"
	if *rewrite {
		if err := os.WriteFile(doc, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	is, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	if string(is) != b.String() {
		t.Errorf("docs/settings.md is not what settings are: go test ./internal/config -run Documented -rewrite")
	}
}
