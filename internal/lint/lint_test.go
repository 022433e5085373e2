package lint

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kvd-project/kvd"

// row says which packages of the project a package may import. A name that ends
// in /... stands for a folder, and * for everything.
type row struct {
	from    string
	may     string
	because string
}

// imports is first match first. Tests may import what they like.
var imports = []row{
	{"internal/bulk", "", "it moves bytes, whatever they mean"},
	{"internal/ring", "", "the bytes that a broker shares with C programs know neither the store nor sockets"},
	{"internal/broker", "client internal/ring rdma", "it performs what rings ask for as any user of the library would"},
	{"internal/layout", "internal/bulk", "the bytes are defined once, below everything but what takes their CRC"},
	{"index", "internal/invariants internal/layout", "the protocol knows neither rkeys nor sockets nor clocks, so " +
		"that simulators can drive it"},
	{"index/repair", "index internal/invariants internal/layout",
		"janitors' machines are as pure as those of keys, and use of package index what it exports to them"},
	{"internal/heap", "internal/invariants", "carving memory is arithmetic, without I/O and without the protocol"},
	{"internal/invariants", "", "it is below whatever asserts something"},
	{"internal/engine", "index internal/dirpb internal/heap internal/invariants internal/layout rdma rdma/driver " +
		"internal/units", "it drives the protocol over queue pairs, and reaches the directory only through what its " +
		"caller gives it"},
	{"internal/evict", "internal/layout",
		"what to forget is arithmetic over access words, so that traces can judge it"},
	{"internal/evict/evicttest", "", "what judges a policy knows none"},
	{"internal/session", "internal/dirpb internal/engine internal/heap internal/layout internal/ordered rdma",
		"a machine that says what a session asks of its directory and of memory nodes, and when"},
	{"internal/inside", "index index/repair internal/engine internal/layout internal/units",
		"it names the types of a Client's tools; the Client brings them, so that its public API does not"},
	{"client", "index index/repair internal/alarm internal/certs internal/dirclient internal/dirpb internal/evict " +
		"internal/hostid internal/hotkeys internal/identity internal/engine internal/inside internal/layout " +
		"internal/ordered internal/providers internal/session rdma rdma/verbs internal/token internal/units",
		"a service that links the library gets none of the store's processes, and providers without naming them"},
	{"client/near", "client", "a near cache stands between a program and any client.API, so it is written against " +
		"that alone"},
	{"client/clienttest", "client internal/inside internal/units", "a fake that shared code with the store would " +
		"share its mistakes; it heeds the limits that gateways put into contexts"},
	{"client/prom", "client internal/layout rdma", "it shows what a client counts, and counts nothing"},

	{"rdma/driver", "", "the contract stands by itself"},
	{"rdma", "internal/bulk rdma/driver", "the portable layer knows no provider"},
	{"rdma/rdmatest", "rdma rdma/driver", "the suite judges every provider by the contract alone"},
	{"rdma/sim", "internal/bulk rdma/driver", "a provider sees the contract, never the layer above it"},
	{"rdma/...", "rdma/driver internal/bulk internal/certs internal/mem internal/hostid internal/netsrv internal/poll",
		"a provider sees the contract, never the layer above it"},
	{"internal/mem", "rdma/driver internal/units", "it maps memory for providers and knows nothing of the store"},
	{"internal/providers", "internal/identity internal/netsrv rdma rdma/...",
		"it opens providers and does nothing with them"},

	{"server/fsm/fsmpb", "internal/dirpb", "generated"},
	{"server/fsm", "internal/dirpb internal/identity internal/layout internal/ordered server/fsm/fsmpb internal/units",
		"the state machine is a pure function: no raft, no disk, no clock, and nothing of server"},
	{"server/lead", "internal/dirpb internal/invariants internal/layout internal/ordered server/fsm server/fsm/fsmpb",
		"what a leader decides is a function of the state, what it heard and the time it is given: no raft, and " +
			"nothing of server"},
	{"server/raftstore", "", "a raft store knows nothing of what it stores"},
	{"server", "internal/certs internal/dirpb internal/identity internal/netsrv internal/rights internal/token " +
		"internal/wrongport internal/units server/...", "the directory runs no data operation, so it needs nothing " +
		"of the data path"},
	{"memnode", "internal/admit internal/alarm internal/bulk internal/dirpb internal/hostid internal/identity " +
		"internal/keeper internal/layout " +
		"internal/ordered internal/token rdma rdma/driver internal/units",
		"a memory node is handed its devices, and takes no part in the protocol"},
	{"internal/dirpb", "internal/identity", "generated, and beside it which roles may call what"},
	{"internal/identity", "internal/certs", "it reads certificates, whatever they are shown for"},
	{"internal/identity/identitytest", "", "it makes certificates, and knows no role"},
	{"internal/rights", "internal/identity", "it refuses calls by the tables of the services, which are handed to it"},
	{"internal/dirclient", "internal/alarm internal/certs internal/dirpb internal/identity internal/wrongport",
		"it finds the leader and does not know what is asked"},
	{"internal/wrongport", "", "it tells protocols by their first bytes, whoever is called"},
	{"internal/token", "", "tokens are bytes"},
	{"internal/admit", "internal/dirpb internal/identity internal/token",
		"it judges by what the directory said, and knows no connection"},
	{"internal/token/tokentest", "internal/token", "it forges tokens, whoever they are shown to"},
	{"internal/certs", "internal/units", "whoever talks TLS needs it, providers too"},
	{"internal/authority", "", "it signs certificates for whoever shows them"},
	{"internal/hostid", "", "it asks the kernel only"},
	{"internal/keeper", "", "it holds descriptors, whatever they are of"},
	{"internal/keeper/keepertest", "", "it makes folders, and knows no keeper"},
	{"internal/doctor", "internal/mem internal/rdmacounters rdma/driver rdma/verbs",
		"it looks at a machine, whatever the store on it does"},
	{"internal/rdmacounters", "", "it reads files, whoever shows them"},
	{"internal/buildinfo", "", "it asks the Go runtime only"},
	{"internal/webget", "internal/certs internal/units", "a page is bytes, whatever process gives it"},
	{"internal/httpd", "internal/certs internal/identity internal/netsrv",
		"it serves what it is handed, whatever the process is"},
	{"internal/overview", "internal/dirpb internal/layout internal/units",
		"it puts together what the directory says, for kvctl, pages and metrics alike"},
	{"internal/check", "internal/dirpb internal/layout internal/overview",
		"it reads bytes wherever its caller gets them: from a store, or from the simulator"},
	{"internal/metrics", "client client/prom internal/archive internal/broker internal/certs internal/dirpb " +
		"internal/netsrv internal/overview internal/rdmacounters internal/ring internal/tier memnode server",
		"it shows what the parts tell, and starts none of them"},
	{"internal/config", "internal/certs internal/identity internal/spelling",
		"settings are plain values; roles fill Options from them"},

	{"internal/alarm", "", "it wakes a process when it is due, whatever for"},
	{"internal/ordered", "", "maps and lists are such, whatever is in them"},
	{"internal/poll", "", "it asks the kernel which descriptors are ready, whatever they carry"},
	{"internal/otlp", "internal/netsrv", "it exports what servers and collectors tell"},
	{"internal/netsrv", "", "accepting connections and limiting them needs no protocol"},
	{"internal/redis/resp", "", "the codec knows bytes, not commands"},
	{"internal/redis/glob", "", "patterns and keys are bytes"},
	{"internal/spelling", "", "names are words, whatever they name"},
	{"internal/units", "", "amounts are numbers, whatever is counted"},
	{"internal/loop", "client internal/inside internal/poll",
		"it serves connections, whatever is said on them, and gives their lookups to a client"},
	{"internal/loop/looptest", "client client/clienttest internal/inside",
		"it is a fake store for the tests of servers"},
	{"internal/peers/peerspb", "", "generated"},
	{"internal/peers", "internal/certs internal/dirpb internal/hostid internal/identity internal/netsrv " +
		"internal/peers/peerspb internal/rights internal/wrongport",
		"gateways tell each other bytes; how a gateway asks the directory is handed to it"},
	{"internal/peers/peerstest", "internal/dirpb internal/peers", "it is a directory for tests of gateways that meet"},
	{"internal/redis/acl", "internal/redis/glob", "rules are text, and commands are what the gateway says they are"},
	{"internal/redis/collection", "", "encodings are bytes"},
	{"internal/redis/rdb", "internal/redis/collection",
		"a serialized value is bytes; what a stream is, its encoding says"},
	{"internal/redis/geo", "", "positions are numbers"},
	{"internal/hotkeys", "internal/ordered", "it counts keys, whoever uses them"},
	{"internal/number", "", "it reads text"},
	{"internal/gateway", "client internal/hotkeys internal/inside internal/loop internal/luascript internal/netsrv " +
		"internal/number internal/ordered internal/peers internal/poll internal/redis/acl internal/redis/admin " +
		"internal/redis/args internal/redis/collection internal/redis/exec internal/redis/glob " +
		"internal/redis/live internal/redis/rdb internal/redis/resp internal/redis/spec internal/redis/values " +
		"internal/units",
		"a gateway is a user of the library: it is handed clients, and fakes of them in tests"},
	{"internal/redis/spec", "", "descriptions are data"},
	{"internal/redis/args", "internal/redis/resp", "arguments are text, whatever key and connection they are about"},
	{"internal/redis/values", "client internal/number internal/ordered internal/redis/args internal/redis/collection " +
		"internal/redis/geo internal/redis/glob internal/redis/rdb internal/redis/resp internal/units",
		"a command sees its keys and its reply, whatever connection and store they are of"},
	{"internal/redis/exec", "client internal/inside internal/redis/values",
		"keys change in one step whatever the command, and whoever wants to hear of it"},
	{"internal/redis/admin", "internal/redis/args internal/redis/resp internal/redis/spec internal/redis/values",
		"how long commands took is told to it, whatever they are about"},
	{"internal/redis/live", "internal/redis/args internal/redis/exec internal/redis/glob internal/redis/resp " +
		"internal/redis/spec internal/redis/values",
		"messages are bytes, and who hears them is a client with an output, whatever connection that is"},
	{"internal/luascript", "internal/number internal/redis/resp internal/units",
		"it runs scripts, whatever their commands are"},
	{"internal/memcached", "client internal/inside internal/loop internal/netsrv internal/poll internal/units",
		"a gateway is a user of the library: it is handed clients, and fakes of them in tests"},

	{"internal/patient", "client", "it goes through a store as any user of the library could"},
	{"internal/archive", "client internal/dirpb internal/inside internal/layout internal/patient",
		"an archive is a client with a folder: it is handed sessions, and told which namespace there is"},
	{"internal/archive/s3", "internal/archive", "objects are files, whatever is in them"},
	{"internal/archive/places", "internal/archive internal/archive/s3", "it opens what a URL names, and reads nothing"},
	{"internal/tier", "internal/admit internal/dirpb internal/hostid internal/identity internal/ordered " +
		"internal/tierstore internal/token rdma rdma/driver",
		"a tier node is handed its device, and moves no value by itself"},
	{"internal/tierstore", "", "objects are bytes with a name, whatever they are read for"},
	{"internal/cost", "client rdma", "costs are counted from outside, as any user of the library could"},
	{"internal/janitor", "client index index/repair internal/dirclient internal/dirpb internal/identity " +
		"internal/engine internal/inside internal/layout internal/ordered rdma", "a janitor is a client with other " +
		"operations: it is handed its devices, and told by the directory what to do"},
	{"internal/verbperf", "rdma rdma/driver", "it measures providers, which it is handed, and needs no store"},
	{"internal/ycsb", "", "a workload is a sequence of keys, whatever serves them"},
	{"internal/simtest", "", "it has only tests"},
	{"internal/nativetest", "", "it has only tests"},
	{"internal/devstore", "internal/dirclient internal/dirpb internal/janitor internal/providers memnode rdma " +
		"rdma/sim server", "it starts the parts and leaves every rule to them"},
	{"internal/e2e", "*", "it tries whole stores, with every part of them"},
	{"internal/compat", "", "it has only tests"},
	{"client/python/tests/adapters", "", "it has only tests"},
	{"internal/loopback", "", "it is for tests alone"},
	{"internal/testutil", "", "it is for tests alone"},
	{"internal/gapload", "client internal/testutil", "it is for tests alone, and a user of the library"},
	{"internal/livepeak", "", "it is for tests alone"},
	{"internal/memtest", "", "it has only tests"},
	{"internal/nemesis", "", "it has only tests"},
	{"internal/verbstest", "", "it has only tests"},
	{"internal/lint", "", "it only looks"},
	{"internal/generate", "", "a tool of those who change .proto files: code comes of text"},
	{"deploy", "", "it has only tests"},
	{"bench", "*", "it measures whatever there is"},
	{"examples/...", "client client/near client/prom", "it has what users have"},
	{"internal/ctl", "client index index/repair internal/certs internal/dirclient internal/dirpb " +
		"internal/identity internal/inside internal/overview internal/patient " +
		"internal/providers internal/redis/glob internal/units rdma rdma/verbs",
		"kvctl's groups of commands share it, and it knows none of them"},
	{"internal/ctl/keys", "client index index/repair internal/ctl internal/inside internal/layout " +
		"internal/patient internal/units",
		"commands on single keys share no code with other groups but internal/ctl"},
	{"internal/ctl/bulk", "client internal/archive internal/archive/places internal/buildinfo internal/ctl " +
		"internal/dirpb internal/inside internal/layout internal/patient " +
		"internal/redis/collection internal/redis/resp internal/units",
		"commands on many keys share no code with other groups but internal/ctl"},
	{"internal/ctl/inside", "client index index/repair internal/check internal/ctl internal/dirpb internal/layout " +
		"internal/overview internal/patient internal/units",
		"commands on bytes in remote memory share no code with other groups but internal/ctl"},
	{"internal/ctl/measure", "client internal/cost internal/ctl internal/doctor internal/netsrv internal/overview " +
		"internal/patient internal/providers internal/units internal/verbperf internal/webget " +
		"internal/ycsb rdma rdma/verbs",
		"commands on measurements share no code with other groups but internal/ctl"},
	{"internal/ctl/operate", "internal/buildinfo internal/certs internal/ctl internal/dirpb internal/hostid " +
		"internal/identity internal/keeper internal/layout internal/overview " +
		"internal/peers/peerspb internal/units internal/webget internal/wrongport",
		"commands on the cluster share no code with other groups but internal/ctl"},
	{"internal/ctl/tenants", "client internal/authority internal/certs internal/ctl internal/dirpb " +
		"internal/identity internal/overview internal/units",
		"commands on namespaces and their users share no code with other groups but internal/ctl"},
	{"cmd/...", "*", "commands put the parts together"},
}

// only says who may import packages that should stay in one place. The path
// stands for all below it; tests are exempt.
var only = []row{
	{"github.com/spf13/viper", "internal/config", "it folds case and is not safe for concurrent use: one package " +
		"knows how to live with that"},
	{"github.com/go-viper/mapstructure", "internal/config", "it belongs to viper"},
	{"github.com/spf13/cobra", "cmd/... internal/ctl internal/ctl/...", "libraries know no command line"},
	{"github.com/spf13/pflag", "cmd/... internal/config internal/ctl internal/ctl/...",
		"libraries know no command line"},
	{"github.com/hashicorp/raft", "server server/raftstore", "its rough edges are contained in one place"},
	{"github.com/cockroachdb/pebble", "server server/raftstore internal/tierstore",
		"only the directory and a tier keep anything on disk"},
	{"github.com/coreos/go-systemd", "cmd/...", "only a process tells systemd about itself"},
	{"go.opentelemetry.io", "internal/otlp", "only a kvd with the tag otel links it; client/otelkvd is a module of " +
		"its own"},
	{"github.com/minio/minio-go", "internal/archive/s3", "one package knows how buckets fail"},
	{module + "/internal/archive/places", "cmd/... internal/ctl/bulk", "libraries are handed an open destination"},
	{"github.com/redis/go-redis", "bench", "Redis is what we compare with"},
	{"github.com/maypok86/otter", "client/near", "a service without a near cache does not carry one"},
	{"github.com/prometheus/client_golang", "client/prom internal/metrics internal/httpd internal/gateway " +
		"internal/memcached internal/otlp cmd/... examples/...",
		"a service that links the client chooses what it exports by"},
	{"github.com/hashicorp/go-metrics", "internal/metrics", "it has one sink for the whole process, and raft reports " +
		"there"},
	{module + "/internal/metrics", "cmd/...", "the parts count, and only a process shows it to others"},
	{module + "/internal/httpd", "cmd/...", "only a process serves pages"},
	{module + "/internal/providers", "client cmd/... internal/ctl internal/ctl/... internal/devstore " +
		"internal/e2e bench",
		"a client opens what its user does not name; other libraries are handed opened devices"},
	{module + "/internal/config", "cmd/...", "libraries take Options"},
	{module + "/internal/devstore", "cmd/kvd internal/e2e bench", "it is a whole store, for kvd dev and for tests"},
	{module + "/internal/inside", "client client/clienttest cmd/... internal/archive internal/ctl internal/ctl/... " +
		"internal/gateway internal/janitor internal/loop internal/loop/looptest internal/memcached internal/redis/exec",
		"what can be done through the public API is done through it, as any user would"},
	{module + "/internal/testutil", "internal/gapload", "it is for tests alone"},
	{module + "/internal/gapload", "", "it is for tests alone"},
	{module + "/internal/loopback", "", "it is for tests alone"},
	{module + "/internal/livepeak", "", "it is for tests alone"},
	{"testing", "rdma/rdmatest internal/identity/identitytest internal/peers/peerstest internal/keeper/keepertest " +
		"internal/testutil internal/gapload", "it is for tests, and registers flags"},
	{"C", "", "the default build has no cgo"},
}

// never are dependencies, however indirect, that the library must not bring
// along.
var never = []row{
	{"client client/near client/clienttest", "github.com/hashicorp github.com/cockroachdb github.com/spf13 " +
		"github.com/prometheus go.opentelemetry.io github.com/minio/minio-go " + module + "/server " +
		module + "/memnode",
		"every service that links the client would carry it"},
	{"cmd/kvd", "go.opentelemetry.io", "it would not fit into the size that kvd may have; the tag otel brings it"},
	{"client", "github.com/maypok86", "a service without a near cache does not carry one"},
	{"cmd/kvctl", "github.com/hashicorp github.com/cockroachdb github.com/prometheus github.com/spf13/viper " + module +
		"/server " + module + "/memnode " + module + "/internal/devstore " + module + "/internal/metrics",
		"each of its runs is short, and begins with what every package prepares; a private store is kvd dev's"},
	{"index index/repair", "net os/exec golang.org/x/net golang.org/x/sys/unix google.golang.org",
		"the step machines do no I/O"},
	{"server/fsm", "github.com/hashicorp/raft github.com/cockroachdb",
		"it is tested, and reasoned about, without raft and disk"},
}

// pure lists what packages whose result must depend on their arguments alone do
// not import.
var pure = []row{
	{"server/fsm", "time math/rand crypto/rand os net log log/slog sync",
		"applying a command again must give the same state; a leader puts time and random choices into the command"},
	{"server/lead", "math/rand crypto/rand os net log log/slog sync",
		"the simulator drives it under virtual time; its host has the lock and the log"},
	{"index index/repair", "time math/rand crypto/rand os net log log/slog sync",
		"a step machine never waits and reads no clock; its driver does"},
	{"internal/evict", "time math/rand crypto/rand os net log log/slog",
		"whoever evicts hands it time, and seeds its choices"},
	{"internal/layout", "math/rand crypto/rand os net log log/slog sync unsafe", "bytes are encoded explicitly"},
}

// pkg is what go list tells of a package.
type pkg struct {
	ImportPath, Name, Dir     string
	GoFiles, CgoFiles         []string
	TestGoFiles, XTestGoFiles []string
	Imports, Deps             []string
}

func (p pkg) rel() string {
	if p.ImportPath == module {
		return "."
	}
	return strings.TrimPrefix(p.ImportPath, module+"/")
}

// matches tells whether one of the patterns stands for name.
func matches(patterns, name string) bool {
	return slices.ContainsFunc(strings.Fields(patterns), func(p string) bool {
		dir, folder := strings.CutSuffix(p, "/...")
		return p == "*" || p == name || folder && strings.HasPrefix(name, dir+"/")
	})
}

// below tells whether name is base or inside of it; v2 and the like are.
func below(base, name string) bool { return name == base || strings.HasPrefix(name, base+"/") }

// refusals gives what the tables do not allow.
func refusals(pkgs []pkg) []string {
	var out []string
	refuse := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	for _, p := range pkgs {
		name := p.rel()
		i := slices.IndexFunc(imports, func(r row) bool { return matches(r.from, name) })
		if i < 0 {
			refuse("%s has no row in the table of internal/lint: add one that says what it may import, and why no more",
				name)
			continue
		}
		for _, imp := range p.Imports {
			if to, ours := strings.CutPrefix(imp, module+"/"); ours && !matches(imports[i].may, to) {
				may := imports[i].may
				if may == "" {
					may = "nothing of the project"
				}
				refuse("%s imports %s, but may import only %s: %s", name, to, may, imports[i].because)
			}
			for _, r := range only {
				if below(r.from, imp) && !matches(r.may, name) && !below(r.from, p.ImportPath) {
					refuse("%s imports %s, which is for %s: %s", name, imp, orNobody(r.may), r.because)
				}
			}
		}
		for _, r := range pure {
			if !matches(r.from, name) {
				continue
			}
			for _, imp := range p.Imports {
				if slices.ContainsFunc(strings.Fields(r.may), func(b string) bool { return below(b, imp) }) {
					refuse("%s imports %s, which makes it impure: %s", name, imp, r.because)
				}
			}
		}
		for _, r := range never {
			if !matches(r.from, name) {
				continue
			}
			for _, d := range p.Deps {
				if slices.ContainsFunc(strings.Fields(r.may), func(b string) bool { return below(b, d) }) {
					refuse("%s depends on %s, directly or not: %s", name, d, r.because)
				}
			}
		}
	}
	return out
}

func orNobody(may string) string {
	if may == "" {
		return "nobody"
	}
	return may
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list",
		"-json=ImportPath,Name,Dir,GoFiles,CgoFiles,TestGoFiles,XTestGoFiles,Imports,Deps", module+"/...")
	out, err := cmd.Output()
	if err != nil {
		if e := (*exec.ExitError)(nil); errors.As(err, &e) {
			err = fmt.Errorf("%w\n%s", err, e.Stderr)
		}
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if len(pkgs) < 10 {
		t.Fatalf("go list found %d packages", len(pkgs))
	}
	return pkgs
}

func TestImports(t *testing.T) {
	pkgs := list(t)
	for _, r := range refusals(pkgs) {
		t.Error(r)
	}
	for _, r := range slices.Concat(imports, only, pure, never) {
		if r.because == "" {
			t.Errorf("the row of %s gives no reason", r.from)
		}
	}
}

// Rows that refuse nothing would go unnoticed.
func TestRefusals(t *testing.T) {
	imp := func(from string, to ...string) pkg {
		p := pkg{ImportPath: module + "/" + from}
		for _, i := range to {
			if strings.HasPrefix(i, "+") {
				i = module + "/" + i[1:]
			}
			p.Imports = append(p.Imports, i)
		}
		p.Deps = p.Imports
		return p
	}
	for _, tc := range []struct {
		p    pkg
		want string
	}{
		{imp("index", "+rdma"), "index imports rdma, but may import only internal/invariants internal/layout: the " +
			"protocol knows"},
		{imp("internal/layout", "+internal/mem"), "internal/layout imports internal/mem, but may import only " +
			"internal/bulk"},
		{imp("rdma/tcp", "+rdma"), "rdma/tcp imports rdma, but may import only rdma/driver internal/bulk " +
			"internal/certs internal/mem internal/hostid internal/netsrv internal/poll"},
		{imp("rdma", "+rdma/tcp"), "the portable layer knows no provider"},
		{imp("server/fsm", "+server"), "server/fsm imports server, but"},
		{imp("server/fsm", "github.com/hashicorp/raft"), "server/fsm imports github.com/hashicorp/raft, which is for " +
			"server server/raftstore"},
		{imp("client", "+internal/devstore"), "client imports internal/devstore, but"},
		{imp("memnode", "+internal/providers"), "other libraries are handed opened devices"},
		{imp("memnode", "github.com/spf13/viper"), "memnode imports github.com/spf13/viper, which is for " +
			"internal/config"},
		{imp("internal/new"), "internal/new has no row"},
		{imp("client", "github.com/prometheus/client_golang/prometheus"),
			"client imports github.com/prometheus/client_golang/prometheus, which is for client/prom"},
		{imp("client/near", "+client", "+internal/session"), "client/near imports internal/session, but may import " +
			"only client: a near cache"},
		{imp("internal/simtest", "+internal/testutil"), "internal/simtest imports " + module +
			"/internal/testutil, which is for internal/gapload: it is for tests alone"},
		{imp("internal/gateway", "+internal/metrics"), "internal/gateway imports " + module +
			"/internal/metrics, which is for cmd/..."},
		{imp("rdma/verbs", "C"), "rdma/verbs imports C, which is for nobody"},
		{imp("server/raftstore", "github.com/cockroachdb/pebble/v2/vfs", "github.com/hashicorp/raft"), ""},
		{imp("server/fsm", "math/rand/v2"), "server/fsm imports math/rand/v2, which makes it impure: applying"},
		{imp("cmd/kvd", "+server", "+internal/config", "github.com/spf13/cobra"), ""},
		{pkg{ImportPath: module + "/client/near", Deps: []string{"github.com/prometheus/common/model"}},
			"client/near depends on github.com/prometheus/common/model, directly or not"},
		{pkg{ImportPath: module + "/cmd/kvctl", Deps: []string{"github.com/hashicorp/raft"}},
			"cmd/kvctl depends on github.com/hashicorp/raft, directly or not: each of its runs is short"},
		{pkg{ImportPath: module + "/client", Deps: []string{module + "/server/fsm"}}, "client depends on " + module +
			"/server/fsm, directly or not"},
	} {
		got := strings.Join(refusals([]pkg{tc.p}), "\n")
		if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s importing %q: %q, want %q", tc.p.rel(), tc.p.Imports, got, tc.want)
		}
	}
}

// Each package has one comment, where readers look for it.
func TestPackageComments(t *testing.T) {
	for _, p := range list(t) {
		files := slices.Concat(p.GoFiles, p.CgoFiles)
		if len(files) == 0 {
			files = p.TestGoFiles
		}
		if len(files) == 0 {
			files = p.XTestGoFiles
		}
		var with []string
		for _, f := range files {
			ast, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, f), nil,
				parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Error(err)
				continue
			}
			if ast.Doc == nil {
				continue
			}
			with = append(with, f)
			begin := "Package " + strings.TrimSuffix(p.Name, "_test") + " "
			if p.Name == "main" {
				begin = "Command " + path.Base(p.ImportPath) + " "
			}
			if !strings.HasPrefix(ast.Doc.Text(), begin) {
				t.Errorf("%s: the package comment in %s does not begin with %q", p.rel(), f, begin)
			}
		}
		if len(with) != 1 {
			t.Errorf("%s: %d package comments %q, want one that says what it is for, what it leaves to others, what "+
				"to read first, who may call it concurrently, who owns the buffers, and where the idea is from",
				p.rel(), len(with), with)
		}
	}
}
