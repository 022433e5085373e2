package gateway

import (
	"bytes"
	"fmt"
	"net"
	"strings"

	"github.com/kvd-project/kvd/client"
	"github.com/kvd-project/kvd/internal/redis/resp"
	"github.com/kvd-project/kvd/internal/redis/spec"
	"github.com/kvd-project/kvd/internal/redis/values"
	"github.com/kvd-project/kvd/internal/units"
)

// A gateway is no Redis Cluster: any of them has every key. Some clients ask a server whether it is one, with CLUSTER
// NODES or SLOTS, and refuse commands on several keys if it is, so by default these commands fail as in a Redis without
// cluster mode. With Options.Cluster the gateway is a cluster of one node that has all slots, for applications that
// speak to clusters only.

const slots = 16384

const errNoCluster = "ERR This instance has cluster support disabled"

func (g *Gateway) mode() string {
	if g.o.Cluster {
		return "cluster"
	}
	return "standalone"
}

// inCluster refuses a command without Options.Cluster.
// The option does not change while the gateway runs.
func inCluster(f connFunc) connFunc {
	return func(c *conn, w *resp.Writer, args [][]byte) error {
		if !c.g.o.Cluster {
			return refusal(errNoCluster)
		}
		return f(c, w, args)
	}
}

// clusterCommands are those that clients use to find their way. Those that change a cluster are not served.
func clusterCommands() performers {
	return performers{
		spec.CmdClusterInfo:   inCluster(cmdClusterInfo),
		spec.CmdClusterNodes:  inCluster(cmdClusterNodes),
		spec.CmdClusterSlots:  inCluster(cmdClusterSlots),
		spec.CmdClusterShards: inCluster(cmdClusterShards),
		spec.CmdClusterMyid: inCluster(func(c *conn, w *resp.Writer, _ [][]byte) error {
			w.BulkString(c.g.runID)
			return nil
		}),
		spec.CmdClusterLinks:    inCluster(replyEmpty),
		spec.CmdClusterReplicas: inCluster(cmdClusterReplicas),
		spec.CmdClusterSlaves:   inCluster(cmdClusterReplicas),
		spec.CmdClusterKeyslot: inCluster(func(_ *conn, w *resp.Writer, args [][]byte) error {
			w.Int(int64(slotOf(args[2])))
			return nil
		}),
		spec.CmdClusterCountkeysinslot: inCluster(cmdClusterCount),
		spec.CmdClusterGetkeysinslot:   inCluster(cmdClusterKeys),
		spec.CmdReadonly:               inCluster(replyOK),
		spec.CmdReadwrite:              inCluster(replyOK),
		spec.CmdAsking:                 inCluster(replyOK),
	}
}

// slotOf is the slot of a key, or of what is between its first braces: CRC-16 of the XMODEM protocol.
// It is between 0 and 16383. Nothing is kept by it: only clients count by slots.
func slotOf(key []byte) int {
	if _, tail, ok := bytes.Cut(key, []byte("{")); ok {
		if tag, _, ok := bytes.Cut(tail, []byte("}")); ok && len(tag) > 0 {
			key = tag
		}
	}
	crc := uint16(0)
	for _, b := range key {
		crc ^= uint16(b) << 8
		for range 8 {
			top := crc >> 15
			if crc <<= 1; top != 0 {
				crc ^= 0x1021
			}
		}
	}
	return int(crc % slots)
}

// endpoint is where the client has reached the gateway, which is where it finds it again. Unix sockets have none.
// Behind a load balancer it is the gateway's own address, by which its clients then go past that.
func (c *conn) endpoint() (ip string, port int) {
	if a, ok := c.local.(*net.TCPAddr); ok {
		return a.IP.String(), a.Port
	}
	return "", 0
}

// cmdClusterInfo tells of a cluster in good health: as long as the gateway answers, it is one.
func cmdClusterInfo(_ *conn, w *resp.Writer, _ [][]byte) error {
	lines := []string{"cluster_state:ok", "cluster_slots_assigned:16384", "cluster_slots_ok:16384",
		"cluster_slots_pfail:0", "cluster_slots_fail:0",
		"cluster_known_nodes:1", "cluster_size:1", "cluster_current_epoch:0", "cluster_my_epoch:0",
		"cluster_stats_messages_sent:0",
		"cluster_stats_messages_received:0", "total_cluster_links_buffer_limit_exceeded:0", ""}
	w.Verbatim("txt", strings.Join(lines, "\r\n"))
	return nil
}

// cmdClusterNodes is one line in the form of nodes.conf. The port of the cluster's bus is 0: there is none.
func cmdClusterNodes(c *conn, w *resp.Writer, _ [][]byte) error {
	ip, port := c.endpoint()
	w.Verbatim("txt", fmt.Sprintf("%s %s:%d@0 myself,master - 0 0 0 connected 0-16383\n", c.g.runID, ip, port))
	return nil
}

// cmdClusterSlots is one range of all slots, with the node and no metadata.
func cmdClusterSlots(c *conn, w *resp.Writer, _ [][]byte) error {
	ip, port := c.endpoint()
	w.Array(1)
	w.Array(3)
	w.Int(0)
	w.Int(slots - 1)
	w.Array(4)
	w.BulkString(ip)
	w.Int(int64(port))
	w.BulkString(c.g.runID)
	w.Array(0)
	return nil
}

// cmdClusterShards is the same in the form that Redis 7 prefers.
func cmdClusterShards(c *conn, w *resp.Writer, _ [][]byte) error {
	ip, port := c.endpoint()
	w.Array(1)
	w.Map(2)
	w.BulkString("slots")
	w.Array(2)
	w.Int(0)
	w.Int(slots - 1)
	w.BulkString("nodes")
	w.Array(1)
	w.Map(7)
	for _, field := range [][2]string{{"id", c.g.runID}, {"port", ""}, {"ip", ip}, {"endpoint", ip}, {"role", "master"},
		{"replication-offset", ""}, {"health", "online"}} {
		w.BulkString(field[0])
		switch field[0] {
		case "port":
			w.Int(int64(port))
		case "replication-offset":
			w.Int(0)
		default:
			w.BulkString(field[1])
		}
	}
	return nil
}

// cmdClusterReplicas knows one node, whose copies are the memory nodes' affair.
func cmdClusterReplicas(c *conn, w *resp.Writer, args [][]byte) error {
	if string(args[2]) != c.g.runID {
		return refusal("ERR Unknown node " + values.Clip(args[2], 128))
	}
	w.Array(0)
	return nil
}

// keysInSlot calls f with the keys of a slot, each once, until it returns false. It reads the whole index: keys are not
// kept by slots. The memory that their names may take is taken first, as for KEYS. The keys are those of the
// connection's database.
func (c *conn) keysInSlot(slot int64, f func(key []byte) bool) error {
	// Names count twice: in seen, and in the page that they came with.
	size, most := 0, 2*int64(c.g.o.OutputBytes)
	if err := c.take(most); err != nil {
		return err
	}
	defer c.share.Drop(most)
	seen := make(map[string]struct{}) // Scan may return a key twice
	err := c.pages(c.in, client.Cursor{}, client.ScanOptions{Count: scanPage, KeysOnly: true},
		func(kvs []client.KV, _ client.Cursor) (bool, error) {
			for _, kv := range kvs {
				if int64(slotOf(kv.Key)) != slot {
					continue
				}
				if _, ok := seen[string(kv.Key)]; ok {
					continue
				}
				if size += len(kv.Key) + 64; size > c.g.o.OutputBytes {
					return false, fmt.Errorf("%w: more than %s of keys in slot %d", client.ErrInvalid,
						units.Bytes(c.g.o.OutputBytes), slot)
				}
				if seen[string(kv.Key)] = struct{}{}; !f(kv.Key) {
					return false, nil
				}
			}
			return true, nil
		})
	return c.g.rest(err)
}

// cmdClusterCount reads the whole index, so it is for tools and not for every second.
func cmdClusterCount(c *conn, w *resp.Writer, args [][]byte) error {
	slot, ok := resp.ParseInt(args[2])
	switch {
	case !ok:
		return values.ErrNotInt
	case slot < 0 || slot >= slots:
		return refusal("ERR Invalid slot")
	}
	n := int64(0)
	if err := c.keysInSlot(slot, func([]byte) bool { n++; return true }); err != nil {
		return refusal(c.g.storeError(err))
	}
	w.Int(n)
	return nil
}

// cmdClusterKeys gives at most maxScanCount keys, whatever count says.
func cmdClusterKeys(c *conn, w *resp.Writer, args [][]byte) error {
	slot, ok1 := resp.ParseInt(args[2])
	count, ok2 := resp.ParseInt(args[3])
	switch {
	case !ok1 || !ok2:
		return values.ErrNotInt
	case slot < 0 || slot >= slots || count < 0:
		return refusal("ERR Invalid slot or number of keys")
	}
	var found [][]byte
	if count = min(count, maxScanCount); count > 0 {
		if err := c.keysInSlot(slot, func(key []byte) bool {
			found = append(found, key)
			return len(found) < int(count)
		}); err != nil {
			return refusal(c.g.storeError(err))
		}
	}
	w.Array(len(found))
	for _, k := range found {
		w.Bulk(k)
	}
	return nil
}
