package overview

import (
	"testing"

	"github.com/kvd-project/kvd/internal/dirpb"
)

// A session may say anything of its broker. If that is no address there is no page.
func TestBrokers(t *testing.T) {
	for name, page := range map[string]string{
		BrokerName("h", 1, "http://10.0.0.5:7484"):         "http://10.0.0.5:7484",
		BrokerName("h", 1, "https://[fe80::1]:7484"):       "https://[fe80::1]:7484",
		BrokerName("", 1, ""):                              "",
		BrokerName("h", 1, "http://h:1/debug/pprof"):       "",
		BrokerName("h", 1, "http://user:word@10.0.0.5:1"):  "",
		BrokerName("h", 1, "http://10.0.0.5:1?x"):          "",
		BrokerName("h", 1, "http://10.0.0.5"):              "",
		BrokerName("h", 1, "file:///etc/passwd"):           "",
		BrokerName("h", 1, "javascript:alert(1)"):          "",
		BrokerName("h", 1, "http://%zz:1"):                 "",
		"kvd broker h pid 1 at http://10.0.0.5:7484 or so": "none",
		"kvd broker h pid -1 at -":                         "none",
		"kvd gateway h pid 1 at -":                         "none",
	} {
		all := Brokers(&dirpb.StatusReply{Sessions: []*dirpb.SessionInfo{{Client: name,
			Life: dirpb.SessionLife_SESSION_LIVE, Namespace: "a"}}})
		got := "none"
		if len(all) == 1 {
			got = ""
			if all[0].Page != nil {
				got = all[0].Page.String()
			}
		}
		if got != page {
			t.Errorf("%q: page %q, want %q", name, got, page)
		}
	}
}
