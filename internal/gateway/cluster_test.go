package gateway

import (
	"net"
	"slices"
	"strings"
	"testing"
)

// TestNoCluster: by default a gateway answers as a Redis without cluster mode, so that no client takes it for a
// cluster.
func TestNoCluster(t *testing.T) {
	p := dial(t, "tcp", serve(t, Options{Databases: fake()}))
	for _, cmd := range []string{"CLUSTER INFO", "CLUSTER NODES", "CLUSTER SLOTS", "CLUSTER SHARDS", "CLUSTER MYID",
		"CLUSTER KEYSLOT k", "CLUSTER COUNTKEYSINSLOT 1", "READONLY", "READWRITE", "ASKING"} {
		p.want(t, "-ERR This instance has cluster support disabled\r\n", strings.Fields(cmd)...)
	}
	p.want(t, "-ERR wrong number of arguments for 'cluster' command\r\n", "CLUSTER")
	if info := p.do(t, "INFO"); !strings.Contains(info, "cluster_enabled:0\r\n") ||
		!strings.Contains(info, "redis_mode:standalone\r\n") {
		t.Errorf("INFO: %q", info)
	}
}

// TestCluster: a gateway that is told to be a cluster is one node with all slots, at the address at which it was
// reached.
func TestCluster(t *testing.T) {
	addr := serve(t, Options{Databases: fake(), Cluster: true})
	p := dial(t, "tcp", addr)
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	_, id, _ := strings.Cut(p.do(t, "CLUSTER", "MYID"), "\r\n")
	if id = strings.TrimSpace(id); len(id) != 40 {
		t.Errorf("id %q, want 40 digits", id)
	}
	text := id + " " + addr + "@0 myself,master - 0 0 0 connected 0-16383\n"
	for _, c := range []struct{ cmd, reply string }{
		{"CLUSTER NODES", bulk(text)},
		{"CLUSTER SLOTS", "*1\r\n*3\r\n:0\r\n:16383\r\n*4\r\n" + bulk(host) + ":" + port + "\r\n" + bulk(id) +
			"*0\r\n"},
		{"CLUSTER SHARDS", "*1\r\n*4\r\n" + bulk("slots") + "*2\r\n:0\r\n:16383\r\n" + bulk("nodes") + "*1\r\n*14\r\n" +
			bulk("id") + bulk(id) +
			bulk("port") + ":" + port + "\r\n" + bulk("ip") + bulk(host) + bulk("endpoint") + bulk(host) +
			bulk("role") + bulk("master") +
			bulk("replication-offset") + ":0\r\n" + bulk("health") + bulk("online")},
		{"CLUSTER LINKS", "*0\r\n"},
		{"CLUSTER REPLICAS " + id, "*0\r\n"},
		{"CLUSTER REPLICAS x", "-ERR Unknown node x\r\n"},
		// Redis's answers.
		{"CLUSTER KEYSLOT 123456789", ":12739\r\n"},
		{"CLUSTER KEYSLOT {a}b", ":15495\r\n"},
		{"CLUSTER KEYSLOT a", ":15495\r\n"},
		{"CLUSTER KEYSLOT x{}y", ":16116\r\n"},
		{"CLUSTER COUNTKEYSINSLOT 16384", "-ERR Invalid slot\r\n"},
		{"CLUSTER COUNTKEYSINSLOT -1", "-ERR Invalid slot\r\n"},
		{"CLUSTER COUNTKEYSINSLOT x", "-ERR value is not an integer or out of range\r\n"},
		{"CLUSTER GETKEYSINSLOT 0 -1", "-ERR Invalid slot or number of keys\r\n"},
		{"MSET {a}1 x {a}2 x b x", "+OK\r\n"},
		{"CLUSTER COUNTKEYSINSLOT 15495", ":2\r\n"},
		{"CLUSTER COUNTKEYSINSLOT 0", ":0\r\n"},
		{"CLUSTER GETKEYSINSLOT 15495 0", "*0\r\n"},
		{"READONLY", "+OK\r\n"},
		{"READWRITE", "+OK\r\n"},
		{"ASKING", "+OK\r\n"},
	} {
		p.want(t, c.reply, strings.Fields(c.cmd)...)
	}
	got := strings.Split(strings.TrimSuffix(p.do(t, "CLUSTER", "GETKEYSINSLOT", "15495", "5"), "\r\n"), "\r\n")
	if slices.Sort(got); !slices.Equal(got, []string{"$4", "$4", "*2", "{a}1", "{a}2"}) {
		t.Errorf("keys in slot 15495: %q", got)
	}
	if info := p.do(t, "INFO"); !strings.Contains(info, "cluster_enabled:1\r\n") ||
		!strings.Contains(info, "redis_mode:cluster\r\n") {
		t.Errorf("INFO: %q", info)
	}
	if info := p.do(t, "CLUSTER", "INFO"); !strings.Contains(info, "cluster_state:ok\r\n") {
		t.Errorf("CLUSTER INFO: %q", info)
	}
}
