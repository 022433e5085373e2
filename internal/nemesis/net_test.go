package nemesis

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
)

// network is one namespace per host around a bridge in a hub's namespace. Its
// names carry a random id, so that runs do not meet. It serves one goroutine.
type network struct {
	id    string
	hosts []string
	made  []string // namespaces
	cuts  map[[2]string]int
	slows map[string]int
}

func run(args ...string) error {
	cmd := exec.Command(args[0], args[1:]...)
	var e bytes.Buffer
	cmd.Stdout, cmd.Stderr = &e, &e
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(e.Bytes()))
	}
	return nil
}

// networkTools tells what this machine lacks for a network.
func networkTools(id string) error {
	for _, tool := range []string{"ip", "iptables", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w: install iproute2 and iptables", err)
		}
	}
	n, err := newNetwork(id+"t", []string{"a", "b"})
	if err == nil {
		err = errors.Join(n.cut("a", "b"), n.slow("a"))
	}
	return errors.Join(err, n.close())
}

// newNetwork returns what has been made also with an error.
func newNetwork(id string, hosts []string) (*network, error) {
	n := &network{id: id, hosts: hosts, cuts: map[[2]string]int{}, slows: map[string]int{}}
	hub := n.ns("hub")
	add := func(ns string) error {
		if err := run("ip", "netns", "add", ns); err != nil {
			return err
		}
		n.made = append(n.made, ns)
		return nil
	}
	if err := add(hub); err != nil {
		return n, err
	}
	steps := [][]string{
		{"ip", "-n", hub, "link", "add", "br0", "type", "bridge"},
		{"ip", "-n", hub, "link", "set", "br0", "up"},
	}
	for _, h := range hosts {
		ns := n.ns(h)
		if err := add(ns); err != nil {
			return n, err
		}
		steps = append(steps,
			[]string{"ip", "-n", hub, "link", "add", "v-" + h, "type", "veth", "peer", "name", "eth0", "netns", ns},
			[]string{"ip", "-n", hub, "link", "set", "v-" + h, "master", "br0", "up"},
			[]string{"ip", "-n", ns, "addr", "add", n.ip(h) + "/24", "dev", "eth0"},
			[]string{"ip", "-n", ns, "link", "set", "lo", "up"},
			[]string{"ip", "-n", ns, "link", "set", "eth0", "up"})
	}
	for _, s := range steps {
		if err := run(s...); err != nil {
			return n, err
		}
	}
	return n, nil
}

func (n *network) ns(host string) string { return "kvdnem-" + n.id + "-" + host }

// ip is the host's address; namespaces of other runs have the same.
func (n *network) ip(host string) string {
	return fmt.Sprintf("10.77.0.%d", 1+slices.Index(n.hosts, host))
}

// cut drops what from sends to to, and nothing in the other direction. Cuts
// count: as many mends undo them.
func (n *network) cut(from, to string) error {
	c := [2]string{from, to}
	if n.cuts[c]++; n.cuts[c] > 1 {
		return nil
	}
	return n.filter("-A", from, to)
}

func (n *network) mend(from, to string) error {
	c := [2]string{from, to}
	if n.cuts[c]--; n.cuts[c] > 0 {
		return nil
	}
	delete(n.cuts, c)
	return n.filter("-D", from, to)
}

func (n *network) filter(do, from, to string) error {
	return run("ip", "netns", "exec", n.ns(to), "iptables", "-w", do, "INPUT", "-s", n.ip(from), "-j", "DROP")
}

// eager lets the host send again, after a silence of whatever length, what was
// not acknowledged within a second (Linux 6.15; others wait longer).
func (n *network) eager(host string) error {
	const limit = "/proc/sys/net/ipv4/tcp_rto_max_ms"
	return run("ip", "netns", "exec", n.ns(host), "sh", "-c", "test ! -e "+limit+" || echo 1000 >"+limit)
}

// slow lets the host's link carry 1 Mbit/s, in both directions.
func (n *network) slow(host string) error {
	if n.slows[host]++; n.slows[host] > 1 {
		return nil
	}
	limit := []string{"root", "tbf", "rate", "1mbit", "burst", "4kb", "latency", "300ms"}
	return errors.Join(run(append([]string{"tc", "-n", n.ns(host), "qdisc", "add", "dev", "eth0"}, limit...)...),
		run(append([]string{"tc", "-n", n.ns("hub"), "qdisc", "add", "dev", "v-" + host}, limit...)...))
}

func (n *network) fast(host string) error {
	if n.slows[host]--; n.slows[host] > 0 {
		return nil
	}
	delete(n.slows, host)
	return errors.Join(run("tc", "-n", n.ns(host), "qdisc", "del", "dev", "eth0", "root"),
		run("tc", "-n", n.ns("hub"), "qdisc", "del", "dev", "v-"+host, "root"))
}

// close removes the namespaces, and with them their links and rules.
func (n *network) close() error {
	var errs []error
	for _, ns := range n.made {
		errs = append(errs, run("ip", "netns", "del", ns))
	}
	n.made = nil
	return errors.Join(errs...)
}
