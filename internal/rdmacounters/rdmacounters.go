// Package rdmacounters reads the error and congestion counters of RDMA adapters from sysfs, and knows what each
// of them means.
//
// It leaves showing them to others: kvctl doctor says them with advice, a daemon's metrics say how they grow. Start
// with [Read], which gives the [Counter]s of every port, and [Lookup], which tells a counter's [Kind]. All functions
// may be called concurrently; the caller owns what they return.
//
// Files are taken for hostile: names that the package does not know are left out, and so are values that are no
// numbers. The names are those of the kernel's drivers: mlx5_ib, bnxt_re, irdma, rdma_rxe, and, below counters/,
// InfiniBand's PortCounters (InfiniBand Architecture Specification, volume 1, 16.1.3.5).
package rdmacounters

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Kind says what happened when a counter grows. The zero value is invalid.
type Kind uint8

const (
	// OutOfOrder: packets were lost or overtook each other, and the receiver said so.
	OutOfOrder Kind = 1 + iota
	// Timeout: an answer did not come, so a packet was sent again.
	Timeout
	// GivenUp: a connection ended since its packets were never answered.
	GivenUp
	// NotReady: a receiver had no buffer for a SEND.
	NotReady
	// Marked: a switch marked packets that arrived here (ECN), or this port told their sender (CNP).
	Marked
	// Slowed: this port was told to send more slowly, and did.
	Slowed
	// Ignored: this port was told to send more slowly, and did not.
	Ignored
	// Refused: a request named a key or a range that is not allowed.
	Refused
	// Damaged: packets came with wrong bits.
	Damaged
	// LinkLost: the link went down or had to recover.
	LinkLost
	// Dropped: the port had no room for packets, or no way on for them.
	Dropped
	// Waited: the port had something to send, and no leave to.
	Waited
)

// Kinds are all of them, the worst first.
var Kinds = []Kind{GivenUp, LinkLost, Damaged, Dropped, OutOfOrder, Timeout, NotReady, Refused, Ignored, Slowed, Marked,
	Waited}

func (k Kind) String() string {
	if k > Waited {
		k = 0
	}
	return [...]string{"invalid", "out_of_order", "timeout", "given_up", "not_ready", "marked", "slowed", "ignored",
		"refused", "damaged", "link_lost", "dropped", "waited"}[k]
}

// kinds are the counters that are read; each is below hw_counters or counters.
var kinds = map[string]Kind{
	// mlx5_ib
	"out_of_sequence": OutOfOrder, "packet_seq_err": OutOfOrder, "implied_nak_seq_err": OutOfOrder,
	"local_ack_timeout_err": Timeout, "duplicate_request": Timeout, "roce_adp_retrans": Timeout,
	"roce_adp_retrans_to": Timeout, "req_transport_retries_exceeded": GivenUp, "req_rnr_retries_exceeded": GivenUp,
	"rnr_nak_retry_err": NotReady, "out_of_buffer": NotReady,
	"np_ecn_marked_roce_packets": Marked, "np_cnp_sent": Marked, "rp_cnp_handled": Slowed, "rp_cnp_ignored": Ignored,
	"req_remote_access_errors": Refused, "resp_remote_access_errors": Refused, "req_remote_invalid_request": Refused,
	"rx_icrc_encapsulated": Damaged,
	// bnxt_re
	"oos_drop_count": OutOfOrder, "seq_err_naks_rcvd": OutOfOrder, "to_retransmits": Timeout, "dup_req": Timeout,
	"missing_resp": Timeout, "max_retry_exceeded": GivenUp, "rnr_naks_rcvd": NotReady, "rx_out_of_buffer": NotReady,
	"remote_access_err": Refused, "remote_invalid_req_err": Refused, "res_rx_invalid_rkey": Refused,
	"res_rx_no_perm": Refused, "res_rx_range_err": Refused, "rx_roce_errors": Damaged, "rx_roce_discards": Dropped,
	"rx_ecn_marked_pkts": Marked, "tx_cnp_pkts": Marked, "rx_cnp_pkts": Slowed,
	// irdma
	"tcpRetransSegs": Timeout, "tcpRxProtoErrors": Damaged, "ip4InDiscards": Dropped, "ip6InDiscards": Dropped,
	"RxECNMrkd": Marked, "cnpSent": Marked, "cnpHandled": Slowed, "cnpIgnored": Ignored,
	// rdma_rxe
	"out_of_seq_request": OutOfOrder, "rcvd_seq_err": OutOfOrder, "completer_retry_err": Timeout,
	"retry_exceeded_err": GivenUp, "retry_rnr_exceeded_err": GivenUp, "rcvd_rnr_err": NotReady,
	"send_rnr_err": NotReady, "send_err": Dropped,
	// counters/
	"symbol_error": Damaged, "port_rcv_errors": Damaged, "local_link_integrity_errors": Damaged,
	"excessive_buffer_overrun_errors": Dropped, "port_xmit_discards": Dropped, "port_rcv_switch_relay_errors": Dropped,
	"link_error_recovery": LinkLost, "link_downed": LinkLost, "port_xmit_wait": Waited,
}

// Lookup tells what a counter means; false: it is not one that Read gives.
func Lookup(name string) (Kind, bool) {
	k, ok := kinds[name]
	return k, ok
}

// Names are those of all counters that Read may give, sorted.
func Names() []string {
	var names []string
	for n := range kinds {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

// Counter is one port's count of one kind of event since the adapter's driver was loaded.
type Counter struct {
	Device string `json:"device"`
	Port   int    `json:"port"`
	Name   string `json:"counter"`
	Value  uint64 `json:"value"`
}

// Bounds of what Read gives, whatever is there. An adapter with SR-IOV has a device for each function.
const (
	maxDevices = 64
	maxPorts   = 4
	maxName    = 64 // IB_DEVICE_NAME_MAX
)

// Read gives the counters of every port, in the order of their names. root is /sys/class/infiniband. An error says
// what is missing from the counters that it comes with; a machine without adapters has neither.
func Read(root fs.FS) (cs []Counter, err error) {
	devices, err := fs.ReadDir(root, ".")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("adapters' counters: %w", err)
	}
	var errs []error
	if len(devices) > maxDevices {
		errs = append(errs, fmt.Errorf("adapters' counters: %d adapters, only %d are read", len(devices), maxDevices))
		devices = devices[:maxDevices]
	}
	for _, d := range devices {
		name := d.Name()
		if len(name) > maxName {
			errs = append(errs, fmt.Errorf("adapters' counters: a name of %d bytes", len(name)))
			continue
		}
		for port := 1; port <= maxPorts; port++ {
			got, err := ReadPort(root, name, port)
			cs, errs = append(cs, got...), append(errs, err)
		}
	}
	return cs, errors.Join(errs...)
}

// ReadPort gives the counters of one port, as Read does.
func ReadPort(root fs.FS, device string, port int) (cs []Counter, err error) {
	var errs []error
	for _, folder := range []string{"hw_counters", "counters"} {
		dir := path.Join(device, "ports", strconv.Itoa(port), folder)
		files, err := fs.ReadDir(root, dir)
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, fmt.Errorf("adapters' counters: %w", err))
			}
			continue // rxe has no counters/, an adapter may have no such port
		}
		for _, f := range files {
			if _, ok := kinds[f.Name()]; !ok ||
				slices.ContainsFunc(cs, func(c Counter) bool { return c.Name == f.Name() }) {
				continue
			}
			n, err := number(root, path.Join(dir, f.Name()))
			if err != nil {
				errs = append(errs, err)
				continue
			}
			cs = append(cs, Counter{device, port, f.Name(), n})
		}
	}
	slices.SortFunc(cs, func(a, b Counter) int { return strings.Compare(a.Name, b.Name) })
	return cs, errors.Join(errs...)
}

func number(root fs.FS, file string) (uint64, error) {
	f, err := root.Open(file)
	if err != nil {
		return 0, fmt.Errorf("adapters' counters: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 64))
	if err != nil {
		return 0, fmt.Errorf("adapters' counters: %w", err)
	}
	text := strings.TrimSpace(string(b))
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("adapters' counters: %s: %.30q is not a count", file, text)
	}
	return n, nil
}

// Growth is by how much after exceeds before; a counter that went back counts from zero.
func Growth(before, after []Counter) (grown []Counter) {
	for _, c := range after {
		i := slices.IndexFunc(before, func(b Counter) bool {
			return b.Device == c.Device && b.Port == c.Port && b.Name == c.Name
		})
		if i >= 0 && before[i].Value <= c.Value {
			c.Value -= before[i].Value
		}
		if c.Value > 0 {
			grown = append(grown, c)
		}
	}
	return grown
}
