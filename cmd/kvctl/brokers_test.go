package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/kvd-project/kvd/internal/ctl"
	"github.com/kvd-project/kvd/internal/ctl/operate"
	"github.com/kvd-project/kvd/internal/dirpb"
	"github.com/kvd-project/kvd/internal/identity/identitytest"
	"github.com/kvd-project/kvd/internal/overview"
)

// fakeBroker has the page of a broker that serves 500 operations each time that it is asked.
type fakeBroker struct {
	role    string
	metrics string // more of them
	state   string
	asked   int
}

func (b *fakeBroker) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/metrics":
		b.asked++
		fmt.Fprintf(w, "# HELP kvd_broker_programs Programs that are connected.\n"+
			"kvd_build_info{goversion=\"go1.26\",role=%q,version=\"v1.4.0\"} 1\n"+
			"kvd_broker_programs{socket=\"b.sock\"} 2\n"+
			"kvd_broker_arena_bytes{socket=\"b.sock\"} 1.34217728e+08\nkvd_broker_queues{socket=\"b.sock\"} 3\n"+
			"kvd_broker_operations_total{op=\"get\",socket=\"b.sock\"} %d\n"+
			"kvd_broker_operations_total{op=\"put\",socket=\"b.sock\"} 100\n"+
			"kvd_broker_protocol_errors_total{socket=\"b.sock\"} 1\n%s", b.role, 500*b.asked, b.metrics)
	case "/state.json":
		fmt.Fprint(w, b.state)
	}
}

const brokerState = `{"role":"broker","tables":[{"title":"Programs","header":["program","pid","shared memory"],` +
	`"rows":[["42","17","64 MiB"],["a\u001b[2J","18","1 MiB"]],"more":3}]}`

func brokerSessions(name, identity string, namespaces ...string) (all []*dirpb.SessionInfo) {
	for _, ns := range namespaces {
		all = append(all, &dirpb.SessionInfo{Client: name, Namespace: ns, Identity: identity,
			Life: dirpb.SessionLife_SESSION_LIVE})
	}
	return all
}

// kvctl finds brokers by their sessions, and asks those that it can reach.
func TestBrokers(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	b := &fakeBroker{role: "broker", state: brokerState}
	s := httptest.NewServer(b)
	defer s.Close()
	const id = "spiffe://test.example/kvd/client/team"
	here := brokerSessions(overview.BrokerName(host, 12, s.URL), id, "models", "cache", "models")
	f := &fakeDirectory{}
	directory := f.serve(t)
	kvctl := func(sessions []*dirpb.SessionInfo, args ...string) (int, string, string) {
		t.Helper()
		f.mu.Lock()
		f.now = &dirpb.StatusReply{Sessions: sessions}
		f.mu.Unlock()
		var out, errs bytes.Buffer
		code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(),
			append([]string{"--directory=" + directory, "--timeout=10s"}, args...))
		return code, out.String(), errs.String()
	}
	others := slices.Concat(here, brokerSessions("kvd gateway pid 1", id, "cache"),
		brokerSessions(overview.BrokerName("~other", 9, ""), "", "cache"),
		[]*dirpb.SessionInfo{{Client: overview.BrokerName("gone", 1, ""), Life: dirpb.SessionLife_SESSION_FENCING}})
	code, out, errs := kvctl(others, "brokers", "--interval=0")
	up := []string{host + "/12", "cache,models", s.URL, "b.sock", "2", "-", "128.0", "MiB", "up"}
	if lines := strings.Split(out, "\n"); code != ctl.ExitOK || errs != "" || len(lines) != 5 ||
		!slices.Equal(strings.Fields(lines[2]), up) ||
		!slices.Equal(strings.Fields(lines[3]),
			[]string{"~other/9", "cache", "-", "-", "-", "-", "-", "http-listen", "is", "off"}) {
		t.Errorf("exit status %d\n%s%s", code, out, errs)
	}
	code, out, errs = kvctl(here, "-o", "json", "brokers", "--interval=1ms")
	line := operate.BrokerLine{BrokerNumbers: &operate.BrokerNumbers{}}
	if err := json.Unmarshal([]byte(out), &line); err != nil || code != ctl.ExitOK || line.Name != host+"/12" ||
		line.Identity != id || line.Operations != 500*3+100 || line.Rate == nil || *line.Rate <= 0 ||
		line.Version != "v1.4.0" || line.Shared != 128<<20 || line.Queues != 3 || line.Broken != 1 {
		t.Errorf("exit status %d, %v\n%s%s", code, err, out, errs)
	}
	for name, want := range map[string]string{host + "/12": "a\\x1b[2J",
		strings.TrimPrefix(s.URL, "http://"): "64 MiB"} {
		if code, out, errs := kvctl(here, "brokers", "programs", name); code != ctl.ExitOK ||
			!strings.Contains(out, want) || errs != "kvctl brokers programs: 3 more are left out\n" {
			t.Errorf("%s: exit status %d\n%s%s", name, code, out, errs)
		}
	}
	if _, out, _ := kvctl(here, "-o", "json", "brokers", "programs", host+"/12"); !strings.HasPrefix(out,
		`{"pid":17,"program":"42","shared_memory":"64 MiB"}`+"\n") {
		t.Errorf("programs: %s", out)
	}

	for _, tc := range []struct {
		host, page string
		code       int
		want       string
	}{
		{"other", s.URL, ctl.ExitUnavailable, "it listens on its own machine only"},
		{host, "http://10.0.0.5:7484", ctl.ExitUsage, "want --insecure"},
		{host, "https://10.0.0.5:7484", ctl.ExitUsage, "want --tls-ca"},
		{host, "http://127.0.0.1:1", ctl.ExitUnavailable, "connection refused"},
	} {
		of := brokerSessions(overview.BrokerName(tc.host, 7, tc.page), "", "cache")
		if code, out, errs := kvctl(of, "brokers"); code != ctl.ExitUnavailable || !strings.Contains(errs, tc.want) ||
			!strings.Contains(errs, "1 of 1 brokers did not answer") || !strings.Contains(out, "no answer") {
			t.Errorf("%s of %s: exit status %d\n%s%s", tc.page, tc.host, code, out, errs)
		}
		if code, _, errs := kvctl(of, "brokers", "programs", tc.host+"/7"); code != tc.code ||
			!strings.Contains(errs, tc.want) {
			t.Errorf("programs at %s of %s: exit status %d, want %d\n%s", tc.page, tc.host, code, tc.code, errs)
		}
	}
	for name, want := range map[string]string{"none/1": "unknown broker", "~other/9": "its http-listen is off"} {
		if code, _, errs := kvctl(others, "brokers", "programs", name); code != ctl.ExitNo ||
			!strings.Contains(errs, want) {
			t.Errorf("%s: exit status %d\n%s", name, code, errs)
		}
	}
	if code, _, errs := kvctl(append(here, brokerSessions(here[0].Client, "", "cache")...), "brokers", "programs",
		host+"/12"); code != ctl.ExitUsage || !strings.Contains(errs, "is the name of 2 brokers") {
		t.Errorf("exit status %d\n%s", code, errs)
	}
	if code, _, errs := kvctl(nil, "brokers", "--interval=-1s"); code != ctl.ExitUsage {
		t.Errorf("exit status %d\n%s", code, errs)
	}

	// Other processes, and pages that say nonsense.
	for _, bad := range []fakeBroker{{role: "gateway", state: `{"role":"gateway"}`},
		{role: "broker", metrics: "kvd_broker_queues{socket=\"b.sock\"} NaN\n", state: "{"},
		{role: "broker", metrics: "kvd_broker_queues -1\n", state: strings.Replace(brokerState, `"17",`, "", 1)}} {
		*b = bad
		for _, args := range [][]string{{"brokers"}, {"brokers", "programs", host + "/12"}} {
			if code, out, errs := kvctl(here, args...); code != ctl.ExitUnavailable || !strings.Contains(errs,
				"broker") {
				t.Errorf("%q of %+v: exit status %d\n%s%s", args, bad, code, out, errs)
			}
		}
	}
}

// Over TLS kvctl shows a broker its certificate.
func TestBrokersOverTLS(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	auth := identitytest.New(t)
	ca, cert, key := auth.Files(auth.Role("operator", "ann"))
	asked := ""
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = r.TLS.PeerCertificates[0].URIs[0].String()
		(&fakeBroker{role: "broker"}).ServeHTTP(w, r)
	}))
	s.TLS = auth.Config(auth.Role("client", "team"))
	s.StartTLS()
	defer s.Close()
	sessions := brokerSessions(overview.BrokerName(host, 1, s.URL), "", "a")
	f := &fakeDirectory{now: &dirpb.StatusReply{Sessions: sessions}}
	directory := f.serve(t, grpc.Creds(credentials.NewTLS(auth.Config(auth.Role("directory", "d")))))
	var out, errs bytes.Buffer
	code := newProgram(strings.NewReader(""), &out, &errs).run(t.Context(), []string{"--directory=" + directory,
		"--tls-ca=" + ca, "--tls-cert=" + cert, "--tls-key=" + key, "--timeout=10s", "brokers", "--interval=0"})
	if code != ctl.ExitOK || !strings.Contains(asked, "/kvd/operator/ann") || !strings.Contains(out.String(),
		"b.sock") {
		t.Errorf("exit status %d, %s asked\n%s%s", code, asked, &out, &errs)
	}
}
