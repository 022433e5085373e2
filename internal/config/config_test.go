package config

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"pgregory.net/rapid"
)

// write makes a configuration file and returns its name.
func write(t *testing.T, name, content string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// flags are the parsed flags of s.
func flags(t *testing.T, s Settings, args ...string) *pflag.FlagSet {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	Flags(fs, s)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return fs
}

func defaults() map[string]Settings {
	return map[string]Settings{"dev": DefaultDev(), "directory": DefaultDirectoryNode(), "memnode": DefaultMemNode(),
		"janitor": DefaultJanitor(), "gateway": DefaultGateway(), "broker": DefaultBrokerNode(),
		"archive": DefaultArchive(), "tier": DefaultTier(), "health": DefaultHealth()}
}

func TestPrecedence(t *testing.T) {
	const file = "name: f\nmemory: 2GiB\ndomain: file\nlog:\n  level: warn\n  format: json\n"
	t.Setenv("KVD_MEMORY", "3GiB")
	t.Setenv("KVD_DOMAIN", "env")
	t.Setenv("KVD_LOG_LEVEL", "error")
	t.Setenv("KVD_DIRECTORY", "127.0.0.1:1, 127.0.0.1:2")
	t.Setenv("KVD_LOCK", "") // like not set
	t.Setenv("KVD_PORT", "tcp://10.0.0.1:7400")
	m := DefaultMemNode()
	err := Load(m, write(t, "m.yaml", file), flags(t, m, "--domain=flag", "--insecure"))
	if err != nil {
		t.Fatal(err)
	}
	want := DefaultMemNode()
	want.Name = "f"
	want.Memory = 3 << 30
	want.Domain = "flag"
	want.Log = Log{Level: "error", Format: "json"}
	want.Directory = []string{"127.0.0.1:1", "127.0.0.1:2"}
	want.Insecure = true
	if d := cmp.Diff(want, m); d != "" {
		t.Error(d)
	}
}

// A list given by a flag or a file replaces the default and what is weaker.
func TestLists(t *testing.T) {
	m := DefaultMemNode()
	file := write(t, "m.yaml", "name: a\ndirectory: ['127.0.0.1:1', '127.0.0.1:2']\n")
	if err := Load(m, file, flags(t, m, "--directory", "127.0.0.1:3", "--directory", "127.0.0.1:4,127.0.0.1:5")); err !=
		nil {
		t.Fatal(err)
	}
	if want := []string{"127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:5"}; !slices.Equal(m.Directory, want) {
		t.Errorf("flags: %q, want %q", m.Directory, want)
	}
	m = DefaultMemNode()
	m.Directory = []string{"127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:9"}
	if err := Load(m, file, nil); err != nil {
		t.Fatal(err)
	}
	if want := []string{"127.0.0.1:1", "127.0.0.1:2"}; !slices.Equal(m.Directory, want) {
		t.Errorf("file: %q, want %q", m.Directory, want)
	}
}

func TestFormats(t *testing.T) {
	want := DefaultDirectoryNode()
	want.ID, want.DataDir, want.Bootstrap, want.Lease = "d1", "/d", true, 2*time.Second
	want.TLS = TLS{CA: "ca", Cert: "cert", Key: "key"}
	for name, content := range map[string]string{
		"a.yaml": "id: d1\ndata-dir: /d\nbootstrap: true\nlease: 2s\ntls: {ca: ca, cert: cert, key: key}\n",
		"a.yml":  "ID: d1\nData-Dir: /d\nbootstrap: 'yes'\nlease: 2000ms\ntls: {ca: ca, cert: cert, key: key}\n",
		"a.toml": "id = 'd1'\ndata-dir = '/d'\nbootstrap = true\nlease = '2s'\n[tls]\nca = 'ca'\ncert = 'cert'\nkey " +
			"= 'key'\n",
		"a.json": `{"id": "d1", "data-dir": "/d", "bootstrap": true, "lease": "2s", "tls": {"ca": "ca", "cert": "cert", "key": "key"}}`,
	} {
		d := DefaultDirectoryNode()
		if err := Load(d, write(t, name, content), nil); err != nil {
			t.Errorf("%s: %v", name, err)
		} else if diff := cmp.Diff(want, d); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	// JSON has one kind of number.
	m := DefaultMemNode()
	if err := Load(m, write(t, "m.json", `{"name": "a", "memory": 1073741824}`), nil); err != nil || m.Memory != 1<<30 {
		t.Errorf("memory as a JSON number: %v, %v", m.Memory, err)
	}
}

// Every mistake names the key, the value and what set it, and none hides
// another.
func TestRefusals(t *testing.T) {
	for _, tc := range []struct {
		name string
		s    Settings
		file string
		env  map[string]string
		args []string
		want []string
	}{
		{
			name: "unknown keys", s: DefaultMemNode(),
			file: "name: a\nmemmory: 1GiB\nlog: {levle: info}\nfoo: {bar: 1}\n",
			want: []string{
				"memmory (from FILE): there is no such setting; did you mean memory?",
				"log.levle (from FILE): there is no such setting; did you mean log.level?",
				"foo.bar (from FILE): there is no such setting",
			},
		},
		{name: "setting of before", s: DefaultGateway(), file: "directory: [a:1]\nexec-per-key: true\n",
			want: []string{"exec-per-key (from FILE): there is no such setting"}},
		{name: "another role's key", s: DefaultMemNode(), file: "name: a\nbootstrap: true\n",
			want: []string{"bootstrap (from FILE): there is no such setting"}},
		{name: "section as text", s: DefaultMemNode(), file: "name: a\ntls: yes-please\n",
			want: []string{`tls is "yes-please" (from FILE): want a section`}},
		{name: "setting as section", s: DefaultMemNode(), file: "name: a\nmemory: {size: 1}\n",
			want: []string{"memory.size (from FILE): there is no such setting"}},
		{name: "broken file", s: DefaultMemNode(), file: "name: [\n", want: []string{"configuration file FILE: "}},
		{name: "key twice", s: DefaultMemNode(), file: "name: a\nname: b\n",
			want: []string{"configuration file FILE: ", "already defined"}},
		{
			name: "types", s: DefaultDirectoryNode(), file: "id: 7\ndata-dir: d\nlease: 5\nbootstrap: perhaps\njoin: " +
				"[1]\nelection-timeout: true\n",
			want: []string{
				"id is 7 (from FILE): want text: put it in quotes",
				"lease is 5 (from FILE): want a duration with its unit, such as 500ms or 2s",
				`bootstrap is "perhaps" (from FILE): want true or false`,
				"join is [1] (from FILE): want a list of texts",
				"election-timeout is true (from FILE): want a duration",
			},
		},
		{
			name: "from everywhere", s: DefaultMemNode(), file: "name: a\nmemory: 64GB\n",
			env: map[string]string{"KVD_LOCK": "maybe", "KVD_LOG_LEVEL": "loud"},
			want: []string{
				`memory is "64GB" (from FILE): want a size such as 512MiB or 64GiB`,
				`lock is "maybe" (from KVD_LOCK): want true or false`,
			},
		},
		{name: "flag", s: DefaultMemNode(), args: []string{"--name=a", "--memory=5"},
			want: []string{"memory is 5B (from --memory): want at least 16MiB"}},
		{name: "size beyond", s: DefaultMemNode(), args: []string{"--name=a", "--memory=9000000TiB"},
			want: []string{`memory is "9000000TiB" (from --memory): want less than`}},
		{name: "count", s: DefaultDev(), args: []string{"--memnodes=two"},
			want: []string{`memnodes is "two" (from --memnodes): want a whole number`}},
		{
			name: "dev", s: DefaultDev(), args: []string{"--listen=0.0.0.0:7400", "--memnodes=0", "--lease=1ms",
				"--epoch-interval=-1s", "--redis=:6379", "--memcached=11211", "--http=192.0.2.1:80", "--archive="},
			want: []string{
				`redis is ":6379" (from --redis): kvd dev serves its own machine: want 127.0.0.1 or off`,
				`memcached is "11211" (from --memcached): want host:port`,
				`http is "192.0.2.1:80" (from --http): kvd dev serves its own machine`,
				`listen is "0.0.0.0:7400" (from --listen): kvd dev serves its own machine`,
				"memnodes is 0 (from --memnodes): want 1 to 64",
				`archive is "" (from --archive): want a folder, or off`,
				"lease is 1ms (from --lease): want at least 50ms",
				"epoch-interval is -1s (from --epoch-interval): want at least 10ms",
			},
		},
		{name: "dev address", s: DefaultDev(), args: []string{"--listen=7400"},
			want: []string{`listen is "7400" (from --listen): want host:port`}},
		{
			name: "directory", s: DefaultDirectoryNode(),
			args: []string{"--listen=192.0.2.1:7400", "--raft-listen=:7401", "--bootstrap", "--join=192.0.2.2:7400",
				"--advertise=0.0.0.0:1", "--raft-advertise=x", "--tls-ca="},
			want: []string{
				"id is missing: name this directory node",
				"data-dir is missing",
				`listen is "192.0.2.1:7400" (from --listen): others can reach it: set tls.ca, tls.cert and tls.key, or insecure`,
				`raft-listen is ":7401" (from --raft-listen): others can reach it`,
				`advertise is "0.0.0.0:1" (from --advertise): want a host that others can call`,
				`raft-advertise is "x" (from --raft-advertise): want host:port`,
				`join is "192.0.2.2:7400" (from --join): it is on another machine`,
				"join is [192.0.2.2:7400] (from --join): with bootstrap it names all directory nodes that begin " +
					"together, and lacks this one, 0.0.0.0:1",
			},
		},
		{
			name: "wildcards need another address", s: DefaultDirectoryNode(),
			args: []string{"--id=a", "--data-dir=d", "--insecure", "--listen=0.0.0.0:7400", "--raft-listen=[::]:7401"},
			want: []string{
				`listen is "0.0.0.0:7400" (from --listen): set advertise to the address that others shall call`,
				`raft-listen is "[::]:7401" (from --raft-listen): set raft-advertise`,
			},
		},
		{
			name: "memnode", s: DefaultMemNode(),
			args: []string{"--directory=192.0.2.1:7400,127.0.0.1:0", "--listen-tcp=192.0.2.1:0", "--huge-pages=4MiB",
				"--health-listen=h:99999", "--shm-socket=" + strings.Repeat("x", 108), "--log-format=xml"},
			want: []string{
				"name is missing",
				`directory is "192.0.2.1:7400" (from --directory): it is on another machine`,
				`directory is "127.0.0.1:0" (from --directory): want a port from 1 to 65535`,
				`huge-pages is "4MiB" (from --huge-pages): want off, 2MiB or 1GiB`,
				`listen-tcp is "192.0.2.1:0" (from --listen-tcp): others can reach it`,
				`health-listen is "h:99999" (from --health-listen): want a port from 0 to 65535`,
				`shm-socket is "x`, "(from --shm-socket): want at most 107 bytes",
				`log.format is "xml" (from --log-format): want text or json`,
			},
		},
		{
			name: "janitor", s: DefaultJanitor(), file: "janitor: true\n",
			want: []string{"janitor (from FILE): there is no such setting"},
		},
		{
			name: "janitor's settings", s: DefaultJanitor(),
			args: []string{"--directory=192.0.2.1:7400", "--poll=1ms", "--window=0", "--tls-key=k"},
			want: []string{
				"tls.ca is missing",
				"poll is 1ms (from --poll): want at least 10ms",
				"window is 0 (from --window): want 1 to 1024",
			},
		},
		{
			name: "broker", s: DefaultBrokerNode(),
			args: []string{"--directory=192.0.2.1:7400", "--namespaces=", "--listen=here", "--max-clients=0",
				"--max-pins=0", "--arena-memory=1023KiB", "--timeout=1ms", "--http-listen=192.0.2.1:80", "--views=0",
				"--view-memory=1000000TiB"},
			want: []string{
				`directory is "192.0.2.1:7400" (from --directory): it is on another machine`,
				"namespaces is missing",
				`listen is "here" (from --listen): want an absolute path`,
				"max-clients is 0 (from --max-clients): want 1 to 4096",
				"max-pins is 0 (from --max-pins): want 1 to 1073741824",
				"arena-memory is 1023KiB (from --arena-memory): want 1MiB to",
				"timeout is 1ms (from --timeout): want at least 10ms",
				"view-memory is 1000000TiB (from --view-memory): want at most",
				"views is 0 (from --views): want 1 to 4096",
				`http-listen is "192.0.2.1:80" (from --http-listen): others can reach it`,
			},
		},
		{
			name: "archive", s: DefaultArchive(),
			args: []string{"--directory=192.0.2.1:7400", "--every=10ms", "--rate=1000000TiB", "--keep-last=-1",
				"--keep-daily=1000001", "--http-listen=192.0.2.1:80"},
			want: []string{
				`directory is "192.0.2.1:7400" (from --directory): it is on another machine`,
				"to is missing",
				"every is 10ms (from --every): want at least 1s",
				"rate is 1000000TiB (from --rate): want at most",
				"keep-last is -1 (from --keep-last): want 0 to",
				"keep-daily is 1000001 (from --keep-daily): want 0 to",
				`http-listen is "192.0.2.1:80" (from --http-listen): others can reach it`,
			},
		},
		{
			name: "tier", s: DefaultTier(),
			args: []string{"--directory=192.0.2.1:7400", "--size=255MiB", "--listen-tcp=0.0.0.0:0",
				"--max-connections=0", "--http-listen=192.0.2.1:80"},
			want: []string{
				"name is missing",
				`directory is "192.0.2.1:7400" (from --directory): it is on another machine`,
				"folder is missing",
				"size is 255MiB (from --size): want 256MiB to",
				`listen-tcp is "0.0.0.0:0" (from --listen-tcp): others can reach it`,
				`listen-tcp is "0.0.0.0:0" (from --listen-tcp): set advertise-tcp`,
				"max-connections is 0 (from --max-connections): want 1 to",
				`http-listen is "192.0.2.1:80" (from --http-listen): others can reach it`,
			},
		},
		{
			name: "gateway", s: DefaultGateway(), file: "databases: [a, b, a*65, '', a*, a*-1, '*2', " +
				"a*2*2]\npassword: secret\n",
			args: []string{
				"--directory=192.0.2.1:7400", "--listen=0.0.0.0:6379", "--listen-unix=", "--listen-tls=0.0.0.0:6380",
				"--tls-clients=none", "--listen-memcached=192.0.2.1:11211", "--http-listen=192.0.2.1:80",
				"--memcached-item-size=513MiB", "--max-connections=0", "--max-connections-per-address=-1",
				"--script-timeout=0s", "--script-memory=1023KiB", "--tracking-keys=0", "--tracking-check=99ms",
				"--slowlog-max-len=0", "--listen-peers=192.0.2.1:7410", "--advertise-peers=g1",
			},
			want: []string{
				`directory is "192.0.2.1:7400" (from --directory): it is on another machine`,
				"script-timeout is 0s (from --script-timeout): want > 0",
				"script-memory is 1023KiB (from --script-memory): want at least 1MiB, and at most buffer-memory",
				"tracking-keys is 0 (from --tracking-keys): want 1 to 1048576",
				"tracking-check is 99ms (from --tracking-check): want at least 100ms",
				"slowlog-max-len is 0 (from --slowlog-max-len): want > 0",
				`listen-peers is "192.0.2.1:7410" (from --listen-peers): others can reach it`,
				`advertise-peers is "g1" (from --advertise-peers): want`,
				"databases is [a b a*65  a* a*-1 *2 a*2*2] (from FILE): a*65: want name*count, with a count of 1 to 64",
				"databases is [a b a*65  a* a*-1 *2 a*2*2] (from FILE): number 3 has no name",
				"databases is [a b a*65  a* a*-1 *2 a*2*2] (from FILE): a*: want name*count, with a count of 1 to 64",
				"databases is [a b a*65  a* a*-1 *2 a*2*2] (from FILE): a*-1: want name*count, with a count of 1 to 64",
				"databases is [a b a*65  a* a*-1 *2 a*2*2] (from FILE): number 6 has no name",
				"databases is [a b a*65  a* a*-1 *2 a*2*2] (from FILE): a*2*2: want name*count, " +
					"with a count of 1 to 64",
				`listen is "0.0.0.0:6379" (from --listen): others can reach it, and it is in clear, a password too: use listen-tls, or set insecure`,
				`listen-memcached is "192.0.2.1:11211" (from --listen-memcached): others can reach it`,
				`listen-unix is "" (from --listen-unix): want a path or off`,
				`listen-tls is "0.0.0.0:6380" (from --listen-tls): set tls.ca, tls.cert and tls.key`,
				`tls-clients is "none" (from --tls-clients): want certified or any`,
				"memcached-item-size is 513MiB (from --memcached-item-size): want 1KiB to 512MiB",
				"max-connections is 0 (from --max-connections): want 1 to",
				"max-connections-per-address is -1 (from --max-connections-per-address): want 1 to",
				`http-listen is "192.0.2.1:80" (from --http-listen): others can reach it`,
			},
		},
		{
			name: "gateway in clear beside TLS", s: DefaultGateway(),
			args: []string{"--tls-ca=a", "--tls-cert=c", "--tls-key=k", "--listen=0.0.0.0:6379"},
			want: []string{`listen is "0.0.0.0:6379" (from --listen): others can reach it, and it is in clear`},
		},
		{
			name: "gateway for anyone", s: DefaultGateway(),
			args: []string{"--tls-ca=a", "--tls-cert=c", "--tls-key=k", "--listen-tls=0.0.0.0:6380",
				"--tls-clients=any"},
			want: []string{`tls-clients is "any" (from --tls-clients): others can reach listen-tls: set a password, password-file or acl-file`},
		},
		{
			name: "gateway's bounds from above", s: DefaultGateway(), env: map[string]string{
				"KVD_TRACKING_KEYS": "1048577"}, file: "script-memory: 129MiB\nbuffer-memory: 128MiB\n",
			args: []string{"--script-timeout=-1ns", "--memcached-item-size=1023", "--listen-peers=7410"},
			want: []string{
				"tracking-keys is 1048577 (from KVD_TRACKING_KEYS): want 1 to 1048576",
				"script-memory is 129MiB (from FILE): want at least 1MiB, and at most buffer-memory",
				"script-timeout is -1ns (from --script-timeout): want > 0",
				"memcached-item-size is 1023B (from --memcached-item-size): want 1KiB to 512MiB",
				`listen-peers is "7410" (from --listen-peers): want`,
			},
		},
		{
			name: "gateway without a way in", s: DefaultGateway(),
			args: []string{"--listen=off", "--listen-memcached=off", "--databases="},
			want: []string{`listen is "off" (from --listen): listen-unix, listen-tls and listen-memcached are off too`, "databases is [] (from --databases): want 1 to 64 databases"},
		},
		{
			name: "many databases", s: DefaultGateway(), args: []string{"--databases=a*63,b,a"},
			want: []string{"databases is [a*63 b a] (from --databases): want 1 to 64 databases"},
		},
		{name: "http-listen", s: DefaultMemNode(), args: []string{"--name=a", "--http-listen=0.0.0.0:7481"}, want: []string{`http-listen is "0.0.0.0:7481" (from --http-listen): others can reach it`}},
		{name: "janitor without TLS", s: DefaultJanitor(), args: []string{"--directory=192.0.2.1:7400"}, want: []string{`directory is "192.0.2.1:7400" (from --directory): it is on another machine`}},
		{name: "scrub interval", s: DefaultDirectoryNode(),
			args: []string{"--id=a", "--data-dir=d", "--scrub-interval=-1s"},
			want: []string{"scrub-interval is -1s (from --scrub-interval): want at least 10ms"}},
		{name: "switch", s: DefaultMemNode(), args: []string{"--name=a"}, env: map[string]string{
			"KVD_JANITOR": "maybe"}, want: []string{`janitor is "maybe" (from KVD_JANITOR): want true or false`}},
		{name: "log level", s: DefaultMemNode(), env: map[string]string{"KVD_LOG_LEVEL": "loud"},
			args: []string{"--name=a"}, want: []string{`log.level is "loud" (from KVD_LOG_LEVEL): want debug`}},
		{name: "no way in", s: DefaultMemNode(), args: []string{"--name=a", "--listen-tcp=off", "--shm-socket=off"}, want: []string{`listen-tcp is "off" (from --listen-tcp): shm-socket and listen-verbs are off too`}},
		{name: "several ports", s: DefaultMemNode(), args: []string{"--name=a", "--listen-tcp=127.0.0.1:1,127.0.0.1:x",
			"--listen-verbs=127.0.0.1:1, 192.0.2.1:2", "--advertise-verbs=h", "--rdma-device=a,b,c,d,e"},
			want: []string{`listen-tcp is "127.0.0.1:x" (from --listen-tcp): want a port`,
				`advertise-verbs is "h" (from --advertise-verbs): want one for each address of listen-verbs, of which there ` +
					`are 2`, `rdma-device is "a,b,c,d,e" (from --rdma-device): want an address of listen-verbs for each`,
				`rdma-device is "a,b,c,d,e" (from --rdma-device): want at most 4`}},
		{name: "several ports that others reach", s: DefaultMemNode(), args: []string{"--name=a",
			"--listen-tcp=127.0.0.1:1,192.0.2.1:2"}, want: []string{`listen-tcp is "192.0.2.1:2"`}},
		{name: "no directory", s: DefaultMemNode(), args: []string{"--name=a", "--directory="},
			want: []string{"directory is missing (from --directory): give"}},
		{name: "keep", s: DefaultMemNode(), args: []string{"--name=a", "--keep=maybe"},
			want: []string{`keep is "maybe" (from --keep): want on or off`}},
		{name: "huge page", s: DefaultMemNode(), args: []string{"--name=a", "--huge-pages=1GiB", "--memory=512MiB"},
			want: []string{"memory is 512MiB (from --memory): want at least one huge page of 1GiB"}},
		{name: "half of TLS", s: DefaultMemNode(), args: []string{"--name=a", "--tls-cert=c"},
			want: []string{"tls.ca is missing", "tls.key is missing"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for k, v := range tc.env {
				t.Setenv(k, v)
			}
			file := ""
			if tc.file != "" {
				file = write(t, "kvd.yaml", tc.file)
			}
			err := Load(tc.s, file, flags(t, tc.s, tc.args...))
			if err == nil {
				t.Fatal("loaded")
			}
			for _, w := range tc.want {
				if w = strings.ReplaceAll(w, "FILE", file); !strings.Contains(err.Error(), w) {
					t.Errorf("error lacks %q:\n%v", w, err)
				}
			}
		})
	}
}

func TestFileNames(t *testing.T) {
	for name, want := range map[string]string{
		"kvd":      "want a name that ends in .yaml, .toml or .json",
		"kvd.ini":  "want a name that ends in .yaml, .toml or .json",
		"kvd.yaml": "no such file",
	} {
		err := Load(DefaultDev(), filepath.Join(t.TempDir(), name), nil)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want the name and %q", name, err, want)
		}
	}
}

// Sections and settings without a value are as if they were not there.
func TestEmptyValues(t *testing.T) {
	m := DefaultMemNode()
	if err := Load(m, write(t, "m.yaml", "name: a\nmemory:\ntls:\n#  ca: x\nlog: {}\n"), nil); err != nil {
		t.Fatal(err)
	}
	want := DefaultMemNode()
	want.Name = "a"
	if d := cmp.Diff(want, m); d != "" {
		t.Error(d)
	}
	d := DefaultDev()
	if err := Load(d, write(t, "d.yaml", ""), nil); err != nil {
		t.Errorf("an empty file: %v", err)
	}
}

func TestInvalidIsRead(t *testing.T) {
	m := DefaultMemNode()
	err := Load(m, "", flags(t, m, "--memory=5B"))
	if !IsInvalid(err) || m.Memory != 5 {
		t.Errorf("memory %v, error %v: want 5B and an error of Validate", m.Memory, err)
	}
	err = Load(m, "", flags(t, m, "--memory=x"))
	if err == nil || IsInvalid(err) {
		t.Errorf("unreadable: %v, want an error that is not of Validate", err)
	}
	if p := (*Problem)(nil); !errors.As(err, &p) || p.Key != "memory" {
		t.Errorf("%v holds no Problem with the key", err)
	}
}

// Leases down to 50 ms will do, scrubs can be left out, and a janitor can be told to
// stay away.
func TestLimits(t *testing.T) {
	d := DefaultDirectoryNode()
	if err := Load(d, "", flags(t, d, "--id=a", "--data-dir=d", "--lease=50ms", "--scrub-interval=0s")); err != nil ||
		d.Lease != 50*time.Millisecond || d.ScrubInterval != 0 {
		t.Errorf("lease %v, scrub-interval %v: %v", d.Lease, d.ScrubInterval, err)
	}
	m := DefaultMemNode()
	if !m.Janitor {
		t.Error("a memory node has no janitor by itself")
	}
	if err := Load(m, "", flags(t, m, "--name=a", "--janitor=false")); err != nil || m.Janitor {
		t.Errorf("janitor %v: %v", m.Janitor, err)
	}
}

// A value that the user set can be told from an equal default.
func TestGiven(t *testing.T) {
	t.Setenv("KVD_MEMCACHED", DefaultMemcached)
	d := DefaultDev()
	given, err := LoadGiven(d, write(t, "d.yaml", "http: '"+DefaultHTTP+"'\n"), flags(t, d, "--redis="+DefaultRedis))
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]bool{"redis": true, "memcached": true, "http": true, "listen": false,
		"log.level": false} {
		if given(key) != want {
			t.Errorf("given(%q) = %v", key, !want)
		}
	}
	if given, err := LoadGiven(d, "/none.yaml", nil); err == nil || given != nil {
		t.Errorf("not read: %v", err)
	}
}

// A gateway for others needs no more than what keeps them out.
func TestGatewayListens(t *testing.T) {
	creds := []string{"--tls-ca=a", "--tls-cert=c", "--tls-key=k"}
	for _, args := range [][]string{
		{"--insecure", "--listen=0.0.0.0:6379", "--listen-memcached=0.0.0.0:11211"},
		append(creds, "--listen=off", "--listen-memcached=off", "--listen-tls=0.0.0.0:6380"),
		append(creds, "--listen-tls=0.0.0.0:6380", "--tls-clients=any", "--password=p"),
		append(creds, "--listen-tls=127.0.0.1:6380", "--tls-clients=any"),
		{"--listen=off", "--listen-memcached=off", "--listen-unix=/run/x/redis.sock"},
	} {
		g := DefaultGateway()
		if err := Load(g, "", flags(t, g, args...)); err != nil {
			t.Errorf("%q: %v", args, err)
		}
	}
}

// Each setting has one flag with a description, and defaults load as they are.
func TestFlags(t *testing.T) {
	for role, s := range defaults() {
		fs := flags(t, s)
		for _, f := range fields(s) {
			fl := fs.Lookup(f.flag())
			if fl == nil || fl.Usage == "" || f.key == "" {
				t.Errorf("%s: setting %q has no flag or no description", role, f.key)
			}
		}
		before, err := YAML(s, true)
		if err != nil {
			t.Fatal(err)
		}
		if err := Load(s, "", fs); err != nil && !IsInvalid(err) {
			t.Errorf("%s: defaults: %v", role, err)
		}
		if after, err := YAML(s, true); err != nil || string(before) != string(after) {
			t.Errorf("%s: loading nothing changed\n%s into\n%s (%v)", role, before, after, err)
		}
	}
}

// Load reads the output of YAML back to the same settings.
func TestYAML(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		for _, s := range defaults() {
			fill(t, reflect.ValueOf(s).Elem())
			out, err := YAML(s, true)
			if err != nil {
				t.Fatal(err)
			}
			f, err := os.CreateTemp("", "*.yaml")
			if err != nil {
				t.Fatal(err)
			}
			defer os.Remove(f.Name())
			if _, err := f.Write(out); err != nil {
				t.Fatal(err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
			got := reflect.New(reflect.TypeOf(s).Elem()).Interface().(Settings)
			if err := Load(got, f.Name(), nil); err != nil && !IsInvalid(err) {
				t.Fatalf("%v\n%s", err, out)
			}
			if d := cmp.Diff(s, got); d != "" {
				t.Fatalf("%s\n%s", d, out)
			}
		}
	})
}

// fill draws every setting of v.
func fill(t *rapid.T, v reflect.Value) {
	for i := range v.NumField() {
		f, name := v.Field(i), v.Type().Field(i).Name
		switch {
		case f.Kind() == reflect.Struct:
			fill(t, f)
		case f.Kind() == reflect.String:
			f.SetString(rapid.SampledFrom([]string{"", "off", "no", "1", "0x1f", "1e3", "null", "~", "a: b", "#",
				"2026-01-01", "é\n", " x ", "'", "{}"}).Draw(t, name))
		case f.Kind() == reflect.Bool:
			f.SetBool(rapid.Bool().Draw(t, name))
		case f.Kind() == reflect.Slice:
			f.Set(reflect.ValueOf(rapid.SliceOfN(rapid.SampledFrom([]string{"a:1", "1", "b, c", "", "off"}), 0, 3).Draw(
				t, name)))
		case f.Type() == durationType:
			f.SetInt(int64(rapid.Int64Range(math.MinInt64, math.MaxInt64).Draw(t, name)))
		case f.Type() == sizeType:
			f.SetInt(rapid.Int64Range(0, math.MaxInt64).Draw(t, name))
		default:
			f.SetInt(int64(rapid.Int32().Draw(t, name)))
		}
	}
}

func TestSize(t *testing.T) {
	for in, want := range map[string]Size{
		"0": 0, "0B": 0, "17": 17, "64GiB": 64 << 30, " 64 gib ": 64 << 30, "1.5GiB": 3 << 29, "512MiB": 512 << 20,
		"4KiB": 4096, "2TiB": 2 << 40, "9223372036854775807": math.MaxInt64, "0.5KiB": 512,
	} {
		if got, err := ParseSize(in); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "B", "GiB", "-1", "+1", "1GB", "64G", "1e3", "1/2", "0x10", "1.5", "0.3KiB", "1..2",
		".", "1 2", "8388608TiB", "9223372036854775808", "NaN", strings.Repeat("9", 40), "1_000"} {
		if got, err := ParseSize(in); err == nil {
			t.Errorf("ParseSize(%q) = %v, want an error", in, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		s := Size(rapid.Int64Range(0, math.MaxInt64).Draw(t, "bytes"))
		if got, err := ParseSize(s.String()); err != nil || got != s {
			t.Fatalf("ParseSize(%q) = %v, %v", s.String(), got, err)
		}
	})
}

func FuzzParseSize(f *testing.F) {
	f.Add("1.5GiB")
	f.Add("9223372036854775808")
	f.Fuzz(func(t *testing.T, in string) {
		s, err := ParseSize(in)
		if err == nil && s < 0 {
			t.Fatalf("ParseSize(%q) = %d", in, s)
		}
		if again, err2 := ParseSize(s.String()); err == nil && (err2 != nil || again != s) {
			t.Fatalf("%q is %d, printed %q, read %d, %v", in, s, s, again, err2)
		}
	})
}
