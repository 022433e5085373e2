package config

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvd-project/kvd/internal/certs"
	"github.com/kvd-project/kvd/internal/identity"
)

// Defaults that several roles share.
const (
	DefaultDirectory = "127.0.0.1:7400"
	DefaultRaft      = "127.0.0.1:7401"
	DefaultHTTP      = "127.0.0.1:7480" // of `kvd dev`; elsewhere it is off
	DefaultRedis     = "127.0.0.1:6379"
	DefaultMemcached = "127.0.0.1:11211"
	DefaultBroker    = "/run/kvd/broker.sock" // where libkvd looks
	Off              = "off"
	Auto             = "auto"
)

// MinMemory is the least that a memory node lends: below it there is no room for a region.
const MinMemory = 16 << 20

// Bounds.
const (
	maxMemory   = Size(1 << 50) // of one memory node
	maxDevNodes = 64
	maxSocket   = 107 // bytes of a unix socket's path, unix(7)
	// A longer value than maxItem does not fit a record of the store; memcached -I takes no less than minItem.
	minItem, maxItem = Size(1 << 10), Size(512 << 20)
)

// Dev are the settings of `kvd dev`.
type Dev struct {
	Listen        string        `mapstructure:"listen" usage:"address where the directory serves gRPC, host:port on this machine"`
	Memnodes      int           `mapstructure:"memnodes" usage:"number of memory nodes; with two or more the namespace default keeps two copies"`
	Memory        Size          `mapstructure:"memory" usage:"memory that each memory node lends; taken when it is first used. Unless set, less where the machine or the control group has little"`
	Overcommit    bool          `mapstructure:"overcommit" usage:"let memory nodes lend more memory than the machine or the control group has, at the risk of being killed"`
	Lease         time.Duration `mapstructure:"lease" usage:"how long a session or a memory node lives without being heard"`
	EpochInterval time.Duration `mapstructure:"epoch-interval" usage:"least time between two reclaim epochs"`
	Redis         string        `mapstructure:"redis" usage:"address where the gateway speaks Redis's protocol, host:port on this machine, or off; unless set, another port if this one is taken"`
	Memcached     string        `mapstructure:"memcached" usage:"address where the gateway speaks memcached's protocol, likewise"`
	MemcachedDB   string        `mapstructure:"memcached-database" usage:"namespace that memcached's protocol works in, made as a cache if it is neither cache nor default. Empty: cache, whose keys clients of Redis's protocol see in database 0"`
	Broker        string        `mapstructure:"broker" usage:"socket of the broker for programs in C and Python: a path, auto or off"`
	HTTP          string        `mapstructure:"http" usage:"address where metrics, health and a page for people are served, likewise"`
	BufferMemory  Size          `mapstructure:"buffer-memory" usage:"memory that connections of both protocols share for unfinished commands, values on their way and unread replies, beyond some 64KiB each"`
	Archive       string        `mapstructure:"archive" usage:"folder of snapshots: all namespaces go there every minute and at the end, and come back at the start; or off"`
	Log           Log           `mapstructure:"log"`
}

// Directory are the settings of `kvd directory`.
type Directory struct {
	ID              string        `mapstructure:"id" usage:"this directory node's name, for good"`
	DataDir         string        `mapstructure:"data-dir" usage:"folder that holds everything the node remembers"`
	Listen          string        `mapstructure:"listen" usage:"address where clients, memory nodes and operators call, host:port"`
	RaftListen      string        `mapstructure:"raft-listen" usage:"address where other directory nodes call, host:port"`
	Advertise       string        `mapstructure:"advertise" usage:"what others are told instead of listen, host:port"`
	RaftAdvertise   string        `mapstructure:"raft-advertise" usage:"what other directory nodes are told instead of raft-listen, host:port"`
	Bootstrap       bool          `mapstructure:"bootstrap" usage:"start a new cluster with this node, unless data-dir holds one. With join, which then names all nodes that begin together and is alike for all, the first of them starts it"`
	Join            []string      `mapstructure:"join" usage:"directory nodes of the cluster to enter, unless a member already"`
	Lease           time.Duration `mapstructure:"lease" usage:"how long a session or a memory node lives without being heard"`
	EpochInterval   time.Duration `mapstructure:"epoch-interval" usage:"least time between two reclaim epochs"`
	ElectionTimeout time.Duration `mapstructure:"election-timeout" usage:"how long a node waits for its leader before it stands for election"`
	LastCopyWait    time.Duration `mapstructure:"last-copy-wait" usage:"how long a memory node that keeps its memory is waited for before an only copy is lost; 0: until an operator gives it up"`
	ScrubInterval   time.Duration `mapstructure:"scrub-interval" usage:"least time between two scrubs of memory that a session left behind uncleanly; 0: only when asked"`
	HTTPListen      string        `mapstructure:"http-listen" usage:"address where metrics, health and a page for people are served, host:port, or off"`
	MaxConnections  int           `mapstructure:"max-connections" usage:"how many connections to listen may be open at a time"`
	MaxPerAddress   int           `mapstructure:"max-connections-per-address" usage:"how many of them one address may have, other than this machine; 0: three quarters"`
	TLS             TLS           `mapstructure:"tls"`
	Identity        Identity      `mapstructure:"identity"`
	Insecure        bool          `mapstructure:"insecure" usage:"talk beyond this machine without TLS"`
	Log             Log           `mapstructure:"log"`
}

// MemNode are the settings of `kvd memnode`.
type MemNode struct {
	Name           string   `mapstructure:"name" usage:"this memory node's name, stable across restarts"`
	Directory      []string `mapstructure:"directory" usage:"addresses of directory nodes, host:port"`
	Memory         Size     `mapstructure:"memory" usage:"memory to lend; taken a region at a time, as the directory asks for it"`
	Populate       bool     `mapstructure:"populate" usage:"take all pages of a region when it is made, in the name of this process. False: each when it is first used, over shm in the name of the client that uses it"`
	Overcommit     bool     `mapstructure:"overcommit" usage:"lend more memory than the machine or the control group has, at the risk of being killed"`
	HugePages      string   `mapstructure:"huge-pages" usage:"page size of lent memory: off, 2MiB or 1GiB"`
	Lock           bool     `mapstructure:"lock" usage:"pin lent memory with mlock(2)"`
	ListenTCP      string   `mapstructure:"listen-tcp" usage:"address where the tcp provider listens, host:port, or off; several, with commas between, are as many endpoints"`
	AdvertiseTCP   string   `mapstructure:"advertise-tcp" usage:"what clients dial instead of listen-tcp: a host, or host:port; a list as of listen-tcp"`
	ListenVerbs    string   `mapstructure:"listen-verbs" usage:"address where RDMA connections are set up, host:port; auto: on the adapter's address, if there is one; or off. A list as of rdma-device"`
	AdvertiseVerbs string   `mapstructure:"advertise-verbs" usage:"what clients dial instead of listen-verbs: a host, or host:port; a list as of listen-verbs"`
	RDMADevice     string   `mapstructure:"rdma-device" usage:"RDMA adapter: NAME, NAME/PORT or NAME/PORT/GIDINDEX; empty: the one with listen-verbs's address, or the best. Several, with commas between, are as many endpoints"`
	RDMAConnect    string   `mapstructure:"rdma-connect" usage:"how RDMA connections are set up: tcp, cm (the RDMA connection manager), or auto, which is cm for iWARP adapters; clients follow"`
	RDMAAtomics    string   `mapstructure:"rdma-atomics" usage:"executor of atomics that come in by RDMA: nic, agent (a goroutine of this process; shm may be used beside it), or auto"`
	ShmSocket      string   `mapstructure:"shm-socket" usage:"socket of the shm provider: a path, @name, auto or off"`
	HealthListen   string   `mapstructure:"health-listen" usage:"address where the gRPC health service listens, host:port, or off"`
	HTTPListen     string   `mapstructure:"http-listen" usage:"address where metrics, health and a page for people are served, host:port, or off"`
	MaxConnections int      `mapstructure:"max-connections" usage:"how many connections to listen-tcp may be open at a time, and to listen-verbs and shm-socket likewise"`
	MaxPerAddress  int      `mapstructure:"max-connections-per-address" usage:"how many of them one address may have, other than this machine; 0: three quarters"`
	Keep           string   `mapstructure:"keep" usage:"on: a process of its own holds the memory. When the process that serves it dies nothing is lost, and another one is started; or off"`
	MemoryPath     string   `mapstructure:"memory-path" usage:"folder of a tmpfs or hugetlbfs, of this user alone, where lent memory is files that outlive this process, or its container. It takes the place of keep, and shm is off then; or off"`
	ControlSocket  string   `mapstructure:"control-socket" usage:"socket where root, and the user of this process, may choose the program of the next one that serves: a path, auto or off"`
	Domain         string   `mapstructure:"domain" usage:"label of the failure domain, such as the rack"`
	Janitor        bool     `mapstructure:"janitor" usage:"do the store's background jobs in this process too: new copies, splits, moves, repair"`
	RDMA           RDMA     `mapstructure:"rdma"`
	TLS            TLS      `mapstructure:"tls"`
	Identity       Identity `mapstructure:"identity"`
	Insecure       bool     `mapstructure:"insecure" usage:"talk beyond this machine without TLS"`
	Log            Log      `mapstructure:"log"`
}

// Janitor are the settings of `kvd janitor`.
type Janitor struct {
	Directory  []string      `mapstructure:"directory" usage:"addresses of directory nodes, host:port"`
	Provider   string        `mapstructure:"provider" usage:"force a provider to reach memory nodes by; empty: the best that both ends have"`
	Require    string        `mapstructure:"require" usage:"rdma: reach memory nodes by RDMA alone, and fail with the reason where that cannot be; empty: by what there is"`
	RDMADevice string        `mapstructure:"rdma-device" usage:"RDMA adapter: NAME, NAME/PORT or NAME/PORT/GIDINDEX; empty: the best. Several, with commas between, are all used"`
	Poll       time.Duration `mapstructure:"poll" usage:"pause between two questions for work while there is some"`
	Window     int           `mapstructure:"window" usage:"groups that one job works on at the same time"`
	HTTPListen string        `mapstructure:"http-listen" usage:"address where metrics, health and a page for people are served, host:port, or off"`
	RDMA       RDMA          `mapstructure:"rdma"`
	TLS        TLS           `mapstructure:"tls"`
	Identity   Identity      `mapstructure:"identity"`
	Insecure   bool          `mapstructure:"insecure" usage:"talk beyond this machine without TLS"`
	Log        Log           `mapstructure:"log"`
}

// Gateway are the settings of `kvd gateway`. They are read first, and Validate checks them: then they hold. Tags say
// what each is.
type Gateway struct {
	// The directory that it follows, and the namespaces of its databases.
	Directory []string `mapstructure:"directory" usage:"addresses of directory nodes, host:port"`
	Databases []string `mapstructure:"databases" usage:"namespaces to serve; SELECT n works in the n-th, from 0. A namespace that is named several times, or as name*count, is as many databases, whose keys change together"`

	// Where clients and other gateways call. Validate wants one way in at least.
	Listen          string `mapstructure:"listen" usage:"address where Redis's protocol is spoken in clear, host:port, or off"`
	ListenUnix      string `mapstructure:"listen-unix" usage:"socket where Redis's protocol is spoken, for this user and group: a path, or off"`
	ListenTLS       string `mapstructure:"listen-tls" usage:"address where Redis's protocol is spoken over TLS 1.3, host:port, or off"`
	TLSClients      string `mapstructure:"tls-clients" usage:"clients that may use listen-tls: certified (clients that show a certificate of tls.ca), or any"`
	ListenMemcached string `mapstructure:"listen-memcached" usage:"address where memcached's protocol is spoken in clear, host:port, or off"`
	ListenPeers     string `mapstructure:"listen-peers" usage:"address where other gateways of the same databases call, for published messages and keys that clients cache, host:port, or off: this gateway is alone then"`
	AdvertisePeers  string `mapstructure:"advertise-peers" usage:"what other gateways call instead of listen-peers, host:port"`

	// These are of memcached and of users. A file of passwords is read at the start and by SIGHUP; Password and
	// PasswordFile exclude each other.
	MemcachedDatabase string `mapstructure:"memcached-database" usage:"namespace that memcached's protocol works in; empty: the first of databases"`
	Password          string `mapstructure:"password" usage:"what AUTH must give, as Redis's requirepass; empty: nothing. Better in password-file than on the command line" secret:"true"`
	PasswordFile      string `mapstructure:"password-file" usage:"file whose only line is the password, read at the start and by SIGHUP; instead of password"`
	ACLFile           string `mapstructure:"acl-file" usage:"file of users in the form of Redis's aclfile, read at the start, by SIGHUP and by ACL LOAD; empty: there is user default alone"`
	MemcachedAuthFile string `mapstructure:"memcached-auth-file" usage:"file of users of memcached's protocol, a line NAME:PASSWORD for each, read at the start and by SIGHUP; empty: it asks for no password"`
	MemcachedItemSize Size   `mapstructure:"memcached-item-size" usage:"longest value that memcached's protocol stores, as its own setting -I; longer ones are refused"`
	ProtoMaxBulkLen   Size   `mapstructure:"proto-max-bulk-len" usage:"longest value, or argument, of Redis's protocol, as its own setting; a namespace may allow less"`

	// Bounds of what clients take: connections, memory in bytes, time.
	MaxConnections int           `mapstructure:"max-connections" usage:"how many connections may be open at a time, of each protocol"`
	MaxPerAddress  int           `mapstructure:"max-connections-per-address" usage:"how many of them one address may have, other than this machine; 0: three quarters"`
	BufferMemory   Size          `mapstructure:"buffer-memory" usage:"memory that connections of both protocols share for unfinished commands, values on their way and unread replies, beyond some 64KiB each"`
	Mirror         Size          `mapstructure:"mirror" usage:"memory, for each database, of images of the index: a key not used before is then read in one round trip. A key takes 9 to 13 bytes; 0: none"`
	ScriptTimeout  time.Duration `mapstructure:"script-timeout" usage:"time that a script of EVAL may run; then it ends with an error, and nothing of it is done"`
	ScriptMemory   Size          `mapstructure:"script-memory" usage:"memory that the values of a script of EVAL may take; it is part of buffer-memory"`

	// These are of Redis's protocol: what it shows, and how far it goes.
	TrackingKeys  int           `mapstructure:"tracking-keys" usage:"how many keys that clients cache by CLIENT TRACKING are known at a time; beyond that clients are told to forget some"`
	RedisCluster  bool          `mapstructure:"redis-cluster" usage:"be a Redis Cluster of one node that has all slots, for clients that speak to clusters only"`
	TrackingCheck time.Duration `mapstructure:"tracking-check" usage:"how often each of them is looked at for writes that passed no gateway, and for expiry"`
	SlowlogTime   time.Duration `mapstructure:"slowlog-log-slower-than" usage:"how long a command takes at least that SLOWLOG shows; 0s: every one is shown, negative: none"`
	SlowlogMaxLen int           `mapstructure:"slowlog-max-len" usage:"how many commands SLOWLOG shows at most; they have 4MiB of memory"`
	HotKeys       bool          `mapstructure:"hot-keys" usage:"show the keys that are used most, by Redis's protocol, on the page of http-listen: its readers need no password of Redis"`

	// How memory nodes are reached, as for every client.
	Provider   string `mapstructure:"provider" usage:"force a provider to reach memory nodes by; empty: the best that both ends have"`
	Require    string `mapstructure:"require" usage:"rdma: reach memory nodes by RDMA alone, and fail with the reason where that cannot be; empty: by what there is"`
	RDMADevice string `mapstructure:"rdma-device" usage:"RDMA adapter: NAME, NAME/PORT or NAME/PORT/GIDINDEX; empty: the best. Several, with commas between, are all used"`

	// As for every daemon.
	HTTPListen string   `mapstructure:"http-listen" usage:"address where metrics, health and a page for people are served, host:port, or off"`
	OTLP       bool     `mapstructure:"otlp" usage:"export the metrics, and spans of commands, by OTLP, as the variables OTEL_* say; for a kvd of make build-otel"`
	RDMA       RDMA     `mapstructure:"rdma"`
	TLS        TLS      `mapstructure:"tls"`
	Identity   Identity `mapstructure:"identity"`
	Insecure   bool     `mapstructure:"insecure" usage:"talk beyond this machine without TLS"`
	Log        Log      `mapstructure:"log"`
}

// Health are the settings of `kvd health`.
type Health struct {
	Timeout time.Duration `mapstructure:"timeout" usage:"how long to wait for the answer"`
	TLS     TLS           `mapstructure:"tls"`
}

// Log says what is logged, on stderr.
type Log struct {
	Level  string `mapstructure:"level" usage:"least level to log: debug, info, warn or error"`
	Format string `mapstructure:"format" usage:"form of the log: text or json"`
}

// Identity says how the certificates of other processes name their owners.
type Identity struct {
	TrustDomain string   `mapstructure:"trust-domain" usage:"trust domain whose SPIFFE ids name the owners of certificates; empty: any that tls.ca vouches for"`
	Units       []string `mapstructure:"units" usage:"roles of certificates without a SPIFFE id, by an organizational unit of the subject, such as storage=memnode"`
}

// RDMA says how an RDMA adapter's packets go, beside rdma-device: verbs.Options has the same with the same names. 0 and
// empty are the defaults.
type RDMA struct {
	TrafficClass int           `mapstructure:"traffic-class" usage:"traffic class of what this process sends by RDMA: a DSCP times 4, 0 to 255"`
	ServiceLevel int           `mapstructure:"service-level" usage:"InfiniBand's service level, 0 to 15; RoCE adapters may take it for the priority"`
	PKeyIndex    int           `mapstructure:"pkey-index" usage:"place of the partition in the port's P_Key table"`
	GIDType      string        `mapstructure:"gid-type" usage:"type of the GID to choose: RoCE v2, RoCE v1 or IB; empty: any"`
	GIDAddress   string        `mapstructure:"gid-address" usage:"address of the GID to choose, or its prefix, such as 10.1.0.0/16; empty: any"`
	MTU          int           `mapstructure:"mtu" usage:"path MTU in bytes: 256, 512, 1024, 2048 or 4096; 0: the port's"`
	RetryCount   int           `mapstructure:"retry-count" usage:"how often a packet is sent again that nobody acknowledges, 1 to 6; 0: 6"`
	RNRRetry     int           `mapstructure:"rnr-retry" usage:"how often a packet is sent again that finds no receive posted, 1 to 6; 0: 6"`
	PeerTimeout  time.Duration `mapstructure:"peer-timeout" usage:"about how long all tries of a packet take, 50ms to 1m; 0: 500ms"`
	HopLimit     int           `mapstructure:"hop-limit" usage:"how many routers a packet may pass over InfiniBand, 1 to 255; 0: 64. Over RoCE, Linux takes the route's"`
	FlowLabel    int           `mapstructure:"flow-label" usage:"flow label, 1 to 1048575; 0: one at random for each connection, which spreads them over paths"`
}

// TLS names PEM files. All empty: no TLS.
type TLS struct {
	CA   string `mapstructure:"ca" usage:"PEM file of the authorities that sign the cluster's certificates"`
	Cert string `mapstructure:"cert" usage:"PEM file of this process's certificate"`
	Key  string `mapstructure:"key" usage:"PEM file of the certificate's key"`
	CRL  string `mapstructure:"crl" usage:"PEM file of lists of certificates that the authorities of tls.ca have revoked; empty: none has been"`
	// ServerName is for processes whose addresses are nobody's to know when certificates are made, as those of pods.
	ServerName string `mapstructure:"server-name" usage:"name that the certificates of all processes that are called have, instead of the address that is called; their role is checked either way"`
}

var defaultLog = Log{Level: "info", Format: "text"}

// DefaultDev gives `kvd dev` without any settings.
func DefaultDev() *Dev {
	return &Dev{
		Listen: DefaultDirectory, Memnodes: 2, Memory: 1 << 30,
		Lease: 5 * time.Second, EpochInterval: 100 * time.Millisecond,
		Redis: DefaultRedis, Memcached: DefaultMemcached, Broker: Auto, HTTP: DefaultHTTP, BufferMemory: 512 << 20,
		Archive: Off,
		Log:     defaultLog,
	}
}

// DefaultDirectoryNode gives what `kvd directory` adds to its required settings.
func DefaultDirectoryNode() *Directory {
	return &Directory{
		Listen: DefaultDirectory, RaftListen: DefaultRaft, Join: []string{},
		Lease: time.Second, EpochInterval: 100 * time.Millisecond, ElectionTimeout: 300 * time.Millisecond,
		ScrubInterval: 30 * time.Second, HTTPListen: Off, MaxConnections: 10_000, Identity: Identity{Units: []string{}},
		Log: defaultLog,
	}
}

// DefaultMemNode gives what `kvd memnode` adds to its required settings.
func DefaultMemNode() *MemNode {
	return &MemNode{
		Directory: []string{DefaultDirectory}, Memory: 1 << 30, Populate: true, HugePages: Off,
		ListenTCP: "127.0.0.1:0", ListenVerbs: Off, RDMAConnect: Auto, RDMAAtomics: Auto, ShmSocket: Auto,
		HealthListen: Off, HTTPListen: Off,
		MaxConnections: 20_000, Keep: on, MemoryPath: Off, ControlSocket: Auto, Janitor: true,
		Identity: Identity{Units: []string{}}, Log: defaultLog,
	}
}

// DefaultJanitor gives `kvd janitor` without any settings.
func DefaultJanitor() *Janitor {
	return &Janitor{Directory: []string{DefaultDirectory}, Poll: 100 * time.Millisecond, Window: 8, HTTPListen: Off,
		Identity: Identity{Units: []string{}}, Log: defaultLog}
}

// DefaultGateway gives `kvd gateway` without any settings.
func DefaultGateway() *Gateway {
	return &Gateway{
		Directory: []string{DefaultDirectory}, Databases: []string{"cache"},
		Listen: DefaultRedis, ListenUnix: Off, ListenTLS: Off, TLSClients: "certified",
		ListenMemcached: DefaultMemcached, ListenPeers: "127.0.0.1:0",
		MemcachedItemSize: 1 << 20, ProtoMaxBulkLen: 64 << 20,
		MaxConnections: 10_000, BufferMemory: 1 << 30, ScriptTimeout: 5 * time.Second,
		ScriptMemory: 64 << 20,
		TrackingKeys: 100_000, TrackingCheck: 10 * time.Second, SlowlogTime: 10 * time.Millisecond, SlowlogMaxLen: 128,
		HTTPListen: Off, Identity: Identity{Units: []string{}}, Log: defaultLog,
	}
}

// DefaultHealth gives `kvd health` without any settings.
func DefaultHealth() *Health { return &Health{Timeout: 3 * time.Second} }

// checker gathers problems.
type checker struct{ errs []error }

func (c *checker) bad(key string, value any, format string, args ...any) {
	c.errs = append(c.errs, &Problem{Key: key, Value: show(value), Why: fmt.Sprintf(format, args...)})
}

func (c *checker) err() error { return errors.Join(c.errs...) }

func (c *checker) mirror(n Size) {
	if n > maxMemory {
		c.bad("mirror", n, "want at most %v", maxMemory)
	}
}

func (c *checker) required(key, value, why string) {
	if value == "" {
		c.errs = append(c.errs, &Problem{Key: key, Value: "missing", Why: why})
	}
}

func (c *checker) least(key string, v, least time.Duration) {
	if v < least {
		c.bad(key, v, "want at least %v", least)
	}
}

func (c *checker) memory(v Size) {
	if v < MinMemory {
		c.bad("memory", v, "want at least %v", Size(MinMemory))
	}
	if v > maxMemory {
		c.bad("memory", v, "want at most %v", maxMemory)
	}
}

// addr checks host:port with a port of at least low, and returns the host.
func (c *checker) addr(key, value string, low int) (host string, ok bool) {
	host, port, err := net.SplitHostPort(value)
	if err != nil {
		c.bad(key, value, "want host:port")
		return "", false
	}
	if p, err := strconv.Atoi(port); err != nil || p < low || p > 65535 {
		c.bad(key, value, "want a port from %d to 65535", low)
		return "", false
	}
	return host, true
}

// listen checks an address to listen at: what others can reach needs TLS or
// consent, and a wildcard needs another address to tell.
func (c *checker) listen(key, value, advertiseKey, advertise string, clear bool) {
	host, ok := c.addr(key, value, 0)
	if !ok {
		return
	}
	if !clear && !loopback(host) {
		c.bad(key, value, "others can reach it: set tls.ca, tls.cert and tls.key, or insecure to do without")
	}
	if advertiseKey != "" && advertise == "" && wildcard(host) {
		c.bad(key, value, "set %s to the address that others shall call", advertiseKey)
	}
}

// MaxWays is how many endpoints of a provider a memory node has at most.
const MaxWays = 4

// List takes a list with commas between apart. It has at least one element, which is empty if s is.
func List(s string) []string {
	all := strings.Split(s, ",")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return all
}

// listens checks addresses to listen at, and as many to tell, or none.
func (c *checker) listens(key, value, advertiseKey, advertise string, clear bool) {
	at, told := List(value), List(advertise)
	if len(at) > MaxWays {
		c.bad(key, value, "want at most %d addresses", MaxWays)
	}
	if advertise != "" && len(told) != len(at) {
		c.bad(advertiseKey, advertise, "want one for each address of %s, of which there are %d", key, len(at))
		return
	}
	for i, a := range at {
		tell := ""
		if advertise != "" {
			tell = told[i]
		}
		c.listen(key, a, advertiseKey, tell, clear)
	}
}

func (c *checker) socket(key, value string) {
	if len(value) > maxSocket {
		c.bad(key, value, "want at most %d bytes, which is what a socket's path holds", maxSocket)
	}
}

func (c *checker) http(value string, clear bool) {
	if value != Off {
		c.listen("http-listen", value, "", "", clear)
	}
}

func (c *checker) advertised(key, value string) {
	if value == "" {
		return
	}
	if host, ok := c.addr(key, value, 1); ok && wildcard(host) {
		c.bad(key, value, "want a host that others can call")
	}
}

// directory checks addresses to call.
func (c *checker) directory(addrs []string, clear bool) {
	if len(addrs) == 0 {
		c.required("directory", "", "give addresses of directory nodes, such as "+DefaultDirectory)
	}
	for _, a := range addrs {
		if host, ok := c.addr("directory", a, 1); ok && !clear && !loopback(host) {
			c.bad("directory", a, "it is on another machine: set tls.ca, tls.cert and tls.key, or insecure to do "+
				"without")
		}
	}
}

func (c *checker) tls(t TLS) {
	if t == (TLS{}) {
		return
	}
	c.required("tls.ca", t.CA, "tls needs ca, cert and key")
	c.required("tls.cert", t.Cert, "tls needs ca, cert and key")
	c.required("tls.key", t.Key, "tls needs ca, cert and key")
}

func (c *checker) identity(i Identity) {
	if _, err := identity.ParseMapping(i.TrustDomain, nil); err != nil {
		c.bad("identity.trust-domain", i.TrustDomain, "%v", err)
	}
	if _, err := identity.ParseMapping("", i.Units); err != nil {
		c.bad("identity.units", i.Units, "%v", err)
	}
}

func (c *checker) log(l Log) {
	if new(slog.Level).UnmarshalText([]byte(l.Level)) != nil {
		c.bad("log.level", l.Level, "want debug, info, warn or error")
	}
	if l.Format != "text" && l.Format != "json" {
		c.bad("log.format", l.Format, "want text or json")
	}
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func wildcard(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

// Validate implements [Settings].
func (d *Dev) Validate() error {
	var c checker
	if host, ok := c.addr("listen", d.Listen, 0); ok && !loopback(host) {
		c.bad("listen", d.Listen, "kvd dev serves its own machine: want 127.0.0.1, or kvd directory and kvd memnode")
	}
	if d.Memnodes < 1 || d.Memnodes > maxDevNodes {
		c.bad("memnodes", d.Memnodes, "want 1 to %d", maxDevNodes)
	}
	c.memory(d.Memory)
	c.least("lease", d.Lease, 50*time.Millisecond)
	c.least("epoch-interval", d.EpochInterval, 10*time.Millisecond)
	for _, l := range []struct{ key, addr string }{{"redis", d.Redis}, {"memcached", d.Memcached}, {"http", d.HTTP}} {
		if l.addr == Off {
			continue
		}
		if host, ok := c.addr(l.key, l.addr, 0); ok && !loopback(host) {
			c.bad(l.key, l.addr, "kvd dev serves its own machine: want 127.0.0.1 or off")
		}
	}
	if d.Broker != Off && d.Broker != Auto && !filepath.IsAbs(d.Broker) {
		c.bad("broker", d.Broker, "want an absolute path, auto or off")
	}
	c.socket("broker", d.Broker)
	if d.Archive == "" {
		c.bad("archive", d.Archive, "want a folder, or off")
	}
	c.buffers(d.BufferMemory)
	c.log(d.Log)
	return c.err()
}

// Validate implements [Settings].
func (d *Directory) Validate() error {
	var c checker
	c.required("id", d.ID, "name this directory node, such as d1")
	c.required("data-dir", d.DataDir, "name a folder for the node's state")
	clear := d.Insecure || d.TLS != (TLS{})
	c.listen("listen", d.Listen, "advertise", d.Advertise, clear)
	c.listen("raft-listen", d.RaftListen, "raft-advertise", d.RaftAdvertise, clear)
	c.advertised("advertise", d.Advertise)
	c.advertised("raft-advertise", d.RaftAdvertise)
	for _, a := range d.Join {
		if host, ok := c.addr("join", a, 1); ok && !clear && !loopback(host) {
			c.bad("join", a, "it is on another machine: set tls.ca, tls.cert and tls.key, or insecure to do without")
		}
	}
	if self := cmp.Or(d.Advertise, d.Listen); d.Bootstrap && len(d.Join) > 0 && !slices.Contains(d.Join, self) {
		c.bad("join", d.Join, "with bootstrap it names all directory nodes that begin together, and lacks this one, %s",
			self)
	}
	c.least("lease", d.Lease, 50*time.Millisecond)
	c.least("epoch-interval", d.EpochInterval, 10*time.Millisecond)
	c.least("election-timeout", d.ElectionTimeout, 50*time.Millisecond)
	if d.LastCopyWait != 0 {
		c.least("last-copy-wait", d.LastCopyWait, d.Lease)
	}
	if d.ScrubInterval != 0 {
		c.least("scrub-interval", d.ScrubInterval, 10*time.Millisecond)
	}
	c.connections(d.MaxConnections, d.MaxPerAddress)
	c.http(d.HTTPListen, clear)
	c.tls(d.TLS)
	c.identity(d.Identity)
	c.log(d.Log)
	return c.err()
}

// Validate implements [Settings].
func (m *MemNode) Validate() error {
	var c checker
	c.required("name", m.Name, "name this memory node, such as m1")
	clear := m.Insecure || m.TLS != (TLS{})
	c.directory(m.Directory, clear)
	c.memory(m.Memory)
	switch page, ok := pageBytes[m.HugePages]; {
	case !ok:
		c.bad("huge-pages", m.HugePages, "want off, 2MiB or 1GiB")
	case page != 0 && int64(m.Memory) < int64(page):
		c.bad("memory", m.Memory, "want at least one huge page of %s", m.HugePages)
	}
	if m.Keep != on && m.Keep != Off {
		c.bad("keep", m.Keep, "want on or off")
	}
	c.memoryPath(m)
	if s := m.ControlSocket; s != Auto && s != Off && !filepath.IsAbs(s) || len(s) > maxSocket {
		c.bad("control-socket", s, "want auto, off or an absolute path of at most %d bytes", maxSocket)
	}
	if m.ListenTCP == Off && m.ShmSocket == Off && m.ListenVerbs == Off {
		c.bad("listen-tcp", m.ListenTCP, "shm-socket and listen-verbs are off too: want at least one way in")
	}
	if m.ListenVerbs != Off && m.ListenVerbs != Auto {
		c.listens("listen-verbs", m.ListenVerbs, "advertise-verbs", m.AdvertiseVerbs, clear)
		if n, at := len(List(m.RDMADevice)), len(List(m.ListenVerbs)); n != at && m.RDMADevice != "" {
			c.bad("rdma-device", m.RDMADevice, "want an address of listen-verbs for each, there are %d: or auto", at)
		}
	}
	if n := len(List(m.RDMADevice)); n > MaxWays {
		c.bad("rdma-device", m.RDMADevice, "want at most %d", MaxWays)
	}
	if m.RDMAConnect != Auto && m.RDMAConnect != "tcp" && m.RDMAConnect != "cm" {
		c.bad("rdma-connect", m.RDMAConnect, "want auto, tcp or cm")
	}
	if m.RDMAAtomics != Auto && m.RDMAAtomics != "nic" && m.RDMAAtomics != "agent" {
		c.bad("rdma-atomics", m.RDMAAtomics, "want auto, nic or agent")
	}
	if m.ListenTCP != Off {
		c.listens("listen-tcp", m.ListenTCP, "advertise-tcp", m.AdvertiseTCP, clear)
	}
	if m.HealthListen != Off {
		c.listen("health-listen", m.HealthListen, "", "", clear)
	}
	c.connections(m.MaxConnections, m.MaxPerAddress)
	c.http(m.HTTPListen, clear)
	if s := m.ShmSocket; s == "" || s == "@" {
		c.bad("shm-socket", s, "want a path, @name, auto or off")
	}
	c.socket("shm-socket", m.ShmSocket)
	c.tls(m.TLS)
	c.identity(m.Identity)
	c.log(m.Log)
	return c.err()
}

// memoryPath wants a folder, and nobody who needs seals.
func (c *checker) memoryPath(m *MemNode) {
	switch {
	case m.MemoryPath == Off:
	case !filepath.IsAbs(m.MemoryPath):
		c.bad("memory-path", m.MemoryPath, "want the whole path of a folder of a tmpfs or hugetlbfs, or off")
	case m.ShmSocket != Off && m.ShmSocket != Auto:
		c.bad("shm-socket", m.ShmSocket, "want off beside memory-path: the memory's files have no seals, so that a "+
			"client of this machine that maps one could cut it off under the others")
	case m.ListenTCP == Off && m.ListenVerbs == Off:
		c.bad("memory-path", m.MemoryPath, "want listen-tcp or listen-verbs beside it: there is no shm-socket then")
	}
}

// on is the setting that is not Off.
const on = "on"

// maxWindow bounds what one job keeps in flight.
const maxWindow = 1024

// Validate implements [Settings].
func (j *Janitor) Validate() error {
	var c checker
	clear := j.Insecure || j.TLS != (TLS{})
	c.directory(j.Directory, clear)
	c.http(j.HTTPListen, clear)
	c.least("poll", j.Poll, 10*time.Millisecond)
	if j.Window < 1 || j.Window > maxWindow {
		c.bad("window", j.Window, "want 1 to %d", maxWindow)
	}
	c.tls(j.TLS)
	c.identity(j.Identity)
	c.log(j.Log)
	return c.err()
}

const (
	maxDatabases   = 64 // each may be a session
	maxConnections = 1 << 20
	// Each takes about half a KiB.
	maxTrackingKeys = 1 << 20
)

// databases checks a gateway's.
func (c *checker) databases(list []string) {
	n := 0
	for i, d := range list {
		name, count, err := parseDatabase(d)
		switch n += max(count, 1); {
		case err != nil:
			c.bad("databases", list, "%s: %v", d, err)
		case name == "":
			c.bad("databases", list, "number %d has no name", i)
		}
	}
	if n < 1 || n > maxDatabases {
		c.bad("databases", list, "want 1 to %d databases", maxDatabases)
	}
}

// parseDatabase reads name or name*count.
func parseDatabase(s string) (name string, count int, err error) {
	name, times, many := strings.Cut(s, "*")
	if !many {
		return name, 1, nil
	}
	if count, err = strconv.Atoi(times); err != nil || count < 1 || count > maxDatabases {
		return name, 0, fmt.Errorf("want name*count, with a count of 1 to %d", maxDatabases)
	}
	return name, count, nil
}

// DatabaseNames are the namespaces of the databases, by their numbers, after Validate.
func (g *Gateway) DatabaseNames() (names []string) {
	for _, d := range g.Databases {
		name, count, _ := parseDatabase(d) // Validate did
		names = append(names, slices.Repeat([]string{name}, count)...)
	}
	return names
}

// Validate implements [Settings].
func (g *Gateway) Validate() error {
	var c checker
	clear := g.Insecure || g.TLS != (TLS{})
	c.directory(g.Directory, clear)
	c.databases(g.Databases)
	// TLS towards the directory is no protection for what clients say in clear.
	for _, l := range []struct{ key, addr string }{{"listen", g.Listen}, {"listen-memcached", g.ListenMemcached}} {
		if l.addr == Off {
			continue
		}
		if host, ok := c.addr(l.key, l.addr, 0); ok && !g.Insecure && !loopback(host) {
			c.bad(l.key, l.addr, "others can reach it, and it is in clear, a password too: use listen-tls, or set "+
				"insecure to do without")
		}
	}
	if g.ListenUnix == "" {
		c.bad("listen-unix", g.ListenUnix, "want a path or off")
	}
	c.socket("listen-unix", g.ListenUnix)
	if g.Password != "" && g.PasswordFile != "" {
		c.bad("password-file", g.PasswordFile, "password is set too: want one of them")
	}
	if g.TLSClients != "certified" && g.TLSClients != "any" {
		c.bad("tls-clients", g.TLSClients, "want certified or any")
	}
	if g.ListenTLS != Off {
		host, ok := c.addr("listen-tls", g.ListenTLS, 0)
		switch {
		case ok && g.TLS == (TLS{}):
			c.bad("listen-tls", g.ListenTLS, "set tls.ca, tls.cert and tls.key")
		case ok && g.TLSClients == "any" && !g.HasUsers() && !g.Insecure && !loopback(host):
			c.bad("tls-clients", g.TLSClients, "others can reach listen-tls: set a password, password-file or "+
				"acl-file, or insecure to do without")
		}
	}
	if g.Listen == Off && g.ListenUnix == Off && g.ListenTLS == Off && g.ListenMemcached == Off {
		c.bad("listen", g.Listen, "listen-unix, listen-tls and listen-memcached are off too: want at least one way in")
	}
	if s := g.MemcachedItemSize; s < minItem || s > maxItem {
		c.bad("memcached-item-size", s, "want %v to %v", minItem, maxItem)
	}
	if s := g.ProtoMaxBulkLen; s < 1<<20 || s > maxItem {
		c.bad("proto-max-bulk-len", s, "want %v to %v", Size(1<<20), maxItem)
	}
	if g.ListenPeers != Off {
		c.listen("listen-peers", g.ListenPeers, "advertise-peers", g.AdvertisePeers, clear)
		c.advertised("advertise-peers", g.AdvertisePeers)
	}
	if g.TrackingKeys < 1 || g.TrackingKeys > maxTrackingKeys {
		c.bad("tracking-keys", g.TrackingKeys, "want 1 to %d", maxTrackingKeys)
	}
	c.least("tracking-check", g.TrackingCheck, 100*time.Millisecond)
	if g.SlowlogMaxLen < 1 {
		c.bad("slowlog-max-len", g.SlowlogMaxLen, "want > 0")
	}
	c.connections(g.MaxConnections, g.MaxPerAddress)
	c.buffers(g.BufferMemory)
	c.mirror(g.Mirror)
	if g.ScriptTimeout <= 0 {
		c.bad("script-timeout", g.ScriptTimeout, "want > 0")
	}
	if g.ScriptMemory < 1<<20 || g.ScriptMemory > g.BufferMemory {
		c.bad("script-memory", g.ScriptMemory, "want at least 1MiB, and at most buffer-memory")
	}
	c.http(g.HTTPListen, clear)
	c.tls(g.TLS)
	c.identity(g.Identity)
	c.log(g.Log)
	return c.err()
}

func (c *checker) connections(n, perAddress int) {
	if n < 1 || n > maxConnections {
		c.bad("max-connections", n, "want 1 to %d", maxConnections)
	}
	if perAddress < 0 || perAddress > maxConnections {
		c.bad("max-connections-per-address", perAddress, "want 1 to %d, or 0 for three quarters of max-connections",
			maxConnections)
	}
}

// HasUsers reports whether Redis's protocol asks who a client is.
func (g *Gateway) HasUsers() bool { return g.Password != "" || g.PasswordFile != "" || g.ACLFile != "" }

// minBuffers serves some connections with values of a few MiB.
const minBuffers Size = 64 << 20

func (c *checker) buffers(size Size) {
	if size < minBuffers {
		c.bad("buffer-memory", size, "want at least %v", minBuffers)
	}
}

// ListenTLSOptions are those of listen-tls's files. Clients that need not show a certificate are not
// asked for one. A certificate with which no client would talk is refused.
func (g *Gateway) ListenTLSOptions() certs.Options {
	return certs.Options{Files: g.TLS.files(), Anonymous: g.TLSClients == "any",
		Check: func(c *x509.Certificate) error {
			return servable(c, time.Now())
		}}
}

// servable reports why clients would refuse a server's certificate, whoever signed it.
func servable(c *x509.Certificate, now time.Time) error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := certs.CheckTime(c, now); err != nil {
		errs = append(errs, err)
	}
	if len(c.ExtKeyUsage)+len(c.UnknownExtKeyUsage) > 0 &&
		!slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageServerAuth) &&
		!slices.Contains(c.ExtKeyUsage, x509.ExtKeyUsageAny) {
		bad("its extended key usage lacks serverAuth")
	}
	if c.KeyUsage != 0 && c.KeyUsage&x509.KeyUsageDigitalSignature == 0 {
		bad("its key usage lacks digitalSignature, which TLS 1.3 needs")
	}
	if len(c.DNSNames)+len(c.IPAddresses) == 0 {
		bad("it names no host: clients look for a DNS name or an IP address among its subject alternative names")
	}
	return errors.Join(errs...)
}

// maxBrokerClients is bounded by descriptors: each program has several.
const maxBrokerClients = 4096

// maxBrokerViews is bounded by descriptors, too.
const maxBrokerViews = 4096

// maxBrokerPins is more than the keys of a store that one machine pins within 70 minutes.
const maxBrokerPins = 1 << 30

// Validate implements [Settings].
func (h *Health) Validate() error {
	var c checker
	c.least("timeout", h.Timeout, time.Millisecond)
	c.tls(h.TLS)
	return c.err()
}

var pageBytes = map[string]int{Off: 0, "2MiB": 2 << 20, "1GiB": 1 << 30}

// HugePageBytes is 0 for normal pages.
func (m *MemNode) HugePageBytes() int { return pageBytes[m.HugePages] }

// Load reads the files, once, for use by a server and by its calls to others. Both show a
// certificate. It gives nil if there is no TLS. Daemons take [TLS.Options].
func (t TLS) Load() (*tls.Config, error) {
	if t == (TLS{}) {
		return nil, nil
	}
	return t.files().LoadConfig()
}

func (t TLS) files() certs.Files { return certs.Files(t) }

// Options are those of t's files, for listeners and for calls to others; the zero value if there is no TLS.
func (t TLS) Options() certs.Options { return certs.Options{Files: t.files()} }

// Mapping is what i describes, after Validate.
func (i Identity) Mapping() identity.Mapping {
	m, _ := identity.ParseMapping(i.TrustDomain, i.Units) // Validate did
	return m
}

// SlogLevel is the level that l describes.
func (l Log) SlogLevel() (level slog.Level) {
	_ = level.UnmarshalText([]byte(strings.ToUpper(l.Level))) // Validate did
	return level
}

// Logger makes the logger that l describes, writing to out; its level may change. Above level
// debug it leaves out lines if there are too many of one message.
func (l Log) Logger(out io.Writer, level slog.Leveler) *slog.Logger {
	o := &slog.HandlerOptions{Level: level}
	if l.Format == "json" {
		return slog.New(limitLog(slog.NewJSONHandler(out, o)))
	}
	return slog.New(limitLog(slog.NewTextHandler(out, o)))
}
